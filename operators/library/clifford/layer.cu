// The Clifford layer of operators/clifford with the linear layer before it, as the library exports
// it.

#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "operators/clifford_connected/linear.cuh"
#include "operators/estimate.h"
#include "operators/library/clifford/calls.h"

namespace {

using namespace operators::library;
using namespace operators::clifford_connected;
using operators::clifford::CliffordTensors;

/// Refuses a description that no GPU, or not this one, can compute; its product refuses the rest.
void check(const fk_clifford& of) {
  check_type("clifford", of.type, {FK_FLOAT32});
  refuse_options(of, "the Clifford layer");
  check_capability("the Clifford layer", 80);
}

GradeShape shape_of(const fk_clifford& of) {
  return {of.p + of.q + of.r, static_cast<int>(of.batch), static_cast<int>(of.features)};
}
int64_t inputs_of(const fk_clifford& of) {
  return static_cast<int64_t>(shape_of(of).blades * shape_of(of).plane());
}
int64_t weights_of(const fk_clifford& of) {
  return static_cast<int64_t>(shape_of(of).grades * shape_of(of).matrix());
}

/// The linear layer's tensors, whose places among the arguments these are.
LinearTensors tensors_of(const fk_clifford& of, const Operands& at, const operators::Caller& caller,
                         int x, int y, int mix, int bias) {
  const operators::Memory<float> inputs = at.memory<float>(x, inputs_of(of));
  return {{.layer = {static_cast<int>(of.batch), static_cast<int>(of.features), of.normed == 1},
           .x = inputs,
           .y = at.memory<float>(y, inputs_of(of)),
           .w = inputs,
           .out = inputs,
           .workspace = caller.workspace,
           .stream = caller.stream,
           .alone = caller.alone},
          at.memory<float>(mix, weights_of(of)),
          at.memory<float>(bias, of.features),
          shape_of(of)};
}

double microseconds_of(const fk_clifford& of, int products) {
  const double operations = 2.0 * products * static_cast<double>(inputs_of(of) * of.features);
  const double rate = primitives::is_hopper() ? 2048 : 800;
  return operators::kFirstLaunch + operations / (rate * operators::cycles() * multiprocessors());
}

/// Whether wgmma multiplies. The copy engine counts the rows of all blades, and those of a last
/// tile beyond them, in 32 bits.
bool is_for_hopper(const fk_clifford& of) {
  constexpr int64_t kMostRows = (int64_t{1} << 31) - 1024;
  return primitives::is_hopper() && of.features % 4 == 0 &&
         of.batch * shape_of(of).blades <= kMostRows;
}

/// The ways of a product's function for operands that the caller sets before each launch, with
/// `before` and `behind` around each.
template <typename Before, typename Behind>
std::vector<operators::Way> around(const Function& function, const fk_clifford& of,
                                   const operators::Caller& caller, int products, Before before,
                                   Behind behind) {
  const auto own = std::make_shared<Running>();
  std::vector<operators::Way> ways = function.task(&of).make(caller, Operands(*own));
  for (operators::Way& way : ways) {
    way.microseconds += microseconds_of(of, products);
    way.launch = [=, launch = std::move(way.launch)] {
      before(*own);
      launch();
      behind();
    };
  }
  return ways;
}

/// A pass of a description that has been checked. Forward: x, mix, bias, w, y, out.
Operator forward_of(const fk_clifford& of) {
  return [=](const operators::Caller& caller, const Operands& at) {
    const LinearTensors tensors = tensors_of(of, at, caller, 0, 4, 1, 2);
    const auto with = [&](const auto& linear) {
      return around(
          clifford_forward, of, caller, 1,
          [=](Running& own) {
            linear->forward();
            void* const operands[] = {at.at<void>(0), at.at<void>(4), at.at<void>(3),
                                      at.at<void>(5)};
            std::copy(std::begin(operands), std::end(operands), own.operands);
          },
          [] {});
    };
    return is_for_hopper(of) ? with(std::make_shared<Linear>(tensors))
                             : with(std::make_shared<PortableLinear>(tensors));
  };
}

/// Backward: d_out, x, y, mix, bias, w, d_x, d_mix, d_bias, d_w. The product's gradient of x comes
/// first, and the linear layer's is added to it.
Operator backward_of(const fk_clifford& of) {
  return [=](const operators::Caller& caller, const Operands& at) {
    const LinearTensors tensors = tensors_of(of, at, caller, 1, 2, 3, 4);
    const auto d_y = caller.workspace.any<float>(static_cast<size_t>(inputs_of(of)));
    const LinearGradients d{d_y, at.memory<float>(6, inputs_of(of)),
                            at.memory<float>(7, weights_of(of)), at.memory<float>(8, of.features)};
    const auto with = [&](const auto& linear) {
      return around(
          clifford_backward, of, caller, 2,
          [=](Running& own) {
            void* const operands[] = {at.at<void>(0), at.at<void>(1), at.at<void>(2),
                                      at.at<void>(5), at.at<void>(6), d_y.data(),
                                      at.at<void>(9)};
            std::copy(std::begin(operands), std::end(operands), own.operands);
          },
          [=] { linear->run(); });
    };
    return is_for_hopper(of) ? with(std::make_shared<LinearBackward>(tensors, d))
                             : with(std::make_shared<PortableLinearBackward>(tensors, d));
  };
}

Argument argument(const char* name, int64_t count, bool written = false, bool optional = false) {
  return {name, static_cast<size_t>(count) * sizeof(float), written, false, optional};
}
int64_t product_weights_of(const fk_clifford& of) { return of.features * clifford_triples(of); }

Task forward_task(const fk_clifford& of) {
  check(of);
  clifford_forward.task(&of);  // refuses sizes and algebras
  return {forward_of(of),
          {argument("x", inputs_of(of)), argument("mix", weights_of(of)),
           argument("bias", of.features, false, true), argument("w", product_weights_of(of)),
           argument("y", inputs_of(of), true), argument("out", inputs_of(of), true)}};
}
Task backward_task(const fk_clifford& of) {
  check(of);
  clifford_backward.task(&of);
  return {
      backward_of(of),
      {argument("d_out", inputs_of(of)), argument("x", inputs_of(of)), argument("y", inputs_of(of)),
       argument("mix", weights_of(of)), argument("bias", of.features, false, true),
       argument("w", product_weights_of(of)), argument("d_x", inputs_of(of), true),
       argument("d_mix", weights_of(of), true), argument("d_bias", of.features, true, true),
       argument("d_w", product_weights_of(of), true)}};
}

}  // namespace

const Function operators::library::clifford_layer_forward =
    function_of<fk_clifford, forward_task>("clifford");
const Function operators::library::clifford_layer_backward =
    function_of<fk_clifford, backward_task>("clifford");

extern "C" int fk_clifford_layer_workspace(const fk_clifford* clifford, size_t* bytes) {
  return query(clifford_layer_forward, clifford, bytes);
}

extern "C" int fk_clifford_layer_backward_workspace(const fk_clifford* clifford, size_t* bytes) {
  return query(clifford_layer_backward, clifford, bytes);
}

extern "C" int fk_clifford_layer_forward(const fk_clifford* clifford, const void* x,
                                         const void* mix, const void* bias, const void* w, void* y,
                                         void* out, void* workspace, size_t workspace_bytes,
                                         struct CUstream_st* stream) {
  return call(clifford_layer_forward, clifford, {x, mix, bias, w, y, out}, workspace,
              workspace_bytes, stream);
}

extern "C" int fk_clifford_layer_backward(const fk_clifford* clifford, const void* d_out,
                                          const void* x, const void* y, const void* mix,
                                          const void* bias, const void* w, void* d_x, void* d_mix,
                                          void* d_bias, void* d_w, void* workspace,
                                          size_t workspace_bytes, struct CUstream_st* stream) {
  return call(clifford_layer_backward, clifford,
              {d_out, x, y, mix, bias, w, d_x, d_mix, d_bias, d_w}, workspace, workspace_bytes,
              stream);
}
