"""Some rows of the lessons with a cold L2 cache, a warm one, and in a graph.

    results/questions/l2.py [--bin FOLDER] [--json results/h200/questions/l2.json]
"""
import subprocess
import sys
import tempfile

import answers

RUNS = (
    ("7_diffusion_fused", ["16384"], "forward", "clusters"), ("7_diffusion_fused", ["131072"], "forward", "clusters"),
    ("6_gating_fused", ["16"], "layer", "warp specialization"),
    ("6_gating_fused", ["4096"], "layer", "warp specialization"),
    ("3_matmul_tensorcore", ["1024"], "square", "rasterization"),
    ("3_matmul_tensorcore", ["4096"], "square", "rasterization"),
    ("10_clifford_gp", ["1024", "--features", "128"], "forward", "rows streamed"),
)
MODES = ("cold", "hot", "graph")
SECONDS = 1


def main():
    options = answers.parser_of(__doc__).parse_args()
    answers.need_programs(options.bin, dict.fromkeys(run[0] for run in RUNS))
    rows, device, commit = [], None, None
    for lesson, arguments, problem, kernel in RUNS:
        us = []
        for mode in MODES:
            with tempfile.TemporaryDirectory() as folder:
                written = answers.pathlib.Path(folder) / "run.json"
                command = [options.bin.resolve() / lesson, *arguments, "--device", "cuda", "--kernel", f"^{kernel}$",
                           f"--{mode}", "--seconds", str(SECONDS), "--json", written]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                run = answers.load_run(written)
            device, commit = run["device"]["name"], run["commit"]
            (of,) = [each for each in run["problems"] if each["name"] == problem]
            (row,) = of["kernels"]
            us.append(1e3 * row["ms"]["median"])
        dims = ", ".join(f"{name} = {extent}" for name, extent in of["dims"].items())
        rows.append([f"{lesson.split('_')[0]}, {kernel}, {dims}", of["min_bytes"] * 1e-6, *us, us[0] / us[1]])
    answers.finish(options.json, device, commit, "us of a call; in a graph there are 20 calls",
                   ["lesson, kernel", "least MB", *MODES, "cold / hot"], rows)


if __name__ == "__main__":
    sys.exit(main())
