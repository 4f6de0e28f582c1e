// What every call of the library does around its operator: it refuses what cannot be computed,
// carves the caller's workspace, and turns exceptions into a code and a sentence.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "operators/include/fused_kernels.h"
#include "operators/operands.h"

namespace operators::library {

/// Why a call is refused: thrown before anything is written.
struct Refusal {
  fk_status code;
  std::string sentence;
};

/// What a call reads or writes. `alignment` in bytes.
struct Argument {
  const char* name;
  const void* data;
  size_t bytes;
  size_t alignment = 16;
  bool written = false;
};

/// A size of a description, and the most that it may be.
struct Size {
  const char* name;
  int64_t value, most;
};

/// Refuses a description that is not there or of another size.
void check_description(const char* name, const void* description, size_t size);
/// Refuses sizes below 1 or above their `most`.
void check_sizes(const std::vector<Size>& sizes);
/// Refuses a GPU that is not of compute capability 9.0.
void check_hopper(const char* name);
/// Constructs an operator whose memory comes from a workspace, and says in which ways it computes.
using Operator = std::function<std::vector<Way>(const Workspace&)>;

/// How many bytes the operator takes of a workspace.
size_t workspace_bytes(const Operator& make);
/// Launches the operator's way that should take the least time. Before that it refuses arguments,
/// or a workspace, that are NULL, not aligned, not memory of the current device, or overlap what is
/// written.
void launch(const Operator& make, std::vector<Argument> arguments, void* workspace, size_t bytes,
            cudaStream_t stream);

/// Runs a call to its end and returns its code.
int guarded(const std::function<void()>& call) noexcept;

/// Memory of an operand; of a query, where nothing is launched, nullptr.
template <typename T>
Memory<T> memory(const void* data, int64_t count) {
  T* const elements = static_cast<T*>(const_cast<void*>(data));
  return Memory<T>([elements] { return elements; }, static_cast<size_t>(count));
}

}  // namespace operators::library
