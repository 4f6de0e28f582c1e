// 1. Matrix multiplication, one thread per element of the result
//
//     C = A B        A, B, C: N x N, fp32, row-major: element (row, col) is at [row * N + col]
//
// Two memories. The program starts on the host, the CPU, with its own memory; a kernel runs on the
// device, the GPU, and sees only the device's memory. A program takes memory there (cudaMalloc),
// and copies its data to it and back (cudaMemcpy). The matrices of the first table are created
// there, as random numbers, and never leave it. The second table shows why: it times nothing but
// the copies, of A and B to the device and of C back to the host, over PCI Express.
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
// What is the limit? A multiply-add counts as two operations, so there are 2 N^3. Three matrices of
// 4 N^2 bytes are 12 N^2 bytes. So each byte could feed N / 6 operations, 683 at N = 4096. While
// its memory moves one byte, an H100 does about 20. So the arithmetic units are the limit, and
// a good kernel keeps them busy. These two are not good: every multiply-add here fetches its two
// numbers from memory (or a cache), and how fast these come is what limits them. How fast depends
// on which thread of a warp reads which number.

#include <algorithm>
#include <vector>

#include "problems/product/square_matmul.h"

using namespace problems;

// Memory is read and written in sectors, pieces of 32 bytes. The 32 loads of a warp's instruction
// are served together, and each sector that they need is fetched once.
//
// Thread (x, y) owns C(row = x, col = y): neighbours in a warp have neighbouring ROWS. At each step
// of the loop a warp reads one element of B, the same for all threads: one sector. But it reads 32
// elements of A that lie N floats apart. They are in 32 sectors, and of each of these it uses only
// 4 bytes. The same happens to the 32 elements of C at the end.
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

// Thread (x, y) owns C(row = y, col = x): neighbours have neighbouring COLUMNS. Now a warp reads
// one element of A, the same for all threads: one sector. And it reads 32 consecutive elements of
// B, 128 bytes, which are four full sectors. To serve the loads of a warp by few full sectors is
// called coalescing. The arithmetic is the same, the sums are the same to the last bit; only the
// two letters x and y changed places.
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

// ---- The way there and back ---------------------------------------------------------------------

// A first reader may skip this part, and go on at main().
//
// What the second table copies. The host has A and B in two kinds of memory, pageable and pinned,
// one kind for each row of the table. Pageable memory is what `new` or std::vector gives: the
// operating system may move it or put it aside, so the driver copies piece by piece through a
// buffer of its own. Pinned memory stays where it is, and the GPU fetches it by itself; but to take
// it is slow, and what is pinned nobody else can use.
struct Copies {
  explicit Copies(int64_t n) : count(static_cast<size_t>(n) * n) {}
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;
  ~Copies() {
    cudaFree(C);
    for (float* pointer : pinned) cudaFreeHost(pointer);
  }

  // Takes the memory. C becomes a copy of `result`, and the host's B, of both kinds, a copy of `B`.
  // Both arguments are on the device.
  void allocate(const float* result, const float* B) {
    CUDA_CHECK(cudaMalloc(&C, bytes()));
    CUDA_CHECK(cudaMemcpy(C, result, bytes(), cudaMemcpyDeviceToDevice));
    for (std::vector<float>& matrix : pageable) matrix.resize(count);
    CUDA_CHECK(cudaMemcpy(pageable[1].data(), B, bytes(), cudaMemcpyDeviceToHost));
    for (float*& pointer : pinned) CUDA_CHECK(cudaMallocHost(&pointer, bytes()));
    std::copy(pageable[1].begin(), pageable[1].end(), pinned[1]);
  }

  // The copies go in a circle, so that they can be checked without a second buffer: C comes back to
  // the host, into the buffer of A, and from there it goes to the device as A. So the A that
  // arrives has to be equal to the C that has left. B goes to the device from its own buffer. For a
  // small N the lesson records this in a CUDA graph, which needs copies that do not wait. Your
  // program can say cudaMemcpy instead, which waits until the copy is done. (cudaStreamPerThread is
  // the default stream of this thread. By nvcc --default-stream=per-thread, with which the lessons
  // are built, a launch without a stream goes there, too.)
  void copy(float* host_A, const float* host_B, float* A, float* B) const {
    const cudaStream_t stream = cudaStreamPerThread;
    CUDA_CHECK(cudaMemcpyAsync(host_A, C, bytes(), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaMemcpyAsync(A, host_A, bytes(), cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaMemcpyAsync(B, host_B, bytes(), cudaMemcpyHostToDevice, stream));
  }

  size_t bytes() const { return count * sizeof(float); }

  size_t count;
  float* C = nullptr;  // on the device
  std::vector<float> pageable[2];
  float* pinned[2] = {};
};

// A table that multiplies nothing. The limit that it shows is that of the device's memory; the bus
// is far slower.
void add_copies(Lesson& lesson, Copies& copies) {
  const int64_t n = lesson.n(), count = n * n;
  Problem& table =
      lesson.problem("copies", {{"N", n}}, "fp32",
                     {.flops = 0, .bytes = 3.0 * static_cast<double>(copies.bytes())}, Rate::fp32);
  const auto result = table.input<float>(count), right = table.input<float>(count);
  const auto A = table.output<float>(count), B = table.output<float>(count);
  const auto expected_A = table.reference(count), expected_B = table.reference(count);
  table.reference_from(static_cast<double>(copies.bytes()), [=, &copies] {
    copies.allocate(result, right);
    to_fp64(result, Type::fp32, count, expected_A);
    to_fp64(right, Type::fp32, count, expected_B);
  });
  // Nothing is computed, so nothing is rounded.
  table.check(A, expected_A, 0);
  table.check(B, expected_B, 0);

  table.kernel("pageable", Role::baseline, [=, &copies] {
    copies.copy(copies.pageable[0].data(), copies.pageable[1].data(), A, B);
  });
  table.kernel("pinned", Role::ours,
               [=, &copies] { copies.copy(copies.pinned[0], copies.pinned[1], A, B); });
  table.compare("pinned", "pageable", "The same copies, of pinned memory: % times as fast.");
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

  // Why 32 x 32 threads? 32 along x, so that a warp is one row of the block. 32 along y, so that a
  // block has 1024 threads, the most that it may have, and its 32 warps need the same elements at
  // about the same time, of A in the first kernel and of B in the second: what one has fetched, the
  // others find in the L1 cache. Two such blocks are all the warps that a multiprocessor can hold.
  // Other numbers work as well. With 32 x 8 each load of a warp is the same, and fewer warps share
  // what it brings.
  const dim3 block(32, 32);
  const unsigned blocks = static_cast<unsigned>((n + 31) / 32);
  const dim3 grid(blocks, blocks);
  square.kernel("uncoalesced", Role::baseline,
                [&] { matmul_uncoalesced<<<grid, block>>>(A, B, C, n); });
  square.kernel("coalesced", Role::ours,  //
                [&] { matmul_coalesced<<<grid, block>>>(A, B, C, n); });

  square.compare(
      "coalesced", "uncoalesced",
      "The same arithmetic, with neighbouring threads on neighbouring addresses: % times as fast.");
  Copies copies(n);
  add_copies(lesson, copies);
  return lesson.run();
}
