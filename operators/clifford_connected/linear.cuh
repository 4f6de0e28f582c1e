// The linear layer of grades: y_k = x_k mix[c]^T for each blade k, where c is its grade, and a bias
// for the scalar. Forward and backward, in TF32, multiplied as the fully connected layer is.
//
//     y_k  = x_k mix[c]^T                  x: (rows, k)             mix: as it lies, (columns, k)
//     dx_k^T = mix[c]^T dy_k^T             mix: as it lies, (k, rows)   dy: (columns, k)
//     dmix[c] = sum over k of dy_k^T x_k   dy: (k, rows)            x: transposed before
//
// where the letter k in brackets is what a product sums over. wgmma takes a right factor in TF32
// only if neighbours along k lie beside each other. So dx is computed transposed, which needs no
// copy, and for dmix, where neither factor lies so, x is transposed into the workspace. dx is added
// to what is there: the gradient of a product that has x as its other factor.
//
// The copy engine rounds on the way. It needs rows of whole 16 bytes. Where features are no
// multiple of 4, and on GPUs before Hopper, kernels copy and round all factors, with zeros up to
// whole steps, and mma.sync multiplies (mix.cuh).
#pragma once

#include "operators/clifford_connected/mix.cuh"

namespace operators::clifford_connected {

using namespace primitives;
using namespace clifford;

/// What is multiplied: blades of `batch` rows and `features` columns, in the order of their grades.
struct GradeShape {
  static constexpr int kMostVectors = 5;
  int batch, features, grades, blades;
  int first[kMostVectors + 2] = {};  ///< the first blade of each grade, and at the end their number

  GradeShape(int vectors, int rows, int cols)
      : batch(rows), features(cols), grades(vectors + 1), blades(1 << vectors) {
    for (int c = 0, count = 1; c < grades; count = count * (vectors - c) / (c + 1), ++c) {
      first[c + 1] = first[c] + count;
    }
  }
  __host__ __device__ int grade(int blade) const {
    int c = 0;
    while (blade >= first[c + 1]) ++c;
    return c;
  }
  __host__ __device__ size_t plane() const { return static_cast<size_t>(batch) * features; }
  __host__ __device__ size_t matrix() const { return static_cast<size_t>(features) * features; }
};

#if HOPPER_CODE
/// Stores a warpgroup's sum to (row0, col0) of a row-major matrix (rows, cols), and adds `bias` to
/// each row, unless it is null. A thread has two neighbours of each 8 columns; four lanes store a
/// sector of 32 bytes. cols is even.
template <class Tile>
__device__ __forceinline__ void store_pairs(const typename Tile::TileSum& sum, float* to, int row0,
                                            int col0, int rows, int cols, const float* bias) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < sum.size(); i += 4) {
    const int col = col0 + 2 * i + 2 * lane;
    if (col >= cols) continue;
    float2 add = make_float2(0, 0);
    if (bias != nullptr) add = *reinterpret_cast<const float2*>(bias + col);
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int row = row0 + Tile::sum_row(2 * below);
      if (row >= rows) continue;
      const float* const two = sum.elements + i + 2 * below;
      *reinterpret_cast<float2*>(to + static_cast<size_t>(row) * cols + col) =
          make_float2(two[0] + add.x, two[1] + add.y);
    }
  }
}
#endif

/// y. A tile has one blade of some rows.
template <class Size>
struct LinearForward {
  using Tile = Size;
  static constexpr bool kHelped = false;
  GradeShape of;
  float* y;
  const float* bias;
  int row_tiles, cols;
  Turns turns;

  LinearForward(const GradeShape& shape, float* to, const float* added, int clusters)
      : of(shape),
        y(to),
        bias(added),
        row_tiles(ceil_div(of.batch, Tile::BM * Tile::kBlocks)),
        cols(ceil_div(of.features, Tile::BN)) {
    const int tiles = of.blades * row_tiles * cols;
    turns = {tiles, std::min(tiles, clusters)};
  }

  struct Place {
    int blade, grade, row, col, end;
    static constexpr int begin = 0, pairs = 1;
  };
  __host__ __device__ Place place(int tile, int rank) const {
    const int blade = tile / (row_tiles * cols);
    return {.blade = blade,
            .grade = of.grade(blade),
            .row = (tile / cols % row_tiles * Tile::kBlocks + rank) * Tile::BM,
            .col = tile % cols * Tile::BN,
            .end = ceil_div(of.features, Tile::kDepth)};
  }
#if HOPPER_CODE
  /// Rows beyond the blade's, and columns beyond the features, are others that are not stored.
  template <class Copy>
  __device__ void load(const Copy& copy, const Place& at, int, int k) const {
    copy.left(at.blade * of.batch + at.row, k);
    copy.right(at.grade * of.features + at.col, k);
  }
  __device__ void store(const Sum<Tile::BN>& sum, const Place& at, int row0) const {
    store_pairs<Tile>(sum, y + at.blade * of.plane(), at.row + row0, at.col, of.batch, of.features,
                      at.blade == 0 ? bias : nullptr);
  }
#endif
};

/// dx, transposed: a tile has some features (rows of the sum) of some rows of a blade (columns).
template <class Size>
struct LinearInputs {
  using Tile = typename Size::Transposed;
  static constexpr bool kHelped = false;
  GradeShape of;
  float* dx;
  int f_tiles, row_tiles;
  Turns turns;

  LinearInputs(const GradeShape& shape, float* to, int clusters)
      : of(shape),
        dx(to),
        f_tiles(ceil_div(of.features, Tile::BM * Tile::kBlocks)),
        row_tiles(ceil_div(of.batch, Tile::BN)) {
    const int tiles = of.blades * f_tiles * row_tiles;
    turns = {tiles, std::min(tiles, clusters)};
  }

  struct Place {
    int blade, grade, f, row, end;
    static constexpr int begin = 0, pairs = 1;
  };
  __host__ __device__ Place place(int tile, int rank) const {
    const int blade = tile / (f_tiles * row_tiles);
    return {.blade = blade,
            .grade = of.grade(blade),
            .f = (tile % f_tiles * Tile::kBlocks + rank) * Tile::BM,
            .row = tile / f_tiles % row_tiles * Tile::BN,
            .end = ceil_div(of.features, Tile::kDepth)};
  }
#if HOPPER_CODE
  template <class Copy>
  __device__ void load(const Copy& copy, const Place& at, int, int k) const {
    copy.left(at.grade, at.f, k);
    copy.right(at.blade * of.batch + at.row, k);
  }
  /// Adds the sum to dx. A thread has two neighbouring features of some rows; of kAtOnce it loads
  /// what is there before it stores any, since each load takes as long as all of them.
  __device__ void store(const Sum<Tile::BN>& sum, const Place& at, int row0) const {
    constexpr int kAtOnce = 16;
    const int f = at.f + row0 + Tile::sum_row(0), lane = threadIdx.x % 4;
    if (f >= of.features) return;
    float* const to = dx + at.blade * of.plane() + f;
#pragma unroll
    for (int i = 0; i < Tile::BN / 4; i += kAtOnce) {
      float2 there[kAtOnce];
      const auto row = [&](int j) { return at.row + (i + j) / 2 * 8 + 2 * lane + j % 2; };
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const size_t element = static_cast<size_t>(min(row(j), of.batch - 1)) * of.features;
        there[j] = *reinterpret_cast<const float2*>(to + element);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (row(j) >= of.batch) continue;
        const float* const own = sum.elements + (i + j) / 2 * 4 + j % 2;
        *reinterpret_cast<float2*>(to + static_cast<size_t>(row(j)) * of.features) =
            make_float2(there[j].x + own[0], there[j].y + own[2]);
      }
    }
  }
#endif
};

/// dmix. A tile has one grade, and the pairs are its blades. Where tiles are few, `splits` clusters
/// share the rows of one: each leaves a partial sum.
template <class Size>
struct LinearWeights {
  using Tile = typename Size::Transposed;
  static constexpr bool kHelped = false;
  GradeShape of;
  float* dmix;  ///< or partial sums, one after the other
  int splits, row_tiles, cols;
  Turns turns;

  LinearWeights(const GradeShape& shape, float* to, int shares, int clusters)
      : of(shape),
        dmix(to),
        splits(shares),
        row_tiles(ceil_div(of.features, Tile::BM * Tile::kBlocks)),
        cols(ceil_div(of.features, Tile::BN)) {
    const int tiles = of.grades * splits * row_tiles * cols;
    turns = {tiles, std::min(tiles, clusters)};
  }

  struct Place {
    int grade, split, row, col, blade, begin, end, pairs;
  };
  /// First come the grades in the middle, which have the most blades.
  __host__ __device__ Place place(int tile, int rank) const {
    const int of_grade = splits * row_tiles * cols, i = tile / of_grade;
    const int grade = (of.grades / 2 + (i % 2 == 0 ? i / 2 : of.grades - (i + 1) / 2)) % of.grades;
    const int split = tile / (row_tiles * cols) % splits;
    const int steps = ceil_div(of.batch, Tile::kDepth);
    return {.grade = grade,
            .split = split,
            .row = (tile / cols % row_tiles * Tile::kBlocks + rank) * Tile::BM,
            .col = tile % cols * Tile::BN,
            .blade = of.first[grade],
            .begin = split * steps / splits,
            .end = (split + 1) * steps / splits,
            .pairs = of.first[grade + 1] - of.first[grade]};
  }
#if HOPPER_CODE
  template <class Copy>
  __device__ void load(const Copy& copy, const Place& at, int i, int k) const {
    copy.left(at.blade + i, at.row, k);
    copy.right((at.blade + i) * of.features + at.col, k);
  }
  __device__ void store(const Sum<Tile::BN>& sum, const Place& at, int row0) const {
    store_pairs<Tile>(sum, dmix + (at.split * of.grades + at.grade) * of.matrix(), at.row + row0,
                      at.col, of.features, of.features, nullptr);
  }
#endif
};

/// How many rows a partial sum of the bias has, so that there are not too many of them.
inline int rows_of_sum(int batch) { return std::max(128, ceil_div(batch, 256)); }

/// Sums of some rows each of a matrix (batch, features): those of dy's scalar, and then those of
/// these sums. A block of 256 threads has 32 columns; each warp has every eighth row, each lane a
/// column.
struct ColumnSums {
  const float* from;
  float* sums;  ///< (parts, features)
  int batch, features, rows;

  __host__ __device__ int parts() const { return ceil_div(batch, rows); }
  __host__ __device__ int blocks() const { return parts() * ceil_div(features, 32); }
  __device__ __forceinline__ void add_up(int block) const {
    __shared__ float of_warps[8][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32,
              part = block / ceil_div(features, 32);
    const int col = block % ceil_div(features, 32) * 32 + lane, end = min(batch, (part + 1) * rows);
    float sum = 0;
#pragma unroll 8
    for (int n = part * rows + warp; n < end; n += 8) {
      sum += col < features ? from[static_cast<size_t>(n) * features + col] : 0;
    }
    of_warps[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || col >= features) return;
    for (int i = 1; i < 8; ++i) sum += of_warps[i][lane];
    sums[static_cast<size_t>(part) * features + col] = sum;
  }
};

/// x in TF32 with its planes transposed, (blades, features, pitch), zeros beyond the batch. A block
/// has 64 rows by 64 features of a blade. The first blocks, `others`, add up the bias' gradient.
__global__ void __launch_bounds__(256)
    turn_inputs(const float* x, float* turned, int pitch, int others,
                const __grid_constant__ GradeShape of, const __grid_constant__ ColumnSums bias) {
  __shared__ float piece[64][64 + 1];
  const int block = static_cast<int>(blockIdx.x) - others, lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  wait_for_previous_kernel();
  if (block < 0) return bias.add_up(blockIdx.x);
  const int across = ceil_div(of.features, 64), down = ceil_div(pitch, 64);
  const int col0 = block % across * 64, row0 = block / across % down * 64;
  const int blade = block / (across * down);
  const float* const from = x + blade * of.plane();
#pragma unroll
  for (int r = 0; r < 64; r += 8) {
    const int row = row0 + r + warp;
#pragma unroll
    for (int j = 0; j < 64; j += 32) {
      const int col = col0 + j + lane;
      const bool inside = row < of.batch && col < of.features;
      piece[r + warp][j + lane] =
          inside ? rounded_to_tf32(from[static_cast<size_t>(row) * of.features + col]) : 0;
    }
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < 64; c += 8) {
    const int col = col0 + c + warp;
    if (col >= of.features) continue;
    float* const to = turned + (static_cast<size_t>(blade) * of.features + col) * pitch + row0;
#pragma unroll
    for (int j = 0; j < 64; j += 32) {
      if (row0 + j + lane < pitch) to[j + lane] = piece[j + lane][c + warp];
    }
  }
}

__global__ void __launch_bounds__(256) sum_columns(const __grid_constant__ ColumnSums bias) {
  bias.add_up(blockIdx.x);
}

/// dmix and dbias from partial sums, in their order. The first blocks, `others`, have dbias, each
/// other one has 1024 elements of dmix.
__global__ void __launch_bounds__(256)
    finish_linear(const float* partials, float* dmix, int splits, size_t size, int others,
                  const __grid_constant__ ColumnSums bias) {
  const int block = static_cast<int>(blockIdx.x) - others;
  wait_for_previous_kernel();
  if (block < 0) return bias.add_up(blockIdx.x);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const size_t at = block * size_t{1024} + i * 256 + threadIdx.x;
    if (at >= size) return;
    float sum = 0;
#pragma unroll 8
    for (int s = 0; s < splits; ++s) sum += partials[s * size + at];
    dmix[at] = sum;
  }
}

/// Matrices (rows, cols) in TF32, as (pitch, stride) with zeros beyond them. A thread copies an
/// element.
__global__ void __launch_bounds__(256)
    round_matrices(const float* from, float* to, int rows, int cols, int pitch, int stride,
                   size_t size) {
  const size_t at = blockIdx.x * size_t{256} + threadIdx.x;
  if (at >= size) return;
  const int col = static_cast<int>(at % stride);
  const size_t line = at / stride, matrix = line / pitch;
  const int row = static_cast<int>(line % pitch);
  const bool inside = row < rows && col < cols;
  to[at] = inside ? rounded_to_tf32(from[(matrix * rows + row) * cols + col]) : 0;
}

__global__ void __launch_bounds__(256)
    add_bias(float* y, const float* bias, int features, size_t size) {
  const size_t at = blockIdx.x * size_t{256} + threadIdx.x;
  if (at < size) y[at] += bias[at % features];
}

/// The tensors of the layer, and what backward adds to them. bias and dbias may be null.
struct LinearTensors {
  CliffordTensors of;  ///< x and y
  Memory<float> mix, bias;
  GradeShape shape;
};
struct LinearGradients {
  Memory<float> dy, dx, dmix, dbias;  ///< dx is added to

  /// dbias in two steps: partial sums, and the sum of these.
  static ColumnSums first_sums(const GradeShape& of, const float* dy, float* sums) {
    return {dy, sums, of.batch, of.features, rows_of_sum(of.batch)};
  }
  ColumnSums last_sums(const ColumnSums& first) const {
    return {first.sums, dbias.data(), first.parts(), first.features, first.parts()};
  }
  /// How many partial sums there are, in elements.
  static size_t sum_count(const GradeShape& of) {
    return size_t{1} * first_sums(of, nullptr, nullptr).parts() * of.features;
  }
  /// Launches what adds up partial sums of dmix, if there are several, and those of dbias, if it is
  /// wanted.
  void finish(const float* partials, int splits, const ColumnSums& first, bool early,
              cudaStream_t stream) const {
    const ColumnSums bias = last_sums(first);
    const int others = dbias.data() != nullptr ? bias.blocks() : 0;
    const int blocks = splits > 1 ? static_cast<int>(blocks_for(dmix.size(), 1024)) : 0;
    if (others + blocks == 0) return;
    launch_clusters_on(stream, finish_linear, 1, early, others + blocks, 256, 0, partials,
                       dmix.data(), splits, dmix.size(), others, bias);
  }
};

/// On Hopper, where features are a multiple of 4.
struct Linear {
  auto work() const {
    return [this](auto tile, int clusters) {
      return LinearForward<decltype(tile)>(all.shape, all.of.y.data(), all.bias.data(), clusters);
    };
  }
  explicit Linear(const LinearTensors& tensors) : all(tensors), plan(plan_tiles(work())) {}

  void forward() const {
    const GradeShape& shape = all.shape;
    multiply_tf32(all.of, {all.of.x, int64_t{shape.blades} * shape.batch, shape.features, 1, true},
                  {all.mix, int64_t{shape.grades} * shape.features, shape.features, 1, true}, plan,
                  work());
  }

  LinearTensors all;
  TilePlan plan;
};

struct LinearBackward {
  auto input_work() const {
    return [this](auto tile, int clusters) {
      return LinearInputs<decltype(tile)>(all.shape, d.dx.data(), clusters);
    };
  }
  auto weight_work() const {
    return [this](auto tile, int clusters) {
      return LinearWeights<decltype(tile)>(all.shape, partials.data(), splits, clusters);
    };
  }
  LinearBackward(const LinearTensors& tensors, const LinearGradients& gradients)
      : all(tensors),
        d(gradients),
        pitch(ceil_div(all.shape.batch, 4) * 4),
        turned(
            all.of.workspace.any<float>(size_t{1} * all.shape.blades * all.shape.features * pitch)),
        sums(all.of.workspace.any<float>(d.sum_count(all.shape))),
        partials(d.dmix),
        plan_inputs(plan_tiles(input_work())),
        plan_weights(plan_tiles(weight_work())) {
    splits = best_splits(plan_weights, all.shape.batch / 128, d.dmix.bytes(), [&](int shares) {
      splits = shares;
      return plan_tiles(weight_work());
    });
    if (splits > 1) {
      partials = all.of.workspace.any<float>(size_t{1} * splits * d.dmix.size());
    }
  }

  void run() const {
    const GradeShape& shape = all.shape;
    const ColumnSums bias = d.first_sums(shape, d.dy, sums);
    const int others = d.dbias.data() != nullptr ? bias.blocks() : 0;
    launch_clusters_on(all.of.stream, turn_inputs, 1, true,
                       others + ceil_div(shape.features, 64) * ceil_div(pitch, 64) * shape.blades,
                       256, 0, static_cast<const float*>(all.of.x), turned.data(), pitch, others,
                       shape, bias);
    multiply_tf32(all.of, {d.dy, shape.batch, shape.features, shape.blades},
                  {turned, int64_t{shape.blades} * shape.features, pitch}, plan_weights,
                  weight_work());
    multiply_tf32(all.of, {all.mix, shape.features, shape.features, shape.grades},
                  {d.dy, int64_t{shape.blades} * shape.batch, shape.features, 1, true}, plan_inputs,
                  input_work());
    d.finish(partials, splits, bias, true, all.of.stream);
  }

  LinearTensors all;
  LinearGradients d;
  int pitch, splits = 1;
  Memory<float> turned, sums, partials;
  TilePlan plan_inputs, plan_weights;
};

/// Of any number of features, from compute capability 8.0 on.
struct PortableLinear {
  explicit PortableLinear(const LinearTensors& tensors)
      : all(tensors),
        pitch(ceil_div(all.shape.batch, 32) * 32),
        stride(ceil_div(all.shape.features, 32) * 32),
        inputs(all.of.workspace.any<float>(blades_of())),
        weights(all.of.workspace.any<float>(size_t{1} * all.shape.grades * stride * stride)) {}

  size_t blades_of() const { return size_t{1} * all.shape.blades * pitch * stride; }
  void round(const float* from, float* to, int rows, int rows_up, size_t size) const {
    round_matrices<<<static_cast<unsigned>(blocks_for(size, 256)), 256, 0, all.of.stream>>>(
        from, to, rows, all.shape.features, rows_up, stride, size);
  }
  void prepare() const {
    round(all.of.x, inputs, all.shape.batch, pitch, inputs.size());
    round(all.mix, weights, all.shape.features, stride, weights.size());
  }
  /// A product of matrices of the blades and of the grades, or of those of two kinds of blades.
  MixProduct product(const float* a, const float* b, size_t b_size, float* to, bool adds) const {
    const GradeShape& shape = all.shape;
    MixProduct result{.a = {a, static_cast<size_t>(pitch) * stride, stride},
                      .b = {b, b_size, stride},
                      .to = to,
                      .to_size = shape.plane(),
                      .to_share = 0,
                      .to_stride = shape.features,
                      .rows = shape.batch,
                      .cols = shape.features,
                      .depth = stride / kMixDepth,
                      .shares = 1,
                      .adds = adds,
                      .of = {}};
    for (int k = 0; k < shape.blades; ++k) {
      const auto blade = static_cast<int16_t>(k);
      result.of.pairs[k] = {blade, static_cast<int16_t>(shape.grade(k))};
      result.of.sums[k] = {blade, 1, blade};
    }
    result.of.count = shape.blades;
    return result;
  }
  size_t matrix() const { return static_cast<size_t>(stride) * stride; }
  void forward() const {
    prepare();
    MixProduct mixed = product(inputs, weights, matrix(), all.of.y, false);
    launch_mix<Beside::k, Beside::k>(mixed, all.of.stream);
    const float* const bias = all.bias.data();
    const size_t size = all.shape.plane();
    if (bias == nullptr) return;
    add_bias<<<static_cast<unsigned>(blocks_for(size, 256)), 256, 0, all.of.stream>>>(
        all.of.y.data(), bias, all.shape.features, size);
  }

  LinearTensors all;
  int pitch, stride;
  Memory<float> inputs, weights;
};

struct PortableLinearBackward {
  PortableLinearBackward(const LinearTensors& tensors, const LinearGradients& gradients)
      : linear(tensors),
        d(gradients),
        dy(workspace().any<float>(linear.blades_of())),
        sums(workspace().any<float>(d.sum_count(shape()))),
        shares(shares_of()),
        partials(shares > 1 ? workspace().any<float>(size_t{1} * shares * d.dmix.size()) : d.dmix) {
  }

  const Workspace& workspace() const { return linear.all.of.workspace; }
  const GradeShape& shape() const { return linear.all.shape; }
  int shares_of() const {
    const int side = ceil_div(shape().features, 128), tiles = shape().grades * side * side;
    return std::clamp(std::min(2 * multiprocessors() / tiles, linear.pitch / 256), 1, 16);
  }
  void run() const {
    const cudaStream_t stream = linear.all.of.stream;
    linear.prepare();
    linear.round(d.dy, dy, shape().batch, linear.pitch, dy.size());
    MixProduct to_inputs = linear.product(dy, linear.weights, linear.matrix(), d.dx, true);
    launch_mix<Beside::k, Beside::results>(to_inputs, stream);
    MixProduct to_weights = linear.product(
        dy, linear.inputs, static_cast<size_t>(linear.pitch) * linear.stride, partials, false);
    to_weights.to_size = shape().matrix();
    to_weights.to_share = d.dmix.size();
    to_weights.rows = shape().features;
    to_weights.depth = linear.pitch / kMixDepth;
    to_weights.shares = shares;
    to_weights.of.count = shape().grades;
    for (int k = 0; k < shape().blades; ++k) {
      to_weights.of.pairs[k].b = static_cast<int16_t>(k);
    }
    for (int c = 0; c < shape().grades; ++c) {
      const int begin = shape().first[c], end = shape().first[c + 1];
      to_weights.of.sums[c] = {static_cast<int16_t>(begin), static_cast<int16_t>(end - begin),
                               static_cast<int16_t>(c)};
    }
    launch_mix<Beside::results, Beside::results>(to_weights, stream);
    const ColumnSums bias = d.first_sums(shape(), d.dy, sums);
    if (d.dbias.data() != nullptr) sum_columns<<<bias.blocks(), 256, 0, stream>>>(bias);
    d.finish(partials, shares, bias, false, stream);
  }

  PortableLinear linear;
  LinearGradients d;
  Memory<float> dy, sums;
  int shares;
  Memory<float> partials;
};

}  // namespace operators::clifford_connected
