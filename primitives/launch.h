// Questions to the device that a launch depends on, and the grids that follow from the answers.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "primitives/check.h"

namespace primitives {

/// The least integer that is not below count / per; neither is negative.
template <typename T, typename U>
__host__ __device__ constexpr std::common_type_t<T, U> ceil_div(T count, U per) {
  return (count + per - 1) / per;
}

/// How many blocks it takes for `count` of something, if one has `per_block` of them.
constexpr unsigned blocks_for(int64_t count, int64_t per_block) {
  return static_cast<unsigned>(ceil_div(count, per_block));
}

/// What find() returns, a number from 0 on that is the same for this device whenever it is asked
/// for: found once a device. find is a lambda without captures, whose type has a table of its own.
template <typename Find>
int fact_of_device(Find find) {
  constexpr int kMostDevices = 64;
  static std::atomic<int> facts[kMostDevices] = {};  // 1 more than the number; 0: not asked yet
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kMostDevices) return find();
  int fact = facts[device].load(std::memory_order_relaxed);
  if (fact == 0) {
    fact = 1 + find();
    facts[device].store(fact, std::memory_order_relaxed);
  }
  return fact - 1;
}

/// An attribute of the current device.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

inline int multiprocessors() {
  return fact_of_device([] { return device_attribute(cudaDevAttrMultiProcessorCount); });
}

/// The most shared memory that a block may ask for, in bytes.
inline int most_shared_bytes() {
  return fact_of_device([] { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); });
}

/// Whether the device runs code for sm_90a.
inline bool is_hopper() {
  return fact_of_device([] {
    return static_cast<int>(device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
                            device_attribute(cudaDevAttrComputeCapabilityMinor) == 0);
  });
}

/// Lets a block of `kernel` have `bytes` of shared memory. Where the device has less the kernel
/// cannot run, and nothing happens here: who launches it says what it needs.
template <typename Kernel>
void allow_shared_bytes(Kernel* kernel, int bytes) {
  if (bytes > most_shared_bytes()) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "cudaFuncSetAttribute");
}

/// The grid of a kernel whose blocks stay: how many of them the device holds at once. One for each
/// multiprocessor where none fits: the launch then fails, and says why.
template <typename Kernel>
int resident_blocks(Kernel* kernel, int threads, size_t shared_bytes) {
  int per_multiprocessor = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads,
                                                      shared_bytes),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return (per_multiprocessor > 1 ? per_multiprocessor : 1) * multiprocessors();
}

}  // namespace primitives
