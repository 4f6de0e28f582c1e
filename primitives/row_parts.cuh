// What is shared by those that have parts of the same row: lanes of a warp, and blocks.
#pragma once

#include <cuda_runtime.h>

namespace primitives {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline float minus_infinity() { return __int_as_float(0xff800000); }

/// The maximum over each group of kLanes neighbouring lanes, in all of them.
template <int kLanes>
__device__ float lanes_max(float value) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2)
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, i));
  return value;
}

template <int kLanes>
__device__ float lanes_sum(float value) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) value += __shfl_xor_sync(kAllLanes, value, i);
  return value;
}

/// True in the last of `blocks` blocks to call this: it sees what the others had written before
/// they did. No block waits for another one, so it does not matter how many of them run at a time.
/// `arrived` is 0 before the launch, and again after it.
__device__ inline bool is_last_block(unsigned* arrived, int blocks) {
  __threadfence();
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    last = atomicAdd(arrived, 1) == static_cast<unsigned>(blocks - 1);
    if (last) *arrived = 0;  // for the next launch
  }
  last = __syncthreads_or(last) != 0;
  __threadfence();
  return last;
}

/// What softmax has to know of a row, or of a part of it: the largest logit, and the sum of
/// exp(logit - largest). Of nothing at all: -inf and 0.
struct MaxSum {
  float largest, sum;
};

/// What exponentials are relative to: the maximum, unless that is -inf; then all of them are 0.
__device__ inline float base_of(float largest) { return largest == minus_infinity() ? 0 : largest; }

}  // namespace primitives
