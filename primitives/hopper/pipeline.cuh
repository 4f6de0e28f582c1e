// A pipeline: stages in shared memory, which one thread fills and warpgroups empty, again and
// again. docs/hopper.md draws it. Each stage has two barriers:
//   - `full`: the thread that fills the stage announces how many bytes will come. The phase is over
//     when the copy engine has brought them.
//   - `empty`: the phase is over when all who read the stage have given it back.
//
// Kernels fill stages, wait for them and give them back by these words only. (Lesson 3's first two
// kernels for Hopper write them out.)
//
//     Writer::put    waits until the next stage is empty, announces its bytes, starts its copies
//     Reader::take   waits until the next stage is full, starts its products, and gives back the
//                    stage before, whose products are done by then
//
// For example, a pipeline has three stages. Steps and the phases of a barrier are counted from 0,
// and a thread that waits names a phase by its parity:
//
//     step                                  0   1   2   3   4   5   6
//     its stage                             0   1   2   0   1   2   0
//     `full`:  a Reader waits for phase     0   0   0   1   1   1   2
//              which has parity             0   0   0   1   1   1   0
//     `empty`: the Writer waits for phase   -   -   -   0   0   0   1
//              it names parity              1   1   1   0   0   0   1
//
// In step 4 the Writer waits until step 1, which had the same stage, has been given back: that ends
// phase 0 of this stage's `empty`. In steps 0 to 2 no step has had the stage before. There the
// Writer names parity 1, and a new barrier behaves as if a phase of parity 1 were over: it does not
// wait.
//
// `blocks`, a BlockGrid or BlockRow (primitives/hopper/block_grid.cuh), knows whom to tell that a
// stage is empty.
//
// At the first reading take "turn" for "stage", and skip prepare_first(), put_first(), Writer's
// `filled` and `announced`, back(), and Maker: only operators and bonuses need them. A pipeline is
// any class with stages(), turns(), stage(turn) and the barriers full[] and empty[]. Pipeline is
// the one that has its stages itself. In a class whose number of stages is known only at run time
// kStages and kTurns are 0.
#pragma once

#include <type_traits>

#include "primitives/hopper/block_grid.cuh"
#include "primitives/hopper/hopper.cuh"

namespace primitives {

/// The barriers of a pipeline whose stages lie somewhere else.
///
/// Usually a turn is a stage: turns come one after the other, again and again, and each has two
/// barriers. Why is there another word? Two readers may take stages alternately. Then each of them
/// skips some phases of a stage's barrier, and since it tells a barrier only the parity, it could
/// mistake one phase for another. In that case there are more turns than stages. Each turn has
/// barriers of its own, and turn t fills stage t % kStages: that is stage(turn).
///
/// For example, there are two stages, and each reader takes two steps at a time: one takes steps 0,
/// 1, 4, 5, and the other one takes steps 2, 3, 6, 7. In stage 0 the first reader waits for step 0
/// and next for step 4, that is for phases 0 and 2 of one barrier, which have the same parity. With
/// four turns step 4 is turn 0 again. Its barrier has served no other step than 0, so the reader
/// waits for phases 0 and 1. (The turns that the warpgroups of attention take are something else.)
template <int kStageCount, int kTurnCount = kStageCount>
struct StageBarriers {
  static constexpr int kStages = kStageCount, kTurns = kTurnCount;
  static_assert(kTurns % kStages == 0);
  Barrier full[kTurns], empty[kTurns];

#if HOPPER_CODE
  __device__ static constexpr int turns() { return kTurns; }
  __device__ static constexpr int stages() { return kStages; }
  __device__ static int stage(int turn) { return kTurns == kStages ? turn : turn % kStages; }
#endif
};

/// The barriers, and the stages themselves: stage(turn) is the stage that the turn fills.
template <class StageType, int kStageCount, int kTurnCount = kStageCount>
struct Pipeline {
  using Stage = StageType;
  static constexpr int kStages = kStageCount, kTurns = kTurnCount;
  Stage memory[kStages];
  Barrier full[kTurns], empty[kTurns];

#if HOPPER_CODE
  __device__ static constexpr int turns() { return kTurns; }
  __device__ static constexpr int stages() { return kStages; }
  __device__ Stage& stage(int turn) { return memory[kTurns == kStages ? turn : turn % kStages]; }
#endif
};

/// How many bytes the copies of one turn bring into a stage: all of it, or Stage::kLoaded.
template <class Stage>
__host__ __device__ constexpr int loaded_bytes() {
  if constexpr (requires { Stage::kLoaded; }) {
    return Stage::kLoaded;
  } else {
    return sizeof(Stage);
  }
}

#if HOPPER_CODE

/// One thread prepares a pipeline, before the block or the cluster meets in blocks.meet(). A stage
/// is given back by `readers` arrivals. Usually these are one of each warpgroup that reads the
/// stage, in each block that gives it back to this one: two warpgroups in each of two blocks are 4.
/// Where each warp gives it back for itself, there are as many arrivals as warps. Where threads
/// fill a stage (Maker), `makers` arrivals fill it. kFirstIsReady: prepare_first() has prepared
/// full[0] already.
template <bool kFirstIsReady = false, class Pipe>
__device__ void prepare(Pipe& pipe, int readers, int makers = 1) {
  for (int t = 0; t < pipe.turns(); ++t) {
    if (t > 0 || !kFirstIsReady) barrier_init(&pipe.full[t], makers);
    barrier_init(&pipe.empty[t], readers);
  }
  barrier_init_fence();
}
/// The same where blocks fill stages in turn (BlockGrid), and not all stages are given back by
/// equally many blocks. Each of these has so many readers.
template <bool kFirstIsReady, class Pipe, class Blocks>
__device__ void prepare_in_turn(Pipe& pipe, const Blocks& blocks, int readers) {
  for (int t = 0; t < pipe.turns(); ++t) {
    if (t > 0 || !kFirstIsReady) barrier_init(&pipe.full[t], 1);
    barrier_init(&pipe.empty[t], readers * blocks.readers(t));
  }
  barrier_init_fence();
}

/// For a kernel that is over in microseconds: the first stage may be filled before the cluster has
/// met, so that its data come sooner. One thread prepares that stage's barrier by prepare_first(),
/// and then calls put_first(), which announces the bytes and has fill(stage, arrived) start the
/// copies. They are for this block alone, since no other block may be sent anything yet. Another
/// thread prepares the other barriers meanwhile, by prepare<true>(). The Writer is told by
/// `first_is_filled`.
///
/// put_first() may also announce more bytes than it copies. Then Writer::announced is set, and the
/// first put() starts the other copies without announcing them again.
template <class Pipe>
__device__ void prepare_first(Pipe& pipe) {
  barrier_init(&pipe.full[0], 1);
  barrier_init_fence();
}
template <class Pipe, typename Fill>
__device__ __forceinline__ void put_first(Pipe& pipe, int bytes, Fill fill) {
  barrier_arrive_expect(&pipe.full[0], bytes);
  fill(pipe.stage(0), &pipe.full[0]);
}
template <class Pipe, typename Fill>
__device__ __forceinline__ void put_first(Pipe& pipe, Fill fill) {
  put_first(pipe, loaded_bytes<typename Pipe::Stage>(), fill);
}

/// The thread that fills stages, and how far it has come. Most kernels call put() for each step
/// and, in a cluster, finish() at the end. Order is Ring: with three stages 0, 1, 2, 0 and so on.
/// Or it is BackRing, on the way back through the stages of another Writer: if that one filled
/// stage 1 last, the way back is 1, 0, 2, 1 and so on.
template <class Pipe, class Order = Ring>
struct Writer {
  Pipe& pipe;
  Order ring;
  bool filled = false;  ///< whether the next stage is filled already
  /// The next stage's bytes have been announced already, and some of them are on their way.
  bool announced = false;

  __device__ explicit Writer(Pipe& of, bool first_is_filled = false)
      : pipe(of), ring{of.turns()}, filled(first_is_filled), oldest_{of.turns()} {}
  /// What back() returns. It first fills the stage again that was filled last.
  __device__ explicit Writer(const Writer<Pipe>& back_from) requires std::is_same_v<Order, BackRing>
      : pipe(back_from.pipe), ring(back_from.ring), oldest_{back_from.pipe.turns()} {
    ring.parity ^= 1;
  }
  /// A Writer that goes back through the stages, from the one that was filled last.
  __device__ __forceinline__ auto back() const { return Writer<Pipe, BackRing>(*this); }

  /// Waits until the next stage is empty, and returns it: for what the thread itself writes into it
  /// before put().
  __device__ __forceinline__ decltype(auto) wait() {
    static_assert(Pipe::kTurns == Pipe::kStages);
    wait_for_next();
    return pipe.stage(ring.stage);
  }

  /// Fills the next stage: waits until it is empty, announces `bytes` bytes, and calls fill(stage,
  /// arrived), which starts the copies. They count at the barrier `arrived`.
  template <typename Fill>
  __device__ __forceinline__ void put(int bytes, Fill fill) {
    if (filled) {
      filled = false;
    } else {
      if (announced) {
        announced = false;
      } else {
        wait_for_next();
        barrier_arrive_expect(&pipe.full[ring.stage], bytes);
      }
      fill(pipe.stage(ring.stage), &pipe.full[ring.stage]);
    }
    ring.advance();
  }
  /// The same for a Pipeline, which knows how many bytes these are.
  template <typename Fill>
  __device__ __forceinline__ void put(Fill fill) {
    put(loaded_bytes<typename Pipe::Stage>(), fill);
  }

  /// The last thing that the writer of a block in a cluster does. It waits until each stage has
  /// been given back as often as it was filled. By then everything that other blocks send to this
  /// one has come, bytes and arrivals, and the block may end.
  __device__ void finish() {
    if constexpr (Pipe::kTurns == Pipe::kStages) {
      for (int s = 0; s < pipe.turns(); ++s, ring.advance()) wait_for_next();
    } else {
      for (; taken_ > 0; --taken_) wait_for_oldest();
    }
  }

 private:
  Ring oldest_;    // with more turns than stages: the oldest turn that has not been given back
  int taken_ = 0;  // stages that such turns have

  /// On a new barrier parity 1 is over: in the first lap nobody waits.
  __device__ __forceinline__ void wait_for_next() {
    if constexpr (Pipe::kTurns == Pipe::kStages) {
      barrier_wait(&pipe.empty[ring.stage], ring.parity ^ 1);
    } else {
      taken_ < pipe.stages() ? static_cast<void>(++taken_) : wait_for_oldest();
    }
  }
  __device__ void wait_for_oldest() {
    barrier_wait(&pipe.empty[oldest_.stage], oldest_.parity);
    oldest_.advance();
  }
};

/// Threads that fill a stage themselves, each a part of it, in the place of the copy engine. All of
/// them call these functions. There is one stage. If it has several turns, groups of threads fill
/// it alternately.
template <class Pipe>
struct Maker {
  static_assert(Pipe::kStages == 1);
  Pipe& pipe;
  Ring ring;

  __device__ explicit Maker(Pipe& of) : pipe(of), ring{of.turns()} {}

  /// Waits until the turn before has been given back (before the very first there is none), and
  /// returns the stage.
  __device__ __forceinline__ decltype(auto) wait() {
    const bool first = ring.stage == 0;
    barrier_wait(&pipe.empty[(first ? pipe.turns() : ring.stage) - 1], ring.parity ^ first);
    return pipe.stage(ring.stage);
  }
  /// Says that the thread has written its part, and that wgmma may read it.
  __device__ __forceinline__ void fill() {
    shared_fence();
    barrier_arrive(&pipe.full[ring.stage]);
  }
  /// Goes on by `turns` turns: its own, and those of other groups.
  __device__ __forceinline__ void next(int turns = 1) {
    for (int t = 0; t < turns; ++t) ring.advance();
  }
};

/// A warpgroup (or some of its warps) that empties stages, and how far it has come. Most kernels
/// call take() for each step, and finish() at the end of a tile. When take() returns, the products
/// of one step are under way. For example, in step 4 it starts the products of step 4, waits until
/// those of step 3 are done, and gives back the stage of step 3. Order is as a Writer's.
template <class Pipe, class Blocks, class Order = Ring>
struct Reader {
  Pipe& pipe;
  const Blocks& blocks;
  Order ring;
  int previous = -1;  ///< the turn whose products are under way

  __device__ Reader(Pipe& of, const Blocks& in) : pipe(of), blocks(in), ring{of.turns()} {}
  __device__ explicit Reader(
      const Reader<Pipe, Blocks>& back_from) requires std::is_same_v<Order, BackRing>
      : pipe(back_from.pipe), blocks(back_from.blocks), ring(back_from.ring) {}
  /// A Reader that goes back through the stages, from the one that was taken last. At first it
  /// takes those turns again that it has taken and not given back, at most as many as there are
  /// stages. Then come those that the way back of the Writer fills.
  __device__ __forceinline__ auto back() const { return Reader<Pipe, Blocks, BackRing>(*this); }

  /// Waits until the next stage is full, and returns it. Called again before next(), it returns the
  /// same stage.
  __device__ __forceinline__ decltype(auto) wait() {
    barrier_wait(&pipe.full[ring.stage], ring.parity);
    return pipe.stage(ring.stage);
  }
  /// The same for barriers beside the pipeline, one for each turn. Other threads of the block
  /// arrive there, by done_with(), when they have done something with the turn's stage.
  __device__ __forceinline__ void wait_for(Barrier* done) const {
    barrier_wait(&done[ring.stage], ring.parity);
  }
  __device__ __forceinline__ void done_with(Barrier* done) const {
    barrier_arrive(&done[ring.stage]);
  }
  /// Gives back the stage that wait() has returned. All products with it are done then.
  __device__ __forceinline__ void give_back() { release(ring.stage); }
  /// The same for a stage that next() has gone past.
  __device__ __forceinline__ void give_back(int stage) { release(stage); }
  /// Goes on by `turns` turns: those that it is done with, or that another reader takes.
  __device__ __forceinline__ void next(int turns = 1) {
    for (int t = 0; t < turns; ++t) ring.advance();
  }

  /// A step of a product. It waits until the next stage is full, and calls start(stage, add), which
  /// starts products with this stage. They are added to the sum if `add`, which is false in the
  /// first step after finish(). When take() returns, these products are under way. Those of the
  /// step before are done, and its stage has been given back, unless `keep`.
  template <typename Start>
  __device__ __forceinline__ void take(Start start, bool keep = false) {
    start(wait(), previous >= 0);
    started(keep);
  }

  /// All `steps` steps of a product, at least one. finish() comes after it. The result is that of
  /// so many calls of take(start), with half as many instructions between two steps. In a tile of
  /// 64 x 96 wgmma takes 192 cycles a step, and those instructions took 230. `blocks` is a
  /// BlockGrid.
  template <typename Start>
  __device__ __forceinline__ void take_steps(int steps, Start start) {
    const auto told = blocks.told();
    int now = same_in_warp(ring.stage);
    barrier_wait(&pipe.full[ring.stage], ring.parity);
    start(pipe.stage(now), false);
    ring.advance();
#pragma unroll 1
    for (int left = steps - 1; left > 0; --left) {
      const int before = now;
      now = same_in_warp(ring.stage);
      barrier_wait(&pipe.full[ring.stage], ring.parity);
      start(pipe.stage(now), true);
      ring.advance();
      wgmma_wait<1>();
      blocks.tell(told, pipe.empty, before);
    }
    previous = now;
  }

  /// `steps` steps of a product whose left factor is in registers. load(set, stage) loads a
  /// thread's fragments of it, and start(set, stage, add) starts the products. While one step is
  /// multiplied, the fragments of the next step are loaded. So there are two sets of registers, and
  /// each pass of the loop has two steps.
  template <class Fragments, typename Load, typename Start>
  __device__ __forceinline__ void take_ahead(int steps, Load load, Start start) {
    Fragments sets[2];
    const auto fetch = [&](Fragments& set) { load(set, wait()); };
    const auto multiply = [&](const Fragments& set) {
      start(set, pipe.stage(same_in_warp(ring.stage)), previous >= 0);
      started(false);
    };
    fetch(sets[0]);
    for (int step = 0; step < steps; step += 2) {
      multiply(sets[0]);
      if (step + 1 == steps) break;
      fetch(sets[1]);
      multiply(sets[1]);
      if (step + 2 < steps) fetch(sets[0]);
    }
  }

  /// Waits for the last products, and gives their stage back, unless `keep`.
  __device__ __forceinline__ void finish(bool keep = false) {
    wgmma_wait<0>();
    if (!keep) release(previous);
    previous = -1;
  }

 private:
  __device__ __forceinline__ void release(int turn) {
    if constexpr (requires { blocks.told(); }) {
      blocks.tell(blocks.told(), pipe.empty, turn);
    } else {
      blocks.release(pipe.empty[turn]);
    }
  }
  __device__ __forceinline__ void started(bool keep) {
    wgmma_wait<1>();
    if (previous >= 0 && !keep) release(previous);
    previous = ring.stage;
    ring.advance();
  }
};

#endif  // HOPPER_CODE

}  // namespace primitives
