// softmax(x W) on any GPU. Either a block has all columns of some rows; or, if a row has too many
// columns for that, a tile. The product is that of
// operators/product/portable/fp32_tiles.cuh, in any of its maths. Results (layer.cuh) say what
// becomes of its sums.
#pragma once

#include <algorithm>

#include "operators/product/portable/fp32_tiles.cuh"
#include "operators/softmax/layer.cuh"

namespace operators::softmax {

using product::Factors, product::factors_of, product::Math, product::MathTile;
using product::multiply_tiles, product::store_run, product::TileSums;

// ---- All columns --------------------------------------------------------------------------------

// A block has BM rows with all their columns (C <= BN), so W is read B / BM times instead of B
// times. There is split-K twice. The warps of a block share D, and their sums meet in shared
// memory. And gridDim.y blocks have the same rows and share D. Their sums go to `partial`, and the
// last of these blocks to arrive adds them up, always in the same order. In the end a warp takes a
// row at a time.
//
// Why do blocks share D? 1024 rows are 32 blocks of 32 rows, for a GPU of 132 multiprocessors, and
// each of them would read all of W by itself, 400 KB if it is 1024 x 100. Four times as many blocks
// read a quarter each.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) all_columns(Factors factors, Results results) {
  start_next_kernel();
  wait_for_previous_kernel();
  constexpr int kValues = (Tile::BN + 31) / 32, kStride = Tile::kStrideLogits;
  extern __shared__ __align__(128) char shared[];
  auto* stages = reinterpret_cast<float*>(shared);
  float* logits = reinterpret_cast<float*>(shared + Tile::kStageBytes);  // [kWarpsK][BM][kStride]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int B = factors.B, D = factors.D, C = factors.C;
  const int row0 = blockIdx.x * Tile::BM, splits = gridDim.y, split = blockIdx.y;
  const int steps = (D + Tile::BK - 1) / Tile::BK;
  const int d_begin = static_cast<int>(static_cast<int64_t>(steps) * split / splits) * Tile::BK;
  const int d_end =
      min(D, static_cast<int>(static_cast<int64_t>(steps) * (split + 1) / splits) * Tile::BK);

  TileSums<Tile> sums;
  multiply_tiles<Tile>(sums, stages, factors, row0, 0, d_begin, d_end);

  const int warp_row = warp / Tile::kWarpsN % Tile::kWarpsM * Tile::kRows;
  const int warp_col = warp % Tile::kWarpsN * Tile::kCols;
  const int warp_k = warp / (Tile::kWarpsM * Tile::kWarpsN);
#pragma unroll
  for (int i = 0; i < TileSums<Tile>::kOwnRows; ++i) {
    float* to =
        logits + (warp_k * Tile::BM + warp_row + TileSums<Tile>::row(i)) * kStride + warp_col;
#pragma unroll
    for (int j = 0; j < TileSums<Tile>::kOwnCols; ++j) to[TileSums<Tile>::col(j)] = sums.at(i, j);
  }
  __syncthreads();

  const int rows = min(Tile::BM, B - row0);
  for (int row = warp; row < rows; row += Tile::kWarps) {
    float v[kValues] = {};
#pragma unroll
    for (int k = 0; k < Tile::kWarpsK; ++k) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const int col = lane + 32 * i;
        if (col < C) v[i] += logits[(k * Tile::BM + row) * kStride + col];
      }
    }
    if (splits == 1) {
      finish_row(v, row0 + row, C, results);
    } else {
      float* to = results.partial + (static_cast<size_t>(split) * B + row0 + row) * C;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (lane + 32 * i < C) to[lane + 32 * i] = v[i];
      }
    }
  }
  if (splits == 1 || !is_last_block(results.arrived + blockIdx.x, splits)) return;

  for (int row = warp; row < rows; row += Tile::kWarps) {
    float v[kValues] = {};
    const float* from = results.partial + static_cast<size_t>(row0 + row) * C;
#pragma unroll 4
    for (int s = 0; s < splits; ++s) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const int col = lane + 32 * i;
        if (col < C) v[i] += from[static_cast<size_t>(s) * B * C + col];
      }
    }
    finish_row(v, row0 + row, C, results);
  }
}

// ---- Tiles of a row -----------------------------------------------------------------------------

// Lesson 9's *online tiles*. Here a row does not fit into a block: 64 rows of 1000 columns are
// 64000 sums, about as many as a multiprocessor has registers, and blocks of fewer rows would read
// W too often. So blocks have tiles of BM x BN, and of each row a warp has kCols columns. It writes
// their logits. It also leaves their maximum, and their sum relative to it, which the lanes that
// share a row find by a few shuffles. So no part has to know another one's maximum.
//
// finish_columns() (rows.cuh) merges a row's parts and makes probabilities of the logits, each of
// which is read once. (A row's last block could do that in the same launch. But it would have all
// of the row's logits to go through, while other multiprocessors have nothing to do.)
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads) column_tiles(Factors factors, Results results) {
  start_next_kernel();
  wait_for_previous_kernel();
  static_assert(Tile::kWarpsK == 1 && Tile::kCols % 4 == 0);
  extern __shared__ __align__(128) char shared[];
  const int B = factors.B, C = factors.C, block_columns = (C + Tile::BN - 1) / Tile::BN;
  const int row0 = blockIdx.x / block_columns * Tile::BM;
  const int col0 = blockIdx.x % block_columns * Tile::BN;
  TileSums<Tile> sums;
  multiply_tiles<Tile>(sums, reinterpret_cast<float*>(shared), factors, row0, col0, 0, factors.D);

  const int warp = threadIdx.x / 32, tiles = (C + Tile::kCols - 1) / Tile::kCols;
  const int warp_row = row0 + warp / Tile::kWarpsN * Tile::kRows;
  const int warp_col = col0 + warp % Tile::kWarpsN * Tile::kCols;
  constexpr int kRun = TileSums<Tile>::kRun, kOwnCols = TileSums<Tile>::kOwnCols;
  constexpr int kLanes = TileSums<Tile>::kLanesPerRow;
#pragma unroll
  for (int i = 0; i < TileSums<Tile>::kOwnRows; ++i) {
    const int row = warp_row + TileSums<Tile>::row(i);
    if (row < B) {
      float* to = results.out + static_cast<size_t>(row) * C + warp_col;
#pragma unroll
      for (int j = 0; j < kOwnCols; j += kRun) {
        float run[kRun];
#pragma unroll
        for (int e = 0; e < kRun; ++e) run[e] = sums.at(i, j + e);
        const int col = TileSums<Tile>::col(j);
        store_run<kRun>(to + col, run, C - warp_col - col, C % kRun == 0);
      }
    }
    if (results.epilogue == Epilogue::logits) continue;
    float largest = minus_infinity(), sum = 0;
#pragma unroll
    for (int j = 0; j < kOwnCols; ++j) {
      if (warp_col + TileSums<Tile>::col(j) >= C) sums.at(i, j) = minus_infinity();
      largest = fmaxf(largest, sums.at(i, j));
    }
    largest = lanes_max<kLanes>(largest);
#pragma unroll
    for (int j = 0; j < kOwnCols; ++j) sum += expf(sums.at(i, j) - base_of(largest));
    sum = lanes_sum<kLanes>(sum);
    if (threadIdx.x % kLanes == 0 && row < B && warp_col < C) {
      results.parts[static_cast<size_t>(row) * tiles + warp_col / Tile::kCols] = {largest, sum};
    }
  }
}

// ---- Which of the two, with which tiles ---------------------------------------------------------

/// What a tile costs a multiprocessor, in clock cycles: a step, and what comes after the steps. A
/// step takes longer if rows of W start at multiples of 8 bytes only (`pairs`), or of 4
/// (`singles`), since then W comes in pairs, or number by number. If a multiprocessor has room for
/// several blocks, each takes `share` of the time that it takes alone.
struct TileCost {
  Math math;
  int rows, cols;
  double step, finish, pairs, singles, share = 1;
};
inline constexpr TileCost kTileCosts[] = {{Math::split, 16, 56, 1520, 3330, 0.15, 0.46},
                                          {Math::split, 32, 104, 3270, 3590, 0.15, 0.33},
                                          {Math::split, 32, 256, 3330, 5300, 0.15, 0.38},
                                          {Math::split, 128, 128, 5600, 4620, 0.07, 0.13},
                                          {Math::fp32, 8, 16, 706, 2350, 0.03, 0.21, 0.66}};

/// The costs of a tile. One that is not in the table has an estimate by its size.
template <class Tile>
constexpr TileCost cost_of_tile() {
  for (const TileCost& cost : kTileCosts) {
    if (cost.math == Tile::kMath && cost.rows == Tile::BM && cost.cols == Tile::BN) return cost;
  }
  constexpr double kMultiplyAdds = 1.0 * Tile::BM * Tile::BN * Tile::BK;
  const double step =
      Tile::kMath == Math::fp32 ? 330 + 27e-3 * kMultiplyAdds : 1480 + 3.1e-3 * kMultiplyAdds;
  return {Tile::kMath, Tile::BM, Tile::BN, step, 6000 + 0.6 * Tile::BM * Tile::BN, 0, 0};
}

/// How long `tiles` tiles take one after another, with so many inputs each. `finish`: cycles after
/// the steps of each. There is no estimate for TF32.
template <class Tile>
double tiles_microseconds(const Layer& layer, double tiles, int inputs, double finish) {
  if (Tile::kMath == Math::tf32) return INFINITY;
  const TileCost cost = cost_of_tile<Tile>();
  const double of_W = layer.C % 4 == 0 ? 0 : layer.C % 2 == 0 ? cost.pairs : cost.singles;
  const double step = cost.step * (1 + of_W + (layer.D % 2 != 0 ? 0.1 : 0));
  return std::max(1.0, tiles * cost.share) * (ceil_div(inputs, Tile::BK) * step + finish) /
         cycles();
}

// More blocks share D until the GPU is full, but none has fewer than kLeastDepth inputs.
constexpr int kLeastDepth = 128;
template <class Tile>
Product make_all_columns(const Layer& layer) {
  constexpr int kBytes = Tile::kStageBytes + Tile::kLogitBytes;
  const int row_tiles = static_cast<int>(blocks_for(layer.B, Tile::BM));
  const int splits =
      std::max(1, std::min({layer.D / kLeastDepth, kMostSplits, layer.sms / row_tiles}));
  const auto partial =
      layer.caller.workspace.any<float>(splits > 1 ? splits * layer.shape.rows * layer.C : 1);
  const auto arrived = layer.caller.workspace.zeros<unsigned>(row_tiles);
  const auto launch = [=](Results results) {
    results.partial = partial;
    results.arrived = splits > 1 ? arrived.data() : nullptr;
    layer.launch(all_columns<Tile>, dim3(row_tiles, splits), Tile::kThreads, kBytes,  //
                 factors_of(layer.x, layer.W, layer.B, layer.D, layer.C), results);
  };
  const double microseconds =
      1.35 +
      tiles_microseconds<Tile>(layer, std::ceil(1.0 * row_tiles * splits / layer.sms),
                               ceil_div(layer.D, splits), cost_of_tile<Tile>().finish) +
      (splits > 1 ? 3.6 + 65e-6 * Tile::BM * Tile::BN * splits : 0);
  Product product = product_of(Kernels::tiles, all_columns<Tile>, kBytes, launch);
  product.expected = {microseconds, microseconds + layer.softmax_microseconds()};
  return product;
}

template <class Tile>
Product make_column_tiles(const Layer& layer) {
  const unsigned tiles = blocks_for(layer.B, Tile::BM) * blocks_for(layer.C, Tile::BN);
  const auto launch = [=](Results results, int) {
    layer.launch(column_tiles<Tile>, tiles, Tile::kThreads, Tile::kStageBytes,  //
                 factors_of(layer.x, layer.W, layer.B, layer.D, layer.C), results);
  };
  Product product = half_fused(layer, Kernels::online, column_tiles<Tile>, Tile::kStageBytes, 1,
                               static_cast<int>(blocks_for(layer.C, Tile::kCols)), launch);
  // A warp without rows has nothing to do after its steps.
  const double finish =
      std::min(1.0, 1.0 * layer.B / Tile::BM) *
      (cost_of_tile<Tile>().finish * (layer.C % 2 != 0 ? 2 : 1) + (leaves_parts(layer) ? 3400 : 0));
  const double microseconds =
      3.6 + tiles_microseconds<Tile>(layer, std::ceil(1.0 * tiles / layer.sms), layer.D, finish) +
      layer.logits_microseconds() + layer.softmax_microseconds();
  product.expected = {microseconds, microseconds};
  return product;
}

// The tiles for a shape. The numbers are BM, BN and BK; warps along rows, columns and D; and
// stages.
template <Math kMath>
Product make_product(const Layer& layer) {
  const int C = layer.C;
  // A block of compute capability 9.0 has 227 KB of shared memory, of 8.0 163 KB, of 8.6 99 KB, of
  // 7.5 64 KB: where all columns of a row do not fit, they are spread over column_tiles().
  const bool large = most_shared_bytes() >= 220 << 10;
  const bool medium = most_shared_bytes() >= 126 << 10;
  if (C <= 16) {
    return make_all_columns<MathTile<kMath, kMath == Math::fp32 ? 8 : 16, 16, 64, 1, 1, 8, 3>>(
        layer);
  }
  constexpr int kCols = kMath == Math::fp32 ? 64 : 56;
  if (C <= kCols && medium)
    return make_all_columns<MathTile<kMath, 16, kCols, 64, 1, 1, 8, 4>>(layer);
  if (C <= 104 && large) return make_all_columns<MathTile<kMath, 32, 104, 64, 2, 1, 4, 4>>(layer);
  if (C <= 256 && large) return make_all_columns<MathTile<kMath, 32, 256, 32, 1, 4, 2, 3>>(layer);
  if (large || (medium && C > 256)) {
    // A warp's sums are 64 x 32 in TF32, as W comes from shared memory in single floats. In fp32
    // they are 32 x 64, as both factors come as vectors of 4. In 3xTF32 they are 32 x 32, of twice
    // as many warps, since a thread also has the sums of a step, and both numbers of each split
    // operand.
    constexpr int kWarpsM = kMath == Math::tf32 ? 2 : 4;
    constexpr int kWarpsN = kMath == Math::fp32 ? 2 : 4;
    return make_column_tiles<MathTile<kMath, 128, 128, 32, kWarpsM, kWarpsN, 1, 3>>(layer);
  }
  return make_column_tiles<MathTile<kMath, 64, 64, 32, 2, 2, 1, 2>>(layer);
}

}  // namespace operators::softmax
