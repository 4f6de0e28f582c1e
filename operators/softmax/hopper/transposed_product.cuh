// What the operator's kernels for Hopper share: the transposed product sum^T = W^T x^T in TF32,
// with W^T in registers.
//
// In TF32 wgmma takes a factor from shared memory only if its elements are contiguous along the
// dimension that is summed, D here. A row of x is, and a column of W is not. So x^T is the factor
// from shared memory, as the copy engine leaves it there, and W^T comes from registers. Rows of a
// Sum are columns of W, and columns of a Sum are rows of x.
//
// A warpgroup has 64 columns of W, and a warp has 16. wgmma gives a thread two rows of W^T, and any
// two columns of W may be these, as long as the results are read in the same order. A thread's two
// are neighbours, so that one load of 8 bytes brings both (but not if rows of W are not aligned,
// see exchange.cuh).
#pragma once

#include "operators/product/split_tf32.cuh"
#include "primitives/hopper/tiles.cuh"

namespace operators::softmax {

using namespace primitives;
using product::Math;

#if HOPPER_CODE
using product::add_split, product::split_all;

// Loads a thread's fragments of W^T from memory: of the classes col and col + 1, for the inputs
// from d0 on, 32 for each of w[]. All loads are under way before the first value is needed. With
// kInside all inputs exist; otherwise those that do not are zeros. Classes that do not exist get
// another class's values, and their sums are not used.
template <bool kInside, int kCount>
__device__ inline void load_fragments(LeftFragments<float> (&w)[kCount], const float* W, int d0,
                                      int col, int D, int C) {
  const int d = d0 + threadIdx.x % 4;
  const auto put = [&](int i, float first, float second) {
    uint32_t(&to)[4] = w[i / 8].slices[i / 2 % 4];
    to[i % 2 * 2] = __float_as_uint(first), to[i % 2 * 2 + 1] = __float_as_uint(second);
  };
  if (kInside && C % 2 == 0) {
    const float* at = W + static_cast<size_t>(d) * C + min(col, C - 2);
#pragma unroll
    for (int i = 0; i < 8 * kCount; ++i, at += 4 * static_cast<size_t>(C)) {
      const float2 pair = *reinterpret_cast<const float2*>(at);
      put(i, pair.x, pair.y);
    }
  } else {
    const float* at = W + static_cast<size_t>(d) * C + min(col, C - 1);
    const int next = col + 1 < C;
#pragma unroll
    for (int i = 0; i < 8 * kCount; ++i, at += 4 * static_cast<size_t>(C)) {
      const bool inside = kInside || 4 * i < D - d;
      put(i, inside ? at[0] : 0, inside ? at[next] : 0);
    }
  }
}
template <int kCount>
__device__ inline void load_fragments(LeftFragments<float> (&w)[kCount], const float* W, int d0,
                                      int col, int D, int C) {
  if (d0 + 32 * kCount <= D) {
    load_fragments<true>(w, W, d0, col, D, C);
  } else {
    load_fragments<false>(w, W, d0, col, D, C);
  }
}

// Loads 8 neighbours of a row of D floats, of which `left` exist; the others become zeros. `from`
// is a multiple of 8 floats behind the start of the row.
__device__ inline void load_inputs(float (&v)[8], const float* from, int left, int D) {
  if (left < 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = i < left ? from[i] : 0;
  } else if (D % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
    }
  } else if (D % 2 == 0) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 two = *reinterpret_cast<const float2*>(from + i);
      v[i] = two.x, v[i + 1] = two.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = from[i];
  }
}

// Loads a thread's fragments of W^T for mma.sync, of a chunk of 32 inputs. Of the columns g and g +
// 8 of each tile of 16 it takes the inputs d0 to d0 + 7, two for each of 4 mma.sync.
template <int kTiles>
__device__ inline void load_columns(unsigned (&w)[kTiles][4][4], const float* W, int d0, int D,
                                    int C) {
  const int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int d = d0 + i / 2, col = 16 * tile + g + i % 2 * 8;
      w[tile][i / 4][i % 4] = to_tf32(d < D && col < C ? W[static_cast<size_t>(d) * C + col] : 0);
    }
  }
}

// Starts the products of a warpgroup's 64 classes with kRows rows of x, for 32 inputs; wgmma_wait()
// has to follow. w are a thread's fragments of W^T in fp32, which are rounded first.
template <int kRows>
__device__ inline void start_rounded(Sum<kRows>& sum, const LeftFragments<float>& w,
                                     const ColumnTile<float, kRows>& x, bool add) {
  LeftFragments<float> rounded;
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
#pragma unroll
    for (int e = 0; e < 4; ++e) rounded.slices[k][e] = to_tf32(__uint_as_float(w.slices[k][e]));
  }
  sum.start_product(rounded, x.columns(), add);
}

#endif

}  // namespace operators::softmax
