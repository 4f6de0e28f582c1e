// FP8: __nv_fp8_e4m3 and __nv_fp8_e5m2, and their conversions.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cpu/execution/later_than_cpp17.h"
#include "cpu/execution/small_float.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace cuda_cpu {

/// 4 bits of exponent, 3 of fraction. There is no infinity: with the largest exponent, too, all are
/// numbers, up to 448, but for one that is NaN.
struct E4m3Format {
  static constexpr std::uint8_t kNan = 0x7F;
  static constexpr std::uint32_t kLargest = 0x7E;
  static constexpr std::uint32_t kRebias = (127 - 7) << 23;

  static constexpr float to_float(std::uint8_t bits) {
    if ((bits & 0x7F) == kNan) return std::numeric_limits<float>::quiet_NaN();
    const std::uint32_t magnitude = (bits & 0x7Fu) << 20;
    // A subnormal's fraction counts in units of 2^-9: see HalfFormat.
    constexpr float kSmallestNormal = 0x1p-6f;
    const float subnormal =
        cuda_cpu::bit_cast<float>(magnitude + cuda_cpu::bit_cast<std::uint32_t>(kSmallestNormal)) -
        kSmallestNormal;
    const std::uint32_t value =
        magnitude < 1u << 23 ? cuda_cpu::bit_cast<std::uint32_t>(subnormal) : magnitude + kRebias;
    return cuda_cpu::bit_cast<float>(value | (bits & 0x80u) << 24);
  }

  /// To nearest, ties to even. What is too large, and infinity, becomes the largest number.
  static constexpr std::uint8_t from_float(float value) {
    const std::uint32_t bits = cuda_cpu::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return kNan;
    const std::uint32_t normal = (magnitude - kRebias + 0x7FFFF + (magnitude >> 20 & 1)) >> 20;
    // The sum with 2^14, whose last bit is worth 2^-9, rounds to the subnormals.
    const std::uint32_t subnormal =
        cuda_cpu::bit_cast<std::uint32_t>(cuda_cpu::bit_cast<float>(magnitude) + 0x1p14f) -
        cuda_cpu::bit_cast<std::uint32_t>(0x1p14f);
    const std::uint32_t rounded = magnitude < cuda_cpu::bit_cast<std::uint32_t>(0x1p-6f)
                                      ? subnormal
                                      : std::min(normal, kLargest);
    return static_cast<std::uint8_t>((bits >> 24 & 0x80) | rounded);
  }
};

/// 5 bits of exponent, 2 of fraction: the upper byte of a half.
struct E5m2Format {
  static constexpr std::uint8_t kNan = 0x7F;
  static constexpr std::uint32_t kLargest = 0x7B;
  static constexpr std::uint32_t kRebias = (127 - 15) << 23;

  static constexpr float to_float(std::uint8_t bits) {
    return HalfFormat::to_float(static_cast<std::uint16_t>(bits << 8));
  }

  /// To nearest, ties to even. What is too large, and infinity, becomes the largest number.
  static constexpr std::uint8_t from_float(float value) {
    const std::uint32_t bits = cuda_cpu::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return kNan;
    const std::uint32_t normal = (magnitude - kRebias + 0xFFFFF + (magnitude >> 21 & 1)) >> 21;
    // The sum with 2^7, whose last bit is worth 2^-16, rounds to the subnormals.
    const std::uint32_t subnormal =
        cuda_cpu::bit_cast<std::uint32_t>(cuda_cpu::bit_cast<float>(magnitude) + 0x1p7f) -
        cuda_cpu::bit_cast<std::uint32_t>(0x1p7f);
    const std::uint32_t rounded = magnitude < cuda_cpu::bit_cast<std::uint32_t>(0x1p-14f)
                                      ? subnormal
                                      : std::min(normal, kLargest);
    return static_cast<std::uint8_t>((bits >> 24 & 0x80) | rounded);
  }
};

}  // namespace cuda_cpu

/// As CUDA's, it becomes a float, or is made of one, only where the program says so.
struct __nv_fp8_e4m3 {
  std::uint8_t __x;

  __nv_fp8_e4m3() = default;
  explicit constexpr __nv_fp8_e4m3(float value) : __x(cuda_cpu::E4m3Format::from_float(value)) {}
  explicit constexpr operator float() const { return cuda_cpu::E4m3Format::to_float(__x); }
};

struct __nv_fp8_e5m2 {
  std::uint8_t __x;

  __nv_fp8_e5m2() = default;
  explicit constexpr __nv_fp8_e5m2(float value) : __x(cuda_cpu::E5m2Format::from_float(value)) {}
  explicit constexpr operator float() const { return cuda_cpu::E5m2Format::to_float(__x); }
};

static_assert(sizeof(__nv_fp8_e4m3) == 1 && sizeof(__nv_fp8_e5m2) == 1);

using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

/// Without saturation what is too large becomes NaN in e4m3, which has no infinity, and infinity in
/// e5m2.
constexpr __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t saturation,
                                                   __nv_fp8_interpretation_t format) {
  const bool e4m3 = format == __NV_E4M3;
  const __nv_fp8_storage_t bits =
      e4m3 ? cuda_cpu::E4m3Format::from_float(x) : cuda_cpu::E5m2Format::from_float(x);
  const float size = x < 0 ? -x : x;
  // Half of the last bit beyond the largest number is what rounds beyond it.
  if (saturation == __NV_NOSAT && (e4m3 ? size > 464.0f : size >= 61440.0f)) {
    return static_cast<__nv_fp8_storage_t>((bits & 0x80) | (e4m3 ? 0x7F : 0x7C));
  }
  return bits;
}
constexpr __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t saturation,
                                                        __nv_fp8_interpretation_t format) {
  return static_cast<__nv_fp8x2_storage_t>(__nv_cvt_float_to_fp8(x.x, saturation, format) |
                                           __nv_cvt_float_to_fp8(x.y, saturation, format) << 8);
}
/// Every number of 8 bits is one of half precision.
constexpr __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x,
                                             __nv_fp8_interpretation_t format) {
  return __half(format == __NV_E4M3 ? cuda_cpu::E4m3Format::to_float(x)
                                    : cuda_cpu::E5m2Format::to_float(x));
}
