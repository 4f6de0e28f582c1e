"""An L2 cache in which nothing is left of what a kernel reads: common/measure/cold_cache.h for PyTorch."""
import ctypes

import torch


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
