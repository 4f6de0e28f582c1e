// cub::DeviceSegmentedRadixSort and cub::DeviceSegmentedSort, of pointers: see two_calls.h.

#pragma once

#include <cub/device/device_radix_sort.cuh>

namespace cuda_cpu {

/// Sorts each segment, of which segment i goes from begin[i] to end[i], as radix_sort() does.
template <class Key, class Values, class Begin, class End>
void sort_segments(const Key* in, Key* out, const Values* values_in, Values* values_out,
                   std::int64_t segments, Begin begin, End end, bool descending, int begin_bit,
                   int end_bit) {
  for (std::int64_t i = 0; i < segments; ++i) {
    const std::ptrdiff_t first = begin[i], there = values_in ? first : 0;
    radix_sort(in + first, out + first, values_in + there, values_out + there, end[i] - first,
               descending, begin_bit, end_bit);
  }
}

}  // namespace cuda_cpu

namespace cub {

struct DeviceSegmentedRadixSort {
  template <class Key, class Begin, class End>
  static cudaError_t SortKeys(void* storage, std::size_t& bytes, const Key* in, Key* out,
                              std::int64_t, std::int64_t segments, Begin begin, End end,
                              int begin_bit = 0, int end_bit = 8 * sizeof(Key),
                              cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::sort_segments(in, out, kNone, kNone, segments, begin, end, false, begin_bit,
                              end_bit);
    });
  }
  template <class Key, class Begin, class End>
  static cudaError_t SortKeysDescending(void* storage, std::size_t& bytes, const Key* in, Key* out,
                                        std::int64_t, std::int64_t segments, Begin begin, End end,
                                        int begin_bit = 0, int end_bit = 8 * sizeof(Key),
                                        cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::sort_segments(in, out, kNone, kNone, segments, begin, end, true, begin_bit,
                              end_bit);
    });
  }
  template <class Key, class Value, class Begin, class End>
  static cudaError_t SortPairs(void* storage, std::size_t& bytes, const Key* in, Key* out,
                               const Value* values_in, Value* values_out, std::int64_t,
                               std::int64_t segments, Begin begin, End end, int begin_bit = 0,
                               int end_bit = 8 * sizeof(Key), cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::sort_segments(in, out, values_in, values_out, segments, begin, end, false,
                              begin_bit, end_bit);
    });
  }
  template <class Key, class Value, class Begin, class End>
  static cudaError_t SortPairsDescending(void* storage, std::size_t& bytes, const Key* in, Key* out,
                                         const Value* values_in, Value* values_out, std::int64_t,
                                         std::int64_t segments, Begin begin, End end,
                                         int begin_bit = 0, int end_bit = 8 * sizeof(Key),
                                         cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::sort_segments(in, out, values_in, values_out, segments, begin, end, true, begin_bit,
                              end_bit);
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
      cuda_cpu::sort_segments(in, out, kNone, kNone, segments, begin, end, false, 0,
                              8 * sizeof(Key));
    });
  }
  template <class Key, class Begin, class End>
  static cudaError_t SortKeysDescending(void* storage, std::size_t& bytes, const Key* in, Key* out,
                                        std::int64_t, std::int64_t segments, Begin begin, End end,
                                        cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::sort_segments(in, out, kNone, kNone, segments, begin, end, true, 0,
                              8 * sizeof(Key));
    });
  }
  template <class Key, class Value, class Begin, class End>
  static cudaError_t SortPairs(void* storage, std::size_t& bytes, const Key* in, Key* out,
                               const Value* values_in, Value* values_out, std::int64_t,
                               std::int64_t segments, Begin begin, End end,
                               cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::sort_segments(in, out, values_in, values_out, segments, begin, end, false, 0,
                              8 * sizeof(Key));
    });
  }
  template <class Key, class Value, class Begin, class End>
  static cudaError_t SortPairsDescending(void* storage, std::size_t& bytes, const Key* in, Key* out,
                                         const Value* values_in, Value* values_out, std::int64_t,
                                         std::int64_t segments, Begin begin, End end,
                                         cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::sort_segments(in, out, values_in, values_out, segments, begin, end, true, 0,
                              8 * sizeof(Key));
    });
  }

 private:
  static constexpr cuda_cpu::NoValues* kNone = nullptr;
};

}  // namespace cub
