// Products of a layer's matrices by mma.sync, in TF32, from compute capability 8.0 on.
//
// Each matrix of a kind has the same size, so one kernel computes all products of a pass: each
// result is a sum of products of pairs. The pipeline and the tiles are those of a product
// (operators/product/portable/tf32_tiles.cuh); a block goes on from tile to tile. Factors are
// rounded to TF32 before, with zeros up to whole pieces. So the kernel copies pieces of 16 bytes,
// converts nothing, and asks for no end of a sum.
#pragma once

#include <algorithm>
#include <cstdint>

#include "operators/clifford_connected/tf32_product.cuh"
#include "operators/product/portable/tf32_tiles.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/launch.h"

namespace operators::clifford_connected {

using namespace primitives;
using product::Beside;

/// A block has a tile of kRows x kCols of a result. The largest one is for a multiprocessor with
/// 163 KB, the next one for two blocks on it, and the small one for shapes that have too few of
/// these. A step has kMixDepth of k.
template <int kRows, int kCols, Beside kA, Beside kB>
using MixTile = product::Tf32MmaTile<kRows, kCols, kRows / kCols * 2, 2, 3,
                                     (kRows > 128  ? 1
                                      : kRows > 64 ? 2
                                                   : 4),
                                     product::Takes::tf32, kA, kB>;
inline constexpr int kMixDepth = 32;

/// Matrices of one size, one after the other: so many floats from one to the next, and from a row
/// to the next.
struct MixMatrices {
  const float* first;
  size_t size;
  int stride;
};

/// Of the layer's matrices which are multiplied, and where the sums go. At most kMost of each.
struct MixPairs {
  static constexpr int kMost = 44;
  struct Pair {
    int16_t a, b;
  } pairs[kMost];
  /// The result `to` is the sum of `count` pairs, from `first` on.
  struct Sum {
    int16_t first, count, to;
  } sums[kMost];
  int count = 0;  ///< of sums
};

/// What a launch multiplies. The results (rows, cols) have rows `to_stride` apart, and `to_size`
/// floats from one to the next. `depth`: of each pair's k, in steps; what lies beyond the real end
/// of k is 0. `shares` blocks have a part of a tile's steps each, and their sums go to results that
/// are to_share floats apart.
struct MixProduct {
  MixMatrices a, b;
  float* to;
  size_t to_size, to_share;
  int to_stride, rows, cols, depth, shares;
  bool adds;  ///< to what is there
  MixPairs of;

  /// How many tiles a result has, and how many all results and shares have.
  template <class Tile>
  __host__ __device__ int64_t tiles() const {
    return int64_t{(rows + Tile::BM - 1) / Tile::BM} * ((cols + Tile::BN - 1) / Tile::BN);
  }
  template <class Tile>
  __host__ __device__ int64_t items() const {
    return tiles<Tile>() * of.count * shares;
  }
};

/// What a thread copies of each step's tile of A (or, not kOfA, of B): one piece of 16 bytes of
/// every kStep-th line.
template <class Tile, bool kOfA>
class MixCopies {
 public:
  static constexpr Beside kBeside = kOfA ? Tile::kA : Tile::kB;
  static constexpr int kSide = kOfA ? Tile::BM : Tile::BN, kDepth = kMixDepth;
  static constexpr int kPieces = (kBeside == Beside::k ? kDepth : kSide) / 4;
  static constexpr int kStep = Tile::kThreads / kPieces;
  static constexpr int kCount = (kBeside == Beside::k ? kSide : kDepth) / kStep;
  static_assert(kStep % (kBeside == Beside::k ? 16 : 4) == 0);  // all of a thread's lie alike

  /// Begins with a matrix: `line0` is the tile's first row or column of the result, of which there
  /// are `lines`; k0 its first k.
  __device__ void begin(const float* matrix, int stride, int line0, int lines, int k0) {
    const int row = kBeside == Beside::k ? line0 + line() : k0 + line();
    const int col = kBeside == Beside::k ? k0 + 4 * piece() : line0 + 4 * piece();
    from = matrix + static_cast<size_t>(row) * stride + col;
    next_line = int64_t{kStep} * stride;
    inside = kBeside == Beside::k ? lines - row : col < lines ? kDepth : 0;
  }
  /// Starts copy number n of a step.
  __device__ __forceinline__ void start(float* stage, int n) {
    copy_async<16>(stage + to + n * kStep * 4 * kPieces, from + n * next_line, n * kStep < inside);
  }
  /// Goes on to the next step, k of `stride` floats.
  __device__ void next(int stride) {
    from += kBeside == Beside::k ? int64_t{kDepth} : int64_t{kDepth} * stride;
  }
  /// From now on there are zeros.
  __device__ void end() { inside = 0; }

 private:
  __device__ static int line() { return static_cast<int>(threadIdx.x) / kPieces; }
  __device__ static int piece() { return static_cast<int>(threadIdx.x) % kPieces; }
  __device__ static int place() {
    const int along = kBeside == Beside::k ? line() : 4 * piece();
    const int k = kBeside == Beside::k ? 4 * piece() : line();
    return kOfA ? Tile::place_a(along, k) : Tile::kTileA + Tile::place_b(k, along);
  }

  const float* from;
  int64_t next_line;
  int inside;  ///< lines that exist, from the thread's first one on
  const int to = place();
};

/// What a launch computes, item by item: a tile of a sum, or a share of its steps. Neighbouring
/// blocks have the same rows, and so the same part of the left factor, which is the larger one. Of
/// the first items each block has one, and of the next ones, too, but in the opposite order: the
/// longest sums come first, and who had a longer one gets a shorter one. For MmaPipeline this
/// starts the copies of the steps of a block's items.
template <class Tile>
class MixItems {
 public:
  struct Item {
    int share, first, to, begin, steps, row0, col0;  ///< first: of the pairs
  };

  __device__ explicit MixItems(const MixProduct& product)
      : of(product),
        items(static_cast<int>(product.items<Tile>())),
        number(static_cast<int>(blockIdx.x)) {
    begin_item();
  }
  __device__ Item operator[](int item) const {
    const int tiles = static_cast<int>(of.tiles<Tile>());
    const int across = (of.cols + Tile::BN - 1) / Tile::BN, tile = item % tiles;
    const int share = item / tiles / of.of.count;
    const MixPairs::Sum sum = of.of.sums[item / tiles % of.of.count];
    const int all = sum.count * of.depth;
    const int begin = static_cast<int>(int64_t{all} * share / of.shares);
    const int steps = static_cast<int>(int64_t{all} * (share + 1) / of.shares) - begin;
    return {
        share, sum.first, sum.to, begin, steps, tile / across * Tile::BM, tile % across * Tile::BN};
  }
  __device__ int count() const { return items; }
  /// The block's next item.
  __device__ static int after(int item) {
    const int blocks = static_cast<int>(gridDim.x);
    return (item / blocks * 2 + 2) * blocks - 1 - item;
  }

  template <int kPart, int kParts>
  __device__ __forceinline__ void start(float* stage) {
    constexpr int kAll = CopiesA::kCount + CopiesB::kCount;
#pragma unroll
    for (int n = kPart * kAll / kParts; n < (kPart + 1) * kAll / kParts; ++n) {
      if (n < CopiesA::kCount) {
        a.start(stage, n);
      } else {
        b.start(stage, n - CopiesA::kCount);
      }
    }
    if (kPart + 1 == kParts) next_step();
  }

 private:
  using CopiesA = MixCopies<Tile, true>;
  using CopiesB = MixCopies<Tile, false>;

  __device__ void next_step() {
    if (--left > 0 && ++at < of.depth) {
      a.next(of.a.stride), b.next(of.b.stride);
    } else if (left > 0) {
      at = 0, ++pair;
      begin_pair();
    } else if (number < items) {
      number = after(number);
      begin_item();
    }
  }
  __device__ void begin_item() {
    if (number >= items) {
      a.end(), b.end();
      return;
    }
    const Item item = (*this)[number];
    left = item.steps, pair = item.first + item.begin / of.depth, at = item.begin % of.depth;
    row0 = item.row0, col0 = item.col0;
    begin_pair();
  }
  __device__ void begin_pair() {
    const MixPairs::Pair factors = of.of.pairs[pair];
    a.begin(of.a.first + factors.a * of.a.size, of.a.stride, row0, of.rows, at * kMixDepth);
    b.begin(of.b.first + factors.b * of.b.size, of.b.stride, col0, of.cols, at * kMixDepth);
  }

  const MixProduct& of;
  const int items;
  int number;                      // the item that copies are of
  int left, pair, at, row0, col0;  // its steps, of which the next is `at` of the pair
  CopiesA a;
  CopiesB b;
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    mix_product(const __grid_constant__ MixProduct of) {
  extern __shared__ __align__(128) float mix_stages[];
  MixItems<Tile> items(of);
  product::MmaPipeline<Tile, float> pipeline(mix_stages, items);
  const int warp = threadIdx.x / 32;
  const bool pairs = of.to_stride % 2 == 0;
  for (int number = blockIdx.x; number < items.count(); number = items.after(number)) {
    const auto item = items[number];
    float sum[Tile::kSumRows][Tile::kSumCols][4] = {};
    pipeline.multiply(items, item.steps, sum);
    float* const to = of.to + item.share * of.to_share + item.to * of.to_size;
    product::for_tf32_pairs(
        sum, item.row0 + warp / Tile::kWarpsN * Tile::WM,
        item.col0 + warp % Tile::kWarpsN * Tile::WN, [&](int row, int col, float2 two) {
          if (row >= of.rows || col >= of.cols) return;
          float* const element = to + static_cast<size_t>(row) * of.to_stride + col;
          if (pairs && col + 1 < of.cols) {
            float2* const both = reinterpret_cast<float2*>(element);
            if (of.adds) two.x += both->x, two.y += both->y;
            *both = two;
          } else {
            element[0] = of.adds ? element[0] + two.x : two.x;
            if (col + 1 < of.cols) element[1] = of.adds ? element[1] + two.y : two.y;
          }
        });
  }
  copy_async_wait<0>();  // zeros that nobody reads
}

/// Launches a product, the longest sums first, in small tiles where there are too few large ones.
template <Beside kA, Beside kB>
void launch_mix(MixProduct& product, cudaStream_t stream) {
  std::stable_sort(product.of.sums, product.of.sums + product.of.count,
                   [](const auto& one, const auto& other) { return one.count > other.count; });
  const auto run = [&]<class Tile>() {
    const auto kernel = mix_product<Tile>;
    allow_shared_bytes(kernel, Tile::kSharedBytes);
    const int64_t fit = int64_t{Tile::kResident} * multiprocessors();
    const auto blocks = static_cast<unsigned>(std::min(product.items<Tile>(), fit));
    mix_product<Tile><<<blocks, Tile::kThreads, Tile::kSharedBytes, stream>>>(product);
  };
  const auto suits = [&]<class Tile>() {
    return Tile::kSharedBytes <= most_shared_bytes() && product.items<Tile>() >= multiprocessors();
  };
  using Small = MixTile<64, 64, kA, kB>;
  using Medium = MixTile<128, 128, kA, kB>;
  using Large = std::conditional_t<kA == Beside::k, MixTile<256, 128, kA, kB>, Medium>;
  if (suits.template operator()<Large>()) {
    run.template operator()<Large>();
  } else if (suits.template operator()<Medium>()) {
    run.template operator()<Medium>();
  } else {
    run.template operator()<Small>();
  }
}

}  // namespace operators::clifford_connected
