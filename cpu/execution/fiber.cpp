#include "cpu/execution/fiber.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#if defined(CUDA_CPU_OWN_SWITCH)
// Keeps the registers that a function has to keep on the stack, and where that is in *own; goes on
// where `other` says the same of another stack.
extern "C" void cuda_cpu_switch_stacks(void** own, void* other);
asm(R"(
  .text
  .hidden cuda_cpu_switch_stacks
  .globl cuda_cpu_switch_stacks
  .type cuda_cpu_switch_stacks, @function
cuda_cpu_switch_stacks:
  .cfi_startproc
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  .cfi_def_cfa_offset 56
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  .cfi_def_cfa_offset 8
  ret
  .cfi_endproc
  .size cuda_cpu_switch_stacks, . - cuda_cpu_switch_stacks
)");
#endif

namespace cuda_cpu {

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kStagger = 320;
constexpr std::size_t kStaggers = 12;

/// The fiber that is being entered for the first time. Only valid during that switch.
thread_local Fiber* entered = nullptr;

/// ./try looks for the first words.
[[noreturn]] void no_room() {
  std::perror("cuda_cpu: no room for the stack of one more CUDA thread");
  std::abort();
}

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
    no_room();
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
      no_room();
    }
  }
  tsan_identity_ = __tsan_create_fiber(0);
#endif
#if defined(CUDA_CPU_ASAN)
  __asan_unpoison_memory_region(stack_, stack_size_);
#endif
#if defined(CUDA_CPU_OWN_SWITCH)
  // What the switch finds: six registers, where it returns to, and that nobody has called that.
  void** const top = reinterpret_cast<void**>(stack_ + stack_size_);
  std::fill(top - 8, top, nullptr);
  top[-2] = reinterpret_cast<void*>(start_entered);
  context_ = top - 8;
#else
  context_ = boost::context::detail::make_fcontext(stack_ + stack_size_, stack_size_, start);
#endif
}

CUDA_CPU_NO_TSAN void Fiber::switch_to(Fiber& other) {
  [[maybe_unused]] void* fake_stack = nullptr;
#if defined(CUDA_CPU_ASAN)
  __sanitizer_start_switch_fiber(&fake_stack, other.stack_, other.stack_size_);
#endif
  tsan_become(other.tsan_identity_);
  entered = &other;
#if defined(CUDA_CPU_OWN_SWITCH)
  cuda_cpu_switch_stacks(&context_, other.context_);
#else
  arrive(boost::context::detail::jump_fcontext(other.context_, this), fake_stack);
#endif
}

void Fiber::start_entered() { entered->entry_(); }

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
