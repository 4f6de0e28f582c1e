// The gradients of attention on Hopper for widths above 128, up to 256.
//
// dK and dV of 64 keys are 64 x 256 sums each, 128 registers of a warpgroup. So the two consumers
// divide the gradients, not the keys: the first has P and dV, the second has dS and dK. In each
// step, a tile of 64 queries,
//
//     first consumer    S^T = K Q^T,       P^T = exp(S^T - L),  dV += P^T d_out
//     second consumer   dP^T = V d_out^T,  dS^T = P^T (dP^T - D),  dK += dS^T Q
//     both              a share of the columns of dQ = dS K
//
// P^T goes through shared memory, and the second consumer writes dS^T in its place. P^T and dS^T
// are left factors in registers for dV and dK, and dS^T is the left factor in shared memory for dQ.
// The logits of the next step are started before dQ of this one, and its dP right behind dQ, so
// that tensor cores have work while a consumer computes.
//
// With 64 keys, a step of a block alone brings 64 KB and adds up 64 KB of dQ, for 2,560 cycles of
// products: that is more than the L2 cache gives. So two blocks are a cluster. They have
// neighbouring keys and walk through the same queries. Each brings half of Q and d_out, for both;
// and they send each other dS^T. A block computes 128 columns of dQ, summed over the keys of both,
// which halves what is added up in memory, too. For that it also has 128 columns of the other
// block's K.
//
// Parts of dQ are as in backward_hopper.cuh: 64 x 64 numbers in the order of registers.
#pragma once

#include "operators/attention/backward_hopper.cuh"

namespace operators::attention {

/// kByCopies: parts of dQ go by the copy engine, as they have to in order; else by atomics.
template <typename T_, bool kByCopies_>
struct BackwardWideTile {
  using T = T_;
  static constexpr int kWidth = 256, kKeys = 64, kQueries = 64, kThreads = 384;
  static constexpr int kBlocks = 2;  // of a cluster
  static constexpr int kBoxes = kWidth / kBoxCols;
  static constexpr int kStages = 2;  // of Q; d_out has one
  static constexpr int kPartFloats = 64 * 64;
  static constexpr bool kByCopies = kByCopies_;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
};

template <class Tile>
struct BackwardWideShared {
  using T = typename Tile::T;
  using Rows = Box<T, Tile::kQueries>;
  LeftTile<T, Tile::kKeys> K[Tile::kBoxes], V[Tile::kBoxes];
  Box<T, Tile::kKeys> other_K[2];
  Rows Q[Tile::kStages][Tile::kBoxes], d_out[1][Tile::kBoxes];
  Box<T, Tile::kKeys> dS[2], other_dS[2];                                   // P^T, and then dS^T
  float4 parts[2][Tile::kByCopies ? Tile::kPartFloats / 8 / 128 : 1][128];  // half of a part
  float log_sums[Tile::kStages][Tile::kQueries], row_sums[1][Tile::kQueries];
  StageBarriers<Tile::kStages> of_Q;
  StageBarriers<1> of_d_out;
  Barrier KV_full, P_full[2], dS_full[2], other_full[2], dS_empty[2], part_full[2], part_empty[2];
};

#if HOPPER_CODE
template <class Tile, bool kInOrder>
struct BackwardWideBlock {
  using T = typename Tile::T;
  using Shared = BackwardWideShared<Tile>;
  using Product = Sum<Tile::kQueries>;  // 64 keys by 64 queries
  using Factor = LeftFragments<T, Tile::kQueries / 16>;
  static constexpr int kBlocks = Tile::kBlocks;
  static constexpr int kRowShare = Tile::kQueries / kBlocks;
  static constexpr int kHalf = Tile::kPartFloats / 2, kItemKeys = keys_of_item<Tile>;
  Shared& shared;
  const BackwardMaps& maps;
  const BackwardOperands<T>& in;
  int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
  int rank = cluster_rank();
  int all_tiles = ceil_div(in.queries, Tile::kQueries);
  BackwardPlace place;
  int key0;
  BackwardSteps<kInOrder> steps;

  __device__ BackwardWideBlock(char* bytes, const BackwardMaps& of,
                               const BackwardOperands<T>& operands)
      : shared(*reinterpret_cast<Shared*>(bytes)),
        maps(of),
        in(operands),
        place(BackwardPlace::of_item(in, static_cast<int>(blockIdx.x) / kBlocks, kItemKeys)),
        key0(place.key_tile * kItemKeys + rank * Tile::kKeys),
        steps(in.first_query(place.key_tile * kItemKeys) / Tile::kQueries, all_tiles, in.group,
              place.split, place.splits) {
    if (threadIdx.x == 0) {
      // A stage, and a place for dS, is given back by each warp of the consumers of each block.
      prepare(shared.of_Q, 8 * kBlocks, 1 + 32);
      prepare(shared.of_d_out, 8 * kBlocks, 1 + 32);
      barrier_init(&shared.KV_full, 1);
      for (int i = 0; i < 2; ++i) {
        barrier_init(&shared.P_full[i], 4);
        barrier_init(&shared.dS_full[i], 4);
        barrier_init(&shared.other_full[i], 1);
        barrier_init(&shared.dS_empty[i], 8 * kBlocks);
        barrier_init(&shared.part_full[i], 4);
        barrier_init(&shared.part_empty[i], 1);
      }
      barrier_init_fence();
    }
    BlockGrid<kBlocks, 1>::meet();
  }

  /// The first of a tile's four parts.
  __device__ int part_of(int step) const {
    const int head = place.sequence * in.group + steps.of_group(step);
    return parts_of_tile<Tile> * (head * all_tiles + steps.tile(step));
  }
  /// A warp has read what `empty` stands for: it tells the blocks of the cluster.
  __device__ __forceinline__ void release(Barrier& empty) const {
    __syncwarp();
    const int lane = threadIdx.x % 32;
    if (lane < kBlocks) barrier_arrive(&empty, lane);
  }

  /// The producer warp of K, V, and of Q with its logarithms; or that of d_out with D. Where there
  /// is no query, and where a query sees no key or only logits of -infinity, P has to be 0: the
  /// logarithm becomes +infinity.
  template <bool kOfQ>
  __device__ void bring() const {
    const int lane = threadIdx.x % 32;
    const uint64_t policy = evict_normal();
    if (kOfQ && lane == 0) {
      barrier_arrive_expect(&shared.KV_full,
                            sizeof shared.K + sizeof shared.V + sizeof shared.other_K);
      for (int box = 0; box < Tile::kBoxes; ++box) {
        const int at[5] = {kBoxCols * box, 0, key0, place.kv_head, place.batch};
        tensor_load(shared.K[box].row(0), &maps.K, at, &shared.KV_full, policy);
        tensor_load(shared.V[box].row(0), &maps.V, at, &shared.KV_full, policy);
      }
      for (int box = 0; box < 2; ++box) {
        const int other0 = (place.key_tile * kBlocks + 1 - rank) * Tile::kKeys;
        const int at[5] = {kBoxCols * (2 * rank + box), 0, other0, place.kv_head, place.batch};
        tensor_load(shared.other_K[box].row(0), &maps.K, at, &shared.KV_full, policy);
      }
    }
    auto& barriers = [&]() -> auto& {
      if constexpr (kOfQ) {
        return shared.of_Q;
      } else {
        return shared.of_d_out;
      }
    }
    ();
    constexpr int kStages = kOfQ ? Tile::kStages : 1;
    for (int step = 0; step < steps.count(); ++step) {
      const int stage = step % kStages, of_group = steps.of_group(step);
      const int query0 = steps.tile(step) * Tile::kQueries, own0 = kRowShare * rank;
      auto* const boxes = kOfQ ? shared.Q[stage] : shared.d_out[stage];
      Barrier* const full = &barriers.full[stage];
      barrier_wait(&barriers.empty[stage], step / kStages % 2 ^ 1);
      if (lane == 0) {
        barrier_arrive_expect(full, Tile::kBoxes * sizeof boxes[0]);
        for (int box = 0; box < Tile::kBoxes; ++box) {
          const int at[5] = {kBoxCols * box, of_group, query0 + own0, place.kv_head, place.batch};
          const CUtensorMap* const map = kOfQ ? &maps.Q : &maps.d_out;
          tensor_load_multicast(boxes[box].row(own0), map, at, full, (1 << kBlocks) - 1, policy);
        }
      }
      if (step == 0) wait_for_previous_kernel();
      const int row = (place.sequence * in.group + of_group) * in.queries + query0;
#pragma unroll
      for (int i = lane; i < Tile::kQueries; i += 32) {
        const bool exists = query0 + i < in.queries;
        if constexpr (kOfQ) {
          const float log_sum = exists ? in.log_sums[row + i] : minus_infinity();
          shared.log_sums[stage][i] =
              log_sum == minus_infinity() ? -minus_infinity() : log_sum * kLog2E;
        } else {
          shared.row_sums[stage][i] = exists ? in.row_sums[row + i] : 0;
        }
      }
      barrier_arrive(full);
    }
  }

  /// product = left right^T: the block's keys of K or V by the rows of Q or d_out.
  __device__ __forceinline__ static void start_transposed(Product& product,
                                                          const LeftTile<T, Tile::kKeys>* left,
                                                          const Box<T, Tile::kQueries>* right) {
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        multiply_slice(product.elements, left[box].rows(0),
                       AlongK<T>{descriptor_a(right[box].elements)}, slice, box + slice > 0);
      }
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void start_logits(Product& S, int step) const {
    const int stage = step % Tile::kStages;
    barrier_wait(&shared.of_Q.full[stage], step / Tile::kStages % 2);
    start_transposed(S, shared.K, shared.Q[stage]);
  }
  __device__ __forceinline__ void start_dP(Product& dP, int step) const {
    barrier_wait(&shared.of_d_out.full[0], step % 2);
    start_transposed(dP, shared.V, shared.d_out[0]);
  }

  /// Logits become P; for keys that a query does not see it is 0.
  __device__ __forceinline__ void to_probabilities(Product& P, int step) const {
    const float* const log_sums = shared.log_sums[step % Tile::kStages];
    const float scale = in.scale * kLog2E;
#pragma unroll
    for (int i = 0; i < P.size(); ++i) {
      P.elements[i] = exp2_approximate(fmaf(P.elements[i], scale, -log_sums[Product::col(i)]));
    }
    const int query0 = steps.tile(step) * Tile::kQueries;
    if (key0 + Tile::kKeys <= in.limit(query0)) return;
#pragma unroll
    for (int i = 0; i < P.size(); ++i) {
      if (key0 + Product::row(i) >= in.limit(query0 + Product::col(i))) P.elements[i] = 0;
    }
  }
  __device__ __forceinline__ static void to_factor(Factor& factor, const Product& sum) {
#pragma unroll
    for (int i = 0; i < sum.size(); i += 2) {
      factor.slices[i / 8][i / 2 % 4] = pack2<T>(sum.elements[i], sum.elements[i + 1]);
    }
  }
  /// dP becomes dS = P (dP - D), with P as the first consumer has rounded it.
  __device__ __forceinline__ void to_gradients(Product& dS, int step) const {
    const float* const row_sums = shared.row_sums[0];
    uint32_t pairs[Tile::kQueries / 4];
    Product::load_pairs(pairs, shared.dS[step % 2], 0);
#pragma unroll
    for (int i = 0; i < dS.size(); ++i) {
      const T p = reinterpret_cast<const T(&)[2]>(pairs[i / 2])[i % 2];
      dS.elements[i] = static_cast<float>(p) * (dS.elements[i] - row_sums[Product::col(i)]);
    }
  }
  __device__ __forceinline__ static void store(Box<T, Tile::kKeys>& to, const Product& sum) {
    sum.store(to, 0, [&](int i) { return sum.elements[i]; });
  }

  /// All of the step's dS^T is there: the block's own, and the other block's.
  __device__ __forceinline__ void wait_for_dS(int step) const {
    barrier_wait(&shared.dS_full[step % 2], step / 2 % 2);
    barrier_wait(&shared.other_full[step % 2], step / 2 % 2);
  }
  /// A part of dQ = dS K.
  __device__ __forceinline__ void start_part(Sum<64>& part, int step) const {
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      multiply_slice(part.elements, shared.dS[step % 2].across_k(),
                     shared.K[2 * rank + consumer].across_k(), slice, slice > 0);
    }
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      multiply_slice(part.elements, shared.other_dS[step % 2].across_k(),
                     shared.other_K[consumer].across_k(), slice, true);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void add_part(const Sum<64>& part, int step) const {
    const int thread = threadIdx.x % 128;
    const int number = part_of(step) + 2 * rank + consumer;
    float* const to = in.dq_sums + int64_t{number} * Tile::kPartFloats;
    if (in.whole) {
      const int head = place.kv_head * in.group + steps.of_group(step);
      const int query0 = steps.tile(step) * Tile::kQueries, col0 = 64 * (2 * rank + consumer);
      T* const dQ = in.dQ + place.batch * in.dq.batch + head * in.dq.head;
      store_rows(part, in.scale, dQ + query0 * in.dq.row + col0, in.dq.row, in.queries - query0,
                 in.width - col0);
      return;
    }
    if constexpr (!Tile::kByCopies) {
      add_sums<0, 64>(part, to);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // What was there has left.
        if constexpr (kInOrder) {
          barrier_wait(&shared.part_empty[consumer], half ^ 1);
        } else {
          if (thread == 0) tensor_store_wait_read<0>();
          named_barrier(2 + consumer, 128);
        }
#pragma unroll
        for (int i = 0; i < part.size() / 8; ++i) {
          const float* const of = &part.elements[part.size() / 2 * half + 4 * i];
          shared.parts[consumer][i][thread] = make_float4(of[0], of[1], of[2], of[3]);
        }
        shared_fence();
        if constexpr (kInOrder) {
          __syncwarp();
          if (thread % 32 == 0) barrier_arrive(&shared.part_full[consumer]);
        } else {
          named_barrier(2 + consumer, 128);
          if (thread == 0) {
            bulk_add(to + kHalf * half, &shared.parts[consumer][0][0].x, kHalf * sizeof(float));
            tensor_store_commit();
          }
        }
      }
    }
  }
  /// A thread that adds a consumer's parts in order, as BackwardHopperBlock's.
  __device__ void add_in_order(int of_consumer) const {
    if (in.whole) return;
    const float* const from = &shared.parts[of_consumer][0][0].x;
    const auto before = static_cast<unsigned>(place.key_tile);
    const auto part = [&](int step) { return part_of(step) + 2 * rank + of_consumer; };
    bool is_turn = before == 0;
    for (int step = 0; step < steps.count(); ++step) {
      float* const to = in.dq_sums + int64_t{part(step)} * Tile::kPartFloats;
      const GridCount count(in.counts[part(step)]);
      for (int half = 0; half < 2; ++half) {
        barrier_wait(&shared.part_full[of_consumer], half);
        if (!is_turn) wait_for_count(count, before, "the parts of dQ of the keys before");
        is_turn = true;
        global_fence();  // the copy engine comes behind what the count says
        before == 0 ? bulk_store(to + kHalf * half, from, kHalf * sizeof(float))
                    : bulk_add(to + kHalf * half, from, kHalf * sizeof(float));
        tensor_store_commit();
        tensor_store_wait_read<0>();
        barrier_arrive(&shared.part_empty[of_consumer]);
      }
      if (before > 0 && step + 1 < steps.count()) {
        is_turn = GridCount(in.counts[part(step + 1)]).load(cuda::memory_order_acquire) >= before;
      }
      tensor_store_wait<0>();
      count.fetch_add(1, cuda::memory_order_release);
    }
  }

  /// The first consumer.
  __device__ __forceinline__ void compute_dV() const {
    Sum<Tile::kWidth> dV = {};
    Product P;
    Factor factor;
    Sum<64> dQ;
    barrier_wait(&shared.KV_full, 0);
    start_logits(P, 0);
    const auto do_step = [&]<bool kLast>(int step) {
      const int at = step % 2;
      wgmma_wait<0>();
      to_probabilities(P, step);
      to_factor(factor, P);
      release(shared.of_Q.empty[step % Tile::kStages]);
      barrier_wait(&shared.dS_empty[at], step / 2 % 2 ^ 1);
      store(shared.dS[at], P);
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&shared.P_full[at]);
      barrier_wait(&shared.of_d_out.full[0], step % 2);
      dV.template start_product<kSlices>(factor, shared.d_out[0][0].across_k(), true);
      if constexpr (!kLast) start_logits(P, step + 1);
      wgmma_wait<kLast ? 0 : 1>();  // dV
      release(shared.of_d_out.empty[0]);
      wait_for_dS(step);
      start_part(dQ, step);
      wgmma_wait<0>();
      release(shared.dS_empty[at]);
      add_part(dQ, step);
    };
    int step = 0;
    for (; step + 1 < steps.count(); ++step) do_step.template operator()<false>(step);
    do_step.template operator()<true>(step);
    store_key_sums(in, true, dV, place, key0, kItemKeys);
  }

  /// The second consumer.
  __device__ __forceinline__ void compute_dK() const {
    Sum<Tile::kWidth> dK = {};
    Product dS;
    Factor factor;
    Sum<64> dQ;
    barrier_wait(&shared.KV_full, 0);
    start_dP(dS, 0);
    const auto do_step = [&]<bool kLast>(int step) {
      const int at = step % 2, stage = step % Tile::kStages;
      wgmma_wait<0>();
      barrier_wait(&shared.P_full[at], step / 2 % 2);
      to_gradients(dS, step);
      to_factor(factor, dS);
      release(shared.of_d_out.empty[0]);
      store(shared.dS[at], dS);
      shared_fence();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        barrier_arrive(&shared.dS_full[at]);
        constexpr int kBytes = sizeof shared.dS[0] / 4;
        const int row = threadIdx.x % 128 / 2;  // of the warp's 16
        if (row == 0) barrier_arrive_expect(&shared.other_full[at], 4 * kBytes);
        bulk_push(shared.other_dS[at].row(row), shared.dS[at].row(row), kBytes,
                  &shared.other_full[at], 1 - rank);
      }
      barrier_wait(&shared.of_Q.full[stage], step / Tile::kStages % 2);
      dK.template start_product<kSlices>(factor, shared.Q[stage][0].across_k(), true);
      wait_for_dS(step);
      start_part(dQ, step);
      wgmma_wait<1>();  // dK
      release(shared.of_Q.empty[stage]);
      if constexpr (!kLast) start_dP(dS, step + 1);
      wgmma_wait<kLast ? 0 : 1>();
      release(shared.dS_empty[at]);
      add_part(dQ, step);
    };
    int step = 0;
    for (; step + 1 < steps.count(); ++step) do_step.template operator()<false>(step);
    do_step.template operator()<true>(step);
    store_key_sums(in, false, dK, place, key0, kItemKeys);
  }
};
#endif

template <class Tile, bool kInOrder>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_backward_wide(const __grid_constant__ BackwardMaps maps,
                            const __grid_constant__ BackwardOperands<typename Tile::T> in) {
#if HOPPER_CODE
  start_next_kernel();
  extern __shared__ __align__(1024) char bytes[];
  const BackwardWideBlock<Tile, kInOrder> block(bytes, maps, in);
  if (block.steps.count() == 0) return;
  const int warp = warp_of_block();
  if (warp < 4) {
    registers_shrink_to<Tile::kProducerRegisters>();
    if (warp == 0) block.template bring<true>();
    if (warp == 1) block.template bring<false>();
    if constexpr (kInOrder) {
      if (warp >= 2 && elect_one()) block.add_in_order(warp - 2);
    }
  } else {
    registers_grow_to<Tile::kConsumerRegisters>();
    if (warp < 8) {
      block.compute_dV();
    } else {
      block.compute_dK();
    }
  }
  cluster_meet();  // nobody sends to a block that has ended
#endif
}

}  // namespace operators::attention
