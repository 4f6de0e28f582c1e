// Products in fp16 or bf16 with fp32 sums on compute capability 8.0 and newer: lesson 3's *double
// buffering* (cp.async, ldmatrix, mma.sync) for any shape. What comes of the sums is an epilogue's
// business, and there may be two right factors side by side, as the gated layer has them.
//
// Beyond the lesson:
//   - Rows and columns outside are neither read nor stored. So shapes are what they are, as long as
//     rows begin at multiples of 16 bytes.
//   - Of the left factor a warp has the fragments of two times 16 rows, not of all its rows: while
//     it multiplies one, the next is loaded. That is 24 registers less, and loads from shared
//     memory stand evenly between products.
//   - Where there are few tiles, several blocks share one and take a part of the depth each
//     (a slice). Whoever is the last adds up, always in the same order, and nobody waits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "primitives/async_copy.cuh"
#include "primitives/fragments.cuh"
#include "primitives/launch.h"
#include "primitives/row_parts.cuh"

namespace operators::product {

/// A block has BM x BN sums, its warps kWarpsM x kWarpsN of them; a step takes BK of the depth. So
/// many blocks are to fit on a multiprocessor.
template <int kBM, int kBN, int kBK, int kRowsOfWarps, int kColsOfWarps, int kStagesAhead,
          int kBlocks>
struct MmaTile {
  static constexpr int BM = kBM, BN = kBN, BK = kBK, kStages = kStagesAhead, kResident = kBlocks;
  static constexpr int kWarpsM = kRowsOfWarps, kWarpsN = kColsOfWarps;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int WM = BM / kWarpsM, WN = BN / kWarpsN;         // a warp's sums
  static constexpr int kTileA = BM * BK, kStage = kTileA + BK * BN;  // elements
  static constexpr int kSharedBytes = 2 * std::max(kStages * kStage, BM* BN);
  static constexpr int kQuads = WM / 16 * (WN / 8);  // float4 of a thread's sums
  static_assert(BK % 32 == 0 && WM % 32 == 0 && WN % 32 == 0);
};

/// What a launch multiplies: A (rows, depth) by kFactors right factors of `cols` columns each, of
/// which a tile has equally many. Strides are multiples of 8.
template <typename T, int kFactors>
struct MmaFactors {
  const T* A;
  const T* B[kFactors];
  int64_t a_stride, b_stride;
  int rows, cols, depth;
};

/// In how many slices the depth is, each of so many steps, and where their sums meet.
struct MmaSlices {
  int count, steps;
  float4* partial;    ///< (tiles, count, quads of a thread, threads)
  unsigned* arrived;  ///< of each tile: see is_last_block()
};

/// What a thread copies of each step, pieces of 16 bytes: in A one of every kRowsA-th row of the
/// tile, in B one of every kRowsB-th.
template <class Tile, typename T, int kFactors>
struct MmaCopies {
  static constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK;
  static constexpr int kRowsA = Tile::kThreads / (BK / 8), kRowsB = Tile::kThreads / (BN / 8);
  static_assert(BM % kRowsA == 0 && BK % kRowsB == 0 && kRowsA % 8 == 0);
  static constexpr int kOfFactor = Tile::WN / kFactors;  // columns of a warp

  const T *a_from, *b_from;
  const int64_t a_step, b_step;  // to the thread's next row
  const int a_rows;              // from the thread's first one on
  const int b_bytes;             // of its piece that exist
  int k_left;                    // of the depth, from the next step on

  /// Copies begin at `first` of the depth and end at `end`.
  __device__ MmaCopies(const MmaFactors<T, kFactors>& of, int row0, int col0, int first, int end)
      : a_from(of.A + (int64_t{row0} + a_row()) * of.a_stride + first + a_k()),
        b_from(factor(of) + (int64_t{first} + b_k()) * of.b_stride + col0 + column()),
        a_step(of.a_stride * kRowsA),
        b_step(of.b_stride * kRowsB),
        a_rows(of.rows - row0 - a_row()),
        b_bytes(bytes_of(of.cols - col0 - column())),
        k_left(end - first) {}

  __device__ void start(T* a_tile) {
    T* const b_tile = a_tile + Tile::kTileA;
    const int a_bytes = bytes_of(k_left - a_k());
    const T* from = a_from;
#pragma unroll
    for (int i = 0; i < BM; i += kRowsA, from += a_step) {
      primitives::copy_async_part(a_tile + primitives::swizzle<BK>(a_row() + i, a_k()), from,
                                  i < a_rows ? a_bytes : 0);
    }
    from = b_from;
#pragma unroll
    for (int i = 0; i < BK; i += kRowsB, from += b_step) {
      primitives::copy_async_part(b_tile + primitives::swizzle<BN>(b_k() + i, b_col()), from,
                                  b_k() + i < k_left ? b_bytes : 0);
    }
    a_from += BK;
    b_from = from;
    k_left -= BK;
  }

 private:
  __device__ static int a_row() { return static_cast<int>(threadIdx.x) / (BK / 8); }
  __device__ static int a_k() { return static_cast<int>(threadIdx.x) % (BK / 8) * 8; }
  __device__ static int b_k() { return static_cast<int>(threadIdx.x) / (BN / 8); }
  __device__ static int b_col() { return static_cast<int>(threadIdx.x) % (BN / 8) * 8; }
  /// Of a warp's columns in the tile the first are of B[0], the others the same columns of B[1].
  __device__ static int column() {
    return b_col() / Tile::WN * kOfFactor + b_col() % Tile::WN % kOfFactor;
  }
  __device__ static const T* factor(const MmaFactors<T, kFactors>& of) {
    if constexpr (kFactors == 1) return of.B[0];
    return b_col() % Tile::WN < kOfFactor ? of.B[0] : of.B[1];
  }
  __device__ static int bytes_of(int elements) { return 2 * min(max(elements, 0), 8); }
};

/// The sums of `steps` steps. All fragments of the right factor are there twice, 16 of the depth
/// ahead; those of the left factor twice for 16 rows. The next step's tiles have to be there when
/// the last 16 of the depth have two times 16 rows left to be multiplied: all fragments that come
/// from this step's tiles have been loaded then. So the barrier stands there, and the copies after
/// it may go to the stage that was read.
template <class Tile, typename T, class Copies, class Sum>
__device__ __forceinline__ void multiply_steps(T* stages, Copies& copies, int steps, Sum& sum) {
  using namespace primitives;
  constexpr int BK = Tile::BK, BN = Tile::BN, kStages = Tile::kStages;
  constexpr int kRows = Tile::WM / 16, kCols = Tile::WN / 16;
  constexpr int kTurn = kRows - 2;  // the row at which the tiles change
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int a_lane = swizzle<BK>(warp / Tile::kWarpsN * Tile::WM + lane % 16, lane / 16 * 8);
  const int b_lane =
      Tile::kTileA + swizzle<BN>(lane % 16, warp % Tile::kWarpsN * Tile::WN + lane / 16 * 8);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < steps) copies.start(stages + stage * Tile::kStage);
    copy_async_commit();
  }
  copy_async_wait<kStages - 2>();
  __syncthreads();
  // Where the stages are that are read and filled, in elements.
  int reading = 0, writing = (kStages - 1) * Tile::kStage;

  unsigned a[2][4], b[2][kCols][4];
  ldmatrix_x4(a[0], stages + reading + a_lane);
#pragma unroll
  for (int j = 0; j < kCols; ++j) ldmatrix_x4_trans(b[0][j], stages + reading + (b_lane ^ 16 * j));
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int k = 0; k < BK; k += 16) {
      const bool turns = k + 16 == BK;
      const int now = k / 16 % 2, next_k = (k + 16) % BK;
      const int from_row = turns ? kTurn : 0;  // the first that loads of the next 16
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i + 1 < kRows)
          ldmatrix_x4(a[(i + 1) % 2], stages + reading + (a_lane ^ k) + (i + 1) * 16 * BK);
        if (turns && i == kTurn) {  // after the last step: loaded, but never used
          copy_async_wait<kStages - 2>();
          __syncthreads();
          reading += Tile::kStage;
          if (reading == kStages * Tile::kStage) reading = 0;
        }
        if (i + 1 == kRows) ldmatrix_x4(a[(i + 1) % 2], stages + reading + (a_lane ^ next_k));
        if (i >= from_row) {
          constexpr int kAll = kCols;
          const int rows = kRows - from_row, at = i - from_row;
#pragma unroll
          for (int j = 0; j < kAll; ++j) {
            if (j * rows / kAll != at) continue;
            ldmatrix_x4_trans(b[1 - now][j], stages + reading + (b_lane ^ 16 * j) + next_k * BN);
          }
        }
        if (k == 0 && i == 0) {
          if (step + kStages - 1 < steps) copies.start(stages + writing);
          copy_async_commit();
          writing += Tile::kStage;
          if (writing == kStages * Tile::kStage) writing = 0;
        }
#pragma unroll
        for (int forth = 0; forth < 2 * kCols; ++forth) {
          const int j = i % 2 == 0 ? forth : 2 * kCols - 1 - forth;
          mma_m16n8k16<T>(sum[i][j], a[i % 2], b[now][j / 2][j % 2 * 2],
                          b[now][j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
}

/// Adds up the sums of all slices of a tile. Returns whether this block has them then: the last one
/// that comes.
template <class Tile, class Sum>
__device__ __forceinline__ bool add_slices_up(Sum& sum, const MmaSlices& slices, int tile,
                                              int slice) {
  const auto room = [&](int of) {
    return slices.partial + (int64_t{tile} * slices.count + of) * Tile::kQuads * Tile::kThreads +
           threadIdx.x;
  };
  float4* to = room(slice);
#pragma unroll
  for (int i = 0; i < Tile::WM / 16; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::WN / 8; ++j, to += Tile::kThreads) {
      __stcg(to, make_float4(sum[i][j][0], sum[i][j][1], sum[i][j][2], sum[i][j][3]));
      sum[i][j][0] = sum[i][j][1] = sum[i][j][2] = sum[i][j][3] = 0;
    }
  }
  if (!primitives::is_last_block(slices.arrived + tile, slices.count)) return false;
  for (int of = 0; of < slices.count; ++of) {
    const float4* from = room(of);
#pragma unroll
    for (int i = 0; i < Tile::WM / 16; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::WN / 8; ++j, from += Tile::kThreads) {
        const float4 more = __ldcg(from);
        sum[i][j][0] += more.x, sum[i][j][1] += more.y;
        sum[i][j][2] += more.z, sum[i][j][3] += more.w;
      }
    }
  }
  return true;
}

/// A block has a tile, or a slice of its depth. Tiles are taken in groups of as many rows as fit
/// into about 2048, column by column, so that blocks that run at the same time share what they read
/// (lesson 3, *The order of blocks*). finish(sum, staging, row, col) is called by each warp with
/// the first row and column of its sums, counted in columns of one factor; `staging`, shared memory
/// for as many results, is the warp's own.
template <class Tile, typename T, int kFactors, class Epilogue>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    mma_product(const __grid_constant__ MmaFactors<T, kFactors> of,
                const __grid_constant__ MmaSlices slices, const __grid_constant__ Epilogue finish) {
  constexpr int kCols = Tile::BN / kFactors;  // of each factor
  constexpr int kGroup = 2048 / Tile::BM;
  extern __shared__ __align__(128) char mma_stages[];
  T* const stages = reinterpret_cast<T*>(mma_stages);
  const int tiles_m = (of.rows + Tile::BM - 1) / Tile::BM;
  const int tiles_n = (of.cols + kCols - 1) / kCols;
  const int tile = static_cast<int>(blockIdx.x) / slices.count;
  const int slice = static_cast<int>(blockIdx.x) % slices.count;
  const int first = tile / (kGroup * tiles_n) * kGroup, within = tile % (kGroup * tiles_n);
  const int group = min(kGroup, tiles_m - first);
  const int row0 = (first + within % group) * Tile::BM, col0 = within / group * kCols;

  const int begin = slice * slices.steps * Tile::BK;
  const int end =
      static_cast<int>(min(int64_t{of.depth}, int64_t{begin} + int64_t{slices.steps} * Tile::BK));
  float sum[Tile::WM / 16][Tile::WN / 8][4] = {};
  MmaCopies<Tile, T, kFactors> copies(of, row0, col0, begin, end);
  multiply_steps<Tile>(stages, copies, (end - begin + Tile::BK - 1) / Tile::BK, sum);
  if (slices.count > 1 && !add_slices_up<Tile>(sum, slices, tile, slice)) return;

  __syncthreads();  // all have read their last tiles
  const int warp = threadIdx.x / 32;
  finish(sum, stages + warp * Tile::WM * Tile::WN, row0 + warp / Tile::kWarpsN * Tile::WM,
         col0 + warp % Tile::kWarpsN * (Tile::WN / kFactors));
}

/// Where results go: a matrix (rows, cols) with rows `stride` elements apart.
template <typename T>
struct MmaResults {
  T* to;
  int64_t stride;
  int rows, cols;

  /// Stores a warp's kRows x kCols results from (row0, col0) on. pair(i, j) computes a pair of
  /// them, rounded: see for_pairs() in primitives/fragments.cuh. They go through `staging`, and
  /// leave from there as 16 bytes a lane where rows are aligned, else as neighbours in 2 bytes.
  template <int kRows, int kCols, typename Pair>
  __device__ __forceinline__ void store(T* staging, int row0, int col0, Pair pair) const {
    using namespace primitives;
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j) *pair_in<kCols>(staging, 0, 0, i, j) = pair(i, j);
    }
    __syncwarp();
    const bool aligned = stride % 8 == 0;
    const int lane = threadIdx.x % 32;
    for (int i = lane * 8; i < kRows * kCols && aligned; i += 32 * 8) {
      const int row = row0 + i / kCols, col = col0 + i % kCols;
      if (row >= rows || col >= cols) continue;
      T* const at = to + row * stride + col;
      const T* const piece = staging + swizzle<kCols>(i / kCols, i % kCols);
      if (col + 8 <= cols) {
        *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(piece);
      } else {
        for (int e = 0; col + e < cols; ++e) at[e] = piece[e];
      }
    }
    for (int i = lane; i < kRows * kCols && !aligned; i += 32) {
      const int row = row0 + i / kCols, col = col0 + i % kCols;
      if (row < rows && col < cols) {
        to[row * stride + col] = staging[swizzle<kCols>(i / kCols, i % kCols)];
      }
    }
  }
};

}  // namespace operators::product
