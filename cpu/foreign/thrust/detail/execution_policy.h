// CCCL's header, and one thing more. Each algorithm says derived_cast(strip_const(policy)) in the
// call that does the work. While that call lasts, memory of the device is open to the host, if the
// policy is one of the device.

#pragma once

#include_next <thrust/detail/execution_policy.h>

#include <type_traits>

#include "cpu/watch/ledger.h"
#include "cuda_runtime.h"

namespace thrust::system::cuda::detail {

struct OfDevice {};  // all policies of the device are derived from it

/// The host does what the device would do in its turn: after the kernels launched before.
class Turn {
  cudaError_t finished_ = cudaDeviceSynchronize();
  cuda_cpu::OpenMemory memory_;
};

}  // namespace thrust::system::cuda::detail

namespace thrust::detail {

template <class Policy>
struct OpenedFor {
  Policy& policy;
  thrust::system::cuda::detail::Turn turn{};
};

template <class Policy>
requires std::is_base_of_v<thrust::system::cuda::detail::OfDevice, Policy> OpenedFor<Policy>
strip_const(const execution_policy_base<Policy>& policy) {
  return {static_cast<Policy&>(const_cast<execution_policy_base<Policy>&>(policy))};
}

template <class Policy>
Policy& derived_cast(const OpenedFor<Policy>& opened) {
  return opened.policy;
}

}  // namespace thrust::detail
