// How the lanes of a warp share a tile of C in fp32: what each reads of the factors, and how
// results get from the threads, which own four neighbours of several rows, into rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "operators/product/shape.h"

namespace operators::product {

/// What is multiplied. In memory rows are so many numbers apart as the pitches say.
struct Fp32Operands {
  const float *A, *B;
  float* C;
  ProductShape shape;
  int pitch_a, pitch_b, pitch_c;
};

/// The lanes of a warp are kAcross_ columns of threads, 8 or 4, and so 4 or 8 rows.
///
/// For each k a lane reads four numbers of its rows of A, and four of its columns of B, 16 bytes
/// each. Of A the lanes of a row read the same, and of B those of a column. Shared memory delivers
/// 16 bytes to 8 lanes at a time, and that takes four turns. But it serves 16 lanes in a turn if
/// each lane reads what its neighbour by the lowest bit of its number reads, or what that by the
/// second lowest bit does. So the lowest bit counts along one side, the second along the other, and
/// both reads take two turns:
///
///     8 across:  lanes 0  2  4 ... 14     4 across: the same, transposed
///                      1  3  5 ... 15
///                     16 18 20 ... 30
///                     17 19 21 ... 31
template <int kAcross_>
struct Fp32Lanes {
  static constexpr int kAcross = kAcross_, kDown = 32 / kAcross;
  static_assert(kAcross == 8 || kAcross == 4);
  static constexpr int kPitch = 4 * kAcross + 4;  ///< of a row of results; 4 against conflicts
  static constexpr int kFloats = kDown * kPitch;  ///< of a warp's rows

  static __device__ int far() { return static_cast<int>(threadIdx.x) % 16 / 2; }
  static __device__ int near() { return threadIdx.x % 32 / 16 * 2 + threadIdx.x % 2; }
  static __device__ int x() { return kAcross == 8 ? far() : near(); }
  static __device__ int y() { return kAcross == 8 ? near() : far(); }

  /// Stores four neighbours of each lane: in C, of this shape, the row is first_row + 4 y, and the
  /// first column first_col + 4 x. kAligned: C's rows are aligned to 16 bytes. Else, with
  /// kExchange, lanes exchange their fours through shared memory, kFloats of this warp alone, and
  /// store 4 kAcross neighbours of a row side by side. Without it they store what they have.
  template <bool kAligned, bool kExchange>
  static __device__ void store(float* of_warp, float4 four, const Fp32Operands& to, int first_row,
                               int y, int first_col, int x) {
    const int row = first_row + 4 * y, col = first_col + 4 * x;
    const ProductShape& shape = to.shape;
    float* const at = to.C + static_cast<int64_t>(row) * to.pitch_c + col;
    if constexpr (kAligned) {
      if (row < shape.rows && col < shape.cols) *reinterpret_cast<float4*>(at) = four;
    } else if constexpr (kExchange) {
      __syncwarp();  // all have read the rows before
      *reinterpret_cast<float4*>(of_warp + Fp32Lanes::y() * kPitch + 4 * Fp32Lanes::x()) = four;
      __syncwarp();
      constexpr int kCols = 4 * kAcross;
      const int lane = threadIdx.x % 32,
                own_col = first_col + 4 * (x - Fp32Lanes::x()) + lane % kCols;
#pragma unroll
      for (int r = 0; r < kDown; r += 32 / kCols) {
        const int down = r + lane / kCols, own_row = first_row + 4 * (y - Fp32Lanes::y() + down);
        if (own_row < shape.rows && own_col < shape.cols) {
          to.C[static_cast<int64_t>(own_row) * to.pitch_c + own_col] =
              of_warp[down * kPitch + lane % kCols];
        }
      }
    } else {
      const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (row < shape.rows && col + e < shape.cols) at[e] = values[e];
      }
    }
  }
};

}  // namespace operators::product
