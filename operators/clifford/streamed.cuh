// Lesson 10's *rows streamed*, for compute capability 9.0: for rows that start anywhere, and for
// rows that are too long for one block, which the blocks of a cluster share.
//
// No thread fetches its own x and y. One copy of the copy engine (TMA) brings a whole plane of a
// block's rows, and forward several stages are on their way. That leaves registers for the weights:
// a thread has the same features in all of its rows.
//
// A block takes a whole multiprocessor, so that forward can be launched early: the next launch's
// blocks take the places of this one's, one for one. (With several blocks on a multiprocessor the
// next blocks would crowd onto the multiprocessors that have room first.)
//
// Nor do the warps of a row stop at __syncthreads() for its sums. Each warp posts its sums and goes
// on, forward with its part of the next row: software pipelining. It collects the row's sums when
// it needs them (row_exchange.cuh).
//
// Backward, registers are scarce. In 3-D a thread has for each feature 20 weights, 20 sums for dw
// and three multivectors of 8 numbers. So with 8 blades or more the weights are in shared memory,
// and leave room for one stage. The next rows are ordered when all threads have taken x, y and
// d_out and have posted their sums. But with 8 or 16 blades y is taken once more after that. So the
// stage has two places for y, and rows use them in turn.
#pragma once

#include <algorithm>

#include "operators/clifford/row_exchange.cuh"
#include "operators/clifford/rows.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/hopper/hopper.cuh"

namespace operators::clifford {

// W features per thread: as many as the registers hold.
template <typename A>
constexpr int kStreamedWidth = A::kBlades <= 8 ? 2 : 1;

// Bytes of shared memory for the stages, where the weights are in registers. RowSums comes on top,
// and so do weights that do not fit in the last stage.
inline constexpr size_t kStreamBytes = 208 << 10;

// The stages of a block, each with the planes of kTensors tensors for all rows that it has at a
// time, as they are stored: in T. The copy engine copies multiples of 16 bytes, which are kUnit
// elements, from multiples of 16 on. Without kVector rows start anywhere. Then a copy brings what
// covers them, and in stages[s][k] they begin shift() elements further on. With up to 8 blades that
// is as far from a multiple of 128 bytes as in memory, so that the copy engine need not split
// lines. (Nothing beyond a tensor is read: without kVector it has a multiple of kUnit blades.)
template <typename A, int W, bool kVector, int kTensors, typename T>
struct Stream {
  static constexpr int kUnit = 16 / sizeof(T);
  static_assert(kVector || A::kBlades % kUnit == 0);
  static constexpr int kPlanes = kTensors * A::kBlades;
  static constexpr int kLine = A::kBlades <= 8 ? 8 * kUnit : kUnit;
  static constexpr int kPeriod = std::min(kUnit, A::kBlades);  // planes until shifts are the same
  static constexpr int kElements = kThreads<A> * W + (kVector ? 0 : kLine);
  using RowSums = operators::clifford::RowSums<(kTensors - 1) * A::kGrades, kThreads<A> / 32>;
  using SharedWeights = OnChipMemory<A, W, kVector, 0>;
  // Backward has no registers for the weights of 8 blades or more. It takes y twice, so that the
  // next rows' y goes to other planes. 32 blades leave no shared memory for those.
  static constexpr bool kSharedWeights = kTensors == 3 && A::kBlades >= 8;
  static constexpr int kTakesTwice = kSharedWeights && A::kBlades <= 16;
  using Stage = T[kPlanes + kTakesTwice * A::kBlades][kElements];
  static constexpr int kFront = sizeof(RowSums) / sizeof(float);
  // The last stage gets the weights first. One of 16-bit elements may be too small for them.
  static constexpr size_t kWeightBytes =
      sizeof(T) == 4 ? 0 : sizeof(float) * kThreads<A> * W * A::kTriples;
  static constexpr size_t kLastBytes = std::max(sizeof(Stage), kWeightBytes);
  static constexpr int kStages =
      kSharedWeights ? 1 : 1 + static_cast<int>((kStreamBytes - kLastBytes) / sizeof(Stage));
  static constexpr int kLast = kStages - 1;
  static_assert(kTakesTwice ? kStages == 1 : kSharedWeights || kStages > 1);
  static size_t bytes(const RowsOnChip& shape) {
    const size_t before_last = sizeof(RowSums) + kLast * sizeof(Stage);
    if (kSharedWeights) return before_last + sizeof(Stage) + SharedWeights::bytes(shape);
    return before_last + std::max(sizeof(Stage), sizeof(float) * shape.per_row * W * A::kTriples);
  }

#if HOPPER_CODE
  RowSums& sums;
  Stage* stages;
  Barrier* full;
  const T** planes;
  Layer layer;
  Place<W, kVector> place;
  int rows, groups;  // a block's rows at a time; how many such groups there are

  __device__ Stream(float* shared, Barrier (&full)[kStages], const T* (&planes)[kPlanes],
                    const T* const (&tensors)[kTensors], const Layer& layer,
                    const RowsOnChip& shape)
      : sums(*reinterpret_cast<RowSums*>(shared)),
        stages(reinterpret_cast<Stage*>(shared + kFront)),
        full(full),
        planes(planes),
        layer(layer),
        place(shape, layer),
        rows(shape.rows()),
        groups(shape.groups(layer)) {
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) barrier_init(&full[s], 1);
    }
    for (int p = threadIdx.x; p < kPlanes; p += blockDim.x) {
      const T* tensor = tensors[0];
#pragma unroll
      for (int i = 1; i < kTensors; ++i) tensor = p < i * A::kBlades ? tensor : tensors[i];
      planes[p] = tensor + p % A::kBlades * layer.plane();
    }
    sums.open(place.blocks);  // its fence is for full[], too
  }

  // The first element of a group in a plane. 32 bits are enough, and registers are scarce.
  __device__ unsigned element(int group) const {
    return static_cast<unsigned>(group) * rows * layer.features + place.start;
  }
  __device__ int inside(int group) const {
    return group * rows + place.row < layer.batch ? place.count : 0;
  }
  __device__ int shift(int group, int plane) const {
    const unsigned all = static_cast<unsigned>(layer.plane());
    return kVector ? 0 : (element(group) + plane % min(kLine, A::kBlades) * all) % kLine;
  }
  // How many planes further on the y of this round is.
  __device__ int turn(int round) const { return kTakesTwice * (round % 2) * 2 * A::kBlades; }

  // Orders a group's rows, if they are there. All warps order a few planes each: copies start one
  // after the other, and a warp that ordered all would be late for its own work. One thread tells
  // the barrier how many bytes come. Some may come earlier: the phase does not end before that
  // thread has arrived. (Plane p + kPeriod has as many bytes as plane p. So these planes tell the
  // sum over all.)
  __device__ __forceinline__ void fetch(int group, int s, int round) const {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    if (group >= groups || warp >= kPlanes) return;
    const int count = min(rows, layer.batch - group * rows) * place.features;
    const auto bytes = [&](int plane) {
      return (count + shift(group, plane) % kUnit + kUnit - 1) / kUnit * 16;
    };
    if (threadIdx.x == 0) {
      int sum = 0;
#pragma unroll
      for (int p = 0; p < kPeriod; ++p) sum += bytes(p);
      barrier_arrive_expect(&full[s], kPlanes / kPeriod * sum);
    }
    // So that the compiler spills fewer registers.
    if (kTakesTwice && A::kBlades == 16) __syncwarp();
#pragma unroll 1
    for (int p = warp + threadIdx.x % 32 * warps; p < kPlanes; p += blockDim.x) {
      const int to = p / A::kBlades == 1 ? p + turn(round) : p;
      const int ahead = shift(group, p) % kUnit;
      bulk_load(stages[s][to] + shift(group, p) - ahead, planes[p] + element(group) - ahead,
                bytes(p), &full[s]);
    }
  }
  // A thread's multivectors of a tensor.
  template <int tensor>
  __device__ __forceinline__ Multivectors<A, W> take(int group, int s, int round,
                                                     int inside) const {
    Multivectors<A, W> result;
    const T* planes = stages[s][tensor * A::kBlades + (tensor == 1 ? turn(round) : 0)] +
                      place.row * place.features + place.first;
    unroll<0, A::kBlades>([&](auto k) {
      result.blade[k] = place.load(planes + shift(group, k) + k * kElements, inside);
    });
    return result;
  }
#endif
};

#if HOPPER_CODE
// The weights of a thread's features, in registers; zeros where it has fewer than W. In memory the
// weights of the next feature are 40 to 224 bytes away: if threads loaded their own, a load of a
// warp would touch up to 32 lines. So the block copies all of its weights as they lie, in whole
// lines, to the last stage, and each thread takes its own from there. The last stage gets its rows
// when all threads have taken their weights.
template <typename A, int W>
struct RegisterWeights {
  Pack<W> packs[A::kTriples];

  // Orders the rows of all stages, from `group` on. If there are several rounds, the first round's
  // rows are ordered before the weights, since they take longer. A block with one round orders its
  // weights first, and takes them while its rows come.
  template <typename Rows>
  __device__ __forceinline__ RegisterWeights(const float* w, const Rows& stream, int group,
                                             int step) {
    constexpr int kWidth = Weights<A>::kWidth, kCopies = W * A::kTriples / kWidth;
    const auto& place = stream.place;
    const int rows_before = stream.groups > step ? 1 : 0;  // stages, ordered before the weights
    for (int s = 0; s < rows_before; ++s) stream.fetch(group, s, s);
    float* const all = reinterpret_cast<float*>(stream.stages[Rows::kLast]);
    const float* from = w + static_cast<size_t>(place.start) * A::kTriples;
    const int count = blockDim.x / stream.rows * W * A::kTriples;  // of a row's threads
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      const int i = (copy * blockDim.x + threadIdx.x) * kWidth;
      const bool inside = i < place.features * A::kTriples;
      if (i < count) copy_async<kWidth * sizeof(float)>(all + i, from + i, inside);
    }
    copy_async_commit();
    for (int s = rows_before; s < Rows::kLast; ++s) stream.fetch(group + s * step, s, s);

    copy_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const Weights<A> weights(all + (place.first + e * place.kStep) * A::kTriples);
      unroll<0, A::kTriples>([&](auto t) { packs[t].v[e] = weights(t).v[0]; });
    }
    shared_fence();  // threads have written this stage, and next the copy engine will
    __syncthreads();
    stream.fetch(group + Rows::kLast * step, Rows::kLast, Rows::kLast);
  }
  template <typename Index>
  __device__ __forceinline__ Pack<W> operator()(Index) const {
    return packs[Index::value];
  }
};
#endif

// A thread owns W features of one of the block's rows. In a round it waits for its stage and
// computes z of this row; then it finishes the row before: it collects the sums, orders the next
// copies into that row's stage, and stores that row's out. So while the sums of one row come
// together, the thread multiplies the next row.
template <typename A, int W, bool kVector, typename T>
__global__ void __launch_bounds__(kThreads<A>, 1)
    forward_streamed(const T* x, const T* y, const float* w, T* out, Layer layer,
                     RowsOnChip shape) {
#if HOPPER_CODE
  using Rows = Stream<A, W, kVector, 2, T>;
  extern __shared__ __align__(128) float streamed[];
  __shared__ Barrier full[Rows::kStages];
  __shared__ const T* planes[Rows::kPlanes];
  const Rows stream(streamed, full, planes, {x, y}, layer, shape);
  const Place<W, kVector>& place = stream.place;
  const int step = gridDim.x / place.blocks;

  start_next_kernel();
  wait_for_previous_kernel();
  int group = blockIdx.x / place.blocks;
  const RegisterWeights<A, W> weights(w, stream, group, step);
  Ring ring{Rows::kStages}, last{Rows::kStages};
  int round = 0;
  // collect() waits until all warps of the block have posted. A warp posts after it has taken its
  // part of the stage. So by then the whole stage is free, for all of its rows.
  const auto finish = [&](const Multivectors<A, W>& z, int group, int round) {
    const auto sums = stream.sums.collect(place.row, place.blocks, shape.per_row / 32, round);
    stream.fetch(group + Rows::kStages * step, last.stage, round + Rows::kStages);
    last.advance();
    const size_t at = stream.element(group) + place.row * layer.features + place.first;
    store_normed(z, sums, layer, out + at, place, stream.inside(group));
  };
  Multivectors<A, W> last_z = {};
  for (; group < stream.groups; group += step, ring.advance(), ++round) {
    const int inside = stream.inside(group);
    Multivectors<A, W> z = {};
    FeatureSums<A::kGrades> sums = {};
    barrier_wait(&full[ring.stage], ring.parity);
    if (inside > 0) {
      const auto left = stream.template take<0>(group, ring.stage, round, inside);
      const auto right = stream.template take<1>(group, ring.stage, round, inside);
      z = gated_product(left, right, weights, layer.gated);
      add_squares(z, sums);
    }
    if (round > 0) finish(last_z, group - step, round - 1);
    stream.sums.post(sums, place.blocks, round);
    last_z = z;
  }
  if (round > 0) finish(last_z, group - step, round - 1);
#endif
}

// A thread owns W features, as in forward_streamed, but it finishes a row before it takes the next
// one: it has no registers for two rows. Each row of a block has its own partial sums of dw, which
// stay in registers until the end, as in backward_on_chip.
template <typename A, int W, bool kVector, typename T>
__global__ void __launch_bounds__(kThreads<A>, 1)
    backward_streamed(const T* x, const T* y, const float* w, const T* d_out, T* dx, T* dy,
                      float* dw_partials, Layer layer, RowsOnChip shape) {
#if HOPPER_CODE
  using Rows = Stream<A, W, kVector, 3, T>;
  extern __shared__ __align__(128) float streamed[];
  __shared__ Barrier full[Rows::kStages];
  __shared__ const T* planes[Rows::kPlanes];
  const Rows stream(streamed, full, planes, {x, y, d_out}, layer, shape);
  const Place<W, kVector>& place = stream.place;
  const int step = gridDim.x / place.blocks;

  int group = blockIdx.x / place.blocks;
  const auto weights = [&] {
    if constexpr (Rows::kSharedWeights) {
      stream.fetch(group, 0, 0);
      const typename Rows::SharedWeights shared(
          reinterpret_cast<float*>(stream.stages + Rows::kStages), shape);
      shared.fetch_weights(w, shape, place);
      copy_async_commit();
      copy_async_wait<0>();
      __syncthreads();
      return shared;
    } else {
      return RegisterWeights<A, W>(w, stream, group, step);
    }
  }();
  Pack<W> dw[A::kTriples] = {};
  Ring ring{Rows::kStages};
  int round = 0;
  for (; group < stream.groups; group += step, ring.advance(), ++round) {
    const int inside = stream.inside(group);
    barrier_wait(&full[ring.stage], ring.parity);
    const auto left = stream.template take<0>(group, ring.stage, round, inside);
    auto right = stream.template take<1>(group, ring.stage, round, inside);
    const auto d = stream.template take<2>(group, ring.stage, round, inside);
    const Multivectors<A, W> P = weighted_product(left, right, weights);
    const Gates<W> gates(left.blade[0], right.blade[0], layer.gated);
    GradientSums<A> sums = {};
    add_gradient_sums(P, gates.product(), d, sums);
    stream.sums.post(sums, place.blocks, round);
    sums = stream.sums.collect(place.row, place.blocks, shape.per_row / 32, round);
    stream.fetch(group + Rows::kStages * step, ring.stage, round + Rows::kStages);

    Pack<W> dg;
    const Multivectors<A, W> dP = gradient_of_product(P, gates.product(), d, sums, layer, dg);
    if (Rows::kTakesTwice) right = stream.template take<1>(group, ring.stage, round, inside);
    const unsigned at = stream.element(group) + place.row * layer.features + place.first;
    store_gradients(left, right, dP, dg, gates, weights, dw, dx + at, dy + at, layer, place,
                    inside);
  }
  store_weight_gradients<A>(dw, dw_partials, place, shape, layer);
#endif
}

}  // namespace operators::clifford
