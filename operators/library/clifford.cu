// The Clifford products of operators/clifford, as the library exports them.

#include "operators/clifford/layer.cuh"
#include "operators/library/call.h"

namespace {

using namespace operators::library;
using namespace operators::clifford;

constexpr int64_t kMost = 1 << 30;

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
void check(const fk_clifford* of) {
  check_description("clifford", of, sizeof *of);
  check_type("clifford", of->type, {FK_FLOAT32});
  if (of->normed != 0 && of->normed != 1) {
    throw Refusal{FK_BAD_ARGUMENT,
                  "normed is " + std::to_string(of->normed) + "; it has to be 0 or 1"};
  }
  int64_t most_features = 0;
  const bool known = in_algebra(*of, [&]<typename A>(A) {
    most_features = int64_t{kMaxBlocks} * kThreads<A> * kStreamedWidth<A>;
  });
  if (!known) {
    throw Refusal{FK_BAD_ARGUMENT,
                  "p, q, r are " + std::to_string(of->p) + ", " + std::to_string(of->q) + ", " +
                      std::to_string(of->r) +
                      "; they have to be 2, 0, 0 or 3, 0, 0 or 3, 0, 1 or 1, 3, 0 or 4, 1, 0"};
  }
  check_sizes({{"batch", of->batch, kMost}, {"features", of->features, most_features}});
  if (of->batch * of->features > kMost) {
    throw Refusal{FK_BAD_SHAPE, "batch * features is more than 2^30"};
  }
  check_hopper("the Clifford product");
}

/// Where a pass has its operands among a call's arguments: x, y, w, out; backward d_out, x, y, w,
/// d_x, d_y, d_w.
constexpr int kForwardX = 0, kBackwardX = 1;

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

/// A pass of a description that has been checked.
Operator forward_of(const fk_clifford& of) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    std::vector<operators::Way> ways;
    in_algebra(of, [&]<typename A>(A) {
      ways = streamed_forward<A>(tensors_of<A>(of, at, kForwardX, workspace)).ways;
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
      ways = streamed_backward<A>(tensors, d).ways;
    });
    return ways;
  };
}

int query(const fk_clifford* clifford, size_t* bytes, Operator (*pass_of)(const fk_clifford&)) {
  return guarded([=] {
    check(clifford);
    if (!bytes) throw Refusal{FK_BAD_ARGUMENT, "bytes is NULL"};
    *bytes = workspace_bytes(pass_of(*clifford));
  });
}

/// How many elements x and w have.
struct Counts {
  int64_t x = 0, w = 0;
  explicit Counts(const fk_clifford& of) {
    in_algebra(of, [&]<typename A>(A) {
      x = A::kBlades * of.batch * of.features;
      w = A::kTriples * of.features;
    });
  }
};

Argument argument(const char* name, const void* data, int64_t count, bool written = false) {
  return {name, data, static_cast<size_t>(count) * sizeof(float), 16, written};
}

}  // namespace

extern "C" int fk_clifford_workspace(const fk_clifford* clifford, size_t* bytes) {
  return query(clifford, bytes, forward_of);
}

extern "C" int fk_clifford_backward_workspace(const fk_clifford* clifford, size_t* bytes) {
  return query(clifford, bytes, backward_of);
}

extern "C" int fk_clifford_forward(const fk_clifford* clifford, const void* x, const void* y,
                                   const void* w, void* out, void* workspace,
                                   size_t workspace_bytes, struct CUstream_st* stream) {
  return guarded([&] {
    Plan& plan = plan_of("clifford", clifford, check, forward_of, stream);
    const Counts counts(*clifford);
    const Argument arguments[] = {
        argument("x", x, counts.x),
        argument("y", y, counts.x),
        argument("w", w, counts.w),
        argument("out", out, counts.x, true),
    };
    launch(plan, arguments, workspace, workspace_bytes);
  });
}

extern "C" int fk_clifford_backward(const fk_clifford* clifford, const void* d_out, const void* x,
                                    const void* y, const void* w, void* d_x, void* d_y, void* d_w,
                                    void* workspace, size_t workspace_bytes,
                                    struct CUstream_st* stream) {
  return guarded([&] {
    Plan& plan = plan_of("clifford", clifford, check, backward_of, stream, 1);
    const Counts counts(*clifford);
    const Argument arguments[] = {
        argument("d_out", d_out, counts.x),   argument("x", x, counts.x),
        argument("y", y, counts.x),           argument("w", w, counts.w),
        argument("d_x", d_x, counts.x, true), argument("d_y", d_y, counts.x, true),
        argument("d_w", d_w, counts.w, true),
    };
    launch(plan, arguments, workspace, workspace_bytes);
  });
}
