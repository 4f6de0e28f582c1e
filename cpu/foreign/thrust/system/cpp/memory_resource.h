// CCCL's header, and where vectors of the device get their memory.

#pragma once

#include <thrust/mr/memory_resource.h>
#include_next <thrust/system/cpp/memory_resource.h>
#include <thrust/system/cpp/pointer.h>
#include <thrust/system/cuda/error.h>
#include <thrust/system_error.h>

namespace thrust::system::cuda {

template <class T>
using pointer = thrust::pointer<T, tag, thrust::tagged_reference<T, tag>>;
template <class T>
using universal_pointer = thrust::pointer<T, tag, std::add_lvalue_reference_t<T>>;
template <class T>
using reference = thrust::tagged_reference<T, tag>;

namespace detail {

enum class Memory { device, managed, pinned };

template <Memory kKind, class Pointer>
class Resource final : public thrust::mr::memory_resource<Pointer> {
 public:
  Pointer do_allocate(std::size_t bytes, std::size_t) override {
    void* memory = nullptr;
    const cudaError_t error = kKind == Memory::device    ? cudaMalloc(&memory, bytes)
                              : kKind == Memory::managed ? cudaMallocManaged(&memory, bytes)
                                                         : cudaMallocHost(&memory, bytes);
    if (error != cudaSuccess) throw std::bad_alloc();
    return Pointer(memory);
  }
  void do_deallocate(Pointer pointer, std::size_t, std::size_t) override {
    void* const memory = thrust::raw_pointer_cast(pointer);
    kKind == Memory::pinned ? cudaFreeHost(memory) : cudaFree(memory);
  }
};

}  // namespace detail

using memory_resource = detail::Resource<detail::Memory::device, pointer<void>>;
using universal_memory_resource =
    detail::Resource<detail::Memory::managed, universal_pointer<void>>;
using universal_host_pinned_memory_resource =
    detail::Resource<detail::Memory::pinned, universal_pointer<void>>;

}  // namespace thrust::system::cuda

namespace thrust::cuda {
using thrust::system::cuda::memory_resource;
using thrust::system::cuda::pointer;
using thrust::system::cuda::reference;
using thrust::system::cuda::universal_host_pinned_memory_resource;
using thrust::system::cuda::universal_memory_resource;
using thrust::system::cuda::universal_pointer;
}  // namespace thrust::cuda
