// The gradient features of lesson 8 in every type, of any size, and of meshes that differ in
// theirs.
//
//     expand            M1 = x Lr^T and M2 = x Li^T, of the spectrum's few rows
//     features          xr, xi, ar and ai of each vertex, and the features; backward P, Q, R and S
//     project           backward: the sums over vertices, in slots
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

/// A pass. `tensors` says, at each launch, where inputs and outputs are. One way, or none, if there
/// are too many tiles for a launch.
template <class Kind, bool kBackward>
std::vector<Way> features_ways(const Workspace& workspace, const MeshesShape& shape,
                               const std::function<FeaturesTensors<typename Kind::T>()>& tensors) {
  using T = typename Kind::T;
  const Meshes meshes = shape.of(nullptr), rows = shape.rows_of_spectra();
  const int64_t E = shape.E, W = shape.W, spectra = shape.spectrum_values();
  const int64_t tiles = tiles_of(E, W), weight_tiles = tiles_of(W, W);
  const int length = slot_length(shape.vertices, 3 * tiles, meshes.count);
  const int row_length = slot_length(rows.vertices, 2 * weight_tiles, 1);
  const int64_t slots = meshes.slots(length), row_slots = rows.slots(row_length);
  constexpr int64_t kCols = FeaturesTile<Kind>::kCols;
  if (!is_a_grid(ceil_div(W, kCols) * meshes.slots(kTile)) ||
      !is_a_grid(ceil_div(W, int64_t{kTile}) * rows.slots(kTile)) ||
      (kBackward && !(is_a_grid(tiles * slots) && is_a_grid(weight_tiles * row_slots)))) {
    return {};
  }
  const auto size = [](bool there, int64_t count) {
    return static_cast<size_t>(there ? count : 1);
  };
  const auto M = workspace.any<T>(size(true, 2 * spectra));
  const auto products = workspace.any<T>(size(kBackward, 4 * shape.vertex_values()));
  const auto partials =
      workspace.any<float>(size(kBackward, std::max(slots * 3 * E * W, row_slots * 2 * W * W)));
  const auto dM = workspace.any<T>(size(kBackward, 2 * spectra));
  const auto D = workspace.any<float>(size(kBackward, spectra));
  const auto launch = [=, stream = workspace.stream] {
    const FeaturesTensors<T> in = tensors();
    const Meshes own = shape.of(in.offsets);
    const int e = static_cast<int>(E), w = static_cast<int>(W);
    T *const M1 = M, *const M2 = M1 + spectra;
    launch_expand<Kind>(stream,
                        {{{{{in.x, in.lr}}, 1}, {{{in.x, in.li}}, 1}},
                         {M1, M2},
                         nullptr,
                         nullptr,
                         rows,
                         w,
                         w,
                         true,
                         true},
                        2);
    const Features<T> of = {in.gr, in.gi, in.x, M1, in.d_out, kBackward ? products.data() : in.out,
                            own,   e,     w};
    const int64_t blocks = ceil_div(W, kCols) * own.slots(kTile);
    launch_next(stream, features<Kind>, static_cast<unsigned>(blocks), kThreads, of);
    if constexpr (kBackward) {
      const int64_t values = shape.vertex_values();
      T *const P = products, *const Q = P + values, *const R = Q + values, *const S = R + values;
      T *const dM1 = dM, *const dM2 = dM1 + spectra;
      launch_project<Kind>(stream,
                           {{{{{in.gr, P}, {in.gi, Q}}, 2},
                             {{{in.gr, Q}, {in.gi, P, true}}, 2},
                             {{{in.gr, R}, {in.gi, S}}, 2}},
                            nullptr,
                            own,
                            length,
                            e,
                            w,
                            partials},
                           3);
      const SlotSums sums = {partials, own, length, 3 * E * W, sum_ranks(own, length)};
      launch_next(stream, add_slots<T>, sums.blocks(), 32 * kSumWarps, sums, E * W, dM1, dM2,
                  D.data());
      launch_expand<Kind>(
          stream,
          {{{{{dM1, in.lr}, {dM2, in.li}}, 2}}, {in.d_x}, nullptr, D, rows, w, w, true, false}, 1);
      launch_project<Kind>(
          stream,
          {{{{{dM1, in.x}}, 1}, {{{dM2, in.x}}, 1}}, nullptr, rows, row_length, w, w, partials}, 2);
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
