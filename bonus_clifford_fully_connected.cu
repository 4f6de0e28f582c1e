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
// Read lesson 10 first. From it come the words for what is computed: a multivector has 2^n
// coefficients, one for each blade; in 3-D the blades are 1, e1, e2, e3, e12, e13, e23 and e123.
// The grade of a blade is how many of e1, e2, e3 it is made of. Two blades multiplied are plus or
// minus a blade, e_i e_j = sign e_k, and the grades of i, k and j are a grade triple. x_1 is x's
// coefficient of the blade 1, and gate(s) = (1 + erf(s / sqrt 2)) / 2.
//
// Lesson 10's layer has a weight per feature and grade triple; here it is a matrix, which mixes the
// features: the fully connected layer of a Clifford network. All coefficients of one blade, for all
// rows of the batch and all features, are a matrix (batch, features), called a *plane*. The P_t,k
// are planes, too, left operands of products. The 20 triples of 3-D have 44 of them, the 10 triples
// of 2-D have 14.
//
// For n = 2, whose table lesson 10 has, e1 of z is four products of matrices, one for each place
// in which the table has e1:
//
//     z_e1 = (x'_1 y'_e1) w[0,1,1] + (x'_e1 y'_1) w[1,1,0]
//                                  + (x'_e12 y'_e2) w[2,1,1] - (x'_e2 y'_e12) w[1,1,2]
//
// What stands in parentheses, multiplied element by element, is a plane P. Where a triple has
// several places for a blade their sum is the plane: for the blade 1 of z, w[1,0,1] has the plane
// x'_e1 y'_e1 + x'_e2 y'_e2. For a blade of z the planes of its triples, side by side, are the left
// operand of one product, and the weights of these triples, below each other, are the right one.
//
// Where does the time go? In 3-D tensor cores do 2 x 44 batch features^2 operations, in TF32.
// Memory moves 8 planes of each of x, y and out. If the planes P go through memory, too, 44 are
// written, and read again. Even if these reads find them in the L2 cache, at 512 features an H100's
// memory needs about as long as its tensor cores, and at 1024 half as long (see the lesson's page).
// So memory and tensor cores should work at the same time. (In 2-D put 14 for 44, and 4 for 8.)
//
//     unfused          kernels write planes to memory, cuBLAS multiplies them, once for each grade
//     planes in tiles  a block makes its planes in shared memory, and multiplies them by mma.sync
//     planes first     (Hopper) a kernel writes planes to memory, the next one multiplies them
//     planes beside    (Hopper) three warps of a block write planes, while others multiply
//
// The last two rows use the words of lesson 3, from its *one warpgroup* to its *clusters*: the copy
// engine, producer and consumers, the stages of a pipeline, clusters.
//
// Forward stands first, then backward. By the chain rule a product C = A B has the gradients
// dA = dC B^T and dB = A^T dC. Here z_k is a sum of products P_t,k w[t]. So P_t,k has the gradient
// dz_k w[t]^T, from which dx and dy come, and dw[t] is the sum over k of P_t,k^T dz_k.
//
// All kernels but *unfused* move packs of up to four neighbouring features: for these kernels the
// number of features has to be a multiple of 4.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include "primitives/async_copy.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/hopper/tiles.cuh"
#include "primitives/launch.h"
#include "primitives/mma.cuh"
#include "primitives/spin.cuh"
#include "problems/clifford/clifford.h"

using namespace problems;
using namespace primitives;

// ---- The algebra --------------------------------------------------------------------------------

// (Who has read lesson 10 may go on at Order: this section makes its tables of blades once more.)
// Lesson 10's algebra, for n vectors that all square to +1. A blade is a set of vectors: bit v says
// whether vector v is in it. Blades are numbered by grade, within a grade by their bits: 1; e1, e2,
// e3; e12, e13, e23; e123. Blade 0 is the scalar, which the formulas call 1.
template <int n>
struct Euclidean {
  static constexpr int kBlades = 1 << n, kGrades = n + 1;

  struct Triple {
    int x, result, y;  // grades: a, that of k, and b in the formulas
  };
  struct Tables {
    int grade[kBlades] = {};
    int first[kGrades + 1] = {};                      // the first blade of a grade
    int product[kBlades][kBlades] = {};               // which blade two blades make
    int sign[kBlades][kBlades] = {};                  // with which sign
    Triple triple[kGrades * kGrades * kGrades] = {};  // by x, then result, then y
    int triples = 0;
  };
  // In a product the vectors of a come before those of b. To sort them, each vector of b moves left
  // past those of a that have a higher number, and each of these steps changes the sign.
  static constexpr int sign_of_product(unsigned a, unsigned b) {
    int swaps = 0;
    for (unsigned later = a >> 1; later != 0; later >>= 1) swaps += std::popcount(later & b);
    return swaps % 2 == 0 ? 1 : -1;
  }
  static constexpr Tables make_tables() {
    Tables t;
    unsigned vectors[kBlades] = {};  // of a blade
    int number[kBlades] = {};        // of the blade that has these vectors
    int blades = 0;
    for (int grade = 0; grade < kGrades; ++grade) {
      t.first[grade] = blades;
      for (unsigned set = 0; set < kBlades; ++set) {
        if (std::popcount(set) != grade) continue;
        vectors[blades] = set;
        t.grade[blades] = grade;
        number[set] = blades++;
      }
    }
    t.first[kGrades] = blades;
    for (int i = 0; i < kBlades; ++i) {
      for (int j = 0; j < kBlades; ++j) {
        t.product[i][j] = number[vectors[i] ^ vectors[j]];
        t.sign[i][j] = sign_of_product(vectors[i], vectors[j]);
      }
    }
    // Two sets of a and b vectors that have s in common make one of a + b - 2 s. Together they have
    // a + b - s different vectors, and there are only n.
    for (int a = 0; a < kGrades; ++a) {
      for (int c = 0; c < kGrades; ++c) {
        for (int b = 0; b < kGrades; ++b) {
          const int s = (a + b - c) / 2;
          const bool occurs = (a + b - c) % 2 == 0 && s >= 0 && s <= a && s <= b && a + b - s <= n;
          if (occurs) t.triple[t.triples++] = {a, c, b};
        }
      }
    }
    return t;
  }
  static constexpr Tables kTables = make_tables();
  static constexpr int kTriples = kTables.triples;

  __host__ __device__ static constexpr int first(int grade) { return kTables.first[grade]; }
  __host__ __device__ static constexpr int grade(int blade) { return kTables.grade[blade]; }
  __host__ __device__ static constexpr Triple triple(int t) { return kTables.triple[t]; }
  // The blade k that i and j make, e_i e_j = +-e_k. Of the three any two make the third one.
  __host__ __device__ static constexpr int product(int i, int j) { return kTables.product[i][j]; }
  __host__ __device__ static constexpr int sign(int i, int j) { return kTables.sign[i][j]; }
};
static_assert(Euclidean<3>::sign(2, 1) == -1);  // e2 e1 = -e12
static_assert(Euclidean<2>::sign(3, 3) == -1);  // e12 e12 = -1
static_assert(Euclidean<2>::kTriples == 10 && Euclidean<3>::kTriples == 20);

// What is multiplied by what, as numbers that kernels read at run time. In w the triples are
// ordered by the grade of x. Here they are ordered by the grade of their results, and a *slot* is a
// triple's number in this order. Planes are numbered by slot, then by blade. So what one product of
// matrices adds up has neighbouring numbers:
//
//     grade c of the result   slots slot[c] to slot[c + 1] - 1, blades blade[c] to blade[c + 1] - 1
//     its planes              from plane[c] on: blades(c) of the first slot, then of the next one
//
// For example, in 3-D grade 1 has slots 4 to 9, which are the triples (0,1,1), (1,1,0), (1,1,2),
// (2,1,1), (2,1,3) and (3,1,2), and blades 1 to 3. Its planes are 4 to 21: 4 to 6 are those of slot
// 4 for z_e1, z_e2 and z_e3, then come those of slot 5.
struct Order {
  int grades = 0;
  int triple_of[20] = {};  // the triple that has this slot
  int slot[5] = {}, plane[5] = {}, blade[5] = {};

  __host__ __device__ constexpr int slots(int c) const { return slot[c + 1] - slot[c]; }
  __host__ __device__ constexpr int blades(int c) const { return blade[c + 1] - blade[c]; }
  __host__ __device__ constexpr int planes() const { return plane[grades]; }
  // The grade of slot, plane or blade `number`. `first` is the array slot, plane or blade.
  __host__ __device__ static constexpr int grade_of(const int (&first)[5], int number) {
    int c = 0;
    while (number >= first[c + 1]) ++c;
    return c;
  }
};
template <typename A>
constexpr Order make_order() {
  Order order;
  order.grades = A::kGrades;
  for (int c = 0; c < A::kGrades; ++c) {
    order.blade[c + 1] = A::first(c + 1);
    order.slot[c + 1] = order.slot[c];
    for (int t = 0; t < A::kTriples; ++t) {
      if (A::triple(t).result == c) order.triple_of[order.slot[c + 1]++] = t;
    }
    order.plane[c + 1] = order.plane[c] + order.slots(c) * order.blades(c);
  }
  return order;
}
template <typename A>
inline constexpr Order kOrder = make_order<A>();
static_assert(kOrder<Euclidean<3>>.planes() == 44 && kOrder<Euclidean<2>>.planes() == 14);

// What Order says of one slot, but known when the program is compiled: the grade c of its result,
// the slot's number i within this grade, its triple, the blades of its result, its first plane.
template <typename A, int slot>
struct Slot {
  static constexpr int c = Order::grade_of(kOrder<A>.slot, slot), i = slot - kOrder<A>.slot[c];
  static constexpr int triple = kOrder<A>.triple_of[slot];
  static constexpr int first = A::first(c), end = A::first(c + 1);
  static constexpr int plane = kOrder<A>.plane[c] + i * (end - first);
};

// ---- Multivectors in registers ------------------------------------------------------------------

// As in lesson 10: a Pack is the same blade of W neighbouring features. unroll<a, b>(f) calls f
// with a, ..., b - 1, each a Constant, which is a constant for the compiler, too.
template <int W>
struct alignas(W * sizeof(float)) Pack {
  float v[W];
};
template <typename A, int W>
struct Multivectors {
  Pack<W> blade[A::kBlades];
};
template <int n>
struct Constant {
  static constexpr int value = n;
  __device__ constexpr operator int() const { return n; }
};
template <int first, typename Body, int... i>
__device__ __forceinline__ void unroll_sequence(Body& body, std::integer_sequence<int, i...>) {
  (body(Constant<first + i>()), ...);
}
template <int first, int end, typename Body>
__device__ __forceinline__ void unroll(Body body) {
  unroll_sequence<first>(body, std::make_integer_sequence<int, end - first>());
}
template <int sign, int W>
__device__ __forceinline__ void add_product(Pack<W>& sum, const Pack<W>& a, const Pack<W>& b) {
#pragma unroll
  for (int e = 0; e < W; ++e) sum.v[e] += sign * a.v[e] * b.v[e];
}

__device__ float gate(float s) { return 0.5f + 0.5f * erff(s * 0.70710678f); }

// x becomes gate(x_1) gate(y_1) x. Each term of a plane has one factor of x and one of y, so this x
// and y make the planes of x' and y'.
template <typename A, int W>
__device__ __forceinline__ void apply_gates(Multivectors<A, W>& x, const Multivectors<A, W>& y) {
#pragma unroll
  for (int e = 0; e < W; ++e) {
    const float factor = gate(x.blade[0].v[e]) * gate(y.blade[0].v[e]);
    unroll<0, A::kBlades>([&](auto i) { x.blade[i].v[e] *= factor; });
  }
}

// W neighbouring features of all blades, from `at` on; two blades are `plane` elements apart.
template <typename A, int W>
__device__ __forceinline__ Multivectors<A, W> load(const float* at, size_t plane) {
  Multivectors<A, W> result;
  unroll<0, A::kBlades>(
      [&](auto k) { result.blade[k] = *reinterpret_cast<const Pack<W>*>(at + k * plane); });
  return result;
}
// The same of row n and feature f; zeros where there is no such row or feature.
template <typename A, int W>
__device__ __forceinline__ Multivectors<A, W> load_inside(const float* from, int n, int f,
                                                          const Layer& layer) {
  if (n >= layer.batch || f >= layer.features) return {};
  return load<A, W>(from + static_cast<size_t>(n) * layer.features + f, layer.plane());
}

// P_t,k: each x_i of grade a is multiplied by the y_j that makes k with it, if j has grade b.
template <typename A, int t, int k, int W>
__device__ __forceinline__ Pack<W> plane_of(const Multivectors<A, W>& x,
                                            const Multivectors<A, W>& y) {
  constexpr int a = A::triple(t).x, b = A::triple(t).y;
  Pack<W> sum = {};
  unroll<A::first(a), A::first(a + 1)>([&](auto i) {
    constexpr int j = A::product(i, k);
    if constexpr (A::grade(j) == b) {
      add_product<A::sign(i, j)>(sum, x.blade[i], y.blade[j]);
    }
  });
  return sum;
}
// Calls give(slot, k, P) for all planes of these slots, in their order. P has the W elements of the
// plane that these W multivectors of x and y make.
template <typename A, int first_slot, int end_slot, int W, typename Give>
__device__ __forceinline__ void make_planes(const Multivectors<A, W>& x,
                                            const Multivectors<A, W>& y, Give give) {
  unroll<first_slot, end_slot>([&](auto slot) {
    using S = Slot<A, slot>;
    unroll<S::first, S::end>([&](auto k) { give(slot, k, plane_of<A, S::triple, k>(x, y)); });
  });
}

__device__ float rounded_to_tf32(float value) { return __uint_as_float(to_tf32(value)); }

template <int W>
__device__ __forceinline__ void store_rounded(float* to, Pack<W> pack) {
#pragma unroll
  for (int e = 0; e < W; ++e) pack.v[e] = rounded_to_tf32(pack.v[e]);
  *reinterpret_cast<Pack<W>*>(to) = pack;
}

// How threads add up kCount numbers over a row's features, as in lesson 10: lanes exchange what
// they have, then the warps meet in shared memory. Sums is padded to whole pieces of 16 bytes,
// which a thread may store and load at once.
template <int kCount>
struct alignas(16) Sums {
  float value[(kCount + 3) / 4 * 4];
};
constexpr int kMaxWarps = 16;  // of a block
template <int kCount>
__device__ __forceinline__ void add_up_warp(Sums<kCount>& sums) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sums.value[i] += __shfl_xor_sync(0xffffffffu, sums.value[i], other);
    }
  }
}
template <int kCount>
__device__ __forceinline__ void add_up_block(Sums<kCount>& sums, Sums<kCount>* partials) {
  add_up_warp(sums);
  if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = sums;
  __syncthreads();
  const int warps = blockDim.x / 32;
  sums = partials[0];
  for (int warp = 1; warp < warps; ++warp) {
    for (int i = 0; i < kCount; ++i) sums.value[i] += partials[warp].value[i];
  }
}

__device__ float inverse_rms(float squares, const Layer& layer) {
  constexpr float kEpsilon = 1e-6f;
  return rsqrtf(squares * layer.inverse_features + kEpsilon);
}

// ---- Unfused ------------------------------------------------------------------------------------

// The baseline, as a framework runs it, but with few products: the planes of a grade of the result
// form one matrix, so the library multiplies once for each grade. Before that, kernels apply the
// gates, write all planes, and copy the weights to the order of slots. Then come the norms. For
// gates and planes a thread has a multivector, for norms a block has a row of one grade.

// gated = in gate(in_1)
template <typename A>
__global__ void apply_gate(const float* in, float* gated, Layer layer) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= layer.plane()) return;
  const Multivectors<A, 1> value = load<A, 1>(in + at, layer.plane());
  const float factor = gate(value.blade[0].v[0]);
  unroll<0, A::kBlades>(
      [&](auto k) { gated[k * layer.plane() + at] = factor * value.blade[k].v[0]; });
}

// Where the library's matrices have an element. Grade c of the result has one matrix. Its rows are
// first the batch for the first blade, then the batch for the next one, and so on. A row has
// `features` numbers of each triple of the grade, triple after triple.
template <typename A, int slot>
__device__ __forceinline__ size_t place_in_library(int k, size_t at, const Layer& layer) {
  using S = Slot<A, slot>;
  constexpr int kSlots = kOrder<A>.slots(S::c), kFirst = kOrder<A>.plane[S::c];
  const size_t n = at / layer.features, f = at % layer.features;
  return (kFirst + (k - S::first) * kSlots) * layer.plane() + (n * kSlots + S::i) * layer.features +
         f;
}

template <typename A>
__global__ void multiply_pairs(const float* x, const float* y, float* planes, Layer layer) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t plane = layer.plane();
  if (at >= plane) return;
  const Multivectors<A, 1> left = load<A, 1>(x + at, plane), right = load<A, 1>(y + at, plane);
  make_planes<A, 0, A::kTriples>(left, right, [&](auto slot, auto k, const Pack<1>& P) {
    planes[place_in_library<A, slot>(k, at, layer)] = P.v[0];
  });
}

// Copies the triples' matrices, `size` elements each, to the order of their slots, or, if `back`,
// from it to the order of w. Each row of the grid copies one matrix.
__global__ void order_weights(const float* from, float* to, size_t size, bool back,
                              const __grid_constant__ Order order) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t triple = order.triple_of[blockIdx.y] * size, slot = blockIdx.y * size;
  if (at < size) to[(back ? triple : slot) + at] = from[(back ? slot : triple) + at];
}

// out = z / rms(z) for the `blades` planes of one grade: rms(z) is the root in the formula of out,
// at the top. Keeps the 1 / rms for backward.
__global__ void normalize_grade(const float* z, float* out, float* inverses, int blades,
                                Layer layer) {
  __shared__ Sums<1> partials[kMaxWarps];
  const size_t row = static_cast<size_t>(blockIdx.x) * layer.features;
  Sums<1> squares = {};
  for (int blade = 0; blade < blades; ++blade) {
    for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
      const float value = z[blade * layer.plane() + row + f];
      squares.value[0] += value * value;
    }
  }
  add_up_block(squares, partials);
  const float inverse = inverse_rms(squares.value[0], layer);
  if (threadIdx.x == 0) inverses[blockIdx.x] = inverse;
  for (int blade = 0; blade < blades; ++blade) {
    for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
      const size_t i = blade * layer.plane() + row + f;
      out[i] = z[i] * inverse;
    }
  }
}

// c = a b in TF32, where a is (m, k), b is (k, n), and all are row-major. a or b may be stored
// transposed. cuBLAS takes matrices as column-major. So it is asked for c^T = b^T a^T.
enum class Stored { plain, transposed };
void library_product(cublasHandle_t blas, const float* a, Stored a_is, const float* b, Stored b_is,
                     float* c, int m, int n, int k) {
  const float one = 1, zero = 0;
  const bool a_turned = a_is == Stored::transposed, b_turned = b_is == Stored::transposed;
  CUBLAS_CHECK(cublasGemmEx(blas, b_turned ? CUBLAS_OP_T : CUBLAS_OP_N,
                            a_turned ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &one, b, CUDA_R_32F,
                            b_turned ? k : n, a, CUDA_R_32F, a_turned ? m : k, &zero, c, CUDA_R_32F,
                            n, CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_GEMM_DEFAULT));
}

// ---- Planes in tiles ----------------------------------------------------------------------------

// What the products of these kernels are made of. They need no Hopper. Four warps own a tile of 64
// by 64. Each has 32 by 32 of it, which begin at (row, col). A sum of mma_m16n8k8_tf32 is 16 x 8:
// lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next one. In a TileSum [m][j]
// begins at row 16 m and column 8 j of the 32 by 32. Backward has two `group`s of four warps.
//
//     place<pieces>(row, piece)   where a piece of 4 floats of a left operand is in shared memory.
//                                 Pieces change places, so that 8 rows are in different banks
//     load_left                   a left operand of 16 x 8, which lies as place() says. It comes by
//                                 ldmatrix, which takes 4 floats for 8 numbers of 16 bits
//     load_right                  a right operand of 8 x 32. Its 8 rows are kRowStride apart, so
//                                 that lanes read from different banks
//     for_results(sum, visit)     calls visit(row, col, value) with the lane's results
constexpr int kTile = 64, kTileThreads = 128, kRowStride = kTile + 8;
using TileSum = float[2][4][4];

struct TileWarp {
  int lane = threadIdx.x % 32, group = threadIdx.x / kTileThreads;
  int row = threadIdx.x / 64 % 2 * 32, col = threadIdx.x / 32 % 2 * 32;

  template <int kPieces>
  __device__ static int place(int row, int piece) {
    const int turn = kPieces == 2 ? row / 4 % 2 : row % 8;
    return (row * kPieces + (piece ^ turn)) * 4;
  }
  template <int kPieces>
  __device__ void load_left(unsigned (&a)[4], const float* tile, int m, int k) const {
    ldmatrix_x4(a, tile + place<kPieces>(row + 16 * m + lane % 16, k / 4 + lane / 16));
  }
  __device__ void load_right(unsigned (&b)[4][2], const float* tile) const {
    const float* from = tile + lane % 4 * kRowStride + col + lane / 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      b[j][0] = __float_as_uint(from[8 * j]);
      b[j][1] = __float_as_uint(from[4 * kRowStride + 8 * j]);
    }
  }
  __device__ static void multiply(float (&sum)[4][4], const unsigned (&a)[4],
                                  const unsigned (&b)[4][2]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) mma_m16n8k8_tf32(sum[j], a, b[j][0], b[j][1]);
  }
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

// The weights in TF32, each matrix with zeros up to `stride` rows and columns. So no copy of them
// needs a test for an edge. A thread copies an element.
__global__ void round_weights(const float* w, float* to, int features, int stride) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (col >= stride) return;
  const size_t t = blockIdx.z;
  const bool inside = row < features && col < features;
  to[(t * stride + row) * stride + col] =
      inside ? rounded_to_tf32(w[(t * features + row) * features + col]) : 0;
}

// A block works on four blades of the result: in 2-D these are all, in 3-D they are grades 0 and 1,
// or 2 and 3. In either algebra 10 slots lead to them.
template <typename A, int group>
struct FourBlades {
  static constexpr int kFirst = 4 * group, kFirstGrade = A::grade(kFirst);
  static constexpr int kEndGrade = A::grade(kFirst + 3) + 1;
  static constexpr int kFirstSlot = kOrder<A>.slot[kFirstGrade];
  static constexpr int kEndSlot = kOrder<A>.slot[kEndGrade];
  static constexpr int kFirstPlane = kOrder<A>.plane[kFirstGrade];
  static constexpr int kPlanes = kOrder<A>.plane[kEndGrade] - kFirstPlane;
};
// Shared memory for a step: 8 features of 64 rows of each plane, 8 rows of 64 columns of each w[t].
template <typename A>
constexpr int kForwardTileBytes = sizeof(float) * 8 *
                                  (FourBlades<A, 0>::kPlanes * kTile +
                                   FourBlades<A, 0>::kEndSlot * kRowStride);

// These four blades of z for 64 rows and 64 columns. A step takes 8 features, and has three parts:
//
//     load_weights  starts the copies of 8 x 64 weights of each slot
//     make          a thread reads 4 multivectors of x and of y, all blades of them, and writes the
//                   elements of the planes to shared memory
//     multiply      the warps multiply each plane by its slot's weights
//
// The norm needs all columns of a row, which are those of several blocks: so it is computed after
// this kernel, by normalize_rows. While one block makes planes, another one of the multiprocessor
// multiplies.
template <typename A, int group>
__device__ __forceinline__ void forward_tile(const float* x, const float* y, const float* w,
                                             float* z, int stride, float* shared, Layer layer) {
  using Own = FourBlades<A, group>;
  constexpr int kPlane = kTile * 8;
  float* const planes = shared;
  float* const weights = planes + Own::kPlanes * kPlane;
  const TileWarp warp;
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
  const int weight_row = threadIdx.x / 16, weight_col = threadIdx.x % 16 * 4;
  TileSum sums[4] = {};
  const auto load_weights = [&](int k) {
    unroll<Own::kFirstSlot, Own::kEndSlot>([&](auto slot) {
      copy_async<16>(
          weights + ((slot - Own::kFirstSlot) * 8 + weight_row) * kRowStride + weight_col,
          w + (static_cast<size_t>(Slot<A, slot>::triple) * stride + k + weight_row) * stride +
              col0 + weight_col,
          true);
    });
    copy_async_commit();
  };
  const auto make = [&](int k) {
#pragma unroll 1
    for (int e = threadIdx.x; e < kTile * 8; e += kTileThreads) {
      const int row = e / 8, f = e % 8;
      Multivectors<A, 1> left = load_inside<A, 1>(x, row0 + row, k + f, layer);
      const Multivectors<A, 1> right = load_inside<A, 1>(y, row0 + row, k + f, layer);
      apply_gates(left, right);
      float* const to = planes + TileWarp::place<2>(row, f / 4) + f % 4;
      make_planes<A, Own::kFirstSlot, Own::kEndSlot>(
          left, right, [&](auto slot, auto blade, const Pack<1>& P) {
            constexpr int first = Slot<A, slot>::plane - Slot<A, slot>::first - Own::kFirstPlane;
            to[(first + blade) * kPlane] = rounded_to_tf32(P.v[0]);
          });
    }
  };
  const auto multiply = [&] {
    unroll<Own::kFirstSlot, Own::kEndSlot>([&](auto slot) {
      using S = Slot<A, slot>;
      unsigned b[4][2];
      warp.load_right(b, weights + (slot - Own::kFirstSlot) * 8 * kRowStride);
#pragma unroll
      for (int k = S::first; k < S::end; ++k) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          unsigned a[4];
          const int plane = S::plane - Own::kFirstPlane + k - S::first;
          warp.load_left<2>(a, planes + plane * kPlane, m, 0);
          TileWarp::multiply(sums[k - Own::kFirst][m], a, b);
        }
      }
    });
  };

  for (int k = 0; k < layer.features; k += 8) {
    load_weights(k);
    make(k);
    copy_async_wait<0>();
    __syncthreads();  // weights and planes are there
    multiply();
    __syncthreads();  // and have been read
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    warp.for_results(sums[k], [&](int row, int col, float value) {
      const int n = row0 + row, f = col0 + col;
      if (n >= layer.batch || f >= layer.features) return;
      z[(Own::kFirst + k) * layer.plane() + static_cast<size_t>(n) * layer.features + f] = value;
    });
  }
}

template <typename A>
__global__ void __launch_bounds__(kTileThreads)
    forward_tiles(const float* x, const float* y, const float* w, float* z, int stride,
                  Layer layer) {
  extern __shared__ __align__(128) float shared[];
  unroll<0, A::kBlades / 4>([&](auto group) {
    if (static_cast<int>(blockIdx.z) == group) {
      forward_tile<A, group>(x, y, w, z, stride, shared, layer);
    }
  });
}

// out = z / rms(z) for each grade, in place; keeps 1 / rms (grades, batch) for backward. A block
// has a row, a thread four features at a time. The second time it reads from a cache.
template <typename A>
__global__ void normalize_rows(float* out, float* inverses, Layer layer) {
  __shared__ Sums<A::kGrades> partials[kMaxWarps];
  float* const row = out + static_cast<size_t>(blockIdx.x) * layer.features;
  wait_for_previous_kernel();
  Sums<A::kGrades> squares = {};
  for (int f = threadIdx.x * 4; f < layer.features; f += blockDim.x * 4) {
    const Multivectors<A, 4> z = load<A, 4>(row + f, layer.plane());
    unroll<0, A::kBlades>([&](auto k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        squares.value[A::grade(k)] += z.blade[k].v[e] * z.blade[k].v[e];
      }
    });
  }
  add_up_block(squares, partials);
  unroll<0, A::kGrades>([&](auto c) {
    const float r = inverse_rms(squares.value[c], layer);
    if (threadIdx.x == 0) inverses[static_cast<size_t>(c) * layer.batch + blockIdx.x] = r;
    squares.value[c] = r;
  });
  for (int f = threadIdx.x * 4; f < layer.features; f += blockDim.x * 4) {
    unroll<0, A::kBlades>([&](auto k) {
      auto& z = *reinterpret_cast<Pack<4>*>(row + k * layer.plane() + f);
#pragma unroll
      for (int e = 0; e < 4; ++e) z.v[e] *= squares.value[A::grade(k)];
    });
  }
}

// ---- Planes in memory, for Hopper ---------------------------------------------------------------

// Above, a plane is made once for each 64 columns, and a block does not multiply meanwhile.
// Hopper's copy engine can bring finished planes while tensor cores work. So from here on planes go
// to memory, and what is left is lesson 3's product, in TF32.
//
// The batch goes in *chunks* of rows, whose planes take up to 1 GiB. In memory matrices have rows
// of `stride` elements for the features (rounded up to 128, or to 32 if there are fewer than 128),
// or of `pitch` elements for a chunk's rows (rounded up to 128):
//
//     planes  (44 planes, pitch, stride)
//     w       (20 slots, stride, stride), transposed. wgmma takes a right factor in TF32 only if
//             neighbours along k lie beside each other (PTX ISA, wgmma.mma_async: only 16-bit
//             factors may be transposed). Here k is what the product sums over, not a blade: the
//             features of P. A row of w has a single k, so its transpose is stored
struct Chunk {
  Layer layer;
  int first, rows, pitch, stride;
  __host__ __device__ size_t matrix() const { return static_cast<size_t>(pitch) * stride; }
  // A row has slices() parts of up to 128 features, the chunk row_blocks() parts of 128 rows.
  __host__ __device__ int slices() const { return ceil_div(stride, 128); }
  __host__ __device__ int row_blocks() const { return ceil_div(pitch, 128); }
};

// Of each 16 columns of a sum wgmma gives a thread four, such as columns 0, 1, 8 and 9. If the
// columns were the features in their order a thread could store two neighbours at a time. But we
// choose which feature is computed in which column, by the order in which we store the transposed
// weights. Feature `col` stands at this place. So a thread's four columns are four neighbouring
// features, 16 bytes: features 0 to 3 are columns 0, 1, 8, 9, features 4 to 7 are 2, 3, 10, 11.
__host__ __device__ constexpr int place_of_column(int col) {
  return col / 16 * 16 + col % 4 / 2 * 8 + col % 16 / 4 * 2 + col % 2;
}

// Makes planes of a chunk. A *unit* is 128 features of one row, in all planes. A warp makes it:
// each lane loads 4 features of x and y, all blades, multiplies them in registers, and stores 16
// bytes to each plane. Some units are made before the product: of the first row_blocks_before
// times 128 rows the first slices_before times 128 features. In *planes first* these are all units.
// They are numbered along the rows, so neighbouring warps write what lies side by side.
template <typename A>
struct PlaneMaker {
  const float *x, *y;
  float* planes;
  Chunk chunk;
  int row_blocks_before, slices_before;

  __host__ __device__ int units_before() const { return row_blocks_before * 128 * slices_before; }
  __device__ __forceinline__ void make_before(int u) const {
    if (u >= units_before()) return;
    Unit unit = load_unit(u / slices_before, u % slices_before);
    make(unit);
  }

  struct Unit {
    Multivectors<A, 4> left, right;
    float* to;
    bool inside;
  };
  __device__ __forceinline__ Unit load_unit(int row, int slice) const {
    const int f = slice * 128 + threadIdx.x % 32 * 4;
    const int n = row < chunk.rows ? chunk.first + row : chunk.layer.batch;
    return {load_inside<A, 4>(x, n, f, chunk.layer), load_inside<A, 4>(y, n, f, chunk.layer),
            planes + static_cast<size_t>(row) * chunk.stride + f, f < chunk.stride};
  }
  __device__ __forceinline__ void make(Unit& unit) const {
    if (!unit.inside) return;
    apply_gates(unit.left, unit.right);
    make_planes<A, 0, A::kTriples>(unit.left, unit.right, [&](auto, auto, const Pack<4>& P) {
      store_rounded(unit.to, P);
      unit.to += chunk.matrix();
    });
  }
};

// The weights in TF32, in the order of slots, zeros beyond the features: `transposed` (slots, out
// feature, in feature), and for backward `plain` (slots, in feature, out feature), unless it is
// null. Rows of both become columns of a result, so they are in the order of place_of_column(). In
// `plain` out features are in this order, too, as dz has them so, and the product of both sums over
// them. A block has 32 rows and kWidth columns of a matrix. Its 128 threads read them row by row
// into `piece`, in shared memory. A column of `piece` is a row of `transposed`. As a row of `piece`
// has 129 elements, a column lies in 32 banks.
struct WeightTransposer {
  using Piece = float[32][128 + 1];
  const float* w;
  float *transposed, *plain;
  int features, stride;
  Order order;

  // kWidth. Short rows are cut into smaller pieces, so that there are more blocks.
  __host__ __device__ int width() const { return stride < 512 ? 32 : 128; }
  __host__ __device__ int blocks() const {
    return order.slot[order.grades] * (stride / 32) * (stride / width());
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
#pragma unroll 8
    for (int r = 0; r < kWidth; r += 4) {
      const size_t to = slot * stride + place_of_column(col0 + r + warp);
      transposed[to * stride + row0 + lane] = piece[lane][r + warp];
    }
  }
};

// Runs before the product, and makes ready what that reads: planes, weights and counters. Each of
// the first `plane_blocks` blocks makes four units, one a warp: with 512 features, in *planes
// first*, one row of all planes. Each other block transposes a piece of w, with the first chunk
// only. Block 0 also sets the product's counters to 0. Blocks may start while the previous kernel
// ends, which may still read what they overwrite, so they wait. In 3-D a thread holds twice as many
// blades: 5 blocks fit, not 8.
template <typename A>
__global__ void __launch_bounds__(128, A::kBlades > 4 ? 5 : 8)
    make_ready(const __grid_constant__ PlaneMaker<A> maker, int plane_blocks,
               const __grid_constant__ WeightTransposer transposer, unsigned* counters,
               int counter_count) {
  __shared__ WeightTransposer::Piece piece;
  const int block = blockIdx.x;
  wait_for_previous_kernel();
  if (block < plane_blocks) {
    maker.make_before(block * 4 + threadIdx.x / 32);
  } else if (transposer.width() == 32) {
    transposer.transpose<32>(block - plane_blocks, piece);
  } else {
    transposer.transpose<128>(block - plane_blocks, piece);
  }
  if (block == 0) {
    for (int i = threadIdx.x; i < counter_count; i += 128) counters[i] = 0;
  }
}

// ---- Planes first -------------------------------------------------------------------------------

// At the first reading skip Rounds, TileOrder and Norm, which stand before the kernel: place(tile)
// looks up in a list which rows, which blade and which columns a tile of z has, together() says
// whether its row's norm can be made at once, and scale() divides sums by the rms of their row. Go
// on at copy_tile.
//
// Lesson 3's *clusters*, in TF32. A block computes z_k of one blade k for 128 rows and kCols
// features, the sum of P_t,k w[t] over all slots of k's grade. kStacked blocks below each other
// share the weights. A stage has 32 features of one plane, and the weights of its slot for these.
// A row has 128 bytes, as have lesson 3's 64 numbers of fp16. For the pipeline a tile is one long
// product. In 3-D e1 has 6 planes. With 512 features each fills 16 stages, together 96.
//
// Large tiles are those of two blocks with 256 columns, small ones those of one block with 128.
// LeftFactor says how the left factor lies in shared memory: a LeftTile as in lesson 3, or, in
// backward, one that is transposed. 227 KB of shared memory, all that a block may have on Hopper,
// hold 4 large or 7 small stages; 1 KB is left for barriers.
template <int kCols, int kStacked, class LeftFactor>
struct Tf32Tile {
  using Left = LeftFactor;
  static constexpr int BM = 128, BN = kCols, kBlocks = kStacked, kDepth = kLine<float>;
  struct Stage {
    Left a;
    ColumnTile<float, BN> b;
  };
  struct Shared {
    Pipeline<Stage, ((227 << 10) - 1024) / sizeof(Stage)> pipeline;
  };
  // In which row, of a consumer's 64, element i of a thread's sum is.
  __device__ static int row_of_sum(int i) {
    if constexpr (std::is_same_v<Left, LeftTile<float, BM>>)
      return Sum<BN>::row(i);
    else
      return Left::row(i);
  }
};
using LargeTile = Tf32Tile<256, 2, LeftTile<float, 128>>;
using SmallTile = Tf32Tile<128, 1, LeftTile<float, 128>>;

// Clusters take tiles in rounds, in each round one tile a cluster. Every other round goes from the
// last cluster to the first one. So if the longest tiles come first, a cluster with one of the
// longest in a round has one of the shortest in the next.
struct Rounds {
  int tiles, clusters;
  __host__ __device__ int tile(int round, int cluster) const {
    return round * clusters + (round % 2 == 0 ? cluster : clusters - 1 - cluster);
  }
  // Whether the cluster has a tile in this round. Clusters of a launch beyond `clusters` have none.
  __host__ __device__ bool has(int round, int cluster) const {
    return cluster < clusters && tile(round, cluster) < tiles;
  }
};

// Which tiles of z the clusters take, and in which order. Tiles of the scalar and of the last blade
// have 4 slots (3 in 2-D). The other blades are the `longer` ones, with 6 slots (4 in 2-D). A *row*
// of tiles has all blades and columns of the same rows of the batch. There are two orders:
//
//     row by row         a round has whole rows of tiles, as many as there are clusters for
//     the longest first  all long tiles come before the short ones. Then no cluster ends with a
//                        long tile while others have nothing left to do
//
// Row by row the norm is easier (see Norm), but clusters that would have only a part of a row are
// left out. This order needs at least as many clusters as a row has tiles. With so many it is
// taken in 2-D, where tiles differ less, and where there are at most twice as many tiles as
// clusters. (24 tiles in rows of 8 on 12 clusters pass this test. Then 4 clusters are left out, and
// it takes three rounds.) In 3-D with more tiles the second order is faster. For example, let there
// be 5 clusters in 3-D for two rows of tiles, A and B, of one column. A row has 8 tiles, more than
// there are clusters, so the longest come first:
//
//     cluster    0       1       2       3       4
//     round 0    A e1    A e2    A e3    A e12   A e13    tiles 0 to 4
//     round 1    B e12   B e3    B e2    B e1    A e23    tiles 9 to 5
//     round 2    B e13   B e23   A 1     A e123  B 1      tiles 10 to 14
//     round 3                                    B e123   tile 15
struct TileOrder {
  Order order;
  int tile_rows, tile_cols, row_tiles, cols, blades;
  bool by_rows;
  Rounds rounds;

  template <class Tile>
  TileOrder(Tile, const Order& planes, const Layer& layer, int rows, int clusters)
      : order(planes),
        tile_rows(Tile::BM * Tile::kBlocks),
        tile_cols(Tile::BN),
        row_tiles(ceil_div(rows, tile_rows)),
        cols(ceil_div(layer.features, tile_cols)),
        blades(order.blade[order.grades]) {
    const int of_row = blades * cols, tiles = row_tiles * of_row;
    by_rows = clusters >= of_row && (blades == 4 || tiles <= 2 * clusters);
    rounds = {tiles, std::min(tiles, by_rows ? clusters / of_row * of_row : clusters)};
  }
  __host__ __device__ int longer() const { return blades - 2; }
  int rows_of_round() const {
    return ceil_div(rounds.clusters, (by_rows ? blades : longer()) * cols) * tile_rows;
  }

  struct Place {
    int row, blade, col;  // the first row and feature
  };
  // Where a tile is, by its number. Row by row there is one list: row after row, in a row blade
  // after blade, the longer ones first, and of each blade all columns. If all rows began with the
  // longer blades, the same clusters would have the short tiles in every second round. So the rows
  // of rounds 2 and 3 begin two blades later, those of rounds 4 and 5 four, and so on: `shift`,
  // counted in tiles. For example, in 2-D with 4 clusters a round is one row. Rows A and B are e1,
  // e2, 1, e12, and row C is 1, e12, e1, e2. With the longest first there are two such lists, that
  // of the longer blades and that of the others, which begins above with tile 12.
  __host__ __device__ Place place(int tile) const {
    const int all_long = by_rows ? 0 : row_tiles * cols * longer();
    const bool is_long = tile < all_long;
    const int of_row = (by_rows ? blades : is_long ? longer() : 2) * cols;
    if (!is_long) tile -= all_long;
    const int shift = by_rows ? tile / rounds.clusters / 2 * 2 * cols : 0;
    // i counts blades, the longer ones first; the last two are the scalar and the last blade.
    const int at = (tile + shift) % of_row, i = at / cols + (by_rows || is_long ? 0 : longer());
    return {tile / of_row * tile_rows, i < longer() ? i + 1 : (i - longer()) * (blades - 1),
            at % cols * tile_cols};
  }
  // Whether all tiles of grade c in a row of tiles are of one round. They have neighbouring
  // numbers, so the first and the last one of them decide. Above, grade 1 of row A, tiles 0 to 2,
  // is together. Its grade 2, tiles 3 to 5, is not: A e12 is in round 0, A e23 in round 1.
  __host__ __device__ bool together(int row, int c) const {
    if (by_rows) return true;
    row /= tile_rows;
    const int blade = order.blade[c];
    const bool is_long = blade > 0 && blade <= longer();
    const int first =
        is_long ? row * longer() + blade - 1 : row_tiles * longer() + 2 * row + (blade > 0);
    return first * cols / rounds.clusters ==
           ((first + order.blades(c)) * cols - 1) / rounds.clusters;
  }
};

// When a sum is there, it still has to be divided by its row's rms, see out at the top. The norm of
// a row is over all features and over the blades of a grade. These are in tiles of several
// clusters. If all of these tiles are of one round, a warpgroup keeps its sums of z in registers,
// leaves its rows' sums of squares in memory, adds 1 to a counter, and waits until all tiles have
// done so. Then it scales its sums, so that z is never in memory. For example, with 512 features
// and tiles of 256 columns grade 1 of a row is 3 blades x 2 columns = 6 tiles: each leaves its sums
// in `squares`, which is (blades, columns of tiles, pitch), waits until the counter is 6, and adds
// up 6 sums a row.
//
// Nobody waits forever: all clusters are on the device at the same time, each has one tile of a
// round, and a warpgroup that waits has given back its stages before. Rows whose tiles are of
// several rounds are written without the norm; normalize_rest scales them.
struct Norm {
  float *out, *inverses;
  float* squares;     // a sum for each row of the chunk, each blade and each column of tiles
  unsigned* counted;  // for each 64 rows and grade: how many tiles' sums are in `squares`
  Chunk chunk;
  TileOrder tiles;

  bool all_together() const {
    bool all = true;
    for (int row = 0; row < chunk.rows; row += tiles.tile_rows) {
      for (int c = 0; c < tiles.order.grades; ++c) all = all && tiles.together(row, c);
    }
    return all;
  }
#if HOPPER_CODE
  // A warpgroup scales its 64 rows, from `row` on, of a tile, whose first feature is `col`. Four
  // lanes that are neighbours have the same two rows.
  template <int kCols>
  __device__ __forceinline__ void scale(Sum<kCols>& sum, int row, int col, int blade, int c,
                                        int barrier) const {
    const int first = tiles.order.blade[c], all = tiles.order.blades(c) * tiles.cols;
    const int own = (blade - first) * tiles.cols + col / kCols, lane = threadIdx.x % 4;
    const int inside = chunk.layer.features - col;
    float sums[2] = {};
    // A tile that is whole needs no test for each column. In another one the columns inside are
    // counted from the lane's own first column, 4 * lane.
    if (inside >= kCols) {
      add_squares(sum, kCols, sums);
    } else {
      add_squares(sum, inside - 4 * lane, sums);
    }
    float* const from =
        squares + static_cast<size_t>(first) * tiles.cols * chunk.pitch + row + Sum<kCols>::row(0);
    if (all > 1) {
      // Leaves its own sums, adds 1, waits for the others, and adds up all sums, always in the same
      // order. __ldcg reads from the L2 cache, as other multiprocessors have written these sums.
      if (lane < 2) {
        from[static_cast<size_t>(own) * chunk.pitch + 8 * lane] = lane == 0 ? sums[0] : sums[1];
      }
      named_barrier(barrier, 128);
      if (threadIdx.x % 128 == 0) {
        const GridCount count(counted[row / 64 * tiles.order.grades + c]);
        count.fetch_add(1, cuda::memory_order_release);
        wait_for_count(count, static_cast<unsigned>(all), "sums for the norm of other tiles");
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
  __device__ static void add_up_four(float (&sums)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 1);
      sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 2);
    }
  }
  // Adds up the squares in the columns before `inside`, for the two rows of four lanes. Columns are
  // counted from the lane's own first one, in the order in which store_sum() stores them.
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

#if HOPPER_CODE
// Stores a warpgroup's sum to (row0, col0) of a row-major matrix (rows, cols), `stride` elements a
// row, or adds it to what is there. A thread has four neighbours of each 16 columns.
template <class Tile>
__device__ __forceinline__ void store_sum(const Sum<Tile::BN>& sum, float* to, int row0, int col0,
                                          int rows, int cols, int stride, bool add) {
#pragma unroll
  for (int i = 0; i < sum.size(); i += 8) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int row = row0 + Tile::row_of_sum(2 * below);
      const int col = col0 + 2 * i + threadIdx.x % 4 * 4;
      if (row >= rows || col >= cols) continue;
      const float* const sums = sum.elements + i + 2 * below;
      float4 value = make_float4(sums[0], sums[1], sums[4], sums[5]);
      auto& at = *reinterpret_cast<float4*>(to + static_cast<size_t>(row) * stride + col);
      if (add) {
        const float4 old = at;
        value.x += old.x, value.y += old.y, value.z += old.z, value.w += old.w;
      }
      at = value;
    }
  }
}

// Starts the copies of a tile of z, whose first row in this block is `row`. A step here is 32
// features of all slots, a stage for each slot, and begins with wait(step). A block whose rows are
// beyond the chunk still brings its half of the weights, which the cluster shares. As its plane it
// asks for one beyond the last, so zeros come.
template <class Tile, class Pipe, class Cluster, typename Wait>
__device__ __forceinline__ void copy_tile(Writer<Pipe>& writer, const Cluster& cluster,
                                          const CUtensorMap& planes, const CUtensorMap& weights,
                                          const Order& order, const Chunk& chunk,
                                          const TileOrder::Place& at, int row, Wait wait) {
  const int c = Order::grade_of(order.blade, at.blade);
  const int slots = order.slots(c), blades = order.blades(c);
  const int first = order.plane[c] + at.blade - order.blade[c];
  for (int step = 0; step < ceil_div(chunk.layer.features, Tile::kDepth); ++step) {
    wait(step);
    for (int i = 0; i < slots; ++i) {
      const int plane = row < chunk.pitch ? first + i * blades : order.planes();
      const int weight_row = (order.slot[c] + i) * chunk.stride + at.col, k = step * Tile::kDepth;
      writer.put([&](typename Tile::Stage& stage, Barrier* arrived) {
        cluster.load(stage.a, &planes, plane * chunk.pitch + row, k, arrived);
        cluster.load(stage.b, &weights, weight_row, k, arrived);
      });
    }
  }
}

// What a consumer does, for all tiles of its cluster: it multiplies all stages for its 64 rows into
// a sum in registers, scales it if its rows' tiles are together(), and stores it.
template <class Tile, class Cluster>
__device__ __forceinline__ void multiply_tiles(typename Tile::Shared& shared,
                                               const Cluster& cluster, const Norm& norm) {
  const TileOrder& tiles = norm.tiles;
  const Chunk& chunk = norm.chunk;
  const int consumer = threadIdx.x / 128 - 1;
  Reader reader(shared.pipeline, cluster);
  for (int round = 0; tiles.rounds.has(round, cluster.cluster); ++round) {
    const auto at = tiles.place(tiles.rounds.tile(round, cluster.cluster));
    const int c = Order::grade_of(tiles.order.blade, at.blade);
    const int steps = ceil_div(chunk.layer.features, Tile::kDepth) * tiles.order.slots(c);
    const int block_row = at.row + cluster.rank * Tile::BM, row = block_row + 64 * consumer;
    Sum<Tile::BN> sum;
    for (int step = 0; step < steps; ++step) {
      reader.take([&](const typename Tile::Stage& stage, bool add) {
        sum.start_product(stage.a.rows(64 * consumer), stage.b.columns(), add);
      });
    }
    reader.finish();
    if (chunk.layer.normed && block_row < chunk.pitch && tiles.together(block_row, c)) {
      norm.scale(sum, row, at.col, at.blade, c, 1 + consumer);
    }
    float* const to = norm.out + at.blade * chunk.layer.plane() +
                      static_cast<size_t>(chunk.first) * chunk.layer.features;
    store_sum<Tile>(sum, to, row, at.col, chunk.rows, chunk.layer.features, chunk.layer.features,
                    false);
  }
}
#endif

// The product, once all planes are in memory. The launch has norm.tiles.rounds.clusters clusters. A
// block has three warpgroups, as in lesson 3. Of the first one a single thread works: it fills
// stages as soon as they are given back, also for the next tile, while this one is scaled and
// stored. The others are consumers. So tensor cores never wait for planes that are being made.
template <class Tile>
__global__ void HOPPER_CLUSTER(Tile::kBlocks) __launch_bounds__(384, 1)
    planes_first(const __grid_constant__ CUtensorMap planes,
                 const __grid_constant__ CUtensorMap weights, const __grid_constant__ Norm norm) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(bytes);
  const BlockGrid<Tile::kBlocks, 1> cluster;
  const TileOrder& tiles = norm.tiles;
  const int warp = warp_of_block();
  if (warp == 1 && elect_one()) prepare(shared.pipeline, 2 * Tile::kBlocks);
  cluster.meet();
  wait_for_previous_kernel();

  if (warp < 4) {
    registers_shrink_to<56>();
    if (warp > 0 || !elect_one()) return;
    Writer writer(shared.pipeline);
    for (int round = 0; tiles.rounds.has(round, cluster.cluster); ++round) {
      const auto at = tiles.place(tiles.rounds.tile(round, cluster.cluster));
      copy_tile<Tile>(writer, cluster, planes, weights, tiles.order, norm.chunk, at,
                      at.row + cluster.rank * Tile::BM, [](int) {});
    }
    if constexpr (Tile::kBlocks > 1) writer.finish();
  } else {
    registers_grow_to<224>();
    multiply_tiles<Tile>(shared, cluster, norm);
  }
#endif
}

// The norm of the rows and grades whose tiles are of several rounds. A warp scales one row of one
// grade in place, and keeps 1 / rms. The last rows come first, which are still in the cache.
template <typename A>
__global__ void __launch_bounds__(128) normalize_rest(const __grid_constant__ Norm norm) {
  const Layer& layer = norm.chunk.layer;
  const int u = blockIdx.x * 4 + threadIdx.x / 32, n = norm.chunk.rows - 1 - u / A::kGrades;
  if (n < 0 || norm.tiles.together(n, u % A::kGrades)) return;
  wait_for_previous_kernel();
  const size_t row = static_cast<size_t>(norm.chunk.first + n) * layer.features;
  unroll<0, A::kGrades>([&](auto c) {
    if (u % A::kGrades != c) return;
    const auto for_packs = [&](auto visit) {
#pragma unroll 4
      for (int f = threadIdx.x % 32 * 4; f < layer.features; f += 32 * 4) {
#pragma unroll
        for (int k = A::first(c); k < A::first(c + 1); ++k) {
          visit(*reinterpret_cast<Pack<4>*>(norm.out + k * layer.plane() + row + f));
        }
      }
    };
    Sums<1> squares = {};
    for_packs([&](const Pack<4>& z) {
#pragma unroll
      for (int e = 0; e < 4; ++e) squares.value[0] += z.v[e] * z.v[e];
    });
    add_up_warp(squares);
    const float r = inverse_rms(squares.value[0], layer);
    if (threadIdx.x % 32 == 0) {
      norm.inverses[static_cast<size_t>(c) * layer.batch + norm.chunk.first + n] = r;
    }
    for_packs([&](Pack<4>& z) {
#pragma unroll
      for (int e = 0; e < 4; ++e) z.v[e] *= r;
    });
  });
}

// ---- Planes beside ------------------------------------------------------------------------------

// In *planes first* three warps of each producer have nothing to do, and the product begins when
// all planes of the chunk are there. Here make_ready makes only what the first round begins with,
// the first 256 features of its rows, and these warps, the *makers*, make the rest during the
// product. A *patch* is the planes of 128 rows and 128 features, 128 units. All makers of the
// launch share the units of a patch, and then those of the next one. They count each unit that is
// there. The thread that starts the copies waits until all 128 are counted, once for each 128
// features of a tile, which are four steps.
//
// Copies wait for makers of other blocks, too. Makers never wait for anybody. So every patch gets
// made if all blocks run at the same time: the launch has only as many as the device holds. A
// thread of the makers' warpgroup has 152 registers, not 56 as in *planes first*. So a consumer's
// thread has 176, not 224: all share 65536 registers.
//
// The product hides only a part of the makers' work. It takes 1024 cycles for a stage, 128 x 32
// times 32 x 256: 2^20 multiply-adds, 1024 a cycle. In these cycles the factors arrive in shared
// memory, 16 KB and 32 KB, and each of the two consumers reads half of the left one and all of the
// right one, together 80 KB. All this is 128 bytes a cycle, as much as shared memory can move (see
// the page of lesson 3). What makers load and store needs it, too. (Counted, not measured.)

// Patches are numbered as they are needed, in groups of row_blocks_before rows, in a group
// column by column. With 4 x 3 patches and groups of 2 rows, patches 0, 2 and 4 are the first row,
// 1, 3 and 5 the second, 6, 8 and 10 the third. The first group's first slices_before columns
// are made before the product. For each other patch made[patch] counts the units that are there.
template <typename A>
struct BesideMaker : PlaneMaker<A> {
  using Maker = PlaneMaker<A>;
  using Maker::chunk, Maker::row_blocks_before, Maker::slices_before;
  unsigned* made;

  // How many rows of patches the group of row `block` has (the last one may have fewer).
  __device__ int height_of_group(int block) const {
    return min(row_blocks_before, chunk.row_blocks() - block + block % row_blocks_before);
  }
  __device__ int patch_of(int block, int slice) const {
    return block / row_blocks_before * row_blocks_before * chunk.slices() +
           slice * height_of_group(block) + block % row_blocks_before;
  }
  // Makes this warp's share of the units that make_before() has left; `warps` share them. In each
  // pass a warp first starts to load x and y of a unit (in 2-D of two), then reports the previous
  // unit, then makes this one. Before it reports it waits for its writes, and meanwhile the loads
  // arrive. The fence is for the copy engine. Here u counts patch after patch, 128 units each.
  __device__ __forceinline__ void make_beside(int warp, int warps) const {
    constexpr int kAtOnce = A::kBlades > 4 ? 1 : 2;  // units, of neighbouring rows
    const auto report = [&](int patch) {
#if HOPPER_CODE
      global_fence();
#endif
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        GridCount(made[patch]).fetch_add(kAtOnce, cuda::memory_order_release);
      }
    };
    const int in_group = row_blocks_before * chunk.slices();
    const int units = chunk.slices() * chunk.row_blocks() * 128;
    int last = -1;
    for (int u = this->units_before() + kAtOnce * warp; u < units; u += kAtOnce * warps) {
      const int patch = u / 128, group = patch / in_group, rest = patch % in_group;
      const int height = height_of_group(group * row_blocks_before);
      const int row = (group * row_blocks_before + rest % height) * 128 + u % 128;
      typename Maker::Unit unit[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) unit[i] = this->load_unit(row + i, rest / height);
      if (last >= 0) report(last);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) this->make(unit[i]);
      last = patch;
    }
    if (last >= 0) report(last);
  }
#if HOPPER_CODE
  // Waits until a patch is there. The fence is between the makers' writes and the copies' reads.
  __device__ void wait(int block, int slice) const {
    const int patch = patch_of(block, slice);
    if (patch >= row_blocks_before * slices_before) {
      wait_for_count(GridCount(made[patch]), 128, "planes that other warps make");
    }
    global_fence();
  }
#endif
};

// *planes first*, but three warps make planes, and copies wait where a patch begins, every 4 steps.
template <class Tile, typename A>
__global__ void HOPPER_CLUSTER(Tile::kBlocks) __launch_bounds__(384, 1)
    planes_beside(const __grid_constant__ CUtensorMap planes,
                  const __grid_constant__ CUtensorMap weights, const __grid_constant__ Norm norm,
                  const __grid_constant__ BesideMaker<A> maker) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(bytes);
  const BlockGrid<Tile::kBlocks, 1> cluster;
  const TileOrder& tiles = norm.tiles;
  const int warp = warp_of_block();
  if (warp == 1 && elect_one()) prepare(shared.pipeline, 2 * Tile::kBlocks);
  cluster.meet();
  wait_for_previous_kernel();

  if (warp < 4) {
    registers_shrink_to<152>();
    if (warp > 0) {
      maker.make_beside(blockIdx.x * 3 + warp - 1, gridDim.x * 3);
    } else if (elect_one()) {
      Writer writer(shared.pipeline);
      for (int round = 0; tiles.rounds.has(round, cluster.cluster); ++round) {
        const auto at = tiles.place(tiles.rounds.tile(round, cluster.cluster));
        const int row = at.row + cluster.rank * Tile::BM;
        const auto wait = [&](int step) {
          if (step % 4 == 0 && row < norm.chunk.pitch) maker.wait(row / 128, step / 4);
        };
        copy_tile<Tile>(writer, cluster, planes, weights, tiles.order, norm.chunk, at, row, wait);
      }
      if constexpr (Tile::kBlocks > 1) writer.finish();
    }
  } else {
    registers_grow_to<176>();
    multiply_tiles<Tile>(shared, cluster, norm);
  }
#endif
}

// ---- Unfused, backward --------------------------------------------------------------------------

// First comes dz. Then the library multiplies twice for each grade: first for dw, then for the
// planes' gradients, which overwrite the planes. From these come dx' and dy', then dx and dy.

// The gate is the share of a normal distribution below s, so its derivative is the normal density,
// exp(-s^2 / 2) / sqrt(2 pi).
__device__ float gate_slope(float s) { return 0.39894228f * __expf(-0.5f * s * s); }

// A block writes dz = r d_out - r^3 z mean(d_out z) of a row and grade (lesson 10); r = 1 / rms(z).
__global__ void normalize_grade_gradient(const float* z, const float* d_out, const float* inverses,
                                         float* dz, int blades, Layer layer) {
  __shared__ Sums<1> partials[kMaxWarps];
  const size_t row = static_cast<size_t>(blockIdx.x) * layer.features;
  Sums<1> products = {};
  for (int blade = 0; blade < blades; ++blade) {
    for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
      const size_t i = blade * layer.plane() + row + f;
      products.value[0] += d_out[i] * z[i];
    }
  }
  add_up_block(products, partials);
  const float r = inverses[blockIdx.x];
  const float factor = r * r * r * products.value[0] * layer.inverse_features;
  for (int blade = 0; blade < blades; ++blade) {
    for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
      const size_t i = blade * layer.plane() + row + f;
      dz[i] = r * d_out[i] - factor * z[i];
    }
  }
}

// What the planes of triple t add to dx' and dy', from their gradients d: a plane's term is sign
// x'_i y'_j, so dx'_i += sign y'_j d_k and dy'_j += sign x'_i d_k. Of d, x and y one grade is read.
template <typename A, int t, int W>
__device__ __forceinline__ void take_apart(const Multivectors<A, W>& d, const Multivectors<A, W>& x,
                                           const Multivectors<A, W>& y, Multivectors<A, W>& dx,
                                           Multivectors<A, W>& dy) {
  constexpr int a = A::triple(t).x, b = A::triple(t).y, c = A::triple(t).result;
  unroll<A::first(a), A::first(a + 1)>([&](auto i) {
    unroll<A::first(b), A::first(b + 1)>([&](auto j) {
      constexpr int k = A::product(i, j);
      if constexpr (A::grade(k) == c) {
        add_product<A::sign(i, j)>(dx.blade[i], y.blade[j], d.blade[k]);
        add_product<A::sign(i, j)>(dy.blade[j], x.blade[i], d.blade[k]);
      }
    });
  });
}

// dx' and dy' from the planes' gradients d: one thread a multivector.
template <typename A>
__global__ void multiply_pairs_gradient(const float* x, const float* y, const float* d, float* dx,
                                        float* dy, Layer layer) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t plane = layer.plane();
  if (at >= plane) return;
  const Multivectors<A, 1> left = load<A, 1>(x + at, plane), right = load<A, 1>(y + at, plane);
  Multivectors<A, 1> d_left = {}, d_right = {};
  unroll<0, A::kTriples>([&](auto slot) {
    using S = Slot<A, slot>;
    Multivectors<A, 1> d_planes;  // only one grade
    unroll<S::first, S::end>(
        [&](auto k) { d_planes.blade[k].v[0] = d[place_in_library<A, slot>(k, at, layer)]; });
    take_apart<A, S::triple>(d_planes, left, right, d_left, d_right);
  });
  unroll<0, A::kBlades>([&](auto i) {
    dx[i * plane + at] = d_left.blade[i].v[0];
    dy[i * plane + at] = d_right.blade[i].v[0];
  });
}

// `gradient` comes as that of in gate(in_1), and becomes that of `in`: one thread a multivector.
template <typename A>
__global__ void apply_gate_gradient(const float* in, float* gradient, Layer layer) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= layer.plane()) return;
  const Multivectors<A, 1> value = load<A, 1>(in + at, layer.plane());
  const Multivectors<A, 1> d = load<A, 1>(gradient + at, layer.plane());
  const float factor = gate(value.blade[0].v[0]);
  float d_factor = 0;
  unroll<0, A::kBlades>([&](auto k) {
    d_factor += d.blade[k].v[0] * value.blade[k].v[0];
    if (k > 0) gradient[k * layer.plane() + at] = factor * d.blade[k].v[0];
  });
  gradient[at] = factor * d.blade[0].v[0] + d_factor * gate_slope(value.blade[0].v[0]);
}

// ---- Planes in tiles, backward ------------------------------------------------------------------

// Neither planes nor their gradients are in memory. result_gradients writes dz. For dx and dy,
// input_gradient_tiles makes the planes' gradients of a tile in shared memory and takes them apart
// there. For dw, weight_gradient_tiles makes planes as above. Both have two groups of warps.

// dz of the batch's rows `first` to `first` + `rows` - 1, in TF32. Two blades are `pitch` elements
// apart, two rows `stride`. Zeros fill rows and columns up to whole tiles of 64 x 128.
struct ResultGradients {
  float* data;
  int first, rows, stride;
  size_t pitch;
};
// A block has one row of the batch, all blades. As out = r z, dz = r d_out - r out mean(d_out out)
// in each grade: the formula of normalize_grade_gradient with out / r for z, which is not kept.
// First all threads add up d_out out for each grade. Then each writes dz of its features, or zeros.
template <typename A>
__global__ void result_gradients(const float* out, const float* d_out, const float* inverses,
                                 ResultGradients dz, Layer layer) {
  __shared__ Sums<A::kGrades> partials[kMaxWarps];
  const int n = dz.first + blockIdx.x;
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
  add_up_block(products, partials);
  for (int f = threadIdx.x; f < dz.stride; f += blockDim.x) {
    const bool inside = n < layer.batch && f < layer.features;
    unroll<0, A::kBlades>([&](auto k) {
      constexpr int c = A::grade(k);
      float value = inside ? d_out[k * plane + row + f] : 0;
      if (inside && layer.normed) {
        const float mean = products.value[c] * layer.inverse_features;
        value = r.value[c] * (value - out[k * plane + row + f] * mean);
      }
      dz.data[k * dz.pitch + static_cast<size_t>(blockIdx.x) * dz.stride + f] =
          rounded_to_tf32(value);
    });
  }
}

constexpr int kPairThreads = 2 * kTileThreads;
constexpr int kGradientDepth = 32, kGradientCols = 2 * kTile, kGradientStride = kGradientCols + 8;
constexpr int kGradientTileBytes = 3 * kTile * kGradientStride * sizeof(float);

// Leaves the gradients of the planes P_t,k of one triple t in shared memory, for 64 rows of the
// batch and 128 features of P. There are kBlades such planes. Each has the gradient dz_k w[t]^T, a
// sum over the features of z. A step takes 32 of them:
//
//     its stage   64 x 32 of each dz_k, then 128 x 32 of w[t], whose rows are features of P. There
//                 are two stages: while one is multiplied, the other one is filled
//     the groups  each of the two multiplies all 64 rows by 64 of the rows of w[t]
//
// `dz` and `w` point to the first of these rows. At the end the sums overwrite the stages, in rows
// kGradientStride apart. Rows of w[t], as of dz, have neighbouring features of z, over which the
// sum goes. So ldmatrix can load the right operand, too: rows of w[t] are columns of the result.
template <int kBlades>
__device__ __forceinline__ void plane_gradients(const float* dz, const float* w,
                                                const ResultGradients& sizes, int features,
                                                float* shared) {
  constexpr int kOperand = kTile * kGradientDepth, kStage = (kBlades + 2) * kOperand;
  static_assert(2 * kStage * sizeof(float) <= kGradientTileBytes);
  const TileWarp warp;
  const auto fetch = [&](int step) {
    float* const to = shared + step % 2 * kStage;
#pragma unroll
    for (int i = threadIdx.x; i < (kBlades + 2) * kTile * 8; i += kPairThreads) {
      // "Blades" kBlades and kBlades + 1 are the two halves of w[t], 64 rows each.
      const int row = i / 8, piece = i % 8, blade = row / kTile;
      const float* from = blade < kBlades
                              ? dz + blade * sizes.pitch
                              : w + static_cast<size_t>(blade - kBlades) * kTile * sizes.stride;
      copy_async<16>(to + TileWarp::place<8>(row, piece),
                     from + static_cast<size_t>(row % kTile) * sizes.stride +
                         step * kGradientDepth + piece * 4,
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
    const float* right = tile + (kBlades + warp.group) * kOperand;
#pragma unroll
    for (int k = 0; k < kGradientDepth; k += 8) {
      unsigned b[4][2];
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        unsigned four[4];  // lanes 0-7, 8-15: 8 rows, k 0-3 and 4-7; 16-31: the next 8 rows
        const int at = warp.col + 8 * j + warp.lane % 8 + warp.lane / 16 * 8;
        ldmatrix_x4(four, right + TileWarp::place<8>(at, k / 4 + warp.lane / 8 % 2));
        b[j][0] = four[0], b[j][1] = four[1], b[j + 1][0] = four[2], b[j + 1][1] = four[3];
      }
#pragma unroll
      for (int blade = 0; blade < kBlades; ++blade) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          unsigned a[4];
          warp.load_left<8>(a, tile + blade * kOperand, m, k);
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

// Packs of 4 features of one grade's blades, `pitch` apart. At `from` blade 0 is, or would be.
template <int grade, typename A>
__device__ __forceinline__ void load_grade(Multivectors<A, 4>& to, const float* from,
                                           size_t pitch) {
  unroll<A::first(grade), A::first(grade + 1)>(
      [&](auto k) { to.blade[k] = *reinterpret_cast<const Pack<4>*>(from + k * pitch); });
}
template <int grade, typename A>
__device__ __forceinline__ void store_grade(float* to, const Multivectors<A, 4>& from,
                                            size_t pitch) {
  unroll<A::first(grade), A::first(grade + 1)>(
      [&](auto k) { *reinterpret_cast<Pack<4>*>(to + k * pitch) = from.blade[k]; });
}
// Whether t is the first triple with its grade of x, by which triples are ordered; and the same for
// its grade of y.
template <typename A>
__host__ __device__ constexpr bool is_first_of_x(int t) {
  return t == 0 || A::triple(t - 1).x != A::triple(t).x;
}
template <typename A>
__host__ __device__ constexpr bool is_first_of_y(int t) {
  for (int earlier = 0; earlier < t; ++earlier) {
    if (A::triple(earlier).y == A::triple(t).y) return false;
  }
  return true;
}

// The gates' part of dx and dy. With g = gate(x_1) and h = gate(y_1) a plane is a sum of terms
// sign g x_i h y_j. take_apart() was given x and y without gates, and has left in dx and dy
//
//     S_i = sum of  sign y_j d_k        T_j = sum of  sign x_i d_k
//
// As a factor of its terms x_i has the gradient g h S_i. But x_1 is in g as well, which is a factor
// of all terms and has the gradient h (sum of x_i S_i). So dx_1 is g h S_1 + gate'(x_1) h (sum of
// x_i S_i). Likewise dy_j is g h T_j, and dy_1 has gate'(y_1) g (sum of y_j T_j) besides.
template <typename A, int W>
__device__ __forceinline__ void finish_gradients(const Multivectors<A, W>& x,
                                                 const Multivectors<A, W>& y,
                                                 Multivectors<A, W>& dx, Multivectors<A, W>& dy) {
#pragma unroll
  for (int e = 0; e < W; ++e) {
    const float x_1 = x.blade[0].v[e], y_1 = y.blade[0].v[e];
    const float g = gate(x_1), h = gate(y_1);
    float along_x = 0, along_y = 0;
    unroll<0, A::kBlades>([&](auto i) {
      along_x += x.blade[i].v[e] * dx.blade[i].v[e];
      along_y += y.blade[i].v[e] * dy.blade[i].v[e];
      dx.blade[i].v[e] *= g * h;
      dy.blade[i].v[e] *= g * h;
    });
    dx.blade[0].v[e] += along_x * gate_slope(x_1) * h;
    dy.blade[0].v[e] += along_y * gate_slope(y_1) * g;
  }
}

// A block computes dx and dy for 64 rows and 128 features, all blades, triple by triple. First its
// warps leave the gradients of the triple's planes in shared memory: 3 at most, where *unfused* has
// all 44 in memory. Then a thread takes four features of a row at a time: it loads one grade of x
// and of y, and adds the triple's terms to the sums in dx and dy, in memory. Only this thread comes
// to these places until the end. A grade's first triple starts its sums. At the end
// finish_gradients() puts the gates in.
template <typename A>
__global__ void __launch_bounds__(kPairThreads, 2)
    input_gradient_tiles(const float* x, const float* y, const float* w, ResultGradients dz,
                         float* dx, float* dy, Layer layer) {
  extern __shared__ __align__(128) float shared[];
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kGradientCols;
  const size_t plane = layer.plane();
  // visit(at, d): where W features of a row are in memory, and the planes' gradients of these.
  const auto for_places = [&](auto W, auto visit) {
#pragma unroll 1
    for (int e = threadIdx.x * W; e < kTile * kGradientCols; e += kPairThreads * W) {
      const int row = e / kGradientCols, col = e % kGradientCols;
      if (row0 + row >= dz.rows || col0 + col >= layer.features) continue;
      visit(static_cast<size_t>(dz.first + row0 + row) * layer.features + col0 + col,
            shared + row * kGradientStride + col);
    }
  };
  unroll<0, A::kTriples>([&](auto t) {
    constexpr int a = A::triple(t).x, b = A::triple(t).y, c = A::triple(t).result;
    constexpr int first = A::first(c), kBlades = A::first(c + 1) - first;
    plane_gradients<kBlades>(dz.data + first * dz.pitch + static_cast<size_t>(row0) * dz.stride,
                             w + (static_cast<size_t>(t) * dz.stride + col0) * dz.stride, dz,
                             layer.features, shared);
    for_places(Constant<4>(), [&](size_t at, const float* d) {
      Multivectors<A, 4> left, right, d_planes, sum_x = {}, sum_y = {};  // only one grade of each
      load_grade<a>(left, x + at, plane);
      load_grade<b>(right, y + at, plane);
      if constexpr (!is_first_of_x<A>(t)) load_grade<a>(sum_x, dx + at, plane);
      if constexpr (!is_first_of_y<A>(t)) load_grade<b>(sum_y, dy + at, plane);
      constexpr int kPitch = kTile * kGradientStride;
      load_grade<c>(d_planes, d - first * kPitch, kPitch);
      take_apart<A, t>(d_planes, left, right, sum_x, sum_y);
      store_grade<a>(dx + at, sum_x, plane);
      store_grade<b>(dy + at, sum_y, plane);
    });
    __syncthreads();
  });
  // All blades of four multivectors are in registers here, so a thread takes one feature at a time.
  // It reads sums that other threads have stored, before the last barrier.
  for_places(Constant<1>(), [&](size_t at, const float*) {
    Multivectors<A, 1> sum_x = load<A, 1>(dx + at, plane), sum_y = load<A, 1>(dy + at, plane);
    finish_gradients(load<A, 1>(x + at, plane), load<A, 1>(y + at, plane), sum_x, sum_y);
    unroll<0, A::kBlades>([&](auto i) {
      dx[i * plane + at] = sum_x.blade[i].v[0];
      dy[i * plane + at] = sum_y.blade[i].v[0];
    });
  });
}

// Weight gradients: a block has all slots of a grade c, each of its two groups of warps up to 3.
// Shared memory holds 8 rows of the grade's planes, and of dz of its blades.
constexpr int kWeightDepth = 8, kWeightPlane = kWeightDepth * kRowStride;
template <typename A>
constexpr int kWeightTileBytes = [] {
  int most = 0;
  for (int c = 0; c < A::kGrades; ++c) {
    most = std::max(most, (kOrder<A>.slots(c) + 1) * kOrder<A>.blades(c));
  }
  return most * kWeightPlane * static_cast<int>(sizeof(float));
}();

// Adds up P_t,k^T dz_k for kCount slots of a grade of kBlades blades. A row of `planes` is one of
// the batch, a column of P^T. ldmatrix can transpose numbers of 16 bits only. So left operands come
// by single loads, like right ones.
template <int kBlades, int kCount>
__device__ __forceinline__ void multiply_transposed(TileSum (&sums)[3], const float* planes,
                                                    const float* results) {
  const TileWarp warp;
#pragma unroll
  for (int blade = 0; blade < kBlades; ++blade) {
    unsigned b[4][2];
    warp.load_right(b, results + blade * kWeightPlane);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float* from = planes + (i * kBlades + blade) * kWeightPlane +
                            warp.lane % 4 * kRowStride + warp.row + 16 * m + warp.lane / 4;
        unsigned a[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          a[e] = __float_as_uint(from[e / 2 * 4 * kRowStride + e % 2 * 8]);
        }
        TileWarp::multiply(sums[i][m], a, b);
      }
    }
  }
}

// A block computes 64 x 64 of dw[t], features of x and y by features of z, for all triples t of
// grade c: the sum of P_t,k^T dz_k over the blades k of the grade and rows `begin` to `end` - 1 of
// dz. A step takes 8 rows: while their dz comes, a thread makes all of the grade's planes for two
// features of one row. Then a group multiplies its slots, each warp 32 x 32 of the tile.
template <typename A, int c>
__device__ __forceinline__ void weight_gradient_tile(const float* x, const float* y,
                                                     const ResultGradients& dz, float* dw,
                                                     int begin, int end, bool adds, float* shared,
                                                     const Layer& layer) {
  constexpr int kBlades = kOrder<A>.blades(c), kFirstBlade = A::first(c);
  constexpr int kSlots = kOrder<A>.slots(c), kHalf = (kSlots + 1) / 2;
  constexpr int kFirstSlot = kOrder<A>.slot[c], kFirstPlane = kOrder<A>.plane[c];
  static_assert(kWeightDepth * kTile == 2 * kPairThreads);
  float* const planes = shared;
  float* const results = shared + kSlots * kBlades * kWeightPlane;
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
    Multivectors<A, 2> left = load_inside<A, 2>(x, at, row0 + f, layer);
    const Multivectors<A, 2> right = load_inside<A, 2>(y, at, row0 + f, layer);
    apply_gates(left, right);
    make_planes<A, kFirstSlot, kFirstSlot + kSlots>(
        left, right, [&](auto slot, auto k, const Pack<2>& P) {
          constexpr int first = Slot<A, slot>::plane - kFirstPlane - kFirstBlade;
          store_rounded(planes + (first + k) * kWeightPlane + row * kRowStride + f, P);
        });
    copy_async_wait<0>();
    __syncthreads();
    if (warp.group == 0) {
      multiply_transposed<kBlades, kHalf>(sums, planes, results);
    } else {
      multiply_transposed<kBlades, kSlots - kHalf>(sums, planes + kHalf * kBlades * kWeightPlane,
                                                   results);
    }
    __syncthreads();
  }
  unroll<0, kSlots>([&](auto i) {
    constexpr size_t t = Slot<A, kFirstSlot + i>::triple;
    if (warp.group != i / kHalf) return;
    warp.for_results(sums[i % kHalf], [&](int row, int col, float value) {
      if (row0 + row >= layer.features || col0 + col >= layer.features) return;
      float& to = dw[(t * layer.features + row0 + row) * layer.features + col0 + col];
      to = adds ? to + value : value;
    });
  });
}

// blockIdx.z says which grade of the result a block has, and which of `splits` shares of the rows.
// With few features there are too few tiles: 128 features in 3-D have 2 x 2 for each of 4 grades,
// 16 blocks. Each share has its own sum; in dw these sums lie one after the other.
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

// dw is the sum of the shares' sums, in their order. A thread has four neighbouring elements.
__global__ void sum_weight_gradients(const float* partials, float* dw, int count, size_t size) {
  const size_t first = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
  wait_for_previous_kernel();
  if (first >= size) return;
  Pack<4> sum = {};
  for (int i = 0; i < count; ++i) {
    const auto partial = *reinterpret_cast<const Pack<4>*>(partials + i * size + first);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum.v[e] += partial.v[e];
  }
  *reinterpret_cast<Pack<4>*>(dw + first) = sum;
}

// ---- On Hopper, backward ------------------------------------------------------------------------

// *planes first* and *planes beside* have the same kernels for backward. It begins with the chunk
// that forward ended with, whose planes are still there. First these are multiplied for dw. Then
// the planes' gradients are written over them, and taken apart by a kernel of their own.
//
// dz is stored transposed, (blades, stride, pitch). The product for dw sums over the batch. In a
// row of dz neighbours of the batch lie beside each other, so dz can be its right factor. Its left
// factors are planes. For the planes' gradients dz is the left factor. In memory a row of a left
// factor here has a single k. In TF32 wgmma takes such a factor from registers only, to which
// TransposedLeftTile loads it. So neither dz nor planes have to be in memory in both orders.
using LargeTransposed = Tf32Tile<256, 2, TransposedLeftTile<128>>;
using SmallTransposed = Tf32Tile<128, 1, TransposedLeftTile<128>>;

constexpr int kResultRows = 8, kResultThreads = 512;

// A block writes dz of 8 rows and one grade, in TF32: dz = r d_out - r out mean(d_out out). Two
// warps add up a row, each lane four features at a time. Then a thread has 8 rows of a feature. In
// dz these are 32 neighbouring bytes, a sector, the least that memory writes at once. The second
// reads hit a cache. Features become columns of dw, so they are in the order of place_of_column().
struct ResultFactors {
  float products[kResultThreads / 32];  // each warp's sum of d_out out
  float2 factors[kResultRows];          // each row's r, and r mean(d_out out)
};
template <typename A, int c>
__device__ __forceinline__ void turn_grade(const float* out, const float* d_out,
                                           const float* inverses, float* dz, ResultFactors& shared,
                                           const Chunk& chunk) {
  const Layer& layer = chunk.layer;
  const size_t plane = layer.plane();
  const int row0 = blockIdx.x * kResultRows;
  const auto start = [&](int i) {
    return static_cast<size_t>(chunk.first + row0 + i) * layer.features;
  };
  const int thread = threadIdx.x, row = thread / 64;
  float r = 1;
  if (thread < kResultRows && layer.normed && row0 + thread < chunk.rows) {
    r = inverses[static_cast<size_t>(c) * layer.batch + chunk.first + row0 + thread];
  }
  Sums<1> product = {};
  if (layer.normed && row0 + row < chunk.rows) {
    for (int f = threadIdx.x % 64 * 4; f < layer.features; f += 64 * 4) {
      unroll<A::first(c), A::first(c + 1)>([&](auto k) {
        const size_t at = k * plane + start(row) + f;
        const auto a = *reinterpret_cast<const Pack<4>*>(out + at);
        const auto b = *reinterpret_cast<const Pack<4>*>(d_out + at);
#pragma unroll
        for (int e = 0; e < 4; ++e) product.value[0] += a.v[e] * b.v[e];
      });
    }
  }
  add_up_warp(product);
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
      // Features f - odd and f - odd + 1 are side by side: an even lane stores rows 0 to 3 of both,
      // an odd lane rows 4 to 7. So two lanes together store whole sectors.
      float other[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        other[i] = __shfl_xor_sync(0xffffffffu, odd ? eight[i] : eight[4 + i], 1);
        if (odd) eight[i] = eight[4 + i];
      }
      const int place = k * chunk.stride + place_of_column(f - odd);
      float* const to = dz + static_cast<size_t>(place) * chunk.pitch + row0 + 4 * odd;
      const float4 own4 = make_float4(eight[0], eight[1], eight[2], eight[3]);
      const float4 other4 = make_float4(other[0], other[1], other[2], other[3]);
      *reinterpret_cast<float4*>(to) = odd ? other4 : own4;
      *reinterpret_cast<float4*>(to + chunk.pitch) = odd ? own4 : other4;
    });
  }
}

template <typename A>
__global__ void __launch_bounds__(kResultThreads, 2)
    turn_result_gradients(const float* out, const float* d_out, const float* inverses, float* dz,
                          Chunk chunk) {
  __shared__ ResultFactors shared;
  wait_for_previous_kernel();
  unroll<0, A::kGrades>([&](auto c) {
    if (static_cast<int>(blockIdx.y) == c) {
      turn_grade<A, c>(out, d_out, inverses, dz, shared, chunk);
    }
  });
}

#if HOPPER_CODE
// A consumer multiplies `steps` stages with the left factor in registers. While a stage is
// multiplied, the fragments of the next one are loaded: what each thread holds of the left factor.
template <class Tile, class Cluster>
__device__ __forceinline__ void multiply_fragments(
    Sum<Tile::BN>& sum, Reader<decltype(Tile::Shared::pipeline), Cluster>& reader, int steps,
    int row) {
  using Stage = typename Tile::Stage;
  using Fragments = LeftFragments<float>;
  reader.template take_ahead<Fragments>(
      steps, [&](Fragments& to, const Stage& stage) { to = stage.a.load_fragments(row); },
      [&](const Fragments& left, const Stage& stage, bool add) {
        sum.start_product(left, stage.b.columns(), add);
      });
  reader.finish();
}
#endif

// The planes' gradients of a chunk, dz_k w[t]^T. The left factor is dz, which is stored transposed,
// the right one the `plain` weights of WeightTransposer. A tile is a part of one plane. Tiles are
// numbered by rows, then plane, then columns. Each gradient is written to `d` where its plane was.
struct PlaneGradientTiles {
  Chunk chunk;
  Order order;
  int cols;
  Rounds rounds;

  template <class Tile>
  PlaneGradientTiles(Tile, const Order& planes, const Chunk& rows, int clusters)
      : chunk(rows), order(planes), cols(ceil_div(chunk.layer.features, Tile::BN)) {
    const int tiles = ceil_div(chunk.rows, Tile::BM * Tile::kBlocks) * order.planes() * cols;
    rounds = {tiles, std::min(tiles, clusters)};
  }
};
template <class Tile>
__global__ void HOPPER_CLUSTER(Tile::kBlocks) __launch_bounds__(384, 1)
    plane_gradients_product(const __grid_constant__ CUtensorMap dz,
                            const __grid_constant__ CUtensorMap weights, float* d,
                            const __grid_constant__ PlaneGradientTiles tiles) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(bytes);
  const BlockGrid<Tile::kBlocks, 1> cluster;
  const Chunk& chunk = tiles.chunk;
  const Order& order = tiles.order;
  const int warp = warp_of_block(), steps = ceil_div(chunk.layer.features, Tile::kDepth);
  if (warp == 1 && elect_one()) prepare(shared.pipeline, 2 * Tile::kBlocks);
  cluster.meet();
  wait_for_previous_kernel();
  const auto plane_of_tile = [&](int tile) { return tile / tiles.cols % order.planes(); };
  const auto row_of_tile = [&](int tile) {
    return (tile / (order.planes() * tiles.cols) * Tile::kBlocks + cluster.rank) * Tile::BM;
  };
  const auto col_of_tile = [&](int tile) { return tile % tiles.cols * Tile::BN; };

  if (warp < 4) {
    registers_shrink_to<56>();
    if (warp > 0 || !elect_one()) return;
    Writer writer(shared.pipeline);
    for (int round = 0; tiles.rounds.has(round, cluster.cluster); ++round) {
      const int tile = tiles.rounds.tile(round, cluster.cluster), plane = plane_of_tile(tile);
      const int c = Order::grade_of(order.plane, plane), i = plane - order.plane[c];
      const int blade = order.blade[c] + i % order.blades(c);
      const int slot = order.slot[c] + i / order.blades(c);
      const int row = row_of_tile(tile), col = col_of_tile(tile);
      for (int step = 0; step < steps; ++step) {
        writer.put([&](typename Tile::Stage& stage, Barrier* arrived) {
          const int k = step * Tile::kDepth;
          cluster.load(stage.a, &dz, row, blade * chunk.stride + k, arrived);
          cluster.load(stage.b, &weights, slot * chunk.stride + col, k, arrived);
        });
      }
    }
    if constexpr (Tile::kBlocks > 1) writer.finish();
  } else {
    registers_grow_to<224>();
    const int consumer = threadIdx.x / 128 - 1;
    Reader reader(shared.pipeline, cluster);
    for (int round = 0; tiles.rounds.has(round, cluster.cluster); ++round) {
      const int tile = tiles.rounds.tile(round, cluster.cluster);
      Sum<Tile::BN> sum;
      multiply_fragments<Tile>(sum, reader, steps, 64 * consumer);
      store_sum<Tile>(sum, d + plane_of_tile(tile) * chunk.matrix(),
                      row_of_tile(tile) + 64 * consumer, col_of_tile(tile), chunk.rows,
                      chunk.stride, chunk.stride, false);
    }
  }
#endif
}

// dw[t] of a chunk, the sum of P_t,k^T dz_k over its rows and the blades k. The left factor is the
// planes, read transposed, the right one is dz. For each 32 rows there is a stage for each blade of
// the slot's grade. Where there are few tiles, `splits` clusters share the rows of one: each leaves
// a partial sum.
struct WeightGradientTiles {
  Chunk chunk;
  Order order;
  int splits, row_tiles, cols;
  bool adds;  // to what an earlier chunk has left
  Rounds rounds;

  template <class Tile>
  WeightGradientTiles(Tile, const Order& planes, const Chunk& rows, int shares, bool adds_up,
                      int clusters)
      : chunk(rows),
        order(planes),
        splits(shares),
        row_tiles(ceil_div(chunk.layer.features, Tile::BM * Tile::kBlocks)),
        cols(ceil_div(chunk.layer.features, Tile::BN)),
        adds(adds_up) {
    const int tiles = order.slot[order.grades] * splits * row_tiles * cols;
    rounds = {tiles, std::min(tiles, clusters)};
  }

  // A tile's slot and grade, its share of the rows (steps `begin` to `end` - 1, 32 rows each), and
  // where it is in the matrix.
  struct Place {
    int slot, c, split, begin, end, row, col;
    __host__ __device__ int steps(const Order& of) const { return (end - begin) * of.blades(c); }
  };
  // First come the slots whose grade has the most blades: all but those of the first and the last
  // grade, which have one blade.
  __host__ __device__ Place place(int tile, int tile_rows, int tile_cols) const {
    const int after = order.slot[order.grades - 1], first = order.slot[1];
    const int i = tile / (splits * row_tiles * cols);
    const int slot = i < after - first ? first + i : i < after ? i - (after - first) : i;
    const int split = tile / (row_tiles * cols) % splits, steps = ceil_div(chunk.rows, 32);
    return {.slot = slot,
            .c = Order::grade_of(order.slot, slot),
            .split = split,
            .begin = split * steps / splits,
            .end = (split + 1) * steps / splits,
            .row = tile / cols % row_tiles * tile_rows,
            .col = tile % cols * tile_cols};
  }
};
template <class Tile>
__global__ void HOPPER_CLUSTER(Tile::kBlocks) __launch_bounds__(384, 1)
    weight_gradients_product(const __grid_constant__ CUtensorMap planes,
                             const __grid_constant__ CUtensorMap dz, float* dw,
                             const __grid_constant__ WeightGradientTiles tiles) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(bytes);
  const BlockGrid<Tile::kBlocks, 1> cluster;
  const Chunk& chunk = tiles.chunk;
  const Order& order = tiles.order;
  const int warp = warp_of_block();
  if (warp == 1 && elect_one()) prepare(shared.pipeline, 2 * Tile::kBlocks);
  cluster.meet();
  wait_for_previous_kernel();
  const auto place = [&](int round) {
    auto at =
        tiles.place(tiles.rounds.tile(round, cluster.cluster), Tile::kBlocks * Tile::BM, Tile::BN);
    at.row += cluster.rank * Tile::BM;
    return at;
  };

  if (warp < 4) {
    registers_shrink_to<56>();
    if (warp > 0 || !elect_one()) return;
    Writer writer(shared.pipeline);
    for (int round = 0; tiles.rounds.has(round, cluster.cluster); ++round) {
      const auto at = place(round);
      const int blades = order.blades(at.c), blade = order.blade[at.c];
      const int plane = order.plane[at.c] + (at.slot - order.slot[at.c]) * blades;
      for (int step = at.begin; step < at.end; ++step) {
        for (int i = 0; i < blades; ++i) {
          writer.put([&](typename Tile::Stage& stage, Barrier* arrived) {
            const int k = step * Tile::kDepth;
            cluster.load(stage.a, &planes, at.row, (plane + i) * chunk.pitch + k, arrived);
            cluster.load(stage.b, &dz, (blade + i) * chunk.stride + at.col, k, arrived);
          });
        }
      }
    }
    if constexpr (Tile::kBlocks > 1) writer.finish();
  } else {
    registers_grow_to<224>();
    const int consumer = threadIdx.x / 128 - 1, features = chunk.layer.features;
    Reader reader(shared.pipeline, cluster);
    for (int round = 0; tiles.rounds.has(round, cluster.cluster); ++round) {
      const auto at = place(round);
      Sum<Tile::BN> sum;
      multiply_fragments<Tile>(sum, reader, at.steps(order), 64 * consumer);
      const size_t matrix =
          static_cast<size_t>(at.split) * order.slot[order.grades] + order.triple_of[at.slot];
      store_sum<Tile>(sum, dw + matrix * features * features, at.row + 64 * consumer, at.col,
                      features, features, features, tiles.adds);
    }
  }
#endif
}

// dx and dy from the planes' gradients d of a chunk. A thread has two neighbouring features of a
// row. The last rows come first: what the product has written last is still in the cache.
template <typename A>
__global__ void __launch_bounds__(128)
    take_planes_apart(const float* x, const float* y, const float* d, float* dx, float* dy,
                      Chunk chunk) {
  wait_for_previous_kernel();
  const Layer& layer = chunk.layer;
  const int row = chunk.rows - 1 - blockIdx.y, f = (blockIdx.x * 128 + threadIdx.x) * 2;
  if (f >= layer.features) return;
  const size_t plane = layer.plane();
  const size_t at = static_cast<size_t>(chunk.first + row) * layer.features + f;
  const Multivectors<A, 2> left = load<A, 2>(x + at, plane), right = load<A, 2>(y + at, plane);
  Multivectors<A, 2> sum_x = {}, sum_y = {};
  const float* from = d + static_cast<size_t>(row) * chunk.stride + f;
  unroll<0, A::kTriples>([&](auto slot) {
    using S = Slot<A, slot>;
    Multivectors<A, 2> d_planes;  // only one grade
    unroll<S::first, S::end>([&](auto k) {
      d_planes.blade[k] = *reinterpret_cast<const Pack<2>*>(from);
      from += chunk.matrix();
    });
    take_apart<A, S::triple>(d_planes, left, right, sum_x, sum_y);
  });
  finish_gradients(left, right, sum_x, sum_y);
  unroll<0, A::kBlades>([&](auto i) {
    *reinterpret_cast<Pack<2>*>(dx + i * plane + at) = sum_x.blade[i];
    *reinterpret_cast<Pack<2>*>(dy + i * plane + at) = sum_y.blade[i];
  });
}

// ---- Launches -----------------------------------------------------------------------------------

// For each row of the table at the top a struct has its memory and its launches, in their order.
// bytes() is the memory beside inputs and outputs. workspace.any() gives memory with undefined
// contents.
using Tensors = CliffordTable;
using Gradients = CliffordGradients;

template <typename A>
struct UnfusedConnected {
  UnfusedConnected(const Tensors& tensors, std::shared_ptr<Cublas> handle)
      : of(tensors),
        blas(std::move(handle)),
        x(of.workspace.any<float>(of.x.size())),
        y(of.workspace.any<float>(of.y.size())),
        planes(of.workspace.any<float>(order.planes() * of.layer.plane())),
        weights(of.workspace.any<float>(of.w.size())),
        z(of.layer.normed ? of.workspace.any<float>(of.out.size()) : of.out),
        inverses(of.workspace.any<float>(static_cast<size_t>(of.layer.batch) * A::kGrades)) {}

  double bytes() const {
    return x.bytes() + y.bytes() + planes.bytes() + weights.bytes() +
           (of.layer.normed ? z.bytes() + inverses.bytes() : 0);
  }
  // Of the product for grade c: where its planes, weights and results start, and how many rows the
  // matrix of planes (rows_of) and the matrix of weights (depth_of) have.
  size_t planes_of(int c) const { return order.plane[c] * of.layer.plane(); }
  size_t weights_of(int c) const { return order.slot[c] * matrix(); }
  size_t results_of(int c) const { return order.blade[c] * of.layer.plane(); }
  int rows_of(int c) const { return order.blades(c) * of.layer.batch; }
  int depth_of(int c) const { return order.slots(c) * of.layer.features; }
  size_t matrix() const { return of.w.size() / A::kTriples; }

  void order_matrices(const float* from, float* to, bool back) const {
    const dim3 blocks(blocks_for(matrix(), 256), A::kTriples);
    order_weights<<<blocks, 256>>>(from, to, matrix(), back, order);
  }
  void forward() const {
    const Layer& layer = of.layer;
    const int blocks = blocks_for(layer.plane(), 256);
    apply_gate<A><<<blocks, 256>>>(of.x, x, layer);
    apply_gate<A><<<blocks, 256>>>(of.y, y, layer);
    multiply_pairs<A><<<blocks, 256>>>(x, y, planes, layer);
    order_matrices(of.w, weights, false);
    for (int c = 0; c < A::kGrades; ++c) {
      library_product(*blas, planes + planes_of(c), Stored::plain, weights + weights_of(c),
                      Stored::plain, z + results_of(c), rows_of(c), layer.features, depth_of(c));
    }
    for (int c = 0; layer.normed && c < A::kGrades; ++c) {
      normalize_grade<<<layer.batch, 256>>>(z + results_of(c), of.out + results_of(c),
                                            inverses + static_cast<size_t>(c) * layer.batch,
                                            order.blades(c), layer);
    }
  }

  Tensors of;
  std::shared_ptr<Cublas> blas;
  Order order = kOrder<A>;
  Memory<float> x, y, planes, weights, z, inverses;
};

template <typename A>
struct UnfusedConnectedBackward {
  UnfusedConnectedBackward(const Tensors& of, const Gradients& gradients,
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
          dz + start, f.order.blades(c), layer);
    }
    for (int c = 0; c < A::kGrades; ++c) {
      library_product(*f.blas, f.planes + f.planes_of(c), Stored::transposed, dz + f.results_of(c),
                      Stored::plain, dw + f.weights_of(c), f.depth_of(c), layer.features,
                      f.rows_of(c));
      library_product(*f.blas, dz + f.results_of(c), Stored::plain, f.weights + f.weights_of(c),
                      Stored::transposed, f.planes + f.planes_of(c), f.rows_of(c), f.depth_of(c),
                      layer.features);
    }
    f.order_matrices(dw, d.dw, true);
    const int blocks = blocks_for(layer.plane(), 256);
    multiply_pairs_gradient<A><<<blocks, 256>>>(f.x, f.y, f.planes, d.dx, d.dy, layer);
    apply_gate_gradient<A><<<blocks, 256>>>(f.of.x, d.dx, layer);
    apply_gate_gradient<A><<<blocks, 256>>>(f.of.y, d.dy, layer);
  }

  UnfusedConnected<A> forward;
  Gradients d;
  Memory<float> dz, dw;
};

// *planes in tiles*: forward() launches round_weights and forward_tiles, and normalize_rows for the
// norm. For as many rows at a time as dz holds, backward() launches result_gradients,
// input_gradient_tiles and weight_gradient_tiles. With several shares sum_weight_gradients is last.
template <typename A>
struct Tiled {
  explicit Tiled(const Tensors& tensors)
      : of(tensors),
        stride(ceil_div(of.layer.features, kGradientCols) * kGradientCols),
        weights(of.workspace.any<float>(static_cast<size_t>(A::kTriples) * stride * stride)),
        inverses(of.workspace.any<float>(static_cast<size_t>(A::kGrades) * of.layer.batch)) {
    allow_shared_bytes(forward_tiles<A>, kForwardTileBytes<A>);
  }
  double bytes() const { return weights.bytes() + (of.layer.normed ? inverses.bytes() : 0); }

  static int tiles(int count) { return ceil_div(count, kTile); }

  void forward() const {
    const Layer& layer = of.layer;
    const int threads = std::min(stride, 256);
    round_weights<<<dim3(ceil_div(stride, threads), stride, A::kTriples), threads>>>(
        of.w, weights, layer.features, stride);
    const dim3 grid(tiles(layer.features), tiles(layer.batch), A::kBlades / 4);
    constexpr int kBytes = kForwardTileBytes<A>;
    forward_tiles<A><<<grid, kTileThreads, kBytes>>>(of.x, of.y, weights, of.out, stride, layer);
    if (!layer.normed) return;
    launch_early(normalize_rows<A>, layer.batch, layer.features <= 512 ? 128 : 256, 0,
                 of.out.data(), inverses.data(), layer);
  }

  Tensors of;
  int stride;  // of the weights' rows
  Memory<float> weights, inverses;
};

template <typename A>
struct TiledBackward {
  static constexpr size_t kChunkBytes = 64 << 20;

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

  static int rows_at_a_time(const Tiled<A>& tiled) {
    const size_t most = kChunkBytes / (sizeof(float) * A::kBlades * tiled.stride);
    const int whole = std::max(1, static_cast<int>(most) / kTile);
    return kTile * std::min(whole, Tiled<A>::tiles(tiled.of.layer.batch));
  }
  // In how many shares dw's sum over the batch is computed: enough for two blocks a multiprocessor.
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
      const int count = std::min(rows, layer.batch - first), row_tiles = Tiled<A>::tiles(count);
      const ResultGradients results{dz, first, count, forward.stride,
                                    static_cast<size_t>(rows) * forward.stride};
      result_gradients<A>
          <<<row_tiles * kTile, 256>>>(of.out, d.d_out, forward.inverses, results, layer);
      input_gradient_tiles<A>
          <<<dim3(ceil_div(layer.features, kGradientCols), row_tiles), kPairThreads,
             kGradientTileBytes>>>(of.x, of.y, forward.weights, results, d.dx, d.dy, layer);
      weight_gradient_tiles<A>
          <<<dim3(tiles, tiles, A::kGrades * splits), kPairThreads, kWeightBytes>>>(
              of.x, of.y, results, partials, splits, first > 0, layer);
    }
    if (splits > 1) {
      launch_early(sum_weight_gradients, blocks_for(d.dw.size(), 4 * 256), 256, 0,
                   static_cast<const float*>(partials), d.dw.data(), splits, d.dw.size());
    }
  }

  Tiled<A> forward;
  Gradients d;
  int rows, splits;
  Memory<float> dz, partials;
};

// Which tile a product on Hopper has, and how many clusters of it the device holds. A step of a
// large tile takes the tensor cores 1024 cycles, one of a small tile 512. But in both a block
// fetches 32 KB for a step, and for a small one that takes longer than 512 cycles: 620 is an
// estimate. So small tiles are better only where large ones leave multiprocessors without work.
constexpr int kLargeCycles = 1024, kSmallCycles = 620;
struct TileChoice {
  bool large = true;
  int clusters = 0;
};

template <class Tile, typename... Parameters>
int clusters_of(void (*kernel)(Parameters...)) {
  constexpr int kBytes = sizeof(typename Tile::Shared);
  allow_shared_bytes(kernel, kBytes);
  return resident_clusters(kernel, Tile::kBlocks, 384, kBytes);
}
// The choice that takes fewer cycles: tiles / clusters, rounded up (row by row there may be more
// rounds), times the cycles of a step. Steps are equally many. large() and small() count tiles.
template <typename LargeTiles, typename SmallTiles>
TileChoice choose_tile(int large_clusters, int small_clusters, LargeTiles large, SmallTiles small) {
  const int large_cycles = kLargeCycles * ceil_div(large(large_clusters), large_clusters);
  const int small_cycles = kSmallCycles * ceil_div(small(small_clusters), small_clusters);
  if (large_cycles <= small_cycles) return {true, large_clusters};
  return {false, small_clusters};
}
template <class Tile, typename... Parameters, typename... Arguments>
void launch_product(void (*kernel)(Parameters...), int clusters, const Arguments&... arguments) {
  launch_early(kernel, Tile::kBlocks * static_cast<unsigned>(clusters), 384,
               sizeof(typename Tile::Shared), arguments...);
}
// Describes a factor (rows, cols) in memory to the copy engine, which moves boxes of box_rows rows
// and 32 columns. 128 rows of a right factor are all 128 columns of a small tile of the result, or
// those 128 columns of a large one that one of its two blocks brings.
CUtensorMap factor(const float* data, int64_t rows, int64_t cols, unsigned box_rows = 128) {
  return tensor_map<float>(data, rows, cols, box_rows);
}

// *planes first* and *planes beside*, forward. For each chunk forward() launches make_ready, then
// planes_first or planes_beside, then normalize_rest, if some rows' tiles are not together().
//
// `kept` is memory for 1 / rms, which all kernels of a table may share. `made` has two lists of
// counters: for each patch how many of its units are there, and after them Norm's `counted`.
template <typename A, bool kBeside>
struct InMemory {
  static constexpr size_t kPlaneBytes = 1 << 30;

  InMemory(const Tensors& tensors, const Memory<float>& kept)
      : of(tensors),
        stride(of.layer.features < 128 ? ceil_div(of.layer.features, 32) * 32
                                       : ceil_div(of.layer.features, 128) * 128),
        rows(rows_at_a_time()),
        choice(choose()),
        planes(of.workspace.any<float>(order.planes() * largest().matrix())),
        weights(of.workspace.any<float>(static_cast<size_t>(A::kTriples) * stride * stride)),
        inverses(kept),
        squares(of.workspace.any<float>(static_cast<size_t>(A::kBlades) * largest().pitch *
                                        ceil_div(of.layer.features, 128))),
        made(of.workspace.any<unsigned>(counters(largest()))) {}

  double bytes() const {
    return planes.bytes() + weights.bytes() + made.bytes() +
           (of.layer.normed ? inverses.bytes() + squares.bytes() : 0);
  }
  // How many rows a chunk has. There are as few chunks as kPlaneBytes allows, about equally long,
  // and all but the last have a multiple of 256 rows. A grid has at most 65535 blocks along y, and
  // take_planes_apart has as many as the chunk has rows: so `most` is at most 255 x 256.
  int rows_at_a_time() const {
    const int batch = of.layer.batch;
    const size_t fit = kPlaneBytes / (sizeof(float) * order.planes() * stride);
    const int most = std::clamp(static_cast<int>(fit) / 256, 1, 255) * 256;
    const int chunks = ceil_div(batch, most);
    return std::min(batch, ceil_div(ceil_div(batch, chunks), 256) * 256);
  }
  Chunk chunk(int first) const {
    const int count = std::min(rows, of.layer.batch - first);
    return {of.layer, first, count, ceil_div(count, 128) * 128, stride};
  }
  Chunk largest() const { return chunk(0); }
  int first_of_last_chunk() const { return (of.layer.batch - 1) / rows * rows; }
  static int patches(const Chunk& chunk) { return chunk.slices() * chunk.row_blocks(); }
  static int counters(const Chunk& chunk) { return patches(chunk) + chunk.pitch / 64 * A::kGrades; }

  template <class Tile>
  static int clusters() {
    if constexpr (kBeside)
      return clusters_of<Tile>(planes_beside<Tile, A>);
    else
      return clusters_of<Tile>(planes_first<Tile>);
  }
  template <class Tile>
  TileOrder tiles(const Chunk& chunk, int clusters) const {
    return TileOrder(Tile(), order, chunk.layer, chunk.rows, clusters);
  }
  TileChoice choose() const {
    return choose_tile(
        clusters<LargeTile>(), clusters<SmallTile>(),
        [&](int clusters) { return tiles<LargeTile>(largest(), clusters).rounds.tiles; },
        [&](int clusters) { return tiles<SmallTile>(largest(), clusters).rounds.tiles; });
  }
  Norm norm(const Chunk& chunk) const {
    const TileOrder tile_order = choice.large ? tiles<LargeTile>(chunk, choice.clusters)
                                              : tiles<SmallTile>(chunk, choice.clusters);
    return {of.out, inverses, squares, made.data() + patches(chunk), chunk, tile_order};
  }
  PlaneMaker<A> all_planes(const Chunk& chunk) const {
    return {of.x, of.y, planes, chunk, chunk.row_blocks(), chunk.slices()};
  }
  BesideMaker<A> maker(const Chunk& chunk) const {
    BesideMaker<A> result{all_planes(chunk), made};
    const int first_round = norm(chunk).tiles.rows_of_round() / 128;
    result.row_blocks_before = std::min(first_round, chunk.row_blocks());
    result.slices_before = std::min(2, chunk.slices());
    return result;
  }
  // Launches make_ready: for the planes that `maker` makes before the product and, if
  // `with_weights`, for the weights. plain_weights is null unless backward follows.
  void prepare(const PlaneMaker<A>& maker, bool with_weights, float* plain_weights) const {
    const int plane_blocks = maker.units_before() / 4;
    const WeightTransposer transposer{of.w,   weights, plain_weights, of.layer.features,
                                      stride, order};
    launch_early(make_ready<A>, plane_blocks + (with_weights ? transposer.blocks() : 0), 128, 0,
                 maker, plane_blocks, transposer, made.data(), counters(maker.chunk));
  }
  template <class Tile>
  void multiply(const Chunk& chunk) const {
    const Norm norm = this->norm(chunk);
    const auto left = factor(planes, int64_t{order.planes()} * chunk.pitch, stride);
    const auto right = factor(weights, int64_t{A::kTriples} * stride, stride);
    if constexpr (kBeside) {  // clusters without a tile make planes
      launch_product<Tile>(planes_beside<Tile, A>, choice.clusters, left, right, norm,
                           maker(chunk));
    } else {
      launch_product<Tile>(planes_first<Tile>, norm.tiles.rounds.clusters, left, right, norm);
    }
    if (!of.layer.normed || norm.all_together()) return;
    launch_early(normalize_rest<A>, ceil_div(chunk.rows * A::kGrades, 4), 128, 0, norm);
  }
  void forward(float* plain_weights) const {
    for (int first = 0; first < of.layer.batch; first += rows) {
      const Chunk chunk = this->chunk(first);
      if constexpr (kBeside)
        prepare(maker(chunk), first == 0, plain_weights);  // its PlaneMaker part
      else
        prepare(all_planes(chunk), first == 0, plain_weights);
      choice.large ? multiply<LargeTile>(chunk) : multiply<SmallTile>(chunk);
    }
  }

  Tensors of;
  Order order = kOrder<A>;
  int stride, rows;
  TileChoice choice;
  Memory<float> planes, weights, inverses, squares;
  Memory<unsigned> made;
};

// The same with backward. For each chunk, the last one first, it launches turn_result_gradients,
// then make_ready, if the planes are gone, the two products and take_planes_apart. At the end comes
// sum_weight_gradients, if there are partial sums.
template <typename A, bool kBeside>
struct InMemoryBackward {
  InMemoryBackward(const InMemory<A, kBeside>& in_memory, const Gradients& gradients)
      : forward(in_memory),
        d(gradients),
        dz(forward.of.workspace.template any<float>(A::kBlades * forward.largest().matrix())),
        plain_weights(forward.of.workspace.template any<float>(forward.weights.size())),
        partials(d.dw),
        of_planes(choose_tile(
            clusters_of<LargeTransposed>(plane_gradients_product<LargeTransposed>),
            clusters_of<SmallTransposed>(plane_gradients_product<SmallTransposed>),
            [&](int clusters) { return plane_tiles<LargeTransposed>(clusters).rounds.tiles; },
            [&](int clusters) { return plane_tiles<SmallTransposed>(clusters).rounds.tiles; })) {
    choose_splits();
    if (splits > 1) {
      partials =
          forward.of.workspace.template any<float>(static_cast<size_t>(splits) * d.dw.size());
    }
  }

  double bytes() const {
    return forward.bytes() + dz.bytes() + plain_weights.bytes() +
           (splits > 1 ? partials.bytes() : 0);
  }

  template <class Tile>
  PlaneGradientTiles plane_tiles(int clusters) const {
    return PlaneGradientTiles(Tile(), forward.order, forward.largest(), clusters);
  }
  template <class Tile>
  WeightGradientTiles weight_tiles(const Chunk& chunk, int shares, int clusters) const {
    return WeightGradientTiles(Tile(), forward.order, chunk, shares,
                               chunk.first != forward.first_of_last_chunk(), clusters);
  }
  // The steps of the cluster that has the most to do, in cycles. Only steps of a place matter here.
  template <class Tile>
  double weight_cycles(int shares, int clusters) const {
    const auto tiles = weight_tiles<Tile>(forward.largest(), shares, clusters);
    const Rounds& rounds = tiles.rounds;
    int most = 0;
    for (int cluster = 0; cluster < rounds.clusters; ++cluster) {
      int steps = 0;
      for (int round = 0; rounds.has(round, cluster); ++round) {
        steps += tiles.place(rounds.tile(round, cluster), 1, 1).steps(forward.order);
      }
      most = std::max(most, steps);
    }
    return most * static_cast<double>(Tile::kBlocks > 1 ? kLargeCycles : kSmallCycles);
  }
  // Where tiles are few, clusters share the rows of one. Every share needs rows in every chunk,
  // also in the last, the shortest. At most 8, so that partial sums, which cost time, stay few.
  void choose_splits() {
    const int large = clusters_of<LargeTransposed>(weight_gradients_product<LargeTransposed>);
    const int small = clusters_of<SmallTransposed>(weight_gradients_product<SmallTransposed>);
    const int most = std::min(8, forward.chunk(forward.first_of_last_chunk()).rows / 128);
    double best = 0;
    for (int shares = 1; shares <= std::max(most, 1); ++shares) {
      const double of_large = weight_cycles<LargeTransposed>(shares, large);
      const double of_small = weight_cycles<SmallTransposed>(shares, small);
      const double cycles = std::min(of_large, of_small);
      if (shares > 1 && cycles >= 0.9 * best) continue;
      best = cycles, splits = shares;
      of_weights = of_large <= of_small ? TileChoice{true, large} : TileChoice{false, small};
    }
  }

  template <class Tile>
  void multiply_for_weights(const Chunk& chunk) const {
    const auto tiles = weight_tiles<Tile>(chunk, splits, of_weights.clusters);
    launch_product<Tile>(
        weight_gradients_product<Tile>, tiles.rounds.clusters,
        factor(forward.planes, int64_t{forward.order.planes()} * chunk.pitch, chunk.stride, 32),
        factor(dz, int64_t{A::kBlades} * chunk.stride, chunk.pitch), partials.data(), tiles);
  }
  template <class Tile>
  void multiply_for_planes(const Chunk& chunk) const {
    const PlaneGradientTiles tiles(Tile(), forward.order, chunk, of_planes.clusters);
    launch_product<Tile>(plane_gradients_product<Tile>, tiles.rounds.clusters,
                         factor(dz, int64_t{A::kBlades} * chunk.stride, chunk.pitch, 32),
                         factor(plain_weights, int64_t{A::kTriples} * chunk.stride, chunk.stride),
                         forward.planes.data(), tiles);
  }
  void forward_and_backward() const {
    const Tensors& of = forward.of;
    forward.forward(plain_weights);
    const int last = forward.first_of_last_chunk();
    for (int first = last; first >= 0; first -= forward.rows) {
      const Chunk chunk = forward.chunk(first);
      launch_early(turn_result_gradients<A>, dim3(chunk.pitch / kResultRows, A::kGrades),
                   kResultThreads, 0, static_cast<const float*>(of.out),
                   static_cast<const float*>(d.d_out), static_cast<const float*>(forward.inverses),
                   dz.data(), chunk);
      if (first != last) forward.prepare(forward.all_planes(chunk), false, nullptr);
      of_weights.large ? multiply_for_weights<LargeTransposed>(chunk)
                       : multiply_for_weights<SmallTransposed>(chunk);
      of_planes.large ? multiply_for_planes<LargeTransposed>(chunk)
                      : multiply_for_planes<SmallTransposed>(chunk);
      launch_early(take_planes_apart<A>, dim3(ceil_div(of.layer.features, 256), chunk.rows), 128, 0,
                   static_cast<const float*>(of.x), static_cast<const float*>(of.y),
                   static_cast<const float*>(forward.planes), d.dx.data(), d.dy.data(), chunk);
    }
    if (splits > 1) {
      launch_early(sum_weight_gradients, blocks_for(d.dw.size(), 4 * 256), 256, 0,
                   static_cast<const float*>(partials), d.dw.data(), splits, d.dw.size());
    }
  }

  InMemory<A, kBeside> forward;
  Gradients d;
  int splits = 1;
  Memory<float> dz, plain_weights, partials;
  TileChoice of_planes, of_weights;
};

// ---- The tables ---------------------------------------------------------------------------------

bool is_whole(const Layer& layer) { return layer.features % 4 == 0; }

template <typename A>
void add_forward(const Tensors& of, const std::shared_ptr<Cublas>& blas) {
  Problem& problem = of.problem;
  const UnfusedConnected<A> unfused(of, blas);
  problem.kernel("unfused", Role::library, [=] { unfused.forward(); })
      .occupies(of.bytes() + unfused.bytes())
      .needs(80);
  if (!is_whole(of.layer)) return;
  const Tiled<A> tiled(of);
  problem.kernel("planes in tiles", Role::ours, [=] { tiled.forward(); })
      .needs_shared(kForwardTileBytes<A>)
      .occupies(of.bytes() + tiled.bytes())
      .needs(80);
  const auto add = [&](const char* name, const auto& in_memory) {
    problem.kernel(name, Role::ours, [=] { in_memory.forward(nullptr); })
        .occupies(of.bytes() + in_memory.bytes())
        .hopper_only();
  };
  add("planes first", InMemory<A, false>(of, tiled.inverses));
  add("planes beside", InMemory<A, true>(of, tiled.inverses));
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
  if (!is_whole(of.layer)) return;
  const TiledBackward<A> tiled(Tiled<A>(of), d, device);
  const auto both_tiled = [=] {
    tiled.forward.forward();
    tiled.backward();
  };
  problem.kernel("planes in tiles", Role::ours, both_tiled)
      .needs_shared(kGradientTileBytes)
      .occupies(ends + tiled.bytes())
      .needs(80);
  const auto add = [&](const char* name, const auto& in_memory) {
    problem.kernel(name, Role::ours, [=] { in_memory.forward_and_backward(); })
        .occupies(ends + in_memory.bytes())
        .hopper_only();
  };
  const Memory<float>& kept = tiled.forward.inverses;
  add("planes first", InMemoryBackward<A, false>(InMemory<A, false>(of, kept), d));
  add("planes beside", InMemoryBackward<A, true>(InMemory<A, true>(of, kept), d));
}

template <int n>
int run_lesson(Lesson& lesson) {
  using A = Euclidean<n>;
  CliffordTables tables(lesson, n, 0, 0, A::kTriples, true);
  const auto blas = std::make_shared<Cublas>();
  bool all_whole = true;
  for (const CliffordReference& size : tables.sizes()) {
    const double flops = 2.0 * kOrder<A>.planes() * size.shape().features;
    const Tensors forward = tables.forward(size, flops);
    add_forward<A>(forward, blas);
    forward.problem.compare("planes beside", "unfused", "Forward on Hopper: % times as fast.");
    all_whole &= is_whole(forward.layer);
    if (lesson.flag("--turned")) continue;
    const auto [of, d] = tables.backward(size, 3 * flops);
    add_backward<A>(of, d, blas, lesson.device());
  }
  if (!all_whole) {
    lesson.note(
        "Only \"unfused\" takes features that are no multiple of 4: the other kernels move rows in "
        "whole vectors.");
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
  if (lesson.choice("--algebra") == "3,0,0") return run_lesson<3>(lesson);
#endif
  return run_lesson<2>(lesson);
}
