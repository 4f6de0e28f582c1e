// Functions that the hardware approximates in one instruction, with the error of each.
#pragma once

#include <cuda_runtime.h>

namespace primitives {

/// The hardware's tanh: relative error at most 2^-11 (PTX ISA, "tanh"), an eighth of what rounding
/// to bf16 makes of it. It is +-1 where tanh is, however large u may be; a quotient of exponentials
/// would be infinity over infinity from u = 44 on.
__device__ inline float tanh_approximate(float u) {
#ifdef CUDA_CPU
  return tanhf(u);
#else
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(u));
  return result;
#endif
}

/// 2^value; results below 2^-126 are 0. "ex2".
__device__ inline float exp2_approximate(float value) {
#ifdef CUDA_CPU
  const float result = exp2f(value);
  return result < 0x1p-126f ? 0 : result;
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
#endif
}

/// 1 / value, wrong by 1 unit in the last place; 0 where that is below 2^-126. "rcp".
__device__ inline float reciprocal_approximate(float value) {
#ifdef CUDA_CPU
  const float result = 1 / value;
  return fabsf(result) < 0x1p-126f ? 0 : result;
#else
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
#endif
}

}  // namespace primitives
