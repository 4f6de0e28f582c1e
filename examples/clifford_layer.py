"""A layer of a Clifford network whose product is fused_kernels.clifford(), or clifford_connected().

    python3 examples/clifford_layer.py [--connected]

Multivectors are (blades, batch, features), blades first, as flash-clifford has them, so that the layer can stand in the
place of its layer. The program turns its input, and shows that the result turns with it; then it trains the layer and
the same in PyTorch's own operators for 100 steps, from the same weights on the same data, and shows that the losses are
the same. It needs PyTorch, a GPU of compute capability 9.0, and the library: scons library.
"""

import argparse
import pathlib
import sys

try:
    import torch
except ModuleNotFoundError:
    sys.exit("This example needs PyTorch, which is not installed.")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "operators" / "python"))
import fused_kernels

GRADES = [0, 1, 1, 1, 2, 2, 2, 3]  # of 1, e1, e2, e3, e12, e13, e23, e123
BITS = [0b000, 0b001, 0b010, 0b100, 0b011, 0b101, 0b110, 0b111]
STEPS = 100


def products():
    """(i, j, k, sign, t): blade i times blade j is sign times blade k, of grade triple t."""
    found = []
    for i, a in enumerate(BITS):
        for j, b in enumerate(BITS):
            swaps = sum(bin((a >> later) & b).count("1") for later in (1, 2))
            found.append((i, j, BITS.index(a ^ b), (-1)**swaps))
    triples = sorted({(GRADES[i], GRADES[k], GRADES[j]) for i, j, k, _ in found})
    return [(*each, triples.index((GRADES[each[0]], GRADES[each[2]], GRADES[each[1]]))) for each in found]


def eager(x, y, w):
    """clifford() or clifford_connected() by PyTorch's operators."""
    x, y = (each * (1 + torch.erf(each[:1] * 0.5**0.5)) / 2 for each in (x, y))
    planes = {}
    for i, j, k, sign, t in products():
        planes[t, k] = planes.get((t, k), 0) + sign * x[i] * y[j]
    z = [0] * 8
    for (t, k), plane in planes.items():
        z[k] = z[k] + (plane * w[:, t] if w.dim() == 2 else plane @ w[t])
    squares = [sum(z[k].square().mean(1, keepdim=True) for k in range(8) if GRADES[k] == c) for c in range(4)]
    return torch.stack([z[k] * (squares[c] + 1e-6).rsqrt() for k, c in enumerate(GRADES)])


class CliffordLayer(torch.nn.Module):
    """out = product of x and y = x mixed by a matrix for each grade. Shapes: x and out (8, batch, features)."""

    def __init__(self, features, connected=False, product=None):
        super().__init__()
        own = fused_kernels.clifford_connected if connected else fused_kernels.clifford
        self.product = product or own
        self.mix = torch.nn.Parameter(torch.randn(4, features, features) / features**0.5)
        shape = (20, features, features) if connected else (features, 20)
        self.w = torch.nn.Parameter(torch.randn(shape) / (20 * (features if connected else 1))**0.5)

    def forward(self, x):
        y = torch.bmm(x, self.mix[GRADES])  # blades of a grade have one matrix: turning commutes with it
        return self.product(x, y, self.w)


def turned(x):
    """By a quarter turn from e1 to e2: e1 becomes e2, e2 becomes -e1, and products of vectors follow."""
    one, e1, e2, e3, e12, e13, e23, e123 = x
    return torch.stack([one, -e2, e1, e3, e12, -e23, e13, e123])


def losses(layer, x, target):
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connected", action="store_true", help="a matrix of weights for each triple of grades")
    connected = parser.parse_args().connected
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("This example needs a GPU of compute capability 9.0.")
    torch.manual_seed(1)
    batch, features = 512, 64
    ours = CliffordLayer(features, connected).cuda()
    theirs = CliffordLayer(features, connected, eager).cuda()
    theirs.load_state_dict(ours.state_dict())
    x, target = torch.randn(2, 8, batch, features, device="cuda")
    with torch.no_grad():
        difference = (ours(turned(x)) - turned(ours(x))).norm() / ours(x).norm()
    print(f"The result of a turned input is the turned result, but for {difference:.1e} of it.")
    by_ours, by_theirs = losses(ours, x, target), losses(theirs, x, target)
    off = ((by_ours - by_theirs).abs() / by_theirs).max().item()
    print(f"Loss of step 1 and {STEPS}: ours {by_ours[0]:.6f} and {by_ours[-1]:.6f}, eager {by_theirs[0]:.6f} and "
          f"{by_theirs[-1]:.6f}; the largest difference is {off:.1e}.")
    if off > (1e-2 if connected else 1e-3) or not by_ours[-1] < by_ours[0]:
        sys.exit("That is more than roundings explain, or nothing was learnt.")


if __name__ == "__main__":
    main()
