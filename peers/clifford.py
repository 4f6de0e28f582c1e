"""Lesson 10: gates, weighted geometric product, norm per grade; forward, and with backward."""
import functools
import importlib

import torch

from operators import Case, by_mode, compiled, forward_peers

SIGNATURES = {4: (2, 0, 0), 8: (3, 0, 0)}  # of the lesson's recorded runs, by blades
EPSILON = 1e-6


class Algebra:
    """blades: the basis vectors of each, as bits; grades: how many; terms: (i, j, k, triple, sign)
    with e_i e_j = sign e_k. Blades are ordered by grade, then bits; grade triples by those of e_i,
    e_k, e_j."""

    def __init__(self, p, q, r):
        self.blades = sorted(range(1 << (p + q + r)), key=lambda bits: (bin(bits).count("1"), bits))
        self.grades = [bin(bits).count("1") for bits in self.blades]
        squares = [1] * p + [-1] * q + [0] * r

        def sign_of(a, b):
            swaps = sum(bin(a >> shift & b).count("1") for shift in range(1, p + q + r))
            sign = -1 if swaps % 2 else 1
            for vector, square in enumerate(squares):
                sign *= square if a & b & 1 << vector else 1
            return sign

        signs = {(i, j): sign_of(a, b)
                 for i, a in enumerate(self.blades) for j, b in enumerate(self.blades)}
        found = [(i, j, self.blades.index(self.blades[i] ^ self.blades[j]), sign)
                 for (i, j), sign in signs.items() if sign]
        triple_of = {}
        for i, j, k, _ in found:
            triple_of[self.grades[i], self.grades[k], self.grades[j]] = None
        self.triples = sorted(triple_of)
        self.terms = [(i, j, k, self.triples.index(
            (self.grades[i], self.grades[k], self.grades[j])), sign) for i, j, k, sign in found]

    def of_grade(self, grade):
        return [k for k, each in enumerate(self.grades) if each == grade]


@functools.lru_cache(maxsize=None)
def algebra_of(blades):
    return Algebra(*SIGNATURES[blades])


def gate(s):
    return 0.5 * (1 + torch.erf(s * 0.5**0.5))


@functools.lru_cache(maxsize=None)
def eager(blades):
    """The layer of an algebra with so many blades: a function of x, y (blades, batch, features) and
    w (features, triples)."""
    algebra = algebra_of(blades)
    grades = [algebra.of_grade(grade) for grade in sorted(set(algebra.grades))]

    def layer(x, y, w):
        xs, ys = (x * gate(x[0])).unbind(0), (y * gate(y[0])).unbind(0)
        weights = w.unbind(1)
        weighted, z = {}, {}
        for i, j, k, triple, sign in algebra.terms:
            if (i, triple) not in weighted:
                weighted[i, triple] = weights[triple] * xs[i]
            if k in z:
                z[k] = torch.addcmul(z[k], weighted[i, triple], ys[j], value=sign)
            else:
                z[k] = sign * weighted[i, triple] * ys[j]
        out = dict(z)
        for of_grade in grades:
            squares = sum(z[k] * z[k] for k in of_grade)
            scale = torch.rsqrt(squares.mean(dim=-1, keepdim=True) + EPSILON)
            out.update({k: z[k] * scale for k in of_grade})
        return (torch.stack([out[k] for k in range(blades)]),)

    return layer


def product_of_blades(a, b, squares):
    """Sign and basis vectors of the product of two tuples of basis vectors, by sorting them."""
    vectors, sign = list(a + b), 1
    for end in range(len(vectors) - 1, 0, -1):
        for i in range(end):
            if vectors[i] > vectors[i + 1]:
                vectors[i], vectors[i + 1] = vectors[i + 1], vectors[i]
                sign = -sign
    for vector in sorted(set(a) & set(b)):
        sign *= squares[vector]
        vectors = [each for each in vectors if each != vector]
    return sign, tuple(vectors)


def tables(count):
    """Of the algebra with so many blades, made another way: the blades as tuples of basis vectors, sign
    and blade of each pair's product, and the grade triples."""
    p, q, r = SIGNATURES[count]
    squares = [1] * p + [-1] * q + [0] * r
    vectors = range(p + q + r)
    blades = [tuple(v for v in vectors if bits >> v & 1) for bits in range(1 << len(vectors))]
    blades.sort(key=len)  # stable: within a grade the order stays that of the bits
    products = {(a, b): product_of_blades(a, b, squares) for a in blades for b in blades}
    triples = sorted({(len(a), len(c), len(b)) for (a, b), (sign, c) in products.items() if sign})
    return blades, products, triples


def normed(z, blades):
    norms = []
    for blade in blades:
        same = [k for k, other in enumerate(blades) if len(other) == len(blade)]
        norms.append((z[same] ** 2).sum(0).mean(dim=-1, keepdim=True))
    return z / torch.sqrt(torch.stack(norms) + EPSILON)


def reference(x, y, w):
    """In fp64: for each pair of blades a sign, a result, a triple."""
    blades, products, triples = tables(x.shape[0])
    x, y = x * gate(x[0]), y * gate(y[0])
    z = [torch.zeros_like(x[0]) for _ in blades]
    for (a, b), (sign, c) in products.items():
        if sign:
            weight = w[:, triples.index((len(a), len(c), len(b)))]
            k = blades.index(c)
            z[k] = z[k] + sign * weight * x[blades.index(a)] * y[blades.index(b)]
    return normed(torch.stack(z), blades)


def reference_with_backward(of, at_a_time, x, y, w, d_out=None):
    """out of reference `of`, and with d_out also dx, dy, dw, by autograd in fp64, `at_a_time` rows of
    the batch at a time. A row does not depend on others."""
    parts = []
    d_w = torch.zeros_like(w, dtype=torch.float64)
    for start in range(0, x.shape[1], at_a_time):
        rows = slice(start, start + at_a_time)
        leaves = [tensor.double().requires_grad_() for tensor in (x[:, rows], y[:, rows], w)]
        out = of(*leaves)
        part = [out.detach()]
        if d_out is not None:
            d_x, d_y, d_w_part = torch.autograd.grad(out, leaves, d_out[:, rows].double())
            part += [d_x, d_y]
            d_w += d_w_part
        parts.append(part)
    joined = [torch.cat(tensors, dim=1) for tensors in zip(*parts)]
    return joined + ([d_w] if d_out is not None else [])


def case_of(problem, draw, eager, reference, at_a_time, shape_of_w, kernels_of):
    """A case of a layer of multivectors, whose w has the shape_of_w(features, triples). `kernels_of`
    names the module with its kernels in Triton."""
    shape = [problem["dims"][name] for name in ("blades", "batch", "features")]
    blades, features = shape[0], shape[2]
    x, y = draw(*shape, scale=3**0.5), draw(*shape, scale=3**0.5)
    w = draw(*shape_of_w(features, len(algebra_of(blades).triples)))
    expected = functools.partial(reference_with_backward, reference, at_a_time, x, y, w)

    def kernels():
        return importlib.import_module(kernels_of).layer(algebra_of(blades))

    if problem["name"] == "forward":
        def triton_forward():
            layer = kernels()
            return lambda *inputs: layer.forward(*inputs)[:1]

        return Case(expected(), forward_peers(eager(blades), [x, y, w], {"Triton": triton_forward}))

    d_out = draw(*shape)

    def by_autograd(function):
        leaves = [tensor.detach().requires_grad_() for tensor in (x, y, w)]

        def call():
            (out,) = function(*leaves)
            return (out.detach(), *torch.autograd.grad(out, leaves, d_out))

        return call

    def triton():
        layer = kernels()

        def call():
            out, inverse_rms = layer.forward(x, y, w)
            return (out, *layer.backward(x, y, w, out, inverse_rms, d_out))

        return call

    return Case(expected(d_out), {
        "PyTorch": lambda: by_autograd(eager(blades)),
        **by_mode(lambda mode: by_autograd(compiled(eager(blades), mode))),
        "Triton": triton,
    })


def case(problem, draw):
    # Autograd keeps every term of a part of the batch in fp64.
    return case_of(problem, draw, eager, reference, 1024, lambda features, triples: (features, triples),
                   "clifford_triton")
