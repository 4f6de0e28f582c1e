// Fibers: stacks of their own that one OS thread switches between.

#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>

#include "cpu/execution/sanitizers.h"

namespace cuda_cpu {

// jump_fcontext() of Boost.Context ends with a jump to where the other fiber was. The CPU pairs
// calls with returns, so it then predicts each return of the functions that led there wrongly. A
// switch that ends with a return does not have this price. The sanitizers have theirs by
// Boost.Context.
#if defined(__x86_64__) && !defined(CUDA_CPU_TSAN) && !defined(CUDA_CPU_ASAN)
#define CUDA_CPU_OWN_SWITCH
#endif

/// A stack together with the place where its execution is suspended.
///
/// A default-constructed fiber stands for the OS thread itself: it owns no stack, and it is filled
/// in by the first switch away from it. A fiber stays on the OS thread that created it.
class Fiber {
 public:
  /// Of a stack, in bytes: cpu/c/stack.cpp.
  static const std::size_t kStackSize;

  /// The OS thread that runs the constructor.
  Fiber();

  /// A new stack that starts in `entry` at the first switch to it. `entry` must never return.
  /// `number` staggers the stacks in memory, so that many of them do not share few cache sets.
  Fiber(void (*entry)(), std::size_t number);

  ~Fiber();

  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Suspends this fiber, which must be the running one, and continues `other`. Returns when
  /// something switches back.
  void switch_to(Fiber& other);

  /// Forgets whatever the suspended fiber was doing; the next switch starts `entry` anew. Objects
  /// on the old stack are not destroyed.
  void restart();

  /// It has to restart() before it runs again. Under ThreadSanitizer that takes a third of a
  /// millisecond (a new identity has 786 KB), and many fibers are never used again.
  bool stale = false;

  /// Who the fiber is for ThreadSanitizer.
  CUDA_CPU_NO_TSAN void* tsan_identity() const { return tsan_identity_; }

  /// Whether this is memory of its stack.
  bool has_on_stack(const void* address) const {
    return static_cast<std::size_t>(static_cast<const char*>(address) - stack_) < kStackSize;
  }

  /// Where the fiber is suspended: the memory that the next switch to it will read.
  CUDA_CPU_NO_TSAN const void* resume_point() const { return context_; }

 private:
  using Transfer = boost::context::detail::transfer_t;

  static void start(Transfer transfer);
  [[maybe_unused]] static void start_entered();
  static void arrive(Transfer transfer, void* fake_stack);

  void (*entry_)() = nullptr;
  boost::context::detail::fcontext_t context_ = nullptr;
  char* mapping_ = nullptr;
  char* stack_ = nullptr;
  std::size_t stack_size_ = 0;
  void* tsan_identity_ = nullptr;
};

}  // namespace cuda_cpu
