// In the place of CCCL's header: what runs on "the device". Names are those of its system for CUDA,
// whose meaning system/cpp/ gives them here; what is the same as for a host is taken from CCCL's
// system for C++.

#pragma once

#define THRUST_DEVICE_SYSTEM_CUDA 1
#define THRUST_DEVICE_SYSTEM_OMP 2
#define THRUST_DEVICE_SYSTEM_TBB 3
#define THRUST_DEVICE_SYSTEM_CPP 4
#undef THRUST_DEVICE_SYSTEM
#define THRUST_DEVICE_SYSTEM THRUST_DEVICE_SYSTEM_CPP
#define __THRUST_DEVICE_SYSTEM_NAMESPACE cuda
// clang-format off
#define __THRUST_DEVICE_SYSTEM_ROOT thrust/system/cpp
// How headers name those of the system since CCCL 3.2.
#define __THRUST_DEVICE_SYSTEM_ALGORITH_HEADER_INCLUDE(name) <__THRUST_DEVICE_SYSTEM_ROOT/name>
#define __THRUST_DEVICE_SYSTEM_ALGORITH_DETAIL_HEADER_INCLUDE(name) \
  <__THRUST_DEVICE_SYSTEM_ROOT/detail/name>
// clang-format on
