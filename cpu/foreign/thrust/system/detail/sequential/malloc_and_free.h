// In the place of CCCL's header: what the algorithms of one thread use while they run. That thread
// may be one of a kernel, so a kernel has to be allowed to use it.

#pragma once

#include <thrust/detail/raw_pointer_cast.h>
#include <thrust/system/detail/sequential/execution_policy.h>

#include "cuda_runtime.h"

namespace thrust::system::detail::sequential {

template <class Policy>
void* malloc(execution_policy<Policy>&, std::size_t size) {
  void* memory = nullptr;
  return cudaMallocHost(&memory, size) == cudaSuccess ? memory : nullptr;
}
template <class Policy, class Pointer>
void free(execution_policy<Policy>&, Pointer pointer) {
  cudaFreeHost(thrust::raw_pointer_cast(pointer));
}

}  // namespace thrust::system::detail::sequential
