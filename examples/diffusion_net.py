"""DiffusionNet's two blocks in a network, by PyTorch's operators and by the library's.

    python3 examples/diffusion_net.py [vertices ...] [--json FILE]    # 10000 and 100000, if none are named

Trains one network twice for 100 steps, from the same weights on the same data: with spatial diffusion and gradient
features as PyTorch's operators, and as fused_kernels.diffusion() and gradient_features(). It prints how far the losses
are apart, and how long a step takes, forward and backward and optimizer: by the operators, by torch.compile of these,
and by ours. It needs PyTorch, a GPU of compute capability 9.0, and the library: scons library.

The mesh is made up: its eigenvectors are random and orthonormal, and so are their gradients. What a step computes, and
how long it takes, does not depend on that.
"""

import argparse
import copy
import json
import pathlib
import statistics
import sys

try:
    import torch
except ModuleNotFoundError:
    sys.exit("This example needs PyTorch, which is not installed.")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "operators" / "python"))
import fused_kernels

EIGEN, WIDTH, BLOCKS, STEPS = 128, 256, 2, 100
TYPE = torch.bfloat16


def eager_diffusion(x, basis, mass, evalues, times):
    spectral = torch.exp(-evalues[:, None] * times) * (basis.t() @ (mass[:, None] * x))
    return basis @ spectral, spectral


def eager_features(x, gr, gi, lr, li):
    xr, xi = gr @ x, gi @ x
    return torch.tanh(xr * (xr @ lr.t() - xi @ li.t()) + xi * (xi @ lr.t() + xr @ li.t()))


class Block(torch.nn.Module):
    """x + MLP(x, diffused x, gradient features of the diffused x)."""

    def __init__(self):
        super().__init__()
        self.times = torch.nn.Parameter(torch.rand(WIDTH, dtype=TYPE))
        self.lr, self.li = (torch.nn.Parameter((torch.randn(WIDTH, WIDTH) / WIDTH**0.5).to(TYPE)) for _ in range(2))
        self.mlp = torch.nn.Sequential(torch.nn.Linear(3 * WIDTH, WIDTH, dtype=TYPE), torch.nn.ReLU(),
                                       torch.nn.Linear(WIDTH, WIDTH, dtype=TYPE))

    def forward(self, x, mesh, diffusion, features):
        basis, mass, evalues, gr, gi = mesh
        out, spectral = diffusion(x, basis, mass, evalues, self.times)
        return x + self.mlp(torch.cat((x, out, features(spectral, gr, gi, self.lr, self.li)), 1))


class Network(torch.nn.Module):
    def __init__(self, diffusion, features):
        super().__init__()
        self.operators = diffusion, features
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x, mesh):
        for block in self.blocks:
            x = block(x, mesh, *self.operators)
        return x


def made_up_mesh(vertices):
    """basis, mass, evalues, gr, gi."""
    # With masses of 1 / vertices the basis is orthonormal if its columns' squares have the mean 1.
    basis = torch.linalg.qr(torch.randn(vertices, EIGEN, device="cuda"))[0] * vertices**0.5
    mass = torch.full((vertices,), 1 / vertices, device="cuda")
    gr, gi = torch.randn(2, vertices, EIGEN, device="cuda") / EIGEN**0.5
    return [each.to(TYPE).contiguous() for each in (basis, mass, torch.linspace(0, 4, EIGEN, device="cuda"), gr, gi)]


class Training:
    def __init__(self, network, run, x, target, mesh):
        self.run, self.data = run, (x, target, mesh)
        self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-2)

    def step(self):
        x, target, mesh = self.data
        self.optimizer.zero_grad()
        loss = (self.run(x, mesh) - target).float().square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def milliseconds(self):
        """Of a step: the median of 30."""
        times = []
        for _ in range(30):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)


def compare(vertices):
    """Prints a line. Returns whether the losses agree, and the milliseconds of a step by name."""
    torch.manual_seed(1)
    mesh = made_up_mesh(vertices)
    x, target = (torch.randn(vertices, WIDTH, device="cuda").to(TYPE) for _ in range(2))
    eager = Network(eager_diffusion, eager_features).cuda()
    networks = {"eager": eager, "compiled": copy.deepcopy(eager), "ours": copy.deepcopy(eager)}
    networks["ours"].operators = fused_kernels.diffusion, fused_kernels.gradient_features
    trainings = {name: Training(each, torch.compile(each) if name == "compiled" else each, x, target, mesh)
                 for name, each in networks.items()}
    losses = {name: torch.stack([each.step() for _ in range(STEPS)]) for name, each in trainings.items()}
    off = ((losses["ours"] - losses["eager"]).abs() / losses["eager"]).max().item()
    times = {name: each.milliseconds() for name, each in trainings.items()}
    print(f"{vertices:8} vertices: loss {losses['ours'][0]:.4f} to {losses['ours'][-1]:.4f}, apart by {off:.1e}; a "
          f"step takes {', '.join(f'{name} {time:.2f} ms' for name, time in times.items())}: "
          f"{times['eager'] / times['ours']:.2f} times as fast as eager, {times['compiled'] / times['ours']:.2f} as "
          "compiled")
    agree = off < 2e-2 and bool(losses["ours"][-1] < losses["ours"][0])  # bf16 rounds by 4e-3
    return agree, times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vertices", nargs="*", type=int, default=[10_000, 100_000])
    parser.add_argument("--json", help="write the times of the steps to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("This example needs a GPU of compute capability 9.0.")
    compared = {vertices: compare(vertices) for vertices in options.vertices}
    if options.json:
        problems = [{"name": f"{vertices} vertices", "kernels": [{"name": name, "ms": {"median": time}}
                                                                 for name, time in times.items()]}
                    for vertices, (_, times) in compared.items()]
        record = {"device": {"name": torch.cuda.get_device_name()}, "pytorch": torch.__version__, "problems": problems}
        pathlib.Path(options.json).write_text(json.dumps(record, indent=2) + "\n")
    if not all(agree for agree, _ in compared.values()):
        sys.exit("The losses are further apart than roundings explain, or nothing was learnt.")


if __name__ == "__main__":
    main()
