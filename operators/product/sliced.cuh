// C = A B where C has few tiles, on Hopper: k is cut into slices, so that all multiprocessors have
// something to do.
//
// Clusters that share a tile leave their sums in memory, and the last one adds alone (Handover).
// The more clusters share a tile, the longer the others are idle. So here each block of a cluster
// has a slice of the same tile: 2, 4 or 8 slices, one after another along k. The blocks start
// together, so they may wait for each other. Each block finishes an equal part of the tile's
// columns: the others send it their sums of these columns, through shared memory, and it adds them
// up and runs the epilogue. If one cluster for each tile leaves multiprocessors idle, several
// clusters share a tile, and leave their sums in memory.
//
// Blocks that have the same slice may also share what they copy, as those of a Tile with several
// blocks do. Then a cluster has these blocks once for each slice. For example, with 2 slices of a
// Tile of 2 x 1 blocks ranks 0 and 1 have the first slice, and share the right factor; ranks 2 and
// 3 have the second one. Ranks 0 and 2 have the same tile, and add up its sums.
//
// Or each slice writes a whole matrix of fp32 to memory, and a second launch, finish_slices, adds
// up these matrices. That pays where there are many slices, since all multiprocessors add.
#pragma once

#include <cstdint>

#include "operators/product/product.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/mma.cuh"

namespace operators::product {

/// `count` row-major fp32 matrices (rows, cols), one for each slice of k. Matrix i begins at
/// from + i * apart, and its rows are `stride` elements apart. `apart` and `stride` are multiples
/// of 4, and the addresses `from` and C of 16 bytes. C (rows, cols), whose rows are c_stride
/// elements apart, becomes their sum. T, the type of C: float, half or __nv_bfloat16.
template <typename T>
struct SlicesToAdd {
  const float* from;
  int count;
  int64_t apart, stride;
  T* C;
  int64_t c_stride;
  int rows, cols;

  static constexpr int kThreads = 256;
  /// So many threads of a block add up the same four neighbours of a row. Each takes every
  /// groups()-th slice, and one of them adds up their sums, in a fixed order.
  __host__ __device__ int groups() const {
    return count < 4 ? 1 : count < 8 ? 2 : count < 16 ? 4 : 8;
  }
  /// Of the launch, with kThreads threads each.
  unsigned blocks() const {
    return static_cast<unsigned>(ceil_div(rows * stride / 4, int64_t{kThreads / groups()}));
  }
};

/// C = the sum of all slices. It is launched early, and waits for the product that leaves them.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads)
    finish_slices(const __grid_constant__ SlicesToAdd<T> of) {
#if HOPPER_CODE
  __shared__ float4 sums[kThreads];
  start_next_kernel();
  wait_for_previous_kernel();
  const int groups = of.groups(), beside = kThreads / groups;
  const int thread = static_cast<int>(threadIdx.x), group = thread / beside;
  const int quad = static_cast<int>(blockIdx.x) * beside + thread % beside;
  const int across = static_cast<int>(of.stride) / 4;
  const int row = quad / across, col = quad % across * 4;
  float4 sum = {0, 0, 0, 0};
  if (row < of.rows) {
    const float* const from = of.from + row * of.stride + col;
#pragma unroll 8
    for (int slice = group; slice < of.count; slice += groups) {
      add(sum, __ldcg(reinterpret_cast<const float4*>(from + slice * of.apart)));
    }
  }
  sums[thread] = sum;
  __syncthreads();
  if (group > 0 || row >= of.rows) return;
  for (int other = 1; other < groups; ++other) add(sum, sums[other * beside + thread]);
  T* const to = of.C + row * of.c_stride + col;
  const int left = of.cols - col;
  const Neighbours<T, 4> four = {{T(sum.x), T(sum.y), T(sum.z), T(sum.w)}};
  if (of.c_stride % 4 == 0 && left >= 4) {
    *reinterpret_cast<Neighbours<T, 4>*>(to) = four;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < left) to[i] = four.values[i];
    }
  }
#endif
}

/// The Work of a product in slices. Whole is the Work of the same product, whose Results have
/// finish(sum, tile, col), the epilogue of a tile. A cluster has kOfCluster of Whole's clusters
/// (MatrixProduct's kGrids, if these have several blocks). The schedule shares all tiles, each by a
/// multiple of kOfCluster of Whole's clusters: of these the number n has slice n % slices of tile n
/// / slices. There are at least as many steps as slices.
template <class Whole, int kOfCluster>
struct SlicedProduct : Whole {
  using Tile = typename Whole::Tile;
  using Sum = typename Whole::Sum;
  using Part = primitives::Sum<2 * Sum::size() / kOfCluster>;  ///< what a block finishes
  static_assert(Tile::kBlocks == 1 || requires { requires Whole::kGridsOfCluster == kOfCluster; });
  static constexpr int kSlicesOfCluster = kOfCluster, kClusterBlocks = kOfCluster * Tile::kBlocks;
  struct Shared : Whole::Shared {
    Barrier multiplied;              ///< all blocks of the cluster have
    Barrier come[Tile::kConsumers];  ///< of a consumer's columns: the others' sums
  };
  int clusters;  ///< of a tile, whose sums go through memory

#if HOPPER_CODE
  struct Grid : Whole::Grid {
    __device__ static void meet() { cluster_meet(); }
  };
  /// What a consumer is sent. It lies where stages have been.
  struct Inbox {
    float from[kOfCluster][Part::size()][128];
  };
  static_assert(sizeof(Inbox[Tile::kConsumers]) <= sizeof(Whole::Shared::pipeline.memory));

  __device__ void prepare(Shared& shared) const {
    if constexpr (requires(const Whole& whole) { whole.prepare(shared); }) Whole::prepare(shared);
    barrier_init(&shared.multiplied, kOfCluster * Tile::kConsumers);
    for (Barrier& come : shared.come) {
      barrier_init(&come, 1);
      barrier_arrive_expect(&come, (kOfCluster - 1) * sizeof(Inbox::from[0]));
    }
  }

  class Results : public Whole::Results {
   public:
    __device__ Results(const SlicedProduct& of, Shared& memory, const Grid& blocks, int number)
        : Whole::Results(of, memory, blocks, number),
          work(of),
          grid(blocks),
          shared(memory),
          consumer(number),
          rank(cluster_rank() / Tile::kBlocks) {}

    __device__ void store(Sum& sum) const {
      Part part;
      add_up_in_cluster(part, sum);
      const int cluster = grid.cluster / kOfCluster, tile = cluster / work.clusters;
      if (work.clusters > 1) {
        const Handover handover{work.exchange, consumer,
                                block_of(rank) * Tile::kConsumers + consumer,
                                kClusterBlocks * Tile::kConsumers, shared.ended[consumer]};
        const int first = tile * work.clusters;
        if (!handover.complete(part, {tile, first, first + work.clusters - 1, 0}, cluster)) return;
      }
      Whole::Results::finish(part, tile, rank * Part::size() * 2);
    }

   private:
    const SlicedProduct& work;
    const Grid& grid;
    Shared& shared;
    const int consumer, rank;

    // The rank in the cluster of the block that has another slice of the same tile.
    __device__ int block_of(int slice) const {
      return Tile::kBlocks == 1 ? slice : slice * Tile::kBlocks + grid.rank;
    }
    // A thread sends the same thread of every other block what it has of that block's columns.
    __device__ void add_up_in_cluster(Part& part, const Sum& sum) const {
      Inbox& inbox = reinterpret_cast<Inbox*>(shared.pipeline.memory)[consumer];
      const int thread = threadIdx.x % 128;
      // reader.finish() has waited for the products of all four warps: no stage is read any more.
      if (thread < kOfCluster) barrier_arrive(&shared.multiplied, block_of(thread));
      barrier_wait(&shared.multiplied, 0);
#pragma unroll
      for (int block = 0; block < kOfCluster; ++block) {
#pragma unroll
        for (int i = 0; i < Part::size(); ++i) {
          const float value = sum.element(block * Part::size() + i);
          if (block == rank) {
            part.element(i) = value;
          } else {
            store_push(&inbox.from[rank][i][thread], value, &shared.come[consumer],
                       block_of(block));
          }
        }
      }
      barrier_wait(&shared.come[consumer], 0);
#pragma unroll
      for (int i = 0; i < Part::size(); ++i) {
        const float own = part.element(i);
        float all = rank == 0 ? own : inbox.from[0][i][thread];
#pragma unroll
        for (int block = 1; block < kOfCluster; ++block) {
          all += block == rank ? own : inbox.from[block][i][thread];
        }
        part.element(i) = all;
      }
    }
  };
#endif
};

}  // namespace operators::product
