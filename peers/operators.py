"""What a peer is, and what all operators share.

A module of this folder holds one lesson's operator: its formula as a PyTorch user writes it, and
the same once more in fp64. Its function `case(problem, draw)` takes a problem of the lesson's
record and makes a Case of it; `draw` makes random inputs. The module's twin, *_triton.py, holds the
kernels.
"""
from dataclasses import dataclass
import functools
from typing import Callable, Dict, List

import torch

TYPES = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32,
}


@dataclass
class Case:
    """`expected`: the outputs in fp64. `peers`: by name, a function that prepares what is not timed
    (a forward pass before a backward one) and returns the call that is: without arguments, and with
    a tuple of outputs in the order of `expected`."""

    expected: List[torch.Tensor]
    peers: Dict[str, Callable]


def drawer(problem, seed, device):
    """draw(*shape, scale, center): random numbers, uniform in [center - scale, center + scale) as
    the lessons' are, of the problem's type."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape, scale=1.0, center=0.0):
        numbers = torch.empty(shape, device=device)
        numbers.uniform_(center - scale, center + scale, generator=generator)
        return numbers.to(TYPES[problem["dtype"]])

    return draw


@functools.lru_cache(maxsize=None)
def compiled(function, mode="default"):
    """torch.compile. fullgraph: what it can't compile is an error, where it would quietly run eager
    code."""
    return torch.compile(function, dynamic=DYNAMIC, fullgraph=True, mode=mode)


# How torch.compile may be asked: a peer is the faster of both. The second one tries many kernels for
# each product, and takes its time for that. (Without CUDA graphs of its own: all peers run in one.)
MODES = {"torch.compile": "default", "torch.compile, max-autotune": "max-autotune-no-cudagraphs"}


DYNAMIC = False  # a version for each size


def for_many_sizes():
    """From now on torch.compile does what it does by default: of the second size it learns what changes,
    and makes a version for all sizes. To compile, and to tune, for each would take too long."""
    global DYNAMIC
    DYNAMIC = None
    in_default_mode()


def in_default_mode():
    """From now on torch.compile is a peer in its default mode only."""
    MODES.pop("torch.compile, max-autotune", None)


def by_mode(prepare):
    """torch.compile's peers: by name, prepare(mode)."""
    return {name: functools.partial(prepare, mode) for name, mode in MODES.items()}


def in_fp64(*tensors):
    return [tensor.double() for tensor in tensors]


def forward_peers(eager, inputs, kernels):
    """The peers of a forward pass. `eager(*inputs)` returns a tuple of outputs. `kernels`: by name,
    a function that imports Triton and returns another function of that kind."""

    def peer(load):
        def prepare():
            function = load()
            return lambda: function(*inputs)

        return prepare

    compiled_peers = by_mode(lambda mode: compiled(eager, mode))
    peers = {"PyTorch": lambda: eager, **compiled_peers, **kernels}
    return {name: peer(load) for name, load in peers.items()}


def backward_call(function, inputs, wanted, gradients):
    """Runs `function(*inputs)`, and returns a call that computes the gradients with respect to
    inputs[i] for i in `wanted`, from those with respect to the outputs: autograd's backward pass
    alone, from what the forward pass saved."""
    leaves = [tensor.detach() for tensor in inputs]
    for i in wanted:
        leaves[i].requires_grad_()
    outputs = function(*leaves)
    sources = [leaves[i] for i in wanted]
    return lambda: torch.autograd.grad(outputs, sources, gradients, retain_graph=True)
