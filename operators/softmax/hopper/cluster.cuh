// softmax(x W) of few rows, or few columns, on Hopper: split-K over the blocks of a cluster. The
// idea is that of lesson 9's *fused tensor cores*.
#pragma once

#include "operators/softmax/hopper/plans.cuh"
#include "operators/softmax/hopper/transposed_product.cuh"
#include "operators/softmax/layer.cuh"
#include "primitives/hopper/hopper.cuh"

namespace operators::softmax {

// A block's shared memory. The kSplits blocks of a cluster share D. A block takes a chunk of kDepth
// inputs at a time.
template <Math kMath, int kSplits, int kRows, int kClasses, int kDepth>
struct ClusterShared {
  static constexpr bool kHighLow = kMath == Math::split;
  static constexpr int kOwnRows = kRows / kSplits;  // that a block finishes
  static_assert(kRows % kSplits == 0 && kDepth % 32 == 0);
  // How many floats of a row one block sends to another: the columns, and padding, so that the 4
  // rows of a warp's store start on different banks. The copy engine needs a multiple of 4.
  static __host__ __device__ constexpr int stride(int C) {
    return ((C < kClasses ? C : kClasses) + 7) / 8 * 8 + 4;
  }
  static constexpr int kBoxes = kDepth / kLine<float>;
  using Boxes = ColumnTile<float, kRows>[kBoxes];
  // In TF32 x[0] is x, rounded. In 3xTF32 x[0] is `high`, x[1] is `low`.
  Boxes x[kHighLow ? 2 : 1];
  // What goes to each other block of the cluster, and what comes from each: kOwnRows rows that are
  // stride(C) floats apart. A block's own sums stay in its outbox.
  alignas(16) float outbox[kSplits][kOwnRows * stride(kClasses)];
  alignas(16) float inbox[kSplits][kOwnRows * stride(kClasses)];
  Barrier full;  // x is there
  Barrier come;  // what the other blocks send is in the inbox
};

#if HOPPER_CODE
// Writes a block's partial sums into its outbox: for each block of the cluster those of its rows.
// Elements e and e + 2 of a thread are its two columns of one row.
template <class Shared, int kRows>
__device__ void put_in_outbox(Shared& shared, const Sum<kRows>& sum, int col, int stride) {
#pragma unroll
  for (int i = 0; i < sum.size(); i += 4) {
#pragma unroll
    for (int e = i; e < i + 2; ++e) {
      const int row = sum.col(e);
      float* to = shared.outbox[row / Shared::kOwnRows] + row % Shared::kOwnRows * stride + col;
      if (col < stride) *reinterpret_cast<float2*>(to) = {sum.element(e), sum.element(e + 2)};
    }
  }
}

// Finishes the block's rows. A warp takes a row at a time, and adds up what has come from the
// blocks of the cluster.
template <int kSplits, int kClasses, class Shared>
__device__ void finish_cluster_rows(const Shared& shared, int row0, int rank, int tile, int tiles,
                                    int B, int C, const Results& results) {
  constexpr int kOwnRows = Shared::kOwnRows;
  const int lane = threadIdx.x % 32, stride = Shared::stride(C);
  for (int i = threadIdx.x / 32; i < kOwnRows; i += kClasses / 16) {
    const int row = row0 + rank * kOwnRows + i;
    if (row >= B) break;
    float v[kClasses / 32] = {};
#pragma unroll
    for (int block = 0; block < kSplits; ++block) {
      const float* from = (block == rank ? shared.outbox : shared.inbox)[block] + i * stride;
#pragma unroll
      for (int j = 0; j < kClasses / 32; ++j) {
        if (lane + 32 * j < stride) v[j] += from[lane + 32 * j];
      }
    }
    finish_row(v, row, C, results, tile, tiles);
  }
}
#endif

// As in all_columns() (tiles.cuh) several blocks share D. There their partial sums go through the
// L2 cache to the block that comes last. Here the blocks are a cluster, and write into each other's
// shared memory (distributed shared memory). Each of the kSplits blocks finishes its share of the
// kRows rows, and the others push their partial sums of that share into its inbox, by one copy from
// each.
//
// If there are more than kClasses classes, a cluster computes a tile of so many columns, and
// another kernel finishes the rows.
//
// The product is transposed (transposed_product.cuh): x^T comes from shared memory, W^T from
// registers. An element of W is needed by one thread of the block only. So W goes from memory
// straight to the registers, all of a chunk at once. wgmma would truncate what is no TF32 number.
// So in TF32 the copy engine rounds x on the way to shared memory, and each thread rounds its W.
template <Math kMath, int kSplits, int kRows, int kClasses, int kDepth>
__global__ void HOPPER_CLUSTER(kSplits) __launch_bounds__(2 * kClasses, 1)
    cluster_columns(const __grid_constant__ CUtensorMap x, const float* W, int B, int D, int C,
                    Results results) {
#if HOPPER_CODE
  using Shared = ClusterShared<kMath, kSplits, kRows, kClasses, kDepth>;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int rank = cluster_rank(), row0 = blockIdx.x / kSplits * kRows;
  const int tile = blockIdx.y, tiles = gridDim.y;
  const int chunks = (D + kDepth - 1) / kDepth;
  const int first = chunks * rank / kSplits, last = chunks * (rank + 1) / kSplits;
  const int sums_bytes = Shared::kOwnRows * Shared::stride(C) * 4;
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  const auto fetch = [&](int chunk) {
    if (warp != 0 || !elect_one()) return;
    barrier_arrive_expect(&shared.full, sizeof shared.x[0]);
    for (int box = 0; box < Shared::kBoxes; ++box) {
      tensor_load(shared.x[0][box].row(0), &x, row0, chunk * kDepth + box * kLine<float>,
                  &shared.full);
    }
  };
  if (threadIdx.x == 0) {
    barrier_init(&shared.full, 1);
    barrier_init(&shared.come, 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) barrier_arrive_expect(&shared.come, (kSplits - 1) * sums_bytes);
  cluster_arrive();
  start_next_kernel();
  wait_for_previous_kernel();
  if (first < last) fetch(first);

  const int col = 16 * warp + lane / 4 * 2;
  Sum<kRows> sum = {};
  for (int chunk = first; chunk < last; ++chunk) {
    LeftFragments<float> w[Shared::kBoxes];
    load_fragments(w, W, chunk * kDepth, tile * kClasses + col, D, C);
    barrier_wait(&shared.full, (chunk - first) % 2);
    if constexpr (kMath == Math::split) {
      split_all(shared.x[0][0].elements, shared.x[1][0].elements, kRows * kDepth, threadIdx.x,
                2 * kClasses);
      shared_fence();
      __syncthreads();
    }
#pragma unroll
    for (int box = 0; box < Shared::kBoxes; ++box) {
      if constexpr (kMath == Math::split) {
        add_split(sum, w[box], shared.x[0][box], shared.x[1][box]);
      } else {
        start_rounded(sum, w[box], shared.x[0][box], chunk > first || box > 0);
      }
    }
    wgmma_wait<0>();
    __syncthreads();
    if (chunk + 1 < last) fetch(chunk + 1);
  }

  put_in_outbox(shared, sum, col, Shared::stride(C));
  shared_fence();  // the copy engine will read this
  __syncthreads();
  cluster_wait();  // the others' `come` is initialized
  if (warp == 0 && elect_one()) {
    for (int i = 0; i < kSplits; ++i) {
      if (i == rank) continue;
      bulk_push(shared.inbox[rank], shared.outbox[i], sums_bytes, &shared.come, i);
    }
  }
  barrier_wait(&shared.come, 0);
  cluster_arrive();
  finish_cluster_rows<kSplits, kClasses>(shared, row0, rank, tile, tiles, B, C, results);
  cluster_wait();  // nobody's outbox is needed any more
#endif
}

template <Math kMath, int kSplits, int kRows, int kClasses, int kDepth>
Plan plan_cluster(const Layer& layer) {
  constexpr int kThreads = 2 * kClasses;
  constexpr int kBytes = sizeof(ClusterShared<kMath, kSplits, kRows, kClasses, kDepth>);
  const auto kernel = cluster_columns<kMath, kSplits, kRows, kClasses, kDepth>;
  allow_shared_bytes(kernel, kBytes);
  const int at_once = clusters_that_fit(kernel, kSplits, kThreads, kBytes);
  if (at_once == 0) return {};
  const double microseconds =
      cluster_microseconds(layer, kMath == Math::split, kSplits, kRows, kClasses, kDepth, at_once);
  const auto make = [=](const Layer& in) {
    const int tiles = static_cast<int>(blocks_for(in.C, kClasses));
    const auto launch = [=](Results results, int = 1) {
      const CUtensorMap x = tensor_map<float>(in.x, in.B, in.D, kRows, kMath == Math::tf32,
                                              in.x_stride, Reads::often);
      in.launch(kernel, dim3(kSplits * blocks_for(in.B, kRows), tiles), kThreads, kBytes,  //
                x, in.W.data(), in.B, in.D, in.C, results);
    };
    return tiles == 1 ? product_of(Kernels::cluster, kernel, kBytes, launch)
                      : half_fused(in, Kernels::cluster, kernel, kBytes, 1, tiles, launch);
  };
  return {{microseconds, microseconds}, layer.x_stride % 4 != 0, false, make};
}

// The sizes of clusters and tiles. With few rows a tile has 16 rows, and with many rows, or many
// columns, it has 64. In both cases 8 blocks share D. Between them, in TF32, it has 40 rows, and 4
// blocks share D: then 1024 rows are 26 clusters. In 3xTF32 W takes twice the registers. So there a
// block takes fewer inputs at a time, and 8 blocks share D for 80 rows.
template <Math kMath, int kClasses>
Plan choose_cluster(const Layer& layer) {
  constexpr bool kHighLow = kMath == Math::split;
  if (layer.B <= 32 || (layer.B <= 512 && layer.C <= kClasses)) {
    return plan_cluster<kMath, 8, 16, kClasses, 64>(layer);
  }
  if (layer.B > 1536 || layer.C > kClasses) return plan_cluster<kMath, 8, 64, kClasses, 64>(layer);
  constexpr int kSplits = kHighLow ? 8 : 4, kRows = kHighLow ? 80 : 40;
  constexpr int kDepth = kHighLow ? 128 : 256;
  return plan_cluster<kMath, kSplits, kRows, kClasses, kDepth>(layer);
}

}  // namespace operators::softmax
