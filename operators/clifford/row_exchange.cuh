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
// Round r uses slot r % 2. A warp posts round r + 2 only after it has collected round r + 1. For
// that every warp of the cluster has posted round r + 1, and so has collected round r before. So
// nobody reads slot r % 2 any more, and at every block the barrier's phase of round r is over:
// bytes of round r + 2 count in the next one. And a block may end after its last round: what the
// others sent it has come.
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

  // A warp writes its sums to its own block's memory, and by st.async to that of the others, where
  // their bytes count at the barrier when they come: no copy and no fence. At its own barrier it
  // arrives once, and announces what the warps with its number in the other blocks send here. That
  // may come earlier: without this arrival no phase ends.
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

  // The sums of a row that has `warps` warps in each of its blocks. Blocks of a cluster have one
  // row at a time (row = 0); a block on its own may have several.
  __device__ __forceinline__ FeatureSums<kCount> collect(int row, int blocks, int warps,
                                                         int round) {
    const int slot = round % 2;
    barrier_wait(&come[slot], round / 2 % 2);
    float sum = Halves<kCount>::template of_lane<kWarps>(of[slot][0] + row * warps, warps);
#pragma unroll 1  // for the registers
    for (int block = 1; block < blocks; ++block) {
      sum += Halves<kCount>::template of_lane<kWarps>(of[slot][block], warps);
    }
    return Halves<kCount>::from_lanes(sum);
  }
#endif
};

}  // namespace operators::clifford
