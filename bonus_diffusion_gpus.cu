// Bonus. One mesh on several GPUs: the exchange inside the kernel
//
//     spectral = exp(-evalues[:, None] * times[None, :]) * (basis^T (mass[:, None] * x))    (E, W)
//     out      = basis spectral                                                             (V, W)
//
// and the gradients, see lesson 7. What to do when a mesh is too large for one GPU, or one GPU too
// slow? Lesson 7's kernel has the answer in it: each of its blocks has a slice of the vertices, and
// what they tell each other is their sums for the spectrum, 131 kB. So the vertices are split over
// the GPUs, too. Each adds up its own spectrum, the spectra are added, and everybody goes on:
//
//     one GPU          lesson 7's *clusters*, for what the others are compared with
//     NCCL             the kernel is cut where its blocks meet, and the library adds the spectra
//     fused exchange   one launch on each GPU, whose blocks write what they have into the memory of
//                      the other GPUs, and wait there for what comes
//     NCCL window      the same kernel; NCCL allocates the inboxes and says who sees them where
//
// NCCL, NVIDIA's library for several GPUs, is how this is done in practice; its all-reduce, which
// gives every GPU the sum of all, is fast. But the kernel ends, another one starts, and it has to
// load the basis again. NVLink joins two GPUs: by NVIDIA's data sheet 450 GB/s each way.
//
// --gpus G runs on 1 to as many GPUs as there are. All rows are compared with fp64, and every GPU's
// spectrum (backward its dTimes) with that of the first, bit by bit.

#include <deque>
#include <optional>

#include "primitives/early_launch.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/launch.h"
#include "primitives/mma.cuh"
#include "primitives/peers.cuh"
#include "primitives/spin.cuh"
#include "problems/diffusion/gpus.cuh"

using namespace problems;
using namespace operators::diffusion;
using namespace primitives;

// ---- The steps of a block -----------------------------------------------------------------------

// Lesson 7's *clusters* once more: what a block does, step by step. It loads, multiplies, adds to
// the sum of all, meets, damps, multiplies again and stores. Each step is a function, and the
// kernels below put other things between them. Blocks may also have 64 columns.

constexpr int kMostWidth = 512;

// A block fetches the basis for its cluster in boxes of this many rows.
constexpr int kMulticastRows = 32;

// A block's threads: the producer's warpgroup and two of consumers.
constexpr int kOneLaunchThreads = 384;

// What the copy engine moves.
struct DiffusionMaps {
  CUtensorMap x, basis, mass, out, spectral;

  explicit DiffusionMaps(const DiffusionOperands& in)
      : x(tensor_map<__nv_bfloat16>(in.values, in.V, in.W, 64)),
        basis(tensor_map<__nv_bfloat16>(in.basis, in.V, in.E, kMulticastRows)),
        mass(tensor_map<__nv_bfloat16>(in.mass, in.V)),
        out(tensor_map<__nv_bfloat16>(in.result, in.V, in.W, 64)),
        spectral(tensor_map<__nv_bfloat16>(in.spectrum, in.E, in.W, 64)) {}
};

// What a kernel is compiled for: a spectrum of up to 128 rows, 64 for each consumer, of which each
// block of a cluster has kColumns columns, and kStages stages, each for 64 rows of the basis.
template <int kColumns_, int kStages_>
struct OneLaunchTile {
  static constexpr int kEigen = 128, kColumns = kColumns_, kStages = kStages_;
  static constexpr int kSteps = kEigen / kStepK, kBoxes = kColumns / kBoxCols;
  // The shares of a block's columns add up in the layout of the registers that hold them: quad
  // (w kColumns / 8 + j) 32 + l is elements 4 j to 4 j + 3 of lane l for rows 16 w to 16 w + 15.
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
  alignas(128) __nv_bfloat16 mass[Tile::kStages][64];
  StageBarriers<Tile::kStages> pipeline;  // whose stages are basis, x and mass
  Barrier spare, met;
};

#if HOPPER_CODE
// Of a block's threads: warps 1 to 3 of the producer's warpgroup, which are the spare ones, and the
// consumers.
constexpr int kSpareThreads = 96, kConsumers = 256;

// The barriers of bar.sync: of either consumer, of the spare warps, and of both consumers.
constexpr int kConsumerBarrier = 1, kSpareBarrier = 3, kConsumersBarrier = 4;

// Two neighbouring elements of a row-major matrix; zeros outside of it. cols and col are even.
__device__ inline float2 pair_at(const __nv_bfloat16* matrix, int rows, int cols, int row,
                                 int col) {
  if (row >= rows || col >= cols) return float2{};
  return __bfloat1622float2(
      *reinterpret_cast<const __nv_bfloat162*>(matrix + static_cast<size_t>(row) * cols + col));
}

// A block's work. Its cluster is number `group` of `groups`, and has `tiles` tiles of
// 64 rows: tile `group` and every groups-th after it, so that clusters read neighbouring rows. The
// block, one of those of `cluster`, has kColumns columns from cluster.rank kColumns on.
template <class Tile>
struct BlockWork : Tile {
  using Shared = OneLaunchShared<Tile>;
  static constexpr int kBasisBytes = sizeof(Shared::basis[0]) + sizeof(Shared::mass[0]);
  static constexpr int kFirstBytes = kBasisBytes + sizeof(Shared::x[0]);

  Shared& shared;
  const DiffusionMaps& maps;
  const DiffusionOperands& operands;
  BlockRow<> cluster;
  int group = blockIdx.y, groups = gridDim.y;
  int tiles;

  __device__ __forceinline__ BlockWork(char* bytes, const DiffusionMaps& maps,
                                       const DiffusionOperands& operands)
      : shared(*reinterpret_cast<Shared*>(bytes)), maps(maps), operands(operands) {
    tiles = (static_cast<int>((operands.V + 63) / 64) - group + groups - 1) / groups;
  }
  __device__ int row_of(int t) const { return 64 * (group + t * groups); }
  __device__ int col0() const { return cluster.rank * Tile::kColumns; }
};

// A sum of all blocks, where it is in memory. damp_spectrum() and store_d_times() call what they
// get, to take a thread's numbers of the sum: this, or what receives another GPU's sum.
struct Totals {
  float4* quads;

  template <int n, typename Place>
  __device__ __forceinline__ void operator()(float4 (&sums)[n], Place place) const {
    take(sums, place);
  }

  // sums[k] = quad number place(k)
  template <int n, typename Place>
  __device__ __forceinline__ void take(float4 (&sums)[n], Place place) const {
#pragma unroll
    for (int k = 0; k < n; ++k) sums[k] = __ldcg(quads + place(k));
  }
};

// Where the blocks of a rank have put their sum, and how many of them have come.
//
// What the blocks share in memory is zero before the first launch; a launch leaves it ready for
// the next one with the same template arguments and W, whatever V and the grid are. One launch at
// a time: two streams need one of each. arrivals (blocks of a cluster): for each rank, in the
// lower half how many have come, in the upper half how many launches there were. all_totals (2,
// blocks, kEigen, kColumns): launches use the two sums in turn, and zero the other one.
template <typename Work>
struct Meeting {
  unsigned* arrivals;
  unsigned start, groups;
  float4 *totals, *next_totals;

  // A block reads this before it arrives, and the number changes when the last one has arrived: all
  // blocks of a launch read the same.
  __device__ __forceinline__ Meeting(const Work& work, unsigned* all_arrivals, float4* all_totals)
      : arrivals(all_arrivals + work.cluster.rank), groups(work.groups) {
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

// What the L2 cache does with tile t of the basis in the first product. The second one takes the
// tiles from the last one back. The last kStages are in shared memory until then; of those before
// them the cache shall keep the last kCachedBytes of all clusters, and not what comes earlier.
constexpr int kCachedBytes = 32 << 20;
template <typename Work>
__device__ __forceinline__ uint64_t basis_policy(const Work& work, int t) {
  const int behind = work.tiles - Work::kStages - t;
  const int tile_bytes = 128 * work.operands.E;
  const int cached = kCachedBytes / tile_bytes / static_cast<int>(gridDim.y);
  if (work.tiles <= Work::kStages) return evict_normal();
  return behind > 0 && behind <= cached ? evict_last() : evict_first();
}

// A thread prepares what the block waits at. Both consumers of all blocks give a stage back.
template <typename Work>
__device__ __forceinline__ void prepare_barriers(const Work& work) {
  barrier_init(&work.shared.spare, kSpareThreads);
  barrier_init(&work.shared.met, 1);
  prepare(work.shared.pipeline, 2 * work.cluster.blocks);
}

// Starts the copies of a tile of x to a stage. x is not needed again, the basis is.
template <typename Work>
__device__ __forceinline__ void load_x(const Work& work, int t, int stage, Barrier* arrived) {
  for (int box = 0; box < Work::kBoxes; ++box) {
    load_box<false>(&work.shared.x[stage].boxes[box], &work.maps.x, 0, work.row_of(t),
                    work.col0() + kBoxCols * box, arrived, evict_first());
  }
}

// 64 rows of the basis with their masses: this block's boxes, for the whole cluster.
template <typename Work>
__device__ __forceinline__ void load_basis(const Work& work, int t, int stage, Barrier* arrived,
                                           uint64_t policy) {
  auto& shared = work.shared;
  const int row = work.row_of(t);
  tensor_load(shared.mass[stage], &work.maps.mass, row, arrived);
  for (int box = work.cluster.rank; box < Work::kSteps * 64 / kMulticastRows;
       box += work.cluster.blocks) {
    const int step = box * kMulticastRows / 64, within = box * kMulticastRows % 64;
    multicast_box<false>(shared.basis[stage][step].row(within), &work.maps.basis, 0, row + within,
                         kStepK * step, arrived, work.cluster.all(), policy);
  }
}

// Before the cluster has met: all bytes of the first tile are announced, and its x is loaded,
// which no other block gets.
template <typename Work>
__device__ __forceinline__ void put_first_x(const Work& work) {
  put_first(work.shared.pipeline, Work::kFirstBytes,
            [&](int stage, Barrier* arrived) { load_x(work, 0, stage, arrived); });
}

// The producer's thread loads the tiles of the first product, after put_first_x().
template <typename Work, class Writer>
__device__ __forceinline__ void load_forth(const Work& work, Writer& writer) {
  writer.announced = true;
  for (int t = 0; t < work.tiles; ++t) {
    writer.put(Work::kFirstBytes, [&](int stage, Barrier* arrived) {
      if (t > 0) load_x(work, t, stage, arrived);
      load_basis(work, t, stage, arrived, basis_policy(work, t));
    });
  }
}

// And then those of the second product, in reverse, without the last `kept`, which are still
// there.
template <typename Work, class Writer>
__device__ __forceinline__ void load_back(const Work& work, Writer writer, int kept) {
  for (int t = work.tiles - 1 - kept; t >= 0; --t) {
    writer.put(Work::kBasisBytes, [&](int stage, Barrier* arrived) {
      load_basis(work, t, stage, arrived, evict_first());
    });
  }
}

// ---- The spare warps ----------------------------------------------------------------------------

// Calls visit(i) for the quads of a rank's sum that are this thread's, of all spare ones.
template <typename Work, typename Visit>
__device__ __forceinline__ void visit_quads(const Work& work, Visit visit) {
  const int thread = kSpareThreads * work.group + static_cast<int>(threadIdx.x) - 32;
  for (int i = thread; i < Work::kQuads; i += kSpareThreads * work.groups) visit(i);
}

template <typename Work>
__device__ __forceinline__ void zero_totals(const Work& work, float4* totals) {
  visit_quads(work, [&](int i) { totals[i] = float4{}; });
}

// Backward: what a spare warp has of 8 columns of a rank, from column 8 j on, whose rows the three
// warps of a block share: every third quad. Of each the lane has two columns, and a row and the
// one 8 below it.
template <typename Work>
struct SpareColumns {
  static constexpr int kMine = (Work::kEigen / 16 + 2) / 3;
  const Work& work;
  int j, warp = threadIdx.x / 32 - 1, lane = threadIdx.x % 32;

  __device__ int col() const { return work.col0() + 8 * j + 2 * (lane % 4); }
  __device__ int row(int k) const { return 16 * (warp + 3 * k) + lane / 4; }
  // Whether there is a quad k: not all three have as many. In its place they read another one.
  __device__ bool has(int k) const { return warp + 3 * k < Work::kEigen / 16; }
  __device__ int quad(int k) const {
    return ((has(k) ? warp + 3 * k : 0) * Work::kColumns / 8 + j) * 32 + lane;
  }
  // These elements of a matrix (E, W); zeros outside of it.
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

// Backward: adds dSpectral to the sum of all.
template <typename Work>
__device__ __forceinline__ void add_d_spectral(const Work& work, float4* totals) {
  using Columns = SpareColumns<Work>;
#pragma unroll 1
  for (int j = work.group; j < Work::kColumns / 8; j += work.groups) {
    const Columns mine{work, j};
    float4 quads[Columns::kMine];
    mine.load(quads, work.operands.d_spectral);
#pragma unroll
    for (int k = 0; k < Columns::kMine; ++k) {
      if (mine.has(k)) atomicAdd(totals + mine.quad(k), quads[k]);
    }
  }
}

// Backward: dTimes, when all have added. What does not depend on the sum of all is loaded before.
// take(sums, quad)... loads that sum, in one term or, as dTimes is linear in it, in several, with
// fewer registers.
template <typename Work, typename... Take>
__device__ __forceinline__ void store_d_times(const Work& work, const Take&... take) {
  using Columns = SpareColumns<Work>;
  const DiffusionOperands& in = work.operands;
#pragma unroll 1
  for (int j = work.group; j < Work::kColumns / 8; j += work.groups) {
    const Columns mine{work, j};
    float4 factors[Columns::kMine];
    mine.load(factors, in.spectral);
#pragma unroll
    for (int k = 0; k < Columns::kMine; ++k) {
      const int row = mine.row(k);
      const float upper = row < in.E ? __bfloat162float(in.evalues[row]) : 0;
      const float lower = row + 8 < in.E ? __bfloat162float(in.evalues[row + 8]) : 0;
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
      *reinterpret_cast<uint32_t*>(in.d_times + mine.col()) = pack2<__nv_bfloat16>(all.x, all.y);
    }
  }
}

// ---- The consumers ------------------------------------------------------------------------------

// What a thread of a consumer holds of its 64 rows of the spectrum: its share, and
// exp(-evalue time) of the same elements.
template <typename Work>
struct SpectrumShare {
  Sum<Work::kColumns> sum;
  float factors[Work::kColumns / 2];
};

__device__ inline int consumer() { return static_cast<int>(threadIdx.x) / 128 - 1; }

template <typename Work>
__device__ __forceinline__ void damping_factors(const Work& work, SpectrumShare<Work>& share) {
  const DiffusionOperands& in = work.operands;
  const int row0 = 64 * consumer() + share.sum.row(0);
  const float upper = row0 < in.E ? __bfloat162float(in.evalues[row0]) : 0;
  const float lower = row0 + 8 < in.E ? __bfloat162float(in.evalues[row0 + 8]) : 0;
#pragma unroll
  for (int j = 0; j < Work::kColumns / 8; ++j) {
    const float2 times = pair_at(in.times, 1, in.W, 0, work.col0() + share.sum.col(4 * j));
    share.factors[4 * j] = damping(upper, times.x);
    share.factors[4 * j + 1] = damping(upper, times.y);
    share.factors[4 * j + 2] = damping(lower, times.x);
    share.factors[4 * j + 3] = damping(lower, times.y);
  }
}

// First product: this block's share of basis^T (mass x). The left factor is the basis, transposed,
// and forward multiplied by the masses. The last stages are kept for the second product.
template <Pass kPass, typename Work, class Reader>
__device__ __forceinline__ void project(const Work& work, SpectrumShare<Work>& share,
                                        Reader& reader) {
  for (int t = 0; t < work.tiles; ++t, reader.next()) {
    const int stage = reader.wait();
    auto left = work.shared.basis[stage][consumer()].load_transposed_fragments();
    if constexpr (kPass == Pass::forward) {
#pragma unroll
      for (int i = 0; i < 4 * kSlices; ++i) {
        unsigned& pair = left.slices[i / 4][i % 4];
        const __nv_bfloat16* const masses = work.shared.mass[stage] + left.k(i / 4, i % 4);
        pair = multiply2(pair, *reinterpret_cast<const unsigned*>(masses));
      }
    }
    share.sum.start_product(left, work.shared.x[stage], t > 0);
    wgmma_wait<0>();
    if (t + Work::kStages < work.tiles) reader.give_back();
  }
}

// The number of the quad of the thread's elements 4 j to 4 j + 3.
template <typename Work>
__device__ __forceinline__ int quad_of(int j) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  return ((4 * consumer() + warp) * Work::kColumns / 8 + j) * 32 + lane;
}

// Adds the share to the sum of all.
template <typename Work>
__device__ __forceinline__ void add_to_totals(const SpectrumShare<Work>& share, float4* totals) {
#pragma unroll
  for (int j = 0; j < Work::kColumns / 8; ++j) {
    const float* four = share.sum.elements + 4 * j;
    atomicAdd(totals + quad_of<Work>(j), make_float4(four[0], four[1], four[2], four[3]));
  }
}

// The consumers arrive, and wait until those of all blocks have added. Backward the block arrives
// when its spare warps have added, too.
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

// The spectrum, from the sum of all, is damped and becomes the right factor of the second product,
// in shared memory; forward the first group stores it, too.
template <Pass kPass, typename Work, typename Sums>
__device__ __forceinline__ void damp_spectrum(const Work& work, SpectrumShare<Work>& share,
                                              const Sums& totals) {
  auto& shared = work.shared;
  constexpr int kQuads = Work::kColumns / 8;
  float4 sums[kQuads];
  totals.take(sums, [&](int j) { return quad_of<Work>(j); });
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    float* four = share.sum.elements + 4 * j;
    const float* factor = share.factors + 4 * j;
    four[0] = factor[0] * sums[j].x;
    four[1] = factor[1] * sums[j].y;
    four[2] = factor[2] * sums[j].z;
    four[3] = factor[3] * sums[j].w;
  }
#pragma unroll
  for (int box = 0; box < Work::kBoxes; ++box) {
    share.sum.store(shared.second.spectrum[consumer()].boxes[box], kBoxCols * box,
                    [&](int i) { return share.sum.elements[i]; });
  }
  shared_fence();
  named_barrier(kConsumersBarrier, kConsumers);
  if (kPass == Pass::forward && work.group == 0 && threadIdx.x == 128) {
    for (int step = 0; step < Work::kSteps; ++step) {
      for (int box = 0; box < Work::kBoxes; ++box) {
        store_box<false>(&work.maps.spectral, 0, kStepK * step, work.col0() + kBoxCols * box,
                         &shared.second.spectrum[step].boxes[box], evict_normal());
      }
    }
    tensor_store_commit();
  }
}

// Second product, over the same tiles in reverse. A consumer takes every other stage, always the
// even ones or always the odd ones, so that it sees all phases of their barriers.
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
      above = __bfloat162float(shared.mass[stage][sum.row(0)]);
      below = __bfloat162float(shared.mass[stage][sum.row(2)]);
    }
#pragma unroll
    for (int step = 0; step < Work::kSteps; ++step) {
      sum.start_product(shared.basis[stage][step].rows(0), shared.second.spectrum[step], step > 0);
    }
    wgmma_wait<0>();
    if (thread == 0) tensor_store_wait_read<0>();
    named_barrier(kConsumerBarrier + consumer(), 128);  // the masses have been read, too
    // Only this consumer has read the stage. But two arrivals give one back, so both are made here.
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
        store_box<false>(&work.maps.out, 0, work.row_of(t), work.col0() + kBoxCols * box,
                         &shared.second.out[consumer()][box], policy);
      }
      tensor_store_commit();
    }
  }
  if (thread == 0) tensor_store_wait_read<0>();
}
#endif  // HOPPER_CODE

// ---- What a row launches ------------------------------------------------------------------------

/// Which kernels, by a GPU's number of vertices. Few of them: narrow blocks, so that tiles of 64
/// vertices keep more multiprocessors busy.
using Narrow = OneLaunchTile<64, 9>;
using Wide = OneLaunchTile<128, 6>;
inline bool is_narrow(int64_t rows, int64_t W) { return rows <= 32768 || W <= 64; }

/// The clusters of a kernel on each GPU.
template <class Tile>
struct Clusters {
  static constexpr int kBytes = sizeof(OneLaunchShared<Tile>);
  unsigned blocks;  // of a cluster
  int capacity;     // how many clusters a GPU holds

  template <typename Kernel>
  Clusters(Kernel* kernel, int gpus, int64_t W)
      : blocks(static_cast<unsigned>((W + Tile::kColumns - 1) / Tile::kColumns)) {
    on_each_gpu(gpus, [&](int) { allow_shared_bytes(kernel, kBytes); });
    capacity = resident_clusters(kernel, blocks, kOneLaunchThreads, kBytes);
  }
  /// None may wait for one that cannot start: all of them are there at the same time.
  unsigned count(int64_t rows) const { return persistent((rows + 63) / 64, capacity); }
  template <typename Kernel, typename... Arguments>
  void launch(Kernel* kernel, const DiffusionOperands& in, const Arguments&... arguments) const {
    launch_clusters(kernel, blocks, true, dim3(blocks, count(in.V)), kOneLaunchThreads, kBytes,
                    DiffusionMaps(in), in, arguments...);
  }
};

/// How far a row may be from fp64: lesson 7's bound, by how many vertices a block adds up.
template <Pass kPass, class Tile>
std::vector<Check> checks_of(const Mesh& mesh, const Clusters<Tile>& clusters) {
  const int64_t tiles = (mesh.most_rows() + 63) / 64, count = clusters.count(mesh.most_rows());
  return mesh.table().checks((tiles + count - 1) / count * 64, 0, kPass == Pass::forward ? 2 : 1,
                             1);
}

using bf16 = __nv_bfloat16;
using Shape = DiffusionShape;
using Operands = DiffusionOperands;

constexpr int kMostGpus = 8;

// ---- Fused exchange -----------------------------------------------------------------------------

// What a launch knows of all GPUs.
//
// inbox (4, gpus + 1, blocks, kQuads), one on each GPU, of quads of floats: what came from each GPU
// and, last, the sums of all. An empty place holds a NaN that arithmetic does not make, so a number
// is its own flag: no other flag follows it, no fence has to be waited for. Launches take the four
// in turn. Launch n empties that of n - 1, and n + 3 fills it again: by then n is over everywhere,
// for a GPU that is in n + 3 has received what each other GPU sent in n + 2, after its own n + 1
// had ended. (Three would do, but launch numbers wrap at 2^16.)
struct Gpus {
  int count, me;
  int pieces;                // into which a rank's sum is cut: no GPU has fewer clusters
  uint64_t patience;         // nanoseconds until one that waits gives up
  float4* inbox[kMostGpus];  // where this GPU sees it
  unsigned* silent;          // this GPU's own; 0, or 1 + the GPU that it has waited for in vain
};

#if HOPPER_CODE
// What a block gets is the sum over the blocks of all GPUs. When the blocks of one GPU have met,
// that GPU has its own sum, cut into gpus.pieces pieces, and the block of cluster p sends piece p.
//
// With two GPUs no more is needed. The piece goes into the other GPU's inbox, and every block reads
// both sums, its own GPU's and the one that comes, and adds them; a + b = b + a, to the bit. If G
// GPUs did this, G - 1 sums would leave each of them, and each block would read G. So from three on
// a piece is sent to one GPU only, `group` % G. Its block adds up the pieces of all and sends the
// sum round: 2 (G - 1) / G of a sum leave a GPU, whatever G is, in two journeys, and each block
// reads one sum.
template <typename Work>
struct GpuMeeting {
  const Work& work;
  const Meeting<Work>& own;
  const Gpus& gpus;

  __device__ bool are_two() const { return gpus.count == 2; }
  // What is in GPU `gpu`'s inbox from GPU `from`; the sums are from number gpus.count. `ago`: for
  // the launch before it is 1.
  __device__ float4* slot(int gpu, int from, int ago = 0) const {
    const int turn = ((own.start >> 16) - ago) & 3;
    return gpus.inbox[gpu] +
           ((turn * (gpus.count + 1) + from) * work.cluster.blocks + work.cluster.rank) *
               Work::kQuads;
  }
  // The GPU that adds up a piece.
  __device__ int adder(int piece) const { return are_two() ? gpus.me : piece % gpus.count; }
  __device__ int begin(int piece) const { return Work::kQuads * piece / gpus.pieces; }
  // begin(piece_of(quad)) <= quad < begin(piece_of(quad) + 1)
  __device__ int piece_of(int quad) const { return ((quad + 1) * gpus.pieces - 1) / Work::kQuads; }

  // Waits for quads k of the inbox, which are at place(k) and come from GPU from(k). Nothing is to
  // be waited for if place(k) is null. Looks at one of them until it has come, then at all.
  template <int n, typename Place, typename From>
  __device__ __forceinline__ void receive(float4 (&quads)[n], Place place, From from,
                                          Patience& patience) const {
#pragma unroll
    for (int k = 0; k < n; ++k) quads[k] = place(k) ? empty_quad() : float4{};
    for (;;) {
      float4* missing = nullptr;
      int gpu = 0;
#pragma unroll
      for (int k = n - 1; k >= 0; --k) {
        if (!is_whole(quads[k])) missing = place(k), gpu = from(k);
      }
      if (!missing) return;
      while (!is_whole(look_at_quad(missing))) {
        if (patience.ends(gpu)) return;
      }
#pragma unroll
      for (int k = 0; k < n; ++k) {
        if (!is_whole(quads[k])) quads[k] = look_at_quad(place(k));
      }
    }
  }

  __device__ float4* inbox() const { return slot(gpus.me, are_two() ? 1 - gpus.me : gpus.count); }

  // sums[k] = quad place(k) of this GPU's own sum; with three GPUs and more zero: what take_other()
  // receives has it then
  template <int n, typename Place>
  __device__ __forceinline__ void take_own(float4 (&sums)[n], Place place) const {
#pragma unroll
    for (int k = 0; k < n; ++k) sums[k] = float4{};
    if (are_two()) Totals{own.totals}.take(sums, place);
  }
  // sums[k] = quad place(k) of what the inbox gets, when it has come
  template <int n, typename Place>
  __device__ __forceinline__ void take_other(float4 (&sums)[n], Place place) const {
    float4* const from = inbox();
    // The adder may wait, too: it gives up first, and names the GPU that is silent.
    Patience patience{are_two() ? gpus.patience : 2 * gpus.patience, gpus.silent};
    receive(
        sums, [&](int k) { return from + place(k); },
        [&](int k) { return are_two() ? 1 - gpus.me : adder(piece_of(place(k))); }, patience);
  }
  template <int n, typename Place>
  __device__ __forceinline__ void take(float4 (&sums)[n], Place place) const {
    float4 mine[n];
    take_own(mine, place);
    take_other(sums, place);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      if (are_two()) add(sums[k], mine[k]);
    }
  }
};

// The consumers send the block's piece and, with three GPUs and more, add it up if it is theirs.
template <typename Work>
__device__ __forceinline__ void send_piece(const GpuMeeting<Work>& meeting) {
  const Gpus& gpus = meeting.gpus;
  const int group = meeting.work.group, me = gpus.me;
  if (group >= gpus.pieces) return;
  const int thread = static_cast<int>(threadIdx.x) - 128, adder = meeting.adder(group);
  Patience patience{gpus.patience, gpus.silent};
  for (int i = meeting.begin(group) + thread; i < meeting.begin(group + 1); i += kConsumers) {
    const float4 quad = __ldcg(meeting.own.totals + i);
    if (meeting.are_two()) {
      send_quad(meeting.slot(1 - me, me) + i, quad);
    } else if (adder != me) {
      send_quad(meeting.slot(adder, me) + i, quad);
    } else {
      float4 pieces[kMostGpus], sum = {};
      meeting.receive(
          pieces,
          [&](int gpu) {
            return gpu < gpus.count && gpu != me ? meeting.slot(me, gpu) + i : nullptr;
          },
          [](int gpu) { return gpu; }, patience);
#pragma unroll
      for (int gpu = 0; gpu < kMostGpus; ++gpu) {
        if (gpu < gpus.count) add(sum, gpu == me ? quad : pieces[gpu]);
      }
      for (int gpu = 0; gpu < gpus.count; ++gpu) {
        send_quad(meeting.slot(gpu, gpus.count) + i, sum);
      }
    }
  }
}

// The spare warps empty the inbox of the launch before, by the kind of store that filled it.
template <typename Work>
__device__ __forceinline__ void empty_inbox(const GpuMeeting<Work>& meeting) {
  for (int from = 0; from <= meeting.gpus.count; ++from) {
    float4* const slot = meeting.slot(meeting.gpus.me, from, 1);
    visit_quads(meeting.work, [&](int i) { send_quad(slot + i, empty_quad()); });
  }
}
#endif

// The kernel of lesson 7's *clusters*; on several GPUs their sums meet when the blocks of each
// have met. The first GPU alone adds dSpectral. Every GPU computes the whole spectrum and dTimes,
// of all vertices. Up to 14 registers spill in the code that waits for another GPU.
template <Pass kPass, class Tile, bool kSeveralGpus>
__global__ void __launch_bounds__(kOneLaunchThreads, 1)
    diffusion(const __grid_constant__ DiffusionMaps maps, const Operands operands,
              unsigned* arrivals, float4* totals, const __grid_constant__ Gpus gpus) {
#if HOPPER_CODE
  using Work = BlockWork<Tile>;
  extern __shared__ __align__(1024) char bytes[];
  const Work work(bytes, maps, operands);
  const int warp = warp_of_block();
  if (warp == 0 && elect_one()) prepare_barriers(work);
  start_next_kernel();
  wait_for_previous_kernel();
  const Meeting<Work> meeting(work, arrivals, totals);
  const GpuMeeting<Work> all{work, meeting, gpus};
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
      if constexpr (kSeveralGpus) empty_inbox(all);
      if constexpr (kPass == Pass::backward) {
        if (gpus.me == 0) add_d_spectral(work, meeting.totals);
        barrier_arrive(&work.shared.spare);
        if constexpr (kSeveralGpus) {
          store_d_times(
              work, [&](auto& sums, auto quad) { all.take_own(sums, quad); },
              [&](auto& sums, auto quad) { all.take_other(sums, quad); });
        } else {
          store_d_times(work, Totals{meeting.totals});
        }
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
    if constexpr (kSeveralGpus) {
      send_piece(all);
      damp_spectrum<kPass>(work, share, all);
    } else {
      damp_spectrum<kPass>(work, share, Totals{meeting.totals});
    }
    expand<kPass>(work, reader.back());
  }
#endif
}

// ---- NCCL ---------------------------------------------------------------------------------------

#if HAS_NCCL
// The kernel up to where its blocks meet: the sum of this GPU's vertices. The end of the kernel is
// the meeting. totals (blocks, kQuads) are zeros at first.
template <Pass kPass, class Tile>
__global__ void __launch_bounds__(kOneLaunchThreads, 1)
    sum_vertices(const __grid_constant__ DiffusionMaps maps, const Operands operands,
                 float4* totals, bool adds_d_spectral) {
#if HOPPER_CODE
  using Work = BlockWork<Tile>;
  extern __shared__ __align__(1024) char bytes[];
  const Work work(bytes, maps, operands);
  const int warp = warp_of_block();
  if (warp == 0 && elect_one()) prepare_barriers(work);
  start_next_kernel();
  wait_for_previous_kernel();
  totals += work.cluster.rank * Work::kQuads;
  if (warp == 0 && elect_one()) put_first_x(work);
  cluster_meet();

  if (warp < 4) {
    registers_shrink_to<56>();
    if (warp == 0) {
      if (!elect_one()) return;
      Writer writer(work.shared.pipeline);
      load_forth(work, writer);
    } else if (kPass == Pass::backward && adds_d_spectral) {
      add_d_spectral(work, totals);
    }
  } else {
    registers_grow_to<224>();
    Reader reader(work.shared.pipeline, work.cluster);
    SpectrumShare<Work> share;
    project<kPass>(work, share, reader);
    add_to_totals(share, totals);
  }
#endif
}

// And from there on, with the sum of all GPUs. The basis has to come again; and the next call finds
// zeros in `own`, this GPU's sum.
template <Pass kPass, class Tile>
__global__ void __launch_bounds__(kOneLaunchThreads, 1)
    expand_sums(const __grid_constant__ DiffusionMaps maps, const Operands operands, float4* totals,
                float4* own) {
#if HOPPER_CODE
  using Work = BlockWork<Tile>;
  extern __shared__ __align__(1024) char bytes[];
  const Work work(bytes, maps, operands);
  const int warp = warp_of_block();
  if (warp == 0 && elect_one()) prepare_barriers(work);
  start_next_kernel();
  wait_for_previous_kernel();
  totals += work.cluster.rank * Work::kQuads;
  if (warp == 0 && elect_one()) barrier_arrive(&work.shared.met);  // all have met: see sum_vertices
  cluster_meet();

  if (warp < 4) {
    registers_shrink_to<56>();
    if (warp == 0) {
      if (!elect_one()) return;
      load_back(work, Writer(work.shared.pipeline), 0);
    } else {
      zero_totals(work, own + work.cluster.rank * Work::kQuads);
      if constexpr (kPass == Pass::backward) store_d_times(work, Totals{totals});
    }
  } else {
    registers_grow_to<224>();
    SpectrumShare<Work> share;
    damping_factors(work, share);
    damp_spectrum<kPass>(work, share, Totals{totals});
    expand<kPass>(work, Reader(work.shared.pipeline, work.cluster));
  }
#endif
}
#endif  // HAS_NCCL

// ---- Rows --------------------------------------------------------------------------------------

struct Settings {
  uint64_t patience;  // nanoseconds
  bool silent;        // the last GPU is not launched
};

// Lesson 7's *clusters* on one GPU; on several the fused exchange, whose inboxes `make` allocates.
template <Pass kPass, class Tile, bool kSeveralGpus>
void add_diffusion(Mesh& mesh, const std::string& name, MakeInboxes make, Settings settings) {
  constexpr auto kernel = diffusion<kPass, Tile, kSeveralGpus>;
  DiffusionProblem& table = mesh.table();
  const int gpus = mesh.gpus();
  const Clusters<Tile> clusters(kernel, gpus, table.shape.W);
  struct State {
    OnEach<unsigned> arrivals, silent;
    OnEach<float4> totals;
    Inboxes inbox;
  };
  const auto state = std::make_shared<std::optional<State>>();
  const size_t blocks = clusters.blocks, quads = blocks * Tile::kQuads;
  const size_t inbox = kSeveralGpus ? 4 * (gpus + 1) * quads : 1;
  mesh.at_start([=] {
    state->emplace(State{{gpus, blocks}, {gpus, 1}, {gpus, 2 * quads}, make(gpus, inbox)});
  });
  const auto launch = [=, &mesh] {
    Gpus all{};
    all.count = gpus;
    all.patience = settings.patience;
    all.pieces = static_cast<int>(
        std::min(clusters.count(mesh.least_rows()), clusters.count(mesh.most_rows())));
    on_each_gpu(settings.silent ? gpus - 1 : gpus, [&](int gpu) {
      all.me = gpu;
      for (int peer = 0; peer < gpus; ++peer) all.inbox[peer] = (*state)->inbox(gpu, peer);
      all.silent = (*state)->silent[gpu];
      clusters.launch(kernel, mesh.operands(gpu), (*state)->arrivals[gpu], (*state)->totals[gpu],
                      all);
    });
  };
  const auto check = [=] {
    on_each_gpu(gpus, [&](int gpu) {
      unsigned silent = 0;
      CUDA_CHECK(cudaMemcpy(&silent, (*state)->silent[gpu], sizeof silent, cudaMemcpyDeviceToHost));
      if (silent == 0) return;
      fail(kDeviceCannot, "GPU %d has waited %llu ms for GPU %u, which does not answer", gpu,
           static_cast<unsigned long long>(settings.patience / 1000000), silent - 1);
    });
  };
  Kernel& row = table.problem.kernel(name, kSeveralGpus ? Role::ours : Role::baseline, launch);
  row.hopper_only().needs_shared(clusters.kBytes);
  row.checks = checks_of<kPass>(mesh, clusters);
  if (kSeveralGpus) over_gpus(mesh, row, check);
}

#if HAS_NCCL
template <Pass kPass, class Tile>
void add_nccl(Mesh& mesh, const std::shared_ptr<Nccl>& nccl) {
  constexpr auto sum = sum_vertices<kPass, Tile>;
  constexpr auto expand = expand_sums<kPass, Tile>;
  DiffusionProblem& table = mesh.table();
  const int gpus = mesh.gpus();
  const Clusters<Tile> clusters(sum, gpus, table.shape.W);
  const Clusters<Tile> again(expand, gpus, table.shape.W);
  const size_t quads = clusters.blocks * Tile::kQuads;
  const auto totals = std::make_shared<std::optional<OnEach<float4>>>();
  mesh.at_start([=] { totals->emplace(gpus, 2 * quads); });
  const auto launch = [=, &mesh] {
    std::vector<float*> own, sums;
    on_each_gpu(gpus, [&](int gpu) {
      float4* const totals_here = (**totals)[gpu];
      own.push_back(reinterpret_cast<float*>(totals_here));
      sums.push_back(reinterpret_cast<float*>(totals_here + quads));
      clusters.launch(sum, mesh.operands(gpu), totals_here, gpu == 0);
    });
    nccl->all_reduce(own, sums, 4 * quads);
    on_each_gpu(gpus, [&](int gpu) {
      float4* const totals_here = (**totals)[gpu];
      again.launch(expand, mesh.operands(gpu), totals_here + quads, totals_here);
    });
  };
  Kernel& row =
      table.problem.kernel("NCCL, " + std::to_string(gpus) + " GPUs", Role::library, launch);
  row.hopper_only().checks = checks_of<kPass>(mesh, clusters);
  over_gpus(mesh, row, [] {});
}
#endif  // HAS_NCCL

template <Pass kPass>
void add_one_gpu(Mesh& mesh) {
  const auto add = is_narrow(mesh.most_rows(), mesh.table().shape.W)
                       ? add_diffusion<kPass, Narrow, false>
                       : add_diffusion<kPass, Wide, false>;
  add(mesh, "one GPU", peer_inboxes, {});
}

template <Pass kPass>
void add_several_gpus(Mesh& mesh, [[maybe_unused]] const std::shared_ptr<Nccl>& nccl,
                      [[maybe_unused]] bool windows, bool peers, Settings settings) {
  const bool narrow = is_narrow(mesh.most_rows(), mesh.table().shape.W);
  const std::string gpus = ", " + std::to_string(mesh.gpus()) + " GPUs";
#if HAS_NCCL
  if (nccl) (narrow ? add_nccl<kPass, Narrow> : add_nccl<kPass, Wide>)(mesh, nccl);
#endif  // HAS_NCCL
  const auto add = narrow ? add_diffusion<kPass, Narrow, true> : add_diffusion<kPass, Wide, true>;
  if (peers) add(mesh, "fused exchange" + gpus, peer_inboxes, settings);
#if HAS_NCCL_WINDOWS
  if (windows) add(mesh, "NCCL window" + gpus, window_inboxes(nccl), settings);
#endif  // HAS_NCCL_WINDOWS
}

int main(int argc, char** argv) {
  Lesson lesson(
      argc, argv,
      {.name = "bonus_diffusion_gpus",
       .title = "spatial diffusion on a mesh that several GPUs share",
       .n_meaning = "V, vertices of the mesh",
       .n_gpu = 1048576,
       .n_cpu = 2700,
       .options = {{.name = "--eigen",
                    .meaning = "E, eigenvectors, at most 128",
                    .value = 128,
                    .multiple_of = 8,
                    .cpu = 72},
                   {.name = "--width",
                    .meaning = "W, features of a vertex, at most 512",
                    .value = 256,
                    .multiple_of = 8,
                    .cpu = 136},
                   {"--gpus", "GPUs that share the mesh, at most 8", 2},
                   {"--patience", "ms that a GPU waits for another one (CPU: 60000)", 2000}},
       .flags = {{"--part", "also one GPU alone with its part: the difference is the exchange"},
                 {"--silent", "leave out the last GPU, to see the others give up"}}});
  const int64_t V = lesson.n(), E = lesson.option("--eigen"), W = lesson.option("--width");
  if (E > 128 || W > kMostWidth) {
    fail(kBadUsage, "--eigen is at most 128, --width at most %d", kMostWidth);
  }
  const int64_t asked = lesson.option("--gpus"), there = gpu_count();
  if (lesson.given("--gpus") && asked > std::min<int64_t>(there, kMostGpus)) {
    fail(kDeviceCannot, "--gpus %lld: there are %lld, and at most %d can share a mesh",
         static_cast<long long>(asked), static_cast<long long>(there), kMostGpus);
  }
  // Each has a tile of 64 vertices at least.
  const int gpus = static_cast<int>(std::min({asked, there, (V + 63) / 64}));
  const bool peers = gpus > 1 && is_hopper() && enable_peer_access(gpus);
  const bool patient = lesson.on_cpu() && !lesson.given("--patience");
  const Settings settings = {
      .patience = 1000000 * static_cast<uint64_t>(patient ? 60000 : lesson.option("--patience")),
      .silent = lesson.flag("--silent")};

  std::shared_ptr<Nccl> nccl;
  bool windows = false;
#if HAS_NCCL
  nccl = std::make_shared<Nccl>(gpus);
  if (!nccl->missing().empty()) {
    lesson.note("NCCL's rows are left out: " + nccl->missing());
    nccl = nullptr;
  } else if (gpus > 1) {
    const std::string why = why_no_window(nccl);
    if (!why.empty()) lesson.note("NCCL's window is left out: " + why);
    windows = why.empty();
  }
#else
  if (!lesson.on_cpu()) lesson.note("NCCL's rows are left out: there was no nccl.h to build with.");
#endif  // HAS_NCCL
  if (gpus < asked) {
    lesson.note("On " + std::to_string(gpus) + " of " + std::to_string(asked) +
                " GPUs: there are no more, or no more tiles of 64 vertices.");
  }
  if (gpus > 1 && !peers) {
    lesson.note("The GPUs cannot write into each other's memory: no fused exchange.");
  }

  Cublas blas;
  std::deque<DiffusionProblem> tables;
  std::deque<Mesh> meshes;
  const auto add = [&]<Pass kPass>(int64_t vertices, int several) {
    DiffusionProblem& table = tables.emplace_back(lesson, blas, kPass, Shape{vertices, E, W});
    table.report_difference = [](double) {};
    add_one_gpu<kPass>(meshes.emplace_back(table, 1));
    if (several > 1) {
      add_several_gpus<kPass>(meshes.emplace_back(table, several), nccl, windows, peers, settings);
      table.problem.compare("fused exchange, " + std::to_string(several) + " GPUs", "one GPU",
                            "Fused exchange: % times as fast as one GPU.");
    }
  };
  add.operator()<Pass::forward>(V, gpus);
  add.operator()<Pass::backward>(V, gpus);
  if (lesson.flag("--part") && gpus > 1) {
    add.operator()<Pass::forward>(meshes.back().most_rows(), 1);
    add.operator()<Pass::backward>(meshes.back().most_rows(), 1);
  }
  return lesson.run();
}
