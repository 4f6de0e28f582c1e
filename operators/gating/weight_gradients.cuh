// The product x^T d of two matrices with many more rows than columns: the gradients of weights, of
// which there are few, from all rows. The products of operators/product give a block a tile of the
// result, and so have work for few blocks here. This one gives it a slice of the rows.
#pragma once

#include <algorithm>
#include <limits>

#include "operators/operands.h"
#include "primitives/async_copy.cuh"
#include "primitives/fragments.cuh"
#include "primitives/launch.h"

namespace operators::gating {

/// x (rows, channels) and d (rows, cols), fp16 or bf16, row-major; both strides, channels and cols
/// are multiples of 8.
template <typename T>
struct WeightProduct {
  const T *x, *d;
  int64_t x_stride, rows, slice;  ///< slice: rows of a block
  int channels, cols;             ///< rows of d are dense
  float* partials;                ///< (slices, channels, cols)
};

/// A block has 8 warps, 2 x 4, of 64 x 32 results each; rows of x and d come 32 at a time.
struct WeightTile {
  static constexpr int kSide = 128, kThreads = 256, kStepRows = 32, kStages = 4;
  static constexpr int kElements = kStepRows * kSide;  // of a stage: as many of x and of d
  static constexpr int kSharedBytes = kStages * 2 * kElements * 2;
};

/// Starts the block's copy of WeightTile::kStepRows rows, of which `there` exist, to a swizzled
/// tile: the columns from `from` on, of which `left` exist. Zeros for others.
template <typename T>
__device__ __forceinline__ void copy_step(T* to, const T* from, int64_t stride, int there,
                                          int left) {
  using Tile = WeightTile;
  constexpr int kPieces = Tile::kSide / 8, kStep = Tile::kThreads / kPieces;
  const int row = threadIdx.x / kPieces, col = threadIdx.x % kPieces * 8;
#pragma unroll
  for (int r = row; r < row + Tile::kStepRows; r += kStep) {
    primitives::copy_async<16>(to + primitives::swizzle<Tile::kSide>(r, col),
                               from + r * stride + col, r < there && col < left);
  }
}

/// Block (x, y): tile x of x^T d, its sum over slice y of the rows. Memory has both factors row by
/// row, and a row is a step of the sum: so x is the left factor transposed, and ldmatrix transposes
/// it on the way to the registers.
template <typename T>
__global__ void __launch_bounds__(WeightTile::kThreads, 2)
    weight_product(const WeightProduct<T> in) {
  using Tile = WeightTile;
  using namespace primitives;
  extern __shared__ __align__(128) char shared[];
  T* const stages = reinterpret_cast<T*>(shared);
  const int across = (in.cols + Tile::kSide - 1) / Tile::kSide;
  const int channel0 = static_cast<int>(blockIdx.x) / across * Tile::kSide;
  const int col0 = static_cast<int>(blockIdx.x) % across * Tile::kSide;
  const int64_t first = blockIdx.y * in.slice, end = min(in.rows, first + in.slice);
  const int steps = static_cast<int>((end - first + Tile::kStepRows - 1) / Tile::kStepRows);

  const auto stage_of = [&](int step) {
    return stages + step % Tile::kStages * 2 * Tile::kElements;
  };
  const auto copy = [&](int step) {
    if (step >= steps) return;
    const int64_t row = first + int64_t{step} * Tile::kStepRows;
    const int there = static_cast<int>(min(end - row, int64_t{Tile::kStepRows}));
    copy_step(stage_of(step), in.x + row * in.x_stride + channel0, in.x_stride, there,
              in.channels - channel0);
    copy_step(stage_of(step) + Tile::kElements, in.d + row * in.cols + col0, in.cols, there,
              in.cols - col0);
  };
  auto ahead = copies_ahead<Tile::kStages>(copy);

  const int warp = threadIdx.x / 32, row = warp / 4 * 64, col = warp % 4 * 32;
  Sums<64, 32> sum = {};
  for (int step = 0; step < steps; ++step) {
    const T* const tile = stage_of(ahead.next());
#pragma unroll
    for (int k = 0; k < Tile::kStepRows; k += 16) {
      unsigned a[4][4], b[2][4];
      load_left_transposed<Tile::kSide>(a, tile, row, k);
      load_right<Tile::kSide>(b, tile + Tile::kElements, k, col);
      add_product<T>(sum, a, b);
    }
  }
  float* const to = in.partials + int64_t{blockIdx.y} * in.channels * in.cols;
  for_pairs(sum, channel0 + row, col0 + col, in.channels, in.cols, [&](int r, int c, float2 pair) {
    *reinterpret_cast<float2*>(to + int64_t{r} * in.cols + c) = pair;
  });
}

inline constexpr int kAddingCols = 32, kAddingRows = 8;  ///< threads of a block

/// dW1 and dW2 (channels, hidden) from the partial sums of x^T [dS | dV] (channels, cols), whose
/// halves have half_cols columns; or dW1 from those of x^T dS alone. What is nullptr is not wanted.
/// A thread adds up every kAddingRows-th slice of an element, and one thread what these have found:
/// always in the same order.
template <typename T>
__global__ void __launch_bounds__(kAddingCols* kAddingRows)
    add_weight_gradients(const float* partials, int slices, int channels, int cols, int half_cols,
                         int hidden, T* d_W1, T* d_W2) {
  __shared__ float found[kAddingRows][kAddingCols];
  const int64_t all = int64_t{channels} * cols;
  const int64_t at = int64_t{blockIdx.x} * kAddingCols + threadIdx.x;
  float sum = 0;
  if (at < all) {
#pragma unroll 4
    for (int slice = threadIdx.y; slice < slices; slice += kAddingRows) {
      sum += partials[slice * all + at];
    }
  }
  found[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || at >= all) return;
  for (int i = 1; i < kAddingRows; ++i) sum += found[i][threadIdx.x];
  const int64_t channel = at / cols;
  const int col = static_cast<int>(at % cols);
  T* const to = col < half_cols ? d_W1 : d_W2;
  const int own = col < half_cols ? col : col - half_cols;
  if (own < hidden && to != nullptr) to[channel * hidden + own] = static_cast<T>(sum);
}

/// How weight_product() is launched.
struct WeightPlan {
  int64_t tiles, slice;
  unsigned slices;

  WeightPlan(int64_t rows, int64_t channels, int64_t cols) {
    using primitives::ceil_div, primitives::blocks_for;
    const int64_t side = WeightTile::kSide;
    tiles = ceil_div(channels, side) * ceil_div(cols, side);
    const int64_t fill = std::max<int64_t>(1, 2 * primitives::multiprocessors() / tiles);
    const int64_t steps = ceil_div(rows, int64_t{WeightTile::kStepRows});
    slice = ceil_div(steps, std::min(fill, ceil_div(steps, int64_t{4}))) * WeightTile::kStepRows;
    slices = blocks_for(rows, slice);
  }
  /// Whether a grid can have so many blocks.
  bool fits() const { return tiles <= std::numeric_limits<int>::max(); }
};

}  // namespace operators::gating
