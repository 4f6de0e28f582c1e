"""What nvcc makes of primitives, where there is one: a GPU is not needed."""

import re
import shutil
import subprocess

from conftest import ROOT
import pytest

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
PLAIN = """
#include <cuda/atomic>
__global__ void f(unsigned* word) {
  const cuda::atomic_ref<unsigned, cuda::thread_scope_device> count(*word);
  while (count.load(cuda::memory_order_acquire) < 3) continue;
}
"""
SPIN = """
#include "primitives/spin.cuh"
__global__ void f(unsigned* word) {
  primitives::wait_for_count(primitives::GridCount(*word), 3, "others");
}
"""
# What lesson 9 takes of clusters on every GPU that has them: without Hopper's own instructions.
CLUSTER = """
#include "primitives/hopper/hopper.cuh"
using namespace primitives;
__global__ void HOPPER_CLUSTER(2) f() {
#if CLUSTER_CODE
  __shared__ Barrier come;
  __shared__ float place;
  barrier_init(&come, 1);
  barrier_init_fence();
  barrier_arrive_expect(&come, 4);
  cluster_arrive();
  cluster_wait();
  store_push(&place, 1, &come, cluster_rank() ^ 1);
  barrier_wait(&come, 0);
#endif
}
"""


def instructions(source, folder, *flags):
    """The PTX of a source."""
    if not NVCC:
        pytest.skip("there is no nvcc")
    file = folder / "source.cu"
    file.write_text(source)
    command = [NVCC, "-std=c++20", "-ptx", f"-I{ROOT}", *flags, "-o", folder / "source.ptx", file]
    subprocess.run(command, check=True, capture_output=True)
    return (folder / "source.ptx").read_text()


def body(ptx):
    """Of the only kernel, without comments and the names of registers and labels."""
    return re.sub(r"//.*|%\w+|\$\w+", "", ptx[ptx.index(".entry"):]).split()


def test_waiting_for_blocks_costs_nothing(tmp_path):
    flags = ["-arch=sm_90"]
    spin = instructions(SPIN, tmp_path, *flags)
    assert body(spin) == body(instructions(PLAIN, tmp_path, *flags))
    assert "trap" not in spin and "globaltimer" not in spin


def test_waiting_for_blocks_ends_in_a_debug_build(tmp_path):
    debug = instructions(SPIN, tmp_path, "-arch=sm_90", "-DSPIN_LIMIT=1000000000")
    assert "trap;" in debug and "globaltimer" in debug and "vprintf" in debug


def test_clusters_are_not_only_hoppers(tmp_path):
    """A later GPU has them, and not what only sm_90a has."""
    ptx = instructions(CLUSTER, tmp_path, "-arch=compute_90")
    assert "barrier.cluster.arrive" in ptx and "st.async" in ptx
