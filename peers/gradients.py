"""Lesson 8: spatial gradient features, forward and backward."""
import torch

from operators import Case, backward_call, by_mode, compiled, forward_peers, in_fp64


def eager(Gr, Gi, x, Lr, Li):
    xr, xi = Gr @ x, Gi @ x
    ar = xr @ Lr.T - xi @ Li.T
    ai = xi @ Lr.T + xr @ Li.T
    return (torch.tanh(xr * ar + xi * ai),)


def _features(Gr, Gi, x, Lr, Li):
    """x's gradient and its mix, as complex numbers in two tensors each, and u."""
    xr, xi = Gr @ x, Gi @ x
    ar, ai = xr @ Lr.T - xi @ Li.T, xi @ Lr.T + xr @ Li.T
    return xr, xi, ar, ai, xr * ar + xi * ai


def reference(*inputs):
    e = torch.exp(-2 * _features(*inputs)[-1])
    return [2 / (1 + e) - 1]


def reference_backward(d_out, Gr, Gi, x, Lr, Li):
    """dx, dLr and dLi, as written at the top of the lesson."""
    xr, xi, ar, ai, u = _features(Gr, Gi, x, Lr, Li)
    g = d_out / torch.cosh(u) ** 2
    P, Q, R, S = g * xr, g * xi, g * ar, g * ai
    d_x = Gr.T @ (R + P @ Lr + Q @ Li) + Gi.T @ (S - P @ Li + Q @ Lr)
    return [d_x, P.T @ xr + Q.T @ xi, Q.T @ xr - P.T @ xi]


def triton_forward():
    from gradients_triton import forward

    return forward


def case(problem, draw):
    V, E, W = (problem["dims"][name] for name in "VEW")
    tangent, weight = 3 / E**0.5, (0.75 / W) ** 0.5
    inputs = [draw(V, E, scale=tangent), draw(V, E, scale=tangent), draw(E, W)]
    inputs += [draw(W, W, scale=weight), draw(W, W, scale=weight)]
    if problem["name"] == "forward":
        if V > 1:  # |u| is in the hundreds at the last vertex, as in the lesson
            inputs[0][-1], inputs[1][-1] = 0, 0
            inputs[0][-1, 0] = 32
        peers = forward_peers(eager, inputs, {"Triton": triton_forward})
        return Case(reference(*in_fp64(*inputs)), peers)

    d_out = draw(V, W)

    def triton():
        from gradients_triton import backward

        return lambda: backward(d_out, *inputs)

    wanted, gradients = [2, 3, 4], [d_out]
    return Case(reference_backward(*in_fp64(d_out, *inputs)), {
        "PyTorch": lambda: backward_call(eager, inputs, wanted, gradients),
        **by_mode(lambda mode: backward_call(compiled(eager, mode), inputs, wanted, gradients)),
        "Triton": triton,
    })
