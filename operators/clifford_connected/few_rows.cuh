// The fully connected product on Hopper where rows are few. Weights are then most of what moves:
// to make them ready, transposed and rounded, takes longer than to multiply them. Here they are the
// *left* factor, as they lie in memory, and the copy engine rounds them on the way; what is made
// ready is small. Products come out transposed:
//
//     z^T = sum over t of w[t]^T P_t^T     w: lies as (k, rows), k = in features; P: planes
//     d_t^T = w[t] dz^T                    w: lies as (rows, k), k = out features; dz: as it is
//
// A triple's planes lie below each other, one a blade k of the result, and so do the blades of dz.
// All of their rows are columns of one product: w[t] is read once for all blades of a grade, not
// once for each. And where tiles are few, `splits` clusters share the sum of one along k. They
// write partial sums, which finish_rows adds up before it takes the norm.
#pragma once

#include "operators/clifford_connected/gradients.cuh"
#include "operators/clifford_connected/planes.cuh"

namespace operators::clifford_connected {

using namespace primitives;
using namespace clifford;

#if HOPPER_CODE
/// Where 32 columns of a sum go: to `count` rows of memory, `stride` floats apart.
struct RowsInMemory {
  float* first;
  int count, stride;
};
/// Stores a sum transposed: rows are features, from f0 on; columns i to i + 31 go to rows_of(i).
template <bool kTransposed, int kCols, typename RowsOf>
__device__ __forceinline__ void store_transposed(const Sum<kCols>& sum, int f0, int features,
                                                 RowsOf rows_of) {
  const int f = f0 + (kTransposed ? TransposedLeft().column() : sum.row(0)), lane = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kCols; i += 32) {
    const RowsInMemory rows = rows_of(i);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int row = j / 2 * 8 + lane * 2 + j % 2, at = i / 2 + j / 2 * 4 + j % 2;
      if (row >= rows.count) continue;
      float* const to = rows.first + static_cast<size_t>(row) * rows.stride + f;
      const float2 two = make_float2(sum.elements[at], sum.elements[at + 2]);
      if (kTransposed && features % 2 == 0) {
        if (f < features) *reinterpret_cast<float2*>(to) = two;
      } else {
        constexpr int kNext = kTransposed ? 1 : 8;
        if (f < features) to[0] = two.x;
        if (f + kNext < features) to[kNext] = two.y;
      }
    }
  }
}
#endif

/// z (forward), or the planes' gradients, of a chunk of few rows: a Work of tf32_product.cuh. A
/// tile has some features, and some of the rows of all blades of a grade.
template <typename A, class Tile, bool kForward>
struct FewRows {
  static constexpr bool kHelped = false, kTransposed = kForward, kStacked = true;
  Chunk chunk;
  float* to;   ///< forward: out, or partial sums, one after the other
  int splits;  ///< 1 but forward
  int f_tiles;
  Turns turns;
  Order<A> order;

  FewRows(const Chunk& rows, float* results, int shares, int clusters)
      : chunk(rows),
        to(results),
        splits(shares),
        f_tiles(ceil_div(chunk.layer.features, Tile::BM * Tile::kBlocks)) {
    int tiles = 0;
    for (int c = 0; c < A::kGrades; ++c) tiles += tiles_of(c);
    turns = {tiles, std::min(tiles, clusters)};
  }
  __host__ __device__ int triples(int c) const { return order.slot[c + 1] - order.slot[c]; }
  __host__ __device__ int rows(int c) const {
    return (order.blade[c + 1] - order.blade[c]) * chunk.pitch;
  }
  __host__ __device__ int row_tiles(int c) const { return ceil_div(rows(c), Tile::BN); }
  __host__ __device__ int tiles_of(int c) const {
    return (kForward ? splits : triples(c)) * f_tiles * row_tiles(c);
  }

  /// A grade; which share of the sum, or which of the grade's triples; the first feature and row.
  struct Place {
    int c, share, f, row;
  };
  /// Grades with the most triples first: all but those of the scalar and of the last blade.
  __host__ __device__ Place place(int tile, int rank) const {
    int c = 1;
    for (; tile >= tiles_of(c); c = (c + 1) % A::kGrades) tile -= tiles_of(c);
    const int tiles = row_tiles(c);
    return {c, tile / (f_tiles * tiles), (tile / tiles % f_tiles * Tile::kBlocks + rank) * Tile::BM,
            tile % tiles * Tile::BN};
  }
  __host__ __device__ int all_steps() const { return ceil_div(chunk.layer.features, 32); }
  /// To store a tile takes about as long as 4 steps.
  __host__ int64_t steps(int tile) const {
    if (!kForward) return all_steps() + 4;
    return int64_t{triples(place(tile, 0).c)} * ceil_div(all_steps(), splits) + 4;
  }
#if HOPPER_CODE
  __device__ Walk walk(int tile, int rank) const {
    const Place at = place(tile, rank);
    const int slot = order.slot[at.c];
    if constexpr (kForward) {
      return {.a = 0,
              .a_col = at.f,
              .b = order.plane[at.c] * chunk.pitch + at.row,
              .b_next = rows(at.c),
              .inner = triples(at.c),
              .begin = at.share * all_steps() / splits,
              .end = (at.share + 1) * all_steps() / splits,
              .matrices = order.triple_of + slot};
    } else {
      return {.a = at.f,
              .b = order.blade[at.c] * chunk.pitch + at.row,
              .end = all_steps(),
              .matrices = order.triple_of + slot + at.share};
    }
  }
  __device__ void store(const Sum<Tile::BN>& sum, int tile, int rank, int row0) const {
    const Place at = place(tile, rank);
    const int features = chunk.layer.features;
    store_transposed<kTransposed>(sum, at.f + row0, features, [&](int i) -> RowsInMemory {
      const int row = at.row + i;
      if (row >= rows(at.c)) return {nullptr, 0, 0};
      if constexpr (kForward) {
        const int blade = row / chunk.pitch, n = row % chunk.pitch;
        const size_t plane = at.share * A::kBlades + order.blade[at.c] + blade;
        return {to + plane * chunk.layer.plane() + static_cast<size_t>(n) * features,
                chunk.rows - n, features};
      } else {
        const int first = order.plane[at.c] * chunk.pitch + at.share * rows(at.c) + row;
        return {to + static_cast<size_t>(first) * chunk.stride, 32, chunk.stride};
      }
    });
  }
#endif
};

/// out = z / rms(z), where z is the sum of `splits` partial sums; keeps 1 / rms. A block has a row
/// and a grade.
template <typename A, int c, int W>
__device__ __forceinline__ void finish_grade_of_row(const float* partials, int splits, float* out,
                                                    float* inverses, const Layer& layer) {
  __shared__ FeatureSums<1> warps[kMaxWarps];
  const size_t plane = layer.plane(), row = static_cast<size_t>(blockIdx.x) * layer.features;
  FeatureSums<1> squares = {};
  for (int f = threadIdx.x * W; f < layer.features; f += blockDim.x * W) {
    unroll<A::first(c), A::first(c + 1)>([&](auto k) {
      const size_t at = k * plane + row + f;
      Pack<W> z = *reinterpret_cast<const Pack<W>*>(partials + at);
#pragma unroll 4
      for (int s = 1; s < splits; ++s) {
        add(z, *reinterpret_cast<const Pack<W>*>(partials + s * A::kBlades * plane + at));
      }
#pragma unroll
      for (int e = 0; e < W; ++e) squares.value[0] += z.v[e] * z.v[e];
      *reinterpret_cast<Pack<W>*>(out + at) = z;
    });
  }
  if (!layer.normed) return;
  add_up_row(squares, warps, blockDim.x / 32);
  const float r = inverse_rms(squares.value[0], layer);
  if (threadIdx.x == 0) inverses[static_cast<size_t>(c) * layer.batch + blockIdx.x] = r;
  for (int f = threadIdx.x * W; f < layer.features; f += blockDim.x * W) {
    unroll<A::first(c), A::first(c + 1)>([&](auto k) {
      Pack<W>& z = *reinterpret_cast<Pack<W>*>(out + k * plane + row + f);
#pragma unroll
      for (int e = 0; e < W; ++e) z.v[e] *= r;
    });
  }
}

template <typename A, int W>
__global__ void __launch_bounds__(256)
    finish_rows(const float* partials, int splits, float* out, float* inverses, Layer layer) {
  wait_for_previous_kernel();
  unroll<0, A::kGrades>([&](auto c) {
    if (static_cast<int>(blockIdx.y) == c) {
      finish_grade_of_row<A, c, W>(partials, splits, out, inverses, layer);
    }
  });
}

/// What the product of few rows needs besides inputs, outputs and planes, and how it is launched.
template <typename A>
struct Few {
  /// The others take so many cycles, and what it takes to turn weights. -INFINITY: never used.
  Few(const CliffordTensors& tensors, double cycles_of_others)
      : of(tensors),
        chunk{of.layer, 0, of.layer.batch, ceil_div(of.layer.batch, 32) * 32,
              ceil_div(of.layer.features, 32) * 32},
        pitch(of.layer.features % 4 == 0 ? of.layer.features : chunk.stride) {
    const Layer& layer = of.layer;
    const double w = 4.0 * A::kTriples * layer.features * layer.features, out = of.out.bytes();
    // This product is taken if it saves a seventh. To copy rows that are not aligned takes longer
    // than to turn those that are.
    double least = 0.85 * (cycles_of_others + 2 * w / kBytesPerCycle);
    if (pitch != layer.features) least -= 3 * w / kBytesPerCycle;
    for (int shares = 1; shares <= std::min(8, chunk.stride / 32); ++shares) {
      const TilePlan with = plan_tiles(work<true>(nullptr, shares));
      const double ends = 6000 + (shares + 2) * out / kBytesPerCycle;
      const double cycles = std::max(with.cycles, w / kBytesPerCycle) + ends;
      if (cycles < least) least = cycles, plan = with, splits = shares, used = true;
    }
    if (!used) return;
    plan_gradients = plan_tiles(work<false>(nullptr, 1));
    const auto size = static_cast<size_t>(A::kTriples) * pitch * pitch;
    if (pitch != layer.features) weights = of.workspace.template any<float>(size);
    dz = of.workspace.template any<float>(A::kBlades * chunk.matrix());
    if (splits > 1) partials = of.workspace.template any<float>(splits * of.out.size());
  }

  double bytes() const {
    const bool copied = used && pitch != of.layer.features;
    return (used ? dz.bytes() : 0) + (copied ? weights.bytes() : 0) +
           (splits > 1 ? partials.bytes() : 0);
  }
  template <bool kForward>
  auto work(float* to, int shares) const {
    return [this, to, shares](auto tile, int clusters) {
      return FewRows<A, decltype(tile), kForward>(chunk, to, shares, clusters);
    };
  }
  Tf32Factor left() const { return {weights, pitch, pitch, A::kTriples}; }

  /// Rows of weights that are not aligned are copied first.
  void forward(float* planes, float* inverses) const {
    const Layer& layer = of.layer;
    if (pitch != layer.features) {
      const int threads = std::min(pitch, 256);
      round_weights<<<dim3(ceil_div(pitch, threads), pitch, A::kTriples), threads>>>(
          of.w, weights.data(), layer.features, pitch);
    }
    PlaneMaker<A> maker{of.x, of.y, planes, chunk, 1, 0};
    maker.together = chunk.row_blocks();
    maker.before = maker.units();
    launch_early(make_ready<A>, maker.before / 4, 128, 0, maker, maker.before / 4,
                 WeightTransposer<A>{}, static_cast<unsigned*>(nullptr), 0);
    multiply_tf32(left(), {planes, int64_t{kPlanes<A>} * chunk.pitch, chunk.stride}, plan,
                  work<true>(partials.data(), splits));
    if (!layer.normed && splits == 1) return;
    launch_early(layer.features % 4 == 0 ? finish_rows<A, 4> : finish_rows<A, 1>,
                 dim3(layer.batch, A::kGrades), 256, 0, static_cast<const float*>(partials), splits,
                 of.out.data(), inverses, layer);
  }
  /// The planes' gradients d.
  void gradients(const float* d_out, const float* inverses, float* d) const {
    result_gradients<A><<<chunk.pitch, 256>>>(of.out, d_out, inverses, dz, 0, chunk.stride,
                                              chunk.matrix(), of.layer);
    multiply_tf32(left(), {dz, int64_t{A::kBlades} * chunk.pitch, chunk.stride}, plan_gradients,
                  work<false>(d, 1));
  }

  static constexpr double kBytesPerCycle = 2280;  // 4 TB/s

  CliffordTensors of;
  Chunk chunk;
  int pitch;  ///< of the weights' rows
  bool used = false;
  int splits = 1;
  TilePlan plan = {}, plan_gradients = {};
  Memory<float> weights = of.w, partials = of.out, dz = of.out;
};

}  // namespace operators::clifford_connected
