// C = A B where C has few tiles, on Hopper: k is cut into slices, so that all multiprocessors have
// something to do.
//
// Each tile has as many clusters as there are slices. A cluster multiplies its steps of k, and
// leaves its sum in memory. Whoever is the last one for a tile adds up the sums of all slices, in
// their order, so that each launch gives the same bits, and runs the epilogue. Nobody waits for
// another cluster: this is also right where other launches share the device.
#pragma once

#include "operators/product/product.cuh"

namespace operators::product {

/// Where slices leave their sums. `ended` is 0 before the first launch and after every launch.
struct SliceExchange {
  float* partial;   ///< of each consumer of the grid: its sum
  unsigned* ended;  ///< of each consumer of a tile: how many slices have left theirs
};

/// The Work of a plain product in slices: the cluster number n has slice n % slices of the tile
/// number n / slices. Its schedule is that of MatrixProduct with all tiles shared: a cluster's
/// range of steps begins and ends where a slice does. There are at least as many steps as slices.
template <class Tile, class Epilogue>
struct SlicedProduct : MatrixProduct<Tile, Epilogue> {
  using Whole = MatrixProduct<Tile, Epilogue>;
  using Sum = typename Tile::TileSum;
  struct Shared : ProductShared<Tile> {
    unsigned before[Tile::kConsumers];  ///< how many slices had left their sum before this one
  };
  SliceExchange sums;
  int slices;

#if HOPPER_CODE
  using Grid = typename Whole::Grid;

  class Results : public Whole::Results {
   public:
    __device__ Results(const SlicedProduct& of, Shared& memory, const Grid& blocks, int number)
        : Whole::Results(of, memory, blocks, number),
          work(of),
          grid(blocks),
          shared(memory),
          consumer(number),
          out{memory.out[number], number} {}

    __device__ void store(Sum& sum) const {
      const int tile = grid.cluster / work.slices, slice = grid.cluster - tile * work.slices;
      const int of_tile = (tile * Tile::kBlocks + grid.rank) * Tile::kConsumers + consumer;
      leave_sum(sum, elements(of_tile, slice));
      if (!is_last(of_tile)) return;
      add_up(sum, of_tile);
      const auto at = work.schedule.place(tile, grid.stack, grid.side);
      work.epilogue(sum, at.row + Tile::row_of(consumer), at.col + Tile::col_of(consumer), out);
    }

   private:
    static constexpr int kFours = Sum::size() / 4;
    const SlicedProduct& work;
    const Grid& grid;
    Shared& shared;
    const int consumer;
    const Outbox<typename Tile::Element, Tile::kOut, Tile::kOutRows> out;

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
    __device__ void add_up(Sum& sum, int of_tile) const {
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
