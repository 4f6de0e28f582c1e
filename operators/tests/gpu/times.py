"""Milliseconds on the GPU of each of fused_kernels' functions, beside PyTorch's own operators and torch.compile of
these: `python3 operators/tests/gpu/times.py [--gates | --further] [--json FILE]`, where FUSED_KERNELS_LIBRARY names the
library. With --gates it is the gated layer alone, with each of its gates; with --further what is measured besides: the
gated layer of two inputs, batches of products, and sums of rows.

Two rows an operator: forward, and forward with backward, of all gradients that the function has. Each is a CUDA graph,
so that the host's time does not count. They take turns, each with a cold L2 cache; the median is shown.
What all three compute is compared before: the error is the largest difference of ours to PyTorch's operators in fp64,
relative in the Frobenius norm, beside the same of PyTorch's in the operands' own type."""

import argparse
import sys

import torch
import torch.nn.functional as F

import cases
from cases import BF16, FP16, FP32, fused_kernels, tensors

sys.path.insert(0, str(cases.ROOT / "peers"))
from cold_cache import SAMPLES, captured, milliseconds


def attention_by_pytorch(q, k, v):
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def clifford_by_pytorch(x, y, w):
    return cases.clifford_in_fp64(x, y, w, (3, 0, 0), True)


def rows():
    """(name, case, what PyTorch has instead)."""
    attention = cases.attention(4, 4096, 4096, 16, 16, 128, BF16)
    attention.run = fused_kernels.attention
    return [
        ("product, 4096 x 4096 x 4096, fp16", cases.product(4096, 4096, 4096, FP16), torch.matmul),
        *((f"product, 4096 x 4096 x 4096, {math}", cases.product(4096, 4096, 4096, FP32, math=math), torch.matmul)
          for math in ("tf32", "tf32x3")),
        ("product, 16 x 11008 x 4096, fp16", cases.product(16, 11008, 4096, FP16), torch.matmul),
        ("product, 512 x 512 x 16384, tf32", cases.product(512, 512, 16384, FP32, math="tf32"), torch.matmul),
        ("gated layer, 1048576 x 128, 64 hidden, fp16", cases.gating(1 << 20, 128, 64), cases.gating_in_fp64),
        ("diffusion, 131072 x 256, 128 eigenvectors, bf16", cases.diffusion(1 << 17, 128, 256),
         cases.diffusion_in_fp64),
        ("gradient features, 131072 x 256, 128 eigenvectors, bf16", cases.gradient_features(1 << 17, 128, 256),
         cases.features_in_fp64),
        ("softmax(x W), 4096 x 1024, 10000 classes, fp32", cases.softmax(4096, 1024, 10000),
         lambda x, w: torch.softmax(x @ w, 1)),
        ("cross-entropy of softmax(x W), 4096 x 1024, 10000 classes, fp32", cases.cross_entropy(4096, 1024, 10000),
         cases.cross_entropy_in_fp64),
        ("softmax(x W), 4096 x 1024, 10000 classes, bf16", cases.softmax(4096, 1024, 10000, BF16),
         lambda x, w: torch.softmax(x @ w, 1)),
        ("cross-entropy of softmax(x W), 4096 x 1024, 10000 classes, bf16",
         cases.cross_entropy(4096, 1024, 10000, BF16), cases.cross_entropy_in_fp64),
        ("Clifford product, 8 x 8192 x 1024, fp32", cases.clifford(8192, 1024), clifford_by_pytorch),
        ("connected Clifford product, 8 x 4096 x 512, tf32", cases.clifford_connected(4096, 512), clifford_by_pytorch),
        ("attention, 4 x 4096 x 16 x 128, bf16", attention, attention_by_pytorch),
    ]


def gates():
    """The same of the gated layer with each gate."""
    layers = {gate: cases.gating(1 << 20, 128, 64, gate=gate) for gate in cases.GATES}
    return [(gate, case, case.formula) for gate, case in layers.items()]


def sum_of_rows(rows, cols, dtype):
    """The gradient of a product's bias alone."""
    def operands(seed=0):
        shapes = (rows, cols), (rows, 8), (8, cols)  # d_c, a, b
        return [cases.numbers(*shape, dtype=dtype, seed=seed + i) for i, shape in enumerate(shapes)]

    def run(*operands):
        return fused_kernels.product_backward(*operands, d_a=False, d_b=False)[2]

    return cases.Case("sum", run, operands, None, formula=lambda d_c, a, b: d_c.sum(0))


def further():
    layers = (((65536, 512, 512, 512), True), ((65536, 512, 512, 512), False), ((1 << 20, 128, 128, 64), True))
    for shape, gated in layers:
        case = cases.gating_two(*shape, dtype=BF16, gated=gated, biases=False)
        values = "silu(y V)" if gated else "(y V)"
        yield f"silu(x W) * {values}, {shape[0]} x {shape[1]}, {shape[3]} hidden, bf16", case, case.formula
    for batch, size in ((1024, 64), (128, 512)):
        for transposed, name in ("", "a b"), ("b", "a b^T"), ("a", "a^T b"):
            case = cases.any_product("batch", *2 * [(batch, size, size)], FP16, transposed)
            case.wants_gradients = ()
            yield f"{batch} products {name}, {size} x {size} x {size}, fp16", case, case.formula
    for rows, cols in ((8192, 4096), (1 << 20, 64)):
        case = sum_of_rows(rows, cols, BF16)
        yield f"sum of {rows} rows of {cols}, bf16", case, case.formula


def operands_of(case):
    """Those of the case, with random digits in all places. What has no negative numbers stays as it is."""
    torch.manual_seed(1)
    return [each if not each.is_floating_point() or bool((each >= 0).all())
            else (torch.randn_like(each, dtype=FP32) * each.float().std()).to(each.dtype) for each in case.operands()]


def error(results, exact):
    """The largest error of a result, relative in the Frobenius norm."""
    return max(((one.double() - other).norm() / other.norm()).item() for one, other in zip(results, exact))


def step_of(function, operands, wanted, gradients):
    """A call: forward alone, or with `gradients` of the results, and what it returns."""
    if not gradients:
        def step():
            with torch.no_grad():
                return tensors(function(*operands))
        return step
    return lambda: torch.autograd.grad(tensors(function(*operands)), wanted, gradients)


def measure(case, by_pytorch, backward, compiled=True, timed=("PyTorch", "compiled", "ours")):
    """({name: ms} of those that are `timed`, error of ours, error of PyTorch's operators). torch.compile is left out
    unless `compiled`."""
    operands = operands_of(case)
    wanted = [operands[at].requires_grad_() for at in case.wants_gradients] if backward else []
    functions = {"PyTorch": by_pytorch, "compiled": torch.compile(by_pytorch), "ours": case.run}
    if not compiled:
        del functions["compiled"]
    gradients = [torch.randn_like(each) for each in tensors(case.run(*operands))] if backward else []
    steps = {name: step_of(each, operands, wanted, gradients) for name, each in functions.items()}
    doubles = [each.detach().double() for each in operands]
    at = [doubles[i].requires_grad_() for i in case.wants_gradients] if backward else []
    exact = step_of(by_pytorch, doubles, at, [each.double() for each in gradients])()
    errors = [error(steps[name](), exact) for name in ("ours", "PyTorch")]
    del doubles, at, exact
    torch.cuda.empty_cache()
    return milliseconds({name: captured(step) for name, step in steps.items() if name in timed}), *errors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write a record to this file")
    parser.add_argument("--gates", action="store_true", help="the gated layer with each gate, and nothing else")
    parser.add_argument("--further", action="store_true", help="two inputs, batches and sums of rows, and nothing else")
    options = parser.parse_args()
    path = options.json
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; ms, L2 cache cold, median of {SAMPLES}")
    print(f"{'':68}" + "".join(f"{name:>10}" for name in ("PyTorch", "compiled", "ours", "error", "PyTorch's")))
    problems = []
    for name, case, by_pytorch in further() if options.further else gates() if options.gates else rows():
        for backward in (False, True) if case.wants_gradients else (False,):
            torch.compiler.reset()
            torch.set_float32_matmul_precision("high" if name.endswith("tf32") else "highest")
            label = name + ("; with backward" if backward else "")
            times, own, other = measure(case, by_pytorch, backward)
            print(f"{label:68}" + "".join(f"{time:10.4f}" for time in times.values()) + f"{own:10.1e}{other:10.1e}")
            problems.append({"name": label, "kernels": [{"name": each, "ms": {"median": time}, "error": by}
                             for (each, time), by in zip(times.items(), (other, None, own))]})
            if path:
                cases.write_record(path, problems)


if __name__ == "__main__":
    main()
