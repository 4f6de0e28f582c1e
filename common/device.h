// What the device is, and the roofline that follows from it.
#pragma once

#include <cstdint>
#include <string>

#include "common/check.h"

namespace common {

/// The arithmetic unit that bounds a problem: which of a device's peak rates applies to it.
enum class Rate {
  fp32,  ///< fp32 fused multiply-adds on the CUDA cores
  tf32,  ///< tensor cores, fp32 operands rounded to 10 bits of mantissa
  fp16,  ///< tensor cores, fp16 or bf16 operands, fp32 accumulation
};

/// The current CUDA device. Rates are peaks computed from the device's attributes (number of
/// multiprocessors, clock, memory clock and bus width); 0 where an attribute is unknown, as on the
/// CPU.
struct Device {
  std::string backend;  ///< "cuda" or "cpu"
  std::string name;
  int major = 0, minor = 0;  ///< compute capability
  int sms = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
  int shared_bytes = 0;         ///< most shared memory that a block may ask for
  std::string driver, runtime;  ///< CUDA versions, such as "13.0"
  double bytes_per_second = 0;
  double clock_hz = 0;

  static Device current();

  /// FLOP/s, an FMA counting as two; 0 if unknown.
  double peak(Rate rate) const;
};

}  // namespace common
