// CUDA for CPU cores: the names of CUDA C++ and of its runtime, for sources that cu2cpp.py has
// translated.
//
// Compile with -std=c++20 -fno-strict-aliasing (kernels look at memory through float4 and the like,
// as CUDA allows), and link with the .cpp files of this directory and with -lboost_context
// -pthread.
//
// CUDA_CPU is defined, for code that cannot run here: anything with PTX, thread block clusters,
// cooperative groups, textures, dynamic parallelism. __CUDA_ARCH__ is not defined.

#pragma once

#define CUDA_CPU 1

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

#include "cpu/execution/cuda_cpu.h"
#include "cpu/execution/device_functions.h"
#include "cuda_runtime_api.h"
#include "vector_types.h"

#define CUDART_VERSION 13000
