// How host functions of primitives/ and operators/ say that a call failed: by an exception, which
// whoever calls them turns into what his program does then. A lesson's table says so in the row
// that was launched; while rows are planned, the lesson ends with one line and exit code 3.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace primitives {

/// A call of CUDA's that failed, or a device that cannot do what is asked; what() is a sentence.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Throws an Error that names the call, if `status` says that it failed.
inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw Error(std::string(call) + ": " + cudaGetErrorString(status) + " (" +
              cudaGetErrorName(status) + ")");
}

}  // namespace primitives
