// What the library's Clifford products have in common that compute by kernels of one algebra: in
// fp32 (clifford.cu), and in 16-bit types (half.cu).
#pragma once

#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#include "operators/clifford/layer.cuh"
#include "operators/library/clifford/calls.h"

namespace operators::library {

using clifford::Cl;

/// Calls run with Cl<p, q, r>() of the description's signature, if it is one of the five that have
/// kernels of their own. Returns whether it is.
template <typename Run>
bool in_algebra(const fk_clifford& of, Run run) {
  const auto is = [&](int p, int q, int r) { return of.p == p && of.q == q && of.r == r; };
  if (is(2, 0, 0)) return run(Cl<2, 0, 0>()), true;
  if (is(3, 0, 0)) return run(Cl<3, 0, 0>()), true;
  if (is(3, 0, 1)) return run(Cl<3, 0, 1>()), true;
  if (is(1, 3, 0)) return run(Cl<1, 3, 0>()), true;
  if (is(4, 1, 0)) return run(Cl<4, 1, 0>()), true;
  return false;
}

/// The tensors of a pass, whose weights have the type D; and what has to run before the kernels, or
/// nothing. They read weights in fp32: where the caller has others, or none, the workspace gets
/// them, a small launch more.
template <typename T>
struct PassTensors {
  clifford::TensorsOf<T> tensors;
  std::function<void()> prepare;

  /// The ways with that before each.
  std::vector<Way> after_it(std::vector<Way> ways) const {
    for (Way& way : ways) {
      if (!prepare) break;
      way.launch = [first = prepare, then = std::move(way.launch)] {
        first();
        then();
      };
    }
    return ways;
  }
};

template <typename A, typename T, typename D>
PassTensors<T> tensors_of(const fk_clifford& of, const Operands& at, int place_of_x,
                          const Caller& caller) {
  const int64_t count = A::kBlades * of.batch * of.features;
  const int weights = static_cast<int>(of.features * A::kTriples);
  const bool are_ready = std::is_same_v<D, float> && of.unweighted == 0;
  const auto w = are_ready ? at.memory<float>(place_of_x + 2, weights)
                           : caller.workspace.any<float>(static_cast<size_t>(weights));
  std::function<void()> prepare;
  if (!are_ready) {
    prepare = [=, place = place_of_x + 2, is_there = of.unweighted == 0, stream = caller.stream] {
      clifford::widen_weights<D><<<primitives::blocks_for(weights, clifford::kWideningThreads),
                                   clifford::kWideningThreads, 0, stream>>>(
          is_there ? at.at<D>(place) : nullptr, w, weights);
    };
  }
  return {{.layer = {static_cast<int>(of.batch), static_cast<int>(of.features), of.normed == 1,
                     of.gate == 0},
           .x = at.memory<T>(place_of_x, count),
           .y = at.memory<T>(place_of_x + 1, count),
           .w = w,
           .out = at.memory<T>(place_of_x + 3, count),
           .workspace = caller.workspace,
           .stream = caller.stream,
           .alone = caller.alone},
          prepare};
}

template <typename A, typename T, typename D>
clifford::GradientsOf<T, D> gradients_of(const fk_clifford& of, const Operands& at) {
  const int64_t count = A::kBlades * of.batch * of.features;
  return {at.memory<T>(0, count), at.memory<T>(4, count), at.memory<T>(5, count),
          at.memory<D>(6, of.unweighted == 1 ? 0 : of.features * A::kTriples)};
}

}  // namespace operators::library
