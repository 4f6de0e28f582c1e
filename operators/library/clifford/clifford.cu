// The Clifford products of operators/clifford, as the library exports them.

#include "operators/clifford/portable.cuh"
#include "operators/library/clifford/own_kernels.cuh"

namespace {

using namespace operators::library;
using namespace operators::clifford;

constexpr int kMostVectors = 5;

bool is_algebra(const fk_clifford& of) {
  for (const int vectors : {of.p, of.q, of.r}) {
    if (vectors < 0 || vectors > kMostVectors) return false;
  }
  const int all = of.p + of.q + of.r;
  return all >= 1 && all <= kMostVectors;
}

void check_choice(const char* name, int value, int most, const char* choices) {
  if (value >= 0 && value <= most) return;
  throw Refusal{FK_BAD_ARGUMENT,
                std::string(name) + " is " + std::to_string(value) + "; it has to be " + choices};
}
void check_flag(const char* name, int value) { check_choice(name, value, 1, "0 or 1"); }

/// Refuses a description that no GPU, or not this one, can compute.
void check(const fk_clifford& of) {
  const auto most_features = [](const fk_clifford& description) -> int64_t {
    if (!is_algebra(description)) return 0;
    const int vectors = description.p + description.q + description.r;
    return vectors <= 3 ? 8192 : vectors == 4 ? 4096 : 2048;
  };
  check_type("clifford", of.type, {FK_FLOAT16, FK_BFLOAT16, FK_FLOAT32});
  check_clifford(of, "0 or more each, and 1 to 5 in all", most_features);
  check_flag("gate", of.gate);
  check_flag("unweighted", of.unweighted);
  check_flag("layout", of.layout);
  check_choice("order", of.order, FK_ORDER_NULL_FIRST, "0 to 3");
  if (of.weight_type != 0 && of.weight_type != of.type && of.weight_type != FK_FLOAT32) {
    throw Refusal{FK_BAD_ARGUMENT, "weight_type is " + std::to_string(of.weight_type) +
                                       "; it has to be 0, FK_FLOAT32 or that of type, " +
                                       std::to_string(of.type)};
  }
}

CliffordCounts counts_of(const fk_clifford& of) {
  const auto bytes = [](int type) -> int64_t { return type == FK_FLOAT32 ? 4 : 2; };
  return {.x = (of.batch * of.features) << (of.p + of.q + of.r),
          .w = of.features * clifford_triples(of),
          .bytes = bytes(of.type),
          .weight_bytes = bytes(of.weight_type == 0 ? of.type : of.weight_type),
          .unweighted = of.unweighted == 1};
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

/// A pass of a description that has been checked, in the kernels' own layout: by kernels of its
/// algebra and type, if there are any, or by those of any algebra.
std::vector<operators::Way> forward_ways(const fk_clifford& of, const operators::Caller& caller,
                                         const Operands& at) {
  std::vector<operators::Way> ways;
  if (of.type != FK_FLOAT32) {
    ways = half_clifford_forward(of, caller, at);
  } else {
    in_algebra(of, [&]<typename A>(A) {
      const auto pass = tensors_of<A, float, float>(of, at, kForwardX, caller);
      ways = pass.after_it(ways_here([&] { return streamed_forward<A>(pass.tensors); },
                                     [&] { return portable_forward<A>(pass.tensors); }));
    });
  }
  return ways.empty() ? any_clifford_forward(of, caller, at) : ways;
}
std::vector<operators::Way> backward_ways(const fk_clifford& of, const operators::Caller& caller,
                                          const Operands& at) {
  std::vector<operators::Way> ways;
  if (of.type != FK_FLOAT32) {
    ways = half_clifford_backward(of, caller, at);
  } else {
    in_algebra(of, [&]<typename A>(A) {
      const auto pass = tensors_of<A, float, float>(of, at, kBackwardX, caller);
      const auto d = gradients_of<A, float, float>(of, at);
      ways = pass.after_it(ways_here([&] { return streamed_backward<A>(pass.tensors, d); },
                                     [&] { return portable_backward<A>(pass.tensors, d); }));
    });
  }
  return ways.empty() ? any_clifford_backward(of, caller, at) : ways;
}

/// Whether a layout is the kernels' own.
bool is_own(const fk_clifford& of) {
  return of.layout == FK_BLADES_FIRST && of.order == FK_ORDER_GRADE;
}
Operator forward_of(const fk_clifford& of) {
  return [=](const operators::Caller& caller, const Operands& at) {
    return is_own(of) ? forward_ways(of, caller, at)
                      : layout_clifford_forward(of, caller, at, forward_ways);
  };
}
Operator backward_of(const fk_clifford& of) {
  return [=](const operators::Caller& caller, const Operands& at) {
    return is_own(of) ? backward_ways(of, caller, at)
                      : layout_clifford_backward(of, caller, at, backward_ways);
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
