// softmax(x W) of many rows and few columns on Hopper, in TF32.
#pragma once

#include <algorithm>
#include <vector>

#include "operators/estimate.h"
#include "operators/softmax/hopper/transposed_product.cuh"
#include "operators/softmax/layer.cuh"
#include "primitives/hopper/hopper.cuh"

namespace operators::softmax {

// With many rows and few columns, x is nearly all there is to read, each element once, and should
// come without a break. So W, of all D inputs, stays in the registers of a persistent block, and
// *slabs* of whole rows of x stream past it. A slab is one piece of memory. 8 rows of floats are a
// multiple of 16 bytes, however long a row is, so a slab of 8 rows starts at such a multiple, and a
// single copy of the copy engine brings it. While one slab is multiplied others are on their way.
//
// A warp multiplies 8 rows of x at a time, with all columns, and with every `splits`-th chunk of 32
// inputs (split-K in a block). The left factor of mma.sync is W^T: 16 columns of W are its rows.
// The right factor is x^T: the 8 rows of x are its columns. The order of the inputs within a chunk
// does not change a sum, so we choose it: each of the 4 lanes of a row takes 8 neighbours, two of
// them for each mma.sync. The partial sums of the warps meet in shared memory, where 8 lanes finish
// a row.
constexpr int kNarrowWarps = 8, kNarrowStages = 4;

template <int kTiles>  // of 16 columns
struct Narrow {
  static constexpr int kChunks = 10 / kTiles;      // of W, that a warp's registers hold: 10 tiles
  static constexpr int kStride = 16 * kTiles + 4;  // of sums: pairs of rows are on different banks
};

struct Slabs {
  int splits, groups;  // warps that share rows, each with a split of D; groups of 8 rows in a slab
  int stages, bytes;   // slabs that there is room for; shared memory of a block
};

#if HOPPER_CODE
// Adds up the partial sums of a slab's rows, and finishes them, 8 lanes to a row. Lanes that have
// no row take part, too, for the shuffles.
template <int kTiles>
__device__ void finish_slab(const float* sums, int row0, int here, int C, Slabs of,
                            const Results& results) {
  constexpr int kLanes = 8, kValues = 2 * kTiles, kStride = Narrow<kTiles>::kStride;
  for (int own = threadIdx.x / kLanes; own / 4 * 4 < here; own += 32 * kNarrowWarps / kLanes) {
    float v[kValues] = {};
    const float* from = sums + own * kStride + threadIdx.x % kLanes;
    for (int s = 0; s < of.splits; ++s, from += 8 * of.groups * kStride) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) v[i] += from[kLanes * i];
    }
    finish_row<kValues, kLanes>(v, row0 + own, C, results, 0, 1, own < here);
  }
}
#endif

template <int kTiles>
__global__ void __launch_bounds__(32 * kNarrowWarps, 1)
    narrow_columns(const float* x, const float* W, int B, int D, int C, Slabs of, Results results) {
#if HOPPER_CODE
  constexpr int kChunks = Narrow<kTiles>::kChunks, kStride = Narrow<kTiles>::kStride;
  extern __shared__ __align__(1024) char bytes[];
  __shared__ Barrier full[kNarrowStages + 1];  // the last: of W
  const int rows = 8 * of.groups, count = (B + rows - 1) / rows, slab_floats = rows * D;
  float* slabs = reinterpret_cast<float*>(bytes);  // [stages][rows][D]
  float* sums = slabs + of.stages * slab_floats;   // [splits][rows][kStride]
  // At first W comes into the end of the block's memory, and the warps take it from there to
  // registers. Then that place is free for the last slabs, and for the sums.
  const int W_floats = (D * C + 3) / 4 * 4, W_at = of.bytes / 4 - W_floats;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int split = warp % of.splits, at_once = kNarrowWarps / of.splits;
  if (threadIdx.x == 0) {
    for (Barrier& barrier : full) barrier_init(&barrier, 1);
    barrier_init_fence();
  }
  start_next_kernel();
  wait_for_previous_kernel();
  // Copies the last floats % 4 floats: the copy engine moves whole 16 bytes.
  const auto copy_rest = [](float* to, const float* from, int floats) {
    const int at = floats / 4 * 4 + static_cast<int>(threadIdx.x);
    if (at < floats) to[at] = from[at];
  };
  copy_rest(slabs + W_at, W, D * C);
  __syncthreads();
  const auto copy = [](float* to, const float* from, int count, Barrier* barrier) {
    barrier_arrive_expect(barrier, count / 4 * 16);
    bulk_load(to, from, count / 4 * 16, barrier);
  };
  const auto fetch = [&](int slab, int stage) {
    if (threadIdx.x != 0 || slab >= count) return;
    copy(slabs + stage * slab_floats, x + static_cast<size_t>(slab) * slab_floats,
         min(rows, B - slab * rows) * D, &full[stage]);
  };
  if (threadIdx.x == 0) copy(slabs + W_at, W, D * C, &full[kNarrowStages]);
  const int early = min(of.stages, W_at / slab_floats);
  for (int s = 0; s < early; ++s) fetch(blockIdx.x + s * gridDim.x, s);

  unsigned w[kChunks][kTiles][4][4];
  barrier_wait(&full[kNarrowStages], 0);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    load_columns<kTiles>(w[i], slabs + W_at, 32 * (split + of.splits * i) + 8 * t, D, C);
  }
  __syncthreads();  // W's place is free
  for (int s = early; s < of.stages; ++s) fetch(blockIdx.x + s * gridDim.x, s);

  Ring ring{of.stages};
  for (int slab = blockIdx.x; slab < count; slab += gridDim.x) {
    const int row0 = slab * rows, here = min(rows, B - row0);
    float* from = slabs + ring.stage * slab_floats;
    barrier_wait(&full[ring.stage], ring.parity);
    if (here * D % 4 != 0) {  // the end of x
      copy_rest(from, x + static_cast<size_t>(row0) * D, here * D);
      __syncthreads();
    }
    for (int group = warp / of.splits; warp < at_once * of.splits && group < of.groups;
         group += at_once) {
      const float* row = from + min(8 * group + g, here - 1) * D;
      float sum[kTiles][4] = {};
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int d0 = 32 * (split + of.splits * i) + 8 * t;
        if (d0 - 8 * t >= D) break;
        float v[8];
        load_inputs(v, row + d0, D - d0, D);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const unsigned b0 = to_tf32(v[2 * step]), b1 = to_tf32(v[2 * step + 1]);
#pragma unroll
          for (int j = 0; j < kTiles; ++j) mma_m16n8k8_tf32(sum[j], w[i][j][step], b0, b1);
        }
      }
      float* to = sums + (split * rows + 8 * group + 2 * t) * kStride + g;
#pragma unroll
      for (int j = 0; j < kTiles; ++j, to += 16) {
        to[0] = sum[j][0], to[kStride] = sum[j][1];
        to[8] = sum[j][2], to[kStride + 8] = sum[j][3];
      }
    }
    __syncthreads();  // the slab has been read, and the sums are there
    fetch(slab + of.stages * gridDim.x, ring.stage);
    ring.advance();
    finish_slab<kTiles>(sums, row0, here, C, of, results);
    __syncthreads();  // the sums have been read
  }
#endif
}

template <int kTiles>
Product make_narrow(const Layer& layer) {
  // As few warps share a row as can hold W. A slab is 32 rows, or 8 for each `splits` warps if that
  // is more. It is less if multiprocessors would get no slab, or if a block had no room for two.
  using N = Narrow<kTiles>;
  constexpr int kThreads = 32 * kNarrowWarps;
  const int splits = static_cast<int>(blocks_for(blocks_for(layer.D, 32), N::kChunks));
  const int most = most_shared_bytes() - 1024;
  const int slab_bytes = 8 * 4 * layer.D, sums_bytes = 8 * 4 * splits * N::kStride;
  const int groups = std::min({std::max(4, kNarrowWarps / splits),
                               static_cast<int>(blocks_for(layer.B, 8 * layer.sms)),
                               std::max(1, most / (2 * slab_bytes + sums_bytes))});
  const int stages = std::min(kNarrowStages, (most / groups - sums_bytes) / slab_bytes);
  const int W_bytes = 16 * static_cast<int>(blocks_for(int64_t{1} * layer.D * layer.C, 4));
  const int bytes = std::max(W_bytes, groups * (stages * slab_bytes + sums_bytes));
  const int slabs = static_cast<int>(blocks_for(layer.B, 8 * groups));
  const Slabs of = {splits, groups, stages, bytes};
  const auto launch = [=](Results results) {
    layer.launch(narrow_columns<kTiles>, std::min(slabs, layer.sms), kThreads, bytes,  //
                 layer.x, layer.W, layer.B, layer.D, layer.C, of, results);
  };
  Product product = product_of(Kernels::narrow, narrow_columns<kTiles>, bytes, launch);
  const double microseconds = kFirstLaunch + layer.shape.bytes(sizeof(float)) / memory_rate();
  product.expected = {microseconds, microseconds + kNextLaunch};
  return product;
}

// Whether there are many rows, and a block's warps have room for W.
template <int kTiles>
bool fits_narrow(const Layer& layer) {
  constexpr int kManyRows = 2048, kMostInputs = 32 * kNarrowWarps * Narrow<kTiles>::kChunks;
  return layer.B >= kManyRows && layer.C <= 16 * kTiles && layer.D >= 4 && layer.D <= kMostInputs;
}

inline std::vector<Product> choose_narrow(const Layer& layer) {
  if (fits_narrow<1>(layer)) return {make_narrow<1>(layer)};
  if (fits_narrow<2>(layer)) return {make_narrow<2>(layer)};
  if (fits_narrow<3>(layer)) return {make_narrow<3>(layer)};
  return {};
}

}  // namespace operators::softmax
