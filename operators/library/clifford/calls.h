// What both Clifford products of the library do with a call: they have one description and the same
// operands.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "operators/library/call.h"

namespace operators::library {

/// Where a pass has x among a call's arguments; y and w stand behind it. Forward: x, y, w, out;
/// backward: d_out, x, y, w, d_x, d_y, d_w.
constexpr int kForwardX = 0, kBackwardX = 1;

/// Refuses sizes and an algebra that no GPU can compute. most_features(description) is 0
/// where there is no such algebra, and `algebras` names those that there are.
inline void check_clifford(const fk_clifford& of, const char* algebras,
                           int64_t (*most_features)(const fk_clifford&)) {
  constexpr int64_t kMost = 1 << 30;
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

/// Refuses what only fk_clifford_forward() and its gradients can.
inline void refuse_options(const fk_clifford& of, const std::string& name) {
  const auto refuse = [&](const char* field, int value) {
    if (value == 0) return;
    throw Refusal{FK_BAD_ARGUMENT, std::string(field) + " is " + std::to_string(value) + "; for " +
                                       name + " it has to be 0"};
  };
  refuse("gate", of.gate);
  refuse("unweighted", of.unweighted);
  refuse("weight_type", of.weight_type);
  refuse("layout", of.layout);
  refuse("order", of.order);
}

/// How many elements x, y and the result have, and how many w has; and their types.
struct CliffordCounts {
  int64_t x = 0, w = 0;
  int64_t bytes = sizeof(float), weight_bytes = sizeof(float);  ///< of an element
  bool unweighted = false;
};

inline Argument clifford_argument(const char* name, const CliffordCounts& of,
                                  bool written = false) {
  return {name, static_cast<size_t>(of.x * of.bytes), written};
}
inline Argument weight_argument(const char* name, const CliffordCounts& of, bool written = false) {
  return {name, static_cast<size_t>(of.w * of.weight_bytes), written, of.unweighted};
}

inline std::vector<Argument> forward_arguments(const CliffordCounts& of) {
  return {clifford_argument("x", of), clifford_argument("y", of), weight_argument("w", of),
          clifford_argument("out", of, true)};
}

inline std::vector<Argument> backward_arguments(const CliffordCounts& of) {
  return {clifford_argument("d_out", of),     clifford_argument("x", of),
          clifford_argument("y", of),         weight_argument("w", of),
          clifford_argument("d_x", of, true), clifford_argument("d_y", of, true),
          weight_argument("d_w", of, true)};
}

/// The ways of any algebra of up to five vectors, and how many triples it has: in any.cu, which is
/// compiled by itself.
std::vector<Way> any_clifford_forward(const fk_clifford& of, const Caller& caller,
                                      const Operands& at);
std::vector<Way> any_clifford_backward(const fk_clifford& of, const Caller& caller,
                                       const Operands& at);
int clifford_triples(const fk_clifford& of);

/// The ways of a description with another layout or order of blades. make() has those of one in the
/// kernels' own, which is also what fk_clifford has by default. In any.cu.
using CliffordWays =
    std::function<std::vector<Way>(const fk_clifford&, const Caller&, const Operands&)>;
std::vector<Way> layout_clifford_forward(const fk_clifford& of, const Caller& caller,
                                         const Operands& at, CliffordWays make);
std::vector<Way> layout_clifford_backward(const fk_clifford& of, const Caller& caller,
                                          const Operands& at, CliffordWays make);

/// The ways of a 16-bit type in kernels of one algebra; none, where there are no such kernels. In
/// half.cu.
std::vector<Way> half_clifford_forward(const fk_clifford& of, const Caller& caller,
                                       const Operands& at);
std::vector<Way> half_clifford_backward(const fk_clifford& of, const Caller& caller,
                                        const Operands& at);

}  // namespace operators::library
