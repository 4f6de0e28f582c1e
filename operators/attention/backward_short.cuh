// The gradients of attention on Hopper for heads of up to 64 columns and 256 keys: one launch.
//
// A block has all keys of a head of K and V, so dQ is whole, and nothing is added up in memory: no
// sums that begin as zeros, and no launch that rounds them. It takes each gridDim.x-th head. With
// up to 192 keys K and V of the next head come while it is still busy with this one's. For more
// keys shared memory has no room for both.
//
// Consumers, a warpgroup each, have 64 of the keys, or two times 64, with their dK and dV in
// registers. Tiles of 64 queries come one after the other. As in
// operators/attention/backward_hopper.cuh P^T and dS^T are left factors in registers, and dS^T is
// written to shared memory for dQ = dS K, which needs that of all consumers. They take turns: one
// of them computes dQ of a tile, 64 x 64 numbers, and the others go on with the next tile. There
// are two places for dS^T.
//
// A consumer starts the product for dP only when it has the probabilities. So it has fewer
// registers in use, and the tensor cores are busy with the other consumers' products.
//
// D, the sums of d_out * out, are computed here, too: the copy engine brings out beside Q and
// d_out, and a thread of two helping warps has a row of both.
#pragma once

#include "operators/attention/backward_hopper.cuh"

namespace operators::attention {

/// kOwn: how many times 64 keys a consumer has.
template <typename T_, int kConsumers_, int kOwn_>
struct BackwardShortTile {
  using T = T_;
  static constexpr int kWidth = 64, kQueries = 64, kBlocks = 1;
  static constexpr int kConsumers = kConsumers_, kOwn = kOwn_, kKeys = 64 * kConsumers * kOwn;
  static constexpr int kThreads = 128 * (1 + kConsumers), kStages = 3;
  static constexpr int kPlaces = kKeys > 192 ? 1 : 2;  // for K and V of a head
  // Three consumers have nearly all registers that there are. Still some counters of loops are
  // spilled, which costs a step a few loads.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
};

template <class Tile>
struct BackwardShortShared {
  using T = typename Tile::T;
  struct Keys {
    LeftTile<T, Tile::kKeys> K, V;
  };
  struct Queries {
    Box<T, Tile::kQueries> Q, d_out, out;
  };
  Pipeline<Keys, Tile::kPlaces> keys;
  Pipeline<Queries, Tile::kStages> queries;
  Box<T, Tile::kKeys> dS[2];  // transposed
  // Of each stage of queries; by two helping warps.
  float log_sums[Tile::kStages][Tile::kQueries], row_sums[Tile::kStages][Tile::kQueries];
  Barrier rows_full[Tile::kStages], dS_full[2], dS_empty[2];
};

struct BackwardShortMaps : BackwardMaps {
  CUtensorMap out;
};

#if HOPPER_CODE
template <class Tile>
struct BackwardShortBlock {
  using T = typename Tile::T;
  using Shared = BackwardShortShared<Tile>;
  using Consumer = BackwardConsumer<Tile>;
  using Product = typename Consumer::Product;
  Shared& shared;
  const BackwardShortMaps& maps;
  const BackwardOperands<T>& in;

  __device__ BackwardShortBlock(char* bytes, const BackwardShortMaps& of,
                                const BackwardOperands<T>& operands)
      : shared(*reinterpret_cast<Shared*>(bytes)), maps(of), in(operands) {
    if (threadIdx.x == 0) {
      prepare(shared.keys, Tile::kConsumers);
      prepare(shared.queries, Tile::kConsumers);
      for (Barrier& barrier : shared.rows_full) barrier_init(&barrier, 64);
      for (int i = 0; i < 2; ++i) {
        barrier_init(&shared.dS_full[i], 4 * Tile::kConsumers);  // each warp
        barrier_init(&shared.dS_empty[i], 1);
      }
      barrier_init_fence();
    }
    __syncthreads();
  }

  /// Calls f(place) for each head of K and V that the block has.
  template <typename F>
  __device__ __forceinline__ void for_each_head(F f) const {
#pragma unroll 1
    for (int i = static_cast<int>(blockIdx.x); i < in.sequences; i += gridDim.x) {
      f(BackwardPlace(in, 0, i));
    }
  }
  /// And f(head of Q, first query) for each step of such a head.
  template <typename F>
  __device__ __forceinline__ void for_each_step(F f) const {
#pragma unroll 1
    for (int of_group = 0; of_group < in.group; ++of_group) {
#pragma unroll 1
      for (int query0 = 0; query0 < in.queries; query0 += Tile::kQueries) {
        f(of_group, query0);
      }
    }
  }

  /// The thread that starts the copies.
  __device__ void bring() const {
    wait_for_previous_kernel();
    const uint64_t policy = evict_normal();
    Writer keys(shared.keys);
    Writer queries(shared.queries);
    for_each_head([&](const BackwardPlace& place) {
      keys.put([&](auto& to, Barrier* arrived) {
        const int at[5] = {0, 0, 0, place.kv_head, place.batch};
        tensor_load(to.K.row(0), &maps.K, at, arrived, policy);
        tensor_load(to.V.row(0), &maps.V, at, arrived, policy);
      });
      for_each_step([&](int of_group, int query0) {
        queries.put([&](auto& to, Barrier* arrived) {
          const int at[5] = {0, of_group, query0, place.kv_head, place.batch};
          tensor_load(to.Q.row(0), &maps.Q, at, arrived, policy);
          tensor_load(to.d_out.row(0), &maps.d_out, at, arrived, policy);
          tensor_load(to.out.row(0), &maps.out, at, arrived, policy);
        });
      });
    });
  }

  /// Two warps: the logarithms and D of each step. Where there is no query, and where a query sees
  /// no key or only logits of -infinity, P has to be 0: the logarithm becomes +infinity.
  __device__ void help(int row) const {
    wait_for_previous_kernel();
    Ring ring{Tile::kStages};
    for_each_head([&](const BackwardPlace& place) {
      for_each_step([&](int of_group, int query0) {
        const int head = place.sequence * in.group + of_group, query = query0 + row;
        const float log_sum =
            query < in.queries ? in.log_sums[head * in.queries + query] : minus_infinity();
        barrier_wait(&shared.queries.full[ring.stage], ring.parity);
        const auto& stage = shared.queries.stage(ring.stage);
        float sum = 0;
#pragma unroll
        for (int piece = 0; piece < 8; ++piece) {
          using Own = Neighbours<T, 8>;
          const auto a = *reinterpret_cast<const Own*>(&stage.out.elements[swizzled(row, piece)]);
          const auto b = *reinterpret_cast<const Own*>(&stage.d_out.elements[swizzled(row, piece)]);
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            sum += static_cast<float>(a.values[j]) * static_cast<float>(b.values[j]);
          }
        }
        shared.log_sums[ring.stage][row] =
            log_sum == minus_infinity() ? -minus_infinity() : log_sum * kLog2E;
        shared.row_sums[ring.stage][row] = sum;
        barrier_arrive(&shared.rows_full[ring.stage]);
        ring.advance();
      });
    });
  }

  /// The keys of a consumer: with a mask the first keys have more to do than the last.
  __device__ static int first_key(int consumer, int own) {
    return 64 * (own == 0 ? consumer : 2 * Tile::kConsumers - 1 - consumer);
  }

  __device__ __forceinline__ void compute(int consumer) const {
    const BlockGrid<1, 1> alone;
    Reader keys(shared.keys, alone);
    Reader queries(shared.queries, alone);
    // turn: whose dQ is. With a mask the last keys have the least to do in a head's first steps.
    int step = 0, turn = Tile::kConsumers - 1;
    for_each_head([&](const BackwardPlace& place) {
      auto& of_keys = keys.wait();
      Sum<64> dK[Tile::kOwn] = {}, dV[Tile::kOwn] = {};
      for_each_step([&](int of_group, int query0) {
        auto& stage = queries.wait();
        const int at = step % 2, parity = step / 2 % 2;
        const int limit = in.limit(min(query0 + Tile::kQueries, in.queries) - 1);
        // Writes the rows of dS^T of some keys, where dQ of two steps ago does not need the place
        // any longer.
        const auto hand_over = [&](const Product& dS, int own) {
          if (own == 0) barrier_wait(&shared.dS_empty[at], parity ^ 1);
          auto& to = reinterpret_cast<Box<T, 64>&>(*shared.dS[at].row(first_key(consumer, own)));
          dS.store(to, 0, [&](int i) { return dS.elements[i]; });
          if (own + 1 < Tile::kOwn) return;
          shared_fence();
          __syncwarp();
          if (threadIdx.x % 32 == 0) barrier_arrive(&shared.dS_full[at]);
        };
        queries.wait_for(shared.rows_full);
#pragma unroll
        for (int own = 0; own < Tile::kOwn; ++own) {
          const int key0 = first_key(consumer, own);
          if (key0 >= limit) {
            // None of the queries sees one of the keys. There is no product, for which the warps
            // would meet. So they meet here: then one thread may say below that all have come.
            named_barrier(1 + consumer, 128);
            hand_over({}, own);
            continue;
          }
          Product P, dS;
          typename Consumer::Factor P_factor, dS_factor;
          P.start_product(of_keys.K.rows(key0), AlongK<T>{descriptor_a(stage.Q.elements)}, false);
          wgmma_wait<0>();
          Consumer::to_probabilities(P, in, shared.log_sums[queries.ring.stage], query0, key0);
          Consumer::to_factor(P_factor, P);
          dS.start_product(of_keys.V.rows(key0), AlongK<T>{descriptor_a(stage.d_out.elements)},
                           false);
          dV[own].start_product(P_factor, stage.d_out.across_k(), true);
          wgmma_wait<1>();  // dP
          Consumer::to_gradients(dS, P, P_factor, shared.row_sums[queries.ring.stage]);
          Consumer::to_factor(dS_factor, dS);
          hand_over(dS, own);
          dK[own].start_product(dS_factor, stage.Q.across_k(), true);
          wgmma_wait<0>();
        }
        queries.give_back();
        queries.next();
        if (turn == consumer) {
          barrier_wait(&shared.dS_full[at], parity);
          Sum<64> dQ;
          dQ.template start_product<Tile::kKeys / 16>(shared.dS[at].across_k(),
                                                      of_keys.K.across_k(), false);
          wgmma_wait<0>();
          if (threadIdx.x % 128 == 0) barrier_arrive(&shared.dS_empty[at]);
          const int head = place.kv_head * in.group + of_group;
          store_rows(dQ, in.scale,
                     in.dQ + place.batch * in.dq.batch + head * in.dq.head + query0 * in.dq.row,
                     in.dq.row, in.queries - query0, in.width);
        }
        ++step;
        turn = turn == 0 ? Tile::kConsumers - 1 : turn - 1;
      });
      keys.give_back();
      keys.next();
      const auto store = [&](const Sum<64>& sum, float factor, T* to, const Strides& by, int key0) {
        store_rows(sum, factor,
                   to + place.batch * by.batch + place.kv_head * by.head + key0 * by.row, by.row,
                   in.keys - key0, in.width);
      };
#pragma unroll
      for (int own = 0; own < Tile::kOwn; ++own) {
        store(dV[own], 1, in.dV, in.dv, first_key(consumer, own));
        store(dK[own], in.scale, in.dK, in.dk, first_key(consumer, own));
      }
    });
  }
};
#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_backward_short(const __grid_constant__ BackwardShortMaps maps,
                             const __grid_constant__ BackwardOperands<typename Tile::T> in) {
#if HOPPER_CODE
  start_next_kernel();
  extern __shared__ __align__(1024) char bytes[];
  const BackwardShortBlock<Tile> block(bytes, maps, in);
  const int warp = warp_of_block();
  if (warp < 4) {
    registers_shrink_to<Tile::kProducerRegisters>();
    if (warp == 0 && elect_one()) block.bring();
    if (warp == 1 || warp == 2) block.help(threadIdx.x - 32);
  } else {
    registers_grow_to<Tile::kConsumerRegisters>();
    block.compute(warp / 4 - 1);
  }
#endif
}

}  // namespace operators::attention
