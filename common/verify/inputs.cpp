#include "common/verify/inputs.h"

#include <fmt/core.h>

#include "common/numerics.h"

namespace common {

Inputs::Inputs(Problem& problem, uint64_t seed)
    : problem_(problem), stream_((seed << 8) + (seed >> 56) * 0x9e3779b97f4a7c15) {}

void Inputs::fill() {
  uint64_t stream = stream_;
  for (const auto& input : problem_.inputs) fill_random(*input, stream++);
  for (const auto& adjust : problem_.adjustments) adjust();
}

void Inputs::keep() {
  kept_.clear();
  for (const auto& input : problem_.inputs) kept_.push_back(checksum(*input));
}

std::string Inputs::changed() {
  for (size_t i = 0; i < kept_.size(); ++i) {
    if (checksum(*problem_.inputs[i]) == kept_[i]) continue;
    fill();
    return fmt::format("changed input {}", i + 1);
  }
  return "";
}

}  // namespace common
