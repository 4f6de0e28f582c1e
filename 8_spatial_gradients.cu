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
// product easier to feed than four independent ones. (Three would do, as Gauss found: from (xr +
// xi) Lr^T, xr (Li - Lr)^T and xi (Lr + Li)^T follow ar and ai by addition. But the sums have to be
// rounded to bf16 before they can be factors, ar and ai are then differences of larger numbers, and
// it takes three accumulators instead of two, where accumulators are what a tile's size is limited
// by.)
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
// Instead of products (W, V) x (V, W) these are (E, V) x (V, W), half the work, and all that goes
// beyond is small. What they have in common is few results and long sums, which leave a GPU idle:
// the sums over V are cut into slices, as in lesson 7.
//
//     unfused       forward 12, backward 22 library and elementwise kernels, as a framework does it
//     two kernels   the products with Gr, Gi; then the products with Lr, Li and all the rest
//     one kernel    a block's rows of xr, xi stay on chip, and Lr, Li stream through it
//     associated    x, M1, M2 stay on chip, and Gr, Gi stream through it; also backward
//     Hopper        the same with TMA and wgmma
//
// All but the last need compute capability 8.0 (bf16 on tensor cores), the last one needs 9.0. The
// CPU backend runs all.

#include <array>
#include <deque>
#include <vector>

#include "common/async_copy.cuh"
#include "common/early_launch.cuh"
#include "common/fast_tanh.cuh"
#include "common/gradient_check.h"
#include "common/hopper.cuh"
#include "common/lesson.h"
#include "common/mma.cuh"
#include "common/numerics.h"

using bf16 = __nv_bfloat16;

// E and W are multiples of 16: every row starts at a multiple of 32 bytes.
struct Shape {
  int64_t V, E, W;
  size_t vertex_values() const { return static_cast<size_t>(V) * W; }
  size_t tangent_values() const { return static_cast<size_t>(V) * E; }
  size_t coefficients() const { return static_cast<size_t>(E) * W; }
  size_t weights() const { return static_cast<size_t>(W) * W; }
};

// What every kernel reads.
struct Operands {
  const bf16 *Gr, *Gi;  // (V, E)
  const bf16* x;        // (E, W)
  const bf16 *Lr, *Li;  // (W, W)
};

constexpr unsigned blocks_for(int64_t count, int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

// 1 - tanh(u)^2. Where |tanh(u)| is near 1 that difference would have hardly a digit left. The same
// is 4 e / (1 + e)^2 with e = exp(-2 |u|) <= 1, which is relatively accurate for all u; __expf and
// __fdividef, whose denominator is from 1 to 4, are off by a few units in the last place of fp32.
__device__ float tanh_slope(float u) {
  const float e = __expf(-2 * fabsf(u));
  return __fdividef(4 * e, (1 + e) * (1 + e));
}

// ---- unfused: the elementwise kernels -----------------------------------------------------------

// A thread owns 8 neighbouring elements of its result and moves them as 16 bytes.
struct alignas(16) Pack {
  bf16 values[8];
};
constexpr int kElementwiseThreads = 256;
constexpr int64_t kPerBlock = 8 * kElementwiseThreads;

struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Subtract {
  __device__ float operator()(float a, float b) const { return a - b; }
};
struct Multiply {
  __device__ float operator()(float a, float b) const { return a * b; }
};
// dOut * (1 - t^2): what a framework computes from the t = tanh(u) that it saved.
struct TanhBackward {
  __device__ float operator()(float d_out, float t) const { return d_out * (1 - t * t); }
};

// out = operation(left, right)
template <typename Operation>
__global__ void elementwise(const bf16* left, const bf16* right, bf16* out, size_t count) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (i >= count) return;
  const Pack a = *reinterpret_cast<const Pack*>(left + i);
  Pack b = *reinterpret_cast<const Pack*>(right + i);
  for (int j = 0; j < 8; ++j) {
    b.values[j] = __float2bfloat16_rn(
        Operation()(__bfloat162float(a.values[j]), __bfloat162float(b.values[j])));
  }
  *reinterpret_cast<Pack*>(out + i) = b;
}

// out = tanh(in)
__global__ void tanh_of(const bf16* in, bf16* out, size_t count) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (i >= count) return;
  Pack pack = *reinterpret_cast<const Pack*>(in + i);
  for (bf16& value : pack.values) value = __float2bfloat16_rn(fast_tanh(__bfloat162float(value)));
  *reinterpret_cast<Pack*>(out + i) = pack;
}

// ---- unfused: the library's products ------------------------------------------------------------

enum Transposed : bool { kPlain = false, kTransposed = true };

// c (m, n) = a b, row-major; a is stored as (m, k), or transposed, b as (k, n), or transposed.
// cuBLAS is column-major, where each of these is its transpose: c^T = b^T a^T.
void library_product(cublasHandle_t blas, const bf16* a, Transposed a_is, const bf16* b,
                     Transposed b_is, bf16* c, int64_t m, int64_t n, int64_t k) {
  const float one = 1, zero = 0;
  CUBLAS_CHECK(cublasGemmEx(
      blas, b_is ? CUBLAS_OP_T : CUBLAS_OP_N, a_is ? CUBLAS_OP_T : CUBLAS_OP_N, static_cast<int>(n),
      static_cast<int>(m), static_cast<int>(k), &one, b, CUDA_R_16BF,
      static_cast<int>(b_is ? k : n), a, CUDA_R_16BF, static_cast<int>(a_is ? m : k), &zero, c,
      CUDA_R_16BF, static_cast<int>(n), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

// ---- Tiles and fragments ------------------------------------------------------------------------

// All kernels below multiply tiles in shared memory, swizzled; long rows are cut into boxes of 64
// columns, each a tile of its own. What differs from kernel to kernel is where tiles come from, and
// how long they stay.
constexpr int kBox = 64;
constexpr int kTile = kBox * kBox;  // elements of a square tile: 8 KB
__host__ __device__ constexpr int boxes_of(int64_t extent) {
  return static_cast<int>((extent + kBox - 1) / kBox);
}

// A warp's kRows x kCols results: a lane's part, as mma_m16n8k16 leaves it.
template <int kRows, int kCols>
using Sums = float[kRows / 16][kCols / 8][4];

// The fragments of a left factor a, 16 kCount rows from `row` on and 16 columns from k on, from a
// tile of it with kCols columns. Lane l passes a row of 8 elements: matrices 0 to 3 are top left,
// bottom left, top right, bottom right.
template <int kCols, int kCount>
__device__ void load_left(unsigned (&a)[kCount][4], const bf16* tile, int row, int k) {
  const int lane = threadIdx.x % 32;
  const bf16* from = tile + (swizzle<kCols>(row + lane % 16, lane / 16 * 8) ^ k);
#pragma unroll
  for (int i = 0; i < kCount; ++i) ldmatrix_x4(a[i], from + 16 * i * kCols);
}

// The same where memory has a^T: `row` is a column of the tile, k a row of it, and ldmatrix
// transposes on the way to the registers.
template <int kCols, int kCount>
__device__ void load_left_transposed(unsigned (&a)[kCount][4], const bf16* tile, int row, int k) {
  const int lane = threadIdx.x % 32;
  const int from = swizzle<kCols>(lane % 8 + lane / 16 * 8, row + lane / 8 % 2 * 8);
#pragma unroll
  for (int i = 0; i < kCount; ++i) ldmatrix_x4_trans(a[i], tile + (from ^ 16 * i) + k * kCols);
}

// The fragments of a right factor b, 16 rows from k on and 16 kCount columns from `col` on. A right
// factor's fragments are those of its transpose: it is the plain one that ldmatrix transposes.
template <int kCols, int kCount>
__device__ void load_right(unsigned (&b)[kCount][4], const bf16* tile, int k, int col) {
  const int lane = threadIdx.x % 32;
  const int from = swizzle<kCols>(lane % 16, col + lane / 16 * 8);
#pragma unroll
  for (int j = 0; j < kCount; ++j) ldmatrix_x4_trans(b[j], tile + (from ^ 16 * j) + k * kCols);
}

// The same where memory has b^T: `col` is a row of the tile, k a column of it.
template <int kCols, int kCount>
__device__ void load_right_transposed(unsigned (&b)[kCount][4], const bf16* tile, int k, int col) {
  const int lane = threadIdx.x % 32;
  const bf16* from = tile + (swizzle<kCols>(col + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) ^ k);
#pragma unroll
  for (int j = 0; j < kCount; ++j) ldmatrix_x4(b[j], from + 16 * j * kCols);
}

// sum += a b
template <int kRows, int kCols>
__device__ void add_product(float (&sum)[kRows][2 * kCols][4], const unsigned (&a)[kRows][4],
                            const unsigned (&b)[kCols][4]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * kCols; ++j) {
      mma_m16n8k16<bf16>(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
}

// The tensor cores only add: for sum -= a b, a changes its sign, the top bits of its bf16 pairs.
template <int kCount>
__device__ void negate(unsigned (&negative)[kCount][4], const unsigned (&a)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) negative[i][j] = a[i][j] ^ 0x80008000u;
  }
}

template <int kRows, int kCols>
__device__ void clear(float (&sum)[kRows][kCols][4]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[i][j][k] = 0;
    }
  }
}

// A lane's results lie in pairs of neighbours: pair (i, j) in row 8 i + lane / 4, and in the
// columns 8 j + 2 (lane % 4) and the next one.
template <int kRows, int kCols>
__device__ float2 pair_of(const float (&sum)[kRows][kCols][4], int i, int j) {
  return make_float2(sum[i / 2][j][i % 2 * 2], sum[i / 2][j][i % 2 * 2 + 1]);
}
template <int kCols>
__device__ unsigned* pair_in(bf16* tile, int row, int col, int i, int j) {
  const int lane = threadIdx.x % 32;
  return reinterpret_cast<unsigned*>(
      tile + swizzle<kCols>(row + 8 * i + lane / 4, col + 8 * j + lane % 4 * 2));
}
__device__ float2 unpack2(unsigned pair) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}

// A warp's kRows x kCols results, whose pairs `pair` computes, go to (row0, col0) of `to`
// (rows x cols). They pass through `staging`, as large and the warp's own, to leave as 16 bytes a
// lane.
template <int kRows, int kCols, typename Pair>
__device__ void store_results(bf16* staging, bf16* to, int64_t row0, int col0, int64_t rows,
                              int cols, Pair pair) {
  __syncwarp();  // what was here before has left
#pragma unroll
  for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) *pair_in<kCols>(staging, 0, 0, i, j) = pair(i, j);
  }
  __syncwarp();
#pragma unroll
  for (int i = threadIdx.x % 32 * 8; i < kRows * kCols; i += 32 * 8) {
    const int row = i / kCols, col = i % kCols;
    if (row0 + row < rows && col0 + col < cols) {
      *reinterpret_cast<uint4*>(to + (row0 + row) * cols + col0 + col) =
          *reinterpret_cast<const uint4*>(staging + swizzle<kCols>(row, col));
    }
  }
}

// tanh(xr ar + xi ai) of two neighbours
__device__ unsigned features(float2 xr, float2 xi, float2 ar, float2 ai) {
  return pack2<bf16>(fast_tanh(xr.x * ar.x + xi.x * ai.x), fast_tanh(xr.y * ar.y + xi.y * ai.y));
}

// ---- two kernels --------------------------------------------------------------------------------

// A block owns 64 x 64 results, a warp 32 x 32 of them, and of two sums each: 64 registers. kStages
// sets of tiles are in shared memory, all but one of them in flight, and a staging area.
constexpr int kThreads = 128, kStages = 2;
__device__ int warp_row() { return threadIdx.x / 64 * 32; }
__device__ int warp_col() { return threadIdx.x / 32 % 2 * 32; }
__device__ bf16* warp_staging(bf16* staging) { return staging + threadIdx.x / 32 * 32 * 32; }

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

// ar + i ai += (xr + i xi) (Lr + i Li)^T for 64 of the inner dimension: four products, 32 of the
// tensor cores' instructions for 8 loads, the rate of a plain product of twice the size.
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

// The first kernel: xr = Gr x, xi = Gi x.
constexpr int kGradientBytes = (kStages * 3 + 1) * kTile * sizeof(bf16);
__global__ void __launch_bounds__(kThreads)
    take_gradients(Operands in, bf16* xr, bf16* xi, int64_t V, int E, int W) {
  extern __shared__ __align__(128) bf16 tiles[];
  const int groups = boxes_of(W), steps = boxes_of(E);
  const int64_t v0 = static_cast<int64_t>(blockIdx.x / groups) * kBox;
  const int w0 = static_cast<int>(blockIdx.x % groups) * kBox;
  bf16* staging = warp_staging(tiles + kStages * 3 * kTile);
  const auto stage_of = [&](int step) { return tiles + step % kStages * 3 * kTile; };
  const auto copy_step = [&](int step) {
    if (step < steps) {
      bf16* stage = stage_of(step);
      copy_swizzled<kBox, kBox, kThreads>(stage, in.Gr, v0, step * kBox, V, E);
      copy_swizzled<kBox, kBox, kThreads>(stage + kTile, in.Gi, v0, step * kBox, V, E);
      copy_swizzled<kBox, kBox, kThreads>(stage + 2 * kTile, in.x, step * kBox, w0, E, W);
    }
    copy_async_commit();
  };

  Sums<32, 32> sum_r = {}, sum_i = {};
  for (int step = 0; step < kStages - 1; ++step) copy_step(step);
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    copy_step(step + kStages - 1);
    const bf16* stage = stage_of(step);
    add_gradient(sum_r, sum_i, stage, stage + kTile, stage + 2 * kTile);
  }
  const auto store = [&](bf16* to, const Sums<32, 32>& sum) {
    store_results<32, 32>(staging, to, v0 + warp_row(), w0 + warp_col(), V, W, [&](int i, int j) {
      const float2 pair = pair_of(sum, i, j);
      return pack2<bf16>(pair.x, pair.y);
    });
  };
  store(xr, sum_r);
  store(xi, sum_i);
}

// The second kernel: all the rest. After the sums the lane that has an element of ar has that of
// ai, too, and needs those of xr and xi. They are among the rows that it multiplied: the inner
// dimension is summed up in an order that ends with the block's own columns, which are then still
// on chip.
constexpr int kRotationBytes = (kStages * 4 + 1) * kTile * sizeof(bf16);
__global__ void __launch_bounds__(kThreads)
    rotate_gradients(Operands in, const bf16* xr, const bf16* xi, bf16* out, int64_t V, int W) {
  extern __shared__ __align__(128) bf16 tiles[];
  const int groups = boxes_of(W), group = static_cast<int>(blockIdx.x % groups);
  const int64_t v0 = static_cast<int64_t>(blockIdx.x / groups) * kBox;
  const int w0 = group * kBox;
  bf16* staging = warp_staging(tiles + kStages * 4 * kTile);
  const auto stage_of = [&](int step) { return tiles + step % kStages * 4 * kTile; };
  const auto copy_step = [&](int step) {
    if (step < groups) {
      bf16* stage = stage_of(step);
      const int k0 = (group + 1 + step) % groups * kBox;
      copy_swizzled<kBox, kBox, kThreads>(stage, xr, v0, k0, V, W);
      copy_swizzled<kBox, kBox, kThreads>(stage + kTile, xi, v0, k0, V, W);
      copy_swizzled<kBox, kBox, kThreads>(stage + 2 * kTile, in.Lr, w0, k0, W, W);
      copy_swizzled<kBox, kBox, kThreads>(stage + 3 * kTile, in.Li, w0, k0, W, W);
    }
    copy_async_commit();
  };

  Sums<32, 32> ar = {}, ai = {};
  for (int step = 0; step < kStages - 1; ++step) copy_step(step);
  for (int step = 0; step < groups; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    copy_step(step + kStages - 1);
    const bf16* stage = stage_of(step);
    add_rotated(ar, ai, stage, stage + kTile, stage + 2 * kTile, stage + 3 * kTile);
  }
  bf16* own = stage_of(groups - 1);
  store_results<32, 32>(staging, out, v0 + warp_row(), w0 + warp_col(), V, W, [&](int i, int j) {
    return features(unpack2(*pair_in<kBox>(own, warp_row(), warp_col(), i, j)),
                    unpack2(*pair_in<kBox>(own + kTile, warp_row(), warp_col(), i, j)),
                    pair_of(ar, i, j), pair_of(ai, i, j));
  });
}

// ---- one kernel ---------------------------------------------------------------------------------

// Both in one: a block owns 64 rows, all W columns of them. First it computes its rows of xr and
// xi, 64 columns at a time, and leaves them in shared memory, 64 KB for W = 256, where they were on
// their way to memory. Then it computes ar and ai, 64 columns at a time, for which all of Lr and Li
// have to stream through, from the L2 cache. One pipeline of copies serves both phases: while the
// first one ends, the first tiles of Lr and Li are in flight.
//
// What is saved is 1 KB a vertex of xr and xi written to memory and, by the blocks of four groups
// of columns, four times that read. What remains is that a block fetches all of x, Lr and Li, 320
// KB for 64 rows. With more rows it would fetch less; but then one block, not two, has room on a
// multiprocessor, and whenever it finishes 64 columns the tensor cores wait for its epilogue.
//
// A set of tiles is Gr, Gi, x in the first phase, and Lr, Li in the second. Then the third tile of
// the first set is free: the staging area.
int64_t one_kernel_bytes(int64_t W) {
  return (2 * static_cast<int64_t>(boxes_of(W)) + kStages * 3) * kTile * sizeof(bf16);
}
__global__ void __launch_bounds__(kThreads)
    gradient_features(Operands in, bf16* out, int64_t V, int E, int W) {
  extern __shared__ __align__(128) bf16 tiles[];
  const int boxes = boxes_of(E), groups = boxes_of(W);
  const int first_phase = groups * boxes, steps = first_phase + groups * groups;
  const int64_t v0 = static_cast<int64_t>(blockIdx.x) * kBox;
  bf16* xr_rows = tiles;
  bf16* xi_rows = xr_rows + groups * kTile;
  bf16* stages = xi_rows + groups * kTile;
  bf16* staging = warp_staging(stages + 2 * kTile);
  const auto stage_of = [&](int step) { return stages + step % kStages * 3 * kTile; };
  const auto copy_step = [&](int step) {
    bf16* stage = stage_of(step);
    if (step < first_phase) {
      const int w0 = step / boxes * kBox, k0 = step % boxes * kBox;
      copy_swizzled<kBox, kBox, kThreads>(stage, in.Gr, v0, k0, V, E);
      copy_swizzled<kBox, kBox, kThreads>(stage + kTile, in.Gi, v0, k0, V, E);
      copy_swizzled<kBox, kBox, kThreads>(stage + 2 * kTile, in.x, k0, w0, E, W);
    } else if (step < steps) {
      const int w0 = (step - first_phase) / groups * kBox,
                k0 = (step - first_phase) % groups * kBox;
      copy_swizzled<kBox, kBox, kThreads>(stage, in.Lr, w0, k0, W, W);
      copy_swizzled<kBox, kBox, kThreads>(stage + kTile, in.Li, w0, k0, W, W);
    }
    copy_async_commit();
  };
  int step = 0;
  const auto next_stage = [&] {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    copy_step(step + kStages - 1);
    return stage_of(step++);
  };

  for (int i = 0; i < kStages - 1; ++i) copy_step(i);
  for (int group = 0; group < groups; ++group) {
    Sums<32, 32> xr = {}, xi = {};
    for (int box = 0; box < boxes; ++box) {
      const bf16* stage = next_stage();
      add_gradient(xr, xi, stage, stage + kTile, stage + 2 * kTile);
    }
    const auto keep = [&](bf16* rows, const Sums<32, 32>& sum) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = pair_of(sum, i, j);
          *pair_in<kBox>(rows + group * kTile, warp_row(), warp_col(), i, j) =
              pack2<bf16>(pair.x, pair.y);
        }
      }
    };
    keep(xr_rows, xr);
    keep(xi_rows, xi);
  }
  for (int group = 0; group < groups; ++group) {
    Sums<32, 32> ar = {}, ai = {};
    for (int box = 0; box < groups; ++box) {
      const bf16* stage = next_stage();
      add_rotated(ar, ai, xr_rows + box * kTile, xi_rows + box * kTile, stage, stage + kTile);
    }
    bf16 *own_r = xr_rows + group * kTile, *own_i = xi_rows + group * kTile;
    store_results<32, 32>(
        staging, out, v0 + warp_row(), group * kBox + warp_col(), V, W, [&](int i, int j) {
          return features(unpack2(*pair_in<kBox>(own_r, warp_row(), warp_col(), i, j)),
                          unpack2(*pair_in<kBox>(own_i, warp_row(), warp_col(), i, j)),
                          pair_of(ar, i, j), pair_of(ai, i, j));
        });
  }
}

// ---- associated: the small products -------------------------------------------------------------

// A matrix as it is in memory.
struct Matrix {
  const bf16* data;
  int rows, cols;
};

// A block owns 32 x 32 results of a product of two small matrices, or of a sum of two such
// products, a warp 16 x 16. There is so little to do that what counts is how often one waits for
// memory: all but one of kSmallStages steps of 64 are in flight, together 192 of the inner
// dimension.
constexpr int kSmall = 32, kSmallStages = 4;
constexpr int kSmallTile = kSmall * kBox;                    // elements
constexpr int kSmallShared = kSmallStages * 2 * kSmallTile;  // elements: 32 KB

// sum += left[0] right[0], and if there are 2 terms, left[1] right[1]. Either factor may be
// transposed in memory; `depth` is the inner dimension.
template <Transposed kLeft, Transposed kRight>
__device__ void add_small_products(Sums<16, 16>& sum, bf16* stages, const Matrix* left,
                                   const Matrix* right, int terms, int depth, int row0, int col0) {
  const int boxes = boxes_of(depth), steps = terms * boxes;
  const int row = threadIdx.x / 64 * 16, col = threadIdx.x / 32 % 2 * 16;
  const auto stage_of = [&](int step) { return stages + step % kSmallStages * 2 * kSmallTile; };
  const auto copy_step = [&](int step) {
    if (step < steps) {
      bf16 *left_tile = stage_of(step), *right_tile = left_tile + kSmallTile;
      const Matrix a = left[step / boxes], b = right[step / boxes];
      const int k0 = step % boxes * kBox;
      if constexpr (kLeft == kTransposed) {
        copy_swizzled<kBox, kSmall, kThreads>(left_tile, a.data, k0, row0, a.rows, a.cols);
      } else {
        copy_swizzled<kSmall, kBox, kThreads>(left_tile, a.data, row0, k0, a.rows, a.cols);
      }
      if constexpr (kRight == kTransposed) {
        copy_swizzled<kSmall, kBox, kThreads>(right_tile, b.data, col0, k0, b.rows, b.cols);
      } else {
        copy_swizzled<kBox, kSmall, kThreads>(right_tile, b.data, k0, col0, b.rows, b.cols);
      }
    }
    copy_async_commit();
  };

  for (int step = 0; step < kSmallStages - 1; ++step) copy_step(step);
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kSmallStages - 2>();
    __syncthreads();
    copy_step(step + kSmallStages - 1);
    const bf16 *left_tile = stage_of(step), *right_tile = left_tile + kSmallTile;
#pragma unroll
    for (int k = 0; k < kBox; k += 16) {
      unsigned a[1][4], b[1][4];
      if constexpr (kLeft == kTransposed) {
        load_left_transposed<kSmall>(a, left_tile, row, k);
      } else {
        load_left<kBox>(a, left_tile, row, k);
      }
      if constexpr (kRight == kTransposed) {
        load_right_transposed<kBox>(b, right_tile, k, col);
      } else {
        load_right<kSmall>(b, right_tile, k, col);
      }
      add_product(sum, a, b);
    }
  }
}

// Calls visit(row, col, pair of sums) for each of the lane's pairs that is inside.
template <typename Visit>
__device__ void for_small_pairs(const Sums<16, 16>& sum, int row0, int col0, int rows, int cols,
                                Visit visit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = row0 + static_cast<int>(threadIdx.x) / 64 * 16 + 8 * i + lane / 4;
      const int col = col0 + static_cast<int>(threadIdx.x) / 32 % 2 * 16 + 8 * j + lane % 4 * 2;
      if (row < rows && col < cols) visit(row, col, pair_of(sum, i, j));
    }
  }
}

// M (2, E, W) = M1 = x Lr^T, M2 = x Li^T; with a third layer of blocks M (3, E, W), the last -M2.
__global__ void __launch_bounds__(kThreads) associate(Operands in, bf16* M, int E, int W) {
  start_next_kernel();  // Hopper's kernels have other things to load first
  __shared__ __align__(128) bf16 stages[kSmallShared];
  const int row0 = blockIdx.y * kSmall, col0 = blockIdx.x * kSmall;
  const Matrix left = {in.x, E, W}, right = {blockIdx.z == 0 ? in.Lr : in.Li, W, W};
  bf16* to = M + static_cast<size_t>(blockIdx.z) * E * W;
  const float sign = blockIdx.z == 2 ? -1 : 1;
  Sums<16, 16> sum = {};
  add_small_products<kPlain, kTransposed>(sum, stages, &left, &right, 1, W, row0, col0);
  for_small_pairs(sum, row0, col0, E, W, [&](int row, int col, float2 pair) {
    *reinterpret_cast<unsigned*>(to + static_cast<size_t>(row) * W + col) =
        pack2<bf16>(sign * pair.x, sign * pair.y);
  });
}

// ---- associated: forward ------------------------------------------------------------------------

// xr += Gr x, xi += Gi x, ar += Gr M1 - Gi M2, ai += Gi M1 + Gr M2 for 64 of the inner dimension:
// all six products from two left factors. A warp's WV x WN results start at (row, col); the right
// factors' tiles have 64 rows of kCols columns.
template <int WV, int WN, int kCols>
__device__ void add_associated(Sums<WV, WN>& xr, Sums<WV, WN>& xi, Sums<WV, WN>& ar,
                               Sums<WV, WN>& ai, const bf16* Gr_tile, const bf16* Gi_tile,
                               const bf16* x_tile, const bf16* M1_tile, const bf16* M2_tile,
                               int row, int col) {
#pragma unroll
  for (int k = 0; k < kBox; k += 16) {
    unsigned gr[WV / 16][4], gi[WV / 16][4], minus_gi[WV / 16][4], right[WN / 16][4];
    load_left<kBox>(gr, Gr_tile, row, k);
    load_left<kBox>(gi, Gi_tile, row, k);
    negate(minus_gi, gi);
    load_right<kCols>(right, x_tile, k, col);
    add_product(xr, gr, right);
    add_product(xi, gi, right);
    load_right<kCols>(right, M1_tile, k, col);
    add_product(ar, gr, right);
    add_product(ai, gi, right);
    load_right<kCols>(right, M2_tile, k, col);
    add_product(ar, minus_gi, right);
    add_product(ai, gr, right);
  }
}

// A block's part: kBN columns of x, M1 and M2, all E rows, which stay; and kStageCount stages of
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
// stay, each with its columns of x, M1 and M2, and takes tile after tile of 64 rows of Gr and Gi.
// The four blocks that own the columns of the same rows run at the same time: memory is read once.
//
// All that belongs to an element ends up in one lane: xr, xi, ar and ai, 128 registers of sums,
// which 48 instructions of the tensor cores add to for 10 loads. xr and xi are not even rounded.
// While a block is at its epilogue, the other one on the same multiprocessor multiplies.
template <typename Tiles>
__global__ void __launch_bounds__(kThreads)
    associated_features(Operands in, const bf16* M, bf16* out, int64_t V, int E, int W) {
  constexpr int BN = Tiles::BN, WV = Tiles::WV, kStages = Tiles::kStages;
  extern __shared__ __align__(128) bf16 tiles[];
  const int warp = threadIdx.x / 32, boxes = boxes_of(E), w0 = blockIdx.x * BN;
  const int row = warp / (BN / 32) * WV, col = warp % (BN / 32) * 32;
  const int resident = boxes * kBox * BN;  // elements of each right factor
  bf16* x_tiles = tiles;
  bf16* M1_tiles = x_tiles + resident;
  bf16* M2_tiles = M1_tiles + resident;
  bf16* stages = M2_tiles + resident;
  bf16* staging = stages + kStages * 2 * kTile + warp * WV * 32;
  const int64_t tile_count = (V + kBox - 1) / kBox;
  const auto stage_of = [&](int step) { return stages + step % kStages * 2 * kTile; };
  const auto copy_step = [&](int step) {
    const int64_t tile = blockIdx.y + static_cast<int64_t>(step / boxes) * gridDim.y;
    if (tile < tile_count) {
      const int k0 = step % boxes * kBox;
      copy_swizzled<kBox, kBox, kThreads>(stage_of(step), in.Gr, tile * kBox, k0, V, E);
      copy_swizzled<kBox, kBox, kThreads>(stage_of(step) + kTile, in.Gi, tile * kBox, k0, V, E);
    }
    copy_async_commit();
  };

  for (int box = 0; box < boxes; ++box) {
    const int at = box * kBox * BN, e = box * kBox;
    copy_swizzled<kBox, BN, kThreads>(x_tiles + at, in.x, e, w0, E, W);
    copy_swizzled<kBox, BN, kThreads>(M1_tiles + at, M, e, w0, E, W);
    copy_swizzled<kBox, BN, kThreads>(M2_tiles + at, M + static_cast<size_t>(E) * W, e, w0, E, W);
  }
  for (int step = 0; step < kStages - 1; ++step) copy_step(step);
  int step = 0;
  for (int64_t tile = blockIdx.y; tile < tile_count; tile += gridDim.y) {
    Sums<WV, 32> xr = {}, xi = {}, ar = {}, ai = {};
    for (int box = 0; box < boxes; ++box, ++step) {
      copy_async_wait<kStages - 2>();
      __syncthreads();
      copy_step(step + kStages - 1);
      const int at = box * kBox * BN;
      add_associated<WV, 32, BN>(xr, xi, ar, ai, stage_of(step), stage_of(step) + kTile,
                                 x_tiles + at, M1_tiles + at, M2_tiles + at, row, col);
    }
    store_results<WV, 32>(staging, out, tile * kBox + row, w0 + col, V, W, [&](int i, int j) {
      return features(pair_of(xr, i, j), pair_of(xi, i, j), pair_of(ar, i, j), pair_of(ai, i, j));
    });
  }
}

// ---- associated: backward -----------------------------------------------------------------------

// xr, xi, ar and ai are computed again rather than read: saved by the forward pass, they are 2 KB a
// vertex, to be written there and read here, four times what Gr and Gi are, and four times out as
// device memory that is occupied from one pass to the other. Computed again they cost as much as
// the forward pass. The unfused form saves them, as a framework does; compare the memory column.

// A block's part: kBN columns of x, M1 and M2, which stay; two stages of kBV rows of Gr, Gi and of
// kBN columns of dOut; and the products P, Q, R, S of one tile. A warp computes WV x WN of those,
// and owns 32 x 32 of each of the three sums, so that the block has kMaxE rows of them.
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

// partials (slices, 3, E, W): dM1, dM2 and D, summed up over every gridDim.y-th tile of BV
// vertices.
//
// Block (i, slice) owns BN columns of x, M1, M2 and of the sums. Per tile it computes xr, xi, ar,
// ai in registers as above, then u and g, and leaves P, Q, R, S in shared memory: right factors,
// whose inner dimension is the vertices. The left factors are Gr^T and Gi^T, from the very tiles of
// Gr and Gi that were multiplied before, transposed by ldmatrix. So each tile is read from memory
// once and used for both, and P, Q, R and S exist for one tile at a time. The sums, 96 registers a
// thread, stay until the slice ends; then they are added up as lesson 7's are, but by a kernel of
// their own: there are 12 MB of them here, too much for one block a column to add up at the end.
template <typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocksPerSM)
    accumulate_backward(Operands in, const bf16* M, const bf16* d_out, float* partials, int64_t V,
                        int E, int W) {
  constexpr int BV = Tiles::BV, BN = Tiles::BN, WV = Tiles::WV, WN = Tiles::WN;
  constexpr int kStages = Tiles::kStages, kBlockThreads = Tiles::kThreads;
  extern __shared__ __align__(128) bf16 tiles[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int boxes = boxes_of(E), w0 = blockIdx.x * BN;
  const int resident = boxes * kBox * BN, tangent = boxes * kBox * BV;
  bf16* x_tiles = tiles;
  bf16* M1_tiles = x_tiles + resident;
  bf16* M2_tiles = M1_tiles + resident;
  bf16* stages = M2_tiles + resident;
  bf16* P_tile = stages + kStages * Tiles::stage(E);
  bf16* Q_tile = P_tile + BV * BN;
  bf16* R_tile = Q_tile + BV * BN;
  bf16* S_tile = R_tile + BV * BN;
  const int64_t tile_count = (V + BV - 1) / BV;
  const auto stage_of = [&](int step) { return stages + step % kStages * Tiles::stage(E); };
  const auto copy_step = [&](int step) {
    const int64_t tile = blockIdx.y + static_cast<int64_t>(step) * gridDim.y;
    if (tile < tile_count) {
      bf16* Gr_tiles = stage_of(step);
      bf16* Gi_tiles = Gr_tiles + tangent;
      for (int box = 0; box < boxes; ++box) {
        const int at = box * kBox * BV, e = box * kBox;
        copy_swizzled<BV, kBox, kBlockThreads>(Gr_tiles + at, in.Gr, tile * BV, e, V, E);
        copy_swizzled<BV, kBox, kBlockThreads>(Gi_tiles + at, in.Gi, tile * BV, e, V, E);
      }
      copy_swizzled<BV, BN, kBlockThreads>(Gi_tiles + tangent, d_out, tile * BV, w0, V, W);
    }
    copy_async_commit();
  };

  for (int box = 0; box < boxes; ++box) {
    const int at = box * kBox * BN, e = box * kBox;
    copy_swizzled<kBox, BN, kBlockThreads>(x_tiles + at, in.x, e, w0, E, W);
    copy_swizzled<kBox, BN, kBlockThreads>(M1_tiles + at, M, e, w0, E, W);
    copy_swizzled<kBox, BN, kBlockThreads>(M2_tiles + at, M + static_cast<size_t>(E) * W, e, w0, E,
                                           W);
  }
  for (int step = 0; step < kStages - 1; ++step) copy_step(step);
  const int row = warp / (BN / WN) * WV, col = warp % (BN / WN) * WN;  // in the tile
  const int sum_row = warp / (BN / 32) * 32, sum_col = warp % (BN / 32) * 32;
  Sums<32, 32> dM1 = {}, dM2 = {}, D = {};
  int64_t tile = blockIdx.y;
  for (int step = 0; tile < tile_count; ++step, tile += gridDim.y) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    copy_step(step + kStages - 1);
    bf16 *Gr_tiles = stage_of(step), *Gi_tiles = Gr_tiles + tangent;
    bf16* d_out_tile = Gi_tiles + tangent;
    {
      Sums<WV, WN> xr = {}, xi = {}, ar = {}, ai = {};
      for (int box = 0; box < boxes; ++box) {
        const int left = box * kBox * BV, right = box * kBox * BN;
        add_associated<WV, WN, BN>(xr, xi, ar, ai, Gr_tiles + left, Gi_tiles + left,
                                   x_tiles + right, M1_tiles + right, M2_tiles + right, row, col);
      }
#pragma unroll
      for (int i = 0; i < WV / 8; ++i) {
#pragma unroll
        for (int j = 0; j < WN / 8; ++j) {
          const float2 r = pair_of(xr, i, j), m = pair_of(xi, i, j);
          const float2 a = pair_of(ar, i, j), b = pair_of(ai, i, j);
          float2 g = unpack2(*pair_in<BN>(d_out_tile, row, col, i, j));
          g.x *= tanh_slope(r.x * a.x + m.x * b.x);
          g.y *= tanh_slope(r.y * a.y + m.y * b.y);
          *pair_in<BN>(P_tile, row, col, i, j) = pack2<bf16>(g.x * r.x, g.y * r.y);
          *pair_in<BN>(Q_tile, row, col, i, j) = pack2<bf16>(g.x * m.x, g.y * m.y);
          *pair_in<BN>(R_tile, row, col, i, j) = pack2<bf16>(g.x * a.x, g.y * a.y);
          *pair_in<BN>(S_tile, row, col, i, j) = pack2<bf16>(g.x * b.x, g.y * b.y);
        }
      }
    }
    __syncthreads();
    if (sum_row < E) {
      const int left = sum_row / kBox * kBox * BV;
#pragma unroll
      for (int k = 0; k < BV; k += 16) {
        unsigned gr[2][4], gi[2][4], minus_gi[2][4], right[2][4];
        load_left_transposed<kBox>(gr, Gr_tiles + left, sum_row % kBox, k);
        load_left_transposed<kBox>(gi, Gi_tiles + left, sum_row % kBox, k);
        negate(minus_gi, gi);
        load_right<BN>(right, P_tile, k, sum_col);
        add_product(dM1, gr, right);
        add_product(dM2, minus_gi, right);
        load_right<BN>(right, Q_tile, k, sum_col);
        add_product(dM1, gi, right);
        add_product(dM2, gr, right);
        load_right<BN>(right, R_tile, k, sum_col);
        add_product(D, gr, right);
        load_right<BN>(right, S_tile, k, sum_col);
        add_product(D, gi, right);
      }
    }
  }

  const auto store = [&](const Sums<32, 32>& sum, int which) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int e = sum_row + 8 * i + lane / 4, w = w0 + sum_col + 8 * j + lane % 4 * 2;
        const size_t matrix = static_cast<size_t>(blockIdx.y) * 3 + which;
        if (e < E && w < W) {
          *reinterpret_cast<float2*>(partials + (matrix * E + e) * W + w) = pair_of(sum, i, j);
        }
      }
    }
  };
  store(dM1, 0);
  store(dM2, 1);
  store(D, 2);
}

// dM (2, E, W) = dM1, dM2 in bf16, as factors of the last products, and D (E, W) in fp32: the sums
// of the partial sums, slice by slice, the same in every run. A thread owns 4 neighbours.
__global__ void add_slices(const float* partials, int slices, bf16* dM, float* D, size_t count) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
  if (i >= 3 * count) return;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
  for (int slice = 0; slice < slices; ++slice) {
    const float4 add = *reinterpret_cast<const float4*>(partials + slice * 3 * count + i);
    sum.x += add.x;
    sum.y += add.y;
    sum.z += add.z;
    sum.w += add.w;
  }
  if (i < 2 * count) {
    *reinterpret_cast<uint2*>(dM + i) =
        make_uint2(pack2<bf16>(sum.x, sum.y), pack2<bf16>(sum.z, sum.w));
  } else {
    *reinterpret_cast<float4*>(D + i - 2 * count) = sum;
  }
}

// dLr = dM1^T x, dLi = dM2^T x, dx = D + dM1 Lr + dM2 Li: the small products again; z is which.
__global__ void __launch_bounds__(kThreads)
    finish_backward(Operands in, const bf16* dM, const float* D, bf16* d_x, bf16* d_Lr, bf16* d_Li,
                    int E, int W) {
  __shared__ __align__(128) bf16 stages[kSmallShared];
  const int row0 = blockIdx.y * kSmall, col0 = blockIdx.x * kSmall;
  const Matrix dM1 = {dM, E, W}, dM2 = {dM + static_cast<size_t>(E) * W, E, W};
  Sums<16, 16> sum = {};
  if (blockIdx.z < 2) {
    if (row0 >= W) return;
    const Matrix left = blockIdx.z == 0 ? dM1 : dM2, right = {in.x, E, W};
    bf16* to = blockIdx.z == 0 ? d_Lr : d_Li;
    add_small_products<kTransposed, kPlain>(sum, stages, &left, &right, 1, E, row0, col0);
    for_small_pairs(sum, row0, col0, W, W, [&](int row, int col, float2 pair) {
      *reinterpret_cast<unsigned*>(to + static_cast<size_t>(row) * W + col) =
          pack2<bf16>(pair.x, pair.y);
    });
  } else {
    if (row0 >= E) return;
    const Matrix left[2] = {dM1, dM2}, right[2] = {{in.Lr, W, W}, {in.Li, W, W}};
    add_small_products<kPlain, kPlain>(sum, stages, left, right, 2, W, row0, col0);
    for_small_pairs(sum, row0, col0, E, W, [&](int row, int col, float2 pair) {
      const size_t at = static_cast<size_t>(row) * W + col;
      const float2 rest = *reinterpret_cast<const float2*>(D + at);
      *reinterpret_cast<unsigned*>(d_x + at) = pack2<bf16>(rest.x + pair.x, rest.y + pair.y);
    });
  }
}

// ---- Hopper -------------------------------------------------------------------------------------

// Associated, once more, in the words of common/hopper.cuh. A product of 64 rows of Gr and Gi with
// 64 columns of the right factors is four sums of 64 x 64, 128 registers a thread of a warpgroup,
// and takes 32 instructions. Side by side, and with -M2 as a factor of its own, the right factors
// make of each pair one product of 128 columns:
//
//     [ar | ai] = Gr [M1 | M2] + Gi [-M2 | M1],   xr = Gr x,   xi = Gi x
//
// (Products into one sum follow each other without a fence only if they are of the same shape: PTX
// ISA, "wgmma.fence". With three shapes, 192, 128 and 64 columns, this took half as long again.)
constexpr int kEigen = 128, kWidth = 256;  // at most; what is missing is zero

#if HOPPER_CODE
// The fragments of 64 x 128 of a left factor, from two boxes of 64 columns, for a warpgroup.
__device__ inline void load_fragments(uint32_t (&fragments)[8][4], const bf16 (*boxes)[64 * 64]) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    ldmatrix_x4(fragments[k],
                boxes[k / 4] + swizzled(16 * warp + lane % 16, k % 4 * 2 + lane / 16));
  }
}

// sums: ar, ai, xr, xi of 64 rows and 64 columns, 32 registers each. right: boxes of kEigen rows
// and 64 columns of -M2, M1, M2, x. The left factors come from registers: from shared memory,
// which has no bandwidth to spare, each would be read twice for each box of right factors.
__device__ inline void multiply_associated(float (&sums)[128], const uint32_t (&gr)[8][4],
                                           const uint32_t (&gi)[8][4],
                                           const bf16 (*right)[kEigen * 64]) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const uint64_t minus_M2_M1 = descriptor_b(right[0], kEigen) + 128 * k;
    const uint64_t M1_M2 = descriptor_b(right[1], kEigen) + 128 * k;
    const uint64_t x = descriptor_b(right[3], kEigen) + 128 * k;
    wgmma<bf16>(columns_of<0, 64>(sums), gr[k], M1_M2, k > 0);
    wgmma<bf16>(columns_of<64, 32>(sums), gr[k], x, k > 0);
    wgmma<bf16>(columns_of<0, 64>(sums), gi[k], minus_M2_M1, true);
    wgmma<bf16>(columns_of<96, 32>(sums), gi[k], x, k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
}

// 64 x 64 values, 32 registers a thread, times `sign` as bf16 in a box.
__device__ inline void to_box(bf16* box, const float* values, float sign) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < 64; c += 16) {
    uint32_t registers[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int i = c / 2 + 2 * m;
      registers[m] = pack2<bf16>(sign * values[i], sign * values[i + 1]);
    }
    store_matrices(box + swizzled(16 * warp + lane % 16, c / 8 + lane / 16), registers);
  }
}
#endif

// What both kernels read: row-major matrices with boxes of 64 columns, 64 rows of Gr, Gi, dOut and
// out, and kEigen of the right factors.
struct HopperMaps {
  CUtensorMap Gr, Gi, minus_M2, M1, M2, x;
  CUtensorMap vertices;  // out, or dOut
};

struct HopperForward {
  static constexpr int kStages = 2;   // one for each consumer
  bf16 right[2][4][kEigen * 64];      // of 64 columns each: -M2, M1, M2, x
  bf16 left[kStages][2][2][64 * 64];  // [Gr, Gi][box]
  bf16 out[2][2][64 * 64];            // [consumer][box]
  Barrier loaded, full[kStages], empty[kStages];
};

// Clusters of two blocks stay, and take tile after tile of 64 rows. Each block has 128 of the 256
// columns, all of whose right factors it keeps, 128 KB, and fetches one of Gr and Gi for both. Two
// consumer warpgroups take turns, tile by tile: while one computes tanh and writes, the tensor
// cores belong to the other. A tile's fragments, 64 registers, serve all columns, so that its stage
// is free again early.
__global__ void HOPPER_CLUSTER(2) __launch_bounds__(384, 1)
    hopper_features(const __grid_constant__ HopperMaps maps, int V) {
#if HOPPER_CODE
  using Shared = HopperForward;
  constexpr int kStages = Shared::kStages;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int rank = cluster_rank(), tiles = (V + 63) / 64, clusters = gridDim.x / 2;
  const int first = blockIdx.x / 2, col0 = 128 * rank;
  if (threadIdx.x == 0) {
    barrier_init(&shared.loaded, 1);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&shared.full[s], 1);
      barrier_init(&shared.empty[s], 8);  // the four warps of a consumer in each of two blocks
    }
    barrier_init_fence();
  }
  cluster_meet();

  Ring<kStages> ring;
  if (threadIdx.x < 128) {
    registers_shrink_to<40>();
    if (threadIdx.x == 0) {
      for (int tile = first; tile < tiles; tile += clusters, ring.advance()) {
        const int s = ring.stage;
        barrier_wait(&shared.empty[s], ring.parity ^ 1);
        barrier_arrive_expect(&shared.full[s], sizeof shared.left[s]);
        for (int box = 0; box < 2; ++box) {
          tensor_load_multicast(shared.left[s][rank][box], rank == 0 ? &maps.Gr : &maps.Gi,
                                64 * tile, 64 * box, &shared.full[s], 3);
        }
        if (tile == first) {
          wait_for_previous_kernel();  // M1 and M2 are its
          barrier_arrive_expect(&shared.loaded, sizeof shared.right);
          for (int c = 0; c < 2; ++c) {
            const int col = col0 + 64 * c;
            tensor_load(shared.right[c][0], &maps.minus_M2, 0, col, &shared.loaded);
            tensor_load(shared.right[c][1], &maps.M1, 0, col, &shared.loaded);
            tensor_load(shared.right[c][2], &maps.M2, 0, col, &shared.loaded);
            tensor_load(shared.right[c][3], &maps.x, 0, col, &shared.loaded);
          }
        }
      }
      wait_until_empty(shared.empty, ring);
    }
  } else {
    registers_grow_to<232>();
    const int consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, lane = thread % 32;
    for (int i = 0; i < consumer; ++i) ring.advance();
    for (int tile = first + consumer * clusters; tile < tiles; tile += 2 * clusters) {
      uint32_t gr[8][4], gi[8][4];
      barrier_wait(&shared.full[ring.stage], ring.parity);
      load_fragments(gr, shared.left[ring.stage][0]);
      load_fragments(gi, shared.left[ring.stage][1]);
      barrier_wait(&shared.loaded, 0);
#pragma unroll 1
      for (int c = 0; c < 2; ++c) {
        float sums[128];
        multiply_associated(sums, gr, gi, shared.right[c]);
        // Not before: an arrival at the neighbour's barrier may overtake the loads of fragments,
        // and only a product that has used them proves that they are over.
        if (c == 0 && lane < 2) barrier_arrive(&shared.empty[ring.stage], lane);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          sums[i] = fast_tanh(sums[64 + i] * sums[i] + sums[96 + i] * sums[32 + i]);
        }
        if (thread == 0) tensor_store_wait_read<1>();  // this box; the other may be on its way
        named_barrier(1 + consumer, 128);
        to_box(shared.out[consumer][c], sums, 1);
        shared_fence();
        named_barrier(1 + consumer, 128);
        if (thread == 0) {
          tensor_store(&maps.vertices, 64 * tile, col0 + 64 * c, shared.out[consumer][c]);
          tensor_store_commit();
        }
      }
      for (int i = 0; i < kStages; ++i) ring.advance();
    }
    if (thread == 0) tensor_store_wait_read<0>();
  }
#endif
}

struct HopperBackward {
  static constexpr int kStages = 2;
  bf16 right[4][kEigen * 64];         // 64 columns of -M2, M1, M2, x
  bf16 left[kStages][2][2][64 * 64];  // [Gr, Gi][box]
  bf16 d_out[kStages][64 * 64];
  bf16 products[2][5][64 * 64];  // of two tiles: P, Q, -P, R, S
  Barrier loaded, full[kStages], empty[kStages], ready[2], spent[2];
};

// partials (clusters, 3, E, W): dM1, dM2 and D, summed up over each cluster's tiles.
//
// Clusters of four blocks with 64 columns each; a block fetches one of the four boxes of a tile of
// Gr and Gi for all. Two warpgroups work in a row, on different tiles at the same time. The first
// computes what the forward pass did, then P, Q, R, S, which it leaves in shared memory. The second
// multiplies those by Gr^T and Gi^T, transposed where they lie, and keeps the sums:
//
//     [dM1 | dM2] += Gr^T [P | Q] + Gi^T [Q | -P],   D += Gr^T R + Gi^T S
//
// 128 x 64 of each, 192 registers a thread. Both give the tensor cores the same amount of work, and
// each has other work to do, or to wait for, when the other multiplies.
__global__ void HOPPER_CLUSTER(4) __launch_bounds__(384, 1)
    hopper_accumulate_backward(const __grid_constant__ HopperMaps maps, float* partials, int V,
                               int E, int W) {
#if HOPPER_CODE
  using Shared = HopperBackward;
  constexpr int kStages = Shared::kStages;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int rank = cluster_rank(), tiles = (V + 63) / 64, clusters = gridDim.x / 4;
  const int first = blockIdx.x / 4, col0 = 64 * rank;
  if (threadIdx.x == 0) {
    barrier_init(&shared.loaded, 1);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&shared.full[s], 1);
      barrier_init(&shared.empty[s], 4);
    }
    for (int b = 0; b < 2; ++b) {
      barrier_init(&shared.ready[b], 128);
      barrier_init(&shared.spent[b], 1);
    }
    barrier_init_fence();
  }
  cluster_meet();

  Ring<kStages> ring;
  Ring<2> buffer;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < 128) {
    registers_shrink_to<40>();
    if (threadIdx.x == 0) {
      for (int tile = first; tile < tiles; tile += clusters, ring.advance()) {
        const int s = ring.stage;
        barrier_wait(&shared.empty[s], ring.parity ^ 1);
        barrier_arrive_expect(&shared.full[s], sizeof shared.left[s] + sizeof shared.d_out[s]);
        tensor_load_multicast(shared.left[s][rank / 2][rank % 2], rank < 2 ? &maps.Gr : &maps.Gi,
                              64 * tile, rank % 2 * 64, &shared.full[s], 15);
        tensor_load(shared.d_out[s], &maps.vertices, 64 * tile, col0, &shared.full[s]);
        if (tile == first) {
          wait_for_previous_kernel();  // M1 and M2 are its
          barrier_arrive_expect(&shared.loaded, sizeof shared.right);
          tensor_load(shared.right[0], &maps.minus_M2, 0, col0, &shared.loaded);
          tensor_load(shared.right[1], &maps.M1, 0, col0, &shared.loaded);
          tensor_load(shared.right[2], &maps.M2, 0, col0, &shared.loaded);
          tensor_load(shared.right[3], &maps.x, 0, col0, &shared.loaded);
        }
      }
      wait_until_empty(shared.empty, ring);
    }
  } else if (threadIdx.x < 256) {
    registers_grow_to<232>();
    barrier_wait(&shared.loaded, 0);
    for (int tile = first; tile < tiles; tile += clusters, ring.advance(), buffer.advance()) {
      uint32_t gr[8][4], gi[8][4];
      barrier_wait(&shared.full[ring.stage], ring.parity);
      load_fragments(gr, shared.left[ring.stage][0]);
      load_fragments(gi, shared.left[ring.stage][1]);
      float sums[128];  // ar, ai, xr, xi; then R, S, P, Q
      multiply_associated(sums, gr, gi, shared.right);
#pragma unroll
      for (int c = 0; c < 64; c += 16) {
        uint32_t d_out[4];
        ldmatrix_x4(d_out,
                    shared.d_out[ring.stage] + swizzled(16 * warp + lane % 16, c / 8 + lane / 16));
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float2 pair = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(d_out[m]));
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int i = c / 2 + 2 * m + j;
            const float ar = sums[i], ai = sums[32 + i], xr = sums[64 + i], xi = sums[96 + i];
            const float g = (j == 0 ? pair.x : pair.y) * tanh_slope(xr * ar + xi * ai);
            sums[i] = g * ar;
            sums[32 + i] = g * ai;
            sums[64 + i] = g * xr;
            sums[96 + i] = g * xi;
          }
        }
      }
      barrier_wait(&shared.spent[buffer.stage], buffer.parity ^ 1);
      bf16(*products)[64 * 64] = shared.products[buffer.stage];
      to_box(products[0], sums + 64, 1);
      to_box(products[1], sums + 96, 1);
      to_box(products[2], sums + 64, -1);
      to_box(products[3], sums, 1);
      to_box(products[4], sums + 32, 1);
      shared_fence();
      barrier_arrive(&shared.ready[buffer.stage]);
    }
  } else {
    registers_grow_to<232>();
    float sums[2][96];  // for each 64 of the kEigen rows: dM1, dM2, D
    for (int tile = first; tile < tiles; tile += clusters, ring.advance(), buffer.advance()) {
      barrier_wait(&shared.full[ring.stage], ring.parity);
      barrier_wait(&shared.ready[buffer.stage], buffer.parity);
      const bf16(*products)[64 * 64] = shared.products[buffer.stage];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const bool add = tile > first || k > 0;
        const uint64_t P_Q = descriptor_b(products[0], 64) + 128 * k;
        const uint64_t Q_minus_P = descriptor_b(products[1], 64) + 128 * k;
        const uint64_t R = descriptor_b(products[3], 64) + 128 * k;
        const uint64_t S = descriptor_b(products[4], 64) + 128 * k;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint64_t gr = descriptor_b(shared.left[ring.stage][0][half], 64) + 128 * k;
          const uint64_t gi = descriptor_b(shared.left[ring.stage][1][half], 64) + 128 * k;
          wgmma<bf16, true>(columns_of<0, 64>(sums[half]), gr, P_Q, add);
          wgmma<bf16, true>(columns_of<64, 32>(sums[half]), gr, R, add);
          wgmma<bf16, true>(columns_of<0, 64>(sums[half]), gi, Q_minus_P, true);
          wgmma<bf16, true>(columns_of<64, 32>(sums[half]), gi, S, true);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      if (threadIdx.x % 128 < 4) barrier_arrive(&shared.empty[ring.stage], lane);
      if (threadIdx.x % 128 == 0) barrier_arrive(&shared.spent[buffer.stage]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 96; i += 2) {
        const int e = 64 * half + 16 * warp + lane / 4 + 8 * (i / 2 % 2);
        const int w = col0 + 8 * (i % 32 / 4) + 2 * (lane % 4);
        const size_t matrix = static_cast<size_t>(first) * 3 + i / 32;
        if (e < E && w < W) {
          *reinterpret_cast<float2*>(partials + (matrix * E + e) * W + w) =
              make_float2(sums[half][i], sums[half][i + 1]);
        }
      }
    }
  }
#endif
}

// ---- References ---------------------------------------------------------------------------------

// Forward and backward once more, plainly, as written at the top and not associated, in fp64, with
// the products by cuBLAS. T is bf16, or double where finite differences need inputs that bf16
// cannot tell apart.

// c (m, n) = alpha a b + beta c, row-major; for the factors see library_product.
void product_fp64(cublasHandle_t blas, double alpha, const double* a, Transposed a_is,
                  const double* b, Transposed b_is, double beta, double* c, int64_t m, int64_t n,
                  int64_t k) {
  CUBLAS_CHECK(cublasDgemm(blas, b_is ? CUBLAS_OP_T : CUBLAS_OP_N, a_is ? CUBLAS_OP_T : CUBLAS_OP_N,
                           static_cast<int>(n), static_cast<int>(m), static_cast<int>(k), &alpha, b,
                           static_cast<int>(b_is ? k : n), a, static_cast<int>(a_is ? m : k), &beta,
                           c, static_cast<int>(n)));
}

// out = tanh(xr * ar + xi * ai); one thread an element.
__global__ void features_fp64(const double* xr, const double* xi, const double* ar,
                              const double* ai, double* out, size_t count) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = tanh(xr[i] * ar[i] + xi[i] * ai[i]);
}

// From xr, xi, ar, ai the products P, Q, R, S; one thread an element. 1 - t^2 = (1 - t) (1 + t) is
// as accurate as 1 - |t| is, to 2^-53: next to nothing of the gradients' size.
__global__ void products_fp64(const double* xr, const double* xi, double* ar, double* ai,
                              const bf16* d_out, double* P, double* Q, size_t count) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const double t = tanh(xr[i] * ar[i] + xi[i] * ai[i]);
  const double g = static_cast<double>(__bfloat162float(d_out[i])) * (1 - t) * (1 + t);
  P[i] = g * xr[i];
  Q[i] = g * xi[i];
  ar[i] *= g;
  ai[i] *= g;
}

// to = from, rounded; one thread an element.
__global__ void round_to_bf16(const double* from, bf16* to, size_t count) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) to[i] = __double2bfloat16(from[i]);
}

template <typename T>
class Reference {
 public:
  Reference(cublasHandle_t blas, const Shape& shape, const bf16* Gr, const bf16* Gi, const T* x,
            const T* Lr, const T* Li)
      : blas_(blas),
        shape_(shape),
        Gr_(Gr),
        Gi_(Gi),
        Gr64_(chunk(shape) * shape.E),
        Gi64_(chunk(shape) * shape.E),
        x_(shape.coefficients()),
        Lr_(shape.weights()),
        Li_(shape.weights()),
        xr_(chunk(shape) * shape.W),
        xi_(chunk(shape) * shape.W),
        ar_(chunk(shape) * shape.W),
        ai_(chunk(shape) * shape.W) {
    to_fp64(x, type_of<T>, shape.coefficients(), x_);
    to_fp64(Lr, type_of<T>, shape.weights(), Lr_);
    to_fp64(Li, type_of<T>, shape.weights(), Li_);
  }

  void forward(double* out) {
    for (int64_t v = 0; v < shape_.V; v += chunk(shape_)) {
      const int64_t count = compute_rows(v) * shape_.W;
      features_fp64<<<blocks_for(count, 256), 256>>>(xr_, xi_, ar_, ai_, out + v * shape_.W, count);
      CUDA_CHECK(cudaGetLastError());
    }
  }

  void backward(const bf16* d_out, double* d_x, double* d_Lr, double* d_Li) {
    const auto [V, E, W] = shape_;
    Scratch<double> P(chunk(shape_) * W), Q(chunk(shape_) * W);
    for (int64_t v = 0; v < V; v += chunk(shape_)) {
      const int64_t rows = compute_rows(v);
      products_fp64<<<blocks_for(rows * W, 256), 256>>>(xr_, xi_, ar_, ai_, d_out + v * W, P, Q,
                                                        rows * W);
      CUDA_CHECK(cudaGetLastError());
      const double so_far = v > 0 ? 1 : 0;
      product_fp64(blas_, 1, P, kTransposed, xr_, kPlain, so_far, d_Lr, W, W, rows);
      product_fp64(blas_, 1, Q, kTransposed, xi_, kPlain, 1, d_Lr, W, W, rows);
      product_fp64(blas_, 1, Q, kTransposed, xr_, kPlain, so_far, d_Li, W, W, rows);
      product_fp64(blas_, -1, P, kTransposed, xi_, kPlain, 1, d_Li, W, W, rows);
      product_fp64(blas_, 1, P, kPlain, Lr_, kPlain, 1, ar_, rows, W, W);  // ar is R by now
      product_fp64(blas_, 1, Q, kPlain, Li_, kPlain, 1, ar_, rows, W, W);
      product_fp64(blas_, -1, P, kPlain, Li_, kPlain, 1, ai_, rows, W, W);  // and ai is S
      product_fp64(blas_, 1, Q, kPlain, Lr_, kPlain, 1, ai_, rows, W, W);
      product_fp64(blas_, 1, Gr64_, kTransposed, ar_, kPlain, so_far, d_x, E, W, rows);
      product_fp64(blas_, 1, Gi64_, kTransposed, ai_, kPlain, 1, d_x, E, W, rows);
    }
  }

  // xr, xi, ar, ai and out (V, W each), rounded: what a framework's forward pass saves.
  void save(const std::array<bf16*, 5>& saved) {
    for (int64_t v = 0; v < shape_.V; v += chunk(shape_)) {
      const int64_t count = compute_rows(v) * shape_.W;
      const double* from[] = {xr_, xi_, ar_, ai_};
      for (int i = 0; i < 4; ++i) {
        round_to_bf16<<<blocks_for(count, 256), 256>>>(from[i], saved[i] + v * shape_.W, count);
      }
      features_fp64<<<blocks_for(count, 256), 256>>>(xr_, xi_, ar_, ai_, xr_, count);
      round_to_bf16<<<blocks_for(count, 256), 256>>>(xr_, saved[4] + v * shape_.W, count);
      CUDA_CHECK(cudaGetLastError());
    }
  }

  // Device memory that any of these takes.
  static double bytes(const Shape& shape) {
    return 8.0 *
           (static_cast<double>(chunk(shape)) * static_cast<double>(2 * shape.E + 6 * shape.W) +
            static_cast<double>(shape.coefficients()) + 2 * static_cast<double>(shape.weights()));
  }

 private:
  static int64_t chunk(const Shape& shape) { return std::min(shape.V, kReferenceRows); }

  // xr, xi, ar, ai of the vertices from v on; of as many as it returns.
  int64_t compute_rows(int64_t v) {
    const auto [V, E, W] = shape_;
    const int64_t rows = std::min(chunk(shape_), V - v);
    to_fp64(Gr_ + v * E, Type::bf16, rows * E, Gr64_);
    to_fp64(Gi_ + v * E, Type::bf16, rows * E, Gi64_);
    product_fp64(blas_, 1, Gr64_, kPlain, x_, kPlain, 0, xr_, rows, W, E);
    product_fp64(blas_, 1, Gi64_, kPlain, x_, kPlain, 0, xi_, rows, W, E);
    product_fp64(blas_, 1, xr_, kPlain, Lr_, kTransposed, 0, ar_, rows, W, W);
    product_fp64(blas_, -1, xi_, kPlain, Li_, kTransposed, 1, ar_, rows, W, W);
    product_fp64(blas_, 1, xi_, kPlain, Lr_, kTransposed, 0, ai_, rows, W, W);
    product_fp64(blas_, 1, xr_, kPlain, Li_, kTransposed, 1, ai_, rows, W, W);
    return rows;
  }

  cublasHandle_t blas_;
  Shape shape_;
  const bf16 *Gr_, *Gi_;
  Scratch<double> Gr64_, Gi64_, x_, Lr_, Li_;
  Scratch<double> xr_, xi_, ar_, ai_;  // of a chunk of vertices
};

// ---- Is the reference's gradient the gradient? --------------------------------------------------

// Reference::backward was derived by hand from Reference::forward: along random directions of x, Lr
// and Li it is held to finite differences of the loss f = sum(dOut * out), see
// common/gradient_check.h. Its unit is here the root of the number of elements, times rms(dOut),
// times that of tanh' u'. The bound's two parts:
//
//   - u is a polynomial in h: u0 + u1 h + u2 h^2 for x (xr and ar are both linear in it), without
//     u2 for the weights. So out''' = tanh''' u1^3 + 6 tanh'' u1 u2, with |tanh'''| <= 2 and
//     |tanh''| < 0.8. d is drawn as the inputs are: then u2 has the size of u, a variance of 1, and
//     u1 one of 2. Sums of products of two numbers, both are spread about as a Laplace distribution
//     is, which makes the rms of u1^3 27, that of u1 u2 at most 3.5 and so that of out''' 71; that
//     of tanh' u1 is near 1, and above 1/2. So f''' is at most 142 units; 4 times that is room for
//     few elements, and h^2 / 6 times all this is less than 100 h^2.
//   - u is off by dot_tolerance(2 (E + W)), and by 4 roundings more, of its rms; out by no more
//     than u, which is 2 times as much of out's rms, see output_tolerance. The errors are
//     independent.
//
// With fp64's roundoff of 2^-53, h = 2^-18 makes both parts about 10^-9.
constexpr int64_t kDifferenceRows = 256;  // of V: enough to run the same code
constexpr double kStep = 0x1p-18;

// How the inputs are drawn: uniform in +- these. xr and xi sum up E terms, ar and ai 2 W: with
// these xr and xi have a variance of 1, ar and ai of 1/2, and u of 1. Of u, one in 300 is then
// beyond +-4, where tanh is 0.9993.
double tangent_scale(const Shape& shape) { return 3 / sqrt(static_cast<double>(shape.E)); }
double weight_scale(const Shape& shape) { return sqrt(0.75 / static_cast<double>(shape.W)); }

// The largest of the three gradients' differences to finite differences. Of shape.V vertices the
// first kDifferenceRows take part.
double check_gradients(cublasHandle_t blas, Shape shape, const bf16* Gr, const bf16* Gi,
                       const bf16* d_out) {
  shape.V = std::min(shape.V, kDifferenceRows);
  const size_t values = shape.vertex_values();
  const std::array<const char*, 3> names = {"dx", "dLr", "dLi"};
  const std::array<size_t, 3> counts = {shape.coefficients(), shape.weights(), shape.weights()};
  const std::array<double, 3> scales = {1, weight_scale(shape), weight_scale(shape)};
  using Inputs = std::array<std::vector<double>, 3>;

  Scratch<double> out64(values), d_out64(values);
  Scratch<double> x64(counts[0]), Lr64(counts[1]), Li64(counts[2]);
  to_fp64(d_out, Type::bf16, values, d_out64);
  const std::vector<double> d_out_host = to_host(d_out64, values);
  const auto reference_of = [&](const Inputs& inputs) {
    double* const to[] = {x64, Lr64, Li64};
    for (int i = 0; i < 3; ++i) to_device(inputs[i], to[i]);
    return Reference<double>(blas, shape, Gr, Gi, x64, Lr64, Li64);
  };
  const auto loss = [&](const Inputs& inputs) {
    reference_of(inputs).forward(out64);
    Loss result;
    result.add(d_out_host, to_host(out64, values));
    return result;
  };

  Inputs inputs;
  for (int i = 0; i < 3; ++i) inputs[i] = random_fp64(counts[i], scales[i], 0, 1 + i);
  Scratch<double> d_x(counts[0]), d_Lr(counts[1]), d_Li(counts[2]);
  reference_of(inputs).backward(d_out, d_x, d_Lr, d_Li);
  const std::array<std::vector<double>, 3> gradients = {
      to_host(d_x, counts[0]), to_host(d_Lr, counts[1]), to_host(d_Li, counts[2])};

  const DifferenceBound bound = {
      .h = kStep,
      .curvature = 100,
      .roundoff = 2 * dot_tolerance(2 * (shape.E + shape.W), 0x1p-53, sqrt(4) * 0x1p-53)};
  double worst = 0;
  for (int i = 0; i < 3; ++i) {
    const std::vector<double> direction = random_fp64(counts[i], scales[i], 0, 4 + i);
    const auto loss_at = [&](double h) {
      Inputs at = inputs;
      at[i] = moved(inputs[i], direction, h);
      return loss(at);
    };
    worst = std::max(worst, check_slope(names[i], gradients[i], direction, loss_at(kStep),
                                        loss_at(-kStep), bound));
  }
  return worst;
}

double check_gradients_bytes(const Shape& shape) {
  const Shape few{std::min(shape.V, kDifferenceRows), shape.E, shape.W};
  const double inputs =
      static_cast<double>(few.coefficients()) + 2 * static_cast<double>(few.weights());
  return 8.0 * (2 * static_cast<double>(few.vertex_values()) + 2 * inputs) +
         Reference<double>::bytes(few);
}

// ---- The two tables -----------------------------------------------------------------------------

// Tolerances. Roundings to bf16 on the way to a result count like one of the result itself, see
// dot_tolerance. No sum but those over V is of more than 2 (E + W) terms, xr's and ar's together.
double features_tolerance(const Shape& shape, int roundings) {
  const int64_t chain = 2 * (shape.E + shape.W);
  return dot_tolerance(chain, tensor_core_sum(chain), sqrt(roundings) * kRoundoffBf16);
}

// Of out, if u takes `roundings`. tanh's slope is at most 1: out is off by no more than u is. u has
// an rms of 1, out, where u is spread as a Laplace distribution, one of 0.57: that is 2 times as
// much of it. tanh itself and the rounding of out come on top of that.
double output_tolerance(const Shape& shape, int roundings) {
  return hypot(2 * features_tolerance(shape, roundings),
               dot_tolerance(1, kRoundoffFp32, hypot(kRoundoffBf16, 0x1p-11)));
}

// Of each gradient. 1 - tanh(u)^2 changes by -2 tanh(u) of itself per unit of u, at most 2: g is
// off by twice what u is, whose rms is 1, and with it P, Q, R and S. Their own roundings, those of
// what they are multiplied by and of all that follows are `roundings`; `chain` is how many vertices
// one fp32 accumulator of the tensor cores adds up, two products a vertex.
double gradient_tolerance(const Shape& shape, int roundings_of_u, int roundings, int64_t chain) {
  const int64_t terms = 2 * (chain + shape.E + shape.W);
  return hypot(2 * features_tolerance(shape, roundings_of_u),
               dot_tolerance(terms, tensor_core_sum(terms), sqrt(roundings) * kRoundoffBf16));
}

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

// Lets a kernel have `bytes` of shared memory. Below compute capability 8.0, where it does not run,
// there may be less.
template <typename Function>
void allow_shared_memory(const Device& device, Function* kernel, int64_t bytes) {
  const int64_t allowed = std::min<int64_t>(bytes, device.shared_bytes);
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(allowed)));
}

// How many blocks of a kernel are on the GPU at once.
template <typename Function>
int64_t resident_blocks(const Device& device, Function* kernel, int threads, int bytes) {
  allow_shared_memory(device, kernel, bytes);
  int per_sm = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, bytes));
  return static_cast<int64_t>(per_sm) * device.sms;
}

// A grid for `columns` groups of columns and as many slices of V's tiles as fill the GPU, at least
// 3 (so that the CPU backend has some), but none without a tile.
dim3 slices_of(int64_t tiles, int64_t columns, int64_t resident) {
  const int64_t fill = std::max<int64_t>(3, resident / columns);
  return dim3(static_cast<unsigned>(columns), static_cast<unsigned>(std::min(tiles, fill)));
}

Problem& declare(Lesson& lesson, const char* name, const Shape& shape, double flops, double bytes) {
  Problem& problem = lesson.problem(name, {{"V", shape.V}, {"E", shape.E}, {"W", shape.W}}, "bf16",
                                    {.flops = flops, .bytes = bytes}, Rate::fp16);
  if (shape.V <= 4096) problem.in_graph();
  return problem;
}

// Operations of a product of `count` elements in all with the inner dimension `depth`.
double product_flops(size_t count, int64_t depth) {
  return 2 * static_cast<double>(count) * static_cast<double>(depth);
}

struct Forward {
  Forward(Lesson& lesson, cublasHandle_t blas, Shape shape)
      : shape(shape),
        blas(blas),
        device(lesson.device()),
        problem(declare(lesson, "forward", shape, flops(shape), ends(shape))),
        Gr(problem.input<bf16>(shape.tangent_values(), tangent_scale(shape))),
        Gi(problem.input<bf16>(shape.tangent_values(), tangent_scale(shape))),
        x(problem.input<bf16>(shape.coefficients())),
        Lr(problem.input<bf16>(shape.weights(), weight_scale(shape))),
        Li(problem.input<bf16>(shape.weights(), weight_scale(shape))),
        out(problem.output<bf16>(shape.vertex_values())),
        expected(problem.reference(shape.vertex_values())) {
    problem.adjust_inputs([this] {
      if (this->shape.V > 1) make_last_vertex_steep();
    });
    problem.reference_from(Reference<bf16>::bytes(shape), [this] {
      Reference<bf16>(this->blas, this->shape, Gr, Gi, x, Lr, Li).forward(expected);
    });
  }

  // For the last vertex |u| shall be in the hundreds: to compute tanh there takes care. But u shall
  // also be off by only a small part of itself there, so that its sign is certain: of that vertex
  // the first coefficient alone takes part, 32 times. Then xr is 32 times an element of x, exactly,
  // and tanh is off by at most max(|u| (1 - tanh(u)^2)) = 0.45 times u's relative error.
  void make_last_vertex_steep() {
    std::vector<bf16> row(shape.E, __float2bfloat16_rn(0));
    const size_t at = static_cast<size_t>(shape.V - 1) * shape.E;
    const size_t bytes = row.size() * sizeof(bf16);
    CUDA_CHECK(cudaMemcpy(Gi + at, row.data(), bytes, cudaMemcpyHostToDevice));
    row[0] = __float2bfloat16_rn(32);
    CUDA_CHECK(cudaMemcpy(Gr + at, row.data(), bytes, cudaMemcpyHostToDevice));
  }

  // M1 and M2; six products with Gr and Gi; u and tanh. See the top of the file.
  static double flops(const Shape& shape) {
    return 2 * product_flops(shape.coefficients(), shape.W) +
           6 * product_flops(shape.vertex_values(), shape.E) +
           4 * static_cast<double>(shape.vertex_values());
  }
  // Device memory of inputs and outputs, in bytes.
  static double ends(const Shape& shape) {
    return sizeof(bf16) *
           (2 * static_cast<double>(shape.tangent_values()) +
            static_cast<double>(shape.coefficients()) + 2 * static_cast<double>(shape.weights()) +
            static_cast<double>(shape.vertex_values()));
  }
  double ends() const { return ends(shape); }

  Operands operands() const { return {.Gr = Gr, .Gi = Gi, .x = x, .Lr = Lr, .Li = Li}; }
  // For a kernel that takes `roundings` on the way to u.
  std::vector<Check> checks(int roundings) const {
    return {{out.storage(), expected.storage(), output_tolerance(shape, roundings)}};
  }

  Shape shape;
  cublasHandle_t blas;
  const Device& device;
  Problem& problem;
  Buffer<bf16> Gr, Gi, x, Lr, Li, out;
  Buffer<double> expected;
};

struct Backward {
  Backward(Lesson& lesson, cublasHandle_t blas, Shape shape)
      : shape(shape),
        blas(blas),
        device(lesson.device()),
        problem(declare(lesson, "backward", shape, flops(shape), ends(shape))),
        Gr(problem.input<bf16>(shape.tangent_values(), tangent_scale(shape))),
        Gi(problem.input<bf16>(shape.tangent_values(), tangent_scale(shape))),
        x(problem.input<bf16>(shape.coefficients())),
        Lr(problem.input<bf16>(shape.weights(), weight_scale(shape))),
        Li(problem.input<bf16>(shape.weights(), weight_scale(shape))),
        d_out(problem.input<bf16>(shape.vertex_values())),
        d_x(problem.output<bf16>(shape.coefficients())),
        d_Lr(problem.output<bf16>(shape.weights())),
        d_Li(problem.output<bf16>(shape.weights())),
        expected_d_x(problem.reference(shape.coefficients())),
        expected_d_Lr(problem.reference(shape.weights())),
        expected_d_Li(problem.reference(shape.weights())) {
    for (int i = 0; i < 5; ++i) saved.push_back(problem.input<bf16>(shape.vertex_values()));
    problem.adjust_inputs([this] {
      Reference<bf16>(this->blas, this->shape, Gr, Gi, x, Lr, Li)
          .save({saved[0], saved[1], saved[2], saved[3], saved[4]});
    });
    const double scratch = std::max(Reference<bf16>::bytes(shape), check_gradients_bytes(shape));
    problem.reference_from(scratch, [this] {
      report_difference(check_gradients(this->blas, this->shape, Gr, Gi, d_out));
      Reference<bf16>(this->blas, this->shape, Gr, Gi, x, Lr, Li)
          .backward(d_out, expected_d_x, expected_d_Lr, expected_d_Li);
    });
  }

  // As forward, which is computed again; six more products; u, g and P, Q, R, S; and last, products
  // of small matrices.
  static double flops(const Shape& shape) {
    return 12 * product_flops(shape.vertex_values(), shape.E) +
           15 * static_cast<double>(shape.vertex_values()) +
           4 * product_flops(shape.coefficients(), shape.W) +
           2 * product_flops(shape.weights(), shape.E);
  }
  // Device memory of inputs and outputs, in bytes.
  static double ends(const Shape& shape) {
    return sizeof(bf16) *
           (2 * static_cast<double>(shape.tangent_values()) +
            2 * static_cast<double>(shape.coefficients()) +
            4 * static_cast<double>(shape.weights()) + static_cast<double>(shape.vertex_values()));
  }
  double ends() const { return ends(shape); }

  Operands operands() const { return {.Gr = Gr, .Gi = Gi, .x = x, .Lr = Lr, .Li = Li}; }
  // For the roundings and the chain see gradient_tolerance.
  std::vector<Check> checks(int roundings_of_u, int roundings, int64_t chain) const {
    const double tolerance = gradient_tolerance(shape, roundings_of_u, roundings, chain);
    return {{d_x.storage(), expected_d_x.storage(), tolerance},
            {d_Lr.storage(), expected_d_Lr.storage(), tolerance},
            {d_Li.storage(), expected_d_Li.storage(), tolerance}};
  }

  Shape shape;
  cublasHandle_t blas;
  const Device& device;
  Problem& problem;
  Buffer<bf16> Gr, Gi, x, Lr, Li, d_out;
  std::vector<Buffer<bf16>> saved;  // xr, xi, ar, ai, out (V, W each), for "unfused"
  Buffer<bf16> d_x, d_Lr, d_Li;
  Buffer<double> expected_d_x, expected_d_Lr, expected_d_Li;
  std::function<void(double)> report_difference;  // of the reference and finite differences
};

// ---- The rows -----------------------------------------------------------------------------------

// Three temporaries, t1 to t3, are used again, as a framework's allocator does.
void add_unfused(Forward& table) {
  const auto [V, E, W] = table.shape;
  const size_t count = table.shape.vertex_values();
  const auto temporary = [&] { return table.problem.output<bf16>(count); };
  const auto xr = temporary(), xi = temporary(), ar = temporary(), ai = temporary();
  const auto t1 = temporary(), t2 = temporary(), t3 = temporary();
  const unsigned blocks = blocks_for(static_cast<int64_t>(count), kPerBlock);
  const auto launch = [=, V = V, E = E, W = W, &table] {
    const auto product = [&](const bf16* left, const bf16* right, Transposed right_is, bf16* to,
                             int64_t depth) {
      library_product(table.blas, left, kPlain, right, right_is, to, V, W, depth);
    };
    product(table.Gr, table.x, kPlain, xr, E);
    product(table.Gi, table.x, kPlain, xi, E);
    product(xr, table.Lr, kTransposed, t1, W);
    product(xi, table.Li, kTransposed, t2, W);
    elementwise<Subtract><<<blocks, kElementwiseThreads>>>(t1, t2, ar, count);
    product(xi, table.Lr, kTransposed, t1, W);
    product(xr, table.Li, kTransposed, t2, W);
    elementwise<Add><<<blocks, kElementwiseThreads>>>(t1, t2, ai, count);
    elementwise<Multiply><<<blocks, kElementwiseThreads>>>(xr, ar, t1, count);
    elementwise<Multiply><<<blocks, kElementwiseThreads>>>(xi, ai, t2, count);
    elementwise<Add><<<blocks, kElementwiseThreads>>>(t1, t2, t3, count);
    tanh_of<<<blocks, kElementwiseThreads>>>(t3, table.out, count);
  };
  table.problem.kernel("unfused", Role::baseline, launch)
      .needs(80)
      .occupies(table.ends() + 7 * t1.bytes())
      // xr, as a factor of ar and of u; its products, their sum, the products and the sum in u.
      .checks = table.checks(6);
}

void add_two_kernels(Forward& table) {
  const auto [V, E, W] = table.shape;
  const auto xr = table.problem.output<bf16>(table.shape.vertex_values());
  const auto xi = table.problem.output<bf16>(table.shape.vertex_values());
  const unsigned blocks = blocks_for(V, kBox) * static_cast<unsigned>(boxes_of(W));
  allow_shared_memory(table.device, take_gradients, kGradientBytes);
  allow_shared_memory(table.device, rotate_gradients, kRotationBytes);
  const auto launch = [=, V = V, E = static_cast<int>(E), W = static_cast<int>(W), &table] {
    take_gradients<<<blocks, kThreads, kGradientBytes>>>(table.operands(), xr, xi, V, E, W);
    rotate_gradients<<<blocks, kThreads, kRotationBytes>>>(table.operands(), xr, xi, table.out, V,
                                                           W);
  };
  table.problem.kernel("two kernels", Role::ours, launch)
      .needs(80)
      .occupies(table.ends() + xr.bytes() + xi.bytes())
      .resources(rotate_gradients, kThreads, kRotationBytes)
      .checks = table.checks(2);  // xr and xi, as factors of ar and ai and of u
}

// False if a block's rows of xr and xi do not fit on chip.
bool add_one_kernel(Forward& table) {
  const auto [V, E, W] = table.shape;
  if (one_kernel_bytes(W) > table.device.shared_bytes) return false;
  const int bytes = static_cast<int>(one_kernel_bytes(W));
  const unsigned blocks = blocks_for(V, kBox);
  allow_shared_memory(table.device, gradient_features, bytes);
  const auto launch = [=, V = V, E = static_cast<int>(E), W = static_cast<int>(W), &table] {
    gradient_features<<<blocks, kThreads, bytes>>>(table.operands(), table.out, V, E, W);
  };
  table.problem.kernel("one kernel", Role::ours, launch)
      .needs(80)
      .occupies(table.ends())
      .resources(gradient_features, kThreads, bytes)
      .checks = table.checks(2);  // as above
  return true;
}

template <typename Tiles>
void add_associated(Forward& table) {
  const auto [V, E, W] = table.shape;
  const auto M = table.problem.output<bf16>(2 * table.shape.coefficients());
  const int bytes = static_cast<int>(Tiles::shared_bytes(E));
  const auto kernel = associated_features<Tiles>;
  const dim3 small(blocks_for(W, kSmall), blocks_for(E, kSmall), 2);
  const dim3 blocks = slices_of(blocks_for(V, kBox), blocks_for(W, Tiles::BN),
                                resident_blocks(table.device, kernel, kThreads, bytes));
  const auto launch = [=, V = V, E = static_cast<int>(E), W = static_cast<int>(W), &table] {
    associate<<<small, kThreads>>>(table.operands(), M, E, W);
    associated_features<Tiles>
        <<<blocks, kThreads, bytes>>>(table.operands(), M, table.out, V, E, W);
  };
  table.problem.kernel("associated", Role::ours, launch)
      .needs(80)
      .occupies(table.ends() + M.bytes())
      .resources(kernel, kThreads, bytes)
      .checks = table.checks(1);  // M1 and M2
}

// False if not even 32 columns of x, M1, M2 fit on chip.
bool add_associated(Forward& table) {
  if (NarrowForwardTiles::shared_bytes(table.shape.E) > table.device.shared_bytes) return false;
  if (are_suitable<WideForwardTiles>(table.shape, table.device)) {
    add_associated<WideForwardTiles>(table);
  } else {
    add_associated<NarrowForwardTiles>(table);
  }
  return true;
}

void add_unfused(Backward& table) {
  const auto [V, E, W] = table.shape;
  const size_t count = table.shape.vertex_values(), weights = table.shape.weights();
  const size_t coefficients = table.shape.coefficients();
  const auto temporary = [&](size_t size) { return table.problem.output<bf16>(size); };
  const auto g = temporary(count), P = temporary(count), Q = temporary(count);
  const auto d_xr = temporary(count), d_xi = temporary(count);
  const auto t1 = temporary(count), t2 = temporary(count);
  const auto w1 = temporary(weights), w2 = temporary(weights);
  const auto c1 = temporary(coefficients), c2 = temporary(coefficients);
  const auto launch = [=, V = V, E = E, W = W, &table] {
    const bf16 *xr = table.saved[0], *xi = table.saved[1], *ar = table.saved[2];
    const bf16 *ai = table.saved[3], *out = table.saved[4];
    const unsigned blocks = blocks_for(static_cast<int64_t>(count), kPerBlock);
    const unsigned weight_blocks = blocks_for(static_cast<int64_t>(weights), kPerBlock);
    const unsigned coefficient_blocks = blocks_for(static_cast<int64_t>(coefficients), kPerBlock);
    const auto product = [&](const bf16* left, Transposed left_is, const bf16* right, bf16* to,
                             int64_t rows, int64_t depth) {
      library_product(table.blas, left, left_is, right, kPlain, to, rows, W, depth);
    };
    elementwise<TanhBackward><<<blocks, kElementwiseThreads>>>(table.d_out, out, g, count);
    elementwise<Multiply><<<blocks, kElementwiseThreads>>>(g, xr, P, count);
    elementwise<Multiply><<<blocks, kElementwiseThreads>>>(g, xi, Q, count);
    elementwise<Multiply><<<blocks, kElementwiseThreads>>>(g, ar, d_xr, count);  // R
    elementwise<Multiply><<<blocks, kElementwiseThreads>>>(g, ai, d_xi, count);  // S
    product(P, kPlain, table.Lr, t1, V, W);
    elementwise<Add><<<blocks, kElementwiseThreads>>>(d_xr, t1, t2, count);
    product(Q, kPlain, table.Li, t1, V, W);
    elementwise<Add><<<blocks, kElementwiseThreads>>>(t2, t1, d_xr, count);
    product(Q, kPlain, table.Lr, t1, V, W);
    elementwise<Add><<<blocks, kElementwiseThreads>>>(d_xi, t1, t2, count);
    product(P, kPlain, table.Li, t1, V, W);
    elementwise<Subtract><<<blocks, kElementwiseThreads>>>(t2, t1, d_xi, count);
    product(P, kTransposed, xr, w1, W, V);
    product(Q, kTransposed, xi, w2, W, V);
    elementwise<Add><<<weight_blocks, kElementwiseThreads>>>(w1, w2, table.d_Lr, weights);
    product(Q, kTransposed, xr, w1, W, V);
    product(P, kTransposed, xi, w2, W, V);
    elementwise<Subtract><<<weight_blocks, kElementwiseThreads>>>(w1, w2, table.d_Li, weights);
    product(table.Gr, kTransposed, d_xr, c1, E, V);
    product(table.Gi, kTransposed, d_xi, c2, E, V);
    elementwise<Add><<<coefficient_blocks, kElementwiseThreads>>>(c1, c2, table.d_x, coefficients);
  };
  table.problem.kernel("unfused", Role::baseline, launch)
      .needs(80)
      .occupies(table.ends() + (5 + 7) * g.bytes() + 2 * w1.bytes() + 2 * c1.bytes())
      // 1 - t^2 is off by 2 |t| times what t was rounded by, up to a unit roundoff, while its own
      // rms is 3/4: that counts as 2. g; the saved xr or ar; P or R; the product with Lr and two
      // additions; the product with Gr^T, and the last addition. How cuBLAS splits the sum over V
      // is not known.
      .checks = table.checks(0, 2 + 1 + 1 + 1 + 3 + 2, V);
}

template <typename Tiles>
void add_associated(Backward& table) {
  const auto [V, E, W] = table.shape;
  const size_t count = table.shape.coefficients();
  const int bytes = static_cast<int>(Tiles::shared_bytes(E));
  const auto kernel = accumulate_backward<Tiles>;
  const int64_t tiles = blocks_for(V, Tiles::BV);
  const dim3 blocks = slices_of(tiles, blocks_for(W, Tiles::BN),
                                resident_blocks(table.device, kernel, Tiles::kThreads, bytes));
  const int slices = static_cast<int>(blocks.y);
  const auto M = table.problem.output<bf16>(2 * count);
  const auto partials = table.problem.output<float>(slices * 3 * count);
  const auto dM = table.problem.output<bf16>(2 * count);
  const auto D = table.problem.output<float>(count);
  const dim3 small(blocks_for(W, kSmall), blocks_for(E, kSmall), 2);
  const dim3 last(blocks_for(W, kSmall), blocks_for(std::max(E, W), kSmall), 3);
  const unsigned sum_blocks = blocks_for(static_cast<int64_t>(3 * count), 4 * 128);
  const auto launch = [=, V = V, E = static_cast<int>(E), W = static_cast<int>(W), &table] {
    associate<<<small, kThreads>>>(table.operands(), M, E, W);
    accumulate_backward<Tiles>
        <<<blocks, Tiles::kThreads, bytes>>>(table.operands(), M, table.d_out, partials, V, E, W);
    add_slices<<<sum_blocks, 128>>>(partials, slices, dM, D, count);
    finish_backward<<<last, kThreads>>>(table.operands(), dM, D, table.d_x, table.d_Lr, table.d_Li,
                                        E, W);
  };
  table.problem.kernel("associated", Role::ours, launch)
      .needs(80)
      .occupies(table.ends() + M.bytes() + partials.bytes() + dM.bytes() + D.bytes())
      .resources(kernel, Tiles::kThreads, bytes)
      // u: M1, M2. Then ar, of M1; R; dM1; the result.
      .checks = table.checks(1, 4, (tiles + slices - 1) / slices * Tiles::BV);
}

// False if E is more than a block has registers for sums.
bool add_associated(Backward& table) {
  if (table.shape.E > NarrowBackwardTiles::kMaxE) return false;
  if (are_suitable<WideBackwardTiles>(table.shape, table.device)) {
    add_associated<WideBackwardTiles>(table);
  } else {
    add_associated<NarrowBackwardTiles>(table);
  }
  return true;
}

constexpr int kHopperThreads = 384;

// M: M1, M2, -M2.
template <typename Table>
HopperMaps hopper_maps(const Table& table, const bf16* M, const bf16* vertices) {
  const auto [V, E, W] = table.shape;
  const auto right = [&, E = E, W = W](const bf16* matrix) {
    return tensor_map<bf16>(matrix, E, W, kEigen);
  };
  return {.Gr = tensor_map<bf16>(table.Gr, V, E, 64),
          .Gi = tensor_map<bf16>(table.Gi, V, E, 64),
          .minus_M2 = right(M + 2 * table.shape.coefficients()),
          .M1 = right(M),
          .M2 = right(M + table.shape.coefficients()),
          .x = right(table.x),
          .vertices = tensor_map<bf16>(vertices, V, W, 64)};
}

void add_hopper_kernels(Forward& table) {
  const auto [V, E, W] = table.shape;
  const auto M = table.problem.output<bf16>(3 * table.shape.coefficients());
  constexpr int kBytes = sizeof(HopperForward);
  allow_shared_bytes(hopper_features, kBytes);
  const dim3 small(blocks_for(W, kSmall), blocks_for(E, kSmall), 3);
  const unsigned blocks =
      2 *
      persistent(blocks_for(V, 64), resident_clusters(hopper_features, 2, kHopperThreads, kBytes));
  const auto launch = [=, V = static_cast<int>(V), E = static_cast<int>(E), W = static_cast<int>(W),
                       &table] {
    const HopperMaps maps = hopper_maps(table, M, table.out);
    // associate starts as usual: what came before it is over when Gr, Gi and x are read.
    associate<<<small, kThreads>>>(table.operands(), M, E, W);
    launch_early(hopper_features, blocks, kHopperThreads, kBytes, maps, V);
  };
  table.problem.kernel("Hopper", Role::ours, launch)
      .hopper_only()
      .occupies(table.ends() + M.bytes())
      .resources(hopper_features, kHopperThreads, kBytes)
      .checks = table.checks(1);  // M1 and M2
}

void add_hopper_kernels(Backward& table) {
  const auto [V, E, W] = table.shape;
  const size_t count = table.shape.coefficients();
  constexpr int kBytes = sizeof(HopperBackward);
  allow_shared_bytes(hopper_accumulate_backward, kBytes);
  const unsigned tiles = blocks_for(V, 64);
  const unsigned clusters =
      persistent(tiles, resident_clusters(hopper_accumulate_backward, 4, kHopperThreads, kBytes));
  const auto M = table.problem.output<bf16>(3 * count);
  const auto partials = table.problem.output<float>(clusters * 3 * count);
  const auto dM = table.problem.output<bf16>(2 * count);
  const auto D = table.problem.output<float>(count);
  const dim3 small(blocks_for(W, kSmall), blocks_for(E, kSmall), 3);
  const dim3 last(blocks_for(W, kSmall), blocks_for(std::max(E, W), kSmall), 3);
  const unsigned sum_blocks = blocks_for(static_cast<int64_t>(3 * count), 4 * 128);
  const auto launch = [=, V = static_cast<int>(V), E = static_cast<int>(E), W = static_cast<int>(W),
                       &table] {
    const HopperMaps maps = hopper_maps(table, M, table.d_out);
    associate<<<small, kThreads>>>(table.operands(), M, E, W);  // as usual: see above
    launch_early(hopper_accumulate_backward, 4 * clusters, kHopperThreads, kBytes, maps, partials,
                 V, E, W);
    add_slices<<<sum_blocks, 128>>>(partials, static_cast<int>(clusters), dM, D, count);
    finish_backward<<<last, kThreads>>>(table.operands(), dM, D, table.d_x, table.d_Lr, table.d_Li,
                                        E, W);
  };
  table.problem.kernel("Hopper", Role::ours, launch)
      .hopper_only()
      .occupies(table.ends() + M.bytes() + partials.bytes() + dM.bytes() + D.bytes())
      .resources(hopper_accumulate_backward, kHopperThreads, kBytes)
      // u: M1, M2. Then ar, of M1; R; dM1; the result.
      .checks = table.checks(1, 4, (tiles + clusters - 1) / clusters * 64);
}

// The same with TMA and wgmma. False if E or W is more than its blocks are made for.
template <typename Table>
bool add_hopper(Table& table) {
  if (table.shape.E > kEigen || table.shape.W > kWidth) return false;
  add_hopper_kernels(table);
  return true;
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "8_spatial_gradients",
                 .title = "spatial gradient features on a mesh, forward and backward",
                 .n_meaning = "V, vertices of the mesh",
                 .n_gpu = 131072,
                 .n_cpu = 128,
                 .options = {{"--eigen", "E, coefficients of a feature: a multiple of 16", 128, 16},
                             {"--width", "W, features of a vertex: a multiple of 16", 256, 16}},
                 .flags = {{"--sweep", "instead of N: V = 1024, 2048, ... 1048576 (CPU: 2048)"}}});
  const int64_t E = lesson.option("--eigen"), W = lesson.option("--width");
  std::vector<int64_t> sizes = {lesson.n()};
  if (lesson.flag("--sweep")) {
    if (lesson.given("N")) fail(kBadUsage, "--sweep chooses V itself: leave N out");
    sizes.clear();
    const int64_t largest = lesson.on_cpu() ? 2048 : 1048576;
    for (int64_t V = 1024; V <= largest; V *= 2) sizes.push_back(V);
  }

  Cublas blas;
  std::deque<Forward> forwards;
  std::deque<Backward> backwards;
  double worst = 0;
  bool has_one_kernel = true, has_forward = true, has_backward = true, has_hopper = true;
  for (const int64_t V : sizes) {
    Forward& forward = forwards.emplace_back(lesson, blas, Shape{V, E, W});
    Backward& backward = backwards.emplace_back(lesson, blas, Shape{V, E, W});
    add_unfused(forward);
    add_two_kernels(forward);
    has_one_kernel = add_one_kernel(forward);
    has_forward = add_associated(forward);
    has_hopper = add_hopper(forward);
    add_unfused(backward);
    has_backward = add_associated(backward);
    add_hopper(backward);
    backward.report_difference = [&, last = V == sizes.back()](double difference) {
      worst = std::max(worst, difference);
      char text[128];
      snprintf(text, sizeof text,
               "The reference's gradients agree with finite differences to within %.0e.", worst);
      if (last) lesson.note(text);
    };
  }
  if (!has_one_kernel) {
    lesson.note("No \"one kernel\": 64 rows of xr and xi do not fit on chip for this width.");
  }
  if (!has_forward) {
    lesson.note("No \"associated\" forward: 32 columns of x, M1 and M2 do not fit on chip.");
  }
  if (!has_backward) {
    lesson.note(
        "No \"associated\" backward: its sums are in registers for up to 128 eigenvectors.");
  }
  if (!has_hopper) {
    lesson.note("No \"Hopper\": its blocks are made for up to 128 eigenvectors and 256 features.");
  }
  if (!lesson.flag("--sweep")) {
    Problem &forward = forwards.back().problem, &backward = backwards.back().problem;
    forward.compare("one kernel", "two kernels",
                    "Forward: one kernel instead of two: % times as fast.");
    forward.compare("associated", "one kernel",
                    "Forward: associated the other way: % times as fast.");
    forward.compare("Hopper", "unfused", "Forward: % times as fast as unfused.");
    backward.compare("Hopper", "unfused",
                     "Backward: % times as fast as unfused, and nothing saved.");
  }
  return lesson.run();
}
