"""Lesson 7's diffusion in two Triton kernels a pass: to the spectrum, and back to the vertices.

The sum over vertices is cut into slices, added up by atomics; what is elementwise happens in the
second kernel, where the spectrum is read.
"""
import torch
import triton
import triton.language as tl

from tuning import config, persistent_grid, tuned


@tuned([
    config(4, 3, BV=64, BW=64, SLICES=64),
    config(4, 4, BV=64, BW=64, SLICES=128),
    config(8, 3, BV=64, BW=128, SLICES=64),
    config(8, 4, BV=64, BW=128, SLICES=128),
    config(4, 3, BV=32, BW=64, SLICES=128),
], key=["V", "E", "W"], reset_to_zero=["sums"])
@triton.jit
def project_kernel(values, mass, basis, sums, V, E, W, HAS_MASS: tl.constexpr, BE: tl.constexpr,
                   BV: tl.constexpr, BW: tl.constexpr, SLICES: tl.constexpr):
    """sums (E, W) += basis^T (mass[:, None] * values), in fp32."""
    e = tl.arange(0, BE)
    w = tl.program_id(0) * BW + tl.arange(0, BW)
    acc = tl.zeros((BE, BW), dtype=tl.float32)
    for start in range(tl.program_id(1) * BV, V, BV * tl.num_programs(1)):
        v = start + tl.arange(0, BV)
        basis_tile = tl.load(basis + v[:, None] * E + e[None, :],
                             mask=(v[:, None] < V) & (e[None, :] < E), other=0.0)
        tile = tl.load(values + v[:, None] * W + w[None, :],
                       mask=(v[:, None] < V) & (w[None, :] < W), other=0.0)
        if HAS_MASS:
            weight = tl.load(mass + v, mask=v < V, other=0.0).to(tl.float32)
            tile = (tile.to(tl.float32) * weight[:, None]).to(values.dtype.element_ty)
        acc = tl.dot(tl.trans(basis_tile), tile, acc)
    tl.atomic_add(sums + e[:, None] * W + w[None, :], acc,
                  mask=(e[:, None] < E) & (w[None, :] < W), sem="relaxed")


@triton.jit
def damping(evalues, times, e, w, E, W):
    evalue = tl.load(evalues + e, mask=e < E, other=0.0).to(tl.float32)
    time = tl.load(times + w, mask=w < W, other=0.0).to(tl.float32)
    return tl.exp(-evalue[:, None] * time[None, :])


@triton.jit
def expand_rows(basis, spectrum, mass, out, w, V, E, W, HAS_MASS: tl.constexpr, BV: tl.constexpr,
                BE: tl.constexpr):
    """out = mass[:, None] * (basis spectrum): the program's share of the rows, its columns w."""
    e = tl.arange(0, BE)
    for start in range(tl.program_id(0) * BV, V, BV * tl.num_programs(0)):
        v = start + tl.arange(0, BV)
        tile = tl.load(basis + v[:, None] * E + e[None, :],
                       mask=(v[:, None] < V) & (e[None, :] < E), other=0.0)
        result = tl.dot(tile, spectrum)
        if HAS_MASS:
            weight = tl.load(mass + v, mask=v < V, other=0.0).to(tl.float32)
            result = result * weight[:, None]
        tl.store(out + v[:, None] * W + w[None, :], result.to(out.dtype.element_ty),
                 mask=(v[:, None] < V) & (w[None, :] < W))


EXPAND_CONFIGS = [
    config(4, 3, BV=64, BW=64, PROGRAMS=132),
    config(4, 3, BV=128, BW=64, PROGRAMS=132),
    config(8, 3, BV=128, BW=128, PROGRAMS=132),
    config(8, 2, BV=128, BW=256, PROGRAMS=132),
]


@tuned(EXPAND_CONFIGS, key=["V", "E", "W"])
@triton.jit
def expand_kernel(sums, basis, evalues, times, spectral, out, V, E, W, BE: tl.constexpr,
                  BV: tl.constexpr, BW: tl.constexpr, PROGRAMS: tl.constexpr):
    e = tl.arange(0, BE)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (e[:, None] < E) & (w[None, :] < W)
    at = e[:, None] * W + w[None, :]
    sum_tile = tl.load(sums + at, mask=inside, other=0.0)
    damped = (damping(evalues, times, e, w, E, W) * sum_tile).to(spectral.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(spectral + at, damped, mask=inside)
    expand_rows(basis, damped, basis, out, w, V, E, W, False, BV, BE)


@tuned(EXPAND_CONFIGS, key=["V", "E", "W"])
@triton.jit
def expand_backward_kernel(sums, d_spectral, spectral, basis, mass, evalues, times, d_times, d_x,
                           V, E, W, BE: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr,
                           PROGRAMS: tl.constexpr):
    e = tl.arange(0, BE)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (e[:, None] < E) & (w[None, :] < W)
    at = e[:, None] * W + w[None, :]
    s = tl.load(sums + at, mask=inside, other=0.0)
    s += tl.load(d_spectral + at, mask=inside, other=0.0).to(tl.float32)
    if tl.program_id(0) == 0:
        saved = tl.load(spectral + at, mask=inside, other=0.0).to(tl.float32)
        evalue = tl.load(evalues + e, mask=e < E, other=0.0).to(tl.float32)
        time_sums = tl.sum(evalue[:, None] * s * saved, axis=0)
        tl.store(d_times + w, (-time_sums).to(d_times.dtype.element_ty), mask=w < W)
    damped = (damping(evalues, times, e, w, E, W) * s).to(d_x.dtype.element_ty)
    expand_rows(basis, damped, mass, d_x, w, V, E, W, True, BV, BE)


def project(values, mass, basis):
    (V, W), E = values.shape, basis.shape[1]
    sums = torch.zeros((E, W), device=values.device)

    def grid(sizes):
        return (triton.cdiv(W, sizes["BW"]), min(sizes["SLICES"], triton.cdiv(V, sizes["BV"])))

    project_kernel[grid](values, basis if mass is None else mass, basis, sums, V, E, W,
                         HAS_MASS=mass is not None, BE=triton.next_power_of_2(E))
    return sums


def forward(x, basis, mass, evalues, times):
    (V, W), E = x.shape, basis.shape[1]
    sums = project(x, mass, basis)
    spectral, out = x.new_empty((E, W)), torch.empty_like(x)
    grid = persistent_grid(V, W, "BW")
    expand_kernel[grid](sums, basis, evalues, times, spectral, out, V, E, W,
                        BE=triton.next_power_of_2(E))
    return spectral, out


def backward(d_spectral, d_out, spectral, basis, mass, evalues, times):
    (V, W), E = d_out.shape, basis.shape[1]
    sums = project(d_out, None, basis)
    d_times, d_x = torch.empty_like(times), torch.empty_like(d_out)
    grid = persistent_grid(V, W, "BW")
    expand_backward_kernel[grid](sums, d_spectral, spectral, basis, mass, evalues, times, d_times,
                                 d_x, V, E, W, BE=triton.next_power_of_2(E))
    return d_times, d_x
