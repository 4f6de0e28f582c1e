// The spatial diffusion of lesson 7 in one launch, on Hopper, forward and backward, of one mesh or
// of a batch of meshes, for any V, E up to 256 and W up to 512. It is lesson 7's *clusters*, with
// more:
//
//   Clusters    There are as many blocks in a cluster as W asks for, up to 8.
//   Batch       Each mesh has clusters, a sum and a meeting of its own. They leave dTimes of the
//               mesh, and another kernel adds up those of all meshes. If there are more meshes than
//               clusters find room, each mesh has one cluster, which waits for no other. So they
//               need not all run at the same time.
//   Tiles       There are three sizes: for many eigenvectors, for few vertices, and for many.
//
// The steps are in one_launch.cuh, a function each; the kernel below is their order.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "operators/caller.h"
#include "operators/device_facts.h"
#include "operators/diffusion/one_launch.cuh"
#include "operators/estimate.h"

namespace operators::diffusion {

/// The kernel: its steps, in their order. The blocks of a cluster are a row of the grid. What E and
/// W do not fill is zero. arrivals, totals: see Meeting. mesh_d_times (meshes, W): backward, of a
/// batch.
///
/// The next kernel may take its places early. But all that this kernel reads or writes in memory
/// comes after wait_for_previous_kernel(). x of the first tile is for this block alone, so it may
/// be on its way while the cluster meets.
template <Pass kPass, class Tile>
__global__ void __launch_bounds__(kOneLaunchThreads, 1)
    diffuse(const __grid_constant__ DiffusionMaps maps, const DiffusionOperands operands,
            unsigned* arrivals, float4* totals, float* mesh_d_times) {
#if HOPPER_CODE
  using Work = BlockWork<Tile>;
  extern __shared__ __align__(1024) char bytes[];
  const Work work(bytes, maps, operands, mesh_d_times);
  const int warp = warp_of_block();
  if (warp == 0 && elect_one()) prepare_barriers(work);
  start_next_kernel();
  wait_for_previous_kernel();
  const Meeting<Work> meeting(work, arrivals, totals);
  if (warp == 0 && elect_one()) put_first_x(work);
  cluster_meet();

  if (warp < 4) {
    registers_shrink_to<56>();
    if (warp == 0) {
      if (!elect_one()) return;
      Writer writer(work.shared.pipeline);
      load_forth(work, writer);
      load_back(work, writer.back(), Tile::kStages);
    } else {  // the spare warps
      zero_totals(work, meeting.next_totals);
      if constexpr (kPass == Pass::backward) {
        add_d_spectral(work, meeting.totals);
        barrier_arrive(&work.shared.spare);
        store_d_times(work, Totals{meeting.totals});
      }
    }
  } else {
    registers_grow_to<224>();
    Reader reader(work.shared.pipeline, work.cluster);
    SpectrumShare<Work> share;
    damping_factors(work, share);  // while the first tiles are on their way
    project<kPass>(work, share, reader);
    add_to_totals(share, meeting.totals);
    meet<kPass>(work, meeting);
    damp_spectrum<kPass>(work, share, Totals{meeting.totals});
    expand<kPass>(work, reader.back());
  }
#endif
}

/// dTimes (W) is the sum of the dTimes of the meshes (meshes, W). A thread owns a column.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    add_mesh_d_times(const float* of_meshes, int meshes, __nv_bfloat16* d_times, int W) {
  const int w = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  start_next_kernel();
  wait_for_previous_kernel();
  if (w >= W) return;
  float sum = 0;
  for (int mesh = 0; mesh < meshes; ++mesh) sum += of_meshes[static_cast<size_t>(mesh) * W + w];
  d_times[w] = __float2bfloat16_rn(sum);
}

/// A pass of a shape that is at least 1 x 8 x 8, with E and W multiples of 8. `operands` says, at
/// each launch, where inputs and outputs are.
template <Pass kPass>
class FusedDiffusion {
 public:
  FusedDiffusion(const Caller& caller, std::function<DiffusionOperands()> operands,
                 DiffusionShape shape)
      : operands_(std::move(operands)), shape_(shape) {
    if (shape.E > kMostEigen || shape.W > kMostWidth) return;
    shape.meshes > 1 ? choose<true>(caller) : choose<false>(caller);
  }

  /// One way; or none, if E or W is too large, or the device has no room for a cluster.
  const std::vector<Way>& ways() const { return ways_; }
  /// How many vertices a block adds up, at most, before its share is added to the sum of all
  /// blocks.
  int64_t vertices_of_a_block() const { return vertices_of_a_block_; }
  double workspace_bytes() const { return workspace_bytes_; }

 private:
  /// Which tile. If E is above 128, it is the deep one. With few rows, or up to 64 columns, it is
  /// the narrow one: so 64 rows keep more multiprocessors busy, and a thread has half as much to
  /// add to the totals. But of large clusters, or for many meshes, fewer find room at a time. There
  /// narrow tiles are taken only if a block then works on fewer columns of tiles, or, backward with
  /// a cluster for each mesh, on no more. With many rows the wide tile is taken, since wide blocks
  /// read the basis less often. In a batch the rows of up to 32 meshes are counted.
  template <bool kBatch>
  void choose(const Caller& caller) {
    const auto [V, E, W, meshes] = shape_;
    using Deep = OneLaunchTile<256, 64, 5, kBatch>;
    using Narrow = OneLaunchTile<128, 64, 9, kBatch>;
    using Wide = OneLaunchTile<128, 128, 7, kBatch>;
    bool narrow = W <= 64 || V * std::min<int64_t>(meshes, 32) <= 32768;
    if (E <= 128 && W > 64 && narrow && (kBatch || W > 256)) {
      narrow = columns_of_tiles<Narrow>() <
               columns_of_tiles<Wide>() + (kPass == Pass::backward && meshes > 32);
    }
    E > 128 ? plan<Deep>(caller) : narrow ? plan<Narrow>(caller) : plan<Wide>(caller);
  }

  /// How many columns of tiles a block works on: those of one mesh, or of several, one after
  /// another.
  template <class Tile>
  int64_t columns_of_tiles() const {
    const int64_t fit = std::max(1, clusters_at_once<Tile>());
    const int64_t of_a_mesh = std::max<int64_t>(1, fit / shape_.meshes);
    return Tile::kColumns * blocks_for(shape_.meshes, fit) * blocks_for(shape_.V, 64 * of_a_mesh);
  }

  /// The device is asked once for each number of blocks in a cluster.
  template <class Tile, unsigned kBlocks = 1>
  int clusters_at_once() const {
    if constexpr (kBlocks * Tile::kColumns < kMostWidth) {
      if (shape_.W > kBlocks * Tile::kColumns) return clusters_at_once<Tile, kBlocks + 1>();
    }
    return fact_of_device([] {
      constexpr int kBytes = sizeof(OneLaunchShared<Tile>);
      const auto kernel = diffuse<kPass, Tile>;
      allow_shared_bytes(kernel, kBytes);
      return clusters_that_fit(kernel, kBlocks, kOneLaunchThreads, kBytes);
    });
  }

  /// There are as many clusters as fit on the device at the same time, or as there are tiles: no
  /// block may wait for one that cannot start. There are fewer where the number of rounds stays the
  /// same. In a batch each mesh has its share of them, at least one.
  ///
  /// All that holds for a GPU that this launch has to itself. Two of these in two streams might
  /// wait for each other for ever. So if other launches may run at the same time, its blocks start
  /// together, and not early. (In one stream two of these cannot wait for each other: the blocks of
  /// the next one start when all blocks of this one run.)
  template <class Tile>
  void plan(const Caller& caller) {
    constexpr int kBytes = sizeof(OneLaunchShared<Tile>);
    constexpr bool kMeshTimes = Tile::kBatch && kPass == Pass::backward;
    const auto [V, E, W, meshes] = shape_;
    const int fit = clusters_at_once<Tile>();
    if (fit == 0) return;
    allow_shared_bytes(diffuse<kPass, Tile>, kBytes);  // the device may have been reset since
    const unsigned blocks = blocks_for(W, Tile::kColumns);
    const int64_t tiles = blocks_for(V, 64);
    const unsigned clusters = persistent(tiles, std::max<int64_t>(1, fit / meshes));
    const auto arrivals = caller.workspace.zeros<unsigned>(blocks * meshes);
    const auto totals = caller.workspace.zeros<float4>(size_t{2} * Tile::kQuads * blocks * meshes);
    const auto mesh_d_times = caller.workspace.any<float>(kMeshTimes ? meshes * W : 1);
    vertices_of_a_block_ = 64 * ceil_div(tiles, int64_t{clusters});
    workspace_bytes_ = arrivals.bytes() + totals.bytes() + (kMeshTimes ? mesh_d_times.bytes() : 0);

    const dim3 grid(blocks, clusters, static_cast<unsigned>(meshes));
    const Start start = caller.alone ? Start::early : clusters > 1 ? Start::together : Start::usual;
    const auto launch = [=, at = operands_, W = static_cast<int>(W), stream = caller.stream] {
      constexpr int kThreads = 64;
      const DiffusionOperands in = at();
      const DiffusionMaps maps = Tile::kBatch ? DiffusionMaps(in, grid.z) : DiffusionMaps(in);
      launch_clusters_on(stream, diffuse<kPass, Tile>, grid.x, start, grid, kOneLaunchThreads,
                         kBytes, maps, in, arrivals.data(), totals.data(), mesh_d_times.data());
      if constexpr (kMeshTimes) {
        launch_clusters_on(stream, add_mesh_d_times<kThreads>, 1, true, blocks_for(W, kThreads),
                           kThreads, 0, mesh_d_times.data(), static_cast<int>(grid.z), in.d_times,
                           W);
      }
    };
    const double bytes = 2.0 * static_cast<double>(shape_.vertices() * (2 * W + E));
    ways_.push_back(
        {"blocks of " + std::to_string(Tile::kEigen) + " x " + std::to_string(Tile::kColumns) +
             "; clusters: " + std::to_string(clusters * meshes) + " of " + std::to_string(blocks),
         kFirstLaunch + bytes / memory_rate(), launch, kBytes});
  }

  std::function<DiffusionOperands()> operands_;
  DiffusionShape shape_;
  std::vector<Way> ways_;
  int64_t vertices_of_a_block_ = 0;
  double workspace_bytes_ = 0;
};

}  // namespace operators::diffusion
