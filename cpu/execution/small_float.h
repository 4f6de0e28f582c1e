// 16-bit floating point numbers: storage in 16 bits, arithmetic in float, one rounding (to nearest,
// ties to even) per operation. cuda_fp16.h and cuda_bf16.h give them CUDA's names.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/execution/later_than_cpp17.h"
#include "vector_types.h"

namespace cuda_cpu {

/// IEEE binary16: 5 bits of exponent, 10 of fraction.
struct HalfFormat {
  static constexpr std::uint16_t kNan = 0x7FFF;

  static constexpr float to_float(std::uint16_t half) {
    constexpr std::uint32_t kRebias = (127 - 15) << 23;
    const std::uint32_t magnitude = (half & 0x7FFFu) << 13;
    const bool infinite_or_nan = magnitude >= 0x1Fu << 23;
    const std::uint32_t normal = magnitude + kRebias + (infinite_or_nan ? kRebias : 0);
    // A subnormal's fraction counts in units of 2^-24: put it below a leading one, and subtract
    // that.
    constexpr float kSmallestNormal = 0x1p-14f;
    const float subnormal =
        cuda_cpu::bit_cast<float>(magnitude + cuda_cpu::bit_cast<std::uint32_t>(kSmallestNormal)) -
        kSmallestNormal;
    const std::uint32_t bits =
        magnitude < 1u << 23 ? cuda_cpu::bit_cast<std::uint32_t>(subnormal) : normal;
    return cuda_cpu::bit_cast<float>(bits | (half & 0x8000u) << 16);
  }

  static constexpr std::uint16_t from_float(float value) {
    const std::uint32_t bits = cuda_cpu::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = bits >> 16 & 0x8000;
    const std::uint32_t magnitude = bits & 0x7FFFFFFF;
    const std::uint32_t normal =
        (magnitude - ((127 - 15) << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    // The sum with 1/2, whose last bit is worth 2^-24, rounds to the subnormals.
    const std::uint32_t subnormal =
        cuda_cpu::bit_cast<std::uint32_t>(cuda_cpu::bit_cast<float>(magnitude) + 0.5f) -
        cuda_cpu::bit_cast<std::uint32_t>(0.5f);
    std::uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
    if (magnitude >= 0x47800000) half = 0x7C00;
    if (magnitude > 0x7F800000) return kNan;
    return static_cast<std::uint16_t>(sign | half);
  }
};

/// bfloat16: the upper half of a float.
struct Bfloat16Format {
  static constexpr std::uint16_t kNan = 0x7FFF;

  static constexpr float to_float(std::uint16_t bits) {
    return cuda_cpu::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }

  static constexpr std::uint16_t from_float(float value) {
    const std::uint32_t bits = cuda_cpu::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7FFFFFFF) > 0x7F800000 ? kNan : static_cast<std::uint16_t>(rounded);
  }
};

/// `value` as a float whose last bit remembers whether anything was lost, so that rounding it once
/// more, to a shorter format, gives what rounding `value` would have given.
constexpr float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  if (nearest == value || value != value) return nearest;
  const double magnitude = value < 0 ? -value : value;
  const float nearest_magnitude = nearest < 0 ? -nearest : nearest;
  const std::uint32_t bits = cuda_cpu::bit_cast<std::uint32_t>(nearest);
  return cuda_cpu::bit_cast<float>((bits - (nearest_magnitude > magnitude)) | 1u);
}

/// A 16-bit floating point number of the given format.
template <class Format>
struct SmallFloat {
  std::uint16_t bits;

  SmallFloat() = default;
  constexpr SmallFloat(float value) : bits(Format::from_float(value)) {}
  constexpr SmallFloat(double value) : bits(Format::from_float(round_to_odd(value))) {}
  template <class T>
  requires std::is_integral_v<T>
  constexpr SmallFloat(T value) : SmallFloat(static_cast<double>(value)) {}
  template <class Other>
  requires(!std::is_same_v<Other, Format>) explicit constexpr SmallFloat(SmallFloat<Other> other)
      : SmallFloat(static_cast<float>(other)) {}

  static constexpr SmallFloat from_bits(std::uint16_t bits) {
    SmallFloat value = 0.0f;
    value.bits = bits;
    return value;
  }

  constexpr operator float() const { return Format::to_float(bits); }

  friend constexpr SmallFloat operator+(SmallFloat a, SmallFloat b) { return float(a) + float(b); }
  friend constexpr SmallFloat operator-(SmallFloat a, SmallFloat b) { return float(a) - float(b); }
  friend constexpr SmallFloat operator*(SmallFloat a, SmallFloat b) { return float(a) * float(b); }
  friend constexpr SmallFloat operator/(SmallFloat a, SmallFloat b) { return float(a) / float(b); }
  friend constexpr SmallFloat operator+(SmallFloat a) { return a; }
  friend constexpr SmallFloat operator-(SmallFloat a) {
    return from_bits(static_cast<std::uint16_t>(a.bits ^ 0x8000));
  }
  friend constexpr SmallFloat& operator+=(SmallFloat& a, SmallFloat b) { return a = a + b; }
  friend constexpr SmallFloat& operator-=(SmallFloat& a, SmallFloat b) { return a = a - b; }
  friend constexpr SmallFloat& operator*=(SmallFloat& a, SmallFloat b) { return a = a * b; }
  friend constexpr SmallFloat& operator/=(SmallFloat& a, SmallFloat b) { return a = a / b; }
  friend constexpr bool operator==(SmallFloat a, SmallFloat b) { return float(a) == float(b); }
  friend constexpr bool operator!=(SmallFloat a, SmallFloat b) { return float(a) != float(b); }
  friend constexpr bool operator<(SmallFloat a, SmallFloat b) { return float(a) < float(b); }
  friend constexpr bool operator>(SmallFloat a, SmallFloat b) { return float(a) > float(b); }
  friend constexpr bool operator<=(SmallFloat a, SmallFloat b) { return float(a) <= float(b); }
  friend constexpr bool operator>=(SmallFloat a, SmallFloat b) { return float(a) >= float(b); }
};

/// Two of them in 32 bits, with element-wise arithmetic.
template <class Format>
struct alignas(4) SmallFloat2 {
  using Element = SmallFloat<Format>;
  Element x, y;

  SmallFloat2() = default;
  constexpr SmallFloat2(Element x_, Element y_) : x(x_), y(y_) {}

  friend constexpr SmallFloat2 operator+(SmallFloat2 a, SmallFloat2 b) {
    return {a.x + b.x, a.y + b.y};
  }
  friend constexpr SmallFloat2 operator-(SmallFloat2 a, SmallFloat2 b) {
    return {a.x - b.x, a.y - b.y};
  }
  friend constexpr SmallFloat2 operator*(SmallFloat2 a, SmallFloat2 b) {
    return {a.x * b.x, a.y * b.y};
  }
  friend constexpr SmallFloat2 operator/(SmallFloat2 a, SmallFloat2 b) {
    return {a.x / b.x, a.y / b.y};
  }
  friend constexpr SmallFloat2 operator-(SmallFloat2 a) { return {-a.x, -a.y}; }
  friend constexpr SmallFloat2& operator+=(SmallFloat2& a, SmallFloat2 b) { return a = a + b; }
  friend constexpr SmallFloat2& operator-=(SmallFloat2& a, SmallFloat2 b) { return a = a - b; }
  friend constexpr SmallFloat2& operator*=(SmallFloat2& a, SmallFloat2 b) { return a = a * b; }
  friend constexpr SmallFloat2& operator/=(SmallFloat2& a, SmallFloat2 b) { return a = a / b; }
  friend constexpr bool operator==(SmallFloat2 a, SmallFloat2 b) {
    return a.x == b.x && a.y == b.y;
  }
};

/// The bits of such a number alone, as the name with _raw has it.
template <class Format>
struct SmallFloatRaw {
  unsigned short x;

  SmallFloatRaw() = default;
  constexpr SmallFloatRaw(SmallFloat<Format> value) : x(value.bits) {}
  constexpr operator SmallFloat<Format>() const { return SmallFloat<Format>::from_bits(x); }
};

/// `value` rounded to a short format: towards zero (way 0), down (-1) or up (1).
template <class Format>
constexpr SmallFloat<Format> rounded_small(double value, int way) {
  SmallFloat<Format> nearest = value;
  const double rounded = static_cast<float>(nearest);
  const bool negative = (nearest.bits & 0x8000) != 0;
  const int wrong_side = way != 0 ? way : negative ? 1 : -1;  // what has to be undone is beyond it
  if (wrong_side < 0 ? rounded > value : rounded < value) {
    // The neighbour towards zero has the next smaller bits, the other one the next larger ones.
    const bool towards_zero = negative == (wrong_side > 0);
    nearest.bits = static_cast<std::uint16_t>(nearest.bits + (towards_zero ? -1 : 1));
  }
  return nearest;
}

/// As a conversion to whole numbers has it: the nearest number that there is, and 0 for NaN.
template <class Integer>
Integer whole_of_small(float x) {
  if (std::isnan(x)) return 0;
  constexpr float low = static_cast<float>(std::numeric_limits<Integer>::min());
  constexpr float high = static_cast<float>(std::numeric_limits<Integer>::max());
  return x <= low    ? std::numeric_limits<Integer>::min()
         : x >= high ? std::numeric_limits<Integer>::max()
                     : static_cast<Integer>(x);
}

}  // namespace cuda_cpu

// The conversions of a 16-bit format whose name in functions is NAME. How they round is at the end
// of their names: _rn to nearest, _rz towards zero, _rd down, _ru up.
#define CUDA_CPU_SMALL_CONVERSIONS(NAME, F)                                 \
  CUDA_CPU_SMALL_INTEGER(NAME, F, char, signed char)                        \
  CUDA_CPU_SMALL_INTEGER(NAME, F, uchar, unsigned char)                     \
  CUDA_CPU_SMALL_INTEGER(NAME, F, short, short)                             \
  CUDA_CPU_SMALL_INTEGER(NAME, F, ushort, unsigned short)                   \
  CUDA_CPU_SMALL_INTEGER(NAME, F, int, int)                                 \
  CUDA_CPU_SMALL_INTEGER(NAME, F, uint, unsigned)                           \
  CUDA_CPU_SMALL_INTEGER(NAME, F, ll, long long)                            \
  CUDA_CPU_SMALL_INTEGER(NAME, F, ull, unsigned long long)                  \
  CUDA_CPU_SMALL_FROM(NAME, F, float, float)                                \
  constexpr cuda_cpu::SmallFloat<F> __float2##NAME(float a) { return a; }   \
  constexpr cuda_cpu::SmallFloat<F> __double2##NAME(double a) { return a; } \
  constexpr float __##NAME##2float(cuda_cpu::SmallFloat<F> a) { return a; }
#define CUDA_CPU_SMALL_FROM(NAME, F, OTHER, T)                                 \
  constexpr cuda_cpu::SmallFloat<F> __##OTHER##2##NAME##_rn(T a) { return a; } \
  constexpr cuda_cpu::SmallFloat<F> __##OTHER##2##NAME##_rz(T a) {             \
    return cuda_cpu::rounded_small<F>(static_cast<double>(a), 0);              \
  }                                                                            \
  constexpr cuda_cpu::SmallFloat<F> __##OTHER##2##NAME##_rd(T a) {             \
    return cuda_cpu::rounded_small<F>(static_cast<double>(a), -1);             \
  }                                                                            \
  constexpr cuda_cpu::SmallFloat<F> __##OTHER##2##NAME##_ru(T a) {             \
    return cuda_cpu::rounded_small<F>(static_cast<double>(a), 1);              \
  }
#define CUDA_CPU_SMALL_INTEGER(NAME, F, OTHER, T)                 \
  CUDA_CPU_SMALL_FROM(NAME, F, OTHER, T)                          \
  inline T __##NAME##2##OTHER##_rn(cuda_cpu::SmallFloat<F> a) {   \
    return cuda_cpu::whole_of_small<T>(std::nearbyint(float(a))); \
  }                                                               \
  inline T __##NAME##2##OTHER##_rz(cuda_cpu::SmallFloat<F> a) {   \
    return cuda_cpu::whole_of_small<T>(std::trunc(float(a)));     \
  }                                                               \
  inline T __##NAME##2##OTHER##_rd(cuda_cpu::SmallFloat<F> a) {   \
    return cuda_cpu::whole_of_small<T>(std::floor(float(a)));     \
  }                                                               \
  inline T __##NAME##2##OTHER##_ru(cuda_cpu::SmallFloat<F> a) {   \
    return cuda_cpu::whole_of_small<T>(std::ceil(float(a)));      \
  }

// ---- Functions that fp16 and bf16 have in common -----------------------------------------------

template <class F>
constexpr cuda_cpu::SmallFloat<F> __hadd(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b) {
  return a + b;
}
template <class F>
constexpr cuda_cpu::SmallFloat<F> __hsub(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b) {
  return a - b;
}
template <class F>
constexpr cuda_cpu::SmallFloat<F> __hmul(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b) {
  return a * b;
}
template <class F>
constexpr cuda_cpu::SmallFloat<F> __hdiv(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b) {
  return a / b;
}
/// a * b + c, rounded once.
template <class F>
constexpr cuda_cpu::SmallFloat<F> __hfma(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b,
                                         cuda_cpu::SmallFloat<F> c) {
  return static_cast<double>(float(a)) * float(b) + float(c);
}
template <class F>
constexpr cuda_cpu::SmallFloat<F> __hneg(cuda_cpu::SmallFloat<F> a) {
  return -a;
}
template <class F>
constexpr cuda_cpu::SmallFloat<F> __habs(cuda_cpu::SmallFloat<F> a) {
  return cuda_cpu::SmallFloat<F>::from_bits(a.bits & 0x7FFF);
}
template <class F>
cuda_cpu::SmallFloat<F> __hmax(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b) {
  return std::fmax(float(a), float(b));
}
template <class F>
cuda_cpu::SmallFloat<F> __hmin(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b) {
  return std::fmin(float(a), float(b));
}
template <class F>
cuda_cpu::SmallFloat<F> __hmax_nan(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b) {
  return a != a ? a : b != b ? b : __hmax(a, b);
}
template <class F>
cuda_cpu::SmallFloat<F> __hmin_nan(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b) {
  return a != a ? a : b != b ? b : __hmin(a, b);
}
template <class F>
constexpr cuda_cpu::SmallFloat<F> __hadd_rn(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b) {
  return a + b;
}
template <class F>
constexpr cuda_cpu::SmallFloat<F> __hsub_rn(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b) {
  return a - b;
}
template <class F>
constexpr cuda_cpu::SmallFloat<F> __hmul_rn(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b) {
  return a * b;
}
namespace cuda_cpu {
/// Within 0 and 1; NaN becomes 0.
template <class F>
constexpr SmallFloat<F> saturated_small(SmallFloat<F> a) {
  return a > SmallFloat<F>(0.0f) ? (a < SmallFloat<F>(1.0f) ? a : SmallFloat<F>(1.0f))
                                 : SmallFloat<F>(0.0f);
}
}  // namespace cuda_cpu
template <class F>
constexpr cuda_cpu::SmallFloat<F> __hadd_sat(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b) {
  return cuda_cpu::saturated_small(a + b);
}
template <class F>
constexpr cuda_cpu::SmallFloat<F> __hsub_sat(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b) {
  return cuda_cpu::saturated_small(a - b);
}
template <class F>
constexpr cuda_cpu::SmallFloat<F> __hmul_sat(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b) {
  return cuda_cpu::saturated_small(a * b);
}
template <class F>
constexpr cuda_cpu::SmallFloat<F> __hfma_sat(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b,
                                             cuda_cpu::SmallFloat<F> c) {
  return cuda_cpu::saturated_small(__hfma(a, b, c));
}
/// No number below 0.
template <class F>
constexpr cuda_cpu::SmallFloat<F> __hfma_relu(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b,
                                              cuda_cpu::SmallFloat<F> c) {
  const cuda_cpu::SmallFloat<F> sum = __hfma(a, b, c);
  return sum < cuda_cpu::SmallFloat<F>(0.0f) ? cuda_cpu::SmallFloat<F>(0.0f) : sum;
}
template <class F>
bool __hisnan(cuda_cpu::SmallFloat<F> a) {
  return std::isnan(float(a));
}
template <class F>
int __hisinf(cuda_cpu::SmallFloat<F> a) {
  return std::isinf(float(a)) ? (float(a) < 0 ? -1 : 1) : 0;
}

// A comparison of two numbers, and of two pairs: 1 or 0 for each, a mask of 16 bits for each, or
// whether it holds for both. Those with a u hold for a NaN, too.
#define CUDA_CPU_COMPARE(NAME, EXPRESSION)                                                       \
  template <class F>                                                                             \
  constexpr bool __h##NAME(cuda_cpu::SmallFloat<F> a, cuda_cpu::SmallFloat<F> b) {               \
    return EXPRESSION;                                                                           \
  }                                                                                              \
  template <class F>                                                                             \
  constexpr cuda_cpu::SmallFloat2<F> __h##NAME##2(cuda_cpu::SmallFloat2<F> a,                    \
                                                  cuda_cpu::SmallFloat2<F> b) {                  \
    return {__h##NAME(a.x, b.x) ? 1.0f : 0.0f, __h##NAME(a.y, b.y) ? 1.0f : 0.0f};               \
  }                                                                                              \
  template <class F>                                                                             \
  constexpr unsigned __h##NAME##2_mask(cuda_cpu::SmallFloat2<F> a, cuda_cpu::SmallFloat2<F> b) { \
    return (__h##NAME(a.x, b.x) ? 0xFFFFu : 0u) | (__h##NAME(a.y, b.y) ? 0xFFFF0000u : 0u);      \
  }                                                                                              \
  template <class F>                                                                             \
  constexpr bool __hb##NAME##2(cuda_cpu::SmallFloat2<F> a, cuda_cpu::SmallFloat2<F> b) {         \
    return __h##NAME(a.x, b.x) && __h##NAME(a.y, b.y);                                           \
  }
CUDA_CPU_COMPARE(eq, a == b)
CUDA_CPU_COMPARE(ne, a<b || a> b)
CUDA_CPU_COMPARE(lt, a < b)
CUDA_CPU_COMPARE(le, a <= b)
CUDA_CPU_COMPARE(gt, a > b)
CUDA_CPU_COMPARE(ge, a >= b)
CUDA_CPU_COMPARE(equ, !(a < b || a > b))
CUDA_CPU_COMPARE(neu, !(a == b))
CUDA_CPU_COMPARE(ltu, !(a >= b))
CUDA_CPU_COMPARE(leu, !(a > b))
CUDA_CPU_COMPARE(gtu, !(a <= b))
CUDA_CPU_COMPARE(geu, !(a < b))
#undef CUDA_CPU_COMPARE

#define CUDA_CPU_ELEMENTWISE2(NAME, FUNCTION)                                             \
  template <class F>                                                                      \
  cuda_cpu::SmallFloat2<F> NAME(cuda_cpu::SmallFloat2<F> a, cuda_cpu::SmallFloat2<F> b) { \
    return {FUNCTION(a.x, b.x), FUNCTION(a.y, b.y)};                                      \
  }
CUDA_CPU_ELEMENTWISE2(__hadd2, __hadd)
CUDA_CPU_ELEMENTWISE2(__hsub2, __hsub)
CUDA_CPU_ELEMENTWISE2(__hmul2, __hmul)
CUDA_CPU_ELEMENTWISE2(__h2div, __hdiv)
CUDA_CPU_ELEMENTWISE2(__hmax2, __hmax)
CUDA_CPU_ELEMENTWISE2(__hmin2, __hmin)
CUDA_CPU_ELEMENTWISE2(__hmax2_nan, __hmax_nan)
CUDA_CPU_ELEMENTWISE2(__hmin2_nan, __hmin_nan)
CUDA_CPU_ELEMENTWISE2(__hadd2_rn, __hadd)
CUDA_CPU_ELEMENTWISE2(__hsub2_rn, __hsub)
CUDA_CPU_ELEMENTWISE2(__hmul2_rn, __hmul)
CUDA_CPU_ELEMENTWISE2(__hadd2_sat, __hadd_sat)
CUDA_CPU_ELEMENTWISE2(__hsub2_sat, __hsub_sat)
CUDA_CPU_ELEMENTWISE2(__hmul2_sat, __hmul_sat)
#undef CUDA_CPU_ELEMENTWISE2

template <class F>
constexpr cuda_cpu::SmallFloat2<F> __hfma2(cuda_cpu::SmallFloat2<F> a, cuda_cpu::SmallFloat2<F> b,
                                           cuda_cpu::SmallFloat2<F> c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
template <class F>
constexpr cuda_cpu::SmallFloat2<F> __hfma2_sat(cuda_cpu::SmallFloat2<F> a,
                                               cuda_cpu::SmallFloat2<F> b,
                                               cuda_cpu::SmallFloat2<F> c) {
  return {__hfma_sat(a.x, b.x, c.x), __hfma_sat(a.y, b.y, c.y)};
}
template <class F>
constexpr cuda_cpu::SmallFloat2<F> __hfma2_relu(cuda_cpu::SmallFloat2<F> a,
                                                cuda_cpu::SmallFloat2<F> b,
                                                cuda_cpu::SmallFloat2<F> c) {
  return {__hfma_relu(a.x, b.x, c.x), __hfma_relu(a.y, b.y, c.y)};
}
template <class F>
constexpr cuda_cpu::SmallFloat2<F> __hneg2(cuda_cpu::SmallFloat2<F> a) {
  return -a;
}
template <class F>
constexpr cuda_cpu::SmallFloat2<F> __habs2(cuda_cpu::SmallFloat2<F> a) {
  return {__habs(a.x), __habs(a.y)};
}

template <class F>
constexpr float __low2float(cuda_cpu::SmallFloat2<F> a) {
  return a.x;
}
template <class F>
constexpr float __high2float(cuda_cpu::SmallFloat2<F> a) {
  return a.y;
}

// hNAME for one number, h2NAME for two.
#define CUDA_CPU_FUNCTION(NAME, EXPRESSION)                       \
  template <class F>                                              \
  cuda_cpu::SmallFloat<F> h##NAME(cuda_cpu::SmallFloat<F> a) {    \
    const float x = a;                                            \
    return EXPRESSION;                                            \
  }                                                               \
  template <class F>                                              \
  cuda_cpu::SmallFloat2<F> h2##NAME(cuda_cpu::SmallFloat2<F> a) { \
    return {h##NAME(a.x), h##NAME(a.y)};                          \
  }
CUDA_CPU_FUNCTION(exp, std::exp(x))
CUDA_CPU_FUNCTION(exp2, std::exp2(x))
CUDA_CPU_FUNCTION(exp10, std::pow(10.0f, x))
CUDA_CPU_FUNCTION(log, std::log(x))
CUDA_CPU_FUNCTION(log2, std::log2(x))
CUDA_CPU_FUNCTION(log10, std::log10(x))
CUDA_CPU_FUNCTION(sqrt, std::sqrt(x))
CUDA_CPU_FUNCTION(rsqrt, 1.0f / std::sqrt(x))
CUDA_CPU_FUNCTION(rcp, 1.0f / x)
CUDA_CPU_FUNCTION(sin, std::sin(x))
CUDA_CPU_FUNCTION(cos, std::cos(x))
CUDA_CPU_FUNCTION(tanh, std::tanh(x))
CUDA_CPU_FUNCTION(tanh_approx, std::tanh(x))
CUDA_CPU_FUNCTION(floor, std::floor(x))
CUDA_CPU_FUNCTION(ceil, std::ceil(x))
CUDA_CPU_FUNCTION(rint, std::nearbyint(x))
CUDA_CPU_FUNCTION(trunc, std::trunc(x))
#undef CUDA_CPU_FUNCTION
