// Functions that the hardware approximates in one instruction, with the error of each.
#pragma once

#include <cuda_runtime.h>

namespace primitives {

/// tanh in one instruction, with a relative error of at most 2^-11 (PTX ISA, "tanh"). That is an
/// eighth of the error of rounding to bf16. Where tanh is +-1 it is +-1, however large u may be.
/// (Written as a quotient of exponentials it would be infinity over infinity from u = 44 on.)
__device__ inline float tanh_approximate(float u) {
#ifdef CUDA_CPU
  return tanhf(u);
#else
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(u));
  return result;
#endif
}

/// 2^value in one instruction (PTX ISA, "ex2"), wrong by 2 units in the last place at most. Results
/// below 2^-126 become 0.
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

/// 1 / value in one instruction (PTX ISA, "rcp"), wrong by 1 unit in the last place. Results below
/// 2^-126 become 0.
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
