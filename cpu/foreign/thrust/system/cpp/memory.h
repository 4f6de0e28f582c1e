// CCCL's header, and the allocators of the device.

#pragma once

#include_next <thrust/system/cpp/memory.h>

namespace thrust::system::cuda {

template <class T>
using allocator = thrust::mr::stateless_resource_allocator<T, memory_resource>;
template <class T>
using universal_allocator = thrust::mr::stateless_resource_allocator<T, universal_memory_resource>;
template <class T>
using universal_host_pinned_allocator =
    thrust::mr::stateless_resource_allocator<T, universal_host_pinned_memory_resource>;

template <class T = void>
pointer<T> malloc(std::size_t count) {
  tag device;
  const std::size_t size = [] {
    if constexpr (std::is_void_v<T>)
      return 1;
    else
      return sizeof(T);
  }();
  return pointer<T>(static_cast<T*>(detail::malloc(device, count * size)));
}
inline void free(pointer<void> memory) {
  tag device;
  detail::free(device, memory);
}

}  // namespace thrust::system::cuda

namespace thrust::cuda {
using thrust::system::cuda::allocator;
using thrust::system::cuda::free;
using thrust::system::cuda::malloc;
using thrust::system::cuda::universal_allocator;
using thrust::system::cuda::universal_host_pinned_allocator;
}  // namespace thrust::cuda
