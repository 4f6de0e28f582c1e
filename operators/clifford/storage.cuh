// The types in which multivectors are stored: fp32, bf16 or fp16. All is computed in fp32: a value
// is converted where it is loaded and rounded where it is stored, to the nearest, ties to even. dw
// is added up in fp32, and rounded last.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>

#include "operators/clifford/algebra.cuh"
#include "operators/clifford/tensors.h"
#include "primitives/launch.h"

namespace operators::clifford {

using primitives::blocks_for;

enum class Storage { fp32, bf16, fp16 };

inline size_t bytes_of(Storage storage) { return storage == Storage::fp32 ? 4 : 2; }

/// Calls run with a null pointer to the type, so that a kernel's template can have it.
template <typename Run>
__device__ __forceinline__ auto with_type(Storage storage, Run run) {
  if (storage == Storage::bf16) return run(static_cast<__nv_bfloat16*>(nullptr));
  if (storage == Storage::fp16) return run(static_cast<__half*>(nullptr));
  return run(static_cast<float*>(nullptr));
}

/// The same on the host.
template <typename Run>
auto with_stored_type(Storage storage, Run run) {
  if (storage == Storage::bf16) return run(static_cast<__nv_bfloat16*>(nullptr));
  if (storage == Storage::fp16) return run(static_cast<__half*>(nullptr));
  return run(static_cast<float*>(nullptr));
}

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float to_float(__half value) { return __half2float(value); }

template <typename T>
__device__ T rounded_to(float value);
template <>
__device__ inline float rounded_to<float>(float value) {
  return value;
}
template <>
__device__ inline __nv_bfloat16 rounded_to<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline __half rounded_to<__half>(float value) {
  return __float2half_rn(value);
}

// W neighbours as they are stored, moved by one access.
template <typename T, int W>
struct Stored {
  alignas(W * sizeof(T)) T v[W];
};

template <typename T, int W>
__device__ __forceinline__ Pack<W> unpacked(const Stored<T, W>& stored) {
  Pack<W> result;
#pragma unroll
  for (int e = 0; e < W; ++e) result.v[e] = to_float(stored.v[e]);
  return result;
}
template <typename T, int W>
__device__ __forceinline__ Stored<T, W> packed(const Pack<W>& values) {
  Stored<T, W> result;
#pragma unroll
  for (int e = 0; e < W; ++e) result.v[e] = rounded_to<T>(values.v[e]);
  return result;
}

// ---- Weights ------------------------------------------------------------------------------------

constexpr int kWideningThreads = 256;

// to = w in fp32, for kernels that read weights in no other type; ones if w is null. A thread has
// an element.
template <typename T>
__global__ void __launch_bounds__(kWideningThreads)
    widen_weights(const T* w, float* to, int count) {
  const int i = blockIdx.x * kWideningThreads + threadIdx.x;
  if (i < count) to[i] = w == nullptr ? 1 : to_float(w[i]);
}

// ---- dw -----------------------------------------------------------------------------------------

// dw (features, triples) = the sum of `count` partials (triples, features), in a fixed order. dw is
// always summed in two steps, so that blocks need not wait for each other and the result does not
// depend on who is first. A block owns 32 columns, which are numbers of dw: thread (x, y) adds
// partials y, y + kSumRows, ... of column x, then thread (x, 0) adds these up.
constexpr int kSumRows = 16;

template <typename T>
__global__ void __launch_bounds__(32 * kSumRows)
    sum_partials(const float* partials, T* dw, int count, int triples, int features) {
  __shared__ float sums[kSumRows][32];
  const size_t columns = static_cast<size_t>(triples) * features;
  const size_t column = static_cast<size_t>(blockIdx.x) * 32 + threadIdx.x;
  float sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int i = threadIdx.y; i < count; i += kSumRows) sum += partials[i * columns + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < columns) {
    for (int i = 1; i < kSumRows; ++i) sum += sums[i][threadIdx.x];
    dw[column % features * triples + column / features] = rounded_to<T>(sum);
  }
}

// dw from its partial sums, if it is wanted.
template <typename A, typename T, typename D>
void add_up_weights(const GradientsOf<T, D>& d, const Memory<float>& partials, const Layer& layer,
                    cudaStream_t stream = nullptr) {
  if (d.dw.size() == 0) return;
  const int count = static_cast<int>(partials.size() / d.dw.size());
  sum_partials<D><<<blocks_for(d.dw.size(), 32), dim3(32, kSumRows), 0, stream>>>(
      partials, d.dw, count, A::kTriples, layer.features);
}

}  // namespace operators::clifford
