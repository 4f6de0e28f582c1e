// The Clifford products that no kernel is written for: of any algebra of up to five vectors, in any
// type, with weights or without.

#include <memory>
#include <utility>
#include <vector>

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

/// The description's layout, and the one that the other kernels read.
template <int n>
ItemLayout layout_of(const fk_clifford& of) {
  return {of.layout == FK_BLADES_LAST, order_of<Cl<n, 0, 0>>(static_cast<Order>(of.order), of.r)};
}
template <int n>
ItemLayout own_layout() {
  return {false, order_of<Cl<n, 0, 0>>(Order::grade, 0)};
}

/// The ways of a description in the kernels' own layout, between copies of the operands `read`, and
/// of those that it writes, by their places among the arguments.
std::vector<Way> between_copies(const fk_clifford& of, const Caller& caller, const Operands& at,
                                const std::vector<int>& read, const std::vector<int>& written,
                                CliffordWays make) {
  fk_clifford own = of;
  own.layout = FK_BLADES_FIRST, own.order = FK_ORDER_GRADE;
  const AnyTensors tensors = tensors_of(of, at, kForwardX, caller);
  const size_t bytes = bytes_of(tensors.storage) * tensors.layer.plane() << (of.p + of.q + of.r);
  const auto own_call = std::make_shared<Running>();  // whose operands are set at each launch
  std::vector<std::pair<int, Memory<char>>> copies;
  for (const std::vector<int>* places : {&read, &written}) {
    for (const int place : *places) copies.emplace_back(place, caller.workspace.any<char>(bytes));
  }
  std::vector<Way> ways = make(own, caller, Operands(*own_call));
  const auto copy = [=](size_t first, size_t end, bool back) {
    with_vectors(of, [&]<int n>(std::integral_constant<int, n>) {
      for (size_t i = first; i < end; ++i) {
        char *const caller = at.at<char>(copies[i].first), *const ours = copies[i].second;
        const ItemLayout theirs = layout_of<n>(of), kernels = own_layout<n>();
        back ? copy_to_layout<n>(tensors, ours, caller, kernels, theirs)
             : copy_to_layout<n>(tensors, caller, ours, theirs, kernels);
      }
    });
  };
  for (Way& way : ways) {
    way.name += ", between copies";
    way.microseconds += item_microseconds(tensors, 1 << (of.p + of.q + of.r), 2.0 * copies.size());
    way.launch = [=, count = read.size(), launch = std::move(way.launch)] {
      for (int place = 0; place < kBackwardX + 6; ++place) {
        own_call->operands[place] = at.at<char>(place);
      }
      for (const auto& [place, memory] : copies) own_call->operands[place] = memory.data();
      copy(0, count, false);
      launch();
      copy(count, copies.size(), true);
    };
  }
  return ways;
}

/// Whether the kernels of items have the product.
bool is_of_items(const fk_clifford& of) { return of.unweighted == 1 && of.normed == 0; }

}  // namespace

std::vector<Way> layout_clifford_forward(const fk_clifford& of, const Caller& caller,
                                         const Operands& at, CliffordWays make) {
  if (!is_of_items(of)) {
    return between_copies(of, caller, at, {kForwardX, kForwardX + 1}, {kForwardX + 3}, make);
  }
  const AnyTensors tensors = tensors_of(of, at, kForwardX, caller);
  return with_vectors(of, [&]<int n>(std::integral_constant<int, n>) {
    return items_forward<n>(tensors, layout_of<n>(of));
  });
}

std::vector<Way> layout_clifford_backward(const fk_clifford& of, const Caller& caller,
                                          const Operands& at, CliffordWays make) {
  if (!is_of_items(of)) {
    return between_copies(of, caller, at, {0, kBackwardX, kBackwardX + 1}, {4, 5}, make);
  }
  const AnyTensors tensors = tensors_of(of, at, kBackwardX, caller);
  const auto memory = [&](int place) { return at.memory<char>(place, 0); };
  const AnyGradients d{memory(0), memory(4), memory(5), memory(6)};
  return with_vectors(of, [&]<int n>(std::integral_constant<int, n>) {
    return items_backward<n>(tensors, d, layout_of<n>(of));
  });
}

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
