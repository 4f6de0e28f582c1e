// Memory that kernels get from malloc() and new: it is the device's, although it is of the host's
// heap here.

#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_cpu {

/// Whether a kernel has asked for memory. Then what a launch finds is not known (repeats.h).
bool device_heap_used();
/// Whether the address is in memory that a kernel has asked for, and nobody has given back.
bool in_device_heap(std::uintptr_t address);

/// What cpu/c/heap.cpp calls for memory that was asked for, and before it is given back. Both
/// return `memory`.
void* noted(void* memory, std::size_t size);
void* forgotten(void* memory);

}  // namespace cuda_cpu
