// CCCL's header, and the policies of the device: its algorithms are those of one thread of the
// host. Only its memory is not the host's.

#pragma once

#include_next <thrust/system/cpp/detail/execution_policy.h>

#include <new>
#include <type_traits>
#include <utility>

#include "cpu/execution/later_than_cpp17.h"
#include "cuda_runtime.h"

namespace thrust::system::cuda {
namespace detail {

struct tag;

template <class Derived>
struct execution_policy;

template <>
struct execution_policy<tag> : thrust::system::detail::sequential::execution_policy<tag>, OfDevice {
  using tag_type = tag;  // which a reference asks for since CCCL 3.1
};

struct tag : execution_policy<tag> {};

template <class Derived>
struct execution_policy : thrust::system::detail::sequential::execution_policy<Derived>, OfDevice {
  using tag_type = tag;
  operator tag() const { return {}; }
};

/// Between the device and the host the device's policy does the work.
template <class Device, class Host>
Device& select_system(execution_policy<Device>& device, cpp::execution_policy<Host>&) {
  return static_cast<Device&>(device);
}
template <class Host, class Device>
Device& select_system(cpp::execution_policy<Host>&, execution_policy<Device>& device) {
  return static_cast<Device&>(device);
}
// As a reference's assignment asks for it.
template <class Device, class Host>
Device& select_system(const execution_policy<Device>& device, const cpp::execution_policy<Host>&) {
  return const_cast<Device&>(static_cast<const Device&>(device));
}
template <class Host, class Device>
Device& select_system(const cpp::execution_policy<Host>&, const execution_policy<Device>& device) {
  return const_cast<Device&>(static_cast<const Device&>(device));
}

template <class T>
T* raw(T* pointer) {
  return pointer;
}
template <class Pointer>
auto raw(const Pointer& pointer) {
  return pointer.get();
}

template <class Derived>
void* malloc(execution_policy<Derived>&, std::size_t size) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, size) != cudaSuccess) throw std::bad_alloc();
  return memory;
}
template <class Derived, class Pointer>
void free(execution_policy<Derived>&, Pointer pointer) {
  cudaFree(raw(pointer));
}

template <class Derived, class Iterator, class T, class Combine>
T reduce(execution_policy<Derived>&, Iterator first, Iterator last, T start, Combine combine) {
  if (first == last) return start;
  return combine(start, cuda_cpu::sum_as_tree<T>(first, last - first, combine));
}

template <class Derived, class Pointer>
auto get_value(execution_policy<Derived>&, Pointer pointer) {
  const cuda_cpu::Turn turn;
  return cuda_cpu::remove_cvref_t<decltype(*raw(pointer))>(*raw(pointer));
}
template <class Derived, class To, class From>
void assign_value(execution_policy<Derived>&, To to, From from) {
  const cuda_cpu::Turn turn;
  *raw(to) = *raw(from);
}
template <class Derived, class A, class B>
void iter_swap(execution_policy<Derived>&, A a, B b) {
  const cuda_cpu::Turn turn;
  using std::swap;
  swap(*raw(a), *raw(b));
}

}  // namespace detail

using detail::execution_policy;
using detail::tag;

}  // namespace thrust::system::cuda

namespace thrust::cuda {
using thrust::system::cuda::execution_policy;
using thrust::system::cuda::tag;
}  // namespace thrust::cuda
