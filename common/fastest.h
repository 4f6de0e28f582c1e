// Which of several ways to compute the same is the fastest? Estimates err by some per cent, so the
// ways are tried.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

struct Trial {
  size_t fastest;         ///< the number of a call
  std::vector<float> ms;  ///< the median of each call
};

/// The calls are sampled as the lessons sample their kernels: in turn, each after a call of its
/// own, and if `cold`, with a cold L2 cache. Who is much slower than the fastest is not asked
/// again. It takes about so many milliseconds, or five rounds if that is more, and 200 ms before
/// that if the calls are a load for the card. It must not be captured in a graph.
Trial try_all(const std::vector<std::function<void()>>& calls, bool cold, float milliseconds);
