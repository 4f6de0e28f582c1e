#include "cpu/runtime/device_heap.h"

#include <atomic>
#include <cstddef>
#include <iterator>
#include <map>
#include <mutex>

#include "cpu/execution/cuda_cpu.h"

namespace cuda_cpu {

namespace {

struct DeviceHeap {
  std::mutex mutex;
  std::map<std::uintptr_t, std::size_t> sizes;
};

DeviceHeap& heap() {
  static DeviceHeap* const heap = new DeviceHeap;
  return *heap;
}

std::atomic<bool> used = false;
/// What is noted takes memory, too.
thread_local bool noting = false;

}  // namespace

bool device_heap_used() { return used; }

bool in_device_heap(std::uintptr_t address) {
  if (!used) return false;
  std::lock_guard lock(heap().mutex);
  const auto next = heap().sizes.upper_bound(address);
  return next != heap().sizes.begin() && address - std::prev(next)->first < std::prev(next)->second;
}

[[maybe_unused]] static void* noted(void* memory, std::size_t size) {
  if (!memory || noting || !in_kernel()) return memory;
  noting = true;
  {
    std::lock_guard lock(heap().mutex);
    heap().sizes[reinterpret_cast<std::uintptr_t>(memory)] = size;
  }
  used = true;
  noting = false;
  return memory;
}

[[maybe_unused]] static void* forgotten(void* memory) {
  if (!memory || noting || !used) return memory;
  noting = true;
  {
    std::lock_guard lock(heap().mutex);
    heap().sizes.erase(reinterpret_cast<std::uintptr_t>(memory));
  }
  noting = false;
  return memory;
}

}  // namespace cuda_cpu

// Of lessons nobody asks for this: their kernels have no heap.
#if defined(CUDA_CPU_HAS_HEAP)

// The program calls the functions that begin with __wrap_ in the place of those without
// (own_program.py).

#define CUDA_CPU_NEW(NAME)                              \
  void* __real_##NAME(std::size_t size) __asm__(#NAME); \
  void* __wrap_##NAME(std::size_t size) { return cuda_cpu::noted(__real_##NAME(size), size); }
#define CUDA_CPU_DELETE(NAME)                      \
  void __real_##NAME(void* memory) __asm__(#NAME); \
  void __wrap_##NAME(void* memory) { __real_##NAME(cuda_cpu::forgotten(memory)); }
#define CUDA_CPU_SIZED_DELETE(NAME)                                  \
  void __real_##NAME(void* memory, std::size_t size) __asm__(#NAME); \
  void __wrap_##NAME(void* memory, std::size_t size) {               \
    __real_##NAME(cuda_cpu::forgotten(memory), size);                \
  }

extern "C" {
CUDA_CPU_NEW(malloc)
CUDA_CPU_NEW(_Znwm)
CUDA_CPU_NEW(_Znam)
CUDA_CPU_DELETE(free)
CUDA_CPU_DELETE(_ZdlPv)
CUDA_CPU_DELETE(_ZdaPv)
CUDA_CPU_SIZED_DELETE(_ZdlPvm)
CUDA_CPU_SIZED_DELETE(_ZdaPvm)
}  // extern "C"

#endif
