"""Draws the recorded runs: results/<gpu>/<lesson>.svg, TFLOP/s of each kernel over the size.

    results/plot.py [LESSON ...]

A lesson is drawn if it was recorded at several N (see SIZES in record.py), or in a sweep, one run at
many sizes (VARIANTS), which has a panel for each kind of problem.
A sweep over batch and features is drawn as heatmaps: results/<gpu>/<lesson>.sweep-....svg.
"""
import json
import pathlib
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

RESULTS = pathlib.Path(__file__).resolve().parent
DASHED = {"library", "peer"}


def panels_of(folder, lesson):
    """The device's name, the name of the size, and the panels: {problem's name: [(size, problem)]}."""
    sweep = folder / f"{lesson}.sweep.json"
    paths = [sweep] if sweep.exists() else sorted(folder.glob(f"{lesson}*.json"))
    runs = [json.loads(path.read_text()) for path in paths]
    panels, size = {}, None
    for run in runs:
        for problem in run["problems"] if sweep.exists() else run["problems"][:1]:
            size, extent = next(iter(problem["dims"].items()))
            panels.setdefault(problem["name"], []).append((extent, problem))
    for points in panels.values():
        points.sort(key=lambda point: point[0])
    return (runs[0]["device"]["name"] if runs else None), size, panels


def tick(size):
    """256, 1k, 16k, 4M: in powers of 1024."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "k")):
        if size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def draw_panel(axes, problems, size, colors):
    curves = {}
    for extent, problem in problems:
        for kernel in problem["kernels"]:
            role, points = curves.setdefault(kernel["name"], (kernel["role"], []))
            points.append((extent, kernel["tflops"]))
    for name, (role, points) in curves.items():
        style = "--" if role in DASHED else "-"
        color = colors.setdefault(name, f"C{len(colors)}")
        axes.plot(*zip(*points), style, color=color, marker="o", linewidth=2.5, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = [extent for extent, _ in problems]
    many = len(sizes) > 8  # more than have room
    sizes = sizes[:: 2 if many else 1]
    axes.set_xticks(sizes, [tick(extent) if many else str(extent) for extent in sizes])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(size, fontsize=14)
    axes.tick_params(labelsize=13)
    axes.grid(True, which="both", alpha=0.3)


def draw(folder, lesson, device, size, panels):
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(10 if len(panels) == 1 else 2 + 6 * len(panels), 5), sharey=True,
        squeeze=False,
    )
    colors = {}  # of the kernels, the same in every panel
    for axes, (name, problems) in zip(all_axes[0], panels.items()):
        draw_panel(axes, problems, size, colors)
        title = f"{lesson}, {device}"
        axes.set_title(title if len(panels) == 1 else f"{title}: {name}", fontsize=15)
    all_axes[0][0].set_ylabel("TFLOP/s", fontsize=14)
    # The first panel has every kernel.
    all_axes[0][-1].legend(
        *all_axes[0][0].get_legend_handles_labels(), fontsize=12, loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    figure.tight_layout()
    # A fixed salt and no date: the same records give the same file.
    figure.savefig(folder / f"{lesson}.svg", metadata={"Date": None})
    plt.close(figure)


def grid_of(problems, value):
    """Batches, features, and value(problem) at each: rows of batches."""
    batches, features = (
        sorted({problem["dims"][name] for problem in problems}) for name in ("batch", "features")
    )
    at = {(p["dims"]["batch"], p["dims"]["features"]): value(p) for p in problems}
    return batches, features, [[at[batch, feature] for feature in features] for batch in batches]


def draw_sweep(path):
    """Heatmaps of a sweep over batch and features: how many times faster than the first kernel, and
    in how many times less memory, the last one is."""
    run = json.loads(path.read_text())
    if not {"batch", "features"} <= run["problems"][0]["dims"].keys():
        return
    names = list(dict.fromkeys(problem["name"] for problem in run["problems"]))
    figure, rows = plt.subplots(2, len(names), figsize=(5.5 * len(names), 8.5), squeeze=False)

    def memory(problem):
        return problem["kernels"][0]["memory_bytes"] / problem["kernels"][-1]["memory_bytes"]

    def speed(problem):
        return problem["kernels"][-1]["speedup"]

    for title, value, row in (("times faster", speed, rows[0]), ("times less memory", memory, rows[1])):
        for name, axes in zip(names, row):
            problems = [problem for problem in run["problems"] if problem["name"] == name]
            batches, features, values = grid_of(problems, value)
            axes.imshow(values, cmap="YlGn", vmin=0, origin="lower", aspect="auto")
            shade = max(map(max, values)) / 2
            for y, line in enumerate(values):
                for x, number in enumerate(line):
                    color = "white" if number > shade else "black"
                    axes.text(x, y, f"{number:.1f}", ha="center", va="center", fontsize=14, color=color)
            axes.set_xticks(range(len(features)), features)
            axes.set_yticks(range(len(batches)), batches)
            axes.set_xlabel("features", fontsize=13)
            axes.set_ylabel("batch", fontsize=13)
            axes.tick_params(labelsize=12)
            kernels = problems[0]["kernels"]
            axes.set_title(f"{name}: {title}\n{kernels[-1]['name']} than {kernels[0]['name']}", fontsize=13)
    figure.suptitle(f"{path.stem}, {run['device']['name']}", fontsize=15)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)


def main():
    matplotlib.rcParams["svg.hashsalt"] = "results"
    lessons = sys.argv[1:] or ["3_matmul_tensorcore", "7_diffusion_fused", "8_spatial_gradients"]
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        for lesson in lessons:
            device, size, panels = panels_of(folder, lesson)
            if any(len(problems) > 1 for problems in panels.values()):
                draw(folder, lesson, device, size, panels)
        for path in sorted(folder.glob("*.sweep-*.json")):
            if not sys.argv[1:] or path.name.split(".")[0] in lessons:
                draw_sweep(path)


if __name__ == "__main__":
    main()
