#include "common/measure/count.h"

#include <chrono>

#ifdef CUDA_CPU
#include "cpu/watch/counting.h"
#else
#include <cuda_profiler_api.h>
#include <nvtx3/nvToolsExt.h>
#endif

namespace common {

#ifdef CUDA_CPU

void count_launch(const Table&, Row& row) {
  cuda_cpu::start_counting();
  // Without what it takes to look up the lines that are to blame.
  const auto start = std::chrono::steady_clock::now();
  try {
    row.launch()();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    row.launch_seconds = took.count();
  } catch (...) {
    cuda_cpu::stop_counting();
    throw;
  }
  row.counts = cuda_cpu::stop_counting();
}

#else

void count_launch(const Table& table, Row& row) {
  nvtxRangePushA((table.problem->name + ": " + row.kernel->name).c_str());
  CUDA_CHECK(cudaProfilerStart());
  row.launch()();
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(cudaProfilerStop());
  nvtxRangePop();
}

#endif

}  // namespace common
