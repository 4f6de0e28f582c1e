// The barriers of cuda::barrier and cuda::pipeline: threads of a block arrive, and wait, apart from
// each other. A phase may have copies, which must have landed before it ends.

#pragma once

#include <cstddef>

#include "cpu/execution/cuda_cpu.h"

namespace cuda_cpu {

/// In shared memory, whose bits are all set before phase_init().
struct PhaseBarrier {
  static constexpr unsigned kReady = 0x0BA221E2;

  unsigned ready;  ///< kReady, or phase_init() has not been called
  unsigned expected, pending;
  unsigned phase;
  char tsan[2];  ///< what those who wait are ordered after, by phase
};

/// A phase ends when `expected` threads have arrived.
void phase_init(PhaseBarrier& barrier, std::ptrdiff_t expected);
/// Arrives `count` times; returns the phase that this ends some time. `dropped` threads will not
/// arrive in later phases.
unsigned phase_arrive(PhaseBarrier& barrier, std::ptrdiff_t count, unsigned dropped, Site site);
/// Whether the phase has ended. If so, what happened before its arrivals can be seen.
bool phase_ended(PhaseBarrier& barrier, unsigned phase);
void phase_wait(PhaseBarrier& barrier, unsigned phase, Site site);
/// The barrier's current phase has one copy more.
void phase_copy(PhaseBarrier& barrier, const AsyncCopy& copy);

/// For a number in shared memory that threads of a block add to, and are ordered by barriers.
void count_one(unsigned& number);

/// More about a thread that waits in phase_wait(); false if it does not.
struct Thread;
class Message;
bool describe_phase_wait(const Thread& thread, Message& message);

}  // namespace cuda_cpu
