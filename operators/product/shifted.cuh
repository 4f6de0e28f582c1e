// C = A B of fp32 matrices in TF32 or 3xTF32 on Hopper, where rows are not aligned to 16 bytes: A
// and B are read where they lie. It is for few rows or few columns, where to copy a factor into
// aligned rows takes longer than to multiply it.
//
// The copy engine wants boxes that begin at multiples of 16 bytes, and rows of a matrix that are a
// multiple of 16 bytes apart. Every fourth row of floats begins at the same place within 16 bytes.
// So the rows 4 i + c, for one c, are a matrix that the engine can follow (ShiftedRows). Its boxes
// have up to three elements more than are wanted, before and after. So in shared memory the rows of
// a tile are shifted by 0 to 3 elements. mma.sync does not mind: a thread loads the elements of its
// fragments one by one, and begins later in a row that is shifted.
//
// Without care, lanes of a warp would meet in the same bank. So a fragment of A has rows that
// are shifted equally: 4 i + c for the same c. And which columns of B belong to one fragment
// follows from how the rows of B are shifted: see shifted_column().
//
// The depth is cut into slices, so that all multiprocessors have work. The blocks of a cluster have
// a slice each of the same tile, and each adds up an equal part of the tile. Where that is not
// enough, several clusters have slices of a tile. They leave their sums in memory, and the last one
// adds them up, always in the same order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "operators/product/plan.cuh"
#include "operators/product/split_tf32.cuh"
#include "primitives/row_parts.cuh"

namespace operators::product {

using namespace primitives;

/// A matrix (rows, cols) whose rows may begin at any element, as `classes` matrices. Matrix c has
/// row c and every so many-th row after it, in boxes of box_rows / classes rows. In it an element
/// is shift[c] further than its column says.
struct ShiftedRows {
  CUtensorMap maps[4];
  int shift[4];
  int classes;

  ShiftedRows(const float* matrix, int64_t rows, int64_t cols, int64_t stride, int of_classes,
              int box_rows, int box_cols, bool to_tf32)
      : classes(of_classes) {
    for (int c = 0; c < 4; ++c) {
      const int64_t row = c < classes && c < rows ? c : 0;
      const auto at = reinterpret_cast<uintptr_t>(matrix + row * stride);
      shift[c] = static_cast<int>(at % 16 / sizeof(float));
      const cuuint64_t extents[2] = {static_cast<cuuint64_t>(shift[c] + cols),
                                     static_cast<cuuint64_t>(ceil_div(rows - row, classes))};
      const cuuint64_t strides[1] = {static_cast<cuuint64_t>(classes * stride) * sizeof(float)};
      const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_cols),
                                 static_cast<cuuint32_t>(box_rows / classes)};
      maps[c] = encode_tensor_map(reinterpret_cast<const float*>(at / 16 * 16), 2, extents, strides,
                                  box, CU_TENSOR_MAP_SWIZZLE_NONE, to_tf32, Reads::often);
    }
  }
  /// Of how many classes the rows of a matrix are at least: 1, 2 or 4.
  static int classes_of(int64_t stride) {
    int classes = 1;
    while (classes * stride % 4 != 0) classes *= 2;
    return classes;
  }
};

/// A block has BM x BN sums, its warps WM x WN of them; a step takes BK of the depth. So many
/// blocks are to fit on a multiprocessor.
template <Math kMath_, int kBM, int kBN, int kRowsOfWarps, int kColsOfWarps, int kStagesAhead,
          int kBlocks>
struct ShiftedTile {
  static constexpr Math kMath = kMath_;
  static constexpr int BM = kBM, BN = kBN, BK = 32, kStages = kStagesAhead, kResident = kBlocks;
  static constexpr int kWarpsM = kRowsOfWarps, kWarpsN = kColsOfWarps;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int WM = BM / kWarpsM, WN = BN / kWarpsN;
  // How far rows are apart in shared memory. A fragment of A has 8 rows one after another, 4 banks
  // apart, and one of B 4 rows, 8 banks apart.
  static constexpr int kPitchA = BK + 4, kPitchB = BN + 8;
  static constexpr int kTileA = BM * kPitchA, kStage = kTileA + BK * kPitchB;  // floats
  static constexpr int kQuads = WM / 16 * (WN / 8);                            // of a thread
  /// Stages; and when these are done with, twice the sums. Then barriers.
  static constexpr int kFloats = std::max(kStages * kStage, 2 * BM * BN);
  static constexpr int kSharedBytes = 4 * kFloats + 8 * (kStages + 1);
  static_assert(WM % 32 == 0 && WN % 32 == 0 && kQuads % 8 == 0);
  static_assert(BM / 4 * kPitchA % 32 == 0 && BK / 4 * kPitchB % 32 == 0);  // boxes: 128 bytes
};

/// What a launch computes. A tile has `clusters` clusters of `of_cluster` blocks, each with a slice
/// of `steps` steps.
struct ShiftedProduct {
  ShiftedRows A, B;
  int a_rows;  ///< rows of A that a tile fetches: BM, or A's if these are fewer, in fours
  float* C;
  int64_t c_stride;
  ProductShape shape;
  int of_cluster, clusters, steps;
  float4* partial;    ///< (tiles, clusters, quads of a thread, threads)
  unsigned* arrived;  ///< of each rank of each tile: see is_last_block()
};

#if HOPPER_CODE
/// Which of a warp's 32 columns number n of its fragments are, n % 8 a lane's and n / 8 the
/// fragment's. The four rows that lanes read at the same time are shifted by their number times the
/// stride, and lie in other banks if the columns are these.
__device__ __forceinline__ int shifted_column(int n, int classes) {
  const int lane = n % 8, fragment = n / 8;
  return classes == 4 ? 4 * lane + fragment
         : classes == 2
             ? lane / 4 * 16 + lane / 2 % 2 * 4 + lane % 2 + fragment / 2 * 8 + fragment % 2 * 2
             : n;
}

/// What a block of a launch computes: the tile that begins at (row, col) of C, and of its depth
/// `steps` steps of BK from step `first` on.
struct ShiftedSlice {
  int tile, slice, row, col, first, steps;

  __device__ ShiftedSlice(const ShiftedProduct& of, int BM, int BN, int BK) {
    const int slices = of.of_cluster * of.clusters, across = ceil_div(of.shape.cols, BN);
    const int all = ceil_div(of.shape.depth, BK);
    tile = static_cast<int>(blockIdx.x) / slices, slice = static_cast<int>(blockIdx.x) % slices;
    row = tile / across * BM, col = tile % across * BN;
    first = min(slice * of.steps, all), steps = min(of.steps, all - first);
  }
};

/// Prepares `come` for add_shifted_slices(): how many bytes the others of the cluster will send.
template <class Tile>
__device__ __forceinline__ void expect_shifted_slices(Barrier* come, const ShiftedProduct& of) {
  const int share = Tile::kQuads / of.of_cluster * Tile::kThreads;
  barrier_arrive_expect(come, (of.of_cluster - 1) * share * static_cast<int>(sizeof(float4)));
}

/// Adds up the sums of all slices of a tile, of which a block has a part: store(quad, sum) is
/// called with the thread's quads of that part. `come` waits for what the others of the cluster
/// send.
template <class Tile, class Sum, class Store>
__device__ __forceinline__ void add_shifted_slices(const Sum& sum, float4* memory, Barrier* come,
                                                   const ShiftedProduct& of, const ShiftedSlice& at,
                                                   const Store& store) {
  constexpr int kThreads = Tile::kThreads, kInTile = Tile::kQuads * kThreads;
  const int thread = static_cast<int>(threadIdx.x), rank = at.slice % of.of_cluster;
  const int share = Tile::kQuads / of.of_cluster, first = rank * share;
  cluster_sync();  // in no block of the cluster anybody reads stages any more
#pragma unroll
  for (int q = 0; q < Tile::kQuads; ++q) {
    const auto& quad = sum[q / (Tile::WN / 8)][q % (Tile::WN / 8)];
    memory[q * kThreads + thread] = make_float4(quad[0], quad[1], quad[2], quad[3]);
  }
  shared_fence();
  __syncthreads();
  float4* const inbox = memory + kInTile;
  if (thread < of.of_cluster && thread != rank) {
    bulk_push(inbox + first * kThreads, memory + thread * share * kThreads,
              share * kThreads * static_cast<int>(sizeof(float4)), come, thread);
  }
  barrier_wait(come, 0);
  cluster_arrive();
  float4* const partial = of.partial + int64_t{at.tile} * of.clusters * kInTile + thread;
  for (int q = 0; q < share; ++q) {
    float4 all = {0, 0, 0, 0};
    for (int from = 0; from < of.of_cluster; ++from) {
      add(all, from == rank ? memory[(first + q) * kThreads + thread]
                            : inbox[(from * share + q) * kThreads + thread]);
    }
    if (of.clusters == 1) {
      store(first + q, all);
    } else {
      __stcg(partial + at.slice / of.of_cluster * kInTile + (first + q) * kThreads, all);
    }
  }
  if (of.clusters > 1 && is_last_block(of.arrived + at.tile * of.of_cluster + rank, of.clusters)) {
    for (int q = first; q < first + share; ++q) {
      float4 all = __ldcg(partial + q * kThreads);
#pragma unroll 4
      for (int from = 1; from < of.clusters; ++from) {
        add(all, __ldcg(partial + from * kInTile + q * kThreads));
      }
      store(q, all);
    }
  }
  cluster_wait();  // what was sent from here has come
}
#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    shifted_product(const __grid_constant__ ShiftedProduct of) {
#if HOPPER_CODE
  extern __shared__ __align__(128) float shifted_stages[];
  constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK;
  constexpr int kPitchA = Tile::kPitchA, kPitchB = Tile::kPitchB, kStages = Tile::kStages;
  constexpr bool kSplit = Tile::kMath == Math::split;
  Barrier* const full = reinterpret_cast<Barrier*>(shifted_stages + Tile::kFloats);
  Barrier* const come = full + kStages;
  const ShiftedSlice at(of, BM, BN, BK);

  const auto start = [&](int step) {  // one thread
    if (step >= at.steps) return;
    float* const to = shifted_stages + step % kStages * Tile::kStage;
    Barrier* const barrier = full + step % kStages;
    const int k = (at.first + step) * BK;
    barrier_arrive_expect(barrier,
                          static_cast<int>(sizeof(float)) * (of.a_rows * kPitchA + BK * kPitchB));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      tensor_load(to + c * (BM / 4 * kPitchA), of.A.maps + c, at.row / 4, k, barrier);
    }
    for (int c = 0; c < of.B.classes; ++c) {
      tensor_load(to + Tile::kTileA + c * (BK / of.B.classes * kPitchB), of.B.maps + c,
                  k / of.B.classes, at.col, barrier);
    }
  };

  // Where a thread finds its elements: in A those of rows 4 i + c, in B those of four fragments.
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = warp / Tile::kWarpsN * Tile::WM, warp_col = warp % Tile::kWarpsN * Tile::WN;
  const int row = lane / 4, k_of_lane = lane % 4, classes = of.B.classes;
  const int b_row = k_of_lane % classes * (BK / classes) + k_of_lane / classes;
  const int four_rows = 4 / classes * kPitchB;  // from a row of B to the fourth one below
  int a_at[4], b_at[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a_at[i] = (i * (BM / 4) + warp_row / 4 + row) * kPitchA + k_of_lane + of.A.shift[i];
    b_at[i] = Tile::kTileA + b_row * kPitchB + of.B.shift[k_of_lane % classes] + warp_col +
              shifted_column(8 * i + row, classes);
  }

  constexpr int kRows = Tile::WM / 16, kCols = Tile::WN / 8;
  float sum[kRows][kCols][4] = {};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage <= kStages; ++stage) barrier_init(full + stage, 1);
    barrier_init_fence();
    expect_shifted_slices<Tile>(come, of);
    for (int step = 0; step < kStages - 1; ++step) start(step);
  }
  for (int step = 0; step < at.steps; ++step) {
    __syncthreads();  // nobody reads the stage that is filled now
    if (threadIdx.x == 0) start(step + kStages - 1);
    const float* const stage = shifted_stages + step % kStages * Tile::kStage;
    barrier_wait(full + step % kStages, step / kStages % 2);
    // In 3xTF32 tensor cores sum only one step: see add_products() of portable/fp32_tiles.cuh.
    float of_step[kSplit ? kRows : 1][kSplit ? kCols : 1][4] = {};
#pragma unroll
    for (int k = 0; k < BK; k += 8) {
      unsigned a[kRows][4], a_low[kSplit ? kRows : 1][4];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int eight = 2 * i + e % 2;  // rows of the fragment
          const float value = stage[a_at[eight % 4] + eight / 4 * 8 * kPitchA + k + e / 2 * 4];
          if constexpr (kSplit) {
            const SplitTf32 split = split_tf32(value);
            a[i][e] = split.high, a_low[i][e] = split.low;
          } else {
            a[i][e] = __float_as_uint(value);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        const float* const b = stage + b_at[j % 4] + j / 4 * 32 + k / 4 * four_rows;
        const float b0 = b[0], b1 = b[four_rows];
        if constexpr (kSplit) {
          const SplitTf32 p0 = split_tf32(b0), p1 = split_tf32(b1);
          const unsigned f0 = is_infinite(p0.high) ? 0 : p0.high;
          const unsigned f1 = is_infinite(p1.high) ? 0 : p1.high;
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            mma_m16n8k8_tf32(of_step[i][j], a_low[i], f0, f1);
            mma_m16n8k8_tf32(of_step[i][j], a[i], p0.low, p1.low);
            mma_m16n8k8_tf32(of_step[i][j], a[i], p0.high, p1.high);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            mma_m16n8k8_tf32(sum[i][j], a[i], __float_as_uint(b0), __float_as_uint(b1));
          }
        }
      }
    }
    if constexpr (kSplit) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][j][e] += of_step[i][j][e];
        }
      }
    }
  }

  const auto store = [&](int quad, const float4& four) {
    const int i = quad / kCols, j = quad % kCols;
    const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int eight = 2 * i + e / 2;
      const int at_row = at.row + warp_row + eight / 4 * 32 + 4 * row + eight % 4;
      const int at_col = at.col + warp_col + j / 4 * 32 +
                         shifted_column(j % 4 * 8 + 2 * k_of_lane + e % 2, classes);
      if (at_row < of.shape.rows && at_col < of.shape.cols) {
        of.C[at_row * of.c_stride + at_col] = values[e];
      }
    }
  };
  add_shifted_slices<Tile>(sum, reinterpret_cast<float4*>(shifted_stages), come, of, at, store);
#endif
}

/// The costs of such a product, fitted to shapes drawn at random on an H200. Cycles are those of a
/// multiprocessor.
struct ShiftedCosts {
  double start;      ///< microseconds until the first data and after the last
  double line;       ///< cycles to fetch 128 bytes
  double aligned_b;  ///< the part of that which it takes in B, where its rows are aligned
  double multiply;   ///< cycles for 2^10 multiply-adds
  double least;      ///< cycles of a step
  double unequal;    ///< how much multiprocessors with more blocks than others count
  double memory;     ///< of a byte's time at the memory's rate
  double handover;   ///< microseconds of sums that go through memory
  double piece;      ///< the same for 2^10 sums that a block reads of those
  double share;      ///< the same for 2^10 sums of a tile, which a cluster adds up
  double store;      ///< microseconds for 2^20 elements of C
};
inline constexpr ShiftedCosts kShiftedTf32Costs = {.start = 3.78,
                                                   .line = 5.05,
                                                   .aligned_b = 0.213,
                                                   .multiply = 2.05,
                                                   .least = 1170,
                                                   .unequal = 0.617,
                                                   .memory = 0.987,
                                                   .handover = 1.84,
                                                   .piece = 0.372,
                                                   .share = 0.243,
                                                   .store = 7.6};
inline constexpr ShiftedCosts kShiftedSplitCosts = {.start = 2.62,
                                                    .line = 8.73,
                                                    .aligned_b = 0.0505,
                                                    .multiply = 9.92,
                                                    .least = 1630,
                                                    .unequal = 0.948,
                                                    .memory = 0.321,
                                                    .handover = 1.84,
                                                    .piece = 0.44,
                                                    .share = 0.335,
                                                    .store = 5.67};

/// How a tile's depth is cut: into slices of `steps` steps for the blocks of `clusters` clusters.
struct ShiftedPlan {
  int of_cluster, clusters, steps;
  int64_t tiles;
};

/// How long a product should take so. `alone` clusters leave each multiprocessor no more than one
/// block.
template <class Tile>
double shifted_microseconds(const ProductShape& shape, bool aligned_b, const ShiftedPlan& plan,
                            int alone) {
  constexpr const ShiftedCosts& kCost =
      Tile::kMath == Math::split ? kShiftedSplitCosts : kShiftedTf32Costs;
  constexpr double kSums = Tile::BM * Tile::BN / 1024.0;
  const double elements = 1.0 * shape.rows * shape.cols;
  // What lies outside of a matrix is not fetched.
  const double rows = 1.0 * shape.rows / ceil_div(shape.rows, Tile::BM);
  const double cols = 1.0 * shape.cols / ceil_div(shape.cols, Tile::BN);
  const double lines = rows * Tile::kPitchA / 32 + Tile::BK *
                                                       std::min(1.0 * Tile::kPitchB, cols + 4) /
                                                       32 * (aligned_b ? kCost.aligned_b : 1);
  const double mean = std::max(1.0, 1.0 * plan.tiles * plan.clusters / alone);  // of blocks
  const double blocks = mean + kCost.unequal * (std::ceil(mean) - mean);
  const auto cubed = [](double cycles) { return cycles * cycles * cycles; };
  const double step =
      std::cbrt(cubed(blocks * lines * kCost.line) +
                cubed(blocks * kSums * Tile::BK * kCost.multiply) + cubed(kCost.least));
  const double bytes = 4 * (1.0 * (shape.rows + shape.cols) * shape.depth + elements);
  const double in_memory =
      plan.clusters == 1 ? 0
                         : kCost.handover + kCost.piece * plan.clusters * kSums / plan.of_cluster;
  return kCost.start +
         std::hypot(plan.steps * step / cycles(), kCost.memory * bytes / memory_rate()) +
         in_memory + kCost.share * kSums + kCost.store * elements / (1 << 20);
}

/// How many clusters of so many blocks the device holds at a time.
template <class Tile, unsigned kBlocks>
int shifted_clusters_that_fit() {
  return fact_of_device([] {
    allow_shared_bytes(shifted_product<Tile>, Tile::kSharedBytes);
    return clusters_that_fit(shifted_product<Tile>, kBlocks, Tile::kThreads, Tile::kSharedBytes);
  });
}

/// The ways to compute a product so, with clusters of 2, 4 and 8, each with as many of them for
/// a tile as should be the fastest.
struct ShiftedWays {
  Memory<float> A, B, C;
  int64_t a_stride, b_stride, c_stride;
  ProductShape shape;
  cudaStream_t stream;

  template <class Tile>
  void offer(Ways& ways, SharedSums& sums) const {
    offer<Tile>(ways, sums, 2, shifted_clusters_that_fit<Tile, 2>());
    offer<Tile>(ways, sums, 4, shifted_clusters_that_fit<Tile, 4>());
    offer<Tile>(ways, sums, 8, shifted_clusters_that_fit<Tile, 8>());
  }

  template <class Tile>
  void launch(const ShiftedPlan& plan, const Exchange& exchange) const {
    constexpr bool kRounds = Tile::kMath == Math::tf32;
    // Where A has fewer rows than a tile, the copy engine would write zeros, and take longer.
    const int a_rows = std::min(Tile::BM, 4 * ceil_div(shape.rows, 4));
    const ShiftedProduct product = {
        {A, shape.rows, shape.depth, a_stride, 4, a_rows, Tile::kPitchA, kRounds},
        {B, shape.depth, shape.cols, b_stride, ShiftedRows::classes_of(b_stride), Tile::BK,
         Tile::kPitchB, kRounds},
        a_rows,
        C,
        c_stride,
        shape,
        plan.of_cluster,
        plan.clusters,
        plan.steps,
        reinterpret_cast<float4*>(exchange.partial),
        exchange.ended};
    allow_shared_bytes(shifted_product<Tile>, Tile::kSharedBytes);
    const auto clusters = static_cast<unsigned>(plan.tiles * plan.clusters);
    launch_clusters_on(stream, shifted_product<Tile>, static_cast<unsigned>(plan.of_cluster), false,
                       clusters * static_cast<unsigned>(plan.of_cluster), Tile::kThreads,
                       Tile::kSharedBytes, product);
  }

 private:
  template <class Tile>
  void offer(Ways& ways, SharedSums& sums, int of_cluster, int fit) const {
    const int64_t tiles = int64_t{ceil_div(shape.rows, Tile::BM)} * ceil_div(shape.cols, Tile::BN);
    const int depth = ceil_div(shape.depth, Tile::BK), alone = std::max(1, fit / Tile::kResident);
    ShiftedPlan plan = {};
    double microseconds = INFINITY;
    // More clusters that have as many steps are no faster, nor are more than the handover is worth.
    for (int clusters = 1; clusters <= fit / tiles && of_cluster * clusters <= depth; ++clusters) {
      const int steps = ceil_div(depth, of_cluster * clusters);
      if (steps == plan.steps) continue;
      const ShiftedPlan each = {of_cluster, clusters, steps, tiles};
      const double would = shifted_microseconds<Tile>(shape, b_stride % 4 == 0, each, alone);
      if (would > 1.3 * microseconds) break;
      if (would < microseconds) microseconds = would, plan = each;
    }
    if (plan.clusters == 0) return;
    const bool in_memory = plan.clusters > 1;
    const WayId id = way_id(
        {static_cast<int64_t>(Divided::shifted), Tile::BM, Tile::BN, of_cluster, plan.clusters});
    const bool wanted = ways.offer(microseconds, id, [&] {
      const std::string name = std::string(Tile::kMath == Math::split ? "3xTF32" : "TF32") +
                               " by mma.sync, rows as they lie; tile " + std::to_string(Tile::BM) +
                               " x " + std::to_string(Tile::BN) +
                               "; slices: " + std::to_string(of_cluster * plan.clusters) +
                               "; of a cluster: " + std::to_string(of_cluster);
      return Way{name, microseconds,
                 [self = *this, sums, plan] {
                   self.template launch<Tile>(plan, sums.exchange(plan.clusters > 1));
                 },
                 Tile::kSharedBytes};
    });
    if (!wanted) return;
    sums.needs(ways, in_memory ? static_cast<size_t>(tiles * of_cluster) : 0,
               in_memory ? static_cast<size_t>(tiles * plan.clusters * Tile::BM * Tile::BN) : 0);
  }
};

}  // namespace operators::product
