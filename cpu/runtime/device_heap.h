// Memory that kernels get from malloc() and new: it is the device's, although it is of the host's
// heap here.

#pragma once

#include <cstdint>

namespace cuda_cpu {

/// Whether a kernel has asked for memory. Then what a launch finds is not known (repeats.h).
bool device_heap_used();
/// Whether the address is in memory that a kernel has asked for, and nobody has given back.
bool in_device_heap(std::uintptr_t address);

}  // namespace cuda_cpu
