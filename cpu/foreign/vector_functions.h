// make_float4() and its kin, which cuda_runtime.h has.
#pragma once
#include "cuda_runtime.h"
