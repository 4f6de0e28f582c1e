// C = A B in true fp32 by many small blocks, for sums that are short and products that have few
// tiles.
//
// A block of fp32.cuh has 256 threads, whatever its tile, and at most two are on a multiprocessor.
// Before such a block can multiply, its first tiles have to come, and after its last step it stores
// C. With 100 numbers along k that takes as long as multiplying does. Here the block of a tile of
// 32 x 64 has 64 threads, each of which owns 8 x 4 elements of C, and a multiprocessor holds eight
// such blocks. They share nothing. So while one waits for its first tiles, others multiply, and
// others store, and a barrier stops two warps, not eight. A block has one tile, and the hardware
// gives the next tile to whichever multiprocessor has room first.
//
//   - A step has 16 k, and a stage some 6 to 13 KB. So all blocks have two or three stages on their
//     way, and a sum of 64 numbers already has four steps.
//   - Larger tiles have 128 threads: 64 x 64 and 128 x 32 are for shapes that they fit better, and
//     64 x 128, where a thread owns 8 x 8 elements, reads less for a multiply-add.
//   - B's rows may be unaligned: then it is copied by single floats, as A is, or, for large
//     products, another launch copies it first into rows that are aligned.
//   - Few tiles (Hopper and newer): 2 to 8 blocks of a cluster share a tile, each with its range of
//     k. Their sums come together in shared memory (meeting.cuh).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "operators/estimate.h"
#include "operators/product/fp32/lanes.cuh"
#include "operators/product/fp32/meeting.cuh"
#include "operators/product/fp32/steps.cuh"
#include "operators/product/shape.h"
#include "primitives/early_launch.cuh"
#include "primitives/launch.h"

namespace operators::product {

using namespace primitives;

/// A block's tile has BM x BN elements of C, of which a thread owns 8 x TN, and a step BK of k.
/// kStages pairs of tiles of A and B are in shared memory.
template <int BM_, int BN_, int BK_, int TN_, int kStages_, int kResident_, int kGroups_>
struct Fp32Block {
  static constexpr int kGroups = kGroups_;  ///< of a thread's copies of a step
  static constexpr int kSlices = 1;
  static constexpr int BM = BM_, BN = BN_, BK = BK_, kStages = kStages_;
  static constexpr int kResident = kResident_;  ///< blocks for which a multiprocessor has registers
  static constexpr int TM = 8, TN = TN_;
  static constexpr int kThreadsX = BN / TN, kThreadsY = BM / TM;
  static constexpr int kThreads = kThreadsX * kThreadsY;
  /// In shared memory are kStages times a tile of A, transposed, and one of B.
  static constexpr int kStrideA = BM + 4, kTileA = BK * kStrideA, kTileB = BK * BN;
  static constexpr int kTiles = kStages * (kTileA + kTileB);
  /// What the blocks of a cluster send lies in the tiles' place, behind it what the warps turn into
  /// rows (Fp32Lanes), and behind that two barriers.
  static constexpr int kWarps = kThreads / 32;
  using Meeting = Fp32Meeting<kWarps, TM * TN / 4>;
  static constexpr int kRowsAt = std::max(kTiles, Meeting::kFloats);
  using Lanes = Fp32Lanes<std::min(kThreadsX, 8)>;
  static constexpr int kBarriersAt = kRowsAt + kWarps * Lanes::kFloats;
  static constexpr int kSharedBytes = 4 * kBarriersAt + 16;
  static_assert(kThreads % 32 == 0 && BK % 8 == 0);

  static __device__ int slice() { return 0; }
  /// Where this thread stands among the others, or would stand if it were of that warp.
  static __device__ int x(int warp = threadIdx.x / 32) {
    return warp % (kThreadsX / Lanes::kAcross) * Lanes::kAcross + Lanes::x();
  }
  static __device__ int y(int warp = threadIdx.x / 32) {
    return warp / (kThreadsX / Lanes::kAcross) * Lanes::kDown + Lanes::y();
  }
};

/// Stores number `number` of the four neighbours that a thread of that warp owns, of the tile at
/// (row0, col0). kAligned: C's rows are aligned to 16 bytes. Else the lanes of this warp store
/// neighbours of a row (Fp32Lanes).
template <class Tile, bool kAligned>
__device__ void store_fp32_four(float* tiles, float4 four, int warp, int number,
                                const Fp32Operands& to, int row0, int col0) {
  const int i = number / (Tile::TN / 4), j = number % (Tile::TN / 4) * 4;
  float* const of_warp = tiles + Tile::kRowsAt + threadIdx.x / 32 * Tile::Lanes::kFloats;
  Tile::Lanes::template store<kAligned, true>(
      of_warp, four, to, row0 + i / 4 * 4 * Tile::kThreadsY + i % 4, Tile::y(warp),
      col0 + j * Tile::kThreadsX, Tile::x(warp));
}

/// The block has range number blockIdx.x % ranges of k of tile blockIdx.x / ranges; tiles are
/// numbered along C's rows. If `ranges` is more than 1, it is that of the blocks of a cluster. B's
/// rows are aligned to 16 bytes, or not, and C's.
template <class Tile, bool kAlignedB, bool kAlignedC>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    fp32_block_product(Fp32Operands of, int ranges) {
  extern __shared__ __align__(16) float fp32_block_tiles[];
  float* const tiles = fp32_block_tiles;
  const int tile = static_cast<int>(blockIdx.x) / ranges;
  const int tiles_across = ceil_div(of.shape.cols, Tile::BN),
            steps = ceil_div(of.shape.depth, Tile::BK);
  const int row0 = tile / tiles_across * Tile::BM, col0 = tile % tiles_across * Tile::BN;
  float sum[Tile::TM][Tile::TN] = {};
  if (ranges == 1) {
    wait_for_previous_kernel();
    add_fp32_steps<Tile, kAlignedB>(tiles, of, row0, col0, 0, steps, sum);
#pragma unroll
    for (int i = 0; i < Tile::TM; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::TN; j += 4) {
        const float4 four = make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
        store_fp32_four<Tile, kAlignedC>(tiles, four, threadIdx.x / 32, (i * Tile::TN + j) / 4, of,
                                         row0, col0);
      }
    }
    return;
  }
#if CLUSTER_CODE
  const int rank = static_cast<int>(blockIdx.x) % ranges;
  const typename Tile::Meeting meeting = {
      tiles, reinterpret_cast<Barrier*>(tiles + Tile::kBarriersAt), rank, ranges};
  meeting.set_up();
  wait_for_previous_kernel();
  add_fp32_steps<Tile, kAlignedB>(tiles, of, row0, col0,
                                  static_cast<int>(int64_t{steps} * rank / ranges),
                                  static_cast<int>(int64_t{steps} * (rank + 1) / ranges), sum);
  meeting.add_up(sum, [&](int warp, int number, float4 four) {
    store_fp32_four<Tile, kAlignedC>(tiles, four, warp, number, of, row0, col0);
  });
#endif
}

/// How many blocks a multiprocessor has room for. It has as much shared memory as a block may ask
/// for and 1 KiB, and each block takes 1 KiB more than it asks for.
template <class Tile>
int resident_fp32_blocks() {
  return std::clamp((most_shared_bytes() + 1024) / (Tile::kSharedBytes + 1024), 1, Tile::kResident);
}

/// How many clusters of so many blocks fit, if a multiprocessor has `resident` blocks.
/// The blocks of a cluster are on neighbours, of which there are 16 or 18. We count groups of 16,
/// all but one that a device may have, and two fifths of the multiprocessors that remain. On an
/// H200 that is as many as the driver says, or a few less.
inline int64_t fp32_clusters_that_fit(int ranges, int resident) {
  constexpr int kNeighbours = 16;
  const int all = multiprocessors();
  if (ranges <= 2) return std::max(1, all * resident / ranges);
  const int groups = std::max(1, all / kNeighbours - 1);
  const int others = std::max(0, all - kNeighbours * groups);
  return std::max(
      1, groups * (kNeighbours * resident / ranges) + 2 * others * resident / (5 * ranges));
}

/// How many blocks the multiprocessor has that has the most, if each tile has so many. It has up to
/// `resident` at a time, and when these end others.
inline int64_t fp32_crowd(int64_t tiles, int ranges, int resident) {
  for (int crowd = 1; crowd <= resident; ++crowd) {
    if (tiles <= fp32_clusters_that_fit(ranges, crowd)) return crowd;
  }
  return ceil_div(resident * tiles, fp32_clusters_that_fit(ranges, resident));
}

/// The bytes of all three matrices, in microseconds.
inline double fp32_microseconds_to_read(const ProductShape& shape) {
  return 4.0 *
         (1.0 * shape.rows * shape.depth + 1.0 * shape.depth * shape.cols +
          1.0 * shape.rows * shape.cols) /
         memory_rate();
}

/// What costs a multiprocessor cycles: fitted to shapes drawn at random, on an H200.
struct Fp32BlockCosts {
  static constexpr double kMultiply = 0.938;   ///< a multiply-add of a warp
  static constexpr double kNarrowCopy = 2.61;  ///< of a warp's copy, of 4 bytes a thread
  static constexpr double kCopy = 5.05;        ///< the same of 16
  static constexpr double kStep = 1.46;        ///< of each step of a block
  static constexpr double kAlone = 1.02;       ///< a multiply-add of a warp, if it is alone
  static constexpr double kWait = 24.3;        ///< more for each step of such a warp
  static constexpr double kAloneCopy = 12;     ///< and for each of its copies
  static constexpr double kBegin = 300;        ///< of a tile of one block that copies B by 4 bytes
  static constexpr double kStored = 0.097;     ///< of a number of C
  static constexpr double kRowStore = 0.07;    ///< more, where C is stored in rows
  static constexpr double kMeet = 1453;        ///< of a cluster
  static constexpr double kSent = 0.181;       ///< of a number that is sent to another block
  static constexpr double kLaunch = 2.5;       ///< microseconds
  static constexpr double kCopyB = 2.58;       ///< microseconds of the launch that copies B
  static constexpr double kCopied = 1.02;      ///< of what its bytes take at the memory's rate
};

/// How long the product should take with this tile and so many ranges of k. The four schedulers of
/// a multiprocessor have whole warps: three blocks of two warps take as long as four. With few
/// blocks each step takes as long as one warp needs for it.
template <class Tile, bool kAlignedB, bool kAlignedC>
double fp32_block_microseconds(const ProductShape& shape, int ranges) {
  using Costs = Fp32BlockCosts;
  constexpr double kNumbers = Tile::BM * Tile::BN;
  constexpr double kOfWarp = Tile::BK * Tile::TM * Tile::TN;  // multiply-adds of a step
  constexpr double kNarrow = (Tile::BM + (kAlignedB ? 0 : Tile::BN)) * Tile::BK / 32,
                   kWide = (kAlignedB ? Tile::BN / 4 : 0) * Tile::BK / 32;  // copies of warps
  const auto step = [](int blocks) {
    const auto work = [](int warps) { return ceil_div(warps * Tile::kWarps, 4) * kOfWarp; };
    return std::max(
        Costs::kMultiply * work(blocks) +
            blocks * (Costs::kNarrowCopy * kNarrow + Costs::kCopy * kWide + Costs::kStep),
        Costs::kAlone * work(1) + Costs::kWait +
            Costs::kAloneCopy * (kNarrow + kWide) / Tile::kWarps);
  };
  const int steps = ceil_div(ceil_div(shape.depth, Tile::BK), ranges);
  const int64_t tiles = int64_t{ceil_div(shape.rows, Tile::BM)} * ceil_div(shape.cols, Tile::BN);
  const int resident = resident_fp32_blocks<Tile>();
  const int64_t blocks = fp32_crowd(tiles, ranges, resident);
  const double rounds = std::ceil(1.0 * static_cast<double>(blocks) / resident);
  const int left = static_cast<int>(blocks % resident);
  const double numbers = static_cast<double>(blocks) * kNumbers;
  double work = steps * (static_cast<double>(blocks / resident) * step(resident) +
                         (left > 0 ? step(left) : 0)) +
                numbers / ranges * (Costs::kStored + (kAlignedC ? 0 : Costs::kRowStore));
  if (ranges == 1 && !kAlignedB) work += static_cast<double>(blocks) * Costs::kBegin;
  if (ranges > 1) work += rounds * Costs::kMeet + numbers * Costs::kSent;
  const double copy = kAlignedB == kAlignedC ? 0
                                             : Costs::kCopyB + Costs::kCopied * 8.0 * shape.depth *
                                                                   shape.cols / memory_rate();
  return Costs::kLaunch + copy + std::max(work / cycles(), fp32_microseconds_to_read(shape));
}

}  // namespace operators::product
