// What programs of a reader's own find without asking: nvcc includes cuda_runtime.h by itself.

#pragma once

// As nvcc says who it is. __CUDA_ARCH__ is on the command line. Since 13.0 it has numbers of four
// bits, which are not here.
#define __NVCC__ 1
#define __CUDACC__ 1
#define __CUDACC_VER_MAJOR__ 12
#define __CUDACC_VER_MINOR__ 9
#define __CUDACC_VER_BUILD__ 0
#if __CUDA_ARCH__ == 900
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#define __CUDA_ARCH_SPECIFIC__ 900
#define __CUDA_ARCH_FAMILY_SPECIFIC__ 900
#endif

// C++20 has a function of a name that programs in C++17 give to their own.
#define lerp cuda_cpu_lerp
#include <math.h>

#include <cmath>
#undef lerp

#include <assert.h>
#include <stdio.h>
#include <time.h>

// What headers of others ask whether the runtime is there.
#define __CUDA_RUNTIME_H__
#define __DRIVER_TYPES_H__
// What stands around functions that the toolkit calls old.
#define __NV_SILENCE_DEPRECATION_BEGIN
#define __NV_SILENCE_DEPRECATION_END

// Of what two_passes.py makes of a function for host and device.
#define CUDA_CPU_IN_KERNEL (!__builtin_is_constant_evaluated() && ::cuda_cpu::in_kernel())

#include "cuda_runtime.h"
#include "runtime_helpers.h"
