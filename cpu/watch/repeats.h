// Launches that are not run again. Programs that time a kernel launch it a hundred or a thousand
// times on the same inputs. A launch that finds all memory as an earlier one of the same kernel,
// with the same arguments, has found it may do what that one did. So what that one has written is
// written once more, and the kernel does not run.
//
// Only for programs of a reader's own (ledger.h), and only for launches that are not counted any
// more. Looking at the memory may take some part of the time that the launches took before, so a
// program whose launches all differ loses little.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace cuda_cpu {

struct Launch;

/// Around a launch, while the device's memory is open.
class Repeat {
 public:
  /// If an earlier launch found the same, does what that one did.
  explicit Repeat(const Launch& launch);
  ~Repeat();
  Repeat(const Repeat&) = delete;
  Repeat& operator=(const Repeat&) = delete;

  /// Whether it was done, and the launch need not run.
  bool done() const { return done_; }
  /// The launch has run, in so many seconds.
  void ran(const Launch& launch, double seconds);

 private:
  struct Found;
  std::string key_;
  std::unique_ptr<Found> found_;  ///< what the launch finds, if that is to be remembered
  bool done_ = false;
};

/// Something other than a kernel writes into the allocation that `memory` is in. Null: into any.
void repeats_written(const void* memory);

}  // namespace cuda_cpu
