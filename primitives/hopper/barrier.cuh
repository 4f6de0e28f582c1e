// Barriers in shared memory (mbarrier), at which threads and copies arrive, and where a pipeline of
// stages stands. PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier". A
// phase of a Barrier ends when `count` arrivals and all announced bytes have come in; phases
// alternate in parity. The CPU backend says the same words in cpu/hopper/hopper_device.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "primitives/hopper/code.h"
#ifdef CUDA_CPU
#include "cpu/hopper/hopper_device.h"
#endif

namespace primitives {

/// An mbarrier; it lives in shared memory.
using Barrier = uint64_t;

/// Where a pipeline stands: at which of kStages stages, and in which of its barriers' two phases.
template <int kStages>
struct Ring {
  int stage = 0, parity = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

/// The same for stages in any order: the next phase of each stage's barrier, bit s that of stage s.
template <int kStages>
struct Phases {
  uint32_t parities = 0;
  __device__ __forceinline__ int next(int s) {
    const int parity = parities >> s & 1;
    parities ^= 1u << s;
    return parity;
  }
};

#if CLUSTER_CODE
#ifndef CUDA_CPU

/// An address in shared memory, as instructions take it.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void barrier_init(Barrier* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(count));
}

/// Makes barrier_init visible to the copy engine and to the other blocks of the cluster; a barrier
/// among the threads (of the cluster) has to follow.
__device__ inline void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

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

/// Arrives, and announces bytes that copies will bring in this phase.
__device__ inline void barrier_arrive_expect(Barrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

/// Waits until the phase of this parity (0, 1, 0, ...) is over; on a new barrier 1 is over.
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

/// The last thing that the producer of a block in a cluster does: waits until each stage has been
/// released as often as it was filled. By then all that the other blocks send to this one, bytes
/// and arrivals, has come, and the block may end.
template <int kStages>
__device__ inline void wait_until_empty(Barrier (&empty)[kStages], Ring<kStages> ring) {
  for (int s = 0; s < kStages; ++s, ring.advance()) {
    barrier_wait(&empty[ring.stage], ring.parity ^ 1);
  }
}

#endif  // CLUSTER_CODE

}  // namespace primitives
