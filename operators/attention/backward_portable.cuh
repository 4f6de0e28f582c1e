// The gradients of attention on any GPU from compute capability 8.0 on: *tensor cores* of
// bonus_attention_backward.cu for rows that lie anywhere, of any width up to 256. And what comes
// before it and after it.
#pragma once

#include "operators/attention/portable.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/neighbours.cuh"
#include "primitives/spin.cuh"

namespace operators::attention {

/// What a kernel gets. `out` and `log_sums` are read here. row_sums (batch, heads, queries) is D,
/// the sum of d_out * out over each row of these; dq_sums is where parts of dQ are added up. Where
/// that happens in order, counts[part] is how many blocks have added to a part of dQ. Where several
/// items share the steps of a tile of keys, kv_sums is where each leaves its dK and dV (KeySums).
template <typename T>
struct BackwardOperands : AttentionOperands<T> {
  const T* d_out;
  T *dQ, *dK, *dV;
  float *row_sums, *dq_sums, *kv_sums;
  unsigned *counts, *drawn;  // drawn: how many items blocks have drawn (BackwardHopperBlock)
  Strides d_o, dq, dk, dv;
  int sequences;  // heads of K and V, of all batches
  int abreast;    // of these: see BackwardPlace
  int plain;      // so many tiles of keys are an item each
  int splits;     // and the others so many items; with runs, the most blocks that share a tile
  int run;        // so many steps a block has of all tiles, one after the other; 0: no runs
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

// Of widths up to kWidth a lane owns 8 neighbours of a row, 16 bytes, and as many lanes as that
// takes own the row.
inline constexpr int kRowThreads = 256, kRowsAtOnce = 2;
template <int kWidth>
inline constexpr int kBlockRows = kRowThreads / (kWidth / 8) * kRowsAtOnce;

/// D of `rows` rows, zeros in so many rows of dq_sums, of kWidth floats, and so many counts of 0. A
/// thread has kRowsAtOnce rows, and loads what it has of all of them before it uses any of it.
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

/// dQ: the sums, scaled and rounded. dq_sums is (batch, queries, heads, kWidth).
template <typename T, int kWidth>
__global__ void __launch_bounds__(kRowThreads)
    attention_finish_dq(BackwardOperands<T> in, int rows) {
  constexpr int kLanes = kWidth / 8, kRows = kRowThreads / kLanes;
  const int col = threadIdx.x % kLanes * 8;
#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    const int row =
        static_cast<int>(blockIdx.x) * kBlockRows<kWidth> + threadIdx.x / kLanes + i * kRows;
    if (row >= rows || col >= in.width) return;
    const float4* const sums =
        reinterpret_cast<const float4*>(in.dq_sums + int64_t{row} * kWidth + col);
    const float4 left = sums[0], right = sums[1];
    const float scale = in.scale;
    *reinterpret_cast<uint4*>(in.dQ + in.begin_of(row, in.dq) + col) = make_uint4(
        pack2<T>(scale * left.x, scale * left.y), pack2<T>(scale * left.z, scale * left.w),
        pack2<T>(scale * right.x, scale * right.y), pack2<T>(scale * right.z, scale * right.w));
  }
}

// ---- Between these ------------------------------------------------------------------------------

/// A block owns kKeys keys of a head of K and V, a warp kOwn of them, and of these dK and dV. Tiles
/// of kQueries rows of Q and d_out stream past.
///
/// With a width of 256 dK and dV of 16 keys would be 256 registers a lane. So two warps have the
/// same keys: the even one has P and dV, the odd one has dS and dK. The tile of queries is as small
/// as makes a block fit into 99 KB.
template <typename T_, int kWidth_>
struct BackwardTile {
  using T = T_;
  static constexpr int kWidth = kWidth_;
  static constexpr bool kInPairs = kWidth > 128, kAligned = true;
  static constexpr int kWarps = kInPairs ? 8 : 4, kThreads = 32 * kWarps;
  static constexpr int kBlocks = kInPairs ? 1 : 2;     // that a multiprocessor has at a time
  static constexpr int kCount = kWidth == 64 ? 2 : 1;  // matrices of 16 keys that a warp has
  static constexpr int kOwn = 16 * kCount, kKeys = (kInPairs ? 4 : kWarps) * kOwn;
  static constexpr int kQueries = kInPairs ? 16 : 32;
};

template <class Tile>
struct BackwardShared {
  using T = typename Tile::T;
  struct Stage {
    alignas(128) T Q[Tile::kQueries * Tile::kWidth];
    T d_out[Tile::kQueries * Tile::kWidth];
    float log_sums[Tile::kQueries], row_sums[Tile::kQueries];
  };
  alignas(128) T K[Tile::kKeys * Tile::kWidth];
  T V[Tile::kKeys * Tile::kWidth];
  T dS[Tile::kKeys * Tile::kQueries];  // transposed: a row has all queries of a key
  Stage stages[2];
};

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
/// order, a block takes its steps in the order of the block of the keys before, and may stop
/// sooner: from the last tile on, and the heads alternate. Of `splits` shares number `split` has
/// every splits-th step, from this number on, or none. So the order is the same for the shares of
/// two tiles of keys that have the same number, too. (With runs it has the steps from `first` to
/// the one before `after`.)
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

/// A lane's sums of kCount x 16 rows become left factors whose columns k to k + 15 they are.
template <typename T, int kCount, int kCols8>
__device__ __forceinline__ void to_left(unsigned (&a)[kCount][4],
                                        const float (&sums)[kCount][kCols8][4], int k) {
  // Registers 0 and 1 of a left factor are the lane's two rows of the left 8 columns, 2 and 3 of
  // the right 8: the lane has exactly these four pairs of the sums.
#pragma unroll
  for (int i = 0; i < 4 * kCount; ++i) {
    const float* const pair = &sums[i / 4][k / 8 + i / 2 % 2][i % 2 * 2];
    a[i / 4][i % 4] = pack2<T>(pair[0], pair[1]);
  }
}

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

/// K and V of a block stay in shared memory. The queries of all heads that share them come a tile
/// at a time, the next ones' Q and d_out while these are multiplied, with their logarithms and D.
/// From K Q^T and V d_out^T a lane has of P^T and dS^T just what it has to hold of a left factor:
/// these do not leave its registers for dV += P^T d_out and dK += dS^T Q. For dQ += dS K, a sum
/// over the keys of all warps, dS^T goes through shared memory, and each warp makes a quarter of
/// the columns. Other blocks have other keys: parts of dQ are added up in memory by atomicAdd; with
/// kInOrder each part of a tile when those of the keys before are there. Of a pair of warps one has
/// the logits and the other dP; P^T goes from the one to the other where dS^T will be.
template <class Tile, bool kInOrder>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    attention_backward_portable(BackwardOperands<typename Tile::T> in) {
  using T = typename Tile::T;
  constexpr int kWidth = Tile::kWidth, kKeys = Tile::kKeys, kQueries = Tile::kQueries;
  constexpr int kCount = Tile::kCount, kOwn = Tile::kOwn;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<Tile>*>(shared_bytes);
  if (!kInOrder && sequence_of_block() >= in.sequences) return;
  const auto place = kInOrder
                         ? BackwardPlace::of_item(in, static_cast<int>(blockIdx.x), kKeys)
                         : BackwardPlace(in, static_cast<int>(blockIdx.x), sequence_of_block());
  const int key0 = place.key_tile * kKeys, batch = place.batch;
  const int head0 = place.kv_head * in.group;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_key = (Tile::kInPairs ? warp / 2 : warp) * kOwn;

  // A step is a tile of queries of a head. Query s sees key0 if s + keys - queries >= key0.
  const int first_tile = in.first_query(key0) / kQueries;
  const int all_tiles = ceil_div(in.queries, kQueries);
  const BackwardSteps<kInOrder> steps(first_tile, all_tiles, in.group);
  const auto head_of = [&](int step) { return head0 + steps.of_group(step); };
  const auto query_of = [&](int step) { return steps.tile(step) * kQueries; };
  const auto copy_step = [&](int step) {
    if (step == 0) {
      const T* const K = in.K + batch * in.k.batch + place.kv_head * in.k.head;
      const T* const V = in.V + batch * in.v.batch + place.kv_head * in.v.head;
      const int there = in.keys - key0;
      copy_rows<Tile, kKeys>(shared.K, K + key0 * in.k.row, in.k.row, there, in.width);
      copy_rows<Tile, kKeys>(shared.V, V + key0 * in.v.row, in.v.row, there, in.width);
    }
    if (step >= steps.count()) return;
    const int head = head_of(step), query = query_of(step), there = in.queries - query;
    auto& stage = shared.stages[step % 2];
    copy_rows<Tile, kQueries>(stage.Q,
                              in.Q + batch * in.q.batch + query * in.q.row + head * in.q.head,
                              in.q.row, there, in.width);
    copy_rows<Tile, kQueries>(
        stage.d_out, in.d_out + batch * in.d_o.batch + query * in.d_o.row + head * in.d_o.head,
        in.d_o.row, there, in.width);
    if (threadIdx.x >= 2 * kQueries) return;
    const bool is_sum = threadIdx.x >= kQueries;
    const int i = threadIdx.x % kQueries;
    const float* const from = is_sum ? in.row_sums : in.log_sums;
    copy_async<4>((is_sum ? stage.row_sums : stage.log_sums) + i,
                  from + (batch * in.heads + head) * in.queries + query + i, i < there);
  };
  auto ahead = copies_ahead<2>(copy_step);
  const auto count_of = [&](int step) {
    const int head = batch * in.heads + head_of(step);
    return GridCount(in.counts[head * all_tiles + steps.tile(step)]);
  };

  const float scale = in.scale * kLog2E;
  // A query without a logit has no P: then the base is +infinity.
  const auto base_of = [](float log_sum) {
    return log_sum == minus_infinity() ? -minus_infinity() : log_sum * kLog2E;
  };
  // In pairs a warp has one of these: the even one dV, the odd one dK.
  float dK[kCount][kWidth / 8][4] = {}, dV[kCount][kWidth / 8][4] = {};
  for (int step = 0; step < steps.count(); ++step) {
    const int query = query_of(step);
    const auto& stage = shared.stages[ahead.next() % 2];

    // The first query of the tile sees the fewest keys. Where it sees all of the block's, nothing
    // is masked. (A query behind the last one is all zeros, and so are its parts of the results.)
    const bool masked = key0 + kKeys > in.limit(query);
    if constexpr (Tile::kInPairs) {
      const bool odd = warp % 2;
      const T* const of_keys = odd ? shared.V : shared.K;
      const T* const of_queries = odd ? stage.d_out : stage.Q;
      float own[1][kQueries / 8][4] = {};  // logits, then P; or dP, then dS
#pragma unroll
      for (int k = 0; k < kWidth; k += 16) {
        unsigned keys[1][4], queries[kQueries / 16][4];
        load_left<kWidth>(keys, of_keys, warp_key, k);
        load_right_transposed<kWidth>(queries, of_queries, k, 0);
        add_product<T>(own, keys, queries);
      }
      if (!odd) {
#pragma unroll
        for (int i = 0; i < kQueries / 2; ++i) {
          const int q = i / 4 * 8 + lane % 4 * 2 + i % 2;
          float& p = own[0][i / 4][i % 4];
          p = exp2_approximate(fmaf(p, scale, -base_of(stage.log_sums[q])));
          const int key = key0 + warp_key + lane / 4 + i / 2 % 2 * 8;
          if (masked && key >= in.limit(query + q)) p = 0;
        }
        to_tile<kQueries>(shared.dS, warp_key, 0, own);
      }
      __syncthreads();  // P^T is there
      if (odd) {
#pragma unroll
        for (int i = 0; i < kQueries / 2; i += 2) {
          const unsigned pair = *pair_in<kQueries>(shared.dS, warp_key, 0, i / 2 % 2, i / 4);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int q = i / 4 * 8 + lane % 4 * 2 + e;
            float& ds = own[0][i / 4][i % 4 + e];
            ds = static_cast<float>(reinterpret_cast<const T(&)[2]>(pair)[e]) *
                 (ds - stage.row_sums[q]);
          }
        }
        to_tile<kQueries>(shared.dS, warp_key, 0, own);
      }
#pragma unroll
      for (int k = 0; k < kQueries; k += 16) {
        unsigned left[1][4], right[kWidth / 16][4];
        to_left<T>(left, own, k);
        load_right<kWidth>(right, odd ? stage.Q : stage.d_out, k, 0);
        add_product<T>(dV, left, right);
      }
    } else {
      float P[kCount][kQueries / 8][4] = {}, dS[kCount][kQueries / 8][4] = {};
#pragma unroll
      for (int k = 0; k < kWidth; k += 16) {
        unsigned keys[kCount][4], queries[kQueries / 16][4];
        load_left<kWidth>(keys, shared.K, warp_key, k);
        load_right_transposed<kWidth>(queries, stage.Q, k, 0);
        add_product<T>(P, keys, queries);
      }
#pragma unroll
      for (int k = 0; k < kWidth; k += 16) {
        unsigned values[kCount][4], d_out[kQueries / 16][4];
        load_left<kWidth>(values, shared.V, warp_key, k);
        load_right_transposed<kWidth>(d_out, stage.d_out, k, 0);
        add_product<T>(dS, values, d_out);
      }

      // From logits and dP to P and dS.
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int q = 8 * j + lane % 4 * 2 + e;
          const float log_sum = stage.log_sums[q], row_sum = stage.row_sums[q];
          const float base = base_of(log_sum);
          const int own_limit = in.limit(query + q) - key0 - warp_key - lane / 4;
#pragma unroll
          for (int r = 0; r < 2 * kCount; ++r) {  // the lane's keys, 8 apart
            float &p = P[r / 2][j][r % 2 * 2 + e], &ds = dS[r / 2][j][r % 2 * 2 + e];
            p = exp2_approximate(fmaf(p, scale, -base));
            if (masked && 8 * r >= own_limit) p = 0;
            ds = p * (ds - row_sum);
          }
        }
      }

      to_tile<kQueries>(shared.dS, warp_key, 0, dS);
#pragma unroll
      for (int k = 0; k < kQueries; k += 16) {
        unsigned left[kCount][4], right[kWidth / 16][4];
        to_left<T>(left, P, k);
        load_right<kWidth>(right, stage.d_out, k, 0);
        add_product<T>(dV, left, right);
        to_left<T>(left, dS, k);
        load_right<kWidth>(right, stage.Q, k, 0);
        add_product<T>(dK, left, right);
      }
    }

    __syncthreads();  // all of dS^T is there
    constexpr int kCols = kWidth / Tile::kWarps;
    float dQ[kQueries / 16][kCols / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kKeys; k += 16) {
      unsigned left[kQueries / 16][4], keys[kCols / 16][4];
      load_left_transposed<kQueries>(left, shared.dS, 0, k);
      load_right<kWidth>(keys, shared.K, k, warp * kCols);
      add_product<T>(dQ, left, keys);
    }
    if constexpr (kInOrder) {
      if (threadIdx.x == 0) {
        wait_for_count(count_of(step), static_cast<unsigned>(place.key_tile),
                       "the parts of dQ of the keys before");
      }
      __syncthreads();
    }
    for_pairs(dQ, query, warp * kCols, in.queries, in.width, [&](int row, int col, float2 pair) {
      const int64_t of_sums = (batch * in.queries + row) * in.heads + head_of(step);
      float* const to = in.dq_sums + of_sums * kWidth + col;
      atomicAdd(to, pair.x);
      atomicAdd(to + 1, pair.y);
    });
    if constexpr (kInOrder) {
      __syncthreads();
      if (threadIdx.x == 0) count_of(step).fetch_add(1, cuda::memory_order_release);
    }
  }

  __syncthreads();  // K and V have been read: results take their place
  const int own0 = key0 + warp_key, there = in.keys - own0;
  T* const to_dV = in.dV + batch * in.dv.batch + place.kv_head * in.dv.head + own0 * in.dv.row;
  T* const to_dK = in.dK + batch * in.dk.batch + place.kv_head * in.dk.head + own0 * in.dk.row;
  if constexpr (Tile::kInPairs) {
    if (warp % 2 == 1) {
      store_keys<Tile>(shared.K, warp_key, dV, in.scale, to_dK, in.dk.row, there, in.width);
      return;
    }
  }
  store_keys<Tile>(shared.V, warp_key, dV, 1, to_dV, in.dv.row, there, in.width);
  if constexpr (!Tile::kInPairs) {
    store_keys<Tile>(shared.K, warp_key, dK, in.scale, to_dK, in.dk.row, there, in.width);
  }
}

}  // namespace operators::attention
