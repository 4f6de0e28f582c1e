// Products in fp16 or bf16 with fp32 sums on compute capability 8.0 and newer: lesson 3's *double
// buffering* (cp.async, ldmatrix, mma.sync) for any shape. What comes of the sums is an epilogue's
// business, and there may be two right factors side by side, as the gated layer has them.
// (tf32_tiles.cuh has the tiles and fragments of products in TF32.)
//
// Beyond the lesson:
//   - Any shape works, if rows begin at multiples of 16 bytes. Rows outside of the matrices are not
//     read, and nothing outside is stored. What shares 16 bytes with the end of a row may be read.
//   - A block goes on from tile to tile: while it multiplies the last steps of one, and stores its
//     results, the first steps of the next one are on their way.
//   - In all steps but the last one whole pieces of 16 bytes are copied, even where a row ends
//     inside a piece. Only in the last step such a piece is copied in part, apart from the others.
//     To compute in each step how much of each piece there is took a tenth of the time.
//   - Where there are few tiles, several blocks share one and take a part of the depth each
//     (a slice). The block that ends last adds up, always in the same order, and nobody waits.
//
// What bounds it, at 4096 x 4096 x 4096 in fp16 on an H200: the tensor cores are busy with mma.sync
// for four fifths of the time. Without the copies it takes an eighth less; without loads of
// fragments as long as with them. The fastest kernel with mma.sync that cuBLASLt has takes as long
// as this one. Where the tensor cores are busier the clock falls, as power is limited. These were
// slower: 96 x 64 sums of a warp, with each fragment there once; a barrier for each stage
// (mbarrier) in place of the block's; an address for each copy, kept in registers; slices of those
// tiles only that are left after full rounds.
#pragma once

#include <algorithm>
#include <cstdint>

#include "primitives/async_copy.cuh"
#include "primitives/fragments.cuh"
#include "primitives/launch.h"
#include "primitives/row_parts.cuh"

namespace operators::product {

using namespace primitives;

/// A block has BM x BN sums. Its kWarpsM x kWarpsN warps have WM x WN of them each. A step takes BK
/// of the depth. kResident blocks are to fit on a multiprocessor. Elements have kBytes bytes.
template <int kBM, int kBN, int kBK, int kRowsOfWarps, int kColsOfWarps, int kStagesAhead,
          int kBlocks, int kBytesOfElement = 2>
struct MmaTile {
  static constexpr int BM = kBM, BN = kBN, BK = kBK, kStages = kStagesAhead, kResident = kBlocks;
  static constexpr int kWarpsM = kRowsOfWarps, kWarpsN = kColsOfWarps;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int WM = BM / kWarpsM, WN = BN / kWarpsN;            // a warp's sums
  static constexpr int kTileA = BM * BK, kStage = kTileA + BK * BN;     // elements
  static constexpr int kBytes = kBytesOfElement, kPiece = 16 / kBytes;  // elements of 16 bytes
  static constexpr int kSharedBytes = kBytes * kStages * kStage;
  static constexpr int kProducts = 1;  // how many mma.sync a product of two fragments takes
  static constexpr int kSumRows = WM / 16, kSumCols = WN / 8;  // of 16 x 8
  static constexpr int kQuads = kSumRows * kSumCols;           // float4 of a thread's sums
  // In so many parts a step's copies are started. More parts keep the tensor cores busier, but each
  // takes some instructions more.
  static constexpr int kParts = BK * kBytes < 128 || kResident > 2 ? 1 : 4;
  static_assert(BK % 32 == 0 && WM % 32 == 0 && WN % 32 == 0);

  /// Where an element of A, and one of B, lies in its tile. Rows of B that are `rows` further down
  /// lie so that turned(place_b(row, col), rows) + rows * BN is their place, if the bits of `rows`
  /// are none of row's.
  __device__ static int place_a(int row, int k) { return swizzle<BK>(row, k); }
  __device__ static int place_b(int k, int col) { return swizzle<BN>(k, col); }
  __device__ static int turned(int place, int rows) { return place ^ 8 * (rows % 8); }
};

/// What a launch multiplies: A (rows, depth) by kFactors right factors of `cols` columns each, of
/// which a tile has equally many. Strides are multiples of 16 bytes.
template <typename T, int kFactors>
struct MmaFactors {
  const T* A;
  const T* B[kFactors];
  int64_t a_stride, b_stride;
  int rows, cols, depth;
};

/// In how many slices the depth is, each of so many steps, and where their sums meet. `items`: of
/// all tiles.
struct MmaSlices {
  int count, steps, items;
  float4* partial;    ///< (tiles, count, quads of a thread, threads)
  unsigned* arrived;  ///< of each tile: see is_last_block()
};

/// What a thread copies of each step, pieces of 16 bytes: in A one of every kRowsA-th row of the
/// tile, in B one of every kRowsB-th.
template <class Tile, typename T, int kFactors>
class MmaCopies {
 public:
  /// Those of a tile of results, from `first` of the depth to `end`.
  __device__ void begin(const MmaFactors<T, kFactors>& of, int row0, int col0, int first, int end) {
    a_from = of.A + (int64_t{row0} + a_row()) * of.a_stride + first + a_k();
    b_from = factor(of) + (int64_t{first} + b_k()) * of.b_stride + col0 + column();
    a_step = of.a_stride * kRowsA;
    b_step = of.b_stride * kRowsB;
    a_rows = of.rows - row0 - a_row();
    b_left = of.cols - col0 - column();
    k_left = end - first;
  }
  /// Whether the last step has been started. Steps beyond it are zeros.
  __device__ bool done() const { return k_left <= 0; }

  /// Starts a part of a step's copies; the last part goes on to the next step. Columns that share a
  /// piece of 16 bytes with the last one are copied, too, unless that is the matrix's last piece:
  /// their results are not stored.
  template <int kPart, int kParts>
  __device__ __forceinline__ void start(T* a_tile) {
    constexpr int kCopiesA = BM / kRowsA, kAll = kCopiesA + BK / kRowsB;
    const bool last = k_left <= BK;
    const bool a_whole = !last || k_left - a_k() <= 0 || k_left - a_k() >= kPiece;
    const bool b_whole = !last || b_left <= 0 || b_left >= kPiece;
    const int rows = a_k() < k_left ? a_rows : 0, depth = b_left > 0 ? k_left - b_k() : 0;
#pragma unroll
    for (int n = kPart * kAll / kParts; n < (kPart + 1) * kAll / kParts; ++n) {
      if (n < kCopiesA) {
        const int i = n * kRowsA;
        copy_async_if(a_whole, a_tile + a_to + i * BK, a_from, i < rows);
        a_from += a_step;
      } else {
        const int i = (n - kCopiesA) * kRowsB;
        copy_async_if(b_whole, a_tile + b_at(i), b_from, i < depth);
        b_from += b_step;
      }
    }
    if (kPart + 1 < kParts) return;
    a_from -= kCopiesA * a_step;
    if (!a_whole || !b_whole) start_partial(a_tile, a_whole, b_whole);
    a_from += BK;
    k_left -= BK;
  }

 private:
  static constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, kPiece = Tile::kPiece;
  static constexpr int kAcrossA = BK / kPiece, kAcrossB = BN / kPiece;  // pieces of a row
  static constexpr int kRowsA = Tile::kThreads / kAcrossA, kRowsB = Tile::kThreads / kAcrossB;
  static_assert(BM % kRowsA == 0 && BK % kRowsB == 0 && kRowsA % 8 == 0);
  static_assert((kRowsB & (kRowsB - 1)) == 0 && BN % 64 == 0);  // see b_at()
  static constexpr int kOfFactor = Tile::WN / kFactors;         // columns of a warp
  static constexpr int kBytes = Tile::kBytes;
  static_assert(sizeof(T) == kBytes);

  /// The last step's pieces that have less than 16 bytes.
  __device__ __forceinline__ void start_partial(T* a_tile, bool a_whole, bool b_whole) const {
    const T* from = a_from;
#pragma unroll 1
    for (int i = 0; i < BM && !a_whole; i += kRowsA, from += a_step) {
      copy_async_part(a_tile + a_to + i * BK, from, i < a_rows ? kBytes * (k_left - a_k()) : 0);
    }
    from = b_from - BK / kRowsB * b_step;
#pragma unroll 1
    for (int i = 0; i < BK && !b_whole; i += kRowsB, from += b_step) {
      copy_async_part(a_tile + b_at(i), from, b_k() + i < k_left ? kBytes * b_left : 0);
    }
  }

  /// Where the thread's piece of B lies that is `i` rows (a multiple of kRowsB) below its first.
  /// A bit of the row is one of b_k() or one of i.
  __device__ int b_at(int i) const { return Tile::turned(b_to, i) + i * BN; }
  __device__ static int a_row() { return static_cast<int>(threadIdx.x) / kAcrossA; }
  __device__ static int a_k() { return static_cast<int>(threadIdx.x) % kAcrossA * kPiece; }
  __device__ static int b_k() { return static_cast<int>(threadIdx.x) / kAcrossB; }
  __device__ static int b_col() { return static_cast<int>(threadIdx.x) % kAcrossB * kPiece; }
  /// Of a warp's columns in the tile the first are of B[0], the others the same columns of B[1].
  __device__ static int column() {
    return b_col() / Tile::WN * kOfFactor + b_col() % Tile::WN % kOfFactor;
  }
  __device__ static const T* factor(const MmaFactors<T, kFactors>& of) {
    if constexpr (kFactors == 1) return of.B[0];
    return b_col() % Tile::WN < kOfFactor ? of.B[0] : of.B[1];
  }

  const T *a_from, *b_from;
  int64_t a_step, b_step;  // to the thread's next row
  int a_rows, b_left;      // from the thread's first row, and its first column, on
  int k_left;              // of the depth, from the next step on
  const int a_to = Tile::place_a(a_row(), a_k());  // in a stage, of the thread's first row
  const int b_to = Tile::kTileA + Tile::place_b(b_k(), b_col());
};

/// A warp's fragments of both factors, for kDepth of the depth. All are there twice: buffers 0
/// and 1.
template <class Tile, typename T>
class MmaFragments {
 public:
  static constexpr int kDepth = 16, kRows = Tile::WM / 16;

  /// Loads those of k, of this depth in a stage, that belong to row i of 16: of A this row's, and
  /// of B an equal share.
  template <int kBuffer>
  __device__ __forceinline__ void load(int i, const T* stage, int k) {
    ldmatrix_x4(a[kBuffer][i], stage + (a_lane ^ k) + i * 16 * BK);
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      if (j * kRows / kCols != i) continue;
      ldmatrix_x4_trans(b[kBuffer][j], stage + (b_lane ^ 16 * j) + k * BN);
    }
  }
  /// After the first loads, and after each step.
  __device__ void begin() const {}
  template <class Sum>
  __device__ void end_step(Sum&) const {}
  /// Multiplies row i of 16. Along a row of sums and back along the next one: at each turn B's
  /// fragments stay.
  template <int kBuffer, class Sum>
  __device__ __forceinline__ void multiply(int i, Sum& sum) const {
#pragma unroll
    for (int forth = 0; forth < 2 * kCols; ++forth) {
      const int j = i % 2 == 0 ? forth : 2 * kCols - 1 - forth;
      mma_m16n8k16<T>(sum[i][j], a[kBuffer][i], b[kBuffer][j / 2][j % 2 * 2],
                      b[kBuffer][j / 2][j % 2 * 2 + 1]);
    }
  }

 private:
  static constexpr int BK = Tile::BK, BN = Tile::BN;
  static constexpr int kCols = Tile::WN / 16;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int a_lane = Tile::place_a(warp / Tile::kWarpsN * Tile::WM + lane % 16, lane / 16 * 8);
  const int b_lane =
      Tile::kTileA + Tile::place_b(lane % 16, warp % Tile::kWarpsN * Tile::WN + lane / 16 * 8);
  unsigned a[2][kRows][4], b[2][kCols][4];
};

/// Which fragments a tile has: its own, or these.
template <class Tile, typename T>
struct FragmentsOf {
  using Type = MmaFragments<Tile, T>;
};
template <class Tile, typename T>
requires requires { typename Tile::OwnFragments; }
struct FragmentsOf<Tile, T> {
  using Type = typename Tile::OwnFragments;
};

/// A block's stages, and a warp's fragments: those of the next part of the depth are loaded while
/// one is multiplied. `source` starts the copies of one step after the other, in parts (see
/// MmaCopies::start()); it may go on to another tile on its own.
template <class Tile, typename T>
class MmaPipeline {
  using Fragments = typename FragmentsOf<Tile, T>::Type;

 public:
  /// Starts the first stages, waits for one, and loads its first fragments.
  template <class Source>
  __device__ __forceinline__ MmaPipeline(T* memory, Source& source) : stages(memory) {
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      source.template start<0, 1>(stages + stage * Tile::kStage);
      copy_async_commit();
    }
    copy_async_wait<kStages - 2>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Fragments::kRows; ++i) fragments.template load<0>(i, stages, 0);
    fragments.begin();
  }

  /// Adds to `sum` the products of `steps` steps. In the last part of a step's depth the next
  /// step's tiles have to be there, and no warp reads this step's any more: it has all fragments.
  /// So the barrier stands there, and the copies after it may go to the stage that was read.
  template <class Source, class Sum>
  __device__ __forceinline__ void multiply(Source& source, int steps, Sum& sum) {
    constexpr int kDepth = Fragments::kDepth, kRows = Fragments::kRows;
    constexpr int kSlots = (BK / kDepth - 1) * kRows;  // where copies may be started
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int k = 0; k < BK; k += kDepth) {
        if (k + kDepth == BK) {
          copy_async_commit();
          copy_async_wait<kStages - 2>();
          __syncthreads();
          reading = next(reading), writing = next(writing);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const T* const stage = stages + reading;
          if (k / kDepth % 2 == 0) {
            fragments.template load<1>(i, stage, (k + kDepth) % BK);
            start_parts<0, kSlots>(source, k / kDepth * kRows + i);
            fragments.template multiply<0>(i, sum);
          } else {
            fragments.template load<0>(i, stage, (k + kDepth) % BK);
            start_parts<0, kSlots>(source, k / kDepth * kRows + i);
            fragments.template multiply<1>(i, sum);
          }
        }
      }
      fragments.end_step(sum);
    }
  }

 private:
  static constexpr int BK = Tile::BK, kStages = Tile::kStages, kParts = Tile::kParts;

  /// Where the stage after this one is, in elements.
  __device__ static int next(int stage) {
    return stage + Tile::kStage == kStages * Tile::kStage ? 0 : stage + Tile::kStage;
  }
  /// Starts the part whose slot this is.
  template <int kPart, int kSlots, class Source>
  __device__ __forceinline__ void start_parts(Source& source, int slot) {
    if constexpr (kPart < kParts) {
      if (slot == kPart * kSlots / kParts) {
        source.template start<kPart, kParts>(stages + writing);
      }
      start_parts<kPart + 1, kSlots>(source, slot);
    }
  }

  T* const stages;
  int reading = 0, writing = (kStages - 1) * Tile::kStage;  // stages
  Fragments fragments;
};

/// Adds up the sums of all slices of a tile. Returns whether this block has them then: the last one
/// that comes.
template <class Tile, class Sum>
__device__ __forceinline__ bool add_slices_up(Sum& sum, const MmaSlices& slices, int tile,
                                              int slice) {
  const auto room = [&](int of) {
    return slices.partial + (int64_t{tile} * slices.count + of) * Tile::kQuads * Tile::kThreads +
           threadIdx.x;
  };
  float4* to = room(slice);
#pragma unroll
  for (int i = 0; i < Tile::kSumRows; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kSumCols; ++j, to += Tile::kThreads) {
      __stcg(to, make_float4(sum[i][j][0], sum[i][j][1], sum[i][j][2], sum[i][j][3]));
      sum[i][j][0] = sum[i][j][1] = sum[i][j][2] = sum[i][j][3] = 0;
    }
  }
  if (!primitives::is_last_block(slices.arrived + tile, slices.count)) return false;
  for (int of = 0; of < slices.count; ++of) {
    const float4* from = room(of);
#pragma unroll
    for (int i = 0; i < Tile::kSumRows; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kSumCols; ++j, from += Tile::kThreads) {
        const float4 more = __ldcg(from);
        sum[i][j][0] += more.x, sum[i][j][1] += more.y;
        sum[i][j][2] += more.z, sum[i][j][3] += more.w;
      }
    }
  }
  return true;
}

/// What a launch computes, item by item: an item is a tile, or a slice of its depth. Tiles are
/// taken in groups of as many rows as fit into about 2048, column by column, so that blocks that
/// run at the same time share what they read (lesson 3, *The order of blocks*).
template <class Tile, typename T, int kFactors>
class MmaItems {
 public:
  struct Item {
    int tile, slice, row0, col0, begin, end;  // of the results, and of the depth
    __device__ int steps() const { return (end - begin + Tile::BK - 1) / Tile::BK; }
  };

  /// The block begins with the item of its number, and goes on to every gridDim.x-th.
  __device__ MmaItems(const MmaFactors<T, kFactors>& factors, const MmaSlices& slices)
      : of(factors), slices(slices), copied(static_cast<int>(blockIdx.x)) {
    begin_copies();
  }
  __device__ Item operator[](int number) const { return place(of, slices, number); }
  __device__ static Item place(const MmaFactors<T, kFactors>& of, const MmaSlices& slices,
                               int number) {
    const int tiles_m = (of.rows + Tile::BM - 1) / Tile::BM;
    const int tiles_n = (of.cols + kCols - 1) / kCols;
    const int tile = number / slices.count, slice = number % slices.count;
    const int first = tile / (kGroup * tiles_n) * kGroup, within = tile % (kGroup * tiles_n);
    const int group = min(kGroup, tiles_m - first), begin = slice * slices.steps * Tile::BK;
    const int64_t end = int64_t{begin} + int64_t{slices.steps} * Tile::BK;
    return {tile,
            slice,
            (first + within % group) * Tile::BM,
            within / group * kCols,
            begin,
            static_cast<int>(min(int64_t{of.depth}, end))};
  }
  /// For MmaPipeline: of one item after the other.
  template <int kPart, int kParts>
  __device__ __forceinline__ void start(T* stage) {
    copies.template start<kPart, kParts>(stage);
    if (kPart + 1 < kParts || !copies.done() || copied >= slices.items) return;
    copied += static_cast<int>(gridDim.x);
    if (copied < slices.items) begin_copies();
  }

 private:
  static constexpr int kCols = Tile::BN / kFactors;  // of each factor
  static constexpr int kGroup = 2048 / Tile::BM;

  __device__ void begin_copies() {
    const Item item = (*this)[copied];
    copies.begin(of, item.row0, item.col0, item.begin, item.end);
  }

  const MmaFactors<T, kFactors>& of;
  const MmaSlices& slices;
  int copied;  // the item that copies are of
  MmaCopies<Tile, T, kFactors> copies;
};

/// A block has every gridDim.x-th item. finish(sum, row, col) is called by each warp with the first
/// row and column of its sums, counted in columns of one factor.
template <class Tile, typename T, int kFactors, class Epilogue>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    mma_product(const __grid_constant__ MmaFactors<T, kFactors> of,
                const __grid_constant__ MmaSlices slices, const __grid_constant__ Epilogue finish) {
  extern __shared__ __align__(128) char mma_stages[];
  MmaItems<Tile, T, kFactors> items(of, slices);
  MmaPipeline<Tile, T> pipeline(reinterpret_cast<T*>(mma_stages), items);
  const int warp = threadIdx.x / 32;
  for (int number = blockIdx.x; number < slices.items; number += gridDim.x) {
    const auto item = items[number];
    float sum[Tile::kSumRows][Tile::kSumCols][4] = {};
    pipeline.multiply(items, item.steps(), sum);
    if (slices.count > 1 && !add_slices_up<Tile>(sum, slices, item.tile, item.slice)) continue;
    finish(sum, item.row0 + warp / Tile::kWarpsN * Tile::WM,
           item.col0 + warp % Tile::kWarpsN * (Tile::WN / kFactors));
  }
  copy_async_wait<0>();  // zeros that nobody reads
}

/// Of each of a quad's lanes the four words become the first, or second, ... word of all four.
__device__ __forceinline__ void transpose_quad(unsigned (&words)[4]) {
#pragma unroll
  for (int by = 1; by <= 2; by *= 2) {
    const bool upper = threadIdx.x & by;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned &low = words[by == 1 ? 2 * i : i], &high = words[by == 1 ? 2 * i + 1 : i + 2];
      const unsigned other = __shfl_xor_sync(kAllLanes, upper ? low : high, by);
      (upper ? low : high) = other;
    }
  }
}

/// Where results go: a matrix (rows, cols) with rows `stride` elements apart.
template <typename T>
struct MmaResults {
  T* to;
  int64_t stride;
  int rows, cols;

  /// Stores a warp's kRows x kCols results from (row0, col0) on. pair(i, j) computes a pair of
  /// them, rounded: see for_pairs() in primitives/fragments.cuh. Four lanes that have pairs of the
  /// same 32 columns exchange them, so that each has 8 neighbours, 16 bytes; or of the same 16
  /// columns of two rows.
  template <int kRows, int kCols, typename Pair>
  __device__ __forceinline__ void store(int row0, int col0, Pair pair) const {
    static_assert(kCols % 32 == 0 || kCols == 16);
    constexpr int kWide = kCols % 32 == 0 ? 4 : 2, kHigh = 4 / kWide;  // pairs of a quad's exchange
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRows / 8; i += kHigh) {
      const int row = row0 + 8 * (i + lane % 4 / kWide) + lane / 4;
#pragma unroll
      for (int j = 0; j < kCols / 8; j += kWide) {
        unsigned words[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) words[e] = pair(i + e / kWide, j + e % kWide);
        transpose_quad(words);
        const int col = col0 + 8 * (j + lane % kWide);
        if (row >= rows || col >= cols) continue;
        T* const at = to + row * stride + col;
        if (stride % 8 == 0 && col + 8 <= cols) {
          *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
          const T* const all = reinterpret_cast<const T*>(words);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (col + e < cols) at[e] = all[e];
          }
        }
      }
    }
  }
};

}  // namespace operators::product
