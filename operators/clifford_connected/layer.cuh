// The fully connected layer on Hopper, forward and backward: its memory beside inputs and outputs,
// its launches, and how the batch is divided into chunks.
#pragma once

#include <algorithm>
#include <cmath>

#include "operators/clifford_connected/few_rows.cuh"
#include "operators/clifford_connected/tasks.cuh"

namespace operators::clifford_connected {

// *planes first* or, with kBeside, *planes beside*, forward; or the product of few rows, where that
// should be faster. The batch goes in chunks of rows, whose planes take up to kPlaneBytes. For each
// chunk forward() launches make_ready, then the product, then normalize_rest, if some rows' tiles
// are of several rounds.
template <typename A, bool kBeside>
struct Ready {
  static constexpr size_t kPlaneBytes = 1 << 30;

  Ready(const CliffordTensors& tensors, const Memory<float>& kept)
      : of(tensors),
        stride(of.layer.features < 128 ? ceil_div(of.layer.features, 32) * 32
                                       : ceil_div(of.layer.features, 128) * 128),
        rows(rows_at_a_time()),
        plan(plan_of(chunk(0, rows))),
        few(of, rows == of.layer.batch ? plan.cycles : -INFINITY),
        planes(of.workspace.any<float>(kPlanes<A> * largest().matrix())),
        weights(of.workspace.any<float>(
            few.used ? 1 : static_cast<size_t>(A::kTriples) * stride * stride)),
        inverses(kept),
        squares(of.workspace.any<float>(static_cast<size_t>(A::kBlades) * largest().pitch *
                                        ceil_div(of.layer.features, 128))),
        made(of.workspace.any<unsigned>(largest().patches() + largest().pitch / 64 * A::kGrades)) {}

  // How many rows a chunk has. There are as few chunks as kPlaneBytes allows, about equally long,
  // or one more if that should take clearly fewer cycles. All but the last have a multiple of 256
  // rows. A grid has at most 65535 blocks along y, and backward has a row of blocks for each row:
  // so `most` is at most 255 x 256.
  int rows_at_a_time() const {
    const int batch = of.layer.batch;
    const size_t fit = kPlaneBytes / (sizeof(float) * kPlanes<A> * stride);
    const int most = std::clamp(static_cast<int>(fit) / 256, 1, 255) * 256;
    const int least = ceil_div(batch, most);
    const auto rows_of = [&](int chunks) {
      return std::min(batch, ceil_div(ceil_div(batch, chunks), 256) * 256);
    };
    const auto cycles = [&](int rows) {
      const int whole = batch / rows, rest = batch % rows;
      return whole * plan_of(chunk(0, rows)).cycles +
             (rest > 0 ? plan_of(chunk(0, rest)).cycles : 0);
    };
    const int fewest = rows_of(least), more = rows_of(least + 1);
    return least > 1 && cycles(more) < 0.97 * cycles(fewest) ? more : fewest;
  }
  Chunk chunk(int first, int count) const {
    return {of.layer, first, count, ceil_div(count, 128) * 128, stride};
  }
  Chunk chunk(int first) const {
    return few.used ? few.chunk : chunk(first, std::min(rows, of.layer.batch - first));
  }
  Chunk largest() const { return chunk(0); }
  double bytes() const {
    return planes.bytes() + weights.bytes() + made.bytes() + few.bytes() +
           (of.layer.normed ? inverses.bytes() + squares.bytes() : 0);
  }

  struct Plan : TilePlan {
    bool by_rows;
  };
  static Plan plan_of(const Chunk& chunk) {
    const auto plan = [&](bool by_rows) {
      const auto make = [=](auto tile, int clusters) {
        const TileOrder<A> order(tile, chunk.layer, chunk.rows, by_rows, clusters);
        const RoundNorm<A> norm{nullptr, nullptr, nullptr, chunk, order, {}};
        const PlaneMaker<A> maker{nullptr, nullptr, nullptr, chunk, 1, 0};
        return Forward<A, decltype(tile), kBeside>(maker, norm, nullptr);
      };
      return Plan{plan_tiles(make), by_rows};
    };
    // Row by row the norm is easier (see RoundNorm), so that order may take a little longer.
    const Plan by_rows = plan(true), longest_first = plan(false);
    return by_rows.cycles <= 1.02 * longest_first.cycles ? by_rows : longest_first;
  }
  RoundNorm<A> norm(const Chunk& chunk) const {
    const auto order = [&](auto tile) {
      return TileOrder<A>(tile, chunk.layer, chunk.rows, plan.by_rows, plan.clusters);
    };
    unsigned* const counters = made.data() + chunk.patches();
    return {of.out, inverses, squares, chunk, with_tile(plan, order), {counters}};
  }
  // Before the product all planes are made, or with `beside` those of 256 features of the first
  // round's rows.
  PlaneMaker<A> maker(const Chunk& chunk, bool beside) const {
    PlaneMaker<A> result{of.x, of.y, planes, chunk, 1, 0};
    result.together = std::min(norm(chunk).tiles.rows_of_round() / 128, chunk.row_blocks());
    const int first = result.together * std::min(chunk.slices(), 2) * 128;
    result.before = beside ? first : result.units();
    return result;
  }
  // Launches make_ready. It makes the planes that come before the product and, with those of the
  // first chunk, rounds the weights: to `transposed`, `plain`, or both.
  void prepare(const Chunk& chunk, bool beside, float* transposed, float* plain) const {
    const PlaneMaker<A> planes_of = maker(chunk, beside);
    const int plane_blocks = std::max(planes_of.before / 4, 1);
    const WeightTransposer<A> transposer{of.w, transposed, plain, of.layer.features, stride, {}};
    const bool rounds = transposed != nullptr || plain != nullptr;
    launch_clusters_on(of.stream, make_ready<A>, 1, true,
                       plane_blocks + (rounds ? transposer.blocks() : 0), 128, 0, planes_of,
                       plane_blocks, transposer, made.data(), static_cast<int>(made.size()));
  }
  auto work(const Chunk& chunk) const {
    return [=, this](auto tile, int) {
      return Forward<A, decltype(tile), kBeside>(maker(chunk, kBeside), norm(chunk), made);
    };
  }
  void forward(float* plain_weights) const {
    if (few.used) return few.forward(planes, inverses);
    for (int first = 0; first < of.layer.batch; first += rows) {
      const Chunk piece = chunk(first);
      prepare(piece, kBeside, first == 0 ? weights.data() : nullptr,
              first == 0 ? plain_weights : nullptr);
      multiply_tf32(of, {planes, int64_t{kPlanes<A>} * piece.pitch, stride},
                    {weights, int64_t{A::kTriples} * stride, stride}, plan, work(piece));
      normalize_rest_of(norm(piece), of.stream);
    }
  }

  CliffordTensors of;
  int stride, rows;
  Plan plan;
  Few<A> few;
  Memory<float> planes, weights, inverses, squares;
  Memory<unsigned> made;
};

// Backward, after forward or by itself. It begins with the last chunk, whose planes forward has
// left. They are multiplied for dw, and then the planes' gradients take their place. For each other
// chunk, and by itself for the last one, too, make_ready makes the planes again: that moves some
// bytes, where z would take a product.
template <typename A, bool kBeside>
struct ReadyBackward {
  ReadyBackward(const Ready<A, kBeside>& ready, const CliffordGradients& gradients)
      : forward(ready),
        d(gradients),
        dz(forward.of.workspace.template any<float>(A::kBlades * forward.largest().matrix())),
        weights(forward.of.workspace.template any<float>(forward.weights.size())),
        partials(d.dw),
        plan_planes(plan_tiles(plane_work(forward.largest()))),
        plan_weights(plan_tiles(weight_work(forward.largest()))) {
    splits = best_splits(plan_weights, forward.chunk(last_chunk()).rows / 128, d.dw.bytes(),
                         [&](int shares) {
                           splits = shares;
                           return plan_tiles(weight_work(forward.largest()));
                         });
    if (splits > 1) {
      partials =
          forward.of.workspace.template any<float>(static_cast<size_t>(splits) * d.dw.size());
    }
  }

  double bytes() const {
    return forward.bytes() + dz.bytes() + weights.bytes() + (splits > 1 ? partials.bytes() : 0);
  }
  int last_chunk() const { return (forward.of.layer.batch - 1) / forward.rows * forward.rows; }
  auto plane_work(const Chunk& chunk) const {
    return [=, this](auto tile, int clusters) {
      return PlaneGradients<A, decltype(tile)>(chunk, forward.planes, clusters);
    };
  }
  auto weight_work(const Chunk& chunk) const {
    return [=, this](auto tile, int clusters) {
      return WeightGradients<A, decltype(tile)>(chunk, partials, splits,
                                                chunk.first != last_chunk(), clusters);
    };
  }
  /// Forward and backward.
  void run() const {
    forward.forward(weights);
    gradients(true);
  }
  /// Of a forward pass that has left its result and the inverse norms and, if `planes_are_there`,
  /// the planes and weights as well.
  void gradients(bool planes_are_there) const {
    const CliffordTensors& of = forward.of;
    const int features = of.layer.features;
    if (forward.few.used && !planes_are_there) forward.few.prepare(forward.planes);
    for (int first = last_chunk(); first >= 0; first -= forward.rows) {
      const Chunk chunk = forward.chunk(first);
      const Tf32Factor dz_of{dz, int64_t{A::kBlades} * chunk.stride, chunk.pitch};
      launch_clusters_on(
          of.stream, features % 4 == 0 ? turn_result_gradients<A, 4> : turn_result_gradients<A, 1>,
          1, true, dim3(chunk.pitch / kResultRows, A::kGrades), kResultThreads, 0,
          static_cast<const float*>(of.out), static_cast<const float*>(d.d_out),
          static_cast<const float*>(forward.inverses), dz.data(), chunk);
      const bool is_last = first == last_chunk();
      if (!forward.few.used && !(is_last && planes_are_there)) {
        forward.prepare(chunk, false, nullptr, is_last ? weights.data() : nullptr);
      }
      multiply_tf32(of, {forward.planes, int64_t{kPlanes<A>} * chunk.pitch, chunk.stride}, dz_of,
                    plan_weights, weight_work(chunk));
      if (forward.few.used) {
        forward.few.gradients(d.d_out, forward.inverses, forward.planes);
      } else {
        multiply_tf32(of, dz_of, {weights, int64_t{A::kTriples} * chunk.stride, chunk.stride},
                      plan_planes, plane_work(chunk));
      }
      const int width = features % 2 == 0 ? 2 : 1;
      launch_clusters_on(of.stream, width == 2 ? take_planes_apart<A, 2> : take_planes_apart<A, 1>,
                         1, true, dim3(ceil_div(features, 128 * width), chunk.rows), 128, 0,
                         PlaneTaker<A>{of.x, of.y, forward.planes, d.dx, d.dy, chunk});
    }
    add_partials(d, partials, splits, of.stream);
  }

  Ready<A, kBeside> forward;
  CliffordGradients d;
  int splits = 1;
  Memory<float> dz, weights, partials;
  TilePlan plan_planes, plan_weights;
};

}  // namespace operators::clifford_connected
