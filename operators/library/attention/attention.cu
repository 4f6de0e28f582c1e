// Attention of operators/attention, as the library exports it.

#include "operators/attention/layer.cuh"
#include "operators/library/attention/tensor.h"
#include "operators/library/call.h"

namespace {

using namespace operators::library;
using operators::attention::Attention, operators::attention::AttentionMemory;
using operators::attention::AttentionShape;

struct Tensors {
  AttentionTensor q, k, v, out;
  explicit Tensors(const fk_attention& of)
      : q{"q_strides", of.q_strides, of.batch, of.queries, of.heads, of.width},
        k{"k_strides", of.k_strides, of.batch, of.keys, of.kv_heads, of.width},
        v{"v_strides", of.v_strides, of.batch, of.keys, of.kv_heads, of.width},
        out{"out_strides", of.out_strides, of.batch, of.queries, of.heads, of.width} {}
};

/// Refuses a description that no GPU, or not this one, can compute.
void check(const fk_attention& of) {
  check_attention(of, 256);
  const Tensors tensors(of);
  for (const auto* each : {&tensors.q, &tensors.k, &tensors.v, &tensors.out}) each->check();
  check_capability("attention", of.type == FK_FLOAT16 ? 75 : 80);
}

/// Attention of a description that has been checked. Its operands are the call's arguments: q, k,
/// v, out and, if they are wanted, log_sums.
template <bool kLogSums>
Operator operator_of(const fk_attention& of) {
  return [=](const operators::Caller& caller, const Operands& at) {
    const AttentionShape shape{of.batch,    of.queries, of.keys,       of.heads,
                               of.kv_heads, of.width,   of.causal == 1};
    const Tensors tensors(of);
    const auto ways = [&]<typename T>() {
      AttentionMemory<T> operands(shape, at.memory<T>(0, 0), at.memory<T>(1, 0), at.memory<T>(2, 0),
                                  at.memory<T>(3, 0));
      if (kLogSums) operands.log_sums = at.memory<float>(4, 0);
      operands.q = tensors.q.all(), operands.k = tensors.k.all();
      operands.v = tensors.v.all(), operands.o = tensors.out.all();
      return Attention<T>(caller, operands, shape, of.scale).ways();
    };
    return of.type == FK_FLOAT16 ? ways.template operator()<half>()
                                 : ways.template operator()<__nv_bfloat16>();
  };
}

template <bool kLogSums>
Task task_of(const fk_attention& of) {
  check(of);
  const Tensors tensors(of);
  const auto argument = [](const char* name, int64_t count, bool written) {
    return Argument{name, static_cast<size_t>(count) * 2, written};
  };
  Task task = {
      operator_of<kLogSums>(of),
      {argument("q", tensors.q.count(), false), argument("k", tensors.k.count(), false),
       argument("v", tensors.v.count(), false), argument("out", tensors.out.count(), true)}};
  const auto rows = static_cast<size_t>(of.batch * of.heads * of.queries);
  if (kLogSums) task.arguments.push_back({"log_sums", rows * sizeof(float), true});
  return task;
}

}  // namespace

const Function operators::library::attention_forward =
    function_of<fk_attention, task_of<false>>("attention");
const Function operators::library::attention_log_sums =
    function_of<fk_attention, task_of<true>>("attention");

extern "C" int fk_attention_workspace(const fk_attention* attention, size_t* bytes) {
  return query(attention_forward, attention, bytes);
}

extern "C" int fk_attention_forward(const fk_attention* attention, const void* q, const void* k,
                                    const void* v, void* out, float* log_sums, void* workspace,
                                    size_t workspace_bytes, struct CUstream_st* stream) {
  if (!log_sums) {
    return call(attention_forward, attention, {q, k, v, out}, workspace, workspace_bytes, stream);
  }
  return call(attention_log_sums, attention, {q, k, v, out, log_sums}, workspace, workspace_bytes,
              stream);
}
