// Operators that are several launches, one after another.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "operators/estimate.h"
#include "operators/operands.h"

namespace operators::softmax {

/// The steps of an operator, one after another, as one way.
inline Way in_turn(const std::string& name, const std::vector<Way>& steps) {
  Way all = {name, 0,
             [steps] {
               for (const Way& step : steps) step.launch();
             },
             0};
  for (const Way& step : steps) {
    all.microseconds += step.microseconds;
    all.shared_bytes = std::max(all.shared_bytes, step.shared_bytes);
  }
  return all;
}

/// A launch that does nothing but move so many bytes from or to memory.
inline double microseconds_to_move(double bytes) { return kNextLaunch + bytes / memory_rate(); }

}  // namespace operators::softmax
