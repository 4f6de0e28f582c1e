"""Milliseconds of the ways for GPUs that are no Hopper, beside PyTorch's operators and torch.compile of these, on the
GPU that is there: `FUSED_KERNELS_CAPABILITY=8.0 python3 operators/tests/gpu/portable.py [--json FILE] [FUNCTION...]`,
where FUSED_KERNELS_LIBRARY names the library. A record belongs into results/<gpu>/python/portable.json; that of 8.9,
whose blocks have at most 99 KB of shared memory, into portable-8.9.json beside it: with --ours, since the others are
the same.

Rows are measured as times.py measures them: each a CUDA graph, in turn, with a cold L2 cache; the median counts. What
ours is compared with is the faster one of the two others, in the same run; `bar` is what the ratio has to be. Before,
our result's error against fp64, relative in the Frobenius norm, must not be above twice that of PyTorch's operators."""

import argparse
import dataclasses
import os
import typing

import torch

import cases
import times
from cases import BF16, FP16, FP32, fused_kernels

CAPABILITY = "FUSED_KERNELS_CAPABILITY"


@dataclasses.dataclass
class Row:
    name: str
    case: cases.Case
    by_pytorch: typing.Callable
    bars: dict  # False: of forward, True: of forward with backward; a bar may be None


def product():
    for n in (4096, 8192):
        yield Row(f"product, {n} x {n} x {n}, fp16", cases.product(n, n, n, FP16), torch.matmul, {False: 0.75})
    n = 4096
    for math in ("tf32", "fp32"):
        yield Row(f"product, {n} x {n} x {n}, {math}", cases.product(n, n, n, FP32, math=math), torch.matmul,
                  {False: None})


def gated_layer():
    for rows, inputs, hidden, bars in ((1 << 20, 128, 64, {False: 2.3, True: 1.2}),
                                       (1 << 16, 512, 512, {False: None, True: None})):
        yield Row(f"gated layer, {rows} x {inputs}, {hidden} hidden, fp16", cases.gating(rows, inputs, hidden),
                  cases.gating_in_fp64, bars)


def diffusion():
    yield Row("diffusion, 131072 x 256, 128 eigenvectors, bf16", cases.diffusion(131072, 128, 256),
              cases.diffusion_in_fp64, {False: 1.35, True: 1.3})


def gradient_features():
    yield Row("gradient features, 131072 x 256, 128 eigenvectors, bf16", cases.gradient_features(131072, 128, 256),
              cases.features_in_fp64, {False: 2.5, True: 2.0})


def softmax():
    yield Row("softmax(x W), 4096 x 1024, 10000 classes, fp32", cases.softmax(4096, 1024, 10000),
              lambda x, w: torch.softmax(x @ w, 1), {False: None})


def attention():
    case = cases.attention(4, 4096, 4096, 16, 16, 128, BF16)
    case.run = fused_kernels.attention
    yield Row("attention, 4 x 4096 x 16 x 128, bf16", case, times.attention_by_pytorch, {False: None, True: None})


def clifford():
    yield Row("Clifford product, 8 x 8192 x 1024, fp32", cases.clifford(8192, 1024), times.clifford_by_pytorch,
              {False: 3.5, True: 10.0})


def clifford_connected():
    yield Row("connected Clifford product, 8 x 4096 x 512, tf32", cases.clifford_connected(4096, 512),
              times.clifford_by_pytorch, {False: 1.3, True: 1.3})


# What each function's rows are. A generator, so that a row's operands live no longer than the row.
FUNCTIONS = {"product": product, "gated layer": gated_layer, "diffusion": diffusion,
             "gradient features": gradient_features, "softmax(x W)": softmax, "attention": attention,
             "Clifford product": clifford, "connected Clifford product": clifford_connected}


def measure(row, backward, options):
    """The record of a row. `way`: forward's. (Backward is called by a thread of PyTorch's.)"""
    torch.compiler.reset()
    torch.set_float32_matmul_precision("high" if row.name.endswith("tf32") else "highest")
    names = ("ours",) if options.ours else ("PyTorch", "compiled", "ours")
    took, own, other = times.measure(row.case, row.by_pytorch, backward, not (options.eager or options.ours), names)
    way = fused_kernels.library().fk_last_way().decode()
    assert own <= 2 * other, f"{row.name}: the relative error is {own}; that of PyTorch's operators is {other}"
    others = [took[name] for name in took if name != "ours"]
    ratio, bar = min(others) / took["ours"] if others else None, row.bars[backward]
    label = row.name + ("; with backward" if backward else "")
    print(f"{label:60}" + "".join(f"{time:10.4f}" for time in took.values()) + f"{own:10.1e}{other:10.1e}"
          + (f"{ratio:8.2f}" if ratio else "")
          + (f" {'reaches' if ratio >= bar else 'MISSES'} {bar}" if ratio and bar else "") + f"   [{way}]", flush=True)
    errors = {"ours": own, "PyTorch": other, "compiled": None}
    return {"name": label, "way": way, "ratio": ratio, "bar": bar,
            "kernels": [{"name": name, "ms": {"median": time}, "error": errors[name]} for name, time in took.items()]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("functions", nargs="*", metavar="FUNCTION", help=f"of {', '.join(FUNCTIONS)}; all, if none")
    parser.add_argument("--json", help="write a record to this file")
    parser.add_argument("--eager", action="store_true", help="leave torch.compile out")
    parser.add_argument("--ours", action="store_true", help="time nothing else")
    options = parser.parse_args()
    for name in options.functions:
        if name not in FUNCTIONS:
            parser.error(f"there is no function {name}")
    print(f"{torch.cuda.get_device_name()} as {os.environ.get(CAPABILITY, 'what it is')}, PyTorch {torch.__version__}; "
          f"ms, L2 cache cold, median of {times.SAMPLES}")
    others = ["PyTorch", "compiled"][:0 if options.ours else 1 if options.eager else 2]
    names = [*others, "ours", "error", "PyTorch's"]
    print(f"{'':60}" + "".join(f"{name:>10}" for name in names) + ("" if options.ours else f"{'ratio':>8}"))
    measured = []
    for name in options.functions or FUNCTIONS:
        for row in FUNCTIONS[name]():
            measured += [measure(row, backward, options) for backward in row.bars]
            if options.json:
                cases.write_record(options.json, measured)


if __name__ == "__main__":
    main()
