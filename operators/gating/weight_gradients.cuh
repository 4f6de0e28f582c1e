// The product x^T d of two matrices with many more rows than columns: the gradients of weights, of
// which there are few, from all rows. The products of operators/product give a block a tile of the
// result, and so have work for few blocks here. This one gives it a slice of the rows.
#pragma once

#include <algorithm>
#include <limits>

#include "operators/operands.h"
#include "operators/product/portable/mma_tiles.cuh"
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

/// A block has four warps, 2 x 2, of 64 x 64 results each. So a warp loads 8 fragments for 32
/// mma.sync; with 64 x 32 results it would be 6 for 16. Rows of x and d come 32 at a time. A stage
/// has first these rows of kSide columns of x, then those of kSide columns of d, row-major.
struct WeightTile : product::MmaTile<128, 128, 32, 2, 2, 3, 2> {
  static constexpr int kSide = 128, kStepRows = BK;
  static_assert(BM == kSide && BN == kSide && kParts == 1);
};

/// A warp's fragments for MmaPipeline. A row of both factors is a step of the sum: so x is the left
/// factor transposed, and ldmatrix transposes it on the way to the registers.
template <typename T>
class WeightFragments {
  using Tile = WeightTile;

 public:
  static constexpr int kDepth = 16, kRows = Tile::WM / 16;

  template <int kBuffer>
  __device__ __forceinline__ void load(int i, const T* stage, int k) {
    primitives::ldmatrix_x4_trans(x[kBuffer][i], stage + (x_lane ^ 16 * i) + k * Tile::kSide);
    primitives::ldmatrix_x4_trans(d[kBuffer][i], stage + (d_lane ^ 16 * i) + k * Tile::kSide);
  }
  __device__ void begin() const {}
  template <class Sum>
  __device__ void end_step(Sum&) const {}
  template <int kBuffer, class Sum>
  __device__ __forceinline__ void multiply(int i, Sum& sum) const {
#pragma unroll
    for (int forth = 0; forth < 2 * kRows; ++forth) {  // and back along the next row
      const int j = i % 2 == 0 ? forth : 2 * kRows - 1 - forth;
      primitives::mma_m16n8k16<T>(sum[i][j], x[kBuffer][i], d[kBuffer][j / 2][j % 2 * 2],
                                  d[kBuffer][j / 2][j % 2 * 2 + 1]);
    }
  }

 private:
  static_assert(Tile::WM == Tile::WN);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int x_lane = primitives::swizzle<Tile::kSide>(
      lane % 8 + lane / 16 * 8, warp / Tile::kWarpsN * Tile::WM + lane / 8 % 2 * 8);
  const int d_lane = Tile::kTileA + primitives::swizzle<Tile::kSide>(
                                        lane % 16, warp % Tile::kWarpsN * Tile::WN + lane / 16 * 8);
  unsigned x[2][kRows][4], d[2][kRows][4];
};
template <typename T>
struct WeightPipelineTile : WeightTile {
  using OwnFragments = WeightFragments<T>;
};

/// Starts a block's copies, one step after the other, for MmaPipeline. A step is kStepRows rows of
/// the block's columns of x and of d. A thread copies the same 8 columns of every kStep-th row. The
/// arguments x and d are the block's first row and column. From there on `rows` rows, and x_cols
/// and d_cols columns, exist. All others become 0 in the stage.
template <typename T>
class WeightCopies {
  using Tile = WeightTile;

 public:
  __device__ WeightCopies(const T* x, const T* d, int64_t x_stride, int64_t d_stride, int64_t rows,
                          int x_cols, int d_cols)
      : x_from(x + row() * x_stride + col()),
        d_from(d + row() * d_stride + col()),
        x_step(x_stride * kStep),
        d_step(d_stride * kStep),
        left(rows - row()),
        has_x(col() < x_cols),
        has_d(col() < d_cols) {}

  template <int kPart, int kParts>
  __device__ __forceinline__ void start(T* stage) {
    const int rows = static_cast<int>(min(left, int64_t{Tile::kStepRows}));
#pragma unroll
    for (int r = 0; r < Tile::kStepRows; r += kStep) {
      T* const to = stage + at + r * Tile::kSide;
      primitives::copy_async<16>(to, x_from, has_x && r < rows);
      primitives::copy_async<16>(to + Tile::kTileA, d_from, has_d && r < rows);
      x_from += x_step, d_from += d_step;
    }
    left -= Tile::kStepRows;
  }

 private:
  static constexpr int kPieces = Tile::kSide / 8, kStep = Tile::kThreads / kPieces;
  static_assert(kStep % 8 == 0 && Tile::kStepRows % kStep == 0);
  __device__ static int row() { return static_cast<int>(threadIdx.x) / kPieces; }
  __device__ static int col() { return static_cast<int>(threadIdx.x) % kPieces * 8; }

  const T *x_from, *d_from;
  const int64_t x_step, d_step;
  int64_t left;  ///< rows, from the thread's first one of the next step on
  const bool has_x, has_d;
  const int at = primitives::swizzle<Tile::kSide>(row(), col());
};

/// Block (x, y) computes tile x of x^T d, summed up over slice y of the rows, and writes it to
/// partials. A warp keeps its 64 x 64 sums in registers for the whole slice. Rows go by cp.async to
/// three stages, and from there to fragments, which MmaPipeline loads while others are multiplied.
template <typename T>
__global__ void __launch_bounds__(WeightTile::kThreads, WeightTile::kResident)
    weight_product(const WeightProduct<T> in) {
  using Tile = WeightPipelineTile<T>;
  using namespace primitives;
  extern __shared__ __align__(128) char shared[];
  const int across = (in.cols + Tile::kSide - 1) / Tile::kSide;
  const int channel0 = static_cast<int>(blockIdx.x) / across * Tile::kSide;
  const int col0 = static_cast<int>(blockIdx.x) % across * Tile::kSide;
  const int64_t first = blockIdx.y * in.slice, end = min(in.rows, first + in.slice);
  const int steps = static_cast<int>(ceil_div(end - first, int64_t{Tile::kStepRows}));

  WeightCopies<T> copies(in.x + first * in.x_stride + channel0, in.d + first * in.cols + col0,
                         in.x_stride, in.cols, end - first, in.channels - channel0, in.cols - col0);
  product::MmaPipeline<Tile, T> pipeline(reinterpret_cast<T*>(shared), copies);
  const int warp = threadIdx.x / 32;
  Sums<Tile::WM, Tile::WN> sum = {};
  pipeline.multiply(copies, steps, sum);
  copy_async_wait<0>();  // zeros that nobody reads

  float* const to = in.partials + int64_t{blockIdx.y} * in.channels * in.cols;
  for_pairs(sum, channel0 + warp / Tile::kWarpsN * Tile::WM, col0 + warp % Tile::kWarpsN * Tile::WN,
            in.channels, in.cols, [&](int r, int c, float2 pair) {
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
