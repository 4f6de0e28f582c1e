// How a warp multiplies tiles in shared memory, in every type of the library: the fragments of both
// factors and a step of the product. All else of these products is the same for all types.
//
// A tile is row-major, and its rows are padded, so that those that are read at once lie on
// different banks. A warp has 32 rows of the result and kCols columns of it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "operators/product/split_tf32.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/fragments.cuh"

namespace operators::meshes {

using namespace primitives;
using operators::product::is_infinite;
using operators::product::Math;
using operators::product::split_tf32;
using operators::product::SplitTf32;

/// A type, and how it is multiplied: of float one of Math's three, of half and __nv_bfloat16 by
/// tensor cores.
template <typename Element, Math kMathOf = Math::tf32>
struct Kind {
  using T = Element;
  static constexpr Math kMath = kMathOf;
  static constexpr bool kHalf = sizeof(T) == 2;
  static constexpr bool kSplit = !kHalf && kMath == Math::split;
  static constexpr bool kScalar = !kHalf && kMath == Math::fp32;
  static constexpr int kUnit = kHalf ? 16 : kScalar ? 4 : 8;  ///< of the depth: one multiplication
  static constexpr int kDepth = kHalf ? 32 : 16;              ///< of a stage in shared memory
  /// From a row of a tile to the next, if it has kDepth columns. Eight rows of 16 bytes lie on
  /// different banks.
  static constexpr int kDeepPitch = kDepth + 16 / static_cast<int>(sizeof(T));
};
/// The same of a tile with so many columns: 4 rows of 8 floats lie on different banks.
__host__ __device__ constexpr int pitch(int cols) { return cols + 8; }

/// 32 rows of a left factor, kUnit of the depth. On tensor cores a warp holds them as mma.sync
/// wants them; `low` is what 3xTF32 adds to them. On CUDA cores a thread has rows lane / 4 + 8 i.
template <class Kind>
struct Left {
  unsigned of[2][4], low[Kind::kSplit ? 2 : 1][4];
};
template <typename T, Math kMath>
requires(Kind<T, kMath>::kScalar) struct Left<Kind<T, kMath>> {
  float of[4][4];  ///< (rows, depth)
};

/// kCols columns of a right factor. On CUDA cores a thread has columns 8 j + 2 (lane % 4) and the
/// next one.
template <class Kind, int kCols>
struct Right {
  unsigned of[kCols / 8][2], low[Kind::kSplit ? kCols / 8 : 1][2];
};
template <typename T, Math kMath, int kCols>
requires(Kind<T, kMath>::kScalar) struct Right<Kind<T, kMath>, kCols> {
  float2 of[4][kCols / 8];  ///< (depth, pairs of columns)
};

/// What tensor cores get of a fp32 number, in the place of its bits.
template <class Kind>
__device__ __forceinline__ void prepare(unsigned& of, [[maybe_unused]] unsigned& low) {
  if constexpr (Kind::kSplit) {
    const SplitTf32 split = split_tf32(__uint_as_float(of));
    of = split.high, low = split.low;
  } else if constexpr (!Kind::kHalf) {
    of = to_tf32(__uint_as_float(of));
  }
}

template <typename T>
__device__ __forceinline__ unsigned multiply_pairs(unsigned a, T first, T second) {
  if constexpr (sizeof(T) == 2) {
    const auto [x, y] = *reinterpret_cast<const T(*)[2]>(&a);
    return pack2<T>(static_cast<float>(x) * static_cast<float>(first),
                    static_cast<float>(y) * static_cast<float>(second));
  } else {
    return __float_as_uint(__uint_as_float(a) * first);
  }
}

/// Loads a left factor from row `row` and depth k of a tile on: (rows, depth), or transposed, with
/// kPitch columns, (depth, rows). `factors`, unless it is null, has a number for each of the depth,
/// which the left factor is multiplied by and rounded.
template <bool kTransposed, int kPitch, class Kind>
__device__ __forceinline__ void load_left(Left<Kind>& left, const typename Kind::T* tile, int row,
                                          int k, const typename Kind::T* factors = nullptr) {
  using T = typename Kind::T;
  const int lane = threadIdx.x % 32;
  if constexpr (Kind::kScalar) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = row + lane / 4 + 8 * i;
      if constexpr (kTransposed) {
#pragma unroll
        for (int e = 0; e < 4; ++e) left.of[i][e] = tile[(k + e) * kPitch + at];
      } else {
        const float4 four = *reinterpret_cast<const float4*>(tile + at * kPitch + k);
        left.of[i][0] = four.x, left.of[i][1] = four.y;
        left.of[i][2] = four.z, left.of[i][3] = four.w;
      }
      for (int e = 0; factors && e < 4; ++e) left.of[i][e] *= factors[k + e];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned(&of)[4] = left.of[i];
      const int at = row + 16 * i;
      if constexpr (Kind::kHalf && kTransposed) {
        ldmatrix_x4_trans(of,
                          tile + (k + lane % 8 + lane / 16 * 8) * kPitch + at + lane / 8 % 2 * 8);
      } else if constexpr (!kTransposed) {  // 16 bytes are 8 elements, or 4 floats
        ldmatrix_x4(of, tile + (at + lane % 16) * kPitch + k +
                            lane / 16 * (16 / static_cast<int>(sizeof(T))));
      } else {
        const float* from = tile + (k + lane % 4) * kPitch + at + lane / 4;
        of[0] = __float_as_uint(from[0]), of[1] = __float_as_uint(from[8]);
        of[2] = __float_as_uint(from[4 * kPitch]), of[3] = __float_as_uint(from[4 * kPitch + 8]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (factors) {
          const T* own =
              factors + k + (Kind::kHalf ? lane % 4 * 2 + j / 2 * 8 : lane % 4 + j / 2 * 4);
          of[j] = multiply_pairs<T>(of[j], own[0], own[Kind::kHalf]);
        }
        prepare<Kind>(of[j], left.low[Kind::kSplit ? i : 0][j]);
      }
    }
  }
}

/// Loads kCols columns of a right factor from depth k and column `col` of a tile on, (depth,
/// columns).
template <int kPitch, class Kind, int kCols>
__device__ __forceinline__ void load_right(Right<Kind, kCols>& right, const typename Kind::T* tile,
                                           int k, int col) {
  const int lane = threadIdx.x % 32;
  if constexpr (Kind::kScalar) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j) {
        right.of[e][j] =
            *reinterpret_cast<const float2*>(tile + (k + e) * kPitch + col + 8 * j + lane % 4 * 2);
      }
    }
  } else if constexpr (Kind::kHalf) {
#pragma unroll
    for (int j = 0; j < kCols / 16; ++j) {
      unsigned four[4];
      ldmatrix_x4_trans(four, tile + (k + lane % 16) * kPitch + col + 16 * j + lane / 16 * 8);
      right.of[2 * j][0] = four[0], right.of[2 * j][1] = four[1];
      right.of[2 * j + 1][0] = four[2], right.of[2 * j + 1][1] = four[3];
    }
  } else {
    const float* from = tile + (k + lane % 4) * kPitch + col + lane / 4;
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
#pragma unroll
      for (int half_of = 0; half_of < 2; ++half_of) {
        right.of[j][half_of] = __float_as_uint(from[4 * half_of * kPitch + 8 * j]);
        prepare<Kind>(right.of[j][half_of], right.low[Kind::kSplit ? j : 0][half_of]);
      }
    }
  }
}

/// Changes the sign of a right factor: tensor cores only add.
template <class Kind, int kCols>
__device__ __forceinline__ void negate(Right<Kind, kCols>& right) {
#pragma unroll
  for (int j = 0; j < kCols / 8; ++j) {
    if constexpr (Kind::kScalar) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        right.of[e][j] = make_float2(-right.of[e][j].x, -right.of[e][j].y);
      }
    } else {
      constexpr unsigned kSigns = Kind::kHalf ? 0x80008000u : 0x80000000u;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        right.of[j][i] ^= kSigns;
        if constexpr (Kind::kSplit) right.low[j][i] ^= kSigns;
      }
    }
  }
}

/// Adds the product of the two. In 3xTF32 tensor cores, which truncate what they add up, sum only
/// the three products, and CUDA cores add these, rounded to nearest. The left factor's low numbers
/// must not meet an infinity: 0 times that is NaN.
template <class Kind, int kCols>
__device__ __forceinline__ void multiply(float (&sum)[2][kCols / 8][4], const Left<Kind>& left,
                                         const Right<Kind, kCols>& right) {
  if constexpr (Kind::kScalar) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < kCols / 8; ++j) {
          sum[i / 2][j][i % 2 * 2] += left.of[i][e] * right.of[e][j].x;
          sum[i / 2][j][i % 2 * 2 + 1] += left.of[i][e] * right.of[e][j].y;
        }
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto& b = right.of[j];
        if constexpr (Kind::kHalf) {
          mma_m16n8k16<typename Kind::T>(sum[i][j], left.of[i], b[0], b[1]);
        } else if constexpr (!Kind::kSplit) {
          mma_m16n8k8_tf32(sum[i][j], left.of[i], b[0], b[1]);
        } else {
          float step[4] = {};
          mma_m16n8k8_tf32(step, left.low[i], is_infinite(b[0]) ? 0 : b[0],
                           is_infinite(b[1]) ? 0 : b[1]);
          mma_m16n8k8_tf32(step, left.of[i], right.low[j][0], right.low[j][1]);
          mma_m16n8k8_tf32(step, left.of[i], b[0], b[1]);
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][j][e] += step[e];
        }
      }
    }
  }
}

/// A matrix in memory, dense, of which a tile is copied. Rows outside of [begin, end) count as
/// zeros. `aligned`: whether its rows begin at multiples of 16 bytes.
template <typename T>
struct RowsOf {
  const T* data;
  int64_t begin, end;
  int cols;
  bool aligned;
};
template <typename T>
__host__ __device__ constexpr bool are_aligned(int64_t cols) {
  return cols * sizeof(T) % 16 == 0;
}

/// Copies an element, or zeros in its place. Of 16 bits it is copied at once.
template <typename T>
__device__ __forceinline__ void copy_element(T* to, const T* from, bool inside) {
  if constexpr (sizeof(T) == 4) {
    copy_async<4>(to, from, inside);
  } else {
    *to = inside ? *from : static_cast<T>(0.0F);
  }
}

/// Starts the copy of a tile of kRows x kCols, from (row0, col0) on, to shared memory, where rows
/// are kPitch apart. All kThreads threads of the block call it, and a thread has every kThreads-th
/// piece of 16 bytes, or element.
template <int kRows, int kCols, int kPitch, int kThreads, typename T>
__device__ __forceinline__ void copy_tile(T* to, const RowsOf<T>& of, int64_t row0, int col0) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T)), kPieces = kCols / kPiece;
  if (of.aligned) {
#pragma unroll
    for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
      const int row = i / kPieces, col = i % kPieces * kPiece;
      const int64_t at = row0 + row;
      copy_async<16>(to + row * kPitch + col, of.data + at * of.cols + col0 + col,
                     at >= of.begin && at < of.end && col0 + col < of.cols);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) {
      const int row = i / kCols, col = i % kCols;
      const int64_t at = row0 + row;
      copy_element(to + row * kPitch + col, of.data + at * of.cols + col0 + col,
                   at >= of.begin && at < of.end && col0 + col < of.cols);
    }
  }
}

/// The same of the transpose: row `row` of the tile is column row0 + row in memory.
template <int kRows, int kCols, int kPitch, int kThreads, typename T>
__device__ __forceinline__ void copy_transposed(T* to, const RowsOf<T>& of, int64_t row0,
                                                int col0) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) {
    const int row = i % kRows, col = i / kRows;
    copy_element(to + row * kPitch + col, of.data + int64_t{col0 + col} * of.cols + row0 + row,
                 col0 + col < of.end && row0 + row < of.cols);
  }
}

/// Stores two neighbours of a row with `cols` columns, of which the first is in column `col`, an
/// even number, and the second one may be outside.
template <typename T>
__device__ __forceinline__ void store_pair(T* row, int col, int cols, float2 pair) {
  if (cols % 2 == 0) {
    if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<unsigned*>(row + col) = pack2<T>(pair.x, pair.y);
    } else {
      *reinterpret_cast<float2*>(row + col) = pair;
    }
  } else {
    row[col] = static_cast<T>(pair.x);
    if (col + 1 < cols) row[col + 1] = static_cast<T>(pair.y);
  }
}

}  // namespace operators::meshes
