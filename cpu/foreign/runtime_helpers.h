// Functions of CUDA that programs of others call and our own do not: settings that mean nothing
// here, memory in rows, launches by a function, a few intrinsics.

#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda_runtime.h"
#include "library_types.h"

// ---- Settings, which change nothing here --------------------------------------------------------

enum cudaFuncCache {
  cudaFuncCachePreferNone,
  cudaFuncCachePreferShared,
  cudaFuncCachePreferL1,
  cudaFuncCachePreferEqual
};
enum cudaSharedMemConfig {
  cudaSharedMemBankSizeDefault,
  cudaSharedMemBankSizeFourByte,
  cudaSharedMemBankSizeEightByte
};
enum cudaLimit {
  cudaLimitStackSize,
  cudaLimitPrintfFifoSize,
  cudaLimitMallocHeapSize,
  cudaLimitPersistingL2CacheSize = 6
};
enum cudaMemoryAdvise {
  cudaMemAdviseSetReadMostly = 1,
  cudaMemAdviseUnsetReadMostly,
  cudaMemAdviseSetPreferredLocation,
  cudaMemAdviseUnsetPreferredLocation,
  cudaMemAdviseSetAccessedBy,
  cudaMemAdviseUnsetAccessedBy
};
enum cudaComputeMode {
  cudaComputeModeDefault,
  cudaComputeModeExclusive,
  cudaComputeModeProhibited,
  cudaComputeModeExclusiveProcess
};
#define cudaCpuDeviceId (-1)
#define cudaHostRegisterDefault 0
#define cudaHostRegisterPortable 1
#define cudaHostRegisterMapped 2
#define cudaDeviceScheduleAuto 0
#define cudaDeviceScheduleSpin 1
#define cudaDeviceScheduleYield 2
#define cudaDeviceScheduleBlockingSync 4
#define cudaDeviceBlockingSync 4
#define cudaDeviceMapHost 8

template <class Kernel>
cudaError_t cudaFuncSetCacheConfig(Kernel, cudaFuncCache) {
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetSharedMemConfig(Kernel, cudaSharedMemConfig) {
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache) { return cudaSuccess; }
inline cudaError_t cudaDeviceSetSharedMemConfig(cudaSharedMemConfig) { return cudaSuccess; }
inline cudaError_t cudaDeviceSetLimit(cudaLimit, std::size_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetLimit(std::size_t* value, cudaLimit) {
  *value = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
inline cudaError_t cudaMemAdvise(const void*, std::size_t, cudaMemoryAdvise, int) {
  return cudaSuccess;
}
inline cudaError_t cudaMemPrefetchAsync(const void*, std::size_t, int, cudaStream_t = nullptr) {
  return cudaSuccess;
}
inline cudaError_t cudaProfilerStart() { return cudaSuccess; }
inline cudaError_t cudaProfilerStop() { return cudaSuccess; }
inline cudaError_t cudaThreadSynchronize() { return cudaDeviceSynchronize(); }
inline cudaError_t cudaChooseDevice(int* device, const cudaDeviceProp*) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return cudaStreamCreate(stream);
}

namespace cuda_cpu {

/// `error` is what a call of the program returned, which throws it away: unasked.py has put this
/// around the call. If the call failed, that is mentioned at the end.
void note_unasked(const char* call, cudaError_t error, Site site);
inline cudaError_t unasked(const char* call, cudaError_t error, Site site = Site::here()) {
  if (error != cudaSuccess && error != cudaErrorNotReady) note_unasked(call, error, site);
  return error;
}

}  // namespace cuda_cpu

// ---- Memory -------------------------------------------------------------------------------------

template <class T>
cudaError_t cudaMallocPitch(T** pointer, std::size_t* pitch, std::size_t width,
                            std::size_t height) {
  *pitch = (width + 511) / 512 * 512;
  return cudaMalloc(pointer, *pitch * height);
}
inline cudaError_t cudaMemset2D(void* target, std::size_t pitch, int value, std::size_t width,
                                std::size_t height) {
  for (std::size_t row = 0; row < height; ++row) {
    const cudaError_t error = cudaMemset(static_cast<char*>(target) + row * pitch, value, width);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
template <class T>
cudaError_t cudaHostAlloc(T** pointer, std::size_t size) {
  return cudaHostAlloc(pointer, size, 0u);
}
/// A kernel may use memory of the host that is registered.
cudaError_t cudaHostRegister(void* pointer, std::size_t size, unsigned flags);
cudaError_t cudaHostUnregister(void* pointer);
template <class T>
cudaError_t cudaHostGetDevicePointer(T** pointer, void* host, unsigned = 0) {
  *pointer = static_cast<T*>(host);
  return cudaSuccess;
}

// ---- Launches -----------------------------------------------------------------------------------

namespace cuda_cpu {

/// Launches a kernel whose parameter k is what arguments[k] points to.
template <class... Parameters>
void launch_with_pointers(void (*kernel)(Parameters...), const LaunchConfig& config,
                          void** arguments) {
  [&]<std::size_t... k>(std::index_sequence<k...>) {
    kernel->*config(*static_cast<Parameters*>(arguments[k])...);
  }
  (std::index_sequence_for<Parameters...>());
}

/// A launch by an address does not know the parameters' types, and the kernel does: cu2cpp.py lets
/// it mention Known of itself, so that the program makes it known before main().
template <auto kKernel>
struct Known {
  static void launch(const LaunchConfig& config, void** arguments) {
    launch_with_pointers(kKernel, config, arguments);
  }
  inline static const bool is = know_kernel(reinterpret_cast<const void*>(kKernel), &launch);
};

}  // namespace cuda_cpu

template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments,
                             std::size_t shared_bytes = 0, cudaStream_t stream = nullptr,
                             cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::launch_with_pointers(kernel, cuda_cpu::launch(grid, block, shared_bytes, stream, site),
                                 arguments);
  return cudaPeekAtLastError();
}
inline cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                                    std::size_t shared_bytes = 0, cudaStream_t stream = nullptr,
                                    cuda_cpu::Site site = cuda_cpu::Site::here()) {
  return cuda_cpu::launch_known(cuda_cpu::launch(grid, block, shared_bytes, stream, site), kernel,
                                arguments);
}
/// Of a kernel, or of its address alone.
template <class Kernel>
cudaError_t cudaLaunchCooperativeKernel(Kernel* kernel, dim3 grid, dim3 block, void** arguments,
                                        std::size_t shared_bytes = 0, cudaStream_t stream = nullptr,
                                        cuda_cpu::Site site = cuda_cpu::Site::here()) {
  const cudaError_t error = cuda_cpu::check_cooperative(grid);
  if (error != cudaSuccess) return error;
  cuda_cpu::LaunchConfig config = cuda_cpu::launch(grid, block, shared_bytes, stream, site);
  config.cooperative = true;
  if constexpr (std::is_function_v<Kernel>) {
    cuda_cpu::launch_with_pointers(kernel, config, arguments);
    return cudaPeekAtLastError();
  } else {
    return cuda_cpu::launch_known(config, kernel, arguments);
  }
}
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** arguments,
                                       cuda_cpu::Site site = cuda_cpu::Site::here()) {
  const cudaError_t error = cuda_cpu::check_attributes(*config);
  if (error != cudaSuccess) return error;
  return cuda_cpu::launch_known(cuda_cpu::launch_with_attributes(*config, site), kernel, arguments);
}

template <class Kernel>
cudaError_t cudaOccupancyMaxPotentialBlockSize(int* least_grid, int* block, Kernel, std::size_t = 0,
                                               int limit = 0) {
  *block = limit > 0 && limit < 1024 ? limit : 1024;
  *least_grid = cuda_cpu::multiprocessors();
  return cudaSuccess;
}

// ---- Intrinsics ---------------------------------------------------------------------------------

inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) {
    c += static_cast<std::int8_t>(a >> (8 * i)) * static_cast<std::int8_t>(b >> (8 * i));
  }
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) c += (a >> (8 * i) & 0xFF) * (b >> (8 * i) & 0xFF);
  return c;
}

// Templates, so that a program's own functions of these names come first.
template <class A, class B>
unsigned umin(A a, B b) {
  return static_cast<unsigned>(a) < static_cast<unsigned>(b) ? a : b;
}
template <class A, class B>
unsigned umax(A a, B b) {
  return static_cast<unsigned>(a) < static_cast<unsigned>(b) ? b : a;
}

/// The lanes of `mask`, if all of them have the same value; 0 if not.
template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* all) {
  const unsigned equal = __match_any_sync(mask, value);
  *all = __all_sync(mask, (equal & mask) == (mask & __activemask()));
  return *all ? mask & __activemask() : 0;
}

/// Where no debugger is, a breakpoint ends the kernel, as a trap does.
inline void __brkpt() { __trap(); }

inline float sinpif(float x) { return static_cast<float>(sin(M_PI * x)); }
inline float cospif(float x) { return static_cast<float>(cos(M_PI * x)); }
inline double sinpi(double x) { return sin(M_PI * x); }
inline double cospi(double x) { return cos(M_PI * x); }
inline void sincospif(float x, float* sine, float* cosine) {
  *sine = sinpif(x);
  *cosine = cospif(x);
}
inline void sincospi(double x, double* sine, double* cosine) {
  *sine = sinpi(x);
  *cosine = cospi(x);
}
inline void __sincosf(float x, float* sine, float* cosine) { sincosf(x, sine, cosine); }
inline float rhypotf(float x, float y) { return 1.0f / hypotf(x, y); }
inline float rcbrtf(float x) { return 1.0f / cbrtf(x); }
inline float norm3df(float x, float y, float z) { return sqrtf(x * x + y * y + z * z); }
inline unsigned __sad(int a, int b, unsigned c) {
  return c + static_cast<unsigned>(a < b ? b - a : a - b);
}

/// The x whose erfc is y, 0 to 2: from the start of Abramowitz and Stegun, 26.2.22, by Halley's
/// method.
inline double erfcinv(double y) {
  if (!(y > 0 && y < 2)) return y == 0 ? INFINITY : y == 2 ? -INFINITY : NAN;
  if (y > 1) return -erfcinv(2 - y);
  const double t = sqrt(-2 * log(y / 2));
  double x = (t - (2.30753 + 0.27061 * t) / (1 + t * (0.99229 + 0.04481 * t))) / M_SQRT2;
  for (int i = 0; i < 3; ++i) {
    const double error = erfc(x) - y;
    x += error / (M_2_SQRTPI * exp(-x * x) - x * error);
  }
  return x;
}
inline float erfcinvf(float y) { return static_cast<float>(erfcinv(y)); }

// Atomic for the threads of a block, or also for the host: here all atomics are atomic for all.
#define CUDA_CPU_SCOPED(NAME)                                                            \
  template <class T, class... Values>                                                    \
  auto NAME##_block(T* address, Values... values)->decltype(NAME(address, values...)) {  \
    return NAME(address, values...);                                                     \
  }                                                                                      \
  template <class T, class... Values>                                                    \
  auto NAME##_system(T* address, Values... values)->decltype(NAME(address, values...)) { \
    return NAME(address, values...);                                                     \
  }
CUDA_CPU_SCOPED(atomicAdd)
CUDA_CPU_SCOPED(atomicSub)
CUDA_CPU_SCOPED(atomicExch)
CUDA_CPU_SCOPED(atomicMin)
CUDA_CPU_SCOPED(atomicMax)
CUDA_CPU_SCOPED(atomicInc)
CUDA_CPU_SCOPED(atomicDec)
CUDA_CPU_SCOPED(atomicCAS)
CUDA_CPU_SCOPED(atomicAnd)
CUDA_CPU_SCOPED(atomicOr)
CUDA_CPU_SCOPED(atomicXor)
#undef CUDA_CPU_SCOPED

#include "cpu/foreign/functions/memory.h"
#include "cpu/foreign/functions/roundings.h"
#include "cpu/foreign/functions/words.h"
