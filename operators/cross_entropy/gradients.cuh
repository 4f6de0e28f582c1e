// The gradients of the cross-entropy: those of the logits, and two products, as softmax has them
// (operators/softmax/layer_gradients.cuh).
#pragma once

#include <cstdint>
#include <vector>

#include "operators/cross_entropy/labels.cuh"
#include "operators/softmax/layer_gradients.cuh"
#include "operators/softmax/rows.cuh"
#include "primitives/launch.h"

namespace operators::cross_entropy {

using namespace primitives;
using softmax::block_merge, softmax::merge, softmax::warp_merge;

/// The largest logit of a row, and the sum of exponentials relative to it, as all kThreads threads
/// of the row find it together.
template <int kThreads>
__device__ MaxSum max_sum_of_row(const float* logits, int classes) {
  MaxSum row = {minus_infinity(), 0};
  for (int c = static_cast<int>(threadIdx.x) % kThreads; c < classes; c += kThreads) {
    row = merge(row, {logits[c], 1});
  }
  row = warp_merge(row);
  if constexpr (kThreads > 32) row = block_merge<kThreads / 32>(row);
  return row;
}

/// The gradients of logits: g = d_loss (exp(logit - log_sum), less 1 at the label), and 0 where the
/// label is no class; computed in fp32 and rounded to T. Rows of g are g_stride apart. kThreads
/// threads have 8 * kThreads columns of a row; all loads of a thread are under way at a time. The
/// grid's y are the parts of a row.
///
/// A log_sum has been rounded, by up to 2^-24 of its size, and that becomes a factor of all of the
/// row's exponentials. Up to kExactLogSum it is as good as one of fp32's own roundings of a sum.
/// Beyond it, which logits of a network that learns do not reach, every part of the row finds its
/// maximum and its sum once more.
inline constexpr int kGradientThreads = 256, kGradientsEach = 8;
inline constexpr float kExactLogSum = 32;
template <int kThreads, typename T>
__global__ void __launch_bounds__(kGradientThreads)
    loss_gradients(const float* logits, const float* log_sums, Labels labels, const float* d_losses,
                   T* g, int rows, int classes, int64_t g_stride) {
  const int64_t at = int64_t{blockIdx.x} * (kGradientThreads / kThreads) + threadIdx.x / kThreads;
  if (at >= rows) return;
  const int64_t row = at * classes;
  const int first =
      blockIdx.y * kThreads * kGradientsEach + static_cast<int>(threadIdx.x) % kThreads;
  float v[kGradientsEach];
#pragma unroll
  for (int i = 0; i < kGradientsEach; ++i) {
    const int c = first + i * kThreads;
    if (c < classes) v[i] = logits[row + c];
  }
  const float log_sum = log_sums[at], d_loss = d_losses[at];
  float base = 0, log_of_sum = log_sum;  // relative to the base
  if (fabsf(log_sum) > kExactLogSum && !isinf(log_sum)) {
    const MaxSum all = max_sum_of_row<kThreads>(logits + row, classes);
    base = all.largest;
    log_of_sum = logf(all.sum);
  }
  const int64_t label = labels.of(at);
  const bool is_class = Labels::is_class(label, classes);
#pragma unroll
  for (int i = 0; i < kGradientsEach; ++i) {
    const int c = first + i * kThreads;
    if (c < classes) {
      const float p = expf(v[i] - base - log_of_sum);
      g[at * g_stride + c] = T(is_class ? d_loss * (p - (c == label ? 1.0F : 0.0F)) : 0.0F);
    }
  }
}

template <typename T>
struct CrossEntropyGradients {
  Memory<float> d_losses;
  Memory<T> x, w;
  LabelMemory labels;
  Memory<float> logits, log_sums;
  Memory<T> d_x, d_w;
};

template <typename T>
std::vector<Way> cross_entropy_gradients(const Caller& caller, const CrossEntropyGradients<T>& of,
                                         const softmax::SoftmaxShape& shape,
                                         const softmax::ProductSteps<T>& multiply) {
  const int rows = static_cast<int>(shape.rows), classes = static_cast<int>(shape.classes);
  const int64_t g_stride = softmax::pitch<T>(classes);
  const auto g = caller.workspace.any<T>(static_cast<size_t>(shape.rows * g_stride));
  const int threads = classes <= softmax::kShortRow ? 32 : kGradientThreads;
  const auto kernel = threads == 32 ? loss_gradients<32, T> : loss_gradients<kGradientThreads, T>;
  const dim3 grid(blocks_for(rows, kGradientThreads / threads),
                  blocks_for(classes, threads * kGradientsEach));
  const Way make_g = {"", microseconds_to_move((sizeof(float) + sizeof(T)) * shape.logits()),
                      [=, stream = caller.stream] {
                        kernel<<<grid, kGradientThreads, 0, stream>>>(of.logits, of.log_sums,
                                                                      of.labels.data(), of.d_losses,
                                                                      g, rows, classes, g_stride);
                      },
                      0};
  return softmax::layer_gradients<T>(caller, {of.x, of.w, of.d_x, of.d_w, g, make_g}, shape,
                                     multiply);
}

}  // namespace operators::cross_entropy
