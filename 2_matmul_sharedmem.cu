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
// shared memory, multiplies the two, and goes on. For each k, a BM x BN tile of C then reads BM +
// BN numbers from memory for BM * BN multiply-adds: the larger the tile, the less memory matters.
//
// One level further in the same argument holds again: a thread that owns TM x TN elements of C
// reads TM + TN numbers from shared memory for TM * TN multiply-adds. Four kernels follow that
// path, and a fifth one is fast where N does not suit the tiles. Each builds on the one above it:
//
//     tile        32 x 32 tiles, a thread owns one element     2 shared reads per multiply-add
//     registers   128 x 128 tiles, a thread owns 8 x 8         1/4
//     vectors     the same, moved 16 bytes at a time           1/4, by 1/4 of the instructions
//     async       128 x 256 tiles, a thread owns 8 x 16, and   3/16
//                 the next tiles arrive while these are multiplied
//     any shape   tiles of 64 x 128 or smaller, a thread owns  1/4 to 3/8
//                 8 x 8 or 8 x 4; the last tiles are divided
//                 along k, so that all blocks end together
//
// No tensor cores here: every multiply-add is true fp32. Tensor cores are lesson 3.

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "checks/product/square_matmul.h"
#include "primitives/async_copy.cuh"
#include "primitives/launch.h"
#include "primitives/spin.cuh"

using namespace checks;
using namespace primitives;

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
// leave its registers (the loops over i and j must unroll: registers have no addresses). With tiles
// of this size A and B are each read from memory N / 128 times instead of N / 32.
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

// Stores four numbers in row `row` of `to`, from column `col` on, without those that are outside.
// kAligned: in one store of 16 bytes. If not, they may go to columns that are kApart apart.
template <bool kAligned, int kApart = 1>
__device__ void store4(float* to, int row, int col, int n, const float* value) {
  static_assert(!kAligned || kApart == 1);
  float* at = to + static_cast<size_t>(row) * n + col;
  if constexpr (kAligned) {
    if (row < n && col < n)
      *reinterpret_cast<float4*>(at) = *reinterpret_cast<const float4*>(value);
  } else {
    for (int i = 0; i < 4; ++i) {
      if (row < n && col + kApart * i < n) at[kApart * i] = value[i];
    }
  }
}

// As in `registers`, but everything moves 16 bytes at a time. A thread's columns come in groups of
// four, 4 x .. 4 x + 3 and the same 64 further right, so that one load reads four elements of a row
// of b_tile. For four elements of a column of A to lie next to each other as well, a_tile is stored
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
// wait for memory. Here shared memory has room for kStages pairs. While one is multiplied, the
// copies of the next kStages - 1 are on their way: cp.async moves them to shared memory without a
// register in between, and without waiting. One barrier a step is enough: it says both that the
// oldest pair has arrived and that nobody reads the one before it any more, whose place the next
// copies take. The copies of a step are closed as a group (commit), and wait<n> waits until all but
// the newest n groups have arrived. Where no step is left an empty group is closed, so that the
// count is right.
//
// What still costs time are instructions that are not multiply-adds, and cycles in which no
// instruction starts:
//   - A thread owns 8 x 16 elements, in 128 registers: per step of k it reads 8 + 16 numbers from
//     shared memory, 6 loads, for 128 multiply-adds. The threads of a warp stand 4 x 8, so that
//     they read 4 groups of rows and 8 of columns, without a bank conflict.
//   - While one k is multiplied, the numbers of the next one are loaded, into a second set of
//     registers.
//   - Multiply-adds go along a row of `sum` and back along the next: two in a row share an operand,
//     which the register file then does not have to deliver twice.
//   - Where to copy from is worked out once, and a step only moves on two pointers. Nothing checks
//     for the edges of the matrix: a row or column outside is replaced by the last one inside,
//     since what it contributes to is never stored. Only along k, which is summed over, zeros are
//     needed. (It takes long if many threads copy the same number. Tiles with slices, see `any
//     shape`, therefore replace a column of B beyond the right edge by one as far from the left
//     edge.)
template <int BM_, int BN_, int BK_, int TM_, int TN_, int kStages_, bool kAligned_,
          int kSlices_ = 1, int kResident_ = 1>
struct AsyncTile {
  static constexpr int BM = BM_, BN = BN_, BK = BK_, TM = TM_, TN = TN_, kStages = kStages_;
  static constexpr bool kAligned = kAligned_;   // B, or its copy, has rows aligned to 16 bytes
  static constexpr int kSlices = kSlices_;      // groups of threads that divide each step's k
  static constexpr int kResident = kResident_;  // blocks for which a multiprocessor has registers
  static constexpr int kThreadsX = BN / TN, kThreadsY = BM / TM;
  static constexpr int kSliceThreads = kThreadsX * kThreadsY, kThreads = kSlices * kSliceThreads;
  // In shared memory are kStages tiles of A, transposed, then kStages of B.
  static constexpr int kStrideA = BM + 4, kTileA = BK * kStrideA, kTileB = BK * BN;
  static constexpr int kSharedBytes = kStages * (kTileA + kTileB) * static_cast<int>(sizeof(float));

  // Which slice this thread belongs to, and where it stands among the others of that.
  static __device__ int slice() { return kSlices == 1 ? 0 : threadIdx.x / kSliceThreads; }
  static __device__ int warp() {
    return (kSlices == 1 ? threadIdx.x : threadIdx.x % kSliceThreads) / 32;
  }
  static __device__ int x() { return warp() % (kThreadsX / 8) * 8 + threadIdx.x % 8; }
  static __device__ int y() { return warp() / (kThreadsX / 8) * 4 + threadIdx.x % 32 / 8; }
};

// What is multiplied. From a row of B to the next it is `pitch` numbers.
struct Matrices {
  const float *A, *B;
  float* C;
  int n, pitch;
};

// Multiplies steps `begin` to `end` of the tile of C at (row0, col0); finish(sum) says what becomes
// of a thread's sums.
template <class Tile, class Finish>
__device__ void multiply_steps(float* tiles, const Matrices& of, int row0, int col0, int begin,
                               int end, Finish finish) {
  const int n = of.n, pitch = of.pitch;
  const int x = Tile::x(), y = Tile::y();
  constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, TM = Tile::TM, TN = Tile::TN;
  constexpr int kStages = Tile::kStages, kThreads = Tile::kThreads, kStrideA = Tile::kStrideA;
  float* a_tiles = tiles;
  float* b_tiles = tiles + kStages * Tile::kTileA;

  // A is transposed on the way, so it is copied by single floats; B by kWidth. At once the block's
  // threads cover 16 columns of kRowsA rows of the tile of A, and kRowsB rows of the tile of B.
  constexpr int kWidth = Tile::kAligned ? 4 : 1;
  constexpr int kRowsA = kThreads / 16, kRowsB = kThreads / (BN / kWidth);
  const int a_row = threadIdx.x / 16, a_k = threadIdx.x % 16;
  const int b_k = threadIdx.x / (BN / kWidth), b_col = threadIdx.x % (BN / kWidth) * kWidth;
  const float* a_from = of.A + static_cast<size_t>(row0) * n + begin * BK + a_k;
  const int b_at = Tile::kSlices > 1 ? (col0 + b_col) % pitch : min(col0 + b_col, pitch - kWidth);
  const float* b_from = of.B + static_cast<size_t>(begin * BK + b_k) * pitch + b_at;
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
#pragma unroll
      for (int k = 0; k < BK; k += 16) {
        copy_async<4>(a_to + i * kRowsA + k * kStrideA, a_from + a_offset[i] + k, a_k + k < k_left);
      }
    }
#pragma unroll
    for (int i = 0; i < BK / kRowsB; ++i) {
      copy_async<4 * kWidth>(b_to + i * kRowsB * BN, b_from + i * kRowsB * pitch,
                             b_k + i * kRowsB < k_left);
    }
    a_from += BK;
    b_from += static_cast<size_t>(BK) * pitch;
  };

  for (int step = begin; step < begin + kStages - 1; ++step) {
    if (step < end) copy_tiles(step);
    copy_async_commit();
  }
  float sum[TM][TN] = {};
  float a[2][TM], b[2][TN];                    // of this k, and of the next
  constexpr int kDepth = BK / Tile::kSlices;   // so many k of each step belong to one slice
  const int first_k = kDepth * Tile::slice();  // where those of this thread's slice begin
  for (int step = begin; step < end; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    const float* a_tile = a_tiles + step % kStages * Tile::kTileA + first_k * kStrideA + 4 * y;
    const float* b_tile = b_tiles + step % kStages * Tile::kTileB + first_k * BN + 4 * x;
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
    for (int k = 0; k < kDepth; ++k) {
      if (k + 1 < kDepth) load(k + 1);
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
  finish(sum);
}

// Copied B has its columns in another order (see align_rows): neighbours in `sum` are then so many
// columns of C apart.
constexpr int kColumnsApart = 8;

// Stores a thread's sums. Of a tile with several slices only kOwn of the TM rows are left to the
// thread. kAligned: C's rows are aligned to 16 bytes. (Tile::kAligned says so of B's.)
template <class Tile, bool kAligned, int kOwn>
__device__ void store_sums(const float (&sum)[kOwn][Tile::TN], const Matrices& to, int row0,
                           int col0) {
  constexpr int kApart = Tile::kAligned && !kAligned ? kColumnsApart : 1;
  const int x = Tile::x(), y = Tile::y();
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    const int i = own + kOwn * Tile::slice();
#pragma unroll
    for (int j = 0; j < Tile::TN; j += 4) {
      const int row = row0 + 4 * y + i / 4 * 4 * Tile::kThreadsY + i % 4;
      const int col = col0 + x / kApart * 4 * kApart + x % kApart + j * Tile::kThreadsX;
      store4<kAligned, kApart>(to.C, row, col, to.n, &sum[own][j]);
    }
  }
}

template <class Tile, bool kAligned>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    matmul_async(const float* A, const float* B, float* C, int n) {
  extern __shared__ __align__(16) float tiles[];
  const Matrices of{A, B, C, n, n};
  const int row0 = blockIdx.y * Tile::BM, col0 = blockIdx.x * Tile::BN;
  const int steps = (n + Tile::BK - 1) / Tile::BK;
  multiply_steps<Tile>(tiles, of, row0, col0, 0, steps,
                       [&](const auto& sum) { store_sums<Tile, kAligned>(sum, of, row0, col0); });
}

// ---- any shape ----------------------------------------------------------------------------------

// In `async` each block has one tile, of 128 x 256, and each multiprocessor one block at a time. If
// N is 3000, there are 24 x 12 tiles: 132 multiprocessors compute 264 in two rounds. In a third one
// 24 multiprocessors work and 108 wait. Here the steps of the last tiles are put in a line instead.
// Each block gets an equal range of it, which may begin or end in the middle of a tile:
//
//     block 0 |--- tile 0 ---|-- tile 1, first steps
//     block 1                   tile 1, last steps --|--- tile 2 ---|-- tile 3 ...
//
// A block that begins inside of a tile hands its sums through memory to the one that has the tile's
// first steps. That one adds them, always in the same order, and stores the tile. Three more things
// would cost time at some N, and do not here:
//   - Large tiles. N = 4097 needs a 33rd row of tiles for one row of C. With 128 x 256 that costs
//     as much as 128 rows. And only one block with such a tile fits on a multiprocessor, but two
//     with 64 x 128: one multiplies while the other waits at a barrier.
//   - Few tiles. N = 512 has only 32 tiles of 64 x 128, but 64 of 64 x 64. There each of 256
//     threads would own 4 x 4 elements, with twice the reads for a multiply-add. So a thread owns
//     8 x 8 elements, and 64 threads are enough. A block has four such groups, called slices: each
//     multiplies a quarter of the k of every step, and at the end they add up their sums through
//     shared memory. Tiles of 64 x 128 have two slices. N = 256 takes tiles of 32 x 32, with eight
//     slices and 8 x 4 elements a thread. Which tiles cost the least time is estimated (see
//     Timetable::estimate).
//   - Rows that are not aligned to 16 bytes. If N is large, another kernel first copies B into rows
//     that are: it moves N^2 numbers, for N^3 multiply-adds. If N is small, that launch would take
//     longer than it saves, and B is copied by single floats. A always is.

// A piece is what a block does at a time: of tile number `tile` the steps from `begin` up to, not
// including, `end`. If `begin` is 0, the blocks after this one, up to number `last`, do the tile's
// other steps.
struct Piece {
  int tile, begin, end, last;
};

// Which block does what. If the number of tiles is a multiple of that of blocks, no tile is shared.
// Else each block first takes whole tiles, while tiles for two more rounds are left: blocks at work
// together then read neighbouring tiles at the same k. The steps of the other tiles form a line,
// one tile after the other. Each block gets one range of the line, and all ranges are equally long.
// A piece is the part of a range that is inside of one tile.
template <class Tile>
struct Timetable {
  static constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK;

  struct Point {  // a place on the line
    int tile, step;
  };
  int cols;                // tiles beside each other
  int steps;               // of a tile
  int whole;               // so many tiles are not shared, those with the lowest numbers
  int blocks, each, rest;  // a block has `each` steps of the line, the first `rest` one more
  double microseconds;     // that this should take

  // At most `capacity` blocks run at the same time, on `sms` multiprocessors. Either each tile gets
  // the same number of blocks, or each multiprocessor does.
  Timetable(int n, int sms, int capacity)
      : cols((n + BN - 1) / BN),
        steps((n + BK - 1) / BK),
        microseconds(std::numeric_limits<double>::infinity()) {
    const int tiles = (n + BM - 1) / BM * cols;
    const auto consider = [&](int count) {
      const int pieces = (count + tiles - 1) / tiles;
      // No range reaches from one tile into the next. (If one does, a tile may have a piece more.)
      const bool even = count % tiles == 0 && steps % (count / tiles) == 0;
      const double of_each = std::ceil(1.0 * tiles * steps / count);
      const double time = estimate(of_each, (count + sms - 1) / sms, pieces + !even, even);
      if (time < microseconds) blocks = count, microseconds = time;
    };
    for (int i = 1; i <= steps && i * tiles <= capacity; ++i) consider(i * tiles);
    const auto most = std::min<int64_t>(capacity, int64_t{tiles} * steps);
    for (int i = 1; i * sms <= most; ++i) consider(i * sms);
    whole = tiles % blocks == 0 ? tiles : std::max(0, tiles / blocks - 1) * blocks;
    const int line = (tiles - whole) * steps;
    each = line / blocks, rest = line % blocks;
  }

  // Estimates how many microseconds a launch takes if each block has `work` steps, `crowd` blocks
  // share a multiprocessor, and at most `pieces` blocks share a tile. `even`: see above. That is
  //   - 5 to begin and to end;
  //   - for each step 0.33, and for each block of the multiprocessor 0.01, 0.31 per 64 x 64 x 16
  //     multiply-adds, and 0.11 per 1024 copies more if B is copied by single floats (of four such
  //     copies three would not be needed with 16 bytes a copy);
  //   - if tiles are shared, for each block of the multiprocessor 0.7, 0.6 per piece and 1 per
  //     10000 elements of a tile, to hand over sums and to add them. That is 10 % more if not
  //     `even`: a block that waits for another one's sums may keep a third one waiting.
  // The numbers were fitted to 1600 measurements on an H200. For 127 N from 100 to 8192 the tiles
  // that this chooses take 1 % longer than the fastest ones, on average.
  static double estimate(double work, int crowd, int pieces, bool even) {
    constexpr double kUnits = BM * BN * BK / 65536.0, kCopies = BK * BN * 0.75 / 1024;
    const double each = 0.01 + 0.31 * kUnits + (Tile::kAligned ? 0 : 0.11 * kCopies);
    const double handover = crowd * (0.7 + 0.6 * pieces + BM * BN / 10000.0) * (even ? 1 : 1.1);
    return 5 + work * (0.33 + crowd * each) + (pieces > 1 ? handover : 0);
  }

  // Where the range of block number `block` begins, and that of the block before it ends.
  __device__ Point start(int block) const {
    const int position = block * each + min(block, rest);
    return {whole + position / steps, position % steps};
  }

  // What block number `block` does after i other pieces. Nothing: begin = end.
  __device__ Piece piece(int block, int i) const {
    const int tile = block + i * blocks;
    if (tile < whole) return {tile, 0, steps, block};
    const Point from = start(block), to = start(block + 1);
    i -= whole / blocks;
    Piece piece{from.tile + i, i > 0 ? 0 : from.step, steps, block};
    if (piece.tile == to.tile) piece.end = to.step;
    if (piece.tile > to.tile) piece.end = piece.begin;
    if (piece.begin == piece.end) return piece;
    // Who has the steps that follow?
    for (int end = piece.begin > 0 ? steps : piece.end; end < steps;) {
      const Point next = start(++piece.last + 1);
      end = next.tile == piece.tile ? next.step : steps;
    }
    return piece;
  }

  // The first row (y) and column (x) of a tile.
  __device__ int2 place(int tile) const { return {tile % cols * BN, tile / cols * BM}; }
};

constexpr int kAnyShapeThreads = 256;  // of a block, whatever its tile

// How sums get from one block to another. Each block has room for its sums in memory, and a flag
// that is 0 before and after every launch. A thread takes over the sums of the thread with the same
// number in the other block, 16 bytes at a time. A block may wait for another one, because the grid
// has only as many blocks as run at the same time.
template <int kBlockFloats>
struct BlockHandover {
  static constexpr size_t kFloats = kBlockFloats;  // of a block
  unsigned* ready;
  float* sums;

  template <int TM, int TN>
  __device__ void give(const float (&sum)[TM][TN]) const {
    float4* to = reinterpret_cast<float4*>(sums + kFloats * blockIdx.x) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
      for (int j = 0; j < TN; j += 4, to += kAnyShapeThreads) {
        __stcg(to, make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]));
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) GridCount(ready[blockIdx.x]).store(1, cuda::memory_order_release);
  }

  template <int TM, int TN>
  __device__ void add(float (&sum)[TM][TN], int block) const {
    if (threadIdx.x == 0) {
      const GridCount flag(ready[block]);
      wait_for_count(flag, 1, "the other block's sums");
      flag.store(0, cuda::memory_order_relaxed);
    }
    __syncthreads();
    const float4* from = reinterpret_cast<const float4*>(sums + kFloats * block) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
      for (int j = 0; j < TN; j += 4, from += kAnyShapeThreads) {
        const float4 more = __ldcg(from);
        sum[i][j] += more.x;
        sum[i][j + 1] += more.y;
        sum[i][j + 2] += more.z;
        sum[i][j + 3] += more.w;
      }
    }
  }
};

// Adds up the sums of the slices of a block. Threads kApart apart have sums of the same elements of
// C: one gives the upper half of its rows to the other, and gets the lower half of that one's. Then
// those half as far apart do so with what they have left. finish() gets the TM / kSlices rows that
// remain a thread's own.
template <int kSlices, int kApart, int TM, int TN, class Finish>
__device__ void add_slices(float* shared, float (&sum)[TM][TN], Finish finish) {
  if constexpr (kSlices == 1) {
    finish(sum);
  } else {
    const bool upper = threadIdx.x / kApart % 2 == 1;
    float own[TM / 2][TN];
    float4* at = reinterpret_cast<float4*>(shared);
    __syncthreads();  // All have read the last tiles, or the last halves.
#pragma unroll
    for (int i = 0; i < TM / 2; ++i) {
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        float give[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          give[e] = upper ? sum[i][j + e] : sum[i + TM / 2][j + e];
          own[i][j + e] = upper ? sum[i + TM / 2][j + e] : sum[i][j + e];
        }
        at[(i * TN + j) / 4 * kAnyShapeThreads + threadIdx.x] =
            make_float4(give[0], give[1], give[2], give[3]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TM / 2; ++i) {
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        const float4 more = at[(i * TN + j) / 4 * kAnyShapeThreads + (threadIdx.x ^ kApart)];
        own[i][j] += more.x;
        own[i][j + 1] += more.y;
        own[i][j + 2] += more.z;
        own[i][j + 3] += more.w;
      }
    }
    add_slices<kSlices / 2, kApart / 2>(shared, own, finish);
  }
}

// The piece of the tile at `place`. Not inlined: the compiler then finds registers for it as if it
// were alone.
template <class Tile, bool kAligned>
__device__ __noinline__ void multiply_piece(float* tiles, Matrices of,
                                            BlockHandover<Tile::BM * Tile::BN> handover, int2 place,
                                            Piece piece) {
  const auto finish = [&](auto& sum) {
    if (piece.begin > 0) return handover.give(sum);
    for (int other = blockIdx.x + 1; other <= piece.last; ++other) handover.add(sum, other);
    store_sums<Tile, kAligned>(sum, of, place.y, place.x);
  };
  multiply_steps<Tile>(tiles, of, place.y, place.x, piece.begin, piece.end, [&](auto& sum) {
    add_slices<Tile::kSlices, Tile::kThreads / 2>(tiles, sum, finish);
  });
}

// A block does its pieces, one after the other. Tiles of A and B reach shared memory as in `async`.
// Sums stay in registers, and only those of a shared tile go through memory. Ranges are equally
// long, so all blocks end at about the same time.
template <class Tile, bool kAligned>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    matmul_any_shape(Matrices of, Timetable<Tile> timetable,
                     BlockHandover<Tile::BM * Tile::BN> handover) {
  static_assert(Tile::kThreads == kAnyShapeThreads);
  extern __shared__ __align__(16) float tiles[];
  for (int i = 0;; ++i) {
    const Piece piece = timetable.piece(blockIdx.x, i);
    if (piece.begin == piece.end) return;
    const int2 place = timetable.place(piece.tile);
    __syncthreads();  // All have read the last tiles of the piece before.
    multiply_piece<Tile, kAligned>(tiles, of, handover, place, piece);
  }
}

constexpr int kAlignThreads = 256;

// Copies B into rows that are `pitch` apart and aligned; a block copies a row. It also changes the
// order of each 32 columns: number c of them goes to place 4 (c % 8) + c / 8. The reason is C,
// whose rows are not aligned either, so that a thread stores single floats. The four neighbours in
// shared memory that a thread multiplies are then columns of C that are 8 apart, and 8 lanes store
// 8 neighbours at a time. In the old order these 8 elements would be 4 columns apart.
__global__ void align_rows(const float* __restrict__ from, float* __restrict__ to, int n,
                           int pitch) {
  from += static_cast<size_t>(blockIdx.x) * n;
  to += static_cast<size_t>(blockIdx.x) * pitch;
  constexpr int kAtOnce = 8;  // loads of a thread that are under way together
  for (int first = threadIdx.x; first < n; first += kAtOnce * kAlignThreads) {
    float values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int col = first + i * kAlignThreads;
      values[i] = col < n ? from[col] : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int col = first + i * kAlignThreads;
      if (col < n) to[col / 32 * 32 + col % 8 * 4 + col / 8 % 4] = values[i];
    }
  }
}

// -------------------------------------------------------------------------------------------------

// Blocks of BM x BN that cover an n x n matrix.
template <int BM, int BN>
dim3 tiles_of(int64_t n) {
  return dim3(static_cast<unsigned>((n + BN - 1) / BN), static_cast<unsigned>((n + BM - 1) / BM));
}

// Adds `any shape` with the tiles that should be the fastest.
template <bool kAligned>
struct AnyShape {
  Problem& square;
  Buffer<float> A, B, C;
  int n;
  const Device& device;

  template <class... Tile>
  void add_fastest() const {
    const std::tuple<Timetable<Tile>...> plans(plan<Tile>()...);
    const double least = std::min({std::get<Timetable<Tile>>(plans).microseconds...});
    bool added = false;
    const auto add_if_best = [&](const auto& timetable) {
      if (!added && timetable.microseconds == least) add(timetable), added = true;
    };
    (add_if_best(std::get<Timetable<Tile>>(plans)), ...);
  }

 private:
  // Whether B has to be copied into aligned rows first.
  template <class Tile>
  static constexpr bool kCopied = Tile::kAligned && !kAligned;

  template <class Tile>
  Timetable<Tile> plan() const {
    const auto kernel = matmul_any_shape<Tile, kAligned>;
    allow_shared_bytes(kernel, Tile::kSharedBytes);
    Timetable<Tile> timetable(n, device.sms,
                              resident_blocks(kernel, Tile::kThreads, Tile::kSharedBytes));
    // Measured: one more launch, and 8 bytes moved for each number of B.
    if (kCopied<Tile>) timetable.microseconds += 3.8 + 2.8e-6 * n * n;
    if (Tile::kSharedBytes > device.shared_bytes) {
      timetable.microseconds = std::numeric_limits<double>::infinity();
    }
    return timetable;
  }

  template <class Tile>
  void add(const Timetable<Tile>& timetable) const {
    const auto ready = square.workspace<unsigned>(timetable.blocks);
    const auto sums = square.workspace<float>(size_t{Tile::BM * Tile::BN} * timetable.blocks);
    const int pitch = kCopied<Tile> ? (n + 31) / 32 * 32 : n;
    const auto rows = square.workspace<float>(kCopied<Tile> ? static_cast<size_t>(n) * pitch : 1);
    square
        .kernel("any shape", Role::ours,
                [=, A = A, B = B, C = C, n = n] {
                  if (kCopied<Tile>) align_rows<<<n, kAlignThreads>>>(B, rows, n, pitch);
                  matmul_any_shape<Tile, kAligned>
                      <<<timetable.blocks, Tile::kThreads, Tile::kSharedBytes>>>(
                          Matrices{A, kCopied<Tile> ? rows : B, C, n, pitch}, timetable,
                          BlockHandover<Tile::BM * Tile::BN>{ready, sums});
                })
        .needs_shared(Tile::kSharedBytes);
  }
};

// The kernels for which it matters whether rows are 16-byte aligned.
template <bool kAligned, int kStages>
void add_vector_kernels(Problem& square, Buffer<float> A, Buffer<float> B, Buffer<float> C, int n,
                        const Device& device) {
  square.kernel("vectors", Role::ours, [=] {
    matmul_vectors<128, 128, 8, 8, 8, kAligned><<<tiles_of<128, 128>(n), 256>>>(A, B, C, n);
  });

  using Tile = AsyncTile<128, 256, 16, 8, 16, kStages, kAligned>;
  allow_shared_bytes(matmul_async<Tile, kAligned>, Tile::kSharedBytes);
  square
      .kernel("async", Role::ours,
              [=] {
                matmul_async<Tile, kAligned>
                    <<<tiles_of<Tile::BM, Tile::BN>(n), 256, Tile::kSharedBytes>>>(A, B, C, n);
              })
      .needs_shared(Tile::kSharedBytes);

  using Middle = AsyncTile<64, 128, 32, 8, 8, 4, true, 2, 2>;
  using Small = AsyncTile<64, 64, 32, 8, 8, 3, true, 4, 2>;
  const AnyShape<kAligned> any_shape{square, A, B, C, n, device};
  if constexpr (kAligned) {
    any_shape.template add_fastest<Middle, Small, AsyncTile<32, 32, 32, 8, 4, 6, true, 8, 3>>();
  } else {
    any_shape.template add_fastest<Middle, Small,  //
                                   AsyncTile<64, 64, 32, 8, 8, 3, false, 4, 2>,
                                   AsyncTile<32, 32, 32, 8, 4, 6, false, 8, 3>>();
  }
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
  square.kernel("tile", Role::ours, [&] {
    matmul_tile<<<tiles_of<kTile, kTile>(n), dim3(kTile, kTile)>>>(A, B, C, n);
  });
  square.kernel("registers", Role::ours, [&] {
    matmul_registers<128, 128, 8, 8, 8><<<tiles_of<128, 128>(n), 256>>>(A, B, C, n);
  });
  const bool aligned = n % 4 == 0;
  const Device& device = lesson.device();
  if (device.shared_bytes >= 96 << 10) {
    aligned ? add_vector_kernels<true, 3>(square, A, B, C, n, device)
            : add_vector_kernels<false, 3>(square, A, B, C, n, device);
  } else {  // compute capability 7.5 has 64 KB
    aligned ? add_vector_kernels<true, 2>(square, A, B, C, n, device)
            : add_vector_kernels<false, 2>(square, A, B, C, n, device);
  }

  square.compare("registers", "tile", "From one element a thread to 8 x 8: % times faster.");
  square.compare("async", "vectors", "Loading while computing: % times faster.");
  square.compare("any shape", "async", "Smaller tiles, and steps dealt out: % times faster.");
  square.compare("any shape", "cuBLAS fp32", "The last kernel runs at % of cuBLAS's rate.");
  return lesson.run();
}
