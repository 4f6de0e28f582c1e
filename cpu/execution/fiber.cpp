#include "cpu/execution/fiber.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

namespace cuda_cpu {

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kStagger = 320;
constexpr std::size_t kStaggers = 12;

/// The fiber that is being entered for the first time. Only valid during that switch.
thread_local Fiber* entered = nullptr;

}  // namespace

Fiber::Fiber() {
  pthread_attr_t attributes;
  void* base = nullptr;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &base, &stack_size_);
  pthread_attr_destroy(&attributes);
  stack_ = static_cast<char*>(base);
  tsan_identity_ = tsan_current();
}

Fiber::Fiber(void (*entry)(), std::size_t number) : entry_(entry) {
  // One page more at the low end stays inaccessible, so that a stack overflow is a clean crash.
  void* mapping = mmap(nullptr, kPage + kStackSize, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED || mprotect(mapping, kPage, PROT_NONE) != 0) {
    std::perror("cuda_cpu: no memory for the stack of a CUDA thread");
    std::abort();
  }
  mapping_ = static_cast<char*>(mapping);
  stack_ = mapping_ + kPage;
  stack_size_ = kStackSize - number % kStaggers * kStagger;
  restart();
}

Fiber::~Fiber() {
  if (!entry_) return;
#if defined(CUDA_CPU_TSAN)
  __tsan_destroy_fiber(tsan_identity_);
#endif
  munmap(mapping_, kPage + kStackSize);
}

CUDA_CPU_NO_TSAN void Fiber::restart() {
  stale = false;
#if defined(CUDA_CPU_TSAN)
  if (tsan_identity_) {
    __tsan_destroy_fiber(tsan_identity_);
    // For ThreadSanitizer this is new memory: what the old identity wrote there is forgotten.
    // Beyond what a kernel may use without a sanitizer are only the sanitizer's own calls.
    constexpr std::size_t kUsed = 64 << 10;
    if (mmap(stack_ + kStackSize - kUsed, kUsed, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
      std::perror("cuda_cpu: no memory for the stack of a CUDA thread");
      std::abort();
    }
  }
  tsan_identity_ = __tsan_create_fiber(0);
#endif
#if defined(CUDA_CPU_ASAN)
  __asan_unpoison_memory_region(stack_, stack_size_);
#endif
  context_ = boost::context::detail::make_fcontext(stack_ + stack_size_, stack_size_, start);
}

CUDA_CPU_NO_TSAN void Fiber::switch_to(Fiber& other) {
  [[maybe_unused]] void* fake_stack = nullptr;
#if defined(CUDA_CPU_ASAN)
  __sanitizer_start_switch_fiber(&fake_stack, other.stack_, other.stack_size_);
#endif
  tsan_become(other.tsan_identity_);
  entered = &other;
  arrive(boost::context::detail::jump_fcontext(other.context_, this), fake_stack);
}

CUDA_CPU_NO_TSAN void Fiber::start(Transfer transfer) {
  Fiber* self = entered;
  arrive(transfer, nullptr);
  self->entry_();
}

CUDA_CPU_NO_TSAN void Fiber::arrive(Transfer transfer, [[maybe_unused]] void* fake_stack) {
#if defined(CUDA_CPU_ASAN)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  static_cast<Fiber*>(transfer.data)->context_ = transfer.fctx;
}

}  // namespace cuda_cpu
