#include "common/measure/sample.h"

#include <map>
#include <random>

#include "common/measure/cold_cache.h"
#include "common/measure/event.h"
#include "common/measure/graph.h"
#include "common/measure/sm_clock.h"
#include "common/numerics.h"
#include "common/report/progress.h"

namespace common {

namespace {

/// The rows' launches as they are timed, and what times them.
class Stopwatch {
 public:
  Stopwatch(const Table& table, const std::vector<Row*>& rows, const Device& device, uint64_t seed)
      : timing_(table.timing), gpu_(device.backend == "cuda"), order_(seed) {
    for (const Row* row : rows) {
      launches_[row] = row->launch();
#ifndef CUDA_CPU
      if (timing_ != Timing::graph || row->kernel->hooks.time) continue;
      const Graph& graph = graphs_.emplace_back(row->launch(), calls());
      launches_[row] = [&graph] { graph.launch(); };
#endif
    }
  }
  void launch(const Row& row) { launches_.at (&row)(); }
  int calls() const { return timing_ == Timing::graph ? kGraphCalls : 1; }
  /// Of one call, in milliseconds.
  float time(const Row& row) {
    if (row.kernel->hooks.time && gpu_) return row.kernel->hooks.time(timing_);
    start_.record_anywhere(order_);
    launch(row);
    stop_.record();
    CUDA_CHECK(cudaGetLastError());
    return stop_.since(start_) / static_cast<float>(calls());
  }
  std::mt19937_64& order() { return order_; }

 private:
  Timing timing_;
  bool gpu_;
  std::mt19937_64 order_;
  std::map<const Row*, std::function<void()>> launches_;
#ifndef CUDA_CPU
  std::deque<Graph> graphs_;
#endif
  Event start_, stop_;
};

}  // namespace

void sample(Table& table, const Sampling& how, const Device& device,
            const std::function<void(const std::function<void(Row&)>& launch)>& verify) {
  using Clock = std::chrono::steady_clock;
  std::vector<Row*> timed;
  for (Row& row : table.rows) {
    if (row.ran && row.harmless) timed.push_back(&row);
  }
  const bool gpu = device.backend == "cuda";
  Stopwatch watch(table, timed, device, how.seed);
  SmClock clock;
  const ColdCache cache(table.timing == Timing::cold, device.l2_bytes);

  // Warm-up, which also tells how long a call takes.
  std::map<const Row*, double> call_ms;
  double round_ms = 0;
  for (const Row* row : timed) {
    if (!gpu) break;
    call_ms[row] = static_cast<double>(watch.calls()) * watch.time(*row);
    round_ms += call_ms[row];
  }
  // To verify again takes about a round.
  const Clock::time_point end = how.end - std::chrono::milliseconds(std::lround(round_ms));
  const int least = how.samples ? how.samples : gpu ? 3 : 1;
  const int most = how.samples ? how.samples : gpu ? 50 : 5;
  // What ran before a kernel decides on the clock that it finds. So each sample follows a call of
  // the same kernel, and in another order each round, for what ran before that. The card takes
  // about kSettleMs to forget what it did: after a shorter round it is the same mixture for all, in
  // a longer one each kernel is called for that long before its sample. A call that is queued
  // behind other work also shows the device's time and not the host's. Only a call that lasts so
  // long that its beginning does not count goes without all this.
  constexpr double kSettleMs = 200, kLongMs = 4 * kSettleMs;
  const double alone_ms = round_ms > kSettleMs ? kSettleMs : 0;
  // On the CPU a launch may take as long as all the rest: a single sample is what is verified.
  const bool together = !gpu && most == 1;
  for (int round = 0; !together && round < most && (round < least || Clock::now() < end); ++round) {
    show_progress(table.problem->name + ": sample " + std::to_string(round + 1));
    std::shuffle(timed.begin(), timed.end(), watch.order());
    for (Row* row : timed) {
      if (gpu && call_ms[row] < kLongMs) {
        double ms = 0;
        do {
          watch.launch(*row);
          ms += std::max(call_ms[row], 1e-3);
        } while (ms < alone_ms);
      }
      cache.make_cold(round);
      clock.start();
      row->samples_ms.push_back(watch.time(*row));
      clock.stop();
      const double hz = clock.hz();
      row->clocks_hz.push_back(hz);
      if (row->kernel->hooks.cycles && hz > 0) {
        row->samples_ms.back() = static_cast<float>(1e3 * row->kernel->hooks.cycles() / hz);
      }
    }
  }
  verify([&](Row& row) {
    if (together) {
      row.samples_ms.push_back(watch.time(row));
    } else {
      watch.launch(row);
    }
  });
  for (Row* row : timed) {
    std::sort(row->samples_ms.begin(), row->samples_ms.end());
    std::sort(row->clocks_hz.begin(), row->clocks_hz.end());
  }
}

}  // namespace common
