// What every kernel of the fully connected product knows when it is compiled: the planes of each
// grade triple, and how the triples are divided among blocks. Matrices of weights in TF32.
#pragma once

#include "common/algebra.cuh"
#include "common/async_copy.cuh"
#include "common/clifford.cuh"
#include "common/tf32_tiles.cuh"

/// Triple t makes a plane P_t,k (batch, features) for each blade k of its result's grade. Slots are
/// triples in the order of their results' grades; planes are numbered by slot, then by blade.
template <typename A>
struct Order {
  int triple_of[A::kTriples] = {};  ///< a slot
  /// The first slot, plane and blade of each grade of the result, and how many there are.
  int slot[A::kGrades + 1] = {}, plane[A::kGrades + 1] = {}, blade[A::kGrades + 1] = {};

  constexpr Order() {
    for (int c = 0; c < A::kGrades; ++c) {
      slot[c + 1] = slot[c];
      blade[c + 1] = A::kTables.first[c + 1];
      for (int t = 0; t < A::kTriples; ++t) {
        if (A::kTables.triple[t].result == c) triple_of[slot[c + 1]++] = t;
      }
      plane[c + 1] = plane[c] + (slot[c + 1] - slot[c]) * (blade[c + 1] - blade[c]);
    }
  }
  /// The grade with the given slot, plane or blade, of the array of that name.
  __device__ static int grade_of(const int (&first)[A::kGrades + 1], int number) {
    int c = 0;
    while (number >= first[c + 1]) ++c;
    return c;
  }

  /// At compile time: how many triples have a result of this grade; the i-th of them.
  __host__ __device__ static constexpr int triples(int grade) {
    int sum = 0;
    for (int t = 0; t < A::kTriples; ++t) sum += A::triple(t).result == grade;
    return sum;
  }
  __host__ __device__ static constexpr int triple(int grade, int i) {
    for (int t = 0; t < A::kTriples; ++t) {
      if (A::triple(t).result == grade && i-- == 0) return t;
    }
    return -1;
  }
};
template <typename A, int grade>
inline constexpr int kFirstPlane = Order<A>().plane[grade];
template <typename A>
inline constexpr int kPlanes = kFirstPlane<A, A::kGrades>;
static_assert(kPlanes<Cl<3, 0, 0>> == 44 && kPlanes<Cl<2, 0, 0>> == 14);

/// A block works on four blades of the result: in 2-D these are all, in 3-D grades 0 and 1, or 2
/// and 3. In either algebra 10 triples lead to them. In a Part triples are in the order of their
/// results' grades.
template <typename A, int part>
struct Part {
  static_assert(A::kBlades % 4 == 0);
  static constexpr int kFirstBlade = 4 * part, kBlades = 4;
  static constexpr int kFirstGrade = A::grade(kFirstBlade);
  static constexpr int kEndGrade = A::grade(kFirstBlade + kBlades - 1) + 1;
  static_assert(A::first(kFirstGrade) == kFirstBlade && A::first(kEndGrade) == kFirstBlade + 4);

  __host__ __device__ static constexpr int triples(int grade) { return Order<A>::triples(grade); }
  __host__ __device__ static constexpr int triple(int grade, int i) {
    return Order<A>::triple(grade, i);
  }
  /// The part's triples before those of a grade, and its planes before those of the i-th of them.
  __host__ __device__ static constexpr int before(int grade) {
    int sum = 0;
    for (int c = kFirstGrade; c < grade; ++c) sum += triples(c);
    return sum;
  }
  __host__ __device__ static constexpr int plane(int grade, int i) {
    int sum = i * A::blades_of(grade);
    for (int c = kFirstGrade; c < grade; ++c) sum += triples(c) * A::blades_of(c);
    return sum;
  }
  static constexpr int kTriples = before(kEndGrade);
  static constexpr int kPlanes = plane(kEndGrade - 1, triples(kEndGrade - 1));

  /// visit(grade, i) with constants, for each of the part's triples.
  template <typename Visit>
  __device__ __forceinline__ static void for_triples(Visit visit) {
    unroll<kFirstGrade, kEndGrade>(
        [&](auto c) { unroll<0, triples(c)>([&](auto i) { visit(c, i); }); });
  }
};
template <typename A>
inline constexpr int kParts = A::kBlades / 4;

/// x becomes gate(x_0) gate(y_0) x: then x y is x' y'.
template <typename A, int W>
__device__ __forceinline__ void apply_gates(Multivectors<A, W>& x, const Multivectors<A, W>& y) {
  const Pack<W> factor = Gates<W>(x.blade[0], y.blade[0]).product();
  unroll<0, A::kBlades>([&](auto i) {
#pragma unroll
    for (int e = 0; e < W; ++e) x.blade[i].v[e] *= factor.v[e];
  });
}

// Of a row and feature that is there; zeros of others.
template <typename A>
__device__ __forceinline__ Multivectors<A, 1> load_inside(const float* from, int n, int f,
                                                          const Layer& layer) {
  if (n >= layer.batch || f >= layer.features) return {};
  return load<A>(from + static_cast<size_t>(n) * layer.features + f, layer.plane());
}

/// How many tiles of so many rows or columns `count` takes.
__host__ __device__ constexpr int count_tiles(int count, int tile) {
  return (count + tile - 1) / tile;
}

__device__ inline float rounded_to_tf32(float value) { return __uint_as_float(to_tf32(value)); }

// W neighbouring features of all blades, 0 where there is nothing.
template <typename A, int W>
__device__ __forceinline__ Multivectors<A, W> load_neighbours(const float* from, int n, int f,
                                                              const Layer& layer) {
  Multivectors<A, W> result = {};
  if (n >= layer.batch || f >= layer.features) return result;
  const float* at = from + static_cast<size_t>(n) * layer.features + f;
  if (layer.features % W == 0) {
    unroll<0, A::kBlades>([&](auto k) {
      result.blade[k] = *reinterpret_cast<const Pack<W>*>(at + k * layer.plane());
    });
  } else {
    unroll<0, A::kBlades>([&](auto k) {
#pragma unroll
      for (int e = 0; e < W; ++e) {
        if (f + e < layer.features) result.blade[k].v[e] = at[k * layer.plane() + e];
      }
    });
  }
  return result;
}

// The packs of a plane, in TF32.
template <int W>
__device__ __forceinline__ void store_rounded(float* to, Pack<W> pack) {
#pragma unroll
  for (int e = 0; e < W; ++e) pack.v[e] = rounded_to_tf32(pack.v[e]);
  *reinterpret_cast<Pack<W>*>(to) = pack;
}

/// Matrices of weights, TF32, with `stride` rows and columns, a multiple of 64 that is at least
/// `features`; what is beyond these is 0. A thread copies an element.
__global__ void round_weights(const float* w, float* to, int features, int stride) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (col >= stride) return;
  const size_t t = blockIdx.z;
  const bool inside = row < features && col < features;
  to[(t * stride + row) * stride + col] =
      inside ? rounded_to_tf32(w[(t * features + row) * features + col]) : 0;
}

/// out = z / rms(z) for each grade, in place; keeps 1 / rms (grades, batch) for backward. A block a
/// row, W features a thread at a time; it reads the row twice, the second time from a cache.
template <typename A, int W>
__global__ void normalize_rows(float* out, float* inverses, Layer layer) {
  __shared__ Sums<A::kGrades> partials[kMaxWarps];
  const size_t row = static_cast<size_t>(blockIdx.x) * layer.features, plane = layer.plane();
  const auto pack = [&](int k, int f) -> Pack<W>& {
    return *reinterpret_cast<Pack<W>*>(out + k * plane + row + f);
  };
  Sums<A::kGrades> squares = {};
  for (int f = threadIdx.x * W; f < layer.features; f += blockDim.x * W) {
    Multivectors<A, W> z;
    unroll<0, A::kBlades>([&](auto k) { z.blade[k] = pack(k, f); });
    add_squares(z, squares);
  }
  add_up_row(squares, partials, blockDim.x / 32);
  unroll<0, A::kGrades>([&](auto c) {
    const float r = inverse_rms(squares.value[c], layer);
    if (threadIdx.x == 0) inverses[static_cast<size_t>(c) * layer.batch + blockIdx.x] = r;
    squares.value[c] = r;
  });
  for (int f = threadIdx.x * W; f < layer.features; f += blockDim.x * W) {
    unroll<0, A::kBlades>([&](auto k) {
      Pack<W> z = pack(k, f);
#pragma unroll
      for (int e = 0; e < W; ++e) z.v[e] *= squares.value[A::grade(k)];
      pack(k, f) = z;
    });
  }
}

/// dz of rows `first` and on, one a block, in TF32, to rows of `stride` elements: with out = r z,
/// dz = r d_out - r out mean(d_out out). `pitch` elements from blade to blade. Zeros beyond the
/// features, and in rows beyond the batch.
template <typename A>
__global__ void result_gradients(const float* out, const float* d_out, const float* inverses,
                                 float* dz, int first, int stride, size_t pitch, Layer layer) {
  __shared__ Sums<A::kGrades> partials[kMaxWarps];
  const int n = first + blockIdx.x;
  const size_t row = static_cast<size_t>(n) * layer.features, plane = layer.plane();
  Sums<A::kGrades> r = {}, products = {};
  if (n < layer.batch && layer.normed) {
    for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
      unroll<0, A::kBlades>([&](auto k) {
        products.value[A::grade(k)] += out[k * plane + row + f] * d_out[k * plane + row + f];
      });
    }
    unroll<0, A::kGrades>(
        [&](auto c) { r.value[c] = inverses[static_cast<size_t>(c) * layer.batch + n]; });
  }
  add_up_row(products, partials, blockDim.x / 32);
  for (int f = threadIdx.x; f < stride; f += blockDim.x) {
    const bool inside = n < layer.batch && f < layer.features;
    unroll<0, A::kBlades>([&](auto k) {
      constexpr int c = A::grade(k);
      float value = inside ? d_out[k * plane + row + f] : 0;
      if (inside && layer.normed) {
        const float mean = products.value[c] * layer.inverse_features;
        value = r.value[c] * (value - out[k * plane + row + f] * mean);
      }
      dz[k * pitch + static_cast<size_t>(blockIdx.x) * stride + f] = rounded_to_tf32(value);
    });
  }
}

/// dw = the sum of `count` partial sums, in their order; a thread an element.
__global__ void sum_weight_gradients(const float* partials, float* dw, int count, size_t size) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= size) return;
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += partials[i * size + at];
  dw[at] = sum;
}

// Packs of W neighbouring features of one grade's blades, `pitch` apart; aligned to their size.
template <int grade, typename A, int W>
__device__ __forceinline__ void load_packs(Multivectors<A, W>& to, const float* from,
                                           size_t pitch) {
  unroll<A::first(grade), A::first(grade + 1)>(
      [&](auto k) { to.blade[k] = *reinterpret_cast<const Pack<W>*>(from + k * pitch); });
}
template <int grade, typename A, int W>
__device__ __forceinline__ void store_packs(float* to, const Multivectors<A, W>& from,
                                            size_t pitch) {
  unroll<A::first(grade), A::first(grade + 1)>(
      [&](auto k) { *reinterpret_cast<Pack<W>*>(to + k * pitch) = from.blade[k]; });
}

// What triple t's planes add to the sums of x and y, in memory where dx and dy will be, at W
// neighbouring features. The sums of a grade start with its first triple. d: the planes' gradients
// at the same place, `pitch` from plane to plane. All loads come before the first store.
template <typename A, int t, int W>
__device__ __forceinline__ void add_plane_gradients(const float* d, int pitch, const float* x,
                                                    const float* y, float* dx, float* dy,
                                                    size_t plane) {
  constexpr auto grades = A::triple(t);
  constexpr bool is_first_of_x = A::triple(t == 0 ? 0 : t - 1).x != grades.x || t == 0;
  constexpr bool is_first_of_y = [] {
    for (int earlier = 0; earlier < t; ++earlier) {
      if (A::triple(earlier).y == A::triple(t).y) return false;
    }
    return true;
  }();
  constexpr int first = A::first(grades.result);
  Multivectors<A, W> left, right, part, sum_x, sum_y;  // only one grade of each
  load_packs<grades.x>(left, x, plane);
  load_packs<grades.y>(right, y, plane);
  if constexpr (!is_first_of_x) load_packs<grades.x>(sum_x, dx, plane);
  if constexpr (!is_first_of_y) load_packs<grades.y>(sum_y, dy, plane);
  load_packs<grades.result>(part, d - first * pitch, pitch);
  unroll<A::first(grades.x), A::first(grades.x + 1)>([&](auto i) {
    if constexpr (is_first_of_x) sum_x.blade[i] = empty_sum<W>();
    add(sum_x.blade[i], sum_terms<A, Of::x, t, i>(part, right));
  });
  unroll<A::first(grades.y), A::first(grades.y + 1)>([&](auto j) {
    if constexpr (is_first_of_y) sum_y.blade[j] = empty_sum<W>();
    add(sum_y.blade[j], sum_terms<A, Of::y, t, j>(part, left));
  });
  store_packs<grades.x>(dx, sum_x, plane);
  store_packs<grades.y>(dy, sum_y, plane);
}

// From the sums S_i of sign y_j d and T_j of sign x_i d, in place: with the gates g and h of x and
// y, dx_i = g h S_i, and dx_0 has gate'(x_0) h sum of x_i S_i besides; dy likewise.
template <typename A>
__device__ __forceinline__ void finish_gradients(const float* x, const float* y, float* dx,
                                                 float* dy, size_t plane) {
  const Multivectors<A, 1> left = load<A>(x, plane), right = load<A>(y, plane);
  const Multivectors<A, 1> sum_x = load<A>(dx, plane), sum_y = load<A>(dy, plane);
  const Gates<1> gates(left.blade[0], right.blade[0]);
  const float both = gates.product().v[0];
  float along_x = 0, along_y = 0;
  unroll<0, A::kBlades>([&](auto i) {
    along_x += left.blade[i].v[0] * sum_x.blade[i].v[0];
    along_y += right.blade[i].v[0] * sum_y.blade[i].v[0];
  });
  along_x *= gate_slope(left.blade[0].v[0]) * gates.y.v[0];
  along_y *= gate_slope(right.blade[0].v[0]) * gates.x.v[0];
  unroll<0, A::kBlades>([&](auto i) {
    dx[i * plane] = both * sum_x.blade[i].v[0] + (i == 0 ? along_x : 0);
    dy[i * plane] = both * sum_y.blade[i].v[0] + (i == 0 ? along_y : 0);
  });
}

// Weight gradients: a block has all triples of one grade c of the result, and each of its two
// groups of warps has half of them, up to 3.
template <typename A>
struct WeightParts {
  __host__ __device__ static constexpr int triples(int c) { return Order<A>::triples(c); }
  __host__ __device__ static constexpr int half(int c) { return (triples(c) + 1) / 2; }
  __host__ __device__ static constexpr int triple(int c, int i) { return Order<A>::triple(c, i); }
  // The most planes of a grade.
  static constexpr int most_planes() {
    int most = 0;
    for (int c = 0; c < A::kGrades; ++c) {
      most = triples(c) * A::blades_of(c) > most ? triples(c) * A::blades_of(c) : most;
    }
    return most;
  }
};

// dz of some rows of the batch, `first` to `first` + `rows` - 1: blades `pitch` elements apart,
// rows `stride`, in whole tiles of 64 rows and 128 columns, in TF32; zeros where there is nothing.
struct ResultGradients {
  const float* data;
  int first, rows, stride;
  size_t pitch;
};

constexpr int kGradientDepth = 32, kGradientCols = 2 * kTile, kGradientStride = kGradientCols + 8;
constexpr int kGradientTileBytes = 3 * kTile * kGradientStride * sizeof(float);

// The tile (64 rows, 128 features, half of them each group of warps) of dz_k w^T for the kBlades
// blades k from `dz` on, to shared memory, kGradientStride apart. Steps take 32 features of the
// result, one while the next one comes.
template <int kBlades>
__device__ __forceinline__ void plane_gradients(const float* dz, const float* w,
                                                const ResultGradients& of, int features,
                                                float* shared) {
  constexpr int kStage = (kBlades + 2) * kTile * kGradientDepth;
  static_assert(2 * kStage * sizeof(float) <= kGradientTileBytes);
  const TileWarp warp;
  const auto fetch = [&](int step) {
    float* const to = shared + step % 2 * kStage;
#pragma unroll
    for (int i = threadIdx.x; i < (kBlades + 2) * kTile * 8; i += kPairThreads) {
      const int row = i / 8, piece = i % 8, blade = row / kTile;
      const float* from = blade < kBlades
                              ? dz + blade * of.pitch
                              : w + static_cast<size_t>(blade - kBlades) * kTile * of.stride;
      copy_async<16>(
          to + TileWarp::place<8>(row, piece),
          from + static_cast<size_t>(row % kTile) * of.stride + step * kGradientDepth + piece * 4,
          true);
    }
    copy_async_commit();
  };
  TileSum sums[kBlades] = {};
  const int steps = (features + kGradientDepth - 1) / kGradientDepth;
  fetch(0);
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) {
      fetch(step + 1);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    const float* tile = shared + step % 2 * kStage;
#pragma unroll
    for (int k = 0; k < kGradientDepth; k += 8) {
      unsigned b[4][2];
      warp.load_right_transposed<8>(b, tile + (kBlades + warp.group) * kTile * kGradientDepth, k);
#pragma unroll
      for (int blade = 0; blade < kBlades; ++blade) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          unsigned a[4];
          warp.load_left<8>(a, tile + blade * kTile * kGradientDepth, m, k);
          TileWarp::multiply(sums[blade][m], a, b);
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int blade = 0; blade < kBlades; ++blade) {
    warp.for_results(sums[blade], [&](int row, int col, float value) {
      shared[(blade * kTile + row) * kGradientStride + warp.group * kTile + col] = value;
    });
  }
  __syncthreads();
}
