// 9, solved. softmax(x W) in training: its loss, its gradients, fp16 inputs, and several heads
//
//     logits = x W, probs = softmax(logits) row by row: lesson 9
//     loss(b) = -log probs(b, label(b)), dlogits = probs less 1 at the label
//     dx = dlogits W^T, dW = x^T dlogits
//     x and dx (B, D), W and dW (D, C), logits, probs and dlogits (B, C), row-major
//
// Lesson 9 is the forward pass. These are its exercises, solved: what a reader may try next. Each
// table compares with cuBLAS, and a kernel for what cuBLAS does not do.
//
//     cross-entropy   the loss and its gradient, beside the softmax
//     heads           W has C columns for each of H heads: a softmax for each head of a row
//     fp16            x and W in fp16: the same kernel, half the bytes, the other instruction
//     backward        dx and dW of any loss, from that loss's gradient of probs
//
// Thousands of classes need no kernel of their own here: try --classes 4000.

#include "primitives/early_launch.cuh"
#include "primitives/launch.h"
#include "primitives/mma.cuh"
#include "primitives/row_parts.cuh"
#include "problems/softmax/softmax.h"

using namespace problems;
using namespace primitives;

// ---- The product --------------------------------------------------------------------------------

// A block of eight warps has 64 x 64 elements of a product, a warp 16 x 32 of them. Where the
// elements of the factors come from is a function's business: left(row, k) and right(column, k).
// That is how something can be computed on the way, and how either factor can be transposed. It
// takes an address for each element: with half as many warps these would not fit in registers.
constexpr int kTile = 64, kWarpRows = 16, kWarpCols = 32, kThreads = 256;

// A step along k is 32 elements of each line. (A line is a row of the left factor, or a column of
// the right one.) In shared memory there are 16 bytes between two lines: so eight of them, 16 bytes
// each, are on different banks, and these are what an ldmatrix reads at a time.
template <typename T>
struct Tiles {
  static constexpr int kStep = 32;
  static constexpr int kStride = kStep + 16 / static_cast<int>(sizeof(T));
  static constexpr int kEach = kTile * kStep / kThreads;  // a thread's share of a step's tile
  alignas(16) T left[2][kTile * kStride];
  alignas(16) T right[2][kTile * kStride];
};

// A warp's 16 x 32 sums, as four matrices of 16 x 8. A thread has 2 x 8 of them: (row(i), col(j))
// for its lane; the four lanes of a row are neighbours.
struct Sums {
  float v[4][4] = {};

  __device__ float& at(int i, int j) { return v[j / 2][i * 2 + j % 2]; }
  static __device__ int row(int i) { return 8 * i + threadIdx.x % 32 / 4; }
  static __device__ int col(int j) { return 8 * (j / 2) + threadIdx.x % 4 * 2 + j % 2; }
};

// Where the warp's 16 x 32 elements start in those of the block.
__device__ int warp_row() { return threadIdx.x / 64 * kWarpRows; }
__device__ int warp_col() { return threadIdx.x / 32 % 2 * kWarpCols; }

// The elements of a step's tile that a thread brings: number i is element k of a line. A warp loads
// neighbours in memory. If these are neighbours along k it takes 32 of a line. If they are lines it
// takes 8 of them for 4 k: 8 floats are a sector, and the 32 elements go to 32 different banks.
struct Element {
  int line, k;
};
template <typename T, bool kAlongK>
__device__ Element element(int i) {
  constexpr int kStep = Tiles<T>::kStep;
  const int at = threadIdx.x + i * kThreads;
  if constexpr (kAlongK) return {at / kStep, at % kStep};
  return {at % 8 + at / 32 % 8 * 8, at / 8 % 4 + at / 256 * 4};
}

template <typename T, bool kAlongK, class Factor>
__device__ void load(T (&registers)[Tiles<T>::kEach], const Factor& factor, int k0) {
#pragma unroll
  for (int i = 0; i < Tiles<T>::kEach; ++i) {
    const Element at = element<T, kAlongK>(i);
    registers[i] = factor(at.line, k0 + at.k);
  }
}

// To shared memory; floats rounded to TF32, once for all warps that read them.
template <typename T, bool kAlongK>
__device__ void store(T* tile, const T (&registers)[Tiles<T>::kEach]) {
#pragma unroll
  for (int i = 0; i < Tiles<T>::kEach; ++i) {
    const Element at = element<T, kAlongK>(i);
    T& to = tile[at.line * Tiles<T>::kStride + at.k];
    if constexpr (sizeof(T) == 4) {
      to = __uint_as_float(to_tf32(registers[i]));
    } else {
      to = registers[i];
    }
  }
}

// Adds a warp's products of one step. An instruction takes 32 bytes of each line: 8 floats, or 16
// halves. In bytes both look the same, so ldmatrix loads both. In the tile of the right factor k
// is contiguous, too: what the instruction wants of a column lies together, and nothing has to be
// transposed.
template <typename T>
__device__ void add_products(Sums& sums, const T* left, const T* right) {
  constexpr int kStride = Tiles<T>::kStride, kHalf = 16 / static_cast<int>(sizeof(T));
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Tiles<T>::kStep; k += 2 * kHalf) {
    unsigned a[4], b[2][4];
    ldmatrix_x4(a, left + lane % 16 * kStride + k + lane / 16 * kHalf);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ldmatrix_x4(b[i],
                  right + (16 * i + lane / 16 * 8 + lane % 8) * kStride + k + lane / 8 % 2 * kHalf);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const unsigned b0 = b[j / 2][j % 2 * 2], b1 = b[j / 2][j % 2 * 2 + 1];
      if constexpr (sizeof(T) == 4) {
        mma_m16n8k8_tf32(sums.v[j], a, b0, b1);
      } else {
        mma_m16n8k16<T>(sums.v[j], a, b0, b1);
      }
    }
  }
}

// A slice of the sum's `depth` steps along k: number `index` of `count`. A tile of 64 x 64 is
// little work, and few of them leave most of a GPU idle. So the blocks of several slices share a
// tile.
struct Slice {
  int index, count;

  template <typename T>
  __device__ int begin(int depth, int i) const {
    const int steps = (depth + Tiles<T>::kStep - 1) / Tiles<T>::kStep;
    return min(depth, static_cast<int>(static_cast<int64_t>(steps) * i / count) * Tiles<T>::kStep);
  }
};

// The sum over a slice. While a step is multiplied the elements of the next one are on their way to
// registers; in shared memory there is room for two steps, so one barrier a step is enough: when a
// step is stored, all warps are done with the one before the last. kLeftAlongK, kRightAlongK: along
// which index neighbours in memory lie.
template <typename T, bool kLeftAlongK, bool kRightAlongK, class Left, class Right>
__device__ void multiply(Sums& sums, Tiles<T>& tiles, int depth, Slice slice, const Left& left,
                         const Right& right) {
  const int first = slice.begin<T>(depth, slice.index),
            end = slice.begin<T>(depth, slice.index + 1);
  T next_left[Tiles<T>::kEach], next_right[Tiles<T>::kEach];
  load<T, kLeftAlongK>(next_left, left, first);
  load<T, kRightAlongK>(next_right, right, first);
  for (int k0 = first, stage = 0; k0 < end; k0 += Tiles<T>::kStep, stage ^= 1) {
    store<T, kLeftAlongK>(tiles.left[stage], next_left);
    store<T, kRightAlongK>(tiles.right[stage], next_right);
    __syncthreads();
    if (k0 + Tiles<T>::kStep < end) {
      load<T, kLeftAlongK>(next_left, left, k0 + Tiles<T>::kStep);
      load<T, kRightAlongK>(next_right, right, k0 + Tiles<T>::kStep);
    }
    add_products<T>(sums, tiles.left[stage] + warp_row() * Tiles<T>::kStride,
                    tiles.right[stage] + warp_col() * Tiles<T>::kStride);
  }
}

// ---- Cross-entropy, softmax of several heads and of fp16 inputs ---------------------------------

// x (B, D) and W (D, H, C): C columns for each head. Most layers have one head.
template <typename T>
struct Layer {
  const T *x, *W;
  int B, D, H, C;
};

struct Results {
  float* out;                   // (B, H, C): logits at first, then probs or dlogits
  const int* labels = nullptr;  // (B): with labels it is cross-entropy, without them softmax
  float* loss = nullptr;        // (B)
};

// A warp turns a row of logits, whose maximum and sum of exp(logit - largest) it knows, into
// probabilities; or, with labels, into the gradient of the loss. The logarithm is never taken of a
// probability, which may be 0.
__device__ void finish_row(float largest, float sum, size_t row, int C, const Results& results) {
  const int lane = threadIdx.x % 32;
  float* out = results.out + row * C;
  int label = -1;
  if (results.labels) {
    label = results.labels[row];
    if (lane == 0) results.loss[row] = logf(sum) - (out[label] - largest);
    __syncwarp();  // the label's logit has been read: it may be overwritten
  }
#pragma unroll 4
  for (int col = lane; col < C; col += 32) {
    out[col] = expf(out[col] - largest) / sum - (col == label ? 1 : 0);
  }
}

// A warp makes of a row of logits what Results asks for: of one that a library has left in `out`,
// or of the sum of `slices` rows of `logits` (slices, rows, C), which it adds up 128 columns at a
// time.
__global__ void finish_rows(const float* logits, int slices, Results results, size_t rows, int C) {
  start_next_kernel();
  wait_for_previous_kernel();
  const size_t row = size_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  float* out = results.out + row * C;
  float largest = minus_infinity(), sum = 0;
  for (int first = lane; first < C; first += 128) {
    float v[4] = {};
#pragma unroll 4
    for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + 32 * i < C) v[i] += logits[(slice * rows + row) * C + first + 32 * i];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + 32 * i >= C) continue;
      out[first + 32 * i] = v[i];
      largest = fmaxf(largest, v[i]);
    }
  }
  largest = lanes_max<32>(largest);
  __syncwarp();  // the lane that takes the label's logit may not be the one that has stored it
#pragma unroll 4
  for (int col = lane; col < C; col += 32) sum += expf(out[col] - largest);
  finish_row(largest, lanes_sum<32>(sum), row, C, results);
}

// Logits: a block has 64 rows and 64 columns of a head, and the slice blockIdx.y of D; they go to
// its slice of `logits` (slices, B, H, C). finish_rows() adds the slices up and makes of them what
// is wanted: this is lesson 9's half fused way, and what is new is how little a loss and its
// gradient, or heads, add to it.
//
// To a softmax each head of a row is a row of its own. Tiles end where a head ends.
template <typename T>
__global__ void __launch_bounds__(kThreads) head_tiles(Layer<T> layer, float* logits) {
  start_next_kernel();
  wait_for_previous_kernel();
  __shared__ Tiles<T> tiles;
  const int B = layer.B, D = layer.D, H = layer.H, C = layer.C;
  const int column_tiles = (C + kTile - 1) / kTile, col0 = blockIdx.x % column_tiles * kTile;
  const int group = blockIdx.x / column_tiles;  // of blocks that have the same rows of a head
  const int head = group % H, row0 = group / H * kTile;
  const auto row_of_head = [&](int row) { return static_cast<size_t>(row) * H + head; };
  const Slice slice{static_cast<int>(blockIdx.y), static_cast<int>(gridDim.y)};
  Sums sums;
  multiply<T, true, false>(
      sums, tiles, D, slice,
      [&](int line, int k) {
        const bool inside = row0 + line < B && k < D;
        return inside ? layer.x[static_cast<size_t>(row0 + line) * D + k] : T(0);
      },
      [&](int line, int k) {
        const bool inside = col0 + line < C && k < D;
        return inside ? layer.W[(static_cast<size_t>(k) * H + head) * C + col0 + line] : T(0);
      });
  logits += static_cast<size_t>(slice.index) * B * H * C;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int row = row0 + warp_row() + Sums::row(i), col = col0 + warp_col() + Sums::col(j);
      if (row < B && col < C) logits[row_of_head(row) * C + col] = sums.at(i, j);
    }
  }
}

// ---- The backward pass --------------------------------------------------------------------------

//     dlogits = probs * (dprobs - s),  s(b) = sum over c of probs(b, c) dprobs(b, c)
//     dx (B, D) = dlogits W^T,  dW (D, C) = x^T dlogits
//
// A library writes dlogits, and reads it twice. But once s is known, and it is one number a row,
// dlogits is elementwise: each product can compute it on the way to shared memory. It reads two
// numbers for each element of dlogits, and none is written.

// A warp has a row: s, and dlogits if that is wanted.
__global__ void backward_rows(const float* probs, const float* dprobs, float* s, float* dlogits,
                              int B, int C) {
  start_next_kernel();
  wait_for_previous_kernel();
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= B) return;
  const size_t start = static_cast<size_t>(row) * C;
  float dot = 0;
  for (int col = lane; col < C; col += 32) dot += probs[start + col] * dprobs[start + col];
  dot = lanes_sum<32>(dot);
  if (s && lane == 0) s[row] = dot;
  if (!dlogits) return;
  for (int col = lane; col < C; col += 32) {
    dlogits[start + col] = probs[start + col] * (dprobs[start + col] - dot);
  }
}

struct Backward {
  const float *x, *W, *probs, *dprobs;
  const float* s;        // (B), or
  const float* dlogits;  // (B, C): read, and not computed, if it is there
  float *dx, *dW;
  int B, D, C;
  // dW's sum over B is cut into slices, whose sums go to `partial` (slices, D, C).
  int slices = 1;
  float* partial = nullptr;
  unsigned* arrived = nullptr;  // of each tile of dW, see is_last_block()

  __device__ float dlogit(int b, int c) const {
    if (b >= B || c >= C) return 0;
    const size_t at = static_cast<size_t>(b) * C + c;
    return dlogits ? dlogits[at] : probs[at] * (dprobs[at] - s[b]);
  }
};

// The block's 64 x 64 elements at (row0, col0), to `out` of rows x cols.
__device__ void store_sums(Sums& sums, float* out, int row0, int col0, int rows, int cols) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int row = row0 + warp_row() + Sums::row(i), col = col0 + warp_col() + Sums::col(j);
      if (row < rows && col < cols) out[static_cast<size_t>(row) * cols + col] = sums.at(i, j);
    }
  }
}

// Neither product fills a GPU alone, and neither needs the other one: the first blocks have a tile
// of dx each, the others one of dW, or a slice of it. For dx neighbours in memory lie along k,
// which is c, in both factors; for dW k is b, and they lie across it in both. The sums over B are
// the longest: the last block of a tile's slices to end adds them up, always in the same order.
__global__ void __launch_bounds__(kThreads) gradients(Backward given) {
  start_next_kernel();
  wait_for_previous_kernel();
  __shared__ Tiles<float> tiles;
  const int B = given.B, D = given.D, C = given.C;
  const int tiles_B = (B + kTile - 1) / kTile, tiles_D = (D + kTile - 1) / kTile;
  const int tiles_C = (C + kTile - 1) / kTile, number = blockIdx.x - tiles_B * tiles_D;
  Sums sums;
  if (number < 0) {
    const int row0 = blockIdx.x / tiles_D * kTile, col0 = blockIdx.x % tiles_D * kTile;
    multiply<float, true, true>(
        sums, tiles, C, {0, 1}, [&](int line, int c) { return given.dlogit(row0 + line, c); },
        [&](int line, int c) {
          const bool inside = col0 + line < D && c < C;
          return inside ? given.W[static_cast<size_t>(col0 + line) * C + c] : 0;
        });
    store_sums(sums, given.dx, row0, col0, B, D);
    return;
  }
  const int tile = number / given.slices, slice = number % given.slices;
  const int row0 = tile / tiles_C * kTile, col0 = tile % tiles_C * kTile;
  multiply<float, false, false>(
      sums, tiles, B, {slice, given.slices},
      [&](int line, int b) {
        const bool inside = row0 + line < D && b < B;
        return inside ? given.x[static_cast<size_t>(b) * D + row0 + line] : 0;
      },
      [&](int line, int b) { return given.dlogit(b, col0 + line); });
  const size_t count = static_cast<size_t>(D) * C;
  float* to = given.slices == 1 ? given.dW : given.partial + slice * count;
  store_sums(sums, to, row0, col0, D, C);
  if (given.slices == 1 || !is_last_block(given.arrived + tile, given.slices)) return;
#pragma unroll 4
  for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
    const int row = row0 + i / kTile, col = col0 + i % kTile;
    if (row >= D || col >= C) continue;
    float sum = 0;
    for (int slice = 0; slice < given.slices; ++slice) {
      sum += given.partial[slice * count + static_cast<size_t>(row) * C + col];
    }
    given.dW[static_cast<size_t>(row) * C + col] = sum;
  }
}

// -------------------------------------------------------------------------------------------------

// Labels from random numbers in [0, 1).
__global__ void choose_labels(const float* random, int* labels, int B, int C) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b < B) labels[b] = min(static_cast<int>(random[b] * static_cast<float>(C)), C - 1);
}

// Rows of x begin with 1, and those of W with 0 and -200: every second class is all but impossible.
// Its probability is 0 in fp32, and the loss of whom it is the label about 200.
__global__ void make_rare(float* x, float* W, int B, int D, int C) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < B) x[static_cast<size_t>(i) * D] = 1;
  if (i < C) W[i] = i % 2 == 0 ? 0 : -200;
}

// logits (B, C) = x W by cuBLAS; row-major: W and x swapped, see lesson 4.
void library_product(cublasHandle_t blas, const void* x, const void* W, float* logits,
                     const SoftmaxShape& shape, cudaDataType_t type, cublasComputeType_t compute) {
  const float one = 1, zero = 0;
  const int B = static_cast<int>(shape.rows), D = static_cast<int>(shape.inputs),
            C = static_cast<int>(shape.classes);
  CUBLAS_CHECK(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, C, B, D, &one, W, type, C, x, type, D,
                            &zero, logits, CUDA_R_32F, C, compute, CUBLAS_GEMM_DEFAULT));
}

// dx = dlogits W^T and dW = x^T dlogits by cuBLAS.
void library_gradients(cublasHandle_t blas, const Backward& given) {
  const float one = 1, zero = 0;
  const int B = given.B, D = given.D, C = given.C;
  CUBLAS_CHECK(cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, D, B, C, &one, given.W, CUDA_R_32F, C,
                            given.dlogits, CUDA_R_32F, C, &zero, given.dx, CUDA_R_32F, D,
                            CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_GEMM_DEFAULT));
  CUBLAS_CHECK(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_T, C, D, B, &one, given.dlogits,
                            CUDA_R_32F, C, given.x, CUDA_R_32F, D, &zero, given.dW, CUDA_R_32F, C,
                            CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_GEMM_DEFAULT));
}

// As many slices as give each multiprocessor two blocks, of kLeast of the sum's terms or more.
int slices_of(int64_t depth, int64_t tiles, int sms) {
  constexpr int64_t kLeast = 128;
  return static_cast<int>(
      std::clamp<int64_t>(2 * sms / tiles, 1, std::max<int64_t>(1, depth / kLeast)));
}

// Our product, and finish_rows() after it: for softmax, without labels, or for cross-entropy, with
// them.
template <typename T>
std::function<void(Results)> make_half_fused(const Lesson& lesson, Problem& problem,
                                             const SoftmaxShape& shape, int H, const Buffer<T>& x,
                                             const Buffer<T>& W) {
  const unsigned tiles = blocks_for(shape.rows, kTile) * H * blocks_for(shape.classes, kTile);
  const int slices = slices_of(shape.inputs, tiles, lesson.device().sms);
  const auto logits = problem.output<float>(slices * shape.rows * H * shape.classes);
  const int B = static_cast<int>(shape.rows), D = static_cast<int>(shape.inputs),
            C = static_cast<int>(shape.classes);
  return [=](Results results) {
    const size_t rows = static_cast<size_t>(B) * H;
    launch_early(head_tiles<T>, dim3(tiles, slices), kThreads, 0, Layer<T>{x, W, B, D, H, C},
                 logits.data());
    launch_early(finish_rows, blocks_for(rows, 8), 256, 0, logits.data(), slices, results, rows, C);
  };
}

// ---- The tables ---------------------------------------------------------------------------------

std::string text_of(const SoftmaxShape& shape) {
  return std::to_string(shape.rows) + "x" + std::to_string(shape.inputs) + "x" +
         std::to_string(shape.classes);
}

std::vector<Dim> dims_of(const SoftmaxShape& shape) {
  return {{"B", shape.rows}, {"D", shape.inputs}, {"C", shape.classes}};
}

double weight_scale(const SoftmaxShape& shape) {
  return kWeightScale / sqrt(static_cast<double>(shape.inputs));
}

// The bound on probs after a product in TF32.
double tf32_tolerance(const SoftmaxShape& shape) {
  return softmax_tolerance(shape.inputs, tensor_core_sum(shape.inputs), kRoundoffTf32);
}

// Cross-entropy of softmax(x W) with labels: loss (B) and dlogits (B, C).
void add_cross_entropy(Lesson& lesson, cublasHandle_t blas, const SoftmaxShape& shape) {
  const std::string name = "cross-entropy " + text_of(shape);
  Problem& problem =
      lesson.problem(name, dims_of(shape), "tf32",
                     {.flops = shape.flops(), .bytes = shape.bytes(sizeof(float))}, Rate::tf32);
  problem.in_graph();
  const auto x = problem.input<float>(shape.rows * shape.inputs);
  const auto W = problem.input<float>(shape.inputs * shape.classes, weight_scale(shape));
  const int B = static_cast<int>(shape.rows), C = static_cast<int>(shape.classes);
  const auto random = problem.input<float>(B, 0.5, 0.5);
  const auto labels = problem.workspace<int>(B);
  const auto loss = problem.output<float>(B);
  const auto dlogits = problem.output<float>(shape.rows * shape.classes);
  const auto expected_loss = problem.reference(B), expected = problem.reference(dlogits.size());
  const bool hard = lesson.flag("--hard-rows");
  problem.adjust_inputs([=] {
    choose_labels<<<blocks_for(B, 256), 256>>>(random, labels, B, C);
    if (hard) {
      const int D = static_cast<int>(shape.inputs);
      make_rare<<<blocks_for(std::max(B, C), 256), 256>>>(x, W, B, D, C);
    }
    CUDA_CHECK(cudaGetLastError());
  });
  const Uncancelled uncancelled;
  problem.reference_from(cross_entropy_scratch(shape), [=, &lesson] {
    uncancelled.find(x.data(), W.data(), shape, {.labels = labels});
    const GradientCheck check =
        reference_cross_entropy(blas, {x, W, labels, expected_loss, expected}, shape);
    lesson.note(check.verdict(name.c_str()));
  });
  // The loss is a logarithm: its absolute error is a probability's relative one, and it is more
  // than 1/2 on average, the least for two classes. The gradient is probs but for one element a
  // row, which is p - 1 instead of p: of the same error, and for two classes just as large.
  problem.check(loss, expected_loss, 2 * tf32_tolerance(shape), uncancelled.loss);
  problem.check(dlogits, expected, 2 * tf32_tolerance(shape), uncancelled.probs);

  const auto results = [=] { return Results{.out = dlogits, .labels = labels, .loss = loss}; };
  problem
      .kernel("library", Role::library,
              [=] {
                library_product(blas, x, W, dlogits, shape, CUDA_R_32F,
                                CUBLAS_COMPUTE_32F_FAST_TF32);
                launch_early(finish_rows, blocks_for(B, 8), 256, 0, dlogits.data(), 1, results(),
                             size_t(B), C);
              })
      .needs(80);
  const auto ours = make_half_fused<float>(lesson, problem, shape, 1, x, W);
  problem.kernel("half fused", Role::ours, [=] { ours(results()); }).needs(80);
  problem.compare("half fused", "library", name + ": % times as fast as the library.");
}

// A softmax for each of H heads of C columns: probs (B, H, C).
void add_heads(Lesson& lesson, cublasHandle_t blas, const SoftmaxShape& shape, int H) {
  const int64_t rows = shape.rows * H;
  const SoftmaxShape all = {shape.rows, shape.inputs, shape.classes * H};  // of the product
  if (all.classes > INT32_MAX) fail(kBadUsage, "--heads times --classes: below 2^31");
  const std::string name = "heads " + text_of(all);
  Problem& problem =
      lesson.problem(name, {{"B", shape.rows}, {"D", shape.inputs}, {"H", H}, {"C", shape.classes}},
                     "tf32", {.flops = all.flops(), .bytes = all.bytes(sizeof(float))}, Rate::tf32);
  problem.in_graph();
  const auto x = problem.input<float>(shape.rows * shape.inputs);
  const auto W = problem.input<float>(shape.inputs * all.classes, weight_scale(shape));
  const auto probs = problem.output<float>(rows * shape.classes);
  const auto expected = problem.reference(probs.size());
  const Uncancelled uncancelled;
  problem.reference_from(softmax_scratch(all), [=] {
    reference_matmul<float>(blas, x, W, expected, all.rows, all.classes, all.inputs);
    softmax_fp64(expected, rows, shape.classes);
    uncancelled.find(x.data(), W.data(), shape, {.heads = H});
  });
  problem.check(probs, expected, tf32_tolerance(shape), uncancelled.probs);
  const int C = static_cast<int>(shape.classes);
  problem
      .kernel("library", Role::library,
              [=] {
                library_product(blas, x, W, probs, all, CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32);
                launch_early(finish_rows, blocks_for(rows, 8), 256, 0, probs.data(), 1,
                             Results{.out = probs}, size_t(rows), C);
              })
      .needs(80);
  const auto ours = make_half_fused<float>(lesson, problem, shape, H, x, W);
  problem.kernel("heads", Role::ours, [=] { ours({.out = probs}); }).needs(80);
  problem.compare("heads", "library", name + ": % times as fast as the library.");
}

// x and W in fp16, the product in fp16 on tensor cores, logits and softmax in fp32.
void add_mixed_precision(Lesson& lesson, cublasHandle_t blas, const SoftmaxShape& shape) {
  const std::string name = "fp16 " + text_of(shape);
  Problem& problem =
      lesson.problem(name, dims_of(shape), "fp16",
                     {.flops = shape.flops(), .bytes = shape.bytes(sizeof(half))}, Rate::fp16);
  problem.in_graph();
  const auto x = problem.input<half>(shape.rows * shape.inputs);
  const auto W = problem.input<half>(shape.inputs * shape.classes, weight_scale(shape));
  const auto probs = problem.output<float>(shape.rows * shape.classes);
  const auto expected = problem.reference(probs.size());
  const Uncancelled uncancelled;
  problem.reference_from(softmax_scratch(shape), [=] {
    reference_softmax<half>(blas, x, W, expected, shape);
    uncancelled.find(x.data(), W.data(), shape, {});
  });
  problem.check(probs, expected, softmax_tolerance(shape.inputs, tensor_core_sum(shape.inputs)),
                uncancelled.probs);
  const int B = static_cast<int>(shape.rows), C = static_cast<int>(shape.classes);
  problem.kernel("library", Role::library, [=] {
    library_product(blas, x.data(), W.data(), probs, shape, CUDA_R_16F, CUBLAS_COMPUTE_32F);
    launch_early(finish_rows, blocks_for(B, 8), 256, 0, probs.data(), 1, Results{.out = probs},
                 size_t(B), C);
  });
  const auto ours = make_half_fused<half>(lesson, problem, shape, 1, x, W);
  problem.kernel("half fused", Role::ours, [=] { ours({.out = probs}); });
  problem.compare("half fused", "library", name + ": % times as fast as the library.");
}

// dx (B, D) and dW (D, C) from dprobs, and from the forward pass's x, W and probs.
void add_backward(Lesson& lesson, cublasHandle_t blas, const SoftmaxShape& shape) {
  const double b = static_cast<double>(shape.rows), d = static_cast<double>(shape.inputs),
               c = static_cast<double>(shape.classes);
  const std::string name = "backward " + text_of(shape);
  Problem& problem = lesson.problem(
      name, dims_of(shape), "tf32",
      {.flops = b * c * (4 * d + 4), .bytes = 4 * (2 * b * d + 2 * d * c + 2 * b * c)}, Rate::tf32);
  problem.in_graph();
  const auto x = problem.input<float>(shape.rows * shape.inputs);
  const auto W = problem.input<float>(shape.inputs * shape.classes, weight_scale(shape));
  const auto probs = problem.input<float>(shape.rows * shape.classes);
  const auto dprobs = problem.input<float>(shape.rows * shape.classes);
  const auto dx = problem.output<float>(x.size()), dW = problem.output<float>(W.size());
  const auto dlogits = problem.output<float>(probs.size());
  const auto s = problem.output<float>(shape.rows);
  const auto expected_dx = problem.reference(x.size()), expected_dW = problem.reference(W.size());
  problem.adjust_inputs([=] {
    library_product(blas, x, W, probs, shape, CUDA_R_32F, CUBLAS_COMPUTE_32F);
    finish_rows<<<blocks_for(shape.rows, 8), 256>>>(probs, 1, Results{.out = probs}, shape.rows,
                                                    static_cast<int>(shape.classes));
    CUDA_CHECK(cudaGetLastError());
  });
  const Uncancelled uncancelled;
  problem.reference_from(backward_scratch(shape), [=, &lesson] {
    uncancelled.find(x.data(), W.data(), shape, {.dprobs = dprobs});
    const GradientCheck check =
        reference_backward(blas, {x, W, dprobs, expected_dx, expected_dW}, shape);
    lesson.note(check.verdict(name.c_str()));
  });
  // dlogits inherits the error of probs, whose bound counts four times: where dprobs - s is small
  // both of its parts are larger than it. s adds that of a sum of C terms in fp32. Then dlogits and
  // the other factor are rounded to TF32, and summed: C terms for dx, B for dW.
  const double of_dlogits = 4 * softmax_tolerance(shape.inputs, kRoundoffFp32) +
                            dot_tolerance(shape.classes, kRoundoffFp32, kRoundoffFp32);
  const auto tolerance = [&](int64_t length) {
    return of_dlogits + dot_tolerance(length, tensor_core_sum(length), 0, kRoundoffTf32);
  };
  problem.check(dx, expected_dx, tolerance(shape.classes), uncancelled.dx);
  problem.check(dW, expected_dW, tolerance(shape.rows), uncancelled.dW);

  const int B = static_cast<int>(shape.rows), D = static_cast<int>(shape.inputs),
            C = static_cast<int>(shape.classes);
  problem
      .kernel("library", Role::library,
              [=] {
                launch_early(backward_rows, blocks_for(B, 8), 256, 0, probs.data(), dprobs.data(),
                             static_cast<float*>(nullptr), dlogits.data(), B, C);
                library_gradients(blas, {x, W, probs, dprobs, nullptr, dlogits, dx, dW, B, D, C});
              })
      .needs(80);
  const unsigned tiles_dx = blocks_for(B, kTile) * blocks_for(D, kTile);
  const unsigned tiles_dW = blocks_for(D, kTile) * blocks_for(C, kTile);
  const int slices = slices_of(B, tiles_dW, lesson.device().sms);
  const unsigned tiles = tiles_dx + tiles_dW * slices;
  const auto partial = problem.output<float>(slices > 1 ? slices * W.size() : 1);
  const auto arrived = problem.workspace<unsigned>(tiles_dW);
  problem
      .kernel("dlogits in memory", Role::ours,
              [=] {
                const Backward given = {x,  W, probs, dprobs, nullptr, dlogits, dx,
                                        dW, B, D,     C,      slices,  partial, arrived};
                launch_early(backward_rows, blocks_for(B, 8), 256, 0, probs.data(), dprobs.data(),
                             static_cast<float*>(nullptr), dlogits.data(), B, C);
                launch_early(gradients, tiles, kThreads, 0, given);
              })
      .needs(80);
  problem
      .kernel("dlogits on the fly", Role::ours,
              [=] {
                const Backward given = {x,  W, probs, dprobs, s,      nullptr, dx,
                                        dW, B, D,     C,      slices, partial, arrived};
                launch_early(backward_rows, blocks_for(B, 8), 256, 0, probs.data(), dprobs.data(),
                             s.data(), static_cast<float*>(nullptr), B, C);
                launch_early(gradients, tiles, kThreads, 0, given);
              })
      .needs(80);
  problem.compare("dlogits on the fly", "dlogits in memory",
                  name + ": dlogits on the fly is % times as fast as dlogits in memory.");
  problem.compare("dlogits on the fly", "library", name + ": % times as fast as the library.");
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "9_softmax_training",
                 .title = "softmax(x W) in training: its loss, its gradients, several heads, fp16",
                 .n_meaning = "B, rows of x",
                 .n_gpu = 1024,
                 .n_cpu = 32,
                 .options = {{"--inputs", "D, columns of x", 1024},
                             {"--classes", "C, columns of W", 100},
                             {"--heads", "H: W has C columns for each of them, in one table", 4}},
                 .flags = {{"--hard-rows", "cross-entropy: probabilities of labels that are 0"}}});
  const SoftmaxShape shape = {lesson.n(), lesson.option("--inputs"), lesson.option("--classes")};
  Cublas blas;
  if (shape.classes > 1) {  // of one class the probability is 1, and every gradient 0
    add_cross_entropy(lesson, blas, shape);
    add_backward(lesson, blas, shape);
  }
  add_heads(lesson, blas, shape, static_cast<int>(lesson.option("--heads")));
  add_mixed_precision(lesson, blas, shape);
  return lesson.run();
}
