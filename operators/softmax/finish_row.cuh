// A row's logits, spread over the lanes of a warp, become what the epilogue says.
#pragma once

#include "operators/softmax/layer.cuh"

namespace operators::softmax {

/// kLanes lanes share a row of tile `tile` of `tiles`, kLanes * kValues columns wide. Lane l has
/// its columns l, l + kLanes, ... Applies the epilogue; writes `out` only if the row `exists`.
template <int kValues, int kLanes = 32>
__device__ void finish_row(float (&v)[kValues], int row, int C, const Results& results,
                           int tile = 0, int tiles = 1, bool exists = true) {
  const int col = kLanes * kValues * tile + static_cast<int>(threadIdx.x) % kLanes;
  const bool softmax = results.epilogue == Epilogue::softmax;
  float factor = 1;
  if (results.epilogue != Epilogue::logits) {
    float largest = minus_infinity(), sum = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (col + kLanes * i >= C) v[i] = minus_infinity();
      largest = fmaxf(largest, v[i]);
    }
    largest = lanes_max<kLanes>(largest);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float exponential = expf(v[i] - base_of(largest));
      sum += exponential;
      if (softmax) v[i] = exponential;
    }
    sum = lanes_sum<kLanes>(sum);
    if (softmax) factor = 1 / sum;
    if (!softmax && threadIdx.x % kLanes == 0) {
      results.parts[static_cast<size_t>(row) * tiles + tile] = {largest, sum};
    }
  }
  float* out = results.out + static_cast<size_t>(row) * C + col;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (exists && col + kLanes * i < C) out[kLanes * i] = v[i] * factor;
  }
}

}  // namespace operators::softmax
