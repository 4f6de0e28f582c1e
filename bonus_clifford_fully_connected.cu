// Bonus: products of multivectors, mixed by matrices of weights
//
//     x' = x gate(x_1), y' = y gate(y_1)                        gates and norm as in lesson 10
//     P_t,k = sum of  sign x'_i y'_j,  over all blades i of grade a and j of grade b
//             with e_i e_j = sign e_k
//     z_k   = sum of  P_t,k w[t],  over all triples of grades t = (a, grade of k, b)
//     out = per grade c: z_c / sqrt(mean over features of |z_c|^2 + 1e-6)
//
//     x, y, out (2^n blades, batch, features) and w (triples, features, features): fp32, row-major
//
// Lesson 10's layer has a weight per feature and grade triple; here it is a matrix, which mixes the
// features: the fully connected layer of a Clifford network. Its 20 triples in 3-D (10 in 2-D) make
// 44 planes P (14), each (batch, features), and each plane is the left operand of a product.
//
// For n = 2, whose table lesson 10 has, e1 of z is four products of matrices, one for each place
// in which the table has e1:
//
//     z_e1 = (x'_1 y'_e1) w[0,1,1] + (x'_e1 y'_1) w[1,1,0]
//                                  + (x'_e12 y'_e2) w[2,1,1] - (x'_e2 y'_e12) w[1,1,2]
//
// What stands in parentheses, multiplied element by element, is a plane. Where a triple has several
// places for a blade their sum is the plane: for 1 of z, x'_e1 y'_e1 + x'_e2 y'_e2 with w[1,0,1].
//
// What is computed: 88 batch features^2 operations in 3-D (28 in 2-D), on tensor cores, in TF32.
// What moves: 24 planes (12), if the 44 (14) are never written; 112 if they are, once, and read
// back. Either way the products are the limit, where features are some hundreds: a plane's element
// is 2 features operations for 8 bytes. So it is not the planes' way through memory that costs, but
// who waits for it. The planes of all triples with a result of one grade, side by side, are the
// left operand of one product, whose right operand is their weights, below each other.
//
//     unfused          planes in memory, a product of cuBLAS for each grade, a kernel for the norms
//     planes in tiles  a block makes its planes in shared memory and multiplies them, mma.sync
//     planes first     on Hopper: a kernel makes planes, lesson 3's product, in TF32, reads them
//     planes beside    three warps of each block make most planes, while others multiply
//
// From the gradients dz backward needs the planes' gradients dz_k w[t]^T, which it multiplies with
// y and x and adds up; and dw[t] = sum over k of P_t,k^T dz_k, whose left operand is planes again,
// transposed. *planes in tiles* has no plane in memory. On Hopper the batch goes in chunks, whose
// planes, or later their gradients, take up to 1 GiB; dz and weights made ready add to that.
//
// The algebra is lesson 10's; operators/clifford_connected/connected.cuh has which triples lead
// where.

#include "operators/clifford/algebra.cuh"
#include "operators/clifford/clifford.cuh"
#include "operators/clifford/unfused.cuh"
#include "operators/clifford_connected/connected.cuh"
#include "operators/clifford_connected/layer.cuh"
#include "operators/clifford_connected/tf32_tiles.cuh"
#include "primitives/async_copy.cuh"
#include "problems/clifford/clifford.h"

using namespace problems;
using namespace operators::clifford;
using namespace operators::clifford_connected;

// ---- Unfused ------------------------------------------------------------------------------------

// The baseline, as a framework runs it, with as few products as possible. One kernel applies the
// gates. One kernel writes all planes. The planes of one grade of the result form one matrix. So
// one product of the library for each grade sums over all triples of this grade. Then come the
// norms. Backward, the planes' gradients take the place of the planes.
//
// The words: A is the algebra. A::first(c) is the first blade of grade c. Multivectors<A, W> has W
// neighbours of each blade. A::triple(t) has the grades x, y and result: a, b and the grade of k in
// the formula. sum_terms<A, Of::result, t, k> is P_t,k. unroll<a, b>(f) calls f with the constants
// a to b - 1. Blade 0 is the scalar, which the formulas call 1.

/// Where a multivector's planes are. Grade c of the result has one matrix. Its rows are first the
/// batch for the first blade, then the batch for the next one, and so on. A row has `features`
/// numbers of each triple of the grade, triple after triple. For each triple, visit() gets t, c,
/// the place of the first blade's element, and the distance to the next blade's.
template <typename A, typename Visit>
__device__ __forceinline__ void for_planes(size_t at, const Layer& layer, Visit visit) {
  const size_t n = at / layer.features, f = at % layer.features;
  unroll<0, A::kGrades>([&](auto c) {
    constexpr int kTriples = Order<A>::triples(c), kFirst = kFirstPlane<A, c>;
    unroll<0, kTriples>([&](auto i) {
      visit(Constant<Order<A>::triple(c, i)>(), c,
            kFirst * layer.plane() + (n * kTriples + i) * layer.features + f,
            kTriples * layer.plane());
    });
  });
}

/// The planes P of x' and y': one thread a multivector.
template <typename A>
__global__ void multiply_pairs(const float* x, const float* y, float* planes, Layer layer) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t plane = layer.plane();
  if (at >= plane) return;
  const Multivectors<A, 1> left = load<A>(x + at, plane), right = load<A>(y + at, plane);
  for_planes<A>(at, layer, [&](auto t, auto c, size_t place, size_t pitch) {
    unroll<A::first(c), A::first(c + 1)>([&](auto k) {
      planes[place] = sum_terms<A, Of::result, t, k>(left, right).v[0];
      place += pitch;
    });
  });
}

/// dx' and dy' from the planes' gradients d: dx'_i = sum of sign y'_j d_t,k, and dy' likewise.
template <typename A>
__global__ void multiply_pairs_gradient(const float* x, const float* y, const float* d, float* dx,
                                        float* dy, Layer layer) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t plane = layer.plane();
  if (at >= plane) return;
  const Multivectors<A, 1> left = load<A>(x + at, plane), right = load<A>(y + at, plane);
  Multivectors<A, 1> d_left = {}, d_right = {};
  for_planes<A>(at, layer, [&](auto t, auto c, size_t place, size_t pitch) {
    constexpr auto grades = A::triple(t);
    Multivectors<A, 1> d_planes;
    unroll<A::first(c), A::first(c + 1)>([&](auto k) {
      d_planes.blade[k].v[0] = d[place];
      place += pitch;
    });
    unroll<A::first(grades.x), A::first(grades.x + 1)>(
        [&](auto i) { add(d_left.blade[i], sum_terms<A, Of::x, t, i>(d_planes, right)); });
    unroll<A::first(grades.y), A::first(grades.y + 1)>(
        [&](auto j) { add(d_right.blade[j], sum_terms<A, Of::y, t, j>(d_planes, left)); });
  });
  unroll<0, A::kBlades>([&](auto i) {
    dx[i * plane + at] = d_left.blade[i].v[0];
    dy[i * plane + at] = d_right.blade[i].v[0];
  });
}

/// Copies the triples' matrices, `size` elements each, into the order of Order, or, if `back`, from
/// it to the order of w. Each row of the grid copies one matrix.
template <typename A>
__global__ void order_weights(const float* from, float* to, size_t size, bool back,
                              const __grid_constant__ Order<A> order) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t triple = order.triple_of[blockIdx.y] * size, slot = blockIdx.y * size;
  if (at < size) to[(back ? triple : slot) + at] = from[(back ? slot : triple) + at];
}

/// c (m, n) = a b in TF32, row-major; a is stored as (m, k), or transposed, b as (k, n),
/// or transposed.
inline void library_product(cublasHandle_t blas, const float* a, Transposed a_is, const float* b,
                            Transposed b_is, float* c, int m, int n, int k) {
  const float one = 1, zero = 0;
  CUBLAS_CHECK(cublasGemmEx(blas, b_is ? CUBLAS_OP_T : CUBLAS_OP_N,
                            a_is ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &one, b, CUDA_R_32F,
                            b_is ? k : n, a, CUDA_R_32F, a_is ? m : k, &zero, c, CUDA_R_32F, n,
                            CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_GEMM_DEFAULT));
}

template <typename A>
struct UnfusedConnected {
  UnfusedConnected(const CliffordTensors& tensors, std::shared_ptr<Cublas> handle)
      : of(tensors),
        blas(std::move(handle)),
        x(of.workspace.any<float>(of.x.size())),
        y(of.workspace.any<float>(of.y.size())),
        planes(of.workspace.any<float>(kPlanes<A> * of.layer.plane())),
        weights(of.workspace.any<float>(of.w.size())),
        z(of.layer.normed ? of.workspace.any<float>(of.out.size()) : of.out),
        inverses(of.workspace.any<float>(static_cast<size_t>(of.layer.batch) * A::kGrades)) {}

  double bytes() const {
    return x.bytes() + y.bytes() + planes.bytes() + weights.bytes() +
           (of.layer.normed ? z.bytes() + inverses.bytes() : 0);
  }
  /// Of the product for grade c: where its planes, weights and results start, and how many rows the
  /// matrix of planes (rows_of) and the matrix of weights (depth_of) have.
  size_t planes_of(int c) const { return order.plane[c] * of.layer.plane(); }
  size_t weights_of(int c) const { return order.slot[c] * matrix(); }
  size_t results_of(int c) const { return order.blade[c] * of.layer.plane(); }
  int rows_of(int c) const { return blades_of(c) * of.layer.batch; }
  int depth_of(int c) const { return (order.slot[c + 1] - order.slot[c]) * of.layer.features; }
  int blades_of(int c) const { return order.blade[c + 1] - order.blade[c]; }
  size_t matrix() const { return of.w.size() / A::kTriples; }

  void order_matrices(const float* from, float* to, bool back) const {
    const dim3 blocks(blocks_for(matrix(), 256), A::kTriples);
    order_weights<A><<<blocks, 256>>>(from, to, matrix(), back, order);
  }
  void forward() const {
    const Layer& layer = of.layer;
    const int blocks = blocks_for(layer.plane(), 256);
    apply_gate<A><<<blocks, 256>>>(of.x, x, layer);
    apply_gate<A><<<blocks, 256>>>(of.y, y, layer);
    multiply_pairs<A><<<blocks, 256>>>(x, y, planes, layer);
    order_matrices(of.w, weights, false);
    for (int c = 0; c < A::kGrades; ++c) {
      library_product(*blas, planes + planes_of(c), kPlain, weights + weights_of(c), kPlain,
                      z + results_of(c), rows_of(c), layer.features, depth_of(c));
    }
    for (int c = 0; layer.normed && c < A::kGrades; ++c) {
      normalize_grade<<<layer.batch, 256>>>(z + results_of(c), of.out + results_of(c),
                                            inverses + static_cast<size_t>(c) * layer.batch,
                                            blades_of(c), layer);
    }
  }

  CliffordTensors of;
  std::shared_ptr<Cublas> blas;
  Order<A> order = {};
  Memory<float> x, y, planes, weights, z, inverses;
};

template <typename A>
struct UnfusedConnectedBackward {
  UnfusedConnectedBackward(const CliffordTensors& of, const CliffordGradients& gradients,
                           std::shared_ptr<Cublas> handle)
      : forward(of, std::move(handle)),
        d(gradients),
        dz(of.layer.normed ? of.workspace.any<float>(of.out.size()) : d.d_out),
        dw(of.workspace.any<float>(of.w.size())) {}

  double bytes() const {
    return forward.bytes() + dw.bytes() + (forward.of.layer.normed ? dz.bytes() : 0);
  }

  void forward_and_backward() const {
    forward.forward();
    const UnfusedConnected<A>& f = forward;
    const Layer& layer = f.of.layer;
    for (int c = 0; layer.normed && c < A::kGrades; ++c) {
      const size_t start = f.results_of(c);
      normalize_grade_gradient<<<layer.batch, 256>>>(
          f.z + start, d.d_out + start, f.inverses + static_cast<size_t>(c) * layer.batch,
          dz + start, f.blades_of(c), layer);
    }
    for (int c = 0; c < A::kGrades; ++c) {
      library_product(*f.blas, f.planes + f.planes_of(c), kTransposed, dz + f.results_of(c), kPlain,
                      dw + f.weights_of(c), f.depth_of(c), layer.features, f.rows_of(c));
      library_product(*f.blas, dz + f.results_of(c), kPlain, f.weights + f.weights_of(c),
                      kTransposed, f.planes + f.planes_of(c), f.rows_of(c), f.depth_of(c),
                      layer.features);
    }
    f.order_matrices(dw, d.dw, true);
    const int blocks = blocks_for(layer.plane(), 256);
    multiply_pairs_gradient<A><<<blocks, 256>>>(f.x, f.y, f.planes, d.dx, d.dy, layer);
    apply_gate_gradient<A><<<blocks, 256>>>(f.of.x, d.dx, layer);
    apply_gate_gradient<A><<<blocks, 256>>>(f.of.y, d.dy, layer);
  }

  UnfusedConnected<A> forward;
  CliffordGradients d;
  Memory<float> dz, dw;
};

// ---- Planes in tiles ----------------------------------------------------------------------------

template <typename A>
constexpr int kForwardTileBytes = sizeof(float) * (BladeGroup<A, 0>::kPlanes * kTile * 8 +
                                                   BladeGroup<A, 0>::kTriples * 8 * kRowStride);

// Four blades of z, a group (in 3-D grades 0 and 1, or 2 and 3), for 64 rows and 64 columns. In the
// code c is a grade of the result, i the number of a triple in it, and t its number in w. A step
// takes 8 features, and has three parts:
//
//     load          starts the copies of 8 x 64 weights of each triple
//     make_planes   a thread reads 4 multivectors of x and of y, all blades of them, and writes
//                   their products to the tiles of the group's planes
//     multiply      the warps multiply each plane by its triple's weights
//
// After the last step `store` writes z. The norm needs all columns of a row, which are those of
// several blocks: a kernel of its own comes after this one. While one block makes planes, another
// one of the multiprocessor multiplies.
//
// `w` is not the layer's w but what round_weights() has made of it: rounded to TF32, each matrix
// with zeros up to `stride` rows and columns. So its copies need no test for an edge.
template <typename A, int group>
__device__ __forceinline__ void forward_tile(const float* x, const float* y, const float* w,
                                             float* z, int stride, float* shared, Layer layer) {
  using Own = BladeGroup<A, group>;
  constexpr int kPlane = kTile * 8;
  float* const planes = shared;
  float* const weights = planes + Own::kPlanes * kPlane;
  const TileWarp warp;
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
  const int weight_row = threadIdx.x / 16, weight_col = threadIdx.x % 16 * 4;
  TileSum sums[Own::kBlades] = {};
  const auto load = [&](int k) {
    Own::for_triples([&](auto c, auto i) {
      constexpr int t = Own::triple(c, i), slot = Own::before(c) + i;
      copy_async<16>(
          weights + (slot * 8 + weight_row) * kRowStride + weight_col,
          w + (static_cast<size_t>(t) * stride + k + weight_row) * stride + col0 + weight_col,
          true);
    });
    copy_async_commit();
  };
  const auto make_planes = [&](int k) {
#pragma unroll 1
    for (int e = threadIdx.x; e < kTile * 8; e += kTileThreads) {
      const int row = e / 8, f = e % 8;
      Multivectors<A, 1> left = load_inside<A>(x, row0 + row, k + f, layer);
      const Multivectors<A, 1> right = load_inside<A>(y, row0 + row, k + f, layer);
      apply_gates(left, right);  // multiplies x by both gates: all terms are products of x and y
      float* to = planes + TileWarp::place<2>(row, f / 4) + f % 4;
      Own::for_triples([&](auto c, auto i) {
        constexpr int first = A::first(c), t = Own::triple(c, i);
        constexpr int to_first = Own::plane(c, i) - first;
        unroll<first, A::first(c + 1)>([&](auto blade) {
          to[(to_first + blade) * kPlane] =
              rounded_to_tf32(sum_terms<A, Of::result, t, blade>(left, right).v[0]);
        });
      });
    }
  };
  const auto multiply = [&] {
    Own::for_triples([&](auto c, auto i) {
      constexpr int slot = Own::before(c) + i, plane = Own::plane(c, i);
      constexpr int first = A::first(c) - Own::kFirstBlade;
      unsigned b[4][2];
      warp.load_right(b, weights + slot * 8 * kRowStride);
      unroll<0, A::blades_of(c)>([&](auto n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          unsigned a[4];
          warp.load_left<2>(a, planes + (plane + n) * kPlane, m, 0);
          TileWarp::multiply(sums[first + n][m], a, b);
        }
      });
    });
  };
  const auto store = [&] {
    unroll<0, Own::kBlades>([&](auto k) {
      warp.for_results(sums[k], [&](int row, int col, float value) {
        const int n = row0 + row, f = col0 + col;
        if (n >= layer.batch || f >= layer.features) return;
        z[(Own::kFirstBlade + k) * layer.plane() + static_cast<size_t>(n) * layer.features + f] =
            value;
      });
    });
  };

  for (int k = 0; k < layer.features; k += 8) {
    load(k);
    make_planes(k);
    copy_async_wait<0>();
    __syncthreads();  // weights and planes are there
    multiply();
    __syncthreads();  // and have been read
  }
  store();
}

template <typename A>
__global__ void __launch_bounds__(kTileThreads)
    forward_tiles(const float* x, const float* y, const float* w, float* z, int stride,
                  Layer layer) {
  extern __shared__ __align__(128) float shared[];
  unroll<0, kBladeGroups<A>>([&](auto group) {
    if (static_cast<int>(blockIdx.z) == group)
      forward_tile<A, group>(x, y, w, z, stride, shared, layer);
  });
}

// Backward in tiles is in operators/clifford_connected/gradients.cuh: input_gradient_tiles makes
// the planes' gradients dz_k w[t]^T of a tile in shared memory and takes them apart there, triple
// by triple, into sums of dx and dy in memory; weight_gradient_tiles makes planes as above for
// P_t,k^T dz_k.

// ---- Planes beside the product ------------------------------------------------------------------

// Above, a plane is made once for each tile of columns, and a block's tensor cores wait meanwhile.
// Hopper's copy engine can bring finished planes while tensor
// cores work; *planes first* makes them by a kernel before (PlaneMaker in planes.cuh).
// What is left is lesson 3's product in TF32 (operators/clifford_connected/tf32_product.cuh): a
// tile is 128 rows of one blade k by 256 features, and its sum goes over all triples of k's grade
// and all their features, the triples' planes and weights one after the other. Tiles of the same
// rows and grade share a norm. If all of them are multiplied at the same time, they scale z before
// they store it (RoundNorm in planes.cuh); else a small kernel does (normalize_rest).
// *planes beside*: three warps of each block make planes during the product. Makers and tiles go in
// the same order: rows for the first tiles come first, of these the first features. For each patch
// of 128 rows and 128 features a counter says how many of its rows are made. The thread that starts
// the copies waits until all 128 are. For the rows of the first tiles, the planes of the first 256
// features are made before the product.
//
// This hides only a part. A step is 32 of k. With 128 x 256 results it takes 1024 cycles. In them
// wgmma reads 80 KB of shared memory, and 48 KB arrive: together 128 bytes a cycle, all that shared
// memory can do. What makers load and store needs it, too. (Counted, not measured.)
//
// Backward has the same product for both gradients. Their left operands, dz and planes, lie as (k,
// rows): wgmma takes those from registers, so neither has to be in memory both ways round.
//
// Where rows are few it takes longer to make weights ready than to multiply them. Then both rows of
// the table run the same kernels: weights, as they lie, are the left factor of the transposed
// product (operators/clifford_connected/few_rows.cuh). 100 rows of 1024 features take 62 us instead
// of 136.

// What a tile is, which factors it loads and where its sum goes, of each of the three products, is
// in operators/clifford_connected/tasks.cuh; how they are launched in layer.cuh. These rows are the
// operator that a program would call.

// ---- Launches -----------------------------------------------------------------------------------

using Tensors = CliffordTable;
using Gradients = CliffordGradients;

// What the kernels in tiles need besides inputs and outputs, and how they are launched.
template <typename A>
struct Tiled {
  static constexpr size_t kChunkBytes = 64 << 20;

  explicit Tiled(const Tensors& tensors)
      : of(tensors),
        stride((of.layer.features + kGradientCols - 1) / kGradientCols * kGradientCols),
        weights(of.workspace.any<float>(static_cast<size_t>(A::kTriples) * stride * stride)),
        inverses(of.workspace.any<float>(static_cast<size_t>(A::kGrades) * of.layer.batch)) {
    allow_shared_bytes(forward_tiles<A>, kForwardTileBytes<A>);
  }
  double bytes() const { return weights.bytes() + (of.layer.normed ? inverses.bytes() : 0); }

  static int tiles(int count) { return ceil_div(count, kTile); }

  void round() const {
    const int threads = std::min(stride, 256);
    round_weights<<<dim3((stride + threads - 1) / threads, stride, A::kTriples), threads>>>(
        of.w, weights, of.layer.features, stride);
  }
  void forward() const {
    round();
    const dim3 grid(tiles(of.layer.features), tiles(of.layer.batch), kBladeGroups<A>);
    constexpr int kBytes = kForwardTileBytes<A>;
    forward_tiles<A><<<grid, kTileThreads, kBytes>>>(of.x, of.y, weights, of.out, stride, of.layer);
    normalize<A>(of, inverses);
  }

  Tensors of;
  int stride;  // of the weights' rows
  Memory<float> weights, inverses;
};

template <typename A>
struct TiledBackward {
  TiledBackward(const Tiled<A>& tiled, const Gradients& gradients, const Device& device)
      : forward(tiled),
        d(gradients),
        rows(rows_at_a_time(tiled)),
        splits(shares_of_batch(tiled, rows, device)),
        dz(tiled.of.workspace.template any<float>(static_cast<size_t>(A::kBlades) * rows *
                                                  tiled.stride)),
        partials(splits > 1 ? tiled.of.workspace.template any<float>(splits * d.dw.size()) : d.dw) {
    allow_shared_bytes(input_gradient_tiles<A>, kGradientTileBytes);
    allow_shared_bytes(weight_gradient_tiles<A>, kWeightTileBytes<A>);
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
    const int blocks = tiles * tiles * A::kGrades;
    return std::clamp(2 * device.sms / blocks, 1, std::min(16, (rows + 127) / 128));
  }

  void backward() const {
    const Tensors& of = forward.of;
    const Layer& layer = of.layer;
    const int tiles = Tiled<A>::tiles(layer.features);
    constexpr int kWeightBytes = kWeightTileBytes<A>;
    for (int first = 0; first < layer.batch; first += rows) {
      const int count = std::min(rows, layer.batch - first);
      const int row_tiles = Tiled<A>::tiles(count);
      const ResultGradients results{dz, first, count, forward.stride,
                                    static_cast<size_t>(rows) * forward.stride};
      result_gradients<A><<<row_tiles * kTile, 256>>>(of.out, d.d_out, forward.inverses, dz, first,
                                                      forward.stride, results.pitch, layer);
      input_gradient_tiles<A>
          <<<dim3((layer.features + kGradientCols - 1) / kGradientCols, row_tiles), kPairThreads,
             kGradientTileBytes>>>(of.x, of.y, forward.weights, results, d.dx, d.dy, layer);
      weight_gradient_tiles<A>
          <<<dim3(tiles, tiles, A::kGrades * splits), kPairThreads, kWeightBytes>>>(
              of.x, of.y, results, partials, splits, first > 0, layer);
    }
    add_partials(d, partials, splits);
  }

  Tiled<A> forward;
  Gradients d;
  int rows, splits;
  Memory<float> dz, partials;
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
      .needs_shared(kForwardTileBytes<A>)
      .occupies(of.bytes() + tiled.bytes())
      .needs(80);
  const auto add_ready = [&](const char* name, const auto& ready) {
    problem.kernel(name, Role::ours, [=] { ready.forward(nullptr); })
        .occupies(of.bytes() + ready.bytes())
        .hopper_only();
  };
  add_ready("planes first", Ready<A, false>(of, tiled.inverses));
  add_ready("planes beside", Ready<A, true>(of, tiled.inverses));
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
      .needs_shared(kGradientTileBytes)
      .occupies(ends + tiled.bytes())
      .needs(80);
  const auto add_ready = [&](const char* name, const auto& ready) {
    problem.kernel(name, Role::ours, [=] { ready.run(); })
        .occupies(ends + ready.bytes())
        .hopper_only();
  };
  const Memory<float>& kept = tiled.forward.inverses;
  add_ready("planes first", ReadyBackward<A, false>(Ready<A, false>(of, kept), d));
  add_ready("planes beside", ReadyBackward<A, true>(Ready<A, true>(of, kept), d));
}

template <int p, int q, int r>
int run_lesson(Lesson& lesson) {
  using A = Cl<p, q, r>;
  CliffordTables tables(lesson, p, q, r, A::kTriples, true);
  const auto blas = std::make_shared<Cublas>();
  for (const CliffordReference& size : tables.sizes()) {
    const double flops = 2.0 * kPlanes<A> * size.shape().features;
    const Tensors forward = tables.forward(size, flops);
    add_forward<A>(forward, blas);
    forward.problem.compare("planes beside", "unfused", "Forward on Hopper: % times as fast.");
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
       .n_cpu = 20,
       .options = {{.name = "--features",
                    .meaning = "multivectors per batch element (CPU: 68)",
                    .value = 512,
                    .sweep = {.gpu = {128, 1024}, .cpu = {8, 64}}}},
       .choices = {{"--algebra",
                    "signature: basis vectors that square to +1, -1, 0",
                    {"3,0,0", "2,0,0"}}},
       .flags = {{"--no-norm", "without the norm"},
                 {"--turned", "expect turned results of turned inputs (forward)"}},
       .sweep = {.gpu = {1024, 8192}, .cpu = {8, 64}}});
#ifndef FEW_ALGEBRAS  // for tests, as in lesson 10
  if (lesson.choice("--algebra") == "3,0,0") return run_lesson<3, 0, 0>(lesson);
#endif
  return run_lesson<2, 0, 0>(lesson);
}
