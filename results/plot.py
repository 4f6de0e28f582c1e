"""Draws the recorded runs: the SVG files of results/<gpu>/.

    results/plot.py [--check]

    ladder.svg                 lessons 1 to 3 and the library: TFLOP/s over N, and the limits
    roofline.svg               every lesson's kernels under the roofs of the device
    roofline.dots.svg          six of them, with their names
    <lesson>.svg               TFLOP/s of each kernel over the size, where there are several; attention's over S
    <lesson>.fused.svg         the fused kernel beside the unfused forms, the library, and peers
    <lesson>.shapes.svg        our last kernel's rate against the best library's, over the size
    <lesson>.sweep-....svg     heatmaps of a sweep over batch and features
    bonus_diffusion_gpus.svg   how much faster two GPUs are than one, and a model of 4 and 8

Peers are the rows of role "peer" in results/<gpu>/<lesson>*.peers.json, in problems of the lesson's
own names and dims; <lesson>.sweep*.peers.json stands in the figures of the sweep. The same records give
the same files, up to a coordinate's last digit. With --check nothing is written, and the exit code says
whether the SVG files are those that the records give.
"""
import argparse
import io
import math
import pathlib
import re
import sys

from record import DAMAGED, Mistake, load_run as load, saying_mistakes, what_lacks, write_whole

try:
    import matplotlib
except ImportError:
    if __name__ != "__main__":
        raise
    print("error: the plots need matplotlib (Debian's package python3-matplotlib; see install.sh)",
          file=sys.stderr)
    sys.exit(2)
matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

RESULTS = pathlib.Path(__file__).resolve().parent
# The palette of Okabe and Ito, which colour-blind readers can tell apart; without its yellow.
BLUE, VERMILLION, GREEN, ORANGE, SKY, PINK = (
    "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7",
)
GREY, PURPLE = "#6b6b6b", "#8c6bb1"
STYLE = {
    "svg.hashsalt": "results",  # the same names inside of the file each time
    "font.size": 17,
    "axes.titlesize": 19,
    "axes.labelsize": 18,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 3,
    "lines.markersize": 8,
    "axes.prop_cycle": matplotlib.cycler(
        color=[BLUE, VERMILLION, GREEN, ORANGE, PINK, SKY, "#4d4d4d", PURPLE]
    ),
}
# The curves of the ladder, from the bottom up.
LADDER = {
    "1_matmul_basic": (ORANGE, ["uncoalesced", "coalesced"]),
    "2_matmul_sharedmem": (GREEN, ["tile", "registers", "ahead", "cuBLAS fp32"]),
    "3_matmul_tensorcore": (BLUE, ["wmma shared", "double buffering", "rasterization", "cuBLAS fp16"]),
}
# What a row of LADDER was called in records from before lessons 2 and 3 had one idea a kernel.
FORMER_NAMES = {"ahead": "async", "rasterization": "tile scheduler"}
# What stands beside each other: for a figure of its lesson, (title, record, problem) of each panel.
FUSED = {
    "6_gating_fused": [
        ("4194304 rows", "", "layer"),
        ("4096 x 4096 x 4096", "", "square"),
    ],
    "7_diffusion_fused": [
        ("131072 vertices", "", "forward"),
        ("131072 vertices", "", "backward"),
        ("1024 vertices", ".1024", "forward"),
    ],
    "8_spatial_gradients": [
        ("131072 vertices", "", "forward"),
        ("131072 vertices", "", "backward"),
    ],
    "9_matmul_softmax": [
        ("rows x inputs x classes", "", "TF32 64x128x10"),
        ("rows x inputs x classes", "", "TF32 1024x1024x100"),
        ("rows x inputs x classes", "", "TF32 8192x4096x8192"),
    ],
    "10_clifford_gp": [
        ("3-D", "", "forward"),
        ("3-D", "", "forward + backward"),
    ],
}
# Lessons of which all problems are drawn over a size that is not the first of their dims: its name, what
# other dims are in the figure, and which kernels.
OVER = {"bonus_attention": ("S", {"d": 128}, ("library", "cuDNN", "tensor cores", "warp specialization",
                                               "ping-pong", "tile scheduler")),
        "bonus_attention_backward": ("S", {"d": 128}, ("library", "cuDNN", "tensor cores", "reduce-add",
                                                        "deterministic"))}
# The dots with names under the roofline: record, problem, kernel; its name, whether that stands to the right of a
# point or to the left, and where this point is from the dot, in points.
DOTS = [
    ("5_gating_unfused", "the six steps", "t2 = t1 + b1", "lesson 5: one step, a bias is added", "right", (15, -14)),
    ("5_gating_unfused", "layer", "six kernels", "lesson 5: a layer in six kernels", "right", (-125, -26)),
    ("6_gating_fused", "layer", "warp specialization", "lesson 6: the layer in one kernel", "left", (-15, 8)),
    ("1_matmul_basic", "square", "coalesced", "lesson 1: coalesced", "right", (15, 0)),
    ("2_matmul_sharedmem", "square", "stream-K", "lesson 2: stream-K", "right", (15, -12)),
    ("3_matmul_tensorcore", "square", "rasterization", "lesson 3: rasterization", "right", (-75, -22)),
]
# What a figure is about, by its lesson: what stands before the device's name.
TITLES = {
    "3_matmul_tensorcore": "N x N product in fp16, lesson 3",
    "6_gating_fused": "A gated layer, lesson 6",
    "7_diffusion_fused": "Diffusion on a mesh of V vertices, lesson 7",
    "8_spatial_gradients": "Gradient features on a mesh of V vertices, lesson 8",
    "9_matmul_softmax": "softmax(x W), lesson 9",
    "operators_softmax": "softmax(x W), the operator",
    "10_clifford_gp": "A Clifford layer, lesson 10",
    "bonus_attention": "Attention over S queries and keys, d = 128",
    "bonus_attention_backward": "Attention's gradients over S queries and keys, d = 128",
    "bonus_clifford_fully_connected": "Multivectors mixed by matrices (bonus)",
    "bonus_diffusion_gpus": "One mesh on several GPUs (bonus), forward",
}
# Two series of a figure: whether the copy engine can copy the rows, the colour, what the legend says.
ALIGNED = ((True, BLUE, "rows of whole 16 bytes"), (False, ORANGE, "rows of other lengths"))
UNFUSED_IN = {"6_gating_fused": "5_gating_unfused"}  # if it is another lesson


def records_of(folder, lesson):
    """The runs of a lesson at its default N and at other N: not its variants, not its peers."""
    names = [path for path in folder.glob(f"{lesson}*.json")
             if path.stem == lesson or path.stem.removeprefix(f"{lesson}.").isdigit()]
    return [load(path) for path in sorted(names)]


def title_of(lesson, device, more=""):
    return f"{TITLES.get(lesson, lesson)}{more}: {device}"


def svg_of(figure):
    """The figure as SVG text. No date in it, and a fixed salt: same figure, same bytes. Coordinates have the
    three digits that can be seen."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    short = re.sub(r"(?<=[ \"(,;:-])(\d+\.\d{4,})(?=[ \"),;\n])", lambda number: f"{float(number[1]):.3f}", text.getvalue())
    return re.sub(r"\n +(?=<)", "\n", re.sub(r" \n(?=[MLCQz])", " ", short))


def tick(size):
    """256, 1k, 16k, 4M: in powers of 1024."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "k")):
        if size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def is_power_of_two(size):
    return size & (size - 1) == 0


def size_axis(axes, sizes, name):
    """Powers of two, with a tick for each size, or for each other one if they are many."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes[:: 2 if len(sizes) > 8 else 1])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: tick(int(size))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(name)


def legend_below(axes, columns=2):
    """Under the axis and its name, where no point can be."""
    below = -1 / axes.figure.get_figheight()  # an inch, in heights of the figure
    axes.legend(fontsize=14, loc="upper center", bbox_to_anchor=(0.5, below), ncol=columns)


def rate_axis(axes, subs=(1,)):
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", alpha=0.35)
    axes.set_axisbelow(True)


def label_ends(axes, labels, apart=21, size=16):
    """Writes [(x, y, text, color)] right of their points, as near to them in height as `apart`
    points between two of them allow."""
    figure = axes.figure
    figure.canvas.draw()
    scale = figure.dpi / 72
    placed = []
    for x, y, text, color in sorted(labels, key=lambda label: label[1]):
        at = axes.transData.transform((x, y))
        placed.append([at[0] / scale, at[1] / scale, text, color, at[1] / scale])
    # Groups of labels that touch are spread around their mean.
    groups = [[label] for label in placed]
    merged = True
    while merged:
        merged = False
        for i in range(len(groups) - 1):
            if groups[i + 1][0][4] - groups[i][-1][4] < apart:
                group = groups[i] + groups[i + 1]
                middle = sum(label[1] for label in group) / len(group)
                for place, label in enumerate(group):
                    label[4] = middle + apart * (place - (len(group) - 1) / 2)
                groups[i : i + 2] = [group]
                merged = True
                break
    for x, y, text, color, height in placed:
        point = axes.transData.inverted().transform((x * scale, y * scale))
        axes.annotate(text, point, xytext=(11, height - y), textcoords="offset points",
                      color=color, fontsize=size, va="center", annotation_clip=False)


def roofs_of(runs):
    """Peak TFLOP/s by type, from the problems that arithmetic limits; and the memory's TB/s."""
    peaks = {}
    for run in runs:
        for problem in run["problems"]:
            if problem["limit"] == "compute":
                rate = problem["flops"] / problem["limit_ms"] * 1e-9
                peaks[problem["dtype"].split()[0]] = rate
    return peaks, runs[0]["device"]["peak_bytes_per_second"] * 1e-12


def name_in(problem, name):
    """What a row of LADDER is called in this problem's record."""
    names = {kernel["name"] for kernel in problem["kernels"]}
    return name if name in names else FORMER_NAMES.get(name, name)


def draw_ladder(folder):
    runs = {lesson: records_of(folder, lesson) for lesson in LADDER}
    if not all(runs.values()):
        return None
    figure, axes = plt.subplots(figsize=(12, 7.5))
    rate_axis(axes)
    labels, sizes = [], set()
    for lesson, (color, names) in LADDER.items():
        for name in names:
            points = sorted(
                (problem["dims"]["N"], kernel["tflops"], kernel["name"])
                for run in runs[lesson]
                for problem in run["problems"]
                for kernel in problem["kernels"]
                if kernel["name"] == name_in(problem, name) and is_power_of_two(problem["dims"]["N"])
            )
            if not points:  # a GPU that cannot run it
                continue
            sizes.update(n for n, *_ in points)
            # The library as it ran beside ours: lesson 4's runs are others, at other clocks.
            library = name.startswith("cuBLAS")
            of_curve = "black" if library else color
            axes.plot(*list(zip(*points))[:2], "--" if library else "-", marker="o", color=of_curve)
            labels.append((*points[-1], of_curve))
    size_axis(axes, sorted(sizes), "N")
    axes.set_ylabel("TFLOP/s")
    peaks, _ = roofs_of([run for each in runs.values() for run in each])
    axes.set_ylim(0.3, 2.2 * max(peaks.values()))
    axes.set_xlim(0.9 * min(sizes), 1.15 * max(sizes))
    for dtype, name in (("fp32", "fp32 limit"), ("fp16", "fp16 limit")):
        axes.axhline(peaks[dtype], color=GREY, linewidth=1.5)
        labels.append((max(sizes), peaks[dtype], f"{name}: {peaks[dtype]:.0f}", GREY))
    axes.set_title(f"N x N product, lessons 1 to 3: {runs['1_matmul_basic'][0]['device']['name']}", loc="left")
    figure.subplots_adjust(left=0.09, right=0.83, bottom=0.11, top=0.93)
    label_ends(axes, labels)
    return svg_of(figure)


def draw_roofs(axes, peaks, memory):
    """The axes, the slope of the memory (TB/s), and a flat for each of the peaks {type: TFLOP/s}."""
    left, right = 0.1, 10000
    axes.set_xscale("log")
    rate_axis(axes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(left, right)
    axes.set_ylim(0.03, 2.5 * max(peaks.values()))
    top = max(peaks.values())
    axes.plot([left, top / memory, right], [left * memory, top, top], color="black")
    names = {round(rate): [] for rate in peaks.values()}  # those of fp16 and bf16 differ in a last digit
    for dtype in sorted(peaks, reverse=True):
        names[round(peaks[dtype])].append(dtype)
    for rate, dtypes in names.items():
        axes.plot([rate / memory, right], [rate, rate], color="black", linewidth=1.5)
        tensor = "" if dtypes == ["fp32"] else " on tensor cores"
        axes.text(rate / memory * 0.85, rate * 1.02, f"{', '.join(dtypes)}{tensor}: {rate:.0f}",
                  fontsize=15, ha="right", va="center")
    axes.text(left * 1.3, left * 1.7 * memory, f"memory: {memory:.2g} TB/s", fontsize=15,
              rotation=38, rotation_mode="anchor")
    axes.set_xlabel("operations per least possible byte")
    axes.set_ylabel("TFLOP/s")


def draw_roofline(folder):
    """A kernel is a dot at (operations per least possible byte, TFLOP/s); the fastest of a problem is a large one. Of
    a lesson those of its problems with the fewest and with the most operations have the lesson's number, too."""
    runs = [load(path) for path in sorted(folder.glob("*.json"))
            if path.stem == load(path)["lesson"]  # default sizes
            and "gpus" not in path.stem]  # which has the roofs of several GPUs
    if not runs:
        return None
    peaks, memory = roofs_of(runs)
    figure, axes = plt.subplots(figsize=(13, 6.6))
    dots, best = [], {}
    for run in runs:
        number = run["lesson"].split("_")[0].replace("bonus", "B")
        for problem in run["problems"]:
            for kernel in problem["kernels"]:
                if not kernel["tflops"]:  # it only copies
                    continue
                # A step has work of its own.
                place = (kernel["tflops"] / kernel["gbps"] * 1e3, kernel["tflops"])
                dots.append((*place, kernel["role"]))
                ours = kernel["role"] == "ours"
                key = (number, round(place[0], 1), problem["dtype"])
                if ours and kernel["tflops"] > best.get(key, (0, 0, 0))[1]:
                    best[key] = (*place, problem["flops"])
    draw_roofs(axes, peaks, memory)
    for role, color, name in (
        ("ours", SKY, "our kernels"),
        ("baseline", GREY, "unfused, or simple"),
        ("library", "black", "libraries"),
    ):
        points = [(x, y) for x, y, each in dots if each == role]
        if points:
            axes.scatter(*zip(*points), s=45, color=color, label=name, zorder=3)
    axes.scatter(*zip(*[(x, y) for x, y, _ in best.values()]), s=60, color=VERMILLION, zorder=4)
    axes.scatter([], [], s=320, color=VERMILLION, label="our fastest, and its lesson")
    of_lesson = {}
    for (number, *_), (x, y, flops) in best.items():
        if number != "B":
            of_lesson.setdefault(number, []).append((flops, x, y))
    numbered = {(*find(dots, key=lambda dot: dot[0])[1:], number)
                for number, dots in of_lesson.items() for find in (min, max)}
    axes.set_title(f"Every kernel under its roof: {runs[0]['device']['name']}", loc="left")
    axes.legend(fontsize=14, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=4,
                columnspacing=1, handletextpad=0.2)
    figure.tight_layout()
    number_dots(axes, sorted(numbered, key=lambda dot: (dot[2], dot)))
    return svg_of(figure)


def draw_dots(folder):
    """The kernels of DOTS under the roofs of fp32 and fp16, each with its name; nothing if one is not recorded."""
    runs, dots = {}, []
    for lesson, problem, kernel, said, side, offset in DOTS:
        if not (folder / f"{lesson}.json").exists():
            return None
        runs[lesson] = load(folder / f"{lesson}.json")
        rows = [row for each in runs[lesson]["problems"] if each["name"] == problem
                for row in each["kernels"] if row["name"] == kernel]
        if not rows:
            return None
        dots.append((rows[0]["tflops"] / rows[0]["gbps"] * 1e3, rows[0]["tflops"], said, side, offset))
    peaks, memory = roofs_of(list(runs.values()))
    figure, axes = plt.subplots(figsize=(13, 6.6))
    draw_roofs(axes, {dtype: rate for dtype, rate in peaks.items() if dtype in ("fp32", "fp16")}, memory)
    for x, y, said, side, offset in dots:
        axes.scatter([x], [y], s=160, color=GREY if said.startswith("lesson 5") else VERMILLION, zorder=4)
        axes.annotate(said, (x, y), xytext=offset, textcoords="offset points", fontsize=17, va="center",
                      ha="left" if side == "right" else "right")
    axes.set_title(f"Six kernels under their roofs: {runs['1_matmul_basic']['device']['name']}", loc="left")
    figure.tight_layout()
    return svg_of(figure)


def number_dots(axes, dots, size=20, around=12):
    """Numbers (x, y, number) in discs of `size` points at their dots. Where another disc is, the number stands
    beside its dot in a white disc, and a line leads to the dot."""
    taken = []
    for x, y, number in dots:
        place = axes.transData.transform((x, y)) * 72 / axes.figure.dpi
        turns = [-2 * math.pi * turn / around for turn in range(around)]  # rather below a roof than above
        offsets = [(0, 0), *((far * size * math.cos(turn), far * size * math.sin(turn))
                             for far in (1.1, 1.6, 2.2) for turn in turns)]
        offset = next((each for each in offsets if all(math.dist(place + each, other) > size for other in taken)),
                      offsets[0])
        taken.append(place + offset)
        beside = offset != (0, 0)
        if beside:  # below all discs
            axes.annotate("", (x, y), xytext=offset, textcoords="offset points", zorder=3,
                          arrowprops={"arrowstyle": "-", "color": VERMILLION, "linewidth": 2})
        ink, paper = (VERMILLION, "white") if beside else ("white", VERMILLION)
        pad = 0.15 if len(number) == 1 else 0.05
        axes.annotate(number, (x, y), xytext=offset, textcoords="offset points", fontweight="bold", color=ink,
                      fontsize=14, ha="center", va="center_baseline", zorder=6,
                      bbox={"boxstyle": f"circle,pad={pad}", "facecolor": paper, "edgecolor": ink})


def panels_of(folder, lesson):
    """The device's name, the name of the size, and the panels: {problem: [(size, problem)]}."""
    sweep = folder / f"{lesson}.sweep.json"
    runs = [load(sweep)] if sweep.exists() else records_of(folder, lesson)
    panels, (size, fixed, _) = {}, OVER.get(lesson, (None, {}, ()))
    for run in runs:
        for problem in run["problems"] if sweep.exists() or lesson in OVER else run["problems"][:1]:
            dims = problem["dims"]
            if any(dims[name] != extent for name, extent in fixed.items()):
                continue
            size = size or next(iter(dims))
            panels.setdefault(problem["name"], []).append((dims[size], problem))
    for points in panels.values():
        points.sort(key=lambda point: point[0])
    return (runs[0]["device"]["name"] if runs else None), size, panels


def peers_over(folder, lesson, name, size):
    """[(peer, [(extent, TFLOP/s)])] of the problem `name`, from the record of the peers' sweep, if there
    is one. Of several rows of a peer ("Triton, ...") it is the fastest that was verified."""
    path = folder / f"{lesson}.sweep.peers.json"
    curves = {}
    for problem in load(path)["problems"] if path.exists() else []:
        best = {}
        for kernel in problem["kernels"]:
            if problem["name"] == name and kernel["role"] == "peer" and kernel["ok"]:
                peer = kernel["name"].split(",")[0]
                best[peer] = max(best.get(peer, 0), kernel["tflops"])
        for peer, rate in best.items():
            curves.setdefault(peer, []).append((problem["dims"][size], rate))
    return sorted((peer, sorted(points)) for peer, points in curves.items())


def draw_sizes(folder, lesson):
    device, size, panels = panels_of(folder, lesson)
    if not any(len(problems) > 1 for problems in panels.values()):
        return None
    width = 12 if len(panels) == 1 else 8 * len(panels)
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(width, 7), sharey=True, squeeze=False,
        gridspec_kw={"wspace": 0.46 if lesson in OVER else 0.38},
    )
    colors, ends = {}, []  # the same color in every panel
    for axes, (name, problems) in zip(all_axes[0], panels.items()):
        curves = {}
        for extent, problem in problems:
            for kernel in problem["kernels"]:
                if lesson in OVER and kernel["name"] not in OVER[lesson][2]:
                    continue
                role, points = curves.setdefault(kernel["name"], (kernel["role"], []))
                points.append((extent, kernel["tflops"]))
        rate_axis(axes, (1, 2, 5))
        size_axis(axes, [extent for extent, _ in problems], size)
        for style, (peer, points) in zip((":", "--", "-."), peers_over(folder, lesson, name, size)):
            axes.plot(*zip(*points), style, marker=".", color=GREY, linewidth=2)
            ends.append((axes, (problems[-1][0], points[-1][1], peer, GREY)))  # at the right
        for kernel, (role, points) in curves.items():
            color = "black" if role == "library" else colors.setdefault(kernel, f"C{len(colors)}")
            style = "--" if role == "library" else "-"
            axes.plot(*zip(*points), style, marker="o", color=color)
            ends.append((axes, (*points[-1], kernel, color)))
        axes.set_title(title_of(lesson, device) if len(panels) == 1 else name, loc="left")
    all_axes[0][0].set_ylabel("TFLOP/s")
    if len(panels) > 1:
        figure.suptitle(title_of(lesson, device), fontsize=19)
    figure.subplots_adjust(left=1 / width, right=1 - 2 / width, bottom=0.13,
                           top=0.93 if len(panels) == 1 else 0.86)
    for axes in all_axes[0]:
        label_ends(axes, [label for each, label in ends if each is axes])
    return svg_of(figure)


def same_problem(run, problem):
    """The problem in another run: a list of one, or empty."""
    return [p for p in run["problems"] if all(p[key] == problem[key] for key in ("name", "dims"))]


def rows_of(folder, lesson, run, problem):
    """What stands beside the fastest fused kernel: [(name, milliseconds, color)], slowest first."""
    def is_unfused(kernel):
        return kernel["role"] == "library" or kernel["name"].startswith("unfused")

    other = UNFUSED_IN.get(lesson)
    def color_of(kernel):
        return "black" if kernel["role"] == "library" else GREY

    rows = [(k["name"], k["ms"]["median"], color_of(k)) for k in problem["kernels"] if is_unfused(k)]
    if other:
        own = {name for name, *_ in rows}
        twins = load(folder / f"{other}{run}.json")
        for twin in same_problem(twins, problem):
            rows += [(k["name"], k["ms"]["median"], color_of(k)) for k in twin["kernels"]
                     if k["name"] not in own]
    for each in filter(None, (other, lesson)):
        for path in sorted(folder.glob(f"{each}*.peers.json")):
            if ".sweep" in path.name:
                continue
            for twin in same_problem(load(path), problem):
                rows += [(k["name"] + ("" if k["ok"] else " (wrong)"), k["ms"]["median"], PURPLE)
                         for k in twin["kernels"] if k["role"] == "peer"]
    fused = [k for k in problem["kernels"] if k["role"] == "ours" and not is_unfused(k)]
    best = min(fused, key=lambda kernel: kernel["ms"]["median"])
    rows.append((best["name"], best["ms"]["median"], VERMILLION))
    return sorted(rows, key=lambda row: -row[1])


def draw_fused(folder, lesson):
    panels = []
    for title, run, name in FUSED[lesson]:
        path = folder / f"{lesson}{run}.json"
        for problem in load(path)["problems"] if path.exists() else []:
            if problem["name"] == name:
                panels.append((f"{name}, {title}", problem, rows_of(folder, lesson, run, problem)))
                device = load(path)["device"]["name"]
    if not panels:
        return None
    heights = [len(rows) + 0.9 for _, _, rows in panels]
    figure, all_axes = plt.subplots(
        len(panels), 1, figsize=(14, 2 + 0.34 * sum(heights)), squeeze=False, sharex=True,
        gridspec_kw={"height_ratios": heights},
    )
    for axes, (title, problem, rows) in zip(all_axes[:, 0], panels):
        for y, (name, ms, color) in enumerate(reversed(rows)):
            percent = 100 * problem["limit_ms"] / ms
            axes.barh(y, percent, color=color, height=0.72)
            time = f"{ms * 1e3:.3g} us" if ms < 0.1 else f"{ms:.3g} ms"
            inside = percent > 80  # the text would meet the line at 100
            axes.text(percent + (-1 if inside else 1), y, time, va="center", fontsize=16,
                      ha="right" if inside else "left", color="white" if inside else "black",
                      fontweight="bold" if color == VERMILLION else "normal")
        axes.set_yticks(range(len(rows)), [name for name, *_ in reversed(rows)])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.axvline(100, color="black", linewidth=2)
        axes.set_title(title, loc="left", fontsize=18)
    limits = [100 * problem["limit_ms"] / ms for _, problem, rows in panels for _, ms, _ in rows]
    axes.set_xlim(0, max(105, 1.1 * max(limits)))  # a warm cache is faster than memory
    axes.xaxis.set_major_locator(FixedLocator([0, 25, 50, 75, 100]))
    axes.set_xlabel(f"% of what {device} allows this problem")
    all_axes[0, 0].set_title(title_of(lesson, panels[0][0]), loc="left", fontsize=18)
    there = {color for _, _, rows in panels for *_, color in rows}
    names = {GREY: "unfused", "black": "with a library", PURPLE: "others: PyTorch, Triton", VERMILLION: "ours, fused"}
    patches = [Patch(color=color, label=name) for color, name in names.items() if color in there]
    figure.tight_layout(rect=(0, 0.45 / figure.get_figheight(), 1, 1))
    figure.legend(handles=patches, fontsize=16, loc="lower center", ncol=len(patches), frameon=False)
    return svg_of(figure)


def grid_of(problems, value):
    """Batches, features, and value(problem) at each: rows of batches."""
    batches, features = (
        sorted({problem["dims"][name] for problem in problems}) for name in ("batch", "features")
    )
    at = {(p["dims"]["batch"], p["dims"]["features"]): value(p) for p in problems}
    return batches, features, [[at.get((batch, feature), math.nan) for feature in features]
                               for batch in batches]


def draw_heatmap(axes, problems, value, title):
    batches, features, values = grid_of(problems, value)
    axes.imshow(values, cmap="cividis_r", vmin=0, origin="lower", aspect="auto")
    shade = max(number for line in values for number in line if not math.isnan(number)) / 2
    for y, line in enumerate(values):
        for x, number in enumerate(line):
            if not math.isnan(number):
                axes.text(x, y, f"{number:.1f}", ha="center", va="center", fontsize=19,
                          color="white" if number > shade else "black")
    axes.set_xticks(range(len(features)), features)
    axes.set_yticks(range(len(batches)), batches)
    axes.set_xlabel("features")
    axes.set_ylabel("batch")
    axes.set_title(title, fontsize=17)


def times_faster_than(peer):
    """value(problem) for a heatmap, of a record of peers: how many times as fast as a peer our last
    kernel is; NaN where that peer was not verified."""
    def value(problem):
        ours = [k for k in problem["kernels"] if k["role"] == "ours"][-1]["ms"]["median"]
        theirs = [k["ms"]["median"] for k in problem["kernels"]
                  if k["role"] == "peer" and k["ok"] and k["name"].split(",")[0] == peer]
        return min(theirs) / ours if theirs else math.nan

    return value


def draw_heatmaps(path):
    """Of a sweep over batch and features: how many times as fast as the first kernel, and in how many
    times less memory, the last one is; and compared with peers, where their sweep has been recorded."""
    run = load(path)
    if not {"batch", "features"} <= run["problems"][0]["dims"].keys():
        return None
    names = list(dict.fromkeys(problem["name"] for problem in run["problems"]))

    def memory(problem):
        return problem["kernels"][0]["memory_bytes"] / problem["kernels"][-1]["memory_bytes"]

    def speed(problem):
        return problem["kernels"][-1]["speedup"]

    maps = []  # a row each: what it says, value, problems
    for title, value in (("times as fast as", speed), ("times less memory than", memory)):
        maps.append((title, None, value, run["problems"]))
    beside = path.with_name(f"{path.stem}.peers.json")
    problems = load(beside)["problems"] if beside.exists() else []
    for peer in ("torch.compile", "Triton"):
        value = times_faster_than(peer)
        there = [problem for problem in problems if not math.isnan(value(problem))]
        if there:
            maps.append(("times as fast as", peer, value, there))
    figure, rows = plt.subplots(len(maps), len(names), squeeze=False,
                                figsize=(6.5 * len(names), 4.75 * len(maps)))
    for (title, peer, value, problems), row in zip(maps, rows):
        for name, axes in zip(names, row):
            of_name = [problem for problem in problems if problem["name"] == name]
            if not of_name:
                axes.set_axis_off()
                continue
            kernels = [k for k in of_name[0]["kernels"] if k["role"] != "peer"]
            other = peer or kernels[0]["name"]
            draw_heatmap(axes, of_name, value,
                         f"{name}: {kernels[-1]['name']},\n{title} {other}")
    signature = re.search(r"sweep-([\d,]+)", path.stem)
    what = f" in the algebra {signature[1]}" if signature else ""
    figure.suptitle(title_of(run["lesson"], run["device"]["name"], what), fontsize=18)
    figure.tight_layout()
    return svg_of(figure)


def times_as_fast(problem):
    """How many times as fast as the best library of the run our fastest kernel is."""
    def best(role):
        return min(k["ms"]["median"] for k in problem["kernels"] if k["role"] == role)

    return best("library") / best("ours")


def draw_layers(path, run):
    """The same for layers: a line for each, from the fewest rows to the most."""
    problems = sorted(run["problems"], key=lambda problem: [*problem["dims"].values()], reverse=True)
    figure, axes = plt.subplots(figsize=(12, 0.34 * len(problems) + 1.6))
    axes.set_xscale("log", base=2)
    axes.axvline(1, color="black", linewidth=2)
    for aligned, color, name in ALIGNED:
        chosen = [(times_as_fast(problem), line) for line, problem in enumerate(problems)
                  if all(problem["dims"][each] % 4 == 0 for each in "DC") == aligned]
        if chosen:
            axes.plot(*zip(*chosen), marker="o", linestyle="", color=color, label=name)
    labels = [" x ".join(map(str, problem["dims"].values())) for problem in problems]
    axes.set_yticks(range(len(problems)), labels, fontsize=11)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("times as fast as the library")
    axes.grid(True, which="major", alpha=0.35)
    legend_below(axes)
    axes.set_title(title_of(run["lesson"], run["device"]["name"], ", our fastest"), loc="left")
    figure.tight_layout()
    return svg_of(figure)


def draw_shapes(path):
    """How many times as fast as the library we are at each N; or for layers, see draw_layers."""
    run = load(path)
    if "N" not in run["problems"][0]["dims"]:
        return draw_layers(path, run)
    points = sorted((problem["dims"]["N"], times_as_fast(problem)) for problem in run["problems"])
    figure, axes = plt.subplots(figsize=(12, 6))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.axhline(1, color="black", linewidth=2)
    for aligned, color, name in ALIGNED:
        chosen = [point for point in points if (point[0] % 8 == 0) == aligned]
        if chosen:
            axes.plot(*zip(*chosen), "-" if aligned else "", marker="o", color=color, label=name)
    sizes = [n for n, _ in points]
    axes.set_xticks([n for n in sizes if n & (n - 1) == 0])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: tick(int(n))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("N")
    axes.set_ylabel("times as fast as the library")
    axes.grid(True, which="major", alpha=0.35)
    legend_below(axes)
    axes.set_title(f"N x N product in fp16, our fastest: {run['device']['name']}", loc="left")
    figure.tight_layout()
    return svg_of(figure)


# NVLink's rate from one H200 to the others, and what a journey takes at least: half of the 1.2 us that
# a flag took there and back.
NVLINK_BYTES_PER_SECOND, JOURNEY_MS = 450e9, 0.6e-3


def exchange_model_ms(gpus, measured_ms, numbers):
    """What the exchange takes on `gpus` GPUs, from what it takes on two. There, each sends all its
    numbers in one journey. With more it sends each number to one of them, and that one sends the sum
    round: two journeys."""
    def travel(count):
        return 1e3 * 4 * count / NVLINK_BYTES_PER_SECOND

    if gpus == 2:
        return measured_ms
    return measured_ms - travel(numbers) + JOURNEY_MS + 2 * travel(numbers * (gpus - 1) / gpus)


def draw_gpus(folder):
    """Strong scaling, over V; and weak scaling, over the vertices of each GPU. What is dashed was not
    measured."""
    runs = records_of(folder, "bonus_diffusion_gpus")
    if not runs:
        return None
    times = {}  # (V, row) of forward
    for run in runs:
        for problem in run["problems"]:
            for kernel in problem["kernels"] if problem["name"] == "forward" else ():
                times[problem["dims"]["V"], kernel["name"]] = kernel["ms"]["median"]
    dims = runs[0]["problems"][0]["dims"]
    one = {v: ms for (v, row), ms in times.items() if row == "one GPU"}
    fused = {v: ms for (v, row), ms in times.items() if row == "fused exchange, 2 GPUs"}
    nccl = {v: ms for (v, row), ms in times.items() if row == "NCCL, 2 GPUs"}
    measured = sorted(ms - one[v // 2] for v, ms in fused.items() if v // 2 in one)
    exchange = measured[len(measured) // 2]

    def one_at(v):
        """Between two sizes that were measured, the time is a power of the size."""
        below, above = max(x for x in one if x <= v), min(x for x in one if x >= v)
        if below == above:
            return one[v]
        share = math.log(v / below) / math.log(above / below)
        return one[below] ** (1 - share) * one[above] ** share

    figure, (strong, weak) = plt.subplots(1, 2, figsize=(14, 6.5))
    for rows, color, name in ((nccl, GREY, "NCCL, 2 GPUs"), (fused, BLUE, "fused, 2 GPUs")):
        points = sorted((v, one[v] / ms) for v, ms in rows.items())
        strong.plot(*zip(*points), marker="o", color=color, label=name)
        points = sorted((v // 2, one[v // 2] / ms) for v, ms in rows.items() if v // 2 in one)
        weak.plot(*zip(*points), marker="o", color=color, label=name)
    for gpus, color in ((4, ORANGE), (8, VERMILLION)):
        ms = exchange_model_ms(gpus, exchange, dims["E"] * dims["W"])
        points = sorted((v, one[v] / (one_at(v // gpus) + ms))
                        for v in fused if v // gpus >= min(one))
        strong.plot(*zip(*points), "--", color=color, label=f"fused, {gpus} GPUs: a model")
        points = sorted((v, one[v] / (one[v] + ms)) for v in one)
        weak.plot(*zip(*points), "--", color=color, label=f"fused, {gpus} GPUs: a model")
    size_axis(strong, sorted(fused), "vertices")
    size_axis(weak, sorted(v // 2 for v in fused), "vertices of each GPU")
    strong.set_title("the same mesh", loc="left")
    weak.set_title("a mesh that grows with the GPUs", loc="left")
    strong.set_ylabel("times as fast as one GPU")
    strong.set_yscale("log", base=2)
    strong.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    weak.set_ylabel("time of one GPU / time of all")
    weak.set_ylim(0, 1.05)
    for axes in (strong, weak):
        axes.grid(True, which="major", alpha=0.35)
    strong.axhline(1, color="black", linewidth=1.5)
    figure.suptitle(title_of("bonus_diffusion_gpus", runs[0]["device"]["name"]), fontsize=18)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.legend(*strong.get_legend_handles_labels(), fontsize=14, loc="lower center", ncol=4)
    return svg_of(figure)


def draw_all(folder):
    """{path: SVG text} of everything that the records of one GPU are enough for."""
    plots = {"ladder": (draw_ladder, folder), "roofline": (draw_roofline, folder), "roofline.dots": (draw_dots, folder),
             "bonus_diffusion_gpus": (draw_gpus, folder)}
    for lesson in ("3_matmul_tensorcore", "7_diffusion_fused", "8_spatial_gradients", *OVER):
        plots[lesson] = (draw_sizes, folder, lesson)
    for lesson in FUSED:
        plots[f"{lesson}.fused"] = (draw_fused, folder, lesson)
    for path in sorted(folder.glob("*.shapes.json")):
        plots[path.stem] = (draw_shapes, path)
    for path in sorted(folder.glob("*.sweep-*.json")):
        if not path.stem.endswith(".peers"):
            plots[path.stem] = (draw_heatmaps, path)
    drawn = {}
    for name, (draw, *arguments) in plots.items():
        path = folder / f"{name}.svg"
        try:
            drawn[path] = draw(*arguments)
        except DAMAGED as error:
            raise Mistake(f"results/{folder.name}/{path.name} cannot be drawn, for its records are damaged: "
                          f"{what_lacks(error)}") from error
    return {path: text for path, text in drawn.items() if text}


def same(drawn, there):
    """Whether two plots are one, but for the last digit of a coordinate, which another processor rounds
    the other way, and for the names of clip paths, which are hashes of coordinates."""
    if drawn is None or there is None:
        return False

    def numbered(text):
        names = {}
        return re.sub(r"\bp[0-9a-f]{10}\b",
                      lambda match: names.setdefault(match[0], f"clip{len(names)}"), text)

    drawn, there = numbered(drawn), numbered(there)
    number = re.compile(r"-?\d+\.\d+")
    return number.sub("", drawn) == number.sub("", there) and all(
        math.isclose(float(a), float(b), rel_tol=0, abs_tol=2e-3)
        for a, b in zip(number.findall(drawn), number.findall(there))
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    matplotlib.rcParams.update(STYLE)
    plots = {}
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        plots.update(draw_all(folder))
    if not check:
        for path, text in plots.items():
            write_whole(path, text)
        return 0
    there = {path: path.read_text() for path in RESULTS.glob("*/*.svg")}
    paths = plots.keys() | there.keys()
    wrong = sorted(path.name for path in paths if not same(plots.get(path), there.get(path)))
    if wrong:
        print("not what the records give:", *wrong, file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(saying_mistakes(main))
