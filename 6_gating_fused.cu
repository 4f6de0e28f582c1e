// 6. The gated layer in one kernel
//
//     out = sigmoid(x W1 + b1) * (x W2 + b2)
//     x (M, K), W1 and W2 (K, H), b1 and b2 (H), out (M, H): fp16, row-major; fp32 accumulation
//
// Of the bytes that lesson 5's six kernels moved, 4 of 5 were needless. For each row they moved 2 K
// + 11 H numbers. With K = 128 and H = 64 these are 960: 640 are temporaries, 128 are x, read a
// second time, and 192 are needed. A temporary exists because a kernel ends. So do not end: a block
// that has both products of its rows in registers adds the biases, takes the sigmoid, multiplies,
// and writes out. If one block has all H columns, x is read once. No temporary touches memory.
//
// What makes this possible is that everything after the products is elementwise: the element (i, j)
// of both sums, gate and value, ends up in the same thread, which needs no other. This lesson's
// kernels, below the row that they have to beat:
//
//     cuBLASLt + one kernel    lesson 5's best: one product with its biases, one kernel after it
//     one thread per element   fused, but with plain multiply-adds, no tensor cores and no tiles,
//                              and so slow
//     tensor cores             tiles in shared memory, products by WMMA
//     async tiles              the next tiles arrive (cp.async) while these are multiplied
//     resident weights         the weights fit on chip: blocks stay, keep them, and x streams by
//     warp specialization      the same with TMA and wgmma: one warpgroup copies, four compute
//     clusters                 lesson 3's product of a cluster, with two weights and the gate
//
// "resident weights" needs compute capability 8.0 (for its shared memory), the last two need 9.0,
// the others 7.5 (there copies are synchronous). The CPU backend runs all.
//
// Two tables: the layer, M = 1024 N rows of K = 128 channels to H = 64 hidden, limited by memory;
// and a square one, N x N x N, limited by tensor cores. The resident kernels are in the first, if K
// is at most 128. "clusters" is in the second, and in the first if K is larger. The two last
// rows need K and H to be multiples of 8: rows aligned to 16 bytes.

#include <deque>

#include "primitives/async_copy.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/launch.h"
#include "primitives/wmma_fragments.cuh"
#include "problems/gating/library.cuh"

using namespace problems;
using namespace operators::gating;
using namespace primitives;

// The helpers of primitives/ that the kernels of the core path call. (The last kernels have words
// of their own, which stand above them.)
//
//     copy_tile                         starts the copies of a tile to shared memory, by cp.async,
//                                       with zeros for what is outside of the matrix (lesson 3)
//     copy_async_commit(), _wait<n>()   closes what the thread has started as a group; waits for
//                                       all groups but the n newest
//     copies_ahead<stages>(copy)        starts the copies of the first steps; next() waits for a
//                                       step, and starts those of a later one (lesson 3's *stages*)
//     GatingOperands                    (operators/gating/gating.h) the pointers x, W1, b1, W2, b2
//                                       and out, and the sizes M, K and H
//     __grid_constant__                 says of an argument that nobody changes it: then no thread
//                                       gets a copy
//     pack2<half>(left, right)          two numbers, rounded to fp16, in one register
//     store_halves<aligned>(...)        stores 4 neighbours of a row, but not those outside of the
//                                       matrix
//     blocks_for(count, per_block)      (host) count / per_block, rounded up
//     allow_shared_bytes(kernel, n)     (host) lets blocks of the kernel have more than 48 KB of
//                                       shared memory

// 1 / (1 + e^-s), by the approximate exponential and division: they are wrong by some units in the
// last place of fp32, far less than the rounding to fp16 of the result.
__device__ float sigmoid(float s) { return __fdividef(1.0f, 1.0f + __expf(-s)); }

// ---- one thread per element ---------------------------------------------------------------------

// Thread (x, y) owns out(row y, column x), and both its sums: gate = x W1 + b1, value = x W2 + b2.
__global__ void gating_simple(const __grid_constant__ GatingOperands in) {
  // Rows are along the grid's x. The grid's y may be 65535 at most, and there are M / 8 blocks of
  // rows.
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  const int col = blockIdx.y * blockDim.x + threadIdx.x;
  if (row >= in.M || col >= in.H) return;
  float gate = __half2float(in.b1[col]), value = __half2float(in.b2[col]);
  for (int k = 0; k < in.K; ++k) {
    const float x = __half2float(in.x[static_cast<size_t>(row) * in.K + k]);
    gate += x * __half2float(in.W1[static_cast<size_t>(k) * in.H + col]);
    value += x * __half2float(in.W2[static_cast<size_t>(k) * in.H + col]);
  }
  in.out[static_cast<size_t>(row) * in.H + col] = __float2half_rn(sigmoid(gate) * value);
}

// ---- tensor cores -------------------------------------------------------------------------------

// Read the kernel first: it is gating_tensor_cores, at the end of this section. Its loop is that of
// lesson 3's *wmma shared*, with two right factors. GateTiles has the sizes and the copies,
// GateSums what a warp holds in registers.

// A block owns BM rows and BH columns of out. In a step, BK of k, it has a tile of x in shared
// memory, BM x BK, and a tile of each weight, BK x BH. It consists of kWarpsM x kWarpsH warps, each
// of which has 16 kRows x 16 kCols elements of out. main() chooses the sizes. On a GPU with enough
// shared memory they are, with rows aligned to 16 bytes:
//
//                         BM    BH    BK   warps   kRows   kCols   stages
//     tensor cores        64    64    32   2 x 2     2       2     1
//     async tiles        128    64    64   2 x 2     4       2     2
//     resident weights    64    64   128   2 x 2     2       2     3, of x alone
//
// For *tensor cores*, for example, kStrideX is 40, kStrideW 72, and kStageBytes 14336.
template <int kBlockRows, int kBlockCols, int kDepth, int kWarpsM, int kWarpsH, bool kAligned_>
struct GateTiles {
  static constexpr int BM = kBlockRows, BH = kBlockCols, BK = kDepth;
  static constexpr bool kAligned = kAligned_;  // K and H are multiples of 8
  static constexpr int kWarps = kWarpsM * kWarpsH, kThreads = 32 * kWarps;
  static constexpr int kRows = BM / kWarpsM / 16, kCols = BH / kWarpsH / 16;
  // In shared memory rows are longer than their data, so that they start in different banks: by 8
  // numbers of fp16, or by 4 or 8 of fp32.
  static constexpr int kStrideX = BK + 8, kStrideW = BH + 8, kStrideBias = BH + 4;
  static constexpr int kStrideStaging = 16 * kCols + 8;
  // A tile of x has kTileX numbers, and a tile of one weight has kTileW, in fp16. A stage is a tile
  // of x and one of each weight.
  static constexpr int kTileX = BM * kStrideX, kTileW = BK * kStrideW;
  static constexpr int kStageBytes = 2 * (kTileX + 2 * kTileW);
  // One bias takes kBiases numbers in fp32, since its row is there 16 times (load_biases says why).
  // Each warp has a staging, kStaging numbers in fp32: the shared memory through which its results
  // go, 16 rows at a time.
  static constexpr int kBiases = 16 * kStrideBias, kStaging = 16 * kStrideStaging;
  // Both biases, and the stagings of all warps.
  static constexpr int kBiasBytes = 4 * 2 * kBiases, kStagingBytes = 4 * kWarps * kStaging;

  // The first row and column of this thread's warp in the block's tile of out.
  __device__ static int row() { return threadIdx.x / 32 / kWarpsH * 16 * kRows; }
  __device__ static int col() { return threadIdx.x / 32 % kWarpsH * 16 * kCols; }

  __device__ static void load_x(half* to, const GatingOperands& in, int row0, int k0) {
    copy_tile<BM, BK, kStrideX, kThreads, kAligned>(to, in.x, row0, k0, in.M, in.K);
  }
  // The tile of W1, and behind it that of W2.
  __device__ static void load_weights(half* to, const GatingOperands& in, int k0, int col0) {
    copy_tile<BK, BH, kStrideW, kThreads, kAligned>(to, in.W1, k0, col0, in.K, in.H);
    copy_tile<BK, BH, kStrideW, kThreads, kAligned>(to + kTileW, in.W2, k0, col0, in.K, in.H);
  }
  // The sums start at the biases, so WMMA loads them as sums. It can only load whole matrices of 16
  // x 16. So the row of b1 is repeated 16 times, and behind it that of b2. Beyond H the last bias
  // repeats.
  __device__ static void load_biases(float* to, const GatingOperands& in, int col0) {
    for (int i = threadIdx.x; i < 16 * BH; i += kThreads) {
      const int at = i / BH * kStrideBias + i % BH, col = min(col0 + i % BH, in.H - 1);
      to[at] = __half2float(in.b1[col]);
      to[kBiases + at] = __half2float(in.b2[col]);
    }
  }
};

// What a warp holds of its tile of out: the two sums of each element, x W1 + b1 and x W2 + b2.
template <class Tiles>
struct GateSums {
  static constexpr int kRows = Tiles::kRows, kCols = Tiles::kCols;
  FragmentSum gate[kRows][kCols], value[kRows][kCols];

  // Loads the biases.
  __device__ explicit GateSums(const float* biases) {
    constexpr int kStride = Tiles::kStrideBias;
    const float *bias1 = biases + Tiles::col(), *bias2 = bias1 + Tiles::kBiases;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        wmma::load_matrix_sync(gate[i][j], bias1 + 16 * j, kStride, wmma::mem_row_major);
        wmma::load_matrix_sync(value[i][j], bias2 + 16 * j, kStride, wmma::mem_row_major);
      }
    }
  }

  // Adds the products of a tile of x with tiles of both weights. What is loaded of x serves both.
  __device__ void add_products(const half* x_tile, const half* W_tiles) {
    constexpr int kStrideX = Tiles::kStrideX, kStrideW = Tiles::kStrideW;
    x_tile += Tiles::row() * kStrideX;
    const half *W1_tile = W_tiles + Tiles::col(), *W2_tile = W1_tile + Tiles::kTileW;
#pragma unroll
    for (int k = 0; k < Tiles::BK; k += 16) {
      FragmentA x[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        wmma::load_matrix_sync(x[i], x_tile + 16 * i * kStrideX + k, kStrideX);
      }
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        FragmentB w1, w2;
        wmma::load_matrix_sync(w1, W1_tile + k * kStrideW + 16 * j, kStrideW);
        wmma::load_matrix_sync(w2, W2_tile + k * kStrideW + 16 * j, kStrideW);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          wmma::mma_sync(gate[i][j], x[i], w1, gate[i][j]);
          wmma::mma_sync(value[i][j], x[i], w2, value[i][j]);
        }
      }
    }
  }

  // Computes out = sigmoid(gate) * value, and stores it, for the block's tile at (row0, col0).
  // Fragments of one type hold the same element of their matrices at the same index. So gate and
  // value combine without knowing which element that is. The store has to know it. So 16 rows at a
  // time go to the warp's staging, and from there a thread takes 4 neighbours of a row. Then 4
  // threads fill a sector of 32 bytes of out.
  __device__ void finish(float* stagings, const GatingOperands& in, int row0, int col0) {
    constexpr int kWidth = 16 * kCols, kStride = Tiles::kStrideStaging;
    float* staging = stagings + threadIdx.x / 32 * Tiles::kStaging;
    row0 += Tiles::row(), col0 += Tiles::col();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        for (int e = 0; e < gate[i][j].num_elements; ++e) {
          gate[i][j].x[e] = sigmoid(gate[i][j].x[e]) * value[i][j].x[e];
        }
        wmma::store_matrix_sync(staging + 16 * j, gate[i][j], kStride, wmma::mem_row_major);
      }
      __syncwarp();
#pragma unroll
      for (int e = threadIdx.x % 32 * 4; e < 16 * kWidth; e += 32 * 4) {
        const float4 from =
            *reinterpret_cast<const float4*>(staging + e / kWidth * kStride + e % kWidth);
        store_halves<Tiles::kAligned>(
            in.out, row0 + 16 * i + e / kWidth, col0 + e % kWidth, in.M, in.H,
            make_uint2(pack2<half>(from.x, from.y), pack2<half>(from.z, from.w)));
      }
      __syncwarp();
    }
  }
};

// A block keeps both sums of its elements of out in registers. They start at the biases. In each
// step the block loads a tile of x, once for both weights, and adds the products with both. After
// the last step comes the epilogue, which is what is done with the sums while they are in
// registers: here the sigmoid, and the multiplication by it. The first thing to be written to
// memory is out.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads)
    gating_tensor_cores(const __grid_constant__ GatingOperands in) {
  __shared__ __align__(128) half x_tile[Tiles::kTileX];
  __shared__ __align__(128) half W_tiles[2 * Tiles::kTileW];
  __shared__ __align__(128) float biases[2 * Tiles::kBiases];
  __shared__ __align__(128) float stagings[Tiles::kWarps * Tiles::kStaging];
  const int row0 = blockIdx.x * Tiles::BM, col0 = blockIdx.y * Tiles::BH;

  Tiles::load_biases(biases, in, col0);
  __syncthreads();
  GateSums<Tiles> sums(biases);
  for (int k0 = 0; k0 < in.K; k0 += Tiles::BK) {
    Tiles::load_x(x_tile, in, row0, k0);
    Tiles::load_weights(W_tiles, in, k0, col0);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    sums.add_products(x_tile, W_tiles);
    __syncthreads();
  }
  sums.finish(stagings, in, row0, col0);
}

// ---- async tiles --------------------------------------------------------------------------------

// The same, but with kStages stages in shared memory, as in lesson 2's *async*. A stage has room
// for the tiles of one step, of x and of both weights. The tensor cores work on one stage while the
// copies for the others are on their way, and a step needs one barrier, not two. (Here kStages is
// 2: that is double buffering.) When all products are done, nobody needs the tiles any more, and
// the stagings take their place.
//
// Tiles are larger, too: they have 128 rows, not 64. They have 64 of k, not 32, if K and H are
// multiples of 8 and a block may have 96 KB of shared memory. So not all that is gained comes from
// the copies. (If K or H is no multiple of 8, copy_tile() copies element by element, and waits.)
template <class Tiles, int kStages>
constexpr int kAsyncBytes = Tiles::kBiasBytes +
                            std::max(kStages* Tiles::kStageBytes, Tiles::kStagingBytes);

template <class Tiles, int kStages>
__global__ void __launch_bounds__(Tiles::kThreads)
    gating_async(const __grid_constant__ GatingOperands in) {
  extern __shared__ __align__(128) char shared[];
  float* biases = reinterpret_cast<float*>(shared);
  half* stages = reinterpret_cast<half*>(biases + 2 * Tiles::kBiases);
  const int row0 = blockIdx.x * Tiles::BM, col0 = blockIdx.y * Tiles::BH;
  const int steps = (in.K + Tiles::BK - 1) / Tiles::BK;
  const auto stage_of = [&](int step) { return stages + step % kStages * Tiles::kStageBytes / 2; };
  const auto load_step = [&](int step) {
    half* x_tile = stage_of(step);
    if (step < steps) {
      Tiles::load_x(x_tile, in, row0, step * Tiles::BK);
      Tiles::load_weights(x_tile + Tiles::kTileX, in, step * Tiles::BK, col0);
    }
  };

  auto ahead = copies_ahead<kStages>(load_step);
  Tiles::load_biases(biases, in, col0);
  __syncthreads();
  GateSums<Tiles> sums(biases);
  for (int step = 0; step < steps; ++step) {
    const half* x_tile = stage_of(ahead.next());
    sums.add_products(x_tile, x_tile + Tiles::kTileX);
  }
  __syncthreads();
  sums.finish(reinterpret_cast<float*>(stages), in, row0, col0);
}

// ---- resident weights ---------------------------------------------------------------------------

// The layer's weights are 32 KB: they fit into shared memory, next to several tiles of x. So there
// are only as many blocks as fit on the GPU at once, and they stay until the end. Each block loads
// its BH columns of the weights and biases once. Then it takes one tile of x after the other, each
// of BM rows and all K columns: tiles number blockIdx.x, blockIdx.x + gridDim.x and so on. So a
// step is a whole tile of x here. While the block multiplies one tile and writes its results, the
// next ones arrive.
//
// K is at most BK. If it is less, the copies fill the tiles up with zeros.
template <class Tiles, int kStages>
constexpr int kResidentBytes = Tiles::kBiasBytes + Tiles::kStagingBytes + Tiles::kStageBytes +
                               (kStages - 1) * Tiles::kTileX * 2;

template <class Tiles, int kStages>
__global__ void __launch_bounds__(Tiles::kThreads) gating_resident(GatingOperands in) {
  extern __shared__ __align__(128) char shared[];
  float* biases = reinterpret_cast<float*>(shared);
  float* stagings = biases + 2 * Tiles::kBiases;
  half* W_tiles = reinterpret_cast<half*>(stagings + Tiles::kWarps * Tiles::kStaging);
  half* x_tiles = W_tiles + 2 * Tiles::kTileW;
  const int col0 = blockIdx.y * Tiles::BH, tiles = (in.M + Tiles::BM - 1) / Tiles::BM;
  const auto stage_of = [&](int step) { return x_tiles + step % kStages * Tiles::kTileX; };
  const auto load_step = [&](int step) {
    const int64_t tile = blockIdx.x + static_cast<int64_t>(step) * gridDim.x;
    if (tile < tiles) {
      Tiles::load_x(stage_of(step), in, static_cast<int>(tile) * Tiles::BM, 0);
    }
  };

  // The copies of the weights are closed as a group together with those of the first tile, so that
  // the first ahead.next() waits for both. Its barrier is also the one that the biases need.
  Tiles::load_weights(W_tiles, in, 0, col0);
  auto ahead = copies_ahead<kStages>(load_step);
  Tiles::load_biases(biases, in, col0);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const half* x_tile = stage_of(ahead.next());
    GateSums<Tiles> sums(biases);
    sums.add_products(x_tile, W_tiles);
    sums.finish(stagings, in, tile * Tiles::BM, col0);
  }
}

// ---- warp specialization ------------------------------------------------------------------------

// The last kernels are made of what lesson 3's kernels for Hopper introduce. There these words are
// explained: above *one warpgroup* Box, LeftTile, RightTile and Sum, in it the copy engine (TMA),
// mbarrier and wgmma, and in *tile scheduler* Pipeline, Writer, Reader and BlockGrid. These are
// new:
//   - bulk_load(to, from, bytes, barrier) copies bytes that lie one after the other. It needs no
//     tensor map.
//   - reader.wait() waits until the reader's stage is full, and returns it. reader.give_back() says
//     that this stage is empty: all 128 threads of a consumer call it, and one of them arrives.
//     reader.next(n) goes on by n stages.
//   - sum.store(box, first, f) writes 64 columns of the sum, from column `first` on, into a box:
//     f(i), rounded to fp16, in the place of element i.
//   - exp2_approximate(s) is 2^s, and reciprocal_approximate(s) is 1 / s, one instruction each.

#if HOPPER_CODE
// sigmoid(gate) * value in 5 instructions. The two that approximate, ex2 and rcp, are wrong by 2
// units in the last place of fp32 at most. Where their result would be denormal, they give 0.
__device__ inline float gated(float gate, float value) {
  return value * reciprocal_approximate(1 + exp2_approximate(-1.44269504f * gate));
}
#endif

// A Gate holds in registers those biases of 64 columns of out that this thread needs. Which are
// they? In a Sum the elements 4 p to 4 p + 3 of a thread are in two neighbouring columns: two of
// them in one row, and two in the row 8 rows below. For example, elements 0 and 1 of thread 0 are
// in row 0 and the columns 0 and 1, elements 2 and 3 in row 8 and the same columns. So these four
// elements need one pair of biases, pair p. The next four are 8 columns further on, so that 64
// columns are eight pairs.
//
// `cols` is how many columns there are from the first one to the end of out. If these are less than
// 64, the pairs beyond the end get the last two biases, and their results are never stored. (`cols`
// is even, so no pair is half outside. In *clusters* the whole 64 may lie beyond the end: then
// `cols` is 0 or negative.)
struct Gate {
#if HOPPER_CODE
  half2 b1[8], b2[8];

  __device__ Gate(const half* bias1, const half* bias2, int cols) {
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
      const int col = min(Sum<64>::col(4 * pair), cols - 2);
      b1[pair] = *reinterpret_cast<const half2*>(bias1 + col);
      b2[pair] = *reinterpret_cast<const half2*>(bias2 + col);
    }
  }

  // Puts 64 columns of results into a box. The left half of the columns of `sum` are gates, the
  // right half are values. If elements[i] is the gate of a result, elements[kCols / 4 + i], in the
  // same thread, is its value. `first` says which 64 gates: those of the columns from `first` on, a
  // multiple of 64. They are the thread's elements first / 2 to first / 2 + 31, since it has 32
  // elements of every 64 columns. Element i needs the biases of pair i % 32 / 4.
  template <int kCols>
  __device__ void store(const Sum<kCols>& sum, int first, Box<half, 64>& box) const {
    sum.store(box, first, [&](int i) {
      const float2 gate_bias = __half22float2(b1[i % 32 / 4]);
      const float2 value_bias = __half22float2(b2[i % 32 / 4]);
      const float gate = sum.elements[i] + (i % 2 == 0 ? gate_bias.x : gate_bias.y);
      const float value = sum.elements[kCols / 4 + i] + (i % 2 == 0 ? value_bias.x : value_bias.y);
      return gated(gate, value);
    });
  }
#endif
};

// The weights stay, as in *resident weights*. There a block does one thing after the other:
// products, sigmoids, stores. Here its warps have different tasks (lesson 3's *warp
// specialization*). One warpgroup is the producer, and one thread of it does nothing but start
// copies. Four warpgroups are consumers, each at a point of its own: while one waits for its
// products, another computes sigmoids, and a third waits for its tile.
//
// A block's 64 columns of W1, and the same columns of W2, stay in shared memory next to each other,
// as one right factor of 128 columns. So one wgmma gives both sums: gates in the left half of a
// thread's registers, values in the right half.
//
// A tile is 64 rows of x, K columns wide. The block takes tiles blockIdx.x, blockIdx.x + gridDim.x
// and so on, and its consumers take these in turn. For example, with 132 blocks block 5 has the
// tiles 5, 137, 269, 401, 533 and so on. Consumers 0 to 3 take the first four of them, and consumer
// 0 takes tile 533. The tiles go through one pipeline, whose number of stages is a multiple of
// four. So a stage always belongs to the same consumer, which alone gives it back. K is at most 64
// kSteps. Where a box reaches beyond its matrix, the copy engine loads zeros from there, and stores
// nothing there.
struct ResidentShared {
  static constexpr int kConsumers = 4, kStages = 8, kSteps = 2;
  static constexpr int kMaxChannels = kSteps * kStepK;
  static_assert(kStages % kConsumers == 0);
  struct Stage {
    LeftTile<half, 64> x[kSteps];
  };
  RightTile<half, 128> W[kSteps];  // box 0: of W1; box 1: of W2
  Box<half, 64> out[kConsumers];
  Pipeline<Stage, kStages> pipeline;
  alignas(16) half b1[64], b2[64];
  Barrier weights;  // W, b1 and b2 have come
};

constexpr int kResidentThreads = 128 * (1 + ResidentShared::kConsumers);

__global__ void __launch_bounds__(kResidentThreads, 1)
    gating_hopper_resident(const __grid_constant__ CUtensorMap x,
                           const __grid_constant__ CUtensorMap W1,
                           const __grid_constant__ CUtensorMap W2,
                           const __grid_constant__ CUtensorMap out,
                           const __grid_constant__ GatingOperands in) {
#if HOPPER_CODE
  using Shared = ResidentShared;
  constexpr int kConsumers = Shared::kConsumers;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const BlockGrid<1, 1> alone;
  const int tiles = (in.M + 63) / 64, steps = (in.K + kStepK - 1) / kStepK;
  const int col0 = 64 * blockIdx.y, cols = min(64, in.H - col0), blocks = gridDim.x;
  if (threadIdx.x == 0) {
    barrier_init(&shared.weights, 1);
    prepare(shared.pipeline, 1);  // one consumer gives a stage back
  }
  alone.meet();

  const int warp = warp_of_block();
  if (warp < 4) {
    registers_shrink_to<24>();
    if (warp == 0 && elect_one()) {
      const int bias_bytes = cols * sizeof(half);  // a multiple of 16
      barrier_arrive_expect(&shared.weights, steps * sizeof shared.W[0] + 2 * bias_bytes);
      bulk_load(shared.b1, in.b1 + col0, bias_bytes, &shared.weights);
      bulk_load(shared.b2, in.b2 + col0, bias_bytes, &shared.weights);
      for (int step = 0; step < steps; ++step) {
        Box<half, 64>* boxes = shared.W[step].boxes;
        tensor_load(boxes[0].elements, &W1, step * kStepK, col0, &shared.weights);
        tensor_load(boxes[1].elements, &W2, step * kStepK, col0, &shared.weights);
      }
      Writer writer(shared.pipeline);
      for (int tile = blockIdx.x; tile < tiles; tile += blocks) {
        // A stage has room for the largest K. Only `steps` of its tiles come, so the number of
        // bytes that the barrier has to wait for is said here.
        writer.put(steps * sizeof(LeftTile<half, 64>), [&](Shared::Stage& stage, Barrier* arrived) {
          for (int step = 0; step < steps; ++step) {
            tensor_load(stage.x[step].elements, &x, 64 * tile, step * kStepK, arrived);
          }
        });
      }
    }
  } else {
    // Five warpgroups start with 96 registers a thread. The producer keeps 24, so that each of the
    // four consumers can have 112: 24 + 4 x 112 is not more than 5 x 96.
    registers_grow_to<112>();
    const int consumer = warp / 4 - 1, warp_row = 16 * (warp % 4);
    Box<half, 64>& results = shared.out[consumer];
    // Consumers take tiles in turn. Consumer c begins with stage c. After each of its tiles it
    // advances by four stages: its own and those of the three others.
    Reader reader(shared.pipeline, alone);
    reader.next(consumer);
    barrier_wait(&shared.weights, 0);
    const Gate gate(shared.b1, shared.b2, cols);
    for (int tile = blockIdx.x + consumer * blocks; tile < tiles; tile += kConsumers * blocks) {
      Sum<128> sum;
      const Shared::Stage& stage = reader.wait();
      for (int step = 0; step < steps; ++step) {
        sum.start_product(stage.x[step].rows(0), shared.W[step], step > 0);
      }
      wgmma_wait<0>();
      reader.give_back();
      reader.next(kConsumers);

      // Each warp has 16 rows of the tile, and stores them without waiting for the other warps.
      if (elect_one()) tensor_store_wait_read<0>();  // the 16 rows before have left
      __syncwarp();
      gate.store(sum, 0, results);
      shared_fence();
      __syncwarp();
      if (elect_one()) {
        tensor_store(&out, 64 * tile + warp_row, col0, results.row(warp_row));
        tensor_store_commit();
      }
    }
    if (elect_one()) tensor_store_wait_read<0>();
  }
#endif
}

// ---- clusters -----------------------------------------------------------------------------------

// Lesson 3's *rasterization* with two weights and another epilogue. As there, two blocks are a
// cluster: they run at the same time, and one copy can arrive in the shared memory of both. Their
// tiles of out, 128 x 128 each, lie one below the other. So each block has rows of x of its own,
// and both need the same columns of the weights. K and H are multiples of 8. Two things are new:
//
//   - The right factor is W1 and W2 side by side: 128 columns of W1, and the same 128 columns of
//     W2. These are four boxes of 64 columns. Each block copies two of them, for both blocks:
//
//         | W1: boxes 0 and 1        | W2: boxes 2 and 3        |
//         | block 0 copies them      | block 1 copies them      |
//
//     So a consumer's sum of 64 x 256 is two sums of 64 x 128, and one thread has both the gate and
//     the value of an element.
//   - What is stored is the gated result. It has half as many columns as the sum, so each consumer
//     stores 64 x 128 numbers, in two boxes. That leaves room for four stages.
//
// (Lesson 3's Pace is left out.)
struct ClusterShared {
  static constexpr int BM = 128, BH = 128, kStages = 4;  // of out; twice as many columns of the sum
  struct Stage {
    LeftTile<half, BM> x;
    RightTile<half, 2 * BH> W;  // boxes 0 and 1: of W1; boxes 2 and 3: of W2
  };
  Box<half, 64> out[2][BH / 64];  // of two consumers
  Pipeline<Stage, kStages> pipeline;
};

constexpr int kClusterThreads = 384;

__global__ void HOPPER_CLUSTER(2) __launch_bounds__(kClusterThreads, 1)
    gating_hopper_cluster(const __grid_constant__ CUtensorMap x,
                          const __grid_constant__ CUtensorMap W1,
                          const __grid_constant__ CUtensorMap W2,
                          const __grid_constant__ CUtensorMap out,
                          const __grid_constant__ GatingOperands in) {
#if HOPPER_CODE
  using Shared = ClusterShared;
  constexpr int BM = Shared::BM, BH = Shared::BH, kGroup = 8;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const BlockGrid<2, 1> cluster;
  const int steps = (in.K + kStepK - 1) / kStepK;
  // A tile of a cluster has 2 BM rows and BH columns of out. As in *rasterization*, tiles are taken
  // in groups of kGroup rows of tiles, within a group column by column, and every second group from
  // the right to the left. Every second tile of a cluster goes backward along k. place() returns
  // where this block's part of a tile begins in out: y is its first row, x its first column.
  const int tile_rows = (in.M + 2 * BM - 1) / (2 * BM), tile_cols = (in.H + BH - 1) / BH;
  const int tiles = tile_rows * tile_cols, clusters = cluster.clusters;
  const auto place = [&](int tile) {
    const int group = tile / (kGroup * tile_cols), within = tile % (kGroup * tile_cols);
    const int rows = min(kGroup, tile_rows - group * kGroup), column = within / rows;
    return int2{(group % 2 == 0 ? column : tile_cols - 1 - column) * BH,
                (2 * (group * kGroup + within % rows) + cluster.rank) * BM};
  };
  if (threadIdx.x == 0) prepare(shared.pipeline, 4);  // two consumers in each of two blocks
  cluster.meet();

  const int warp = warp_of_block();
  if (warp < 4) {
    registers_shrink_to<24>();
    if (warp == 0 && elect_one()) {
      Writer writer(shared.pipeline);
      bool backward = false;
      for (int tile = cluster.cluster; tile < tiles; tile += clusters, backward = !backward) {
        const int2 at = place(tile);
        const auto weights = [&](int box) {  // where each box of the right factor comes from
          return BoxSource{box < BH / 64 ? &W1 : &W2, at.x + box % (BH / 64) * 64};
        };
        for (int step = 0; step < steps; ++step) {
          const int k = (backward ? steps - 1 - step : step) * kStepK;
          writer.put([&](Shared::Stage& stage, Barrier* arrived) {
            cluster.load(stage.x, &x, at.y, k, arrived);
            cluster.load(stage.W, weights, k, arrived);
          });
        }
      }
      writer.finish();
    }
  } else {
    registers_grow_to<240>();
    const int consumer = warp / 4 - 1;
    auto& boxes = shared.out[consumer];
    Reader reader(shared.pipeline, cluster);
    for (int tile = cluster.cluster; tile < tiles; tile += clusters) {
      Sum<2 * BH> sum;
      for (int step = 0; step < steps; ++step) {
        reader.take([&](const Shared::Stage& stage, bool add) {
          sum.start_product(stage.x.rows(64 * consumer), stage.W, add);
        });
      }
      // While the last products are computed, one thread waits until the copy engine has read the
      // boxes of the tile before.
      if (warp % 4 == 0 && elect_one()) tensor_store_wait_read<0>();
      named_barrier(1 + consumer, 128);
      reader.finish();
      const int2 at = place(tile);
#pragma unroll
      for (int box = 0; box < BH / 64; ++box) {
        const int col = at.x + 64 * box;
        Gate(in.b1 + col, in.b2 + col, in.H - col).store(sum, 64 * box, boxes[box]);
      }
      shared_fence();
      named_barrier(1 + consumer, 128);
      if (warp % 4 == 0 && elect_one()) {
        for (int box = 0; box < BH / 64; ++box) {
          tensor_store(&out, at.y + 64 * consumer, at.x + 64 * box, boxes[box].elements);
        }
        tensor_store_commit();
      }
    }
    if (warp % 4 == 0 && elect_one()) tensor_store_wait_read<0>();
  }
#endif
}

// -------------------------------------------------------------------------------------------------

// Adds the kernels that can compute every shape. The caller has chosen Tiles and kStages so that
// this number of stages fits into the device's shared memory.
template <class Tiles, int kStages>
void add_kernels(GatingProblem& table) {
  const int64_t M = table.shape.rows, H = table.shape.hidden;
  const dim3 elements(blocks_for(M, 8), blocks_for(H, 32));
  const auto simple = [=, &table] { gating_simple<<<elements, dim3(32, 8)>>>(table.operands()); };
  table.problem.kernel("one thread per element", Role::baseline, simple);

  using Small = GateTiles<64, 64, 32, 2, 2, Tiles::kAligned>;
  const dim3 small_tiles(blocks_for(M, Small::BM), blocks_for(H, Small::BH));
  const auto tensor_cores = [=, &table] {
    gating_tensor_cores<Small><<<small_tiles, Small::kThreads>>>(table.operands());
  };
  table.problem.kernel("tensor cores", Role::ours, tensor_cores);

  constexpr int kBytes = kAsyncBytes<Tiles, kStages>;
  const auto kernel = gating_async<Tiles, kStages>;
  allow_shared_bytes(kernel, kBytes);
  const dim3 tiles(blocks_for(M, Tiles::BM), blocks_for(H, Tiles::BH));
  const auto async = [=, &table] {
    gating_async<Tiles, kStages><<<tiles, Tiles::kThreads, kBytes>>>(table.operands());
  };
  table.problem.kernel("async tiles", Role::ours, async).needs_shared(kBytes);
}

// Adds the kernel for weights that fit into shared memory: K at most Tiles::BK.
template <class Tiles, int kStages>
void add_resident_kernel(GatingProblem& table, const Device& device) {
  constexpr int kBytes = kResidentBytes<Tiles, kStages>;
  if (kBytes > device.shared_bytes) {
    if constexpr (kStages > 2) add_resident_kernel<Tiles, kStages - 1>(table, device);
    return;
  }
  const auto kernel = gating_resident<Tiles, kStages>;
  allow_shared_bytes(kernel, kBytes);
  int per_sm = 0;
  CUDA_CHECK(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, Tiles::kThreads, kBytes));
  const unsigned columns = blocks_for(table.shape.hidden, Tiles::BH);
  const unsigned fit = std::max(1u, static_cast<unsigned>(per_sm * device.sms) / columns);
  const dim3 grid(std::min(blocks_for(table.shape.rows, Tiles::BM), fit), columns);
  const auto launch = [=, &table] {
    gating_resident<Tiles, kStages><<<grid, Tiles::kThreads, kBytes>>>(table.operands());
  };
  table.problem.kernel("resident weights", Role::ours, launch).needs_shared(kBytes);
}

// A matrix for the copy engine, in boxes of `box_rows` rows.
CUtensorMap map_of(const half* matrix, int64_t rows, int64_t cols, unsigned box_rows, Reads reads) {
  return tensor_map<half>(matrix, rows, cols, box_rows, false, cols, reads);
}

// Adds "warp specialization": K and H are multiples of 8, and K is at most kMaxChannels.
void add_hopper_resident(GatingProblem& table, const Device& device) {
  constexpr int kBytes = sizeof(ResidentShared);
  allow_shared_bytes(gating_hopper_resident, kBytes);
  const int64_t M = table.shape.rows, K = table.shape.channels, H = table.shape.hidden;
  const unsigned columns = blocks_for(H, 64);
  const unsigned fit = std::max(1u, static_cast<unsigned>(device.sms) / columns);
  const dim3 grid(std::min(blocks_for(M, 64), fit), columns);
  const auto launch = [=, &table] {
    const CUtensorMap x = map_of(table.x, M, K, 64, Reads::once);
    const CUtensorMap W1 = map_of(table.W1, K, H, kStepK, Reads::often);
    const CUtensorMap W2 = map_of(table.W2, K, H, kStepK, Reads::often);
    const CUtensorMap out = map_of(table.out, M, H, 16, Reads::once);
    gating_hopper_resident<<<grid, kResidentThreads, kBytes>>>(x, W1, W2, out, table.operands());
  };
  table.problem.kernel("warp specialization", Role::ours, launch)
      .needs_shared(kBytes)
      .hopper_only();
}

// Adds "clusters": K and H are multiples of 8.
void add_hopper_cluster(GatingProblem& table) {
  using Shared = ClusterShared;
  constexpr int kBytes = sizeof(Shared);
  allow_shared_bytes(gating_hopper_cluster, kBytes);
  const int64_t M = table.shape.rows, K = table.shape.channels, H = table.shape.hidden;
  const int64_t tiles = int64_t{blocks_for(M, 2 * Shared::BM)} * blocks_for(H, Shared::BH);
  const unsigned clusters =
      persistent(tiles, resident_clusters(gating_hopper_cluster, 2, kClusterThreads, kBytes));
  const auto launch = [=, &table] {
    const CUtensorMap x = map_of(table.x, M, K, Shared::BM, Reads::often);
    const CUtensorMap W1 = map_of(table.W1, K, H, kStepK, Reads::often);
    const CUtensorMap W2 = map_of(table.W2, K, H, kStepK, Reads::often);
    const CUtensorMap out = map_of(table.out, M, H, 64, Reads::once);
    gating_hopper_cluster<<<2 * clusters, kClusterThreads, kBytes>>>(x, W1, W2, out,
                                                                     table.operands());
  };
  table.problem.kernel("clusters", Role::ours, launch).needs_shared(kBytes).hopper_only();
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "6_gating_fused",
                 .title = "sigmoid(x W1 + b1) * (x W2 + b2) in one kernel",
                 .n_meaning = "M = 1024 N rows for the layer, N x N x N for the square",
                 .n_gpu = 4096,
                 .n_cpu = 136,
                 .options = {{.name = "--channels",
                              .meaning = "K, columns of x in the layer",
                              .value = 128,
                              .cpu = 80},
                             {"--hidden", "H, columns of the layer's result", 64}},
                 .flags = {{"--hard-gates", "gates up to 200, of which exp() is infinite"}}});
  const int64_t n = lesson.n();
  const bool large = lesson.device().shared_bytes >= 96 << 10;  // compute capability 7.5 has 64 KB

  Cublas blas;
  GatingProblem layer(lesson, blas, "layer",
                      {layer_rows(lesson), lesson.option("--channels"), lesson.option("--hidden")},
                      1, lesson.flag("--hard-gates"));
  GatingProblem square(lesson, blas, "square", {n, n, n}, 1);
  std::deque<LibraryGate> libraries;
  for (GatingProblem* table : {&layer, &square}) {
    libraries.emplace_back(*table).add();
    if (!table->shape.aligned()) {
      add_kernels<GateTiles<128, 64, 32, 4, 2, false>, 2>(*table);
    } else if (large) {
      add_kernels<GateTiles<128, 64, 64, 2, 2, true>, 2>(*table);
    } else {
      add_kernels<GateTiles<128, 64, 32, 4, 2, true>, 2>(*table);
    }
  }
  const int64_t K = layer.shape.channels;
  if (K <= 128) {
    const auto add = layer.shape.aligned()
                         ? add_resident_kernel<GateTiles<64, 64, 128, 2, 2, true>, 3>
                         : add_resident_kernel<GateTiles<64, 64, 128, 2, 2, false>, 3>;
    add(layer, lesson.device());
  }
  if (layer.shape.aligned()) {
    K <= ResidentShared::kMaxChannels ? add_hopper_resident(layer, lesson.device())
                                      : add_hopper_cluster(layer);
  }
  if (square.shape.aligned()) add_hopper_cluster(square);

  layer.problem.compare("resident weights", "cuBLASLt + one kernel",
                        "Layer, beside the library: resident weights, % times as fast.");
  layer.problem.compare("warp specialization", "cuBLASLt + one kernel",
                        "Layer, beside the library: with TMA and wgmma, % times as fast.");
  square.problem.compare(
      "clusters", "cuBLASLt + one kernel",
      "Square, beside the library: lesson 3's product and gate, % times as fast.");
  return lesson.run();
}
