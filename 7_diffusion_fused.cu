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
// --batch N: N meshes of V vertices each in the same launches, as DiffusionNet takes them. All of
// the above but times is each mesh's own, x is (N, V, W), and dTimes is a sum over the meshes, too.
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
//                  (checks/diffusion/diffusion.cu)
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

#include <deque>
#include <vector>

#include "checks/diffusion/diffusion.h"
#include "common/lesson.h"
#include "common/numerics.h"
#include "operators/diffusion/one_launch.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/fragments.cuh"
#include "primitives/launch.h"
#include "primitives/mma.cuh"

using namespace checks;
using namespace operators::diffusion;

using bf16 = __nv_bfloat16;

// E and W are multiples of 8: every row starts at a multiple of 16 bytes.
using Shape = DiffusionShape;
using Operands = DiffusionOperands;

// ---- half fused, split-K ------------------------------------------------------------------------

// Three kernels, for both passes: the product to the spectrum in slices, their sum, the product
// from the spectrum. What passes between the unfused kernels stays in registers here: the product
// by mass, as large as x, the exponentials and s. Only the slices (fp32) and the spectrum are in
// memory. Each kernel is launched early (primitives/early_launch.cuh): its blocks take their places
// while the kernel before it ends.

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
  static constexpr int kMasses = kV + 8;         // of a stage, see below
  static constexpr int kSharedBytes = kStages * (kStage + kMasses) * sizeof(bf16);
};

// at[0] and at[1]. kAnywhere: `at` need not be aligned to 4 bytes.
template <bool kAnywhere>
__device__ unsigned neighbours(const bf16* at) {
  if constexpr (!kAnywhere) return *reinterpret_cast<const unsigned*>(at);
  const __nv_bfloat162 pair = {at[0], at[1]};
  return *reinterpret_cast<const unsigned*>(&pair);
}

// sums (N, gridDim.y, E, W), fp32: in slice s the sum of basis^T (mass[:, None] * values), backward
// of basis^T values, over slice s of gridDim.y of the vertices. Block (tile, slice, mesh).
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
template <Pass kPass, typename Tile, bool kBatch>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    project_slices(Operands in, float* sums) {
  constexpr int kV = Tile::kV, kStages = Tile::kStages;
  constexpr int kRows = Tile::kWarpE / 16, kCols = Tile::kWarpW / 16;
  extern __shared__ __align__(128) bf16 shared[];
  bf16* masses = shared + kStages * Tile::kStage;  // (kStages, kMasses)
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_e = warp / Tile::kWarpsW * Tile::kWarpE;
  const int warp_w = warp % Tile::kWarpsW * Tile::kWarpW;
  const int tiles_e = (in.E + Tile::kE - 1) / Tile::kE;
  const int e0 = blockIdx.x % tiles_e * Tile::kE, w0 = blockIdx.x / tiles_e * Tile::kW;
  const int64_t all_steps = (in.V + kV - 1) / kV;
  const int64_t first = all_steps * blockIdx.y / gridDim.y;
  const int steps = static_cast<int>(all_steps * (blockIdx.y + 1) / gridDim.y - first);
  const int mesh = kBatch ? blockIdx.z : 0;
  const int64_t vertex0 = mesh * in.V;
  in.values += vertex0 * in.W;
  in.basis += vertex0 * in.E;
  in.mass += vertex0;
  // A mesh's masses may start at any address, but a copy at multiples of 16 bytes: up to 7 masses
  // come before those of a step, and what comes after the mesh's last one meets a basis of zeros.
  const int shift = kBatch ? static_cast<int>(vertex0 % 8) : 0;
  const int64_t end = kBatch ? in.V * (gridDim.z - mesh) : in.V;
  const auto copy_step = [&](int step) {
    if (step < steps) {
      bf16* basis = shared + step % kStages * Tile::kStage;
      const int64_t v0 = (first + step) * kV;
      copy_swizzled<kV, Tile::kE, Tile::kThreads>(basis, in.basis, v0, e0, in.V, in.E);
      copy_swizzled<kV, Tile::kW, Tile::kThreads>(basis + kV * Tile::kE, in.values, v0, w0, in.V,
                                                  in.W);
      if (kPass == Pass::forward && threadIdx.x < kV / 8 + (kBatch ? 1 : 0)) {
        const int64_t v = v0 + 8 * static_cast<int>(threadIdx.x) - shift;
        bf16* to = masses + step % kStages * Tile::kMasses + 8 * threadIdx.x;
        if (v + 8 <= end) {
          copy_async<16>(to, in.mass + v, true);
        } else {
          for (int i = 0; i < 8; ++i) to[i] = v + i < end ? in.mass[v + i] : __float2bfloat16_rn(0);
        }
      }
    }
  };
  start_next_kernel();
  wait_for_previous_kernel();

  Sums<Tile::kWarpE, Tile::kWarpW> sum = {};
  auto ahead = copies_ahead<kStages>(copy_step);
  for (int step = 0; step < steps; ++step) {
    ahead.next();
    const bf16* basis = shared + step % kStages * Tile::kStage;
    const bf16* values = basis + kV * Tile::kE;
#pragma unroll
    for (int k = 0; k < kV; k += 16) {
      unsigned a[kRows][4], b[kCols][4];
      load_left_transposed<Tile::kE>(a, basis, warp_e, k);
      load_right<Tile::kW>(b, values, k, warp_w);
      if constexpr (kPass == Pass::forward) {
        const bf16* mass = masses + step % kStages * Tile::kMasses + shift + k + lane % 4 * 2;
        const unsigned low = neighbours<kBatch>(mass), high = neighbours<kBatch>(mass + 8);
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

  float* slice = sums + (static_cast<size_t>(mesh) * gridDim.y + blockIdx.y) * in.E * in.W;
  for_pairs(sum, e0 + warp_e, w0 + warp_w, in.E, in.W, [&](int e, int w, float2 pair) {
    *reinterpret_cast<float2*>(slice + static_cast<size_t>(e) * in.W + w) = pair;
  });
}

// Adds the slices up and works on their total: forward, spectral; backward, the damped s and
// partial dTimes. This is where split-K goes wrong. Three things must hold before an epilogue may
// touch partial sums:
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
//     of the additions is always the same, so that the result is, too. (Below, one launch adds
//     atomically, in the order in which its clusters come: there two runs differ in the last bits.)
//
// A block owns some rows and 32 columns of a mesh's spectrum. kRowWarps warps work for a row: each
// adds up some of the slices, and the partial sums meet in shared memory. With eight warps for each
// of 4 rows all 32 warps read at the same time, 128 neighbouring bytes each. A batch has enough to
// read with fewer warps for a row; but of so few rows it would have thousands of blocks, so there a
// block has 16. Backward it adds up its rows' share of dTimes, over e, and the next kernel adds
// those of all blocks of a column.
__host__ __device__ constexpr int sum_rows(int warps) { return warps == 8 ? 4 : 16; }
template <Pass kPass, bool kBatch, int kRowWarps>
__global__ void __launch_bounds__(32 * sum_rows(kRowWarps) * kRowWarps)
    add_slices(Operands in, const float* sums, int slices, float* time_sums) {
  constexpr int kSumRows = sum_rows(kRowWarps);
  __shared__ float partials[kRowWarps][kSumRows][32];
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % kSumRows;
  const int rank = threadIdx.x / 32 / kSumRows;
  const int w = blockIdx.x * 32 + lane, e = blockIdx.y * kSumRows + row;
  const bool inside = e < in.E && w < in.W;
  const size_t at = static_cast<size_t>(e) * in.W + w, stride = static_cast<size_t>(in.E) * in.W;
  const int mesh = kBatch ? blockIdx.z : 0;
  const size_t here = mesh * stride + at;  // in the spectra of all meshes
  sums += mesh * stride * slices;
  start_next_kernel();
  wait_for_previous_kernel();
  float sum = 0;
  if (inside) {
    const int end = slices * (rank + 1) / kRowWarps;
#pragma unroll 8
    for (int slice = slices * rank / kRowWarps; slice < end; ++slice) {
      sum += sums[slice * stride + at];
    }
  }
  partials[rank][row][lane] = sum;
  __syncthreads();
  float time_sum = 0;
  if (rank == 0 && inside) {
    float s = 0;
    for (int i = 0; i < kRowWarps; ++i) s += partials[i][row][lane];
    const float evalue = __bfloat162float(in.evalues[mesh * in.E + e]);
    if constexpr (kPass == Pass::backward) {
      s += __bfloat162float(in.d_spectral[here]);
      time_sum = evalue * s * __bfloat162float(in.spectral[here]);
    }
    in.spectrum[here] = __float2bfloat16_rn(damping(evalue, __bfloat162float(in.times[w])) * s);
  }
  if constexpr (kPass == Pass::backward) {
    if (rank == 0) partials[0][row][lane] = time_sum;  // where this thread alone has read
    __syncthreads();
    if (rank > 0 || row > 0 || w >= in.W) return;
    for (int i = 1; i < kSumRows; ++i) time_sum += partials[0][i][lane];
    time_sums[(static_cast<size_t>(mesh) * gridDim.y + blockIdx.y) * in.W + w] = time_sum;
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

// result (V, W) = basis spectrum, and backward mass[:, None] * that, of mesh blockIdx.z. Lesson 6's
// resident weights again: the spectrum is small, so every block keeps kW columns of it in shared
// memory for good, and the basis streams by, tile blockIdx.x, blockIdx.x + gridDim.x, ... of its
// rows. Each warp's results go through a staging area of its own, so that they leave as 16 bytes a
// lane. Backward, the first mesh's blocks with the first tile also add up the time_rows rows of
// partial dTimes for their columns.
template <Pass kPass, typename Tile, bool kBatch>
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
  const int mesh = kBatch ? blockIdx.z : 0;
  const int64_t vertex0 = mesh * in.V;
  in.basis += vertex0 * in.E;
  in.mass += vertex0;
  in.result += vertex0 * in.W;
  in.spectrum += static_cast<size_t>(mesh) * in.E * in.W;
  const auto stage_of = [&](int step) { return stages + step % kStages * boxes * Tile::kBox; };
  const auto copy_step = [&](int step) {
    const int64_t tile = blockIdx.x + static_cast<int64_t>(step) * gridDim.x;
    for (int box = 0; tile < tiles && box < boxes; ++box) {
      copy_swizzled<kV, 64, Tile::kThreads>(stage_of(step) + box * Tile::kBox, in.basis, tile * kV,
                                            64 * box, in.V, in.E);
    }
  };
  start_next_kernel();
  wait_for_previous_kernel();

  for (int e = 0; e < rows; e += 16) {
    copy_swizzled<16, kW, Tile::kThreads>(spectrum + e * kW, in.spectrum, e, w0, in.E, in.W);
  }
  auto ahead = copies_ahead<kStages>(copy_step);
  if (kPass == Pass::backward && blockIdx.x == 0 && mesh == 0) {
    for (int w = w0 + threadIdx.x; w < min(w0 + kW, in.W); w += Tile::kThreads) {
      float sum = 0;
      for (int row = 0; row < time_rows; ++row) {
        sum += time_sums[static_cast<size_t>(row) * in.W + w];
      }
      in.d_times[w] = __float2bfloat16_rn(-sum);
    }
  }

  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int step = ahead.next();
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
//                   shared memory, and of those before them the L2 cache, which has been told what
//                   will be read again and what not, has some. With up to kStages tiles a block,
//                   the basis is read once.
//
// Backward is the same with dOut for x: the masses wait for the end, and the spare warps add
// dSpectral to the sum and, when all have added, compute dTimes from it while the others go on.
//
// The blocks of a cluster share rows. Each has kColumns columns of x, so there are as many as W
// asks for, up to 8; and all have the whole basis, of up to kEigen columns, which they fetch
// together, each its part, by multicast. What E and W do not fill is zero.
//
// In a batch each mesh has clusters, a sum and a meeting of its own, and leaves its own dTimes for
// another kernel to add. With more meshes than clusters find room, each has one: it waits for
// no other, so that they need not all be there at the same time.
//
// What truly differs from lesson 3's pipeline is that the sums of all blocks meet before there is a
// result, and that the second product goes back through the stages of the first, the last kStages
// of which are still full. The steps are in operators/diffusion/one_launch.cuh, a function each, in
// this order.
template <Pass kPass, class Tile>
__global__ void __launch_bounds__(kOneLaunchThreads, 1)
    diffusion_one_launch(const __grid_constant__ DiffusionMaps maps, const Operands operands,
                         unsigned* arrivals, float4* totals, float* mesh_d_times) {
#if HOPPER_CODE
  using Work = BlockWork<Tile>;
  extern __shared__ __align__(1024) char bytes[];
  const Work work(bytes, maps, operands, mesh_d_times);
  const int warp = warp_of_block();
  if (warp == 0 && elect_one()) prepare_barriers(work);
  start_next_kernel();
  wait_for_previous_kernel();
  const Meeting<Work> meeting(work, arrivals, totals);
  if (warp == 0 && elect_one()) put_first_x(work);
  cluster_meet();

  if (warp < 4) {
    registers_shrink_to<56>();
    if (warp == 0) {
      if (!elect_one()) return;
      Writer writer(work.shared.pipeline);
      load_forth(work, writer);
      load_back(work, writer.back(), Tile::kStages);
    } else {  // the spare warps
      zero_totals(work, meeting.next_totals);
      if constexpr (kPass == Pass::backward) {
        add_d_spectral(work, meeting.totals);
        barrier_arrive(&work.shared.spare);
        store_d_times(work, Totals{meeting.totals});
      }
    }
  } else {
    registers_grow_to<224>();
    Reader reader(work.shared.pipeline, work.cluster);
    SpectrumShare<Work> share;
    damping_factors(work, share);  // while the first tiles are on their way
    project<kPass>(work, share, reader);
    add_to_totals(share, meeting.totals);
    meet<kPass>(work, meeting);
    damp_spectrum<kPass>(work, share, Totals{meeting.totals});
    expand<kPass>(work, reader.back());
  }
#endif
}

// dTimes (W), the sum of the meshes' own (meshes, W). A thread owns a column.
__global__ void add_mesh_d_times(const float* of_meshes, int meshes, bf16* d_times, int W) {
  const int w = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  start_next_kernel();
  wait_for_previous_kernel();
  if (w >= W) return;
  float sum = 0;
  for (int mesh = 0; mesh < meshes; ++mesh) sum += of_meshes[static_cast<size_t>(mesh) * W + w];
  d_times[w] = __float2bfloat16_rn(sum);
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

// Slices of split-K: with all meshes' blocks for all multiprocessors, but none without a step.
template <typename Tile>
int64_t slices_for(const Shape& shape, int multiprocessors) {
  const int64_t fill =
      Tile::kBlocks * multiprocessors / (project_tiles<Tile>(shape) * shape.meshes);
  return std::clamp<int64_t>(fill, 1, blocks_for(shape.V, Tile::kV));
}

template <Pass kPass, typename Project, typename Expand, bool kBatch>
void add_slices_of(DiffusionProblem& table, const char* name, int64_t slices, int multiprocessors) {
  const auto [V, E, W, meshes] = table.shape;
  const auto sums = table.problem.output<float>(slices * table.shape.spectrum_values());
  const dim3 tiles(static_cast<unsigned>(project_tiles<Project>(table.shape)),
                   static_cast<unsigned>(slices), static_cast<unsigned>(meshes));
  // No more threads than a GPU has room for.
  const int64_t most_warps = 2048 * multiprocessors / (32 * blocks_for(W, 32) * E * meshes);
  const int row_warps = most_warps >= 8 ? 8 : most_warps >= 2 ? 2 : 1;
  const dim3 sum_blocks(blocks_for(W, 32), blocks_for(E, sum_rows(row_warps)), tiles.z);
  const int64_t time_rows = sum_blocks.y * meshes;  // backward: of partial dTimes
  const auto time_sums = table.problem.output<float>(kPass == Pass::backward ? time_rows * W : 1);
  const auto add = row_warps == 8   ? add_slices<kPass, kBatch, 8>
                   : row_warps == 2 ? add_slices<kPass, kBatch, 2>
                                    : add_slices<kPass, kBatch, 1>;
  const auto first = project_slices<kPass, Project, kBatch>;
  const auto last = expand_spectrum<kPass, Expand, kBatch>;
  const int bytes = static_cast<int>(Expand::shared_bytes(E));
  allow_shared_bytes(first, Project::kSharedBytes);
  allow_shared_bytes(last, bytes);
  // As many blocks as fit on the GPU at once, or as there are tiles.
  int per_sm = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, last, Expand::kThreads, bytes));
  const unsigned columns = blocks_for(W, Expand::kW);
  const auto fit = static_cast<unsigned>(per_sm * multiprocessors) / (columns * tiles.z);
  const dim3 rows(std::min(blocks_for(V, Expand::kV), std::max(1u, fit)), columns, tiles.z);
  const auto launch = [=, slices = static_cast<int>(slices), &table] {
    const Operands in = table.operands();
    launch_early(project_slices<kPass, Project, kBatch>, tiles, Project::kThreads,
                 Project::kSharedBytes, in, sums.data());
    launch_early(add, sum_blocks, 32 * sum_rows(row_warps) * row_warps, 0, in, sums.data(), slices,
                 time_sums.data());
    launch_early(expand_spectrum<kPass, Expand, kBatch>, rows, Expand::kThreads, bytes, in,
                 time_sums.data(), static_cast<int>(time_rows));
  };
  const double temporary = kPass == Pass::forward ? 0 : table.spectrum.bytes() + time_sums.bytes();
  const int64_t steps = blocks_for(V, Project::kV);
  table.problem.kernel(name, Role::ours, launch)
      .needs(80)
      .occupies(table.ends() + temporary + sums.bytes())
      .needs_shared(Project::kSharedBytes)
      // mass * basis, spectral; backward s stays in fp32.
      .checks = table.checks((steps + slices - 1) / slices * Project::kV, 0,
                             kPass == Pass::forward ? 2 : 1, 1);
}

template <typename Project, typename Expand, bool kBatch>
void add_portable_kernels(DiffusionProblem& forward, DiffusionProblem& backward,
                          int multiprocessors) {
  const int64_t slices = slices_for<Project>(forward.shape, multiprocessors);
  add_unfused(forward);
  add_slices_of<Pass::forward, Project, Expand, kBatch>(forward, "half fused", 1, multiprocessors);
  add_slices_of<Pass::forward, Project, Expand, kBatch>(forward, "split-K", slices,
                                                        multiprocessors);
  add_unfused(backward);
  add_slices_of<Pass::backward, Project, Expand, kBatch>(backward, "split-K", slices,
                                                         multiprocessors);
}

// For how many columns of tiles a block of the one launch works: of one mesh, or of several, one
// after another.
template <Pass kPass, class Tile>
int64_t columns_of_tiles(const Shape& shape) {
  constexpr int kColumns = Tile::kColumns, kBytes = sizeof(OneLaunchShared<Tile>);
  const auto kernel = diffusion_one_launch<kPass, Tile>;
  allow_shared_bytes(kernel, kBytes);
  const unsigned blocks = blocks_for(shape.W, kColumns);
  const int64_t fit = std::max(1, clusters_that_fit(kernel, blocks, kOneLaunchThreads, kBytes));
  const int64_t of_a_mesh = std::max<int64_t>(1, fit / shape.meshes);
  return kColumns * blocks_for(shape.meshes, fit) * blocks_for(shape.V, 64 * of_a_mesh);
}

template <Pass kPass, class Tile>
void add_one_launch(DiffusionProblem& table) {
  constexpr bool kBatch = Tile::kBatch;
  constexpr int kBytes = sizeof(OneLaunchShared<Tile>), kThreads = kOneLaunchThreads;
  const auto [V, E, W, meshes] = table.shape;
  const auto kernel = diffusion_one_launch<kPass, Tile>;
  allow_shared_bytes(kernel, kBytes);
  // As many clusters as fit on the device at once, or as there are tiles: none may wait for one
  // that cannot start. In a batch each mesh has its share of them, at least one. (Counted for a GPU
  // that this launch has to itself: other kernels end sometime, but two of these at the same time,
  // in two streams, might wait for each other for good. In one stream they cannot, although started
  // early: the next one's blocks start when all of this one's run.)
  const unsigned blocks = blocks_for(W, Tile::kColumns);
  const int64_t tiles = blocks_for(V, 64);
  const int clusters_at_once = clusters_that_fit(kernel, blocks, kThreads, kBytes);
  if (clusters_at_once == 0) return;
  const int64_t fit = clusters_at_once / meshes;
  const unsigned clusters = persistent(tiles, std::max<int64_t>(1, fit));
  const auto arrivals = table.problem.workspace<unsigned>(blocks * meshes);
  const auto totals = table.problem.workspace<float>(2 * 4 * Tile::kQuads * blocks * meshes);
  constexpr bool kMeshTimes = kBatch && kPass == Pass::backward;
  const auto mesh_d_times = table.problem.output<float>(kMeshTimes ? meshes * W : 1);
  const dim3 grid(blocks, clusters, static_cast<unsigned>(meshes));
  const auto launch = [=, W = static_cast<int>(W), &table] {
    const Operands in = table.operands();
    const DiffusionMaps maps = kBatch ? DiffusionMaps(in, grid.z) : DiffusionMaps(in);
    launch_clusters(diffusion_one_launch<kPass, Tile>, blocks, true, grid, kThreads, kBytes, maps,
                    in, arrivals.data(), reinterpret_cast<float4*>(totals.data()),
                    mesh_d_times.data());
    if constexpr (kMeshTimes) {
      launch_early(add_mesh_d_times, blocks_for(W, 64), 64, 0, mesh_d_times.data(),
                   static_cast<int>(grid.z), in.d_times, W);
    }
  };
  table.problem.kernel("one launch", Role::ours, launch)
      .hopper_only()
      .occupies(table.ends() + arrivals.bytes() + totals.bytes() +
                (kMeshTimes ? mesh_d_times.bytes() : 0))
      .needs_shared(kBytes)
      .checks =
      table.checks((tiles + clusters - 1) / clusters * 64, 0, kPass == Pass::forward ? 2 : 1, 1);
}

// The one launch, for the shapes that it is made for. Few rows: narrow blocks, so that 64 rows keep
// more multiprocessors busy, and a thread has half as much to add to the totals; but not where wide
// ones have no more to do, since of large clusters, or for many meshes, fewer find room. (Backward,
// with a cluster for each mesh, they are slower then.) Many rows: wide blocks, which read the basis
// less often. In a batch it depends on a cluster's rows, likewise, as if 32 of them fitted on the
// GPU; that is not tuned.
template <Pass kPass, bool kBatch>
void add_one_launch(DiffusionProblem& table) {
  const auto [V, E, W, meshes] = table.shape;
  if (E > kMostEigen || W > kMostWidth) return;
  using Deep = OneLaunchTile<256, 64, 5, kBatch>;
  using Narrow = OneLaunchTile<128, 64, 9, kBatch>;
  using Wide = OneLaunchTile<128, 128, 7, kBatch>;
  bool narrow = W <= 64 || V * std::min<int64_t>(meshes, 32) <= 32768;
  if (E <= 128 && W > 64 && narrow && (kBatch || W > 256)) {
    narrow = columns_of_tiles<kPass, Narrow>(table.shape) <
             columns_of_tiles<kPass, Wide>(table.shape) + (kPass == Pass::backward && meshes > 32);
  }
  const auto add = E > 128  ? add_one_launch<kPass, Deep>
                   : narrow ? add_one_launch<kPass, Narrow>
                            : add_one_launch<kPass, Wide>;
  add(table);
}

template <bool kBatch>
void add_kernels(DiffusionProblem& forward, DiffusionProblem& backward, const Device& device) {
  const Shape& shape = forward.shape;
  const bool wide = WideTile::shared_bytes(shape.E) <= device.shared_bytes;
  const auto add = shape.vertices() > 131072
                       ? wide ? add_portable_kernels<LargeTile, WideTile, kBatch>
                              : add_portable_kernels<LargeTile, NarrowTile, kBatch>
                   : wide ? add_portable_kernels<SmallTile, WideTile, kBatch>
                          : add_portable_kernels<SmallTile, NarrowTile, kBatch>;
  add(forward, backward, device.sms);
  add_one_launch<Pass::forward, kBatch>(forward);
  add_one_launch<Pass::backward, kBatch>(backward);
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "7_diffusion_fused",
                 .title = "spatial diffusion on a mesh, forward and backward",
                 .n_meaning = "V, vertices of the mesh",
                 .n_gpu = 131072,
                 .n_cpu = 4096,
                 .options = {{"--eigen", "E, eigenvectors", 128, 8},
                             {.name = "--width",
                              .meaning = "W, features of a vertex",
                              .value = 256,
                              .multiple_of = 8,
                              .cpu = 32},
                             {"--batch", "meshes in the same launches", 1}},
                 .sweep = {.gpu = {256, 4194304}, .cpu = {256, 1024}}});
  const int64_t E = lesson.option("--eigen"), W = lesson.option("--width");
  const int64_t meshes = lesson.option("--batch");
  const int64_t shared_bytes = lesson.device().shared_bytes;
  if (NarrowTile::shared_bytes(E) > shared_bytes) {
    fail(kDeviceCannot,
         "--eigen %lld: 64 columns of the spectrum and two tiles of the basis need %lld bytes of "
         "shared memory, a block may have %lld",
         static_cast<long long>(E), static_cast<long long>(NarrowTile::shared_bytes(E)),
         static_cast<long long>(shared_bytes));
  }
  const std::vector<int64_t> sizes = lesson.sizes();
  const int64_t most = std::min<int64_t>(65535, 0x7fffffff / sizes.back());
  if (meshes > most) {
    fail(kBadUsage, "--batch: %lld meshes at most, with %lld vertices each",
         static_cast<long long>(most), static_cast<long long>(sizes.back()));
  }

  Cublas blas;
  std::deque<DiffusionProblem> tables;
  double worst = 0;
  for (const int64_t V : sizes) {
    const Shape shape{V, E, W, meshes};
    DiffusionProblem& forward = tables.emplace_back(lesson, blas, Pass::forward, shape);
    DiffusionProblem& backward = tables.emplace_back(lesson, blas, Pass::backward, shape);
    const auto add = meshes > 1 ? add_kernels<true> : add_kernels<false>;
    add(forward, backward, lesson.device());
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
  Problem &forward = tables.front().problem, &backward = tables.back().problem;
  forward.compare("split-K", "half fused",
                  "Forward: slices of V for every multiprocessor: % times faster.");
  forward.compare("split-K", "unfused", "Forward: three launches instead of five: % times faster.");
  forward.compare("one launch", "unfused", "Forward: one launch instead of five: % times faster.");
  backward.compare("one launch", "unfused",
                   meshes > 1 ? "Backward: two launches instead of seven: % times faster."
                              : "Backward: one launch instead of seven: % times faster.");
  return lesson.run();
}
