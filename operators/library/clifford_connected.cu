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

struct Pointers {
  const void *x = nullptr, *y = nullptr, *w = nullptr;
  void* out = nullptr;
  const void* d_out = nullptr;
  void *dx = nullptr, *dy = nullptr, *dw = nullptr;
};

/// The layer, which takes the planes of its products ready from memory.
template <typename A>
Ready<A, true> layer_of(const fk_clifford& of, const Pointers& at, const Memory<float>& out,
                        const operators::Workspace& workspace) {
  const Counts counts(of);
  const CliffordTensors tensors{
      .layer = {static_cast<int>(of.batch), static_cast<int>(of.features), of.normed == 1},
      .x = memory<float>(at.x, counts.x),
      .y = memory<float>(at.y, counts.x),
      .w = memory<float>(at.w, counts.w),
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

/// A pass with its operands, those of a description that has been checked.
Operator forward_of(const fk_clifford& of, const Pointers& at) {
  return [=](const operators::Workspace& workspace) {
    std::vector<operators::Way> ways;
    in_algebra(of, [&]<typename A>(A) {
      const Memory<float> out = memory<float>(at.out, Counts(of).x);
      const Ready<A, true> layer = layer_of<A>(of, at, out, workspace);
      ways.push_back({"planes beside the product", microseconds_of<A>(of, 1),
                      [=] { layer.forward(nullptr); }, 0});
    });
    return ways;
  };
}

/// Backward needs the result, the norms and the planes, which it computes again.
Operator backward_of(const fk_clifford& of, const Pointers& at) {
  return [=](const operators::Workspace& workspace) {
    std::vector<operators::Way> ways;
    in_algebra(of, [&]<typename A>(A) {
      const Counts counts(of);
      const Memory<float> out = workspace.any<float>(static_cast<size_t>(counts.x));
      const CliffordGradients d{memory<float>(at.d_out, counts.x), memory<float>(at.dx, counts.x),
                                memory<float>(at.dy, counts.x), memory<float>(at.dw, counts.w)};
      const ReadyBackward<A, true> layer(layer_of<A>(of, at, out, workspace), d);
      ways.push_back(
          {"planes beside the product", microseconds_of<A>(of, 3), [=] { layer.run(); }, 0});
    });
    return ways;
  };
}

int query(const fk_clifford* clifford, size_t* bytes,
          Operator (*pass_of)(const fk_clifford&, const Pointers&)) {
  return guarded([=] {
    check(clifford);
    if (!bytes) throw Refusal{FK_BAD_ARGUMENT, "bytes is NULL"};
    *bytes = workspace_bytes(pass_of(*clifford, {}));
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
  return guarded([=] {
    check(clifford);
    const Counts counts(*clifford);
    launch(forward_of(*clifford, {x, y, w, out}),
           {argument("x", x, counts.x), argument("y", y, counts.x), argument("w", w, counts.w),
            argument("out", out, counts.x, true)},
           workspace, workspace_bytes, stream);
  });
}

extern "C" int fk_clifford_connected_backward(const fk_clifford* clifford, const void* d_out,
                                              const void* x, const void* y, const void* w,
                                              void* d_x, void* d_y, void* d_w, void* workspace,
                                              size_t workspace_bytes, struct CUstream_st* stream) {
  return guarded([=] {
    check(clifford);
    const Counts counts(*clifford);
    launch(
        backward_of(*clifford, {x, y, w, nullptr, d_out, d_x, d_y, d_w}),
        {argument("d_out", d_out, counts.x), argument("x", x, counts.x), argument("y", y, counts.x),
         argument("w", w, counts.w), argument("d_x", d_x, counts.x, true),
         argument("d_y", d_y, counts.x, true), argument("d_w", d_w, counts.w, true)},
        workspace, workspace_bytes, stream);
  });
}
