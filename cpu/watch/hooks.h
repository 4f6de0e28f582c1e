// What the backend tells the counters of counting.h while kernels run.

#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/execution/later_than_cpp17.h"

namespace cuda_cpu {

struct Block;

/// A library's product, whose kernels are not here, has inputs and outputs of so many bytes.
void count_library(std::int64_t bytes);

/// What the hook before each load and store of the calling thread is for. 1: to count. 2: nothing,
/// as on the host. cpu/two_versions.py asks.
extern CUDA_CPU_CONSTINIT thread_local std::uint8_t hook_use;
/// A thread of a kernel starts.
void choose_hook_use();

/// All lanes of the warp of thread number `first`, or all threads of the block, have met: these at
/// a barrier, or because they have ended.
void requests_of_warp_end(const Block& block, unsigned first);
void requests_of_block_end(const Block& block, bool ended);

/// A lane's part of a request: of a copy by cp.async, made at `place` in the program; of an atomic
/// operation, made where this is called.
void count_async_copy(const void* from, std::size_t bytes, const void* place);
void count_atomic(const void* address, std::size_t bytes);
/// Whether this is memory of the calling thread's block.
bool is_shared(const void* address);
/// The same of a load or store that the compiler does not see as such.
void count_access(const void* address, std::size_t bytes, bool store);
/// Consecutive bytes that the copy engine reads or writes in global memory.
void count_copy_engine(const void* address, std::size_t bytes);
void count_multicast(std::size_t saved_bytes);
void count_tensor_flops(std::int64_t flops);
/// A thread has come to a barrier.
void count_barrier();

/// While one exists, nothing is counted for the calling thread: loads and stores that stand for
/// another instruction, which is counted as such.
class Uncounted {
 public:
  Uncounted();
  ~Uncounted();
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;
};

}  // namespace cuda_cpu
