// The gradients of attention on Hopper: *reduce-add* and, in order, *deterministic* of
// bonus_attention_backward.cu for rows that lie anywhere, of any width up to 128.
//
// A block owns 128 keys of a head of K and V, and its dK and dV. A producer warp has the copy
// engine bring K and V once, and then tiles of Q and d_out to the stages of a pipeline; it loads
// the tile's logarithms and D itself, and says which tile it is. Two consumers, a warpgroup each,
// have 64 of the keys. P^T and dS^T are left factors in registers; right factors are read where
// they lie, along their rows for the logits and for dP, and across them for dV and dK.
//
// For dQ, which is summed over the keys of both consumers, dS^T is the left factor in shared memory
// that wgmma reads transposed. Each consumer computes 64 queries by 64 columns of it: with a width
// of 64 a tile has 128 queries, of which each has half; with a width of 128 it has 64, and each has
// half of the columns. There are two places for dS^T, so that a barrier a step is enough.
//
// While the products for dV run, a consumer computes dS; while those for dK run, the copy engine
// adds its part of dQ to the sums in memory. No one but attention_finish_parts reads these, so they
// lie as they lie in registers: a part is 64 x 64 numbers, element i / 4 of thread t is four of
// them, and for each i / 4 those of a consumer's 128 threads are neighbours.
//
// In order, two warps beside the producer take the consumers' parts from shared memory, and have
// the copy engine add each when those of the keys before are there (BackwardPlace). The block of
// the first keys stores its parts, so that the sums need not begin as zeros.
#pragma once

#include "operators/attention/backward_portable.cuh"
#include "operators/attention/hopper.cuh"

namespace operators::attention {

template <typename T_, int kWidth_>
struct BackwardHopperTile {
  using T = T_;
  static constexpr int kWidth = kWidth_, kKeys = 128, kQueries = kWidth == 64 ? 128 : 64;
  static constexpr int kBoxes = kWidth / kBoxCols, kStages = 2, kThreads = 384;
  static constexpr int kPartFloats = 64 * 64;  // of dQ: what a consumer has of a tile of queries
  // Of 168 a thread. Each width has few to spare: with 24 a producer of 128 queries would spill.
  static constexpr int kProducerRegisters = kWidth == 64 ? 40 : 24;
  static constexpr int kConsumerRegisters = kWidth == 64 ? 232 : 240;
};

template <class Tile>
struct BackwardHopperShared {
  using T = typename Tile::T;
  struct Stage {
    static constexpr int kLoaded =
        2 * Tile::kQueries * Tile::kWidth * sizeof(T);  // by the copy engine
    Box<T, Tile::kQueries> Q[Tile::kBoxes], d_out[Tile::kBoxes];
    float log_sums[Tile::kQueries], row_sums[Tile::kQueries];
    int query0, part;  // where the tile begins, and which parts of dQ it has: `part` and the next
  };
  LeftTile<T, Tile::kKeys> K[Tile::kBoxes], V[Tile::kBoxes];
  Box<T, Tile::kKeys> dS[2][Tile::kQueries / 64];     // transposed: 128 keys by 64 queries each
  float4 parts[2][Tile::kPartFloats / 4 / 128][128];  // of dQ, of each consumer
  Pipeline<Stage, Tile::kStages> pipeline;
  Barrier KV_full, part_full[2], part_empty[2];
};

/// Of five dimensions each, as AttentionMaps has them. What a box has behind the width is read as
/// zeros, and not written.
struct BackwardMaps {
  CUtensorMap Q, d_out, K, V, dK, dV;
};

#if HOPPER_CODE
template <class Tile, bool kInOrder>
struct BackwardHopperBlock {
  using T = typename Tile::T;
  using Shared = BackwardHopperShared<Tile>;
  using Stage = typename Shared::Stage;
  using Product = Sum<Tile::kQueries>;                   // 64 keys by a tile's queries
  using Factor = LeftFragments<T, Tile::kQueries / 16>;  // the same, rounded
  static constexpr int kWidth = Tile::kWidth;
  Shared& shared;
  const BackwardMaps& maps;
  const BackwardOperands<T>& in;
  int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
  int all_tiles = ceil_div(in.queries, Tile::kQueries);  // of queries
  BackwardPlace place;
  int key0, own_key0;
  BackwardSteps<kInOrder> steps;

  __device__ BackwardHopperBlock(char* bytes, const BackwardMaps& of,
                                 const BackwardOperands<T>& operands)
      : shared(*reinterpret_cast<Shared*>(bytes)),
        maps(of),
        in(operands),
        place(BackwardPlace::of_block<kInOrder>(in, Tile::kKeys)),
        key0(place.key_tile * Tile::kKeys),
        own_key0(key0 + 64 * consumer) {
    const int tile0 = in.first_query(key0) / Tile::kQueries;
    steps = {tile0, all_tiles - tile0, in.group};
    if (threadIdx.x == 0) {
      prepare(shared.pipeline, 2, 1 + 32);  // the copy engine's bytes, and a warp, fill a stage
      barrier_init(&shared.KV_full, 1);
      for (int i = 0; kInOrder && i < 2; ++i) {
        barrier_init(&shared.part_full[i], 4);  // the warps of a consumer
        barrier_init(&shared.part_empty[i], 1);
      }
      barrier_init_fence();
    }
    __syncthreads();
  }

  /// The first of a step's two parts.
  __device__ int part_of(int step) const {
    const int head = place.sequence * in.group + steps.of_group(step);  // through all batches
    return 2 * (head * all_tiles + steps.tile(step));
  }

  /// The producer warp. One thread starts the copies; all load logarithms and D. Where there is no
  /// query, and where a query sees no key or only logits of -infinity, P has to be 0: the logarithm
  /// becomes +infinity.
  __device__ void bring() const {
    const int lane = threadIdx.x % 32;
    const uint64_t policy = evict_normal();
    Writer writer(shared.pipeline);
    if (lane == 0) {
      barrier_arrive_expect(&shared.KV_full, sizeof shared.K + sizeof shared.V);
      for (int box = 0; box < Tile::kBoxes; ++box) {
        const int at[5] = {kBoxCols * box, 0, key0, place.kv_head, place.batch};
        tensor_load(shared.K[box].row(0), &maps.K, at, &shared.KV_full, policy);
        tensor_load(shared.V[box].row(0), &maps.V, at, &shared.KV_full, policy);
      }
    }
    for (int step = 0; step < steps.count(); ++step) {
      const int of_group = steps.of_group(step), query0 = steps.tile(step) * Tile::kQueries;
      Stage& stage = writer.wait();  // each lane for itself, as it will write
      Barrier& full = shared.pipeline.full[writer.ring.stage];
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
      }
      if (step == 0) wait_for_previous_kernel();
      if (lane == 0) {
        stage.query0 = query0;
        stage.part = part_of(step);
      }
      const int row = (place.sequence * in.group + of_group) * in.queries + query0;
#pragma unroll
      for (int i = lane; i < Tile::kQueries; i += 32) {
        const bool exists = query0 + i < in.queries;
        const float log_sum = exists ? in.log_sums[row + i] : minus_infinity();
        stage.log_sums[i] = log_sum == minus_infinity() ? -minus_infinity() : log_sum * kLog2E;
        stage.row_sums[i] = exists ? in.row_sums[row + i] : 0;
      }
      barrier_arrive(&full);
    }
  }

  /// product = left right^T: 64 keys of K or V by the rows of Q or d_out.
  __device__ __forceinline__ void start_transposed(Product& product,
                                                   const LeftTile<T, Tile::kKeys>* left,
                                                   const Box<T, Tile::kQueries>* right) const {
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      product.template start_product<kSlices>(
          left[box].rows(64 * consumer), AlongK<T>{descriptor_a(right[box].elements)}, box > 0);
    }
  }
  /// Logits become P; for keys that a query does not see it is 0.
  __device__ __forceinline__ void to_probabilities(Product& P, const Stage& stage) const {
    const float scale = in.scale * kLog2E;
#pragma unroll
    for (int i = 0; i < P.size(); ++i) {
      P.elements[i] =
          exp2_approximate(fmaf(P.elements[i], scale, -stage.log_sums[Product::col(i)]));
    }
    const int query0 = stage.query0;
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
                                                      const Factor& rounded, const Stage& stage) {
#pragma unroll
    for (int i = 0; i < dS.size(); i += 2) {
      const auto& pair = reinterpret_cast<const T(&)[2]>(rounded.slices[i / 8][i / 2 % 4]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float p = kWidth == 64 ? static_cast<float>(pair[j]) : P.elements[i + j];
        dS.elements[i + j] = p * (dS.elements[i + j] - stage.row_sums[Product::col(i + j)]);
      }
    }
  }
  /// The consumer's part of dQ = dS K, of all 128 keys.
  __device__ __forceinline__ void start_part(Sum<64>& part, int step) const {
    const bool halves = kWidth == 64;  // of the queries, or else of the columns
    part.template start_product<Tile::kKeys / 16>(
        shared.dS[step % 2][halves ? consumer : 0].across_k(),
        shared.K[halves ? 0 : consumer].across_k(), false);
  }
  __device__ __forceinline__ void add_part(const Sum<64>& part, int step,
                                           const Stage& stage) const {
    const int thread = threadIdx.x % 128;
    // The part before has left.
    if constexpr (kInOrder) {
      barrier_wait(&shared.part_empty[consumer], step % 2 ^ 1);
    } else {
      if (thread == 0) tensor_store_wait_read<0>();
      named_barrier(2 + consumer, 128);
    }
#pragma unroll
    for (int i = 0; i < part.size() / 4; ++i) {
      const float* const of = &part.elements[4 * i];
      shared.parts[consumer][i][thread] = make_float4(of[0], of[1], of[2], of[3]);
    }
    shared_fence();
    if constexpr (kInOrder) {
      __syncwarp();
      if (thread % 32 == 0) barrier_arrive(&shared.part_full[consumer]);
    } else {
      named_barrier(2 + consumer, 128);
      if (thread == 0) {
        bulk_add(in.dq_sums + int64_t{stage.part + consumer} * Tile::kPartFloats,
                 &shared.parts[consumer][0][0].x, sizeof shared.parts[consumer]);
        tensor_store_commit();
      }
    }
  }
  /// A thread that adds a consumer's parts in order. The next step's count is looked at while this
  /// step's part is on its way.
  __device__ void add_in_order(int of_consumer) const {
    const auto& from = shared.parts[of_consumer];
    const auto before = static_cast<unsigned>(place.key_tile);
    const auto count_of = [&](int part) { return GridCount(in.counts[part]); };
    bool is_turn = before == 0;
    for (int step = 0; step < steps.count(); ++step) {
      const int part = part_of(step) + of_consumer;
      float* const to = in.dq_sums + int64_t{part} * Tile::kPartFloats;
      barrier_wait(&shared.part_full[of_consumer], step % 2);
      if (!is_turn) wait_for_count(count_of(part), before, "the parts of dQ of the keys before");
      global_fence();  // the copy engine comes behind what the count says
      before == 0 ? bulk_store(to, &from[0][0].x, sizeof from)
                  : bulk_add(to, &from[0][0].x, sizeof from);
      tensor_store_commit();
      tensor_store_wait_read<0>();
      barrier_arrive(&shared.part_empty[of_consumer]);
      if (before > 0 && step + 1 < steps.count()) {
        const int next = part_of(step + 1) + of_consumer;
        is_turn = count_of(next).load(cuda::memory_order_acquire) >= before;
      }
      tensor_store_wait<0>();
      count_of(part).fetch_add(1, cuda::memory_order_release);
    }
  }
  /// 64 rows of dK or dV, by way of shared memory that nobody reads any longer.
  __device__ __forceinline__ void store(const Sum<kWidth>& sum, float factor,
                                        LeftTile<T, Tile::kKeys>* room,
                                        const CUtensorMap& map) const {
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      auto& own = reinterpret_cast<Box<T, 64>&>(*room[box].row(64 * consumer));
      Sum<kWidth>::store(own, kBoxCols * box, [&](int i) { return factor * sum.elements[i]; });
    }
    shared_fence();
    named_barrier(2 + consumer, 128);
    if (threadIdx.x % 128 == 0) {
      for (int box = 0; box < Tile::kBoxes; ++box) {
        const int at[5] = {kBoxCols * box, 0, own_key0, place.kv_head, place.batch};
        tensor_store(&map, at, room[box].row(64 * consumer));
      }
      tensor_store_commit();
    }
  }
};
#endif

template <class Tile, bool kInOrder>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_backward_hopper(const __grid_constant__ BackwardMaps maps,
                              const __grid_constant__ BackwardOperands<typename Tile::T> in) {
#if HOPPER_CODE
  if (!kInOrder && sequence_of_block() >= in.sequences) return;
  extern __shared__ __align__(1024) char bytes[];
  using Block = BackwardHopperBlock<Tile, kInOrder>;
  const Block block(bytes, maps, in);
  auto& shared = block.shared;
  if (warp_of_block() < 4) {
    registers_shrink_to<Tile::kProducerRegisters>();
    const int warp = warp_of_block();
    if (warp == 0) block.bring();
    if constexpr (kInOrder) {
      if ((warp == 1 || warp == 2) && elect_one()) block.add_in_order(warp - 1);
    }
  } else {
    registers_grow_to<Tile::kConsumerRegisters>();
    const BlockGrid<1, 1> alone;
    Reader reader(shared.pipeline, alone);
    Sum<Tile::kWidth> dK = {}, dV = {};
    typename Block::Product P, dS;
    typename Block::Factor P_factor, dS_factor;
    Sum<64> dQ;
    constexpr int kOfQueries = Tile::kQueries / 16;
    barrier_wait(&shared.KV_full, 0);
    for (int step = 0; step < block.steps.count(); ++step) {
      auto& stage = reader.wait();
      block.start_transposed(P, shared.K, stage.Q);
      block.start_transposed(dS, shared.V, stage.d_out);
      wgmma_wait<Tile::kBoxes>();  // the logits
      block.to_probabilities(P, stage);
      block.to_factor(P_factor, P);
      dV.template start_product<kOfQueries>(P_factor, stage.d_out[0].across_k(), true);
      wgmma_wait<1>();  // dP
      block.to_gradients(dS, P, P_factor, stage);
      block.to_factor(dS_factor, dS);
#pragma unroll
      for (int box = 0; box < Tile::kQueries / 64; ++box) {
        auto& own = reinterpret_cast<Box<typename Tile::T, 64>&>(
            *shared.dS[step % 2][box].row(64 * block.consumer));
        dS.store(own, 64 * box, [&](int i) { return dS.elements[i]; });
      }
      shared_fence();
      named_barrier(1, 256);  // all of dS^T is there
      block.start_part(dQ, step);
      dK.template start_product<kOfQueries>(dS_factor, stage.Q[0].across_k(), true);
      wgmma_wait<1>();  // dQ
      block.add_part(dQ, step, stage);
      wgmma_wait<0>();
      reader.give_back();
      reader.next();
    }
    named_barrier(1, 256);  // K has been read
    block.store(dV, 1, shared.V, maps.dV);
    block.store(dK, in.scale, shared.K, maps.dK);
    if (threadIdx.x % 128 == 0) tensor_store_wait_read<0>();
  }
#endif
}

/// How many parts of 64 x 64 a tile of queries has of dQ.
template <class Tile>
inline constexpr int parts_of_tile = Tile::kWidth / 64 * (Tile::kQueries / 64);

/// dQ from parts: a block owns one of them, and a thread what a consumer's thread had of it. Tiles
/// of queries that see no key are zeros, whatever their sums are.
template <class Tile>
__global__ void __launch_bounds__(128)
    attention_finish_parts(BackwardOperands<typename Tile::T> in) {
  using T = typename Tile::T;
  using Part = Sum<64>;
  constexpr int kSideBySide = Tile::kWidth / 64, kParts = parts_of_tile<Tile>;
  const int tiles = ceil_div(in.queries, Tile::kQueries);
  const int part = blockIdx.x % kParts, tile = blockIdx.x / kParts % tiles;
  const int sequence = blockIdx.x / kParts / tiles;
  const int head = sequence % in.heads, batch = sequence / in.heads;
  const int query0 = tile * Tile::kQueries + 64 * (part / kSideBySide);
  const int col0 = 64 * (part % kSideBySide);
  T* const dQ = in.dQ + batch * in.dq.batch + head * in.dq.head;
  const bool is_written = tile >= in.first_query(0) / Tile::kQueries;
  wait_for_previous_kernel();
  const float4* const from =
      reinterpret_cast<const float4*>(in.dq_sums + int64_t{blockIdx.x} * Tile::kPartFloats) +
      threadIdx.x;
#pragma unroll
  for (int i = 0; i < Part::size() / 4; ++i) {
    const float4 sums = is_written ? from[128 * i] : float4{};
    const float pairs[2][2] = {{sums.x, sums.y}, {sums.z, sums.w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows 8 apart
      const int query = query0 + Part::row(4 * i + 2 * half), col = col0 + Part::col(4 * i);
      if (query >= in.queries || col >= in.width) continue;
      *reinterpret_cast<unsigned*>(dQ + query * in.dq.row + col) =
          pack2<T>(in.scale * pairs[half][0], in.scale * pairs[half][1]);
    }
  }
}

}  // namespace operators::attention
