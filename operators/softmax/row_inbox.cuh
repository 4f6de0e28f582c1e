// How the blocks of a cluster add up their partial sums of a few rows: each pushes those of a row
// into the shared memory of the block that owns the row.
#pragma once

#include <cuda_runtime.h>

#include "primitives/hopper/hopper.cuh"

namespace operators::softmax {

using namespace primitives;

/// A block's shared memory for that: of kRows rows, kColumns wide, each of the cluster's `splits`
/// blocks owns every splits-th one. `rank` is the block's own number. kRows and `splits` are powers
/// of two, at most kMost.
template <int kRows, int kColumns>
struct RowInbox {
  static constexpr int kMost = 8;
  static_assert(kRows <= kMost && (kRows & (kRows - 1)) == 0);
  float partials[kMost][kColumns];  // of each block, those of the rows that this one owns
  Barrier come;

#if CLUSTER_CODE
  static __device__ int most_owned(int splits) { return (kRows + splits - 1) / splits; }

  /// All threads of all blocks of the cluster call this, and cluster_wait() before the first
  /// add_up(). There will be `rows` rows.
  __device__ void open(int rank, int splits, int rows) {
    if (threadIdx.x == 0) {
      const int owned = (rows - rank + splits - 1) / splits;
      barrier_init(&come, 1);
      barrier_init_fence();
      barrier_arrive_expect(&come, owned * (splits - 1) * static_cast<int>(sizeof partials[0]));
    }
    __syncwarp();
    cluster_arrive();
  }

  /// A warp has its block's partial sums of a row: a lane has every 32nd column. False if another
  /// block owns the row. Else the lanes then have the sums of all blocks, added up in the order of
  /// ranks, but for the block's own, which come first.
  template <int kCols>
  __device__ bool add_up(float (&row)[kCols], int number, int rank, int splits) {
    static_assert(32 * kCols == kColumns);
    const int lane = threadIdx.x % 32, owner = number % splits, slot = number / splits;
    if (rank != owner) {
      float* to = partials[rank * most_owned(splits) + slot] + lane;
#pragma unroll
      for (int j = 0; j < kCols; ++j) store_push(to + 32 * j, row[j], &come, owner);
      return false;
    }
    barrier_wait(&come, 0);
    for (int from = 0; from < splits; ++from) {
      if (from == rank) continue;
      const float* partial = partials[from * most_owned(splits) + slot] + lane;
#pragma unroll
      for (int j = 0; j < kCols; ++j) row[j] += partial[32 * j];
    }
    return true;
  }
#endif
};

}  // namespace operators::softmax
