"""Asks the profiler what bounds some kernels: the counters of docs/profiling.md, "Which counter shows what bounds it".

    results/questions/bounds.py [--bin FOLDER] [--json results/h200/questions/bounds.json] [--stalls FILE]

ncu watches one verified launch of each, with its usual cold caches, and leaves the clock alone. Where a row of a lesson
has several launches the longest one of the named function counts. --stalls records for lesson 3's kernels what a warp
waits for: for how many cycles, for each of its instructions.
"""
import re
import sys

import answers

sys.path.insert(0, str(answers.ROOT / "results"))
from counters import number, of_row, profile  # noqa: E402

# Lesson, its N, and rows of one problem: their names, and the function's name that counts.
RUNS = (
    ("2_matmul_sharedmem", "4096", "square", {"tile": "", "stream-K": "stream"}),
    ("3_matmul_tensorcore", "4096", "square", {"lean": "", "double buffering": "", "rasterization": ""}),
    ("6_gating_fused", "4096", "layer",
     {"one thread per element": "", "tensor cores": "", "async tiles": "", "resident weights": "",
      "warp specialization": ""}),
    ("7_diffusion_fused", "131072", "forward", {"half fused": "project_slices", "split-K": "project_slices"}),
    ("8_spatial_gradients", "131072", "forward", {"cluster": "cluster_features"}),
)
PEAK = "avg.pct_of_peak_sustained"
COUNTERS = {
    "memory": f"dram__throughput.{PEAK}_elapsed",
    "L2": f"lts__throughput.{PEAK}_elapsed",
    "shared": f"l1tex__data_pipe_lsu_wavefronts_mem_shared.{PEAK}_elapsed",
    "tensor": f"sm__pipe_tensor_cycles_active.{PEAK}_active",
    "issue": f"smsp__issue_active.{PEAK}_active",
    "waiting for loads": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "warps": f"sm__warps_active.{PEAK}_active",
}
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = {"math pipe": "math_pipe_throttle", "shared memory": "short_scoreboard", "its queue": "mio_throttle",
          "loads": "long_scoreboard", "barrier": "barrier", "a fixed time": "wait", "another warp": "not_selected"}
TIME = "gpu__time_duration.sum"


def main():
    parser = answers.parser_of(__doc__)
    parser.add_argument("--stalls", type=answers.pathlib.Path, help="write the record of the waits to this file")
    options = parser.parse_args()
    answers.need_programs(options.bin, [run[0] for run in RUNS])
    stalls = {name: STALLED.format(of) for name, of in STALLS.items()}
    rows, waits, device, commit = [], [], None, None
    for lesson, n, problem, wanted in RUNS:
        pattern = "^(" + "|".join(wanted) + ")$"
        metrics = sorted({*COUNTERS.values(), TIME, *(stalls.values() if lesson.startswith("3_") else ())})
        record, seen = profile(options.bin.resolve() / lesson, [n, "--kernel", pattern], metrics, None)
        if not record:
            return 1
        device, commit = record["device"]["name"], record["commit"]
        for name, function in wanted.items():
            own = [row for row in seen if of_row(row, f"{problem}: {name}") and re.search(function, row["Kernel Name"])]
            if not own:
                sys.exit(f"the profiler has not seen {name} of {lesson}")
            longest = max(own, key=lambda row: number(row, TIME))
            of = {metric: number(longest, metric) for metric in metrics}
            label = f"{lesson.split('_')[0]}, {name}" + (f": {function}" if lesson.startswith("7_") else "")
            rows.append([label, *(of[metric] for metric in COUNTERS.values()), of[TIME] * 1e-6])
            if lesson.startswith("3_"):
                waits.append([label, *(of[metric] for metric in stalls.values())])
    answers.finish(options.json, device, commit,
                   "One launch under the profiler, with cold caches; in %, but for *waiting for loads* and *ms*",
                   ["lesson, kernel", *COUNTERS, "ms"], rows)
    answers.finish(options.stalls, device, commit, "Cycles that a warp waits for each of its instructions",
                   ["lesson, kernel", *STALLS], waits)
    return 0


if __name__ == "__main__":
    sys.exit(main())
