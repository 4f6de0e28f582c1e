#include "common/choose/fastest.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>

#include "common/choose/ways.h"
#include "common/device.h"
#include "common/measure/cold_cache.h"
#include "common/measure/event.h"
#include "common/numerics.h"

namespace common {

Trial try_all(const std::vector<std::function<void()>>& calls, bool cold, float milliseconds) {
  std::vector<std::vector<float>> samples(calls.size());
  std::vector<size_t> candidates(calls.size());
  std::iota(candidates.begin(), candidates.end(), 0);

  const ColdCache cache(cold && calls.size() > 1, Device::current().l2_bytes);
  Event start, stop;
  std::mt19937_64 places;
  const auto time_of = [&](size_t i) {
    start.record_anywhere(places);
    calls[i]();
    stop.record();
    return stop.since(start);
  };
  // The card lowers its clock under load, but not at once. Calls of microseconds are no load.
  constexpr float kLoadMs = 0.02f;
  constexpr std::chrono::milliseconds kSettle(200);
  const auto settled = std::chrono::steady_clock::now() + kSettle;
  while (calls.size() > 1 && time_of(0) > kLoadMs && std::chrono::steady_clock::now() < settled) {
  }

  int rounds = 1;
  for (int round = 0; candidates.size() > 1 && round < rounds; ++round) {
    float round_ms = 0;
    for (const size_t i : candidates) {
      calls[i]();
      cache.make_cold(round);
      samples[i].push_back(time_of(i));
      round_ms += 2 * samples[i].back();
    }
    if (round == 0) {
      rounds = 1 + static_cast<int>(std::clamp(milliseconds / round_ms, 4.0f, 30.0f));
      const float least = (*std::min_element(samples.begin(), samples.end()))[0];
      std::erase_if(candidates, [&](size_t i) { return samples[i][0] > kHopeless * least; });
    }
  }
  std::vector<float> medians;
  for (std::vector<float>& each : samples) {
    std::sort(each.begin(), each.end());
    medians.push_back(each.empty() ? 0 : each[each.size() / 2]);
  }
  const size_t fastest =
      *std::min_element(candidates.begin(), candidates.end(),
                        [&](size_t a, size_t b) { return medians[a] < medians[b]; });
  return {fastest, medians};
}

}  // namespace common
