"""Lesson 8's features in Triton, associated as in the lesson: ar = Gr M1 - Gi M2 and
ai = Gi M1 + Gr M2 with M1 = x Lr^T and M2 = x Li^T. So all that is as long as the mesh meets in one
kernel a pass, whose programs keep their columns of x, M1 and M2 and walk over the rows of Gr and
Gi. The small products around it are PyTorch's.
"""
import torch
import triton
import triton.language as tl

from tuning import config, persistent_grid, tuned


@triton.jit
def rows_of(G, v, e, V, E):
    return tl.load(G + v[:, None] * E + e[None, :], mask=(v[:, None] < V) & (e[None, :] < E),
                   other=0.0)


@triton.jit
def mixed(gr, gi, x, m1, m2, minus_m2):
    """xr, xi, ar, ai of some rows, in fp32."""
    xr = tl.dot(gr, x)
    xi = tl.dot(gi, x)
    ar = tl.dot(gi, minus_m2, tl.dot(gr, m1))
    ai = tl.dot(gr, m2, tl.dot(gi, m1))
    return xr, xi, ar, ai


@tuned([
    config(4, 2, BV=64, BN=64, PROGRAMS=264),
    config(8, 2, BV=128, BN=64, PROGRAMS=132),
    config(8, 3, BV=128, BN=64, PROGRAMS=132),
    config(8, 2, BV=64, BN=128, PROGRAMS=132),
    config(4, 3, BV=64, BN=32, PROGRAMS=264),
], key=["V", "E", "W"])
@triton.jit
def forward_kernel(Gr, Gi, x, M1, M2, out, V, E, W, BE: tl.constexpr, BV: tl.constexpr,
                   BN: tl.constexpr, PROGRAMS: tl.constexpr):
    e = tl.arange(0, BE)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    at = e[:, None] * W + n[None, :]
    inside = (e[:, None] < E) & (n[None, :] < W)
    x_tile = tl.load(x + at, mask=inside, other=0.0)
    m1 = tl.load(M1 + at, mask=inside, other=0.0)
    m2 = tl.load(M2 + at, mask=inside, other=0.0)
    minus_m2 = -m2
    for start in range(tl.program_id(0) * BV, V, BV * tl.num_programs(0)):
        v = start + tl.arange(0, BV)
        gr = rows_of(Gr, v, e, V, E)
        gi = rows_of(Gi, v, e, V, E)
        xr, xi, ar, ai = mixed(gr, gi, x_tile, m1, m2, minus_m2)
        u = xr * ar + xi * ai
        decay = tl.exp(-2 * tl.abs(u))
        size = (1 - decay) / (1 + decay)
        result = tl.where(u < 0, -size, size).to(out.dtype.element_ty)
        tl.store(out + v[:, None] * W + n[None, :], result,
                 mask=(v[:, None] < V) & (n[None, :] < W))


@tuned([
    config(4, 2, BV=64, BN=32, PROGRAMS=132),
    config(8, 2, BV=64, BN=32, PROGRAMS=132),
    config(8, 2, BV=64, BN=64, PROGRAMS=132),
    config(8, 1, BV=64, BN=64, PROGRAMS=132),
    config(8, 2, BV=32, BN=64, PROGRAMS=132),
], key=["V", "E", "W"], reset_to_zero=["sums"])
@triton.jit
def backward_kernel(Gr, Gi, x, M1, M2, d_out, sums, V, E, W, BE: tl.constexpr, BV: tl.constexpr,
                    BN: tl.constexpr, PROGRAMS: tl.constexpr):
    """sums (3, E, W) += the gradients of M1 and M2, and Gr^T R + Gi^T S; see the lesson's top."""
    e = tl.arange(0, BE)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    at = e[:, None] * W + n[None, :]
    inside = (e[:, None] < E) & (n[None, :] < W)
    x_tile = tl.load(x + at, mask=inside, other=0.0)
    m1 = tl.load(M1 + at, mask=inside, other=0.0)
    m2 = tl.load(M2 + at, mask=inside, other=0.0)
    minus_m2 = -m2
    d_M1 = tl.zeros((BE, BN), dtype=tl.float32)
    d_M2 = tl.zeros((BE, BN), dtype=tl.float32)
    direct = tl.zeros((BE, BN), dtype=tl.float32)
    for start in range(tl.program_id(0) * BV, V, BV * tl.num_programs(0)):
        v = start + tl.arange(0, BV)
        gr = rows_of(Gr, v, e, V, E)
        gi = rows_of(Gi, v, e, V, E)
        d = tl.load(d_out + v[:, None] * W + n[None, :],
                    mask=(v[:, None] < V) & (n[None, :] < W), other=0.0).to(tl.float32)
        xr, xi, ar, ai = mixed(gr, gi, x_tile, m1, m2, minus_m2)
        decay = tl.exp(-2 * tl.abs(xr * ar + xi * ai))
        g = d * 4 * decay / ((1 + decay) * (1 + decay))  # d_out (1 - tanh^2)
        p = (g * xr).to(Gr.dtype.element_ty)
        q = (g * xi).to(Gr.dtype.element_ty)
        r = (g * ar).to(Gr.dtype.element_ty)
        s = (g * ai).to(Gr.dtype.element_ty)
        gr_t = tl.trans(gr)
        gi_t = tl.trans(gi)
        d_M1 = tl.dot(gi_t, q, tl.dot(gr_t, p, d_M1))
        d_M2 = tl.dot(gi_t, -p, tl.dot(gr_t, q, d_M2))
        direct = tl.dot(gi_t, s, tl.dot(gr_t, r, direct))
    tl.atomic_add(sums + at, d_M1, mask=inside, sem="relaxed")
    tl.atomic_add(sums + E * W + at, d_M2, mask=inside, sem="relaxed")
    tl.atomic_add(sums + 2 * E * W + at, direct, mask=inside, sem="relaxed")


def forward(Gr, Gi, x, Lr, Li):
    (V, E), W = Gr.shape, x.shape[1]
    out = x.new_empty((V, W))
    grid = persistent_grid(V, W, "BN")
    forward_kernel[grid](Gr, Gi, x, x @ Lr.T, x @ Li.T, out, V, E, W,
                         BE=triton.next_power_of_2(E))
    return (out,)


def backward(d_out, Gr, Gi, x, Lr, Li):
    (V, E), W = Gr.shape, x.shape[1]
    sums = torch.zeros((3, E, W), device=x.device)
    grid = persistent_grid(V, W, "BN")
    backward_kernel[grid](Gr, Gi, x, x @ Lr.T, x @ Li.T, d_out, sums, V, E, W,
                          BE=triton.next_power_of_2(E))
    d_M1, d_M2, direct = sums.to(x.dtype)
    d_x = torch.addmm(torch.addmm(direct, d_M1, Lr), d_M2, Li)
    return d_x, d_M1.T @ x, d_M2.T @ x
