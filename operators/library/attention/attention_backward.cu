// The gradients of attention of operators/attention, as the library exports them.

#include "operators/attention/backward.cuh"
#include "operators/library/attention/tensor.h"
#include "operators/library/call.h"
#include "primitives/launch.h"

namespace {

using namespace operators::library;
using operators::attention::AttentionBackward, operators::attention::AttentionShape;
using operators::attention::BackwardMemory, operators::attention::kBackwardQueries;

struct Tensors {
  AttentionTensor d_out, q, k, v, out, d_q, d_k, d_v;
  explicit Tensors(const fk_attention_gradients& of)
      : d_out(of_queries(of, "d_out_strides", of.d_out_strides)),
        q(of_queries(of, "q_strides", of.q_strides)),
        k(of_keys(of, "k_strides", of.k_strides)),
        v(of_keys(of, "v_strides", of.v_strides)),
        out(of_queries(of, "out_strides", of.out_strides)),
        d_q(of_queries(of, "d_q_strides", of.d_q_strides)),
        d_k(of_keys(of, "d_k_strides", of.d_k_strides)),
        d_v(of_keys(of, "d_v_strides", of.d_v_strides)) {}

 private:
  static AttentionTensor of_queries(const fk_attention_gradients& of, const char* name,
                                    const fk_strides& strides) {
    return {name, strides, of.batch, of.queries, of.heads, of.width};
  }
  static AttentionTensor of_keys(const fk_attention_gradients& of, const char* name,
                                 const fk_strides& strides) {
    return {name, strides, of.batch, of.keys, of.kv_heads, of.width};
  }
};

/// Refuses a description that no GPU, or not this one, can compute.
void check(const fk_attention_gradients& of) {
  check_attention(of, operators::attention::kBackwardWidth);
  check_multiple("width", of.width, 8);
  if (of.deterministic != 0 && of.deterministic != 1) {
    throw Refusal{FK_BAD_ARGUMENT,
                  "deterministic is " + std::to_string(of.deterministic) + "; it has to be 0 or 1"};
  }
  const int64_t tiles = primitives::ceil_div(of.queries, kBackwardQueries);
  if (of.batch * of.heads > (1 << 30) / kBackwardQueries / tiles) {
    throw Refusal{FK_BAD_SHAPE,
                  "batch * heads * queries, with queries rounded up to a multiple of 128, is more "
                  "than 2^30"};
  }
  const Tensors tensors(of);
  for (const auto* each : {&tensors.d_out, &tensors.q, &tensors.k, &tensors.v, &tensors.out,
                           &tensors.d_q, &tensors.d_k, &tensors.d_v}) {
    each->check();
    const auto [batch, row, head] = each->all();
    for (const int64_t stride : {batch, row, head}) {
      if (stride % 8 == 0) continue;
      throw Refusal{FK_BAD_ALIGNMENT, std::string(each->name) + ": a stride is " +
                                          std::to_string(stride) +
                                          "; it has to be a multiple of 8, which are 16 bytes"};
    }
  }
  check_capability("attention's backward pass", 80);
}

/// The gradients of a description that has been checked. Their operands are the call's arguments:
/// d_out, q, k, v, out, log_sums, d_q, d_k, d_v.
Operator operator_of(const fk_attention_gradients& of) {
  return [=](const operators::Caller& caller, const Operands& at) {
    const AttentionShape shape{of.batch,    of.queries, of.keys,       of.heads,
                               of.kv_heads, of.width,   of.causal == 1};
    const Tensors by(of);
    const auto ways = [&]<typename T>() {
      const BackwardMemory<T> operands{
          at.memory<T>(0, 0), at.memory<T>(1, 0),     at.memory<T>(2, 0), at.memory<T>(3, 0),
          at.memory<T>(4, 0), at.memory<float>(5, 0), at.memory<T>(6, 0), at.memory<T>(7, 0),
          at.memory<T>(8, 0), by.d_out.all(),         by.q.all(),         by.k.all(),
          by.v.all(),         by.out.all(),           by.d_q.all(),       by.d_k.all(),
          by.d_v.all()};
      return AttentionBackward<T>(caller, operands, shape, of.scale, of.deterministic == 1).ways();
    };
    return of.type == FK_FLOAT16 ? ways.template operator()<half>()
                                 : ways.template operator()<__nv_bfloat16>();
  };
}

Task task_of(const fk_attention_gradients& of) {
  check(of);
  const Tensors tensors(of);
  const auto argument = [](const char* name, const AttentionTensor& of, bool written) {
    return Argument{name, static_cast<size_t>(of.count()) * 2, written};
  };
  const auto rows = static_cast<size_t>(of.batch * of.heads * of.queries);
  return {operator_of(of),
          {argument("d_out", tensors.d_out, false), argument("q", tensors.q, false),
           argument("k", tensors.k, false), argument("v", tensors.v, false),
           argument("out", tensors.out, false), Argument{"log_sums", rows * sizeof(float)},
           argument("d_q", tensors.d_q, true), argument("d_k", tensors.d_k, true),
           argument("d_v", tensors.d_v, true)}};
}

}  // namespace

const Function operators::library::attention_backward =
    function_of<fk_attention_gradients, task_of>("attention");

extern "C" int fk_attention_backward_workspace(const fk_attention_gradients* attention,
                                               size_t* bytes) {
  return query(attention_backward, attention, bytes);
}

extern "C" int fk_attention_backward(const fk_attention_gradients* attention, const void* d_out,
                                     const void* q, const void* k, const void* v, const void* out,
                                     const float* log_sums, void* d_q, void* d_k, void* d_v,
                                     void* workspace, size_t workspace_bytes,
                                     struct CUstream_st* stream) {
  return call(attention_backward, attention, {d_out, q, k, v, out, log_sums, d_q, d_k, d_v},
              workspace, workspace_bytes, stream);
}
