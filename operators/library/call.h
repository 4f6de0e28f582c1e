// What every call of the library does around its operator: it refuses what cannot be computed,
// carves the caller's workspace, and turns exceptions into a code and a sentence.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
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
/// Refuses a type that is not one of these.
void check_type(const char* name, int type, std::initializer_list<fk_type> types);
/// Refuses sizes below 1 or above their `most`.
void check_sizes(const std::vector<Size>& sizes);
/// Refuses a size that is not a multiple of this one.
void check_multiple(const char* name, int64_t value, int64_t of);
/// A row stride of a description, in elements. Refuses what is neither 0 nor a multiple of 16 bytes
/// that is as far as `cols` elements of `element` bytes. Returns how far rows are apart.
int64_t check_stride(const char* name, int64_t stride, int64_t cols, size_t element);
/// How many elements there are from a matrix's first to its last.
constexpr int64_t extent(int64_t rows, int64_t cols, int64_t stride) {
  return (rows - 1) * stride + cols;
}
constexpr int64_t or_dense(int64_t stride, int64_t cols) { return stride == 0 ? cols : stride; }
/// Refuses a GPU that is not of compute capability 9.0.
void check_hopper(const char* name);
/// Refuses a GPU of a compute capability below this one, such as 80.
void check_capability(const char* name, int least);
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
