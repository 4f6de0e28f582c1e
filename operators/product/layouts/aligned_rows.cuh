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

  /// The grid. Its x is enough for the copy with the most words, but at most 8192; y is the copy.
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

/// Loads a word by loads of kWidth elements. `left` of its elements exist; the others become 0.
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

/// Copies rows of matrices. Blocks with blockIdx.y = i make copy i. Beyond `cols` there will be 0.
/// Words of 16 bytes are numbered along the rows of the copy, one row after another. Neighbouring
/// threads own neighbouring words. So the loads of a warp, which may be as narrow as one element,
/// fall into few lines, and each line is read from the L2 cache once. When each thread had more
/// than 16 bytes of a row, floats took three times as long. A thread loads kCopiesAtOnce words,
/// kCopyThreads words apart, before it stores the first: so it waits for memory once.
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
  // A thread's next word is so many rows, and so many words of a row, further on.
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

/// Launches align_rows if there is something to copy, and returns whether there is. `early` is what
/// it is for launch_clusters_on().
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
