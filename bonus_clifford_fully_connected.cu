// Bonus: products of multivectors, mixed by matrices of weights
//
//     x' = x gate(x_0), y' = y gate(y_0)                        gates and norm as in lesson 10
//     P_t,k = sum over blades i of grade a, j of grade b with e_i e_j = sign e_k of  sign x'_i y'_j
//     z_k = sum over grade triples t = (a, grade of k, b) of  P_t,k w[t]
//     out = per grade c: z_c / sqrt(mean over features of |z_c|^2 + 1e-6)
//
//     x, y, out (2^n blades, batch, features) and w (triples, features, features): fp32, row-major
//
// Lesson 10's layer has a weight per feature and grade triple; here it is a matrix, which mixes the
// features: the fully connected layer of a Clifford network. Its 20 triples in 3-D (10 in 2-D) make
// 44 planes P (14), each (batch, features), and each plane is the left operand of a product.
//
// What is computed: 88 batch features^2 operations in 3-D (28 in 2-D), on tensor cores, in TF32.
// What moves: 24 planes (12), if the 44 are never written. Whoever writes them moves 44 planes out
// and 44 back. So the products are the limit, and the planes have to be made on the way in: lesson
// 3's product with a prologue that computes the left operand from x and y. The planes of one triple
// have the same right operand, so they are rows of one product; and one read of x and y serves all
// triples.
//
//     unfused          planes in memory, a product of cuBLAS for each triple, norms; what stands in
//                      common/connected_unfused.cuh
//     planes in tiles  a block makes its planes in shared memory and multiplies them, mma.sync
//     two crews        on Hopper: two warpgroups make planes while two others multiply, with wgmma
//
// Backward needs, of the gradients dz: the planes' gradients dz_k w[t]^T, which it multiplies with y
// and x and adds up as soon as a tile of them is done, and dw[t] = sum over k of P_t,k^T dz_k, a
// product whose left operand is made on the way in again. No plane ever is in memory. What is, of
// whatever batch: the weights once more, in TF32, and dz of as many rows as fit into 64 MiB; and,
// per row, what divided each of its grades (16 bytes, next to a row's 32 features).
//
// The algebra is lesson 10's, common/algebra.cuh; which triples and planes a block has is worked
// out in common/connected.cuh, when this is compiled.

#include "common/algebra.cuh"
#include "common/async_copy.cuh"
#include "common/clifford.cuh"
#include "common/clifford.h"
#include "common/connected.cuh"
#include "common/connected_unfused.cuh"
#include "common/hopper.cuh"

// ---- Planes in tiles ----------------------------------------------------------------------------

// Four warps own a tile of 64 rows by 64 columns, each 32 by 32 of it, in the fragments of
// mma_m16n8k8_tf32: lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
constexpr int kTile = 64, kTileThreads = 128;
constexpr int kRowStride = kTile + 8;  // of tiles read by columns: neighbours in different banks
using TileSum = float[2][4][4];

struct TileWarp {
  int lane = threadIdx.x % 32, row = threadIdx.x / 64 * 32, col = threadIdx.x / 32 % 2 * 32;

  // A left operand of 16 x 8, from rows of kPieces pieces of 4 floats that change places so that 8
  // rows are in different banks. Lanes pass the addresses of 16 rows, each in two halves.
  template <int kPieces>
  __device__ static int place(int row, int piece) {
    const int turn = kPieces == 2 ? row / 4 % 2 : row % 8;
    return (row * kPieces + (piece ^ turn)) * 4;
  }
  template <int kPieces>
  __device__ void load_left(unsigned (&a)[4], const float* tile, int m, int k) const {
    ldmatrix_x4(a, tile + place<kPieces>(row + 16 * m + lane % 16, k / 4 + lane / 16));
  }
  // The right operand's 4 fragments of 8 columns, from memory that has it transposed.
  template <int kPieces>
  __device__ void load_right_transposed(unsigned (&b)[4][2], const float* tile, int k) const {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      unsigned four[4];
      const int at = col + 8 * j + lane % 8 + lane / 16 * 8;
      ldmatrix_x4(four, tile + place<kPieces>(at, k / 4 + lane / 8 % 2));
      b[j][0] = four[0], b[j][1] = four[1], b[j + 1][0] = four[2], b[j + 1][1] = four[3];
    }
  }
  // The same, and a left operand, from memory that has its 8 rows of k one after the other.
  __device__ void load_right(unsigned (&b)[4][2], const float* tile) const {
    const float* from = tile + lane % 4 * kRowStride + col + lane / 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      b[j][0] = __float_as_uint(from[8 * j]);
      b[j][1] = __float_as_uint(from[4 * kRowStride + 8 * j]);
    }
  }
  __device__ void load_left_transposed(unsigned (&a)[4], const float* tile, int m) const {
    const float* from = tile + lane % 4 * kRowStride + row + 16 * m + lane / 4;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      a[e] = __float_as_uint(from[e / 2 * 4 * kRowStride + e % 2 * 8]);
    }
  }
  __device__ static void multiply(float (&sum)[4][4], const unsigned (&a)[4],
                                  const unsigned (&b)[4][2]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) mma_m16n8k8_tf32(sum[j], a, b[j][0], b[j][1]);
  }
  // visit(row, col, value) for each of the lane's results; constant indices for the compiler.
  template <typename Visit>
  __device__ void for_results(const TileSum& sum, Visit visit) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          visit(row + 16 * m + e / 2 * 8 + lane / 4, col + 8 * j + lane % 4 * 2 + e % 2,
                sum[m][j][e]);
        }
      }
    }
  }
};

// Of a row and feature that is there; zeros of others.
template <typename A>
__device__ __forceinline__ Multivectors<A, 1> load_inside(const float* from, int n, int f,
                                                          const Layer& layer) {
  if (n >= layer.batch || f >= layer.features) return {};
  return load<A>(from + static_cast<size_t>(n) * layer.features + f, layer.plane());
}

template <typename A>
constexpr int kForwardTileBytes = sizeof(float) * (Part<A, 0>::kPlanes * kTile * 8 +
                                                   Part<A, 0>::kTriples * 8 * kRowStride);

// Four blades of z for 64 rows and 64 columns. Each step takes 8 features: a thread reads 4
// multivectors of x and of y, all blades of them, and writes their products to the tiles of the
// part's planes; with these, and 8 x 64 weights of each triple, the warps multiply. While one block
// makes planes, others of the multiprocessor multiply.
template <typename A, int part>
__device__ __forceinline__ void forward_tile(const float* x, const float* y, const float* w,
                                             float* z, int stride, float* shared, Layer layer) {
  using Own = Part<A, part>;
  constexpr int kPlane = kTile * 8;
  float* const planes = shared;
  float* const weights = planes + Own::kPlanes * kPlane;
  const TileWarp warp;
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
  const int weight_row = threadIdx.x / 16, weight_col = threadIdx.x % 16 * 4;
  TileSum sums[Own::kBlades] = {};
  for (int k = 0; k < layer.features; k += 8) {
    Own::for_triples([&](auto c, auto i) {
      constexpr int t = Own::triple(c, i), slot = Own::before(c) + i;
      copy_async<16>(
          weights + (slot * 8 + weight_row) * kRowStride + weight_col,
          w + (static_cast<size_t>(t) * stride + k + weight_row) * stride + col0 + weight_col,
          true);
    });
    copy_async_commit();
#pragma unroll 1
    for (int e = threadIdx.x; e < kTile * 8; e += kTileThreads) {
      const int row = e / 8, f = e % 8;
      Multivectors<A, 1> left = load_inside<A>(x, row0 + row, k + f, layer);
      const Multivectors<A, 1> right = load_inside<A>(y, row0 + row, k + f, layer);
      apply_gates(left, right);
      float* to = planes + TileWarp::place<2>(row, f / 4) + f % 4;
      Own::for_triples([&](auto c, auto i) {
        constexpr int first = A::first(c), t = Own::triple(c, i);
        unroll<first, A::first(c + 1)>([&](auto blade) {
          to[(Own::plane(c, i) + blade - first) * kPlane] =
              rounded_to_tf32(sum_terms<A, Of::result, t, blade>(left, right).v[0]);
        });
      });
    }
    copy_async_wait<0>();
    __syncthreads();
    Own::for_triples([&](auto c, auto i) {
      unsigned b[4][2];
      warp.load_right(b, weights + (Own::before(c) + i) * 8 * kRowStride);
      unroll<0, A::blades_of(c)>([&](auto n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          unsigned a[4];
          warp.load_left<2>(a, planes + (Own::plane(c, i) + n) * kPlane, m, 0);
          TileWarp::multiply(sums[A::first(c) + n - Own::kFirstBlade][m], a, b);
        }
      });
    });
    __syncthreads();
  }
  unroll<0, Own::kBlades>([&](auto k) {
    warp.for_results(sums[k], [&](int row, int col, float value) {
      const int n = row0 + row, f = col0 + col;
      if (n >= layer.batch || f >= layer.features) return;
      z[(Own::kFirstBlade + k) * layer.plane() + static_cast<size_t>(n) * layer.features + f] =
          value;
    });
  });
}

template <typename A>
__global__ void __launch_bounds__(kTileThreads)
    forward_tiles(const float* x, const float* y, const float* w, float* z, int stride,
                  Layer layer) {
  extern __shared__ __align__(128) float shared[];
  unroll<0, kParts<A>>([&](auto part) {
    if (static_cast<int>(blockIdx.z) == part)
      forward_tile<A, part>(x, y, w, z, stride, shared, layer);
  });
}

// dz of some rows of the batch, `first` to `first` + `rows` - 1: blades `pitch` elements apart, rows
// `stride`, both multiples of 64 rows and columns, in TF32, with zeros where there is nothing.
struct ResultGradients {
  const float* data;
  int first, rows, stride;
  size_t pitch;
};

constexpr int kGradientDepth = 32, kGradientTileBytes = 2 * 4 * kTile * kGradientDepth * 4;

// The tile (64 rows, 64 features) of dz_k w^T for the kBlades blades k from `dz` on, to shared
// memory, kRowStride apart. Steps take 32 features of the result, one while the next one comes.
template <int kBlades>
__device__ __forceinline__ void plane_gradients(const float* dz, const float* w,
                                                const ResultGradients& of, int features,
                                                float* shared) {
  constexpr int kStage = (kBlades + 1) * kTile * kGradientDepth;
  const TileWarp warp;
  const auto fetch = [&](int step) {
    float* const to = shared + step % 2 * kStage;
#pragma unroll
    for (int i = threadIdx.x; i < (kBlades + 1) * kTile * 8; i += kTileThreads) {
      const int row = i / 8, piece = i % 8, blade = row / kTile;
      const float* from = blade < kBlades ? dz + blade * of.pitch : w;
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
      warp.load_right_transposed<8>(b, tile + kBlades * kTile * kGradientDepth, k);
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
      shared[(blade * kTile + row) * kRowStride + col] = value;
    });
  }
  __syncthreads();
}

// What triple t's planes add to the sums of x and y, in memory where dx and dy will be. The sums of
// a grade start with its first triple. d: the planes' gradients at one place, kTile kRowStride from
// plane to plane.
template <typename A, int t>
__device__ __forceinline__ void add_plane_gradients(const float* d, const float* x, const float* y,
                                                    float* dx, float* dy, size_t plane) {
  constexpr auto grades = A::triple(t);
  constexpr bool is_first_of_x = A::triple(t == 0 ? 0 : t - 1).x != grades.x || t == 0;
  constexpr bool is_first_of_y = [] {
    for (int earlier = 0; earlier < t; ++earlier) {
      if (A::triple(earlier).y == A::triple(t).y) return false;
    }
    return true;
  }();
  Multivectors<A, 1> left, right, part;  // only one grade of each
  load_grade<grades.x>(left, x, plane);
  load_grade<grades.y>(right, y, plane);
  load_grade<grades.result>(part, d - A::first(grades.result) * kTile * kRowStride,
                            kTile * kRowStride);
  unroll<A::first(grades.x), A::first(grades.x + 1)>([&](auto i) {
    const float sum = sum_terms<A, Of::x, t, i>(part, right).v[0];
    dx[i * plane] = is_first_of_x ? sum : dx[i * plane] + sum;
  });
  unroll<A::first(grades.y), A::first(grades.y + 1)>([&](auto j) {
    const float sum = sum_terms<A, Of::y, t, j>(part, left).v[0];
    dy[j * plane] = is_first_of_y ? sum : dy[j * plane] + sum;
  });
}

// From the sums S_i of sign y_j d and T_j of sign x_i d, in place: with the gates g and h of x and
// y, dx_i = g h S_i, and dx_0 has gate'(x_0) h sum of x_i S_i besides; dy likewise.
template <typename A>
__device__ __forceinline__ void finish_gradients(const float* x, const float* y, float* dx,
                                                 float* dy, size_t plane) {
  const Multivectors<A, 1> left = load<A>(x, plane), right = load<A>(y, plane);
  const Gates<1> gates(left.blade[0], right.blade[0]);
  const float both = gates.product().v[0];
  float along_x = 0, along_y = 0;
  unroll<0, A::kBlades>([&](auto i) {
    along_x += left.blade[i].v[0] * dx[i * plane];
    along_y += right.blade[i].v[0] * dy[i * plane];
    dx[i * plane] *= both;
    dy[i * plane] *= both;
  });
  dx[0] += gate_slope(left.blade[0].v[0]) * gates.y.v[0] * along_x;
  dy[0] += gate_slope(right.blade[0].v[0]) * gates.x.v[0] * along_y;
}

// dx and dy of a tile, triple by triple. The planes' gradients exist in shared memory only; the
// sums over the triples are in memory, at places that only one thread ever comes to.
template <typename A>
__global__ void __launch_bounds__(kTileThreads)
    input_gradient_tiles(const float* x, const float* y, const float* w, ResultGradients dz,
                         float* dx, float* dy, Layer layer) {
  extern __shared__ __align__(128) float shared[];
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
  const size_t plane = layer.plane();
  const auto for_places = [&](auto visit) {
#pragma unroll 1
    for (int e = threadIdx.x; e < kTile * kTile; e += kTileThreads) {
      const int row = e / kTile, col = e % kTile;
      if (row0 + row >= dz.rows || col0 + col >= layer.features) continue;
      visit(static_cast<size_t>(dz.first + row0 + row) * layer.features + col0 + col,
            shared + row * kRowStride + col);
    }
  };
  unroll<0, A::kTriples>([&](auto t) {
    constexpr int c = A::triple(t).result;
    plane_gradients<A::blades_of(c)>(
        dz.data + A::first(c) * dz.pitch + static_cast<size_t>(row0) * dz.stride,
        w + (static_cast<size_t>(t) * dz.stride + col0) * dz.stride, dz, layer.features, shared);
    for_places([&](size_t at, const float* d) {
      add_plane_gradients<A, t>(d, x + at, y + at, dx + at, dy + at, plane);
    });
    __syncthreads();
  });
  for_places([&](size_t at, const float*) {
    finish_gradients<A>(x + at, y + at, dx + at, dy + at, plane);
  });
}

// A block of the kernel below has at most 3 triples of one grade of the result.
template <typename A>
struct WeightPieces {
  __host__ __device__ static constexpr int triples(int c) {
    int sum = 0;
    for (int t = 0; t < A::kTriples; ++t) sum += A::triple(t).result == c;
    return sum;
  }
  __host__ __device__ static constexpr int pieces(int c) { return (triples(c) + 2) / 3; }
  __host__ __device__ static constexpr int before(int c) {
    return c == 0 ? 0 : before(c - 1) + pieces(c - 1);
  }
  __host__ __device__ static constexpr int triple(int c, int i) {
    for (int t = 0; t < A::kTriples; ++t) {
      if (A::triple(t).result == c && i-- == 0) return t;
    }
    return -1;
  }
  static constexpr int kCount = before(A::kGrades);
};

constexpr int kWeightDepth = 16, kWeightPlane = kWeightDepth * kRowStride;
constexpr int kWeightTileBytes = sizeof(float) * 12 * kWeightPlane;

// A tile (64 features of x and y, 64 of the result) of dw[t], for triples `first` to `first` +
// kCount - 1 of those of grade c, summed over rows `begin` to `end` - 1 of dz. Each step takes 16
// rows of the batch: the planes are made as in forward_tile, and are read transposed.
template <typename A, int c, int first, int kCount>
__device__ __forceinline__ void weight_gradient_tile(const float* x, const float* y,
                                                     const ResultGradients& dz, float* dw,
                                                     int begin, int end, bool adds, float* shared,
                                                     const Layer& layer) {
  using Pieces = WeightPieces<A>;
  constexpr int kBlades = A::blades_of(c);
  float* const planes = shared;
  float* const results = shared + kCount * kBlades * kWeightPlane;
  const TileWarp warp;
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
  TileSum sums[kCount] = {};
  for (int n = begin; n < end; n += kWeightDepth) {
#pragma unroll
    for (int i = threadIdx.x; i < kBlades * kWeightDepth * 16; i += kTileThreads) {
      const int blade = i / 16 / kWeightDepth, row = i / 16 % kWeightDepth, col = i % 16 * 4;
      copy_async<16>(results + blade * kWeightPlane + row * kRowStride + col,
                     dz.data + (A::first(c) + blade) * dz.pitch +
                         static_cast<size_t>(n + row) * dz.stride + col0 + col,
                     n + row < end);
    }
    copy_async_commit();
#pragma unroll 1
    for (int e = threadIdx.x; e < kWeightDepth * kTile; e += kTileThreads) {
      const int row = e / kTile, f = e % kTile;
      const int at = n + row < end ? dz.first + n + row : layer.batch;
      Multivectors<A, 1> left = load_inside<A>(x, at, row0 + f, layer);
      const Multivectors<A, 1> right = load_inside<A>(y, at, row0 + f, layer);
      apply_gates(left, right);
      unroll<0, kCount>([&](auto i) {
        constexpr int t = Pieces::triple(c, first + i);
        unroll<0, kBlades>([&](auto k) {
          planes[(i * kBlades + k) * kWeightPlane + row * kRowStride + f] =
              rounded_to_tf32(sum_terms<A, Of::result, t, A::first(c) + k>(left, right).v[0]);
        });
      });
    }
    copy_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kWeightDepth; k += 8) {
#pragma unroll
      for (int blade = 0; blade < kBlades; ++blade) {
        unsigned b[4][2];
        warp.load_right(b, results + blade * kWeightPlane + k * kRowStride);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            unsigned a[4];
            warp.load_left_transposed(
                a, planes + (i * kBlades + blade) * kWeightPlane + k * kRowStride, m);
            TileWarp::multiply(sums[i][m], a, b);
          }
        }
      }
    }
    __syncthreads();
  }
  unroll<0, kCount>([&](auto i) {
    constexpr size_t t = Pieces::triple(c, first + i);
    warp.for_results(sums[i], [&](int row, int col, float value) {
      if (row0 + row >= layer.features || col0 + col >= layer.features) return;
      float& to = dw[(t * layer.features + row0 + row) * layer.features + col0 + col];
      to = adds ? to + value : value;
    });
  });
}

// blockIdx.z: which triples, and which of `splits` equal shares of the rows, each of which has a
// sum of its own, one after the other in dw.
template <typename A>
__global__ void __launch_bounds__(kTileThreads)
    weight_gradient_tiles(const float* x, const float* y, ResultGradients dz, float* dw, int splits,
                          bool adds, Layer layer) {
  extern __shared__ __align__(128) float shared[];
  using Pieces = WeightPieces<A>;
  const int piece = blockIdx.z % Pieces::kCount, split = blockIdx.z / Pieces::kCount;
  const int share = (dz.rows + splits - 1) / splits;
  const int begin = min(dz.rows, split * share), end = min(dz.rows, begin + share);
  float* const to = dw + static_cast<size_t>(split) * A::kTriples * layer.features * layer.features;
  unroll<0, A::kGrades>([&](auto c) {
    constexpr int count = Pieces::triples(c), pieces = Pieces::pieces(c);
    unroll<0, pieces>([&](auto p) {
      constexpr int first = count * p / pieces, last = count * (p + 1) / pieces;
      if (piece == Pieces::before(c) + p) {
        weight_gradient_tile<A, c, first, last - first>(x, y, dz, to, begin, end, adds, shared,
                                                        layer);
      }
    });
  });
}

// ---- Launches -----------------------------------------------------------------------------------

using Tensors = CliffordTensors;
using Gradients = CliffordGradients;

// What the kernels above need beside inputs and outputs, and how they are launched.
template <typename A>
struct Tiled {
  static constexpr size_t kChunkBytes = 64 << 20;

  explicit Tiled(const Tensors& tensors)
      : of(tensors),
        stride((of.layer.features + kTile - 1) / kTile * kTile),
        weights(of.problem.output<float>(static_cast<size_t>(A::kTriples) * stride * stride)),
        inverses(of.problem.output<float>(static_cast<size_t>(A::kGrades) * of.layer.batch)) {
    allow_shared_bytes(forward_tiles<A>, kForwardTileBytes<A>);
  }
  double bytes() const { return weights.bytes() + inverses.bytes(); }

  static int tiles(int count) { return (count + kTile - 1) / kTile; }

  void round() const {
    const int threads = std::min(stride, 256);
    round_weights<<<dim3((stride + threads - 1) / threads, stride, A::kTriples), threads>>>(
        of.w, weights, of.layer.features, stride);
  }
  void normalize() const {
    if (of.layer.normed) normalize_rows<A><<<of.layer.batch, 256>>>(of.out, inverses, of.layer);
  }
  void forward() const {
    round();
    const dim3 grid(tiles(of.layer.features), tiles(of.layer.batch), kParts<A>);
    constexpr int kBytes = kForwardTileBytes<A>;
    forward_tiles<A><<<grid, kTileThreads, kBytes>>>(of.x, of.y, weights, of.out, stride, of.layer);
    normalize();
  }

  Tensors of;
  int stride;  // of the weights' rows
  Buffer<float> weights, inverses;
};

template <typename A>
struct TiledBackward {
  TiledBackward(const Tiled<A>& tiled, const Gradients& gradients, const Device& device)
      : forward(tiled),
        d(gradients),
        rows(rows_at_a_time(tiled)),
        splits(shares_of_batch(tiled, rows, device)),
        dz(tiled.of.problem.template output<float>(static_cast<size_t>(A::kBlades) * rows *
                                                   tiled.stride)),
        partials(splits > 1 ? tiled.of.problem.template output<float>(splits * d.dw.size())
                            : d.dw) {
    allow_shared_bytes(input_gradient_tiles<A>, kGradientTileBytes);
    allow_shared_bytes(weight_gradient_tiles<A>, kWeightTileBytes);
  }
  double bytes() const {
    return forward.bytes() + dz.bytes() + (splits > 1 ? partials.bytes() : 0);
  }

  // As many rows of dz as kChunkBytes hold, a multiple of 64.
  static int rows_at_a_time(const Tiled<A>& tiled) {
    const size_t most = Tiled<A>::kChunkBytes / (sizeof(float) * A::kBlades * tiled.stride);
    const int whole = std::max(1, static_cast<int>(most) / kTile);
    return kTile * std::min(whole, Tiled<A>::tiles(tiled.of.layer.batch));
  }
  // So many that every multiprocessor has two blocks, if each has 128 rows at least.
  static int shares_of_batch(const Tiled<A>& tiled, int rows, const Device& device) {
    const int tiles = Tiled<A>::tiles(tiled.of.layer.features);
    const int blocks = tiles * tiles * WeightPieces<A>::kCount;
    return std::clamp(2 * device.sms / blocks, 1, std::min(16, (rows + 127) / 128));
  }

  void backward() const {
    const Tensors& of = forward.of;
    const Layer& layer = of.layer;
    const int tiles = Tiled<A>::tiles(layer.features);
    for (int first = 0; first < layer.batch; first += rows) {
      const int count = std::min(rows, layer.batch - first);
      const int row_tiles = Tiled<A>::tiles(count);
      const ResultGradients results{dz, first, count, forward.stride,
                                    static_cast<size_t>(rows) * forward.stride};
      result_gradients<A><<<row_tiles * kTile, 256>>>(of.out, d.d_out, forward.inverses, dz, first,
                                                      forward.stride, results.pitch, layer);
      input_gradient_tiles<A><<<dim3(tiles, row_tiles), kTileThreads, kGradientTileBytes>>>(
          of.x, of.y, forward.weights, results, d.dx, d.dy, layer);
      weight_gradient_tiles<A>
          <<<dim3(tiles, tiles, WeightPieces<A>::kCount * splits), kTileThreads,
             kWeightTileBytes>>>(of.x, of.y, results, partials, splits, first > 0, layer);
    }
    if (splits > 1) {
      sum_weight_gradients<<<blocks_of(d.dw.size(), 256), 256>>>(partials, d.dw, splits,
                                                                 d.dw.size());
    }
  }

  Tiled<A> forward;
  Gradients d;
  int rows, splits;
  Buffer<float> dz, partials;
};

// ---- The tables ---------------------------------------------------------------------------------

template <typename A>
void add_forward(const Tensors& of, const std::shared_ptr<Cublas>& blas) {
  Problem& problem = of.problem;
  const UnfusedConnected<A> unfused(of, blas);
  problem.kernel("unfused", Role::library, [=] { unfused.forward(); })
      .occupies(of.bytes() + unfused.bytes())
      .needs(80);
  const Tiled<A> tiled(of);
  problem.kernel("planes in tiles", Role::ours, [=] { tiled.forward(); })
      .resources(forward_tiles<A>, kTileThreads, kForwardTileBytes<A>)
      .occupies(of.bytes() + tiled.bytes())
      .needs(80);
}

template <typename A>
void add_backward(const Tensors& of, const Gradients& d, const std::shared_ptr<Cublas>& blas,
                  const Device& device) {
  Problem& problem = of.problem;
  const double ends = of.bytes() + d.bytes();
  const UnfusedConnectedBackward<A> unfused(of, d, blas);
  problem.kernel("unfused", Role::library, [=] { unfused.forward_and_backward(); })
      .occupies(ends + unfused.bytes())
      .needs(80);
  const TiledBackward<A> tiled(Tiled<A>(of), d, device);
  const auto both_tiled = [=] {
    tiled.forward.forward();
    tiled.backward();
  };
  problem.kernel("planes in tiles", Role::ours, both_tiled)
      .resources(input_gradient_tiles<A>, kTileThreads, kGradientTileBytes)
      .occupies(ends + tiled.bytes())
      .needs(80);
}

template <int p, int q, int r>
int run_lesson(Lesson& lesson) {
  using A = Cl<p, q, r>;
  CliffordTables tables(lesson, p, q, r, A::kTriples, true);
  const auto blas = std::make_shared<Cublas>();
  for (const CliffordReference& size : tables.sizes()) {
    const double flops = 2.0 * Planes<A>::kCount * size.shape().features;
    add_forward<A>(tables.forward(size, flops), blas);
    if (lesson.flag("--turned")) continue;
    const auto [of, d] = tables.backward(size, 3 * flops);
    add_backward<A>(of, d, blas, lesson.device());
  }
  return lesson.run();
}

int main(int argc, char** argv) {
  Lesson lesson(
      argc, argv,
      {.name = "bonus_clifford_fully_connected",
       .title = "gated geometric product with matrices of weights, its norm, forward and backward",
       .n_meaning = "the batch",
       .n_gpu = 4096,
       .n_cpu = 8,
       .options = {{"--features", "multivectors per batch element (CPU: 48)", 512}},
       .choices = {{"--algebra",
                    "signature: basis vectors that square to +1, -1, 0",
                    {"3,0,0", "2,0,0"}}},
       .flags = {{"--no-norm", "without the norm"},
                 {"--sweep", "batch 1024 to 8192 x features 128 to 1024 (CPU: smaller)"},
                 {"--turned", "expect turned results of turned inputs (forward)"}}});
  if (lesson.choice("--algebra") == "2,0,0") return run_lesson<2, 0, 0>(lesson);
  return run_lesson<3, 0, 0>(lesson);
}
