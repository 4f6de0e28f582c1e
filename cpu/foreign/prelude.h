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

#include "cuda_runtime.h"
#include "runtime_helpers.h"
