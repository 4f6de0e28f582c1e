// The tensor cores, instruction by instruction: ldmatrix, mma.sync, and the shared memory layout
// that feeds them.
//
// A warp multiplies; each of its 32 lanes holds a share of every matrix, its fragment. Unlike a
// WMMA fragment (<mma.h>), these are plain registers, and it is specified which lane holds what:
// a lane can work on its elements, knowing their rows and columns. All of it follows one pattern,
//
//     8 x 8 elements of 16 bits:  lane l holds row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1
//
// in one 32-bit register, the element of the lower column in the lower half. (Of a right factor it
// is the transpose: column l / 4, rows 2 (l % 4) and the next.) Larger matrices are several of
// these. Every function that is called for a whole warp says so; all 32 lanes must call it
// together.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#ifdef CUDA_CPU
#include "cpu/execution/warp_products.h"
#endif

namespace primitives {

/// Two floats rounded to T (half or __nv_bfloat16), as a register of a fragment: `low` belongs to
/// the lower column.
template <typename T>
__device__ inline unsigned pack2(float low, float high);
template <>
__device__ inline unsigned pack2<half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}
template <>
__device__ inline unsigned pack2<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

/// Four floats, likewise, as two registers.
template <typename T>
__device__ inline uint2 pack4(float4 four) {
  return make_uint2(pack2<T>(four.x, four.y), pack2<T>(four.z, four.w));
}

__device__ inline void add(float4& sum, const float4& quad) {
  sum.x += quad.x;
  sum.y += quad.y;
  sum.z += quad.z;
  sum.w += quad.w;
}

/// Two pairs of bf16, multiplied and rounded.
__device__ inline unsigned multiply2(unsigned a, unsigned b) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                         *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const unsigned*>(&product);
}

/// Where element (row, col) of a tile lies in shared memory, in elements of 16 bits from its start.
/// The tile has kCols columns (32, or a multiple of 64), is dense, and starts at a multiple of 128
/// bytes.
///
/// The 32 banks of shared memory are 128 bytes wide: eight pieces of 16 bytes. Row-major, the same
/// 8 columns of 8 consecutive rows would all be on one eighth of the banks, and reading them, as
/// ldmatrix does, would take 8 turns. So the pieces of a row change places: piece p of row r
/// becomes p ^ (r % 8), and then all eight are on different banks. (With 32 columns two rows share
/// 128 bytes and have four pieces each: p ^ (r / 2 % 4).) A row still has the same 128 bytes, so
/// writing whole rows is free of conflicts too, and unlike padding this costs no memory. An
/// exclusive or also undoes itself, and commutes with others: if a column has none of the bits of
/// 8 c, then column + 8 c is column ^ 8 c, and its offset is the column's offset ^ 8 c, as long as
/// neither leaves an aligned group of 64 (32) columns.
template <int kCols>
__device__ inline int swizzle(int row, int col) {
  static_assert(kCols == 32 || kCols % 64 == 0, "no layout for rows of this length");
  const int turn = kCols == 32 ? row / 2 % 4 : row % 8;
  return row * kCols + (col ^ 8 * turn);
}

// The CPU backend says the same words in cpu/execution/warp_products.h.
#ifndef CUDA_CPU

/// Loads four 8 x 8 matrices of 16-bit elements from shared memory, for a whole warp. Lane l passes
/// the address of a row (8 elements, 16 bytes, aligned to that): rows 0 to 7 of matrix 0 come from
/// lanes 0 to 7, those of matrix 1 from lanes 8 to 15, and so on. It receives in matrices[i] of
/// matrix i the elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1). PTX ISA, "Warp-level matrix
/// load instruction: ldmatrix".
__device__ inline void ldmatrix_x4(unsigned (&matrices)[4], const void* row) {
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(from)
               : "memory");
}

/// The same, and transposes each matrix: lane l receives in matrices[i] of matrix i the elements
/// (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
__device__ inline void ldmatrix_x4_trans(unsigned (&matrices)[4], const void* row) {
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(from)
               : "memory");
}

/// sum (16 x 8, float) += a (16 x 16) b (16 x 8), elements of T (half or __nv_bfloat16), for a
/// whole warp. With g = l / 4 and t = l % 4, lane l holds
///
///     a[0]  (g,     2t) and (g,     2t + 1)      b0  (2t,     g) and (2t + 1, g)
///     a[1]  (g + 8, 2t) and (g + 8, 2t + 1)      b1  (2t + 8, g) and (2t + 9, g)
///     a[2]  (g,     2t + 8) and (g,     2t + 9)
///     a[3]  (g + 8, 2t + 8) and (g + 8, 2t + 9)  sum[0], sum[1]  (g,     2t) and (g,     2t + 1)
///                                                sum[2], sum[3]  (g + 8, 2t) and (g + 8, 2t + 1)
///
/// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type". Compute capability 7.5
/// has half the depth, m16n8k8 (a[0], a[1] and b0 are its operands), and no bf16: there, kernels
/// that multiply bf16 compile, but stop when they run.
template <typename T>
__device__ inline void mma_m16n8k16(float (&sum)[4], const unsigned (&a)[4], unsigned b0,
                                    unsigned b1);
template <>
__device__ inline void mma_m16n8k16<half>(float (&sum)[4], const unsigned (&a)[4], unsigned b0,
                                          unsigned b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}
template <>
__device__ inline void mma_m16n8k16<__nv_bfloat16>(float (&sum)[4], const unsigned (&a)[4],
                                                   unsigned b0, unsigned b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  __trap();
#endif
}

/// `value` rounded to TF32, the nearest number with 10 bits of mantissa, as an operand of
/// mma_m16n8k8_tf32. Infinities and NaN stay what they are. Needs compute capability 8.0, where a
/// tie goes away from zero; from 9.0 on it goes to the even one, which is one instruction and not
/// three.
__device__ inline unsigned to_tf32(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  unsigned rounded;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
#endif
  return rounded;
#else
  __trap();
  return __float_as_uint(value);
#endif
}

/// sum (16 x 8, float) += a (16 x 8) b (8 x 8), elements in TF32, for a whole warp. With g = l / 4
/// and t = l % 4, lane l holds
///
///     a[0]  (g, t)      a[2]  (g,     t + 4)     b0  (t,     g)
///     a[1]  (g + 8, t)  a[3]  (g + 8, t + 4)     b1  (t + 4, g)
///
/// and of sum the same elements as for mma_m16n8k16.
///
/// PTX ISA, "Matrix Fragments for mma.m16n8k8" (.tf32). The 16-byte rows that ldmatrix_x4 moves are
/// four floats here: its matrices are a's quarters. Needs compute capability 8.0.
__device__ inline void mma_m16n8k8_tf32(float (&sum)[4], const unsigned (&a)[4], unsigned b0,
                                        unsigned b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  __trap();
#endif
}

#endif

}  // namespace primitives
