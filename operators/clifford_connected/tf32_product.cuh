// Products in TF32 for Hopper whose factors lie in memory, already rounded. In TF32 wgmma takes
// factors from shared memory only if they are contiguous along k. The right one always is; a left
// one that is not, *transposed*, goes through registers. A `Work` says what the tiles of the
// product are, what is done with a sum, and what other warps do meanwhile:
//
//     turns, steps(tile)                     which tiles clusters take, and how many steps of 32
//                                            along k a tile has
//     group(tile)                            if tiles wait for one another: the same for those
//     kTransposed                                the left factor is (k, rows), not (rows, k)
//     kStacked                               it is several matrices of any fp32, rounded on the way
//     Walk walk(tile, rank)                  where its factors are, for this block of the cluster
//     store(sum, tile, rank, row)            takes 64 rows of the result, from `row` of the tile on
//     kHelped, help(warp, warps)             three warps of each block that do something beside it
//     progress                               what they have done, if the product waits for it
//
// It is lesson 3's last product with another type: a producer warp, two consumer warpgroups, blocks
// that stay, and two blocks of a cluster that share what they fetch of the right factor.
#pragma once

#include <algorithm>
#include <vector>

#include "primitives/early_launch.cuh"
#include "primitives/hopper/tiles.cuh"
#include "primitives/spin.cuh"

namespace operators::clifford_connected {

using namespace primitives;
using namespace clifford;

/// 128 rows by kColumns columns a block, kBlocks such tiles below each other a cluster.
template <int kColumns, int kClusterBlocks>
struct Tf32Tile {
  static constexpr int BM = 128, BN = kColumns, kBlocks = kClusterBlocks, kThreads = 384;
  static constexpr int kDepth = 32;  // of a step: 128 bytes of a row, as the copy engine swizzles
  struct Stage {
    float a[BM * kDepth], b[BN * kDepth];
  };
  static constexpr int kStages = (226 << 10) / sizeof(Stage);
  struct Shared {
    Stage stages[kStages];
    Barrier full[kStages], empty[kStages];
  };
};

/// The way of a tile along k. Step s, from `begin` to `end` - 1, takes columns 32 s to 32 s + 31 of
/// `inner` pairs of matrices, pair after pair: a box of each, which starts at row a + a_next i or
/// b + b_next i, i = 0 to inner - 1. Of a left factor that is transposed, a step takes 32 rows
/// instead, 32 s further down, and columns from a_col on. A left factor that is stacked has pair
/// i's matrix in its matrix number matrices[i].
struct Walk {
  int a, a_next = 0, a_col = 0, b, b_next = 0, inner = 1, begin = 0, end;
  /// The counter of the first 128 columns of A (-1: no waiting), and how far the next 128's is.
  int flag = -1, flag_next = 0;
  const int* matrices = nullptr;
};

/// How much of what some warps write and others read is there, in several counters.
struct Progress {
  unsigned* done;  ///< the counters
  int before = 0;  ///< what the first counters would count was there before the launch

  /// One thread calls this, after a barrier among all who have written.
  __device__ void add(int counter, unsigned count = 1) const {
    GridCount(done[counter]).fetch_add(count, cuda::memory_order_release);
  }
  __device__ void wait(int counter, unsigned count) const {
    if (counter < before) return;
    wait_for_count(GridCount(done[counter]), count,
                   "planes, or sums for the norm, that other blocks make");
  }
};

/// Tiles that clusters take in turn, every other round from the last cluster to the first one: with
/// the longest tiles first, who had one of the long ones then has one of the short ones. Other
/// clusters, if there are more, take none.
struct Turns {
  int tiles, clusters;
  __host__ __device__ int rounds() const { return (tiles + clusters - 1) / clusters; }
  /// At least `tiles` where there is none.
  __host__ __device__ int tile(int round, int cluster) const {
    if (cluster >= clusters) return tiles;
    return round * clusters + (round % 2 == 0 ? cluster : clusters - 1 - cluster);
  }
  /// Steps until the last cluster is done, if tile i has steps(i). Tiles of a round that have the
  /// same group(i) wait for one another at their end; counted as if these were always neighbours.
  template <typename Steps, typename Group>
  int64_t most(Steps steps, Group group) const {
    std::vector<int64_t> sums(static_cast<size_t>(clusters));
    for (int round = 0; round < rounds(); ++round) {
      const int end = std::min(tiles, (round + 1) * clusters);
      const auto sum = [&](int tile) -> int64_t& {
        const int at = tile - round * clusters;
        return sums[static_cast<size_t>(round % 2 == 0 ? at : clusters - 1 - at)];
      };
      for (int first = round * clusters, next; first < end; first = next) {
        int64_t last = 0;
        for (next = first; next < end && group(next) == group(first); ++next) {
          last = std::max(last, sum(next) + steps(next));
        }
        for (int tile = first; tile < next; ++tile) sum(tile) = last;
      }
    }
    return *std::max_element(sums.begin(), sums.end());
  }
};

/// A right factor's rows, which are columns of the result, are stored in this order: wgmma gives a
/// thread columns 2 t and 2 t + 1 of each 8, t = 0 to 3. Of each 16 the four that it has are to be
/// neighbours, so that it can store 16 bytes.
__host__ __device__ constexpr int place_of_column(int col) {
  return col / 16 * 16 + col % 4 / 2 * 8 + col % 16 / 4 * 2 + col % 2;
}

#if HOPPER_CODE
/// What a thread holds of 64 columns of a left factor that is transposed. The columns, of which a
/// warp has 16, are rows for wgmma, and thread l has rows l / 4 and l / 4 + 8. Which column is
/// which row is ours to say: these two are neighbours, in that half of a box for which the reads of
/// 8 bytes of four rows meet no bank twice.
struct TransposedLeft {
  int thread = threadIdx.x % 128, g = thread % 32 / 4, t = thread % 4, box = thread / 64;
  int piece = thread / 32 % 2 * 2 + g / 2 % 2 * 4 + g / 4, half = g % 2;

  /// The first of its two columns.
  __device__ int column() const { return 32 * box + 4 * piece + 2 * half; }
  /// Its fragments of 32 rows (k), from two boxes of 32 columns.
  __device__ void load(uint32_t (&fragments)[4][4], const float* boxes) const {
    const float* const from = boxes + box * 32 * 32 + half * 2;
    const float *const near = from + t * 32 + (piece ^ t) * 4, *const far = from + (t + 4) * 32 +
                                                                            (piece ^ t ^ 4) * 4;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint2 a = *reinterpret_cast<const uint2*>(near + 8 * 32 * k);
      const uint2 b = *reinterpret_cast<const uint2*>(far + 8 * 32 * k);
      fragments[k][0] = a.x, fragments[k][1] = a.y, fragments[k][2] = b.x, fragments[k][3] = b.y;
    }
  }
};

/// Stores a warpgroup's sum to (row0, col0) of a row-major matrix (rows, cols), `stride` elements a
/// row, or adds it to what is there.
template <bool kTransposed, int kCols>
__device__ __forceinline__ void store_sum(const Sum<kCols>& sum, float* to, int row0, int col0,
                                          int rows, int cols, int stride, bool add) {
  const int first = row0 + (kTransposed ? TransposedLeft().column() : sum.row(0));
  const bool fours = stride % 4 == 0 && cols % 4 == 0;
#pragma unroll
  for (int i = 0; i < kCols / 2; i += 8) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int row = first + below * (kTransposed ? 1 : 8),
                col = col0 + 2 * i + threadIdx.x % 4 * 4;
      if (row >= rows || col >= cols) continue;
      float* const at = to + static_cast<size_t>(row) * stride + col;
      const float* const sums = sum.elements + i + 2 * below;
      float4 value = make_float4(sums[0], sums[1], sums[4], sums[5]);
      if (fours) {
        if (add) {
          const float4 old = *reinterpret_cast<const float4*>(at);
          value.x += old.x, value.y += old.y, value.z += old.z, value.w += old.w;
        }
        *reinterpret_cast<float4*>(at) = value;
      } else {
        at[0] = add ? at[0] + value.x : value.x;
        if (col + 1 < cols) at[1] = add ? at[1] + value.y : value.y;
        if (col + 2 < cols) at[2] = add ? at[2] + value.z : value.z;
        if (col + 3 < cols) at[3] = add ? at[3] + value.w : value.w;
      }
    }
  }
}

template <class Tile, class Work>
__device__ __forceinline__ void produce_tf32(typename Tile::Shared& shared, const CUtensorMap* A,
                                             const CUtensorMap* B, const Work& work) {
  constexpr int kShare = Tile::BN / Tile::kBlocks;  // rows of B that this block fetches for all
  const int rank = Tile::kBlocks == 1 ? 0 : cluster_rank(), own = rank * kShare;
  Ring<Tile::kStages> ring;
  for (int round = 0; round < work.turns.rounds(); ++round) {
    const int tile = work.turns.tile(round, blockIdx.x / Tile::kBlocks);
    if (tile >= work.turns.tiles) continue;
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
        const auto load_left = [&](float* to, int row, int col) {
          if constexpr (Work::kStacked) {
            tensor_load(to, A, walk.matrices[i], row, col, full, evict_normal());
          } else {
            tensor_load(to, A, i * walk.a_next + row, col, full);
          }
        };
        if constexpr (Work::kTransposed) {
          for (int box = 0; box < Tile::BM; box += 32) {
            load_left(stage.a + box * Tile::kDepth, walk.a + col, walk.a_col + box);
          }
        } else {
          load_left(stage.a, walk.a, col);
        }
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
__device__ __forceinline__ void consume_tf32(typename Tile::Shared& shared, const Work& work) {
  const int rank = Tile::kBlocks == 1 ? 0 : cluster_rank();
  const int consumer = warp_of_block() / 4 - 1, row0 = 64 * consumer;
  const auto release = [&](int stage) {
    const int thread = threadIdx.x % 128;
    if constexpr (Tile::kBlocks == 1) {
      if (thread == 0) barrier_arrive(&shared.empty[stage]);
    } else {
      if (thread < Tile::kBlocks) barrier_arrive(&shared.empty[stage], thread);
    }
  };
  const TransposedLeft left;
  Ring<Tile::kStages> ring;
  for (int round = 0; round < work.turns.rounds(); ++round) {
    const int tile = work.turns.tile(round, blockIdx.x / Tile::kBlocks);
    if (tile >= work.turns.tiles) continue;
    const Walk walk = work.walk(tile, rank);
    const int steps = (walk.end - walk.begin) * walk.inner;
    Sum<Tile::BN> sum;
    int previous = 0;
    const auto left_of = [&] { return shared.stages[ring.stage].a + row0 * Tile::kDepth; };
    // The products of a step with what left(slice) gives; those of the step before are done then.
    const auto multiply = [&](int step, const auto& left) {
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < 4; ++slice) {
        wgmma_tf32(sum.elements, left(slice), descriptor_a(shared.stages[ring.stage].b) + 2 * slice,
                   step > 0 || slice > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) release(previous);
      previous = ring.stage;
      ring.advance();
    };
    if constexpr (Work::kTransposed) {
      // While one step is multiplied, the fragments of the next one are loaded: two sets of
      // registers, and therefore two steps a turn.
      uint32_t fragments[2][4][4];
      const auto load = [&](uint32_t(&set)[4][4]) {
        barrier_wait(&shared.full[ring.stage], ring.parity);
        left.load(set, left_of());
      };
      const auto multiply_set = [&](int step, const uint32_t(&set)[4][4]) {
        multiply(step, [&](int slice) -> const uint32_t(&)[4] { return set[slice]; });
      };
      load(fragments[0]);
      for (int step = 0; step < steps; step += 2) {
        multiply_set(step, fragments[0]);
        if (step + 1 == steps) break;
        load(fragments[1]);
        multiply_set(step + 1, fragments[1]);
        if (step + 2 < steps) load(fragments[0]);
      }
    } else {
      for (int step = 0; step < steps; ++step) {
        barrier_wait(&shared.full[ring.stage], ring.parity);
        multiply(step, [&](int slice) { return descriptor_a(left_of()) + 2 * slice; });
      }
    }
    wgmma_wait<0>();
    release(previous);
    work.store(sum, tile, rank, row0);
  }
}
#endif

/// Launched with kBlocks blocks for each cluster of `turns`, or with more blocks, which only help.
/// Tiles may wait for helpers, and at their end for other tiles of the same round (work.store()).
/// Helpers wait for nobody, and a cluster has at most one tile of a round. So all blocks end if all
/// run at the same time: the grid is at most as large as the device.
template <class Tile, class Work>
__global__ void HOPPER_CLUSTER(Tile::kBlocks) __launch_bounds__(Tile::kThreads, 1)
    tf32_product(const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B,
                 const __grid_constant__ Work work) {
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
      if (elect_one()) produce_tf32<Tile>(shared, &A, &B, work);
    } else if constexpr (Work::kHelped) {
      work.help(blockIdx.x * 3 + warp_of_block() - 1, gridDim.x * 3);
    }
  } else {
    registers_grow_to<Work::kHelped ? 176 : 240>();
    consume_tf32<Tile>(shared, work);
  }
#endif
}

/// Large tiles of two blocks, or small ones where these would leave multiprocessors without work.
/// (Forward, four blocks, which fetch a quarter less, were 2 to 25 % slower where large tiles are.)
using LargeTile = Tf32Tile<256, 2>;
using SmallTile = Tf32Tile<128, 1>;
struct TilePlan {
  bool large;
  int clusters;   ///< that the device holds
  double cycles;  ///< of the multiprocessor that has the most to do
};

/// The faster tile for make(LargeTile(), clusters) or make(SmallTile(), clusters), which are the
/// same Work; `clusters`: how many the device holds. A step of a large tile takes 1024 cycles; of a
/// small one the tensor cores take 512, the copy engine 620.
template <typename Make>
TilePlan plan_tiles(Make make) {
  const auto plan = [&](auto tile, double cycles) {
    using Tile = decltype(tile);
    constexpr int kBytes = sizeof(typename Tile::Shared);
    const auto kernel = tf32_product<Tile, decltype(make(tile, 1))>;
    allow_shared_bytes(kernel, kBytes);
    const int clusters = resident_clusters(kernel, Tile::kBlocks, Tile::kThreads, kBytes);
    const auto work = make(tile, clusters);
    const auto most = work.turns.most([&](int tile) { return work.steps(tile); },
                                      [&](int tile) {
                                        if constexpr (requires { work.group(tile); }) {
                                          return work.group(tile);
                                        } else {
                                          return tile;
                                        }
                                      });
    return TilePlan{Tile::kBlocks > 1, clusters, cycles * static_cast<double>(most)};
  };
  const TilePlan large = plan(LargeTile(), 1024), small = plan(SmallTile(), 620);
  return large.cycles <= small.cycles ? large : small;
}

/// visit(tile) with the tile of a plan.
template <typename Visit>
auto with_tile(const TilePlan& plan, Visit visit) {
  return plan.large ? visit(LargeTile()) : visit(SmallTile());
}

/// A factor in memory: (rows, cols), row-major; or a stack of such matrices.
struct Tf32Factor {
  const float* data;
  int64_t rows, cols, matrices = 1;
};

/// Launches the product with the tile of the plan.
template <typename Make>
void multiply_tf32(const Tf32Factor& a, const Tf32Factor& b, const TilePlan& plan, Make make) {
  with_tile(plan, [&](auto tile) {
    using Tile = decltype(tile);
    using Work = decltype(make(tile, 1));
    const Work work = make(tile, plan.clusters);
    const int clusters = Work::kHelped ? plan.clusters : work.turns.clusters;
    constexpr unsigned kRows = Work::kTransposed ? 32 : Tile::BM;
    launch_early(tf32_product<Tile, Work>, Tile::kBlocks * static_cast<unsigned>(clusters),
                 Tile::kThreads, sizeof(typename Tile::Shared),
                 Work::kStacked ? batch_map<float>(a.data, a.matrices, a.rows, a.cols, kRows, true)
                                : tensor_map<float>(a.data, a.rows, a.cols, kRows),
                 tensor_map<float>(b.data, b.rows, b.cols, Tile::BN / Tile::kBlocks), work);
  });
}

}  // namespace operators::clifford_connected
