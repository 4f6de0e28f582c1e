// Attention on Hopper for any number of queries and keys: the last kernel of bonus_attention.cu
// with tiles that suit the width, blocks that stay, and work that is dealt out.
//
// A block has a producer and kConsumers warpgroups with 64 rows of Q each. A row is a query of a
// head; where several heads of Q share one of K, `pack` of them may be rows of the same tile (row
// r is query r / pack of head r % pack of them), so that few queries fill a tile. Of one piece of
// work, rows of Q of one head against keys, the producer brings Q as a stage of one pipeline, and
// tiles of K and V, alternately, as stages of another. It begins with the last keys, so that the
// tiles that the causal mask cuts come first and those after them need no mask.
//
// A consumer has the logits of the next tile multiplied beside the results of this one, and
// computes exponentials meanwhile; also where the next tile belongs to the next piece of work, so
// that tensor cores need not wait between pieces. Tiles that the mask hides from all of a
// consumer's rows it passes over.
#pragma once

#include "operators/attention/portable.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/launch.h"

namespace operators::attention {

/// What a kernel is compiled for. Rows of Q and keys of a tile; stages for tiles of K or V, and for
/// rows of Q. kTurns: consumers take turns to start products. kSplit: keys are divided among
/// blocks, which leave parts of results (AttentionParts). kBlocks: blocks on a multiprocessor.
template <typename T_, int kWidth_, int kConsumers_, int kKeys_, int kStages_, int kRowStages_,
          bool kTurns_, bool kSplit_, int kBlocks_ = 1>
struct AttentionTile {
  using T = T_;
  static constexpr int kWidth = kWidth_, kConsumers = kConsumers_, kKeys = kKeys_;
  static constexpr int kStages = kStages_, kRowStages = kRowStages_;
  static constexpr bool kTurns = kTurns_, kSplit = kSplit_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kRows = 64 * kConsumers, kThreads = 128 * (1 + kConsumers);
  static constexpr int kBoxes = kWidth / kBoxCols;
};

/// Rows of Q against keys: the tiles of keys from `first` to `end` - 1, of which the last is taken
/// first. end < 0: there is no more work.
struct AttentionWork {
  int row, head, batch;  ///< of Q: the first row and the first head
  int first, end, part;
};

template <class Tile>
struct AttentionShared {
  using T = typename Tile::T;
  static constexpr int kBoxes = Tile::kBoxes;
  LeftTile<T, Tile::kRows> q[Tile::kRowStages][kBoxes];
  Box<T, Tile::kKeys> kv[Tile::kStages][kBoxes];  // of K or V
  AttentionWork work[Tile::kRowStages];
  StageBarriers<Tile::kRowStages> rows;  // of q and work
  StageBarriers<Tile::kStages> keys;
  Barrier results[Tile::kRowStages][Tile::kConsumers];  // they are where their rows of q were
  Barrier turns[Tile::kConsumers];
};

/// What the L2 cache does with tiles of K and V.
enum class KeysInCache {
  stay,      ///< several blocks read each: others leave the cache before them
  go_first,  ///< one block reads each: they leave the cache before others
  as_usual   ///< one block reads each, and there are so many that leaving first costs them time
};

/// What there is to do, and who does it: tiles of rows, of `heads` heads or packs of them, and
/// parts of keys. Heads are taken in `sections` sections of `section` heads, and then a last one
/// with all that are left. In a section the rows with the most keys come first. `next` is a counter
/// in memory, 0 before the launch and after it, and next[1] as well. It is nullptr where no block
/// has more than one piece of work.
struct AttentionSchedule {
  int row_tiles, heads, section, sections, parts, pack;
  unsigned total;
  KeysInCache keys;
  unsigned* next;
};

/// The copy engine's view of Q, K, V and out: of five dimensions each, (width, heads of a group,
/// rows, heads of K, batch).
struct AttentionMaps {
  CUtensorMap Q, K, V, out;

  template <typename T>
  static CUtensorMap map(const T* tensor, const Strides& strides, int64_t batch, int64_t rows,
                         int64_t kv_heads, int64_t group, int64_t width, int pack,
                         unsigned box_rows) {
    const auto u = [](int64_t value) { return static_cast<cuuint64_t>(value); };
    const cuuint64_t extents[5] = {u(width), u(group), u(rows), u(kv_heads), u(batch)};
    const cuuint64_t bytes[4] = {u(strides.head * 2), u(strides.row * 2),
                                 u(strides.head * group * 2), u(strides.batch * 2)};
    const cuuint32_t box[5] = {kBoxCols, static_cast<cuuint32_t>(pack), box_rows / pack, 1, 1};
    return encode_tensor_map(tensor, 5, extents, bytes, box, CU_TENSOR_MAP_SWIZZLE_128B);
  }
};

#if HOPPER_CODE

/// The piece of work with number `number`.
template <class Tile, typename T>
__device__ AttentionWork work_of(const AttentionSchedule& s, const AttentionOperands<T>& in,
                                 unsigned number) {
  if (number >= s.total) return {0, 0, 0, 0, -1, 0};
  AttentionWork work;
  const unsigned part = number % s.parts, place = number / s.parts;
  const unsigned of_section = s.section * s.row_tiles;
  const unsigned section = min(place / of_section, static_cast<unsigned>(s.sections));
  const unsigned within = place - section * of_section, head = section * s.section;
  const unsigned heads = section < static_cast<unsigned>(s.sections) ? s.section : s.heads - head;
  const unsigned tile = in.causal ? s.row_tiles - 1 - within / heads : within / heads;
  const unsigned sequence = head + within % heads;
  const unsigned heads_of_batch = in.heads / s.pack;
  work.row = static_cast<int>(tile) * Tile::kRows;
  work.batch = static_cast<int>(sequence / heads_of_batch);
  work.head = static_cast<int>(sequence % heads_of_batch) * s.pack;
  const int last = min(in.queries, (work.row + Tile::kRows - 1) / s.pack + 1) - 1;
  const int tiles = (in.limit(last) + Tile::kKeys - 1) / Tile::kKeys;
  work.first = static_cast<int>(int64_t{tiles} * part / s.parts);
  work.end = static_cast<int>(int64_t{tiles} * (part + 1) / s.parts);
  if (work.first == work.end) {  // a tile that nobody sees: then every piece of work has an end
    work.first = tiles;
    work.end = tiles + 1;
  }
  work.part = static_cast<int>(part);
  return work;
}

/// Who gives a stage back: each warp for itself.
struct EachWarp {
  static constexpr int kReleases = 4;  ///< of a consumer
  __device__ static void release(Barrier& empty) {
    if (threadIdx.x % 32 == 0) barrier_arrive(&empty);
  }
};

/// The consumers' turns to start products: each waits for its own, and passes it on. Those of the
/// first consumer begin with one that nobody has passed on.
template <class Tile>
struct Turns {
  Barrier* barriers;
  int consumer, parity;

  __device__ Turns(Barrier* all, int which)
      : barriers(all), consumer(which), parity(which == 0 ? 1 : 0) {}
  __device__ __forceinline__ void wait() {
    if constexpr (Tile::kTurns) {
      barrier_wait(&barriers[consumer], parity);
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void pass() const {
    if constexpr (Tile::kTurns) {
      EachWarp::release(barriers[consumer + 1 == Tile::kConsumers ? 0 : consumer + 1]);
    }
  }
};

/// The producer's thread.
template <class Tile, typename T>
__device__ __forceinline__ void bring(AttentionShared<Tile>& shared, const AttentionMaps& maps,
                                      const AttentionOperands<T>& in,
                                      const AttentionSchedule& schedule) {
  Writer rows(shared.rows);
  Writer keys(shared.keys);
  const uint64_t once = evict_first();
  const uint64_t of_keys = schedule.keys == KeysInCache::stay       ? evict_last()
                           : schedule.keys == KeysInCache::go_first ? once
                                                                    : evict_normal();
  const auto put = [&](const CUtensorMap& map, const AttentionWork& work, int tile) {
    keys.put(sizeof shared.kv[0], [&](int stage, Barrier* arrived) {
#pragma unroll
      for (int box = 0; box < Tile::kBoxes; ++box) {
        const int at[5] = {kBoxCols * box, 0, tile * Tile::kKeys, work.head / in.group, work.batch};
        tensor_load(shared.kv[stage][box].row(0), &map, at, arrived, of_keys);
      }
    });
  };
  wait_for_previous_kernel();  // it may have written the counters' zeros
  // K of each tile comes before V of the tile before it, also from one piece of work to the next.
  AttentionWork before;
  bool first = true;
  unsigned number = blockIdx.x;
  for (;; first = false) {
    const AttentionWork work = work_of<Tile>(schedule, in, number);
    shared.work[rows.wait()] = work;
    if (work.end < 0) break;
    // The number of the next piece is taken late. A block that took it before a long piece would
    // keep it for all that time, while a block that ends sooner could begin with it. It is taken
    // before the last tiles are put, and not after them: so the answer to atomicAdd comes while
    // these are on their way.
    const auto take_next = [&] {
      number = schedule.next ? gridDim.x + atomicAdd(schedule.next, 1u) : schedule.total;
    };
    if (work.end - work.first == 1) take_next();
    rows.put(sizeof shared.q[0], [&](int stage, Barrier* arrived) {
#pragma unroll
      for (int box = 0; box < Tile::kBoxes; ++box) {
        const int at[5] = {kBoxCols * box, work.head % in.group, work.row / schedule.pack,
                           work.head / in.group, work.batch};
        tensor_load(shared.q[stage][box].row(0), &maps.Q, at, arrived, once);
      }
    });
    put(maps.K, work, work.end - 1);
    if (!first) put(maps.V, before, before.first);
    for (int tile = work.end - 1; tile > work.first; --tile) {
      if (tile == work.first + 1) take_next();
      put(maps.K, work, tile - 1);
      put(maps.V, work, tile);
    }
    before = work;
  }
  put(maps.V, before, before.first);
  rows.put(0, [](int, Barrier*) {});  // no more work
  if (!schedule.next) return;
  // The block that finds the work done last leaves the counters as they were. The fence: what other
  // blocks have taken from the first one comes before.
  __threadfence();
  if (atomicAdd(schedule.next + 1, 1u) == gridDim.x - 1) {
    schedule.next[0] = 0;
    schedule.next[1] = 0;
  }
}

/// -inf for the logits of a tile, from key `key` on, that the thread's two rows do not see.
template <int kKeys>
__device__ __forceinline__ void mask(Sum<kKeys>& logits, int key, const int (&limit)[2]) {
#pragma unroll
  for (int i = 0; i < logits.size(); ++i) {
    if (key + logits.col(i) >= limit[i / 2 % 2]) logits.elements[i] = minus_infinity();
  }
}

/// Exponentials as the left factor of the second product.
template <typename T, int kKeys>
__device__ __forceinline__ void to_factor(LeftFragments<T, kKeys / 16>& factor,
                                          const Sum<kKeys>& sum) {
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      factor.slices[k][i] = pack2<T>(sum.elements[8 * k + 2 * i], sum.elements[8 * k + 2 * i + 1]);
    }
  }
}

/// Multiplies the thread's two rows of a sum.
template <int kCols>
__device__ __forceinline__ void scale_rows(Sum<kCols>& sum, const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < sum.size(); ++i) sum.elements[i] *= factor[i / 2 % 2];
}

/// A thread that has a consumer's results stored. They leave through the consumer's own rows of Q.
template <class Tile, typename T>
__device__ __forceinline__ void store_results(AttentionShared<Tile>& shared,
                                              const AttentionMaps& maps,
                                              const AttentionOperands<T>& in,
                                              const AttentionSchedule& schedule, int consumer) {
  for (Ring ring{Tile::kRowStages};; ring.advance()) {
    barrier_wait(&shared.rows.full[ring.stage], ring.parity);
    const AttentionWork work = shared.work[ring.stage];
    if (work.end < 0) return;
    barrier_wait(&shared.results[ring.stage][consumer], ring.parity);
    if constexpr (!Tile::kSplit) {
      // A box beyond the last row is dropped.
#pragma unroll
      for (int box = 0; box < Tile::kBoxes; ++box) {
        const int at[5] = {kBoxCols * box, work.head % in.group,
                           (work.row + 64 * consumer) / schedule.pack, work.head / in.group,
                           work.batch};
        tensor_store(&maps.out, at, shared.q[ring.stage][box].row(64 * consumer));
      }
      tensor_store_commit();
      tensor_store_wait_read<0>();
    }
    barrier_arrive(&shared.rows.empty[ring.stage]);
  }
}

/// Of a piece of work what is a consumer's: 64 rows, from row `row` on of all packed ones, and of
/// its tiles of keys those from `first` to `end` - 1, which are all that they see. None where the
/// rows are beyond the last.
struct ConsumerWork {
  int stage, row, tile, first, end;  ///< tile: the one that comes next
  int whole;                         ///< tiles below it have no key that one of the rows misses
  int limit[2];                      ///< of the thread's two rows
};

/// A consumer: 64 rows of each piece of work.
template <class Tile, typename T>
struct Consumer {
  static constexpr int kKeys = Tile::kKeys, kWidth = Tile::kWidth;
  AttentionShared<Tile>& shared;
  const AttentionOperands<T>& in;
  const AttentionSchedule& schedule;
  AttentionParts parts;
  int consumer;
  float scale = in.scale * kLog2E;

  /// A number from shared memory, which the compiler then knows to be the same for all of the warp.
  static __device__ int uniform(int number) { return __shfl_sync(kAllLanes, number, 0); }

  __device__ __forceinline__ ConsumerWork work_at(int stage) const {
    const AttentionWork& work = shared.work[stage];
    ConsumerWork own;
    own.stage = stage;
    own.row = uniform(work.row) + 64 * consumer;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      own.limit[r] = in.limit((own.row + Sum<8>::row(2 * r)) / schedule.pack);
    }
    own.whole = in.limit(own.row / schedule.pack) / kKeys;
    const int last = min(in.queries - 1, (own.row + 63) / schedule.pack);
    const int seen = (in.limit(last) + kKeys - 1) / kKeys;
    own.tile = uniform(work.end) - 1;
    own.first = uniform(work.first);
    own.end = own.row / schedule.pack < in.queries ? max(own.first + 1, seen) : own.first;
    return own;
  }

  __device__ __forceinline__ void start_logits(Sum<kKeys>& logits, int stage, int k) const {
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      logits.template start_product<kSlices>(shared.q[stage][box].rows(64 * consumer),
                                             AlongK<T>{descriptor_a(shared.kv[k][box].elements)},
                                             box > 0);
    }
  }

  __device__ __forceinline__ void start_result(Sum<kWidth>& result,
                                               const LeftFragments<T, kKeys / 16>& probs, int v,
                                               bool add) const {
    result.template start_product<kKeys / 16>(probs, shared.kv[v][0].across_k(), add);
  }

  /// The same logits as start_logits(), once more, by a warp alone: other warps need not do the
  /// same.
  __device__ __noinline__ void multiply_again(Sum<kKeys>& logits, int stage, int k) const {
    const int row = 64 * consumer + threadIdx.x % 128 / 32 * 16;
    float sum[1][kKeys / 8][4] = {};
    for (int box = 0; box < Tile::kBoxes; ++box) {
      for (int i = 0; i < kBoxCols; i += 16) {
        unsigned q[1][4], keys[kKeys / 16][4];
        load_left<kBoxCols>(q, shared.q[stage][box].elements, row, i);
        load_right_transposed<kBoxCols>(keys, shared.kv[k][box].elements, i, 0);
        add_product<T>(sum, q, keys);
      }
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) logits.elements[i] = sum[0][i / 4][i % 4];
    __syncwarp();  // all lanes have read the keys, whose stage one lane gives back
  }

  __device__ __forceinline__ void hide(Sum<kKeys>& logits, const ConsumerWork& work,
                                       int tile) const {
    if (tile >= work.whole) mask(logits, tile * kKeys, work.limit);
  }

  /// The results of a piece of work, to where their rows of Q were.
  __device__ __forceinline__ void put(const ConsumerWork& own, OnlineRows& online,
                                      Sum<kWidth>& result) const {
    const AttentionWork& work = shared.work[own.stage];
    float factor[2];
    PartSum whole[2];
    online.finish(scale, factor, whole);
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = own.row + Sum<8>::row(2 * r), query = row / schedule.pack;
      const int head = work.head + row % schedule.pack;
      if (query >= in.queries) continue;
      const size_t place = (static_cast<size_t>(work.batch) * in.heads + head) * in.queries + query;
      if constexpr (Tile::kSplit) {
        const size_t all = static_cast<size_t>(schedule.heads) * schedule.pack * in.queries;
        const size_t to = work.part * all + place;
        if (thread % 4 == 0) parts.sums[to] = whole[r];
#pragma unroll
        for (int i = 2 * r; i < result.size(); i += 4) {
          *reinterpret_cast<float2*>(parts.out + to * kWidth + result.col(i)) =
              make_float2(result.elements[i] * factor[r], result.elements[i + 1] * factor[r]);
        }
      } else if (in.log_sums != nullptr && thread % 4 == 0) {
        in.log_sums[place] = whole[r].logarithm();
      }
    }
    if constexpr (!Tile::kSplit) {
      auto& q = shared.q[own.stage];
#pragma unroll
      for (int box = 0; box < Tile::kBoxes; ++box) {
        auto& out = *reinterpret_cast<Box<T, 64>*>(q[box].row(64 * consumer));
        result.store(out, kBoxCols * box,
                     [&](int i) { return result.elements[i] * factor[i / 2 % 2]; });
      }
      shared_fence();
    }
  }

  /// The warp has no more to do with a piece of work.
  __device__ __forceinline__ void end(const ConsumerWork& own) const {
    __syncwarp();
    EachWarp::release(shared.results[own.stage][consumer]);
  }

  __device__ __forceinline__ void run() const {
    const EachWarp warps;
    Reader rows(shared.rows, warps);
    Reader keys(shared.keys, warps);
    Turns<Tile> turns(shared.turns, consumer);
    const auto next_work = [&] {
      const int stage = rows.wait();
      rows.next();
      return work_at(stage);
    };
    const auto take = [&] {  // the next tile: of K and V in turn
      const int stage = keys.wait();
      keys.next();
      return stage;
    };
    const auto give_back = [&](int stage) { keys.give_back(stage); };

    OnlineRows online;
    Sum<kKeys> logits;
    Sum<kWidth> result;
    LeftFragments<T, kKeys / 16> probs;
    float factor[2];
    // The first tile of a piece of work, without the last one of another.
    const auto begin = [&](const ConsumerWork& work) {
      turns.wait();
      const int k = take();
      start_logits(logits, work.stage, k);
      turns.pass();
      wgmma_wait<0>();
      give_back(k);
      hide(logits, work, work.tile);
      online.exponentials(logits.elements, scale, factor);
      to_factor<T>(probs, logits);
    };
    const auto pass_keys = [&] {
      turns.wait();
      give_back(take());
      turns.pass();
    };

    ConsumerWork own = next_work();
    bool active = own.tile < own.end, add = false;
    if (active) {
      begin(own);
    } else {
      pass_keys();
    }
    for (;;) {
      if (active) {
        for (; own.tile > own.first; add = true) {
          turns.wait();
          const int k = take();
          start_logits(logits, own.stage, k);
          const int v = take();
          start_result(result, probs, v, add);
          turns.pass();
          --own.tile;
          wgmma_wait<1>();
          hide(logits, own, own.tile);
          const bool right = online.try_exponentials<T>(logits.elements, scale);
          if (!right) {
            Sum<kKeys> again;  // so that `logits`, whose address nobody takes, stay in registers
            multiply_again(again, own.stage, k);
            logits = again;
            hide(logits, own, own.tile);
            online.exponentials(logits.elements, scale, factor);
          }
          give_back(k);
          wgmma_wait<0>();
          give_back(v);
          if (!right) scale_rows(result, factor);
          to_factor<T>(probs, logits);
        }
      }
      // From here on the next tile may be of the next piece of work, and may be hidden. The flags:
      //   active       `probs` has the exponentials of this tile, `own`; else the tile is hidden
      //   last         this tile is the last one of its piece of work
      //   more         there is a next tile, of this piece or of the next one
      //   next_active  there is a next tile, and it is not hidden
      // So there are these cases. Both active: both products side by side. Only this one: its
      // results, and the next tile's K is passed over. Only the next one: its logits, and this
      // tile's V is passed over. None: both are passed over.
      const bool last = own.tile == own.first;
      ConsumerWork next = own;
      bool more = true;
      if (last) {
        next = next_work();
        more = next.tile >= 0;
      } else {
        --next.tile;
      }
      const bool next_active = more && next.tile < next.end;
      if (active && next_active) {  // the last tile of a piece, and the first one of the next
        turns.wait();
        const int k = take();
        start_logits(logits, next.stage, k);
        const int v = take();
        start_result(result, probs, v, add);
        turns.pass();
        wgmma_wait<1>();
        give_back(k);
        hide(logits, next, next.tile);
        OnlineRows of_next;
        of_next.exponentials(logits.elements, scale, factor);
        wgmma_wait<0>();
        give_back(v);
        put(own, online, result);
        online = of_next;
        to_factor<T>(probs, logits);
        add = false;
      } else if (active) {
        if (more) pass_keys();
        const int v = take();
        start_result(result, probs, v, add);
        wgmma_wait<0>();
        give_back(v);
        add = false;
        put(own, online, result);
        online = OnlineRows();
      } else {
        if (next_active) {
          begin(next);
        } else if (more) {
          pass_keys();
        }
        give_back(take());
      }
      if (last) end(own);
      if (!more) return;
      own = next;
      active = next_active;
    }
  }
};
#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    attention_hopper(const __grid_constant__ AttentionMaps maps,
                     const __grid_constant__ AttentionOperands<typename Tile::T> in,
                     const __grid_constant__ AttentionSchedule schedule, AttentionParts parts) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  auto& shared = *reinterpret_cast<AttentionShared<Tile>*>(bytes);
  if constexpr (Tile::kSplit) start_next_kernel();  // attention_merge()
  if (threadIdx.x == 0) {
    prepare(shared.rows, Tile::kConsumers);
    prepare(shared.keys, EachWarp::kReleases * Tile::kConsumers);
    for (int i = 0; i < Tile::kConsumers; ++i) {
      for (auto& results : shared.results) barrier_init(&results[i], EachWarp::kReleases);
      barrier_init(&shared.turns[i], EachWarp::kReleases);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int warp = warp_of_block();
  if (warp < 4) {
    if constexpr (Tile::kConsumers > 1) registers_shrink_to<Tile::kConsumers == 2 ? 24 : 32>();
    if constexpr (Tile::kBlocks > 1) registers_shrink_to<Tile::kBlocks == 2 ? 40 : 24>();
    if (!elect_one()) return;
    if (warp == 0) {
      bring<Tile>(shared, maps, in, schedule);
    } else if (warp <= Tile::kConsumers) {
      store_results<Tile>(shared, maps, in, schedule, warp - 1);
    }
  } else {
    if constexpr (Tile::kConsumers > 1) registers_grow_to<Tile::kConsumers == 2 ? 240 : 160>();
    if constexpr (Tile::kBlocks > 1) registers_grow_to<Tile::kBlocks == 2 ? 216 : 136>();
    Consumer<Tile, typename Tile::T>{shared, in, schedule, parts, warp / 4 - 1}.run();
  }
#endif
}

}  // namespace operators::attention
