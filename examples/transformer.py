"""A small transformer, trained with PyTorch's attention and with the library's.

    python3 examples/transformer.py [--eager] [--layers 12] [--json FILE]

Trains one network for 50 steps from the same weights on the same sequences, once with each attention:
scaled_dot_product_attention() by cuDNN, the same by FlashAttention, and fused_kernels.attention(). The three take their
steps in turn. It prints how far the losses are apart, and how long a step takes, forward and backward and optimizer: as
PyTorch runs the blocks, and with each block compiled by torch.compile. cuDNN and FlashAttention round in other places,
so how far these two are apart says what rounding does to the losses. It needs PyTorch, a GPU of compute capability 8.0,
where cuDNN's attention is there, and the library: scons library. FUSED_KERNELS_CAPABILITY=8.0 makes a newer GPU take
the library's kernels for 8.0.

Weights are fp32, and torch.autocast has bf16. A token of a sequence is followed by one certain token half of the time,
else by any: so there is something to learn.
"""

import argparse
import contextlib
import copy
import json
import os
import pathlib
import statistics
import sys

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ModuleNotFoundError:
    sys.exit("This example needs PyTorch, which is not installed.")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "operators" / "python"))
import fused_kernels

WIDTH, HEADS, LENGTH, BATCH, TOKENS, STEPS, WARM = 1024, 16, 2048, 8, 8192, 50, 20


def by_cudnn(q, k, v):
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def by_flash(q, k, v):
    """As by_cudnn(): a function of its own, which torch.compile takes for another one."""
    return by_cudnn(q, k, v)


def ours(q, k, v):
    return fused_kernels.attention(q, k, v, causal=True)


# By name: the function, and what chooses PyTorch's kernel.
ATTENTIONS = {"cuDNN": (by_cudnn, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
              "FlashAttention": (by_flash, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
              "ours": (ours, contextlib.nullcontext)}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(),
                                       torch.nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, attention):
        """x (batch, length, WIDTH). q, k and v lie side by side, as the projection leaves them."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(2, (3, HEADS, WIDTH // HEADS)).unbind(2)
        x = x + self.out(attention(q, k, v).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Transformer(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(TOKENS, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.logits = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens, attention):
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x, attention)
        return self.logits(self.norm(x))


def sequences():
    """(STEPS, BATCH, LENGTH + 1) tokens, of 256 kinds."""
    generator = torch.Generator().manual_seed(2)
    follows = torch.randperm(256, generator=generator)
    tokens = torch.randint(256, (STEPS, BATCH, LENGTH + 1), generator=generator)
    certain = torch.rand(tokens.shape, generator=generator) < 0.5
    for t in range(LENGTH):
        tokens[..., t + 1] = torch.where(certain[..., t], follows[tokens[..., t]], tokens[..., t + 1])
    return tokens.cuda()


class Training:
    """A network with one of the attentions. It keeps the loss of each step, and how long the step took."""

    def __init__(self, network, attention, chosen):
        self.network, self.attention, self.chosen = network, attention, chosen
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4, fused=True)
        self.losses, self.times = [], []

    def step(self, tokens):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.optimizer.zero_grad()
        with self.chosen(), torch.autocast("cuda", torch.bfloat16):
            logits = self.network(tokens[:, :-1], self.attention)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        end.record()
        end.synchronize()
        self.times.append(start.elapsed_time(end))
        self.losses.append(loss.item())


def apart(one, other):
    """The largest relative difference of two trainings' losses."""
    return max(abs(a - b) / b for a, b in zip(one.losses, other.losses))


def compare(layers, compiled):
    """Prints a line. The problem of a record, and whether the losses agree."""
    torch.manual_seed(1)
    network = Transformer(layers).cuda()
    trainings = {name: Training(copy.deepcopy(network), *each) for name, each in ATTENTIONS.items()}
    for each in trainings.values() if compiled else ():
        for block in each.network.blocks:
            block.compile()
    for tokens in sequences():
        for each in trainings.values():
            each.step(tokens)
    own, cudnn, flash = (trainings[name] for name in ("ours", "cuDNN", "FlashAttention"))
    off, others = apart(own, cudnn), apart(flash, cudnn)
    times = {name: statistics.median(each.times[WARM:]) for name, each in trainings.items()}
    name = "compiled" if compiled else "eager"
    if capability := os.environ.get("FUSED_KERNELS_CAPABILITY"):
        name += f", ours as on {capability}"
    shown = ", ".join(f"{each} {time:.2f} ms" for each, time in times.items())
    print(f"{name}: loss {own.losses[0]:.4f} to {own.losses[-1]:.4f}, apart from cuDNN's by {off:.1e}, and "
          f"FlashAttention's by {others:.1e}; a step takes {shown}: {times['cuDNN'] / times['ours']:.3f} times as fast "
          f"as with cuDNN, {times['FlashAttention'] / times['ours']:.3f} with FlashAttention", flush=True)
    kernels = [{"name": each, "ms": {"median": time}, "loss": trainings[each].losses[-1],
                "apart": apart(trainings[each], cudnn)} for each, time in times.items()]
    return {"name": name, "kernels": kernels}, off <= 2 * others + 1e-4 and own.losses[-1] < 0.9 * own.losses[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--eager", action="store_true", help="only as PyTorch runs the blocks")
    parser.add_argument("--json", help="write the times of the steps to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        sys.exit("This example needs a GPU of compute capability 8.0 or newer.")
    compared = [compare(options.layers, compiled) for compiled in (False, True)[:1 if options.eager else 2]]
    if options.json:
        record = {"device": {"name": torch.cuda.get_device_name()}, "pytorch": torch.__version__,
                  "problems": [problem for problem, _ in compared]}
        pathlib.Path(options.json).write_text(json.dumps(record, indent=2) + "\n")
    if not all(agree for _, agree in compared):
        sys.exit("The losses are further apart than roundings explain, or nothing was learnt.")


if __name__ == "__main__":
    main()
