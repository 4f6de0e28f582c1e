// Half precision: __half, __half2 and their conversions.

#pragma once

#include "cpu/execution/small_float.h"

using __half = cuda_cpu::SmallFloat<cuda_cpu::HalfFormat>;
using __half2 = cuda_cpu::SmallFloat2<cuda_cpu::HalfFormat>;
using half = __half;
using half2 = __half2;
using __half_raw = cuda_cpu::SmallFloatRaw<cuda_cpu::HalfFormat>;
using __nv_half = __half;
using __nv_half2 = __half2;

static_assert(sizeof(__half) == 2 && sizeof(__half2) == 4 && alignof(__half2) == 4);

CUDA_CPU_SMALL_CONVERSIONS(half, cuda_cpu::HalfFormat)

constexpr __half2 __float2half2_rn(float a) { return {a, a}; }
constexpr __half2 __floats2half2_rn(float a, float b) { return {a, b}; }
constexpr __half2 __float22half2_rn(float2 a) { return {a.x, a.y}; }
constexpr float2 __half22float2(__half2 a) { return {a.x, a.y}; }
constexpr __half2 __half2half2(__half a) { return {a, a}; }
constexpr __half2 __halves2half2(__half a, __half b) { return {a, b}; }
constexpr __half2 make_half2(__half a, __half b) { return {a, b}; }
constexpr __half __low2half(__half2 a) { return a.x; }
constexpr __half __high2half(__half2 a) { return a.y; }
constexpr __half2 __low2half2(__half2 a) { return {a.x, a.x}; }
constexpr __half2 __high2half2(__half2 a) { return {a.y, a.y}; }
constexpr __half2 __lowhigh2highlow(__half2 a) { return {a.y, a.x}; }

constexpr unsigned short __half_as_ushort(__half a) { return a.bits; }
constexpr short __half_as_short(__half a) { return static_cast<short>(a.bits); }
constexpr __half __ushort_as_half(unsigned short a) { return __half::from_bits(a); }
constexpr __half __short_as_half(short a) {
  return __half::from_bits(static_cast<unsigned short>(a));
}
