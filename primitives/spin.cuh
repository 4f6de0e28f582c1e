// For loops in which a thread waits for what other blocks of its launch do. Such a launch has only
// as many blocks as run at the same time. If one of them never does what another one waits for, the
// launch never ends.
//
// In a build by `scons debug=1` a thread that has waited for SPIN_LIMIT nanoseconds prints what it
// has waited for, and stops the launch. The CPU backend reports a deadlock.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cuda/atomic>

namespace primitives {

/// Nanoseconds of a clock that all threads of a GPU see. PTX ISA, "%globaltimer".
__device__ inline uint64_t nanoseconds() {
#ifdef CUDA_CPU
  return cuda_cpu::nanoseconds();
#else
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#endif
}

/// Stands beside a loop that waits, and knows what it waits for: `while (...) spin.again();`
struct Spin {
#if defined(CUDA_CPU) && !defined(SPIN_LIMIT)
  __device__ explicit Spin(const char* what) { cuda_cpu::waits_for(what); }
  __device__ ~Spin() { cuda_cpu::waits_for(nullptr); }
  __device__ void again() const {}
#elif defined(SPIN_LIMIT)
  const char* what;
  uint64_t start;
  __device__ explicit Spin(const char* what) : what(what), start(nanoseconds()) {}
  __device__ void again() const {
    if (nanoseconds() - start < SPIN_LIMIT) return;
    printf("block (%u,%u,%u), thread (%u,%u,%u) has waited too long for %s\n", blockIdx.x,
           blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, what);
    __trap();
  }
#else
  __device__ explicit Spin(const char*) {}
  __device__ void again() const {}
#endif
};

/// A number in memory in which the blocks of a launch count, or which they set to 1. Its operations
/// are atomic, with the memory orders of std::atomic, among all threads of the GPU.
using GridCount = cuda::atomic_ref<unsigned, cuda::thread_scope_device>;

/// Waits until the count is at least `least`. Then this thread can read what the threads that
/// raised the count, each by a release, had written before.
__device__ __forceinline__ void wait_for_count(const GridCount& count, unsigned least,
                                               const char* what) {
  const Spin spin(what);
  while (count.load(cuda::memory_order_acquire) < least) spin.again();
}

}  // namespace primitives
