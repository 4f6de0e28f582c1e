// What an algorithm of the device uses while it runs. A thread of a kernel may be the one that runs
// it, and reaches memory that it has asked for itself only if it is the host's.

#pragma once

#include <thrust/detail/pointer.h>
#include <thrust/pair.h>
#include <thrust/system/detail/sequential/malloc_and_free.h>

namespace thrust::system::cuda::detail {

template <class T, class Derived, class Size>
thrust::pair<thrust::pointer<T, Derived>, std::ptrdiff_t> get_temporary_buffer(
    execution_policy<Derived>& policy, Size count) {
  void* const memory = thrust::system::detail::sequential::malloc(policy, count * sizeof(T));
  return {thrust::pointer<T, Derived>(static_cast<T*>(memory)),
          memory ? static_cast<std::ptrdiff_t>(count) : 0};
}
template <class Derived, class Pointer>
void return_temporary_buffer(execution_policy<Derived>& policy, Pointer pointer, std::ptrdiff_t) {
  thrust::system::detail::sequential::free(policy, pointer);
}

}  // namespace thrust::system::cuda::detail
