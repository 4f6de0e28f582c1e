// What both Clifford products of the library do with a call: they have one description and the same
// operands.
#pragma once

#include <string>

#include "operators/library/call.h"

namespace operators::library {

/// Where a pass has x among a call's arguments; y and w stand behind it. Forward: x, y, w, out;
/// backward: d_out, x, y, w, d_x, d_y, d_w.
constexpr int kForwardX = 0, kBackwardX = 1;

/// Refuses a description that no GPU can compute. most_features(description) is 0
/// where there is no such algebra, and `algebras` names those that there are.
inline void check_clifford(const fk_clifford& of, const char* algebras,
                           int64_t (*most_features)(const fk_clifford&)) {
  constexpr int64_t kMost = 1 << 30;
  check_type("clifford", of.type, {FK_FLOAT32});
  if (of.normed != 0 && of.normed != 1) {
    throw Refusal{FK_BAD_ARGUMENT,
                  "normed is " + std::to_string(of.normed) + "; it has to be 0 or 1"};
  }
  const int64_t most = most_features(of);
  if (most == 0) {
    throw Refusal{FK_BAD_ARGUMENT, "p, q, r are " + std::to_string(of.p) + ", " +
                                       std::to_string(of.q) + ", " + std::to_string(of.r) +
                                       "; they have to be " + algebras};
  }
  check_sizes({{"batch", of.batch, kMost}, {"features", of.features, most}});
  if (of.batch * of.features > kMost) {
    throw Refusal{FK_BAD_SHAPE, "batch * features is more than 2^30"};
  }
}

/// How many elements x, y and the result have, and how many w has.
struct CliffordCounts {
  int64_t x = 0, w = 0;
};

inline Argument clifford_argument(const char* name, int64_t count, bool written = false) {
  return {name, static_cast<size_t>(count) * sizeof(float), written};
}

inline std::vector<Argument> forward_arguments(const CliffordCounts& counts) {
  return {clifford_argument("x", counts.x), clifford_argument("y", counts.x),
          clifford_argument("w", counts.w), clifford_argument("out", counts.x, true)};
}

inline std::vector<Argument> backward_arguments(const CliffordCounts& counts) {
  return {clifford_argument("d_out", counts.x),     clifford_argument("x", counts.x),
          clifford_argument("y", counts.x),         clifford_argument("w", counts.w),
          clifford_argument("d_x", counts.x, true), clifford_argument("d_y", counts.x, true),
          clifford_argument("d_w", counts.w, true)};
}

}  // namespace operators::library
