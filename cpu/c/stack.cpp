// How long stacks are. ./try gives programs that others have written more, and says how many KB.

#include "cpu/execution/fiber.h"

namespace cuda_cpu {

#if defined(CUDA_CPU_STACK)
const std::size_t Fiber::kStackSize = CUDA_CPU_STACK * std::size_t{1024};
#else
const std::size_t Fiber::kStackSize = (kSanitized ? 256 : 64) * std::size_t{1024};
#endif

}  // namespace cuda_cpu
