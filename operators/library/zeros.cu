// Zeros in a workspace, written by a kernel. A launch that follows early (primitives/early_launch.cuh) takes
// its places meanwhile; after cudaMemsetAsync it would wait some 3 us longer.

#include "operators/library/zeros.h"

#include <algorithm>

#include "primitives/early_launch.cuh"
#include "primitives/launch.h"

namespace operators::library {

using namespace primitives;

namespace {

constexpr int kThreads = 256, kMostBlocks = 1024;

/// A thread writes 16 bytes at a time.
__global__ void __launch_bounds__(kThreads) zeros(uint4* to, size_t count) {
  start_next_kernel();
  const size_t all = size_t{gridDim.x} * kThreads;
  for (size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += all) {
    to[i] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace

void write_zeros(void* to, size_t bytes, cudaStream_t stream) {
  const size_t count = ceil_div(bytes, sizeof(uint4));
  const unsigned blocks = static_cast<unsigned>(
      std::min<size_t>(ceil_div(count, size_t{kThreads}), size_t{kMostBlocks}));
  zeros<<<blocks, kThreads, 0, stream>>>(static_cast<uint4*>(to), count);
  check(cudaPeekAtLastError(), "the launch of zeros");
}

}  // namespace operators::library
