// Tiles and a warp's fragments for products of floats, in TF32 or 3xTF32, by the pipeline of
// mma_tiles.cuh. A step has 32 of k, where one of 16-bit numbers has 64, and one mma.sync takes 8
// of k, where it takes 16 of these. 16 bytes are four floats.
//
// ldmatrix loads a factor in which neighbours along k lie beside each other. But it cannot
// transpose floats, and in a row-major B the elements beside each other are neighbouring columns of
// C. So we compute C^T = B^T A^T, where B is the left factor. Of a left factor a thread holds two
// rows for each of two k. We may choose which two rows these are: here two neighbouring columns of
// C. So a thread loads two elements of B by one load of 8 bytes.
#pragma once

#include <cstdint>

#include "operators/product/portable/mma_tiles.cuh"
#include "operators/product/split_tf32.cuh"

namespace operators::product {

/// What follows an element of a factor in memory: the next one along k, or that of the next row (of
/// A) or column (of B) of C.
enum class Beside { k, results };

/// What is multiplied: elements, which are in TF32; elements that are rounded to TF32; or two
/// numbers in TF32 of each (3xTF32, see split_tf32.cuh).
enum class Takes { tf32, rounded, split };

template <class Tile>
class Tf32Fragments;

/// A tile of kBM rows and kBN columns of C. But a warp's sums are those of C^T: kSumRows counts 16
/// columns of C, and kSumCols 8 rows of C.
template <int kBM, int kBN, int kRowsOfWarps, int kColsOfWarps, int kStagesAhead, int kBlocks,
          Takes kWhat, Beside kBesideA = Beside::k, Beside kBesideB = Beside::results>
struct Tf32MmaTile : MmaTile<kBM, kBN, 32, kRowsOfWarps, kColsOfWarps, kStagesAhead, kBlocks, 4> {
  static constexpr Beside kA = kBesideA, kB = kBesideB;
  static constexpr Takes kTakes = kWhat;
  using OwnFragments = Tf32Fragments<Tf32MmaTile>;
  static constexpr int kProducts = kTakes == Takes::split ? 3 : 1;
  static constexpr int kSumRows = kBN / kColsOfWarps / 16, kSumCols = kBM / kRowsOfWarps / 8;

  /// The place of an element in its tile, in floats. A row of the tile in memory has 32 of k
  /// (Beside::k), or all elements of one k. The exclusive or keeps loads free of bank conflicts.
  /// With Beside::k, ldmatrix reads 16 bytes of eight rows at once: of A's tile rows that follow
  /// each other, of B's every second one of 16. Else a warp reads eight floats of each of four k.
  __device__ static int place_a(int row, int k) {
    return kA == Beside::k ? row * 32 + (k ^ 4 * (row % 8)) : k * kBM + (row ^ 8 * (k % 4));
  }
  __device__ static int place_b(int k, int col) {
    return kB == Beside::k ? col * 32 + (k ^ 4 * (col / 2 % 8)) : k * kBN + (col ^ 8 * (k % 4));
  }
  /// See MmaTile.
  __device__ static int turned(int place, int rows) { return place ^ 8 * (rows % 4); }
};

/// A warp's fragments of such a tile.
template <class Tile>
class Tf32Fragments {
 public:
  static constexpr int kDepth = 8, kRows = Tile::kSumRows;

  /// Loads the fragments for 8 of k, from `k` on: of B those of columns 16 i to 16 i + 15 of the
  /// warp, and of A share number i of kRows equal ones.
  template <int kBuffer>
  __device__ __forceinline__ void load(int i, const float* stage, int k) {
    if constexpr (Tile::kB == Beside::k) {
      ldmatrix_x4(b[kBuffer][i], stage + (b_lane ^ k) + i * 16 * 32);
    } else {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const float* const from =
            stage + (b_lane ^ i % 2 * 16) + (k + 2 * e) * Tile::BN + i / 2 * 32;
        const uint2 pair = *reinterpret_cast<const uint2*>(from);
        b[kBuffer][i][e] = pair.x, b[kBuffer][i][e + 1] = pair.y;
      }
    }
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      if (j * kRows / kCols != i) continue;
      if constexpr (Tile::kA == Beside::k) {
        ldmatrix_x4(a[kBuffer][j], stage + (a_lane ^ k) + j * 16 * 32);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = j % 2 * 16 + e / 2 * 8;
          a[kBuffer][j][e] =
              __float_as_uint(stage[(a_lane ^ row) + (k + e % 2 * 4) * Tile::BM + j / 2 * 32]);
        }
      }
    }
  }

  /// Rounds all but the last share of buffer 0. (multiply() rounds each share one call before it is
  /// used.)
  __device__ __forceinline__ void begin() {
    if constexpr (Tile::kTakes == Takes::rounded) {
#pragma unroll
      for (int i = 0; i < kRows - 1; ++i) round_part<0>(i);
    }
  }

  /// Multiplies 16 columns of C by all rows of the warp: forwards if i is even, else backwards. So
  /// where one call ends and the next one begins, both use the same fragment of A.
  template <int kBuffer, class Sum>
  __device__ __forceinline__ void multiply(int i, Sum& sum) {
    if constexpr (Tile::kTakes == Takes::split) {
      multiply_split(i, a[kBuffer], b[kBuffer][i]);
    } else {
      // Rounds what was loaded before the previous multiply(): it has arrived by now.
      if constexpr (Tile::kTakes == Takes::rounded) {
        constexpr int kOther = 1 - kBuffer;
        i > 0 ? round_part<kOther>(i - 1) : round_part<kBuffer>(kRows - 1);
      }
#pragma unroll
      for (int forth = 0; forth < 2 * kCols; ++forth) {
        const int j = i % 2 == 0 ? forth : 2 * kCols - 1 - forth;
        mma_m16n8k8_tf32(sum[i][j], b[kBuffer][i], a[kBuffer][j / 2][j % 2 * 2],
                         a[kBuffer][j / 2][j % 2 * 2 + 1]);
      }
    }
  }

  /// Tensor cores truncate what they accumulate, and over a long sum these errors add up. So in
  /// 3xTF32 they sum only one step, and the CUDA cores add its result to the sum so far, rounded to
  /// nearest.
  template <class Sum>
  __device__ __forceinline__ void end_step(Sum& sum) {
    if constexpr (Tile::kTakes == Takes::split) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * kCols; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][j][e] += of_step[i][j][e], of_step[i][j][e] = 0;
        }
      }
    }
  }

 private:
  static constexpr int kCols = Tile::kSumCols / 2;

  /// Rounds what load<kBuffer>(i) has loaded.
  template <int kBuffer>
  __device__ __forceinline__ void round_part(int i) {
    round(b[kBuffer][i]);
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      if (j * kRows / kCols == i) round(a[kBuffer][j]);
    }
  }
  __device__ __forceinline__ static void round(unsigned (&fragment)[4]) {
#pragma unroll
    for (unsigned& e : fragment) e = to_tf32(__uint_as_float(e));
  }

  /// `right` is of A, and `left` of B. An infinity of B times a_low, which may be 0, would be NaN.
  /// So for this product it is replaced by 0. (An infinity of A may still make its row of C NaN.)
  __device__ __forceinline__ void multiply_split(int i, unsigned (&right)[kCols][4],
                                                 const unsigned (&left)[4]) {
    if (i == 0) {
#pragma unroll
      for (int e = 0; e < 4 * kCols; ++e) {
        const SplitTf32 split = split_near(__uint_as_float(right[e / 4][e % 4]));
        right[e / 4][e % 4] = split.high, a_low[e / 4][e % 4] = split.low;
      }
    }
    unsigned high[4], low[4], finite[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const SplitTf32 split = split_near(__uint_as_float(left[e]));
      high[e] = split.high, low[e] = split.low;
      finite[e] = is_infinite(split.high) ? 0 : split.high;
    }
    const auto add = [&](const unsigned(&of_b)[4], const unsigned(&of_a)[kCols][4]) {
#pragma unroll
      for (int j = 0; j < 2 * kCols; ++j) {
        mma_m16n8k8_tf32(of_step[i][j], of_b, of_a[j / 2][j % 2 * 2], of_a[j / 2][j % 2 * 2 + 1]);
      }
    };
    add(finite, a_low), add(low, right), add(high, right);  // the smallest products first
  }

  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int row0 = warp / Tile::kWarpsN * Tile::WM, col0 = warp % Tile::kWarpsN * Tile::WN;
  const int a_lane = Tile::kA == Beside::k
                         ? Tile::place_a(row0 + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 4)
                         : Tile::place_a(row0 + lane / 4, lane % 4);
  const int b_lane =
      Tile::kTileA + (Tile::kB == Beside::k
                          ? Tile::place_b(lane / 16 * 4, col0 + lane % 8 * 2 + lane / 8 % 2)
                          : Tile::place_b(lane % 4, col0 + lane / 4 * 2));
  static constexpr bool kSplit = Tile::kTakes == Takes::split;
  unsigned a[2][kCols][4], b[2][kRows][4];
  unsigned a_low[kSplit ? kCols : 1][4];  // what a's elements lack, while a is multiplied
  float of_step[kSplit ? kRows : 1][2 * kCols][4] = {};  // sums
};

/// Calls visit(row, col, pair) for a thread's sums of such a tile, which are pairs of neighbours in
/// a row of C. The warp's sums begin at (row0, col0) of C.
template <int kRows16, int kCols8, typename Visit>
__device__ __forceinline__ void for_tf32_pairs(const float (&sum)[kRows16][kCols8][4], int row0,
                                               int col0, Visit visit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kCols8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int i = 0; i < kRows16; ++i) {
        visit(row0 + 8 * j + lane % 4 * 2 + e, col0 + 16 * i + lane / 4 * 2,
              make_float2(sum[i][j][e], sum[i][j][e + 2]));
      }
    }
  }
}

/// The epilogue that stores the sums in C (rows, cols), whose rows are c_stride floats apart.
struct Tf32Store {
  float* C;
  int64_t c_stride;
  int rows, cols;

  template <class Sum>
  __device__ __forceinline__ void operator()(const Sum& sum, int row0, int col0) const {
    const bool pairs = c_stride % 2 == 0;
    for_tf32_pairs(sum, row0, col0, [&](int row, int col, float2 pair) {
      if (row >= rows || col >= cols) return;
      float* const to = C + row * c_stride + col;
      if (pairs && col + 1 < cols) {
        *reinterpret_cast<float2*>(to) = pair;
      } else {
        to[0] = pair.x;
        if (col + 1 < cols) to[1] = pair.y;
      }
    });
  }
};

}  // namespace operators::product
