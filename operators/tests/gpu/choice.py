"""What the library's first guess costs: each function that has several ways, at shapes drawn at random, called as the
estimate chooses, and again after fk_tune: `python3 operators/tests/gpu/choice.py [--seed N] [--seconds S] [--json FILE]
[FUNCTION...]`, where FUSED_KERNELS_LIBRARY names the library.

Each call is in a CUDA graph, so often that the graph takes half a millisecond: so the host's time does not count. The
graphs of a shape take turns, with operands in a warm cache, and the median counts. Of a function are shown:

  shapes, geometric mean, above 1.1, worst   of the time as estimated over the time as tried, where a call takes
                                             10 us or more. The ways that are tried need no more workspace than the
                                             first guess.
  library's ...                              of the time of what a program has instead (PyTorch's matmul, in the same
                                             precision; cuDNN for attention) over ours, as estimated: above 1 ours is
                                             the faster one
  flash_...                                  the same, of FlashAttention's gradients
  named                                      the same at shapes of NAMED, which are not among the others"""

import argparse
import contextlib
import math
import random
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import cases
from cases import BF16, FP16, FP32, fused_kernels

GRAPH, MOST_CALLS, ROUNDS, LEAST = 500.0, 100, 7, 10.0  # us, and calls, of a graph; of the graphs of a shape; us


def size(least, most, of=1):
    """A size whose logarithm is drawn evenly, a multiple of `of`."""
    return max(of, int(math.exp(random.uniform(math.log(least), math.log(most)))) // of * of)


def numbers(*sizes, dtype, scale=1.0):
    return (torch.randn(*sizes, device="cuda") * scale).to(dtype)


def product(dtype, math_="fp32"):
    rows, cols, depth = size(64, 8192), size(64, 8192, random.choice((1, 8))), size(64, 16384, random.choice((1, 8)))
    a, b = numbers(rows, depth, dtype=dtype), numbers(depth, cols, dtype=dtype, scale=depth**-0.5)
    return (rows, cols, depth), lambda: fused_kernels.product(a, b, math=math_), lambda: a @ b


def attention_shape(widths, queries, keys):
    """(batch, queries, keys, heads, kv_heads, width, causal). Every fourth time short sequences of many heads, as in
    vision."""
    width, causal = random.choice(widths), random.random() < 0.5
    kv_heads = random.choice((1, 2, 4, 8))
    heads = kv_heads * random.choice((1, 1, 4))
    batch = random.choice((1, max(1, min(32, int(2.4e10 / (queries * keys * heads * width))))))
    if random.random() < 0.25:
        batch, heads, queries, width = random.choice((8, 16, 64)), 12, size(64, 1024), 64
        kv_heads, keys = heads, queries
    return batch, queries, keys, heads, kv_heads, width, causal


def of_attention(shape):
    """q, k and v."""
    batch, queries, keys, heads, kv_heads, width, _ = shape
    return [numbers(batch, *each, width, dtype=BF16) for each in ((queries, heads), (keys, kv_heads), (keys, kv_heads))]


def by_pytorch(backend, q, k, v, causal):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=causal,
                                              enable_gqa=q.shape[2] != k.shape[2])


def attention():
    queries = size(64, 20000)
    keys = queries if random.random() < 0.7 else size(64, 20000)
    shape = attention_shape((64, 64, 96, 128, 128, 192, 256), queries, keys)
    q, k, v = of_attention(shape)
    causal = shape[-1]
    same = not causal or shape[1] == shape[2]  # elsewhere PyTorch's mask is another
    return shape, lambda: fused_kernels.attention(q, k, v, causal=causal), (
        (lambda: by_pytorch(SDPBackend.CUDNN_ATTENTION, q, k, v, causal)) if same else None)


PYTORCH = {"library": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def attention_gradients(shape=None):
    """Of what forward has left. PyTorch's backward passes are those that autograd calls; it may have none for a
    shape."""
    if not shape:
        queries = size(64, 16384)
        keys = queries if random.random() < 0.7 else size(64, 16384)
        batch, queries, keys, heads, kv_heads, width, causal = attention_shape((64, 64, 96, 128, 128, 192, 256), queries, keys)
        group = heads // kv_heads
        kv_heads = max(kv_heads, 4 // group)
        shape = batch, queries, keys, group * kv_heads, kv_heads, width, causal
    q, k, v = of_attention(shape)
    causal = shape[-1]
    out, log_sums = fused_kernels.attention(q, k, v, causal=causal, log_sums=True)
    d_out = numbers(*q.shape, dtype=BF16)
    leaves = [each.requires_grad_() for each in (q.detach(), k.detach(), v.detach())]

    def ours():
        return fused_kernels.attention_backward(d_out, q, k, v, out, log_sums, causal)

    def backward_of(backend):
        result, d = by_pytorch(backend, *leaves, causal), d_out.transpose(1, 2)
        return lambda: torch.autograd.grad(result, leaves, d, retain_graph=True)

    others, found = {}, ours()
    # Forward runs in the stream of the graphs: there autograd runs backward, too.
    torch.cuda.synchronize()
    with torch.cuda.stream(STREAM):
        for name, backend in PYTORCH.items() if not causal or shape[1] == shape[2] else ():
            with contextlib.suppress(RuntimeError):
                backward = backward_of(backend)
                expected = backward()
                others[name] = backward
                for one, other in zip(found, expected):
                    cases.alike(one, other, 8)
    return shape, ours, others


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
    "gradients of attention": attention_gradients,
    "product, fp16": lambda: product(FP16),
    "product, fp32": lambda: product(FP32),
    "product, tf32": lambda: product(FP32, "tf32"),
    "product, tf32x3": lambda: product(FP32, "tf32x3"),
    "gated layer": gating,
    "softmax(x W)": softmax,
}


def whole_models(width):
    """Shapes of 16,384 tokens and heads of this width, 2048 numbers of them for a token."""
    heads = 2048 // width
    return [(16384 // tokens, tokens, tokens, heads, heads, width, causal)
            for causal in (False, True) for tokens in (512, 1024, 2048, 4096, 8192, 16384)]


# Shapes that are measured in any case: (batch, queries, keys, heads, kv_heads, width, causal).
NAMED = {"gradients of attention": {f"64 x 12 heads, 197 queries, {'causal' if causal else 'full'}":
                                    [(64, 197, 197, 12, 12, 64, causal)] for causal in (False, True)}
         | {f"16,384 tokens, heads of {width}": whole_models(width) for width in (64, 128, 256)}}
STREAM = torch.cuda.Stream()


def graph_of(function, calls):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=STREAM):
        for _ in range(calls):
            function()
    return graph


def replayed(graph):
    """us"""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def captured(function):
    """A graph, and how many calls are in it."""
    torch.cuda.synchronize()
    with torch.cuda.stream(STREAM):
        function()
    torch.cuda.synchronize()
    graph = graph_of(function, 1)
    calls = max(1, min(MOST_CALLS, round(GRAPH / min(replayed(graph) for _ in range(2)))))
    return (graph_of(function, calls) if calls > 1 else graph), calls


def microseconds(graphs):
    times = [[] for _ in graphs]
    for _ in range(ROUNDS + 1):  # the first one warms up
        for (graph, calls), own in zip(graphs, times):
            own.append(replayed(graph) / calls)
    return [statistics.median(own[1:]) for own in times]


def geometric_mean(ratios):
    return math.exp(statistics.fmean(math.log(each) for each in ratios)) if ratios else None


def summary(guesses, others):
    """others: ratios by the name of what ours is compared with."""
    result = {"shapes": len(guesses), "geometric_mean": geometric_mean(guesses),
              "above_1.1": sum(each > 1.1 for each in guesses) / max(1, len(guesses)),
              "worst": max(guesses, default=None)}
    for name, ratios in others.items():
        result |= {f"{name}_shapes": len(ratios), f"{name}_geometric_mean": geometric_mean(ratios),
                   f"{name}_below_0.95": sum(each < 0.95 for each in ratios) / len(ratios),
                   f"{name}_worst": min(ratios)}
    return result


def measure_shape(function, other):
    """(us as estimated, us as tried, {library: us}, way, way tried)."""
    others = {"library": other} if callable(other) else other or {}
    guessed = captured(function)
    way = fused_kernels.library().fk_last_way().decode()
    with fused_kernels.tuning():
        function()
    tried_way = fused_kernels.library().fk_last_way().decode()
    took, tried, *by_others = microseconds([guessed, captured(function), *map(captured, others.values())])
    return took, tried, dict(zip(others, by_others)), way, tried_way


def compare(guesses, others, took, tried, by_others, way, tried_way):
    """Appends what a shape says."""
    guesses.append(took / tried if way != tried_way else 1.0)
    for each, by_other in by_others.items():
        others.setdefault(each, []).append(by_other / took)


def measure(name, seconds):
    """The summary of a function, and its shapes, with how many times as long they take as another way or library."""
    torch.set_float32_matmul_precision("high" if name.endswith("tf32") else "highest")
    named = {}
    for label, named_shapes in NAMED.get(name, {}).items():
        guesses, others = [], {}
        for shape in named_shapes:
            compare(guesses, others, *measure_shape(*FUNCTIONS[name](shape)[1:]))
        named[label] = summary(guesses, others)
    guesses, others, shapes, end = [], {}, [], time.monotonic() + seconds
    while time.monotonic() < end:
        shape, function, other = FUNCTIONS[name]()
        found = took, tried, by_others, way, tried_way = measure_shape(function, other)
        if took < LEAST:
            continue
        compare(guesses, others, *found)
        slower = max(guesses[-1], took / min(by_others.values(), default=took))
        shapes.append((slower, shape, f"{took:.1f} us [{way}], tried {tried:.1f} us [{tried_way}]"
                       + "".join(f", {each} {by_other:.1f} us" for each, by_other in by_others.items())))
        del function, other
        if len(shapes) % 16 == 0:
            torch.cuda.empty_cache()
    return summary(guesses, others) | ({"named": named} if named else {}), sorted(shapes, reverse=True)


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
        print(name, {key: round(value, 3) for key, value in results[name].items() if isinstance(value, (int, float))},
              flush=True)
        for label, found in results[name].get("named", {}).items():
            print(f"    {label}: {', '.join(f'{key} {value:.3f}' for key, value in found.items())}", flush=True)
        for ratio, shape, text in shapes[:options.worst]:
            print(f"    {ratio:.2f} at {' x '.join(map(str, shape))}: {text}", flush=True)
        if options.json:
            cases.write_record(options.json, results, "functions")


if __name__ == "__main__":
    main()
