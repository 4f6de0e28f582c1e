"""The fully connected bonus of lesson 10: gates, products of multivectors with a matrix of weights for
each grade triple, norm per grade; forward, and with backward."""
import functools

import torch

from clifford import EPSILON, algebra_of, case_of, gate, normed, tables


@functools.lru_cache(maxsize=None)
def eager(blades):
    """The layer of an algebra with so many blades: a function of x, y (blades, batch, features) and
    w (triples, features, features). The planes of a triple are stacked: one product with its matrix."""
    algebra = algebra_of(blades)
    grades = [algebra.of_grade(grade) for grade in sorted(set(algebra.grades))]

    def planes_of(t, grade, xs, ys):
        sums = {}
        for i, j, k, triple, sign in algebra.terms:
            if triple == t:
                product = xs[i] * ys[j]
                sums[k] = sums[k] + sign * product if k in sums else sign * product
        return torch.stack([sums[k] for k in grades[grade]])

    def layer(x, y, w):
        xs, ys = (x * gate(x[0])).unbind(0), (y * gate(y[0])).unbind(0)
        out = [None] * len(grades)
        for t, (_, grade, _) in enumerate(algebra.triples):
            part = planes_of(t, grade, xs, ys) @ w[t]
            out[grade] = part if out[grade] is None else out[grade] + part
        for grade, z in enumerate(out):
            squares = (z * z).sum(0)
            out[grade] = z * torch.rsqrt(squares.mean(dim=-1, keepdim=True) + EPSILON)
        return (torch.cat(out),)

    return layer


def reference(x, y, w):
    """In fp64: for each pair of blades a sign, a result, a triple; planes, and their products."""
    blades, products, triples = tables(x.shape[0])
    x, y = x * gate(x[0]), y * gate(y[0])
    planes = {}
    for (a, b), (sign, c) in products.items():
        if sign:
            at = triples.index((len(a), len(c), len(b))), blades.index(c)
            planes[at] = planes.get(at, 0) + sign * x[blades.index(a)] * y[blades.index(b)]
    z = [torch.zeros_like(x[0]) for _ in blades]
    for (t, k), plane in planes.items():
        z[k] = z[k] + plane @ w[t]
    return normed(torch.stack(z), blades)


def case(problem, draw):
    return case_of(problem, draw, eager, reference, 512,
                   lambda features, triples: (triples, features, features), "connected_triton")
