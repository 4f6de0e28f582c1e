"""Draws the recorded runs: results/<gpu>/<lesson>.svg, TFLOP/s of each kernel over N; and
results/<gpu>/<lesson>.sweep-....svg, over batch and features.

    results/plot.py [LESSON ...]

Only lessons recorded at several N are drawn, and sweeps (see SIZES and EXTRA in record.py).
"""
import json
import pathlib
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

RESULTS = pathlib.Path(__file__).resolve().parent
DASHED = {"library", "peer"}


def runs_of(folder, lesson):
    """The lesson's recorded problems, by N."""
    paths = [folder / f"{lesson}.json", *folder.glob(f"{lesson}.[0-9]*.json")]
    runs = [json.loads(path.read_text()) for path in paths if path.exists()]
    return sorted((run["problems"][0]["dims"]["N"], run) for run in runs)


def draw(folder, lesson):
    runs = runs_of(folder, lesson)
    curves = {}
    for n, run in runs:
        for kernel in run["problems"][0]["kernels"]:
            curves.setdefault(kernel["name"], (kernel["role"], []))[1].append((n, kernel["tflops"]))
    figure, axes = plt.subplots(figsize=(10, 5))
    for name, (role, points) in curves.items():
        style = "--" if role in DASHED else "-"
        axes.plot(*zip(*points), style, marker="o", linewidth=2.5, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([n for n, _ in runs], [str(n) for n, _ in runs])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("N", fontsize=14)
    axes.set_ylabel("TFLOP/s", fontsize=14)
    axes.tick_params(labelsize=13)
    axes.set_title(f"{lesson}, {runs[0][1]['device']['name']}", fontsize=15)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=12, loc="center left", bbox_to_anchor=(1, 0.5))
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
    lessons = sys.argv[1:] or ["3_matmul_tensorcore"]
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        for lesson in lessons:
            if len(runs_of(folder, lesson)) > 1:
                draw(folder, lesson)
        for path in sorted(folder.glob("*.sweep-*.json")):
            if not sys.argv[1:] or path.name.split(".")[0] in lessons:
                draw_sweep(path)


if __name__ == "__main__":
    main()
