// Integers of 8 or 16 bits, four or two in a word (CUDA Math API, "SIMD Intrinsics"), and minima
// and maxima of sums and of three numbers ("DPX"). The names say the type and the width: s and u
// are signed and unsigned, ss and us the same with saturation.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace cuda_cpu {

inline constexpr auto kSmaller = [](auto a, auto b) { return b < a ? b : a; };
inline constexpr auto kLarger = [](auto a, auto b) { return a < b ? b : a; };

/// Each lane of type T of the result is f of the same lane of the arguments, wrapped to T's width.
template <class T, class F, class... Words>
unsigned each_lane(F f, Words... words) {
  using Bits = std::make_unsigned_t<T>;
  constexpr int kWidth = 8 * sizeof(T);
  unsigned result = 0;
  for (int at = 0; at < 32; at += kWidth) {
    const int lane = static_cast<int>(f(static_cast<int>(static_cast<T>(words >> at))...));
    result |= static_cast<unsigned>(static_cast<Bits>(lane)) << at;
  }
  return result;
}

template <class T>
int saturated(int x) {
  return std::clamp<int>(x, std::numeric_limits<T>::min(), std::numeric_limits<T>::max());
}

template <class T>
unsigned sum_of_differences(unsigned a, unsigned b) {
  unsigned sum = 0;
  for (int at = 0; at < 32; at += 8 * static_cast<int>(sizeof(T))) {
    const int difference = static_cast<T>(a >> at) - static_cast<T>(b >> at);
    sum += static_cast<unsigned>(difference < 0 ? -difference : difference);
  }
  return sum;
}

}  // namespace cuda_cpu

#define CUDA_CPU_LANES_1(NAME, T, EXPRESSION)                             \
  inline unsigned NAME(unsigned x) {                                      \
    return cuda_cpu::each_lane<T>([](int a) { return (EXPRESSION); }, x); \
  }
#define CUDA_CPU_LANES_2(NAME, T, EXPRESSION)                                       \
  inline unsigned NAME(unsigned x, unsigned y) {                                    \
    return cuda_cpu::each_lane<T>([](int a, int b) { return (EXPRESSION); }, x, y); \
  }
#define CUDA_CPU_COMPARED(NAME, N, T, OPERATOR)         \
  CUDA_CPU_LANES_2(__vcmp##NAME##N, T, -(a OPERATOR b)) \
  CUDA_CPU_LANES_2(__vset##NAME##N, T, int(a OPERATOR b))

#define CUDA_CPU_WORDS(N, S, U)                                            \
  CUDA_CPU_LANES_1(__vabs##N, S, a < 0 ? -a : a)                           \
  CUDA_CPU_LANES_1(__vabsss##N, S, cuda_cpu::saturated<S>(a < 0 ? -a : a)) \
  CUDA_CPU_LANES_1(__vneg##N, S, -a)                                       \
  CUDA_CPU_LANES_1(__vnegss##N, S, cuda_cpu::saturated<S>(-a))             \
  CUDA_CPU_LANES_2(__vadd##N, U, a + b)                                    \
  CUDA_CPU_LANES_2(__vaddss##N, S, cuda_cpu::saturated<S>(a + b))          \
  CUDA_CPU_LANES_2(__vaddus##N, U, cuda_cpu::saturated<U>(a + b))          \
  CUDA_CPU_LANES_2(__vsub##N, U, a - b)                                    \
  CUDA_CPU_LANES_2(__vsubss##N, S, cuda_cpu::saturated<S>(a - b))          \
  CUDA_CPU_LANES_2(__vsubus##N, U, cuda_cpu::saturated<U>(a - b))          \
  CUDA_CPU_LANES_2(__vabsdiffs##N, S, a < b ? b - a : a - b)               \
  CUDA_CPU_LANES_2(__vabsdiffu##N, U, a < b ? b - a : a - b)               \
  CUDA_CPU_LANES_2(__vavgs##N, S, (a + b + (a + b >= 0)) >> 1)             \
  CUDA_CPU_LANES_2(__vavgu##N, U, (a + b + 1) >> 1)                        \
  CUDA_CPU_LANES_2(__vhaddu##N, U, (a + b) >> 1)                           \
  CUDA_CPU_LANES_2(__vmaxs##N, S, a < b ? b : a)                           \
  CUDA_CPU_LANES_2(__vmaxu##N, U, a < b ? b : a)                           \
  CUDA_CPU_LANES_2(__vmins##N, S, a < b ? a : b)                           \
  CUDA_CPU_LANES_2(__vminu##N, U, a < b ? a : b)                           \
  CUDA_CPU_COMPARED(eq, N, U, ==)                                          \
  CUDA_CPU_COMPARED(ne, N, U, !=)                                          \
  CUDA_CPU_COMPARED(ges, N, S, >=)                                         \
  CUDA_CPU_COMPARED(geu, N, U, >=)                                         \
  CUDA_CPU_COMPARED(gts, N, S, >)                                          \
  CUDA_CPU_COMPARED(gtu, N, U, >)                                          \
  CUDA_CPU_COMPARED(les, N, S, <=)                                         \
  CUDA_CPU_COMPARED(leu, N, U, <=)                                         \
  CUDA_CPU_COMPARED(lts, N, S, <)                                          \
  CUDA_CPU_COMPARED(ltu, N, U, <)                                          \
  inline unsigned __vsads##N(unsigned x, unsigned y) {                     \
    return cuda_cpu::sum_of_differences<S>(x, y);                          \
  }                                                                        \
  inline unsigned __vsadu##N(unsigned x, unsigned y) {                     \
    return cuda_cpu::sum_of_differences<U>(x, y);                          \
  }
CUDA_CPU_WORDS(2, std::int16_t, std::uint16_t)
CUDA_CPU_WORDS(4, std::int8_t, std::uint8_t)
#undef CUDA_CPU_WORDS
#undef CUDA_CPU_COMPARED
#undef CUDA_CPU_LANES_2
#undef CUDA_CPU_LANES_1

/// Two products of 16 bits with 8 bits, those of the lower or the upper two bytes of b, and a sum.
#define CUDA_CPU_DP2A(NAME, T, HALFWORD, BYTE, FIRST)                                        \
  inline T NAME(T a, T b, T c) {                                                             \
    for (int k = 0; k < 2; ++k) {                                                            \
      c += static_cast<HALFWORD>(a >> (16 * k)) * static_cast<BYTE>(b >> (8 * (FIRST + k))); \
    }                                                                                        \
    return c;                                                                                \
  }
CUDA_CPU_DP2A(__dp2a_lo, int, std::int16_t, std::int8_t, 0)
CUDA_CPU_DP2A(__dp2a_hi, int, std::int16_t, std::int8_t, 2)
CUDA_CPU_DP2A(__dp2a_lo, unsigned, std::uint16_t, std::uint8_t, 0)
CUDA_CPU_DP2A(__dp2a_hi, unsigned, std::uint16_t, std::uint8_t, 2)
#undef CUDA_CPU_DP2A

// ---- DPX ----------------------------------------------------------------------------------------

namespace cuda_cpu {

/// A word of lanes of type T, of 32 bits (one lane) or 16 (two): f of the lanes, as each_lane().
template <class T, class F, class... Words>
auto each_number(F f, Words... words) {
  if constexpr (sizeof(T) == 4) {
    return f(static_cast<T>(words)...);
  } else {
    return each_lane<T>([&](auto... lanes) { return f(static_cast<T>(lanes)...); }, words...);
  }
}
template <class T>
T wrapped_sum(T a, T b) {
  return static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
}
template <class T>
T not_negative(T a) {
  return a < 0 ? T(0) : a;
}

}  // namespace cuda_cpu

#define CUDA_CPU_DPX_OF(END, WORD, T, RELU)                                                     \
  inline WORD __vimax3_##END(WORD x, WORD y, WORD z) {                                          \
    return cuda_cpu::each_number<T>(                                                            \
        [](T a, T b, T c) {                                                                     \
          return RELU(std::max({a, b, c}));                                                     \
        },                                                                                      \
        x, y, z);                                                                               \
  }                                                                                             \
  inline WORD __vimin3_##END(WORD x, WORD y, WORD z) {                                          \
    return cuda_cpu::each_number<T>(                                                            \
        [](T a, T b, T c) {                                                                     \
          return RELU(std::min({a, b, c}));                                                     \
        },                                                                                      \
        x, y, z);                                                                               \
  }                                                                                             \
  inline WORD __viaddmax_##END(WORD x, WORD y, WORD z) {                                        \
    return cuda_cpu::each_number<T>(                                                            \
        [](T a, T b, T c) { return RELU(std::max(cuda_cpu::wrapped_sum(a, b), c)); }, x, y, z); \
  }                                                                                             \
  inline WORD __viaddmin_##END(WORD x, WORD y, WORD z) {                                        \
    return cuda_cpu::each_number<T>(                                                            \
        [](T a, T b, T c) { return RELU(std::min(cuda_cpu::wrapped_sum(a, b), c)); }, x, y, z); \
  }
#define CUDA_CPU_DPX_RELU(END, WORD, T)                                                         \
  CUDA_CPU_DPX_OF(END##_relu, WORD, T, cuda_cpu::not_negative)                                  \
  inline WORD __vimax_##END##_relu(WORD x, WORD y) {                                            \
    return cuda_cpu::each_number<T>([](T a, T b) { return std::max({a, b, T(0)}); }, x, y);     \
  }                                                                                             \
  inline WORD __vimin_##END##_relu(WORD x, WORD y) {                                            \
    return cuda_cpu::each_number<T>([](T a, T b) { return std::max(std::min(a, b), T(0)); }, x, \
                                    y);                                                         \
  }
CUDA_CPU_DPX_OF(s32, int, int, )
CUDA_CPU_DPX_OF(u32, unsigned, unsigned, )
CUDA_CPU_DPX_OF(s16x2, unsigned, std::int16_t, )
CUDA_CPU_DPX_OF(u16x2, unsigned, std::uint16_t, )
CUDA_CPU_DPX_RELU(s32, int, int)
CUDA_CPU_DPX_RELU(s16x2, unsigned, std::int16_t)
#undef CUDA_CPU_DPX_RELU
#undef CUDA_CPU_DPX_OF

// With a flag for each lane: whether the result is the first number. Of two lanes the upper one's
// flag comes first.
#define CUDA_CPU_DPX_FLAG(NAME, T, LANE, OPERATOR)                               \
  inline T NAME##32(T a, T b, bool* first) {                                     \
    *first = a OPERATOR b;                                                       \
    return *first ? a : b;                                                       \
  }                                                                              \
  inline unsigned NAME##16x2(unsigned a, unsigned b, bool* upper, bool* lower) { \
    *upper = static_cast<LANE>(a >> 16) OPERATOR static_cast<LANE>(b >> 16);     \
    *lower = static_cast<LANE>(a) OPERATOR static_cast<LANE>(b);                 \
    return ((*upper ? a : b) & 0xFFFF0000) | ((*lower ? a : b) & 0xFFFF);        \
  }
CUDA_CPU_DPX_FLAG(__vibmax_s, int, std::int16_t, >=)
CUDA_CPU_DPX_FLAG(__vibmin_s, int, std::int16_t, <=)
CUDA_CPU_DPX_FLAG(__vibmax_u, unsigned, std::uint16_t, >=)
CUDA_CPU_DPX_FLAG(__vibmin_u, unsigned, std::uint16_t, <=)
#undef CUDA_CPU_DPX_FLAG
