// How kernels on several GPUs talk to each other, through memory that all of them reach.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cuda/atomic>

#include "primitives/spin.cuh"

namespace primitives {

/// A number that threads of all GPUs, and of the host, may access at the same time (an atomic).
template <typename T>
using AtSystem = cuda::atomic_ref<T, cuda::thread_scope_system>;

/// Lets a loop that waits for another GPU give up, so that a GPU that never answers does not hang
/// the others. ends() is called at each look. It returns true when `limit` nanoseconds have passed
/// since one of the first looks. (It reads the clock only at every 256th look: that is slow.) Then
/// `silent` becomes 1 + the GPU that was waited for, unless somebody has written there before.
struct Patience {
  uint64_t limit;
  unsigned* silent;
  uint64_t end = 0;
  int looks = 0;

  __device__ bool ends(int gpu) {
    if (++looks % 256 != 0) return false;
    const uint64_t now = nanoseconds();
    if (looks == 256) end = now + limit;
    if (now < end) return false;
    const AtSystem<unsigned> first(*silent);
    if (first.load(cuda::memory_order_relaxed) == 0) {
      first.store(1 + gpu, cuda::memory_order_relaxed);
    }
    return true;
  }
};

/// What memory holds where no number has come yet: the bits of a NaN that arithmetic does not make.
inline constexpr unsigned kNothing = ~0u;

__device__ inline float4 empty_quad() {
  const float nothing = __uint_as_float(kNothing);
  return make_float4(nothing, nothing, nothing, nothing);
}

/// Whether all four numbers have come.
__device__ inline bool is_whole(const float4& quad) {
  return __float_as_uint(quad.x) != kNothing && __float_as_uint(quad.y) != kNothing &&
         __float_as_uint(quad.z) != kNothing && __float_as_uint(quad.w) != kNothing;
}

/// Reads four numbers that another GPU may be storing just now. Each of the four has come or has
/// not, whatever the others have: a load or store of a vector is as many accesses as it has
/// elements (PTX ISA, "ld" and "st"). So no flag is needed beside the numbers.
__device__ inline float4 look_at_quad(float4* from) {
  float4 quad;
#ifdef CUDA_CPU
  quad = make_float4(__uint_as_float(kNothing), 0, 0, 0);
  float* const to[] = {&quad.x, &quad.y, &quad.z, &quad.w};
  for (int i = 0; i < 4; ++i) {
    const AtSystem<unsigned> number(reinterpret_cast<unsigned*>(from)[i]);
    *to[i] = __uint_as_float(number.load(cuda::memory_order_relaxed));
    if (__float_as_uint(*to[i]) == kNothing) break;  // one missing number is enough to know
  }
#else
  asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(quad.x), "=f"(quad.y), "=f"(quad.z), "=f"(quad.w)
               : "l"(from)
               : "memory");
#endif
  return quad;
}

/// Stores four numbers for look_at_quad() on another GPU.
__device__ inline void send_quad(float4* to, const float4& quad) {
#ifdef CUDA_CPU
  const float from[] = {quad.x, quad.y, quad.z, quad.w};
  for (int i = 0; i < 4; ++i) {
    AtSystem<unsigned>(reinterpret_cast<unsigned*>(to)[i])
        .store(__float_as_uint(from[i]), cuda::memory_order_relaxed);
  }
#else
  asm volatile("st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "f"(quad.x), "f"(quad.y), "f"(quad.z), "f"(quad.w)
               : "memory");
#endif
}

}  // namespace primitives
