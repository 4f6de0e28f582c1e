// What every call of the library does around its operator: it refuses what cannot be computed,
// carves the caller's workspace, and turns exceptions into a code and a sentence.
//
// To plan an operator takes longer than to launch it. So each host thread keeps the plans of the
// last descriptions that it has seen: an operator whose operands and workspace are those of
// whichever call is launched (Running). A plan holds host memory only, and no pointer of a call is
// used in a later one. What the driver has answered to its launches (primitives::Answers) it keeps
// for the context alone that it was planned in: after cudaDeviceReset() the device has another one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>
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
/// Refuses a GPU that is not of compute capability 9.0, or is taken for another one.
void check_hopper(const char* name);
/// Refuses a GPU that is of a compute capability below this one, such as 80, or is taken for one.
void check_capability(const char* name, int least);

/// The pointers of the call that a plan is launched for.
struct Running {
  void* operands[16] = {};  ///< in the order of its arguments
  char* workspace = nullptr;
  uint64_t number = 0;  ///< of the plan's call
};

/// The operands of whichever call is launched, by their places among its arguments.
class Operands {
 public:
  explicit Operands(const Running& running) : running_(&running) {}

  /// For launches: between two calls it says nothing.
  template <typename T>
  T* at(int place) const {
    return static_cast<T*>(running_->operands[place]);
  }
  template <typename T>
  Memory<T> memory(int place, int64_t count) const {
    return Memory<T>([of = *this, place] { return of.at<T>(place); }, static_cast<size_t>(count));
  }

 private:
  const Running* running_;
};

/// Constructs an operator with memory of a workspace, and says in which ways it computes.
using Operator = std::function<std::vector<Way>(const Workspace&, const Operands&)>;

/// How many bytes the operator takes of a workspace.
size_t workspace_bytes(const Operator& make);

/// What plans are told apart by: all that a call has but its pointers.
class Key {
 public:
  /// name: a literal. variant: what else there is to tell, such as a NULL that is allowed.
  template <typename Description>
  Key(const char* name, const Description& description, cudaStream_t stream, int variant)
      : stream_(stream), words_(kFirst + sizeof description / 8) {
    static_assert(std::is_trivially_copyable_v<Description>);
    static_assert(sizeof description % 8 == 0 && kFirst + sizeof description / 8 <= kMostWords);
    Description copy = description;
#if __has_builtin(__builtin_clear_padding)
    __builtin_clear_padding(&copy);  // elsewhere, other padding is another plan
#endif
    std::memcpy(all_ + kFirst, &copy, sizeof copy);
    finish(name, variant);
  }

  bool operator==(const Key& other) const {
    return hash_ == other.hash_ && words_ == other.words_ &&
           std::memcmp(all_, other.all_, 8 * words_) == 0;
  }
  uint64_t hash() const { return hash_; }
  int device() const { return device_; }
  uint64_t context() const { return all_[1]; }
  cudaStream_t stream() const { return stream_; }
  /// Without stream and context: whatever these are, the same way is the fastest.
  std::string without_stream() const {
    return {reinterpret_cast<const char*>(all_ + 2), 8 * (words_ - 2)};
  }

 private:
  static constexpr size_t kFirst = 4, kMostWords = 32;
  void finish(const char* name, int variant);

  cudaStream_t stream_;
  int device_ = 0;
  size_t words_;
  uint64_t hash_ = 0;
  uint64_t all_[kMostWords];  ///< stream, context, name, device and variant; the description
};

/// An operator that is ready to be launched, for any pointers.
class Plan;
/// That of this thread with this key; nullptr if there is none.
Plan* find_plan(const Key& key);
/// Throws a Refusal if there is no way to compute it.
Plan& add_plan(const Key& key, const Operator& make);

/// The plan for a description. What is refused for the description alone, check(description) has
/// refused before it was planned. operator_of(description) is its Operator.
template <typename Description, typename OperatorOf>
Plan& plan_of(const char* name, const Description* description, void (*check)(const Description*),
              const OperatorOf& operator_of, cudaStream_t stream, int variant = 0) {
  check_description(name, description, sizeof *description);
  const Key key(name, *description, stream, variant);
  if (Plan* const plan = find_plan(key)) return *plan;
  check(description);
  return add_plan(key, operator_of(*description));
}

/// Launches the plan: the way that fk_tune() has found, or that should take the least time. Before
/// that it refuses arguments, or a workspace, that are NULL, not aligned, not memory of the current
/// device, or overlap what is written.
void launch(Plan& plan, std::span<const Argument> arguments, void* workspace, size_t bytes);

/// The code for the exception that is being handled, whose sentence fk_last_error() then has.
int code_of_exception() noexcept;

/// Runs a call to its end and returns its code.
template <typename Call>
int guarded(const Call& call) noexcept {
  try {
    call();
    return FK_OK;
  } catch (...) {
    return code_of_exception();
  }
}

}  // namespace operators::library
