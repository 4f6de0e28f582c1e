// The gradients of attention on Hopper for heads of up to 128 columns, with rows that may have gaps
// but begin at multiples of 16 bytes. Parts of dQ are added up *in order* of the keys, which gives
// the same bits each time (*deterministic* of bonus_attention_backward.cu), or *in any order*
// (*warp specialization*).
//
// What is computed. P and dS have a row for each query and a column for each key. They are never in
// memory as a whole:
//
//     P = exp(scale Q K^T - log_sums)     dP = d_out V^T     dS = P (dP - D)
//     dV = P^T d_out     dK = scale dS^T Q     dQ = scale dS K
//
// D has a number for each query: the sum of d_out * out over its row. attention_row_sums has
// computed it.
//
// What a block does. An *item* is 128 keys of a head of K and V, with the queries that see them, of
// all heads of Q that use this head; or, where keys are divided, with some of these queries. There
// is a block for each multiprocessor, and it computes item after item. A *step* of an item is a
// tile of queries: 128 of them if heads have up to 64 columns, else 64. The kernel for heads of 65
// to 96 columns multiplies 96, and that for wider ones 128. BackwardPlace says which steps an item
// has.
//
// Who does what in a block:
//
//     producer        a warp. It has the copy engine bring K and V of an item, and Q and d_out of a
//                     step. It loads log_sums and D of the step itself, and says which step it is.
//     two consumers   a warpgroup each. A consumer computes with 64 of the item's keys, and has
//                     their dK and dV in registers.
//     two adders      one thread each in two warps, only in order. An adder has the copy engine add
//                     a consumer's parts of dQ to the sums in memory.
//
// What moves where:
//
//     K, V        go from memory to shared memory, once for an item. K has two places: it is read
//                 until the item's end, and the next item's K comes meanwhile. V is free a little
//                 sooner, and has one place.
//     Q, d_out    go from memory to a stage in shared memory, once for a step.
//     P^T, dS^T   stay in the consumer's registers, where they are left factors of dV and dK. The
//                 right factors of all products are read from shared memory.
//     dS^T        also goes to shared memory: dQ is summed over the keys of both consumers, and a
//                 thread has only some numbers of its own consumer in registers. wgmma reads dS^T
//                 transposed, as the left factor of dQ. It has two places.
//     dQ          is added to sums in memory, as other items' keys add to it, too. In a step a
//                 consumer computes a *part* of dQ, 64 x 64 numbers: half of the tile's queries,
//                 or, if the tile has 64, columns 0 to 63 or the others.
//     dK, dV      go from registers to memory at the item's end. Four lanes exchange what they have
//                 of four groups of eight columns, and then each stores one group, 16 bytes.
//
// Why dQ is late. If a consumer waited for the other one's dS^T of the same step, the two would
// meet in each step. Then both would compute exponentials at the same time, and the tensor cores
// would have little to do. So a consumer computes dQ of the step before. The other consumer has
// left its dS^T of that step long ago, and nobody waits. While one computes exponentials, products
// of the other one run. On an H200 this saves 7 to 9 % with 64 columns. Wider heads have half as
// many exponentials for the same products. With these a late dQ saves 2 % in any order, and costs
// 2 % in order. So in order their dQ is not late, and the consumers meet.
//
// Why threads add dQ, in any order. They add four numbers by one instruction, and do not wait for
// it. Meanwhile the products for dK run. By way of shared memory and the copy engine, as
// *reduce-add* does it, the warps of a consumer would have to meet, which costs up to 4 % on an
// H200. Nobody but attention_finish_parts reads the sums, so they lie in memory as they lie in
// registers. Of a part a thread has 32 numbers, in eight groups of four. For each group the four
// numbers of a consumer's 128 threads are neighbours in memory. If an item has all keys of a
// head, its part is dQ itself, and the consumer stores it there.
//
// In order, the parts of a head's keys are added up in the order of these keys. A consumer leaves
// its part in shared memory. The adder waits until the parts of the keys before are added, and then
// has the copy engine add this one (BackwardPlace says why nobody waits forever). The item of the
// first keys stores its parts. So the sums need not begin as zeros.
//
// The last tile. A tile of 128 queries may be half empty. Then its step is computed with 64 of
// them, which takes half as long.
//
// Few items. If there are fewer items than multiprocessors, or a few more than fill whole rounds,
// the steps of some tiles of keys are divided among several blocks. Each of these leaves its sums
// of dK and dV in memory, as they lie in registers. attention_finish_parts adds them up.
#pragma once

#include "operators/attention/backward_portable.cuh"
#include "operators/attention/hopper.cuh"

namespace operators::attention {

template <typename T_, int kWidth_, bool kInOrder_ = false>
struct BackwardHopperTile {
  using T = T_;
  static constexpr bool kInOrder = kInOrder_;
  static constexpr int kWidth = kWidth_, kKeys = 128, kQueries = kWidth == 64 ? 128 : 64;
  static constexpr int kBoxes = ceil_div(kWidth, kBoxCols), kThreads = 384;
  // Three only with 128 columns in any order: with 64 columns two are 5 % faster on an H200.
  static constexpr int kStages = kWidth == 128 && !kInOrder ? 3 : 2;
  static constexpr int kBlocks = 1;            // that share an item
  static constexpr int kPartFloats = 64 * 64;  // of dQ: what a consumer has of a tile of queries
  // Of 168 a thread. Each width has few to spare: with 24 a producer of 128 queries would spill.
  static constexpr int kProducerRegisters = kWidth == 64 ? 40 : 24;
  static constexpr int kConsumerRegisters = kWidth == 64 ? 232 : 240;
};

/// What a step is, as the producer says it.
struct BackwardStep {
  int item, count;  // the step's item, or -1 after the last one; how many steps it has
  int key_tile;     // the item's
  int query0;       // where the tile of queries begins
  int part, next;   // the tile's first part of dQ (its second is part + 1); the next step's, or -1
};

/// The consumers' parts of dQ, in order.
template <bool kInOrder>
struct BackwardParts {};
template <>
struct BackwardParts<true> {
  float4 parts[2][8][128];  // 64 x 64 numbers of each consumer
};

template <class Tile>
struct BackwardHopperShared : BackwardParts<Tile::kInOrder> {
  using T = typename Tile::T;
  struct Stage {
    Box<T, Tile::kQueries> Q[Tile::kBoxes], d_out[Tile::kBoxes];
  };
  LeftTile<T, Tile::kKeys> K[2][Tile::kBoxes], V[Tile::kBoxes];
  Box<T, Tile::kKeys> dS[2][Tile::kQueries / 64];  // transposed: 128 keys by 64 queries each
  Pipeline<Stage, Tile::kStages> pipeline;
  // Of each stage, filled by the producer's threads.
  float log_sums[Tile::kStages][Tile::kQueries], row_sums[Tile::kStages][Tile::kQueries];
  BackwardStep steps[2 * Tile::kStages];  // of two laps, as dQ may be a step late
  // Of each consumer, for the warp that adds in order: its part, or -1 after the last one; how many
  // tiles of keys come before; its next part, or -1.
  struct {
    int part, before, next;
  } posts[2];
  Barrier K_full[2], K_empty[2], V_full, V_empty, part_full[2], part_empty[2];
  Barrier dS_full[2], dS_empty[2];  // if dQ is late
};

/// Of five dimensions each, as AttentionMaps has them. What a box has behind the width is read as
/// zeros.
struct BackwardMaps {
  CUtensorMap Q, d_out, K, V;
};

/// Where splits leave dK and dV of 64 keys: sums of kFloats numbers, as they lie in registers,
/// those of all splits one after the other. Heads of 96 columns have as much room as those of 128.
template <int kWidth>
struct KeySums {
  static constexpr int kFloats = 64 * ceil_div(kWidth, 64) * 64;

  /// keys64: which 64 keys, counted along all tiles that are divided.
  __device__ static int64_t place(int keys64, bool of_dV, int splits, int split) {
    return ((int64_t{keys64} * 2 + of_dV) * splits + split) * kFloats;
  }
};

#if HOPPER_CODE
/// Rounds a warpgroup's sums, times `factor`, and stores them where `to` begins, in rows `stride`
/// elements apart; as many as there are `rows` and `cols` there, a multiple of 8. All lanes call
/// it.
template <typename T, int kCols>
__device__ __forceinline__ void store_rows(const Sum<kCols>& sum, float factor, T* to,
                                           int64_t stride, int rows, int cols) {
  const int lane4 = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // rows 8 apart
    const int row = Sum<kCols>::row(2 * half);
#pragma unroll
    for (int col = 0; col < kCols; col += 32) {
      // A lane has two columns of each of four groups of eight. After two exchanges it has all of
      // one group.
      uint32_t pairs[4];
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        const int i = col / 2 + 4 * group + 2 * half;
        pairs[group] = pack2<T>(factor * sum.elements[i], factor * sum.elements[i + 1]);
      }
#pragma unroll
      for (int apart = 1; apart < 4; apart *= 2) {
        const bool upper = lane4 & apart;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int low = apart == 1 ? 2 * j : j;
          uint32_t &a = pairs[low], &b = pairs[low + apart];
          const uint32_t got = __shfl_xor_sync(0xffffffff, upper ? a : b, apart);
          upper ? a = got : b = got;
        }
      }
      if (row < rows && col + 8 * lane4 < cols) {
        *reinterpret_cast<uint4*>(to + row * stride + col + 8 * lane4) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }
}
/// Adds columns kFirst to kAfter - 1 of a warpgroup's sums to those in memory, as they lie in
/// registers, four at a time: these are of eight columns. Each addition is atomic by itself.
template <int kFirst, int kAfter>
__device__ __forceinline__ void add_sums(const Sum<64>& sum, float* to) {
#pragma unroll
  for (int i = kFirst / 8; i < kAfter / 8; ++i) {
    const float* const of = &sum.elements[4 * i];
    float4* const own = reinterpret_cast<float4*>(to) + 128 * i + threadIdx.x % 128;
#ifdef CUDA_CPU
    for (int e = 0; e < 4; ++e) atomicAdd(&own->x + e, of[e]);
#else
    atomicAdd(own, make_float4(of[0], of[1], of[2], of[3]));
#endif
  }
}
/// The sums of a warpgroup, times `factor`, as they lie in registers.
template <int kCols>
__device__ __forceinline__ void store_sums(const Sum<kCols>& sum, float factor, float* to) {
#pragma unroll
  for (int i = 0; i < sum.size() / 4; ++i) {
    const float* const of = &sum.elements[4 * i];
    reinterpret_cast<float4*>(to)[128 * i + threadIdx.x % 128] =
        make_float4(factor * of[0], factor * of[1], factor * of[2], factor * of[3]);
  }
}

/// dK or dV of 64 keys from `key0` on: to where they belong, or, with splits, where these are added
/// up.
template <int kWidth, typename T>
__device__ __forceinline__ void store_key_sums(const BackwardOperands<T>& in, bool of_dV,
                                               const Sum<kWidth>& sum, const BackwardPlace& place,
                                               int key0, int keys_of_tile) {
  const float factor = of_dV ? 1 : in.scale;
  if (place.splits > 1) {
    const int keys64 = ((place.tile - in.plain) * keys_of_tile + key0 % keys_of_tile) / 64;
    store_sums(sum, factor,
               in.kv_sums + KeySums<kWidth>::place(keys64, of_dV, in.splits, place.split));
    return;
  }
  const Strides& by = of_dV ? in.dv : in.dk;
  T* const to = (of_dV ? in.dV : in.dK) + place.batch * by.batch + place.kv_head * by.head;
  store_rows(sum, factor, to + key0 * by.row, by.row, in.keys - key0, in.width);
}

/// What a consumer does with 64 keys and a tile's queries, or their first half, between two
/// products.
template <class Tile, int kQueries = Tile::kQueries>
struct BackwardConsumer {
  using T = typename Tile::T;
  using Product = Sum<kQueries>;                   // 64 keys by the queries
  using Factor = LeftFragments<T, kQueries / 16>;  // the same, rounded

  /// Logits become P; for keys, of those from own_key0 on, that a query does not see it is 0.
  __device__ __forceinline__ static void to_probabilities(Product& P, const BackwardOperands<T>& in,
                                                          const float* log_sums, int query0,
                                                          int own_key0) {
    const float scale = in.scale * kLog2E;
#pragma unroll
    for (int i = 0; i < P.size(); ++i) {
      P.elements[i] = exp2_approximate(fmaf(P.elements[i], scale, -log_sums[Product::col(i)]));
    }
    if (own_key0 + 64 <= in.limit(query0)) return;
#pragma unroll
    for (int i = 0; i < P.size(); ++i) {
      if (own_key0 + Product::row(i) >= in.limit(query0 + Product::col(i))) P.elements[i] = 0;
    }
  }
  /// A sum, rounded, is a left factor where it is: element for element.
  __device__ __forceinline__ static void to_factor(Factor& factor, const Product& sum) {
#pragma unroll
    for (int i = 0; i < sum.size(); i += 2) {
      factor.slices[i / 8][i / 2 % 4] = pack2<T>(sum.elements[i], sum.elements[i + 1]);
    }
  }
  /// dP becomes dS = P (dP - D). With a width of 64 the registers of P are needed: there dS is
  /// computed from P as the tensor cores get it, rounded.
  __device__ __forceinline__ static void to_gradients(Product& dS, const Product& P,
                                                      const Factor& rounded,
                                                      const float* row_sums) {
#pragma unroll
    for (int i = 0; i < dS.size(); i += 2) {
      const auto& pair = reinterpret_cast<const T(&)[2]>(rounded.slices[i / 8][i / 2 % 4]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float p = Tile::kWidth == 64 ? static_cast<float>(pair[j]) : P.elements[i + j];
        dS.elements[i + j] = p * (dS.elements[i + j] - row_sums[Product::col(i + j)]);
      }
    }
  }
};

template <class Tile>
struct BackwardHopperBlock {
  using T = typename Tile::T;
  using Shared = BackwardHopperShared<Tile>;
  using Stage = typename Shared::Stage;
  static constexpr int kWidth = Tile::kWidth;
  static constexpr bool kInOrder = Tile::kInOrder;
  static constexpr bool kLate = kWidth == 64 || !kInOrder;  // dQ is computed a step after dS
  Shared& shared;
  const BackwardMaps& maps;
  const BackwardOperands<T>& in;
  int consumer = static_cast<int>(threadIdx.x) / 128 - 1;

  __device__ BackwardHopperBlock(char* bytes, const BackwardMaps& of,
                                 const BackwardOperands<T>& operands)
      : shared(*reinterpret_cast<Shared*>(bytes)), maps(of), in(operands) {
    if (threadIdx.x == 0) {
      prepare(shared.pipeline, 2, 1 + 32);  // the copy engine's bytes, and a warp, fill a stage
      barrier_init(&shared.V_full, 1);
      barrier_init(&shared.V_empty, 2);
      for (int i = 0; i < 2; ++i) {
        barrier_init(&shared.K_full[i], 1);
        barrier_init(&shared.K_empty[i], 2);
        barrier_init(&shared.part_full[i], 4);  // the warps of a consumer
        barrier_init(&shared.part_empty[i], 1);
        barrier_init(&shared.dS_full[i], 8);  // the warps of both consumers
        barrier_init(&shared.dS_empty[i], 2);
      }
      barrier_init_fence();
    }
    __syncthreads();
  }

  __device__ bool has_run() const { return !kInOrder && in.run > 0; }
  /// Of a tile of keys, without a mask.
  __device__ int steps_of_tile() const { return in.group * ceil_div(in.queries, Tile::kQueries); }
  __device__ BackwardPlace place_of(int item) const {
    return has_run() ? BackwardPlace::of_run(in, item, Tile::kKeys, steps_of_tile())
                     : BackwardPlace::of_item(in, item, Tile::kKeys);
  }
  __device__ int items() const {
    const int tiles = in.sequences * ceil_div(in.keys, Tile::kKeys);
    return in.plain + (tiles - in.plain) * in.splits;
  }

  /// The producer warp. One thread starts the copies; all load logarithms and D. Where there is no
  /// query, and where a query sees no key or only logits of -infinity, P has to be 0: the logarithm
  /// becomes +infinity.
  ///
  /// A block's first item has its own number, and further ones are drawn from a counter in memory:
  /// an item of few steps, as with causal, is followed by another one sooner. In order, if there
  /// are more items than blocks, all are drawn. An item waits for those of lower numbers, and these
  /// must not belong to a block that has found no room yet beside another launch. With a run a
  /// block knows what it has, and draws nothing.
  __device__ void bring() const {
    const int lane = threadIdx.x % 32, all_tiles = ceil_div(in.queries, Tile::kQueries);
    const int all_items = items();
    const uint64_t policy = evict_normal();
    Writer writer(shared.pipeline);
    int drawn = has_run() ? next_of_run(-1) : static_cast<int>(blockIdx.x);
    bool waited = is_drawn_from_the_first(all_items);
    if (waited) {
      wait_for_previous_kernel();
      if (lane == 0) drawn = draw(all_items);
    }
    for (int n = 0;;) {
      const int item = __shfl_sync(0xffffffff, drawn, 0);
      if (item >= all_items) break;
      const BackwardPlace place = place_of(item);
      const int key0 = place.key_tile * Tile::kKeys;
      BackwardSteps<kInOrder> steps(in.first_query(key0) / Tile::kQueries, all_tiles, in.group,
                                    place.split, place.splits);
      if (has_run()) steps.take(place.first_step, place.step_after);
      const int count = steps.count(), head0 = place.sequence * in.group;
      const auto part_of = [&](int step) {
        return 2 * ((head0 + steps.of_group(step)) * all_tiles + steps.tile(step));
      };
      if (lane == 0 && count > 0) {
        Barrier* const full = &shared.K_full[n % 2];
        barrier_wait(&shared.K_empty[n % 2], n / 2 % 2 ^ 1);
        barrier_arrive_expect(full, sizeof shared.K[0]);
        for (int box = 0; box < Tile::kBoxes; ++box) {
          const int at[5] = {kBoxCols * box, 0, key0, place.kv_head, place.batch};
          tensor_load(shared.K[n % 2][box].row(0), &maps.K, at, full, policy);
        }
      }
      for (int step = 0; step < count; ++step) {
        const int of_group = steps.of_group(step), query0 = steps.tile(step) * Tile::kQueries;
        writer.wait();  // each lane for itself, as it will write
        const int at_stage = writer.ring.stage, at_step = number_of(writer.ring);
        Barrier& full = shared.pipeline.full[at_stage];
        if (lane > 0) {
          writer.ring.advance();
        } else {
          writer.put([&](Stage& to, Barrier* arrived) {
            for (int box = 0; box < Tile::kBoxes; ++box) {
              const int at[5] = {kBoxCols * box, of_group, query0, place.kv_head, place.batch};
              tensor_load(to.Q[box].row(0), &maps.Q, at, arrived, policy);
              tensor_load(to.d_out[box].row(0), &maps.d_out, at, arrived, policy);
            }
          });
          if (step == 0) {
            barrier_wait(&shared.V_empty, n % 2 ^ 1);
            barrier_arrive_expect(&shared.V_full, sizeof shared.V);
            for (int box = 0; box < Tile::kBoxes; ++box) {
              const int at[5] = {kBoxCols * box, 0, key0, place.kv_head, place.batch};
              tensor_load(shared.V[box].row(0), &maps.V, at, &shared.V_full, policy);
            }
          }
          shared.steps[at_step] = {item,           count,
                                   place.key_tile, query0,
                                   part_of(step),  step + 1 < count ? part_of(step + 1) : -1};
        }
        if (!waited) wait_for_previous_kernel();
        waited = true;
        const int row = (head0 + of_group) * in.queries + query0;
#pragma unroll
        for (int i = lane; i < Tile::kQueries; i += 32) {
          const bool exists = query0 + i < in.queries;
          const float log_sum = exists ? in.log_sums[row + i] : minus_infinity();
          shared.log_sums[at_stage][i] =
              log_sum == minus_infinity() ? -minus_infinity() : log_sum * kLog2E;
          shared.row_sums[at_stage][i] = exists ? in.row_sums[row + i] : 0;
        }
        barrier_arrive(&full);
        // Not sooner than it has to be: who has long items should not draw many.
        if (lane == 0 && step == max(0, count - 3)) {
          drawn = has_run() ? next_of_run(item) : draw(all_items);
        }
      }
      n += count > 0;
      if (count > 0) continue;
      if (!waited) wait_for_previous_kernel();
      waited = true;
      if (lane == 0) drawn = draw(all_items);
    }
    writer.wait();
    Barrier& full = shared.pipeline.full[writer.ring.stage];
    if (lane == 0) {
      shared.steps[number_of(writer.ring)].item = -1;
      barrier_arrive(&full);
    }
    barrier_arrive(&full);
  }
  __device__ bool is_drawn_from_the_first(int all_items) const {
    return kInOrder && static_cast<int>(gridDim.x) < all_items;
  }
  /// The next item: behind those that were not drawn.
  __device__ int draw(int all_items) const {
    const int first = is_drawn_from_the_first(all_items) ? 0 : static_cast<int>(gridDim.x);
    return first < all_items ? first + static_cast<int>(atomicAdd(in.drawn, 1u)) : all_items;
  }

  /// With a run, the block's item after `item`, or its first one after -1.
  __device__ int next_of_run(int item) const {
    const int block = static_cast<int>(blockIdx.x), steps = steps_of_tile();
    const int tile = item < 0 ? block * in.run / steps : item / in.splits + 1;
    if (item >= 0 && tile * steps >= (block + 1) * in.run) return items();
    return min(tile * in.splits + block - tile * steps / in.run, items());
  }

  /// Of a step in shared.steps.
  __device__ static int number_of(const Ring& ring) {
    return ring.stage + Tile::kStages * ring.parity;
  }
  /// And of the step before.
  __device__ static int before_of(int number) {
    return number == 0 ? 2 * Tile::kStages - 1 : number - 1;
  }

  /// product = left right^T: 64 keys of K or V by the first rows of Q or d_out.
  template <class Product>
  __device__ __forceinline__ void start_transposed(Product& product,
                                                   const LeftTile<T, Tile::kKeys>* left,
                                                   const Box<T, Tile::kQueries>* right) const {
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      if (kWidth == 96 && box == 1) {
        product.template start_product<2>(left[box].rows(64 * consumer),
                                          AlongK<T>{descriptor_a(right[box].elements)}, true);
      } else {
        product.template start_product<kSlices>(
            left[box].rows(64 * consumer), AlongK<T>{descriptor_a(right[box].elements)}, box > 0);
      }
    }
  }
  /// The consumer's part of dQ = dS K, of all 128 keys.
  __device__ __forceinline__ void start_part(Sum<64>& part, const LeftTile<T, Tile::kKeys>* K,
                                             int at) const {
    const bool halves = kWidth == 64;  // of the queries, or else of the columns
    part.template start_product<Tile::kKeys / 16>(shared.dS[at][halves ? consumer : 0].across_k(),
                                                  K[halves ? 0 : consumer].across_k(), false);
  }
  /// The part of a step goes to dQ, if it is whole, or to where the parts of other keys are added
  /// to it. `at`: its place of dS^T, which is also the parity of how many steps there were before.
  __device__ __forceinline__ void add_part(const Sum<64>& part, const BackwardStep& step,
                                           int at) const {
    const int thread = threadIdx.x % 128;
    if (in.whole) {
      const int head = step.part / 2 / ceil_div(in.queries, Tile::kQueries);
      const int query0 = step.query0 + (kWidth == 64 ? 64 * consumer : 0);
      const int col0 = kWidth == 64 ? 0 : 64 * consumer;
      T* const to = in.dQ + head / in.heads * in.dq.batch + head % in.heads * in.dq.head;
      store_rows(part, in.scale, to + query0 * in.dq.row + col0, in.dq.row, in.queries - query0,
                 in.width - col0);
      return;
    }
    if constexpr (!kInOrder) {
      if (kWidth == 64 && step.query0 + 64 * consumer >= in.queries) return;
      float* const to = in.dq_sums + int64_t{step.part + consumer} * Tile::kPartFloats;
      // With a width of 96 the second consumer has 32 columns.
      constexpr int kBoth = kWidth % 64 == 0 ? 64 : kWidth % 64;
      add_sums<0, kBoth>(part, to);
      if (kBoth < 64 && consumer == 0) add_sums<kBoth, 64>(part, to);
    } else {
      barrier_wait(&shared.part_empty[consumer], at ^ 1);  // the part before has left
#pragma unroll
      for (int i = 0; i < part.size() / 4; ++i) {
        const float* const of = &part.elements[4 * i];
        shared.parts[consumer][i][thread] = make_float4(of[0], of[1], of[2], of[3]);
      }
      shared_fence();
      const int next = step.next < 0 ? -1 : step.next + consumer;
      post(step.part + consumer, step.key_tile, next);
    }
  }
  /// Tells the warp that adds the consumer's parts.
  __device__ __forceinline__ void post(int part, int before, int next) const {
    if (threadIdx.x % 128 == 0) shared.posts[consumer] = {part, before, next};
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&shared.part_full[consumer]);
  }
  /// A thread that adds a consumer's parts in order. The next step's count is looked at while this
  /// step's part is on its way.
  __device__ void add_in_order(int of_consumer) const {
    if (in.whole) return;
    const auto& from = shared.parts[of_consumer];
    const auto count_of = [&](int part) { return GridCount(in.counts[part]); };
    bool is_turn = false;
    for (int step = 0;; ++step) {
      barrier_wait(&shared.part_full[of_consumer], step % 2);
      const auto [part, key_tile, next] = shared.posts[of_consumer];
      if (part < 0) return;
      const auto before = static_cast<unsigned>(key_tile);
      float* const to = in.dq_sums + int64_t{part} * Tile::kPartFloats;
      if (before > 0 && !is_turn) {
        wait_for_count(count_of(part), before, "the parts of dQ of the keys before");
      }
      global_fence();  // the copy engine comes behind what the count says
      before == 0 ? bulk_store(to, &from[0][0].x, sizeof from)
                  : bulk_add(to, &from[0][0].x, sizeof from);
      tensor_store_commit();
      tensor_store_wait_read<0>();
      barrier_arrive(&shared.part_empty[of_consumer]);
      is_turn =
          before > 0 && next >= 0 && count_of(next).load(cuda::memory_order_acquire) >= before;
      tensor_store_wait<0>();
      count_of(part).fetch_add(1, cuda::memory_order_release);
    }
  }

  /// A consumer. If dQ is late, the first step has none to compute. It computes something from the
  /// other place for dS^T, which nobody needs: the product must not be left out, or ptxas would
  /// serialize all products.
  __device__ __forceinline__ void compute() const {
    const BlockGrid<1, 1> alone;
    Reader reader(shared.pipeline, alone);
    Sum<kWidth> dK, dV;
    const bool tells = threadIdx.x % 128 == 0;
    bool first = kLate;
    int turn = 0;            // how many steps there were before
    int K_before = 0;        // the place of K of the step before
    for (int n = 0;; ++n) {  // items
      reader.wait();
      const auto [item, count, key_tile, query0, part, next] = shared.steps[number_of(reader.ring)];
      if (item < 0) break;
      const int own_key0 = key_tile * Tile::kKeys + 64 * consumer;
      dK = {};
      dV = {};
      barrier_wait(&shared.K_full[n % 2], n / 2 % 2);
      barrier_wait(&shared.V_full, n % 2);
      // kQueries: the tile's, or 64, if there are no more of them.
      const auto compute_step = [&]<int kQueries>(int step) {
        using Consumer = BackwardConsumer<Tile, kQueries>;
        constexpr int kOfQueries = kQueries / 16;
        auto& stage = reader.wait();
        const int at = turn % 2;
        [[maybe_unused]] const int lap = turn / 2 % 2;  // of dS late
        const int at_stage = reader.ring.stage, number = number_of(reader.ring);
        typename Consumer::Product P, dS;
        typename Consumer::Factor P_factor, dS_factor;
        start_transposed(P, shared.K[n % 2], stage.Q);
        start_transposed(dS, shared.V, stage.d_out);
        wgmma_wait<Tile::kBoxes>();  // the logits
        Consumer::to_probabilities(P, in, shared.log_sums[at_stage], shared.steps[number].query0,
                                   own_key0);
        Consumer::to_factor(P_factor, P);
        dV.template start_product<kOfQueries>(P_factor, stage.d_out[0].across_k(), true);
        wgmma_wait<1>();  // dP
        if (step + 1 == count) alone.release(shared.V_empty);
        Consumer::to_gradients(dS, P, P_factor, shared.row_sums[at_stage]);
        Consumer::to_factor(dS_factor, dS);
        // dQ of two steps ago, or, in the second step, what the first one computes in its place.
        if constexpr (kLate) barrier_wait(&shared.dS_empty[at], lap ^ at ^ 1);
#pragma unroll
        for (int box = 0; box < kQueries / 64; ++box) {
          auto& own = reinterpret_cast<Box<T, 64>&>(*shared.dS[at][box].row(64 * consumer));
          dS.store(own, 64 * box, [&](int i) { return dS.elements[i]; });
        }
        shared_fence();
        Sum<64> dQ;
        if constexpr (kLate) {
          __syncwarp();
          if (threadIdx.x % 32 == 0) barrier_arrive(&shared.dS_full[at]);
          const int before = at ^ 1;
          if (!first) barrier_wait(&shared.dS_full[before], lap ^ before);
          start_part(dQ, shared.K[K_before], before);
          dK.template start_product<kOfQueries>(dS_factor, stage.Q[0].across_k(), true);
          wgmma_wait<1>();  // dQ
          if (tells) barrier_arrive(&shared.dS_empty[before]);
          if (!first) {
            if (step == 0) alone.release(shared.K_empty[K_before]);
            add_part(dQ, shared.steps[before_of(number)], before);
          }
          first = false;
          K_before = n % 2;
        } else {
          named_barrier(1, 256);  // all of dS^T is there
          start_part(dQ, shared.K[n % 2], at);
          dK.template start_product<kOfQueries>(dS_factor, stage.Q[0].across_k(), true);
          wgmma_wait<1>();  // dQ
          if (step + 1 == count) alone.release(shared.K_empty[n % 2]);
          add_part(dQ, shared.steps[number], at);
        }
        wgmma_wait<0>();
      };
      for (int step = 0; step < count; ++step) {
        if constexpr (Tile::kQueries > 64) reader.wait();
        if constexpr (Tile::kQueries == 64) {
          compute_step.template operator()<64>(step);
        } else if (shared.steps[number_of(reader.ring)].query0 + 64 < in.queries) {
          compute_step.template operator()<Tile::kQueries>(step);
        } else {
          compute_step.template operator()<64>(step);
        }
        reader.give_back();
        reader.next();
        ++turn;
      }
      const BackwardPlace place = place_of(item);
      store_key_sums(in, true, dV, place, own_key0, Tile::kKeys);
      store_key_sums(in, false, dK, place, own_key0, Tile::kKeys);
    }
    const int last = turn % 2 ^ 1;
    if (kLate && !first) {
      barrier_wait(&shared.dS_full[last], turn / 2 % 2 ^ last);
      Sum<64> dQ;
      start_part(dQ, shared.K[K_before], last);
      wgmma_wait<0>();
      add_part(dQ, shared.steps[before_of(number_of(reader.ring))], last);
    }
    if constexpr (kInOrder) {
      if (in.whole) return;
      barrier_wait(&shared.part_empty[consumer], last);
      post(-1, 0, -1);
    }
  }
};
#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_backward_hopper(const __grid_constant__ BackwardMaps maps,
                              const __grid_constant__ BackwardOperands<typename Tile::T> in) {
#if HOPPER_CODE
  start_next_kernel();
  extern __shared__ __align__(1024) char bytes[];
  const BackwardHopperBlock<Tile> block(bytes, maps, in);
  const int warp = warp_of_block();
  if (warp < 4) {
    registers_shrink_to<Tile::kProducerRegisters>();
    if (warp == 0) block.bring();
    if constexpr (Tile::kInOrder) {
      if ((warp == 1 || warp == 2) && elect_one()) block.add_in_order(warp - 1);
    }
  } else {
    registers_grow_to<Tile::kConsumerRegisters>();
    block.compute();
  }
#endif
}

/// How many parts of 64 x 64 a tile of queries has of dQ.
template <class Tile>
inline constexpr int parts_of_tile = Tile::kWidth / 64 * (Tile::kQueries / 64);
/// How many keys an item has: those of a block, or of a cluster.
template <class Tile>
inline constexpr int keys_of_item = Tile::kKeys* Tile::kBlocks;

/// What a block of attention_finish_parts reads, and where it goes: `count` sums of 64 rows.
template <typename T>
struct PartsToFinish {
  const float* from;
  int count;
  int64_t apart;  // numbers from one of them to the next
  T* to;
  int64_t stride;
  int rows, cols;  // that are there
  float scale;
};

/// Adds them up, and stores their columns from 0 on, kCols of them. A thread has what a consumer's
/// thread had. It loads that of several splits before it adds it up, in the order of the splits.
template <int kCols, typename T>
__device__ __forceinline__ void finish_parts(const PartsToFinish<T>& of) {
#if HOPPER_CODE
  constexpr int kFours = kCols / 8, kAtOnce = 64 / kCols * 2;
  Sum<kCols> sum = {};
  for (int i = 0; i < of.count; i += kAtOnce) {
    float4 fours[kAtOnce][kFours];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float4* const own =
          reinterpret_cast<const float4*>(of.from + min(i + j, of.count - 1) * of.apart);
#pragma unroll
      for (int k = 0; k < kFours; ++k) {
        fours[j][k] = i + j < of.count ? own[128 * k + threadIdx.x] : float4{};
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
      for (int k = 0; k < kFours; ++k) {
        float* const to = &sum.elements[4 * k];
        to[0] += fours[j][k].x, to[1] += fours[j][k].y;
        to[2] += fours[j][k].z, to[3] += fours[j][k].w;
      }
    }
  }
  store_rows(sum, of.scale, of.to, of.stride, of.rows, of.cols);
#endif
}

/// dQ from its sums, and dK and dV from what splits have left. The first blocks have 64 x 64
/// numbers of dQ each, but if dQ has been whole. Tiles of queries that see no key are zeros,
/// whatever their sums are. The others have 32 columns of dK or dV of 64 keys: they are few, and
/// their sums many.
template <class Tile>
__global__ void __launch_bounds__(128)
    attention_finish_parts(BackwardOperands<typename Tile::T> in, int parts_of_dQ) {
  using T = typename Tile::T;
  constexpr int kSideBySide = Tile::kWidth / 64, kParts = parts_of_tile<Tile>;
  constexpr int kKeys = keys_of_item<Tile>, kSlices = Tile::kWidth / 32;
  const int all_tiles = ceil_div(in.queries, Tile::kQueries);
  int block = static_cast<int>(blockIdx.x);
  PartsToFinish<T> of = {};
  if (block < parts_of_dQ) {
    const int part = block % kParts, tile = block / kParts % all_tiles;
    const int sequence = block / kParts / all_tiles;
    const int head = sequence % in.heads, batch = sequence / in.heads;
    const int query0 = tile * Tile::kQueries + 64 * (part / kSideBySide);
    const int col0 = 64 * (part % kSideBySide);
    of.rows = in.queries - query0, of.cols = in.width - col0, of.stride = in.dq.row;
    of.to = in.dQ + batch * in.dq.batch + head * in.dq.head + query0 * in.dq.row + col0;
    of.from = in.dq_sums + int64_t{block} * Tile::kPartFloats;
    of.scale = in.scale;
    of.count = tile >= in.first_query(0) / Tile::kQueries;
    if (of.rows <= 0) return;
    wait_for_previous_kernel();
    finish_parts<64>(of);
    return;
  }
  block -= parts_of_dQ;
  const int col0 = 32 * (block % kSlices), of_dV = block / kSlices % 2;
  const int keys64 = block / kSlices / 2;
  const auto place = BackwardPlace::of_tile(in, in.plain + 64 * keys64 / kKeys, kKeys);
  const int key0 = place.key_tile * kKeys + 64 * keys64 % kKeys;
  const Strides& by = of_dV ? in.dv : in.dk;
  of.rows = in.keys - key0, of.cols = in.width - col0, of.stride = by.row;
  of.to = (of_dV ? in.dV : in.dK) + place.batch * by.batch + place.kv_head * by.head +
          key0 * by.row + col0;
  of.from = in.kv_sums + KeySums<Tile::kWidth>::place(keys64, of_dV, in.splits, 0) + 64 * col0;
  of.apart = KeySums<Tile::kWidth>::kFloats;
  of.scale = 1;
  const int tile0 = in.first_query(place.key_tile * kKeys) / Tile::kQueries;
  of.count = min(in.splits, (all_tiles - tile0) * in.group);  // the others have no step
  if (in.run > 0) of.count = BackwardPlace::blocks_of_run(in, place.tile, all_tiles * in.group);
  if (of.rows <= 0 || of.cols <= 0 || (in.run > 0 && of.count == 1)) return;
  wait_for_previous_kernel();
  finish_parts<32>(of);
}

}  // namespace operators::attention
