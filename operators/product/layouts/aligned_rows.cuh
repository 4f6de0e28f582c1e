// Copies of matrices in aligned rows: the copy engine, and wide loads, need rows that begin at
// multiples of 16 bytes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "primitives/early_launch.cuh"
#include "primitives/launch.h"
#include "primitives/neighbours.cuh"

namespace operators::product {

/// What align_rows copies: `rows` rows, `cols` wide and dense, into rows of `stride` elements, a
/// multiple of 16 bytes.
template <typename T>
struct RowCopy {
  const T* from;
  T* to;
  int rows, cols, stride;
};
inline constexpr int kCopyThreads = 256;
/// How many words, of 16 bytes each, a thread loads before it stores the first.
inline constexpr int kCopiesAtOnce = 2;

/// The copies of a launch.
template <typename T, int kCount>
struct RowCopies {
  static constexpr int kOfWord = 16 / sizeof(T);  ///< elements

  RowCopy<T> of[kCount];

  /// Enough for the copy with the most words.
  dim3 blocks() const {
    int64_t words = 0;
    for (const RowCopy<T>& copy : of) {
      words = std::max(words, int64_t{copy.rows} * (copy.stride / kOfWord));
    }
    constexpr int64_t kOfBlock = int64_t{kCopyThreads} * kCopiesAtOnce;
    return dim3(static_cast<unsigned>(std::min<int64_t>(8192, (words + kOfBlock - 1) / kOfBlock)),
                kCount);
  }
};

/// A word, of which `left` elements exist, by loads of kWidth elements; zeros for the others.
template <int kWidth, typename T, int kOfWord>
__device__ void load_word(T (&word)[kOfWord], const T* from, int left) {
  constexpr int kLoad = kWidth < kOfWord ? kWidth : kOfWord;
#pragma unroll
  for (int i = 0; i < kOfWord; i += kLoad) {
    primitives::Neighbours<T, kLoad> pack = {};
    if (i < left) pack = *reinterpret_cast<const primitives::Neighbours<T, kLoad>*>(from + i);
#pragma unroll
    for (int j = 0; j < kLoad; ++j) word[i + j] = pack.values[j];
  }
}

/// Copies rows of matrices, blockIdx.y being which. What is beyond `cols` becomes 0. The words of a
/// copy are counted along its rows, one row after another, and threads beside each other have words
/// beside each other. So a warp's lines are read from the L2 cache once, although `from` is read by
/// narrow loads: with more than 16 bytes of a row for each thread, floats took three times as long.
template <typename T, int kCount>
__global__ void __launch_bounds__(kCopyThreads)
    align_rows(const __grid_constant__ RowCopies<T, kCount> copies) {
  constexpr int kOfWord = RowCopies<T, kCount>::kOfWord;
  constexpr int kOfBlock = kCopyThreads * kCopiesAtOnce;
  using Word = primitives::Neighbours<T, kOfWord>;
  primitives::start_next_kernel();
  primitives::wait_for_previous_kernel();
  const RowCopy<T>& copy = copies.of[blockIdx.y];
  const uint32_t across = max(1, copy.stride / kOfWord);  // a stride of 0: nothing to copy
  const int64_t words = int64_t{copy.rows} * across;
  // From a word of a thread to its next one it is so many rows, and words, further.
  const int rows_further = kCopyThreads / across, words_further = kCopyThreads % across;
  for (int64_t first = int64_t{blockIdx.x} * kOfBlock + threadIdx.x; first < words;
       first += int64_t{gridDim.x} * kOfBlock) {
    // 64 bits are divided ten times as slowly, and few matrices need them.
    int64_t row = words <= UINT32_MAX ? static_cast<uint32_t>(first) / across : first / across;
    int x = static_cast<int>(first - row * across);
    Word found[kCopiesAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kCopiesAtOnce; ++i) {
      const int col = x * kOfWord, left = row < copy.rows ? copy.cols - col : 0;
      const T* from = copy.from + row * copy.cols + col;
      if (copy.cols % 4 == 0) {
        load_word<4>(found[i].values, from, left);
      } else if (copy.cols % 2 == 0) {
        load_word<2>(found[i].values, from, left);
      } else {
        load_word<1>(found[i].values, from, left);
      }
      row += rows_further, x += words_further;
      if (x >= static_cast<int>(across)) ++row, x -= static_cast<int>(across);
    }
#pragma unroll
    for (int i = 0; i < kCopiesAtOnce; ++i) {
      const int64_t word = first + i * kCopyThreads;
      if (word < words) reinterpret_cast<Word*>(copy.to)[word] = found[i];
    }
  }
}

/// Launches align_rows, if there is something to copy; `early` as launch_clusters_on() has it.
/// Returns whether.
template <typename T, int kCount>
bool launch_align_rows(const RowCopies<T, kCount>& copies, cudaStream_t stream,
                       bool early = false) {
  const dim3 blocks = copies.blocks();
  if (blocks.x == 0) return false;
  primitives::launch_clusters_on(stream, align_rows<T, kCount>, 1, early, blocks, kCopyThreads, 0,
                                 copies);
  return true;
}

}  // namespace operators::product
