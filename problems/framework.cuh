// What a framework runs where nothing is fused, for the bf16 lessons: elementwise kernels, and the
// library's products. Matrices are row-major and dense, and their sizes multiples of 8.
#pragma once

#include <cuda_bf16.h>

#include "common/numerics.h"

namespace problems {

using namespace common;

/// A thread owns 8 neighbouring elements of its result and moves them as 16 bytes.
struct alignas(16) Pack {
  __nv_bfloat16 values[8];
};

inline constexpr unsigned kThreads = 256, kPerBlock = 8 * kThreads;

struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Subtract {
  __device__ float operator()(float a, float b) const { return a - b; }
};
struct Multiply {
  __device__ float operator()(float a, float b) const { return a * b; }
};

/// out = operation(left, right)
template <typename Operation>
__global__ void elementwise(const __nv_bfloat16* left, const __nv_bfloat16* right,
                            __nv_bfloat16* out, size_t count) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (i >= count) return;
  const Pack a = *reinterpret_cast<const Pack*>(left + i);
  Pack b = *reinterpret_cast<const Pack*>(right + i);
  for (int j = 0; j < 8; ++j) {
    b.values[j] = __float2bfloat16_rn(
        Operation()(__bfloat162float(a.values[j]), __bfloat162float(b.values[j])));
  }
  *reinterpret_cast<Pack*>(out + i) = b;
}

/// c (m, n) = a b, row-major; a is stored as (m, k), or transposed, b as (k, n), or transposed.
/// cuBLAS is column-major, where each of these is its transpose: c^T = b^T a^T.
inline void library_product(cublasHandle_t blas, const __nv_bfloat16* a, Transposed a_is,
                            const __nv_bfloat16* b, Transposed b_is, __nv_bfloat16* c, int64_t m,
                            int64_t n, int64_t k) {
  const float one = 1, zero = 0;
  CUBLAS_CHECK(cublasGemmEx(
      blas, b_is ? CUBLAS_OP_T : CUBLAS_OP_N, a_is ? CUBLAS_OP_T : CUBLAS_OP_N, static_cast<int>(n),
      static_cast<int>(m), static_cast<int>(k), &one, b, CUDA_R_16BF,
      static_cast<int>(b_is ? k : n), a, CUDA_R_16BF, static_cast<int>(a_is ? m : k), &zero, c,
      CUDA_R_16BF, static_cast<int>(n), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

/// `batch` of these products; the matrices of each follow those of the one before.
inline void library_products(cublasHandle_t blas, int64_t batch, const __nv_bfloat16* a,
                             Transposed a_is, const __nv_bfloat16* b, Transposed b_is,
                             __nv_bfloat16* c, int64_t m, int64_t n, int64_t k) {
  if (batch == 1) return library_product(blas, a, a_is, b, b_is, c, m, n, k);
  const float one = 1, zero = 0;
  CUBLAS_CHECK(cublasGemmStridedBatchedEx(
      blas, b_is ? CUBLAS_OP_T : CUBLAS_OP_N, a_is ? CUBLAS_OP_T : CUBLAS_OP_N, static_cast<int>(n),
      static_cast<int>(m), static_cast<int>(k), &one, b, CUDA_R_16BF,
      static_cast<int>(b_is ? k : n), k * n, a, CUDA_R_16BF, static_cast<int>(a_is ? m : k), m * k,
      &zero, c, CUDA_R_16BF, static_cast<int>(n), m * n, static_cast<int>(batch),
      CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

}  // namespace problems
