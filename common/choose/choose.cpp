#include "common/choose/choose.h"

#include "common/choose/fastest.h"
#include "common/measure/graph.h"
#include "common/report/progress.h"
#include "common/verify/attempt.h"

namespace common {

#ifdef CUDA_CPU

void choose_ways(Table&, const Device&) {}

#else

namespace {

void choose_way(Row& row, Timing timing, const Device& device) {
  constexpr double kLongUs = 500;  // such calls need no graph
  constexpr int kCalls = 5;
  constexpr float kMilliseconds = 200;
  if (row.kernel->hooks.before) row.kernel->hooks.before();
  const std::vector<Way>& ways = row.kernel->ways;
  const bool in_graphs = timing == Timing::graph && ways[row.way].microseconds < kLongUs;
  std::deque<Graph> graphs;
  std::vector<size_t> tried;
  std::vector<std::function<void()>> calls;
  for (size_t i = 0; i < ways.size(); ++i) {
    if (ways[i].shared_bytes > device.shared_bytes) continue;
    tried.push_back(i);
    if (in_graphs) {
      ways[i].launch();  // loads what may not be loaded while it is captured
      calls.push_back([&graph = graphs.emplace_back(ways[i].launch, kCalls)] { graph.launch(); });
    } else {
      calls.push_back(ways[i].launch);
    }
  }
  const Trial trial = try_all(calls, timing == Timing::cold, kMilliseconds);
  CUDA_CHECK(cudaGetLastError());  // a way that cannot be launched would look fast
  row.tried_ms.resize(ways.size());
  for (size_t i = 0; i < tried.size(); ++i) {
    row.tried_ms[tried[i]] = trial.ms[i] / static_cast<float>(in_graphs ? kCalls : 1);
  }
  row.way = tried[trial.fastest];
}

}  // namespace

void choose_ways(Table& table, const Device& device) {
  for (Row& row : table.rows) {
    if (row.kernel->ways.size() < 2 || !row.selected()) continue;
    show_progress(table.problem->name + ": trying the ways of " + row.kernel->name);
    // Where a way cannot be launched the row stays with its first, which says so when it is
    // verified.
    attempt([&] { choose_way(row, table.timing, device); });
  }
}

#endif

}  // namespace common
