// ThreadSanitizer watches this file, for what a copy reads and writes: accesses of the thread that
// has asked for it. All else here is bookkeeping. A copy is made when all threads have arrived, as
// late as it may be.

#include "cpu/hopper/phase_barrier.h"

#include <cstring>
#include <vector>

#include "cpu/execution/execution.h"
#include "cpu/execution/sanitizers.h"
#include "cpu/watch/hooks.h"

namespace cuda_cpu {
namespace {

constexpr char kWait[] = "wait() of a cuda::barrier or a cuda::pipeline";

__attribute__((noinline)) void copy_now(const AsyncCopy& copy) {
  std::memcpy(copy.target, copy.source, copy.size);
}

/// Takes the first copy of the barrier's phase from the block's list; false if there is none.
bool take_copy(const PhaseBarrier& barrier, PhaseCopy& taken) {
  const Unwatched bookkeeping;
  std::vector<PhaseCopy>& copies = runner->current().block->phase_copies;
  for (auto each = copies.begin(); each != copies.end(); ++each) {
    if (each->barrier != &barrier) continue;
    taken = *each;
    copies.erase(each);
    return true;
  }
  return false;
}

/// Makes the copies of the barrier's phase, each in the name of its thread.
CUDA_CPU_NO_TSAN void land(PhaseBarrier& barrier) {
  PhaseCopy each;
  while (take_copy(barrier, each)) {
    void* const caller = tsan_current();
    tsan_become(each.identity);
    copy_now(each.copy);
    tsan_release(&barrier.tsan[barrier.phase & 1]);
    tsan_become(caller);
  }
}

CUDA_CPU_NO_TSAN void check_ready(const PhaseBarrier& barrier, const Site& site) {
  if (barrier.ready == PhaseBarrier::kReady) return;
  fail("a cuda::barrier that init() has not made ready, at %s:%d (%s)", site.file, site.line,
       site.function);
}

}  // namespace

CUDA_CPU_NO_TSAN void phase_init(PhaseBarrier& barrier, std::ptrdiff_t expected) {
  barrier.expected = barrier.pending = static_cast<unsigned>(expected);
  barrier.phase = 0;
}

CUDA_CPU_NO_TSAN unsigned phase_arrive(PhaseBarrier& barrier, std::ptrdiff_t count,
                                       unsigned dropped, Site site) {
  check_ready(barrier, site);
  const auto arriving = static_cast<unsigned>(count);
  if (arriving > barrier.pending) {
    fail("more threads arrive at a cuda::barrier than the %u that it expects, at %s:%d (%s)",
         barrier.expected, site.file, site.line, site.function);
  }
  const unsigned phase = barrier.phase;
  tsan_release(&barrier.tsan[phase & 1]);
  barrier.pending -= arriving;
  barrier.expected -= dropped;
  if (barrier.pending > 0) return phase;
  land(barrier);
  ++barrier.phase;
  barrier.pending = barrier.expected;
  runner->progressed();
  runner->look_again();
  return phase;
}

CUDA_CPU_NO_TSAN bool phase_ended(PhaseBarrier& barrier, unsigned phase) {
  if (static_cast<int>(barrier.phase - phase) <= 0) return false;
  tsan_acquire(&barrier.tsan[phase & 1]);
  return true;
}

CUDA_CPU_NO_TSAN void phase_wait(PhaseBarrier& barrier, unsigned phase, Site site) {
  check_ready(barrier, site);
  while (!phase_ended(barrier, phase)) runner->spin(kWait, site, &barrier);
}

CUDA_CPU_NO_TSAN void phase_copy(PhaseBarrier& barrier, const AsyncCopy& copy) {
  check_ready(barrier, Site::here());
  count_async_copy(copy.source, copy.size, __builtin_return_address(0));
  void* const identity = tsan_current();
  const Unwatched bookkeeping;
  runner->current().block->phase_copies.push_back({&barrier, copy, identity});
}

CUDA_CPU_NO_TSAN void count_one(unsigned& number) { ++number; }

bool describe_phase_wait(const Thread& thread, Message& message) {
  if (thread.operation != kWait) return false;
  const auto& barrier = *static_cast<const PhaseBarrier*>(thread.object);
  message.add(", where %u of %u have arrived", barrier.expected - barrier.pending,
              barrier.expected);
  return true;
}

}  // namespace cuda_cpu
