// The Clifford products whose tensors are stored in a 16-bit type, on Hopper, in the algebras that
// have kernels of their own. On other GPUs, and for rows that these do not take, any.cu computes
// them.

#include "operators/library/clifford/own_kernels.cuh"

namespace operators::library {

namespace {

using namespace operators::clifford;

/// Calls run with null pointers to the description's types of storage and of weights.
template <typename Run>
auto with_types(const fk_clifford& of, Run run) {
  const bool is_mixed = of.weight_type == FK_FLOAT32;
  constexpr __half* kHalf = nullptr;
  constexpr __nv_bfloat16* kBfloat16 = nullptr;
  constexpr float* kFloat = nullptr;
  if (of.type == FK_FLOAT16) return is_mixed ? run(kHalf, kFloat) : run(kHalf, kHalf);
  return is_mixed ? run(kBfloat16, kFloat) : run(kBfloat16, kBfloat16);
}

}  // namespace

std::vector<Way> half_clifford_forward(const fk_clifford& of, const Caller& caller,
                                       const Operands& at) {
  std::vector<Way> ways;
  if (!primitives::is_hopper()) return ways;
  in_algebra(of, [&]<typename A>(A) {
    ways = with_types(of, [&]<typename T, typename D>(T*, D*) {
      const auto pass = tensors_of<A, T, D>(of, at, kForwardX, caller);
      return pass.after_it(streamed_forward<A>(pass.tensors).ways);
    });
  });
  return ways;
}

std::vector<Way> half_clifford_backward(const fk_clifford& of, const Caller& caller,
                                        const Operands& at) {
  std::vector<Way> ways;
  if (!primitives::is_hopper()) return ways;
  in_algebra(of, [&]<typename A>(A) {
    ways = with_types(of, [&]<typename T, typename D>(T*, D*) {
      const auto pass = tensors_of<A, T, D>(of, at, kBackwardX, caller);
      const auto d = gradients_of<A, T, D>(of, at);
      return pass.after_it(streamed_backward<A>(pass.tensors, d).ways);
    });
  });
  return ways;
}

}  // namespace operators::library
