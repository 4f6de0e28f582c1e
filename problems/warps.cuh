// What the references' kernels find of a row that a warp owns.
#pragma once

#include <cuda_runtime.h>

namespace problems {

__device__ inline double warp_max(double value) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value = fmax(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  }
  return value;
}

__device__ inline double warp_sum(double value) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  return value;
}

}  // namespace problems
