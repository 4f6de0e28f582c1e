"""The geometric product of tensors of multivectors, by fk_clifford_forward() and fk_clifford_backward(), in any
algebra of up to five basis vectors, and in the orders and layouts in which networks have their blades."""

import ctypes
import functools
import itertools
import math
import operator

from ._header import FK_BFLOAT16, FK_FLOAT16, FK_FLOAT32, fk_clifford  # LAYOUTS and ORDERS count as the header does
from ._library import error_of, is_for_cpu, library, query_of
from . import _torch as binding
from ._torch import torch

MOST_VECTORS = 5
ORDERS = ("grade", "bits", "shortlex", "null_first")
LAYOUTS = ("blades_first", "blades_last")


@functools.cache
def blades(vectors, order="grade", null=0):
    """The blades of an algebra of so many basis vectors, each as a tuple of its vectors, from 0 on; the last `null` of
    them square to 0. Orders: "grade", the library's: by grade, those of a grade by their vectors as bits of a number;
    "bits": by that number alone; "shortlex": by grade, those of a grade as words in a dictionary; "null_first": as
    "shortlex", but vectors that square to 0 come before the others, in a word too: with signature (3, 0, 1) the blades
    are 1, e0, e1, e2, e3, e01, e02, e03, e12, ..., as the geometric algebra transformer has them. The first two differ
    from 3 vectors on, the first and the third from 4 on: of these "shortlex" alone has e14 before e23."""
    def bits(blade):
        return sum(1 << vector for vector in blade)

    def word(blade):
        return sorted(blade, key=rank.get)

    first = range(vectors - null, vectors) if order == "null_first" else ()
    rank = {vector: (vector not in first, vector) for vector in range(vectors)}
    every = [tuple(word(blade)) for grade in range(vectors + 1)
             for blade in itertools.combinations(range(vectors), grade)]
    keys = {"grade": lambda blade: (len(blade), bits(blade)), "bits": bits}
    return tuple(sorted(every, key=keys.get(order, lambda blade: (len(blade), [rank[each] for each in blade]))))


@functools.cache
def triples(signature):
    """The triples (a, c, b) of grades that have a weight, in the order of w's columns: those for which a blade of grade
    a times one of grade b can be one of grade c, and not 0."""
    vectors, null = sum(signature), set(range(sum(signature[:2]), sum(signature)))
    every = [set(blade) for blade in blades(vectors)]
    return tuple(sorted({(len(x), len(x ^ y), len(y)) for x in every for y in every if not x & y & null}))


def geometric_product(x, y, w=None, signature=(3, 0, 0), gate=None, norm=False, layout="blades_first", order="grade"):
    """x y, the geometric product of multivectors; or, with weights, a gate and a norm, what the layer of clifford()
    computes.

    signature: (p, q, r): the first p basis vectors square to 1, the next q to -1, the last r to 0; at least 1 and at
    most 5 in all. w: None; or (features, triples), a weight for each feature and each of triples(signature), grades
    (a, c, b), by which the part of grade c of a product of grades a and b is multiplied. gate: None; or "gelu": x is
    multiplied by (1 + erf(s / sqrt 2)) / 2, where s is its scalar, and y likewise. norm: whether each grade of the
    result is divided by the root of its mean square over the features.

    Shapes: x, y and the result are alike. layout: "blades_first", (blades, ..., features); "blades_last", (...,
    features, blades). There may be any number of dimensions between. order: of the blades: "grade", "bits",
    "shortlex" or "null_first", as blades() explains. In the first three a blade's vectors ascend, so no sign changes; in
    the last e0 e1 is -(e1 e0), which counts.

    Types: torch.float32, torch.bfloat16 or torch.float16 for x, y and the result; for w the same, as in a model after
    .to(torch.bfloat16), or torch.float32, as under autocast. All is computed in fp32, and rounded once.

    What it costs: without w and norm all layouts and orders cost the same. Else "blades_first" and "grade" copy
    nothing, and the others copy x, y and the result once each, and so their gradients, by kernels of the library. A
    tensor that is not contiguous is copied by PyTorch.

    Gradients: of x, y and w. There are no second derivatives.

    Raises a ValueError for shapes, types or options that are not these, and a RuntimeError where the cause is the GPU.
    Source: operators/clifford; lesson 10 explains the layer."""
    signature = tuple(map(operator.index, signature))
    vectors = _check(x, y, w, signature, gate, layout, order)
    is_last = layout == "blades_last"
    shape = (-1, x.shape[-2], 1 << vectors) if is_last else (1 << vectors, -1, x.shape[-1])
    left, right = (each.contiguous().reshape(shape) for each in (x, y))
    return torch.ops.fused_kernels.geometric_product(
        left, right, None if w is None else w.contiguous(), list(signature), gate is not None, bool(norm),
        LAYOUTS.index(layout), ORDERS.index(order)).reshape(x.shape)


# ---- What is made of it ----------------------------------------------------------------------------------------------


def _constant(values, dtype, device):
    """A tensor of these numbers, kept for the next call: to copy them to a GPU would end the capture of a graph."""
    return (torch.tensor if torch.compiler.is_compiling() else _kept)(values, dtype=dtype, device=device)


@functools.cache
def _kept(values, dtype, device):
    return torch.tensor(values, dtype=dtype, device=device)


def _of_blades(values, x, layout):
    """A factor for each blade of x, as a tensor that multiplies it."""
    values = _constant(tuple(values), x.dtype, x.device)
    return values if layout == "blades_last" else values.reshape(-1, *[1] * (x.dim() - 1))


def reverse(x, signature=(3, 0, 0), layout="blades_first", order="grade"):
    """x with the vectors of each blade in the opposite order: a blade of grade g is multiplied by (-1)^(g (g - 1) / 2).
    Shapes, types, layout and order: as geometric_product()."""
    words = blades(sum(signature), order, signature[2])
    return x * _of_blades([(-1.0)**(len(word) * (len(word) - 1) // 2) for word in words], x, layout)


def conjugation(u, x, signature=(3, 0, 0), layout="blades_first", order="grade"):
    """u x u^-1 with u^-1 = reverse(u) / (u reverse(u)), whose denominator is a number, as it is for each u that is a
    product of vectors, such as a rotor or a motor: so u turns, mirrors or moves x. (Of another u the number is the
    scalar of u reverse(u).) Shapes, types, layout, order and errors: as geometric_product(), twice. Source: the formula
    is equation 3 of Ruhe et al., Geometric Clifford Algebra Networks, 2023."""
    options = dict(signature=signature, layout=layout, order=order)
    at, reversed_u = (0 if layout == "blades_first" else -1), reverse(u, **options)
    norm = (u * reversed_u * _of_blades(_squares(tuple(signature), order), u, layout)).sum(at, keepdim=True)
    return geometric_product(geometric_product(u, x, **options), reversed_u, **options) / norm


@functools.cache
def _squares(signature, order):
    """What a blade times itself is."""
    squares = [1.0] * signature[0] + [-1.0] * signature[1] + [0.0] * signature[2]
    return tuple((-1.0)**(len(word) * (len(word) - 1) // 2) * math.prod(squares[vector] for vector in word)
                 for word in blades(sum(signature), order, signature[2]))


def outer_product(x, y, signature=(3, 0, 0), layout="blades_first", order="grade"):
    """The outer product of x and y, the terms of x y whose grade is the sum of the factors' grades. Shapes, types,
    layout, order and errors: as geometric_product(), with weights of 1 and 0."""
    features = x.shape[-1 if layout == "blades_first" else -2]
    kept = _constant(tuple(1.0 * (a + b == c) for a, c, b in triples(tuple(signature))), torch.float32, x.device)
    return geometric_product(x, y, kept.expand(features, -1).contiguous(), signature, layout=layout, order=order)


def join(x, y, reference=None, signature=(3, 0, 1), layout="blades_last", order="null_first"):
    """The join of x and y, such as the line through two points: undual(outer_product(dual(x), dual(y))). The dual of a
    blade is the blade that has the other vectors, with the sign by which blade dual(blade) is that of all vectors.

    reference: None; or a multivector by whose last blade, that of all vectors, the result is multiplied. The join alone
    changes its sign in a mirror, and with a reference that is mirrored, too, it does not (the equivariant join of Brehmer
    et al., Geometric Algebra Transformer, 2023). Shapes, types, layout, order and errors: as geometric_product()."""
    vectors, at = sum(signature), (0 if layout == "blades_first" else -1)
    words = blades(vectors, order, signature[2])
    places = {frozenset(word): place for place, word in enumerate(words)}
    every = frozenset(range(vectors))
    whole = words[places[every]]
    there = tuple(places[every - frozenset(word)] for word in words)  # where the dual of each blade is
    signs = [_sign((*word, *words[other]), whole) for word, other in zip(words, there)]
    options = dict(signature=signature, layout=layout, order=order)

    def dual(tensor):
        """Blade k goes to there[k]; so the result's blade there[k] is signs[k] times blade k."""
        own = tensor * _of_blades(signs, tensor, layout)
        return own.index_select(at, _constant(there, torch.int64, tensor.device))

    def undual(tensor):
        moved = tensor.index_select(at, _constant(there, torch.int64, tensor.device))
        return moved * _of_blades(signs, tensor, layout)

    result = undual(outer_product(dual(x), dual(y), **options))
    return result if reference is None else result * reference.narrow(at, reference.shape[at] - 1, 1)


def _sign(word, whole):
    """By which a word of all vectors is a multiple of the one of them."""
    numbers = [whole.index(vector) for vector in word]
    return (-1.0)**sum(a > b for a, b in itertools.combinations(numbers, 2))


# ---- What is refused -------------------------------------------------------------------------------------------------


def _check(x, y, w, signature, gate, layout, order):
    """Refuses what is wrong; returns the number of basis vectors."""
    def require(condition, sentence):
        if not condition:
            raise ValueError(sentence)

    require(len(signature) == 3 and min(signature) >= 0 and 1 <= sum(signature) <= MOST_VECTORS,
            f"the signature is {signature}; it has to be three numbers (p, q, r) from 0 on, 1 to {MOST_VECTORS} in all")
    require(layout in LAYOUTS, f"layout is {layout!r}; it has to be {' or '.join(map(repr, LAYOUTS))}")
    require(order in ORDERS, f"order is {order!r}; it has to be {' or '.join(map(repr, ORDERS))}")
    require(gate in (None, "gelu"), f"gate is {gate!r}; it has to be None or 'gelu'")
    vectors, types = sum(signature), (torch.float32, torch.bfloat16, torch.float16)
    require(x.dtype in types, f"x is {x.dtype}; it has to be {' or '.join(map(str, types))}")
    require(y.dtype == x.dtype, f"y is {y.dtype}; it has to be {x.dtype}")
    require(x.shape == y.shape, f"y has the shape {tuple(y.shape)}; it has to be {tuple(x.shape)}")
    at = 0 if layout == "blades_first" else -1
    require(x.dim() >= 2 and x.shape[at] == 1 << vectors,
            f"x has the shape {tuple(x.shape)}; with the layout {layout!r} dimension {at} has to be {1 << vectors}")
    if w is not None:
        shape = x.shape[-1 if at == 0 else -2], len(triples(signature))
        require(tuple(w.shape) == shape, f"w has the shape {tuple(w.shape)}; it has to be {shape}")
        require(w.dtype in (x.dtype, torch.float32), f"w is {w.dtype}; it has to be {x.dtype} or torch.float32")
    return vectors


# ---- The operators that PyTorch sees -------------------------------------------------------------------------------


def _describe(x, w, signature, gated, normed, layout, order):
    kinds = {torch.float32: FK_FLOAT32, torch.bfloat16: FK_BFLOAT16, torch.float16: FK_FLOAT16}
    batch, features = x.shape[:2] if layout else x.shape[1:]
    return fk_clifford(ctypes.sizeof(fk_clifford), kinds[x.dtype], *signature, normed, batch, features, not gated,
                       w is None, 0 if w is None else kinds[w.dtype], 0, layout, order)


def _launch(name, description, operands):
    """Calls the function with these tensors, or None, on the current device's stream."""
    if is_for_cpu(library()):
        raise RuntimeError("the library is the CPU's, and tensors are on a GPU: build the package where nvcc is")

    def checked(code):
        if code:
            raise error_of(code)

    needed = ctypes.c_size_t()
    checked(getattr(library(), query_of(name))(ctypes.byref(description), ctypes.byref(needed)))
    workspace = binding._empty((needed.value,), (1,), torch.uint8) if needed.value else None
    addresses = [None if each is None else each.data_ptr() for each in (*operands, workspace)]
    checked(getattr(library(), name)(ctypes.byref(description), *addresses, needed.value,
                                     torch.cuda.current_stream().cuda_stream))


def _like(tensor):
    """A dense result on the current device."""
    return binding._empty(tuple(tensor.shape), tensor.contiguous().stride(), tensor.dtype)


if torch:
    _OPTIONS = "Tensor x, Tensor y, Tensor? w, int[] signature, bool gated, bool normed, int layout, int order"

    @torch.library.custom_op("fused_kernels::geometric_product", mutates_args=(), device_types="cuda",
                             schema=f"({_OPTIONS}) -> Tensor")
    def _forward(x, y, w, *options):
        with torch.cuda.device(x.device):
            out = _like(x)
            _launch("fk_clifford_forward", _describe(x, w, *options), (x, y, w, out))
        return out

    @_forward.register_fake
    def _(x, y, w, *options):
        return torch.empty_like(x)

    @torch.library.custom_op("fused_kernels::geometric_product_backward", mutates_args=(), device_types="cuda",
                             schema=f"(Tensor d_out, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
    def _backward(d_out, x, y, w, *options):
        with torch.cuda.device(x.device):
            d_x, d_y, d_w = _like(x), _like(y), x.new_empty(0) if w is None else _like(w)
            _launch("fk_clifford_backward", _describe(x, w, *options),
                    (d_out, x, y, w, d_x, d_y, None if w is None else d_w))
        return d_x, d_y, d_w

    @_backward.register_fake
    def _(d_out, x, y, w, *options):
        return torch.empty_like(x), torch.empty_like(y), x.new_empty(0) if w is None else torch.empty_like(w)

    def _save(ctx, inputs, output):
        x, y, w, *ctx.options = inputs
        ctx.save_for_backward(x, y, w)

    def _gradients(ctx, d_out):
        x, y, w = ctx.saved_tensors
        d_x, d_y, d_w = torch.ops.fused_kernels.geometric_product_backward(d_out.contiguous(), x, y, w, *ctx.options)
        return d_x, d_y, None if w is None else d_w, *[None] * len(ctx.options)

    def _refuse(ctx, *gradients):
        raise RuntimeError("the library has no second derivative of the geometric product")

    torch.library.register_autograd("fused_kernels::geometric_product", _gradients, setup_context=_save)
    torch.library.register_autograd("fused_kernels::geometric_product_backward", _refuse)
