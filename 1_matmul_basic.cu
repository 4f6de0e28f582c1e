// 1. Matrix multiplication, one thread per element of the result
//
//     C = A B        A, B, C: N x N, fp32, row-major: element (row, col) is at [row * N + col]
//
// Two memories. The program starts on the host, the CPU, with its own memory; a kernel runs on the
// device, the GPU, and sees only the device's memory. The matrices below are created there, as
// random numbers, and never leave it: copying them over PCI Express would take longer than a
// good kernel takes to multiply them.
//
// Many threads. `kernel<<<grid, block>>>(arguments)` starts grid.x * grid.y blocks of block.x *
// block.y threads, each of which runs the kernel's body once. A thread learns which one it is from
// blockIdx and threadIdx. The hardware runs the threads of a block in warps: 32 threads,
// consecutive in threadIdx.x, that execute the same instruction at the same time.
//
// Output stationary. Each thread owns one element of C: it walks along a row of A and down a column
// of B, keeps the sum in a register, and writes it once. C stays where it is computed; A and B
// stream by.
//
// What is the limit? 2 N^3 floating-point operations on 12 N^2 bytes: at N = 4096 each byte could
// feed 683 operations, so the arithmetic units are the limit, and a good kernel keeps them busy.
// These two are not good: every multiply-add here fetches its two numbers from memory (or a cache),
// and waiting for those is what they do. Which of the 32 threads of a warp reads what decides how
// long.

#include "common/matmul.h"

// Thread (x, y) owns C(row = x, col = y): neighbours in a warp sit in neighbouring ROWS. At each
// step of the loop a warp reads one element of B (the same for all) but 32 elements of A that lie N
// floats apart, from 32 different 32-byte sectors, of each of which it uses 4 bytes. The same
// happens to the 32 elements of C at the end.
__global__ void matmul_uncoalesced(const float* A, const float* B, float* C, int n) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  const int col = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= n || col >= n) return;  // the last blocks stick out of the matrix
  float sum = 0;
  for (int k = 0; k < n; ++k) {
    sum += A[static_cast<size_t>(row) * n + k] * B[static_cast<size_t>(k) * n + col];
  }
  C[static_cast<size_t>(row) * n + col] = sum;
}

// Thread (x, y) owns C(row = y, col = x): neighbours sit in neighbouring COLUMNS. Now a warp reads
// one element of A (the same for all: one transaction) and 32 consecutive elements of B, 128 bytes
// that the hardware coalesces into four full sectors. The arithmetic is the same, the sums are the
// same to the last bit; only the two letters x and y changed places.
__global__ void matmul_coalesced(const float* A, const float* B, float* C, int n) {
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= n || col >= n) return;
  float sum = 0;
  for (int k = 0; k < n; ++k) {
    sum += A[static_cast<size_t>(row) * n + k] * B[static_cast<size_t>(k) * n + col];
  }
  C[static_cast<size_t>(row) * n + col] = sum;
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "1_matmul_basic",
                 .title = "C = A B, one thread per element of C",
                 .n_meaning = "the matrices are N x N",
                 .n_gpu = 4096,
                 .n_cpu = 256});
  const int64_t n = lesson.n();

  Cublas blas;
  SquareMatmul<float> matmul(lesson, blas, "square", "fp32", Rate::fp32,
                             dot_tolerance(n, kRoundoffFp32, kRoundoffFp32));
  Problem& square = matmul.problem;
  const auto A = matmul.A, B = matmul.B, C = matmul.C;

  const dim3 block(32, 32);
  const unsigned blocks = static_cast<unsigned>((n + 31) / 32);
  const dim3 grid(blocks, blocks);
  square
      .kernel("uncoalesced", Role::baseline,
              [&] { matmul_uncoalesced<<<grid, block>>>(A, B, C, n); })
      .resources(matmul_uncoalesced, 1024);
  square
      .kernel("coalesced", Role::ours,  //
              [&] { matmul_coalesced<<<grid, block>>>(A, B, C, n); })
      .resources(matmul_coalesced, 1024);

  square.compare(
      "coalesced", "uncoalesced",
      "The same arithmetic, with neighbouring threads on neighbouring addresses: % times faster.");
  return lesson.run();
}
