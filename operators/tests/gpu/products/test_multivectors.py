"""Fully connected products, linear layers of grades, group actions, and the modules of these, beside dense tables of
the products of blades in fp64. On a GPU, and by PyTorch's formulas on the CPU: `python3 -m pytest
operators/tests/gpu/products -q`.

How far may a result be off, relatively, in the Frobenius norm? Factors in TF32 are off by 2^-11 at most, in bf16 by
2^-9, and of three products in TF32 what is left out is 2^-18 of a term. Terms of both signs make sums smaller than
their terms, and bf16 rounds planes, products and sums: FACTOR is for these."""

import copy
import functools
import itertools
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="the layers need PyTorch")
ROOT = pathlib.Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "operators" / "python"))
import fused_kernels
from fused_kernels import geometric

if not fused_kernels.torch:
    pytest.skip("PyTorch is too old for fused_kernels", allow_module_level=True)
from fused_kernels import geometric_nn as nn

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
FACTOR = 8
TF32, TF32X3 = 2.0**-11, 2.0**-18
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
for_each_device = pytest.mark.parametrize("device", DEVICES)
LAYOUTS = [(layout, order) for layout in ("blades_first", "blades_last")
           for order in ("grade", "bits", "shortlex", "null_first")]


def random(*shape, seed=0, dtype=FP64, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(device, dtype)


def close(found, expected, bound):
    assert found.shape == expected.shape
    error = (found.double().cpu() - expected.double().cpu()).norm() / expected.double().norm()
    assert error <= bound, f"the relative error is {error}"  # a NaN is not


# ---- The algebra, made once more -----------------------------------------------------------------------------------


@functools.lru_cache(None)
def words_of(signature, order):
    """Blades as strings of letters, which are words: vectors are a, b, c, ..., but null ones come first."""
    count, null = sum(signature), signature[2] if order == "null_first" else 0
    letters = [chr(ord("a") + (v - (count - null)) % count) for v in range(count)]  # of vector v
    subsets = [[v for v in range(count) if bits >> v & 1] for bits in range(1 << count)]
    keys = {"bits": lambda vs: 0, "grade": len}
    words = sorted(subsets, key=keys.get(order, lambda vs: (len(vs), sorted(letters[v] for v in vs))))
    return letters, ["".join(sorted(letters[v] for v in vs)) for vs in words]


@functools.lru_cache(None)
def table_of(signature, order):
    """(table (i, j, k), the grades of blades): the coefficient of blade k in blade i times blade j."""
    letters, words = words_of(signature, order)
    squares = dict(zip(letters, [1] * signature[0] + [-1] * signature[1] + [0] * signature[2]))
    table = torch.zeros((len(words),) * 3, dtype=FP64)
    for (i, a), (j, b) in itertools.product(enumerate(words), repeat=2):
        word, sign = list(a + b), 1
        while True:  # letters that do not ascend are swapped, and pairs leave as their square
            at = next((n for n in range(len(word) - 1) if word[n] >= word[n + 1]), None)
            if at is None:
                break
            if word[at] == word[at + 1]:
                sign *= squares[word[at]]
                del word[at:at + 2]
            else:
                word[at], word[at + 1], sign = word[at + 1], word[at], -sign
        table[i, j, words.index("".join(word))] += sign
    return table, torch.tensor([len(word) for word in words])


def reference(x, y, w, signature, gate, norm, layout, order):
    """geometric_product() with a fully connected w, in fp64."""
    table, grades = table_of(signature, order)
    if layout == "blades_last":
        x, y = x.movedim(-1, 0), y.movedim(-1, 0)
    if gate:
        x, y = (each * torch.special.ndtr(each[:1]) for each in (x, y))
    triples = sorted({(int(grades[i]), int(grades[k]), int(grades[j])) for i, j, k in table.nonzero().tolist()})
    z = 0
    for t, (a, c, b) in enumerate(triples):
        kept = table * (grades == a).double()[:, None, None] * (grades == b).double()[:, None] * (grades == c).double()
        z = z + torch.einsum("i...f,j...f,ijk->k...f", x, y, kept) @ w[t]
    if norm:
        same = (grades[:, None] == grades).double()
        z = z / torch.sqrt(torch.einsum("kl,l...f->k...f", same, z**2).mean(-1, keepdim=True) + 1e-6)
    return z.movedim(0, -1) if layout == "blades_last" else z


def by_table(a, b, signature, order):
    """The product of multivectors, blades last."""
    return torch.einsum("...i,...j,ijk->...k", a, b, table_of(signature, order)[0])


def turn_of(signature, order, seed=5):
    """The matrix by which multivectors turn, and are mirrored, row by row, when vectors are by an orthogonal matrix:
    its minors."""
    letters, words = words_of(signature, order)
    matrix, _ = torch.linalg.qr(random(len(letters), len(letters), seed=seed))
    matrix[0] *= -torch.sign(torch.linalg.det(matrix))  # a mirror, too
    place = {letter: at for at, letter in enumerate(letters)}
    turn = torch.zeros(len(words), len(words), dtype=FP64)
    for (k, a), (l, b) in itertools.product(enumerate(words), repeat=2):
        if len(a) == len(b):
            rows, columns = ([place[letter] for letter in word] for word in (a, b))
            turn[k, l] = torch.linalg.det(matrix[rows][:, columns]) if a else 1
    return turn


def versors(*shape, signature, order, count=2, seed=3):
    """Products of so many vectors, blades last."""
    grades = table_of(signature, order)[1]
    found = [random(*shape, len(grades), seed=seed + n) * (grades == 1) for n in range(count)]
    return functools.reduce(lambda a, b: by_table(a, b, signature, order), found)


def operands(signature, layout, rows, features, dtype, device, seed=0):
    shape = (1 << sum(signature), *rows, features)
    found = random(*shape, seed=seed)
    return (found.movedim(0, -1).contiguous() if layout == "blades_last" else found).to(device, dtype)


# ---- The fully connected product -----------------------------------------------------------------------------------


def weights(signature, inputs, outputs, dtype, device, seed=9):
    count = len(geometric.triples(signature))
    return random(count, inputs, outputs, seed=seed, device=device, dtype=dtype) / (4 * inputs)**0.5


CONNECTED = [  # signature, features, features of the result, gate, norm
    ((3, 0, 0), 24, 24, "gelu", True), ((2, 0, 0), 40, 40, "gelu", False), ((3, 0, 0), 24, 24, None, True),
    ((3, 0, 0), 16, 40, "gelu", True), ((3, 0, 1), 8, 12, None, False), ((1, 1, 1), 5, 3, "gelu", True),
    ((4, 1, 0), 8, 8, None, True)]


def run(function, x, y, w, options, d):
    leaves = [each.detach().clone().requires_grad_() for each in (x, y, w)]
    out = function(*leaves, *options)
    return [out.detach(), *torch.autograd.grad(out, leaves, d.to(out))]


def check_connected(device, dtype, signature, inputs, outputs, gate, norm, layout, order, rows=(3, 7)):
    x, y = (operands(signature, layout, rows, inputs, dtype, device, seed) for seed in (1, 2))
    w = weights(signature, inputs, outputs, dtype, device)
    d = operands(signature, layout, rows, outputs, dtype, device, 4)
    options = signature, gate, norm, layout, order
    found = run(geometric.geometric_product, x, y, w, options, d)
    exact = run(reference, *(each.double().cpu() for each in (x, y, w)), options, d.cpu())
    assert all(each.dtype == dtype for each in found)
    bound = {FP64: 1e-12, FP32: 1e-5 if device == "cpu" else FACTOR * TF32, BF16: FACTOR * 2.0**-8}[dtype]
    for one, other in zip(found, exact):
        close(one, other, bound)


@for_each_device
@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("signature, inputs, outputs, gate, norm", CONNECTED)
def test_connected(device, dtype, signature, inputs, outputs, gate, norm):
    check_connected(device, dtype, signature, inputs, outputs, gate, norm, "blades_first", "grade")


@for_each_device
@pytest.mark.parametrize("layout, order", LAYOUTS)
def test_connected_in_each_layout(device, layout, order):
    for signature, gate in (((3, 0, 0), "gelu"), ((3, 0, 1), None), ((2, 1, 1), "gelu")):
        check_connected(device, FP32, signature, 8, 8, gate, True, layout, order)


@for_each_device
def test_many_features_take_several_products(device):
    """A grade of (3, 0, 1) has up to 9 triples, and a call has at most 4096 features of 16 blades."""
    check_connected(device, FP32, (3, 0, 1), 700, 16, None, False, "blades_first", "grade", (5,))


# ---- The linear layer ----------------------------------------------------------------------------------------------


@for_each_device
@pytest.mark.parametrize("layout, order", LAYOUTS)
@pytest.mark.parametrize("signature, inputs, outputs", [((3, 0, 1), 16, 24), ((2, 0, 0), 3, 1), ((5, 0, 0), 8, 8)])
def test_linear(device, layout, order, signature, inputs, outputs):
    grades = table_of(signature, order)[1]
    for dtype, math, bound in (
            (FP32, "tf32x3", FACTOR * TF32X3), (FP32, "tf32", FACTOR * TF32), (BF16, "fp32", 2.0**-7)):
        x = operands(signature, layout, (2, 9), inputs, dtype, device)
        weight, bias = (random(*shape, seed=8, dtype=dtype, device=device)
                        for shape in ((sum(signature) + 1, outputs, inputs), (outputs,)))
        d = operands(signature, layout, (2, 9), outputs, dtype, device, 4)

        def by_hand(x, weight, bias):
            planes = x.movedim(-1, 0) if layout == "blades_last" else x
            z = torch.einsum("k...i,koi->k...o", planes, weight[grades])
            z = z + bias * (torch.arange(len(z)) == 0).double().reshape(-1, *[1] * (z.dim() - 1))
            return z.movedim(0, -1) if layout == "blades_last" else z

        found = run(geometric.grade_linear, x, weight, bias, (signature, layout, order, math), d)
        exact = run(by_hand, *(each.double().cpu() for each in (x, weight, bias)), (), d.cpu())
        for one, other in zip(found, exact):
            assert one.dtype == dtype
            close(one, other, bound)


# ---- Group actions -------------------------------------------------------------------------------------------------


def action_by_hand(x, u, w, signature, order):
    """Blades last: for each pair of features two products, by the tables."""
    grades = table_of(signature, order)[1]
    signs = (-1.0)**(grades * (grades - 1) // 2)
    reversed_u = u * signs
    norm = by_table(u, reversed_u, signature, order)[..., :1]
    weighted = (w[..., grades] if w.dim() == 3 else w[..., None]) * x.unsqueeze(-3)
    return by_table(by_table(u, weighted, signature, order), reversed_u / norm, signature, order).sum(-2)


@for_each_device
@pytest.mark.parametrize("signature, order", [((3, 0, 1), "null_first"), ((3, 0, 0), "shortlex"), ((1, 3, 0), "bits")])
@pytest.mark.parametrize("graded", [False, True])
def test_group_action(device, signature, order, graded):
    outputs, inputs = 3, 4
    # Vectors that do not square to something near 0: else the inverse is large, and all errors with it.
    u = versors(outputs, inputs, signature=signature, order=order)
    u = u + 8 * (torch.arange(u.shape[-1]) == 0)
    w = random(outputs, inputs, *([sum(signature) + 1] if graded else []), seed=6)
    for layout in ("blades_last", "blades_first"):
        for dtype, bound in ((FP64, 1e-11), (FP32, FACTOR * TF32X3)):
            x = operands(signature, layout, (2, 5), inputs, dtype, device)
            d = operands(signature, layout, (2, 5), outputs, dtype, device, 4)

            def by_hand(x, u, w):
                result = action_by_hand(x.movedim(0, -1) if layout == "blades_first" else x, u, w, signature, order)
                return result.movedim(-1, 0) if layout == "blades_first" else result

            own = [each.to(device, dtype) for each in (u, w)]
            found = run(geometric.group_action, x, *own, (signature, layout, order), d)
            exact = run(by_hand, *(each.double().cpu() for each in (x, *own)), (), d.cpu())
            for one, other in zip(found, exact):
                assert one.dtype == dtype
                close(one, other, bound)


@for_each_device
def test_the_layer_of_the_lessons_page(device):
    page = (ROOT / "docs" / "lessons" / "10_clifford_gp.md").read_text()
    code = page.split("## A new expression is ten lines")[1].split("```python\n")[1].split("```")[0]
    found = {}
    exec(code, found)
    x, w = random(7, 4, 8, device=device), random(3, 4, seed=6, device=device)
    u = versors(3, 4, signature=(3, 0, 0), order="grade").to(device)
    close(found["group_action"](x, u, w), geometric.group_action(x, u, w, (3, 0, 0), order="grade"), 1e-12)
    lines = code.split("):")[1].split("\n", 1)[1].strip().splitlines()
    assert len(lines) <= 10


@for_each_device
@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_action_keeps_products(device, count):
    """(u x u^-1)(u y u^-1) = u (x y) u^-1, also of a vector, which mirrors, and grades stay."""
    options = dict(signature=(3, 0, 1), layout="blades_last", order="null_first")
    u = versors(5, signature=(3, 0, 1), order="null_first", count=count).to(device)
    matrices = geometric.action_matrices(u)
    x, y = (random(5, 1, 16, seed=seed, device=device) for seed in (1, 2))
    close(geometric.geometric_product(x @ matrices, y @ matrices, **options),
          geometric.geometric_product(x, y, **options) @ matrices, 1e-9)
    grades = table_of((3, 0, 1), "null_first")[1]
    assert matrices.cpu()[:, grades[:, None] != grades].abs().max() < 1e-9 * matrices.abs().max()


# ---- Modules -------------------------------------------------------------------------------------------------------


def drawn(module, device, dtype=FP64):
    with torch.no_grad():
        for at, each in enumerate(module.parameters()):
            each.add_(0.1 * random(*each.shape, seed=at, dtype=each.dtype))
    return module.to(device, dtype)


@for_each_device
@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("signature", [(2, 0, 0), (3, 0, 0), (4, 0, 0)])
@pytest.mark.parametrize("layout, order", [("blades_first", "grade"), ("blades_last", "shortlex")])
def test_a_layer_turns_with_its_input(device, connected, signature, layout, order):
    torch.manual_seed(1)
    turn = turn_of(signature, order).to(device)

    def turned(x):
        return x @ turn.to(x) if layout == "blades_last" else torch.einsum("kbf,kl->lbf", x, turn.to(x))

    for dtype, bound in ((FP64, 1e-12), (FP32, FACTOR * TF32)):
        layer = drawn(nn.CliffordLayer(16, signature, connected, layout=layout, order=order), device, dtype)
        x = operands(signature, layout, (9,), 16, dtype, device)
        close(layer(turned(x)), turned(layer(x)), bound)
        assert (layer(turned(x)) - layer(x)).norm() > 0.1 * layer(x).norm()


@for_each_device
@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("layout, order", LAYOUTS)
def test_a_layer_is_its_parts(device, connected, layout, order):
    torch.manual_seed(1)
    layer = drawn(nn.CliffordLayer(8, (3, 0, 1), connected, layout=layout, order=order), device)
    assert sorted(layer.state_dict()) == ["linear.bias", "linear.weight", "w"]
    x = operands((3, 0, 1), layout, (2, 5), 8, FP64, device)
    options = dict(signature=(3, 0, 1), layout=layout, order=order)
    y = geometric.grade_linear(x, layer.linear.weight, layer.linear.bias, **options)
    close(layer(x), geometric.geometric_product(x, y, layer.w, gate="gelu", norm=True, **options), 1e-12)


@for_each_device
def test_an_action_starts_invertible_and_is_what_the_function_is(device):
    torch.manual_seed(1)
    layer = nn.GroupAction(4, 6).to(device, FP64)
    assert sorted(layer.state_dict()) == ["action", "weight"] and layer.action.shape == (6, 4, 8)
    x = random(3, 4, 16, device=device)
    words = words_of((3, 0, 1), "null_first")[1]
    u = torch.zeros(6, 4, 16, dtype=FP64)
    u[..., [k for k, word in enumerate(words) if len(word) % 2 == 0]] = layer.action.detach().cpu()
    close(layer(x), action_by_hand(x.cpu(), u, layer.weight.detach().cpu(), (3, 0, 1), "null_first"), 1e-11)


@for_each_device
@pytest.mark.parametrize("make", [lambda: nn.CliffordLayer(3, (2, 0, 0)), lambda: nn.CliffordLayer(2, (1, 1, 1), True),
                                  lambda: nn.GroupAction(2, 3, (2, 0, 1)),
                                  lambda: nn.MultivectorLinear(2, 3, (3, 0, 0), layout="blades_last")])
def test_gradients_are_finite_differences(device, make):
    torch.manual_seed(1)
    layer = drawn(make(), device)
    options = getattr(layer, "options", None) or dict(signature=layer.signature, layout=layer.layout)
    features = {"GroupAction": 2, "MultivectorLinear": 2}.get(type(layer).__name__) or layer.linear.weight.shape[1]
    x = operands(options["signature"], options["layout"], (2,), features, FP64, device).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]

    def of(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values)), (x,))

    assert torch.autograd.gradcheck(of, (x, *layer.parameters()))


@pytest.mark.skipif("cuda" not in DEVICES, reason="the operators are a GPU's")
@pytest.mark.parametrize("bias, norm, features", [(True, True, 16), (False, True, 13), (True, False, 72)])
@pytest.mark.parametrize("signature", [(2, 0, 0), (1, 3, 0)])
def test_a_layer_in_one_call(signature, bias, norm, features):
    """And its gradients, beside the same layer in fp64. There may be dimensions between blades and features."""
    torch.manual_seed(1)
    layer = drawn(nn.CliffordLayer(features, signature, bias=bias, norm=norm, math="tf32"), "cuda", FP32)
    exact = copy.deepcopy(layer).double()
    x = operands(signature, "blades_first", (3, 50), features, FP32, "cuda").requires_grad_()
    wide = x.detach().double().requires_grad_()
    assert layer.is_one_call(x) and not exact.is_one_call(wide) and not layer.is_one_call(x.bfloat16())
    out, expected = layer(x), exact(wide)
    d = random(*out.shape, seed=5, device="cuda")
    close(out, expected, FACTOR * TF32)
    for one, other in zip(torch.autograd.grad(out, (x, *layer.parameters()), d.float()),
                          torch.autograd.grad(expected, (wide, *exact.parameters()), d), strict=True):
        close(one, other, FACTOR * TF32)
    with torch.no_grad():
        assert torch.equal(layer(x), out)


@pytest.mark.skipif("cuda" not in DEVICES, reason="the operators are a GPU's")
@pytest.mark.parametrize("connected, math", [(False, "tf32x3"), (True, "tf32x3"), (False, "tf32")])
def test_compiled(connected, math):
    torch.compiler.reset()
    torch.manual_seed(1)
    layer = drawn(nn.CliffordLayer(16, connected=connected, math=math), "cuda", FP32)
    action = drawn(nn.GroupAction(4, 4), "cuda", FP32)
    x = operands((3, 0, 0), "blades_first", (40,), 16, FP32, "cuda")
    points = random(9, 4, 16, dtype=FP32, device="cuda")
    for module, given in ((layer, x), (action, points)):
        close(torch.compile(module, fullgraph=True, backend="aot_eager")(given), module(given), 2.0**-20)


@for_each_device
def test_a_gradient_that_begins_anywhere(device):
    """That of a part of what torch.cat() has made: its memory begins in the middle of another's."""
    x, y, first, d = (random(*shape, seed=i, dtype=FP32, device=device)
                      for i, shape in enumerate(((5, 3, 2), (5, 3, 2), (1,), (31,))))
    options = dict(signature=(1, 0, 0), layout="blades_last")
    leaves = [each.requires_grad_() for each in (x, y)]
    torch.cat((first, geometric.geometric_product(*leaves, **options).flatten())).backward(d)
    exact = [each.detach().double().requires_grad_() for each in leaves]
    geometric.geometric_product(*exact, **options).flatten().backward(d[1:].double())
    for one, other in zip(leaves, exact):
        close(one.grad, other.grad, 2.0**-20)


@for_each_device
def test_inference_before_training(device):
    """What the first call keeps is for gradients, too."""
    geometric._kept.cache_clear()
    layer, x = nn.MultivectorLinear(3, 4).to(device), random(8, 5, 3, dtype=FP32, device=device)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.weight.grad is not None


@for_each_device
def test_what_is_wrong_is_refused(device):
    x = torch.zeros(8, 2, 4, device=device)
    for w in (torch.zeros(20, 5, 4), torch.zeros(19, 4, 4), torch.zeros(2, 20)):
        with pytest.raises(ValueError, match=r"w has the shape .* or \(20, 4\) and the features of the result"):
            geometric.geometric_product(x, x, w.to(x))
