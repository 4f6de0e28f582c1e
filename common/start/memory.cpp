#include "common/start/memory.h"

#include "common/report/text.h"

namespace common {

namespace {

/// "N = 8"; a sweep chooses its sizes itself, and by its first dimension one knows a problem.
std::string size_of(const Problem* problem, const CommandLine& line) {
  if (!line.sweep || !problem) return fmt::format("N = {}", line.n);
  return fmt::format("{} = {}", problem->dims[0].name, problem->dims[0].extent);
}

void require_bytes(double needed, const std::string& who) {
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  if (needed <= static_cast<double>(free)) return;
  fail(kDeviceCannot, "%s %sB of device memory (%.0f bytes), %sB (%zu bytes) are free", who.c_str(),
       with_prefix(needed).c_str(), needed, with_prefix(static_cast<double>(free)).c_str(), free);
}

}  // namespace

void require_memory(const Problem& problem, const CommandLine& line) {
  require_bytes(problem.work.bytes, size_of(&problem, line) + " needs at least");
}

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
  require_bytes(needed, size_of(largest, line) + " needs");
}

}  // namespace common
