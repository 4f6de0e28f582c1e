// CCCL's header, and thrust::cuda::par. A stream makes no difference: what is in it has been done
// before.

#pragma once

#include_next <thrust/system/cpp/execution_policy.h>

namespace thrust::system::cuda {
namespace detail {

struct par_t : execution_policy<par_t>,
               thrust::detail::allocator_aware_execution_policy<execution_policy> {
  par_t on(cudaStream_t stream) const {
    cudaStreamSynchronize(stream);
    return {};
  }
};

}  // namespace detail

inline constexpr detail::par_t par, par_nosync;

}  // namespace thrust::system::cuda

namespace thrust::cuda {
using thrust::system::cuda::par;
using thrust::system::cuda::par_nosync;
}  // namespace thrust::cuda
