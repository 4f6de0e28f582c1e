"""The fully connected bonus of lesson 10: gates, products of multivectors with a matrix of weights for
each grade triple, norm per grade; forward, and with backward."""
import functools

import torch

from clifford import EPSILON, SIGNATURES, algebra_of, gate, product_of_blades
from operators import Case, compiled, forward_peers

REFERENCE_ROWS = 512  # of the batch, at a time


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
        normed = []
        for z in out:
            squares = (z * z).sum(0)
            normed.append(z * torch.rsqrt(squares.mean(dim=-1, keepdim=True) + EPSILON))
        return (torch.cat(normed),)

    return layer


def reference(x, y, w):
    """In fp64, with tables made another way: for each pair of blades a sign, a result, a triple."""
    p, q, r = SIGNATURES[x.shape[0]]
    squares = [1] * p + [-1] * q + [0] * r
    vectors = range(p + q + r)
    blades = [tuple(v for v in vectors if bits >> v & 1) for bits in range(1 << len(vectors))]
    blades.sort(key=len)  # stable: within a grade the order stays that of the bits
    products = {(a, b): product_of_blades(a, b, squares) for a in blades for b in blades}
    triples = sorted({(len(a), len(c), len(b)) for (a, b), (sign, c) in products.items() if sign})
    x, y = x * gate(x[0]), y * gate(y[0])
    planes = {}
    for (a, b), (sign, c) in products.items():
        if sign:
            at = triples.index((len(a), len(c), len(b))), blades.index(c)
            planes[at] = planes.get(at, 0) + sign * x[blades.index(a)] * y[blades.index(b)]
    z = [torch.zeros_like(x[0]) for _ in blades]
    for (t, k), plane in planes.items():
        z[k] = z[k] + plane @ w[t]
    z = torch.stack(z)
    norms = []
    for blade in blades:
        same = [k for k, other in enumerate(blades) if len(other) == len(blade)]
        norms.append((z[same] ** 2).sum(0).mean(dim=-1, keepdim=True))
    return z / torch.sqrt(torch.stack(norms) + EPSILON)


def reference_with_backward(x, y, w, d_out=None):
    """out, and with d_out also dx, dy, dw, by autograd in fp64, a part of the batch at a time. A
    row does not depend on others."""
    parts = []
    d_w = torch.zeros_like(w, dtype=torch.float64)
    for start in range(0, x.shape[1], REFERENCE_ROWS):
        rows = slice(start, start + REFERENCE_ROWS)
        leaves = [tensor.double().requires_grad_() for tensor in (x[:, rows], y[:, rows], w)]
        out = reference(*leaves)
        part = [out.detach()]
        if d_out is not None:
            d_x, d_y, d_w_part = torch.autograd.grad(out, leaves, d_out[:, rows].double())
            part += [d_x, d_y]
            d_w += d_w_part
        parts.append(part)
    joined = [torch.cat(tensors, dim=1) for tensors in zip(*parts)]
    return joined + ([d_w] if d_out is not None else [])


def case(problem, draw):
    shape = [problem["dims"][name] for name in ("blades", "batch", "features")]
    blades, features = shape[0], shape[2]
    x, y = draw(*shape, scale=3**0.5), draw(*shape, scale=3**0.5)
    w = draw(len(algebra_of(blades).triples), features, features)

    def kernels():
        import connected_triton

        return connected_triton.layer(algebra_of(blades))

    if problem["name"] == "forward":
        def triton_forward():
            layer = kernels()
            return lambda *inputs: layer.forward(*inputs)[:1]

        return Case(reference_with_backward(x, y, w),
                    forward_peers(eager(blades), [x, y, w], {"Triton": triton_forward}))

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

    return Case(reference_with_backward(x, y, w, d_out), {
        "PyTorch": lambda: by_autograd(eager(blades)),
        "torch.compile": lambda: by_autograd(compiled(eager(blades))),
        "Triton": triton,
    })
