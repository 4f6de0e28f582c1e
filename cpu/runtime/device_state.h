// The one place of the backend's mutable state that outlives a call: the devices.

#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

#include "cuda_runtime_api.h"

namespace cuda_cpu {

/// Memory that the runtime knows: from cudaMalloc and its kin, or a device variable.
struct Allocation {
  std::size_t size;
  cudaMemoryType type;
  bool variable = false;
  int device = 0;
  const void* place = nullptr;  ///< in the program, that has asked for it
  unsigned long long id = 0;    ///< no other allocation's, before or after; 0: none
};

inline constexpr int kMostDevices = 8;
/// How many devices there are, all alike.
int device_count();
/// The calling host thread's.
int current_device();

/// What all devices share.
struct DeviceState {
  /// A kernel has failed: from now on every call returns this.
  std::atomic<cudaError_t> broken = cudaSuccess;
  std::atomic<unsigned long long> resets = 0;
  std::atomic<unsigned> streams = 0;  ///< that the program has made

  /// Guards the members below.
  std::mutex mutex;
  std::map<const char*, Allocation> allocations;
  unsigned long long last_id = 0;                                            ///< of an allocation
  std::map<std::pair<int, const void*>, std::size_t> dynamic_shared_limits;  ///< by device
  /// Bit p of device d: it can use the memory of device p. As soon as any bit is set, kernels may
  /// wait for those of other devices: see execute().
  unsigned peers[kMostDevices] = {};
  std::atomic<bool> concurrent = false;
};

DeviceState& device();

/// Remembers an error of the calling host thread for cudaGetLastError(), and returns it. A broken
/// device turns every result into its error.
cudaError_t result(cudaError_t error);

/// Runs what launches have left to run.
void run_kept_kernels();
/// The same, and for ThreadSanitizer what the calling host thread does next comes after all work of
/// all streams.
void finish_kernels();

}  // namespace cuda_cpu
