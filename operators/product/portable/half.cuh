// C = A B in fp16 or bf16 on compute capability 8.0 and newer, for any shape: which tiles of
// mma_tiles.cuh suit it, and in how many slices of the depth.
//
// Where rows are not aligned to 16 bytes they are copied into rows that are, as for Hopper's
// product (AlignedRows).
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "operators/caller.h"
#include "operators/estimate.h"
#include "operators/product/plan.cuh"
#include "operators/product/portable/mma_tiles.cuh"
#include "operators/product/shape.h"
#include "operators/product/store_sums.cuh"

namespace operators::product {

/// The epilogue that rounds and stores the sums.
template <typename T>
struct MmaStore {
  MmaResults<T> results;

  template <int kRows16, int kCols8>
  __device__ __forceinline__ void operator()(const float (&sum)[kRows16][kCols8][4], int row,
                                             int col) const {
    results.template store<16 * kRows16, 8 * kCols8>(row, col, [&](int i, int j) {
      const float2 pair = pair_of(sum, i, j);
      return pack2<T>(pair.x, pair.y);
    });
  }
};

/// What a launch needs beside slices. `rows_to_copy` may have no blocks.
template <typename T, int kFactors, class Epilogue>
struct MmaLaunch {
  RowCopies<T, 1 + kFactors> rows_to_copy;
  MmaFactors<T, kFactors> factors;
  Epilogue finish;
};

/// How a product is computed with some tile, and how long that should take.
struct MmaPlan {
  int64_t tiles;
  int slices, steps;  ///< steps of a slice
  double microseconds;
};

/// The ways to compute a product with some tiles. `cols` of the shape: of one right factor. make()
/// returns the MmaLaunch, and is called for each launch; `copied`: bytes that it copies first.
template <typename T, int kFactors, class Epilogue>
class MmaWays {
 public:
  using Launch = MmaLaunch<T, kFactors, Epilogue>;

  MmaWays(const Caller& caller, ProductShape shape, double copied, std::function<Launch()> make)
      : caller_(caller), shape_(shape), copied_(copied), make_(std::move(make)) {}

  template <class... Tiles>
  std::vector<Way> ways() {
    Ways ways(caller_.search);
    SharedSums sums;
    offer<Tiles...>(ways, sums);
    sums.allocate(caller_.workspace);
    return ways.found();
  }
  /// The same beside other ways. `sums`: of all.
  template <class... Tiles>
  void offer(Ways& ways, SharedSums& sums) const {
    (add<Tiles>(ways, sums), ...);
  }

 private:
  template <class Tile>
  void add(Ways& ways, SharedSums& sums) const {
    if (Tile::kSharedBytes > most_shared_bytes()) return;
    const int64_t tiles =
        int64_t{ceil_div(shape_.rows, Tile::BM)} * ceil_div(shape_.cols, Tile::BN / kFactors);
    // A block counts the columns and rows up to the tile's end, and tiles of a group.
    if (tiles > INT_MAX / 64) return;
    const int steps = ceil_div(shape_.depth, Tile::BK);
    add<Tile>(ways, sums, {tiles, 1, steps, microseconds<Tile>(tiles, 1, steps)});
    MmaPlan best = {tiles, 1, steps, INFINITY};
    const int64_t most = std::min<int64_t>(
        {kMostSlices, steps / kLeastStepsOfSlice, int64_t{4} * multiprocessors() / tiles});
    for (int slices = 2; slices <= most; ++slices) {
      const int of_slice = ceil_div(steps, slices), needed = ceil_div(steps, of_slice);
      const double time = microseconds<Tile>(tiles, needed, of_slice);
      if (needed > 1 && time < best.microseconds) best = {tiles, needed, of_slice, time};
    }
    if (best.slices > 1) add<Tile>(ways, sums, best);
  }
  template <class Tile>
  void add(Ways& ways, SharedSums& sums, const MmaPlan& plan) const {
    const bool shares = plan.slices > 1;
    const WayId id = way_id({static_cast<int64_t>(Divided::by_mma_sync), Tile::BM, Tile::BN,
                             Tile::BK, Tile::kStages, plan.slices});
    const bool wanted = ways.offer(plan.microseconds, id, [&] {
      const std::string name = std::string(sizeof(T) < 4         ? ""
                                           : Tile::kProducts > 1 ? "3xTF32 by "
                                                                 : "TF32 by ") +
                               "mma.sync; tile " + std::to_string(Tile::BM) + " x " +
                               std::to_string(Tile::BN) + " x " + std::to_string(Tile::BK) +
                               "; stages: " + std::to_string(Tile::kStages) +
                               (shares ? "; slices: " + std::to_string(plan.slices) : "") +
                               (copied_ > 0 ? "; rows copied" : "");
      return Way{name, plan.microseconds,
                 [make = make_, plan, sums, stream = caller_.stream] {
                   launch<Tile>(make(), plan, sums.exchange(plan.slices > 1), stream);
                 },
                 Tile::kSharedBytes};
    });
    if (!wanted) return;
    const int64_t quads = plan.tiles * plan.slices * Tile::kQuads * Tile::kThreads;
    sums.needs(ways, shares ? static_cast<size_t>(plan.tiles) : 0,
               shares ? static_cast<size_t>(4 * quads) : 0);
  }
  template <class Tile>
  static void launch(const Launch& of, const MmaPlan& plan, const Exchange& exchange,
                     cudaStream_t stream) {
    launch_align_rows<T, 1 + kFactors>(of.rows_to_copy, stream);
    const auto kernel = mma_product<Tile, T, kFactors, Epilogue>;
    allow_shared_bytes(kernel, Tile::kSharedBytes);
    const int64_t items = plan.tiles * plan.slices;
    const MmaSlices slices = {plan.slices, plan.steps, static_cast<int>(items),
                              reinterpret_cast<float4*>(exchange.partial), exchange.ended};
    const int64_t fit = int64_t{at_once<Tile>()} * multiprocessors();
    mma_product<Tile, T, kFactors, Epilogue>
        <<<static_cast<unsigned>(std::min(items, fit)), Tile::kThreads, Tile::kSharedBytes,
           stream>>>(of.factors, slices, of.finish);
  }
  /// Blocks on a multiprocessor.
  template <class Tile>
  static int at_once() {
    return std::clamp((most_shared_bytes() + 1024) / (Tile::kSharedBytes + 1024), 1,
                      Tile::kResident);
  }

  /// Without gates fitted to products in fp16 and TF32 of shapes drawn at random, on an H200. A
  /// multiprocessor with all its blocks is counted with kRate multiply-adds in a cycle, in TF32
  /// half as many, and with a sixth less (with gates: a third) if four warps are alone; with
  /// kFetched bytes a cycle from the L2 cache; and with kEnds cycles for the first data and the
  /// results of a tile.
  template <class Tile>
  double microseconds(int64_t tiles, int slices, int steps) const {
    constexpr bool kGates = kFactors > 1, kEightWarps = Tile::kThreads > 128;
    constexpr int kOfWarp = Tile::WM * Tile::WN;
    constexpr double kLargest = kGates ? 1050 : kEightWarps ? 1130 : 950;
    constexpr double kRate = kOfWarp >= 64 * 64 ? kLargest : kOfWarp >= 64 * 32 ? 850 : 700;
    constexpr double kAlone = kEightWarps ? 1 : kGates ? 1.5 : 1.17;
    constexpr double kFetched = kGates ? 45 : 39, kEnds = kGates ? 4000 : 3000;
    const double busy =
        std::max(0.5 * sizeof(T) * Tile::kProducts * Tile::BM * Tile::BN * Tile::BK / kRate,
                 1.0 * sizeof(T) * (Tile::BM + Tile::BN) * Tile::BK / kFetched);
    const double sms = multiprocessors(), blocks = static_cast<double>(tiles) * slices;
    const double full = std::floor(blocks / (sms * at_once<Tile>()));
    const double left = std::ceil((blocks - full * sms * at_once<Tile>()) / sms);
    const double rounds = full * std::max(1.0 * at_once<Tile>(), kAlone) * busy +
                          std::max(left * busy, left > 0 ? kAlone * busy : 0);
    const double all = steps * rounds + kEnds * (full + (left > 0 ? 1 : 0));
    const double bytes =
        sizeof(T) * (1.0 * shape_.rows * shape_.depth +
                     1.0 * kFactors * shape_.depth * shape_.cols + 1.0 * shape_.rows * shape_.cols);
    double time = kFirstLaunch + std::max(all / cycles(), bytes / memory_rate());
    if (copied_ > 0) time += kNextLaunch + 2 * copied_ / memory_rate();
    if (slices > 1) {
      const double sums = 4.0 * Tile::BM * Tile::BN;
      time += 1.3 + slices * sums / 41 / cycles() + blocks * sums / (1.45 * memory_rate());
    }
    return time;
  }

  static constexpr int kMostSlices = 64, kLeastStepsOfSlice = 4;
  Caller caller_;
  ProductShape shape_;
  double copied_;
  std::function<Launch()> make_;
};

/// The bytes of a matrix, if its rows are to be copied.
template <typename T>
double bytes_copied(const AlignedRows<T>& matrix) {
  return matrix.copied ? 1.0 * sizeof(T) * matrix.rows * matrix.stride : 0;
}

/// The ways to compute C = A B with these tiles and this epilogue.
template <typename T, class... Tiles, class Epilogue>
std::vector<Way> mma_half_ways(const Caller& caller, const AlignedRows<T>& A,
                               const AlignedRows<T>& B, ProductShape shape,
                               const std::function<Epilogue()>& epilogue) {
  using Launch = MmaLaunch<T, 1, Epilogue>;
  const auto make = [=] {
    return Launch{{{A.job(), B.job()}},
                  {A.data(), {B.data()}, A.stride, B.stride, shape.rows, shape.cols, shape.depth},
                  epilogue()};
  };
  return MmaWays<T, 1, Epilogue>(caller, shape, bytes_copied(A) + bytes_copied(B), make)
      .template ways<Tiles...>();
}

/// The same of results in T. c_stride: 0 if C is dense.
template <typename T>
std::vector<Way> portable_half_ways(const Caller& caller, const AlignedRows<T>& A,
                                    const AlignedRows<T>& B, const Memory<T>& C, int64_t c_stride,
                                    ProductShape shape) {
  const std::function<MmaStore<T>()> epilogue = [=] {
    return MmaStore<T>{{C, c_stride != 0 ? c_stride : shape.cols, shape.rows, shape.cols}};
  };
  // The first wants more shared memory than compute capability 8.6 has. Two blocks of the second,
  // and of the third, fit on an 8.6.
  return mma_half_ways<T, MmaTile<256, 128, 64, 4, 2, 3, 1>, MmaTile<128, 256, 32, 2, 4, 4, 1>,
                       MmaTile<128, 128, 64, 2, 2, 3, 2>, MmaTile<128, 128, 32, 2, 2, 3, 2>,
                       MmaTile<64, 64, 64, 2, 2, 3, 4>>(caller, A, B, shape, epilogue);
}

/// The same of results in fp32. There are fewer tiles, since each is a kernel more to compile.
template <typename T>
std::vector<Way> portable_half_ways(const Caller& caller, const AlignedRows<T>& A,
                                    const AlignedRows<T>& B, const Memory<float>& C, int64_t,
                                    ProductShape shape) {
  const std::function<MmaStoreSums<T>()> epilogue = [=] {
    return MmaStoreSums<T>{{C, shape.rows, shape.cols}};
  };
  return mma_half_ways<T, MmaTile<128, 256, 32, 2, 4, 4, 1>, MmaTile<128, 128, 64, 2, 2, 3, 2>,
                       MmaTile<64, 64, 64, 2, 2, 3, 4>>(caller, A, B, shape, epilogue);
}

}  // namespace operators::product
