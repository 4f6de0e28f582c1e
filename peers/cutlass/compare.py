"""CUTLASS's kernels beside ours on a Hopper GPU: products by its builder, and its examples 45_dual_gemm and
88_hopper_fmha.

    git clone --depth 1 -b v4.7.0 https://github.com/NVIDIA/cutlass CUTLASS
    N="nvcc -std=c++17 -O3 -DNDEBUG --expt-relaxed-constexpr --expt-extended-lambda -arch=sm_90a"
    N="$N -Xcompiler -fPIC -shared -lcuda -ICUTLASS/include -ICUTLASS/tools/util/include"
    $N peers/cutlass/product.cu -o FOLDER/product.so
    $N -ICUTLASS/examples/45_dual_gemm peers/cutlass/gating.cu -o FOLDER/gating.so
    $N --use_fast_math -ICUTLASS/examples/88_hopper_fmha peers/cutlass/attention.cu -o FOLDER/attention.so
    peers/cutlass/compare.py FOLDER [--json results/h200/questions/cutlass.json]

These are the flags of CUTLASS's own build, in which the example of attention has --use_fast_math. The script needs
PyTorch, and FUSED_KERNELS_LIBRARY names our library. Calls are timed in CUDA graphs: one with a cold L2 cache, or 100
where a call takes less than 50 us. CUTLASS's ways take turns, and then the fastest of them, ours and PyTorch's do.
Before, each result is compared with one in fp64.
"""
import argparse
import ctypes
import pathlib
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
for folder in ("operators/python", "peers", "results", "results/questions"):
    sys.path.insert(0, str(ROOT / folder))
import answers  # noqa: E402
import fused_kernels  # noqa: E402
from cold_cache import SAMPLES, captured, milliseconds  # noqa: E402

FP16 = torch.float16
MULTIPROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count


def uniform(*shape, scale=1.0):
    return ((2 * torch.rand(shape, device="cuda") - 1) * scale).to(FP16)


def pointers(*tensors):
    return [ctypes.c_void_p(each.data_ptr()) for each in tensors]


def stream():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


class Ways:
    """CUTLASS's ways of one library: names, and calls that write to `out`."""

    def __init__(self, folder, name):
        self.library, self.name = ctypes.CDLL(str(folder / f"{name}.so")), f"cutlass_{name}"
        named = getattr(self.library, f"{self.name}_way")
        named.restype = ctypes.c_char_p
        self.names = [named(way).decode() for way in range(getattr(self.library, f"{self.name}_ways")())]

    def call(self, way, *arguments):
        code = getattr(self.library, self.name)(way, *arguments)
        if code != 0:
            raise RuntimeError(f"{self.name}, {self.names[way]}: error {code}")


def row(label, steps, out, expected, calls):
    """A row of the table: steps "ours", "PyTorch" and CUTLASS's ways write `out`, or return the result."""
    for name, step in steps.items():
        out.fill_(torch.nan)
        found = step()
        found = (out if found is None else found)[:len(expected)].double()
        error = ((found - expected).norm() / expected.norm()).item()
        if not error < 1e-3:
            sys.exit(f"{label}, {name}: the relative error is {error}")
    graphs = {name: captured(step, calls) for name, step in steps.items()}
    ways = milliseconds({name: graph for name, graph in graphs.items() if name not in ("ours", "PyTorch")}, calls)
    best = min(ways, key=ways.get)
    print(label, {name: round(time, 5) for name, time in ways.items()}, flush=True)
    ms = milliseconds({name: graphs[name] for name in ("ours", "PyTorch", best)}, calls)
    return [label, ms["ours"], ms["PyTorch"], ms[best], ms[best] / ms["ours"], best]


def products(folder):
    ways = Ways(folder, "product")
    for n in (1024, 4096, 8192):
        a, b = uniform(n, n), uniform(n, n)
        c = torch.empty(n, n, device="cuda", dtype=FP16)
        steps = {"ours": lambda: fused_kernels.product(a, b), "PyTorch": lambda: torch.matmul(a, b, out=c)}
        for way, name in enumerate(ways.names):
            for group in (1, 8):
                steps[f"{name}, groups of {group}"] = lambda way=way, group=group: ways.call(
                    way, n, MULTIPROCESSORS, group, *pointers(a, b, c), stream())
        yield row(f"product, {n} x {n} x {n}, fp16", steps, c, a.double() @ b.double(), 100 if n < 2048 else 1)


def gated_layers(folder):
    ways = Ways(folder, "gating")
    for rows, inputs, hidden in ((1 << 22, 128, 64), (4096, 4096, 4096)):
        x, (w1, w2) = uniform(rows, inputs), (uniform(inputs, hidden, scale=3 / inputs**0.5) for _ in range(2))
        out = torch.empty(rows, hidden, device="cuda", dtype=FP16)
        steps = {"ours": lambda: fused_kernels.gating(x, w1, w2, gate="silu"),
                 "PyTorch": lambda: torch.nn.functional.silu(x @ w1) * (x @ w2)}
        for way, name in enumerate(ways.names):
            steps[name] = lambda way=way: ways.call(way, rows, inputs, hidden, *pointers(x, w1, w2, out), stream())
        first = x[:1 << 18].double()
        expected = torch.nn.functional.silu(first @ w1.double()) * (first @ w2.double())
        yield row(f"gated layer with SiLU, {rows} x {inputs}, {hidden} hidden, fp16", steps, out, expected, 1)


def attentions(folder):
    ways = Ways(folder, "attention")
    batch, heads, rows, width = 4, 16, 4096, 128
    q, k, v = (torch.randn(batch, heads, rows, width, device="cuda").to(FP16) for _ in range(3))
    out, log_sums = torch.empty_like(q), torch.empty(batch, heads, rows, device="cuda")
    workspace = torch.empty(1 << 20, device="cuda", dtype=torch.uint8)
    for causal in (False, True):
        steps = {"ours": lambda: fused_kernels.attention(*(each.transpose(1, 2) for each in (q, k, v)), causal,
                                                         log_sums=True)[0].transpose(1, 2),
                 "PyTorch": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)}
        for way, name in enumerate(ways.names):
            steps[name] = lambda way=way: ways.call(
                way, int(causal), batch, heads, rows, rows, MULTIPROCESSORS, *pointers(q, k, v, out, log_sums,
                workspace), ctypes.c_size_t(1 << 20), stream())
        expected = torch.nn.functional.scaled_dot_product_attention(*(each[:1].double() for each in (q, k, v)),
                                                                    is_causal=causal)
        yield row(f"attention, {batch} x {rows} x {heads} x {width}, fp16{', causal' if causal else ''}", steps, out,
                  expected, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="that of the three libraries")
    parser.add_argument("--json", type=pathlib.Path, help="write the record to this file")
    options = parser.parse_args()
    folder = options.folder.resolve()
    torch.manual_seed(1)
    rows = [*products(folder), *gated_layers(folder), *attentions(folder)]
    answers.finish(options.json, torch.cuda.get_device_name(), None,
                   f"ms, median of {SAMPLES}, PyTorch {torch.__version__}",
                   ["", "ours", "PyTorch", "CUTLASS", "CUTLASS / ours", "CUTLASS's fastest"], rows)


if __name__ == "__main__":
    main()
