// Attention on Hopper for any number of queries and keys: the last kernel of bonus_attention.cu with
// tiles that suit the width, blocks that stay, and work that is dealt out.
//
// A block has a producer and kConsumers warpgroups with 64 rows of Q each. A row is a query of a
// head; where several heads of Q share one of K, `pack` of them may be rows of the same tile (row
// r is query r / pack of head r % pack of them), so that few queries fill a tile. Of one piece of
// work, rows of Q of one head against keys, the producer brings Q as a stage of one pipeline, and
// tiles of K and V, alternately, as stages of another. It begins with the last keys, so that the
// tiles that the causal mask cuts come first and those after them need no mask.
//
// A consumer has the logits of the next tile multiplied beside the results of this one, and
// computes exponentials meanwhile. With kTurns the consumers take turns to start their products, so
// that one multiplies while the others compute exponentials.
#pragma once

#include "operators/attention/portable.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/launch.h"

namespace operators::attention {

/// What a kernel is compiled for. Rows of Q and keys of a tile; stages for tiles of K or V, and for
/// rows of Q. kByPolynomial: of every 8 exponentials. kSplit: keys are divided among blocks, which
/// leave parts of results (AttentionParts).
template <typename T_, int kWidth_, int kConsumers_, int kKeys_, int kStages_, int kRowStages_,
          bool kTurns_, int kByPolynomial_, bool kSplit_ = false>
struct AttentionTile {
  using T = T_;
  static constexpr int kWidth = kWidth_, kConsumers = kConsumers_, kKeys = kKeys_;
  static constexpr int kStages = kStages_, kRowStages = kRowStages_;
  static constexpr int kByPolynomial = kByPolynomial_;
  static constexpr bool kTurns = kTurns_, kSplit = kSplit_;
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
  Barrier turns[Tile::kConsumers];
};

/// What there is to do, and who does it: tiles of rows, of heads that share keys (of which there
/// are `sections`, each of `section` heads whose K and V the L2 cache can hold), and parts of keys.
/// In a section the rows with the most keys come first. `next` is a counter in memory, 0 before
/// the launch and after it, and next[1] as well.
struct AttentionSchedule {
  int row_tiles, heads, packs, section, parts, pack;  ///< packs: of a head of K
  unsigned total;
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
  const unsigned section = place / of_section, within = place % of_section;
  const unsigned heads = min(static_cast<unsigned>(s.section), s.heads - section * s.section);
  const unsigned tile = in.causal ? s.row_tiles - 1 - within / heads : within / heads;
  const unsigned sequence = section * s.section + within % heads;
  const unsigned heads_of_batch = in.heads / s.pack;
  work.row = static_cast<int>(tile) * Tile::kRows;
  work.batch = static_cast<int>(sequence / heads_of_batch);
  work.head = static_cast<int>(sequence % heads_of_batch) * s.pack;
  const int last = min(in.queries, (work.row + Tile::kRows - 1) / s.pack + 1) - 1;
  const int tiles = (in.limit(last) + Tile::kKeys - 1) / Tile::kKeys;
  work.first = static_cast<int>(int64_t{tiles} * part / s.parts);
  work.end = static_cast<int>(int64_t{tiles} * (part + 1) / s.parts);
  work.part = static_cast<int>(part);
  return work;
}

/// The consumers' turns to start products: each waits for its own, and passes it on. Those of the
/// first consumer begin with one that nobody has passed on.
template <int kConsumers>
struct Turns {
  Barrier* barriers;
  int consumer, parity;

  __device__ Turns(Barrier* all, int which)
      : barriers(all), consumer(which), parity(which == 0 ? 1 : 0) {}
  __device__ __forceinline__ void wait() {
    barrier_wait(&barriers[consumer], parity);
    parity ^= 1;
  }
  __device__ __forceinline__ void pass() const {
    if (threadIdx.x % 128 == 0) barrier_arrive(&barriers[(consumer + 1) % kConsumers]);
  }
};

/// The producer's thread.
template <class Tile, typename T>
__device__ __forceinline__ void bring(AttentionShared<Tile>& shared, const AttentionMaps& maps,
                                      const AttentionOperands<T>& in,
                                      const AttentionSchedule& schedule) {
  Writer rows(shared.rows);
  Writer keys(shared.keys);
  const uint64_t once = evict_first(), often = evict_last();
  unsigned number = blockIdx.x;
  for (;;) {
    const AttentionWork work = work_of<Tile>(schedule, in, number);
    shared.work[rows.wait()] = work;
    if (work.end < 0) break;
    number = gridDim.x + atomicAdd(schedule.next, 1u);
    const int group_head = work.head % in.group, kv_head = work.head / in.group;
    rows.put(sizeof shared.q[0], [&](int stage, Barrier* arrived) {
#pragma unroll
      for (int box = 0; box < Tile::kBoxes; ++box) {
        const int at[5] = {kBoxCols * box, group_head, work.row / schedule.pack, kv_head,
                           work.batch};
        tensor_load(shared.q[stage][box].row(0), &maps.Q, at, arrived, once);
      }
    });
    const auto put = [&](const CUtensorMap& map, int tile) {
      keys.put(sizeof shared.kv[0], [&](int stage, Barrier* arrived) {
#pragma unroll
        for (int box = 0; box < Tile::kBoxes; ++box) {
          const int at[5] = {kBoxCols * box, 0, tile * Tile::kKeys, kv_head, work.batch};
          tensor_load(shared.kv[stage][box].row(0), &map, at, arrived, often);
        }
      });
    };
    if (work.end == work.first) continue;
    put(maps.K, work.end - 1);
    for (int tile = work.end - 1; tile > work.first; --tile) {
      put(maps.K, tile - 1);
      put(maps.V, tile);
    }
    put(maps.V, work.first);
  }
  rows.put(0, [](int, Barrier*) {});  // no more work
  // The block that finds the work done last leaves the counters as they were.
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

/// A consumer's work: 64 rows of each piece.
template <class Tile, typename T>
__device__ __forceinline__ void attend(AttentionShared<Tile>& shared, const AttentionMaps& maps,
                                       const AttentionOperands<T>& in,
                                       const AttentionSchedule& schedule, AttentionParts parts,
                                       int consumer) {
  constexpr int kKeys = Tile::kKeys, kWidth = Tile::kWidth;
  const BlockGrid<1, 1> alone;
  Reader rows(shared.rows, alone);
  Reader keys(shared.keys, alone);
  Turns<Tile::kConsumers> turns(shared.turns, consumer);
  const float scale = in.scale * kLog2E;

  for (;;) {
    const int stage = rows.wait();
    auto& q = shared.q[stage];
    const AttentionWork work = shared.work[stage];
    if (work.end < 0) break;
    const int row0 = work.row + 64 * consumer;  // of Q, packed
    int limit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      limit[r] = in.limit((row0 + Sum<8>::row(2 * r)) / schedule.pack);
    }
    // Tiles below this one are whole for all rows of the consumer.
    const int whole = in.limit(row0 / schedule.pack) / kKeys;

    OnlineRows online;
    Sum<kKeys> logits;
    Sum<kWidth> result;
    LeftFragments<T, kKeys / 16> probs;
    float factor[2] = {1, 1};
    const auto start_logits = [&](int k) {
#pragma unroll
      for (int box = 0; box < Tile::kBoxes; ++box) {
        logits.template start_product<kSlices>(q[box].rows(64 * consumer),
                                               AlongK<T>{descriptor_a(shared.kv[k][box].elements)},
                                               box > 0);
      }
    };
    const auto start_result = [&](int v, bool add) {
      result.template start_product<kKeys / 16>(probs, shared.kv[v][0].across_k(), add);
    };
    const auto exponentials = [&](int tile) {
      if (tile >= whole) mask(logits, tile * kKeys, limit);
      return online.exponentials<Tile::kByPolynomial>(logits.elements, scale, factor);
    };

    int tile = work.end - 1;
    if (tile >= work.first) {
      if constexpr (Tile::kTurns) turns.wait();
      start_logits(keys.wait());
      if constexpr (Tile::kTurns) turns.pass();
      wgmma_wait<0>();
      keys.give_back();
      keys.next();
      exponentials(tile);
      to_factor<T>(probs, logits);
      for (; tile > work.first; --tile) {
        if constexpr (Tile::kTurns) turns.wait();
        start_logits(keys.wait());
        const int k_turn = keys.ring.stage;
        keys.next();
        start_result(keys.wait(), tile < work.end - 1);
        if constexpr (Tile::kTurns) turns.pass();
        wgmma_wait<1>();
        alone.release(shared.keys.empty[k_turn]);
        const bool rescale = exponentials(tile - 1);
        wgmma_wait<0>();
        keys.give_back();
        keys.next();
        if (rescale) scale_rows(result, factor);
        to_factor<T>(probs, logits);
      }
      start_result(keys.wait(), tile < work.end - 1);
      wgmma_wait<0>();
      keys.give_back();
      keys.next();
    } else {
#pragma unroll
      for (float& element : result.elements) element = 0;
    }

    float log_sum[2];
    online.finish(factor, log_sum);
    // Where a thread's rows are in the tensors; not all of a tile need be there.
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row0 + Sum<8>::row(2 * r), query = row / schedule.pack;
      const int head = work.head + row % schedule.pack;
      if (query >= in.queries) continue;
      const size_t place = (static_cast<size_t>(work.batch) * in.heads + head) * in.queries + query;
      if constexpr (Tile::kSplit) {
        const size_t all = static_cast<size_t>(schedule.heads) * schedule.pack * in.queries;
        const size_t to = work.part * all + place;
        if (thread % 4 == 0) parts.log_sums[to] = log_sum[r];
#pragma unroll
        for (int i = 2 * r; i < result.size(); i += 4) {
          *reinterpret_cast<float2*>(parts.out + to * kWidth + result.col(i)) =
              make_float2(result.elements[i] * factor[r], result.elements[i + 1] * factor[r]);
        }
      } else if (in.log_sums != nullptr && thread % 4 == 0) {
        in.log_sums[place] = log_sum[r];
      }
    }
    if constexpr (Tile::kSplit) {
      rows.give_back();
    } else {
      // The results leave through the consumer's own rows of Q, which nobody needs any more.
#pragma unroll
      for (int box = 0; box < Tile::kBoxes; ++box) {
        auto& out = *reinterpret_cast<Box<T, 64>*>(q[box].row(64 * consumer));
        result.store(out, kBoxCols * box,
                     [&](int i) { return result.elements[i] * factor[i / 2 % 2]; });
      }
      shared_fence();
      named_barrier(1 + consumer, 128);
      if (thread == 0) {
#pragma unroll
        for (int box = 0; box < Tile::kBoxes; ++box) {
          const int at[5] = {kBoxCols * box, work.head % in.group, row0 / schedule.pack,
                             work.head / in.group, work.batch};
          tensor_store(&maps.out, at, q[box].row(64 * consumer));
        }
        tensor_store_commit();
        tensor_store_wait_read<0>();
      }
      rows.give_back();
    }
    rows.next();
  }
}
#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_hopper(const __grid_constant__ AttentionMaps maps,
                     const __grid_constant__ AttentionOperands<typename Tile::T> in,
                     const __grid_constant__ AttentionSchedule schedule, AttentionParts parts) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  auto& shared = *reinterpret_cast<AttentionShared<Tile>*>(bytes);
  if (threadIdx.x == 0) {
    prepare(shared.rows, Tile::kConsumers);
    prepare(shared.keys, Tile::kConsumers);
    for (Barrier& turn : shared.turns) barrier_init(&turn, 1);
    barrier_init_fence();
  }
  __syncthreads();
  const int warp = warp_of_block();
  if (warp < 4) {
    if constexpr (Tile::kConsumers > 1) registers_shrink_to<Tile::kConsumers == 2 ? 24 : 32>();
    if (warp == 0 && elect_one()) bring<Tile>(shared, maps, in, schedule);
  } else {
    if constexpr (Tile::kConsumers > 1) registers_grow_to<Tile::kConsumers == 2 ? 240 : 160>();
    attend<Tile>(shared, maps, in, schedule, parts, warp / 4 - 1);
  }
#endif
}

}  // namespace operators::attention
