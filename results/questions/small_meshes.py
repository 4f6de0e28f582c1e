"""Where lesson 7's kernels spend their time: the profiler's time of each launch, and what its warps wait for.

    results/questions/small_meshes.py [--bin FOLDER] [--json results/h200/questions/small_meshes.json]

Each launch runs by itself, with the usual cold caches, so their times add up to more than the lesson's, in which a
launch begins while the one before it ends. See docs/lessons/7_diffusion_fused.md.
"""
import re
import sys

import answers

sys.path.insert(0, str(answers.ROOT / "results"))
from counters import number, of_row, profile  # noqa: E402

LESSON, PROBLEM = "7_diffusion_fused", "forward"
SIZES = ("1024", "4096", "131072")
ROWS = ("unfused", "half fused", "split-K", "one launch", "clusters")
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = {"loads": "long_scoreboard", "barrier": "barrier", "fence": "membar", "sleep": "sleeping",
          "shared": "short_scoreboard"}
COUNTERS = {
    "us": "gpu__time_duration.sum",
    "blocks": "launch__grid_size",
    "memory, %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2, %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue, %": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    **{name: STALLED.format(of) for name, of in STALLS.items()},
    "atomics": "lts__t_requests_op_red.sum",
}


def main():
    options = answers.parser_of(__doc__).parse_args()
    answers.need_programs(options.bin, [LESSON])
    rows, device, commit = [], None, None
    for n in SIZES:
        pattern = "^(" + "|".join(ROWS) + ")$"
        record, seen = profile(options.bin.resolve() / LESSON, [n, "--kernel", pattern], sorted(COUNTERS.values()), None)
        if not record:
            return 1
        device, commit = record["device"]["name"], record["commit"]
        for name in ROWS:
            launches = [row for row in seen if of_row(row, f"{PROBLEM}: {name}")]
            for row in launches:
                name = re.sub(r"(<unnamed>|\(anonymous namespace\))::", "", row["Kernel Name"])
                function = re.sub(r"<.*|\(.*|^void ", "", name).split("::")[-1]
                cells = [number(row, metric) for metric in COUNTERS.values()]
                cells[0] *= 1e-3
                rows.append([f"V = {n}, {name}: {function}", *cells])
    answers.finish(options.json, device, commit, "One launch under the profiler, by itself, with cold caches",
                   ["launch", *COUNTERS], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
