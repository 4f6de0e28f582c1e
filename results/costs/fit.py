"""Fits what operators/product/estimate.h says of products on Hopper: the costs, and the factors of tiles.

    results/costs/fit.py --build                           # the program ways, by nvcc, into build/cuda
    build/cuda/ways half 200 1 > half.jsonl                # on the GPU, for 200 seconds, with seed 1
    results/costs/fit.py half half.jsonl [--test FILE]     # anywhere, with numpy and scipy: writes estimate.h

What becomes small is not the error of the estimates, but how much longer the way with the least estimate takes than the
fastest one. That is no smooth function of the costs. So each way counts by its probability to be chosen if estimates
erred by some 3 %. Ways that take much longer count more than in proportion, since the worst shapes matter. Besides,
ways of one shape should be in order, estimates should be near the times, and costs near those there were.

`predict` says the same as product_microseconds() in estimate.h, for many ways at once. Before it fits anything the
script checks that."""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
from scipy.optimize import minimize

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = ROOT / "operators" / "product" / "estimate.h"
PROGRAM = ROOT / "build" / "cuda" / "ways"
NAMES = {"half": ("kHalfCosts", "kHalfTiles", 2), "tf32": ("kTf32Costs", "kTf32Tiles", 4)}
MADE = ("rows cols stack side transposed once consumers multiplied shared_lines fetched_a fetched_b gathering copied "
        "pitch_a pitch_b pitch_c clusters rounds finished shared places pieces slices added").split()
FACTORS = ("step", "store", "unaligned")
ERROR = 0.025  # of an estimate's logarithm
NEAR, KEPT = 1.12, 1.15  # a way counts if it takes so many times the least time, or its estimate so many times the least


def costs_of(text, name):
    block = re.search(name + r" = \{(.*?)\};", text, re.S).group(1)
    return {key: float(value) for key, value in re.findall(r"\.(\w+) = ([-\d.e]+)", block)}


def tiles_of(text, name):
    """{(rows, cols, transposed, stack, side, gathered): [step, store, unaligned]}"""
    block = re.search(name + r"\[\] = \{(.*?)\};", text, re.S).group(1)
    found = {}
    for row in re.findall(r"\{([^{}]+)\}", block):
        cells = [cell.strip() for cell in row.split(",")]
        gathered = cells[-1] == "true" and len(cells) > 6
        factors = [float(cell) for cell in (cells[5:-1] if gathered else cells[5:])]
        key = (int(cells[0]), int(cells[1]), cells[2] == "true", int(cells[3]), int(cells[4]), gathered)
        found[key] = factors + [1.0] * (3 - len(factors))
    return found


class Ways:
    """The ways of the shapes in some files, a column for each number."""

    def __init__(self, paths, element_bytes):
        rows, self.library, self.bytes = [], [], element_bytes
        for path in paths:
            with open(path) as lines:
                self.device = json.loads(next(lines))
                for line in lines:
                    shape = json.loads(line)
                    least = min(way[1] for way in shape["ways"]), min(way[2] for way in shape["ways"])
                    rows += [(len(self.library), *shape["shape"], *way) for way in shape["ways"]
                             if way[1] < NEAR * least[0] or way[2] < KEPT * least[1]]
                    self.library.append(shape["library"])
        self.names = [row[4] for row in rows]
        self.other = np.array([len(row) == 7 for row in rows])  # the estimate is of another kind
        made = np.array([row[7:] if len(row) > 7 else [1] * len(MADE) for row in rows], float)
        self.of = dict(zip(MADE, made.T))
        self.of["gathering"][self.other] = 0
        self.shape = np.array([row[0] for row in rows])
        m, n, k = (np.array([row[i] for row in rows], float) for i in (1, 2, 3))
        self.depth, self.sizes = k, (m, n) if element_bytes == 2 else (n, m)  # tiles of TF32 are of C^T
        self.took, self.estimate = (np.array([row[i] for row in rows]) for i in (5, 6))
        self.library = np.array(self.library)
        by_threads = [np.array([f"{factor} by threads" in name for name in self.names]) for factor in "AB"]
        copied = [(size * element_bytes % 16 != 0) & ~threads for size, threads in zip((k, n), by_threads)]
        self.copied = copied[0] * m * k + copied[1] * k * n
        self.by_four = np.where(by_threads[0], k, n) % 4 != 0
        columns = ("rows", "cols", "transposed", "stack", "side")
        self.tiles = [(*(int(self.of[name][i]) for name in columns), bool(self.of["gathering"][i] > 0))
                      for i in range(len(rows))]

    def least(self, values):
        found = np.full(len(self.library), np.inf)
        np.minimum.at(found, self.shape, values)
        return found

    def chosen(self, values):
        """Of each shape the way with the least value."""
        order = np.lexsort((values, self.shape))
        return order[np.unique(self.shape[order], return_index=True)[1]]


def predict(ways, cost, factors, before):
    """Microseconds. factors: step, store and unaligned of each way's tile; before: the costs that ways.cu had."""
    of, size, (rows, cols), depth = ways.of, ways.bytes, ways.sizes, ways.depth
    cycles, rate, processors = (ways.device[key] for key in ("cycles", "memory_rate", "multiprocessors"))
    step_factor, store_factor, unaligned_factor = factors
    c = dict.fromkeys(re.findall(r"(\w+) = 0[,;]", HEADER.read_text()), 0.0) | cost

    def line(pitch):
        return np.where(pitch % 128 == 0, 1, np.where(pitch % 32 == 0, c["off_line"], c["off_sector"]))

    blocks = of["stack"] * of["side"]
    asking = np.minimum(1, of["clusters"] * blocks / processors)
    gathering = of["gathering"]
    if "gather_four" in cost:
        gathering = gathering * np.where(ways.by_four, cost["gather_four"] / before["gather_four"],
                                         cost["gather_eight"] / before["gather_eight"])
    parts = (of["multiplied"] / 32 * c["multiply"] + c["between"], of["shared_lines"] * 128 / c["shared_bytes"],
             (line(of["pitch_a"]) * of["fetched_a"] + line(of["pitch_b"]) * of["fetched_b"]) * 128 / c["l2_bytes"]
             * np.maximum(c["least_asking"], asking), c["least_cycles"], gathering)
    step = step_factor * np.cbrt(sum(part**3 for part in parts))
    steps = np.ceil(depth / (128 // size))

    elements, copied = of["rows"] * of["cols"] / of["slices"], of["copied"] / of["slices"]
    narrow, odd = of["pitch_c"] % 16 != 0, of["pitch_c"] / size % 2 != 0
    unaligned = np.where(narrow, np.where(odd, c["narrowest"], c["narrow"]), 0)
    store = store_factor * np.where(narrow, unaligned_factor, 1) * (
        elements * (c["store"] + np.where(of["consumers"] == 3, c["store_three"], 0))
        + np.where(narrow & (of["transposed"] > 0), copied * c["narrow_transposed"], 0)
        + (elements * c["store_alone"] + copied * unaligned) / of["consumers"] + c["tile"]
        + np.where(blocks > 1, c["tile_shared"], 0)
        + elements**2 / 32768 * (c["burst"] + np.where(narrow, np.where(odd, 2, 1) * c["narrow_burst"], 0)))
    busy = ((of["rounds"] + of["shared"] * (c["shared_steps"] - 1)) * steps * step + of["finished"] * store) / cycles

    high, wide = of["rows"] * of["stack"], of["cols"] * of["side"]
    by_sharers = of["shared"] * of["clusters"] * (high + wide) * depth * size
    write = c["write"] + np.where(narrow, c["write_narrow"], np.where(of["pitch_c"] % 32 != 0, c["write_sector"], 0))
    memory = (size * (c["read"] * (rows + cols) * depth + write * rows * cols) + c["shared_reads"] * by_sharers) / rate

    area = of["clusters"] / of["places"] * high * wide
    square = np.minimum(np.maximum(np.sqrt(area), high), rows)
    across = np.minimum(np.maximum(area / square, wide), cols)
    by_places = of["shared"] * of["places"] * (np.minimum(area / across, rows) + across) * depth * size
    whole, of_cluster = of["rows"] * of["cols"], blocks * of["slices"]
    of_thread = whole / of["consumers"] / 128
    handover = c["handover"] + (c["piece"] + c["piece_element"] * of_thread / of["slices"]) * of["pieces"] + (
        c["partial"] * whole / 1024 * of["clusters"] * blocks / processors)
    more = (c["start"] - np.where(of["once"] > 0, c["once"], 0)
            + np.select([of_cluster >= 8, of_cluster >= 4, of_cluster >= 2], [c["eight"], c["four"], c["pair"]])
            + c["in_cluster"] * np.log2(of["slices"]) + c["sent"] * of_thread * (1 - 1 / of["slices"])
            + c["place_reads"] * by_places / rate + np.where(of["pieces"] > 1, handover, 0)
            + np.where(ways.copied > 0, c["copies"] + c["copy"] * 2 * size * ways.copied / rate, 0)
            + np.where(gathering > 0, c["gather"], 0)
            + np.where(of["added"] > 0, c["added"] + c["added_bytes"] * of["added"], 0))
    return np.where(ways.other, ways.estimate, more + (busy**1.7 + memory**1.7) ** (1 / 1.7))


class Fit:
    """theta: logarithms of how many times the costs, and the factors, are what they were."""

    def __init__(self, ways, costs, tiles):
        self.ways, self.costs = ways, costs
        # All ways of a shape have the same start. The products here are too long to tell how long that is.
        self.names = [name for name in costs if costs[name] and name != "start"]
        self.tiles = sorted({tile for tile, other in zip(ways.tiles, ways.other) if not other})
        number = {tile: i for i, tile in enumerate(self.tiles)}
        self.tile = np.array([number.get(tile, len(number)) for tile in ways.tiles])
        self.first = np.array([tiles.get(tile, [1.0] * 3) for tile in self.tiles] + [[1.0] * 3]).T
        took = np.log(ways.took)
        self.behind = took - ways.least(took)[ways.shape]
        self.regret = self.behind + 10 * self.behind**2
        self.near = np.exp(-np.maximum(0, self.behind - 0.05) / 0.1)
        self.per_shape = 1 / len(ways.library)

    def parts(self, theta):
        of_costs, of_tiles = theta[:len(self.names)], theta[len(self.names):].reshape(3, -1)
        costs = self.costs | {name: self.costs[name] * np.exp(x) for name, x in zip(self.names, of_costs)}
        return costs, self.first * np.exp(np.pad(of_tiles, ((0, 0), (0, 1))))

    def logarithm(self, costs, factors):
        return np.log(predict(self.ways, costs, factors[:, self.tile], self.costs))

    def loss(self, theta):
        """What is made small, and its gradient."""
        costs, factors = self.parts(theta)
        shape, shapes, said = self.ways.shape, len(self.ways.library), self.logarithm(costs, factors)
        chance = np.exp(-(said - self.ways.least(said)[shape]) / ERROR)
        chance /= np.bincount(shape, chance, shapes)[shape]
        expected = np.bincount(shape, chance * self.regret, shapes)
        off = np.log(self.ways.took) - said
        weight = self.near / np.bincount(shape, self.near, shapes)[shape]
        mean = np.bincount(shape, weight * off, shapes)
        apart = off - mean[shape]
        loss = self.per_shape * (expected.sum() + 0.3 * (weight * apart**2).sum() + 0.25 * (mean**2).sum())
        by_said = self.per_shape * (-chance * (self.regret - expected[shape]) / ERROR
                                    - weight * (0.6 * apart + 0.5 * mean[shape]))
        gradient, further = np.zeros_like(theta), 1e-3
        for i, name in enumerate(self.names):
            moved = costs | {name: costs[name] * np.exp(further)}
            gradient[i] = (by_said * (self.logarithm(moved, factors) - said)).sum() / further
        for i in range(3):
            moved = factors.copy()
            moved[i] *= np.exp(further)
            change = by_said * (self.logarithm(costs, moved) - said) / further
            at = len(self.names) + i * len(self.tiles)
            gradient[at:at + len(self.tiles)] = np.bincount(self.tile, change, len(self.tiles) + 1)[:-1]
        return loss + 0.1 * (theta**2).mean(), gradient + 0.2 * theta / len(theta)

    def run(self, iterations):
        tiles = len(self.tiles)
        bounds = [(-2.5, 2.5)] * len(self.names) + [(-0.3, 0.3)] * tiles + [(-0.7, 0.7)] * 2 * tiles
        found = minimize(self.loss, np.zeros(len(bounds)), jac=True, method="L-BFGS-B", bounds=bounds,
                         options={"maxiter": iterations})
        return self.parts(found.x)


def report(label, ways, said):
    chosen, took = ways.chosen(said), ways.took
    counted = took[chosen] >= 10
    guess = (took[chosen] / took[ways.chosen(took)])[counted]
    library = (ways.library / took[chosen])[counted]
    print(f"{label}: {counted.sum()} shapes; guess / fastest: mean {np.exp(np.log(guess).mean()):.4f}, above 1.1 "
          f"{100 * (guess > 1.1).mean():.2f} %, worst {guess.max():.2f}; library / guess: mean "
          f"{np.exp(np.log(library).mean()):.3f}, below 0.95 {100 * (library < 0.95).mean():.2f} %, worst "
          f"{library.min():.2f}")


def write(costs_name, tiles_name, costs, tiles):
    text = HEADER.read_text()
    block = ",\n".join(f".{name} = {np.format_float_positional(value, precision=3, fractional=False, trim='-')}"
                       for name, value in costs.items())
    text = re.sub(costs_name + r" = \{.*?\};", lambda _: f"{costs_name} = {{{block}}};", text, count=1, flags=re.S)
    rows = ", ".join("{%d, %d, %s, %d, %d, " % (*key[:2], str(bool(key[2])).lower(), *key[3:5])
                     + ", ".join(np.format_float_positional(factor, precision=3, trim="-") for factor in factors)
                     + (", true}" if key[5] else "}")
                     for key, factors in sorted(tiles.items(), key=lambda each: (each[0][5], each[0])))
    text = re.sub(tiles_name + r"\[\] = \{.*?\};", lambda _: f"{tiles_name}[] = {{{rows}}};", text, count=1, flags=re.S)
    HEADER.write_text(text)
    subprocess.run(["clang-format", "-i", HEADER], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("type", nargs="?", choices=NAMES)
    parser.add_argument("files", nargs="*", help="what the program ways has printed")
    parser.add_argument("--build", action="store_true", help="make the program ways, and stop")
    parser.add_argument("--test", action="append", default=[], metavar="FILE", help="of shapes that are not fitted")
    parser.add_argument("--iterations", type=int, default=100)
    options = parser.parse_args()
    if options.build:
        command = [os.environ.get("NVCC", "/usr/local/cuda/bin/nvcc"), "-std=c++20", "-O3", "-default-stream=per-thread",
                   f"-I{ROOT}", "-gencode=arch=compute_90a,code=sm_90a", "-o", PROGRAM,
                   pathlib.Path(__file__).with_name("ways.cu"), "-lcublas"]
        return subprocess.run(command).returncode
    if not options.files:
        parser.error("name a type, and files; or --build")
    costs_name, tiles_name, size = NAMES[options.type]
    text = HEADER.read_text()
    costs, tiles = costs_of(text, costs_name), tiles_of(text, tiles_name)
    ways = Ways(options.files, size)
    fit = Fit(ways, costs, tiles)
    off = abs(predict(ways, costs, fit.first[:, fit.tile], costs) / ways.estimate - 1).max()
    if off > 1e-3:
        sys.exit(f"{HEADER}: not the costs that ways was built with, or predict() is wrong: off by {off:.2%}")
    report("before", ways, ways.estimate)
    found, factors = fit.run(options.iterations)
    report("after", ways, predict(ways, found, factors[:, fit.tile], costs))
    for path in options.test:
        others = Ways([path], size)
        new = tiles | dict(zip(fit.tiles, factors.T))
        of_ways = np.array([new.get(tile, [1.0] * 3) for tile in others.tiles]).T
        report(path, others, predict(others, found, of_ways, costs))
    write(costs_name, tiles_name, found, tiles | {tile: factors[:, i] for i, tile in enumerate(fit.tiles)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
