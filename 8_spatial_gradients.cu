// 8. Spatial gradient features on a mesh, forward and backward
//
//     xr = Gr x,  xi = Gi x                                                                 (V, W)
//     ar = xr Lr^T - xi Li^T,  ai = xi Lr^T + xr Li^T                                       (V, W)
//     out = tanh(u),  u = xr * ar + xi * ai                                                 (V, W)
//     Gr, Gi (V, E), x (E, W), Lr, Li (W, W): bf16, row-major; fp32 accumulation
//
// Lesson 7 was one block of DiffusionNet (Sharp, Attaiki, Crane, Ovsjanikov, arXiv 2012.00888),
// this is the other one. W features, given by E coefficients each, have a gradient along the
// surface at each of the mesh's V vertices: a complex number xr + i xi in the vertex's tangent
// plane. Learned weights Lr + i Li mix and rotate the gradients of a vertex to ar + i ai. The
// result says how much a gradient and its mixed gradient point the same way: tanh of their scalar
// product u. Backward, given dOut (V, W), with g = dOut * (1 - tanh(u)^2) and
//
//     P = g * xr,  Q = g * xi,  R = g * ar,  S = g * ai                                     (V, W)
//     dLr = P^T xr + Q^T xi,  dLi = Q^T xr - P^T xi                                         (W, W)
//     dx  = Gr^T (R + P Lr + Q Li) + Gi^T (S - P Li + Q Lr)                                 (E, W)
//
// With E = 128 and W = 256 that is 4 V E W + 8 V W W operations forward, 650 000 a vertex, for the
// 1024 bytes that a vertex has in Gr, Gi and out. Arithmetic is the limit, as in lesson 3, if xr,
// xi, ar and ai stay on chip. Each is as large as out: written to memory and read again, they would
// be the limit. So fuse. But a fused kernel is only faster if its tensor cores are as busy as those
// of a plain product: their operands have to be there in time.
//
// A complex product costs four real ones. They come in pairs: xr and xi each meet Lr and Li, so
// each operand that is loaded is used twice, and so is each fragment in a register. That makes this
// product easier to feed than four independent ones.
//
// There is more to be saved. No compiler finds it, since the products in this first line are equal
// only if nothing is rounded:
//
//     xr Lr^T = (Gr x) Lr^T = Gr (x Lr^T) = Gr M1,    M1 = x Lr^T,  M2 = x Li^T             (E, W)
//     ar = Gr M1 - Gi M2,  ai = Gi M1 + Gr M2
//
// x has only E rows, so M1 and M2 cost next to nothing, and the products that remain have the inner
// dimension E, not W: 12 V E W operations in all, 0.6 of what was to be done. And now all of them
// are [Gr, Gi] times something small that fits on chip. What is rounded to bf16 in between is M1
// and M2 instead of xr and xi; the error column tells what that costs. The tables count this least
// number of operations for every kernel, so the column TFLOP/s compares the kernels' times.
//
// Backward, the sums over V become products with [Gr, Gi]^T:
//
//     dM1 = Gr^T P + Gi^T Q,  dM2 = Gr^T Q - Gi^T P,  D = Gr^T R + Gi^T S                   (E, W)
//     dLr = dM1^T x,  dLi = dM2^T x,  dx = D + dM1 Lr + dM2 Li
//
// Instead of products (W, V) x (V, W) these are (E, V) x (V, W), each half the work if E is half of
// W; the products with x, Lr and Li are small. The products with Gr^T and Gi^T have long sums, but
// too few results to keep a GPU busy. So the sums over V are cut into slices, as in lesson 7.
//
//     unfused       forward 12, backward 22 library and elementwise kernels, as a framework does it
//                   (checks/gradients/gradients.cu)
//     one kernel    a block's rows of xr, xi stay on chip, and Lr, Li stream through it
//     associated    x, M1, M2 stay on chip, and Gr, Gi stream through it; also backward
//     Hopper        the same with TMA and wgmma
//
// All but the last need compute capability 8.0 (bf16 on tensor cores), the last one needs 9.0.

#include <deque>
#include <vector>

#include "checks/gradients/gradients.h"
#include "checks/workspace.h"
#include "common/lesson.h"
#include "common/numerics.h"
#include "operators/gradients/features.cuh"
#include "primitives/approximate.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/fragments.cuh"
#include "primitives/launch.h"

using namespace checks;
using namespace operators::gradients;

// E and W are multiples of 8: every row starts at a multiple of 16 bytes.
using Shape = GradientsShape;
using Operands = GradientsOperands;

// 1 - tanh(u)^2. Where |tanh(u)| is near 1 that difference would have hardly a digit left. It is
// the same as 4 e / (1 + e)^2 with e = exp(-2 |u|) <= 1, whose relative error is small for all u:
// __expf and __fdividef (whose denominator is from 1 to 4 here) are off by a few units in the last
// place of fp32.
__device__ float tanh_slope(float u) {
  const float e = __expf(-2 * fabsf(u));
  return __fdividef(4 * e, (1 + e) * (1 + e));
}

// ---- one kernel ---------------------------------------------------------------------------------

// All portable kernels multiply tiles in shared memory. Long rows are cut into boxes of 64 columns,
// each a tile of its own, swizzled. What differs from kernel to kernel is where tiles come from,
// and how long they stay.
//
// The words, from primitives/:
//   - load_left, load_right, Sums, add_product, for_pairs: as in lesson 7. load_right_transposed
//     takes a factor that lies transposed in shared memory, such as rows of Lr for Lr^T. negate
//     changes the sign of a left factor.
//   - copy_swizzled starts the copies of a tile. copies_ahead starts those of the next steps, and
//     its next() waits until those of this step are there (lesson 3's *stages*).
//   - A lane's results are pairs of neighbours in a row. pair_of is such a pair of the sums, and
//     pair_in is the place of one in a tile. pack2 rounds a pair to one register, and unpack2 makes
//     two floats of that again.
//   - to_tile rounds a warp's sums into a tile in shared memory. store_results stores a warp's
//     results to a matrix, by way of `staging`, shared memory of the warp's own.
constexpr int kBox = 64;
constexpr int kTile = kBox * kBox;  // elements of a square tile: 8 KB
__host__ __device__ constexpr int boxes_of(int64_t extent) {
  return static_cast<int>(ceil_div(extent, kBox));
}

// A block owns 64 rows, and computes 64 x 64 results at a time. A warp has 32 x 32 results of two
// sums: 64 registers a thread.
constexpr int kThreads = 128, kStages = 2;
__device__ int warp_row() { return threadIdx.x / 64 * 32; }
__device__ int warp_col() { return threadIdx.x / 32 % 2 * 32; }

// xr += Gr x, xi += Gi x for 64 of the inner dimension. A fragment of x is used four times, those
// of Gr and Gi twice.
__device__ void add_gradient(Sums<32, 32>& xr, Sums<32, 32>& xi, const bf16* Gr_tile,
                             const bf16* Gi_tile, const bf16* x_tile) {
#pragma unroll
  for (int k = 0; k < kBox; k += 16) {
    unsigned gr[2][4], gi[2][4], x[2][4];
    load_left<kBox>(gr, Gr_tile, warp_row(), k);
    load_left<kBox>(gi, Gi_tile, warp_row(), k);
    load_right<kBox>(x, x_tile, k, warp_col());
    add_product(xr, gr, x);
    add_product(xi, gi, x);
  }
}

// ar + i ai += (xr + i xi) (Lr + i Li)^T for 64 of the inner dimension: four products. For 16 of it
// a warp executes 32 mma.sync and 8 ldmatrix, so four mma.sync for each ldmatrix. In a plain
// product there are four only if a warp has 64 x 64 results; with 32 x 32 there are two.
__device__ void add_rotated(Sums<32, 32>& ar, Sums<32, 32>& ai, const bf16* xr_tile,
                            const bf16* xi_tile, const bf16* Lr_tile, const bf16* Li_tile) {
#pragma unroll
  for (int k = 0; k < kBox; k += 16) {
    unsigned xr[2][4], xi[2][4], minus_xi[2][4], lr[2][4], li[2][4];
    load_left<kBox>(xr, xr_tile, warp_row(), k);
    load_left<kBox>(xi, xi_tile, warp_row(), k);
    negate(minus_xi, xi);
    load_right_transposed<kBox>(lr, Lr_tile, k, warp_col());
    load_right_transposed<kBox>(li, Li_tile, k, warp_col());
    add_product(ar, xr, lr);
    add_product(ar, minus_xi, li);
    add_product(ai, xi, lr);
    add_product(ai, xr, li);
  }
}

// tanh(xr ar + xi ai) of two neighbours
__device__ unsigned features(float2 xr, float2 xi, float2 ar, float2 ai) {
  return pack2<bf16>(tanh_approximate(xr.x * ar.x + xi.x * ai.x),
                     tanh_approximate(xr.y * ar.y + xi.y * ai.y));
}

// First a block computes its rows of xr and xi, 64 columns at a time, and leaves them in shared
// memory, 64 KB for W = 256. Then it computes ar and ai, 64 columns at a time, for which all of Lr
// and Li stream through, from the L2 cache. One pipeline of copies serves both phases: while the
// first phase ends, the first tiles of Lr and Li are on their way.
//
// A block fetches all of x, Lr and Li, 320 KB, however many rows it has. With more than 64 rows it
// would use what it fetches for more of them. But then only one block, not two, would fit on a
// multiprocessor (with 64 rows a block has 112 KB). While that one computes tanh and stores 64
// columns, the tensor cores would have nothing to do.
//
// A stage has room for three tiles: Gr, Gi, x in the first phase, Lr, Li in the second. So in the
// second phase the third tile of the first stage is free: it is the staging area of the results.
int64_t one_kernel_bytes(int64_t W) {
  return (2 * static_cast<int64_t>(boxes_of(W)) + kStages * 3) * kTile * sizeof(bf16);
}
__global__ void __launch_bounds__(kThreads) gradient_features(Operands in) {
  extern __shared__ __align__(128) bf16 tiles[];
  const int boxes = boxes_of(in.E), groups = boxes_of(in.W);
  const int first_phase = groups * boxes, steps = first_phase + groups * groups;
  const int64_t v0 = static_cast<int64_t>(blockIdx.x) * kBox;
  bf16* xr_rows = tiles;
  bf16* xi_rows = xr_rows + groups * kTile;
  bf16* stages = xi_rows + groups * kTile;
  bf16* staging = stages + 2 * kTile + threadIdx.x / 32 * 32 * 32;
  const auto stage_of = [&](int step) { return stages + step % kStages * 3 * kTile; };
  const auto copy_step = [&](int step) {
    bf16* stage = stage_of(step);
    if (step < first_phase) {
      const int w0 = step / boxes * kBox, k0 = step % boxes * kBox;
      copy_swizzled<kBox, kBox, kThreads>(stage, in.Gr, v0, k0, in.V, in.E);
      copy_swizzled<kBox, kBox, kThreads>(stage + kTile, in.Gi, v0, k0, in.V, in.E);
      copy_swizzled<kBox, kBox, kThreads>(stage + 2 * kTile, in.x, k0, w0, in.E, in.W);
    } else if (step < steps) {
      const int next = step - first_phase, w0 = next / groups * kBox, k0 = next % groups * kBox;
      copy_swizzled<kBox, kBox, kThreads>(stage, in.Lr, w0, k0, in.W, in.W);
      copy_swizzled<kBox, kBox, kThreads>(stage + kTile, in.Li, w0, k0, in.W, in.W);
    }
  };

  auto ahead = copies_ahead<kStages>(copy_step);
  for (int group = 0; group < groups; ++group) {
    Sums<32, 32> xr = {}, xi = {};
    for (int box = 0; box < boxes; ++box) {
      const bf16* stage = stage_of(ahead.next());
      add_gradient(xr, xi, stage, stage + kTile, stage + 2 * kTile);
    }
    to_tile<kBox>(xr_rows + group * kTile, warp_row(), warp_col(), xr);
    to_tile<kBox>(xi_rows + group * kTile, warp_row(), warp_col(), xi);
  }
  for (int group = 0; group < groups; ++group) {
    Sums<32, 32> ar = {}, ai = {};
    for (int box = 0; box < groups; ++box) {
      // next() has a barrier: all warps have written their part of xr and xi.
      const bf16* stage = stage_of(ahead.next());
      add_rotated(ar, ai, xr_rows + box * kTile, xi_rows + box * kTile, stage, stage + kTile);
    }
    bf16 *own_r = xr_rows + group * kTile, *own_i = xi_rows + group * kTile;
    store_results<32, 32>(
        staging, in.out, v0 + warp_row(), group * kBox + warp_col(), in.V, in.W, [&](int i, int j) {
          return features(unpack2(*pair_in<kBox>(own_r, warp_row(), warp_col(), i, j)),
                          unpack2(*pair_in<kBox>(own_i, warp_row(), warp_col(), i, j)),
                          pair_of(ar, i, j), pair_of(ai, i, j));
        });
  }
}

// ---- associated: the small products -------------------------------------------------------------

// M1 and M2 are made by `associate`, and backward ends with `finish_backward`: products of matrices
// with E or W rows. There is so little to do that what counts is how often one waits. So in a block
// eight warps divide the inner dimension among themselves, and add up at the end: split-K in a
// block. The kernels are in operators/gradients/small_products.cuh.

// ---- associated: forward ------------------------------------------------------------------------

// A warp's sums, WV x WN each, of xr, xi, ar and ai.
template <int WV, int WN>
struct WarpSums {
  Sums<WV, WN> xr = {}, xi = {}, ar = {}, ai = {};
};

// xr += Gr x, xi += Gi x, ar += Gr M1 - Gi M2, ai += Gi M1 + Gr M2 for 64 of the inner dimension:
// all six products from two left factors. The warp's results start at (row, col). right_tiles are
// those of x, M1 and M2, 64 rows of kCols columns each.
template <int kCols, int WV, int WN>
__device__ void add_associated(WarpSums<WV, WN>& sums, const bf16* Gr_tile, const bf16* Gi_tile,
                               const bf16* right_tiles, int row, int col) {
  constexpr int kNext = kBox * kCols;
#pragma unroll
  for (int k = 0; k < kBox; k += 16) {
    unsigned gr[WV / 16][4], gi[WV / 16][4], minus_gi[WV / 16][4], right[WN / 16][4];
    load_left<kBox>(gr, Gr_tile, row, k);
    load_left<kBox>(gi, Gi_tile, row, k);
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

// Starts the copies of columns w0 to w0 + kCols - 1 of x, M1 and M2, as add_associated takes them.
template <int kCols, int kBlockThreads>
__device__ void copy_right_factors(bf16* to, const Operands& in, const bf16* M, int w0) {
  for (int e = 0; e < in.E; e += kBox) {
    for (const bf16* from : {in.x, M, M + static_cast<size_t>(in.E) * in.W}) {
      copy_swizzled<kBox, kCols, kBlockThreads>(to, from, e, w0, in.E, in.W);
      to += kBox * kCols;
    }
  }
}

// What a block has: kBN columns of x, M1 and M2, all E rows, which stay; and kStageCount stages of
// 64 x 64 tiles of Gr and Gi. A warp has WV x 32 results.
template <int kBN, int kWV, int kStageCount>
struct ForwardTiles {
  static constexpr int BV = kBox, BN = kBN, WV = kWV, kStages = kStageCount;
  static_assert(kThreads / 32 == BV / WV * (BN / 32));
  static constexpr int64_t shared_bytes(int64_t E) {
    return (3 * static_cast<int64_t>(boxes_of(E)) * kBox * BN + kStages * 2 * kTile + kBox * BN) *
           sizeof(bf16);
  }
};

// Computes out without a temporary. Lesson 6's resident weights once more: as many blocks as fit on
// the GPU stay, each with its columns of x, M1 and M2, and take tile after tile of 64 rows of Gr
// and Gi. The blocks that own the columns of the same rows, four for W = 256, run at the same time.
// So Gr and Gi are read from memory once, and by the other blocks from the L2 cache.
//
// One lane has all of an element: xr, xi, ar and ai, 128 registers of sums in the wide tiles. So xr
// and xi need not be rounded. For 16 of E a warp executes 48 mma.sync and 10 ldmatrix. While a
// block computes tanh and stores, the other one on the same multiprocessor multiplies.
template <typename Tiles>
__global__ void __launch_bounds__(kThreads) associated_features(Operands in, const bf16* M) {
  constexpr int BN = Tiles::BN, WV = Tiles::WV, kStages = Tiles::kStages;
  extern __shared__ __align__(128) bf16 tiles[];
  const int warp = threadIdx.x / 32, boxes = boxes_of(in.E), w0 = blockIdx.x * BN;
  const int row = warp / (BN / 32) * WV, col = warp % (BN / 32) * 32;
  bf16* right_tiles = tiles;
  bf16* stages = right_tiles + 3 * boxes * kBox * BN;
  bf16* staging = stages + kStages * 2 * kTile + warp * WV * 32;
  const int64_t tile_count = (in.V + kBox - 1) / kBox;
  const auto stage_of = [&](int step) { return stages + step % kStages * 2 * kTile; };
  const auto copy_step = [&](int step) {
    const int64_t tile = blockIdx.y + static_cast<int64_t>(step / boxes) * gridDim.y;
    if (tile < tile_count) {
      const int k0 = step % boxes * kBox;
      copy_swizzled<kBox, kBox, kThreads>(stage_of(step), in.Gr, tile * kBox, k0, in.V, in.E);
      copy_swizzled<kBox, kBox, kThreads>(stage_of(step) + kTile, in.Gi, tile * kBox, k0, in.V,
                                          in.E);
    }
  };

  // Its copies are in one group with those of step 0, so the first next() waits for them, too.
  copy_right_factors<BN, kThreads>(right_tiles, in, M, w0);
  auto ahead = copies_ahead<kStages>(copy_step);
  for (int64_t tile = blockIdx.y; tile < tile_count; tile += gridDim.y) {
    WarpSums<WV, 32> sums;
    for (int box = 0; box < boxes; ++box) {
      const bf16* stage = stage_of(ahead.next());
      add_associated<BN>(sums, stage, stage + kTile, right_tiles + 3 * box * kBox * BN, row, col);
    }
    const auto result = [&](int i, int j) {
      return features(pair_of(sums.xr, i, j), pair_of(sums.xi, i, j), pair_of(sums.ar, i, j),
                      pair_of(sums.ai, i, j));
    };
    store_results<WV, 32>(staging, in.out, tile * kBox + row, w0 + col, in.V, in.W, result);
  }
}

// ---- associated: backward -----------------------------------------------------------------------

// xr, xi, ar and ai are computed again, at the cost of the forward pass. If that pass saved them,
// it would write 2 KB a vertex, and this one would read them: four times as many bytes as Gr and Gi
// have. And from one pass to the other they would occupy four times the memory of out. The unfused
// form saves them, as a framework does; compare the memory column.

// What a block has: kBN columns of x, M1 and M2, which stay; two stages of kBV rows of Gr, Gi and
// of kBN columns of dOut; and the products P, Q, R, S of one tile. A warp computes WV x WN of
// those, and owns 32 x 32 of each of the three sums, so that the block has kMaxE rows of them.
template <int kBV, int kBN, int kWV, int kWN>
struct BackwardTiles {
  static constexpr int BV = kBV, BN = kBN, WV = kWV, WN = kWN;
  static constexpr int kStages = 2, kMaxE = 128;
  static constexpr int kThreads = kMaxE / 32 * (BN / 32) * 32;
  static constexpr int kBlocksPerSM = kThreads > 128 ? 1 : 2;
  static_assert(kThreads / 32 == BV / WV * (BN / WN));
  __host__ __device__ static constexpr int64_t stage(int64_t E) {  // elements
    return BV * (2 * static_cast<int64_t>(boxes_of(E)) * kBox + BN);
  }
  static constexpr int64_t shared_bytes(int64_t E) {
    return (3 * static_cast<int64_t>(boxes_of(E)) * kBox * BN + kStages * stage(E) + 4 * BV * BN) *
           sizeof(bf16);
  }
};

// P, Q, R, S from a warp's sums and dOut, rounded, into their tiles in shared memory.
template <int BV, int BN, int WV, int WN>
__device__ void leave_products(bf16* products, const WarpSums<WV, WN>& sums, bf16* d_out_tile,
                               int row, int col) {
#pragma unroll
  for (int i = 0; i < WV / 8; ++i) {
#pragma unroll
    for (int j = 0; j < WN / 8; ++j) {
      const float2 xr = pair_of(sums.xr, i, j), xi = pair_of(sums.xi, i, j);
      const float2 ar = pair_of(sums.ar, i, j), ai = pair_of(sums.ai, i, j);
      float2 g = unpack2(*pair_in<BN>(d_out_tile, row, col, i, j));
      g.x *= tanh_slope(xr.x * ar.x + xi.x * ai.x);
      g.y *= tanh_slope(xr.y * ar.y + xi.y * ai.y);
      const auto leave = [&](int which, float2 factor) {
        *pair_in<BN>(products + which * BV * BN, row, col, i, j) =
            pack2<bf16>(g.x * factor.x, g.y * factor.y);
      };
      leave(0, xr);
      leave(1, xi);
      leave(2, ar);
      leave(3, ai);
    }
  }
}

// A warp's 32 x 32 of each sum over V, which start at (row, col).
struct GradientSums {
  Sums<32, 32> dM1 = {}, dM2 = {}, D = {};
};

// sums += the part of BV vertices, from tiles of Gr and Gi and those of P, Q, R, S.
template <int BV, int BN>
__device__ void add_gradients(GradientSums& sums, const bf16* Gr_tile, const bf16* Gi_tile,
                              const bf16* products, int row, int col) {
#pragma unroll
  for (int k = 0; k < BV; k += 16) {
    unsigned gr[2][4], gi[2][4], minus_gi[2][4], right[2][4];
    load_left_transposed<kBox>(gr, Gr_tile, row, k);
    load_left_transposed<kBox>(gi, Gi_tile, row, k);
    negate(minus_gi, gi);
    load_right<BN>(right, products, k, col);  // P
    add_product(sums.dM1, gr, right);
    add_product(sums.dM2, minus_gi, right);
    load_right<BN>(right, products + BV * BN, k, col);  // Q
    add_product(sums.dM1, gi, right);
    add_product(sums.dM2, gr, right);
    load_right<BN>(right, products + 2 * BV * BN, k, col);  // R
    add_product(sums.D, gr, right);
    load_right<BN>(right, products + 3 * BV * BN, k, col);  // S
    add_product(sums.D, gi, right);
  }
}

// partials (slices, 3, E, W): dM1, dM2 and D, summed up over every gridDim.y-th tile of BV
// vertices.
//
// Block (i, slice) owns BN columns of x, M1, M2 and of the sums. Per tile it computes xr, xi, ar,
// ai in registers as above, then u and g, and leaves P, Q, R, S in shared memory: right factors,
// whose inner dimension is the vertices. The left factors are Gr^T and Gi^T, from the very tiles of
// Gr and Gi that were multiplied before, transposed by ldmatrix. So each tile is read from memory
// once and used for both, and P, Q, R and S exist for one tile at a time. The sums, 96 registers a
// thread, stay until the slice ends; then a kernel adds them up, as in lesson 7.
template <typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocksPerSM)
    accumulate_backward(Operands in, const bf16* M, float* partials) {
  constexpr int BV = Tiles::BV, BN = Tiles::BN, WV = Tiles::WV, WN = Tiles::WN;
  constexpr int kStages = Tiles::kStages, kBlockThreads = Tiles::kThreads;
  extern __shared__ __align__(128) bf16 tiles[];
  const int warp = threadIdx.x / 32;
  const int boxes = boxes_of(in.E), w0 = blockIdx.x * BN;
  const int tangent = boxes * kBox * BV;
  bf16* right_tiles = tiles;
  bf16* stages = right_tiles + 3 * boxes * kBox * BN;
  bf16* products = stages + kStages * Tiles::stage(in.E);
  const int64_t tile_count = (in.V + BV - 1) / BV;
  const auto stage_of = [&](int step) { return stages + step % kStages * Tiles::stage(in.E); };
  const auto copy_step = [&](int step) {
    const int64_t tile = blockIdx.y + static_cast<int64_t>(step) * gridDim.y;
    if (tile < tile_count) {
      bf16* Gr_tiles = stage_of(step);
      bf16* Gi_tiles = Gr_tiles + tangent;
      for (int box = 0; box < boxes; ++box) {
        const int at = box * kBox * BV, e = box * kBox;
        copy_swizzled<BV, kBox, kBlockThreads>(Gr_tiles + at, in.Gr, tile * BV, e, in.V, in.E);
        copy_swizzled<BV, kBox, kBlockThreads>(Gi_tiles + at, in.Gi, tile * BV, e, in.V, in.E);
      }
      copy_swizzled<BV, BN, kBlockThreads>(Gi_tiles + tangent, in.d_out, tile * BV, w0, in.V, in.W);
    }
  };

  copy_right_factors<BN, kBlockThreads>(right_tiles, in, M, w0);
  auto ahead = copies_ahead<kStages>(copy_step);
  const int row = warp / (BN / WN) * WV, col = warp % (BN / WN) * WN;  // in the tile
  const int sum_row = warp / (BN / 32) * 32, sum_col = warp % (BN / 32) * 32;
  GradientSums sums;
  for (int64_t tile = blockIdx.y; tile < tile_count; tile += gridDim.y) {
    bf16 *Gr_tiles = stage_of(ahead.next()), *Gi_tiles = Gr_tiles + tangent;
    WarpSums<WV, WN> tile_sums;
    for (int box = 0; box < boxes; ++box) {
      const int left = box * kBox * BV;
      add_associated<BN>(tile_sums, Gr_tiles + left, Gi_tiles + left,
                         right_tiles + 3 * box * kBox * BN, row, col);
    }
    leave_products<BV, BN>(products, tile_sums, Gi_tiles + tangent, row, col);
    __syncthreads();
    if (sum_row < in.E) {
      const int left = sum_row / kBox * kBox * BV;
      add_gradients<BV, BN>(sums, Gr_tiles + left, Gi_tiles + left, products, sum_row % kBox,
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

// launch_rest of operators/gradients/small_products.cuh does the rest: its add_slices (not lesson
// 7's) adds up the partial sums, and finish_backward multiplies them with x, Lr and Li.

// ---- Hopper -------------------------------------------------------------------------------------

// Associated, once more, in the words of primitives/hopper/tiles.cuh. For 64 rows and 64 columns
// of out there are four sums of 64 x 64: xr, xi, ar and ai. These are 128 registers of each thread
// of a warpgroup. Two right factors side by side make one product of 128 columns out of two of 64.
// For that -M2 is a factor of its own:
//
//     [ar | ai] = Gr [M1 | M2] + Gi [-M2 | M1],   xr = Gr x,   xi = Gi x
//
// (Could Gr [M1 | M2 | x] be one product of 192 columns in place of two? Products that are added to
// the same registers may follow each other at once only if all have the same shape. Otherwise a
// wgmma_fence() is needed between them: PTX ISA, "wgmma.fence". Gi [-M2 | M1], which is added to a
// part of these registers, has 128 columns. With the fence between them the kernel took 1.5 times
// as long; measured, but not recorded in `results/`.)
//
// The two blocks of a cluster share rows. Each has its own columns. One fetches Gr for both, the
// other one Gi. (If one block has all columns, it fetches both.) There are no larger clusters: of
// clusters of four no more than about 30 find room on a GPU of 132 multiprocessors, and the other
// multiprocessors would have no work. W is cut into slabs of as many columns as a cluster has, and
// each cluster belongs to one slab. E comes in steps of 64, one after the other, through a ring of
// stages. Forward a stage has two steps, which are called a segment. What a step brings, and how it
// is loaded, is in operators/gradients/tiles.cuh.
//
// This row is the operator that a program would call. Forward, a block keeps its columns of x, M1,
// -M2 and M2. Of the tiles of 64 rows of Gr and Gi each of two warpgroups takes every other one:
// while one computes tanh and writes, the other has the tensor cores to itself. That kernel is
// hopper_features in operators/gradients/forward.cuh. Backward three warpgroups work like an
// assembly line. Two make P, Q, R and S. The third multiplies these by Gr^T and Gi^T, and keeps the
// sums. That kernel is hopper_accumulate_backward in operators/gradients/backward.cuh.

// ---- The rows -----------------------------------------------------------------------------------

// The tiles of the kernels above. For E = 128 the wide ones take 104 KB and 160 KB, so that two
// blocks forward and one backward fit on a multiprocessor of compute capability 9.0. The narrow
// ones take 60 KB and 68 KB and fit everywhere, and for small V there are more blocks of them.
using WideForwardTiles = ForwardTiles<64, 32, 3>;
using NarrowForwardTiles = ForwardTiles<32, 16, 2>;
using WideBackwardTiles = BackwardTiles<64, 64, 32, 16>;
using NarrowBackwardTiles = BackwardTiles<32, 32, 16, 16>;

// Whether these tiles fit on chip and are enough for a block on each multiprocessor.
template <typename Tiles>
bool are_suitable(const Shape& shape, const Device& device) {
  const int64_t blocks =
      static_cast<int64_t>(blocks_for(shape.V, Tiles::BV)) * blocks_for(shape.W, Tiles::BN);
  return Tiles::shared_bytes(shape.E) <= device.shared_bytes && blocks >= device.sms;
}

// A grid of `columns` groups of columns by slices of V. There are as many slices as fill the GPU,
// but at least 3 (so that the CPU backend, too, adds several up), and no more than tiles.
template <typename Function>
dim3 slices_of(int64_t tiles, int64_t columns, const Device& device, Function* kernel, int threads,
               int bytes) {
  allow_shared_bytes(kernel, bytes);
  int per_sm = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, bytes));
  const int64_t fill = std::max<int64_t>(3, static_cast<int64_t>(per_sm) * device.sms / columns);
  return dim3(static_cast<unsigned>(columns), static_cast<unsigned>(std::min(tiles, fill)));
}

// False if a block's rows of xr and xi do not fit on chip.
bool add_one_kernel(GradientsProblem& table, const Device& device) {
  if (one_kernel_bytes(table.shape.W) > device.shared_bytes) return false;
  const int bytes = static_cast<int>(one_kernel_bytes(table.shape.W));
  const unsigned blocks = blocks_for(table.shape.V, kBox);
  allow_shared_bytes(gradient_features, bytes);
  table.problem
      .kernel("one kernel", Role::ours,
              [=, &table] { gradient_features<<<blocks, kThreads, bytes>>>(table.operands()); })
      .needs(80)
      .occupies(table.ends())
      .needs_shared(bytes)
      .checks = table.checks(2);  // xr and xi are rounded: once as factors of u, once in ar and ai
  return true;
}

template <typename Tiles>
void add_associated_forward(GradientsProblem& table, const Device& device) {
  const auto [V, E, W] = table.shape;
  const auto M = table.problem.output<bf16>(2 * table.shape.coefficients());
  const int bytes = static_cast<int>(Tiles::shared_bytes(E));
  const auto kernel = associated_features<Tiles>;
  const dim3 small = small_blocks(E, W, 2);
  const dim3 blocks =
      slices_of(blocks_for(V, kBox), blocks_for(W, Tiles::BN), device, kernel, kThreads, bytes);
  const auto launch = [=, &table] {
    associate<<<small, kSmallThreads, kSmallBytes>>>(table.operands(), M, dense(table.shape));
    associated_features<Tiles><<<blocks, kThreads, bytes>>>(table.operands(), M);
  };
  table.problem.kernel("associated", Role::ours, launch)
      .needs(80)
      .occupies(table.ends() + M.bytes())
      .needs_shared(bytes)
      .checks = table.checks(1);  // M1 and M2
}

template <typename Tiles>
void add_associated_backward(GradientsProblem& table, const Device& device) {
  const auto [V, E, W] = table.shape;
  const int bytes = static_cast<int>(Tiles::shared_bytes(E));
  const auto kernel = accumulate_backward<Tiles>;
  const int64_t tiles = blocks_for(V, Tiles::BV);
  const dim3 blocks =
      slices_of(tiles, blocks_for(W, Tiles::BN), device, kernel, Tiles::kThreads, bytes);
  const GradientsTemporaries t(table, 2, blocks.y);
  const dim3 small = small_blocks(E, W, 2);
  const auto launch = [=, &table] {
    const Operands in = table.operands();
    associate<<<small, kSmallThreads, kSmallBytes>>>(in, t.M, dense(table.shape));
    accumulate_backward<Tiles><<<blocks, Tiles::kThreads, bytes>>>(in, t.M, t.partials);
    launch_rest(nullptr, in, t.partials, t.slices, t.dM, t.D);
  };
  table.problem.kernel("associated", Role::ours, launch)
      .needs(80)
      .occupies(table.ends() + t.bytes())
      .needs_shared(bytes)
      // One rounding before u: M1 and M2. Four on the way from u to a gradient: ar, which has that
      // of M1 and is a factor of R, then R, dM1, and the gradient itself.
      .checks = table.checks(1, 4, (tiles + t.slices - 1) / t.slices * Tiles::BV);
}

// False if it cannot run: forward if 32 columns of x, M1 and M2 do not fit on chip, backward if E
// is above 128, since its sums are in registers.
bool add_associated(GradientsProblem& table, const Device& device) {
  const Shape& shape = table.shape;
  if (table.pass == Pass::forward) {
    if (NarrowForwardTiles::shared_bytes(shape.E) > device.shared_bytes) return false;
    are_suitable<WideForwardTiles>(shape, device)
        ? add_associated_forward<WideForwardTiles>(table, device)
        : add_associated_forward<NarrowForwardTiles>(table, device);
  } else {
    if (shape.E > NarrowBackwardTiles::kMaxE) return false;
    are_suitable<WideBackwardTiles>(shape, device)
        ? add_associated_backward<WideBackwardTiles>(table, device)
        : add_associated_backward<NarrowBackwardTiles>(table, device);
  }
  return true;
}

// False if a block would have to keep more than it has room for.
template <Pass kPass>
bool add_hopper(GradientsProblem& table) {
  const GradientFeatures<kPass> features(
      workspace_of(table.problem), [&table] { return table.operands(); }, table.shape);
  const auto ways = ways_of_row(features.ways());
  if (ways.empty()) return false;
  table.problem.kernel("Hopper", Role::ours, ways)
      .hopper_only()
      .occupies(table.ends() + features.workspace_bytes())
      // The roundings are those of *associated*.
      .checks = kPass == Pass::forward ? table.checks(1)
                                       : table.checks(1, 4, features.vertices_of_a_cluster());
  return true;
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "8_spatial_gradients",
                 .title = "spatial gradient features on a mesh, forward and backward",
                 .n_meaning = "V, vertices of the mesh",
                 .n_gpu = 131072,
                 .n_cpu = 2048,
                 .options = {{.name = "--eigen",
                              .meaning = "E, coefficients of a feature",
                              .value = 128,
                              .multiple_of = 8,
                              .cpu = 32},
                             {.name = "--width",
                              .meaning = "W, features of a vertex",
                              .value = 256,
                              .multiple_of = 8,
                              .cpu = 128}},
                 .sweep = {.gpu = {1024, 1048576}, .cpu = {1024, 2048}}});
  const int64_t E = lesson.option("--eigen"), W = lesson.option("--width");
  const std::vector<int64_t> sizes = lesson.sizes();

  Cublas blas;
  std::deque<GradientsProblem> tables;
  const Device& device = lesson.device();
  allow_small_products();
  double worst = 0;
  bool has_one_kernel = true, has_forward = true, has_backward = true, has_hopper = true;
  for (const int64_t V : sizes) {
    GradientsProblem& forward = tables.emplace_back(lesson, blas, Pass::forward, Shape{V, E, W});
    GradientsProblem& backward = tables.emplace_back(lesson, blas, Pass::backward, Shape{V, E, W});
    add_unfused(forward);
    has_one_kernel = add_one_kernel(forward, device);
    has_forward = add_associated(forward, device);
    add_hopper<Pass::forward>(forward);
    add_unfused(backward);
    has_backward = add_associated(backward, device);
    has_hopper = add_hopper<Pass::backward>(backward);
    backward.report_difference = [&, last = V == sizes.back()](double difference) {
      worst = std::max(worst, difference);
      char text[128];
      snprintf(text, sizeof text,
               "The reference's gradients agree with finite differences to within %.0e.", worst);
      if (last) lesson.note(text);
    };
  }
  const auto unless = [&](bool has, const char* note) {
    if (!has) lesson.note(note);
  };
  unless(has_one_kernel,
         "No \"one kernel\": 64 rows of xr and xi do not fit on chip for this width.");
  unless(has_forward, "No \"associated\" forward: 32 columns of x, M1 and M2 do not fit on chip.");
  unless(has_backward,
         "No \"associated\" backward: its sums are in registers for up to 128 eigenvectors.");
  unless(has_hopper, "No \"Hopper\": its blocks are made for up to 256 eigenvectors.");
  Problem &forward = tables.front().problem, &backward = tables.back().problem;
  forward.compare("one kernel", "unfused", "Forward: one kernel instead of 12: % times as fast.");
  forward.compare("associated", "one kernel",
                  "Forward: associated the other way: % times as fast.");
  forward.compare("Hopper", "unfused", "Forward: % times as fast as unfused.");
  backward.compare("Hopper", "unfused", "Backward: % times as fast as unfused, and nothing saved.");
  return lesson.run();
}
