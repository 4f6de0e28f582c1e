// How parts of a row are merged; and softmax as a kernel of its own, after a product: lesson 9's
// *softmax of logits*.
#pragma once

#include <type_traits>

#include "operators/softmax/softmax.h"
#include "primitives/early_launch.cuh"
#include "primitives/launch.h"
#include "primitives/mma.cuh"
#include "primitives/row_parts.cuh"

namespace operators::softmax {

using namespace primitives;

// ---- Maximum and sum ----------------------------------------------------------------------------

// exp(logit - m) is an exponential relative to m. Times this factor, exponentials relative to
// `from` become relative to `to`. If both are -inf, it is 1.
__device__ inline float rebase(float from, float to) { return from == to ? 1 : expf(from - to); }

// Merges two parts of a row: both sums become relative to the larger maximum. For example, the
// logits 3 and 1 are (3, 1.135), and 5 and 4 are (5, 1.368). Together they are (5, 1.135 e^(3 - 5)
// + 1.368), which is (5, 1.522). This is online softmax: no part has to know another one's maximum
// beforehand.
__device__ inline MaxSum merge(MaxSum a, MaxSum b) {
  const float largest = fmaxf(a.largest, b.largest);
  return {largest, a.sum * rebase(a.largest, largest) + b.sum * rebase(b.largest, largest)};
}

__device__ inline MaxSum warp_merge(MaxSum part) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    part = merge(part, {__shfl_xor_sync(kAllLanes, part.largest, i),
                        __shfl_xor_sync(kAllLanes, part.sum, i)});
  }
  return part;
}

// Merges the parts of the kWarps warps of a block, of which `part` is this warp's. All threads get
// the result.
template <int kWarps>
__device__ MaxSum block_merge(MaxSum part) {
  __shared__ MaxSum parts[kWarps];
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = part;
  __syncthreads();
  // The maximum of all parts comes first. Then the exponentials do not have to wait for one
  // another.
  MaxSum each[kWarps];
  float largest = minus_infinity(), sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    each[i] = parts[i];
    largest = fmaxf(largest, each[i].largest);
  }
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += each[i].sum * rebase(each[i].largest, largest);
  return {largest, sum};
}

// ---- Softmax in a kernel of its own -------------------------------------------------------------

/// Stores four neighbours of a row, rounded to T. `to` is a multiple of four of them behind the
/// start of the matrix.
template <typename T>
__device__ inline void store_four(T* to, float4 four) {
  if constexpr (std::is_same_v<T, float>) {
    *reinterpret_cast<float4*>(to) = four;
  } else {
    *reinterpret_cast<uint2*>(to) = pack4<T>(four);
  }
}

constexpr int kSoftmaxThreads = 256;

// kGroup threads, a warp or the block, share a row of at most kGroup * kValues logits, and keep it
// in registers. So each logit is read once, and each probability is written once. If C is a
// multiple of 4 (kWidth = 4), they read and write 16 bytes at a time. A thread has kWidth
// neighbours, then the kWidth neighbours that are kGroup * kWidth columns further on, and so on.
//
// If the product's D is cut into slices, a logit is the sum of `slices` numbers: logits are
// (slices, B, C), and are added up as they are read. Probabilities are rounded to T.
template <int kGroup, int kValues, int kWidth, typename T>
__global__ void __launch_bounds__(kSoftmaxThreads)
    softmax_rows(const float* logits, T* probs, int B, int C, int slices) {
  start_next_kernel();
  wait_for_previous_kernel();
  const int row = blockIdx.x * (kSoftmaxThreads / kGroup) + threadIdx.x / kGroup;
  if (row >= B) return;
  const float* from = logits + static_cast<size_t>(row) * C;
  T* to = probs + static_cast<size_t>(row) * C;
  const int col0 = threadIdx.x % kGroup * kWidth;
  float v[kValues];
#pragma unroll
  for (int i = 0; i < kValues; i += kWidth) {
    const int col = col0 + i * kGroup;
    if constexpr (kWidth == 4) {
      float4 four = {minus_infinity(), minus_infinity(), minus_infinity(), minus_infinity()};
      if (col < C) four = *reinterpret_cast<const float4*>(from + col);
      v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
    } else {
      v[i] = col < C ? from[col] : minus_infinity();
    }
  }
#pragma unroll(kValues < 16 ? 4 : 32 / kValues)
  for (int slice = 1; slice < slices; ++slice) {
    from += static_cast<size_t>(B) * C;
#pragma unroll
    for (int i = 0; i < kValues; i += kWidth) {
      const int col = col0 + i * kGroup;
      if constexpr (kWidth == 4) {
        float4 four = {};
        if (col < C) four = *reinterpret_cast<const float4*>(from + col);
        v[i] += four.x, v[i + 1] += four.y, v[i + 2] += four.z, v[i + 3] += four.w;
      } else {
        v[i] += col < C ? from[col] : 0;
      }
    }
  }
  float largest = v[0];
#pragma unroll
  for (int i = 1; i < kValues; ++i) largest = fmaxf(largest, v[i]);
  largest = lanes_max<32>(largest);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) sum += v[i] = expf(v[i] - base_of(largest));
  sum = lanes_sum<32>(sum);
  float factor;
  if constexpr (kGroup == 32) {
    factor = 1 / sum;
  } else {
    const MaxSum all = block_merge<kGroup / 32>({largest, sum});
    factor = rebase(largest, all.largest) / all.sum;
  }
#pragma unroll
  for (int i = 0; i < kValues; i += kWidth) {
    const int col = col0 + i * kGroup;
    if (col >= C) continue;
    if constexpr (kWidth == 4) {
      store_four(to + col,
                 {v[i] * factor, v[i + 1] * factor, v[i + 2] * factor, v[i + 3] * factor});
    } else {
      to[col] = T(v[i] * factor);
    }
  }
}

/// Writes the maximum and the sum of a part of a row to `parts`: of part blockIdx.y (of gridDim.y)
/// of row blockIdx.x. With several slices a logit is the sum of `slices` numbers that lie gridDim.x
/// * C apart. The block adds these up first, and writes the logits to `out`.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    sum_row_parts(const float* logits, float* out, float2* parts, int C, int slices) {
  start_next_kernel();
  wait_for_previous_kernel();
  constexpr int kValues = kPartColumns / kThreads;
  const size_t start = static_cast<size_t>(blockIdx.x) * C;
  const size_t stride = static_cast<size_t>(gridDim.x) * C;
  const int first = blockIdx.y * kPartColumns + threadIdx.x;
  float v[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int col = first + i * kThreads;
    v[i] = col < C ? logits[start + col] : minus_infinity();
  }
  for (int slice = 1; slice < slices; ++slice) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int col = first + i * kThreads;
      if (col < C) v[i] += logits[slice * stride + start + col];
    }
  }
  float largest = minus_infinity(), sum = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int col = first + i * kThreads;
    if (slices > 1 && col < C) out[start + col] = v[i];
    largest = fmaxf(largest, v[i]);
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) sum += expf(v[i] - base_of(largest));
  const MaxSum all = block_merge<kThreads / 32>(warp_merge({largest, sum}));
  if (threadIdx.x == 0)
    parts[static_cast<size_t>(blockIdx.x) * gridDim.y + blockIdx.y] = {all.largest, all.sum};
}

/// Turns logits (B, C) into probabilities, rounded to T, in place (of fp32) or not. A block has
/// kPartColumns columns of row blockIdx.x. It reads all of the row's `count` maxima and sums, and
/// merges them.
template <int kThreads, typename T>
__global__ void __launch_bounds__(kThreads)
    finish_columns(const float* logits, T* out, const float2* parts, int C, int count) {
  start_next_kernel();
  wait_for_previous_kernel();
  constexpr int kValues = kPartColumns / kThreads;
  const size_t start = static_cast<size_t>(blockIdx.x) * C;
  const int first = blockIdx.y * kPartColumns + threadIdx.x;
  float v[kValues];  // The logits are on their way while the maxima and sums come.
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    v[i] = first + i * kThreads < C ? logits[start + first + i * kThreads] : 0;
  }
  const float2* of_row = parts + static_cast<size_t>(blockIdx.x) * count;
  MaxSum part = {minus_infinity(), 0};
  for (int i = threadIdx.x; i < count; i += kThreads) {
    part = merge(part, {of_row[i].x, of_row[i].y});
  }
  const MaxSum all = block_merge<kThreads / 32>(warp_merge(part));
  const float base = base_of(all.largest), factor = 1 / all.sum;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (first + i * kThreads < C) out[start + first + i * kThreads] = T(expf(v[i] - base) * factor);
  }
}

/// Rows longer than this do not fit into a block's registers.
constexpr int kLongestInRegisters = 8192;

/// probs = softmax(logits). The logits are (B, C) or, as sums of `slices` numbers each, (slices, B,
/// C). A warp or a block has a row. Several blocks share a row of more than kLongestInRegisters
/// columns: a first kernel writes the maximum and the sum of each part to `parts` (B, C /
/// kPartColumns), and a second one reads the logits again. Only probabilities in fp32 may come of
/// several slices, whose sums are written in their place.
template <typename T>
void softmax(const float* logits, T* probs, const SoftmaxShape& shape, float2* parts,
             int slices = 1, cudaStream_t stream = nullptr) {
  const int B = static_cast<int>(shape.rows), C = static_cast<int>(shape.classes);
  if (C > kLongestInRegisters) {
    const dim3 grid(B, blocks_for(C, kPartColumns));
    float* sums = nullptr;
    if constexpr (std::is_same_v<T, float>) sums = probs;
    launch_clusters_on(stream, sum_row_parts<kSoftmaxThreads>, 1, true, grid, kSoftmaxThreads, 0,
                       logits, sums, parts, C, slices);
    launch_clusters_on(stream, finish_columns<kSoftmaxThreads, T>, 1, true, grid, kSoftmaxThreads,
                       0, slices > 1 ? sums : logits, probs, parts, C, static_cast<int>(grid.y));
    return;
  }
  const unsigned warps = blocks_for(B, kSoftmaxThreads / 32);
  const auto launch = [&](auto* kernel, unsigned count) {
    launch_clusters_on(stream, kernel, 1, true, count, kSoftmaxThreads, 0, logits, probs, B, C,
                       slices);
  };
  if (C % 4 != 0 && C <= 32) {
    launch(softmax_rows<32, 1, 1, T>, warps);
  } else if (C <= 128) {
    launch(C % 4 != 0 ? softmax_rows<32, 4, 1, T> : softmax_rows<32, 4, 4, T>, warps);
  } else if (C <= 1024 && B <= 512) {  // few rows: more threads for each
    launch(C % 4 != 0 ? softmax_rows<256, 4, 1, T> : softmax_rows<256, 4, 4, T>, B);
  } else if (C <= 1024) {
    launch(C % 4 != 0 ? softmax_rows<32, 32, 1, T> : softmax_rows<32, 32, 4, T>, warps);
  } else if (C <= 2048) {
    launch(C % 4 != 0 ? softmax_rows<256, 8, 1, T> : softmax_rows<256, 8, 4, T>, B);
  } else if (C <= 4096) {
    launch(C % 4 != 0 ? softmax_rows<256, 16, 1, T> : softmax_rows<256, 16, 4, T>, B);
  } else {
    launch(C % 4 != 0 ? softmax_rows<256, 32, 1, T> : softmax_rows<256, 32, 4, T>, B);
  }
}

}  // namespace operators::softmax
