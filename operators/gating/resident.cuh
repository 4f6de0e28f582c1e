// The gated layer with weights that stay: lesson 6's *warp specialization* for any shape whose
// weights fit on chip, in one block or divided among several.
//
// What the lesson's kernel leaves open, and what is done about it here:
//
//   - Rows of any length. The copy engine moves boxes only of a matrix whose rows are multiples of
//     16 bytes. But 64 rows one after the other are one piece of memory, whatever their length
//     (LooseRows).
//   - More columns than registers hold. A consumer computes the sums of a tile in panels, from the
//     same tile of x, which is still read once. Where all columns of the weights have no room in
//     one block, blocks side by side divide them.
//   - Less room. Where shared memory cannot hold a tile for each consumer, two or four consumers
//     are a team: they share a tile, and each computes every second or fourth panel.
//   - Results of any width. They leave in boxes, as whole rows one after the other, or, where
//     neither suits out, by threads (Out).
//
// A plan says how many consumers there are, how wide a panel is, and how results leave. Which plan
// is good depends on K and H: an estimate ranks all, and the caller tries the first ones (Way).
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "operators/caller.h"
#include "operators/gating/rows.cuh"

namespace operators::gating {

using operators::Caller, operators::Memory, operators::Way, operators::way_id, operators::Ways;

/// A block stays on its multiprocessor and keeps its columns of both weights. Of out it takes tiles
/// of 64 rows, one for each team of consumers at a time. A team has stages of its own for x, which
/// the producer fills. While one consumer waits for its products another computes sigmoids, and a
/// third waits for its tile; each goes at its own pace, as far as its stages last. Each warp stores
/// its own 16 rows of a tile and does not wait for the other three.
///
/// Two things differ from the pipeline of lesson 3's product: the right factor is not in its stages
/// but stays beside them, and how many stages a team has is known at run time only.
template <class Plan>
__global__ void __launch_bounds__(Plan::kThreads, 1)
    resident_layer(const __grid_constant__ typename Plan::Rows x,
                   const __grid_constant__ LayerOperands<typename Plan::Element> in,
                   const __grid_constant__ OutMaps out, const __grid_constant__ Plan plan) {
#if HOPPER_CODE
  constexpr int kWidth = Plan::kWidth, kConsumers = Plan::kConsumers;
  constexpr int kTeam = Plan::kTeam, kTeams = Plan::kTeams;
  extern __shared__ __align__(1024) char memory[];
  const PlanShared<Plan> shared(memory, plan);
  const int tiles = (in.M + 63) / 64, stride = kTeams * gridDim.x;
  if (threadIdx.x == 0) prepare(shared.stages, TeamWarps::kReleases * kTeam);
  __syncthreads();

  if (warp_of_block() < 4) {
    registers_shrink_to<24>();
    if (warp_of_block() != 0 || !elect_one()) return;
    Ring ring{plan.stages};
    for (int first = blockIdx.x; first < tiles; first += stride) {
      const Ring start = ring;
      for (int team = 0; team < kTeams; ++team) {
        const int tile = first + team * gridDim.x;
        if (tile >= tiles) break;
        const ResidentStages stages = shared.stages.of_team(team, plan.stages);
        Writer writer(stages);
        writer.ring = start;  // each team's own stages are as far as every other's
        for (int s = 0; s < x.stages; ++s) {
          writer.put(x.bytes(64 * tile, s),
                     [&](char* stage, Barrier* arrived) { x.load(stage, 64 * tile, s, arrived); });
        }
        ring = writer.ring;
      }
    }
  } else {
    registers_grow_to<Plan::kRegisters>();
    const int consumer = warp_of_block() / 4 - 1, team = consumer / kTeam;
    const int col0 = blockIdx.y * plan.panels * kWidth;
    const int room = consumer / Plan::kSharers;  // for results
    const ResidentOut<Plan> results{plan, in, out, shared.out + room * plan.out_bytes, room, col0};
    const ResidentStages stages = shared.stages.of_team(team, plan.stages);
    const TeamWarps warps;
    Reader reader(stages, warps);
    shared.W.template load<128 * kConsumers>(in, x, col0, plan.panels, threadIdx.x - 128);
    named_barrier(15, 128 * kConsumers);  // ResidentOut::meet has 1 to 8
    for (int tile = blockIdx.x + team * gridDim.x; tile < tiles; tile += stride) {
      const Ring start = reader.ring;
      for (int panel = consumer % kTeam; panel < plan.panels; panel += kTeam) {
        const bool keep = panel + kTeam < plan.panels;  // the next panel reads the same stages
        const AcrossK<typename Plan::Element> W = shared.W.panel(panel);
        Sum<2 * kWidth> sum;
        shared.W.start(sum, panel);
        reader.ring = start;
        for (int s = 0; s < x.stages; ++s) {
          const auto multiply = [&](const char* stage, bool) { x.start_product(sum, stage, s, W); };
          reader.take(multiply, keep);
        }
        reader.finish(keep);
        results.put(sum, 64 * tile, panel);
      }
    }
    results.end();
  }
#endif
}

/// Where the layer's operands lie.
template <typename T>
struct GatingMemory {
  Memory<T> x, W1, b1, W2, b2, out;      ///< biases may be nullptr
  int64_t x_stride = 0, out_stride = 0;  ///< of rows, in elements, a multiple of 8; 0: dense
  Gate gate = Gate::sigmoid;

  /// For a launch.
  LayerOperands<T> operands(const GatingShape& shape) const {
    return {x,
            W1,
            b1,
            W2,
            b2,
            out,
            static_cast<int>(shape.rows),
            static_cast<int>(shape.channels),
            static_cast<int>(shape.hidden),
            gate};
  }
};

/// The input y of values, where it is not that of gates (two_inputs.cuh).
template <typename T>
struct ValueInput {
  Memory<T> y;
  int64_t channels, stride;  ///< of a row, and from a row to the next; stride 0: dense
  bool gated;                ///< values have the gate's function, too
};

/// The ways to compute the layer with weights that stay: each plan with one block for all columns,
/// and with several side by side. None if the weights do not fit, or the rows are no multiple of 8.
template <typename T>
class ResidentLayer {
 public:
  ResidentLayer(const Caller& caller, GatingMemory<T> memory, GatingShape shape)
      : memory_(std::move(memory)), shape_(shape), stream_(caller.stream), ways_(caller.search) {
    // x comes in boxes if its rows are aligned, and most of a box is x.
    const int64_t K = shape.channels;
    const bool boxed = K % 8 == 0 && 4 * ((K + kStepK - 1) / kStepK * kStepK) <= 7 * K;
    if constexpr (std::is_same_v<T, half>) {
      if (memory_.gate == Gate::sigmoid) {
        boxed ? add_plans<BoxedRows<half, false>>() : add_plans<LooseRows>();
        return;
      }
    }
    if (boxed) add_few_plans<BoxedRows<T, true>>();
  }

  std::vector<Way> ways() const { return ways_.found(); }
  /// Whether one block can hold all weights in some plan.
  bool whole() const { return whole_; }

 private:
  // By how out leaves: columns of a sum, consumers, consumers of a team. Many consumers have few
  // columns each; where the weights leave less room, a plan has fewer consumers, or teams. Each plan
  // is a kernel: there are those that the estimate chooses for some of thousands of shapes.
  template <class Rows>
  void add_plans() {
    add_all<InBoxes<Rows, 16, 4>, InBoxes<Rows, 24, 4>, InBoxes<Rows, 32, 4>, InBoxes<Rows, 48, 4>,
            InBoxes<Rows, 64, 4>, InBoxes<Rows, 64, 3>, InBoxes<Rows, 80, 3>, InBoxes<Rows, 96, 3>,
            InBoxes<Rows, 64, 2>, InBoxes<Rows, 32, 2, 2>, InBoxes<Rows, 56, 4, 2>,
            InRows<Rows, 16, 4>, InRows<Rows, 24, 4>, InRows<Rows, 32, 4>, InRows<Rows, 40, 4>,
            InRows<Rows, 48, 4>, InRows<Rows, 56, 4>, InRows<Rows, 64, 4>, InRows<Rows, 64, 3>,
            InRows<Rows, 72, 3>, InRows<Rows, 32, 2>, InRows<Rows, 96, 2>, InRows<Rows, 128, 2>,
            InRows<Rows, 56, 4, 2>, InPanels<Rows, 56, 4>, InPanels<Rows, 64, 4>,
            InPanels<Rows, 64, 3>, InPanels<Rows, 56, 4, 2>, InPanels<Rows, 32, 2>>();
  }
  /// Of bf16, and of the other gates, some of those in boxes, of narrow panels and wide ones. They
  /// were not chosen by measurements; other shapes are products.
  template <class Rows>
  void add_few_plans() {
    add_all<InBoxes<Rows, 16, 4>, InBoxes<Rows, 32, 4>, InBoxes<Rows, 64, 4>, InBoxes<Rows, 64, 3>,
            InBoxes<Rows, 96, 3>, InBoxes<Rows, 64, 4, 2>>();
  }
  template <class... Plans>
  void add_all() {
    (add<typename Plans::Rows>(Plans::kKind, launch<Plans>), ...);
  }

  /// With `blocks` blocks side by side, which have all columns together.
  template <class Rows>
  using Launch = void (*)(const GatingMemory<T>& memory, const GatingShape& shape,
                          const ResidentSizes& sizes, Rows x, int blocks, cudaStream_t stream);

  template <class Rows>
  void add(const PlanKind& kind, Launch<Rows> launch) {
    const int room = most_shared_bytes();
    for (int boxes = Rows::most_boxes(shape_); boxes > 0; --boxes) {
      const Rows rows(shape_, boxes);
      const int64_t most = std::min<int64_t>(8, Rows::most_fetches(shape_));
      for (int blocks = 1; blocks <= most; ++blocks) {
        const ResidentSizes sizes(kind, rows.stages, rows.stage_bytes(), shape_, blocks, room);
        if (sizes.stages == 0) continue;
        whole_ = whole_ || blocks == 1;
        const double microseconds = sizes.microseconds(kind, shape_, blocks);
        const WayId id = way_id({kind.width, kind.consumers, kind.team, static_cast<int>(kind.out),
                                 sizes.stages, blocks, boxes});
        ways_.offer(microseconds, id, [&] {
          return Way{sizes.name(kind, blocks), microseconds,
                     [launch, memory = memory_, shape = shape_, sizes, rows, blocks,
                      stream = stream_] { launch(memory, shape, sizes, rows, blocks, stream); },
                     static_cast<int>(sizes.bytes(kind))};
        });
      }
    }
  }

  template <class Plan>
  static void launch(const GatingMemory<T>& memory, const GatingShape& shape,
                     const ResidentSizes& sizes, typename Plan::Rows x, int blocks,
                     cudaStream_t stream) {
    const Plan plan(sizes);
    const size_t bytes = sizes.bytes(Plan::kKind);
    allow_shared_bytes(resident_layer<Plan>, static_cast<int>(bytes));
    const unsigned fit = std::max(1, multiprocessors() / blocks);
    const dim3 grid(std::min(blocks_for(shape.rows, 64), fit), blocks);
    x.are_of(memory.x, shape);
    OutMaps out;
    if (Plan::kOut == Out::boxes) {
      out.are_of<T>(memory.out, shape, plan.panels * blocks, Plan::kWidth);
    }
    resident_layer<Plan>
        <<<grid, Plan::kThreads, bytes, stream>>>(x, memory.operands(shape), out, plan);
  }

  GatingMemory<T> memory_;
  GatingShape shape_;
  cudaStream_t stream_;
  Ways ways_;
  bool whole_ = false;
};

}  // namespace operators::gating
