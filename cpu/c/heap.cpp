// malloc(), new and the others of programs that ./try builds: what their kernels ask for is noted.
// Of lessons nobody asks for this: their kernels have no heap.
#if defined(CUDA_CPU_HAS_HEAP)

#include "cpu/runtime/device_heap.h"

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
