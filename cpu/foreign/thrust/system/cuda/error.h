// In the place of CCCL's header: errors of the runtime as those of thrust.

#pragma once

#include <thrust/system/error_code.h>

#include <string>

#include "cuda_runtime.h"

namespace thrust::system {

inline const error_category& cuda_category() {
  struct Category final : error_category {
    const char* name() const override { return "cuda"; }
    std::string message(int error) const override {
      const auto which = static_cast<cudaError_t>(error);
      return std::string(cudaGetErrorName(which)) + ": " + cudaGetErrorString(which);
    }
  };
  static const Category category;
  return category;
}

}  // namespace thrust::system

namespace thrust {
using system::cuda_category;
namespace cuda {
using system::cuda_category;
}
}  // namespace thrust
