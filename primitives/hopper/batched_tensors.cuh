// The copies of primitives/hopper/hopper.cuh with a policy for the L2 cache, and for a batch of matrices: maps
// of three dimensions. A box is of one matrix, and ends where that ends: what it reads beyond is
// zero, not the next matrix, and what it writes there is dropped.
#pragma once

#include "primitives/hopper/hopper.cuh"

/// tensor_map() of `matrices` matrices (rows, cols), one after another.
template <typename T>
CUtensorMap batch_map(const T* batch, int64_t matrices, int64_t rows, int64_t cols,
                      unsigned box_rows, bool to_tf32 = false) {
  const cuuint64_t extents[3] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows),
                                 static_cast<cuuint64_t>(matrices)};
  const cuuint64_t strides[2] = {extents[0] * sizeof(T), extents[0] * extents[1] * sizeof(T)};
  const cuuint32_t box[3] = {128 / sizeof(T), box_rows, 1};
  return encode_tensor_map(batch, 3, extents, strides, box, CU_TENSOR_MAP_SWIZZLE_128B, to_tf32);
}

// The CPU backend has these in cpu/hopper/hopper_device.h.
#if HOPPER_CODE && !defined(CUDA_CPU)

// Policies for the copies below, "createpolicy": the L2 cache gives this data up before other data,
// after it, or as if nothing was said.
__device__ inline uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline uint64_t evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline uint64_t evict_normal() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// tensor_load() of a box with a policy; below: of matrix `matrix`.
__device__ inline void tensor_load(void* to, const CUtensorMap* map, int row, int col,
                                   Barrier* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(col), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
__device__ inline void tensor_load(void* to, const CUtensorMap* map, int matrix, int row, int col,
                                   Barrier* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(col), "r"(row), "r"(matrix), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

/// tensor_load_multicast(), likewise.
__device__ inline void tensor_load_multicast(void* to, const CUtensorMap* map, int row, int col,
                                             Barrier* barrier, uint16_t ranks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(
          shared_address(to)),
      "l"(map), "r"(col), "r"(row), "r"(shared_address(barrier)), "h"(ranks), "l"(policy)
      : "memory");
}
__device__ inline void tensor_load_multicast(void* to, const CUtensorMap* map, int matrix, int row,
                                             int col, Barrier* barrier, uint16_t ranks,
                                             uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(
          shared_address(to)),
      "l"(map), "r"(col), "r"(row), "r"(matrix), "r"(shared_address(barrier)), "h"(ranks),
      "l"(policy)
      : "memory");
}

/// tensor_store(), likewise.
__device__ inline void tensor_store(const CUtensorMap* map, int row, int col, const void* from,
                                    uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2}], [%3], "
      "%4;" ::"l"(map),
      "r"(col), "r"(row), "r"(shared_address(from)), "l"(policy)
      : "memory");
}
__device__ inline void tensor_store(const CUtensorMap* map, int matrix, int row, int col,
                                    const void* from, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2, %3}], "
      "[%4], %5;" ::"l"(map),
      "r"(col), "r"(row), "r"(matrix), "r"(shared_address(from)), "l"(policy)
      : "memory");
}

#endif

#if HOPPER_CODE
// The same for kernels that are compiled for a batch and for one matrix, whose `matrix` is 0.

template <bool kBatch>
__device__ inline void load_box(void* to, const CUtensorMap* map, int matrix, int row, int col,
                                Barrier* barrier, uint64_t policy) {
  if constexpr (kBatch) {
    tensor_load(to, map, matrix, row, col, barrier, policy);
  } else {
    tensor_load(to, map, row, col, barrier, policy);
  }
}

template <bool kBatch>
__device__ inline void multicast_box(void* to, const CUtensorMap* map, int matrix, int row, int col,
                                     Barrier* barrier, uint16_t ranks, uint64_t policy) {
  if constexpr (kBatch) {
    tensor_load_multicast(to, map, matrix, row, col, barrier, ranks, policy);
  } else {
    tensor_load_multicast(to, map, row, col, barrier, ranks, policy);
  }
}

template <bool kBatch>
__device__ inline void store_box(const CUtensorMap* map, int matrix, int row, int col,
                                 const void* from, uint64_t policy) {
  if constexpr (kBatch) {
    tensor_store(map, matrix, row, col, from, policy);
  } else {
    tensor_store(map, row, col, from, policy);
  }
}
#endif
