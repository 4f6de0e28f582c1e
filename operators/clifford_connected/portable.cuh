// The fully connected layer on GPUs from compute capability 8.0 on, forward and backward: planes in
// memory, and products of them by mma.sync.
//
// What comes before and after the products is as on Hopper (planes.cuh, gradients.cuh): kernels
// write planes, weights and dz in TF32, with zeros up to whole pieces. So a product copies pieces
// of 16 bytes, converts nothing, and asks for no end of a sum. As each matrix of a kind has the
// same size, one kernel computes the three products of the layer:
//
//     z_k  = sum over t of P_t,k w[t]      P: (rows, k)    w: transposed before, (columns, k)
//     dP_t,k = dz_k w[t]^T                 dz: (rows, k)   w: as it lies, (columns, k)
//     dw_t = sum over k of P_t,k^T dz_k    P: (k, rows)    dz: (k, columns)
//
// where k is what is summed over. ldmatrix loads the fragments of a factor in which neighbours
// along k lie beside each other. It cannot transpose elements of 4 bytes, so those of the last
// product are loaded number by number, which takes shared memory no longer. (w is transposed
// because it is rounded, and so copied, in any case.)
#pragma once

#include <algorithm>
#include <cstdint>

#include "operators/clifford_connected/few_rows.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/launch.h"
#include "primitives/mma.cuh"

namespace operators::clifford_connected {

using namespace primitives;
using namespace clifford;

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

/// Starts the copy of a step's tile of a factor: `line0` is its first row or column of the result,
/// of which there are `lines`; k0 its first k.
template <class Tile, Beside kBeside>
__device__ __forceinline__ void copy_mix_tile(float* to, const float* matrix, int stride, int line0,
                                              int lines, int k0) {
  constexpr int kPieces = (kBeside == Beside::k ? Tile::kDepth : Tile::kFactor / Tile::kDepth) / 4;
  constexpr int kStep = Tile::kThreads / kPieces, kLines = Tile::kFactor / 4 / kPieces;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
#pragma unroll
  for (int line = static_cast<int>(threadIdx.x) / kPieces; line < kLines; line += kStep) {
    const int row = kBeside == Beside::k ? line0 + line : k0 + line;
    const int col = kBeside == Beside::k ? k0 + 4 * piece : line0 + 4 * piece;
    const bool inside = kBeside == Beside::k ? row < lines : col < lines;
    copy_async<16>(to + Tile::template place<kBeside>(line, piece),
                   matrix + static_cast<size_t>(row) * stride + col, inside);
  }
}

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
  const auto copy = [&](int step) {
    if (step >= steps) return;
    float* const stage = mix_stages + step % Tile::kStages * 2 * Tile::kFactor;
    const MixPairs::Pair factors = of.of.pairs[pair];
    copy_mix_tile<Tile, kA>(stage, of.a.first + factors.a * of.a.size, of.a.stride, row0, of.rows,
                            at * Tile::kDepth);
    copy_mix_tile<Tile, kB>(stage + Tile::kFactor, of.b.first + factors.b * of.b.size, of.b.stride,
                            col0, of.cols, at * Tile::kDepth);
    if (++at == of.depth) at = 0, ++pair;
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

/// The weights in TF32, each matrix transposed, with zeros up to `stride` rows and columns. A block
/// has a piece of 32 x 32, which is read and written by rows.
__global__ void __launch_bounds__(256)
    round_transposed(const float* w, float* to, int features, int stride) {
  __shared__ float piece[32][32 + 1];
  const size_t t = blockIdx.z;
  const int x = threadIdx.x % 32, row0 = blockIdx.y * 32, col0 = blockIdx.x * 32;
  for (int y = threadIdx.x / 32; y < 32; y += 8) {
    const int row = row0 + y, col = col0 + x;
    const bool inside = row < features && col < features;
    piece[y][x] = inside ? rounded_to_tf32(w[(t * features + row) * features + col]) : 0;
  }
  __syncthreads();
  for (int y = threadIdx.x / 32; y < 32; y += 8) {
    to[(t * stride + col0 + y) * stride + row0 + x] = piece[x][y];
  }
}

/// Makes all planes of a chunk. Each warp of a block makes a unit.
template <typename A>
__global__ void __launch_bounds__(128) make_planes(const __grid_constant__ PlaneMaker<A> maker) {
  maker.make_before(static_cast<int>(blockIdx.x) * 4 + static_cast<int>(threadIdx.x) / 32);
}

/// The layer's memory beside inputs and outputs, and its launches. The batch goes in chunks, whose
/// planes take up to kPlaneBytes.
template <typename A>
class Portable {
 public:
  static constexpr size_t kPlaneBytes = 1 << 30;

  Portable(const CliffordTensors& tensors, const Memory<float>& kept)
      : of(tensors),
        stride(ceil_div(of.layer.features, 32) * 32),
        rows(rows_at_a_time()),
        planes(of.workspace.any<float>(kPlanes<A> * largest().matrix())),
        weights(of.workspace.any<float>(static_cast<size_t>(A::kTriples) * stride * stride)),
        inverses(kept) {}

  /// All but the last chunk have a multiple of 256 rows, and take_planes_apart at most 65535.
  int rows_at_a_time() const {
    const size_t fit = kPlaneBytes / (sizeof(float) * kPlanes<A> * stride);
    const int most = std::clamp(static_cast<int>(fit) / 256, 1, 255) * 256;
    const int chunks = ceil_div(of.layer.batch, most);
    return std::min(of.layer.batch, ceil_div(ceil_div(of.layer.batch, chunks), 256) * 256);
  }
  Chunk chunk(int first) const {
    const int count = std::min(rows, of.layer.batch - first);
    return {of.layer, first, count, ceil_div(count, 32) * 32, stride};
  }
  Chunk largest() const { return chunk(0); }
  int last_chunk() const { return (of.layer.batch - 1) / rows * rows; }

  void make_planes_of(const Chunk& chunk) const {
    PlaneMaker<A> maker{of.x, of.y, planes, chunk, 1, 0};
    maker.together = chunk.row_blocks();
    maker.before = maker.units();
    make_planes<A><<<maker.before / 4, 128, 0, of.stream>>>(maker);
  }

  void forward() const {
    const Layer& layer = of.layer;
    round_transposed<<<dim3(stride / 32, stride / 32, A::kTriples), 256, 0, of.stream>>>(
        of.w, weights.data(), layer.features, stride);
    for (int first = 0; first < layer.batch; first += rows) {
      const Chunk piece = chunk(first);
      make_planes_of(piece);
      MixProduct product{.a = {planes, piece.matrix(), stride},
                         .b = weights_of(),
                         .to = of.out.data() + static_cast<size_t>(first) * layer.features,
                         .to_size = layer.plane(),
                         .to_share = 0,
                         .to_stride = layer.features,
                         .rows = piece.rows,
                         .cols = layer.features,
                         .depth = ceil_div(layer.features, kDepth),
                         .shares = 1,
                         .adds = false,
                         .of = {}};
      // The planes of a grade's first blade, of its second one, and so on.
      for_planes([&](int c, int slot, int blade, int plane, int place) {
        const int at =
            order.plane[c] + (blade - order.blade[c]) * order.slots(c) + (slot - order.slot[c]);
        product.of.pairs[at] = pair(plane, order.triple_of[slot]);
        if (place == 0) {
          product.of.sums[product.of.count++] = sum(at, order.slots(c), blade);
        }
      });
      launch<Beside::k, Beside::k>(product);
    }
    if (!layer.normed) return;
    launch_clusters_on(of.stream, layer.features % 4 == 0 ? finish_rows<A, 4> : finish_rows<A, 1>,
                       1, false, dim3(layer.batch, A::kGrades), 256, 0,
                       static_cast<const float*>(of.out), 1, of.out.data(), inverses.data(), layer);
  }

  /// Weights as a product reads them.
  MixMatrices weights_of() const { return {weights, static_cast<size_t>(stride) * stride, stride}; }
  static constexpr int kDepth = MixTile<64>::kDepth;
  static MixPairs::Pair pair(int a, int b) {
    return {static_cast<int16_t>(a), static_cast<int16_t>(b)};
  }
  static MixPairs::Sum sum(int first, int count, int to) {
    return {static_cast<int16_t>(first), static_cast<int16_t>(count), static_cast<int16_t>(to)};
  }
  /// visit(grade, slot, blade, plane, how many slots of the grade come before) for all planes.
  template <typename Visit>
  void for_planes(Visit visit) const {
    for (int c = 0; c < A::kGrades; ++c) {
      for (int slot = order.slot[c]; slot < order.slot[c + 1]; ++slot) {
        for (int blade = order.blade[c]; blade < order.blade[c + 1]; ++blade) {
          const int before = slot - order.slot[c];
          visit(c, slot, blade, order.plane[c] + before * order.blades(c) + blade - order.blade[c],
                before);
        }
      }
    }
  }

  /// Launches a product, the longest sums first, in small tiles where there are too few large ones.
  template <Beside kA, Beside kB>
  void launch(MixProduct& product) const {
    std::stable_sort(product.of.sums, product.of.sums + product.of.count,
                     [](const auto& one, const auto& other) { return one.count > other.count; });
    const auto run = [&]<class Tile>() {
      const auto kernel = mix_product<Tile, kA, kB>;
      allow_shared_bytes(kernel, Tile::kSharedBytes);
      const auto blocks = static_cast<unsigned>(product.of.count * tiles_of<Tile>(product));
      mix_product<Tile, kA, kB>
          <<<dim3(blocks, product.shares), Tile::kThreads, Tile::kSharedBytes, of.stream>>>(
              product);
    };
    const int64_t large = product.of.count * tiles_of<MixTile<128>>(product) * product.shares;
    if (large >= multiprocessors()) {
      run.template operator()<MixTile<128>>();
    } else {
      run.template operator()<MixTile<64>>();
    }
  }
  template <class Tile>
  static int64_t tiles_of(const MixProduct& product) {
    constexpr int kSide = Tile::kFactor / Tile::kDepth;
    return int64_t{ceil_div(product.rows, kSide)} * ceil_div(product.cols, kSide);
  }

  CliffordTensors of;
  int stride, rows;
  Order<A> order = {};
  Memory<float> planes, weights, inverses;
};

/// Its gradients. Backward begins with the chunk that forward ended with, whose planes are still
/// there. They are multiplied for dw, and then the planes' gradients take their place.
template <typename A>
class PortableBackward {
 public:
  PortableBackward(const Portable<A>& layer, const CliffordGradients& gradients)
      : forward_(layer),
        d_(gradients),
        dz_(workspace().template any<float>(A::kBlades * layer.largest().matrix())),
        weights_(workspace().template any<float>(layer.weights.size())),
        shares_(shares_of(layer)),
        partials_(shares_ > 1 ? workspace().template any<float>(shares_ * d_.dw.size()) : d_.dw) {}

  void run() const {
    const CliffordTensors& of = forward_.of;
    const int features = of.layer.features;
    forward_.forward();
    const int stride = forward_.stride, threads = std::min(stride, 256);
    round_weights<<<dim3(ceil_div(stride, threads), stride, A::kTriples), threads, 0, of.stream>>>(
        of.w, weights_.data(), features, stride);
    for (int first = forward_.last_chunk(); first >= 0; first -= forward_.rows) {
      const Chunk chunk = forward_.chunk(first);
      result_gradients<A><<<chunk.pitch, 256, 0, of.stream>>>(of.out, d_.d_out, forward_.inverses,
                                                              dz_.data(), first, chunk.stride,
                                                              chunk.matrix(), of.layer);
      if (first != forward_.last_chunk()) forward_.make_planes_of(chunk);
      multiply_for_weights(chunk);
      multiply_for_planes(chunk);
      const int width = features % 2 == 0 ? 2 : 1;
      launch_clusters_on(of.stream, width == 2 ? take_planes_apart<A, 2> : take_planes_apart<A, 1>,
                         1, false, dim3(ceil_div(features, 128 * width), chunk.rows), 128, 0,
                         PlaneTaker<A>{of.x, of.y, forward_.planes, d_.dx, d_.dy, chunk});
    }
    add_partials(d_, partials_, shares_, of.stream);
  }

 private:
  const Workspace& workspace() const { return forward_.of.workspace; }

  /// How many blocks share the steps of a tile of dw: more than one where there are few tiles.
  static int shares_of(const Portable<A>& layer) {
    const int side = ceil_div(layer.of.layer.features, 128), tiles = A::kTriples * side * side;
    const int steps = ceil_div(layer.largest().rows, Portable<A>::kDepth);
    return std::clamp(std::min(2 * multiprocessors() / tiles, steps / 8), 1, 16);
  }

  void multiply_for_weights(const Chunk& chunk) const {
    const int features = chunk.layer.features;
    MixProduct product{.a = {forward_.planes, chunk.matrix(), chunk.stride},
                       .b = {dz_, chunk.matrix(), chunk.stride},
                       .to = partials_.data(),
                       .to_size = static_cast<size_t>(features) * features,
                       .to_share = d_.dw.size(),
                       .to_stride = features,
                       .rows = features,
                       .cols = features,
                       .depth = ceil_div(chunk.rows, Portable<A>::kDepth),
                       .shares = shares_,
                       .adds = chunk.first != forward_.last_chunk(),
                       .of = {}};
    const Order<A>& order = forward_.order;
    forward_.for_planes([&](int c, int slot, int blade, int plane, int) {
      product.of.pairs[plane] = forward_.pair(plane, blade);
      if (blade == order.blade[c]) {
        product.of.sums[product.of.count++] =
            forward_.sum(plane, order.blades(c), order.triple_of[slot]);
      }
    });
    forward_.template launch<Beside::results, Beside::results>(product);
  }

  void multiply_for_planes(const Chunk& chunk) const {
    const int features = chunk.layer.features;
    MixProduct product{
        .a = {dz_, chunk.matrix(), chunk.stride},
        .b = {weights_, static_cast<size_t>(chunk.stride) * chunk.stride, chunk.stride},
        .to = forward_.planes.data(),
        .to_size = chunk.matrix(),
        .to_share = 0,
        .to_stride = chunk.stride,
        .rows = chunk.rows,
        .cols = features,
        .depth = ceil_div(features, Portable<A>::kDepth),
        .shares = 1,
        .adds = false,
        .of = {}};
    forward_.for_planes([&](int, int slot, int blade, int plane, int) {
      product.of.pairs[plane] = forward_.pair(blade, forward_.order.triple_of[slot]);
      product.of.sums[product.of.count++] = forward_.sum(plane, 1, plane);
    });
    forward_.template launch<Beside::k, Beside::k>(product);
  }

  Portable<A> forward_;
  CliffordGradients d_;
  Memory<float> dz_, weights_;  ///< weights as they lie, in TF32
  int shares_;
  Memory<float> partials_;
};

}  // namespace operators::clifford_connected
