// 6. The gated layer in one kernel
//
//     out = sigmoid(x W1 + b1) * (x W2 + b2)
//     x (M, K), W1 and W2 (K, H), b1 and b2 (H), out (M, H): fp16, row-major; fp32 accumulation
//
// Of the bytes that lesson 5's six kernels moved, 4 of 5 were needless: two thirds were
// temporaries, and x was read twice. A temporary exists because a kernel ends. So do not end: a
// block that has both products of its rows in registers adds the biases, takes the sigmoid,
// multiplies, and writes out. x is read once, out is written once; nothing else touches memory.
//
// What makes this possible is that everything after the products is elementwise: the element (i, j)
// of both sums ends up in the same thread, which needs no other. Six kernels:
//
//     one thread per element   fused, but on the CUDA cores and without tiles: not fast for that
//     tensor cores             tiles in shared memory, products by WMMA
//     async tiles              the next tiles arrive (cp.async) while these are multiplied
//     resident weights         the weights fit on chip: blocks stay, keep them, and x streams by
//     Hopper resident          the same with TMA and wgmma, in warpgroups that specialize
//     Hopper cluster           lesson 3's product, with two weights and this epilogue
//
// The first four need compute capability 7.5 (which copies synchronously), the last two 9.0. The
// CPU backend runs all.
//
// Two tables: the layer, M = 1024 N rows of K = 128 channels to H = 64 hidden, where memory is the
// limit; and a square one, N x N x N, where the tensor cores are.

#include "common/async_copy.cuh"
#include "common/gating.h"
#include "common/product_plan.cuh"
#include "common/wmma_fragments.cuh"

// What every kernel gets.
struct Layer {
  const half *x, *W1, *b1, *W2, *b2;
  half* out;
  int M, K, H;
};

// 1 / (1 + e^-s), by the approximate exponential and division: both within 2 units in the last
// place of fp32 here, and the result is rounded to fp16.
__device__ float sigmoid(float s) { return __fdividef(1.0f, 1.0f + __expf(-s)); }

// ---- one thread per element ---------------------------------------------------------------------

// Lesson 1's coalesced mapping: thread (x, y) owns out(row y, column x), and both its sums.
__global__ void gating_simple(Layer layer) {
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  const int col = blockIdx.y * blockDim.x + threadIdx.x;
  if (row >= layer.M || col >= layer.H) return;
  float gate = __half2float(layer.b1[col]), value = __half2float(layer.b2[col]);
  for (int k = 0; k < layer.K; ++k) {
    const float factor = __half2float(layer.x[static_cast<size_t>(row) * layer.K + k]);
    gate += factor * __half2float(layer.W1[static_cast<size_t>(k) * layer.H + col]);
    value += factor * __half2float(layer.W2[static_cast<size_t>(k) * layer.H + col]);
  }
  layer.out[static_cast<size_t>(row) * layer.H + col] = __float2half_rn(sigmoid(gate) * value);
}

// ---- tensor cores -------------------------------------------------------------------------------

// A block of kWarpsM x kWarpsH warps owns kBM rows and kBH columns of out, and takes kBK of k in a
// step; a warp owns 16 kRows x 16 kCols elements. kAligned: see copy_tile.
template <int kBM, int kBH, int kBK, int kWarpsM, int kWarpsH, bool kAlignedRows>
struct Block {
  static constexpr int BM = kBM, BH = kBH, BK = kBK, kWarps = kWarpsM * kWarpsH;
  static constexpr int kThreads = 32 * kWarps, kRows = BM / kWarpsM / 16, kCols = BH / kWarpsH / 16;
  static constexpr bool kAligned = kAlignedRows;
  // Tiles in shared memory, whose padded rows start on different banks.
  static constexpr int kStrideX = BK + 8, kStrideW = BH + 8, kStrideBias = BH + 4;
  using TileX = half[BM][kStrideX];
  using TilesW = half[2][BK][kStrideW];                 // of W1 and W2
  using Biases = float[2][16][kStrideBias];             // 16 equal rows: they load as fragments do
  using Stagings = float[kWarps][16 * kStagingStride];  // see store_rounded

  // Where this warp's elements start in the block's tile.
  __device__ static int warp_row() { return threadIdx.x / 32 / kWarpsH * 16 * kRows; }
  __device__ static int warp_col() { return threadIdx.x / 32 % kWarpsH * 16 * kCols; }

  __device__ static void copy_x(TileX& to, const Layer& layer, int row0, int k0) {
    copy_tile<BM, BK, kStrideX, kThreads, kAligned>(to[0], layer.x, row0, k0, layer.M, layer.K);
  }
  __device__ static void copy_weights(TilesW& to, const Layer& layer, int k0, int col0) {
    copy_tile<BK, BH, kStrideW, kThreads, kAligned>(to[0][0], layer.W1, k0, col0, layer.K, layer.H);
    copy_tile<BK, BH, kStrideW, kThreads, kAligned>(to[1][0], layer.W2, k0, col0, layer.K, layer.H);
  }
  __device__ static void fill(Biases& to, const Layer& layer, int col0) {
    for (int i = threadIdx.x; i < 16 * BH; i += kThreads) {
      const int col = i % BH;
      const bool inside = col0 + col < layer.H;
      to[0][i / BH][col] = inside ? __half2float(layer.b1[col0 + col]) : 0;
      to[1][i / BH][col] = inside ? __half2float(layer.b2[col0 + col]) : 0;
    }
  }
};

// A warp's elements: both sums of each.
template <class B>  // a Block
struct GateSums {
  FragmentSum gate[B::kRows][B::kCols], value[B::kRows][B::kCols];

  // The sums start at the biases.
  __device__ void start(const typename B::Biases& biases) {
#pragma unroll
    for (int i = 0; i < B::kRows; ++i) {
#pragma unroll
      for (int j = 0; j < B::kCols; ++j) {
        const int col = B::warp_col() + 16 * j;
        wmma::load_matrix_sync(gate[i][j], &biases[0][0][col], B::kStrideBias, wmma::mem_row_major);
        wmma::load_matrix_sync(value[i][j], &biases[1][0][col], B::kStrideBias,
                               wmma::mem_row_major);
      }
    }
  }

  // Adds the products of a tile of x and tiles of W1 and W2. A fragment of x serves both weights.
  __device__ void add_products(const typename B::TileX& x_tile, const typename B::TilesW& W_tiles) {
#pragma unroll
    for (int k = 0; k < B::BK; k += 16) {
      FragmentA x[B::kRows];
#pragma unroll
      for (int i = 0; i < B::kRows; ++i) {
        wmma::load_matrix_sync(x[i], &x_tile[B::warp_row() + 16 * i][k], B::kStrideX);
      }
#pragma unroll
      for (int j = 0; j < B::kCols; ++j) {
        FragmentB w1, w2;
        wmma::load_matrix_sync(w1, &W_tiles[0][k][B::warp_col() + 16 * j], B::kStrideW);
        wmma::load_matrix_sync(w2, &W_tiles[1][k][B::warp_col() + 16 * j], B::kStrideW);
#pragma unroll
        for (int i = 0; i < B::kRows; ++i) {
          wmma::mma_sync(gate[i][j], x[i], w1, gate[i][j]);
          wmma::mma_sync(value[i][j], x[i], w2, value[i][j]);
        }
      }
    }
  }

  // out = sigmoid(gate) * value, where the block's tile starts at (row0, col0). Fragments of one
  // type hold the same element at the same index, whichever that is: elementwise operations need
  // not know.
  __device__ void finish(typename B::Stagings& stagings, const Layer& layer, int row0, int col0) {
#pragma unroll
    for (int i = 0; i < B::kRows; ++i) {
#pragma unroll
      for (int j = 0; j < B::kCols; ++j) {
        for (int e = 0; e < gate[i][j].num_elements; ++e) {
          gate[i][j].x[e] = sigmoid(gate[i][j].x[e]) * value[i][j].x[e];
        }
        store_rounded<B::kAligned>(layer.out, row0 + B::warp_row() + 16 * i,
                                   col0 + B::warp_col() + 16 * j, layer.M, layer.H, gate[i][j],
                                   stagings[threadIdx.x / 32]);
      }
    }
  }
};

// Lesson 3's "wmma shared" with two weights: per step a block loads a tile of x once for both. Both
// sums of its elements are in registers. Then the epilogue: sigmoid and product happen where the
// sums are, and the first thing to be written to memory is out.
template <class B>
__global__ void __launch_bounds__(B::kThreads) gating_tensor_cores(Layer layer) {
  __shared__ __align__(128) typename B::TileX x_tile;
  __shared__ __align__(128) typename B::TilesW W_tiles;
  __shared__ __align__(128) typename B::Biases biases;
  __shared__ __align__(128) typename B::Stagings stagings;
  const int row0 = blockIdx.x * B::BM, col0 = blockIdx.y * B::BH;
  B::fill(biases, layer, col0);
  __syncthreads();
  GateSums<B> sums;
  sums.start(biases);
  for (int k0 = 0; k0 < layer.K; k0 += B::BK) {
    B::copy_x(x_tile, layer, row0, k0);
    B::copy_weights(W_tiles, layer, k0, col0);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    sums.add_products(x_tile, W_tiles);
    __syncthreads();
  }
  sums.finish(stagings, layer, row0, col0);
}

// ---- async tiles --------------------------------------------------------------------------------

// The same, but kStages sets of tiles are in flight, as in lesson 2's last kernel: the tensor cores
// work on one while the copies of the next ones are on their way, and a step needs one barrier
// instead of two.
template <class B, int kStages>
struct AsyncShared {
  struct {
    typename B::TileX x;
    typename B::TilesW W;
  } stages[kStages];
  typename B::Biases biases;
  typename B::Stagings stagings;
};

template <class B, int kStages>
__global__ void __launch_bounds__(B::kThreads) gating_async(Layer layer) {
  extern __shared__ __align__(128) char storage[];
  auto& shared = *reinterpret_cast<AsyncShared<B, kStages>*>(storage);
  const int row0 = blockIdx.x * B::BM, col0 = blockIdx.y * B::BH;
  const int steps = (layer.K + B::BK - 1) / B::BK;
  const auto copy_step = [&](int step) {
    if (step < steps) {
      auto& stage = shared.stages[step % kStages];
      B::copy_x(stage.x, layer, row0, step * B::BK);
      B::copy_weights(stage.W, layer, step * B::BK, col0);
    }
    copy_async_commit();
  };

  for (int step = 0; step < kStages - 1; ++step) copy_step(step);
  B::fill(shared.biases, layer, col0);
  __syncthreads();
  GateSums<B> sums;
  sums.start(shared.biases);
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    copy_step(step + kStages - 1);
    const auto& stage = shared.stages[step % kStages];
    sums.add_products(stage.x, stage.W);
  }
  sums.finish(shared.stagings, layer, row0, col0);
}

// ---- resident weights ---------------------------------------------------------------------------

// The layer's weights are 32 KB: they fit into shared memory, next to several tiles of x. So as
// many blocks as fit on the GPU at once stay there until the end. Each loads its columns of the
// weights and biases once, then walks over row tiles blockIdx.x, blockIdx.x + gridDim.x, ... with
// all columns of kStages of them in flight: while one is multiplied and written, the next ones
// arrive. Memory never waits for a block to start or to end. K is at most B::BK; what is missing is
// filled with zeros.
template <class B, int kStages>
struct ResidentShared {
  typename B::TilesW W;
  typename B::TileX x[kStages];
  typename B::Biases biases;
  typename B::Stagings stagings;
};

template <class B, int kStages>
__global__ void __launch_bounds__(B::kThreads) gating_resident(Layer layer) {
  extern __shared__ __align__(128) char storage[];
  auto& shared = *reinterpret_cast<ResidentShared<B, kStages>*>(storage);
  const int col0 = blockIdx.y * B::BH, tile_rows = (layer.M + B::BM - 1) / B::BM;
  const auto copy_step = [&](int step) {
    const int64_t tile = blockIdx.x + static_cast<int64_t>(step) * gridDim.x;
    if (tile < tile_rows) {
      B::copy_x(shared.x[step % kStages], layer, static_cast<int>(tile) * B::BM, 0);
    }
    copy_async_commit();
  };

  B::copy_weights(shared.W, layer, 0, col0);
  for (int step = 0; step < kStages - 1; ++step) copy_step(step);
  B::fill(shared.biases, layer, col0);
  for (int step = 0, tile = blockIdx.x; tile < tile_rows; ++step, tile += gridDim.x) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    copy_step(step + kStages - 1);
    GateSums<B> sums;
    sums.start(shared.biases);
    sums.add_products(shared.x[step % kStages], shared.W);
    sums.finish(shared.stagings, layer, tile * B::BM, col0);
  }
}

// ---- Hopper: resident weights -------------------------------------------------------------------

// From here on in the words of common/tiles.cuh and common/hopper.cuh: the copy engine (TMA),
// barriers in shared memory (mbarrier), products of a warpgroup (wgmma). Lesson 3's last kernels
// introduce them one by one.

#if HOPPER_CODE
// The gate of 64 columns of out, from col0 on. A thread keeps the biases of its own: in each group
// of 8 two neighbours, see Sum::col. Zero beyond H.
struct Gate {
  float b1[16], b2[16];

  __device__ Gate(const Layer& layer, int col0) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int col = col0 + Sum<64>::col(i / 2 * 4 + i % 2);
      b1[i] = col < layer.H ? __half2float(layer.b1[col]) : 0;
      b2[i] = col < layer.H ? __half2float(layer.b2[col]) : 0;
    }
  }
  // A sum has the gates in the left half of its columns, the values in the right. Puts the results
  // of 64 columns, from `first` on, into a box.
  template <int kAll>
  __device__ void store(const Sum<kAll>& sum, int first, Box<half, 64>& to) const {
    sum.store(to, first, [&](int i) {
      const int bias = i % 32 / 4 * 2 + i % 2;
      return sigmoid(sum.elements[i] + b1[bias]) * (sum.elements[kAll / 4 + i] + b2[bias]);
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
                           const __grid_constant__ CUtensorMap W2,
                           const __grid_constant__ CUtensorMap out, Layer layer) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  auto& shared = *reinterpret_cast<HopperResidentShared<kBoxes, kStages>*>(bytes);
  const int col0 = blockIdx.y * 64, tiles = (layer.M + 63) / 64;
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
    const Gate gate(layer, col0);
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
// side by side: half of a tile's columns are of the one, half of the other, so a consumer's sum of
// 64 x 256 is two sums of 64 x 128, gate and value of the same elements in the same thread. Of two
// blocks that share such a tile one brings W1's part, the other W2's. New is only the epilogue.
struct GateEpilogue {
  static constexpr int kRightFactors = 2;
  StoreRounded<half> out;
  Layer layer;

#if HOPPER_CODE
  template <int kCols, int kBoxes>
  __device__ void operator()(const Sum<kCols>& sum, int row, int col,
                             const Outbox<half, kBoxes>& box) const {
    out.store<kCols / 2>(row, col / 2, box, [&](Box<half, 64>& to, int first) {
      Gate(layer, col / 2 + first).store(sum, first, to);
    });
  }
#endif
};

// -------------------------------------------------------------------------------------------------

Layer pointers(const GatingProblem& table) {
  const int M = static_cast<int>(table.shape.rows), K = static_cast<int>(table.shape.channels);
  const int H = static_cast<int>(table.shape.hidden);
  return {table.x, table.W1, table.b1, table.W2, table.b2, table.out, M, K, H};
}

unsigned tiles(int64_t extent, int tile) {
  return static_cast<unsigned>((extent + tile - 1) / tile);
}

// Adds the kernels that every shape can use.
template <class B, int kStages>
void add_kernels(GatingProblem& table) {
  const int64_t M = table.shape.rows, H = table.shape.hidden;
  const dim3 elements(tiles(M, 8), tiles(H, 32));
  table.problem
      .kernel("one thread per element", Role::baseline,
              [=, &table] { gating_simple<<<elements, dim3(32, 8)>>>(pointers(table)); })
      .resources(gating_simple, 256);

  using Small = Block<64, 64, 32, 2, 2, B::kAligned>;
  const dim3 small(tiles(M, Small::BM), tiles(H, Small::BH));
  table.problem
      .kernel(
          "tensor cores", Role::ours,
          [=, &table] { gating_tensor_cores<Small><<<small, Small::kThreads>>>(pointers(table)); })
      .resources(gating_tensor_cores<Small>, Small::kThreads);

  constexpr int kBytes = sizeof(AsyncShared<B, kStages>);
  allow_shared_bytes(gating_async<B, kStages>, kBytes);
  const dim3 grid(tiles(M, B::BM), tiles(H, B::BH));
  table.problem
      .kernel(
          "async tiles", Role::ours,
          [=, &table] { gating_async<B, kStages><<<grid, B::kThreads, kBytes>>>(pointers(table)); })
      .resources(gating_async<B, kStages>, B::kThreads, kBytes);
}

// Adds the kernel for weights that fit into shared memory: K at most B::BK.
template <class B, int kStages>
void add_resident_kernel(GatingProblem& table, const Device& device) {
  constexpr int kBytes = sizeof(ResidentShared<B, kStages>);
  if (kBytes > device.shared_bytes) return;
  const auto kernel = gating_resident<B, kStages>;
  allow_shared_bytes(kernel, kBytes);
  int per_sm = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, B::kThreads, kBytes));
  const unsigned resident = static_cast<unsigned>(per_sm * device.sms);
  const dim3 grid(std::min(tiles(table.shape.rows, B::BM), resident),
                  tiles(table.shape.hidden, B::BH));
  table.problem
      .kernel("resident weights", Role::ours,
              [=, &table] {
                gating_resident<B, kStages><<<grid, B::kThreads, kBytes>>>(pointers(table));
              })
      .resources(kernel, B::kThreads, kBytes);
}

// Adds the kernel for at most 64 kBoxes channels, and rows of a multiple of 16 bytes.
template <int kBoxes, int kStages>
void add_hopper_resident(GatingProblem& table, const Device& device) {
  constexpr int kThreads = 128 * (1 + kConsumers);
  constexpr int kBytes = sizeof(HopperResidentShared<kBoxes, kStages>);
  const auto kernel = gating_hopper_resident<kBoxes, kStages>;
  allow_shared_bytes(kernel, kBytes);
  const unsigned columns = tiles(table.shape.hidden, 64);
  const unsigned rows = std::max(1u, static_cast<unsigned>(device.sms) / columns);
  const dim3 grid(std::min(tiles(table.shape.rows, 64), rows), columns);
  const auto launch = [=, &table] {
    const Layer layer = pointers(table);
    gating_hopper_resident<kBoxes, kStages>
        <<<grid, kThreads, kBytes>>>(tensor_map<half>(layer.x, layer.M, layer.K, 64),
                                     tensor_map<half>(layer.W1, layer.K, layer.H, 64),
                                     tensor_map<half>(layer.W2, layer.K, layer.H, 64),
                                     tensor_map<half>(layer.out, layer.M, layer.H, 64), layer);
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
    const GateEpilogue epilogue{rounded_to<half>(table.out, x.rows, W1.cols), pointers(table)};
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
      add_kernels<Block<128, 64, 32, 4, 2, false>, 2>(*table);
    } else if (large) {
      add_kernels<Block<128, 64, 64, 2, 2, true>, 2>(*table);
    } else {
      add_kernels<Block<128, 64, 32, 4, 2, true>, 2>(*table);
    }
  }
  const bool aligned = layer.shape.channels % 8 == 0 && layer.shape.hidden % 8 == 0;
  const int64_t boxes = (layer.shape.channels + 63) / 64;
  if (boxes <= 2) {
    aligned ? add_resident_kernel<Block<64, 64, 128, 2, 2, true>, 3>(layer, lesson.device())
            : add_resident_kernel<Block<64, 64, 128, 2, 2, false>, 3>(layer, lesson.device());
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
