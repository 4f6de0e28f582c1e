"""Microseconds that a call from Python takes on the host: `python3 operators/tests/gpu/overhead.py`, where FUSED_KERNELS_LIBRARY
names the library. Of each function:

  call        the function of tensors, without gradients
  library     fk_..._forward() alone, by ctypes, with addresses, workspace and stream that are there already
  binding     the difference: shapes looked up, results and workspace allocated, the stream asked for
  with grad   the function where an operand requires a gradient, forward
  binding     the same difference
  Function    of that, what a torch.autograd.Function takes that only keeps its operands and allocates a result
  PyTorch     what PyTorch has instead, and the same with a gradient

Operands are small. The GPU is empty at the start of each sample, which has fewer launches than its queue holds, so no
call waits for it. With --check the exit code is 1 if the binding takes more than 6 us, or 10 us with gradients."""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

import cases
from cases import FP16, FP32, binding, fused_kernels

CALLS, SAMPLES = 100, 60
MOST, MOST_WITH_GRADIENTS = 6.0, 10.0  # us


def microseconds(*functions):
    """The median time of a call of each; they take turns."""
    times = [[] for _ in functions]
    for sample in range(SAMPLES + 3):  # the first ones warm up
        for function, own in zip(functions, times):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            own.append((time.perf_counter() - start) / CALLS * 1e6)
    return [statistics.median(own[3:]) for own in times]


def library_call(case, operands):
    """The last call of the library that case.run makes, to be made again."""
    made, launch = [], binding._launch

    def record(plan, *addresses):
        made.append((plan, addresses))
        launch(plan, *addresses)

    binding._launch = record
    results = case.run(*operands)
    binding._launch = launch
    plan, addresses = made[-1]
    workspace = torch.empty(max(plan.bytes, 1), dtype=torch.uint8, device="cuda")
    arguments = plan.at, *addresses, workspace.data_ptr(), plan.bytes, torch.cuda.current_stream().cuda_stream
    function = plan.function

    def call(keep=(results, workspace)):
        function(*arguments)

    return call


class OnlyKeeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *operands):
        ctx.save_for_backward(*operands)
        return binding._empty((8,), (1,), torch.float16)


def gated_by_pytorch(x, w1, w2, b1, b2):
    return torch.sigmoid(torch.addmm(b1, x, w1)) * torch.addmm(b2, x, w2)


def diffusion_by_pytorch(x, basis, mass, evalues, times):
    spectral = torch.exp(-evalues[:, None] * times) * (basis.mT @ (mass[:, None] * x))
    return basis @ spectral, spectral


def heads_first(q, k, v):
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def rows():
    """(name, case, what PyTorch has instead)."""
    attention = cases.attention(1, 64, 64, 2, 2, 64, FP16)
    attention.run = fused_kernels.attention
    return [
        ("product, fp16", cases.product(64, 64, 64, FP16), torch.matmul),
        ("product, fp32", cases.product(64, 64, 64, FP32), torch.matmul),
        ("gating", cases.gating(64, 64, 64), gated_by_pytorch),
        ("gating beside one linear", cases.gating(64, 64, 64), lambda x, w1, w2, b1, b2: F.linear(x, w1, b1)),
        ("attention", attention, heads_first),
        ("diffusion", cases.diffusion(256, 64, 64), diffusion_by_pytorch),
        ("diffusion_backward", cases.diffusion_backward(256, 64, 64), None),
        ("softmax", cases.softmax(64, 64, 64), lambda x, w: torch.softmax(x @ w, 1)),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where the binding takes too long")
    parser.add_argument("--json", help="write a record to this file")
    options = parser.parse_args()
    columns = "call", "library", "binding", "with grad", "binding", "Function", "PyTorch", "with grad"
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; us a call, median of {SAMPLES}")
    print(f"{'':26}" + "".join(f"{name:>11}" for name in columns))
    slow, problems = [], []
    for name, case, instead in rows():
        operands = [each.detach() for each in case.operands()]
        functions = [lambda: case.run(*operands), library_call(case, operands)]
        if instead:
            functions.append(lambda: instead(*operands))
        found = microseconds(*functions)
        values = {"call": found[0], "library": found[1], "binding": found[0] - found[1],
                  "PyTorch": found[2] if instead else None, "with grad": None, "its": None, "of it": None,
                  "Function": None}
        if case.wants_gradients:
            for at in case.wants_gradients:
                operands[at].requires_grad_()
            with_gradient = microseconds(lambda: case.run(*operands), lambda: instead(*operands),
                                         lambda: OnlyKeeps.apply(*operands))
            values |= {"with grad": with_gradient[0], "its": with_gradient[0] - found[1], "of it": with_gradient[1],
                       "Function": with_gradient[2]}
        shown = (values[key]
                 for key in ("call", "library", "binding", "with grad", "its", "Function", "PyTorch", "of it"))
        print(f"{name:26}" + "".join(f"{value:11.2f}" if value is not None else f"{'':11}" for value in shown))
        rows_of_record = {"call": "call", "library": "library", "with gradient": "with grad", "PyTorch": "PyTorch",
                          "PyTorch with gradient": "of it", "Function": "Function"}
        problems.append({"name": name, "kernels": [
            {"name": row, "ms": {"median": values[key] / 1e3}} for row, key in rows_of_record.items()
            if values[key]]})
        if values["binding"] > MOST or (values["its"] or 0) > MOST_WITH_GRADIENTS:
            slow.append(name)
    if options.json:
        cases.write_record(options.json, problems)
    if options.check and slow:
        raise SystemExit(f"the binding takes more than {MOST:g} us, or {MOST_WITH_GRADIENTS:g} us with gradients: "
                         f"{', '.join(slow)}")


if __name__ == "__main__":
    main()
