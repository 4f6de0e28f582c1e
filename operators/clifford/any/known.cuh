// The geometric product of multivectors whose blades are neighbours in memory, in an algebra and an
// order of blades that the compiler knows: those of networks. What items.cuh does for all of them
// costs a block's threads more instructions than the memory has time for: places and signs of
// blades are read, the metric multiplies most terms, and each number goes through shared memory
// twice. Here a place is the number of a register, a sign is that of a multiply-add, and terms that
// are 0 are left out: for a million items of (3, 0, 1) in bf16 warps execute 11 million
// instructions here, and 49 million there.
//
// A thread owns an item. It loads it by accesses of 16 bytes, which are far apart for neighbouring
// threads; but each 32 bytes of memory that the first access brings into the L1 cache are what the
// second one needs. Stores find no such cache. So two neighbouring threads exchange halves before:
// then each access of the two writes 32 bytes of one item.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

#include "operators/clifford/any/items.cuh"

namespace operators::clifford {

inline constexpr int kKnownThreads = 128;  // of a block, and items

// How many vectors of an algebra square to 0; and the order of its blades, as a constant.
template <typename A>
inline constexpr int kNull = 0;
template <int p, int q, int r>
inline constexpr int kNull<Cl<p, q, r>> = r;

template <typename A, Order order>
inline constexpr BladeOrder kBladeOrder = order_of<A>(order, kNull<A>);

// An item as memory has it: accesses of 16 bytes.
template <typename A, typename T>
struct KnownItem {
  static constexpr int kWidth = 16 / sizeof(T), kPieces = A::kBlades / kWidth;
  uint4 pieces[kPieces];

  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) pieces[i] = reinterpret_cast<const uint4*>(from)[i];
  }

  template <Order order>
  __device__ __forceinline__ Multivectors<A, 1> unpacked() const {
    T values[A::kBlades];
    memcpy(values, pieces, sizeof(values));
    Multivectors<A, 1> result;
    unroll<0, A::kBlades>([&](auto k) {
      constexpr int place = kBladeOrder<A, order>.place[k];
      constexpr bool negative = (kBladeOrder<A, order>.negative >> k & 1) != 0;
      const float value = to_float(values[place]);
      result.blade[k].v[0] = negative ? -value : value;
    });
    return result;
  }
  template <Order order>
  __device__ __forceinline__ void pack(const Multivectors<A, 1>& from) {
    T values[A::kBlades];
    unroll<0, A::kBlades>([&](auto k) {
      constexpr int place = kBladeOrder<A, order>.place[k];
      constexpr bool negative = (kBladeOrder<A, order>.negative >> k & 1) != 0;
      const float value = from.blade[k].v[0];
      values[place] = rounded_to<T>(negative ? -value : value);
    });
    memcpy(pieces, values, sizeof(values));
  }

  __device__ __forceinline__ static uint4 of_neighbour(const uint4& piece) {
    return {__shfl_xor_sync(0xffffffffu, piece.x, 1), __shfl_xor_sync(0xffffffffu, piece.y, 1),
            __shfl_xor_sync(0xffffffffu, piece.z, 1), __shfl_xor_sync(0xffffffffu, piece.w, 1)};
  }
  // All threads of a warp call this. `to` is the tensor, which has `count` items.
  __device__ __forceinline__ void store(T* to, size_t item, size_t count) const {
    uint4* const all = reinterpret_cast<uint4*>(to);
    if constexpr (kPieces == 1) {
      if (item < count) all[item] = pieces[0];
    } else {
      const bool odd = threadIdx.x % 2 != 0;
      const size_t even_item = item - odd;
#pragma unroll
      for (int i = 0; i < kPieces; i += 2) {
        const uint4 got = of_neighbour(odd ? pieces[i] : pieces[i + 1]);
        const uint4 of_even = odd ? got : pieces[i], of_odd = odd ? pieces[i + 1] : got;
        if (even_item < count) all[even_item * kPieces + i + odd] = of_even;
        if (even_item + 1 < count) all[(even_item + 1) * kPieces + i + odd] = of_odd;
      }
    }
  }
};

// out.
template <typename A, Order order, typename T>
__global__ void __launch_bounds__(kKnownThreads)
    multiply_known(const T* x, const T* y, T* out, size_t count) {
  const size_t item = size_t{blockIdx.x} * kKnownThreads + threadIdx.x;
  KnownItem<A, T> left = {}, right = {};
  if (item < count) {
    left.load(x + item * A::kBlades);
    right.load(y + item * A::kBlades);
  }
  left.template pack<order>(unweighted<Of::result>(left.template unpacked<order>(),
                                                   right.template unpacked<order>(), OwnMetric()));
  left.store(out, item, count);
}

// dx and dy.
template <typename A, Order order, typename T>
__global__ void __launch_bounds__(kKnownThreads)
    multiply_known_backward(const T* d_out, const T* x, const T* y, T* dx, T* dy, size_t count) {
  const size_t item = size_t{blockIdx.x} * kKnownThreads + threadIdx.x;
  KnownItem<A, T> left = {}, right = {}, of_out = {};
  if (item < count) {
    of_out.load(d_out + item * A::kBlades);
    left.load(x + item * A::kBlades);
    right.load(y + item * A::kBlades);
  }
  const Multivectors<A, 1> d = of_out.template unpacked<order>();
  of_out.template pack<order>(unweighted<Of::x>(d, right.template unpacked<order>(), OwnMetric()));
  of_out.store(dx, item, count);
  right.template pack<order>(unweighted<Of::y>(d, left.template unpacked<order>(), OwnMetric()));
  right.store(dy, item, count);
}

}  // namespace operators::clifford
