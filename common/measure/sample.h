// How long the rows of a table take.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "common/results.h"

namespace common {

struct Sampling {
  int samples = 0;                              ///< of each row; 0: as many as fit
  std::chrono::steady_clock::time_point end{};  ///< until when, if it takes no longer than that
  uint64_t seed = 1;
};

/// Samples the rows that may be launched again, in turn, each round in another order, and then
/// verifies what it timed: `verify` is given a function that launches a row as it was timed.
void sample(Table& table, const Sampling& how, const Device& device,
            const std::function<void(const std::function<void(Row&)>& launch)>& verify);

}  // namespace common
