#include "common/device.h"

#include <cuda_runtime.h>

#include "common/check.h"

namespace common {

namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

std::string version(int number) {  // CUDA encodes 13.0 as 13000
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

/// Dense FMAs per clock and multiprocessor. No attribute tells these; they follow from the compute
/// capability: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", for
/// fp32; NVIDIA's architecture whitepapers (Turing, A100, GA102, Ada, H100, Blackwell) for tensor
/// cores.
struct FmasPerClock {
  int major, minor, fp32, tf32, fp16;
};
constexpr FmasPerClock kFmasPerClock[] = {
    {7, 5, 64, 0, 512},       {8, 0, 64, 512, 1024},    {8, 6, 128, 128, 256},
    {8, 7, 128, 256, 512},    {8, 9, 128, 128, 256},    {9, 0, 128, 1024, 2048},
    {10, 0, 128, 2048, 4096}, {10, 3, 128, 2048, 4096}, {12, 0, 128, 128, 256},
};

}  // namespace

Device Device::current() {
  int id = 0;
  CUDA_CHECK(cudaGetDevice(&id));
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, id));
  int driver = 0, runtime = 0;
  CUDA_CHECK(cudaDriverGetVersion(&driver));
  CUDA_CHECK(cudaRuntimeGetVersion(&runtime));

  Device device;
#ifdef CUDA_CPU
  device.backend = "cpu";
#else
  device.backend = "cuda";
#endif
  device.name = properties.name;
  device.major = properties.major;
  device.minor = properties.minor;
  device.sms = properties.multiProcessorCount;
  device.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  device.l2_bytes = properties.l2CacheSize;
  device.shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
  device.driver = version(driver);
  device.runtime = version(runtime);
  // Both clocks are in kHz, the bus width in bits; the memory transfers on both edges of its clock.
  device.clock_hz = 1e3 * attribute(cudaDevAttrClockRate, id);
  device.bytes_per_second = 2e3 * attribute(cudaDevAttrMemoryClockRate, id) *
                            attribute(cudaDevAttrGlobalMemoryBusWidth, id) / 8;
  return device;
}

double Device::peak(Rate rate) const {
  for (const FmasPerClock& row : kFmasPerClock) {
    if (row.major == major && row.minor == minor) {
      const int fmas = rate == Rate::fp32 ? row.fp32 : rate == Rate::tf32 ? row.tf32 : row.fp16;
      return 2.0 * fmas * sms * clock_hz;
    }
  }
  return 0;
}

}  // namespace common
