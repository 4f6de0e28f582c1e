// Attention for any shape: the ways to compute it, of which the fastest depends on the shape.
//   - On Hopper, where rows are aligned to 16 bytes: operators/attention/hopper.cuh, with a size of
//     tile for widths up to 64, 128, 192 and 256. Else operators/attention/portable.cuh.
//   - Few queries, of several heads that share keys: these heads are rows of one tile.
//   - Few tiles of rows: the keys are divided among blocks as well, and another kernel puts the
//     parts together.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "operators/attention/estimate.h"
#include "operators/attention/hopper.cuh"
#include "operators/attention/portable.cuh"
#include "operators/caller.h"

namespace operators::attention {

/// Where attention's operands are. `log_sums` may be left out.
template <typename T>
struct AttentionMemory {
  Memory<T> Q, K, V, out;
  std::optional<Memory<float>> log_sums;
  Strides q, k, v, o;

  /// Dense, as (batch, rows, heads, width).
  AttentionMemory(const AttentionShape& shape, const Memory<T>& Q, const Memory<T>& K,
                  const Memory<T>& V, const Memory<T>& out,
                  const std::optional<Memory<float>>& log_sums = {})
      : Q(Q),
        K(K),
        V(V),
        out(out),
        log_sums(log_sums),
        q(Strides::rows_of_heads(shape.queries, shape.heads, shape.width)),
        k(Strides::rows_of_heads(shape.keys, shape.kv_heads, shape.width)),
        v(k),
        o(q) {}
};

/// What every launch needs.
template <typename T>
struct AttentionLaunches {
  AttentionLaunches(const Caller& caller, const AttentionMemory<T>& memory,
                    const AttentionShape& shape, float scale)
      : memory_(memory),
        shape_(shape),
        scale_(scale),
        counters_(caller.workspace.zeros<unsigned>(2)),
        stream_(caller.stream) {}

  struct Plan {
    int pack, parts;
  };

  AttentionOperands<T> operands() const {
    const auto narrow = [](int64_t value) { return static_cast<int>(value); };
    return {memory_.Q,
            memory_.K,
            memory_.V,
            memory_.out,
            memory_.log_sums ? memory_.log_sums->data() : nullptr,
            memory_.q,
            memory_.k,
            memory_.v,
            memory_.o,
            narrow(shape_.queries),
            narrow(shape_.keys),
            narrow(shape_.heads),
            narrow(shape_.group()),
            narrow(shape_.width),
            shape_.causal,
            scale_};
  }

  /// Of all heads and batches, in a row of workspace of `parts` parts.
  int64_t rows() const { return shape_.batch * shape_.heads * shape_.queries; }

  /// Where parts go: the largest of all ways' is allocated once.
  struct PartMemory {
    std::optional<Memory<float>> out;
    std::optional<Memory<PartSum>> sums;
  };

  template <class Tile>
  void launch_hopper(const Plan& plan) const {
    constexpr int kBytes = sizeof(AttentionShared<Tile>);
    allow_shared_bytes(attention_hopper<Tile>, kBytes);
    const AttentionOperands<T> in = operands();
    const int64_t B = shape_.batch, S = shape_.queries, keys = shape_.keys, g = shape_.group();
    const int64_t heads = shape_.kv_heads, width = shape_.width;
    const AttentionMaps maps{
        AttentionMaps::map<T>(in.Q, in.q, B, S, heads, g, width, plan.pack, Tile::kRows),
        AttentionMaps::map<T>(in.K, in.k, B, keys, heads, 1, width, 1, Tile::kKeys),
        AttentionMaps::map<T>(in.V, in.v, B, keys, heads, 1, width, 1, Tile::kKeys),
        AttentionMaps::map<T>(in.out, in.o, B, S, heads, g, width, plan.pack, 64)};
    AttentionSchedule schedule;
    schedule.pack = plan.pack;
    schedule.parts = plan.parts;
    schedule.row_tiles = static_cast<int>(ceil_div(S * plan.pack, int64_t{Tile::kRows}));
    schedule.heads = static_cast<int>(shape_.heads / plan.pack * B);
    schedule.total =
        static_cast<unsigned>(int64_t{schedule.row_tiles} * schedule.heads * plan.parts);
    schedule.keys = keys_in_cache(plan, schedule.row_tiles);
    const unsigned blocks = std::min<unsigned>(schedule.total, Tile::kBlocks * multiprocessors());
    schedule.next = schedule.total > blocks ? counters_.data() : nullptr;
    divide_heads(schedule, blocks);
    // Early: before it there may be the kernel that writes the counters' zeros.
    launch_clusters_on(stream_, attention_hopper<Tile>, 1, schedule.next != nullptr, blocks,
                       Tile::kThreads, kBytes, maps, in, schedule, parts<Tile::kSplit>());
    if constexpr (Tile::kSplit) merge<Tile::kWidth>(plan);
  }

  /// Which heads are walked together. Without a mask all pieces of work are equally long, and with
  /// one nearly so, if there are many more keys than queries. Then heads come one after the other:
  /// so each K and V is read from memory once, and memory is read evenly. Otherwise the long pieces
  /// of a section come first. Only at the end does it matter that blocks end together. So sections
  /// have a quarter of the pieces that are computed at a time. The last section has many pieces,
  /// but no more heads than those whose K and V have room in half of the L2 cache.
  void divide_heads(AttentionSchedule& schedule, int64_t blocks) const {
    schedule.section = 1;
    schedule.sections = schedule.heads;
    if (!shape_.causal || 4 * shape_.queries <= shape_.keys) return;
    const int64_t cached = (int64_t{24} << 20) / (4 * shape_.keys * shape_.width);
    const int64_t fit = std::max<int64_t>(1, cached) * (shape_.group() / schedule.pack);
    const int64_t at_once = ceil_div(blocks, int64_t{schedule.row_tiles} * schedule.parts);
    const int64_t last =
        std::min({std::max<int64_t>(24, 2 * at_once), fit, int64_t{schedule.heads}});
    schedule.section = static_cast<int>(
        std::clamp<int64_t>(ceil_div(at_once, int64_t{4}), std::min<int64_t>(2, fit), fit));
    schedule.sections = static_cast<int>((schedule.heads - last) / schedule.section);
  }

  /// If several blocks read the same K and V, tiles of them stay in the L2 cache. If one block
  /// reads each, nobody needs them again. Then they leave the cache before others, unless they are
  /// several times as large as it.
  KeysInCache keys_in_cache(const Plan& plan, int64_t row_tiles) const {
    if (row_tiles * (shape_.group() / plan.pack) > 1) return KeysInCache::stay;
    const int64_t bytes = 4 * shape_.batch * shape_.kv_heads * shape_.keys * shape_.width;
    return bytes <= int64_t{160} << 20 ? KeysInCache::go_first : KeysInCache::as_usual;
  }

  template <class Tile, bool kSplit>
  void launch_portable(const Plan& plan) const {
    allow_shared_bytes(attention_portable<Tile, kSplit>, Tile::kSharedBytes);
    const int64_t row_tiles = ceil_div(shape_.queries * plan.pack, int64_t{Tile::kRows});
    const dim3 grid(static_cast<unsigned>(row_tiles * (shape_.heads / plan.pack) * shape_.batch),
                    static_cast<unsigned>(plan.parts));
    attention_portable<Tile, kSplit><<<grid, Tile::kThreads, Tile::kSharedBytes, stream_>>>(
        operands(), plan.pack, parts<kSplit>());
    if constexpr (kSplit) merge<Tile::kWidth>(plan);
  }

  template <bool kSplit>
  AttentionParts parts() const {
    if constexpr (!kSplit) return {};
    return {parts_->out->data(), parts_->sums->data()};
  }

  template <int kWidth>
  void merge(const Plan& plan) const {
    const int warps = merging_warps(plan.parts);
    launch_clusters_on(stream_, attention_merge<T, kWidth>, 1, true, blocks_for(rows(), 8 / warps),
                       256, 0, operands(), static_cast<int>(rows()), plan.parts, warps,
                       parts<true>());
  }

  AttentionMemory<T> memory_;
  AttentionShape shape_;
  float scale_;
  Memory<unsigned> counters_;
  cudaStream_t stream_;
  std::shared_ptr<PartMemory> parts_ = std::make_shared<PartMemory>();
};

/// The ways to compute attention, of a shape that is at least 1 everywhere, of a width of at most
/// 256, and whose heads are a multiple of kv_heads. scale, of the logits: positive. out must not
/// overlap what is read.
template <typename T>
class Attention : AttentionLaunches<T> {
  using Launches = AttentionLaunches<T>;
  using Plan = typename Launches::Plan;
  using Launches::memory_, Launches::parts_, Launches::rows, Launches::shape_;

 public:
  Attention(const Caller& caller, const AttentionMemory<T>& memory, const AttentionShape& shape,
            float scale)
      : Launches(caller, memory, shape, scale), ways_(caller.search) {
    plan(caller);
  }

  std::vector<Way> ways() const { return ways_.found(); }

 private:
  bool aligned() const {
    const auto all = [](const Strides& s) { return (s.batch | s.row | s.head) % 8 == 0; };
    return shape_.width % 8 == 0 && all(memory_.q) && all(memory_.k) && all(memory_.v) &&
           all(memory_.o);
  }

  /// How heads are packed and keys are divided, for tiles of `tile_rows` rows and `tile_keys` keys.
  std::vector<Plan> plans(int tile_rows, int tile_keys) const {
    std::vector<Plan> result;
    const int group = static_cast<int>(shape_.group());
    for (int pack = 1; pack <= std::min(group, 64); pack *= 2) {
      if (group % pack != 0) break;
      // Packed is better where it needs fewer tiles of rows.
      const int64_t row_tiles = ceil_div(shape_.queries * pack, tile_rows);
      const int64_t work = row_tiles * (shape_.heads / pack) * shape_.batch;
      if (pack > 1 && ceil_div(shape_.queries, tile_rows) * pack <= row_tiles) continue;
      if (pack == 1 && group > 1 && shape_.queries * std::min(group, 64) <= tile_rows &&
          group % 2 == 0) {
        continue;  // all of the group's rows fit into one tile
      }
      const int64_t tiles = ceil_div(shape_.keys, tile_keys), all = multiprocessors();
      result.push_back({pack, 1});
      for (int64_t rounds = 1; rounds <= 4; rounds *= 2) {
        const int64_t parts = std::min({tiles, rounds * all / work, int64_t{256}});
        if (work >= all || parts <= result.back().parts) continue;
        // A part of one tile is much to begin and to merge for little.
        if (parts == tiles && parts / 2 > result.back().parts) {
          result.push_back({pack, static_cast<int>(parts / 2)});
        }
        result.push_back({pack, static_cast<int>(parts)});
      }
    }
    return result;
  }

  using Launch = void (*)(const Launches&, const Plan&);

  /// The ways with a tile, of keys in parts or (not `split`) whole.
  template <class Tile>
  void add(const std::string& name, int blocks, bool split, int shared_bytes, Launch launch) {
    add(name, cost_of(Tile::kRows, Tile::kKeys, Tile::kWidth, blocks),
        plans(Tile::kRows, Tile::kKeys), split, shared_bytes, launch);
  }
  void add(const std::string& name, const TileCost& cost, const std::vector<Plan>& plans,
           bool split, int shared_bytes, Launch launch) {
    for (const Plan& plan : plans) {
      if ((plan.parts > 1) != split) continue;
      const WayId id = way_id({cost.rows, cost.keys, cost.by_wgmma, plan.pack, plan.parts});
      const bool wanted = ways_.offer(microseconds(cost, plan), id, [&] {
        return Way{.name = name_of(name, plan),
                   .launch = [self = static_cast<const Launches&>(*this), plan,
                              launch] { launch(self, plan); },
                   .shared_bytes = shared_bytes};
      });
      if (wanted) part_rows_ = ways_.most(part_rows_, split ? plan.parts * rows() : 0);
    }
  }

  static std::string name_of(const std::string& name, const Plan& plan) {
    return name + (plan.pack > 1 ? ", " + std::to_string(plan.pack) + " heads a tile" : "") +
           (plan.parts > 1 ? ", keys in " + std::to_string(plan.parts) + " parts" : "");
  }

  template <class Tile, bool kSplit>
  void add_portable() {
    add<Tile>("mma.sync", 0, kSplit, Tile::kSharedBytes, [](const Launches& of, const Plan& plan) {
      of.template launch_portable<Tile, kSplit>(plan);
    });
  }

  /// How long it should take. Without a mask all pieces of work are equally long, and come in
  /// rounds. With a mask they differ, and the longest come first. Blocks do not end together then.
  /// The time lost at the end grows with the length of the last pieces. Memory may take longer than
  /// all that: then its time counts. One multiprocessor alone does not get all of memory's rate.
  double microseconds(const TileCost& of, const Plan& plan) const {
    const double queries = static_cast<double>(shape_.queries), keys = of.keys;
    const double all_keys = static_cast<double>(shape_.keys);
    const double row_tiles =
        static_cast<double>(ceil_div(shape_.queries * plan.pack, int64_t{of.rows}));
    const double heads = static_cast<double>(shape_.heads / plan.pack * shape_.batch);
    const double slots = of.blocks * multiprocessors(), pieces = row_tiles * heads * plan.parts;
    const double on = std::min(pieces, slots);
    const double beside = std::min<double>(of.blocks, std::ceil(pieces / multiprocessors()));
    const double slowed = 1 - kAlone * (1 - beside / of.blocks), step = slowed * of.step;
    const double piece = slowed * of.piece + (shape_.causal ? kMaskCycles : 0);
    const double longest = std::ceil(std::ceil(all_keys / keys) / plan.parts) * step + piece;
    double arithmetic = std::ceil(pieces / slots) * longest;
    if (shape_.causal) {
      // So many queries see a key, on average all but half as many keys; others have a tile, too.
      const double seeing = std::min(queries, all_keys), share = seeing / queries;
      const double tiles = (all_keys - seeing / 2) / keys + 0.5 + 0.5 * of.rows / plan.pack / keys;
      const double steps = std::max(pieces, row_tiles * heads * (share * tiles + 1 - share)) * step;
      double uneven = 0;
      if (pieces > slots) {
        // The shortest pieces come last: their first query sees keys - queries + 1 keys. `lacks`
        // is which part of the last round has no pieces.
        const double shortest =
            std::max(all_keys - queries, 0.0) / keys / plan.parts * step + piece;
        const double lacks = std::ceil(pieces / slots) - pieces / slots;
        uneven = kUnevenEnd * longest + kLastRound * lacks * shortest;
      }
      arithmetic = std::max(longest, (steps + pieces * piece) / on + uneven);
      if (plan.parts > 1 && pieces > slots) arithmetic *= kPartsInRounds;
    }
    const double memory = shape_.bytes() / std::min(memory_rate(), on * kBytesOfOne * cycles());
    double merge = 0;
    if (plan.parts > 1) {
      const double floats = static_cast<double>(rows() * plan.parts) * of.width;
      merge = kMerge + kMergePart * plan.parts + kMergeTraffic * 8 * floats / memory_rate();
    }
    return kFirstPiece + std::max(arithmetic / cycles(), memory) + merge;
  }

  template <int kWidth>
  void add_portable_ways() {
    constexpr int kRows = kWidth <= 128 ? 128 : 64, kKeys = kWidth <= 128 ? 64 : 32;
    using Usual = PortableTile<T, kWidth, kRows, kKeys, 4, true>;
    if (Usual::kSharedBytes <= most_shared_bytes()) {
      add_portable_tiles<kWidth, kRows, kKeys>();
    } else if constexpr (std::is_same_v<T, half> && kWidth > 64) {
      add_portable_tiles<kWidth, 64, kWidth <= 128 ? 32 : 16>();  // compute capability 7.5
    }
  }
  template <int kWidth, int kRows, int kKeys>
  void add_portable_tiles() {
    const auto add = [&]<bool kAligned>() {
      using Tile = PortableTile<T, kWidth, kRows, kKeys, 4, kAligned>;
      static_assert(Tile::kSharedBytes <= 99 << 10);
      add_portable<Tile, false>();
      add_portable<Tile, true>();
    };
    aligned() ? add.template operator()<true>() : add.template operator()<false>();
  }

  template <class Tile>
  void add_hopper(const std::string& name) {
    add<Tile>(name, Tile::kBlocks, Tile::kSplit, sizeof(AttentionShared<Tile>),
              [](const Launches& of, const Plan& plan) { of.template launch_hopper<Tile>(plan); });
  }

  /// Tiles of 64 kConsumers rows. kRowStages: see add_short_tiles().
  template <int kWidth, int kConsumers, int kKeys, int kStages, int kRowStages, bool kTurns,
            bool kSplit>
  void add_tiles() {
    add_hopper<AttentionTile<T, kWidth, kConsumers, kKeys, kStages, kRowStages, kTurns, kSplit>>(
        std::to_string(64 * kConsumers) + " x " + std::to_string(kKeys));
  }

  /// Short sequences: a piece of work has few steps, so what counts is how many pieces are under
  /// way. A stage for rows of Q is free again when its results have been stored. With two of them
  /// the next rows are asked for too late; with more, or with several blocks on a multiprocessor,
  /// they are there in time. (For long sequences more stages would only mean that a block takes
  /// more work early, and that blocks end less evenly.) Of few keys the causal mask hides less in
  /// vain in tiles of 64.
  template <int kWidth, int kConsumers, int kStages, int kRowStages>
  void add_short_tiles() {
    add_tiles<kWidth, kConsumers, 64, kStages, kRowStages, true, false>();
  }

  /// One consumer a block, with so few registers and so little shared memory that kBlocks fit on a
  /// multiprocessor.
  template <int kWidth, int kKeys, int kStages, int kRowStages, int kBlocks>
  void add_small_blocks() {
    add_hopper<AttentionTile<T, kWidth, 1, kKeys, kStages, kRowStages, false, false, kBlocks>>(
        (kBlocks == 2 ? "two of 64 x " : "three of 64 x ") + std::to_string(kKeys));
  }

  /// The same with few queries and many keys, of which blocks have a part each. One block then fits
  /// beside the blocks that will merge the parts.
  template <int kWidth, int kKeys, int kStages>
  void add_parts_in_small_blocks() {
    if (shape_.queries * shape_.group() > 64) return;
    add_hopper<AttentionTile<T, kWidth, 1, kKeys, kStages, 2, false, true, 2>>(
        "two of 64 x " + std::to_string(kKeys));
  }

  void plan(const Caller& caller) {
    const bool hopper = is_hopper() && aligned();
    if (shape_.width <= 64) {
      if (hopper) {
        add_tiles<64, 3, 128, 8, 2, true, false>();
        add_tiles<64, 3, 128, 8, 2, true, true>();
        add_tiles<64, 1, 128, 10, 2, false, true>();
        add_short_tiles<64, 3, 12, 4>();
        add_small_blocks<64, 128, 6, 2, 2>();
        add_small_blocks<64, 64, 8, 5, 2>();
        add_small_blocks<64, 64, 6, 3, 3>();
        add_parts_in_small_blocks<64, 128, 6>();
      }
      add_portable_ways<64>();
    } else if (shape_.width <= 128) {
      if (hopper) {
        add_tiles<128, 2, 128, 5, 2, true, false>();
        add_tiles<128, 2, 128, 5, 2, true, true>();
        add_tiles<128, 1, 128, 5, 2, false, true>();
        add_short_tiles<128, 2, 7, 3>();
        add_small_blocks<128, 64, 4, 3, 2>();
        add_parts_in_small_blocks<128, 64, 5>();
      }
      add_portable_ways<128>();
    } else {
      if (hopper && shape_.width <= 192) {
        add_tiles<192, 2, 80, 4, 2, true, false>();
        add_tiles<192, 2, 64, 5, 2, false, false>();
        add_tiles<192, 1, 96, 4, 2, false, false>();
        add_tiles<192, 2, 96, 3, 2, true, true>();
      } else if (hopper) {
        add_tiles<256, 2, 64, 3, 2, false, false>();
        add_tiles<256, 2, 64, 3, 2, false, true>();
        add_tiles<256, 1, 64, 5, 2, false, false>();
      }
      if (hopper) add_tiles<256, 1, 64, 5, 2, false, true>();
      add_portable_ways<256>();
    }
    if (part_rows_ > 0) {
      const int64_t width = shape_.width <= 64 ? 64 : shape_.width <= 128 ? 128 : 256;  // of tiles
      parts_->out = caller.workspace.any<float>(static_cast<size_t>(part_rows_ * width));
      parts_->sums = caller.workspace.any<PartSum>(static_cast<size_t>(part_rows_));
    }
  }

  int64_t part_rows_ = 0;  // the most rows of results that a way leaves in parts
  Ways ways_;
};

}  // namespace operators::attention
