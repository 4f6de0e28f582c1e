// What stands around the products of the fully connected layer on Hopper: planes, gradients of
// results and weights in memory, in TF32, and the gradients of x and y from those of the planes.
// Right factors have k contiguous (common/tf32_product.cuh); that is why dz is transposed: it is
// one for the weights' gradients. For the planes' gradients it is a left one, turned.
//
// A chunk of the batch has `rows` rows. Matrices have rows of `pitch` elements for the chunk (rows
// rounded up to 128), `stride` for features (likewise):
//
//     planes  (44 planes, pitch, stride), in the order of Order
//     dz      (blades, stride, pitch)
//     w       (20, stride, stride) in the order of Order: transposed; for backward also as it is
#pragma once

#include "common/connected.cuh"
#include "common/tf32_product.cuh"

/// Some rows of the batch, from `first` on.
struct Chunk {
  Layer layer;
  int first, rows, pitch, stride;
  __host__ __device__ size_t matrix() const { return static_cast<size_t>(pitch) * stride; }
};

/// The weights in TF32, in the order of Order: `turned` (slots, out feature, in feature) and,
/// unless it is null, `plain` (slots, in feature, out feature). Zeros beyond the features. Rows of
/// both are in the order of place_of_column(), and so are out features of `plain`, as those of dz.
/// A block of 128 threads has 32 rows and 128 columns of a matrix, or 32 where there are few.
template <typename A>
struct WeightTurner {
  using Piece = float[32][128 + 1];
  const float* w;
  float *turned, *plain;
  int features, stride;
  Order<A> order;

  __host__ __device__ int width() const { return stride < 512 ? 32 : 128; }
  __host__ __device__ int blocks() const {
    return A::kTriples * (stride / 32) * (stride / width());
  }
  __device__ __forceinline__ void turn(int block, Piece& piece) const {
    if (width() == 32) return turn<32>(block, piece);
    turn<128>(block, piece);
  }
  template <int kWidth>
  __device__ __forceinline__ void turn(int block, Piece& piece) const {
    const int across = stride / kWidth, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row0 = block / across % (stride / 32) * 32, col0 = block % across * kWidth;
    const size_t slot = block / (across * (stride / 32)), t = order.triple_of[slot];
#pragma unroll
    for (int i = warp; i < 32; i += 4) {
#pragma unroll
      for (int j = lane; j < kWidth; j += 32) {
        const int row = row0 + i, col = col0 + j;
        const bool inside = row < features && col < features;
        piece[i][j] = inside ? rounded_to_tf32(w[(t * features + row) * features + col]) : 0;
      }
    }
    __syncthreads();
    for (int i = warp; plain != nullptr && i < 32; i += 4) {
      float* const to = plain + (slot * stride + place_of_column(row0 + i)) * stride + col0;
#pragma unroll
      for (int j = lane; j < kWidth; j += 32) to[place_of_column(j)] = piece[i][j];
    }
#pragma unroll 8
    for (int j = warp; j < kWidth; j += 4) {
      turned[(slot * stride + place_of_column(col0 + j)) * stride + row0 + lane] = piece[lane][j];
    }
  }
};

/// Makes the planes of a chunk. A unit is what a warp makes at a time: all planes of a row's 128
/// features, 4 of them a lane. A part is 128 units: 128 rows of 128 features. Parts come in groups
/// of `together` rows of parts, in a group column by column. The first `before` units, of whole
/// rows, are made before the product, the others beside it; for these each part has a counter of
/// the units that are there.
template <typename A>
struct PlaneMaker {
  const float *x, *y;
  float* planes;
  Chunk chunk;
  int together, before;

  __host__ __device__ int slices() const { return chunk.stride / 128; }
  __host__ __device__ int row_blocks() const { return chunk.pitch / 128; }
  __host__ __device__ int parts() const { return slices() * row_blocks(); }
  __host__ __device__ int units() const { return parts() * 128; }
  /// The first part of a row of parts, and how many on its next one is.
  __device__ int first_part(int block) const {
    return block / together * together * slices() + block % together;
  }
  __device__ int next_part(int block) const {
    return min(together, row_blocks() - block / together * together);
  }

  /// Unit u of those before the product. There nobody waits for a part, and rows are whole:
  /// neighbouring warps write what lies together.
  __device__ __forceinline__ void make_before(int u) const {
    if (u >= before) return;
    Unit unit = load(u / slices(), u % slices());
    make(unit);
  }
  /// The other units that are this warp's, of `warps`. A warp reports a unit only when it has begun
  /// to load the next one's x and y: it waits for its writes and those loads at the same time. The
  /// fence is for the copy engine, which will read the planes.
  __device__ __forceinline__ void make_beside(int warp, int warps, const Progress& progress) const {
    const auto tell = [&](int part) {
#if HOPPER_CODE
      global_fence();
#endif
      __syncwarp();
      if (threadIdx.x % 32 == 0) progress.add(part);
    };
    int last = -1;
    for (int u = before + warp; u < units(); u += warps) {
      const int group = u / (together * slices() * 128), rest = u % (together * slices() * 128);
      const int height = next_part(group * together),
                block = group * together + rest / 128 % height;
      Unit unit = load(block * 128 + rest % 128, rest / (height * 128));
      if (last >= 0) tell(last);
      make(unit);
      last = u / 128;
    }
    if (last >= 0) tell(last);
  }

 private:
  struct Unit {
    Multivectors<A, 4> left, right;
    float* to;
  };
  __device__ __forceinline__ Unit load(int row, int slice) const {
    const int f = slice * 128 + threadIdx.x % 32 * 4;
    const int n = row < chunk.rows ? chunk.first + row : chunk.layer.batch;
    return {load_neighbours<A, 4>(x, n, f, chunk.layer),
            load_neighbours<A, 4>(y, n, f, chunk.layer),
            planes + static_cast<size_t>(row) * chunk.stride + f};
  }
  __device__ __forceinline__ void make(Unit& unit) const {
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

/// What comes before the product: the first `plane_blocks` blocks make planes, the others turn
/// weights.
template <typename A>
__global__ void __launch_bounds__(128, A::kBlades > 4 ? 5 : 8)
    make_ready(const __grid_constant__ PlaneMaker<A> maker, int plane_blocks,
               const __grid_constant__ WeightTurner<A> turner, unsigned* counters,
               int counter_count) {
  __shared__ typename WeightTurner<A>::Piece piece;
  const int block = blockIdx.x;
  wait_for_previous_kernel();
  if (block < plane_blocks) {
    maker.make_before(block * 4 + threadIdx.x / 32);
  } else {
    turner.turn(block - plane_blocks, piece);
  }
  if (block == 0) {
    for (int i = threadIdx.x; i < counter_count; i += 128) counters[i] = 0;
  }
}

/// out = z / rms(z) of a row and a grade c, by a warp, in place; keeps 1 / rms.
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
  Sums<1> squares = {};
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

/// The norm beside the product, of all grades but the first and the last one, whose tiles come at
/// the product's end: as soon as a tile's rows are complete, a warp a row.
template <typename A>
struct GradeNormalizer {
  static constexpr int kCount = A::kGrades - 2;
  float *out, *inverses;
  Chunk chunk;
  int tile_rows, stores;  ///< stores: calls of stored() for tile_rows rows of a blade
  Progress complete;      ///< for each tile_rows and grade

  /// A warpgroup calls this when it has stored its part of a tile.
  __device__ void stored(int row, int grade, int barrier) const {
    if (!chunk.layer.normed || grade == 0 || grade > kCount) return;
#if HOPPER_CODE
    named_barrier(barrier, 128);
#endif
    if (threadIdx.x % 128 == 0) complete.add(row / tile_rows * kCount + grade - 1);
  }
  __device__ void normalize(int warp, int warps) const {
    if (!chunk.layer.normed) return;
    if (chunk.layer.features % 4 == 0) return normalize<4>(warp, warps);
    normalize<1>(warp, warps);
  }

 private:
  template <int W>
  __device__ __forceinline__ void normalize(int warp, int warps) const {
    for (int u = warp; u < count_tiles(chunk.rows, tile_rows) * kCount * tile_rows; u += warps) {
      const int tile = u / (kCount * tile_rows), i = u / tile_rows % kCount;
      const int row = tile * tile_rows + u % tile_rows;
      if (row >= chunk.rows) continue;
      unroll<1, kCount + 1>([&](auto c) {
        if (i + 1 != c) return;
        if (threadIdx.x % 32 == 0) {
          complete.wait(tile * kCount + i, static_cast<unsigned>(stores) * A::blades_of(c));
        }
        __syncwarp();
        normalize_grade_of_row<A, c, W>(out, inverses, chunk.first + row, chunk.layer);
      });
    }
  }
};

/// The norm of the first and the last grade, of one blade each; a warp has one of them of a row.
/// The last rows come first, which are still in the cache.
template <typename A, int W>
__global__ void __launch_bounds__(128) normalize_ends(float* out, float* inverses, Layer layer) {
  const int u = blockIdx.x * 4 + threadIdx.x / 32, n = layer.batch - 1 - u / 2;
  if (n < 0) return;
  wait_for_previous_kernel();
  if (u % 2 == 0) {
    normalize_grade_of_row<A, 0, W>(out, inverses, n, layer);
  } else {
    normalize_grade_of_row<A, A::kGrades - 1, W>(out, inverses, n, layer);
  }
}

constexpr int kResultRows = 8, kResultThreads = 512;
/// products: each warp's sum of d_out out. factors: each row's r, and r mean(d_out out).
struct ResultFactors {
  float products[kResultThreads / 32];
  float2 factors[kResultRows];
};
/// dz of 8 rows and one grade c a block, in TF32, transposed: with out = r z, dz = r d_out - r out
/// mean(d_out out). Two warps add up a row, W neighbours at a time; then a thread has 8 rows of a
/// feature, which is a whole sector of dz. What is read again is still in the cache.
template <typename A, int c, int W>
__device__ __forceinline__ void turn_grade(const float* out, const float* d_out,
                                           const float* inverses, float* turned,
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
  Sums<1> product = {};
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
      float* const to = turned + static_cast<size_t>(place) * chunk.pitch + row0 + 4 * odd;
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
                          float* turned, Chunk chunk) {
  __shared__ ResultFactors shared;
  wait_for_previous_kernel();
  unroll<0, A::kGrades>([&](auto c) {
    if (static_cast<int>(blockIdx.y) == c) {
      turn_grade<A, c, W>(out, d_out, inverses, turned, shared, chunk);
    }
  });
}

/// From the planes' gradients d those of x and y. With x' = x gate(x_0), y' likewise, g and h the
/// gates: S_i = sum of sign y_j d, dx_i = g h S_i, and dx_0 has gate'(x_0) h (sum of x_i S_i)
/// besides; dy likewise.
template <typename A>
struct PlaneTaker {
  const float *x, *y, *d;
  float *dx, *dy;
  Chunk chunk;

  /// W features of a row, from f on.
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
        Multivectors<A, W> part;  // only one grade
        unroll<A::first(c), A::first(c + 1)>([&](auto k) {
          part.blade[k] = *reinterpret_cast<const Pack<W>*>(from);
          from += chunk.matrix();
        });
        unroll<A::first(grades.x), A::first(grades.x + 1)>(
            [&](auto i) { add(of_x.blade[i], sum_terms<A, Of::x, t, i>(part, right)); });
        unroll<A::first(grades.y), A::first(grades.y + 1)>(
            [&](auto j) { add(of_y.blade[j], sum_terms<A, Of::y, t, j>(part, left)); });
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
