"""fused_kernels.nn on a GPU, beside plain.py, which is PyTorch's operators in fp64. It runs where test_pytorch.py does.

How far may a result be off? A product whose rounding errors are at most u times the sum of its terms' absolute values
is the exact product of factors that are off by u, relatively. So the bounds come from fp64, too: by how much do results
and gradients change if each weight and each number of x, of the mesh and of the incoming gradient is changed at random
by up to u? That is 2^-18 for three products in TF32, and 2^-8 for bf16. What is rounded between the products in bf16
counts as much again, and each block rounds anew: FACTOR is for these."""

import functools
import os
import pathlib

import pytest

torch = pytest.importorskip("torch", reason="the networks need PyTorch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("PyTorch sees no GPU of compute capability 9.0", allow_module_level=True)
BUILT = pathlib.Path(__file__).resolve().parents[3] / "build" / "cuda" / "libfused_kernels.so"
if "FUSED_KERNELS_LIBRARY" not in os.environ and not BUILT.exists():
    pytest.skip("the library has not been built by nvcc: scons library arch=90a", allow_module_level=True)

from cases import BF16, FP32
import plain

from fused_kernels import nn

DEVICE = "cuda"
FACTOR = 4
MOST = {FP32: 2.0**-18, BF16: 2.0**-8}
EIGEN, INPUTS, CLASSES, WIDTH = 64, 8, 5, 32
KINDS = {"rotations": {}, "no rotations": {"with_gradient_rotations": False},
         "no features": {"with_gradient_features": False}}


@functools.lru_cache(None)
def exact_mesh(seed, eigen=EIGEN):
    """In fp64, of 642 vertices; the numbers are fp32's."""
    vertices, faces = plain.bumpy(seed)
    return tuple(each.float().double() for each in plain.operators_of(vertices.to(DEVICE), faces.to(DEVICE), eigen))


def mesh_of(seed, dtype, eigen=EIGEN):
    """mass, evals, evecs, gradX, gradY."""
    return [each.to(DEVICE, dtype) for each in exact_mesh(seed, eigen)]


def network(blocks=4, width=WIDTH, seed=1, **options):
    torch.manual_seed(seed)
    net = nn.DiffusionNet(INPUTS, CLASSES, width, blocks, dropout=False, **options)
    with torch.no_grad():
        for name, each in net.named_parameters():
            if name.endswith("diffusion_time"):
                each.uniform_(0, 0.3)
    return net.to(DEVICE)


def random(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE)


def weights_of(net, dtype=torch.float64):
    return {name: each.detach().to(dtype) for name, each in net.state_dict().items()}


def call(net, x, mesh, **more):
    """As the original is called."""
    mass, evals, evecs, gradX, gradY = mesh
    return net(x, mass, None, evals, evecs, gradX, gradY, **more)


def results(function, weights, x, mesh, d):
    """The outputs, and the gradients of x and of the weights that have one, by their names."""
    leaves = {name: each.detach().clone().requires_grad_() for name, each in weights.items()}
    x = x.detach().clone().requires_grad_()
    out = function(leaves, x, *mesh)
    out.backward(d.to(out.dtype))
    return {"out": out.detach(), "x": x.grad} | {name: each.grad for name, each in leaves.items()}


def results_of(net, x, mesh, d):
    """The same of a module."""
    net.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = call(net, x, mesh)
    out.backward(d.to(out.dtype))
    return {"out": out.detach(), "x": x.grad} | {name: each.grad for name, each in net.named_parameters()}


def off(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def changed(tensor, by, generator):
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce()
        values = changed(tensor.values(), by, generator)
        return torch.sparse_coo_tensor(tensor.indices(), values, tensor.shape).coalesce()
    return tensor * (1 + by * (2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 1).to(DEVICE))


def bounds(weights, x, mesh, d, by):
    """How far each result may be off, relatively, and the results."""
    exact, most = results(plain.network, weights, x, mesh, d), {}
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        others = {name: changed(each, by, generator) for name, each in weights.items()}
        x_d = [changed(each, by, generator) for each in (x, d)]
        other = results(plain.network, others, x_d[0], [changed(each, by, generator) for each in mesh], x_d[1])
        most = {name: max(most.get(name, 0), FACTOR * off(each, exact[name])) for name, each in other.items()}
    return most, exact


def check_results(found, most, exact):
    assert found.keys() == exact.keys()
    for name, each in found.items():
        error = off(each, exact[name])
        assert error <= most[name], f"{name} is off by {error}, which may be {most[name]}"  # a NaN is not


@pytest.fixture
def counted(monkeypatch):
    """How often each operator was called."""
    counts = {}

    def count(name, function):
        def wrapper(*arguments):
            counts[name] = counts.get(name, 0) + 1
            return function(*arguments)
        return wrapper

    for name in ("diffusion", "gradient_features", "diffusion_ragged", "gradient_features_ragged", "product",
                 "product_bias", "product_backward"):
        monkeypatch.setitem(nn.calls, name, count(name, nn.calls[name]))
    return counts


def expected_calls(dtype, blocks, kind="rotations"):
    """In fp32 a diffusion is two products, and two more are its gradients. Gradient features are two more, too: by the
    weights, whose gradients are one call, and by the mesh's gradients, which multiply backward once. An MLP has three
    linear layers."""
    if dtype == FP32:
        linear = 3 if kind == "no features" else 4
        return {"product": blocks * (4 if kind == "no features" else 7), "product_bias": blocks * 3,
                "product_backward": blocks * linear}
    return {"diffusion": blocks} | ({} if kind == "no features" else {"gradient_features": blocks})


# ---- Names and shapes ----------------------------------------------------------------------------------------------


def block_shapes(at, width, hidden, gradients):
    sizes = [(3 if gradients else 2) * width, *hidden, width]
    shapes = {f"block_{at}.diffusion.diffusion_time": (width,)}
    shapes |= {f"block_{at}.gradient_features.{name}.weight": (width, width) for name in gradients}
    for layer in range(len(sizes) - 1):
        shapes[f"block_{at}.mlp.miniMLP_mlp_layer_{layer:03}.weight"] = sizes[layer + 1], sizes[layer]
        shapes[f"block_{at}.mlp.miniMLP_mlp_layer_{layer:03}.bias"] = (sizes[layer + 1],)
    return shapes


def test_the_state_is_the_original_s():
    net = nn.DiffusionNet(C_in=16, C_out=8, C_width=128, N_block=1)
    assert {name: tuple(each.shape) for name, each in net.state_dict().items()} == {
        "first_lin.weight": (128, 16),
        "first_lin.bias": (128,),
        "last_lin.weight": (8, 128),
        "last_lin.bias": (8,),
        "block_0.diffusion.diffusion_time": (128,),
        "block_0.gradient_features.A_re.weight": (128, 128),
        "block_0.gradient_features.A_im.weight": (128, 128),
        "block_0.mlp.miniMLP_mlp_layer_000.weight": (128, 384),
        "block_0.mlp.miniMLP_mlp_layer_000.bias": (128,),
        "block_0.mlp.miniMLP_mlp_layer_001.weight": (128, 128),
        "block_0.mlp.miniMLP_mlp_layer_001.bias": (128,),
        "block_0.mlp.miniMLP_mlp_layer_002.weight": (128, 128),
        "block_0.mlp.miniMLP_mlp_layer_002.bias": (128,),
    }
    assert (net.N_block, net.mlp_hidden_dims, net.dropout) == (1, [128, 128], True)
    assert len(nn.DiffusionNet(3, 8).state_dict()) == 4 + 4 * 9


@pytest.mark.parametrize("options, gradients", zip(KINDS.values(), (("A_re", "A_im"), ("A",), ())), ids=KINDS)
def test_the_state_with_other_options(options, gradients):
    net = nn.DiffusionNet(3, 4, 24, 2, mlp_hidden_dims=[40], **options)
    shapes = {"first_lin.weight": (24, 3), "first_lin.bias": (24,), "last_lin.weight": (4, 24), "last_lin.bias": (4,)}
    shapes |= block_shapes(0, 24, [40], gradients) | block_shapes(1, 24, [40], gradients)
    assert {name: tuple(each.shape) for name, each in net.state_dict().items()} == shapes


def test_a_file_is_loaded(tmp_path):
    net, other = network(2), network(2, seed=2)
    torch.save(net.state_dict(), tmp_path / "weights.pth")
    other.load_state_dict(torch.load(tmp_path / "weights.pth"), strict=True)
    x, mesh = random(642, INPUTS, seed=3), mesh_of(1, FP32)
    assert torch.equal(call(net, x, mesh), call(other, x, mesh))


# ---- Results and gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_outputs_and_gradients(kind, dtype, counted):
    net, x, d = network(**KINDS[kind]), random(642, INPUTS, seed=3), random(642, CLASSES, seed=4)
    most, exact = bounds(weights_of(net), x.double(), mesh_of(1, torch.float64), d.double(), MOST[dtype])
    assert most["out"] < 0.5
    found = results_of(net.to(dtype), x.to(dtype), mesh_of(1, FP32), d)
    assert all(each.dtype == dtype for each in found.values())
    check_results(found, most, exact)
    assert counted == expected_calls(dtype, 4, kind)


@pytest.mark.parametrize("width, eigen", [(36, 64), (32, 62), (32, 61), (7, 5)])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_sizes_that_are_no_multiples_of_8(width, eigen, dtype, counted):
    net, x, d = network(2, width), random(642, INPUTS, seed=3), random(642, CLASSES, seed=4)
    most, exact = bounds(weights_of(net), x.double(), mesh_of(2, torch.float64, eigen), d.double(), MOST[dtype])
    check_results(results_of(net.to(dtype), x.to(dtype), mesh_of(2, FP32, eigen), d), most, exact)
    assert counted == expected_calls(dtype, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_fp64_and_the_cpu_are_pytorch_s(kind, counted):
    net, x, d = network(2, **KINDS[kind]), random(642, INPUTS, seed=3), random(642, CLASSES, seed=4)
    exact = results(plain.network, weights_of(net), x.double(), mesh_of(1, torch.float64), d.double())
    check_results(results_of(net.double(), x.double(), mesh_of(1, torch.float64), d),
                  dict.fromkeys(exact, 2.0**-36), exact)
    found = results_of(net.double().cpu(), x.double().cpu(), [each.cpu() for each in exact_mesh(1)], d.cpu())
    check_results({name: each.to(DEVICE) for name, each in found.items()}, dict.fromkeys(exact, 2.0**-36), exact)
    assert counted == {}


def test_tf32_where_pytorch_may_take_it(counted, monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    net, x, d = network(2), random(642, INPUTS, seed=3), random(642, CLASSES, seed=4)
    most, exact = bounds(weights_of(net), x.double(), mesh_of(1, torch.float64), d.double(), 2.0**-11)
    found = results_of(net, x, mesh_of(1, FP32), d)
    check_results(found, most, exact)
    assert off(found["out"], exact["out"]) > 2.0**-18
    assert counted == expected_calls(FP32, 2)


def test_autocast(counted):
    net, x, d = network(2), random(642, INPUTS, seed=3), random(642, CLASSES, seed=4)
    most, exact = bounds(weights_of(net), x.double(), mesh_of(1, torch.float64), d.double(), MOST[BF16])
    with torch.autocast("cuda", torch.bfloat16):
        found = results_of(net, x, mesh_of(1, FP32), d)
        mesh = net.mesh(*mesh_of(1, FP32))
    assert found["out"].dtype == BF16 and all(each.dtype == FP32 for name, each in found.items() if name != "out")
    check_results(found, most, exact)
    assert counted == {"diffusion": 2, "gradient_features": 2}
    assert mesh.evecs.dtype == BF16
    with pytest.raises(ValueError, match="the network computes in torch.float32; make it by mesh"):
        net(x, mesh)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_meshes_side_by_side(kind, dtype):
    """Also of 641 vertices, whose matrices do not all begin at multiples of 16 bytes."""
    for vertices, eigen in ((642, EIGEN), (641, EIGEN), (641, 62)):
        net = network(2, **KINDS[kind])
        x, d = random(2, vertices, INPUTS, seed=3), random(2, vertices, CLASSES, seed=4)
        each = [[*mesh[:3], *nn.spectral_gradients(mesh[3], mesh[4], mesh[2])]
                for mesh in (mesh_of(seed, torch.float64, eigen) for seed in (1, 2))]
        each = [[mesh[0][:vertices], mesh[1], *(part[:vertices] for part in mesh[2:])] for mesh in each]
        meshes = [torch.stack(parts) for parts in zip(*each)]
        most, exact = bounds(weights_of(net), x.double(), meshes, d.double(), MOST[dtype])
        found = results_of(net.to(dtype), x.to(dtype), meshes, d)
        check_results(found, most, exact)
        one = results_of(net, x[:1].to(dtype), [part[:1] for part in meshes], d[:1])["out"]
        assert one.shape == (1, vertices, CLASSES)
        assert off(one[0], exact["out"][0]) <= 2 * most["out"]


@pytest.mark.parametrize("dtype", [torch.float64, FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_meshes_that_differ_in_their_sizes(kind, dtype, counted):
    """Beside plain.py of each by itself."""
    net, sizes = network(2, **KINDS[kind]), (642, 300, 1)
    weights, most = weights_of(net), 0
    x, d = random(sum(sizes), INPUTS, seed=3), random(sum(sizes), CLASSES, seed=4)
    meshes, expected = [], []
    for seed, (size, own_x, own_d) in enumerate(zip(sizes, x.split(sizes), d.split(sizes)), 1):
        mass, evals, evecs, *pair = mesh_of(seed, torch.float64)
        gradients = nn.spectral_gradients(*pair, evecs)
        mesh = [mass[:size], evals, *(each[:size] for each in (evecs, *gradients))]
        meshes.append(mesh)
        own, exact = bounds(weights, own_x.double(), mesh, own_d.double(), MOST.get(dtype, 2.0**-36))
        most = max(most, *own.values())
        expected.append(exact)
    together = {name: torch.cat([each[name] for each in expected]) if name in ("out", "x")
                else sum(each[name] for each in expected) for name in expected[0]}
    found = results_of(net.to(dtype), x.to(dtype), list(map(list, zip(*meshes))), d)
    check_results(found, dict.fromkeys(together, most), together)
    features = {} if kind == "no features" else {"gradient_features_ragged": 2}
    linear = {"product_bias": 6, "product_backward": 6} if dtype == FP32 else {}
    assert counted == ({} if dtype == torch.float64 else {"diffusion_ragged": 2} | features | linear)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients(kind):
    net, x, mesh = network(2, **KINDS[kind]), random(642, INPUTS, seed=3), mesh_of(1, torch.float64)
    d = random(642, CLASSES, seed=4)

    def twice(function, weights, x, mesh, d):
        leaves = {name: each.detach().clone().requires_grad_() for name, each in weights.items()}
        x = x.detach().clone().requires_grad_()
        once = torch.autograd.grad(function(leaves, x, *mesh), [x, *leaves.values()], d, create_graph=True)
        sum(each.square().sum() for each in once).backward()
        return {"x": x.grad} | {name: each.grad for name, each in leaves.items()}

    exact, most = twice(plain.network, weights_of(net), x.double(), mesh, d.double()), {}
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        others = {name: changed(each, MOST[FP32], generator) for name, each in weights_of(net).items()}
        other = twice(plain.network, others, changed(x.double(), MOST[FP32], generator), mesh, d.double())
        most = {name: max(most.get(name, 0), FACTOR * off(each, exact[name])) for name, each in other.items()
                if exact[name] is not None}
    x.requires_grad_()
    own = net.mesh(*mesh_of(1, FP32))
    once = torch.autograd.grad(net(x, own), [x, *net.parameters()], d, create_graph=True)
    sum(each.square().sum() for each in once).backward()
    found = {"x": x.grad} | {name: each.grad for name, each in net.named_parameters()}
    check_results({name: found[name] for name in most}, most, {name: exact[name] for name in most})


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(300, 24), (2, 150, 24)])
def test_an_mlp_is_its_layers_one_by_one(dtype, shape):
    """Dropout draws the same."""
    torch.manual_seed(1)
    mlp, found = nn.MiniMLP([24, 40, 40, 16], dropout=True).to(DEVICE, dtype), []
    x, d = random(*shape, seed=3).to(dtype).requires_grad_(), random(*shape[:-1], 16, seed=4).to(dtype)
    for run in (mlp, functools.partial(torch.nn.Sequential.forward, mlp)):
        torch.manual_seed(5)
        out = run(x)
        found.append([out, *torch.autograd.grad(out, [x, *mlp.parameters()], d)])
    for one, other in zip(*found, strict=True):
        assert off(one, other.double()) <= {FP32: 2.0**-14, BF16: 2.0**-5}[dtype]


def test_a_layer_of_another_kind_takes_the_layers_one_by_one(counted):
    torch.manual_seed(1)
    mlp = nn.MiniMLP([24, 40, 16], activation=torch.nn.SiLU).to(DEVICE)
    assert mlp(random(300, 24, seed=3)).shape == (300, 16) and counted == {}


def test_a_mesh_of_a_network_with_other_options():
    x, (mass, evals, evecs, *pair) = random(642, INPUTS, seed=3), mesh_of(1, FP32)
    own = network(1).mesh(mass, evals, evecs, *pair)
    for kind in KINDS.values():
        net = network(1, **kind)
        assert torch.equal(net(x, own), net(x, net.mesh(mass, evals, evecs, *pair)))


# ---- What forward takes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_each_form_of_the_mesh_is_the_same(dtype):
    net, x, mesh = network(2).to(dtype), random(642, INPUTS, seed=3).to(dtype), mesh_of(1, FP32)
    mass, evals, evecs, gradX, gradY = mesh
    expected = call(net, x, mesh)
    spectral = nn.spectral_gradients(gradX, gradY, evecs)
    assert all(each.shape == evecs.shape and each.dtype == FP32 for each in spectral)

    def check(found):
        # On Hopper the diffusion adds in another order in each call.
        assert off(found, expected.double()) <= (2.0**-18 if dtype == FP32 else 2.0**-5)

    check(call(net, x, (mass, evals, evecs, *spectral)))
    check(call(net, x, (mass, evals, evecs, gradX.to_dense(), gradY.to_dense())))
    check(call(net, x, (mass, evals, evecs, gradX.to_sparse_csr(), gradY.to_sparse_csr())))
    check(net(x, net.mesh(*mesh)))
    check(net(x, net.mesh(mass, evals, evecs, *spectral)))
    one = [each.unsqueeze(0) for each in mesh]
    check(call(net, x.unsqueeze(0), one).squeeze(0))


def test_a_block_is_called_as_the_original_s():
    block, x, mesh = network(1).block_0, random(1, 642, WIDTH, seed=3), mesh_of(1, FP32)
    mass, evals, evecs, gradX, gradY = (each.unsqueeze(0) for each in mesh)
    found = block(x, mass, None, evals, evecs, gradX, gradY)
    weights = {f"block_0.{name}": each.double() for name, each in block.state_dict().items()}
    expected = plain.block(weights, "block_0", x[0].double(), *mesh_of(1, torch.float64))
    assert found.shape == x.shape and off(found[0], expected) <= 2.0**-16


@pytest.mark.parametrize("at, corners", [("edges", 2), ("faces", 3)])
def test_outputs_at_edges_and_faces(at, corners):
    faces = plain.bumpy(1)[1][:, :corners].to(DEVICE)
    net, x, mesh = network(1, outputs_at=at), random(642, INPUTS, seed=3), mesh_of(1, FP32)
    found = call(net, x, mesh, **{at: faces})
    net.outputs_at = "vertices"
    expected = call(net, x, mesh).double()[faces].mean(1)
    assert found.shape == (len(faces), CLASSES) and off(found, expected) <= 2.0**-20
    net.outputs_at = at
    both = call(net, x.expand(2, -1, -1), [torch.stack((each, each)) for each in (
        *mesh[:3], *nn.spectral_gradients(mesh[3], mesh[4], mesh[2]))], **{at: torch.stack((faces, faces))})
    assert both.shape == (2, *found.shape) and off(both[1], expected) <= 2.0**-16


@pytest.mark.parametrize("dtype", [torch.float64, FP32, BF16], ids=str)
def test_the_global_mean_is_by_mass(dtype):
    net, x, most = network(1), random(642, INPUTS, seed=3), {FP32: 2.0**-16, BF16: 2.0**-5}.get(dtype, 2.0**-36)
    meshes = [mesh_of(seed, torch.float64) for seed in (1, 2)]
    mass = [mesh[0][:, None] for mesh in meshes]
    outs = [plain.network(weights_of(net), x.double(), *mesh) for mesh in meshes]
    expected = torch.stack([(out * each).sum(0) / each.sum() for out, each in zip(outs, mass)])
    net = net.to(dtype)
    net.outputs_at, x = "global_mean", x.to(dtype)
    one = call(net, x, meshes[0])
    assert one.shape == (CLASSES,) and off(one, expected[0]) <= most
    each = [[*mesh[:3], *nn.spectral_gradients(mesh[3], mesh[4], mesh[2])] for mesh in meshes]
    both = call(net, x.expand(2, -1, -1), [torch.stack(parts) for parts in zip(*each)])
    assert both.shape == (2, CLASSES) and off(both, expected) <= most
    x = torch.cat((x, x)).requires_grad_()
    both = call(net, x, [list(parts) for parts in zip(*meshes)])
    assert both.shape == (2, CLASSES) and off(both, expected) <= most
    found, = torch.autograd.grad(both[0].sum(), x)
    assert bool((found[642:] == 0).all()) and bool((found[:642] != 0).any())


def test_last_activation_sees_a_dimension_for_meshes():
    shapes = []

    def activation(out):
        shapes.append(tuple(out.shape))
        return torch.log_softmax(out, -1)

    out = call(network(1, last_activation=activation), random(642, INPUTS, seed=3), mesh_of(1, FP32))
    assert shapes == [(1, 642, CLASSES)] and out.shape == (642, CLASSES)
    assert torch.allclose(out.exp().sum(1), torch.ones(642, device=DEVICE))


def test_dropout_is_in_training_alone():
    torch.manual_seed(1)
    net = nn.DiffusionNet(INPUTS, CLASSES, WIDTH, 1).to(DEVICE)
    x, mesh = random(642, INPUTS, seed=3), net.mesh(*mesh_of(1, FP32))
    dropped = [net(x, mesh) for _ in range(2)]
    assert off(dropped[0], dropped[1].double()) > 0.01
    net.eval()
    assert off(net(x, mesh), plain.network(weights_of(net), x.double(), *mesh_of(1, torch.float64))) <= 2.0**-16


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_times_below_zero_are_set_back_and_keep_their_gradient(dtype):
    net, x, mesh = network(1).to(dtype), random(642, INPUTS, seed=3).to(dtype), mesh_of(1, FP32)
    times = net.block_0.diffusion.diffusion_time
    with torch.no_grad():
        times.fill_(-1)
    loss = sum(call(net, x, mesh).square().mean() for _ in range(2))  # the second call must not spoil the first one's
    loss.backward()
    assert bool((times == torch.tensor(1e-8, dtype=dtype, device=DEVICE)).all()) and bool((times.grad != 0).any())


# ---- Training ------------------------------------------------------------------------------------------------------


def losses_of(run, parameters, steps=20):
    """Of each step. The labels are made of the data, so there is something to learn."""
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    labels, losses = random(642, INPUTS, seed=3)[:, :CLASSES].argmax(1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(run(), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def plain_losses(weights, mesh):
    weights = {name: each.clone().requires_grad_() for name, each in weights.items()}
    x = random(642, INPUTS, seed=3).to(mesh[0].dtype)
    return losses_of(lambda: plain.network(weights, x, *mesh), weights.values())


@pytest.mark.parametrize("kind", KINDS)
def test_training_has_the_same_losses(kind):
    net, mesh = network(**KINDS[kind]), mesh_of(1, torch.float64)
    weights, most = weights_of(net), 0
    exact = plain_losses(weights, mesh)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        other = plain_losses({name: changed(each, MOST[FP32], generator) for name, each in weights.items()},
                             [changed(each, MOST[FP32], generator) for each in mesh])
        most = max(most, FACTOR * (other - exact).abs().max().item())
    x, own = random(642, INPUTS, seed=3), net.mesh(*mesh_of(1, FP32))
    found = losses_of(lambda: net(x, own), net.parameters())
    assert exact[-1] < 0.9 * exact[0] and most < 0.01
    assert (found - exact).abs().max() <= most


def test_training_in_bf16_learns_as_much():
    net, mesh = network(), mesh_of(1, torch.float64)
    exact = plain_losses(weights_of(net), mesh)
    x, mesh = random(642, INPUTS, seed=3), mesh_of(1, FP32)

    def run():
        with torch.autocast("cuda", torch.bfloat16):
            return call(net, x, mesh).float()

    assert (losses_of(run, net.parameters()) - exact).abs().max() <= 2.0**-8 * exact[0]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_compiled(dtype):
    torch.compiler.reset()
    net, x = network(2).to(dtype), random(642, INPUTS, seed=3).to(dtype)
    d, mesh = random(642, CLASSES, seed=4).to(dtype), net.mesh(*mesh_of(1, FP32))
    found = []
    for run in (net, torch.compile(net, backend="aot_eager")):
        net.zero_grad()
        out = run(x, mesh)
        out.backward(d)
        found.append([out, *(each.grad for each in net.parameters())])
    for one, other in zip(*found, strict=True):
        assert off(other, one.double()) <= (2.0**-16 if dtype == FP32 else 2.0**-2)


# ---- Refusals ------------------------------------------------------------------------------------------------------


def refusals():
    """(name, exception, words of its sentence, the call of x and a mesh)."""
    def options(**others):
        return lambda x, mesh: nn.DiffusionNet(INPUTS, CLASSES, WIDTH, 1, **others)

    def with_mesh(at, other, **more):
        return lambda x, mesh: call(network(1, **more), x, [*mesh[:at], other(mesh[at]), *mesh[at + 1:]])

    def with_x(other):
        return lambda x, mesh: call(network(1), other(x), mesh)

    return [
        ("implicit", ValueError, "diffusion_method is 'implicit_dense'; here it has to be 'spectral'",
         options(diffusion_method="implicit_dense")),
        ("implicit block", ValueError, "diffusion_method is 'implicit_dense'",
         lambda x, mesh: nn.DiffusionNetBlock(8, [8], diffusion_method="implicit_dense")),
        ("outputs", ValueError, "it has to be 'vertices' or 'edges' or 'faces' or 'global_mean'",
         options(outputs_at="corners")),
        ("blocks", ValueError, "N_block is 0", lambda x, mesh: nn.DiffusionNet(3, 3, 8, 0)),
        ("channels", ValueError, r"x_in has the shape \(642, 7\); it has to be \(vertices, 8\)",
         with_x(lambda x: x[:, :7])),
        ("vertices", ValueError, r"x_in has the shape \(600, 8\); it has to be \(642, 8\)", with_x(lambda x: x[:600])),
        ("dimensions", ValueError, r"x_in has the shape \(642,\)", with_x(lambda x: x[:, 0])),
        ("a batch without meshes", ValueError, r"x_in has the shape \(1, 642, 8\); it has to be \(642, 8\)",
         with_x(lambda x: x.unsqueeze(0))),
        ("mass", ValueError, r"mass has the shape \(641,\); it has to be \(642,\)",
         with_mesh(0, lambda each: each[:641])),
        ("evals", ValueError, r"evals has the shape \(63,\); it has to be \(64,\)",
         with_mesh(1, lambda each: each[:63])),
        ("no evals", ValueError, "evals is missing: the spectral method needs", with_mesh(1, lambda each: None)),
        ("no evecs", ValueError, "evecs is missing: the spectral method needs", with_mesh(2, lambda each: None)),
        ("a list that is too short", ValueError, r"there are \[1, 2, 1, 1, 1\] tensors; of mass, evals, evecs and, if",
         lambda x, mesh: call(network(1), x, [[mesh[0]], [mesh[1]] * 2, *([each] for each in mesh[2:])])),
        ("eigenvectors", ValueError, r"evals has the shape \(63,\); all meshes have to have 64 eigenvectors",
         lambda x, mesh: network(1, with_gradient_features=False).mesh(
             *([each, each[..., :63] if at else each] for at, each in enumerate(mesh[:3])))),
        ("no gradX", ValueError, "gradX is missing: the gradient features need", with_mesh(3, lambda each: None)),
        ("gradY", ValueError, r"gradY has the shape \(642, 63\); it has to be \(642, 642\), or, in the spectrum, "
         r"\(642, 64\)", with_mesh(4, lambda each: each.to_dense()[:, :63])),
        ("no edges", ValueError, "edges is missing", with_mesh(0, lambda each: each, outputs_at="edges")),
        ("faces", ValueError, r"faces has the shape \(1, 9, 2\); each has 3 vertices", lambda x, mesh: call(
            network(1, outputs_at="faces"), x, mesh, faces=torch.zeros(9, 2, dtype=torch.int64, device=DEVICE))),
        ("a gradient of the mesh", RuntimeError, "has no gradient of mass, evals, evecs",
         with_mesh(2, lambda evecs: evecs.clone().requires_grad_())),
        ("a mesh in another type", ValueError, "the mesh is of torch.bfloat16, but the network computes in "
         "torch.float32", lambda x, mesh: network(1)(x, network(1).to(BF16).mesh(*mesh))),
        ("a mesh without gradients", ValueError, "the mesh has no gradX and gradY", lambda x, mesh: network(1)(
            x, network(1, with_gradient_features=False).mesh(*mesh))),
    ]


@pytest.mark.parametrize("case", refusals(), ids=lambda case: case[0].replace(" ", "_"))
def test_refusal(case):
    _, exception, words, function = case
    with pytest.raises(exception, match=words) as caught:
        function(random(642, INPUTS, seed=3), mesh_of(1, FP32))
    assert "\n" not in str(caught.value)
