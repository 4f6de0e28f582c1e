"""The geometric product of tensors of multivectors, by fk_clifford_forward() and fk_clifford_backward(), in any
algebra of up to five basis vectors, and in the orders and layouts in which networks have their blades."""

import ctypes
import functools
import itertools
import operator

from ._header import FK_BFLOAT16, FK_FLOAT16, FK_FLOAT32, fk_clifford
from ._library import error_of, is_for_cpu, library, query_of
from . import _torch as binding
from ._torch import torch

MOST_VECTORS = 5
ORDERS = ("grade", "bits", "shortlex")
LAYOUTS = ("blades_first", "blades_last")


@functools.cache
def blades(vectors, order="grade"):
    """The blades of an algebra of so many basis vectors, each as a tuple of its vectors, from 0 on. Orders: "grade",
    the library's: by grade, those of a grade by their vectors as bits of a number; "bits": by that number alone;
    "shortlex": by grade, those of a grade as words in a dictionary. The first two differ from 3 vectors on, the first
    and the last from 4 on: of these "shortlex" alone has e14 before e23."""
    every = [blade for grade in range(vectors + 1) for blade in itertools.combinations(range(vectors), grade)]
    keys = {"grade": lambda blade: (len(blade), _bits(blade)), "bits": _bits,
            "shortlex": lambda blade: (len(blade), blade)}
    return tuple(sorted(every, key=keys[order]))


def _bits(blade):
    return sum(1 << vector for vector in blade)


@functools.cache
def permutations(vectors, order):
    """(where each blade of the library is in this order, where each of this order is in the library's); None for both
    if that is the same."""
    own, theirs = blades(vectors, order), blades(vectors)
    if own == theirs:
        return None, None
    return tuple(map(own.index, theirs)), tuple(map(theirs.index, own))


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
    features, blades). There may be any number of dimensions between. order: of the blades: "grade", "bits" or
    "shortlex", as blades() explains. In each of them a blade's vectors ascend, so no sign changes.

    Types: torch.float32, torch.bfloat16 or torch.float16 for x, y and the result; for w the same, as in a model after
    .to(torch.bfloat16), or torch.float32, as under autocast. All is computed in fp32, and rounded once.

    What it costs: with "blades_first", an order that is the library's, and contiguous x and y, nothing is copied. Any
    other layout or order copies x, y and the result once each, and so their gradients, which is twice the memory
    traffic of the product alone, and more. With 1 or 2 vectors all orders are the library's, and with 3 "shortlex" is.

    Gradients: of x, y and w. There are no second derivatives.

    Raises a ValueError for shapes, types or options that are not these, and a RuntimeError where the cause is the GPU.
    Source: operators/clifford; lesson 10 explains the layer."""
    signature = tuple(map(operator.index, signature))
    vectors = _check(x, y, w, signature, gate, layout, order)
    there, back = permutations(vectors, order)
    is_last = layout == "blades_last"

    def to_library(tensor):
        tensor = tensor.movedim(-1, 0) if is_last else tensor
        if there is not None:
            tensor = torch.stack([tensor[at] for at in there])
        return tensor.reshape(1 << vectors, -1, tensor.shape[-1]).contiguous()

    shape = (x.movedim(-1, 0) if is_last else x).shape
    weights = None if w is None else w.contiguous()
    result = torch.ops.fused_kernels.geometric_product(to_library(x), to_library(y), weights, list(signature),
                                                       gate is not None, bool(norm)).reshape(shape)
    if back is not None:
        result = torch.stack([result[at] for at in back])
    return result.movedim(0, -1).contiguous() if is_last else result


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


def _describe(x, w, signature, gated, normed):
    kinds = {torch.float32: FK_FLOAT32, torch.bfloat16: FK_BFLOAT16, torch.float16: FK_FLOAT16}
    _, batch, features = x.shape
    return fk_clifford(ctypes.sizeof(fk_clifford), kinds[x.dtype], *signature, normed, batch, features, not gated,
                       w is None, 0 if w is None else kinds[w.dtype])


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
    _OPTIONS = "Tensor x, Tensor y, Tensor? w, int[] signature, bool gated, bool normed"

    @torch.library.custom_op("fused_kernels::geometric_product", mutates_args=(), device_types="cuda",
                             schema=f"({_OPTIONS}) -> Tensor")
    def _forward(x, y, w, signature, gated, normed):
        with torch.cuda.device(x.device):
            out = _like(x)
            _launch("fk_clifford_forward", _describe(x, w, signature, gated, normed), (x, y, w, out))
        return out

    @_forward.register_fake
    def _(x, y, w, signature, gated, normed):
        return torch.empty_like(x)

    @torch.library.custom_op("fused_kernels::geometric_product_backward", mutates_args=(), device_types="cuda",
                             schema=f"(Tensor d_out, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
    def _backward(d_out, x, y, w, signature, gated, normed):
        with torch.cuda.device(x.device):
            d_x, d_y, d_w = _like(x), _like(y), x.new_empty(0) if w is None else _like(w)
            _launch("fk_clifford_backward", _describe(x, w, signature, gated, normed),
                    (d_out, x, y, w, d_x, d_y, None if w is None else d_w))
        return d_x, d_y, d_w

    @_backward.register_fake
    def _(d_out, x, y, w, signature, gated, normed):
        return torch.empty_like(x), torch.empty_like(y), x.new_empty(0) if w is None else torch.empty_like(w)

    def _save(ctx, inputs, output):
        x, y, w, ctx.signature, ctx.gated, ctx.normed = inputs
        ctx.save_for_backward(x, y, w)

    def _gradients(ctx, d_out):
        x, y, w = ctx.saved_tensors
        d_x, d_y, d_w = torch.ops.fused_kernels.geometric_product_backward(
            d_out.contiguous(), x, y, w, ctx.signature, ctx.gated, ctx.normed)
        return d_x, d_y, None if w is None else d_w, None, None, None

    def _refuse(ctx, *gradients):
        raise RuntimeError("the library has no second derivative of the geometric product")

    torch.library.register_autograd("fused_kernels::geometric_product", _gradients, setup_context=_save)
    torch.library.register_autograd("fused_kernels::geometric_product_backward", _refuse)
