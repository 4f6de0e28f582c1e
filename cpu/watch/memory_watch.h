// Which of the device's memory a row of a table really uses: for the memory column's test.
//
// While it watches, every allocation's pages are closed. Whoever comes to one, a kernel, a copy or
// a library, opens it, and its bytes count. Only with CUDA_CPU_WATCH_MEMORY=1 in the environment.
#pragma once

#include <cstddef>

namespace cuda_cpu {

bool watches_memory();
/// Whether the backend is built with the address sanitizer, which knows the end of each allocation.
bool checks_addresses();
/// What an allocation takes to be watched: it has its pages to itself.
inline constexpr std::size_t kPage = 4096;
inline std::size_t in_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

void start_watching();
/// Bytes of the allocations that were used since start_watching(). All are open again.
double stop_watching();

}  // namespace cuda_cpu
