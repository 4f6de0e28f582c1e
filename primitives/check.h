// How host functions of primitives/ and operators/ say that a call failed: they throw an Error. If
// a launch fails, a lesson's table says so in its row. If planning a row fails, the lesson ends
// with one line and exit code 3. And how these functions ask the driver what it may have answered
// before.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <type_traits>

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

/// Keeps answers of the driver that depend on nothing but the question. To ask for a tensor map, or
/// for what is known of a kernel, takes the host time at each launch.
class Answers {
 public:
  virtual ~Answers() = default;
  /// Writes the answer, if it is kept, and says whether it is.
  virtual bool find(const void* question, size_t bytes, void* answer, size_t answer_bytes) = 0;
  virtual void keep(const void* question, size_t bytes, const void* answer,
                    size_t answer_bytes) = 0;
};

/// Those of this host thread, while somebody launches who keeps them (operators/library). A lesson
/// keeps none: there the driver is asked each time.
inline thread_local Answers* kept_answers = nullptr;

/// ask(), or what it has returned to the same question before. Questions are compared byte by byte.
template <typename Answer, typename Question, typename Ask>
Answer answer_to(const Question& question, const Ask& ask) {
  static_assert(std::has_unique_object_representations_v<Question>);
  static_assert(std::is_trivially_copyable_v<Answer>);
  Answers* const kept = kept_answers;
  if (!kept) return ask();
  Answer answer;
  if (kept->find(&question, sizeof question, &answer, sizeof answer)) return answer;
  answer = ask();
  kept->keep(&question, sizeof question, &answer, sizeof answer);
  return answer;
}

}  // namespace primitives
