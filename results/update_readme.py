"""Puts the recorded numbers into README.md, between its markers.

    results/update_readme.py [--check]

    <!-- table RECORD PROBLEM -->...<!-- end -->          a recorded table, a row per kernel
    <!-- ratio RECORD PROBLEM: FAST | SLOW -->...<!-- end -->   how many times faster FAST is
    <!-- cross RECORD PROBLEM: SLOW | RECORD PROBLEM: FAST -->...<!-- end -->   the same, across records
    <!-- peers RECORD [RECORD ...] -->...<!-- end -->   ours beside the peers, a row per problem

RECORD is a path below results/ without .json. With --check nothing is written, and the exit code says
whether README.md agrees with the records.
"""
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARKER = re.compile(
    r"(?P<open><!-- (?P<kind>table|ratio|cross|peers) (?P<what>.+?) -->).*?(?P<close><!-- end -->)", re.DOTALL
)


def number(value):
    """Four digits: 0.3346, 12.35, 765.6, 4323."""
    return f"{value:.{max(0, 4 - len(str(int(abs(value)))))}f}" if value >= 1 else f"{value:.4f}"


def problem_of(what):
    """"h200/1_matmul_basic square" -> the run, and the problem of that name in it."""
    record, name = what.split(" ", 1)
    run = json.loads((ROOT / "results" / f"{record}.json").read_text())
    return run, next(problem for problem in run["problems"] if problem["name"] == name)


def duration(ms):
    """A time with its unit: 6.069 us, 397.6 us, 1.347 ms."""
    return f"{number(1e3 * ms)} us" if ms < 1 else f"{number(ms)} ms"


PEERS = ("PyTorch", "torch.compile", "Triton")  # what a peer's name starts with, by its column


def side_by_side(problem):
    """Times in ms, None where there is none that was verified: `ours` (our fastest row,
    `ours_name`), `limit`, and one for each of PEERS; `ratio`, how many times as long as ours the
    fastest of these takes; `failed`, those of PEERS with a row that failed and none that did not."""

    def fastest(rows):
        rows = [row for row in rows if row["ok"]]
        best = min(rows, key=lambda row: row["ms"]["median"], default=None)
        return (best["name"], best["ms"]["median"]) if best else (None, None)

    kernels = problem["kernels"]
    line = {"limit": problem["limit_ms"], "failed": []}
    line["ours_name"], line["ours"] = fastest(row for row in kernels if row["role"] == "ours")
    for peer in PEERS:
        rows = [row for row in kernels if row["role"] == "peer" and row["name"].startswith(peer)]
        line[peer] = fastest(rows)[1]
        not_run = [row for row in problem.get("not_run", []) if row["name"].startswith(peer)]
        if line[peer] is None and rows + not_run:
            line["failed"].append(peer)
    times = [line[peer] for peer in PEERS if line[peer]]
    line["ratio"] = min(times) / line["ours"] if times and line["ours"] else None
    return line


def peers_table(records):
    runs = [json.loads((ROOT / "results" / f"{record}.json").read_text()) for record in records]
    versions = runs[0]["versions"]
    commits = list(dict.fromkeys(run["commit"][:9] for run in runs))
    lines = [
        f"{runs[0]['device']['name']}, PyTorch {versions['torch']}, Triton {versions['triton']}; "
        f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}.",
        "",
        f"| lesson | problem | ours | {' | '.join(PEERS)} | limit | best peer / ours |",
        "|---|---|" + "--:|" * (len(PEERS) + 3),
    ]
    for run in runs:
        for problem in run["problems"]:
            line = side_by_side(problem)
            # Lesson 9 has them in the problem's name.
            dims = [f"{name} = {extent}" for name, extent in problem["dims"].items()
                    if str(extent) not in problem["name"]]
            cells = [run["lesson"].split("_")[0], ", ".join([problem["name"], *dims])]
            for column in ("ours", *PEERS, "limit"):
                if line[column]:
                    cells.append(duration(line[column]))
                else:
                    cells.append("failed" if column in line["failed"] else "")
            cells.append(f"{line['ratio']:.2f}x" if line["ratio"] else "")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n" + "\n".join(lines) + "\n"


def milliseconds(problem, kernel):
    return next(row["ms"]["median"] for row in problem["kernels"] if row["name"] == kernel)


def table(run, problem):
    dims = ", ".join(f"{name} = {extent}" for name, extent in problem["dims"].items())
    unit = {"memory": "memory", "compute": "arithmetic"}[problem["limit"]]
    with_memory = any(kernel["memory_bytes"] for kernel in problem["kernels"])
    with_resources = any(kernel["resources"] for kernel in problem["kernels"])
    # Kernels of microseconds are timed in a CUDA graph.
    mode = problem["kernels"][0]["ms"]["mode"]
    unit_of_time, scale = ("us", 1e3) if mode == "graph" else ("ms", 1)
    timed = "20 calls in a CUDA graph, per call" if mode == "graph" else f"{mode.capitalize()} L2 cache"
    columns = [unit_of_time, "TFLOP/s", "GB/s", "% of limit", "speed", "error"]
    columns += ["memory, MB"] * with_memory + ["registers", "spilled, B", "warps/SM"] * with_resources
    lines = [
        f"{run['device']['name']}, {dims}, {problem['dtype']}; the limit is {unit}, "
        f"{number(scale * problem['limit_ms'])} {unit_of_time}. {timed}, "
        f"median of {problem['kernels'][0]['ms']['samples']}; commit {run['commit'][:9]}.",
        "",
        f"| kernel | {' | '.join(columns)} |",
        "|---" + "|--:" * len(columns) + "|",
    ]
    for kernel in problem["kernels"]:
        cells = [
            kernel["name"],
            number(scale * kernel["ms"]["median"]),
            number(kernel["tflops"]),
            number(kernel["gbps"]),
            f"{kernel['percent_of_limit']:.1f}",
            f"{kernel['speedup']:.2f}x",
            f"{kernel['error']:.1e}",
        ]
        if with_memory:
            cells.append(number(kernel["memory_bytes"] / 1e6) if kernel["memory_bytes"] else "")
        if with_resources:
            has = kernel["resources"]
            warps = has and has["threads"] // 32 * has["blocks_per_sm"]
            cells += [str(has["registers"]), str(has["local_bytes"]), str(warps)] if has else [""] * 3
        lines.append("| " + " | ".join(cells) + " |")
    return "\n" + "\n".join(lines) + "\n"


def render(match):
    kind, what = match["kind"], match["what"]
    if kind == "table":
        text = table(*problem_of(what))
    elif kind == "peers":
        text = peers_table(what.split())
    else:
        if kind == "ratio":
            problem, kernels = what.split(": ")
            fast, slow = ((problem, kernel) for kernel in kernels.split(" | "))
        else:
            slow, fast = (side.split(": ") for side in what.split(" | "))
        ms = [milliseconds(problem_of(problem)[1], kernel) for problem, kernel in (slow, fast)]
        text = f"{ms[0] / ms[1]:.2f}"
    return match["open"] + text + match["close"]


def main():
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = MARKER.sub(render, old)
    if "--check" in sys.argv[1:]:
        return old != new
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
