// Functions of the runtime for memory that our own programs do not use: memory in three dimensions,
// pools, and functions of the host that a stream calls.

#pragma once

#include <cstddef>
#include <cstring>

#include "cuda_runtime.h"

// ---- Three dimensions ---------------------------------------------------------------------------

struct cudaPitchedPtr {
  void* ptr;
  std::size_t pitch, xsize, ysize;
};
struct cudaExtent {
  std::size_t width, height, depth;
};
struct cudaPos {
  std::size_t x, y, z;
};
struct cudaArray;
typedef cudaArray* cudaArray_t;
/// Rows of bytes; there are no arrays here, which textures are made of.
struct cudaMemcpy3DParms {
  cudaArray_t srcArray;
  cudaPos srcPos;
  cudaPitchedPtr srcPtr;
  cudaArray_t dstArray;
  cudaPos dstPos;
  cudaPitchedPtr dstPtr;
  cudaExtent extent;
  cudaMemcpyKind kind;
};
inline cudaPitchedPtr make_cudaPitchedPtr(void* pointer, std::size_t pitch, std::size_t width,
                                          std::size_t height) {
  return {pointer, pitch, width, height};
}
inline cudaExtent make_cudaExtent(std::size_t width, std::size_t height, std::size_t depth) {
  return {width, height, depth};
}
inline cudaPos make_cudaPos(std::size_t x, std::size_t y, std::size_t z) { return {x, y, z}; }

inline cudaError_t cudaMalloc3D(cudaPitchedPtr* memory, cudaExtent extent) {
  const std::size_t pitch = (extent.width + 511) / 512 * 512;
  *memory = {nullptr, pitch, extent.width, extent.height};
  return cudaMalloc(&memory->ptr, pitch * extent.height * extent.depth);
}
inline cudaError_t cudaMemset3D(cudaPitchedPtr memory, int value, cudaExtent extent) {
  for (std::size_t row = 0; row < extent.depth * extent.height; ++row) {
    const std::size_t at =
        (row / extent.height * memory.ysize + row % extent.height) * memory.pitch;
    const cudaError_t error = cudaMemset(static_cast<char*>(memory.ptr) + at, value, extent.width);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy3D(const cudaMemcpy3DParms* copy) {
  if (copy->srcArray || copy->dstArray) return cudaErrorNotSupported;
  const auto start = [](const cudaPitchedPtr& memory, const cudaPos& position, std::size_t layer) {
    return static_cast<char*>(memory.ptr) +
           ((position.z + layer) * memory.ysize + position.y) * memory.pitch + position.x;
  };
  for (std::size_t layer = 0; layer < copy->extent.depth; ++layer) {
    const cudaError_t error =
        cudaMemcpy2D(start(copy->dstPtr, copy->dstPos, layer), copy->dstPtr.pitch,
                     start(copy->srcPtr, copy->srcPos, layer), copy->srcPtr.pitch,
                     copy->extent.width, copy->extent.height, copy->kind);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms* copy, cudaStream_t = nullptr) {
  return cudaMemcpy3D(copy);
}
inline cudaError_t cudaMemset2DAsync(void* target, std::size_t pitch, int value, std::size_t width,
                                     std::size_t height, cudaStream_t = nullptr) {
  return cudaMemset2D(target, pitch, value, width, height);
}
inline cudaError_t cudaMemcpyPeerAsync(void* target, int target_device, const void* source,
                                       int source_device, std::size_t size,
                                       cudaStream_t = nullptr) {
  return cudaMemcpyPeer(target, target_device, source, source_device, size);
}
template <class T>
cudaError_t cudaMemcpyFromSymbolAsync(void* target, const T& symbol, std::size_t size,
                                      std::size_t offset = 0,
                                      cudaMemcpyKind kind = cudaMemcpyDeviceToHost,
                                      cudaStream_t = nullptr) {
  return cudaMemcpyFromSymbol(target, symbol, size, offset, kind);
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

// ---- Functions of the host in a stream: they run when they are asked for ------------------------

#define CUDART_CB
typedef void (*cudaStreamCallback_t)(cudaStream_t stream, cudaError_t status, void* data);
typedef void (*cudaHostFn_t)(void* data);
inline cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback,
                                         void* data, unsigned) {
  const cudaError_t status = cudaStreamSynchronize(stream);
  callback(stream, status, data);
  return cudaSuccess;
}
inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  const cudaError_t status = cudaStreamSynchronize(stream);
  if (status == cudaSuccess) function(data);
  return status;
}

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
