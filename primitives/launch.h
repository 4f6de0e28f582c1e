// Questions to the device that a launch depends on, and the grids that follow from the answers.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
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

/// An attribute of the current device.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

/// The same for an attribute that is needed often. The driver is asked once for each device.
template <cudaDeviceAttr kAttribute>
int device_fact() {
  constexpr int kMostDevices = 64;
  static int facts[kMostDevices] = {};  // 1 more than the number; 0: not found yet
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kMostDevices) return device_attribute(kAttribute);
  int fact = __atomic_load_n(&facts[device], __ATOMIC_RELAXED);
  if (fact == 0) {
    fact = 1 + device_attribute(kAttribute);
    __atomic_store_n(&facts[device], fact, __ATOMIC_RELAXED);
  }
  return fact - 1;
}

inline int multiprocessors() { return device_fact<cudaDevAttrMultiProcessorCount>(); }

/// What a device is taken for: an older one, to run what that one would run.
struct Capability {
  int number = 0;        ///< such as 80; 0: the device is taken for what it is
  int shared_bytes = 0;  ///< the most that a block may ask for there
};
/// What this host thread takes its device for, while somebody says so (operators/device_facts.h).
inline thread_local Capability taken_for;

/// The device's own compute capability, such as 90.
inline int own_capability() {
  return 10 * device_fact<cudaDevAttrComputeCapabilityMajor>() +
         device_fact<cudaDevAttrComputeCapabilityMinor>();
}
/// The one that the device is taken for.
inline int compute_capability() {
  return taken_for.number != 0 ? taken_for.number : own_capability();
}

/// The most shared memory that a block may ask for, in bytes.
inline int most_shared_bytes() {
  const int own = device_fact<cudaDevAttrMaxSharedMemoryPerBlockOptin>();
  return taken_for.number != 0 ? std::min(own, taken_for.shared_bytes) : own;
}

/// Whether the device runs code for sm_90a.
inline bool is_hopper() { return own_capability() == 90 && compute_capability() == 90; }

/// A kernel, whatever its parameters are, as the runtime's functions take it.
struct AnyKernel {
  const void* address;

  template <typename... Parameters>
  AnyKernel(void (*kernel)(Parameters...)) : address(reinterpret_cast<const void*>(kernel)) {}
};

/// Lets a block of `kernel` have `bytes` of shared memory, and in fact as much as the device has.
/// What is allowed belongs to the kernel, not to a launch: if a smaller shape allowed only what it
/// needs itself, a launch of a larger shape would fail from then on, in other threads too. So every
/// call sets the same. Where the device has less than `bytes`, nothing happens here, and a launch
/// of the kernel would fail: a caller has to look for another kernel. (A row of a lesson says
/// needs_shared, and is then left out.)
inline void allow_shared_bytes(AnyKernel kernel, int bytes) {
  const int most = device_fact<cudaDevAttrMaxSharedMemoryPerBlockOptin>();
  if (bytes > most) return;
  const struct {
    const void* kernel;
    int64_t attribute;  // other questions about the kernel have other ones
  } question = {kernel.address, cudaFuncAttributeMaxDynamicSharedMemorySize};
  answer_to<bool>(question, [&] {
    cudaFuncAttributes own;  // what the kernel declares itself is no part of what is set
    check(cudaFuncGetAttributes(&own, kernel.address), "cudaFuncGetAttributes");
    check(cudaFuncSetAttribute(kernel.address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               most - static_cast<int>(own.sharedSizeBytes)),
          "cudaFuncSetAttribute");
    return true;
  });
}

/// How many blocks of a kernel the device holds at once: the grid of a kernel whose blocks stay. If
/// none fits, it is one block for each multiprocessor. The launch then fails, and says why.
inline int resident_blocks(AnyKernel kernel, int threads, size_t shared_bytes) {
  int per_multiprocessor = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel.address, threads,
                                                      shared_bytes),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return (per_multiprocessor > 1 ? per_multiprocessor : 1) * multiprocessors();
}

}  // namespace primitives
