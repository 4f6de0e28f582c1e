"""Asks the profiler what bounds some kernels: the counters of docs/profiling.md, "Which counter shows what bounds it".

    results/questions/bounds.py [--bin FOLDER] [--json results/h200/questions/bounds.json] [--stalls FILE]
    results/questions/bounds.py [--bin FOLDER] --additions results/h200/questions/additions.json

ncu watches one verified launch of each, with its usual cold caches, and leaves the clock alone. Where a row of a lesson
has several launches the longest one of the named function counts. --stalls records for lesson 3's kernels what a warp
waits for: for how many cycles, for each of its instructions. --additions records, in place of all this, what the sums
of dQ in memory cost each kernel of bonus_attention_backward.
"""
import re
import sys

import answers

sys.path.insert(0, str(answers.ROOT / "results"))
from counters import L2_SECTORS, number, of_row, profile  # noqa: E402

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
GRADIENTS, WIDTHS = "bonus_attention_backward", ("128", "64")
FORMS = ("tensor cores", "warp specialization", "reduce-add", "deterministic")
# Of the copy engine, too. (Without srcunit_tex half of the sectors count twice: they go on to the cache's other half.)
ADDED, ADDERS = "lts__t_sectors_srcunit_tex_op_red.sum", f"lts__d_atomic_input_cycles_active.{PEAK}_elapsed"


def additions(options):
    """Records of each form how much the L2 cache adds, and for how much of the time; and what the launches take that
    make zeros before, and that finish dQ after."""
    answers.need_programs(options.bin, [GRADIENTS])
    rows = []
    for width in WIDTHS:
        arguments = ["4096", "--width", width, "--full", "--kernel", f"^({'|'.join(FORMS)})$"]
        metrics = [ADDED, ADDERS, L2_SECTORS, TIME]
        record, seen = profile(options.bin.resolve() / GRADIENTS, arguments, metrics, None)
        if not record:
            return 1
        for form in FORMS:
            own = [row for row in seen if of_row(row, f"bf16 full: {form}")]
            if len(own) != 3:
                sys.exit(f"the profiler has seen {len(own)} launches of {form}, which has 3")
            *others, longest = sorted(own, key=lambda row: number(row, TIME))
            gigabytes = [32e-9 * number(longest, metric) for metric in (ADDED, L2_SECTORS)]
            rows.append([f"d = {width}, {form}", *gigabytes, number(longest, ADDERS), 1e-6 * number(longest, TIME),
                         1e-6 * sum(number(row, TIME) for row in others)])
    answers.finish(options.additions, record["device"]["name"], record["commit"],
                   "Sums of dQ in memory, with 4096 queries and keys; one launch under the profiler, with cold caches",
                   ["kernel", "added in L2, GB", "L2, GB", "L2 adds, % of the time", "ms", "before and after, ms"], rows)
    return 0


def main():
    parser = answers.parser_of(__doc__)
    parser.add_argument("--stalls", type=answers.pathlib.Path, help="write the record of the waits to this file")
    parser.add_argument("--additions", type=answers.pathlib.Path, help="write the record of dQ's sums to this file")
    options = parser.parse_args()
    if options.additions:
        return additions(options)
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
