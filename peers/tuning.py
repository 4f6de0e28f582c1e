"""How the Triton kernels of this folder are tuned."""
import functools

import triton
from triton.testing import do_bench


def config(warps, stages, **sizes):
    """One choice of tile sizes (the kernel's constants), warps and pipeline stages."""
    return triton.Config(sizes, num_warps=warps, num_stages=stages)


def persistent_grid(rows, columns, block_columns):
    """The grid of a kernel whose programs stay: PROGRAMS in all, each with a strip of columns (the
    constant named `block_columns` wide) and every so manieth block of BV rows."""

    def grid(sizes):
        strips = triton.cdiv(columns, sizes[block_columns])
        programs = max(1, sizes["PROGRAMS"] // strips)
        return (min(programs, triton.cdiv(rows, sizes["BV"])), strips)

    return grid


def tuned(configs, key, reset_to_zero=None):
    """Decorates a kernel: the fastest of `configs` runs, found anew for each value of the arguments
    named in `key`. Some 20 ms for each are enough to tell."""
    bench = functools.partial(do_bench, warmup=5, rep=20)
    return triton.autotune(configs, key=key, reset_to_zero=reset_to_zero, do_bench=bench)
