// Hopper's own instructions (sm_90a), under names that a kernel reads well with. Lesson 3
// introduces them; the PTX stays in these headers, each of which names its chapter of the PTX ISA.
#pragma once

#include "primitives/approximate.cuh"
#include "primitives/hopper/barrier.cuh"
#include "primitives/hopper/cluster.cuh"
#include "primitives/hopper/copies.cuh"
#include "primitives/hopper/tensor_map.h"
#include "primitives/hopper/wgmma.cuh"
