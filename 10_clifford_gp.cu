// 10. Clifford algebra: the compiler writes the kernel
//
//     x' = x gate(x_1), y' = y gate(y_1)                gate(s) = (1 + erf(s / sqrt 2)) / 2
//     z  = sum over grades a, b, c of  w[a,c,b] <<x'>_a <y'>_b>_c
//     out = per grade c: z_c / sqrt(mean over features of |z_c|^2 + 1e-6)
//
//     x, y, out (2^n blades, batch, features) and w (features, triples): fp32, row-major
//
// The layer of a Clifford neural network. A number is a multivector: in three dimensions a scalar,
// a vector (e1, e2, e3), a bivector (e12, e13, e23) and a trivector (e123), 8 coefficients called
// blades. A blade's grade is how many basis vectors it is made of; <x>_a is what x has of grade a,
// and x_1 is its scalar, the coefficient of 1. Multivectors multiply like polynomials in e1, e2,
// ... which anticommute, e2 e1 = -e1 e2, and square to +1, -1 or 0: that is the algebra's
// signature. A product of grades has a weight per feature, shared by the batch: 10 of them in 2-D,
// 20 in 3-D. |z_c|^2 is the plain sum of squares. Backward returns dx, dy and dw from d_out.
//
// In the plane (n = 2, both vectors square to +1) there are four blades, and two of them multiplied
// are one of them again, with a sign:
//
//     x \ y |   1     e1    e2    e12
//     ------+------------------------
//       1   |   1     e1    e2    e12         e2 e1  = -e1 e2           = -e12
//       e1  |   e1    1     e12   e2          e1 e12 = (e1 e1) e2       =  e2
//       e2  |   e2   -e12   1    -e1          e2 e12 = -e1 (e2 e2)      = -e1
//       e12 |   e12  -e2    e1   -1           e12 e12 = -(e1 e1) (e2 e2) = -1
//
// A result is made of the places where the table has it. For e1 of z these are four of the 16:
//
//     z_e1 = w[0,1,1] x_1 y_e1 + w[1,1,0] x_e1 y_1 + w[2,1,1] x_e12 y_e2 - w[1,1,2] x_e2 y_e12
//
// A weight belongs to three grades, of x, of the result and of y. Three dimensions have 64 places.
//
// What moves: each blade is a plane of batch x features; x and y in, out out, 96 bytes per pair of
// 3-D multivectors. What is computed: 92 multiplications and multiply-adds, and two gates. The
// machine could do several times that while the bytes arrive: memory is the limit, if every byte
// moves once. Run operator by operator it does not: that is the first kernel of the table.
//
//     unfused         a kernel for each operator, as a framework runs it: 26 of them in 3-D; they
//                     stand in operators/clifford/unfused.cuh
//     fused product   gates and product in one kernel, the norm in another
//     one launch      a block owns a row (all features of a batch element) and reads it twice
//     row on chip     the row stays in registers while its norm is reduced, the weights in shared
//                     memory, and the next row is on its way
//     rows streamed   the copy engine brings the next rows, the weights are in registers (backward,
//                     of 8 blades and more, in shared memory), and a cluster of blocks shares a row
//                     that is too long for one; needs compute capability 9.0
//
// Rows may start anywhere (Place says how), and any number of warps shares one. A cluster of 8
// blocks holds 8192 features of 8 blades, 4096 of 16, 2048 of 32; "row on chip" has one block for a
// row, and holds fewer.
//
// What makes a kernel of 92 such instructions fast is that nobody looks anything up: which blade
// times which gives which, with which sign and which weight, is known when the program is compiled.
// Most write these lines by hand, or generate them with a symbolic package. Here the compiler does,
// from the signature: Cl<3, 0, 0> is all that a user writes; Cl<1, 3, 0> (spacetime), Cl<3, 0, 1>
// (projective) and Cl<4, 1, 0> (conformal) cost nothing more. Read first weighted_product() and
// gradients() in operators/clifford/algebra.cuh. Gates and norms in registers:
// operators/clifford/clifford.cuh.

#include <algorithm>
#include <optional>

#include "checks/clifford/clifford.h"
#include "operators/clifford/algebra.cuh"
#include "operators/clifford/clifford.cuh"
#include "operators/clifford/row_exchange.cuh"
#include "operators/clifford/unfused.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/hopper/hopper.cuh"
#include "primitives/launch.h"

using namespace checks;
using namespace operators::clifford;

// ---- Fused product ------------------------------------------------------------------------------

// Gates and product in one kernel. Both gates are factors of the whole product, z = gate(x_1)
// gate(y_1) (x y), so that x' and y' are never made, and the sums of 20 kernels stay in registers.
// A thread owns a feature and a strip of rows, so that it reads its weights once.
template <typename A>
__global__ void __launch_bounds__(kStripFeatures)
    fused_product(const float* x, const float* y, const float* w, float* z, Layer layer) {
  const StripThread thread(layer);
  const size_t plane = layer.plane();
  if (thread.row >= thread.end) return;
  const Weights<A> weights(w + static_cast<size_t>(thread.feature) * A::kTriples);
  for (int row = thread.row; row < thread.end; ++row) {
    const size_t at = static_cast<size_t>(row) * layer.features + thread.feature;
    const Multivectors<A, 1> product =
        gated_product(load<A>(x + at, plane), load<A>(y + at, plane), weights);
    unroll<0, A::kBlades>([&](auto k) { z[k * plane + at] = product.blade[k].v[0]; });
  }
}

// The norm of all grades; a block a row, which it reads twice, the second time from a cache.
template <typename A>
__global__ void normalize(const float* z, float* out, Layer layer) {
  __shared__ FeatureSums<A::kGrades> partials[kMaxWarps];
  const size_t row = static_cast<size_t>(blockIdx.x) * layer.features, plane = layer.plane();
  FeatureSums<A::kGrades> squares = {};
  for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
    add_squares(load<A>(z + row + f, plane), squares);
  }
  add_up_row(squares, partials, blockDim.x / 32);
  for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
    unroll<0, A::kBlades>([&](auto k) {
      const size_t i = k * plane + row + f;
      out[i] = z[i] * inverse_rms(squares.value[A::grade(k)], layer);
    });
  }
}

// ---- One launch ---------------------------------------------------------------------------------

constexpr int kRowThreads = 256;

// z need not be written to be normalized: it can be computed again. A block owns a row, walks over
// its features once for the sums and once for the result; the second time x and y come from the L2
// cache, as far as it still has them. Works for rows of any length. But a multivector costs its
// product twice, and its weights, which are reread for every row, come through the L1 cache.
template <typename A>
__global__ void __launch_bounds__(kRowThreads)
    forward_one_launch(const float* x, const float* y, const float* w, float* out, Layer layer) {
  __shared__ FeatureSums<A::kGrades> partials[2][kMaxWarps];
  const size_t plane = layer.plane();
  int turn = 0;
  for (int n = blockIdx.x; n < layer.batch; n += gridDim.x, turn ^= 1) {
    const size_t row = static_cast<size_t>(n) * layer.features;
    FeatureSums<A::kGrades> sums = {};
    for (int walk = layer.normed ? 1 : 2; walk <= 2; ++walk) {
      for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
        const Multivectors<A, 1> z =
            gated_product(load<A>(x + row + f, plane), load<A>(y + row + f, plane),
                          Weights<A>(w + static_cast<size_t>(f) * A::kTriples));
        if (walk == 1) {
          add_squares(z, sums);
          continue;
        }
        unroll<0, A::kBlades>([&](auto k) {
          const float r = layer.normed ? inverse_rms(sums.value[A::grade(k)], layer) : 1;
          out[k * plane + row + f] = z.blade[k].v[0] * r;
        });
      }
      if (walk == 1) add_up_row(sums, partials[turn], blockDim.x / 32);
    }
  }
}

// Backward, the same: the first walk adds up both sums of a row, the second makes dx, dy and dw, of
// P, the product before its gates. dw goes to a partial (triples, features) of the block's own.
template <typename A>
__global__ void __launch_bounds__(kRowThreads)
    backward_one_launch(const float* x, const float* y, const float* w, const float* d_out,
                        float* dx, float* dy, float* dw_partials, Layer layer) {
  __shared__ GradientSums<A> partials[2][kMaxWarps];
  const size_t plane = layer.plane();
  float* dw = dw_partials + static_cast<size_t>(blockIdx.x) * A::kTriples * layer.features;
  int turn = 0;
  for (int n = blockIdx.x; n < layer.batch; n += gridDim.x, turn ^= 1) {
    const size_t row = static_cast<size_t>(n) * layer.features;
    GradientSums<A> sums = {};
    for (int walk = layer.normed ? 1 : 2; walk <= 2; ++walk) {
      for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
        const Multivectors<A, 1> left = load<A>(x + row + f, plane);
        const Multivectors<A, 1> right = load<A>(y + row + f, plane);
        const Multivectors<A, 1> d = load<A>(d_out + row + f, plane);
        const Weights<A> weights(w + static_cast<size_t>(f) * A::kTriples);
        const Gates<1> gates(left.blade[0], right.blade[0]);
        const Multivectors<A, 1> P = weighted_product(left, right, weights);
        if (walk == 1) {
          add_gradient_sums(P, gates.product(), d, sums);
          continue;
        }
        Pack<1> dg;
        const Multivectors<A, 1> dP = gradient_of_product(P, gates.product(), d, sums, layer, dg);
        const auto take_w = [&](auto t) {
          const float sum = dw[static_cast<size_t>(t) * layer.features + f];
          return Pack<1>{{n == static_cast<int>(blockIdx.x) ? 0 : sum}};
        };
        const auto give_w = [&](auto t, const Pack<1>& sum) {
          dw[static_cast<size_t>(t) * layer.features + f] = sum.v[0];
        };
        const auto give_x = [&](auto i, Pack<1> value) {
          if (i == 0) add(value, through_gate(dg, left.blade[0], gates.y));
          dx[i * plane + row + f] = value.v[0];
        };
        const auto give_y = [&](auto j, Pack<1> value) {
          if (j == 0) add(value, through_gate(dg, right.blade[0], gates.x));
          dy[j * plane + row + f] = value.v[0];
        };
        gradients<Of::x>(left, right, dP, weights, give_x, take_w, give_w);
        gradients<Of::y>(left, right, dP, weights, give_y, take_w, give_w);
      }
      if (walk == 1) add_up_row(sums, partials[turn], blockDim.x / 32);
    }
  }
}

// ---- Row on chip --------------------------------------------------------------------------------

// How a block works in the kernels below: `threads`, `per_row` (whole warps) for each row that it
// has at a time. A row that is too long for one has several `blocks`, with `share` features each.
struct RowsOnChip {
  int threads, per_row, blocks, share;
  __host__ __device__ int rows() const { return threads / per_row; }
  __host__ __device__ int groups(const Layer& layer) const {
    return (layer.batch - 1) / rows() + 1;
  }
};

// A block stays, and takes one group of rows after the other. Sized for an H200, which brings each
// multiprocessor 33 bytes per nanosecond, more than a microsecond after they were asked for: about
// 40 KB have to be on the way. A thread of 512 has 128 registers; with 32 blades, of 256, 255.
template <typename A>
constexpr int kThreads = A::kBlades <= 16 ? 512 : 256;

// W features per thread: as many as the registers hold. Forward needs x, y and z at a time, 3 W
// multivectors; backward about as much, and dw for all triples. (Forward, rows of over 512 features
// of 16 blades have W = 2: see kFetchAhead.)
template <typename A>
constexpr int kForwardWidth = A::kBlades <= 8 ? 4 : 1;
template <typename A>
constexpr int kBackwardWidth = A::kBlades <= 8 ? 16 / A::kBlades : 1;
template <typename A>
constexpr int kStreamedWidth = A::kBlades <= 8 ? 2 : 1;

// A thread's place: its row, of those that its block has at a time, and its W features. With
// kVector these are neighbours, moved as one access, for rows that all start at a multiple of its
// size. In other rows they are 32 apart: neighbouring threads have neighbouring features, and a
// warp moves 128 bytes in a row, wherever the row starts.
template <int W, bool kVector>
struct Place {
  static constexpr int kStep = kVector ? 1 : 32;
  int row, blocks;      // which of its block's rows; how many blocks share a row
  int start, features;  // the block has `features` of the row's features, from `start` on
  int first, count;     // of the thread's own: its first of these, and how many are there

  __device__ Place(const RowsOnChip& shape, const Layer& layer)
      : row(threadIdx.x / shape.per_row),
        blocks(kVector ? 1 : shape.blocks),
        start(kVector ? 0 : blockIdx.x % blocks * shape.share),
        features(kVector ? layer.features : min(shape.share, layer.features - start)),
        first(first_of(threadIdx.x % shape.per_row)),
        count(first >= features ? 0
              : kVector         ? W
                                : min(W, (features - first - 1) / kStep + 1)) {}

  // Thread t of a row has features first_of(t), first_of(t) + kStep... of the block's; and the
  // thread that has this feature, and which of the thread's W it is.
  __device__ static int first_of(int t) { return t / kStep * kStep * W + t % kStep; }
  __device__ static int thread_of(int feature) {
    return feature / (kStep * W) * kStep + feature % kStep;
  }
  __device__ static int number_of(int feature) { return feature / kStep % W; }

  // Moves the thread's features of a blade; `from` or `to` is the first's. Only `inside` exist.
  __device__ __forceinline__ void fetch(float* to, const float* from, int inside) const {
    if constexpr (kVector) {
      copy_async<sizeof(Pack<W>)>(to, from, inside > 0);
    } else {
#pragma unroll
      for (int e = 0; e < W; ++e) copy_async<sizeof(float)>(to + e, from + e * kStep, e < inside);
    }
  }
  __device__ __forceinline__ Pack<W> load(const float* from, int inside) const {
    Pack<W> result = {};
    if constexpr (kVector) {
      if (inside > 0) result = *reinterpret_cast<const Pack<W>*>(from);
    } else {
#pragma unroll
      for (int e = 0; e < W; ++e) result.v[e] = e < inside ? from[e * kStep] : 0;
    }
    return result;
  }
  __device__ __forceinline__ void store(float* to, const Pack<W>& pack, int inside) const {
    if constexpr (kVector) {
      if (inside > 0) *reinterpret_cast<Pack<W>*>(to) = pack;
    } else {
#pragma unroll
      for (int e = 0; e < W; ++e) {
        if (e < inside) to[e * kStep] = pack.v[e];
      }
    }
  }
};

// Shared memory: for each of a row's threads its weights; then kPlanes packs for each thread, which
// it fills, reads and refills alone. What a thread reads lies side by side, at constant offsets
// from one address: addresses that depend on a stride would each take a register. And from thread
// to thread it is an odd number of packs, so that neighbouring threads meet in no bank.
template <typename A, int W, bool kVector, int kPlanes>
struct OnChipMemory {
  static constexpr int kWeightStride = W * (A::kTriples | 1);
  static constexpr int kInputStride = kPlanes == 0 ? 0 : W * (kPlanes | 1);
  static size_t bytes(RowsOnChip shape) {
    return sizeof(float) * (static_cast<size_t>(shape.per_row) * kWeightStride +
                            static_cast<size_t>(shape.threads) * kInputStride);
  }

  float* all_weights;
  const float* weights;  // of this thread
  float* inputs;         // of this thread
  __device__ OnChipMemory(float* shared, RowsOnChip shape)
      : all_weights(shared),
        weights(shared + threadIdx.x % shape.per_row * kWeightStride),
        inputs(shared + shape.per_row * kWeightStride + threadIdx.x * kInputStride) {}

  // Starts the copies of all weights, a float at a time: they change places. Zeros beyond the row's
  // end, so that zeros are all that threads without a feature have and compute.
  __device__ void fetch_weights(const float* w, RowsOnChip shape,
                                const Place<W, kVector>& place) const {
    for (int i = threadIdx.x; i < shape.per_row * W * A::kTriples; i += shape.threads) {
      const int feature = i / A::kTriples, t = i % A::kTriples;
      float* to = all_weights + place.thread_of(feature) * kWeightStride + t * W;
      copy_async<sizeof(float)>(to + place.number_of(feature),
                                w + static_cast<size_t>(place.start) * A::kTriples + i,
                                feature < place.features);
    }
  }
  template <typename Index>
  __device__ __forceinline__ Pack<W> operator()(Index t) const {
    return *reinterpret_cast<const Pack<W>*>(weights + t * W);
  }
  // Starts the copies of a thread's part of a multivector's planes, as number first, first + 1...
  template <int first>
  __device__ __forceinline__ void fetch(const float* from, size_t plane,
                                        const Place<W, kVector>& place, int inside) const {
#pragma unroll
    for (int k = 0; k < A::kBlades; ++k, from += plane) {
      place.fetch(inputs + (first + k) * W, from, inside);
    }
  }
  template <int first>
  __device__ __forceinline__ Multivectors<A, W> take() const {
    Multivectors<A, W> result;
    unroll<0, A::kBlades>([&](auto k) {
      result.blade[k] = *reinterpret_cast<const Pack<W>*>(inputs + (first + k) * W);
    });
    return result;
  }
};

// A thread's z, divided by its row's rms if that is wanted, to memory.
template <typename A, int W, bool kVector>
__device__ __forceinline__ void store_normed(const Multivectors<A, W>& z,
                                             const FeatureSums<A::kGrades>& sums,
                                             const Layer& layer, float* to,
                                             const Place<W, kVector>& place, int inside) {
  unroll<0, A::kGrades>([&](auto c) {
    const float r = layer.normed ? inverse_rms(sums.value[c], layer) : 1;
    unroll<A::first(c), A::first(c + 1)>([&](auto k) {
      Pack<W> normed;
#pragma unroll
      for (int e = 0; e < W; ++e) normed.v[e] = z.blade[k].v[e] * r;
      place.store(to, normed, inside);
      to += layer.plane();
    });
  });
}

// Whether the next row is fetched meanwhile. A thread with two features of 16 blades (rows of over
// 512) has no room for it beside their weights.
template <typename A, int W>
constexpr bool kFetchAhead = A::kBlades <= 8 || W == 1;

// Three things are better than above. z stays in registers while its row's squares are added up, so
// that nothing is read or computed twice. The weights are transposed into shared memory once, and
// serve all rows that the block ever has. And as soon as a thread has taken its part of x and y
// into registers it orders the next row's into the same place (cp.async): memory works while the
// block multiplies, reduces and waits at the barrier.
template <typename A, int W, bool kVector>
__global__ void __launch_bounds__(kThreads<A>, 1)
    forward_on_chip(const float* x, const float* y, const float* w, float* out, Layer layer,
                    RowsOnChip shape) {
  extern __shared__ __align__(16) float shared[];
  __shared__ FeatureSums<A::kGrades> partials[2][kMaxWarps];
  const OnChipMemory<A, W, kVector, kFetchAhead<A, W> ? 2 * A::kBlades : 0> memory(shared, shape);
  const Place<W, kVector> place(shape, layer);
  const size_t plane = layer.plane();
  const int step = gridDim.x * shape.rows();
  const auto at = [&](int n) { return static_cast<size_t>(n) * layer.features + place.first; };
  const auto inside = [&](int n) { return n < layer.batch ? place.count : 0; };
  const auto fetch = [&](int n) {
    if constexpr (kFetchAhead<A, W>) {
      memory.template fetch<0>(x + at(n), plane, place, inside(n));
      memory.template fetch<A::kBlades>(y + at(n), plane, place, inside(n));
    }
    copy_async_commit();
  };

  int n = blockIdx.x * shape.rows() + place.row;
  memory.fetch_weights(w, shape, place);
  fetch(n);
  copy_async_wait<0>();
  __syncthreads();
  int turn = 0;
  for (int first = blockIdx.x * shape.rows(); first < layer.batch;
       first += step, n += step, turn ^= 1) {
    Multivectors<A, W> left, right;
    if constexpr (kFetchAhead<A, W>) {
      copy_async_wait<0>();
      __syncwarp();  // for the compiler: loads stay behind the wait,
      left = memory.template take<0>();
      right = memory.template take<A::kBlades>();
      __syncwarp();  // and before the next copy
      if (first + step < layer.batch) fetch(n + step);
    } else {
      unroll<0, A::kBlades>([&](auto k) {
        left.blade[k] = place.load(x + at(n) + k * plane, inside(n));
        right.blade[k] = place.load(y + at(n) + k * plane, inside(n));
      });
    }
    const Multivectors<A, W> z = gated_product(left, right, memory);
    FeatureSums<A::kGrades> sums = {};
    if (layer.normed) {
      add_squares(z, sums);
      add_up_row<true>(sums, partials[turn], shape.per_row / 32);
    }
    store_normed(z, sums, layer, out + at(n), place, inside(n));
  }
}

// ---- Row on chip, backward ----------------------------------------------------------------------

// dx and dy of a thread's multivectors to memory, blade by blade; dw is added to what it has.
template <typename A, int W, bool kVector, typename Weight>
__device__ __forceinline__ void store_gradients(const Multivectors<A, W>& left,
                                                const Multivectors<A, W>& right,
                                                const Multivectors<A, W>& dP, const Pack<W>& dg,
                                                const Gates<W>& gates, const Weight& weight,
                                                Pack<W>* dw, float* dx, float* dy, size_t plane,
                                                const Place<W, kVector>& place, int inside) {
  const Pack<W> dx_through_gate = through_gate(dg, left.blade[0], gates.y);
  const Pack<W> dy_through_gate = through_gate(dg, right.blade[0], gates.x);
  const auto take_w = [&](auto t) { return dw[t]; };
  const auto give_w = [&](auto t, const Pack<W>& sum) { dw[t] = sum; };
  const auto give_x = [&, to = dx](auto i, Pack<W> value) mutable {
    if (i == 0) add(value, dx_through_gate);
    place.store(to, value, inside);
    to += plane;
  };
  const auto give_y = [&, to = dy](auto j, Pack<W> value) mutable {
    if (j == 0) add(value, dy_through_gate);
    place.store(to, value, inside);
    to += plane;
  };
  gradients<Of::x>(left, right, dP, weight, give_x, take_w, give_w);
  __syncwarp();  // for the compiler: do not keep all weights in registers from above
  gradients<Of::y>(left, right, dP, weight, give_y, take_w, give_w);
}

// The sums of a thread's dw to the partial sums of its row.
template <typename A, int W, bool kVector>
__device__ __forceinline__ void store_weight_gradients(const Pack<W>* dw, float* partials,
                                                       const Place<W, kVector>& place,
                                                       const RowsOnChip& shape,
                                                       const Layer& layer) {
  const size_t partial = static_cast<size_t>(blockIdx.x / place.blocks) * shape.rows() + place.row;
  float* to = partials + partial * A::kTriples * layer.features + place.start + place.first;
  unroll<0, A::kTriples>([&](auto t) {
    place.store(to, dw[t], place.count);
    to += layer.features;
  });
}

// Backward with the same three. One reduction serves both sums of a row. A thread's features are
// the same for all of its rows, so that dw can stay in registers until the end. They are scarce
// now: x and d_out are taken into registers for good, and the next row's are ordered before the
// sums have been added up, so that memory has work all the time. There is no room for y as well: it
// is taken once for the sums and once more for the gradients, and its next row is ordered then.
template <typename A, int W, bool kVector>
__global__ void __launch_bounds__(kThreads<A>, 1)
    backward_on_chip(const float* x, const float* y, const float* w, const float* d_out, float* dx,
                     float* dy, float* dw_partials, Layer layer, RowsOnChip shape) {
  extern __shared__ __align__(16) float shared[];
  __shared__ GradientSums<A> partials[2][kMaxWarps];
  const OnChipMemory<A, W, kVector, 3 * A::kBlades> memory(shared, shape);
  const Place<W, kVector> place(shape, layer);
  const size_t plane = layer.plane();
  const int step = gridDim.x * shape.rows();
  const auto at = [&](int n) { return static_cast<size_t>(n) * layer.features + place.first; };
  const auto inside = [&](int n) { return n < layer.batch ? place.count : 0; };
  const auto fetch_x_and_d_out = [&](int n) {
    memory.template fetch<0>(x + at(n), plane, place, inside(n));
    memory.template fetch<2 * A::kBlades>(d_out + at(n), plane, place, inside(n));
  };
  const auto fetch_y = [&](int n) {
    memory.template fetch<A::kBlades>(y + at(n), plane, place, inside(n));
    copy_async_commit();
  };

  int first = blockIdx.x * shape.rows(), n = first + place.row;
  memory.fetch_weights(w, shape, place);
  fetch_x_and_d_out(n);
  fetch_y(n);
  copy_async_wait<0>();
  __syncthreads();
  Pack<W> dw[A::kTriples] = {};
  int turn = 0;
  for (; first < layer.batch; first += step, n += step, turn ^= 1) {
    copy_async_wait<0>();
    __syncwarp();
    const auto left = memory.template take<0>();
    auto right = memory.template take<A::kBlades>();
    const Multivectors<A, W> P = weighted_product(left, right, memory);
    const Gates<W> gates(left.blade[0], right.blade[0]);
    const auto d = memory.template take<2 * A::kBlades>();
    __syncwarp();
    if (first + step < layer.batch) fetch_x_and_d_out(n + step);
    GradientSums<A> sums = {};
    if (layer.normed) {
      add_gradient_sums(P, gates.product(), d, sums);
      add_up_row_by_halves(sums, partials[turn], shape.per_row / 32);
    }
    Pack<W> dg;
    const Multivectors<A, W> dP = gradient_of_product(P, gates.product(), d, sums, layer, dg);
    right = memory.template take<A::kBlades>();
    __syncwarp();
    if (first + step < layer.batch) fetch_y(n + step);
    store_gradients(left, right, dP, dg, gates, memory, dw, dx + at(n), dy + at(n), plane, place,
                    inside(n));
  }
  store_weight_gradients<A>(dw, dw_partials, place, shape, layer);
}

// ---- Hopper: rows streamed ----------------------------------------------------------------------

// The same idea as above, but no thread fetches its own x and y. One copy of the copy engine brings
// a whole plane of a block's rows, up to 4 KB, and several stages are on their way instead of one.
// What the other kernels spent on that, registers and instructions, is free for the weights: a
// thread has the same features in all of its rows, and keeps their weights in registers.
//
// A block takes a whole multiprocessor, so that forward can be launched early: the next launch's
// blocks take the places of this one's, one for one. With several blocks on a multiprocessor, as
// above, that costs time: the next blocks crowd onto the one that has room first.
//
// The warps of a row do not stop at __syncthreads() for its sums either. Each warp posts its sums
// and goes on, forward with its part of the next row. It collects the row's sums when it needs them
// (operators/clifford/row_exchange.cuh).
//
// Backward, registers are scarce. In 3-D a thread has for each feature 20 weights, 20 sums for dw
// and three multivectors of 8 numbers. So with 8 blades and more the weights are in shared memory,
// and leave room for one stage. The next rows are ordered when all threads have taken x, y and
// d_out of these. Up to 16 blades y is taken once more later, so the next y goes to other planes.

// Bytes of shared memory for stages, where the weights are in registers. RowSums comes on top, and
// weights that are longer than the last stage.
constexpr size_t kStreamBytes = 208 << 10;

// The planes of kTensors tensors for a block's rows. The copy engine copies multiples of 16 bytes,
// from multiples of 16 on. Without kVector rows start anywhere: then it brings what covers them,
// and plane k of the rows begins shift(k) floats further on in stages[s][k]. Up to 8 blades that is
// as far from a multiple of 128 bytes as in memory, so that the copy engine need not split lines:
// 3 % faster. (A tensor has a multiple of 4 elements, as it has 4 blades or more: nothing beyond it
// is read.)
template <typename A, int W, bool kVector, int kTensors>
struct Stream {
  static_assert(A::kBlades % 4 == 0);
  static constexpr int kPlanes = kTensors * A::kBlades;
  static constexpr int kLine = A::kBlades <= 8 ? 32 : 4;
  static constexpr int kElements = kThreads<A> * W + (kVector ? 0 : kLine);
  using RowSums = operators::clifford::RowSums<(kTensors - 1) * A::kGrades, kThreads<A> / 32>;
  using SharedWeights = OnChipMemory<A, W, kVector, 0>;
  // Backward has no registers for the weights of 8 blades and more. It takes y twice, so that the
  // next row's y goes to other planes; 32 blades leave no shared memory for that.
  static constexpr bool kSharedWeights = kTensors == 3 && A::kBlades >= 8;
  static constexpr int kTakesTwice = kSharedWeights && A::kBlades <= 16;
  using Stage = float[kPlanes + kTakesTwice * A::kBlades][kElements];
  static constexpr int kFront = sizeof(RowSums) / sizeof(float);
  static constexpr int kStages =
      kSharedWeights ? 1 : static_cast<int>(kStreamBytes / sizeof(Stage));
  static constexpr int kLast = kStages - 1;
  static_assert(kTakesTwice ? kStages == 1 : kSharedWeights || kStages > 1);
  static size_t bytes(const RowsOnChip& shape) {
    const size_t before_last = sizeof(RowSums) + kLast * sizeof(Stage);
    if (kSharedWeights) return before_last + sizeof(Stage) + SharedWeights::bytes(shape);
    return before_last + std::max(sizeof(Stage), sizeof(float) * shape.per_row * W * A::kTriples);
  }

#if HOPPER_CODE
  RowSums& sums;
  Stage* stages;
  Barrier* full;
  const float** planes;
  Layer layer;
  Place<W, kVector> place;
  int rows, groups;  // a block's rows at a time; how many such groups there are

  __device__ Stream(float* shared, Barrier (&full)[kStages], const float* (&planes)[kPlanes],
                    const float* const (&tensors)[kTensors], const Layer& layer,
                    const RowsOnChip& shape)
      : sums(*reinterpret_cast<RowSums*>(shared)),
        stages(reinterpret_cast<Stage*>(shared + kFront)),
        full(full),
        planes(planes),
        layer(layer),
        place(shape, layer),
        rows(shape.rows()),
        groups(shape.groups(layer)) {
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) barrier_init(&full[s], 1);
    }
    for (int p = threadIdx.x; p < kPlanes; p += blockDim.x) {
      const float* tensor = tensors[0];
#pragma unroll
      for (int i = 1; i < kTensors; ++i) tensor = p < i * A::kBlades ? tensor : tensors[i];
      planes[p] = tensor + p % A::kBlades * layer.plane();
    }
    sums.open(place.blocks);  // its fence is for full[], too
  }

  // A group's first element in its plane: 32 bits are enough, and registers are scarce.
  __device__ unsigned element(int group) const {
    return static_cast<unsigned>(group) * rows * layer.features + place.start;
  }
  __device__ int inside(int group) const {
    return group * rows + place.row < layer.batch ? place.count : 0;
  }
  __device__ int shift(int group, int plane) const {
    const unsigned all = static_cast<unsigned>(layer.plane());
    return kVector ? 0 : (element(group) + plane % min(kLine, A::kBlades) * all) % kLine;
  }
  // How many planes further on this round's y is.
  __device__ int turn(int round) const { return kTakesTwice * (round % 2) * 2 * A::kBlades; }

  // Orders the rows that a round works on, if they are there. All warps order a few planes each:
  // copies start one after the other, and a warp that ordered all would be late for its own work.
  // One lane tells the barrier how many bytes come, even if some have come: lanes that arrive at
  // one barrier would do so one after the other. (Four planes have all the sizes that there are.)
  __device__ __forceinline__ void fetch(int group, int s, int round) const {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    if (group >= groups || warp >= kPlanes) return;
    const int count = min(rows, layer.batch - group * rows) * place.features;
    const auto bytes = [&](int plane) {
      return (count + shift(group, plane) % 4 + 3) / 4 * 4 * static_cast<int>(sizeof(float));
    };
    if (threadIdx.x == 0) {
      barrier_arrive_expect(&full[s], kPlanes / 4 * (bytes(0) + bytes(1) + bytes(2) + bytes(3)));
    }
    if (kTakesTwice && A::kBlades == 16) __syncwarp();  // the compiler spills fewer registers
#pragma unroll 1
    for (int p = warp + threadIdx.x % 32 * warps; p < kPlanes; p += blockDim.x) {
      const int to = p / A::kBlades == 1 ? p + turn(round) : p;
      const int ahead = shift(group, p) % 4;
      bulk_load(stages[s][to] + shift(group, p) - ahead, planes[p] + element(group) - ahead,
                bytes(p), &full[s]);
    }
  }
  // A thread's multivectors of a tensor.
  template <int tensor>
  __device__ __forceinline__ Multivectors<A, W> take(int group, int s, int round,
                                                     int inside) const {
    Multivectors<A, W> result;
    const float* planes = stages[s][tensor * A::kBlades + (tensor == 1 ? turn(round) : 0)] +
                          place.row * place.features + place.first;
    unroll<0, A::kBlades>([&](auto k) {
      result.blade[k] = place.load(planes + shift(group, k) + k * kElements, inside);
    });
    return result;
  }
#endif
};

#if HOPPER_CODE
// Weights of a thread's features, in registers; zeros where it has fewer than W. In memory they are
// 40 to 224 bytes from one feature to the next: if threads loaded their own, each load of a warp
// would touch up to 32 lines. So the block copies all of its weights as they lie, through shared
// memory: through the stream's last stage, which gets its rows when the weights have left it.
template <typename A, int W>
struct RegisterWeights {
  Pack<W> packs[A::kTriples];

  // Orders the rows of all stages, from `group` on. Of several rounds, the first one's rows come
  // before the weights: they take longer. A block with one round orders its weights first, and
  // takes them while its rows come.
  template <typename Rows>
  __device__ __forceinline__ RegisterWeights(const float* w, const Rows& stream, int group,
                                             int step) {
    constexpr int kWidth = Weights<A>::kWidth, kCopies = W * A::kTriples / kWidth;
    const auto& place = stream.place;
    const int rows_before = stream.groups > step ? 1 : 0;  // stages
    for (int s = 0; s < rows_before; ++s) stream.fetch(group, s, s);
    float* const all = stream.stages[Rows::kLast][0];
    const float* from = w + static_cast<size_t>(place.start) * A::kTriples;
    const int count = blockDim.x / stream.rows * W * A::kTriples;  // of a row's threads
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      const int i = (copy * blockDim.x + threadIdx.x) * kWidth;
      const bool inside = i < place.features * A::kTriples;
      if (i < count) copy_async<kWidth * sizeof(float)>(all + i, from + i, inside);
    }
    copy_async_commit();
    for (int s = rows_before; s < Rows::kLast; ++s) stream.fetch(group + s * step, s, s);

    copy_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const Weights<A> weights(all + (place.first + e * place.kStep) * A::kTriples);
      unroll<0, A::kTriples>([&](auto t) { packs[t].v[e] = weights(t).v[0]; });
    }
    shared_fence();  // threads wrote this stage: before the copy engine does
    __syncthreads();
    stream.fetch(group + Rows::kLast * step, Rows::kLast, Rows::kLast);
  }
  template <typename Index>
  __device__ __forceinline__ Pack<W> operator()(Index) const {
    return packs[Index::value];
  }
};
#endif

// A thread owns W features of one of the block's rows. In a round it waits for its stage and
// computes z of this row; then it finishes the row before: it collects the sums, orders the next
// copies into that row's stage, and stores that row's out. So while the sums of one row come
// together, the thread multiplies the next row.
template <typename A, int W, bool kVector>
__global__ void __launch_bounds__(kThreads<A>, 1)
    forward_streamed(const float* x, const float* y, const float* w, float* out, Layer layer,
                     RowsOnChip shape) {
#if HOPPER_CODE
  using Rows = Stream<A, W, kVector, 2>;
  extern __shared__ __align__(128) float streamed[];
  __shared__ Barrier full[Rows::kStages];
  __shared__ const float* planes[Rows::kPlanes];
  const Rows stream(streamed, full, planes, {x, y}, layer, shape);
  const Place<W, kVector>& place = stream.place;
  const int step = gridDim.x / place.blocks;

  start_next_kernel();
  wait_for_previous_kernel();
  int group = blockIdx.x / place.blocks;
  const RegisterWeights<A, W> weights(w, stream, group, step);
  Ring ring{Rows::kStages}, last{Rows::kStages};
  int round = 0;
  // collect() waits until all warps of the block have posted. A warp posts after it has taken its
  // part of the stage. So by then the whole stage is free, for all of its rows.
  const auto finish = [&](const Multivectors<A, W>& z, int group, int round) {
    const auto sums = stream.sums.collect(place.row, place.blocks, shape.per_row / 32, round);
    stream.fetch(group + Rows::kStages * step, last.stage, round + Rows::kStages);
    last.advance();
    const size_t at = stream.element(group) + place.row * layer.features + place.first;
    store_normed(z, sums, layer, out + at, place, stream.inside(group));
  };
  Multivectors<A, W> last_z = {};
  for (; group < stream.groups; group += step, ring.advance(), ++round) {
    const int inside = stream.inside(group);
    Multivectors<A, W> z = {};
    FeatureSums<A::kGrades> sums = {};
    barrier_wait(&full[ring.stage], ring.parity);
    if (inside > 0) {
      const auto left = stream.template take<0>(group, ring.stage, round, inside);
      const auto right = stream.template take<1>(group, ring.stage, round, inside);
      z = gated_product(left, right, weights);
      add_squares(z, sums);
    }
    if (round > 0) finish(last_z, group - step, round - 1);
    stream.sums.post(sums, place.blocks, round);
    last_z = z;
  }
  if (round > 0) finish(last_z, group - step, round - 1);
#endif
}

// A thread owns W features, as in forward_streamed, but it finishes a row before it takes the next
// one: it has no registers for two. Each row of a block has its own partial sums of dw, which stay
// in registers until the end, as in backward_on_chip.
template <typename A, int W, bool kVector>
__global__ void __launch_bounds__(kThreads<A>, 1)
    backward_streamed(const float* x, const float* y, const float* w, const float* d_out, float* dx,
                      float* dy, float* dw_partials, Layer layer, RowsOnChip shape) {
#if HOPPER_CODE
  using Rows = Stream<A, W, kVector, 3>;
  extern __shared__ __align__(128) float streamed[];
  __shared__ Barrier full[Rows::kStages];
  __shared__ const float* planes[Rows::kPlanes];
  const Rows stream(streamed, full, planes, {x, y, d_out}, layer, shape);
  const Place<W, kVector>& place = stream.place;
  const int step = gridDim.x / place.blocks;

  int group = blockIdx.x / place.blocks;
  const auto weights = [&] {
    if constexpr (Rows::kSharedWeights) {
      stream.fetch(group, 0, 0);
      const typename Rows::SharedWeights shared(
          reinterpret_cast<float*>(stream.stages + Rows::kStages), shape);
      shared.fetch_weights(w, shape, place);
      copy_async_commit();
      copy_async_wait<0>();
      __syncthreads();
      return shared;
    } else {
      return RegisterWeights<A, W>(w, stream, group, step);
    }
  }();
  Pack<W> dw[A::kTriples] = {};
  Ring ring{Rows::kStages};
  int round = 0;
  for (; group < stream.groups; group += step, ring.advance(), ++round) {
    const int inside = stream.inside(group);
    barrier_wait(&full[ring.stage], ring.parity);
    const auto left = stream.template take<0>(group, ring.stage, round, inside);
    auto right = stream.template take<1>(group, ring.stage, round, inside);
    const auto d = stream.template take<2>(group, ring.stage, round, inside);
    const Multivectors<A, W> P = weighted_product(left, right, weights);
    const Gates<W> gates(left.blade[0], right.blade[0]);
    GradientSums<A> sums = {};
    add_gradient_sums(P, gates.product(), d, sums);
    stream.sums.post(sums, place.blocks, round);
    sums = stream.sums.collect(place.row, place.blocks, shape.per_row / 32, round);
    stream.fetch(group + Rows::kStages * step, ring.stage, round + Rows::kStages);

    Pack<W> dg;
    const Multivectors<A, W> dP = gradient_of_product(P, gates.product(), d, sums, layer, dg);
    if (Rows::kTakesTwice) right = stream.template take<1>(group, ring.stage, round, inside);
    const unsigned at = stream.element(group) + place.row * layer.features + place.first;
    store_gradients(left, right, dP, dg, gates, weights, dw, dx + at, dy + at, layer.plane(), place,
                    inside);
  }
  store_weight_gradients<A>(dw, dw_partials, place, shape, layer);
#endif
}

// ---- Launches -----------------------------------------------------------------------------------

using Tensors = CliffordTable;
using Gradients = CliffordGradients;

// What a row of the table launches, the memory that this takes beside inputs and outputs, how much
// shared memory a block asks for, and whether it needs Hopper. Without `run`: not for this shape.
struct Launch {
  std::function<void()> run;
  double bytes = 0;
  size_t shared_bytes = 0;
  bool hopper = false;
};

template <typename A>
Launch forward_once(const Tensors& of) {
  const int resident = resident_blocks(forward_one_launch<A>, kRowThreads, 0);
  const int blocks = std::min(of.layer.batch, resident);
  const auto run = [=] {
    forward_one_launch<A><<<blocks, kRowThreads>>>(of.x, of.y, of.w, of.out, of.layer);
  };
  return {run};
}

template <typename A>
Launch backward_once(const Tensors& of, const Gradients& d) {
  const int resident = resident_blocks(backward_one_launch<A>, kRowThreads, 0);
  const int blocks = std::min(of.layer.batch, resident);
  const auto partials = of.workspace.any<float>(blocks * of.w.size());
  const auto run = [=] {
    backward_one_launch<A>
        <<<blocks, kRowThreads>>>(of.x, of.y, of.w, d.d_out, d.dx, d.dy, partials, of.layer);
    add_up_weights<A>(d, partials, of.layer);
  };
  return {run, partials.bytes()};
}

// Blocks of kThreads or less for rows of W features a thread: several where one has too few.
template <typename A, int W>
RowsOnChip rows_on_chip(const Layer& layer) {
  const int blocks = ceil_div(layer.features, kThreads<A> * W);
  const int share = ceil_div(layer.features, blocks), per_row = ceil_div(share, 32 * W) * 32;
  return {kThreads<A> / per_row * per_row, per_row, blocks, share};
}

// Of these, no more rows at a time than are needed to be done in as many rounds.
template <typename A, int W>
RowsOnChip streamed_rows(const Layer& layer, const Device& device) {
  RowsOnChip shape = rows_on_chip<A, W>(layer);
  const int rounds = ceil_div(shape.groups(layer), device.sms);
  shape.threads = ceil_div(layer.batch, rounds * device.sms) * shape.per_row;
  return shape;
}

// The same for a kernel with weights in shared memory; none if a row or its weights are too large
// for `most` blocks. Small batches get small blocks, so that every multiprocessor has one.
template <typename A, int W, typename Memory>
std::optional<RowsOnChip> fit_on_chip(const Layer& layer, const Device& device) {
  constexpr size_t kStaticBytes = sizeof(GradientSums<A>[2][kMaxWarps]);
  RowsOnChip shape = rows_on_chip<A, W>(layer);
  const auto fits = [&] {
    return shape.blocks == 1 &&
           Memory::bytes(shape) + kStaticBytes <= static_cast<size_t>(device.shared_bytes);
  };
  const auto too_few = [&] { return shape.groups(layer) < device.sms; };
  while (shape.rows() > 1 && shape.threads > 128 && (!fits() || too_few())) {
    shape.threads = (shape.rows() + 1) / 2 * shape.per_row;
  }
  return fits() ? std::optional(shape) : std::nullopt;
}

// The grid of a kernel whose blocks stay; 0: the device has no room for a cluster.
template <typename Kernel>
int grid(Kernel* kernel, const RowsOnChip& shape, size_t bytes, const Layer& layer,
         const Device& device) {
  allow_shared_bytes(kernel, static_cast<int>(bytes));
  const int resident = static_cast<int>(bytes) > device.shared_bytes ? device.sms  // does not run
                       : shape.blocks == 1
                           ? resident_blocks(kernel, shape.threads, bytes)
                           : clusters_that_fit(kernel, shape.blocks, shape.threads, bytes);
  return shape.blocks * std::min(shape.groups(layer), resident);
}

// Such kernels' launches. Those that are `streamed` need Hopper, and so do all with clusters.
template <typename Function>
Launch forward_by(Function* kernel, const RowsOnChip& shape, size_t bytes, bool streamed,
                  const Tensors& of, const Device& device) {
  const int blocks = grid(kernel, shape, bytes, of.layer, device);
  if (blocks == 0) return {};
  const auto run = [=] {
    launch_clusters(kernel, shape.blocks, streamed, blocks, shape.threads, bytes,  //
                    of.x, of.y, of.w, of.out, of.layer, shape);
  };
  return {run, 0, bytes, streamed};
}
template <typename A, typename Function>
Launch backward_by(Function* kernel, const RowsOnChip& shape, size_t bytes, bool streamed,
                   const Tensors& of, const Gradients& d, const Device& device) {
  const int blocks = grid(kernel, shape, bytes, of.layer, device);
  if (blocks == 0) return {};
  const auto partials = of.workspace.any<float>(blocks / shape.blocks * shape.rows() * of.w.size());
  const auto run = [=] {
    launch_clusters(kernel, shape.blocks, false, blocks, shape.threads, bytes,  //
                    of.x, of.y, of.w, d.d_out, d.dx, d.dy, partials, of.layer, shape);
    add_up_weights<A>(d, partials, of.layer);
  };
  return {run, partials.bytes(), bytes, streamed};
}

// Whether all rows start at a multiple of `width` floats and have one block: then kVector holds.
template <typename A, int W>
bool whole_packs(const Layer& layer, int width) {
  return layer.features % width == 0 && rows_on_chip<A, W>(layer).blocks == 1;
}

template <typename A, int W = kForwardWidth<A>, bool kVector = (W > 1)>
Launch forward_on_chip_of(const Tensors& of, const Device& device) {
  if constexpr (A::kBlades == 16 && W == 1) {
    if (of.layer.features > kThreads<A>) return forward_on_chip_of<A, 2>(of, device);
  }
  if constexpr (kVector) {
    if (!whole_packs<A, W>(of.layer, W)) return forward_on_chip_of<A, W, false>(of, device);
  }
  using Memory = OnChipMemory<A, W, kVector, kFetchAhead<A, W> ? 2 * A::kBlades : 0>;
  const std::optional<RowsOnChip> shape = fit_on_chip<A, W, Memory>(of.layer, device);
  if (!shape) return {};
  return forward_by(forward_on_chip<A, W, kVector>, *shape, Memory::bytes(*shape), false, of,
                    device);
}
template <typename A, int W = kBackwardWidth<A>, bool kVector = (W > 1)>
Launch backward_on_chip_of(const Tensors& of, const Gradients& d, const Device& device) {
  if constexpr (kVector) {
    if (!whole_packs<A, W>(of.layer, W)) return backward_on_chip_of<A, W, false>(of, d, device);
  }
  using Memory = OnChipMemory<A, W, kVector, 3 * A::kBlades>;
  const auto shape = fit_on_chip<A, W, Memory>(of.layer, device);
  if (!shape) return {};
  return backward_by<A>(backward_on_chip<A, W, kVector>, *shape, Memory::bytes(*shape), false, of,
                        d, device);
}

// Whole packs only where every row starts at a multiple of 16 bytes, as the copy engine wants it.
template <typename A, int W = kStreamedWidth<A>, bool kVector = (W > 1)>
Launch forward_streamed_of(const Tensors& of, const Device& device) {
  if constexpr (kVector) {
    if (!whole_packs<A, W>(of.layer, 4)) return forward_streamed_of<A, W, false>(of, device);
  }
  const RowsOnChip shape = streamed_rows<A, W>(of.layer, device);
  if (shape.blocks > kMaxBlocks) return {};
  return forward_by(forward_streamed<A, W, kVector>, shape, Stream<A, W, kVector, 2>::bytes(shape),
                    true, of, device);
}
template <typename A, int W = kStreamedWidth<A>, bool kVector = (W > 1)>
Launch backward_streamed_of(const Tensors& of, const Gradients& d, const Device& device) {
  if constexpr (kVector) {
    if (!whole_packs<A, W>(of.layer, 4)) return backward_streamed_of<A, W, false>(of, d, device);
  }
  const RowsOnChip shape = streamed_rows<A, W>(of.layer, device);
  if (shape.blocks > kMaxBlocks) return {};
  return backward_by<A>(backward_streamed<A, W, kVector>, shape,
                        Stream<A, W, kVector, 3>::bytes(shape), true, of, d, device);
}

// ---- The tables ---------------------------------------------------------------------------------

// Returns whether rows fit on chip.
template <typename A>
bool add_forward(const Tensors& of, const Device& device) {
  Problem& problem = of.problem;
  const Unfused<A> unfused(of);
  problem.kernel("unfused", Role::baseline, [=] { unfused.forward(); })
      .occupies(of.bytes() + unfused.bytes());
  const auto fused_product_and_norm = [=, layer = of.layer, z = unfused.z] {
    fused_product<A><<<strip_blocks(layer), kStripFeatures>>>(of.x, of.y, of.w, z, layer);
    if (layer.normed) normalize<A><<<layer.batch, 256>>>(z, of.out, layer);
  };
  problem.kernel("fused product", Role::ours, fused_product_and_norm)
      .occupies(of.bytes() + (of.layer.normed ? unfused.z.bytes() : 0));
  const auto add = [&](const char* name, const Launch& launch) {
    Kernel& row = problem.kernel(name, Role::ours, launch.run).occupies(of.bytes());
    row.needs_shared(launch.shared_bytes);
    if (launch.hopper) row.hopper_only();
  };
  add("one launch", forward_once<A>(of));
  const Launch on_chip = forward_on_chip_of<A>(of, device);
  if (on_chip.run) add("row on chip", on_chip);
  const Launch streamed = forward_streamed_of<A>(of, device);
  if (streamed.run) add("rows streamed", streamed);
  return on_chip.run || streamed.run;
}

// Forward, then backward, two calls with other layers' work between them: x and y are read twice.
template <typename A>
bool add_backward(const Tensors& of, const Gradients& d, const Device& device) {
  Problem& problem = of.problem;
  const double ends = of.bytes() + d.bytes();
  const UnfusedBackward<A> unfused(of, d);
  problem.kernel("unfused", Role::baseline, [=] { unfused.forward_and_backward(); })
      .occupies(ends + unfused.bytes());
  const auto add = [&](const char* name, const Launch& forward, const Launch& backward) {
    const auto run = [=] {
      forward.run();
      backward.run();
    };
    Kernel& row = problem.kernel(name, Role::ours, run).occupies(ends + backward.bytes);
    row.needs_shared(std::max(forward.shared_bytes, backward.shared_bytes));
    if (forward.hopper || backward.hopper) row.hopper_only();
  };
  const Launch once = forward_once<A>(of);
  add("one launch each", once, backward_once<A>(of, d));
  const Launch on_chip = forward_on_chip_of<A>(of, device);
  const Launch streamed = forward_streamed_of<A>(of, device);
  const Launch backward = backward_on_chip_of<A>(of, d, device);
  const Launch backward_streamed = backward_streamed_of<A>(of, d, device);
  if (backward.run) add("both on chip", on_chip.run ? on_chip : once, backward);
  if (backward_streamed.run) add("both streamed", streamed, backward_streamed);
  return backward.run || backward_streamed.run;
}

template <int p, int q, int r>
int run_lesson(Lesson& lesson) {
  using A = Cl<p, q, r>;
  CliffordTables tables(lesson, p, q, r, A::kTriples);
  bool all_on_chip = true;
  for (const CliffordReference& size : tables.sizes()) {
    const Tensors of = tables.forward(size, forward_flops<A>());
    all_on_chip &= add_forward<A>(of, lesson.device());
    of.problem.compare("row on chip", "unfused", "Forward in one launch: % times faster.");
    if (lesson.flag("--turned")) continue;
    const auto [both, d] = tables.backward(size, forward_flops<A>() + backward_flops<A>());
    all_on_chip &= add_backward<A>(both, d, lesson.device());
    both.problem.compare("both on chip", "unfused", "Both in three launches: % times faster.");
  }
  if (!all_on_chip) lesson.note("Rows too long for 8 multiprocessors are left to 'one launch'.");
  tables.note_operations(A::kTriples, A::product_multiply_adds(), 2 * A::terms(),
                         A::gradient_multiply_adds());
  return lesson.run();
}

// Of `scons algebra=2,1,0`, which defines ALGEBRA as these three numbers: one more to choose.
#define TEXT_OF(...) #__VA_ARGS__
#define TEXT(macro) TEXT_OF(macro)

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "10_clifford_gp",
                 .title = "gated, weighted geometric product and its norm, forward and backward",
                 .n_meaning = "the batch",
                 .n_gpu = 8192,
                 .n_cpu = 8,
                 .options = {{.name = "--features",
                              .meaning = "multivectors per batch element",
                              .value = 1024,
                              .sweep = {.gpu = {128, 1024}, .cpu = {8, 64}}}},
                 .choices = {{"--algebra",
                              "signature: basis vectors that square to +1, -1, 0 (another one: "
                              "scons algebra=P,Q,R)",
                              {
#ifdef ALGEBRA
                                  TEXT(ALGEBRA),
#endif
                                  "3,0,0", "2,0,0", "3,0,1", "1,3,0", "4,1,0"}}},
                 .flags = {{"--no-norm", "without the norm"},
                           {"--turned", "expect turned results of turned inputs (forward)"}},
                 .sweep = {.gpu = {1024, 8192}, .cpu = {8, 64}}});
#ifdef ALGEBRA
  if (lesson.choice("--algebra") == TEXT(ALGEBRA)) return run_lesson<ALGEBRA>(lesson);
#endif
  if (lesson.choice("--algebra") == "2,0,0") return run_lesson<2, 0, 0>(lesson);
#ifndef FEW_ALGEBRAS  // which halves the time that it takes to compile, for tests
  if (lesson.choice("--algebra") == "3,0,1") return run_lesson<3, 0, 1>(lesson);
  if (lesson.choice("--algebra") == "1,3,0") return run_lesson<1, 3, 0>(lesson);
  if (lesson.choice("--algebra") == "4,1,0") return run_lesson<4, 1, 0>(lesson);
#endif
  return run_lesson<3, 0, 0>(lesson);
}
