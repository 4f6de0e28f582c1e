"""The geometric product of tensors of multivectors, by fk_clifford_forward() and fk_clifford_backward(), in any
algebra of up to five basis vectors, and in the orders and layouts in which networks have their blades; and what
networks make of it. geometric_nn.py has these as torch.nn.Module. On the CPU, and in torch.float64, PyTorch's operators
compute all of it, by the same formulas."""

import ctypes
import functools
import itertools
import operator

from ._header import FK_BFLOAT16, FK_FLOAT16, FK_FLOAT32, fk_clifford  # LAYOUTS and ORDERS count as the header does
from ._library import error_of, is_for_cpu, library, query_of
from . import _torch as binding
from ._torch import torch

MOST_VECTORS = 5
EPSILON = 1e-6  # of the norm
CONNECTED = (2, 0, 0), (3, 0, 0)  # the algebras of fk_clifford_connected_forward()
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
    (a, c, b), by which the part of grade c of a product of grades a and b is multiplied; or (triples, features,
    features of the result), fully connected: there a matrix multiplies that part, row by row. gate: None; or "gelu": x
    is multiplied by (1 + erf(s / sqrt 2)) / 2, where s is its scalar, and y likewise. norm: whether each grade of the
    result is divided by the root of its mean square over the features.

    Shapes: x, y and the result are alike, but for its features, if w is fully connected. layout: "blades_first",
    (blades, ..., features); "blades_last", (..., features, blades). There may be any number of dimensions between.
    order: of the blades: "grade", "bits", "shortlex" or "null_first", as blades() explains. In the first three a
    blade's vectors ascend, so no sign changes; in the last e0 e1 is -(e1 e0), which counts.

    Types: torch.float32, torch.bfloat16 or torch.float16 for x, y and the result; for w the same, as in a model after
    .to(torch.bfloat16), or torch.float32, as under autocast. All is computed in fp32, and rounded once; but a fully
    connected w multiplies in TF32, or in the 16-bit type.

    What it costs: without w and norm all layouts and orders cost the same. Else "blades_first" and "grade" copy
    nothing, and the others copy x, y and the result once each, and so their gradients, by kernels of the library. A
    tensor that is not contiguous is copied by PyTorch. A fully connected w is the library's fused operator where the
    gate is "gelu", the result has as many features as x, and the signature is one of CONNECTED: in 16-bit types and in
    other layouts and orders between copies. Else the parts of the product are written to memory, and multiplied by
    product(), once for each grade of the result.

    Gradients: of x, y and w. There are no second derivatives.

    Raises a ValueError for shapes, types or options that are not these, and a RuntimeError where the cause is the GPU.
    Source: operators/clifford; lesson 10 explains the layer."""
    signature = tuple(map(operator.index, signature))
    vectors = _check(x, y, w, signature, gate, layout, order)
    if not _has_kernels(x):
        return _by_pytorch(x, y, w, signature, gate, norm, layout, order)
    if w is not None and w.dim() == 3:
        return _connected(x, y, w, signature, gate, norm, layout, order)
    is_last = layout == "blades_last"
    shape = (-1, x.shape[-2], 1 << vectors) if is_last else (1 << vectors, -1, x.shape[-1])
    left, right = (each.contiguous().reshape(shape) for each in (x, y))
    return torch.ops.fused_kernels.geometric_product(
        left, right, None if w is None else w.contiguous(), list(signature), gate is not None, bool(norm),
        LAYOUTS.index(layout), ORDERS.index(order)).reshape(x.shape)


def _has_kernels(x):
    return x.is_cuda and x.dtype != torch.float64


def _constant(values, dtype, device):
    """A tensor of these numbers, kept for the next call: to copy them to a GPU would end the capture of a graph."""
    return (torch.tensor if torch.compiler.is_compiling() else _kept)(values, dtype=dtype, device=device)


@functools.cache
def _kept(values, dtype, device):
    with torch.inference_mode(False):  # autograd may save it in a later call
        return torch.tensor(values, dtype=dtype, device=device)


def _at(layout):
    """Which dimension is that of the blades."""
    return 0 if layout == "blades_first" else -1


def _of_blades(values, x, layout):
    """A factor for each blade of x, as a tensor that multiplies it."""
    values = _constant(tuple(values), x.dtype, x.device)
    return values if layout == "blades_last" else values.reshape(-1, *[1] * (x.dim() - 1))


# ---- The product with a matrix for each triple, and all by PyTorch's operators ---------------------------------------


def _connected(x, y, w, signature, gate, norm, layout, order):
    """geometric_product() with w (triples, features, features of the result)."""
    (inputs, outputs), vectors = w.shape[1:], sum(signature)
    left, right = (to_planes(each, signature, layout, order) for each in (x, y))
    if signature in CONNECTED and gate is not None and inputs == outputs:
        operands = [each.float() for each in (left, right, w)]
        wanted = torch.is_grad_enabled() and any(each.requires_grad for each in operands)
        z = (binding.calls["clifford_connected_kept"](*operands, signature, bool(norm))[0] if wanted
             else binding.calls["clifford_connected"](*operands, signature, bool(norm)))
    else:
        z = torch.cat([_of_grade(grade, left, right, w.to(x.dtype), signature, gate) for grade in range(vectors + 1)])
        z = _normed(z, signature) if norm else z
    between = x.shape[1:-1] if layout == "blades_first" else x.shape[:-2]
    return from_planes(z.to(x.dtype), between, signature, layout, order)


def _of_grade(grade, x, y, w, signature, gate):
    """The blades of this grade of the product: one triple's part beside the other's, times the matrices of these
    triples below each other."""
    every, features, rows = triples(signature), x.shape[2], x.shape[1]
    places = [place for place, word in enumerate(blades(sum(signature))) if len(word) == grade]
    own = [t for t, (_, c, _) in enumerate(every) if c == grade]
    at_a_time, total = max(1, (8192 >> max(0, sum(signature) - 3)) // features), None  # features of a call
    for first in range(0, len(own), at_a_time):
        some = own[first:first + at_a_time]
        one = tuple(tuple(1.0 * (t == each) for each in range(len(every))) for t in some)
        kept = _constant(one, torch.float32, x.device).repeat_interleave(features, 0)
        wide = (each.unsqueeze(2).expand(-1, -1, len(some), -1).flatten(2) for each in (x, y))
        parts = geometric_product(*wide, kept, signature, gate)[places[0]:places[-1] + 1].flatten(0, 1)
        found = _product(parts, w[some[0]:some[-1] + 1] if some[-1] - some[0] + 1 == len(some) else w[some])
        total = found if total is None else total + found
    return total.unflatten(0, (len(places), rows))


def _product(a, b, math="tf32"):
    """a b, by product() where it reads them: there math says how fp32 is multiplied. b is one matrix, or several that
    are below each other or as many as those of a."""
    if b.dim() == 3 and a.dim() == 2:
        b = b.flatten(0, 1)
    if not _has_kernels(a):
        return a @ b
    apart = [a[0].numel(), b[0].numel(), a.shape[-2] * b.shape[-1]] if a.dim() == 3 else [0]
    if any(each * a.element_size() % 16 for each in apart):  # matrices of a batch that do not begin where they have to
        return a @ b
    a, b = binding.aligned(a.contiguous()), binding.aligned(b)
    return binding.calls["product"](a, b, math if a.dtype == torch.float32 else "fp32")


@functools.cache
def _own_order(signature, order):
    """(where the order has each blade of the library's, its sign there)."""
    words = blades(sum(signature), order, signature[2])
    places = {frozenset(word): place for place, word in enumerate(words)}
    there = tuple(places[frozenset(word)] for word in blades(sum(signature)))
    return there, tuple(_sign(words[place], range(sum(signature))) for place in there)


def to_planes(x, signature, layout, order):
    """(blades, rows, features) in the library's order."""
    x = x.movedim(_at(layout), 0)
    x = x.reshape(len(x), -1, x.shape[-1])
    there, signs = _own_order(signature, order)
    if there != tuple(range(len(x))):
        x = x.index_select(0, _constant(there, torch.int64, x.device))
    if -1.0 in signs:
        x = x * _of_blades(signs, x, "blades_first")
    return x.contiguous()


def from_planes(x, between, signature, layout, order):
    """The inverse of to_planes()."""
    there, signs = _own_order(signature, order)
    if -1.0 in signs:
        x = x * _of_blades(signs, x, "blades_first")
    if there != tuple(range(len(x))):
        back = tuple(there.index(place) for place in range(len(there)))
        x = x.index_select(0, _constant(back, torch.int64, x.device))
    x = x.reshape(len(x), *between, x.shape[-1]).movedim(0, _at(layout))
    return x.contiguous()


def _normed(z, signature, order="grade"):
    """Each grade of z (blades, ..., features) divided by the root of its mean square."""
    of = _constant(tuple(map(len, blades(sum(signature), order, signature[2]))), torch.int64, z.device)
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    squares = wide.square().mean(-1, keepdim=True)
    sums = torch.zeros_like(squares[:sum(signature) + 1]).index_add(0, of, squares)
    return wide * (sums + EPSILON).rsqrt().index_select(0, of)


@functools.cache
def _terms(signature, order):
    """(i, j, k, t, sign) of all pairs of blades whose product is not 0: blade i times blade j is sign times blade k,
    and has the weight t. Each is a tuple with a number for each pair."""
    words = blades(sum(signature), order, signature[2])
    places = {frozenset(word): place for place, word in enumerate(words)}
    whole, every = words[places[frozenset(range(sum(signature)))]], triples(signature)
    found = []
    for (i, a), (j, b) in itertools.product(enumerate(words), repeat=2):
        sign = _sign((*a, *b), whole) * _square({*a} & {*b}, signature)
        if sign:
            c = {*a} ^ {*b}
            found.append((i, j, places[frozenset(c)], every.index((len(a), len(c), len(b))), sign))
    return tuple(zip(*found))


def _by_pytorch(x, y, w, signature, gate, norm, layout, order):
    wide = torch.promote_types(x.dtype, torch.float32)
    left, right = (each.movedim(_at(layout), 0).to(wide) for each in (x, y))
    if gate is not None:
        left, right = (each * (1 + torch.erf(each[:1] * 0.5**0.5)) / 2 for each in (left, right))
    *numbers, sign = _terms(signature, order)
    i, j, k, t = (_constant(each, torch.int64, x.device) for each in numbers)
    terms = left[i] * right[j] * _of_blades(sign, left, "blades_first")
    if w is not None and w.dim() == 2:
        terms = terms * w.to(wide).T[t].reshape(len(t), *[1] * (terms.dim() - 2), -1)
    elif w is not None:
        terms = (terms.flatten(1, -2) @ w.to(wide)[t]).reshape(*terms.shape[:-1], -1)
    z = terms.new_zeros(len(left), *terms.shape[1:]).index_add(0, k, terms)
    return (_normed(z, signature, order) if norm else z).to(x.dtype).movedim(0, _at(layout))


# ---- What is made of it ----------------------------------------------------------------------------------------------


def grade_linear(x, weight, bias=None, signature=(3, 0, 0), layout="blades_first", order="grade", math="tf32x3"):
    """The features of x mixed by a matrix for each grade, to which turning and mirroring are nothing: blade k of the
    result is weight[grade of k] times that of x, and `bias` is added to the scalar. Shapes: weight (grades, outputs,
    inputs), bias (outputs) or None; x and the result as geometric_product() has them, with inputs and outputs as
    features. math: how fp32 is multiplied, as product() has it. Types: those of x, for all. Layouts other than
    "blades_first" are copied. One product() for all blades; where a matrix of the batch does not begin at a multiple of
    16 bytes it is PyTorch's."""
    own = x.movedim(_at(layout), 0)
    of = _constant(tuple(map(len, blades(sum(signature), order, signature[2]))), torch.int64, x.device)
    rows = own.reshape(len(own), -1, own.shape[-1]).contiguous()
    z = _product(rows, weight.mT.index_select(0, of), math)
    if bias is not None:
        z[0] += bias
    return z.reshape(*own.shape[:-1], -1).movedim(0, _at(layout))


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
    at, reversed_u = _at(layout), reverse(u, **options)
    norm = (u * reversed_u * _of_blades(_squares(tuple(signature), order), u, layout)).sum(at, keepdim=True)
    return geometric_product(geometric_product(u, x, **options), reversed_u, **options) / norm


def action_matrices(u, signature=(3, 0, 1), order="null_first"):
    """What u does as conjugation(u, x), as matrices: row l is what becomes of blade l. Shapes: u (..., blades), the
    result (..., blades, blades). So u that stay, such as parameters, cost two products for each blade once, and not two
    for each x; what is left is a product of matrices."""
    left = u.unsqueeze(-2).expand(*u.shape, u.shape[-1])
    every = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device).expand_as(left)
    return conjugation(left, every, signature, "blades_last", order)


def group_action(x, u, w, signature=(3, 0, 1), layout="blades_last", order="null_first", math="tf32x3"):
    """A layer of group actions: feature o of the result is the sum over the features i of x of w[o, i] u[o, i] x_i
    u[o, i]^-1, with conjugation()'s inverse. Shapes: u (outputs, inputs, blades), w (outputs, inputs) or, with a weight
    for each grade of x, (outputs, inputs, grades); x and the result as geometric_product() has them, with inputs and
    outputs as features. It is one product of x, as rows of (inputs * blades), and a matrix that action_matrices() makes
    of u in each call. math: as product(). Types: those of x, for all; the matrix is computed in fp32. Gradients: of x,
    u and w. Source: Ruhe et al., Geometric Clifford Algebra Networks, 2023."""
    outputs, inputs, count = u.shape
    wide = torch.promote_types(u.dtype, torch.float32)
    matrices = action_matrices(u.to(wide), signature, order)
    if w.dim() == 3:
        of = _constant(tuple(map(len, blades(sum(signature), order, signature[2]))), torch.int64, u.device)
        weights = w.index_select(2, of).unsqueeze(3)
    else:
        weights = w.reshape(outputs, inputs, 1, 1)
    whole = (matrices * weights).permute(1, 2, 0, 3).reshape(inputs * count, outputs * count).to(x.dtype)
    own = x if layout == "blades_last" else x.movedim(0, -1)
    z = _product(own.reshape(-1, inputs * count), whole, math).reshape(*own.shape[:-2], outputs, count)
    return z if layout == "blades_last" else z.movedim(-1, 0)


@functools.cache
def _squares(signature, order):
    """What a blade times itself is."""
    return tuple([(-1.0)**(len(word) * (len(word) - 1) // 2) * _square(word, signature)
                  for word in blades(sum(signature), order, signature[2])])


def _square(vectors, signature):
    """The product of the squares of these basis vectors."""
    squares, product = [1.0] * signature[0] + [-1.0] * signature[1] + [0.0] * signature[2], 1.0
    for vector in vectors:  # torch.compile does not trace math.prod()
        product *= squares[vector]
    return product


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
    changes its sign in a mirror, and with a reference that is mirrored, too, it does not (the equivariant join of
    Brehmer et al., Geometric Algebra Transformer, 2023). Shapes, types, layout, order and errors: as
    geometric_product()."""
    vectors, at = sum(signature), _at(layout)
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
    require(x.dtype in (*types, torch.float64), f"x is {x.dtype}; it has to be {' or '.join(map(str, types))}")
    require(y.dtype == x.dtype, f"y is {y.dtype}; it has to be {x.dtype}")
    require(x.shape == y.shape, f"y has the shape {tuple(y.shape)}; it has to be {tuple(x.shape)}")
    at = _at(layout)
    require(x.dim() >= 2 and x.shape[at] == 1 << vectors,
            f"x has the shape {tuple(x.shape)}; with the layout {layout!r} dimension {at} has to be {1 << vectors}")
    if w is not None:
        features, count = x.shape[-1 if at == 0 else -2], len(triples(signature))
        require(tuple(w.shape) == (features, count) or w.dim() == 3 and tuple(w.shape[:2]) == (count, features),
                f"w has the shape {tuple(w.shape)}; it has to be {(features, count)}, or {(count, features)} and the "
                "features of the result")
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
        d_out = binding.aligned(d_out)
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
