#include "common/verify/verify.h"

#include <fmt/core.h>

#include "common/numerics.h"
#include "common/report/progress.h"
#include "common/verify/guards.h"

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
  launch(row);
  CUDA_CHECK(cudaGetLastError());
  CUDA_CHECK(cudaDeviceSynchronize());
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

void verify_row(Row& row, const Problem& problem, const std::function<void(Row&)>& launch,
                bool explain) {
  const std::vector<Check>& checks =
      row.kernel->checks.empty() ? problem.checks : row.kernel->checks;
  launch_poisoned(row, problem, checks, launch);
  row.ok = row.ok || !row.ran;
  row.ran = true;
  for (size_t i = 0; i < checks.size(); ++i) {
    if (compare(row, checks[i])) continue;
    row.ok = false;
    if (explain && row.wrong.empty()) {
      row.wrong = wrong_elements(checks[i]);
      if (checks.size() > 1) row.wrong += fmt::format(" (result {} of {})", i + 1, checks.size());
    }
    break;
  }
  if (const std::string found = trespass(problem); !found.empty()) {
    row.ok = false;
    row.wrong = found;
  }
}

}  // namespace

void verify(Table& table, const std::function<void(Row&)>& launch, bool explain) {
  for (Row& row : table.rows) {
    if (!row.selected()) continue;
    show_progress(table.problem->name + ": verifying " + row.kernel->name);
    verify_row(row, *table.problem, launch, explain);
  }
}

}  // namespace common
