// What programs of a reader's own find without asking: nvcc includes cuda_runtime.h by itself.

#pragma once

#include <assert.h>
#include <stdio.h>
#include <time.h>

#include "cuda_runtime.h"
#include "runtime_helpers.h"
