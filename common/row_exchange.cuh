// How the warps that share a row of lesson 10 add up its sums, those of one block or of a cluster.
//
// A row and what belongs to it may be too much for one multiprocessor: 1024 features of 16 blades
// have 140 KB of weights, as many sums for dw, and 192 KB of x, y and d_out. Then a cluster of
// blocks shares it (compute capability 9.0), and all that they tell each other is its sums.
//
// No warp waits for others before it has to: each posts the sums of its lanes, in its own block and
// in the others of the cluster, arrives at a barrier in shared memory (mbarrier), and goes on. Who
// collects the sums waits there until all warps have posted theirs; every warp adds them up for
// itself, in the same order.
//
// Round r uses slot r % 2. May a warp post round r + 2 while another still reads round r? It has
// collected round r + 1 before, which that one posts after it has collected round r. So no.
#pragma once

#include <cuda_runtime.h>

#include "common/clifford.cuh"
#include "common/hopper.cuh"

constexpr int kMaxBlocks = 8;

// Of blocks of kWarps warps at most. of[slot][i] is for the warps of block i of the cluster.
template <int kCount, int kWarps>
struct alignas(128) RowSums {
  Sums<kCount> of[2][kMaxBlocks][kWarps];
  Barrier come[2];

#if HOPPER_CODE
  __device__ void open(int blocks) {
    if (threadIdx.x == 0) {
      for (Barrier& barrier : come) barrier_init(&barrier, blockDim.x / 32);
      barrier_init_fence();
    }
    if (blocks > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
  }

  // A warp announces what the same warp of the other blocks sends to its own.
  __device__ __forceinline__ void post(const Sums<kCount>& sums, int blocks, int round) {
    const int slot = round % 2, lane = threadIdx.x % 32;
    const int rank = blocks == 1 ? 0 : cluster_rank();
    Sums<kCount>& own = of[slot][rank][threadIdx.x / 32];
    const float of_warp = Halves<kCount>::of_warp(sums);
    if (lane < kCount) own.value[lane] = of_warp;
    if (blocks > 1) shared_fence();
    __syncwarp();
    if (lane == 0) {
      barrier_arrive_expect(&come[slot], (blocks - 1) * static_cast<int>(sizeof own));
    }
    if (lane < blocks && lane != rank) bulk_push(&own, &own, sizeof own, &come[slot], lane);
  }

  // The sums of a row that has `warps` in each of its blocks.
  __device__ __forceinline__ Sums<kCount> collect(int row, int blocks, int warps, int round) {
    const int slot = round % 2;
    barrier_wait(&come[slot], round / 2 % 2);
    float part = Halves<kCount>::template part_of<kWarps>(of[slot][0] + row * warps, warps);
#pragma unroll 1  // for the registers
    for (int block = 1; block < blocks; ++block) {
      part += Halves<kCount>::template part_of<kWarps>(of[slot][block], warps);
    }
    return Halves<kCount>::from_parts(part);
  }

  // A block stays until nobody reads or writes its shared memory any more.
  __device__ void close(int blocks) {
    if (blocks > 1) cluster_sync();
  }
#endif
};
