// What C++20 has of the standard library and C++17 has not, for headers of the backend: a reader's
// own program is compiled as C++17, as nvcc does, and would clash with names of C++20.

#pragma once

#include <atomic>
#include <cstring>
#include <type_traits>
#if __cplusplus > 201703L
#include <bit>
#endif

#if __cplusplus > 201703L
#define CUDA_CPU_CONSTINIT constinit
#else
#define CUDA_CPU_CONSTINIT __constinit
#endif

namespace cuda_cpu {

#if __cplusplus > 201703L
using std::atomic_ref;
using std::bit_cast;
using std::countl_zero;
using std::countr_zero;
using std::has_single_bit;
using std::popcount;
using std::remove_cvref_t;
using std::type_identity;
using std::type_identity_t;
#else
template <class T>
struct type_identity {
  using type = T;
};
template <class T>
using type_identity_t = typename type_identity<T>::type;
template <class T>
using remove_cvref_t = std::remove_cv_t<std::remove_reference_t<T>>;

template <class To, class From>
constexpr To bit_cast(const From& value) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, value);
}

template <class T>
constexpr int popcount(T x) {
  return __builtin_popcountll(x);
}
template <class T>
constexpr bool has_single_bit(T x) {
  return x != 0 && (x & (x - 1)) == 0;
}
template <class T>
constexpr int countr_zero(T x) {
  return x == 0 ? 8 * static_cast<int>(sizeof(T)) : __builtin_ctzll(x);
}
template <class T>
constexpr int countl_zero(T x) {
  constexpr int kMore = 64 - 8 * static_cast<int>(sizeof(T));
  return x == 0 ? 64 - kMore : __builtin_clzll(x) - kMore;
}

template <class T>
class atomic_ref {
 public:
  explicit atomic_ref(T& object) : object_(&object) {}

  T load(std::memory_order order = std::memory_order_seq_cst) const {
    T value;
    __atomic_load(object_, &value, order);
    return value;
  }
  void store(T value, std::memory_order order = std::memory_order_seq_cst) const {
    __atomic_store(object_, &value, order);
  }
  T exchange(T value, std::memory_order order = std::memory_order_seq_cst) const {
    T old;
    __atomic_exchange(object_, &value, &old, order);
    return old;
  }
  bool compare_exchange_strong(T& expected, T value,
                               std::memory_order order = std::memory_order_seq_cst) const {
    return __atomic_compare_exchange(object_, &expected, &value, false, order,
                                     without_store(order));
  }
  bool compare_exchange_weak(T& expected, T value,
                             std::memory_order order = std::memory_order_seq_cst) const {
    return __atomic_compare_exchange(object_, &expected, &value, true, order, without_store(order));
  }
  T fetch_add(T value, std::memory_order order = std::memory_order_seq_cst) const {
    return __atomic_fetch_add(object_, value, order);
  }
  T fetch_sub(T value, std::memory_order order = std::memory_order_seq_cst) const {
    return __atomic_fetch_sub(object_, value, order);
  }
  T fetch_and(T value, std::memory_order order = std::memory_order_seq_cst) const {
    return __atomic_fetch_and(object_, value, order);
  }
  T fetch_or(T value, std::memory_order order = std::memory_order_seq_cst) const {
    return __atomic_fetch_or(object_, value, order);
  }
  T fetch_xor(T value, std::memory_order order = std::memory_order_seq_cst) const {
    return __atomic_fetch_xor(object_, value, order);
  }

 private:
  static constexpr std::memory_order without_store(std::memory_order order) {
    return order == std::memory_order_acq_rel   ? std::memory_order_acquire
           : order == std::memory_order_release ? std::memory_order_relaxed
                                                : order;
  }

  T* object_;
};
#endif

}  // namespace cuda_cpu
