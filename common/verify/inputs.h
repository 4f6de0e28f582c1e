// A problem's inputs: random numbers, which no kernel may change.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/problem.h"

namespace common {

class Inputs {
 public:
  Inputs(Problem& problem, uint64_t seed);
  /// They depend on the seed alone. The problem's adjustments come last.
  void fill();
  /// From now on fill() makes others.
  void draw_others() { stream_ += problem_.inputs.size(); }
  /// What they are now, each is to stay.
  void keep();
  /// "changed input 2", if that is so, and what was changed is made right again; empty otherwise.
  std::string changed();

 private:
  Problem& problem_;
  uint64_t stream_;  // of random numbers: the first input's
  std::vector<uint64_t> kept_;
};

}  // namespace common
