#include "common/verify/verify.h"

#include <fmt/core.h>

#include <chrono>
#include <cmath>

#include "common/numerics.h"
#include "common/report/progress.h"
#include "common/verify/attempt.h"
#include "common/verify/guards.h"

#ifdef CUDA_CPU
#include "cpu/execution/cuda_cpu.h"
#endif

namespace common {

namespace {

// Bytes of 0xff are a NaN in every type here.
void poison(const Storage& storage) {
  CUDA_CHECK(cudaMemsetAsync(storage.data, 0xff, storage.count * storage.element_bytes));
}

void launch_poisoned(Row& row, const Problem& problem, const std::vector<Check>& checks,
                     const std::function<void(Row&)>& launch) {
  for (const auto& output : problem.outputs) poison(*output);
  if (row.kernel->hooks.before) {
    row.kernel->hooks.before();
    for (const Check& check : checks) poison(*check.output);
  }
  launch_and_wait([&] { launch(row); });
  if (row.kernel->hooks.collect) row.kernel->hooks.collect();
}

/// Whether one result is right; the row keeps the largest error, or that of a wrong one.
bool compare(Row& row, const Check& check) {
  if (check.compute_reference) check.compute_reference();
  const Error error = compare(check);
  // Written so that a NaN is never ok.
  const bool ok = error.frobenius <= error.bound && error.worst <= kWorstToFrobenius * error.bound;
  if (row.tolerance == 0 || !ok || error.frobenius > row.error.frobenius) {
    row.error = error;
    row.tolerance = error.bound;
  }
  return ok;
}

/// What a row must not do, in words, has come to light: no later row is blamed for it.
void condemn(Row& row, const std::string& why) {
  row.ok = row.harmless = false;
  row.wrong = why;
}

/// It was not launched, or did not come to an end.
void fail_row(Row& row, const std::vector<Check>& checks, const std::string& why) {
  row.ran = true;
  row.error.frobenius = row.error.worst = std::nan("");
  row.tolerance = checks.front().tolerance;
  condemn(row, why);
}

const std::vector<Check>& checks_of(const Row& row, const Problem& problem) {
  return row.kernel->checks.empty() ? problem.checks : row.kernel->checks;
}

/// Reports of the CPU backend name the row.
void name_row([[maybe_unused]] const std::string& name) {
#ifdef CUDA_CPU
  cuda_cpu::set_row(name.c_str());
#endif
}

/// What the workspaces hold, which launches leave to each other.
std::vector<uint64_t> left_in_workspaces(const Problem& problem) {
  std::vector<uint64_t> sums;
  for (const auto& workspace : problem.workspaces) sums.push_back(checksum(*workspace));
  return sums;
}

void verify_row(Row& row, const Problem& problem, Inputs& inputs,
                const std::function<void(Row&)>& launch, bool explain) {
  const std::vector<Check>& checks = checks_of(row, problem);
  const std::vector<uint64_t> found_there = left_in_workspaces(problem);
  const auto start = std::chrono::steady_clock::now();
  const std::string failed = attempt([&] { launch_poisoned(row, problem, checks, launch); });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  if (row.launch_seconds == 0) row.launch_seconds = took.count();
  row.ok = row.ok || !row.ran;
  row.ran = true;
  if (!failed.empty()) fail_row(row, checks, failed);
  row.leaves_something |= left_in_workspaces(problem) != found_there;
  for (size_t i = 0; failed.empty() && i < checks.size(); ++i) {
    if (compare(row, checks[i])) continue;
    row.ok = false;
    if (explain && row.wrong.empty()) {
      row.wrong = wrong_elements(checks[i]);
      if (checks.size() > 1) row.wrong += fmt::format(" (result {} of {})", i + 1, checks.size());
    }
    break;
  }
  if (const std::string found = trespass(problem); !found.empty()) condemn(row, found);
  if (const std::string found = inputs.changed(); !found.empty()) condemn(row, found);
}

}  // namespace

void verify(Table& table, Inputs& inputs, const std::function<void(Row&)>& launch, bool explain,
            const std::function<bool(const Row&)>& which) {
  for (Row& row : table.rows) {
    if (!row.selected() || !row.harmless || (which && !which(row))) continue;
    show_progress(table.problem->name + ": verifying " + row.kernel->name);
    const Problem& problem = *table.problem;
    try {
      name_row(row.kernel->name);
      verify_row(row, problem, inputs, launch, explain);
      name_row("");
    } catch (const DeviceLost& lost) {
      fail_row(row, checks_of(row, problem), lost.how);
      throw DeviceLost{fmt::format("{}, row \"{}\": {}", problem.name, row.kernel->name, lost.how)};
    }
  }
}

}  // namespace common
