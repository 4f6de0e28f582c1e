"""The Clifford layers of the library beside flash-clifford's, which are Triton kernels, and torch.compile's.

    python3 peers/clifford_layers.py --flash-clifford PATH [--json FILE] [--batches 1024 ...] [--features 128 ...]

PATH is a clone of github.com/maxxxzdn/flash-clifford, whose own sizes are the default ones. Its operators are called
with its layout, which is the library's, too: blades first, planes of (batch, features). Each is verified before and
after it is timed, against fp64, with results that were filled with NaN; it is one CUDA graph, the L2 cache is cold, and
all take turns in a random order. Products in fp32 may be rounded to TF32, for all. "with backward": the result and the
gradients of x, y and w, or of x and all weights of a layer.

First all is compiled, in processes side by side."""

import argparse
import functools
import importlib
import itertools
import json
import multiprocessing
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
BATCHES, FEATURES = (1024, 2048, 4096, 8192), (128, 256, 512, 1024)
THEIRS, COMPILED, OURS = "flash-clifford", "torch.compile", "ours"
KINDS = ("weighted", "connected", "layer")
TOLERANCE = {"weighted": 1e-5, "connected": 3e-3, "layer": 3e-3}  # fp32, and products in TF32
ROWS_AT_A_TIME = 2048  # of the formula in fp64


def asked():
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flash-clifford", required=True, help="a clone of it")
    parser.add_argument("--json", type=pathlib.Path, help="write a record to this file")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--features", type=int, nargs="+", default=FEATURES)
    parser.add_argument("--sizes", nargs="+", help="BATCHxFEATURES, instead of all pairs of these")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--without", nargs="+", choices=(THEIRS, COMPILED, OURS), default=(), help="what to leave out")
    parser.add_argument("--budget", type=float, default=60, help="ms of samples a row")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = asked()  # before PyTorch is imported, which --help does not need

import torch

import clifford
import connected
import measure
from operators import Case, compiled, drawer, for_many_sizes


class Kept:
    """torch, whose tensor() returns what it has returned before: within a graph nothing can be copied from the host."""

    def __init__(self):
        self.kept = functools.lru_cache(None)(lambda values, device: torch.tensor(values, device=device))

    def tensor(self, values, device):
        return self.kept(tuple(values), device)

    def __getattr__(self, name):
        return getattr(torch, name)


# ---- What each side computes: (leaves, a function without arguments, what its gradients are as the formula's) ------


def theirs(n, kind, *operands):
    for name in ("fc_p2m0", "fc_p3m0"):
        importlib.import_module(f"ops.{name}").torch = KEPT
    if kind != "layer":
        name = f"{'fc_' * (kind == 'connected')}p{n}m0", f"{'fc' if kind == 'connected' else 's'}gp_norm_{n}d"
        function = getattr(importlib.import_module(f"ops.{name[0]}"), f"fused_gelu_{name[1]}")
        return operands, lambda: function(*operands), lambda gradients: gradients
    x, mix, w = operands
    layer = importlib.import_module("modules.layer").Layer(x.shape[2], n).cuda()
    leaves = x, layer.linear_weight, layer.gp_weight, layer.linear_bias
    with torch.no_grad():
        layer.linear_weight.copy_(mix), layer.gp_weight.copy_(w)
    return leaves, lambda: layer(x), lambda gradients: gradients[:3]


def ours(n, kind, *operands):
    import fused_kernels
    if kind != "layer":
        function = fused_kernels.clifford_connected if kind == "connected" else fused_kernels.clifford
        return operands, lambda: function(*operands, (n, 0, 0)), lambda gradients: gradients
    from fused_kernels import geometric_nn
    x, mix, w = operands
    layer = geometric_nn.CliffordLayer(x.shape[2], (n, 0, 0), math="tf32").cuda()
    with torch.no_grad():
        layer.linear.weight.copy_(mix.mT), layer.w.copy_(w)
    leaves = x, layer.linear.weight, layer.w, layer.linear.bias
    return leaves, lambda: layer(x), lambda found: (found[0], *([found[1].mT, found[2]] if len(found) > 1 else []))


def by_compiler(n, kind, *operands):
    eager = (connected if kind == "connected" else clifford).eager(1 << n)
    if kind != "layer":
        function = compiled(eager)
        return operands, lambda: function(*operands)[0], lambda gradients: gradients
    x, mix, w = operands
    bias = torch.zeros(x.shape[2], device="cuda", requires_grad=x.requires_grad)
    function = compiled(layer_of(eager, n))
    return (*operands, bias), lambda: function(x, mix, w, bias), lambda gradients: gradients[:3]


@functools.lru_cache(None)
def layer_of(eager, n):
    of = sorted(bin(bits).count("1") for bits in range(1 << n))

    def layer(x, mix, w, bias):
        y = torch.bmm(x, torch.stack([mix[grade] for grade in of]))
        return eager(x, torch.cat((y[:1] + bias, y[1:])), w)[0]

    return layer


KEPT = Kept()
MAKES = {THEIRS: theirs, COMPILED: by_compiler, OURS: ours}


def formula(n, kind, x, *rest):
    """In fp64."""
    if kind == "layer":
        mix, w = rest
        blades, _, _ = clifford.tables(1 << n)
        rest = torch.stack([x[k] @ mix[len(blade)] for k, blade in enumerate(blades)]), w
    return (connected if kind == "connected" else clifford).reference(x, *rest)


def expected_of(n, kind, operands, d):
    """The result and the gradients of all operands, in fp64, some rows at a time. The last operands are weights, of all
    rows."""
    rowwise = 1 if kind == "layer" else 2
    results, weights = [], [torch.zeros_like(each, dtype=torch.float64) for each in operands[rowwise:]]
    for first in range(0, operands[0].shape[1], ROWS_AT_A_TIME):
        rows = slice(first, first + ROWS_AT_A_TIME)
        leaves = [(each[:, rows] if at < rowwise else each).double().requires_grad_()
                  for at, each in enumerate(operands)]
        out = formula(n, kind, *leaves)
        own = torch.autograd.grad(out, leaves, d[:, rows].double())
        results.append([out.detach(), *own[:rowwise]])
        for total, each in zip(weights, own[rowwise:]):
            total += each
    return [torch.cat(each, 1) for each in zip(*results)] + weights


def operands_of(n, kind, batch, features, draw):
    blades, triples = 1 << n, len(clifford.algebra_of(1 << n).triples)
    x = draw(blades, batch, features, scale=3**0.5)
    if kind == "layer":
        return x, draw(n + 1, features, features, scale=(3 / features)**0.5), draw(features, triples)
    y = draw(blades, batch, features, scale=3**0.5)
    return x, y, draw(*((triples, features, features) if kind == "connected" else (features, triples)))


def cases_of(n, kind, batch, features, without=()):
    """Forward, and with backward, of the same operands."""
    draw = drawer({"dtype": "fp32"}, 1, "cuda")
    operands = operands_of(n, kind, batch, features, draw)
    d = draw(1 << n, batch, features)
    expected = expected_of(n, kind, operands, d)

    def prepared(make, backward):
        own = [each.detach().requires_grad_(backward) for each in operands]
        leaves, function, present = make(n, kind, *own)

        def call():
            if not backward:
                with torch.no_grad():
                    return (function(),)
            out = function()
            return (out.detach(), *present(torch.autograd.grad(out, leaves, d)))

        return call

    return [Case(expected if backward else expected[:1],
                 {name: functools.partial(prepared, make, backward) for name, make in MAKES.items()
                  if name not in without}) for backward in (False, True)]


def compile_before(path, name, n, kind, sizes, passes):
    """In a process of its own: what it compiles for these sizes is found by others."""
    sys.path.insert(0, path)
    for_many_sizes()
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        for backward, (batch, features) in itertools.product(passes, sizes):
            draw = drawer({"dtype": "fp32"}, 1, "cuda")
            operands = [each.requires_grad_(backward) for each in operands_of(n, kind, batch, features, draw)]
            leaves, function, _ = MAKES[name](n, kind, *operands)
            out = function()
            if backward:
                torch.autograd.grad(out, leaves, torch.ones_like(out))
        torch.cuda.synchronize()
    except Exception as error:  # the run itself says it again
        print(f"{name}, {kind} {n}D: {error}", file=sys.stderr)


def main(options):
    path = str(pathlib.Path(options.flash_clifford).resolve())
    sizes = [(b, f) for b in options.batches for f in options.features]
    if options.sizes:
        sizes = [tuple(map(int, each.split("x"))) for each in options.sizes]
    sys.path.insert(0, path)
    sys.path.insert(0, str(ROOT / "operators" / "python"))
    for_many_sizes()
    layers = [(n, kind) for kind in options.kinds for n in (2, 3)]
    # torch.compile learns from the second size what changes; their kernels are made for one.
    before = [(path, COMPILED, n, kind, sizes[:2], [backward]) for n, kind in layers for backward in (True, False)
              if COMPILED not in options.without]
    before += [(path, THEIRS, n, kind, [size], (False, True)) for n, kind in layers for size in sizes
               if THEIRS not in options.without]
    if before:
        with multiprocessing.get_context("spawn").Pool(min(12, multiprocessing.cpu_count(), len(before))) as pool:
            pool.starmap(compile_before, before, chunksize=1)
    torch.cuda.set_stream(torch.cuda.Stream())
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; us, cold L2 cache")
    problems = []
    for (n, kind), (batch, features) in itertools.product(layers, sizes):
        cases = cases_of(n, kind, batch, features, options.without)
        for backward in (False, True):
            found = measure.measure(cases.pop(0), TOLERANCE[kind], True, "cold", l2, options.budget, 30, 1)
            measure.free_memory()
            us = {name: 1e3 * statistics.median(each.samples) if each.samples else None
                  for name, each in found.items()}
            ours, ok = us.get(OURS), all(each.ok for each in found.values())
            name = f"{kind}, {n}D, {batch} x {features}{', with backward' * backward}"
            print(f"{name:48}" + "".join(f"{key} {value or float('nan'):9.1f}"
                                         f"{f' ({value / ours:.2f})' if value and ours and key != OURS else ''}  "
                                         for key, value in us.items())
                  + " ".join(f"{each.error:.0e}{'' if each.ok else ' WRONG ' + str(each.reason or '')}"
                             for each in found.values()), flush=True)
            problems.append({"name": name, "ok": ok, "kernels": [
                {"name": each, "ms": {"median": us[each] and us[each] / 1e3}, "error": of.error, "ok": of.ok}
                for each, of in found.items()]})
    rows = [summary(f"{kind}, {n}D", backward, problems) for kind in options.kinds for n in (2, 3)
            for backward in (False, True)]
    columns = ["", *(f"{name} / ours, {which}" for name in (THEIRS, COMPILED) for which in ("least", "mean"))]
    ran = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]  # not those left out
    columns, *rows = [[each[i] for i in ran] for each in [columns, *rows]]
    caption = (f"Geometric means and least ratios over {len(sizes)} sizes, {named(options)}; PyTorch "
               f"{torch.__version__}")
    if options.json:
        sys.path.insert(0, str(ROOT / "results" / "questions"))
        from answers import finish
        finish(options.json, torch.cuda.get_device_name(), None, caption, columns, rows)
        record = json.loads(options.json.read_text()) | {"problems": problems}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    else:
        print(*([columns] + rows), sep="\n")
    if not all(problem["ok"] for problem in problems):
        sys.exit("something is wrong")


def named(options):
    """The sizes in words."""
    if options.sizes:
        return ", ".join(options.sizes).replace("x", " x ")
    return " x ".join("(" + ", ".join(map(str, each)) + ")" for each in (options.batches, options.features))


def summary(label, backward, problems):
    """A row: its name, and of each peer the least ratio to ours and the geometric mean; None, where it did not run."""
    cells = []
    for peer in (THEIRS, COMPILED):
        ratios = []
        for problem in problems:
            ms = {each["name"]: each["ms"]["median"] for each in problem["kernels"] if each["ok"]}
            is_its = problem["name"].startswith(label) and problem["name"].endswith("backward") == backward
            if is_its and peer in ms and OURS in ms:
                ratios.append(ms[peer] / ms[OURS])
        cells += [min(ratios), statistics.geometric_mean(ratios)] if ratios else [None, None]
    return [label + ", with backward" * backward, *cells]


if __name__ == "__main__":
    main(OPTIONS)
