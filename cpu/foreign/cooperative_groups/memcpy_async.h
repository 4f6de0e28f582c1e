// Copies that the threads of a group make together, and wait for together.
#pragma once

#include <cuda/barrier>

#include "cooperative_groups.h"

namespace cooperative_groups {

template <class Group, class Shape>
__attribute__((always_inline)) inline void memcpy_async(const Group& group, void* to,
                                                        const void* from, Shape size) {
  cuda::cuda_cpu_detail::in_pieces(
      static_cast<unsigned>(group.thread_rank()), static_cast<unsigned>(group.size()), to, from,
      size, [](const cuda_cpu::AsyncCopy& piece) { cuda_cpu::async_copies().add(piece); });
  cuda_cpu::async_copies().commit();
}
/// So many elements as both have.
template <class Group, class T, class To, class From>
__attribute__((always_inline)) inline void memcpy_async(const Group& group, T* to, To to_count,
                                                        const T* from, From from_count) {
  const std::size_t count = to_count < from_count ? to_count : from_count;
  memcpy_async(group, to, from, count * sizeof(T));
}

/// Until all copies but the last kPrior have landed, those of all threads of the group.
template <unsigned kPrior, class Group>
void wait_prior(const Group& group, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::async_copies().wait(kPrior);
  group.sync(site);
}
template <class Group>
void wait(const Group& group, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  wait_prior<0>(group, site);
}

}  // namespace cooperative_groups
