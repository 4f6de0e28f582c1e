// What every call of the library does around its operator: it refuses what cannot be computed,
// carves the caller's workspace, and turns exceptions into a code and a sentence.
//
// To plan an operator takes longer than to launch it. A plan is an operator whose operands and
// workspace are those of whichever call is launched (Running). It holds host memory only, and no
// pointer of a call is used in a later one. What the driver has answered to its launches
// (primitives::Answers) it keeps for the context alone that it was planned in: after
// cudaDeviceReset() the device has another one. A caller may own plans (fk_plan). For all other
// calls each host thread keeps the plans of the last descriptions that it has seen.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

#include "operators/caller.h"
#include "operators/include/fused_kernels.h"

namespace operators::library {

/// Why a call is refused: thrown before anything is written.
struct Refusal {
  fk_status code;
  std::string sentence;
};

/// An operand of a function, which reads or writes it.
struct Argument {
  const char* name;
  size_t bytes;
  bool written = false;
  bool absent = false;    ///< its pointer has to be NULL, as the description says
  bool optional = false;  ///< may be NULL
};

inline constexpr int64_t kMostElements = int64_t{1} << 60;  ///< from an operand's first to its last

/// A size of a description, and the most that it may be.
struct Size {
  const char* name;
  int64_t value, most;
};

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

/// Constructs an operator with what the caller gives it, and says in which ways it computes.
using Operator = std::function<std::vector<Way>(const Caller&, const Operands&)>;

/// What a function does with a description that has been checked.
struct Task {
  Operator make;
  std::vector<Argument> arguments;  ///< as the function has them between description and workspace
};

/// How many bytes of a description every caller has to know: up to its last field for which 0 is no
/// default. These numbers never change. A field that is added later has 0 as its default, and
/// starts at a multiple of 8, behind what may be padding now: there any caller's compiler may have
/// left anything.
constexpr size_t shortest(const fk_product*) { return 40; }     // up to depth
constexpr size_t shortest(const fk_gating*) { return 40; }      // up to hidden
constexpr size_t shortest(const fk_attention*) { return 168; }  // as all that follow: whole
constexpr size_t shortest(const fk_attention_gradients*) { return 264; }
constexpr size_t shortest(const fk_diffusion*) { return 48; }
constexpr size_t shortest(const fk_softmax*) { return 40; }
constexpr size_t shortest(const fk_gradients*) { return 40; }
constexpr size_t shortest(const fk_clifford*) { return 48; }

/// The most bytes that this library knows of a description, and that a caller's may have.
constexpr size_t kMostKnown = 320, kMostDescription = 4096;

/// A function of the library that computes. task() throws a Refusal if no GPU, or not this one, can
/// do what the description asks for.
struct Function {
  const char* name;  ///< of its description
  size_t bytes, shortest;
  void (*clear_padding)(void* description);
  Task (*task)(const void* description);
};

/// The function whose task for a description is kTask(description).
template <typename Description, Task (*kTask)(const Description&)>
constexpr Function function_of(const char* name) {
  static_assert(std::is_trivially_copyable_v<Description>);
  static_assert(sizeof(Description) % 8 == 0 && sizeof(Description) <= kMostKnown);
  constexpr size_t least = shortest(static_cast<const Description*>(nullptr));
  const auto clear_padding = []([[maybe_unused]] void* description) {
#if __has_builtin(__builtin_clear_padding)  // elsewhere, other padding is another plan
    Description copy;
    std::memcpy(&copy, description, sizeof copy);
    __builtin_clear_padding(&copy);
    std::memcpy(description, &copy, sizeof copy);
#endif
  };
  const auto task = [](const void* description) {
    Description copy;
    std::memcpy(&copy, description, sizeof copy);
    return kTask(copy);
  };
  return {name, sizeof(Description), least, clear_padding, task};
}

/// One for each fk_function; each is defined beside its operator.
extern const Function product_forward, product_bias_forward, product_backward, gating_forward,
    gating_backward, gating_two_forward, gating_two_backward, gating_two_kept_forward,
    gating_two_kept_backward, attention_forward, attention_log_sums, diffusion_forward,
    diffusion_backward, softmax_forward, softmax_backward, gradients_forward, gradients_backward,
    clifford_forward, clifford_backward, clifford_connected_forward, clifford_connected_backward,
    clifford_connected_kept_forward, clifford_connected_kept_backward, clifford_layer_forward,
    clifford_layer_backward, cross_entropy_forward, cross_entropy_backward, attention_backward,
    diffusion_ragged_forward, diffusion_ragged_backward, gradients_ragged_forward,
    gradients_ragged_backward;

/// Says how many bytes of workspace the function needs, and returns a code.
int query(const Function& function, const void* description, size_t* bytes) noexcept;

/// Launches the function by a plan of this thread's, and returns a code: in the way that fk_tune()
/// has found, or that should take the least time. Before that it refuses operands, or a workspace,
/// that are NULL and not optional, not aligned, not memory of the current device, or overlap what
/// is written.
int call(const Function& function, const void* description,
         std::initializer_list<const void*> operands, void* workspace, size_t bytes,
         cudaStream_t stream) noexcept;

}  // namespace operators::library
