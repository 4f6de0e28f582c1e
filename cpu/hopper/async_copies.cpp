// In a file of its own, since ThreadSanitizer watches it: what a copy reads and writes are the
// thread's accesses. The queue is not watched, which threads of several launches use in turn.

#include <cstring>

#include "cpu/execution/cuda_cpu.h"
#include "cpu/execution/sanitizers.h"
#include "cpu/watch/hooks.h"

namespace cuda_cpu {

void AsyncCopies::add(const AsyncCopy& copy) {
  const Unwatched bookkeeping;
  count_async_copy(copy.source, copy.size - copy.zero_fill, __builtin_return_address(0));
  queue_.push_back(copy);
  ++uncommitted_;
}

void AsyncCopies::commit() {
  const Unwatched bookkeeping;
  batches_.push_back(uncommitted_);
  uncommitted_ = 0;
}

void AsyncCopies::wait(std::size_t pending) {
  std::size_t landing = 0;
  {
    const Unwatched bookkeeping;
    if (pending >= batches_.size()) return;
    const auto end = batches_.end() - static_cast<std::ptrdiff_t>(pending);
    for (auto batch = batches_.begin(); batch != end; ++batch) landing += *batch;
    batches_.erase(batches_.begin(), end);
  }
  land(landing);
}

void AsyncCopies::end() {
  std::size_t all = 0;
  {
    const Unwatched bookkeeping;
    all = queue_.size();
  }
  land(all);
  clear();
}

void AsyncCopies::clear() {
  const Unwatched bookkeeping;
  queue_.clear();
  batches_.clear();
  uncommitted_ = 0;
}

void AsyncCopies::land(std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    AsyncCopy copy;
    {
      const Unwatched bookkeeping;
      copy = queue_[i];
    }
    char* const target = static_cast<char*>(copy.target);
    const std::size_t copied = copy.size - copy.zero_fill;
    std::memcpy(target, copy.source, copied);
    std::memset(target + copied, 0, copy.zero_fill);
  }
  const Unwatched bookkeeping;
  queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(count));
}

}  // namespace cuda_cpu
