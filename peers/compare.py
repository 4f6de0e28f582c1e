#!/usr/bin/env python3
"""Runs lessons and their peers in turn on one GPU, and prints and records them side by side.

    peers/compare.py [--bin FOLDER] [--out FOLDER] [--rounds 3] [--sweep] [LESSON[:RUN] ...]

A peer is the same operator as PyTorch runs it, as torch.compile does, or as kernels of ours in
Triton. In each round the lesson's program runs, then its peers on the same problems: their shapes,
types and timing, verified in fp64 within the same tolerance. The record is the lesson's with the
peers' rows added: results/<gpu>/<lesson>[.RUN].peers.json. With --sweep it is the sizes of the lesson's
own --sweep, or some of them. LESSON:RUN is one run of a lesson. Needs PyTorch 2 with CUDA, and Triton.
The exit code is 1 if anything failed or was not verified.
"""
import argparse
import importlib
import math
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "results"))
sys.path.insert(0, str(ROOT / "peers"))

import record
import records
from update_readme import duration, side_by_side

# By lesson: the module of its operator, and the arguments of each RUN, named as in record.py.
LESSONS = {
    "6_gating_fused": ("gating", {"": []}),
    "7_diffusion_fused": ("diffusion", {"": [], "4096": ["4096"], "1024": ["1024"]}),
    "8_spatial_gradients": ("gradients", {"": [], "16384": ["16384"]}),
    "9_matmul_softmax": ("softmax", {"": ["--all"]}),
    "10_clifford_gp": ("clifford", {
        "": [],
        "2,0,0": ["--algebra", "2,0,0"],
        "small": ["1024", "--features", "128"],
    }),
    "bonus_clifford_fully_connected": ("connected", {
        "": [],
        "2,0,0": ["--algebra", "2,0,0"],
        "large": ["8192", "--features", "1024"],
        "large-2,0,0": ["8192", "--features", "1024", "--algebra", "2,0,0"],
        "small": ["1024", "--features", "128"],
    }),
    "bonus_attention": ("attention", {"": []}),
}


MESHES = {"V": (1024, 4096, 16384, 65536, 262144, 1048576)}
# With --sweep: the module, the runs, and of which sizes.
SWEEPS = {
    "7_diffusion_fused": ("diffusion", {"sweep": ["--sweep"]}, MESHES),
    "8_spatial_gradients": ("gradients", {"sweep": ["--sweep"]}, MESHES),
    "10_clifford_gp": ("clifford", {
        "sweep-3,0,0": ["--sweep", "--algebra", "3,0,0"],
        "sweep-2,0,0": ["--sweep", "--algebra", "2,0,0"],
    }, {}),
    "bonus_clifford_fully_connected": ("connected", {
        "sweep-3,0,0": ["--sweep", "--algebra", "3,0,0"],
        "sweep-2,0,0": ["--sweep", "--algebra", "2,0,0"],
    }, {}),
}


def run_lesson(program, arguments, samples):
    """The lesson's record; None, and its output is printed, if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder) / "run.json"
        command = [program, *arguments, "--device", "cuda", "--samples", samples, "--json", written]
        result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if result.returncode != 0:
            print(result.stdout + result.stderr, end="")
            return None
        return record.load_run(written)


def measure_peers(operator, run, options, round_number):
    """For each problem of the lesson's record: {peer's name: Measured}."""
    import measure
    import operators

    results = []
    start = time.monotonic()
    for problem in run["problems"]:
        if options.seconds and time.monotonic() - start > options.seconds:
            print(f"left out, for want of time: {problem['name']} {problem['dims']} and what follows")
            break
        seed = 1000 * round_number + run["seed"]
        case = operator.case(problem, operators.drawer(problem, seed, "cuda"))
        results.append(measure.measure(
            case, records.tolerance_of(problem), problem["dtype"] == "tf32",
            records.mode_of(problem), run["device"]["l2_bytes"], options.budget, options.samples,
            seed))
        del case
        measure.free_memory()
    return results


def compare(lesson, name, arguments, options, versions):
    """All rounds of one command. Returns the merged record, or None if the lesson itself failed."""
    operator = importlib.import_module(LESSONS[lesson][0])
    print(f"\n$ {lesson}", *arguments, flush=True)
    runs, peers = [], []
    seconds = {"lesson": 0.0, "peers": 0.0}
    for round_number in range(options.rounds):
        start = time.monotonic()
        # Few samples a round: the rounds are what makes them many.
        run = run_lesson(options.bin.resolve() / lesson, arguments, options.samples)
        if not run:
            return None
        sizes = SWEEPS[lesson][2] if options.sweep else {}
        run["problems"] = [problem for problem in run["problems"]
                           if all(problem["dims"][dim] in some for dim, some in sizes.items())]
        runs.append(run)
        middle = time.monotonic()
        peers.append(measure_peers(operator, runs[-1], options, round_number))
        seconds["lesson"] += middle - start
        seconds["peers"] += time.monotonic() - middle
        if round_number == 0:
            first = time.monotonic() - middle
    by_name = [{peer: [results[peer] for results in rounds] for peer in rounds[0]}
               for rounds in zip(*peers)]
    merged = records.merged_run(runs, by_name, versions)
    folder = options.out or ROOT / "results" / record.gpu_folder(merged["device"]["name"])
    suffix = f".{name}" if name else ""
    record.write_whole(folder / f"{lesson}{suffix}.peers.json", record.as_text(merged))
    print(f"{options.rounds} rounds: the lesson {seconds['lesson']:.0f} s, its peers "
          f"{seconds['peers']:.0f} s, {first:.0f} s of these in the first round, which compiles")
    return merged


def print_side_by_side(run):
    for problem in run["problems"]:
        dims = ", ".join(f"{name} = {extent}" for name, extent in problem["dims"].items())
        print(f"\n{problem['name']}: {dims}, {problem['dtype']}; {records.mode_of(problem)}")
        line = side_by_side(problem)
        if line["limit"]:
            print(f"  {'limit':40} {duration(line['limit']):>10}")
        for kernel in problem["kernels"]:
            if kernel["role"] == "peer" or kernel["name"] == line["ours_name"]:
                ok = "ok" if kernel["ok"] else "FAILED"
                name = kernel["name"] if kernel["role"] == "peer" else f"ours, {kernel['name']}"
                error = "NaN" if kernel["error"] is None else f"{kernel['error']:.1e}"
                print(f"  {name:40} {duration(kernel['ms']['median']):>10}   error {error} {ok}")
        for row in problem.get("not_run", []):
            print(f"  {row['name']:40} FAILED: {row['reason']}")
        if line["ratio"]:
            print(f"  {'best peer / ours':40} {line['ratio']:>9.2f}x")


def runs_named(words, lessons):
    """record.runs_named() of the runs in LESSONS or SWEEPS."""
    return record.runs_named(words, {lesson: entry[1] for lesson, entry in lessons.items()})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build" / "cuda")
    parser.add_argument("--out", type=pathlib.Path, help="instead of results/<gpu>")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=5, help="most of a kernel in a round")
    parser.add_argument("--budget", type=float, default=1000.0, metavar="MS",
                        help="for the samples of a problem's peers in a round")
    parser.add_argument("--sweep", action="store_true", help="of many sizes")
    parser.add_argument("--seconds", type=float, default=0,
                        help="for a run's peers in a round: problems that start later are left out")
    parser.add_argument("--default-mode", action="store_true",
                        help="without torch.compile's max-autotune, which takes minutes to compile")
    parser.add_argument("lessons", nargs="*", metavar="LESSON[:RUN]", help=", ".join(LESSONS))
    options = parser.parse_args()
    lessons = SWEEPS if options.sweep else LESSONS
    wanted, unknown = runs_named(options.lessons or lessons, lessons)
    if unknown:
        parser.error(f"no peers of {', '.join(unknown)}: choose of {', '.join(lessons)}")
    if options.rounds < 1 or options.samples < 1:
        parser.error("--rounds and --samples: at least one of each")
    if not (0 <= options.seconds < math.inf and 0 < options.budget < math.inf):
        parser.error("--seconds and --budget: times, which are positive and finite")

    try:
        import torch
        import torch._dynamo
        import torch._functorch.config
    except ImportError as error:
        parser.exit(3, f"error: {error}; see the README on what the peers need\n")
    if not torch.cuda.is_available():
        parser.exit(3, "error: PyTorch finds no GPU\n")
    record.need_programs(options.bin, dict.fromkeys(lesson for lesson, _, _ in wanted))
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = "none"
    versions = {"torch": torch.__version__, "triton": triton_version}
    # torch.compile keeps a version of a function per shape, by default 8 at most; and it frees what
    # backward needs once it has run, while it is to run again here.
    torch._dynamo.config.recompile_limit = 64
    torch._functorch.config.donated_buffer = False
    import operators
    if options.sweep:
        operators.for_many_sizes()
    if options.default_mode:
        operators.in_default_mode()

    failed = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for lesson, name, arguments in wanted:
            run = compare(lesson, name, arguments, options, versions)
            command = " ".join([lesson, *arguments])
            if not run:
                failed.append(f"{command}: the lesson itself")
                continue
            print_side_by_side(run)
            failed += [f"{command}: {problem}: {row}: {why}"
                       for problem, row, why in records.failures(run)]
    for failure in failed:
        print("FAILED", failure, file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(record.saying_mistakes(main))
