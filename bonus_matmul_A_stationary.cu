// Bonus. The dataflow that GPUs do not like: A stays, C moves
//
//     C = A B        A, B, C: N x N, fp32, row-major
//
// Lessons 1 and 2 are output stationary: who owns an element of C keeps the running sum to itself.
// Here an element of A is what stays. Its owner multiplies it with all that it ever meets, the
// whole row of B, and sends each product to the element of C that it belongs to. Hardware built for
// this (a systolic array with its weights loaded) passes partial sums from neighbour to neighbour
// by wires. On a GPU the owners of one row of A all add to the same row of C, so every one of these
// N^3 additions must be atomic, and travels to the L2 cache, where the adders are.
//
// The second kernel keeps A stationary and takes the traffic away: what stays is a tile of A, 128 x
// 128, whose products with a column of B are summed up on chip before anything is sent. That leaves
// N / 128 atomic additions per element of C instead of N. That is more than the one plain store of
// lesson 2, but so few that the multiply-adds count again: the kernel finds its place among those
// of lesson 2, between *registers* and *vectors*.
//
// Atomic additions arrive in any order, so the last bits of C differ from run to run.

#include "problems/product/square_matmul.h"

using namespace problems;

// Thread (x, y) owns A(row = y, k = x), in a register, and walks along row k of B. The 32 threads
// of a warp own neighbouring k of one row: all of them add to the same element of C at the same
// time. For the same reason they read 32 different rows of B, and use 4 bytes of each sector.
__global__ void matmul_atomic(const float* A, const float* B, float* C, int n) {
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  const int k = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= n || k >= n) return;
  const float a = A[static_cast<size_t>(row) * n + k];
  for (int col = 0; col < n; ++col) {
    atomicAdd(&C[static_cast<size_t>(row) * n + col], a * B[static_cast<size_t>(k) * n + col]);
  }
}

constexpr int kTile = 128;  // of A: rows and k
constexpr int kCols = 64;   // of B and C at a time

// A block of 256 threads owns a 128 x 128 tile of A, in shared memory from start to end, and walks
// along the 128 rows of B that belong to it, 64 columns at a time. Of each 128 x 64 partial tile of
// C a thread sums 4 x 8 elements over the 128 k in its registers: rows y + 32 i and columns x + 8 j
// for thread (x, y) of 8 x 32; then it adds them to C with one atomic each, to addresses that the
// warp's threads share the sectors of. The tile is stored transposed, so that its
// k-th column is read as consecutive words; its rows are one float longer than their data, because
// the 32 threads that write 32 values of k of one row would otherwise all hit one bank.
__global__ void __launch_bounds__(256)
    matmul_tile_stationary(const float* A, const float* B, float* C, int n) {
  extern __shared__ float tiles[];
  float* a_tile = tiles;                        // [k][row], rows of kTile + 1
  float* b_tile = tiles + kTile * (kTile + 1);  // [k][column]
  const int x = threadIdx.x % 8, y = threadIdx.x / 8;
  const int row0 = blockIdx.y * kTile, k0 = blockIdx.x * kTile;
  for (int i = threadIdx.x; i < kTile * kTile; i += 256) {
    const int row = i / kTile, k = i % kTile;
    const bool inside = row0 + row < n && k0 + k < n;
    a_tile[k * (kTile + 1) + row] = inside ? A[static_cast<size_t>(row0 + row) * n + k0 + k] : 0;
  }
  for (int col0 = 0; col0 < n; col0 += kCols) {
    __syncthreads();
    for (int i = threadIdx.x; i < kTile * kCols; i += 256) {
      const int k = i / kCols, col = i % kCols;
      const bool inside = k0 + k < n && col0 + col < n;
      b_tile[i] = inside ? B[static_cast<size_t>(k0 + k) * n + col0 + col] : 0;
    }
    __syncthreads();
    float sum[4][8] = {};
#pragma unroll 8
    for (int k = 0; k < kTile; ++k) {
      float a[4], b[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = a_tile[k * (kTile + 1) + y + 32 * i];
#pragma unroll
      for (int j = 0; j < 8; ++j) b[j] = b_tile[k * kCols + x + 8 * j];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i][j] += a[i] * b[j];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int row = row0 + y + 32 * i, col = col0 + x + 8 * j;
        if (row < n && col < n) atomicAdd(&C[static_cast<size_t>(row) * n + col], sum[i][j]);
      }
    }
  }
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "bonus_matmul_A_stationary",
                 .title = "C = A B with A kept in place and C summed up in memory",
                 .n_meaning = "the matrices are N x N",
                 .n_gpu = 4096,
                 .n_cpu = 260});
  const int64_t n = lesson.n();

  Cublas blas;
  SquareMatmul<float> matmul(lesson, blas, "square", "fp32", Rate::fp32,
                             dot_tolerance(n, kRoundoffFp32, kRoundoffFp32));
  Problem& square = matmul.problem;
  const auto A = matmul.A, B = matmul.B, C = matmul.C;

  // Both kernels add to C, so it has to start as zeros; that is part of their time.
  const size_t bytes = static_cast<size_t>(n) * n * sizeof(float);
  square.kernel("atomic", Role::baseline, [&] {
    const dim3 block(32, 8);
    const dim3 grid(static_cast<unsigned>((n + 31) / 32), static_cast<unsigned>((n + 7) / 8));
    CUDA_CHECK(cudaMemsetAsync(C, 0, bytes));
    matmul_atomic<<<grid, block>>>(A, B, C, n);
  });

  constexpr int kSharedBytes = (kTile * (kTile + 1) + kTile * kCols) * sizeof(float);
  if (lesson.device().shared_bytes >= kSharedBytes) {
    CUDA_CHECK(cudaFuncSetAttribute(matmul_tile_stationary,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    square
        .kernel("tile stationary", Role::ours,
                [&] {
                  const unsigned tiles = static_cast<unsigned>((n + kTile - 1) / kTile);
                  CUDA_CHECK(cudaMemsetAsync(C, 0, bytes));
                  matmul_tile_stationary<<<dim3(tiles, tiles), 256, kSharedBytes>>>(A, B, C, n);
                })
        .needs_shared(kSharedBytes);
  } else {  // compute capability 7.5 has 64 KB
    lesson.note("No \"tile stationary\": a block of it needs 97 KB of shared memory.");
  }

  square.compare("tile stationary", "atomic",
                 "Summing on chip before touching memory: % times as fast.");
  return lesson.run();
}
