// What the device is, and the roofline that follows from it.
#pragma once

#include <cstdint>
#include <string>

#include "common/check.h"

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

  /// Whether it runs code for sm_90a.
  bool is_hopper() const { return major == 9 && minor == 0; }

  /// FLOP/s, an FMA counting as two; 0 if unknown.
  double peak(Rate rate) const;
};

/// The most shared memory that a block may ask for on the current device.
int most_shared_bytes();

/// Lets a block of `kernel` have `bytes` of shared memory. Where the device has less the kernel
/// cannot run, and its row says what it needs: nothing happens here.
template <typename Kernel>
void allow_shared_bytes(Kernel* kernel, int bytes) {
  if (bytes > most_shared_bytes()) return;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

/// How many blocks it takes for `count` of something, if one has `per_block` of them.
constexpr unsigned blocks_for(int64_t count, int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

/// The grid of a kernel whose blocks stay: how many of them the device holds at once.
template <typename Kernel>
int resident_blocks(Kernel* kernel, int threads, size_t shared_bytes, const Device& device) {
  int per_sm = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, shared_bytes));
  return per_sm > 1 ? per_sm * device.sms : device.sms;
}
