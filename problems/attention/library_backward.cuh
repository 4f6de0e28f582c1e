// Attention's gradients as they are without a fused kernel: the library's five products, and a
// kernel between them. Four matrices of queries x keys go through memory: logits, dP, P and dS.
#pragma once

#include "problems/attention/backward.h"
#include "problems/attention/library.cuh"

namespace problems {

/// A block owns a row: query blockIdx.x of head blockIdx.y of `heads`, whose logits and dP it reads
/// once, and writes P and dS, rounded. What the query does not see becomes 0. Rows are `stride`
/// elements long; out and d_out begin with the first of the heads.
template <typename T>
__global__ void gradient_rows(const float* logits, const float* dP, const T* out, const T* d_out,
                              const float* log_sums, T* P, T* dS, int keys, int stride, int width,
                              int q_row, float scale, bool causal) {
  __shared__ float sums[kRowThreads / 32];
  const int queries = static_cast<int>(gridDim.x), s = static_cast<int>(blockIdx.x);
  const size_t row = static_cast<size_t>(blockIdx.y) * queries + s;
  const size_t from = static_cast<size_t>(s) * q_row + static_cast<size_t>(blockIdx.y) * width;
  const int seen = causal ? max(0, min(keys, s + 1 + keys - queries)) : keys;
  float sum = 0;
  for (int i = threadIdx.x; i < width; i += kRowThreads) {
    sum += static_cast<float>(out[from + i]) * static_cast<float>(d_out[from + i]);
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (const float of_warp : sums) sum += of_warp;
  const float log_sum = log_sums[row];
  for (int t = threadIdx.x; t < stride; t += kRowThreads) {
    const size_t at = row * stride + t;
    const float p = t < seen ? __expf(scale * logits[at] - log_sum) : 0;
    round_to(P[at], p);
    round_to(dS[at], t < seen ? p * (dP[at] - sum) : 0);
  }
}

/// A head's sums (keys, width), rounded, become rows of `to`, which are `k_row` elements apart. One
/// thread an element.
template <typename T>
__global__ void round_sums(const float* sums, T* to, int count, int width, int64_t k_row) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) round_to(to[i / width * k_row + i % width], sums[i]);
}

/// dQ, dK and dV of AttentionBackwardProblem's layouts. So many heads at a time that what lies
/// between the products is at most kMostBytes, and at least one.
template <typename T>
class LibraryAttentionBackward {
 public:
  static constexpr double kMostBytes = 4e9;

  /// The workspace is the problem's. Both must outlive the lesson's run.
  LibraryAttentionBackward(cublasHandle_t blas, const AttentionBackwardProblem<T>& of)
      : blas_(blas),
        of_(of),
        stride_(primitives::ceil_div(of.shape.keys, 8) * 8),
        logits_(square<float>()),
        dP_(square<float>()),
        P_(square<T>()),
        dS_(square<T>()),
        dK_sums_(sums()),
        dV_sums_(sums()) {}

  void operator()() const;

  /// Of what lies between the products.
  double workspace_bytes() const {
    const double squares = logits_.bytes() + dP_.bytes() + P_.bytes() + dS_.bytes();
    return of_.shape.group() == 1 ? squares : squares + dK_sums_.bytes() + dV_sums_.bytes();
  }

 private:
  template <typename Element>
  Buffer<Element> square() const {
    return of_.problem.template output<Element>(heads_at_once() * of_.shape.queries * stride_);
  }
  Buffer<float> sums() const {
    const bool needed = of_.shape.group() > 1;
    return of_.problem.template output<float>(needed ? of_.shape.keys * of_.shape.width : 1);
  }
  /// Heads that one series of products may have: all where each has K and V of its own, else those
  /// that share them.
  int64_t together() const { return of_.shape.group() == 1 ? of_.shape.heads : of_.shape.group(); }
  int64_t heads_at_once() const {
    const double bytes = 2 * (sizeof(float) + sizeof(T)) * static_cast<double>(of_.shape.queries) *
                         static_cast<double>(stride_);
    return std::clamp<int64_t>(static_cast<int64_t>(kMostBytes / bytes), 1, together());
  }
  void some_heads(int64_t b, int64_t h, int64_t count) const;

  cublasHandle_t blas_;
  AttentionBackwardProblem<T> of_;
  int64_t stride_;                   // of rows of the four: keys, and up to 7 more
  Buffer<float> logits_, dP_;        // (heads at once, queries, stride)
  Buffer<T> P_, dS_;                 // likewise
  Buffer<float> dK_sums_, dV_sums_;  // (keys, width), where heads share K and V
};

template <typename T>
void LibraryAttentionBackward<T>::operator()() const {
  const AttentionShape& shape = of_.shape;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t first = 0; first < shape.heads; first += together()) {
      for (int64_t h = first; h < first + together(); h += heads_at_once()) {
        some_heads(b, h, std::min(heads_at_once(), first + together() - h));
      }
    }
  }
}

// Row-major matrices are their transposes for cuBLAS (lesson 4). Neighbouring heads' matrices
// begin `width` elements apart, their rows are as long as all heads together.
template <typename T>
void LibraryAttentionBackward<T>::some_heads(int64_t b, int64_t h, int64_t count) const {
  const AttentionShape& shape = of_.shape;
  const int queries = static_cast<int>(shape.queries), keys = static_cast<int>(shape.keys),
            width = static_cast<int>(shape.width), stride = static_cast<int>(stride_),
            batch = static_cast<int>(count), q_row = static_cast<int>(shape.heads * width),
            k_row = static_cast<int>(shape.kv_heads * width);
  const int64_t group = shape.group(), square = shape.queries * stride_;
  const int64_t q_from = b * queries * q_row + h * width,
                k_from = b * keys * k_row + h / group * width;
  const int64_t k_step = group == 1 ? width : 0;
  constexpr cudaDataType type = kCudaType<T>, fp32 = CUDA_R_32F;
  const float one = 1, zero = 0, scale = shape.scale();

  // (queries, keys) = left right^T of each head.
  const auto outer = [&](const T* left, const T* right, float* to) {
    CUBLAS_CHECK(cublasGemmStridedBatchedEx(
        blas_, CUBLAS_OP_T, CUBLAS_OP_N, keys, queries, width, &one, right + k_from, type, k_row,
        k_step, left + q_from, type, q_row, width, &zero, to, fp32, stride, square, batch,
        CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  };
  outer(of_.Q, of_.K, logits_);
  outer(of_.d_out, of_.V, dP_);
  gradient_rows<T><<<dim3(queries, batch), kRowThreads>>>(
      logits_, dP_, of_.out + q_from, of_.d_out + q_from,
      of_.log_sums + (b * shape.heads + h) * shape.queries, P_, dS_, keys, stride, width, q_row,
      scale, shape.causal);
  CUDA_CHECK(cudaGetLastError());

  CUBLAS_CHECK(cublasGemmStridedBatchedEx(blas_, CUBLAS_OP_N, CUBLAS_OP_N, width, queries, keys,
                                          &scale, of_.K + k_from, type, k_row, k_step, dS_, type,
                                          stride, square, &zero, of_.dQ + q_from, type, q_row,
                                          width, batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));

  // (keys, width) = left^T right of each head, or summed up over the heads that share K and V.
  const auto inner = [&](const T* left, const T* right, const float& times, float* sums, T* to) {
    const auto product = [&](int64_t from_head, int heads, const float& before, void* result,
                             cudaDataType result_type, int row) {
      CUBLAS_CHECK(cublasGemmStridedBatchedEx(blas_, CUBLAS_OP_N, CUBLAS_OP_T, width, keys, queries,
                                              &times, right + q_from + from_head * width, type,
                                              q_row, width, left + from_head * square, type, stride,
                                              square, &before, result, result_type, row, width,
                                              heads, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    };
    if (group == 1) return product(0, batch, zero, to + k_from, type, k_row);
    for (int64_t i = 0; i < count; ++i) {
      product(i, 1, (h + i) % group == 0 ? zero : one, sums, fp32, width);
    }
    if ((h + count) % group != 0) return;
    const int elements = keys * width;
    round_sums<T>
        <<<primitives::blocks_for(elements, 256), 256>>>(sums, to + k_from, elements, width, k_row);
    CUDA_CHECK(cudaGetLastError());
  };
  inner(P_, of_.d_out, one, dV_sums_, of_.dV);
  inner(dS_, of_.Q, scale, dK_sums_, of_.dK);
}

}  // namespace problems
