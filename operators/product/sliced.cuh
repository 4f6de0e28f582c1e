// C = A B where C has few tiles, on Hopper: k is cut into slices, so that all multiprocessors have
// something to do.
//
// Each tile has as many clusters as there are slices. A cluster multiplies its steps of k, and
// leaves its sum in memory. Whoever is the last one for a tile adds up the sums of all slices, in
// their order, so that each launch gives the same bits, and runs the epilogue. Nobody waits for
// another cluster: this is also right where other launches share the device.
//
// The last one adds alone, and the more slices there are, the longer the others are idle. So the
// blocks of a cluster may have slices, too: 2 or 4 of them, one after another along k. They start
// together, so they may wait for each other. When all have multiplied, each sends every other one
// its columns of the sum, through shared memory. Each adds up a part of the columns, and runs the
// epilogue for it. Where that is not enough, several such clusters leave what they have in memory.
//
// Blocks that have the same slice may also share what they copy, as those of a Tile with several
// blocks do. Then a cluster has these blocks once for each slice. For example, with 2 slices of a
// Tile of 2 x 1 blocks ranks 0 and 1 have the first slice, and share the right factor; ranks 2 and
// 3 have the second one. Ranks 0 and 2 have the same tile, and add up its sums.
#pragma once

#include "operators/product/product.cuh"

namespace operators::product {

/// Where slices leave their sums. `ended` is 0 before the first launch and after every launch.
struct SliceExchange {
  float* partial;   ///< of each consumer of the grid: its sum, or its part of it
  unsigned* ended;  ///< of each consumer of a tile: how many slices have left theirs
};

/// What one of kParts blocks finishes of a sum: a part of its columns.
template <class TileSum, int kParts>
struct PartOfSum {
  static_assert(kParts == 1);
  using Type = TileSum;
};
template <int kCols, int kParts>
struct PartOfSum<Sum<kCols>, kParts> {
  using Type = Sum<kCols / kParts>;
};

/// The Work of a product in slices. Whole is the Work of the same product, whose Results have
/// finish(sum, tile, col), the epilogue of a tile. With kOfCluster = 1 a cluster is one of Whole's,
/// and the cluster number n has slice n % slices of the tile number n / slices. Otherwise a cluster
/// has kOfCluster of Whole's clusters (MatrixProduct's kGrids, if these have several blocks): there
/// are kOfCluster times as many slices, of which Whole's cluster number n has one in the same way.
/// The schedule is Schedule::sliced, where all tiles are shared: a range of steps begins and ends
/// where a slice does. There are at least as many steps as slices.
template <class Whole, int kOfCluster = 1>
struct SlicedProduct : Whole {
  using Tile = typename Whole::Tile;
  using Sum = typename Whole::Sum;
  using Part = typename PartOfSum<Sum, kOfCluster>::Type;
  static_assert(Tile::kBlocks == 1 || requires { requires Whole::kGridsOfCluster == kOfCluster; });
  static constexpr int kSlicesOfCluster = kOfCluster, kClusterBlocks = kOfCluster * Tile::kBlocks;
  struct Shared : Whole::Shared {
    unsigned before[Tile::kConsumers];  ///< how many slices had left their sum before this one
    Barrier multiplied;                 ///< all blocks of the cluster have
    Barrier come[Tile::kConsumers];     ///< of a consumer's columns: the others' sums
  };
  SliceExchange sums;
  int slices;  ///< whose sums go through memory: of a cluster

#if HOPPER_CODE
  struct Grid : Whole::Grid {
    __device__ static void meet() {
      if constexpr (kOfCluster > 1) {
        cluster_meet();
      } else {
        Whole::Grid::meet();
      }
    }
  };
  /// What a consumer is sent. It lies where stages have been.
  struct Inbox {
    float from[kOfCluster][Part::size()][128];
  };
  static_assert(kOfCluster == 1 ||
                sizeof(Inbox[Tile::kConsumers]) <= sizeof(Whole::Shared::pipeline.memory));

  __device__ void prepare(Shared& shared) const {
    if constexpr (requires(const Whole& whole) { whole.prepare(shared); }) Whole::prepare(shared);
    if constexpr (kOfCluster > 1) {
      barrier_init(&shared.multiplied, kOfCluster * Tile::kConsumers);
      for (Barrier& come : shared.come) {
        barrier_init(&come, 1);
        barrier_arrive_expect(&come, (kOfCluster - 1) * sizeof(Inbox::from[0]));
      }
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
          rank(kOfCluster == 1 ? 0 : cluster_rank() / Tile::kBlocks) {}

    __device__ void store(Sum& sum) const {
      if constexpr (kOfCluster == 1) {
        finish_slice(sum);
      } else {
        Part part;
        add_up_in_cluster(part, sum);
        finish_slice(part);
      }
    }

   private:
    static constexpr int kFours = Part::size() / 4;
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

    // The epilogue, if all slices have left their sums.
    __device__ void finish_slice(Part& part) const {
      const int cluster = grid.cluster / kOfCluster, tile = cluster / work.slices;
      const int slice = cluster - tile * work.slices, col = rank * Part::size() * 2;
      if (work.slices > 1) {
        const int block = tile * kClusterBlocks + block_of(rank);
        const int of_tile = block * Tile::kConsumers + consumer;
        leave_sum(part, elements(of_tile, slice));
        if (!is_last(of_tile)) return;
        add_up(part, of_tile);
      }
      Whole::Results::finish(part, tile, col);
    }
    // A thread leaves the elements that the same thread of the last slice takes over.
    __device__ float4* elements(int of_tile, int slice) const {
      return reinterpret_cast<float4*>(work.sums.partial) +
             size_t{kFours * 128} * (of_tile * work.slices + slice) + threadIdx.x % 128;
    }
    // Whether all slices have left their sums: then they may be read, and the count is 0 again.
    __device__ bool is_last(int of_tile) const {
      named_barrier(1 + consumer, 128);  // all threads have left their elements
      if (threadIdx.x % 128 == 0) {
        const GridCount ended(work.sums.ended[of_tile]);
        const unsigned before = ended.fetch_add(1, cuda::memory_order_acq_rel);
        if (before + 1 == static_cast<unsigned>(work.slices)) {
          ended.store(0, cuda::memory_order_relaxed);
        }
        shared.before[consumer] = before;
      }
      named_barrier(1 + consumer, 128);
      return shared.before[consumer] + 1 == static_cast<unsigned>(work.slices);
    }
    // Some 32 loads of a thread are under way at a time.
    __device__ void add_up(Part& sum, int of_tile) const {
#pragma unroll
      for (int i = 0; i < 4 * kFours; ++i) sum.element(i) = 0;
#pragma unroll(kFours <= 8 ? 4 : kFours <= 16 ? 2 : 1)
      for (int slice = 0; slice < work.slices; ++slice) {
        add_sum(sum, elements(of_tile, slice));
      }
    }
  };
#endif
};

}  // namespace operators::product
