// Functions of the runtime for memory that our own programs do not use: more forms of copies and
// fills, and pools. What a stream that is captured is asked for becomes nodes of its graph, as
// cudaMemcpyAsync() and cudaMemsetAsync() make them.

#pragma once

#include <cstddef>
#include <cstring>

#include "cuda_runtime.h"

// ---- Copies and fills ---------------------------------------------------------------------------

inline cudaError_t cudaMemset3D(cudaPitchedPtr memory, int value, cudaExtent extent) {
  for (std::size_t row = 0; row < extent.depth * extent.height; ++row) {
    const std::size_t at =
        (row / extent.height * memory.ysize + row % extent.height) * memory.pitch;
    const cudaError_t error = cudaMemset(static_cast<char*>(memory.ptr) + at, value, extent.width);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
inline cudaError_t cudaMemset2DAsync(void* target, std::size_t pitch, int value, std::size_t width,
                                     std::size_t height, cudaStream_t stream = nullptr) {
  for (std::size_t row = 0; row < height; ++row) {
    const cudaError_t error =
        cudaMemsetAsync(static_cast<char*>(target) + row * pitch, value, width, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, std::size_t size,
                                       cudaStream_t stream = nullptr) {
  return cudaMemcpyAsync(target, source, size, cudaMemcpyDeviceToDevice, stream);
}
template <class T>
cudaError_t cudaMemcpyToSymbolAsync(const T& symbol, const void* source, std::size_t size,
                                    std::size_t offset = 0,
                                    cudaMemcpyKind kind = cudaMemcpyHostToDevice,
                                    cudaStream_t stream = nullptr) {
  void* variable = nullptr;
  cudaGetSymbolAddress(&variable, symbol);
  return cudaMemcpyAsync(static_cast<char*>(variable) + offset, source, size, kind, stream);
}
template <class T>
cudaError_t cudaMemcpyFromSymbolAsync(void* target, const T& symbol, std::size_t size,
                                      std::size_t offset = 0,
                                      cudaMemcpyKind kind = cudaMemcpyDeviceToHost,
                                      cudaStream_t stream = nullptr) {
  void* variable = nullptr;
  cudaGetSymbolAddress(&variable, symbol);
  return cudaMemcpyAsync(target, static_cast<char*>(variable) + offset, size, kind, stream);
}
template <class T>
cudaError_t cudaGetSymbolSize(std::size_t* size, const T& symbol) {
  *size = sizeof symbol;
  return cudaSuccess;
}

// ---- Where managed memory is: it is everywhere --------------------------------------------------

enum cudaMemLocationType {
  cudaMemLocationTypeInvalid = 0,
  cudaMemLocationTypeDevice = 1,
  cudaMemLocationTypeHost = 2,
  cudaMemLocationTypeHostNuma = 3,
  cudaMemLocationTypeHostNumaCurrent = 4,
};
struct cudaMemLocation {
  cudaMemLocationType type;
  int id;
};
inline cudaError_t cudaMemPrefetchAsync(const void*, std::size_t, cudaMemLocation, unsigned,
                                        cudaStream_t = nullptr) {
  return cudaSuccess;
}
inline cudaError_t cudaMemAdvise(const void*, std::size_t, cudaMemoryAdvise, cudaMemLocation) {
  return cudaSuccess;
}

// ---- Pools: each device has one, and gives back what is freed -----------------------------------

typedef struct cudaCpuMemPool* cudaMemPool_t;
enum cudaMemPoolAttr {
  cudaMemPoolReuseFollowEventDependencies = 1,
  cudaMemPoolReuseAllowOpportunistic = 2,
  cudaMemPoolReuseAllowInternalDependencies = 3,
  cudaMemPoolAttrReleaseThreshold = 4,
};
inline cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) {
  return cudaDeviceGetDefaultMemPool(pool, device);
}
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, std::size_t) { return cudaSuccess; }

// ---- What the toolkit had once ------------------------------------------------------------------

inline cudaError_t cudaThreadExit() { return cudaDeviceReset(); }
inline cudaError_t cudaDeviceGetSharedMemConfig(cudaSharedMemConfig* config) {
  *config = cudaSharedMemBankSizeFourByte;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetCacheConfig(cudaFuncCache* config) {
  *config = cudaFuncCachePreferNone;
  return cudaSuccess;
}
