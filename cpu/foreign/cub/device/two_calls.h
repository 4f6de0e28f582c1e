// What cub's functions for the whole device have in common here: the host does their work, as one
// thread, in its turn.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cub/util_type.cuh>
#include <cuda/std/functional>
#include <iterator>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/execution/later_than_cpp17.h"
#include "cpu/foreign/thrust/detail/by_host.h"
#include "runtime_helpers.h"

namespace cuda_cpu {

/// What a function says it needs. Here it needs nothing, but a program has to ask and to give.
inline constexpr std::size_t kTemporaryBytes = 1024;

/// A call without temporary storage asks for its size. The one with it does the work.
template <class Work>
cudaError_t two_calls(void* storage, std::size_t& bytes, Work work) {
  if (!storage) {
    bytes = kTemporaryBytes;
    return cudaSuccess;
  }
  if (bytes < kTemporaryBytes) return cudaErrorInvalidValue;
  const Turn turn;
  work();
  return cudaPeekAtLastError();
}

template <class Iterator>
using ValueOf = typename std::iterator_traits<Iterator>::value_type;
/// What an output iterator takes, or `Other` if the iterator does not say it.
template <class Iterator, class Other>
using ValueOr = std::conditional_t<std::is_void_v<ValueOf<Iterator>>, Other, ValueOf<Iterator>>;

template <class Iterator>
ValueOf<Iterator> at(Iterator first, std::ptrdiff_t i) {
  return first[i];
}
/// What the smallest, or the largest, of no numbers is.
template <class T>
constexpr T most() {
  return std::numeric_limits<T>::has_infinity ? std::numeric_limits<T>::infinity()
                                              : std::numeric_limits<T>::max();
}
template <class T>
constexpr T least() {
  return std::numeric_limits<T>::lowest();
}
/// The same of `count` values, where choose(a, b) is one of the two.
template <class Iterator, class Choose>
ValueOf<Iterator> extreme(Iterator first, std::ptrdiff_t count, Choose choose,
                          ValueOf<Iterator> none) {
  return count > 0 ? sum_as_tree<ValueOf<Iterator>>(first, count, choose) : none;
}

template <class Iterator>
std::vector<ValueOf<Iterator>> values(Iterator first, std::ptrdiff_t count) {
  std::vector<ValueOf<Iterator>> all;
  all.reserve(static_cast<std::size_t>(count));
  for (std::ptrdiff_t i = 0; i < count; ++i) all.push_back(first[i]);
  return all;
}

}  // namespace cuda_cpu
