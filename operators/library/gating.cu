// The gated layer of operators/gating, as the library exports it.

#include <optional>
#include <type_traits>

#include "operators/gating/backward.cuh"
#include "operators/gating/kept.cuh"
#include "operators/gating/kept_backward.cuh"
#include "operators/gating/layer.cuh"
#include "operators/gating/two_inputs.cuh"
#include "operators/gating/unfused.cuh"
#include "operators/library/call.h"
#include "operators/library/products.h"

namespace {

using namespace operators::library;
using namespace operators::gating;
using operators::gating::Caller, operators::gating::Memory;

static_assert(FK_GATE_SIGMOID == static_cast<int>(Gate::sigmoid) &&
              FK_GATE_SILU == static_cast<int>(Gate::silu) &&
              FK_GATE_GELU == static_cast<int>(Gate::gelu) &&
              FK_GATE_GELU_TANH == static_cast<int>(Gate::gelu_tanh) &&
              FK_GATE_RELU == static_cast<int>(Gate::relu) &&
              FK_GATE_NONE == static_cast<int>(Gate::none));

bool is_half(const fk_gating& gating) {
  return gating.type == FK_FLOAT16 || gating.type == FK_BFLOAT16;
}
size_t element_bytes(const fk_gating& gating) { return is_half(gating) ? 2 : 4; }

/// How many columns the input of values has, where it is one of its own.
int64_t value_inputs(const fk_gating& gating) {
  return gating.value_inputs == 0 ? gating.inputs : gating.value_inputs;
}

void check_flag(const char* name, int64_t value, int64_t most, const char* words) {
  if (value < 0 || value > most) {
    throw Refusal{FK_BAD_ARGUMENT, std::string(name) + " is " + std::to_string(value) + words};
  }
}

/// Refuses a description that no GPU, or not this one, can compute. `two`: of two inputs.
void check(const fk_gating& gating, bool two) {
  check_type("gating", gating.type, {FK_FLOAT16, FK_BFLOAT16, FK_FLOAT32, FK_TF32, FK_TF32X3});
  if (gating.gate < FK_GATE_SIGMOID || gating.gate > FK_GATE_NONE) {
    throw Refusal{FK_BAD_ARGUMENT, "gating: gate is " + std::to_string(gating.gate) +
                                       "; it has to be one of fk_gate, from 0 to " +
                                       std::to_string(FK_GATE_NONE)};
  }
  const bool fp32 = gating.type == FK_FLOAT32;
  check_sizes({{"rows", gating.rows, 1 << 30},
               {"inputs", gating.inputs, fp32 ? 1 << 24 : 1 << 30},
               {"hidden", gating.hidden, (1 << 21) - 1024}});
  check_stride("x_stride", gating.x_stride, gating.inputs, element_bytes(gating));
  check_stride("out_stride", gating.out_stride, gating.hidden, element_bytes(gating));
  if (two) {
    check_sizes({{"value_inputs", value_inputs(gating), fp32 ? 1 << 24 : 1 << 30},
                 {"inputs + value_inputs", gating.inputs + value_inputs(gating), 1 << 30}});
    check_stride("value_stride", gating.value_stride, value_inputs(gating), element_bytes(gating));
    check_flag("gated_values", gating.gated_values, 1, "; it has to be 0 or 1");
  } else {
    constexpr const char* kWords = "; it has to be 0, unless there are two inputs";
    check_flag("value_inputs", gating.value_inputs, 0, kWords);
    check_flag("value_stride", gating.value_stride, 0, kWords);
    check_flag("gated_values", gating.gated_values, 0, kWords);
  }
  if (!fp32) check_capability("the gated layer", 80);
}

/// The same of backward, where inputs are columns of a product, and rows the depth of another.
void check_backward(const fk_gating& gating, bool two) {
  check(gating, two);
  const int64_t most = gating.type == FK_FLOAT32 ? 1 << 24 : 1 << 26;
  check_sizes({{"rows", gating.rows, gating.type == FK_FLOAT32 ? 1 << 24 : 1 << 30},
               {"inputs", gating.inputs, most}});
  if (two) check_sizes({{"value_inputs", value_inputs(gating), most}});
}

/// A stride as the layer takes it: 0 where rows are dense.
int64_t or_zero(int64_t stride, int64_t cols) { return stride == cols ? 0 : stride; }

/// How the type multiplies.
template <typename T>
ProductWays<T> product_of(const fk_gating& gating) {
  if constexpr (std::is_same_v<T, float>) {
    if (gating.type == FK_TF32) return tf32_product_ways;
    if (gating.type == FK_TF32X3) return tf32x3_product_ways;
    return fp32_product_ways;
  } else {
    return half_product_ways<T>;
  }
}

/// The same where one factor lies transposed.
template <typename T>
TurnedProductWays<T> turned_product_of(const fk_gating& gating) {
  return [type = gating.type](const auto&... of) { return turned_product_ways<T>(type, of...); };
}

/// The layer's operands: those of the call, of which number `x` is x, and number `out` out. After x
/// there is y, if there are two inputs, and then come w1, w2, b1 and b2.
template <typename T>
GatingMemory<T> memory_of(const fk_gating& gating, const Operands& at, int x, bool two, int out) {
  const int64_t hidden = gating.hidden, rows = gating.rows;
  const int w1 = x + 1 + two;
  const int64_t of_w2 = two ? value_inputs(gating) : gating.inputs;
  return {at.memory<T>(x, rows * gating.inputs),
          at.memory<T>(w1, gating.inputs * hidden),
          at.memory<T>(w1 + 2, hidden),
          at.memory<T>(w1 + 1, of_w2 * hidden),
          at.memory<T>(w1 + 3, hidden),
          at.memory<T>(out, rows * hidden),
          or_zero(gating.x_stride, gating.inputs),
          or_zero(gating.out_stride, gating.hidden),
          static_cast<Gate>(gating.gate)};
}

/// y, number `y` of the operands.
template <typename T>
ValueInput<T> value_of(const fk_gating& gating, const Operands& at, int y) {
  const int64_t cols = value_inputs(gating);
  return {at.memory<T>(y, gating.rows * cols), cols, or_zero(gating.value_stride, cols),
          gating.gated_values == 1};
}

/// The layer of a description that has been checked. Its operands are the call's arguments: x, w1,
/// w2, b1, b2, out; kTwo: x, y, w1, w2, b1, b2, out.
template <typename T, bool kTwo>
Operator layer(const fk_gating& gating) {
  return [=](const Caller& caller, const Operands& at) {
    const GatingMemory<T> memory = memory_of<T>(gating, at, 0, kTwo, 5 + kTwo);
    const GatingShape shape{gating.rows, gating.inputs, gating.hidden};
    std::optional<ValueInput<T>> value;
    if (kTwo) value = value_of<T>(gating, at, 1);
    if constexpr (std::is_same_v<T, float>) {
      return unfused_layer(caller, memory, shape, product_of<T>(gating), value);
    } else if constexpr (kTwo) {
      return gated_pair<T>(caller, memory, *value, shape);
    } else {
      return gated_layer<T>(caller, memory, shape);
    }
  };
}

/// Its gradients. The operands are d_out, x, w1, w2, b1, b2, d_x, d_w1, d_w2, d_b1, d_b2; kTwo:
/// with y after x, and d_y after d_x.
template <typename T, bool kTwo>
Operator backward(const fk_gating& gating) {
  return [=](const Caller& caller, const Operands& at) {
    const GatingMemory<T> memory = memory_of<T>(gating, at, 1, kTwo, 0);
    const int64_t hidden = gating.hidden, rows = gating.rows;
    constexpr int kDx = 6 + kTwo, kDw1 = kDx + 1 + kTwo;
    GatingGradients<T> d{at.memory<T>(0, rows * hidden),
                         at.memory<T>(kDx, rows * gating.inputs),
                         at.memory<T>(kDw1, gating.inputs * hidden),
                         at.memory<T>(kDw1 + 2, hidden),
                         at.memory<T>(kDw1 + 1, static_cast<int64_t>(memory.W2.size())),
                         at.memory<T>(kDw1 + 3, hidden)};
    std::optional<ValueInput<T>> value;
    if (kTwo) {
      value = value_of<T>(gating, at, 2);
      d.d_y = at.memory<T>(kDx + 1, rows * value->channels);
    }
    return GatedLayerBackward<T>(caller, memory, d, {rows, gating.inputs, hidden},
                                 product_of<T>(gating), turned_product_of<T>(gating), value)
        .ways();
  };
}

/// The slopes that forward keeps, numbers `first` and `first` + 1 of the operands.
template <typename T>
KeptSlopes<T> kept_of(const fk_gating& gating, const Operands& at, int first) {
  const int64_t count = gating.rows * gating.hidden;
  return {at.memory<T>(first, count), at.memory<T>(first + 1, count)};
}

/// The layer of two inputs that keeps slopes: x, y, w1, w2, b1, b2, out, s_slopes, v_slopes.
template <typename T>
Operator kept_layer(const fk_gating& gating) {
  return [=](const Caller& caller, const Operands& at) {
    const GatingMemory<T> memory = memory_of<T>(gating, at, 0, true, 6);
    const GatingShape shape{gating.rows, gating.inputs, gating.hidden};
    const ValueInput<T> value = value_of<T>(gating, at, 1);
    const KeptSlopes<T> kept = kept_of<T>(gating, at, 7);
    if constexpr (sizeof(T) == 2) {
      std::vector<Way> ways = kept_pair(caller, memory, value, kept, shape);
      if (!ways.empty()) return ways;
    }
    return unfused_layer<T>(caller, memory, shape, product_of<T>(gating), value, kept);
  };
}

/// Its gradients: d_out, x, y, w1, w2, b1, b2, s_slopes, v_slopes, d_x, d_y, d_w1, d_w2, d_b1,
/// d_b2.
template <typename T>
Operator kept_backward(const fk_gating& gating) {
  return [=](const Caller& caller, const Operands& at) {
    const GatingMemory<T> memory = memory_of<T>(gating, at, 1, true, 0);
    const int64_t hidden = gating.hidden, rows = gating.rows;
    const ValueInput<T> value = value_of<T>(gating, at, 2);
    const KeptSlopes<T> kept = kept_of<T>(gating, at, 7);
    const GatingGradients<T> d{at.memory<T>(0, rows * hidden),
                               at.memory<T>(9, rows * gating.inputs),
                               at.memory<T>(11, gating.inputs * hidden),
                               at.memory<T>(13, hidden),
                               at.memory<T>(12, value.channels * hidden),
                               at.memory<T>(14, hidden),
                               at.memory<T>(10, rows * value.channels)};
    const GatingShape shape{rows, gating.inputs, hidden};
    if constexpr (sizeof(T) == 2) {
      std::vector<Way> ways = kept_gradients(caller, memory, value, kept, d, shape);
      if (!ways.empty()) return ways;
    }
    return GatedLayerBackward<T>(caller, memory, d, shape, product_of<T>(gating),
                                 turned_product_of<T>(gating), value, kept)
        .ways();
  };
}

/// Of the operators for each type that of the description's.
Operator of_type(const fk_gating& gating, Operator (*of_half)(const fk_gating&),
                 Operator (*of_bfloat16)(const fk_gating&),
                 Operator (*of_float)(const fk_gating&)) {
  const auto make = gating.type == FK_FLOAT16 ? of_half : is_half(gating) ? of_bfloat16 : of_float;
  return make(gating);
}

/// A call's operands, whose rows may be apart.
struct Arguments {
  const fk_gating& of;

  Argument rows(const char* name, int64_t rows, int64_t cols, int64_t stride, bool written) const {
    const int64_t count = extent(rows, cols, or_dense(stride, cols));
    return {name, static_cast<size_t>(count) * element_bytes(of), written};
  }
  Argument dense(const char* name, int64_t rows, int64_t cols, bool written) const {
    return this->rows(name, rows, cols, 0, written);
  }
  Argument bias(const char* name, bool written) const {
    Argument argument = dense(name, 1, of.hidden, written);
    argument.optional = true;
    return argument;
  }
  Argument x() const { return rows("x", of.rows, of.inputs, of.x_stride, false); }
  Argument y() const { return rows("y", of.rows, value_inputs(of), of.value_stride, false); }
  Argument out(const char* name, bool written) const {
    return rows(name, of.rows, of.hidden, of.out_stride, written);
  }
  Argument kept(const char* name, bool written) const {
    return dense(name, of.rows, of.hidden, written);
  }
  Argument weights(const char* name, bool written) const {
    return dense(name, of.inputs, of.hidden, written);
  }
  Argument value_weights(const char* name, bool written) const {
    return dense(name, value_inputs(of), of.hidden, written);
  }
};

Task forward_task(const fk_gating& gating) {
  check(gating, false);
  const Arguments of{gating};
  return {of_type(gating, layer<half, false>, layer<__nv_bfloat16, false>, layer<float, false>),
          {of.x(), of.weights("w1", false), of.weights("w2", false), of.bias("b1", false),
           of.bias("b2", false), of.out("out", true)}};
}

Task two_forward_task(const fk_gating& gating) {
  check(gating, true);
  const Arguments of{gating};
  return {of_type(gating, layer<half, true>, layer<__nv_bfloat16, true>, layer<float, true>),
          {of.x(), of.y(), of.weights("w1", false), of.value_weights("w2", false),
           of.bias("b1", false), of.bias("b2", false), of.out("out", true)}};
}

Task backward_task(const fk_gating& gating) {
  check_backward(gating, false);
  const Arguments of{gating};
  return {of_type(gating, backward<half, false>, backward<__nv_bfloat16, false>,
                  backward<float, false>),
          {of.out("d_out", false), of.x(), of.weights("w1", false), of.weights("w2", false),
           of.bias("b1", false), of.bias("b2", false),
           of.dense("d_x", gating.rows, gating.inputs, true), of.weights("d_w1", true),
           of.weights("d_w2", true), of.bias("d_b1", true), of.bias("d_b2", true)}};
}

Task two_backward_task(const fk_gating& gating) {
  check_backward(gating, true);
  const Arguments of{gating};
  return {
      of_type(gating, backward<half, true>, backward<__nv_bfloat16, true>, backward<float, true>),
      {of.out("d_out", false), of.x(), of.y(), of.weights("w1", false),
       of.value_weights("w2", false), of.bias("b1", false), of.bias("b2", false),
       of.dense("d_x", gating.rows, gating.inputs, true),
       of.dense("d_y", gating.rows, value_inputs(gating), true), of.weights("d_w1", true),
       of.value_weights("d_w2", true), of.bias("d_b1", true), of.bias("d_b2", true)}};
}

Task two_kept_forward_task(const fk_gating& gating) {
  check(gating, true);
  const Arguments of{gating};
  return {of_type(gating, kept_layer<half>, kept_layer<__nv_bfloat16>, kept_layer<float>),
          {of.x(), of.y(), of.weights("w1", false), of.value_weights("w2", false),
           of.bias("b1", false), of.bias("b2", false), of.out("out", true),
           of.kept("s_slopes", true), of.kept("v_slopes", true)}};
}

Task two_kept_backward_task(const fk_gating& gating) {
  check_backward(gating, true);
  const Arguments of{gating};
  return {of_type(gating, kept_backward<half>, kept_backward<__nv_bfloat16>, kept_backward<float>),
          {of.out("d_out", false), of.x(), of.y(), of.weights("w1", false),
           of.value_weights("w2", false), of.bias("b1", false), of.bias("b2", false),
           of.kept("s_slopes", false), of.kept("v_slopes", false),
           of.dense("d_x", gating.rows, gating.inputs, true),
           of.dense("d_y", gating.rows, value_inputs(gating), true), of.weights("d_w1", true),
           of.value_weights("d_w2", true), of.bias("d_b1", true), of.bias("d_b2", true)}};
}

}  // namespace

const Function operators::library::gating_forward = function_of<fk_gating, forward_task>("gating");
const Function operators::library::gating_backward =
    function_of<fk_gating, backward_task>("gating");
const Function operators::library::gating_two_forward =
    function_of<fk_gating, two_forward_task>("gating");
const Function operators::library::gating_two_backward =
    function_of<fk_gating, two_backward_task>("gating");
const Function operators::library::gating_two_kept_forward =
    function_of<fk_gating, two_kept_forward_task>("gating");
const Function operators::library::gating_two_kept_backward =
    function_of<fk_gating, two_kept_backward_task>("gating");

extern "C" int fk_gating_workspace(const fk_gating* gating, size_t* bytes) {
  return query(gating_forward, gating, bytes);
}

extern "C" int fk_gating_backward_workspace(const fk_gating* gating, size_t* bytes) {
  return query(gating_backward, gating, bytes);
}

extern "C" int fk_gating_forward(const fk_gating* gating, const void* x, const void* w1,
                                 const void* w2, const void* b1, const void* b2, void* out,
                                 void* workspace, size_t workspace_bytes,
                                 struct CUstream_st* stream) {
  return call(gating_forward, gating, {x, w1, w2, b1, b2, out}, workspace, workspace_bytes, stream);
}

extern "C" int fk_gating_backward(const fk_gating* gating, const void* d_out, const void* x,
                                  const void* w1, const void* w2, const void* b1, const void* b2,
                                  void* d_x, void* d_w1, void* d_w2, void* d_b1, void* d_b2,
                                  void* workspace, size_t workspace_bytes,
                                  struct CUstream_st* stream) {
  return call(gating_backward, gating, {d_out, x, w1, w2, b1, b2, d_x, d_w1, d_w2, d_b1, d_b2},
              workspace, workspace_bytes, stream);
}

extern "C" int fk_gating_two_workspace(const fk_gating* gating, size_t* bytes) {
  return query(gating_two_forward, gating, bytes);
}

extern "C" int fk_gating_two_backward_workspace(const fk_gating* gating, size_t* bytes) {
  return query(gating_two_backward, gating, bytes);
}

extern "C" int fk_gating_two_forward(const fk_gating* gating, const void* x, const void* y,
                                     const void* w1, const void* w2, const void* b1, const void* b2,
                                     void* out, void* workspace, size_t workspace_bytes,
                                     struct CUstream_st* stream) {
  return call(gating_two_forward, gating, {x, y, w1, w2, b1, b2, out}, workspace, workspace_bytes,
              stream);
}

extern "C" int fk_gating_two_backward(const fk_gating* gating, const void* d_out, const void* x,
                                      const void* y, const void* w1, const void* w2, const void* b1,
                                      const void* b2, void* d_x, void* d_y, void* d_w1, void* d_w2,
                                      void* d_b1, void* d_b2, void* workspace,
                                      size_t workspace_bytes, struct CUstream_st* stream) {
  return call(gating_two_backward, gating,
              {d_out, x, y, w1, w2, b1, b2, d_x, d_y, d_w1, d_w2, d_b1, d_b2}, workspace,
              workspace_bytes, stream);
}

extern "C" int fk_gating_two_kept_workspace(const fk_gating* gating, size_t* bytes) {
  return query(gating_two_kept_forward, gating, bytes);
}

extern "C" int fk_gating_two_kept_backward_workspace(const fk_gating* gating, size_t* bytes) {
  return query(gating_two_kept_backward, gating, bytes);
}

extern "C" int fk_gating_two_kept_forward(const fk_gating* gating, const void* x, const void* y,
                                          const void* w1, const void* w2, const void* b1,
                                          const void* b2, void* out, void* s_slopes, void* v_slopes,
                                          void* workspace, size_t workspace_bytes,
                                          struct CUstream_st* stream) {
  return call(gating_two_kept_forward, gating, {x, y, w1, w2, b1, b2, out, s_slopes, v_slopes},
              workspace, workspace_bytes, stream);
}

extern "C" int fk_gating_two_kept_backward(const fk_gating* gating, const void* d_out,
                                           const void* x, const void* y, const void* w1,
                                           const void* w2, const void* b1, const void* b2,
                                           const void* s_slopes, const void* v_slopes, void* d_x,
                                           void* d_y, void* d_w1, void* d_w2, void* d_b1,
                                           void* d_b2, void* workspace, size_t workspace_bytes,
                                           struct CUstream_st* stream) {
  return call(gating_two_kept_backward, gating,
              {d_out, x, y, w1, w2, b1, b2, s_slopes, v_slopes, d_x, d_y, d_w1, d_w2, d_b1, d_b2},
              workspace, workspace_bytes, stream);
}
