"""An L2 cache in which nothing is left of what a kernel reads: common/measure/cold_cache.h for PyTorch; and times with
it."""
import ctypes
import statistics

import torch

SAMPLES = 30


class ColdCache:
    """Overwrites the L2 cache. What a kernel has marked as evict_last outlives that, so the driver first makes all
    lines usual ones again."""

    def __init__(self, l2_bytes):
        """l2_bytes: the cache's size. A context is current: PyTorch has allocated on the device."""
        self.written = torch.empty(2 * l2_bytes, dtype=torch.uint8, device="cuda")
        self.reset = ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache

    def make_cold(self, value):
        """In the current stream, with a value that differs from turn to turn. Waits for what was launched before."""
        torch.cuda.synchronize()
        code = self.reset()
        if code != 0:
            raise RuntimeError(f"cuCtxResetPersistingL2Cache: error {code}")
        self.written.fill_(value % 256)


def captured(step, calls=1):
    """A CUDA graph of so many calls."""
    on_the_side = torch.cuda.Stream()
    on_the_side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(on_the_side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(on_the_side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            step()
    return graph


def milliseconds(graphs, calls=1):
    """The median of each CUDA graph by name, in turn: of one call with a cold cache, or of one of the `calls` calls that
    are in it."""
    cache = ColdCache(torch.cuda.get_device_properties(0).L2_cache_size)
    times = {name: [] for name in graphs}
    for sample in range(SAMPLES + 3):  # the first ones warm up
        for name, graph in graphs.items():
            graph.replay()
            if calls == 1:
                cache.make_cold(sample)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / calls)
    return {name: statistics.median(own[3:]) for name, own in times.items()}
