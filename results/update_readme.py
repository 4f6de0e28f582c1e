"""Puts the recorded numbers into README.md and slides/talk.md, between their markers.

    results/update_readme.py [--check]

    <!-- table RECORD PROBLEM -->...<!-- end -->          a recorded table, a row per kernel
    <!-- output RECORD PROBLEM -->...<!-- end -->         the same in the look of the lesson's output
    <!-- value RECORD PROBLEM: KERNEL | FIELD -->...<!-- end -->   a number of a kernel (see FIELDS)
    <!-- value RECORD PROBLEM | FIELD -->...<!-- end -->   a number of a problem
    <!-- ratio RECORD PROBLEM: FAST | SLOW -->...<!-- end -->   how many times faster FAST is
    <!-- cross RECORD PROBLEM: SLOW | RECORD PROBLEM: FAST -->...<!-- end -->   the same, across records
    <!-- formula RECORD PROBLEM: KERNEL | FORMULA -->...<!-- end -->   one number, in four digits
    <!-- formula RECORD PROBLEM | FORMULA | FORMAT -->...<!-- end -->   or in this format: .1f
    <!-- points (a line each:) RECORD PROBLEM: KERNEL -->...<!-- end -->  these under the roofline
    <!-- peers RECORD [RECORD ...] -->...<!-- end -->   ours beside the peers, a row per problem
    <!-- operations RECORD -->...<!-- end -->             what count_clifford.py counted

RECORD is a path below results/ without .json. FORMULA is arithmetic in Python on the problem's dims,
flops, min_bytes and limit_ms, on `device` (device.sms), and on the kernel's ms, tflops, gbps and
percent_of_limit: 2 * (K + H) * M / 1e9. In a table, where | ends a cell, write ; for it. With --check
nothing is written, and the exit code says whether both agree with the records.
"""
import json
import math
import pathlib
import re
import sys
from types import SimpleNamespace

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARKER = re.compile(
    r"(?P<open><!-- (?P<kind>table|output|value|ratio|cross|formula|points|peers|operations)\s(?P<what>.+?) -->)"
    r".*?(?P<close><!-- end -->)",
    re.DOTALL,
)
FIELDS = {  # of (run, problem), or of (run, problem, kernel)
    "TB/s of the device": lambda run, problem: run["device"]["peak_bytes_per_second"] * 1e-12,
    "operations per byte of the device": lambda run, problem: (
        problem["flops"] / problem["limit_ms"] * 1e3 / run["device"]["peak_bytes_per_second"]
    ),
    "operations per byte": lambda run, problem: problem["flops"] / problem["min_bytes"],
    "GFLOP": lambda run, problem: problem["flops"] * 1e-9,
    "least GB": lambda run, problem: problem["min_bytes"] * 1e-9,
    "limit ms": lambda run, problem: problem["limit_ms"],
    "limit us": lambda run, problem: problem["limit_ms"] * 1e3,
    "limit TFLOP/s": lambda run, problem: problem["flops"] / problem["limit_ms"] * 1e-9,
    "ms": lambda run, problem, kernel: kernel["ms"]["median"],
    "us": lambda run, problem, kernel: kernel["ms"]["median"] * 1e3,
    "TFLOP/s": lambda run, problem, kernel: kernel["tflops"],
    "TB/s": lambda run, problem, kernel: kernel["gbps"] * 1e-3,
    "% of limit": lambda run, problem, kernel: kernel["percent_of_limit"],
    "MB": lambda run, problem, kernel: kernel["memory_bytes"] * 1e-6,
}


def number(value):
    """Four digits: 0.3346, 12.35, 765.6, 4323."""
    return f"{value:.{max(0, 4 - len(str(int(abs(value)))))}f}" if value >= 1 else f"{value:.4f}"


def problem_of(what):
    """"h200/1_matmul_basic square" -> the run, and the problem of that name in it."""
    record, name = what.split(" ", 1)
    run = json.loads((ROOT / "results" / f"{record}.json").read_text())
    return run, next(problem for problem in run["problems"] if problem["name"] == name)


def kernel_of(problem, name):
    return next(row for row in problem["kernels"] if row["name"] == name)


def value(what):
    """The number that a value's marker asks for, in three digits: 0.398, 71.3, 1070."""
    place, field = what.split(" | ")
    place, _, kernel = place.partition(": ")
    run, problem = problem_of(place)
    rows = [kernel_of(problem, kernel)] if kernel else []
    return f"{float(f'{FIELDS[field](run, problem, *rows):.3g}'):g}"


def with_prefix(value):
    """1234567 -> "1.23 M", as the lessons do."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5:
            break
        value /= 1000
    return f"{value:.3g} {prefix}"


def output(run, problem):
    """What the lesson printed for a problem, in a code block."""
    dims = "".join(f" {name} = {extent}," for name, extent in problem["dims"].items())
    limit = {"memory": "memory", "compute": "arithmetic"}[problem["limit"]]
    lines = [
        f"{problem['name']}:{dims} {problem['dtype']}; {with_prefix(problem['flops'])}FLOP, "
        f"at least {with_prefix(problem['min_bytes'])}B",
        f"limit: {limit}, {problem['limit_ms']:.4g} ms",
    ]
    if problem["kernels"][0]["ms"]["mode"] == "graph":
        lines.append("timed: 20 calls in a CUDA graph, per call")
    with_memory = any(kernel["memory_bytes"] for kernel in problem["kernels"])
    width = max(6, *(len(row["name"]) for each in run["problems"] for row in each["kernels"]))
    memory = [kernel["memory_bytes"] for kernel in problem["kernels"] if kernel["memory_bytes"]]
    power = min(3, int(math.log10(min(memory))) // 3) if with_memory else 0
    unit = ("B", "kB", "MB", "GB")[power]
    lines.append(
        f"{'kernel':{width}} {'ms':>9} {'TFLOP/s':>8} {'GB/s':>7} {'%limit':>7} {'speed':>8} "
        f"{'error':>8}" + with_memory * f" {unit:>8}"
    )
    for kernel in problem["kernels"]:
        ms = kernel["ms"]["median"]
        digits = 5 if ms < 0.1 else 4 if ms < 1000 else 1
        line = f"{kernel['name']:{width}} {ms:9.{digits}f} {kernel['tflops']:8.4g} "
        line += f"{kernel['gbps']:7.4g} {kernel['percent_of_limit']:7.1f} {kernel['speedup']:7.4g}x "
        line += f"{kernel['error']:8.1e}"
        if with_memory:
            used = kernel["memory_bytes"]
            line += f" {f'{used / 1000**power:.4g}' if used else '-':>8}"
        lines.append(line + (" ok" if kernel["ok"] else " FAILED"))
    return "\n```text\n" + "\n".join(lines) + "\n```\n"


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


def operations_table(record):
    """What results/count_clifford.py counted: for each algebra a row for the product, one for the
    gradients; each count as a sum, with its parts."""
    counted = json.loads((ROOT / "results" / f"{record}.json").read_text())

    def sympy(count):
        parts = f"{count['multiplications']} x, {count['additions']} +"
        return f"{count['instructions']} ({parts})"

    def sass(count):
        parts = ", ".join(f"{number} {name}" for name, number in count.items() if number)
        return f"{sum(count.values())} ({parts})"

    lines = [
        f"nvcc {counted['nvcc']} for {counted['architecture']}, SymPy {counted['sympy']}; "
        f"commit {counted['commit'][:9]}.",
        "",
        "| algebra | terms | | lesson: its count | its SASS | SymPy: as written | after CSE | its SASS |",
        "|---|--:|---|" + "--:|" * 5,
    ]
    for algebra in counted["algebras"]:
        for what in ("product", "gradients"):
            of = algebra[what]
            cells = [f"Cl({algebra['algebra']})", str(algebra["terms"]), what, str(of["multiply_adds"]),
                     sass(of["sass"]), sympy(of["sympy"]["written"]), sympy(of["sympy"]["eliminated"]),
                     sass(of["sympy_sass"])]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n" + "\n".join(lines) + "\n"


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


def formula(what):
    """What a formula marker asks for, as text."""
    target, arithmetic, *form = re.split(" [|;] ", what)
    target, *kernel = target.split(": ")
    run, problem = problem_of(target)
    names = {"device": SimpleNamespace(**run["device"]), **problem["dims"]}
    names |= {name: problem[name] for name in ("flops", "min_bytes", "limit_ms")}
    if kernel:
        row = kernel_of(problem, kernel[0])
        names |= {name: row[name] for name in ("tflops", "gbps", "percent_of_limit")}
        names["ms"] = row["ms"]["median"]
    result = eval(arithmetic, {"__builtins__": {}}, names)  # what it may name is above
    return format(result, form[0]) if form else number(result)


def points(what):
    """A table of the kernels that `what` lists, with their places under the roofline."""
    lines = ["| lesson | problem | kernel | FLOP per byte | TFLOP/s | its roof, TFLOP/s |",
             "|---|---|---|--:|--:|--:|"]
    for target in what.split("\n"):
        place, kernel = target.split(": ")
        run, problem = problem_of(place)
        row = kernel_of(problem, kernel)
        # A step has work of its own, hence not the problem's flops / min_bytes.
        numbers = (1e3 * row["tflops"] / row["gbps"], row["tflops"],
                   1e2 * row["tflops"] / row["percent_of_limit"])
        cells = [run["lesson"].split("_")[0], problem["name"], kernel, *map(number, numbers)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n" + "\n".join(lines) + "\n"


def render(match):
    kind, what = match["kind"], match["what"]
    if kind == "table":
        text = table(*problem_of(what))
    elif kind == "output":
        text = output(*problem_of(what))
    elif kind == "value":
        text = value(what)
    elif kind == "formula":
        text = formula(what)
    elif kind == "points":
        text = points(what)
    elif kind == "peers":
        text = peers_table(what.split())
    elif kind == "operations":
        text = operations_table(what)
    else:
        if kind == "ratio":
            problem, kernels = what.split(": ")
            fast, slow = ((problem, kernel) for kernel in kernels.split(" | "))
        else:
            slow, fast = (side.split(": ") for side in what.split(" | "))
        ms = [
            kernel_of(problem_of(problem)[1], kernel)["ms"]["median"]
            for problem, kernel in (slow, fast)
        ]
        text = f"{ms[0] / ms[1]:.2f}"
    return match["open"] + text + match["close"]


def main():
    changed = False
    for path in (ROOT / "README.md", ROOT / "slides" / "talk.md"):
        if not path.exists():
            continue
        old = path.read_text()
        new = MARKER.sub(render, old)
        changed |= old != new
        if "--check" not in sys.argv[1:]:
            path.write_text(new)
    return changed and "--check" in sys.argv[1:]


if __name__ == "__main__":
    sys.exit(main())
