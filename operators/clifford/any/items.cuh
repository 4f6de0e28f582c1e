// Multivectors in every layout: the blades of a multivector may be neighbours in memory, or a plane
// apart as in the other kernels; and they may have another order. An item is one multivector, of a
// feature of a row. Here is the geometric product of items, without weights or norm, and the copy
// from one layout to another, for layers that need more than that. Where the compiler knows the
// algebra and the order, known.cuh has the product.
//
// A thread owns an item, all of whose blades it has in registers. Where blades are neighbours, a
// block's items are one piece of memory. Its threads copy this piece to shared memory, 16 bytes at
// a time, neighbours beside neighbours; there each thread picks its own item. An item has one place
// more than blades, so that the items of a warp begin in different banks. Without shared memory a
// warp's loads of a blade would each touch 32 places that are an item apart.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "operators/clifford/any/metric.cuh"
#include "operators/clifford/any/order.cuh"
#include "operators/clifford/clifford.cuh"
#include "operators/clifford/storage.cuh"

namespace operators::clifford {

// Threads of a block, and items. With 32 blades half as many, so that three tensors fit.
template <int n>
inline constexpr int kItems = n == 5 ? 64 : 128;

/// Where a tensor's items lie.
struct ItemLayout {
  bool blades_last;  ///< (items, blades); else (blades, items)
  BladeOrder order;
};

/// What the kernels know beside the tensors.
struct ItemProduct {
  Layer layer;  ///< not normed
  Metric metric;
  Storage storage;
  ItemLayout layout;  ///< of all tensors
  __host__ __device__ size_t items() const { return layer.plane(); }
};

// A tensor's items of a block, in shared memory, in the caller's order.
template <typename A>
struct ItemTile {
  static constexpr int kCount = kItems<A::kVectors>, kStride = A::kBlades + 1;
  static constexpr int kElements = kCount * A::kBlades;
  float at[kCount * kStride];
  // Element i of the piece of memory.
  __device__ float& element(int i) { return at[i / A::kBlades * kStride + i % A::kBlades]; }
  __device__ float* own() { return at + threadIdx.x * kStride; }
};

// A piece of kElements elements, of which `inside` exist, between memory and a tile. All loads of a
// thread are on their way before the first value is converted.
template <typename A, typename T>
struct ItemCopy {
  static constexpr int kWidth = 16 / sizeof(T), kElements = ItemTile<A>::kElements;
  static constexpr int kPieces =
      (kElements / kWidth + ItemTile<A>::kCount - 1) / ItemTile<A>::kCount;
  using Piece = Stored<T, kWidth>;
  Piece pieces[kPieces];

  __device__ static int first(int piece) {
    return (piece * ItemTile<A>::kCount + static_cast<int>(threadIdx.x)) * kWidth;
  }
  __device__ void load(const T* from, int inside) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = first(i);
      pieces[i] = {};
      if (at + kWidth <= inside) {
        pieces[i] = *reinterpret_cast<const Piece*>(from + at);
      } else {
        for (int e = 0; e < kWidth && at + e < inside; ++e) pieces[i].v[e] = from[at + e];
      }
    }
  }
  __device__ void put(ItemTile<A>& to) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        if (first(i) < kElements) to.element(first(i) + e) = to_float(pieces[i].v[e]);
      }
    }
  }
  __device__ static void store(ItemTile<A>& from, T* to, int inside) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = first(i);
      if (at >= kElements) continue;
      Piece piece;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) piece.v[e] = rounded_to<T>(from.element(at + e));
      if (at + kWidth <= inside) {
        *reinterpret_cast<Piece*>(to + at) = piece;
      } else {
        for (int e = 0; e < kWidth && at + e < inside; ++e) to[at + e] = piece.v[e];
      }
    }
  }
};

// The items of a block. All its threads call read() and write().
template <typename A>
struct BlockItems {
  ItemLayout layout;
  Storage storage;
  size_t count;  // all items
  ItemTile<A>* tiles;
  size_t first = size_t{blockIdx.x} * ItemTile<A>::kCount;  // the block's

  __device__ size_t item() const { return first + threadIdx.x; }
  __device__ int inside() const {
    return static_cast<int>(min(size_t{ItemTile<A>::kCount}, count - first)) * A::kBlades;
  }
  __device__ float with_sign(int blade, float value) const {
    return layout.order.negative >> blade & 1 ? -value : value;
  }

  // The thread's item of each of kCount tensors; zeros where there is no item.
  template <int kCount>
  __device__ __forceinline__ void read(const void* const (&from)[kCount],
                                       Multivectors<A, 1> (&to)[kCount]) {
    with_type(storage, [&]<typename T>(const T*) {
      if (layout.blades_last) {
        ItemCopy<A, T> copies[kCount];
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          copies[c].load(static_cast<const T*>(from[c]) + first * A::kBlades, inside());
        }
#pragma unroll
        for (int c = 0; c < kCount; ++c) copies[c].put(tiles[c]);
      } else {
        T raw[kCount][A::kBlades] = {};
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          unroll<0, A::kBlades>([&](auto k) {
            const T* const plane = static_cast<const T*>(from[c]) + layout.order.place[k] * count;
            if (item() < count) raw[c][k] = plane[item()];
          });
        }
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          unroll<0, A::kBlades>([&](auto k) { to[c].blade[k].v[0] = to_float(raw[c][k]); });
        }
      }
    });
    if (layout.blades_last) __syncthreads();
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      unroll<0, A::kBlades>([&](auto k) {
        float& value = to[c].blade[k].v[0];
        if (layout.blades_last) value = tiles[c].own()[layout.order.place[k]];
        value = with_sign(k, value);
      });
    }
  }

  // What a thread has read of a tile nobody else reads: so it may be written at once.
  template <int kCount>
  __device__ __forceinline__ void write(const Multivectors<A, 1> (&from)[kCount],
                                        void* const (&to)[kCount]) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      unroll<0, A::kBlades>([&](auto k) {
        if (layout.blades_last) {
          tiles[c].own()[layout.order.place[k]] = with_sign(k, from[c].blade[k].v[0]);
        }
      });
    }
    if (layout.blades_last) __syncthreads();
    with_type(storage, [&]<typename T>(const T*) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        T* const all = static_cast<T*>(to[c]);
        if (layout.blades_last) {
          ItemCopy<A, T>::store(tiles[c], all + first * A::kBlades, inside());
        } else if (item() < count) {
          unroll<0, A::kBlades>([&](auto k) {
            all[layout.order.place[k] * count + item()] =
                rounded_to<T>(with_sign(k, from[c].blade[k].v[0]));
          });
        }
      }
    });
  }
};

// ---- The product --------------------------------------------------------------------------------

// The terms of blade `fixed` of z = x y, dx or dy, as sum_terms() has them, of all grades. n is a
// blade of the first factor.
template <typename A, Of of, int fixed, typename M, int... n>
__device__ __forceinline__ float sum_of_products(const Multivectors<A, 1>& first,
                                                 const Multivectors<A, 1>& second, const M& metric,
                                                 std::integer_sequence<int, n...>) {
  constexpr auto sign = [](int other) {
    const int third = A::third(fixed, other);
    return of == Of::result ? A::kTables.sign[other][third]
           : of == Of::x    ? A::kTables.sign[fixed][third]
                            : A::kTables.sign[third][fixed];
  };
  return (-0.0f + ... +
          term_by_metric<sign(n), shared_vectors<A>(of, fixed, n)>(
              first.blade[n].v[0], second.blade[A::third(fixed, n)].v[0], metric));
}

template <Of of, typename A, typename M>
__device__ __forceinline__ Multivectors<A, 1> unweighted(const Multivectors<A, 1>& first,
                                                         const Multivectors<A, 1>& second,
                                                         const M& metric) {
  Multivectors<A, 1> result;
  unroll<0, A::kBlades>([&](auto k) {
    result.blade[k].v[0] = sum_of_products<A, of, k>(first, second, metric,
                                                     std::make_integer_sequence<int, A::kBlades>());
  });
  return result;
}

// out.
template <int n>
__global__ void __launch_bounds__(kItems<n>)
    multiply_items(const void* x, const void* y, void* out,
                   const __grid_constant__ ItemProduct of) {
  using A = Cl<n, 0, 0>;
  __shared__ ItemTile<A> tiles[2];
  BlockItems<A> items{of.layout, of.storage, of.items(), tiles};
  Multivectors<A, 1> factors[2];
  items.read({x, y}, factors);
  Multivectors<A, 1> z[] = {unweighted<Of::result>(factors[0], factors[1], of.metric)};
  if (of.layer.gated) {
    multiply_by(z[0], Gates<1>(factors[0].blade[0], factors[1].blade[0]).product());
  }
  items.write(z, {out});
}

// dx and dy.
template <int n>
__global__ void __launch_bounds__(kItems<n>)
    multiply_items_backward(const void* d_out, const void* x, const void* y, void* dx, void* dy,
                            const __grid_constant__ ItemProduct of) {
  using A = Cl<n, 0, 0>;
  __shared__ ItemTile<A> tiles[3];
  BlockItems<A> items{of.layout, of.storage, of.items(), tiles};
  Multivectors<A, 1> given[3];
  items.read({d_out, x, y}, given);
  Multivectors<A, 1>& dP = given[0];
  const Multivectors<A, 1>&left = given[1], &right = given[2];
  const Gates<1> gates(left.blade[0], right.blade[0], of.layer.gated);
  Pack<1> dg = {};
  if (of.layer.gated) {
    const Multivectors<A, 1> P = unweighted<Of::result>(left, right, of.metric);
    dP = gradient_of_product(P, gates.product(), dP, GradientSums<A>{}, of.layer, dg);
  }
  Multivectors<A, 1> d[] = {unweighted<Of::x>(dP, right, of.metric),
                            unweighted<Of::y>(dP, left, of.metric)};
  add(d[0].blade[0], through_gate(dg, left.blade[0], gates.y, of.layer));
  add(d[1].blade[0], through_gate(dg, right.blade[0], gates.x, of.layer));
  items.write(d, {dx, dy});
}

// ---- The copy -----------------------------------------------------------------------------------

// The items of one tensor in another layout. Values keep their bits, but for the sign.
template <int n>
__global__ void __launch_bounds__(kItems<n>)
    copy_items(const void* from, void* to, size_t count, Storage storage,
               const __grid_constant__ ItemLayout own, const __grid_constant__ ItemLayout other) {
  using A = Cl<n, 0, 0>;
  __shared__ ItemTile<A> tile[1];
  BlockItems<A> items{own, storage, count, tile};
  Multivectors<A, 1> values[1];
  items.read({from}, values);
  items.layout = other;
  items.write(values, {to});
}

}  // namespace operators::clifford
