// How the blocks of a cluster that share a row of lesson 10 add up its sums.
//
// A row and what belongs to it may be too much for one multiprocessor: 1024 features of 16 blades
// have 140 KB of weights, as many sums for dw, and 192 KB of x, y and d_out. Then a cluster of
// blocks shares it (compute capability 9.0), and all that they tell each other is its sums. Round r
// uses slot r % 4. May a block overwrite what the others had in this slot from round r - 4? It
// sends round r only after it has received round r - 2 from all. They sent that after all of their
// threads had read round r - 4. So yes, it may.
#pragma once

#include <cuda_runtime.h>

#include "common/clifford.cuh"
#include "common/hopper.cuh"

constexpr int kMaxBlocks = 8, kSlots = 4;

// In every block of[slot][i] is for block i's sums. At the start of the dynamic shared memory.
template <int kCount>
struct alignas(128) Exchange {
  Sums<kCount> of[kSlots][kMaxBlocks];
  Barrier come[kSlots];
};

template <int kCount>
__device__ __forceinline__ void open_exchange(Exchange<kCount>& exchange, int blocks) {
#if HOPPER_CODE
  if (blocks == 1) return;
  if (threadIdx.x == 0) {
    for (Barrier& come : exchange.come) barrier_init(&come, 1);
    barrier_init_fence();
  }
  cluster_sync();
#endif
}

// The block's sums of a row, which all of its threads know, to the other blocks.
template <int kCount>
__device__ __forceinline__ void send_sums(const Sums<kCount>& sums, Exchange<kCount>& exchange,
                                          int blocks, int round) {
#if HOPPER_CODE
  if (blocks == 1 || threadIdx.x >= 32) return;
  const int slot = round % kSlots, to = threadIdx.x, rank = cluster_rank();
  Sums<kCount>& own = exchange.of[slot][rank];
  if (to == 0) {
    own = sums;
    shared_fence();
    barrier_arrive_expect(&exchange.come[slot], (blocks - 1) * static_cast<int>(sizeof own));
  }
  __syncwarp();
  if (to < blocks && to != rank) bulk_push(&own, &own, sizeof own, &exchange.come[slot], to);
#endif
}

// The row's sums, instead of the block's. Added up in the order of the blocks, so that all blocks
// have the same.
template <int kCount>
__device__ __forceinline__ void receive_sums(Sums<kCount>& sums, Exchange<kCount>& exchange,
                                             int blocks, int round) {
#if HOPPER_CODE
  if (blocks == 1) return;
  const int slot = round % kSlots;
  barrier_wait(&exchange.come[slot], round / kSlots % 2);
  sums = exchange.of[slot][0];
#pragma unroll 1  // for the registers
  for (int block = 1; block < blocks; ++block) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums.value[i] += exchange.of[slot][block].value[i];
  }
#endif
}

// A block stays until nobody reads or writes its shared memory any more.
__device__ __forceinline__ void close_exchange(int blocks) {
#if HOPPER_CODE
  if (blocks > 1) cluster_sync();
#endif
}
