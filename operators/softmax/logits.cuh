// Logits as what follows the product finds them: whole, or in slices that have to be added up.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "operators/caller.h"
#include "primitives/launch.h"

namespace operators::softmax {

/// A way to compute logits = x W alone. With one slice of D it leaves, if wanted, the maximum and
/// the sum of each of `count` parts of each row in `parts` (B, count); `count` is 0 if it has no
/// parts. With several slices it leaves partial logits in `sliced` (slices, B, C), and no logits.
struct LogitsWay : Way {
  int slices, count;
  Memory<float> sliced;
  Memory<float2> parts;
};

/// sum = the sum of `slices` matrices of `count` elements, one behind another. A thread has an
/// element, and the loads of eight slices are under way at a time.
inline constexpr int kAddThreads = 256;
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    add_slices(const float* sliced, float* sum, int64_t count, int slices) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= count) return;
  float v = sliced[at];
#pragma unroll 8
  for (int slice = 1; slice < slices; ++slice) v += sliced[slice * count + at];
  sum[at] = v;
}

/// The steps of a product of `count` results: those of the way, and then the sum of its slices.
inline std::vector<Way> whole_product(const LogitsWay& of, const Memory<float>& results,
                                      int64_t count, cudaStream_t stream) {
  if (of.slices == 1) return {of};
  return {of,
          {"", 0,  // which the first step's time has
           [=, slices = of.slices, sliced = of.sliced] {
             add_slices<kAddThreads>
                 <<<primitives::blocks_for(count, kAddThreads), kAddThreads, 0, stream>>>(
                     sliced, results, count, slices);
           },
           0}};
}

}  // namespace operators::softmax
