// The fully connected product on Hopper for few rows. Then weights are most of what moves. To
// transpose and round them first, as for many rows, would move them three times. So here they are
// the *left* factor, as they lie in memory, and the copy engine rounds them on the way. The
// products are transposed:
//
//     z^T = sum over t of w[t]^T P_t^T     w: lies as (k, rows), k = in features; P: planes
//     d_t^T = w[t] dz^T                    w: lies as (rows, k), k = out features; dz: as it is
//
// Here k is what a product sums over. The planes of a triple lie below each other, one for each
// blade of its result, and so do the blades of dz. All of their rows are columns of one product. So
// w[t] is read once for all blades of a grade, and not once for each.
//
// Where tiles are few, `splits` clusters share a sum along k (split-K). They write partial sums,
// which finish_rows adds up before it takes the norm.
#pragma once

#include "operators/clifford_connected/gradients.cuh"
#include "operators/clifford_connected/planes.cuh"

namespace operators::clifford_connected {

using namespace primitives;
using namespace clifford;

#if HOPPER_CODE
/// Where 32 columns of a sum are stored: in `count` rows of memory, `stride` floats apart.
struct RowsInMemory {
  float* first;
  int count, stride;
};
/// Stores a sum transposed. Its rows are features, from f0 on. Its columns i to i + 31 go to the
/// rows that rows_of(i) returns.
template <class Tile, typename RowsOf>
__device__ __forceinline__ void store_transposed(const typename Tile::TileSum& sum, int f0,
                                                 int features, RowsOf rows_of) {
  const int f = f0 + Tile::sum_row(0), lane = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < Tile::BN; i += 32) {
    const RowsInMemory rows = rows_of(i);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int row = j / 2 * 8 + lane * 2 + j % 2, at = i / 2 + j / 2 * 4 + j % 2;
      if (row >= rows.count) continue;
      float* const to = rows.first + static_cast<size_t>(row) * rows.stride + f;
      const float2 two = make_float2(sum.elements[at], sum.elements[at + 2]);
      if (Tile::kTransposed && features % 2 == 0) {
        if (f < features) *reinterpret_cast<float2*>(to) = two;
      } else {
        constexpr int kNext = Tile::kTransposed ? 1 : 8;
        if (f < features) to[0] = two.x;
        if (f + kNext < features) to[kNext] = two.y;
      }
    }
  }
}
#endif

/// z (forward), or the planes' gradients, of a chunk of few rows: a Task of tf32_product.cuh. A
/// tile has some features, and some of the rows of all blades of a grade. Forward its sum goes over
/// all triples of the grade. Backward a tile has one triple.
template <typename A, class Size, bool kForward>
struct FewRows {
  using Tile = std::conditional_t<kForward, typename Size::Transposed, Size>;
  static constexpr bool kHelped = false;
  static constexpr int kStoreSteps = 4;  // an estimate
  Chunk chunk;
  float* to;   ///< out, or partial sums one after the other; or the planes' gradients
  int splits;  ///< clusters that share a sum; backward 1
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
  __host__ __device__ int rows(int c) const { return order.blades(c) * chunk.pitch; }
  __host__ __device__ int row_tiles(int c) const { return ceil_div(rows(c), Tile::BN); }
  __host__ __device__ int tiles_of(int c) const {
    return (kForward ? splits : order.slots(c)) * f_tiles * row_tiles(c);
  }

  /// A tile's grade; which share of the sum it has or, backward, which of the grade's triples; its
  /// first feature and row; and what a Task's place has besides.
  struct Place {
    int c, share, f, row, begin, end, pairs;
  };
  /// First come the grades with the most triples: all but the first and the last grade.
  __host__ __device__ Place place(int tile, int rank) const {
    int c = 1;
    for (; tile >= tiles_of(c); c = (c + 1) % A::kGrades) tile -= tiles_of(c);
    const int tiles = row_tiles(c), share = tile / (f_tiles * tiles);
    const int steps = ceil_div(chunk.layer.features, Tile::kDepth);
    return {.c = c,
            .share = share,
            .f = (tile / tiles % f_tiles * Tile::kBlocks + rank) * Tile::BM,
            .row = tile % tiles * Tile::BN,
            .begin = kForward ? share * steps / splits : 0,
            .end = kForward ? (share + 1) * steps / splits : steps,
            .pairs = kForward ? order.slots(c) : 1};
  }
#if HOPPER_CODE
  /// Forward, pair i is the weights of the grade's triple i, and its planes. Backward the only pair
  /// is the weights of the tile's triple, and dz.
  template <class Copy>
  __device__ void load(const Copy& copy, const Place& at, int i, int k) const {
    const int triple = order.triple_of[order.slot[at.c] + (kForward ? i : at.share)];
    const int first = kForward ? order.plane[at.c] * chunk.pitch + i * rows(at.c)
                               : order.blade[at.c] * chunk.pitch;
    copy.left(triple, at.f, k);
    copy.right(first + at.row, k);
  }
  __device__ void store(const Sum<Tile::BN>& sum, const Place& at, int row0) const {
    const int features = chunk.layer.features;
    store_transposed<Tile>(sum, at.f + row0, features, [&](int i) -> RowsInMemory {
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

/// out = z / rms(z), where z is the sum of `splits` partial sums; without a norm out = z. Keeps 1 /
/// rms for backward. A block has a row and a grade. kInPlace: there is one sum, which is in `out`.
template <typename A, int c, int W, bool kInPlace>
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
      if constexpr (!kInPlace) *reinterpret_cast<Pack<W>*>(out + at) = z;
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

template <typename A, int W, bool kInPlace = false>
__global__ void __launch_bounds__(256)
    finish_rows(const float* partials, int splits, float* out, float* inverses, Layer layer) {
  wait_for_previous_kernel();
  unroll<0, A::kGrades>([&](auto c) {
    if (static_cast<int>(blockIdx.y) == c) {
      finish_grade_of_row<A, c, W, kInPlace>(partials, splits, out, inverses, layer);
    }
  });
}

/// The memory of the product of few rows beside inputs, outputs and planes, and its launches.
template <typename A>
struct Few {
  /// cycles_of_others: an estimate of the product for many rows, without what it takes to transpose
  /// weights. With -INFINITY the product of few rows is not used.
  Few(const CliffordTensors& tensors, double cycles_of_others)
      : of(tensors),
        chunk{of.layer, 0, of.layer.batch, ceil_div(of.layer.batch, 32) * 32,
              ceil_div(of.layer.features, 32) * 32},
        pitch(of.layer.features % 4 == 0 ? of.layer.features : chunk.stride) {
    const Layer& layer = of.layer;
    const double w = 4.0 * A::kTriples * layer.features * layer.features, out = of.out.bytes();
    // This product is used only if it saves a seventh of the cycles. If rows of weights are not
    // aligned, it has to copy them first, and then it has to save more.
    double least = 0.85 * (cycles_of_others + 2 * w / kBytesPerCycle);
    if (pitch != layer.features) least -= 3 * w / kBytesPerCycle;
    for (int shares = 1; shares <= std::min(8, chunk.stride / 32); ++shares) {
      const double ends = 6000 + (shares + 2) * out / kBytesPerCycle, bytes = w / kBytesPerCycle;
      if (bytes + ends >= least) break;  // planning many rows would take the host long
      const TilePlan with = plan_tiles(work<true>(nullptr, shares));
      const double cycles = std::max(with.cycles, bytes) + ends;
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

  /// What the products read: the planes and, if rows of weights are not aligned, a copy of these.
  void prepare(float* planes) const {
    const Layer& layer = of.layer;
    if (pitch != layer.features) {
      const int threads = std::min(pitch, 256);
      round_weights<<<dim3(ceil_div(pitch, threads), pitch, A::kTriples), threads, 0, of.stream>>>(
          of.w, weights.data(), layer.features, pitch);
    }
    PlaneMaker<A> maker{of.x, of.y, planes, chunk, 1, 0};
    maker.together = chunk.row_blocks();
    maker.before = maker.units();
    launch_clusters_on(of.stream, make_ready<A>, 1, true, maker.before / 4, 128, 0, maker,
                       maker.before / 4, WeightTransposer<A>{}, static_cast<unsigned*>(nullptr), 0);
  }
  void forward(float* planes, float* inverses) const {
    const Layer& layer = of.layer;
    prepare(planes);
    multiply_tf32(of, left(), {planes, int64_t{kPlanes<A>} * chunk.pitch, chunk.stride}, plan,
                  work<true>(partials.data(), splits));
    if (!layer.normed && splits == 1) return;
    launch_clusters_on(of.stream, layer.features % 4 == 0 ? finish_rows<A, 4> : finish_rows<A, 1>,
                       1, true, dim3(layer.batch, A::kGrades), 256, 0,
                       static_cast<const float*>(partials), splits, of.out.data(), inverses, layer);
  }
  /// Computes the planes' gradients d.
  void gradients(const float* d_out, const float* inverses, float* d) const {
    result_gradients<A><<<chunk.pitch, 256, 0, of.stream>>>(of.out, d_out, inverses, dz, 0,
                                                            chunk.stride, chunk.matrix(), of.layer);
    multiply_tf32(of, left(), {dz, int64_t{A::kBlades} * chunk.pitch, chunk.stride}, plan_gradients,
                  work<false>(d, 1));
  }

  static constexpr double kBytesPerCycle = 2280;  // an estimate of what memory moves

  CliffordTensors of;
  Chunk chunk;
  int pitch;  ///< of the weights' rows
  bool used = false;
  int splits = 1;
  TilePlan plan = {}, plan_gradients = {};
  Memory<float> weights = of.w, partials = of.out, dz = of.out;
};

}  // namespace operators::clifford_connected
