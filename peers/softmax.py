"""Lesson 9: probs = softmax(x W), row by row, with the product in TF32 or in fp32."""
import torch

from operators import Case, forward_peers, in_fp64

MOST_FUSED = 1024  # columns of which one Triton program can hold a few rows


def eager(x, W):
    return (torch.softmax(x @ W, dim=-1),)


def reference(x, W):
    logits = x @ W
    exponentials = torch.exp(logits - logits.max(dim=-1, keepdim=True).values)
    return [exponentials / exponentials.sum(dim=-1, keepdim=True)]


def case(problem, draw):
    B, D, C = (problem["dims"][name] for name in "BDC")
    inputs = [draw(B, D), draw(D, C, scale=1.5 / D**0.5)]
    # tl.dot's precisions: tf32x3 is three products in TF32 for one in fp32.
    precisions = {"tf32": ""} if problem["dtype"] == "tf32" else {"ieee": "", "tf32x3": ", 3xTF32"}
    fused = C <= MOST_FUSED

    def load(precision):
        def triton():
            import softmax_triton

            return (softmax_triton.fused if fused else softmax_triton.unfused)(precision)

        return triton

    name = "Triton" if fused else "Triton matmul, softmax"
    kernels = {name + suffix: load(precision) for precision, suffix in precisions.items()}
    return Case(reference(*in_fp64(*inputs)), forward_peers(eager, inputs, kernels))
