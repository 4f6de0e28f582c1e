// 6. The gated layer in one kernel
//
//     out = sigmoid(x W1 + b1) * (x W2 + b2)
//     x (M, K), W1 and W2 (K, H), b1 and b2 (H), out (M, H): fp16, row-major; fp32 accumulation
//
// Of the bytes that lesson 5's six kernels moved, 4 of 5 were needless: two thirds were
// temporaries, and x was read twice. A temporary exists because a kernel ends. So do not end: a
// block that has both products of its rows in registers adds the biases, takes the sigmoid,
// multiplies, and writes out. x is read once and out written once; no temporary touches memory.
//
// What makes this possible is that everything after the products is elementwise: the element (i, j)
// of both sums ends up in the same thread, which needs no other. Six kernels:
//
//     one thread per element   fused, but on the CUDA cores and without tiles: not fast for that
//     tensor cores             tiles in shared memory, products by WMMA
//     async tiles              the next tiles arrive (cp.async) while these are multiplied
//     resident weights         the weights fit on chip: blocks stay, keep them, and x streams by
//     Hopper resident          the same with TMA and wgmma, in warpgroups that specialize
//     Hopper cluster           lesson 3's last product, with two weights and the gate after it
//
// The first four need compute capability 7.5 (which copies synchronously), the last two 9.0. The
// CPU backend runs all.
//
// Two tables: the layer, M = 1024 N rows of K = 128 channels to H = 64 hidden, limited by memory;
// and a square one, N x N x N, limited by tensor cores. The resident kernels are only in the first.

#include "common/async_copy.cuh"
#include "common/gating.h"
#include "common/product_plan.cuh"
#include "common/wmma_fragments.cuh"

// 1 / (1 + e^-s), by the approximate exponential and division: both within 2 units in the last
// place of fp32 here, and the result is rounded to fp16.
__device__ float sigmoid(float s) { return __fdividef(1.0f, 1.0f + __expf(-s)); }

// ---- one thread per element ---------------------------------------------------------------------

// Lesson 1's coalesced mapping: thread (x, y) owns out(row y, column x), and both its sums.
__global__ void gating_simple(const half* x, const half* W1, const half* b1, const half* W2,
                              const half* b2, half* out, int M, int K, int H) {
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  const int col = blockIdx.y * blockDim.x + threadIdx.x;
  if (row >= M || col >= H) return;
  float gate = __half2float(b1[col]), value = __half2float(b2[col]);
  for (int k = 0; k < K; ++k) {
    const float factor = __half2float(x[static_cast<size_t>(row) * K + k]);
    gate += factor * __half2float(W1[static_cast<size_t>(k) * H + col]);
    value += factor * __half2float(W2[static_cast<size_t>(k) * H + col]);
  }
  out[static_cast<size_t>(row) * H + col] = __float2half_rn(sigmoid(gate) * value);
}

// ---- tensor cores -------------------------------------------------------------------------------

constexpr int kPad = 8;  // halves after each row of a tile: rows start on different banks

// A warp's share of a tile of out: 16 kRows x 16 kCols elements, both sums of each.
template <int kRows, int kCols>
struct GateSums {
  FragmentSum gate[kRows][kCols], value[kRows][kCols];

  // The sums start at the biases. In shared memory bias_tile has 16 rows, all the same, of `stride`
  // floats, so that it loads as a fragment does.
  __device__ void start(const float* bias1_tile, const float* bias2_tile, int stride) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        wmma::load_matrix_sync(gate[i][j], bias1_tile + 16 * j, stride, wmma::mem_row_major);
        wmma::load_matrix_sync(value[i][j], bias2_tile + 16 * j, stride, wmma::mem_row_major);
      }
    }
  }

  // Adds the products of a tile of x (16 kRows rows, kDepth columns) and tiles of W1 and W2 (kDepth
  // rows, 16 kCols columns), all in shared memory. A fragment of x serves both weights.
  template <int kDepth, int kStrideX, int kStrideW>
  __device__ void add_products(const half* x_tile, const half* W1_tile, const half* W2_tile) {
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
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

  // out(row0.., col0..) = sigmoid(gate) * value. Fragments of one type hold the same element at the
  // same index, so gate and value combine without knowing which element that is. The store has to
  // know it: 16 rows at a time go through `staging` (16 x kStagingStride floats, this warp's own),
  // from where a thread takes 4 consecutive elements; 4 threads fill a 32-byte sector of out.
  static constexpr int kWidth = 16 * kCols, kStagingStride = kWidth + 8;
  template <bool kAligned>
  __device__ void finish(float* staging, half* out, int row0, int col0, int M, int H) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        for (int e = 0; e < gate[i][j].num_elements; ++e) {
          gate[i][j].x[e] = sigmoid(gate[i][j].x[e]) * value[i][j].x[e];
        }
        wmma::store_matrix_sync(staging + 16 * j, gate[i][j], kStagingStride, wmma::mem_row_major);
      }
      __syncwarp();
#pragma unroll
      for (int e = lane * 4; e < 16 * kWidth; e += 32 * 4) {
        const float4 from =
            *reinterpret_cast<const float4*>(staging + e / kWidth * kStagingStride + e % kWidth);
        const int row = row0 + 16 * i + e / kWidth, col = col0 + e % kWidth;
        half* to = out + static_cast<size_t>(row) * H + col;
        const half2 values[2] = {__floats2half2_rn(from.x, from.y),
                                 __floats2half2_rn(from.z, from.w)};
        if constexpr (kAligned) {
          if (row < M && col < H) {
            *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(values);
          }
        } else if (row < M) {
          if (col < H) to[0] = __low2half(values[0]);
          if (col + 1 < H) to[1] = __high2half(values[0]);
          if (col + 2 < H) to[2] = __low2half(values[1]);
          if (col + 3 < H) to[3] = __high2half(values[1]);
        }
      }
      __syncwarp();
    }
  }
};

// The 16 equal rows of GateSums::start, kStride floats apart, for kCols columns from col0.
template <int kCols, int kStride, int kThreads>
__device__ void fill_bias_tile(float* to, const half* bias, int col0, int H) {
  for (int i = threadIdx.x; i < 16 * kCols; i += kThreads) {
    const int col = i % kCols;
    to[i / kCols * kStride + col] = col0 + col < H ? __half2float(bias[col0 + col]) : 0;
  }
}

// A block of kWarpsM x kWarpsH warps owns BM rows and BH columns of out, and both sums of each
// element in registers. Per step of BK it loads a tile of x once for both weights. Then the
// epilogue: bias, sigmoid and product happen where the sums are, and the first thing to be written
// to memory is out.
template <int BM, int BH, int BK, int kWarpsM, int kWarpsH, bool kAligned>
__global__ void __launch_bounds__(32 * kWarpsM * kWarpsH)
    gating_tensor_cores(const half* x, const half* W1, const half* b1, const half* W2,
                        const half* b2, half* out, int M, int K, int H) {
  constexpr int kThreads = 32 * kWarpsM * kWarpsH;
  constexpr int kRows = BM / kWarpsM / 16, kCols = BH / kWarpsH / 16;
  __shared__ __align__(128) half x_tile[BM][BK + kPad];
  __shared__ __align__(128) half W_tiles[2][BK][BH + kPad];
  __shared__ __align__(128) float bias_tiles[2][16][BH + 4];
  __shared__ __align__(128) float staging[kWarpsM * kWarpsH][16][16 * kCols + 8];
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / kWarpsH * 16 * kRows, warp_col = warp % kWarpsH * 16 * kCols;
  const int row0 = blockIdx.x * BM, col0 = blockIdx.y * BH;

  fill_bias_tile<BH, BH + 4, kThreads>(bias_tiles[0][0], b1, col0, H);
  fill_bias_tile<BH, BH + 4, kThreads>(bias_tiles[1][0], b2, col0, H);
  __syncthreads();
  GateSums<kRows, kCols> sums;
  sums.start(&bias_tiles[0][0][warp_col], &bias_tiles[1][0][warp_col], BH + 4);
  for (int k0 = 0; k0 < K; k0 += BK) {
    copy_tile<BM, BK, BK + kPad, kThreads, kAligned>(x_tile[0], x, row0, k0, M, K);
    copy_tile<BK, BH, BH + kPad, kThreads, kAligned>(W_tiles[0][0], W1, k0, col0, K, H);
    copy_tile<BK, BH, BH + kPad, kThreads, kAligned>(W_tiles[1][0], W2, k0, col0, K, H);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    sums.template add_products<BK, BK + kPad, BH + kPad>(x_tile[warp_row], &W_tiles[0][0][warp_col],
                                                         &W_tiles[1][0][warp_col]);
    __syncthreads();
  }
  sums.template finish<kAligned>(staging[warp][0], out, row0 + warp_row, col0 + warp_col, M, H);
}

// ---- async tiles --------------------------------------------------------------------------------

// The same, but kStages sets of tiles are in flight, as in lesson 2's last kernel: the tensor cores
// work on one while the copies of the next ones are on their way, and a step needs one barrier
// instead of two.
template <int BM, int BH, int BK, int kWarpsM, int kWarpsH, int kStages>
struct AsyncTiles {
  static constexpr int kThreads = 32 * kWarpsM * kWarpsH;
  static constexpr int kRows = BM / kWarpsM / 16, kCols = BH / kWarpsH / 16;
  static constexpr int kStrideX = BK + kPad, kStrideW = BH + kPad, kStrideBias = BH + 4;
  static constexpr int kTileX = BM * kStrideX, kTileW = BK * kStrideW;  // halves
  static constexpr int kStageBytes = (kTileX + 2 * kTileW) * sizeof(half);
  static constexpr int kBiasBytes = 2 * 16 * kStrideBias * sizeof(float);
  static constexpr int kStagingBytes = kWarpsM * kWarpsH * 16 * (16 * kCols + 8) * sizeof(float);
  // The staging of the epilogue takes the place of the tiles.
  static constexpr int kSharedBytes =
      kBiasBytes + (kStages * kStageBytes > kStagingBytes ? kStages * kStageBytes : kStagingBytes);
};

template <int BM, int BH, int BK, int kWarpsM, int kWarpsH, int kStages, bool kAligned>
__global__ void __launch_bounds__(32 * kWarpsM * kWarpsH)
    gating_async(const half* x, const half* W1, const half* b1, const half* W2, const half* b2,
                 half* out, int M, int K, int H) {
  using Shape = AsyncTiles<BM, BH, BK, kWarpsM, kWarpsH, kStages>;
  extern __shared__ __align__(128) char shared[];
  float* bias_tiles = reinterpret_cast<float*>(shared);
  half* stages = reinterpret_cast<half*>(shared + Shape::kBiasBytes);
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / kWarpsH * 16 * Shape::kRows;
  const int warp_col = warp % kWarpsH * 16 * Shape::kCols;
  const int row0 = blockIdx.x * BM, col0 = blockIdx.y * BH;

  const auto stage_of = [&](int step) {
    return stages + step % kStages * (Shape::kTileX + 2 * Shape::kTileW);
  };
  const auto copy_step = [&](int step) {
    half* x_tile = stage_of(step);
    half* W1_tile = x_tile + Shape::kTileX;
    half* W2_tile = W1_tile + Shape::kTileW;
    const int k0 = step * BK;
    copy_tile<BM, BK, Shape::kStrideX, Shape::kThreads, kAligned>(x_tile, x, row0, k0, M, K);
    copy_tile<BK, BH, Shape::kStrideW, Shape::kThreads, kAligned>(W1_tile, W1, k0, col0, K, H);
    copy_tile<BK, BH, Shape::kStrideW, Shape::kThreads, kAligned>(W2_tile, W2, k0, col0, K, H);
  };

  const int steps = (K + BK - 1) / BK;
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) copy_step(step);
    copy_async_commit();
  }
  float* bias2_tile = bias_tiles + 16 * Shape::kStrideBias;
  fill_bias_tile<BH, Shape::kStrideBias, Shape::kThreads>(bias_tiles, b1, col0, H);
  fill_bias_tile<BH, Shape::kStrideBias, Shape::kThreads>(bias2_tile, b2, col0, H);
  __syncthreads();
  GateSums<Shape::kRows, Shape::kCols> sums;
  sums.start(bias_tiles + warp_col, bias2_tile + warp_col, Shape::kStrideBias);
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    if (step + kStages - 1 < steps) copy_step(step + kStages - 1);
    copy_async_commit();
    const half* x_tile = stage_of(step);
    const half* W_tile = x_tile + Shape::kTileX + warp_col;
    sums.template add_products<BK, Shape::kStrideX, Shape::kStrideW>(
        x_tile + warp_row * Shape::kStrideX, W_tile, W_tile + Shape::kTileW);
  }
  __syncthreads();
  float* staging = reinterpret_cast<float*>(stages) + warp * 16 * (16 * Shape::kCols + 8);
  sums.template finish<kAligned>(staging, out, row0 + warp_row, col0 + warp_col, M, H);
}

// ---- resident weights ---------------------------------------------------------------------------

// The layer's weights are 32 KB: they fit into shared memory, next to several tiles of x. So as
// many blocks as fit on the GPU at once stay there until the end. Each loads its BH columns of the
// weights and biases once, then walks over row tiles blockIdx.x, blockIdx.x + gridDim.x, ... with
// all columns of kStages of them in flight: while one is multiplied and written, the next ones
// arrive. Memory never waits for a block to start or to end. K is at most kDepth; what is missing
// is filled with zeros.
template <int BM, int BH, int kDepth, int kWarpsM, int kWarpsH, int kStages>
struct ResidentWeights {
  static constexpr int kThreads = 32 * kWarpsM * kWarpsH;
  static constexpr int kRows = BM / kWarpsM / 16, kCols = BH / kWarpsH / 16;
  static constexpr int kStrideX = kDepth + kPad, kStrideW = BH + kPad, kStrideBias = BH + 4;
  static constexpr int kTileX = BM * kStrideX, kTileW = kDepth * kStrideW;  // halves
  static constexpr int kBiasFloats = 16 * kStrideBias;
  static constexpr int kStagingFloats = 16 * GateSums<kRows, kCols>::kStagingStride;  // per warp
  static constexpr int kFloatBytes =
      (2 * kBiasFloats + kWarpsM * kWarpsH * kStagingFloats) * sizeof(float);
  static constexpr int kSharedBytes = kFloatBytes + (kStages * kTileX + 2 * kTileW) * sizeof(half);
};

template <int BM, int BH, int kDepth, int kWarpsM, int kWarpsH, int kStages, bool kAligned>
__global__ void __launch_bounds__(32 * kWarpsM * kWarpsH)
    gating_resident(const half* x, const half* W1, const half* b1, const half* W2, const half* b2,
                    half* out, int M, int K, int H) {
  using Shape = ResidentWeights<BM, BH, kDepth, kWarpsM, kWarpsH, kStages>;
  extern __shared__ __align__(128) char shared[];
  float* bias1_tile = reinterpret_cast<float*>(shared);
  float* bias2_tile = bias1_tile + Shape::kBiasFloats;
  float* stagings = bias2_tile + Shape::kBiasFloats;
  half* W1_tile = reinterpret_cast<half*>(shared + Shape::kFloatBytes);
  half* W2_tile = W1_tile + Shape::kTileW;
  half* x_tiles = W2_tile + Shape::kTileW;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / kWarpsH * 16 * Shape::kRows;
  const int warp_col = warp % kWarpsH * 16 * Shape::kCols;
  const int col0 = blockIdx.y * BH, tiles = (M + BM - 1) / BM;

  const auto copy_step = [&](int step) {
    const int64_t tile = blockIdx.x + static_cast<int64_t>(step) * gridDim.x;
    if (tile < tiles) {
      copy_tile<BM, kDepth, Shape::kStrideX, Shape::kThreads, kAligned>(
          x_tiles + step % kStages * Shape::kTileX, x, static_cast<int>(tile) * BM, 0, M, K);
    }
    copy_async_commit();
  };

  copy_tile<kDepth, BH, Shape::kStrideW, Shape::kThreads, kAligned>(W1_tile, W1, 0, col0, K, H);
  copy_tile<kDepth, BH, Shape::kStrideW, Shape::kThreads, kAligned>(W2_tile, W2, 0, col0, K, H);
  for (int step = 0; step < kStages - 1; ++step) copy_step(step);
  fill_bias_tile<BH, Shape::kStrideBias, Shape::kThreads>(bias1_tile, b1, col0, H);
  fill_bias_tile<BH, Shape::kStrideBias, Shape::kThreads>(bias2_tile, b2, col0, H);
  for (int step = 0, tile = blockIdx.x; tile < tiles; ++step, tile += gridDim.x) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    copy_step(step + kStages - 1);
    GateSums<Shape::kRows, Shape::kCols> sums;
    sums.start(bias1_tile + warp_col, bias2_tile + warp_col, Shape::kStrideBias);
    sums.template add_products<kDepth, Shape::kStrideX, Shape::kStrideW>(
        x_tiles + step % kStages * Shape::kTileX + warp_row * Shape::kStrideX, W1_tile + warp_col,
        W2_tile + warp_col);
    sums.template finish<kAligned>(stagings + warp * Shape::kStagingFloats, out,
                                   tile * BM + warp_row, col0 + warp_col, M, H);
  }
}

// ---- Hopper: resident weights -------------------------------------------------------------------

// The last two kernels use what lesson 3's last kernels introduce: the copy engine (TMA), barriers
// in shared memory (mbarrier), products of a warpgroup (wgmma). Their names in the code are those
// of common/tiles.cuh and common/hopper.cuh.

#if HOPPER_CODE
// The gate of 64 columns of out, from col0 on. A thread keeps the biases of its own: in each group
// of 8 two neighbours, see Sum::col. Beyond H, where nothing is stored, they are the last ones: so
// no load waits for a comparison, and all of them are on their way at once.
struct Gate {
  float2 b1[8], b2[8];

  __device__ Gate(const half* bias1, const half* bias2, int col0, int H) {
    H % 2 == 0 ? load<true>(bias1, bias2, col0, H) : load<false>(bias1, bias2, col0, H);
  }
  // kPairs: H is even, and two neighbours are one load.
  template <bool kPairs>
  __device__ void load(const half* bias1, const half* bias2, int col0, int H) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int col = min(col0 + Sum<64>::col(4 * j), (H - 1) / 2 * 2);
      b1[j] = two<kPairs>(bias1, col, H);
      b2[j] = two<kPairs>(bias2, col, H);
    }
  }
  template <bool kPairs>
  __device__ static float2 two(const half* from, int col, int H) {
    if constexpr (kPairs) return __half22float2(*reinterpret_cast<const half2*>(from + col));
    return make_float2(__half2float(from[col]), __half2float(from[min(col + 1, H - 1)]));
  }
  // A sum has the gates in the left half of its columns, the values in the right. Puts the results
  // of 64 columns, from `first` on, into a box.
  template <int kAll>
  __device__ void store(const Sum<kAll>& sum, int first, Box<half, 64>& to) const {
    sum.store(to, first, [&](int i) {
      const float2 gate_bias = b1[i % 32 / 4], value_bias = b2[i % 32 / 4];
      const float gate = sum.elements[i] + (i % 2 == 0 ? gate_bias.x : gate_bias.y);
      return sigmoid(gate) *
             (sum.elements[kAll / 4 + i] + (i % 2 == 0 ? value_bias.x : value_bias.y));
    });
  }
};
#endif

constexpr int kConsumers = 3;  // warpgroups that compute, besides one that copies

// kBoxes: K in units of 64 columns. kStages tiles of x, 64 rows each, are in flight.
template <int kBoxes, int kStages>
struct HopperResidentShared {
  // A stage always belongs to the same consumer, which therefore never is two phases behind.
  static_assert(kStages % kConsumers == 0);
  RightTile<half, 128> W[kBoxes];  // W1's 64 columns and W2's side by side
  LeftTile<half, 64> x[kStages][kBoxes];
  Box<half, 64> out[kConsumers];
  Barrier weights, full[kStages], empty[kStages];
};

// The idea of "resident weights", with Hopper's means. A block per multiprocessor keeps 64 columns
// of both weights in shared memory. Its producer streams tiles of x, 64 rows by all K columns,
// through kStages stages; its three consumer warpgroups take turns, tile by tile, so that while one
// waits for its products another computes sigmoids and a third waits for its tile. W1 and W2 lie
// next to each other as one 128-column factor: one wgmma computes both sums, gate in registers 0 to
// 31 and value in registers 32 to 63 of the same thread. Results leave through shared memory, by
// the copy engine: no thread computes an address of x or of out.
template <int kBoxes, int kStages>
__global__ void __launch_bounds__(128 * (1 + kConsumers), 1)
    gating_hopper_resident(const __grid_constant__ CUtensorMap x,
                           const __grid_constant__ CUtensorMap W1,
                           const __grid_constant__ CUtensorMap W2, const half* b1, const half* b2,
                           const __grid_constant__ CUtensorMap out, int M, int H) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  auto& shared = *reinterpret_cast<HopperResidentShared<kBoxes, kStages>*>(bytes);
  const int col0 = blockIdx.y * 64, tiles = (M + 63) / 64;
  if (threadIdx.x == 0) {
    barrier_init(&shared.weights, 1);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&shared.full[s], 1);
      barrier_init(&shared.empty[s], 1);
    }
    barrier_init_fence();
  }
  __syncthreads();

  Ring<kStages> ring;
  if (threadIdx.x < 128) {
    registers_shrink_to<24>();
    if (threadIdx.x != 0) return;
    barrier_arrive_expect(&shared.weights, sizeof shared.W);
    for (int k = 0; k < kBoxes; ++k) {
      tensor_load(shared.W[k].boxes[0].elements, &W1, 64 * k, col0, &shared.weights);
      tensor_load(shared.W[k].boxes[1].elements, &W2, 64 * k, col0, &shared.weights);
    }
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ring.advance()) {
      Barrier* arrived = &shared.full[ring.stage];
      barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
      barrier_arrive_expect(arrived, sizeof shared.x[0]);
      for (int k = 0; k < kBoxes; ++k) {
        tensor_load(shared.x[ring.stage][k].elements, &x, 64 * tile, 64 * k, arrived);
      }
    }
  } else {
    registers_grow_to<152>();
    const int consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
    const Gate gate(b1, b2, col0, H);
    for (int i = 0; i < consumer; ++i) ring.advance();
    barrier_wait(&shared.weights, 0);
    for (int tile = blockIdx.x + consumer * gridDim.x; tile < tiles;
         tile += kConsumers * gridDim.x) {
      barrier_wait(&shared.full[ring.stage], ring.parity);
      Sum<128> sum;
#pragma unroll
      for (int k = 0; k < kBoxes; ++k) {
        sum.start_product(shared.x[ring.stage][k], 0, shared.W[k], k > 0);
      }
      wgmma_wait<0>();
      if (thread == 0) {
        barrier_arrive(&shared.empty[ring.stage]);
        tensor_store_wait_read<0>();  // this consumer's box is free again
      }
      named_barrier(1 + consumer, 128);
      gate.store(sum, 0, shared.out[consumer]);
      shared_fence();
      named_barrier(1 + consumer, 128);
      if (thread == 0) {
        tensor_store(&out, 64 * tile, col0, shared.out[consumer].elements);
        tensor_store_commit();
      }
      for (int i = 0; i < kConsumers; ++i) ring.advance();
    }
    if (thread == 0) tensor_store_wait_read<0>();
  }
#endif
}

// ---- Hopper: clusters ---------------------------------------------------------------------------

// Lesson 3's product (common/product.cuh) for K and H of any size. Its right factor is W1 and W2
// side by side: half of a tile's columns are of W1, half of W2. So where a tile has 256 columns, a
// consumer's sum of 64 x 256 is two sums of 64 x 128, gate and value of an element in one thread.
// Of two blocks that share a tile of it one brings W1's part, the other W2's. New is the epilogue.
struct GateEpilogue {
  static constexpr int kRightFactors = 2;
  StoreRounded<half> out;
  const half *b1, *b2;

#if HOPPER_CODE
  template <int kCols, int kBoxes>
  __device__ void operator()(const Sum<kCols>& sum, int row, int col,
                             const Outbox<half, kBoxes>& box) const {
    out.store<kCols / 2>(row, col / 2, box, [&](Box<half, 64>& to, int first) {
      Gate(b1, b2, col / 2 + first, out.cols).store(sum, first, to);
    });
  }
#endif
};

// -------------------------------------------------------------------------------------------------

// Adds the kernels that every shape can use. BM, BH, BK: a block's tile in "async tiles", kStages
// of which fit into the device's shared memory.
template <int BM, int BH, int BK, int kWarpsM, int kWarpsH, int kStages, bool kAligned>
void add_kernels(GatingProblem& layer) {
  const int64_t M = layer.shape.rows, K = layer.shape.channels, H = layer.shape.hidden;
  const auto tiles = [](int64_t extent, int tile) {
    return static_cast<unsigned>((extent + tile - 1) / tile);
  };
  layer.problem
      .kernel("one thread per element", Role::baseline,
              [=, &layer] {
                gating_simple<<<dim3(tiles(M, 8), tiles(H, 32)), dim3(32, 8)>>>(
                    layer.x, layer.W1, layer.b1, layer.W2, layer.b2, layer.out, M, K, H);
              })
      .resources(gating_simple, 256);
  layer.problem
      .kernel("tensor cores", Role::ours,
              [=, &layer] {
                gating_tensor_cores<64, 64, 32, 2, 2, kAligned>
                    <<<dim3(tiles(M, 64), tiles(H, 64)), 128>>>(
                        layer.x, layer.W1, layer.b1, layer.W2, layer.b2, layer.out, M, K, H);
              })
      .resources(gating_tensor_cores<64, 64, 32, 2, 2, kAligned>, 128);

  constexpr int kThreads = 32 * kWarpsM * kWarpsH;
  constexpr int kBytes = AsyncTiles<BM, BH, BK, kWarpsM, kWarpsH, kStages>::kSharedBytes;
  const auto kernel = gating_async<BM, BH, BK, kWarpsM, kWarpsH, kStages, kAligned>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  layer.problem
      .kernel("async tiles", Role::ours,
              [=, &layer] {
                gating_async<BM, BH, BK, kWarpsM, kWarpsH, kStages, kAligned>
                    <<<dim3(tiles(M, BM), tiles(H, BH)), kThreads, kBytes>>>(
                        layer.x, layer.W1, layer.b1, layer.W2, layer.b2, layer.out, M, K, H);
              })
      .resources(kernel, kThreads, kBytes);
}

// Adds the kernel for weights that fit into shared memory: K at most kDepth.
template <int BM, int BH, int kDepth, int kWarpsM, int kWarpsH, int kStages, bool kAligned>
void add_resident_kernel(GatingProblem& layer, const Device& device) {
  constexpr int kThreads = 32 * kWarpsM * kWarpsH;
  constexpr int kBytes = ResidentWeights<BM, BH, kDepth, kWarpsM, kWarpsH, kStages>::kSharedBytes;
  if (kBytes > device.shared_bytes) return;
  const int64_t M = layer.shape.rows, K = layer.shape.channels, H = layer.shape.hidden;
  const auto kernel = gating_resident<BM, BH, kDepth, kWarpsM, kWarpsH, kStages, kAligned>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  int per_sm = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, kThreads, kBytes));
  const int64_t tiles = (M + BM - 1) / BM, resident = static_cast<int64_t>(per_sm) * device.sms;
  const dim3 grid(static_cast<unsigned>(std::min(tiles, resident)),
                  static_cast<unsigned>((H + BH - 1) / BH));
  layer.problem
      .kernel("resident weights", Role::ours,
              [=, &layer] {
                gating_resident<BM, BH, kDepth, kWarpsM, kWarpsH, kStages, kAligned>
                    <<<grid, kThreads, kBytes>>>(layer.x, layer.W1, layer.b1, layer.W2, layer.b2,
                                                 layer.out, M, K, H);
              })
      .resources(kernel, kThreads, kBytes);
}

// Adds the kernel for at most 64 kBoxes channels, and rows of a multiple of 16 bytes.
template <int kBoxes, int kStages>
void add_hopper_resident(GatingProblem& table, const Device& device) {
  const int64_t M = table.shape.rows, K = table.shape.channels, H = table.shape.hidden;
  constexpr int kThreads = 128 * (1 + kConsumers);
  constexpr int kBytes = sizeof(HopperResidentShared<kBoxes, kStages>);
  const auto kernel = gating_hopper_resident<kBoxes, kStages>;
  allow_shared_bytes(kernel, kBytes);
  const int64_t columns = (H + 63) / 64, tiles = (M + 63) / 64;
  const dim3 grid(
      static_cast<unsigned>(std::min(tiles, std::max<int64_t>(1, device.sms / columns))),
      static_cast<unsigned>(columns));
  const auto launch = [=, &table] {
    const CUtensorMap x = tensor_map<half>(table.x, M, K, 64);
    const CUtensorMap W1 = tensor_map<half>(table.W1, K, H, 64);
    const CUtensorMap W2 = tensor_map<half>(table.W2, K, H, 64);
    const CUtensorMap out = tensor_map<half>(table.out, M, H, 64);
    gating_hopper_resident<kBoxes, kStages>
        <<<grid, kThreads, kBytes>>>(x, W1, W2, table.b1, table.b2, out, M, H);
  };
  Kernel& row = table.problem.kernel("Hopper resident", Role::ours, launch);
  row.resources(kernel, kThreads, kBytes).hopper_only();
}

// The product for any K and H. Where rows are not aligned to 16 bytes they are first copied into
// rows that are, as in lesson 3; that time counts.
struct GatedProduct {
  GatingProblem& table;
  AlignedRows<half> x, W1, W2;
  ExchangeMemory memory;
  ProductShape shape;  // of x [W1 W2]

  GatedProduct(GatingProblem& of, const Device& device)
      : table(of),
        x(of.problem, of.x, of.shape.rows, of.shape.channels),
        W1(of.problem, of.W1, of.shape.channels, of.shape.hidden),
        W2(of.problem, of.W2, of.shape.channels, of.shape.hidden),
        memory(of.problem, device),
        shape{x.rows, 2 * W1.cols, x.cols} {}

  template <class Tile>
  void launch(const ProductPlan& plan) const {
    constexpr size_t kBytes = sizeof(ProductShared<half, Tile>);
    if (x.copied) {
      align_rows<half>
          <<<dim3(x.rows, 1), 256>>>(x.from, x.copy, nullptr, nullptr, x.cols, x.stride);
    }
    if (W1.copied) {
      align_rows<half>
          <<<dim3(W1.rows, 2), 256>>>(W1.from, W1.copy, W2.from, W2.copy, W1.cols, W1.stride);
    }
    const Factor<half> left{{x.map(Tile::BM / Tile::kSide)}, {x.data()}, x.stride};
    const Factor<half, 2> right{
        {W1.map(Tile::kRowsB), W2.map(Tile::kRowsB)}, {W1.data(), W2.data()}, W1.stride};
    const GateEpilogue epilogue{rounded_to<half>(table.out, x.rows, W1.cols), table.b1, table.b2};
    product<half, Tile, GateEpilogue><<<plan.clusters * Tile::kBlocks, Tile::kThreads, kBytes>>>(
        left, right, epilogue, Schedule<Tile>(shape, plan.clusters, plan.split),
        memory.exchange<half>(shape));
  }

  // Adds the row, with the tiles that should be the fastest.
  void add() const {
    TileChoice<Tiles<256, 2, 1, 2>, Tiles<128, 2, 1, 1>>::best<half, GateEpilogue>(
        shape, x.stride, W1.stride, [&]<class Tile>(const ProductPlan& plan) { add<Tile>(plan); });
  }
  template <class Tile>
  void add(const ProductPlan& plan) const {
    constexpr size_t kBytes = sizeof(ProductShared<half, Tile>);
    table.problem
        .kernel("Hopper cluster", Role::ours,
                [self = *this, plan] { self.template launch<Tile>(plan); })
        .resources(product<half, Tile, GateEpilogue>, Tile::kThreads, kBytes)
        .hopper_only();
  }
};

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "6_gating_fused",
                 .title = "sigmoid(x W1 + b1) * (x W2 + b2) in one kernel",
                 .n_meaning = "M = 1024 N rows for the layer, N x N x N for the square",
                 .n_gpu = 4096,
                 .n_cpu = 8,
                 .options = {{"--channels", "K, columns of x in the layer", 128},
                             {"--hidden", "H, columns of the layer's result", 64}}});
  const int64_t n = lesson.n();
  const bool large = lesson.device().shared_bytes >= 96 << 10;  // compute capability 7.5 has 64 KB

  Cublas blas;
  GatingProblem layer(lesson, blas, "layer",
                      {1024 * n, lesson.option("--channels"), lesson.option("--hidden")}, 1);
  GatingProblem square(lesson, blas, "square", {n, n, n}, 1);
  for (GatingProblem* table : {&layer, &square}) {
    if (table->shape.channels % 8 != 0 || table->shape.hidden % 8 != 0) {
      add_kernels<128, 64, 32, 4, 2, 2, false>(*table);
    } else if (large) {
      add_kernels<128, 64, 64, 2, 2, 2, true>(*table);
    } else {
      add_kernels<128, 64, 32, 4, 2, 2, true>(*table);
    }
  }
  const bool aligned = layer.shape.channels % 8 == 0 && layer.shape.hidden % 8 == 0;
  const int64_t boxes = (layer.shape.channels + 63) / 64;
  if (boxes <= 2) {
    aligned ? add_resident_kernel<64, 64, 128, 2, 2, 3, true>(layer, lesson.device())
            : add_resident_kernel<64, 64, 128, 2, 2, 3, false>(layer, lesson.device());
  }
  if (boxes > 4) {
    GatedProduct(layer, lesson.device()).add();
  } else if (!aligned) {
    lesson.note("The layer's rows are no multiple of 16 bytes: no Hopper kernel for it.");
  } else if (boxes > 2) {
    add_hopper_resident<4, 3>(layer, lesson.device());
  } else {
    boxes == 2 ? add_hopper_resident<2, 6>(layer, lesson.device())
               : add_hopper_resident<1, 9>(layer, lesson.device());
  }
  GatedProduct(square, lesson.device()).add();

  layer.problem.compare("resident weights", "one thread per element",
                        "Layer: tiles, tensor cores and resident weights: % times faster.");
  layer.problem.compare("Hopper resident", "resident weights",
                        "Layer: the same idea with TMA and wgmma: % times faster.");
  square.problem.compare("Hopper cluster", "async tiles",
                         "Square: TMA and wgmma feed the tensor cores: % times faster.");
  return lesson.run();
}
