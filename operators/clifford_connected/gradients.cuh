// dz of the fully connected product, row by row, for the product of few rows.
#pragma once

#include "operators/clifford_connected/connected.cuh"

namespace operators::clifford_connected {

using namespace primitives;
using namespace clifford;

/// Writes dz of the batch's rows from `first` on, in TF32. A block has one row, all blades. As out
/// = r z, dz = r d_out - r out mean(d_out out) in each grade. Two blades of dz are `pitch` elements
/// apart, two rows `stride`. There are zeros beyond the features, and in rows beyond the batch.
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

}  // namespace operators::clifford_connected
