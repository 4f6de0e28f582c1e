// Products of fp32 matrices with the tiles and pipelines of lessons 2 and 3, for any GPU, in three
// kinds of math (Math). The operator's portable kernels differ in what they do with the sums.
#pragma once

#include <algorithm>

#include "operators/product/split_tf32.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/mma.cuh"

namespace operators::product {

using namespace primitives;

// A block of kWarpsM x kWarpsN x kWarpsK warps computes BM x BN logits, in steps of BK along D.
// Warps that differ in the third coordinate have the same logits, and each takes its share of every
// step: split-K in a block. So with small B and C a block has enough warps to hide latencies, and
// enough copies under way. kStages tiles of x and of W are in shared memory at a time.
template <Math kMath_, int BM_, int BN_, int BK_, int kWarpsM_, int kWarpsN_, int kWarpsK_,
          int kStages_>
struct MathTile {
  static constexpr Math kMath = kMath_;
  static constexpr int BM = BM_, BN = BN_, BK = BK_, kStages = kStages_;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kWarpsK = kWarpsK_;
  static constexpr bool kTensor = kMath != Math::fp32;
  static constexpr int kWarps = kWarpsM * kWarpsN * kWarpsK, kThreads = 32 * kWarps;
  static constexpr int kRows = BM / kWarpsM, kCols = BN / kWarpsN;  // a warp's
  static constexpr int kDepth = BK / kWarpsK;                       // and its share of a step

  // The padding of rows. Two neighbouring rows of x start 16 bytes apart along the banks, so 8 rows
  // of 16 bytes are on different banks. Two rows of W start 8 or 24 banks apart, so 4 rows of 8
  // floats are, too.
  static constexpr int kStrideX = BK + 4;
  static constexpr int kStrideW = BN + (BN % 16 == 0 ? 8 : 0);
  static constexpr int kTileX = BM * kStrideX, kTileW = BK * kStrideW;
  static constexpr int kStageBytes = kStages * (kTileX + kTileW) * 4;

  // all_columns() brings logits together in shared memory: kWarpsK times BM x BN of them.
  static constexpr int kStrideLogits = BN + 8;
  static constexpr int kLogitBytes = kWarpsK * BM * kStrideLogits * static_cast<int>(sizeof(float));

  static constexpr int kStepK = kMath == Math::fp32 ? 4 : 8;
  static_assert(BM % kWarpsM == 0 && BN % kWarpsN == 0 && BK % (kWarpsK * kStepK) == 0);
  static_assert(kTensor ? kRows % 16 == 0 && kCols % 8 == 0 : kRows % 4 == 0 && kCols % 8 == 0);
};

// A warp's kRows x kCols logits. A thread has kOwnRows x kOwnCols of them: (i, j) is at row(i) and
// col(j). Along a row they come in runs of kRun neighbours. kLanesPerRow consecutive lanes share a
// row.
template <class Tile>
struct TileSums {
  // On tensor cores an entry of v is a sum of mma.sync, 16 x 8 for the warp (primitives/mma.cuh).
  // On the CUDA cores the lanes of a warp are 4 rows of 8.
  static constexpr bool kTensor = Tile::kTensor;
  static constexpr int kOwnRows = kTensor ? Tile::kRows / 8 : Tile::kRows / 4;
  static constexpr int kOwnCols = kTensor ? Tile::kCols / 4 : Tile::kCols / 8;
  static constexpr int kRun =
      kTensor || kOwnCols % 4 != 0 ? kTensor || kOwnCols % 2 == 0 ? 2 : 1 : 4;
  static constexpr int kLanesPerRow = kTensor ? 4 : 8;
  static constexpr int kHeight = kTensor ? 2 : 1, kWidth = kTensor ? 2 : 1;  // of an entry of v
  float v[kOwnRows / kHeight][kOwnCols / kWidth][kHeight * kWidth] = {};

  __device__ float& at(int i, int j) {
    return v[i / kHeight][j / kWidth][i % kHeight * kWidth + j % kWidth];
  }
  static __device__ int row(int i) {
    const int lane = threadIdx.x % 32;
    return lane / kLanesPerRow + (32 / kLanesPerRow) * i;
  }
  static __device__ int col(int j) {
    const int lane = threadIdx.x % 32;
    return lane % kLanesPerRow * kRun + j / kRun * kLanesPerRow * kRun + j % kRun;
  }
};

// Adds a warp's products of one step. x_tile and W_tile point into shared memory, to the warp's
// rows of x and its columns of W, at its share of the step.
template <class Tile>
__device__ void add_products(TileSums<Tile>& sums, const float* x_tile, const float* W_tile) {
  constexpr int kX = Tile::kStrideX, kW = Tile::kStrideW;
  const int lane = threadIdx.x % 32;
  if constexpr (Tile::kMath == Math::fp32) {
    // For 4 of k a thread reads 4 floats of each of its rows at once, and for each k its columns of
    // W.
    constexpr int kOwnRows = TileSums<Tile>::kOwnRows, kOwnCols = TileSums<Tile>::kOwnCols;
    constexpr int kRun = TileSums<Tile>::kRun;
#pragma unroll
    for (int k = 0; k < Tile::kDepth; k += 4) {
      float4 x[kOwnRows];
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
        x[i] = *reinterpret_cast<const float4*>(x_tile + TileSums<Tile>::row(i) * kX + k);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float w[kOwnCols];
#pragma unroll
        for (int j = 0; j < kOwnCols; j += kRun) {
          const float* at = W_tile + (k + e) * kW + TileSums<Tile>::col(j);
          if constexpr (kRun == 4) {
            const float4 four = *reinterpret_cast<const float4*>(at);
            w[j] = four.x, w[j + 1] = four.y, w[j + 2] = four.z, w[j + 3] = four.w;
          } else if constexpr (kRun == 2) {
            const float2 two = *reinterpret_cast<const float2*>(at);
            w[j] = two.x, w[j + 1] = two.y;
          } else {
            w[j] = *at;
          }
        }
#pragma unroll
        for (int i = 0; i < kOwnRows; ++i) {
          const float factor = e == 0 ? x[i].x : e == 1 ? x[i].y : e == 2 ? x[i].z : x[i].w;
#pragma unroll
          for (int j = 0; j < kOwnCols; ++j) sums.v[i][j][0] += factor * w[j];
        }
      }
    }
  } else {
    constexpr int kM = Tile::kRows / 16, kN = Tile::kCols / 8;
    constexpr bool kSplit = Tile::kMath == Math::split;
    // Tensor cores truncate what they accumulate, and over a long sum these errors add up. So in
    // 3xTF32 they sum only one step, and the CUDA cores add its result to the sum so far, rounded
    // to nearest.
    TileSums<Tile> step;
    TileSums<Tile>& to = kSplit ? step : sums;
#pragma unroll
    for (int k = 0; k < Tile::kDepth; k += 8) {
      unsigned x[kM][4], x_low[kSplit ? kM : 1][4];
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        ldmatrix_x4(x[i], x_tile + (16 * i + lane % 16) * kX + k + lane / 16 * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (kSplit) {
            const SplitTf32 split = split_tf32(__uint_as_float(x[i][e]));
            x[i][e] = split.high, x_low[i][e] = split.low;
          } else {
            x[i][e] = to_tf32(__uint_as_float(x[i][e]));
          }
        }
      }
      const float* W_at = W_tile + (k + lane % 4) * kW + lane / 4;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const float w0 = W_at[8 * j], w1 = W_at[4 * kW + 8 * j];
        if constexpr (kSplit) {
          const SplitTf32 p0 = split_tf32(w0), p1 = split_tf32(w1);
          // An infinity of W must not be multiplied by x_low, which may be 0: infinity times 0 is
          // NaN. So there it has 0 in its place. (With an infinity of x the whole row is NaN either
          // way.)
          const unsigned f0 = is_infinite(p0.high) ? 0 : p0.high;
          const unsigned f1 = is_infinite(p1.high) ? 0 : p1.high;
#pragma unroll
          for (int i = 0; i < kM; ++i) {  // the smallest products first
            mma_m16n8k8_tf32(to.v[i][j], x_low[i], f0, f1);
            mma_m16n8k8_tf32(to.v[i][j], x[i], p0.low, p1.low);
            mma_m16n8k8_tf32(to.v[i][j], x[i], p0.high, p1.high);
          }
        } else {
          const unsigned b0 = to_tf32(w0), b1 = to_tf32(w1);
#pragma unroll
          for (int i = 0; i < kM; ++i) mma_m16n8k8_tf32(to.v[i][j], x[i], b0, b1);
        }
      }
    }
    if constexpr (kSplit) {
#pragma unroll
      for (int i = 0; i < TileSums<Tile>::kOwnRows; ++i) {
#pragma unroll
        for (int j = 0; j < TileSums<Tile>::kOwnCols; ++j) sums.at(i, j) += step.at(i, j);
      }
    }
  }
}

// The factors, dense. Their rows start at multiples of 16, 8 or 4 bytes (row_bytes_x, row_bytes_W),
// which is the size of a copy.
struct Factors {
  const float *x, *W;
  int B, D, C;
  int row_bytes_x, row_bytes_W;

  // How many elements rows are apart. (Those of operators/product may be further.)
  __device__ int pitch_x() const { return D; }
  __device__ int pitch_W() const { return C; }
};

inline Factors factors_of(const float* x, const float* W, int B, int D, int C) {
  const auto row_bytes = [](int64_t columns) {
    const int64_t bytes = 4 * columns;
    return static_cast<int>(std::min<int64_t>(16, bytes & -bytes));
  };
  return {x, W, B, D, C, row_bytes(D), row_bytes(C)};
}

// Copies a tile of kRows x kCols, from (row0, col0) on, of a matrix with `pitch` elements to a row,
// to shared memory, kBytes at a time. Outside of `rows` rows and `cols` columns there will be
// zeros. All kThreads threads of the block call this.
template <int kRows, int kCols, int kStride, int kThreads, int kBytes>
__device__ void copy_pieces(float* to, const float* from, int row0, int col0, int rows, int cols,
                            int pitch) {
  constexpr int kWidth = kBytes / 4, kPieces = kCols / kWidth;
#pragma unroll 4
  for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
    const int row = i / kPieces, col = i % kPieces * kWidth;
    const bool inside = row0 + row < rows && col0 + col < cols;
    copy_async<kBytes>(to + row * kStride + col,
                       from + static_cast<size_t>(row0 + row) * pitch + col0 + col, inside);
  }
}

template <int kRows, int kCols, int kStride, int kThreads>
__device__ void copy_tile_of(float* to, const float* from, int row0, int col0, int rows, int cols,
                             int pitch, int row_bytes) {
  if (row_bytes == 16) {
    copy_pieces<kRows, kCols, kStride, kThreads, 16>(to, from, row0, col0, rows, cols, pitch);
  } else if (row_bytes == 8) {
    copy_pieces<kRows, kCols, kStride, kThreads, 8>(to, from, row0, col0, rows, cols, pitch);
  } else {
    copy_pieces<kRows, kCols, kStride, kThreads, 4>(to, from, row0, col0, rows, cols, pitch);
  }
}

// Computes the BM x BN logits at (row0, col0), summed over d_begin <= d < d_end. The copies of
// kStages - 1 steps are under way while one is multiplied, as in lesson 2's *async*.
template <class Tile, class Of>
__device__ void multiply_tiles(TileSums<Tile>& sums, float* stages, const Of& factors, int row0,
                               int col0, int d_begin, int d_end) {
  constexpr int kStages = Tile::kStages;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / Tile::kWarpsN % Tile::kWarpsM * Tile::kRows;
  const int warp_col = warp % Tile::kWarpsN * Tile::kCols;
  const int warp_k = warp / (Tile::kWarpsM * Tile::kWarpsN) * Tile::kDepth;
  const int steps = (d_end - d_begin + Tile::BK - 1) / Tile::BK;
  const auto copy_step = [&](int step) {
    if (step >= steps) return;
    auto* x_tile = stages + step % kStages * (Tile::kTileX + Tile::kTileW);
    const int d = d_begin + step * Tile::BK;
    copy_tile_of<Tile::BM, Tile::BK, Tile::kStrideX, Tile::kThreads>(
        x_tile, factors.x, row0, d, factors.B, d_end, factors.pitch_x(), factors.row_bytes_x);
    copy_tile_of<Tile::BK, Tile::BN, Tile::kStrideW, Tile::kThreads>(
        x_tile + Tile::kTileX, factors.W, d, col0, d_end, factors.C, factors.pitch_W(),
        factors.row_bytes_W);
  };

  auto ahead = copies_ahead<kStages>(copy_step);
  for (int step = 0; step < steps; ++step) {
    ahead.next();
    const auto* x_tile = stages + step % kStages * (Tile::kTileX + Tile::kTileW);
    add_products<Tile>(sums, x_tile + warp_row * Tile::kStrideX + warp_k,
                       x_tile + Tile::kTileX + warp_k * Tile::kStrideW + warp_col);
  }
}

// Stores kRun neighbours of a row, of which `left` exist. If the start of the row is `aligned` for
// it, one access stores them.
template <int kRun>
__device__ void store_run(float* to, const float* values, int left, bool aligned) {
  if (aligned && left >= kRun) {
    if constexpr (kRun == 4) {
      *reinterpret_cast<float4*>(to) = {values[0], values[1], values[2], values[3]};
    } else if constexpr (kRun == 2) {
      *reinterpret_cast<float2*>(to) = {values[0], values[1]};
    } else {
      *to = *values;
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < kRun; ++e) {
    if (e < left) to[e] = values[e];
  }
}

}  // namespace operators::product
