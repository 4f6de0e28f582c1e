// What the kernels of lesson 10's layer compute in registers beside the product (algebra.cuh): the
// gates, the sums of the norm and how a row's threads add them up, and the gradients of both. W is
// how many features of a row a thread works on at a time. x_0 is the coefficient of blade 0, the
// scalar, which the lesson calls x_1.
#pragma once

#include <cuda_runtime.h>

#include <bit>

#include "operators/clifford/algebra.cuh"
#include "operators/clifford/tensors.h"

namespace operators::clifford {

// ---- Gates and norms ----------------------------------------------------------------------------

constexpr float kEpsilon = 1e-6f;

__device__ inline float gate(float s) { return 0.5f + 0.5f * erff(s * 0.70710678f); }
// The derivative of the gate, the density of the normal distribution. The error of __expf(x) is at
// most 2 + 1.2 |x| units in the last place (CUDA Programming Guide, "Intrinsic Functions"), which
// is little where the density is not almost 0.
__device__ inline float gate_slope(float s) { return 0.39894228f * __expf(-0.5f * s * s); }

// Both gates are factors of the whole product: z = gate(x_0) gate(y_0) (x y). A layer that is not
// gated has the gate 1, that of a large number. (To choose between the gate and 1 took the backward
// kernels registers that they do not have.)
constexpr float kOpen = 1e30f;

template <int W>
struct Gates {
  Pack<W> x, y;

  __device__ __forceinline__ Gates(const Pack<W>& x_0, const Pack<W>& y_0, bool gated = true) {
#pragma unroll
    for (int e = 0; e < W; ++e) {
      x.v[e] = gate(gated ? x_0.v[e] : kOpen);
      y.v[e] = gate(gated ? y_0.v[e] : kOpen);
    }
  }
  __device__ __forceinline__ Pack<W> product() const {
    Pack<W> result;
#pragma unroll
    for (int e = 0; e < W; ++e) result.v[e] = x.v[e] * y.v[e];
    return result;
  }
};

// 1 / rms, from a sum of squares. The rms is the root of the mean square, to which kEpsilon is
// added. rsqrtf is within two units in the last place (CUDA Programming Guide, "Standard
// Functions").
__device__ inline float inverse_rms(float squares, const Layer& layer) {
  return rsqrtf(squares * layer.inverse_features + kEpsilon);
}

// kCount sums over a row's features, filled up to whole vectors of 16 bytes.
template <int kCount>
struct alignas(16) FeatureSums {
  float value[(kCount + 3) / 4 * 4];
};

template <int kCount>
__device__ __forceinline__ void add_up_lanes(FeatureSums<kCount>& sums, int lanes) {
  for (int other = lanes / 2; other > 0; other /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sums.value[i] += __shfl_xor_sync(0xffffffffu, sums.value[i], other);
    }
  }
}

constexpr int kMaxWarps = 16;  // of a block

// Adds up the sums of a row, always in the same order. All threads of the row get the result. A
// block has one row, or several of `warps` warps each: a power of two, or with kAnyNumber any
// number. Calls take turns with two arrays of partial sums. So one barrier in a call is enough: a
// thread that writes the first array again has passed the barrier of the call with the second one,
// where all arrived after they had read the first.
template <bool kAnyNumber = false, int kCount>
__device__ __forceinline__ void add_up_row(FeatureSums<kCount>& sums, FeatureSums<kCount>* partials,
                                           int warps) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  add_up_lanes(sums, 32);
  if (lane == 0) partials[warp] = sums;
  __syncthreads();
  const int lanes = kAnyNumber ? 1 << (32 - __clz(warps - 1)) : warps, of = lane % lanes;
  sums = partials[warp / warps * warps + (kAnyNumber ? min(of, warps - 1) : of)];
  if (kAnyNumber && of >= warps) sums = {};
  add_up_lanes(sums, lanes);
}

// The same with fewer shuffles, by a reduce-scatter and an all-gather: lesson 10's RowReduction.
// With 8 sums of_warp() takes 9 shuffles, where butterflies take 40. After it lane l has sum l %
// kPlaces of its warp.
template <int kCount>
struct Halves {
  static constexpr int kSteps = std::bit_width(kCount - 1u), kPlaces = 1 << kSteps;

  __device__ static float add_up_places(float sum) {
#pragma unroll
    for (int other = kPlaces; other < 32; other *= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, other);
    }
    return sum;
  }
  __device__ __forceinline__ static float of_warp(const FeatureSums<kCount>& sums) {
    const int lane = threadIdx.x % 32;
    float held[kPlaces];
    unroll<0, kPlaces>([&](auto i) { held[i] = i < kCount ? sums.value[i] : 0; });
    unroll<0, kSteps>([&](auto step) {
      constexpr int half = kPlaces >> (step + 1);
      const bool upper = (lane & half) != 0;
      unroll<0, half>([&](auto i) {
        const float given = upper ? held[i] : held[i + half];
        held[i] = (upper ? held[i + half] : held[i]) + __shfl_xor_sync(0xffffffffu, given, half);
      });
    });
    return add_up_places(held[0]);
  }
  // Adds up sum number lane % kPlaces over every (32 / kPlaces)-th of the row's warps, of which
  // there are kMost at most. The first of these warps is number lane / kPlaces.
  template <int kMost>
  __device__ __forceinline__ static float of_lane(const FeatureSums<kCount>* partials, int warps) {
    const int place = threadIdx.x % kPlaces, first = threadIdx.x % 32 / kPlaces;
    float sum = 0;
#pragma unroll
    for (int of = 0; of < kMost; of += 32 / kPlaces) {
      if (first + of < warps && place < kCount) sum += partials[first + of].value[place];
    }
    return sum;
  }
  // Adds up what the lanes return from of_lane(). All lanes get all sums (an all-gather).
  __device__ __forceinline__ static FeatureSums<kCount> from_lanes(float own) {
    const float sum = add_up_places(own);
    FeatureSums<kCount> sums = {};
    unroll<0, kCount>([&](auto i) { sums.value[i] = __shfl_sync(0xffffffffu, sum, i); });
    return sums;
  }
};

// sums[c] += the squares of z of grade c.
template <typename A, int W>
__device__ __forceinline__ void add_squares(const Multivectors<A, W>& z,
                                            FeatureSums<A::kGrades>& sums) {
  unroll<0, A::kBlades>([&](auto k) {
#pragma unroll
    for (int e = 0; e < W; ++e) sums.value[A::grade(k)] += z.blade[k].v[e] * z.blade[k].v[e];
  });
}

// Divides each grade by its rms, from these sums over the row.
template <typename A, int W>
__device__ __forceinline__ void divide_by_rms(Multivectors<A, W>& z,
                                              const FeatureSums<A::kGrades>& sums,
                                              const Layer& layer) {
  unroll<0, A::kGrades>([&](auto c) {
    const float r = inverse_rms(sums.value[c], layer);
    unroll<A::first(c), A::first(c + 1)>([&](auto k) {
#pragma unroll
      for (int e = 0; e < W; ++e) z.blade[k].v[e] *= r;
    });
  });
}

// ---- One multivector in memory ------------------------------------------------------------------

template <typename A>
__device__ __forceinline__ Multivectors<A, 1> load(const float* from, size_t plane) {
  Multivectors<A, 1> result;
  unroll<0, A::kBlades>([&](auto k) { result.blade[k].v[0] = from[k * plane]; });
  return result;
}

template <int grade, typename A>
__device__ __forceinline__ void load_grade(Multivectors<A, 1>& to, const float* from,
                                           size_t plane) {
  unroll<A::first(grade), A::first(grade + 1)>([&](auto k) { to.blade[k].v[0] = from[k * plane]; });
}

// The weights of a feature, in registers. They are consecutive in memory, and come up to 16 bytes
// at a time.
template <typename A>
struct Weights {
  static constexpr int kWidth = A::kTriples % 4 == 0 ? 4 : A::kTriples % 2 == 0 ? 2 : 1;
  Pack<kWidth> packs[A::kTriples / kWidth];

  __device__ __forceinline__ explicit Weights(const float* from) {
#pragma unroll
    for (int i = 0; i < A::kTriples / kWidth; ++i) {
      packs[i] = reinterpret_cast<const Pack<kWidth>*>(from)[i];
    }
  }
  template <typename Index>
  __device__ __forceinline__ Pack<1> operator()(Index) const {
    return {{packs[Index::value / kWidth].v[Index::value % kWidth]}};
  }
};

template <typename A, int W>
__device__ __forceinline__ void multiply_by(Multivectors<A, W>& z, const Pack<W>& factor) {
  unroll<0, A::kBlades>([&](auto k) {
#pragma unroll
    for (int e = 0; e < W; ++e) z.blade[k].v[e] *= factor.v[e];
  });
}

// z before the norm.
template <typename A, int W, typename Weight>
__device__ __forceinline__ Multivectors<A, W> gated_product(const Multivectors<A, W>& x,
                                                            const Multivectors<A, W>& y,
                                                            const Weight& weight, bool gated) {
  Multivectors<A, W> z = weighted_product(x, y, weight);
  multiply_by(z, Gates<W>(x.blade[0], y.blade[0], gated).product());
  return z;
}

// The sums of a row that dz needs, two for each grade: that of z^2, as forward, and that of d_out
// z.
template <typename A>
using GradientSums = FeatureSums<2 * A::kGrades>;

// P is the product before the gates multiply it: z = g P, where g is gate(x_0) gate(y_0).
template <typename A, int W>
__device__ __forceinline__ void add_gradient_sums(const Multivectors<A, W>& P, const Pack<W>& g,
                                                  const Multivectors<A, W>& d_out,
                                                  GradientSums<A>& sums) {
  unroll<0, A::kBlades>([&](auto k) {
    constexpr int c = A::grade(k);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const float z = g.v[e] * P.blade[k].v[e];
      sums.value[c] += z * z;
      sums.value[A::kGrades + c] += d_out.blade[k].v[e] * z;
    }
  });
}

// Computes from d_out the gradients of P, which it returns, and of g. dz is made as in
// normalize_grade_gradient (unfused.cuh). dP_k = g dz_k, and dg is the sum over all blades of P_k
// dz_k.
template <typename A, int W>
__device__ __forceinline__ Multivectors<A, W> gradient_of_product(const Multivectors<A, W>& P,
                                                                  const Pack<W>& g,
                                                                  const Multivectors<A, W>& d_out,
                                                                  const GradientSums<A>& sums,
                                                                  const Layer& layer, Pack<W>& dg) {
  Multivectors<A, W> dP;
  dg = empty_sum<W>();
  unroll<0, A::kGrades>([&](auto c) {
    float r = 1, factor = 0;
    if (layer.normed) {
      r = inverse_rms(sums.value[c], layer);
      factor = r * r * r * sums.value[A::kGrades + c] * layer.inverse_features;
    }
    unroll<A::first(c), A::first(c + 1)>([&](auto k) {
#pragma unroll
      for (int e = 0; e < W; ++e) {
        const float dz = r * d_out.blade[k].v[e] - factor * g.v[e] * P.blade[k].v[e];
        dg.v[e] += P.blade[k].v[e] * dz;
        dP.blade[k].v[e] = g.v[e] * dz;
      }
    });
  });
  return dP;
}

// The second part of dx_0, which comes through g. By the chain rule it is dg gate'(x_0) gate(y_0).
// That of dy_0 comes from y_0 and gate(x_0). Without a gate the layer's density is 0, and so are
// both: as a factor that an instruction reads where the kernel's arguments are, this needs no
// register.
template <int W>
__device__ __forceinline__ Pack<W> through_gate(const Pack<W>& dg, const Pack<W>& x_0,
                                                const Pack<W>& other_gate, const Layer& layer) {
  Pack<W> result;
#pragma unroll
  for (int e = 0; e < W; ++e) {
    const float slope = layer.density * __expf(-0.5f * x_0.v[e] * x_0.v[e]);
    result.v[e] = dg.v[e] * slope * other_gate.v[e];
  }
  return result;
}

// ---- Floating-point operations ------------------------------------------------------------------

// Operations for a multivector: those of the product; 4 for each gate, and 1 for g, which make 9; 4
// for each blade of z: the factor g, the square, the sum of squares and the factor 1 / rms.
template <typename A>
double forward_flops() {
  return 2 * A::product_multiply_adds() + 9 + 4 * A::kBlades;
}
// The product and its gates again; for each blade 1 for z, 4 for both sums of the norm, 3 for dz, 2
// for dg and 1 for dP; the gradients of the product; and 7 for each scalar's part through its gate.
template <typename A>
double backward_flops() {
  return 2 * A::product_multiply_adds() + 9 + 11 * A::kBlades + 2 * A::gradient_multiply_adds() +
         14;
}

}  // namespace operators::clifford
