// The fully connected Clifford product of operators/clifford_connected, as the library exports it.

#include "operators/clifford_connected/layer.cuh"
#include "operators/estimate.h"
#include "operators/library/call.h"

namespace {

using namespace operators::library;
using namespace operators::clifford_connected;
using operators::clifford::CliffordGradients, operators::clifford::CliffordTensors;

constexpr int64_t kMost = 1 << 30, kMostFeatures = 8192;

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
void check(const fk_clifford* of) {
  check_description("clifford", of, sizeof *of);
  check_type("clifford", of->type, {FK_FLOAT32});
  if (of->normed != 0 && of->normed != 1) {
    throw Refusal{FK_BAD_ARGUMENT,
                  "normed is " + std::to_string(of->normed) + "; it has to be 0 or 1"};
  }
  if (!in_algebra(*of, [](auto) {})) {
    throw Refusal{FK_BAD_ARGUMENT, "p, q, r are " + std::to_string(of->p) + ", " +
                                       std::to_string(of->q) + ", " + std::to_string(of->r) +
                                       "; they have to be 2, 0, 0 or 3, 0, 0"};
  }
  check_sizes({{"batch", of->batch, kMost}, {"features", of->features, kMostFeatures}});
  if (of->batch * of->features > kMost) {
    throw Refusal{FK_BAD_SHAPE, "batch * features is more than 2^30"};
  }
  check_hopper("the fully connected Clifford product");
}

/// How many elements x and w have.
struct Counts {
  int64_t x = 0, w = 0;
  explicit Counts(const fk_clifford& of) {
    in_algebra(of, [&]<typename A>(A) {
      x = A::kBlades * of.batch * of.features;
      w = A::kTriples * of.features * of.features;
    });
  }
};

/// Where a pass has its operands among a call's arguments: x, y, w, out; backward d_out, x, y, w,
/// d_x, d_y, d_w.
constexpr int kForwardX = 0, kBackwardX = 1;

/// The layer, which takes the planes of its products ready from memory.
template <typename A>
Ready<A, true> layer_of(const fk_clifford& of, const Operands& at, int place_of_x,
                        const Memory<float>& out, const operators::Workspace& workspace) {
  const Counts counts(of);
  const CliffordTensors tensors{
      .layer = {static_cast<int>(of.batch), static_cast<int>(of.features), of.normed == 1},
      .x = at.memory<float>(place_of_x, counts.x),
      .y = at.memory<float>(place_of_x + 1, counts.x),
      .w = at.memory<float>(place_of_x + 2, counts.w),
      .out = out,
      .workspace = workspace};
  return {tensors, workspace.any<float>(static_cast<size_t>(A::kGrades) * of.batch)};
}

/// How long a pass should take: products of all planes at the rate of TF32.
template <typename A>
double microseconds_of(const fk_clifford& of, int products) {
  const double operations = 2.0 * products * kPlanes<A> * static_cast<double>(of.batch) *
                            static_cast<double>(of.features * of.features);
  return operators::kFirstLaunch + operations / (2048 * operators::kCycles * multiprocessors());
}

/// A pass of a description that has been checked.
Operator forward_of(const fk_clifford& of) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    std::vector<operators::Way> ways;
    in_algebra(of, [&]<typename A>(A) {
      const Memory<float> out = at.memory<float>(3, Counts(of).x);
      const Ready<A, true> layer = layer_of<A>(of, at, kForwardX, out, workspace);
      ways.push_back({"planes beside the product", microseconds_of<A>(of, 1),
                      [=] { layer.forward(nullptr); }, 0});
    });
    return ways;
  };
}

/// Backward needs the result, the norms and the planes, which it computes again.
Operator backward_of(const fk_clifford& of) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    std::vector<operators::Way> ways;
    in_algebra(of, [&]<typename A>(A) {
      const Counts counts(of);
      const Memory<float> out = workspace.any<float>(static_cast<size_t>(counts.x));
      const CliffordGradients d{at.memory<float>(0, counts.x), at.memory<float>(4, counts.x),
                                at.memory<float>(5, counts.x), at.memory<float>(6, counts.w)};
      const ReadyBackward<A, true> layer(layer_of<A>(of, at, kBackwardX, out, workspace), d);
      ways.push_back(
          {"planes beside the product", microseconds_of<A>(of, 3), [=] { layer.run(); }, 0});
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

Argument argument(const char* name, const void* data, int64_t count, bool written = false) {
  return {name, data, static_cast<size_t>(count) * sizeof(float), 16, written};
}

}  // namespace

extern "C" int fk_clifford_connected_workspace(const fk_clifford* clifford, size_t* bytes) {
  return query(clifford, bytes, forward_of);
}

extern "C" int fk_clifford_connected_backward_workspace(const fk_clifford* clifford,
                                                        size_t* bytes) {
  return query(clifford, bytes, backward_of);
}

extern "C" int fk_clifford_connected_forward(const fk_clifford* clifford, const void* x,
                                             const void* y, const void* w, void* out,
                                             void* workspace, size_t workspace_bytes,
                                             struct CUstream_st* stream) {
  return guarded([&] {
    Plan& plan = plan_of("clifford connected", clifford, check, forward_of, stream);
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

extern "C" int fk_clifford_connected_backward(const fk_clifford* clifford, const void* d_out,
                                              const void* x, const void* y, const void* w,
                                              void* d_x, void* d_y, void* d_w, void* workspace,
                                              size_t workspace_bytes, struct CUstream_st* stream) {
  return guarded([&] {
    Plan& plan = plan_of("clifford connected", clifford, check, backward_of, stream, 1);
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
