// In the place of libcu++'s header: shuffles within a warp, or within parts of it that have kWidth
// lanes each, of values of any size.

#pragma once

#include <cstdint>
#include <cstring>
#include <cuda/std/type_traits>

#include "cuda_runtime.h"

namespace cuda::device {

/// What a lane gets, and whether the lane that it asked for is in its part of the warp.
template <class T>
struct warp_shuffle_result {
  T data;
  bool pred;

  template <class Value = T>
  requires(!::cuda::std::is_array_v<Value>) operator Value() const { return data; }
};

namespace cuda_cpu_detail {

/// The words of a value go one after the other, as on a GPU. Its type may be an array.
template <class T, class Shuffle>
auto shuffled(const T& data, bool there, Shuffle shuffle) {
  ::std::uint32_t words[(sizeof data + 3) / 4] = {};
  ::std::memcpy(words, &data, sizeof data);
  for (::std::uint32_t& word : words) word = shuffle(word);
  warp_shuffle_result<::cuda::std::remove_cv_t<T>> result;
  ::std::memcpy(&result.data, words, sizeof data);
  result.pred = there;
  return result;
}

}  // namespace cuda_cpu_detail

template <int kWidth = 32, class T>
auto warp_shuffle_idx(const T& data, int source, ::std::uint32_t mask = ~0u,
                      ::cuda::std::integral_constant<int, kWidth> = {},
                      ::cuda_cpu::Site site = ::cuda_cpu::Site::here()) {
  return cuda_cpu_detail::shuffled(data, true, [&](::std::uint32_t word) {
    return __shfl_sync(mask, word, source, kWidth, site);
  });
}
template <int kWidth = 32, class T>
auto warp_shuffle_up(const T& data, int delta, ::std::uint32_t mask = ~0u,
                     ::cuda::std::integral_constant<int, kWidth> = {},
                     ::cuda_cpu::Site site = ::cuda_cpu::Site::here()) {
  const int place = static_cast<int>(::cuda_cpu::lane_id()) % kWidth;
  return cuda_cpu_detail::shuffled(data, place >= delta, [&](::std::uint32_t word) {
    return __shfl_up_sync(mask, word, static_cast<unsigned>(delta), kWidth, site);
  });
}
template <int kWidth = 32, class T>
auto warp_shuffle_down(const T& data, int delta, ::std::uint32_t mask = ~0u,
                       ::cuda::std::integral_constant<int, kWidth> = {},
                       ::cuda_cpu::Site site = ::cuda_cpu::Site::here()) {
  const int place = static_cast<int>(::cuda_cpu::lane_id()) % kWidth;
  return cuda_cpu_detail::shuffled(data, place + delta < kWidth, [&](::std::uint32_t word) {
    return __shfl_down_sync(mask, word, static_cast<unsigned>(delta), kWidth, site);
  });
}
template <int kWidth = 32, class T>
auto warp_shuffle_xor(const T& data, int bits, ::std::uint32_t mask = ~0u,
                      ::cuda::std::integral_constant<int, kWidth> = {},
                      ::cuda_cpu::Site site = ::cuda_cpu::Site::here()) {
  // A lane may read from the parts before its own one, too.
  const int lane = static_cast<int>(::cuda_cpu::lane_id());
  const bool there = ((lane ^ bits) & 31) <= (lane | (kWidth - 1));
  return cuda_cpu_detail::shuffled(data, there, [&](::std::uint32_t word) {
    return __shfl_xor_sync(mask, word, bits, kWidth, site);
  });
}

/// The same for all lanes of the warp.
#define CUDA_CPU_OF_ALL_LANES(function)                                                      \
  template <int kWidth, class T>                                                             \
  auto function(const T& data, int other, ::cuda::std::integral_constant<int, kWidth> width, \
                ::cuda_cpu::Site site = ::cuda_cpu::Site::here()) {                          \
    return ::cuda::device::function(data, other, ~0u, width, site);                          \
  }
CUDA_CPU_OF_ALL_LANES(warp_shuffle_idx)
CUDA_CPU_OF_ALL_LANES(warp_shuffle_up)
CUDA_CPU_OF_ALL_LANES(warp_shuffle_down)
CUDA_CPU_OF_ALL_LANES(warp_shuffle_xor)
#undef CUDA_CPU_OF_ALL_LANES

}  // namespace cuda::device
