// Asynchronous copies from global to shared memory: the __pipeline_ functions.
//
// To show a missing wait, a copy does nothing at first: it reads its source and writes its target
// when the calling thread waits for it, or else when the thread ends. Other threads still need a
// barrier after the wait.

#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/execution/cuda_cpu.h"

/// Starts a copy of `size` bytes, 4, 8 or 16, to which both pointers must be aligned. The last
/// `zfill` of them become zeros instead.
inline void __pipeline_memcpy_async(void* target, const void* source, std::size_t size,
                                    std::size_t zfill = 0) {
  if ((size != 4 && size != 8 && size != 16) || zfill > size) {
    cuda_cpu::fail(
        "__pipeline_memcpy_async() of %zu bytes, %zu of them zeros: it copies 4, 8 or 16", size,
        zfill);
  }
  if (reinterpret_cast<std::uintptr_t>(target) % size != 0 ||
      reinterpret_cast<std::uintptr_t>(source) % size != 0) {
    cuda_cpu::fail("__pipeline_memcpy_async() of %zu bytes from %p to %p: not aligned", size,
                   source, target);
  }
  cuda_cpu::async_copies().add({target, source, size, zfill});
}

/// Makes the copies since the previous call one batch.
inline void __pipeline_commit() { cuda_cpu::async_copies().commit(); }

/// Waits until all batches of the calling thread but the last `pending` have landed.
inline void __pipeline_wait_prior(std::size_t pending) { cuda_cpu::async_copies().wait(pending); }
