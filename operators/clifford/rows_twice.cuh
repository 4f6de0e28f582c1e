// Lesson 10's *one launch*, for any GPU and rows of any length, where a block has no room for a row
// (on_chip.cuh). A block walks over a row once for its sums and once for the result. The second
// time x and y come from the L2 cache, as far as it still has them. With a norm each product is
// computed twice.
//
// Backward has a kernel for each walk. In the second one a thread has a feature of a strip of rows,
// so that its sums for dw stay in registers.
#pragma once

#include "operators/clifford/rows.cuh"
#include "operators/clifford/unfused.cuh"

namespace operators::clifford {

inline constexpr int kTwiceThreads = 256;

// A block owns a row, and each of its threads every kTwiceThreads-th feature.
template <typename A>
__global__ void __launch_bounds__(kTwiceThreads)
    forward_twice(const float* x, const float* y, const float* w, float* out, Layer layer) {
  __shared__ FeatureSums<A::kGrades> partials[kTwiceThreads / 32];
  const size_t plane = layer.plane(), row = static_cast<size_t>(blockIdx.x) * layer.features;
  FeatureSums<A::kGrades> sums = {};
  for (int walk = layer.normed ? 1 : 2; walk <= 2; ++walk) {
    for (int f = threadIdx.x; f < layer.features; f += kTwiceThreads) {
      const Multivectors<A, 1> z =
          gated_product(load<A>(x + row + f, plane), load<A>(y + row + f, plane),
                        Weights<A>(w + static_cast<size_t>(f) * A::kTriples), layer.gated);
      if (walk == 1) {
        add_squares(z, sums);
        continue;
      }
      unroll<0, A::kBlades>([&](auto k) {
        const float r = layer.normed ? inverse_rms(sums.value[A::grade(k)], layer) : 1;
        out[k * plane + row + f] = z.blade[k].v[0] * r;
      });
    }
    if (walk == 1) add_up_row(sums, partials, kTwiceThreads / 32);
  }
}

// Writes of_rows (batch): the sums that the gradients of each row need. A block owns a row, as
// forward.
template <typename A>
__global__ void __launch_bounds__(kTwiceThreads)
    gradient_sums(const float* x, const float* y, const float* w, const float* d_out,
                  GradientSums<A>* of_rows, Layer layer) {
  __shared__ GradientSums<A> partials[kTwiceThreads / 32];
  const size_t plane = layer.plane(), row = static_cast<size_t>(blockIdx.x) * layer.features;
  GradientSums<A> sums = {};
  for (int f = threadIdx.x; f < layer.features; f += kTwiceThreads) {
    const Multivectors<A, 1> left = load<A>(x + row + f, plane);
    const Multivectors<A, 1> right = load<A>(y + row + f, plane);
    const Multivectors<A, 1> P =
        weighted_product(left, right, Weights<A>(w + static_cast<size_t>(f) * A::kTriples));
    const Pack<1> g = Gates<1>(left.blade[0], right.blade[0], layer.gated).product();
    add_gradient_sums(P, g, load<A>(d_out + row + f, plane), sums);
  }
  add_up_row(sums, partials, kTwiceThreads / 32);
  if (threadIdx.x == 0) of_rows[blockIdx.x] = sums;
}

// The weights of a feature, in memory: each is loaded from the L1 cache whenever it is needed,
// since registers are scarce.
template <typename A>
struct WeightsInMemory {
  const float* of_feature;
  template <typename Index>
  __device__ __forceinline__ Pack<1> operator()(Index t) const {
    return {{of_feature[t]}};
  }
};

// Computes dx and dy, by the sums of rows, and leaves dw of each strip in partials (strips,
// triples, features). A thread without a feature computes the last one, as all threads of a warp
// have to, and writes nothing.
template <typename A>
__global__ void __launch_bounds__(kStripFeatures)
    gradients_of_strip(const float* x, const float* y, const float* w, const float* d_out,
                       const GradientSums<A>* of_rows, float* dx, float* dy, float* partials,
                       Layer layer) {
  const int chunks = ceil_div(layer.features, kStripFeatures);
  const int strip = blockIdx.x / chunks;
  const int own = blockIdx.x % chunks * kStripFeatures + threadIdx.x;
  const int feature = min(own, layer.features - 1), inside = own < layer.features;
  const Place<1, true> place(RowsOnChip{kStripFeatures, kStripFeatures, 1, layer.features}, layer);
  const size_t plane = layer.plane();
  const WeightsInMemory<A> weights{w + static_cast<size_t>(feature) * A::kTriples};
  const int end = min(layer.batch, (strip + 1) * kStrip);
  Pack<1> dw[A::kTriples] = {};
  for (int row = strip * kStrip; row < end; ++row) {
    const size_t at = static_cast<size_t>(row) * layer.features + feature;
    const Multivectors<A, 1> left = load<A>(x + at, plane), right = load<A>(y + at, plane);
    const Multivectors<A, 1> d = load<A>(d_out + at, plane);
    const Multivectors<A, 1> P = weighted_product(left, right, weights);
    const Gates<1> gates(left.blade[0], right.blade[0], layer.gated);
    GradientSums<A> sums = {};
    if (layer.normed) sums = of_rows[row];
    Pack<1> dg;
    const Multivectors<A, 1> dP = gradient_of_product(P, gates.product(), d, sums, layer, dg);
    store_gradients(left, right, dP, dg, gates, weights, dw, dx + at, dy + at, layer, place,
                    inside);
  }
  if (!inside) return;
  float* to = partials + static_cast<size_t>(strip) * A::kTriples * layer.features + feature;
  unroll<0, A::kTriples>([&](auto t) {
    *to = dw[t].v[0];
    to += layer.features;
  });
}

}  // namespace operators::clifford
