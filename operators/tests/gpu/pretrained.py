"""fused_kernels.nn beside the original DiffusionNet: `python3 operators/tests/gpu/pretrained.py --original FOLDER
[--json FOLDER]`, where --original names a clone of github.com/nmwsharp/diffusion-net, in which nothing is changed, and
FUSED_KERNELS_LIBRARY the library. Records belong into results/<gpu>/python: pretrained.json is of the first two parts,
beside_original.json of the third.

The original's data sets are not needed: meshes are made here, balls, bent capsules and rings, with bumps, and so are
their operators, in fp64, by the cotangent Laplacian. There are three parts, which --parts can choose from. The third
takes a minute, and records what it has after each of its rows.

weights: each of the .pth files is loaded into the original's model, in which DiffusionNet is ours, and nothing else is
    changed. What comes out is compared with the original's code in fp64: the share of vertices and of faces that have
    the same class, and the relative error, in the Frobenius norm, of the outputs. Of the models of functional maps
    outputs are the features, and in fp32 the map itself, too.
training: both networks begin with the weights that one seed draws, and learn 100 steps from the same meshes by the
    original's optimizer and loss: which of eight parts of its mesh a face is in. Losses are recorded.
times: a block, and the network that the .pth files are of, of 10000 vertices, 128 channels and 128 eigenvectors: by
    the original's code, as it is and by torch.compile, with its sparse gradX and gradY; by the same formulas with
    gradients of the spectrum (plain.py), as they are and compiled, which the original has not; by ours, and by ours
    after torch.cuda.make_graphed_callables(). Each is compared with the original's code in fp64 before. `ms` is
    launched from the host, whose time is in it: the original waits for the GPU, so no CUDA graph can hold it. Rows take
    turns, with a cold L2 cache; the median counts. `kernels` is what the profiler adds up. `extra_bytes` is the most
    memory that a call takes on top of what it is given, `mesh_bytes` what the mesh takes. In bf16 the original gets
    dense gradX and gradY; sparse ones are not tried. `lacks` counts gradients that a row does not return. To compile
    takes longer than to measure: the network is not compiled, nor in bf16 the formulas of the spectrum."""

import argparse
import contextlib
import importlib.util
import pathlib
import sys
import types

import torch
import torch.nn.functional as F

import cases
from cases import BF16, FP16, FP32
import plain
import times

from fused_kernels import nn

sys.path[:0] = [str(cases.ROOT / "results"), str(cases.ROOT / "results" / "questions")]
from answers import finish

FP64 = torch.float64
EIGEN = WIDTH = 128
CLASSES, STEPS = 8, 100
PARTS = "weights", "training", "times"
TYPES = {"fp32": FP32, "bf16": BF16, "fp16": FP16}


# ---- The original --------------------------------------------------------------------------------------------------


def modules_of(folder):
    """(diffusion_net, fmaps_model) of a clone. What its geometry.py imports for meshes in files is not called here; if
    it is not installed, it is an empty module while these are imported."""
    sources, absent = folder / "src", []
    for name in ("scipy", "scipy.sparse", "scipy.sparse.linalg", "scipy.spatial", "sklearn", "sklearn.neighbors",
                 "robust_laplacian", "potpourri3d"):
        if name.split(".")[0] in absent or importlib.util.find_spec(name.split(".")[0]) is None:
            absent.append(name)
            sys.modules[name] = types.ModuleType(name)
            if "." in name:
                parent, child = name.rsplit(".", 1)
                setattr(sys.modules[parent], child, sys.modules[name])
    sys.path.insert(0, str(sources))
    import diffusion_net
    path = folder / "experiments" / "functional_correspondence" / "fmaps_model.py"
    spec = importlib.util.spec_from_file_location("fmaps_model", path)
    fmaps_model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fmaps_model)
    for name in absent:
        del sys.modules[name]
    return diffusion_net, fmaps_model


@contextlib.contextmanager
def networks_are(diffusion_net, network):
    """Meanwhile the original's programs find another class where they look for DiffusionNet."""
    own, diffusion_net.layers.DiffusionNet = diffusion_net.layers.DiffusionNet, network
    try:
        yield
    finally:
        diffusion_net.layers.DiffusionNet = own


def log_softmax(x):
    return F.log_softmax(x, dim=-1)


# ---- Meshes --------------------------------------------------------------------------------------------------------


def ball(seed, times):
    return plain.bumpy(seed, times)


def capsule(seed, times):
    """A ball that is drawn out, and bent."""
    vertices, faces = plain.bumpy(seed, times)
    x, y, z = vertices.unbind(1)
    return torch.stack((0.5 * x + 0.4 * z**2, 0.5 * y, 1.5 * z), 1), faces


def ring(seed, around, along):
    """A torus of around * along vertices, whose thickness changes."""
    generator = torch.Generator().manual_seed(seed)
    phases = 6 * torch.rand(4, generator=generator, dtype=FP64)
    u, v = torch.meshgrid(*(torch.arange(each, dtype=FP64) * (2 * torch.pi / each) for each in (around, along)),
                          indexing="ij")
    waves = 2 * u + phases[0], 3 * u + v + phases[1], 2 * v + phases[2]
    thick = 0.35 + 0.05 * sum(map(torch.sin, waves))
    wide = 1 + 0.1 * torch.sin(3 * u + phases[3]) + thick * torch.cos(v)
    vertices = torch.stack((wide * torch.cos(u), 0.8 * wide * torch.sin(u), thick * torch.sin(v)), -1).flatten(0, 1)
    numbers = torch.arange(around * along).view(around, along)
    a, b, c, d = numbers, numbers.roll(-1, 0), numbers.roll((-1, -1), (0, 1)), numbers.roll(-1, 1)
    faces = torch.cat([torch.stack(each, -1).flatten(0, 1) for each in ((a, b, c), (a, c, d))])
    return vertices, faces


def mesh_of(vertices, faces):
    """vertices, centred and at most 1 from the centre, faces, and the operators: a dict, in fp64."""
    vertices, faces = vertices.cuda(), faces.cuda()
    vertices = vertices - vertices.mean(0)
    vertices = vertices / vertices.norm(dim=1).max()
    found = plain.operators_of(vertices, faces, EIGEN)
    torch.cuda.empty_cache()
    return {"verts": vertices, "faces": faces} | dict(zip(("mass", "evals", "evecs", "gradX", "gradY"), found))


def to_area_one(mesh):
    """The same mesh, larger or smaller."""
    by = mesh["mass"].sum().rsqrt().item()
    powers = {"verts": 1, "mass": 2, "evals": -2, "evecs": -1, "gradX": -1, "gradY": -1}
    return mesh | {name: mesh[name] * by**power for name, power in powers.items()}


def to(mesh, dtype):
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in mesh.items()}


def call(net, x, mesh, **more):
    """As the original's programs call it."""
    return net(x, mesh["mass"], L=None, evals=mesh["evals"], evecs=mesh["evecs"], gradX=mesh["gradX"],
               gradY=mesh["gradY"], faces=mesh["faces"], **more)


def off(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


# ---- Part 1: weights -----------------------------------------------------------------------------------------------


def features_of(diffusion_net, mesh, kind):
    if kind == "xyz":
        return mesh["verts"]
    return diffusion_net.geometry.compute_hks_autoscale(mesh["evals"], mesh["evecs"], 16)


def segmentation(diffusion_net, kind, at):
    """The model of the original's human_segmentation_original.py."""
    return diffusion_net.layers.DiffusionNet(C_in={"xyz": 3, "hks": 16}[kind], C_out=CLASSES, C_width=128, N_block=4,
                                             last_activation=log_softmax, outputs_at=at, dropout=True)


def load(model, path, dtype):
    model.load_state_dict(torch.load(path, map_location="cpu"))
    return model.cuda().eval().to(dtype)


@torch.no_grad()
def same_classes(diffusion_net, path, kind, meshes):
    """A record of each mesh."""
    found = []
    for name, mesh in meshes.items():
        x = features_of(diffusion_net, mesh, kind)
        own = {"file": path.name, "mesh": name, "vertices": len(x)}
        exact = {at: call(load(segmentation(diffusion_net, kind, at), path, FP64), x, mesh)
                 for at in ("vertices", "faces")}
        own["classes"] = len(exact["vertices"].argmax(1).unique())

        def compare(label, at, out):
            same = (out.argmax(1) == exact[at].argmax(1)).double().mean().item()
            row = own.setdefault(label, {})
            row |= {f"share_of_{at}": same}
            if at == "vertices":
                row["error"] = off(out, exact[at])

        for at in exact:
            net = load(segmentation(diffusion_net, kind, at), path, FP32)
            compare("original, fp32", at, call(net, x.float(), to(mesh, FP32)))
            with networks_are(diffusion_net, nn.DiffusionNet):
                for label, dtype in TYPES.items():
                    net = load(segmentation(diffusion_net, kind, at), path, dtype)
                    compare(label, at, call(net, x.to(dtype), to(mesh, FP32)))
        found.append(own)
    return found


@torch.no_grad()
def same_features(diffusion_net, fmaps_model, path, kind, meshes):
    """A record of each pair of meshes."""
    found, names = [], list(meshes)
    for pair in zip(names, names[1:]):
        shapes = [to_area_one(meshes[name]) for name in pair]
        own = {"file": path.name, "mesh": " and ".join(pair), "vertices": [len(each["mass"]) for each in shapes]}

        def run(dtype):
            """(functional map, features, features) by the class that the model finds."""
            model = fmaps_model.FunctionalMapCorrespondenceWithDiffusionNetFeatures(input_features=kind)
            load(model, path, dtype)
            inputs = [features_of(diffusion_net, each, kind).to(dtype) for each in shapes]
            if dtype in (BF16, FP16):  # the map inverts matrices, which PyTorch does not in these types
                return None, *(call(model.feature_extractor, x, to(each, FP32)) for x, each in zip(inputs, shapes))
            return model(*((each["verts"], each["faces"], None, each["mass"], None, each["evals"], each["evecs"],
                            each["gradX"], each["gradY"], x, None)
                           for x, each in zip(inputs, (to(each, dtype) for each in shapes))))

        def compare(label, results):
            own[label] = {"error": max(off(*each) for each in zip(results[1:], exact[1:]))}
            if results[0] is not None:
                own[label]["error_of_map"] = off(results[0], exact[0])

        exact = run(FP64)
        compare("original, fp32", run(FP32))
        with networks_are(diffusion_net, nn.DiffusionNet):
            for label, dtype in TYPES.items():
                compare(label, run(dtype))
        found.append(own)
    return found


def part_weights(folder, diffusion_net, fmaps_model):
    meshes = {name: mesh_of(*each) for name, each in {
        "ball": ball(1, 4), "capsule": capsule(2, 4), "ring": ring(3, 80, 60), "large ring": ring(4, 125, 80),
        "large capsule": capsule(5, 5)}.items()}
    found = []
    for path in sorted(folder.glob("experiments/*/pretrained_models/*.pth")):
        kind = "hks" if "hks" in path.name else "xyz"
        if path.name.startswith("human_seg"):
            rows = same_classes(diffusion_net, path, kind, meshes)
        elif path.parents[1].name == "functional_correspondence":
            rows = same_features(diffusion_net, fmaps_model, path, kind, meshes)
        else:
            continue
        for row in rows:
            for label, each in row.items():
                if isinstance(each, dict):
                    print(f"{row['file']:28}{row['mesh']:28}{label:16}"
                          + ", ".join(f"{name} {value:.6g}" for name, value in each.items()))
        found += rows
    return found


# ---- Part 2: training ----------------------------------------------------------------------------------------------


def losses_of(network, meshes, dtype, autocast=False, dropout=False):
    """Of each step. The labels of faces are in which octant of the mesh they are."""
    torch.manual_seed(1)
    net = network(C_in=3, C_out=CLASSES, C_width=WIDTH, N_block=4, last_activation=log_softmax, outputs_at="faces",
                  dropout=dropout).cuda().to(dtype)
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=1e-3), []
    data = [(to(mesh, dtype), ((mesh["verts"][mesh["faces"]].mean(1) > 0) * torch.tensor([1, 2, 4]).cuda()).sum(1))
            for mesh in meshes]
    for step in range(STEPS):
        mesh, labels = data[step % len(data)]
        optimizer.zero_grad()
        with torch.autocast("cuda", BF16, enabled=autocast):
            out = call(net, mesh["verts"], mesh)
            loss = F.nll_loss(out.float() if autocast else out, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def part_training(diffusion_net):
    meshes = [mesh_of(*each) for each in (ball(11, 4), capsule(12, 4), ring(13, 64, 40), ball(14, 4))]
    original = diffusion_net.layers.DiffusionNet
    found = {"original, fp64": losses_of(original, meshes, FP64), "original, fp32": losses_of(original, meshes, FP32),
             "fp32": losses_of(nn.DiffusionNet, meshes, FP32),
             "bf16 by autocast": losses_of(nn.DiffusionNet, meshes, FP32, autocast=True),
             "original, fp32, dropout": losses_of(original, meshes, FP32, dropout=True),
             "fp32, dropout": losses_of(nn.DiffusionNet, meshes, FP32, dropout=True)}
    for label, losses in found.items():
        beside = found["original, fp32, dropout" if "dropout" in label else "original, fp64"]
        apart = [abs(one / other - 1) for one, other in zip(losses, beside)]
        print(f"{label:28}loss {losses[0]:.6f} to {losses[-1]:.6f}; apart at most {max(apart[:10]):.1e} in the first "
              f"10 steps, {max(apart):.1e} in all")
    return found


# ---- Part 3: times -------------------------------------------------------------------------------------------------


def extra_bytes(step):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def bytes_of(tensors):
    """Of tensors that have memory of their own, counted once."""
    found = {}
    for each in tensors:
        for part in (each,) if each.layout == torch.strided else (each._indices(), each._values()):
            found[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(found.values())


def tensors_in(mesh):
    for each in mesh:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, tuple):
            yield from tensors_in(each)


def module_step(module, x, arguments, d):
    """Forward, and with d the gradients of x and of all parameters."""
    x = x.detach().clone().requires_grad_()
    leaves = [x, *module.parameters()]

    def step():
        if d is None:
            with torch.no_grad():
                return (module(x, *arguments),)
        return torch.autograd.grad(module(x, *arguments), leaves, d, allow_unused=True)
    return step


class OfMesh(torch.nn.Module):
    """A network and its mesh: a function of x."""

    def __init__(self, net, mesh):
        super().__init__()
        self.net, self.mesh = net, mesh

    def forward(self, x):
        return self.net(x, self.mesh)


def graphed_step(module, x, mesh, d):
    """module_step() of two CUDA graphs, forward and backward."""
    x = x.detach().clone().requires_grad_()
    return module_step(torch.cuda.make_graphed_callables(OfMesh(module, mesh), (x,)), x, [], d)


def plain_step(function, names, weights, x, arguments, d):
    """The same of a function of weights."""
    leaves = {name: each.detach().clone().requires_grad_() for name, each in weights.items()}
    x = x.detach().clone().requires_grad_()

    def run():
        return function(leaves, *names, x, *arguments)

    def step():
        if d is None:
            with torch.no_grad():
                return (run(),)
        return torch.autograd.grad(run(), [x, *leaves.values()], d)
    return step


def kernels_ms(step):
    """Milliseconds of a call's kernels and copies by themselves, as the profiler adds them up, with whatever is in the
    L2 cache; None if it sees nothing."""
    calls = 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
    return sum(each.self_device_time_total for each in profile.key_averages()) / calls / 1e3 or None


def measure(diffusion_net, mesh, is_block, math, backward):
    """{row: record}."""
    def make(of):
        torch.manual_seed(1)
        if is_block:
            return of.DiffusionNetBlock(WIDTH, [WIDTH, WIDTH], dropout=False).cuda()
        return of.DiffusionNet(C_in=3, C_out=CLASSES, C_width=WIDTH, N_block=4, dropout=False).cuda()

    def as_original(each):
        """Its network calls a block with a dimension for meshes, and is called without."""
        return each.unsqueeze(0) if is_block and each is not None else each

    dtype = BF16 if math == "bf16" else FP32
    original = make(diffusion_net.layers)
    with torch.no_grad():
        for name, each in original.named_parameters():
            if name.endswith("diffusion_time"):
                each.uniform_(0, 0.1)
    exact = make(diffusion_net.layers).double()
    ours, original = make(nn).to(dtype), original.to(dtype)
    for each in (exact, ours):
        each.load_state_dict(original.state_dict())
    ins, outs = (WIDTH, WIDTH) if is_block else (3, CLASSES)
    x, d = (torch.randn(len(mesh["mass"]), size, device="cuda").to(dtype) for size in (ins, outs))
    d = d if backward else None
    mass, evals, evecs, *pair = (mesh[name].to(dtype) for name in ("mass", "evals", "evecs", "gradX", "gradY"))
    called = [mass, None, evals, evecs, *(each.to_dense() if dtype == BF16 else each for each in pair)]
    called_exactly = [as_original(each if each is None else each.double()) for each in called]
    called = list(map(as_original, called))
    spectral = [mass, evals, evecs, *(each.to(dtype) for each in nn.spectral_gradients(
        *(mesh[name].float() for name in ("gradX", "gradY", "evecs"))))]
    function, names = (plain.block, ["block"]) if is_block else (plain.network, [])
    weights = {".".join([*names, name]): each for name, each in original.state_dict().items()}
    own = ours.mesh(*spectral)

    steps = {
        "original": module_step(original, as_original(x), called, as_original(d)),
        "original, compiled": module_step(torch.compile(original), as_original(x), called, as_original(d)),
        "in the spectrum": plain_step(function, names, weights, x, spectral, d),
        "in the spectrum, compiled": plain_step(torch.compile(function), names, weights, x, spectral, d),
        "ours": module_step(ours, x, [own], d),
        "ours, graphed": graphed_step(ours, x, own, d),
    }
    steps = {name: step for name, step in steps.items() if "compiled" not in name
             or is_block and (math == "fp32" or name == "original, compiled")}
    read = {"original": called, "in the spectrum": spectral, "ours": own}  # by the names' beginnings

    def results_of(step):
        return [each if each is None or each.dim() < 3 else each.squeeze(0) for each in step()]

    expected = results_of(module_step(exact, as_original(x.double()), called_exactly,
                                      as_original(d.double() if backward else None)))
    found = {}
    for name, step in steps.items():
        results = results_of(step)
        there_are = [each for each in zip(results, expected, strict=True) if each[0] is not None]
        found[name] = {"error": times.error(*zip(*there_are)), "lacks": len(results) - len(there_are),
                       "mesh_bytes": bytes_of(tensors_in(read[name.split(", ")[0]]))}
        del results, there_are
        step()
        found[name]["extra_bytes"] = extra_bytes(step)
    from_host = times.milliseconds({name: types.SimpleNamespace(replay=step) for name, step in steps.items()})
    for name in steps:
        found[name] |= {"ms": from_host[name], "kernels": kernels_ms(steps[name])}
    return found


def part_times(diffusion_net, only):
    """Yields all that there is so far, after each problem."""
    mesh, problems = mesh_of(*ring(4, 125, 80)), {}
    for is_block in (True, False):
        for math in ("fp32", "bf16"):
            for backward in (False, True):
                label = ("block" if is_block else "network of 4 blocks") + f", {math}" + "; with backward" * backward
                if only not in label:
                    continue
                torch.compiler.reset()
                found = measure(diffusion_net, mesh, is_block, math, backward)
                for name, row in found.items():
                    print(f"{label:42}{name:28}{row['ms']:10.4f}{row['kernels'] or 0:10.4f}{row['error']:10.1e}"
                          f"{row['extra_bytes'] / 1e6:10.1f}{row['mesh_bytes'] / 1e6:10.1f}"
                          + f"; {row['lacks']} gradients are missing" * bool(row["lacks"]), flush=True)
                problems[label] = found
                yield problems


# ---- Records -------------------------------------------------------------------------------------------------------


def rows_of_weights(weights):
    """For each file the worst of its meshes."""
    rows = []
    for file in dict.fromkeys(each["file"] for each in weights):
        own = [each for each in weights if each["file"] == file]

        def share(label):
            found = [each[label]["share_of_vertices"] for each in own if "share_of_vertices" in each[label]]
            return 100 * min(found) if found else None

        def error(label):
            return max(each[label]["error"] for each in own)

        rows.append([file, *map(share, TYPES), *map(error, ("original, fp32", *TYPES))])
    return rows


def rows_of_times(problems):
    rows = []
    for label, found in problems.items():
        def us(of, *names):
            return [1e3 * found[name][of] if name in found and found[name][of] else None for name in names]

        rows.append([label, *us("ms", "original", "original, compiled", "in the spectrum, compiled", "ours",
                                  "ours, graphed"),
                     *us("kernels", "original", "ours"),
                     *(found[name]["extra_bytes"] / 1e6 for name in ("original", "ours")),
                     *(found[name]["error"] for name in ("original", "ours"))])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--original", type=pathlib.Path, required=True, help="a clone of the original's repository")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--only", default="", help="time what has this in its name: 'block, fp32'")
    parser.add_argument("--json", type=pathlib.Path, help="write records into this folder")
    options = parser.parse_args()
    diffusion_net, fmaps_model = modules_of(options.original)
    device, pytorch = torch.cuda.get_device_name(), torch.__version__
    weights = part_weights(options.original, diffusion_net, fmaps_model) if "weights" in options.parts else []
    losses = part_training(diffusion_net) if "training" in options.parts else {}
    if weights:
        finish(options.json and options.json / "pretrained.json", device, None,
               f"PyTorch {pytorch}. % of vertices with the same class, and relative error, at worst, beside fp64",
               ["file", *(f"{name}, %" for name in TYPES), "PyTorch, fp32", *(f"ours, {name}" for name in TYPES)],
               rows_of_weights(weights), weights=weights, losses=losses)
    for problems in part_times(diffusion_net, options.only) if "times" in options.parts else ():
        finish(options.json and options.json / "beside_original.json", device, None,
               f"PyTorch {pytorch}. us of a call from the host, and of its kernels alone; MB that it takes beside what "
               "it is given; error, at worst, beside fp64",
               ["", "original", "compiled", "dense, compiled", "ours", "graphed", "kernels: original", "ours",
                "MB: original", "ours", "error: original", "ours"],
               rows_of_times(problems), problems=problems)


if __name__ == "__main__":
    main()
