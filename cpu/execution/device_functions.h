// What CUDA C++ offers inside of kernels: barriers, warp operations, atomics, intrinsics.
//
// Functions without a description do what CUDA documents. Those with a reduced precision on the GPU
// (__expf and its kin) are as precise as the CPU's here.

#pragma once

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/execution/cuda_cpu.h"
#include "cpu/execution/later_than_cpp17.h"
#include "cpu/execution/sanitizers.h"
#include "cpu/order/fences.h"
#include "cpu/watch/hooks.h"

// ---- Barriers ----------------------------------------------------------------------------------

inline void __syncthreads(cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::block_barrier(0, "__syncthreads()", site);
}

inline int __syncthreads_count(int predicate, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  return cuda_cpu::block_barrier(predicate, "__syncthreads_count()", site);
}

inline int __syncthreads_or(int predicate, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  return cuda_cpu::block_barrier(predicate, "__syncthreads_or()", site) != 0;
}

inline int __syncthreads_and(int predicate, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  return cuda_cpu::block_barrier(!predicate, "__syncthreads_and()", site) == 0;
}

inline void __syncwarp(unsigned mask = 0xFFFFFFFF, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::warp_meet(mask, nullptr, nullptr, "__syncwarp()", site);
}

inline void __threadfence() { cuda_cpu::order_fence(cuda_cpu::Scope::device); }
inline void __threadfence_block() { cuda_cpu::order_fence(cuda_cpu::Scope::block); }
inline void __threadfence_system() { __threadfence(); }

// ---- Warp operations ---------------------------------------------------------------------------

/// The lanes of the warp that have not exited.
inline unsigned __activemask() { return cuda_cpu::live_lanes(); }

namespace cuda_cpu {

/// A lane's part in a shuffle. A lane that reads from one that takes no part gets all bits set.
template <class T>
struct Shuffle {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16, "this type cannot be shuffled");
  T value;
  unsigned source;
  T result;

  static void combine(void* const* operands, unsigned lanes) {
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
      Shuffle& self = *static_cast<Shuffle*>(operands[cuda_cpu::countr_zero(rest)]);
      if (lanes >> self.source & 1) {
        self.result = static_cast<const Shuffle*>(operands[self.source])->value;
      } else {
        memset(static_cast<void*>(&self.result), 0xFF, sizeof(T));
      }
    }
  }

  /// `source_of(lane, first, last)` is the lane to read from, for a lane whose segment of the warp
  /// is `first` to `last`; beyond the bounds of the segment every lane keeps its own value.
  template <class SourceOf>
  static T run(unsigned mask, T value, int width, const char* operation, Site site,
               SourceOf source_of) {
    if (width < 1 || width > 32 || !cuda_cpu::has_single_bit(static_cast<unsigned>(width))) {
      fail("%s with the width %d, which is no power of two up to 32", operation, width);
    }
    const int lane = static_cast<int>(lane_id());
    const int first = lane & -width;
    Shuffle self = {value, static_cast<unsigned>(source_of(lane, first, first + width - 1)), value};
    warp_meet(mask, combine, &self, operation, site);
    return self.result;
  }
};

/// A lane's part in a vote; afterwards the lanes whose predicate holds, and all lanes that voted.
struct Vote {
  bool predicate;
  unsigned ballot;
  unsigned lanes;

  static void combine(void* const* operands, unsigned lanes) {
    unsigned ballot = 0;
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
      const int lane = cuda_cpu::countr_zero(rest);
      ballot |= static_cast<unsigned>(static_cast<const Vote*>(operands[lane])->predicate) << lane;
    }
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
      Vote& vote = *static_cast<Vote*>(operands[cuda_cpu::countr_zero(rest)]);
      vote.ballot = ballot;
      vote.lanes = lanes;
    }
  }

  static Vote run(unsigned mask, bool predicate, const char* operation, Site site) {
    Vote vote = {predicate, 0, 0};
    warp_meet(mask, combine, &vote, operation, site);
    return vote;
  }
};

/// A lane's part in a reduction over a warp, whose result every lane gets.
template <class T, class Operation>
T warp_reduce(unsigned mask, T value, const char* name, Site site, Operation operation) {
  struct Part {
    T value;
    Operation operation;
  } self = {value, operation};
  warp_meet(
      mask,
      [](void* const* operands, unsigned lanes) {
        const Part& first = *static_cast<Part*>(operands[countr_zero(lanes)]);
        T total = first.value;
        for (unsigned rest = lanes & (lanes - 1); rest; rest &= rest - 1) {
          total = first.operation(total, static_cast<Part*>(operands[countr_zero(rest)])->value);
        }
        for (unsigned rest = lanes; rest; rest &= rest - 1) {
          static_cast<Part*>(operands[countr_zero(rest)])->value = total;
        }
      },
      &self, name, site);
  return self.value;
}

}  // namespace cuda_cpu

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              cuda_cpu::Site site = cuda_cpu::Site::here()) {
  return cuda_cpu::Shuffle<T>::run(
      mask, value, width, "__shfl_sync()", site,
      [&](int, int first, int) { return first + (source & (width - 1)); });
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 cuda_cpu::Site site = cuda_cpu::Site::here()) {
  return cuda_cpu::Shuffle<T>::run(
      mask, value, width, "__shfl_up_sync()", site, [&](int lane, int first, int) {
        return delta <= static_cast<unsigned>(lane - first) ? lane - static_cast<int>(delta) : lane;
      });
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   cuda_cpu::Site site = cuda_cpu::Site::here()) {
  return cuda_cpu::Shuffle<T>::run(
      mask, value, width, "__shfl_down_sync()", site, [&](int lane, int, int last) {
        return delta <= static_cast<unsigned>(last - lane) ? lane + static_cast<int>(delta) : lane;
      });
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  cuda_cpu::Site site = cuda_cpu::Site::here()) {
  return cuda_cpu::Shuffle<T>::run(mask, value, width, "__shfl_xor_sync()", site,
                                   [&](int lane, int, int last) {
                                     const int source = (lane ^ lane_mask) & 31;
                                     return source <= last ? source : lane;
                                   });
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              cuda_cpu::Site site = cuda_cpu::Site::here()) {
  return cuda_cpu::Vote::run(mask, predicate, "__ballot_sync()", site).ballot;
}

inline int __any_sync(unsigned mask, int predicate, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  return cuda_cpu::Vote::run(mask, predicate, "__any_sync()", site).ballot != 0;
}

inline int __all_sync(unsigned mask, int predicate, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  const cuda_cpu::Vote vote = cuda_cpu::Vote::run(mask, predicate, "__all_sync()", site);
  return vote.ballot == vote.lanes;
}

/// The lanes of `mask` that have the same value as the caller.
template <class T>
unsigned __match_any_sync(unsigned mask, T value, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  struct Match {
    T value;
    unsigned equal;
  } self = {value, 0};
  cuda_cpu::warp_meet(
      mask,
      [](void* const* operands, unsigned lanes) {
        for (unsigned a = lanes; a; a &= a - 1) {
          Match& match = *static_cast<Match*>(operands[cuda_cpu::countr_zero(a)]);
          for (unsigned b = lanes; b; b &= b - 1) {
            const int lane = cuda_cpu::countr_zero(b);
            const bool equal = static_cast<const Match*>(operands[lane])->value == match.value;
            match.equal |= static_cast<unsigned>(equal) << lane;
          }
        }
      },
      &self, "__match_any_sync()", site);
  return self.equal;
}

#define CUDA_CPU_REDUCE(NAME, T, EXPRESSION)                                            \
  inline T NAME(unsigned mask, T value, cuda_cpu::Site site = cuda_cpu::Site::here()) { \
    return cuda_cpu::warp_reduce(mask, value, #NAME "()", site,                         \
                                 [](T a, T b) -> T { return EXPRESSION; });             \
  }
CUDA_CPU_REDUCE(__reduce_add_sync, unsigned, a + b)
CUDA_CPU_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
CUDA_CPU_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
CUDA_CPU_REDUCE(__reduce_add_sync, int,
                static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)))
CUDA_CPU_REDUCE(__reduce_min_sync, int, a < b ? a : b)
CUDA_CPU_REDUCE(__reduce_max_sync, int, a > b ? a : b)
CUDA_CPU_REDUCE(__reduce_and_sync, unsigned, a& b)
CUDA_CPU_REDUCE(__reduce_or_sync, unsigned, a | b)
CUDA_CPU_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef CUDA_CPU_REDUCE

// ---- Atomics -----------------------------------------------------------------------------------

namespace cuda_cpu {

/// A value as only_looked() takes it.
template <class T>
unsigned long long bits_of(const T& value) {
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  return bits;
}

/// As CUDA has it, an atomic operation orders nothing; fences.h says what does. To the CPU it may
/// as well, and without ThreadSanitizer nobody else looks.
inline constexpr std::memory_order kRelaxed =
    kTsan ? std::memory_order_relaxed : std::memory_order_seq_cst;

/// An atomic operation that reads and writes: `operation` does it on a std::atomic_ref.
template <class T, class Operation>
T atomic_operation(T* address, Operation operation) {
  const T old = [&] {
    const OrderedWrite write(address);
    return operation(cuda_cpu::atomic_ref<T>(*address));
  }();
  order_read(address, true);
  return old;
}

/// Atomically replaces *address by update(*address); returns the old value. It orders nothing, with
/// fences neither.
template <class T, class Update>
T update_memory(T* address, Update update) {
  using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t,
                                  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;
  static_assert(sizeof(Bits) == sizeof(T));
  count_atomic(address, sizeof(T));
  const Uncounted as_loads_and_stores;
  cuda_cpu::atomic_ref<Bits> memory(*reinterpret_cast<Bits*>(address));
  Bits seen = memory.load(kRelaxed);
  while (!memory.compare_exchange_weak(
      seen, cuda_cpu::bit_cast<Bits>(update(cuda_cpu::bit_cast<T>(seen))), kRelaxed)) {
  }
  return cuda_cpu::bit_cast<T>(seen);
}

/// The same as an atomic operation of a thread.
template <class T, class Update>
T atomic_update(T* address, Update update) {
  const T old = [&] {
    const OrderedWrite write(address);
    return update_memory(address, update);
  }();
  order_read(address, true);
  return old;
}

/// T, if it is one of the types for which CUDA has the function: for others nvcc refuses it.
/// Classes are those of small numbers.
template <class T, class... Types>
using OneOf = std::enable_if_t<std::is_class_v<T> || (std::is_same_v<T, Types> || ...), T>;

}  // namespace cuda_cpu

/// Four additions, each atomic by itself. CUDA C++ Programming Guide, "atomicAdd()".
inline float4 atomicAdd(float4* address, float4 value);
inline float2 atomicAdd(float2* address, float2 value);

template <class T>
cuda_cpu::OneOf<T, int, unsigned, unsigned long long, float, double> atomicAdd(
    T* address, cuda_cpu::type_identity_t<T> value, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  if constexpr (std::is_integral_v<T>) {
    const T old = cuda_cpu::atomic_operation(
        address, [&](auto memory) { return memory.fetch_add(value, cuda_cpu::kRelaxed); });
    if (value == 0) cuda_cpu::only_looked(address, cuda_cpu::bits_of(old), site);
    return old;
  } else {
    return cuda_cpu::atomic_update(address, [&](T old) -> T { return old + value; });
  }
}

inline float2 atomicAdd(float2* address, float2 value) {
  cuda_cpu::count_atomic(address, sizeof value);
  const cuda_cpu::Uncounted as_two;
  return {atomicAdd(&address->x, value.x), atomicAdd(&address->y, value.y)};
}
inline float4 atomicAdd(float4* address, float4 value) {
  cuda_cpu::count_atomic(address, sizeof value);
  const cuda_cpu::Uncounted as_four;
  return {atomicAdd(&address->x, value.x), atomicAdd(&address->y, value.y),
          atomicAdd(&address->z, value.z), atomicAdd(&address->w, value.w)};
}

template <class T>
cuda_cpu::OneOf<T, int, unsigned> atomicSub(T* address, cuda_cpu::type_identity_t<T> value) {
  return cuda_cpu::atomic_operation(
      address, [&](auto memory) { return memory.fetch_sub(value, cuda_cpu::kRelaxed); });
}

template <class T>
cuda_cpu::OneOf<T, int, unsigned, unsigned long long, float> atomicExch(
    T* address, cuda_cpu::type_identity_t<T> value, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  const T old = cuda_cpu::atomic_update(address, [&](T) { return value; });
  if (cuda_cpu::bits_of(old) == cuda_cpu::bits_of(value)) {
    cuda_cpu::only_looked(address, cuda_cpu::bits_of(old), site);
  }
  return old;
}

template <class T>
cuda_cpu::OneOf<T, int, unsigned, long long, unsigned long long> atomicMax(
    T* address, cuda_cpu::type_identity_t<T> value) {
  return cuda_cpu::atomic_update(address, [&](T old) { return old > value ? old : value; });
}

template <class T>
cuda_cpu::OneOf<T, int, unsigned, long long, unsigned long long> atomicMin(
    T* address, cuda_cpu::type_identity_t<T> value) {
  return cuda_cpu::atomic_update(address, [&](T old) { return old < value ? old : value; });
}

template <class T>
cuda_cpu::OneOf<T, int, unsigned, long long, unsigned long long> atomicAnd(
    T* address, cuda_cpu::type_identity_t<T> value) {
  return cuda_cpu::atomic_operation(
      address, [&](auto memory) { return memory.fetch_and(value, cuda_cpu::kRelaxed); });
}

template <class T>
cuda_cpu::OneOf<T, int, unsigned, long long, unsigned long long> atomicOr(
    T* address, cuda_cpu::type_identity_t<T> value, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  const T old = cuda_cpu::atomic_operation(
      address, [&](auto memory) { return memory.fetch_or(value, cuda_cpu::kRelaxed); });
  if (value == 0) cuda_cpu::only_looked(address, cuda_cpu::bits_of(old), site);
  return old;
}

template <class T>
cuda_cpu::OneOf<T, int, unsigned, long long, unsigned long long> atomicXor(
    T* address, cuda_cpu::type_identity_t<T> value) {
  return cuda_cpu::atomic_operation(
      address, [&](auto memory) { return memory.fetch_xor(value, cuda_cpu::kRelaxed); });
}

template <class T>
cuda_cpu::OneOf<T, int, unsigned, unsigned long long, unsigned short> atomicCAS(
    T* address, cuda_cpu::type_identity_t<T> compare, cuda_cpu::type_identity_t<T> value,
    cuda_cpu::Site site = cuda_cpu::Site::here()) {
  static_assert(std::is_integral_v<T>, "atomicCAS compares integers");
  const T old = cuda_cpu::atomic_operation(address, [&](auto memory) {
    T found = compare;
    memory.compare_exchange_strong(found, value, cuda_cpu::kRelaxed);
    return found;
  });
  if (old != compare || value == compare) {
    cuda_cpu::only_looked(address, cuda_cpu::bits_of(old), site);
  }
  return old;
}

inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return cuda_cpu::atomic_update(address, [&](unsigned old) { return old >= limit ? 0 : old + 1; });
}

inline unsigned atomicDec(unsigned* address, unsigned limit) {
  return cuda_cpu::atomic_update(
      address, [&](unsigned old) { return old == 0 || old > limit ? limit : old - 1; });
}

// ---- Loads, stores, time -----------------------------------------------------------------------

#define CUDA_CPU_LOAD(NAME)  \
  template <class T>         \
  T NAME(const T* address) { \
    return *address;         \
  }
CUDA_CPU_LOAD(__ldg)
CUDA_CPU_LOAD(__ldca)
CUDA_CPU_LOAD(__ldcg)
CUDA_CPU_LOAD(__ldcs)
CUDA_CPU_LOAD(__ldlu)
CUDA_CPU_LOAD(__ldcv)
#undef CUDA_CPU_LOAD

#define CUDA_CPU_STORE(NAME)                                  \
  template <class T>                                          \
  void NAME(T* address, cuda_cpu::type_identity_t<T> value) { \
    *address = value;                                         \
  }
CUDA_CPU_STORE(__stwb)
CUDA_CPU_STORE(__stcg)
CUDA_CPU_STORE(__stcs)
CUDA_CPU_STORE(__stwt)
#undef CUDA_CPU_STORE

/// Nanoseconds here, not cycles.
inline long long clock64() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/// Lets other threads go on.
inline void __nanosleep(unsigned, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::yield(site);
}

[[noreturn]] inline void __trap() { cuda_cpu::fail("__trap()"); }

inline std::size_t __cvta_generic_to_shared(const void* pointer) {
  return cuda_cpu::shared_window(pointer);
}

// ---- Integers and bits -------------------------------------------------------------------------

inline int __popc(unsigned x) { return cuda_cpu::popcount(x); }
inline int __popcll(unsigned long long x) { return cuda_cpu::popcount(x); }
inline int __clz(int x) { return cuda_cpu::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) {
  return cuda_cpu::countl_zero(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }

inline unsigned __brev(unsigned x) {
  x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
  x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
  x = (x >> 4 & 0x0F0F0F0F) | (x & 0x0F0F0F0F) << 4;
  return __builtin_bswap32(x);
}

inline unsigned long long __brevll(unsigned long long x) {
  return static_cast<unsigned long long>(__brev(static_cast<unsigned>(x))) << 32 |
         __brev(static_cast<unsigned>(x >> 32));
}

inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
}
inline int __mulhi(int x, int y) { return static_cast<int>(static_cast<long long>(x) * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  __extension__ typedef unsigned __int128 Wide;
  return static_cast<unsigned long long>(static_cast<Wide>(x) * y >> 64);
}
inline unsigned __umul24(unsigned x, unsigned y) { return (x & 0xFFFFFF) * (y & 0xFFFFFF); }
inline int __mul24(int x, int y) {
  const auto low24 = [](int v) { return static_cast<int>(static_cast<unsigned>(v) << 8) >> 8; };
  return static_cast<int>(static_cast<long long>(low24(x)) * low24(y));
}

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned select = selector >> (4 * i);
    unsigned byte = static_cast<unsigned>(bytes >> (select % 8 * 8)) & 0xFF;
    if (select & 8) byte = byte & 0x80 ? 0xFF : 0;
    result |= byte << (8 * i);
  }
  return result;
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned>(both << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned>(both >> (shift & 31));
}

inline int __float_as_int(float x) { return cuda_cpu::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_cpu::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return cuda_cpu::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_cpu::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return cuda_cpu::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_cpu::bit_cast<double>(x); }

// ---- Floating point ----------------------------------------------------------------------------

// The C library declares these names for itself but does not define them.
#define CUDA_CPU_FAST_MATH(NAME) \
  extern "C" inline float __##NAME(float x) noexcept { return NAME(x); }
CUDA_CPU_FAST_MATH(expf)
CUDA_CPU_FAST_MATH(exp10f)
CUDA_CPU_FAST_MATH(logf)
CUDA_CPU_FAST_MATH(log2f)
CUDA_CPU_FAST_MATH(log10f)
CUDA_CPU_FAST_MATH(sinf)
CUDA_CPU_FAST_MATH(cosf)
CUDA_CPU_FAST_MATH(tanf)
CUDA_CPU_FAST_MATH(tanhf)
#undef CUDA_CPU_FAST_MATH
extern "C" inline float __powf(float x, float y) noexcept { return powf(x, y); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float fdividef(float x, float y) { return x / y; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

namespace cuda_cpu {

/// As the GPU converts: values out of range become the nearest integer, NaN becomes 0.
template <class Integer>
Integer saturating(double x) {
  if (std::isnan(x)) return 0;
  constexpr double low = std::numeric_limits<Integer>::min();
  constexpr double high = std::numeric_limits<Integer>::max();
  return x <= low    ? std::numeric_limits<Integer>::min()
         : x >= high ? std::numeric_limits<Integer>::max()
                     : static_cast<Integer>(x);
}

}  // namespace cuda_cpu

inline int __float2int_rz(float x) { return cuda_cpu::saturating<int>(x); }
inline int __float2int_rn(float x) { return cuda_cpu::saturating<int>(nearbyintf(x)); }
inline int __float2int_rd(float x) { return cuda_cpu::saturating<int>(floorf(x)); }
inline int __float2int_ru(float x) { return cuda_cpu::saturating<int>(ceilf(x)); }
inline unsigned __float2uint_rz(float x) { return cuda_cpu::saturating<unsigned>(x); }
inline unsigned __float2uint_rn(float x) { return cuda_cpu::saturating<unsigned>(nearbyintf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }

// In CUDA min and max also take operands of two types; the result has the common type.
#define CUDA_CPU_MIN_MAX(A, B)                                                            \
  constexpr std::common_type_t<A, B> min(A a, B b) {                                      \
    using T = std::common_type_t<A, B>;                                                   \
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a); \
  }                                                                                       \
  constexpr std::common_type_t<A, B> max(A a, B b) {                                      \
    using T = std::common_type_t<A, B>;                                                   \
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a); \
  }
CUDA_CPU_MIN_MAX(int, int)
CUDA_CPU_MIN_MAX(unsigned, unsigned)
CUDA_CPU_MIN_MAX(int, unsigned)
CUDA_CPU_MIN_MAX(unsigned, int)
CUDA_CPU_MIN_MAX(long, long)
CUDA_CPU_MIN_MAX(unsigned long, unsigned long)
CUDA_CPU_MIN_MAX(long, unsigned long)
CUDA_CPU_MIN_MAX(unsigned long, long)
CUDA_CPU_MIN_MAX(long long, long long)
CUDA_CPU_MIN_MAX(unsigned long long, unsigned long long)
CUDA_CPU_MIN_MAX(long long, unsigned long long)
CUDA_CPU_MIN_MAX(unsigned long long, long long)
#undef CUDA_CPU_MIN_MAX

inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double max(double a, float b) { return fmax(a, b); }
