// The three products of the fully connected layer on Hopper, *planes first* and *planes beside*:
// what a tile is, which factors it loads, and where its sum goes. A Task of tf32_product.cuh each.
#pragma once

#include <algorithm>

#include "operators/clifford_connected/planes.cuh"

namespace operators::clifford_connected {

using namespace primitives;
using namespace clifford;

// z of a chunk, and its norm. Left factor: planes; right: weights (slot, out feature, in feature).
template <typename A, class Tile_, bool kBeside>
struct Forward {
  using Tile = Tile_;
  static constexpr bool kHelped = kBeside;
  static constexpr bool kWaits = true;  ///< tiles of a round for each other, or for planes
  PlaneMaker<A> maker;
  RoundNorm<A> norm;
  Progress progress;
  Turns turns;

  Forward(const PlaneMaker<A>& planes, const RoundNorm<A>& round, unsigned* made)
      : maker(planes), norm(round), progress{made, maker.before / 128}, turns(norm.tiles.turns) {}

  // A tile has rows of one blade; its sum goes over the triples of the blade's grade.
  struct Place {
    int row, blade, col, grade, end, pairs;
    static constexpr int begin = 0;
  };
  __host__ __device__ Place place(int tile, int rank) const {
    const auto at = norm.tiles.place(tile);
    const int c = Order<A>::grade_of(norm.order.blade, at.blade);
    return {.row = at.row + rank * Tile::BM,
            .blade = at.blade,
            .col = at.col,
            .grade = c,
            .end = ceil_div(maker.chunk.layer.features, Tile::kDepth),
            .pairs = norm.order.slots(c)};
  }
  __host__ int group(int tile) const {
    return maker.chunk.layer.normed ? norm.tiles.group(tile) : tile;
  }
  __device__ void help(int warp, int warps) const { maker.make_beside(warp, warps, progress); }
#if HOPPER_CODE
  // Until the planes of the next 128 features are there.
  __device__ void wait(const Place& at, int step) const {
    const int block = at.row / 128;
    if (at.row >= maker.chunk.pitch || step % 4 != 0) return;
    progress.wait(maker.first_patch(block) + step / 4 * maker.next_patch(block), 128);
    global_fence();  // between the makers' writes and the copy engine's reads
  }
  // Pair i is, of the grade's triple i, the plane of the tile's blade, and the weights. A block
  // whose rows are beyond the chunk's reads zeros: what is beyond the last plane.
  template <class Copy>
  __device__ void load(const Copy& copy, const Place& at, int i, int k) const {
    const Chunk& chunk = maker.chunk;
    const Order<A>& order = norm.order;
    const int c = at.grade, own = at.blade - order.blade[c];
    const int plane =
        at.row < chunk.pitch ? order.plane[c] + i * order.blades(c) + own : kPlanes<A>;
    copy.left(plane * chunk.pitch + at.row, k);
    copy.right((order.slot[c] + i) * chunk.stride + at.col, k);
  }
  // When a tile is multiplied: the norm, if it is to be had here, and z.
  __device__ void store(Sum<Tile::BN>& sum, const Place& at, int row0) const {
    normalize(sum, at, row0);
    write(sum, at, row0);
  }
  __device__ void normalize(Sum<Tile::BN>& sum, const Place& at, int row0) const {
    const Chunk& chunk = maker.chunk;
    if (chunk.layer.normed && at.row < chunk.pitch && norm.together(at.row, at.grade)) {
      norm.scale(sum, at.row + row0, at.col, at.blade, at.grade, 1 + row0 / 64);
    }
  }
  __device__ void write(const Sum<Tile::BN>& sum, const Place& at, int row0) const {
    const Chunk& chunk = maker.chunk;
    float* const to = norm.out + at.blade * chunk.layer.plane() +
                      static_cast<size_t>(chunk.first) * chunk.layer.features;
    store_sum<Tile>(sum, to, at.row + row0, at.col, chunk.rows, chunk.layer.features,
                    chunk.layer.features, false);
  }
#endif
};

// The planes' gradients of a chunk, dz_k w[t]^T: left factor dz, transposed; right: weights (slot,
// in feature, out feature). A tile has rows of one plane.
template <typename A, class Size>
struct PlaneGradients {
  using Tile = typename Size::Transposed;
  static constexpr bool kHelped = false;
  static constexpr int kRows = Tile::BM * Tile::kBlocks;
  Chunk chunk;
  float* d;
  int cols;
  Turns turns;
  Order<A> order;

  PlaneGradients(const Chunk& rows, float* to, int clusters)
      : chunk(rows), d(to), cols(ceil_div(chunk.layer.features, Tile::BN)) {
    const int tiles = ceil_div(chunk.rows, kRows) * kPlanes<A> * cols;
    turns = {tiles, std::min(tiles, clusters)};
  }

  struct Place {
    int row, plane, blade, slot, col, end;
    static constexpr int begin = 0, pairs = 1;
  };
  __host__ __device__ Place place(int tile, int rank) const {
    const int plane = tile / cols % kPlanes<A>, c = Order<A>::grade_of(order.plane, plane);
    const int i = plane - order.plane[c];
    return {.row = tile / (kPlanes<A> * cols) * kRows + rank * Tile::BM,
            .plane = plane,
            .blade = order.blade[c] + i % order.blades(c),
            .slot = order.slot[c] + i / order.blades(c),
            .col = tile % cols * Tile::BN,
            .end = ceil_div(chunk.layer.features, Tile::kDepth)};
  }
#if HOPPER_CODE
  template <class Copy>
  __device__ void load(const Copy& copy, const Place& at, int, int k) const {
    copy.left(at.row, at.blade * chunk.stride + k);
    copy.right(at.slot * chunk.stride + at.col, k);
  }
  __device__ void store(const Sum<Tile::BN>& sum, const Place& at, int row0) const {
    store_sum<Tile>(sum, d + at.plane * chunk.matrix(), at.row + row0, at.col, chunk.rows,
                    chunk.stride, chunk.stride, false);
  }
#endif
};

// dw[t] of a chunk, the sum of P_t,k^T dz_k over its rows and the blades k: left factor planes,
// transposed; right: dz. Where there are few tiles, `splits` clusters share the rows of one.
template <typename A, class Size>
struct WeightGradients {
  using Tile = typename Size::Transposed;
  static constexpr bool kHelped = false;
  Chunk chunk;
  float* dw;  // or partial sums, one after the other
  int splits, row_tiles, cols;
  bool adds;
  Turns turns;
  Order<A> order;

  WeightGradients(const Chunk& rows, float* to, int shares, bool adds_up, int clusters)
      : chunk(rows),
        dw(to),
        splits(shares),
        row_tiles(ceil_div(features(), Tile::BM * Tile::kBlocks)),
        cols(ceil_div(features(), Tile::BN)),
        adds(adds_up) {
    const int tiles = A::kTriples * splits * row_tiles * cols;
    turns = {tiles, std::min(tiles, clusters)};
  }
  __host__ __device__ int features() const { return chunk.layer.features; }

  // Of a slot, and of rows of a share. The pairs are planes of the slot and dz of their blades:
  // `plane` and `blade` are the first of them.
  struct Place {
    int slot, split, row, col, plane, blade, begin, end, pairs;
  };
  // Slots whose grade has the most blades first: all but those of the scalar and of the last one.
  __host__ __device__ Place place(int tile, int rank) const {
    const int after = order.slot[A::kGrades - 1], first = order.slot[1];
    const int i = tile / (splits * row_tiles * cols);
    const int slot = i < after - first ? first + i : i < after ? i - (after - first) : i;
    const int c = Order<A>::grade_of(order.slot, slot), split = tile / (row_tiles * cols) % splits;
    const int steps = ceil_div(chunk.rows, Tile::kDepth);
    return {.slot = slot,
            .split = split,
            .row = (tile / cols % row_tiles * Tile::kBlocks + rank) * Tile::BM,
            .col = tile % cols * Tile::BN,
            .plane = order.plane[c] + (slot - order.slot[c]) * order.blades(c),
            .blade = order.blade[c],
            .begin = split * steps / splits,
            .end = (split + 1) * steps / splits,
            .pairs = order.blades(c)};
  }
#if HOPPER_CODE
  template <class Copy>
  __device__ void load(const Copy& copy, const Place& at, int i, int k) const {
    copy.left(at.row, (at.plane + i) * chunk.pitch + k);
    copy.right((at.blade + i) * chunk.stride + at.col, k);
  }
  __device__ void store(const Sum<Tile::BN>& sum, const Place& at, int row0) const {
    const size_t matrix = static_cast<size_t>(at.split) * A::kTriples + order.triple_of[at.slot];
    store_sum<Tile>(sum, dw + matrix * features() * features(), at.row + row0, at.col, features(),
                    features(), features(), adds);
  }
#endif
};

}  // namespace operators::clifford_connected
