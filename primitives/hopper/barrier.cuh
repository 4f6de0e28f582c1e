// Barriers in shared memory (mbarrier), at which threads and copies arrive. PTX ISA, "Parallel
// Synchronization and Communication Instructions: mbarrier". A Barrier goes through one phase after
// the other. A phase ends when `count` arrivals have come, and all bytes that were announced. A
// thread that waits names a phase by its parity: 0, 1, 0, 1 and so on.
//
// And Ring, which says which of several barriers comes next. The CPU backend has functions of the
// same names in cpu/hopper/hopper_device.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "primitives/hopper/code.h"
#ifdef CUDA_CPU
#include "cpu/hopper/hopper_device.h"
#endif

namespace primitives {

/// An mbarrier. It has to be in shared memory.
using Barrier = uint64_t;

/// Where a thread stands among the `count` stages of a pipeline: which stage comes next, and the
/// parity of the phase that its barriers are in. With three stages step 4 has stage 1 and parity 1,
/// if steps are counted from 0.
struct Ring {
  int count, stage = 0, parity = 0;
  __device__ void advance() {
    if (++stage == count) stage = 0, parity ^= 1;
  }
};

/// The way back from where a Ring is. It begins with the stage that the Ring came to last, and goes
/// to the one before, and so on. When it has passed all stages it goes on in this order, in the
/// stages' next laps.
struct BackRing {
  int count, stage, parity;
  __device__ explicit BackRing(const Ring& from)
      : count(from.count), stage(from.stage), parity(from.parity) {
    advance();
  }
  __device__ void advance() {
    if (stage-- == 0) stage = count - 1, parity ^= 1;
  }
};

#if CLUSTER_CODE
#ifndef CUDA_CPU

/// An address in shared memory, as instructions take it.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Prepares a barrier. Each of its phases waits for `count` arrivals.
__device__ inline void barrier_init(Barrier* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(count));
}

/// Lets the copy engine and the other blocks of the cluster see what barrier_init has done. A
/// barrier among the threads (of the block, or of the cluster) has to follow.
__device__ inline void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives at a barrier of this block, and does not wait.
__device__ inline void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

/// Arrives at the barrier at the same place in block `rank` of the cluster.
__device__ inline void barrier_arrive(Barrier* barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

/// Arrives, and announces how many bytes copies will bring in this phase.
__device__ inline void barrier_arrive_expect(Barrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

/// Waits until the phase of this parity (0, 1, 0, ...) is over. On a new barrier parity 1 counts as
/// over.
__device__ inline void barrier_wait(Barrier* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

#endif  // CUDA_CPU
#endif  // CLUSTER_CODE

}  // namespace primitives
