// What the kernel of operators/gating/resident.cuh is made of: the weights that stay in a block's
// shared memory, the two ways in which rows of x come there, the three in which results leave, and
// what fits beside what.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>

#include "operators/estimate.h"
#include "operators/gating/gate.cuh"
#include "operators/gating/gating.h"
#include "primitives/approximate.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/launch.h"

namespace operators::gating {

using namespace primitives;

#if HOPPER_CODE
/// Makes a sigmoid of the gates in the left half of a sum's columns, the values in the right one.
template <int kCols>
__device__ __forceinline__ void make_sigmoids(Gate gate, Sum<kCols>& sum) {
  with_gate(gate, [&]<Gate kGate>() {
#pragma unroll
    for (int i = 0; i < kCols / 4; ++i) {
      make_sigmoid<kGate>(sum.elements[i], sum.elements[kCols / 4 + i]);
    }
  });
}

// ---- the weights --------------------------------------------------------------------------------

/// A block's columns of both weights in shared memory, in panels of kWidth columns of out. In each
/// panel W1's columns and then W2's are one factor, so that one wgmma computes gates and values,
/// and a thread gets both of an element. They lie in boxes of 64 columns by `rows` of k: the
/// weights' rows, in the order of x's weights_row(), zeros up to a multiple of 16, and 16 more, of
/// which the first has the biases.
template <typename T, int kWidth>
struct ResidentWeights {
  static constexpr int kBoxes = (2 * kWidth + kBoxCols - 1) / kBoxCols;
  T* elements;
  int rows;

  /// All of kThreads threads copy `panels` panels, whose first column is col0 of out, 8 columns at
  /// a time; this is number `own`.
  template <int kThreads, class Rows>
  __device__ void load(const LayerOperands<T>& in, const Rows& x, int col0, int panels,
                       int own) const {
    constexpr int kPieces = 2 * kWidth / 8, kRows = kThreads / kPieces;
    const int piece = own % kPieces, first = own / kPieces < kRows ? own / kPieces : rows;
    const bool gate = 8 * piece < kWidth;
    const T* const biases = gate ? in.b1 : in.b2;
    for (int panel = 0; panel < panels; ++panel) {
      T* const box = elements + (panel * kBoxes + piece / 8) * rows * kBoxCols;
      const int col = col0 + panel * kWidth + piece * 8 % kWidth;
#pragma unroll 2
      for (int place = first; place < rows; place += kRows) {
        const bool bias = place == rows - 16 && biases != nullptr;
        const int k = place < rows - 16 ? x.weights_row(place, rows - 16) : in.K;
        const T* from =
            bias ? biases + col : (gate ? in.W1 : in.W2) + static_cast<size_t>(k) * in.H + col;
        T* to = box + swizzled(place, piece % 8);
        const int there = bias || k < in.K ? in.H - col : 0;
        if (in.H % 8 == 0) {
          copy_async<16>(to, from, there > 0);
        } else {
          alignas(16) T eight[8];
#pragma unroll
          for (int j = 0; j < 8; ++j) eight[j] = j < there ? from[j] : T();
          *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(eight);
        }
      }
    }
    copy_async_commit();
    copy_async_wait<0>();
    shared_fence();
  }
  /// A panel, for wgmma.
  __device__ AcrossK<T> panel(int number) const {
    return across_k(elements + number * kBoxes * rows * kBoxCols, rows);
  }
  /// Starts a sum with the biases: with the product of the last 16 rows and of a left factor that
  /// has ones in its first column, zeros in the others, and is in registers. So no thread loads or
  /// adds a bias.
  __device__ void start(Sum<2 * kWidth>& sum, int number) const {
    constexpr uint32_t kOne = std::is_same_v<T, half> ? 0x3c00 : 0x3f80;
    const uint32_t one_zero = Sum<8>::col(0) == 0 ? kOne : 0;
    const LeftFragments<T, 1> ones = {{{one_zero, one_zero, 0, 0}}};
    sum.template start_product<1>(ones, panel(number).from(rows - 16), false);
  }
};

/// Starts sum += x W, for `count` slices of 16 columns of x and rows of W, in groups of 4. `left`
/// has slices<kCount>(), the first of x for wgmma, and advance(), to the next 4.
template <int kColumns, class Left, typename T>
__device__ __forceinline__ void start_groups(Sum<kColumns>& sum, Left left, AcrossK<T> W,
                                             int count) {
  const auto start = [&]<int kCount>() {
    sum.template start_product<kCount>(left.template slices<kCount>(), W, true);
    if constexpr (Left::kInRegisters) wgmma_wait<0>();  // the next slices need these registers
  };
#pragma unroll 1  // otherwise the compiler makes 2.4 KB more of it
  for (; count > 0; count -= 4) {
    if (count >= 4) {
      start.template operator()<4>();
    } else if (count == 3) {
      start.template operator()<3>();
    } else {
      count == 2 ? start.template operator()<2>() : start.template operator()<1>();
    }
    left.advance(), W = W.from(64);
  }
}
#endif

// ---- x ------------------------------------------------------------------------------------------

/// x if its rows are multiples of 16 bytes: boxes of 64 rows by 64 columns, which the copy engine
/// brings, zeros beyond M or K, and wgmma reads. A stage has `stage_boxes` of them.
///
/// kAnyGate: the kernel has the gate that it gets as an argument, not a sigmoid. What that needs
/// would take a layer with a sigmoid some per cent of its time.
template <typename T, bool kAnyGate_>
struct BoxedRows {
  using Element = T;
  static constexpr bool kAnyGate = kAnyGate_;
  using Tile = LeftTile<T, 64>;
  static constexpr int kSliceCycles = 0;  // for a slice of a tile, beside the product
  CUtensorMap map = {};
  int boxes, stage_boxes, stages, slices;  ///< of a tile: boxes, stages, slices of 16 columns

  BoxedRows(const GatingShape& shape, int most_boxes)
      : boxes(static_cast<int>(shape.channels + kStepK - 1) / kStepK),
        stage_boxes(std::min(most_boxes, boxes)),
        stages((boxes + stage_boxes - 1) / stage_boxes),
        slices(static_cast<int>(shape.channels + 15) / 16) {}
  void are_of(const T* x, const GatingShape& shape) {
    map = tensor_map<T>(x, shape.rows, shape.channels, 64);
  }
  static int most_boxes(const GatingShape& shape) { return shape.channels > kStepK ? 2 : 1; }
  int stage_bytes() const { return stage_boxes * static_cast<int>(sizeof(Tile)); }
  __device__ int weights_row(int place, int) const { return place; }
  /// If x were fetched more often, lesson 3's product would be faster.
  static int64_t most_fetches(const GatingShape& shape) {
    return 1 + shape.hidden / shape.channels;
  }

#if HOPPER_CODE
  /// Bytes of stage number `stage` of the tile of 64 rows from `row` on, and their copies.
  __device__ int bytes(int, int stage) const {
    return min(stage_boxes, boxes - stage * stage_boxes) * static_cast<int>(sizeof(Tile));
  }
  __device__ void load(char* to, int row, int stage, Barrier* arrived) const {
    const int first = stage * stage_boxes, count = min(stage_boxes, boxes - first);
    for (int i = 0; i < count; ++i) {
      tensor_load(to + i * sizeof(Tile), &map, row, kStepK * (first + i), arrived);
    }
  }
  /// Starts to add the product of that stage, which is at `from`, by a panel of the weights.
  template <int kColumns>
  __device__ __forceinline__ void start_product(Sum<kColumns>& sum, const char* from, int stage,
                                                AcrossK<T> W) const {
    const int first = kSlices * stage_boxes * stage;
    const Tile* tiles = reinterpret_cast<const Tile*>(from);
    start_groups(sum, Left{tiles->rows(0)}, W.from(16 * first),
                 min(kSlices * stage_boxes, slices - first));
  }

 private:
  struct Left {
    static constexpr bool kInRegisters = false;
    AlongK<T> tile;
    template <int kCount>
    __device__ const AlongK<T>& slices() const {
      return tile;
    }
    __device__ void advance() { tile = tile.template next_tile<64>(); }
  };
#endif
};

/// x with rows of any length. The copy engine moves boxes of a matrix only if its rows are
/// multiples of 16 bytes. But 64 rows one after the other are one piece of memory, which starts at
/// a multiple of 128 bytes, whatever the length of a row. So a tile of x comes as that piece, in
/// one stage. wgmma cannot read such rows from shared memory: it takes them from registers. The
/// last row's last slice ends up to 32 bytes behind the piece: what a stage has there is read, to
/// become zeros, and must not be what a copy writes meanwhile.
struct LooseRows {
  using Element = half;
  static constexpr bool kAnyGate = false;
  static constexpr int stages = 1, kBehind = 32, kSliceCycles = 74;
  const half* x = nullptr;
  int M, K;

  LooseRows(const GatingShape& shape, int)
      : M(static_cast<int>(shape.rows)), K(static_cast<int>(shape.channels)) {}
  void are_of(const half* from, const GatingShape&) { x = from; }
  static int most_boxes(const GatingShape&) { return 1; }
  int stage_bytes() const { return 128 * K + kBehind; }
  /// Which row of W lies at `place` of `all` places, a multiple of 16. If K is odd, thread t of 4
  /// takes 8 neighbours of a row of x for two slices (4, if one slice is left): 5 words, where 4
  /// separate pairs would be 8. wgmma multiplies the thread's element e of pair m of slice j by
  /// place 16 j + 8 m + 2 t + e: there that neighbour's row of W lies.
  __device__ int weights_row(int place, int all) const {
    if (K % 2 == 0) return place;
    const int slice = place / 16, slices = (slice | 1) < all / 16 ? 2 : 1;
    const int j = slice % slices, m = place % 16 / 8, t = place % 8 / 2, e = place % 2;
    return 16 * (slice - j) + 4 * slices * t + 4 * j + 2 * m + e;
  }
  /// For lesson 3's product x has to be copied first.
  static int64_t most_fetches(const GatingShape& shape) {
    return 1 + 4 * std::max<int64_t>(1, shape.hidden / shape.channels);
  }

#if HOPPER_CODE
  __device__ int bytes(int row, int) const { return min(64, M - row) * K * 2; }
  __device__ void load(char* to, int row, int stage, Barrier* arrived) const {
    bulk_load(to, x + static_cast<size_t>(row) * K, bytes(row, stage), arrived);
  }
  template <int kColumns>
  __device__ __forceinline__ void start_product(Sum<kColumns>& sum, const char* from, int,
                                                AcrossK<half> W) const {
    const auto start = [&](auto left) { start_groups(sum, left, W, (K + 15) / 16); };
    K % 2 == 0 ? start(Left<false>(from, K)) : start(Left<true>(from, K));
  }

 private:
  /// A thread's fragments, two neighbours of a row in each register. kOdd: K is odd, every other
  /// row starts in the middle of 4 bytes, and there two neighbours come from two words.
  template <bool kOdd>
  struct Left {
    static constexpr bool kInRegisters = true;
    const uint32_t* rows[2];  ///< the words that have the first elements of its two rows
    int shift;                ///< bits of the first word that are not the row's
    int left;                 ///< elements of a row from there on

    __device__ Left(const char* tile, int K) {
      const unsigned first = Sum<64>::row(0) * K, second = first + 8 * K;
      rows[0] = reinterpret_cast<const uint32_t*>(tile) + first / 2;
      rows[1] = reinterpret_cast<const uint32_t*>(tile) + second / 2;
      shift = first % 2 * 16;
      left = K;
    }
    /// By 4 slices.
    __device__ void advance() { rows[0] += 32, rows[1] += 32, left -= 64; }

    template <int kCount>
    __device__ LeftFragments<half, kCount> slices() const {
      LeftFragments<half, kCount> result;
#pragma unroll
      for (int at = 0; at + 2 <= kCount; at += 2) take<2>(result, at);
      if constexpr (kCount % 2 == 1) take<1>(result, kCount - 1);
      return result;
    }

   private:
    /// Takes `kSlices` slices from number `at` on. If they are the last, what is beyond K becomes
    /// zeros.
    template <int kSlices, int kCount>
    __device__ void take(LeftFragments<half, kCount>& to, int at) const {
      constexpr int kPairs = 2 * kSlices, kStep = kOdd ? 1 : 4;  // words to a thread's next pair
      const int own = threadIdx.x % 4 * (kOdd ? kPairs : 1), there = left - 16 * at - 2 * own;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t* from = rows[r] + 8 * at + own;
        uint32_t words[kPairs + 1];
#pragma unroll
        for (int i = 0; i < kPairs + kOdd; ++i) words[i] = from[kStep * i];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          uint32_t pair = kOdd ? __funnelshift_r(words[i], words[i + 1], shift) : words[i];
          if (at + kSlices == kCount) {
            const int last = there - 2 * kStep * i;
            pair &= last > 1 ? 0xffffffff : last == 1 ? 0xffff : 0;
          }
          to.slices[at + i / 2][r + 2 * (i % 2)] = pair;
        }
      }
    }
  };
#endif
};

// ---- what fits beside what ----------------------------------------------------------------------

/// out as the copy engine is told of it, once for each panel: boxes of a warp's 16 rows by 64
/// columns, of a matrix that ends where the panel ends, so that no box overwrites the next panel.
struct OutMaps {
  static constexpr int kMost = 16;
  CUtensorMap of[kMost] = {};

  /// For all panels of all blocks, of which the last may have none of out's columns.
  template <typename T>
  void are_of(const T* out, const GatingShape& shape, int panels, int width) {
    for (int panel = 0; panel < panels; ++panel) {
      const int64_t end = std::min<int64_t>(shape.hidden, (panel + 1) * width);
      of[panel] = tensor_map<T>(out, shape.rows, end, 16, false, shape.hidden);
    }
  }
};

/// How results leave. `boxes`: a panel at a time, as boxes of the copy engine, if H is a multiple
/// of 8 and has at most 16 panels. `rows`: all panels, put beside each other, are whole rows of
/// out, one piece of memory, which the copy engine takes as such. `panels` (the program prints "out
/// in parts"): a panel at a time, by threads, for any H, since whole rows need room until all their
/// panels are there.
enum class Out { boxes, rows, panels };

/// How a block is divided: a sum is `width` columns of out, and has `consumers` warpgroups beside
/// one that copies. `team` of them share a tile of x and divide its panels among them. `sharers`
/// consumers have a room for results. A slice of 16 columns of x costs `slice_cycles` beside the
/// product.
struct PlanKind {
  int width, consumers, team;
  Out out;
  int slice_cycles;

  constexpr int teams() const { return consumers / team; }
  constexpr int sharers() const { return out == Out::rows ? team : 1; }
  constexpr int rooms() const { return consumers / sharers(); }
  constexpr int boxes() const { return (width + kBoxCols - 1) / kBoxCols; }  // of a panel of out
};

/// What a block has in shared memory: `panels` panels of the weights, room for results (each
/// consumer's, or each team's whole rows), and `stages` stages of x for each team. There are no
/// stages if there is no room.
struct ResidentSizes {
  static constexpr int kMostStages = 16;
  int rows;    ///< of ResidentWeights
  int panels;  ///< of a block
  int pitch;   ///< elements from a row of results to the next; of `panels` on different banks
  int stage_bytes, out_bytes, stages = 0;
  struct Cycles {
    double team, together, waiting;
  } tile_cycles = {};  ///< for 64 rows: a team's; what consumers share; waiting for x

  /// For `blocks` blocks side by side, which have all columns together. A tile of x is
  /// `stages_of_x` stages of so many bytes.
  ResidentSizes(const PlanKind& kind, int stages_of_x, int bytes_of_stage, const GatingShape& shape,
                int blocks, int64_t room)
      : rows(static_cast<int>(shape.channels + 15) / 16 * 16 + 16),
        panels(static_cast<int>((shape.hidden + kind.width * blocks - 1) / (kind.width * blocks))),
        pitch(kind.out == Out::boxes  ? kind.boxes() * kBoxCols
              : kind.out == Out::rows ? static_cast<int>(shape.hidden)
                                      : (kind.width + 7) / 16 * 16 + 8),
        stage_bytes(bytes_of_stage),
        out_bytes((128 * pitch + 1023) / 1024 * 1024) {
    if (shape.rows % 8 != 0 || shape.channels > 1024) return;  // 8 rows: a multiple of 16 bytes
    if (int64_t{panels} * kind.width * (blocks - 1) >= shape.hidden) return;
    if (panels > room / rows) return;  // bytes() would not be an int
    if (panels < kind.team) return;
    if (kind.out == Out::rows && blocks > 1) return;
    if (kind.out == Out::boxes && (shape.hidden % 8 != 0 || panels * blocks > OutMaps::kMost)) {
      return;
    }
    const int64_t each = kind.teams() * static_cast<int64_t>(stage_bytes + 2 * sizeof(Barrier));
    const int64_t most = (room - static_cast<int64_t>(bytes(kind))) / each;
    // A consumer's panels read the same tile. A stage is given back when the next one has come.
    const int slices = rows / 16, own = (panels + kind.team - 1) / kind.team;
    if (most < (own > 1 ? stages_of_x : std::min(2, stages_of_x))) return;
    stages = static_cast<int>(std::min<int64_t>(most, kMostStages));
    // Fitted to shapes drawn at random, each computed in all ways, on an H200. Consumers work side
    // by side, but they share the tensor cores and the unit for ex2 and rcp. The producer fills a
    // team's stages before the next team's. If a tile needs more of them than there are, it waits
    // for that team, and the others wait for it.
    const double panel = 510 +
                         kind.width * (0.79 * slices + 7.4 + (kind.out == Out::panels ? 11 : 0)) +
                         1.0 * kind.slice_cycles * slices;
    tile_cycles = {.team = own * panel + 204,
                   .together = panels * kind.width * (0.72 * slices + 2.7),
                   .waiting = 263.0 * std::max(0, stages_of_x - stages)};
  }
  __host__ __device__ int weight_bytes(int width) const {
    return (2 * width + kBoxCols - 1) / kBoxCols * 128 * rows * panels;
  }
  /// What it should take with `blocks` blocks side by side: each gets its weights, 25 bytes a
  /// cycle, and then rows. Memory brings and takes these, and not all of that is hidden.
  double microseconds(const PlanKind& kind, const GatingShape& shape, int blocks) const {
    const unsigned fit = std::max(1, multiprocessors() / blocks);
    const double rounds = std::max(1.0, 1.0 * blocks / multiprocessors());  // where none fits
    const unsigned tiles = blocks_for(blocks_for(shape.rows, 64), fit);     // of a block
    const auto& [team, together, waiting] = tile_cycles;
    const double work = std::max(blocks_for(tiles, kind.teams()) * team, tiles * together) +
                        tiles * waiting + weight_bytes(kind.width) / 25.0;
    return 4.7 + rounds * work / cycles() + 0.9 * shape.bytes() / memory_rate();
  }
  std::string name(const PlanKind& kind, int blocks) const {
    return "columns of a sum: " + std::to_string(kind.width) +
           "; consumers: " + std::to_string(kind.consumers) +
           (kind.team > 1 ? ", in teams of " + std::to_string(kind.team) : "") + "; out in " +
           (kind.out == Out::boxes  ? "boxes"
            : kind.out == Out::rows ? "rows"
                                    : "parts") +
           "; stages: " + std::to_string(stages) +
           "; blocks side by side: " + std::to_string(blocks);
  }
  size_t bytes(const PlanKind& kind) const {
    return weight_bytes(kind.width) + kind.rooms() * out_bytes +
           kind.teams() * stages * (stage_bytes + 2 * sizeof(Barrier));
  }
};

/// The same for a kernel, which knows the kind when it is compiled.
template <class Rows_, int kWidth_, int kConsumers_, Out kOut_, int kTeam_ = 1>
struct ResidentPlan : ResidentSizes {
  using Rows = Rows_;
  using Element = typename Rows::Element;
  static constexpr PlanKind kKind = {kWidth_, kConsumers_, kTeam_, kOut_, Rows::kSliceCycles};
  static constexpr int kWidth = kWidth_, kConsumers = kConsumers_;
  static constexpr int kTeam = kTeam_, kTeams = kKind.teams(), kSharers = kKind.sharers();
  static_assert(kConsumers % kTeam == 0);
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kRegisters = kConsumers == 4 ? 112 : kConsumers == 3 ? 160 : 240;
  static constexpr Out kOut = kOut_;
  static constexpr int kOutBoxes = kKind.boxes();

  explicit ResidentPlan(const ResidentSizes& sizes) : ResidentSizes(sizes) {}
};

/// Plans by how their results leave.
template <class Rows, int kWidth, int kConsumers, int kTeam = 1>
using InBoxes = ResidentPlan<Rows, kWidth, kConsumers, Out::boxes, kTeam>;
template <class Rows, int kWidth, int kConsumers, int kTeam = 1>
using InRows = ResidentPlan<Rows, kWidth, kConsumers, Out::rows, kTeam>;
template <class Rows, int kWidth, int kConsumers, int kTeam = 1>
using InPanels = ResidentPlan<Rows, kWidth, kConsumers, Out::panels, kTeam>;

#if HOPPER_CODE
/// A pipeline of `count` stages of x, `bytes` bytes each: a team's, or those of all teams.
struct ResidentStages {
  static constexpr int kStages = 0, kTurns = 0;  // the number is known at run time
  char* memory;
  int bytes, count;
  Barrier *full, *empty;

  __device__ int turns() const { return count; }
  __device__ int stages() const { return count; }
  __device__ char* stage(int turn) const { return memory + turn * bytes; }
  /// Of all teams' stages those of a team, which has `own`.
  __device__ ResidentStages of_team(int team, int own) const {
    const int first = team * own;
    return {stage(first), bytes, own, full + first, empty + first};
  }
};

/// Who gives a stage back: each warp of a team for itself.
struct TeamWarps {
  static constexpr int kReleases = 4;  // of a consumer
  __device__ void release(Barrier& empty) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(&empty);
  }
};

/// What a plan has in shared memory, each thing at its place.
template <class Plan>
struct PlanShared {
  using T = typename Plan::Element;
  char* out;
  ResidentWeights<T, Plan::kWidth> W;
  ResidentStages stages;  ///< of all teams

  __device__ PlanShared(char* memory, const Plan& plan)
      : out(memory + plan.weight_bytes(Plan::kWidth)), W{reinterpret_cast<T*>(memory), plan.rows} {
    const int count = Plan::kTeams * plan.stages;
    char* const x = out + Plan::kConsumers / Plan::kSharers * plan.out_bytes;
    Barrier* const barriers = reinterpret_cast<Barrier*>(x + count * plan.stage_bytes);
    stages = {x, plan.stage_bytes, count, barriers, barriers + count};
  }
};

// ---- out ----------------------------------------------------------------------------------------

/// The results of a consumer on their way out. Its warps do not wait for each other: each has 16
/// rows of a tile, which it stores when they are complete. Only whole rows that a team makes come
/// from a warp of each of its consumers, and these warps meet.
template <class Plan>
struct ResidentOut {
  using T = typename Plan::Element;
  static constexpr int kWidth = Plan::kWidth, kHalf = kWidth / 2, kTeam = Plan::kTeam;
  static constexpr int kSharers = Plan::kSharers;  // of a room; so many warps have the same rows
  const Plan& plan;
  const LayerOperands<T>& in;
  const OutMaps& maps;
  char* memory;  // of the room: 64 rows
  int room, col0;
  const int warp = warp_of_block() % 4, first = 16 * warp;         // of a consumer; its first row
  const bool stores = (warp_of_block() - 4) % (4 * kSharers) < 4;  // one of those that meet

  /// A barrier among the warps that have the same rows.
  __device__ void meet() const {
    kSharers == 1 ? __syncwarp() : named_barrier(1 + 4 * room + warp, 32 * kSharers);
  }
  __device__ bool one() const { return stores && elect_one(); }  // thread, which stores

  /// Stores a warp's rows of a panel; its tile starts at row `row` of out. A consumer puts its own
  /// panels, first to last.
  __device__ void put(Sum<2 * kWidth>& sum, int row, int panel) const {
    if constexpr (Plan::Rows::kAnyGate) make_sigmoids(in.gate, sum);
    if constexpr (Plan::kOut == Out::boxes) {
      put_box(sum, row, panel);
    } else if constexpr (Plan::kOut == Out::rows) {
      put_rows(sum, row, panel);
    } else {
      put_panel(sum, row, panel);
    }
  }
  /// Waits until the copy engine has read what was stored.
  __device__ void end() const {
    if (one()) tensor_store_wait_read<0>();
  }

 private:
  __device__ void put_box(const Sum<2 * kWidth>& sum, int row, int panel) const {
    const bool storing = one();
    if (storing) tensor_store_wait_read<0>();
    meet();
    auto* const boxes = reinterpret_cast<Box<T, 64>*>(memory);
#pragma unroll
    for (int b = 0; b < Plan::kOutBoxes; ++b) {
      sum.store(boxes[b], kBoxCols * b, [&](int i) {
        return i < kHalf ? gated(sum.elements[i], sum.elements[kHalf + i]) : 0;
      });
    }
    shared_fence();
    meet();
    if (!storing) return;
#pragma unroll
    for (int b = 0; b < Plan::kOutBoxes; ++b) {
      tensor_store(&maps.of[col0 / kWidth + panel], row + first,
                   col0 + panel * kWidth + kBoxCols * b, boxes[b].row(first));
    }
    tensor_store_commit();
  }

  /// The last panel completes the rows. In shared memory they are as in out, one after the other.
  __device__ void put_rows(const Sum<2 * kWidth>& sum, int row, int panel) const {
    T* const rows = reinterpret_cast<T*>(memory);
    const int col = panel * kWidth, count = min(16, in.M - row - first);
    const bool storing = one();
    if (panel < kTeam) {  // the rows of the tile before have been read
      if (storing) tensor_store_wait_read<0>();
      meet();
    }
    in.H % 2 == 0 ? pack<false>(rows + col, sum, in.H - col)
                  : pack<true>(rows + col, sum, in.H - col);
    if (panel + kTeam < plan.panels) return;
    shared_fence();
    meet();
    if (!storing || count <= 0) return;
    bulk_store(in.out + static_cast<size_t>(row + first) * in.H, rows + first * in.H,
               count * in.H * 2);
    tensor_store_commit();
  }

  __device__ void put_panel(const Sum<2 * kWidth>& sum, int row, int panel) const {
    T* const rows = reinterpret_cast<T*>(memory);
    const int col = col0 + panel * kWidth;
    __syncwarp();  // the panel before has been copied
    pack<false>(rows, sum, kWidth);
    __syncwarp();
    T* const to = in.out + static_cast<int64_t>(row + first) * in.H + col;
    const T* const from = rows + first * plan.pitch;
    const int count = in.M - row - first, cols = in.H - col;
    if (in.H % 4 == 0) return copy<4>(to, from, count, cols);
    in.H % 2 == 0 ? copy<2>(to, from, count, cols) : copy<1>(to, from, count, cols);
  }
  /// Puts a panel's results into rows of plan.pitch; only the first `cols` columns. kOdd: rows
  /// start in the middle of 4 bytes. A thread's columns are 8 apart, in two rows.
  template <bool kOdd>
  __device__ void pack(T* to, const Sum<2 * kWidth>& sum, int cols) const {
    T* const upper = to + Sum<64>::row(0) * plan.pitch + Sum<64>::col(0);
    T* const lower = upper + 8 * plan.pitch;
    const int there = cols - Sum<64>::col(0);
#pragma unroll
    for (int i = 0; i < kHalf; i += 2) {
      const int col = i / 4 * 8;
      T* const own = (i % 4 == 0 ? upper : lower) + col;
      const float left = gated(sum.elements[i], sum.elements[kHalf + i]);
      const float right = gated(sum.elements[i + 1], sum.elements[kHalf + i + 1]);
      if constexpr (kOdd) {
        if (col < there) own[0] = static_cast<T>(left);
        if (col + 1 < there) own[1] = static_cast<T>(right);
      } else {
        if (col < there) *reinterpret_cast<uint32_t*>(own) = pack2<T>(left, right);
      }
    }
  }
  /// Copies a warp's rows of a panel, the first `count` rows and `cols` columns, kPack elements a
  /// lane.
  template <int kPack>
  __device__ void copy(T* to, const T* from, int count, int cols) const {
    using Pack = Neighbours<T, kPack>;
    constexpr int kPieces = kWidth / kPack;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < 16 * kPieces; i += 32) {
      const int r = i / kPieces, c = i % kPieces * kPack;
      if (r >= count || c >= cols) continue;
      *reinterpret_cast<Pack*>(to + static_cast<int64_t>(r) * in.H + c) =
          *reinterpret_cast<const Pack*>(from + r * plan.pitch + c);
    }
  }
};
#endif

}  // namespace operators::gating
