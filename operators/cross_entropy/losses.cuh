// The cross-entropy of softmax(x w) and labels. A product leaves the logits, and perhaps the
// maximum and the sum of exponentials of parts of each row (operators/softmax/logits.cuh). What
// follows it is here:
//
//     log_sums[b] = log(sum of exp(logits[b][c]) over all c)
//     losses[b] = log_sums[b] - logits[b][labels[b]], or 0 where the label is no class
//     x (B, D), w (D, C): fp32, fp16 or bf16; logits (B, C); losses and log_sums (B): fp32
//     labels (B): int64 or int32
//
// Logits are fp32 whatever x and w are: as the product adds them up. What a loss needs is the
// difference of logits, and in bf16 a logit of 20 may be off by 0.06. So the losses are those of
// logits that nobody has rounded; they take the memory and the time of 2 bytes a logit more.
#pragma once

#include <cstdint>
#include <vector>

#include "operators/cross_entropy/labels.cuh"
#include "operators/estimate.h"
#include "operators/softmax/logits.cuh"
#include "operators/softmax/rows.cuh"
#include "primitives/launch.h"

namespace operators::cross_entropy {

using namespace primitives;
using softmax::block_merge, softmax::kPartColumns, softmax::merge, softmax::warp_merge;

/// A row's loss: the logarithm of the sum of exponentials less the label's logit. Both are taken
/// relative to the largest logit: where logits are large, fp32 has no digits left for the logarithm
/// once the maximum has been added to it.
struct Losses {
  Labels labels;
  float *losses, *log_sums;
  int classes;

  __device__ static float loss(const MaxSum& row, float logit) {
    return logf(row.sum) - (logit - row.largest);
  }
};

/// The losses of rows with logits. kLanes lanes, 1 or 32, have a row, of whose parts there are
/// `count` maxima and sums.
inline constexpr int kLossThreads = 128, kFewParts = 8;
template <int kLanes>
__global__ void __launch_bounds__(kLossThreads)
    losses_of_parts(const float* logits, const float2* parts, Losses of, int rows, int count) {
  const int row = (blockIdx.x * kLossThreads + static_cast<int>(threadIdx.x)) / kLanes;
  if (row >= rows) return;
  const int64_t label = of.labels.of(row);
  const bool is_class = Labels::is_class(label, of.classes);
  const float logit = is_class ? logits[int64_t{row} * of.classes + label] : 0;
  MaxSum part = {minus_infinity(), 0};
  for (int i = threadIdx.x % kLanes; i < count; i += kLanes) {
    const float2 other = parts[static_cast<size_t>(row) * count + i];
    part = merge(part, {other.x, other.y});
  }
  if constexpr (kLanes == 32) part = warp_merge(part);
  if (threadIdx.x % kLanes != 0) return;
  of.log_sums[row] = part.largest + logf(part.sum);
  of.losses[row] = is_class ? Losses::loss(part, logit) : 0;
}

/// The losses of rows of at most kThreads * kValues logits. A block has a row, and keeps it in
/// registers. If there are several slices, each logit is the sum of so many partial ones, and the
/// block writes it; else `sliced` are the logits.
template <int kThreads, int kValues>
__global__ void __launch_bounds__(kThreads)
    losses_of_slices(const float* sliced, float* logits, Losses of, int slices) {
  const int64_t start = int64_t{blockIdx.x} * of.classes;
  const int64_t slice_size = int64_t{gridDim.x} * of.classes;
  float v[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int c = threadIdx.x + i * kThreads;
    v[i] = c < of.classes ? sliced[start + c] : minus_infinity();
  }
#pragma unroll 4
  for (int slice = 1; slice < slices; ++slice) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int c = threadIdx.x + i * kThreads;
      if (c < of.classes) v[i] += sliced[slice * slice_size + start + c];
    }
  }
  MaxSum row = {minus_infinity(), 0};
#pragma unroll
  for (int i = 0; i < kValues; ++i) row.largest = fmaxf(row.largest, v[i]);
#pragma unroll
  for (int i = 0; i < kValues; ++i) row.sum += expf(v[i] - base_of(row.largest));
  row = warp_merge(row);
  if constexpr (kThreads > 32) row = block_merge<kThreads / 32>(row);
  const int64_t label = of.labels.of(blockIdx.x);
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int c = threadIdx.x + i * kThreads;
    if (slices > 1 && c < of.classes) logits[start + c] = v[i];
    if (c < of.classes && c == label) of.losses[blockIdx.x] = Losses::loss(row, v[i]);
  }
  if (threadIdx.x != 0) return;
  of.log_sums[blockIdx.x] = row.largest + logf(row.sum);
  if (!Labels::is_class(label, of.classes)) of.losses[blockIdx.x] = 0;
}

struct CrossEntropy {
  LabelMemory labels;
  Memory<float> losses, logits, log_sums;
};

/// The losses, after the product that leaves their logits, as one way.
inline Way cross_entropy(const Caller& caller, const CrossEntropy& of,
                         const softmax::SoftmaxShape& shape, const softmax::LogitsWay& product) {
  const int64_t B = shape.rows, C = shape.classes;
  const bool has_parts = product.slices == 1 && product.count > 0, is_long = C > kPartColumns;
  const int count = has_parts ? product.count : static_cast<int>(blocks_for(C, kPartColumns));
  const auto parts =
      has_parts ? product.parts : caller.workspace.any<float2>(is_long ? B * count : 1);
  const auto launch = [=, slices = product.slices, stream = caller.stream,
                       sliced = product.slices > 1 ? product.sliced : of.logits] {
    const Losses result = {of.labels.data(), of.losses, of.log_sums, static_cast<int>(C)};
    const auto rows = static_cast<unsigned>(B);
    if (!has_parts && !is_long) {
      constexpr int kThreads = softmax::kSoftmaxThreads;
      const bool is_short = C <= 128;
      const auto kernel =
          is_short ? losses_of_slices<32, 4> : losses_of_slices<kThreads, kPartColumns / kThreads>;
      kernel<<<rows, is_short ? 32 : kThreads, 0, stream>>>(sliced, of.logits, result, slices);
      return;
    }
    if (!has_parts) {
      softmax::sum_row_parts<softmax::kSoftmaxThreads>
          <<<dim3(rows, count), softmax::kSoftmaxThreads, 0, stream>>>(sliced, of.logits, parts,
                                                                       result.classes, slices);
    }
    const int lanes = count <= kFewParts ? 1 : 32;
    const auto kernel = lanes == 1 ? losses_of_parts<1> : losses_of_parts<32>;
    kernel<<<blocks_for(B, kLossThreads / lanes), kLossThreads, 0, stream>>>(
        of.logits, parts, result, static_cast<int>(B), count);
  };
  const double read = has_parts ? 2.0 * static_cast<double>(B) * count : shape.logits();
  const double moved = microseconds_to_move(sizeof(float) * read);
  return in_turn(product, {product, {"", moved, launch, 0}});
}

}  // namespace operators::cross_entropy
