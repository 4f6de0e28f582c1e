// The operator's *exchange*: softmax(x W) in one launch, for any shape. It has the idea of lesson
// 9's *fused specialized*, with tiles of many sizes and for rows that start anywhere. Its product
// is that of operators/product/product.cuh, transposed.
//
// To finish its part of a row a block needs the row's maximum and sum, which are known only when
// all parts of the row have been multiplied. In *online tiles* each block therefore writes its
// logits, and they are read again. Here a row's blocks run at the same time. Each keeps its logits
// in registers, posts the maximum and the sum of its part in memory, waits until the others have,
// and writes probabilities, once. If one block has a whole row, it waits for nobody.
//
// Two things may be in the way:
//   - A row has more blocks than can run at a time, or so many that to write logits should take
//     less time. Then the blocks write logits, and a second kernel finishes the rows: half fused.
//   - Few rows or few columns are few tiles. For example, 2048 x 300 logits are 24 tiles of 256 x
//     128, and most multiprocessors would have nothing to do. Then there is split-K: D is cut into
//     slices, a block has one slice of a tile, and the softmax adds up the slices as it reads them.
//
// The product is transposed (transposed_product.cuh), as in the operator's *cluster* (cluster.cuh).
// There the warps load W from memory to registers themselves, and wait for it. Here W comes through
// the stages as well, and from there to registers, a step ahead (Reader::take_ahead).
#pragma once

#include <algorithm>
#include <cuda/atomic>

#include "operators/product/product.cuh"
#include "operators/softmax/hopper/transposed_product.cuh"
#include "operators/softmax/layer.cuh"
#include "primitives/spin.cuh"

namespace operators::softmax {

using namespace primitives;

// ---- Factors and tiles --------------------------------------------------------------------------

// A tile of a W whose rows start anywhere: 32 rows of kColumns columns. The copy engine needs rows
// that start at multiples of 16 bytes. So W is described as four matrices. Matrix i has the rows i,
// i + 4, i + 8 and so on, each from the last multiple of 16 bytes before it on.
//
// A copy brings a box of 8 rows of one matrix, with the tile's columns and some more. Lanes read
// four neighbouring rows of W at a time, one of each box. The box of matrix i starts 8 * i columns
// early, so that these rows lie in different banks. (That is so nearly: because of the multiples of
// 16 bytes up to 3 columns more are early.) docs/softmax.md has an example, "Rows that are not
// aligned".
template <int kColumns>
struct LooseTileOfW {
  static constexpr int kBoxes = 4, kBoxRows = kLine<float> / kBoxes, kPitch = kColumns + 28;
  float boxes[kBoxes][kBoxRows * kPitch];
#if HOPPER_CODE
  // The column, of 64, of element i of a thread's sum: the one that wgmma gives it. So 8 lanes read
  // neighbours, and in the end write neighbours.
  __device__ static int row(int i) { return Sum<8>::row(i); }
  // Loads a thread's fragments of 64 columns, from `col` on. In the tile, row 0 of W is row number
  // `before`.
  __device__ LeftFragments<float> load_fragments(int col, int before, int C) const {
    const int t = threadIdx.x % 4, start = ((t - before) & 3) * (C % 4) % 4;
    const float* from = boxes[t] + 8 * t + start + col + row(0);
    LeftFragments<float> fragments;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const float *first = from + 2 * slice * kPitch, *second = first + kPitch;
      uint32_t(&to)[4] = fragments.slices[slice];
      to[0] = __float_as_uint(first[0]), to[1] = __float_as_uint(first[8]);
      to[2] = __float_as_uint(second[0]), to[3] = __float_as_uint(second[8]);
    }
    return fragments;
  }
#endif
};

// Sums of kRows rows of x with kColumns columns of W, 128 or 192, in steps of 32 along D. A block
// is a producer warpgroup, and two or three consumers of 64 columns each. The kPeers blocks of a
// cluster (1 to 3) have the same rows of x: each fetches some of the boxes, and multicasts them to
// all. kAligned: rows of W start at multiples of 16 bytes. In 3xTF32 the producer's other warps
// split x into two tiles.
template <Math kMath_, int kRows_, int kColumns_, int kPeers_, bool kAligned_>
struct ExchangeTile : product::Warpgroups<kColumns_ / 64> {
  static constexpr Math kMath = kMath_;
  static constexpr int kRows = kRows_, kColumns = kColumns_, kPeers = kPeers_;
  static constexpr bool kAligned = kAligned_, kHighLow = kMath == Math::split;
  static constexpr int kStack = kPeers, kSide = 1, kBlocks = kPeers;
  static constexpr int kBoxRows = ColumnShare<kRows, kPeers>::kCols;  // of x, fetched at a time
  static constexpr int kConsumers = ExchangeTile::Warpgroups::kConsumers;
  using TileOfW =
      std::conditional_t<kAligned, TransposedLeftTile<kColumns>, LooseTileOfW<kColumns>>;
  // A thread has two columns: the second one is so many columns after the first.
  static constexpr int kNext = kAligned ? 1 : 8;
  struct Stage {
    ColumnTile<float, kRows> x[kHighLow ? 2 : 1];  // in 3xTF32 x[0] is `high`, x[1] is `low`
    TileOfW W;
    static constexpr int kLoaded = sizeof(ColumnTile<float, kRows>) + sizeof(TileOfW);
  };
  static constexpr int kStages = std::min<int>(8, (208 << 10) / sizeof(Stage));
  struct Shared {
    Pipeline<Stage, kStages> pipeline;
    Barrier split_done[kStages];  // in 3xTF32: a stage's x has been split
    // Of each warp that multiplies: its columns' maximum or sum, for each row.
    alignas(16) float parts[4 * kConsumers][kRows];
    alignas(16) float rows[kRows];  // what a row's exponentials are relative to; later its factor
  };
};

// W as the copy engine sees it: one matrix, or four (LooseTileOfW).
struct MapsOfW {
  CUtensorMap of[4];
};
template <class Tile>
MapsOfW maps_of(const float* W, int D, int C, bool to_tf32, int64_t stride) {
  MapsOfW maps = {};
  if constexpr (Tile::kAligned) {
    maps.of[0] = tensor_map<float>(W, D, C, 32, to_tf32, stride, Reads::often);
  } else {
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t before = i * C % 4, rows = (D - i + 3) / 4;
      const cuuint64_t extents[] = {static_cast<cuuint64_t>(C + before),
                                    static_cast<cuuint64_t>(rows)};
      const cuuint64_t strides[] = {static_cast<cuuint64_t>(C) * 16};
      const cuuint32_t box[] = {Tile::TileOfW::kPitch, Tile::TileOfW::kBoxRows};
      maps.of[i] = encode_tensor_map(W + i * C - before, 2, extents, strides, box,
                                     CU_TENSOR_MAP_SWIZZLE_NONE, to_tf32, Reads::often);
    }
  }
  return maps;
}

// x (B, D) as the copy engine sees it. It needs rows that start at multiples of 16 bytes. Of
// 2^shift neighbouring rows (1, 2 or 4) row i starts before(i) elements after such a multiple. So x
// is described as 2^shift matrices. Matrix i has the rows i, i + 2^shift and so on, each from that
// multiple on.
//
// Therefore in a tile of matrix i all inputs stand `before` columns further right, and rows of W
// have to stand as many rows lower. The first `before` columns are the end of another row of x, and
// have to become zeros.
struct RowsOfX {
  CUtensorMap of[4] = {};
  int B, D, shift;

  RowsOfX(const float* x, int rows, int inputs, int64_t stride, unsigned box_rows, bool to_tf32)
      : B(rows), D(inputs), shift(shift_of(stride)) {
    for (int i = 0; i < 1 << shift; ++i) {
      if (i >= rows) {  // no such row: the results of this matrix are not written
        of[i] = of[0];
        continue;
      }
      of[i] = tensor_map<float>(x + i * stride - before(i), rows_from(i), D + before(i), box_rows,
                                to_tf32, stride << shift, Reads::often);
    }
  }
  static int shift_of(int64_t stride) { return stride % 4 == 0 ? 0 : stride % 2 == 0 ? 1 : 2; }
  // How many strips there are if `rows` rows are cut into strips of `of_strip` rows, each of one
  // matrix. Strip s is of matrix s % 2^shift.
  static int strips(int rows, int of_strip, int shift) {
    return (rows + (of_strip << shift) - 1) / (of_strip << shift) << shift;
  }
  __host__ __device__ int before(int i) const { return i * (D % 4) % 4; }
  // How many rows the matrix of row `first` has, from that row on.
  __host__ __device__ int rows_from(int first) const {
    return (B - first + (1 << shift) - 1) >> shift;
  }
  __device__ int matrix(int strip) const { return strip & ((1 << shift) - 1); }
  // The block's steps of 32 inputs along D, in a strip of this matrix: all steps, or those of one
  // of gridDim.y slices.
  struct Steps {
    int first, last;
  };
  __device__ Steps steps(int matrix) const {
    const int all = (before(matrix) + D + 31) / 32, slice = blockIdx.y, slices = gridDim.y;
    if (slices == 1) return {0, all};
    return {all * slice / slices, all * (slice + 1) / slices};
  }
};

#if HOPPER_CODE
// Writes zeros over the first `before` elements (at most 3) of each row of a tile of x. `threads`
// threads share the rows; `own` is the caller's number among them.
template <int kRows>
__device__ void blank_before(ColumnTile<float, kRows>& x, int before, int own, int threads) {
  for (int row = own; row < kRows; row += threads) {
    for (int i = 0; i < before; ++i) x.elements[row * 32 + row % 8 * 4 + i] = 0;
  }
}
#endif

// ---- What blocks tell each other ----------------------------------------------------------------

// What a block posts for the others: a row's maximum in its tile, and the sum relative to it. Both
// are written and read as one access of 8 bytes. How does a reader know that they are of this
// launch? The sum can spare its last bit. In its place is the turn, which is 1 in the first launch,
// 0 in the second, and so on. Readers read again until it is this launch's turn. So no counter is
// needed, and no release or acquire: all that a reader wants is in this one access.
using Posted = unsigned long long;

// The memory for what blocks tell each other. It is zero before the first launch, and a launch
// leaves it ready for the next one. Only one launch may use it at a time: two streams need one of
// these each.
struct Exchange {
  Posted* posted;   // (strips of kRows rows, tiles of kColumns classes, kRows)
  unsigned* turns;  // of each block: whether its last launch was even or odd
};

// The tile scheduler: which tiles a block has, and in which order. A *place* is a tile of a strip
// of kRows rows. Block b has the places b, b + gridDim.x and so on. Blocks that wait for one
// another need all tiles of a strip at the same time: then `together` is 1. Otherwise they go
// through a band of `together` strips, about 2048 rows, tile after tile. So blocks that run at the
// same time share what they read of W as well as of x. (With 1024 x 4096 x 50257, strip after
// strip, all of W would come from memory once for each of four strips.) The kPeers blocks of a
// cluster have neighbouring tiles.
struct Places {
  int strips, tiles, together;

#if HOPPER_CODE
  template <int kPeers>
  __device__ int2 strip_and_tile(int i) const {
    const int of_band = together * tiles, band = i / of_band, cluster = i % of_band / kPeers;
    const int here = min(together, strips - band * together);
    return {band * together + cluster % here, cluster / here * kPeers + i % kPeers};
  }
#endif
};

#if HOPPER_CODE
// e^value. In TF32, whose operands have 10 bits, the hardware's 2^x is good enough. It is off by 2
// units in the last place at most. The product value * log2(e) is rounded, too. That makes the
// result wrong by another unit or so for each unit of |value|.
template <Math kMath>
__device__ float exp_of(float value) {
  return kMath == Math::tf32 ? exp2_approximate(value * 1.44269504f) : expf(value);
}

__device__ inline Posted post(MaxSum part, unsigned turn) {
  return static_cast<Posted>((__float_as_uint(part.sum) & ~1u) | turn) << 32 |
         __float_as_uint(part.largest);
}
__device__ inline bool is_posted(Posted part, unsigned turn) { return (part >> 32 & 1) == turn; }
__device__ inline MaxSum part_of(Posted posted) {
  return {__uint_as_float(static_cast<unsigned>(posted)),
          __uint_as_float(static_cast<unsigned>(posted >> 32) & ~1u)};
}

// A thread calls this for a row. It has `own`, the maximum and the sum of its tile's part, and
// posts them for other blocks. It reads those of all tiles (the first tile's are at `of_tiles`), 16
// at a time, and merges them.
template <class Tile>
__device__ MaxSum exchange_row(MaxSum own, Posted* of_tiles, int tile, int tiles, unsigned turn) {
  const auto posted_at = [&](int i) {
    return cuda::atomic_ref<Posted, cuda::thread_scope_device>(
        of_tiles[static_cast<size_t>(i) * Tile::kRows]);
  };
  posted_at(tile).store(post(own, turn), cuda::memory_order_relaxed);
  MaxSum all = {minus_infinity(), 0};
  constexpr int kAtOnce = 16;
  for (int first = 0; first < tiles; first += kAtOnce) {
    Posted posted[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      posted[i] = post({minus_infinity(), 0}, turn);
      if (first + i < tiles) posted[i] = posted_at(first + i).load(cuda::memory_order_relaxed);
    }
    float largest = all.largest;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const Spin spin("another tile's maximum and sum of a row");
      while (!is_posted(posted[i], turn)) {
        posted[i] = posted_at(first + i).load(cuda::memory_order_relaxed);
        spin.again();
      }
      largest = fmaxf(largest, part_of(posted[i]).largest);
    }
    all = {largest, all.sum * rebase(all.largest, largest)};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const MaxSum part = part_of(posted[i]);
      all.sum += part.sum * exp_of<Tile::kMath>(part.largest - base_of(largest));
    }
  }
  return all;
}

// The 8 lanes with the same lane % 4 have kCount values each. The eight values number i become one:
// their maximum, or their sum. (The field calls this a reduce-scatter: each lane ends with a part
// of the results.)
//
// Each time a lane keeps one half of its values and gives the other half to a partner. After three
// times it has kCount / 8 of them. first_combined() says with which values a lane ends: lane / 4
// with its 3 bits reversed, times kCount / 8. Lesson 9 has a table.
template <int kHalf, int kCount, typename Op>
__device__ inline void combine_halves(float (&v)[kCount], Op op, int lanes) {
  const bool upper = threadIdx.x & lanes;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float send = upper ? v[i] : v[i + kHalf], keep = upper ? v[i + kHalf] : v[i];
    v[i] = op(keep, __shfl_xor_sync(kAllLanes, send, lanes));
  }
}
template <int kCount>
__device__ inline int first_combined() {
  const int g = threadIdx.x % 32 / 4;
  return ((g & 1) * 4 + (g & 2) + (g >> 2)) * (kCount / 8);
}
template <int kCount, typename Op>
__device__ inline void combine_quads(float (&v)[kCount], Op op) {
  combine_halves<kCount / 2>(v, op, 4);
  combine_halves<kCount / 4>(v, op, 8);
  combine_halves<kCount / 8>(v, op, 16);
}
#endif

// ---- The product's Work -------------------------------------------------------------------------

// The product's Work (operators/product/product.cuh): what is copied, multiplied and stored. With
// split-K gridDim.y blocks have the same places, and a slice of D each.
template <class Tile_>
struct ExchangedSoftmax {
  using Tile = Tile_;
  using Stage = typename Tile::Stage;
  using Shared = typename Tile::Shared;
  using Sum = primitives::Sum<Tile::kRows>;  // its columns are rows of x: it is transposed
  static constexpr int kRows = Tile::kRows, kColumns = Tile::kColumns;
  static constexpr int kProducerRegisters = kRows == 256 ? 40 : 56;
  static constexpr int kConsumerRegisters =  // all that are left
      kColumns == 192 ? 152
      : kRows == 256  ? 232
                      : 224;
  static constexpr bool kFetchesFirst = false;
  RowsOfX x;
  MapsOfW W;
  int C;
  Places places;
  Exchange exchange;
  softmax::Results output;

#if HOPPER_CODE
  using Grid = BlockGrid<Tile::kStack, Tile::kSide>;
  static constexpr int kMultiplying = 128 * Tile::kConsumers, kSplitting = 96;  // threads

  // The block's places, one after another.
  class Walk {
   public:
    int strip = 0, tile = 0;

    __device__ explicit Walk(const ExchangedSoftmax& of) : work(of) {}
    __device__ bool next() {
      if (i >= work.places.strips * work.places.tiles) return false;
      const int2 at = work.places.template strip_and_tile<Tile::kPeers>(i);
      strip = at.x, tile = at.y;
      i += gridDim.x;
      return true;
    }
    __device__ int matrix() const { return work.x.matrix(strip); }
    // How many columns further right the strip's inputs stand in their tiles.
    __device__ int before() const { return work.x.before(matrix()); }
    __device__ RowsOfX::Steps steps() const { return work.x.steps(matrix()); }

   private:
    const ExchangedSoftmax& work;
    int i = blockIdx.x;
  };

  __device__ void prepare(Shared& shared) const {
    for (Barrier& barrier : shared.split_done) barrier_init(&barrier, kSplitting);
    start_next_kernel();
  }

  // Starts the copies: boxes of x, which all blocks of the cluster have in common, and boxes of W.
  class Copies {
   public:
    __device__ Copies(const ExchangedSoftmax& of, const Grid& blocks)
        : work(of), grid(blocks), walk(of) {}
    __device__ bool next() {
      k += kLine<float>;
      if (k >= k_end) {
        if (!walk.next()) return false;
        const RowsOfX::Steps steps = walk.steps();
        k = steps.first * kLine<float>, k_end = steps.last * kLine<float>;
        before = walk.before();
      }
      return true;
    }
    __device__ void load(Stage& stage, Barrier* arrived) const {
      const int row = (walk.strip >> work.x.shift) * kRows, col = walk.tile * kColumns;
      grid.load(stage.x[0], &work.x.of[walk.matrix()], row, k, arrived);
      if constexpr (Tile::kAligned) {
        grid.load(stage.W, &work.W.of[0], col, k - before, arrived);
      } else {
        for (int i = 0; i < Tile::TileOfW::kBoxes; ++i) {  // from row k + i - before of W on
          const int fourth = k / 4 - (i < before);
          tensor_load(stage.W.boxes[i], &work.W.of[(i - before) & 3], fourth, col - 8 * i, arrived);
        }
      }
    }
    __device__ void end() const {}

   private:
    const ExchangedSoftmax& work;
    const Grid& grid;
    Walk walk;
    int k = 0, k_end = 0, before = 0;
  };

  // In 3xTF32 the producer's other warps write zeros before the rows of x, and split a stage's x
  // into two tiles, in whatever order x lies there.
  __device__ void help(Shared& shared, const Grid& grid) const requires Tile::kHighLow {
    const int own = threadIdx.x - 32;
    Reader reader(shared.pipeline, grid);
    for (Walk walk(*this); walk.next();) {
      const int before = walk.before();
      const RowsOfX::Steps steps = walk.steps();
      for (int step = steps.first; step < steps.last; ++step) {
        Stage& stage = reader.wait();
        if (step == 0 && before > 0) {
          blank_before(stage.x[0], before, own, kSplitting);
          named_barrier(2, kSplitting);
        }
        split_all(stage.x[0].elements, stage.x[1].elements, kRows * kLine<float>, own, kSplitting);
        shared_fence();
        reader.done_with(shared.split_done);
        reader.next();
      }
    }
  }

  // A warpgroup multiplies its 64 columns of W, and has as many columns of each row of the result.
  class Results {
   public:
    __device__ Results(const ExchangedSoftmax& of, Shared& memory, const Grid&, int number)
        : work(of),
          shared(memory),
          consumer(number),
          walk(of),
          turn(of.exchange.turns[blockIdx.x] ^ 1) {
      if (own < kRows) shared.rows[own] = 1;  // the factor of logits
    }
    __device__ bool next() { return walk.next(); }

    template <class Reader>
    __device__ void multiply(Sum& sum, Reader& reader) const {
      const int before = walk.before();
      const RowsOfX::Steps steps = walk.steps();
      if constexpr (Tile::kHighLow) {
        sum = {};
      } else if (steps.first == 0 && before > 0) {
        blank_before(reader.wait().x[0], before, own, kMultiplying);
        shared_fence();
        named_barrier(1, kMultiplying);
      }
      const auto load = [&](LeftFragments<float>& w, const Stage& stage) {
        if constexpr (Tile::kAligned) {
          w = stage.W.load_fragments(64 * consumer);
        } else {
          w = stage.W.load_fragments(64 * consumer, before, work.C);
        }
      };
      const auto start = [&](const LeftFragments<float>& w, const Stage& stage, bool add) {
        if constexpr (Tile::kHighLow) {
          reader.wait_for(shared.split_done);
          add_split(sum, w, stage.x[0], stage.x[1]);
        } else {  // the copy engine has rounded both
          sum.start_product(w, stage.x[0].columns(), add);
        }
      };
      reader.template take_ahead<LeftFragments<float>>(steps.last - steps.first, load, start);
    }

    __device__ void store(Sum& sum) const {
      const RowsOfX& x = work.x;
      const int matrix = walk.matrix(), row0 = (walk.strip - matrix) * kRows + matrix;
      const int tile = walk.tile;
      const int col = tile * kColumns + 64 * consumer + Tile::TileOfW::row(0);
      const int tiles = work.places.tiles, left = work.C - col;
      if (work.output.epilogue == Epilogue::softmax) {
        const MaxSum row = exponentials(sum, left);
        if (own < kRows) {
          Posted* of_tiles =
              work.exchange.posted + static_cast<size_t>(walk.strip) * tiles * kRows + own;
          const MaxSum all =
              tiles == 1 ? row : exchange_row<Tile>(row, of_tiles, tile, tiles, turn);
          shared.rows[own] = rebase(row.largest, all.largest) / all.sum;
        }
      }
      named_barrier(1, kMultiplying);
      float* out = work.output.out + (size_t{blockIdx.y} * x.B + row0) * work.C + col;
      write(sum, out, int64_t{work.C} << x.shift, x.rows_from(row0), left);
      if (work.output.epilogue == Epilogue::parts) {
        const MaxSum row = exponentials(sum, left);
        if (own < min(kRows, x.rows_from(row0))) {
          work.output.parts[tile + int64_t{tiles} * (row0 + (own << x.shift))] = {row.largest,
                                                                                  row.sum};
        }
        if (own < kRows) shared.rows[own] = 1;  // for the next place's logits
      }
    }

    __device__ void end() const {
      named_barrier(1, kMultiplying);  // all have read the turn
      if (own == 0 && work.output.epilogue == Epilogue::softmax) {
        work.exchange.turns[blockIdx.x] = turn;
      }
    }

   private:
    const ExchangedSoftmax& work;
    Shared& shared;
    const int consumer, own = threadIdx.x - 128;
    Walk walk;
    const unsigned turn;

    // Turns the block's logits into exponentials relative to the row's maximum in this tile. Of the
    // threads that multiply, thread `own` < kRows returns the maximum and the sum of row `own`.
    // From the thread's first column on a row has `left` columns left.
    __device__ MaxSum exponentials(Sum& sum, int left) const {
      constexpr Math kMath = Tile::kMath;
      constexpr int kPairs = kRows / 4,
                    kLeft = kPairs / 8;  // a pair: its two columns of a row
      // The first element of a pair. The second one is 2 elements further.
      const auto element = [](int pair) { return pair / 2 * 4 + pair % 2; };
      float of_row[kPairs];
      const auto share = [&] {
#pragma unroll
        for (int i = 0; i < kLeft; ++i) {
          const int pair = first_combined<kPairs>() + i;
          shared.parts[own / 32][Sum::col(element(pair))] = of_row[i];
        }
      };
      if (left <= Tile::kNext) {
#pragma unroll
        for (int i = 0; i < Sum::size(); ++i) {
          if (left < 1 || i % 4 >= 2) sum.element(i) = minus_infinity();
        }
      }
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        of_row[i] = fmaxf(sum.element(element(i)), sum.element(element(i) + 2));
      }
      combine_quads(of_row, [](float a, float b) { return fmaxf(a, b); });
      share();
      named_barrier(1, kMultiplying);
      MaxSum row = {minus_infinity(), 0};
      if (own < kRows) {
#pragma unroll
        for (const auto& part : shared.parts) row.largest = fmaxf(row.largest, part[own]);
        shared.rows[own] = base_of(row.largest);
      }
      named_barrier(1, kMultiplying);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float base = shared.rows[Sum::col(element(i))];
        float &a = sum.element(element(i)), &b = sum.element(element(i) + 2);
        a = exp_of<kMath>(a - base), b = exp_of<kMath>(b - base);
        of_row[i] = a + b;
      }
      combine_quads(of_row, [](float a, float b) { return a + b; });
      share();
      named_barrier(1, kMultiplying);
      if (own < kRows) {
#pragma unroll
        for (const auto& part : shared.parts) row.sum += part[own];
      }
      return row;
    }

    // Writes the sums, each times its row's factor (shared.rows). `out` is where the tile's first
    // row has the thread's first column. From there on the matrix has `rows` rows, `stride`
    // elements apart, and a row has `left` columns left.
    __device__ void write(const Sum& sum, float* out, int64_t stride, int rows, int left) const {
      const auto each = [&](auto put) {
        float* to = out + Sum::col(0) * stride;
#pragma unroll
        for (int i = 0; i < Sum::size(); i += 4, to += 8 * stride) {
          const int row = Sum::col(i);
          const float2 of = *reinterpret_cast<const float2*>(&shared.rows[row]);
          put(row, to, float2{sum.element(i) * of.x, sum.element(i + 2) * of.x});
          put(row + 1, to + stride, float2{sum.element(i + 1) * of.y, sum.element(i + 3) * of.y});
        }
      };
      if (left <= 0) return;
      // If rows of W are aligned in TF32, those of `out` are, too. In 3xTF32 they may be aligned
      // copies.
      constexpr bool kPairs = Tile::kAligned && Tile::kMath == Math::tf32;
      if (!kPairs && (!Tile::kAligned || work.C % 2 != 0)) {
        each([&](int row, float* to, float2 pair) {
          if (row < rows) to[0] = pair.x;
          if (row < rows && left > Tile::kNext) to[Tile::kNext] = pair.y;
        });
      } else if (rows < kRows) {
        each([&](int row, float* to, float2 pair) {
          if (row < rows) *reinterpret_cast<float2*>(to) = pair;
        });
      } else {
        each([](int, float* to, float2 pair) { *reinterpret_cast<float2*>(to) = pair; });
      }
    }
  };
#endif
};

}  // namespace operators::softmax
