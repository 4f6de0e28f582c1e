// The tensor cores, instruction by instruction: ldmatrix, mma.sync, and the layout of tiles in
// shared memory that suits them.
//
// A warp multiplies. Each of its 32 lanes holds a part of every matrix: its fragment. These
// fragments are plain registers, and the PTX ISA says which lane holds which elements. (Of a
// fragment of WMMA, in <mma.h>, it does not.) So a lane knows the row and the column of what it
// has, and can go on with it. Everything here is made of one pattern:
//
//     8 x 8 elements of 16 bits:  lane l holds row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1
//
// These two elements are one register of 32 bits; the lower column is in its lower half. For
// example, lane 5 holds columns 2 and 3 of row 1. A right factor is held the other way round: lane
// l holds column l / 4, rows 2 (l % 4) and 2 (l % 4) + 1. A larger matrix is several matrices of 8
// x 8.
//
// Where a function is for a whole warp its comment says so, and all 32 lanes must call it together.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#ifdef CUDA_CPU
#include "cpu/warps/warp_products.h"
#endif

namespace primitives {

/// Rounds two floats to T (half or __nv_bfloat16), and returns them as one register of a fragment:
/// `low` belongs to the lower column.
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

/// The same for four floats, as two registers.
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

/// Multiplies two pairs of bf16, element by element, and rounds the products.
__device__ inline unsigned multiply2(unsigned a, unsigned b) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                         *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const unsigned*>(&product);
}

/// Where element (row, col) of a tile lies in shared memory, counted in elements of 16 bits from
/// the tile's start. The tile has kCols columns (16, 32, or a multiple of 64), has no gaps, and
/// starts at a multiple of 128 bytes.
///
/// Why not row-major? The 32 banks of shared memory are 128 bytes wide, eight pieces of 16 bytes.
/// With rows of 64 columns a piece p would lie on the same four banks in every row. ldmatrix reads
/// the same piece of eight rows, and would take 8 turns. So the pieces of a row change places:
/// piece p of row r lies at place p ^ (r % 8). Then the same piece of eight rows lies on eight
/// different groups of banks. A whole row still fills the same 128 bytes, so writing rows meets no
/// bank twice, either; and unlike padding this costs no memory. (With 32 columns a row has four
/// pieces, and two rows share 128 bytes: piece p lies at p ^ (r / 2 % 4). With 16 columns four rows
/// share them: p ^ (r / 4 % 2).)
///
/// An offset may be moved along a row without swizzling again: if (column & d) is 0, then
/// swizzle(row, column + d) is swizzle(row, column) ^ d. d is a multiple of 8, and both columns are
/// in the same 64 (or 32, or 16). Lesson 3's *lean* uses that, and explains it.
template <int kCols>
__device__ inline int swizzle(int row, int col) {
  static_assert(kCols == 16 || kCols == 32 || kCols % 64 == 0, "no layout for rows of this length");
  const int turn = kCols == 16 ? row / 4 % 2 : kCols == 32 ? row / 2 % 4 : row % 8;
  return row * kCols + (col ^ 8 * turn);
}

// The CPU backend has functions of the same names in cpu/warps/warp_products.h.
#ifndef CUDA_CPU

/// For a whole warp: loads four matrices of 8 x 8 elements of 16 bits from shared memory. Each lane
/// passes the address of one row, which is 8 elements, 16 bytes, at a multiple of 16 bytes. Lanes 0
/// to 7 pass the rows of matrix 0, lanes 8 to 15 those of matrix 1, and so on. Then lane l has in
/// matrices[i] two elements of matrix i: row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1. PTX ISA,
/// "Warp-level matrix load instruction: ldmatrix".
__device__ inline void ldmatrix_x4(unsigned (&matrices)[4], const void* row) {
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(from)
               : "memory");
}

/// The same, but each matrix is transposed on the way: lane l has in matrices[i] two elements of
/// column l / 4 of matrix i, rows 2 (l % 4) and 2 (l % 4) + 1.
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

/// Rounds to TF32, the nearest number with 10 bits of mantissa: an operand of mma_m16n8k8_tf32.
/// Infinities and NaN stay what they are. Needs compute capability 8.0. There a number in the
/// middle between two goes away from zero. From 9.0 on it goes to the even one, which takes one
/// instruction and not three.
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
