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
//     two crews        on Hopper: a warpgroup makes planes while two others multiply, with wgmma
//     clusters of 2    the same, and two blocks share what they fetch of the weights
//     clusters, tiles  that forward, and backward in tiles
//
// Backward needs, of the gradients dz: the planes' gradients dz_k w[t]^T, which it multiplies with
// y and x and adds up as soon as a tile of them is done, and dw[t] = sum over k of P_t,k^T dz_k, a
// product whose left operand is made on the way in again. No plane ever is in memory. What is, of
// whatever batch: the weights once more, in TF32, and dz of as many rows as fit into 64 MiB; and,
// per row, what divided each of its grades (16 bytes; the row itself has 32 for each feature).
//
// The algebra is lesson 10's, common/algebra.cuh; which triples and planes a block has is worked
// out in common/connected.cuh, when this is compiled.

#include "common/algebra.cuh"
#include "common/async_copy.cuh"
#include "common/clifford.cuh"
#include "common/clifford.h"
#include "common/connected.cuh"
#include "common/connected_slices.cuh"
#include "common/connected_unfused.cuh"
#include "common/hopper.cuh"
#include "common/tf32_tiles.cuh"
#include "common/tiles.cuh"

// ---- Planes in tiles ----------------------------------------------------------------------------

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
        constexpr int to_first = Own::plane(c, i) - first;
        unroll<first, A::first(c + 1)>([&](auto blade) {
          to[(to_first + blade) * kPlane] =
              rounded_to_tf32(sum_terms<A, Of::result, t, blade>(left, right).v[0]);
        });
      });
    }
    copy_async_wait<0>();
    __syncthreads();
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

// dx and dy of a tile, triple by triple. The planes' gradients exist in shared memory only; the
// sums over the triples are in memory, at places that only this block comes to.
template <typename A>
__global__ void __launch_bounds__(kPairThreads, 2)
    input_gradient_tiles(const float* x, const float* y, const float* w, ResultGradients dz,
                         float* dx, float* dy, Layer layer) {
  extern __shared__ __align__(128) float shared[];
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kGradientCols;
  const size_t plane = layer.plane();
  const auto for_places = [&](auto width, auto visit) {
    constexpr int kWidth = decltype(width)::value;
#pragma unroll 1
    for (int e = threadIdx.x * kWidth; e < kTile * kGradientCols; e += kPairThreads * kWidth) {
      const int row = e / kGradientCols, col = e % kGradientCols;
      if (row0 + row >= dz.rows || col0 + col >= layer.features) continue;
      visit(static_cast<size_t>(dz.first + row0 + row) * layer.features + col0 + col,
            shared + row * kGradientStride + col);
    }
  };
  unroll<0, A::kTriples>([&](auto t) {
    constexpr int c = A::triple(t).result, first = A::first(c);
    plane_gradients<A::blades_of(c)>(
        dz.data + first * dz.pitch + static_cast<size_t>(row0) * dz.stride,
        w + (static_cast<size_t>(t) * dz.stride + col0) * dz.stride, dz, layer.features, shared);
    const auto add_here = [&](auto width) {
      for_places(width, [&](size_t at, const float* d) {
        add_plane_gradients<A, t, decltype(width)::value>(d, kTile * kGradientStride, x + at,
                                                          y + at, dx + at, dy + at, plane);
      });
    };
    if (layer.features % 4 == 0) {
      add_here(Constant<4>());
    } else {
      add_here(Constant<1>());
    }
    __syncthreads();
  });
  // Here a thread finishes places of others.
  for_places(Constant<1>(), [&](size_t at, const float*) {
    finish_gradients<A>(x + at, y + at, dx + at, dy + at, plane);
  });
}

constexpr int kWeightDepth = 8, kWeightPlane = kWeightDepth * kRowStride;
template <typename A>
constexpr int kWeightTileBytes = sizeof(float) * (WeightParts<A>::most_planes() + 3) * kWeightPlane;

// Sums of P_t,k^T dz_k for triples `first` to `first` + kCount - 1 of those of grade c.
template <typename A, int c, int first, int kCount>
__device__ __forceinline__ void multiply_transposed(TileSum (&sums)[3], const float* planes,
                                                    const float* results) {
  constexpr int kBlades = A::blades_of(c);
  const TileWarp warp;
#pragma unroll
  for (int blade = 0; blade < kBlades; ++blade) {
    unsigned b[4][2];
    warp.load_right(b, results + blade * kWeightPlane);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        unsigned a[4];
        warp.load_left_transposed(a, planes + ((first + i) * kBlades + blade) * kWeightPlane, m);
        TileWarp::multiply(sums[i][m], a, b);
      }
    }
  }
}

// A tile (64 features of x and y, 64 of the result) of dw[t], for all triples t of grade c, summed
// over rows `begin` to `end` - 1 of dz. Each step takes 8 rows of the batch: the planes are made as
// in forward_tile, and are read transposed.
template <typename A, int c>
__device__ __forceinline__ void weight_gradient_tile(const float* x, const float* y,
                                                     const ResultGradients& dz, float* dw,
                                                     int begin, int end, bool adds, float* shared,
                                                     const Layer& layer) {
  using Parts = WeightParts<A>;
  constexpr int kBlades = A::blades_of(c), kFirstBlade = A::first(c);
  constexpr int kTriples = Parts::triples(c), kHalf = Parts::half(c);
  static_assert(kWeightDepth * kTile == 2 * kPairThreads);
  float* const planes = shared;
  float* const results = shared + kTriples * kBlades * kWeightPlane;
  const TileWarp warp;
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
  TileSum sums[3] = {};
  for (int n = begin; n < end; n += kWeightDepth) {
    for (int i = threadIdx.x; i < kBlades * kWeightDepth * 16; i += kPairThreads) {
      const int blade = i / 16 / kWeightDepth, row = i / 16 % kWeightDepth, col = i % 16 * 4;
      copy_async<16>(results + blade * kWeightPlane + row * kRowStride + col,
                     dz.data + (kFirstBlade + blade) * dz.pitch +
                         static_cast<size_t>(n + row) * dz.stride + col0 + col,
                     n + row < end);
    }
    copy_async_commit();
    const int row = threadIdx.x / (kTile / 2), f = threadIdx.x % (kTile / 2) * 2;
    const int at = n + row < end ? dz.first + n + row : layer.batch;
    Multivectors<A, 2> left = load_neighbours<A, 2>(x, at, row0 + f, layer);
    const Multivectors<A, 2> right = load_neighbours<A, 2>(y, at, row0 + f, layer);
    apply_gates(left, right);
    unroll<0, kTriples>([&](auto i) {
      constexpr int t = Parts::triple(c, i);
      unroll<0, kBlades>([&](auto k) {
        store_rounded(planes + (i * kBlades + k) * kWeightPlane + row * kRowStride + f,
                      sum_terms<A, Of::result, t, kFirstBlade + k>(left, right));
      });
    });
    copy_async_wait<0>();
    __syncthreads();
    if (warp.group == 0) {
      multiply_transposed<A, c, 0, kHalf>(sums, planes, results);
    } else {
      multiply_transposed<A, c, kHalf, kTriples - kHalf>(sums, planes, results);
    }
    __syncthreads();
  }
  unroll<0, kTriples>([&](auto i) {
    constexpr size_t t = Parts::triple(c, i);
    if (warp.group != i / kHalf) return;
    warp.for_results(sums[i % kHalf], [&](int row, int col, float value) {
      if (row0 + row >= layer.features || col0 + col >= layer.features) return;
      float& to = dw[(t * layer.features + row0 + row) * layer.features + col0 + col];
      to = adds ? to + value : value;
    });
  });
}

// blockIdx.z: which grade of the result, and which of `splits` equal shares of the rows, each of
// which has a sum of its own, one after the other in dw.
template <typename A>
__global__ void __launch_bounds__(kPairThreads, 2)
    weight_gradient_tiles(const float* x, const float* y, ResultGradients dz, float* dw, int splits,
                          bool adds, Layer layer) {
  extern __shared__ __align__(128) float shared[];
  const int grade = blockIdx.z % A::kGrades, split = blockIdx.z / A::kGrades;
  const int share = (dz.rows + splits - 1) / splits;
  const int begin = min(dz.rows, split * share), end = min(dz.rows, begin + share);
  float* const to = dw + static_cast<size_t>(split) * A::kTriples * layer.features * layer.features;
  unroll<0, A::kGrades>([&](auto c) {
    if (grade == c) weight_gradient_tile<A, c>(x, y, dz, to, begin, end, adds, shared, layer);
  });
}

// ---- Two crews ----------------------------------------------------------------------------------

// Slices of planes and weights, as wgmma reads them: common/connected_slices.cuh. The weights are
// the left operand: z comes out transposed, and one instruction multiplies all planes of a triple.
//
// A block owns 64 rows by 128 columns of 4 blades. One warpgroup makes planes and two multiply, a
// step (8 features) apart. Per step the tensor cores take 1408 cycles in 3-D; the planes need
// half as many instructions, and shared memory moves 1.4 times what it can in that time (planes in
// and out, weights in and out): it is the limit.
#if HOPPER_CODE
// The makers: a thread has four features of a row. x and y of the next step are on their way while
// the planes of this one are made. Of 8 neighbouring lanes' rows every other one is another, whose
// pieces of 16 bytes, swizzled, are in different banks. One thread has the copy engine bring the
// weights, of which each block of the cluster fetches its share for all.
template <typename A, int part, int kCluster>
__device__ __forceinline__ void make_planes(CrewMemory<A>& shared, const float* x, const float* y,
                                            const CUtensorMap* weights, int row0, Layer layer) {
  using Own = Part<A, part>;
  using Memory = CrewMemory<A>;
  constexpr int kShare = Memory::kWeightRows / kCluster;
  const int steps = (layer.features + 7) / 8, rank = kCluster == 1 ? 0 : cluster_rank();
  const int stages_before = (blockIdx.z * gridDim.y + blockIdx.y) * steps;
  Ring<kWeightStages> incoming;
  const auto fetch_weights = [&](int step) {
    barrier_wait(&shared.weights_empty[incoming.stage], incoming.parity ^ 1);
    Barrier* const full = &shared.weights_full[incoming.stage];
    barrier_arrive_expect(full, sizeof(shared.weights[0]));
    float* const to = shared.weights[incoming.stage] + rank * kShare * kSliceFloats;
    const int row = (stages_before + step) * Memory::kWeightRows + rank * kShare;
    if constexpr (kCluster == 1) {
      for (int half = 0; half < 2; ++half) {
        tensor_load(to + half * kShare / 2 * kSliceFloats, weights, row + half * kShare / 2, 0,
                    full);
      }
    } else {
      tensor_load_multicast(to, weights, row, 0, full, (1 << kCluster) - 1);
    }
    incoming.advance();
  };
  const int warp = warp_of_block(), lane = threadIdx.x % 32, half = lane % 2;
  const int row = warp * 16 + lane / 8 % 2 + lane / 2 % 4 * 2 + lane / 16 * 8;
  const bool fetches = warp == 0 && elect_one();
  if (fetches) fetch_weights(0);
  Multivectors<A, 4> left = load_neighbours<A, 4>(x, row0 + row, 4 * half, layer);
  Multivectors<A, 4> right = load_neighbours<A, 4>(y, row0 + row, 4 * half, layer);
  Ring<kPlaneStages> ring;
  for (int step = 0; step < steps; ++step, ring.advance()) {
    const int next = 8 * (step + 1) + 4 * half;
    const Multivectors<A, 4> next_left = load_neighbours<A, 4>(x, row0 + row, next, layer);
    const Multivectors<A, 4> next_right = load_neighbours<A, 4>(y, row0 + row, next, layer);
    apply_gates(left, right);
    barrier_wait(&shared.planes_empty[ring.stage], ring.parity ^ 1);
    if (fetches && step + 1 < steps) fetch_weights(step + 1);
    __syncwarp();
    Own::for_triples([&](auto c, auto i) {
      constexpr int t = Own::triple(c, i), triples = Own::triples(c), first = A::first(c);
      constexpr int kRows = A::blades_of(c) * kCrewRows;
      constexpr int start = Memory::template plane_floats<part>(c);
      const int slice = triples * ring.stage + i;
      float* const to = shared.planes + start + (slice / 4 * kRows + row) * kSliceFloats +
                        ((slice % 4 * 2 + half) ^ row % 8) * 4;
      unroll<first, A::first(c + 1)>([&](auto k) {
        store_rounded(to + (k - first) * kCrewRows * kSliceFloats,
                      sum_terms<A, Of::result, t, k>(left, right));
      });
    });
    shared_fence();
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.planes_full[ring.stage]);
    left = next_left;
    right = next_right;
  }
}

// Those who multiply: consumer g has columns 64 g to 64 g + 63 of the block's. A step's products
// run while the stages of the step before are given back.
template <typename A, int part, int kCluster>
__device__ __forceinline__ void multiply_planes(CrewMemory<A>& shared, float* z, int row0, int col0,
                                                Layer layer) {
  using Own = Part<A, part>;
  using Memory = CrewMemory<A>;
  const int steps = (layer.features + 7) / 8, consumer = (warp_of_block() - kMakers / 32) / 4;
  float sums[32 * Own::kBlades];
  Ring<kPlaneStages> planes, planes_done;
  Ring<kWeightStages> weights, weights_done;
  const auto release = [&] {
    const int thread = threadIdx.x % 128;
    if (thread == 0) barrier_arrive(&shared.planes_empty[planes_done.stage]);
    if constexpr (kCluster == 1) {
      if (thread == 0) barrier_arrive(&shared.weights_empty[weights_done.stage]);
    } else {
      if (thread < kCluster) barrier_arrive(&shared.weights_empty[weights_done.stage], thread);
    }
    planes_done.advance();
    weights_done.advance();
  };
  for (int step = 0; step < steps; ++step) {
    barrier_wait(&shared.weights_full[weights.stage], weights.parity);
    barrier_wait(&shared.planes_full[planes.stage], planes.parity);
    wgmma_fence();
    Own::for_triples([&](auto c, auto i) {
      constexpr int slot = Own::before(c) + i, triples = Own::triples(c);
      constexpr int kRows = A::blades_of(c) * kCrewRows,
                    kFirst = 32 * (A::first(c) - Own::kFirstBlade);
      constexpr int start = Memory::template plane_floats<part>(c);
      const int weight = consumer * Own::kTriples + slot, plane = triples * planes.stage + i;
      const float* const left = shared.weights[weights.stage] + weight / 4 * 64 * kSliceFloats;
      const float* const right = shared.planes + start + plane / 4 * kRows * kSliceFloats;
      wgmma_tf32(columns_of<kFirst, kRows / 2>(sums), descriptor_a(left) + weight % 4 * 2,
                 descriptor_a(right) + plane % 4 * 2, step > 0 || i > 0);
    });
    wgmma_commit();
    planes.advance();
    weights.advance();
    if (step > 0) {
      wgmma_wait<1>();
      release();
    }
  }
  wgmma_wait<0>();
  release();
  unroll<0, Own::kBlades>([&](auto k) {
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      const int n = row0 + Sum<kCrewRows>::col(e),
                f = col0 + 64 * consumer + Sum<kCrewRows>::row(e);
      if (n < layer.batch && f < layer.features) {
        z[(Own::kFirstBlade + k) * layer.plane() + static_cast<size_t>(n) * layer.features + f] =
            sums[32 * k + e];
      }
    }
  });
}
#endif

template <typename A, int kCluster>
__global__ void HOPPER_CLUSTER(kCluster) __launch_bounds__(kCrewThreads, 1)
    forward_crews(const float* x, const float* y, const __grid_constant__ CUtensorMap weights,
                  float* z, Layer layer) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  CrewMemory<A>& shared = *reinterpret_cast<CrewMemory<A>*>(bytes);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kPlaneStages; ++s) {
      barrier_init(&shared.planes_full[s], kMakers / 32);
      barrier_init(&shared.planes_empty[s], 2);
    }
    for (int s = 0; s < kWeightStages; ++s) {
      barrier_init(&shared.weights_full[s], 1);
      barrier_init(&shared.weights_empty[s], 2 * kCluster);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (kCluster > 1) cluster_meet();
  const int row0 = blockIdx.x * kCrewRows, col0 = blockIdx.y * kCrewCols;
  if (warp_of_block() < kMakers / 32) {
    registers_shrink_to<152>();
    unroll<0, kParts<A>>([&](auto part) {
      if (static_cast<int>(blockIdx.z) != part) return;
      make_planes<A, part, kCluster>(shared, x, y, &weights, row0, layer);
    });
  } else {
    registers_grow_to<176>();
    unroll<0, kParts<A>>([&](auto part) {
      if (static_cast<int>(blockIdx.z) != part) return;
      multiply_planes<A, part, kCluster>(shared, z, row0, col0, layer);
    });
  }
  if constexpr (kCluster > 1) cluster_meet();  // others' arrivals may still be on their way
#endif
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
        stride((of.layer.features + kGradientCols - 1) / kGradientCols * kGradientCols),
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

template <typename A, int kCluster>
struct Crews {
  Crews(const Tensors& tensors, const Buffer<float>& kept)
      : of(tensors),
        cols((of.layer.features + kCrewCols - 1) / kCrewCols),
        steps((of.layer.features + 7) / 8),
        weights(of.problem.output<float>(static_cast<size_t>(rows()) * kSliceFloats)),
        inverses(kept) {
    allow_shared_bytes(forward_crews<A, kCluster>, kBytes);
  }
  double bytes() const { return weights.bytes() + inverses.bytes(); }
  int64_t rows() const {
    return static_cast<int64_t>(kParts<A>) * cols * steps * CrewMemory<A>::kWeightRows;
  }
  void forward() const {
    const Layer& layer = of.layer;
    arrange_weights<A><<<dim3(steps, cols, kParts<A>), kCrewCols>>>(of.w, weights, layer.features);
    const int row_tiles = (layer.batch + kCrewRows - 1) / kCrewRows;
    const dim3 grid((row_tiles + kCluster - 1) / kCluster * kCluster, cols, kParts<A>);
    constexpr int kBox = CrewMemory<A>::kWeightRows / (kCluster == 1 ? 2 : kCluster);
    const CUtensorMap map = tensor_map<float>(weights, rows(), kSliceFloats, kBox);
    forward_crews<A, kCluster><<<grid, kCrewThreads, kBytes>>>(of.x, of.y, map, of.out, layer);
    if (layer.normed) normalize_rows<A><<<layer.batch, 256>>>(of.out, inverses, layer);
  }

  static constexpr int kBytes = sizeof(CrewMemory<A>);
  Tensors of;
  int cols, steps;
  Buffer<float> weights, inverses;
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
  const auto add_crews = [&](const char* name, const auto& crews) {
    problem.kernel(name, Role::ours, [=] { crews.forward(); })
        .occupies(of.bytes() + crews.bytes())
        .hopper_only();
  };
  add_crews("two crews", Crews<A, 1>(of, tiled.inverses));
  add_crews("clusters of 2", Crews<A, 2>(of, tiled.inverses));
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
      .resources(input_gradient_tiles<A>, kPairThreads, kGradientTileBytes)
      .occupies(ends + tiled.bytes())
      .needs(80);
  const Crews<A, 2> crews(of, tiled.forward.inverses);
  const auto crews_and_tiles = [=] {
    crews.forward();
    tiled.forward.round();
    tiled.backward();
  };
  problem.kernel("clusters, tiles", Role::ours, crews_and_tiles)
      .resources(input_gradient_tiles<A>, kPairThreads, kGradientTileBytes)
      .occupies(ends + tiled.bytes() + crews.weights.bytes())
      .hopper_only();
}

template <int p, int q, int r>
int run_lesson(Lesson& lesson) {
  using A = Cl<p, q, r>;
  CliffordTables tables(lesson, p, q, r, A::kTriples, true);
  const auto blas = std::make_shared<Cublas>();
  for (const CliffordReference& size : tables.sizes()) {
    const double flops = 2.0 * Planes<A>::kCount * size.shape().features;
    const Tensors forward = tables.forward(size, flops);
    add_forward<A>(forward, blas);
    if (!lesson.flag("--sweep")) {
      forward.problem.compare("two crews", "unfused",
                              "Forward with planes on the way in: % times as fast.");
    }
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
