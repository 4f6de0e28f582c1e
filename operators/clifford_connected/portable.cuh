// The fully connected layer on GPUs from compute capability 8.0 on, forward and backward: planes in
// memory, and products of them by mma.sync.
//
// What comes before and after the products is as on Hopper (planes.cuh, gradients.cuh): kernels
// write planes, weights and dz in TF32, as the products of mix.cuh read them. These are
//
//     z_k  = sum over t of P_t,k w[t]      P: (rows, k)    w: transposed before, (columns, k)
//     dP_t,k = dz_k w[t]^T                 dz: (rows, k)   w: as it lies, (columns, k)
//     dw_t = sum over k of P_t,k^T dz_k    P: (k, rows)    dz: (k, columns)
//
// where k is what is summed over. (w is transposed because it is rounded, and so copied, in any
// case.)
#pragma once

#include <algorithm>
#include <bit>

#include "operators/clifford_connected/few_rows.cuh"
#include "operators/clifford_connected/mix.cuh"

namespace operators::clifford_connected {

using namespace primitives;
using namespace clifford;

/// The weights in TF32, each matrix transposed, with zeros up to `stride` rows and columns. A block
/// has a piece of 32 x 32, which is read and written by rows.
__global__ void __launch_bounds__(256)
    round_transposed(const float* w, float* to, int features, int stride) {
  __shared__ float piece[32][32 + 1];
  const size_t t = blockIdx.z;
  const int x = threadIdx.x % 32, row0 = blockIdx.y * 32, col0 = blockIdx.x * 32;
  for (int y = threadIdx.x / 32; y < 32; y += 8) {
    const int row = row0 + y, col = col0 + x;
    const bool inside = row < features && col < features;
    piece[y][x] = inside ? rounded_to_tf32(w[(t * features + row) * features + col]) : 0;
  }
  __syncthreads();
  for (int y = threadIdx.x / 32; y < 32; y += 8) {
    to[(t * stride + col0 + y) * stride + row0 + x] = piece[x][y];
  }
}

/// Makes all planes of a chunk. Each warp of a block makes a unit.
template <typename A>
__global__ void __launch_bounds__(128) make_planes(const __grid_constant__ PlaneMaker<A> maker) {
  maker.make_before(static_cast<int>(blockIdx.x) * 4 + static_cast<int>(threadIdx.x) / 32);
}

/// The layer's memory beside inputs and outputs, and its launches. The batch goes in chunks, whose
/// planes take up to kPlaneBytes.
template <typename A>
class Portable {
 public:
  static constexpr size_t kPlaneBytes = 1 << 30;

  Portable(const CliffordTensors& tensors, const Memory<float>& kept)
      : of(tensors),
        stride(ceil_div(of.layer.features, 32) * 32),
        rows(rows_at_a_time()),
        planes(of.workspace.any<float>(kPlanes<A> * largest().matrix())),
        weights(of.workspace.any<float>(static_cast<size_t>(A::kTriples) * stride * stride)),
        inverses(kept) {}

  /// All but the last chunk have a multiple of 256 rows, and take_planes_apart at most 65535.
  int rows_at_a_time() const {
    const size_t fit = kPlaneBytes / (sizeof(float) * kPlanes<A> * stride);
    const int most = std::clamp(static_cast<int>(fit) / 256, 1, 255) * 256;
    const int chunks = ceil_div(of.layer.batch, most);
    return std::min(of.layer.batch, ceil_div(ceil_div(of.layer.batch, chunks), 256) * 256);
  }
  Chunk chunk(int first) const {
    const int count = std::min(rows, of.layer.batch - first);
    return {of.layer, first, count, ceil_div(count, 32) * 32, stride};
  }
  Chunk largest() const { return chunk(0); }
  int last_chunk() const { return (of.layer.batch - 1) / rows * rows; }

  void make_planes_of(const Chunk& chunk) const {
    PlaneMaker<A> maker{of.x, of.y, planes, chunk, 1, 0};
    maker.together = chunk.row_blocks();
    maker.before = maker.units();
    make_planes<A><<<maker.before / 4, 128, 0, of.stream>>>(maker);
  }

  void forward() const {
    const Layer& layer = of.layer;
    round_transposed<<<dim3(stride / 32, stride / 32, A::kTriples), 256, 0, of.stream>>>(
        of.w, weights.data(), layer.features, stride);
    for (int first = 0; first < layer.batch; first += rows) {
      const Chunk piece = chunk(first);
      make_planes_of(piece);
      MixProduct product{.a = {planes, piece.matrix(), stride},
                         .b = weights_of(),
                         .to = of.out.data() + static_cast<size_t>(first) * layer.features,
                         .to_size = layer.plane(),
                         .to_share = 0,
                         .to_stride = layer.features,
                         .rows = piece.rows,
                         .cols = layer.features,
                         .depth = ceil_div(layer.features, kDepth),
                         .shares = 1,
                         .adds = false,
                         .of = {}};
      // The planes of a grade's first blade, of its second one, and so on.
      for_planes([&](int c, int slot, int blade, int plane, int place) {
        const int at =
            order.plane[c] + (blade - order.blade[c]) * order.slots(c) + (slot - order.slot[c]);
        product.of.pairs[at] = pair(plane, order.triple_of[slot]);
        if (place == 0) {
          product.of.sums[product.of.count++] = sum(at, order.slots(c), blade);
        }
      });
      launch_mix<Beside::k, Beside::k>(product, of.stream);
    }
    if (!layer.normed) return;
    // A thread has `width` features at a time. Warps are a power of two, and as few as have all.
    const int width = layer.features % 4 == 0 ? 4 : 1;
    const auto warps = std::bit_ceil(static_cast<unsigned>(ceil_div(layer.features, 32 * width)));
    launch_clusters_on(of.stream, width == 4 ? finish_rows<A, 4, true> : finish_rows<A, 1, true>, 1,
                       false, dim3(layer.batch, A::kGrades), 32 * std::min(warps, 8u), 0,
                       static_cast<const float*>(of.out), 1, of.out.data(), inverses.data(), layer);
  }

  /// Weights as a product reads them.
  MixMatrices weights_of() const { return {weights, static_cast<size_t>(stride) * stride, stride}; }
  static constexpr int kDepth = kMixDepth;
  static MixPairs::Pair pair(int a, int b) {
    return {static_cast<int16_t>(a), static_cast<int16_t>(b)};
  }
  static MixPairs::Sum sum(int first, int count, int to) {
    return {static_cast<int16_t>(first), static_cast<int16_t>(count), static_cast<int16_t>(to)};
  }
  /// visit(grade, slot, blade, plane, how many slots of the grade come before) for all planes.
  template <typename Visit>
  void for_planes(Visit visit) const {
    for (int c = 0; c < A::kGrades; ++c) {
      for (int slot = order.slot[c]; slot < order.slot[c + 1]; ++slot) {
        for (int blade = order.blade[c]; blade < order.blade[c + 1]; ++blade) {
          const int before = slot - order.slot[c];
          visit(c, slot, blade, order.plane[c] + before * order.blades(c) + blade - order.blade[c],
                before);
        }
      }
    }
  }

  CliffordTensors of;
  int stride, rows;
  Order<A> order = {};
  Memory<float> planes, weights, inverses;
};

/// Its gradients. Backward begins with the chunk that forward ended with, whose planes may still be
/// there. They are multiplied for dw, and then the planes' gradients take their place.
template <typename A>
class PortableBackward {
 public:
  PortableBackward(const Portable<A>& layer, const CliffordGradients& gradients)
      : forward_(layer),
        d_(gradients),
        dz_(workspace().template any<float>(A::kBlades * layer.largest().matrix())),
        weights_(workspace().template any<float>(layer.weights.size())),
        shares_(shares_of(layer)),
        partials_(shares_ > 1 ? workspace().template any<float>(shares_ * d_.dw.size()) : d_.dw) {}

  /// Forward and backward.
  void run() const {
    forward_.forward();
    gradients(true);
  }
  /// Of a forward pass that has left its result and the inverse norms and, if `planes_are_there`,
  /// the last chunk's planes.
  void gradients(bool planes_are_there) const {
    const CliffordTensors& of = forward_.of;
    const int features = of.layer.features;
    const int stride = forward_.stride, threads = std::min(stride, 256);
    round_weights<<<dim3(ceil_div(stride, threads), stride, A::kTriples), threads, 0, of.stream>>>(
        of.w, weights_.data(), features, stride);
    for (int first = forward_.last_chunk(); first >= 0; first -= forward_.rows) {
      const Chunk chunk = forward_.chunk(first);
      result_gradients<A><<<chunk.pitch, 256, 0, of.stream>>>(of.out, d_.d_out, forward_.inverses,
                                                              dz_.data(), first, chunk.stride,
                                                              chunk.matrix(), of.layer);
      if (first != forward_.last_chunk() || !planes_are_there) forward_.make_planes_of(chunk);
      multiply_for_weights(chunk);
      multiply_for_planes(chunk);
      const int width = features % 2 == 0 ? 2 : 1;
      launch_clusters_on(of.stream, width == 2 ? take_planes_apart<A, 2> : take_planes_apart<A, 1>,
                         1, false, dim3(ceil_div(features, 128 * width), chunk.rows), 128, 0,
                         PlaneTaker<A>{of.x, of.y, forward_.planes, d_.dx, d_.dy, chunk});
    }
    add_partials(d_, partials_, shares_, of.stream);
  }

 private:
  const Workspace& workspace() const { return forward_.of.workspace; }

  /// How many blocks share the steps of a tile of dw: more than one where there are few tiles.
  static int shares_of(const Portable<A>& layer) {
    const int side = ceil_div(layer.of.layer.features, 128), tiles = A::kTriples * side * side;
    const int steps = ceil_div(layer.largest().rows, Portable<A>::kDepth);
    return std::clamp(std::min(2 * multiprocessors() / tiles, steps / 8), 1, 16);
  }

  void multiply_for_weights(const Chunk& chunk) const {
    const int features = chunk.layer.features;
    MixProduct product{.a = {forward_.planes, chunk.matrix(), chunk.stride},
                       .b = {dz_, chunk.matrix(), chunk.stride},
                       .to = partials_.data(),
                       .to_size = static_cast<size_t>(features) * features,
                       .to_share = d_.dw.size(),
                       .to_stride = features,
                       .rows = features,
                       .cols = features,
                       .depth = ceil_div(chunk.rows, Portable<A>::kDepth),
                       .shares = shares_,
                       .adds = chunk.first != forward_.last_chunk(),
                       .of = {}};
    const Order<A>& order = forward_.order;
    forward_.for_planes([&](int c, int slot, int blade, int plane, int) {
      product.of.pairs[plane] = forward_.pair(plane, blade);
      if (blade == order.blade[c]) {
        product.of.sums[product.of.count++] =
            forward_.sum(plane, order.blades(c), order.triple_of[slot]);
      }
    });
    launch_mix<Beside::results, Beside::results>(product, forward_.of.stream);
  }

  void multiply_for_planes(const Chunk& chunk) const {
    const int features = chunk.layer.features;
    MixProduct product{
        .a = {dz_, chunk.matrix(), chunk.stride},
        .b = {weights_, static_cast<size_t>(chunk.stride) * chunk.stride, chunk.stride},
        .to = forward_.planes.data(),
        .to_size = chunk.matrix(),
        .to_share = 0,
        .to_stride = chunk.stride,
        .rows = chunk.rows,
        .cols = features,
        .depth = ceil_div(features, Portable<A>::kDepth),
        .shares = 1,
        .adds = false,
        .of = {}};
    forward_.for_planes([&](int, int slot, int blade, int plane, int) {
      product.of.pairs[plane] = forward_.pair(blade, forward_.order.triple_of[slot]);
      product.of.sums[product.of.count++] = forward_.sum(plane, 1, plane);
    });
    launch_mix<Beside::k, Beside::k>(product, forward_.of.stream);
  }

  Portable<A> forward_;
  CliffordGradients d_;
  Memory<float> dz_, weights_;  ///< weights as they lie, in TF32
  int shares_;
  Memory<float> partials_;
};

}  // namespace operators::clifford_connected
