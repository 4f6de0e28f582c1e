// The steps of lesson 7's *clusters*, a function each, for tiles of several sizes and for batches.
// The kernel in fused.cuh is their order. bonus_diffusion_gpus.cu has another meeting between them,
// of the blocks of several GPUs.
//
// In the first product a consumer has kEigen / 2 rows of the spectrum and all kColumns columns, and
// both work on every tile. In the second product a tile belongs to one consumer, and the next tile
// mostly to the other one. Three spare warps beside the producer work on the sum of all blocks. In
// a batch each mesh has clusters of its own, which meet at a sum of their own.
#pragma once

#include "operators/diffusion/diffusion.h"
#include "primitives/early_launch.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/launch.h"
#include "primitives/mma.cuh"
#include "primitives/spin.cuh"

namespace operators::diffusion {

using namespace primitives;

inline constexpr int kMostEigen = 256, kMostWidth = 512;

// A block fetches the basis for its cluster in boxes of this many rows.
inline constexpr int kMulticastRows = 32;

/// A block's threads: the producer's warpgroup, whose warps 1 to 3 are the spare ones, and two of
/// consumers.
inline constexpr int kOneLaunchThreads = 384, kSpareThreads = 96, kConsumers = 256;

// The ids for named_barrier(). Consumer 1 has the id after that of consumer 0.
inline constexpr int kConsumerBarrier = 1, kSpareBarrier = 3, kConsumersBarrier = 4;

// The masses that come with a tile. In a batch the masses of a mesh may begin at any address, but
// copies begin at multiples of 16 bytes. So up to 7 masses that stand before them come, too.
template <bool kBatch>
inline constexpr int kMassBox = kBatch ? 72 : 64;

/// What the copy engine moves.
struct DiffusionMaps {
  CUtensorMap x, basis, mass, out, spectral;

  explicit DiffusionMaps(const DiffusionOperands& in)
      : x(tensor_map<__nv_bfloat16>(in.values, in.V, in.W, 64)),
        basis(tensor_map<__nv_bfloat16>(in.basis, in.V, in.E, kMulticastRows)),
        mass(tensor_map<__nv_bfloat16>(in.mass, in.V)),
        out(tensor_map<__nv_bfloat16>(in.result, in.V, in.W, 64)),
        spectral(tensor_map<__nv_bfloat16>(in.spectrum, in.E, in.W, 64)) {}
  DiffusionMaps(const DiffusionOperands& in, int64_t meshes)
      : x(batch_map<__nv_bfloat16>(in.values, meshes, in.V, in.W, 64)),
        basis(batch_map<__nv_bfloat16>(in.basis, meshes, in.V, in.E, kMulticastRows)),
        mass(tensor_map<__nv_bfloat16>(in.mass, meshes * in.V, kMassBox<true>)),
        out(batch_map<__nv_bfloat16>(in.result, meshes, in.V, in.W, 64)),
        spectral(batch_map<__nv_bfloat16>(in.spectrum, meshes, in.E, in.W, 64)) {}
};

/// What a kernel is compiled for: a spectrum of up to kEigen rows, of which each block of a cluster
/// has kColumns columns, in kBoxes boxes; and kStages stages. A tile has 64 rows of the basis, in
/// kSteps boxes of 64 eigenvectors. kBatch: for a batch.
template <int kEigen_, int kColumns_, int kStages_, bool kBatch_ = false>
struct OneLaunchTile {
  static constexpr int kEigen = kEigen_, kColumns = kColumns_, kStages = kStages_;
  static constexpr bool kBatch = kBatch_;
  static constexpr int kSteps = kEigen / kStepK, kBoxes = kColumns / kBoxCols;
  static constexpr int kTiles = kEigen / 128;  // of 64 rows of the spectrum, that a consumer has
  // The sum of all blocks lies in memory as the registers of the consumers hold it, in quads: four
  // elements of a thread, which one atomicAdd adds. Elements 4 j to 4 j + 3 of lane l for rows 16 w
  // to 16 w + 15 are quad number (w kColumns / 8 + j) 32 + l.
  static constexpr int kQuads = kEigen * kColumns / 4;
};

template <class Tile>
struct OneLaunchShared {
  LeftTile<__nv_bfloat16, 64> basis[Tile::kStages][Tile::kSteps];  // 64 rows, all columns
  union {
    RightTile<__nv_bfloat16, Tile::kColumns> x[Tile::kStages];  // first product
    struct {
      RightTile<__nv_bfloat16, Tile::kColumns> spectrum[Tile::kSteps];
      Box<__nv_bfloat16, 64> out[2][Tile::kBoxes];  // a tile of each consumer
      float2 d_times[3][Tile::kColumns / 2];        // of each spare warp's rows
    } second;
  };
  alignas(128) __nv_bfloat16 mass[Tile::kStages][Tile::kBatch ? 128 : 64];
  StageBarriers<Tile::kStages> pipeline;  // whose stages are basis, x and mass
  Barrier spare, met;  // backward: the block's spare warps have added; all blocks have added
};

#if HOPPER_CODE
// Two neighbouring elements of a row-major matrix; zeros outside of it. cols and col are even.
__device__ inline float2 pair_at(const __nv_bfloat16* matrix, int rows, int cols, int row,
                                 int col) {
  if (row >= rows || col >= cols) return float2{};
  return __bfloat1622float2(
      *reinterpret_cast<const __nv_bfloat162*>(matrix + static_cast<size_t>(row) * cols + col));
}

/// A block's work. Its cluster is number `group` of `groups`, and has `tiles` tiles of 64 rows:
/// tile `group` and every groups-th after it, so that clusters read neighbouring rows. A BlockRow
/// is a cluster whose blocks are a row of the grid. The block, one of those, has kColumns columns
/// from cluster.rank kColumns on. In a batch it belongs to mesh blockIdx.z, whose dTimes go to
/// mesh_d_times (meshes, W).
template <class Tile>
struct BlockWork : Tile {
  using Shared = OneLaunchShared<Tile>;
  static constexpr int kBasisBytes = sizeof(Shared::basis[0]) + 2 * kMassBox<Tile::kBatch>;
  static constexpr int kFirstBytes = kBasisBytes + sizeof(Shared::x[0]);

  Shared& shared;
  const DiffusionMaps& maps;
  const DiffusionOperands& operands;
  float* mesh_d_times;  // of a batch
  BlockRow<> cluster;
  int group = blockIdx.y, groups = gridDim.y;
  int tiles;

  __device__ __forceinline__ BlockWork(char* bytes, const DiffusionMaps& maps,
                                       const DiffusionOperands& operands,
                                       float* mesh_d_times = nullptr)
      : shared(*reinterpret_cast<Shared*>(bytes)), maps(maps), operands(operands) {
    this->mesh_d_times = mesh_d_times;
    tiles = (static_cast<int>((operands.V + 63) / 64) - group + groups - 1) / groups;
  }
  __device__ int row_of(int t) const { return 64 * (group + t * groups); }
  __device__ int col0() const { return cluster.rank * Tile::kColumns; }
  __device__ int mesh() const { return Tile::kBatch ? blockIdx.z : 0; }
  /// Where the mesh's first mass is among those of all meshes, and in the box that it comes with.
  __device__ int mass0() const { return mesh() * static_cast<int>(operands.V); }
  __device__ int mass_shift() const { return mass0() % 8; }
  /// What is the mesh's own of (meshes, E) and of (meshes, E, W).
  __device__ const __nv_bfloat16* evalues() const { return operands.evalues + mesh() * operands.E; }
  __device__ const __nv_bfloat16* own(const __nv_bfloat16* spectra) const {
    return spectra + static_cast<size_t>(mesh()) * operands.E * operands.W;
  }
};

/// The sum of all blocks, in memory. damp_spectrum() and store_d_times() are given an object that
/// loads a thread's quads of a sum: this one, or, in bonus_diffusion_gpus.cu, one that receives
/// another GPU's sum.
struct Totals {
  float4* quads;

  template <int n, typename Place>
  __device__ __forceinline__ void operator()(float4 (&sums)[n], Place place) const {
    take(sums, place);
  }

  /// sums[k] becomes quad number place(k). __ldcg reads from the L2 cache, where the atomic
  /// additions were made.
  template <int n, typename Place>
  __device__ __forceinline__ void take(float4 (&sums)[n], Place place) const {
#pragma unroll
    for (int k = 0; k < n; ++k) sums[k] = __ldcg(quads + place(k));
  }
};

/// Where the blocks with the same columns, which have the same rank in their clusters, add their
/// shares and count how many have added.
///
/// all_totals (2, blocks, kEigen, kColumns) has two sums for each rank. A launch adds to one, and
/// fills the other with zeros for the next launch. `arrivals` has a counter for each rank: the
/// lower 16 bits count blocks, the upper 16 bits launches. In a batch each mesh has both. All are
/// zero before the first launch. A launch leaves them ready for the next one with the same template
/// arguments and W, whatever V and the grid are. Two launches must not use them at the same time.
template <typename Work>
struct Meeting {
  unsigned* arrivals;
  unsigned start, groups;
  float4 *totals, *next_totals;

  // `start` holds the launch's number. A block reads it before it arrives, and it changes only when
  // the last block has arrived. So all blocks of a launch read the same number.
  __device__ __forceinline__ Meeting(const Work& work, unsigned* all_arrivals, float4* all_totals)
      : arrivals(all_arrivals + work.mesh() * work.cluster.blocks + work.cluster.rank),
        groups(work.groups) {
    all_totals += static_cast<size_t>(work.mesh()) * 2 * work.cluster.blocks * Work::kQuads;
    start = GridCount(*arrivals).load(cuda::memory_order_relaxed) & 0xffff0000;
    const int turn = start >> 16 & 1;
    totals = all_totals + (turn * work.cluster.blocks + work.cluster.rank) * Work::kQuads;
    next_totals =
        all_totals + ((turn ^ 1) * work.cluster.blocks + work.cluster.rank) * Work::kQuads;
  }
  __device__ bool all_have_arrived() const {
    return GridCount(*arrivals).load(cuda::memory_order_acquire) - start >= groups;
  }
};

/// What the L2 cache is asked to do with tile t of the basis in the first product. The second
/// product takes the tiles in reverse. It finds the last kStages in shared memory. Of those before
/// them the cache shall keep the last ones, kCachedBytes of all clusters together, and may drop the
/// others first.
inline constexpr int kCachedBytes = 32 << 20;
template <typename Work>
__device__ __forceinline__ uint64_t basis_policy(const Work& work, int t) {
  const int behind = work.tiles - Work::kStages - t;
  const int tile_bytes = 128 * work.operands.E;
  const int cached = kCachedBytes / tile_bytes / static_cast<int>(gridDim.y * gridDim.z);
  if (work.tiles <= Work::kStages) return evict_normal();
  return behind > 0 && behind <= cached ? evict_last() : evict_first();
}

/// A thread prepares the barriers. A stage is given back by both consumers of each block of the
/// cluster.
template <typename Work>
__device__ __forceinline__ void prepare_barriers(const Work& work) {
  barrier_init(&work.shared.spare, kSpareThreads);
  barrier_init(&work.shared.met, 1);
  prepare(work.shared.pipeline, 2 * work.cluster.blocks);
}

/// Starts the copies of a tile of x to a stage. The cache may drop x first: no block reads it
/// again.
template <typename Work>
__device__ __forceinline__ void load_x(const Work& work, int t, int stage, Barrier* arrived) {
  for (int box = 0; box < Work::kBoxes; ++box) {
    load_box<Work::kBatch>(&work.shared.x[stage].boxes[box], &work.maps.x, work.mesh(),
                           work.row_of(t), work.col0() + kBoxCols * box, arrived, evict_first());
  }
}

/// Starts the copies of 64 rows of the basis. The blocks of the cluster take turns with the boxes,
/// and each fetches its boxes for all, by multicast. Each block fetches the masses for itself
/// alone.
template <typename Work>
__device__ __forceinline__ void load_basis(const Work& work, int t, int stage, Barrier* arrived,
                                           uint64_t policy) {
  auto& shared = work.shared;
  const int row = work.row_of(t);
  tensor_load(shared.mass[stage], &work.maps.mass, work.mass0() - work.mass_shift() + row, arrived);
  for (int box = work.cluster.rank; box < Work::kSteps * 64 / kMulticastRows;
       box += work.cluster.blocks) {
    const int step = box * kMulticastRows / 64, within = box * kMulticastRows % 64;
    multicast_box<Work::kBatch>(shared.basis[stage][step].row(within), &work.maps.basis,
                                work.mesh(), row + within, kStepK * step, arrived,
                                work.cluster.all(), policy);
  }
}

/// Announces all bytes of the first tile, and loads its x. The cluster need not have met, since x
/// is for this block alone.
template <typename Work>
__device__ __forceinline__ void put_first_x(const Work& work) {
  put_first(work.shared.pipeline, Work::kFirstBytes,
            [&](int stage, Barrier* arrived) { load_x(work, 0, stage, arrived); });
}

/// The producer's thread loads the tiles of the first product, after put_first_x().
template <typename Work, class Writer>
__device__ __forceinline__ void load_forth(const Work& work, Writer& writer) {
  // put_first_x() has announced the bytes of the first tile.
  writer.announced = true;
  for (int t = 0; t < work.tiles; ++t) {
    writer.put(Work::kFirstBytes, [&](int stage, Barrier* arrived) {
      if (t > 0) load_x(work, t, stage, arrived);
      load_basis(work, t, stage, arrived, basis_policy(work, t));
    });
  }
}

/// Then it loads the tiles of the second product, in reverse, but not the last `kept` tiles, which
/// are still there. writer.back() goes back through the stages.
template <typename Work, class Writer>
__device__ __forceinline__ void load_back(const Work& work, Writer writer, int kept) {
  for (int t = work.tiles - 1 - kept; t >= 0; --t) {
    writer.put(Work::kBasisBytes, [&](int stage, Barrier* arrived) {
      load_basis(work, t, stage, arrived, evict_first());
    });
  }
}

// ---- The spare warps ----------------------------------------------------------------------------

/// The spare threads of all blocks of a rank share the quads of the rank's sum. Calls visit(i) for
/// each quad of this thread.
template <typename Work, typename Visit>
__device__ __forceinline__ void visit_quads(const Work& work, Visit visit) {
  const int thread = kSpareThreads * work.group + static_cast<int>(threadIdx.x) - 32;
  for (int i = thread; i < Work::kQuads; i += kSpareThreads * work.groups) visit(i);
}

template <typename Work>
__device__ __forceinline__ void zero_totals(const Work& work, float4* totals) {
  visit_quads(work, [&](int i) { totals[i] = float4{}; });
}

/// Backward: what a spare warp has of columns 8 j to 8 j + 7 of its rank. The three spare warps of
/// a block take groups of 16 rows in turn. A lane has one quad of each group: two columns of a row,
/// and the same of the row 8 below it.
template <typename Work>
struct SpareColumns {
  static constexpr int kMine = (Work::kEigen / 16 + 2) / 3;
  const Work& work;
  int j, warp = threadIdx.x / 32 - 1, lane = threadIdx.x % 32;

  __device__ int col() const { return work.col0() + 8 * j + 2 * (lane % 4); }
  __device__ int row(int k) const { return 16 * (warp + 3 * k) + lane / 4; }
  /// Whether there is a quad k. Where it is missing the warp reads another one, and multiplies it
  /// by 0.
  __device__ bool has(int k) const { return warp + 3 * k < Work::kEigen / 16; }
  __device__ int quad(int k) const {
    return ((has(k) ? warp + 3 * k : 0) * Work::kColumns / 8 + j) * 32 + lane;
  }
  /// These elements of a matrix (E, W); zeros outside of it.
  __device__ void load(float4 (&quads)[kMine], const __nv_bfloat16* matrix) const {
    const DiffusionOperands& in = work.operands;
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const float2 upper = pair_at(matrix, in.E, in.W, row(k), col());
      const float2 lower = pair_at(matrix, in.E, in.W, row(k) + 8, col());
      quads[k] = make_float4(upper.x, upper.y, lower.x, lower.y);
    }
  }
};

/// Backward: adds dSpectral to the sum of all.
template <typename Work>
__device__ __forceinline__ void add_d_spectral(const Work& work, float4* totals) {
  using Columns = SpareColumns<Work>;
#pragma unroll 1
  for (int j = work.group; j < Work::kColumns / 8; j += work.groups) {
    const Columns mine{work, j};
    float4 quads[Columns::kMine];
    mine.load(quads, work.own(work.operands.d_spectral));
#pragma unroll
    for (int k = 0; k < Columns::kMine; ++k) {
      if (mine.has(k)) atomicAdd(totals + mine.quad(k), quads[k]);
    }
  }
}

/// Backward: dTimes, minus the sum over the rows of evalue * spectral * total. The first two
/// factors are loaded before all blocks have added. take(sums, quad)... load the total: all of it
/// or, as dTimes is linear in it, one term after another, with fewer registers.
template <typename Work, typename... Take>
__device__ __forceinline__ void store_d_times(const Work& work, const Take&... take) {
  using Columns = SpareColumns<Work>;
  const DiffusionOperands& in = work.operands;
#pragma unroll 1
  for (int j = work.group; j < Work::kColumns / 8; j += work.groups) {
    const Columns mine{work, j};
    float4 factors[Columns::kMine];
    mine.load(factors, work.own(in.spectral));
#pragma unroll
    for (int k = 0; k < Columns::kMine; ++k) {
      const int row = mine.row(k);
      const float upper = row < in.E ? __bfloat162float(work.evalues()[row]) : 0;
      const float lower = row + 8 < in.E ? __bfloat162float(work.evalues()[row + 8]) : 0;
      factors[k] = make_float4(upper * factors[k].x, upper * factors[k].y, lower * factors[k].z,
                               lower * factors[k].w);
    }
    barrier_wait(&work.shared.met, 0);
    float2 sum = {};
    const auto add_term = [&](const auto& take_term) {
      float4 sums[Columns::kMine];
      take_term(sums, [&](int k) { return mine.quad(k); });
      float2 term = {};
#pragma unroll
      for (int k = 0; k < Columns::kMine; ++k) {
        term.x -= factors[k].x * sums[k].x + factors[k].z * sums[k].z;
        term.y -= factors[k].y * sums[k].y + factors[k].w * sums[k].w;
      }
      sum.x += term.x;
      sum.y += term.y;
    };
    (add_term(take), ...);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, lanes);
      sum.y += __shfl_xor_sync(~0u, sum.y, lanes);
    }
    auto& rows = work.shared.second.d_times;
    const int pair = 4 * j + mine.lane;
    if (mine.lane < 4) rows[mine.warp][pair] = sum;
    named_barrier(kSpareBarrier, kSpareThreads);
    if (mine.warp == 0 && mine.lane < 4 && mine.col() < in.W) {
      const float2 all = {rows[0][pair].x + rows[1][pair].x + rows[2][pair].x,
                          rows[0][pair].y + rows[1][pair].y + rows[2][pair].y};
      if constexpr (Work::kBatch) {
        float* const to = work.mesh_d_times + static_cast<size_t>(work.mesh()) * in.W;
        *reinterpret_cast<float2*>(to + mine.col()) = all;
      } else {
        *reinterpret_cast<uint32_t*>(in.d_times + mine.col()) = pack2<__nv_bfloat16>(all.x, all.y);
      }
    }
  }
}

// ---- The consumers ------------------------------------------------------------------------------

/// What a thread of a consumer holds of its kTiles tiles of the spectrum: its share, and
/// exp(-evalue time) of the same elements.
template <typename Work>
struct SpectrumShare {
  Sum<Work::kColumns> sum[Work::kTiles];
  float factors[Work::kTiles][Work::kColumns / 2];
};

__device__ inline int consumer() { return static_cast<int>(threadIdx.x) / 128 - 1; }

template <typename Work>
__device__ __forceinline__ void damping_factors(const Work& work, SpectrumShare<Work>& share) {
  const DiffusionOperands& in = work.operands;
#pragma unroll
  for (int m = 0; m < Work::kTiles; ++m) {
    const int row0 = 64 * (Work::kTiles * consumer() + m) + Sum<Work::kColumns>::row(0);
    const float upper = row0 < in.E ? __bfloat162float(work.evalues()[row0]) : 0;
    const float lower = row0 + 8 < in.E ? __bfloat162float(work.evalues()[row0 + 8]) : 0;
#pragma unroll
    for (int j = 0; j < Work::kColumns / 8; ++j) {
      const float2 times =
          pair_at(in.times, 1, in.W, 0, work.col0() + Sum<Work::kColumns>::col(4 * j));
      share.factors[m][4 * j] = damping(upper, times.x);
      share.factors[m][4 * j + 1] = damping(upper, times.y);
      share.factors[m][4 * j + 2] = damping(lower, times.x);
      share.factors[m][4 * j + 3] = damping(lower, times.y);
    }
  }
}

/// The masses of rows `row` and row + 1 of tile t; zeros outside of the mesh. (In a batch the copy
/// brings the next mesh's masses there.)
template <typename Work>
__device__ __forceinline__ unsigned two_masses(const Work& work, int t, int stage, int row) {
  const __nv_bfloat16* masses = work.shared.mass[stage] + row;
  if constexpr (Work::kBatch) {
    masses += work.mass_shift();
    const int64_t left = work.operands.V - work.row_of(t) - row;
    return pack2<__nv_bfloat16>(left > 0 ? __bfloat162float(masses[0]) : 0,
                                left > 1 ? __bfloat162float(masses[1]) : 0);
  } else {
    return *reinterpret_cast<const unsigned*>(masses);
  }
}

/// First product: this block's share of basis^T (mass x). The left factor is the basis, transposed,
/// and forward multiplied by the masses. The last stages are not given back: they are kept for the
/// second product.
template <Pass kPass, typename Work, class Reader>
__device__ __forceinline__ void project(const Work& work, SpectrumShare<Work>& share,
                                        Reader& reader) {
  for (int t = 0; t < work.tiles; ++t, reader.next()) {
    const int stage = reader.wait();
    LeftFragments<__nv_bfloat16> left[Work::kTiles];
#pragma unroll
    for (int m = 0; m < Work::kTiles; ++m) {
      left[m] = work.shared.basis[stage][Work::kTiles * consumer() + m].load_transposed_fragments();
    }
    if constexpr (kPass == Pass::forward) {
#pragma unroll
      for (int i = 0; i < 4 * kSlices; ++i) {
        const unsigned masses = two_masses(work, t, stage, left[0].k(i / 4, i % 4));
#pragma unroll
        for (int m = 0; m < Work::kTiles; ++m) {
          left[m].slices[i / 4][i % 4] = multiply2(left[m].slices[i / 4][i % 4], masses);
        }
      }
    }
    start_products(share.sum, left, work.shared.x[stage], t > 0);
    wgmma_wait<0>();
    if (t + Work::kStages < work.tiles) reader.give_back();
  }
}

/// The number of the quad of the thread's elements 4 j to 4 j + 3 of tile m.
template <typename Work>
__device__ __forceinline__ int quad_of(int m, int j) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  return ((4 * (Work::kTiles * consumer() + m) + warp) * Work::kColumns / 8 + j) * 32 + lane;
}

/// Adds the share to the sum of all.
template <typename Work>
__device__ __forceinline__ void add_to_totals(const SpectrumShare<Work>& share, float4* totals) {
#pragma unroll
  for (int m = 0; m < Work::kTiles; ++m) {
#pragma unroll
    for (int j = 0; j < Work::kColumns / 8; ++j) {
      const float* four = share.sum[m].elements + 4 * j;
      atomicAdd(totals + quad_of<Work>(m, j), make_float4(four[0], four[1], four[2], four[3]));
    }
  }
}

/// The consumers arrive, and wait until those of all blocks have added. Thread 128 does so for all.
/// Backward the block arrives when its spare warps have added, too, and then tells them through
/// `met` that all blocks have come.
template <Pass kPass, typename Work>
__device__ __forceinline__ void meet(const Work& work, const Meeting<Work>& meeting) {
  named_barrier(kConsumersBarrier, kConsumers);
  if (threadIdx.x == 128) {
    if constexpr (kPass == Pass::backward) barrier_wait(&work.shared.spare, 0);
    const GridCount arrivals(*meeting.arrivals);
    const unsigned before = arrivals.fetch_add(1, cuda::memory_order_acq_rel) - meeting.start;
    if (before + 1 == meeting.groups) {
      // The last one: on to the next launch's number.
      arrivals.fetch_add(0x10000 - meeting.groups, cuda::memory_order_relaxed);
    } else {
      const Spin spin("the other blocks' shares of the spectrum");
      while (!meeting.all_have_arrived()) spin.again();
    }
    if constexpr (kPass == Pass::backward) barrier_arrive(&work.shared.met);
  }
  named_barrier(kConsumersBarrier, kConsumers);
}

/// The spectrum, from the sum of all, is damped and becomes the right factor of the second product,
/// in shared memory; forward the first group stores it, too.
template <Pass kPass, typename Work, typename Sums>
__device__ __forceinline__ void damp_spectrum(const Work& work, SpectrumShare<Work>& share,
                                              const Sums& totals) {
  auto& shared = work.shared;
  constexpr int kQuads = Work::kColumns / 8;
  float4 sums[Work::kTiles * kQuads];
  totals.take(sums, [&](int k) { return quad_of<Work>(k / kQuads, k % kQuads); });
#pragma unroll
  for (int m = 0; m < Work::kTiles; ++m) {
#pragma unroll
    for (int j = 0; j < Work::kColumns / 8; ++j) {
      const float4 total = sums[m * kQuads + j];
      float* four = share.sum[m].elements + 4 * j;
      const float* factor = share.factors[m] + 4 * j;
      four[0] = factor[0] * total.x;
      four[1] = factor[1] * total.y;
      four[2] = factor[2] * total.z;
      four[3] = factor[3] * total.w;
    }
#pragma unroll
    for (int box = 0; box < Work::kBoxes; ++box) {
      share.sum[m].store(shared.second.spectrum[Work::kTiles * consumer() + m].boxes[box],
                         kBoxCols * box, [&](int i) { return share.sum[m].elements[i]; });
    }
  }
  shared_fence();
  named_barrier(kConsumersBarrier, kConsumers);
  if (kPass == Pass::forward && work.group == 0 && threadIdx.x == 128) {
    for (int step = 0; step < Work::kSteps; ++step) {
      for (int box = 0; box < Work::kBoxes; ++box) {
        store_box<Work::kBatch>(&work.maps.spectral, work.mesh(), kStepK * step,
                                work.col0() + kBoxCols * box,
                                &shared.second.spectrum[step].boxes[box], evict_normal());
      }
    }
    tensor_store_commit();
  }
}

/// Second product, over the same tiles in reverse. One consumer takes the stages with an even
/// number, and the other one those with an odd number. So each sees all phases of its own stages'
/// barriers. (A barrier tells only the parity of a phase. A consumer that misses a phase could
/// mistake another one for it.)
template <Pass kPass, typename Work, class Reader>
__device__ __forceinline__ void expand(const Work& work, Reader reader) {
  auto& shared = work.shared;
  const int thread = threadIdx.x % 128;
  Sum<Work::kColumns> sum;
  for (int t = work.tiles - 1; t >= 0; --t, reader.next()) {
    if (reader.ring.stage % 2 != consumer()) continue;
    const int stage = reader.wait();
    float above = 1, below = 1;
    if constexpr (kPass == Pass::backward) {
      above = __bfloat162float(shared.mass[stage][work.mass_shift() + sum.row(0)]);
      below = __bfloat162float(shared.mass[stage][work.mass_shift() + sum.row(2)]);
    }
#pragma unroll
    for (int step = 0; step < Work::kSteps; ++step) {
      sum.start_product(shared.basis[stage][step].rows(0), shared.second.spectrum[step], step > 0);
    }
    wgmma_wait<0>();
    if (thread == 0) tensor_store_wait_read<0>();
    named_barrier(kConsumerBarrier + consumer(), 128);  // the masses have been read, too
    // Only this consumer has read the stage. But each block owes two arrivals for it (see
    // prepare_barriers). So this consumer makes both.
    if (t >= Work::kStages) {
      reader.give_back();
      reader.give_back();
    }
#pragma unroll
    for (int box = 0; box < Work::kBoxes; ++box) {
      sum.store(shared.second.out[consumer()][box], kBoxCols * box,
                [&](int i) { return (i / 2 % 2 ? below : above) * sum.elements[i]; });
    }
    shared_fence();
    named_barrier(kConsumerBarrier + consumer(), 128);
    if (thread == 0) {
      // The result shall not drive the basis out of the cache while the basis is still read.
      const uint64_t policy = t >= Work::kStages ? evict_first() : evict_normal();
      for (int box = 0; box < Work::kBoxes; ++box) {
        store_box<Work::kBatch>(&work.maps.out, work.mesh(), work.row_of(t),
                                work.col0() + kBoxCols * box, &shared.second.out[consumer()][box],
                                policy);
      }
      tensor_store_commit();
    }
  }
  if (thread == 0) tensor_store_wait_read<0>();
}
#endif  // HOPPER_CODE

}  // namespace operators::diffusion
