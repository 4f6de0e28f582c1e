// In a file of its own: these accesses are the thread's, and ThreadSanitizer watches them.

#include <cstring>

#include "cuda_cpu.h"

namespace cuda_cpu {

void AsyncCopies::land(std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const AsyncCopy& copy = queue[i];
    char* const target = static_cast<char*>(copy.target);
    const std::size_t copied = copy.size - copy.zero_fill;
    std::memcpy(target, copy.source, copied);
    std::memset(target + copied, 0, copy.zero_fill);
  }
  queue.erase(queue.begin(), queue.begin() + static_cast<std::ptrdiff_t>(count));
}

}  // namespace cuda_cpu
