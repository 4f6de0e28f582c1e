"""Milliseconds on the GPU of a block of DiffusionNet, by fused_kernels.nn, by PyTorch's operators (plain.py) and by
torch.compile of these: `python3 operators/tests/gpu/network.py [--vertices N] [--json FILE]`, where
FUSED_KERNELS_LIBRARY names the library. A record belongs into results/<gpu>/python/network.json.

Rows are measured as times.py measures them: each a CUDA graph, in turn, with a cold L2 cache; the median counts.
Gradients are of x and of all parameters. In all three the gradients of the spectrum are there already, and in `ours`
what mesh() returns; `mesh anew` is ours where that is made in each call. `sparse` is PyTorch's with sparse gradX and
gradY, as the original has them, of seven numbers a row; backward sorts these, which no graph can hold, so it is
launched from the host, and that time counts. In tf32 PyTorch may multiply fp32 that way, and ours does. The error is
the largest one against fp64, relative in the Frobenius norm."""

import argparse
import statistics

import torch

import cases
from cases import BF16, FP32
import plain
import times

from cold_cache import ColdCache  # in a folder that times has found
from fused_kernels import nn

EIGEN = WIDTH = 128
NAMES = "PyTorch", "compiled", "ours", "mesh anew", "sparse"


def made_up_mesh(vertices):
    """mass, evals, evecs, and sparse gradX and gradY."""
    # With masses of 1 / vertices the basis is orthonormal if its columns' squares have the mean 1.
    evecs = torch.linalg.qr(torch.randn(vertices, EIGEN, device="cuda"))[0].contiguous() * vertices**0.5
    mass = torch.full((vertices,), 1 / vertices, device="cuda")
    rows = torch.arange(vertices, device="cuda").repeat_interleave(7)

    def sparse():
        near = (rows + torch.randint(-50, 51, rows.shape, device="cuda")) % vertices
        values = torch.randn(len(rows), device="cuda") / 7**0.5
        return torch.sparse_coo_tensor(torch.stack((rows, near)), values, (vertices, vertices)).coalesce()

    return mass, torch.linspace(0, 100, EIGEN, device="cuda"), evecs, sparse(), sparse()


def step_of(run, leaves, d):
    """A call: forward alone, or with the gradients of `leaves`."""
    if d is None:
        def step():
            with torch.no_grad():
                return (run(),)
        return step
    return lambda: torch.autograd.grad(run(), leaves, d)


def by_plain(function, weights, x, mesh, d):
    leaves = {name: each.detach().clone().requires_grad_() for name, each in weights.items()}
    x = x.detach().clone().requires_grad_()
    return step_of(lambda: function(leaves, "block", x, *mesh), [x, *leaves.values()], d)


def from_the_host(step):
    cache, own = ColdCache(torch.cuda.get_device_properties(0).L2_cache_size), []
    for sample in range(times.SAMPLES + 3):  # the first ones warm up
        cache.make_cold(sample)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        own.append(start.elapsed_time(end))
    return statistics.median(own[3:])


def measure(vertices, dtype, backward):
    """({name: ms}, {name: error})."""
    torch.manual_seed(1)
    block = nn.DiffusionNetBlock(WIDTH, [WIDTH, WIDTH], dropout=False).cuda().to(dtype)
    with torch.no_grad():
        block.diffusion.diffusion_time.uniform_(0, 0.1)
    mass, evals, evecs, *sparse = made_up_mesh(vertices)
    spectral = nn.spectral_gradients(*sparse, evecs)
    tensors = [each.to(dtype) for each in (mass, evals, evecs, *spectral)]
    x, d = (torch.randn(vertices, WIDTH, device="cuda").to(dtype) for _ in range(2))
    d = d if backward else None
    weights = {f"block.{name}": each.detach() for name, each in block.named_parameters()}
    own, own_x = block.mesh(*tensors), x.clone().requires_grad_()
    leaves = [own_x, *block.parameters()]
    steps = {"PyTorch": by_plain(plain.block, weights, x, tensors, d),
             "compiled": by_plain(torch.compile(plain.block), weights, x, tensors, d),
             "ours": step_of(lambda: block(own_x, own), leaves, d),
             "mesh anew": step_of(lambda: block(own_x, tensors[0], None, *tensors[1:]), leaves, d)}
    exact = by_plain(plain.block, {name: each.double() for name, each in weights.items()}, x.double(),
                     [each.double() for each in tensors], d.double() if backward else None)()
    errors = {name: times.error(step(), exact) for name, step in steps.items()}
    found = times.milliseconds({name: times.captured(step) for name, step in steps.items()})
    if dtype == FP32:
        found["sparse"] = from_the_host(by_plain(plain.block, weights, x, [*tensors[:3], *sparse], d))
    return found, errors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=10_000)
    parser.add_argument("--json", help="write a record to this file")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; ms, L2 cache cold, median of {times.SAMPLES}")
    print(f"{'':76}" + "".join(f"{name:>10}" for name in (*NAMES, "error", "PyTorch's")))
    problems = []
    for math, dtype in ("fp32", FP32), ("tf32", FP32), ("bf16", BF16):
        for backward in (False, True):
            torch.compiler.reset()
            torch.set_float32_matmul_precision("high" if math == "tf32" else "highest")
            label = (f"block of DiffusionNet, {options.vertices} x {WIDTH}, {EIGEN} eigenvectors, {math}"
                     + ("; with backward" if backward else ""))
            found, errors = measure(options.vertices, dtype, backward)
            shown = (f"{found[name]:10.4f}" if name in found else f"{'':10}" for name in NAMES)
            print(f"{label:76}" + "".join(shown) + f"{errors['ours']:10.1e}{errors['PyTorch']:10.1e}")
            kernels = [{"name": name, "ms": {"median": time}, "error": errors.get(name)}
                       for name, time in found.items()]
            problems.append({"name": label, "kernels": kernels})
            if options.json:  # what there is so far
                cases.write_record(options.json, problems)


if __name__ == "__main__":
    main()
