"""The diffusion and the gradient features on a GPU in every type, of sizes that are no multiples of 8, and of several
meshes, beside the same formulas in fp64. It runs where test_pytorch.py does. (bf16 of the other sizes is tested there.)

The bounds are relative errors in the Frobenius norm: in fp32 each product is off by what its type of multiplication
rounds, and a result comes of three products at most; in 16 bits each of them is rounded, too. tanh has a slope of at
most 1, and its argument is a product of two such results."""

import os
import pathlib

import pytest

torch = pytest.importorskip("torch", reason="the functions of tensors need PyTorch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("PyTorch sees no GPU of compute capability 9.0", allow_module_level=True)
BUILT = pathlib.Path(__file__).resolve().parents[3] / "build" / "cuda" / "libfused_kernels.so"
if "FUSED_KERNELS_LIBRARY" not in os.environ and not BUILT.exists():
    pytest.skip("the library has not been built by nvcc: scons library arch=90a", allow_module_level=True)

from cases import BF16, FP16, FP32, diffusion_in_fp64, features_in_fp64, fused_kernels, tensors

KINDS = {"fp16": (FP16, "fp32", 2.0**-8), "bf16": (BF16, "fp32", 2.0**-5), "fp32": (FP32, "fp32", 2.0**-18),
         "tf32": (FP32, "tf32", 2.0**-7), "tf32x3": (FP32, "tf32x3", 2.0**-16)}
for_each_kind = pytest.mark.parametrize("kind", KINDS)
# Meshes, vertices, eigenvectors, width. (Of one eigenvector or one column the gradient of li is 0.)
SHAPES = [((), 1, 5, 12), ((), 1000, 33, 50), ((), 10000, 128, 128), ((), 300, 300, 20), ((3,), 201, 20, 12),
          ((2,), 700, 128, 72), ((300,), 9, 5, 3)]
SIZES = [[1000, 0, 1, 3000, 65, 64, 900], [5] * 200, [0, 20000, 0, 30]]


def random(*shape, dtype, scale=1.0):
    return (scale * torch.randn(*shape, device="cuda")).to(dtype)


def mesh_of(meshes, vertices, eigen, width, dtype, of_mesh=None):
    """x, basis, mass, evalues, times. of_mesh: the dimensions of what has no vertices. The basis has columns of about
    length 1: with longer ones fp16 cannot hold all gradients."""
    of_mesh = meshes if of_mesh is None else of_mesh
    positive = [torch.rand(*shape, device="cuda").to(dtype) for shape in
                ((*meshes, vertices), (*of_mesh, eigen), (width,))]
    basis = random(*meshes, vertices, eigen, dtype=dtype, scale=vertices**-0.5)
    return [random(*meshes, vertices, width, dtype=dtype), basis, *positive]


def tangents_of(meshes, vertices, eigen, width, dtype, of_mesh=None):
    """x, gr, gi, lr, li."""
    of_mesh = meshes if of_mesh is None else of_mesh
    pairs = [random(*shape, dtype=dtype, scale=shape[-1]**-0.5)
             for shape in [(*meshes, vertices, eigen)] * 2 + [(width, width)] * 2]
    return [random(*of_mesh, eigen, width, dtype=dtype), *pairs]


# What makes operands, the function, its formula, and which operands have gradients.
FUNCTIONS = {"diffusion": (mesh_of, fused_kernels.diffusion, diffusion_in_fp64, (0, 4)),
             "gradient_features": (tangents_of, fused_kernels.gradient_features, features_in_fp64, (0, 3, 4))}
for_each_function = pytest.mark.parametrize("name", FUNCTIONS)


def with_gradients(function, operands, at, d=None):
    """Results and gradients."""
    own = [each.detach().clone().requires_grad_(i in at) for i, each in enumerate(operands)]
    results = tensors(function(*own))
    d = d or [torch.randn_like(each) for each in results]
    return [*(each.detach() for each in results),
            *torch.autograd.grad(results, [own[i] for i in at], [each.to(results[0].dtype) for each in d])], d


def check(found, expected, bound):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        error = (one.double() - other).norm() / other.norm()
        assert error <= bound, error  # a NaN is not


@for_each_kind
@for_each_function
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients(name, kind, shape):
    torch.manual_seed(1)
    make, function, formula, at = FUNCTIONS[name]
    dtype, math, bound = KINDS[kind]
    operands = make(*shape, dtype)
    found, d = with_gradients(lambda *each: function(*each, math=math), operands, at)
    expected, _ = with_gradients(formula, [each.double() for each in operands], at, d)
    check(found, expected, bound)


def by_one(formula, sizes):
    """A formula of several meshes, each by itself."""
    def function(x, *operands):
        ends = [sum(sizes[:mesh]) for mesh in range(len(sizes) + 1)]
        results = []
        for mesh, (begin, end) in enumerate(zip(ends, ends[1:])):
            if formula is diffusion_in_fp64:
                basis, mass, evalues, times = operands
                results.append(formula(x[begin:end], basis[begin:end], mass[begin:end], evalues[mesh], times))
            else:
                gr, gi, *weights = operands
                results.append((formula(x[mesh], gr[begin:end], gi[begin:end], *weights),))
        out, *spectral = zip(*results)
        return (torch.cat(out), *map(torch.stack, spectral))
    return function


def ragged(make, sizes, eigen, width, dtype):
    """(operands, offsets)."""
    ends = torch.tensor([0, *sizes], device="cuda").cumsum(0).int()
    return make((), sum(sizes), eigen, width, dtype, (len(sizes),)), ends


@for_each_kind
@for_each_function
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)} meshes")
def test_meshes_that_differ_in_their_sizes(name, kind, sizes):
    torch.manual_seed(1)
    make, function, formula, at = FUNCTIONS[name]
    dtype, math, bound = KINDS[kind]
    operands, offsets = ragged(make, sizes, 40, 21, dtype)
    found, d = with_gradients(lambda *each: function(*each, offsets, math), operands, at)
    expected, _ = with_gradients(by_one(formula, sizes), [each.double() for each in operands], at, d)
    check(found, expected, bound)
    again, _ = with_gradients(lambda *each: function(*each, offsets, math), operands, at, d)
    assert all(torch.equal(one, other) for one, other in zip(found, again))


@for_each_function
def test_the_operators(name):
    make, _, _, at = FUNCTIONS[name]
    operands, offsets = ragged(make, [30, 0, 100], 20, 12, FP32)
    operands = [each.requires_grad_(i in at) for i, each in enumerate(operands)]
    torch.library.opcheck(getattr(torch.ops.fused_kernels, f"{name}_ragged"), (*operands, offsets, "tf32x3"))


@for_each_function
def test_a_compiled_function_takes_other_sizes(name):
    make, function, _, _ = FUNCTIONS[name]
    torch.compiler.reset()
    graphs = []

    def backend(graph, operands):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda *each: function(*each, math="tf32x3"), fullgraph=True, dynamic=True,
                             backend=backend)
    for sizes in ([30, 50, 100], [20, 70]):
        operands, offsets = ragged(make, sizes, 20, 12, FP32)
        for one, other in zip(tensors(compiled(*operands, offsets)), tensors(function(*operands, offsets, "tf32x3"))):
            assert torch.equal(one, other)
    assert len(graphs) == 1


@for_each_function
def test_what_is_refused(name):
    make, function, _, _ = FUNCTIONS[name]
    operands, offsets = ragged(make, [30, 100], 20, 12, FP16)
    for words, arguments in (("offsets has 2 elements; of 2 meshes it has to have one more", (offsets[:2], "fp32")),
                             ("offsets is torch.int64; it has to be torch.int32", (offsets.long(), "fp32")),
                             ("math is 'tf32', but ", (offsets, "tf32")), ("math is 'fp8'", (offsets, "fp8"))):
        with pytest.raises(ValueError, match=words):
            function(*operands, *arguments)
