// Bfloat16: __nv_bfloat16, __nv_bfloat162 and their conversions.

#pragma once

#include "cpu/execution/small_float.h"

using __nv_bfloat16 = cuda_cpu::SmallFloat<cuda_cpu::Bfloat16Format>;
using __nv_bfloat162 = cuda_cpu::SmallFloat2<cuda_cpu::Bfloat16Format>;
using __nv_bfloat16_raw = cuda_cpu::SmallFloatRaw<cuda_cpu::Bfloat16Format>;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

static_assert(sizeof(__nv_bfloat16) == 2 && sizeof(__nv_bfloat162) == 4);

CUDA_CPU_SMALL_CONVERSIONS(bfloat16, cuda_cpu::Bfloat16Format)

constexpr __nv_bfloat162 __float2bfloat162_rn(float a) { return {a, a}; }
constexpr __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
constexpr __nv_bfloat162 __float22bfloat162_rn(float2 a) { return {a.x, a.y}; }
constexpr float2 __bfloat1622float2(__nv_bfloat162 a) { return {a.x, a.y}; }
constexpr __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return {a, a}; }
constexpr __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
constexpr __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
constexpr __nv_bfloat16 __low2bfloat16(__nv_bfloat162 a) { return a.x; }
constexpr __nv_bfloat16 __high2bfloat16(__nv_bfloat162 a) { return a.y; }
constexpr __nv_bfloat162 __low2bfloat162(__nv_bfloat162 a) { return {a.x, a.x}; }
constexpr __nv_bfloat162 __high2bfloat162(__nv_bfloat162 a) { return {a.y, a.y}; }

constexpr __nv_bfloat162 __lowhigh2highlow(__nv_bfloat162 a) { return {a.y, a.x}; }
constexpr short __bfloat16_as_short(__nv_bfloat16 a) { return static_cast<short>(a.bits); }
constexpr __nv_bfloat16 __short_as_bfloat16(short a) {
  return __nv_bfloat16::from_bits(static_cast<unsigned short>(a));
}
constexpr unsigned short __bfloat16_as_ushort(__nv_bfloat16 a) { return a.bits; }
constexpr __nv_bfloat16 __ushort_as_bfloat16(unsigned short a) {
  return __nv_bfloat16::from_bits(a);
}
