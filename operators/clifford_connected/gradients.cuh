// Backward of the fully connected product in tiles, on mma.sync: no plane nor its gradient is in
// memory. The words are those of forward_tiles in the lesson.
#pragma once

#include "operators/clifford_connected/connected.cuh"

namespace operators::clifford_connected {

using namespace primitives;
using namespace clifford;

/// dz of rows `first` and on, one a block, in TF32, to rows of `stride` elements: with out = r z,
/// dz = r d_out - r out mean(d_out out). `pitch` elements from blade to blade. Zeros beyond the
/// features, and in rows beyond the batch.
template <typename A>
__global__ void result_gradients(const float* out, const float* d_out, const float* inverses,
                                 float* dz, int first, int stride, size_t pitch, Layer layer) {
  __shared__ FeatureSums<A::kGrades> partials[kMaxWarps];
  const int n = first + blockIdx.x;
  const size_t row = static_cast<size_t>(n) * layer.features, plane = layer.plane();
  FeatureSums<A::kGrades> r = {}, products = {};
  if (n < layer.batch && layer.normed) {
    for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
      unroll<0, A::kBlades>([&](auto k) {
        products.value[A::grade(k)] += out[k * plane + row + f] * d_out[k * plane + row + f];
      });
    }
    unroll<0, A::kGrades>(
        [&](auto c) { r.value[c] = inverses[static_cast<size_t>(c) * layer.batch + n]; });
  }
  add_up_row(products, partials, blockDim.x / 32);
  for (int f = threadIdx.x; f < stride; f += blockDim.x) {
    const bool inside = n < layer.batch && f < layer.features;
    unroll<0, A::kBlades>([&](auto k) {
      constexpr int c = A::grade(k);
      float value = inside ? d_out[k * plane + row + f] : 0;
      if (inside && layer.normed) {
        const float mean = products.value[c] * layer.inverse_features;
        value = r.value[c] * (value - out[k * plane + row + f] * mean);
      }
      dz[k * pitch + static_cast<size_t>(blockIdx.x) * stride + f] = rounded_to_tf32(value);
    });
  }
}

// Packs of W neighbouring features of one grade's blades, `pitch` apart; aligned to their size.
template <int grade, typename A, int W>
__device__ __forceinline__ void load_packs(Multivectors<A, W>& to, const float* from,
                                           size_t pitch) {
  unroll<A::first(grade), A::first(grade + 1)>(
      [&](auto k) { to.blade[k] = *reinterpret_cast<const Pack<W>*>(from + k * pitch); });
}
template <int grade, typename A, int W>
__device__ __forceinline__ void store_packs(float* to, const Multivectors<A, W>& from,
                                            size_t pitch) {
  unroll<A::first(grade), A::first(grade + 1)>(
      [&](auto k) { *reinterpret_cast<Pack<W>*>(to + k * pitch) = from.blade[k]; });
}

// What triple t's planes add to the sums of x and y, in memory where dx and dy will be, at W
// neighbouring features. The sums of a grade start with its first triple. d: the planes' gradients
// at the same place, `pitch` from plane to plane. All loads come before the first store.
template <typename A, int t, int W>
__device__ __forceinline__ void add_plane_gradients(const float* d, int pitch, const float* x,
                                                    const float* y, float* dx, float* dy,
                                                    size_t plane) {
  constexpr auto grades = A::triple(t);
  constexpr bool is_first_of_x = A::triple(t == 0 ? 0 : t - 1).x != grades.x || t == 0;
  constexpr bool is_first_of_y = [] {
    for (int earlier = 0; earlier < t; ++earlier) {
      if (A::triple(earlier).y == A::triple(t).y) return false;
    }
    return true;
  }();
  constexpr int first = A::first(grades.result);
  Multivectors<A, W> left, right, d_planes, sum_x, sum_y;  // only one grade of each
  load_packs<grades.x>(left, x, plane);
  load_packs<grades.y>(right, y, plane);
  if constexpr (!is_first_of_x) load_packs<grades.x>(sum_x, dx, plane);
  if constexpr (!is_first_of_y) load_packs<grades.y>(sum_y, dy, plane);
  load_packs<grades.result>(d_planes, d - first * pitch, pitch);
  unroll<A::first(grades.x), A::first(grades.x + 1)>([&](auto i) {
    if constexpr (is_first_of_x) sum_x.blade[i] = empty_sum<W>();
    add(sum_x.blade[i], sum_terms<A, Of::x, t, i>(d_planes, right));
  });
  unroll<A::first(grades.y), A::first(grades.y + 1)>([&](auto j) {
    if constexpr (is_first_of_y) sum_y.blade[j] = empty_sum<W>();
    add(sum_y.blade[j], sum_terms<A, Of::y, t, j>(d_planes, left));
  });
  store_packs<grades.x>(dx, sum_x, plane);
  store_packs<grades.y>(dy, sum_y, plane);
}

// From the sums S_i of sign y_j d and T_j of sign x_i d, in place: with the gates g and h of x and
// y, dx_i = g h S_i, and dx_0 has gate'(x_0) h sum of x_i S_i besides; dy likewise.
template <typename A>
__device__ __forceinline__ void finish_gradients(const float* x, const float* y, float* dx,
                                                 float* dy, size_t plane) {
  const Multivectors<A, 1> left = load<A>(x, plane), right = load<A>(y, plane);
  const Multivectors<A, 1> sum_x = load<A>(dx, plane), sum_y = load<A>(dy, plane);
  const Gates<1> gates(left.blade[0], right.blade[0]);
  const float both = gates.product().v[0];
  float along_x = 0, along_y = 0;
  unroll<0, A::kBlades>([&](auto i) {
    along_x += left.blade[i].v[0] * sum_x.blade[i].v[0];
    along_y += right.blade[i].v[0] * sum_y.blade[i].v[0];
  });
  along_x *= gate_slope(left.blade[0].v[0]) * gates.y.v[0];
  along_y *= gate_slope(right.blade[0].v[0]) * gates.x.v[0];
  unroll<0, A::kBlades>([&](auto i) {
    dx[i * plane] = both * sum_x.blade[i].v[0] + (i == 0 ? along_x : 0);
    dy[i * plane] = both * sum_y.blade[i].v[0] + (i == 0 ? along_y : 0);
  });
}

// Weight gradients: a block has all triples of one grade c of the result, and each of its two
// groups of warps has half of them, up to 3.
template <typename A>
struct GradeTriples {
  __host__ __device__ static constexpr int triples(int c) { return Order<A>::triples(c); }
  __host__ __device__ static constexpr int half(int c) { return (triples(c) + 1) / 2; }
  __host__ __device__ static constexpr int triple(int c, int i) { return Order<A>::triple(c, i); }
  // The most planes of a grade.
  static constexpr int most_planes() {
    int most = 0;
    for (int c = 0; c < A::kGrades; ++c) {
      most = triples(c) * A::blades_of(c) > most ? triples(c) * A::blades_of(c) : most;
    }
    return most;
  }
};

// dz of some rows of the batch, `first` to `first` + `rows` - 1: blades `pitch` elements apart,
// rows `stride`, in whole tiles of 64 rows and 128 columns, in TF32; zeros where there is nothing.
struct ResultGradients {
  const float* data;
  int first, rows, stride;
  size_t pitch;
};

constexpr int kGradientDepth = 32, kGradientCols = 2 * kTile, kGradientStride = kGradientCols + 8;
constexpr int kGradientTileBytes = 3 * kTile * kGradientStride * sizeof(float);

// The tile (64 rows, 128 features, half of them each group of warps) of dz_k w^T for the kBlades
// blades k from `dz` on, to shared memory, kGradientStride apart. Steps take 32 features of the
// result, one while the next one comes.
template <int kBlades>
__device__ __forceinline__ void plane_gradients(const float* dz, const float* w,
                                                const ResultGradients& of, int features,
                                                float* shared) {
  constexpr int kStage = (kBlades + 2) * kTile * kGradientDepth;
  static_assert(2 * kStage * sizeof(float) <= kGradientTileBytes);
  const TileWarp warp;
  const auto fetch = [&](int step) {
    float* const to = shared + step % 2 * kStage;
#pragma unroll
    for (int i = threadIdx.x; i < (kBlades + 2) * kTile * 8; i += kPairThreads) {
      const int row = i / 8, piece = i % 8, blade = row / kTile;
      const float* from = blade < kBlades
                              ? dz + blade * of.pitch
                              : w + static_cast<size_t>(blade - kBlades) * kTile * of.stride;
      copy_async<16>(
          to + TileWarp::place<8>(row, piece),
          from + static_cast<size_t>(row % kTile) * of.stride + step * kGradientDepth + piece * 4,
          true);
    }
    copy_async_commit();
  };
  TileSum sums[kBlades] = {};
  const int steps = (features + kGradientDepth - 1) / kGradientDepth;
  fetch(0);
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) {
      fetch(step + 1);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    const float* tile = shared + step % 2 * kStage;
#pragma unroll
    for (int k = 0; k < kGradientDepth; k += 8) {
      unsigned b[4][2];
      warp.load_right_transposed<8>(b, tile + (kBlades + warp.group) * kTile * kGradientDepth, k);
#pragma unroll
      for (int blade = 0; blade < kBlades; ++blade) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          unsigned a[4];
          warp.load_left<8>(a, tile + blade * kTile * kGradientDepth, m, k);
          TileWarp::multiply(sums[blade][m], a, b);
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int blade = 0; blade < kBlades; ++blade) {
    warp.for_results(sums[blade], [&](int row, int col, float value) {
      shared[(blade * kTile + row) * kGradientStride + warp.group * kTile + col] = value;
    });
  }
  __syncthreads();
}

// dx and dy of a tile, triple by triple. The planes' gradients exist in shared memory only; the
// sums over the triples are in memory, at places that only this block comes to.
template <typename A>
__global__ void __launch_bounds__(kPairThreads, 2)
    input_gradient_tiles(const float* x, const float* y, const float* w, ResultGradients dz,
                         float* dx, float* dy, Layer layer) {
  extern __shared__ __align__(128) float shared[];
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kGradientCols;
  const size_t plane = layer.plane();
  const auto for_places = [&](auto width, auto visit) {
    constexpr int kWidth = decltype(width)::value;
#pragma unroll 1
    for (int e = threadIdx.x * kWidth; e < kTile * kGradientCols; e += kPairThreads * kWidth) {
      const int row = e / kGradientCols, col = e % kGradientCols;
      if (row0 + row >= dz.rows || col0 + col >= layer.features) continue;
      visit(static_cast<size_t>(dz.first + row0 + row) * layer.features + col0 + col,
            shared + row * kGradientStride + col);
    }
  };
  unroll<0, A::kTriples>([&](auto t) {
    constexpr int c = A::triple(t).result, first = A::first(c);
    plane_gradients<A::blades_of(c)>(
        dz.data + first * dz.pitch + static_cast<size_t>(row0) * dz.stride,
        w + (static_cast<size_t>(t) * dz.stride + col0) * dz.stride, dz, layer.features, shared);
    const auto add_here = [&](auto width) {
      for_places(width, [&](size_t at, const float* d) {
        add_plane_gradients<A, t, decltype(width)::value>(d, kTile * kGradientStride, x + at,
                                                          y + at, dx + at, dy + at, plane);
      });
    };
    if (layer.features % 4 == 0) {
      add_here(Constant<4>());
    } else {
      add_here(Constant<1>());
    }
    __syncthreads();
  });
  // Here a thread finishes places of others.
  for_places(Constant<1>(), [&](size_t at, const float*) {
    finish_gradients<A>(x + at, y + at, dx + at, dy + at, plane);
  });
}

constexpr int kWeightDepth = 8, kWeightPlane = kWeightDepth * kRowStride;
template <typename A>
constexpr int kWeightTileBytes = sizeof(float) *
                                 (GradeTriples<A>::most_planes() + 3) * kWeightPlane;

// Sums of P_t,k^T dz_k for triples `first` to `first` + kCount - 1 of those of grade c.
template <typename A, int c, int first, int kCount>
__device__ __forceinline__ void multiply_transposed(TileSum (&sums)[3], const float* planes,
                                                    const float* results) {
  constexpr int kBlades = A::blades_of(c);
  const TileWarp warp;
#pragma unroll
  for (int blade = 0; blade < kBlades; ++blade) {
    unsigned b[4][2];
    warp.load_right(b, results + blade * kWeightPlane);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        unsigned a[4];
        warp.load_left_transposed(a, planes + ((first + i) * kBlades + blade) * kWeightPlane, m);
        TileWarp::multiply(sums[i][m], a, b);
      }
    }
  }
}

// A tile (64 features of x and y, 64 of the result) of dw[t], for all triples t of grade c, summed
// over rows `begin` to `end` - 1 of dz. Each step takes 8 rows of the batch: the planes are made as
// in forward_tile, and are read transposed.
template <typename A, int c>
__device__ __forceinline__ void weight_gradient_tile(const float* x, const float* y,
                                                     const ResultGradients& dz, float* dw,
                                                     int begin, int end, bool adds, float* shared,
                                                     const Layer& layer) {
  using Triples = GradeTriples<A>;
  constexpr int kBlades = A::blades_of(c), kFirstBlade = A::first(c);
  constexpr int kTriples = Triples::triples(c), kHalf = Triples::half(c);
  static_assert(kWeightDepth * kTile == 2 * kPairThreads);
  float* const planes = shared;
  float* const results = shared + kTriples * kBlades * kWeightPlane;
  const TileWarp warp;
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
  TileSum sums[3] = {};
  for (int n = begin; n < end; n += kWeightDepth) {
    for (int i = threadIdx.x; i < kBlades * kWeightDepth * 16; i += kPairThreads) {
      const int blade = i / 16 / kWeightDepth, row = i / 16 % kWeightDepth, col = i % 16 * 4;
      copy_async<16>(results + blade * kWeightPlane + row * kRowStride + col,
                     dz.data + (kFirstBlade + blade) * dz.pitch +
                         static_cast<size_t>(n + row) * dz.stride + col0 + col,
                     n + row < end);
    }
    copy_async_commit();
    const int row = threadIdx.x / (kTile / 2), f = threadIdx.x % (kTile / 2) * 2;
    const int at = n + row < end ? dz.first + n + row : layer.batch;
    Multivectors<A, 2> left = load_neighbours<A, 2>(x, at, row0 + f, layer);
    const Multivectors<A, 2> right = load_neighbours<A, 2>(y, at, row0 + f, layer);
    apply_gates(left, right);
    unroll<0, kTriples>([&](auto i) {
      constexpr int t = Triples::triple(c, i);
      unroll<0, kBlades>([&](auto k) {
        store_rounded(planes + (i * kBlades + k) * kWeightPlane + row * kRowStride + f,
                      sum_terms<A, Of::result, t, kFirstBlade + k>(left, right));
      });
    });
    copy_async_wait<0>();
    __syncthreads();
    if (warp.group == 0) {
      multiply_transposed<A, c, 0, kHalf>(sums, planes, results);
    } else {
      multiply_transposed<A, c, kHalf, kTriples - kHalf>(sums, planes, results);
    }
    __syncthreads();
  }
  unroll<0, kTriples>([&](auto i) {
    constexpr size_t t = Triples::triple(c, i);
    if (warp.group != i / kHalf) return;
    warp.for_results(sums[i % kHalf], [&](int row, int col, float value) {
      if (row0 + row >= layer.features || col0 + col >= layer.features) return;
      float& to = dw[(t * layer.features + row0 + row) * layer.features + col0 + col];
      to = adds ? to + value : value;
    });
  });
}

// blockIdx.z: which grade of the result, and which of `splits` equal shares of the rows, each of
// which has a sum of its own, one after the other in dw.
template <typename A>
__global__ void __launch_bounds__(kPairThreads, 2)
    weight_gradient_tiles(const float* x, const float* y, ResultGradients dz, float* dw, int splits,
                          bool adds, Layer layer) {
  extern __shared__ __align__(128) float shared[];
  const int grade = blockIdx.z % A::kGrades, split = blockIdx.z / A::kGrades;
  const int share = (dz.rows + splits - 1) / splits;
  const int begin = min(dz.rows, split * share), end = min(dz.rows, begin + share);
  float* const to = dw + static_cast<size_t>(split) * A::kTriples * layer.features * layer.features;
  unroll<0, A::kGrades>([&](auto c) {
    if (grade == c) weight_gradient_tile<A, c>(x, y, dz, to, begin, end, adds, shared, layer);
  });
}

}  // namespace operators::clifford_connected
