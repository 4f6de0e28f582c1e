// What the portable kernels of the gated layer have in common: how weights and biases come on chip.
#pragma once

#include "operators/gating/gate.cuh"
#include "primitives/async_copy.cuh"

namespace operators::gating {

/// Starts the copy of kPiece neighbours in row k of W1 (of_gate) or W2, from column `col` on, to
/// row k of a swizzled tile, from its column c on. Elements outside of the matrix become 0. Where H
/// is no multiple of kPiece, the thread copies the elements itself, and they are there on return.
template <int kPiece, int kWidth, typename T>
__device__ __forceinline__ void copy_weights(T* tile, const LayerOperands<T>& in, bool of_gate,
                                             int k, int c, int col) {
  const T* const from = (of_gate ? in.W1 : in.W2) + int64_t{k} * in.H + col;
  T* const to = tile + primitives::swizzle<kWidth>(k, c);
  const int there = k < in.K ? min(max(in.H - col, 0), kPiece) : 0;
  if (in.H % kPiece == 0) {
    if constexpr (kPiece * sizeof(T) == 16) {
      primitives::copy_async_part(to, from, 2 * there);
    } else {
      primitives::copy_async<kPiece* static_cast<int>(sizeof(T))>(to, from, there > 0);
    }
  } else {
    for (int e = 0; e < kPiece; ++e) to[e] = e < there ? from[e] : T();
  }
}

/// Element `col` of b1 (of_gate) or b2; 0 if there are no biases, or `col` is outside.
template <typename T>
__device__ __forceinline__ float bias_at(const LayerOperands<T>& in, bool of_gate, int col) {
  const T* const from = of_gate ? in.b1 : in.b2;
  return from != nullptr && col < in.H ? static_cast<float>(from[col]) : 0;
}

/// A warp's sums begin at the biases, which are fp32 in shared memory. In each fragment sum[i][j] a
/// thread has columns 8 j + lane % 4 * 2 and the next one, of two rows.
template <int kRows16, int kCols8>
__device__ __forceinline__ void start_at_biases(float (&sum)[kRows16][kCols8][4],
                                                const float* biases) {
#pragma unroll
  for (int j = 0; j < kCols8; ++j) {
    const float2 bias = *reinterpret_cast<const float2*>(biases + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
    for (int i = 0; i < kRows16; ++i) {
      sum[i][j][0] = sum[i][j][2] = bias.x, sum[i][j][1] = sum[i][j][3] = bias.y;
    }
  }
}

}  // namespace operators::gating
