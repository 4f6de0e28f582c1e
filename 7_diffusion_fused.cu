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
//                  (common/diffusion.cu)
//     half fused   mass is multiplied in inside a product, and one small kernel between the two
//                  products does the rest. But the first product's result is only 128 x 256: a few
//                  tiles, a few blocks, each walking over all vertices, on a GPU made for hundreds
//     split-K      the sum over vertices is cut into slices, so that there are blocks for the whole
//                  GPU; the small kernel adds the slices up first
//     one launch   the slices, their sum, and the second product, all in one kernel
//
// The limit that a table prints counts each input and output once, the basis too. A kernel that
// cannot keep its part of the basis on chip between the products has to read it twice; with E = 128
// and W = 256 that is 1.2 times as much. On chip is room for the basis of about 10^5
// vertices; the one launch, which needs room for x as well, keeps that of 17000 (E = 128, W = 256).
//
// The first three need compute capability 8.0 (bf16 on tensor cores), the last one needs 9.0. The
// CPU backend runs all.

#include <cuda/atomic>
#include <deque>
#include <vector>

#include "common/async_copy.cuh"
#include "common/diffusion.h"
#include "common/early_launch.cuh"
#include "common/fragments.cuh"
#include "common/lesson.h"
#include "common/mma.cuh"
#include "common/numerics.h"
#include "common/tiles.cuh"

using bf16 = __nv_bfloat16;

// E and W are multiples of 8: every row starts at a multiple of 16 bytes.
using Shape = DiffusionShape;
using Operands = DiffusionOperands;

constexpr unsigned blocks_for(int64_t count, int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

// ---- half fused, split-K ------------------------------------------------------------------------

// Three kernels, for both passes: the product to the spectrum in slices, their sum, the product
// from the spectrum. What passes between the unfused kernels stays in registers here: the product
// by mass, as large as x, the exponentials and s. Only the slices (fp32) and the spectrum are in
// memory. Each kernel is launched early (common/early_launch.cuh): its blocks take their places
// while the kernel before it ends.

// Two pairs of bf16, multiplied and rounded.
__device__ inline unsigned multiply2(unsigned a, unsigned b) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                         *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const unsigned*>(&product);
}

// A block owns kE x kW elements of the spectrum, a warp kWarpE x kWarpW of them, in registers. Per
// step it needs kV rows of the basis (kE columns of them) and of the values (kW columns), and of
// mass. kStages such sets are in shared memory, all but one of them in flight.
template <int kSide, int kWarpsAlongE, int kWarpsAlongW, int kBlocksFit>
struct ProjectTile {
  static constexpr int kE = kSide, kW = kSide, kV = 64, kStages = 3, kWarpsW = kWarpsAlongW;
  static constexpr int kWarpE = kE / kWarpsAlongE, kWarpW = kW / kWarpsW;
  static constexpr int kThreads = 32 * kWarpsAlongE * kWarpsW;
  static constexpr int kBlocks = kBlocksFit;     // on a multiprocessor; Hopper's has room for them
  static constexpr int kStage = kV * (kE + kW);  // elements
  static constexpr int kSharedBytes = kStages * (kStage + kV) * sizeof(bf16);
};

// sums (gridDim.y, E, W), fp32: in slice s the sum of basis^T (mass[:, None] * values), backward of
// basis^T values, over part s of gridDim.y of the vertices. Block (tile, slice).
//
// One slice for all, which is *half fused*, keeps eight multiprocessors busy for a spectrum of 128
// by 256, and a multiprocessor only receives what it has asked for: with 32 KB under way and most
// of a microsecond from request to arrival, some 40 GB/s each, 0.3 TB/s for all eight, of the 4.8
// TB/s that the memory of an H200 could serve. *split-K* has as many slices as it takes to fill
// the GPU. Blocks of one slice run at the same time and share what they read through the L2 cache:
// x is asked for twice and the basis four times, but both come from memory once.
//
// basis^T is the left factor. A tile of the basis is row-major in shared memory, and ldmatrix
// transposes it on the way to the registers: no transposed copy exists. There, mass multiplies it:
// a row of the basis is a column of the left factor, and a register of a fragment holds two
// neighbours of a row, two vertices, to which the same two masses belong in a[0] and a[1], and two
// others in a[2] and a[3]. That is one instruction a register, and it rounds to bf16 once, as a
// kernel for mass * x alone does.
template <Pass kPass, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    project_slices(Operands in, float* sums) {
  constexpr int kV = Tile::kV, kStages = Tile::kStages;
  constexpr int kRows = Tile::kWarpE / 16, kCols = Tile::kWarpW / 16;
  extern __shared__ __align__(128) bf16 shared[];
  bf16* masses = shared + kStages * Tile::kStage;  // (kStages, kV)
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_e = warp / Tile::kWarpsW * Tile::kWarpE;
  const int warp_w = warp % Tile::kWarpsW * Tile::kWarpW;
  const int tiles_e = (in.E + Tile::kE - 1) / Tile::kE;
  const int e0 = blockIdx.x % tiles_e * Tile::kE, w0 = blockIdx.x / tiles_e * Tile::kW;
  const int64_t all_steps = (in.V + kV - 1) / kV;
  const int64_t first = all_steps * blockIdx.y / gridDim.y;
  const int steps = static_cast<int>(all_steps * (blockIdx.y + 1) / gridDim.y - first);
  const auto copy_step = [&](int step) {
    if (step < steps) {
      bf16* basis = shared + step % kStages * Tile::kStage;
      const int64_t v0 = (first + step) * kV;
      copy_swizzled<kV, Tile::kE, Tile::kThreads>(basis, in.basis, v0, e0, in.V, in.E);
      copy_swizzled<kV, Tile::kW, Tile::kThreads>(basis + kV * Tile::kE, in.values, v0, w0, in.V,
                                                  in.W);
      if (kPass == Pass::forward && threadIdx.x < kV / 8) {
        const int64_t v = v0 + 8 * threadIdx.x;
        bf16* to = masses + step % kStages * kV + 8 * threadIdx.x;
        if (v + 8 <= in.V) {
          copy_async<16>(to, in.mass + v, true);
        } else {  // V ends here
          for (int i = 0; i < 8; ++i)
            to[i] = v + i < in.V ? in.mass[v + i] : __float2bfloat16_rn(0);
        }
      }
    }
    copy_async_commit();
  };
  start_next_kernel();
  wait_for_previous_kernel();

  Sums<Tile::kWarpE, Tile::kWarpW> sum = {};
  for (int step = 0; step < kStages - 1; ++step) copy_step(step);
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    copy_step(step + kStages - 1);
    const bf16* basis = shared + step % kStages * Tile::kStage;
    const bf16* values = basis + kV * Tile::kE;
#pragma unroll
    for (int k = 0; k < kV; k += 16) {
      unsigned a[kRows][4], b[kCols][4];
      load_left_transposed<Tile::kE>(a, basis, warp_e, k);
      load_right<Tile::kW>(b, values, k, warp_w);
      if constexpr (kPass == Pass::forward) {
        const auto* mass = reinterpret_cast<const unsigned*>(masses + step % kStages * kV + k);
        const unsigned low = mass[lane % 4], high = mass[lane % 4 + 4];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          a[i][0] = multiply2(a[i][0], low);
          a[i][1] = multiply2(a[i][1], low);
          a[i][2] = multiply2(a[i][2], high);
          a[i][3] = multiply2(a[i][3], high);
        }
      }
      add_product(sum, a, b);
    }
  }

  float* slice = sums + static_cast<size_t>(blockIdx.y) * in.E * in.W;
  for_pairs(sum, e0 + warp_e, w0 + warp_w, in.E, in.W, [&](int e, int w, float2 pair) {
    *reinterpret_cast<float2*>(slice + static_cast<size_t>(e) * in.W + w) = pair;
  });
}

// Adds the slices up and works on their total: forward, spectral; backward, the damped s and parts
// of dTimes. This is where split-K goes wrong. Three things must hold before an epilogue may touch
// partial sums:
//
//   - All of them must be in. If all slices are stored in one place, the last one stored is what
//     remains; if each reads, adds and writes back, what others add in between is lost. Here each
//     slice has a place of its own, and this kernel waits until all of them are written.
//   - The epilogue must be applied once. Damping is linear, so it may be applied to each partial
//     sum before they are added, or to their total; applied to what has accumulated so far, it
//     damps a slice once more for each one that comes after it. dSpectral, which backward adds,
//     must not be added once per slice; and a nonlinear function (lesson 6's sigmoid) may only ever
//     see the total.
//   - Memory that is added to has to start at zero. Here nothing is added to memory. And the order
//     of the additions is always the same, so that the result is, too.
//
// (A published split-K kernel for this very operator has a relative error of 0.8.)
//
// A block owns 4 rows and 32 columns of the spectrum: a warp one of the rows, and an eighth of the
// slices, whose sums meet in shared memory. So all 32 warps read at the same time, 128 neighbouring
// bytes each. Backward it adds its rows' part of dTimes, over e, and the next kernel adds those of
// all blocks of a column.
constexpr int kSumRows = 4, kSumParts = 8;
template <Pass kPass>
__global__ void __launch_bounds__(32 * kSumRows * kSumParts)
    add_slices(Operands in, const float* sums, int slices, float* time_sums) {
  __shared__ float parts[kSumParts][kSumRows][32];
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % kSumRows;
  const int part = threadIdx.x / 32 / kSumRows;
  const int w = blockIdx.x * 32 + lane, e = blockIdx.y * kSumRows + row;
  const bool inside = e < in.E && w < in.W;
  const size_t at = static_cast<size_t>(e) * in.W + w, stride = static_cast<size_t>(in.E) * in.W;
  start_next_kernel();
  wait_for_previous_kernel();
  float sum = 0;
  if (inside) {
    const int end = slices * (part + 1) / kSumParts;
#pragma unroll 8
    for (int slice = slices * part / kSumParts; slice < end; ++slice) {
      sum += sums[slice * stride + at];
    }
  }
  parts[part][row][lane] = sum;
  __syncthreads();
  float time_sum = 0;
  if (part == 0 && inside) {
    float s = 0;
    for (int i = 0; i < kSumParts; ++i) s += parts[i][row][lane];
    const float evalue = __bfloat162float(in.evalues[e]);
    if constexpr (kPass == Pass::backward) {
      s += __bfloat162float(in.d_spectral[at]);
      time_sum = evalue * s * __bfloat162float(in.spectral[at]);
    }
    in.spectrum[at] = __float2bfloat16_rn(damping(evalue, __bfloat162float(in.times[w])) * s);
  }
  if constexpr (kPass == Pass::backward) {
    if (part == 0) parts[0][row][lane] = time_sum;  // where this thread alone has read
    __syncthreads();
    if (part > 0 || row > 0 || w >= in.W) return;
    for (int i = 1; i < kSumRows; ++i) time_sum += parts[0][i][lane];
    time_sums[static_cast<size_t>(blockIdx.y) * in.W + w] = time_sum;
  }
}

// A block's part of the product from the spectrum: all E rows and kW columns of the spectrum, and
// kStages tiles of kV rows of the basis, in boxes of 64 columns. A warp has kWarpV x kWarpW of the
// result.
template <int kRows, int kColumns, int kWarpsAlongV, int kWarpsAlongW, int kStageCount>
struct ExpandTile {
  static constexpr int kV = kRows, kW = kColumns, kStages = kStageCount, kWarpsW = kWarpsAlongW;
  static constexpr int kWarpV = kV / kWarpsAlongV, kWarpW = kW / kWarpsW;
  static constexpr int kThreads = 32 * kWarpsAlongV * kWarpsAlongW;
  static constexpr int kBox = kV * 64;  // elements
  static constexpr int64_t shared_bytes(int64_t E) {
    return ((E + 15) / 16 * 16 * kW + kStages * ((E + 63) / 64) * kBox + kV * kW) * sizeof(bf16);
  }
};

// result (V, W) = basis spectrum, and backward mass[:, None] * that. Lesson 6's resident weights
// again: the spectrum is small, so every block keeps kW columns of it in shared memory for good,
// and the basis streams by, tile blockIdx.x, blockIdx.x + gridDim.x, ... of its rows. Each warp's
// results go through a staging area of its own, so that they leave as 16 bytes a lane.
// Backward, the blocks with the first tile also add up the time_rows parts of dTimes for their
// columns.
template <Pass kPass, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    expand_spectrum(Operands in, const float* time_sums, int time_rows) {
  constexpr int kV = Tile::kV, kW = Tile::kW, kStages = Tile::kStages;
  constexpr int kWarpV = Tile::kWarpV, kWarpW = Tile::kWarpW;
  extern __shared__ __align__(128) bf16 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_v = warp / Tile::kWarpsW * kWarpV, warp_w = warp % Tile::kWarpsW * kWarpW;
  const int w0 = blockIdx.y * kW, boxes = (in.E + 63) / 64, rows = (in.E + 15) / 16 * 16;
  bf16* spectrum = shared;
  bf16* stages = spectrum + rows * kW;
  bf16* staging = stages + kStages * boxes * Tile::kBox + warp * kWarpV * kWarpW;
  const int64_t tiles = (in.V + kV - 1) / kV;
  const auto stage_of = [&](int step) { return stages + step % kStages * boxes * Tile::kBox; };
  const auto copy_step = [&](int step) {
    const int64_t tile = blockIdx.x + static_cast<int64_t>(step) * gridDim.x;
    for (int box = 0; tile < tiles && box < boxes; ++box) {
      copy_swizzled<kV, 64, Tile::kThreads>(stage_of(step) + box * Tile::kBox, in.basis, tile * kV,
                                            64 * box, in.V, in.E);
    }
    copy_async_commit();
  };
  start_next_kernel();
  wait_for_previous_kernel();

  for (int e = 0; e < rows; e += 16) {
    copy_swizzled<16, kW, Tile::kThreads>(spectrum + e * kW, in.spectrum, e, w0, in.E, in.W);
  }
  for (int step = 0; step < kStages - 1; ++step) copy_step(step);
  if (kPass == Pass::backward && blockIdx.x == 0) {
    for (int w = w0 + threadIdx.x; w < min(w0 + kW, in.W); w += Tile::kThreads) {
      float sum = 0;
      for (int row = 0; row < time_rows; ++row) {
        sum += time_sums[static_cast<size_t>(row) * in.W + w];
      }
      in.d_times[w] = __float2bfloat16_rn(-sum);
    }
  }

  int64_t tile = blockIdx.x;
  for (int step = 0; tile < tiles; ++step, tile += gridDim.x) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    copy_step(step + kStages - 1);
    const int64_t v0 = tile * kV + warp_v;
    bf16 mass[kWarpV / 8];  // asked for before the products, needed after them
    if constexpr (kPass == Pass::backward) {
#pragma unroll
      for (int i = 0; i < kWarpV / 8; ++i) {
        const int64_t v = v0 + 8 * i + lane / 4;
        mass[i] = in.mass[v < in.V ? v : 0];
      }
    }
    Sums<kWarpV, kWarpW> sum = {};
#pragma unroll 2
    for (int k = 0; k < rows; k += 16) {
      unsigned a[kWarpV / 16][4], b[kWarpW / 16][4];
      load_left<64>(a, stage_of(step) + k / 64 * Tile::kBox, warp_v, k % 64);
      load_right<kW>(b, spectrum, k, warp_w);
      add_product(sum, a, b);
    }
#pragma unroll
    for (int j = 0; j < kWarpW / 8; ++j) {
      bf16* at = staging + swizzle<kWarpW>(lane / 4, 8 * j + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < kWarpV / 8; ++i) {
        const float* pair = &sum[i / 2][j][i % 2 * 2];
        const float factor = kPass == Pass::backward ? __bfloat162float(mass[i]) : 1;
        *reinterpret_cast<unsigned*>(at + 8 * i * kWarpW) =
            pack2<bf16>(factor * pair[0], factor * pair[1]);
      }
    }
    __syncwarp();
    constexpr int kLanes = kWarpW / 8, kStep = 32 / kLanes;  // of a row; rows at a time
    const int row = lane / kLanes, col = lane % kLanes * 8, w = w0 + warp_w + col;
    bf16* to = in.result + (v0 + row) * in.W + w;
    const int64_t there = w < in.W ? in.V - v0 - row : 0;
    const int inside = there < kWarpV ? static_cast<int>(there) : kWarpV;
#pragma unroll
    for (int r = 0; r < kWarpV; r += kStep, to += kStep * in.W) {
      if (r < inside) {
        *reinterpret_cast<uint4*>(to) =
            *reinterpret_cast<const uint4*>(staging + swizzle<kWarpW>(row + r, col));
      }
    }
  }
}

// ---- Hopper: one launch -------------------------------------------------------------------------

// The whole operator in one kernel, which at first sight cannot be: every row of out
// needs the whole spectrum, and the spectrum needs every row of x. It takes two things. All blocks
// are on the GPU at the same time, so that they may wait for each other; and a block keeps what it
// has: a slice of the rows of x and of the basis.
//
//   First product   A block sums its rows' share of basis^T (mass x) up in registers, and adds it
//                   to a sum of all blocks in memory (128 KB for E = 128, W = 256: in the L2
//                   cache). The basis is the left factor, transposed: its fragments come through
//                   registers (ldmatrix), where they are multiplied by the masses on the way.
//   Meeting         Each waits until all have added. The sum comes back into the registers that the
//                   shares left from, gets its exponential, and becomes the right factor of the
//                   second product, in shared memory.
//   Second product  Back over the same rows in reverse: the last tiles of the basis are still in
//                   shared memory, those before them probably in the L2 cache. With up to kStages
//                   tiles a block, the basis is read once.
//
// Backward is the same with dOut for x: the masses wait for the end, and the spare warps add
// dSpectral to the sum and, when all have added, compute dTimes from it while the others go on.
//
// The blocks of a cluster share rows. Each has kColumns columns of x, so there are as many as W
// asks for, up to 8; and all have the whole basis, of up to kEigen columns, which they fetch
// together, each its part, by multicast. What E and W do not fill is zero.
constexpr int kMostEigen = 256, kMostWidth = 512;

template <int kEigen, int kColumns, int kStages>
struct OneLaunchShared {
  static constexpr int kSteps = kEigen / kStepK, kBoxes = kColumns / kBoxCols;
  LeftTile<bf16, 64> basis[kStages][kSteps];  // 64 rows, all columns
  union {
    RightTile<bf16, kColumns> x[kStages];  // first product
    struct {
      RightTile<bf16, kColumns> spectrum[kSteps];
      Box<bf16, 64> out[2][kBoxes];  // a tile of each consumer
    } second;
  };
  alignas(128) bf16 mass[kStages][64];
  Barrier full[kStages], empty[kStages], spare;
};

// A block fetches the basis for its cluster in boxes of this many rows.
constexpr int kMulticastRows = 32;

#if HOPPER_CODE
// Two neighbouring elements of a row-major matrix; zeros outside of it. cols and col are even.
__device__ inline float2 pair_at(const bf16* matrix, int rows, int cols, int row, int col) {
  if (row >= rows || col >= cols) return float2{};
  return __bfloat1622float2(
      *reinterpret_cast<const __nv_bfloat162*>(matrix + static_cast<size_t>(row) * cols + col));
}
#endif

// Blocks of a producer and two consumer warpgroups. In the first product a consumer has kEigen / 2
// rows of the spectrum, all kColumns columns, and both work on every tile; in the second product
// they take turns, tile by tile, so that one multiplies while the other writes out. Three spare
// warps beside the producer work on the sum of all: they zero the next launch's and, backward, add
// dSpectral and compute dTimes.
//
// What the blocks share in memory is zero before the first launch; a launch leaves it ready for the
// next one with the same template arguments and W, whatever V and the grid are. One launch at a
// time: two streams need one of each. arrivals (blocks of a cluster): for each rank, in the lower
// half how many have come, in the upper half how many launches there were. all_totals (2, blocks,
// kEigen, kColumns): launches use the two sums in turn, and zero the other one.
template <Pass kPass, int kEigen, int kColumns, int kStages>
__global__ void __launch_bounds__(384, 1)
    diffusion_one_launch(const __grid_constant__ CUtensorMap x,
                         const __grid_constant__ CUtensorMap basis,
                         const __grid_constant__ CUtensorMap mass,
                         const __grid_constant__ CUtensorMap out,
                         const __grid_constant__ CUtensorMap spectral, const Operands operands,
                         unsigned* all_arrivals, float4* all_totals) {
#if HOPPER_CODE
  using Shared = OneLaunchShared<kEigen, kColumns, kStages>;
  using Part = Sum<kColumns>;
  constexpr int kSteps = Shared::kSteps, kBoxes = Shared::kBoxes;
  constexpr int kTiles = kEigen / 128;  // of 64 rows of the spectrum, for each consumer
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  start_next_kernel();
  wait_for_previous_kernel();
  const int E = operands.E, W = operands.W;
  const int rank = blockIdx.x, blocks = gridDim.x, group = blockIdx.y, groups = gridDim.y;
  const int col0 = rank * kColumns;
  const int64_t all_tiles = (operands.V + 63) / 64;
  const int first = static_cast<int>(all_tiles * group / groups);
  const int tiles = static_cast<int>(all_tiles * (group + 1) / groups) - first;

  // A block reads this before it arrives, and the number changes when the last one has arrived: all
  // blocks of a launch read the same.
  using Counter = cuda::atomic_ref<unsigned, cuda::thread_scope_device>;
  Counter arrivals(all_arrivals[rank]);
  const unsigned start = arrivals.load(cuda::memory_order_relaxed) & 0xffff0000;
  const auto all_have_arrived = [&] {
    return arrivals.load(cuda::memory_order_acquire) - start >= static_cast<unsigned>(groups);
  };
  // The shares of a block's columns add up in the layout of the registers that hold them: quad
  // (w kColumns / 8 + j) 32 + l is elements 4 j to 4 j + 3 of lane l for rows 16 w to 16 w + 15.
  constexpr int kQuads = kEigen * kColumns / 4;
  const int turn = start >> 16 & 1;
  float4* totals = all_totals + (turn * blocks + rank) * kQuads;

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
      tensor_load(&shared.x[s].boxes[box], &x, row, col0 + kBoxCols * box, &shared.full[s], policy);
    }
  };
  const auto load_basis = [&](int t) {
    const int s = t % kStages, row = 64 * (first + t);
    tensor_load(shared.mass[s], &mass, row, &shared.full[s]);
    for (int part = rank; part < kSteps * 64 / kMulticastRows; part += blocks) {
      const int step = part * kMulticastRows / 64, within = part * kMulticastRows % 64;
      tensor_load_multicast(shared.basis[s][step].row(within), &basis, row + within, kStepK * step,
                            &shared.full[s], static_cast<uint16_t>((1 << blocks) - 1));
    }
  };
  constexpr int kBasisBytes = sizeof shared.basis[0] + sizeof shared.mass[0];
  constexpr int kFirstBytes = kBasisBytes + sizeof shared.x[0];
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&shared.full[s], 1);
      barrier_init(&shared.empty[s], 2 * blocks);
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
      // The three spare warps. The work is divided among those of all groups.
      const int worker = 3 * group + warp - 1;
      float4* next = all_totals + ((turn ^ 1) * blocks + rank) * kQuads;
      for (int i = 32 * worker + lane; i < kQuads; i += 96 * groups) next[i] = float4{};
      if constexpr (kPass == Pass::backward) {
        // For the quads that hold 8 columns: the lane has two of them, and two rows of each 16.
        const auto visit_columns = [&](auto visit) {
          for (int j = worker; j < kColumns / 8; j += 3 * groups) {
            const int col = col0 + 8 * j + 2 * (lane % 4);
            float2 sum = {};
#pragma unroll 2
            for (int i = 0; i < kEigen / 16; ++i) {
              visit(totals + (i * kColumns / 8 + j) * 32 + lane, 16 * i + lane / 4, col, sum);
            }
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) {
              sum.x += __shfl_xor_sync(~0u, sum.x, lanes);
              sum.y += __shfl_xor_sync(~0u, sum.y, lanes);
            }
            if (lane < 4 && col < W) {
              *reinterpret_cast<uint32_t*>(operands.d_times + col) = pack2<bf16>(sum.x, sum.y);
            }
          }
        };
        visit_columns([&](float4* quad, int row, int col, float2&) {
          const float2 upper = pair_at(operands.d_spectral, E, W, row, col);
          const float2 lower = pair_at(operands.d_spectral, E, W, row + 8, col);
          atomicAdd(quad, make_float4(upper.x, upper.y, lower.x, lower.y));
        });
        barrier_arrive(&shared.spare);  // the block arrives when they have added, too
        while (!all_have_arrived()) {
        }
        visit_columns([&](float4* quad, int row, int col, float2& sum) {
          const float4 s = __ldcg(quad);
          const float2 upper = pair_at(operands.spectral, E, W, row, col);
          const float2 lower = pair_at(operands.spectral, E, W, row + 8, col);
          const float e0 = row < E ? __bfloat162float(operands.evalues[row]) : 0;
          const float e1 = row + 8 < E ? __bfloat162float(operands.evalues[row + 8]) : 0;
          sum.x -= e0 * s.x * upper.x + e1 * s.z * lower.x;
          sum.y -= e0 * s.y * upper.y + e1 * s.w * lower.y;
        });
      }
    }
  } else {
    registers_grow_to<224>();
    const auto release = [&](int s) {
      if (thread < blocks) barrier_arrive(&shared.empty[s], thread);
    };
    // exp(-evalue time) of the thread's elements, while the first tiles are on their way.
    float factors[kTiles][kColumns / 2];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const int row0 = 64 * (kTiles * consumer + m) + Part::row(0);
      const float upper = row0 < E ? __bfloat162float(operands.evalues[row0]) : 0;
      const float lower = row0 + 8 < E ? __bfloat162float(operands.evalues[row0 + 8]) : 0;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float2 times = pair_at(operands.times, 1, W, 0, col0 + Part::col(4 * j));
        factors[m][4 * j] = damping(upper, times.x);
        factors[m][4 * j + 1] = damping(upper, times.y);
        factors[m][4 * j + 2] = damping(lower, times.x);
        factors[m][4 * j + 3] = damping(lower, times.y);
      }
    }

    Part share[kTiles];
    for (int t = 0; t < tiles; ++t) {
      const int s = t % kStages;
      wait(shared.full, s);
      uint32_t a[kTiles][4][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int row = 16 * k + lane / 16 * 8 + lane % 8, piece = 2 * warp + lane / 8 % 2;
          ldmatrix_x4_trans(a[m][k],
                            &shared.basis[s][kTiles * consumer + m].elements[swizzled(row, piece)]);
          if constexpr (kPass == Pass::forward) {
            const auto* factor =
                reinterpret_cast<const unsigned*>(shared.mass[s] + 16 * k + 2 * (lane % 4));
            a[m][k][0] = multiply2(a[m][k][0], factor[0]);
            a[m][k][1] = multiply2(a[m][k][1], factor[0]);
            a[m][k][2] = multiply2(a[m][k][2], factor[4]);
            a[m][k][3] = multiply2(a[m][k][3], factor[4]);
          }
        }
      }
      wgmma_fence();
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          wgmma<bf16>(share[m].elements, a[m][k], shared.x[s].operand(k), t > 0 || k > 0);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      if (t + kStages < tiles) release(s);
    }

    const auto quad = [&](int m, int j) {
      return totals + ((4 * (kTiles * consumer + m) + warp) * kColumns / 8 + j) * 32 + lane;
    };
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float* four = share[m].elements + 4 * j;
        atomicAdd(quad(m, j), make_float4(four[0], four[1], four[2], four[3]));
      }
    }
    named_barrier(4, 256);
    if (threadIdx.x == 128) {
      if constexpr (kPass == Pass::backward) barrier_wait(&shared.spare, 0);
      const unsigned before = arrivals.fetch_add(1, cuda::memory_order_acq_rel) - start;
      if (before + 1 == static_cast<unsigned>(groups)) {
        // The last one: on to the next launch's number.
        arrivals.fetch_add(0x10000 - groups, cuda::memory_order_relaxed);
      } else {
        while (!all_have_arrived()) {
        }
      }
    }
    named_barrier(4, 256);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float4 total = __ldcg(quad(m, j));
        float* four = share[m].elements + 4 * j;
        const float* factor = factors[m] + 4 * j;
        four[0] = factor[0] * total.x;
        four[1] = factor[1] * total.y;
        four[2] = factor[2] * total.z;
        four[3] = factor[3] * total.w;
      }
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        share[m].store(shared.second.spectrum[kTiles * consumer + m].boxes[box], kBoxCols * box,
                       [&](int i) { return share[m].elements[i]; });
      }
    }
    shared_fence();
    named_barrier(4, 256);
    if (kPass == Pass::forward && group == 0 && threadIdx.x == 128) {
      for (int step = 0; step < kSteps; ++step) {
        for (int box = 0; box < kBoxes; ++box) {
          tensor_store(&spectral, kStepK * step, col0 + kBoxCols * box,
                       &shared.second.spectrum[step].boxes[box]);
        }
      }
      tensor_store_commit();
    }

    Part sum;
    for (int t = tiles - 1; t >= 0; --t) {
      const int s = t % kStages;
      if (s % 2 != consumer) continue;
      if (t + kStages < tiles) wait(shared.full, s);
      float above = 1, below = 1;
      if constexpr (kPass == Pass::backward) {
        above = __bfloat162float(shared.mass[s][Part::row(0)]);
        below = __bfloat162float(shared.mass[s][Part::row(2)]);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        sum.start_product(shared.basis[s][step], 0, shared.second.spectrum[step], step > 0);
      }
      wgmma_wait<0>();
      if (thread == 0) tensor_store_wait_read<0>();
      named_barrier(1 + consumer, 128);  // the masses have been read, too
      if (t >= kStages) {                // for both consumers
        release(s);
        release(s);
      }
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        sum.store(shared.second.out[consumer][box], kBoxCols * box,
                  [&](int i) { return (i / 2 % 2 ? below : above) * sum.elements[i]; });
      }
      shared_fence();
      named_barrier(1 + consumer, 128);
      if (thread == 0) {
        for (int box = 0; box < kBoxes; ++box) {
          tensor_store(&out, 64 * (first + t), col0 + kBoxCols * box,
                       &shared.second.out[consumer][box]);
        }
        tensor_store_commit();
      }
    }
    if (thread == 0) tensor_store_wait_read<0>();
  }
#endif
}

// -------------------------------------------------------------------------------------------------

// The tiles of the portable kernels. Of project_slices' the large ones read less, and the small
// ones are more: for a mesh that is not large. Of expand_spectrum's the wide ones, 96 KB for E =
// 128, are for devices that have so much shared memory for a block.
using LargeTile = ProjectTile<128, 2, 4, 2>;
using SmallTile = ProjectTile<64, 2, 2, 4>;
using WideTile = ExpandTile<64, 128, 2, 2, 3>;
using NarrowTile = ExpandTile<32, 64, 1, 2, 2>;

template <typename Tile>
int64_t project_tiles(const Shape& shape) {
  return static_cast<int64_t>(blocks_for(shape.E, Tile::kE)) * blocks_for(shape.W, Tile::kW);
}

// Slices of split-K: blocks for all multiprocessors, but none without a step.
template <typename Tile>
int64_t slices_for(const Shape& shape, int multiprocessors) {
  const int64_t fill = Tile::kBlocks * multiprocessors / project_tiles<Tile>(shape);
  return std::clamp<int64_t>(fill, 1, blocks_for(shape.V, Tile::kV));
}

template <Pass kPass, typename Project, typename Expand>
void add_slices_of(DiffusionProblem& table, const char* name, int64_t slices, int multiprocessors) {
  const auto [V, E, W] = table.shape;
  const auto sums = table.problem.output<float>(slices * table.shape.spectrum_values());
  const dim3 tiles(static_cast<unsigned>(project_tiles<Project>(table.shape)),
                   static_cast<unsigned>(slices));
  const dim3 parts(blocks_for(W, 32), blocks_for(E, kSumRows));
  // Backward: the parts of dTimes.
  const auto time_sums = table.problem.output<float>(kPass == Pass::backward ? parts.y * W : 1);
  const auto first = project_slices<kPass, Project>;
  const auto last = expand_spectrum<kPass, Expand>;
  const int bytes = static_cast<int>(Expand::shared_bytes(E));
  allow_shared_bytes(first, Project::kSharedBytes);
  allow_shared_bytes(last, bytes);
  // As many blocks as fit on the GPU at once, or as there are tiles.
  int per_sm = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, last, Expand::kThreads, bytes));
  const unsigned columns = blocks_for(W, Expand::kW);
  const unsigned fit = std::max(1u, static_cast<unsigned>(per_sm * multiprocessors) / columns);
  const dim3 rows(std::min(blocks_for(V, Expand::kV), fit), columns);
  const auto launch = [=, slices = static_cast<int>(slices), &table] {
    const Operands in = table.operands();
    launch_early(project_slices<kPass, Project>, tiles, Project::kThreads, Project::kSharedBytes,
                 in, sums.data());
    launch_early(add_slices<kPass>, parts, 32 * kSumRows * kSumParts, 0, in, sums.data(), slices,
                 time_sums.data());
    launch_early(expand_spectrum<kPass, Expand>, rows, Expand::kThreads, bytes, in,
                 time_sums.data(), static_cast<int>(parts.y));
  };
  const double temporary = kPass == Pass::forward ? 0 : table.spectrum.bytes() + time_sums.bytes();
  const int64_t steps = blocks_for(V, Project::kV);
  table.problem.kernel(name, Role::ours, launch)
      .needs(80)
      .occupies(table.ends() + temporary + sums.bytes())
      .resources(first, Project::kThreads, Project::kSharedBytes)
      // mass * basis, spectral; backward s stays in fp32.
      .checks = table.checks((steps + slices - 1) / slices * Project::kV, 0,
                             kPass == Pass::forward ? 2 : 1, 1);
}

template <typename Project, typename Expand>
void add_portable_kernels(DiffusionProblem& forward, DiffusionProblem& backward,
                          int multiprocessors) {
  const int64_t slices = slices_for<Project>(forward.shape, multiprocessors);
  add_unfused(forward);
  add_slices_of<Pass::forward, Project, Expand>(forward, "half fused", 1, multiprocessors);
  add_slices_of<Pass::forward, Project, Expand>(forward, "split-K", slices, multiprocessors);
  add_unfused(backward);
  add_slices_of<Pass::backward, Project, Expand>(backward, "split-K", slices, multiprocessors);
}

template <Pass kPass, int kEigen, int kColumns, int kStages>
void add_one_launch(DiffusionProblem& table) {
  constexpr int kBytes = sizeof(OneLaunchShared<kEigen, kColumns, kStages>), kThreads = 384;
  const auto [V, E, W] = table.shape;
  const auto kernel = diffusion_one_launch<kPass, kEigen, kColumns, kStages>;
  allow_shared_bytes(kernel, kBytes);
  // As many clusters as fit on the device at once, or as there are tiles: none may wait for one
  // that cannot start. (Counted for a GPU that this launch has to itself: other kernels end
  // sometime, but two of these at the same time, in two streams, might wait for each other for
  // good. In one stream they cannot, although launched early: the next one's blocks start when all
  // of this one's run.)
  const unsigned blocks = blocks_for(W, kColumns);
  const int64_t tiles = blocks_for(V, 64);
  const unsigned clusters = persistent(tiles, resident_clusters(kernel, blocks, kThreads, kBytes));
  const auto arrivals = table.problem.workspace<unsigned>(blocks);
  const auto totals = table.problem.workspace<float>(2 * kEigen * kColumns * blocks);
  const auto launch = [=, V = V, E = E, W = W, &table] {
    const Operands in = table.operands();
    const CUtensorMap x = tensor_map<bf16>(in.values, V, W, 64);
    const CUtensorMap basis = tensor_map<bf16>(in.basis, V, E, kMulticastRows);
    const CUtensorMap mass = tensor_map<bf16>(in.mass, V);
    const CUtensorMap out = tensor_map<bf16>(in.result, V, W, 64);
    const CUtensorMap spectral = tensor_map<bf16>(in.spectrum, E, W, 64);
    launch_clusters(diffusion_one_launch<kPass, kEigen, kColumns, kStages>, blocks, true,
                    dim3(blocks, clusters), kThreads, kBytes, x, basis, mass, out, spectral, in,
                    arrivals.data(), reinterpret_cast<float4*>(totals.data()));
  };
  table.problem.kernel("one launch", Role::ours, launch)
      .hopper_only()
      .occupies(table.ends() + arrivals.bytes() + totals.bytes())
      .resources(kernel, kThreads, kBytes)
      .checks =
      table.checks((tiles + clusters - 1) / clusters * 64, 0, kPass == Pass::forward ? 2 : 1, 1);
}

// The one launch, for the shapes that it is made for. Few rows: narrow blocks, so that 64 rows keep
// more multiprocessors busy, and a thread has half as much to add to the totals. Many: wide ones,
// which read the basis less often.
template <Pass kPass>
void add_one_launch(DiffusionProblem& table) {
  const auto [V, E, W] = table.shape;
  if (E > kMostEigen || W > kMostWidth) return;
  if (E > 128) {
    add_one_launch<kPass, 256, 64, 5>(table);
  } else if (V <= 32768 || W <= 64) {
    add_one_launch<kPass, 128, 64, 9>(table);
  } else {
    add_one_launch<kPass, 128, 128, 6>(table);
  }
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "7_diffusion_fused",
                 .title = "spatial diffusion on a mesh, forward and backward",
                 .n_meaning = "V, vertices of the mesh",
                 .n_gpu = 131072,
                 .n_cpu = 512,
                 .options = {{"--eigen", "E, eigenvectors: a multiple of 8", 128, 8},
                             {"--width", "W, features of a vertex: a multiple of 8", 256, 8}},
                 .flags = {{"--sweep", "instead of N: V = 256, 512, ... 4194304 (CPU: 1024)"}}});
  const int64_t E = lesson.option("--eigen"), W = lesson.option("--width");
  const int64_t shared_bytes = lesson.device().shared_bytes;
  if (NarrowTile::shared_bytes(E) > shared_bytes) {
    fail(kDeviceCannot,
         "--eigen %lld: 64 columns of the spectrum and two tiles of the basis need %lld bytes of "
         "shared memory, a block may have %lld",
         static_cast<long long>(E), static_cast<long long>(NarrowTile::shared_bytes(E)),
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
  std::deque<DiffusionProblem> tables;
  double worst = 0;
  for (const int64_t V : sizes) {
    DiffusionProblem& forward = tables.emplace_back(lesson, blas, Pass::forward, Shape{V, E, W});
    DiffusionProblem& backward = tables.emplace_back(lesson, blas, Pass::backward, Shape{V, E, W});
    const bool wide = WideTile::shared_bytes(E) <= shared_bytes;
    const auto add = V > 131072 ? wide ? add_portable_kernels<LargeTile, WideTile>
                                       : add_portable_kernels<LargeTile, NarrowTile>
                     : wide ? add_portable_kernels<SmallTile, WideTile>
                                : add_portable_kernels<SmallTile, NarrowTile>;
    add(forward, backward, lesson.device().sms);
    add_one_launch<Pass::forward>(forward);
    add_one_launch<Pass::backward>(backward);
    backward.report_difference = [&, last = V == sizes.back()](double difference) {
      worst = std::max(worst, difference);
      char text[128];
      snprintf(text, sizeof text,
               "The reference's gradients agree with finite differences to within %.0e.", worst);
      if (last) lesson.note(text);
    };
  }
  if (E > kMostEigen || W > kMostWidth) {
    lesson.note("The one launch keeps at most 256 x 512 of the spectrum on chip: it is left out.");
  }
  if (!lesson.flag("--sweep")) {
    Problem &forward = tables.front().problem, &backward = tables.back().problem;
    forward.compare("split-K", "half fused",
                    "Forward: slices of V for every multiprocessor: % times faster.");
    forward.compare("split-K", "unfused",
                    "Forward: three launches instead of five: % times faster.");
    forward.compare("one launch", "unfused",
                    "Forward: one launch instead of five: % times faster.");
    backward.compare("one launch", "unfused",
                     "Backward: one launch instead of seven: % times faster.");
  }
  return lesson.run();
}
