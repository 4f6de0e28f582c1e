#include "common/start/memory.h"

#include "common/report/text.h"

namespace common {

void require_memory(const std::deque<Problem>& problems, const CommandLine& line,
                    const Device& device) {
  double needed = 0;
  const Problem* largest = nullptr;
  for (const Problem& problem : problems) {
    double bytes = problem.scratch_bytes;
    for (const Storages* list :
         {&problem.inputs, &problem.outputs, &problem.references, &problem.workspaces}) {
      for (const auto& storage : *list) bytes += storage->bytes();
    }
    if (bytes > needed) needed = bytes, largest = &problem;
  }
  // The flush; workspaces that cuBLAS allocates.
  needed += 2.0 * static_cast<double>(device.l2_bytes) + 0x1p27;
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  if (needed <= static_cast<double>(free)) return;
  // A sweep chooses its sizes itself; by its first dimension one knows a problem.
  const std::string size =
      largest && line.sweep ? fmt::format("{} = {}", largest->dims[0].name, largest->dims[0].extent)
                            : fmt::format("N = {}", line.n);
  fail(kDeviceCannot, "%s needs %sB of device memory (%.0f bytes), %sB (%zu bytes) are free",
       size.c_str(), with_prefix(needed).c_str(), needed,
       with_prefix(static_cast<double>(free)).c_str(), free);
}

}  // namespace common
