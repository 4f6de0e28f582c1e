// Lesson 10's *unfused*: the layer as a framework runs it. An operator reads its inputs from memory
// and writes its result there. Here a whole grade triple is one kernel. PyTorch in eager mode,
// which runs operators one by one, would take several.
#pragma once

#include <utility>

#include "operators/clifford/clifford.cuh"
#include "operators/clifford/storage.cuh"
#include "operators/clifford/tensors.h"
#include "primitives/launch.h"

namespace operators::clifford {

using primitives::blocks_for;

// ---- Kernels ------------------------------------------------------------------------------------

// gated = in gate(in_0). A thread has a multivector.
template <typename A>
__global__ void apply_gate(const float* in, float* gated, Layer layer) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= layer.plane()) return;
  const Multivectors<A, 1> value = load<A>(in + at, layer.plane());
  const float factor = gate(value.blade[0].v[0]);
  unroll<0, A::kBlades>(
      [&](auto k) { gated[k * layer.plane() + at] = factor * value.blade[k].v[0]; });
}

// Multiplies the grades of triple t = (a, c, b). A thread has a multivector. Here x and y are x'
// and y'. The first triple whose result has grade c writes w <<x>_a <y>_b>_c to z_c, and the others
// add theirs to it.
template <typename A, int t>
__global__ void multiply_grades(const float* x, const float* y, const float* w, float* z,
                                Layer layer) {
  constexpr auto grades = A::triple(t);
  constexpr bool is_first = [] {
    for (int earlier = 0; earlier < t; ++earlier) {
      if (A::triple(earlier).result == A::triple(t).result) return false;
    }
    return true;
  }();
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t plane = layer.plane();
  if (at >= plane) return;
  const float weight = w[at % layer.features * A::kTriples + t];
  Multivectors<A, 1> left, right;  // only one grade of each
  load_grade<grades.x>(left, x + at, plane);
  load_grade<grades.y>(right, y + at, plane);
  unroll<A::first(grades.result), A::first(grades.result + 1)>([&](auto k) {
    const float sum = weight * sum_terms<A, Of::result, t, k>(left, right).v[0];
    z[k * plane + at] = is_first ? sum : z[k * plane + at] + sum;
  });
}

// out = z / rms(z) for the `blades` planes of one grade. A block has a row. Keeps the 1 / rms for
// backward.
__global__ void normalize_grade(const float* z, float* out, float* inverses, int blades,
                                Layer layer) {
  __shared__ FeatureSums<1> partials[kMaxWarps];
  const size_t row = static_cast<size_t>(blockIdx.x) * layer.features;
  FeatureSums<1> squares = {};
  for (int blade = 0; blade < blades; ++blade) {
    for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
      const float value = z[blade * layer.plane() + row + f];
      squares.value[0] += value * value;
    }
  }
  add_up_row(squares, partials, blockDim.x / 32);
  const float inverse = inverse_rms(squares.value[0], layer);
  if (threadIdx.x == 0) inverses[blockIdx.x] = inverse;
  for (int blade = 0; blade < blades; ++blade) {
    for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
      const size_t i = blade * layer.plane() + row + f;
      out[i] = z[i] * inverse;
    }
  }
}

// dz of one grade. A block has a row. out = r z with r = 1 / rms(z), and dr/dz = -r^3 z / features
// for each z of the row. So dz = r d_out - r^3 z (sum over the row of d_out z) / features.
__global__ void normalize_grade_gradient(const float* z, const float* d_out, const float* inverses,
                                         float* dz, int blades, Layer layer) {
  __shared__ FeatureSums<1> partials[kMaxWarps];
  const size_t row = static_cast<size_t>(blockIdx.x) * layer.features;
  FeatureSums<1> products = {};
  for (int blade = 0; blade < blades; ++blade) {
    for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
      const size_t i = blade * layer.plane() + row + f;
      products.value[0] += d_out[i] * z[i];
    }
  }
  add_up_row(products, partials, blockDim.x / 32);
  const float r = inverses[blockIdx.x];
  const float factor = r * r * r * products.value[0] * layer.inverse_features;
  for (int blade = 0; blade < blades; ++blade) {
    for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
      const size_t i = blade * layer.plane() + row + f;
      dz[i] = r * d_out[i] - factor * z[i];
    }
  }
}

// A strip is kStrip rows. A thread that keeps something of a feature has one strip of it.
constexpr int kStrip = 32, kStripFeatures = 128;

inline int strips(const Layer& layer) { return (layer.batch + kStrip - 1) / kStrip; }
inline int strip_blocks(const Layer& layer) {
  return strips(layer) * ((layer.features + kStripFeatures - 1) / kStripFeatures);
}

// Thread i of block b: feature i of chunk b % chunks, rows of strip b / chunks. A thread beyond the
// last feature has no rows.
struct StripThread {
  int feature, row, end, strip;
  __device__ explicit StripThread(const Layer& layer) {
    const int chunks = (layer.features + kStripFeatures - 1) / kStripFeatures;
    strip = blockIdx.x / chunks;
    feature = blockIdx.x % chunks * kStripFeatures + threadIdx.x;
    row = strip * kStrip;
    end = feature < layer.features ? min(layer.batch, row + kStrip) : row;
  }
};

// Adds the terms of triple t = (a, c, b) to grade a of dx and to grade b of dy, and computes dw of
// the strip. The first triple of a grade of dx or dy writes there, and the others add.
template <typename A, int t>
__global__ void multiply_grades_gradient(const float* x, const float* y, const float* w,
                                         const float* dz, float* dx, float* dy, float* partials,
                                         Layer layer) {
  constexpr auto grades = A::triple(t);
  constexpr bool is_first_of_x = t == 0 || A::triple(t == 0 ? 0 : t - 1).x != grades.x;
  constexpr bool is_first_of_y = [] {
    for (int earlier = 0; earlier < t; ++earlier) {
      if (A::triple(earlier).y == A::triple(t).y) return false;
    }
    return true;
  }();
  const StripThread thread(layer);
  const size_t plane = layer.plane();
  if (thread.feature >= layer.features) return;
  const float weight = w[static_cast<size_t>(thread.feature) * A::kTriples + t];
  float dw = 0;
  for (int row = thread.row; row < thread.end; ++row) {
    const size_t at = static_cast<size_t>(row) * layer.features + thread.feature;
    Multivectors<A, 1> left, right, d;  // only one grade of each
    load_grade<grades.x>(left, x + at, plane);
    load_grade<grades.y>(right, y + at, plane);
    load_grade<grades.result>(d, dz + at, plane);
    unroll<A::first(grades.x), A::first(grades.x + 1)>([&](auto i) {
      const float sum = sum_terms<A, Of::x, t, i>(d, right).v[0];
      dw += left.blade[i].v[0] * sum;
      dx[i * plane + at] = (is_first_of_x ? 0 : dx[i * plane + at]) + weight * sum;
    });
    unroll<A::first(grades.y), A::first(grades.y + 1)>([&](auto j) {
      const float sum = sum_terms<A, Of::y, t, j>(d, left).v[0];
      dy[j * plane + at] = (is_first_of_y ? 0 : dy[j * plane + at]) + weight * sum;
    });
  }
  partials[(static_cast<size_t>(thread.strip) * A::kTriples + t) * layer.features +
           thread.feature] = dw;
}

// Turns `gradient`, that of out = in gate(in_0), into that of `in`, in place. A thread has a
// multivector. The scalar in_0 stands in the gate of every blade, too. So by the chain rule its
// gradient has a second part: gate'(in_0) times the gradient of the gate, d_factor, which is the
// sum over all blades of d_k in_k.
template <typename A>
__global__ void apply_gate_gradient(const float* in, float* gradient, Layer layer) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= layer.plane()) return;
  const Multivectors<A, 1> value = load<A>(in + at, layer.plane());
  const Multivectors<A, 1> d = load<A>(gradient + at, layer.plane());
  const float factor = gate(value.blade[0].v[0]);
  float d_factor = 0;
  unroll<0, A::kBlades>([&](auto k) {
    d_factor += d.blade[k].v[0] * value.blade[k].v[0];
    if (k > 0) gradient[k * layer.plane() + at] = factor * d.blade[k].v[0];
  });
  gradient[at] = factor * d.blade[0].v[0] + d_factor * gate_slope(value.blade[0].v[0]);
}

// ---- Launches -----------------------------------------------------------------------------------

// x', y', z and 1 / rms, which backward needs again. Without a norm z is the tensor `out`.
template <typename A>
struct Unfused {
  explicit Unfused(const CliffordTensors& of)
      : of(of),
        x(of.workspace.any<float>(of.x.size())),
        y(of.workspace.any<float>(of.y.size())),
        z(of.layer.normed ? of.workspace.any<float>(of.out.size()) : of.out),
        inverses(of.workspace.any<float>(static_cast<size_t>(of.layer.batch) *
                                         (of.layer.normed ? A::kGrades : 1))) {}

  double bytes() const {
    return x.bytes() + y.bytes() + (of.layer.normed ? z.bytes() + inverses.bytes() : 0);
  }
  int blocks() const { return blocks_for(of.layer.plane(), 256); }

  template <int... t>
  void multiply(std::integer_sequence<int, t...>) const {
    ((multiply_grades<A, t><<<blocks(), 256>>>(x, y, of.w, z, of.layer)), ...);
  }

  void forward() const {
    const Layer& layer = of.layer;
    apply_gate<A><<<blocks(), 256>>>(of.x, x, layer);
    apply_gate<A><<<blocks(), 256>>>(of.y, y, layer);
    multiply(std::make_integer_sequence<int, A::kTriples>());
    for (int c = 0; layer.normed && c < A::kGrades; ++c) {
      const size_t start = A::kTables.first[c] * layer.plane();
      normalize_grade<<<layer.batch, 256>>>(z + start, of.out + start,
                                            inverses + static_cast<size_t>(c) * layer.batch,
                                            A::kTables.first[c + 1] - A::kTables.first[c], layer);
    }
  }

  CliffordTensors of;
  Memory<float> x, y, z, inverses;
};

// What backward needs besides: dz, and dw of each strip. dx' is written where dx will be.
template <typename A>
struct UnfusedBackward {
  UnfusedBackward(const CliffordTensors& of, const CliffordGradients& d)
      : forward(of),
        d(d),
        dz(of.layer.normed ? of.workspace.any<float>(of.out.size()) : d.d_out),
        partials(of.workspace.any<float>(strips(of.layer) * of.w.size())) {}

  double bytes() const {
    return forward.bytes() + partials.bytes() + (forward.of.layer.normed ? dz.bytes() : 0);
  }

  template <int... t>
  void multiply(std::integer_sequence<int, t...>) const {
    ((multiply_grades_gradient<A, t><<<strip_blocks(forward.of.layer), kStripFeatures>>>(
         forward.x, forward.y, forward.of.w, dz, d.dx, d.dy, partials, forward.of.layer)),
     ...);
  }

  void forward_and_backward() const {
    forward.forward();
    const Layer& layer = forward.of.layer;
    for (int c = 0; layer.normed && c < A::kGrades; ++c) {
      const size_t start = A::kTables.first[c] * layer.plane();
      normalize_grade_gradient<<<layer.batch, 256>>>(
          forward.z + start, d.d_out + start,
          forward.inverses + static_cast<size_t>(c) * layer.batch, dz + start,
          A::kTables.first[c + 1] - A::kTables.first[c], layer);
    }
    multiply(std::make_integer_sequence<int, A::kTriples>());
    apply_gate_gradient<A><<<forward.blocks(), 256>>>(forward.of.x, d.dx, layer);
    apply_gate_gradient<A><<<forward.blocks(), 256>>>(forward.of.y, d.dy, layer);
    add_up_weights<A>(d, partials, layer);
  }

  Unfused<A> forward;
  CliffordGradients d;
  Memory<float> dz, partials;
};

}  // namespace operators::clifford
