// The host does what the device would do, in the place of kernels of thrust and cub.

#pragma once

#include <cstddef>
#include <iterator>

#include "cpu/watch/ledger.h"
#include "cuda_runtime.h"

namespace cuda_cpu {

/// The host's turn comes after the kernels that were launched before. While it lasts, memory of the
/// device is open.
class Turn {
  cudaError_t finished_ = cudaDeviceSynchronize();
  OpenMemory memory_;
};

/// The sum of `count` values from `first` on, at least one, where combine(a, b) adds two. As many
/// additions lead to each value as on a GPU, so that rounding errors are as small as there.
template <class Sum, class Iterator, class Combine>
Sum sum_as_tree(Iterator first, std::ptrdiff_t count, Combine combine) {
  using Value = typename std::iterator_traits<Iterator>::value_type;
  if (count > 16) {
    const std::ptrdiff_t half = count / 2;
    const Sum left = sum_as_tree<Sum>(first, half, combine);
    return combine(left, sum_as_tree<Sum>(first + half, count - half, combine));
  }
  Sum sum = static_cast<Value>(first[0]);
  for (std::ptrdiff_t i = 1; i < count; ++i) sum = combine(sum, static_cast<Value>(first[i]));
  return sum;
}

}  // namespace cuda_cpu
