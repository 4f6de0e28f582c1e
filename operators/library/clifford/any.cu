// The Clifford products that no kernel is written for: of any algebra of up to five vectors, in any
// type, with weights or without.

#include "operators/clifford/any/layer.cuh"
#include "operators/library/clifford/calls.h"

namespace operators::library {

namespace {

using namespace operators::clifford;

/// Calls run with the number of the description's basis vectors, as a constant.
template <typename Run>
auto with_vectors(const fk_clifford& of, Run run) {
  switch (of.p + of.q + of.r) {
    case 1:
      return run(std::integral_constant<int, 1>());
    case 2:
      return run(std::integral_constant<int, 2>());
    case 3:
      return run(std::integral_constant<int, 3>());
    case 4:
      return run(std::integral_constant<int, 4>());
    default:
      return run(std::integral_constant<int, 5>());
  }
}

Storage storage_of(int type) {
  return type == FK_BFLOAT16 ? Storage::bf16 : type == FK_FLOAT16 ? Storage::fp16 : Storage::fp32;
}

AnyTensors tensors_of(const fk_clifford& of, const Operands& at, int place_of_x,
                      const Caller& caller) {
  const auto memory = [&](int place) { return at.memory<char>(place, 0); };
  return {.layer = {static_cast<int>(of.batch), static_cast<int>(of.features), of.normed == 1,
                    of.gate == 0},
          .storage = storage_of(of.type),
          .weight_storage = storage_of(of.weight_type == 0 ? of.type : of.weight_type),
          .weighted = of.unweighted == 0,
          .p = of.p,
          .q = of.q,
          .x = memory(place_of_x),
          .y = memory(place_of_x + 1),
          .w = memory(place_of_x + 2),
          .out = memory(place_of_x + 3),
          .workspace = caller.workspace,
          .stream = caller.stream};
}

}  // namespace

int clifford_triples(const fk_clifford& of) {
  return with_vectors(of, [&]<int n>(std::integral_constant<int, n>) {
    return metric_of<Cl<n, 0, 0>>(of.p, of.q).triples;
  });
}

std::vector<Way> any_clifford_forward(const fk_clifford& of, const Caller& caller,
                                      const Operands& at) {
  const AnyTensors tensors = tensors_of(of, at, kForwardX, caller);
  return with_vectors(
      of, [&]<int n>(std::integral_constant<int, n>) { return any_forward<n>(tensors); });
}

std::vector<Way> any_clifford_backward(const fk_clifford& of, const Caller& caller,
                                       const Operands& at) {
  const AnyTensors tensors = tensors_of(of, at, kBackwardX, caller);
  const auto memory = [&](int place) { return at.memory<char>(place, 0); };
  const AnyGradients d{memory(0), memory(4), memory(5), memory(6)};
  return with_vectors(
      of, [&]<int n>(std::integral_constant<int, n>) { return any_backward<n>(tensors, d); });
}

}  // namespace operators::library
