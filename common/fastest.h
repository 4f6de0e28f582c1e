// Which of several ways to compute the same is the fastest? Estimates err by some per cent, so the
// ways are tried.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

/// The number of the fastest of these calls. They are sampled as the lessons sample their kernels:
/// in turn, each after a call of its own, and if `cold`, with a cold L2 cache. Who is much slower
/// than the fastest is not asked again. It takes about so many milliseconds, or five rounds if that
/// is more, and must not be captured in a graph.
size_t fastest_of(const std::vector<std::function<void()>>& calls, bool cold, float milliseconds);
