// Attention as it is without a fused kernel: the library's two products, and a softmax between
// them. The logits, and the probabilities, go through memory.
#pragma once

#include "primitives/launch.h"
#include "primitives/neighbours.cuh"
#include "problems/attention/attention.h"

namespace problems {

/// Of softmax_rows.
inline constexpr int kRowThreads = 256, kRowWidth = 4;

/// A maximum, and the sum of e^(value - maximum).
struct RowSum {
  float largest, sum;
};
__device__ inline RowSum merged(const RowSum& a, const RowSum& b) {
  const float largest = fmaxf(a.largest, b.largest);
  if (largest == -INFINITY) return a;
  return {largest, a.sum * __expf(a.largest - largest) + b.sum * __expf(b.largest - largest)};
}

__device__ inline void round_to(half& to, float value) { to = __float2half_rn(value); }
__device__ inline void round_to(__nv_bfloat16& to, float value) { to = __float2bfloat16_rn(value); }

/// A block owns a row: query blockIdx.x of head blockIdx.y. It reads the logits that the query sees
/// twice, once for their maximum and sum and, mostly out of the L2 cache, once more for
///     probs = `times` e^(scale logit - maximum) / sum
/// and what it does not see is 0. A thread moves kRowWidth neighbours at a time; rows are `stride`
/// elements long, a multiple of that.
template <typename T>
__global__ void softmax_rows(const float* logits, T* probs, float* lse, int keys, int stride,
                             float scale, float times, bool causal) {
  __shared__ RowSum sums[kRowThreads / 32];
  const int queries = static_cast<int>(gridDim.x), s = static_cast<int>(blockIdx.x);
  const size_t row = static_cast<size_t>(blockIdx.y) * queries + s;
  const float* own = logits + row * stride;
  const int seen = causal ? max(0, min(keys, s + 1 + keys - queries)) : keys;
  using Logits = primitives::Neighbours<float, kRowWidth>;
  const auto logit = [&](const Logits& four, int first, int j) {
    return first + j < seen ? scale * four.values[j] : -INFINITY;
  };

  RowSum sum = {-INFINITY, 0};
  for (int first = kRowWidth * threadIdx.x; first < seen; first += kRowWidth * kRowThreads) {
    const Logits four = *reinterpret_cast<const Logits*>(own + first);
    float largest = sum.largest;
    for (int j = 0; j < kRowWidth; ++j) largest = fmaxf(largest, logit(four, first, j));
    if (largest == -INFINITY) continue;
    sum.sum *= __expf(sum.largest - largest);
    for (int j = 0; j < kRowWidth; ++j) sum.sum += __expf(logit(four, first, j) - largest);
    sum.largest = largest;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    sum = merged(sum, {__shfl_xor_sync(0xffffffffu, sum.largest, lanes),
                       __shfl_xor_sync(0xffffffffu, sum.sum, lanes)});
  }
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = sums[0];
  for (int warp = 1; warp < kRowThreads / 32; ++warp) sum = merged(sum, sums[warp]);

  const bool any = sum.largest > -INFINITY;
  const float factor = any ? times / sum.sum : 0, largest = any ? sum.largest : 0;
  if (threadIdx.x == 0) lse[row] = any ? sum.largest + logf(sum.sum) : -INFINITY;
  for (int first = kRowWidth * threadIdx.x; first < stride; first += kRowWidth * kRowThreads) {
    primitives::Neighbours<T, kRowWidth> result = {};
    if (first < seen) {
      const Logits four = *reinterpret_cast<const Logits*>(own + first);
      for (int j = 0; j < kRowWidth; ++j) {
        round_to(result.values[j], factor * __expf(logit(four, first, j) - largest));
      }
    }
    *reinterpret_cast<primitives::Neighbours<T, kRowWidth>*>(probs + row * stride + first) = result;
  }
}

template <typename T>
inline constexpr cudaDataType kCudaType = CUDA_R_16F;
template <>
inline constexpr cudaDataType kCudaType<__nv_bfloat16> = CUDA_R_16BF;

/// Probabilities are 1 / keys in the mean, and fp16's normal numbers begin at 2^-14: they are
/// written times this power of two, which the product takes back.
inline float times_of(int64_t keys) {
  return std::ldexp(1.0f, static_cast<int>(std::min(15.0, std::floor(std::log2(keys)))));
}

/// out and lse of AttentionProblem's layouts. So many heads at a time that what lies between the
/// products is at most kMostBytes, and at least one.
template <typename T>
class LibraryAttention {
 public:
  static constexpr double kMostBytes = 4e9;

  /// The workspace is the problem's. Both must outlive the lesson's run.
  LibraryAttention(cublasHandle_t blas, const AttentionProblem<T>& of);

  void operator()() const;
  /// Of device memory, for logits and probabilities.
  double bytes() const { return logits_.bytes() + probs_.bytes(); }

 private:
  int64_t heads_at_once() const;
  void some_heads(int64_t b, int64_t h, int64_t count) const;

  cublasHandle_t blas_;
  AttentionProblem<T> of_;
  int64_t stride_;        // of rows of logits and probabilities: keys, and up to 7 more
  Buffer<float> logits_;  // (heads at once, queries, stride)
  Buffer<T> probs_;       // likewise
};

template <typename T>
LibraryAttention<T>::LibraryAttention(cublasHandle_t blas, const AttentionProblem<T>& of)
    : blas_(blas),
      of_(of),
      stride_(primitives::ceil_div(of.shape.keys, 8) * 8),
      logits_(of.problem.template output<float>(heads_at_once() * of.shape.queries * stride_)),
      probs_(of.problem.template output<T>(heads_at_once() * of.shape.queries * stride_)) {}

/// Heads of one product: all of them where each has K and V of its own, or those that share them.
template <typename T>
int64_t LibraryAttention<T>::heads_at_once() const {
  const AttentionShape& shape = of_.shape;
  const double bytes = (sizeof(float) + sizeof(T)) * static_cast<double>(shape.queries) *
                       static_cast<double>(stride_);
  const int64_t together = shape.group() == 1 ? shape.heads : shape.group();
  return std::clamp<int64_t>(static_cast<int64_t>(kMostBytes / bytes), 1, together);
}

template <typename T>
void LibraryAttention<T>::operator()() const {
  const AttentionShape& shape = of_.shape;
  const int64_t together = shape.group() == 1 ? shape.heads : shape.group();
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t first = 0; first < shape.heads; first += together) {
      for (int64_t h = first; h < first + together; h += heads_at_once()) {
        some_heads(b, h, std::min(heads_at_once(), first + together - h));
      }
    }
  }
}

// Row-major matrices are their transposes for cuBLAS (lesson 4). Neighbouring heads' matrices
// begin `width` elements apart, their rows are as long as all heads together.
template <typename T>
void LibraryAttention<T>::some_heads(int64_t b, int64_t h, int64_t count) const {
  const AttentionShape& shape = of_.shape;
  const int queries = static_cast<int>(shape.queries), keys = static_cast<int>(shape.keys),
            width = static_cast<int>(shape.width), stride = static_cast<int>(stride_),
            batch = static_cast<int>(count);
  const int64_t q_row = shape.heads * width, k_row = shape.kv_heads * width;
  const int64_t q_from = b * queries * q_row + h * width,
                k_from = b * keys * k_row + h / shape.group() * width;
  const int64_t k_step = shape.group() == 1 ? width : 0;
  const int64_t square = shape.queries * stride_;
  constexpr cudaDataType type = kCudaType<T>;
  const float one = 1, zero = 0, times = times_of(keys), undone = 1 / times;
  CUBLAS_CHECK(cublasGemmStridedBatchedEx(
      blas_, CUBLAS_OP_T, CUBLAS_OP_N, keys, queries, width, &one, of_.K + k_from, type,
      static_cast<int>(k_row), k_step, of_.Q + q_from, type, static_cast<int>(q_row), width, &zero,
      logits_, CUDA_R_32F, stride, square, batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  const dim3 grid(queries, batch);
  softmax_rows<T><<<grid, kRowThreads>>>(logits_, probs_,
                                         of_.lse + (b * shape.heads + h) * shape.queries, keys,
                                         stride, shape.scale(), times, shape.causal);
  CUDA_CHECK(cudaGetLastError());
  CUBLAS_CHECK(cublasGemmStridedBatchedEx(
      blas_, CUBLAS_OP_N, CUBLAS_OP_N, width, queries, keys, &undone, of_.V + k_from, type,
      static_cast<int>(k_row), k_step, probs_, type, stride, square, &zero, of_.out + q_from, type,
      static_cast<int>(q_row), width, batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

}  // namespace problems
