// Products in TF32 for Hopper whose factors both lie in memory as wgmma takes them there:
// contiguous along k, already rounded. A `Work` says what the tiles of the product are, what is
// done with a sum, and what other warps do meanwhile:
//
//     int tiles, steps(tile)                 how many tiles clusters take, the longest first, and
//                                            how many steps of 32 along k a tile has
//     Walk walk(tile, rank)                  where its factors are, for this block of the cluster
//     store(sum, tile, rank, row)            takes 64 rows of the result, from `row` of the tile on
//     kHelped, help(warp, warps)             three warps of each block that do something beside it
//     progress                               what they have done, if the product waits for it
//
// It is lesson 3's last product with another type: a producer warp, two consumer warpgroups, blocks
// that stay, and two blocks of a cluster that share what they fetch of the right factor.
#pragma once

#include <algorithm>
#include <cuda/atomic>
#include <vector>

#include "common/early_launch.cuh"
#include "common/tiles.cuh"

/// 128 rows by kColumns columns a block, kBlocks such tiles below each other a cluster.
template <int kColumns, int kClusterBlocks>
struct Tf32Tile {
  static constexpr int BM = 128, BN = kColumns, kBlocks = kClusterBlocks, kThreads = 384;
  static constexpr int kDepth =
      32;  // of a step: 128 bytes of each row, as the copy engine swizzles
  struct Stage {
    float a[BM * kDepth], b[BN * kDepth];
  };
  static constexpr int kStages = (226 << 10) / sizeof(Stage);
  struct Shared {
    Stage stages[kStages];
    Barrier full[kStages], empty[kStages];
  };
};

/// The way of a tile along k: for each 32 columns of the factors from step `begin` to `end` - 1,
/// all boxes of `inner` matrices below each other. Boxes start at rows a + a_next i and b + b_next
/// i for i = 0 to inner - 1.
struct Walk {
  int a, a_next = 0, b, b_next = 0, inner = 1, begin = 0, end;
  /// Which counter says that 128 columns of A are made, and how many on is that of the next 128.
  int flag = -1, flag_next = 0;
};

/// How much of what some warps write and others read is there: a counter for each part of it.
struct Progress {
  unsigned* done;  ///< null: there is nobody to tell

  using Counter = cuda::atomic_ref<unsigned, cuda::thread_scope_device>;
  /// One thread calls this, after a barrier among all who have written.
  __device__ void add(int part) const {
    Counter(done[part]).fetch_add(1, cuda::memory_order_release);
  }
  __device__ void wait(int part, unsigned count) const {
    const Counter counter(done[part]);
    while (counter.load(cuda::memory_order_acquire) < count) continue;
  }
};

/// Tiles that clusters take in turn, every other round from the last cluster to the first one: with
/// the longest tiles first, who had one of the long ones then has one of the short ones.
struct Turns {
  int tiles, clusters;
  __host__ __device__ int rounds() const { return (tiles + clusters - 1) / clusters; }
  /// At least `tiles` where there is none.
  __host__ __device__ int tile(int round, int cluster) const {
    return round * clusters + (round % 2 == 0 ? cluster : clusters - 1 - cluster);
  }
  /// Steps of the cluster that has the most, if tile i has steps(i).
  template <typename Steps>
  int64_t most(Steps steps) const {
    std::vector<int64_t> sums(static_cast<size_t>(clusters));
    for (int i = 0; i < tiles; ++i) {
      const int at = i % clusters;
      sums[static_cast<size_t>(i / clusters % 2 == 0 ? at : clusters - 1 - at)] += steps(i);
    }
    return *std::max_element(sums.begin(), sums.end());
  }
};

#if HOPPER_CODE
/// Stores a warpgroup's sum to (row0, col0) of a row-major matrix (rows, cols), `stride` elements a
/// row, or adds it to what is there.
template <int kCols>
__device__ __forceinline__ void store_sum(const Sum<kCols>& sum, float* to, int row0, int col0,
                                          int rows, int cols, int stride, bool add) {
  const bool pairs = stride % 2 == 0;
#pragma unroll
  for (int i = 0; i < kCols / 2; i += 2) {
    const int row = row0 + sum.row(i), col = col0 + sum.col(i);
    if (row >= rows || col >= cols) continue;
    float* const at = to + static_cast<size_t>(row) * stride + col;
    if (pairs) {
      float2 value = make_float2(sum.elements[i], sum.elements[i + 1]);
      if (add) {
        const float2 old = *reinterpret_cast<const float2*>(at);
        value.x += old.x, value.y += old.y;
      }
      *reinterpret_cast<float2*>(at) = value;
    } else {
      at[0] = add ? at[0] + sum.elements[i] : sum.elements[i];
      if (col + 1 < cols) at[1] = add ? at[1] + sum.elements[i + 1] : sum.elements[i + 1];
    }
  }
}

template <class Tile, class Work>
__device__ __forceinline__ void produce_tf32(typename Tile::Shared& shared, const CUtensorMap* A,
                                             const CUtensorMap* B, const Work& work, Turns turns) {
  constexpr int kShare = Tile::BN / Tile::kBlocks;  // rows of B that this block fetches for all
  const int rank = Tile::kBlocks == 1 ? 0 : cluster_rank(), own = rank * kShare;
  Ring<Tile::kStages> ring;
  for (int round = 0; round < turns.rounds(); ++round) {
    const int tile = turns.tile(round, blockIdx.x / Tile::kBlocks);
    if (tile >= turns.tiles) continue;
    const Walk walk = work.walk(tile, rank);
    for (int step = walk.begin; step < walk.end; ++step) {
      if constexpr (Work::kHelped) {
        if (walk.flag >= 0 && (step == walk.begin || step % 4 == 0)) {
          work.progress.wait(walk.flag + step / 4 * walk.flag_next, 128);
          global_fence();  // between the makers' writes and the copy engine's reads
        }
      }
      for (int i = 0; i < walk.inner; ++i, ring.advance()) {
        auto& stage = shared.stages[ring.stage];
        Barrier* const full = &shared.full[ring.stage];
        const int col = step * Tile::kDepth, row = walk.b + i * walk.b_next + own;
        barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
        barrier_arrive_expect(full, sizeof stage);
        tensor_load(stage.a, A, walk.a + i * walk.a_next, col, full);
        if constexpr (Tile::kBlocks == 1) {
          tensor_load(stage.b, B, row, col, full);
        } else {
          tensor_load_multicast(stage.b + own * Tile::kDepth, B, row, col, full,
                                (1 << Tile::kBlocks) - 1);
        }
      }
    }
  }
  if constexpr (Tile::kBlocks > 1) wait_until_empty(shared.empty, ring);
}

template <class Tile, class Work>
__device__ __forceinline__ void consume_tf32(typename Tile::Shared& shared, const Work& work,
                                             Turns turns) {
  const int rank = Tile::kBlocks == 1 ? 0 : cluster_rank();
  const int consumer = warp_of_block() / 4 - 1;
  const auto release = [&](int stage) {
    const int thread = threadIdx.x % 128;
    if constexpr (Tile::kBlocks == 1) {
      if (thread == 0) barrier_arrive(&shared.empty[stage]);
    } else {
      if (thread < Tile::kBlocks) barrier_arrive(&shared.empty[stage], thread);
    }
  };
  Ring<Tile::kStages> ring;
  for (int round = 0; round < turns.rounds(); ++round) {
    const int tile = turns.tile(round, blockIdx.x / Tile::kBlocks);
    if (tile >= turns.tiles) continue;
    const Walk walk = work.walk(tile, rank);
    const int steps = (walk.end - walk.begin) * walk.inner;
    Sum<Tile::BN> sum;
    int previous = 0;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const auto& stage = shared.stages[ring.stage];
      barrier_wait(&shared.full[ring.stage], ring.parity);
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < 4; ++slice) {
        wgmma_tf32(sum.elements, descriptor_a(stage.a + 64 * Tile::kDepth * consumer) + 2 * slice,
                   descriptor_a(stage.b) + 2 * slice, step > 0 || slice > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) release(previous);
      previous = ring.stage;
    }
    wgmma_wait<0>();
    release(previous);
    work.store(sum, tile, rank, 64 * consumer);
  }
}
#endif

/// Launched with kBlocks blocks for each cluster of `turns`, or with more blocks, which only help.
/// Helpers wait for tiles, or tiles for helpers, never both. So all blocks come to their end if all
/// of them run at the same time: the grid is at most as large as the device.
template <class Tile, class Work>
__global__ void HOPPER_CLUSTER(Tile::kBlocks) __launch_bounds__(Tile::kThreads, 1)
    tf32_product(const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B,
                 const __grid_constant__ Work work, const Turns turns) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(bytes);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Tile::kStages; ++s) {
      barrier_init(&shared.full[s], 1);
      barrier_init(&shared.empty[s], 2 * Tile::kBlocks);
    }
    barrier_init_fence();
  }
  if constexpr (Tile::kBlocks > 1) {
    cluster_meet();
  } else {
    __syncthreads();
  }
  wait_for_previous_kernel();
  if (warp_of_block() < 4) {
    registers_shrink_to<Work::kHelped ? 152 : 24>();
    if (warp_of_block() == 0) {
      if (elect_one()) produce_tf32<Tile>(shared, &A, &B, work, turns);
    } else if constexpr (Work::kHelped) {
      work.help(blockIdx.x * 3 + warp_of_block() - 1, gridDim.x * 3);
    }
  } else {
    registers_grow_to<Work::kHelped ? 176 : 240>();
    consume_tf32<Tile>(shared, work, turns);
  }
#endif
}

/// Large tiles of two blocks, or small ones where these would leave multiprocessors without work.
using LargeTile = Tf32Tile<256, 2>;
using SmallTile = Tf32Tile<128, 1>;
struct TilePlan {
  bool large;
  int clusters;   ///< that the device holds
  double cycles;  ///< of the multiprocessor that has the most to do
};

/// The faster tile for make(LargeTile()) or make(SmallTile()), which are the same Work. A step of a
/// large tile takes 1024 cycles; of a small one the tensor cores take 512, the copy engine 620.
template <typename Make>
TilePlan plan_tiles(Make make) {
  const auto plan = [&](auto tile, double cycles) {
    using Tile = decltype(tile);
    const auto work = make(tile);
    constexpr int kBytes = sizeof(typename Tile::Shared);
    const auto kernel = tf32_product<Tile, std::remove_const_t<decltype(work)>>;
    allow_shared_bytes(kernel, kBytes);
    const int clusters = resident_clusters(kernel, Tile::kBlocks, Tile::kThreads, kBytes);
    const auto most = Turns{work.tiles, std::min(work.tiles, clusters)}.most(
        [&](int tile) { return work.steps(tile); });
    return TilePlan{Tile::kBlocks > 1, clusters, cycles * static_cast<double>(most)};
  };
  const TilePlan large = plan(LargeTile(), 1024), small = plan(SmallTile(), 620);
  return large.cycles <= small.cycles ? large : small;
}

/// A factor in memory: (rows, cols), row-major.
struct Tf32Factor {
  const float* data;
  int64_t rows, cols;
};

/// Launches the product with the tile of the plan.
template <typename Make>
void multiply_tf32(const Tf32Factor& a, const Tf32Factor& b, const TilePlan& plan, Make make) {
  const auto launch = [&](auto tile) {
    using Tile = decltype(tile);
    const auto work = make(tile);
    using Work = std::remove_const_t<decltype(work)>;
    const int clusters = std::min(work.tiles, plan.clusters);
    launch_early(tf32_product<Tile, Work>,
                 Tile::kBlocks * static_cast<unsigned>(Work::kHelped ? plan.clusters : clusters),
                 Tile::kThreads, sizeof(typename Tile::Shared),
                 tensor_map<float>(a.data, a.rows, a.cols, Tile::BM),
                 tensor_map<float>(b.data, b.rows, b.cols, Tile::BN / Tile::kBlocks), work,
                 Turns{work.tiles, clusters});
  };
  if (plan.large) {
    launch(LargeTile());
  } else {
    launch(SmallTile());
  }
}
