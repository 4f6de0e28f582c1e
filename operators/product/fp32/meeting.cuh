// How the blocks of a cluster, each of which has a range of k of the same tile of C, come to the
// sums of the whole: through shared memory (Hopper and newer).
#pragma once

#include <cuda_runtime.h>

#include "primitives/hopper/barrier.cuh"
#include "primitives/hopper/cluster.cuh"
#include "primitives/hopper/copies.cuh"

namespace operators::product {

using namespace primitives;

/// At most so many blocks share a tile.
inline constexpr int kMostFp32Ranges = 8;

/// Each thread of a block of kWarps warps has sums of kFours times four neighbours in a row of C. A
/// piece is what the lanes of one warp have of the same number. The pieces are divided among the
/// blocks: each sends the others what they own of its sums, adds up its own pieces in the order of
/// the ranges, and stores them. Sums do not go through memory, and nobody has to write zeros first.
template <int kWarps, int kFours>
struct Fp32Meeting {
  static constexpr int kPieces = kWarps * kFours, kPieceFloats = 4 * 32;
  /// Of shared memory, for what blocks send. Owners have some equal number of pieces, or one more.
  static constexpr int kFloats = (kPieces + kMostFp32Ranges - 1) * kPieceFloats;

  float* room;        ///< in each block at the same place
  Barrier* barriers;  ///< two: all have multiplied, so rooms may be written; what is sent has come
  int rank, ranges;   ///< of this block among those of its cluster

  __device__ int first_of(int block) const { return block * kPieces / ranges; }
  /// Where a piece lies in its owner's room, if block `from` has sent it.
  __device__ float* place(int from, int piece, int owner) const {
    const int most = (kPieces + ranges - 1) / ranges;
    return room + (from * most + piece - first_of(owner)) * kPieceFloats + threadIdx.x % 32;
  }

#if CLUSTER_CODE
  /// All threads call this, before they multiply.
  __device__ void set_up() const {
    if (threadIdx.x == 0) {
      barrier_init(&barriers[0], ranges);
      barrier_init(&barriers[1], 1);
      barrier_init_fence();
      barrier_arrive_expect(&barriers[1],
                            4 * kPieceFloats * ranges * (first_of(rank + 1) - first_of(rank)));
    }
    cluster_arrive();
  }

  /// All threads call this when they have multiplied. A warp calls store(warp, number, four) for
  /// each of its block's pieces: the lanes' sums of that number, of the whole tile, of that warp.
  template <int kRows, int kCols, class Store>
  __device__ void add_up(const float (&sum)[kRows][kCols], Store store) const {
    static_assert(kRows * kCols == 4 * kFours);
    const int warp = threadIdx.x / 32;
    __syncthreads();  // All have read what lies in the room.
    cluster_wait();
    if (static_cast<int>(threadIdx.x) < ranges) barrier_arrive(&barriers[0], threadIdx.x);
    barrier_wait(&barriers[0], 0);
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      const int piece = four * kWarps + warp, owner = ((piece + 1) * ranges - 1) / kPieces;
      float* const to = place(rank, piece, owner);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        store_push(to + 32 * e, sum[4 * four / kCols][4 * four % kCols + e], &barriers[1], owner);
      }
    }
    barrier_wait(&barriers[1], 0);
    for (int piece = first_of(rank) + warp; piece < first_of(rank + 1); piece += kWarps) {
      float4 own = {};
      for (int from = 0; from < ranges; ++from) {
        const float* const sent = place(from, piece, rank);
        own.x += sent[0];
        own.y += sent[32];
        own.z += sent[64];
        own.w += sent[96];
      }
      store(piece % kWarps, piece / kWarps, own);
    }
  }
#endif
};

}  // namespace operators::product
