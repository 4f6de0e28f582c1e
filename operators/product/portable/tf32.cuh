// C = A B of fp32 matrices on tensor cores of compute capability 8.0 and newer, by mma.sync: in
// TF32 or 3xTF32, for any shape.
//
// offer_tf32_tiles() has the pipeline of mma_tiles.cuh, for which rows that are not aligned to 16
// bytes are copied first. PortableTf32 is the product of fp32_tiles.cuh, which reads any rows: for
// products that are so small that a copy would take too long. (Hopper has that one, too, beside
// ways of its own.)
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <string>

#include "operators/caller.h"
#include "operators/estimate.h"
#include "operators/product/portable/fp32_tiles.cuh"
#include "operators/product/portable/half.cuh"
#include "operators/product/portable/tf32_tiles.cuh"
#include "operators/product/shape.h"
#include "primitives/launch.h"

namespace operators::product {

using namespace primitives;

/// Factors x and W whose rows are so many elements apart.
struct StridedFactors : Factors {
  int x_stride, W_stride;
  __device__ int pitch_x() const { return x_stride; }
  __device__ int pitch_W() const { return W_stride; }
};

/// A block has a tile of BM x BN of C, and a grid all tiles, row by row.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    portable_tf32(StridedFactors factors, float* C, int64_t c_stride) {
  static_assert(Tile::kWarpsK == 1);
  extern __shared__ __align__(128) char tf32_stages[];
  const int rows = factors.B, cols = factors.C, tiles = (cols + Tile::BN - 1) / Tile::BN;
  const int row0 = blockIdx.x / tiles * Tile::BM, col0 = blockIdx.x % tiles * Tile::BN;
  TileSums<Tile> sums;
  multiply_tiles<Tile>(sums, reinterpret_cast<float*>(tf32_stages), factors, row0, col0, 0,
                       factors.D);
  const int warp = threadIdx.x / 32;
  const int warp_row = row0 + warp / Tile::kWarpsN * Tile::kRows;
  const int warp_col = col0 + warp % Tile::kWarpsN * Tile::kCols;
  using Sums = TileSums<Tile>;
  static_assert(Sums::kRun == 2);
#pragma unroll
  for (int i = 0; i < Sums::kOwnRows; ++i) {
    const int row = warp_row + Sums::row(i);
    if (row >= rows) continue;
    float* const to = C + row * c_stride;
#pragma unroll
    for (int j = 0; j < Sums::kOwnCols; j += 2) {
      const float pair[2] = {sums.at(i, j), sums.at(i, j + 1)};
      const int col = warp_col + Sums::col(j);
      store_run<2>(to + col, pair, cols - col, c_stride % 2 == 0);
    }
  }
}

/// The way to compute a product so.
template <Math kMath>
struct PortableTf32 {
  struct Matrix {
    Memory<float> data;
    int64_t stride;
  };
  Matrix A, B, C;
  ProductShape shape;
  cudaStream_t stream;

  void offer(Ways& ways) const {
    constexpr int kBytes = Tile::kStageBytes;
    const int64_t tiles = int64_t{ceil_div(shape.rows, Tile::BM)} * ceil_div(shape.cols, Tile::BN);
    if (tiles > INT_MAX) return;
    const double microseconds = microseconds_of(tiles);
    const WayId id = way_id({static_cast<int64_t>(Divided::by_mma_sync), Tile::BM, Tile::BN});
    ways.offer(microseconds, id, [&] {
      const std::string name = std::string(kMath == Math::split ? "3xTF32" : "TF32") +
                               " by mma.sync; tile " + std::to_string(Tile::BM) + " x " +
                               std::to_string(Tile::BN);
      return Way{name, microseconds, [self = *this, tiles] { self.launch(tiles); }, kBytes};
    });
  }

 private:
  using Tile = MathTile<kMath, 64, 64, 32, 2, 2, 1, 2>;

  /// Fitted to shapes drawn at random, on an H200. With two stages a block waits for a step's data,
  /// while others of its multiprocessor work. A copy of less than 16 bytes a thread takes as long
  /// as one of 16.
  double microseconds_of(int64_t tiles) const {
    constexpr double kMultiplyAdds = 230, kWait = 1100, kAtOnce = 4;
    constexpr double kProducts = kMath == Math::split ? 3 : 1;
    const double sms = multiprocessors(), rounds = std::ceil(static_cast<double>(tiles) / sms);
    const auto narrow = [](int64_t stride, int64_t cols, double floats, double of_warp) {
      const int bytes = row_bytes(stride, cols);
      return bytes == 16 ? 0 : floats / (bytes / 4 * 32) * of_warp;
    };
    const double busy = kProducts * Tile::BM * Tile::BN * Tile::BK / kMultiplyAdds +
                        narrow(A.stride, shape.depth, Tile::BM * Tile::BK, 6) +
                        narrow(B.stride, shape.cols, Tile::BN * Tile::BK, 9);
    const double waits = std::ceil(static_cast<double>(tiles) / (sms * kAtOnce));
    const double steps = std::ceil(1.0 * shape.depth / Tile::BK);
    const double all =
        steps * std::max(rounds * busy, waits * (busy + kWait)) + rounds * Tile::BM * Tile::BN / 4;
    const double bytes = 4.0 * (1.0 * shape.rows * shape.depth + 1.0 * shape.depth * shape.cols +
                                1.0 * shape.rows * shape.cols);
    return kFirstLaunch + std::max(all / cycles(), bytes / memory_rate());
  }

  // A copy begins in a row and ends there.
  static int row_bytes(int64_t stride, int64_t cols) {
    const int64_t both = 4 * (stride | cols);
    return static_cast<int>(std::min<int64_t>(16, both & -both));
  }

  void launch(int64_t tiles) const {
    const StridedFactors factors{
        {A.data, B.data, shape.rows, shape.depth, shape.cols, row_bytes(A.stride, shape.depth),
         row_bytes(B.stride, shape.cols)},
        static_cast<int>(A.stride),
        static_cast<int>(B.stride)};
    allow_shared_bytes(portable_tf32<Tile>, Tile::kStageBytes);
    portable_tf32<Tile>
        <<<static_cast<unsigned>(tiles), Tile::kThreads, Tile::kStageBytes, stream>>>(
            factors, C.data, C.stride);
  }
};

/// Offers the ways of mma_tiles.cuh to compute a product in TF32 or 3xTF32. C has rows c_stride
/// apart.
template <Math kMath>
void offer_tf32_tiles(Ways& ways, SharedSums& sums, const Caller& caller,
                      const AlignedRows<float>& A, const AlignedRows<float>& B,
                      const Memory<float>& C, int64_t c_stride, ProductShape shape) {
  const std::function<MmaLaunch<float, 1, Tf32Store>()> make = [=] {
    return MmaLaunch<float, 1, Tf32Store>{
        {{A.job(), B.job()}},
        {A.data(), {B.data()}, A.stride, B.stride, shape.rows, shape.cols, shape.depth},
        {C, c_stride, shape.rows, shape.cols}};
  };
  const MmaWays<float, 1, Tf32Store> tiles(caller, shape, bytes_copied(A) + bytes_copied(B), make);
  if constexpr (kMath == Math::split) {
    // A thread also has the sums of a step, and both numbers of each split element.
    tiles.offer<Tf32MmaTile<128, 128, 2, 4, 3, 1, Takes::split>,
                Tf32MmaTile<64, 64, 2, 2, 3, 3, Takes::split>>(ways, sums);
  } else {
    // The first wants more shared memory than compute capability 8.6 has.
    tiles.offer<Tf32MmaTile<256, 128, 4, 2, 3, 1, Takes::rounded>,
                Tf32MmaTile<128, 128, 2, 2, 3, 2, Takes::rounded>,
                Tf32MmaTile<64, 64, 2, 2, 3, 4, Takes::rounded>>(ways, sums);
  }
}

}  // namespace operators::product
