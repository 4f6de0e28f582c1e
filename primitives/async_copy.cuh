// Copies from global to shared memory that run while the thread goes on: cp.async.
//
// A thread starts copies, closes a group of them by copy_async_commit(), and later waits until all
// but its newest groups have arrived. It waits for its own copies only: a barrier has to follow
// before other threads read them. Below compute capability 8.0 the same calls copy at once.
#pragma once

#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "primitives/mma.cuh"

namespace primitives {

/// Copies kBytes (4, 8 or 16) to shared memory. Both addresses are multiples of kBytes. If not
/// `inside`, it writes zeros in their place; then `from_global` is not read and may point anywhere.
/// PTX ISA, "Data Movement and Conversion Instructions: cp.async" (its operand ignore-src; with
/// src-size, a number of bytes, each copy would take some five instructions more).
///
/// (`asm` writes an instruction of PTX, the GPU's assembly language. "r" is a register of 32 bits,
/// "l" one of 64, "n" a constant.)
///
/// With kOnce the L2 cache drops what it has fetched before anything else ("createpolicy").
template <int kBytes, bool kOnce = false>
__device__ inline void copy_async(void* to_shared, const void* from_global, bool inside) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(to_shared));
  const int outside = !inside;
  if constexpr (kOnce) {
    static_assert(kBytes == 16);
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "{\n"
        ".reg .pred ignore;\n"
        "setp.ne.s32 ignore, %2, 0;\n"
        "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, ignore, %3;\n"
        "}" ::"r"(to),
        "l"(from_global), "r"(outside), "l"(policy));
  } else if constexpr (kBytes == 16) {  // .cg: through the L2 cache only
    asm volatile(
        "{\n"
        ".reg .pred ignore;\n"
        "setp.ne.s32 ignore, %2, 0;\n"
        "cp.async.cg.shared.global [%0], [%1], 16, ignore;\n"
        "}" ::"r"(to),
        "l"(from_global), "r"(outside));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred ignore;\n"
        "setp.ne.s32 ignore, %3, 0;\n"
        "cp.async.ca.shared.global [%0], [%1], %2, ignore;\n"
        "}" ::"r"(to),
        "l"(from_global), "n"(kBytes), "r"(outside));
  }
#else
  // With nothing to copy the library's function would still want a source that may be read.
  __pipeline_memcpy_async(to_shared, inside ? from_global : to_shared, kBytes, inside ? 0 : kBytes);
#endif
}

/// copy_async() of 16 bytes, if `wanted`, and without a branch: other instructions may stand
/// between several of these.
__device__ inline void copy_async_if(bool wanted, void* to_shared, const void* from_global,
                                     bool inside) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(to_shared));
  asm volatile(
      "{\n"
      ".reg .pred ignore, wanted;\n"
      "setp.ne.s32 ignore, %2, 0;\n"
      "setp.ne.s32 wanted, %3, 0;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16, ignore;\n"
      "}" ::"r"(to),
      "l"(from_global), "r"(static_cast<int>(!inside)), "r"(static_cast<int>(wanted)));
#else
  if (wanted) copy_async<16>(to_shared, from_global, inside);
#endif
}

/// Copies 16 bytes as copy_async() does, of which the first `there` come from global memory, 0 to
/// 16. The others become zeros, and are not read.
__device__ inline void copy_async_part(void* to_shared, const void* from_global, int there) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(to_shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from_global),
               "r"(there));
#else
  __pipeline_memcpy_async(to_shared, there > 0 ? from_global : to_shared, 16,
                          static_cast<size_t>(16 - there));
#endif
}

/// Asks the L2 cache to fetch the sector of global memory with this address, and goes on (PTX ISA,
/// "prefetch").
__device__ inline void prefetch_to_cache([[maybe_unused]] const void* from_global) {
#ifndef CUDA_CPU
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from_global)));
#endif
}

__device__ inline void copy_async_commit() { __pipeline_commit(); }

/// Waits until at most kNewest groups are still under way.
template <int kNewest>
__device__ inline void copy_async_wait() {
  __pipeline_wait_prior(kNewest);
}

/// A ring of kStages stages in shared memory, which all threads of a block fill by copies, as
/// lesson 2's `async` does. The copies are kStages - 1 steps ahead of what the block reads. The
/// stage of a step is number step % kStages. copy(step) starts the calling thread's copies of a
/// step, and does nothing beyond the last step.
template <int kStages, class Copy>
class CopiesAhead {
 public:
  __device__ explicit CopiesAhead(const Copy& copy) : copy_(copy) {
    for (int step = 0; step < kStages - 1; ++step) start(step);
  }

  /// Waits for the next step, and returns its number. Two things are true then: what all threads
  /// have copied for this step is there, and all threads have read the stage of the step before. So
  /// that stage may be filled again, and the copies that start now do it.
  __device__ int next() {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    start(step_ + kStages - 1);
    return step_++;
  }

 private:
  // A group is closed where nothing is copied, too, so that the count of groups is right.
  __device__ void start(int step) {
    copy_(step);
    copy_async_commit();
  }

  const Copy& copy_;
  int step_ = 0;
};
template <int kStages, class Copy>
__device__ CopiesAhead<kStages, Copy> copies_ahead(const Copy& copy) {
  return CopiesAhead<kStages, Copy>(copy);
}

/// Copies a tile of kRows x kCols of the matrix `from` (row-major, rows x cols), from (row0, col0)
/// on, to shared memory. There its rows are kStride elements apart. What is outside of the matrix
/// becomes zero. All kThreads threads of the block call it. With kAligned (cols is a multiple of 8)
/// it only starts copies, of 16 bytes each. Otherwise it copies at once, element by element.
template <int kRows, int kCols, int kStride, int kThreads, bool kAligned>
__device__ void copy_tile(half* to, const half* from, int row0, int col0, int rows, int cols) {
  constexpr int kWidth = kAligned ? 8 : 1;  // elements per copy
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kCols / kWidth; i += kThreads) {
    const int row = i / (kCols / kWidth), col = i % (kCols / kWidth) * kWidth;
    const bool inside = row0 + row < rows && col0 + col < cols;
    const half* at = from + static_cast<size_t>(row0 + row) * cols + col0 + col;
    if constexpr (kAligned) {
      copy_async<16>(to + row * kStride + col, at, inside);
    } else {
      to[row * kStride + col] = inside ? *at : __float2half_rn(0);
    }
  }
}

/// Starts the copy of a tile of kRows x kCols of the matrix `from` (row-major, rows x cols,
/// elements of 16 bits, cols a multiple of 8), from (row0, col0) on, to shared memory. There it
/// lies as swizzle<kCols>() says. What is outside of the matrix becomes zero. kThreads threads call
/// it, of which this one is number `thread`. kOnce: see copy_async().
template <int kRows, int kCols, int kThreads, bool kOnce = false, typename T>
__device__ void copy_swizzled(T* to, const T* from, int64_t row0, int col0, int64_t rows, int cols,
                              unsigned thread = threadIdx.x) {
  static_assert(sizeof(T) == 2);
  // A thread's pieces of 16 bytes are all in the same columns, kStep rows apart. So each address is
  // the one before plus a constant. kStep is a multiple of 8, so these rows are swizzled alike, and
  // a piece's place in the tile is the one before plus a constant, too.
  constexpr int kPieces = kCols / 8, kStep = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0 && (kStep % 8 == 0 || kStep >= kRows));
  const int row = thread / kPieces, col = thread % kPieces * 8;
  const T* piece = from + (row0 + row) * cols + col0 + col;
  T* at = to + swizzle<kCols>(row, col);
  // How many rows there are from the thread's first one on.
  const int64_t there = col0 + col < cols ? rows - row0 - row : 0;
  const int inside = there < kRows ? static_cast<int>(there) : kRows;
#pragma unroll
  for (int r = 0; r < kRows; r += kStep) {
    if (kRows % kStep == 0 || r + row < kRows) {
      copy_async<16, kOnce>(at + r * kCols, piece, r < inside);
    }
    piece += static_cast<int64_t>(kStep) * cols;
  }
}

}  // namespace primitives
