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

struct Pointers {
  const void *x = nullptr, *y = nullptr, *w = nullptr;
  void* out = nullptr;
  const void* d_out = nullptr;
  void *dx = nullptr, *dy = nullptr, *dw = nullptr;
};

template <typename A>
CliffordTensors tensors_of(const fk_clifford& of, const Pointers& at,
                           const operators::Workspace& workspace) {
  const int64_t count = A::kBlades * of.batch * of.features;
  return {.layer = {static_cast<int>(of.batch), static_cast<int>(of.features), of.normed == 1},
          .x = memory<float>(at.x, count),
          .y = memory<float>(at.y, count),
          .w = memory<float>(at.w, of.features * A::kTriples),
          .out = memory<float>(at.out, count),
          .workspace = workspace};
}

/// A pass with its operands, those of a description that has been checked.
Operator forward_of(const fk_clifford& of, const Pointers& at) {
  return [=](const operators::Workspace& workspace) {
    std::vector<operators::Way> ways;
    in_algebra(of, [&]<typename A>(A) {
      ways = streamed_forward<A>(tensors_of<A>(of, at, workspace)).ways;
    });
    return ways;
  };
}
Operator backward_of(const fk_clifford& of, const Pointers& at) {
  return [=](const operators::Workspace& workspace) {
    std::vector<operators::Way> ways;
    in_algebra(of, [&]<typename A>(A) {
      const CliffordTensors tensors = tensors_of<A>(of, at, workspace);
      const int64_t count = static_cast<int64_t>(tensors.x.size());
      const CliffordGradients d{memory<float>(at.d_out, count), memory<float>(at.dx, count),
                                memory<float>(at.dy, count),
                                memory<float>(at.dw, static_cast<int64_t>(tensors.w.size()))};
      ways = streamed_backward<A>(tensors, d).ways;
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
  return guarded([=] {
    check(clifford);
    const Counts counts(*clifford);
    launch(forward_of(*clifford, {x, y, w, out}),
           {argument("x", x, counts.x), argument("y", y, counts.x), argument("w", w, counts.w),
            argument("out", out, counts.x, true)},
           workspace, workspace_bytes, stream);
  });
}

extern "C" int fk_clifford_backward(const fk_clifford* clifford, const void* d_out, const void* x,
                                    const void* y, const void* w, void* d_x, void* d_y, void* d_w,
                                    void* workspace, size_t workspace_bytes,
                                    struct CUstream_st* stream) {
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
