// cub::DeviceSegmentedRadixSort and cub::DeviceSegmentedSort, of pointers: see two_calls.h.

#pragma once

#include <cub/device/device_radix_sort.cuh>

namespace cub {

struct DeviceSegmentedRadixSort {
  template <class Key, class Begin, class End>
  static cudaError_t SortKeys(void* storage, std::size_t& bytes, const Key* in, Key* out,
                              std::int64_t, std::int64_t segments, Begin begin, End end,
                              int begin_bit = 0, int end_bit = 8 * sizeof(Key),
                              cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      for (std::int64_t i = 0; i < segments; ++i) {
        cuda_cpu::radix_sort(in + begin[i], out + begin[i], kNone, kNone, end[i] - begin[i], false,
                             begin_bit, end_bit);
      }
    });
  }
  template <class Key, class Begin, class End>
  static cudaError_t SortKeysDescending(void* storage, std::size_t& bytes, const Key* in, Key* out,
                                        std::int64_t, std::int64_t segments, Begin begin, End end,
                                        int begin_bit = 0, int end_bit = 8 * sizeof(Key),
                                        cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      for (std::int64_t i = 0; i < segments; ++i) {
        cuda_cpu::radix_sort(in + begin[i], out + begin[i], kNone, kNone, end[i] - begin[i], true,
                             begin_bit, end_bit);
      }
    });
  }
  template <class Key, class Value, class Begin, class End>
  static cudaError_t SortPairs(void* storage, std::size_t& bytes, const Key* in, Key* out,
                               const Value* values_in, Value* values_out, std::int64_t,
                               std::int64_t segments, Begin begin, End end, int begin_bit = 0,
                               int end_bit = 8 * sizeof(Key), cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      for (std::int64_t i = 0; i < segments; ++i) {
        cuda_cpu::radix_sort(in + begin[i], out + begin[i], values_in + begin[i],
                             values_out + begin[i], end[i] - begin[i], false, begin_bit, end_bit);
      }
    });
  }
  template <class Key, class Value, class Begin, class End>
  static cudaError_t SortPairsDescending(void* storage, std::size_t& bytes, const Key* in, Key* out,
                                         const Value* values_in, Value* values_out, std::int64_t,
                                         std::int64_t segments, Begin begin, End end,
                                         int begin_bit = 0, int end_bit = 8 * sizeof(Key),
                                         cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      for (std::int64_t i = 0; i < segments; ++i) {
        cuda_cpu::radix_sort(in + begin[i], out + begin[i], values_in + begin[i],
                             values_out + begin[i], end[i] - begin[i], true, begin_bit, end_bit);
      }
    });
  }

 private:
  static constexpr cuda_cpu::NoValues* kNone = nullptr;
};

/// Whose keys differ in all bits.
struct DeviceSegmentedSort {
  template <class Key, class Begin, class End>
  static cudaError_t SortKeys(void* storage, std::size_t& bytes, const Key* in, Key* out,
                              std::int64_t, std::int64_t segments, Begin begin, End end,
                              cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      for (std::int64_t i = 0; i < segments; ++i) {
        cuda_cpu::radix_sort(in + begin[i], out + begin[i], kNone, kNone, end[i] - begin[i], false,
                             0, 8 * sizeof(Key));
      }
    });
  }
  template <class Key, class Begin, class End>
  static cudaError_t SortKeysDescending(void* storage, std::size_t& bytes, const Key* in, Key* out,
                                        std::int64_t, std::int64_t segments, Begin begin, End end,
                                        cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      for (std::int64_t i = 0; i < segments; ++i) {
        cuda_cpu::radix_sort(in + begin[i], out + begin[i], kNone, kNone, end[i] - begin[i], true,
                             0, 8 * sizeof(Key));
      }
    });
  }
  template <class Key, class Value, class Begin, class End>
  static cudaError_t SortPairs(void* storage, std::size_t& bytes, const Key* in, Key* out,
                               const Value* values_in, Value* values_out, std::int64_t,
                               std::int64_t segments, Begin begin, End end,
                               cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      for (std::int64_t i = 0; i < segments; ++i) {
        cuda_cpu::radix_sort(in + begin[i], out + begin[i], values_in + begin[i],
                             values_out + begin[i], end[i] - begin[i], false, 0, 8 * sizeof(Key));
      }
    });
  }
  template <class Key, class Value, class Begin, class End>
  static cudaError_t SortPairsDescending(void* storage, std::size_t& bytes, const Key* in, Key* out,
                                         const Value* values_in, Value* values_out, std::int64_t,
                                         std::int64_t segments, Begin begin, End end,
                                         cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      for (std::int64_t i = 0; i < segments; ++i) {
        cuda_cpu::radix_sort(in + begin[i], out + begin[i], values_in + begin[i],
                             values_out + begin[i], end[i] - begin[i], true, 0, 8 * sizeof(Key));
      }
    });
  }

 private:
  static constexpr cuda_cpu::NoValues* kNone = nullptr;
};

}  // namespace cub
