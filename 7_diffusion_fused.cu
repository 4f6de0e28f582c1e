// 7. Spatial diffusion on a mesh, forward and backward
//
//     spectral = exp(-evalues[:, None] * times[None, :]) * (basis^T (mass[:, None] * x))    (E, W)
//     out      = basis spectral                                                             (V, W)
//     x (V, W), basis (V, E), mass (V), evalues (E), times (W): bf16, row-major; fp32 accumulation
//
// This begins a block of DiffusionNet (Sharp, Attaiki, Crane, Ovsjanikov, arXiv 2012.00888). As
// in NumPy `*` is elementwise, `[:, None]` makes a column, and `.sum(0)` adds up the rows. W
// features on the V vertices of a surface spread as heat does, feature w for the time times[w]. The
// columns of `basis` are the first E eigenvectors of the surface's Laplacian, and `evalues` has
// their eigenvalues. If a feature is a sum of these vectors, heat makes each coefficient smaller,
// by the factor e^(-evalue time), and does nothing else. So there are three things to do: project x
// onto the basis, which gives the coefficients, the spectrum; damp these; and expand, which forms
// the sums again. `mass` is the area around each vertex.
//
// Backward, given the gradients with respect to the two results, dOut (V, W) and dSpectral (E, W):
//
//     s      = dSpectral + basis^T dOut                                                     (E, W)
//     dTimes = -(evalues[:, None] * s * spectral).sum(0)                                    (W)
//     dX     = mass[:, None] * (basis (exp(-evalues[:, None] * times[None, :]) * s))        (V, W)
//
// This has the same shape: a product with basis^T, something elementwise, a product with basis.
//
// --batch N: N meshes of V vertices each, in the same launches, as DiffusionNet takes them. All
// meshes have the same times. Everything else each mesh has for itself, so x is (N, V, W), for
// example. dTimes is a sum over the meshes, too.
//
// What moves is x, out and the basis, and 4 V E W operations are computed. With E = 128 and W = 256
// that is 100 operations per byte, a third of what would keep an H100's tensor cores busy: memory
// is the limit, and temporaries would cost what they cost in lesson 5. But the fusion of lesson 6
// is not possible. There a row of the result needs one row of x. Here it needs all of them: every
// element of spectral is a sum over all vertices, and until the last term is added no row of out
// can be computed. Between the two products stands a sum over all rows. What can still be fused?
//
//     unfused      Five library and elementwise kernels, as a framework launches them
//                  (problems/diffusion/diffusion.cu).
//     half fused   The first product multiplies by mass, and one small kernel between the two
//                  products damps. But the first product's result is only 128 x 256, a few tiles.
//                  So a few blocks walk over all vertices, on a GPU made for hundreds of blocks.
//     split-K      The sum over the vertices is cut into slices, so that there are blocks for the
//                  whole GPU. The small kernel adds the slices up first.
//     one launch   The slices, their sum, and the second product, all in one kernel: forward, of
//                  one mesh, for E up to 128.
//     clusters     One launch with clusters that share the basis, for both passes.
//
// The limit that a table prints counts each input and each output once, the basis too. But both
// products need the basis, so between the two it would have to stay on chip. With E = 128 a vertex
// has 256 bytes of it, and 132 multiprocessors with 227 KB of shared memory each have room for
// about 10^5 vertices. *half fused* and *split-K* keep nothing, and read the basis twice. With W =
// 256 they read or write 1.2 times the least bytes. (Of that the L2 cache may still have a part:
// for 131072 vertices a profiler saw 1.1 times the least.) *one launch* needs room for x as well.
// And with W = 256 two blocks keep the same rows of the basis. So it keeps the basis of about 21000
// vertices (the lesson's page counts them), and of a larger mesh it reads the rest twice.
//
// The first three need compute capability 8.0 (bf16 on tensor cores), the last two need 9.0. The
// CPU backend runs all.

#include <deque>
#include <vector>

#include "common/lesson.h"
#include "common/numerics.h"
#include "primitives/async_copy.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/fragments.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/launch.h"
#include "primitives/mma.cuh"
#include "primitives/spin.cuh"
#include "problems/diffusion/diffusion.h"

using namespace problems;
using namespace operators::diffusion;
using namespace primitives;

using bf16 = __nv_bfloat16;

// E and W are multiples of 8: every row starts at a multiple of 16 bytes.
using Shape = DiffusionShape;
using Operands = DiffusionOperands;

// ---- half fused, split-K ------------------------------------------------------------------------

// There are three kernels, for both passes:
//
//     project_slices    x to the spectrum: a product for each slice of the vertices
//     add_slices        the sum of the slices, damped
//     expand_spectrum   the spectrum to out: a product
//
// The unfused kernels write things to memory that stay in registers here: the exponentials, and x
// times mass, which is as large as x. (Backward it is also s.) Here only the slices (fp32) and the
// spectrum are in memory. Each kernel is launched early (primitives/early_launch.cuh): its blocks
// take their places while the kernel before it ends. (Before compute capability 9.0 they start as
// usual, when it has ended.)
//
// At the first reading take kPass as forward, and kBatch as false, which is one mesh. Then `mesh`
// and `shift` are 0, and to add them changes nothing. Skip each `if constexpr (kPass ==
// Pass::backward)`, and whatever is named time_sum, time_sums or time_rows: these are for dTimes.
//
// The left factor of the first product is basis^T, and the basis comes to shared memory as it lies,
// with a row for each vertex: so this factor lies transposed there.
//
// The words, from primitives/:
//   - copy_swizzled starts the copies of a tile to shared memory. copies_ahead starts those of the
//     steps to come, and its next() waits until those of this step are there (lesson 3's *stages*).
//   - load_left and load_right load fragments by ldmatrix, as lesson 3's *swizzled tiles* does.
//     load_left_transposed takes a factor that lies transposed in shared memory.
//   - Sums are a warp's results, in registers. add_product is the loop of mma.sync over them.
//     for_pairs calls a function for each two neighbours of them.
//   - multiply2 multiplies two bf16 at once.
//   - damping(evalue, time) is exp(-evalue time) (operators/diffusion/diffusion.h).
//   - start_next_kernel() lets the blocks of the next kernel take free places. There they stop, in
//     their own wait_for_previous_kernel(), until all of this kernel is done. Before compute
//     capability 9.0 both do nothing.

// A block owns kE x kW elements of the spectrum, and each of its warps kWarpE x kWarpW of these, in
// registers. A step adds what kV vertices contribute. Of their rows it needs kE columns of the
// basis, kW columns of the values, and the masses: this is a stage. kStages of them are in shared
// memory. While one is multiplied, the others are on their way. (kSide is 64 or 128: SmallTile
// and LargeTile, at the end of the file.)
template <int kSide, int kWarpsAlongE, int kWarpsAlongW, int kBlocksFit>
struct ProjectTile {
  static constexpr int kE = kSide, kW = kSide, kV = 64, kStages = 3, kWarpsW = kWarpsAlongW;
  static constexpr int kWarpE = kE / kWarpsAlongE, kWarpW = kW / kWarpsW;
  static constexpr int kThreads = 32 * kWarpsAlongE * kWarpsW;
  static constexpr int kBlocks = kBlocksFit;     // for which a multiprocessor of Hopper has room
  static constexpr int kStage = kV * (kE + kW);  // elements of one stage
  static constexpr int kMasses = kV + 8;         // of a stage, see below
  static constexpr int kSharedBytes = kStages * (kStage + kMasses) * sizeof(bf16);
};

// Returns at[0] and at[1] in one register. With kAnywhere `at` need not be aligned to 4 bytes.
template <bool kAnywhere>
__device__ unsigned neighbours(const bf16* at) {
  if constexpr (!kAnywhere) return *reinterpret_cast<const unsigned*>(at);
  const __nv_bfloat162 pair = {at[0], at[1]};
  return *reinterpret_cast<const unsigned*>(&pair);
}

// The first product. The vertices are divided into gridDim.y slices. Block (tile, slice, mesh)
// computes one tile of basis^T (mass[:, None] * values) for the vertices of one slice, where
// `values` is x. (Backward it is basis^T values, where `values` is dOut.) It writes the tile to its
// place in `sums`, which has a spectrum for each slice of each of N meshes: (N, gridDim.y, E, W),
// fp32.
//
// *half fused* has one slice. So a spectrum of 128 x 256 is eight blocks, on eight multiprocessors.
// README's table has 0.8 ms, nearly all of it for the 2048 steps of such a block, so a step takes
// 0.4 microseconds. It brings 64 vertices x (64 + 64) columns x 2 bytes, 16 KB: 40 GB/s for each
// multiprocessor, and 0.3 TB/s for all eight, a tenth of what the memory can serve. So memory is
// not what bounds it. A multiprocessor that has one block has only that block's few warps, and
// while these wait nobody works. (What they wait for was not measured. A load from memory takes
// about as long as a step, and two stages are under way, so loads alone do not explain it.)
//
// *split-K* has as many slices as it takes to fill the GPU. The blocks of one slice run at the same
// time, and share what they read through the L2 cache. Two of them ask for the same part of x, and
// four for the same part of the basis, but each part comes from memory once.
//
// basis^T is the left factor. A tile of the basis is row-major in shared memory, and ldmatrix
// transposes it on the way to the registers, so there is no transposed copy of it.
//
// In the registers this left factor is multiplied by mass, although the formula has mass beside x.
// That is the same: basis^T (mass * x) is (mass * basis)^T x, since in both the term of vertex v is
// multiplied by mass[v]. Which mass does a register need? In basis^T a row is an eigenvector, and a
// column is a vertex. The left factor of one mma.sync is 16 x 16, and each of a lane's four
// registers holds two neighbours of a row, so two vertices. With v = 2 * (lane % 4) they are:
//
//     a[0]   eigenvector lane / 4        vertices v and v + 1
//     a[1]   eigenvector lane / 4 + 8    vertices v and v + 1
//     a[2]   eigenvector lane / 4        vertices v + 8 and v + 9
//     a[3]   eigenvector lane / 4 + 8    vertices v + 8 and v + 9
//
// So a[0] and a[1] take one pair of masses, `low` below, and a[2] and a[3] another one, `high`
// (docs/pictures/mass.svg). One instruction multiplies a register by its pair. It rounds to bf16
// once, as a kernel that computes mass * x does.
template <Pass kPass, typename Tile, bool kBatch>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    project_slices(Operands in, float* sums) {
  constexpr int kV = Tile::kV, kStages = Tile::kStages;
  constexpr int kRows = Tile::kWarpE / 16, kCols = Tile::kWarpW / 16;  // matrices of 16 x 16
  extern __shared__ __align__(128) bf16 shared[];
  bf16* masses = shared + kStages * Tile::kStage;  // (kStages, kMasses)
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_e = warp / Tile::kWarpsW * Tile::kWarpE;
  const int warp_w = warp % Tile::kWarpsW * Tile::kWarpW;
  const int tiles_e = (in.E + Tile::kE - 1) / Tile::kE;
  const int e0 = blockIdx.x % tiles_e * Tile::kE, w0 = blockIdx.x / tiles_e * Tile::kW;
  // This block's slice: `steps` steps of kV vertices, from step number `first` on.
  const int64_t all_steps = (in.V + kV - 1) / kV;
  const int64_t first = all_steps * blockIdx.y / gridDim.y;
  const int steps = static_cast<int>(all_steps * (blockIdx.y + 1) / gridDim.y - first);
  const int mesh = kBatch ? blockIdx.z : 0;
  const int64_t vertex0 = mesh * in.V;
  in.values += vertex0 * in.W;
  in.basis += vertex0 * in.E;
  in.mass += vertex0;
  // (Skip this at first.) In a batch the masses of a mesh may begin at any address, but copies
  // begin at multiples of 16 bytes. So up to 7 masses that stand before those of a step are copied,
  // too: `shift` of them. `end` says how many masses follow from this mesh's first one on, in all
  // meshes. What is copied behind the mesh's last mass is multiplied by a basis of zeros.
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
          copy_async<16>(to, in.mass + v, true);  // 8 masses
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

// Adds the slices up, damps their total, and writes that to in.spectrum. Forward it is the result
// named spectral. (Backward the total, with dSpectral added, is s. From it a block also computes
// its share of dTimes, for which it needs in.spectral, the spectral that forward has saved. What it
// writes to in.spectrum is read by the next kernel, and nobody keeps it.)
//
// Here a split-K kernel is easily written wrong. Three things must hold where partial sums are
// added:
//
//   - All of them must be there. If all slices are stored in one place, the last one stored is what
//     remains. If each block reads the sum, adds its slice and writes the sum back, what others add
//     in between is lost. Here each slice has a place of its own, and this kernel waits until all
//     of them are written.
//   - The epilogue must be applied once. Damping is linear, so it may be applied to each slice
//     before the slices are added, or to their total. If it were applied to the sum so far each
//     time that a slice is added, the first slice would be damped many times. Backward adds
//     dSpectral: once, and not for each slice. And a function that is not linear, such as lesson
//     6's sigmoid, may only be applied to the total.
//   - Memory to which slices are added has to hold zero at first. Here nothing is added to memory.
//
// The order of these additions is always the same, so the result is, too. (*one launch*, below,
// adds atomically, in the order in which its blocks come. There two runs may differ in the last
// bits.)
//
// A block owns some rows and 32 columns of a mesh's spectrum. kRowWarps warps work for a row: each
// adds up its share of the slices, and the partial sums meet in shared memory. The warps of a row
// are numbered from 0 on, by `rank`: the one of rank 0 adds these sums and does the rest.
//
// With few rows, such as one mesh with E = 128 and W = 256, a block has 4 rows, with eight warps
// each. With more rows, as in a batch or with a larger E, two warps for a row, or one, keep the
// memory busy, and a block has 16 rows. (Backward a block adds up what its rows contribute to
// dTimes. The next kernel adds that of all blocks with the same columns.)
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
    if (rank == 0) partials[0][row][lane] = time_sum;  // no other thread has read this place
    __syncthreads();
    if (rank > 0 || row > 0 || w >= in.W) return;
    for (int i = 1; i < kSumRows; ++i) time_sum += partials[0][i][lane];
    time_sums[(static_cast<size_t>(mesh) * gridDim.y + blockIdx.y) * in.W + w] = time_sum;
  }
}

// What a block of the second product has in shared memory: kW columns of the spectrum, with all its
// E rows; kStages tiles of the basis, kV rows each, in boxes of 64 columns; and the warps' staging
// areas. A warp computes kWarpV x kWarpW elements of the result.
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

// The second product, of mesh blockIdx.z: result (V, W) = basis spectrum. (Backward it is mass[:,
// None] * that.) It is lesson 6's *resident weights* again, with the spectrum in the place of the
// weights. The spectrum is small, so each block keeps kW columns of it in shared memory until the
// end. The basis streams by, in tiles of kV rows. The block takes tiles number blockIdx.x,
// blockIdx.x + gridDim.x, and so on, one in each step. Each warp has a staging area of its own,
// through which its results go, so that each lane stores 16 bytes at a time. (Backward the blocks
// that have the first tile of the first mesh also add up dTimes for their columns, of time_rows
// shares.)
template <Pass kPass, typename Tile, bool kBatch>
__global__ void __launch_bounds__(Tile::kThreads)
    expand_spectrum(Operands in, const float* time_sums, int time_rows) {
  constexpr int kV = Tile::kV, kW = Tile::kW, kStages = Tile::kStages;
  constexpr int kWarpV = Tile::kWarpV, kWarpW = Tile::kWarpW;
  extern __shared__ __align__(128) bf16 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_v = warp / Tile::kWarpsW * kWarpV, warp_w = warp % Tile::kWarpsW * kWarpW;
  // rows: E, rounded up to what one product takes.
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

  // No barrier follows: these copies are in one group with those of the first tile, for which
  // ahead.next() waits.
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
        // Two neighbours in row lane / 4 + 8 i: see pair_of() in primitives/fragments.cuh.
        const float* pair = &sum[i / 2][j][i % 2 * 2];
        const float factor = kPass == Pass::backward ? __bfloat162float(mass[i]) : 1;
        *reinterpret_cast<unsigned*>(at + 8 * i * kWarpW) =
            pack2<bf16>(factor * pair[0], factor * pair[1]);
      }
    }
    __syncwarp();
    // kLanes lanes store a row, 8 elements each; so a warp stores kStep rows at a time. From this
    // lane's first row on `there` rows of the matrix are left, or none if its columns are outside.
    // (The next tile's results may overwrite the staging: ahead.next() is a barrier.)
    constexpr int kLanes = kWarpW / 8, kStep = 32 / kLanes;
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

// The whole operator in one kernel. At first sight that cannot be: every row of out needs the whole
// spectrum, and the spectrum needs every row of x. Two things make it possible, and worth it. All
// blocks are on the GPU at the same time, so they may wait for each other. And while they wait,
// each keeps the last tiles of its rows of the basis.
//
//   First product   A block adds up what its rows contribute to basis^T (mass x), in registers.
//                   The basis is the left factor, transposed: ldmatrix brings its fragments into
//                   registers, where they are multiplied by the masses.
//   Meeting         The block adds its share to a sum of all blocks, and waits until all have
//                   added. The sum is in memory. For 128 columns of x it is 64 KB, so the L2 cache
//                   has it.
//   Damping         The sum of all blocks is loaded into registers, multiplied by the exponentials,
//                   and put into shared memory: it is the right factor of the second product.
//   Second product  The block goes back over the same rows, in reverse. The last kStages tiles of
//                   the basis are still in shared memory, and of those before them the L2 cache has
//                   some. If a block has no more than kStages tiles, the basis is read once.
//
// At the first reading follow the consumers (the `else`), whose four parts have these names. Read
// the producer afterwards: it brings what the consumers wait for, in the same order. The words are
// those that lesson 3 has at its kernels for Hopper, and these:
//
//     reader.wait()                        waits until the reader's stage is full, and returns it
//     reader.give_back()                   says that this stage is empty
//     reader.next()                        goes on to the next stage. (Lesson 3's take() does all
//                                          of this. Here the last stages are not given back)
//     back                                 a Writer or Reader that goes through the stages from the
//                                          last one to the first: those that were kept are full
//     LeftFragments                        a left factor that wgmma takes from registers, here 64
//                                          columns of a tile of the basis. The code calls its four
//                                          (kSlices) pieces of 16 vertices slices, too: one wgmma
//                                          takes one of them. They are not the slices of split-K
//     sum.store                            puts 64 columns of a sum, rounded, into a box

// A tile has 64 rows. A block has 128 rows and 128 columns of the spectrum: so E is at most 128,
// and a block has 128 columns of x. What E and W do not fill is zero.
constexpr int kVertices = 64, kEigen = 128, kColumns = 128;

// A stage is what the first product needs of 64 vertices. The second product needs only their
// basis.
struct VertexTile {
  LeftTile<bf16, kVertices> basis[kEigen / 64];  // 64 eigenvectors each
  RightTile<bf16, kColumns> x;
  alignas(128) bf16 mass[kVertices];
  static constexpr int kLoaded = sizeof basis + sizeof x + sizeof mass;  // bytes
};

struct OneMeshShared {
  static constexpr int kStages = 5;
  Pipeline<VertexTile, kStages> pipeline;
  RightTile<bf16, kColumns> spectrum[kEigen / 64];  // 64 eigenvectors each
  Box<bf16, kVertices> out[2];                      // of each consumer, 64 columns
};

struct OneMeshMaps {
  CUtensorMap x, basis, mass, out, spectral;
};

// Where the blocks that have the same columns meet. It is in memory, and holds zeros before the
// first launch. There are two sums. A launch adds to one of them, and fills the other one with
// zeros, for the next launch, which adds to that one. A sum lies there as it lies in the registers
// of the 256 threads of the consumers, each of which has 16 times four numbers. `arrivals` counts
// how often a block has arrived, in all launches so far. These launches must have the same grid.
struct MeetingPlace {
  float4 sums[2][16][256];
  unsigned long long arrivals;
};

#if HOPPER_CODE
// Multiplies a left factor by the masses. Column k of it is vertex k of the tile. A register holds
// two neighbours of a row, so it is multiplied by two neighbouring masses.
__device__ inline void multiply_by(LeftFragments<bf16>& left, const bf16 (&mass)[kVertices]) {
#pragma unroll
  for (int i = 0; i < 4 * kSlices; ++i) {
    unsigned& pair = left.slices[i / 4][i % 4];
    pair = multiply2(pair, neighbours<false>(mass + left.k(i / 4, i % 4)));
  }
}
#endif

// Block (c, group) has columns 128 c to 128 c + 127 of x and out. gridDim.y blocks have these
// columns, and share the tiles, of 64 rows each: block number `group` of them has the tiles number
// group, group + gridDim.y, group + 2 gridDim.y and so on. One warpgroup of a block is the
// producer, and two are consumers. In the first product each consumer has 64 rows of the spectrum
// and all 128 columns. In the second it has 64 columns of a tile of out. `places` has a
// MeetingPlace for each 128 columns.
__global__ void __launch_bounds__(384, 1)
    diffusion_one_launch(const __grid_constant__ OneMeshMaps maps, const Operands in,
                         MeetingPlace* places) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  auto& shared = *reinterpret_cast<OneMeshShared*>(bytes);
  constexpr int kStages = OneMeshShared::kStages;
  const BlockGrid<1, 1> alone;
  const int col0 = blockIdx.x * kColumns, group = blockIdx.y, groups = gridDim.y;
  const int all_tiles = static_cast<int>((in.V + kVertices - 1) / kVertices);
  const int tiles = (all_tiles - group + groups - 1) / groups;  // of this block
  const auto row_of = [&](int t) { return (group + t * groups) * kVertices; };
  if (threadIdx.x == 0) prepare(shared.pipeline, 2);  // two consumers
  alone.meet();
  start_next_kernel();
  wait_for_previous_kernel();

  const int warp = warp_of_block();
  if (warp < 4) {
    registers_shrink_to<24>();
    if (warp == 0 && elect_one()) {
      const auto load_basis = [&](VertexTile& stage, int t, Barrier* arrived) {
        alone.load(stage.basis[0], &maps.basis, row_of(t), 0, arrived);
        alone.load(stage.basis[1], &maps.basis, row_of(t), 64, arrived);
      };
      Writer writer(shared.pipeline);
      for (int t = 0; t < tiles; ++t) {
        writer.put([&](VertexTile& stage, Barrier* arrived) {
          load_basis(stage, t, arrived);
          alone.load(stage.x, &maps.x, col0, row_of(t), arrived);
          tensor_load(stage.mass, &maps.mass, row_of(t), arrived);
        });
      }
      auto back = writer.back();  // through the stages, from the last one on
      for (int t = tiles - 1 - kStages; t >= 0; --t) {
        back.put(sizeof(VertexTile::basis),
                 [&](VertexTile& stage, Barrier* arrived) { load_basis(stage, t, arrived); });
      }
    }
  } else {
    registers_grow_to<240>();
    const int thread = static_cast<int>(threadIdx.x) - 128, consumer = thread / 128;
    MeetingPlace& place = places[blockIdx.x];
    const cuda::atomic_ref<unsigned long long, cuda::thread_scope_device> arrivals(place.arrivals);
    // The counter is never set back: each earlier launch has added `groups` to it. This launch has
    // added less than `groups` so far, since this block has not arrived yet. So the division by
    // `groups`, rounded down, is the number of earlier launches, and the same in every block. For
    // example, with groups = 10 after three launches it is 30 to 39, so 3.
    const unsigned long long launches = arrivals.load(cuda::memory_order_relaxed) / groups;
    const unsigned long long all_of_them = (launches + 1) * groups;
    auto& total = place.sums[launches % 2];
    auto& next_total = place.sums[(launches + 1) % 2];
    // A thread has 64 elements of the sum, which are 16 fours. The four with the number j lies in
    // columns 8 j to 8 j + 7. Only the first `fours` fours are inside of x. The blocks with the
    // same columns clear the other sum together: block number `group` of them clears the fours with
    // the numbers `group`, `group` + `groups`, and so on.
    const int fours = min(kColumns, in.W - col0) / 8;
    for (int j = group; j < fours; j += groups) next_total[j][thread] = float4{};

    // 1. The first product: basis^T (mass x) of this block's rows.
    Sum<kColumns> sum;
    Reader reader(shared.pipeline, alone);
    for (int t = 0; t < tiles; ++t, reader.next()) {
      const VertexTile& stage = reader.wait();
      LeftFragments<bf16> left = stage.basis[consumer].load_transposed_fragments();
      multiply_by(left, stage.mass);
      sum.start_product(left, stage.x, t > 0);
      wgmma_wait<0>();
      if (t + kStages < tiles) reader.give_back();  // the last ones stay, for the way back
    }

    // 2. The meeting. Each thread adds its part of this block's share to the sum of all blocks. (An
    // atomicAdd of four floats at once is new on Hopper.) The first named_barrier waits until all
    // 256 threads have done so. Then one thread arrives for the block: it adds 1 to the counter,
    // and *releases* what the block has added. It looks at the counter until the last block has
    // arrived. Such a look *acquires*: after it the thread may read what the blocks that are
    // counted have released. At the second named_barrier the other threads wait for that one.
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float* four = sum.elements + 4 * j;
      if (j < fours) atomicAdd(&total[j][thread], make_float4(four[0], four[1], four[2], four[3]));
    }
    named_barrier(1, 256);
    if (thread == 0) {
      arrivals.fetch_add(1, cuda::memory_order_release);
      const auto all_are_there = [&] {
        return arrivals.load(cuda::memory_order_acquire) >= all_of_them;
      };
      const Spin spin("the other blocks' shares of the spectrum");
      while (!all_are_there()) spin.again();
    }
    named_barrier(1, 256);

    // 3. Damping. One thread has acquired, and the barrier passes that on to the others of the
    // block. __ldcg reads from the L2 cache, where the atomic additions were made. Of four numbers
    // the first two are neighbours in a row, whose eigenvalue is `upper`. The other two are in the
    // same columns, 8 rows below, where the eigenvalue is `lower`. Beyond W the sum is zero, and
    // any time will do: the last two times are read.
    float4 all[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) all[j] = j < fours ? __ldcg(&total[j][thread]) : float4{};
    const int row = 64 * consumer + sum.row(0);
    const float upper = row < in.E ? __bfloat162float(in.evalues[row]) : 0;
    const float lower = row + 8 < in.E ? __bfloat162float(in.evalues[row + 8]) : 0;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const bf16* times = in.times + min(col0 + sum.col(4 * j), in.W - 2);
      const float first = __bfloat162float(times[0]), second = __bfloat162float(times[1]);
      float* four = sum.elements + 4 * j;
      four[0] = damping(upper, first) * all[j].x;
      four[1] = damping(upper, second) * all[j].y;
      four[2] = damping(lower, first) * all[j].z;
      four[3] = damping(lower, second) * all[j].w;
    }
    for (int box = 0; box < 2; ++box) {
      sum.store(shared.spectrum[consumer].boxes[box], 64 * box,
                [&](int i) { return sum.elements[i]; });
    }
    shared_fence();
    named_barrier(1, 256);
    if (group == 0 && thread == 0) {
      for (int box = 0; box < 4; ++box) {
        tensor_store(&maps.spectral, box / 2 * 64, col0 + box % 2 * 64,
                     &shared.spectrum[box / 2].boxes[box % 2]);
      }
      tensor_store_commit();
    }

    // 4. The second product: basis spectrum, from the last tile back to the first. across_k() says
    // that the rows of a box of the spectrum are k, as in lesson 3's right factor.
    Sum<64> out;
    auto& box = shared.out[consumer];
    auto back = reader.back();
    for (int t = tiles - 1; t >= 0; --t) {
      // (The flag says whether to add to a product before. Each tile is a product of its own.)
      back.take([&](const VertexTile& stage, bool /*add*/) {
        for (int e = 0; e < 2; ++e) {
          out.start_product(stage.basis[e].rows(0), shared.spectrum[e].boxes[consumer].across_k(),
                            e > 0);
        }
      });
      back.finish();
      // Always the same thread: only who has committed a store can wait for it.
      if (thread % 128 == 0) tensor_store_wait_read<0>();  // the tile before has left the box
      named_barrier(2 + consumer, 128);
      out.store(box, 0, [&](int i) { return out.elements[i]; });
      shared_fence();
      named_barrier(2 + consumer, 128);
      if (thread % 128 == 0) {
        tensor_store(&maps.out, row_of(t), col0 + 64 * consumer, &box);
        tensor_store_commit();
      }
    }
    if (thread % 128 == 0) tensor_store_wait_read<0>();
  }
#endif
}

// ---- Hopper: clusters ---------------------------------------------------------------------------

// *one launch* for both passes, with less to wait for. What is new:
//
//   Clusters   The blocks of a cluster have the same rows, and different columns of x. All of them
//              need the same rows of the basis, which they fetch together, each its part, by
//              multicast (lesson 3's *clusters*).
//   Cache      The L2 cache is told which tiles of the basis will be read again.
//   Memory     The spectrum and the results take the place of x, which is not needed any more. That
//              leaves room for seven stages.
//   Turns      In the second product a tile belongs to one consumer, and the next tile mostly to
//              the other one: one multiplies while the other one writes out.
//   Backward   dOut takes the place of x. The masses multiply the rows of the result, at the end.
//              Three spare warps beside the producer add dSpectral to the sum of all blocks. When
//              all blocks have added, they compute dTimes from it while the others go on.
//
// What the warps of a block do, in the order of time. Each line is a function. The kernel at the
// end of this section calls them in this order:
//
//     one thread            the three spare warps             two consumers
//     --------------------  --------------------------------  ----------------------------------
//     put_first_x           zero_totals: for the next launch  damping_factors
//     load_forth            backward: add_d_spectral          project: the first product
//                                                             add_to_totals
//                                                             meet: wait for all blocks
//     load_back             backward: store_d_times           damp_spectrum
//                                                             expand: the second product
//
// load_box, multicast_box and store_box are tensor_load, tensor_load_multicast and tensor_store
// (primitives/hopper/copies.cuh) with a policy. That is a hint for the L2 cache: evict_first says
// that it may drop these bytes first, evict_last that it shall drop them last, and evict_normal
// says nothing. (`false` and the 0 behind the map: there is one matrix, and no batch.)

// A block fetches the basis for its cluster in boxes of this many rows.
constexpr int kMulticastRows = 32;

// A block's threads: the producer's warpgroup and two of consumers.
constexpr int kClusterThreads = 384;

// What the copy engine moves.
struct DiffusionMaps {
  CUtensorMap x, basis, mass, out, spectral;

  explicit DiffusionMaps(const Operands& in)
      : x(tensor_map<bf16>(in.values, in.V, in.W, 64)),
        basis(tensor_map<bf16>(in.basis, in.V, in.E, kMulticastRows)),
        mass(tensor_map<bf16>(in.mass, in.V)),
        out(tensor_map<bf16>(in.result, in.V, in.W, 64)),
        spectral(tensor_map<bf16>(in.spectrum, in.E, in.W, 64)) {}
};

// A spectrum of up to 128 rows, 64 for each consumer, of which each block of a cluster has kColumns
// columns, in kBoxes boxes. A tile has 64 rows of the basis, in kSteps boxes of 64 eigenvectors.
constexpr int kClusterStages = 7, kSteps = kEigen / kStepK, kBoxes = kColumns / kBoxCols;
// The sum of all blocks lies in memory as the registers of the consumers hold it, in quads, and not
// by rows and columns. A quad is four elements of one thread, which one atomicAdd adds. In every
// block the same thread has the same elements. So all blocks add to the same quads, and nobody has
// to know which row and column a quad is. Warp w of the eight warps has rows 16 w to 16 w + 15.
// Elements 4 j to 4 j + 3 of its lane l are quad number (w kColumns / 8 + j) 32 + l. So at each j
// the 32 lanes of a warp have neighbouring quads. For example, lane 5 of warp 0 has at j = 2 the
// columns 18 and 19 of rows 1 and 9: that is quad number 69.
constexpr int kQuads = kEigen * kColumns / 4;

struct ClusterShared {
  LeftTile<bf16, 64> basis[kClusterStages][kSteps];  // 64 rows, all columns
  union {
    RightTile<bf16, kColumns> x[kClusterStages];  // first product
    struct {
      RightTile<bf16, kColumns> spectrum[kSteps];
      Box<bf16, 64> out[2][kBoxes];     // a tile of each consumer
      float2 d_times[3][kColumns / 2];  // of each spare warp's rows
    } second;
  };
  alignas(128) bf16 mass[kClusterStages][64];
  StageBarriers<kClusterStages> pipeline;  // whose stages are basis, x and mass
  Barrier spare, met;  // backward: this block's spare warps have added; all blocks have added
};

#if HOPPER_CODE
// Of a block's threads: warps 1 to 3 of the producer's warpgroup, which are the spare ones, and the
// consumers.
constexpr int kSpareThreads = 96, kConsumers = 256;

// The ids for named_barrier(). Consumer 0 has kConsumerBarrier, and consumer 1 has the id after it.
// The spare warps have one, and so have both consumers together.
constexpr int kConsumerBarrier = 1, kSpareBarrier = 3, kConsumersBarrier = 4;

// Two neighbouring elements of a row-major matrix; zeros outside of it. cols and col are even.
__device__ inline float2 pair_at(const bf16* matrix, int rows, int cols, int row, int col) {
  if (row >= rows || col >= cols) return float2{};
  return __bfloat1622float2(
      *reinterpret_cast<const __nv_bfloat162*>(matrix + static_cast<size_t>(row) * cols + col));
}

// A block's work. Its cluster is number `group` of `groups`, and has `tiles` tiles of 64 rows: tile
// `group` and every groups-th after it, so that clusters read neighbouring rows. A BlockRow is a
// cluster whose blocks are a row of the grid. The block, one of those, has kColumns columns from
// cluster.rank kColumns on.
struct BlockWork {
  using Shared = ClusterShared;
  static constexpr int kBasisBytes = sizeof(Shared::basis[0]) + sizeof(Shared::mass[0]);
  static constexpr int kFirstBytes = kBasisBytes + sizeof(Shared::x[0]);

  Shared& shared;
  const DiffusionMaps& maps;
  const Operands& operands;
  BlockRow<> cluster;
  int group = blockIdx.y, groups = gridDim.y;
  int tiles;

  __device__ __forceinline__ BlockWork(char* bytes, const DiffusionMaps& maps,
                                       const Operands& operands)
      : shared(*reinterpret_cast<Shared*>(bytes)), maps(maps), operands(operands) {
    tiles = (static_cast<int>((operands.V + 63) / 64) - group + groups - 1) / groups;
  }
  __device__ int row_of(int t) const { return 64 * (group + t * groups); }
  __device__ int col0() const { return cluster.rank * kColumns; }
};

// Where the blocks with the same columns, which have the same rank in their clusters, add their
// shares, and count how many of them have added.
//
// all_totals (2, blocks, kEigen, kColumns) has two sums for each rank. A launch adds to one of
// them, and fills the other one with zeros, for the next launch. `arrivals` has a counter for each
// rank. Its lower 16 bits count the blocks that have come, and its upper 16 bits count the
// launches. (GridCount, from primitives/spin.cuh, is such a counter with atomic operations.) In
// launch number 5, of three clusters, it takes these values:
//
//     0x50000   0x50001   0x50002   0x50003   0x60000
//
// The last block to come makes the last two steps. Sums and counters are zero before the first
// launch. A launch leaves them ready for the next one of the same pass and W, whatever V and the
// grid are. Two streams need one of each, since two launches must not use them at the same time.
struct Meeting {
  unsigned* arrivals;
  unsigned start, groups;
  float4 *totals, *next_totals;

  // `start` holds the launch's number. A block reads it before it arrives, and it changes only when
  // the last block has arrived. So all blocks of a launch read the same number.
  __device__ __forceinline__ Meeting(const BlockWork& work, unsigned* all_arrivals,
                                     float4* all_totals)
      : arrivals(all_arrivals + work.cluster.rank), groups(work.groups) {
    start = GridCount(*arrivals).load(cuda::memory_order_relaxed) & 0xffff0000;
    const int turn = start >> 16 & 1;
    totals = all_totals + (turn * work.cluster.blocks + work.cluster.rank) * kQuads;
    next_totals = all_totals + ((turn ^ 1) * work.cluster.blocks + work.cluster.rank) * kQuads;
  }
  __device__ bool all_have_arrived() const {
    return GridCount(*arrivals).load(cuda::memory_order_acquire) - start >= groups;
  }
};

// What the L2 cache is asked to do with tile t of the basis in the first product. The second
// product takes the tiles from the last one back to the first. The last kClusterStages tiles are in
// shared memory until then. (If those are all, nothing is asked.) Of those before them the cache
// shall keep the last ones, kCachedBytes of all clusters together. A cluster has 20 tiles, for
// example, and there is room for 5 of them. Tiles 13 to 19 are those that stay in shared memory, so
// the cache need not keep them. The second product needs tile 12 next, so 12 to 8 are kept:
//
//     tiles 0 to 7, 13 to 19     evict_first
//     tiles 8 to 12              evict_last
constexpr int kCachedBytes = 32 << 20;
__device__ __forceinline__ uint64_t basis_policy(const BlockWork& work, int t) {
  const int behind = work.tiles - kClusterStages - t;
  const int tile_bytes = 128 * work.operands.E;
  const int cached = kCachedBytes / tile_bytes / static_cast<int>(gridDim.y);
  if (work.tiles <= kClusterStages) return evict_normal();
  return behind > 0 && behind <= cached ? evict_last() : evict_first();
}

// A stage is given back by both consumers of each block of the cluster.
__device__ __forceinline__ void prepare_barriers(const BlockWork& work) {
  barrier_init(&work.shared.spare, kSpareThreads);
  barrier_init(&work.shared.met, 1);
  prepare(work.shared.pipeline, 2 * work.cluster.blocks);
}

// Starts the copies of a tile of x to a stage. The cache may drop x first: no block reads it again.
__device__ __forceinline__ void load_x(const BlockWork& work, int t, int stage, Barrier* arrived) {
  for (int box = 0; box < kBoxes; ++box) {
    load_box<false>(&work.shared.x[stage].boxes[box], &work.maps.x, 0, work.row_of(t),
                    work.col0() + kBoxCols * box, arrived, evict_first());
  }
}

// Starts the copies of 64 rows of the basis, which are four boxes. Of two blocks, block 0 fetches
// boxes 0 and 2 for both, and block 1 fetches boxes 1 and 3. Each block fetches the
// masses for itself alone.
__device__ __forceinline__ void load_basis(const BlockWork& work, int t, int stage,
                                           Barrier* arrived, uint64_t policy) {
  auto& shared = work.shared;
  const int row = work.row_of(t);
  tensor_load(shared.mass[stage], &work.maps.mass, row, arrived);
  for (int box = work.cluster.rank; box < kSteps * 64 / kMulticastRows;
       box += work.cluster.blocks) {
    const int step = box * kMulticastRows / 64, within = box * kMulticastRows % 64;
    multicast_box<false>(shared.basis[stage][step].row(within), &work.maps.basis, 0, row + within,
                         kStepK * step, arrived, work.cluster.all(), policy);
  }
}

// All bytes of the first tile are announced, and its x is loaded. This may be before the cluster
// has met, since x is for this block alone.
__device__ __forceinline__ void put_first_x(const BlockWork& work) {
  put_first(work.shared.pipeline, BlockWork::kFirstBytes,
            [&](int stage, Barrier* arrived) { load_x(work, 0, stage, arrived); });
}

// The producer's thread loads the tiles of the first product, after put_first_x().
template <class Writer>
__device__ __forceinline__ void load_forth(const BlockWork& work, Writer& writer) {
  writer.announced = true;  // put_first_x() has announced the bytes of the first tile
  for (int t = 0; t < work.tiles; ++t) {
    writer.put(BlockWork::kFirstBytes, [&](int stage, Barrier* arrived) {
      if (t > 0) load_x(work, t, stage, arrived);
      load_basis(work, t, stage, arrived, basis_policy(work, t));
    });
  }
}

// Then it loads the tiles of the second product, in reverse, but not the last `kept` tiles, which
// are still there. writer.back() goes back through the stages. For example, with 20 tiles and seven
// stages, tile t is in stage t % 7. Tile 19 is in stage 5. The second product takes it first, and
// gives stage 5 back. Then tile 12 is loaded to it, and 12 % 7 is 5 again.
template <class Writer>
__device__ __forceinline__ void load_back(const BlockWork& work, Writer writer, int kept) {
  for (int t = work.tiles - 1 - kept; t >= 0; --t) {
    writer.put(BlockWork::kBasisBytes, [&](int stage, Barrier* arrived) {
      load_basis(work, t, stage, arrived, evict_first());
    });
  }
}

// ---- The spare warps ----------------------------------------------------------------------------

// The spare threads of all blocks of a rank share the quads of the rank's sum. Calls visit(i) for
// each quad of this thread.
template <typename Visit>
__device__ __forceinline__ void visit_quads(const BlockWork& work, Visit visit) {
  const int thread = kSpareThreads * work.group + static_cast<int>(threadIdx.x) - 32;
  for (int i = thread; i < kQuads; i += kSpareThreads * work.groups) visit(i);
}

__device__ __forceinline__ void zero_totals(const BlockWork& work, float4* totals) {
  visit_quads(work, [&](int i) { totals[i] = float4{}; });
}

// Backward: what a spare warp has of columns 8 j to 8 j + 7 of its rank. There the spectrum's 128
// rows are eight groups of 16 rows. The three spare warps of a block take these groups in turn:
// warp 0 has groups 0, 3 and 6, warp 1 has 1, 4 and 7, warp 2 has 2 and 5. A lane has one quad of
// each group: two columns of a row, and the same of the row 8 below it.
struct SpareColumns {
  static constexpr int kMine = (kEigen / 16 + 2) / 3;
  const BlockWork& work;
  int j, warp = threadIdx.x / 32 - 1, lane = threadIdx.x % 32;

  __device__ int col() const { return work.col0() + 8 * j + 2 * (lane % 4); }
  __device__ int row(int k) const { return 16 * (warp + 3 * k) + lane / 4; }
  // Warp 2 has only two quads. In place of a third it reads another one, and multiplies it by 0.
  __device__ bool has(int k) const { return warp + 3 * k < kEigen / 16; }
  __device__ int quad(int k) const {
    return ((has(k) ? warp + 3 * k : 0) * kColumns / 8 + j) * 32 + lane;
  }
  // These elements of a matrix (E, W); zeros outside of it.
  __device__ void load(float4 (&quads)[kMine], const bf16* matrix) const {
    const Operands& in = work.operands;
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const float2 upper = pair_at(matrix, in.E, in.W, row(k), col());
      const float2 lower = pair_at(matrix, in.E, in.W, row(k) + 8, col());
      quads[k] = make_float4(upper.x, upper.y, lower.x, lower.y);
    }
  }
};

// Backward: adds dSpectral to the sum of all.
__device__ __forceinline__ void add_d_spectral(const BlockWork& work, float4* totals) {
#pragma unroll 1
  for (int j = work.group; j < kColumns / 8; j += work.groups) {
    const SpareColumns mine{work, j};
    float4 quads[SpareColumns::kMine];
    mine.load(quads, work.operands.d_spectral);
#pragma unroll
    for (int k = 0; k < SpareColumns::kMine; ++k) {
      if (mine.has(k)) atomicAdd(totals + mine.quad(k), quads[k]);
    }
  }
}

// Backward: dTimes, minus the sum over the rows of evalue * spectral * total. The first two factors
// are loaded before all blocks have added. A lane adds up its own rows, then come the 8 lanes that
// have the same columns, and then the three warps.
__device__ __forceinline__ void store_d_times(const BlockWork& work, const float4* totals) {
  const Operands& in = work.operands;
#pragma unroll 1
  for (int j = work.group; j < kColumns / 8; j += work.groups) {
    const SpareColumns mine{work, j};
    float4 factors[SpareColumns::kMine];
    mine.load(factors, in.spectral);
#pragma unroll
    for (int k = 0; k < SpareColumns::kMine; ++k) {
      const int row = mine.row(k);
      const float upper = row < in.E ? __bfloat162float(in.evalues[row]) : 0;
      const float lower = row + 8 < in.E ? __bfloat162float(in.evalues[row + 8]) : 0;
      factors[k] = make_float4(upper * factors[k].x, upper * factors[k].y, lower * factors[k].z,
                               lower * factors[k].w);
    }
    barrier_wait(&work.shared.met, 0);
    float2 sum = {};
#pragma unroll
    for (int k = 0; k < SpareColumns::kMine; ++k) {
      const float4 total = __ldcg(totals + mine.quad(k));
      sum.x -= factors[k].x * total.x + factors[k].z * total.z;
      sum.y -= factors[k].y * total.y + factors[k].w * total.w;
    }
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, lanes);
      sum.y += __shfl_xor_sync(~0u, sum.y, lanes);
    }
    auto& rows = work.shared.second.d_times;
    const int pair = 4 * j + mine.lane;
    if (mine.lane < 4) rows[mine.warp][pair] = sum;
    named_barrier(kSpareBarrier, kSpareThreads);
    if (mine.warp == 0 && mine.lane < 4 && mine.col() < in.W) {
      const float2 all = {rows[0][pair].x + rows[1][pair].x + rows[2][pair].x,
                          rows[0][pair].y + rows[1][pair].y + rows[2][pair].y};
      *reinterpret_cast<uint32_t*>(in.d_times + mine.col()) = pack2<bf16>(all.x, all.y);
    }
  }
}

// ---- The consumers ------------------------------------------------------------------------------

// What a thread of a consumer holds of its 64 rows of the spectrum: its share, and
// exp(-evalue time) of the same elements.
struct SpectrumShare {
  Sum<kColumns> sum;
  float factors[kColumns / 2];
};

__device__ inline int consumer() { return static_cast<int>(threadIdx.x) / 128 - 1; }

__device__ __forceinline__ void damping_factors(const BlockWork& work, SpectrumShare& share) {
  const Operands& in = work.operands;
  const int row0 = 64 * consumer() + share.sum.row(0);
  const float upper = row0 < in.E ? __bfloat162float(in.evalues[row0]) : 0;
  const float lower = row0 + 8 < in.E ? __bfloat162float(in.evalues[row0 + 8]) : 0;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const float2 times = pair_at(in.times, 1, in.W, 0, work.col0() + share.sum.col(4 * j));
    share.factors[4 * j] = damping(upper, times.x);
    share.factors[4 * j + 1] = damping(upper, times.y);
    share.factors[4 * j + 2] = damping(lower, times.x);
    share.factors[4 * j + 3] = damping(lower, times.y);
  }
}

// First product: this block's share of basis^T (mass x). The left factor is the basis, transposed,
// and forward multiplied by the masses. Along k, in this product, lie the 64 rows of the tile. A
// register of the left factor has two neighbours along k, from left.k(...) on: two rows, which are
// multiplied by their two masses. The last stages are not given back: they are kept for the second
// product.
template <Pass kPass, class Reader>
__device__ __forceinline__ void project(const BlockWork& work, SpectrumShare& share,
                                        Reader& reader) {
  for (int t = 0; t < work.tiles; ++t, reader.next()) {
    const int stage = reader.wait();
    auto left = work.shared.basis[stage][consumer()].load_transposed_fragments();
    if constexpr (kPass == Pass::forward) {
#pragma unroll
      for (int i = 0; i < 4 * kSlices; ++i) {
        unsigned& pair = left.slices[i / 4][i % 4];
        const bf16* const masses = work.shared.mass[stage] + left.k(i / 4, i % 4);
        pair = multiply2(pair, *reinterpret_cast<const unsigned*>(masses));
      }
    }
    share.sum.start_product(left, work.shared.x[stage], t > 0);
    wgmma_wait<0>();
    if (t + kClusterStages < work.tiles) reader.give_back();
  }
}

// The number of the quad of the thread's elements 4 j to 4 j + 3.
__device__ __forceinline__ int quad_of(int j) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  return ((4 * consumer() + warp) * kColumns / 8 + j) * 32 + lane;
}

// Adds the share to the sum of all.
__device__ __forceinline__ void add_to_totals(const SpectrumShare& share, float4* totals) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const float* four = share.sum.elements + 4 * j;
    atomicAdd(totals + quad_of(j), make_float4(four[0], four[1], four[2], four[3]));
  }
}

// The consumers arrive, and wait until those of all blocks have added. Thread 128, the first one of
// the consumers, does so for all: after the first barrier all have added, and after the second one
// all know that the other blocks have. Backward the block arrives when its spare warps have added,
// too, and then tells them through `met` that all blocks have come.
template <Pass kPass>
__device__ __forceinline__ void meet(const BlockWork& work, const Meeting& meeting) {
  named_barrier(kConsumersBarrier, kConsumers);
  if (threadIdx.x == 128) {
    if constexpr (kPass == Pass::backward) barrier_wait(&work.shared.spare, 0);
    const GridCount arrivals(*meeting.arrivals);
    const unsigned before = arrivals.fetch_add(1, cuda::memory_order_acq_rel) - meeting.start;
    if (before + 1 == meeting.groups) {
      // The last one: on to the next launch's number.
      arrivals.fetch_add(0x10000 - meeting.groups, cuda::memory_order_relaxed);
    } else {
      const Spin spin("the other blocks' shares of the spectrum");
      while (!meeting.all_have_arrived()) spin.again();
    }
    if constexpr (kPass == Pass::backward) barrier_arrive(&work.shared.met);
  }
  named_barrier(kConsumersBarrier, kConsumers);
}

// The spectrum, from the sum of all, is damped and becomes the right factor of the second product,
// in shared memory; forward the first group stores it, too.
template <Pass kPass>
__device__ __forceinline__ void damp_spectrum(const BlockWork& work, SpectrumShare& share,
                                              const float4* totals) {
  auto& shared = work.shared;
  constexpr int kOwnQuads = kColumns / 8;
  float4 sums[kOwnQuads];
#pragma unroll
  for (int j = 0; j < kOwnQuads; ++j) sums[j] = __ldcg(totals + quad_of(j));
#pragma unroll
  for (int j = 0; j < kOwnQuads; ++j) {
    float* four = share.sum.elements + 4 * j;
    const float* factor = share.factors + 4 * j;
    four[0] = factor[0] * sums[j].x;
    four[1] = factor[1] * sums[j].y;
    four[2] = factor[2] * sums[j].z;
    four[3] = factor[3] * sums[j].w;
  }
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    share.sum.store(shared.second.spectrum[consumer()].boxes[box], kBoxCols * box,
                    [&](int i) { return share.sum.elements[i]; });
  }
  shared_fence();
  named_barrier(kConsumersBarrier, kConsumers);
  if (kPass == Pass::forward && work.group == 0 && threadIdx.x == 128) {
    for (int step = 0; step < kSteps; ++step) {
      for (int box = 0; box < kBoxes; ++box) {
        store_box<false>(&work.maps.spectral, 0, kStepK * step, work.col0() + kBoxCols * box,
                         &shared.second.spectrum[step].boxes[box], evict_normal());
      }
    }
    tensor_store_commit();
  }
}

// Second product, over the same tiles in reverse. One consumer takes the stages with an even
// number, and the other one those with an odd number. So each sees all phases of its own stages'
// barriers. (A barrier tells only the parity of a phase. Who misses a phase could mistake another
// one for it.)
template <Pass kPass, class Reader>
__device__ __forceinline__ void expand(const BlockWork& work, Reader reader) {
  auto& shared = work.shared;
  const int thread = threadIdx.x % 128;
  Sum<kColumns> sum;
  for (int t = work.tiles - 1; t >= 0; --t, reader.next()) {
    if (reader.ring.stage % 2 != consumer()) continue;
    const int stage = reader.wait();
    float above = 1, below = 1;
    if constexpr (kPass == Pass::backward) {  // a thread's elements are in two rows
      above = __bfloat162float(shared.mass[stage][sum.row(0)]);
      below = __bfloat162float(shared.mass[stage][sum.row(2)]);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sum.start_product(shared.basis[stage][step].rows(0), shared.second.spectrum[step], step > 0);
    }
    wgmma_wait<0>();
    if (thread == 0) tensor_store_wait_read<0>();
    named_barrier(kConsumerBarrier + consumer(), 128);  // the masses have been read, too
    // Only this consumer has read the stage. But each block owes two arrivals for it (see
    // prepare_barriers). So this consumer makes both.
    if (t >= kClusterStages) {
      reader.give_back();
      reader.give_back();
    }
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      sum.store(shared.second.out[consumer()][box], kBoxCols * box,
                [&](int i) { return (i / 2 % 2 ? below : above) * sum.elements[i]; });
    }
    shared_fence();
    named_barrier(kConsumerBarrier + consumer(), 128);
    if (thread == 0) {
      // The result shall not drive the basis out of the cache while the basis is still read.
      const uint64_t policy = t >= kClusterStages ? evict_first() : evict_normal();
      for (int box = 0; box < kBoxes; ++box) {
        store_box<false>(&work.maps.out, 0, work.row_of(t), work.col0() + kBoxCols * box,
                         &shared.second.out[consumer()][box], policy);
      }
      tensor_store_commit();
    }
  }
  if (thread == 0) tensor_store_wait_read<0>();
}
#endif  // HOPPER_CODE

// The kernel: its steps, in their order. The blocks of a cluster are a row of the grid. arrivals,
// totals: see Meeting. The next kernel may take its places early. But all that this kernel reads or
// writes in memory comes after wait_for_previous_kernel(). x of the first tile is for this block
// alone, so it may be on its way while the cluster meets. The basis is for all blocks of the
// cluster, so it may not: their barriers have to be prepared before.
template <Pass kPass>
__global__ void __launch_bounds__(kClusterThreads, 1)
    diffusion_clusters(const __grid_constant__ DiffusionMaps maps, const Operands operands,
                       unsigned* arrivals, float4* totals) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  const BlockWork work(bytes, maps, operands);
  const int warp = warp_of_block();
  if (warp == 0 && elect_one()) prepare_barriers(work);
  start_next_kernel();
  wait_for_previous_kernel();
  const Meeting meeting(work, arrivals, totals);
  if (warp == 0 && elect_one()) put_first_x(work);
  cluster_meet();

  if (warp < 4) {
    registers_shrink_to<56>();
    if (warp == 0) {
      if (!elect_one()) return;
      Writer writer(work.shared.pipeline);
      load_forth(work, writer);
      load_back(work, writer.back(), kClusterStages);
      // No finish(): a stage is given back only if it is filled again, and put() waits for that.
    } else {  // the spare warps
      zero_totals(work, meeting.next_totals);
      if constexpr (kPass == Pass::backward) {
        add_d_spectral(work, meeting.totals);
        barrier_arrive(&work.shared.spare);
        store_d_times(work, meeting.totals);
      }
    }
  } else {
    registers_grow_to<224>();
    Reader reader(work.shared.pipeline, work.cluster);
    SpectrumShare share;
    damping_factors(work, share);  // while the first tiles are on their way
    project<kPass>(work, share, reader);
    add_to_totals(share, meeting.totals);
    meet<kPass>(work, meeting);
    damp_spectrum<kPass>(work, share, meeting.totals);
    expand<kPass>(work, reader.back());
  }
#endif
}

// -------------------------------------------------------------------------------------------------

// The tiles of the kernels that do not need Hopper. In project_slices, large tiles read less. Small
// tiles are for a mesh that is not large: there are more of them, so fewer slices fill the GPU, and
// less has to be written and added up. In expand_spectrum, a wide tile needs 96 KB of shared memory
// with E = 128. A device where a block cannot have that much takes the narrow one.
using LargeTile = ProjectTile<128, 2, 4, 2>;
using SmallTile = ProjectTile<64, 2, 2, 4>;
using WideTile = ExpandTile<64, 128, 2, 2, 3>;
using NarrowTile = ExpandTile<32, 64, 1, 2, 2>;

template <typename Tile>
int64_t project_tiles(const Shape& shape) {
  return static_cast<int64_t>(blocks_for(shape.E, Tile::kE)) * blocks_for(shape.W, Tile::kW);
}

// How many slices split-K has: as many as it takes for the blocks of all meshes to fill all
// multiprocessors, but no slice without a step.
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
  // 8 warps for a row, or 2, if all threads can then be on the GPU at the same time; else 1.
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
  // There are as many blocks as fit on the GPU at the same time, or as there are tiles.
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
      // How often it rounds to bf16 before the second product. Forward: mass * basis and spectral.
      // Backward only the damped s, as s itself stays in fp32. The last 1 is the result's rounding.
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

// One launch has one size of tile. It has no more blocks than fit on the GPU at the same time: no
// block may wait for one that cannot start. It has even fewer where the number of rounds stays the
// same (lesson 3's word `persistent`). All that holds for a GPU that this launch has to itself. Two
// of these in two streams might wait for each other for ever. In one stream they cannot: the blocks
// of the next one start when all blocks of this one run.
void add_one_launch(DiffusionProblem& table) {
  const auto [V, E, W, meshes] = table.shape;
  constexpr int kThreads = 384, kBytes = sizeof(OneMeshShared);
  allow_shared_bytes(diffusion_one_launch, kBytes);
  const unsigned columns = blocks_for(W, kColumns);
  const int64_t fit = resident_blocks(diffusion_one_launch, kThreads, kBytes) / columns;
  if (E > kEigen || meshes > 1 || fit == 0) return;
  const int64_t tiles = blocks_for(V, kVertices);
  const dim3 blocks(columns, persistent(tiles, fit));
  const auto places = table.problem.workspace<MeetingPlace>(columns);
  const auto launch = [=, &table] {
    const Operands in = table.operands();
    const OneMeshMaps maps = {.x = tensor_map<bf16>(in.values, in.V, in.W, kVertices),
                              .basis = tensor_map<bf16>(in.basis, in.V, in.E, kVertices),
                              .mass = tensor_map<bf16>(in.mass, in.V, kVertices),
                              .out = tensor_map<bf16>(in.result, in.V, in.W, kVertices),
                              .spectral = tensor_map<bf16>(in.spectrum, in.E, in.W, 64)};
    launch_early(diffusion_one_launch, blocks, kThreads, kBytes, maps, in, places.data());
  };
  table.problem.kernel("one launch", Role::ours, launch)
      .hopper_only()
      .occupies(table.ends() + places.bytes())
      .needs_shared(kBytes)
      // Two roundings to bf16, as in *split-K*: mass * basis, and spectral.
      .checks = table.checks((tiles + blocks.y - 1) / blocks.y * kVertices, 0, 2, 1);
}

// There are as many clusters as fit, but no more than tiles. (`true` stands for an early launch.)
template <Pass kPass>
void add_clusters(DiffusionProblem& table) {
  const auto [V, E, W, meshes] = table.shape;
  constexpr int kBytes = sizeof(ClusterShared), kMostBlocks = 8;
  const auto kernel = diffusion_clusters<kPass>;
  allow_shared_bytes(kernel, kBytes);
  const unsigned blocks = blocks_for(W, kColumns);
  if (E > kEigen || meshes > 1 || blocks > kMostBlocks) return;
  const int fit = clusters_that_fit(kernel, blocks, kClusterThreads, kBytes);
  if (fit == 0) return;
  const int64_t tiles = blocks_for(V, kVertices);
  const dim3 grid(blocks, persistent(tiles, fit));
  const auto arrivals = table.problem.workspace<unsigned>(blocks);
  const auto totals = table.problem.workspace<float>(size_t{4 * 2 * kQuads} * blocks);
  const auto launch = [=, &table] {
    const Operands in = table.operands();
    launch_clusters(diffusion_clusters<kPass>, grid.x, true, grid, kClusterThreads, kBytes,
                    DiffusionMaps(in), in, arrivals.data(),
                    reinterpret_cast<float4*>(totals.data()));
  };
  table.problem.kernel("clusters", Role::ours, launch)
      .hopper_only()
      .occupies(table.ends() + arrivals.bytes() + totals.bytes())
      .needs_shared(kBytes)
      // Roundings to bf16 before the second product, as above: backward only that of the damped s.
      .checks =
      table.checks((tiles + grid.y - 1) / grid.y * kVertices, 0, kPass == Pass::forward ? 2 : 1, 1);
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
  add_one_launch(forward);
  add_clusters<Pass::forward>(forward);
  add_clusters<Pass::backward>(backward);
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "7_diffusion_fused",
                 .title = "spatial diffusion on a mesh, forward and backward",
                 .n_meaning = "V, vertices of the mesh",
                 .n_gpu = 131072,
                 .n_cpu = 4500,
                 .options = {{.name = "--eigen",
                              .meaning = "E, eigenvectors",
                              .value = 128,
                              .multiple_of = 8,
                              .cpu = 112},
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
  if (E > kEigen || meshes > 1) {
    lesson.note("The last two kernels are for one mesh and at most 128 eigenvectors.");
  }
  Problem &forward = tables.front().problem, &backward = tables.back().problem;
  forward.compare("split-K", "half fused",
                  "Forward: slices of V for every multiprocessor: % times as fast.");
  forward.compare("split-K", "unfused",
                  "Forward: three launches instead of five: % times as fast.");
  forward.compare("one launch", "unfused", "Forward: one launch instead of five: % times as fast.");
  forward.compare("clusters", "unfused", "Forward, in clusters: % times as fast.");
  backward.compare("clusters", "unfused",
                   "Backward: one launch instead of seven: % times as fast.");
  return lesson.run();
}
