// Many small products in one launch: c = a b for each of a batch, by the tiles that compute one
// product on any GPU (portable/). A block has a tile of one of the products. So the products fill
// the device together, where one of them would leave most of it idle, and a launch is paid once.
//
// In types of 2 bytes factors may lie transposed: tiles are copied as they lie, and ldmatrix
// transposes a factor on the way to the registers, or leaves that out.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "operators/caller.h"
#include "operators/estimate.h"
#include "operators/product/layouts/hopper_batch.cuh"
#include "operators/product/layouts/layouts.cuh"
#include "operators/product/portable/half.cuh"
#include "operators/product/portable/tf32.cuh"
#include "primitives/launch.h"

namespace operators::product {

/// How far the matrices of a batch are apart, in elements.
struct Between {
  int64_t a, b, c;
};

/// Block (x, y) has tile x of product y.
template <class Tile, typename T>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    mma_batch(const __grid_constant__ MmaFactors<T, 1> all,
              const __grid_constant__ MmaResults<T> results, Between between) {
  extern __shared__ __align__(128) char mma_stages[];
  MmaFactors<T, 1> of = all;
  of.A += blockIdx.y * between.a;
  of.B[0] += blockIdx.y * between.b;
  MmaStore<T> finish = {results};
  finish.results.to += blockIdx.y * between.c;
  const int across = (of.cols + Tile::BN - 1) / Tile::BN, tile = static_cast<int>(blockIdx.x);
  const int row0 = tile / across * Tile::BM, col0 = tile % across * Tile::BN;
  float sum[Tile::WM / 16][Tile::WN / 8][4] = {};
  MmaCopies<Tile, T, 1> copies;
  copies.begin(of, row0, col0, 0, of.depth);
  MmaPipeline<Tile, T> pipeline(reinterpret_cast<T*>(mma_stages), copies);
  pipeline.multiply(copies, (of.depth + Tile::BK - 1) / Tile::BK, sum);
  const int warp = threadIdx.x / 32;
  finish(sum, row0 + warp / Tile::kWarpsN * Tile::WM, col0 + warp % Tile::kWarpsN * Tile::WN);
  copy_async_wait<0>();  // zeros that nobody reads
}

/// Starts copies of kRows x kCols elements of a matrix in memory, from `from` on, to a swizzled
/// tile. Of the matrix `rows` rows and `cols` columns exist from there on; the others become zeros.
template <class Tile, int kRows, int kCols, typename T>
__device__ __forceinline__ void copy_lying(T* to, const T* from, int64_t stride, int rows,
                                           int cols) {
  constexpr int kStep = Tile::kThreads / (kCols / 8);
  const int row = threadIdx.x / (kCols / 8), col = threadIdx.x % (kCols / 8) * 8;
  const int bytes = 2 * min(max(cols - col, 0), 8);
#pragma unroll
  for (int r = row; r < kRows; r += kStep) {
    copy_async_part(to + swizzle<kCols>(r, col), from + r * stride + col, r < rows ? bytes : 0);
  }
}

/// The same of factors of which at least one lies transposed. A step's tiles lie as their matrices
/// do: rows of a transposed A's tile are of the depth, and columns of a transposed B's. Products
/// are small: nothing but the next tiles is on its way while a warp loads fragments and multiplies,
/// since other blocks of the multiprocessor do the same.
template <class Tile, typename T, bool kTurnedA, bool kTurnedB>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    turned_batch(const __grid_constant__ MmaFactors<T, 1> of,
                 const __grid_constant__ MmaResults<T> results, Between between) {
  constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK;
  extern __shared__ __align__(128) char mma_stages[];
  T* const stages = reinterpret_cast<T*>(mma_stages);
  const T *const a = of.A + blockIdx.y * between.a, *const b = of.B[0] + blockIdx.y * between.b;
  MmaStore<T> finish = {results};
  finish.results.to += blockIdx.y * between.c;
  const int across = (of.cols + BN - 1) / BN, tile = static_cast<int>(blockIdx.x);
  const int row0 = tile / across * BM, col0 = tile % across * BN;
  const int steps = (of.depth + BK - 1) / BK;

  const auto copy = [&](int step) {
    if (step >= steps) return;
    T* const to = stages + step % Tile::kStages * Tile::kStage;
    const int k = step * BK, rows = of.rows - row0, cols = of.cols - col0, depth = of.depth - k;
    if constexpr (kTurnedA) {
      copy_lying<Tile, BK, BM>(to, a + k * of.a_stride + row0, of.a_stride, depth, rows);
    } else {
      copy_lying<Tile, BM, BK>(to, a + row0 * of.a_stride + k, of.a_stride, rows, depth);
    }
    if constexpr (kTurnedB) {
      copy_lying<Tile, BN, BK>(to + Tile::kTileA, b + col0 * of.b_stride + k, of.b_stride, cols,
                               depth);
    } else {
      copy_lying<Tile, BK, BN>(to + Tile::kTileA, b + k * of.b_stride + col0, of.b_stride, depth,
                               cols);
    }
  };
  auto ahead = copies_ahead<Tile::kStages>(copy);
  const int warp = threadIdx.x / 32;
  const int row = warp / Tile::kWarpsN * Tile::WM, col = warp % Tile::kWarpsN * Tile::WN;
  Sums<Tile::WM, Tile::WN> sum = {};
  for (int step = 0; step < steps; ++step) {
    const T* const tile_a = stages + ahead.next() % Tile::kStages * Tile::kStage;
    const T* const tile_b = tile_a + Tile::kTileA;
#pragma unroll
    for (int k = 0; k < BK; k += 16) {
      unsigned left[Tile::WM / 16][4], right[Tile::WN / 16][4];
      if constexpr (kTurnedA) {
        load_left_transposed<BM>(left, tile_a, row, k);
      } else {
        load_left<BK>(left, tile_a, row, k);
      }
      if constexpr (kTurnedB) {
        load_right_transposed<BK>(right, tile_b, k, col);
      } else {
        load_right<BN>(right, tile_b, k, col);
      }
      add_product<T>(sum, left, right);
    }
  }
  finish(sum, row0 + row, col0 + col);
}

/// The same of fp32, in one of the kinds of math.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    fp32_batch(const __grid_constant__ StridedFactors all, float* results, int64_t c_stride,
               Between between) {
  using Sums = TileSums<Tile>;
  static_assert(Tile::kWarpsK == 1);
  extern __shared__ __align__(128) char fp32_stages[];
  StridedFactors of = all;
  of.x += blockIdx.y * between.a;
  of.W += blockIdx.y * between.b;
  float* const c = results + blockIdx.y * between.c;
  const int across = (of.C + Tile::BN - 1) / Tile::BN, tile = static_cast<int>(blockIdx.x);
  const int row0 = tile / across * Tile::BM, col0 = tile % across * Tile::BN;
  Sums sums;
  multiply_tiles<Tile>(sums, reinterpret_cast<float*>(fp32_stages), of, row0, col0, 0, of.D);
  const int warp = threadIdx.x / 32;
  const int row1 = row0 + warp / Tile::kWarpsN * Tile::kRows;
  const int col1 = col0 + warp % Tile::kWarpsN * Tile::kCols;
  const bool aligned = (c_stride | between.c) % Sums::kRun == 0;
#pragma unroll
  for (int i = 0; i < Sums::kOwnRows; ++i) {
    const int row = row1 + Sums::row(i);
    if (row >= of.B) continue;
    float* const to = c + row * c_stride;
#pragma unroll
    for (int j = 0; j < Sums::kOwnCols; j += Sums::kRun) {
      float run[Sums::kRun];
#pragma unroll
      for (int e = 0; e < Sums::kRun; ++e) run[e] = sums.at(i, j + e);
      const int col = col1 + Sums::col(j);
      store_run<Sums::kRun>(to + col, run, of.C - col, aligned);
    }
  }
}

/// An estimate: a multiprocessor does so many multiply-adds in a cycle, and each tile costs it some
/// cycles more, `ends`. These are fitted to few measurements alone.
template <typename T, class Tile>
double microseconds_of_batch(const Matrices<T>& a, const Matrices<T>& b, int64_t batch, double rate,
                             double ends = 1000) {
  const int64_t tiles = primitives::ceil_div(a.rows, int64_t{Tile::BM}) *
                        primitives::ceil_div(b.cols, int64_t{Tile::BN}) * batch;
  const double steps = std::ceil(1.0 * static_cast<double>(a.cols) / Tile::BK);
  const double rounds = std::ceil(static_cast<double>(tiles) / primitives::multiprocessors());
  const double elements =
      static_cast<double>(batch) * static_cast<double>(a.rows * b.cols) +
      static_cast<double>(a.between == 0 ? 1 : batch) * static_cast<double>(a.rows * a.cols) +
      static_cast<double>(b.between == 0 ? 1 : batch) * static_cast<double>(b.rows * b.cols);
  return kFirstLaunch +
         std::max(rounds * (steps * Tile::BM * Tile::BN * Tile::BK / rate + ends) / cycles(),
                  sizeof(T) * elements / memory_rate());
}

/// Offers a way with a tile. launch() launches a kernel with so many blocks for each product.
template <class Tile, typename Launch>
void offer_batch(Ways& ways, const std::string& name, double microseconds, int shared_bytes,
                 int64_t rows, int64_t cols, const Launch& launch) {
  const int64_t tiles =
      primitives::ceil_div(rows, int64_t{Tile::BM}) * primitives::ceil_div(cols, int64_t{Tile::BN});
  if (shared_bytes > primitives::most_shared_bytes() || tiles > INT_MAX / 64) return;
  const WayId id = way_id({static_cast<int64_t>(Divided::by_mma_sync), Tile::BM, Tile::BN});
  ways.offer(microseconds, id, [&] {
    return Way{name + "; tile " + std::to_string(Tile::BM) + " x " + std::to_string(Tile::BN),
               microseconds, [=] { launch(static_cast<unsigned>(tiles)); }, shared_bytes, id};
  });
}

/// The ways to compute a batch in fp16 or bf16, whose factors may lie transposed; none where rows
/// are not aligned to 16 bytes.
template <typename T>
std::vector<Way> half_batch_ways(const Caller& caller, const Matrices<T>& a, const Matrices<T>& b,
                                 const Matrices<T>& c, int64_t batch) {
  if ((a.stride | b.stride | a.between | b.between) % 8 != 0) return {};
  Ways ways(caller.search);
  const auto offer = [&]<class Tile, bool kTurnedA, bool kTurnedB>(double rate, double ends) {
    const auto launch = [=, stream = caller.stream](unsigned tiles) {
      const MmaFactors<T, 1> factors{a.data,
                                     {b.data},
                                     a.stride,
                                     b.stride,
                                     static_cast<int>(a.rows),
                                     static_cast<int>(b.cols),
                                     static_cast<int>(a.cols)};
      const MmaResults<T> results{c.data, c.stride, static_cast<int>(c.rows),
                                  static_cast<int>(c.cols)};
      const dim3 blocks(tiles, static_cast<unsigned>(batch));
      const Between between{a.between, b.between, c.between};
      if constexpr (kTurnedA || kTurnedB) {
        allow_shared_bytes(turned_batch<Tile, T, kTurnedA, kTurnedB>, Tile::kSharedBytes);
        turned_batch<Tile, T, kTurnedA, kTurnedB>
            <<<blocks, Tile::kThreads, Tile::kSharedBytes, stream>>>(factors, results, between);
      } else {
        allow_shared_bytes(mma_batch<Tile, T>, Tile::kSharedBytes);
        mma_batch<Tile, T>
            <<<blocks, Tile::kThreads, Tile::kSharedBytes, stream>>>(factors, results, between);
      }
    };
    offer_batch<Tile>(ways, "mma.sync", microseconds_of_batch<T, Tile>(a, b, batch, rate, ends),
                      Tile::kSharedBytes, c.rows, c.cols, launch);
  };
  using Small = MmaTile<64, 64, 64, 2, 2, 3, 4>;
  if (a.transposed && b.transposed) {
    offer.template operator()<Small, true, true>(500, 600);
  } else if (a.transposed) {
    offer.template operator()<Small, true, false>(500, 600);
  } else if (b.transposed) {
    offer.template operator()<Small, false, true>(500, 600);
  } else {
    offer.template operator()<MmaTile<128, 128, 32, 2, 2, 3, 2>, false, false>(900, 2500);
    offer.template operator()<Small, false, false>(550, 600);
  }
  std::vector<Way> found = ways.found();
  const auto on_hopper = [&]<Lies kLies>() {
    if (!HopperBatch<T, kLies>::suits(a, b, c, batch)) return;
    for (Way& way : HopperBatch<T, kLies>(caller, a, b, c, batch).ways()) {
      found.push_back(std::move(way));
    }
  };
  if (primitives::is_hopper() && !(a.transposed && b.transposed)) {
    if (a.transposed) {
      on_hopper.template operator()<Lies::across>();
    } else if (b.transposed) {
      on_hopper.template operator()<Lies::along>();
    } else {
      on_hopper.template operator()<Lies::in_rows>();
    }
  }
  return found;
}

/// The same of fp32. Rows may begin anywhere.
template <Math kMath>
std::vector<Way> fp32_batch_ways(const Caller& caller, const Matrices<float>& a,
                                 const Matrices<float>& b, const Matrices<float>& c,
                                 int64_t batch) {
  using Tile = MathTile<kMath, 64, 64, 32, 2, 2, 1, 2>;
  constexpr double kRate = kMath == Math::tf32 ? 230 : 75;
  Ways ways(caller.search);
  const auto launch = [=, stream = caller.stream](unsigned tiles) {
    const auto row_bytes = [](const Matrices<float>& of) {  // a copy begins in a row and ends there
      const int64_t all = 4 * (of.stride | of.cols | of.between);
      return static_cast<int>(std::min<int64_t>(16, all & -all));
    };
    const StridedFactors factors{
        {a.data, b.data, static_cast<int>(a.rows), static_cast<int>(a.cols),
         static_cast<int>(b.cols), row_bytes(a), row_bytes(b)},
        static_cast<int>(a.stride),
        static_cast<int>(b.stride)};
    allow_shared_bytes(fp32_batch<Tile>, Tile::kStageBytes);
    fp32_batch<Tile>
        <<<dim3(tiles, static_cast<unsigned>(batch)), Tile::kThreads, Tile::kStageBytes, stream>>>(
            factors, c.data.data(), c.stride, Between{a.between, b.between, c.between});
  };
  constexpr const char* kName = kMath == Math::tf32    ? "TF32 by mma.sync"
                                : kMath == Math::split ? "3xTF32 by mma.sync"
                                                       : "CUDA cores";
  offer_batch<Tile>(ways, kName, microseconds_of_batch<float, Tile>(a, b, batch, kRate),
                    Tile::kStageBytes, c.rows, c.cols, launch);
  return ways.found();
}

}  // namespace operators::product
