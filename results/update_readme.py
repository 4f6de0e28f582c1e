"""Puts the recorded numbers into README.md, the pages under docs/ and slides/talk.md.

    results/update_readme.py [--check]

Tables stand between markers, which are lines of their own:

    <!-- table RECORD PROBLEM -->...<!-- end -->          a recorded table, a row per kernel, in 8 columns
    <!-- full RECORD PROBLEM -->...<!-- end -->           the same with all columns
    <!-- rows (a line each:) RECORD PROBLEM: KERNEL | KERNEL -->...<!-- end -->  some kernels of each problem
    <!-- sizes TITLE | TITLE (a line each:) RECORD PROBLEM: KERNEL | KERNEL -->...<!-- end -->  times of
                                                          the same kernels, a row per problem; PROBLEM * is all of them
    <!-- output RECORD PROBLEM -->...<!-- end -->         the same in the look of the lesson's output
    <!-- points (a line each:) RECORD PROBLEM: KERNEL -->...<!-- end -->  these under the roofline
    <!-- peers RECORD [RECORD ...] -->...<!-- end -->   ours beside the peers, a row per problem;
    <!-- peers (a line each:) RECORD: PROBLEM, PROBLEM -->...<!-- end -->  only of these
    <!-- operations RECORD -->...<!-- end -->             what count_clifford.py counted
    <!-- counted RECORD -->...<!-- end -->                what the CPU backend or a profiler counted
    <!-- python RECORD [RECORD ...] -->...<!-- end -->    what operators/tests/gpu/times.py recorded; of others than
                                                          the first, ours
    <!-- choice RECORD -->...<!-- end -->                 what operators/tests/gpu/choice.py recorded
    <!-- answer RECORD -->...<!-- end -->                 what a script of results/questions recorded
    <!-- answer RECORD if recorded -->...<!-- end -->     the same; nothing as long as there is no such record
    <!-- limits (a line each:) RECORD PROBLEM -->...<!-- end -->  what the least time of these would be on other GPUs

A number inside a sentence has no marker. sentences.txt finds it by the words around it (see sentences.py), and says
which number it is:

    value RECORD PROBLEM: KERNEL | FIELD          a number of a kernel (see FIELDS)
    value RECORD PROBLEM | FIELD                  a number of a problem
    ratio RECORD PROBLEM: FAST | SLOW             how many times as fast FAST is, or ... | FORMAT
    cross RECORD PROBLEM: SLOW | RECORD PROBLEM: FAST   the same, across records
    formula RECORD PROBLEM: KERNEL | FORMULA      one number, in four digits
    formula RECORD PROBLEM | FORMULA | FORMAT     or in this format: .1f
    cell RECORD | ROW | COLUMN | FORMAT           a number of an `answer` record
    field RECORD | FIELD | FORMAT                 a number that such a record has by itself
    count RECORD | CONDITION                      how many problems of the record it holds for
    repeated GPU | NUMBER | FORMAT                how much times of two runs differ (see repeated)

RECORD is a path below results/ without .json. FORMULA is arithmetic in Python on the problem's dims,
flops, min_bytes and limit_ms, on `device` (device.sms), and on the kernel's ms (the median), p10 and
p90 (of its times), tflops, gbps, percent_of_limit, clock_mhz and steps: 2 * (K + H) * M / 1e9.
CONDITION is the same on ms and way, of each kernel by its name: ms["a"] < ms["b"], "x" in way["a"].
With --check nothing is written, and the exit code says whether all agree with the records: 1 if not, or if a number
looks measured and sentences.txt does not have it; 2 if a marker or an entry of sentences.txt cannot be filled in.
"""
import argparse
import math
import pathlib
import re
import statistics
import sys
from types import SimpleNamespace

import sentences
from record import DAMAGED, Mistake, load, saying_mistakes, what_lacks, write_whole

ROOT = pathlib.Path(__file__).resolve().parent.parent
KINDS = "table|full|rows|sizes|output|points|peers|operations|counted|python|choice|answer|limits"
MARKER = re.compile(
    rf"(?P<open>^<!-- (?P<kind>{KINDS})\s(?P<what>.+?) -->)$"
    r".*?(?P<close>^<!-- end -->)$",
    re.DOTALL | re.MULTILINE,
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
    "sectors per load": lambda run, problem, kernel: (
        kernel["counts"]["global_load_sectors"] / kernel["counts"]["global_load_requests"]
    ),
    "GB moved": lambda run, problem, kernel: 1e-9 * (
        kernel["counts"]["dram_read_bytes"] + kernel["counts"]["dram_write_bytes"]
    ),
    "MB read": lambda run, problem, kernel: kernel["counts"]["dram_read_bytes"] * 1e-6,
    "MB written": lambda run, problem, kernel: kernel["counts"]["dram_write_bytes"] * 1e-6,
    "L2 GB": lambda run, problem, kernel: 1e-9 * kernel["counts"]["l2_bytes"],
    "MHz": lambda run, problem, kernel: kernel["clock_mhz"],
    "ns of a step": lambda run, problem, kernel: 1e6 * kernel["ms"]["median"] / kernel["steps"],
    "cycles of a step": lambda run, problem, kernel: (
        1e3 * kernel["ms"]["median"] * kernel["clock_mhz"] / kernel["steps"]
    ),
}


def number(value):
    """Four digits: 0.3346, 12.35, 765.6, 4323."""
    return f"{value:.{max(0, 4 - len(str(int(abs(value)))))}f}" if value >= 1 else f"{value:.4f}"


def record_named(name):
    return load(ROOT / "results" / f"{name}.json")


def of_name(several, name, what):
    """That of several, problems or kernels, which has this name."""
    for each in several:
        if each["name"] == name:
            return each
    raise Mistake(f"the record has no {what} \"{name}\"")


def problem_of(what):
    """"h200/1_matmul_basic square" -> the run, and the problem of that name in it."""
    record, name = what.split(" ", 1)
    run = record_named(record)
    return run, of_name(run["problems"], name, "problem")


def kernel_of(problem, name):
    return of_name(problem["kernels"], name, "kernel")


def value(what):
    """The number that a value's source asks for, in three digits: 0.398, 71.3, 1070."""
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


def name_with_dims(problem):
    """A problem's name and its dims, unless it is a name of lesson 9, which has all of them: "TF32 64x128x10"."""
    dims = problem["dims"]
    if "x".join(map(str, dims.values())) in problem["name"].split():
        return problem["name"]
    return ", ".join([problem["name"], *(f"{name} = {extent}" for name, extent in dims.items())])


def peers_table(what):
    chosen = {}  # record -> its problems that are wanted; none: all
    if ": " in what:
        for line in what.split("\n"):
            record, problems = line.strip().split(": ")
            chosen[record] = problems.split(", ")
    records = list(chosen) or what.split()
    runs = [record_named(record) for record in records]
    versions = runs[0]["versions"]
    commits = list(dict.fromkeys(run["commit"][:9] for run in runs))
    lines = [
        f"{runs[0]['device']['name']}, PyTorch {versions['torch']}, Triton {versions['triton']}; "
        f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}.",
        "",
        f"| lesson | problem | ours | {' | '.join(PEERS)} | limit | best peer / ours |",
        "|---|---|" + "--:|" * (len(PEERS) + 3),
    ]
    for record, run in zip(records, runs):
        for problem in run["problems"]:
            if chosen and problem["name"] not in chosen[record]:
                continue
            line = side_by_side(problem)
            cells = [run["lesson"].split("_")[0], name_with_dims(problem)]
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
    counted = record_named(record)

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


def counts_table(record):
    """A table like the lesson's on the CPU, or of what the profiler saw in its place."""
    run = record_named(record)
    lines = []
    for problem in run["problems"]:
        rows = [kernel for kernel in problem["kernels"]
                if kernel["counts"] and kernel["counts"]["global_load_requests"]]
        if not rows:
            continue
        columns = ["loads", "sectors of one", "stores", "sectors of one", "L2, MB", "x least"]
        columns += ["memory, MB"] * ("dram_read_bytes" in rows[0]["counts"])
        dims = ", ".join(f"{name} = {extent}" for name, extent in problem["dims"].items())
        lines += [f"{run['device']['name']}, {dims}, {problem['dtype']}; commit {run['commit'][:9]}.", "",
                  f"| kernel | {' | '.join(columns)} | shared | conflicts |",
                  "|---" + "|--:" * (len(columns) + 2) + "|"]
        for kernel in rows:
            has = kernel["counts"]
            cells = [kernel["name"]]
            for access in ("load", "store"):
                requests, sectors = (has[f"global_{access}_{what}"] for what in ("requests", "sectors"))
                cells += [str(requests), f"{sectors / requests:.4g}" if requests else "-"]
            cells += [number(has["l2_bytes"] / 1e6), f"{has['l2_bytes'] / problem['min_bytes']:.1f}"]
            if "dram_read_bytes" in has:
                cells.append(number((has["dram_read_bytes"] + has["dram_write_bytes"]) / 1e6))
            cells += [str(has["shared_load_requests"] + has["shared_store_requests"]),
                      str(has["shared_load_conflicts"] + has["shared_store_conflicts"])]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n" + "\n".join(lines) + "\n"


def timed(problem):
    """What was timed: "Cold L2 cache"."""
    mode = problem["kernels"][0]["ms"]["mode"]
    return "20 calls in a CUDA graph, per call" if mode == "graph" else f"{mode.capitalize()} L2 cache"


def how(run, problem):
    """How a problem was timed: "Cold L2 cache, median of 50; commit 012345678."."""
    return f"{timed(problem)}, median of {problem['kernels'][0]['ms']['samples']}; commit {run['commit'][:9]}."


def how_several(chosen):
    """The same of several (run, problem). Those that take microseconds may have been timed in graphs, and others not."""
    ways = list(dict.fromkeys(timed(problem) for _, problem in sorted(chosen, key=lambda each: each[1]["limit_ms"])))
    samples = sorted({problem["kernels"][0]["ms"]["samples"] for _, problem in chosen})
    commits = list(dict.fromkeys(run["commit"][:9] for run, _ in chosen))
    return (f"{'; the longer ones with a '.join([ways[0], *(way[0].lower() + way[1:] for way in ways[1:])])}, "
            f"median of {' to '.join(str(each) for each in dict.fromkeys((samples[0], samples[-1])))}; "
            f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}.")


def moved_counts(run, problem, kernel):
    """The bytes that went through the GPU's memory, and those that multiprocessors asked the L2 cache for,
    by the profiler's record; None if it has none of this kernel, or if the profiler saw another of the kernel's ways
    than the one that was timed."""
    gpu = run["device"]["name"].removeprefix("NVIDIA ").lower().replace(" ", "-")
    path = ROOT / "results" / gpu / "counts" / f"{run['lesson']}.moved.json"
    if not path.exists():
        return None
    for each in load(path)["problems"]:
        if each["name"] == problem["name"] and each["dims"] == problem["dims"]:
            seen = kernel_of(each, kernel["name"])
            counts = seen["counts"] if seen.get("way") == kernel.get("way") else None
            return counts and (counts["dram_read_bytes"] + counts["dram_write_bytes"], counts["l2_bytes"])
    return None


def table(run, problem, full=False):
    """A row per kernel. Unless `full`, in at most 8 columns: without GB/s and spills; with what was
    moved where that is recorded, instead of TFLOP/s; with the clock of the tensor cores, which depends on the power; and
    with registers and warps elsewhere."""
    dims = ", ".join(f"{name} = {extent}" for name, extent in problem["dims"].items())
    limit = {"memory": "memory", "compute": "arithmetic"}[problem["limit"]]
    with_memory = any(kernel["memory_bytes"] for kernel in problem["kernels"])
    with_resources = any(kernel["resources"] for kernel in problem["kernels"])
    # Kernels of microseconds are timed in a CUDA graph.
    graph = problem["kernels"][0]["ms"]["mode"] == "graph"
    unit, scale = ("us", 1e3) if graph else ("ms", 1)
    columns = [unit, "TFLOP/s", "GB/s", "% of limit", "speed", "error"]
    columns += ["memory, MB"] * with_memory + ["registers", "spilled, B", "warps/SM"] * with_resources
    moved = {kernel["name"]: moved_counts(run, problem, kernel) for kernel in problem["kernels"]}
    large = max((value[0] for value in moved.values() if value), default=0) >= 1e8
    moved_in, l2_in = ("GB moved", "L2, GB") if large else ("MB moved", "L2, MB")
    at_clock = "% at that clock"
    if any(moved.values()):
        columns += [moved_in, "x least", l2_in]
    if problem["limit"] == "compute" and any(kernel.get("clock_mhz") for kernel in problem["kernels"]):
        columns += ["MHz", at_clock]
    if not full and (with_resources or len(columns) > 7):
        left_out = {"GB/s" if problem["flops"] else "TFLOP/s", "spilled, B"}
        if any(moved.values()):
            left_out |= {"TFLOP/s", "registers", "warps/SM", "MHz", at_clock}
            left_out |= {l2_in} if with_memory else set()
        elif run["lesson"] == "3_matmul_tensorcore":
            left_out |= {"registers", "warps/SM"}
        else:
            left_out |= {"MHz", at_clock} | ({"registers"} if with_memory else set())
        columns = [column for column in columns if column not in left_out]
    chain = all(kernel.get("steps") for kernel in problem["kernels"])
    step_ns, step_cycles = "ns a step", "cycles a step"
    if chain:
        columns = [unit, step_ns, step_cycles, "error"]  # "speed" would compare different places
    # Of a chain of loads the limit says nothing: no two of them are under way together.
    against = "" if chain else f"; the limit is {limit}, {number(scale * problem['limit_ms'])} {unit}"
    lines = [
        f"{run['device']['name']}, {dims}, {problem['dtype']}{against}. {how(run, problem)}",
        "",
        f"| kernel | {' | '.join(columns)} |",
        "|---" + "|--:" * len(columns) + "|",
    ]
    for kernel in problem["kernels"]:
        has = kernel["resources"]
        cells = {
            unit: number(scale * kernel["ms"]["median"]),
            "TFLOP/s": number(kernel["tflops"]),
            "GB/s": number(kernel["gbps"]),
            "% of limit": f"{kernel['percent_of_limit']:.1f}",
            "speed": f"{kernel['speedup']:.2f}x",
            "error": f"{kernel['error']:.1e}",
            "memory, MB": number(kernel["memory_bytes"] / 1e6) if kernel["memory_bytes"] else "",
            "registers": str(has["registers"]) if has else "",
            "spilled, B": str(has["local_bytes"]) if has else "",
            "warps/SM": str(has["threads"] // 32 * has["blocks_per_sm"]) if has else "",
            moved_in: "", "x least": "", l2_in: "", "MHz": "", at_clock: "",
        }
        if chain:
            cells |= {name: number(FIELDS[field](run, problem, kernel))
                      for name, field in ((step_ns, "ns of a step"), (step_cycles, "cycles of a step"))}
        if moved[kernel["name"]]:
            went, asked = moved[kernel["name"]]
            cells[moved_in], cells[l2_in] = (number(count / (1e9 if large else 1e6)) for count in (went, asked))
            least = 1e6 * kernel["gbps"] * kernel["ms"]["median"]  # a step has its own
            cells["x least"] = f"{went / least:.2f}"
        if clock := kernel.get("clock_mhz"):
            cells["MHz"] = f"{clock:.0f}"
            of_limit = kernel["percent_of_limit"] * run["device"]["clock_mhz"] / clock
            cells[at_clock] = f"{of_limit:.1f}"
        lines.append("| " + " | ".join([kernel["name"], *(cells[each] for each in columns)]) + " |")
    return "\n" + "\n".join(lines) + "\n"


def rows(what):
    """A table of the kernels that `what` lists, of one problem or of several."""
    lines = ["| kernel | ms | TFLOP/s | GB/s | limit, ms | % of limit | error |", "|---" + "|--:" * 6 + "|"]
    for target in what.split("\n"):
        place, names = target.strip().split(": ")
        run, problem = problem_of(place)
        for name in names.split(" | "):
            kernel = kernel_of(problem, name)
            numbers = (kernel["ms"]["median"], kernel["tflops"], kernel["gbps"], problem["limit_ms"])
            cells = [name, *map(number, numbers), f"{kernel['percent_of_limit']:.1f}", f"{kernel['error']:.1e}"]
            lines.append("| " + " | ".join(cells) + " |")
    dims = ", ".join(f"{name} = {extent}" for name, extent in problem["dims"].items())
    lines[:0] = [f"{run['device']['name']}, {dims}. {how(run, problem)}", ""]
    return "\n" + "\n".join(lines) + "\n"


def sizes(what):
    """Times of the same few kernels, a row per problem, and how each compares with the next."""
    titles, *targets = what.split("\n")
    titles = titles.strip().split(" | ")
    ratios = [f"{a} / {b}" for a, b in zip(titles, titles[1:])]
    lines = [f"| problem | limit | {' | '.join(titles + ratios)} |",
             "|---" + "|--:" * (1 + len(titles + ratios)) + "|"]
    chosen = []
    for target in targets:
        place, names = target.strip().split(": ")
        all_of = record_named(place.removesuffix(" *")) if place.endswith(" *") else None
        for run, problem in [(all_of, each) for each in all_of["problems"]] if all_of else [problem_of(place)]:
            chosen.append((run, problem))
            ms = [kernel_of(problem, name)["ms"]["median"] for name in names.split(" | ")]
            cells = [name_with_dims(problem), *map(duration, [problem["limit_ms"], *ms])]
            cells += [f"{a / b:.2f}x" for a, b in zip(ms, ms[1:])]
            lines.append("| " + " | ".join(cells) + " |")
    lines[:0] = [f"{chosen[0][0]['device']['name']}. {how_several(chosen)}", ""]
    return "\n" + "\n".join(lines) + "\n"


def python_table(what):
    """What operators/tests/gpu/times.py has recorded, a row per operator. Of further records ("portable-8.9") there is
    a column with ours ("ours as 8.9")."""
    run, *others = map(record_named, what.split())
    titles = ["PyTorch", "torch.compile", "ours", "PyTorch / ours", "compiled / ours"]
    titles += [f"ours as {name.rsplit('-', 1)[1]}" for name in what.split()[1:]]
    lines = [f"{run['device']['name']}, PyTorch {run['pytorch']}.", "",
             f"| | {' | '.join(titles)} |", "|---" + "|--:" * len(titles) + "|"]
    for problem in run["problems"]:
        ms = [kernel_of(problem, name)["ms"]["median"] for name in ("PyTorch", "compiled", "ours")]
        cells = [problem["name"], *map(duration, ms), *(f"{time / ms[2]:.2f}x" for time in ms[:2])]
        for other in others:
            own = kernel_of(of_name(other["problems"], problem["name"], "problem"), "ours")
            cells.append(duration(own["ms"]["median"]))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n" + "\n".join(lines) + "\n"


def choice_rows(label, of):
    """A row of how good the first guess was, and another one if FlashAttention was beside it."""
    rows = [[label, str(of["shapes"]), f"{of['geometric_mean']:.3f}", f"{of['above_1.1']:.1%}", f"{of['worst']:.2f}"]]
    for library in ("library", "flash"):
        if f"{library}_shapes" not in of:
            continue
        if library == "flash":
            rows.append([f"{label}, beside FlashAttention", str(of["flash_shapes"]), "", "", ""])
        rows[-1] += [f"{of[f'{library}_geometric_mean']:.2f}", f"{of[f'{library}_below_0.95']:.0%}",
                     f"{of[f'{library}_worst']:.2f}"]
    return ["| " + " | ".join(row + [""] * (8 - len(row))) + " |" for row in rows]


def choice_table(what):
    """What operators/tests/gpu/choice.py has recorded: rows for each function, and for its shapes that have a name."""
    run = record_named(what)
    lines = [f"{run['device']['name']}, PyTorch {run['pytorch']}.", "",
             "| | shapes | estimated / tried | above 1.1 | worst | library / ours | below 0.95 | worst |",
             "|---" + "|--:" * 7 + "|"]
    for name, of in run["functions"].items():
        if of["shapes"] == 0:
            continue
        lines += choice_rows(name, of)
        for label, named in of.get("named", {}).items():
            lines += choice_rows(f"{name}, {label}", named)
    return "\n" + "\n".join(lines) + "\n"


def answer_table(what):
    """What a script of results/questions has recorded."""
    record = what.removesuffix(" if recorded")
    if record != what and not (ROOT / "results" / f"{record}.json").exists():
        return "\n"
    run = record_named(record)
    lines = [f"{run['device']['name']}. {run['caption']}; commit {run['commit'][:9]}.", "",
             f"| {' | '.join(run['columns'])} |", "|---" + "|--:" * (len(run["columns"]) - 1) + "|"]
    for name, *cells in run["rows"]:
        shown = ["" if each is None else each if isinstance(each, str) else f"{float(f'{each:.4g}'):g}"
                 for each in cells]
        lines.append("| " + " | ".join([name, *shown]) + " |")
    return "\n" + "\n".join(lines) + "\n"


def limits_table(what):
    """The least times of problems, computed for each GPU of results/gpus.json: from its data sheet, and from what
    common/device.cpp says of its compute capability."""
    rates = {f"{major}.{minor}": int(fmas) for major, minor, _, _, fmas in re.findall(
        r"\{(\d+), (\d+), (\d+), (\d+), (\d+)\}", (ROOT / "common" / "device.cpp").read_text())}
    problems = [problem_of(line.strip()) for line in what.split("\n")]
    names = [f"lesson {run['lesson'].split('_')[0]}, {problem['name']}" for run, problem in problems]
    columns = ["GPU", "compute capability", "TFLOP/s, fp16", "TB/s", "L2, MB", *(f"{name}, ms" for name in names)]
    lines = [f"| {' | '.join(columns)} |", "|---" + "|--:" * (4 + len(names)) + "|"]
    for gpu in load(ROOT / "results" / "gpus.json")["gpus"]:
        flops = 2 * rates[gpu["compute_capability"]] * gpu["sms"] * gpu["clock_mhz"] * 1e6
        rate = gpu["gb_per_second"] * 1e9
        cells = [gpu["name"], gpu["compute_capability"], f"{flops / 1e12:.0f}", f"{rate / 1e12:.2f}", str(gpu["l2_mb"])]
        cells += [f"{1e3 * max(problem['flops'] / flops, problem['min_bytes'] / rate):.2f}" for _, problem in problems]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n" + "\n".join(lines) + "\n"


def cell(what):
    """A number of a record of results/questions, as text."""
    record, row, column, form = what.split(" | ")
    run = record_named(record)
    cells = next((each for each in run["rows"] if each[0] == row), None)
    if cells is None:
        raise Mistake(f'the record has no row "{row}"')
    return format(cells[run["columns"].index(column)], form)


def field(what):
    record, name, form = what.split(" | ")
    return format(record_named(record)[name], form)


def formula(what):
    """What a formula asks for, as text."""
    target, arithmetic, *form = what.split(" | ")
    target, *kernel = target.split(": ")
    run, problem = problem_of(target)
    names = {"device": SimpleNamespace(**run["device"]), **problem["dims"]}
    names |= {name: problem[name] for name in ("flops", "min_bytes", "limit_ms")}
    if kernel:
        row = kernel_of(problem, kernel[0])
        names |= {name: row.get(name) for name in ("tflops", "gbps", "percent_of_limit", "clock_mhz", "steps")}
        names |= {"ms": row["ms"]["median"], "p10": row["ms"].get("p10"), "p90": row["ms"].get("p90")}
    result = eval(arithmetic, {"__builtins__": {}}, names)  # what it may name is above
    return format(result, form[0]) if form else number(result)


def count(what):
    """The number of problems for which a condition holds, as text."""
    record, condition = what.split(" | ")
    problems = record_named(record)["problems"]
    held = 0
    for problem in problems:
        kernels = {kernel["name"]: kernel for kernel in problem["kernels"]}
        names = {"ms": {name: kernel["ms"]["median"] for name, kernel in kernels.items()},
                 "way": {name: kernel.get("way") or "" for name, kernel in kernels.items()}}
        held += bool(eval(condition, {"__builtins__": {}}, names))  # what it may name is above
    return str(held)


def repeated(what):
    """A number of all rows that a GPU's records have twice, as text. Such a row is in a lesson's record and beside its
    peers (LESSON.peers.json), from the same commit, and was computed in the same way. `rows` is the number of these
    rows. Of the ratios of their two times, the longer over the shorter, there are `median`, `p90` and `largest`."""
    gpu, wanted, form = what.split(" | ")

    def times(run):
        return {(problem["name"], str(problem["dims"]), row["name"], row.get("way")): row["ms"]["median"]
                for problem in run["problems"] for row in problem["kernels"]}

    ratios = []
    for path in sorted((ROOT / "results" / gpu).glob("*.peers.json")):
        beside, alone = load(path), load(path.with_name(path.name.replace(".peers", "")))
        if beside["commit"] == alone["commit"]:
            one, other = times(beside), times(alone)
            pairs = [(one[row], other[row]) for row in one if row in other]
            ratios += [max(pair) / min(pair) for pair in pairs]
    numbers = {"rows": len(ratios), "median": statistics.median(ratios), "largest": max(ratios),
               "p90": statistics.quantiles(ratios, n=10, method="inclusive")[-1]}
    return format(numbers[wanted], form)


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


def times_as_fast(slow, fast, form=".2f"):
    """How many times as fast FAST is as SLOW, both "RECORD PROBLEM: KERNEL", in this format."""
    ms = []
    for side in (slow, fast):
        problem, kernel = side.split(": ")
        ms.append(kernel_of(problem_of(problem)[1], kernel)["ms"]["median"])
    return format(ms[0] / ms[1], form)


def ratio(what):
    problem, kernels = what.split(": ")
    fast, slow, *form = kernels.split(" | ")
    return times_as_fast(f"{problem}: {slow}", f"{problem}: {fast}", *form)


def cross(what):
    return times_as_fast(*what.split(" | "))


TABLES = {
    "table": lambda what: table(*problem_of(what)),
    "full": lambda what: table(*problem_of(what), full=True),
    "output": lambda what: output(*problem_of(what)),
    "rows": rows, "sizes": sizes, "points": points, "peers": peers_table, "python": python_table,
    "choice": choice_table, "answer": answer_table, "limits": limits_table, "counted": counts_table,
    "operations": operations_table,
}
NUMBERS = {"value": value, "ratio": ratio, "cross": cross, "formula": formula, "count": count, "repeated": repeated,
           "cell": cell, "field": field}


def render(match):
    return match["open"] + TABLES[match["kind"]](match["what"]) + match["close"]


def saying_what_lacks(function, *arguments):
    """function(*arguments); where a record lacks something, or its name is wrong, a Mistake says what."""
    try:
        return function(*arguments)
    except (NameError, SyntaxError, *DAMAGED) as error:
        raise Mistake(what_lacks(error)) from error


def number_of(source):
    """The number of a line in sentences.txt, as text: "ratio RECORD PROBLEM: FAST | SLOW"."""
    kind, _, what = source.partition(" ")
    if kind not in NUMBERS:
        raise Mistake(f'there is no kind of number "{kind}"')
    return saying_what_lacks(NUMBERS[kind], what)


def pages():
    """All pages that have numbers of records, those of CONTRIBUTING.md aside, which has none."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "slides" / "talk.md"]
    return {path.relative_to(ROOT).as_posix(): path for path in paths if path.exists()}


def entries_of_pages():
    """What sentences.txt has for each page."""
    of_page = {page: [] for page in pages()}
    for entry in sentences.entries((ROOT / "results" / "sentences.txt").read_text()):
        if entry.page not in of_page:
            raise entry.says("there is no such page")
        of_page[entry.page].append(entry)
    return of_page


def page_of(page, entries):
    """A page as it is, and as the records want it."""
    old = pages()[page].read_text()

    def filled(marker):
        try:
            return saying_what_lacks(render, marker)
        except Mistake as error:
            line = old.count("\n", 0, marker.start()) + 1
            raise Mistake(f"{page}, line {line}, cannot be filled in: {error}") from error

    return old, MARKER.sub(filled, sentences.filled(old, MARKER, entries, number_of))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    of_page = entries_of_pages()
    texts = {page: page_of(page, entries) for page, entries in of_page.items()}
    wrong = [page for page, (old, new) in texts.items() if old != new]
    if check:
        for page in wrong:
            old, new = (text.splitlines() for text in texts[page])
            number = next(number for number, (a, b) in enumerate(zip(old, new), 1) if a != b)
            print(f"{page}, line {number}, is not what the records give: {new[number - 1]}", file=sys.stderr)
        loose = [(page, *place) for page, entries in of_page.items()
                 for place in sentences.unheld(texts[page][0], MARKER, entries)]
        for page, line, words in loose:
            print(f"{page}, line {line}: results/sentences.txt does not say what this number is: {words}", file=sys.stderr)
        return bool(wrong or loose)
    for page in wrong:
        write_whole(pages()[page], texts[page][1])
    return 0


if __name__ == "__main__":
    sys.exit(saying_mistakes(main))
