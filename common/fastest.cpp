#include "common/fastest.h"

#include <algorithm>

#include "common/device.h"
#include "common/event.h"
#include "common/numerics.h"

size_t fastest_of(const std::vector<std::function<void()>>& calls, bool cold, float milliseconds) {
  struct Candidate {
    size_t number;
    std::vector<float> ms = {};
    float median() {
      std::sort(ms.begin(), ms.end());
      return ms[ms.size() / 2];
    }
  };
  std::vector<Candidate> candidates;
  for (size_t number = 0; number < calls.size(); ++number) candidates.push_back({number});

  const size_t flush_bytes = cold ? 2 * static_cast<size_t>(Device::current().l2_bytes) : 1;
  Scratch<char> flushed(flush_bytes);
  Event start, stop;
  constexpr float kHopeless = 1.25;
  int rounds = 1;
  for (int round = 0; candidates.size() > 1 && round < rounds; ++round) {
    float round_ms = 0;
    for (Candidate& candidate : candidates) {
      calls[candidate.number]();
      if (cold) CUDA_CHECK(cudaMemsetAsync(flushed, round, flush_bytes));
      start.record();
      calls[candidate.number]();
      stop.record();
      candidate.ms.push_back(stop.since(start));
      round_ms += 2 * candidate.ms.back();
    }
    if (round == 0) {
      rounds = 1 + static_cast<int>(std::clamp(milliseconds / round_ms, 4.0f, 30.0f));
      float least = candidates[0].ms[0];
      for (const Candidate& candidate : candidates) least = std::min(least, candidate.ms[0]);
      std::erase_if(candidates, [=](const Candidate& candidate) {
        return candidate.ms[0] > kHopeless * least;
      });
    }
  }
  return std::min_element(candidates.begin(), candidates.end(),
                          [](Candidate x, Candidate y) { return x.median() < y.median(); })
      ->number;
}
