"""Operands for each of fused_kernels' functions, and what has to come out: computed in fp64, from numbers whose
sums of products are exact in fp32. So the bounds are those of operators/tests/test_library*.py: what the result's own rounding,
and fp32's in an exponential, may change."""

import dataclasses
import json
import pathlib
import sys
import typing

import torch

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "operators" / "python"))
import fused_kernels
from fused_kernels import _torch as binding

torch.set_float32_matmul_precision("highest")  # where PyTorch computes gradients
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
ROUNDING = {FP16: 2.0**-11, BF16: 2.0**-8, FP32: 2.0**-24}  # unit roundoff
MESH_FP32 = 2.0**-18  # of a diffusion: fp32's own errors, of the size of the terms


def numbers(*shape, dtype, seed=0, scale=1.0):
    """Multiples of scale / 8, from -scale to scale."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randint(-8, 9, shape, generator=generator, device="cuda") * (scale / 8)).to(dtype)


def write_record(path, measured, key="problems"):
    """What results/update_readme.py reads: problems, each {"name": ..., "kernels": [{"name": ..., "ms": ...}]}; or,
    of choice.py, functions."""
    record = {"device": {"name": torch.cuda.get_device_name()}, "pytorch": torch.__version__, key: measured}
    pathlib.Path(path).write_text(json.dumps(record, indent=2) + "\n")


def near(name, found, expected, bound):
    """Whether each number is as near as that, or the same infinity; a NaN never is."""
    assert found.shape == expected.shape, f"{name}: {tuple(found.shape)} instead of {tuple(expected.shape)}"
    found = found.double()
    right = (found == expected) | (((found - expected).abs() <= bound) & expected.isfinite())
    wrong = (~right).nonzero()
    assert len(wrong) == 0, (f"{name}: {len(wrong)} of {found.numel()} numbers are wrong, the first at "
                             f"{wrong[0].tolist()}: {found[tuple(wrong[0])]} instead of {expected[tuple(wrong[0])]}")


def alike(found, expected, roundings):
    """Whether the relative error, in the Frobenius norm, is at most so many roundings of the type of `found`."""
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error <= roundings * ROUNDING[found.dtype], f"the relative error is {error}"  # a NaN is not


def tensors(result):
    return result if isinstance(result, tuple) else (result,)


def differentiable(result):
    """Those of the results that have gradients."""
    return tuple(each for each in tensors(result) if each.requires_grad)


@dataclasses.dataclass
class Case:
    name: str
    run: typing.Callable  # of the operands
    operands: typing.Callable  # of a seed
    check: typing.Callable  # of operands and what `run` has returned
    wants_gradients: tuple = ()  # of which operands there are gradients
    more: tuple = ()  # what the operator is given after the operands
    formula: typing.Callable = None  # of operands in fp64, where the name of the function does not say it

    def __str__(self):
        return self.name


# ---- Product ------------------------------------------------------------------------------------------------------


def check_product(operands, c):
    a, b = (each.double() for each in operands)
    expected = a @ b
    assert c.dtype == operands[0].dtype
    near("c", c, expected, 0 if c.dtype == FP32 else ROUNDING[c.dtype] * expected.abs())


def product(rows, cols, depth, dtype, row_stride=None, math="fp32"):
    """row_stride: of a and b, whose columns are the first of a wider matrix. Each math of fp32 is exact for these
    operands."""

    def operands(seed=0):
        a = numbers(rows, row_stride or depth, dtype=dtype, seed=seed)[:, :depth]
        return a, numbers(depth, row_stride or cols, dtype=dtype, seed=seed + 1)[:, :cols]

    def run(a, b):
        return fused_kernels.product(a, b, *more)

    more = () if math == "fp32" else (math,)
    name = "-".join([f"product-{rows}x{cols}x{depth}-{str(dtype)[6:]}", *more,
                     *([f"stride={row_stride}"] if row_stride else [])])
    return Case(name, run if more else fused_kernels.product, operands, check_product, (0, 1), more)


def turned(*shape, dtype, seed, transposed, stride=0):
    """A matrix, or several, of which memory has the transpose; rows in memory may be `stride` elements apart."""
    *batch, rows, cols = shape
    lying = (*batch, cols, rows) if transposed else shape
    matrix = numbers(*lying[:-1], stride or lying[-1], dtype=dtype, seed=seed)[..., :lying[-1]]
    return matrix.mT if transposed else matrix


def any_product(name, a, b, dtype, transposed="", bias=False, math="fp32", stride=0):
    """product() of torch.matmul's shapes, where of "ab" those lie transposed."""

    def operands(seed=0):
        shapes = {"a": a, "b": b}
        found = [turned(*shape, dtype=dtype, seed=seed + i, transposed=each in transposed, stride=stride)
                 if len(shape) > 1 else numbers(*shape, dtype=dtype, seed=seed + i)
                 for i, (each, shape) in enumerate(shapes.items())]
        return *found, *([numbers(b[-1], dtype=dtype, seed=seed + 5)] if bias else [])

    def in_fp64(a, b, *bias):
        return torch.matmul(a, b) + bias[0] if bias else torch.matmul(a, b)

    def check(operands, c):
        expected = in_fp64(*(each.double() for each in operands))
        product = in_fp64(*(each.double() for each in operands[:2]))
        assert c.dtype == dtype and c.is_contiguous()
        near("c", c, expected, 0 if dtype == FP32 else ROUNDING[dtype] * (expected.abs() + product.abs() * bias))

    def run(a, b, *bias):
        return fused_kernels.product(a, b, math, *bias)

    return Case(f"product-{name}-{str(dtype)[6:]}-{math}", run, operands, check, (0, 1, 2)[:2 + bias], (math,), in_fp64)


ANY_PRODUCTS = [
    *(any_product(f"transposed_{transposed}", (70, 40), (40, 136), *kind, transposed=transposed, bias=transposed != "a")
      for transposed in ("a", "b", "ab")
      for kind in ((FP16,), (BF16,), (FP32,))),
    *(any_product(f"transposed_{transposed}", (70, 33), (33, 130), FP32, transposed, bias=True, math=math)
      for transposed in ("a", "b", "ab") for math in ("tf32", "tf32x3")),
    *(any_product(f"apart_{transposed}", (72, 40), (40, 136), FP16, transposed, stride=144)
      for transposed in ("", "a", "b")),
    *(any_product(f"large_{transposed}", (1000, 520), (520, 777), FP16, transposed) for transposed in ("a", "b")),
    *(any_product(f"linear_{dtype}", (3, 50, 72), (72, 40), dtype, "b", bias=True) for dtype in (FP16, FP32)),
    *(any_product(f"batch_{transposed}", (6, 50, 33), (6, 33, 40), dtype, transposed)
      for transposed in ("", "a", "b", "ab") for dtype in (FP16, BF16, FP32)),
    *(any_product(f"tall_batch_{transposed}", (40, 512, 192), (40, 192, 264), dtype, transposed)  # by wgmma on Hopper
      for transposed in ("", "a", "b") for dtype in (FP16, BF16)),
    *(any_product("batch", (6, 64, 32), (6, 32, 40), FP32, "b", math=math) for math in ("tf32", "tf32x3")),
    any_product("broadcast", (2, 1, 50, 24), (3, 24, 16), FP16),
    any_product("broadcast_a", (50, 24), (3, 24, 16), FP32),
    any_product("shared_turned", (3, 50, 24), (24, 16), FP16, "a"), any_product("many", (500, 8, 8), (500, 8, 8), FP16),
    any_product("vectors", (24,), (24, 16), FP16), any_product("vector", (5, 7, 24), (24,), FP16),
    any_product("dot", (24,), (24,), FP32),
]


# ---- Gated layer --------------------------------------------------------------------------------------------------


GATES = {"sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
         "gelu_tanh": lambda s: torch.nn.functional.gelu(s, approximate="tanh"), "relu": torch.relu,
         "none": lambda s: s}
# How much the slope of a gate changes with s, at most: by as much more is it off where s is rounded.
BENDS = {"sigmoid": 0, "silu": 0.5, "gelu": 0.8, "gelu_tanh": 0.8, "relu": 0, "none": 0}


def gating_in_fp64(x, w1, w2, b1=0, b2=0, gate="sigmoid"):
    return GATES[gate](x @ w1 + b1) * (x @ w2 + b2)


def check_gating(operands, out, gate="sigmoid"):
    x, w1, w2, *biases = (each.double() for each in operands)
    expected, value = gating_in_fp64(x, w1, w2, *biases, gate=gate), (x @ w2 + (biases[1] if biases else 0)).abs()
    assert out.dtype == operands[0].dtype
    if out.dtype == FP32:  # some roundings, of the result, and of a sigmoid that is at most 1
        return near("out", out, expected, 2.0**-20 * expected.abs() + 2.0**-21 * value)
    rounding = 1.01 * ROUNDING[out.dtype] + (2.0**-16 if gate == "gelu" else 0)  # erf is wrong by 2^-17, and 2^-28
    least = 2.0**-25 if out.dtype == FP16 else 0
    near("out", out, expected, rounding * expected.abs() + 2.0**-27 * value + least)


def gating_name(function, sizes, dtype, row_stride, gate, biases, math):
    return "-".join([f"{function}-{'x'.join(map(str, sizes))}", *([f"stride={row_stride}"] if row_stride else []),
                     *([str(dtype)[6:]] if dtype != FP16 else []), *([gate] if gate != "sigmoid" else []),
                     *([] if biases else ["unbiased"]), *([math] if math != "fp32" else [])])


def gating(rows, inputs, hidden, row_stride=None, dtype=FP16, gate="sigmoid", biases=True, math="fp32"):
    """Each math of fp32 is exact for these operands."""
    def operands(seed=0):
        x = numbers(rows, row_stride or inputs, dtype=dtype, seed=seed)[:, :inputs]
        weights = [numbers(inputs, hidden, dtype=dtype, seed=seed + i, scale=0.5) for i in (1, 2)]
        return x, *weights, *(numbers(hidden, dtype=dtype, seed=seed + i) for i in (3, 4) if biases)

    def run(*operands):
        return fused_kernels.gating(*operands, **options)

    def check(operands, out):
        check_gating(operands, out, gate)

    options = {} if (gate, math) == ("sigmoid", "fp32") else dict(gate=gate, math=math)
    more = (*(() if biases else (None, None)), *options.values())
    name = gating_name("gating", (rows, inputs, hidden), dtype, row_stride, gate, biases, math)
    return Case(name, run if options else fused_kernels.gating, operands, check, tuple(range(5 if biases else 3)), more,
                lambda *operands: gating_in_fp64(*operands, gate=gate))


@torch.no_grad()
def gating_gradient_sizes(d_out, x, w1, w2, b1=0, b2=0, gate="sigmoid"):
    """What the terms of each number of the gated layer's gradients amount to, without their signs, in fp64."""
    s, values = x @ w1 + b1, x @ w2 + b2
    with torch.enable_grad():
        at = s.clone().requires_grad_()
        (slope,) = torch.autograd.grad(GATES[gate](at).sum(), at)
    d_s = (d_out * values).abs() * (slope.abs() + BENDS[gate] * s.abs())
    d_v = (d_out * GATES[gate](s)).abs()
    return (d_s @ w1.abs().T + d_v @ w2.abs().T, x.abs().T @ d_s, x.abs().T @ d_v, d_s.sum(0), d_v.sum(0))


def gating_backward(rows, inputs, hidden, row_stride=None, dtype=FP16, gate="sigmoid", biases=True, math="fp32"):
    def operands(seed=0):
        d_out = numbers(rows, hidden, dtype=dtype, seed=seed + 7)
        return d_out, *gating(rows, inputs, hidden, row_stride, dtype, gate, biases).operands(seed)

    def run(*operands):
        found = fused_kernels.gating_backward(*operands, **options)
        assert biases or found[3:] == (None, None)
        return found if biases else found[:3]

    def check(operands, result):
        d_out, *rest = (each.detach().double() for each in operands)
        rest = [each.requires_grad_() for each in rest]
        expected = torch.autograd.grad(gating_in_fp64(*rest, gate=gate), rest, d_out)
        sizes = gating_gradient_sizes(d_out, *rest, gate=gate)
        # Some roundings of factors; products of fp32 round no sums of these operands.
        rounding = ROUNDING[dtype] if dtype != FP32 else {"fp32": 2.0**-20, "tf32": 2.0**-10, "tf32x3": 2.0**-18}[math]
        for found, other, size in zip(result, expected, sizes[:len(rest)], strict=True):
            assert found.dtype == dtype
            assert bool(((found - other).abs() <= 8 * rounding * size).all())
            if found.numel() > 1:  # the terms of a single number may cancel each other
                alike(found, other, 8 * rounding / ROUNDING[dtype])

    options = {} if (gate, math) == ("sigmoid", "fp32") else dict(gate=gate, math=math)
    name = gating_name("gating_backward", (rows, inputs, hidden), dtype, row_stride, gate, biases, math)
    return Case(name, run, operands, check, more=(*(() if biases else (None, None)), *options.values()))


def gating_two_in_fp64(x, y, w1, w2, b1=0, b2=0, gate="sigmoid", gated_values=False):
    return GATES[gate](x @ w1 + b1) * GATES[gate if gated_values else "none"](y @ w2 + b2)


def gating_two(rows, inputs, values, hidden, dtype=FP16, gate="silu", gated=True, biases=True, math="fp32", apart=0):
    """Of two inputs; `apart`: so many columns more than x and y have."""
    def operands(seed=0):
        x, y = (numbers(rows, cols + apart, dtype=dtype, seed=seed + i)[:, :cols]
                for i, cols in ((0, inputs), (5, values)))
        weights = [numbers(cols, hidden, dtype=dtype, seed=seed + i, scale=0.5)
                   for i, cols in ((1, inputs), (2, values))]
        return x, y, *weights, *(numbers(hidden, dtype=dtype, seed=seed + i) for i in (3, 4) if biases)

    def run(x, y, *others):
        return fused_kernels.gating(x, *others, gate=gate, math=math, y=y, gated_values=gated)

    def in_fp64(*operands):
        return gating_two_in_fp64(*operands, gate=gate, gated_values=gated)

    def check(operands, out):
        x, y, w1, w2, *biases = (each.double() for each in operands)
        expected, ones = in_fp64(x, y, w1, w2, *biases), biases or (0, 0)
        sizes = (GATES[gate](x @ w1 + ones[0]).abs(), (y @ w2 + ones[1]).abs())
        assert out.dtype == operands[0].dtype
        if dtype == FP32:
            bound = 2.0**-19 * expected.abs() + 2.0**-20 * (sizes[1] + gated * (sizes[0] + 1))
            return near("out", out, expected, bound)
        rounding = 1.01 * ROUNDING[dtype] + (2.0**-15 if gate == "gelu" else 0)  # erf is wrong by 2^-17, and 2^-28
        least = 2.0**-25 if dtype == FP16 else 0
        near("out", out, expected, rounding * expected.abs() + 2.0**-26 * (sizes[1] + gated * (sizes[0] + 1)) + least)

    name = "-".join([gating_name("gating_two", (rows, inputs, values, hidden), dtype, apart, gate, biases, math),
                     *(["gated"] if gated else [])])
    return Case(name, run, operands, check, tuple(range(6 if biases else 4)),
                (*(() if biases else (None, None)), gate, math, gated), in_fp64)


def gating_two_backward(rows, inputs, values, hidden, dtype=FP16, gate="silu", gated=True, math="fp32", apart=0):
    """Numbers whose products are exact in fp32 sum up in any order."""
    forward = gating_two(rows, inputs, values, hidden, dtype, gate, gated, True, math, apart)

    def run(d_out, x, y, *others):
        return fused_kernels.gating_backward(d_out, x, *others, gate=gate, math=math, y=y, gated_values=gated)

    def operands(seed=0):
        return numbers(rows, hidden, dtype=dtype, seed=seed + 7), *forward.operands(seed)

    def check(operands, result):
        d_out, *rest = (each.detach().double() for each in operands)
        rest = [each.requires_grad_() for each in rest]
        expected = torch.autograd.grad(forward.formula(*rest), rest, d_out)
        rounding = ROUNDING[dtype] if dtype != FP32 else {"fp32": 2.0**-20, "tf32": 2.0**-10, "tf32x3": 2.0**-18}[math]
        for found, other in zip(result, expected, strict=True):
            assert found.dtype == dtype
            alike(found, other, 8 * rounding / ROUNDING[dtype])

    return Case(forward.name.replace("two", "two_backward", 1), run, operands, check, more=(gate, math, gated))


def slopes_of_two(operands, gate, gated):
    """(s_slopes, v_slopes) in fp64: what the gradient of the result is multiplied by for those of s and v."""
    x, y, w1, w2, b1, b2 = (each.detach().double() for each in operands)
    s, v = (each.requires_grad_() for each in (x @ w1 + b1, y @ w2 + b2))
    return torch.autograd.grad((GATES[gate](s) * GATES[gate if gated else "none"](v)).sum(), (s, v))


def gating_two_kept(*sizes, dtype=FP16, gate="silu", gated=True):
    """What gating() calls for training: it returns the slopes, too."""
    plain = gating_two(*sizes, dtype, gate, gated)

    def run(*operands):
        return binding.calls["gating_two_kept"](*operands, gate, "fp32", gated)[0]

    def check(operands, result):
        out, *slopes = tensors(result)
        plain.check(operands, out)
        for found, other in zip(slopes, slopes_of_two(operands, gate, gated)):
            assert found.dtype == dtype
            alike(found, other, 8)

    return dataclasses.replace(plain, name=plain.name.replace("two", "two_kept", 1), run=run, check=check)


def gating_two_kept_backward(*sizes, dtype=FP16, gate="silu", gated=True):
    """With the slopes of forward."""
    plain = gating_two_backward(*sizes, dtype, gate, gated)

    def operands(seed=0):
        d_out, *others = plain.operands(seed)
        return d_out, *others, *(each.to(dtype) for each in slopes_of_two(others, gate, gated))

    def run(*operands):
        return binding.calls["gating_two_kept_backward"](*operands, gate, "fp32", gated)

    return dataclasses.replace(plain, name=plain.name.replace("two", "two_kept", 1), run=run, operands=operands,
                               check=lambda operands, result: plain.check(operands[:7], result))


# ---- Attention ----------------------------------------------------------------------------------------------------


def attention(batch, queries, keys, heads, kv_heads, width, dtype, causal=False, layout="rows first"):
    """layout: "rows first"; "heads first", (batch, heads, rows, width) in memory; or "packed", as one projection
    leaves all three side by side, where there are as many keys as queries, and heads of both."""

    def operands(seed=0):
        if layout == "packed":
            return numbers(batch, queries, 3, heads, width, dtype=dtype, seed=seed).unbind(2)
        shapes = (queries, heads), (keys, kv_heads), (keys, kv_heads)
        if layout == "heads first":
            return tuple(numbers(batch, of_heads, rows, width, dtype=dtype, seed=seed + i).transpose(1, 2)
                         for i, (rows, of_heads) in enumerate(shapes))
        return tuple(numbers(batch, *shape, width, dtype=dtype, seed=seed + i) for i, shape in enumerate(shapes))

    def check(operands, result):
        out, log_sums = result
        q, k, v = (each.double().transpose(1, 2) for each in operands)
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        logits = width**-0.5 * (q @ k.transpose(2, 3))
        seen = torch.ones(queries, keys, dtype=torch.bool, device="cuda")
        if causal:
            seen = seen.tril(keys - queries)
        logits = logits.masked_fill(~seen, -torch.inf)
        expected_sums = logits.logsumexp(3)
        weights = torch.where(seen, (logits - expected_sums[..., None]).exp(), 0)
        expected, sizes = weights @ v, weights @ v.abs()
        # Exponentials are rounded to the type before the second product, and the result after it; fp32's own errors
        # are some 2^-20 of the logits' size, at most 16 here. fp16 has nothing between multiples of 2^-24: what is
        # below 2^-14 is rounded to them.
        least = 2.0**-25 * (1 + seen.double() @ v.abs()) if dtype == FP16 else 0
        assert out.dtype == dtype and log_sums.dtype == FP32
        near("out", out.transpose(1, 2), expected,
             (1.01 * ROUNDING[dtype] + 2.0**-16) * (sizes + expected.abs()) + least)
        near("log_sums", log_sums, expected_sums, 2.0**-16 * expected_sums.abs().clamp(min=1))

    def run(q, k, v):
        return fused_kernels.attention(q, k, v, causal, log_sums=True)

    name = f"attention-{batch}x{queries}x{keys}x{heads}x{kv_heads}x{width}-{str(dtype)[6:]}"
    return Case(name + ("-causal" if causal else "") + f"-{layout.replace(' ', '_')}", run, operands, check,
                (0, 1, 2) if width % 8 == 0 and width <= 256 else ())


def attention_in_fp64(q, k, v, causal=False):
    """(out, log_sums) of tensors in fp64, as autograd can differentiate it: a query without a key gets zeros."""
    queries, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (each.transpose(1, 2) for each in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    seen = torch.ones(queries, keys, dtype=torch.bool, device="cuda")
    if causal:
        seen = seen.tril(keys - queries)
    logits = (q.shape[3]**-0.5 * (q @ k.transpose(2, 3))).masked_fill(~seen, -torch.inf)
    sums = logits.detach().logsumexp(3)
    base = torch.where(sums.isfinite(), sums, 0)[..., None]
    weights = torch.where(seen, logits - base, -torch.inf).exp()
    total = weights.sum(3, keepdim=True)  # 1, or 0 without a key; its gradient is not 0
    return ((weights / torch.where(total > 0, total, 1)) @ v).transpose(1, 2), sums


@torch.no_grad()
def attention_gradient_sizes(d_out, q, k, v, out, log_sums, causal):
    """What the terms of each number of attention's gradients amount to, without their signs, in fp64; and, with them,
    the gradients: of formulas, not by autograd."""
    queries, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    d_out, q, k, v, out = (each.transpose(1, 2) for each in (
        d_out, q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2), out))
    scale, seen = q.shape[3]**-0.5, torch.ones(queries, keys, dtype=torch.bool, device="cuda")
    if causal:
        seen = seen.tril(keys - queries)
    weights = torch.where(seen, (scale * (q @ k.transpose(2, 3)) - log_sums[..., None]).exp(), 0)
    d_s = weights * (d_out @ v.transpose(2, 3) - (d_out * out).sum(3, keepdim=True))
    # What dS is a difference of: each is rounded by itself in fp32, and out to the type.
    far = weights * (d_out.abs() @ v.abs().transpose(2, 3) + (d_out * out).abs().sum(3, keepdim=True))

    def of_keys(rows):
        return rows.unflatten(1, (-1, group)).sum(2).transpose(1, 2)

    return [((scale * (d_s @ k)).transpose(1, 2), (scale * (far @ k.abs())).transpose(1, 2)),
            (of_keys(scale * (d_s.transpose(2, 3) @ q)), of_keys(scale * (far.transpose(2, 3) @ q.abs()))),
            (of_keys(weights.transpose(2, 3) @ d_out), of_keys(weights.transpose(2, 3) @ d_out.abs()))]


def attention_backward(batch, queries, keys, heads, kv_heads, width, dtype, causal=False, layout="rows first"):
    """Of out and log_sums that are forward's, in fp64, rounded."""
    forward = attention(batch, queries, keys, heads, kv_heads, width, dtype, causal, layout)

    def operands(seed=0):
        q, k, v = forward.operands(seed)
        out, log_sums = attention_in_fp64(q.double(), k.double(), v.double(), causal)
        d_out = torch.empty_like(q).copy_(numbers(*q.shape, dtype=dtype, seed=seed + 7))
        return d_out, q, k, v, torch.empty_like(q).copy_(out), log_sums.float().contiguous()

    def check(operands, result):
        doubles = [each.detach().double() for each in operands]
        for found, operand, (expected, size) in zip(result, operands[1:4], attention_gradient_sizes(*doubles, causal),
                                                    strict=True):
            assert found.dtype == dtype and found.shape == operand.shape
            # P and dS are rounded to the type, the latter perhaps of a rounded P, and the result after them.
            least = 2.0**-24 * (1 + queries + keys) if dtype == FP16 else 0
            assert bool(((found - expected).abs() <= 4 * ROUNDING[dtype] * size + least).all())
            if found.numel() > 1 and keys > 1:  # the terms of a single number, and of a single key, may cancel
                alike(found, expected, 8)

    def run(*operands):
        return fused_kernels.attention_backward(*operands, causal)

    return Case(forward.name.replace("attention", "attention_backward", 1), run, operands, check, more=(causal,))


# ---- Diffusion ----------------------------------------------------------------------------------------------------


def mesh(meshes, vertices, eigen, width, seed):
    """basis, mass, evalues, times: masses are powers of two, so a product with one is not rounded."""
    mass = torch.exp2((2 * numbers(*meshes, vertices, dtype=FP32, seed=seed + 1)).round()).to(BF16)
    return (numbers(*meshes, vertices, eigen, dtype=BF16, seed=seed + 2), mass,
            2 * numbers(*meshes, eigen, dtype=BF16, seed=seed + 3).abs(),
            numbers(width, dtype=BF16, seed=seed + 4).abs())


def diffusion_in_fp64(x, basis, mass, evalues, times):
    damping = torch.exp(-evalues[..., :, None] * times)
    spectral = damping * (basis.mT @ (mass[..., None] * x))
    return basis @ spectral, spectral


def check_diffusion(operands, result):
    x, basis, mass, evalues, times = (each.double() for each in operands)
    out, spectral = result
    assert out.dtype == spectral.dtype == BF16
    _, expected = diffusion_in_fp64(x, basis, mass, evalues, times)
    damping = torch.exp(-evalues[..., :, None] * times)
    sizes = damping * (basis.abs().mT @ (mass[..., None] * x.abs()))
    near("spectral", spectral, expected, 1.01 * ROUNDING[BF16] * expected.abs() + MESH_FP32 * sizes)
    # The second product is of what the first one has written.
    expected = basis @ spectral.double()
    sizes = basis.abs() @ spectral.double().abs()
    near("out", out, expected, ROUNDING[BF16] * expected.abs() + MESH_FP32 * sizes)


def gradient_sizes(d_out, d_spectral, basis, mass, evalues, times, spectral):
    """In fp64: d_x and d_times, and of both the size of the terms, which are added up; for d_x, of its second sum."""
    sums, sizes = basis.mT @ d_out, basis.abs().mT @ d_out.abs()
    s = d_spectral + sums
    terms = evalues[..., None] * s * spectral
    of_terms = terms.abs() + evalues[..., None] * sizes * spectral.abs()
    damped = torch.exp(-evalues[..., :, None] * times) * s
    many = tuple(range(terms.dim() - 1))
    return (mass[..., None] * (basis @ damped), -terms.sum(many), mass[..., None] * (basis.abs() @ damped.abs()),
            of_terms.sum(many))


def check_diffusion_backward(operands, result, rounds_spectral=False):
    """rounds_spectral: the operand is the exact one, and what the kernel has read was rounded."""
    d_x, d_times = result
    assert d_x.dtype == d_times.dtype == BF16
    expected_x, expected_times, sizes_x, sizes_times = gradient_sizes(*(each.double() for each in operands))
    # The damped sums are rounded before the second product, and its result.
    near("d_x", d_x, expected_x,
         ROUNDING[BF16] * expected_x.abs() + (1.01 * ROUNDING[BF16] + MESH_FP32) * sizes_x)
    of_spectral = 1.01 * ROUNDING[BF16] if rounds_spectral else 0
    near("d_times", d_times, expected_times,
         ROUNDING[BF16] * expected_times.abs() + (MESH_FP32 + of_spectral) * sizes_times)


def diffusion(vertices, eigen, width, meshes=()):
    def operands(seed=0):
        return numbers(*meshes, vertices, width, dtype=BF16, seed=seed), *mesh(meshes, vertices, eigen, width, seed)

    name = "x".join(map(str, (*meshes, vertices, eigen, width)))
    return Case(f"diffusion-{name}", fused_kernels.diffusion, operands, check_diffusion, (0, 4))


def diffusion_backward(vertices, eigen, width, meshes=()):
    def operands(seed=0):
        d_out = numbers(*meshes, vertices, width, dtype=BF16, seed=seed)
        d_spectral, spectral = (numbers(*meshes, eigen, width, dtype=BF16, seed=seed + i) for i in (5, 6))
        return d_out, d_spectral, *mesh(meshes, vertices, eigen, width, seed), spectral

    name = "x".join(map(str, (*meshes, vertices, eigen, width)))
    return Case(f"diffusion_backward-{name}", fused_kernels.diffusion_backward, operands, check_diffusion_backward)


# ---- Softmax ------------------------------------------------------------------------------------------------------


def check_softmax(operands, probs):
    x, w = (each.double() for each in operands)
    expected = torch.softmax(x @ w, 1)
    assert probs.dtype == operands[0].dtype
    # Logits are exact; what is rounded are exponentials and their sum, and then to the type. An exponential below
    # 2^-126 may be 0, and fp16 has nothing between multiples of 2^-24.
    rounded, least = 0 if probs.dtype == FP32 else 1.01 * ROUNDING[probs.dtype], 2.0**-25 * (probs.dtype == FP16)
    near("probs", probs, expected, (2.0**-20 + rounded) * expected + max(least, 2.0**-125))


def name_of_softmax(function, sizes, dtype, *more):
    return "-".join([f"{function}-{'x'.join(map(str, sizes))}", *(str(each)[6:] for each in (dtype, *more)
                                                                  if each not in (FP32, torch.int64))])


def check_gradients_of_logits(result, g, x, w):
    """Of the gradients of logits in fp64. Those are rounded to the type, and then what comes of them."""
    for found, other in zip(result, (g @ w.double().t(), x.double().t() @ g), strict=True):
        assert found.dtype == x.dtype
        if g.shape[1] > 1:  # else it is 0, but for roundings
            alike(found, other, 256 if x.dtype == FP32 else 8)


def softmax(rows, inputs, classes, dtype=FP32):
    def operands(seed=0):
        return numbers(rows, inputs, dtype=dtype, seed=seed), numbers(inputs, classes, dtype=dtype, seed=seed + 1)

    return Case(name_of_softmax("softmax", (rows, inputs, classes), dtype), fused_kernels.softmax, operands,
                check_softmax, (0, 1))


def softmax_backward(rows, inputs, classes, dtype=FP32):
    def operands(seed=0):
        x, w = softmax(rows, inputs, classes, dtype).operands(seed)
        return (numbers(rows, classes, dtype=dtype, seed=seed + 7), x, w,
                torch.softmax(x.float() @ w.float(), 1).to(dtype))

    def check(operands, result):
        d_probs, x, w, probs = (each.detach().double() for each in operands)
        g = probs * (d_probs - (d_probs * probs).sum(1, keepdim=True))
        check_gradients_of_logits(result, g, *operands[1:3])

    return Case(name_of_softmax("softmax_backward", (rows, inputs, classes), dtype), fused_kernels.softmax_backward,
                operands, check)


def cross_entropy_in_fp64(x, w, labels):
    """Of any type. cross_entropy() of PyTorch refuses labels that are no class, but for -100."""
    return torch.nn.functional.cross_entropy(x @ w, labels.long(), reduction="none")


def check_cross_entropy(operands, result):
    (x, w, labels), losses = operands, tensors(result)[0]
    exact = x.double() @ w.double()
    expected = torch.nn.functional.cross_entropy(exact, labels.long(), reduction="none")
    assert losses.dtype == FP32  # whatever the operands are
    near("losses", losses, expected, (2.0**-20 + 2.0**-22 * exact.logsumexp(1).abs()) * (labels >= 0))


def cross_entropy(rows, inputs, classes, dtype=FP32, of_labels=torch.int64):
    def operands(seed=0):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        labels = torch.randint(0, classes, (rows,), generator=generator, device="cuda", dtype=of_labels)
        labels[6::7] = -100
        return *softmax(rows, inputs, classes, dtype).operands(seed), labels

    return Case(name_of_softmax("cross_entropy", (rows, inputs, classes), dtype, of_labels),
                fused_kernels.cross_entropy, operands, check_cross_entropy, (0, 1))


def cross_entropy_backward(rows, inputs, classes, dtype=FP32, of_labels=torch.int64):
    def operands(seed=0):
        x, w, labels = cross_entropy(rows, inputs, classes, dtype, of_labels).operands(seed)
        logits = x.float() @ w.float()
        return numbers(rows, dtype=FP32, seed=seed + 7), x, w, labels, logits, logits.logsumexp(1)

    def check(operands, result):
        d_losses, x, w, labels, logits, log_sums = operands
        g = (logits.double() - log_sums.double()[:, None]).exp()
        g -= torch.nn.functional.one_hot(labels.long().clamp(min=0), classes)
        g *= (d_losses.double() * (labels >= 0))[:, None]
        check_gradients_of_logits(result, g, x, w)

    return Case(name_of_softmax("cross_entropy_backward", (rows, inputs, classes), dtype, of_labels),
                fused_kernels.cross_entropy_backward, operands, check)


# ---- Gradient features --------------------------------------------------------------------------------------------


def features_in_fp64(x, gr, gi, lr, li):
    xr, xi, m1, m2 = gr @ x, gi @ x, x @ lr.mT, x @ li.mT
    return torch.tanh(xr * (gr @ m1 - gi @ m2) + xi * (gi @ m1 + gr @ m2))


def errors_of_gradients(x, gr, gi, lr, li):
    """In fp64: xr, xi, ar, ai, and how far ar and ai may be off, since x lr^T and x li^T are rounded."""
    m1, m2 = x @ lr.mT, x @ li.mT
    size_r = gr.abs() @ m1.abs() + gi.abs() @ m2.abs()
    size_i = gi.abs() @ m1.abs() + gr.abs() @ m2.abs()
    off = (1.01 * ROUNDING[BF16] + MESH_FP32) * torch.maximum(size_r, size_i)
    return gr @ x, gi @ x, gr @ m1 - gi @ m2, gi @ m1 + gr @ m2, off


def check_features(operands, out):
    xr, xi, ar, ai, off = errors_of_gradients(*(each.double() for each in operands))
    expected = torch.tanh(xr * ar + xi * ai)
    assert out.dtype == BF16
    # tanh.approx is off by 2^-10.9; its slope is at most 1.
    near("out", out, expected, ROUNDING[BF16] * expected.abs() + 2.0**-10 + (xr.abs() + xi.abs()) * off)


def check_features_backward(operands, result):
    """As operators/tests/test_library_meshes.py: each factor may be off by so much, and all of this adds up."""
    d_out, x, gr, gi, lr, li = (each.double() for each in operands)
    xr, xi, ar, ai, off = errors_of_gradients(x, gr, gi, lr, li)
    u, of_u = xr * ar + xi * ai, (xr.abs() + xi.abs()) * off

    def slope(u):
        return 1 - torch.tanh(u)**2

    g = d_out * slope(u)
    # |d slope / du| <= 0.77, and 2 slope where that is less.
    steep = torch.minimum(torch.full_like(u, 0.77), 2 * slope((u.abs() - of_u).clamp(min=0)))
    of_g = d_out.abs() * (steep * of_u + MESH_FP32 * slope(u))
    rounded = 1.01 * ROUNDING[BF16]
    (P, of_p), (Q, of_q), (R, of_r), (S, of_s) = (
        (g * factor, rounded * (g * factor).abs() + of_g * factor.abs() + (g.abs() + of_g) * of_factor + MESH_FP32 *
         (g * factor).abs()) for factor, of_factor in ((xr, 0), (xi, 0), (ar, off), (ai, off)))
    gr_t, gi_t = gr.mT, gi.mT
    dM1, dM2, D = gr_t @ P + gi_t @ Q, gr_t @ Q - gi_t @ P, gr_t @ R + gi_t @ S
    of_1 = gr_t.abs() @ of_p + gi_t.abs() @ of_q + (rounded + MESH_FP32) * dM1.abs()
    of_2 = gr_t.abs() @ of_q + gi_t.abs() @ of_p + (rounded + MESH_FP32) * dM2.abs()
    of_d = gr_t.abs() @ of_r + gi_t.abs() @ of_s
    bounds = (of_d + of_1 @ lr.abs() + of_2 @ li.abs(), of_1.mT @ x.abs(), of_2.mT @ x.abs())
    expected = D + dM1 @ lr + dM2 @ li, dM1.mT @ x, dM2.mT @ x
    for name, one, other, bound in zip(("d_x", "d_lr", "d_li"), result, expected, bounds, strict=True):
        assert one.dtype == BF16
        near(name, one, other, ROUNDING[BF16] * other.abs() + bound)
        alike(one, other, 16)  # those bounds are wide: they let all errors add up


def tangents(vertices, eigen, width, seed):
    """x, gr, gi, lr, li: small, so that not all features are near 1 or -1."""
    x = numbers(eigen, width, dtype=BF16, seed=seed + 1)
    pairs = [numbers(*shape, dtype=BF16, seed=seed + i, scale=1 / 4 if shape[1] < 64 else 1 / 8)
             for i, shape in enumerate([(vertices, eigen)] * 2 + [(width, width)] * 2, 2)]
    return x, *pairs


def gradient_features(vertices, eigen, width):
    return Case(f"gradient_features-{vertices}x{eigen}x{width}", fused_kernels.gradient_features,
                lambda seed=0: tangents(vertices, eigen, width, seed), check_features, (0, 3, 4))


def gradient_features_backward(vertices, eigen, width):
    def operands(seed=0):
        return numbers(vertices, width, dtype=BF16, seed=seed), *tangents(vertices, eigen, width, seed)

    return Case(f"gradient_features_backward-{vertices}x{eigen}x{width}", fused_kernels.gradient_features_backward,
                operands, check_features_backward)


# ---- Meshes that differ in their sizes ----------------------------------------------------------------------------


def by_mesh(formula, x, *operands):
    """A formula in fp64 of several meshes; the last operand are the offsets. Of the features x is of the spectrum."""
    *others, offsets = operands
    results = []
    for mesh, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
        own = slice(begin, end)
        if formula is diffusion_in_fp64:
            basis, mass, evalues, times = others
            results.append(formula(x[own], basis[own], mass[own], evalues[mesh], times))
        else:
            gr, gi, *weights = others
            results.append((formula(x[mesh], gr[own], gi[own], *weights),))
    out, *spectral = zip(*results)
    return (torch.cat(out), *map(torch.stack, spectral))


def offsets_of(sizes):
    return torch.tensor([sum(sizes[:mesh]) for mesh in range(len(sizes) + 1)], dtype=torch.int32, device="cuda")


def check_ragged(formula):
    def check(operands, result):
        expected = by_mesh(formula, *(each.double() for each in operands[:-1]), operands[-1])
        for one, other in zip(tensors(result), expected, strict=True):
            alike(one, other, 4)
    return check


def check_ragged_backward(formula, at, results):
    """at: of which operands of forward there are gradients. results: how many forward has."""
    def check(operands, found):
        d, doubles = operands[:results], [each.double() for each in operands[results:-1]]
        if formula is diffusion_in_fp64:  # x is none of the operands, and d_times comes of the spectral that is
            basis, mass, evalues, times, spectral = doubles
            ends = operands[-1].tolist()
            each = [gradient_sizes(d[0][begin:end].double(), d[1][mesh].double(), basis[begin:end], mass[begin:end],
                                   evalues[mesh], times, spectral[mesh])
                    for mesh, (begin, end) in enumerate(zip(ends, ends[1:]))]
            expected = torch.cat([one[0] for one in each]), sum(one[1] for one in each)
        else:
            leaves = [doubles[i].requires_grad_() for i in at]
            expected = torch.autograd.grad(by_mesh(formula, *doubles, operands[-1]), leaves, [d[0].double()])
        for one, other in zip(found, expected, strict=True):
            alike(one, other, 16)
    return check


def diffusion_ragged(sizes, eigen, width):
    def operands(seed=0):
        x = numbers(sum(sizes), width, dtype=BF16, seed=seed)
        basis, mass, _, times = mesh((), sum(sizes), eigen, width, seed)
        return x, basis, mass, 2 * numbers(len(sizes), eigen, dtype=BF16, seed=seed + 3).abs(), times, offsets_of(sizes)

    return Case(f"diffusion_ragged-{len(sizes)}x{eigen}x{width}", fused_kernels.diffusion, operands,
                check_ragged(diffusion_in_fp64), (0, 4))


def diffusion_ragged_backward(sizes, eigen, width):
    forward = diffusion_ragged(sizes, eigen, width)

    def operands(seed=0):
        d_out, *others, offsets = forward.operands(seed)
        d_spectral, spectral = (numbers(len(sizes), eigen, width, dtype=BF16, seed=seed + i) for i in (5, 6))
        return d_out, d_spectral, *others, spectral, offsets

    return Case(forward.name.replace("ragged", "ragged_backward"), fused_kernels.diffusion_backward, operands,
                check_ragged_backward(diffusion_in_fp64, (), 2))


def features_ragged(sizes, eigen, width):
    def operands(seed=0):
        x = numbers(len(sizes), eigen, width, dtype=BF16, seed=seed + 1)
        return x, *tangents(sum(sizes), eigen, width, seed)[1:], offsets_of(sizes)

    return Case(f"gradient_features_ragged-{len(sizes)}x{eigen}x{width}", fused_kernels.gradient_features, operands,
                check_ragged(features_in_fp64), (0, 3, 4))


def features_ragged_backward(sizes, eigen, width):
    forward = features_ragged(sizes, eigen, width)

    def operands(seed=0):
        return numbers(sum(sizes), width, dtype=BF16, seed=seed), *forward.operands(seed)

    return Case(forward.name.replace("ragged", "ragged_backward"), fused_kernels.gradient_features_backward, operands,
                check_ragged_backward(features_in_fp64, (0, 3, 4), 1))


RAGGED = diffusion_ragged, diffusion_ragged_backward, features_ragged, features_ragged_backward


# ---- Clifford products --------------------------------------------------------------------------------------------


def algebra(p, q, r):
    """(grades of the blades, terms): (i, j, k, sign, t) where blade i times blade j is sign times blade k, of triple
    t."""
    bits = sorted(range(1 << p + q + r), key=lambda blade: (blade.bit_count(), blade))
    squares, terms = [1] * p + [-1] * q + [0] * r, []
    for i, a in enumerate(bits):
        for j, b in enumerate(bits):
            swaps = sum((a >> v + 1 & b).bit_count() for v in range(p + q + r))
            sign = (-1)**swaps
            for v, square in enumerate(squares):
                sign *= square if a & b & 1 << v else 1
            if sign:
                terms.append((i, j, bits.index(a ^ b), sign))
    grades = [blade.bit_count() for blade in bits]
    triples = sorted({(grades[i], grades[k], grades[j]) for i, j, k, _ in terms})
    return grades, [(i, j, k, sign, triples.index((grades[i], grades[k], grades[j]))) for i, j, k, sign in terms]


def clifford_in_fp64(x, y, w, signature, normed, gated=True):
    """w is (features, triples), or (triples, features, features), or None."""
    grades, terms = algebra(*signature)
    if gated:
        x, y = (each * (1 + torch.erf(each[:1] * 0.5**0.5)) / 2 for each in (x, y))
    planes = {}
    for i, j, k, sign, t in terms:
        planes[t, k] = planes.get((t, k), 0) + sign * x[i] * y[j]
    z = [torch.zeros_like(x[0])] * len(grades)
    for (t, k), plane in planes.items():
        z[k] = z[k] + (plane if w is None else plane * w[:, t] if w.dim() == 2 else plane @ w[t])
    z = torch.stack(z)
    if not normed:
        return z
    squares = [sum(z[k].square().mean(1, keepdim=True) for k in range(len(grades)) if grades[k] == c)
               for c in range(max(grades) + 1)]
    return torch.stack([z[k] * (squares[c] + 1e-6).rsqrt() for k, c in enumerate(grades)])


def clifford_operands(batch, features, signature, seed):
    blades, triples = 2**sum(signature), fused_kernels.TRIPLES[signature]
    return (*(numbers(blades, batch, features, dtype=FP32, seed=seed + i) for i in (1, 2)),
            numbers(features, triples, dtype=FP32, seed=seed + 3))


def clifford_name(function, batch, features, signature, normed):
    numbers_of = f"{batch}x{features}-{','.join(map(str, signature))}"
    return f"{function.__name__}-{numbers_of}" + ("" if normed else "-not_normed")


def clifford_forward_case(function, operands_of, bound, batch, features, signature, normed):
    def check(operands, out):
        expected = clifford_in_fp64(*(each.double() for each in operands), signature, normed)
        assert out.dtype == FP32
        alike(out, expected, bound)

    return Case(clifford_name(function, batch, features, signature, normed),
                lambda *operands: function(*operands, signature, normed),
                lambda seed=0: operands_of(batch, features, signature, seed), check, (0, 1, 2))


def clifford_backward_case(function, operands_of, bound, batch, features, signature, normed):
    def operands(seed=0):
        d_out = numbers(2**sum(signature), batch, features, dtype=FP32, seed=seed)
        return d_out, *operands_of(batch, features, signature, seed)

    def check(operands, result):
        d_out, *rest = (each.detach().double() for each in operands)
        rest = [each.requires_grad_() for each in rest]
        expected = torch.autograd.grad(clifford_in_fp64(*rest, signature, normed), rest, d_out)
        for found, other in zip(result, expected, strict=True):
            assert found.dtype == FP32
            alike(found, other, bound)

    return Case(clifford_name(function, batch, features, signature, normed),
                lambda *each: function(*each, signature, normed), operands, check)


def clifford(batch, features, signature=(3, 0, 0), normed=True):
    return clifford_forward_case(fused_kernels.clifford, clifford_operands, 512, batch, features, signature, normed)


def clifford_backward(batch, features, signature=(3, 0, 0), normed=True):
    return clifford_backward_case(fused_kernels.clifford_backward, clifford_operands, 2048, batch, features, signature,
                                  normed)


def geometric_in_fp64(x, y, w, signature, gate, norm, layout, order):
    """As fused_kernels.geometric_product() has it, of fp64."""
    every, null = range(2**sum(signature)), range(sum(signature[:2]), sum(signature))
    first = {v: -1 if order == "null_first" and v in null else 0 for v in range(5)}
    words = {bits: sorted((first[v], v) for v in range(5) if bits >> v & 1) for bits in every}
    keys = {"grade": lambda bits: (bits.bit_count(), bits), "bits": lambda bits: bits}
    own = sorted(every, key=keys.get(order, lambda bits: (len(words[bits]), words[bits])))
    theirs = sorted(every, key=keys["grade"])
    # Of a word's letters each pair that does not ascend is a swap, and so a sign.
    signs = torch.tensor([(-1.0)**sum(a > b for i, (_, a) in enumerate(words[bits]) for _, b in words[bits][i:])
                          for bits in theirs], dtype=torch.float64, device=x.device)[:, None, None]
    if layout == "blades_last":
        x, y = (each.permute(2, 0, 1) for each in (x, y))
    x, y = (each[[own.index(bits) for bits in theirs]] * signs for each in (x, y))
    result = clifford_in_fp64(x, y, w, signature, norm, gate is not None) * signs
    result = result[[theirs.index(bits) for bits in own]]
    return result.permute(1, 2, 0) if layout == "blades_last" else result


def geometric(batch, features, signature=(3, 0, 0), dtype=FP32, weights=None, gate=None, norm=False,
              layout="blades_first", order="grade", backward=False):
    """weights: the type of w; None: there are none. backward: of the gradients, by autograd."""
    options = signature, gate, norm, layout, order
    triples = len({t for *_, t in algebra(*signature)[1]})

    def operands(seed=0):
        blades = 2**sum(signature)
        shape = (blades, batch, features) if layout == "blades_first" else (batch, features, blades)
        return (*(numbers(*shape, dtype=dtype, seed=seed + i) for i in (1, 2)),
                *([numbers(*shape, dtype=dtype, seed=seed + 7)] if backward else []),
                *([] if weights is None else [numbers(features, triples, dtype=weights, seed=seed + 3)]))

    def run(x, y, *rest):
        d_out, *w = rest if backward else (None, *rest)
        if not backward:
            return fused_kernels.geometric_product(x, y, *(w or [None]), *options)
        inputs = [each.detach().requires_grad_() for each in (x, y, *w)]
        result = fused_kernels.geometric_product(*inputs, *([] if w else [None]), *options)
        return torch.autograd.grad(result, inputs, d_out)

    def check(operands, result):
        x, y, *rest = (each.detach().double() for each in operands)
        d_out, *w = rest if backward else (None, *rest)
        inputs = [each.requires_grad_() for each in (x, y, *w)]
        expected = geometric_in_fp64(*inputs, *([] if w else [None]), *options)
        if backward:
            expected = torch.autograd.grad(expected, inputs, d_out)
        for found, other in zip(tensors(result), tensors(expected), strict=True):
            assert found.dtype == (weights if found.shape == (features, triples) and found.dim() == 2 else dtype)
            alike(found, other.detach(), 2048 if found.dtype == FP32 else 2)

    name = f"geometric{'_backward' if backward else ''}-{batch}x{features}-{','.join(map(str, signature))}"
    words = [str(dtype)[6:], f"weights={str(weights)[6:]}" if weights else "", gate or "", "norm" if norm else "",
             layout, order]
    return Case("-".join([name, *filter(None, words)]), run, operands, check)


def connected_operands(batch, features, signature, seed):
    x, y, _ = clifford_operands(batch, features, signature, seed)
    return x, y, numbers(fused_kernels.TRIPLES[signature], features, features, dtype=FP32, seed=seed + 3)


def clifford_connected(batch, features, signature=(3, 0, 0), normed=True):
    # The bound is of TF32: 4 times 2^-11, where fp32's is 2^-24.
    return clifford_forward_case(fused_kernels.clifford_connected, connected_operands, 2.0**15, batch, features,
                                 signature, normed)


def clifford_connected_backward(batch, features, signature=(3, 0, 0), normed=True):
    return clifford_backward_case(fused_kernels.clifford_connected_backward, connected_operands, 2.0**16, batch,
                                  features, signature, normed)


def clifford_connected_kept(batch, features, signature=(3, 0, 0), normed=True):
    def check(operands, result):
        alike(tensors(result)[0], clifford_in_fp64(*(each.double() for each in operands), signature, normed), 2.0**15)

    return Case(f"clifford_connected_kept-{batch}x{features}",
                lambda *operands: fused_kernels.clifford_connected(*operands, signature, normed, inverse_norms=True)[0],
                lambda seed=0: connected_operands(batch, features, signature, seed), check, (0, 1, 2))


def clifford_connected_kept_backward(batch, features, signature=(3, 0, 0), normed=True):
    """With the result and the norms of forward."""
    def operands(seed=0):
        x, y, w = connected_operands(batch, features, signature, seed)
        z = clifford_in_fp64(*(each.double() for each in (x, y, w)), signature, False)
        of, squares = algebra(*signature)[0], z.square().mean(2)
        norms = torch.stack([sum(squares[k] for k, c in enumerate(of) if c == grade) for grade in range(of[-1] + 1)])
        norms = (norms + 1e-6).rsqrt() if normed else torch.ones_like(norms)
        out = z * norms[of].unsqueeze(2)
        return numbers(*x.shape, dtype=FP32, seed=seed), x, y, w, out.float(), norms.float()

    def run(d_out, x, y, w, *kept):
        return fused_kernels.clifford_connected_backward(d_out, x, y, w, signature, normed, *kept)

    inner = clifford_connected_backward(batch, features, signature, normed)
    return Case(clifford_name(clifford_connected_kept_backward, batch, features, signature, normed), run, operands,
                lambda operands, result: inner.check(operands[:4], result))


def linear_in_fp64(x, mix, bias, signature):
    y = torch.stack([each @ mix[c].mT for each, c in zip(x, algebra(*signature)[0])])
    return torch.cat((y[:1] + bias, y[1:]))


def layer_in_fp64(x, mix, bias, w, signature=(3, 0, 0), normed=True):
    return clifford_in_fp64(x, linear_in_fp64(x, mix, bias, signature), w, signature, normed)


def layer_operands(batch, features, signature, seed):
    x, _, w = clifford_operands(batch, features, signature, seed)
    mix = numbers(sum(signature) + 1, features, features, dtype=FP32, seed=seed + 4) * features**-0.5
    return x, mix, numbers(features, dtype=FP32, seed=seed + 5), w


def clifford_layer(batch, features, signature=(3, 0, 0), normed=True):
    def check(operands, result):
        alike(tensors(result)[0], layer_in_fp64(*(each.double() for each in operands), signature, normed), 2.0**15)

    return Case(clifford_name(fused_kernels.clifford_layer, batch, features, signature, normed),
                lambda *operands: fused_kernels.clifford_layer(*operands, signature, normed),
                lambda seed=0: layer_operands(batch, features, signature, seed), check, (0, 1, 2, 3))


def clifford_layer_backward(batch, features, signature=(3, 0, 0), normed=True):
    def operands(seed=0):
        x, mix, bias, w = layer_operands(batch, features, signature, seed)
        y = linear_in_fp64(*(each.double() for each in (x, mix, bias)), signature).float()
        return numbers(*x.shape, dtype=FP32, seed=seed), x, y, mix, bias, w

    def check(operands, result):
        d_out, x, _, *rest = (each.detach().double() for each in operands)
        rest = [each.requires_grad_() for each in (x, *rest)]
        expected = torch.autograd.grad(layer_in_fp64(*rest, signature, normed), rest, d_out)
        for found, other in zip(result, expected, strict=True):
            alike(found, other, 2.0**16)

    return Case(clifford_name(fused_kernels.clifford_layer_backward, batch, features, signature, normed),
                lambda *operands: fused_kernels.clifford_layer_backward(*operands, signature, normed), operands, check)


# ---- All ----------------------------------------------------------------------------------------------------------

MESHES = [(1, 8, 8), (70, 24, 16), (5001, 128, 256), (1234, 136, 8), (700, 32, 264)]
CASES = [
    *(product(*sizes, dtype) for dtype in (FP16, BF16, FP32)
      for sizes in ((1, 1, 1), (65, 9, 7), (33, 130, 65), (257, 333, 129), (1001, 515, 777))),
    *(product(21, 70, 13, dtype, row_stride=88) for dtype in (FP16, BF16)),
    *(product(*sizes, FP32, row_stride, math) for math in ("tf32", "tf32x3") for *sizes, row_stride in (
        (1, 1, 1, None), (65, 9, 7, None), (33, 130, 65, None), (257, 333, 129, None), (1001, 515, 777, None),
        (512, 1024, 640, None), (3000, 2000, 100, None), (21, 70, 13, 76), (700, 301, 257, 304))),
    *(gating(*sizes) for sizes in ((1, 1, 1), (65, 7, 9), (33, 65, 130), (1001, 129, 257))),
    gating(24, 40, 36, row_stride=56), gating_backward(24, 40, 36, row_stride=56),
    *(make(*sizes, dtype=dtype, gate=gate) for make in (gating, gating_backward) for dtype in (FP16, BF16)
      for gate in GATES for sizes in ((136, 72, 136), (1001, 129, 257))
      if (gate, make) != ("relu", gating_backward) or dtype == FP16),  # s that is rounded to another sign
    *(make(*sizes, dtype=BF16, gate="silu", biases=False) for make in (gating, gating_backward)
      for sizes in ((1, 1, 1), (65, 7, 9), (2048, 128, 64), (300, 1024, 2816))),
    *(make(257, 136, 129, dtype=FP32, gate=gate, math=math) for make in (gating, gating_backward) for gate in GATES
      for math in ("fp32", "tf32", "tf32x3")),
    *(make(24, 40, 36, row_stride=56, dtype=FP32, gate="gelu", biases=False, math="tf32")
      for make in (gating, gating_backward)),
    *(gating_backward(*sizes) for sizes in ((1, 1, 1), (65, 7, 9), (33, 65, 130), (1001, 129, 257))),
    *(make(*sizes, dtype, gated=gated) for make in (gating_two, gating_two_backward) for dtype in (FP16, BF16)
      for gated in (False, True) for sizes in ((257, 136, 72, 136), (65, 7, 130, 9), (1001, 129, 33, 257),
                                               (2048, 512, 512, 512), (16, 4096, 1000, 64))),
    *(make(257, 136, 65, 130, FP32, gate, math=math) for make in (gating_two, gating_two_backward)
      for gate, math in (("silu", "fp32"), ("gelu", "tf32"), ("sigmoid", "tf32x3"))),
    *(make(24, 40, 16, 36, dtype, apart=16) for make in (gating_two, gating_two_backward) for dtype in (BF16, FP32)),
    *(gating_two(300, 72, 40, 136, dtype, gate, gated, biases=False) for dtype in (FP16, BF16) for gate in GATES
      for gated in (False, True)),
    *(make(*sizes) for make in (softmax_backward, cross_entropy, cross_entropy_backward)
      for sizes in ((1, 1, 1), (65, 7, 9), (33, 65, 130), (3, 20, 9001), (2101, 12, 10), (30001, 64, 36),
                    (1000, 516, 777))),
    *(make(*sizes, dtype) for make in (softmax, softmax_backward, cross_entropy, cross_entropy_backward)
      for dtype in (FP16, BF16)
      for sizes in ((1, 1, 1), (65, 7, 9), (33, 65, 130), (5, 1100, 640), (3, 20, 9001), (2101, 12, 10),
                    (30001, 64, 36), (1000, 516, 777), (520, 128, 3000))),
    *(make(*sizes, dtype, torch.int32) for make in (cross_entropy, cross_entropy_backward) for dtype in (FP32, BF16)
      for sizes in ((65, 7, 9), (3, 20, 9001), (1000, 516, 777))),
    *(attention(*sizes, dtype, causal, layout) for dtype in (FP16, BF16)
      for layout in ("rows first", "heads first")
      for *sizes, causal in ((1, 1, 1, 1, 1, 1, False), (2, 5, 9, 4, 2, 24, True), (1, 9, 5, 1, 1, 7, True),
                             (1, 3, 300, 2, 2, 72, False), (2, 129, 257, 4, 2, 128, True))),
    *(make(2, 77, 77, 3, 3, 64, dtype, layout="packed") for make in (attention, attention_backward)
      for dtype in (FP16, BF16)),
    *(attention_backward(*sizes, dtype, causal, layout) for dtype in (FP16, BF16)
      for layout in ("rows first", "heads first")
      for *sizes, causal in ((1, 1, 1, 1, 1, 8, False), (2, 5, 9, 4, 2, 24, True), (1, 90, 50, 1, 1, 64, True),
                             (1, 3, 300, 2, 2, 72, False), (2, 129, 257, 4, 2, 128, True),
                             (2, 700, 300, 6, 2, 64, False), (1, 1000, 1000, 2, 2, 128, False),
                             (1, 400, 900, 16, 4, 96, False), (2, 333, 444, 4, 2, 80, True),
                             (1, 2050, 2050, 4, 4, 128, False), (1, 2767, 2767, 4, 4, 64, False),
                             (2, 100, 120, 4, 2, 64, False), (3, 150, 190, 4, 4, 40, True), (2, 300, 250, 6, 2, 64, True),
                             (2, 300, 700, 6, 2, 256, False), (1, 333, 190, 2, 1, 136, True))),
    *(make(*sizes) for make in (diffusion, diffusion_backward) for sizes in MESHES),
    *(make(21, 40, 72, meshes=(3,)) for make in (diffusion, diffusion_backward)),
    *(softmax(*sizes) for sizes in ((1, 1, 1), (65, 7, 9), (5, 130, 133), (33, 65, 130), (3, 20, 9001),
                                    (2101, 12, 10))),
    *(make(*sizes) for make in (gradient_features, gradient_features_backward) for sizes in MESHES),
    *(make(*sizes) for make in RAGGED for sizes in (((3,), 3, 5), ((70, 0, 3, 500), 24, 9), ((5,) * 100, 5, 24))),
    *(make(*sizes) for make in (clifford, clifford_backward)
      for sizes in ((1, 1), (5, 13), (300, 64), (65, 1024), (7, 1030), (3, 8192))),
    *(make(21, 40, signature) for make in (clifford, clifford_backward) for signature in fused_kernels.TRIPLES),
    *(make(33, 72, normed=False) for make in (clifford, clifford_backward)),
    *(geometric(33, features, signature, dtype, backward=backward) for backward in (False, True)
      for dtype in (FP32, BF16, FP16) for features in (72, 13)
      for signature in ((3, 0, 0), (2, 0, 0), (3, 0, 1), (0, 2, 0), (1, 1, 1), (5, 0, 0), (4, 1, 0))),
    *(geometric(21, 40, (p, q, n - p - q), BF16, FP32, "gelu", True, backward=backward) for backward in (False, True)
      for n in range(1, 6) for p in range(n + 1) for q in range(n + 1 - p)),
    *(geometric(*sizes, (3, 0, 0), dtype, dtype, "gelu", True, backward=backward) for backward in (False, True)
      for dtype in (BF16, FP16) for sizes in ((1, 8), (300, 64), (65, 1024), (7, 1032), (3, 8192), (5000, 16))),
    *(geometric(21, 40, signature, dtype, layout=layout, order=order, backward=backward) for backward in (False, True)
      for signature, dtype in (((3, 0, 0), FP32), ((3, 0, 1), BF16)) for layout in ("blades_first", "blades_last")
      for order in ("grade", "bits", "shortlex", "null_first")),
    *(geometric(*sizes, signature, dtype, layout="blades_last", order="null_first", gate=gate, backward=backward)
      for backward in (False, True) for dtype in (FP32, BF16, FP16) for gate in (None, "gelu")
      for sizes, signature in (((300, 16), (3, 0, 1)), ((1, 1), (1, 0, 0)), ((77, 5), (2, 1, 2)))),
    *(geometric(65, 72, (3, 0, 1), dtype, weights, "gelu", True, "blades_last", "null_first", backward)
      for backward in (False, True) for dtype, weights in ((FP32, FP32), (BF16, FP32), (FP16, None))),
    *(make(*sizes) for make in (clifford_connected, clifford_connected_backward, clifford_connected_kept,
                                   clifford_connected_kept_backward)
      for sizes in ((1, 1), (5, 13), (300, 64), (1000, 260), (4096, 512), (20, 128, (2, 0, 0)),
                    (700, 130, (2, 0, 0), False))),
    # Of one feature the norm leaves gradients that are differences of nearly the same numbers: there is none then.
    *(make(*sizes) for make in (clifford_layer, clifford_layer_backward)
      for sizes in ((1, 1, (3, 0, 0), False), (5, 13), (300, 64), (1000, 260), (37, 1028), (4096, 512),
                    (20, 128, (2, 0, 0)), (700, 130, (2, 0, 0), False))),
    *(make(21, 40, signature) for make in (clifford_layer, clifford_layer_backward)
      for signature in fused_kernels.TRIPLES),
]
# Of each function three shapes whose kernels need different amounts of shared memory, or have other tiles.
IN_TURN = [
    *([product(*sizes, dtype) for sizes in ((257, 333, 129), (1, 8, 8), (1001, 515, 777))] for dtype in (FP16, FP32)),
    [product(*sizes, FP32, math="tf32x3") for sizes in ((257, 333, 129), (1, 8, 8), (1001, 515, 777))],
    *([make(*sizes) for sizes in ((1001, 129, 257), (3, 8, 8), (200, 64, 64))] for make in (gating, gating_backward)),
    *([make(*sizes, dtype=BF16, gate="silu") for sizes in ((1001, 129, 257), (3, 8, 8), (200, 64, 64))]
      for make in (gating, gating_backward)),
    [attention(2, *sizes, BF16) for sizes in ((129, 257, 4, 2, 128), (5, 9, 4, 2, 24), (3, 300, 2, 2, 200))],
    [attention_backward(2, *sizes, BF16) for sizes in ((129, 257, 4, 2, 128), (5, 9, 4, 2, 24), (3, 300, 2, 2, 64),
                                                      (129, 257, 4, 2, 256))],
    *([make(*sizes) for sizes in ((5001, 128, 256), (1, 8, 8), (700, 32, 264))]
      for make in (diffusion, diffusion_backward, gradient_features, gradient_features_backward)),
    *([make(*sizes) for sizes in (((700, 30), 24, 40), ((3,), 8, 8), ((20, 30, 50), 17, 12))] for make in RAGGED),
    *([make(*sizes, dtype) for sizes in ((1000, 516, 777), (65, 7, 9), (3, 20, 9001))] for dtype in (FP32, BF16)
      for make in (softmax, softmax_backward, cross_entropy, cross_entropy_backward)),
    *([make(65, features, signature) for features in (512, 64, 1024)]
      for make in (clifford, clifford_backward) for signature in fused_kernels.TRIPLES),
    *([make(300, features) for features in (260, 8, 64)]
      for make in (clifford_connected, clifford_connected_backward, clifford_connected_kept_backward,
                   clifford_layer, clifford_layer_backward)),
]
EACH = [  # one of each function, of the product one of each type and math, and of softmax two types
    *(product(257, 136, 129, dtype) for dtype in (FP16, BF16, FP32)),
    *(product(257, 136, 129, FP32, math=math) for math in ("tf32", "tf32x3")), gating(257, 129, 136),
    gating(257, 136, 129, dtype=BF16, gate="silu", biases=False), gating(257, 136, 129, dtype=FP32, math="tf32"),
    attention(2, 129, 257, 4, 2, 64, BF16, causal=True), attention_backward(2, 129, 257, 4, 2, 64, BF16, causal=True),
    diffusion(1234, 64, 72, meshes=(2,)),
    *(make((300, 40, 900), 64, 72) for make in RAGGED),
    diffusion_backward(1234, 64, 72, meshes=(2,)), softmax(129, 65, 257), gradient_features(1234, 64, 72),
    gradient_features_backward(1234, 64, 72), clifford(65, 72), clifford_backward(65, 72),
    gating_two(257, 129, 72, 136), gating_two_backward(257, 129, 72, 136),
    gating_two_kept(257, 129, 72, 136), gating_two_kept_backward(257, 129, 72, 136),
    gating_backward(257, 129, 136), softmax_backward(129, 65, 257), cross_entropy(129, 65, 257),
    cross_entropy_backward(129, 65, 257),
    *(make(129, 65, 257, BF16) for make in (softmax, softmax_backward)),
    *(make(129, 65, 257, FP16, torch.int32) for make in (cross_entropy, cross_entropy_backward)),
    clifford_connected(200, 72), clifford_connected_backward(200, 72),
    clifford_connected_kept(200, 72), clifford_connected_kept_backward(200, 72),
    clifford_layer(200, 72), clifford_layer_backward(200, 72),
]
