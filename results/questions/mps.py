"""Two programs whose blocks wait for each other, lesson 2's *stream-K*, at once on one GPU: without MPS, and with it.

    results/questions/mps.py [--bin FOLDER] [--json results/h200/questions/mps.json]

MPS is started for the time of the test, in a folder of its own, if nvidia-cuda-mps-control is there. A program that
has not ended after LIMIT seconds is ended.
"""
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import answers

LESSON, N, KERNEL, LIMIT = "2_matmul_sharedmem", "4096", "stream-K", 15


def run(program, count, environment):
    """`count` of them at once: [(exit code or None, seconds, ms)], of each."""
    with tempfile.TemporaryDirectory() as folder:
        start, started = time.time(), []
        for number in range(count):
            command = [program, N, "--device", "cuda", "--kernel", f"^{KERNEL}$", "--seconds", "2", "--samples", "50",
                       "--json", f"{folder}/{number}.json"]
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL,
                                            stderr=subprocess.DEVNULL))
        results = []
        for number, each in enumerate(started):
            try:
                code = each.wait(max(0.1, start + LIMIT - time.time()))
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
                code = None
            ms = None
            if code == 0:
                record = answers.load_run(answers.pathlib.Path(f"{folder}/{number}.json"))
                ms = record["problems"][0]["kernels"][0]["ms"]["median"]
                run.device = record["device"]["name"], record["commit"]
            results.append((code, time.time() - start, ms))
        return results


def ask(control, words, environment):
    """What the control daemon says, or nothing if it does not answer."""
    try:
        return subprocess.run([control], input=f"{words}\n", text=True, env=environment, timeout=20,
                              capture_output=True).stdout
    except subprocess.TimeoutExpired:
        return ""


def row(name, results):
    took = [ms for _, _, ms in results if ms]
    return [name, sum(code == 0 for code, _, _ in results), max(seconds for _, seconds, _ in results),
            max(took) if took else None]


def main():
    options = answers.parser_of(__doc__).parse_args()
    answers.need_programs(options.bin, [LESSON])
    program = options.bin.resolve() / LESSON
    environment = dict(os.environ)
    rows = [row("one program", run(program, 1, environment)),
            row("two programs, without MPS", run(program, 2, environment))]
    with tempfile.TemporaryDirectory() as folder:
        environment |= {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for name in ("pipe", "log"):
            os.mkdir(f"{folder}/{name}")
        control = shutil.which("nvidia-cuda-mps-control")
        code = subprocess.run([control, "-d"], env=environment).returncode if control else None
        if code == 0:
            try:
                rows.append(row("one program, with MPS", run(program, 1, environment)))
                rows.append(row("two programs, with MPS", run(program, 2, environment)))
            finally:
                servers = ask(control, "get_server_list", environment).split()
                ask(control, "quit -t 5", environment)
                for server in servers:  # one that is still there has a kernel that never ends
                    if os.path.exists(f"/proc/{server}"):
                        os.kill(int(server), signal.SIGKILL)
            for log in sorted(os.listdir(f"{folder}/log")):
                print(log, "|", open(f"{folder}/log/{log}").read()[-400:])
        else:
            print("MPS was not tried:", "nvidia-cuda-mps-control ended with " + str(code) if control
                  else "there is no nvidia-cuda-mps-control")
    device, commit = run.device
    answers.finish(options.json, device, commit, f"{KERNEL}, N = {N}, under a limit of {LIMIT} s",
                   ["", "ended", "s", "ms of a call"], rows)


if __name__ == "__main__":
    sys.exit(main())
