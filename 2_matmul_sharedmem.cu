// 2. Matrix multiplication from shared memory, then from registers
//
//     C = A B        A, B, C: N x N, fp32, row-major
//
// Lesson 1 fetched two numbers from memory for every multiply-add. But each element of A is needed
// by N elements of C, and each of B as well: fetch it once, use it often. Where can it be kept in
// between? A block runs on one multiprocessor of the GPU, which has two places for it:
//
//     shared memory   228 KB (Hopper), of which a block has at most 227 KB  ~23 cycles away
//     registers       256 KB, of which a thread has at most 255 x 4 bytes     0 cycles away
//
// A block computes a tile of C. Step by step along k it loads a tile of A and a tile of B into
// shared memory, multiplies the two, and goes on. For each k, a BM x BN tile of C then reads BM +
// BN numbers from memory for BM * BN multiply-adds: the larger the tile, the less memory matters.
//
// One level further in the same argument holds again: a thread that owns TM x TN elements of C
// reads TM + TN numbers from shared memory for TM * TN multiply-adds. The kernels follow that path,
// and then take away, one by one, the cycles in which no multiply-add starts. Each builds on the
// one above it:
//
//                                                              reads of shared memory for each
//                                                              multiply-add
//     tile         32 x 32 tiles, a thread owns one element    2
//     registers    128 x 128 tiles, a thread owns 8 x 8        1/4
//     vectors      the same, moved 16 bytes at a time          1/4, by 1/4 of the loads
//     async        the next tiles arrive while these are multiplied
//     large tiles  128 x 256 tiles, a thread owns 8 x 16       3/16
//     lean         addresses are worked out once: fewer instructions that are not multiply-adds
//     ahead        the next numbers arrive in registers while these are multiplied
//     stream-K     blocks stay, and the steps of the last tiles are dealt out to all of them
//
// No tensor cores here: every multiply-add is true fp32. Tensor cores are lesson 3.

#include <algorithm>

#include "primitives/async_copy.cuh"
#include "primitives/launch.h"
#include "primitives/spin.cuh"
#include "problems/product/square_matmul.h"

using namespace problems;
using namespace primitives;

// ---- tile ---------------------------------------------------------------------------------------

constexpr int kTile = 32;

// A block of 32 x 32 threads owns a 32 x 32 tile of C, thread (x, y) its element (row y, column x).
// A step takes 32 of the n values of k: the block loads a 32 x 32 tile of A and one of B into
// shared memory. Each thread loads one element of each, so each warp loads one row of each,
// coalesced. For what is outside of a matrix a thread writes zeros, which add nothing to a sum. The
// first barrier waits until both tiles are there. Then every element is read from shared memory 32
// times. The second barrier keeps a fast warp from overwriting what a slow one still reads.
//
// For 32 of k a warp asks for these sectors:
//
//     lesson 1's last kernel    (1 of A + 4 of B) * 32 = 160
//     here                       4 of A + 4 of B       =   8
//
// That is a twentieth. The limit is now shared memory, with two reads per multiply-add.
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

// 16 x 16 threads own a 128 x 128 tile of C, and each thread 8 x 8 elements of it. (The launch has
// 256 threads in a row; x and y are worked out from the thread's number.) Thread (x, y) has the
// rows y, y + 16 and so on up to y + 112, and the columns x, x + 16 and so on up to x + 112. So
// neighbouring threads read neighbouring elements of b_tile. These lie in different banks: shared
// memory has 32 of them, and each delivers 4 bytes a cycle. For each k a thread reads 8 numbers of
// A and 8 of B from shared memory, for 64 multiply-adds.
//
// Its 64 sums stay in registers until the end. For that the loops over i and j have to be unrolled:
// a register has no address, so `sum` can only be in registers if each index is a constant.
// __launch_bounds__ says how many threads a block has at most, so that the compiler knows how many
// registers each of them may take.
//
// A step takes BK = 8 of k, where *tile* takes 32: a tile is wider, so it brings as many numbers
// with fewer of k. The threads share the copies: each of the 256 threads copies four numbers of A's
// tile and four of B's. There are N / 128 tiles beside each other in C now, and each of them reads
// the same rows of A. So an element of A is read from memory N / 128 times, where *tile* reads it N
// / 32 times. The same holds for B.
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

// Loads four neighbours of a row of `from` (n x n), from (row, col) on, and zeros for those
// outside. With kAligned (n is a multiple of 4) this is one load of 16 bytes, and the four are all
// inside or all outside.
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
// kAligned: in one store of 16 bytes.
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

// As in *registers*, but numbers move 16 bytes at a time, except where A is written into a_tile.
// The banks deliver as many bytes a cycle as before: what is saved are instructions. So that one
// load can read four elements of a row of b_tile, a thread's columns come in groups of four
// neighbours: thread x has the four from column 4 * x on, and the four from column 64 + 4 * x on. A
// thread's rows are grouped in the same way: four from row 4 * y on, and four from row 64 + 4 * y
// on. For four elements of a column of A to lie next to each other as well, a_tile is stored
// transposed: a_tile[k][row]. So for each k a thread reads its 16 numbers by 4 loads instead of 16.
//
// The rows of a_tile are 4 floats longer than their data. Why? A row of A has 8 numbers of a step,
// two float4: an even thread has the first one, the odd thread beside it the second. Each thread
// writes its float4 into four rows of a_tile, by four stores. In one such store the 16 even threads
// of a warp write 16 neighbours of row k, and the 16 odd threads write 16 neighbours of row k + 4.
// With rows of 128 floats both would be on the same 16 of the 32 banks. With rows of 132 floats,
// row k + 4 begins 4 * 132 = 16 * 32 + 16 floats after row k. So the odd threads write to the other
// 16 banks.
//
// The 2 in __launch_bounds__ says that two blocks, of 256 threads each, shall share the 65536
// registers of a multiprocessor. So the compiler gives a thread 128 registers at most.
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
      // Its rows 0 to 3 are neighbours, and so are rows 4 to 7, which are 4 * kThreadsY below.
      const int row = row0 + 4 * y + i / 4 * 4 * kThreadsY + i % 4;
      store4<kAligned>(C, row, col0 + 4 * x + j * kThreadsX, n, &sum[i][j]);
    }
  }
}

// ---- async --------------------------------------------------------------------------------------

// A stage: a tile of A, transposed, and one of B. The rows of `a` are padded by 4 floats, as in
// *vectors*, so they stay aligned to 16 bytes. Here a step has 16 of k, and a warp copies all of
// them for each of 2 rows. With rows of 132 floats element (k, row) is on bank 4 * k + row, so k
// and k + 8 are on one bank: such a copy takes two turns, where rows of 128 floats would take 16.
template <int BM, int BN, int BK>
struct TilePair {
  float a[BK][BM + 4];
  float b[BK][BN];
};

// The block's kThreads threads start the copies of BK columns of A and of BK rows of B, from k0 on.
// A is transposed on the way, so it is copied by single floats. B is copied four floats at a time,
// if its rows are aligned to 16 bytes. copy_async<bytes>(to, from, inside) starts one copy. What is
// not `inside` of the matrix becomes 0.
template <int kThreads, bool kAligned, int BM, int BN, int BK>
__device__ void copy_pair(TilePair<BM, BN, BK>& to, const float* A, const float* B, int row0,
                          int col0, int k0, int n) {
#pragma unroll
  for (int i = threadIdx.x; i < BM * BK; i += kThreads) {
    const int row = i / BK, k = i % BK;
    copy_async<4>(&to.a[k][row], A + static_cast<size_t>(row0 + row) * n + k0 + k,
                  row0 + row < n && k0 + k < n);
  }
  constexpr int kWidth = kAligned ? 4 : 1;
#pragma unroll
  for (int i = threadIdx.x; i < BK * BN / kWidth; i += kThreads) {
    const int k = i / (BN / kWidth), col = i % (BN / kWidth) * kWidth;
    copy_async<4 * kWidth>(&to.b[k][col], B + static_cast<size_t>(k0 + k) * n + col0 + col,
                           k0 + k < n && col0 + col < n);
  }
}

// So far loading and computing took turns: until the first barrier of a step a block waits for
// memory, and only after it does it multiply. Here shared memory has room for kStages pairs of
// tiles. While one is multiplied, the copies of the next kStages - 1 are on their way: the
// instruction cp.async copies to shared memory without a register in between, and the thread does
// not wait. (cp.async cannot transpose four numbers on the way, as *vectors* did in registers, so A
// is copied by single floats. And a step takes 16 of k, not 8, so there are fewer barriers.)
//
// A thread closes its copies of a step as a group (commit). Then it may wait for them:
// copy_async_wait<n> waits until all of its groups but the n newest have arrived. For example, with
// three stages step 5 begins when the copies of steps 5 and 6 have been started. It needs its own,
// so it waits for all groups but the newest one: that is copy_async_wait<kStages - 2>. (After the
// last steps there is nothing to copy. Then an empty group is closed, so that this number stays the
// same.)
//
// Up to here the compiler knew how much shared memory a block has, and it could be 48 KB at most.
// `extern __shared__` is memory whose size the launch says, by a third number in <<<grid, block,
// bytes>>>. Here that is room for all stages. allow_shared_bytes() (primitives/launch.h) lets a
// kernel have more than 48 KB.
//
// One barrier a step is enough. After it two things are true: the copies of all threads have
// arrived, and nobody reads the stage of the step before any more. The next copies fill that stage.
//
// The row *large tiles* is this kernel with larger tiles. 256 threads own 128 x 256 elements of C
// there, 8 x 16 each: for each k a thread reads 8 + 16 numbers from shared memory for 128
// multiply-adds. That is 3 numbers for 16 multiply-adds, where it was 4. Its sums alone take 128
// registers, so only one such block fits on a multiprocessor. In *vectors* that would cost too
// much: there a second block has to compute while the first one waits for memory. Here the copies
// start early, and the block itself goes on computing.
template <int BM, int BN, int BK, int TM, int TN, int kStages, int kBlocks, bool kAligned>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), kBlocks)
    matmul_async(const float* A, const float* B, float* C, int n) {
  constexpr int kThreadsX = BN / TN, kThreadsY = BM / TM, kThreads = kThreadsX * kThreadsY;
  extern __shared__ __align__(16) char shared[];
  auto* const stages = reinterpret_cast<TilePair<BM, BN, BK>*>(shared);
  const int x = threadIdx.x % kThreadsX, y = threadIdx.x / kThreadsX;
  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
  const int steps = (n + BK - 1) / BK;
  const auto start_copies = [&](int step) {
    if (step < steps) {
      copy_pair<kThreads, kAligned>(stages[step % kStages], A, B, row0, col0, step * BK, n);
    }
    copy_async_commit();
  };
  for (int step = 0; step < kStages - 1; ++step) start_copies(step);
  float sum[TM][TN] = {};
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    start_copies(step + kStages - 1);
    const auto& [a_tile, b_tile] = stages[step % kStages];
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

// ---- lean ---------------------------------------------------------------------------------------

// Each multiprocessor has four schedulers, and a scheduler can start one instruction of a warp in a
// cycle. In *large tiles* it does so in three cycles of four, and one in six of these instructions
// is not a multiply-add, as a profiler says. Most of those work out where to copy from and to, and
// whether that is inside. Here the places in A and B are worked out once, before the first step.
// After a step's copies only two pointers move on: a_from by BK columns of A, and b_from by BK rows
// of B.
//
// In each step a thread copies from the same rows of A and from the same columns of B. Take 256
// threads, tiles of 128 x 16 and 16 x 256, and aligned rows. Then a thread copies 8 single numbers
// of A, from rows that are 16 apart, and four vectors of 16 bytes of B, from rows that are 4 apart.
//
// No step checks rows of A or columns of B: those that are outside are replaced by the last ones
// inside. The sums that come from them are never stored, so they may be anything. For example, with
// n = 100 the thread whose first row is 3 has the rows 3, 19 and so on up to 99. The next one would
// be 115, so it reads row 99 once more. So its rows are no longer 16 apart, and it keeps an offset,
// from a_from, for each of them.
// Its vectors of B all have the same columns, so one pointer is enough. Only along k, which is
// summed over, each copy still checks, and writes zeros outside.
//
// The loop over the steps is that of *async*. But here a_tile points to the first of the thread's
// rows, and b_tile to the first of its columns. Rows of the tile of A are kStrideA long.
template <int BM, int BN, int BK, int TM, int TN, int kStages, int kBlocks, bool kAligned>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), kBlocks)
    matmul_lean(const float* A, const float* B, float* C, int n) {
  constexpr int kThreadsX = BN / TN, kThreadsY = BM / TM, kThreads = kThreadsX * kThreadsY;
  constexpr int kStrideA = BM + 4;
  extern __shared__ __align__(16) char shared[];
  auto* const stages = reinterpret_cast<TilePair<BM, BN, BK>*>(shared);
  const int x = threadIdx.x % kThreadsX, y = threadIdx.x / kThreadsX;
  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
  const int steps = (n + BK - 1) / BK;

  // With one copy by each of its threads the block copies kRowsA rows of the tile of A, or kRowsB
  // rows of the tile of B. So a thread's next copy is that many rows further down.
  constexpr int kWidth = kAligned ? 4 : 1;
  constexpr int kRowsA = kThreads / BK, kRowsB = kThreads / (BN / kWidth);
  const int a_row = threadIdx.x / BK, a_k = threadIdx.x % BK;
  const int b_k = threadIdx.x / (BN / kWidth), b_col = threadIdx.x % (BN / kWidth) * kWidth;
  const float* a_from = A + static_cast<size_t>(row0) * n + a_k;
  const float* b_from = B + static_cast<size_t>(b_k) * n + min(col0 + b_col, n - kWidth);
  int a_offset[BM / kRowsA];
#pragma unroll
  for (int i = 0; i < BM / kRowsA; ++i) {
    a_offset[i] = (min(row0 + a_row + i * kRowsA, n - 1) - row0) * n;
  }
  const auto start_copies = [&](int step) {
    if (step < steps) {
      float* a_to = &stages[step % kStages].a[a_k][a_row];
      float* b_to = &stages[step % kStages].b[b_k][b_col];
      const int k_left = n - step * BK;
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
    }
    copy_async_commit();
  };
  for (int step = 0; step < kStages - 1; ++step) start_copies(step);
  float sum[TM][TN] = {};
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    start_copies(step + kStages - 1);
    const float* a_tile = &stages[step % kStages].a[0][4 * y];
    const float* b_tile = &stages[step % kStages].b[0][4 * x];
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      float a[TM], b[TN];
#pragma unroll
      for (int i = 0; i < TM; i += 4) {
        *reinterpret_cast<float4*>(&a[i]) =
            *reinterpret_cast<const float4*>(a_tile + k * kStrideA + i * kThreadsY);
      }
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        *reinterpret_cast<float4*>(&b[j]) =
            *reinterpret_cast<const float4*>(b_tile + k * BN + j * kThreadsX);
      }
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) sum[i][j] += a[i] * b[j];
      }
    }
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

// ---- ahead --------------------------------------------------------------------------------------

// *lean*, with the idea of *async* one level further in. In *lean* a multiply-add needs numbers
// that the load just above it has asked for, and shared memory takes tens of cycles to bring them.
// A multiprocessor has only eight warps here, two for each scheduler. They are too few to fill that
// time with each other's work. So there are two sets of registers: while one k is multiplied, the
// numbers of the next come into the other set. (Only the first k of a step is not loaded ahead,
// since its tiles are there only after the barrier. The copies of a later step are started right
// after this load, so that the load does not stand behind them.)
//
// multiply_ahead multiplies the steps `begin` to `end` - 1 of the tile of C at (row0, col0).
// finish(sum) says what becomes of a thread's sums: *ahead* stores them, and *stream-K* may add
// them to others.
template <int BM, int BN, int BK, int TM, int TN, int kStages, bool kAligned, typename Finish>
__device__ void multiply_ahead(TilePair<BM, BN, BK>* stages, const float* A, const float* B, int n,
                               int row0, int col0, int begin, int end, Finish finish) {
  constexpr int kThreadsX = BN / TN, kThreadsY = BM / TM, kThreads = kThreadsX * kThreadsY;
  constexpr int kStrideA = BM + 4;
  const int x = threadIdx.x % kThreadsX, y = threadIdx.x / kThreadsX;

  // With one copy by each of its threads the block copies kRowsA rows of the tile of A, or kRowsB
  // rows of the tile of B. So a thread's next copy is that many rows further down.
  constexpr int kWidth = kAligned ? 4 : 1;
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
  const auto start_copies = [&](int step) {
    if (step < end) {
      float* a_to = &stages[step % kStages].a[a_k][a_row];
      float* b_to = &stages[step % kStages].b[b_k][b_col];
      const int k_left = n - step * BK;
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
    }
    copy_async_commit();
  };
  for (int step = begin; step < begin + kStages - 1; ++step) start_copies(step);
  float sum[TM][TN] = {};
  float a[2][TM], b[2][TN];  // of this k, and of the next
  for (int step = begin; step < end; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    const float* a_tile = &stages[step % kStages].a[0][4 * y];
    const float* b_tile = &stages[step % kStages].b[0][4 * x];
    const auto load = [&](int k) {
#pragma unroll
      for (int i = 0; i < TM; i += 4) {
        *reinterpret_cast<float4*>(&a[k % 2][i]) =
            *reinterpret_cast<const float4*>(a_tile + k * kStrideA + i * kThreadsY);
      }
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        *reinterpret_cast<float4*>(&b[k % 2][j]) =
            *reinterpret_cast<const float4*>(b_tile + k * BN + j * kThreadsX);
      }
    };
    load(0);
    start_copies(step + kStages - 1);
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      if (k + 1 < BK) load(k + 1);
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) sum[i][j] += a[k % 2][i] * b[k % 2][j];
      }
    }
  }
  finish(sum);
}

// Stores a thread's sums to the tile of C at (row0, col0).
template <int BM, int BN, int TM, int TN, bool kAligned>
__device__ void store_sums(const float (&sum)[TM][TN], float* C, int row0, int col0, int n) {
  constexpr int kThreadsX = BN / TN, kThreadsY = BM / TM;
  const int x = threadIdx.x % kThreadsX, y = threadIdx.x / kThreadsX;
#pragma unroll
  for (int i = 0; i < TM; ++i) {
#pragma unroll
    for (int j = 0; j < TN; j += 4) {
      const int row = row0 + 4 * y + i / 4 * 4 * kThreadsY + i % 4;
      store4<kAligned>(C, row, col0 + 4 * x + j * kThreadsX, n, &sum[i][j]);
    }
  }
}

template <int BM, int BN, int BK, int TM, int TN, int kStages, int kBlocks, bool kAligned>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), kBlocks)
    matmul_ahead(const float* A, const float* B, float* C, int n) {
  extern __shared__ __align__(16) char shared[];
  auto* const stages = reinterpret_cast<TilePair<BM, BN, BK>*>(shared);
  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
  multiply_ahead<BM, BN, BK, TM, TN, kStages, kAligned>(
      stages, A, B, n, row0, col0, 0, (n + BK - 1) / BK, [&](const float(&sum)[TM][TN]) {
        store_sums<BM, BN, TM, TN, kAligned>(sum, C, row0, col0, n);
      });
}

// ---- stream-K -----------------------------------------------------------------------------------

// Tiles are computed in rounds, one tile on each multiprocessor. With tiles of 128 x 256 C has 512
// of them at N = 4096, for 132 multiprocessors. Three rounds keep all multiprocessors busy. In the
// fourth one 116 of them work and 16 wait. At N = 1024 there are 32 tiles, and 100 multiprocessors
// have nothing to do. So tiles are cut along k as well. This is called stream-K.
//
// Only as many blocks are launched as there are multiprocessors, and each stays until its share of
// all the tiles is done. At first blocks take whole tiles, as above, until between one and two
// rounds of tiles are left. (If there is less than one round, all tiles are left. If all rounds are
// full, none is.) The steps of the tiles that are left form one long line, tile after tile, of
// which each block gets an equal part. At N = 4096 each block takes two whole tiles, and 248 tiles
// are left, each of 256 steps. So the line has 63488 steps, and each of the 132 blocks gets 480 or
// 481 of them. The parts of the first two blocks are these pieces:
//
//     block 0    tile 264, all 256 steps       tile 265, steps 0 to 223
//     block 1    tile 265, steps 224 to 255    tile 266, all    tile 267, steps 0 to 192
//
// Block 1 begins inside of tile 265, so its sums for this tile are only over a part of k. It leaves
// them in memory, with a flag, for the block that has the tile's first steps. That is block 0.
// Block 0 waits for the flag, adds the sums to its own, and stores the tile. (If several blocks
// have left sums of a tile, they are added in the order of the blocks' numbers. So each launch has
// the same result.)
//
// Why do blocks never wait for each other in a circle? Sums are only left by the first piece of a
// part. Before and during that piece a block waits for nobody. And only the last piece waits. In
// the example block 1 leaves its sums after 32 of its steps, and block 0 needs them after 480. All
// blocks run at the same time, since there are no more of them than fit on the GPU.
template <int TM, int TN, int kThreads>
struct SumsOfBlocks {
  unsigned* ready;  // for each block a flag, 1 if its sums are there; 0 before and after a launch
  float4* sums;     // [block][i][thread]: each thread's TM * TN / 4 groups of four sums

  // Where this thread's first four sums lie among those that `block` leaves. The next four are
  // kThreads further on.
  __device__ float4* place(int block) const {
    return sums + (static_cast<size_t>(block) * TM * TN / 4 * kThreads + threadIdx.x);
  }
  // Leaves this block's sums for another one. __stcg stores them in the L2 cache, where all blocks
  // see them. After the barrier the sums of all threads are stored. Then one thread sets the flag,
  // by a release. GridCount makes the operations on the flag atomic, for all blocks. A thread that
  // reads the 1 by an acquire, as wait_for_count does, sees all that was stored before the release.
  __device__ void give(const float (&sum)[TM][TN]) const {
    float4* to = place(blockIdx.x);
#pragma unroll
    for (int i = 0; i < TM * TN; i += 4, to += kThreads) {
      __stcg(to, *reinterpret_cast<const float4*>(&sum[i / TN][i % TN]));
    }
    __syncthreads();
    if (threadIdx.x == 0) GridCount(ready[blockIdx.x]).store(1, cuda::memory_order_release);
  }
  // Adds what block `block` leaves. __ldcg loads it from the L2 cache, and not from the L1 cache,
  // which does not see what other multiprocessors store.
  __device__ void add(float (&sum)[TM][TN], int block) const {
    if (threadIdx.x == 0) {
      const GridCount flag(ready[block]);
      wait_for_count(flag, 1, "the other block's sums");
      flag.store(0, cuda::memory_order_relaxed);
    }
    __syncthreads();
    const float4* from = place(block);
#pragma unroll
    for (int i = 0; i < TM * TN; i += 4, from += kThreads) {
      const float4 more = __ldcg(from);
      float* to = &sum[i / TN][i % TN];
      to[0] += more.x, to[1] += more.y, to[2] += more.z, to[3] += more.w;
    }
  }
};

// Which steps of the line a block has: those from start(block) to start(block + 1) - 1. If all
// rounds of tiles are full, the line is empty.
struct StepLine {
  int first_tile, steps;  // the line's first tile, and how many steps each of its tiles has
  int64_t length;         // in steps

  __device__ StepLine(int tiles, int steps) : steps(steps) {
    const int blocks = gridDim.x;
    first_tile = tiles % blocks == 0 ? tiles : max(0, tiles / blocks - 1) * blocks;
    length = static_cast<int64_t>(tiles - first_tile) * steps;
  }
  __device__ int start(int block) const {
    return static_cast<int>(length * block / static_cast<int>(gridDim.x));
  }
};

template <int BM, int BN, int BK, int TM, int TN, int kStages, int kBlocks, bool kAligned>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), kBlocks)
    matmul_stream_k(const float* A, const float* B, float* C, int n,
                    SumsOfBlocks<TM, TN, BM / TM*(BN / TN)> of_blocks) {
  extern __shared__ __align__(16) char shared[];
  auto* const stages = reinterpret_cast<TilePair<BM, BN, BK>*>(shared);
  const int tile_cols = (n + BN - 1) / BN, tiles = (n + BM - 1) / BM * tile_cols;
  const int block = blockIdx.x, blocks = gridDim.x;
  const StepLine line(tiles, (n + BK - 1) / BK);
  // A piece: steps `begin` to `end` - 1 of a tile.
  const auto do_piece = [&](int tile, int begin, int end) {
    const int row0 = tile / tile_cols * BM, col0 = tile % tile_cols * BN;
    __syncthreads();  // all have read the last stages of the piece before
    multiply_ahead<BM, BN, BK, TM, TN, kStages, kAligned>(
        stages, A, B, n, row0, col0, begin, end, [&](float(&sum)[TM][TN]) {
          if (begin > 0) return of_blocks.give(sum);
          // The tile's other steps belong to the blocks after this one, to each whose part begins
          // before the tile ends. If this piece has the tile's last step, no other block has any.
          const int tile_end = (tile - line.first_tile + 1) * line.steps;  // in the line
          for (int other = block + 1; end < line.steps && line.start(other) < tile_end; ++other) {
            of_blocks.add(sum, other);
          }
          store_sums<BM, BN, TM, TN, kAligned>(sum, C, row0, col0, n);
        });
  };
  // One loop for both kinds of pieces, so that the code of a piece is there once: first whole
  // tiles, then the block's part of the line. `whole` is the next whole tile, and `at` is the next
  // step of the line.
  const int last = line.start(block + 1);
  int whole = block, at = line.start(block);
  while (whole < line.first_tile || at < last) {
    const bool in_line = whole >= line.first_tile;
    const int begin = in_line ? at % line.steps : 0;
    const int end = in_line ? min(line.steps, begin + last - at) : line.steps;
    do_piece(in_line ? line.first_tile + at / line.steps : whole, begin, end);
    in_line ? at += end - begin : whole += blocks;
  }
}

// -------------------------------------------------------------------------------------------------

// Blocks of BM x BN that cover an n x n matrix.
template <int BM, int BN>
dim3 tiles_of(int64_t n) {
  return dim3(static_cast<unsigned>((n + BN - 1) / BN), static_cast<unsigned>((n + BM - 1) / BM));
}

// The kernels for which it matters whether rows are aligned to 16 bytes. A block has more than 48
// KB of shared memory only where allow_shared_bytes allows it.
template <bool kAligned, int kStages>
void add_vector_kernels(Problem& square, Buffer<float> A, Buffer<float> B, Buffer<float> C, int n) {
  square.kernel("vectors", Role::ours, [=] {
    matmul_vectors<128, 128, 8, 8, 8, kAligned><<<tiles_of<128, 128>(n), 256>>>(A, B, C, n);
  });

  constexpr int kBytes = kStages * sizeof(TilePair<128, 128, 16>);
  allow_shared_bytes(matmul_async<128, 128, 16, 8, 8, kStages, 2, kAligned>, kBytes);
  square
      .kernel("async", Role::ours,
              [=] {
                matmul_async<128, 128, 16, 8, 8, kStages, 2, kAligned>
                    <<<tiles_of<128, 128>(n), 256, kBytes>>>(A, B, C, n);
              })
      .needs_shared(kBytes);

  constexpr int kLargeBytes = kStages * sizeof(TilePair<128, 256, 16>);
  allow_shared_bytes(matmul_async<128, 256, 16, 8, 16, kStages, 1, kAligned>, kLargeBytes);
  square
      .kernel("large tiles", Role::ours,
              [=] {
                matmul_async<128, 256, 16, 8, 16, kStages, 1, kAligned>
                    <<<tiles_of<128, 256>(n), 256, kLargeBytes>>>(A, B, C, n);
              })
      .needs_shared(kLargeBytes);

  allow_shared_bytes(matmul_lean<128, 256, 16, 8, 16, kStages, 1, kAligned>, kLargeBytes);
  square
      .kernel("lean", Role::ours,
              [=] {
                matmul_lean<128, 256, 16, 8, 16, kStages, 1, kAligned>
                    <<<tiles_of<128, 256>(n), 256, kLargeBytes>>>(A, B, C, n);
              })
      .needs_shared(kLargeBytes);

  allow_shared_bytes(matmul_ahead<128, 256, 16, 8, 16, kStages, 1, kAligned>, kLargeBytes);
  square
      .kernel("ahead", Role::ours,
              [=] {
                matmul_ahead<128, 256, 16, 8, 16, kStages, 1, kAligned>
                    <<<tiles_of<128, 256>(n), 256, kLargeBytes>>>(A, B, C, n);
              })
      .needs_shared(kLargeBytes);

  const auto stream_k = matmul_stream_k<128, 256, 16, 8, 16, kStages, 1, kAligned>;
  allow_shared_bytes(stream_k, kLargeBytes);
  const dim3 tiles = tiles_of<128, 256>(n);
  const int64_t all_steps = int64_t{tiles.x} * tiles.y * ceil_div(n, 16);
  const int blocks =
      static_cast<int>(std::min<int64_t>(all_steps, resident_blocks(stream_k, 256, kLargeBytes)));
  const auto ready = square.workspace<unsigned>(blocks);
  const auto sums = square.output<float>(size_t{128 * 256} * blocks);
  square
      .kernel(
          "stream-K", Role::ours,
          [=] {
            const SumsOfBlocks<8, 16, 256> of_blocks{ready, reinterpret_cast<float4*>(sums.data())};
            matmul_stream_k<128, 256, 16, 8, 16, kStages, 1, kAligned>
                <<<blocks, 256, kLargeBytes>>>(A, B, C, n, of_blocks);
          })
      .needs_shared(kLargeBytes);
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "2_matmul_sharedmem",
                 .title = "C = A B from shared memory and registers, in true fp32",
                 .n_meaning = "the matrices are N x N",
                 .n_gpu = 4096,
                 .n_cpu = 204});
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
  if (lesson.device().shared_bytes >= 96 << 10) {
    aligned ? add_vector_kernels<true, 3>(square, A, B, C, n)
            : add_vector_kernels<false, 3>(square, A, B, C, n);
  } else {  // compute capability 7.5 has 64 KB, too few for three stages of large tiles
    aligned ? add_vector_kernels<true, 2>(square, A, B, C, n)
            : add_vector_kernels<false, 2>(square, A, B, C, n);
  }

  square.compare("registers", "tile", "From one element a thread to 8 x 8: % times as fast.");
  square.compare("ahead", "vectors",
                 "Loading while computing, from larger tiles: % times as fast.");
  square.compare("stream-K", "ahead", "The steps of the last tiles dealt out: % times as fast.");
  square.compare("stream-K", "cuBLAS fp32", "The last kernel runs at % of cuBLAS's rate.");
  return lesson.run();
}
