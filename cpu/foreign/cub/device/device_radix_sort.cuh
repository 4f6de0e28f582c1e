// cub::DeviceRadixSort and cub::DeviceSegmentedRadixSort: see two_calls.h.

#pragma once

#include <cub/device/two_calls.h>

#include <cstdint>
#include <numeric>

#include "cpu/execution/later_than_cpp17.h"

namespace cuda_cpu {

/// Of a key the bits from `begin` to `end`, as a number that is in the keys' order.
template <class Key>
std::uint64_t radix(const Key& key, int begin, int end) {
  constexpr int kBits = 8 * sizeof(Key);
  static_assert(kBits <= 64, "the CPU backend sorts keys of at most 64 bits");
  using Bits = std::conditional_t<
      kBits == 8, std::uint8_t,
      std::conditional_t<kBits == 16, std::uint16_t,
                         std::conditional_t<kBits == 32, std::uint32_t, std::uint64_t>>>;
  constexpr Bits kSign = Bits(Bits{1} << (kBits - 1));
  Bits bits = cuda_cpu::bit_cast<Bits>(key);
  if constexpr (!std::is_integral_v<Key> && !std::is_enum_v<Key>) {  // also half and bf16
    if (bits == kSign) bits = 0;                                     // -0.0
    bits ^= bits & kSign ? Bits(~Bits{0}) : kSign;
  } else if constexpr (std::is_signed_v<Key>) {
    bits ^= kSign;
  }
  const std::uint64_t below = end >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << end) - 1;
  return begin >= 64 ? 0 : (bits & below) >> begin;
}

struct NoValues {};

/// Sorts `count` keys, and what belongs to them; equal ones stay in their order.
template <class Key, class Values>
void radix_sort(const Key* in, Key* out, const Values* values_in, Values* values_out,
                std::ptrdiff_t count, bool descending, int begin, int end) {
  std::vector<std::pair<std::uint64_t, std::ptrdiff_t>> order(static_cast<std::size_t>(count));
  for (std::ptrdiff_t i = 0; i < count; ++i) order[i] = {radix(in[i], begin, end), i};
  std::stable_sort(order.begin(), order.end(), [&](const auto& a, const auto& b) {
    return descending ? b.first < a.first : a.first < b.first;
  });
  const std::vector<Key> keys(in, in + count);
  for (std::ptrdiff_t i = 0; i < count; ++i) out[i] = keys[order[i].second];
  if constexpr (!std::is_same_v<Values, NoValues>) {
    const std::vector<Values> all(values_in, values_in + count);
    for (std::ptrdiff_t i = 0; i < count; ++i) values_out[i] = all[order[i].second];
  }
}

/// Two arrays of a DoubleBuffer change their roles: from now on the result is the current one.
template <class... Buffers>
void swap_roles(bool sorted, Buffers&... buffers) {
  if (sorted) ((buffers.selector ^= 1), ...);
}

}  // namespace cuda_cpu

namespace cub {

struct DeviceRadixSort {
  template <class Key, class Size>
  static cudaError_t SortKeys(void* storage, std::size_t& bytes, const Key* in, Key* out,
                              Size count, int begin_bit = 0, int end_bit = 8 * sizeof(Key),
                              cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::radix_sort(in, out, kNone, kNone, count, false, begin_bit, end_bit);
    });
  }
  template <class Key, class Size>
  static cudaError_t SortKeys(void* storage, std::size_t& bytes, DoubleBuffer<Key>& keys,
                              Size count, int begin_bit = 0, int end_bit = 8 * sizeof(Key),
                              cudaStream_t = nullptr) {
    const cudaError_t error =
        SortKeys(storage, bytes, keys.Current(), keys.Alternate(), count, begin_bit, end_bit);
    cuda_cpu::swap_roles(storage && error == cudaSuccess, keys);
    return error;
  }
  template <class Key, class Size>
  static cudaError_t SortKeysDescending(void* storage, std::size_t& bytes, const Key* in, Key* out,
                                        Size count, int begin_bit = 0,
                                        int end_bit = 8 * sizeof(Key), cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::radix_sort(in, out, kNone, kNone, count, true, begin_bit, end_bit);
    });
  }
  template <class Key, class Size>
  static cudaError_t SortKeysDescending(void* storage, std::size_t& bytes, DoubleBuffer<Key>& keys,
                                        Size count, int begin_bit = 0,
                                        int end_bit = 8 * sizeof(Key), cudaStream_t = nullptr) {
    const cudaError_t error = SortKeysDescending(storage, bytes, keys.Current(), keys.Alternate(),
                                                 count, begin_bit, end_bit);
    cuda_cpu::swap_roles(storage && error == cudaSuccess, keys);
    return error;
  }
  template <class Key, class Value, class Size>
  static cudaError_t SortPairs(void* storage, std::size_t& bytes, const Key* in, Key* out,
                               const Value* values_in, Value* values_out, Size count,
                               int begin_bit = 0, int end_bit = 8 * sizeof(Key),
                               cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::radix_sort(in, out, values_in, values_out, count, false, begin_bit, end_bit);
    });
  }
  template <class Key, class Value, class Size>
  static cudaError_t SortPairs(void* storage, std::size_t& bytes, DoubleBuffer<Key>& keys,
                               DoubleBuffer<Value>& values, Size count, int begin_bit = 0,
                               int end_bit = 8 * sizeof(Key), cudaStream_t = nullptr) {
    const cudaError_t error =
        SortPairs(storage, bytes, keys.Current(), keys.Alternate(), values.Current(),
                  values.Alternate(), count, begin_bit, end_bit);
    cuda_cpu::swap_roles(storage && error == cudaSuccess, keys, values);
    return error;
  }
  template <class Key, class Value, class Size>
  static cudaError_t SortPairsDescending(void* storage, std::size_t& bytes, const Key* in, Key* out,
                                         const Value* values_in, Value* values_out, Size count,
                                         int begin_bit = 0, int end_bit = 8 * sizeof(Key),
                                         cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::radix_sort(in, out, values_in, values_out, count, true, begin_bit, end_bit);
    });
  }
  template <class Key, class Value, class Size>
  static cudaError_t SortPairsDescending(void* storage, std::size_t& bytes, DoubleBuffer<Key>& keys,
                                         DoubleBuffer<Value>& values, Size count, int begin_bit = 0,
                                         int end_bit = 8 * sizeof(Key), cudaStream_t = nullptr) {
    const cudaError_t error =
        SortPairsDescending(storage, bytes, keys.Current(), keys.Alternate(), values.Current(),
                            values.Alternate(), count, begin_bit, end_bit);
    cuda_cpu::swap_roles(storage && error == cudaSuccess, keys, values);
    return error;
  }

 private:
  static constexpr cuda_cpu::NoValues* kNone = nullptr;
};

}  // namespace cub
