// What the launches of one row asked of memory: counted by the CPU backend, or by a profiler on a
// GPU (results/counters.py).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cuda_cpu {

/// A request is one instruction of a warp. Of global memory it asks for sectors of 32 bytes; of
/// shared memory for words in 32 banks, and each time that a bank has to answer once more than the
/// width of the request makes necessary is a conflict.
struct Counts {
  int64_t global_load_requests = 0, global_load_sectors = 0;
  int64_t global_store_requests = 0, global_store_sectors = 0;
  int64_t shared_load_requests = 0, shared_load_conflicts = 0;
  int64_t shared_store_requests = 0, shared_store_conflicts = 0;
  int64_t atomic_requests = 0, atomic_sectors = 0;  ///< of global memory
  int64_t shared_atomic_requests = 0;
  int64_t async_copy_bytes = 0;       ///< by cp.async, whose requests are among the loads
  int64_t copy_engine_bytes = 0;      ///< of global memory, loads and stores
  int64_t multicast_saved_bytes = 0;  ///< that a block did not ask for, as another one did for it
  int64_t tensor_flops = 0;           ///< an FMA counts as two
  int64_t barriers = 0;               ///< that warps came to: __syncthreads() and named ones
  /// Of the library's products: their inputs and outputs, each once. If there are any, all of the
  /// above is of our own kernels alone.
  int64_t library_bytes = 0;
  int64_t l2_bytes = 0;  ///< of all of the above, 32 for a sector: what no L1 cache would spare

  /// A line of source whose requests cost more than they must, the worst first.
  struct Place {
    std::string file;
    int line = 0;
    bool shared = false, store = false;
    int64_t requests = 0;
    double per_request = 0;  ///< sectors, or conflicts
    double least = 0;        ///< the same for the same bytes in a row
  };
  std::vector<Place> worst;
};

}  // namespace cuda_cpu
