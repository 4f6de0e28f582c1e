// The one place of the backend's mutable state that outlives a call: the "device".

#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>

#include "cuda_runtime_api.h"

namespace cuda_cpu {

/// Memory that the runtime knows: from cudaMalloc and its kin, or a device variable.
struct Allocation {
  std::size_t size;
  cudaMemoryType type;
  bool variable = false;
};

struct DeviceState {
  /// A kernel has failed: from now on every call returns cudaErrorLaunchFailure.
  std::atomic<bool> broken = false;

  /// Guards the members below.
  std::mutex mutex;
  std::map<const char*, Allocation> allocations;
  std::map<const void*, std::size_t> dynamic_shared_limits;
};

DeviceState& device();

/// Remembers an error of the calling host thread for cudaGetLastError(), and returns it. A broken
/// device turns every result into cudaErrorLaunchFailure.
cudaError_t result(cudaError_t error);

/// For ThreadSanitizer: what the calling host thread does next comes after all kernels. A launch
/// that starts early does without.
void finish_kernels();

}  // namespace cuda_cpu
