// The fully connected Clifford product of operators/clifford_connected, as the library exports it.

#include <type_traits>
#include <vector>

#include "operators/clifford_connected/layer.cuh"
#include "operators/clifford_connected/portable.cuh"
#include "operators/estimate.h"
#include "operators/library/clifford/calls.h"

namespace {

using namespace operators::library;
using namespace operators::clifford_connected;
using operators::clifford::CliffordGradients, operators::clifford::CliffordTensors;

constexpr int64_t kMostFeatures = 8192;

/// Calls run with Cl<p, q, r>() of the description's signature. Returns whether there is such an
/// algebra.
template <typename Run>
bool in_algebra(const fk_clifford& of, Run run) {
  if (of.q != 0 || of.r != 0) return false;
  if (of.p == 2) return run(Cl<2, 0, 0>()), true;
  if (of.p == 3) return run(Cl<3, 0, 0>()), true;
  return false;
}

/// Refuses a description that no GPU, or not this one, can compute.
void check(const fk_clifford& of) {
  const auto most_features = [](const fk_clifford& description) {
    return in_algebra(description, [](auto) {}) ? kMostFeatures : 0;
  };
  check_type("clifford", of.type, {FK_FLOAT32});
  check_clifford(of, "2, 0, 0 or 3, 0, 0", most_features);
  refuse_options(of, "the fully connected Clifford product");
  check_capability("the fully connected Clifford product", 80);
}

CliffordCounts counts_of(const fk_clifford& of) {
  CliffordCounts counts;
  in_algebra(of, [&]<typename A>(A) {
    counts = {A::kBlades * of.batch * of.features, A::kTriples * of.features * of.features};
  });
  return counts;
}

/// The tensors of a pass. `out`: that of the call, or one in the workspace.
CliffordTensors tensors_of(const fk_clifford& of, const Operands& at, int place_of_x,
                           const Memory<float>& out, const operators::Caller& caller) {
  const CliffordCounts counts = counts_of(of);
  return {.layer = {static_cast<int>(of.batch), static_cast<int>(of.features), of.normed == 1},
          .x = at.memory<float>(place_of_x, counts.x),
          .y = at.memory<float>(place_of_x + 1, counts.x),
          .w = at.memory<float>(place_of_x + 2, counts.w),
          .out = out,
          .workspace = caller.workspace,
          .stream = caller.stream,
          .alone = caller.alone};
}

/// How long a pass should take: products of all planes at the rate of TF32 on Hopper, or at less
/// than a half of it by mma.sync.
template <typename A>
double microseconds_of(const fk_clifford& of, int products) {
  const double operations = 2.0 * products * kPlanes<A> * static_cast<double>(of.batch) *
                            static_cast<double>(of.features * of.features);
  const double rate = primitives::is_hopper() ? 2048 : 800;
  return operators::kFirstLaunch + operations / (rate * operators::cycles() * multiprocessors());
}

/// How many inverse norms there are: one for each grade and row.
size_t norms_of(const fk_clifford& of) { return static_cast<size_t>(of.p + 1) * of.batch; }

/// Calls run with the layer of the description's algebra: on Hopper one that takes the planes of
/// its products ready from memory while others are made, elsewhere the portable one.
template <typename Run>
void with_layer(const fk_clifford& of, const CliffordTensors& tensors,
                const Memory<float>& inverses, Run run) {
  in_algebra(of, [&]<typename A>(A) {
    if (primitives::is_hopper()) {
      run(A(), Ready<A, true>(tensors, inverses), "planes beside the product");
    } else {
      run(A(), Portable<A>(tensors, inverses), "planes first; products by mma.sync");
    }
  });
}

/// A pass of a description that has been checked. kKept: the call has the inverse norms besides.
template <bool kKept>
Operator forward_of(const fk_clifford& of) {
  return [=](const operators::Caller& caller, const Operands& at) {
    std::vector<operators::Way> ways;
    const Memory<float> out = at.memory<float>(3, counts_of(of).x);
    const Memory<float> inverses = kKept ? at.memory<float>(4, static_cast<int64_t>(norms_of(of)))
                                         : caller.workspace.any<float>(norms_of(of));
    const CliffordTensors tensors = tensors_of(of, at, kForwardX, out, caller);
    with_layer(of, tensors, inverses,
               [&]<typename A, typename Layer>(A, const Layer& layer, auto name) {
                 const auto launch = [=] {
                   if constexpr (std::is_same_v<Layer, Portable<A>>) {
                     layer.forward();
                   } else {
                     layer.forward(nullptr);
                   }
                 };
                 ways.push_back({name, microseconds_of<A>(of, 1), launch, 0});
               });
    return ways;
  };
}

/// Backward needs the result, the norms and the planes. With kKept the call has the first two, as
/// d_out, x, y, w, out, inverse_norms, d_x, d_y, d_w; else all are computed again.
template <bool kKept>
Operator backward_of(const fk_clifford& of) {
  return [=](const operators::Caller& caller, const Operands& at) {
    std::vector<operators::Way> ways;
    const CliffordCounts counts = counts_of(of);
    constexpr int kGradients = kKept ? 6 : 4;
    const Memory<float> out = kKept ? at.memory<float>(4, counts.x)
                                    : caller.workspace.any<float>(static_cast<size_t>(counts.x));
    const Memory<float> inverses = kKept ? at.memory<float>(5, static_cast<int64_t>(norms_of(of)))
                                         : caller.workspace.any<float>(norms_of(of));
    const CliffordTensors tensors = tensors_of(of, at, kBackwardX, out, caller);
    const CliffordGradients d{at.memory<float>(0, counts.x), at.memory<float>(kGradients, counts.x),
                              at.memory<float>(kGradients + 1, counts.x),
                              at.memory<float>(kGradients + 2, counts.w)};
    with_layer(of, tensors, inverses,
               [&]<typename A, typename Layer>(A, const Layer& layer, auto name) {
                 const auto add = [&](const auto& backward) {
                   const auto launch = [=] { kKept ? backward.gradients(false) : backward.run(); };
                   ways.push_back({name, microseconds_of<A>(of, kKept ? 2 : 3), launch, 0});
                 };
                 if constexpr (std::is_same_v<Layer, Portable<A>>) {
                   add(PortableBackward<A>(layer, d));
                 } else {
                   add(ReadyBackward<A, true>(layer, d));
                 }
               });
    return ways;
  };
}

Task forward_task(const fk_clifford& of) {
  check(of);
  return {forward_of<false>(of), forward_arguments(counts_of(of))};
}
Task backward_task(const fk_clifford& of) {
  check(of);
  return {backward_of<false>(of), backward_arguments(counts_of(of))};
}
Task kept_forward_task(const fk_clifford& of) {
  check(of);
  Task task{forward_of<true>(of), forward_arguments(counts_of(of))};
  task.arguments.push_back({"inverse_norms", norms_of(of) * sizeof(float), true});
  return task;
}
Task kept_backward_task(const fk_clifford& of) {
  check(of);
  Task task{backward_of<true>(of), backward_arguments(counts_of(of))};
  const Argument kept[] = {clifford_argument("out", counts_of(of)),
                           {"inverse_norms", norms_of(of) * sizeof(float)}};
  task.arguments.insert(task.arguments.begin() + 4, std::begin(kept), std::end(kept));
  return task;
}

}  // namespace

const Function operators::library::clifford_connected_forward =
    function_of<fk_clifford, forward_task>("clifford");
const Function operators::library::clifford_connected_backward =
    function_of<fk_clifford, backward_task>("clifford");
const Function operators::library::clifford_connected_kept_forward =
    function_of<fk_clifford, kept_forward_task>("clifford");
const Function operators::library::clifford_connected_kept_backward =
    function_of<fk_clifford, kept_backward_task>("clifford");

extern "C" int fk_clifford_connected_workspace(const fk_clifford* clifford, size_t* bytes) {
  return query(clifford_connected_forward, clifford, bytes);
}

extern "C" int fk_clifford_connected_backward_workspace(const fk_clifford* clifford,
                                                        size_t* bytes) {
  return query(clifford_connected_backward, clifford, bytes);
}

extern "C" int fk_clifford_connected_forward(const fk_clifford* clifford, const void* x,
                                             const void* y, const void* w, void* out,
                                             void* workspace, size_t workspace_bytes,
                                             struct CUstream_st* stream) {
  return call(clifford_connected_forward, clifford, {x, y, w, out}, workspace, workspace_bytes,
              stream);
}

extern "C" int fk_clifford_connected_backward(const fk_clifford* clifford, const void* d_out,
                                              const void* x, const void* y, const void* w,
                                              void* d_x, void* d_y, void* d_w, void* workspace,
                                              size_t workspace_bytes, struct CUstream_st* stream) {
  return call(clifford_connected_backward, clifford, {d_out, x, y, w, d_x, d_y, d_w}, workspace,
              workspace_bytes, stream);
}

extern "C" int fk_clifford_connected_kept_workspace(const fk_clifford* clifford, size_t* bytes) {
  return query(clifford_connected_kept_forward, clifford, bytes);
}

extern "C" int fk_clifford_connected_kept_backward_workspace(const fk_clifford* clifford,
                                                             size_t* bytes) {
  return query(clifford_connected_kept_backward, clifford, bytes);
}

extern "C" int fk_clifford_connected_kept_forward(const fk_clifford* clifford, const void* x,
                                                  const void* y, const void* w, void* out,
                                                  void* inverse_norms, void* workspace,
                                                  size_t workspace_bytes,
                                                  struct CUstream_st* stream) {
  return call(clifford_connected_kept_forward, clifford, {x, y, w, out, inverse_norms}, workspace,
              workspace_bytes, stream);
}

extern "C" int fk_clifford_connected_kept_backward(const fk_clifford* clifford, const void* d_out,
                                                   const void* x, const void* y, const void* w,
                                                   const void* out, const void* inverse_norms,
                                                   void* d_x, void* d_y, void* d_w, void* workspace,
                                                   size_t workspace_bytes,
                                                   struct CUstream_st* stream) {
  return call(clifford_connected_kept_backward, clifford,
              {d_out, x, y, w, out, inverse_norms, d_x, d_y, d_w}, workspace, workspace_bytes,
              stream);
}
