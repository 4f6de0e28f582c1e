#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <string>

#include "cpu/execution/cuda_cpu.h"
#include "cpu/execution/execution.h"
#include "cpu/order/stream_order.h"
#include "cpu/runtime/capture.h"
#include "cpu/runtime/device_state.h"
#include "cpu/runtime/environment.h"
#include "cpu/watch/ledger.h"
#include "cpu/watch/memory_watch.h"
#include "cuda.h"
#include "cuda_runtime_api.h"

namespace cuda_cpu {

namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int chosen_device = 0;

bool is_device(int device) { return device >= 0 && device < device_count(); }

struct ErrorText {
  cudaError_t error;
  const char* name;
  const char* text;
};

#define CUDA_CPU_ERROR(error, text) \
  { error, #error, text }
constexpr ErrorText kErrors[] = {
    CUDA_CPU_ERROR(cudaSuccess, "no error"),
    CUDA_CPU_ERROR(cudaErrorInvalidValue, "invalid argument"),
    CUDA_CPU_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    CUDA_CPU_ERROR(cudaErrorInitializationError, "initialization error"),
    CUDA_CPU_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    CUDA_CPU_ERROR(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    CUDA_CPU_ERROR(cudaErrorInvalidSymbol, "invalid device symbol"),
    CUDA_CPU_ERROR(cudaErrorInvalidDevicePointer, "invalid device pointer"),
    CUDA_CPU_ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    CUDA_CPU_ERROR(cudaErrorInsufficientDriver,
                   "CUDA driver version is insufficient for CUDA runtime version"),
    CUDA_CPU_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    CUDA_CPU_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    CUDA_CPU_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    CUDA_CPU_ERROR(cudaErrorNoKernelImageForDevice,
                   "no kernel image is available for execution on the device"),
    CUDA_CPU_ERROR(cudaErrorPeerAccessUnsupported,
                   "peer access is not supported between these two devices"),
    CUDA_CPU_ERROR(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    CUDA_CPU_ERROR(cudaErrorPeerAccessNotEnabled, "peer access has not been enabled"),
    CUDA_CPU_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    CUDA_CPU_ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    CUDA_CPU_ERROR(cudaErrorNotReady, "device not ready"),
    CUDA_CPU_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    CUDA_CPU_ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    CUDA_CPU_ERROR(cudaErrorLaunchTimeout, "the launch timed out and was terminated"),
    CUDA_CPU_ERROR(cudaErrorAssert, "device-side assert triggered"),
    CUDA_CPU_ERROR(cudaErrorIllegalInstruction, "an illegal instruction was encountered"),
    CUDA_CPU_ERROR(cudaErrorMisalignedAddress, "misaligned address"),
    CUDA_CPU_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    CUDA_CPU_ERROR(cudaErrorCooperativeLaunchTooLarge, "too many blocks in cooperative launch"),
    CUDA_CPU_ERROR(cudaErrorNotPermitted, "operation not permitted"),
    CUDA_CPU_ERROR(cudaErrorNotSupported, "operation not supported"),
    CUDA_CPU_ERROR(cudaErrorStreamCaptureUnsupported,
                   "operation not permitted when stream is capturing"),
    CUDA_CPU_ERROR(cudaErrorStreamCaptureInvalidated,
                   "operation failed due to a previous error during capture"),
    CUDA_CPU_ERROR(cudaErrorStreamCaptureMerge,
                   "operation would result in a merge of separate capture sequences"),
    CUDA_CPU_ERROR(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream"),
    CUDA_CPU_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    CUDA_CPU_ERROR(cudaErrorStreamCaptureIsolation,
                   "dependency created on uncaptured work in another stream"),
    CUDA_CPU_ERROR(cudaErrorStreamCaptureImplicit,
                   "operation would make the legacy stream depend on a capturing blocking stream"),
    CUDA_CPU_ERROR(cudaErrorCapturedEvent,
                   "operation not permitted on an event last recorded in "
                   "a capturing stream"),
    CUDA_CPU_ERROR(cudaErrorStreamCaptureWrongThread,
                   "attempt to terminate a thread-local capture sequence from another thread"),
    CUDA_CPU_ERROR(cudaErrorGraphExecUpdateFailure,
                   "the graph update was not performed because it included changes which violated "
                   "constraints specific to instantiated graph update"),
    CUDA_CPU_ERROR(cudaErrorInvalidClusterSize, "invalid cluster size"),
    CUDA_CPU_ERROR(cudaErrorUnknown, "unknown error"),
};
#undef CUDA_CPU_ERROR

const ErrorText* find(cudaError_t error) {
  for (const ErrorText& entry : kErrors) {
    if (entry.error == error) return &entry;
  }
  return nullptr;
}

/// The value of the first line "key : value" of a file in /proc; empty if there is none.
std::string proc_value(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const std::size_t start = line.find_first_not_of(" \t", line.find(':') + 1);
    return start == std::string::npos ? "" : line.substr(start);
  }
  return "";
}

std::size_t meminfo_bytes(const char* key) {
  return 1024 * std::strtoull(proc_value("/proc/meminfo", key).c_str(), nullptr, 10);
}

cudaError_t allocate(void** pointer, std::size_t size, cudaMemoryType type, const void* place) {
  if (!pointer) return result(cudaErrorInvalidValue);
  *pointer = nullptr;
  if (const cudaError_t error = forbidden_in_capture()) return result(error);
  if (device().broken) return result(device().broken);
  if (size == 0) return result(cudaSuccess);
  void* memory = nullptr;
  const std::size_t asked = size + (keeps_ledger() ? kGap : 0);
  // The host is kept out by pages, so none has memory of both.
  const bool own_pages = watches_memory() || (keeps_ledger() && !kSanitized);
  if (size > meminfo_bytes("MemAvailable") ||
      posix_memalign(&memory, own_pages ? kPage : 256, own_pages ? in_pages(asked) : asked) != 0) {
    return result(cudaErrorMemoryAllocation);
  }
  std::memset(memory, 0xFF, size);
  {
    std::lock_guard lock(device().mutex);
    device().allocations[static_cast<char*>(memory)] = {
        size, type, false, current_device(), place, ++device().last_id};
  }
  if (type == cudaMemoryTypeDevice) ledger_closes(memory, size);
  *pointer = memory;
  return result(cudaSuccess);
}

/// Frees memory when all work has ended, or, with a stream, when that stream has come so far.
cudaError_t release(void* pointer, bool host, const std::shared_ptr<StreamOrder>& order = nullptr,
                    const void* place = nullptr) {
  if (order) {
    run_kept_kernels();
  } else {
    finish_kernels();
  }
  if (!pointer) return result(cudaSuccess);
  std::size_t size = 0;
  cudaMemoryType type = cudaMemoryTypeHost;
  {
    std::lock_guard lock(device().mutex);
    auto& allocations = device().allocations;
    const auto found = allocations.find(static_cast<char*>(pointer));
    if (found == allocations.end() || found->second.variable ||
        (found->second.type == cudaMemoryTypeHost) != host) {
      return result(cudaErrorInvalidValue);
    }
    size = found->second.size;
    type = found->second.type;
    allocations.erase(found);
  }
  if (type == cudaMemoryTypeDevice) ledger_opens(pointer, size);
  if (ledger_freed(pointer, size)) return result(cudaSuccess);
  if (order) {
    const StreamWork work(*order, place);
    std::free(pointer);
  } else {
    std::free(pointer);
  }
  return result(cudaSuccess);
}

/// What `pointer` points to, and how many bytes there are from there on.
struct Region {
  cudaMemoryType type;
  std::size_t bytes;
  int device = 0;
  unsigned long long id = 0;  // of the allocation
};

Region region_of(const void* pointer) {
  const char* address = static_cast<const char*>(pointer);
  std::lock_guard lock(device().mutex);
  auto& allocations = device().allocations;
  auto next = allocations.upper_bound(address);
  if (next != allocations.begin()) {
    const auto& [start, allocation] = *--next;
    if (address < start + allocation.size) {
      return {allocation.type, static_cast<std::size_t>(start + allocation.size - address),
              allocation.device, allocation.id};
    }
  }
  return {cudaMemoryTypeUnregistered, std::numeric_limits<std::size_t>::max()};
}

bool valid_side(const void* pointer, std::size_t extent, bool must_be_device, bool must_be_host) {
  const Region region = region_of(pointer);
  const bool host = region.type == cudaMemoryTypeUnregistered || region.type == cudaMemoryTypeHost;
  if (must_be_device && host) return false;
  if (must_be_host && region.type == cudaMemoryTypeDevice) return false;
  return extent <= region.bytes;
}

/// Who asks for work, and for which stream. Null: for the legacy one, and the caller waits.
struct Asked {
  std::shared_ptr<StreamOrder> order;
  const void* place;  ///< in the program

  static Asked in(cudaStream_t stream, const void* place) { return {order_of(stream), place}; }
  bool waits() const { return !order; }
  StreamOrder& stream() {
    if (!order) order = order_of(cudaStreamLegacy);
    return *order;
  }
};

cudaError_t copy(Asked asked, void* target, std::size_t target_pitch, const void* source,
                 std::size_t source_pitch, std::size_t width, std::size_t height,
                 cudaMemcpyKind kind) {
  run_kept_kernels();
  if (device().broken) return result(device().broken);
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) {
    return result(cudaErrorInvalidMemcpyDirection);
  }
  if (width == 0 || height == 0) return result(cudaSuccess);
  if (!target || !source) return result(cudaErrorInvalidValue);
  if (height > 1 && (width > target_pitch || width > source_pitch)) {
    return result(cudaErrorInvalidPitchValue);
  }
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool to_host = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  const bool from_host = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost;
  if (!valid_side(target, (height - 1) * target_pitch + width, to_device, to_host) ||
      !valid_side(source, (height - 1) * source_pitch + width, from_device, from_host)) {
    return result(cudaErrorInvalidValue);
  }
  const OpenMemory open(target);
  // Pages of the host that are not pinned are read, or written, before the call returns.
  const bool host_reads = region_of(source).type == cudaMemoryTypeUnregistered;
  const bool waits = asked.waits() || region_of(target).type == cudaMemoryTypeUnregistered;
  StreamOrder& order = asked.stream();
  {
    StreamWork work(order, asked.place, waits);
    for (std::size_t row = 0; row < height; ++row) {
      work.copy(static_cast<char*>(target) + row * target_pitch,
                static_cast<const char*>(source) + row * source_pitch, width, host_reads && !waits);
    }
  }
  if (waits) host_waits_for(order);
  return result(cudaSuccess);
}

/// What a copy or a memset does in the legacy stream, for which the host waits.
std::optional<cudaError_t> refused_in_capture() {
  if (const auto refused = captured(cudaStreamLegacy, cudaGraphNodeTypeMemcpy, {})) return refused;
  if (const cudaError_t error = forbidden_in_capture()) return error;
  return {};
}

cudaError_t fill(Asked asked, void* target, int value, std::size_t size) {
  run_kept_kernels();
  if (device().broken) return result(device().broken);
  if (size == 0) return result(cudaSuccess);
  if (!valid_side(target, size, false, false) || !target ||
      region_of(target).type == cudaMemoryTypeUnregistered) {
    return result(cudaErrorInvalidValue);
  }
  const OpenMemory open(target);
  // The host does not wait for a memset of the device's memory.
  const bool waits = asked.waits() && region_of(target).type != cudaMemoryTypeDevice;
  StreamOrder& order = asked.stream();
  {
    StreamWork work(order, asked.place, waits);
    work.fill(target, value, size);
  }
  if (waits) host_waits_for(order);
  return result(cudaSuccess);
}

/// Memory of a graph: freed when the last of what knows it is gone.
struct GraphMemory {
  void* pointer = nullptr;
  ~GraphMemory() { release(pointer, false); }
};

cudaError_t attribute_value(cudaDeviceAttr attribute, int* value) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = kMaxThreadsPerBlock;
      break;
    case cudaDevAttrMaxBlockDimZ:
      *value = 64;
      break;
    case cudaDevAttrMaxGridDimX:
    case cudaDevAttrMaxPitch:
      *value = std::numeric_limits<int>::max();
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *value = 65535;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = kDefaultSharedBytes;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(max_shared_bytes());
      break;
    case cudaDevAttrTotalConstantMemory:
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = 65536;
      break;
    case cudaDevAttrWarpSize:
      *value = warpSize;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = multiprocessors();
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = compute_capability() / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = compute_capability() % 10;
      break;
    case cudaDevAttrL2CacheSize:
      *value = 2 << 20;  // whatever the machine has: kernels choose their schedules by it
      break;
    case cudaDevAttrIntegrated:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrMaxBlocksPerMultiprocessor:
    case cudaDevAttrClusterLaunch:
    case cudaDevAttrCooperativeLaunch:
      *value = 1;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}

}  // namespace

DeviceState& device() {
  static DeviceState* const state = [] {
    environment();  // is checked before anything else is done
    report_crashes();
    return new DeviceState;
  }();
  return *state;
}

int device_count() { return environment().devices; }

int current_device() { return chosen_device; }

cudaError_t symbol_address(void** pointer, void* variable, std::size_t size) {
  *pointer = variable;
  std::lock_guard lock(device().mutex);
  device().allocations[static_cast<char*>(variable)] = {size, cudaMemoryTypeManaged, true};
  return result(cudaSuccess);
}

cudaError_t result(cudaError_t error) {
  if (const cudaError_t sticky = device().broken) error = sticky;
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace cuda_cpu

using cuda_cpu::device;
using cuda_cpu::result;

const char* cudaGetErrorName(cudaError_t error) {
  const auto* entry = cuda_cpu::find(error);
  return entry ? entry->name : "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  const auto* entry = cuda_cpu::find(error);
  return entry ? entry->text : "unrecognized error code";
}

cudaError_t cudaPeekAtLastError() {
  cuda_cpu::ledger_asked();
  result(cudaSuccess);
  return cuda_cpu::last_error;
}

cudaError_t cudaGetLastError() {
  cuda_cpu::ledger_asked();
  result(cudaSuccess);
  return std::exchange(cuda_cpu::last_error, cudaSuccess);
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = cuda_cpu::device_count();
  return result(cudaSuccess);
}

cudaError_t cudaSetDevice(int device) {
  if (!cuda_cpu::is_device(device)) return result(cudaErrorInvalidDevice);
  cuda_cpu::chosen_device = device;
  return result(cudaSuccess);
}

cudaError_t cudaGetDevice(int* device) {
  *device = cuda_cpu::chosen_device;
  return result(cudaSuccess);
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!cuda_cpu::is_device(device) || !cuda_cpu::is_device(peer)) {
    return result(cudaErrorInvalidDevice);
  }
  *can = device != peer && cuda_cpu::environment().peer_access;
  return result(cudaSuccess);
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  int can = 0;
  const int own = cuda_cpu::chosen_device;
  const cudaError_t valid = cudaDeviceCanAccessPeer(&can, own, peer);
  if (valid != cudaSuccess) return valid;
  if (!can) return result(cudaErrorPeerAccessUnsupported);
  std::lock_guard lock(device().mutex);
  if (device().peers[own] >> peer & 1) return result(cudaErrorPeerAccessAlreadyEnabled);
  device().peers[own] |= 1u << peer;
  device().concurrent = true;
  return result(cudaSuccess);
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  cuda_cpu::finish_kernels();
  if (!cuda_cpu::is_device(peer)) return result(cudaErrorInvalidDevice);
  std::lock_guard lock(device().mutex);
  unsigned& peers = device().peers[cuda_cpu::chosen_device];
  if (!(peers >> peer & 1)) return result(cudaErrorPeerAccessNotEnabled);
  peers &= ~(1u << peer);
  device().concurrent = std::any_of(std::begin(device().peers), std::end(device().peers),
                                    [](unsigned peers) { return peers != 0; });
  return result(cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!cuda_cpu::is_device(device)) return result(cudaErrorInvalidDevice);
  return result(cuda_cpu::attribute_value(attribute, value));
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!cuda_cpu::is_device(device)) return result(cudaErrorInvalidDevice);
  *properties = {};
  const auto get = [](cudaDeviceAttr attribute) {
    int value = 0;
    cuda_cpu::attribute_value(attribute, &value);
    return value;
  };
  properties->major = get(cudaDevAttrComputeCapabilityMajor);
  properties->minor = get(cudaDevAttrComputeCapabilityMinor);
  std::string name = cuda_cpu::proc_value("/proc/cpuinfo", "model name");
  if (name.empty()) name = "CPU";
  if (cuda_cpu::environment().compute_capability) {
    name += " as compute capability " + std::to_string(properties->major) + "." +
            std::to_string(properties->minor);
  }
  name.copy(properties->name, sizeof properties->name - 1);
  properties->totalGlobalMem = cuda_cpu::meminfo_bytes("MemTotal");
  properties->sharedMemPerBlock = cuda_cpu::kDefaultSharedBytes;
  properties->sharedMemPerBlockOptin = cuda_cpu::max_shared_bytes();
  properties->sharedMemPerMultiprocessor = cuda_cpu::max_shared_bytes();
  properties->clusterLaunch = get(cudaDevAttrClusterLaunch);
  properties->cooperativeLaunch = get(cudaDevAttrCooperativeLaunch);
  properties->warpSize = warpSize;
  properties->memPitch = get(cudaDevAttrMaxPitch);
  properties->maxThreadsPerBlock = get(cudaDevAttrMaxThreadsPerBlock);
  properties->maxThreadsPerMultiProcessor = get(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->maxBlocksPerMultiProcessor = get(cudaDevAttrMaxBlocksPerMultiprocessor);
  for (int i = 0; i < 3; ++i) {
    properties->maxThreadsDim[i] = get(static_cast<cudaDeviceAttr>(cudaDevAttrMaxBlockDimX + i));
    properties->maxGridSize[i] = get(static_cast<cudaDeviceAttr>(cudaDevAttrMaxGridDimX + i));
  }
  properties->regsPerBlock = get(cudaDevAttrMaxRegistersPerBlock);
  properties->regsPerMultiprocessor = get(cudaDevAttrMaxRegistersPerMultiprocessor);
  properties->totalConstMem = get(cudaDevAttrTotalConstantMemory);
  properties->multiProcessorCount = get(cudaDevAttrMultiProcessorCount);
  properties->integrated = get(cudaDevAttrIntegrated);
  properties->canMapHostMemory = get(cudaDevAttrCanMapHostMemory);
  properties->unifiedAddressing = get(cudaDevAttrUnifiedAddressing);
  properties->managedMemory = get(cudaDevAttrManagedMemory);
  properties->concurrentManagedAccess = get(cudaDevAttrConcurrentManagedAccess);
  properties->hostRegisterSupported = get(cudaDevAttrHostRegisterSupported);
  properties->l2CacheSize = get(cudaDevAttrL2CacheSize);
  return result(cudaSuccess);
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return result(cudaSuccess);
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return result(cudaSuccess);
}

cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t error = cuda_cpu::forbidden_in_capture()) return result(error);
  cuda_cpu::finish_kernels();
  return result(cudaSuccess);
}

cudaError_t cudaDeviceReset() {
  device().broken = cudaSuccess;
  ++device().resets;
  cuda_cpu::last_error = cudaSuccess;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, std::size_t size) {
  return cuda_cpu::allocate(pointer, size, cudaMemoryTypeDevice, __builtin_return_address(0));
}

cudaError_t cudaFree(void* pointer) { return cuda_cpu::release(pointer, false); }

cudaError_t cudaMallocAsync(void** pointer, std::size_t size, cudaStream_t stream) {
  const auto memory = std::make_shared<cuda_cpu::GraphMemory>();
  const auto captured = cuda_cpu::captured(stream, cudaGraphNodeTypeMemAlloc,
                                           [memory](cudaStream_t) { return cudaSuccess; });
  if (!captured) return cudaMalloc(pointer, size);
  if (*captured != cudaSuccess) return result(*captured);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t error = cudaMalloc(&memory->pointer, size);
  cudaThreadExchangeStreamCaptureMode(&mode);
  *pointer = memory->pointer;
  return error;
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  const auto captured = cuda_cpu::captured(stream, cudaGraphNodeTypeMemFree, {});
  if (captured) return result(*captured);
  return cuda_cpu::release(pointer, false, cuda_cpu::order_of(stream), __builtin_return_address(0));
}

cudaError_t cudaMallocManaged(void** pointer, std::size_t size, unsigned) {
  return cuda_cpu::allocate(pointer, size, cudaMemoryTypeManaged, __builtin_return_address(0));
}

cudaError_t cudaMallocHost(void** pointer, std::size_t size) {
  return cuda_cpu::allocate(pointer, size, cudaMemoryTypeHost, __builtin_return_address(0));
}

cudaError_t cudaHostAlloc(void** pointer, std::size_t size, unsigned) {
  return cudaMallocHost(pointer, size);
}

cudaError_t cudaHostRegister(void* pointer, std::size_t size, unsigned) {
  std::lock_guard lock(device().mutex);
  device().allocations[static_cast<char*>(pointer)] = {size, cudaMemoryTypeHost, true, 0, nullptr};
  return result(cudaSuccess);
}

cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard lock(device().mutex);
  return result(device().allocations.erase(static_cast<char*>(pointer)) ? cudaSuccess
                                                                        : cudaErrorInvalidValue);
}

cudaError_t cudaFreeHost(void* pointer) { return cuda_cpu::release(pointer, true); }

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = cuda_cpu::meminfo_bytes("MemAvailable");
  *total = cuda_cpu::meminfo_bytes("MemTotal");
  return result(cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  void* address = const_cast<void*>(pointer);
  const auto [type, bytes, device, id] = cuda_cpu::region_of(pointer);
  attributes->type = type;
  attributes->device = device;
  attributes->devicePointer = type == cudaMemoryTypeUnregistered ? nullptr : address;
  attributes->hostPointer =
      type == cudaMemoryTypeHost || type == cudaMemoryTypeManaged ? address : nullptr;
  return result(cudaSuccess);
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  const auto region = cuda_cpu::region_of(reinterpret_cast<const void*>(pointer));
  if (region.id == 0) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_BUFFER_ID) {
    *static_cast<unsigned long long*>(data) = region.id;
  } else {
    *static_cast<bool*>(data) = region.type == cudaMemoryTypeDevice;
  }
  return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext, unsigned long long* id) {
  *id = 1 + static_cast<unsigned>(cuda_cpu::current_device()) +
        cuda_cpu::kMostDevices * device().resets;
  return CUDA_SUCCESS;
}

cudaError_t cudaMemcpy(void* target, const void* source, std::size_t size, cudaMemcpyKind kind) {
  if (const auto refused = cuda_cpu::refused_in_capture()) return result(*refused);
  return cuda_cpu::copy({nullptr, __builtin_return_address(0)}, target, 0, source, 0, size, 1,
                        kind);
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const void* const place = __builtin_return_address(0);
  const auto copy = [=](cudaStream_t in) {
    return cuda_cpu::copy(cuda_cpu::Asked::in(in, place), target, 0, source, 0, size, 1, kind);
  };
  return cuda_cpu::in_order(stream, cudaGraphNodeTypeMemcpy, copy);
}

cudaError_t cudaMemcpyPeer(void* target, int, const void* source, int, std::size_t size) {
  return cudaMemcpy(target, source, size, cudaMemcpyDeviceToDevice);
}

cudaError_t cudaMemcpy2D(void* target, std::size_t target_pitch, const void* source,
                         std::size_t source_pitch, std::size_t width, std::size_t height,
                         cudaMemcpyKind kind) {
  if (const auto refused = cuda_cpu::refused_in_capture()) return result(*refused);
  return cuda_cpu::copy({nullptr, __builtin_return_address(0)}, target, target_pitch, source,
                        source_pitch, width, height, kind);
}

cudaError_t cudaMemcpy2DAsync(void* target, std::size_t target_pitch, const void* source,
                              std::size_t source_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  const void* const place = __builtin_return_address(0);
  const auto copy = [=](cudaStream_t in) {
    return cuda_cpu::copy(cuda_cpu::Asked::in(in, place), target, target_pitch, source,
                          source_pitch, width, height, kind);
  };
  return cuda_cpu::in_order(stream, cudaGraphNodeTypeMemcpy, copy);
}

cudaError_t cudaMemset(void* target, int value, std::size_t size) {
  if (const auto refused = cuda_cpu::refused_in_capture()) return result(*refused);
  return cuda_cpu::fill({nullptr, __builtin_return_address(0)}, target, value, size);
}

cudaError_t cudaMemsetAsync(void* target, int value, std::size_t size, cudaStream_t stream) {
  const void* const place = __builtin_return_address(0);
  const auto fill = [=](cudaStream_t in) {
    return cuda_cpu::fill(cuda_cpu::Asked::in(in, place), target, value, size);
  };
  return cuda_cpu::in_order(stream, cudaGraphNodeTypeMemset, fill);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = new CUstream_st{flags, {}, {}};
  ++device().streams;
  return result(cudaSuccess);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (!stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
    return result(cudaErrorInvalidResourceHandle);
  }
  cuda_cpu::forget_capture(stream);
  delete stream;
  return result(cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const cudaError_t error = cuda_cpu::forbidden_in_capture(stream)) return result(error);
  cuda_cpu::run_kept_kernels();
  cuda_cpu::host_waits_for(*cuda_cpu::order_of(stream));
  return result(cudaSuccess);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (!event) return result(cudaErrorInvalidResourceHandle);
  if (const auto captured = cuda_cpu::wait_in_capture(stream, event)) return result(*captured);
  cuda_cpu::order_after_event(*cuda_cpu::order_of(stream), event);
  return result(cudaSuccess);
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return result(cudaSuccess);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (!event) return result(cudaErrorInvalidResourceHandle);
  delete event;
  return result(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (!event) return result(cudaErrorInvalidResourceHandle);
  event->recorded = false;
  if (cuda_cpu::record_in_capture(event, stream)) return result(cudaSuccess);
  event->recorded = true;
  cuda_cpu::order_event(event, *cuda_cpu::order_of(stream));
  event->time = std::chrono::steady_clock::now();
  return result(cudaSuccess);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (!event) return result(cudaErrorInvalidResourceHandle);
  if (event->captured.capture) return result(cudaErrorCapturedEvent);
  cuda_cpu::run_kept_kernels();
  cuda_cpu::host_waits_for_event(event);
  return result(cudaSuccess);
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaEventSynchronize(event); }

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!start || !end || !start->recorded || !end->recorded) {
    return result(cudaErrorInvalidResourceHandle);
  }
  cuda_cpu::host_waits_for_event(end);  // success says that it is over
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return result(cudaSuccess);
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value < 0 || static_cast<std::size_t>(value) > cuda_cpu::max_shared_bytes()) {
      return result(cudaErrorInvalidValue);
    }
    std::lock_guard lock(device().mutex);
    device().dynamic_shared_limits[{cuda_cpu::current_device(), function}] = value;
  }
  return result(cudaSuccess);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  *attributes = {};
  attributes->maxThreadsPerBlock = cuda_cpu::kMaxThreadsPerBlock;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  std::lock_guard lock(device().mutex);
  const auto limit = device().dynamic_shared_limits.find({cuda_cpu::current_device(), function});
  attributes->maxDynamicSharedSizeBytes =
      static_cast<int>(limit == device().dynamic_shared_limits.end() ? cuda_cpu::kDefaultSharedBytes
                                                                     : limit->second);
  return result(cudaSuccess);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return result(cudaSuccess);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* query) {
  const struct {
    const char* name;
    void* function;
  } all[] = {{"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&cuTensorMapEncodeTiled)},
             {"cuPointerGetAttribute", reinterpret_cast<void*>(&cuPointerGetAttribute)},
             {"cuCtxGetId", reinterpret_cast<void*>(&cuCtxGetId)}};
  *function = nullptr;
  for (const auto& each : all) {
    if (std::strcmp(symbol, each.name) == 0) *function = each.function;
  }
  if (query) *query = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return result(*function ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* query) {
  return cudaGetDriverEntryPointByVersion(symbol, function, 12000, flags, query);
}

namespace cuda_cpu {

LaunchConfig launch_with_attributes(const cudaLaunchConfig_t& config, Site site) {
  LaunchConfig launch = {
      config.gridDim, config.blockDim, config.dynamicSmemBytes, config.stream, site, 0, false,
      false};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      launch.cluster = attribute.val.clusterDim.x;
    } else if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      launch.early = attribute.val.programmaticStreamSerializationAllowed != 0;
    } else if (attribute.id == cudaLaunchAttributeCooperative) {
      launch.cooperative = attribute.val.cooperative != 0;
    }
  }
  return launch;
}

cudaError_t check_attributes(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id != cudaLaunchAttributeCooperative || attribute.val.cooperative == 0) continue;
    return check_cooperative(config.gridDim);
  }
  return cudaSuccess;
}

namespace {

/// Made when the first kernel is known, which is before main().
std::map<const void*, LaunchWithPointers>& known_kernels() {
  static std::map<const void*, LaunchWithPointers> known;
  return known;
}

}  // namespace

bool know_kernel(const void* kernel, LaunchWithPointers launch) {
  known_kernels()[kernel] = launch;
  return true;
}

cudaError_t launch_known(const LaunchConfig& config, const void* kernel, void** arguments) {
  const auto found = known_kernels().find(kernel);
  if (found == known_kernels().end()) return result(cudaErrorInvalidDeviceFunction);
  found->second(config, arguments);
  return cudaPeekAtLastError();
}

}  // namespace cuda_cpu

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* function,
                                           const cudaLaunchConfig_t* config) {
  const auto launch = cuda_cpu::launch_with_attributes(*config, cuda_cpu::Site::here());
  cudaFuncAttributes attributes;
  cudaFuncGetAttributes(&attributes, function);
  const bool fits =
      config->dynamicSmemBytes <= static_cast<std::size_t>(attributes.maxDynamicSharedSizeBytes);
  *clusters =
      fits ? cuda_cpu::multiprocessors() / static_cast<int>(std::max(1u, launch.cluster)) : 0;
  return result(cudaSuccess);
}
