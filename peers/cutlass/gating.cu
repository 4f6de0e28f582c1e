/* The gated layer by the kernel of CUTLASS's example 45_dual_gemm: out = SiLU(x W1) * (x W2) in
 * fp16, with fp32 sums, all row by row. peers/cutlass/compare.py says how this file is built, and
 * measures it. */
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/gemm.h"
#include "device/dual_gemm.h"
#include "thread/left_silu_and_mul.h"

namespace {

using Half = cutlass::half_t;
using Rows = cutlass::layout::RowMajor;
using Sum =
    cutlass::epilogue::thread::LinearCombination<Half, 8, float, float,
                                                 cutlass::epilogue::thread::ScaleType::Nothing>;
using Gate = cutlass::epilogue::thread::LeftSiLUAndMul<Half, 8, Half, float>;

template <class Tile, class Warp, int kStages>
int run(int rows, int inputs, int hidden, const void* x, const void* w1, const void* w2, void* out,
        cudaStream_t stream) {
  // Neither of the two products is stored, and there is no split-K.
  using Layer = cutlass::gemm::device::DualGemm<
      Half, Rows, Half, Rows, Rows, Half, Rows, float, cutlass::arch::OpClassTensorOp,
      cutlass::arch::Sm80, Tile, Warp, cutlass::gemm::GemmShape<16, 8, 16>, Sum, Sum, Gate,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<4>, kStages, false, false, false>;
  const auto factor = [](const void* data, int stride) {
    return cutlass::TensorRef<const Half, Rows>{static_cast<const Half*>(data), Rows{stride}};
  };
  const cutlass::TensorRef<const Half, Rows> none;
  const typename Layer::Arguments arguments{cutlass::gemm::DualGemmMode::kGemm,
                                            {rows, hidden, inputs},
                                            factor(x, inputs),
                                            factor(w1, hidden),
                                            none,
                                            {},
                                            factor(w2, hidden),
                                            none,
                                            {},
                                            {static_cast<Half*>(out), Rows{hidden}}};
  if (Layer::can_implement(arguments) != cutlass::Status::kSuccess) return -2;
  Layer layer;
  const auto ready = layer.initialize(arguments, nullptr, stream);
  return static_cast<int>(ready == cutlass::Status::kSuccess ? layer.run(stream) : ready);
}

template <int M, int N, int K>
using Of = cutlass::gemm::GemmShape<M, N, K>;

}  // namespace

extern "C" {

int cutlass_gating_ways() { return 3; }

const char* cutlass_gating_way(int way) {
  constexpr const char* kNames[] = {"128 x 64 x 32, 4 warps, 3 stages",
                                    "128 x 64 x 64, 4 warps, 3 stages",
                                    "128 x 128 x 32, 8 warps, 4 stages"};
  return kNames[way];
}

/// Returns 0 if the kernel was launched.
int cutlass_gating(int way, int rows, int inputs, int hidden, const void* x, const void* w1,
                   const void* w2, void* out, cudaStream_t stream) {
  const auto with = [&](auto* layer) {
    return layer(rows, inputs, hidden, x, w1, w2, out, stream);
  };
  switch (way) {
    case 0:
      return with(run<Of<128, 64, 32>, Of<64, 32, 32>, 3>);
    case 1:
      return with(run<Of<128, 64, 64>, Of<64, 32, 64>, 3>);
    case 2:
      return with(run<Of<128, 128, 32>, Of<64, 32, 32>, 4>);
  }
  return -3;
}

}  // extern "C"
