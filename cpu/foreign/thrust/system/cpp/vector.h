// CCCL's header, and the vectors of the device.

#pragma once

#include_next <thrust/system/cpp/vector.h>

namespace thrust::system::cuda {

template <class T, class Allocator = allocator<T>>
using vector = thrust::detail::vector_base<T, Allocator>;
template <class T, class Allocator = universal_allocator<T>>
using universal_vector = thrust::detail::vector_base<T, Allocator>;
template <class T>
using universal_host_pinned_vector =
    thrust::detail::vector_base<T, universal_host_pinned_allocator<T>>;

}  // namespace thrust::system::cuda

namespace thrust::cuda {
using thrust::system::cuda::universal_vector;
using thrust::system::cuda::vector;
}  // namespace thrust::cuda
