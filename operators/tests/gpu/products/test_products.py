"""product() of every shape and layout, on a GPU: `python3 -m pytest operators/tests/gpu/products -q`, as
test_pytorch.py."""

import os
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="the functions of tensors need PyTorch")
if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU", allow_module_level=True)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import cases
from cases import ANY_PRODUCTS, BF16, FP16, FP32, alike, fused_kernels, numbers

for_each_product = pytest.mark.parametrize("case", ANY_PRODUCTS, ids=str)


def with_gradients(case):
    """The operands as leaves, which lie as they did."""
    return [each.detach().requires_grad_() for each in case.operands()]


@for_each_product
def test_result(case):
    for seed in (0, 3):  # the second time by a plan that is there
        operands = case.operands(seed)
        case.check(operands, case.run(*operands))


@for_each_product
def test_gradients(case):
    operands = with_gradients(case)
    out = case.run(*operands)
    d = numbers(*out.shape, dtype=out.dtype, seed=11)
    found = torch.autograd.grad(out, operands, d)
    exact = [each.detach().double().requires_grad_() for each in operands]
    for one, other, operand in zip(found, torch.autograd.grad(case.formula(*exact), exact, d.double()), operands):
        assert one.dtype == operand.dtype
        alike(one, other, 4)
        if operand.dim() == 2 and out.dim() == 2:  # it lies as what it is the gradient of
            assert one.mT.is_contiguous() or one.is_contiguous()
            assert one.is_contiguous() or operand.stride(0) == 1


@for_each_product
def test_compiled(case):
    torch.compiler.reset()
    operands = with_gradients(case)
    out = torch.compile(case.run, fullgraph=True, backend="aot_eager")(*operands)
    case.check([each.detach() for each in operands], out.detach())
    d = numbers(*out.shape, dtype=out.dtype, seed=11)
    for one, other in zip(torch.autograd.grad(out, operands, d),
                          torch.autograd.grad(case.run(*operands), operands, d)):
        alike(one, other, 2)


def test_compiled_for_any_sizes():
    torch.compiler.reset()
    run = torch.compile(lambda a, b, bias: fused_kernels.product(a, b.mT, bias=bias), fullgraph=True, dynamic=True,
                        backend="aot_eager")
    for rows, cols, depth in ((24, 40, 16), (33, 9, 65), (70, 136, 8)):
        shapes = (rows, depth), (cols, depth), (cols,)
        a, b, bias = (numbers(*shape, dtype=FP16, seed=i) for i, shape in enumerate(shapes))
        alike(run(a, b, bias), a.double() @ b.double().mT + bias.double(), 2)


@pytest.mark.parametrize("needed", ["a", "b", "bias", "ab"])
def test_gradients_that_are_not_needed_are_not_computed(needed, monkeypatch):
    names = [each for each in ("a", "b", "bias") if each in (("a", "b") if needed == "ab" else (needed,))]
    operands = dict(zip(("a", "b", "bias"), (numbers(*shape, dtype=FP16) for shape in ((40, 24), (24, 16), (16,)))))
    for name in names:
        operands[name].requires_grad_()
    seen, launch = [], cases.binding._launch
    monkeypatch.setattr(cases.binding, "_launch", lambda plan, *at: (seen.append(at), launch(plan, *at)))
    fused_kernels.product(operands["a"], operands["b"], bias=operands["bias"]).sum().backward()
    assert [each is not None for each in seen[-1][3:]] == [each in names for each in operands]
    assert all((operands[name].grad is not None) == (name in names) for name in operands)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_autocast(dtype):
    a, b, bias = (numbers(*shape, dtype=FP32, seed=i) for i, shape in enumerate(((3, 40, 24), (16, 24), (16,))))
    with torch.autocast("cuda", dtype=dtype):
        out = fused_kernels.product(a, b.mT, bias=bias)
    assert out.dtype == dtype
    alike(out, a.double() @ b.double().mT + bias.double(), 2)


def test_second_derivatives():
    a, b, bias = (numbers(*shape, dtype=FP32, seed=i).double() for i, shape in enumerate(((5, 8), (8, 7), (7,))))
    operands = [each.float().requires_grad_() for each in (a, b, bias)]
    (d_a,) = torch.autograd.grad(fused_kernels.product(*operands[:2], bias=operands[2]).square().sum(), operands[0],
                                 create_graph=True)
    found = torch.autograd.grad(d_a.square().sum(), operands)
    exact = [each.requires_grad_() for each in (a, b, bias)]
    (d_a,) = torch.autograd.grad((a @ b + bias).square().sum(), a, create_graph=True)
    for one, other in zip(found, torch.autograd.grad(d_a.square().sum(), exact)):
        alike(one, other, 64)


def test_a_gradient_that_begins_anywhere():
    """That of a part of what torch.cat() has made: its memory begins in the middle of another's."""
    a, b, first = (numbers(*shape, dtype=FP16, seed=i) for i, shape in enumerate(((5, 8), (8, 3), (1,))))
    operands = [each.requires_grad_() for each in (a, b)]
    d = numbers(16, dtype=FP16, seed=5)
    torch.cat((first, fused_kernels.product(*operands).flatten())).backward(d)
    d_c = d[1:].double().reshape(5, 3)
    alike(a.grad, d_c @ b.detach().double().mT, 4)
    alike(b.grad, a.detach().double().mT @ d_c, 4)
    # A compiled program calls the operator, with what such a program has made.
    d_a, d_b, _ = torch.ops.fused_kernels.product_backward(d[1:].view(5, 3), a.detach(), b.detach())
    assert torch.equal(d_a, a.grad) and torch.equal(d_b, b.grad)


@pytest.mark.skipif("FUSED_KERNELS_CAPABILITY" in os.environ, reason="only of Hopper's kernels")
def test_hopper_reads_a_transposed_factor_as_it_lies():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this is no GPU of compute capability 9.0")
    a, b = (numbers(2048, 2048, dtype=FP16, seed=seed) for seed in (1, 2))
    for left, right in ((a.mT, b), (a, b.mT)):
        alike(fused_kernels.product(left, right), left.double() @ right.double(), 2)
        assert "as it lies" in fused_kernels.library().fk_last_way().decode()
