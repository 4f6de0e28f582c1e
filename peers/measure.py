"""Verifies and times peers as common/verify and common/measure do kernels.

Each peer's call is captured in a CUDA graph: one call to be timed with a cold L2 cache, 20 where
the lesson times 20 in a graph. So neither Python nor its launches count against a peer.
"""
import contextlib
from dataclasses import dataclass, field
import gc
import math
import random
import traceback
from typing import List, Optional

import torch

from cold_cache import ColdCache

GRAPH_CALLS = 20
WORST_TO_FROBENIUS = 16  # kWorstToFrobenius of common/problem.h


@dataclass
class Measured:
    """What a peer did in one round. reason: why it did not run, if it did not."""

    samples: List[float] = field(default_factory=list)  # ms
    error: float = 0.0
    worst_error: float = 0.0
    ok: bool = False
    reason: Optional[str] = None


def errors_of(output, expected):
    """Relative Frobenius error, and the largest error in units of the rms of `expected`. NaN or
    infinite if any element is."""
    if output.shape != expected.shape:
        raise ValueError(f"a result is {tuple(output.shape)}, not {tuple(expected.shape)}")
    difference = output.detach().double() - expected
    norm = torch.linalg.vector_norm(expected).item()
    frobenius = torch.linalg.vector_norm(difference).item() / norm
    # max() of a tensor with a NaN is NaN.
    worst = difference.abs().max().item() / (norm / math.sqrt(expected.numel()))
    return frobenius, worst


def verify(outputs, expected, tolerance, measured):
    """Notes the largest error of `outputs` in `measured`, and whether all are within the tolerance.
    The first one that is not ends it: what was wrong once stays so."""
    if not measured.ok:
        return
    if len(outputs) != len(expected):
        raise ValueError(f"{len(outputs)} results, not {len(expected)}")
    for output, reference in zip(outputs, expected):
        frobenius, worst = errors_of(output, reference)
        # Written so that a NaN is never ok.
        measured.ok = frobenius <= tolerance and worst <= WORST_TO_FROBENIUS * tolerance
        if not measured.ok or frobenius > measured.error:
            measured.error, measured.worst_error = frobenius, worst
        if not measured.ok:
            return


@contextlib.contextmanager
def tf32_products(allowed):
    """Whether fp32 products may round their operands to TF32, for the duration of a with."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32 = before


class Captured:
    """A peer's call in a CUDA graph. Needs a current stream that is not the default one."""

    def __init__(self, prepare, calls):
        call = prepare()
        for _ in range(2):  # compiles, and tunes
            call()
        torch.cuda.synchronize()
        self.call, self.graph = call, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
            for _ in range(calls):
                self.outputs = None  # one set of outputs, as the lessons have, not two in turn
                self.outputs = call()

    def verify(self, expected, tolerance, measured):
        for output in self.outputs:
            output.fill_(float("nan"))
        self.graph.replay()
        verify(self.outputs, expected, tolerance, measured)


def sample_all(captured, mode, l2_bytes, budget_ms, most, order):
    """Times each peer (by name) once per turn, in a random order: {name: [ms]}. As many turns as
    take budget_ms, at least 2, at most `most`."""
    calls = GRAPH_CALLS if mode == "graph" else 1
    cache = ColdCache(l2_bytes) if mode == "cold" else None
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time_one(peer):
        start.record()
        peer.graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    turn_ms = sum(time_one(peer) for peer in captured.values())
    turns = int(min(max(budget_ms / turn_ms, 2), most))
    samples = {name: [] for name in captured}
    for turn in range(turns):
        for name in order.sample(sorted(captured), len(captured)):
            # As in the lesson: the one cache is full of other results, the other is warm.
            cache.make_cold(turn) if cache else captured[name].graph.replay()
            samples[name].append(time_one(captured[name]) / calls)
    return samples


def measure(case, tolerance, tf32, mode, l2_bytes, budget_ms, most, seed):
    """Verifies, times and verifies again all peers of a Case: {name: Measured}."""
    calls = GRAPH_CALLS if mode == "graph" else 1
    results = {name: Measured() for name in case.peers}
    captured = {}

    def attempt(name, step):
        """Runs a step of a peer; what goes wrong is that peer's result, and the others go on."""
        try:
            return step()
        except Exception as error:
            traceback.print_exc()
            results[name].ok = False
            results[name].reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            captured.pop(name, None)
            return None

    for name, prepare in case.peers.items():
        with tf32_products(tf32):
            peer = attempt(name, lambda: Captured(prepare, calls))
        if peer:
            captured[name] = peer
            results[name].ok = True
    for turn in range(2):
        for name, peer in list(captured.items()):
            attempt(name, lambda: peer.verify(case.expected, tolerance, results[name]))
        if turn == 0 and captured:
            samples = sample_all(captured, mode, l2_bytes, budget_ms, most, random.Random(seed))
            for name, times in samples.items():
                results[name].samples = times
    return results


def free_memory():
    """Gives what PyTorch holds back to the device: the lesson's program wants it, too."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
