// Arithmetic and conversions whose names end in how they round: _rn to the nearest number, _rz
// towards zero, _rd down, _ru up (CUDA Math API, "Single Precision Intrinsics", "Double Precision
// Intrinsics", "Type Casting Intrinsics"). Most of those with _rn are in device_functions.h.

#pragma once

#include <fenv.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/execution/later_than_cpp17.h"

namespace cuda_cpu {

/// f(arguments...), computed while the CPU rounds in this way. The empty asm statements keep the
/// compiler from computing it before, or from moving it behind.
template <class F, class... T>
auto rounded(int way, F f, T... arguments) {
  const int before = fegetround();
  fesetround(way);
  (..., ([&] { asm volatile("" : "+m"(arguments) : : "memory"); }()));
  auto result = f(arguments...);
  asm volatile("" : "+m"(result) : : "memory");
  fesetround(before);
  return result;
}

/// As a conversion to whole numbers has it. NaN becomes 0, unless there are 64 bits on one side:
/// then only the highest bit is set. PTX ISA, "cvt".
template <class Integer, class Real>
Integer whole(Real x) {
  if (std::isnan(x) && (sizeof(Real) == 8 || sizeof(Integer) == 8)) {
    return static_cast<Integer>(std::make_unsigned_t<Integer>(1) << (8 * sizeof(Integer) - 1));
  }
  return saturating<Integer>(x);
}

}  // namespace cuda_cpu

#define CUDA_CPU_WAY(END, WAY)                                                    \
  CUDA_CPU_ARITHMETIC(f, float, END, WAY)                                         \
  CUDA_CPU_ARITHMETIC(d, double, END, WAY)                                        \
  inline float __fmaf_##END(float x, float y, float z) {                          \
    return cuda_cpu::rounded(                                                     \
        WAY, [](float a, float b, float c) { return fmaf(a, b, c); }, x, y, z);   \
  }                                                                               \
  inline double __fma_##END(double x, double y, double z) {                       \
    return cuda_cpu::rounded(                                                     \
        WAY, [](double a, double b, double c) { return fma(a, b, c); }, x, y, z); \
  }                                                                               \
  CUDA_CPU_TO_REAL(__double2float_##END, double, float, WAY)                      \
  CUDA_CPU_TO_REAL(__int2float_##END, int, float, WAY)                            \
  CUDA_CPU_TO_REAL(__uint2float_##END, unsigned, float, WAY)                      \
  CUDA_CPU_TO_REAL(__ll2float_##END, long long, float, WAY)                       \
  CUDA_CPU_TO_REAL(__ull2float_##END, unsigned long long, float, WAY)             \
  CUDA_CPU_TO_REAL(__ll2double_##END, long long, double, WAY)                     \
  CUDA_CPU_TO_REAL(__ull2double_##END, unsigned long long, double, WAY)
#define CUDA_CPU_ARITHMETIC(LETTER, T, END, WAY)    \
  inline T __##LETTER##add_##END(T x, T y) {        \
    return cuda_cpu::rounded(                       \
        WAY, [](T a, T b) { return a + b; }, x, y); \
  }                                                 \
  inline T __##LETTER##sub_##END(T x, T y) {        \
    return cuda_cpu::rounded(                       \
        WAY, [](T a, T b) { return a - b; }, x, y); \
  }                                                 \
  inline T __##LETTER##mul_##END(T x, T y) {        \
    return cuda_cpu::rounded(                       \
        WAY, [](T a, T b) { return a * b; }, x, y); \
  }                                                 \
  inline T __##LETTER##div_##END(T x, T y) {        \
    return cuda_cpu::rounded(                       \
        WAY, [](T a, T b) { return a / b; }, x, y); \
  }                                                 \
  inline T __##LETTER##rcp_##END(T x) {             \
    return cuda_cpu::rounded(                       \
        WAY, [](T a) { return 1 / a; }, x);         \
  }                                                 \
  inline T __##LETTER##sqrt_##END(T x) {            \
    return cuda_cpu::rounded(                       \
        WAY, [](T a) { return std::sqrt(a); }, x);  \
  }
#define CUDA_CPU_TO_REAL(NAME, FROM, TO, WAY)               \
  inline TO NAME(FROM x) {                                  \
    return cuda_cpu::rounded(                               \
        WAY, [](FROM a) { return static_cast<TO>(a); }, x); \
  }
CUDA_CPU_WAY(rz, FE_TOWARDZERO)
CUDA_CPU_WAY(rd, FE_DOWNWARD)
CUDA_CPU_WAY(ru, FE_UPWARD)
#undef CUDA_CPU_TO_REAL
#undef CUDA_CPU_ARITHMETIC
#undef CUDA_CPU_WAY

inline double __dsub_rn(double x, double y) { return x - y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __drcp_rn(double x) { return 1.0 / x; }
inline double __dsqrt_rn(double x) { return sqrt(x); }
inline float __fmaf_ieee_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
inline double __ll2double_rn(long long x) { return static_cast<double>(x); }
inline double __ull2double_rn(unsigned long long x) { return static_cast<double>(x); }

#define CUDA_CPU_TO_WHOLE(NAME, REAL, INTEGER)                                             \
  inline INTEGER NAME##_rn(REAL x) { return cuda_cpu::whole<INTEGER>(std::nearbyint(x)); } \
  inline INTEGER NAME##_rz(REAL x) { return cuda_cpu::whole<INTEGER>(std::trunc(x)); }     \
  inline INTEGER NAME##_rd(REAL x) { return cuda_cpu::whole<INTEGER>(std::floor(x)); }     \
  inline INTEGER NAME##_ru(REAL x) { return cuda_cpu::whole<INTEGER>(std::ceil(x)); }
CUDA_CPU_TO_WHOLE(__float2ll, float, long long)
CUDA_CPU_TO_WHOLE(__float2ull, float, unsigned long long)
CUDA_CPU_TO_WHOLE(__double2int, double, int)
CUDA_CPU_TO_WHOLE(__double2uint, double, unsigned)
CUDA_CPU_TO_WHOLE(__double2ll, double, long long)
CUDA_CPU_TO_WHOLE(__double2ull, double, unsigned long long)
#undef CUDA_CPU_TO_WHOLE
inline unsigned __float2uint_rd(float x) { return cuda_cpu::whole<unsigned>(std::floor(x)); }
inline unsigned __float2uint_ru(float x) { return cuda_cpu::whole<unsigned>(std::ceil(x)); }

inline int __double2hiint(double x) {
  return static_cast<int>(cuda_cpu::bit_cast<std::uint64_t>(x) >> 32);
}
inline int __double2loint(double x) {
  return static_cast<int>(cuda_cpu::bit_cast<std::uint64_t>(x));
}
inline double __hiloint2double(int high, int low) {
  return cuda_cpu::bit_cast<double>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(high))
                                        << 32 |
                                    static_cast<std::uint32_t>(low));
}
