// The Clifford products of operators/clifford, as the library exports them.

#include "operators/clifford/layer.cuh"
#include "operators/clifford/portable.cuh"
#include "operators/library/clifford_calls.h"

namespace {

using namespace operators::library;
using namespace operators::clifford;

/// Calls run with Cl<p, q, r>() of the description's signature. Returns whether there is such an
/// algebra.
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

/// Refuses a description that no GPU, or not this one, can compute.
void check(const fk_clifford& of) {
  const auto most_features = [](const fk_clifford& description) {
    int64_t most = 0;
    in_algebra(description, [&]<typename A>(A) {
      most = int64_t{kMaxBlocks} * kThreads<A> * kStreamedWidth<A>;
    });
    return most;
  };
  check_clifford(of, "2, 0, 0 or 3, 0, 0 or 3, 0, 1 or 1, 3, 0 or 4, 1, 0", most_features);
}

CliffordCounts counts_of(const fk_clifford& of) {
  CliffordCounts counts;
  in_algebra(of, [&]<typename A>(A) {
    counts = {A::kBlades * of.batch * of.features, A::kTriples * of.features};
  });
  return counts;
}

template <typename A>
CliffordTensors tensors_of(const fk_clifford& of, const Operands& at, int place_of_x,
                           const operators::Workspace& workspace) {
  const int64_t count = A::kBlades * of.batch * of.features;
  return {.layer = {static_cast<int>(of.batch), static_cast<int>(of.features), of.normed == 1},
          .x = at.memory<float>(place_of_x, count),
          .y = at.memory<float>(place_of_x + 1, count),
          .w = at.memory<float>(place_of_x + 2, of.features * A::kTriples),
          .out = at.memory<float>(place_of_x + 3, count),
          .workspace = workspace};
}

/// Hopper's ways, if the device has them; or the portable ones.
template <typename Streaming, typename Portable>
std::vector<operators::Way> ways_here(Streaming streamed, Portable portable) {
  if (primitives::is_hopper()) {
    std::vector<operators::Way> ways = streamed().ways;
    if (!ways.empty()) return ways;
  }
  return portable();
}

/// A pass of a description that has been checked.
Operator forward_of(const fk_clifford& of) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    std::vector<operators::Way> ways;
    in_algebra(of, [&]<typename A>(A) {
      const CliffordTensors tensors = tensors_of<A>(of, at, kForwardX, workspace);
      ways = ways_here([&] { return streamed_forward<A>(tensors); },
                       [&] { return portable_forward<A>(tensors); });
    });
    return ways;
  };
}
Operator backward_of(const fk_clifford& of) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    std::vector<operators::Way> ways;
    in_algebra(of, [&]<typename A>(A) {
      const CliffordTensors tensors = tensors_of<A>(of, at, kBackwardX, workspace);
      const int64_t count = static_cast<int64_t>(tensors.x.size());
      const CliffordGradients d{at.memory<float>(0, count), at.memory<float>(4, count),
                                at.memory<float>(5, count),
                                at.memory<float>(6, static_cast<int64_t>(tensors.w.size()))};
      ways = ways_here([&] { return streamed_backward<A>(tensors, d); },
                       [&] { return portable_backward<A>(tensors, d); });
    });
    return ways;
  };
}

Task forward_task(const fk_clifford& of) {
  check(of);
  return {forward_of(of), forward_arguments(counts_of(of))};
}
Task backward_task(const fk_clifford& of) {
  check(of);
  return {backward_of(of), backward_arguments(counts_of(of))};
}

}  // namespace

const Function operators::library::clifford_forward =
    function_of<fk_clifford, forward_task>("clifford");
const Function operators::library::clifford_backward =
    function_of<fk_clifford, backward_task>("clifford");

extern "C" int fk_clifford_workspace(const fk_clifford* clifford, size_t* bytes) {
  return query(clifford_forward, clifford, bytes);
}

extern "C" int fk_clifford_backward_workspace(const fk_clifford* clifford, size_t* bytes) {
  return query(clifford_backward, clifford, bytes);
}

extern "C" int fk_clifford_forward(const fk_clifford* clifford, const void* x, const void* y,
                                   const void* w, void* out, void* workspace,
                                   size_t workspace_bytes, struct CUstream_st* stream) {
  return call(clifford_forward, clifford, {x, y, w, out}, workspace, workspace_bytes, stream);
}

extern "C" int fk_clifford_backward(const fk_clifford* clifford, const void* d_out, const void* x,
                                    const void* y, const void* w, void* d_x, void* d_y, void* d_w,
                                    void* workspace, size_t workspace_bytes,
                                    struct CUstream_st* stream) {
  return call(clifford_backward, clifford, {d_out, x, y, w, d_x, d_y, d_w}, workspace,
              workspace_bytes, stream);
}
