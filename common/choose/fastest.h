// Which of several ways to compute the same is the fastest? Estimates err by some per cent, so the
// ways are tried.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace common {

struct Trial {
  size_t fastest;         ///< the number of a call
  std::vector<float> ms;  ///< the median of each call
};

/// Calls are sampled in turn, each after a call of its own and, if `cold`, with a cold L2 cache. A
/// call that is much slower than the fastest is not made again. All of it takes about
/// `milliseconds`, or five rounds if these take longer, after 200 ms of calls if one is a load for
/// the card. It must not be captured in a graph.
Trial try_all(const std::vector<std::function<void()>>& calls, bool cold, float milliseconds);

}  // namespace common
