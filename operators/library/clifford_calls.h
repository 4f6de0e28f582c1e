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
inline void check_clifford(const fk_clifford* of, const char* algebras,
                           int64_t (*most_features)(const fk_clifford&)) {
  constexpr int64_t kMost = 1 << 30;
  check_description("clifford", of, sizeof *of);
  check_type("clifford", of->type, {FK_FLOAT32});
  if (of->normed != 0 && of->normed != 1) {
    throw Refusal{FK_BAD_ARGUMENT,
                  "normed is " + std::to_string(of->normed) + "; it has to be 0 or 1"};
  }
  const int64_t most = most_features(*of);
  if (most == 0) {
    throw Refusal{FK_BAD_ARGUMENT, "p, q, r are " + std::to_string(of->p) + ", " +
                                       std::to_string(of->q) + ", " + std::to_string(of->r) +
                                       "; they have to be " + algebras};
  }
  check_sizes({{"batch", of->batch, kMost}, {"features", of->features, most}});
  if (of->batch * of->features > kMost) {
    throw Refusal{FK_BAD_SHAPE, "batch * features is more than 2^30"};
  }
}

/// The calls of one of the products.
struct CliffordCalls {
  /// How many elements x, y and the result have, and how many w has.
  struct Counts {
    int64_t x = 0, w = 0;
  };

  const char* name;
  void (*check)(const fk_clifford*);
  Counts (*counts_of)(const fk_clifford&);
  Operator (*forward_of)(const fk_clifford&);
  Operator (*backward_of)(const fk_clifford&);

  int query(const fk_clifford* clifford, Operator (*pass_of)(const fk_clifford&),
            size_t* bytes) const {
    return guarded([&] {
      check(clifford);
      if (!bytes) throw Refusal{FK_BAD_ARGUMENT, "bytes is NULL"};
      *bytes = workspace_bytes(pass_of(*clifford));
    });
  }
  int forward(const fk_clifford* clifford, const void* x, const void* y, const void* w, void* out,
              void* workspace, size_t bytes, cudaStream_t stream) const {
    return guarded([&] {
      Plan& plan = plan_of(name, clifford, check, forward_of, stream);
      const Counts counts = counts_of(*clifford);
      const Argument arguments[] = {
          argument("x", x, counts.x),
          argument("y", y, counts.x),
          argument("w", w, counts.w),
          argument("out", out, counts.x, true),
      };
      launch(plan, arguments, workspace, bytes);
    });
  }
  int backward(const fk_clifford* clifford, const void* d_out, const void* x, const void* y,
               const void* w, void* d_x, void* d_y, void* d_w, void* workspace, size_t bytes,
               cudaStream_t stream) const {
    return guarded([&] {
      Plan& plan = plan_of(name, clifford, check, backward_of, stream, 1);
      const Counts counts = counts_of(*clifford);
      const Argument arguments[] = {
          argument("d_out", d_out, counts.x),   argument("x", x, counts.x),
          argument("y", y, counts.x),           argument("w", w, counts.w),
          argument("d_x", d_x, counts.x, true), argument("d_y", d_y, counts.x, true),
          argument("d_w", d_w, counts.w, true),
      };
      launch(plan, arguments, workspace, bytes);
    });
  }

 private:
  static Argument argument(const char* name, const void* data, int64_t count,
                           bool written = false) {
    return {name, data, static_cast<size_t>(count) * sizeof(float), 16, written};
  }
};

}  // namespace operators::library
