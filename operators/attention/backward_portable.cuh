// The gradients of attention on any GPU from compute capability 8.0 on. Widths are multiples of 8
// up to 256, and rows begin at multiples of 16 bytes. The main kernel is *tensor cores* of
// bonus_attention_backward.cu, with warps in pairs that divide the work. One kernel before it
// computes D and writes zeros, and one after it scales and rounds dQ.
#pragma once

#include "operators/attention/portable.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/hopper/cluster.cuh"
#include "primitives/neighbours.cuh"
#include "primitives/spin.cuh"

namespace operators::attention {

/// What a kernel gets. `out` and `log_sums` are read here. row_sums (batch, heads, queries) is D:
/// the sum of d_out * out over each row of both. In dq_sums parts of dQ are added up. Where that
/// happens in order, counts[part] is how many blocks have added to a part. Where several items
/// share the steps of a tile of keys, each leaves its dK and dV in kv_sums (KeySums).
template <typename T>
struct BackwardOperands : AttentionOperands<T> {
  const T* d_out;
  T *dQ, *dK, *dV;
  float *row_sums, *dq_sums, *kv_sums;
  unsigned *counts, *drawn;  // drawn: how many items blocks have drawn (BackwardHopperBlock)
  Strides d_o, dq, dk, dv;
  int sequences;  // heads of K and V, of all batches together
  int abreast;    // in how many sequences tiles are numbered together: see BackwardPlace
  int plain;      // the first `plain` tiles of keys are one item each
  int splits;     // each other tile is so many items; with runs: the most blocks that share a tile
  int run;        // with runs: how many steps in a row a block has, of all tiles; 0: no runs
  bool whole;     // one tile has all keys: then a block's part of dQ is dQ

  /// The first query that sees key t.
  __device__ int first_query(int t) const {
    return this->causal ? max(0, t + this->queries - this->keys) : 0;
  }

  /// Where row number `row` of a tensor (batch, queries, heads, width) begins.
  __device__ int64_t begin_of(int row, const Strides& by) const {
    const int head = row % this->heads, rest = row / this->heads;
    return rest / this->queries * by.batch + rest % this->queries * by.row + head * by.head;
  }
};

// ---- Before and after ---------------------------------------------------------------------------

// A lane owns 8 neighbours of a row, 16 bytes. So kWidth / 8 lanes own a row.
inline constexpr int kRowThreads = 256, kRowsAtOnce = 2;
template <int kWidth>
inline constexpr int kBlockRows = kRowThreads / (kWidth / 8) * kRowsAtOnce;

/// For each of `rows` rows, computes D from out and d_out. It also writes zeros to the first
/// rows_of_zeros rows of dq_sums, which have kWidth floats each, and to the first `counts` counts.
/// A thread has its 8 columns of kRowsAtOnce rows. It loads all of them before it uses the first:
/// so it waits for memory once.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kRowThreads)
    attention_row_sums(BackwardOperands<T> in, int rows, int rows_of_zeros, int counts) {
  constexpr int kLanes = kWidth / 8, kRows = kRowThreads / kLanes;
  using Own = Neighbours<T, 8>;
  start_next_kernel();
  const int lane = threadIdx.x % kLanes, col = 8 * lane;
  const int row0 = static_cast<int>(blockIdx.x) * kBlockRows<kWidth> + threadIdx.x / kLanes;
  Own out[kRowsAtOnce] = {}, d_out[kRowsAtOnce] = {};
#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    const int row = row0 + i * kRows;
    if (row >= rows || col >= in.width) continue;
    out[i] = *reinterpret_cast<const Own*>(in.out + in.begin_of(row, in.o) + col);
    d_out[i] = *reinterpret_cast<const Own*>(in.d_out + in.begin_of(row, in.d_o) + col);
  }
#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    const int row = row0 + i * kRows;
    if (row < rows_of_zeros) {
      float4* const to = reinterpret_cast<float4*>(in.dq_sums + int64_t{row} * kWidth);
      to[lane] = to[kLanes + lane] = float4{};
    }
    if (row < counts && lane == 0) in.counts[row] = 0;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sum += static_cast<float>(out[i].values[j]) * static_cast<float>(d_out[i].values[j]);
    }
    sum = lanes_sum<kLanes>(sum);
    const int head = row % in.heads, rest = row / in.heads;
    const int query = rest % in.queries, batch = rest / in.queries;
    if (row < rows && lane == 0) in.row_sums[(batch * in.heads + head) * in.queries + query] = sum;
  }
}

// ---- The main kernel ----------------------------------------------------------------------------

/// A block owns kKeys keys of a head of K and V. Tiles of kQueries rows of Q and d_out stream past.
/// Warps w and w + kPairs are a pair, and have the same kOwn keys. The first one computes P and dV,
/// the second one dS, dK and a part of dQ. Of Q there are two stages, and of d_out there are
/// kOutStages: two, or one where shared memory is short.
template <typename T_, int kWidth_, int kQueries_, int kOutStages_>
struct BackwardTile {
  using T = T_;
  static constexpr int kWidth = kWidth_, kQueries = kQueries_, kOutStages = kOutStages_;
  static constexpr bool kAligned = true;
  static constexpr int kPairs = 4, kThreads = 64 * kPairs;
  static constexpr int kBlocks = 1;                     // that share an item
  static constexpr int kCount = kWidth <= 128 ? 2 : 1;  // matrices of 16 keys that a warp has
  static constexpr int kOwn = 16 * kCount, kKeys = kPairs * kOwn;
  // Of dQ of a tile a warp has kRows x kCols.
  static constexpr int kRows = kQueries < 32 ? kQueries : 32;
  static constexpr int kColParts = kPairs * kRows / kQueries, kCols = kWidth / kColParts;
};

/// What the warp of pair `pair` has of dQ, and where that begins in the tile.
template <class Tile>
struct PartOfDQ {
  static constexpr int kNumbers = Tile::kRows * Tile::kCols / 32;  // of a lane
  float sums[Tile::kRows / 16][Tile::kCols / 8][4] = {};
  int row, col;
  __device__ explicit PartOfDQ(int pair)
      : row(pair / Tile::kColParts * Tile::kRows), col(pair % Tile::kColParts * Tile::kCols) {}
  __device__ float& number(int i) { return (&sums[0][0][0])[i]; }
  /// Where number 0 of the lane lies in the sums of tile `tile`; the next ones are 32 further each.
  __device__ static int64_t offset(int tile, int pair) {
    return int64_t{tile} * (Tile::kQueries * Tile::kWidth) + pair * (32 * kNumbers) +
           threadIdx.x % 32;
  }
};

template <class Tile>
struct BackwardShared {
  using T = typename Tile::T;
  alignas(128) T K[Tile::kKeys * Tile::kWidth];
  T V[Tile::kKeys * Tile::kWidth];
  T dS[Tile::kKeys * Tile::kQueries];  // P, and then dS; transposed: a row has all queries of a key
  T Q[2][Tile::kQueries * Tile::kWidth], d_out[Tile::kOutStages][Tile::kQueries * Tile::kWidth];
  float bases[2][Tile::kQueries], row_sums[2][Tile::kQueries];
};

/// dQ: the sums, scaled and rounded. They lie tile after tile, as in the registers of
/// attention_backward_portable: of each warp the first number of each lane, the second ones, and so
/// on. Block x has tile x; rows leave by way of shared memory, 16 bytes a thread.
template <class Tile>
__global__ void __launch_bounds__(32 * Tile::kPairs)
    attention_finish_dq(BackwardOperands<typename Tile::T> in) {
  using T = typename Tile::T;
  constexpr int kQueries = Tile::kQueries, kWidth = Tile::kWidth, kPieces = kWidth / 8;
  __shared__ __align__(128) T rows[kQueries * kWidth];
  const int number = static_cast<int>(blockIdx.x), tiles = ceil_div(in.queries, kQueries);
  const int query = number % tiles * kQueries, head = number / tiles % in.heads;
  const int batch = number / tiles / in.heads, pair = threadIdx.x / 32;
  PartOfDQ<Tile> dQ(pair);
  const float* const sums = in.dq_sums + dQ.offset(number, pair);
#pragma unroll
  for (int i = 0; i < dQ.kNumbers; ++i) dQ.number(i) = in.scale * sums[32 * i];
  to_tile<kWidth>(rows, dQ.row, dQ.col, dQ.sums);
  __syncthreads();
  T* const to = in.dQ + batch * in.dq.batch + head * in.dq.head;
  for (int i = threadIdx.x; i < kQueries * kPieces; i += 32 * Tile::kPairs) {
    const int row = i / kPieces, col = i % kPieces * 8;
    if (query + row >= in.queries || col >= in.width) continue;
    *reinterpret_cast<uint4*>(to + (query + row) * in.dq.row + col) =
        *reinterpret_cast<const uint4*>(rows + swizzle<kWidth>(row, col));
  }
}

/// Block (x, y, z) owns tile x of the keys of a sequence, which is a head of K and V of a batch.
/// The first keys, which causal hides from the fewest queries, start first. Sequences are counted
/// by y and z together, since either is less than 2^16.
__device__ __forceinline__ int sequence_of_block() {
  return static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y);
}

/// What a block has to do is an item: the steps of a tile of keys of a sequence; or one of `splits`
/// shares of them, which the tiles after the first `plain` are divided into. Tiles are numbered
/// through `abreast` sequences at a time: through all of their first tiles, then through their
/// second ones, and so on.
///
/// With runs, the steps of all tiles are numbered, tile after tile, and a block has `run` of them
/// in a row: often the end of a tile and the beginning of the next one. So all blocks but the last
/// one have equally many steps. There are runs only without a mask, where all tiles have equally
/// many steps, and in any order, where no block waits for another one.
///
/// In order, a block adds to a part of dQ after the blocks of the keys before. It waits only for
/// items of lower numbers. If the blocks that have these have started before it, nobody waits
/// forever: of all items that have not ended the one with the lowest number waits for none. GPUs so
/// far start blocks in the order of their numbers, but CUDA's documentation does not promise it.
struct BackwardPlace {
  int key_tile, kv_head, batch, sequence;
  int tile = 0;  // its number
  int split = 0, splits = 1;
  int first_step = 0, step_after = 0;  // with runs: of the tile, to the one before step_after

  template <typename T>
  __device__ BackwardPlace(const BackwardOperands<T>& in, int of_keys, int of_sequence)
      : key_tile(of_keys),
        kv_head(of_sequence % (in.heads / in.group)),
        batch(of_sequence / (in.heads / in.group)),
        sequence(of_sequence) {}

  template <typename T>
  __device__ static BackwardPlace of_tile(const BackwardOperands<T>& in, int tile,
                                          int keys_of_tile) {
    const int of_sequence = ceil_div(in.keys, keys_of_tile);
    const int first = tile / (in.abreast * of_sequence) * in.abreast;
    const int together = min(in.abreast, in.sequences - first), rest = tile - first * of_sequence;
    BackwardPlace place(in, rest / together, first + rest % together);
    place.tile = tile;
    return place;
  }
  template <typename T>
  __device__ static BackwardPlace of_item(const BackwardOperands<T>& in, int item,
                                          int keys_of_tile) {
    if (item < in.plain) return of_tile(in, item, keys_of_tile);
    BackwardPlace place = of_tile(in, in.plain + (item - in.plain) / in.splits, keys_of_tile);
    place.split = (item - in.plain) % in.splits;
    place.splits = in.splits;
    return place;
  }
  /// The same with runs, where each tile has `steps` steps. An item's number is its tile's times
  /// in.splits, plus the block's number among those that share this tile.
  template <typename T>
  __device__ static BackwardPlace of_run(const BackwardOperands<T>& in, int item, int keys_of_tile,
                                         int steps) {
    BackwardPlace place = of_item(in, item, keys_of_tile);
    const int begin = place.tile * steps, block = begin / in.run + place.split;
    place.splits = blocks_of_run(in, place.tile, steps);
    place.first_step = max(0, block * in.run - begin);
    place.step_after = min(steps, (block + 1) * in.run - begin);
    return place;
  }
  /// How many blocks have steps of a tile.
  template <typename T>
  __device__ static int blocks_of_run(const BackwardOperands<T>& in, int tile, int steps) {
    return ((tile + 1) * steps - 1) / in.run - tile * steps / in.run + 1;
  }
};

/// A step of a block is a tile of queries of a head of Q, of the heads that share its keys. In
/// order, all blocks begin with the last tile of queries and go back, and in each tile they take
/// one head after the other. So a block takes its steps in the order of the block of the keys
/// before. It may have fewer steps, since fewer queries see its keys. Where a tile of keys is
/// divided into `splits` shares, share number `split` has the steps split, split + splits, and so
/// on, or none. So shares with the same number have the same order in all tiles of keys. With runs
/// a block has the steps from `first` to the one before `after`.
template <bool kInOrder>
struct BackwardSteps {
  int tile0, tiles, group;  // tiles from tile0 on have a query that sees a key
  int first, by, after;     // the steps first, first + by, and so on, below after

  __device__ BackwardSteps(int tile, int all_tiles, int heads, int split = 0, int splits = 1)
      : tile0(tile),
        tiles(all_tiles - tile),
        group(heads),
        first(split),
        by(splits),
        after(tiles * heads) {}

  /// Only the steps `from` to `to` - 1.
  __device__ void take(int from, int to) { first = from, by = 1, after = to; }

  __device__ int count() const { return ceil_div(max(0, after - first), by); }
  __device__ int of_group(int step) const {
    return kInOrder ? number(step) % group : number(step) / tiles;
  }
  __device__ int tile(int step) const {
    return tile0 + (kInOrder ? tiles - 1 - number(step) / group : number(step) % tiles);
  }

 private:
  __device__ int number(int step) const { return first + step * by; }
};

/// Stores a warp's sums, times `factor`, by way of its own rows of a tile, from row `row` on. `to`
/// is where the first of them belongs, in rows `stride` elements apart, of which `there` exist.
template <class Tile>
__device__ __forceinline__ void store_keys(typename Tile::T* tile, int row,
                                           float (&sums)[Tile::kCount][Tile::kWidth / 8][4],
                                           float factor, typename Tile::T* to, int64_t stride,
                                           int there, int width) {
#pragma unroll
  for (int m = 0; m < Tile::kCount; ++m) {
#pragma unroll
    for (int i = 0; i < Tile::kWidth / 2; ++i) sums[m][i / 4][i % 4] *= factor;
  }
  to_tile<Tile::kWidth>(tile, row, 0, sums);
  __syncwarp();
  constexpr int kPieces = Tile::kWidth / 8;
  for (int i = threadIdx.x % 32; i < Tile::kOwn * kPieces; i += 32) {
    const int r = i / kPieces, col = i % kPieces * 8;
    if (r >= there || col >= width) continue;
    *reinterpret_cast<uint4*>(to + r * stride + col) =
        *reinterpret_cast<const uint4*>(tile + swizzle<Tile::kWidth>(row + r, col));
  }
}

/// A block owns kKeys keys of a head of K and V. These stay in shared memory. The queries of all
/// heads that share them come a tile at a time. While a tile is multiplied, Q and d_out of the next
/// tile are copied. (With one stage of d_out, its copy starts with the step.) In each of these
/// steps, with L for log_sums and D for row_sums,
///
///     the first warp of a pair   S^T = K Q^T, P^T = exp(S^T - L), and then dV += P^T d_out
///     the second one             dQ += dS K of the step before, dP^T = V d_out^T,
///                                dS^T = P^T (dP^T - D), and then dK += dS^T Q
///
/// The first warp keeps dV of the pair's kOwn keys in registers, and the second one keeps dK. Why a
/// pair? Up to a width of 128 it has 32 keys. Then a warp's loads from shared memory take no longer
/// than its products. One warp alone has no registers for dV and dK of 32 keys. (Above 128 a pair
/// has 16 keys.) The pair also keeps the tensor cores busy: the first warp computes exponentials
/// while the second one has two products, and the second one computes dS while the first one
/// has dV.
///
/// P^T goes from one warp to the other through shared memory, rounded. As left factors of dV and
/// dK, P^T and dS^T stay in the registers where they have been computed: K Q^T and V d_out^T leave
/// them as a left factor has to lie. dQ is a sum over the keys of all warps. So dS^T goes through
/// shared memory, too, and each second warp computes a part of dQ of the tile (PartOfDQ).
///
/// Other blocks have other keys. So parts of dQ are added up in memory by atomicAdd, 32 neighbours
/// at a time. With kInOrder a block first waits until the block of the keys before has added its
/// part.
template <class Tile, bool kInOrder>
__global__ void __launch_bounds__(Tile::kThreads)
    attention_backward_portable(BackwardOperands<typename Tile::T> in) {
  using T = typename Tile::T;
  constexpr int kWidth = Tile::kWidth, kKeys = Tile::kKeys, kQueries = Tile::kQueries;
  constexpr int kCount = Tile::kCount, kOutStages = Tile::kOutStages;
  constexpr int kAtOnce = kQueries < 64 ? kQueries : 64;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<Tile>*>(shared_bytes);
  if (!kInOrder && sequence_of_block() >= in.sequences) return;
  const auto place = kInOrder
                         ? BackwardPlace::of_item(in, static_cast<int>(blockIdx.x), kKeys)
                         : BackwardPlace(in, static_cast<int>(blockIdx.x), sequence_of_block());
  const int key0 = place.key_tile * kKeys, batch = place.batch;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int pair = warp % Tile::kPairs, warp_key = pair * Tile::kOwn;
  const bool is_second = warp >= Tile::kPairs;

  // A step is a tile of queries of a head. Query s sees key0 if s + keys - queries >= key0.
  const int all_tiles = ceil_div(in.queries, kQueries);
  const BackwardSteps<kInOrder> steps(in.first_query(key0) / kQueries, all_tiles, in.group);
  const int count = steps.count();
  struct Step {
    int head, tile;
  };
  const auto step_of = [&](int step) {
    return Step{place.kv_head * in.group + steps.of_group(step), steps.tile(step)};
  };
  const auto copy_Q = [&](const Step& at, int stage) {
    const int query = at.tile * kQueries, there = in.queries - query;
    copy_rows<Tile, kQueries>(shared.Q[stage],
                              in.Q + batch * in.q.batch + query * in.q.row + at.head * in.q.head,
                              in.q.row, there, in.width);
  };
  // Each query has two numbers in shared memory: its base and D. The base is subtracted in the
  // exponent of P. It is +infinity for a query that sees no key: then P is 0. Each of the first
  // kQueries threads loads a base, and each of the next kQueries threads loads a D.
  static_assert(2 * kQueries <= Tile::kThreads);
  const bool has_number = threadIdx.x < 2 * kQueries, has_D = threadIdx.x >= kQueries;
  const int own_query = threadIdx.x % kQueries;
  const auto load_number = [&](const Step& at) {
    const int query = at.tile * kQueries + own_query;
    if (!has_number || query >= in.queries) return 0.0f;
    const float of_query =
        (has_D ? in.row_sums : in.log_sums)[(batch * in.heads + at.head) * in.queries + query];
    return has_D ? of_query : of_query == minus_infinity() ? -minus_infinity() : of_query * kLog2E;
  };
  const auto store_number = [&](float number, int stage) {
    if (has_number) (has_D ? shared.row_sums : shared.bases)[stage][own_query] = number;
  };
  const auto copy_d_out = [&](const Step& at, int stage) {
    const int query = at.tile * kQueries;
    copy_rows<Tile, kQueries>(
        shared.d_out[stage],
        in.d_out + batch * in.d_o.batch + query * in.d_o.row + at.head * in.d_o.head, in.d_o.row,
        in.queries - query, in.width);
  };
  const auto part_of = [&](const Step& at) {
    return (batch * in.heads + at.head) * all_tiles + at.tile;
  };
  Step next = step_of(0);
  int part = 0, query = 0;
  {
    const T* const K = in.K + batch * in.k.batch + place.kv_head * in.k.head;
    const T* const V = in.V + batch * in.v.batch + place.kv_head * in.v.head;
    const int there = in.keys - key0;
    copy_rows<Tile, kKeys>(shared.K, K + key0 * in.k.row, in.k.row, there, in.width);
    copy_rows<Tile, kKeys>(shared.V, V + key0 * in.v.row, in.v.row, there, in.width);
    if (count > 0) {
      store_number(load_number(next), 0);
      copy_Q(next, 0);
      if (kOutStages == 2) copy_d_out(next, 0);
    }
    copy_async_commit();
  }

  const float scale = in.scale * kLog2E;
  float gradients[kCount][kWidth / 8][4] = {};  // dV of a pair's first warp, dK of its second
  for (int step = 0;; ++step) {
    copy_async_wait<0>();
    // What all threads have copied for this step is there, all of dS of the step before is there,
    // and all have read what the copies that start now replace.
    __syncthreads();
    const int part_before = part;
    const Step now = next;
    part = part_of(now);
    float ahead = 0;
    query = now.tile * kQueries;
    if (step < count) {
      if (kOutStages == 1) copy_d_out(now, 0);
      copy_async_commit();
      if (step + 1 < count) {
        if (kInOrder) {
          next = step_of(step + 1);
        } else if (++next.tile == all_tiles) {
          next = {next.head + 1, steps.tile0};
        }
        ahead = load_number(next);
        copy_Q(next, (step + 1) % 2);
        if (kOutStages == 2) copy_d_out(next, (step + 1) % 2);
      }
      copy_async_commit();
    }
    if (is_second && step > 0) {
      PartOfDQ<Tile> dQ(pair);
#pragma unroll
      for (int k = 0; k < kKeys; k += 16) {
        unsigned left[Tile::kRows / 16][4], keys[Tile::kCols / 16][4];
        load_left_transposed<kQueries>(left, shared.dS, dQ.row, k);
        load_right<kWidth>(keys, shared.K, k, dQ.col);
        add_product<T>(dQ.sums, left, keys);
      }
      if constexpr (kInOrder) {
        if (warp == Tile::kPairs && lane == 0) {
          wait_for_count(GridCount(in.counts[part_before]), static_cast<unsigned>(place.key_tile),
                         "the parts of dQ of the keys before");
        }
        named_barrier(1 + Tile::kPairs, 32 * Tile::kPairs);
      }
      float* const sums = in.dq_sums + dQ.offset(part_before, pair);
#pragma unroll
      for (int i = 0; i < dQ.kNumbers; ++i) atomicAdd(sums + 32 * i, dQ.number(i));
      if constexpr (kInOrder) {
        named_barrier(1 + Tile::kPairs, 32 * Tile::kPairs);
        if (warp == Tile::kPairs && lane == 0) {
          GridCount(in.counts[part_before]).fetch_add(1, cuda::memory_order_release);
        }
      }
    }
    if (step == count) break;

    const int stage = step % 2;
    const T* const Q = shared.Q[stage];
    const T* const d_out = shared.d_out[step % kOutStages];
    if (kOutStages == 1) {
      copy_async_wait<1>();
      __syncthreads();
    }
    float own[kCount][kQueries / 8][4] = {};  // logits, then P; or dP, then dS
    {
      const T* const of_keys = is_second ? shared.V : shared.K;
      const T* const of_queries = is_second ? d_out : Q;
#pragma unroll
      for (int k = 0; k < kWidth; k += 16) {
        unsigned keys[kCount][4];
        load_left<kWidth>(keys, of_keys, warp_key, k);
#pragma unroll
        for (int q = 0; q < kQueries; q += kAtOnce) {
          unsigned queries[kAtOnce / 16][4];
          load_right_transposed<kWidth>(queries, of_queries, k, q);
#pragma unroll
          for (int m = 0; m < kCount; ++m) {
#pragma unroll
            for (int j = 0; j < kAtOnce / 8; ++j) {
              mma_m16n8k16<T>(own[m][q / 8 + j], keys[m], queries[j / 2][j % 2 * 2],
                              queries[j / 2][j % 2 * 2 + 1]);
            }
          }
        }
      }
    }
    if (!is_second) {
      // The first query of the tile sees the fewest keys. Where it sees all of the block's, nothing
      // is masked. (A query behind the last one is all zeros, and so are its parts of the results.)
      const bool masked = key0 + kKeys > in.limit(query);
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float2 bases =
            *reinterpret_cast<const float2*>(&shared.bases[stage][8 * j + lane % 4 * 2]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float base = e == 0 ? bases.x : bases.y;
#pragma unroll
          for (int r = 0; r < 2 * kCount; ++r) {  // the lane's keys, 8 apart
            float& p = own[r / 2][j][r % 2 * 2 + e];
            p = exp2_approximate(fmaf(p, scale, -base));
          }
        }
      }
      if (masked) {
#pragma unroll
        for (int j = 0; j < kQueries / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int q = 8 * j + lane % 4 * 2 + e;
            const int own_limit = in.limit(query + q) - key0 - warp_key - lane / 4;
#pragma unroll
            for (int r = 0; r < 2 * kCount; ++r) {
              if (8 * r >= own_limit) own[r / 2][j][r % 2 * 2 + e] = 0;
            }
          }
        }
      }
    }
    if (step + 1 < count) store_number(ahead, 1 - stage);
    __syncthreads();                             // dS of the step before has been read
    unsigned rounded[kQueries / 8][2 * kCount];  // P^T, or dS^T
    if (!is_second) {
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
#pragma unroll
        for (int r = 0; r < 2 * kCount; ++r) {
          rounded[j][r] = pack2<T>(own[r / 2][j][r % 2 * 2], own[r / 2][j][r % 2 * 2 + 1]);
          *pair_in<kQueries>(shared.dS, warp_key, 0, r, j) = rounded[j][r];
        }
      }
    }
    named_barrier(1 + pair, 64);  // the pair's P^T is there
    if (is_second) {
#pragma unroll
      for (int k = 0; k < kQueries; k += 16) {
        unsigned p[kCount][4];  // P^T as a left factor
        load_left<kQueries>(p, shared.dS, warp_key, k);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = k / 8 + half;
          const float2 row_sums =
              *reinterpret_cast<const float2*>(&shared.row_sums[stage][8 * j + lane % 4 * 2]);
#pragma unroll
          for (int r = 0; r < 2 * kCount; ++r) {
            const T(&two)[2] = reinterpret_cast<const T(&)[2]>(p[r / 2][2 * half + r % 2]);
            const float* const dP = &own[r / 2][j][r % 2 * 2];
            rounded[j][r] = pack2<T>(static_cast<float>(two[0]) * (dP[0] - row_sums.x),
                                     static_cast<float>(two[1]) * (dP[1] - row_sums.y));
          }
        }
        __syncwarp();  // the warp has P^T of these queries
#pragma unroll
        for (int j = k / 8; j < k / 8 + 2; ++j) {
#pragma unroll
          for (int r = 0; r < 2 * kCount; ++r) {
            *pair_in<kQueries>(shared.dS, warp_key, 0, r, j) = rounded[j][r];
          }
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kQueries; k += 16) {
      unsigned left[kCount][4];
#pragma unroll
      for (int i = 0; i < 4 * kCount; ++i) {
        left[i / 4][i % 4] = rounded[k / 8 + i / 2 % 2][i / 4 * 2 + i % 2];
      }
#pragma unroll
      for (int col = 0; col < kWidth; col += 64) {
        unsigned right[4][4];
        load_right<kWidth>(right, is_second ? Q : d_out, k, col);
#pragma unroll
        for (int m = 0; m < kCount; ++m) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            mma_m16n8k16<T>(gradients[m][col / 8 + j], left[m], right[j / 2][j % 2 * 2],
                            right[j / 2][j % 2 * 2 + 1]);
          }
        }
      }
    }
  }

  __syncthreads();  // K and V have been read: results take their place
  const int own0 = key0 + warp_key, there = in.keys - own0;
  if (is_second) {
    T* const to = in.dK + batch * in.dk.batch + place.kv_head * in.dk.head + own0 * in.dk.row;
    store_keys<Tile>(shared.K, warp_key, gradients, in.scale, to, in.dk.row, there, in.width);
  } else {
    T* const to = in.dV + batch * in.dv.batch + place.kv_head * in.dv.head + own0 * in.dv.row;
    store_keys<Tile>(shared.V, warp_key, gradients, 1, to, in.dv.row, there, in.width);
  }
}

}  // namespace operators::attention
