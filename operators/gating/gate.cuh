// The gates of the layer out = gate(x W1 + b1) * (x W2 + b2), and their slopes.
//
// The kernels are compiled for the sigmoid alone, and make all other gates of it: what takes
// sigmoid(gate) * value may get another gate and another value. With SiLU, gate * sigmoid(gate), it
// is the value that is multiplied by the gate first. So a kernel that knows its gate only when it
// runs has one branch for each of a thread's tiles of results, and behind that its code for the
// sigmoid as ever.
#pragma once

#include <cmath>
#include <cstdint>

#include "primitives/approximate.cuh"

namespace operators::gating {

/// As fk_gate of the library counts them.
enum class Gate : int {
  sigmoid,
  silu,       ///< s sigmoid(s)
  gelu,       ///< s Phi(s), with Phi of the normal distribution
  gelu_tanh,  ///< s (1 + tanh(sqrt(2 / pi) (s + 0.044715 s^3))) / 2
  relu,       ///< max(s, 0)
  none        ///< s
};

inline constexpr float kTwiceSqrt2OverPi = 1.59576912f, kCubic = 0.044715f, kLog2E = 1.44269504f;

/// Calls f<gate>(). The gate is the same for all threads, so that the whole warp goes one way.
template <typename F>
__device__ __forceinline__ void with_gate(Gate gate, const F& f) {
  switch (gate) {
    case Gate::sigmoid:
      return f.template operator()<Gate::sigmoid>();
    case Gate::silu:
      return f.template operator()<Gate::silu>();
    case Gate::gelu:
      return f.template operator()<Gate::gelu>();
    case Gate::gelu_tanh:
      return f.template operator()<Gate::gelu_tanh>();
    case Gate::relu:
      return f.template operator()<Gate::relu>();
    case Gate::none:
      return f.template operator()<Gate::none>();
  }
}

/// t with sigmoid(t) = Phi(s), but for an error of 2^-17 of s Phi(s) and 2^-28: s times a
/// polynomial in s^2, fitted for |s| up to 6. Beyond that t grows with s alone.
__device__ inline float sigmoid_for_normal(float s) {
  constexpr float kTerms[] = {-6.1730239e-11f,  7.0175008e-09f,   -3.33925215e-07f, 8.49025946e-06f,
                              -0.000111847199f, -7.06786159e-05f, 0.0726908818f,    1.59575009f};
  const float square = fminf(s * s, 36);
  float sum = kTerms[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) sum = fmaf(sum, square, kTerms[i]);
  return s * sum;
}

/// Changes gate and value so that sigmoid(gate) * value is what kGate makes of those before.
template <Gate kGate>
__device__ __forceinline__ void make_sigmoid(float& gate, float& value) {
  if constexpr (kGate == Gate::sigmoid) return;
  value *= kGate == Gate::relu && gate < 0 ? 0 : gate;  // a NaN stays one
  if constexpr (kGate == Gate::gelu) {
    gate = sigmoid_for_normal(gate);
  } else if constexpr (kGate == Gate::gelu_tanh) {  // (1 + tanh(u)) / 2 is sigmoid(2 u)
    gate *= fmaf(kTwiceSqrt2OverPi * kCubic, gate * gate, kTwiceSqrt2OverPi);
  } else if constexpr (kGate != Gate::silu) {
    gate = INFINITY;  // whose sigmoid is 1
  }
}

/// gate(s) and its slope.
struct GateAt {
  float value, slope;
};

/// sigmoid(s) and 1 - sigmoid(s), for results in T.
template <typename T>
__device__ inline float2 sigmoids(float s) {
  if constexpr (sizeof(T) == 2) {
    using primitives::exp2_approximate, primitives::reciprocal_approximate;
    const float gate = reciprocal_approximate(1 + exp2_approximate(-kLog2E * s));
    return make_float2(gate, 1 - gate);
  } else {  // the smaller one is no difference
    const float small = expf(-fabsf(s)), large = 1 / (1 + small), other = small * large;
    return s < 0 ? make_float2(other, large) : make_float2(large, other);
  }
}

template <typename T, Gate kGate>
__device__ inline GateAt gate_at(float s) {
  if constexpr (kGate == Gate::relu) return {s < 0 ? 0 : s, s > 0 ? 1.0f : 0.0f};
  if constexpr (kGate == Gate::none) return {s, 1};
  if constexpr (kGate == Gate::gelu) {
    const float normal = 0.5f * erfcf(-0.707106781f * s);
    return {s * normal, fmaf(0.398942280f * s, expf(-0.5f * s * s), normal)};
  }
  if constexpr (kGate == Gate::gelu_tanh) {
    const float2 half_of =
        sigmoids<T>(s * fmaf(kTwiceSqrt2OverPi * kCubic, s * s, kTwiceSqrt2OverPi));
    const float inner = fmaf(3 * kTwiceSqrt2OverPi * kCubic, s * s, kTwiceSqrt2OverPi);
    return {s * half_of.x, half_of.x * fmaf(s * half_of.y, inner, 1)};
  }
  const float2 both = sigmoids<T>(s);
  if constexpr (kGate == Gate::silu) return {s * both.x, both.x * fmaf(s, both.y, 1)};
  return {both.x, both.x * both.y};
}

/// The same between products of wgmma, where nothing may be called: for results of 2 bytes. Of GELU
/// it is Phi as sigmoid_for_normal() has it.
template <Gate kGate>
__device__ __forceinline__ GateAt gate_nearly_at(float s) {
  if constexpr (kGate == Gate::gelu) {
    const float normal = sigmoids<uint16_t>(sigmoid_for_normal(s)).x;
    const float density = 0.398942280f * primitives::exp2_approximate(-0.5f * kLog2E * s * s);
    return {s * normal, fmaf(s, density, normal)};
  } else {
    return gate_at<uint16_t, kGate>(s);
  }
}

/// sigmoid(gate) * value, in 5 instructions. The two that approximate, ex2 and rcp, are wrong by 2
/// units in the last place of fp32 at most, and have 0 for what would be denormal.
__device__ inline float gated(float gate, float value) {
  return value *
         primitives::reciprocal_approximate(1 + primitives::exp2_approximate(-1.44269504f * gate));
}

/// What kGate makes of a value.
template <Gate kGate>
__device__ __forceinline__ float gate_of(float value) {
  float factor = 1;
  make_sigmoid<kGate>(value, factor);
  return gated(value, factor);
}

/// What a kernel reads and writes: x (M, K), W1 and W2 (K, H), b1 and b2 (H) or nullptr, and out
/// (M, H). T: half or __nv_bfloat16.
template <typename T>
struct LayerOperands {
  const T *x, *W1, *b1, *W2, *b2;
  T* out;
  int M, K, H;
  Gate gate;
};

}  // namespace operators::gating
