"""Lesson 7: spatial diffusion, forward and backward."""
import torch

from operators import Case, backward_call, by_mode, compiled, forward_peers, in_fp64


def eager(x, basis, mass, evalues, times):
    damping = torch.exp(-evalues[:, None] * times[None, :])
    spectral = damping * (basis.T @ (mass[:, None] * x))
    return spectral, basis @ spectral


def reference(x, basis, mass, evalues, times):
    spectral = (basis * mass[:, None]).T @ x / torch.exp(torch.outer(evalues, times))
    return [spectral, basis @ spectral]


def reference_backward(d_spectral, d_out, spectral, basis, mass, evalues, times):
    """dTimes and dX, as written at the top of the lesson."""
    s = d_spectral + basis.T @ d_out
    d_times = -(evalues[:, None] * s * spectral).sum(0)
    return [d_times, mass[:, None] * (basis @ (s / torch.exp(torch.outer(evalues, times))))]


def triton_forward():
    from diffusion_triton import forward

    return forward


def case(problem, draw):
    V, E, W = (problem["dims"][name] for name in "VEW")
    x, basis, mass = draw(V, W), draw(V, E, scale=(3 / V) ** 0.5), draw(V, scale=0.9, center=1)
    evalues, times = draw(E, center=1), draw(W, scale=0.5, center=0.5)
    inputs = [x, basis, mass, evalues, times]
    expected = reference(*in_fp64(*inputs))
    if problem["name"] == "forward":
        return Case(expected, forward_peers(eager, inputs, {"Triton": triton_forward}))

    d_spectral, d_out = draw(E, W), draw(V, W)
    given = [d_spectral, d_out, expected[0].to(x.dtype), basis, mass, evalues, times]

    def triton():
        from diffusion_triton import backward

        return lambda: backward(*given)

    wanted, gradients = [4, 0], [d_spectral, d_out]
    return Case(reference_backward(*in_fp64(*given)), {
        "PyTorch": lambda: backward_call(eager, inputs, wanted, gradients),
        **by_mode(lambda mode: backward_call(compiled(eager, mode), inputs, wanted, gradients)),
        "Triton": triton,
    })
