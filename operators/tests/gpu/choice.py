"""What the library's first guess costs: each function that has several ways, at shapes drawn at random, called as the
estimate chooses, and again after fk_tune: `python3 operators/tests/gpu/choice.py [--seed N] [--seconds S] [--json FILE]
[FUNCTION...]`, where FUSED_KERNELS_LIBRARY names the library.

Each call is five times in a CUDA graph, so that the host's time does not count; the graphs of a shape take turns, with
operands in a warm cache, and the median counts. Of a function are shown:

  shapes, geometric mean, above 1.1, worst   of the time as estimated over the time as tried, where a call takes at least
                                             10 us. The ways that are tried need no more workspace than the first guess.
  library's ...                              of the time of what a program has instead (PyTorch's matmul, in the same
                                             precision; cuDNN for attention) over ours, as estimated: above 1 ours is
                                             the faster one."""

import argparse
import math
import random
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import cases
from cases import BF16, FP16, FP32, fused_kernels

CALLS, ROUNDS, LEAST = 5, 7, 10.0  # of a graph; of the graphs of a shape; us


def size(least, most, of=1):
    """A size whose logarithm is drawn evenly, a multiple of `of`."""
    return max(of, int(math.exp(random.uniform(math.log(least), math.log(most)))) // of * of)


def numbers(*sizes, dtype, scale=1.0):
    return (torch.randn(*sizes, device="cuda") * scale).to(dtype)


def product(dtype, math_="fp32"):
    rows, cols, depth = size(64, 8192), size(64, 8192, random.choice((1, 8))), size(64, 16384, random.choice((1, 8)))
    a, b = numbers(rows, depth, dtype=dtype), numbers(depth, cols, dtype=dtype, scale=depth**-0.5)
    return (rows, cols, depth), lambda: fused_kernels.product(a, b, math=math_), lambda: a @ b


def attention():
    """Every fourth time short sequences of many heads, as in vision."""
    width, causal = random.choice((64, 64, 96, 128, 128, 192, 256)), random.random() < 0.5
    queries = size(64, 20000)
    keys = queries if random.random() < 0.7 else size(64, 20000)
    kv_heads = random.choice((1, 2, 4, 8))
    heads = kv_heads * random.choice((1, 1, 4))
    batch = random.choice((1, max(1, min(32, int(2.4e10 / (queries * keys * heads * width))))))
    if random.random() < 0.25:
        batch, heads, queries, width = random.choice((8, 16, 64)), 12, size(64, 1024), 64
        kv_heads, keys = heads, queries
    q, k, v = (numbers(batch, *each, width, dtype=BF16)
               for each in ((queries, heads), (keys, kv_heads), (keys, kv_heads)))

    def by_cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=causal,
                                                  enable_gqa=heads != kv_heads)

    shape = batch, queries, keys, heads, kv_heads, width, causal
    same = not causal or queries == keys  # elsewhere PyTorch's mask is another
    return shape, lambda: fused_kernels.attention(q, k, v, causal=causal), by_cudnn if same else None


def gating():
    rows, inputs, hidden = size(64, 200000), size(32, 4096, 8), size(32, 4096, 8)
    while rows * inputs * hidden > 4e11:
        rows //= 2
    operands = (numbers(rows, inputs, dtype=FP16), *(numbers(inputs, hidden, dtype=FP16, scale=inputs**-0.5)
                                                     for _ in range(2)),
                numbers(hidden, dtype=FP16), numbers(hidden, dtype=FP16))
    return (rows, inputs, hidden), lambda: fused_kernels.gating(*operands), None


def softmax():
    rows, inputs, classes = size(8, 8192), size(16, 4096), size(8, 50000)
    while rows * inputs * classes > 5e10:
        rows = max(1, rows // 2)
    x, w = numbers(rows, inputs, dtype=FP32), numbers(inputs, classes, dtype=FP32, scale=inputs**-0.5)
    return (rows, inputs, classes), lambda: fused_kernels.softmax(x, w), None


FUNCTIONS = {
    "attention": attention,
    "product, fp16": lambda: product(FP16),
    "product, fp32": lambda: product(FP32),
    "product, tf32": lambda: product(FP32, "tf32"),
    "product, tf32x3": lambda: product(FP32, "tf32x3"),
    "gated layer": gating,
    "softmax(x W)": softmax,
}


def captured(function):
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            function()
    return graph


def microseconds(graphs):
    times = [[] for _ in graphs]
    for _ in range(ROUNDS + 1):  # the first one warms up
        for graph, own in zip(graphs, times):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            own.append(start.elapsed_time(end) * 1e3 / CALLS)
    return [statistics.median(own[1:]) for own in times]


def geometric_mean(ratios):
    return math.exp(statistics.fmean(math.log(each) for each in ratios)) if ratios else None


def summary(guesses, others):
    result = {"shapes": len(guesses), "geometric_mean": geometric_mean(guesses),
              "above_1.1": sum(each > 1.1 for each in guesses) / max(1, len(guesses)), "worst": max(guesses, default=None)}
    if others:
        result |= {"library_shapes": len(others), "library_geometric_mean": geometric_mean(others),
                   "library_below_0.95": sum(each < 0.95 for each in others) / len(others),
                   "library_worst": min(others)}
    return result


def measure(name, seconds):
    """The summary of a function, and its shapes: those that the guess costs the most first."""
    torch.set_float32_matmul_precision("high" if name.endswith("tf32") else "highest")
    guesses, others, shapes, end = [], [], [], time.monotonic() + seconds
    while time.monotonic() < end:
        shape, function, other = FUNCTIONS[name]()
        guessed = captured(function)
        way = fused_kernels.library().fk_last_way().decode()
        with fused_kernels.tuning():
            function()
        tried_way = fused_kernels.library().fk_last_way().decode()
        graphs = [guessed, captured(function)] + ([captured(other)] if other else [])
        took, tried, *by_other = microseconds(graphs)
        if took < LEAST:
            continue
        guesses.append(took / tried if way != tried_way else 1.0)
        others += [each / took for each in by_other]
        shapes.append((guesses[-1], shape, f"{took:.1f} us [{way}], tried {tried:.1f} us [{tried_way}]"
                       + "".join(f", library {each:.1f} us" for each in by_other)))
        del graphs, guessed, function, other
        if len(shapes) % 16 == 0:
            torch.cuda.empty_cache()
    return summary(guesses, others), sorted(shapes, reverse=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("functions", nargs="*", metavar="FUNCTION", help=f"of {', '.join(FUNCTIONS)}; all, if none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=40, help="of a function")
    parser.add_argument("--worst", type=int, default=5, help="so many shapes are shown")
    parser.add_argument("--json", help="write a record to this file")
    options = parser.parse_args()
    for name in options.functions:
        if name not in FUNCTIONS:
            parser.error(f"there is no function {name}")
    results = {}
    for name in options.functions or FUNCTIONS:
        random.seed(options.seed)
        results[name], shapes = measure(name, options.seconds)
        print(name, {key: round(value, 3) for key, value in results[name].items() if value is not None}, flush=True)
        for ratio, shape, text in shapes[:options.worst]:
            print(f"    {ratio:.2f} at {' x '.join(map(str, shape))}: {text}", flush=True)
        if options.json:
            cases.write_record(options.json, results, "functions")


if __name__ == "__main__":
    main()
