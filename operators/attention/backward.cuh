// The gradients of attention for any shape whose width is a multiple of 8 up to 256, and whose rows
// are aligned to 16 bytes. On Hopper by operators/attention/backward_hopper.cuh, or, above 128, by
// operators/attention/backward_wide.cuh; else by operators/attention/backward_portable.cuh. There
// are tiles for widths up to 64, 128 and 256.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "operators/attention/backward_hopper.cuh"
#include "operators/attention/backward_portable.cuh"
#include "operators/attention/backward_short.cuh"
#include "operators/attention/backward_wide.cuh"
#include "operators/attention/estimate.h"
#include "operators/caller.h"

namespace operators::attention {

/// The most columns of a head, and queries of a tile: dQ is added up in whole tiles.
inline constexpr int64_t kBackwardWidth = 256, kBackwardQueries = 128;
inline constexpr int64_t kBackwardKeys = 128;  ///< of an item, on Hopper

/// Where the operands of the gradients are, and how they lie.
template <typename T>
struct BackwardMemory {
  Memory<T> d_out, Q, K, V, out;
  Memory<float> log_sums;
  Memory<T> dQ, dK, dV;
  Strides d_o, q, k, v, o, dq, dk, dv;
};

/// What every launch needs.
template <typename T>
class BackwardLaunches {
 public:
  /// in_order: each number of dQ has to be added up in the order of the keys.
  BackwardLaunches(const Caller& caller, const BackwardMemory<T>& memory,
                   const AttentionShape& shape, float scale, bool in_order)
      : memory_(memory),
        shape_(shape),
        scale_(scale),
        short_keys_(is_hopper() ? short_keys() : 0),
        whole_(is_hopper() &&
               (short_keys_ > 0 ||
                (shape.keys <= kBackwardKeys && (!shape.causal || shape.queries <= shape.keys)))),
        in_order_(in_order || order_pays()),
        division_(is_hopper() && short_keys_ == 0 ? division(in_order_) : BackwardDivision{}),
        counted_(in_order_ && !whole_ ? counts() : 0),
        counts_(caller.workspace.any<unsigned>(
            static_cast<size_t>(short_keys_ > 0 ? 0 : counted_ + 1))),
        row_sums_(caller.workspace.any<float>(static_cast<size_t>(short_keys_ > 0 ? 0 : rows()))),
        dq_sums_(caller.workspace.any<float>(
            static_cast<size_t>(whole_ ? 0 : rows_of_sums() * tile_width()))),
        kv_sums_(caller.workspace.any<float>(
            static_cast<size_t>(division_.splits > 1 ? division_.splits * sums_of_keys() : 0))),
        stream_(caller.stream) {}

  template <class Tile>
  void launch_hopper() const {
    constexpr bool kInOrder = Tile::kInOrder;
    constexpr int kBytes = sizeof(BackwardHopperShared<Tile>);
    const auto kernel = attention_backward_hopper<Tile>;
    allow_shared_bytes(kernel, kBytes);
    const BackwardOperands<T> in = operands<Tile>(kInOrder, multiprocessors());
    const BackwardMaps maps = maps_of<Tile>(in);
    constexpr int kWidth = Tile::kWidth == 96 ? 128 : Tile::kWidth;  // as the sums lie
    start<kWidth>(in, kInOrder || whole_ ? 0 : rows_of_sums());
    const int64_t blocks = std::min<int64_t>(items<Tile>(), multiprocessors());
    launch_clusters_on(stream_, kernel, 1, true, blocks_for(blocks, 1), Tile::kThreads, kBytes,
                       maps, in);
    finish<BackwardHopperTile<T, kWidth>>(in);
  }

  /// One launch, where a block has all keys.
  template <class Tile>
  void launch_short() const {
    constexpr int kBytes = sizeof(BackwardShortShared<Tile>);
    const auto kernel = attention_backward_short<Tile>;
    allow_shared_bytes(kernel, kBytes);
    const BackwardOperands<T> in = operands<Tile>(false, multiprocessors());
    const BackwardShortMaps maps{maps_of<Tile>(in), map_of_queries<Tile>(in.out, in.o)};
    const int64_t blocks = std::min<int64_t>(sequences(), multiprocessors());
    launch_clusters_on(stream_, kernel, 1, true, blocks_for(blocks, 1), Tile::kThreads, kBytes,
                       maps, in);
  }

  /// For widths above 128.
  template <class Tile, bool kInOrder>
  void launch_wide() const {
    constexpr int kBytes = sizeof(BackwardWideShared<Tile>);
    const auto kernel = attention_backward_wide<Tile, kInOrder>;
    allow_shared_bytes(kernel, kBytes);
    const BackwardOperands<T> in = operands<Tile>(kInOrder, multiprocessors() / Tile::kBlocks);
    const BackwardMaps maps = maps_of<Tile>(in);
    start<Tile::kWidth>(in, kInOrder || whole_ ? 0 : rows_of_sums());
    launch_clusters_on(stream_, kernel, Tile::kBlocks, true,
                       blocks_for(items<Tile>() * Tile::kBlocks, 1), Tile::kThreads, kBytes, maps,
                       in);
    finish<Tile>(in);
  }

  template <class Tile, bool kInOrder>
  void launch_portable() const {
    constexpr int kBytes = sizeof(BackwardShared<Tile>);
    allow_shared_bytes(attention_backward_portable<Tile, kInOrder>, kBytes);
    const BackwardOperands<T> in = operands<Tile>(kInOrder, multiprocessors());
    start<Tile::kWidth>(in, rows_of_sums());
    attention_backward_portable<Tile, kInOrder>
        <<<portable_blocks<Tile, kInOrder>(), Tile::kThreads, kBytes, stream_>>>(in);
    const int64_t tiles = ceil_div(shape_.queries, int64_t{Tile::kQueries});
    attention_finish_dq<Tile>
        <<<blocks_for(shape_.batch * shape_.heads * tiles, 1), 32 * Tile::kPairs, 0, stream_>>>(in);
  }

  /// How many keys a block of launch_short() should have; 0: another way is taken.
  int64_t keys_of_block() const { return short_keys_; }
  /// Whether that is how it is done.
  bool in_order() const { return in_order_; }
  /// For people: which tiles of keys are divided, if any.
  std::string division_words() const {
    if (divided() == 0) return "";
    return ", " + std::to_string(divided()) + " of " + std::to_string(all_key_tiles()) +
           " tiles of keys divided " +
           (division_.run > 0 ? "in runs of " + std::to_string(division_.run) + " steps"
                              : "by " + std::to_string(division_.splits));
  }

 private:
  int64_t rows() const { return shape_.batch * shape_.heads * shape_.queries; }
  int64_t rows_of_sums() const {
    return shape_.batch * shape_.heads * ceil_div(shape_.queries, kBackwardQueries) *
           kBackwardQueries;
  }
  /// For each part of dQ, of which a tile of 64 queries has four at most, and one of 16 has one.
  int64_t counts() const { return rows_of_sums() / 16; }
  int64_t tile_width() const { return shape_.width <= 64 ? 64 : shape_.width <= 128 ? 128 : 256; }

  int64_t sequences() const { return shape_.kv_heads * shape_.batch; }

  /// Tiles of keys, of Hopper's kernels.
  int64_t key_tiles() const { return ceil_div(shape_.keys, kBackwardKeys); }
  int64_t all_key_tiles() const { return sequences() * key_tiles(); }
  /// Tiles of keys that are divided.
  int64_t divided() const { return all_key_tiles() - plain(); }
  int64_t plain() const { return division_.splits > 1 ? division_.plain : all_key_tiles(); }
  /// How many numbers a split of each of these leaves.
  int64_t sums_of_keys() const { return 2 * divided() * kBackwardKeys * tile_width(); }
  BackwardTiles tiles_of_keys() const {
    // A step of 128 queries takes half as long if there are at most 64.
    const double steps = static_cast<double>(shape_.group() * ceil_div(shape_.queries, 64)) /
                         (shape_.width <= 64 ? 2 : 1);
    const double all = static_cast<double>(shape_.queries) * static_cast<double>(shape_.keys);
    return {.tiles = all_key_tiles(),
            .places = multiprocessors() / (shape_.width <= 128 ? 1 : 2),
            .count = shape_.group() * ceil_div(shape_.queries, shape_.width <= 64 ? 128 : 64),
            .steps = steps,
            .mean_steps = shape_.causal ? std::max(1.0, steps * shape_.pairs() / all) : steps,
            .step = shape_.width <= 64 ? kBackwardStep64 : kBackwardStep,
            .bytes = 8.0 * kBackwardKeys * static_cast<double>(tile_width())};
  }
  /// Bytes of Q and d_out that items of a head of K and V read.
  int64_t bytes_of_sequence() const {
    return 2 * int64_t{sizeof(T)} * shape_.group() * shape_.queries * shape_.width;
  }
  /// Whether blocks may have runs of steps. Blocks of the same head are at different queries then,
  /// so what they read has to fit into the L2 cache.
  bool may_run() const {
    return !shape_.causal && shape_.width <= 128 && sequences() * bytes_of_sequence() <= 30 << 20;
  }
  /// Which tiles of keys of Hopper's kernels are divided among several blocks, or clusters.
  BackwardDivision division(bool in_order) const {
    return divide(tiles_of_keys(), !in_order && may_run());
  }
  /// How many keys a block has of attention_backward_short, if that is the way, or 0.
  int64_t short_keys() const {
    if (shape_.width > 64 || shape_.keys > kShortKeys.back().keys) return 0;
    const BackwardTiles tiles = tiles_of_keys();
    const auto& of = *std::ranges::find_if(
        kShortKeys, [&](const ShortKeys& each) { return shape_.keys <= each.keys; });
    const double steps = static_cast<double>(shape_.group() * ceil_div(shape_.queries, 64));
    const double took = microseconds(of, sequences(), tiles.places, steps);
    const double bytes = static_cast<double>(rows() * tile_width()) *
                         (shape_.keys <= kBackwardKeys ? kWholeBytes : kSumBytes);
    const double otherwise =
        microseconds(tiles, divide(tiles, may_run())) + kBackwardAround + bytes / kAroundRate;
    return took < otherwise ? of.keys : 0;
  }
  /// In order a sum need not begin as zeros, and a first block stores its parts. That pays where
  /// the blocks of a sequence need not wait long for each other in the beginning, which are
  /// places / sequences() then, a step one after the other. Only where blocks draw their items:
  /// then it does not matter in which order they start. In any order heads of 65 to 96 columns are
  /// 7 to 19 % faster on an H200 where there is no mask, and heads of 64 or 128 with many keys 2 to
  /// 7 %: without a mask from 1024 keys on, with one from 1280 or 2048 keys on.
  bool order_pays() const {
    const int64_t places = multiprocessors();
    if (!is_hopper() || shape_.width > 128 || whole_ || all_key_tiles() <= places) return false;
    const BackwardDivision by = division(true);
    if (by.splits > 1 && by.plain == 0) return false;
    if (shape_.width > 64 && shape_.width <= 96) return false;
    if (key_tiles() >= (!shape_.causal ? 8 : shape_.width <= 64 ? 10 : 16)) return false;
    const int64_t tile = shape_.width <= 64 ? 128 : 64;
    const int64_t steps = shape_.group() * ceil_div(shape_.queries, tile);
    const int64_t of_block = all_key_tiles() * steps / places / (shape_.causal ? 2 : 1);
    return 33 * std::min(key_tiles(), places / sequences()) < of_block;
  }
  /// Or, with a run, blocks.
  template <class Tile>
  int64_t items() const {
    static_assert(keys_of_item<Tile> == kBackwardKeys);
    if (division_.run > 0) return ceil_div(divided() * tiles_of_keys().count, division_.run);
    return plain() + divided() * division_.splits;
  }

  /// In order they are in a row.
  template <class Tile, bool kInOrder>
  dim3 portable_blocks() const {
    const unsigned tiles = blocks_for(shape_.keys, Tile::kKeys);
    if (kInOrder) return {tiles * static_cast<unsigned>(sequences())};
    const int64_t rows = std::min<int64_t>(sequences(), 1 << 15);
    return {tiles, static_cast<unsigned>(rows), blocks_for(sequences(), rows)};
  }

  template <class Tile>
  CUtensorMap map_of_queries(const T* tensor, const Strides& by) const {
    return AttentionMaps::map<T>(tensor, by, shape_.batch, shape_.queries, shape_.kv_heads,
                                 shape_.group(), shape_.width, 1, Tile::kQueries / Tile::kBlocks);
  }
  template <class Tile>
  CUtensorMap map_of_keys(const T* tensor, const Strides& by) const {
    return AttentionMaps::map<T>(tensor, by, shape_.batch, shape_.keys, shape_.kv_heads, 1,
                                 shape_.width, 1, Tile::kKeys);
  }
  template <class Tile>
  BackwardMaps maps_of(const BackwardOperands<T>& in) const {
    return {map_of_queries<Tile>(in.Q, in.q), map_of_queries<Tile>(in.d_out, in.d_o),
            map_of_keys<Tile>(in.K, in.k), map_of_keys<Tile>(in.V, in.v)};
  }

  /// D, and zeros for rows of the sums, and for counts.
  template <int kWidth>
  void start(const BackwardOperands<T>& in, int64_t zeros) const {
    const int64_t counts = counted_ + 1;
    attention_row_sums<T, kWidth>
        <<<blocks_for(std::max({rows(), zeros, counts}), kBlockRows<kWidth>), kRowThreads, 0,
           stream_>>>(in, static_cast<int>(rows()), static_cast<int>(zeros),
                      static_cast<int>(counts));
  }

  /// dQ from the parts of Hopper's kernels, and dK and dV from their splits.
  template <class Tile>
  void finish(const BackwardOperands<T>& in) const {
    const int64_t tiles = ceil_div(shape_.queries, int64_t{Tile::kQueries});
    const int64_t parts = whole_ ? 0 : parts_of_tile<Tile> * tiles * shape_.heads * shape_.batch;
    const int64_t of_keys = sums_of_keys() / (64 * 32);
    if (parts + of_keys == 0) return;
    launch_clusters_on(stream_, attention_finish_parts<Tile>, 1, true,
                       blocks_for(parts + of_keys, 1), 128, 0, in, static_cast<int>(parts));
  }

  /// As many sequences side by side, in order, as make a block for each place, and as let two steps
  /// pass from the start of one of a sequence's blocks to that of the next one: it takes about a
  /// step until the next block may add to the same part. Then as many more as make groups of equal
  /// size: in a small last group blocks would wait for each other, and multiprocessors be idle.
  ///
  /// With causal the first tiles of a sequence have the most steps. In any order, too, they should
  /// not be the last that start, so there are as many sequences side by side.
  ///
  /// Without causal, in any order, for widths up to 128: blocks of a sequence that run at the same
  /// time read the same queries, which the L2 cache keeps for all of them. But where all blocks are
  /// of one or two sequences, a step takes up to 20 % longer (H200). So there are some 8 of a
  /// sequence at a time, and more if the cache would not keep what so many sequences read. If it
  /// keeps what all read, the tiles of the last keys come last, which may be nearly empty.
  template <class Tile>
  int64_t abreast(bool in_order, int64_t places) const {
    if (!in_order && !shape_.causal) {
      if (shape_.width > 128) return 1;
      const int64_t bytes = bytes_of_sequence();
      if (sequences() * bytes <= 12 << 20) return sequences();
      const int64_t fit =
          std::clamp<int64_t>((48 << 20) / bytes, 1, std::max<int64_t>(1, places / 8));
      return ceil_div(sequences(), ceil_div(sequences(), fit));
    }
    const int64_t of_tile = shape_.group() * ceil_div(shape_.queries, int64_t{Tile::kQueries});
    const int64_t steps = plain() > 0 ? of_tile : of_tile / division_.splits;
    const int64_t most = std::max<int64_t>(1, shape_.causal ? steps / 2 : steps);
    const int64_t apart = std::min(2 * ceil_div(shape_.keys, int64_t{keys_of_item<Tile>}), most);
    const int64_t least = std::min(sequences(), ceil_div(2 * places, apart));
    return ceil_div(sequences(), sequences() / least);
  }

  /// places: how many items the device has at a time.
  template <class Tile>
  BackwardOperands<T> operands(bool in_order, int64_t places) const {
    const auto narrow = [](int64_t value) { return static_cast<int>(value); };
    return {
        {memory_.Q, memory_.K, memory_.V, memory_.out, memory_.log_sums, memory_.q, memory_.k,
         memory_.v, memory_.o, narrow(shape_.queries), narrow(shape_.keys), narrow(shape_.heads),
         narrow(shape_.group()), narrow(shape_.width), shape_.causal, scale_},
        memory_.d_out,
        memory_.dQ,
        memory_.dK,
        memory_.dV,
        row_sums_,
        dq_sums_,
        kv_sums_,
        counts_,
        counts_ + counted_,
        memory_.d_o,
        memory_.dq,
        memory_.dk,
        memory_.dv,
        narrow(sequences()),
        narrow(abreast<Tile>(in_order, places)),
        narrow(plain()),
        narrow(division_.splits),
        narrow(division_.run),
        whole_};
  }

  BackwardMemory<T> memory_;
  AttentionShape shape_;
  float scale_;
  int64_t short_keys_;
  bool whole_, in_order_;
  BackwardDivision division_;
  int64_t counted_;  // parts of dQ, of which each has a count
  Memory<unsigned> counts_;
  Memory<float> row_sums_, dq_sums_, kv_sums_;
  cudaStream_t stream_;
};

/// The way to compute the gradients, of a shape that is at least 1 everywhere, of a width and
/// strides as above, and whose heads are a multiple of kv_heads; with queries in whole tiles, rows
/// and keys of all heads are at most 2^30. What is written must not overlap what is read. in_order:
/// the same bits in each call are wanted.
template <typename T>
class AttentionBackward {
 public:
  AttentionBackward(const Caller& caller, const BackwardMemory<T>& memory,
                    const AttentionShape& shape, float scale, bool in_order)
      : launches_(caller, memory, shape, scale, in_order), shape_(shape) {}

  std::vector<Way> ways() const {
    switch (launches_.keys_of_block()) {
      case 128:
        return {short_way<BackwardShortTile<T, 2, 1>>()};
      case 192:
        return {short_way<BackwardShortTile<T, 3, 1>>()};
      case 256:
        return {short_way<BackwardShortTile<T, 2, 2>>()};
      default:
        break;
    }
    const auto of_width = [&]<bool kInOrder>() {
      return shape_.width <= 64    ? way<64, kInOrder>()
             : shape_.width <= 96  ? way<96, kInOrder>()
             : shape_.width <= 128 ? way<128, kInOrder>()
                                   : way<256, kInOrder>();
    };
    return {launches_.in_order() ? of_width.template operator()<true>()
                                 : of_width.template operator()<false>()};
  }

 private:
  /// There is one a device: what it should take, at the rate of most long sequences, compares it
  /// with nothing.
  template <int kWidth, bool kInOrder>
  Way way() const {
    const double flops = 2.5 * shape_.flops();
    const std::string on_hopper = std::string("wgmma, parts of d_q added up by ") +
                                  (kInOrder ? "the copy engine, in order" : "atomics") +
                                  launches_.division_words();
    if (is_hopper() && kWidth > 128) {
      using Tile = BackwardWideTile<T, kInOrder>;
      return {on_hopper, flops / 450e6,
              [self = launches_] { self.template launch_wide<Tile, kInOrder>(); },
              static_cast<int>(sizeof(BackwardWideShared<Tile>))};
    }
    if (is_hopper() && kWidth <= 128) {
      using Tile = BackwardHopperTile<T, kWidth <= 128 ? kWidth : 128, kInOrder>;
      return {on_hopper, flops / 500e6, [self = launches_] { self.template launch_hopper<Tile>(); },
              static_cast<int>(sizeof(BackwardHopperShared<Tile>))};
    }
    // Where a block has no more than 99 KB, or where there are few queries, tiles have fewer.
    if constexpr (kWidth <= 64) {
      using Large = BackwardTile<T, 64, 128, 2>;
      using Small = BackwardTile<T, 64, 64, 2>;
      static_assert(sizeof(BackwardShared<Small>) <= 99 << 10);
      return fits<Large>() && shape_.queries >= 1024 ? portable_way<Large, kInOrder>()
                                                     : portable_way<Small, kInOrder>();
    } else if constexpr (kWidth <= 128) {
      using Large = BackwardTile<T, 128, 64, 2>;
      using Small = BackwardTile<T, 128, 32, 1>;
      static_assert(sizeof(BackwardShared<Small>) <= 99 << 10);
      return fits<Large>() ? portable_way<Large, kInOrder>() : portable_way<Small, kInOrder>();
    } else {
      using Tile = BackwardTile<T, 256, 16, 2>;
      static_assert(sizeof(BackwardShared<Tile>) <= 99 << 10);
      return portable_way<Tile, kInOrder>();
    }
  }

  /// Whether a block of the device has enough shared memory.
  template <class Tile>
  static bool fits() {
    return most_shared_bytes() >= int{sizeof(BackwardShared<Tile>)};
  }
  template <class Tile, bool kInOrder>
  Way portable_way() const {
    constexpr int kBytes = sizeof(BackwardShared<Tile>);
    static_assert(kBytes <= 163 << 10);  // of compute capability 8.0
    return {
        std::string("mma.sync, parts of d_q added up by atomics") + (kInOrder ? ", in order" : ""),
        2.5 * shape_.flops() / 200e6,
        [self = launches_] { self.template launch_portable<Tile, kInOrder>(); }, kBytes};
  }

  template <class Tile>
  Way short_way() const {
    return {"wgmma, all of up to " + std::to_string(Tile::kKeys) + " keys in a block",
            2.5 * shape_.flops() / 500e6,
            [self = launches_] { self.template launch_short<Tile>(); },
            static_cast<int>(sizeof(BackwardShortShared<Tile>))};
  }

  BackwardLaunches<T> launches_;
  AttentionShape shape_;
};

}  // namespace operators::attention
