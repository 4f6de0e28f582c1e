// The steps of a tile of C in fp32: how its factors get into shared memory, and are multiplied.
//
// What a multiprocessor does beside multiplying decides how fast that is: it starts four
// instructions in a cycle, of which a multiply-add of a warp is one. So a step has few others:
//
//   - Where to copy from and to is kept, not worked out: a thread has a pointer into each of its
//     rows of A, and one into B, which it moves on, and an address in shared memory, to which the
//     places of a stage are constants.
//   - The step that has fewer k than the others is the first one. It is copied before the loop, so
//     the loop copies without a question about k.
//   - Nothing checks for the edges of the matrix. A row or column outside is replaced by one
//     inside, since what it contributes to is never stored.
//   - A thread's copies stand in groups between multiplications. All at once they would wait for
//     each other, and the compiler puts three instructions that do nothing before each group.
#pragma once

#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "operators/product/fp32/lanes.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/launch.h"

namespace operators::product {

using namespace primitives;

/// A place in shared memory, as instructions take it. A loop that starts many copies adds to one:
/// to convert each pointer anew would take it as many instructions as all else that it copies with.
class SharedPlace {
 public:
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  /// The `asm` writes nothing. What it may have changed the compiler cannot work out anew.
  __device__ explicit SharedPlace(void* at)
      : at_(static_cast<unsigned>(__cvta_generic_to_shared(at))) {
    asm volatile("" : "+r"(at_));
  }
#else
  __device__ explicit SharedPlace(void* at) : at_(static_cast<char*>(at)) {}
#endif
  __device__ SharedPlace operator+(int bytes) const {
    SharedPlace sum = *this;
    sum.at_ += bytes;
    return sum;
  }
  /// Starts a copy of kBytes to here, as copy_async() does.
  template <int kBytes>
  __device__ void copy_from(const void* from_global) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if constexpr (kBytes == 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at_), "l"(from_global));
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at_), "l"(from_global),
                   "n"(kBytes));
    }
#else
    __pipeline_memcpy_async(at_, from_global, kBytes);
#endif
  }

 private:
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  unsigned at_;
#else
  char* at_;
#endif
};

/// Moves a pointer on, by a number that the compiler does not know it came from: of several such
/// moves it would work out each place anew, by a multiplication.
__device__ __forceinline__ void move_fp32(const float*& pointer, int64_t by) {
  pointer += by;
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(pointer));
#endif
}

/// Adds the products of steps `begin` to `end` of the tile of C at (row0, col0) to a thread's sums;
/// of a Tile whose threads are several slices those of the slice's part of each step. kAligned: B
/// is copied by 16 bytes, else by 4, as A is, since that is transposed on the way.
///
/// A warp copies 8 k of 4 rows of A at once, which lie on 32 banks.
template <class Tile, bool kAligned>
__device__ __forceinline__ void add_fp32_steps(float* tiles, const Fp32Operands& of, int row0,
                                               int col0, int begin, int end,
                                               float (&sum)[Tile::TM][Tile::TN]) {
  constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, TM = Tile::TM, TN = Tile::TN;
  constexpr int kStages = Tile::kStages, kStage = Tile::kTileA + Tile::kTileB;
  constexpr int kStrideA = Tile::kStrideA, kThreads = Tile::kThreads;
  constexpr int kRowsA = kThreads / 8, kOfRows = BM / kRowsA, kOfA = kOfRows * (BK / 8);
  constexpr int kWidth = kAligned ? 4 : 1, kLanesB = BN / kWidth, kRowsB = kThreads / kLanesB;
  static_assert(kLanesB <= kThreads && BK % kRowsB == 0 && BM % kRowsA == 0 && BK % 8 == 0);
  constexpr int kCopies = kOfA + BK / kRowsB;
  constexpr int kDepth = BK / Tile::kSlices;  // so many k of each step belong to one slice
  constexpr int kGroups = Tile::kGroups < kDepth ? Tile::kGroups : kDepth;

  const int a_row = threadIdx.x / 8, a_k = threadIdx.x % 8;
  const int b_k = threadIdx.x / kLanesB, b_col = threadIdx.x % kLanesB * kWidth;
  const int cols = ceil_div(of.shape.cols, kWidth) * kWidth;
  const int first_k = begin * BK - (ceil_div(of.shape.depth, BK) * BK - of.shape.depth);
  const float* a_from[kOfRows];
#pragma unroll
  for (int i = 0; i < kOfRows; ++i) {
    const int row = min(row0 + a_row + i * kRowsA, of.shape.rows - 1);
    a_from[i] = of.A + static_cast<int64_t>(row) * of.pitch_a + first_k + a_k;
  }
  const float* b_from =
      of.B + static_cast<int64_t>(first_k + b_k) * of.pitch_b + (col0 + b_col) % cols;
  const int64_t b_step = static_cast<int64_t>(kRowsB) * of.pitch_b;
  const SharedPlace a_to(tiles + a_k * kStrideA + a_row);
  const SharedPlace b_to(tiles + Tile::kTileA + b_k * BN + b_col);
  // The thread's copy of this number, to the stage that begins at `stage`. Copies come in order.
  const auto copy = [&](int number, int stage, bool wanted) {
    if (number < kOfA) {
      const int i = number % kOfRows, k = number / kOfRows * 8;
      if (wanted) {
        (a_to + stage + 4 * (i * kRowsA + k * kStrideA)).template copy_from<4>(a_from[i] + k);
      }
    } else {
      const int k = (number - kOfA) * kRowsB;
      if (wanted) (b_to + stage + 4 * k * BN).template copy_from<4 * kWidth>(b_from);
      move_fp32(b_from, b_step);
    }
  };
  const auto move_on = [&] {
#pragma unroll
    for (int i = 0; i < kOfRows; ++i) move_fp32(a_from[i], BK);
  };

#pragma unroll
  for (int ahead = 0; ahead < kStages - 1; ++ahead) {
    if (begin + ahead < end) {
#pragma unroll
      for (int number = 0; number < kCopies; ++number) {
        if (ahead > 0) {
          copy(number, 4 * ahead * kStage, true);
          continue;
        }
        // Some k of the first step may be before 0.
        const bool of_a = number < kOfA;
        const int k = of_a ? a_k + number / kOfRows * 8 : b_k + (number - kOfA) * kRowsB;
        float* const to = of_a ? tiles + k * kStrideA + a_row + number % kOfRows * kRowsA
                               : tiles + Tile::kTileA + k * BN + b_col;
        if (of_a) {
          copy_async<4>(to, a_from[number % kOfRows] + number / kOfRows * 8, first_k + k >= 0);
        } else {
          copy_async<4 * kWidth>(to, b_from, first_k + k >= 0);
          b_from += b_step;
        }
      }
      move_on();
    }
    copy_async_commit();
  }
  float a[2][TM], b[2][TN];  // of this k, and of the next
  const int first = kDepth * Tile::slice();
  const char* const a_tile =
      reinterpret_cast<const char*>(tiles + first * kStrideA + 4 * Tile::y());
  const char* const b_tile =
      reinterpret_cast<const char*>(tiles + Tile::kTileA + first * BN + 4 * Tile::x());
  constexpr int kLast = 4 * (kStages - 1) * kStage;  // where the last stage begins, in bytes
  int reading = 0, writing = kLast;
  for (int step = begin; step < end; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    const float* const a_stage = reinterpret_cast<const float*>(a_tile + reading);
    const float* const b_stage = reinterpret_cast<const float*>(b_tile + reading);
    const auto load = [&](int k) {
#pragma unroll
      for (int i = 0; i < TM; i += 4) {
        *reinterpret_cast<float4*>(&a[k % 2][i]) =
            *reinterpret_cast<const float4*>(a_stage + k * kStrideA + i * Tile::kThreadsY);
      }
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        *reinterpret_cast<float4*>(&b[k % 2][j]) =
            *reinterpret_cast<const float4*>(b_stage + k * BN + j * Tile::kThreadsX);
      }
    };
    const bool more = step + kStages - 1 < end;
    load(0);
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      if (k + 1 < kDepth) load(k + 1);
      if (k * kGroups % kDepth < kGroups) {  // here begins a group
        constexpr int kOfGroup = (kCopies + kGroups - 1) / kGroups;
        const int from = k * kGroups / kDepth * kOfGroup;
#pragma unroll
        for (int number = from; number < min(from + kOfGroup, kCopies); ++number) {
          copy(number, writing, more);
        }
      }
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int forth = 0; forth < TN; ++forth) {
          const int j = i % 2 == 0 ? forth : TN - 1 - forth;
          sum[i][j] += a[k % 2][i] * b[k % 2][j];
        }
      }
    }
    move_on();
    copy_async_commit();
    reading = reading == kLast ? 0 : reading + 4 * kStage;
    writing = writing == kLast ? 0 : writing + 4 * kStage;
  }
}

}  // namespace operators::product
