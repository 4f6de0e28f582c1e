// cub::DeviceMergeSort: see two_calls.h.

#pragma once

#include <cub/device/two_calls.h>

#include <numeric>

namespace cub {

struct DeviceMergeSort {
  template <class Keys, class Size, class Less>
  static cudaError_t SortKeys(void* storage, std::size_t& bytes, Keys keys, Size count, Less less,
                              cudaStream_t stream = nullptr) {
    return SortKeysCopy(storage, bytes, keys, keys, count, less, stream);
  }
  template <class Keys, class Size, class Less>
  static cudaError_t StableSortKeys(void* storage, std::size_t& bytes, Keys keys, Size count,
                                    Less less, cudaStream_t stream = nullptr) {
    return SortKeysCopy(storage, bytes, keys, keys, count, less, stream);
  }
  template <class In, class Out, class Size, class Less>
  static cudaError_t SortKeysCopy(void* storage, std::size_t& bytes, In in, Out out, Size count,
                                  Less less, cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      auto keys = cuda_cpu::values(in, count);
      std::stable_sort(keys.begin(), keys.end(), less);
      std::copy(keys.begin(), keys.end(), out);
    });
  }
  template <class Keys, class Items, class Size, class Less>
  static cudaError_t SortPairs(void* storage, std::size_t& bytes, Keys keys, Items items,
                               Size count, Less less, cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      const auto all = cuda_cpu::values(keys, count);
      const auto values = cuda_cpu::values(items, count);
      std::vector<std::ptrdiff_t> order(all.size());
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](std::ptrdiff_t a, std::ptrdiff_t b) { return less(all[a], all[b]); });
      for (std::size_t i = 0; i < order.size(); ++i) {
        keys[i] = all[order[i]];
        items[i] = values[order[i]];
      }
    });
  }
  template <class Keys, class Items, class Size, class Less>
  static cudaError_t StableSortPairs(void* storage, std::size_t& bytes, Keys keys, Items items,
                                     Size count, Less less, cudaStream_t stream = nullptr) {
    return SortPairs(storage, bytes, keys, items, count, less, stream);
  }
};

}  // namespace cub
