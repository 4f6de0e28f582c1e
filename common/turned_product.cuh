// What lesson 9's kernels for Hopper share: products sum^T = W^T x^T in TF32, with W^T in
// registers.
//
// In TF32 wgmma takes a factor from shared memory only if its elements are contiguous along k (here
// D); those of x are, those of W are not. So the product is turned round: x^T is the factor from
// shared memory, as the copy engine leaves it there, and W^T is the one from registers. A warpgroup
// has 64 columns of W, a warp 16; for wgmma those are rows of W^T, and thread l has rows l / 4 and
// l / 4 + 8 of its warp's 16. Which column is which row is ours to say: these two are neighbours, 2
// (l / 4) and the next one, so that W can be read 8 bytes at a time. The thread's sums of the first
// are sum[4 j + e], of the second sum[4 j + 2 + e], each for row 8 j + 2 (l % 4) + e of x.
#pragma once

#include "common/fp32_product.cuh"
#include "common/hopper.cuh"
#include "common/row_parts.cuh"

#if HOPPER_CODE
// What is known of the fragments of W that a thread loads.
enum class Known {
  pairs,   // C is even, and no d >= D
  inside,  // no d >= D
  nothing
};

// A thread's fragments of W^T, of the classes col and col + 1 for the inputs from d0 on: w[k] is
// for d0 + 8 k to d0 + 8 k + 7. All loads are under way before the first value is needed. Where d
// >= D they are zeros; for classes that do not exist they are another one's, and nobody looks at
// what becomes of them.
template <Known kKnown, int kSteps>
__device__ inline void load_fragments(float (&w)[kSteps][4], const float* W, int d0, int col, int D,
                                      int C) {
  const int t = threadIdx.x % 4;
  if constexpr (kKnown == Known::pairs) {
    const float* near = W + static_cast<size_t>(d0 + t) * C + min(col, C - 2);
    const float* far = near + 4 * static_cast<size_t>(C);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const float2 a = *reinterpret_cast<const float2*>(near);
      const float2 b = *reinterpret_cast<const float2*>(far);
      w[k][0] = a.x, w[k][1] = a.y, w[k][2] = b.x, w[k][3] = b.y;
      near += 8 * static_cast<size_t>(C), far += 8 * static_cast<size_t>(C);
    }
  } else {
    const float *first = W + min(col, C - 1), *second = W + min(col + 1, C - 1);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int d = d0 + 8 * k + t + 4 * e;
        const bool inside = kKnown == Known::inside || d < D;
        const size_t row = static_cast<size_t>(inside ? d : D - 1) * C;
        const float a = first[row], b = second[row];
        w[k][2 * e] = inside ? a : 0, w[k][2 * e + 1] = inside ? b : 0;
      }
    }
  }
}

// Each of the `count` elements of `high` (a multiple of 4) becomes the sum of two TF32 numbers,
// high + low. All `threads` threads call this; `first` is the caller's number among them.
__device__ inline void split_all(float* high, float* low, int count, int first, int threads) {
#pragma unroll 2
  for (int i = 4 * first; i < count; i += 4 * threads) {
    auto& h = *reinterpret_cast<float4*>(high + i);
    const SplitTf32 a = split_tf32(h.x), b = split_tf32(h.y), c = split_tf32(h.z),
                    d = split_tf32(h.w);
    h = {__uint_as_float(a.high), __uint_as_float(b.high), __uint_as_float(c.high),
         __uint_as_float(d.high)};
    *reinterpret_cast<float4*>(low + i) = {__uint_as_float(a.low), __uint_as_float(b.low),
                                           __uint_as_float(c.low), __uint_as_float(d.low)};
  }
}

// Each of the elements becomes a TF32 number, rounded to nearest.
__device__ inline void round_all(float* x, int count, int first, int threads) {
#pragma unroll 2
  for (int i = 4 * first; i < count; i += 4 * threads) {
    auto& four = *reinterpret_cast<uint4*>(x + i);
    four = {to_tf32(__uint_as_float(four.x)), to_tf32(__uint_as_float(four.y)),
            to_tf32(__uint_as_float(four.z)), to_tf32(__uint_as_float(four.w))};
  }
}

// Adds the products of a warpgroup's 64 classes with 2 kSums rows of x, for 32 of the D inputs.
// w[k]: a thread's fragment of W^T for inputs 8 k to 8 k + 7, in TF32 already if kRounded. If kMath
// is split they are done when this returns, else under way: wgmma_wait() then.
template <Math kMath, bool kRounded, int kSums>
__device__ inline void add_products(float (&sum)[kSums], const float (&w)[4][4], const float* x,
                                    const float* x_low, bool add) {
  if constexpr (kMath == Math::split) {
    uint32_t high[4][4], low[4][4], finite[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const SplitTf32 parts = split_tf32(w[k][e]);
        high[k][e] = parts.high, low[k][e] = parts.low;
        finite[k][e] = is_infinite(parts.high) ? 0 : parts.high;  // as for mma.sync, above
      }
    }
    float step[kSums];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_tf32(step, finite[k], descriptor_a(x_low) + 2 * k, k > 0);
      wgmma_tf32(step, low[k], descriptor_a(x) + 2 * k, true);
      wgmma_tf32(step, high[k], descriptor_a(x) + 2 * k, true);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i] = add ? sum[i] + step[i] : step[i];
  } else {
    uint32_t rounded[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        rounded[k][e] = kRounded ? __float_as_uint(w[k][e]) : to_tf32(w[k][e]);
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_tf32(sum, rounded[k], descriptor_a(x) + 2 * k, add || k > 0);
    }
    wgmma_commit();
  }
}

// The 8 lanes with the same l % 4 have kCount values each, and combine them: value i of all of them
// becomes one. Each time a lane keeps one half of its values and gives the other one to a partner,
// so that after three times it has kCount / 8: those from (l / 4 with its 3 bits reversed) * kCount
// / 8 on.
template <int kHalf, int kCount, typename Op>
__device__ inline void combine_halves(float (&v)[kCount], Op op, int lanes) {
  const bool upper = threadIdx.x & lanes;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float send = upper ? v[i] : v[i + kHalf], keep = upper ? v[i + kHalf] : v[i];
    v[i] = op(keep, __shfl_xor_sync(kAllLanes, send, lanes));
  }
}
template <int kCount, typename Op>
__device__ inline void combine_quads(float (&v)[kCount], Op op) {
  combine_halves<kCount / 2>(v, op, 4);
  combine_halves<kCount / 4>(v, op, 8);
  combine_halves<kCount / 8>(v, op, 16);
}

// Beside operands of 10 bits, exp() may be the hardware's 2^x: its error is 2 units in the last
// place, and that of the product another one for each unit of |value|.
template <Math kMath>
__device__ float exp_of(float value) {
  return kMath == Math::tf32 ? exp2_approximate(value * 1.44269504f) : expf(value);
}
#endif
