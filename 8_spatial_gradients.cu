// 8. Spatial gradient features on a mesh, forward and backward
//
//     xr = Gr x,  xi = Gi x                                                                 (V, W)
//     ar = xr Lr^T - xi Li^T,  ai = xi Lr^T + xr Li^T                                       (V, W)
//     out = tanh(u),  u = xr * ar + xi * ai                                                 (V, W)
//     Gr, Gi (V, E), x (E, W), Lr, Li (W, W): bf16, row-major; fp32 accumulation
//
// Lesson 7 was one block of DiffusionNet (Sharp, Attaiki, Crane, Ovsjanikov, arXiv 2012.00888), and
// this is another one. Each of W features, given by E coefficients, has a gradient along the
// surface at each of the mesh's V vertices. Its two components, in the plane that touches the
// surface there, are the complex number xr + i xi. Learned weights Lr + i Li mix and rotate the
// gradients of a vertex to ar + i ai. The result says how much a gradient and its mixed gradient
// point the same way: tanh of their scalar product u. The backward pass is explained where its
// kernels begin ("What is computed backward").
//
// With E = 128 and W = 256 that is 4 V E W + 8 V W W operations forward, 655 000 a vertex, for the
// 1024 bytes that a vertex has in Gr, Gi and out. Arithmetic is the limit, as in lesson 3, if xr,
// xi, ar and ai stay on chip. Each is as large as out: written to memory and read again, they would
// be the limit. So fuse. Then the tensor cores should never have to wait for their operands.
//
// A complex product costs four real ones. xr and xi each meet Lr and Li, so each operand is used
// twice, and so is each fragment in a register. Four independent products would load twice as much.
//
// There is more to be saved, since a product of matrices is associative: (A B) C = A (B C). No
// compiler does that, since the two are equal only if nothing is rounded:
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
//     unfused                forward 12, backward 22 library and elementwise kernels, as a
//                            framework does it (problems/gradients/gradients.cu)
//     one kernel             a block's rows of xr, xi stay on chip, and Lr, Li stream through it
//     associated             a block's columns of x, M1, M2 stay on chip, and Gr, Gi stream
//                            through it; also backward
//     warp specialization    one thread copies by TMA, and groups of four warps multiply by wgmma,
//                            as in lesson 3: forward each of two has every other tile; backward two
//                            make P, Q, R and S, and a third one computes the sums over V
//     cluster                two blocks fetch each tile of Gr and Gi once for both
//
// The first three need compute capability 8.0 (bf16 on tensor cores), the last two need 9.0. The
// forward pass comes first, in all of these steps, then the backward pass.

#include <algorithm>
#include <deque>
#include <vector>

#include "common/lesson.h"
#include "common/numerics.h"
#include "primitives/approximate.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/fragments.cuh"
#include "primitives/hopper/block_grid.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/hopper/tiles.cuh"
#include "primitives/launch.h"
#include "problems/gradients/gradients.h"

using namespace problems;
using namespace primitives;

using bf16 = __nv_bfloat16;
// E and W are multiples of 8: every row starts at a multiple of 16 bytes.
using Shape = GradientsShape;
using Operands = GradientsOperands;

// ---- one kernel ---------------------------------------------------------------------------------

// The kernels that do not need Hopper multiply tiles in shared memory. Long rows are cut into boxes
// of 64 columns, each a tile of its own, swizzled. What differs from kernel to kernel is where
// tiles come from, and how long they stay.
//
// The words, from primitives/. A lane's results are pairs of neighbours in a row, as in lesson 3:
// of each 8 x 8 matrix of the warp's results a lane has one pair. Pair (i, j) is that of the matrix
// in row i and column j of matrices.
//
//     load_left, load_right      load a warp's fragments of a left and a right factor from a tile
//     load_right_transposed      the same of a factor that lies transposed, such as rows of Lr for
//                                Lr^T
//     negate                     changes the sign of a left factor
//     add_product                multiplies such fragments, and adds to Sums, the warp's results in
//                                registers (as in lesson 7)
//     pair_of, pair_in           pair (i, j) of the sums; its place in a tile
//     pack2, unpack2             round a pair to one register; make two floats of that again
//     to_tile                    rounds a warp's sums into a tile in shared memory
//     store_results              stores a warp's results to a matrix, through `staging`, shared
//                                memory of the warp's own. A function that it is given computes
//                                pair (i, j) of them
//     copy_swizzled              starts the copies of a tile
//     copies_ahead, next()       start the copies of the next steps; waits for those of this one
//                                (lesson 3's *stages*)
constexpr int kBox = 64;
constexpr int kTile = kBox * kBox;  // elements of a square tile: 8 KB
__host__ __device__ constexpr int boxes_of(int64_t extent) {
  return static_cast<int>(ceil_div(extent, kBox));
}

// A block owns 64 rows, and computes 64 x 64 results at a time. A warp has 32 x 32 elements of each
// of two sums: 64 registers a thread.
constexpr int kThreads = 128, kStages = 2;
__device__ int warp_row() { return threadIdx.x / 64 * 32; }
__device__ int warp_col() { return threadIdx.x / 32 % 2 * 32; }

// xr += Gr x, xi += Gi x for 64 of the inner dimension. If fragments are counted as 16 x 16, each
// one of x is used four times, and each one of Gr and Gi twice.
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
// would fetch less for each row. But then only one block, not two, would fit on a multiprocessor
// (with 64 rows a block has 112 KB). While that one computes tanh and stores 64 columns, the tensor
// cores would have nothing to do.
//
// A stage has room for three tiles: Gr, Gi, x in the first phase, Lr, Li in the second. So in the
// second phase the third tile of the first stage is free: it is the staging area of the results.
int64_t one_kernel_bytes(int64_t W) {
  return (2 * static_cast<int64_t>(boxes_of(W)) + kStages * 3) * kTile * sizeof(bf16);
}
__global__ void __launch_bounds__(kThreads) gradient_features(Operands in) {
  extern __shared__ __align__(128) bf16 tiles[];
  // `boxes` of 64 columns cover E, the inner dimension of the first phase, and `groups` of 64
  // columns cover W, that of the second phase.
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

// M1 = x Lr^T and M2 = x Li^T are products with E rows, and backward ends with such products, too.
// They have few results and long sums. One block for each 64 x 64 results would leave most of the
// GPU idle, and there is so little to do that what counts is how often a block waits for memory. So
// a block owns only 32 x 32 results, and its eight warps share the long sum: a step has 128 of its
// terms, and each warp multiplies 16 of them, for all 32 x 32 results. At the end the warps' sums
// are added up in shared memory. That is split-K in a block. The copies of up to four steps are
// under way at once.
//
// The words:
//   - Lies says how a factor lies in memory: as it is, or transposed.
//   - wait_for_previous_kernel: a kernel that was launched early (launch_early) waits here until
//     the kernel before it has ended. Data that come from elsewhere may be loaded sooner.
//   - start_next_kernel lets the next kernel start while this one still runs, if that one was
//     launched early.
//   - for_pairs visits each pair of a lane's results, add adds four floats to four, and pack4
//     rounds four floats to 8 bytes.
enum class Lies { as_it_is, transposed };
struct Matrix {
  const bf16* data;
  int rows, cols;
};

constexpr int kSmall = 32, kSmallDepth = 128, kSmallStages = 5, kSmallThreads = 256;
constexpr int kSmallTile = kSmall * kSmallDepth;                           // elements
constexpr int kSmallBytes = kSmallStages * 2 * kSmallTile * sizeof(bf16);  // 80 KB
constexpr int kSmallStride = kSmall + 8;  // floats: neighbouring rows start in different banks
static_assert(kSmallThreads / 32 * kSmall * kSmallStride * sizeof(float) <= kSmallBytes);

// Where a thread's four results are, four neighbours in a row:
__device__ int small_row() { return blockIdx.y * kSmall + threadIdx.x / 8; }
__device__ int small_col() { return blockIdx.x * kSmall + threadIdx.x % 8 * 4; }

// Returns the thread's four results: the sum of the warps' sums, and of `first`. The warps' sums
// meet in the memory of the stages, which is free by then.
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

// Returns the thread's four results of left[0] right[0], or of left[0] right[0] + left[1] right[1]
// if there are two `terms`. Unless `first` is null, the four numbers that lie there are added to
// them. Either factor may be transposed in memory. `depth` is the inner dimension. With kEarly the
// left factors and `first` are results of the kernel before this one. While that one ends, copies
// of the right factors are on their way.
template <Lies kLeft, Lies kRight, bool kEarly>
__device__ float4 small_products(bf16* stages, const Matrix* left, const Matrix* right, int terms,
                                 int depth, const float* first) {
  constexpr int kDepth = kSmallDepth, kCopies = kSmallThreads;
  const int boxes = (depth + kDepth - 1) / kDepth, steps = terms * boxes;
  const int row0 = blockIdx.y * kSmall, col0 = blockIdx.x * kSmall;
  const auto stage_of = [&](int step) { return stages + step % kSmallStages * 2 * kSmallTile; };
  const auto copy_left = [&](int step) {
    const Matrix a = left[step / boxes];
    const int k0 = step % boxes * kDepth;
    if constexpr (kLeft == Lies::transposed) {
      copy_swizzled<kDepth, kSmall, kCopies>(stage_of(step), a.data, k0, row0, a.rows, a.cols);
    } else {
      copy_swizzled<kSmall, kDepth, kCopies>(stage_of(step), a.data, row0, k0, a.rows, a.cols);
    }
  };
  const auto copy_right = [&](int step) {
    bf16* tile = stage_of(step) + kSmallTile;
    const Matrix b = right[step / boxes];
    const int k0 = step % boxes * kDepth;
    if constexpr (kRight == Lies::transposed) {
      copy_swizzled<kSmall, kDepth, kCopies>(tile, b.data, col0, k0, b.rows, b.cols);
    } else {
      copy_swizzled<kDepth, kSmall, kCopies>(tile, b.data, k0, col0, b.rows, b.cols);
    }
  };

  if constexpr (kEarly) {
    // These copies are in one group with those of step 0: the first next() waits for all of them.
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
    if constexpr (kLeft == Lies::transposed) {
      load_left_transposed<kSmall>(a, left_tile, 0, k);
    } else {
      load_left<kDepth>(a, left_tile, 0, k);
    }
    if constexpr (kRight == Lies::transposed) {
      load_right_transposed<kDepth>(b, right_tile, k, 0);
    } else {
      load_right<kSmall>(b, right_tile, k, 0);
    }
    add_product(sum, a, b);
  }
  return add_warps(stages, sum, start);
}

// M becomes M1 = x Lr^T and M2 = x Li^T, matrices (E, W), one after the other. Each is computed by
// a layer of blocks (blockIdx.z). If there is a third layer, it computes -M2. Or, if `in_turn`, M
// becomes one matrix, in which 32 columns of M1 and 32 of M2 take turns. For W = 64 its columns are
//
//     M1: 0 to 31   |   M2: 0 to 31   |   M1: 32 to 63   |   M2: 32 to 63
//
// If W is no multiple of 32, columns of zeros fill up M1 and M2. (Skip `in_turn` at the first
// reading: this order is for the last kernel of the lesson, in which each of two warpgroups has 32
// columns of both.)
__global__ void __launch_bounds__(kSmallThreads) associate(Operands in, bf16* M, bool in_turn) {
  start_next_kernel();
  extern __shared__ __align__(128) bf16 stages[];
  const Matrix left = {in.x, in.E, in.W}, right = {blockIdx.z == 0 ? in.Lr : in.Li, in.W, in.W};
  const float4 sum = small_products<Lies::as_it_is, Lies::transposed, false>(stages, &left, &right,
                                                                             1, in.W, nullptr);
  const int row = small_row(), col = small_col();
  if (row >= in.E || (col >= in.W && !in_turn)) return;
  const int64_t of_row = in_turn ? 2 * kSmall * gridDim.x : in.W;
  const int64_t first = in_turn
                            ? 2 * kSmall * blockIdx.x + kSmall * blockIdx.z
                            : static_cast<int64_t>(blockIdx.z) * in.E * in.W + kSmall * blockIdx.x;
  const float sign = blockIdx.z == 2 ? -1 : 1;
  *reinterpret_cast<uint2*>(M + first + row * of_row + col % kSmall) =
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

// A block has kBN columns of x, M1 and M2, all E rows, which stay. It has kStageCount stages, each
// with a 64 x 64 tile of Gr and one of Gi. It also has a staging area for 64 x kBN results. A warp
// has kWV x 32 of these.
template <int kBN, int kWV, int kStageCount>
struct ForwardTiles {
  static constexpr int BV = kBox, BN = kBN, WV = kWV, kStages = kStageCount;
  static_assert(kThreads / 32 == BV / WV * (BN / 32));
  static constexpr int64_t shared_bytes(int64_t E) {
    return (3 * static_cast<int64_t>(boxes_of(E)) * kBox * BN + kStages * 2 * kTile + kBox * BN) *
           sizeof(bf16);
  }
};

// Computes out. Of its temporaries only M1 and M2 go through memory. This is lesson 6's resident
// weights once more: as many blocks as fit on the GPU stay, each with its columns of x, M1 and M2,
// and take tile after tile of 64 rows of Gr and Gi. The blocks that own the columns of the same
// rows, four for W = 256, run at the same time. So Gr and Gi are read from memory once, and by the
// other blocks from the L2 cache.
//
// One lane has all of an element: xr, xi, ar and ai. So xr and xi need not be rounded. If WV is 32,
// a lane has 128 registers of sums, and for 16 of E a warp executes 48 mma.sync and 10 ldmatrix.
// While one block computes tanh and stores, another one on the same multiprocessor multiplies.
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

  // These copies are in one group with those of step 0, so the first next() waits for them, too.
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

// ---- warp specialization: forward ---------------------------------------------------------------

// The same products, six of them, but now the warps of a block have roles. One thread only copies.
// Two warpgroups, the consumers, multiply, compute the results and store them. (A warpgroup is four
// warps, 128 threads, which start a wgmma together.) What does that change?
//
//   - *associated* starts its copies, waits for them and multiplies in the same threads, so each
//     warp spends instructions on copies. Here the copy engine (TMA) copies a whole box for one
//     instruction of one thread.
//   - One instruction wgmma multiplies 64 x 16 by 16 x 64 or 16 x 128, and reads its right factor
//     where it lies in shared memory. *associated* has ldmatrix bring each right factor to the
//     registers of each warp.
//   - Each consumer takes every other tile. While one of them computes tanh and stores, the other
//     one has the tensor cores to itself. The field calls that ping-pong.
//
// For 64 rows and 64 columns of out there are four sums of 64 x 64, 128 registers of each thread of
// a warpgroup: xr, xi, ar and ai. Two right factors side by side make one product of 128 columns
// out of two of 64. For that -M2 is a factor of its own:
//
//     [ar | ai] = Gr [M1 | M2] + Gi [-M2 | M1],   xr = Gr x,   xi = Gi x
//
// (Why is Gr [M1 | M2 | x] not one product of 192 columns? Two wgmma that add to the same registers
// may follow each other without a wait only if both have the same number of columns: PTX ISA,
// "wgmma.fence". The second one here, Gi [-M2 | M1], has 128, so the first has 128, too.)
//
// The words of the product, from primitives/hopper/tiles.cuh:
//   - Box<bf16, 64>: 64 rows of 64 numbers in shared memory, swizzled: what one copy brings.
//     LeftTile is the same, as a part of a left factor.
//   - across_k() says that each row of a box is one k, as in a row-major right factor. The sum says
//     how many columns wgmma reads: for 128 it reads this box and the one that follows in memory.
//   - LeftFragments: a thread's part of a left factor in its registers; load_fragments() loads it.
//   - Sum<128>: a warpgroup's sum of 64 rows and 128 columns. A thread has 64 elements of it.
//   - multiply_slice multiplies 16 of k, a slice. A step is kStepK = 64 of k, or kSlices = 4
//     slices. wgmma_fence comes before the first product, wgmma_commit after the last one, and
//     wgmma_wait<0> waits until all are done.

// E is at most 128 here, and comes in two steps of 64. What E does not fill is zero: the copy
// engine writes zeros for what is outside of a matrix.
constexpr int kSteps = 2, kMostEigen = kSteps * kStepK;
constexpr int kRows = 64;  // of a tile: vertices

// 64 rows of Gr and Gi, in boxes of 64 columns.
struct TangentTile {
  LeftTile<bf16, kRows> Gr[kSteps], Gi[kSteps];
};
// 64 rows (of E) and 64 columns of each right factor. The order matters: M2 has to follow M1, and
// M1 has to follow -M2.
struct RightFactors {
  Box<bf16, kStepK> minus_M2, M1, M2, x;
};
// A block has this in shared memory: its columns of the right factors, in one or two groups of 64;
// two boxes of results for each consumer, which it fills in turn; and two stages of tiles. `loaded`
// has a barrier for each group, at which the copies of its right factors arrive.
struct ForwardShared {
  RightFactors right[2][kSteps];
  Box<bf16, kRows> out[2][2];  // [consumer][in turn]
  Pipeline<TangentTile, 2> stages;
  Barrier loaded[2];
};
constexpr int kForwardThreads = 384;

// Row-major matrices as the copy engine sees them, in boxes of 64 x 64.
struct ForwardMaps {
  CUtensorMap Gr, Gi, minus_M2, M1, M2, x, out;
};

#if HOPPER_CODE

// A thread's elements of a warpgroup's four sums. ar(e), ai(e), xr(e) and xi(e) belong to the same
// vertex and feature. So the thread computes the result of this element without any other thread.
struct Gradients {
  Sum<128> a;  // [ar | ai]: 32 elements of each
  Sum<64> r, i;

  __device__ float& ar(int e) { return a.elements[e]; }
  __device__ float& ai(int e) { return a.elements[32 + e]; }
  __device__ float& xr(int e) { return r.elements[e]; }
  __device__ float& xi(int e) { return i.elements[e]; }
};

// All six products of a tile. Its left factors are in registers. If wgmma took them from shared
// memory, it would read each of them again for each right factor, and shared memory has no
// bandwidth to spare.
__device__ void multiply_tile(Gradients& sums, const LeftFragments<bf16> (&Gr)[kSteps],
                              const LeftFragments<bf16> (&Gi)[kSteps],
                              const RightFactors (&right)[kSteps]) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const bool add = step > 0 || slice > 0;  // the first product is assigned
      multiply_slice(sums.a.elements, Gr[step], right[step].M1.across_k(), slice, add);
      multiply_slice(sums.r.elements, Gr[step], right[step].x.across_k(), slice, add);
      multiply_slice(sums.a.elements, Gi[step], right[step].minus_M2.across_k(), slice, true);
      multiply_slice(sums.i.elements, Gi[step], right[step].x.across_k(), slice, add);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
}

// Starts the copies of a block's columns of x, M1, -M2 and M2, from col0 on. While `associate`
// still makes M1 and M2, the block's first tile and x are already on their way. The first group can
// be multiplied while the second one comes.
__device__ void load_right_factors(ForwardShared& shared, const ForwardMaps& maps, int groups,
                                   int col0) {
  for (int group = 0; group < groups; ++group) {
    barrier_arrive_expect(&shared.loaded[group], sizeof shared.right[group]);
    for (int step = 0; step < kSteps; ++step) {
      tensor_load(&shared.right[group][step].x, &maps.x, kStepK * step, col0 + 64 * group,
                  &shared.loaded[group]);
    }
  }
  wait_for_previous_kernel();  // associate
  for (int group = 0; group < groups; ++group) {
    Barrier* loaded = &shared.loaded[group];
    for (int step = 0; step < kSteps; ++step) {
      RightFactors& to = shared.right[group][step];
      const int row = kStepK * step, col = col0 + 64 * group;
      tensor_load(&to.minus_M2, &maps.minus_M2, row, col, loaded);
      tensor_load(&to.M1, &maps.M1, row, col, loaded);
      tensor_load(&to.M2, &maps.M2, row, col, loaded);
    }
  }
}

// The blocks that share tiles are a row of the grid, so there are gridDim.x of them: one in *warp
// specialization*, one or two in *cluster*. Each warp gives a stage back for itself.
using Cluster = BlockRow<Releases::warp>;

// What a consumer does. Consumer 0 has the block's tiles 0, 2, 4 and so on, consumer 1 the others,
// and there are two stages. So each consumer has a stage of its own.
//
//   - Reader: wait() waits until the copies of the next stage have arrived, and give_back() says
//     that it may be filled again. next(2) goes past this tile and the other consumer's next one.
//   - named_barrier: a barrier of this consumer's 128 threads alone.
//   - shared_fence: after it the copy engine sees what this thread has written to shared memory.
//   - tensor_store starts a copy to memory. tensor_store_wait_read<1> waits until the copy engine
//     has read all but the newest one, so that the other box may be written again.
__device__ __forceinline__ void make_features(ForwardShared& shared, const ForwardMaps& maps,
                                              const Cluster& cluster, int tiles, int groups,
                                              int col0) {
  const int consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
  const int stride = gridDim.y, first = blockIdx.y + consumer * stride;
  Reader reader(shared.stages, cluster);
  reader.next(consumer);
  int stored = 0;
  for (int tile = first; tile < tiles; tile += 2 * stride) {
    const TangentTile& from = reader.wait();
    LeftFragments<bf16> Gr[kSteps], Gi[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Gr[step] = from.Gr[step].load_fragments();
      Gi[step] = from.Gi[step].load_fragments();
    }
#pragma unroll 1
    for (int group = 0; group < groups; ++group, ++stored) {
      if (tile == first) barrier_wait(&shared.loaded[group], 0);
      Gradients sums;
      multiply_tile(sums, Gr, Gi, shared.right[group]);
      // The stage is not given back before this product. The loads of fragments might still be
      // under way then, and the stage would be overwritten too early. A product that has used the
      // fragments proves that they are there.
      if (group == 0) reader.give_back();
      Sum<64> out;
#pragma unroll
      for (int e = 0; e < 32; ++e) {
        out.elements[e] = tanh_approximate(sums.xr(e) * sums.ar(e) + sums.xi(e) * sums.ai(e));
      }
      if (thread == 0) tensor_store_wait_read<1>();
      named_barrier(1 + consumer, 128);
      Box<bf16, kRows>& box = shared.out[consumer][stored % 2];
      out.store(box, 0, [&](int e) { return out.elements[e]; });
      shared_fence();
      named_barrier(1 + consumer, 128);
      if (thread == 0) {
        tensor_store(&maps.out, kRows * tile, col0 + 64 * group, &box);
        tensor_store_commit();
      }
    }
    reader.next(2);
  }
  if (thread == 0) tensor_store_wait_read<0>();
}

#endif  // HOPPER_CODE

// As in *associated*, blocks stay, and take tile after tile. There is one block on each
// multiprocessor. It has up to two groups of 64 columns of the right factors, 128 KB, and two
// stages for tiles of Gr and Gi. A tile comes once for both groups: its fragments stay in 64
// registers of each thread, so that its stage is free again early. The thread that copies needs few
// registers. So its four warps give registers back, and the consumers take them.
//
//   - Writer: put() waits until the next stage is free, says at its barrier how many bytes will
//     come, and starts the copies. prepare() prepares the stages' barriers.
//   - ForwardShared lies in shared memory that the launch asks for. For wgmma and the copy engine
//     its address has to be a multiple of 1024.
//   - registers_shrink_to, registers_grow_to: how many registers each thread of a warpgroup has
//     from here on.
//
//     block (0, y, z)    columns from 64 * groups * z on; tiles y, y + gridDim.y and so on
//     thread 0           copies tile after tile to the two stages in turn, by Writer::put
//     warpgroup 1        the block's first, third, fifth tile: products, tanh, store
//     warpgroup 2        its second, fourth, sixth tile
__global__ void __launch_bounds__(kForwardThreads, 1)
    specialized_features(const __grid_constant__ ForwardMaps maps, int V, int groups) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  ForwardShared& shared = *reinterpret_cast<ForwardShared*>(bytes);
  const Cluster cluster;
  const int tiles = ceil_div(V, kRows), first = blockIdx.y, stride = gridDim.y;
  const int col0 = 64 * groups * blockIdx.z;
  if (threadIdx.x == 0) {
    for (Barrier& each : shared.loaded) barrier_init(&each, 1);
    prepare(shared.stages, 4);  // the warps of a consumer give a stage back
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    registers_shrink_to<40>();
    if (threadIdx.x == 0) {
      Writer writer(shared.stages);
      for (int tile = first; tile < tiles; tile += stride) {
        writer.put([&](TangentTile& to, Barrier* arrived) {
          for (int step = 0; step < kSteps; ++step) {
            tensor_load(&to.Gr[step], &maps.Gr, kRows * tile, kStepK * step, arrived);
            tensor_load(&to.Gi[step], &maps.Gi, kRows * tile, kStepK * step, arrived);
          }
        });
        if (tile == first) load_right_factors(shared, maps, groups, col0);
      }
    }
  } else {
    registers_grow_to<232>();
    make_features(shared, maps, cluster, tiles, groups, col0);
  }
#endif
}

// ---- cluster: forward ---------------------------------------------------------------------------

// With W = 256 two blocks have all columns. In *warp specialization* each of them fetches the same
// tiles of Gr and Gi from the L2 cache. Here the two are a cluster: they run at the same time, and
// one copy can arrive in the shared memory of both (multicast). One block fetches Gr for both, the
// other one Gi. So only half as much comes from the L2 cache.
//
// For that a stage must be free in both blocks before either copies to it. So each consumer's warps
// tell both blocks when they have read a stage, and a stage is given back by twice as many
// arrivals. At the end a block waits in finish() until nobody sends it anything any more.
//
// There are no larger clusters. The blocks of a cluster have to be in one group of neighbouring
// multiprocessors (a GPC). Clusters of four do not fill each such group, and the multiprocessors
// that are left would have no work.
//
//   - What tensor_load_multicast copies arrives at the same place, and at the same barrier, of each
//     block whose bit is set in its last argument. all() has the bits of the whole cluster.
//   - meet() is a barrier of all threads of the cluster: nobody may send anything to a block whose
//     barriers are not prepared yet.
//   - cluster.rank is this block's number in its cluster, and cluster.blocks is how many blocks the
//     cluster has. (Where one block has all W columns, it is alone, and fetches both, Gr and Gi.)
#if HOPPER_CODE
// Starts a block's copies of a tile, which is 64 rows of Gr and Gi with all their columns. They go
// to all blocks of the cluster. The first block copies Gr, and the last one copies Gi.
template <class AnyCluster>
__device__ void load_share(TangentTile& to, const CUtensorMap& Gr, const CUtensorMap& Gi, int tile,
                           const AnyCluster& cluster, Barrier* arrived) {
  for (int step = 0; step < kSteps; ++step) {
    if (cluster.rank == 0) {
      tensor_load_multicast(&to.Gr[step], &Gr, kRows * tile, kStepK * step, arrived, cluster.all());
    }
    if (cluster.rank == cluster.blocks - 1) {
      tensor_load_multicast(&to.Gi[step], &Gi, kRows * tile, kStepK * step, arrived, cluster.all());
    }
  }
}
#endif

__global__ void __launch_bounds__(kForwardThreads, 1)
    cluster_features(const __grid_constant__ ForwardMaps maps, int V, int groups) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  ForwardShared& shared = *reinterpret_cast<ForwardShared*>(bytes);
  const Cluster cluster;
  const int tiles = ceil_div(V, kRows), first = blockIdx.y, stride = gridDim.y;
  const int col0 = 64 * groups * (cluster.blocks * blockIdx.z + cluster.rank);
  if (threadIdx.x == 0) {
    for (Barrier& each : shared.loaded) barrier_init(&each, 1);
    prepare(shared.stages, 4 * cluster.blocks);  // the warps of a consumer in each block
  }
  cluster.meet();

  if (threadIdx.x < 128) {
    registers_shrink_to<40>();
    if (threadIdx.x == 0) {
      Writer writer(shared.stages);
      for (int tile = first; tile < tiles; tile += stride) {
        writer.put([&](TangentTile& to, Barrier* arrived) {
          load_share(to, maps.Gr, maps.Gi, tile, cluster, arrived);
        });
        if (tile == first) load_right_factors(shared, maps, groups, col0);
      }
      writer.finish();
    }
  } else {
    registers_grow_to<232>();
    make_features(shared, maps, cluster, tiles, groups, col0);
  }
#endif
}

// ---- associated: backward -----------------------------------------------------------------------

// 1 - tanh(u)^2. Where |tanh(u)| is near 1, that difference would have hardly a correct digit. With
// e = exp(-2 |u|), which is at most 1, |tanh(u)| is (1 - e) / (1 + e). So the difference is equal
// to 4 e / (1 + e)^2, and this quotient has a small relative error for all u. 4 e is computed as a
// power of 2. The larger |u| is, the larger is the error of the exponent. But the relative error
// stays far below bf16's rounding. A result below 2^-126 becomes 0.
__device__ float tanh_slope(float u) {
  constexpr float kLog2E = 1.44269504f;
  const float four_e = exp2_approximate(2 - 2 * kLog2E * fabsf(u));
  const float inverse = reciprocal_approximate(1 + four_e / 4);
  return inverse * (four_e * inverse);
}

// What is computed backward? dOut (V, W) is given, the gradient with respect to out. The derivative
// of tanh(u) is 1 - tanh(u)^2, so g = dOut * (1 - tanh(u)^2) is the gradient with respect to u. In
// u = xr * ar + xi * ai each factor gets g times the other one:
//
//     P = g * xr,  Q = g * xi      the gradients with respect to ar and ai                  (V, W)
//     R = g * ar,  S = g * ai      what xr and xi get from u itself                         (V, W)
//
// But ar and ai are made of xr and xi: ar = xr Lr^T - xi Li^T, ai = xi Lr^T + xr Li^T. So xr gets P
// Lr + Q Li from these, too, and xi gets Q Lr - P Li. And xr is Gr x, xi is Gi x. That gives
//
//     dLr = P^T xr + Q^T xi,  dLi = Q^T xr - P^T xi                                         (W, W)
//     dx  = Gr^T (R + P Lr + Q Li) + Gi^T (S - P Li + Q Lr)                                 (E, W)
//
// Here, too, products can be bracketed in another way, so that the sums over V are products with
// [Gr, Gi]^T:
//
//     dM1 = Gr^T P + Gi^T Q,  dM2 = Gr^T Q - Gi^T P,  D = Gr^T R + Gi^T S                   (E, W)
//     dLr = dM1^T x,  dLi = dM2^T x,  dx = D + dM1 Lr + dM2 Li
//
// Instead of products (W, V) x (V, W) these are (E, V) x (V, W), each half the work if E is half of
// W; the products with x, Lr and Li are small. The products with Gr^T and Gi^T have long sums, but
// too few results to keep a GPU busy. So the sums over V are cut into slices, as in lesson 7.
//
// `associate` makes M1 and M2, as forward. Then accumulate_backward computes P, Q, R and S, and
// leaves partial sums of dM1, dM2 and D. add_slices adds these up, and finish_backward computes the
// last line.
//
// xr, xi, ar and ai are computed again, at the cost of the forward pass. If that pass saved them,
// it would write 2 KB a vertex, and this one would read them: four times as many bytes as Gr and Gi
// have. And from one pass to the other they would occupy four times the memory of out. The unfused
// form saves them, as a framework does; compare the memory column.

// A block has kBN columns of x, M1 and M2, which stay. It has two stages, each with kBV rows of Gr,
// of Gi and of kBN columns of dOut. Beside the stages it has P, Q, R and S of one tile. A warp
// computes kWV x kWN of each of these four, and owns 32 x 32 of each of the three sums. There are
// as many warps as sums of kMaxE rows and kBN columns need.
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

// Computes P, Q, R and S from a warp's sums and dOut, and writes them, rounded, into their tiles in
// shared memory. These tiles lie one after the other, in this order.
constexpr int kP = 0, kQ = 1, kR = 2, kS = 3;
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
      leave(kP, xr);
      leave(kQ, xi);
      leave(kR, ar);
      leave(kS, ai);
    }
  }
}

// A warp's 32 x 32 elements of each sum over V.
struct GradientSums {
  Sums<32, 32> dM1 = {}, dM2 = {}, D = {};
};

// Adds what BV vertices contribute to a warp's sums. A column of Gr or Gi is a row of the sums. The
// warp's part of their tiles starts at column `row`, that of P, Q, R and S at column `col`. A step
// takes 16 vertices. Each of P, Q, R and S is loaded once, and multiplied by what it meets in the
// formulas. mma.sync can only add: for - Gi^T P the fragments of Gi change their signs.
template <int BV, int BN>
__device__ void add_gradients(GradientSums& sums, const bf16* Gr_tile, const bf16* Gi_tile,
                              const bf16* products, int row, int col) {
#pragma unroll
  for (int k = 0; k < BV; k += 16) {
    unsigned gr[2][4], gi[2][4], minus_gi[2][4], right[2][4];
    load_left_transposed<kBox>(gr, Gr_tile, row, k);
    load_left_transposed<kBox>(gi, Gi_tile, row, k);
    negate(minus_gi, gi);
    load_right<BN>(right, products + kP * BV * BN, k, col);
    add_product(sums.dM1, gr, right);
    add_product(sums.dM2, minus_gi, right);
    load_right<BN>(right, products + kQ * BV * BN, k, col);
    add_product(sums.dM1, gi, right);
    add_product(sums.dM2, gr, right);
    load_right<BN>(right, products + kR * BV * BN, k, col);
    add_product(sums.D, gr, right);
    load_right<BN>(right, products + kS * BV * BN, k, col);
    add_product(sums.D, gi, right);
  }
}

// Writes partials (slices, 3, E, W): for each slice dM1, dM2 and D, summed up over every
// gridDim.y-th tile of BV vertices. Block (i, slice) owns BN columns of x, M1, M2 and of the sums.
// This is what becomes of one tile:
//
//     copied           Gr, Gi: BV rows            dOut: BV x BN      x, M1, M2: E x BN, stay
//                        |       |                  |                  |
//     1. multiply        |       +--- Gr x, ... ----|------------------+
//                        |                |         |
//        registers       |         xr, xi, ar, ai   |
//     2. u, g            |                +---------+
//        shared memory   |           P, Q, R, S: BV x BN
//                        |                |
//     3. multiply        +-- Gr^T P, ... -+
//                                |
//        registers         dM1, dM2, D: E x BN, stay
//
// The tiles of Gr and Gi that were multiplied in 1 are the left factors in 3, too, transposed by
// ldmatrix on the way to the registers. So a block copies each tile once. P, Q, R and S exist for
// one tile at a time, and are the right factors in 3, whose inner dimension is the vertices.
//
// In 1 and 2 a warp has WV x WN elements of the tile, in 3 it has 32 x 32 elements of each sum: 96
// registers a thread. A warp's results of 2 are read by others, so a barrier stands between 2 and
// 3. The barrier in next() stands between 3 and the next tile's 2.
template <typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocksPerSM)
    accumulate_backward(Operands in, const bf16* M, float* partials) {
  constexpr int BV = Tiles::BV, BN = Tiles::BN, WV = Tiles::WV, WN = Tiles::WN;
  constexpr int kStages = Tiles::kStages, kBlockThreads = Tiles::kThreads;
  extern __shared__ __align__(128) bf16 tiles[];
  const int boxes = boxes_of(in.E), w0 = blockIdx.x * BN;
  const int64_t tile_count = (in.V + BV - 1) / BV;
  bf16* right_tiles = tiles;
  bf16* stages = right_tiles + 3 * boxes * kBox * BN;
  bf16* products = stages + kStages * Tiles::stage(in.E);
  struct Stage {
    bf16 *Gr, *Gi, *d_out;  // Gr and Gi in boxes of 64 columns
  };
  const auto stage_of = [&](int step) {
    bf16* Gr = stages + step % kStages * Tiles::stage(in.E);
    bf16* Gi = Gr + boxes * kBox * BV;
    return Stage{Gr, Gi, Gi + boxes * kBox * BV};
  };
  const auto copy_step = [&](int step) {
    const int64_t tile = blockIdx.y + static_cast<int64_t>(step) * gridDim.y;
    if (tile >= tile_count) return;
    const Stage to = stage_of(step);
    for (int box = 0; box < boxes; ++box) {
      const int at = box * kBox * BV, e = box * kBox;
      copy_swizzled<BV, kBox, kBlockThreads>(to.Gr + at, in.Gr, tile * BV, e, in.V, in.E);
      copy_swizzled<BV, kBox, kBlockThreads>(to.Gi + at, in.Gi, tile * BV, e, in.V, in.E);
    }
    copy_swizzled<BV, BN, kBlockThreads>(to.d_out, in.d_out, tile * BV, w0, in.V, in.W);
  };

  copy_right_factors<BN, kBlockThreads>(right_tiles, in, M, w0);
  auto ahead = copies_ahead<kStages>(copy_step);
  const int warp = threadIdx.x / 32;
  const int row = warp / (BN / WN) * WV, col = warp % (BN / WN) * WN;  // in the tile
  const int sum_row = warp / (BN / 32) * 32, sum_col = warp % (BN / 32) * 32;
  GradientSums sums;
  for (int64_t tile = blockIdx.y; tile < tile_count; tile += gridDim.y) {
    const Stage from = stage_of(ahead.next());
    WarpSums<WV, WN> tile_sums;
    for (int box = 0; box < boxes; ++box) {  // 1
      const int left = box * kBox * BV;
      add_associated<BN>(tile_sums, from.Gr + left, from.Gi + left,
                         right_tiles + 3 * box * kBox * BN, row, col);
    }
    leave_products<BV, BN>(products, tile_sums, from.d_out, row, col);  // 2
    __syncthreads();
    if (sum_row < in.E) {  // 3
      const int left = sum_row / kBox * kBox * BV;
      add_gradients<BV, BN>(sums, from.Gr + left, from.Gi + left, products, sum_row % kBox,
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

// Adds up the partial sums, in the same order in every run. dM (2, E, W) becomes dM1 and dM2 in
// bf16, as factors of the last products. D (E, W) is in fp32. `count` is E W. The four warps of a
// block have the same 128 elements, 4 neighbours a lane. Each warp adds up every fourth slice, so
// that many loads are on their way at once. Then warp 0 adds up the warps' sums.
constexpr int kSliceWarps = 4;
__global__ void __launch_bounds__(32 * kSliceWarps)
    add_slices(const float* partials, int slices, bf16* dM, float* D, size_t count) {
  wait_for_previous_kernel();
  start_next_kernel();
  __shared__ float4 sums[kSliceWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const size_t i = (static_cast<size_t>(blockIdx.x) * 32 + lane) * 4;
  const bool inside = i < 3 * count;
  float4 sum = {};
  // A thread that has nothing to add begins behind the last slice.
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
    sum = small_products<Lies::as_it_is, Lies::as_it_is, true>(stages, left, right, 2, in.W,
                                                               inside ? D + at : nullptr);
  } else {
    const Matrix left = blockIdx.z == 0 ? dM1 : dM2, right = {in.x, in.E, in.W};
    sum = small_products<Lies::transposed, Lies::as_it_is, true>(stages, &left, &right, 1, in.E,
                                                                 nullptr);
  }
  bf16* to = is_dx ? in.d_x : blockIdx.z == 0 ? in.d_Lr : in.d_Li;
  if (inside) *reinterpret_cast<uint2*>(to + at) = pack4<bf16>(sum);
}

// ---- warp specialization: backward --------------------------------------------------------------

// *associated* does one after the other: products, tanh, products. While its warps compute P, Q, R
// and S, the tensor cores have little to do. Here four warpgroups work like an assembly line, and
// each has one role:
//
//     warpgroup 0       one thread copies tiles of Gr, Gi and dOut to three stages
//     warpgroups 1, 2   the makers. Each multiplies a tile by its 32 of the block's 64 columns of
//                       x, M1 and M2, computes P, Q, R and S, and leaves them in shared memory
//     warpgroup 3       multiplies these by Gr^T and Gi^T, and keeps the sums in its registers
//
// So while tile t is added to the sums, the makers work on tile t + 1, and tile t + 2 is copied:
//
//     copies     tile 2            tile 3            tile 4
//     makers     tile 1: P Q R S   tile 2: P Q R S   tile 3: P Q R S
//     sums       += tile 0         += tile 1         += tile 2
//
// P, Q, R and S are made from a maker's sums on the CUDA cores. There are two makers, so that while
// one of them does that, the other one's products can keep the tensor cores busy.
//
// The sums of a block are E x 64 of each of dM1, D and dM2,
//
//     [dM1 | D | dM2] += Gr^T [P | R | Q] + Gi^T [Q | S | -P]
//
// in 192 registers of a thread. Shared memory is nearly as busy as the tensor cores. So the three
// products with Gr^T are one instruction of 192 columns, which reads its rows of Gr^T once. For
// that P, R, Q, S and -P lie side by side in shared memory, and each right factor is three
// neighbours of these. (-P is there because wgmma can change the sign of a whole factor only: PTX
// ISA, "wgmma.mma_async". In [Q | S | -P] one third has to change it.)
//
//     products         P     R     Q     S    -P
//     beside Gr^T     [P     R     Q]
//     beside Gi^T                 [Q     S    -P]
//
// The words:
//   - A left factor may come from shared memory, too: rows(0) says that a row of the box is a row
//     of the factor, and across_k() that a column of the box is one. So wgmma transposes Gr itself.
//   - `made` and `added` are barriers around P, Q, R and S. All 256 threads of the makers arrive at
//     `made` when they have written their part of a tile. One thread of warpgroup 3 arrives at
//     `added` when the tile is in its sums. Phases and the block's tiles are counted from 0. For
//     tile t warpgroup 3 waits for phase t of `made`. Before they write, the makers wait for phase
//     t - 1 of `added`: for tile 0 they pass at once.
//   - Two blocks are a cluster and share each tile of Gr and Gi, as forward.
//   - Sum<32>::load_pairs loads a thread's elements of dOut, in pairs.

// 64 rows (of E) and 32 columns of each right factor. The two boxes lie one after the other, so
// wgmma reads 96 columns as one factor: [M1 | M2 | x].
struct BackwardFactors {
  Box<bf16, kStepK> M1_M2, x;  // of box x the first 32 columns are read
};
struct BackwardStage {
  TangentTile tangents;
  Box<bf16, kRows> d_out;
};
struct BackwardShared {
  BackwardFactors right[2][kSteps];  // [maker]
  Pipeline<BackwardStage, 3> stages;
  Box<bf16, kRows> products[5];  // P, R, Q, S, -P: 64 columns of each
  Barrier made, added, loaded[2];
};
constexpr int kBackwardThreads = 512, kBackwardCols = 64;

// M1_M2: 32 columns of either in turn, as `associate` leaves them.
struct BackwardMaps {
  CUtensorMap Gr, Gi, M1_M2, x, d_out;
};

#if HOPPER_CODE

using BackwardCluster = BlockRow<Releases::warpgroup>;  // a warpgroup arrives once in each block

// A maker's sums of 64 vertices and 32 features, 96 registers of a thread. What is in these
// registers changes, and ar(), ai(), xr() and xi() name places:
//
//     by_gr, elements      0 to 15 (ar)         16 to 31 (ai)        32 to 47 (xr)
//     after multiply()     Gr M1                Gr M2                xr = Gr x
//     after combine()      ar = Gr M1 - Gi M2   ai = Gr M2 + Gi M1   xr
//     after *_by_g()       R = g ar             S = g ai             P = g xr
//
//     by_gi, elements      0 to 15              16 to 31             32 to 47 (xi)
//     after multiply()     Gi M1                Gi M2                xi = Gi x
//     after *_by_g()       (not needed)         (not needed)         Q = g xi
//
// Forward a thread has 128 registers of sums for 64 features, here it has 96 for 32. But -M2
// need not be on chip, and a left factor from shared memory is read once for all three right
// factors. (A maker has 128 registers. Fragments of left factors would not fit beside the sums.)
struct MakerSums {
  Sum<96> by_gr, by_gi;

  __device__ float& ar(int e) { return by_gr.elements[e]; }
  __device__ float& ai(int e) { return by_gr.elements[16 + e]; }
  __device__ float& xr(int e) { return by_gr.elements[32 + e]; }
  __device__ float& xi(int e) { return by_gi.elements[32 + e]; }

  __device__ void multiply(const TangentTile& left, const BackwardFactors (&right)[kSteps]) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const AcrossK<bf16> all = right[step].M1_M2.across_k();  // [M1 | M2 | x]
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const bool add = step > 0 || slice > 0;
        multiply_slice(by_gr.elements, left.Gr[step].rows(0), all, slice, add);
        multiply_slice(by_gi.elements, left.Gi[step].rows(0), all, slice, add);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
  }
  __device__ void combine() {
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      ar(e) -= by_gi.elements[16 + e];
      ai(e) += by_gi.elements[e];
    }
  }
  // Multiplies by g: R, S, P and Q take the places of ar, ai, xr and xi.
  __device__ void multiply_by_g(const uint32_t (&d_out)[8]) {
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const float2 pair = unpack2(d_out[e / 2]);
      const float g = (e % 2 == 0 ? pair.x : pair.y) * tanh_slope(xr(e) * ar(e) + xi(e) * ai(e));
      ar(e) *= g;
      ai(e) *= g;
      xr(e) *= g;
      xi(e) *= g;
    }
  }
};

// Starts the copies of a block's columns of x, M1 and M2, from col0 on: 32 for each maker. While
// `associate` still makes M1 and M2, x is already on its way.
__device__ void load_right_factors(BackwardShared& shared, const BackwardMaps& maps, int col0) {
  for (int maker = 0; maker < 2; ++maker) {
    Barrier* loaded = &shared.loaded[maker];
    barrier_arrive_expect(loaded, sizeof shared.right[maker]);
    for (int step = 0; step < kSteps; ++step) {
      tensor_load(&shared.right[maker][step].x, &maps.x, kStepK * step, col0 + 32 * maker, loaded);
    }
  }
  wait_for_previous_kernel();  // associate
  for (int maker = 0; maker < 2; ++maker) {
    for (int step = 0; step < kSteps; ++step) {
      tensor_load(&shared.right[maker][step].M1_M2, &maps.M1_M2, kStepK * step,
                  2 * (col0 + 32 * maker), &shared.loaded[maker]);
    }
  }
}

// What a maker does with each of the block's tiles. It reads stages, but gives none back:
// warpgroup 3 reads the same stage later, and does that. put(i, ...) writes the maker's 32 columns
// of products[i]; since multiply_by_g() P stands in the place of xr, and so on.
__device__ void make_products(BackwardShared& shared, const BackwardCluster& cluster, int tiles) {
  const int maker = warp_of_block() / 4 - 1, col = 32 * maker;
  Reader reader(shared.stages, cluster);
  barrier_wait(&shared.loaded[maker], 0);
  int parity = 0;
  for (int tile = blockIdx.y; tile < tiles; tile += gridDim.y, parity ^= 1, reader.next()) {
    const BackwardStage& stage = reader.wait();
    MakerSums sums;
    sums.multiply(stage.tangents, shared.right[maker]);
    uint32_t d_out[8];
    Sum<32>::load_pairs(d_out, stage.d_out, col);
    sums.combine();
    sums.multiply_by_g(d_out);
    barrier_wait(&shared.added, parity ^ 1);  // the first time nobody waits
    const auto put = [&](int which, auto f) { Sum<32>::store(shared.products[which], 0, f, col); };
    put(0, [&](int e) { return sums.xr(e); });
    put(1, [&](int e) { return sums.ar(e); });
    put(2, [&](int e) { return sums.xi(e); });
    put(3, [&](int e) { return sums.ai(e); });
    put(4, [&](int e) { return -sums.xr(e); });
    shared_fence();  // wgmma reads them next
    barrier_arrive(&shared.made);
  }
}

// What warpgroup 3 does with each tile. At the end it stores its sums dM1, dM2 and D to partials
// (slices, 3, E, W).
__device__ void add_products(BackwardShared& shared, const BackwardCluster& cluster,
                             float* partials, int tiles, int col0, int E, int W) {
  Reader reader(shared.stages, cluster);
  const int first = blockIdx.y, stride = gridDim.y;
  Sum<3 * kBackwardCols> sums[kSteps];  // [dM1 | D | dM2], for 64 rows of E each
  int parity = 0;
  for (int tile = first; tile < tiles; tile += stride, parity ^= 1, reader.next()) {
    barrier_wait(&shared.made, parity);
    const TangentTile& left = reader.wait().tangents;
    const AcrossK<bf16> by_gr = shared.products[0].across_k();  // [P | R | Q]
    const AcrossK<bf16> by_gi = shared.products[2].across_k();  // [Q | S | -P]
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const bool add = tile > first || slice > 0;
        multiply_slice(sums[step].elements, left.Gr[step].across_k(), by_gr, slice, add);
        multiply_slice(sums[step].elements, left.Gi[step].across_k(), by_gi, slice, true);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    reader.give_back();
    if (threadIdx.x % 128 == 0) barrier_arrive(&shared.added);
  }
  float* to = partials + static_cast<size_t>(first) * 3 * E * W;
  const size_t next = static_cast<size_t>(E) * W;
  // Each third of a Sum<192> has its elements as a Sum<64> would: 32 of a thread, in this order.
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const float* elements = sums[step].elements;
#pragma unroll
    for (int i = 0; i < kBackwardCols / 2; i += 2) {
      const int e = kStepK * step + Sum<kBackwardCols>::row(i);
      const int w = col0 + Sum<kBackwardCols>::col(i);
      if (e >= E || w >= W) continue;
      // Here the order is dM1, D, dM2, and in `partials` it is dM1, dM2, D.
      const auto store = [&](int matrix, int part) {
        const float* pair = elements + part * kBackwardCols / 2 + i;
        *reinterpret_cast<float2*>(to + matrix * next + static_cast<size_t>(e) * W + w) =
            make_float2(pair[0], pair[1]);
      };
      store(0, 0);
      store(1, 2);
      store(2, 1);
    }
  }
}

#endif  // HOPPER_CODE

// Writes partials (slices, 3, E, W): for each slice dM1, dM2 and D, summed up over its tiles.
// blockIdx.y is the slice, and its tiles are every gridDim.y-th one. A row of the grid is a
// cluster, and each of its blocks has other columns. blockIdx.z counts the clusters along W.
__global__ void __launch_bounds__(kBackwardThreads, 1)
    specialized_backward(const __grid_constant__ BackwardMaps maps, float* partials, int V, int E,
                         int W) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  BackwardShared& shared = *reinterpret_cast<BackwardShared*>(bytes);
  const BackwardCluster cluster;
  const int tiles = ceil_div(V, kRows), first = blockIdx.y, stride = gridDim.y;
  const int col0 = kBackwardCols * (cluster.blocks * blockIdx.z + cluster.rank);
  if (threadIdx.x == 0) {
    for (Barrier& each : shared.loaded) barrier_init(&each, 1);
    barrier_init(&shared.made, 256);
    barrier_init(&shared.added, 1);
    prepare(shared.stages, cluster.blocks);
  }
  cluster.meet();
  start_next_kernel();

  if (threadIdx.x < 128) {
    registers_shrink_to<24>();
    if (threadIdx.x == 0) {
      Writer writer(shared.stages);
      for (int tile = first; tile < tiles; tile += stride) {
        writer.put([&](BackwardStage& to, Barrier* arrived) {
          load_share(to.tangents, maps.Gr, maps.Gi, tile, cluster, arrived);
          tensor_load(&to.d_out, &maps.d_out, kRows * tile, col0, arrived);
        });
        if (tile == first) load_right_factors(shared, maps, col0);
      }
      writer.finish();
    }
  } else if (threadIdx.x < 384) {  // these keep the 128 registers that all start with
    make_products(shared, cluster, tiles);
  } else {
    registers_grow_to<224>();
    add_products(shared, cluster, partials, tiles, col0, E, W);
  }
#endif
}

// ---- The rows of the tables ---------------------------------------------------------------------

// The tiles of *associated*. For E = 128 the wide ones take 104 KB and 160 KB, so that two blocks
// forward and one backward fit on a multiprocessor of compute capability 9.0. The narrow ones take
// 60 KB and 68 KB and fit everywhere, and for small V there are more blocks of them.
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

// For a kernel of small products with `layers` results of up to rows x cols.
dim3 small_blocks(int64_t rows, int64_t cols, unsigned layers) {
  return dim3(blocks_for(cols, kSmall), blocks_for(rows, kSmall), layers);
}

// The grid of clusters of one or two blocks, whose blocks own `cols` columns each. x: the blocks of
// a cluster, y: slices of V, z: clusters along W. There are as many clusters as the device holds,
// or fewer if these need no more rounds (see persistent()). y is 0 where no cluster fits.
template <typename Function>
dim3 clusters_for(const Shape& shape, int cols, Function* kernel, int threads, int bytes) {
  allow_shared_bytes(kernel, bytes);
  const unsigned all = blocks_for(shape.W, cols), groups = blocks_for(all, 2);
  const unsigned blocks = blocks_for(all, groups);
  const int64_t clusters = clusters_that_fit(kernel, blocks, threads, bytes);
  if (clusters == 0) return dim3(blocks, 0, groups);
  return dim3(blocks,
              persistent(blocks_for(shape.V, kRows), std::max<int64_t>(1, clusters / groups)),
              groups);
}

// Returns false if a block's rows of xr and xi do not fit on chip.
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
    associate<<<small, kSmallThreads, kSmallBytes>>>(table.operands(), M, false);
    associated_features<Tiles><<<blocks, kThreads, bytes>>>(table.operands(), M);
  };
  table.problem.kernel("associated", Role::ours, launch)
      .needs(80)
      .occupies(table.ends() + M.bytes())
      .needs_shared(bytes)
      .checks = table.checks(1);  // M1 and M2
}

// What *warp specialization* and *cluster* share: M1, M2 and -M2, and a launch of `kernel`, which
// may start while `associate` still runs.
template <typename Function>
void add_forward_of_roles(GradientsProblem& table, const char* name, Function* kernel, dim3 blocks,
                          int groups) {
  const auto [V, E, W] = table.shape;
  const int64_t count = table.shape.coefficients();
  const auto M = table.problem.output<bf16>(3 * count);
  const dim3 small = small_blocks(E, W, 3);
  const auto launch = [=, &table, V = V, E = E, W = W] {
    const Operands in = table.operands();
    const ForwardMaps maps = {.Gr = tensor_map<bf16>(in.Gr, V, E, kRows),
                              .Gi = tensor_map<bf16>(in.Gi, V, E, kRows),
                              .minus_M2 = tensor_map<bf16>(M + 2 * count, E, W, kStepK),
                              .M1 = tensor_map<bf16>(M, E, W, kStepK),
                              .M2 = tensor_map<bf16>(M + count, E, W, kStepK),
                              .x = tensor_map<bf16>(in.x, E, W, kStepK),
                              .out = tensor_map<bf16>(in.out, V, W, kRows)};
    associate<<<small, kSmallThreads, kSmallBytes>>>(in, M, false);
    launch_clusters(kernel, blocks.x, true, blocks, kForwardThreads, sizeof(ForwardShared), maps,
                    static_cast<int>(V), groups);
  };
  table.problem.kernel(name, Role::ours, launch)
      .hopper_only()
      .occupies(table.ends() + M.bytes())
      .needs_shared(sizeof(ForwardShared))
      .checks = table.checks(1);  // M1 and M2
}

void add_warp_specialization(GradientsProblem& table) {
  const auto [V, E, W] = table.shape;
  const int groups = W <= 64 ? 1 : 2;
  const unsigned columns = blocks_for(W, 64 * groups);
  const int64_t slices = std::max<int64_t>(1, multiprocessors() / static_cast<int64_t>(columns));
  allow_shared_bytes(specialized_features, sizeof(ForwardShared));
  add_forward_of_roles(table, "warp specialization", specialized_features,
                       dim3(1, persistent(blocks_for(V, kRows), slices), columns), groups);
}

// The same in clusters. Where a consumer has no more than one tile, blocks have one group: then
// there is less to load before the start. Returns false if no cluster fits.
bool add_cluster(GradientsProblem& table) {
  const auto grid_for = [&](int groups) {
    return clusters_for(table.shape, 64 * groups, cluster_features, kForwardThreads,
                        sizeof(ForwardShared));
  };
  const bool one = table.shape.W <= 64 || blocks_for(table.shape.V, kRows) <= 2 * grid_for(1).y;
  const int groups = one ? 1 : 2;
  const dim3 blocks = grid_for(groups);
  if (blocks.y == 0) return false;
  add_forward_of_roles(table, "cluster", cluster_features, blocks, groups);
  return true;
}

// What a backward pass launches after the partial sums. Each is launched early.
void launch_rest(const Operands& in, const GradientsTemporaries& t) {
  const size_t count = static_cast<size_t>(in.E) * in.W;
  launch_early(add_slices, blocks_for(3 * static_cast<int64_t>(count), 4 * 32), 32 * kSliceWarps, 0,
               t.partials.data(), t.slices, t.dM.data(), t.D.data(), count);
  launch_early(finish_backward, small_blocks(std::max(in.E, in.W), in.W, 3), kSmallThreads,
               kSmallBytes, in, t.dM.data(), t.D.data());
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
    associate<<<small, kSmallThreads, kSmallBytes>>>(in, t.M, false);
    accumulate_backward<Tiles><<<blocks, Tiles::kThreads, bytes>>>(in, t.M, t.partials);
    launch_rest(in, t);
  };
  table.problem.kernel("associated", Role::ours, launch)
      .needs(80)
      .occupies(table.ends() + t.bytes())
      .needs_shared(bytes)
      // One rounding before u: M1 and M2. At most four from u to a gradient: M1 or M2 in ar or ai;
      // P, Q, R or S; dM1 or dM2; the gradient. The last: how many vertices one sum adds up.
      .checks = table.checks(1, 4, (tiles + t.slices - 1) / t.slices * Tiles::BV);
}

bool add_backward_of_roles(GradientsProblem& table) {
  const auto [V, E, W] = table.shape;
  constexpr int kBytes = sizeof(BackwardShared);
  const dim3 blocks =
      clusters_for(table.shape, kBackwardCols, specialized_backward, kBackwardThreads, kBytes);
  if (blocks.y == 0) return false;
  const dim3 small = small_blocks(E, W, 2);
  const int64_t both = 2 * kSmall * static_cast<int64_t>(small.x);  // columns of [M1 | M2]
  // There is room for M, in matrices of W columns.
  const GradientsTemporaries t(table, static_cast<int>(ceil_div(both, W)), blocks.y);
  const auto launch = [=, &table, V = V, E = E, W = W] {
    const Operands in = table.operands();
    const BackwardMaps maps = {.Gr = tensor_map<bf16>(in.Gr, V, E, kRows),
                               .Gi = tensor_map<bf16>(in.Gi, V, E, kRows),
                               .M1_M2 = tensor_map<bf16>(t.M, E, both, kStepK),
                               .x = tensor_map<bf16>(in.x, E, W, kStepK),
                               .d_out = tensor_map<bf16>(in.d_out, V, W, kRows)};
    associate<<<small, kSmallThreads, kSmallBytes>>>(in, t.M, true);
    launch_clusters(specialized_backward, blocks.x, true, blocks, kBackwardThreads, kBytes, maps,
                    t.partials.data(), in.V, in.E, in.W);
    launch_rest(in, t);
  };
  const int64_t chain = kRows * ceil_div<int64_t>(blocks_for(V, kRows), blocks.y);
  table.problem.kernel("warp specialization", Role::ours, launch)
      .hopper_only()
      .occupies(table.ends() + t.bytes())
      .needs_shared(kBytes)
      .checks = table.checks(1, 4, chain);  // as *associated*
  return true;
}

// Returns false if it cannot run: forward if 32 columns of x, M1 and M2 do not fit on chip,
// backward if E is above 128, since its sums are in registers.
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

// Returns false if E is above 128, the most that these kernels have tiles for, or no cluster fits.
bool add_roles(GradientsProblem& table) {
  if (table.shape.E > kMostEigen) return false;
  if (table.pass == Pass::backward) return add_backward_of_roles(table);
  add_warp_specialization(table);
  return add_cluster(table);
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "8_spatial_gradients",
                 .title = "spatial gradient features on a mesh, forward and backward",
                 .n_meaning = "V, vertices of the mesh",
                 .n_gpu = 131072,
                 .n_cpu = 1000,
                 .options = {{.name = "--eigen",
                              .meaning = "E, coefficients of a feature",
                              .value = 128,
                              .multiple_of = 8,
                              .cpu = 72},
                             {.name = "--width",
                              .meaning = "W, features of a vertex",
                              .value = 256,
                              .multiple_of = 8,
                              .cpu = 136}},
                 .flags = {{"--steep", "backward with |tanh(u)| near 1; without unfused"}},
                 .sweep = {.gpu = {1024, 1048576}, .cpu = {1024, 2048}}});
  const int64_t E = lesson.option("--eigen"), W = lesson.option("--width");
  const std::vector<int64_t> sizes = lesson.sizes();

  Cublas blas;
  std::deque<GradientsProblem> tables;
  const Device& device = lesson.device();
  allow_shared_bytes(associate, kSmallBytes);
  allow_shared_bytes(finish_backward, kSmallBytes);
  double worst = 0;
  bool has_one_kernel = true, has_forward = true, has_backward = true, has_roles = true;
  for (const int64_t V : sizes) {
    GradientsProblem& forward = tables.emplace_back(lesson, blas, Pass::forward, Shape{V, E, W});
    GradientsProblem& backward =
        tables.emplace_back(lesson, blas, Pass::backward, Shape{V, E, W}, lesson.flag("--steep"));
    add_unfused(forward);
    has_one_kernel = add_one_kernel(forward, device);
    has_forward = add_associated(forward, device);
    add_roles(forward);
    add_unfused(backward);
    has_backward = add_associated(backward, device);
    has_roles = add_roles(backward);
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
         "No \"associated\" backward: its sums are in registers for up to 128 coefficients.");
  unless(has_roles,
         "Not all of \"warp specialization\", \"cluster\": E is above 128, or no cluster fits.");
  Problem &forward = tables.front().problem, &backward = tables.back().problem;
  forward.compare("one kernel", "unfused", "Forward: one kernel instead of 12: % times as fast.");
  forward.compare("associated", "one kernel",
                  "Forward: associated the other way: % times as fast.");
  forward.compare("cluster", "unfused", "Forward: % times as fast as unfused.");
  backward.compare("warp specialization", "unfused",
                   "Backward: % times as fast as unfused, and nothing saved.");
  return lesson.run();
}
