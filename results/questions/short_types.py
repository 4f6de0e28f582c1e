"""The library's products of short types beside fp16: how fast they are, and how far their results are from fp64.

    results/questions/short_types.py [--json results/h200/questions/short_types.json]

PyTorch calls cuBLASLt. The numbers are uniform between -1 and 1. fp8 is e4m3, and takes them as they are; int8 takes
the nearest of 255 whole numbers, 127 times as large. B lies transposed, as both of these want it. Results are fp16, of
int8 whole numbers of 32 bits. Each call is a CUDA graph of one, the types in turn, with a cold L2 cache.
"""
import sys

import answers
import torch

sys.path.insert(0, str(answers.ROOT / "peers"))
from cold_cache import SAMPLES, milliseconds  # noqa: E402


def products(a, b):
    """{type: (a call that multiplies, what its results are multiplied by)}; b is the transposed right factor."""
    one = torch.ones((), device="cuda")
    fp16, bf16, fp8 = ([each.to(kind) for each in (a, b)]
                       for kind in (torch.float16, torch.bfloat16, torch.float8_e4m3fn))
    int8 = [(127 * each).round().to(torch.int8) for each in (a, b)]
    return {
        "fp16": (lambda: fp16[0] @ fp16[1].t(), 1),
        "bf16": (lambda: bf16[0] @ bf16[1].t(), 1),
        "fp8": (lambda: torch._scaled_mm(fp8[0], fp8[1].t(), one, one, out_dtype=torch.float16), 1),
        "fp8, fast sums": (lambda: torch._scaled_mm(fp8[0], fp8[1].t(), one, one, out_dtype=torch.float16,
                                                    use_fast_accum=True), 1),
        "int8": (lambda: torch._int_mm(int8[0], int8[1].t()), 127**-2),
    }


def captured(call):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def main():
    options = answers.parser_of(__doc__).parse_args()
    rows = []
    for n in (4096, 8192):
        a, b = (2 * torch.rand(n, n, device="cuda", dtype=torch.float64) - 1 for _ in range(2))
        exact = a @ b.t()
        calls = products(a, b)
        graphs = {kind: captured(call) for kind, (call, _) in calls.items()}
        times = milliseconds({kind: graph for kind, (graph, _) in graphs.items()})
        for kind, (_, result) in graphs.items():
            ms = times[kind]
            error = ((calls[kind][1] * result.double() - exact).norm() / exact.norm()).item()
            rows.append([f"{kind}, {n} x {n} x {n}", ms, 2e-9 * n**3 / ms, error])
        del graphs, calls, exact
    answers.finish(options.json, torch.cuda.get_device_name(), None,
                   f"Cold L2 cache, median of {SAMPLES}, PyTorch {torch.__version__}",
                   ["product", "ms", "10^12 operations/s", "error"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
