// What stands around the products of the fully connected layer on Hopper: planes and gradients of
// results in memory, in TF32, both ways round, because wgmma takes TF32 only with k contiguous; and
// the gradients of x and y from those of the planes.
//
// A chunk of the batch has `rows` rows. Matrices have rows of `pitch` elements for the chunk (rows
// rounded up to 128), `stride` for features (likewise):
//
//     planes  (44 planes, pitch, stride), or transposed (44, stride, pitch), in the order of Order
//     dz      (blades, pitch, stride), and transposed (blades, stride, pitch)
//     w       (20, stride, stride) in the order of Order, and each matrix transposed
#pragma once

#include "common/connected.cuh"
#include "common/tf32_product.cuh"

/// Some rows of the batch, from `first` on.
struct Chunk {
  Layer layer;
  int first, rows, pitch, stride;
  __host__ __device__ size_t matrix() const { return static_cast<size_t>(pitch) * stride; }
};

/// The weights in TF32, in the order of Order: `turned` (slots, out feature, in feature) and,
/// unless it is null, `plain` as they lie. Zeros beyond the features. A block has 32 by 32 of a
/// matrix.
template <typename A>
__global__ void __launch_bounds__(256)
    turn_weights(const float* w, float* turned, float* plain, int features, int stride,
                 const __grid_constant__ Order<A> order) {
  __shared__ float tile[32][33];
  const size_t slot = blockIdx.z, t = order.triple_of[slot];
  const int row0 = blockIdx.y * 32, col0 = blockIdx.x * 32, lane = threadIdx.x % 32;
  wait_for_previous_kernel();
#pragma unroll
  for (int i = threadIdx.x / 32; i < 32; i += 8) {
    const int row = row0 + i, col = col0 + lane;
    const bool inside = row < features && col < features;
    const float value = inside ? rounded_to_tf32(w[(t * features + row) * features + col]) : 0;
    tile[i][lane] = value;
    if (plain != nullptr) plain[(slot * stride + row) * stride + col] = value;
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x / 32; i < 32; i += 8) {
    turned[(slot * stride + col0 + i) * stride + row0 + lane] = tile[lane][i];
  }
}

/// Makes the planes of a chunk. A unit is what a warp makes at a time, all planes of 128
/// multivectors: of a row and 128 features (a lane has 4 of these), or, if kTransposed, of 16 rows
/// and 8 features (a lane has 4 rows), so that reads and writes are of whole sectors either way.
/// 128 units are a part of 128 rows and 128 features, which has a counter. Parts come row by row of
/// parts, or `together` rows of them column by column.
template <typename A, bool kTransposed>
struct PlaneMaker {
  const float *x, *y;
  float* planes;
  Chunk chunk;
  int together;

  __host__ __device__ int slices() const { return chunk.stride / 128; }
  __host__ __device__ int row_blocks() const { return chunk.pitch / 128; }
  __host__ __device__ int units() const { return slices() * row_blocks() * 128; }

  /// All units that are this warp's, of `warps`. That a unit is there is told when the next one's x
  /// and y are on their way: until its writes have arrived takes as long as they do. The fence is
  /// for the copy engine, which will read them.
  __device__ __forceinline__ void make(int warp, int warps, const Progress& progress) const {
    const auto tell = [&](int part) {
#if HOPPER_CODE
      global_fence();
#endif
      __syncwarp();
      if (threadIdx.x % 32 == 0) progress.add(part);
    };
    int last = -1;
    for (int u = warp; u < units(); u += warps) {
      const int group = u / (together * slices() * 128), rest = u % (together * slices() * 128);
      const int height = min(together, row_blocks() - group * together);
      const int slice = rest / (height * 128), block = group * together + rest / 128 % height;
      Multivectors<A, 4> left, right;
      float* const to = load_unit(left, right, block * 128, slice * 128, rest % 128);
      if (progress.done != nullptr && last >= 0) tell(last);
      make_unit(left, right, to);
      last = block * slices() + slice;
    }
    if (progress.done != nullptr && last >= 0) tell(last);
  }

 private:
  __device__ __forceinline__ float* load_unit(Multivectors<A, 4>& left, Multivectors<A, 4>& right,
                                              int row0, int feature0, int unit) const {
    const int lane = threadIdx.x % 32;
    if constexpr (kTransposed) {
      const int row = row0 + unit / 16 * 16 + lane / 8 * 4, f = feature0 + unit % 16 * 8 + lane % 8;
      load_rows(left, x, row, f);
      load_rows(right, y, row, f);
      return planes + static_cast<size_t>(f) * chunk.pitch + row;
    } else {
      const int row = row0 + unit, f = feature0 + 4 * lane;
      const int n = row < chunk.rows ? chunk.first + row : chunk.layer.batch;
      left = load_neighbours<A, 4>(x, n, f, chunk.layer);
      right = load_neighbours<A, 4>(y, n, f, chunk.layer);
      return planes + static_cast<size_t>(row) * chunk.stride + f;
    }
  }
  __device__ __forceinline__ void make_unit(Multivectors<A, 4>& left,
                                            const Multivectors<A, 4>& right, float* to) const {
    apply_gates(left, right);
    unroll<0, A::kGrades>([&](auto c) {
      unroll<0, Order<A>::triples(c)>([&](auto i) {
        constexpr int t = Order<A>::triple(c, i);
        unroll<A::first(c), A::first(c + 1)>([&](auto k) {
          store_rounded(to, sum_terms<A, Of::result, t, k>(left, right));
          to += chunk.matrix();
        });
      });
    });
  }
  // Four rows of one feature; zeros where there is nothing.
  __device__ __forceinline__ void load_rows(Multivectors<A, 4>& to, const float* from, int row,
                                            int f) const {
    const int features = chunk.layer.features;
    const float* const at = from + static_cast<size_t>(chunk.first + row) * features + f;
    unroll<0, A::kBlades>([&](auto k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool inside = row + e < chunk.rows && f < features;
        to.blade[k].v[e] =
            inside ? at[k * chunk.layer.plane() + static_cast<size_t>(e) * features] : 0;
      }
    });
  }
};

/// The planes by a kernel of their own.
template <typename A, bool kTransposed>
__global__ void __launch_bounds__(128) make_planes(PlaneMaker<A, kTransposed> maker) {
  wait_for_previous_kernel();
  maker.make(blockIdx.x * 4 + threadIdx.x / 32, gridDim.x * 4, Progress{});
}

constexpr int kResultRows = 8;
/// dz of 8 rows a block, in TF32, both ways round: with out = r z, dz = r d_out - r out mean(d_out
/// out). A warp adds up a row; then a thread has 8 rows of a feature, of which it writes a whole
/// sector to the transposed dz.
template <typename A>
__global__ void __launch_bounds__(32 * kResultRows)
    turn_result_gradients(const float* out, const float* d_out, const float* inverses, float* dz,
                          float* turned, Chunk chunk) {
  __shared__ Sums<A::kGrades> scale[kResultRows];
  __shared__ Sums<A::kGrades> mean[kResultRows];
  const Layer& layer = chunk.layer;
  const size_t plane = layer.plane();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row0 = blockIdx.x * kResultRows;
  const auto start = [&](int i) {
    return static_cast<size_t>(chunk.first + row0 + i) * layer.features;
  };
  Sums<A::kGrades> products = {}, r = {};
  wait_for_previous_kernel();
  const bool has_row = row0 + warp < chunk.rows;
  unroll<0, A::kGrades>([&](auto c) { r.value[c] = has_row ? 1 : 0; });
  if (has_row && layer.normed) {
    const int n = chunk.first + row0 + warp;
#pragma unroll 2
    for (int f = lane; f < layer.features; f += 32) {
      unroll<0, A::kBlades>([&](auto k) {
        const size_t at = k * plane + start(warp) + f;
        products.value[A::grade(k)] += out[at] * d_out[at];
      });
    }
    add_up_lanes(products, 32);
    unroll<0, A::kGrades>(
        [&](auto c) { r.value[c] = inverses[static_cast<size_t>(c) * layer.batch + n]; });
  }
  if (lane == 0) {
    unroll<0, A::kGrades>([&](auto c) {
      scale[warp].value[c] = r.value[c];
      mean[warp].value[c] = r.value[c] * products.value[c] * layer.inverse_features;
    });
  }
  __syncthreads();
  for (int f = threadIdx.x; f < chunk.stride; f += blockDim.x) {
    unroll<0, A::kBlades>([&](auto k) {
      alignas(16) float eight[kResultRows];
#pragma unroll
      for (int i = 0; i < kResultRows; ++i) {
        const bool inside = row0 + i < chunk.rows && f < layer.features;
        const size_t at = k * plane + start(i) + f;
        const float value = !inside        ? 0
                            : layer.normed ? scale[i].value[A::grade(k)] * d_out[at] -
                                                 mean[i].value[A::grade(k)] * out[at]
                                           : d_out[at];
        eight[i] = rounded_to_tf32(value);
        dz[k * chunk.matrix() + static_cast<size_t>(row0 + i) * chunk.stride + f] = eight[i];
      }
      float4* const to = reinterpret_cast<float4*>(turned + k * chunk.matrix() +
                                                   static_cast<size_t>(f) * chunk.pitch + row0);
      to[0] = make_float4(eight[0], eight[1], eight[2], eight[3]);
      to[1] = make_float4(eight[4], eight[5], eight[6], eight[7]);
    });
  }
}

/// From the planes' gradients d those of x and y. With x' = x gate(x_0), y' likewise, g and h the
/// gates: S_i = sum of sign y_j d, dx_i = g h S_i, and dx_0 has gate'(x_0) h (sum of x_i S_i)
/// besides; dy likewise.
template <typename A>
struct PlaneTaker {
  const float *x, *y, *d;
  float *dx, *dy;
  Chunk chunk;

  /// W features of a row, from f on.
  template <int W>
  __device__ __forceinline__ void take(int row, int f) const {
    const Layer& layer = chunk.layer;
    const size_t plane = layer.plane();
    const size_t at = static_cast<size_t>(chunk.first + row) * layer.features + f;
    Multivectors<A, W> left, right, of_x, of_y;
    unroll<0, A::kBlades>([&](auto k) {
      left.blade[k] = *reinterpret_cast<const Pack<W>*>(x + k * plane + at);
      right.blade[k] = *reinterpret_cast<const Pack<W>*>(y + k * plane + at);
      of_x.blade[k] = of_y.blade[k] = empty_sum<W>();
    });
    const float* from = d + static_cast<size_t>(row) * chunk.stride + f;
    unroll<0, A::kGrades>([&](auto c) {
      unroll<0, Order<A>::triples(c)>([&](auto slot) {
        constexpr int t = Order<A>::triple(c, slot);
        constexpr auto grades = A::triple(t);
        Multivectors<A, W> part;  // only one grade
        unroll<A::first(c), A::first(c + 1)>([&](auto k) {
          part.blade[k] = *reinterpret_cast<const Pack<W>*>(from);
          from += chunk.matrix();
        });
        unroll<A::first(grades.x), A::first(grades.x + 1)>(
            [&](auto i) { add(of_x.blade[i], sum_terms<A, Of::x, t, i>(part, right)); });
        unroll<A::first(grades.y), A::first(grades.y + 1)>(
            [&](auto j) { add(of_y.blade[j], sum_terms<A, Of::y, t, j>(part, left)); });
      });
    });
    const Gates<W> gates(left.blade[0], right.blade[0]);
    const Pack<W> both = gates.product();
    Pack<W> along_x = empty_sum<W>(), along_y = empty_sum<W>();
    unroll<0, A::kBlades>([&](auto i) {
      add_product(along_x, left.blade[i], of_x.blade[i]);
      add_product(along_y, right.blade[i], of_y.blade[i]);
    });
    unroll<0, A::kBlades>([&](auto i) {
#pragma unroll
      for (int e = 0; e < W; ++e) {
        of_x.blade[i].v[e] *= both.v[e];
        of_y.blade[i].v[e] *= both.v[e];
        if (i == 0) {
          of_x.blade[i].v[e] += along_x.v[e] * gate_slope(left.blade[0].v[e]) * gates.y.v[e];
          of_y.blade[i].v[e] += along_y.v[e] * gate_slope(right.blade[0].v[e]) * gates.x.v[e];
        }
      }
      *reinterpret_cast<Pack<W>*>(dx + i * plane + at) = of_x.blade[i];
      *reinterpret_cast<Pack<W>*>(dy + i * plane + at) = of_y.blade[i];
    });
  }
};

/// By a kernel of its own: a thread has W neighbouring features of a row.
template <typename A, int W>
__global__ void __launch_bounds__(128) take_planes_apart(PlaneTaker<A> taker) {
  wait_for_previous_kernel();
  const int f = (blockIdx.x * 128 + threadIdx.x) * W;
  if (f < taker.chunk.layer.features) taker.template take<W>(blockIdx.y, f);
}
