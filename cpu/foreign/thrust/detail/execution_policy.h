// CCCL's header, and one thing more. Each algorithm says derived_cast(strip_const(policy)) in the
// call that does the work. While that call lasts, memory of the device is open to the host, if the
// policy is one of the device.

#pragma once

#include_next <thrust/detail/execution_policy.h>

#include <type_traits>

#include "cpu/foreign/thrust/detail/by_host.h"

namespace thrust::system::cuda::detail {

struct OfDevice {};  // all policies of the device are derived from it

}  // namespace thrust::system::cuda::detail

namespace thrust::detail {

template <class Policy>
struct OpenedFor {
  Policy& policy;
  cuda_cpu::Turn turn{};
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
