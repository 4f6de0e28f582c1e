// Tensor cores through their C++ interface (<mma.h>): the fragments of lessons 3 and 6, and the way
// of their sums to memory. primitives/mma.cuh has the instructions below the interface.
#pragma once

#include <mma.h>

#include "primitives/mma.cuh"

namespace primitives {

/// What a lane holds of a matrix of 16 x 16: of a left factor, a right factor, and sums. The
/// interface does not tell which elements these are. All lanes of a warp together load such a
/// matrix, multiply two of them, or store one.
namespace wmma = nvcuda::wmma;
using FragmentA = wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major>;
using FragmentB = wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major>;
using FragmentSum = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;

/// Writes 4 or 8 elements (Vector: uint2, uint4) of row `row` of a row-major matrix (rows x cols),
/// from column `col`, as far as they are inside. With kAligned (cols a multiple of 8) that is one
/// store.
template <bool kAligned, typename Vector>
__device__ inline void store_halves(half* matrix, int row, int col, int rows, int cols,
                                    Vector elements) {
  if (row >= rows || col >= cols) return;
  half* to = matrix + static_cast<size_t>(row) * cols + col;
  if constexpr (kAligned) {
    *reinterpret_cast<Vector*>(to) = elements;
  } else {
    constexpr int kPairs = sizeof(Vector) / 4;
    alignas(Vector) unsigned pairs[kPairs];
    *reinterpret_cast<Vector*>(pairs) = elements;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      const unsigned element = pairs[i / 2] >> i % 2 * 16 & 0xFFFF;
      if (col + i < cols) to[i] = __ushort_as_half(static_cast<unsigned short>(element));
    }
  }
}

/// Rounds a warp's 16 x 16 sums to fp16, and stores them from (row0, col0) of a matrix on. For that
/// a lane has to know which elements it has, and WMMA does not say that. So the warp first stores
/// its sums to `staging`, its own 16 rows of shared memory. From there each lane takes 8 neighbours
/// of a row, and rounds these.
inline constexpr int kStagingStride =
    20;  // floats: 16 numbers of a row, and 4 that shift the next row to other banks
template <bool kAligned>
__device__ inline void store_rounded(half* matrix, int row0, int col0, int rows, int cols,
                                     const FragmentSum& sum, float* staging) {
  wmma::store_matrix_sync(staging, sum, kStagingStride, wmma::mem_row_major);
  __syncwarp();
  const int lane = threadIdx.x % 32, row = lane % 16, col = lane / 16 * 8;
  const float* from = staging + row * kStagingStride + col;
  const float4 low = *reinterpret_cast<const float4*>(from);
  const float4 high = *reinterpret_cast<const float4*>(from + 4);
  store_halves<kAligned>(matrix, row0 + row, col0 + col, rows, cols,
                         make_uint4(pack2<half>(low.x, low.y), pack2<half>(low.z, low.w),
                                    pack2<half>(high.x, high.y), pack2<half>(high.z, high.w)));
  __syncwarp();
}

}  // namespace primitives
