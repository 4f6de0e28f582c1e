/* Products by CUTLASS's builder of kernels for Hopper: C = A B in fp16, with fp32 sums, all three
 * row by row. peers/cutlass/compare.py says how this file is built, and measures it. */
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

namespace {

using Half = cutlass::half_t;
using Rows = cutlass::layout::RowMajor;

struct Cooperative {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
};
struct Pingpong {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};

template <class Tile, class Cluster, class Schedule>
struct Product {
  // There is no third operand: the type of C is void.
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Rows, 8, Half, Rows, 8,
      typename Schedule::Epilogue>::CollectiveOp;
  using Stages = cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
      sizeof(typename Epilogue::SharedStorage))>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Half, Rows, 8, Half, Rows, 8, float,
      Tile, Cluster, Stages, typename Schedule::Mainloop>::CollectiveOp;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static int run(int n, int multiprocessors, int swizzle, const void* a, const void* b, void* c,
                 cudaStream_t stream) {
    const auto shape = cute::make_shape(n, n, 1);
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {n, n, n, 1},
        {static_cast<const Half*>(a),
         cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, shape),
         static_cast<const Half*>(b),
         cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, shape)},
        {{},
         nullptr,
         {},
         static_cast<Half*>(c),
         cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, shape)}};
    arguments.epilogue.thread.alpha = 1;
    arguments.epilogue.thread.beta = 0;
    arguments.hw_info = {0, multiprocessors};
    arguments.scheduler.max_swizzle_size = swizzle;
    if (Gemm::get_workspace_size(arguments) != 0) return -1;
    Gemm gemm;
    if (gemm.can_implement(arguments) != cutlass::Status::kSuccess) return -2;
    return static_cast<int>(gemm.run(arguments, nullptr, stream));
  }
};

template <int M, int N, int K>
using Of = cute::Shape<cute::Int<M>, cute::Int<N>, cute::Int<K>>;

}  // namespace

extern "C" {

int cutlass_product_ways() { return 4; }

const char* cutlass_product_way(int way) {
  constexpr const char* kNames[] = {
      "128 x 256 x 64, cluster 2 x 1, cooperative", "256 x 128 x 64, cluster 2 x 1, cooperative",
      "128 x 128 x 64, cluster 2 x 1, ping-pong", "64 x 256 x 64, cluster 2 x 1, ping-pong"};
  return kNames[way];
}

/// c = a b, n x n each. `swizzle`: how many tiles wide a group of the order of tiles may be.
/// Returns 0 if the kernel was launched.
int cutlass_product(int way, int n, int multiprocessors, int swizzle, const void* a, const void* b,
                    void* c, cudaStream_t stream) {
  using Two = Of<2, 1, 1>;
  const auto run = [&](auto product) {
    return product.run(n, multiprocessors, swizzle, a, b, c, stream);
  };
  switch (way) {
    case 0:
      return run(Product<Of<128, 256, 64>, Two, Cooperative>{});
    case 1:
      return run(Product<Of<256, 128, 64>, Two, Cooperative>{});
    case 2:
      return run(Product<Of<128, 128, 64>, Two, Pingpong>{});
    case 3:
      return run(Product<Of<64, 256, 64>, Two, Pingpong>{});
  }
  return -3;
}

}  // extern "C"
