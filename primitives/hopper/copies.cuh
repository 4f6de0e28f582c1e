// The copy engine (TMA): one thread orders the copy of a whole box between memory and shared
// memory, and goes on. PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.tensor".
// The CPU backend has functions of the same names in cpu/hopper/hopper_device.h.
//
// In shared memory a box lies at a multiple of 128 bytes. In memory its first column is at a
// multiple of 16 bytes. Where a Barrier is named, the bytes of a copy count there when they have
// come.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "primitives/hopper/barrier.cuh"
#include "primitives/hopper/tensor_map.h"

namespace primitives {

#if CLUSTER_CODE
#ifndef CUDA_CPU

/// Copies the box that begins at (row, col) of the matrix to shared memory.
__device__ inline void tensor_load(void* to, const CUtensorMap* map, int row, int col,
                                   Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)),
      "l"(map), "r"(col), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

/// Brings a box into the L2 cache, and no further: the box that tensor_load would copy to shared
/// memory.
__device__ inline void prefetch_l2(const CUtensorMap* map, int row, int col) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map),
               "r"(col), "r"(row)
               : "memory");
}

/// Copies a box of a vector, from element `first` on. The tensor map says how many elements a box
/// has.
__device__ inline void tensor_load(void* to, const CUtensorMap* map, int first, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2}], [%3];" ::"r"(shared_address(to)),
      "l"(map), "r"(first), "r"(shared_address(barrier))
      : "memory");
}

/// tensor_load into the shared memory of several blocks of the cluster: those whose bit is set in
/// `ranks`. The copy arrives at the same place in each, and counts at the same barrier of each.
__device__ inline void tensor_load_multicast(void* to, const CUtensorMap* map, int row, int col,
                                             Barrier* barrier, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(col), "r"(row), "r"(shared_address(barrier)), "h"(ranks)
      : "memory");
}

/// Copies `bytes` bytes that lie one after the other, without a tensor map. Both addresses and
/// `bytes` are multiples of 16. PTX ISA, "cp.async.bulk".
__device__ inline void bulk_load(void* to, const void* from, int bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

/// Copies `bytes` bytes from this block's shared memory into that of block `rank` of the cluster,
/// to the place that `to` has there, and counts them at that block's `barrier`. Addresses and
/// `bytes` are multiples of 16. Before it the threads that wrote the bytes call shared_fence(), and
/// meet. This block must not end before the bytes have come.
__device__ inline void bulk_push(void* to, const void* from, int bytes, Barrier* barrier,
                                 int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 to, barrier;\n"
      "mapa.shared::cluster.u32 to, %0, %4;\n"
      "mapa.shared::cluster.u32 barrier, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
      "[to], [%1], %2, [barrier];\n"
      "}" ::"r"(shared_address(to)),
      "r"(shared_address(from)), "r"(bytes), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}

/// Writes `value` into the shared memory of block `rank` of the cluster, to the place that `to` has
/// there. Its 4 bytes count at that block's `barrier` when they have come. That block must not end
/// before they have come. This block may. PTX ISA, "st.async".
__device__ inline void store_push(float* to, float value, Barrier* barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 to, barrier;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 barrier, %2, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], %1, [barrier];\n"
      "}" ::"r"(shared_address(to)),
      "f"(value), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}

/// Copies a box from shared memory to the matrix. Before it the threads that wrote the box call
/// shared_fence(), and meet at a barrier. Stores are waited for by groups: tensor_store_commit()
/// closes a group.
__device__ inline void tensor_store(const CUtensorMap* map, int row, int col, const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(col), "r"(row), "r"(shared_address(from))
      : "memory");
}
/// The same for `bytes` bytes that lie one after the other, without a tensor map. Both addresses
/// and `bytes` are multiples of 16. PTX ISA, "cp.async.bulk".
__device__ inline void bulk_store(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
/// Adds `bytes` bytes of floats that lie one after the other to those in memory, each for itself,
/// without a tensor map. Otherwise as bulk_store(). PTX ISA, "cp.reduce.async.bulk".
__device__ inline void bulk_add(float* to, const float* from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(shared_address(from)), "r"(bytes)
      : "memory");
}
__device__ inline void tensor_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until the copy engine has read what this thread's stores copy from shared memory, except
/// for the newest kNewest groups. Then this shared memory may be written again.
template <int kNewest>
__device__ inline void tensor_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNewest) : "memory");
}
/// Waits until what they copy has also arrived in memory. Then this thread sees it, and can let
/// other threads see it by a release.
template <int kNewest>
__device__ inline void tensor_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kNewest) : "memory");
}

/// Two fences between ordinary accesses and those of the copy engine and of wgmma. After
/// shared_fence() they see what this thread has written to shared memory. After global_fence() the
/// copy engine sees what this thread has written to memory, or has seen that others have written.
__device__ inline void shared_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void global_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- Copies with a policy for the L2 cache, and copies for a batch of matrices ------------------
//
// A tensor map may be of a batch of matrices. A box lies in one matrix of the batch. What it reads
// beyond that matrix is zero, not the next matrix, and what it writes there is dropped.

// Policies for the copies below: the L2 cache gives this data up before other data, after it, or as
// if nothing was said. PTX ISA, "createpolicy".
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

/// tensor_load() with a policy; and below, the same for a box of matrix number `matrix`.
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

/// The same for a tensor of five dimensions. `at` is where the box begins; the innermost dimension
/// comes first.
__device__ inline void tensor_load(void* to, const CUtensorMap* map, const int (&at)[5],
                                   Barrier* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(to)),
      "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]),
      "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

/// tensor_load_multicast() with a policy; of matrix number `matrix`; and of five dimensions.
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
__device__ inline void tensor_load_multicast(void* to, const CUtensorMap* map, const int (&at)[5],
                                             Barrier* barrier, uint16_t ranks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8, %9;" ::"r"(
          shared_address(to)),
      "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]),
      "r"(shared_address(barrier)), "h"(ranks), "l"(policy)
      : "memory");
}

/// tensor_store() with a policy; and to matrix number `matrix`.
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

/// tensor_store() to a tensor of five dimensions, as tensor_load() has them.
__device__ inline void tensor_store(const CUtensorMap* map, const int (&at)[5], const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::
          "l"(map),
      "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(shared_address(from))
      : "memory");
}

#endif  // CUDA_CPU

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

#endif  // CLUSTER_CODE

}  // namespace primitives
