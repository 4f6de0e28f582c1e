/* Attention by the kernels of CUTLASS's example 88_hopper_fmha: out = softmax(q k^T / sqrt(128)) v
 * in fp16, of heads of width 128, and the logarithms of the sums of rows.
 * peers/cutlass/compare.py says how this file is built, and measures it. */
#include "collective/fmha_fusion.hpp"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/kernel_hardware_info.hpp"
#include "device/device_universal.hpp"
#include "kernel/fmha_kernel_builder.hpp"

namespace {

using Half = cutlass::half_t;
constexpr int kWidth = 128;

template <class Fusion, class Schedule>
int run(int batch, int heads, int queries, int keys, int multiprocessors, const void* q,
        const void* k, const void* v, void* out, float* log_sums, void* workspace, size_t bytes,
        cudaStream_t stream) {
  using One = cute::Int<1>;
  using Stride = cute::tuple<int, One, cute::tuple<int, int>>;  // of a row, an element, a head
  using Tile = cute::Shape<cute::Int<128>, cute::Int<128>, cute::Int<kWidth>>;
  using Attention = cutlass::device::Universal<typename cutlass::fmha::kernel::FmhaBuilder<
      Half, float, float, Tile, Stride, Stride, Stride, Fusion, Schedule>::Kernel>;
  const auto stride = [&](int rows) {
    return Stride{kWidth, One{}, {heads * rows * kWidth, rows * kWidth}};
  };
  const auto half = [](const void* data) {
    return const_cast<Half*>(static_cast<const Half*>(data));
  };
  typename Attention::Arguments arguments{
      {batch, heads, queries, keys, kWidth},
      {half(q), stride(queries), half(k), stride(keys), half(v), stride(keys)},
      {static_cast<Half*>(out), stride(queries), log_sums, {One{}, {heads * queries, queries}}},
      {0, multiprocessors}};
  if (Attention::get_workspace_size(arguments) > bytes) return -1;
  if (Attention::can_implement(arguments) != cutlass::Status::kSuccess) return -2;
  Attention attention;
  return static_cast<int>(attention.run(arguments, workspace, stream));
}

}  // namespace

extern "C" {

int cutlass_attention_ways() { return 2; }

const char* cutlass_attention_way(int way) {
  return way ? "128 x 128, ping-pong" : "128 x 128, cooperative";
}

/// Returns 0 if the kernel was launched. Tensors are batch x heads x rows x 128.
int cutlass_attention(int way, int causal, int batch, int heads, int queries, int keys,
                      int multiprocessors, const void* q, const void* k, const void* v, void* out,
                      float* log_sums, void* workspace, size_t bytes, cudaStream_t stream) {
  using Cooperative = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using Pingpong = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using All = cutlass::fmha::collective::DefaultFusion;
  using Causal = cutlass::fmha::collective::CausalFusion;
  const auto with = [&](auto* kernel) {
    return kernel(batch, heads, queries, keys, multiprocessors, q, k, v, out, log_sums, workspace,
                  bytes, stream);
  };
  switch (2 * way + (causal != 0)) {
    case 0:
      return with(run<All, Cooperative>);
    case 1:
      return with(run<Causal, Cooperative>);
    case 2:
      return with(run<All, Pingpong>);
    case 3:
      return with(run<Causal, Pingpong>);
  }
  return -3;
}

}  // extern "C"
