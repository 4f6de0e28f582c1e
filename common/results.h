// What a run finds out about the rows of a table: what is verified, measured, counted, and then
// printed and recorded.
#pragma once

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/problem.h"
#include "cpu/watch/counts.h"

namespace common {

using cuda_cpu::Counts;

/// What one block of a row's kernel takes of a multiprocessor.
struct Resources {
  int threads = 0;
  int registers = 0;      ///< of a thread, at launch
  int local_bytes = 0;    ///< of a thread, in memory: spilled registers and indexed arrays
  int blocks_per_sm = 0;  ///< that run at the same time
};

/// A kernel of a problem, and its results.
struct Row {
  const Kernel* kernel = nullptr;
  std::string missing = {};  ///< what it needs that the device does not have; empty: nothing
  bool asked_for = false;    ///< by --kernel
  size_t way = 0;            ///< which of the kernel's ways is launched
  std::vector<double> tried_ms = {};  ///< that the ways took when they were tried

  bool ran = false;
  bool ok = false;
  bool harmless = true;           ///< can be launched, and changes nothing but its results
  bool leaves_something = false;  ///< in a workspace: another thing than it found there
  double launch_seconds = 0;      ///< that the first launch took the host, until it was done
  Error error = {};
  double tolerance = 0;
  std::string wrong = {};              ///< in words, if it was asked for or if no number tells
  std::vector<float> samples_ms = {};  ///< sorted
  std::vector<double> clocks_hz = {};  ///< of the multiprocessors, for each sample; sorted
  std::optional<Counts> counts = {};   ///< instead of samples
  std::optional<Resources> resources = {};

  bool selected() const { return missing.empty() && asked_for; }
  const std::function<void()>& launch() const { return kernel->ways[way].launch; }
  double percentile(double p) const {
    const double rank = p / 100 * static_cast<double>(samples_ms.size() - 1);
    return samples_ms[static_cast<size_t>(std::lround(rank))];
  }
  double median_ms() const { return percentile(50); }
  bool timed() const { return !samples_ms.empty(); }
  double clock_hz() const { return clocks_hz.empty() ? 0 : clocks_hz[clocks_hz.size() / 2]; }
};

struct Table {
  Problem* problem = nullptr;
  Timing timing{};
  bool counting = false;  ///< what is moved, instead of timing
  std::vector<Row> rows{};

  bool any_selected() const {
    return std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.selected(); });
  }
  /// The first row that was timed: what `speed` compares with.
  const Row* baseline() const {
    for (const Row& row : rows) {
      if (row.timed()) return &row;
    }
    return nullptr;
  }
};
using Tables = std::deque<Table>;

}  // namespace common
