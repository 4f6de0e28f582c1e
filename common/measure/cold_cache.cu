#include "common/check.h"
#include "common/measure/cold_cache.h"

namespace common {

namespace {

constexpr std::size_t kLine = 128;  // bytes

#ifndef CUDA_CPU

// Both: a warp has neighbouring pieces, and all threads together take one turn after the other.

/// Writes `count` pieces of 16 bytes, which the cache gives up after all others.
__global__ void write_to_stay(uint4* to, std::size_t count, unsigned value) {
#if __CUDA_ARCH__ >= 800
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  const std::size_t threads = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += threads) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %1, %1, %1}, %2;" ::"l"(to + i),
                 "r"(value), "l"(policy)
                 : "memory");
  }
#endif
}

/// From now on the cache gives up these lines as any others.
__global__ void let_go(const char* from, std::size_t lines) {
#if __CUDA_ARCH__ >= 800
  const std::size_t threads = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < lines;
       i += threads) {
    asm volatile("applypriority.global.L2::evict_normal [%0], 128;" ::"l"(from + kLine * i)
                 : "memory");
  }
#endif
}

#endif

}  // namespace

ColdCache::ColdCache(bool wanted, int64_t l2_bytes)
    : bytes_(wanted ? 2 * static_cast<std::size_t>(l2_bytes) / kLine * kLine : 0),
      written_(bytes_ > 0 ? bytes_ : 1) {}

void ColdCache::make_cold(int value) const {
  if (bytes_ == 0) return;
#ifndef CUDA_CPU
  constexpr int kBlocks = 512, kThreads = 512;
  write_to_stay<<<kBlocks, kThreads>>>(reinterpret_cast<uint4*>(static_cast<char*>(written_)),
                                       bytes_ / sizeof(uint4), static_cast<unsigned>(value));
  CUDA_CHECK(cudaGetLastError());
  let_go<<<kBlocks, kThreads>>>(written_, bytes_ / kLine);
  CUDA_CHECK(cudaGetLastError());
#endif
  CUDA_CHECK(cudaMemsetAsync(written_, value, bytes_));
}

}  // namespace common
