// Labels of rows: int64, as PyTorch has them, or int32.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "operators/operands.h"

namespace operators::cross_entropy {

/// Which type they are is the same for all threads, and a row has one label: kernels ask, and there
/// is no kernel for each type.
struct Labels {
  const void* data;
  bool in_32_bits;

  __device__ int64_t of(int64_t row) const {
    return in_32_bits ? static_cast<const int32_t*>(data)[row]
                      : static_cast<const int64_t*>(data)[row];
  }
  __device__ static bool is_class(int64_t label, int classes) {
    return label >= 0 && label < classes;
  }
};

/// The same before a launch.
struct LabelMemory {
  Memory<char> bytes;
  bool in_32_bits;

  Labels data() const { return {bytes.data(), in_32_bits}; }
};

}  // namespace operators::cross_entropy
