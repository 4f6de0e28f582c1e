#include "common/verify/attempt.h"

#include <fmt/core.h>

#ifdef CUDA_CPU
#include "cpu/execution/cuda_cpu.h"
#endif

namespace common {

namespace {

/// What a launch may ask for: it was refused. The CPU backend also knows what it did ask for.
std::string limits_of_launches() {
#ifdef CUDA_CPU
  return std::string(": ") + cuda_cpu::why_launch_failed();
#else
  return fmt::format(
      "; a block has at most 1024 threads and {} bytes of shared memory, a grid at most 65535 "
      "blocks along y and z, and a kernel may allow less",
      Device::current().shared_bytes);
#endif
}

}  // namespace

std::string attempt(const std::function<void()>& call) {
  std::string failed;
  try {
    const CallsThrow calls_throw;
    call();
  } catch (const std::exception& error) {
    failed = error.what();
  }
  if (failed.empty()) return "";
  cudaGetLastError();
  if (cudaDeviceSynchronize() == cudaSuccess) return failed;
#ifdef CUDA_CPU
  cudaDeviceReset();  // keeps all memory there, and kernels run again: so do the other rows
  return failed;
#else
  throw DeviceLost{failed};
#endif
}

void launch_and_wait(const std::function<void()>& call) {
  call();
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) {
    throw std::runtime_error("not launched, " + text_of(status) + limits_of_launches());
  }
  if (const cudaError_t status = cudaDeviceSynchronize(); status != cudaSuccess) {
    throw std::runtime_error(text_of(status));
  }
}

}  // namespace common
