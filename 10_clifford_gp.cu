// 10. Clifford algebra: the compiler writes the kernel
//
//     x' = x gate(x_1), y' = y gate(y_1)                gate(s) = (1 + erf(s / sqrt 2)) / 2
//     z  = sum over grades a, c, b of  w[a,c,b] <<x'>_a <y'>_b>_c    <v>_a: v's part of grade a
//     out = per grade c: z_c / sqrt(mean over features of |z_c|^2 + 1e-6)
//
//     x, y, out (2^n blades, batch, features) and w (features, triples): fp32, row-major
//
// The layer of a Clifford neural network. A number is a multivector: in three dimensions a scalar,
// a vector (e1, e2, e3), a bivector (e12, e13, e23) and a trivector (e123). These are 8
// coefficients, each of a blade: 1, e1, e2 and so on to e123. A blade's grade is how many basis
// vectors it is made of: e12 has grade 2, and 1 has grade 0. x_1 is the coefficient of 1 in x, its
// scalar. (Below, and in the code, a blade of x also means its coefficient in x.) Multivectors
// multiply like polynomials in e1, e2, ... which anticommute, e2 e1 = -e1 e2, and square to +1, -1
// or 0: that is the algebra's signature. Grade a of x and grade b of y add to grade c of z. Each
// triple a, c, b that occurs has a weight for each feature, shared by the batch. In 2-D 10 triples
// occur, in 3-D 20. |z_c|^2 is the plain sum of squares. Backward returns dx, dy and dw from d_out.
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
// A result is made of the places where the table has it. For e1 of z these are four of the 16.
// (Here x and y stand for x' and y'.)
//
//     z_e1 = w[0,1,1] x_1 y_e1 + w[1,1,0] x_e1 y_1 + w[2,1,1] x_e12 y_e2 - w[1,1,2] x_e2 y_e12
//
// A weight belongs to three grades, of x, of the result and of y. Three dimensions have 64 places.
//
// What moves: each blade is a plane of batch x features. x and y are read and out is written. In
// 3-D these are 3 x 8 numbers, 96 bytes, for each pair of multivectors. What is computed: 92
// multiplications and multiply-adds, and two gates. The machine could do several times that while
// the bytes arrive: memory is the limit, if every byte moves once. If each operator is a kernel of
// its own, bytes move many times: that is the first row of the table.
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
// A row may start at any address (Place says how), and any number of warps may have parts of it. A
// cluster of 8 blocks holds 8192 features of 8 blades, 4096 of 16, 2048 of 32. "row on chip" has
// one block for a row, and holds fewer.
//
// What makes a kernel of 92 such instructions fast is that nobody looks anything up: which blade
// times which gives which, with which sign and which weight, is known when the program is compiled.
// Most write these lines by hand, or generate them with a symbolic package. Here the compiler does,
// from the signature: Cl<3, 0, 0> is all that a user writes; Cl<1, 3, 0> (spacetime), Cl<3, 0, 1>
// (projective) and Cl<4, 1, 0> (conformal) cost nothing more.
//
// The words of the kernels below, and where they stand in operators/clifford/. Read algebra.cuh
// first, weighted_product() and gradients() in it.
//
//     algebra.cuh    A is an algebra, such as Cl<3, 0, 0>. A Pack<W> is one coefficient of W
//                    features, and Multivectors<A, W> are W multivectors, in registers: blade[0] of
//                    them is the scalar. unroll() is a loop whose index is a constant
//     clifford.cuh   Gates, FeatureSums and GradientSums (what a row adds up), add_up_row, and
//                    Weights, those of one feature, in registers. A block has at most kMaxWarps
//                    warps
//     tensors.h      Layer has the sizes. layer.plane() is batch x features: so many elements
//                    further on is the next blade of the same multivector
//     unfused.cuh    a StripThread says which feature and which strip of 32 rows a thread has; a
//                    block has kStripFeatures features
//     rows.cuh       which features of which row a thread has (RowsOnChip, Place), and the shared
//                    memory of "row on chip" (OnChipMemory)

#include <algorithm>
#include <optional>

#include "checks/clifford/clifford.h"
#include "operators/clifford/algebra.cuh"
#include "operators/clifford/clifford.cuh"
#include "operators/clifford/layer.cuh"
#include "operators/clifford/unfused.cuh"
#include "primitives/async_copy.cuh"
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
// cache, as far as it still has them. The kernel can do this for rows of any length. But each
// product of multivectors is computed twice. And the weights are read again for every row, through
// the L1 cache.
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

// The same for backward. A row has two sums for each grade: that of z^2, as forward, and that of
// d_out z. The first walk adds up both, the second makes dx, dy and dw. Both walks compute P first,
// the product before it is multiplied by the gates. Each block adds up its part of dw in memory of
// its own, (triples, features).
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
        // z = g P, and g is the product of both gates. This makes the gradients of both from d_out:
        // it returns that of P, and writes that of g to dg.
        Pack<1> dg;
        const Multivectors<A, 1> dP = gradient_of_product(P, gates.product(), d, sums, layer, dg);
        // gradients() computes, and does not know where results lie. For that it calls these four
        // functions. The first of its two calls below makes dx and some triples' part of dw, the
        // second makes dy and the other triples'. For each triple t one of the two asks take_w(t)
        // for the sum so far, adds this feature's terms, and hands the new sum to give_w(t). In the
        // block's first row, n == blockIdx.x, nothing has been written yet: the sum so far is 0.
        const auto take_w = [&](auto t) {
          const float sum = dw[static_cast<size_t>(t) * layer.features + f];
          return Pack<1>{{n == static_cast<int>(blockIdx.x) ? 0 : sum}};
        };
        const auto give_w = [&](auto t, const Pack<1>& sum) {
          dw[static_cast<size_t>(t) * layer.features + f] = sum.v[0];
        };
        // give_x(i, value) is called once for each blade i of dx, give_y once for each of dy. The
        // gate of x is computed from the scalar of x, so blade 0 of dx has a second part: dg times
        // gate'(x_1) gate(y_1), which is through_gate(). It is the same with the scalar of y.
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

// A thread has W features of a row, as many as its registers hold. (The weights are w.) Forward it
// needs x, y and z of these features at the same time, which are 3 W multivectors. Backward it
// needs about as much, and dw for all triples. (There is one exception: forward, rows of more than
// 512 features of 16 blades have W = 2. See kFetchAhead.)
template <typename A>
constexpr int kForwardWidth = A::kBlades <= 8 ? 4 : 1;
template <typename A>
constexpr int kBackwardWidth = A::kBlades <= 8 ? 16 / A::kBlades : 1;

// This says whether the next row is fetched meanwhile. A thread with two features of 16 blades, as
// rows of more than 512 features have them, has no room for it beside the weights of both.
template <typename A, int W>
constexpr bool kFetchAhead = A::kBlades <= 8 || W == 1;

// Three things are better than above. z stays in registers while its row's squares are added up, so
// that nothing is read or computed twice. The weights are transposed into shared memory once, and
// serve all rows that the block ever has. And as soon as a thread has taken its part of x and y
// into registers it orders the next row's into the same place (cp.async): memory works while the
// block multiplies, reduces and waits at the barrier. (The third one gained time in the backward
// kernel below, and none in this one.)
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
      __syncwarp();  // for the compiler: the loads below stay behind the wait
      left = memory.template take<0>();
      right = memory.template take<A::kBlades>();
      __syncwarp();  // for the compiler: the loads above stay before the next copy
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

// Backward, with the same three improvements as forward_on_chip. One reduction serves both sums of
// each grade, of z^2 and of d_out z. A thread's features are the same for all of its rows, so that
// dw can stay in registers until the end. So registers are scarce. A row's x, y and d_out are
// needed twice: for its sums, and, when these have been added up, for its gradients.
//
//     x and d_out   are taken from shared memory once, and stay in registers until the row is
//                   finished. So their places are free early: the next row's x and d_out are
//                   ordered before this row's sums are added up, and memory has work meanwhile
//     y             has no registers to stay in. It is taken from shared memory twice, once for the
//                   sums and once for the gradients. After that the next row's y is ordered
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
    Pack<W> dg;  // the gradient of the product of both gates, as above
    const Multivectors<A, W> dP = gradient_of_product(P, gates.product(), d, sums, layer, dg);
    right = memory.template take<A::kBlades>();
    __syncwarp();
    if (first + step < layer.batch) fetch_y(n + step);
    // This calls gradients() as backward_one_launch does, but dw is in registers.
    store_gradients(left, right, dP, dg, gates, memory, dw, dx + at(n), dy + at(n), plane, place,
                    inside(n));
  }
  store_weight_gradients<A>(dw, dw_partials, place, shape, layer);
}

// ---- Hopper: rows streamed ----------------------------------------------------------------------

// The same idea once more, but no thread fetches its own x and y. One copy of the copy engine
// brings a whole plane of a block's rows, and several stages are on their way instead of one. What
// the other kernels spent on that, registers and instructions, is free for the weights: a thread
// has the same features in all of its rows, and keeps their weights in registers. Warps that share
// a row do not stop for its sums: each posts its own and goes on with the next row. And a row that
// is too long for a block has a cluster of them.
//
// The lesson has no kernel of this kind. The table's rows *rows streamed* and *both streamed* call
// those of the operator, which a program would call, too: forward_streamed and backward_streamed in
// operators/clifford/streamed.cuh. How they are made stands in docs/lessons/10_clifford_gp.md, from
// "With Hopper's words" on.

// ---- Launches -----------------------------------------------------------------------------------

using Tensors = CliffordTable;
using Gradients = CliffordGradients;

// What a row of the table launches, the memory that this takes beside inputs and outputs, how much
// shared memory a block asks for, and whether it needs Hopper. If `run` is empty, the kernel cannot
// compute this shape.
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

// How many rows and threads a block has, in a kernel that keeps its weights in shared memory.
// Returns nothing if a row or its weights do not fit in a block. Small batches get small blocks, so
// that every multiprocessor has one.
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

// The grid of a kernel whose blocks stay. (Those who call it have asked fit_on_chip() before, so
// that `bytes` are never more than a block can have.)
template <typename Kernel>
int grid(Kernel* kernel, const RowsOnChip& shape, size_t bytes, const Layer& layer,
         const Device& device) {
  allow_shared_bytes(kernel, static_cast<int>(bytes));
  const int resident = static_cast<int>(bytes) > device.shared_bytes
                           ? device.sms  // never so: see above
                           : resident_blocks(kernel, shape.threads, bytes);
  return std::min(shape.groups(layer), resident);
}

// The launches of kernels whose blocks stay.
template <typename Function>
Launch forward_by(Function* kernel, const RowsOnChip& shape, size_t bytes, const Tensors& of,
                  const Device& device) {
  const int blocks = grid(kernel, shape, bytes, of.layer, device);
  const auto run = [=] {
    kernel<<<blocks, shape.threads, bytes>>>(of.x, of.y, of.w, of.out, of.layer, shape);
  };
  return {run, 0, bytes};
}
template <typename A, typename Function>
Launch backward_by(Function* kernel, const RowsOnChip& shape, size_t bytes, const Tensors& of,
                   const Gradients& d, const Device& device) {
  const int blocks = grid(kernel, shape, bytes, of.layer, device);
  const auto partials = of.workspace.any<float>(blocks * shape.rows() * of.w.size());
  const auto run = [=] {
    kernel<<<blocks, shape.threads, bytes>>>(of.x, of.y, of.w, d.d_out, d.dx, d.dy, partials,
                                             of.layer, shape);
    add_up_weights<A>(d, partials, of.layer);
  };
  return {run, partials.bytes(), bytes};
}

// The launch of the operator's kernel.
Launch launch_of(const Streamed& streamed) {
  if (streamed.ways.empty()) return {};
  const operators::Way& way = streamed.ways.front();
  return {way.launch, streamed.workspace_bytes, static_cast<size_t>(way.shared_bytes), true};
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
  return forward_by(forward_on_chip<A, W, kVector>, *shape, Memory::bytes(*shape), of, device);
}
template <typename A, int W = kBackwardWidth<A>, bool kVector = (W > 1)>
Launch backward_on_chip_of(const Tensors& of, const Gradients& d, const Device& device) {
  if constexpr (kVector) {
    if (!whole_packs<A, W>(of.layer, W)) return backward_on_chip_of<A, W, false>(of, d, device);
  }
  using Memory = OnChipMemory<A, W, kVector, 3 * A::kBlades>;
  const auto shape = fit_on_chip<A, W, Memory>(of.layer, device);
  if (!shape) return {};
  return backward_by<A>(backward_on_chip<A, W, kVector>, *shape, Memory::bytes(*shape), of, d,
                        device);
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
  const Launch streamed = launch_of(streamed_forward<A>(of));
  if (streamed.run) add("rows streamed", streamed);
  return on_chip.run || streamed.run;
}

// In a network other layers work between the forward and the backward pass. So these are two calls,
// each of which reads x and y. (If backward_on_chip has room for a shape and forward_on_chip has
// none, the forward kernel of "both on chip" is that of "one launch".)
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
  const Launch streamed = launch_of(streamed_forward<A>(of));
  const Launch backward = backward_on_chip_of<A>(of, d, device);
  const Launch backward_streamed = launch_of(streamed_backward<A>(of, d));
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
    of.problem.compare("row on chip", "unfused", "Forward in one launch: % times as fast.");
    if (lesson.flag("--turned")) continue;
    const auto [both, d] = tables.backward(size, forward_flops<A>() + backward_flops<A>());
    all_on_chip &= add_backward<A>(both, d, lesson.device());
    both.problem.compare("both on chip", "unfused", "Both in three launches: % times as fast.");
  }
  if (!all_on_chip) lesson.note("Rows too long for 8 multiprocessors are left to 'one launch'.");
  tables.note_operations(A::kTriples, A::product_multiply_adds(), 2 * A::terms(),
                         A::gradient_multiply_adds());
  return lesson.run();
}

// `scons algebra=2,1,0` defines ALGEBRA as these three numbers. Then --algebra has one more choice.
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
                              "scons algebra=P,Q,R, or all)",
                              {
#ifdef ALGEBRA
                                  TEXT(ALGEBRA),
#endif
                                  "3,0,0", "2,0,0",
#ifndef FEW_ALGEBRAS
                                  "3,0,1", "1,3,0", "4,1,0",
#endif
                              }}},
                 .flags = {{"--no-norm", "without the norm"},
                           {"--turned", "expect turned results of turned inputs (forward)"}},
                 .sweep = {.gpu = {1024, 8192}, .cpu = {8, 64}}});
#ifdef ALGEBRA
  if (lesson.choice("--algebra") == TEXT(ALGEBRA)) return run_lesson<ALGEBRA>(lesson);
#endif
  if (lesson.choice("--algebra") == "2,0,0") return run_lesson<2, 0, 0>(lesson);
#ifndef FEW_ALGEBRAS  // scons algebra=all: these three take four fifths of the time to compile
  if (lesson.choice("--algebra") == "3,0,1") return run_lesson<3, 0, 1>(lesson);
  if (lesson.choice("--algebra") == "1,3,0") return run_lesson<1, 3, 0>(lesson);
  if (lesson.choice("--algebra") == "4,1,0") return run_lesson<4, 1, 0>(lesson);
#endif
  return run_lesson<3, 0, 0>(lesson);
}
