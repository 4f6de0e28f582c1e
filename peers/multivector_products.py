"""geometric_product() alone, with blades last, as geometric algebra transformers call it, beside a copy of as many
bytes and an einsum with the table of blades.

    python3 peers/multivector_products.py [--items 65536] [--channels 16] [--json FILE]

Each is verified before and after it is timed, against fp64, with results that were filled with NaN; it is one CUDA
graph, the L2 cache is cold, and all take turns in a random order. "backward": the gradients of x and y. A copy reads
and writes half as many bytes each as the product reads and writes, so it moves as many."""

import argparse
import functools
import itertools
import pathlib
import random
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
ALGEBRAS = {  # signature: the squares of its vectors in the order of its words, and how the library calls that order
    (3, 0, 1): ([0, 1, 1, 1], "null_first"), (1, 3, 0): ([1, -1, -1, -1], "shortlex"),
    (3, 0, 0): ([1, 1, 1], "shortlex")}
COPY, EINSUM, COMPILED, OURS = "copy", "einsum", "torch.compile", "ours"
TOLERANCE = {"fp32": 1e-6, "bf16": 2.0**-8, "fp16": 2.0**-11}


def asked():
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=65536)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--types", nargs="+", choices=TOLERANCE, default=["fp32", "bf16"])
    parser.add_argument("--without", nargs="+", choices=[EINSUM, COMPILED], default=(), help="peers to leave out")
    parser.add_argument("--json", type=pathlib.Path, help="write a record to this file")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = asked()  # before PyTorch is imported, which --help does not need

import torch

import measure
from clifford import product_of_blades
from operators import TYPES, compiled, drawer, in_default_mode


@functools.lru_cache(None)
def table_of(squares):
    """(blades, blades, blades): what is left of blade k in blade i times blade j."""
    vectors = range(len(squares))
    words = [word for length in range(len(squares) + 1) for word in itertools.combinations(vectors, length)]
    table = torch.zeros((len(words),) * 3, dtype=torch.float64)
    for (i, a), (j, b) in itertools.product(enumerate(words), repeat=2):
        sign, word = product_of_blades(a, b, squares)
        table[i, j, words.index(word)] += sign
    return table.cuda()


def by_table(x, y, table):
    return torch.einsum("nci,ncj,ijk->nck", x, y, table)


def peers_of(signature, dtype, items, channels, backward):
    """(what a peer's call returns in fp64, {name: prepare, as in a Case})."""
    import fused_kernels
    squares, order = ALGEBRAS[signature]
    table = table_of(tuple(squares))
    own_table, draw = table.to(TYPES[dtype]), drawer({"dtype": dtype}, 1, "cuda")
    x, y, d = (draw(items, channels, len(table)) for _ in range(3))

    def call_of(function, *operands):
        leaves = [each.detach().requires_grad_(backward) for each in operands]
        if not backward:
            return lambda: (function(*leaves),)
        out = function(*leaves)
        return lambda: torch.autograd.grad(out, leaves, d.to(out.dtype), retain_graph=True)

    def copy():
        moved = (5 if backward else 3) * x.numel() // 2
        source, target = draw(moved), torch.empty(moved, dtype=x.dtype, device="cuda")
        return lambda: (target.copy_(source),)

    functions = {
        EINSUM: lambda x, y: by_table(x, y, own_table),
        COMPILED: lambda x, y: compiled(by_table)(x, y, own_table),
        OURS: lambda x, y: fused_kernels.geometric_product(x, y, signature=signature, layout="blades_last",
                                                           order=order)}
    expected = call_of(lambda x, y: by_table(x, y, table), x.double(), y.double())()
    return expected, {COPY: copy} | {name: functools.partial(call_of, each, x, y) for name, each in functions.items()}


def measured(expected, peers, tolerance, turns=40):
    """{name: us}, and the errors of those that compute the product. Exits where ours is wrong."""
    captured, errors = {}, {}
    for name, prepare in peers.items():
        captured[name] = measure.Captured(prepare, 1)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    for turn in range(2):
        for name, peer in captured.items():
            if name != COPY:
                result = measure.Measured(ok=True)
                peer.verify(expected, tolerance if name == OURS else 1.0, result)
                errors[name] = result.error
                if not result.ok:
                    sys.exit(f"{name} is wrong: its error is {result.error}")
        if turn == 0:
            samples = measure.sample_all(captured, "cold", l2, 100, turns, random.Random(1))
    return {name: 1e3 * statistics.median(each) for name, each in samples.items()}, errors


def main(options):
    sys.path[:0] = [str(ROOT / "operators" / "python"), str(ROOT / "results" / "questions")]
    from answers import finish
    in_default_mode()
    torch.cuda.set_stream(torch.cuda.Stream())
    names, rows = [name for name in (COPY, EINSUM, COMPILED, OURS) if name not in options.without], []
    for signature, dtype, backward in itertools.product(ALGEBRAS, options.types, (False, True)):
        expected, peers = peers_of(signature, dtype, options.items, options.channels, backward)
        us, errors = measured(expected, {name: peers[name] for name in names}, TOLERANCE[dtype])
        label = f"{signature}, {dtype}{', backward' * backward}"
        print(label, us, errors, flush=True)
        rows.append([label, *us.values(), us[COPY] / us[OURS]])
        del expected, peers
        measure.free_memory()
    caption = (f"us, {options.items} x {options.channels} multivectors, blades last, cold L2 cache, PyTorch "
               f"{torch.__version__}")
    finish(options.json, torch.cuda.get_device_name(), None, caption, ["", *names, f"{COPY} / {OURS}"], rows)


if __name__ == "__main__":
    main(OPTIONS)
