// C = A B in true fp32, for any shape, on any GPU: lesson 2's last kernel, with tiles and a
// division of the work that suit the shape.
//
//     A (rows x depth), B (depth x cols), C (rows x cols): fp32, dense, row-major
//
// Where lesson 2's kernel is slow, and what helps there:
//
//   - Tiles that do not fill the last round. For 3000 x 3000 elements there are 24 x 12 tiles of
//     128 x 256: 132 multiprocessors compute 264 of them in two rounds, and in a third one 24 work
//     and 108 wait. So the steps of the last tiles are put in a line, and each block gets an equal
//     range of it, which may begin or end in the middle of a tile:
//
//         block 0 |--- tile 0 ---|-- tile 1, first steps
//         block 1                   tile 1, last steps --|--- tile 2 ---|-- tile 3 ...
//
//     A block that begins inside of a tile hands its sums through memory to the one that has the
//     tile's first steps. That one adds them, always in the same order, and stores the tile.
//   - Large tiles. 4097 rows need a 33rd row of tiles for one row of C. With 128 x 256 that costs
//     as much as 128 rows. And only one block with such a tile fits on a multiprocessor, but two
//     with 64 x 128: one multiplies while the other waits at a barrier.
//   - Few tiles. 512 x 512 elements are only 32 tiles of 64 x 128, but 64 of 64 x 64. There each of
//     256 threads would own 4 x 4 elements, with twice the reads for a multiply-add. So a thread
//     owns 8 x 8 elements, and 64 threads are enough. A block has four such groups, called slices:
//     each multiplies a quarter of the k of every step, and at the end they add up their sums
//     through shared memory.
//   - Rows that are not aligned to 16 bytes. For a large product, another kernel first copies B
//     into rows that are. For a small one that launch would take longer than it saves, and B is
//     copied by single floats. A always is, since it is transposed on the way.
//
// Estimates leave out what is hopeless; the caller tries the others (see Way).
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "operators/estimate.h"
#include "operators/operands.h"
#include "operators/product/shape.h"
#include "primitives/async_copy.cuh"
#include "primitives/launch.h"
#include "primitives/spin.cuh"

namespace operators::product {

using namespace primitives;
using operators::Memory, operators::Way, operators::Workspace;

inline constexpr int kFp32Threads = 256;  ///< of a block, whatever its tile

/// A block's tile has BM x BN elements of C, of which a thread owns TM x TN, and a step BK of k.
/// kStages pairs of tiles of A and B are in shared memory.
template <int BM_, int BN_, int BK_, int TM_, int TN_, int kStages_, int kSlices_, int kResident_,
          bool kAligned_>
struct Fp32Tile {
  static constexpr int BM = BM_, BN = BN_, BK = BK_, TM = TM_, TN = TN_, kStages = kStages_;
  static constexpr int kSlices = kSlices_;      ///< groups of threads that divide each step's k
  static constexpr int kResident = kResident_;  ///< blocks for which a multiprocessor has registers
  static constexpr bool kAligned = kAligned_;   ///< B, or its copy, has rows aligned to 16 bytes
  static constexpr int kThreadsX = BN / TN, kThreadsY = BM / TM;
  static constexpr int kSliceThreads = kThreadsX * kThreadsY;
  static_assert(kSlices * kSliceThreads == kFp32Threads);
  /// In shared memory are kStages tiles of A, transposed, then kStages of B.
  static constexpr int kStrideA = BM + 4, kTileA = BK * kStrideA, kTileB = BK * BN;
  static constexpr int kSharedBytes = kStages * (kTileA + kTileB) * static_cast<int>(sizeof(float));

  /// Which slice this thread belongs to, and where it stands among the others of that: the threads
  /// of a warp 4 x 8, so that they read 4 groups of rows and 8 of columns, without a bank conflict.
  static __device__ int slice() { return kSlices == 1 ? 0 : threadIdx.x / kSliceThreads; }
  static __device__ int warp() {
    return (kSlices == 1 ? threadIdx.x : threadIdx.x % kSliceThreads) / 32;
  }
  static __device__ int x() { return warp() % (kThreadsX / 8) * 8 + threadIdx.x % 8; }
  static __device__ int y() { return warp() / (kThreadsX / 8) * 4 + threadIdx.x % 32 / 8; }
};

/// What is multiplied. From a row of B to the next it is `pitch` numbers.
struct Fp32Operands {
  const float *A, *B;
  float* C;
  ProductShape shape;
  int pitch;
};

/// Multiplies steps `begin` to `end` of the tile of C at (row0, col0); finish(sum) says what
/// becomes of a thread's sums.
///
/// Where to copy from is worked out once, and a step only moves on two pointers. Nothing checks for
/// the edges of the matrix: a row or column outside is replaced by one inside, since what it
/// contributes to is never stored: a row by the last one. (It takes long if many threads copy the
/// same number. Tiles with slices therefore replace a column of B beyond the right edge by one as
/// far from the left edge.) Only along k, which is summed over, zeros are needed.
template <class Tile, class Finish>
__device__ void multiply_fp32_steps(float* tiles, const Fp32Operands& of, int row0, int col0,
                                    int begin, int end, Finish finish) {
  const int depth = of.shape.depth, pitch = of.pitch;
  const int x = Tile::x(), y = Tile::y();
  constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, TM = Tile::TM, TN = Tile::TN;
  constexpr int kStages = Tile::kStages, kStrideA = Tile::kStrideA;
  float* a_tiles = tiles;
  float* b_tiles = tiles + kStages * Tile::kTileA;

  // A is transposed on the way, so it is copied by single floats; B by kWidth. At once the block's
  // threads cover 16 columns of kRowsA rows of the tile of A, and kRowsB rows of the tile of B.
  constexpr int kWidth = Tile::kAligned ? 4 : 1;
  constexpr int kRowsA = kFp32Threads / 16, kRowsB = kFp32Threads / (BN / kWidth);
  const int a_row = threadIdx.x / 16, a_k = threadIdx.x % 16;
  const int b_k = threadIdx.x / (BN / kWidth), b_col = threadIdx.x % (BN / kWidth) * kWidth;
  const float* a_from = of.A + static_cast<size_t>(row0) * depth + begin * BK + a_k;
  const int b_at = Tile::kSlices > 1 ? (col0 + b_col) % pitch : min(col0 + b_col, pitch - kWidth);
  const float* b_from = of.B + static_cast<size_t>(begin * BK + b_k) * pitch + b_at;
  int a_offset[BM / kRowsA];
#pragma unroll
  for (int i = 0; i < BM / kRowsA; ++i) {
    a_offset[i] = (min(row0 + a_row + i * kRowsA, of.shape.rows - 1) - row0) * depth;
  }
  const auto copy_tiles = [&](int step) {
    const int stage = step % kStages, k_left = depth - step * BK;
    float* a_to = a_tiles + stage * Tile::kTileA + a_k * kStrideA + a_row;
    float* b_to = b_tiles + stage * Tile::kTileB + b_k * BN + b_col;
#pragma unroll
    for (int i = 0; i < BM / kRowsA; ++i) {
#pragma unroll
      for (int k = 0; k < BK; k += 16) {
        copy_async<4>(a_to + i * kRowsA + k * kStrideA, a_from + a_offset[i] + k, a_k + k < k_left);
      }
    }
#pragma unroll
    for (int i = 0; i < BK / kRowsB; ++i) {
      copy_async<4 * kWidth>(b_to + i * kRowsB * BN, b_from + i * kRowsB * pitch,
                             b_k + i * kRowsB < k_left);
    }
    a_from += BK;
    b_from += static_cast<size_t>(BK) * pitch;
  };

  for (int step = begin; step < begin + kStages - 1; ++step) {
    if (step < end) copy_tiles(step);
    copy_async_commit();
  }
  float sum[TM][TN] = {};
  float a[2][TM], b[2][TN];                    // of this k, and of the next
  constexpr int kDepth = BK / Tile::kSlices;   // so many k of each step belong to one slice
  const int first_k = kDepth * Tile::slice();  // where those of this thread's slice begin
  for (int step = begin; step < end; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    const float* a_tile = a_tiles + step % kStages * Tile::kTileA + first_k * kStrideA + 4 * y;
    const float* b_tile = b_tiles + step % kStages * Tile::kTileB + first_k * BN + 4 * x;
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
    load(0);
    if (step + kStages - 1 < end) copy_tiles(step + kStages - 1);
    copy_async_commit();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      if (k + 1 < kDepth) load(k + 1);
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int forth = 0; forth < TN; ++forth) {
          const int j = i % 2 == 0 ? forth : TN - 1 - forth;
          sum[i][j] += a[k % 2][i] * b[k % 2][j];
        }
      }
    }
  }
  finish(sum);
}

/// The columns of a copy of B are in another order (see align_fp32_rows): neighbours in `sum` are
/// then so many columns of C apart.
inline constexpr int kColumnsApart = 8;

/// Stores a thread's sums. Of a tile with several slices only kOwn of the TM rows are left to the
/// thread. kAligned: C's rows are aligned to 16 bytes. (Tile::kAligned says so of B's.)
template <class Tile, bool kAligned, int kOwn>
__device__ void store_fp32_sums(const float (&sum)[kOwn][Tile::TN], const Fp32Operands& to,
                                int row0, int col0) {
  constexpr int kApart = Tile::kAligned && !kAligned ? kColumnsApart : 1;
  const int x = Tile::x(), y = Tile::y(), cols = to.shape.cols;
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    const int i = own + kOwn * Tile::slice();
    const int row = row0 + 4 * y + i / 4 * 4 * Tile::kThreadsY + i % 4;
    if (row >= to.shape.rows) continue;
#pragma unroll
    for (int j = 0; j < Tile::TN; j += 4) {
      const int col = col0 + x / kApart * 4 * kApart + x % kApart + j * Tile::kThreadsX;
      float* at = to.C + static_cast<size_t>(row) * cols + col;
      if constexpr (kAligned) {
        if (col < cols)
          *reinterpret_cast<float4*>(at) = *reinterpret_cast<const float4*>(&sum[own][j]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (col + kApart * e < cols) at[kApart * e] = sum[own][j + e];
        }
      }
    }
  }
}

/// What a block does at a time: of tile number `tile` the steps from `begin` up to, not including,
/// `end`. If `begin` is 0, the blocks after this one, up to number `last`, do the tile's other
/// steps.
struct Fp32Piece {
  int tile, begin, end, last;
};

/// What costs a multiprocessor cycles beside its multiply-adds: measured once, on an H200, for a
/// coarse estimate.
struct Fp32Costs {
  static constexpr double kStep = 540;      ///< until a step's first numbers are in registers
  static constexpr double kNarrowCopy = 6;  ///< of a warp, of 4 bytes a thread where 16 would do
  static constexpr double kFlag = 1200;     ///< of a handover: until the other block sees the flag
  static constexpr double kPiece = 1000;  ///< and for each block's sums to come from the L2 cache,
  static constexpr double kL2Bytes = 24;  ///< so many bytes of them a cycle
};

/// Which block does what. If the number of tiles is a multiple of that of blocks, no tile is
/// shared. Else each block first takes whole tiles, while tiles for two more rounds are left:
/// blocks at work together then read neighbouring tiles at the same k. The steps of the other tiles
/// form a line, one tile after the other. Each block gets one range of the line, and all ranges are
/// equally long. A piece is the part of a range that is inside of one tile.
template <class Tile>
struct Fp32Timetable {
  struct Point {  ///< a place on the line
    int tile, step;
  };
  int cols;                 ///< tiles beside each other
  int steps;                ///< of a tile
  int whole;                ///< so many tiles are not shared, those with the lowest numbers
  int blocks, each, rest;   ///< a block has `each` steps of the line, the first `rest` one more
  double microseconds = 0;  ///< that this should take

  static int64_t tiles_of(const ProductShape& shape) {
    return static_cast<int64_t>(ceil_div(shape.rows, Tile::BM)) * ceil_div(shape.cols, Tile::BN);
  }
  static int steps_of(const ProductShape& shape) { return ceil_div(shape.depth, Tile::BK); }

  Fp32Timetable(const ProductShape& shape, int sms, int block_count)
      : cols(ceil_div(shape.cols, Tile::BN)), steps(steps_of(shape)), blocks(block_count) {
    const int tiles = static_cast<int>(tiles_of(shape));
    whole = tiles % blocks == 0 ? tiles : std::max(0, tiles / blocks - 1) * blocks;
    const int line = (tiles - whole) * steps;
    each = line / blocks, rest = line % blocks;

    // No range reaches from one tile into the next. (If one does, a tile may have a piece more.)
    const bool even = blocks % tiles == 0 && steps % (blocks / tiles) == 0;
    const int pieces = ceil_div(blocks, tiles) + !even;
    const int crowd = ceil_div(blocks, sms);  // blocks that share a multiprocessor
    constexpr double kMultiplyAdds = Tile::BM * Tile::BN * Tile::BK / 128.0;  // 128 in a cycle
    constexpr double kNarrow = Tile::kAligned ? 0 : 0.75 * Tile::kTileB / 32;
    const double step =
        Fp32Costs::kStep + crowd * (kMultiplyAdds + kNarrow * Fp32Costs::kNarrowCopy);
    const double handover = crowd * (Fp32Costs::kFlag + pieces * Fp32Costs::kPiece +
                                     4.0 * Tile::BM * Tile::BN / Fp32Costs::kL2Bytes);
    microseconds =
        kFirstLaunch +
        (std::ceil(1.0 * tiles * steps / blocks) * step + (pieces > 1 ? handover : 0)) / kCycles;
  }

  /// With the two numbers of blocks that should be the best: where each tile gets the same number
  /// of them, and where each multiprocessor does. At most `capacity` run at the same time.
  static std::vector<Fp32Timetable> plans(const ProductShape& shape, int sms, int capacity) {
    const int64_t tiles = tiles_of(shape), steps = steps_of(shape);
    if (tiles * steps > INT_MAX) return {};
    const int64_t most = std::min<int64_t>(capacity, tiles * steps);
    std::vector<Fp32Timetable> plans;
    const auto add_best = [&](int64_t unit) {
      std::optional<Fp32Timetable> best;
      for (int64_t count = unit; count <= most; count += unit) {
        const Fp32Timetable plan(shape, sms, static_cast<int>(count));
        if (!best || plan.microseconds < best->microseconds) best = plan;
      }
      if (best) plans.push_back(*best);
    };
    add_best(tiles);
    if (sms % tiles != 0) add_best(sms);
    return plans;
  }

  /// Where the range of block number `block` begins, and that of the block before it ends.
  __device__ Point start(int block) const {
    const int position = block * each + min(block, rest);
    return {whole + position / steps, position % steps};
  }

  /// What block number `block` does after i other pieces. Nothing: begin = end.
  __device__ Fp32Piece piece(int block, int i) const {
    const int tile = block + i * blocks;
    if (tile < whole) return {tile, 0, steps, block};
    const Point from = start(block), to = start(block + 1);
    i -= whole / blocks;
    Fp32Piece piece{from.tile + i, i > 0 ? 0 : from.step, steps, block};
    if (piece.tile == to.tile) piece.end = to.step;
    if (piece.tile > to.tile) piece.end = piece.begin;
    if (piece.begin == piece.end) return piece;
    // Who has the steps that follow?
    for (int end = piece.begin > 0 ? steps : piece.end; end < steps;) {
      const Point next = start(++piece.last + 1);
      end = next.tile == piece.tile ? next.step : steps;
    }
    return piece;
  }

  /// The first row (y) and column (x) of a tile.
  __device__ int2 place(int tile) const { return {tile % cols * Tile::BN, tile / cols * Tile::BM}; }
};

/// How sums get from one block to another. Each block has room for its sums in memory, and a flag
/// that is 0 before and after every launch. A thread takes over the sums of the thread with the
/// same number in the other block, 16 bytes at a time. A block may wait for another one, because
/// the grid has only as many blocks as run at the same time.
template <int kBlockFloats>
struct Fp32Handover {
  unsigned* ready;
  float* sums;

  template <int TM, int TN>
  __device__ void give(const float (&sum)[TM][TN]) const {
    float4* to = reinterpret_cast<float4*>(sums + size_t{kBlockFloats} * blockIdx.x) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
      for (int j = 0; j < TN; j += 4, to += kFp32Threads) {
        __stcg(to, make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]));
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) GridCount(ready[blockIdx.x]).store(1, cuda::memory_order_release);
  }

  template <int TM, int TN>
  __device__ void add(float (&sum)[TM][TN], int block) const {
    if (threadIdx.x == 0) {
      const GridCount flag(ready[block]);
      wait_for_count(flag, 1, "the other block's sums");
      flag.store(0, cuda::memory_order_relaxed);
    }
    __syncthreads();
    const float4* from =
        reinterpret_cast<const float4*>(sums + size_t{kBlockFloats} * block) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
      for (int j = 0; j < TN; j += 4, from += kFp32Threads) {
        const float4 more = __ldcg(from);
        sum[i][j] += more.x;
        sum[i][j + 1] += more.y;
        sum[i][j + 2] += more.z;
        sum[i][j + 3] += more.w;
      }
    }
  }
};

/// Adds up the sums of the slices of a block. Threads kApart apart have sums of the same elements
/// of C: one gives the upper half of its rows to the other, and gets the lower half of that one's.
/// Then those half as far apart do so with what they have left. finish() gets the TM / kSlices rows
/// that remain a thread's own.
template <int kSlices, int kApart, int TM, int TN, class Finish>
__device__ void add_slices(float* shared, float (&sum)[TM][TN], Finish finish) {
  if constexpr (kSlices == 1) {
    finish(sum);
  } else {
    const bool upper = threadIdx.x / kApart % 2 == 1;
    float own[TM / 2][TN];
    float4* at = reinterpret_cast<float4*>(shared);
    __syncthreads();  // All have read the last tiles, or the last halves.
#pragma unroll
    for (int i = 0; i < TM / 2; ++i) {
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        float give[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          give[e] = upper ? sum[i][j + e] : sum[i + TM / 2][j + e];
          own[i][j + e] = upper ? sum[i + TM / 2][j + e] : sum[i][j + e];
        }
        at[(i * TN + j) / 4 * kFp32Threads + threadIdx.x] =
            make_float4(give[0], give[1], give[2], give[3]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TM / 2; ++i) {
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        const float4 more = at[(i * TN + j) / 4 * kFp32Threads + (threadIdx.x ^ kApart)];
        own[i][j] += more.x;
        own[i][j + 1] += more.y;
        own[i][j + 2] += more.z;
        own[i][j + 3] += more.w;
      }
    }
    add_slices<kSlices / 2, kApart / 2>(shared, own, finish);
  }
}

/// The piece of the tile at `place`. Not inlined: the compiler then finds registers for it as if it
/// were alone.
template <class Tile, bool kAligned>
__device__ __noinline__ void multiply_fp32_piece(float* tiles, Fp32Operands of,
                                                 Fp32Handover<Tile::BM * Tile::BN> handover,
                                                 int2 place, Fp32Piece piece) {
  const auto finish = [&](auto& sum) {
    if (piece.begin > 0) return handover.give(sum);
    for (int other = blockIdx.x + 1; other <= piece.last; ++other) handover.add(sum, other);
    store_fp32_sums<Tile, kAligned>(sum, of, place.y, place.x);
  };
  multiply_fp32_steps<Tile>(tiles, of, place.y, place.x, piece.begin, piece.end, [&](auto& sum) {
    add_slices<Tile::kSlices, kFp32Threads / 2>(tiles, sum, finish);
  });
}

/// A block does its pieces, one after the other. Sums stay in registers, and only those of a shared
/// tile go through memory. Ranges are equally long, so all blocks end at about the same time.
template <class Tile, bool kAligned>
__global__ void __launch_bounds__(kFp32Threads, Tile::kResident)
    fp32_product(Fp32Operands of, Fp32Timetable<Tile> timetable,
                 Fp32Handover<Tile::BM * Tile::BN> handover) {
  extern __shared__ __align__(16) float fp32_tiles[];
  for (int i = 0;; ++i) {
    const Fp32Piece piece = timetable.piece(blockIdx.x, i);
    if (piece.begin == piece.end) return;
    const int2 place = timetable.place(piece.tile);
    __syncthreads();  // All have read the last tiles of the piece before.
    multiply_fp32_piece<Tile, kAligned>(fp32_tiles, of, handover, place, piece);
  }
}

/// Copies B into rows that are `pitch` apart and aligned; a block copies a row. It also changes the
/// order of each 32 columns: number c of them goes to place 4 (c % 8) + c / 8. The reason is C,
/// whose rows are not aligned either, so that a thread stores single floats. The four neighbours in
/// shared memory that a thread multiplies are then columns of C that are 8 apart, and 8 lanes store
/// 8 neighbours at a time. In the old order these 8 elements would be 4 columns apart.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    align_fp32_rows(const float* __restrict__ from, float* __restrict__ to, int cols, int pitch) {
  from += static_cast<size_t>(blockIdx.x) * cols;
  to += static_cast<size_t>(blockIdx.x) * pitch;
  constexpr int kAtOnce = 8;  // loads of a thread that are under way together
  for (int first = threadIdx.x; first < cols; first += kAtOnce * kThreads) {
    float values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int col = first + i * kThreads;
      values[i] = col < cols ? from[col] : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int col = first + i * kThreads;
      if (col < cols) to[col / 32 * 32 + col % 8 * 4 + col / 8 % 4] = values[i];
    }
  }
}

/// The ways to compute the product of A and B. Sizes are at least 1, A and B may not overlap C. No
/// way with tiles of which C has so many that their steps cannot be counted in 31 bits, or that
/// need more shared memory than a block of this device can have.
class Fp32Product {
 public:
  Fp32Product(const Workspace& workspace, Memory<float> A, Memory<float> B, Memory<float> C,
              ProductShape shape)
      : A_(std::move(A)),
        B_(std::move(B)),
        C_(std::move(C)),
        shape_(shape),
        pitch_(ceil_div(shape.cols, 32) * 32),
        flags_(workspace.alone ? workspace.zeros<unsigned>(kMostResident * multiprocessors())
                               : workspace.any<unsigned>(1)),
        sums_(workspace.any<float>(workspace.alone ? size_t{kMostFloats} * multiprocessors() : 1)),
        copy_(workspace.any<float>(aligned() ? 1 : static_cast<size_t>(shape.depth) * pitch_)),
        workspace_(workspace) {}

  std::vector<Way> ways() const { return aligned() ? all_ways<true>() : all_ways<false>(); }

 private:
  static constexpr int kMostResident = 3;        // blocks of a multiprocessor
  static constexpr int kMostFloats = 128 * 256;  // of their tiles together

  bool aligned() const { return shape_.cols % 4 == 0; }  // rows of B and C, to 16 bytes

  template <bool kAligned>
  std::vector<Way> all_ways() const {
    std::vector<Way> ways;
    add<Fp32Tile<128, 256, 16, 8, 16, 3, 1, 1, true>, kAligned>(ways);
    add<Fp32Tile<64, 128, 32, 8, 8, 4, 2, 2, true>, kAligned>(ways);
    add<Fp32Tile<64, 64, 32, 8, 8, 3, 4, 2, true>, kAligned>(ways);
    add<Fp32Tile<32, 32, 32, 8, 4, 6, 8, 3, kAligned>, kAligned>(ways);
    if (!kAligned) add<Fp32Tile<64, 64, 32, 8, 8, 3, 4, 2, kAligned>, kAligned>(ways);
    return ways;
  }

  template <class Tile, bool kAligned>
  void add(std::vector<Way>& ways) const {
    static_assert(Tile::kResident <= kMostResident);
    static_assert(Tile::kResident * Tile::BM * Tile::BN <= kMostFloats);
    constexpr bool kCopied = Tile::kAligned && !kAligned;
    const auto kernel = fp32_product<Tile, kAligned>;
    allow_shared_bytes(kernel, Tile::kSharedBytes);
    if (Tile::kSharedBytes > most_shared_bytes()) return;
    const int sms = multiprocessors();
    const int capacity =
        std::min(resident_blocks(kernel, kFp32Threads, Tile::kSharedBytes), Tile::kResident * sms);
    auto plans = Fp32Timetable<Tile>::plans(shape_, sms, capacity);
    // Of a shared tile it is the block of the lowest number that waits. Where a launch is not alone
    // each tile has a block, and none waits.
    if (!workspace_.alone && !plans.empty()) {
      const int64_t tiles = Fp32Timetable<Tile>::tiles_of(shape_);
      plans = {Fp32Timetable<Tile>(shape_, sms, static_cast<int>(tiles))};
    }
    for (const auto& plan : plans) {
      const double copy = kNextLaunch + 8.0 * shape_.depth * shape_.cols / kMemoryBytes;
      ways.push_back({name_of<Tile>(plan, kCopied), plan.microseconds + (kCopied ? copy : 0),
                      [self = *this, plan] { self.launch<Tile, kAligned, kCopied>(plan); },
                      Tile::kSharedBytes});
    }
  }

  template <class Tile, bool kAligned, bool kCopied>
  void launch(const Fp32Timetable<Tile>& plan) const {
    if (kCopied)
      align_fp32_rows<kFp32Threads>
          <<<shape_.depth, kFp32Threads, 0, workspace_.stream>>>(B_, copy_, shape_.cols, pitch_);
    fp32_product<Tile, kAligned>
        <<<plan.blocks, kFp32Threads, Tile::kSharedBytes, workspace_.stream>>>(
            Fp32Operands{A_, kCopied ? copy_.data() : B_.data(), C_, shape_,
                         kCopied ? pitch_ : shape_.cols},
            plan, Fp32Handover<Tile::BM * Tile::BN>{flags_, sums_});
  }

  /// "tile 64 x 128; slices: 2; blocks: 264; tiles shared; B copied"
  template <class Tile>
  std::string name_of(const Fp32Timetable<Tile>& plan, bool copied) const {
    const bool shared = plan.whole < Fp32Timetable<Tile>::tiles_of(shape_);
    return "tile " + std::to_string(Tile::BM) + " x " + std::to_string(Tile::BN) +
           "; slices: " + std::to_string(Tile::kSlices) +
           "; blocks: " + std::to_string(plan.blocks) + (shared ? "; tiles shared" : "") +
           (copied ? "; B copied" : "");
  }

  Memory<float> A_, B_, C_;
  ProductShape shape_;
  int pitch_;  // of the copy of B
  Memory<unsigned> flags_;
  Memory<float> sums_, copy_;
  Workspace workspace_;
};

}  // namespace operators::product
