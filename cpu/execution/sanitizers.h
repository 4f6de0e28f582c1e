// Which sanitizer this build runs under, and the sanitizer calls that the backend needs.
//
// Outside of a sanitizer build every function here is empty.

#pragma once

#include <cstddef>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_CPU_ASAN 1
#endif
#if __has_feature(thread_sanitizer)
#undef CUDA_CPU_TSAN
#define CUDA_CPU_TSAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define CUDA_CPU_ASAN 1
#endif
#if defined(__SANITIZE_THREAD__) && !defined(CUDA_CPU_COUNTS)  // which has functions of its own
#undef CUDA_CPU_TSAN
#define CUDA_CPU_TSAN 1
#endif

#if defined(CUDA_CPU_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(CUDA_CPU_TSAN)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

/// Marks a function of the backend whose own bookkeeping ThreadSanitizer must not watch: it runs in
/// the name of many CUDA threads that are unordered for the sanitizer but share one OS thread.
#if defined(CUDA_CPU_TSAN)
#define CUDA_CPU_NO_TSAN __attribute__((noinline, no_sanitize("thread")))
#else
#define CUDA_CPU_NO_TSAN
#endif

/// A function of its own would be entered as one identity and left as another.
#define CUDA_CPU_INTO_CALLER inline __attribute__((always_inline))

namespace cuda_cpu {

#if defined(CUDA_CPU_TSAN)
inline constexpr bool kTsan = true;
#else
inline constexpr bool kTsan = false;
#endif

#if defined(CUDA_CPU_ASAN) || defined(CUDA_CPU_TSAN)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// Everything the calling CUDA thread did so far happens before a later tsan_acquire(object).
CUDA_CPU_INTO_CALLER void tsan_release([[maybe_unused]] void* object) {
#if defined(CUDA_CPU_TSAN)
  __tsan_release(object);
#endif
}

/// Orders the caller after every earlier tsan_release(object).
CUDA_CPU_INTO_CALLER void tsan_acquire([[maybe_unused]] void* object) {
#if defined(CUDA_CPU_TSAN)
  __tsan_acquire(object);
#endif
}

/// The sanitizer's identity of the running thread or fiber; null without ThreadSanitizer.
CUDA_CPU_INTO_CALLER void* tsan_current() {
#if defined(CUDA_CPU_TSAN)
  return __tsan_get_current_fiber();
#else
  return nullptr;
#endif
}

/// From here on the OS thread acts as `identity` for ThreadSanitizer, without any ordering.
CUDA_CPU_INTO_CALLER void tsan_become([[maybe_unused]] void* identity) {
#if defined(CUDA_CPU_TSAN)
  __tsan_switch_to_fiber(identity, __tsan_switch_to_fiber_no_sync);
#endif
}

/// While one exists, ThreadSanitizer does not watch what the calling identity does: bookkeeping, in
/// the name of a CUDA thread, in memory that is the worker's. (That of the C++ library, too.)
class Unwatched {
 public:
  CUDA_CPU_INTO_CALLER Unwatched() {
#if defined(CUDA_CPU_TSAN)
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
  }
  CUDA_CPU_INTO_CALLER ~Unwatched() {
#if defined(CUDA_CPU_TSAN)
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
  }
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};

}  // namespace cuda_cpu
