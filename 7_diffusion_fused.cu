// 7. Spatial diffusion on a mesh, forward and backward
//
//     spectral = exp(-evalues[:, None] * times[None, :]) * (basis^T (mass[:, None] * x))    (E, W)
//     out      = basis spectral                                                             (V, W)
//     x (V, W), basis (V, E), mass (V), evalues (E), times (W): bf16, row-major; fp32 accumulation
//
// The first block of DiffusionNet (Sharp, Attaiki, Crane, Ovsjanikov, arXiv 2012.00888): W features
// on the V vertices of a surface spread as heat does, feature w for times[w]. In the basis of the
// first E eigenvectors of the surface's Laplacian this is a product with e^(-evalue time); mass is
// the area around each vertex. So: project onto the basis, damp, expand. Backward, given the
// gradients with respect to the two results, dOut (V, W) and dSpectral (E, W),
//
//     s      = dSpectral + basis^T dOut                                                     (E, W)
//     dTimes = -(evalues[:, None] * s * spectral).sum(0)                                    (W)
//     dX     = mass[:, None] * (basis (exp(-evalues[:, None] * times[None, :]) * s))        (V, W)
//
// which has the same shape: a product with basis^T, something elementwise, a product with basis.
//
// What moves is x, out and the basis; what is computed is 4 V E W operations. With E = 128 and
// W = 256 that is 100 operations per byte, half of what would keep a GPU's tensor cores busy:
// memory is the limit, and temporaries would cost what they cost in lesson 5. But the fusion of
// lesson 6 is not possible. There a row of the result needs one row of x. Here it needs all of
// them: every element of spectral is a sum over all vertices, and until the last one is added no
// row of out can be computed. Two products, with everybody's sum between them: what can still be
// fused?
//
//     unfused      five library and elementwise kernels, as a framework launches them
//     half fused   the elementwise work moves into the first product (mass into its operand, the
//                  exponential into its epilogue). But its result is only 128 x 256: eight tiles,
//                  eight blocks, each walking over all vertices, on a GPU made for hundreds
//     split-K      the sum over vertices is cut into slices: blocks for the whole GPU
//     one launch   the same, and the second product too, in one kernel
//
// The limit that a table prints counts each input and output once, the basis too. A kernel that
// cannot keep its part of the basis on chip between the products has to read it twice; with E = 128
// and W = 256 that is 1.2 times as much. On chip is room for the basis of about 10^5
// vertices; the one launch, which needs room for x as well, keeps that of 17000.
//
// The first three need compute capability 8.0 (bf16 on tensor cores), the last one needs 9.0. The
// CPU backend runs all.

#include <cuda/atomic>
#include <deque>
#include <vector>

#include "common/async_copy.cuh"
#include "common/early_launch.cuh"
#include "common/gradient_check.h"
#include "common/hopper.cuh"
#include "common/lesson.h"
#include "common/mma.cuh"
#include "common/numerics.h"

using bf16 = __nv_bfloat16;

// E and W are multiples of 16: every row starts at a multiple of 32 bytes.
struct Shape {
  int64_t V, E, W;
  size_t vertex_values() const { return static_cast<size_t>(V) * W; }
  size_t spectrum_values() const { return static_cast<size_t>(E) * W; }
};

constexpr unsigned blocks_for(int64_t count, int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

// e^(-evalue time). __expf is off by 2 or 3 units in the last place of fp32 here, where the
// exponent is between -2 and 0; what it multiplies is rounded to bf16.
__device__ float damping(float evalue, float time) { return __expf(-evalue * time); }

// ---- unfused: the elementwise kernels -----------------------------------------------------------

// A thread owns 8 neighbouring elements of its result and moves them as 16 bytes.
struct alignas(16) Pack {
  bf16 values[8];
};
constexpr int kThreads = 256;
constexpr int64_t kPerBlock = 8 * kThreads;

// out (rows, W) = factor[:, None] * in
__global__ void scale_rows(const bf16* factor, const bf16* in, bf16* out, size_t count, int W) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (i >= count) return;
  const float scale = __bfloat162float(factor[i / W]);
  Pack pack = *reinterpret_cast<const Pack*>(in + i);
  for (bf16& value : pack.values) value = __float2bfloat16_rn(scale * __bfloat162float(value));
  *reinterpret_cast<Pack*>(out + i) = pack;
}

// out (E, W) = exp(-evalues[:, None] * times[None, :]). A framework needs a kernel each for the
// outer product, the sign and the exponential; this baseline gets them in one.
__global__ void damping_factors(const bf16* evalues, const bf16* times, bf16* out, size_t count,
                                int W) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (i >= count) return;
  const float evalue = __bfloat162float(evalues[i / W]);
  Pack pack = *reinterpret_cast<const Pack*>(times + i % W);
  for (bf16& value : pack.values) {
    value = __float2bfloat16_rn(damping(evalue, __bfloat162float(value)));
  }
  *reinterpret_cast<Pack*>(out + i) = pack;
}

__global__ void multiply(const bf16* left, const bf16* right, bf16* out, size_t count) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (i >= count) return;
  const Pack a = *reinterpret_cast<const Pack*>(left + i);
  Pack b = *reinterpret_cast<const Pack*>(right + i);
  for (int j = 0; j < 8; ++j) {
    b.values[j] =
        __float2bfloat16_rn(__bfloat162float(a.values[j]) * __bfloat162float(b.values[j]));
  }
  *reinterpret_cast<Pack*>(out + i) = b;
}

__global__ void add(const bf16* left, const bf16* right, bf16* out, size_t count) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (i >= count) return;
  const Pack a = *reinterpret_cast<const Pack*>(left + i);
  Pack b = *reinterpret_cast<const Pack*>(right + i);
  for (int j = 0; j < 8; ++j) {
    b.values[j] =
        __float2bfloat16_rn(__bfloat162float(a.values[j]) + __bfloat162float(b.values[j]));
  }
  *reinterpret_cast<Pack*>(out + i) = b;
}

// dTimes (W) = -(evalues[:, None] * s * spectral).sum(0), again several kernels in a framework. A
// warp owns 8 columns: lane l adds up every fourth row from l / 8 on of column l % 8.
__global__ void times_gradient(const bf16* evalues, const bf16* s, const bf16* spectral,
                               bf16* d_times, int E, int W) {
  const int warp = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32, w = 8 * warp + lane % 8;
  if (8 * warp >= W) return;
  float sum = 0;
  for (int e = lane / 8; e < E; e += 4) {
    const size_t at = static_cast<size_t>(e) * W + w;
    sum += __bfloat162float(evalues[e]) * __bfloat162float(s[at]) * __bfloat162float(spectral[at]);
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 8);
  sum += __shfl_xor_sync(0xffffffffu, sum, 16);
  if (lane < 8) d_times[w] = __float2bfloat16_rn(-sum);
}

// ---- unfused: the library's products ------------------------------------------------------------

// c (E, W) = basis^T values, row-major. cuBLAS is column-major, where these are the transposes:
// c^T = values^T basis, in which values^T is what memory holds, and basis is its transpose.
void project(cublasHandle_t blas, const bf16* basis, const bf16* values, bf16* c, Shape shape) {
  const float one = 1, zero = 0;
  const int V = static_cast<int>(shape.V), E = static_cast<int>(shape.E);
  const int W = static_cast<int>(shape.W);
  CUBLAS_CHECK(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_T, W, E, V, &one, values, CUDA_R_16BF, W,
                            basis, CUDA_R_16BF, E, &zero, c, CUDA_R_16BF, W, CUBLAS_COMPUTE_32F,
                            CUBLAS_GEMM_DEFAULT));
}

// c (V, W) = basis spectrum, row-major.
void expand(cublasHandle_t blas, const bf16* basis, const bf16* spectrum, bf16* c, Shape shape) {
  const float one = 1, zero = 0;
  const int V = static_cast<int>(shape.V), E = static_cast<int>(shape.E);
  const int W = static_cast<int>(shape.W);
  CUBLAS_CHECK(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, W, V, E, &one, spectrum, CUDA_R_16BF, W,
                            basis, CUDA_R_16BF, E, &zero, c, CUDA_R_16BF, W, CUBLAS_COMPUTE_32F,
                            CUBLAS_GEMM_DEFAULT));
}

// ---- half fused ---------------------------------------------------------------------------------

// Both passes consist of a product to a spectrum and a product from a spectrum; they differ in what
// happens to an operand or a result on the way.
enum class Pass { forward, backward };

// The product to the spectrum: what it reads and writes. What only the other pass needs is null.
struct SpectrumOperands {
  const bf16* values;      // (V, W): x or dOut
  const bf16* basis;       // (V, E)
  const bf16* mass;        // (V); forward
  const bf16* evalues;     // (E)
  const bf16* times;       // (W)
  const bf16* d_spectral;  // (E, W); backward
  const bf16* spectral;    // (E, W); backward
  bf16* spectrum;          // (E, W): spectral; backward, exp(-evalues times) * s
  float* time_sums;        // (rows of warps, W); backward, see finish_spectrum
};

// A block owns BE x BW elements of the spectrum, a warp WE x WW of them, in registers. Per step it
// needs BV rows of the basis (BE columns of them) and of the values (BW columns), and of mass.
// kStages such sets are in shared memory, all but one of them in flight.
template <int kBE, int kBW, int kBV, int kWarpsE, int kWarpsW, int kStageCount>
struct SpectrumTiles {
  static constexpr int BE = kBE, BW = kBW, BV = kBV, kStages = kStageCount;
  static constexpr int kWarpRows = kWarpsE, kWarpColumns = kWarpsW;
  static constexpr int WE = BE / kWarpsE, WW = BW / kWarpsW;
  static constexpr int kThreads = 32 * kWarpsE * kWarpsW;
  static constexpr int kStage = BV * (BE + BW + 1);  // elements
  static constexpr int kSharedBytes = kStages * kStage * sizeof(bf16);
  static_assert(BV % 64 == 0, "so that every tile of a stage is aligned to 128 bytes");
  using Sum = float[WE / 16][WW / 8][4];  // a lane's part, as mma_m16n8k16 leaves it
};

// Two pairs of bf16, multiplied and rounded.
__device__ inline unsigned multiply2(unsigned a, unsigned b) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                         *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const unsigned*>(&product);
}

// sum += the block's tile of basis^T (mass * values), over `steps` steps from first_step on.
//
// basis^T is the left factor. A tile of the basis is row-major in shared memory, and ldmatrix
// transposes it on the way to the registers: no transposed copy exists. There, mass multiplies it:
// a row of the basis is a column of the left factor, and a register of a fragment holds two
// neighbours of a row, two vertices, to which the same two masses belong in a[0] and a[1], and two
// others in a[2] and a[3]. That is one instruction a register, and it rounds to bf16 once, as a
// kernel for mass * x alone does.
template <Pass kPass, typename Tiles>
__device__ void multiply_slice(typename Tiles::Sum& sum, bf16* stages, const SpectrumOperands& in,
                               int first_step, int steps, int e0, int w0, int64_t V, int E, int W) {
  constexpr int BE = Tiles::BE, BW = Tiles::BW, BV = Tiles::BV, kStages = Tiles::kStages;
  constexpr int WE = Tiles::WE, WW = Tiles::WW;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_e = warp / Tiles::kWarpColumns * WE, warp_w = warp % Tiles::kWarpColumns * WW;
  const auto stage_of = [&](int step) { return stages + step % kStages * Tiles::kStage; };
  const auto copy_step = [&](int step) {
    if (step < steps) {
      bf16* basis_tile = stage_of(step);
      bf16* values_tile = basis_tile + BV * BE;
      bf16* mass_tile = values_tile + BV * BW;
      const int64_t v0 = static_cast<int64_t>(first_step + step) * BV;
      copy_swizzled<BV, BE, Tiles::kThreads>(basis_tile, in.basis, v0, e0, V, E);
      copy_swizzled<BV, BW, Tiles::kThreads>(values_tile, in.values, v0, w0, V, W);
      if (kPass == Pass::forward && threadIdx.x < BV / 8) {
        const int64_t v = v0 + 8 * threadIdx.x;
        bf16* to = mass_tile + 8 * threadIdx.x;
        if (v + 8 <= V) {
          copy_async<16>(to, in.mass + v, true);
        } else {  // V ends here
          for (int e = 0; e < 8; ++e) to[e] = v + e < V ? in.mass[v + e] : __float2bfloat16_rn(0);
        }
      }
    }
    copy_async_commit();
  };

  // Of 16 x 16 elements lane l passes a row of 8. Transposed, the left factor's four 8 x 8 matrices
  // lie in the tile of the basis as top left, top right, bottom left, bottom right.
  const int basis_lane = swizzle<BE>(lane % 8 + lane / 16 * 8, warp_e + lane / 8 % 2 * 8);
  const int values_lane = swizzle<BW>(lane % 16, warp_w + lane / 16 * 8);
  for (int step = 0; step < kStages - 1; ++step) copy_step(step);
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    copy_step(step + kStages - 1);
    const bf16* basis_tile = stage_of(step);
    const bf16* values_tile = basis_tile + BV * BE;
    const bf16* mass_tile = values_tile + BV * BW;
#pragma unroll
    for (int k = 0; k < BV; k += 16) {
      unsigned a[WE / 16][4], b[WW / 16][4];
#pragma unroll
      for (int i = 0; i < WE / 16; ++i) {
        ldmatrix_x4_trans(a[i], basis_tile + (basis_lane ^ 16 * i) + k * BE);
      }
#pragma unroll
      for (int j = 0; j < WW / 16; ++j) {
        ldmatrix_x4_trans(b[j], values_tile + (values_lane ^ 16 * j) + k * BW);
      }
      if constexpr (kPass == Pass::forward) {
        const bf16* mass = mass_tile + k + lane % 4 * 2;
        const unsigned low = *reinterpret_cast<const unsigned*>(mass);
        const unsigned high = *reinterpret_cast<const unsigned*>(mass + 8);
#pragma unroll
        for (int i = 0; i < WE / 16; ++i) {
          a[i][0] = multiply2(a[i][0], low);
          a[i][1] = multiply2(a[i][1], low);
          a[i][2] = multiply2(a[i][2], high);
          a[i][3] = multiply2(a[i][3], high);
        }
      }
#pragma unroll
      for (int i = 0; i < WE / 16; ++i) {
#pragma unroll
        for (int j = 0; j < WW / 8; ++j) {
          mma_m16n8k16<bf16>(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
}

// The epilogue of a warp whose sums are complete and start at (e0, w0) of the spectrum: the
// exponential and, backward, s and a part of dTimes. A column's sum over e is spread over 8 lanes,
// which shuffles add up, and over warps: each writes its part to row `sums_row` of time_sums, and
// the next kernel adds those few.
template <Pass kPass, typename Tiles>
__device__ void finish_spectrum(const typename Tiles::Sum& sum, const SpectrumOperands& to, int e0,
                                int w0, int sums_row, int E, int W) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < Tiles::WW / 8; ++j) {
    const int w = w0 + 8 * j + lane % 4 * 2;  // and w + 1: W is even
    const float2 time =
        w < W ? __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(to.times + w))
              : make_float2(0, 0);
    float2 time_sum = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < Tiles::WE / 8; ++i) {
      const int e = e0 + 8 * i + lane / 4;
      if (e >= E || w >= W) continue;
      const float evalue = __bfloat162float(to.evalues[e]);
      const size_t at = static_cast<size_t>(e) * W + w;
      float2 s = make_float2(sum[i / 2][j][i % 2 * 2], sum[i / 2][j][i % 2 * 2 + 1]);
      if constexpr (kPass == Pass::backward) {
        const float2 d_spectral =
            __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(to.d_spectral + at));
        const float2 spectral =
            __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(to.spectral + at));
        s.x += d_spectral.x;
        s.y += d_spectral.y;
        time_sum.x += evalue * s.x * spectral.x;
        time_sum.y += evalue * s.y * spectral.y;
      }
      *reinterpret_cast<unsigned*>(to.spectrum + at) =
          pack2<bf16>(damping(evalue, time.x) * s.x, damping(evalue, time.y) * s.y);
    }
    if constexpr (kPass == Pass::backward) {
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        time_sum.x += __shfl_xor_sync(0xffffffffu, time_sum.x, lanes);
        time_sum.y += __shfl_xor_sync(0xffffffffu, time_sum.y, lanes);
      }
      if (lane < 4 && w < W) {
        float* row = to.time_sums + static_cast<size_t>(sums_row) * W;
        row[w] = time_sum.x;
        row[w + 1] = time_sum.y;
      }
    }
  }
}

// Where the work of this thread's block and warp begins, if tile `tile` of the spectrum is its.
template <typename Tiles>
struct SpectrumPlace {
  int e0, w0;            // of the block
  int warp_e0, warp_w0;  // of the warp
  int sums_row;          // of time_sums
  __device__ SpectrumPlace(int tile, int E) {
    const int tiles_e = (E + Tiles::BE - 1) / Tiles::BE, warp = threadIdx.x / 32;
    e0 = tile % tiles_e * Tiles::BE;
    w0 = tile / tiles_e * Tiles::BW;
    warp_e0 = e0 + warp / Tiles::kWarpColumns * Tiles::WE;
    warp_w0 = w0 + warp % Tiles::kWarpColumns * Tiles::WW;
    sums_row = warp_e0 / Tiles::WE;
  }
};

// The first product with all that is elementwise around it: what the unfused kernels wrote to
// memory in between, mass * x and three E x W matrices, is now in registers. Block i owns tile i of
// the spectrum and walks over all of V. That is the trouble: eight tiles keep eight multiprocessors
// of 132 busy, and a multiprocessor only receives what it has asked for. With two stages, 32 KB,
// under way and most of a microsecond from request to arrival that is some 40 GB/s each, 0.3 TB/s
// for all eight, of the 4.8 TB/s that the memory of an H200 could serve.
template <Pass kPass, typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads)
    to_spectrum(SpectrumOperands operands, int64_t V, int E, int W) {
  extern __shared__ __align__(128) bf16 tiles[];
  const SpectrumPlace<Tiles> place(blockIdx.x, E);
  typename Tiles::Sum sum = {};
  const int steps = static_cast<int>((V + Tiles::BV - 1) / Tiles::BV);
  multiply_slice<kPass, Tiles>(sum, tiles, operands, 0, steps, place.e0, place.w0, V, E, W);
  finish_spectrum<kPass, Tiles>(sum, operands, place.warp_e0, place.warp_w0, place.sums_row, E, W);
}

// The product from the spectrum: what the backward pass reads and writes besides.
struct GradientOperands {
  const bf16* mass = nullptr;        // (V)
  const float* time_sums = nullptr;  // (time_rows, W)
  int time_rows = 0;
  bf16* d_times = nullptr;  // (W)
};

// A block's part of the product from the spectrum: all E rows and BW columns of the spectrum, and
// kStages tiles of BV rows of the basis, in boxes of 64 columns. A warp has WV x WW of the result.
template <int kBV, int kBW, int kWarpsV, int kWarpsW, int kStageCount>
struct VertexTiles {
  static constexpr int BV = kBV, BW = kBW, kStages = kStageCount, kWarpColumns = kWarpsW;
  static constexpr int WV = BV / kWarpsV, WW = BW / kWarpsW;
  static constexpr int kThreads = 32 * kWarpsV * kWarpsW;
  static constexpr int kBox = BV * 64;  // elements
  static constexpr int64_t shared_bytes(int64_t E) {
    return (E * BW + kStages * ((E + 63) / 64) * kBox + BV * BW) * sizeof(bf16);
  }
};

// result (V, W) = basis spectrum, and backward mass[:, None] * that. Lesson 6's resident weights
// again: the spectrum is small, so every block keeps BW columns of it in shared memory for good,
// and the basis streams by, tile blockIdx.x, blockIdx.x + gridDim.x, ... of its rows. Each warp's
// results go through a staging area of its own, so that they leave as 16 bytes a lane.
// Backward, the blocks with the first tile also add up dTimes for their columns.
template <Pass kPass, typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads)
    from_spectrum(const bf16* basis, const bf16* spectrum, bf16* result, GradientOperands gradient,
                  int64_t V, int E, int W) {
  constexpr int BV = Tiles::BV, BW = Tiles::BW, WV = Tiles::WV, WW = Tiles::WW;
  constexpr int kStages = Tiles::kStages;
  extern __shared__ __align__(128) bf16 tiles[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_v = warp / Tiles::kWarpColumns * WV, warp_w = warp % Tiles::kWarpColumns * WW;
  const int w0 = blockIdx.y * BW, boxes = (E + 63) / 64;
  bf16* spectrum_tile = tiles;
  bf16* stages = spectrum_tile + E * BW;
  bf16* staging = stages + kStages * boxes * Tiles::kBox + warp * WV * WW;
  const int64_t tile_count = (V + BV - 1) / BV;
  const auto stage_of = [&](int step) { return stages + step % kStages * boxes * Tiles::kBox; };
  const auto copy_step = [&](int step) {
    const int64_t tile = blockIdx.x + static_cast<int64_t>(step) * gridDim.x;
    for (int box = 0; tile < tile_count && box < boxes; ++box) {
      copy_swizzled<BV, 64, Tiles::kThreads>(stage_of(step) + box * Tiles::kBox, basis, tile * BV,
                                             64 * box, V, E);
    }
    copy_async_commit();
  };

  for (int e = 0; e < E; e += 16) {
    copy_swizzled<16, BW, Tiles::kThreads>(spectrum_tile + e * BW, spectrum, e, w0, E, W);
  }
  for (int step = 0; step < kStages - 1; ++step) copy_step(step);
  if (kPass == Pass::backward && blockIdx.x == 0) {
    for (int w = w0 + threadIdx.x; w < min(w0 + BW, W); w += Tiles::kThreads) {
      float sum = 0;
      for (int row = 0; row < gradient.time_rows; ++row) {
        sum += gradient.time_sums[static_cast<size_t>(row) * W + w];
      }
      gradient.d_times[w] = __float2bfloat16_rn(-sum);
    }
  }

  const int basis_lane = swizzle<64>(warp_v + lane % 16, lane / 16 * 8);
  const int spectrum_lane = swizzle<BW>(lane % 16, warp_w + lane / 16 * 8);
  int64_t tile = blockIdx.x;
  for (int step = 0; tile < tile_count; ++step, tile += gridDim.x) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    copy_step(step + kStages - 1);
    const int64_t v0 = tile * BV + warp_v;
    float mass[WV / 8];  // asked for before the products, needed after them
#pragma unroll
    for (int i = 0; i < WV / 8; ++i) {
      const int64_t v = v0 + 8 * i + lane / 4;
      mass[i] = kPass == Pass::backward && v < V ? __bfloat162float(gradient.mass[v]) : 1;
    }
    float sum[WV / 16][WW / 8][4] = {};
#pragma unroll 2
    for (int k = 0; k < E; k += 16) {
      unsigned a[WV / 16][4], b[WW / 16][4];
      const bf16* box = stage_of(step) + k / 64 * Tiles::kBox;
#pragma unroll
      for (int i = 0; i < WV / 16; ++i) {
        ldmatrix_x4(a[i], box + (basis_lane ^ k % 64) + i * 16 * 64);
      }
#pragma unroll
      for (int j = 0; j < WW / 16; ++j) {
        ldmatrix_x4_trans(b[j], spectrum_tile + (spectrum_lane ^ 16 * j) + k * BW);
      }
#pragma unroll
      for (int i = 0; i < WV / 16; ++i) {
#pragma unroll
        for (int j = 0; j < WW / 8; ++j) {
          mma_m16n8k16<bf16>(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < WV / 8; ++i) {
#pragma unroll
      for (int j = 0; j < WW / 8; ++j) {
        const float* pair = &sum[i / 2][j][i % 2 * 2];
        *reinterpret_cast<unsigned*>(staging +
                                     swizzle<WW>(8 * i + lane / 4, 8 * j + lane % 4 * 2)) =
            pack2<bf16>(mass[i] * pair[0], mass[i] * pair[1]);
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = lane * 8; i < WV * WW; i += 32 * 8) {
      const int row = i / WW, col = i % WW, w = w0 + warp_w + col;
      if (v0 + row < V && w < W) {
        *reinterpret_cast<uint4*>(result + (v0 + row) * W + w) =
            *reinterpret_cast<const uint4*>(staging + swizzle<WW>(row, col));
      }
    }
  }
}

// ---- split-K ------------------------------------------------------------------------------------

// The sum over vertices in gridDim.y slices: block (tile, slice) adds up its slice alone, and there
// are as many slices as it takes to fill the GPU. What it has then is a partial sum, and that is
// where split-K goes wrong. Three things must hold before an epilogue may touch partial sums:
//
//   - All of them must be in. Whoever stores a slice's result where another stores its own leaves
//     the last one's; whoever reads what is there, works on it and writes it back, loses what came
//     in between.
//   - The epilogue must be applied once. Damping is linear, so it may be applied to each partial
//     sum before they are added, or to their total; applied to what has accumulated so far, it
//     damps a slice once more for each one that comes after it. dSpectral, which backward adds,
//     must not be added once per slice; and a nonlinear function (lesson 6's sigmoid) may only ever
//     see the total.
//   - Memory that is added to has to start at zero.
//
// (A published split-K kernel for this very operator has a relative error of 0.8.) Here no block
// adds to memory that another one adds to. A block writes its partial sum to a place of its own and
// then counts itself as done. Who counts last in a tile, adds up the tile's partial sums, in the
// order of the slices whatever order they came in, so that the result is the same in every run, and
// applies the epilogue to the total.
//
// What it costs: 264 partial sums of 16 KB are written and read, which is nothing beside 10^5
// vertices but is what remains to be done at the end, by eight blocks, when V is small. And blocks
// of one slice, which run at the same time, share what they read through the L2 cache: x is asked
// for twice and the basis four times, but comes from memory once.
//
// A partial sum need not look like a matrix. Each thread stores its registers as they are, 16
// neighbouring bytes beside its neighbour's, and in the last block the same thread reads them.
template <Pass kPass, typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads)
    to_spectrum_split(SpectrumOperands operands, float4* partials, unsigned* done, int64_t V, int E,
                      int W) {
  extern __shared__ __align__(128) bf16 tiles[];
  __shared__ bool is_last;
  constexpr int kRows = Tiles::WE / 16, kCols = Tiles::WW / 8;
  const SpectrumPlace<Tiles> place(blockIdx.x, E);
  typename Tiles::Sum sum = {};
  const int64_t steps = (V + Tiles::BV - 1) / Tiles::BV;
  const auto start_of = [&](int64_t slice) { return static_cast<int>(steps * slice / gridDim.y); };
  const int first = start_of(blockIdx.y), end = start_of(blockIdx.y + 1);
  multiply_slice<kPass, Tiles>(sum, tiles, operands, first, end - first, place.e0, place.w0, V, E,
                               W);

  const auto partial = [&](unsigned slice, int i, int j) {
    const size_t block = static_cast<size_t>(slice) * gridDim.x + blockIdx.x;
    return partials + (block * kRows * kCols + i * kCols + j) * Tiles::kThreads + threadIdx.x;
  };
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      *partial(blockIdx.y, i, j) =
          make_float4(sum[i][j][0], sum[i][j][1], sum[i][j][2], sum[i][j][3]);
    }
  }
  // The fence: whoever sees the count sees this thread's partial sum. The barrier: the count comes
  // after those of all threads. atomicInc starts again at 0 after the last block: the next launch
  // finds the count as this one found it.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicInc(&done[blockIdx.x], gridDim.y - 1) == gridDim.y - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();

  typename Tiles::Sum total = {};
  for (unsigned slice = 0; slice < gridDim.y; ++slice) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        // __ldcg: from the L2 cache, where the other multiprocessors' stores are.
        const float4 add = __ldcg(partial(slice, i, j));
        total[i][j][0] += add.x;
        total[i][j][1] += add.y;
        total[i][j][2] += add.z;
        total[i][j][3] += add.w;
      }
    }
  }
  finish_spectrum<kPass, Tiles>(total, operands, place.warp_e0, place.warp_w0, place.sums_row, E,
                                W);
}

// ---- Hopper: one launch -------------------------------------------------------------------------

// The whole operator in one kernel, which a first reading of it says cannot be: every row of out
// needs the whole spectrum, and the spectrum needs every row of x. It takes two things. All blocks
// are on the GPU at the same time, so that they may wait for each other; and a block keeps what it
// has: a slice of the rows of x and of the basis.
//
//   First product   A block sums its rows' share of basis^T (mass x) up in registers, and adds it
//                   to a sum of all blocks in memory (which is in the L2 cache, 128 KB). The basis
//                   is the left factor, transposed: its fragments come through registers
//                   (ldmatrix), where they are multiplied by the masses on the way.
//   Meeting         Each waits until all have added. The sum comes back into the registers that the
//                   shares left from, gets its exponential, and becomes the right factor of the
//                   second product, in shared memory.
//   Second product  Back over the same rows in reverse: the last tiles of the basis are still in
//                   shared memory, those before them probably in the L2 cache. With up to kStages
//                   tiles a block, the basis is read once.
//
// Backward is the same with dOut for x: the masses wait for the end, dSpectral joins the sum, and
// dTimes is a product of the sum that a spare warp computes while the others go on.
constexpr int kEigen = 128, kWidth = 256;  // at most; what is missing is zero

// A cluster of kWidth / kColumns blocks shares rows. Each has kColumns columns of x, and all of the
// basis: they fetch it together, each its part, by multicast.
template <int kColumns, int kStages>
struct OneLaunchShared {
  static constexpr int kBoxes = kColumns / 64;
  bf16 basis[kStages][2][64 * 64];  // 64 rows, two boxes of 64 columns
  union {
    bf16 x[kStages][kBoxes][64 * 64];  // first product
    struct {
      bf16 spectrum[kBoxes][kEigen * 64];
      bf16 out[2][kBoxes][64 * 64];  // a tile of each consumer
    } second;
  };
  alignas(128) bf16 mass[kStages][64];
  Barrier full[kStages], empty[kStages], spare;
};

// Rows of the boxes in which a cluster of kWidth / columns blocks fetches 64 rows of the basis.
constexpr unsigned basis_rows(int columns) { return columns == 64 ? 32 : 64; }

// What the blocks share in memory. Zero before the first launch; a launch leaves it ready for the
// next one with the same kColumns, whatever V and the grid are. One launch at a time: two streams
// need one of these each.
struct Meeting {
  // For each rank in a cluster: in the lower half how many blocks have come, in the upper half how
  // many launches there were.
  unsigned arrivals[kWidth / 64];
  // Launches use the two sums in turn, and zero the other one.
  float4 totals[2][kEigen * kWidth / 4];
};

struct OneLaunchVectors {
  const bf16 *evalues, *times;              // (E), (W)
  const bf16 *d_spectral, *saved_spectral;  // (E, W), backward
  bf16* d_times;                            // (W), backward
  Meeting* meeting;
  int V, E, W;
};

#if HOPPER_CODE
// Two neighbouring elements of a row-major matrix; zeros outside of it. cols and col are even.
__device__ inline float2 pair_at(const bf16* matrix, int rows, int cols, int row, int col) {
  if (row >= rows || col >= cols) return float2{};
  return __bfloat1622float2(
      *reinterpret_cast<const __nv_bfloat162*>(matrix + static_cast<size_t>(row) * cols + col));
}
#endif

// Blocks of a producer and two consumer warpgroups. In the first product, a consumer has 64 of the
// 128 rows of the spectrum, all kColumns columns, and both work on every tile; in the second
// product they take turns, tile by tile, so that one multiplies while the other writes out.
// Results: forward, out (V, W) and spectral (E, W); backward, with dOut as x, dX as out, and
// dTimes.
template <Pass kPass, int kColumns, int kStages>
__global__ void HOPPER_CLUSTER(kWidth / kColumns) __launch_bounds__(384, 1)
    diffusion_one_launch(const __grid_constant__ CUtensorMap x,
                         const __grid_constant__ CUtensorMap basis,
                         const __grid_constant__ CUtensorMap mass,
                         const __grid_constant__ CUtensorMap out,
                         const __grid_constant__ CUtensorMap spectral,
                         const OneLaunchVectors vectors) {
#if HOPPER_CODE
  constexpr int kBlocks = kWidth / kColumns, kBoxes = kColumns / 64;
  using Shared = OneLaunchShared<kColumns, kStages>;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  start_next_kernel();
  wait_for_previous_kernel();
  const int rank = cluster_rank(), group = blockIdx.x / kBlocks, groups = gridDim.x / kBlocks;
  const int col0 = rank * kColumns;
  const int64_t all_tiles = (static_cast<int64_t>(vectors.V) + 63) / 64;
  const int first = static_cast<int>(all_tiles * group / groups);
  const int tiles = static_cast<int>(all_tiles * (group + 1) / groups) - first;

  // A block reads this before it arrives, and the number changes when the last one has arrived: all
  // blocks of a launch read the same.
  using Counter = cuda::atomic_ref<unsigned, cuda::thread_scope_device>;
  Counter arrivals(vectors.meeting->arrivals[rank]);
  const unsigned start = arrivals.load(cuda::memory_order_relaxed) & 0xffff0000;
  const auto all_have_arrived = [&] {
    return arrivals.load(cuda::memory_order_acquire) - start >= static_cast<unsigned>(groups);
  };
  // The shares of a block's columns add up in the layout of the registers that hold them: quad
  // (w kColumns / 8 + j) 32 + l is sum[4 j] to sum[4 j + 3] of lane l of the consumers' warp w.
  constexpr int kQuads = kEigen * kColumns / 4;
  const int turn = start >> 16 & 1;
  float4* totals = vectors.meeting->totals[turn] + rank * kQuads;

  uint32_t parities = 0;  // bit s: that of the next phase of stage s
  const auto wait = [&](Barrier* barriers, int s) {
    barrier_wait(&barriers[s], parities >> s & 1);
    parities ^= 1u << s;
  };
  // The producer's loads: 64 rows of x, and of the basis with their masses.
  const auto expect = [&](int s, int bytes) { barrier_arrive_expect(&shared.full[s], bytes); };
  const auto load_x = [&](int t, uint64_t policy) {
    const int s = t % kStages, row = 64 * (first + t);
    for (int box = 0; box < kBoxes; ++box) {
      tensor_load(shared.x[s][box], &x, row, col0 + 64 * box, &shared.full[s], policy);
    }
  };
  const auto load_basis = [&](int t) {
    const int s = t % kStages, row = 64 * (first + t);
    constexpr int kRows = 128 / kBlocks;  // of a box, that this block fetches for its cluster
    const int box = rank * kRows / 64, within = rank * kRows % 64;
    tensor_load(shared.mass[s], &mass, row, &shared.full[s]);
    tensor_load_multicast(shared.basis[s][box] + within * 64, &basis, row + within, 64 * box,
                          &shared.full[s], (1 << kBlocks) - 1);
  };
  constexpr int kBasisBytes = sizeof shared.basis[0] + sizeof shared.mass[0];
  constexpr int kFirstBytes = kBasisBytes + sizeof shared.x[0];
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&shared.full[s], 1);
      barrier_init(&shared.empty[s], 2 * kBlocks);
    }
    barrier_init(&shared.spare, 96);
    barrier_init_fence();
    expect(0, kFirstBytes);
    load_x(0, evict_first());
  }
  const int consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;
  cluster_meet();

  if (threadIdx.x < 128) {
    registers_shrink_to<56>();
    if (threadIdx.x == 0) {
      for (int t = 0; t < tiles; ++t) {
        if (t >= kStages) wait(shared.empty, t % kStages);
        if (t > 0) {
          expect(t % kStages, kFirstBytes);
          load_x(t, evict_first());  // x is not needed again, the basis is
        }
        load_basis(t);
      }
      for (int t = tiles - 1 - kStages; t >= 0; --t) {
        wait(shared.empty, t % kStages);
        expect(t % kStages, kBasisBytes);
        load_basis(t);
      }
    } else if (threadIdx.x >= 32) {
      // Three spare warps. The work is divided among those of all groups.
      const int lane = threadIdx.x % 32, worker = 3 * group + threadIdx.x / 32 - 1;
      float4* next = vectors.meeting->totals[turn ^ 1] + rank * kQuads;
      for (int i = 32 * worker + lane; i < kQuads; i += 96 * groups) next[i] = float4{};
      if constexpr (kPass == Pass::backward) {
        const int E = vectors.E, W = vectors.W;
        // For the quads that hold 8 columns: the lane has two of them, and two rows of each 16.
        const auto visit_columns = [&](auto visit) {
          for (int j = worker; j < kColumns / 8; j += 3 * groups) {
            const int col = col0 + 8 * j + 2 * (lane % 4);
            float2 sum = {};
#pragma unroll 2
            for (int i = 0; i < 8; ++i) {
              visit(totals + (i * kColumns / 8 + j) * 32 + lane, 16 * i + lane / 4, col, sum);
            }
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) {
              sum.x += __shfl_xor_sync(~0u, sum.x, lanes);
              sum.y += __shfl_xor_sync(~0u, sum.y, lanes);
            }
            if (lane < 4 && col < W) {
              *reinterpret_cast<uint32_t*>(vectors.d_times + col) = pack2<bf16>(sum.x, sum.y);
            }
          }
        };
        visit_columns([&](float4* quad, int row, int col, float2&) {
          const float2 upper = pair_at(vectors.d_spectral, E, W, row, col);
          const float2 lower = pair_at(vectors.d_spectral, E, W, row + 8, col);
          atomicAdd(quad, make_float4(upper.x, upper.y, lower.x, lower.y));
        });
        barrier_arrive(&shared.spare);  // the block arrives when they have added, too
        while (!all_have_arrived()) {
        }
        visit_columns([&](float4* quad, int row, int col, float2& sum) {
          const float4 s = __ldcg(quad);
          const float2 upper = pair_at(vectors.saved_spectral, E, W, row, col);
          const float2 lower = pair_at(vectors.saved_spectral, E, W, row + 8, col);
          const float e0 = row < E ? __bfloat162float(vectors.evalues[row]) : 0;
          const float e1 = row + 8 < E ? __bfloat162float(vectors.evalues[row + 8]) : 0;
          sum.x -= e0 * s.x * upper.x + e1 * s.z * lower.x;
          sum.y -= e0 * s.y * upper.y + e1 * s.w * lower.y;
        });
      }
    }
  } else {
    registers_grow_to<224>();
    const auto release = [&](int s) {
      if (thread < kBlocks) barrier_arrive(&shared.empty[s], thread);
    };
    // exp(-evalue time) of the thread's elements, while the first tiles are on their way. With the
    // approximate exponential: its relative error, about 2^-21 (1 + |evalue time|), is far below
    // that of the result's bf16.
    const int row0 = 64 * consumer + 16 * warp + lane / 4;
    const float upper = row0 < vectors.E ? -__bfloat162float(vectors.evalues[row0]) : 0;
    const float lower = row0 + 8 < vectors.E ? -__bfloat162float(vectors.evalues[row0 + 8]) : 0;
    float factors[kColumns / 2];
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int col = col0 + 8 * j + 2 * (lane % 4);
      const float2 times = pair_at(vectors.times, 1, vectors.W, 0, col);
      factors[4 * j] = __expf(upper * times.x);
      factors[4 * j + 1] = __expf(upper * times.y);
      factors[4 * j + 2] = __expf(lower * times.x);
      factors[4 * j + 3] = __expf(lower * times.y);
    }

    float sum[kColumns / 2];
    for (int t = 0; t < tiles; ++t) {
      const int s = t % kStages;
      wait(shared.full, s);
      const bf16* box = shared.basis[s][consumer];
      uint32_t a[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int row = 16 * k + lane / 16 * 8 + lane % 8, piece = 2 * warp + lane / 8 % 2;
        ldmatrix_x4_trans(a[k], box + swizzled(row, piece));
        if constexpr (kPass == Pass::forward) {
          const auto* factor =
              reinterpret_cast<const unsigned*>(shared.mass[s] + 16 * k + 2 * (lane % 4));
          a[k][0] = multiply2(a[k][0], factor[0]);
          a[k][1] = multiply2(a[k][1], factor[0]);
          a[k][2] = multiply2(a[k][2], factor[4]);
          a[k][3] = multiply2(a[k][3], factor[4]);
        }
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma<bf16>(sum, a[k], descriptor_b(shared.x[s][0], 64) + 128 * k, t > 0 || k > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      if (t + kStages < tiles) release(s);
    }

    float4* quads = totals + (4 * consumer + warp) * kColumns * 4 + lane;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      atomicAdd(quads + 32 * j,
                make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
    }
    named_barrier(4, 256);
    if (threadIdx.x == 128) {
      if constexpr (kPass == Pass::backward) barrier_wait(&shared.spare, 0);
      const unsigned before = arrivals.fetch_add(1, cuda::memory_order_acq_rel) - start;
      if (before + 1 ==
          static_cast<unsigned>(groups)) {  // the last one: on to the next launch's number
        arrivals.fetch_add(0x10000 - groups, cuda::memory_order_relaxed);
      } else {
        while (!all_have_arrived()) {
        }
      }
    }
    named_barrier(4, 256);
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float4 total = __ldcg(quads + 32 * j);
      sum[4 * j] = factors[4 * j] * total.x;
      sum[4 * j + 1] = factors[4 * j + 1] * total.y;
      sum[4 * j + 2] = factors[4 * j + 2] * total.z;
      sum[4 * j + 3] = factors[4 * j + 3] * total.w;
    }
    // The sums as bf16 in boxes of 64 columns and `rows` rows, this warp's 16 rows from `row` on;
    // the thread's rows are multiplied by `above` and `below`.
    const auto to_boxes = [&](bf16* boxes, int rows, int row, float above, float below) {
#pragma unroll
      for (int c = 0; c < kColumns; c += 16) {
        uint32_t registers[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int i = c / 2 + 2 * m;
          const float factor = m % 2 ? below : above;
          registers[m] = pack2<bf16>(factor * sum[i], factor * sum[i + 1]);
        }
        store_matrices(
            boxes + c / 64 * rows * 64 + swizzled(row + lane % 16, c % 64 / 8 + lane / 16),
            registers);
      }
    };
    to_boxes(shared.second.spectrum[0], kEigen, 64 * consumer + 16 * warp, 1, 1);
    shared_fence();
    named_barrier(4, 256);
    if (kPass == Pass::forward && group == 0 && threadIdx.x == 128) {
      for (int box = 0; box < kBoxes; ++box) {
        tensor_store(&spectral, 0, col0 + 64 * box, shared.second.spectrum[box]);
      }
      tensor_store_commit();
    }

    for (int t = tiles - 1; t >= 0; --t) {
      const int s = t % kStages;
      if (s % 2 != consumer) continue;
      if (t + kStages < tiles) wait(shared.full, s);
      float above = 1, below = 1;
      if constexpr (kPass == Pass::backward) {
        above = __bfloat162float(shared.mass[s][16 * warp + lane / 4]);
        below = __bfloat162float(shared.mass[s][16 * warp + lane / 4 + 8]);
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        wgmma<bf16>(sum, descriptor_a(shared.basis[s][k / 4]) + 2 * (k % 4),
                    descriptor_b(shared.second.spectrum[0], kEigen) + 128 * k, k > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      if (thread == 0) tensor_store_wait_read<0>();
      named_barrier(1 + consumer, 128);  // the masses have been read, too
      if (t >= kStages) {                // for both consumers
        release(s);
        release(s);
      }
      to_boxes(shared.second.out[consumer][0], 64, 16 * warp, above, below);
      shared_fence();
      named_barrier(1 + consumer, 128);
      if (thread == 0) {
        for (int box = 0; box < kBoxes; ++box) {
          tensor_store(&out, 64 * (first + t), col0 + 64 * box, shared.second.out[consumer][box]);
        }
        tensor_store_commit();
      }
    }
    if (thread == 0) tensor_store_wait_read<0>();
  }
#endif
}

// ---- References ---------------------------------------------------------------------------------

// Forward and backward once more, plainly, in fp64, with the products by cuBLAS. T is bf16, or
// double where finite differences need inputs that bf16 cannot tell apart.

__device__ double as_double(bf16 value) { return __bfloat162float(value); }
__device__ double as_double(double value) { return value; }

// values (rows, W) = mass[:, None] * values; one thread an element.
__global__ void scale_rows_fp64(double* values, const bf16* mass, size_t count, int64_t W) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) values[i] *= as_double(mass[i / W]);
}

// spectrum (E, W) = exp(-evalues[:, None] * times[None, :]) * spectrum; one thread an element.
template <typename T>
__global__ void damp_fp64(double* spectrum, const bf16* evalues, const T* times, size_t count,
                          int64_t W) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) spectrum[i] *= exp(-as_double(evalues[i / W]) * as_double(times[i % W]));
}

// spectrum (E, W) comes as basis^T dOut, and becomes s = dSpectral + that; one thread a column, for
// which it also computes dTimes.
template <typename T>
__global__ void spectrum_gradient_fp64(double* spectrum, const T* d_spectral, const T* spectral,
                                       const bf16* evalues, double* d_times, int64_t E, int64_t W) {
  const int64_t w = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (w >= W) return;
  double sum = 0;
  for (int64_t e = 0; e < E; ++e) {
    const int64_t i = e * W + w;
    spectrum[i] += as_double(d_spectral[i]);
    sum += as_double(evalues[e]) * spectrum[i] * as_double(spectral[i]);
  }
  d_times[w] = -sum;
}

int64_t reference_rows(const Shape& shape) { return std::min(shape.V, kReferenceRows); }

// spectrum (E, W) = basis^T (mass[:, None] * values), without the mass if it is null.
template <typename T>
void project_fp64(cublasHandle_t blas, const Shape& shape, const bf16* basis, const bf16* mass,
                  const T* values, double* spectrum) {
  const auto [V, E, W] = shape;
  const int64_t chunk = reference_rows(shape);
  Scratch<double> basis64(chunk * E), values64(chunk * W);
  for (int64_t v = 0; v < V; v += chunk) {
    const int64_t rows = std::min(chunk, V - v);
    to_fp64(basis + v * E, Type::bf16, rows * E, basis64);
    to_fp64(values + v * W, type_of<T>, rows * W, values64);
    if (mass) {
      scale_rows_fp64<<<blocks_for(rows * W, 256), 256>>>(values64, mass + v, rows * W, W);
      CUDA_CHECK(cudaGetLastError());
    }
    const double one = 1, so_far = v > 0 ? 1 : 0;
    CUBLAS_CHECK(cublasDgemm(blas, CUBLAS_OP_N, CUBLAS_OP_T, static_cast<int>(W),
                             static_cast<int>(E), static_cast<int>(rows), &one, values64,
                             static_cast<int>(W), basis64, static_cast<int>(E), &so_far, spectrum,
                             static_cast<int>(W)));
  }
}

// result (V, W) = mass[:, None] * (basis spectrum), without the mass if it is null.
void expand_fp64(cublasHandle_t blas, const Shape& shape, const bf16* basis, const bf16* mass,
                 const double* spectrum, double* result) {
  const auto [V, E, W] = shape;
  const int64_t chunk = reference_rows(shape);
  Scratch<double> basis64(chunk * E);
  for (int64_t v = 0; v < V; v += chunk) {
    const int64_t rows = std::min(chunk, V - v);
    to_fp64(basis + v * E, Type::bf16, rows * E, basis64);
    matmul_fp64(blas, basis64, spectrum, result + v * W, rows, W, E);
    if (mass) {
      scale_rows_fp64<<<blocks_for(rows * W, 256), 256>>>(result + v * W, mass + v, rows * W, W);
      CUDA_CHECK(cudaGetLastError());
    }
  }
}

template <typename T>
void forward_fp64(cublasHandle_t blas, const Shape& shape, const bf16* basis, const bf16* mass,
                  const bf16* evalues, const T* times, const T* x, double* spectral, double* out) {
  project_fp64<T>(blas, shape, basis, mass, x, spectral);
  const size_t count = shape.spectrum_values();
  damp_fp64<T><<<blocks_for(count, 256), 256>>>(spectral, evalues, times, count, shape.W);
  CUDA_CHECK(cudaGetLastError());
  expand_fp64(blas, shape, basis, nullptr, spectral, out);
}

template <typename T>
void backward_fp64(cublasHandle_t blas, const Shape& shape, const bf16* basis, const bf16* mass,
                   const bf16* evalues, const T* times, const T* spectral, const T* d_out,
                   const T* d_spectral, double* d_times, double* d_x) {
  const size_t count = shape.spectrum_values();
  Scratch<double> s(count);
  project_fp64<T>(blas, shape, basis, nullptr, d_out, s);
  spectrum_gradient_fp64<T><<<blocks_for(shape.W, 32), 32>>>(s, d_spectral, spectral, evalues,
                                                             d_times, shape.E, shape.W);
  damp_fp64<T><<<blocks_for(count, 256), 256>>>(s, evalues, times, count, shape.W);
  CUDA_CHECK(cudaGetLastError());
  expand_fp64(blas, shape, basis, mass, s, d_x);
}

// Bytes that either reference allocates while it runs.
double reference_bytes(const Shape& shape) {
  return 8.0 *
         (static_cast<double>(reference_rows(shape)) * static_cast<double>(shape.E + shape.W) +
          static_cast<double>(shape.spectrum_values()));
}

// ---- Is the reference's gradient the gradient? --------------------------------------------------

// backward_fp64 was derived by hand from forward_fp64: it is held to finite differences of the loss
//
//     f = sum(dOut * out) + sum(dSpectral * spectral)
//
// see common/gradient_check.h. The bound's two parts:
//
//   - f is linear in x. In times each term of f' has a factor evalue * d < 2 for each further
//     derivative, so that f''' is to f' as 4 to 1, and 4 times that is left room for.
//   - The elements of out and spectral are off by dot_tolerance(V + E) of themselves,
//     independently.
//
// With fp64's roundoff of 2^-53, h = 2^-16 makes both parts about 10^-9.
constexpr int64_t kDifferenceRows = 256;  // of V: enough to run the same code
constexpr double kStep = 0x1p-16;

// The larger of both gradients' differences to finite differences. Of shape.V vertices the first
// kDifferenceRows take part.
double check_gradients(cublasHandle_t blas, Shape shape, const bf16* basis, const bf16* mass,
                       const bf16* evalues, const bf16* d_out, const bf16* d_spectral) {
  shape.V = std::min(shape.V, kDifferenceRows);
  const size_t vertex_values = shape.vertex_values(), spectrum_values = shape.spectrum_values();
  Scratch<double> x64(vertex_values), times64(shape.W), out64(vertex_values);
  Scratch<double> spectral64(spectrum_values);
  Scratch<double> d_out64(vertex_values), d_spectral64(spectrum_values);
  to_fp64(d_out, Type::bf16, vertex_values, d_out64);
  to_fp64(d_spectral, Type::bf16, spectrum_values, d_spectral64);
  const std::vector<double> d_out_host = to_host(d_out64, vertex_values);
  const std::vector<double> d_spectral_host = to_host(d_spectral64, spectrum_values);
  const auto loss = [&](const std::vector<double>& x, const std::vector<double>& times) {
    to_device(x, x64);
    to_device(times, times64);
    forward_fp64<double>(blas, shape, basis, mass, evalues, times64, x64, spectral64, out64);
    Loss result;
    result.add(d_out_host, to_host(out64, vertex_values));
    result.add(d_spectral_host, to_host(spectral64, spectrum_values));
    return result;
  };

  const std::vector<double> x = random_fp64(vertex_values, 1, 0, 1);
  const std::vector<double> times = random_fp64(shape.W, 0.5, 0.5, 2);
  loss(x, times);  // leaves spectral64, which backward needs
  Scratch<double> d_times64(shape.W), d_x64(vertex_values);
  backward_fp64<double>(blas, shape, basis, mass, evalues, times64, spectral64, d_out64,
                        d_spectral64, d_times64, d_x64);

  const DifferenceBound bound = {.h = kStep,
                                 .curvature = 4.0 * 4 / 6,
                                 .roundoff = dot_tolerance(shape.V + shape.E, 0x1p-53, 0x1p-53)};
  const std::vector<double> along_x = random_fp64(vertex_values, 1, 0, 3);
  const std::vector<double> along_times = random_fp64(shape.W, 1, 0, 4);
  return std::max(check_slope("dX", to_host(d_x64, vertex_values), along_x,
                              loss(moved(x, along_x, kStep), times),
                              loss(moved(x, along_x, -kStep), times), bound),
                  check_slope("dTimes", to_host(d_times64, shape.W), along_times,
                              loss(x, moved(times, along_times, kStep)),
                              loss(x, moved(times, along_times, -kStep)), bound));
}

double check_gradients_bytes(const Shape& shape) {
  const Shape few{std::min(shape.V, kDifferenceRows), shape.E, shape.W};
  return 8.0 * (5 * static_cast<double>(few.vertex_values()) +
                2 * static_cast<double>(few.spectrum_values()) + 4 * static_cast<double>(few.W)) +
         reference_bytes(few);
}

// ---- The two tables -----------------------------------------------------------------------------

// Tolerances. Roundings to bf16 on the way to a result count like one of the result itself, see
// dot_tolerance; `chain` is how many vertices one fp32 accumulator of the tensor cores adds up. An
// error of the spectrum is, relatively, one of the product from the spectrum, whose own is added.
double spectrum_tolerance(int roundings, int64_t chain) {
  return dot_tolerance(chain, tensor_core_sum(chain), sqrt(roundings) * kRoundoffBf16);
}
double expanded_tolerance(double spectrum, int roundings, int64_t E) {
  return hypot(spectrum, dot_tolerance(E, tensor_core_sum(E), sqrt(roundings) * kRoundoffBf16));
}
double times_tolerance(double spectrum, int64_t E) {
  return hypot(spectrum, dot_tolerance(E, kRoundoffFp32, kRoundoffBf16));
}

// The tiles of the kernels above. 16 KB a stage in three stages: four blocks fit on a
// multiprocessor of compute capability 9.0, two on one of 8.6.
using Tiles = SpectrumTiles<64, 64, 64, 2, 2, 3>;
// 96 KB for E = 128; where that is too much because E is larger, the narrow ones.
using WideVertexTiles = VertexTiles<64, 128, 2, 2, 3>;
using NarrowVertexTiles = VertexTiles<32, 64, 1, 2, 2>;

int64_t spectrum_tiles(const Shape& shape) {
  return static_cast<int64_t>(blocks_for(shape.E, Tiles::BE)) * blocks_for(shape.W, Tiles::BW);
}
// Slices of split-K: two blocks for each multiprocessor (and at least 3 slices, so that the CPU
// backend has some), but no slice without a step.
int64_t slices(const Shape& shape, const Device& device) {
  const int64_t fill = std::max<int64_t>(3, 2 * device.sms / spectrum_tiles(shape));
  return std::min<int64_t>(fill, blocks_for(shape.V, Tiles::BV));
}
// Vertices of the longest slice.
int64_t slice_rows(const Shape& shape, const Device& device) {
  const int64_t steps = blocks_for(shape.V, Tiles::BV), count = slices(shape, device);
  return (steps + count - 1) / count * Tiles::BV;
}
// Blocks of from_spectrum: as many as fit on the GPU at once, or as there are tiles.
template <Pass kPass, typename VertexTiles>
dim3 vertex_blocks(const Shape& shape, const Device& device) {
  const auto kernel = from_spectrum<kPass, VertexTiles>;
  const int bytes = static_cast<int>(VertexTiles::shared_bytes(shape.E));
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  int per_sm = 0;
  CUDA_CHECK(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, VertexTiles::kThreads, bytes));
  const int64_t columns = blocks_for(shape.W, VertexTiles::BW);
  const int64_t rows = std::max<int64_t>(1, static_cast<int64_t>(per_sm) * device.sms / columns);
  return dim3(std::min(blocks_for(shape.V, VertexTiles::BV), static_cast<unsigned>(rows)),
              static_cast<unsigned>(columns));
}

Problem& declare(Lesson& lesson, const char* name, const Shape& shape, double elementwise_flops,
                 double bytes) {
  const double products = 4.0 * static_cast<double>(shape.vertex_values()) * shape.E;
  Problem& problem =
      lesson.problem(name, {{"V", shape.V}, {"E", shape.E}, {"W", shape.W}}, "bf16",
                     {.flops = products + elementwise_flops, .bytes = bytes}, Rate::fp16);
  if (shape.V <= 16384) problem.in_graph();
  return problem;
}

struct Forward {
  Forward(Lesson& lesson, cublasHandle_t blas, Shape shape)
      : shape(shape),
        blas(blas),
        device(lesson.device()),
        problem(declare(lesson, "forward", shape,
                        // mass * x; per element of spectral the sign and two products, and exp
                        static_cast<double>(shape.vertex_values() + 4 * shape.spectrum_values()),
                        ends(shape))),
        x(problem.input<bf16>(shape.vertex_values())),
        // Each element of spectral adds up V terms and has a variance of 0.4, if not damped.
        basis(problem.input<bf16>(shape.V * shape.E, sqrt(3.0 / static_cast<double>(shape.V)))),
        mass(problem.input<bf16>(shape.V, 0.9, 1)),
        evalues(problem.input<bf16>(shape.E, 1, 1)),
        times(problem.input<bf16>(shape.W, 0.5, 0.5)),
        spectral(problem.output<bf16>(shape.spectrum_values())),
        out(problem.output<bf16>(shape.vertex_values())),
        expected_spectral(problem.reference(shape.spectrum_values())),
        expected_out(problem.reference(shape.vertex_values())) {
    problem.reference_from(reference_bytes(shape), [this] {
      forward_fp64<bf16>(this->blas, this->shape, basis, mass, evalues, times, x, expected_spectral,
                         expected_out);
    });
    // mass * basis (or mass * x) and spectral are rounded to bf16, then out.
    const double spectrum = spectrum_tolerance(2, slice_rows(shape, device));
    problem.check(spectral, expected_spectral, spectrum);
    problem.check(out, expected_out, expanded_tolerance(spectrum, 1, shape.E));
  }

  // Device memory of inputs and outputs, in bytes.
  static double ends(const Shape& shape) {
    const double V = static_cast<double>(shape.V), E = static_cast<double>(shape.E);
    const double W = static_cast<double>(shape.W);
    return sizeof(bf16) * (2 * V * W + V * E + V + E + W + E * W);
  }
  double ends() const { return ends(shape); }

  // For a kernel that rounds `roundings` times on the way to spectral, itself included, or sums up
  // more vertices at a stretch than a slice has.
  std::vector<Check> checks(int roundings, int64_t chain) const {
    const double spectrum = spectrum_tolerance(roundings, chain);
    return {{spectral.storage(), expected_spectral.storage(), spectrum},
            {out.storage(), expected_out.storage(), expanded_tolerance(spectrum, 1, shape.E)}};
  }

  SpectrumOperands operands() const {
    return {.values = x,
            .basis = basis,
            .mass = mass,
            .evalues = evalues,
            .times = times,
            .d_spectral = nullptr,
            .spectral = nullptr,
            .spectrum = spectral,
            .time_sums = nullptr};
  }

  Shape shape;
  cublasHandle_t blas;
  const Device& device;
  Problem& problem;
  Buffer<bf16> x, basis, mass, evalues, times, spectral, out;
  Buffer<double> expected_spectral, expected_out;
};

struct Backward {
  Backward(Lesson& lesson, cublasHandle_t blas, Shape shape)
      : shape(shape),
        blas(blas),
        device(lesson.device()),
        problem(declare(lesson, "backward", shape,
                        // mass * ...; per element of s the addition, sign, two products and exp for
                        // dX, two products and an addition for dTimes
                        static_cast<double>(shape.vertex_values() + 8 * shape.spectrum_values()),
                        ends(shape))),
        d_out(problem.input<bf16>(shape.vertex_values())),
        d_spectral(problem.input<bf16>(shape.spectrum_values())),
        // What forward saved. The formulas hold for any: random numbers of a variance of 1.
        spectral(problem.input<bf16>(shape.spectrum_values(), sqrt(3.0))),
        basis(problem.input<bf16>(shape.V * shape.E, sqrt(3.0 / static_cast<double>(shape.V)))),
        mass(problem.input<bf16>(shape.V, 0.9, 1)),
        evalues(problem.input<bf16>(shape.E, 1, 1)),
        times(problem.input<bf16>(shape.W, 0.5, 0.5)),
        d_x(problem.output<bf16>(shape.vertex_values())),
        d_times(problem.output<bf16>(shape.W)),
        damped(problem.output<bf16>(shape.spectrum_values())),
        expected_d_x(problem.reference(shape.vertex_values())),
        expected_d_times(problem.reference(shape.W)) {
    problem.reference_from(std::max(reference_bytes(shape), check_gradients_bytes(shape)), [this] {
      report_difference(
          check_gradients(this->blas, this->shape, basis, mass, evalues, d_out, d_spectral));
      backward_fp64<bf16>(this->blas, this->shape, basis, mass, evalues, times, spectral, d_out,
                          d_spectral, expected_d_times, expected_d_x);
    });
    // s stays in fp32; damped it is rounded to bf16, and so are dX and dTimes.
    const int64_t chain = slice_rows(shape, device);
    problem.check(d_x, expected_d_x, expanded_tolerance(spectrum_tolerance(1, chain), 1, shape.E));
    problem.check(d_times, expected_d_times,
                  times_tolerance(spectrum_tolerance(0, chain), shape.E));
  }

  // Device memory of inputs and outputs, in bytes.
  static double ends(const Shape& shape) {
    const double V = static_cast<double>(shape.V), E = static_cast<double>(shape.E);
    const double W = static_cast<double>(shape.W);
    return sizeof(bf16) * (2 * V * W + V * E + V + E + 2 * W + 2 * E * W);
  }
  double ends() const { return ends(shape); }

  SpectrumOperands operands(float* time_sums) const {
    return {.values = d_out,
            .basis = basis,
            .mass = nullptr,
            .evalues = evalues,
            .times = times,
            .d_spectral = d_spectral,
            .spectral = spectral,
            .spectrum = damped,
            .time_sums = time_sums};
  }

  Shape shape;
  cublasHandle_t blas;
  const Device& device;
  Problem& problem;
  Buffer<bf16> d_out, d_spectral, spectral, basis, mass, evalues, times, d_x, d_times;
  Buffer<bf16> damped;  // (E, W): exp(-evalues times) * s, a temporary
  Buffer<double> expected_d_x, expected_d_times;
  std::function<void(double)> report_difference;  // of the reference and finite differences
};

// ---- The rows -----------------------------------------------------------------------------------

void add_unfused(Forward& table) {
  const size_t values = table.shape.vertex_values(), spectrum = table.shape.spectrum_values();
  const int W = static_cast<int>(table.shape.W);
  const auto weighted = table.problem.output<bf16>(values);
  const auto projected = table.problem.output<bf16>(spectrum);
  const auto factors = table.problem.output<bf16>(spectrum);
  const auto launch = [=, &table] {
    scale_rows<<<blocks_for(values, kPerBlock), kThreads>>>(table.mass, table.x, weighted, values,
                                                            W);
    project(table.blas, table.basis, weighted, projected, table.shape);
    damping_factors<<<blocks_for(spectrum, kPerBlock), kThreads>>>(table.evalues, table.times,
                                                                   factors, spectrum, W);
    multiply<<<blocks_for(spectrum, kPerBlock), kThreads>>>(factors, projected, table.spectral,
                                                            spectrum);
    expand(table.blas, table.basis, table.spectral, table.out, table.shape);
  };
  table.problem.kernel("unfused", Role::baseline, launch)
      .needs(80)
      .occupies(table.ends() + weighted.bytes() + projected.bytes() + factors.bytes())
      // mass * x, the product, the factors, spectral; how cuBLAS splits the sum is not known.
      .checks = table.checks(4, table.shape.V);
}

void add_unfused(Backward& table) {
  const size_t values = table.shape.vertex_values(), spectrum = table.shape.spectrum_values();
  const int E = static_cast<int>(table.shape.E), W = static_cast<int>(table.shape.W);
  const auto projected = table.problem.output<bf16>(spectrum);
  const auto s = table.problem.output<bf16>(spectrum);
  const auto factors = table.problem.output<bf16>(spectrum);
  const auto expanded = table.problem.output<bf16>(values);
  const auto launch = [=, &table] {
    project(table.blas, table.basis, table.d_out, projected, table.shape);
    add<<<blocks_for(spectrum, kPerBlock), kThreads>>>(table.d_spectral, projected, s, spectrum);
    times_gradient<<<blocks_for(4 * W, kThreads), kThreads>>>(table.evalues, s, table.spectral,
                                                              table.d_times, E, W);
    damping_factors<<<blocks_for(spectrum, kPerBlock), kThreads>>>(table.evalues, table.times,
                                                                   factors, spectrum, W);
    multiply<<<blocks_for(spectrum, kPerBlock), kThreads>>>(factors, s, table.damped, spectrum);
    expand(table.blas, table.basis, table.damped, expanded, table.shape);
    scale_rows<<<blocks_for(values, kPerBlock), kThreads>>>(table.mass, expanded, table.d_x, values,
                                                            W);
  };
  Kernel& kernel = table.problem.kernel("unfused", Role::baseline, launch);
  kernel.needs(80).occupies(table.ends() + projected.bytes() + s.bytes() + factors.bytes() +
                            table.damped.bytes() + expanded.bytes());
  // dX: the product, s, the factors, damped; then the product and dX. dTimes: the product, s.
  const int64_t V = table.shape.V;
  kernel.checks = {{table.d_x.storage(), table.expected_d_x.storage(),
                    expanded_tolerance(spectrum_tolerance(4, V), 2, E)},
                   {table.d_times.storage(), table.expected_d_times.storage(),
                    times_tolerance(spectrum_tolerance(2, V), E)}};
}

template <typename VertexTiles>
void add_half_fused(Forward& table) {
  const auto [V, E, W] = table.shape;
  const unsigned tiles = static_cast<unsigned>(spectrum_tiles(table.shape));
  const dim3 blocks = vertex_blocks<Pass::forward, VertexTiles>(table.shape, table.device);
  const int bytes = static_cast<int>(VertexTiles::shared_bytes(E));
  const auto kernel = to_spectrum<Pass::forward, Tiles>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Tiles::kSharedBytes));
  const auto launch = [=, V = V, E = E, W = W, &table] {
    to_spectrum<Pass::forward, Tiles>
        <<<tiles, Tiles::kThreads, Tiles::kSharedBytes>>>(table.operands(), V, E, W);
    from_spectrum<Pass::forward, VertexTiles><<<blocks, VertexTiles::kThreads, bytes>>>(
        table.basis, table.spectral, table.out, GradientOperands{}, V, E, W);
  };
  table.problem.kernel("half fused", Role::ours, launch)
      .needs(80)
      .occupies(table.ends())
      .resources(kernel, Tiles::kThreads, Tiles::kSharedBytes)
      .checks = table.checks(2, V);  // one accumulator adds up all vertices
}

// What both passes need for split-K besides the operands.
struct SplitBuffers {
  SplitBuffers(Problem& problem, const Shape& shape, const Device& device)
      : blocks(static_cast<unsigned>(spectrum_tiles(shape)),
               static_cast<unsigned>(slices(shape, device))),
        partials(problem.output<float>(static_cast<size_t>(blocks.x) * blocks.y * Tiles::BE *
                                       Tiles::BW)),
        done(problem.workspace<unsigned>(blocks.x)) {}
  float4* partial_sums() const { return reinterpret_cast<float4*>(partials.data()); }
  double bytes() const { return partials.bytes() + done.bytes(); }

  dim3 blocks;             // tiles of the spectrum, slices of the vertices
  Buffer<float> partials;  // (slices, tiles, BE BW)
  Buffer<unsigned> done;   // (tiles)
};

template <typename VertexTiles>
void add_split(Forward& table) {
  const auto [V, E, W] = table.shape;
  const SplitBuffers split(table.problem, table.shape, table.device);
  const dim3 blocks = vertex_blocks<Pass::forward, VertexTiles>(table.shape, table.device);
  const int bytes = static_cast<int>(VertexTiles::shared_bytes(E));
  const auto kernel = to_spectrum_split<Pass::forward, Tiles>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Tiles::kSharedBytes));
  const auto launch = [=, V = V, E = E, W = W, &table] {
    to_spectrum_split<Pass::forward, Tiles><<<split.blocks, Tiles::kThreads, Tiles::kSharedBytes>>>(
        table.operands(), split.partial_sums(), split.done, V, E, W);
    from_spectrum<Pass::forward, VertexTiles><<<blocks, VertexTiles::kThreads, bytes>>>(
        table.basis, table.spectral, table.out, GradientOperands{}, V, E, W);
  };
  table.problem.kernel("split-K", Role::ours, launch)
      .needs(80)
      .occupies(table.ends() + split.bytes())
      .resources(kernel, Tiles::kThreads, Tiles::kSharedBytes);
}

template <typename VertexTiles>
void add_split(Backward& table) {
  const auto [V, E, W] = table.shape;
  const SplitBuffers split(table.problem, table.shape, table.device);
  const int time_rows = static_cast<int>(blocks_for(E, Tiles::BE)) * Tiles::kWarpRows;
  const auto time_sums = table.problem.output<float>(static_cast<size_t>(time_rows) * W);
  const dim3 blocks = vertex_blocks<Pass::backward, VertexTiles>(table.shape, table.device);
  const int bytes = static_cast<int>(VertexTiles::shared_bytes(E));
  const auto kernel = to_spectrum_split<Pass::backward, Tiles>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Tiles::kSharedBytes));
  const auto launch = [=, V = V, E = E, W = W, &table] {
    const GradientOperands gradient{table.mass, time_sums, time_rows, table.d_times};
    to_spectrum_split<Pass::backward, Tiles>
        <<<split.blocks, Tiles::kThreads, Tiles::kSharedBytes>>>(
            table.operands(time_sums), split.partial_sums(), split.done, V, E, W);
    from_spectrum<Pass::backward, VertexTiles><<<blocks, VertexTiles::kThreads, bytes>>>(
        table.basis, table.damped, table.d_x, gradient, V, E, W);
  };
  table.problem.kernel("split-K", Role::ours, launch)
      .needs(80)
      .occupies(table.ends() + table.damped.bytes() + time_sums.bytes() + split.bytes())
      .resources(kernel, Tiles::kThreads, Tiles::kSharedBytes);
}

constexpr int kOneLaunchThreads = 384;

// As many clusters as fit on the device at once, or as there are tiles: none may wait for one that
// cannot start. (Counted for a GPU that this launch has to itself: other kernels end sometime, but
// two of these at the same time, in two streams, might wait for each other for good. In one stream
// they cannot, although launched early: the next one's blocks start when all of this one's run.)
template <Pass kPass, int kColumns, int kStages>
unsigned one_launch_blocks(const Shape& shape) {
  constexpr int kBlocks = kWidth / kColumns, kBytes = sizeof(OneLaunchShared<kColumns, kStages>);
  const auto kernel = diffusion_one_launch<kPass, kColumns, kStages>;
  allow_shared_bytes(kernel, kBytes);
  const int clusters = resident_clusters(kernel, kBlocks, kOneLaunchThreads, kBytes);
  return kBlocks * persistent(blocks_for(shape.V, 64), clusters);
}

template <int kColumns, int kStages>
void add_one_launch(Forward& table) {
  const auto [V, E, W] = table.shape;
  const unsigned blocks = one_launch_blocks<Pass::forward, kColumns, kStages>(table.shape);
  constexpr int kBytes = sizeof(OneLaunchShared<kColumns, kStages>);
  const auto meeting = table.problem.workspace<float>(sizeof(Meeting) / sizeof(float));
  const auto launch = [=, V = V, E = E, W = W, &table] {
    const CUtensorMap x = tensor_map<bf16>(table.x, V, W, 64);
    const CUtensorMap basis = tensor_map<bf16>(table.basis, V, E, basis_rows(kColumns));
    const CUtensorMap mass = tensor_map<bf16>(table.mass, V);
    const CUtensorMap out = tensor_map<bf16>(table.out, V, W, 64);
    const CUtensorMap spectral = tensor_map<bf16>(table.spectral, E, W, kEigen);
    const OneLaunchVectors vectors = {.evalues = table.evalues,
                                      .times = table.times,
                                      .d_spectral = nullptr,
                                      .saved_spectral = nullptr,
                                      .d_times = nullptr,
                                      .meeting = reinterpret_cast<Meeting*>(meeting.data()),
                                      .V = static_cast<int>(V),
                                      .E = static_cast<int>(E),
                                      .W = static_cast<int>(W)};
    launch_early(diffusion_one_launch<Pass::forward, kColumns, kStages>, blocks, kOneLaunchThreads,
                 kBytes, x, basis, mass, out, spectral, vectors);
  };
  table.problem.kernel("one launch", Role::ours, launch)
      .hopper_only()
      .occupies(table.ends() + meeting.bytes())
      .resources(diffusion_one_launch<Pass::forward, kColumns, kStages>, kOneLaunchThreads, kBytes);
}

template <int kColumns, int kStages>
void add_one_launch(Backward& table) {
  const auto [V, E, W] = table.shape;
  const unsigned blocks = one_launch_blocks<Pass::backward, kColumns, kStages>(table.shape);
  constexpr int kBytes = sizeof(OneLaunchShared<kColumns, kStages>);
  const auto meeting = table.problem.workspace<float>(sizeof(Meeting) / sizeof(float));
  const auto launch = [=, V = V, E = E, W = W, &table] {
    const CUtensorMap d_out = tensor_map<bf16>(table.d_out, V, W, 64);
    const CUtensorMap basis = tensor_map<bf16>(table.basis, V, E, basis_rows(kColumns));
    const CUtensorMap mass = tensor_map<bf16>(table.mass, V);
    const CUtensorMap d_x = tensor_map<bf16>(table.d_x, V, W, 64);
    const OneLaunchVectors vectors = {.evalues = table.evalues,
                                      .times = table.times,
                                      .d_spectral = table.d_spectral,
                                      .saved_spectral = table.spectral,
                                      .d_times = table.d_times,
                                      .meeting = reinterpret_cast<Meeting*>(meeting.data()),
                                      .V = static_cast<int>(V),
                                      .E = static_cast<int>(E),
                                      .W = static_cast<int>(W)};
    // The map of spectral is not used: dX's stands for it.
    launch_early(diffusion_one_launch<Pass::backward, kColumns, kStages>, blocks, kOneLaunchThreads,
                 kBytes, d_out, basis, mass, d_x, d_x, vectors);
  };
  table.problem.kernel("one launch", Role::ours, launch)
      .hopper_only()
      .occupies(table.ends() + meeting.bytes())
      .resources(diffusion_one_launch<Pass::backward, kColumns, kStages>, kOneLaunchThreads,
                 kBytes);
}

// The one launch, for the shapes that it is made for. Few rows: narrow blocks, so that 64
// rows keep four multiprocessors busy and not two, and a thread has half as much to add to the
// totals. Many: wide ones, which read the basis less often.
template <typename Table>
void add_one_launch(Table& table) {
  if (table.shape.E > kEigen || table.shape.W > kWidth) return;
  table.shape.V <= 32768 ? add_one_launch<64, 9>(table) : add_one_launch<128, 6>(table);
}

// The rows of one V that compute capability 8.0 can run.
template <typename VertexTiles>
void add_portable_kernels(Forward& forward, Backward& backward) {
  add_unfused(forward);
  add_half_fused<VertexTiles>(forward);
  add_split<VertexTiles>(forward);
  add_unfused(backward);
  add_split<VertexTiles>(backward);
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "7_diffusion_fused",
                 .title = "spatial diffusion on a mesh, forward and backward",
                 .n_meaning = "V, vertices of the mesh",
                 .n_gpu = 131072,
                 .n_cpu = 512,
                 .options = {{"--eigen", "E, eigenvectors: a multiple of 16", 128, 16},
                             {"--width", "W, features of a vertex: a multiple of 16", 256, 16}},
                 .flags = {{"--sweep", "instead of N: V = 256, 512, ... 4194304 (CPU: 1024)"}}});
  const int64_t E = lesson.option("--eigen"), W = lesson.option("--width");
  const int64_t shared_bytes = lesson.device().shared_bytes;
  const bool wide = WideVertexTiles::shared_bytes(E) <= shared_bytes;
  if (NarrowVertexTiles::shared_bytes(E) > shared_bytes) {
    fail(kDeviceCannot,
         "--eigen %lld: 64 columns of the spectrum and two tiles of the basis need %lld bytes of "
         "shared memory, a block may have %lld",
         static_cast<long long>(E), static_cast<long long>(NarrowVertexTiles::shared_bytes(E)),
         static_cast<long long>(shared_bytes));
  }
  std::vector<int64_t> sizes = {lesson.n()};
  if (lesson.flag("--sweep")) {
    if (lesson.given("N")) fail(kBadUsage, "--sweep chooses V itself: leave N out");
    sizes.clear();
    const int64_t largest = lesson.on_cpu() ? 1024 : 4194304;
    for (int64_t V = 256; V <= largest; V *= 2) sizes.push_back(V);
  }

  Cublas blas;
  std::deque<Forward> forwards;
  std::deque<Backward> backwards;
  double worst = 0;
  for (const int64_t V : sizes) {
    Forward& forward = forwards.emplace_back(lesson, blas, Shape{V, E, W});
    Backward& backward = backwards.emplace_back(lesson, blas, Shape{V, E, W});
    wide ? add_portable_kernels<WideVertexTiles>(forward, backward)
         : add_portable_kernels<NarrowVertexTiles>(forward, backward);
    add_one_launch(forward);
    add_one_launch(backward);
    backward.report_difference = [&, last = V == sizes.back()](double difference) {
      worst = std::max(worst, difference);
      char text[128];
      snprintf(text, sizeof text,
               "The reference's gradients agree with finite differences to within %.0e.", worst);
      if (last) lesson.note(text);
    };
  }
  if (E > kEigen || W > kWidth) {
    lesson.note("The one launch keeps at most 128 x 256 of the spectrum on chip: it is left out.");
  }
  if (!lesson.flag("--sweep")) {
    Problem &forward = forwards.back().problem, &backward = backwards.back().problem;
    forward.compare("split-K", "half fused",
                    "Forward: slices of V for every multiprocessor: % times faster.");
    forward.compare("one launch", "unfused",
                    "Forward: one launch instead of five: % times faster.");
    backward.compare("one launch", "unfused",
                     "Backward: one launch instead of seven: % times faster.");
  }
  return lesson.run();
}
