// The words of a portable kernel in TF32: a tile of 64 by 64 results that four warps share, and how
// they read its operands from shared memory. The instructions are in primitives/mma.cuh.
#pragma once

#include "primitives/mma.cuh"

namespace operators::clifford_connected {

using namespace primitives;
using namespace clifford;

// Four warps own a tile of 64 rows by 64 columns, each 32 by 32 of it, in the fragments of
// mma_m16n8k8_tf32: lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
constexpr int kTile = 64, kTileThreads = 128;
constexpr int kPairThreads = 2 * kTileThreads;  // a block with two such groups of warps
constexpr int kRowStride = kTile + 8;  // of tiles read by columns: neighbours in different banks
using TileSum = float[2][4][4];

struct TileWarp {
  int lane = threadIdx.x % 32, group = threadIdx.x / kTileThreads;
  int row = threadIdx.x / 64 % 2 * 32, col = threadIdx.x / 32 % 2 * 32;

  // A left operand of 16 x 8, from rows of kPieces pieces of 4 floats that change places so that 8
  // rows are in different banks. Lanes pass the addresses of 16 rows, each in two halves.
  template <int kPieces>
  __device__ static int place(int row, int piece) {
    const int turn = kPieces == 2 ? row / 4 % 2 : row % 8;
    return (row * kPieces + (piece ^ turn)) * 4;
  }
  template <int kPieces>
  __device__ void load_left(unsigned (&a)[4], const float* tile, int m, int k) const {
    ldmatrix_x4(a, tile + place<kPieces>(row + 16 * m + lane % 16, k / 4 + lane / 16));
  }
  // The right operand's 4 fragments of 8 columns, from memory that has it transposed.
  template <int kPieces>
  __device__ void load_right_transposed(unsigned (&b)[4][2], const float* tile, int k) const {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      unsigned four[4];
      const int at = col + 8 * j + lane % 8 + lane / 16 * 8;
      ldmatrix_x4(four, tile + place<kPieces>(at, k / 4 + lane / 8 % 2));
      b[j][0] = four[0], b[j][1] = four[1], b[j + 1][0] = four[2], b[j + 1][1] = four[3];
    }
  }
  // The same, and a left operand, from memory that has its 8 rows of k one after the other.
  __device__ void load_right(unsigned (&b)[4][2], const float* tile) const {
    const float* from = tile + lane % 4 * kRowStride + col + lane / 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      b[j][0] = __float_as_uint(from[8 * j]);
      b[j][1] = __float_as_uint(from[4 * kRowStride + 8 * j]);
    }
  }
  __device__ void load_left_transposed(unsigned (&a)[4], const float* tile, int m) const {
    const float* from = tile + lane % 4 * kRowStride + row + 16 * m + lane / 4;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      a[e] = __float_as_uint(from[e / 2 * 4 * kRowStride + e % 2 * 8]);
    }
  }
  __device__ static void multiply(float (&sum)[4][4], const unsigned (&a)[4],
                                  const unsigned (&b)[4][2]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) mma_m16n8k8_tf32(sum[j], a, b[j][0], b[j][1]);
  }
  // visit(row, col, value) for each of the lane's results; constant indices for the compiler.
  template <typename Visit>
  __device__ void for_results(const TileSum& sum, Visit visit) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          visit(row + 16 * m + e / 2 * 8 + lane / 4, col + 8 * j + lane % 4 * 2 + e % 2,
                sum[m][j][e]);
        }
      }
    }
  }
};

}  // namespace operators::clifford_connected
