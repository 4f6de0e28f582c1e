// The three products of the fully connected layer on Hopper, *planes first* and *planes beside*:
// what a tile is, which factors it loads, and where its sum goes. Each is a Task of
// tf32_product.cuh.
#pragma once

#include <algorithm>

#include "operators/clifford_connected/planes.cuh"

namespace operators::clifford_connected {

using namespace primitives;
using namespace clifford;

// z of a chunk, and its norm. The left factor is the planes, the right one the `transposed` weights
// (slot, out feature, in feature).
template <typename A, class Tile_, bool kBeside>
struct Forward {
  using Tile = Tile_;
  static constexpr bool kHelped = kBeside;
  static constexpr bool kWaits = true;  ///< for planes, and at a tile's end for other tiles
  PlaneMaker<A> maker;
  RoundNorm<A> norm;
  Progress progress;
  Turns turns;

  Forward(const PlaneMaker<A>& planes, const RoundNorm<A>& round, unsigned* made)
      : maker(planes), norm(round), progress{made, maker.before / 128}, turns(norm.tiles.turns) {}

  // A tile has one blade of some rows. Its sum goes over the triples of the blade's grade.
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
  // At every fourth step, where a patch begins, waits until the planes of this patch are there.
  __device__ void wait(const Place& at, int step) const {
    const int block = at.row / 128;
    if (at.row >= maker.chunk.pitch || step % 4 != 0) return;
    progress.wait(maker.first_patch(block) + step / 4 * maker.next_patch(block), 128);
    global_fence();  // between the makers' writes and the copy engine's reads
  }
  // Pair i is the plane of the tile's blade, and the weights, of the grade's triple i. A block
  // whose rows are beyond the chunk's asks for a plane beyond the last one, so zeros come.
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
  // Scales the sum if its rows' tiles are of one round, and stores it.
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

// The planes' gradients of a chunk, dz_k w[t]^T. The left factor is dz, which is stored transposed,
// the right one the `plain` weights (slot, in feature, out feature). A tile is a part of one plane.
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

// dw[t] of a chunk, the sum of P_t,k^T dz_k over its rows and the blades k. The left factor is the
// planes, read transposed, the right one is dz. Where tiles are few, `splits` clusters share the
// rows of one: each leaves a partial sum.
template <typename A, class Size>
struct WeightGradients {
  using Tile = typename Size::Transposed;
  static constexpr bool kHelped = false;
  Chunk chunk;
  float* dw;  // or partial sums, one after the other
  int splits, row_tiles, cols;
  bool adds;  // to what an earlier chunk has left
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

  // A tile's slot, its share of the rows, and where it is in the matrix. The pairs are the slot's
  // planes and dz of their blades, of which `plane` and `blade` are the first.
  struct Place {
    int slot, split, row, col, plane, blade, begin, end, pairs;
  };
  // First come the slots whose grade has the most blades: all but those of the first and the last
  // grade, which have one blade.
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
