// The words of Hopper's kernels: tiles in shared memory, as the copy engine leaves them and wgmma
// reads them, and sums in the registers of a warpgroup. Lesson 3 introduces LeftTile, RightTile,
// Box and Sum. The other words are for the operators and the bonuses. The instructions below all of
// these words are in the headers beside this one.
//
// For example, a warpgroup multiplies a 64 x 64 tile of A by a 64 x 256 tile of B, both of fp16:
//
//     LeftTile<half, 64> a           64 rows of 64 numbers, 128 bytes each: one Box, 8 KB
//     RightTile<half, 256> b         four Boxes of 64 rows and 64 columns, 32 KB
//     Sum<256> sum                   64 x 256 sums in fp32, 128 registers of each of 128 threads
//     sum.start_product(a.rows(0), b, add)
//                                    starts four wgmma. Each multiplies a slice: 16 of the
//                                    step's 64 of k
//
// wgmma reads a factor in one of two forms. They differ in how the factor lies along k, the
// dimension that is summed:
//
//     AlongK     a row in memory has numbers with different k: neighbours are k and k + 1
//     AcrossK    a row in memory is one k: neighbours have the same k
//
// For C = A B with row-major matrices a row of A has different k, so A is AlongK. A row of B is one
// k, so B is AcrossK. For elements of 1 and 4 bytes wgmma takes AlongK only.
#pragma once

#include "primitives/hopper/hopper.cuh"
#include "primitives/mma.cuh"
#include "primitives/neighbours.cuh"

namespace primitives {

/// How many elements 128 bytes are. A row of a box has so many, and a step of a product takes so
/// many of k. One wgmma takes a quarter of that, a *slice*: 32 bytes of k. With elements of 2 bytes
/// that is 64 of k in a step and 16 in a slice, with 4 bytes 32 and 8.
template <typename T>
inline constexpr int kLine = 128 / sizeof(T);
inline constexpr int kSlices = 4;

// For elements of 2 bytes.
inline constexpr int kBoxCols = kLine<uint16_t>;  // columns of a box
inline constexpr int kStepK = kLine<uint16_t>;    // columns of A, rows of B, of a step

#if HOPPER_CODE
/// A factor in shared memory each of whose rows is one k. wgmma reads it as a right factor, or,
/// transposed, as a left one. `first` is the descriptor of the first slice. A slice is 16 rows, so
/// the next one is 2048 bytes further on.
template <typename T>
struct AcrossK {
  using Element = T;
  static constexpr bool kRowMajor = true;  // as a right factor
  uint64_t first;
  __device__ uint64_t operand(int slice) const { return further(first, 128 * slice); }
  /// The same, beginning `row` rows further on, a multiple of 8.
  __device__ AcrossK from(int row) const { return {further(first, 8 * row)}; }
};

/// What wgmma reads of boxes that lie one after the other in shared memory. Each has 64 columns and
/// `rows` rows, a multiple of 8.
template <typename T>
__device__ inline AcrossK<T> across_k(const T* boxes, int rows) {
  static_assert(sizeof(T) == 2);
  return {descriptor_b(boxes, rows)};
}
#endif

/// kRows rows of 128 bytes, with elements of T (1, 2 or 4 bytes), swizzled in shared memory: what
/// one copy of the copy engine moves.
template <typename T, int kRows>
struct alignas(1024) Box {
  T elements[kRows * kLine<T>];

  __device__ T* row(int row) { return elements + row * kLine<T>; }
  __device__ const T* row(int row) const { return elements + row * kLine<T>; }
#if HOPPER_CODE
  /// What wgmma reads of this box, if each of its rows is one k and its elements have 2 bytes: 64
  /// columns, or 128 if another box follows, and so on.
  __device__ AcrossK<T> across_k() const { return primitives::across_k(elements, kRows); }
  __device__ uint64_t operand_b(int slice) const { return across_k().operand(slice); }
#endif
};

/// A thread's fragments of a left factor in the registers of a warpgroup: 64 rows, and kCount
/// slices of k.
template <typename T, int kCount = kSlices>
struct LeftFragments {
  using Element = T;
  uint32_t slices[kCount][4];
  __device__ const uint32_t (&operand(int slice) const)[4] { return slices[slice]; }
  /// For elements of 2 bytes. Register i of a slice has two of them, with neighbouring k. This is
  /// the k of the first one.
  __device__ static int k(int slice, int i) { return 16 * slice + i / 2 * 8 + threadIdx.x % 4 * 2; }
};

#if HOPPER_CODE
/// A tile in shared memory that is contiguous along k, from some row on. `first` is the descriptor
/// of the first slice; the next slice is 32 bytes further on.
template <typename T>
struct AlongK {
  using Element = T;
  static constexpr bool kRowMajor = false;  // as a right factor
  uint64_t first;
  __device__ uint64_t operand(int slice) const { return further(first, 2 * slice); }
  /// The same for the tile that lies behind this one, if both have kRows rows.
  template <int kRows>
  __device__ AlongK next_tile() const {
    return {further(first, 8 * kRows)};
  }
};
#endif

/// A tile of a product's left factor: kRows rows, and 128 bytes of k in each.
template <typename T, int kRows>
struct LeftTile : Box<T, kRows> {
#if HOPPER_CODE
  /// What wgmma reads: 64 rows, from `row` on. (In a transposed product this tile is the right
  /// factor. Then as many of its rows are read as the TransposedSum has.)
  __device__ AlongK<T> rows(int row) const { return {descriptor_a(this->row(row))}; }
  /// Loads 64 rows, from `row` on, to registers: each thread its fragments of a left factor.
  __device__ LeftFragments<T> load_fragments(int row = 0) const {
    static_assert(sizeof(T) == 2);
    LeftFragments<T> fragments;
    row += threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
#pragma unroll
    for (int k = 0; k < kSlices; ++k) {
      ldmatrix_x4(fragments.slices[k],
                  &this->elements[swizzled(row, 2 * k + threadIdx.x % 32 / 16)]);
    }
    return fragments;
  }
  /// The same for the tile's transpose: the tile's 64 columns become the rows of the left factor.
  __device__ LeftFragments<T> load_transposed_fragments() const {
    static_assert(sizeof(T) == 2 && kRows == kLine<T>);
    LeftFragments<T> fragments;
    const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8;
    const int piece = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < kSlices; ++k) {
      ldmatrix_x4_trans(fragments.slices[k], &this->elements[swizzled(16 * k + row, piece)]);
    }
    return fragments;
  }
#endif
};

/// A tile of a left factor with elements of 4 bytes, where memory has the factor's transpose: a row
/// in memory is one k, and its elements are rows of the factor. The tile has 32 of k, and each of
/// its boxes has 32 rows of the factor. With 64 rows, for example, it is two boxes of 32 x 32.
///
/// In TF32 wgmma cannot read such a tile, so the factor goes through registers. Then any row of the
/// tile may be any row of the product, as long as the result is read in the same order. Of each 64
/// rows a thread has two. We give it two that are neighbours in memory, so that one load of 8 bytes
/// brings both. Place says which two, such that no two lanes of a load meet in a bank. Thread 0 has
/// rows 0 and 1, for example, and thread 4 has rows 2 and 3.
template <int kRows>
struct TransposedLeftTile {
  static constexpr int kBoxRows = kLine<float>;
  static_assert(kRows % 64 == 0);
  Box<float, kLine<float>> boxes[kRows / kBoxRows];

  /// Which of 64 rows element i of a thread's Sum belongs to: with such a left factor, ask here and
  /// not Sum::row(i).
  __device__ static int row(int i) {
    const Place own;
    return own.box * kBoxRows + 4 * own.piece + 2 * own.half + i / 2 % 2;
  }
#if HOPPER_CODE
  /// Loads a thread's fragments of 64 rows, from `row` on.
  __device__ LeftFragments<float> load_fragments(int row = 0) const {
    const Place own;
    const int t = own.thread % 4;
    const auto& box = boxes[row / kBoxRows + own.box];
    const float* const near = box.row(t) + 4 * (own.piece ^ t) + 2 * own.half;
    const float* const far = box.row(t + 4) + 4 * (own.piece ^ t ^ 4) + 2 * own.half;
    LeftFragments<float> fragments;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      uint32_t(&to)[4] = fragments.slices[slice];
      const uint2 a = *reinterpret_cast<const uint2*>(near + 8 * kBoxRows * slice);
      const uint2 b = *reinterpret_cast<const uint2*>(far + 8 * kBoxRows * slice);
      to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y;
    }
    return fragments;
  }
#endif

 private:
  /// Where a thread's two rows are: in which box, in which piece of 16 bytes of a row of the box,
  /// in which half of this piece. A warp has 16 rows, and they are four of a box's eight pieces.
  /// The 8 lanes with the same thread % 4 take both halves of these four pieces; the four lanes
  /// beside each other have different k, which swizzling puts in different banks.
  struct Place {
    int thread = threadIdx.x % 128, g = thread % 32 / 4, box = thread / 64;
    int piece = thread / 32 % 2 * 2 + g / 2 % 2 * 4 + g / 4, half = g % 2;
  };
};

/// A tile of a right factor whose columns are contiguous in memory, as wgmma wants factors of 1 and
/// 4 bytes to be: kCols columns, and 128 bytes of k in each.
template <typename T, int kCols>
struct ColumnTile : Box<T, kCols> {
#if HOPPER_CODE
  __device__ AlongK<T> columns(int col = 0) const { return {descriptor_a(this->row(col))}; }
#endif
};

/// A tile of a row-major right factor, with elements of 2 bytes: 64 of k and kCols columns, in
/// boxes of 64 by 64.
template <typename T, int kCols>
struct RightTile {
  using Element = T;
  static constexpr bool kRowMajor = true;
  static constexpr int kBoxes = (kCols + kBoxCols - 1) / kBoxCols;
  Box<T, kStepK> boxes[kBoxes];
#if HOPPER_CODE
  /// What wgmma reads: all columns, and the 16 of k of this slice. The next slice is 2048 bytes
  /// further on.
  __device__ uint64_t operand(int slice) const {
    return further(descriptor_b(boxes, kStepK), 128 * slice);
  }
#endif
};

#if HOPPER_CODE
/// Multiplies one slice: sum (64 rows) = left x right, plus the old sum if `add`. `left` is AlongK,
/// AcrossK or LeftFragments; `right` is RightTile, AcrossK or AlongK. Elements are half,
/// __nv_bfloat16, float (taken as TF32), or __nv_fp8_e4m3.
template <class Left, class Right, int kCount>
__device__ __forceinline__ void multiply_slice(float (&sum)[kCount], const Left& left,
                                               const Right& right, int slice, bool add) {
  using T = typename Left::Element;
  static_assert(std::is_same_v<T, typename Right::Element>);
  if constexpr (sizeof(T) != 2) {
    static_assert(!Right::kRowMajor && !std::is_same_v<Left, AcrossK<T>>,
                  "wgmma takes 1 and 4 bytes only contiguous along k");
    if constexpr (std::is_same_v<T, float>) {
      wgmma_tf32(sum, left.operand(slice), right.operand(slice), add);
    } else {
      static_assert(std::is_same_v<T, __nv_fp8_e4m3>);
      wgmma_fp8(sum, left.operand(slice), right.operand(slice), add);
    }
  } else if constexpr (!std::is_same_v<decltype(left.operand(slice)), uint64_t>) {  // registers
    static_assert(Right::kRowMajor);
    wgmma<T>(sum, left.operand(slice), right.operand(slice), add);
  } else {
    constexpr bool kTransposed = std::is_same_v<Left, AcrossK<T>>;
    wgmma<T, kTransposed, !Right::kRowMajor>(sum, left.operand(slice), right.operand(slice), add);
  }
}
#endif

/// A warpgroup's sum of 64 rows by kCols columns, in fp32, in its registers. Element i of a thread
/// is the one at row(i), col(i). For example, thread 5 has in row 1 columns 2 and 3 (its elements 0
/// and 1), 10 and 11 (elements 4 and 5), and so on, and in row 9 the same columns (elements 2 and
/// 3, 6 and 7, and so on).
template <int kCols>
struct Sum {
  float elements[kCols / 2];

  __device__ static constexpr int size() { return kCols / 2; }
  __device__ float& element(int i) { return elements[i]; }
  __device__ float element(int i) const { return elements[i]; }
  __device__ static int row(int i) {
    const int thread = threadIdx.x % 128;
    return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
  }
  __device__ static int col(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

#if HOPPER_CODE
  /// Starts the product of 64 rows, `left`, by `right`, kCount slices of each, as one group of
  /// wgmma. It is added to the sum if `add`; otherwise it takes the sum's place. See
  /// multiply_slice().
  template <int kCount = kSlices, class Left, class Right>
  __device__ __forceinline__ void start_product(const Left& left, const Right& right, bool add) {
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kCount; ++slice) {
      multiply_slice(elements, left, right, slice, add || slice > 0);
    }
    wgmma_commit();
  }

  /// Writes the sum's columns from `col` on, 64 at most, into `box`, from the box's column `at` on.
  /// `at` is a multiple of 16. All that is written has to fit into the box's 64 columns. What is
  /// written for element i is f(i), rounded to T. f(i) may use any of the thread's elements.
  template <typename T, typename F>
  __device__ static void store(Box<T, 64>& box, int col, F f, int at = 0) {
    const int thread = threadIdx.x % 128;
    // Matrix m of a store_matrices has rows 8 (m % 2) to 8 (m % 2) + 7 of the warp's 16, and
    // columns 8 (m / 2) to 8 (m / 2) + 7 of 16.
    const int row = thread / 32 * 16 + thread % 16, piece = thread % 32 / 16;
#pragma unroll
    for (int c = 0; c < kBoxCols; c += 16) {
      if (col + c >= kCols) break;
      uint32_t registers[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int i = (col + c) / 2 + 2 * m;
        registers[m] = pack2<T>(f(i), f(i + 1));
      }
      store_matrices(&box.elements[swizzled(row, (at + c) / 8 + piece)], registers);
    }
  }

  /// Loads a matrix with elements of 2 bytes from `box`, from its column `at` on, a multiple of 16.
  /// pairs[i] are then the elements 2 i and 2 i + 1 of a Sum.
  template <typename T>
  __device__ static void load_pairs(uint32_t (&pairs)[kCols / 4], const Box<T, 64>& box, int at) {
    static_assert(sizeof(T) == 2 && kCols % 16 == 0);
    const int thread = threadIdx.x % 128;
    const int row = thread / 32 * 16 + thread % 16, piece = thread % 32 / 16;
#pragma unroll
    for (int c = 0; c < kCols; c += 16) {
      ldmatrix_x4(reinterpret_cast<uint32_t(&)[4]>(pairs[c / 4]),
                  &box.elements[swizzled(row, (at + c) / 8 + piece)]);
    }
  }
#endif
};

#if HOPPER_CODE
/// Starts the products of several left factors by the same right factor, each for a sum of its own,
/// as one group.
template <int kCount, int kCols, class Left, class Right>
__device__ __forceinline__ void start_products(Sum<kCols> (&sums)[kCount],
                                               const Left (&left)[kCount], const Right& right,
                                               bool add) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      multiply_slice(sums[i].elements, left[i], right, slice, add || slice > 0);
    }
  }
  wgmma_commit();
}
#endif

/// A warpgroup's sum of kRows rows by 64 kCount columns, which wgmma computes transposed: C^T = B^T
/// A^T. Why? A left factor always has 64 rows, but a right factor may have any multiple of 8
/// columns, up to 256. Transposed, the rows of A are the columns of the right factor, so kRows may
/// be any multiple of 8. The left factors are 64 columns of B each, transposed. For example, 40
/// rows of C by 128 columns are TransposedSum<40, 2>: each of two products has 64 columns of B as
/// the rows of its left factor, and 40 rows of A as the columns of its right factor.
template <int kRows, int kCount>
struct TransposedSum {
  float elements[kCount][kRows / 2];  // elements[j]: of 64 columns, as in Sum, but transposed

  __device__ static constexpr int size() { return kCount * kRows / 2; }
  __device__ float& element(int i) { return elements[i / (kRows / 2)][i % (kRows / 2)]; }
  __device__ float element(int i) const { return elements[i / (kRows / 2)][i % (kRows / 2)]; }
  /// The row and the column of C that element i of a thread is in.
  __device__ static int row(int i) { return Sum<kRows>::col(i % (kRows / 2)); }
  __device__ static int col(int i) {
    return i / (kRows / 2) * kBoxCols + Sum<kRows>::row(i % (kRows / 2));
  }

#if HOPPER_CODE
  /// Starts the product of kRows rows of A, `rows`, by 64 kCount columns of `b`, from its box
  /// number `box` on. Added or not, as in Sum.
  template <typename T, int kCols>
  __device__ void start_product(const AlongK<T>& rows, const RightTile<T, kCols>& b, int box,
                                bool add) {
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        wgmma<T, true, true>(elements[j], b.boxes[box + j].operand_b(slice), rows.operand(slice),
                             add || slice > 0);
      }
    }
    wgmma_commit();
  }

  /// Writes kBoxRows rows, from `first` on, of the 64 columns of elements[j] into `box`, rounded to
  /// T. Each matrix of 8 x 8 is transposed back on the way.
  template <typename T, int kBoxRows>
  __device__ void store(Box<T, kBoxRows>& box, int first, int j) const {
    // Matrix m of a store_matrices has columns 8 (m % 2) to 8 (m % 2) + 7 of the warp's 16, and
    // rows 8 (m / 2) to 8 (m / 2) + 7 of 16.
    const int thread = threadIdx.x % 128, row = thread % 8;
    const int piece = thread / 32 * 2 + thread / 8 % 2;
    const auto put = [&]<int kMatrices>(int at, int to_row) {
      uint32_t registers[kMatrices];
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        const int i = (first + at) / 2 + 2 * m;
        registers[m] = pack2<T>(elements[j][i], elements[j][i + 1]);
      }
      store_matrices<true>(&box.elements[swizzled(at + to_row, piece)], registers);
    };
#pragma unroll
    for (int at = 0; at + 16 <= kBoxRows; at += 16) {
      put.template operator()<4>(at, thread % 32 / 16 * 8 + row);
    }
    if (kBoxRows % 16 != 0) put.template operator()<2>(kBoxRows - 8, row);
  }
#endif
};

}  // namespace primitives
