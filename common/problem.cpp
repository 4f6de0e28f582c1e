#include "common/problem.h"

#include <algorithm>
#include <cmath>

#include "common/choose/ways.h"
#include "common/verify/guards.h"

namespace common {

double dot_tolerance(int64_t length, double u_sum, double u_out, double u_in) {
  const double terms = static_cast<double>(length);
  return 4 * std::sqrt(2 * u_in * u_in / 3 + u_sum * u_sum * terms / 6 + u_out * u_out / 3);
}

double tensor_core_sum(int64_t length) {
  // Truncation loses at most one unit in the last place, 2 u, of each of length / 8 partial sums;
  // this counts the most. Added up linearly, and divided by what dot_tolerance multiplies it by.
  const double terms = static_cast<double>(length);
  return 2 * kRoundoffFp32 * std::max(1.0, terms / 8) / std::sqrt(terms / 6);
}

double bound_of(const Check& check, double reference_rms) {
  double bound = check.tolerance;
  if (check.uncancelled && reference_rms > 0) {
    bound *= std::max(1.0, *check.uncancelled / reference_rms);
  }
  return std::min(bound, kMostBound);
}

double limit_ms(const Work& work, const Device& device, Rate rate) {
  if (device.bytes_per_second == 0 || device.peak(rate) == 0) return 0;
  return 1e3 * std::max(work.bytes / device.bytes_per_second, work.flops / device.peak(rate));
}

bool is_memory_bound(const Work& work, const Device& device, Rate rate) {
  return work.bytes / device.bytes_per_second >= work.flops / device.peak(rate);
}

void Storage::allocate() {
  char* memory = nullptr;
  CUDA_CHECK(cudaMalloc(&memory, guard_bytes() + count * element_bytes + guard_bytes()));
  data = memory + guard_bytes();
  set_guards(*this);
}

void Storage::release() {
  if (data) cudaFree(static_cast<char*>(data) - guard_bytes());
  data = nullptr;
}

Kernel& Problem::kernel(std::string name, Role role, std::function<void()> launch) {
  return kernel(std::move(name), role, std::vector<Way>{{.launch = std::move(launch)}});
}

Kernel& Problem::kernel(std::string name, Role role, std::vector<Way> ways, size_t most) {
  ways.resize(worth_trying(ways, most));
  Kernel& row = kernels.emplace_back();
  row.name = std::move(name);
  row.role = role;
  row.ways = std::move(ways);
  row.work = work;
  return row;
}

void Problem::compare(std::string fast, std::string slow, std::string format) {
  comparisons.push_back({std::move(fast), std::move(slow), std::move(format)});
}

}  // namespace common
