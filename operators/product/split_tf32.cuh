// How fp32 matrices are multiplied, and the numbers of 3xTF32: each fp32 number as the sum of two
// in TF32.
#pragma once

#include "primitives/hopper/tiles.cuh"
#include "primitives/mma.cuh"

namespace operators::product {

using namespace primitives;

// How products of fp32 matrices are computed; all accumulate in fp32.
enum class Math {
  fp32,   // multiply-adds on the CUDA cores
  tf32,   // tensor cores, operands rounded to TF32
  split,  // tensor cores, 3xTF32: each operand is split into two TF32 numbers
};

// An fp32 number is nearly the sum of two TF32 numbers: `high` has the first 11 of its 24 bits
// (with the leading 1), and `low` the next 11, rounded. An infinity has no `low`.
struct SplitTf32 {
  unsigned high, low;
};
__device__ inline bool is_infinite(unsigned bits) {
  return fabsf(__uint_as_float(bits)) == __uint_as_float(0x7f800000);
}
__device__ inline SplitTf32 split_tf32(float value) {
  constexpr unsigned kMantissa = 0xffffe000, kHalf = 0x1000;
  const unsigned high = __float_as_uint(value) & kMantissa;
  const unsigned rest = __float_as_uint(value - __uint_as_float(high));
  return {high, is_infinite(high) ? 0 : (rest + kHalf) & kMantissa};
}

// The same for mma.sync, which ignores the 13 lowest bits of an operand. `high` is the nearest
// number in TF32. So `low` has one bit more than mma.sync takes, at most, and need not be rounded;
// and the product of two `low`, which is left out, is a quarter of what it is otherwise, and of any
// sign. A number that is rounded to an infinity counts as one.
__device__ inline SplitTf32 split_near(float value) {
  const unsigned high = to_tf32(value);
  const float rest = value - __uint_as_float(high);
  return {high, is_infinite(high) ? 0 : __float_as_uint(rest)};
}

#if HOPPER_CODE
// Splits `count` elements (a multiple of 4) into two TF32 numbers each: high + low is nearly what
// `high` was. `threads` threads call this; `first` is the caller's number among them.
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

// Adds the product of 64 rows of a left factor, a thread's fragments of which are w, by kRows
// columns of a right one, for 32 of the depth. x has been split into two tiles before, and w is
// split here. When this returns, the products are done and added.
template <int kRows>
__device__ inline void add_split(Sum<kRows>& sum, const LeftFragments<float>& w,
                                 const ColumnTile<float, kRows>& x,
                                 const ColumnTile<float, kRows>& x_low) {
  LeftFragments<float> high, low, finite;
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const SplitTf32 split = split_tf32(__uint_as_float(w.slices[k][e]));
      high.slices[k][e] = split.high, low.slices[k][e] = split.low;
      finite.slices[k][e] =
          is_infinite(split.high) ? 0 : split.high;  // see add_products() of fp32_tiles.cuh
    }
  }
  Sum<kRows> step;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    multiply_slice(step.elements, finite, x_low.columns(), k, k > 0);
    multiply_slice(step.elements, low, x.columns(), k, true);
    multiply_slice(step.elements, high, x.columns(), k, true);
  }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < Sum<kRows>::size(); ++i) sum.elements[i] += step.elements[i];
}
#endif

}  // namespace operators::product
