// The gradients of probs = softmax(x w): g, those of the logits, and two products
// (layer_gradients.cuh).
#pragma once

#include <vector>

#include "operators/softmax/layer_gradients.cuh"
#include "primitives/launch.h"
#include "primitives/row_parts.cuh"

namespace operators::softmax {

using namespace primitives;

/// The gradients of logits, g = p (d_p - sum of d_p p over a row), computed in fp32 and rounded to
/// T. A row is kThreads threads', a warp's or a block's, which read it twice, the second time from
/// a cache. Rows of g are g_stride apart.
template <int kThreads, typename T>
__global__ void __launch_bounds__(kThreads == 32 ? 256 : kThreads)
    logit_gradients(const T* probs, const T* d_probs, T* g, int rows, int classes,
                    int64_t g_stride) {
  constexpr int kRows = kThreads == 32 ? 8 : 1;
  const int64_t at = int64_t{blockIdx.x} * kRows + threadIdx.x / kThreads;
  if (at >= rows) return;
  const int first = threadIdx.x % kThreads;
  const int64_t row = at * classes;
  float sum = 0;
#pragma unroll 4
  for (int c = first; c < classes; c += kThreads) {
    sum += float(probs[row + c]) * float(d_probs[row + c]);
  }
  sum = lanes_sum<32>(sum);
  if constexpr (kThreads > 32) {
    __shared__ float warps[kThreads / 32];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (const float of_warp : warps) sum += of_warp;
  }
#pragma unroll 4
  for (int c = first; c < classes; c += kThreads) {
    g[at * g_stride + c] = T(float(probs[row + c]) * (float(d_probs[row + c]) - sum));
  }
}

template <typename T>
struct SoftmaxGradients {
  Memory<T> d_probs, x, w, probs, d_x, d_w;
};

template <typename T>
std::vector<Way> softmax_gradients(const Caller& caller, const SoftmaxGradients<T>& of,
                                   const SoftmaxShape& shape, const ProductSteps<T>& multiply) {
  const int rows = static_cast<int>(shape.rows), classes = static_cast<int>(shape.classes);
  const int64_t g_stride = pitch<T>(classes);
  const auto g = caller.workspace.any<T>(static_cast<size_t>(shape.rows * g_stride));
  const int threads = classes <= kShortRow ? 32 : classes <= kLongRow ? 256 : 1024;
  const int of_block = threads == 32 ? 8 : 1;
  const auto kernel = threads == 32    ? logit_gradients<32, T>
                      : threads == 256 ? logit_gradients<256, T>
                                       : logit_gradients<1024, T>;
  const Way make_g = {"", microseconds_to_move(3.0 * sizeof(T) * shape.logits()),
                      [=, stream = caller.stream] {
                        kernel<<<blocks_for(rows, of_block), of_block * threads, 0, stream>>>(
                            of.probs, of.d_probs, g, rows, classes, g_stride);
                      },
                      0};
  return layer_gradients<T>(caller, {of.x, of.w, of.d_x, of.d_w, g, make_g}, shape, multiply);
}

}  // namespace operators::softmax
