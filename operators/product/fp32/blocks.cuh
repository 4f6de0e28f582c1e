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
//   - A step has 8 or 16 k, and a stage some 4 to 13 KB. So all blocks have two or more stages on
//     their way, and a sum of 64 numbers already has 4 or 8 steps.
//   - The step that has fewer k than the others is the first one. It is copied before the loop, so
//     the loop copies without a question about k.
//   - Larger tiles have 128 threads: 64 x 64 and 128 x 32 are for shapes that they fit better, and
//     64 x 128, where a thread owns 8 x 8 elements, reads less for a multiply-add.
//   - B's rows may be unaligned: then it is copied by single floats, as A is. No other launch has
//     to copy it first.
//   - Few tiles (Hopper and newer): 2, 4 or 8 blocks of a cluster share a tile, each with its range
//     of k. Each sends the others their rows of its sums, through shared memory, adds up its own
//     rows in the order of the ranges, and stores them. Sums do not go through memory, and nobody
//     has to write zeros first.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "operators/estimate.h"
#include "operators/product/fp32/lanes.cuh"
#include "operators/product/shape.h"
#include "primitives/async_copy.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/hopper/barrier.cuh"
#include "primitives/hopper/cluster.cuh"
#include "primitives/hopper/copies.cuh"
#include "primitives/launch.h"

namespace operators::product {

using namespace primitives;

/// A block's tile has BM x BN elements of C, of which a thread owns 8 x TN, and a step BK of k.
/// kStages pairs of tiles of A and B are in shared memory.
template <int BM_, int BN_, int BK_, int TN_, int kStages_, int kResident_>
struct Fp32Block {
  static constexpr int BM = BM_, BN = BN_, BK = BK_, kStages = kStages_;
  static constexpr int kResident = kResident_;  ///< blocks for which a multiprocessor has registers
  static constexpr int TM = 8, TN = TN_;
  static constexpr int kThreadsX = BN / TN, kThreadsY = BM / TM;
  static constexpr int kThreads = kThreadsX * kThreadsY;
  /// In shared memory are kStages tiles of A, transposed, then kStages of B.
  static constexpr int kStrideA = BM + 4, kTileA = BK * kStrideA, kTileB = BK * BN;
  static constexpr int kTiles = kStages * (kTileA + kTileB);
  /// What the blocks of a cluster send lies in the tiles' place, behind it what the warps turn into
  /// rows (Fp32Lanes), and behind that two barriers.
  static constexpr int kRowsAt = std::max(kTiles, BM* BN);
  using Lanes = Fp32Lanes<std::min(kThreadsX, 8)>;
  static constexpr int kBarriersAt = kRowsAt + kThreads / 32 * Lanes::kFloats;
  static constexpr int kSharedBytes = 4 * kBarriersAt + 16;
  static_assert(kThreads % 32 == 0 && BK % 8 == 0);

  /// Where this thread stands among the others.
  static __device__ int x() {
    return threadIdx.x / 32 % (kThreadsX / Lanes::kAcross) * Lanes::kAcross + Lanes::x();
  }
  static __device__ int y() {
    return threadIdx.x / 32 / (kThreadsX / Lanes::kAcross) * Lanes::kDown + Lanes::y();
  }
};

/// At most so many blocks share a tile.
inline constexpr int kMostFp32Ranges = 8;

/// What is multiplied: dense matrices.
struct Fp32Matrices {
  const float *A, *B;
  float* C;
  ProductShape shape;
};

/// Adds the products of steps `begin` to `end` of the tile of C at (row0, col0) to a thread's sums.
///
/// The tile's steps end where k ends, so step 0 may begin before k = 0; there zeros are copied. A
/// row or column beyond the matrix is replaced by one inside, since what it contributes to is never
/// stored. A thread's copies of a step stand one by one between multiplications.
template <class Tile, bool kAligned>
__device__ void add_fp32_steps(float* tiles, const Fp32Matrices& of, int row0, int col0, int begin,
                               int end, float (&sum)[Tile::TM][Tile::TN]) {
  constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, TM = Tile::TM, TN = Tile::TN;
  constexpr int kStages = Tile::kStages, kStage = Tile::kTileA + Tile::kTileB;
  constexpr int kStrideA = Tile::kStrideA, kThreads = Tile::kThreads;
  const int depth = of.shape.depth, cols = of.shape.cols;

  // A is transposed on the way, so it is copied by single floats: a warp copies 8 k of 4 rows,
  // which lie on 32 banks. B is copied by kWidth: at once the block has kRowsB rows of its tile.
  constexpr int kWidth = kAligned ? 4 : 1, kLanesB = BN / kWidth;
  constexpr int kRowsA = kThreads / 8, kOfA = BM / kRowsA * (BK / 8);
  constexpr int kRowsB = kThreads > kLanesB ? kThreads / kLanesB : 1;
  constexpr int kPartsB = kThreads > kLanesB ? 1 : kLanesB / kThreads;  // of a row
  static_assert(BK % kRowsB == 0);
  constexpr int kCopies = kOfA + BK / kRowsB * kPartsB;
  const int a_row = threadIdx.x / 8, a_k = threadIdx.x % 8;
  const int b_k = threadIdx.x / kLanesB, b_col = threadIdx.x % kLanesB * kWidth;
  const int first_k = begin * BK - (ceil_div(depth, BK) * BK - depth);
  const float* a_from = of.A + static_cast<int64_t>(row0) * depth + first_k + a_k;
  const float* b_from = of.B + static_cast<int64_t>(first_k + b_k) * cols + (col0 + b_col) % cols;
  int a_offset[BM / kRowsA], b_offset[kPartsB];
#pragma unroll
  for (int i = 0; i < BM / kRowsA; ++i) {
    a_offset[i] = (min(row0 + a_row + i * kRowsA, of.shape.rows - 1) - row0) * depth;
  }
#pragma unroll
  for (int part = 0; part < kPartsB; ++part) {
    b_offset[part] = (col0 + b_col + part * kThreads * kWidth) % cols - (col0 + b_col) % cols;
  }
  const int a_to = a_k * kStrideA + a_row, b_to = Tile::kTileA + b_k * BN + b_col;
  // The thread's copy of this number, to the stage that begins at `to`. So many k of the step are
  // before the first one.
  const auto copy = [&](float* to, int number, int outside) {
    if (number < kOfA) {
      const int i = number % (BM / kRowsA), k = number / (BM / kRowsA) * 8;
      copy_async<4>(to + a_to + i * kRowsA + k * kStrideA, a_from + a_offset[i] + k,
                    a_k + k >= outside);
    } else {
      const int part = (number - kOfA) % kPartsB, k = (number - kOfA) / kPartsB * kRowsB;
      copy_async<4 * kWidth>(
          to + b_to + k * BN + part * kThreads * kWidth,
          b_from + static_cast<int64_t>(k) * cols + (kPartsB > 1 ? b_offset[part] : 0),
          b_k + k >= outside);
    }
  };
  const auto move_on = [&] {
    a_from += BK;
    b_from += static_cast<int64_t>(BK) * cols;
  };

#pragma unroll
  for (int ahead = 0; ahead < kStages - 1; ++ahead) {
    if (begin + ahead < end) {
#pragma unroll
      for (int number = 0; number < kCopies; ++number) {
        copy(tiles + ahead * kStage, number, ahead == 0 ? -first_k : 0);
      }
      move_on();
    }
    copy_async_commit();
  }
  float a[2][TM], b[2][TN];  // of this k, and of the next
  int reading = 0;           // where the stage begins that is read; that before it is written
  for (int step = begin; step < end; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    float* const writing = tiles + (reading == 0 ? (kStages - 1) * kStage : reading - kStage);
    const float* const a_tile = tiles + reading + 4 * Tile::y();
    const float* const b_tile = tiles + reading + Tile::kTileA + 4 * Tile::x();
    const auto load = [&](int k) {
#pragma unroll
      for (int i = 0; i < TM; i += 4) {
        *reinterpret_cast<float4*>(&a[k % 2][i]) =
            *reinterpret_cast<const float4*>(a_tile + k * kStrideA + i * Tile::kThreadsY);
      }
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        *reinterpret_cast<float4*>(&b[k % 2][j]) =
            *reinterpret_cast<const float4*>(b_tile + k * BN + j * Tile::kThreadsX);
      }
    };
    const bool more = step + kStages - 1 < end;
    load(0);
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      if (k + 1 < BK) load(k + 1);
      if (more) {
#pragma unroll
        for (int i = k * kCopies / BK; i < (k + 1) * kCopies / BK; ++i) copy(writing, i, 0);
      }
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int forth = 0; forth < TN; ++forth) {
          const int j = i % 2 == 0 ? forth : TN - 1 - forth;
          sum[i][j] += a[k % 2][i] * b[k % 2][j];
        }
      }
    }
    if (more) move_on();
    copy_async_commit();
    reading = reading + kStage < kStages * kStage ? reading + kStage : 0;
  }
}

/// Stores row number i of those that a thread owns, of the tile at (row0, col0). kAligned: C's rows
/// are aligned to 16 bytes, and each thread stores four neighbours at once. Else the lanes of a
/// warp store neighbours of a row (Fp32Lanes).
template <class Tile, bool kAligned>
__device__ void store_fp32_row(float* tiles, const float (&sum)[Tile::TN], const Fp32Matrices& to,
                               int row0, int col0, int i) {
  const int first_row = row0 + i / 4 * 4 * Tile::kThreadsY + i % 4;
  float* const of_warp = tiles + Tile::kRowsAt + threadIdx.x / 32 * Tile::Lanes::kFloats;
#pragma unroll
  for (int j = 0; j < Tile::TN; j += 4) {
    const float4 four = make_float4(sum[j], sum[j + 1], sum[j + 2], sum[j + 3]);
    Tile::Lanes::template store<kAligned, true>(of_warp, four, to.C, to.shape, first_row, Tile::y(),
                                                col0 + j * Tile::kThreadsX, Tile::x());
  }
}

/// The block has range number blockIdx.x % ranges of k of tile blockIdx.x / ranges; tiles are
/// numbered along C's rows. `ranges` is 1, 2, 4 or 8, and if it is more than 1, that of the blocks
/// of a cluster.
template <class Tile, bool kAligned>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    fp32_block_product(Fp32Matrices of, int ranges) {
  extern __shared__ __align__(16) float fp32_block_tiles[];
  float* const tiles = fp32_block_tiles;
  const int tile = static_cast<int>(blockIdx.x) / ranges;
  const int tiles_across = ceil_div(of.shape.cols, Tile::BN),
            steps = ceil_div(of.shape.depth, Tile::BK);
  const int row0 = tile / tiles_across * Tile::BM, col0 = tile % tiles_across * Tile::BN;
  float sum[Tile::TM][Tile::TN] = {};
  if (ranges == 1) {
    wait_for_previous_kernel();
    add_fp32_steps<Tile, kAligned>(tiles, of, row0, col0, 0, steps, sum);
#pragma unroll
    for (int i = 0; i < Tile::TM; ++i)
      store_fp32_row<Tile, kAligned>(tiles, sum[i], of, row0, col0, i);
    return;
  }
#if CLUSTER_CODE
  // All have multiplied, so tiles may be written over; what others have sent is there.
  Barrier* const multiplied = reinterpret_cast<Barrier*>(tiles + Tile::kBarriersAt);
  Barrier* const come = multiplied + 1;
  const int rank = static_cast<int>(blockIdx.x) % ranges, own_rows = Tile::TM / ranges;
  if (threadIdx.x == 0) {
    barrier_init(multiplied, ranges);
    barrier_init(come, 1);
    barrier_init_fence();
    barrier_arrive_expect(come, Tile::BM * Tile::BN * 4);
  }
  cluster_arrive();
  wait_for_previous_kernel();
  add_fp32_steps<Tile, kAligned>(tiles, of, row0, col0,
                                 static_cast<int>(int64_t{steps} * rank / ranges),
                                 static_cast<int>(int64_t{steps} * (rank + 1) / ranges), sum);
  __syncthreads();
  cluster_wait();
  if (static_cast<int>(threadIdx.x) < ranges) barrier_arrive(multiplied, threadIdx.x);
  barrier_wait(multiplied, 0);
  // Where a block finds what block `from` has of its row number `row`: as fp32_block_tiles[from *
  // own_rows + row][column][thread].
  float* const mine = tiles + rank * own_rows * Tile::TN * Tile::kThreads + threadIdx.x;
#pragma unroll
  for (int i = 0; i < Tile::TM; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::TN; ++j) {
      store_push(mine + (i % own_rows * Tile::TN + j) * Tile::kThreads, sum[i][j], come,
                 i / own_rows);
    }
  }
  barrier_wait(come, 0);
  for (int row = 0; row < own_rows; ++row) {
    float own[Tile::TN] = {};
    for (int from = 0; from < ranges; ++from) {
      const float* const sent =
          tiles + (from * own_rows + row) * Tile::TN * Tile::kThreads + threadIdx.x;
#pragma unroll
      for (int j = 0; j < Tile::TN; ++j) own[j] += sent[j * Tile::kThreads];
    }
    store_fp32_row<Tile, kAligned>(tiles, own, of, row0, col0, rank * own_rows + row);
  }
#endif
}

/// How many blocks a multiprocessor has room for. It has as much shared memory as a block may ask
/// for and 1 KiB, and each block takes 1 KiB more than it asks for.
template <class Tile>
int resident_fp32_blocks() {
  return std::clamp((most_shared_bytes() + 1024) / (Tile::kSharedBytes + 1024), 1, Tile::kResident);
}

/// What costs a multiprocessor cycles: fitted to shapes drawn at random, on an H200.
struct Fp32BlockCosts {
  static constexpr double kMultiply = 1.027;  ///< a multiply-add of a warp
  static constexpr double kCopy = 2.17;       ///< of a warp's copy
  static constexpr double kStep = 42.5;       ///< of each step of a block
  static constexpr double kAlone = 1.505;     ///< a multiply-add of a warp, if it is alone
  static constexpr double kWait = 98;         ///< more for each step of such a warp
  static constexpr double kStored = 0.122;    ///< of a number of C
  static constexpr double kRowStore = 0.309;  ///< more, where C is stored in rows
  static constexpr double kMeet = 1273;       ///< of a cluster
  static constexpr double kSent = 0.274;      ///< of a number that is sent to another block
  static constexpr double kLaunch = 1;        ///< microseconds
  /// The blocks of a cluster are on neighbours, of which there are 16 or 18. Clusters of more than
  /// two leave some of these without a block, and so others have more of them.
  static constexpr double kUneven = 1.07;
};

/// How long the product should take with this tile and so many ranges of k. A multiprocessor has up
/// to kResident blocks, and when these end others. Its four schedulers have whole warps: three
/// blocks of two warps take as long as four. With few blocks each step takes as long as one warp
/// needs for it.
template <class Tile, bool kAligned>
double fp32_block_microseconds(const ProductShape& shape, int ranges) {
  using Costs = Fp32BlockCosts;
  constexpr double kNumbers = Tile::BM * Tile::BN;
  constexpr double kOfWarp = Tile::BK * Tile::TM * Tile::TN;  // multiply-adds of a step
  constexpr double kCopies = (Tile::BM + Tile::BN / (kAligned ? 4.0 : 1.0)) * Tile::BK / 32;
  const auto step = [](int blocks) {
    const auto work = [](int warps) { return ceil_div(warps * Tile::kThreads / 32, 4) * kOfWarp; };
    return std::max(
        Costs::kMultiply * work(blocks) + blocks * (Costs::kCopy * kCopies + Costs::kStep),
        Costs::kAlone * work(1) + Costs::kWait);
  };
  const int steps = ceil_div(ceil_div(shape.depth, Tile::BK), ranges);
  const int64_t tiles = int64_t{ceil_div(shape.rows, Tile::BM)} * ceil_div(shape.cols, Tile::BN);
  const double all = static_cast<double>(tiles * ranges) * (ranges > 2 ? Costs::kUneven : 1);
  const auto blocks = static_cast<int64_t>(std::ceil(all / multiprocessors()));
  const int resident = resident_fp32_blocks<Tile>();
  const int left = static_cast<int>(blocks % resident);
  const double numbers = static_cast<double>(blocks) * kNumbers;
  double work = steps * (static_cast<double>(blocks / resident) * step(resident) +
                         (left > 0 ? step(left) : 0)) +
                numbers / ranges * (Costs::kStored + (kAligned ? 0 : Costs::kRowStore));
  if (ranges > 1) work += Costs::kMeet + numbers * Costs::kSent;
  const double bytes = 4.0 * (1.0 * shape.rows * shape.depth + 1.0 * shape.depth * shape.cols +
                              1.0 * shape.rows * shape.cols);
  return Costs::kLaunch + std::max(work / cycles(), bytes / memory_rate());
}

}  // namespace operators::product
