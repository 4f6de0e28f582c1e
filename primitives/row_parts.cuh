// For those that have parts of one row, or of one result: lanes of a warp, or blocks.
#pragma once

#include <cuda_runtime.h>

namespace primitives {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline float minus_infinity() { return __int_as_float(0xff800000); }

/// The maximum over each group of kLanes neighbouring lanes. All lanes of the group get it.
template <int kLanes>
__device__ float lanes_max(float value) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2)
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, i));
  return value;
}

/// The sum over each group of kLanes neighbouring lanes. All lanes of the group get it.
template <int kLanes>
__device__ float lanes_sum(float value) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) value += __shfl_xor_sync(kAllLanes, value, i);
  return value;
}

/// All threads of `blocks` blocks call this. It returns true in the block that calls it last, and
/// there what the other blocks had written before they called it can be read. No block waits for
/// another one, so it does not matter how many of them run at a time. `count` is 0 before the
/// launch, and again after it.
__device__ inline bool is_last_block(unsigned* count, int blocks) {
  __threadfence();
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    last = atomicAdd(count, 1) == static_cast<unsigned>(blocks - 1);
    if (last) *count = 0;  // for the next launch
  }
  last = __syncthreads_or(last) != 0;
  __threadfence();
  return last;
}

/// What softmax has to know of a row, or of a part of it: the largest logit, and the sum of
/// exp(logit - largest). For the logits 3 and 1 that is 3 and 1.135. If there are no logits at all,
/// it is -infinity and 0.
struct MaxSum {
  float largest, sum;
};

/// What exponentials are relative to: the maximum. If that is -infinity it is 0, since -infinity
/// minus -infinity would be NaN. Then all exponentials are 0.
__device__ inline float base_of(float largest) { return largest == minus_infinity() ? 0 : largest; }

}  // namespace primitives
