// 8. Spatial gradient features on a mesh, forward and backward
//
//     xr = Gr x,  xi = Gi x                                                                 (V, W)
//     ar = xr Lr^T - xi Li^T,  ai = xi Lr^T + xr Li^T                                       (V, W)
//     out = tanh(u),  u = xr * ar + xi * ai                                                 (V, W)
//     Gr, Gi (V, E), x (E, W), Lr, Li (W, W): bf16, row-major; fp32 accumulation
//
// The other block of DiffusionNet (Sharp, Attaiki, Crane, Ovsjanikov, arXiv 2012.00888): W
// features, given by E coefficients each, have a gradient along the surface at each of its V
// vertices, a complex number xr + i xi in the vertex's tangent plane. Learned weights Lr + i Li mix
// and rotate the gradients of a vertex to ar + i ai, and the result is how much the two agree:
// their scalar product. Backward, given dOut (V, W), with g = dOut * (1 - tanh(u)^2) and
//
//     P = g * xr,  Q = g * xi,  R = g * ar,  S = g * ai                                     (V, W)
//     dLr = P^T xr + Q^T xi,  dLi = Q^T xr - P^T xi                                         (W, W)
//     dx  = Gr^T (R + P Lr + Q Li) + Gi^T (S - P Li + Q Lr)                                 (E, W)
//
// With E = 128 and W = 256 that is 4 V E W + 8 V W W operations forward, 650 000 a vertex, for the
// 1024 bytes that a vertex has in Gr, Gi and out. Arithmetic is the limit, as in lesson 3, but only
// as long as it is not the temporaries' way to memory and back: xr, xi, ar, ai are each as large as
// out. So fuse, and at no cost to the tensor cores' rate: their operands have to be there in time.
//
// A complex product costs four real ones. They come in pairs: xr and xi each meet Lr and Li, so
// each operand that is loaded is used twice, and so is each fragment in a register. That makes this
// product easier to feed than four independent ones.
//
// There is more to be saved, and no compiler finds it, since it is not the same for rounded
// numbers:
//
//     xr Lr^T = (Gr x) Lr^T = Gr (x Lr^T) = Gr M1,    M1 = x Lr^T,  M2 = x Li^T             (E, W)
//     ar = Gr M1 - Gi M2,  ai = Gi M1 + Gr M2
//
// x has only E rows, so M1 and M2 cost next to nothing, and the products that remain have the inner
// dimension E, not W: 12 V E W operations in all, 0.6 of what was to be done. And now all of them
// are [Gr, Gi] times something small that fits on chip. What is rounded to bf16 in between is M1
// and M2 instead of xr and xi; the error column tells what that costs. The tables count this least
// number of operations for every kernel, so that TFLOP/s compare their times.
//
// Backward, the sums over V become products with [Gr, Gi]^T:
//
//     dM1 = Gr^T P + Gi^T Q,  dM2 = Gr^T Q - Gi^T P,  D = Gr^T R + Gi^T S                   (E, W)
//     dLr = dM1^T x,  dLi = dM2^T x,  dx = D + dM1 Lr + dM2 Li
//
// Instead of products (W, V) x (V, W) these are (E, V) x (V, W), each half the work; the products
// with x, Lr and Li are small. All have few results and long sums, which leave a GPU idle: so the
// sums over V are cut into slices, as in lesson 7.
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
#include "common/lesson.h"
#include "common/numerics.h"
#include "operators/gradients/tiles.cuh"
#include "primitives/approximate.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/fragments.cuh"
#include "primitives/hopper/block_grid.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/hopper/tiles.cuh"
#include "primitives/launch.h"

using namespace checks;
using namespace operators::gradients;

// E and W are multiples of 8: every row starts at a multiple of 16 bytes.
using Shape = GradientsShape;
using Operands = GradientsOperands;

// 1 - tanh(u)^2. Where |tanh(u)| is near 1 that difference would have hardly a digit left. The same
// is 4 e / (1 + e)^2 with e = exp(-2 |u|) <= 1, which is relatively accurate for all u; __expf and
// __fdividef, whose denominator is from 1 to 4, are off by a few units in the last place of fp32.
__device__ float tanh_slope(float u) {
  const float e = __expf(-2 * fabsf(u));
  return __fdividef(4 * e, (1 + e) * (1 + e));
}

// ---- one kernel ---------------------------------------------------------------------------------

// All portable kernels multiply tiles in shared memory, in the words of primitives/fragments.cuh.
// Long rows are cut into boxes of 64 columns, each a tile of its own, swizzled. What differs from
// kernel to kernel is where tiles come from, and how long they stay.
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

// ar + i ai += (xr + i xi) (Lr + i Li)^T for 64 of the inner dimension: four products. Each 16 of
// it take 32 tensor core instructions and 8 loads. A plain product has that ratio if a warp owns
// twice as many rows and columns, 64 x 64.
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
// first one ends, the first tiles of Lr and Li are in flight.
//
// A block fetches all of x, Lr and Li, 320 KB, however many rows it has. More than 64 rows would
// share them; but then one block, not two, has room on a multiprocessor, and whenever that one
// finishes 64 columns, the tensor cores wait for its epilogue.
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

struct Matrix {
  const bf16* data;
  int rows, cols;
};

// A block owns 32 x 32 results of a product of two small matrices, or of a sum of two such
// products. There is so little to do that what counts is how often one waits: so all but one of
// kSmallStages steps of 128 of the inner dimension are under way at once, and each of eight warps
// multiplies 16 of a step, for all results. What the warps have adds up at the end, through shared
// memory, where a thread gets four neighbours: split-K in a block.
constexpr int kSmall = 32, kSmallDepth = 128, kSmallStages = 5, kSmallThreads = 256;
constexpr int kSmallTile = kSmall * kSmallDepth;                           // elements
constexpr int kSmallBytes = kSmallStages * 2 * kSmallTile * sizeof(bf16);  // 80 KB
constexpr int kSmallStride = kSmall + 8;  // floats: a warp's rows start in other banks
static_assert(kSmallThreads / 32 * kSmall * kSmallStride * sizeof(float) <= kSmallBytes);

// Where a thread's four results are:
__device__ int small_row() { return blockIdx.y * kSmall + threadIdx.x / 8; }
__device__ int small_col() { return blockIdx.x * kSmall + threadIdx.x % 8 * 4; }

// The sum of the warps' sums, and of `first`.
__device__ float4 add_warps(void* stages, const Sums<kSmall, kSmall>& sum, float4 first) {
  float* all = static_cast<float*>(stages);
  float* mine = all + threadIdx.x / 32 * kSmall * kSmallStride;
  __syncthreads();  // the tiles have been read
  for_pairs(sum, 0, 0, kSmall, kSmall, [&](int row, int col, float2 pair) {
    *reinterpret_cast<float2*>(mine + row * kSmallStride + col) = pair;
  });
  __syncthreads();
  const float* from = all + threadIdx.x / 8 * kSmallStride + threadIdx.x % 8 * 4;
#pragma unroll
  for (int warp = 0; warp < kSmallThreads / 32; ++warp) {
    const float4 quad = *reinterpret_cast<const float4*>(from + warp * kSmall * kSmallStride);
    add(first, quad);
  }
  return first;
}

// left[0] right[0], and if there are 2 terms, + left[1] right[1]; plus what is at `first`, if that
// is not null. Either factor may be transposed in memory; `depth` is the inner dimension. If
// kEarly, the left factors and `first` are results of the kernel before this one, and while it
// ends, the right ones are on their way.
template <Transposed kLeft, Transposed kRight, bool kEarly>
__device__ float4 small_products(bf16* stages, const Matrix* left, const Matrix* right, int terms,
                                 int depth, const float* first) {
  constexpr int kDepth = kSmallDepth, kCopies = kSmallThreads;
  const int boxes = (depth + kDepth - 1) / kDepth, steps = terms * boxes;
  const int row0 = blockIdx.y * kSmall, col0 = blockIdx.x * kSmall;
  const auto stage_of = [&](int step) { return stages + step % kSmallStages * 2 * kSmallTile; };
  const auto copy_left = [&](int step) {
    const Matrix a = left[step / boxes];
    const int k0 = step % boxes * kDepth;
    if constexpr (kLeft == kTransposed) {
      copy_swizzled<kDepth, kSmall, kCopies>(stage_of(step), a.data, k0, row0, a.rows, a.cols);
    } else {
      copy_swizzled<kSmall, kDepth, kCopies>(stage_of(step), a.data, row0, k0, a.rows, a.cols);
    }
  };
  const auto copy_right = [&](int step) {
    bf16* tile = stage_of(step) + kSmallTile;
    const Matrix b = right[step / boxes];
    const int k0 = step % boxes * kDepth;
    if constexpr (kRight == kTransposed) {
      copy_swizzled<kSmall, kDepth, kCopies>(tile, b.data, col0, k0, b.rows, b.cols);
    } else {
      copy_swizzled<kDepth, kSmall, kCopies>(tile, b.data, k0, col0, b.rows, b.cols);
    }
  };

  if constexpr (kEarly) {
    for (int step = 0; step < kSmallStages - 1 && step < steps; ++step) copy_right(step);
    wait_for_previous_kernel();
  }
  const auto copy_step = [&](int step) {
    if (step >= steps) return;
    copy_left(step);
    if (!kEarly || step >= kSmallStages - 1) copy_right(step);
  };
  auto ahead = copies_ahead<kSmallStages>(copy_step);
  const float4 start = first ? *reinterpret_cast<const float4*>(first) : float4{};
  const int k = threadIdx.x / 32 * 16;
  Sums<kSmall, kSmall> sum = {};
  for (int step = 0; step < steps; ++step) {
    const bf16 *left_tile = stage_of(ahead.next()), *right_tile = left_tile + kSmallTile;
    unsigned a[kSmall / 16][4], b[kSmall / 16][4];
    if constexpr (kLeft == kTransposed) {
      load_left_transposed<kSmall>(a, left_tile, 0, k);
    } else {
      load_left<kDepth>(a, left_tile, 0, k);
    }
    if constexpr (kRight == kTransposed) {
      load_right_transposed<kDepth>(b, right_tile, k, 0);
    } else {
      load_right<kSmall>(b, right_tile, k, 0);
    }
    add_product(sum, a, b);
  }
  return add_warps(stages, sum, start);
}

// Where M1 and M2 lie in memory: column 32 g + c of row e of matrix i is element i * matrix + e *
// row + g * group + c. Up to column `cols`, what W does not fill is zero.
struct Layout {
  int64_t matrix;
  int row, group, cols;
};

// M holds M1 = x Lr^T and M2 = x Li^T; with a third layer of blocks also -M2.
__global__ void __launch_bounds__(kSmallThreads) associate(Operands in, bf16* M, Layout layout) {
  // Hopper's kernels have other things to load first, and wait before they read M. A kernel that is
  // launched as usual starts when this one has ended.
  start_next_kernel();
  extern __shared__ __align__(128) bf16 stages[];
  const Matrix left = {in.x, in.E, in.W}, right = {blockIdx.z == 0 ? in.Lr : in.Li, in.W, in.W};
  const float4 sum =
      small_products<kPlain, kTransposed, false>(stages, &left, &right, 1, in.W, nullptr);
  const int row = small_row(), col = small_col();
  if (row >= in.E || col >= layout.cols) return;
  const float sign = blockIdx.z == 2 ? -1 : 1;
  bf16* to = M + blockIdx.z * layout.matrix + blockIdx.x * static_cast<int64_t>(layout.group);
  *reinterpret_cast<uint2*>(to + static_cast<int64_t>(row) * layout.row + col % kSmall) =
      pack4<bf16>(make_float4(sign * sum.x, sign * sum.y, sign * sum.z, sign * sum.w));
}

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

// out, without a temporary. Lesson 6's resident weights once more: as many blocks as fit on the GPU
// stay, each with its columns of x, M1 and M2, and take tile after tile of 64 rows of Gr and Gi.
// The blocks (four, for W = 256) that own the columns of the same rows run at the same time: memory
// is read once.
//
// One lane has all of an element: xr, xi, ar and ai, 128 registers of sums in the wide tiles. 16 of
// E take 48 tensor core instructions and 10 loads; xr and xi are not even rounded. While a block is
// at its epilogue, the other one on the same multiprocessor multiplies.
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

// xr, xi, ar, ai are computed again, at the cost of the forward pass, rather than saved and read.
// Saved, they are 2 KB a vertex: four times as many bytes as Gr and Gi, written there and read
// here, and four times the memory of out, occupied from one pass to the other. The unfused form
// saves them, as a framework does; compare the memory column.

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

// P, Q, R, S from a warp's sums and dOut.
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

// dM (2, E, W) = dM1, dM2 in bf16, as factors of the last products, and D (E, W) in fp32: the sums
// of the partial sums, in the same order in every run. A thread owns 4 neighbours, and every
// kSliceWarps-th slice of them: what counts is that all loads are on their way at once.
constexpr int kSliceWarps = 4;
__global__ void __launch_bounds__(kThreads)
    add_slices(const float* partials, int slices, bf16* dM, float* D, size_t count) {
  wait_for_previous_kernel();
  start_next_kernel();
  __shared__ float4 sums[kSliceWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const size_t i = (static_cast<size_t>(blockIdx.x) * 32 + lane) * 4;
  const bool inside = i < 3 * count;
  float4 sum = {};
#pragma unroll 8
  for (int slice = inside ? warp : slices; slice < slices; slice += kSliceWarps) {
    const float4 quad = *reinterpret_cast<const float4*>(partials + slice * 3 * count + i);
    add(sum, quad);
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || !inside) return;
  for (int other = 1; other < kSliceWarps; ++other) {
    const float4 quad = sums[other][lane];
    add(sum, quad);
  }
  if (i < 2 * count) {
    *reinterpret_cast<uint2*>(dM + i) = pack4<bf16>(sum);
  } else {
    *reinterpret_cast<float4*>(D + i - 2 * count) = sum;
  }
}

// dLr = dM1^T x, dLi = dM2^T x, dx = D + dM1 Lr + dM2 Li: the small products again; blockIdx.z says
// which.
__global__ void __launch_bounds__(kSmallThreads)
    finish_backward(Operands in, const bf16* dM, const float* D) {
  extern __shared__ __align__(128) bf16 stages[];
  const bool is_dx = blockIdx.z == 2;
  const int rows = is_dx ? in.E : in.W, row = small_row(), col = small_col();
  if (static_cast<int>(blockIdx.y) * kSmall >= rows) return;
  const Matrix dM1 = {dM, in.E, in.W}, dM2 = {dM + static_cast<size_t>(in.E) * in.W, in.E, in.W};
  const bool inside = row < rows && col < in.W;
  const size_t at = static_cast<size_t>(row) * in.W + col;
  float4 sum;
  if (is_dx) {
    const Matrix left[2] = {dM1, dM2}, right[2] = {{in.Lr, in.W, in.W}, {in.Li, in.W, in.W}};
    sum = small_products<kPlain, kPlain, true>(stages, left, right, 2, in.W,
                                               inside ? D + at : nullptr);
  } else {
    const Matrix left = blockIdx.z == 0 ? dM1 : dM2, right = {in.x, in.E, in.W};
    sum = small_products<kTransposed, kPlain, true>(stages, &left, &right, 1, in.E, nullptr);
  }
  bf16* to = is_dx ? in.d_x : blockIdx.z == 0 ? in.d_Lr : in.d_Li;
  if (inside) *reinterpret_cast<uint2*>(to + at) = pack4<bf16>(sum);
}

// ---- Hopper -------------------------------------------------------------------------------------

// Associated, once more, in the words of primitives/hopper/tiles.cuh. A product of 64 rows of Gr
// and Gi with 64 columns of the right factors is four sums of 64 x 64, 128 registers a thread of a
// warpgroup, and takes 32 instructions for E = 128. Side by side, and with -M2 as a factor of its
// own, the right factors make of each pair one product of 128 columns:
//
//     [ar | ai] = Gr [M1 | M2] + Gi [-M2 | M1],   xr = Gr x,   xi = Gi x
//
// (Products into one sum follow each other without a fence only if all have the same shape: PTX
// ISA, "wgmma.fence". Three products instead of four, the first one Gr [M1 | M2 | x] with 192
// columns, break that rule, and took 1.5 times as long.)
//
// The blocks of a cluster share rows. Each has its columns, and fetches its part of Gr and Gi for
// all. A cluster is two blocks at most: of four, on a GPU of 132 multiprocessors, no more than 30
// or so find room. So W is cut into slabs of as many columns as a cluster has, and each cluster
// belongs to one slab. E comes in kSteps steps of 64, which follow one another through a ring of
// stages, forward two at a time, a segment. What a step brings, and how it is loaded, is in
// operators/gradients/tiles.cuh.
constexpr unsigned kMostSteps = 4, kMostBlocks = 2;

#if HOPPER_CODE
// What a thread holds of 64 rows and 64 columns of Gr and Gi: its fragments as left factors.
struct FactorFragments {
  LeftFragments<bf16> Gr, Gi;
};

template <int kSteps, int kCount>
__device__ inline void load_fragments(FactorFragments (&to)[kCount],
                                      const LeftFactors (&from)[kCount]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    to[step] = {from[step].Gr.load_fragments(), from[step].Gi.load_fragments()};
  }
}

// A warpgroup's sums of 64 vertices and 64 features, 128 registers of a thread. ar(e), ai(e), xr(e)
// and xi(e) belong to the same vertex and feature.
struct Gradients {
  Sum<128> a;  // [ar | ai]
  Sum<64> r, i;

  __device__ float& ar(int e) { return a.elements[e]; }
  __device__ float& ai(int e) { return a.elements[32 + e]; }
  __device__ float& xr(int e) { return r.elements[e]; }
  __device__ float& xi(int e) { return i.elements[e]; }
};

// Adds (or, if not `add`, assigns) the product of a segment's first kSteps steps, and of each step
// its first kTaken slices of 16. Two boxes that lie next to each other, M1 and M2, or -M2 and M1,
// are one right factor of 128 columns. The left factors come from registers. If wgmma took them
// from shared memory, it would read each again for each right factor, and shared memory has no
// bandwidth to spare.
template <int kSteps, int kTaken = kSlices, int kCount>
__device__ inline void multiply_segment(Gradients& sums, const FactorFragments (&left)[kCount],
                                        const RightFactors* right, bool add) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const LeftFragments<bf16>&Gr = left[step].Gr, &Gi = left[step].Gi;
#pragma unroll
    for (int slice = 0; slice < kTaken; ++slice) {
      const bool adds = add || step > 0 || slice > 0;
      multiply_slice(sums.a.elements, Gr, right[step].M1.across_k(), slice, adds);
      multiply_slice(sums.r.elements, Gr, right[step].x.across_k(), slice, adds);
      multiply_slice(sums.a.elements, Gi, right[step].minus_M2.across_k(), slice, true);
      multiply_slice(sums.i.elements, Gi, right[step].x.across_k(), slice, adds);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
}

// Assigns the product of the first segment, which has kSteps steps. Up to E = 32 half a step is
// all.
template <int kSteps>
__device__ inline void multiply_first_segment(Gradients& sums,
                                              const FactorFragments (&left)[kSteps],
                                              const RightFactors* right, int E) {
  if (kSteps == 1 && E <= kStepK / 2) {
    multiply_segment<kSteps, kSlices / 2>(sums, left, right, false);
  } else {
    multiply_segment<kSteps>(sums, left, right, false);
  }
}
#endif

template <int kSteps>
struct HopperForward {
  static constexpr int kSegments = (kSteps + 1) / 2, kFirst = steps_of(0, kSteps);
  static constexpr int kStages = kSteps == 1 ? 8 : 2;  // of narrow rows more have to be under way
  static constexpr int kTurns = std::max(kStages, 2 * kSegments);
  static constexpr int kGroups = 2 / kSegments;  // of 64 columns, at most
  struct Segment {
    LeftFactors steps[kFirst];
  };
  RightFactors right[kGroups][kSteps];
  Box<bf16, 64> out[2][kGroups];  // of each consumer
  Pipeline<Segment, kStages, kTurns> segments;
  Barrier loaded[kGroups];
};

// Clusters stay, and take tile after tile of 64 rows. Each block has one or two `groups` of 64
// columns (one, if E has two segments), all of whose right factors it keeps, up to 128 KB. Two
// consumer warpgroups take every other tile each. Nothing makes them alternate, but while one
// computes tanh and writes, the other one has the tensor cores to itself. A segment's fragments, 64
// registers, serve all columns, so that its stage is free again early.
//
// A segment fills one stage. With E = 256 a tile has two segments and fills both stages, so every
// second round of a stage is the other consumer's. But a barrier only shows whether its round is
// odd or even, and a consumer that skips a round could take an old one for a new one. Hence
// barriers do not belong to stages. Two tiles, one for each consumer, have four segments, and each
// of these four *turns* has barriers of its own, at which only one consumer waits (StageBarriers in
// primitives/hopper/pipeline.cuh).
template <int kSteps>
__global__ void __launch_bounds__(384, 1)
    hopper_features(const __grid_constant__ GradientMaps maps, int V, int E, int column_groups) {
#if HOPPER_CODE
  using Shared = HopperForward<kSteps>;
  constexpr int kSegments = Shared::kSegments, kFirst = Shared::kFirst, kGroups = Shared::kGroups;
  using Segment = typename Shared::Segment;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const BlockRow<Releases::warp> cluster;
  const int tiles = (V + 63) / 64, first = blockIdx.y, clusters = gridDim.y;
  const int groups = kGroups > 1 ? column_groups : 1;
  const int col0 = 64 * groups * (cluster.blocks * blockIdx.z + cluster.rank);
  if (threadIdx.x == 0) {
    for (Barrier& each : shared.loaded) barrier_init(&each, 1);
    prepare(shared.segments, 4 * cluster.blocks);  // the warps of a consumer in each block
  }
  cluster.meet();

  if (threadIdx.x < 128) {
    registers_shrink_to<40>();
    if (threadIdx.x == 0) {
      Writer writer(shared.segments);
      for (int tile = first; tile < tiles; tile += clusters) {
#pragma unroll
        for (int segment = 0; segment < kSegments; ++segment) {
          const int steps = steps_of(segment, kSteps);
          writer.put(steps * sizeof(LeftFactors), [&](Segment& to, Barrier* arrived) {
            for (int step = 0; step < steps; ++step) {
              load_left_factors(to.steps[step], maps, tile, kSegmentSteps * segment + step, cluster,
                                arrived);
            }
          });
        }
        if (tile == first) load_right_factors<64>(shared.right, groups, maps, col0, shared.loaded);
      }
      writer.finish();
    }
  } else {
    registers_grow_to<232>();
    const int consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
    Reader reader(shared.segments, cluster);
    reader.next(kSegments * consumer);
    int stored = 0;
    for (int tile = first + consumer * clusters; tile < tiles; tile += 2 * clusters) {
      FactorFragments left[kFirst];
      load_fragments<kFirst>(left, reader.wait().steps);
#pragma unroll 1
      for (int group = 0; group < groups; ++group, ++stored) {
        if (tile < first + 2 * clusters) barrier_wait(&shared.loaded[group], 0);
        const RightFactors* right = shared.right[group];
        Gradients sums;
        multiply_first_segment<kFirst>(sums, left, right, E);
        // Not before this product: loads of fragments may still be under way when the arrival
        // reaches the other block, which would then overwrite the stage. A product that has used
        // the fragments proves that they are loaded.
        if (group == 0) reader.give_back();
        if constexpr (kSegments > 1) {
          constexpr int kRest = kSteps - kSegmentSteps;
          reader.next();
          load_fragments<kRest>(left, reader.wait().steps);
          multiply_segment<kRest>(sums, left, right + kSegmentSteps, true);
          reader.give_back();
        }
        Sum<64> out;
#pragma unroll
        for (int e = 0; e < 32; ++e) {
          out.elements[e] = tanh_approximate(sums.xr(e) * sums.ar(e) + sums.xi(e) * sums.ai(e));
        }
        // Until this box has been read; the other one may still be on its way.
        if (thread == 0) tensor_store_wait_read<kGroups - 1>();
        named_barrier(1 + consumer, 128);
        auto& box = shared.out[consumer][stored % kGroups];
        out.store(box, 0, [&](int e) { return out.elements[e]; });
        shared_fence();
        named_barrier(1 + consumer, 128);
        if (thread == 0) {
          tensor_store(&maps.vertices, 64 * tile, col0 + 64 * group, &box);
          tensor_store_commit();
        }
      }
      reader.next(1 + kSegments);  // also over the other consumer's tile
    }
    if (thread == 0) tensor_store_wait_read<0>();
  }
#endif
}

// Backward, three warpgroups work like an assembly line. Two make P, Q, R, S. The third multiplies
// these by Gr^T and Gi^T, transposed where they lie, and keeps the sums,
//
//     [dM1 | D | dM2] += Gr^T [P | R | Q] + Gi^T [Q | S | -P]
//
// in up to 192 registers a thread. Shared memory is nearly as busy as the tensor cores: so the
// three products with Gr^T are one instruction of up to 192 columns, which reads its rows of Gr^T
// once.
//
// To make P, Q, R, S from the sums takes a warpgroup as long as its product does, or longer. If one
// warpgroup did both, the tensor cores would wait. Of two, each makes half of a tile's P, Q, R, S,
// or one multiplies while the other one makes them. Registers suffice for two: 96 of 128 are sums,
// and left factors come from shared memory, not from registers.
//
// Two things differ from other kernels. A stage of Gr and Gi is read twice, first for the products
// and then with them, so that only the third warpgroup gives it back. And P, Q, R, S go to it
// through a pipeline of one stage, which threads fill (Maker), not the copy engine.

// A block's part of the sums is E x kCols: 32 columns, or up to E = 128 also 64.
template <int kStepCount, int kColCount>
struct HopperBackward {
  static constexpr int kSteps = kStepCount, kCols = kColCount, kHalves = kCols / 32;
  static constexpr int kStages = kCols == 64 ? 6 : 12 - kSteps;  // as many as fit
  static constexpr int kTiles = kCols == 64 ? kStages / kSteps : 1;
  static constexpr int kMakers = kCols == 64 ? 1 : 2;  // that take turns
  BackwardFactors right[kHalves][kSteps];
  LeftFactors left[kStages];
  Box<bf16, 64> d_out[kTiles];  // of 64 columns: comes with a tile's first step
  Pipeline<Products<kCols>, 1, kMakers> products;
  StageBarriers<kStages> stages;
  Barrier loaded[kHalves];
};

#if HOPPER_CODE
// A warpgroup's sums of 64 vertices and 32 features: Gr [M1 | M2 | x] and Gi [M1 | M2 | x], 96
// registers of a thread, of which combine() makes ar and ai. That is half as many registers again
// for a feature as forward. But M1 and M2 are on chip only once, and a left factor from shared
// memory is read once for all three right ones.
struct GradientPairs {
  Sum<96> by_gr, by_gi;

  __device__ float& ar(int e) { return by_gr.elements[e]; }
  __device__ float& ai(int e) { return by_gr.elements[16 + e]; }
  __device__ float& xr(int e) { return by_gr.elements[32 + e]; }
  __device__ float& xi(int e) { return by_gi.elements[32 + e]; }

  // Starts to add (or, if not `add`, to assign) the product of a step's first kTaken slices.
  template <int kTaken = kSlices>
  __device__ void start_product(const LeftFactors& left, const BackwardFactors& right, bool add) {
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kTaken; ++slice) {
      const AcrossK<bf16> all = right.M1_M2.across_k();  // [M1 | M2 | x]
      multiply_slice(by_gr.elements, left.Gr.rows(0), all, slice, add || slice > 0);
      multiply_slice(by_gi.elements, left.Gi.rows(0), all, slice, add || slice > 0);
    }
    wgmma_commit();
  }
  // ar = Gr M1 - Gi M2, ai = Gr M2 + Gi M1
  __device__ void combine() {
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      ar(e) -= by_gi.elements[16 + e];
      ai(e) += by_gi.elements[e];
    }
  }
};

// R, S, P, Q in the place of ar, ai, xr, xi: times g = dOut * (1 - tanh(u)^2), which is dOut *
// 4 e / (1 + e)^2 with e = exp(-2 |u|), see tanh_slope. Here 4 e is computed as a power of 2; a
// result below 2^-126 becomes 0.
__device__ inline void multiply_by_g(GradientPairs& sums, const uint32_t (&d_out)[8]) {
  constexpr float kLog2E = 1.44269504f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 pair = unpack2(d_out[i / 2]);
    const float u = sums.xr(i) * sums.ar(i) + sums.xi(i) * sums.ai(i);
    const float four_e = exp2_approximate(2 - 2 * kLog2E * fabsf(u));
    const float inverse = reciprocal_approximate(1 + four_e / 4);
    const float g = (i % 2 == 0 ? pair.x : pair.y) * inverse * (four_e * inverse);
    sums.ar(i) *= g;
    sums.ai(i) *= g;
    sums.xr(i) *= g;
    sums.xi(i) *= g;
  }
}

// What two warpgroups do: they compute what the forward pass did, then P, Q, R, S, and leave these
// in shared memory. Of 64 columns either has one half, of 32 columns every second tile. They read
// stages, but give none back: the third warpgroup does, which reads the same later.
template <class Shared, class Cluster>
__device__ inline void make_products(Shared& shared, const Cluster& cluster, const bf16* d_out,
                                     int col0, int V, int E, int W) {
  constexpr int kSteps = Shared::kSteps;
  constexpr bool kShare = Shared::kCols == 64;
  const int number = warp_of_block() / 4 - 1, half = kShare ? number : 0;
  const int first = blockIdx.y + (kShare ? 0 : number * gridDim.y);
  Reader reader(shared.stages, cluster);
  Maker maker(shared.products);
  if (!kShare && number == 1) reader.next(kSteps), maker.next();
  barrier_wait(&shared.loaded[half], 0);
  for (int tile = first; 64 * tile < V; tile += (kShare ? 1 : 2) * gridDim.y) {
    GradientPairs sums;
    uint32_t d_out_pairs[8];
    if constexpr (!kShare) load_pairs(d_out_pairs, d_out, 64 * tile, col0, V, W);
    int first_stage = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step, reader.next()) {
      const int stage = reader.wait();
      const LeftFactors& left = shared.left[stage];
      const BackwardFactors& right = shared.right[half][step];
      if (step == 0) first_stage = stage;
      if (kSteps == 1 && E <= kStepK / 2) {
        sums.template start_product<kSlices / 2>(left, right, false);
      } else {
        sums.start_product(left, right, step > 0);
      }
    }
    wgmma_wait<0>();
    if constexpr (kShare) {
      Sum<32>::load_pairs(d_out_pairs, shared.d_out[first_stage / kSteps], 32 * half);
    }
    sums.combine();
    multiply_by_g(sums, d_out_pairs);
    maker.wait().store(sums, 32 * half);
    maker.fill();
    maker.next(Shared::kMakers);
    if constexpr (!kShare) reader.next(kSteps);  // the other one's tile
  }
}
#endif

// The assembly line. partials (clusters of a slab, 3, E, W): dM1, dM2 and D, summed up over each
// cluster's tiles.
template <int kSteps, int kCols>
__global__ void __launch_bounds__(512, 1)
    hopper_accumulate_backward(const __grid_constant__ GradientMaps maps, const bf16* d_out,
                               float* partials, int V, int E, int W) {
#if HOPPER_CODE
  using Shared = HopperBackward<kSteps, kCols>;
  constexpr int kHalves = Shared::kHalves;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const BlockRow<> cluster;
  const int tiles = (V + 63) / 64, first = blockIdx.y, clusters = gridDim.y;
  const int col0 = kCols * (cluster.blocks * blockIdx.z + cluster.rank);
  if (threadIdx.x == 0) {
    for (Barrier& each : shared.loaded) barrier_init(&each, 1);
    prepare(shared.products, 1, 128 * kHalves);
    prepare(shared.stages, cluster.blocks);
  }
  cluster.meet();
  start_next_kernel();

  if (threadIdx.x < 128) {
    registers_shrink_to<24>();
    if (threadIdx.x == 0) {
      Writer writer(shared.stages);
      for (int tile = first; tile < tiles; tile += clusters) {
        for (int step = 0; step < kSteps; ++step) {
          const bool with_d_out = kCols == 64 && step == 0;
          const int of_d_out = with_d_out ? sizeof shared.d_out[0] : 0;
          writer.put(sizeof(LeftFactors) + of_d_out, [&](int stage, Barrier* arrived) {
            load_left_factors(shared.left[stage], maps, tile, step, cluster, arrived);
            if (with_d_out) {
              tensor_load(&shared.d_out[stage / kSteps], &maps.vertices, 64 * tile, col0, arrived);
            }
          });
        }
        if (kCols == 32) prefetch_l2(&maps.vertices, 64 * (tile + clusters), col0);
        if (tile == first) load_right_factors<32>(shared.right, kHalves, maps, col0, shared.loaded);
      }
      writer.finish();
    }
  } else if (threadIdx.x < 384) {  // these keep the 128 registers that all start with
    make_products(shared, cluster, d_out, col0, V, E, W);
  } else {
    registers_grow_to<224>();
    const BlockGrid<1, 1> alone;
    Reader reader(shared.stages, cluster);
    Reader made(shared.products, alone);
    Slice<kCols> slices[kSteps];
    for (int tile = first; tile < tiles; tile += clusters, made.next()) {
      const Products<kCols>& products = made.wait();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        reader.take([&](int stage, bool) {
          const LeftFactors& left = shared.left[stage];
          auto& sum = slices[step].sum.elements;
          wgmma_fence();
#pragma unroll
          for (int slice = 0; slice < kSlices; ++slice) {
            const bool add = tile > first || slice > 0;
            multiply_slice(sum, left.Gr.across_k(), products.by_gr(), slice, add);
            multiply_slice(sum, left.Gi.across_k(), products.by_gi(), slice, true);
          }
          wgmma_commit();
        });
      }
      reader.finish();
      made.give_back();
    }
    float* to = partials + static_cast<size_t>(first) * 3 * E * W;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      slices[step].store(to, kStepK * step, col0, E, W);
    }
  }
#endif
}

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

// A grid of `columns` groups of columns by slices of V: as many as fill the GPU, but at least 3
// (the CPU backend, too, shall add several up), and no more than there are tiles.
template <typename Function>
dim3 slices_of(int64_t tiles, int64_t columns, const Device& device, Function* kernel, int threads,
               int bytes) {
  allow_shared_bytes(kernel, bytes);
  int per_sm = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, bytes));
  const int64_t fill = std::max<int64_t>(3, static_cast<int64_t>(per_sm) * device.sms / columns);
  return dim3(static_cast<unsigned>(columns), static_cast<unsigned>(std::min(tiles, fill)));
}

// For a kernel of small products with `layers` results of up to rows x cols.
dim3 small_blocks(int64_t rows, int64_t cols, unsigned layers) {
  return dim3(blocks_for(cols, kSmall), blocks_for(rows, kSmall), layers);
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
      .checks = table.checks(2);  // xr and xi, as factors of ar and ai and of u
  return true;
}

// Matrices (E, W), one after another.
Layout dense(const Shape& shape) {
  const int W = static_cast<int>(shape.W);
  return {.matrix = shape.coefficients(), .row = W, .group = kSmall, .cols = W};
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

// What follows the partial sums: the gradients.
void launch_rest(const GradientsProblem& table, const GradientsTemporaries& t) {
  const auto [V, E, W] = table.shape;
  const dim3 last = small_blocks(std::max(E, W), W, 3);
  launch_early(add_slices, blocks_for(3 * t.count, 4 * 32), 32 * kSliceWarps, 0, t.partials.data(),
               t.slices, t.dM.data(), t.D.data(), static_cast<size_t>(t.count));
  launch_early(finish_backward, last, kSmallThreads, kSmallBytes, table.operands(), t.dM.data(),
               t.D.data());
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
    launch_rest(table, t);
  };
  table.problem.kernel("associated", Role::ours, launch)
      .needs(80)
      .occupies(table.ends() + t.bytes())
      .needs_shared(bytes)
      // Rounded before u: M1, M2. After it: M1 once more (in ar), R, dM1 and the result.
      .checks = table.checks(1, 4, (tiles + t.slices - 1) / t.slices * Tiles::BV);
}

// False if not even 32 columns fit on chip: of x, M1 and M2, or backward of the sums.
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

constexpr int kHopperThreads = 384, kBackwardThreads = 512;

// The grid, for `cols` columns a block. x: blocks of a cluster, y: clusters, z: slabs.
template <typename Shared, typename Kernel>
dim3 clusters_for(const Shape& shape, int cols, Kernel* kernel, int threads) {
  constexpr int bytes = sizeof(Shared);
  allow_shared_bytes(kernel, bytes);
  const unsigned groups = blocks_for(shape.W, cols);
  const unsigned slabs = blocks_for(groups, kMostBlocks);
  const unsigned blocks = blocks_for(groups, slabs);
  const int clusters = resident_clusters(kernel, blocks, threads, bytes);
  const int64_t of_a_slab = std::max<int64_t>(1, clusters / static_cast<int64_t>(slabs));
  return dim3(blocks, persistent(blocks_for(shape.V, 64), of_a_slab), slabs);
}

// M: M1, M2, -M2.
GradientMaps gradient_maps(const GradientsProblem& table, const bf16* M) {
  const auto [V, E, W] = table.shape;
  const int64_t count = table.shape.coefficients();
  return {.Gr = tensor_map<bf16>(table.Gr, V, E, 64),
          .Gi = tensor_map<bf16>(table.Gi, V, E, 64),
          .minus_M2 = tensor_map<bf16>(M + 2 * count, E, W, 64),
          .M1 = tensor_map<bf16>(M, E, W, 64),
          .M2 = tensor_map<bf16>(M + count, E, W, 64),
          .x = tensor_map<bf16>(table.x, E, W, 64),
          .vertices = tensor_map<bf16>(table.vertices, V, W, 64)};
}

// associate waits for all before it. So hopper_features may read Gr, Gi early; it waits for M1, M2.
template <int kSteps>
void add_hopper_forward(GradientsProblem& table) {
  const auto [V, E, W] = table.shape;
  const auto M = table.problem.output<bf16>(3 * table.shape.coefficients());
  constexpr int kBytes = sizeof(HopperForward<kSteps>);
  const auto kernel = hopper_features<kSteps>;
  const dim3 small = small_blocks(E, W, 3);
  const auto grid_for = [&](int groups) {
    return clusters_for<HopperForward<kSteps>>(table.shape, 64 * groups, kernel, kHopperThreads);
  };
  // With two groups Gr and Gi are read less often. With one there is less to load before the start,
  // which is better as long as a consumer has no more than one tile.
  const bool one_group = W <= 64 || blocks_for(V, 64) <= 2 * grid_for(1).y;
  const int groups = one_group ? 1 : HopperForward<kSteps>::kGroups;
  const dim3 blocks = grid_for(groups);
  const auto launch = [=, V = static_cast<int>(V), &table] {
    const GradientMaps maps = gradient_maps(table, M);
    const Operands in = table.operands();
    associate<<<small, kSmallThreads, kSmallBytes>>>(in, M, dense(table.shape));
    launch_clusters(hopper_features<kSteps>, blocks.x, true, blocks, kHopperThreads, kBytes, maps,
                    V, in.E, groups);
  };
  table.problem.kernel("Hopper", Role::ours, launch)
      .hopper_only()
      .occupies(table.ends() + M.bytes())
      .needs_shared(kBytes)
      .checks = table.checks(1);  // M1 and M2
}

template <int kSteps, int kCols>
void add_hopper_backward(GradientsProblem& table) {
  constexpr int kBytes = sizeof(HopperBackward<kSteps, kCols>);
  const auto [V, E, W] = table.shape;
  const auto kernel = hopper_accumulate_backward<kSteps, kCols>;
  using Shared = HopperBackward<kSteps, kCols>;
  const dim3 blocks = clusters_for<Shared>(table.shape, kCols, kernel, kBackwardThreads);
  // [M1 | M2], 32 columns of either in turn.
  const int cols = static_cast<int>(blocks_for(W, 32)) * 32;
  const Layout layout = {.matrix = 32, .row = 2 * cols, .group = 64, .cols = cols};
  const int matrices = static_cast<int>(blocks_for(2 * cols, W));
  const GradientsTemporaries t(table, matrices, blocks.y);
  const dim3 small = small_blocks(E, W, 2);
  const int64_t tiles = blocks_for(V, 64);
  const auto launch = [=, E = E, &table] {
    const Operands in = table.operands();
    GradientMaps maps = gradient_maps(table, t.M);
    maps.M1 = tensor_map<bf16>(t.M, E, layout.row, 64);
    associate<<<small, kSmallThreads, kSmallBytes>>>(in, t.M, layout);
    launch_clusters(hopper_accumulate_backward<kSteps, kCols>, blocks.x, true, blocks,
                    kBackwardThreads, kBytes, maps, in.d_out, t.partials.data(),
                    static_cast<int>(in.V), in.E, in.W);
    launch_rest(table, t);
  };
  table.problem.kernel("Hopper", Role::ours, launch)
      .hopper_only()
      .occupies(table.ends() + t.bytes())
      .needs_shared(kBytes)
      // Rounded before u: M1, M2. After it: M1 once more (in ar), R, dM1 and the result.
      .checks = table.checks(1, 4, (tiles + blocks.y - 1) / blocks.y * 64);
}

// False if a block would have to keep more than it has room for.
bool add_hopper(GradientsProblem& table, const Device& device) {
  const auto [V, E, W] = table.shape;
  const auto steps = blocks_for(E, kStepK);
  if (steps > kMostSteps) return false;
  // With half as many columns there are half as many partial sums, which is less to do at the end;
  // but more to fetch for each tile.
  const bool wide = W > 32 && (steps == 1 || V >= int64_t{256} * device.sms);
  using Add = void (*)(GradientsProblem&);
  const Add forward[] = {add_hopper_forward<1>, add_hopper_forward<2>, add_hopper_forward<3>,
                         add_hopper_forward<4>};
  const Add backward[] = {wide ? add_hopper_backward<1, 64> : add_hopper_backward<1, 32>,
                          wide ? add_hopper_backward<2, 64> : add_hopper_backward<2, 32>,
                          add_hopper_backward<3, 32>, add_hopper_backward<4, 32>};
  (table.pass == Pass::forward ? forward : backward)[steps - 1](table);
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
  allow_shared_bytes(associate, kSmallBytes);
  allow_shared_bytes(finish_backward, kSmallBytes);
  double worst = 0;
  bool has_one_kernel = true, has_forward = true, has_backward = true, has_hopper = true;
  for (const int64_t V : sizes) {
    GradientsProblem& forward = tables.emplace_back(lesson, blas, Pass::forward, Shape{V, E, W});
    GradientsProblem& backward = tables.emplace_back(lesson, blas, Pass::backward, Shape{V, E, W});
    add_unfused(forward);
    has_one_kernel = add_one_kernel(forward, device);
    has_forward = add_associated(forward, device);
    add_hopper(forward, device);
    add_unfused(backward);
    has_backward = add_associated(backward, device);
    has_hopper = add_hopper(backward, device);
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
