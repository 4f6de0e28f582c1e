// Lesson 7's *split-K*, for compute capability 8.0 and newer: three kernels by mma.sync and
// cp.async, forward and backward, of one mesh or of a batch, for any V, E and W. How they are
// launched is in portable.cuh.
//
//     project_slices    the values to the spectrum: a product for each slice of the vertices
//     add_spectra       the sum of the slices, damped
//     expand_spectrum   the spectrum to the result: a product
//
// Between the kernels only the slices (fp32) and the spectrum are in memory.
#pragma once

#include <algorithm>

#include "operators/diffusion/diffusion.h"
#include "operators/product/portable/mma_tiles.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/fragments.cuh"
#include "primitives/launch.h"

namespace operators::diffusion {

using namespace primitives;

/// A block owns kE x kW elements of the spectrum, and each of its warps kWarpE x kWarpW of these. A
/// step adds what kV vertices contribute. A stage is what it needs of their rows: kE columns of the
/// basis, kW columns of the values, and the masses.
template <int kRowsE, int kColumnsW, int kWarpsAlongE, int kWarpsAlongW, int kStageCount,
          int kBlocksFit>
struct ProjectTile {
  static constexpr int kE = kRowsE, kW = kColumnsW, kV = 64, kStages = kStageCount;
  static constexpr int kWarpsW = kWarpsAlongW;
  static constexpr int kWarpE = kE / kWarpsAlongE, kWarpW = kW / kWarpsW;
  static constexpr int kThreads = 32 * kWarpsAlongE * kWarpsW, kBlocks = kBlocksFit;
  static constexpr int kStage = kV * (kE + kW);  // elements
  static constexpr int kMasses = kV + 8;         // of a stage, see below
  static constexpr int kSharedBytes = kStages * (kStage + kMasses) * 2;
};

// The first product. The vertices are divided into gridDim.y slices, as many as it takes to fill
// the GPU. Block (tile, slice, mesh) computes one tile of basis^T (mass[:, None] * values) for the
// vertices of one slice; backward without mass. It writes the tile to its place in sums (meshes,
// gridDim.y, E, W). The blocks of one slice run at the same time, and share what they read through
// the L2 cache.
//
// basis^T is the left factor: a tile of the basis is row-major in shared memory, and ldmatrix
// transposes it on the way to the registers. There it is multiplied by mass, two vertices at a
// time. A lane's registers a[0] and a[1] hold vertices v and v + 1, with v = 2 * (lane % 4), and
// a[2] and a[3] hold v + 8 and v + 9.
//
// In a batch the masses of a mesh may begin at any address, but copies begin at multiples of 16
// bytes. So up to 7 masses that stand before those of a step are copied, too: `shift` of them. What
// is copied behind the mesh's last mass is multiplied by a basis of zeros.
template <Pass kPass, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    project_slices(DiffusionOperands in, float* sums) {
  using bf16 = __nv_bfloat16;
  constexpr int kV = Tile::kV, kStages = Tile::kStages;
  constexpr int kRows = Tile::kWarpE / 16, kCols = Tile::kWarpW / 16;
  extern __shared__ __align__(128) bf16 shared[];
  bf16* masses = shared + kStages * Tile::kStage;  // (kStages, kMasses)
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_e = warp / Tile::kWarpsW * Tile::kWarpE;
  const int warp_w = warp % Tile::kWarpsW * Tile::kWarpW;
  const int tiles_e = ceil_div(in.E, Tile::kE);
  const int e0 = blockIdx.x % tiles_e * Tile::kE, w0 = blockIdx.x / tiles_e * Tile::kW;
  const int64_t all_steps = ceil_div(in.V, kV);
  const int64_t first = all_steps * blockIdx.y / gridDim.y;
  const int steps = static_cast<int>(all_steps * (blockIdx.y + 1) / gridDim.y - first);
  const int64_t vertex0 = blockIdx.z * in.V, masses_left = in.V * (gridDim.z - blockIdx.z);
  const int shift = static_cast<int>(vertex0 % 8);
  in.values += vertex0 * in.W;
  in.basis += vertex0 * in.E;
  in.mass += vertex0;
  const auto copy_masses = [&](int step, int64_t v0) {
    if (threadIdx.x >= kV / 8 + 1) return;
    const int64_t v = v0 + 8 * static_cast<int>(threadIdx.x) - shift;
    bf16* to = masses + step % kStages * Tile::kMasses + 8 * threadIdx.x;
    if (v + 8 <= masses_left) {
      copy_async<16>(to, in.mass + v, true);
    } else {
      for (int i = 0; i < 8; ++i) {
        to[i] = v + i < masses_left ? in.mass[v + i] : __float2bfloat16_rn(0);
      }
    }
  };
  const auto copy_step = [&](int step) {
    if (step >= steps) return;
    bf16* basis = shared + step % kStages * Tile::kStage;
    const int64_t v0 = (first + step) * kV;
    copy_swizzled<kV, Tile::kE, Tile::kThreads>(basis, in.basis, v0, e0, in.V, in.E);
    copy_swizzled<kV, Tile::kW, Tile::kThreads, true>(basis + kV * Tile::kE, in.values, v0, w0,
                                                      in.V, in.W);
    if constexpr (kPass == Pass::forward) copy_masses(step, v0);
  };

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
        unsigned pairs[2];  // of masses, which need not be aligned to 4 bytes
#pragma unroll
        for (int high = 0; high < 2; ++high) {
          const __nv_bfloat162 pair = {mass[8 * high], mass[8 * high + 1]};
          pairs[high] = *reinterpret_cast<const unsigned*>(&pair);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) a[i][j] = multiply2(a[i][j], pairs[j / 2]);
        }
      }
      add_product(sum, a, b);
    }
  }

  float* slice = sums + (static_cast<size_t>(blockIdx.z) * gridDim.y + blockIdx.y) * in.E * in.W;
  for_pairs(sum, e0 + warp_e, w0 + warp_w, in.E, in.W, [&](int e, int w, float2 pair) {
    *reinterpret_cast<float2*>(slice + static_cast<size_t>(e) * in.W + w) = pair;
  });
}

inline constexpr int kSumRows = 4, kRowWarps = 8;  // of a block

// Adds the slices up, always in the same order, damps their total, and writes that to in.spectrum.
// Backward the total, with dSpectral added, is s, and the block's share of dTimes goes to time_sums
// (meshes, gridDim.y, W). A block owns kSumRows rows and 32 columns of a mesh's spectrum. kRowWarps
// warps work for a row: each adds up its share of the slices, and the partial sums meet in shared
// memory. The warps of a row are numbered by `rank`: the one of rank 0 adds these sums and does the
// rest.
template <Pass kPass>
__global__ void __launch_bounds__(32 * kSumRows * kRowWarps)
    add_spectra(DiffusionOperands in, const float* sums, int slices, float* time_sums) {
  __shared__ float partials[kRowWarps][kSumRows][32];
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % kSumRows;
  const int rank = threadIdx.x / 32 / kSumRows, mesh = blockIdx.z;
  const int w = blockIdx.x * 32 + lane, e = blockIdx.y * kSumRows + row;
  const bool inside = e < in.E && w < in.W;
  const size_t at = static_cast<size_t>(e) * in.W + w, stride = static_cast<size_t>(in.E) * in.W;
  const size_t here = mesh * stride + at;  // in the spectra of all meshes
  sums += mesh * stride * slices;
  float sum = 0;
  if (inside) {
#pragma unroll 8
    for (int slice = slices * rank / kRowWarps; slice < slices * (rank + 1) / kRowWarps; ++slice) {
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

/// What a block of the second product has in shared memory: kW columns of the spectrum, with all
/// its E rows; kStages tiles of the basis, kV rows each, in boxes of 64 columns; and the warps'
/// staging areas. A warp computes kWarpV x kWarpW elements of the result.
template <int kRows, int kColumns, int kWarpsAlongV, int kWarpsAlongW, int kStageCount>
struct ExpandTile {
  static constexpr bool kHeld = false;
  static constexpr int kV = kRows, kW = kColumns, kStages = kStageCount, kWarpsW = kWarpsAlongW;
  static constexpr int kWarpV = kV / kWarpsAlongV, kWarpW = kW / kWarpsW;
  static constexpr int kThreads = 32 * kWarpsAlongV * kWarpsAlongW;
  static constexpr int kBox = kV * 64;  // elements
  static constexpr int64_t shared_bytes(int64_t E) {
    return ((E + 15) / 16 * 16 * kW + kStages * ((E + 63) / 64) * kBox + kV * kW) * 2;
  }
};

// Backward the blocks that have the first tile of the first mesh add up dTimes for their columns,
// of time_rows shares.
template <int kW, int kThreads>
__device__ __forceinline__ void add_time_sums(const DiffusionOperands& in, int w0,
                                              const float* time_sums, int time_rows) {
  if (blockIdx.x > 0 || blockIdx.z > 0) return;
  for (int w = w0 + threadIdx.x; w < min(w0 + kW, in.W); w += kThreads) {
    float sum = 0;
    for (int row = 0; row < time_rows; ++row) sum += time_sums[static_cast<size_t>(row) * in.W + w];
    in.d_times[w] = __float2bfloat16_rn(-sum);
  }
}

// The second product, of mesh blockIdx.z: result (V, W) = basis spectrum, and backward mass[:,
// None] * that. Each block keeps kW columns of the spectrum in shared memory until the end. The
// basis streams by, in tiles of kV rows. The block takes tiles number blockIdx.x, blockIdx.x +
// gridDim.x, and so on, one in each step.
template <Pass kPass, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    expand_spectrum(DiffusionOperands in, const float* time_sums, int time_rows) {
  using bf16 = __nv_bfloat16;
  constexpr int kV = Tile::kV, kW = Tile::kW, kStages = Tile::kStages;
  constexpr int kWarpV = Tile::kWarpV, kWarpW = Tile::kWarpW;
  extern __shared__ __align__(128) bf16 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_v = warp / Tile::kWarpsW * kWarpV, warp_w = warp % Tile::kWarpsW * kWarpW;
  const int w0 = blockIdx.y * kW, boxes = ceil_div(in.E, 64), rows = ceil_div(in.E, 16) * 16;
  bf16* spectrum = shared;
  bf16* stages = spectrum + rows * kW;
  bf16* staging = stages + kStages * boxes * Tile::kBox + warp * kWarpV * kWarpW;
  const int64_t tiles = ceil_div(in.V, kV), vertex0 = blockIdx.z * in.V;
  in.basis += vertex0 * in.E;
  in.mass += vertex0;
  in.result += vertex0 * in.W;
  in.spectrum += static_cast<size_t>(blockIdx.z) * in.E * in.W;
  const auto stage_of = [&](int step) { return stages + step % kStages * boxes * Tile::kBox; };
  const auto copy_step = [&](int step) {
    const int64_t tile = blockIdx.x + static_cast<int64_t>(step) * gridDim.x;
    for (int box = 0; tile < tiles && box < boxes; ++box) {
      copy_swizzled<kV, 64, Tile::kThreads>(stage_of(step) + box * Tile::kBox, in.basis, tile * kV,
                                            64 * box, in.V, in.E);
    }
  };

  // These copies are in one group with those of the first tile, for which ahead.next() waits.
  for (int e = 0; e < rows; e += 16) {
    copy_swizzled<16, kW, Tile::kThreads>(spectrum + e * kW, in.spectrum, e, w0, in.E, in.W);
  }
  auto ahead = copies_ahead<kStages>(copy_step);
  if constexpr (kPass == Pass::backward) {
    add_time_sums<kW, Tile::kThreads>(in, w0, time_sums, time_rows);
  }

  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int step = ahead.next();
    const int64_t v0 = tile * kV + warp_v;
    bf16 mass[kWarpV / 8] = {};  // asked for before the products, needed after them
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
    store_results<kWarpV, kWarpW>(
        staging, in.result, v0, w0 + warp_w, in.V, in.W, [&](int i, int j) {
          const float2 pair = pair_of(sum, i, j);
          const float factor = kPass == Pass::backward ? __bfloat162float(mass[i]) : 1;
          return pack2<bf16>(factor * pair.x, factor * pair.y);
        });
  }
}

/// Of expand_held, for E up to kMostE. A stage has kRows rows of the basis. A block has eight warps
/// and up to 256 columns of the spectrum, each warp 32 of them as fragments. The spectrum comes
/// through the stages' memory.
template <int kMostE, int kRows, int kStageCount, int kBlocksFit>
struct HeldTile {
  static constexpr int kE = kMostE, kV = kRows, kOwn = 32, kWarps = 8, kW = kOwn * kWarps;
  static constexpr int kThreads = 32 * kWarps, kStages = kStageCount, kBlocks = kBlocksFit;
  static constexpr int kStage = kV * kE;
  static constexpr bool kHeld = true;
  static constexpr int kSharedBytes = 2 * std::max(kE * kW, kStages* kStage);
  static constexpr int64_t shared_bytes(int64_t) { return kSharedBytes; }
};

// The second product as expand_spectrum computes it, but each warp keeps its columns of the
// spectrum in registers. So shared memory has tiles of the basis alone, and these are read from
// memory once for up to 256 columns. Where W has fewer columns, kWarps / (W / 32) warps have the
// same ones, and divide the rows of a tile.
template <Pass kPass, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    expand_held(DiffusionOperands in, const float* time_sums, int time_rows) {
  using bf16 = __nv_bfloat16;
  constexpr int kV = Tile::kV, kW = Tile::kW, kE = Tile::kE, kStages = Tile::kStages;
  constexpr int kOwn = Tile::kOwn;
  extern __shared__ __align__(128) bf16 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, w0 = blockIdx.y * kW;
  const int across = in.W > kW / 2 ? kW / kOwn : in.W > kW / 4 ? kW / kOwn / 2 : kW / kOwn / 4;
  const int own = warp % across * kOwn, row0 = warp / across * 16;
  const int64_t tiles = ceil_div(in.V, kV), vertex0 = blockIdx.z * in.V;
  in.basis += vertex0 * in.E;
  in.mass += vertex0;
  in.result += vertex0 * in.W;
  in.spectrum += static_cast<size_t>(blockIdx.z) * in.E * in.W;

  copy_swizzled<kE, kW, Tile::kThreads>(shared, in.spectrum, 0, w0, in.E, in.W);
  copy_async_commit();
  if constexpr (kPass == Pass::backward)
    add_time_sums<kW, Tile::kThreads>(in, w0, time_sums, time_rows);
  copy_async_wait<0>();
  __syncthreads();
  unsigned spectrum[kE / 16][kOwn / 16][4];
#pragma unroll
  for (int k = 0; k < kE; k += 16) load_right<kW>(spectrum[k / 16], shared, k, own);
  __syncthreads();  // the basis takes its place

  // From its last tile to its first one: the slices of the first product have read their last rows
  // last, and the L2 cache may still have them.
  const int64_t begin = tiles * blockIdx.x / gridDim.x, end = tiles * (blockIdx.x + 1) / gridDim.x;
  const auto copy_step = [&](int step) {
    const int64_t tile = end - 1 - step;
    if (tile < begin) return;
    copy_swizzled<kV, kE, Tile::kThreads>(shared + step % kStages * Tile::kStage, in.basis,
                                          tile * kV, 0, in.V, in.E);
  };
  auto ahead = copies_ahead<kStages>(copy_step);
  const product::MmaResults<bf16> result{in.result, in.W, static_cast<int>(in.V), in.W};
  for (int64_t tile = end - 1; tile >= begin; --tile) {
    const bf16* basis = shared + ahead.next() % kStages * Tile::kStage;
    for (int row = row0; row < kV; row += Tile::kWarps / across * 16) {
      const int v0 = static_cast<int>(tile) * kV + row;
      bf16 mass[2] = {};  // asked for before the products, needed after them
      if constexpr (kPass == Pass::backward) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int v = v0 + 8 * i + lane / 4;
          mass[i] = in.mass[v < in.V ? v : 0];
        }
      }
      Sums<16, kOwn> sum = {};
#pragma unroll
      for (int k = 0; k < kE; k += 16) {
        unsigned a[1][4];
        load_left<kE>(a, basis, row, k);
        add_product(sum, a, spectrum[k / 16]);
      }
      result.template store<16, kOwn>(v0, w0 + own, [&](int i, int j) {
        const float2 pair = pair_of(sum, i, j);
        const float factor = kPass == Pass::backward ? __bfloat162float(mass[i]) : 1;
        return pack2<bf16>(factor * pair.x, factor * pair.y);
      });
    }
  }
}

}  // namespace operators::diffusion
