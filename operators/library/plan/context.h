// What the library asks of the driver, of the runtime and of the environment: in which context a
// thread works, where memory lies, and what the device is taken for.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <string>

#include "operators/device_facts.h"
#include "operators/library/call.h"
#include "primitives/check.h"
#include "primitives/launch.h"

namespace operators::library {

inline uintptr_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

inline std::string dotted(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

/// What plans that are made now take the current device for: what the environment's variable says,
/// or what it is.
inline primitives::Capability capability_to_plan_for() {
  const char* const variable = "FUSED_KERNELS_CAPABILITY";
  const char* const said = std::getenv(variable);
  if (said == nullptr || *said == '\0') return {};
  const auto found =
      std::find_if(std::begin(kCapabilities), std::end(kCapabilities),
                   [&](const primitives::Capability& each) { return dotted(each.number) == said; });
  if (found == std::end(kCapabilities)) {
    throw Refusal{FK_BAD_ARGUMENT, std::string(variable) + " is \"" + said +
                                       "\"; it has to be a compute capability, such as 8.0"};
  }
  if (found->number > primitives::own_capability()) {
    throw Refusal{FK_BAD_DEVICE, std::string(variable) + " is " + said + "; this GPU has only " +
                                     dotted(primitives::own_capability())};
  }
  return *found;
}

/// What this library asks of the driver, not of the runtime.
struct Driver {
  decltype(&cuPointerGetAttribute) pointer_attribute;
  decltype(&cuCtxGetId) context_id;
};
inline const Driver& driver() {
  // Through the runtime, so that the library can be loaded where there is no driver to link to.
  const auto entry = []<typename Function>(Function*& to, const char* name, unsigned version) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    primitives::check(
        cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result),
        "cudaGetDriverEntryPointByVersion");
    if (result != cudaDriverEntryPointSuccess) {
      throw primitives::Error(std::string("the driver has no ") + name);
    }
    to = reinterpret_cast<Function*>(function);
  };
  static const Driver found = [&] {
    Driver driver = {};
    entry(driver.pointer_attribute, "cuPointerGetAttribute", 4000);
    entry(driver.context_id, "cuCtxGetId", 12000);
    return driver;
  }();
  return found;
}

/// A number that no other context has, before or after. A thread that has used nothing of CUDA's
/// has no context yet, which the driver's tensor maps need: then it gets one.
inline uint64_t context_of_thread() {
  unsigned long long id = 0;
  if (driver().context_id(nullptr, &id) == CUDA_SUCCESS) return id;
  cudaStreamCaptureStatus status;
  primitives::check(cudaStreamIsCapturing(cudaStreamPerThread, &status), "cudaStreamIsCapturing");
  if (driver().context_id(nullptr, &id) != CUDA_SUCCESS) {
    throw primitives::Error("cuCtxGetId: the thread has no context");
  }
  return id;
}

/// Allocations that cudaPointerGetAttributes has found to be the current device's. Asking for an
/// allocation's number takes the driver a tenth of that time; and none gets the number of another
/// one that was freed.
class KnownAllocations {
 public:
  /// Forgets those of another context.
  void are_of(uint64_t context) {
    if (context == context_) return;
    *this = {};
    context_ = context;
  }
  bool has(uint64_t id) const { return numbers_[id % kMost] == id; }
  void add(uint64_t id) { numbers_[id % kMost] = id; }

  /// 0 where there is none.
  static uint64_t number_of(const void* pointer) {
    unsigned long long id = 0;
    const CUresult status =
        driver().pointer_attribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, address(pointer));
    return status == CUDA_SUCCESS ? id : 0;
  }
  /// Whether it is memory of cudaMalloc(), all on one device. (Of addresses that are reserved first
  /// and mapped later, parts may be on different ones.)
  static bool is_whole(const void* pointer) {
    unsigned long long whole = 0;
    const CUresult status = driver().pointer_attribute(
        &whole, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address(pointer));
    return status == CUDA_SUCCESS && whole != 0;
  }

 private:
  static constexpr size_t kMost = 256;
  uint64_t context_ = 0;
  uint64_t numbers_[kMost] = {};
};
inline thread_local KnownAllocations known_allocations;

}  // namespace operators::library
