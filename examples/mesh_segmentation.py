"""Trains DiffusionNet to segment meshes, by fused_kernels.nn and by PyTorch's operators.

    python3 examples/mesh_segmentation.py [--steps 300] [--type fp32|bf16]

It makes its meshes: pears with bumps, of 642 vertices. A vertex belongs to the thin end, the middle or the thick end of
its pear. Of a vertex the networks see its heat kernel signature: how much of the heat that it is given is still there
after some times. That does not depend on how a pear lies. The networks begin with the same weights, and learn from the
same meshes in the same order. Then they label pears that they have not seen. The time of a step is from the host. It
needs PyTorch, a GPU of compute capability 8.0, and the library: scons library.
"""

import argparse
import pathlib
import statistics
import sys
import time

try:
    import torch
except ModuleNotFoundError:
    sys.exit("This example needs PyTorch, which is not installed.")

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "operators" / "python"), str(ROOT / "operators" / "tests" / "gpu")]
import plain
from fused_kernels.nn import DiffusionNet

EIGEN, SIGNATURES, CLASSES, WIDTH, BLOCKS = 64, 8, 3, 64, 2
NAMES = "thin end", "middle", "thick end"
LEARNT_FROM, OTHERS = 12, 4


def pear(seed):
    """(signatures, labels, what a network reads of the mesh)."""
    vertices, faces = plain.bumpy(seed)
    x, y, z = vertices.unbind(1)
    height = z / z.abs().max()
    labels = (height > -1 / 3).long() + (height > 1 / 3).long()
    wide = 1 + height / 2
    vertices = torch.stack((x * wide, y * wide, 1.5 * height), 1)
    mass, evals, evecs, gradX, gradY = plain.operators_of(vertices, faces, EIGEN)
    times = torch.logspace(-2, 0, SIGNATURES, dtype=torch.float64)
    signatures = evecs.square() @ torch.exp(-evals[:, None] * times)
    signatures = signatures / signatures.mean(0) - 1
    mesh = [each.float().cuda() for each in (mass, evals, evecs, gradX, gradY)]
    return signatures.float().cuda(), labels.cuda(), mesh


class Ours:
    def __init__(self, net, examples):
        self.net, self.parameters = net, list(net.parameters())
        self.meshes = [net.mesh(*mesh) for _, _, mesh in examples]  # once a mesh

    def __call__(self, at, x):
        return self.net(x.to(self.parameters[0].dtype), self.meshes[at])


class Plain:
    def __init__(self, net, examples):
        self.weights = {name: each.detach().clone().requires_grad_() for name, each in net.state_dict().items()}
        self.meshes, self.parameters = [mesh for _, _, mesh in examples], list(self.weights.values())

    def __call__(self, at, x):
        return plain.network(self.weights, x, *self.meshes[at])


def train(run, examples, steps):
    """The loss of each step, and the milliseconds of a step after the first ones, in which PyTorch loads kernels."""
    optimizer, losses = torch.optim.Adam(run.parameters, lr=1e-3), []
    for step in range(steps):
        if step == min(LEARNT_FROM, steps - 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
        at = step % LEARNT_FROM
        x, labels, _ = examples[at]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(run(at, x).float(), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    return torch.stack(losses).tolist(), 1e3 * (time.perf_counter() - start) / max(steps - LEARNT_FROM, 1)


@torch.no_grad()
def share_of_right(run, examples):
    """By class, of the meshes that were not learnt from."""
    right, count = torch.zeros(CLASSES), torch.zeros(CLASSES)
    for at in range(LEARNT_FROM, LEARNT_FROM + OTHERS):
        x, labels, _ = examples[at]
        found = run(at, x).argmax(1)
        for one in range(CLASSES):
            right[one] += (found[labels == one] == one).sum().item()
            count[one] += (labels == one).sum().item()
    return (right / count).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--type", choices=["fp32", "bf16"], default="fp32", help="of our network; PyTorch's has fp32")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        sys.exit("This example needs a GPU of compute capability 8.0 or newer.")
    examples = [pear(seed) for seed in range(LEARNT_FROM + OTHERS)]
    torch.manual_seed(1)
    net = DiffusionNet(C_in=SIGNATURES, C_out=CLASSES, C_width=WIDTH, N_block=BLOCKS, dropout=False).cuda()
    runs = {"PyTorch": Plain(net, examples)}
    runs["ours"] = Ours(net.to(torch.bfloat16) if options.type == "bf16" else net, examples)
    losses, times = zip(*(train(run, examples, options.steps) for run in runs.values()))
    print(f"{'steps':>10}" + "".join(f"{f'loss, {name}':>16}" for name in runs))
    for first in range(0, options.steps, LEARNT_FROM * 5):
        means = [statistics.mean(each[first:first + LEARNT_FROM * 5]) for each in losses]
        print(f"{f'from {first}':>10}" + "".join(f"{each:16.6f}" for each in means))
    print("\nA step takes " + ", ".join(f"{ms:.2f} ms by {name}" for name, ms in zip(runs, times)) + ".")
    print(f"Of the vertices of {OTHERS} meshes that were not learnt from, these are labelled right:")
    for name, run in runs.items():
        shares = share_of_right(run, examples)
        print(f"{name:>10}: " + ", ".join(f"{part} {share:.1%}" for part, share in zip(NAMES, shares)))


if __name__ == "__main__":
    main()
