// C = A B of fp32 matrices on tensor cores of compute capability 8.0 and newer, by mma.sync: in
// TF32 or 3xTF32, for any shape. The product is that of fp32_tiles.cuh; here
// rows may be further apart than they are long.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <string>

#include "operators/caller.h"
#include "operators/estimate.h"
#include "operators/product/portable/fp32_tiles.cuh"
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

/// The ways to compute a product so, for the tiles of which the device has room for a block.
template <Math kMath>
struct PortableTf32 {
  struct Matrix {
    Memory<float> data;
    int64_t stride;
  };
  Matrix A, B, C;
  ProductShape shape;
  cudaStream_t stream;

  /// A warp's sums. TF32: 64 x 32, as B comes from shared memory in single floats. 3xTF32: 32 x 32,
  /// as a thread also has the sums of a step, and both numbers of each split factor; and no more
  /// than 8 warps, so that it has registers for them.
  void offer(Ways& ways) const {
    if constexpr (kMath == Math::split) {
      offer<MathTile<kMath, 128, 64, 32, 4, 2, 1, 3>>(ways);
    } else {
      offer<MathTile<kMath, 128, 128, 32, 2, 4, 1, 3>>(ways);
    }
    offer<MathTile<kMath, 64, 64, 32, 2, 2, 1, 2>>(ways);
  }

 private:
  template <class Tile>
  void offer(Ways& ways) const {
    constexpr int kBytes = Tile::kStageBytes;
    const int64_t tiles = int64_t{ceil_div(shape.rows, Tile::BM)} * ceil_div(shape.cols, Tile::BN);
    if (kBytes > most_shared_bytes() || tiles > INT_MAX) return;
    const double microseconds = microseconds_of<Tile>(tiles);
    const WayId id = way_id({static_cast<int64_t>(Divided::by_mma_sync), Tile::BM, Tile::BN});
    ways.offer(microseconds, id, [&] {
      const std::string name = std::string(kMath == Math::split ? "3xTF32" : "TF32") +
                               " by mma.sync; tile " + std::to_string(Tile::BM) + " x " +
                               std::to_string(Tile::BN);
      return Way{name, microseconds, [self = *this, tiles] { self.template launch<Tile>(tiles); },
                 kBytes};
    });
  }

  /// Fitted to shapes drawn at random, on an H200. With two stages a block waits for a step's data,
  /// while others of its multiprocessor work. A copy of less than 16 bytes a thread takes as long
  /// as one of 16.
  template <class Tile>
  double microseconds_of(int64_t tiles) const {
    constexpr double kMultiplyAdds = 230, kWait = 1100, kAtOnce = Tile::BM > 64 ? 1 : 4;
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
        steps * std::max(rounds * busy, waits * (busy + (Tile::kStages < 3 ? kWait : 0))) +
        rounds * Tile::BM * Tile::BN / 4;
    const double bytes = 4.0 * (1.0 * shape.rows * shape.depth + 1.0 * shape.depth * shape.cols +
                                1.0 * shape.rows * shape.cols);
    return kFirstLaunch + std::max(all / cycles(), bytes / memory_rate());
  }

  // A copy begins in a row and ends there.
  static int row_bytes(int64_t stride, int64_t cols) {
    const int64_t both = 4 * (stride | cols);
    return static_cast<int>(std::min<int64_t>(16, both & -both));
  }

  template <class Tile>
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

}  // namespace operators::product
