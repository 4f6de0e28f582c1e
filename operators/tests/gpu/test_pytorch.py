"""operators/python/fused_kernels on a GPU: `scons test-gpu`, or `python3 -m pytest operators/tests/gpu -q` where
FUSED_KERNELS_LIBRARY names the library."""

import concurrent.futures
import faulthandler
import functools
import inspect
import os
import pathlib
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch", reason="the functions of tensors need PyTorch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("PyTorch sees no GPU of compute capability 9.0", allow_module_level=True)
BUILT = pathlib.Path(__file__).resolve().parents[3] / "build" / "cuda" / "libfused_kernels.so"
if "FUSED_KERNELS_LIBRARY" not in os.environ and not BUILT.exists():
    pytest.skip("the library has not been built by nvcc: scons library arch=90a", allow_module_level=True)

import alone
import cases
from cases import (BF16, CASES, EACH, FP16, FP32, alike, binding, check_diffusion_backward, differentiable,
                   diffusion_in_fp64, fused_kernels, numbers, tensors)

OPERATORS = fused_kernels._table.OPERATORS
SECONDS = 90  # of a test, before the process is ended
GUARD = 128  # elements before and after each result, and the workspace
DIFFERENTIABLE = [case for case in EACH if case.wants_gradients]


@pytest.fixture(autouse=True)
def watchdog(request):
    """A kernel that never ends would let the test wait forever: then the process ends, and says where it was."""
    def stop():
        if capture := request.config.pluginmanager.getplugin("capturemanager"):
            capture.suspend_global_capture()
        os.write(2, f"\n{request.node.nodeid} took more than {SECONDS} seconds\n".encode())
        faulthandler.dump_traceback(2)
        os._exit(1)

    timer = threading.Timer(SECONDS, stop)
    timer.start()
    try:
        yield
        torch.cuda.synchronize()  # its failures are this test's
    finally:
        timer.cancel()


@pytest.fixture
def guarded(monkeypatch):
    """What is allocated, results and workspace, is NaN and lies between guards. Called, it checks these."""
    allocated, real = [], binding._empty

    def empty(shape, strides, dtype):
        count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
        whole = real((count + 2 * GUARD * (2 if dtype == torch.uint8 else 1),), (1,), dtype)
        guard = (whole.numel() - count) // 2
        whole.fill_(0xff if dtype == torch.uint8 else torch.nan)
        allocated.append((whole, guard))
        return whole.as_strided(shape, strides, guard)

    def check():
        assert allocated
        for whole, guard in allocated:
            for each in (whole[:guard], whole[-guard:]):
                assert bool((each == 0xff if whole.dtype == torch.uint8 else each.isnan()).all())

    monkeypatch.setattr(binding, "_empty", empty)
    monkeypatch.setattr(binding, "_KEPT_BYTES", -1)  # each call allocates its workspace
    return check


def operator_of(case):
    return getattr(torch.ops.fused_kernels, case.name.split("-")[0]).default


def with_gradients(case, seed=1):
    """(operands, those of them whose gradients there are)."""
    operands = [each.detach() for each in case.operands(seed)]
    return operands, [operands[at].requires_grad_() for at in case.wants_gradients]


# ---- Results ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result(case, guarded):
    operands = case.operands()
    before = [each.clone() for each in operands]
    for _ in range(2):
        result = case.run(*operands)
        torch.cuda.synchronize()
        case.check(operands, result)
        guarded()
        assert all(torch.equal(one, other) for one, other in zip(operands, before))
        assert not any(each.requires_grad for each in tensors(result))


@pytest.mark.parametrize("sizes", [(40, 40, 1), (257, 132, 640), (257, 333, 129), (1000, 300, 5000)], ids=str)
@pytest.mark.parametrize("math", ["fp32", "tf32", "tf32x3"])
def test_errors_of_products_of_fp32(math, sizes):
    """Of any numbers, as the docstring has them; and TF32 is not taken for fp32."""
    rows, cols, depth = sizes
    torch.manual_seed(depth)
    a, b = torch.randn(rows, depth, device="cuda"), torch.randn(depth, cols, device="cuda")
    error = {"fp32": depth * 2.0**-24, "tf32": 2.0**-10 + depth * 2.0**-25, "tf32x3": 2.0**-18 + depth * 2.0**-29}[math]
    c, expected = fused_kernels.product(a, b, math=math), a.double() @ b.double()
    cases.near("c", c, expected, error * (a.abs().double() @ b.abs().double()))
    assert ((c - expected).norm() > 2.0**-14 * expected.norm()) == (math == "tf32")


def test_result_of_attention_lies_as_the_query_does():
    q = numbers(2, 3, 5, 8, dtype=FP16).transpose(1, 2)
    assert fused_kernels.attention(q, q, q).stride() == q.stride()
    assert fused_kernels.attention(q.contiguous(), q, q).is_contiguous()


def test_scale_and_causal_of_attention():
    """Calls that differ in these alone are not taken for one another."""
    q, k, v = (numbers(2, 40, 3, 16, dtype=FP16, seed=seed) for seed in (1, 2, 3))
    usual = fused_kernels.attention(q, k, v)
    for _ in range(2):
        alike(fused_kernels.attention(q, k, v, scale=0.5), fused_kernels.attention(2 * q, k, v), 2)
        alike(fused_kernels.attention(q, k, v, scale=0.25), usual, 2)
        causal = fused_kernels.attention(q, k, v, causal=True)
        alike(causal[:, 0], v[:, 0], 1)  # it sees one key
        alike(causal[:, -1], usual[:, -1], 2)


@pytest.mark.parametrize("order", fused_kernels.geometric.ORDERS)
def test_a_product_that_everybody_knows(order):
    """e1 e2 = e12 and e2 e1 = -e12, in the algebra of spacetime; with any number of dimensions between."""
    places = fused_kernels.geometric.blades(4, order)  # of an algebra without null vectors
    e1, e2, e12 = (torch.nn.functional.one_hot(torch.tensor(places.index(blade), device="cuda"), 16).to(BF16)
                   for blade in ((0,), (1,), (0, 1)))
    x, y, xy = (each.expand(2, 3, 5, 16) for each in (e1, e2, e12))
    for one, other, expected in ((x, y, xy), (y, x, -xy)):
        result = fused_kernels.geometric_product(one, other, signature=(1, 3, 0), layout="blades_last", order=order)
        assert torch.equal(result, expected) and result.is_contiguous()


def test_a_product_is_compiled():
    case = cases.geometric(65, 72, (3, 0, 1), BF16, FP32, "gelu", True, "blades_last", "bits")
    operands = case.operands()
    case.check(operands, torch.compile(case.run, fullgraph=True)(*operands))


@pytest.mark.parametrize("case", EACH, ids=str)
def test_tuning(case):
    """The call that tries, and calls after it."""
    operands = case.operands()
    with fused_kernels.tuning():
        case.check(operands, case.run(*operands))
        way = fused_kernels.library().fk_last_way()
    case.check(operands, case.run(*operands))
    assert fused_kernels.library().fk_last_way() == way


@pytest.mark.parametrize("three", cases.IN_TURN, ids=lambda three: three[0].name)
def test_shapes_in_turn(three):
    """As A, B, A, C, B, A, in one thread, and then in four, each of which begins with another shape: what one of them
    sets for a kernel shall not be in the way of another. Each thread plans anew."""
    def run(turn):
        operands = [case.operands() for case in three]
        for at in (0, 1, 0, 2, 1, 0):
            at = (at + turn) % 3
            three[at].check(operands[at], three[at].run(*operands[at]))

    for threads in (1, 4):
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, range(threads)))


@pytest.mark.parametrize("dtype, large", [(FP16, 30000.0), (BF16, 133120.0)], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 64), (20, 400, 2, 1, 64), (300, 700, 2, 2, 128), (2, 3000, 8, 1, 64),
                                   (70, 300, 2, 2, 200), (9, 200, 2, 2, 7)], ids=str)
def test_large_logits_of_attention(sizes, dtype, large):
    """The first third of the keys has the largest logits, which are all equal: the result is the mean of its values."""
    queries, keys, heads, kv_heads, width = sizes
    q = torch.full((2, queries, heads, width), large, device="cuda", dtype=dtype)
    first = max(1, keys // 3)
    k = torch.full((2, keys, kv_heads, width), large, device="cuda", dtype=dtype)
    k[:, first:] /= 2
    k[:, 2 * first:] = numbers(2, max(0, keys - 2 * first), kv_heads, width, dtype=dtype)
    v = numbers(2, keys, kv_heads, width, dtype=dtype, seed=3)
    out, log_sums = fused_kernels.attention(q, k, v, log_sums=True)
    expected = v[:, :first].double().mean(1, keepdim=True).repeat_interleave(heads // kv_heads, 2).expand(q.shape)
    sizes_of = v[:, :first].double().abs().mean(1, keepdim=True).repeat_interleave(heads // kv_heads, 2).expand(q.shape)
    cases.near("out", out, expected, (2.02 * cases.ROUNDING[dtype] + 2.0**-16) * sizes_of + 2.0**-25)
    logit = large * large * width**0.5
    assert bool(((log_sums.double() - logit).abs() <= 2.0**-20 * logit).all())


@pytest.mark.parametrize("large", [1e4, 1e8])
@pytest.mark.parametrize("sizes", [(1, 3), (40, 300), (9, 5000)], ids=str)
def test_large_logits_of_a_cross_entropy(sizes, large):
    """All logits are equal: fp32 has few digits left for the loss in the logarithm of the sum, or none."""
    rows, classes = sizes
    x = torch.full((rows, 1), large, device="cuda", requires_grad=True)
    w = torch.ones((1, classes), device="cuda", requires_grad=True)
    labels = torch.full((rows,), 1, device="cuda")
    losses = fused_kernels.cross_entropy(x, w, labels)
    cases.near("losses", losses.detach(), torch.full((rows,), classes, device="cuda").double().log(), 2.0**-18)
    losses.sum().backward()
    expected = (1 / classes - torch.nn.functional.one_hot(labels, classes).double()).sum(0) * large
    cases.near("d_w", w.grad[0], expected, 2.0**-18 * rows * large)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("sizes", [(3, 40), (40, 300), (9, 9000)], ids=str)
def test_logits_beyond_the_range_of_fp16(sizes, dtype):
    """They are multiples of 2^15 up to 9 * 2^15, and -inf, and one row has only -inf."""
    rows, classes = sizes
    x = torch.full((rows, 2), 512.0, device="cuda", dtype=dtype)
    by_class = torch.arange(classes, device="cuda")
    w = torch.stack([64.0 * (1 + by_class % 9), torch.where(by_class % 3 == 1, -torch.inf, 0.0)]).to(dtype)
    x[1, 0] = -torch.inf
    probs = fused_kernels.softmax(x, w)
    expected = torch.softmax(x.double() @ w.double(), 1)
    assert bool(probs[1].isnan().all()) and bool(expected[1].isnan().all())
    others = torch.arange(rows, device="cuda") != 1
    cases.near("probs", probs[others], expected[others], 1.01 * cases.ROUNDING[dtype] * expected[others] + 2.0**-25)
    labels = torch.arange(rows, device="cuda") % classes
    losses, logits, _ = torch.ops.fused_kernels.cross_entropy(x, w, labels)
    assert torch.equal(logits[others].double(), x[others].double() @ w.double())
    of_labels = torch.nn.functional.cross_entropy(x.double() @ w.double(), labels, reduction="none")
    assert bool(losses[1].isnan())
    cases.near("losses", losses[others], of_labels[others], 2.0**-20 * (1 + of_labels[others].abs()))


def test_numbers_that_are_tensors():
    """Their values are read in each call: a plan is not found by which object it was."""
    q, k, v = (numbers(2, 40, 3, 16, dtype=FP16, seed=seed) for seed in (1, 2, 3))
    scale, causal = torch.tensor(0.25, device="cuda"), torch.tensor(False, device="cuda")
    for factor, masked in ((0.25, False), (0.5, False), (0.5, True)):
        scale.fill_(factor)
        causal.fill_(masked)
        expected = fused_kernels.attention(q, k, v, masked, factor)
        assert torch.equal(fused_kernels.attention(q, k, v, causal, scale), expected)
    operands = cases.clifford(5, 13).operands()
    normed = torch.tensor(True)
    for value in (True, False):
        normed.fill_(value)
        expected = fused_kernels.clifford(*operands, normed=value)
        assert torch.equal(fused_kernels.clifford(*operands, normed=normed), expected)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_forward_mode_is_refused(case):
    """By forward_ad and by torch.func.jvp: the tangent would vanish. Without one nothing changes."""
    from torch.autograd import forward_ad

    operands = case.operands()
    at = next(i for i, each in enumerate(operands) if each.is_floating_point())
    with forward_ad.dual_level():
        case.check(operands, case.run(*operands))
        dual = forward_ad.make_dual(operands[at], torch.ones_like(operands[at]))
        with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
            case.run(*operands[:at], dual, *operands[at + 1:])
    with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda one: case.run(*operands[:at], one, *operands[at + 1:]), (operands[at],),
                       (torch.ones_like(operands[at]),))


def test_two_threads_in_one_stream():
    """Calls with small workspaces, which each thread keeps."""
    case = cases.product(65, 9, 7, FP16)
    operands = case.operands()
    stream, failed = torch.cuda.current_stream(), []

    def run():
        try:
            with torch.cuda.stream(stream):
                for result in [case.run(*operands) for _ in range(200)]:
                    case.check(operands, result)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def row_of(case):
    return OPERATORS[case.name.split("-")[0]]


def is_converted(case):
    """Whether torch.autocast changes its operands."""
    row = row_of(case)
    numbers = case.more[-len(row.numbers):] or [default for _, default in row.numbers.values()]
    return bool(row.autocast) and row.autocast(*numbers)


@pytest.mark.parametrize("case", [case for case in EACH if not is_converted(case)], ids=str)
def test_autocast_changes_nothing(case):
    """Of most functions; and of a product whose `math` is one of fp32."""
    operands = case.operands()
    with torch.autocast("cuda", dtype=FP16 if operands[0].dtype == BF16 else BF16):
        case.check(operands, case.run(*operands))
        case.check(operands, operator_of(case)(*operands, *case.more))


AUTOCAST = {"product": cases.product(65, 40, 24, FP16), "gating": cases.gating(65, 40, 24),
            "attention": cases.attention(2, 50, 70, 4, 2, 40, FP16)}


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name, dtype):
    """fp32 becomes autocast's type, in the function, the operator and a compiled program, and gradients are fp32's."""
    case, function = AUTOCAST[name], getattr(fused_kernels, name)
    single = [each.float().requires_grad_() for each in case.operands()]
    converted = [each.detach().to(dtype).requires_grad_() for each in single]
    expected = function(*converted)
    d = numbers(*expected.shape, dtype=dtype, seed=11)
    gradients = torch.autograd.grad(expected, converted, d)
    torch.compiler.reset()
    for run in (function, lambda *each: tensors(getattr(torch.ops.fused_kernels, name)(*each))[0],
                torch.compile(function, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cuda", dtype=dtype):
            out = run(*single)
            again = run(*(each.detach() for each in converted))
            with torch.autocast("cuda", enabled=False):
                as_ever = run(*(each.detach() for each in converted))
        assert out.dtype == dtype and all(torch.equal(each, expected) for each in (out, again, as_ever))
        for one, other in zip(torch.autograd.grad(out, single, d), gradients):
            assert one.dtype == FP32
            alike(one.to(dtype), other, 2)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_another_device(case):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    operands = [each.to("cuda:1") for each in case.operands()]
    result = [each.to("cuda:0") for each in tensors(case.run(*operands))]
    assert torch.cuda.current_device() == 0
    case.check(case.operands(), tuple(result) if len(result) > 1 else result[0])


@pytest.mark.parametrize("name", alone.TESTS)
def test_in_a_process_of_its_own(name):
    command = [sys.executable, str(pathlib.Path(alone.__file__)), name]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS - 15)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_package_tests_itself():
    folder = pathlib.Path(fused_kernels.__file__).resolve().parents[1]
    result = subprocess.run([sys.executable, "-m", "fused_kernels"], cwd=folder, capture_output=True, text=True,
                            timeout=SECONDS - 15)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "compute capability 9.0\n" in result.stdout and "0 wrong, 0 not" in result.stdout


# ---- Gradients ----------------------------------------------------------------------------------------------------


def in_fp64(function, operands, wanted, d):
    """The gradients of a function of fp64 tensors, as autograd finds them."""
    doubles = [each.detach().double() for each in operands]
    at = [doubles[i].requires_grad_() for i, each in enumerate(operands) if any(each is one for one in wanted)]
    return torch.autograd.grad(function(*doubles), at, [each.double() for each in d])


@pytest.mark.parametrize("sizes", [((), 70, 24, 16), ((), 1, 8, 8), ((3,), 201, 136, 72), ((), 5001, 128, 256)],
                         ids=str)
def test_gradients_of_the_diffusion(sizes, guarded):
    meshes, vertices, eigen, width = sizes
    operands, wanted = with_gradients(cases.diffusion(vertices, eigen, width, meshes))
    out, spectral = fused_kernels.diffusion(*operands)
    d = [numbers(*each.shape, dtype=BF16, seed=seed) for seed, each in enumerate((out, spectral), 11)]
    found = torch.autograd.grad((out, spectral), wanted, d)
    guarded()
    expected = in_fp64(diffusion_in_fp64, operands, wanted, d)
    # The bounds are of formulas in fp64, which autograd confirms.
    _, exact = diffusion_in_fp64(*(each.detach().double() for each in operands))
    check_diffusion_backward((*d, *(each.detach() for each in operands[1:]), exact), found, rounds_spectral=True)
    formulas = cases.gradient_sizes(*(each.detach().double() for each in (*d, *operands[1:], exact)))[:2]
    for one, other in zip(formulas, expected):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("uses", [0, 1], ids=["out", "spectral"])
def test_gradients_of_one_result_of_the_diffusion(uses):
    operands, wanted = with_gradients(cases.diffusion(70, 24, 16))
    results = fused_kernels.diffusion(*operands)
    results[uses].sum().backward()  # its gradient is one number, expanded
    d = [torch.full_like(each, i == uses).detach() for i, each in enumerate(results)]
    _, exact = diffusion_in_fp64(*(each.detach().double() for each in operands))
    check_diffusion_backward((*d, *(each.detach() for each in operands[1:]), exact),
                             [each.grad for each in wanted], rounds_spectral=True)


@pytest.mark.parametrize("sizes", [(70, 24, 16), (1, 8, 8), (201, 136, 72), (5001, 128, 256)], ids=str)
def test_gradients_of_the_gradient_features(sizes, guarded):
    operands, wanted = with_gradients(cases.gradient_features(*sizes))
    out = fused_kernels.gradient_features(*operands)
    d = numbers(*out.shape, dtype=BF16, seed=11)
    found = torch.autograd.grad(out, wanted, d)
    guarded()
    cases.check_features_backward((d, *(each.detach() for each in operands)), found)
    # The check has formulas of its own. Autograd finds the same gradients, to some roundings to bf16.
    for one, other in zip(found, in_fp64(cases.features_in_fp64, operands, wanted, [d])):
        alike(one, other, 16)


@pytest.mark.parametrize("case", [case for case in DIFFERENTIABLE
                                  if not case.name.startswith(("attention", "diffusion", "gradient_features"))],
                         ids=str)
def test_gradients_by_pytorch(case):
    """Some roundings to the type: of products, of what is multiplied next, and of PyTorch's partial sums."""
    operands, wanted = with_gradients(case)
    result = case.run(*operands)
    d = numbers(*result.shape, dtype=result.dtype, seed=11)
    found = torch.autograd.grad(result, wanted, d)
    function = case.formula or {
        "product": torch.matmul, "softmax": lambda x, w: torch.softmax(x @ w, 1),
        "cross_entropy": cases.cross_entropy_in_fp64,
        **dict.fromkeys(("clifford", "clifford_connected", "clifford_connected_kept"),
                        lambda *each: cases.clifford_in_fp64(*each, (3, 0, 0), True)),
        "clifford_layer": cases.layer_in_fp64}[case.name.split("-")[0]]
    for one, other, operand in zip(found, in_fp64(function, operands, wanted, [d]), wanted):
        assert one.dtype == operand.dtype
        in_tf32 = case.name.startswith(("clifford_connected", "clifford_layer")) or case.name.endswith("-tf32")
        rounded = 2.0**16 if in_tf32 else 2048
        alike(one, other, rounded if one.dtype == FP32 else 8)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
def test_one_gradient_alone(case):
    operands, wanted = with_gradients(case)
    result = differentiable(case.run(*operands))
    d = [torch.ones_like(each) for each in result]
    all_found = torch.autograd.grad(result, wanted, d)
    for at, expected in zip(case.wants_gradients, all_found):
        operands, _ = with_gradients(case)
        for i, each in enumerate(operands):
            each.requires_grad_(i == at)
        (found,) = torch.autograd.grad(differentiable(case.run(*operands)), operands[at], d)
        alike(found, expected, 2)


@pytest.mark.parametrize("layout", ["rows first", "heads first", "packed"])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("sizes", [(2, 77, 77, 3, 3, 64, True), (1, 300, 300, 2, 2, 128, False),
                                   (2, 50, 200, 4, 2, 40, True), (1, 200, 90, 6, 1, 72, True),
                                   (1, 300, 300, 2, 2, 256, True), (2, 77, 150, 4, 2, 200, False)], ids=str)
def test_gradients_of_attention(sizes, dtype, layout, guarded):
    """Those of its formulas, in fp64, from what forward has returned; and those that autograd finds."""
    *sizes, causal = sizes
    if layout == "packed" and (sizes[1] != sizes[2] or sizes[3] != sizes[4]):
        pytest.skip("there are as many keys as queries in one projection")
    case = cases.attention(*sizes, dtype, causal, layout)
    operands, wanted = with_gradients(case)
    out, log_sums = fused_kernels.attention(*operands, causal, log_sums=True)
    assert out.requires_grad and not log_sums.requires_grad
    d = torch.empty_like(out).copy_(numbers(*out.shape, dtype=dtype, seed=11))
    found = torch.autograd.grad(out, wanted, d, retain_graph=True)
    guarded()
    cases.attention_backward(*sizes, dtype, causal, layout).check((d, *operands, out, log_sums), found)
    for each, operand in zip(found, operands):
        assert each.stride() == torch.empty_like(operand).stride()
    for one, other in zip(found, in_fp64(lambda *each: cases.attention_in_fp64(*each, causal)[0], operands, wanted,
                                         [d])):
        alike(one, other, 16)
    # A gradient that lies otherwise, and one that is a single number.
    for other in (d.transpose(1, 2).contiguous().transpose(1, 2), d.contiguous()):
        for one, same in zip(torch.autograd.grad(out, wanted, other, retain_graph=True), found):
            alike(one, same, 2)
    ones = torch.autograd.grad(out, wanted, torch.ones_like(out), retain_graph=True)
    for one, same in zip(torch.autograd.grad(out.sum(), wanted), ones):
        alike(one, same, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_what_attention_is_compared_with_passes_gradcheck(causal):
    """Finite differences in fp64: of autograd's gradients, and of the formulas that cases.py compares with. With a mask
    one query sees no key."""
    shapes = (2, 5, 4, 3), (2, 4, 2, 3), (2, 4, 2, 3)
    generator = torch.Generator(device="cuda").manual_seed(1)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64, device="cuda").requires_grad_()
               for shape in shapes)
    assert torch.autograd.gradcheck(lambda *each: cases.attention_in_fp64(*each, causal)[0], (q, k, v))
    out, log_sums = cases.attention_in_fp64(q, k, v, causal)
    d = torch.randn(out.shape, generator=generator, dtype=torch.float64, device="cuda")
    formulas = cases.attention_gradient_sizes(d, q, k, v, out, log_sums, causal)
    for found, (expected, _) in zip(torch.autograd.grad(out, (q, k, v), d), formulas, strict=True):
        torch.testing.assert_close(found, expected)


def test_gradients_of_attention_by_name():
    """The operator without log_sums, and as torch.compile sees a call that does not ask for them."""
    operands, wanted = with_gradients(cases.attention(2, 50, 200, 4, 2, 40, BF16))
    d = numbers(2, 50, 4, 40, dtype=BF16, seed=11)
    expected = torch.autograd.grad(fused_kernels.attention(*operands), wanted, d)
    torch.compiler.reset()
    compiled = torch.compile(fused_kernels.attention, fullgraph=True, backend="aot_eager")
    for run in (lambda *each: torch.ops.fused_kernels.attention(*each)[0], compiled):
        for one, other in zip(torch.autograd.grad(run(*operands), wanted, d), expected):
            alike(one, other, 2)


def test_parameters_of_a_module():
    """They are of a class of their own, and calls with them are as direct as others."""
    class Gated(torch.nn.Module):
        def __init__(self, inputs, hidden):
            super().__init__()
            _, *own = cases.gating(1, inputs, hidden).operands()
            self.own = torch.nn.ParameterList(own)

        def forward(self, x):
            return fused_kernels.gating(x, *self.own)

    layer, x = Gated(24, 40), numbers(70, 24, dtype=FP16)
    out = layer(x)
    assert out.grad_fn.name().startswith("fused_kernels_gating")
    cases.check_gating((x, *(each.detach() for each in layer.own)), out.detach())
    out.sum().backward()
    assert all(each.grad.shape == each.shape and bool(each.grad.isfinite().all()) for each in layer.own)


def test_second_derivatives():
    a, b = (numbers(8, 8, dtype=FP32, seed=seed).requires_grad_() for seed in (1, 2))
    (d_a,) = torch.autograd.grad(fused_kernels.product(a, b).sum(), a, create_graph=True)
    (found,) = torch.autograd.grad(d_a.square().sum(), b)
    alike(found, (2 * b.detach().sum(1, keepdim=True) * 8).expand(8, 8), 8)
    operands, wanted = with_gradients(cases.diffusion(70, 24, 16))
    out, _ = fused_kernels.diffusion(*operands)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.sum(), wanted, create_graph=True)
    operands, wanted = with_gradients(cases.gradient_features(70, 24, 16))
    with pytest.raises(RuntimeError, match="no second derivative of the gradient features"):
        torch.autograd.grad(fused_kernels.gradient_features(*operands).sum(), wanted, create_graph=True)
    for case, name in ((cases.gating(24, 40, 36), "the gated layer"), (cases.softmax(65, 7, 9), "softmax"),
                       (cases.cross_entropy(65, 7, 9), "the cross-entropy")):
        operands, wanted = with_gradients(case)
        with pytest.raises(RuntimeError, match=f"no second derivative of {name}"):
            torch.autograd.grad(case.run(*operands).sum(), wanted, create_graph=True)
    q, k, v = (numbers(2, 40, 3, 16, dtype=FP16, seed=seed).requires_grad_() for seed in (1, 2, 3))
    with pytest.raises(RuntimeError, match="no second derivative of attention"):
        torch.autograd.grad(fused_kernels.attention(q, k, v).sum(), (q, k, v), create_graph=True)
    operands, wanted = with_gradients(cases.clifford(5, 13))
    with pytest.raises(RuntimeError, match="no second derivative of the Clifford product"):
        torch.autograd.grad(fused_kernels.clifford(*operands).sum(), wanted, create_graph=True)


def test_gradients_that_are_not_there():
    for width, words in ((12, "width is 12; it has to be a mult"), (250, "width is 250; it has to be a mult")):
        q, k, v = (numbers(1, 4, 2, width, dtype=FP16, seed=seed).requires_grad_() for seed in (1, 2, 3))
        out = fused_kernels.attention(q, k, v)
        assert torch.equal(out, fused_kernels.attention(q.detach(), k.detach(), v.detach()))
        with pytest.raises(ValueError, match=words):
            out.sum().backward()
    for at in (1, 2, 3):
        operands, _ = with_gradients(cases.diffusion(70, 24, 16))
        operands[at].requires_grad_()
        with pytest.raises(RuntimeError, match="no gradient of basis, mass or evalues"):
            fused_kernels.diffusion(*operands)
    for at in (1, 2):
        operands, _ = with_gradients(cases.gradient_features(70, 24, 16))
        operands[at].requires_grad_()
        with pytest.raises(RuntimeError, match="no gradient of gr or gi"):
            fused_kernels.gradient_features(*operands)


# ---- torch.library and torch.compile ------------------------------------------------------------------------------


def test_each_operator_is_checked():
    """Each row of the table has a case, so that what is tested below is all of it; products/ has two rows more."""
    assert {case.name.split("-")[0] for case in EACH} | {"product_bias", "product_backward"} == set(OPERATORS)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_opcheck(case):
    operands, _ = with_gradients(case)
    others = {"attention": [(), (True, 0.5, True)]}.get(case.name.split("-")[0], [case.more])
    # Each call of the diffusion adds up in another order.
    tolerances = {"rtol": 2.0**-6, "atol": 2.0**-6} if operands[0].dtype == BF16 else {}
    if "rtol" not in inspect.signature(torch.library.opcheck).parameters:
        tolerances = {}
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic",
             *(("test_autograd_registration",) if case.wants_gradients else ()))
    for more in others:
        torch.library.opcheck(operator_of(case), (*operands, *more), test_utils=tests, **tolerances)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_operators_compute_the_same(case):
    """Called by name, as torch.compile calls them."""
    operands = case.operands()
    more = (True, None, True) if case.name.startswith("attention-") else case.more
    case.check(operands, operator_of(case)(*operands, *more))


@pytest.mark.parametrize("case", EACH, ids=str)
def test_compile(case):
    """With something to fuse before the call. Operands are halves of numbers that are exact doubled."""
    from torch.utils._triton import has_triton

    torch.compiler.reset()
    run = case.run
    compiled = torch.compile(lambda *operands: run(operands[0] * 2, *operands[1:]), fullgraph=True,
                             backend="inductor" if has_triton() else "aot_eager")
    operands, wanted = with_gradients(case)
    whole = [each.detach() for each in operands]
    operands[0] = (whole[0] / 2).requires_grad_(0 in case.wants_gradients)
    wanted = [operands[at] for at in case.wants_gradients]
    with torch.no_grad():
        result = compiled(*operands)
    case.check(whole, result)
    if not wanted:
        return
    result = tensors(compiled(*operands))
    case.check(whole, result if len(result) > 1 else result[0])
    result = differentiable(result)
    d = [numbers(*each.shape, dtype=each.dtype, seed=11) for each in result]
    found = torch.autograd.grad(result, wanted, d)
    expected = torch.autograd.grad(differentiable(case.run(operands[0] * 2, *operands[1:])), wanted, d)
    for one, other in zip(found, expected):
        alike(one, other, 256 if one.dtype == FP32 else 8)


def of_two_sizes(three):
    """Two of three cases, none of which has a size of 1; and of attention with a width that has gradients."""
    return three[:2] if three[0].name.startswith("attention") else (three[0], three[2])


@pytest.mark.parametrize("three", cases.IN_TURN, ids=lambda three: three[0].name)
def test_a_compiled_function_takes_other_sizes(three):
    """One graph serves both, whose sizes are symbols."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, operands):
        graphs.append(graph)
        return graph

    run = three[0].run
    compiled = torch.compile(lambda *operands: run(*operands), fullgraph=True, dynamic=True, backend=backend)
    for case in of_two_sizes(three):
        operands = case.operands()
        case.check(operands, compiled(*operands))
    assert len(graphs) == 1


@pytest.mark.parametrize("three", [three for three in cases.IN_TURN if three[0].wants_gradients],
                         ids=lambda three: three[0].name)
def test_gradients_of_a_compiled_function_take_other_sizes(three):
    torch.compiler.reset()
    run = three[0].run
    compiled = torch.compile(lambda *operands: run(*operands), fullgraph=True, dynamic=True, backend="aot_eager")
    for case in of_two_sizes(three):
        operands, wanted = with_gradients(case)
        results = differentiable(tensors(case.run(*operands)))
        d = [numbers(*each.shape, dtype=each.dtype, seed=11) for each in results]
        expected = torch.autograd.grad(results, wanted, d)
        found = torch.autograd.grad(differentiable(tensors(compiled(*operands))), wanted, d)
        for one, other in zip(found, expected):
            alike(one, other, 256 if one.dtype == FP32 else 8)


def test_fake_tensors_have_the_layouts_of_results():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for case in CASES:
        operands = case.operands()
        result = tensors(case.run(*operands))
        with FakeTensorMode() as mode:
            fakes = tensors(case.run(*(mode.from_tensor(each) for each in operands)))
        for one, other in zip(result, fakes, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype and one.device == other.device, case
            strides = [[step for step, size in zip(each.stride(), each.shape) if size > 1] for each in (one, other)]
            assert strides[0] == strides[1], case  # of a dimension with one element the stride says nothing


# ---- Refusals -----------------------------------------------------------------------------------------------------


def misaligned(*shape, dtype):
    count = torch.Size(shape).numel()
    return numbers(count + 1, dtype=dtype)[1:].view(shape)


def refusals():
    """(name, exception, words of its sentence, the call)."""
    k = fused_kernels
    half, single, brain = (functools.partial(numbers, dtype=dtype) for dtype in (FP16, FP32, BF16))
    q, mesh = half(1, 4, 4, 8), cases.diffusion(70, 24, 16).operands()

    def with_mesh(at, other):
        return lambda: k.diffusion(*mesh[:at], other, *mesh[at + 1:])

    return [
        ("fp64", ValueError, "a is torch.float64; it has to be torch.float16 or", lambda: k.product(
            half(8, 8).double(), half(8, 8).double())),
        ("two types", ValueError, "b is torch.bfloat16; it has to be torch.float16",
         lambda: k.product(half(8, 8), brain(8, 8))),
        ("shapes", ValueError, r"b has the shape \(9, 8\); it has to be \(8, 8\)",
         lambda: k.product(half(8, 8), half(9, 8))),
        ("no dimensions", ValueError, "both have to have at least 1", lambda: k.product(half(8, 8), half(8)[0])),
        ("batches", ValueError, r"a batch of \(3,\), a one of \(2,\)", lambda: k.product(half(2, 8, 8), half(3, 8, 8))),
        ("no rows", ValueError, r"a has the shape \(0, 8\); each dimension", lambda: k.product(half(0, 8), half(8, 8))),
        ("every other element", ValueError, "elements of a row or of a column have to be neighbours",
         lambda: k.product(half(8, 16)[:, ::2], half(8, 8))),
        ("bias of a product", ValueError, r"bias has the shape \(9,\); it has to be \(8,\)",
         lambda: k.product(half(8, 8), half(8, 8), bias=half(9))),
        ("expanded", ValueError, "memory of their own", lambda: k.product(half(1, 8).expand(4, 8), half(8, 8))),
        ("rows apart", ValueError, "16 bytes", lambda: k.product(half(8, 26)[:, :8], half(8, 8))),
        ("rows of fp32 apart", ValueError, "16 bytes", lambda: k.product(single(8, 18)[:, :8], single(8, 8))),
        ("rows of fp32 apart, in TF32", ValueError, "16 bytes",
         lambda: k.product(single(8, 18)[:, :8], single(8, 8), "tf32")),
        ("a math that there is not", ValueError, "math is 'bf16'; it has to be 'fp32' or 'tf32' or 'tf32x3'",
         lambda: k.product(single(8, 8), single(8, 8), "bf16")),
        ("TF32 of fp16", ValueError, "math is 'tf32', but a is torch.float16; it has to be torch.float32",
         lambda: k.product(half(8, 8), half(8, 8), math="tf32")),
        ("misaligned", ValueError, "a: the pointer is not aligned",
         lambda: k.product(misaligned(8, 8, dtype=FP16), half(8, 8))),
        ("on the CPU", ValueError, "a is on cpu; it has to be on a CUDA device",
         lambda: k.product(half(8, 8).cpu(), half(8, 8).cpu())),
        ("one on the CPU", RuntimeError, "b is not memory of a GPU", lambda: k.product(half(8, 8), half(8, 8).cpu())),
        ("weights as torch.nn.Linear has them", ValueError, "w1 has the strides", lambda: k.gating(
            half(4, 8), half(16, 8).t(), half(8, 16), half(16), half(16))),
        ("bias", ValueError, r"b2 has the shape \(8,\)",
         lambda: k.gating(half(4, 8), half(8, 16), half(8, 16), half(16), half(8))),
        ("gated layer in fp64", ValueError, "x is torch.float64", lambda: k.gating(
            half(4, 8).double(), half(8, 16).double(), half(8, 16).double())),
        ("a gate that there is not", ValueError, "gate is 'swish'; it has to be 'sigmoid' or 'silu'",
         lambda: k.gating(half(4, 8), half(8, 16), half(8, 16), gate="swish")),
        ("gated layer in TF32 of bf16", ValueError, "math is 'tf32', but x is torch.bfloat16",
         lambda: k.gating(brain(4, 8), brain(8, 16), brain(8, 16), math="tf32")),
        ("gradients of a bias of another type", ValueError, "b1 is torch.float32", lambda: k.gating_backward(
            half(4, 16), half(4, 8), half(8, 16), half(8, 16), half(16).float())),
        ("heads", ValueError, "kv_heads", lambda: k.attention(q, q[:, :, :3], q[:, :, :3])),
        ("width", ValueError, "width is 264", lambda: k.attention(*[half(1, 2, 2, 264)] * 3)),
        ("scale", ValueError, "scale is", lambda: k.attention(q, q, q, scale=0.0)),
        ("expanded keys", ValueError, "no dimension may be expanded",
         lambda: k.attention(q, q[:, :1].expand(1, 4, 4, 8), q)),
        ("all expanded", ValueError, "no dimension may be expanded",
         lambda: k.attention(q, half(8).expand(1, 4, 4, 8), q)),
        ("mesh", ValueError, r"mass has the shape \(71,\); it has to be \(70,\)", with_mesh(2, brain(71))),
        ("mesh in fp16", ValueError, "basis is torch.float16", with_mesh(1, mesh[1].half())),
        ("mesh transposed", ValueError, "x has the strides", with_mesh(0, brain(16, 70).t())),
        ("mesh misaligned", ValueError, "times: the pointer", with_mesh(4, misaligned(16, dtype=BF16))),
        ("tangents", ValueError, r"gi has the shape \(9, 16\); it has to be \(9, 8\)", lambda: k.gradient_features(
            brain(8, 8), brain(9, 8), brain(9, 16), brain(8, 8), brain(8, 8))),
        ("two types of features", ValueError, "gr is torch.bfloat16; it has to be torch.float16", lambda: k.gradient_features(
            half(8, 8), brain(9, 8), brain(9, 8), brain(8, 8), brain(8, 8))),
        ("weights transposed", ValueError, "lr has the strides", lambda: k.gradient_features(
            brain(8, 8), brain(9, 8), brain(9, 8), brain(8, 8).t(), brain(8, 8))),
        ("signature", ValueError, r"the signature is \(5, 0, 0\); it has to be one of", lambda: k.clifford(
            single(8, 2, 4), single(8, 2, 4), single(4, 20), (5, 0, 0))),
        ("weights of an algebra", ValueError, r"w has the shape \(4, 10\); it has to be \(4, 20\)", lambda: k.clifford(
            single(8, 2, 4), single(8, 2, 4), single(4, 10))),
        ("features", ValueError, "features is 8200; it has to be from 1 to 8192", lambda: k.clifford(
            single(8, 1, 8200), single(8, 1, 8200), single(8200, 20))),
        ("five numbers of vectors", ValueError, r"the signature is \(3, 3, 0\); it has to be three numbers",
         lambda: k.geometric_product(single(64, 2, 4), single(64, 2, 4), signature=(3, 3, 0))),
        ("blades", ValueError, r"x has the shape \(2, 4, 8\); with the layout 'blades_first' dimension 0 has to be 8",
         lambda: k.geometric_product(single(2, 4, 8), single(2, 4, 8))),
        ("weights of a product", ValueError, r"w has the shape \(4, 20\); it has to be \(4, 19\)",
         lambda: k.geometric_product(single(8, 2, 4), single(8, 2, 4), single(4, 20), (2, 0, 1))),
        ("weights in another type", ValueError, "w is torch.float16; it has to be torch.bfloat16 or torch.float32",
         lambda: k.geometric_product(brain(8, 2, 4), brain(8, 2, 4), half(4, 20))),
        ("long rows of a product", ValueError, "features is 8200; it has to be from 1 to 8192",
         lambda: k.geometric_product(single(8, 1, 8200), single(8, 1, 8200))),
        ("matrices of weights", ValueError, r"w has the shape \(4, 20\); it has to be \(20, 4, 4\)",
         lambda: k.clifford_connected(single(8, 2, 4), single(8, 2, 4), single(4, 20))),
        ("algebra that is not connected", ValueError, "p, q, r are 3, 0, 1; they have to be",
         lambda: k.clifford_connected(single(16, 2, 4), single(16, 2, 4), single(34, 4, 4), (3, 0, 1))),
        ("softmax in fp64", ValueError, "x is torch.float64; it has to be torch.float16 or torch.bfloat16 or "
         "torch.float32", lambda: k.softmax(single(8, 8).double(), single(8, 8).double())),
        ("softmax in two types", ValueError, "w is torch.bfloat16", lambda: k.softmax(half(8, 8), brain(8, 8))),
        ("labels", ValueError, "labels is torch.int16; it has to be torch.int64 or torch.int32",
         lambda: k.cross_entropy(half(8, 8), half(8, 8), torch.zeros(8, dtype=torch.int16, device="cuda"))),
        ("gradients of losses", ValueError, "d_losses is torch.float16; it has to be torch.float32",
         lambda: k.cross_entropy_backward(half(8), half(8, 8), half(8, 8),
                                          torch.zeros(8, dtype=torch.int64, device="cuda"), single(8, 8), single(8))),
        ("softmax transposed", ValueError, "w has the strides", lambda: k.softmax(single(8, 8), single(16, 8).t())),
    ]


@pytest.mark.parametrize("call", refusals(), ids=lambda call: call[0].replace(" ", "_"))
def test_refusal(call):
    _, exception, words, function = call
    for _ in range(2):
        with pytest.raises(exception, match=words) as caught:
            function()
        assert "\n" not in str(caught.value)
    case = EACH[0]
    operands = case.operands()
    case.check(operands, case.run(*operands))
    torch.cuda.synchronize()


def test_plans_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr(binding, "_MOST_PLANS", 3)
    binding._plans.clear()
    for rows in range(1, 9):
        case = cases.product(rows, 8, 8, FP16)
        operands = case.operands()
        case.check(operands, case.run(*operands))
        assert len(binding._plans) <= 3
