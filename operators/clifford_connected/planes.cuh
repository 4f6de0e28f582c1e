// What comes before and after the products of the fully connected layer on Hopper: kernels that
// write planes, weights and dz to memory, in TF32; the norm; and dx and dy from the planes'
// gradients.
//
// wgmma takes a right factor in TF32 only if neighbours along k lie beside each other
// (operators/product/tf32.cuh), where k is what the product sums over. So the weights are stored
// transposed. dz is, too: it is the right factor for dw, which sums over the batch. For the planes'
// gradients it is a transposed left factor.
//
// A chunk of the batch has `rows` rows. In memory matrices have rows of `stride` elements for the
// features (rounded up to 128, or to 32 if there are fewer than 128), or of `pitch` elements for a
// chunk's rows (rounded up to 128). In 3-D these are
//
//     planes  (44 planes, pitch, stride), in the order of Order
//     dz      (8 blades, stride, pitch)
//     w       (20 slots, stride, stride), transposed; for backward also as it is
//
// For few rows (few_rows.cuh) `pitch` and `stride` are rounded up to 32, and there is also a dz
// (8 blades, pitch, stride).
#pragma once

#include "operators/clifford_connected/connected.cuh"

namespace operators::clifford_connected {

using namespace primitives;
using namespace clifford;

/// Some rows of the batch, from `first` on.
struct Chunk {
  Layer layer;
  int first, rows, pitch, stride;
  __host__ __device__ size_t matrix() const { return static_cast<size_t>(pitch) * stride; }
  /// A *patch* is 128 rows by 128 features of the chunk. Of these a row has slices(), and a column
  /// has row_blocks().
  __host__ __device__ int slices() const { return ceil_div(stride, 128); }
  __host__ __device__ int row_blocks() const { return ceil_div(pitch, 128); }
  __host__ __device__ int patches() const { return slices() * row_blocks(); }
};

/// The weights in TF32, in the order of slots, zeros beyond the features: `transposed` (slots, out
/// feature, in feature), and for backward `plain` (slots, in feature, out feature). Either may be
/// null. Rows of both are in the order of place_of_column(), and so are out features of `plain`, as
/// those of dz. A block of 128 threads has 32 rows and width() columns of a matrix. A row of
/// `piece` has 129 elements, so that a column lies in 32 banks.
template <typename A>
struct WeightTransposer {
  using Piece = float[32][128 + 1];
  const float* w;
  float *transposed, *plain;
  int features, stride;
  Order<A> order;

  // Short rows are cut into smaller pieces, so that there are more blocks.
  __host__ __device__ int width() const { return stride < 512 ? 32 : 128; }
  __host__ __device__ int blocks() const {
    return A::kTriples * (stride / 32) * (stride / width());
  }
  __device__ __forceinline__ void transpose(int block, Piece& piece) const {
    if (width() == 32) return transpose<32>(block, piece);
    transpose<128>(block, piece);
  }
  template <int kWidth>
  __device__ __forceinline__ void transpose(int block, Piece& piece) const {
    const int across = stride / kWidth, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row0 = block / across % (stride / 32) * 32, col0 = block % across * kWidth;
    const size_t slot = block / (across * (stride / 32)), t = order.triple_of[slot];
#pragma unroll
    for (int r = 0; r < 32; r += 4) {
#pragma unroll
      for (int j = 0; j < kWidth; j += 32) {
        const int row = row0 + r + warp, col = col0 + j + lane;
        const bool inside = row < features && col < features;
        piece[r + warp][j + lane] =
            inside ? rounded_to_tf32(w[(t * features + row) * features + col]) : 0;
      }
    }
    __syncthreads();
    for (int i = warp; plain != nullptr && i < 32; i += 4) {
      float* const to = plain + (slot * stride + place_of_column(row0 + i)) * stride + col0;
#pragma unroll
      for (int j = lane; j < kWidth; j += 32) to[place_of_column(j)] = piece[i][j];
    }
    if (transposed == nullptr) return;
#pragma unroll 8
    for (int r = 0; r < kWidth; r += 4) {
      const size_t to = slot * stride + place_of_column(col0 + r + warp);
      transposed[to * stride + row0 + lane] = piece[lane][r + warp];
    }
  }
};

/// Makes the planes of a chunk. A *unit* is 128 features of one row, in all planes. A warp makes
/// it, each lane 4 features. A patch is 128 units. Patches are numbered as they are needed, in
/// groups of `together` rows of patches, in a group column by column. The first `before` units are
/// made before the product: all of them, or the first columns of the first group. The others are
/// made beside it, and for each of their patches a counter says how many units are there.
template <typename A>
struct PlaneMaker {
  const float *x, *y;
  float* planes;
  Chunk chunk;
  int together, before;

  __host__ __device__ int units() const { return chunk.patches() * 128; }
  /// The number of the first patch in row `block` of patches, and how much greater that of the next
  /// one is.
  __device__ int first_patch(int block) const {
    return block / together * together * chunk.slices() + block % together;
  }
  __device__ int next_patch(int block) const {
    return min(together, chunk.row_blocks() - block / together * together);
  }

  /// Makes unit u of those before the product. No copies wait for their patches. So they are
  /// numbered along the rows, and neighbouring warps write what lies side by side.
  __device__ __forceinline__ void make_before(int u) const {
    if (u >= before) return;
    const int wide = min(chunk.slices(), before / (together * 128));
    if (u / wide >= chunk.pitch) return;
    Unit unit = load(u / wide, u % wide);
    make(unit);
  }
  /// Makes this warp's share of the other units; `warps` share them. A warp reports a unit when it
  /// has started to load x and y of the next one: so it waits for its writes while those loads
  /// arrive. The fence is for the copy engine, which will read the planes.
  __device__ __forceinline__ void make_beside(int warp, int warps, const Progress& progress) const {
    constexpr int kAtOnce = A::kBlades > 4 ? 1 : 2;  // units, of neighbouring rows
    const auto tell = [&](int patch) {
#if HOPPER_CODE
      global_fence();
#endif
      __syncwarp();
      if (threadIdx.x % 32 == 0) progress.add(patch, kAtOnce);
    };
    int last = -1;
    for (int u = before + kAtOnce * warp; u < units(); u += kAtOnce * warps) {
      const int group = u / (together * chunk.slices() * 128),
                rest = u % (together * chunk.slices() * 128);
      const int height = next_patch(group * together),
                block = group * together + rest / 128 % height;
      const int slice = rest / (height * 128);
      Unit unit[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) unit[i] = load(block * 128 + rest % 128 + i, slice);
      if (last >= 0) tell(last);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) make(unit[i]);
      last = u / 128;
    }
    if (last >= 0) tell(last);
  }

 private:
  struct Unit {
    Multivectors<A, 4> left, right;
    float* to;
    bool inside;
  };
  __device__ __forceinline__ Unit load(int row, int slice) const {
    const int f = slice * 128 + threadIdx.x % 32 * 4;
    const int n = row < chunk.rows ? chunk.first + row : chunk.layer.batch;
    return {load_neighbours<A, 4>(x, n, f, chunk.layer),
            load_neighbours<A, 4>(y, n, f, chunk.layer),
            planes + static_cast<size_t>(row) * chunk.stride + f, f < chunk.stride};
  }
  __device__ __forceinline__ void make(Unit& unit) const {
    if (!unit.inside) return;
    apply_gates(unit.left, unit.right);
    unroll<0, A::kGrades>([&](auto c) {
      unroll<0, Order<A>::triples(c)>([&](auto i) {
        constexpr int t = Order<A>::triple(c, i);
        unroll<A::first(c), A::first(c + 1)>([&](auto k) {
          store_rounded(unit.to, sum_terms<A, Of::result, t, k>(unit.left, unit.right));
          unit.to += chunk.matrix();
        });
      });
    });
  }
};

/// The kernel before the product. Each of the first `plane_blocks` blocks makes four units, one a
/// warp. Each other block transposes a piece of w. Block 0 also sets the counters to 0.
template <typename A>
__global__ void __launch_bounds__(128, A::kBlades > 4 ? 5 : 8)
    make_ready(const __grid_constant__ PlaneMaker<A> maker, int plane_blocks,
               const __grid_constant__ WeightTransposer<A> transposer, unsigned* counters,
               int counter_count) {
  __shared__ typename WeightTransposer<A>::Piece piece;
  const int block = blockIdx.x;
  wait_for_previous_kernel();
  if (block < plane_blocks) {
    maker.make_before(block * 4 + threadIdx.x / 32);
  } else {
    transposer.transpose(block - plane_blocks, piece);
  }
  if (block == 0) {
    for (int i = threadIdx.x; i < counter_count; i += 128) counters[i] = 0;
  }
}

/// A warp scales one row of grade c in place: out = z / rms(z). It keeps 1 / rms for backward.
template <typename A, int c, int W>
__device__ __forceinline__ void normalize_grade_of_row(float* out, float* inverses, int n,
                                                       const Layer& layer) {
  const size_t row = static_cast<size_t>(n) * layer.features;
  const auto for_packs = [&](auto visit) {
#pragma unroll 4
    for (int f = threadIdx.x % 32 * W; f < layer.features; f += 32 * W) {
      unroll<A::first(c), A::first(c + 1)>(
          [&](auto k) { visit(*reinterpret_cast<Pack<W>*>(out + k * layer.plane() + row + f)); });
    }
  };
  FeatureSums<1> squares = {};
  for_packs([&](const Pack<W>& z) {
#pragma unroll
    for (int e = 0; e < W; ++e) squares.value[0] += z.v[e] * z.v[e];
  });
  add_up_lanes(squares, 32);
  const float r = inverse_rms(squares.value[0], layer);
  if (threadIdx.x % 32 == 0) inverses[static_cast<size_t>(c) * layer.batch + n] = r;
  for_packs([&](Pack<W>& z) {
#pragma unroll
    for (int e = 0; e < W; ++e) z.v[e] *= r;
  });
}

/// The tile scheduler: which tiles of z the clusters take, and in which order. A tile has
/// `tile_rows` rows and `tile_cols` features of one blade. Tiles of the scalar and of the last
/// blade are the short ones. Row by row (by_rows) a round has all tiles of as many rows as there
/// are clusters for, and after every two rounds other clusters get the short tiles. Otherwise all
/// long tiles come before the short ones. That is better where row by row some clusters would have
/// no work, or would have long tiles only.
template <typename A>
struct TileOrder {
  static constexpr int kLong = A::kBlades - 2;  ///< blades with long tiles
  int tile_rows, tile_cols;
  bool by_rows;
  int row_tiles, cols;
  Turns turns;

  template <class Tile>
  TileOrder(Tile, const Layer& layer, int rows, bool rows_first, int clusters)
      : tile_rows(Tile::BM * Tile::kBlocks),
        tile_cols(Tile::BN),
        row_tiles(ceil_div(rows, tile_rows)),
        cols(ceil_div(layer.features, tile_cols)) {
    const int of_row = A::kBlades * cols, tiles = row_tiles * of_row;
    by_rows = rows_first && clusters >= of_row;
    turns = {tiles, std::min(tiles, by_rows ? clusters / of_row * of_row : clusters)};
  }
  /// The rows that the first round has.
  __host__ int rows_of_round() const {
    return ceil_div(turns.clusters, (by_rows ? A::kBlades : kLong) * cols) * tile_rows;
  }

  /// The tile's first row, its blade, and its first feature.
  struct Place {
    int row, blade, col;
  };
  __host__ __device__ Place place(int tile) const {
    const int all_long = by_rows ? 0 : row_tiles * cols * kLong;
    const bool is_long = tile < all_long;
    const int of_row = (by_rows ? A::kBlades : is_long ? kLong : 2) * cols;
    if (!is_long) tile -= all_long;
    const int shift = by_rows ? tile / turns.clusters / 2 * 2 * cols : 0;
    const int at = (tile + shift) % of_row, i = at / cols + (by_rows || is_long ? 0 : kLong);
    return {tile / of_row * tile_rows, i < kLong ? i + 1 : (i - kLong) * (A::kBlades - 1),
            at % cols * tile_cols};
  }
  /// The same number for all tiles of the same rows and grade.
  __host__ int group(int tile) const {
    const Place at = place(tile);
    return at.row * A::kGrades + A::kTables.grade[at.blade];
  }
  /// Whether all tiles of the row, and of the `count` blades from `blade` on, those of a grade, are
  /// of one round. They have neighbouring numbers, so the first and the last one decide.
  __host__ __device__ bool together(int row, int blade, int count) const {
    if (by_rows) return true;
    row /= tile_rows;
    const bool is_long = blade > 0 && blade <= kLong;
    const int first = is_long ? row * kLong + blade - 1 : row_tiles * kLong + 2 * row + (blade > 0);
    return first * cols / turns.clusters == ((first + count) * cols - 1) / turns.clusters;
  }
};

/// The norm of rows and grades whose tiles are all of one round. A warpgroup keeps its sums of z in
/// registers, leaves its rows' sums of squares in memory, adds 1 to a counter, and waits until all
/// tiles have done so. Then it scales its sums, so that z is never in memory. Nobody waits forever:
/// all clusters are on the device at the same time, each has one tile of a round, and a warpgroup
/// that waits has given back its stages before. (Other rows are written without the norm;
/// normalize_rest scales them.)
template <typename A>
struct RoundNorm {
  float *out, *inverses;
  float* squares;  ///< a sum for each row of the chunk, each blade and each column of tiles
  Chunk chunk;
  TileOrder<A> tiles;
  Progress there;  ///< for each 64 rows and grade: how many tiles' sums are in `squares`
  Order<A> order = {};

  __host__ __device__ bool together(int row, int c) const {
    return tiles.together(row, order.blade[c], order.blade[c + 1] - order.blade[c]);
  }
  __host__ bool all_together() const {
    bool all = true;
    for (int row = 0; row < chunk.rows; row += tiles.tile_rows) {
      for (int c = 0; c < A::kGrades; ++c) all = all && together(row, c);
    }
    return all;
  }
#if HOPPER_CODE
  /// A warpgroup scales its 64 rows, from `row` on, of a tile, whose first feature is `col`. Four
  /// lanes that are neighbours have the same two rows.
  template <int kCols>
  __device__ __forceinline__ void scale(Sum<kCols>& sum, int row, int col, int blade, int c,
                                        int barrier) const {
    const int first = order.blade[c], all = (order.blade[c + 1] - first) * tiles.cols;
    const int own = (blade - first) * tiles.cols + col / kCols, lane = threadIdx.x % 4;
    const int inside = chunk.layer.features - col;
    float sums[2] = {};
    if (inside >= kCols) {
      add_squares(sum, kCols, sums);
    } else {
      add_squares(sum, inside - 4 * lane, sums);
    }
    float* const from =
        squares + static_cast<size_t>(first) * tiles.cols * chunk.pitch + row + Sum<kCols>::row(0);
    if (all > 1) {
      if (lane < 2) {
        from[static_cast<size_t>(own) * chunk.pitch + 8 * lane] = lane == 0 ? sums[0] : sums[1];
      }
      named_barrier(barrier, 128);
      if (threadIdx.x % 128 == 0) {
        const int counter = row / 64 * A::kGrades + c;
        there.add(counter);
        there.wait(counter, static_cast<unsigned>(all));
      }
      named_barrier(barrier, 128);
      sums[0] = sums[1] = 0;
      for (int i = lane; i < all; i += 4) {
        sums[0] += __ldcg(from + static_cast<size_t>(i) * chunk.pitch);
        sums[1] += __ldcg(from + static_cast<size_t>(i) * chunk.pitch + 8);
      }
      add_up_four(sums);
    }
    const float r[2] = {inverse_rms(sums[0], chunk.layer), inverse_rms(sums[1], chunk.layer)};
    const int n = row + Sum<kCols>::row(0) + 8 * lane;
    if (own == 0 && lane < 2 && n < chunk.rows) {
      inverses[static_cast<size_t>(c) * chunk.layer.batch + chunk.first + n] =
          lane == 0 ? r[0] : r[1];
    }
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) sum.elements[i] *= r[i / 2 % 2];
  }

 private:
  /// Adds up over four neighbouring lanes.
  __device__ static void add_up_four(float (&sums)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 1);
      sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 2);
    }
  }
  /// Adds up the squares in the columns before `inside`, for the two rows of four lanes. Columns
  /// are counted from the lane's own first one, in the order in which store_sum() stores them.
  template <int kCols>
  __device__ __forceinline__ static void add_squares(const Sum<kCols>& sum, int inside,
                                                     float (&sums)[2]) {
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) {
      const int col = i / 8 * 16 + i % 8 / 4 * 2 + i % 2;
      if (col < inside) sums[i / 2 % 2] += sum.elements[i] * sum.elements[i];
    }
    add_up_four(sums);
  }
#endif
};

/// The norm of the rows and grades whose tiles are of several rounds. A warp scales one row of one
/// grade in place, and keeps 1 / rms. The last rows come first, which are still in the cache.
template <typename A, int W>
__global__ void __launch_bounds__(128) normalize_rest(const __grid_constant__ RoundNorm<A> norm) {
  const int u = blockIdx.x * 4 + threadIdx.x / 32, n = norm.chunk.rows - 1 - u / A::kGrades;
  if (n < 0 || norm.together(n, u % A::kGrades)) return;
  wait_for_previous_kernel();
  unroll<0, A::kGrades>([&](auto c) {
    if (u % A::kGrades != c) return;
    normalize_grade_of_row<A, c, W>(norm.out, norm.inverses, norm.chunk.first + n,
                                    norm.chunk.layer);
  });
}

template <typename A>
void normalize_rest_of(const RoundNorm<A>& norm, cudaStream_t stream) {
  const Layer& layer = norm.chunk.layer;
  if (!layer.normed || norm.all_together()) return;
  launch_clusters_on(stream, layer.features % 4 == 0 ? normalize_rest<A, 4> : normalize_rest<A, 1>,
                     1, true, ceil_div(norm.chunk.rows * A::kGrades, 4), 128, 0, norm);
}

constexpr int kResultRows = 8, kResultThreads = 512;
/// products: each warp's sum of d_out out. factors: each row's r, and r mean(d_out out).
struct ResultFactors {
  float products[kResultThreads / 32];
  float2 factors[kResultRows];
};
/// A block writes dz of 8 rows and one grade c, in TF32 and transposed: dz = r d_out - r out
/// mean(d_out out), as out = r z. Two warps add up a row. Then a thread has 8 rows of a feature, in
/// dz a whole sector of 32 bytes. The second reads hit a cache. Features are in the order of
/// place_of_column().
template <typename A, int c, int W>
__device__ __forceinline__ void transpose_grade(const float* out, const float* d_out,
                                                const float* inverses, float* transposed,
                                                ResultFactors& shared, const Chunk& chunk) {
  const Layer& layer = chunk.layer;
  const size_t plane = layer.plane();
  const int row0 = blockIdx.x * kResultRows;
  const auto start = [&](int i) {
    return static_cast<size_t>(chunk.first + row0 + i) * layer.features;
  };
  const int thread = threadIdx.x, own = thread / 64;
  float r = 1;
  if (thread < kResultRows && layer.normed && row0 + thread < chunk.rows) {
    r = inverses[static_cast<size_t>(c) * layer.batch + chunk.first + row0 + thread];
  }
  FeatureSums<1> product = {};
  if (layer.normed && row0 + own < chunk.rows) {
    for (int f = threadIdx.x % 64 * W; f < layer.features; f += 64 * W) {
      unroll<A::first(c), A::first(c + 1)>([&](auto k) {
        const size_t at = k * plane + start(own) + f;
        const auto a = *reinterpret_cast<const Pack<W>*>(out + at);
        const auto b = *reinterpret_cast<const Pack<W>*>(d_out + at);
#pragma unroll
        for (int e = 0; e < W; ++e) product.value[0] += a.v[e] * b.v[e];
      });
    }
  }
  add_up_lanes(product, 32);
  if (threadIdx.x % 32 == 0) shared.products[threadIdx.x / 32] = product.value[0];
  __syncthreads();
  if (thread < kResultRows) {
    const float sum = shared.products[2 * thread] + shared.products[2 * thread + 1];
    shared.factors[thread] = make_float2(r, r * sum * layer.inverse_features);
  }
  __syncthreads();
  const int odd = threadIdx.x % 2;
  for (int f = threadIdx.x; f < chunk.stride; f += kResultThreads) {
    unroll<A::first(c), A::first(c + 1)>([&](auto k) {
      alignas(16) float eight[kResultRows];
#pragma unroll
      for (int i = 0; i < kResultRows; ++i) {
        const bool inside = row0 + i < chunk.rows && f < layer.features;
        const size_t at = k * plane + start(i) + f;
        const float2 factors = shared.factors[i];
        float value = inside ? factors.x * d_out[at] : 0;
        if (inside && layer.normed) value -= factors.y * out[at];
        eight[i] = rounded_to_tf32(value);
      }
      // A lane and the next one exchange halves, so that together they store a whole sector.
      float other[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        other[i] = __shfl_xor_sync(0xffffffffu, odd ? eight[i] : eight[4 + i], 1);
        if (odd) eight[i] = eight[4 + i];
      }
      const int place = k * chunk.stride + place_of_column(f - odd);
      float* const to = transposed + static_cast<size_t>(place) * chunk.pitch + row0 + 4 * odd;
      const float4 own4 = make_float4(eight[0], eight[1], eight[2], eight[3]);
      const float4 other4 = make_float4(other[0], other[1], other[2], other[3]);
      *reinterpret_cast<float4*>(to) = odd ? other4 : own4;
      *reinterpret_cast<float4*>(to + chunk.pitch) = odd ? own4 : other4;
    });
  }
}

template <typename A, int W>
__global__ void __launch_bounds__(kResultThreads, 2)
    turn_result_gradients(const float* out, const float* d_out, const float* inverses,
                          float* transposed, Chunk chunk) {
  __shared__ ResultFactors shared;
  wait_for_previous_kernel();
  unroll<0, A::kGrades>([&](auto c) {
    if (static_cast<int>(blockIdx.y) == c) {
      transpose_grade<A, c, W>(out, d_out, inverses, transposed, shared, chunk);
    }
  });
}

/// dx and dy from the planes' gradients d, as finish_gradients() of the bonus computes them. With g
/// = gate(x_0), h = gate(y_0) and S_i, the sum of sign y_j d_k, dx_i is g h S_i. dx_0 has
/// gate'(x_0) h (sum of x_i S_i) besides. dy is computed likewise.
template <typename A>
struct PlaneTaker {
  const float *x, *y, *d;
  float *dx, *dy;
  Chunk chunk;

  /// Takes W features of a row, from f on.
  template <int W>
  __device__ __forceinline__ void take(int row, int f) const {
    const Layer& layer = chunk.layer;
    const size_t plane = layer.plane();
    const size_t at = static_cast<size_t>(chunk.first + row) * layer.features + f;
    Multivectors<A, W> left, right, of_x, of_y;
    unroll<0, A::kBlades>([&](auto k) {
      left.blade[k] = *reinterpret_cast<const Pack<W>*>(x + k * plane + at);
      right.blade[k] = *reinterpret_cast<const Pack<W>*>(y + k * plane + at);
      of_x.blade[k] = of_y.blade[k] = empty_sum<W>();
    });
    const float* from = d + static_cast<size_t>(row) * chunk.stride + f;
    unroll<0, A::kGrades>([&](auto c) {
      unroll<0, Order<A>::triples(c)>([&](auto slot) {
        constexpr int t = Order<A>::triple(c, slot);
        constexpr auto grades = A::triple(t);
        Multivectors<A, W> d_planes;  // only one grade
        unroll<A::first(c), A::first(c + 1)>([&](auto k) {
          d_planes.blade[k] = *reinterpret_cast<const Pack<W>*>(from);
          from += chunk.matrix();
        });
        unroll<A::first(grades.x), A::first(grades.x + 1)>(
            [&](auto i) { add(of_x.blade[i], sum_terms<A, Of::x, t, i>(d_planes, right)); });
        unroll<A::first(grades.y), A::first(grades.y + 1)>(
            [&](auto j) { add(of_y.blade[j], sum_terms<A, Of::y, t, j>(d_planes, left)); });
      });
    });
    const Gates<W> gates(left.blade[0], right.blade[0]);
    const Pack<W> both = gates.product();
    Pack<W> along_x = empty_sum<W>(), along_y = empty_sum<W>();
    unroll<0, A::kBlades>([&](auto i) {
      add_product(along_x, left.blade[i], of_x.blade[i]);
      add_product(along_y, right.blade[i], of_y.blade[i]);
    });
    unroll<0, A::kBlades>([&](auto i) {
#pragma unroll
      for (int e = 0; e < W; ++e) {
        of_x.blade[i].v[e] *= both.v[e];
        of_y.blade[i].v[e] *= both.v[e];
        if (i == 0) {
          of_x.blade[i].v[e] += along_x.v[e] * gate_slope(left.blade[0].v[e]) * gates.y.v[e];
          of_y.blade[i].v[e] += along_y.v[e] * gate_slope(right.blade[0].v[e]) * gates.x.v[e];
        }
      }
      *reinterpret_cast<Pack<W>*>(dx + i * plane + at) = of_x.blade[i];
      *reinterpret_cast<Pack<W>*>(dy + i * plane + at) = of_y.blade[i];
    });
  }
};

/// A thread has W neighbouring features of a row. The last rows come first: what the product has
/// written last is still in the cache.
template <typename A, int W>
__global__ void __launch_bounds__(128) take_planes_apart(PlaneTaker<A> taker) {
  wait_for_previous_kernel();
  const int f = (blockIdx.x * 128 + threadIdx.x) * W;
  if (f < taker.chunk.layer.features) taker.template take<W>(taker.chunk.rows - 1 - blockIdx.y, f);
}

}  // namespace operators::clifford_connected
