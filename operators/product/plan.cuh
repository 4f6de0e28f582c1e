// From a product to the kernel that computes it. An operator offers its tiles (TileChoice). For
// each tile plan_product() makes several plans: whole tiles, tiles that clusters share (stream-K),
// and slices of k (split-K). plan_slices() and plan_added() make plans of further kinds of slices.
// Each plan gets an estimate in microseconds (estimate.h). `Ways` keeps the plan with the least
// one, or all of them, if they are to be tried.
//
// A block's tile has BM x BN elements of C. A cluster's tile has stack x side of them. Schedules,
// rounds and slices count the tiles of clusters.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "operators/caller.h"
#include "operators/device_facts.h"
#include "operators/estimate.h"
#include "operators/product/estimate.h"
#include "operators/product/layouts/aligned_rows.cuh"
#include "operators/product/product.cuh"
#include "operators/product/sliced.cuh"
#include "primitives/launch.h"

namespace operators::product {

using namespace primitives;
using operators::Caller, operators::Memory;

/// A matrix (rows x cols) as the copy engine can follow it. Where its rows are dense, but not
/// aligned to 16 bytes, it needs a copy, which align_rows makes in each launch: then `copied`.
template <typename T>
struct AlignedRows {
  Memory<T> from;
  int rows, cols, stride;  ///< in elements; a copy's rows are whole lines of 128 bytes
  bool copied;
  Memory<T> copy;

  /// row_stride: how many elements rows are apart, a multiple of 16 bytes; 0: they are dense.
  AlignedRows(const Workspace& workspace, Memory<T> matrix, int64_t row_count, int64_t col_count,
              int64_t row_stride = 0)
      : from(matrix),
        rows(static_cast<int>(row_count)),
        cols(static_cast<int>(col_count)),
        stride(row_stride != 0                ? static_cast<int>(row_stride)
               : cols % (16 / sizeof(T)) == 0 ? cols
                                              : (cols + kLine<T> - 1) / kLine<T> * kLine<T>),
        copied(row_stride == 0 && stride != cols),
        copy(workspace.any<T>(copied ? static_cast<size_t>(rows) * stride : 1)) {}

  const T* data() const { return copied ? copy : from; }
  /// For align_rows, if `copied`.
  RowCopy<T> job() const { return {from, copy, copied ? rows : 0, cols, stride}; }
  /// to_tf32: floats are rounded on the way.
  CUtensorMap map(int box_rows, bool to_tf32 = false) const {
    return tensor_map<T>(data(), rows, cols, box_rows, to_tf32, stride, Reads::often);
  }
  /// How many elements the rows of `from` are apart.
  int64_t own_stride() const { return copied ? cols : stride; }
};

/// Where a product goes to, in boxes of `box_rows` rows (Tile::kOutRows). row_stride as for
/// AlignedRows; where it is not 0, all results have to leave in whole boxes (leaves_in_boxes).
template <typename T>
StoreRounded<T> rounded_to(T* C, int rows, int cols, int box_rows = 64, int64_t row_stride = 0) {
  StoreRounded<T> epilogue{{}, C, rows, cols, row_stride != 0 || cols % 8 == 0};
  if (epilogue.aligned) {
    epilogue.map = tensor_map<T>(C, rows, cols, box_rows, false, row_stride);
  }
  return epilogue;
}

/// Whether the copy engine stores all results of a tile: a consumer has whole boxes of 64 columns.
template <class Tile>
constexpr bool leaves_in_boxes() {
  return Tile::BN % kBoxCols == 0;
}

/// The memory for sums that go through it. Its size is known only after all ways have been offered.
class SharedSums {
 public:
  /// What the way needs that `ways` has accepted last.
  void needs(const Ways& ways, size_t counts, size_t floats) {
    counts_ = ways.most(counts_, counts);
    floats_ = ways.most(floats_, floats);
  }
  /// Ways hold copies of this object. All copies point to the same memory, so they see it.
  void allocate(const Workspace& workspace) {
    if (counts_ > 0) memory_->ended = workspace.zeros<unsigned>(counts_);
    if (floats_ > 0) memory_->partial = workspace.any<float>(floats_);
  }

  /// For launches. `shares`: sums go through memory. What a launch does not need it does not ask
  /// for: zeros would have to be written.
  Exchange exchange(bool shares) const {
    if (!shares) return {};
    return {nullptr, memory_->ended->data(), partial()};
  }
  /// For launches that need no counts.
  float* partial() const { return memory_->partial->data(); }

 private:
  struct Allocated {
    std::optional<Memory<unsigned>> ended;
    std::optional<Memory<float>> partial;
  };
  size_t counts_ = 0, floats_ = 0;
  std::shared_ptr<Allocated> memory_ = std::make_shared<Allocated>();
};

/// The same, and the count by which clusters keep in step: where the L2 cache does not hold what a
/// square of 2048 rows and as many columns reads. (They wait for each other only so long, whether
/// all of them run or not.)
class ExchangeMemory : public SharedSums {
 public:
  explicit ExchangeMemory(const Workspace& workspace)
      : l2_bytes_(device_attribute(cudaDevAttrL2CacheSize)), pace_(workspace.zeros<unsigned>(1)) {}

  template <typename T>
  Exchange in_step(const ProductShape& shape, bool shares) const {
    Exchange all = exchange(shares);
    if (int64_t{2 * 2048 * sizeof(T)} * shape.depth > l2_bytes_) all.pace = pace_;
    return all;
  }

 private:
  int64_t l2_bytes_;
  Memory<unsigned> pace_;
};

/// How many clusters of a product's kernel the current device holds: found once a device.
template <class Work>
int clusters_that_fit_once() {
  return fact_of_device([] {
    constexpr int kBytes = sizeof(typename Work::Shared);
    allow_shared_bytes(product<Work>, kBytes);
    return clusters_that_fit(product<Work>, kClusterBlocks<Work>, Work::Tile::kThreads, kBytes);
  });
}

/// Whether OneRow suits a product of so many rows with tiles of so many: all tiles are in one row.
/// B has `bytes`. Beyond 256 MB nothing of others stays in the L2 cache in any case.
inline bool suits_one_row(int rows, int rows_of_tile, double bytes) {
  return rows <= rows_of_tile && bytes <= 256e6;
}

/// Launches a product of matrices with aligned rows, in as many clusters as its schedule has. Rows
/// that are not aligned are copied before: those of `copies`.
template <class Work, typename T>
void launch_product(const Work& work, const RowCopies<T, 2>& copies, cudaStream_t stream) {
  using Tile = typename Work::Tile;
  constexpr size_t kBytes = sizeof(typename Work::Shared);
  launch_align_rows<T, 2>(copies, stream);
  allow_shared_bytes(product<Work>, kBytes);
  // Early, whatever runs before: the kernel reads and writes after wait_for_previous_kernel() only.
  launch_clusters_on(stream, product<Work>, 1, true, work.schedule.clusters * Tile::kBlocks,
                     Tile::kThreads, kBytes, work);
}

template <class Work, typename T>
void launch_product(const Work& work, const AlignedRows<T>& A, const AlignedRows<T>& B,
                    cudaStream_t stream) {
  launch_product(work, RowCopies<T, 2>{A.job(), B.job()}, stream);
}

/// How a product is computed with some tiles, and how long that should take. `shares`: several
/// clusters have pieces of a tile (Timetable).
struct ProductPlan {
  int clusters;
  bool shares;
  double microseconds;
};

/// How a product is computed in slices of clusters: how many clusters a tile has; in how many
/// slices k is cut; and how long that should take.
struct SlicedPlan {
  int tiles, clusters, slices;
  double microseconds;
};

/// Whether tiles may be taken for a shape.
template <class Tile>
bool suits(const ProductShape& shape) {
  using T = typename Tile::Element;
  return !kIsOneRow<Tile> || suits_one_row(shape.rows, Schedule<Tile>::kRows,
                                           1.0 * sizeof(T) * shape.cols * shape.depth);
}

template <class Tile>
inline constexpr bool kIsTransposed = requires {
  Tile::kSumBoxes;
};

/// What a block of a Tile of 2-byte elements does.
template <class Tile>
constexpr TileWork work_of_tile() {
  constexpr int kLinesOfB = kStepK * Tile::Share::kAllBoxes, kStrip = Tile::kOutRows;
  return {.rows = Tile::BM,
          .cols = Tile::BN,
          .stack = Tile::kStack,
          .side = Tile::kSide,
          .transposed = kIsTransposed<Tile>,
          .read_once = kIsOneRow<Tile>,
          .consumers = Tile::kConsumers,
          .multiplied = 1.0 * Tile::BM * Tile::BN,
          .shared_lines = 1.0 * Tile::BM + kLinesOfB + Tile::kLinesRead,
          .fetched_a = 1.0 * Tile::BM / Tile::kSide,
          .fetched_b = 1.0 * kLinesOfB / Tile::kStack,
          .copied = kIsTransposed<Tile>
                        ? 1.0 * ((Tile::BM + kStrip - 1) / kStrip * kStrip) * Tile::BN
                        : 1.0 * Tile::BM * kLinesOfB};
}

/// How long a product should take with a Tile. The strides are of A's and B's rows, and of C's, in
/// elements. more: further microseconds.
template <class Tile>
Estimate tile_estimate(const ProductShape& shape, int64_t stride_a, int64_t stride_b,
                       int64_t stride_c, double more = 0) {
  TileWork work = work_of_tile<Tile>();
  // No more is fetched than there is.
  work.fetched_a = 1.0 * std::min(Tile::BM, shape.rows) / Tile::kSide;
  work.fetched_b =
      std::min(work.fetched_b, 1.0 * kStepK * ceil_div(shape.cols, kBoxCols) / Tile::kStack);
  constexpr int kBytes = sizeof(typename Tile::Element);
  return estimate_of(kHalfCosts, work, factors_of(work, kHalfTiles),
                     {shape, kBytes, kBytes * stride_a, kBytes * stride_b, kBytes * stride_c},
                     more);
}

/// Everything about a Work that a plan depends on. So the code that makes plans is compiled once,
/// and not for each of a hundred tiles.
struct WorkFacts {
  ClusterTile tile;
  int (*capacity)();        ///< clusters_that_fit_once
  int consumers, of_sum;    ///< of a cluster; elements that a thread hands over
  int shared_bytes;         ///< of a block
  int slices_of_cluster;    ///< 1, or as SlicedProduct says
  std::string_view before;  ///< of a way's name, before "tile 176 x 192"
  int rows, cols;           ///< of the tile, in the order of the name
  bool transposed, read_once, shares_copies;
  int stages, stack, side;
  int gathers = 0;  ///< 1, 2: threads copy A, B (GatheredProduct)

  /// The id of a way. `divided` says how tiles are divided among clusters. `count` is how many
  /// clusters there are if tiles are whole or shared, and else how many slices.
  WayId id(Divided divided, int64_t count) const {
    return way_id({static_cast<int64_t>(divided), count, rows, cols, transposed, read_once, stages,
                   stack, side, slices_of_cluster, shares_copies, gathers});
  }
  /// "tile 176 x 192, transposed"
  std::string name_of_tile() const {
    return std::string(before) + "tile " + std::to_string(rows) + " x " + std::to_string(cols) +
           (transposed ? ", transposed" : "") + (read_once ? ", B read once" : "");
  }
};

/// The facts of a Work whose Tile counts rows and columns of C. TransposedTiles do, too. The tiles
/// in TF32 count those of C^T (facts_of_tf32).
template <class Work>
WorkFacts facts_of() {
  using Tile = typename Work::Tile;
  WorkFacts facts = {.tile = Schedule<Tile>::kTile,
                     .capacity = clusters_that_fit_once<Work>,
                     .consumers = kClusterBlocks<Work> * Tile::kConsumers,
                     .of_sum = Work::Sum::size(),
                     .shared_bytes = sizeof(typename Work::Shared),
                     .slices_of_cluster = 1,
                     .before = "",
                     .rows = Tile::BM,
                     .cols = Tile::BN,
                     .transposed = kIsTransposed<Tile>,
                     .read_once = kIsOneRow<Tile>,
                     .shares_copies = Tile::kBlocks > 1,
                     .stages = 0,
                     .stack = Tile::kStack,
                     .side = Tile::kSide};
  if constexpr (requires { Work::kSlicesOfCluster; }) {
    facts.slices_of_cluster = Work::kSlicesOfCluster;
    facts.of_sum = Work::Part::size();
  }
  return facts;
}

/// A cluster that shares a tile has so many steps at least.
inline constexpr int kLeastSteps = 8;

/// The plans for the Work of a product: one of whole tiles, and others in which tiles are shared;
/// none if no cluster fits, or there are too many tiles.
inline std::vector<ProductPlan> plan_product(const WorkFacts& work, const ProductShape& shape,
                                             const Estimate& estimate) {
  const int capacity = work.capacity();
  if (capacity == 0 || work.tile.tiles_of(shape) > Timetable::kMostTiles) return {};
  const Timetable whole(work.tile, shape, capacity, false);
  const int tiles = whole.tiles, clusters = static_cast<int>(persistent(tiles, capacity));
  std::vector<ProductPlan> plans = {
      {clusters, false, estimate(Division{clusters, 1.0 * whole.rounds, 1.0 * whole.rounds})}};
  const auto shared_by = [&](int of_clusters, double pieces, bool equal) {
    const Timetable shared(work.tile, shape, of_clusters, true);
    std::optional<ProductPlan> plan;
    if (shared.shared > 0 && int64_t{tiles} * whole.steps >= int64_t{kLeastSteps} * of_clusters) {
      const double rounds = 1.0 * tiles / of_clusters;
      plan = {of_clusters, true,
              estimate({.clusters = of_clusters,
                        .rounds = rounds,
                        .finished = std::max(1.0, std::floor(rounds)),
                        .shared = equal ? 0 : rounds - shared.rounds,
                        .places = equal ? 1.0 : shared.places(),
                        .pieces = pieces})};
    }
    return plan;
  };
  if (capacity % tiles != 0) {
    const double pieces = tiles > capacity ? 2 : 1 + std::ceil(1.0 * capacity / tiles);
    if (const auto plan = shared_by(capacity, pieces, false)) plans.push_back(*plan);
  }
  // Slices of equal sizes: so many as suit best. More of them are added up for longer.
  std::optional<ProductPlan> best;
  for (int slices = 2; slices <= capacity / tiles; ++slices) {
    const auto plan = shared_by(tiles * slices, slices, true);
    if (!plan || (best && plan->microseconds >= best->microseconds)) break;
    best = plan;
  }
  if (best) plans.push_back(*best);
  return plans;
}

/// Offers the plans of a Work, which launch(plan) launches. `copies` says what is copied before.
inline void offer_plans(Ways& ways, SharedSums& sums, const WorkFacts& work,
                        const ProductShape& shape, const Estimate& estimate,
                        const std::function<void(const ProductPlan&)>& launch,
                        const std::string& copies = {}) {
  for (const ProductPlan& plan : plan_product(work, shape, estimate)) {
    const Timetable timetable(work.tile, shape, plan.clusters, plan.shares);
    const WayId id = work.id(plan.shares ? Divided::shared : Divided::whole, plan.clusters);
    const bool wanted = ways.offer(plan.microseconds, id, [&] {
      const bool slices = plan.shares && plan.clusters % timetable.tiles == 0;
      return Way{work.name_of_tile() + "; stages: " + std::to_string(work.stages) + "; cluster: " +
                     std::to_string(work.stack) + " x " + std::to_string(work.side) +
                     (slices ? "; slices: " + std::to_string(plan.clusters / timetable.tiles)
                             : "; clusters: " + std::to_string(plan.clusters) +
                                   (plan.shares ? "; tiles shared" : "")) +
                     copies,
                 plan.microseconds, [launch, plan] { launch(plan); }, work.shared_bytes};
    });
    if (!wanted) continue;
    const size_t consumers = work.consumers, places = size_t{2} * plan.clusters;
    sums.needs(ways, plan.shares ? timetable.shared * consumers : 0,
               plan.shares ? places * consumers * 128 * work.of_sum : 0);
  }
}

/// The plan with the number of slices that should be the fastest; none where a slice would have
/// fewer than kLeastSteps steps, or a multiprocessor more than one.
inline std::optional<SlicedPlan> plan_slices(const WorkFacts& work, const ProductShape& shape,
                                             const Estimate& estimate) {
  const int64_t capacity = work.capacity(), tiles = work.tile.tiles_of(shape);
  std::optional<SlicedPlan> best;
  for (int64_t clusters = 1; clusters <= capacity / tiles; ++clusters) {
    const int64_t slices = clusters * work.slices_of_cluster;
    const Timetable timetable(work.tile, shape, static_cast<int>(tiles * slices), true);
    if (slices > timetable.steps / kLeastSteps || timetable.shared == 0) break;
    const double microseconds = estimate(Division{.clusters = static_cast<int>(tiles * slices),
                                                  .rounds = 1.0 / static_cast<double>(slices),
                                                  .pieces = static_cast<double>(clusters),
                                                  .slices_of_cluster = work.slices_of_cluster});
    if (best && microseconds >= best->microseconds) continue;
    best = {static_cast<int>(tiles), static_cast<int>(clusters), static_cast<int>(slices),
            microseconds};
  }
  return best;
}

/// Offers the way in slices of a SlicedProduct, if there is one. launch(plan) launches it.
inline void offer_slices(Ways& ways, SharedSums& sums, const WorkFacts& work,
                         const ProductShape& shape, const Estimate& estimate,
                         const std::function<void(const SlicedPlan&)>& launch) {
  const std::optional<SlicedPlan> found = plan_slices(work, shape, estimate);
  if (!found) return;
  const SlicedPlan plan = *found;
  const bool wanted = ways.offer(plan.microseconds, work.id(Divided::in_slices, plan.slices), [&] {
    return Way{work.name_of_tile() + "; slices: " + std::to_string(plan.slices) +
                   "; of a cluster: " + std::to_string(work.slices_of_cluster) +
                   (work.shares_copies ? "; that share copies: " + std::to_string(work.stack) +
                                             " x " + std::to_string(work.side)
                                       : ""),
               plan.microseconds, [launch, plan] { launch(plan); }, work.shared_bytes};
  });
  if (!wanted) return;
  const bool in_memory = plan.clusters > 1;
  const size_t consumers = size_t{1} * work.consumers * plan.tiles;
  sums.needs(ways, in_memory ? consumers : 0,
             in_memory ? consumers * plan.clusters * 128 * work.of_sum : 0);
}

/// How a product is computed in slices that finish_slices adds up.
struct AddedPlan {
  int tiles, slices;
  double microseconds;

  int clusters() const { return tiles * slices; }
};

/// The plan with the number of slices that should be the fastest. There is none if two slices of
/// each tile do not fit on the device at the same time, or have fewer than kLeast steps. A slice
/// leaves `elements` sums in fp32 in memory.
inline std::optional<AddedPlan> plan_added(const WorkFacts& work, const ProductShape& shape,
                                           const Estimate& estimate, const ProductCosts& cost,
                                           int64_t elements) {
  constexpr int kLeast = 4;  // steps of a slice
  const int64_t capacity = work.capacity(), tiles = work.tile.tiles_of(shape);
  std::optional<AddedPlan> best;
  for (int slices = 2; slices <= capacity / tiles; ++slices) {
    const Timetable timetable(work.tile, shape, static_cast<int>(tiles * slices), true);
    if (timetable.steps < kLeast * slices || timetable.shared == 0) break;
    const double added = 4.0 * slices * static_cast<double>(elements) / memory_rate();
    const double microseconds = estimate({.clusters = timetable.clusters, .rounds = 1.0 / slices}) +
                                cost.added + cost.added_bytes * added;
    if (best && microseconds >= best->microseconds) continue;
    best = {static_cast<int>(tiles), slices, microseconds};
  }
  return best;
}

/// Offers the way in slices that finish_slices adds up, if there is one. launch(plan) launches it.
/// `copies` says what is copied before.
inline void offer_added(Ways& ways, SharedSums& sums, const WorkFacts& work,
                        const ProductShape& shape, const Estimate& estimate,
                        const ProductCosts& cost, int64_t elements,
                        const std::function<void(const AddedPlan&)>& launch,
                        const std::string& copies = {}) {
  const std::optional<AddedPlan> found = plan_added(work, shape, estimate, cost, elements);
  if (!found) return;
  const AddedPlan plan = *found;
  const bool wanted = ways.offer(plan.microseconds, work.id(Divided::added, plan.slices), [&] {
    return Way{
        work.name_of_tile() +
            (work.shares_copies
                 ? "; cluster: " + std::to_string(work.stack) + " x " + std::to_string(work.side)
                 : "") +
            "; slices: " + std::to_string(plan.slices) + ", added up by a second launch" + copies,
        plan.microseconds, [launch, plan] { launch(plan); }, work.shared_bytes};
  });
  if (wanted) sums.needs(ways, 0, static_cast<size_t>(plan.slices * elements));
}

/// Adds up the slices that the kernel before it in the stream leaves.
template <typename T>
void launch_finish_slices(const SlicesToAdd<T>& add, cudaStream_t stream) {
  constexpr int kThreads = SlicesToAdd<T>::kThreads;
  launch_clusters_on(stream, finish_slices<T, kThreads>, 1, true, add.blocks(), kThreads, 0, add);
}

/// Launches a plan of an owner's: function(owner, plan). All ways share one copy of the owner.
template <class Owner, class Plan>
struct LaunchOf {
  std::shared_ptr<const Owner> owner;
  void (*function)(const Owner&, const Plan&);

  void operator()(const Plan& plan) const { function(*owner, plan); }
};

/// The estimate of a product with this epilogue, which may say itself how long it takes.
template <class Tile, class Epilogue>
Estimate estimate_with(const ProductShape& shape, int64_t stride_a, int64_t stride_b,
                       int64_t stride_c, double more) {
  if constexpr (requires { Epilogue::template microseconds<Tile>(shape, Division()); }) {
    return [shape](const Division& division) {
      return Epilogue::template microseconds<Tile>(shape, division);
    };
  } else {
    return tile_estimate<Tile>(shape, stride_a, stride_b, stride_c, more);
  }
}

/// The ways to compute a product: the plans for each Tile. A plan's launch is the Owner's
/// launch<Tile>(plan). The strides are of A's, B's and C's rows, in elements. in_boxes: only those
/// in which all results leave in boxes. more: see tile_estimate(); an epilogue with an
/// estimate of its own has to count that itself.
template <class... Tile>
struct TileChoice {
  template <class Epilogue, class Owner>
  static void offer(Ways& ways, SharedSums& sums, const ProductShape& shape, int64_t stride_a,
                    int64_t stride_b, int64_t stride_c, const std::shared_ptr<const Owner>& owner,
                    bool in_boxes = false, double more = 0) {
    const auto add_plans = [&]<class Each>() {
      if (!suits<Each>(shape) || (in_boxes && !leaves_in_boxes<Each>())) return;
      WorkFacts facts = facts_of<MatrixProduct<Each, Epilogue>>();
      facts.stages = ProductShared<Each>::kStages;
      const LaunchOf<Owner, ProductPlan> launch = {
          owner, [](const Owner& of, const ProductPlan& plan) { of.template launch<Each>(plan); }};
      offer_plans(ways, sums, facts, shape,
                  estimate_with<Each, Epilogue>(shape, stride_a, stride_b, stride_c, more), launch);
    };
    (add_plans.template operator()<Tile>(), ...);
  }
};

}  // namespace operators::product
