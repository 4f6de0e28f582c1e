// What programs of a reader's own find without asking: nvcc includes cuda_runtime.h by itself.

#pragma once

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

#include "cuda_runtime.h"
#include "runtime_helpers.h"
