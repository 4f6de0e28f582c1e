// Lesson 8's *associated*, for compute capability 8.0 and newer: by mma.sync and cp.async, forward
// and backward, for any V and W, and E up to 256. What is launched before and after is in
// small_products.cuh, and how these are launched in portable.cuh.
//
// A block's columns of x, M1 and M2 stay on chip, and Gr and Gi stream through it. Long rows are
// cut into boxes of 64 columns, each a tile of its own, swizzled. What E and W do not fill is zero.
#pragma once

#include "operators/gradients/gradients.h"
#include "operators/product/portable/mma_tiles.cuh"
#include "primitives/approximate.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/fragments.cuh"
#include "primitives/launch.h"

namespace operators::gradients {

using namespace primitives;
using bf16 = __nv_bfloat16;

inline constexpr int kBoxSide = 64, kBoxElements = kBoxSide * kBoxSide;
__host__ __device__ constexpr int boxes_of(int64_t extent) {
  return static_cast<int>(ceil_div(extent, kBoxSide));
}

// A warp's sums, WV x WN each, of xr, xi, ar and ai.
template <int WV, int WN>
struct WarpGradients {
  Sums<WV, WN> xr = {}, xi = {}, ar = {}, ai = {};
};

// xr += Gr x, xi += Gi x, ar += Gr M1 - Gi M2, ai += Gi M1 + Gr M2 for 64 of the inner dimension:
// all six products from two left factors. The warp's results start at (row, col). right_tiles are
// those of x, M1 and M2, 64 rows of kCols columns each.
template <int kCols, int WV, int WN>
__device__ __forceinline__ void add_box(WarpGradients<WV, WN>& sums, const bf16* Gr_tile,
                                        const bf16* Gi_tile, const bf16* right_tiles, int row,
                                        int col) {
  constexpr int kNext = kBoxSide * kCols;
#pragma unroll
  for (int k = 0; k < kBoxSide; k += 16) {
    unsigned gr[WV / 16][4], gi[WV / 16][4], minus_gi[WV / 16][4], right[WN / 16][4];
    load_left<kBoxSide>(gr, Gr_tile, row, k);
    load_left<kBoxSide>(gi, Gi_tile, row, k);
    negate(minus_gi, gi);
    load_right<kCols>(right, right_tiles, k, col);  // x
    add_product(sums.xr, gr, right);
    add_product(sums.xi, gi, right);
    load_right<kCols>(right, right_tiles + kNext, k, col);  // M1
    add_product(sums.ar, gr, right);
    add_product(sums.ai, gi, right);
    load_right<kCols>(right, right_tiles + 2 * kNext, k, col);  // M2
    add_product(sums.ar, minus_gi, right);
    add_product(sums.ai, gr, right);
  }
}

// Starts the copies of columns w0 to w0 + kCols - 1 of x, M1 and M2, as add_box takes them.
template <int kCols, int kThreads>
__device__ void copy_right_factors(bf16* to, const GradientsOperands& in, const bf16* M, int w0) {
  for (int e = 0; e < in.E; e += kBoxSide) {
    for (const bf16* from : {in.x, M, M + static_cast<size_t>(in.E) * in.W}) {
      copy_swizzled<kBoxSide, kCols, kThreads>(to, from, e, w0, in.E, in.W);
      to += kBoxSide * kCols;
    }
  }
}

// CopiesAhead with a single stage, for a block that has no room for two: it waits for the copies of
// each step.
template <class Copy>
class CopiesInTurn {
 public:
  __device__ explicit CopiesInTurn(const Copy& copy) : copy_(copy) {}
  __device__ int next() {
    __syncthreads();  // all have read the step before
    copy_(step_);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    return step_++;
  }

 private:
  const Copy& copy_;
  int step_ = 0;
};
template <int kStages, class Copy>
__device__ auto copies_by(const Copy& copy) {
  if constexpr (kStages == 1) {
    return CopiesInTurn<Copy>(copy);
  } else {
    return copies_ahead<kStages>(copy);
  }
}

// What a thread copies of Gr and Gi, box after box of kRows rows and 64 columns, and from tile to
// tile of kRows rows: pieces of 16 bytes, all in the same columns of a box.
template <int kRows, int kThreads>
class TangentCopies {
 public:
  // From `row0` on, and then each time `tile_step` rows further on.
  __device__ TangentCopies(const GradientsOperands& in, int64_t row0, int64_t tile_step)
      : Gr_(in.Gr + (row0 + row()) * in.E + col()),
        Gi_(in.Gi + (row0 + row()) * in.E + col()),
        next_row_(int64_t{kStep} * in.E),
        next_tile_(tile_step * in.E - boxes_of(in.E) * kBoxSide),
        tile_step_(tile_step),
        rows_left_(in.V - row0 - row()),
        E_(in.E) {}

  // Starts the copies of a box to tiles of Gr and Gi, and goes on to the next one.
  __device__ __forceinline__ void start(bf16* Gr_tile, bf16* Gi_tile) {
    const int64_t left = box_ + col() < E_ ? rows_left_ : 0;
    const int inside = left < kRows ? static_cast<int>(left) : kRows;
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
      const int64_t from = r / kStep * next_row_;
      copy_async<16>(Gr_tile + to_ + r * kBoxSide, Gr_ + from, r < inside);
      copy_async<16>(Gi_tile + to_ + r * kBoxSide, Gi_ + from, r < inside);
    }
    advance(kBoxSide);
    box_ += kBoxSide;
    if (box_ < E_) return;
    box_ = 0;
    advance(next_tile_);
    rows_left_ -= tile_step_;
  }

 private:
  static constexpr int kPieces = kBoxSide / 8, kStep = kThreads / kPieces;
  static_assert(kStep % 8 == 0 && kRows % kStep == 0);
  __device__ static int row() { return static_cast<int>(threadIdx.x) / kPieces; }
  __device__ static int col() { return static_cast<int>(threadIdx.x) % kPieces * 8; }
  __device__ void advance(int64_t by) { Gr_ += by, Gi_ += by; }

  const bf16 *Gr_, *Gi_;
  int64_t next_row_, next_tile_, tile_step_, rows_left_;  // rows_left_: from the thread's first on
  int E_, box_ = 0;                                       // box_: its first column
  const int to_ = swizzle<kBoxSide>(row(), col());
};

// A block has kColumns columns of x, M1 and M2, all E rows, which stay. It has kStageCount stages,
// each with a 64 x 64 tile of Gr and one of Gi. A warp has kRows x 32 results of a tile. With
// kStagesResults these have a staging area, on their way to memory.
template <int kColumns, int kRows, int kStageCount, bool kStagesResults = true>
struct PortableForward {
  static constexpr bool kHeld = false, kStaged = kStagesResults;
  static constexpr int BV = kBoxSide, BN = kColumns, WV = kRows, kStages = kStageCount;
  static constexpr int kThreads = 128;
  static_assert(kThreads / 32 == BV / WV * (BN / 32));
  static constexpr int64_t shared_bytes(int64_t E) {
    return (3 * static_cast<int64_t>(boxes_of(E)) * kBoxSide * BN + kStages * 2 * kBoxElements +
            (kStaged ? kBoxSide * BN : 0)) *
           sizeof(bf16);
  }
};

// Computes out = tanh(xr ar + xi ai). As many blocks as fit on the GPU stay, each with its columns
// of x, M1 and M2, and take tile after tile of 64 rows of Gr and Gi. Blocks with the columns of the
// same rows run at the same time, so Gr and Gi come from memory once. One lane has all of an
// element, with wide tiles in 128 registers of sums. So xr and xi need not be rounded.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, 2)
    associated_features(GradientsOperands in, const bf16* M) {
  constexpr int BN = Tiles::BN, WV = Tiles::WV, kStages = Tiles::kStages;
  extern __shared__ __align__(128) bf16 tiles[];
  const int warp = threadIdx.x / 32, boxes = boxes_of(in.E), w0 = blockIdx.x * BN;
  const int row = warp / (BN / 32) * WV, col = warp % (BN / 32) * 32;
  bf16* right_tiles = tiles;
  bf16* stages = right_tiles + 3 * boxes * kBoxSide * BN;
  bf16* staging = stages + kStages * 2 * kBoxElements + warp * WV * 32;
  const int64_t tile_count = ceil_div(in.V, kBoxSide);
  const auto stage_of = [&](int step) { return stages + step % kStages * 2 * kBoxElements; };
  const int64_t tile_step = int64_t{kBoxSide} * gridDim.y;
  TangentCopies<kBoxSide, Tiles::kThreads> copies(in, int64_t{kBoxSide} * blockIdx.y, tile_step);
  const int steps = static_cast<int>(ceil_div(tile_count - blockIdx.y, gridDim.y)) * boxes;
  const auto copy_step = [&](int step) {
    if (step < steps) copies.start(stage_of(step), stage_of(step) + kBoxElements);
  };

  // These copies are in one group with those of step 0, so the first next() waits for them, too.
  copy_right_factors<BN, Tiles::kThreads>(right_tiles, in, M, w0);
  auto ahead = copies_ahead<kStages>(copy_step);
  const product::MmaResults<bf16> out{in.out, in.W, static_cast<int>(in.V), in.W};
  for (int64_t tile = blockIdx.y; tile < tile_count; tile += gridDim.y) {
    WarpGradients<WV, 32> sums;
    for (int box = 0; box < boxes; ++box) {
      const bf16* stage = stage_of(ahead.next());
      add_box<BN>(sums, stage, stage + kBoxElements, right_tiles + 3 * box * kBoxSide * BN, row,
                  col);
    }
    const auto result = [&](int i, int j) {
      const float2 xr = pair_of(sums.xr, i, j), xi = pair_of(sums.xi, i, j);
      const float2 ar = pair_of(sums.ar, i, j), ai = pair_of(sums.ai, i, j);
      return pack2<bf16>(tanh_approximate(xr.x * ar.x + xi.x * ai.x),
                         tanh_approximate(xr.y * ar.y + xi.y * ai.y));
    };
    if constexpr (Tiles::kStaged) {
      store_results<WV, 32>(staging, in.out, tile * kBoxSide + row, w0 + col, in.V, in.W, result);
    } else {
      out.template store<WV, 32>(static_cast<int>(tile) * kBoxSide + row, w0 + col, result);
    }
  }
}

// A block has kColumns columns of x, M1 and M2, which stay. It has stages, each with kVertices rows
// of Gr, of Gi and of these columns of dOut. Beside the stages it has P, Q, R and S of one tile.
// The first kMakers warps compute kRowsOfWarp x kColsOfWarp of each of these four. Every warp owns
// 32 x 32 of each of the three sums, of kEigen rows in all.
template <int kEigen, int kVertices, int kColumns, int kRowsOfWarp, int kColsOfWarp,
          int kStageCount>
struct PortableBackward {
  static constexpr bool kHeld = false;
  static constexpr int BV = kVertices, BN = kColumns, WV = kRowsOfWarp, WN = kColsOfWarp;
  static constexpr int kStages = kStageCount, kMaxE = kEigen;
  static constexpr int kThreads = kMaxE / 32 * (BN / 32) * 32, kMakers = BV / WV * (BN / WN);
  static constexpr int kBlocks = kThreads > 128 ? 1 : 2;  // on a multiprocessor
  static_assert(kMakers <= kThreads / 32);
  __host__ __device__ static constexpr int64_t stage(int64_t E) {  // elements
    return BV * (2 * static_cast<int64_t>(boxes_of(E)) * kBoxSide + BN);
  }
  static constexpr int64_t shared_bytes(int64_t E) {
    return (3 * static_cast<int64_t>(boxes_of(E)) * kBoxSide * BN + kStages * stage(E) +
            4 * BV * BN) *
           sizeof(bf16);
  }
};

// 1 - tanh(u)^2. Where |tanh(u)| is near 1, that difference would have hardly a correct digit. With
// e = exp(-2 |u|) it is equal to 4 e / (1 + e)^2, and this quotient has a small relative error for
// all u. 4 e is computed as a power of 2. A result below 2^-126 becomes 0.
__device__ inline float slope_of_tanh(float u) {
  constexpr float kLog2E = 1.44269504f;
  const float four_e = exp2_approximate(2 - 2 * kLog2E * fabsf(u));
  const float inverse = reciprocal_approximate(1 + four_e / 4);
  return inverse * (four_e * inverse);
}

// Computes P, Q, R and S from a warp's sums and dOut, and writes them, rounded, into their tiles in
// shared memory. These lie one after the other, in this order.
template <int BV, int BN, int WV, int WN>
__device__ __forceinline__ void leave_products(bf16* products, const WarpGradients<WV, WN>& sums,
                                               bf16* d_out_tile, int row, int col) {
#pragma unroll
  for (int i = 0; i < WV / 8; ++i) {
#pragma unroll
    for (int j = 0; j < WN / 8; ++j) {
      const float2 factors[] = {pair_of(sums.xr, i, j), pair_of(sums.xi, i, j),
                                pair_of(sums.ar, i, j), pair_of(sums.ai, i, j)};
      const auto& [xr, xi, ar, ai] = factors;
      float2 g = unpack2(*pair_in<BN>(d_out_tile, row, col, i, j));
      g.x *= slope_of_tanh(xr.x * ar.x + xi.x * ai.x);
      g.y *= slope_of_tanh(xr.y * ar.y + xi.y * ai.y);
#pragma unroll
      for (int which = 0; which < 4; ++which) {
        *pair_in<BN>(products + which * BV * BN, row, col, i, j) =
            pack2<bf16>(g.x * factors[which].x, g.y * factors[which].y);
      }
    }
  }
}

// A warp's 32 x 32 elements of each sum over V.
struct SumsOverVertices {
  Sums<32, 32> dM1 = {}, dM2 = {}, D = {};
};

// Adds what BV vertices contribute to a warp's sums, Gr^T [P | Q | R] and Gi^T [Q | -P | S] for
// [dM1 | dM2 | D]. In the tiles of Gr and Gi the warp's part starts at column `row`, in the tiles
// of P, Q, R and S at column `col`. mma.sync can only add a product. So for - Gi^T P the fragments
// of Gi change their signs.
template <int BV, int BN>
__device__ __forceinline__ void add_vertices(SumsOverVertices& sums, const bf16* Gr_tile,
                                             const bf16* Gi_tile, const bf16* products, int row,
                                             int col) {
  const auto load = [&](unsigned(&right)[2][4], int which, int k) {
    load_right<BN>(right, products + which * BV * BN, k, col);
  };
#pragma unroll
  for (int k = 0; k < BV; k += 16) {
    unsigned gr[2][4], gi[2][4], minus_gi[2][4], right[2][4];
    load_left_transposed<kBoxSide>(gr, Gr_tile, row, k);
    load_left_transposed<kBoxSide>(gi, Gi_tile, row, k);
    negate(minus_gi, gi);
    load(right, 0, k);  // P
    add_product(sums.dM1, gr, right);
    add_product(sums.dM2, minus_gi, right);
    load(right, 1, k);  // Q
    add_product(sums.dM1, gi, right);
    add_product(sums.dM2, gr, right);
    load(right, 2, k);  // R
    add_product(sums.D, gr, right);
    load(right, 3, k);  // S
    add_product(sums.D, gi, right);
  }
}

// Writes partials (slices, 3, E, W): for each slice dM1, dM2 and D, summed up over every
// gridDim.y-th tile of BV vertices. Block (i, slice) owns BN columns of x, M1, M2 and of the sums.
// The tiles of Gr and Gi that make P, Q, R and S are the left factors of the sums, too, transposed
// by ldmatrix on the way to the registers. So a block copies each tile once. P, Q, R and S exist
// for one tile at a time, in shared memory. A warp's products are read by others, so a barrier
// stands between them and the sums. The barrier in next() stands between the sums and the next
// tile's products.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    accumulate_backward(GradientsOperands in, const bf16* M, float* partials) {
  constexpr int BV = Tiles::BV, BN = Tiles::BN, WV = Tiles::WV, WN = Tiles::WN;
  constexpr int kStages = Tiles::kStages, kThreads = Tiles::kThreads;
  extern __shared__ __align__(128) bf16 tiles[];
  const int boxes = boxes_of(in.E), w0 = blockIdx.x * BN;
  const int64_t tile_count = ceil_div(in.V, BV);
  bf16* right_tiles = tiles;
  bf16* stages = right_tiles + 3 * boxes * kBoxSide * BN;
  bf16* products = stages + kStages * Tiles::stage(in.E);
  struct Stage {
    bf16 *Gr, *Gi, *d_out;  // Gr and Gi in boxes of 64 columns
  };
  const auto stage_of = [&](int step) {
    bf16* Gr = stages + step % kStages * Tiles::stage(in.E);
    bf16* Gi = Gr + boxes * kBoxSide * BV;
    return Stage{Gr, Gi, Gi + boxes * kBoxSide * BV};
  };
  TangentCopies<BV, kThreads> tangents(in, int64_t{BV} * blockIdx.y, int64_t{BV} * gridDim.y);
  const auto copy_step = [&](int step) {
    const int64_t tile = blockIdx.y + static_cast<int64_t>(step) * gridDim.y;
    if (tile >= tile_count) return;
    const Stage to = stage_of(step);
    for (int box = 0; box < boxes; ++box) {
      tangents.start(to.Gr + box * kBoxSide * BV, to.Gi + box * kBoxSide * BV);
    }
    copy_swizzled<BV, BN, kThreads>(to.d_out, in.d_out, tile * BV, w0, in.V, in.W);
  };

  copy_right_factors<BN, kThreads>(right_tiles, in, M, w0);
  auto copies = copies_by<kStages>(copy_step);
  const int warp = threadIdx.x / 32;
  const int row = warp / (BN / WN) * WV, col = warp % (BN / WN) * WN;  // in the tile
  const int sum_row = warp / (BN / 32) * 32, sum_col = warp % (BN / 32) * 32;
  SumsOverVertices sums;
  for (int64_t tile = blockIdx.y; tile < tile_count; tile += gridDim.y) {
    const Stage from = stage_of(copies.next());
    if (Tiles::kMakers == kThreads / 32 || warp < Tiles::kMakers) {
      WarpGradients<WV, WN> of_tile;
      for (int box = 0; box < boxes; ++box) {
        const int left = box * kBoxSide * BV;
        add_box<BN>(of_tile, from.Gr + left, from.Gi + left, right_tiles + 3 * box * kBoxSide * BN,
                    row, col);
      }
      leave_products<BV, BN>(products, of_tile, from.d_out, row, col);
    }
    __syncthreads();  // all products of the tile are there
    if (sum_row < in.E) {
      const int left = sum_row / kBoxSide * kBoxSide * BV;
      add_vertices<BV, BN>(sums, from.Gr + left, from.Gi + left, products, sum_row % kBoxSide,
                           sum_col);
    }
  }

  const auto store = [&](const Sums<32, 32>& sum, int which) {
    float* to = partials + (static_cast<size_t>(blockIdx.y) * 3 + which) * in.E * in.W;
    for_pairs(sum, sum_row, w0 + sum_col, in.E, in.W, [&](int e, int w, float2 pair) {
      *reinterpret_cast<float2*>(to + static_cast<size_t>(e) * in.W + w) = pair;
    });
  };
  store(sums.dM1, 0);
  store(sums.dM2, 1);
  store(sums.D, 2);
}

}  // namespace operators::gradients
