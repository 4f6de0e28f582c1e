#pragma once

#include <cuda_runtime.h>

/// The hardware's tanh, one instruction: relative error at most 2^-11 (PTX ISA, "tanh"), an eighth
/// of what rounding to bf16 makes of it. It is +-1 where tanh is, however large u may be; a
/// quotient of exponentials would be infinity over infinity from u = 44 on.
__device__ inline float fast_tanh(float u) {
#ifdef CUDA_CPU
  return tanhf(u);
#else
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(u));
  return result;
#endif
}
