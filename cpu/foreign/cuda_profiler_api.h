// cudaProfilerStart() and its kin, which runtime_helpers.h has.
#pragma once
#include "cuda_runtime.h"
