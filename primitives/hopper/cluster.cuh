// Warpgroups, and clusters: blocks that run at the same time and reach each other's shared memory.
// The CPU backend has functions of the same names in cpu/hopper/hopper_device.h.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "primitives/check.h"
#include "primitives/hopper/code.h"
#include "primitives/launch.h"
#ifdef CUDA_CPU
#include "cpu/hopper/hopper_device.h"
#endif

namespace primitives {

// ---- Host: how many fit -------------------------------------------------------------------------

/// How many clusters of `blocks` blocks of `kernel` the device holds at a time; perhaps none. For
/// devices other than Hopper it is how many there would be with one block on each multiprocessor,
/// so that plans can be made there, too.
inline int clusters_that_fit(AnyKernel kernel, unsigned blocks, unsigned threads,
                             size_t shared_bytes) {
  if (!is_hopper()) return std::max(1, multiprocessors() / static_cast<int>(blocks));
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = blocks;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel.address, &config),
        "cudaOccupancyMaxActiveClusters");
  return clusters;
}

/// The same for a kernel that has to fit: it throws if none does.
inline int resident_clusters(AnyKernel kernel, unsigned blocks, unsigned threads,
                             size_t shared_bytes) {
  const int clusters = clusters_that_fit(kernel, blocks, threads, shared_bytes);
  if (clusters == 0) {
    throw Error("no cluster of " + std::to_string(blocks) + " blocks fits on this device of " +
                std::to_string(multiprocessors()) + " multiprocessors");
  }
  return clusters;
}

/// How many blocks (or clusters) of a persistent kernel to launch for `tiles` tiles, if `capacity`
/// of them fit on the device: as few as finish in the same number of rounds. For example, 512 tiles
/// and room for 132 blocks are four rounds, and so are 128 blocks. The multiprocessors that have no
/// work leave their share of the power to the others.
inline unsigned persistent(int64_t tiles, int64_t capacity) {
  const int64_t rounds = (tiles + capacity - 1) / capacity;
  return static_cast<unsigned>((tiles + rounds - 1) / rounds);
}

#ifndef CUDA_CPU

/// A barrier among `threads` threads of the block. A block has 16 of them, with ids 0 to 15; 0 is
/// that of __syncthreads(). (Any GPU has these.)
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Counts there, and does not wait: other threads wait for what this one has done. PTX ISA,
/// "Parallel Synchronization and Communication Instructions: bar".
__device__ inline void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#endif
#if CLUSTER_CODE

/// Returns `number`, which is the same in all 32 threads of the warp, and all call this. The
/// shuffle tells the compiler so. Then the compiler keeps the number, and descriptors that are made
/// from it, in uniform registers. wgmma reads descriptors there, and none has to be moved first.
__device__ inline int same_in_warp(int number) { return __shfl_sync(0xffffffff, number, 0); }

/// The number of this thread's warp in its block.
__device__ inline int warp_of_block() { return same_in_warp(threadIdx.x / 32); }

#ifndef CUDA_CPU

/// All threads of a warpgroup give registers back, or take more, until each thread has kRegisters.
/// PTX ISA, "setmaxnreg".
template <int kRegisters>
__device__ inline void registers_shrink_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void registers_grow_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// True for one thread of the warp, each time the same one. All 32 have to call it. It is for the
/// thread that starts copies: the compiler then knows that there is only one, and makes no loop
/// over the warp's threads for each copy, as it does after `threadIdx.x == 0`. PTX ISA,
/// "elect.sync".
__device__ inline bool elect_one() {
  uint32_t chosen;
  asm volatile(
      "{\n"
      ".reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, chosen;\n"
      "}"
      : "=r"(chosen));
  return chosen != 0;
}

/// The number of this block in its cluster, from 0 on.
__device__ inline int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// A barrier among all threads of the cluster. (.aligned: all threads of a warp execute the barrier
/// as one instruction, and before it one of them may have had work of its own. So __syncwarp()
/// brings them together first.)
__device__ inline void cluster_sync() {
  __syncwarp();
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// The same in two halves: cluster_arrive() says that this thread is here, cluster_wait() waits
/// until all are. cluster_sync() also waits until all threads can see what was written before, and
/// this wait can take a microsecond. The two halves do not. So after cluster_wait() all threads of
/// the cluster are there. But of what they have written only the barriers can be seen, and these
/// only if barrier_init_fence() was called after barrier_init(). (__syncwarp(): as above.)
__device__ inline void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#endif  // CUDA_CPU

/// Both halves at once. In this way the blocks of a cluster meet after each has initialized its
/// barriers.
__device__ inline void cluster_meet() {
  cluster_arrive();
  cluster_wait();
}

#endif  // CLUSTER_CODE

}  // namespace primitives
