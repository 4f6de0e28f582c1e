// How the warps that share a row add up its sums: those of one block, or of a cluster.
//
// A row and what belongs to it may be too much for one multiprocessor: 1024 features of 16 blades
// have 140 KB of weights, as many sums for dw, and 192 KB of x, y and d_out. Then the blocks of a
// cluster share it (compute capability 9.0), and all that they exchange is its sums.
//
// As in lesson 10's PostedSums, no warp waits for others before it has to. Each warp posts its
// sums, in its own block and in the other blocks of the cluster, arrives at a barrier in shared
// memory (an mbarrier), and goes on. A warp that collects the sums waits there until all warps have
// posted theirs. Every warp adds them up for itself, in the same order.
//
// Round r uses slot r % 2. Each warp collects a round before it posts the next one. So when a warp
// posts round r + 2, it has collected round r + 1: all warps of the cluster have posted round r +
// 1, and have collected round r before that. So nobody reads slot r % 2 any more, and in every
// block the barrier's phase of round r is over: bytes of round r + 2 count in the next one. And a
// block may end after its last round, since all that the others send it has come.
#pragma once

#include <cuda_runtime.h>

#include "operators/clifford/clifford.cuh"
#include "primitives/hopper/hopper.cuh"

namespace operators::clifford {

using namespace primitives;

constexpr int kMaxBlocks = 8;  // of a cluster: more of them are not portable

// The sums of blocks that have kWarps warps at most. of[slot][i] has those of block i's warps.
template <int kCount, int kWarps>
struct alignas(128) RowSums {
  FeatureSums<kCount> of[2][kMaxBlocks][kWarps];
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

  // A warp writes its sums to its own block's shared memory, and by st.async to that of the other
  // blocks, where their bytes count at the barrier when they come. So no fence is needed. At the
  // barrier of its own block the warp arrives once, and announces the bytes that the warps with its
  // number in the other blocks send here. Some may come earlier: the phase does not end before the
  // warp has arrived.
  __device__ __forceinline__ void post(const FeatureSums<kCount>& sums, int blocks, int round) {
    const int slot = round % 2, lane = threadIdx.x % 32;
    const int rank = blocks == 1 ? 0 : cluster_rank();
    FeatureSums<kCount>& own = of[slot][rank][threadIdx.x / 32];
    const float of_warp = Halves<kCount>::of_warp(sums);
    if (lane < kCount) own.value[lane] = of_warp;
    __syncwarp();
    if (lane == 0) {
      barrier_arrive_expect(&come[slot], (blocks - 1) * kCount * static_cast<int>(sizeof(float)));
    }
    for (int to = 0; to < blocks; ++to) {
      if (to != rank && lane < kCount) store_push(&own.value[lane], of_warp, &come[slot], to);
    }
  }

  // Waits until all warps have posted, and returns the sums of a row that has `warps` warps in each
  // of its blocks. The blocks of a cluster have one row at a time (`row` is 0), and a block without
  // a cluster may have several.
  __device__ __forceinline__ FeatureSums<kCount> collect(int row, int blocks, int warps,
                                                         int round) {
    const int slot = round % 2;
    barrier_wait(&come[slot], round / 2 % 2);
    float sum = Halves<kCount>::template of_lane<kWarps>(of[slot][0] + row * warps, warps);
#pragma unroll 1  // so that fewer registers are needed
    for (int block = 1; block < blocks; ++block) {
      sum += Halves<kCount>::template of_lane<kWarps>(of[slot][block], warps);
    }
    return Halves<kCount>::from_lanes(sum);
  }
#endif
};

}  // namespace operators::clifford
