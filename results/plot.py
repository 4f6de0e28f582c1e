"""Draws the recorded runs: results/<gpu>/<lesson>.svg, TFLOP/s of each kernel over N.

    results/plot.py [LESSON ...]

Only lessons recorded at several N are drawn (see SIZES in record.py).
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
    runs = [json.loads(path.read_text()) for path in folder.glob(f"{lesson}*.json")]
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


def main():
    matplotlib.rcParams["svg.hashsalt"] = "results"
    lessons = sys.argv[1:] or ["3_matmul_tensorcore"]
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        for lesson in lessons:
            if len(runs_of(folder, lesson)) > 1:
                draw(folder, lesson)


if __name__ == "__main__":
    main()
