// Products of a layer's matrices by mma.sync, in TF32, from compute capability 8.0 on.
//
// Each matrix of a kind has the same size, so one kernel computes all products of a pass: each
// result is a sum of products of pairs. Factors are rounded to TF32 before, with zeros up to whole
// pieces. So the kernel copies pieces of 16 bytes, converts nothing, and asks for no end of a sum.
// ldmatrix loads the fragments of a factor in which neighbours along k, which is what a product
// sums over, lie beside each other. It cannot transpose elements of 4 bytes, so those of another
// factor are loaded number by number, which takes shared memory no longer.
#pragma once

#include <algorithm>
#include <cstdint>

#include "operators/clifford_connected/tf32_product.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/launch.h"
#include "primitives/mma.cuh"

namespace operators::clifford_connected {

using namespace primitives;

/// How a factor lies in memory: neighbours beside each other are those along k, or those of the
/// result's rows or columns.
enum class Beside { k, results };

/// A block of four warps has a tile of kSide x kSide of a result, a warp a quarter of it. A step
/// has 32 of k. The large tile is for two blocks on a multiprocessor, the small one for shapes that
/// have too few large ones.
template <int kSide>
struct MixTile {
  static constexpr int kDepth = 32, kStages = 3, kThreads = 128, kOfWarp = kSide / 2;
  static constexpr int kFactor = kSide * kDepth;  ///< floats of a factor's tile
  static constexpr int kSharedBytes = kStages * 2 * kFactor * 4;
  static constexpr int kResident = kSide > 64 ? 2 : 4;

  /// Where piece `piece` (16 bytes) of line `line` of a factor's tile lies, in floats. With
  /// Beside::k a line is a row or column of the result, eight pieces of k long, and eight lines are
  /// read at once (see swizzle()). With Beside::results it is one of k, and a warp reads eight
  /// neighbours of four such lines at once: they lie in 32 banks.
  template <Beside kBeside>
  __device__ static int place(int line, int piece) {
    if constexpr (kBeside == Beside::k) return line * kDepth + 4 * (piece ^ (line % 8));
    return line * kSide + 4 * (piece ^ (2 * (line % 4)));
  }
};

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
};

/// What a thread copies of each step's tile of a factor: one piece of 16 bytes of every kStep-th
/// line.
template <class Tile, Beside kBeside>
class MixCopies {
 public:
  /// Begins with a matrix: `line0` is the tile's first row or column of the result, of which there
  /// are `lines`; k0 its first k.
  __device__ void begin(const float* matrix, int stride, int line0, int lines, int k0) {
    const int row = kBeside == Beside::k ? line0 + line() : k0 + line();
    const int col = kBeside == Beside::k ? k0 + 4 * piece() : line0 + 4 * piece();
    from = matrix + static_cast<size_t>(row) * stride + col;
    next_line = size_t{kStep} * stride;
    next_step = kBeside == Beside::k ? size_t{Tile::kDepth} : size_t{Tile::kDepth} * stride;
    inside = kBeside == Beside::k ? lines - row : col < lines ? kLines : 0;
  }
  /// Starts the copies of a step, and goes on to the next one.
  __device__ __forceinline__ void start(float* tile) {
    const float* piece_from = from;
#pragma unroll
    for (int i = 0; i < kLines; i += kStep, piece_from += next_line) {
      copy_async<16>(tile + to + i * 4 * kPieces, piece_from, i < inside);
    }
    from += next_step;
  }

 private:
  static constexpr int kPieces =
      (kBeside == Beside::k ? Tile::kDepth : Tile::kFactor / Tile::kDepth) / 4;
  static constexpr int kStep = Tile::kThreads / kPieces, kLines = Tile::kFactor / 4 / kPieces;
  static_assert(kStep % (kBeside == Beside::k ? 8 : 4) == 0);  // all of a thread's lie alike

  __device__ static int line() { return static_cast<int>(threadIdx.x) / kPieces; }
  __device__ static int piece() { return static_cast<int>(threadIdx.x) % kPieces; }

  const float* from;
  size_t next_line, next_step;
  int inside;  ///< lines that exist, from the thread's first one on
  const int to = Tile::template place<kBeside>(line(), piece());
};

/// Loads the fragments of a left factor's 16 rows, from `row` on, and 8 of k.
template <class Tile, Beside kBeside>
__device__ __forceinline__ void load_mix_left(unsigned (&a)[4], const float* tile, int row, int k) {
  const int lane = threadIdx.x % 32;
  if constexpr (kBeside == Beside::k) {
    ldmatrix_x4(a, tile + Tile::template place<kBeside>(row + lane % 16, k / 4 + lane / 16));
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int line = k + lane % 4 + e / 2 * 4, at = row + e % 2 * 8 + lane / 4;
      a[e] = __float_as_uint(tile[Tile::template place<kBeside>(line, at / 4) + at % 4]);
    }
  }
}

/// The same of a right factor's 16 columns, from `col` on: of each 8 columns two registers.
template <class Tile, Beside kBeside>
__device__ __forceinline__ void load_mix_right(unsigned (&b)[4], const float* tile, int col,
                                               int k) {
  const int lane = threadIdx.x % 32;
  if constexpr (kBeside == Beside::k) {
    const int line = col + lane % 8 + lane / 16 * 8;
    ldmatrix_x4(b, tile + Tile::template place<kBeside>(line, k / 4 + lane / 8 % 2));
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int line = k + lane % 4 + e % 2 * 4, at = col + e / 2 * 8 + lane / 4;
      b[e] = __float_as_uint(tile[Tile::template place<kBeside>(line, at / 4) + at % 4]);
    }
  }
}

/// Adds up a warp's sums, from (row, col) of the tile on, over all steps of `ahead` (CopiesAhead).
/// Where ldmatrix loads both factors, fragments are loaded while those before them are multiplied:
/// of the left factor those of the next 16 rows, of the right one those of the next 8 of k. The
/// next step's tiles are waited for as soon as all fragments of this step's have been loaded.
template <class Tile, Beside kA, Beside kB, class Ahead>
__device__ __forceinline__ void mix_steps(float (&sum)[Tile::kOfWarp / 16][Tile::kOfWarp / 8][4],
                                          Ahead& ahead, const float* stages, int steps, int row,
                                          int col) {
  constexpr int kRows = Tile::kOfWarp / 16;  // and as many times 16 columns
  const auto stage_of = [&](int step) { return stages + step % Tile::kStages * 2 * Tile::kFactor; };
  const auto multiply = [&](int i, const unsigned(&left)[4], const unsigned(&right)[kRows][4]) {
#pragma unroll
    for (int j = 0; j < 2 * kRows; ++j) {
      mma_m16n8k8_tf32(sum[i][j], left, right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
    }
  };
  if constexpr (kA == Beside::results || kB == Beside::results) {
    for (int step = 0; step < steps; ++step) {
      const float* const stage = stage_of(ahead.next());
#pragma unroll
      for (int k = 0; k < Tile::kDepth; k += 8) {
        unsigned a[kRows][4], b[kRows][4];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          load_mix_left<Tile, kA>(a[i], stage, row + 16 * i, k);
          load_mix_right<Tile, kB>(b[i], stage + Tile::kFactor, col + 16 * i, k);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) multiply(i, a[i], b);
      }
    }
  } else {
    unsigned a[2][4], b[2][kRows][4];
    const float* stage = stage_of(ahead.next());
    load_mix_left<Tile, kA>(a[0], stage, row, 0);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      load_mix_right<Tile, kB>(b[0][j], stage + Tile::kFactor, col + 16 * j, 0);
    }
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int k = 0; k < Tile::kDepth; k += 8) {
        const bool turns = k + 8 == Tile::kDepth;  // the next 8 of k are the next step's
        const int now = k / 8 % 2, next_k = turns ? 0 : k + 8;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (i + 1 < kRows) {
            load_mix_left<Tile, kA>(a[(i + 1) % 2], stage, row + 16 * (i + 1), k);
          } else {
            if (turns) stage = stage_of(ahead.next());  // after the last step it is never used
            load_mix_left<Tile, kA>(a[(i + 1) % 2], stage, row, next_k);
          }
#pragma unroll
          for (int j = 0; j < kRows; ++j) {
            if (turns ? i + 1 < kRows : j != i) continue;
            load_mix_right<Tile, kB>(b[1 - now][j], stage + Tile::kFactor, col + 16 * j, next_k);
          }
          multiply(i, a[i % 2], b[now]);
        }
      }
    }
  }
}

/// A block has a tile of a sum, or a share of its steps. Neighbouring blocks have the same rows,
/// and so the same part of the left factor, which is the larger one.
template <class Tile, Beside kA, Beside kB>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    mix_product(const __grid_constant__ MixProduct of) {
  constexpr int kSide = Tile::kFactor / Tile::kDepth, kOfWarp = Tile::kOfWarp;
  extern __shared__ __align__(128) float mix_stages[];
  const int across = (of.cols + kSide - 1) / kSide;
  const int tiles = (of.rows + kSide - 1) / kSide * across;
  const MixPairs::Sum sum_of = of.of.sums[static_cast<int>(blockIdx.x) / tiles];
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  const int row0 = tile / across * kSide, col0 = tile % across * kSide;
  const int all = sum_of.count * of.depth, share = static_cast<int>(blockIdx.y);
  const int begin = static_cast<int>(int64_t{all} * share / of.shares);
  const int steps = static_cast<int>(int64_t{all} * (share + 1) / of.shares) - begin;

  // The step that is copied next: which pair, and which step of its k.
  int pair = sum_of.first + begin / of.depth, at = begin % of.depth;
  MixCopies<Tile, kA> a;
  MixCopies<Tile, kB> b;
  const auto begin_pair = [&] {
    const MixPairs::Pair factors = of.of.pairs[pair];
    a.begin(of.a.first + factors.a * of.a.size, of.a.stride, row0, of.rows, at * Tile::kDepth);
    b.begin(of.b.first + factors.b * of.b.size, of.b.stride, col0, of.cols, at * Tile::kDepth);
  };
  begin_pair();
  const auto copy = [&](int step) {
    if (step >= steps) return;
    float* const stage = mix_stages + step % Tile::kStages * 2 * Tile::kFactor;
    a.start(stage);
    b.start(stage + Tile::kFactor);
    if (++at < of.depth || step + 1 == steps) return;
    at = 0, ++pair;
    begin_pair();
  };
  auto ahead = copies_ahead<Tile::kStages>(copy);

  const int warp = threadIdx.x / 32, row = warp / 2 * kOfWarp, col = warp % 2 * kOfWarp;
  float sum[kOfWarp / 16][kOfWarp / 8][4] = {};
  mix_steps<Tile, kA, kB>(sum, ahead, mix_stages, steps, row, col);

  // Four lanes that are neighbours store a sector of 32 bytes.
  float* const to = of.to + share * of.to_share + sum_of.to * of.to_size;
  const bool pairs = of.to_stride % 2 == 0;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kOfWarp / 8; ++i) {
    const int r = row0 + row + 8 * i + lane / 4;
    if (r >= of.rows) continue;
#pragma unroll
    for (int j = 0; j < kOfWarp / 8; ++j) {
      const int c = col0 + col + 8 * j + lane % 4 * 2;
      float2 two = make_float2(sum[i / 2][j][i % 2 * 2], sum[i / 2][j][i % 2 * 2 + 1]);
      float* const element = to + static_cast<size_t>(r) * of.to_stride + c;
      if (pairs && c + 1 < of.cols) {
        float2* const both = reinterpret_cast<float2*>(element);
        if (of.adds) two.x += both->x, two.y += both->y;
        *both = two;
      } else {
        if (c < of.cols) element[0] = of.adds ? element[0] + two.x : two.x;
        if (c + 1 < of.cols) element[1] = of.adds ? element[1] + two.y : two.y;
      }
    }
  }
}

/// How many tiles a result has.
template <class Tile>
int64_t mix_tiles(const MixProduct& product) {
  constexpr int kSide = Tile::kFactor / Tile::kDepth;
  return int64_t{ceil_div(product.rows, kSide)} * ceil_div(product.cols, kSide);
}

/// Launches a product, the longest sums first, in small tiles where there are too few large ones.
template <Beside kA, Beside kB>
void launch_mix(MixProduct& product, cudaStream_t stream) {
  std::stable_sort(product.of.sums, product.of.sums + product.of.count,
                   [](const auto& one, const auto& other) { return one.count > other.count; });
  const auto run = [&]<class Tile>() {
    const auto kernel = mix_product<Tile, kA, kB>;
    allow_shared_bytes(kernel, Tile::kSharedBytes);
    const auto blocks = static_cast<unsigned>(product.of.count * mix_tiles<Tile>(product));
    mix_product<Tile, kA, kB>
        <<<dim3(blocks, product.shares), Tile::kThreads, Tile::kSharedBytes, stream>>>(product);
  };
  const int64_t large = product.of.count * mix_tiles<MixTile<128>>(product) * product.shares;
  if (large >= multiprocessors()) {
    run.template operator()<MixTile<128>>();
  } else {
    run.template operator()<MixTile<64>>();
  }
}

}  // namespace operators::clifford_connected
