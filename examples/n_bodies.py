"""A Clifford network for n bodies: from where charged bodies are, and how fast, to where they will be.

    python3 examples/n_bodies.py [--systems 512] [--steps 400]

The program lets five bodies, each with a charge of 1 or -1, move under the forces between them, many times from random
starts. A network of fused_kernels.clifford() layers learns the positions at the end; each body sends every other one a
message, and all that a body knows is a multivector: numbers such as the charge, and vectors. So a start that is turned
gives a result that is turned, which the program shows. It trains the same network in PyTorch's own operators, too, from
the same weights on the same data, and shows that the losses are the same, and how long a step takes. It needs PyTorch, a
GPU, and the library: scons library.
"""

import argparse
import sys
import time

try:
    import torch
except ModuleNotFoundError:
    sys.exit("This example needs PyTorch, which is not installed.")

from clifford_layer import GRADES, eager, fused_kernels, turned

BODIES, FEATURES, TRIPLES = 5, 32, 20
PAIRS = [(i, j) for i in range(BODIES) for j in range(BODIES) if i != j]


def simulated(systems, generator, steps=200, dt=0.005):
    """(charges (systems, bodies, 1), positions and speeds (systems, bodies, 3) at the start, positions at the end), in
    fp64. Equal charges push each other away, others attract each other: the force is c_i c_j / (r^2 + 0.1), along the
    line between them, and a mass is 1. Leapfrog steps."""
    draw = dict(generator=generator, dtype=torch.float64)
    charges = torch.randint(0, 2, (systems, BODIES, 1), generator=generator).double() * 2 - 1
    start, speed = torch.randn(systems, BODIES, 3, **draw), torch.randn(systems, BODIES, 3, **draw) / 2

    def force(at):
        apart = at[:, :, None] - at[:, None]
        squares = apart.square().sum(-1, keepdim=True)
        each = charges[:, :, None] * charges[:, None] * apart / ((squares + 0.1) * (squares + 1e-9).sqrt())
        return each.sum(2)

    at, moving = start.clone(), speed.clone()
    for _ in range(steps):
        moving = moving + dt / 2 * force(at)
        at = at + dt * moving
        moving = moving + dt / 2 * force(at)
    return charges, start, speed, at


class GradeLinear(torch.nn.Module):
    """Mixes features by a matrix for each grade, which turning does not notice. Shapes: x (8, rows, inputs), the result
    (8, rows, outputs)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.randn(4, inputs, outputs) / inputs**0.5)
        self.bias = torch.nn.Parameter(torch.zeros(outputs))  # of the scalars

    def forward(self, x):
        mixed = torch.bmm(x, self.weights[GRADES])
        return torch.cat([mixed[:1] + self.bias, mixed[1:]])


class Layer(torch.nn.Module):
    """A sum of x, mixed, and of the product of x and y, each mixed before."""

    def __init__(self, inputs, features, product):
        super().__init__()
        self.left, self.right = GradeLinear(inputs, features), GradeLinear(inputs, features)
        self.straight, self.w = GradeLinear(inputs, features), torch.nn.Parameter(torch.randn(features, TRIPLES) / 4)
        self.product = product

    def forward(self, x):
        return self.straight(x) + self.product(self.left(x), self.right(x), self.w)


class Network(torch.nn.Module):
    """Positions at the end. Shapes: as simulated() has them, in fp32."""

    def __init__(self, product):
        super().__init__()
        self.enter = GradeLinear(3, FEATURES)
        self.messages = torch.nn.ModuleList(Layer(2 * FEATURES, FEATURES, product) for _ in range(2))
        self.updates = torch.nn.ModuleList(Layer(2 * FEATURES, FEATURES, product) for _ in range(2))
        self.leave = GradeLinear(FEATURES, 1)
        self.register_buffer("receivers", torch.tensor([i for i, _ in PAIRS]), persistent=False)
        self.senders = [j for _, j in PAIRS]

    def forward(self, charges, start, speed):
        systems = start.shape[0]
        center = start.mean(1, keepdim=True)
        x = start.new_zeros(8, systems, BODIES, 3)
        x[0, ..., 0] = charges[..., 0]
        x[1:4, ..., 1], x[1:4, ..., 2] = (start - center).permute(2, 0, 1), speed.permute(2, 0, 1)
        h = self.enter(x.reshape(8, -1, 3))
        for message, update in zip(self.messages, self.updates):
            of_body = h.reshape(8, systems, BODIES, FEATURES)
            pairs = torch.cat([of_body[:, :, self.receivers], of_body[:, :, self.senders]], 3)
            sent = message(pairs.reshape(8, -1, 2 * FEATURES)).reshape(8, systems, BODIES, BODIES - 1, FEATURES)
            h = h + update(torch.cat([h, sent.mean(3).reshape(8, -1, FEATURES)], 2))
        moved = self.leave(h)[1:4, :, 0].reshape(3, systems, BODIES).permute(1, 2, 0)
        return start + speed + moved  # without forces a second takes them as far as their speed


def train(network, data, steps):
    """(the losses, seconds for a step)."""
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        if step == steps // 2:
            torch.cuda.synchronize()
            began = time.perf_counter()
        optimizer.zero_grad()
        loss = (network(*data[:3]) - data[3]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    return torch.stack(losses).cpu(), (time.perf_counter() - began) / (steps - steps // 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", type=int, default=512, help="how many starts it learns from")
    parser.add_argument("--steps", type=int, default=400, help="of training")
    options = parser.parse_args()
    if options.systems < 1 or options.steps < 2:
        sys.exit("--systems has to be at least 1, and --steps at least 2.")
    if not torch.cuda.is_available():
        sys.exit("This example needs a GPU.")
    generator = torch.Generator().manual_seed(1)
    data, others = ([each.float().cuda() for each in simulated(options.systems, generator)] for _ in range(2))
    torch.manual_seed(2)
    ours, theirs = Network(fused_kernels.clifford).cuda(), Network(eager).cuda()
    theirs.load_state_dict(ours.state_dict())
    by_ours, by_theirs = train(ours, data, options.steps), train(theirs, data, options.steps)
    with torch.no_grad():
        found = ours(*others[:3])
        turn = lambda at: turned(torch.cat([at.new_zeros(1, *at.shape[:2]), at.permute(2, 0, 1),
                                            at.new_zeros(4, *at.shape[:2])]))[1:4].permute(1, 2, 0)  # noqa: E731
        off = (ours(others[0], turn(others[1]), turn(others[2])) - turn(found)).norm() / found.norm()
        unseen, straight = ((each - others[3]).square().mean().item() for each in (found, others[1] + others[2]))
    apart = ((by_ours[0] - by_theirs[0]).abs() / by_theirs[0])[:20].max().item()
    print(f"The result of a turned start is the turned result, but for {off:.1e} of it.")
    print(f"Mean square error, first step to last: ours {by_ours[0][0]:.4f} to {by_ours[0][-1]:.4f}, eager "
          f"{by_theirs[0][0]:.4f} to {by_theirs[0][-1]:.4f}; in the first 20 steps they differ by {apart:.1e} at most.")
    print(f"Of starts that it has not seen: {unseen:.4f}. Without forces it would be {straight:.4f}.")
    print(f"A step takes {1e3 * by_ours[1]:.2f} ms with clifford(), {1e3 * by_theirs[1]:.2f} ms with eager operators.")
    if off > 1e-4 or apart > 1e-2 or not unseen < straight:
        sys.exit("That is more than roundings explain, or nothing was learnt.")


if __name__ == "__main__":
    main()
