// 2. Matrix multiplication from shared memory, then from registers
//
//     C = A B        A, B, C: N x N, fp32, row-major
//
// Lesson 1 fetched two numbers from memory for every multiply-add. But each element of A is needed
// by N elements of C, and each of B as well: fetch it once, use it often. Where can it be kept in
// between?
//
//     shared memory   228 KB a multiprocessor (Hopper), for all threads of a block, ~30 cycles away
//     registers       256 KB a multiprocessor, 255 x 4 bytes a thread, its own,       0 cycles away
//
// A block computes a tile of C. Step by step along k it loads a tile of A and a tile of B into
// shared memory, multiplies the two, and goes on. A BM x BN tile of C then reads, per step of k, BM
// + BN numbers from memory for BM * BN multiply-adds: the larger the tile, the less memory matters.
//
// One level further in the same argument holds again: a thread that owns TM x TN elements of C
// reads TM + TN numbers from shared memory for TM * TN multiply-adds. Four kernels follow that
// path. Each keeps all that the one above it had:
//
//     tile        32 x 32 tiles, a thread owns one element     2 shared reads per multiply-add
//     registers   128 x 128 tiles, a thread owns 8 x 8         1/4
//     vectors     the same, moved 16 bytes at a time           1/4, by 1/4 of the instructions
//     async       128 x 256 tiles, a thread owns 8 x 16, and   3/16
//                 the next tiles arrive while these are multiplied
//
// No tensor cores here: every multiply-add is true fp32. Tensor cores are lesson 3.

#include <cuda/atomic>

#include "common/async_copy.cuh"
#include "common/matmul.h"

// ---- tile ---------------------------------------------------------------------------------------

constexpr int kTile = 32;

// A block of 32 x 32 threads owns a 32 x 32 tile of C, thread (x, y) its element (row y, column x).
// Each step moves one 32 x 32 tile of A and of B, one element of each per thread, coalesced. After
// the first barrier every element is read from shared memory 32 times; the second barrier keeps a
// fast warp from overwriting what a slow one still reads. There is one load from memory
// where lesson 1 has 32. Counted in sectors that is a factor of 20: per step of k a warp of lesson
// 1's last kernel asks for 5 (one number of A, for all of its threads, and 32 of B), here for 8 in
// 32 steps. The limit is now shared memory, with two reads per multiply-add.
__global__ void matmul_tile(const float* A, const float* B, float* C, int n) {
  __shared__ float a_tile[kTile][kTile];
  __shared__ float b_tile[kTile][kTile];
  const int x = threadIdx.x, y = threadIdx.y;
  const int row = blockIdx.y * kTile + y, col = blockIdx.x * kTile + x;
  float sum = 0;
  for (int k0 = 0; k0 < n; k0 += kTile) {
    a_tile[y][x] = row < n && k0 + x < n ? A[static_cast<size_t>(row) * n + k0 + x] : 0;
    b_tile[y][x] = k0 + y < n && col < n ? B[static_cast<size_t>(k0 + y) * n + col] : 0;
    __syncthreads();
    for (int k = 0; k < kTile; ++k) sum += a_tile[y][k] * b_tile[k][x];
    __syncthreads();
  }
  if (row < n && col < n) C[static_cast<size_t>(row) * n + col] = sum;
}

// ---- registers ----------------------------------------------------------------------------------

// 16 x 16 threads own a 128 x 128 tile of C, and each thread 8 x 8 elements of it: rows y, y + 16,
// ... and columns x, x + 16, ..., so that a warp's reads of b_tile fall on consecutive banks. Per
// step of k a thread reads 8 + 8 numbers from shared memory for 64 multiply-adds, whose sums never
// leave its registers (the loops over i and j must unroll: registers have no addresses). A tile of
// C this size reads A and B from memory N / 128 times instead of N / 32.
template <int BM, int BN, int BK, int TM, int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN))
    matmul_registers(const float* A, const float* B, float* C, int n) {
  constexpr int kThreadsX = BN / TN, kThreadsY = BM / TM, kThreads = kThreadsX * kThreadsY;
  __shared__ float a_tile[BM][BK];
  __shared__ float b_tile[BK][BN];
  const int x = threadIdx.x % kThreadsX, y = threadIdx.x / kThreadsX;
  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
  float sum[TM][TN] = {};
  for (int k0 = 0; k0 < n; k0 += BK) {
    for (int i = threadIdx.x; i < BM * BK; i += kThreads) {
      const int row = row0 + i / BK, k = k0 + i % BK;
      a_tile[i / BK][i % BK] = row < n && k < n ? A[static_cast<size_t>(row) * n + k] : 0;
    }
    for (int i = threadIdx.x; i < BK * BN; i += kThreads) {
      const int k = k0 + i / BN, col = col0 + i % BN;
      b_tile[i / BN][i % BN] = k < n && col < n ? B[static_cast<size_t>(k) * n + col] : 0;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      float a[TM], b[TN];
#pragma unroll
      for (int i = 0; i < TM; ++i) a[i] = a_tile[y + i * kThreadsY][k];
#pragma unroll
      for (int j = 0; j < TN; ++j) b[j] = b_tile[k][x + j * kThreadsX];
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) sum[i][j] += a[i] * b[j];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < TM; ++i) {
#pragma unroll
    for (int j = 0; j < TN; ++j) {
      const int row = row0 + y + i * kThreadsY, col = col0 + x + j * kThreadsX;
      if (row < n && col < n) C[static_cast<size_t>(row) * n + col] = sum[i][j];
    }
  }
}

// ---- vectors ------------------------------------------------------------------------------------

// Four numbers from `from` (row-major, n x n, at `row`, `col`), zeros where that is outside. With
// kAligned (n a multiple of 4) they are one 16-byte load, all inside or all outside.
template <bool kAligned>
__device__ float4 load4(const float* from, int row, int col, int n) {
  float4 value = make_float4(0, 0, 0, 0);
  const float* at = from + static_cast<size_t>(row) * n + col;
  if constexpr (kAligned) {
    if (row < n && col < n) value = *reinterpret_cast<const float4*>(at);
  } else if (row < n) {
    if (col < n) value.x = at[0];
    if (col + 1 < n) value.y = at[1];
    if (col + 2 < n) value.z = at[2];
    if (col + 3 < n) value.w = at[3];
  }
  return value;
}

template <bool kAligned>
__device__ void store4(float* to, int row, int col, int n, const float* value) {
  float* at = to + static_cast<size_t>(row) * n + col;
  if constexpr (kAligned) {
    if (row < n && col < n)
      *reinterpret_cast<float4*>(at) = *reinterpret_cast<const float4*>(value);
  } else {
    for (int i = 0; i < 4; ++i) {
      if (row < n && col + i < n) at[i] = value[i];
    }
  }
}

// As above, but everything moves 16 bytes at a time. A thread's columns come in groups of four,
// 4 x .. 4 x + 3 and the same 64 further right, so that one load reads four elements of a row of
// b_tile. For four elements of a column of A to lie next to each other as well, a_tile is stored
// transposed: a_tile[k][row]. Its rows are 4 floats longer than their data: a warp writes 16 rows
// at k and at k + 4, which would otherwise share 16 banks. Per step of k that is 4 loads instead of
// 16. The minimum of 2 blocks per multiprocessor keeps the compiler to 128 registers, half of a
// multiprocessor's 65536 for 256 threads.
template <int BM, int BN, int BK, int TM, int TN, bool kAligned>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), 2)
    matmul_vectors(const float* A, const float* B, float* C, int n) {
  constexpr int kThreadsX = BN / TN, kThreadsY = BM / TM, kThreads = kThreadsX * kThreadsY;
  __shared__ __align__(16) float a_tile[BK][BM + 4];
  __shared__ __align__(16) float b_tile[BK][BN];
  const int x = threadIdx.x % kThreadsX, y = threadIdx.x / kThreadsX;
  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
  float sum[TM][TN] = {};
  for (int k0 = 0; k0 < n; k0 += BK) {
#pragma unroll
    for (int i = threadIdx.x; i < BM * BK / 4; i += kThreads) {
      const int row = i / (BK / 4), k = i % (BK / 4) * 4;
      const float4 a = load4<kAligned>(A, row0 + row, k0 + k, n);
      a_tile[k][row] = a.x;
      a_tile[k + 1][row] = a.y;
      a_tile[k + 2][row] = a.z;
      a_tile[k + 3][row] = a.w;
    }
#pragma unroll
    for (int i = threadIdx.x; i < BK * BN / 4; i += kThreads) {
      const int k = i / (BN / 4), col = i % (BN / 4) * 4;
      *reinterpret_cast<float4*>(&b_tile[k][col]) = load4<kAligned>(B, k0 + k, col0 + col, n);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      float a[TM], b[TN];
#pragma unroll
      for (int i = 0; i < TM; i += 4) {
        *reinterpret_cast<float4*>(&a[i]) =
            *reinterpret_cast<const float4*>(&a_tile[k][4 * y + i * kThreadsY]);
      }
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        *reinterpret_cast<float4*>(&b[j]) =
            *reinterpret_cast<const float4*>(&b_tile[k][4 * x + j * kThreadsX]);
      }
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) sum[i][j] += a[i] * b[j];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < TM; ++i) {
#pragma unroll
    for (int j = 0; j < TN; j += 4) {
      const int row = row0 + 4 * y + i / 4 * 4 * kThreadsY + i % 4;
      store4<kAligned>(C, row, col0 + 4 * x + j * kThreadsX, n, &sum[i][j]);
    }
  }
}

// ---- async --------------------------------------------------------------------------------------

// So far loading and computing took turns: between the two barriers of a step the arithmetic units
// wait for memory. Here kStages pairs of tiles are in flight. While one is multiplied, the copies
// of the next kStages - 1 are on their way: cp.async moves them to shared memory without a register
// in between, and without waiting. One barrier a step is enough: it says both that the oldest pair
// has arrived and that nobody reads the one before it any more, whose place the next copies take.
// The copies of a step are closed as a group (commit), and wait<n> waits until all but the newest n
// groups have arrived. Where no step is left an empty group is closed, so that the count is right.
//
// What is left to lose is instructions that are not multiply-adds, and cycles without an
// instruction:
//   - A thread owns 8 x 16 elements, in 128 registers: per step of k it reads 8 + 16 numbers from
//     shared memory, 6 loads, for 128 multiply-adds. The threads of a warp stand 4 x 8, so that
//     they read 4 groups of rows and 8 of columns, without a bank conflict.
//   - While one k is multiplied, the numbers of the next one are loaded, into a second set of
//     registers.
//   - Multiply-adds go along a row of `sum` and back along the next: two in a row share an operand,
//     which the register file then does not have to deliver twice.
//   - Where to copy from is worked out once, as an offset per copy, and a step only moves on two
//     pointers. Nothing checks for the edges of the matrix: a row or column outside is replaced by
//     the last one inside, since what it contributes to is never stored. Only along k, which is
//     summed over, zeros are needed.
template <int BM_, int BN_, int BK_, int TM_, int TN_, int kStages_, bool kAligned_>
struct AsyncTile {
  static constexpr int BM = BM_, BN = BN_, BK = BK_, TM = TM_, TN = TN_, kStages = kStages_;
  static constexpr int kThreadsX = BN / TN, kThreadsY = BM / TM, kThreads = kThreadsX * kThreadsY;
  static constexpr bool kAligned = kAligned_;
  // kStages tiles of A, transposed, then as many of B.
  static constexpr int kStrideA = BM + 4, kTileA = BK * kStrideA, kTileB = BK * BN;
  static constexpr int kSharedBytes = kStages * (kTileA + kTileB) * 4;

  // Where a thread stands.
  static __device__ int x() {
    return threadIdx.x / 32 % (kThreadsX / 8) * 8 + threadIdx.x % 8;
  }
  static __device__ int y() { return threadIdx.x / 32 / (kThreadsX / 8) * 4 + threadIdx.x % 32 / 8; }
};

// Adds to the tile of C at (row0, col0) what the steps from `begin` to `end` contribute.
template <class Tile>
__device__ void add_steps(float (&sum)[Tile::TM][Tile::TN], float* tiles, const float* A,
                          const float* B, int n, int row0, int col0, int begin, int end) {
  constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, TM = Tile::TM, TN = Tile::TN;
  constexpr int kStages = Tile::kStages, kThreads = Tile::kThreads, kStrideA = Tile::kStrideA;
  float* a_tiles = tiles;
  float* b_tiles = tiles + kStages * Tile::kTileA;

  // A is transposed on the way, so it is copied by single floats; B by kWidth. At once the block's
  // threads cover kRowsA rows of the tile of A, and kRowsB of the tile of B.
  constexpr int kWidth = Tile::kAligned ? 4 : 1;
  constexpr int kRowsA = kThreads / BK, kRowsB = kThreads / (BN / kWidth);
  const int a_row = threadIdx.x / BK, a_k = threadIdx.x % BK;
  const int b_k = threadIdx.x / (BN / kWidth), b_col = threadIdx.x % (BN / kWidth) * kWidth;
  const float* a_from = A + static_cast<size_t>(row0) * n + begin * BK + a_k;
  const float* b_from =
      B + static_cast<size_t>(begin * BK + b_k) * n + min(col0 + b_col, n - kWidth);
  int a_offset[BM / kRowsA];
#pragma unroll
  for (int i = 0; i < BM / kRowsA; ++i) {
    a_offset[i] = (min(row0 + a_row + i * kRowsA, n - 1) - row0) * n;
  }
  const auto copy_tiles = [&](int step) {
    const int stage = step % kStages, k_left = n - step * BK;
    float* a_to = a_tiles + stage * Tile::kTileA + a_k * kStrideA + a_row;
    float* b_to = b_tiles + stage * Tile::kTileB + b_k * BN + b_col;
#pragma unroll
    for (int i = 0; i < BM / kRowsA; ++i) {
      copy_async<4>(a_to + i * kRowsA, a_from + a_offset[i], a_k < k_left);
    }
#pragma unroll
    for (int i = 0; i < BK / kRowsB; ++i) {
      copy_async<4 * kWidth>(b_to + i * kRowsB * BN, b_from + i * kRowsB * n,
                             b_k + i * kRowsB < k_left);
    }
    a_from += BK;
    b_from += static_cast<size_t>(BK) * n;
  };

  for (int step = begin; step < begin + kStages - 1; ++step) {
    if (step < end) copy_tiles(step);
    copy_async_commit();
  }
  float a[2][TM], b[2][TN];  // of this k, and of the next
  for (int step = begin; step < end; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    const float* a_tile = a_tiles + step % kStages * Tile::kTileA + 4 * Tile::y();
    const float* b_tile = b_tiles + step % kStages * Tile::kTileB + 4 * Tile::x();
    const auto load = [&](int k) {
#pragma unroll
      for (int i = 0; i < TM; i += 4) {
        *reinterpret_cast<float4*>(&a[k % 2][i]) =
            *reinterpret_cast<const float4*>(a_tile + k * kStrideA + i * Tile::kThreadsY);
      }
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        *reinterpret_cast<float4*>(&b[k % 2][j]) =
            *reinterpret_cast<const float4*>(b_tile + k * BN + j * Tile::kThreadsX);
      }
    };
    load(0);
    if (step + kStages - 1 < end) copy_tiles(step + kStages - 1);
    copy_async_commit();
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      if (k + 1 < BK) load(k + 1);
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int forth = 0; forth < TN; ++forth) {
          const int j = i % 2 == 0 ? forth : TN - 1 - forth;
          sum[i][j] += a[k % 2][i] * b[k % 2][j];
        }
      }
    }
  }
}

template <class Tile>
__device__ void store_sums(const float (&sum)[Tile::TM][Tile::TN], float* C, int n, int row0,
                           int col0) {
#pragma unroll
  for (int i = 0; i < Tile::TM; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::TN; j += 4) {
      const int row = row0 + 4 * Tile::y() + i / 4 * 4 * Tile::kThreadsY + i % 4;
      store4<Tile::kAligned>(C, row, col0 + 4 * Tile::x() + j * Tile::kThreadsX, n, &sum[i][j]);
    }
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    matmul_async(const float* A, const float* B, float* C, int n) {
  extern __shared__ __align__(16) float tiles[];
  const int row0 = blockIdx.y * Tile::BM, col0 = blockIdx.x * Tile::BN;
  float sum[Tile::TM][Tile::TN] = {};
  add_steps<Tile>(sum, tiles, A, B, n, row0, col0, 0, (n + Tile::BK - 1) / Tile::BK);
  store_sums<Tile>(sum, C, n, row0, col0);
}

// ---- any shape ----------------------------------------------------------------------------------

// Steps `begin` to `end` of the tile of C number `tile`.
struct Piece {
  int tile, begin, end;
};

// Which block does what. Whole tiles are dealt out in turn as long as there are enough for two more
// rounds. The steps of those that are left are a line, cut into as many pieces as there are blocks.
template <class Tile>
struct Timetable {
  // Tiles of one kind, rows x cols of them; what a step costs, in tiles of 64 x 64.
  struct Kind {
    int row, col, rows, cols, cost;
  };
  Kind kinds[4];  // full ones, those at the right and at the lower edge, the one in the corner
  int steps, whole, line;

  Timetable(int n, int blocks) : steps((n + Tile::BK - 1) / Tile::BK) {
    constexpr int BM = Tile::BM, BN = Tile::BN;
    const int rows = (n + BM / 2 - 1) / BM, cols = (n + BN / 2 - 1) / BN;
    const int low = n > rows * BM, narrow = n <= cols * BN ? 0 : n <= cols * BN + BN / 4 ? 1 : 2;
    kinds[0] = {0, 0, rows, cols, 8};
    kinds[1] = {0, cols, rows, 1, 2 * narrow};
    kinds[2] = {rows, 0, 1, cols, 4 * low};
    kinds[3] = {rows, cols, 1, 1, low * narrow};
    whole = rows * cols > 2 * blocks ? (rows * cols / blocks - 1) * blocks : 0;
    line = -whole * 8 * steps;
    for (const Kind& kind : kinds) line += kind.rows * kind.cols * kind.cost * steps;
  }

  // Where the piece of the line of block number `block` begins, and that of the one before ends.
  __device__ Piece start(int block, int blocks) const {
    int position = static_cast<int>(static_cast<int64_t>(line) * block / blocks);
    int first = whole, skip = whole;
    for (const Kind& kind : kinds) {
      const int tiles = kind.rows * kind.cols - skip, cost = kind.cost * steps;
      skip = 0;
      if (position < tiles * cost) {
        const int tile = position / cost;
        return {first + tile, (position - tile * cost) / kind.cost, steps};
      }
      position -= tiles * cost;
      first += tiles;
    }
    return {first, 0, 0};
  }
  struct Place {
    int row, col;
  };
  __device__ Place place(int tile) const {
    for (const Kind& kind : kinds) {
      if (tile < kind.rows * kind.cols) {
        return {(kind.row + tile / kind.cols) * Tile::BM, (kind.col + tile % kind.cols) * Tile::BN};
      }
      tile -= kind.rows * kind.cols;
    }
    return {0, 0};
  }
};

template <class Tile>
struct Exchange {
  using Flag = cuda::atomic_ref<unsigned, cuda::thread_scope_device>;
  unsigned* ready;
  float* partial;

  __device__ float4* sums(int block) const {
    return reinterpret_cast<float4*>(partial) +
           static_cast<size_t>(block) * (128 * 256 / 4) + threadIdx.x;
  }
  __device__ void give(const float (&sum)[Tile::TM][Tile::TN], int block) const {
#pragma unroll
    for (int i = 0; i < Tile::TM; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::TN; j += 4) {
        __stcg(sums(block) + (i * Tile::TN + j) / 4 * Tile::kThreads,
               make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]));
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) Flag(ready[block]).store(1, cuda::memory_order_release);
  }
  __device__ void add(float (&sum)[Tile::TM][Tile::TN], int block) const {
    if (threadIdx.x == 0) {
      Flag flag(ready[block]);
      while (flag.load(cuda::memory_order_acquire) == 0) continue;
      flag.store(0, cuda::memory_order_relaxed);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Tile::TM; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::TN; j += 4) {
        const float4 more = __ldcg(sums(block) + (i * Tile::TN + j) / 4 * Tile::kThreads);
        sum[i][j] += more.x;
        sum[i][j + 1] += more.y;
        sum[i][j + 2] += more.z;
        sum[i][j + 3] += more.w;
      }
    }
  }
};

template <class Tile>
__device__ void multiply_piece(float* tiles, const float* A, const float* B, float* C, int n,
                               int row0, int col0, int begin, int end, int block, int last,
                               unsigned* ready, float* partial) {
  if constexpr (Tile::TM == 8) {
    if constexpr (Tile::TN > 4) {
      if (col0 + Tile::BN / 2 >= n) {
        using Narrow = AsyncTile<Tile::BM, Tile::BN / 2, Tile::BK, Tile::TM, Tile::TN / 2,
                                 Tile::kStages, Tile::kAligned>;
        multiply_piece<Narrow>(tiles, A, B, C, n, row0, col0, begin, end, block, last, ready,
                               partial);
        return;
      }
    }
    if (row0 + Tile::BM / 2 >= n) {
      using Low = AsyncTile<Tile::BM / 2, Tile::BN, Tile::BK, Tile::TM / 2, Tile::TN,
                            Tile::kStages, Tile::kAligned>;
      multiply_piece<Low>(tiles, A, B, C, n, row0, col0, begin, end, block, last, ready, partial);
      return;
    }
  }
  float sum[Tile::TM][Tile::TN] = {};
  add_steps<Tile>(sum, tiles, A, B, n, row0, col0, begin, end);
  const Exchange<Tile> exchange{ready, partial};
  if (begin > 0) {
    exchange.give(sum, block);
  } else {
    for (int other = block + 1; other <= last; ++other) exchange.add(sum, other);
    store_sums<Tile>(sum, C, n, row0, col0);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    matmul_any_shape(const float* A, const float* B, float* C, int n, Timetable<Tile> table,
                     unsigned* ready, float* partial) {
  extern __shared__ __align__(16) float tiles[];
  const int block = blockIdx.x, blocks = gridDim.x;
  Piece next = table.start(block, blocks);
  const Piece stop = table.start(block + 1, blocks);
  int whole = block;
  while (true) {
    Piece piece;
    int last = block;
    if (whole < table.whole) {
      piece = {whole, 0, table.steps};
      whole += blocks;
    } else {
      if (next.tile > stop.tile || (next.tile == stop.tile && next.begin >= stop.begin)) break;
      piece = {next.tile, next.begin, next.tile < stop.tile ? table.steps : stop.begin};
      next = {next.tile + 1, 0, 0};
      // Who has the rest of the tile?
      for (int done = piece.end; done < table.steps; ++last) {
        const Piece end = table.start(last + 2, blocks);
        done = end.tile > piece.tile ? table.steps : end.begin;
      }
    }
    const auto place = table.place(piece.tile);
    __syncthreads();
    multiply_piece<Tile>(tiles, A, B, C, n, place.row, place.col, piece.begin, piece.end, block,
                         last, ready, partial);
  }
}

// -------------------------------------------------------------------------------------------------

// Blocks of BM x BN that cover an n x n matrix.
template <int BM, int BN>
dim3 tiles_of(int64_t n) {
  return dim3(static_cast<unsigned>((n + BN - 1) / BN), static_cast<unsigned>((n + BM - 1) / BM));
}

// The kernels for which it matters whether rows are 16-byte aligned.
template <bool kAligned, int kStages>
void add_vector_kernels(Problem& square, Buffer<float> A, Buffer<float> B, Buffer<float> C, int n,
                        const Device& device) {
  square
      .kernel("vectors", Role::ours,
              [=] {
                matmul_vectors<128, 128, 8, 8, 8, kAligned>
                    <<<tiles_of<128, 128>(n), 256>>>(A, B, C, n);
              })
      .resources(matmul_vectors<128, 128, 8, 8, 8, kAligned>, 256);

  using Tile = AsyncTile<128, 256, 16, 8, 16, kStages, kAligned>;
  allow_shared_bytes(matmul_async<Tile>, Tile::kSharedBytes);
  square
      .kernel("async", Role::ours,
              [=] {
                matmul_async<Tile>
                    <<<tiles_of<Tile::BM, Tile::BN>(n), Tile::kThreads, Tile::kSharedBytes>>>(
                        A, B, C, n);
              })
      .resources(matmul_async<Tile>, Tile::kThreads, Tile::kSharedBytes);

  allow_shared_bytes(matmul_any_shape<Tile>, Tile::kSharedBytes);
  const int blocks =
      resident_blocks(matmul_any_shape<Tile>, Tile::kThreads, Tile::kSharedBytes, device);
  const auto partial = square.workspace<float>(static_cast<size_t>(blocks) * Tile::BM * Tile::BN);
  const auto ready = square.workspace<unsigned>(blocks);
  const Timetable<Tile> table(n, blocks);
  square
      .kernel("any shape", Role::ours,
              [=] {
                matmul_any_shape<Tile><<<blocks, Tile::kThreads, Tile::kSharedBytes>>>(
                    A, B, C, n, table, ready, partial);
              })
      .resources(matmul_any_shape<Tile>, Tile::kThreads, Tile::kSharedBytes);
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "2_matmul_sharedmem",
                 .title = "C = A B from shared memory and registers, in true fp32",
                 .n_meaning = "the matrices are N x N",
                 .n_gpu = 4096,
                 .n_cpu = 256});
  const int64_t n = lesson.n();

  Cublas blas;
  SquareMatmul<float> matmul(lesson, blas, "square", "fp32", Rate::fp32,
                             dot_tolerance(n, kRoundoffFp32, kRoundoffFp32));
  Problem& square = matmul.problem;
  const auto A = matmul.A, B = matmul.B, C = matmul.C;

  square.kernel("cuBLAS fp32", Role::library, [&] {
    const float one = 1, zero = 0;  // row-major: B and A swapped, see lesson 4
    CUBLAS_CHECK(
        cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, B, n, A, n, &zero, C, n));
  });
  square
      .kernel("tile", Role::ours,
              [&] { matmul_tile<<<tiles_of<kTile, kTile>(n), dim3(kTile, kTile)>>>(A, B, C, n); })
      .resources(matmul_tile, kTile * kTile);
  square
      .kernel(
          "registers", Role::ours,
          [&] { matmul_registers<128, 128, 8, 8, 8><<<tiles_of<128, 128>(n), 256>>>(A, B, C, n); })
      .resources(matmul_registers<128, 128, 8, 8, 8>, 256);
  const bool aligned = n % 4 == 0;
  if (lesson.device().shared_bytes >= 96 << 10) {
    aligned ? add_vector_kernels<true, 3>(square, A, B, C, n, lesson.device())
            : add_vector_kernels<false, 3>(square, A, B, C, n, lesson.device());
  } else {  // compute capability 7.5 has 64 KB
    aligned ? add_vector_kernels<true, 2>(square, A, B, C, n, lesson.device())
            : add_vector_kernels<false, 2>(square, A, B, C, n, lesson.device());
  }

  square.compare("registers", "tile", "From one element a thread to 8 x 8: % times faster.");
  square.compare("async", "vectors", "Loading while computing: % times faster.");
  square.compare("async", "cuBLAS fp32", "The last kernel runs at % of cuBLAS's rate.");
  return lesson.run();
}
