// What it takes to launch the product of operators/product/product.cuh: rows that are aligned,
// memory for what clusters tell each other, and the tiles that should be the fastest.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "operators/operands.h"
#include "operators/product/product.cuh"
#include "primitives/launch.h"

namespace operators::product {

using namespace primitives;
using operators::Memory, operators::Workspace;

/// What align_rows copies: `rows` rows, `cols` wide and dense, into rows of `stride` elements, a
/// multiple of 8.
template <typename T>
struct RowCopy {
  const T* from;
  T* to;
  int rows, cols, stride;
};
template <typename T, int kCount>
struct RowCopies {
  RowCopy<T> of[kCount];

  /// Of a launch: a block has threads for whole rows, if these are not too long.
  dim3 threads() const {
    int stride = 8;
    for (const RowCopy<T>& copy : of) stride = std::max(stride, copy.stride);
    const int across = std::min(stride / 8, 256);
    return dim3(across, 256 / across);
  }
  dim3 blocks() const {
    int rows = 0;
    for (const RowCopy<T>& copy : of) rows = std::max(rows, copy.rows);
    return dim3(std::min(8192u, blocks_for(rows, threads().y)), kCount);
  }
};

/// 8 neighbours, kWidth of them a load, of which `left` exist; zeros for the others.
template <int kWidth, typename T>
__device__ void load_eight(T (&eight)[8], const T* from, int left) {
#pragma unroll
  for (int i = 0; i < 8; i += kWidth) {
    Neighbours<T, kWidth> pack = {};
    if (i < left) pack = *reinterpret_cast<const Neighbours<T, kWidth>*>(from + i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) eight[i + j] = pack.values[j];
  }
}

/// Copies rows of matrices, blockIdx.y being which. Thread (x, y) copies 8 elements at a time of
/// the block's row y. What is beyond `cols` becomes 0. To be launched as usual, not early: it does
/// not wait for the kernel before it.
template <typename T, int kCount>
__global__ void align_rows(const __grid_constant__ RowCopies<T, kCount> copies) {
  static_assert(sizeof(T) == 2);  // 8 of them are one access
  start_next_kernel();
  const RowCopy<T>& copy = copies.of[blockIdx.y];
  for (int row = blockIdx.x * blockDim.y + threadIdx.y; row < copy.rows;
       row += gridDim.x * blockDim.y) {
    const T* from = copy.from + static_cast<size_t>(row) * copy.cols;
    T* to = copy.to + static_cast<size_t>(row) * copy.stride;
    for (int col = 8 * threadIdx.x; col < copy.stride; col += 8 * blockDim.x) {
      alignas(16) T eight[8];
      if (copy.cols % 4 == 0) {
        load_eight<4>(eight, from + col, copy.cols - col);
      } else if (copy.cols % 2 == 0) {
        load_eight<2>(eight, from + col, copy.cols - col);
      } else {
        load_eight<1>(eight, from + col, copy.cols - col);
      }
      *reinterpret_cast<uint4*>(to + col) = *reinterpret_cast<const uint4*>(eight);
    }
  }
}

/// A matrix (rows x cols, dense) as the copy engine can follow it. Where rows are not aligned to 16
/// bytes, it needs a copy, which align_rows makes in each launch: then `copied`.
template <typename T>
struct AlignedRows {
  Memory<T> from;
  int rows, cols, stride;  ///< in elements; a copy's rows are whole lines of 128 bytes
  bool copied;
  Memory<T> copy;

  AlignedRows(const Workspace& workspace, Memory<T> matrix, int64_t row_count, int64_t col_count)
      : from(matrix),
        rows(static_cast<int>(row_count)),
        cols(static_cast<int>(col_count)),
        stride(cols % 8 == 0 ? cols : (cols + 63) / 64 * 64),
        copied(stride != cols),
        copy(workspace.zeros<T>(copied ? static_cast<size_t>(rows) * stride : 1)) {}

  const T* data() const { return copied ? copy : from; }
  /// For align_rows, if `copied`.
  RowCopy<T> job() const { return {from, copy, copied ? rows : 0, cols, stride}; }
  CUtensorMap map(int box_rows) const {
    return tensor_map<T>(data(), rows, cols, box_rows, false, stride, Reads::often);
  }
};

/// Where a product goes to, in boxes of `box_rows` rows (Tile::kOutRows).
template <typename T>
StoreRounded<T> rounded_to(T* C, int rows, int cols, int box_rows = 64) {
  StoreRounded<T> epilogue{{}, C, rows, cols, cols % 8 == 0};
  if (epilogue.aligned) epilogue.map = tensor_map<T>(C, rows, cols, box_rows);
  return epilogue;
}

/// The memory for an Exchange. A grid has three consumers for each multiprocessor at most.
struct ExchangeMemory {
  Memory<unsigned> flags;
  Memory<float> partial;  // a tile for each multiprocessor
  int64_t l2_bytes;

  explicit ExchangeMemory(const Workspace& workspace)
      : flags(workspace.zeros<unsigned>(1 + 3 * multiprocessors())),
        partial(workspace.zeros<float>(static_cast<size_t>(multiprocessors()) * 192 * 256)),
        l2_bytes(device_attribute(cudaDevAttrL2CacheSize)) {}

  /// Clusters keep in step where the L2 cache does not hold what a patch of 2048 rows and as many
  /// columns reads.
  template <typename T>
  Exchange exchange(const ProductShape& shape) const {
    const bool in_step = int64_t{2 * 2048 * sizeof(T)} * shape.depth > l2_bytes;
    return {in_step ? flags.data() : nullptr, flags + 1, partial};
  }
};

/// How a product is computed with some tiles, and how long that should take.
struct ProductPlan {
  int clusters;
  bool split;
  double microseconds;
};

/// The plans for some tiles: one, and a second if tiles can be shared; none if no cluster fits, or
/// there are too many tiles.
///
/// What a step, 64 of k, costs was fitted to 6,900 measurements on an H100 (tiles at 1.6 times the
/// fastest time or better), in nanoseconds. Three things take time; the slowest decides, and where
/// two are about equal, it is a little more:
///   - The tensor cores take 2.44 for each column of a tile of 128 rows, up to 3.07 in large
///     products, which lower the clock; more if wgmma's sum has less than 256 columns.
///   - The L2 cache takes 1.8 for each piece of 128 bytes that a multiprocessor fetches, if all 132
///     do; less if fewer do. Where rows are not multiples of 128 bytes, a piece lies on two lines
///     and takes 2.17, or 2.65 if rows are no multiples of a sector of 32 bytes either.
///   - A multiprocessor takes 1.1 for each piece that arrives, its own or another block's, because
///     the tensor cores read shared memory meanwhile (docs/hopper.md); 1.17 for one on two lines,
///     1.4 for one of five sectors.
/// To begin and to end takes 5.7 us, 0.35 more with clusters, to share tiles 7 more.
template <class Tile, class Epilogue>
std::vector<ProductPlan> plan_product(const ProductShape& shape, int64_t stride_a,
                                      int64_t stride_b) {
  using T = typename Tile::Element;
  constexpr int kBytes = sizeof(ProductShared<Tile>);
  const auto kernel = product<MatrixProduct<Tile, Epilogue>>;
  allow_shared_bytes(kernel, kBytes);
  const int capacity = clusters_that_fit(kernel, Tile::kBlocks, Tile::kThreads, kBytes);
  if (capacity == 0 || Schedule<Tile>::tiles_of(shape) > Schedule<Tile>::kMostTiles) return {};
  const Schedule<Tile> whole(shape, capacity, false), shared(shape, capacity, true);
  const int clusters = static_cast<int>(persistent(whole.tiles, capacity));

  constexpr double kArea = Tile::BM / 128.0 * Tile::BN;
  constexpr double kNarrow = 1 + 0.017 * (256 - Tile::kWide) / 64;
  const double flops = 2.0 * shape.rows * shape.cols * shape.depth;
  const double products = kNarrow * (2.44 + 0.63 * std::min(1.0, flops / 1e11)) * kArea;
  constexpr int kFetched = Tile::kRowsA + kStepK * Tile::Share::kAllBoxes / Tile::kStack;
  constexpr int kArriving = Tile::BM + kStepK * Tile::Share::kAllBoxes;
  const auto rows_are = [&](int64_t bytes) {
    return stride_a * sizeof(T) % bytes == 0 && stride_b * sizeof(T) % bytes == 0;
  };
  const double fetch = rows_are(128) ? 1.8 : rows_are(32) ? 2.17 : 2.65;
  const double arrive = rows_are(128) ? 1.1 : rows_are(32) ? 1.17 : 1.4;
  const auto microseconds = [&](double rounds, int of_clusters) {
    const double fetched = fetch * kFetched * of_clusters * Tile::kBlocks / 132;
    const double step = std::pow(
        std::pow(products, 6) + std::pow(fetched, 6) + std::pow(arrive * kArriving, 6), 1 / 6.0);
    return (Tile::kBlocks == 1 ? 5.7 : 6.05) + rounds * whole.steps * step / 1000;
  };
  std::vector<ProductPlan> plans = {{clusters, false, microseconds(whole.rounds, clusters)}};
  if (shared.shared > 0) {
    plans.push_back({capacity, true, 7 + microseconds(1.0 * whole.tiles / capacity, capacity)});
  }
  return plans;
}

/// The ways to compute a product: the plans for each Tile. A plan's launch is
/// launch.operator()<Tile>(plan). The strides are of A's and B's rows, in elements.
template <class... Tile>
struct TileChoice {
  template <class Epilogue, typename Launch>
  static std::vector<Way> ways(const ProductShape& shape, int64_t stride_a, int64_t stride_b,
                               Launch launch) {
    std::vector<Way> ways;
    const auto add_plans = [&]<class Each>() {
      for (const ProductPlan& plan : plan_product<Each, Epilogue>(shape, stride_a, stride_b)) {
        ways.push_back({name_of<Each>(plan, ProductShared<Each>::kStages), plan.microseconds,
                        [=] { launch.template operator()<Each>(plan); },
                        static_cast<int>(sizeof(ProductShared<Each>))});
      }
    };
    (add_plans.template operator()<Tile>(), ...);
    return ways;
  }

  /// "tile 176 x 192, transposed; stages: 4; cluster: 2 x 1; clusters: 66; tiles shared"
  template <class Each>
  static std::string name_of(const ProductPlan& plan, int stages) {
    constexpr bool kTransposed = requires { Each::kSumRows; };
    return "tile " + std::to_string(Each::BM) + " x " + std::to_string(Each::BN) +
           (kTransposed ? ", transposed" : "") + "; stages: " + std::to_string(stages) +
           "; cluster: " + std::to_string(Each::kStack) + " x " + std::to_string(Each::kSide) +
           "; clusters: " + std::to_string(plan.clusters) + (plan.split ? "; tiles shared" : "");
  }
};

}  // namespace operators::product
