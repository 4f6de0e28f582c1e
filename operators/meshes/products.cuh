// Products of matrices whose rows are vertices of meshes, in every type and of any size: `project`
// sums over the vertices of each mesh, and `expand` has a row of its result for each vertex. What
// they are of is the caller's: see diffusion.cuh and features.cuh.
//
// The kernels of an operator follow each other early (primitives/early_launch.cuh): each waits
// first of all for the one before it, so that only its start overlaps the other's end.
#pragma once

#include "operators/meshes/fragments.cuh"
#include "operators/meshes/meshes.cuh"
#include "primitives/early_launch.cuh"

namespace operators::meshes {

/// A block of 4 warps has 64 x 64 results, a warp 32 x 32 of them.
inline constexpr int kTile = 64, kThreads = 128, kStages = 4;
inline constexpr int kPitch = pitch(kTile);

/// The factors of a product.
template <typename T>
struct Factors {
  const T *left, *right;
};

/// What `project` computes for each mesh: result r (E, W) is left^T right of factors[r], where left
/// (vertices, E) and right (vertices, W) are those of the mesh. Each vertex counts `mass` times,
/// unless that is null.
template <typename T>
struct Projection {
  Factors<T> factors[2];
  const T* mass = nullptr;
  Meshes meshes;
  int length, E, W;  ///< of the slots
  float* partials;   ///< (slots, results, E, W): of each slot its part of the sums
};

// A block adds up one slot's part of 64 x 64 elements of a result. Both factors are tiles with a
// row for each of kDepth vertices, and the left one is transposed on its way to the registers,
// where it is multiplied by mass. What a slot has not of a step's vertices are rows of zeros, with
// masses of zero. gridDim.y results.
template <class Kind>
__global__ void __launch_bounds__(kThreads) project(const Projection<typename Kind::T> in) {
  using T = typename Kind::T;
  constexpr int kDepth = Kind::kDepth, kTileOf = kDepth * kPitch;
  __shared__ __align__(128) T stages[kStages][2 * kTileOf];
  __shared__ __align__(16) T masses[kStages][kDepth];
  wait_for_previous_kernel();
  start_next_kernel();
  const int tiles_e = ceil_div(in.E, kTile), tiles = tiles_e * ceil_div(in.W, kTile);
  const int number = static_cast<int>(blockIdx.x) / tiles;
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  const Meshes::Slot slot = in.meshes.slot(number, in.length);
  if (slot.end <= slot.begin) return;
  const int e0 = tile % tiles_e * kTile, w0 = tile / tiles_e * kTile;
  const Factors<T> factors = in.factors[blockIdx.y];
  const int first = slot.begin / kDepth, steps = (slot.end - 1) / kDepth - first + 1;
  const RowsOf<T> left = {factors.left, slot.begin, slot.end, in.E, are_aligned<T>(in.E)};
  const RowsOf<T> right = {factors.right, slot.begin, slot.end, in.W, are_aligned<T>(in.W)};
  const auto copy_step = [&](int step) {
    if (step >= steps) return;
    const int vertex0 = (first + step) * kDepth;
    T* const to = stages[step % kStages];
    copy_tile<kDepth, kTile, kPitch, kThreads>(to, left, vertex0, e0);
    copy_tile<kDepth, kTile, kPitch, kThreads>(to + kTileOf, right, vertex0, w0);
    if (!in.mass) return;
    constexpr int kPair = 4 / static_cast<int>(sizeof(T));  // what 4 bytes have
    const int at = static_cast<int>(threadIdx.x) * kPair, vertex = vertex0 + at;
    if (at >= kDepth) return;
    T* const mass = masses[step % kStages] + at;
    if (vertex >= slot.begin && vertex + kPair <= slot.end) {
      copy_async<4>(mass, in.mass + vertex, true);
    } else {
      for (int i = 0; i < kPair; ++i) {
        const bool inside = vertex + i >= slot.begin && vertex + i < slot.end;
        mass[i] = inside ? in.mass[vertex + i] : static_cast<T>(0.0F);
      }
    }
  };

  const int warp = threadIdx.x / 32, row = warp / 2 * 32, col = warp % 2 * 32;
  float sum[2][4][4] = {};
  auto ahead = copies_ahead<kStages>(copy_step);
  for (int step = 0; step < steps; ++step) {
    ahead.next();
    const T* const stage = stages[step % kStages];
    const T* const mass = in.mass ? masses[step % kStages] : nullptr;
#pragma unroll
    for (int k = 0; k < kDepth; k += Kind::kUnit) {
      Left<Kind> a;
      Right<Kind, 32> b;
      load_left<true, kPitch>(a, stage, row, k, mass);
      load_right<kPitch>(b, stage + kTileOf, k, col);
      multiply(sum, a, b);
    }
  }

  const size_t at = (static_cast<size_t>(number) * gridDim.y + blockIdx.y) * in.E;
  for_pairs(sum, e0 + row, w0 + col, in.E, in.W, [&](int e, int w, float2 pair) {
    store_pair(in.partials + (at + e) * in.W, w, in.W, pair);
  });
}

/// What `expand` computes: result r (vertices, cols) is left right of factors[r], where left is
/// (vertices, depth), and right (depth, cols) the mesh's own; or, if it is shared, the same for all
/// meshes, and then it may be transposed in memory: (cols, depth). Or, if there is one result, and
/// `terms` is 2, it is the sum of both products.
template <typename T>
struct Expansion {
  Factors<T> factors[2];
  int terms = 1;
  T* to[2];
  const T* mass = nullptr;       ///< (vertices), what rows are multiplied by; null: nothing
  const float* start = nullptr;  ///< (vertices, cols), what is added to the result; null: nothing
  Meshes meshes;
  int depth, cols;
  bool shared = false, transposed = false;
};

// A block has 64 x 64 elements of a result: of one slot of 64 vertices. gridDim.y results.
template <class Kind>
__global__ void __launch_bounds__(kThreads) expand(const Expansion<typename Kind::T> in) {
  using T = typename Kind::T;
  constexpr int kDepth = Kind::kDepth, kLeft = kTile * Kind::kDeepPitch, kRight = kDepth * kPitch;
  __shared__ __align__(128) T stages[kStages][kLeft + kRight];
  wait_for_previous_kernel();
  start_next_kernel();
  const int tiles = ceil_div(in.cols, kTile);
  const int w0 = static_cast<int>(blockIdx.x) % tiles * kTile;
  const Meshes::Slot slot = in.meshes.slot(static_cast<int>(blockIdx.x) / tiles, kTile);
  if (slot.end <= slot.begin) return;
  const int vertex0 = slot.begin / kTile * kTile;
  const int of_term = ceil_div(in.depth, kDepth), steps = in.terms * of_term;
  const size_t own = in.shared ? 0 : static_cast<size_t>(slot.mesh) * in.depth * in.cols;
  const auto copy_step = [&](int step) {
    if (step >= steps) return;
    const Factors<T> factors = in.factors[blockIdx.y + step / of_term];
    const int k0 = step % of_term * kDepth;
    T* const to = stages[step % kStages];
    const RowsOf<T> left = {factors.left, slot.begin, slot.end, in.depth, are_aligned<T>(in.depth)};
    copy_tile<kTile, kDepth, Kind::kDeepPitch, kThreads>(to, left, vertex0, k0);
    if (in.transposed) {
      const RowsOf<T> right = {factors.right, 0, in.cols, in.depth, false};
      copy_transposed<kDepth, kTile, kPitch, kThreads>(to + kLeft, right, k0, w0);
    } else {
      const RowsOf<T> right = {factors.right + own, 0, in.depth, in.cols, are_aligned<T>(in.cols)};
      copy_tile<kDepth, kTile, kPitch, kThreads>(to + kLeft, right, k0, w0);
    }
  };

  const int warp = threadIdx.x / 32, row = warp / 2 * 32, col = warp % 2 * 32;
  float sum[2][4][4] = {};
  auto ahead = copies_ahead<kStages>(copy_step);
  for (int step = 0; step < steps; ++step) {
    ahead.next();
    const T* const stage = stages[step % kStages];
#pragma unroll
    for (int k = 0; k < kDepth; k += Kind::kUnit) {
      Left<Kind> a;
      Right<Kind, 32> b;
      load_left<false, Kind::kDeepPitch>(a, stage, row, k);
      load_right<kPitch>(b, stage + kLeft, k, col);
      multiply(sum, a, b);
    }
  }

  T* const to = in.to[blockIdx.y];
  for_pairs(sum, vertex0 + row, w0 + col, slot.end, in.cols, [&](int v, int w, float2 pair) {
    if (v < slot.begin) return;
    const size_t at = static_cast<size_t>(v) * in.cols;
    if (in.start) {
      pair.x += in.start[at + w];
      if (w + 1 < in.cols) pair.y += in.start[at + w + 1];
    }
    const float mass = in.mass ? static_cast<float>(in.mass[v]) : 1;
    store_pair(to + at, w, in.cols, make_float2(mass * pair.x, mass * pair.y));
  });
}

// ---- Sums over slots --------------------------------------------------------------------------

inline constexpr int kSumWarps = 8;

/// Elements of the sums over each mesh's slots, for a block of kSumWarps warps. A warp has 32
/// neighbouring elements. `ranks` warps, 1 or kSumWarps, share the slots of an element: where there
/// are few elements, many loads are on their way at once. Elements are those of a mesh's `results`
/// matrices of E x W, and then the next mesh's.
struct SlotSums {
  const float* partials;
  Meshes meshes;
  int length;
  int64_t of_mesh;  ///< elements
  int ranks;

  __host__ __device__ int64_t elements() const { return of_mesh * meshes.count; }
  __host__ __device__ unsigned blocks() const {
    return static_cast<unsigned>(ceil_div(elements(), int64_t{32} * (kSumWarps / ranks)));
  }

  /// Calls finish(element, its sum) for each, always added in the same order.
  template <typename Finish>
  __device__ __forceinline__ void each(Finish finish) const {
    __shared__ float parts[kSumWarps][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = warp % ranks;
    const int64_t element =
        (static_cast<int64_t>(blockIdx.x) * (kSumWarps / ranks) + warp / ranks) * 32 + lane;
    float sum = 0;
    if (element < elements()) {
      const int mesh = static_cast<int>(element / of_mesh);
      const Meshes::Slots slots = meshes.slots_of(mesh, length);
      const float* from = partials + slots.first * of_mesh + element % of_mesh;
#pragma unroll 8
      for (int i = rank; i < slots.count; i += ranks) sum += from[i * of_mesh];
    }
    if (ranks > 1) {
      parts[warp][lane] = sum;
      __syncthreads();
      for (int i = 1; i < ranks && rank == 0; ++i) sum += parts[i][lane];
    }
    if (rank == 0 && element < elements()) finish(element, sum);
  }
};

/// Sums that are rounded to T: of each mesh's matrices the first `rounded` ones, each to a tensor
/// of its own for all meshes; the next one stays in fp32. `count`: of elements of a matrix.
template <typename T>
__global__ void __launch_bounds__(32 * kSumWarps)
    add_slots(SlotSums sums, int64_t count, T* first, T* second, float* third) {
  wait_for_previous_kernel();
  start_next_kernel();
  sums.each([&](int64_t element, float sum) {
    const int64_t mesh = element / sums.of_mesh, of = element % sums.of_mesh;
    const int which = static_cast<int>(of / count);
    const int64_t at = mesh * count + of % count;
    if (which == 2) {
      third[at] = sum;
    } else {
      (which == 0 ? first : second)[at] = static_cast<T>(sum);
    }
  });
}

/// The sums of columns of a matrix (rows, cols): a block adds up its share of the rows, of 32
/// columns, and writes it, with the sign changed if it is the only one, to `to`; else the parts go
/// to `parts` (gridDim.y, cols).
template <typename T>
__global__ void __launch_bounds__(1024)
    add_rows(const float* matrix, int64_t rows, int cols, float* parts, T* minus_sums) {
  __shared__ float all[32][32];
  wait_for_previous_kernel();
  start_next_kernel();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int col = static_cast<int>(blockIdx.x) * 32 + lane;
  const int64_t from = rows * blockIdx.y / gridDim.y, to = rows * (blockIdx.y + 1) / gridDim.y;
  float sum = 0;
  if (col < cols) {
#pragma unroll 4
    for (int64_t row = from + warp; row < to; row += 32) sum += matrix[row * cols + col];
  }
  all[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || col >= cols) return;
  for (int i = 1; i < 32; ++i) sum += all[i][lane];
  if (gridDim.y == 1) {
    minus_sums[col] = static_cast<T>(-sum);
  } else {
    parts[static_cast<int64_t>(blockIdx.y) * cols + col] = sum;
  }
}

}  // namespace operators::meshes
