// The gradient features of lesson 8 in every type, of any size, and of meshes that differ in
// theirs.
//
//     expand            M1 = x Lr^T and M2 = x Li^T, of the spectrum's few rows
//     features          xr, xi, ar and ai of each vertex, and the features; backward P, Q, R and S
//     add_vertices      backward: the sums over vertices, in slots
//     add_slots         their sums, dM1, dM2 and D
//     expand, project   d_x, d_lr and d_li
//
// The letters are those of 8_spatial_gradients.cu.
#pragma once

#include "operators/meshes/diffusion.cuh"

namespace operators::meshes {

/// What a pass of the features reads and writes; what only the other pass has is null.
template <typename T>
struct FeaturesTensors {
  const T *d_out, *x, *gr, *gi, *lr, *li;
  T *out, *d_x, *d_lr, *d_li;
  const int* offsets;
};

/// What `features` computes. M: M1 and M2, one after the other, (meshes, E, W) each. to: out; or,
/// if there is d_out, P, Q, R and S, (vertices, W) each.
template <typename T>
struct Features {
  const T *gr, *gi, *x, *M, *d_out;
  T* to;
  Meshes meshes;
  int E, W;
};

/// 1 - tanh(u)^2 with a small relative error for all u: 4 e / (1 + e)^2 with e = exp(-2 |u|).
__device__ inline float slope_of_tanh(float u) {
  const float e = expf(-2 * fabsf(u)), inverse = 1 / (1 + e);
  return 4 * e * inverse * inverse;
}

/// A block of 4 warps has 64 vertices of a slot and kCols columns, a warp 32 x kCols / 2 of them.
/// In 3xTF32 there are half as many columns, as a thread needs registers for both numbers of each
/// factor.
template <class Kind>
struct FeaturesTile {
  static constexpr int kCols = Kind::kSplit ? 32 : 64, kOwn = kCols / 2, kStages = 2;
  static constexpr int kLeft = kTile * Kind::kDeepPitch, kRight = Kind::kDepth * pitch(kCols);
  static constexpr int kStage = 2 * kLeft + 3 * kRight;
};

// A thread has all four sums of its vertices and columns, so the features are computed where the
// sums are, and xr, xi, ar and ai are never in memory. A step's tiles are those of gr and gi, each
// of which multiplies three right factors: x, M1 and M2 of the slot's mesh.
template <class Kind>
__global__ void __launch_bounds__(kThreads) features(const Features<typename Kind::T> in) {
  using T = typename Kind::T;
  using Tile = FeaturesTile<Kind>;
  constexpr int kDepth = Kind::kDepth, kCols = Tile::kCols, kOwn = Tile::kOwn;
  constexpr int kPitch = pitch(kCols);
  __shared__ __align__(128) T stages[Tile::kStages][Tile::kStage];
  wait_for_previous_kernel();
  start_next_kernel();
  const int tiles = ceil_div(in.W, kCols);
  const int w0 = static_cast<int>(blockIdx.x) % tiles * kCols;
  const Meshes::Slot slot = in.meshes.slot(static_cast<int>(blockIdx.x) / tiles, kTile);
  if (slot.end <= slot.begin) return;
  const int vertex0 = slot.begin / kTile * kTile, steps = ceil_div(in.E, kDepth);
  const size_t spectrum = static_cast<size_t>(in.E) * in.W;
  const size_t own = slot.mesh * spectrum, all = in.meshes.count * spectrum;
  const auto copy_step = [&](int step) {
    if (step >= steps) return;
    T* to = stages[step % Tile::kStages];
    for (const T* data : {in.gr, in.gi}) {
      const RowsOf<T> left = {data, slot.begin, slot.end, in.E, are_aligned<T>(in.E)};
      copy_tile<kTile, kDepth, Kind::kDeepPitch, kThreads>(to, left, vertex0, step * kDepth);
      to += Tile::kLeft;
    }
    for (const T* data : {in.x, in.M, in.M + all}) {
      const RowsOf<T> right = {data + own, 0, in.E, in.W, are_aligned<T>(in.W)};
      copy_tile<kDepth, kCols, kPitch, kThreads>(to, right, step * kDepth, w0);
      to += Tile::kRight;
    }
  };

  const int warp = threadIdx.x / 32, row = warp / 2 * 32, col = warp % 2 * kOwn;
  float xr[2][kOwn / 8][4] = {}, xi[2][kOwn / 8][4] = {}, ar[2][kOwn / 8][4] = {},
                     ai[2][kOwn / 8][4] = {};
  auto ahead = copies_ahead<Tile::kStages>(copy_step);
  for (int step = 0; step < steps; ++step) {
    ahead.next();
    const T* const left = stages[step % Tile::kStages];
    const T* const right = left + 2 * Tile::kLeft;
#pragma unroll
    for (int k = 0; k < kDepth; k += Kind::kUnit) {
      Left<Kind> real, imaginary;
      load_left<false, Kind::kDeepPitch>(real, left, row, k);
      load_left<false, Kind::kDeepPitch>(imaginary, left + Tile::kLeft, row, k);
      Right<Kind, kOwn> b;
      load_right<kPitch>(b, right, k, col);  // x
      multiply(xr, real, b);
      multiply(xi, imaginary, b);
      load_right<kPitch>(b, right + Tile::kRight, k, col);  // M1
      multiply(ar, real, b);
      multiply(ai, imaginary, b);
      load_right<kPitch>(b, right + 2 * Tile::kRight, k, col);  // M2
      multiply(ai, real, b);
      negate(b);
      multiply(ar, imaginary, b);
    }
  }

  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int v = vertex0 + row + 8 * i + lane / 4;
    if (v < slot.begin || v >= slot.end) continue;
    const size_t at = static_cast<size_t>(v) * in.W;
#pragma unroll
    for (int j = 0; j < kOwn / 8; ++j) {
      const int w = w0 + col + 8 * j + lane % 4 * 2;
      if (w >= in.W) continue;
      const float2 a = pair_of(xr, i, j), b = pair_of(xi, i, j);
      const float2 c = pair_of(ar, i, j), d = pair_of(ai, i, j);
      const float2 u = make_float2(a.x * c.x + b.x * d.x, a.y * c.y + b.y * d.y);
      if (!in.d_out) {
        store_pair(in.to + at, w, in.W, make_float2(tanhf(u.x), tanhf(u.y)));
        continue;
      }
      const float more = w + 1 < in.W ? static_cast<float>(in.d_out[at + w + 1]) : 0;
      const float2 g = make_float2(static_cast<float>(in.d_out[at + w]) * slope_of_tanh(u.x),
                                   more * slope_of_tanh(u.y));
      const size_t next = static_cast<size_t>(in.meshes.vertices) * in.W;
      T* to = in.to + at;
      for (const float2& factor : {a, b, c, d}) {
        store_pair(to, w, in.W, make_float2(g.x * factor.x, g.y * factor.y));
        to += next;
      }
    }
  }
}

/// What `add_vertices` computes for each mesh: dM1 = gr^T P + gi^T Q, dM2 = gr^T Q - gi^T P and D =
/// gr^T R + gi^T S. products: P, Q, R and S, (vertices, W) each.
template <typename T>
struct VertexSums {
  const T *gr, *gi, *products;
  Meshes meshes;
  int length, E, W;  ///< the first: of the slots
  float* partials;   ///< (slots, 3, E, W)
};

inline constexpr int kSumCols = 32;

// A block adds up one slot's part of 64 x 32 elements of dM1, dM2 and D, a warp 32 x 16 of each. So
// a step's tiles of gr and gi, each loaded and, in 3xTF32, split once, multiply three of the four
// right factors each. Three launches of `project` would load and split them three times.
template <class Kind>
__global__ void __launch_bounds__(kThreads) add_vertices(const VertexSums<typename Kind::T> in) {
  using T = typename Kind::T;
  constexpr int kDepth = Kind::kDepth, kStages = 2, kRightPitch = pitch(kSumCols);
  constexpr int kLeft = kDepth * kPitch, kRight = kDepth * kRightPitch;
  __shared__ __align__(128) T stages[kStages][2 * kLeft + 4 * kRight];
  wait_for_previous_kernel();
  start_next_kernel();
  const int tiles_e = ceil_div(in.E, kTile), tiles = tiles_e * ceil_div(in.W, kSumCols);
  const int number = static_cast<int>(blockIdx.x) / tiles;
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  const Meshes::Slot slot = in.meshes.slot(number, in.length);
  if (slot.end <= slot.begin) return;
  const int e0 = tile % tiles_e * kTile, w0 = tile / tiles_e * kSumCols;
  const int first = slot.begin / kDepth, steps = (slot.end - 1) / kDepth - first + 1;
  const int64_t next = static_cast<int64_t>(in.meshes.vertices) * in.W;
  const auto copy_step = [&](int step) {
    if (step >= steps) return;
    const int vertex0 = (first + step) * kDepth;
    T* to = stages[step % kStages];
    for (const T* data : {in.gr, in.gi}) {
      const RowsOf<T> left = {data, slot.begin, slot.end, in.E, are_aligned<T>(in.E)};
      copy_tile<kDepth, kTile, kPitch, kThreads>(to, left, vertex0, e0);
      to += kLeft;
    }
    for (int i = 0; i < 4; ++i) {
      const RowsOf<T> right = {in.products + i * next, slot.begin, slot.end, in.W,
                               are_aligned<T>(in.W)};
      copy_tile<kDepth, kSumCols, kRightPitch, kThreads>(to, right, vertex0, w0);
      to += kRight;
    }
  };

  const int warp = threadIdx.x / 32, row = warp / 2 * 32, col = warp % 2 * 16;
  float sums[3][2][2][4] = {};
  auto ahead = copies_ahead<kStages>(copy_step);
  for (int step = 0; step < steps; ++step) {
    ahead.next();
    const T* const left = stages[step % kStages];
    const T* const right = left + 2 * kLeft;
#pragma unroll
    for (int k = 0; k < kDepth; k += Kind::kUnit) {
      Left<Kind> real, imaginary;
      load_left<true, kPitch>(real, left, row, k);
      load_left<true, kPitch>(imaginary, left + kLeft, row, k);
      Right<Kind, 16> b;
      load_right<kRightPitch>(b, right, k, col);  // P
      multiply(sums[0], real, b);
      negate(b);
      multiply(sums[1], imaginary, b);
      load_right<kRightPitch>(b, right + kRight, k, col);  // Q
      multiply(sums[0], imaginary, b);
      multiply(sums[1], real, b);
      load_right<kRightPitch>(b, right + 2 * kRight, k, col);  // R
      multiply(sums[2], real, b);
      load_right<kRightPitch>(b, right + 3 * kRight, k, col);  // S
      multiply(sums[2], imaginary, b);
    }
  }

#pragma unroll
  for (int which = 0; which < 3; ++which) {
    const size_t at = (static_cast<size_t>(number) * 3 + which) * in.E;
    for_pairs(sums[which], e0 + row, w0 + col, in.E, in.W, [&](int e, int w, float2 pair) {
      store_pair(in.partials + (at + e) * in.W, w, in.W, pair);
    });
  }
}

/// A pass. `tensors` says, at each launch, where inputs and outputs are. One way, or none, if there
/// are too many tiles for a launch.
template <class Kind, bool kBackward>
std::vector<Way> features_ways(const Caller& caller, const MeshesShape& shape,
                               const std::function<FeaturesTensors<typename Kind::T>()>& tensors) {
  using T = typename Kind::T;
  const Meshes meshes = shape.of(nullptr), rows = shape.rows_of_spectra();
  const int64_t E = shape.E, W = shape.W, spectra = shape.spectrum_values();
  const int64_t weight_tiles = tiles_of(W, W);
  const int64_t vertex_tiles = ceil_div(E, int64_t{kTile}) * ceil_div(W, int64_t{kSumCols});
  const int length = slot_length(shape.vertices, vertex_tiles, meshes.count);
  const int row_length = slot_length(rows.vertices, 2 * weight_tiles, 1);
  const int64_t slots = meshes.slots(length), row_slots = rows.slots(row_length);
  constexpr int64_t kCols = FeaturesTile<Kind>::kCols;
  if (!is_a_grid(ceil_div(W, kCols) * meshes.slots(kTile)) ||
      !is_a_grid(ceil_div(W, int64_t{kTile}) * rows.slots(kTile)) ||
      (kBackward && !(is_a_grid(vertex_tiles * slots) && is_a_grid(weight_tiles * row_slots)))) {
    return {};
  }
  const auto size = [](bool there, int64_t count) {
    return static_cast<size_t>(there ? count : 1);
  };
  const auto M = caller.workspace.any<T>(size(true, 2 * spectra));
  const auto products = caller.workspace.any<T>(size(kBackward, 4 * shape.vertex_values()));
  const auto partials = caller.workspace.any<float>(
      size(kBackward, std::max(slots * 3 * E * W, row_slots * 2 * W * W)));
  const auto dM = caller.workspace.any<T>(size(kBackward, 2 * spectra));
  const auto D = caller.workspace.any<float>(size(kBackward, spectra));
  const auto launch = [=, stream = caller.stream] {
    const FeaturesTensors<T> in = tensors();
    const Meshes own = shape.of(in.offsets);
    const int e = static_cast<int>(E), w = static_cast<int>(W);
    T *const M1 = M, *const M2 = M1 + spectra;
    launch_expand<Kind>(stream,
                        {.factors = {{in.x, in.lr}, {in.x, in.li}},
                         .to = {M1, M2},
                         .meshes = rows,
                         .depth = w,
                         .cols = w,
                         .shared = true,
                         .transposed = true},
                        2);
    const Features<T> of = {in.gr, in.gi, in.x, M1, in.d_out, kBackward ? products.data() : in.out,
                            own,   e,     w};
    const int64_t blocks = ceil_div(W, kCols) * own.slots(kTile);
    launch_next(stream, features<Kind>, static_cast<unsigned>(blocks), kThreads, of);
    if constexpr (kBackward) {
      T *const dM1 = dM, *const dM2 = dM1 + spectra;
      const VertexSums<T> of_vertices = {in.gr, in.gi, products, own, length, e, w, partials};
      launch_next(stream, add_vertices<Kind>,
                  static_cast<unsigned>(vertex_tiles * own.slots(length)), kThreads, of_vertices);
      const SlotSums sums = {partials, own, length, 3 * E * W, sum_ranks(own, length)};
      launch_next(stream, add_slots<T>, sums.blocks(), 32 * kSumWarps, sums, E * W, dM1, dM2,
                  D.data());
      launch_expand<Kind>(stream,
                          {.factors = {{dM1, in.lr}, {dM2, in.li}},
                           .terms = 2,
                           .to = {in.d_x},
                           .start = D,
                           .meshes = rows,
                           .depth = w,
                           .cols = w,
                           .shared = true},
                          1);
      launch_project<Kind>(stream,
                           {.factors = {{dM1, in.x}, {dM2, in.x}},
                            .meshes = rows,
                            .length = row_length,
                            .E = w,
                            .W = w,
                            .partials = partials},
                           2);
      const SlotSums last = {partials, rows, row_length, 2 * W * W, sum_ranks(rows, row_length)};
      launch_next(stream, add_slots<T>, last.blocks(), 32 * kSumWarps, last, W * W, in.d_lr,
                  in.d_li, static_cast<float*>(nullptr));
    }
  };
  const double all = (kBackward ? 24.0 : 12.0) * shape.vertices * E * W;
  return {{"for any meshes" +
               (kBackward ? ": slots of " + std::to_string(length) + " vertices" : std::string()),
           3 * kFirstLaunch + all / (512 * cycles() * multiprocessors()), launch, 0}};
}

}  // namespace operators::meshes
