// 10. Clifford algebra: the compiler writes the kernel
//
//     x' = x gate(x_1), y' = y gate(y_1)                gate(s) = (1 + erf(s / sqrt 2)) / 2
//     z  = sum over grades a, c, b of  w[a,c,b] <<x'>_a <y'>_b>_c    <v>_a: v's part of grade a
//     out = per grade c: z_c / sqrt(mean over features of |z_c|^2 + 1e-6)
//
//     (Read on, and come back to this: what a grade is, and one element of z, come below.)
//
//     x, y, out (2^n blades, batch, features) and w (features, triples): fp32, row-major
//
// The layer of a Clifford neural network. A number is a multivector: in three dimensions a scalar,
// a vector (e1, e2, e3), a bivector (e12, e13, e23) and a trivector (e123). These are 8
// coefficients, each of a blade: 1, e1, e2 and so on to e123. A blade's grade is how many basis
// vectors it is made of: e12 = e1 e2 has grade 2, and 1 has grade 0. x_1 is the coefficient of 1 in
// x, its scalar. (Below, and in the code, a blade of x also means its coefficient in x.)
// Multivectors multiply like polynomials in the n basis vectors, which anticommute, e2 e1 = -e1 e2.
// Each of these squares to +1, -1 or 0, and the algebra's signature says how many square to which.
// Grade a of x times grade b of y can have parts of several grades c, which are added to z. Each
// triple a, c, b that occurs has a weight for each feature, shared by the batch. In 2-D 10 occur,
// in 3-D 20. |z_c|^2 is the plain sum of squares. Backward computes dx, dy and dw from d_out.
//
// If n is 2 and both vectors square to +1, there are four blades, and two of them multiplied are
// one of them again, with a sign:
//
//     x \ y |   1     e1    e2    e12
//     ------+------------------------
//       1   |   1     e1    e2    e12         e2 e1  = -e1 e2           = -e12
//       e1  |   e1    1     e12   e2          e1 e12 = (e1 e1) e2       =  e2
//       e2  |   e2   -e12   1    -e1          e2 e12 = -e1 (e2 e2)      = -e1
//       e12 |   e12  -e2    e1   -1           e12 e12 = -(e1 e1) (e2 e2) = -1
//
// A coefficient of z is the sum over the places where its blade stands in the table. For e1 these
// are four of the 16. (Here x and y stand for x' and y'.)
//
//     z_e1 = w[0,1,1] x_1 y_e1 + w[1,1,0] x_e1 y_1 + w[2,1,1] x_e12 y_e2 - w[1,1,2] x_e2 y_e12
//
// A weight belongs to three grades: that of the factor from x, that of the result, and that of the
// factor from y. In three dimensions the table has 64 places.
//
// What moves: each blade is a plane of batch x features. x and y are read and out is written. In
// 3-D these are 3 x 8 numbers, 96 bytes, for each pair of multivectors. What is computed: 92
// multiplications and multiply-adds, and two gates. The machine could do several times that while
// the bytes arrive: memory is the limit, if every byte moves once. If each operator is a kernel of
// its own, bytes move many times: that is the first row of the table.
//
//     unfused          a kernel for each operator, as a framework runs it: 26 of them in 3-D
//     product by hand  gates and product in one kernel, written out for n = 2; the norm in
//                      another. Only in the tables of --algebra 2,0,0
//     fused product    the same for any algebra: the compiler writes the product
//     one launch       a block reads row after row (all features of a batch element), each twice
//     row on chip      persistent blocks: a row stays in registers while its squares are added up,
//                      the weights stay in shared memory, and the next row is prefetched
//     rows streamed    a pipeline of several stages that the copy engine fills; the weights are in
//                      registers, and a row's sums come together while the next row is multiplied
//
// Forward stands first, then backward, where the last three are "one launch each", "both on chip"
// and "both streamed". Each table ends with its fastest row. For the last two kernels the number of
// features is a multiple of 4, so that a row is whole vectors of 16 bytes, and a row has to fit in
// a block. When streamed, that is a row of up to 1024 features with 4 or 8 blades, 512 with 16, and
// 256 with 32. The streamed kernels need compute capability 9.0.
//
// What makes a kernel of 92 such instructions fast is that nobody looks anything up: the blades,
// signs and weights of all terms are known when the program is compiled. Others write these lines
// by hand, or with a symbolic package. Here the compiler writes them, and all that it is given is
// Cl<3, 0, 0>, or Cl<1, 3, 0> for spacetime, or Cl<3, 0, 1> for projective geometry, and so on.

#include <algorithm>
#include <bit>
#include <optional>
#include <type_traits>
#include <utility>

#include "primitives/async_copy.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/hopper/barrier.cuh"
#include "primitives/hopper/copies.cuh"
#include "primitives/launch.h"
#include "problems/clifford/clifford.h"

using namespace problems;
using namespace primitives;

// ---- Product by hand ----------------------------------------------------------------------------

__device__ float gate(float s) { return 0.5f + 0.5f * erff(s * 0.70710678f); }

// Here n is 2. A thread has one multivector of x and one of y, and makes that of z. A plane has
// batch * features elements. Blade k of feature f in row r is element k * plane + r * features + f
// of a tensor, so neighbouring threads read and write neighbours. Both gates are factors of the
// whole product, z = gate(x_1) gate(y_1) (x y), so x' and y' need not be made.
//
// A feature has 10 weights. They stand in the order of their triples (a, c, b):
//
//     w      0      1      2      3      4      5      6      7      8      9
//     a,c,b  0,0,0  0,1,1  0,2,2  1,0,1  1,1,0  1,1,2  1,2,1  2,0,2  2,1,1  2,2,0
__global__ void product_by_hand(const float* x, const float* y, const float* w, float* z,
                                Layer layer) {
  const size_t plane = layer.plane(),
               at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= plane) return;
  w += at % layer.features * 10;
  const float x_1 = x[at], x_e1 = x[plane + at], x_e2 = x[2 * plane + at],
              x_e12 = x[3 * plane + at];
  const float y_1 = y[at], y_e1 = y[plane + at], y_e2 = y[2 * plane + at],
              y_e12 = y[3 * plane + at];
  const float gates = gate(x_1) * gate(y_1);
  z[at] = gates * (w[0] * x_1 * y_1 + w[3] * (x_e1 * y_e1 + x_e2 * y_e2) - w[7] * x_e12 * y_e12);
  z[plane + at] = gates * (w[1] * x_1 * y_e1 + w[4] * x_e1 * y_1 +  //
                           w[8] * x_e12 * y_e2 - w[5] * x_e2 * y_e12);
  z[2 * plane + at] = gates * (w[1] * x_1 * y_e2 + w[4] * x_e2 * y_1 -  //
                               w[8] * x_e12 * y_e1 + w[5] * x_e1 * y_e12);
  z[3 * plane + at] =
      gates * (w[2] * x_1 * y_e12 + w[9] * x_e12 * y_1 + w[6] * (x_e1 * y_e2 - x_e2 * y_e1));
}

// ---- The algebra --------------------------------------------------------------------------------

// In three dimensions the sums of product_by_hand would have 64 terms, and a wrong sign would be
// hard to find. From here to the end of the next section the compiler learns to write them. First
// it makes the table above, for any signature: the functions are constexpr, so they run when the
// program is compiled.
//
// Basis vectors e1 .. ep square to +1, the next q to -1, the last r to 0. A blade is the set of its
// basis vectors, bit v - 1 for ev: e13 is 0b101. Blades are numbered by grade, within a grade by
// their bits: 1; e1, e2, e3; e12, e13, e23; e123.
template <int p, int q, int r>
struct Cl {
  static constexpr int kVectors = p + q + r, kBlades = 1 << kVectors, kGrades = kVectors + 1;

  // The product of two blades has the vectors that are in one of them and not in both: a ^ b. Its
  // sign: each vector of b moves left to its place, and each swap with a later vector of a changes
  // the sign. Then a vector that is in both stands beside itself, and its square is a factor. For
  // example, e13 e12 is e1 e3 e1 e2. There e1 and e2 of e12 each move past e3: two swaps. The
  // result is (e1 e1) e2 e3, which is +e23 if e1 squares to +1.
  static constexpr int sign_of_product(unsigned a, unsigned b) {
    int swaps = 0;
    for (unsigned later = a >> 1; later != 0; later >>= 1) swaps += std::popcount(later & b);
    int sign = swaps % 2 == 0 ? 1 : -1;
    for (int v = 0; v < kVectors; ++v) {
      if (a & b & 1u << v) sign *= v < p ? 1 : v < p + q ? -1 : 0;
    }
    return sign;
  }

  // The grades of x, of the result and of y; how many terms the triple has; and which blades of
  // each grade have terms, bit i for blade i. (With vectors that square to 0 some have none.)
  struct Triple {
    int x, result, y, terms;
    unsigned with_x, with_result, with_y;
  };
  struct Tables {
    int grade[kBlades] = {};
    int first[kGrades + 1] = {};                      // the first blade of a grade
    int product[kBlades][kBlades] = {};               // which blade two blades make
    int sign[kBlades][kBlades] = {};                  // with which sign
    Triple triple[kGrades * kGrades * kGrades] = {};  // by x, then result, then y
    int triples = 0;
  };
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
    for (int a = 0; a < kGrades; ++a) {
      for (int c = 0; c < kGrades; ++c) {
        for (int b = 0; b < kGrades; ++b) {
          Triple found = {a, c, b, 0, 0, 0, 0};
          for (int i = t.first[a]; i < t.first[a + 1]; ++i) {
            for (int j = t.first[b]; j < t.first[b + 1]; ++j) {
              const int k = t.product[i][j];
              if (t.grade[k] != c || t.sign[i][j] == 0) continue;
              ++found.terms;
              found.with_x |= 1u << i;
              found.with_result |= 1u << k;
              found.with_y |= 1u << j;
            }
          }
          if (found.terms > 0) t.triple[t.triples++] = found;
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
  __host__ __device__ static constexpr bool has_one_blade(int grade) {
    return first(grade + 1) - first(grade) == 1;
  }
  // The blade that i and j make: e_i e_j = +-e_k. Any two of the three make the third: so this is
  // also how j is found from i and k, and i from j and k.
  __host__ __device__ static constexpr int product(int i, int j) { return kTables.product[i][j]; }
  __host__ __device__ static constexpr bool has_terms_in_x(int t, int i) {
    return (triple(t).with_x >> i & 1) != 0;
  }
  __host__ __device__ static constexpr bool has_terms_in_z(int t, int k) {
    return (triple(t).with_result >> k & 1) != 0;
  }
  __host__ __device__ static constexpr bool has_terms_in_y(int t, int j) {
    return (triple(t).with_y >> j & 1) != 0;
  }
  // The sign of e_i e_j; 0 unless x_i y_j is a term of triple t.
  __host__ __device__ static constexpr int sign(int t, int i, int j) {
    const Triple of = triple(t);
    const bool is_term = grade(i) == of.x && grade(j) == of.y && grade(product(i, j)) == of.result;
    return is_term ? kTables.sign[i][j] : 0;
  }
};

// What everybody knows.
static_assert(Cl<3, 0, 0>::sign_of_product(0b001, 0b010) == 1);     // e1 e2 = e12
static_assert(Cl<3, 0, 0>::sign_of_product(0b010, 0b001) == -1);    // e2 e1 = -e12
static_assert(Cl<2, 0, 0>::sign_of_product(0b11, 0b11) == -1);      // e12 e12 = -1
static_assert(Cl<3, 0, 0>::sign_of_product(0b111, 0b111) == -1);    // e123 e123 = -1
static_assert(Cl<3, 0, 1>::sign_of_product(0b1000, 0b1000) == 0);   // the projective direction
static_assert(Cl<1, 3, 0>::sign_of_product(0b0001, 0b0001) == 1);   // time
static_assert(Cl<1, 3, 0>::sign_of_product(0b0010, 0b0010) == -1);  // space
static_assert(Cl<1, 3, 0>::sign_of_product(0b0011, 0b0011) == 1);   // a boost: time and space
static_assert(Cl<2, 0, 0>::kTriples == 10 && Cl<3, 0, 0>::kTriples == 20);

// ---- The product, for any algebra ---------------------------------------------------------------

// Words of this section:
//
//     Pack<W>             the same blade of W neighbouring features. A thread moves it by one
//                         access of up to 16 bytes
//     Multivectors<A, W>  W multivectors of algebra A, a Pack for each blade
//     unroll<0, n>(body)  calls body(0), body(1), ..., body(n - 1): a loop that is written out
//                         when the program is compiled
//     Constant<n>         what unroll() hands to its body: the number n as a type. So the body may
//                         use it where C++ wants a constant: in `if constexpr`, as a template's
//                         argument, and as an index into registers, which have no addresses
//     over_grade<A, a>    unroll() over the blades of grade a
//     add_product<sign>   a multiply-add with a sign. With sign 0 it is nothing at all
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
template <typename A, int grade, typename Body>
__device__ __forceinline__ void over_grade(Body body) {
  unroll<A::first(grade), A::first(grade + 1)>(body);
}

template <int W>
__device__ __forceinline__ Pack<W> operator*(const Pack<W>& a, const Pack<W>& b) {
  Pack<W> result;
#pragma unroll
  for (int e = 0; e < W; ++e) result.v[e] = a.v[e] * b.v[e];
  return result;
}
template <int sign = 1, int W>
__device__ __forceinline__ void add_product(Pack<W>& sum, const Pack<W>& a, const Pack<W>& b) {
#pragma unroll
  for (int e = 0; e < W; ++e) {
    if constexpr (sign > 0) sum.v[e] += a.v[e] * b.v[e];
    if constexpr (sign < 0) sum.v[e] -= a.v[e] * b.v[e];
  }
}

// The terms of triple t in blade k of z, without the weight. Each x_i of the triple's grade has one
// term at most, with the y_j for which e_i e_j is +e_k or -e_k.
template <typename A, int t, int k, int W>
__device__ __forceinline__ Pack<W> terms_of_z(const Multivectors<A, W>& x,
                                              const Multivectors<A, W>& y) {
  Pack<W> sum = {};
  over_grade<A, A::triple(t).x>([&](auto i) {
    constexpr int j = A::product(i, k);
    add_product<A::sign(t, i, j)>(sum, x.blade[i], y.blade[j]);
  });
  return sum;
}

// The product of x and y; weight(t) is the Pack of triple t's weights. When all of this is written
// out, multiplications and multiply-adds are left, as in product_by_hand. Where does the weight go?
// If x or y has only one blade of the triple's grade, as it has one scalar, then all terms share
// this blade, and the weight multiplies it once. Otherwise it multiplies the sum of the terms, once
// for each blade of z. In 3-D 16 weights take one multiplication each, and four, such as w[1,2,1],
// take three each, for three blades: 28, beside one for each of the 64 terms.
template <typename A, int W, typename Weight>
__device__ __forceinline__ Multivectors<A, W> weighted_product(const Multivectors<A, W>& x,
                                                               const Multivectors<A, W>& y,
                                                               const Weight& weight) {
  Multivectors<A, W> z = {};
  unroll<0, A::kTriples>([&](auto t) {
    constexpr auto of = A::triple(t);
    if constexpr (A::has_one_blade(of.x)) {
      constexpr int i = A::first(of.x);
      const Pack<W> weighted = weight(t) * x.blade[i];
      over_grade<A, of.y>([&](auto j) {
        constexpr int k = A::product(i, j);
        add_product<A::sign(t, i, j)>(z.blade[k], weighted, y.blade[j]);
      });
    } else if constexpr (A::has_one_blade(of.y)) {
      constexpr int j = A::first(of.y);
      const Pack<W> weighted = weight(t) * y.blade[j];
      over_grade<A, of.x>([&](auto i) {
        constexpr int k = A::product(i, j);
        add_product<A::sign(t, i, j)>(z.blade[k], weighted, x.blade[i]);
      });
    } else {
      over_grade<A, of.result>([&](auto k) {
        if constexpr (A::has_terms_in_z(t, k)) {
          add_product(z.blade[k], weight(t), terms_of_z<A, t, k>(x, y));
        }
      });
    }
  });
  return z;
}

// ---- Unfused ------------------------------------------------------------------------------------

// The baseline: the layer as a framework runs it. An operator reads its inputs from memory and
// writes its result there. Here a whole grade triple is one kernel. PyTorch in eager mode, which
// runs operators one by one, would take several. In the first two kernels a thread has a
// multivector, and in the third a block has a row of one grade.

constexpr int kMaxWarps = 16;  // of a block

template <typename A>
__device__ __forceinline__ Multivectors<A, 1> load(const float* from, size_t plane) {
  Multivectors<A, 1> result;
  unroll<0, A::kBlades>([&](auto k) { result.blade[k].v[0] = from[k * plane]; });
  return result;
}
template <int grade, typename A>
__device__ __forceinline__ void load_grade(Multivectors<A, 1>& to, const float* from,
                                           size_t plane) {
  over_grade<A, grade>([&](auto k) { to.blade[k].v[0] = from[k * plane]; });
}

// gated = in gate(in_1)
template <typename A>
__global__ void apply_gate(const float* in, float* gated, Layer layer) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= layer.plane()) return;
  const Multivectors<A, 1> value = load<A>(in + at, layer.plane());
  const float factor = gate(value.blade[0].v[0]);
  unroll<0, A::kBlades>(
      [&](auto k) { gated[k * layer.plane() + at] = factor * value.blade[k].v[0]; });
}

// Multiplies the grades of triple t = (a, c, b). Here x and y are x' and y'. The first triple whose
// result has grade c writes w <<x>_a <y>_b>_c to z_c, and the others add theirs to it.
template <typename A, int t>
__global__ void multiply_grades(const float* x, const float* y, const float* w, float* z,
                                Layer layer) {
  constexpr auto of = A::triple(t);
  constexpr bool is_first = [] {
    for (int earlier = 0; earlier < t; ++earlier) {
      if (A::triple(earlier).result == A::triple(t).result) return false;
    }
    return true;
  }();
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t plane = layer.plane();
  if (at >= plane) return;
  const float weight = w[at % layer.features * A::kTriples + t];
  Multivectors<A, 1> left, right;  // only one grade of each
  load_grade<of.x>(left, x + at, plane);
  load_grade<of.y>(right, y + at, plane);
  over_grade<A, of.result>([&](auto k) {
    const float sum = weight * terms_of_z<A, t, k>(left, right).v[0];
    z[k * plane + at] = is_first ? sum : z[k * plane + at] + sum;
  });
}

// Adds up kCount numbers over a block's row. Each thread brings its own `sums`. A warp adds them up
// by shuffles: lanes that are 16 apart exchange what they have, then lanes that are 8 apart, and so
// on, until all 32 lanes have the sum (a butterfly). Then each thread adds up the sums of all
// warps, from shared memory. A kernel that calls this more than once has two arrays of partial
// sums, and its calls take turns with them. So one barrier in a call is enough: a thread that
// writes the first array again has passed the barrier of the call with the second one, where all
// arrived after they had read the first. (Sums is filled up to whole vectors of 16 bytes.)
template <int kCount>
struct alignas(16) Sums {
  float value[(kCount + 3) / 4 * 4];
};
template <int kCount>
__device__ __forceinline__ void add_up_block(Sums<kCount>& sums, Sums<kCount>* partials) {
  for (int other = 16; other > 0; other /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sums.value[i] += __shfl_xor_sync(0xffffffffu, sums.value[i], other);
    }
  }
  if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = sums;
  __syncthreads();
  const int warps = blockDim.x / 32;
  sums = partials[0];
  for (int warp = 1; warp < warps; ++warp) {
    for (int i = 0; i < kCount; ++i) sums.value[i] += partials[warp].value[i];
  }
}

// 1 / rms. The rms is the root of the mean square, to which kEpsilon is added. rsqrtf is within two
// units in the last place (CUDA Programming Guide, "Standard Functions").
__device__ float inverse_rms(float squares, const Layer& layer) {
  constexpr float kEpsilon = 1e-6f;
  return rsqrtf(squares * layer.inverse_features + kEpsilon);
}

// out = z / rms(z) for the `blades` planes of one grade. Keeps the 1 / rms for backward.
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

// ---- Fused product ------------------------------------------------------------------------------

// Gates and product in one kernel, as in product_by_hand, but written by the compiler. What the 20
// kernels of a product in 3-D add up in memory stays in registers here. A thread owns a feature and
// a strip of rows, so that it reads its weights once.
//
//     StripThread  says which feature a thread has, and which rows
//     Weights<A>   the weights of a feature, in registers. They are consecutive in memory, and come
//                  up to 16 bytes at a time
constexpr int kStrip = 32, kStripFeatures = 128;

int strips(const Layer& layer) { return ceil_div(layer.batch, kStrip); }
int strip_blocks(const Layer& layer) {
  return strips(layer) * ceil_div(layer.features, kStripFeatures);
}

// Thread i of block b: feature i of chunk b % chunks, rows of strip b / chunks. A thread beyond the
// last feature has no rows.
struct StripThread {
  int feature, row, end, strip;
  __device__ explicit StripThread(const Layer& layer) {
    const int chunks = ceil_div(layer.features, kStripFeatures);
    strip = blockIdx.x / chunks;
    feature = blockIdx.x % chunks * kStripFeatures + threadIdx.x;
    row = strip * kStrip;
    end = feature < layer.features ? min(layer.batch, row + kStrip) : row;
  }
};

template <typename A>
struct Weights {
  static constexpr int kWidth = A::kTriples % 4 == 0 ? 4 : A::kTriples % 2 == 0 ? 2 : 1;
  Pack<kWidth> packs[A::kTriples / kWidth];

  __device__ __forceinline__ explicit Weights(const float* from) {
#pragma unroll
    for (int i = 0; i < A::kTriples / kWidth; ++i) {
      packs[i] = reinterpret_cast<const Pack<kWidth>*>(from)[i];
    }
  }
  template <typename Index>
  __device__ __forceinline__ Pack<1> operator()(Index) const {
    return {{packs[Index::value / kWidth].v[Index::value % kWidth]}};
  }
};

template <int W>
__device__ __forceinline__ Pack<W> gates_of(const Pack<W>& scalars) {
  Pack<W> result;
#pragma unroll
  for (int e = 0; e < W; ++e) result.v[e] = gate(scalars.v[e]);
  return result;
}

// z before the norm.
template <typename A, int W, typename Weight>
__device__ __forceinline__ Multivectors<A, W> gated_product(const Multivectors<A, W>& x,
                                                            const Multivectors<A, W>& y,
                                                            const Weight& weight) {
  Multivectors<A, W> z = weighted_product(x, y, weight);
  const Pack<W> gates = gates_of(x.blade[0]) * gates_of(y.blade[0]);
  unroll<0, A::kBlades>([&](auto k) { z.blade[k] = z.blade[k] * gates; });
  return z;
}

template <typename A>
__global__ void __launch_bounds__(kStripFeatures)
    fused_product(const float* x, const float* y, const float* w, float* z, Layer layer) {
  const StripThread thread(layer);
  const size_t plane = layer.plane();
  if (thread.row >= thread.end) return;
  const Weights<A> weights(w + static_cast<size_t>(thread.feature) * A::kTriples);
  for (int row = thread.row; row < thread.end; ++row) {
    const size_t at = static_cast<size_t>(row) * layer.features + thread.feature;
    const Multivectors<A, 1> product =
        gated_product(load<A>(x + at, plane), load<A>(y + at, plane), weights);
    unroll<0, A::kBlades>([&](auto k) { z[k * plane + at] = product.blade[k].v[0]; });
  }
}

// sums[c] += the squares of z of grade c.
template <typename A, int W>
__device__ __forceinline__ void add_squares(const Multivectors<A, W>& z, Sums<A::kGrades>& sums) {
  unroll<0, A::kBlades>([&](auto k) {
#pragma unroll
    for (int e = 0; e < W; ++e) sums.value[A::grade(k)] += z.blade[k].v[e] * z.blade[k].v[e];
  });
}

// The norm of all grades. A block has a row, and reads it twice, the second time from a cache.
template <typename A>
__global__ void normalize(const float* z, float* out, Layer layer) {
  __shared__ Sums<A::kGrades> partials[kMaxWarps];
  const size_t row = static_cast<size_t>(blockIdx.x) * layer.features, plane = layer.plane();
  Sums<A::kGrades> squares = {};
  for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
    add_squares(load<A>(z + row + f, plane), squares);
  }
  add_up_block(squares, partials);
  for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
    unroll<0, A::kBlades>([&](auto k) {
      const size_t i = k * plane + row + f;
      out[i] = z[i] * inverse_rms(squares.value[A::grade(k)], layer);
    });
  }
}

// ---- One launch ---------------------------------------------------------------------------------

constexpr int kRowThreads = 256;

// z need not be written to be normalized: it can be computed again. A block takes one row after the
// other. It walks over the row's features once for the sums and once for the result; the second
// time x and y come from the L2 cache, as far as it still has them. The kernel can do this for rows
// of any length. But with a norm each product of multivectors is computed twice. And the weights
// are read again for every row, through the L1 cache.
template <typename A>
__global__ void __launch_bounds__(kRowThreads)
    forward_one_launch(const float* x, const float* y, const float* w, float* out, Layer layer) {
  __shared__ Sums<A::kGrades> partials[2][kMaxWarps];
  const size_t plane = layer.plane();
  int turn = 0;
  for (int n = blockIdx.x; n < layer.batch; n += gridDim.x, turn ^= 1) {
    const size_t row = static_cast<size_t>(n) * layer.features;
    Sums<A::kGrades> sums = {};
    for (int walk = layer.normed ? 1 : 2; walk <= 2; ++walk) {
      for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
        const Multivectors<A, 1> z =
            gated_product(load<A>(x + row + f, plane), load<A>(y + row + f, plane),
                          Weights<A>(w + static_cast<size_t>(f) * A::kTriples));
        if (walk == 1) {
          add_squares(z, sums);
          continue;
        }
        unroll<0, A::kBlades>([&](auto k) {
          const float r = layer.normed ? inverse_rms(sums.value[A::grade(k)], layer) : 1;
          out[k * plane + row + f] = z.blade[k].v[0] * r;
        });
      }
      if (walk == 1) add_up_block(sums, partials[turn]);
    }
  }
}

// ---- Row on chip --------------------------------------------------------------------------------

// Three things are better than above:
//
//   - z stays in registers while its row's squares are added up. So nothing is read or computed
//     twice.
//   - Blocks stay, as above, and take one group of rows after the other. But here the weights are
//     transposed into shared memory once, and serve all rows that the block ever has.
//   - The next row is fetched early, by cp.async (primitives/async_copy.cuh). As soon as a thread
//     has taken its part of x and y into registers it starts the copies of the next row's into the
//     same place. So memory works while the block multiplies, adds up and waits at the barrier.
//
// The words:
//
//     RowsOnChip     how many threads a block has, and how many of them a row has: whole warps
//     Place          which row of its block a thread has, and which W features: neighbours, moved
//                    as one vector
//     SharedWeights  the weights of a row's features. Those of one thread stand side by side
//     RowReduction   adds up numbers over a row, for each of the rows that a block has
//
// For example, 100 features with W = 4 take 25 threads, so a row has one warp. A block of 512
// threads has 16 rows.

// Threads of a block. Each can have 128 registers if there are 512, and 255 if there are 256.
template <typename A>
constexpr int kThreads = A::kBlades <= 16 ? 512 : 256;
// W: a thread has as many features of a row as its registers hold. It needs x, y and z of these
// features at the same time, which are 3 W multivectors: with 8 blades 96 numbers.
template <typename A>
constexpr int kForwardWidth = A::kBlades <= 8 ? 4 : 1;
constexpr int kVector = 4;  // rows are whole vectors of so many floats, 16 bytes

struct RowsOnChip {
  int threads, per_row;
  __host__ __device__ int rows() const { return threads / per_row; }
  __host__ __device__ int groups(const Layer& layer) const { return ceil_div(layer.batch, rows()); }
};

template <int W>
struct Place {
  int row, first;     // the thread's row in its block; its first feature
  bool has_features;  // the last warp of a row may have threads without any
  __device__ Place(const RowsOnChip& shape, const Layer& layer)
      : row(threadIdx.x / shape.per_row),
        first(threadIdx.x % shape.per_row * W),
        has_features(first < layer.features) {}
};

// The weights of a row in shared memory, in another order than in memory. With 3 triples and W = 2
// features for each thread, where w3.1 is the weight of feature 3 for triple 1:
//
//     memory                 w0.0 w0.1 w0.2    w1.0 w1.1 w1.2    w2.0 w2.1 w2.2    and so on
//     for thread 0           w0.0 w1.0    w0.1 w1.1    w0.2 w1.2
//     for thread 1           w2.0 w3.0    w2.1 w3.1    w2.2 w3.2
//
// So a thread reads a Pack for each triple, and all of them at constant offsets from one address.
// (Addresses that depend on a stride would each take a register.) The weights of two neighbouring
// threads are an odd number of packs apart, so that the threads read from different banks. For
// example, 21 packs of 16 bytes are 84 banks, which is 20 modulo 32. Eight threads, which are
// served together, begin on the banks 0, 20, 8, 28, 16, 4, 24 and 12, and read four each: all 32.
// With 20 packs they would begin on banks 0 and 16 only.
template <typename A, int W>
struct SharedWeights {
  static constexpr int kStride = W * (A::kTriples | 1);
  static constexpr size_t bytes(int per_row) { return sizeof(float) * per_row * kStride; }

  const float* own;  // of this thread

  // Starts the copies of all weights, a float at a time, since neighbours do not stay neighbours.
  // Beyond the row's end there are zeros, so threads without a feature multiply zeros.
  __device__ SharedWeights(float* shared, const float* w, const RowsOnChip& shape,
                           const Layer& layer)
      : own(shared + threadIdx.x % shape.per_row * kStride) {
    for (int i = threadIdx.x; i < shape.per_row * W * A::kTriples; i += shape.threads) {
      const int feature = i / A::kTriples, t = i % A::kTriples;
      copy_async<sizeof(float)>(shared + feature / W * kStride + t * W + feature % W, w + i,
                                feature < layer.features);
    }
  }
  template <typename Index>
  __device__ __forceinline__ Pack<W> operator()(Index t) const {
    return *reinterpret_cast<const Pack<W>*>(own + t * W);
  }
};

// The shared memory of a block, from the front: its warps' sums; the weights; and for each thread
// the inputs of its next row, which it fills, reads and refills alone. These are an odd number of
// packs, too. kCount: how many sums a row has.
template <typename A, int W, int kTensors, int kCount>
struct OnChip {
  static constexpr int kStride = W * (kTensors * A::kBlades | 1);
  using Partials = Sums<kCount>[2][kMaxWarps];
  static size_t bytes(const RowsOnChip& shape) {
    return sizeof(Partials) + SharedWeights<A, W>::bytes(shape.per_row) +
           sizeof(float) * shape.threads * kStride;
  }
  __device__ static Partials& partials(float* shared) {
    return *reinterpret_cast<Partials*>(shared);
  }
  __device__ static float* weights(float* shared) {
    return shared + sizeof(Partials) / sizeof(float);
  }

  float* inputs;  // of this thread
  __device__ OnChip(float* shared, const RowsOnChip& shape)
      : inputs(weights(shared) + shape.per_row * SharedWeights<A, W>::kStride +
               threadIdx.x * kStride) {}

  // Starts the copies of a thread's part of a tensor, which begins at `from` in the first plane.
  // Zeros come instead if it is not `inside`. What was in this place has been read: __syncwarp()
  // keeps the compiler from moving these reads behind the copies.
  __device__ __forceinline__ void fetch(int tensor, const float* from, size_t plane,
                                        bool inside) const {
    __syncwarp();
#pragma unroll
    for (int k = 0; k < A::kBlades; ++k, from += plane) {
      copy_async<sizeof(Pack<W>)>(inputs + (tensor * A::kBlades + k) * W, from, inside);
    }
  }
  // Waits for all copies of this thread. No read is moved before it, see above.
  __device__ __forceinline__ static void wait() {
    copy_async_wait<0>();
    __syncwarp();
  }
  __device__ __forceinline__ Multivectors<A, W> take(int tensor) const {
    Multivectors<A, W> result;
    unroll<0, A::kBlades>([&](auto k) {
      result.blade[k] = *reinterpret_cast<const Pack<W>*>(inputs + (tensor * A::kBlades + k) * W);
    });
    return result;
  }
};

// The norm needs kCount sums over a row: one for each grade, and backward twice as many. (At the
// first reading take leave() and collect() as what adds them up, and go on.) A butterfly takes 5
// shuffles for each sum, and every lane of it computes all sums. That is more than is needed: a sum
// is wanted once a warp, and then once a row.
//
// leave() adds up over a warp. In each step two lanes share the work: each gives the other one half
// of its sums, and goes on with the other half, to which it adds what it is given. (This is called
// a reduce-scatter: each lane ends with a part of the results.) Of four sums, s0 to s3, lanes hold
// these. Lanes 4 to 7 do the same as lanes 0 to 3, and so do the next four:
//
//     lane            0              1              2              3              added up over
//     before          s0 s1 s2 s3    s0 s1 s2 s3    s0 s1 s2 s3    s0 s1 s2 s3     1 lane
//     2 lanes away    s0 s1          s0 s1          s2 s3          s2 s3           2 lanes
//     1 lane away     s0             s1             s2             s3              4 lanes
//     over_places     s0             s1             s2             s3             32 lanes
//
// over_places adds up over the lanes that hold the same sum. Lanes 0 to 3 write the warp's sums to
// shared memory. After a barrier each warp of the row calls collect(). There lanes 0, 4, 8 and so
// on read s0, each of other warps of the row. Warps are counted from the row's first one, up to 16:
//
//     lane            0       1       2       3       4       5       ...    31
//     reads           s0      s1      s2      s3      s0      s1      ...    s3
//     of warps        0, 8    0, 8    0, 8    0, 8    1, 9    1, 9    ...    7, 15
//     over_places     s0      s1      s2      s3      s0      s1      ...    s3
//     __shfl_sync     every lane takes s0 from lane 0, s1 from lane 1, and so on, and has all four
//
// (The last step is an all-gather: all lanes get all results.) With 8 sums leave() takes 4 + 2 + 1
// shuffles and over_places() 2, so 9, and collect() takes 10, where the butterflies take 40.
template <int kCount>
struct RowReduction {
  static constexpr int kSteps = std::bit_width(kCount - 1u), kPlaces = 1 << kSteps;

  __device__ static float over_places(float sum) {
#pragma unroll
    for (int other = kPlaces; other < 32; other *= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, other);
    }
    return sum;
  }
  // Adds up over a warp, and writes the result to shared memory. The sums from kCount on are 0.
  __device__ __forceinline__ static void leave(const Sums<kCount>& sums, Sums<kCount>& to) {
    const int lane = threadIdx.x % 32;
    float held[kPlaces];
    unroll<0, kPlaces>([&](auto i) { held[i] = i < kCount ? sums.value[i] : 0; });
    unroll<0, kSteps>([&](auto step) {
      constexpr int half = kPlaces >> (step + 1);
      const bool upper = (lane & half) != 0;
      unroll<0, half>([&](auto i) {
        const float given = upper ? held[i] : held[i + half];
        held[i] = (upper ? held[i + half] : held[i]) + __shfl_xor_sync(0xffffffffu, given, half);
      });
    });
    const float of_warp = over_places(held[0]);
    if (lane < kCount) to.value[lane] = of_warp;
  }
  // The row's sums, from what its warps have left.
  __device__ __forceinline__ static Sums<kCount> collect(const Sums<kCount>* of, int warps) {
    const int place = threadIdx.x % kPlaces, first = threadIdx.x % 32 / kPlaces;
    float own = 0;
#pragma unroll
    for (int warp = 0; warp < kMaxWarps; warp += 32 / kPlaces) {
      if (first + warp < warps && place < kCount) own += of[first + warp].value[place];
    }
    own = over_places(own);
    Sums<kCount> sums = {};
    unroll<0, kCount>([&](auto i) { sums.value[i] = __shfl_sync(0xffffffffu, own, i); });
    return sums;
  }
};

// Adds up the sums of each row of a block. warp / warps * warps is the first warp of the thread's
// row. As in add_up_block, calls take turns with two arrays of partial sums.
template <int kCount>
__device__ __forceinline__ void add_up_row(Sums<kCount>& sums, Sums<kCount>* partials,
                                           const RowsOnChip& shape) {
  const int warp = threadIdx.x / 32, warps = shape.per_row / 32;
  RowReduction<kCount>::leave(sums, partials[warp]);
  __syncthreads();
  sums = RowReduction<kCount>::collect(partials + warp / warps * warps, warps);
}

// Writes a thread's z to memory, divided by its row's rms if the layer has a norm.
template <typename A, int W>
__device__ __forceinline__ void store_normed(const Multivectors<A, W>& z,
                                             const Sums<A::kGrades>& sums, const Layer& layer,
                                             float* to, bool inside) {
  unroll<0, A::kGrades>([&](auto c) {
    const float r = layer.normed ? inverse_rms(sums.value[c], layer) : 1;
    over_grade<A, c>([&](auto k) {
      Pack<W> normed;
#pragma unroll
      for (int e = 0; e < W; ++e) normed.v[e] = z.blade[k].v[e] * r;
      if (inside) *reinterpret_cast<Pack<W>*>(to) = normed;
      to += layer.plane();
    });
  });
}

// `first` is the first row of the block's group, and n the thread's own row. The first fetch() also
// commits the copies of the weights.
template <typename A, int W>
__global__ void __launch_bounds__(kThreads<A>, 1)
    forward_on_chip(const float* x, const float* y, const float* w, float* out, Layer layer,
                    RowsOnChip shape) {
  enum Tensor { kX, kY, kTensors };
  using Memory = OnChip<A, W, kTensors, A::kGrades>;
  extern __shared__ __align__(128) float shared[];
  const Memory memory(shared, shape);
  auto& partials = Memory::partials(shared);
  const Place<W> place(shape, layer);
  const size_t plane = layer.plane();
  const int step = gridDim.x * shape.rows();
  const auto at = [&](int n) { return static_cast<size_t>(n) * layer.features + place.first; };
  const auto inside = [&](int n) { return n < layer.batch && place.has_features; };
  const auto fetch = [&](int n) {
    memory.fetch(kX, x + at(n), plane, inside(n));
    memory.fetch(kY, y + at(n), plane, inside(n));
    copy_async_commit();
  };

  int first = blockIdx.x * shape.rows(), n = first + place.row;
  const SharedWeights<A, W> weights(Memory::weights(shared), w, shape, layer);
  fetch(n);
  memory.wait();
  __syncthreads();  // for the weights, which all threads have copied
  int turn = 0;
  for (; first < layer.batch; first += step, n += step, turn ^= 1) {
    memory.wait();
    const auto left = memory.take(kX), right = memory.take(kY);
    if (first + step < layer.batch) fetch(n + step);
    const Multivectors<A, W> z = gated_product(left, right, weights);
    Sums<A::kGrades> sums = {};
    if (layer.normed) {
      add_squares(z, sums);
      add_up_row(sums, partials[turn], shape);
    }
    store_normed(z, sums, layer, out + at(n), inside(n));
  }
}

// ---- Rows streamed ------------------------------------------------------------------------------

// The same idea once more, but no thread fetches its own x and y. One copy of the copy engine (TMA)
// brings a whole plane of a block's rows, up to 4 KB, and several stages are on their way instead
// of one. What the other kernel spent on that, registers and instructions, is free for the weights:
// a thread has the same features in all of its rows, and keeps their weights in registers.
//
// Nor do the warps of a row stop at __syncthreads() for its sums. Each warp posts its sums, and
// goes on with its part of the next row. It collects the row's sums when it needs them. This is
// called software pipelining: in a round a thread multiplies one row, and finishes the one before.
//
//     stage         a place in shared memory for the rows that a block works on at a time. A
//                   pipeline has several, which take turns
//     barrier       an mbarrier, in shared memory. It goes through one phase after the other, and a
//                   thread waits for the end of a phase by its parity: 0, 1, 0, 1 and so on
//     expect bytes  a phase may also wait for bytes that copies bring: barrier_arrive_expect()
//                   announces them, and bulk_load() starts such a copy (a bulk copy)
//     Ring          which stage comes next, and the parity of its phase
//     early launch  the next kernel's blocks start when all of these have called
//                   start_next_kernel(), and take their places one by one (programmatic dependent
//                   launch, primitives/early_launch.cuh)

// Bytes of shared memory: what a block of compute capability 9.0 can have at most, and what the
// stages of forward may take.
constexpr int kMostSharedBytes = 227 << 10, kForwardBytes = 208 << 10;

// W features per thread: as many as the registers hold.
template <typename A>
constexpr int kStreamedWidth = A::kBlades <= 8 ? 2 : 1;

// What one copy brings: one blade of all rows that a block works on at a time, row after row.
template <typename A, int W>
using Plane = float[kThreads<A> * W];

// The sums of a block's warps, which meet without a barrier of the block. Round r uses slot r % 2.
// Each warp collects a round before it posts the next one. So when a warp posts round r + 2, all
// warps have posted round r + 1, and have collected round r before. Nobody reads its slot any more.
template <int kCount, int kWarps>
struct PostedSums {
  Sums<kCount> of[2][kWarps];
  Barrier posted[2];

#if HOPPER_CODE
  // Lanes write the sums; __syncwarp() orders these writes before the arrival of lane 0.
  __device__ __forceinline__ void post(const Sums<kCount>& sums, int round) {
    RowReduction<kCount>::leave(sums, of[round % 2][threadIdx.x / 32]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&posted[round % 2]);
  }
  // Waits until all warps of the block have posted, and returns the sums of this thread's row. If,
  // for example, 16 warps have two rows of four sums (RowReduction has the lanes):
  //
  //     in the slot    warps 0 to 7: s0 s1 s2 s3 each      warps 8 to 15: s0 s1 s2 s3 each
  //     read by        warps 0 to 7, which have row 0      warps 8 to 15, which have row 1
  //     each thread    has s0 s1 s2 s3 of row 0            has s0 s1 s2 s3 of row 1
  __device__ __forceinline__ Sums<kCount> collect(const RowsOnChip& shape, int row, int round) {
    const int warps = shape.per_row / 32;
    barrier_wait(&posted[round % 2], round / 2 % 2);  // phase number round / 2
    return RowReduction<kCount>::collect(of[round % 2] + row * warps, warps);
  }
#endif
};

#if HOPPER_CODE
// Prepares the barriers of a block: a stage is full when one thread has announced its bytes and
// they have come; a slot is full when all warps have posted.
template <class Memory>
__device__ void prepare(Memory& memory) {
  if (threadIdx.x == 0) {
    for (Barrier& full : memory.full) barrier_init(&full, 1);
    for (Barrier& posted : memory.sums.posted) barrier_init(&posted, blockDim.x / 32);
    barrier_init_fence();
  }
  __syncthreads();
}

// Orders a group's rows, if they are there: all planes of all tensors. place_of(p) says where plane
// p lies in the stage. All warps order a few planes each: copies start one after the other, and a
// warp that ordered all would be late for its own work. Plane p is ordered by warp p % warps. One
// thread tells the barrier how many bytes come. Some may come earlier: the phase does not end
// before that thread has arrived.
template <typename A, int kTensors, class Stage, typename PlaceOf>
__device__ __forceinline__ void order_rows(Stage& stage, Barrier* full,
                                           const float* const (&tensors)[kTensors], int group,
                                           const RowsOnChip& shape, const Layer& layer,
                                           PlaceOf place_of) {
  constexpr int kPlanes = kTensors * A::kBlades;
  const int warps = blockDim.x / 32, n = group * shape.rows();
  if (n >= layer.batch) return;
  const int rows = min(shape.rows(), layer.batch - n);
  const int bytes = rows * layer.features * static_cast<int>(sizeof(float));
  if (threadIdx.x == 0) barrier_arrive_expect(full, kPlanes * bytes);
#pragma unroll 1
  for (int p = threadIdx.x / 32 + threadIdx.x % 32 * warps; p < kPlanes; p += blockDim.x) {
    const float* tensor = tensors[0];  // tensors[p / A::kBlades], by constant indices
#pragma unroll
    for (int i = 1; i < kTensors; ++i) tensor = p < i * A::kBlades ? tensor : tensors[i];
    const size_t plane = p % A::kBlades * layer.plane();
    bulk_load(stage[place_of(p)], tensor + plane + static_cast<size_t>(n) * layer.features, bytes,
              full);
  }
}

// A thread's multivectors of a tensor, whose planes begin at `planes`.
template <typename A, int W>
__device__ __forceinline__ Multivectors<A, W> take(const Plane<A, W>* planes, const Place<W>& place,
                                                   const Layer& layer) {
  Multivectors<A, W> result;
  const int at = place.row * layer.features + place.first;
  unroll<0, A::kBlades>(
      [&](auto k) { result.blade[k] = *reinterpret_cast<const Pack<W>*>(&planes[k][at]); });
  return result;
}
#endif

template <typename A, int W>
struct ForwardMemory {
  using Stage = Plane<A, W>[2 * A::kBlades];
  static constexpr int kStages = kForwardBytes / sizeof(Stage), kLast = kStages - 1;
  PostedSums<A::kGrades, kThreads<A> / 32> sums;
  Barrier full[kStages];
  alignas(128) Stage stages[kStages];

  // At first the weights lie in the last stage, and they may be longer than a stage.
  static size_t bytes(const RowsOnChip& shape) {
    const size_t weights = sizeof(float) * shape.per_row * W * A::kTriples;
    return sizeof(ForwardMemory) - sizeof(Stage) + std::max(sizeof(Stage), weights);
  }
};

#if HOPPER_CODE
// Weights of a thread's features, in registers. In memory the weights of the next feature are 80
// bytes away in 3-D: if threads loaded their own, a load of a warp would touch up to 32 lines. So
// the block copies all of its weights as they lie, in whole lines, to the last stage, and each
// thread takes its own from there. With 4 triples and W = 2, where w3.1 is feature 3's weight for
// triple 1, a copy brings four floats:
//
//     memory        w0.0 w0.1 w0.2 w0.3    w1.0 w1.1 w1.2 w1.3    w2.0 w2.1 w2.2 w2.3    and so on
//     copied by     thread 0               thread 1               thread 2
//     last stage    w0.0 w0.1 w0.2 w0.3    w1.0 w1.1 w1.2 w1.3    w2.0 w2.1 w2.2 w2.3    the same
//     taken by      thread 0               thread 0               thread 1
//
//     registers     packs[0]     packs[1]     packs[2]     packs[3]
//     thread 0      w0.0 w1.0    w0.1 w1.1    w0.2 w1.2    w0.3 w1.3
//     thread 1      w2.0 w3.0    w2.1 w3.1    w2.2 w3.2    w2.3 w3.3
//
// If a block has several rows, the threads at the same place of each row take the same weights. The
// last stage gets its rows when all threads have taken their weights.
template <typename A, int W>
struct RegisterWeights {
  Pack<W> packs[A::kTriples];

  // Orders the rows of all stages by order(stage). In a block with several rounds the first round's
  // rows are ordered before the weights, since they take longer. A block with one round orders its
  // weights first, and takes them while its rows come.
  template <typename Order>
  __device__ __forceinline__ RegisterWeights(const float* w, ForwardMemory<A, W>& memory,
                                             const RowsOnChip& shape, const Place<W>& place,
                                             const Layer& layer, bool several_rounds, Order order) {
    constexpr int kWidth = Weights<A>::kWidth, kLast = ForwardMemory<A, W>::kLast;
    const int before = several_rounds ? 1 : 0;  // stages
    for (int s = 0; s < before; ++s) order(s);
    float* const all = memory.stages[kLast][0];
    const int count = shape.per_row * W * A::kTriples;
#pragma unroll
    for (int copy = 0; copy < W * A::kTriples / kWidth; ++copy) {
      const int i = (copy * blockDim.x + threadIdx.x) * kWidth;
      if (i < count) {
        copy_async<kWidth * sizeof(float)>(all + i, w + i, i < layer.features * A::kTriples);
      }
    }
    copy_async_commit();
    for (int s = before; s < kLast; ++s) order(s);

    copy_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const Weights<A> weights(all + (place.first + e) * A::kTriples);
      unroll<0, A::kTriples>([&](auto t) { packs[t].v[e] = weights(t).v[0]; });
    }
    shared_fence();  // threads have written this stage, and next the copy engine will
    __syncthreads();
    order(kLast);
  }
  template <typename Index>
  __device__ __forceinline__ Pack<W> operator()(Index) const {
    return packs[Index::value];
  }
};
#endif

// A thread owns W features of one of the block's rows. In a round it waits for its stage and
// computes z of this row. Then it finishes the row before: it collects the sums, orders the next
// copies into that row's stage, and stores that row's out. So while the sums of one row come
// together, the thread multiplies the next row:
//
//     round 0     multiplies row 0                                   posts sums of row 0
//     round 1     multiplies row 1     collects and stores row 0     posts sums of row 1
//     round 2     multiplies row 2     collects and stores row 1     posts sums of row 2
//
// A block takes a whole multiprocessor, so that the next launch's blocks take the places of this
// one's, one for one.
template <typename A, int W>
__global__ void __launch_bounds__(kThreads<A>, 1)
    forward_streamed(const float* x, const float* y, const float* w, float* out, Layer layer,
                     RowsOnChip shape) {
#if HOPPER_CODE
  using Memory = ForwardMemory<A, W>;
  extern __shared__ __align__(128) float shared[];
  Memory& memory = *reinterpret_cast<Memory*>(shared);
  prepare(memory);
  const Place<W> place(shape, layer);
  const int groups = shape.groups(layer), step = gridDim.x;
  const auto inside = [&](int group) {
    return group * shape.rows() + place.row < layer.batch && place.has_features;
  };
  const auto order = [&](int group, int s) {
    order_rows<A>(memory.stages[s], &memory.full[s], {x, y}, group, shape, layer,
                  [](int p) { return p; });
  };

  start_next_kernel();
  wait_for_previous_kernel();
  int group = blockIdx.x;
  const RegisterWeights<A, W> weights(w, memory, shape, place, layer, groups > step,
                                      [&](int s) { order(group + s * step, s); });
  Ring ring{Memory::kStages}, last{Memory::kStages};  // of this round's rows; of those to finish
  int round = 0;
  // collect() waits until all warps of the block have posted. A warp posts after it has taken its
  // part of the stage. So by then the whole stage is free, for all of its rows.
  const auto finish = [&](const Multivectors<A, W>& z, int group, int round) {
    const Sums<A::kGrades> sums = memory.sums.collect(shape, place.row, round);
    order(group + Memory::kStages * step, last.stage);
    last.advance();
    const size_t row = static_cast<size_t>(group) * shape.rows() + place.row;
    store_normed(z, sums, layer, out + row * layer.features + place.first, inside(group));
  };
  Multivectors<A, W> last_z = {};
  for (; group < groups; group += step, ring.advance(), ++round) {
    Multivectors<A, W> z = {};
    Sums<A::kGrades> sums = {};
    barrier_wait(&memory.full[ring.stage], ring.parity);
    if (inside(group)) {
      const auto& stage = memory.stages[ring.stage];
      const auto left = take<A, W>(stage, place, layer);
      const auto right = take<A, W>(stage + A::kBlades, place, layer);
      z = gated_product(left, right, weights);
      add_squares(z, sums);
    }
    if (round > 0) finish(last_z, group - step, round - 1);
    memory.sums.post(sums, round);
    last_z = z;
  }
  if (round > 0) finish(last_z, group - step, round - 1);
#endif
}

// ---- Backward: the gradients of the product -----------------------------------------------------

// From here on d_out is given, the gradient of the loss with respect to out, and dx, dy and dw are
// wanted. First the product alone. A term w sign x_i y_j of z_k has three factors. So, from dz,
//
//     dx_i = sum of w sign y_j dz_k,  dy_j = sum of w sign x_i dz_k,  dw = sum of sign x_i y_j dz_k
//
// These are three more products of the same kind, with the same signs. Two things are to be
// decided for each triple of grades: what is multiplied by w, and which sum makes dw.
//
//   - w multiplies as few numbers as possible. Where all terms share a blade, w multiplies that
//     blade, once. Otherwise w multiplies each sum of terms.
//   - dw needs a sum that has not been multiplied by w. It takes one that is made anyway.
//
// There are four cases. The examples are of n = 2, the last one of n = 3; T stands for a sum of
// terms without w:
//
//     one blade in      example, forward                  in dx           in dy           dw
//     the grade of x    w[0,1,1]: x_1 y_e1, x_1 y_e2      w T             (w x_1) dz      x_1 T
//     the grade of y    w[1,1,0]: x_e1 y_1, x_e2 y_1      (w y_1) dz      w T             y_1 T
//     the result's      w[1,0,1]: x_e1 y_e1 + x_e2 y_e2   (w dz_1) y      (w dz_1) x      dz_1 T
//     none              w[1,2,1]: x_e1 y_e2 - x_e2 y_e1   w T, for each   w T, for each   x_i T_i
//                       in z_e12, and so on               blade of x      blade of y      added up
//
// In the first row T = y_e1 dz_e1 + y_e2 dz_e2 is a sum of dx_1, in the second one of dy_1, in the
// third one of z_1, made for dw alone, and in the last one T_i is a sum of dx_i.

// Whether w multiplies a blade that all terms of triple t in dx share, the only one of its grade in
// y or in dz: rows 2 and 3 of the table. The second function says the same of dy: rows 1 and 3.
// `several`: more than one blade of x, or of y, has terms. (Each of these blades is a bit of m, and
// m & (m - 1) is m without its lowest bit.) Where only one has, as in row 1, w multiplies the sum.
template <typename A>
__host__ __device__ constexpr bool weight_first_in_dx(int t) {
  const auto of = A::triple(t);
  const bool several = (of.with_x & (of.with_x - 1)) != 0;
  return several && (A::has_one_blade(of.y) || A::has_one_blade(of.result));
}
template <typename A>
__host__ __device__ constexpr bool weight_first_in_dy(int t) {
  const auto of = A::triple(t);
  const bool several = (of.with_y & (of.with_y - 1)) != 0;
  return several && (A::has_one_blade(of.x) || A::has_one_blade(of.result));
}

// The terms of triple t in dx_i and in dy_j, without the weight.
template <typename A, int t, int i, int W>
__device__ __forceinline__ Pack<W> terms_of_dx(const Multivectors<A, W>& y,
                                               const Multivectors<A, W>& dz) {
  Pack<W> sum = {};
  over_grade<A, A::triple(t).result>([&](auto k) {
    constexpr int j = A::product(i, k);
    add_product<A::sign(t, i, j)>(sum, y.blade[j], dz.blade[k]);
  });
  return sum;
}
template <typename A, int t, int j, int W>
__device__ __forceinline__ Pack<W> terms_of_dy(const Multivectors<A, W>& x,
                                               const Multivectors<A, W>& dz) {
  Pack<W> sum = {};
  over_grade<A, A::triple(t).result>([&](auto k) {
    constexpr int i = A::product(k, j);
    add_product<A::sign(t, i, j)>(sum, x.blade[i], dz.blade[k]);
  });
  return sum;
}

// One grade of dx, so that few results are in registers at a time. The function also adds to dw[t]
// where it has a sum for it: one of dx, or one of z if dy has none either.
template <typename A, int grade, int W>
struct OneGrade {
  Pack<W> blade[A::first(grade + 1) - A::first(grade)];
};
template <int grade, typename A, int W, typename Weight>
__device__ __forceinline__ OneGrade<A, grade, W> gradient_of_x(const Multivectors<A, W>& x,
                                                               const Multivectors<A, W>& y,
                                                               const Multivectors<A, W>& dz,
                                                               const Weight& weight, Pack<W>* dw) {
  constexpr int first = A::first(grade);
  OneGrade<A, grade, W> dx = {};
  unroll<0, A::kTriples>([&](auto t) {
    constexpr auto of = A::triple(t);
    if constexpr (of.x != grade) {
      return;
    } else if constexpr (!weight_first_in_dx<A>(t)) {
      over_grade<A, grade>([&](auto i) {
        if constexpr (A::has_terms_in_x(t, i)) {
          const Pack<W> terms = terms_of_dx<A, t, i>(y, dz);
          add_product(dx.blade[i - first], weight(t), terms);
          add_product(dw[t], x.blade[i], terms);
        }
      });
    } else if constexpr (A::has_one_blade(of.y)) {
      constexpr int j = A::first(of.y);
      const Pack<W> weighted = weight(t) * y.blade[j];
      over_grade<A, grade>([&](auto i) {
        constexpr int k = A::product(i, j);
        add_product<A::sign(t, i, j)>(dx.blade[i - first], weighted, dz.blade[k]);
      });
    } else {  // z has one blade of this grade: dy shares it, too
      constexpr int k = A::first(of.result);
      const Pack<W> weighted = weight(t) * dz.blade[k];
      over_grade<A, grade>([&](auto i) {
        constexpr int j = A::product(i, k);
        add_product<A::sign(t, i, j)>(dx.blade[i - first], weighted, y.blade[j]);
      });
      add_product(dw[t], dz.blade[k], terms_of_z<A, t, k>(x, y));
    }
  });
  return dx;
}

// The same for dy. It adds to dw[t] where dy has a sum for it, and dx has none.
template <int grade, typename A, int W, typename Weight>
__device__ __forceinline__ OneGrade<A, grade, W> gradient_of_y(const Multivectors<A, W>& x,
                                                               const Multivectors<A, W>& y,
                                                               const Multivectors<A, W>& dz,
                                                               const Weight& weight, Pack<W>* dw) {
  constexpr int first = A::first(grade);
  OneGrade<A, grade, W> dy = {};
  unroll<0, A::kTriples>([&](auto t) {
    constexpr auto of = A::triple(t);
    if constexpr (of.y != grade) {
      return;
    } else if constexpr (!weight_first_in_dy<A>(t)) {
      over_grade<A, grade>([&](auto j) {
        if constexpr (A::has_terms_in_y(t, j)) {
          const Pack<W> terms = terms_of_dy<A, t, j>(x, dz);
          add_product(dy.blade[j - first], weight(t), terms);
          if constexpr (weight_first_in_dx<A>(t)) add_product(dw[t], y.blade[j], terms);
        }
      });
    } else if constexpr (A::has_one_blade(of.x)) {
      constexpr int i = A::first(of.x);
      const Pack<W> weighted = weight(t) * x.blade[i];
      over_grade<A, grade>([&](auto j) {
        constexpr int k = A::product(i, j);
        add_product<A::sign(t, i, j)>(dy.blade[j - first], weighted, dz.blade[k]);
      });
    } else {
      constexpr int k = A::first(of.result);
      const Pack<W> weighted = weight(t) * dz.blade[k];
      over_grade<A, grade>([&](auto j) {
        constexpr int i = A::product(k, j);
        add_product<A::sign(t, i, j)>(dy.blade[j - first], weighted, x.blade[i]);
      });
    }
  });
  return dy;
}

// ---- Unfused, backward --------------------------------------------------------------------------

// The derivative of the gate. erf(u) has the derivative 2 / sqrt(pi) exp(-u^2), and u = s / sqrt 2,
// so gate'(s) = (1/2) (2 / sqrt(pi)) exp(-s^2 / 2) (1 / sqrt 2) = exp(-s^2 / 2) / sqrt(2 pi), which
// is the density of the normal distribution. 0.39894228 is 1 / sqrt(2 pi). The error of __expf(x)
// is at most 2 + 1.2 |x| units in the last place (CUDA Programming Guide, "Intrinsic Functions"),
// which is little where the derivative is not almost 0.
__device__ float gate_slope(float s) { return 0.39894228f * __expf(-0.5f * s * s); }

// dz of one grade. A block has a row. out = r z with r = 1 / rms(z), and dr/dz = -r^3 z / features
// for each z of the row. So dz = r d_out - r^3 z (sum over the row of d_out z) / features.
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

// Adds the terms of triple t = (a, c, b) to grade a of dx and to grade b of dy, and computes dw of
// the strip. The first triple of a grade of dx or dy writes there, and the others add.
template <typename A, int t>
__global__ void multiply_grades_gradient(const float* x, const float* y, const float* w,
                                         const float* dz, float* dx, float* dy, float* partials,
                                         Layer layer) {
  constexpr auto of = A::triple(t);
  constexpr bool is_first_of_x = t == 0 || A::triple(t == 0 ? 0 : t - 1).x != of.x;
  constexpr bool is_first_of_y = [] {
    for (int earlier = 0; earlier < t; ++earlier) {
      if (A::triple(earlier).y == A::triple(t).y) return false;
    }
    return true;
  }();
  const StripThread thread(layer);
  const size_t plane = layer.plane();
  if (thread.feature >= layer.features) return;
  const float weight = w[static_cast<size_t>(thread.feature) * A::kTriples + t];
  float dw = 0;
  for (int row = thread.row; row < thread.end; ++row) {
    const size_t at = static_cast<size_t>(row) * layer.features + thread.feature;
    Multivectors<A, 1> left, right, d;  // only one grade of each
    load_grade<of.x>(left, x + at, plane);
    load_grade<of.y>(right, y + at, plane);
    load_grade<of.result>(d, dz + at, plane);
    over_grade<A, of.x>([&](auto i) {
      const float sum = terms_of_dx<A, t, i>(right, d).v[0];
      dw += left.blade[i].v[0] * sum;
      dx[i * plane + at] = (is_first_of_x ? 0 : dx[i * plane + at]) + weight * sum;
    });
    over_grade<A, of.y>([&](auto j) {
      const float sum = terms_of_dy<A, t, j>(left, d).v[0];
      dy[j * plane + at] = (is_first_of_y ? 0 : dy[j * plane + at]) + weight * sum;
    });
  }
  partials[(static_cast<size_t>(thread.strip) * A::kTriples + t) * layer.features +
           thread.feature] = dw;
}

// Turns d, the gradient of out = in gate(in_1), into that of `in`, in place. A thread has a
// multivector. in_k stands in out_k = in_k gate(in_1) alone. But the scalar in_1 stands in the gate
// of every blade, too, so by the chain rule it gets a second part:
//
//     gradient of in_k    gate(in_1) d_k
//     gradient of in_1    gate(in_1) d_1 + gate'(in_1) (sum over all blades k of d_k in_k)
//
// The sum in brackets is the gradient of gate(in_1), d_factor in the code.
template <typename A>
__global__ void apply_gate_gradient(const float* in, float* gradient, Layer layer) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= layer.plane()) return;
  const Multivectors<A, 1> value = load<A>(in + at, layer.plane());
  const Multivectors<A, 1> d = load<A>(gradient + at, layer.plane());
  const float factor = gate(value.blade[0].v[0]);
  float d_factor = 0;
  unroll<0, A::kBlades>([&](auto k) {
    d_factor += d.blade[k].v[0] * value.blade[k].v[0];
    if (k > 0) gradient[k * layer.plane() + at] = factor * d.blade[k].v[0];
  });
  gradient[at] = factor * d.blade[0].v[0] + d_factor * gate_slope(value.blade[0].v[0]);
}

// dw (features, triples) = the sum of `count` partials (triples, features), in a fixed order. dw is
// always summed in two steps, so that blocks need not wait for each other and the result does not
// depend on who is first. A block owns 32 columns, which are numbers of dw: thread (x, y) adds
// partials y, y + kSumRows, ... of column x, then thread (x, 0) adds these up.
constexpr int kSumRows = 16;

__global__ void __launch_bounds__(32 * kSumRows)
    sum_partials(const float* partials, float* dw, int count, int triples, int features) {
  __shared__ float sums[kSumRows][32];
  const size_t columns = static_cast<size_t>(triples) * features;
  const size_t column = static_cast<size_t>(blockIdx.x) * 32 + threadIdx.x;
  float sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int i = threadIdx.y; i < count; i += kSumRows) sum += partials[i * columns + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < columns) {
    for (int i = 1; i < kSumRows; ++i) sum += sums[i][threadIdx.x];
    dw[column % features * triples + column / features] = sum;
  }
}

// ---- One launch each ----------------------------------------------------------------------------

// The gradients of norm and gates, for the kernels from here on. They do not keep z for backward,
// but compute P again, the product before the gates multiply it. So z = g P, where g is
// gate(x_1) gate(y_1). The norm needs two sums of a row for each grade: of z^2, as forward, and of
// d_out z.
template <typename A>
using GradientSums = Sums<2 * A::kGrades>;

template <typename A, int W>
__device__ __forceinline__ void add_gradient_sums(const Multivectors<A, W>& P, const Pack<W>& g,
                                                  const Multivectors<A, W>& d_out,
                                                  GradientSums<A>& sums) {
  unroll<0, A::kBlades>([&](auto k) {
    constexpr int c = A::grade(k);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const float z = g.v[e] * P.blade[k].v[e];
      sums.value[c] += z * z;
      sums.value[A::kGrades + c] += d_out.blade[k].v[e] * z;
    }
  });
}

// Computes from d_out the gradients of P, which it returns, and of g. dz is made as in
// normalize_grade_gradient. Since z_k = g P_k for each blade k, dP_k = g dz_k, and dg is the sum
// over all blades of P_k dz_k.
template <typename A, int W>
__device__ __forceinline__ Multivectors<A, W> gradient_of_P(const Multivectors<A, W>& P,
                                                            const Pack<W>& g,
                                                            const Multivectors<A, W>& d_out,
                                                            const GradientSums<A>& sums,
                                                            const Layer& layer, Pack<W>& dg) {
  Multivectors<A, W> dP;
  dg = {};
  unroll<0, A::kGrades>([&](auto c) {
    float r = 1, factor = 0;
    if (layer.normed) {
      r = inverse_rms(sums.value[c], layer);
      factor = r * r * r * sums.value[A::kGrades + c] * layer.inverse_features;
    }
    over_grade<A, c>([&](auto k) {
#pragma unroll
      for (int e = 0; e < W; ++e) {
        const float dz = r * d_out.blade[k].v[e] - factor * g.v[e] * P.blade[k].v[e];
        dg.v[e] += P.blade[k].v[e] * dz;
        dP.blade[k].v[e] = g.v[e] * dz;
      }
    });
  });
  return dP;
}

// Writes one grade of dx or dy to memory, and moves `to` behind it. A scalar gets a second part,
// see below.
template <typename A, int grade, int W>
__device__ __forceinline__ void store_grade(const OneGrade<A, grade, W>& gradient,
                                            const Pack<W>& through_gate, float*& to, size_t plane,
                                            bool inside) {
  over_grade<A, grade>([&](auto i) {
    constexpr int number = i - A::first(grade);
    Pack<W> value = gradient.blade[number];
    if constexpr (grade == 0) {
#pragma unroll
      for (int e = 0; e < W; ++e) value.v[e] += through_gate.v[e];
    }
    if (inside) *reinterpret_cast<Pack<W>*>(to) = value;
    to += plane;
  });
}

// Makes dx and dy of a thread's multivectors, grade by grade, writes them if they are `inside`, and
// adds to dw. The gates depend on the scalars of x and y, so the scalars of dx and dy have a second
// part, which comes through g = gate(x_1) gate(y_1). By the chain rule that of dx_1 is
// dg gate'(x_1) gate(y_1), and that of dy_1 is dg gate(x_1) gate'(y_1). kTogether: all threads of
// the warp call this together.
template <bool kTogether, typename A, int W, typename Weight>
__device__ __forceinline__ void store_gradients(const Multivectors<A, W>& x,
                                                const Multivectors<A, W>& y,
                                                const Multivectors<A, W>& dP, const Pack<W>& dg,
                                                const Pack<W>& gate_x, const Pack<W>& gate_y,
                                                const Weight& weight, Pack<W>* dw, float* dx,
                                                float* dy, size_t plane, bool inside) {
  Pack<W> x_through_gate, y_through_gate;
#pragma unroll
  for (int e = 0; e < W; ++e) {
    x_through_gate.v[e] = dg.v[e] * gate_slope(x.blade[0].v[e]) * gate_y.v[e];
    y_through_gate.v[e] = dg.v[e] * gate_slope(y.blade[0].v[e]) * gate_x.v[e];
  }
  unroll<0, A::kGrades>([&](auto grade) {
    store_grade(gradient_of_x<grade>(x, y, dP, weight, dw), x_through_gate, dx, plane, inside);
  });
  // Without this the compiler would keep all weights in registers, from dx to dy.
  if constexpr (kTogether) __syncwarp();
  unroll<0, A::kGrades>([&](auto grade) {
    store_grade(gradient_of_y<grade>(x, y, dP, weight, dw), y_through_gate, dy, plane, inside);
  });
}

// As forward_one_launch: the first walk over a row adds up its sums, the second makes dx, dy and
// dw. Both walks compute P first. dw is a sum over all rows, and a block has some of them. So each
// block adds up its part of dw in memory of its own, (triples, features), and sum_partials adds up
// these parts. No other block and no other thread comes to the same place, so nobody has to wait.
template <typename A>
__global__ void __launch_bounds__(kRowThreads)
    backward_one_launch(const float* x, const float* y, const float* w, const float* d_out,
                        float* dx, float* dy, float* dw_partials, Layer layer) {
  __shared__ GradientSums<A> partials[2][kMaxWarps];
  const size_t plane = layer.plane();
  float* own_dw = dw_partials + static_cast<size_t>(blockIdx.x) * A::kTriples * layer.features;
  int turn = 0;
  for (int n = blockIdx.x; n < layer.batch; n += gridDim.x, turn ^= 1) {
    const bool is_first_row = n == static_cast<int>(blockIdx.x);
    const size_t row = static_cast<size_t>(n) * layer.features;
    GradientSums<A> sums = {};
    for (int walk = layer.normed ? 1 : 2; walk <= 2; ++walk) {
      for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
        const Multivectors<A, 1> left = load<A>(x + row + f, plane);
        const Multivectors<A, 1> right = load<A>(y + row + f, plane);
        const Multivectors<A, 1> d = load<A>(d_out + row + f, plane);
        const Weights<A> weights(w + static_cast<size_t>(f) * A::kTriples);
        const Multivectors<A, 1> P = weighted_product(left, right, weights);
        const Pack<1> gate_x = gates_of(left.blade[0]), gate_y = gates_of(right.blade[0]);
        const Pack<1> g = gate_x * gate_y;
        if (walk == 1) {
          add_gradient_sums(P, g, d, sums);
          continue;
        }
        Pack<1> dg, dw[A::kTriples] = {};
        const Multivectors<A, 1> dP = gradient_of_P(P, g, d, sums, layer, dg);
        store_gradients<false>(left, right, dP, dg, gate_x, gate_y, weights, dw, dx + row + f,
                               dy + row + f, plane, true);
        unroll<0, A::kTriples>([&](auto t) {  // before the first row nothing has been written
          float& sum = own_dw[static_cast<size_t>(t) * layer.features + f];
          sum = (is_first_row ? 0 : sum) + dw[t].v[0];
        });
      }
      if (walk == 1) add_up_block(sums, partials[turn]);
    }
  }
}

// ---- Both on chip -------------------------------------------------------------------------------

// Backward, with the same three improvements as forward_on_chip. One reduction serves both sums of
// each grade. A thread's features are the same for all of its rows, so that dw can stay in
// registers until the end. So registers are scarce. A row's x, y and d_out are needed twice: for
// its sums, and, when these have been added up, for its gradients.
//
//     x and d_out   are taken from shared memory once, and stay in registers until the row is
//                   finished. So their places are free early: the next row's x and d_out are
//                   ordered before this row's sums are added up, and memory has work meanwhile
//     y             has no registers to stay in. It is taken from shared memory twice, once for the
//                   sums and once for the gradients. After that the next row's y is ordered
//
// So this is the order of time for a row:
//
//     memory.wait()            x, y and d_out of this row are in shared memory
//     memory.take(...)         all three come to registers; P and the gates are computed
//     fetch_x_and_d_out        of the next row, to the places that are free now
//     add_up_row               this row's sums: all threads of the block meet
//     memory.take(kY), again   then fetch_y of the next row
//     store_gradients          dx and dy go to memory, dw stays in registers
template <typename A>
constexpr int kBackwardWidth = A::kBlades <= 8 ? 16 / A::kBlades : 1;  // 8 blades: 2 features

// Writes a thread's sums for dw to memory. Each row of a block has partial sums of its own there.
template <typename A, int W>
__device__ __forceinline__ void store_weight_gradients(const Pack<W>* dw, float* partials,
                                                       const Place<W>& place,
                                                       const RowsOnChip& shape,
                                                       const Layer& layer) {
  const size_t partial = static_cast<size_t>(blockIdx.x) * shape.rows() + place.row;
  float* to = partials + partial * A::kTriples * layer.features + place.first;
  unroll<0, A::kTriples>([&](auto t) {
    if (place.has_features) *reinterpret_cast<Pack<W>*>(to) = dw[t];
    to += layer.features;
  });
}

template <typename A, int W>
__global__ void __launch_bounds__(kThreads<A>, 1)
    backward_on_chip(const float* x, const float* y, const float* w, const float* d_out, float* dx,
                     float* dy, float* dw_partials, Layer layer, RowsOnChip shape) {
  enum Tensor { kX, kY, kDOut, kTensors };
  using Memory = OnChip<A, W, kTensors, 2 * A::kGrades>;
  extern __shared__ __align__(128) float shared[];
  const Memory memory(shared, shape);
  auto& partials = Memory::partials(shared);
  const Place<W> place(shape, layer);
  const size_t plane = layer.plane();
  const int step = gridDim.x * shape.rows();
  const auto at = [&](int n) { return static_cast<size_t>(n) * layer.features + place.first; };
  const auto inside = [&](int n) { return n < layer.batch && place.has_features; };
  const auto fetch_x_and_d_out = [&](int n) {
    memory.fetch(kX, x + at(n), plane, inside(n));
    memory.fetch(kDOut, d_out + at(n), plane, inside(n));
  };
  const auto fetch_y = [&](int n) {
    memory.fetch(kY, y + at(n), plane, inside(n));
    copy_async_commit();  // closes the copies of x and d_out, too
  };

  int first = blockIdx.x * shape.rows(), n = first + place.row;
  const SharedWeights<A, W> weights(Memory::weights(shared), w, shape, layer);
  fetch_x_and_d_out(n);
  fetch_y(n);
  memory.wait();
  __syncthreads();  // for the weights, which all threads have copied
  Pack<W> dw[A::kTriples] = {};
  int turn = 0;
  for (; first < layer.batch; first += step, n += step, turn ^= 1) {
    memory.wait();
    const auto left = memory.take(kX);
    auto right = memory.take(kY);
    const Multivectors<A, W> P = weighted_product(left, right, weights);
    const Pack<W> gate_x = gates_of(left.blade[0]), gate_y = gates_of(right.blade[0]);
    const Pack<W> g = gate_x * gate_y;
    const auto d = memory.take(kDOut);
    if (first + step < layer.batch) fetch_x_and_d_out(n + step);
    GradientSums<A> sums = {};
    if (layer.normed) {
      add_gradient_sums(P, g, d, sums);
      add_up_row(sums, partials[turn], shape);
    }
    Pack<W> dg;
    const Multivectors<A, W> dP = gradient_of_P(P, g, d, sums, layer, dg);
    right = memory.take(kY);
    if (first + step < layer.batch) fetch_y(n + step);
    store_gradients<true>(left, right, dP, dg, gate_x, gate_y, weights, dw, dx + at(n), dy + at(n),
                          plane, inside(n));
  }
  store_weight_gradients<A>(dw, dw_partials, place, shape, layer);
}

// ---- Both streamed ------------------------------------------------------------------------------

// Backward by the copy engine. A thread owns W features, as in forward_streamed, but it finishes a
// row before it takes the next one: it has no registers for two rows, nor for the weights. In 3-D a
// thread has for each feature 20 weights, 20 sums for dw and three multivectors of 8 numbers. So
// the weights are in shared memory. Beside them there is room for one stage only, if an algebra has
// 8 blades or more. When all threads have taken x, y and d_out and have posted their sums, the next
// rows are ordered into the same stage. But y is taken once more after that. So a stage has two
// places for y, and rows use them in turn. (256 bytes are left for the barriers and alignment.)
template <typename A, int W>
struct BackwardMemory {
  using Stage = Plane<A, W>[4 * A::kBlades];  // x, y, d_out, and the other y
  using Posted = PostedSums<2 * A::kGrades, kThreads<A> / 32>;
  static constexpr size_t kMostWeights = SharedWeights<A, W>::bytes(kThreads<A>);
  static constexpr int kStages =
      (kMostSharedBytes - kMostWeights - sizeof(Posted) - 256) / sizeof(Stage);
  Posted sums;
  Barrier full[kStages];
  alignas(128) Stage stages[kStages];

  static size_t bytes(const RowsOnChip& shape) {
    return sizeof(BackwardMemory) + SharedWeights<A, W>::bytes(shape.per_row);
  }
};

template <typename A, int W>
__global__ void __launch_bounds__(kThreads<A>, 1)
    backward_streamed(const float* x, const float* y, const float* w, const float* d_out, float* dx,
                      float* dy, float* dw_partials, Layer layer, RowsOnChip shape) {
#if HOPPER_CODE
  using Memory = BackwardMemory<A, W>;
  constexpr int kPlanes = A::kBlades;  // of a tensor
  extern __shared__ __align__(128) float shared[];
  Memory& memory = *reinterpret_cast<Memory*>(shared);
  prepare(memory);
  const Place<W> place(shape, layer);
  const int groups = shape.groups(layer), step = gridDim.x;
  // The stage's first rows have y behind x, the next ones behind d_out, and so on in turn.
  const auto place_of_y = [](int parity) { return (parity == 0 ? 1 : 3) * kPlanes; };
  const auto order = [&](int group, int s, int parity) {
    order_rows<A>(memory.stages[s], &memory.full[s], {x, y, d_out}, group, shape, layer,
                  [&](int p) { return p / kPlanes == 1 ? p % kPlanes + place_of_y(parity) : p; });
  };

  int group = blockIdx.x;
  for (int s = 0; s < Memory::kStages; ++s) order(group + s * step, s, 0);
  const SharedWeights<A, W> weights(reinterpret_cast<float*>(&memory + 1), w, shape, layer);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  Pack<W> dw[A::kTriples] = {};
  Ring ring{Memory::kStages};
  int round = 0;
  for (; group < groups; group += step, ring.advance(), ++round) {
    const int n = group * shape.rows() + place.row;
    const bool inside = n < layer.batch && place.has_features;
    const auto& stage = memory.stages[ring.stage];
    const auto take_part = [&](int planes) {  // zeros where there is nothing
      return inside ? take<A, W>(stage + planes, place, layer) : Multivectors<A, W>{};
    };
    barrier_wait(&memory.full[ring.stage], ring.parity);
    const auto left = take_part(0);
    auto right = take_part(place_of_y(ring.parity));
    const auto d = take_part(2 * kPlanes);
    const Multivectors<A, W> P = weighted_product(left, right, weights);
    const Pack<W> gate_x = gates_of(left.blade[0]), gate_y = gates_of(right.blade[0]);
    const Pack<W> g = gate_x * gate_y;
    GradientSums<A> sums = {};
    add_gradient_sums(P, g, d, sums);
    memory.sums.post(sums, round);
    sums = memory.sums.collect(shape, place.row, round);
    order(group + Memory::kStages * step, ring.stage, ring.parity ^ 1);

    Pack<W> dg;
    const Multivectors<A, W> dP = gradient_of_P(P, g, d, sums, layer, dg);
    right = take_part(place_of_y(ring.parity));
    const size_t at = static_cast<size_t>(n) * layer.features + place.first;
    store_gradients<true>(left, right, dP, dg, gate_x, gate_y, weights, dw, dx + at, dy + at,
                          layer.plane(), inside);
  }
  store_weight_gradients<A>(dw, dw_partials, place, shape, layer);
#endif
}

// ---- Launches -----------------------------------------------------------------------------------

using Tensors = CliffordTable;
using Gradients = CliffordGradients;

// x', y', z and 1 / rms, which backward needs again. Without a norm z is the tensor `out`.
template <typename A>
struct Unfused {
  explicit Unfused(const Tensors& of)
      : of(of),
        x(of.problem.output<float>(of.x.size())),
        y(of.problem.output<float>(of.y.size())),
        z(of.layer.normed ? of.problem.output<float>(of.result.size()) : of.result),
        inverses(of.problem.output<float>(static_cast<size_t>(of.layer.batch) *
                                          (of.layer.normed ? A::kGrades : 1))) {}

  double bytes() const {
    return x.bytes() + y.bytes() + (of.layer.normed ? z.bytes() + inverses.bytes() : 0);
  }
  int blocks() const { return blocks_for(of.layer.plane(), 256); }

  template <int... t>
  void multiply(std::integer_sequence<int, t...>) const {
    ((multiply_grades<A, t><<<blocks(), 256>>>(x, y, of.w, z, of.layer)), ...);
  }

  void forward() const {
    const Layer& layer = of.layer;
    apply_gate<A><<<blocks(), 256>>>(of.x, x, layer);
    apply_gate<A><<<blocks(), 256>>>(of.y, y, layer);
    multiply(std::make_integer_sequence<int, A::kTriples>());
    for (int c = 0; layer.normed && c < A::kGrades; ++c) {
      const size_t start = A::kTables.first[c] * layer.plane();
      normalize_grade<<<layer.batch, 256>>>(z + start, of.out + start,
                                            inverses + static_cast<size_t>(c) * layer.batch,
                                            A::kTables.first[c + 1] - A::kTables.first[c], layer);
    }
  }

  Tensors of;
  Buffer<float> x, y, z, inverses;
};

// dw from its partial sums.
template <typename A>
void add_up_weights(const Gradients& d, const Buffer<float>& partials, const Layer& layer) {
  const int count = static_cast<int>(partials.size() / d.dw.size());
  sum_partials<<<blocks_for(d.dw.size(), 32), dim3(32, kSumRows)>>>(partials, d.dw, count,
                                                                    A::kTriples, layer.features);
}

// What backward needs besides: dz, and dw of each strip. dx' is written where dx will be.
template <typename A>
struct UnfusedBackward {
  UnfusedBackward(const Tensors& of, const Gradients& d)
      : forward(of),
        d(d),
        dz(of.problem.output<float>(of.layer.normed ? of.result.size() : 1)),
        partials(of.problem.output<float>(strips(of.layer) * of.w.size())) {}

  double bytes() const {
    return forward.bytes() + partials.bytes() + (forward.of.layer.normed ? dz.bytes() : 0);
  }

  template <int... t>
  void multiply(const float* dz, std::integer_sequence<int, t...>) const {
    ((multiply_grades_gradient<A, t><<<strip_blocks(forward.of.layer), kStripFeatures>>>(
         forward.x, forward.y, forward.of.w, dz, d.dx, d.dy, partials, forward.of.layer)),
     ...);
  }

  void forward_and_backward() const {
    forward.forward();
    const Layer& layer = forward.of.layer;
    for (int c = 0; layer.normed && c < A::kGrades; ++c) {
      const size_t start = A::kTables.first[c] * layer.plane();
      normalize_grade_gradient<<<layer.batch, 256>>>(
          forward.z + start, d.d_out + start,
          forward.inverses + static_cast<size_t>(c) * layer.batch, dz + start,
          A::kTables.first[c + 1] - A::kTables.first[c], layer);
    }
    multiply(layer.normed ? dz : d.d_out.data(), std::make_integer_sequence<int, A::kTriples>());
    apply_gate_gradient<A><<<forward.blocks(), 256>>>(forward.of.x, d.dx, layer);
    apply_gate_gradient<A><<<forward.blocks(), 256>>>(forward.of.y, d.dy, layer);
    add_up_weights<A>(d, partials, layer);
  }

  Unfused<A> forward;
  Gradients d;
  Buffer<float> dz, partials;
};

// What a row of the table launches, the memory that this takes beside inputs and outputs, how much
// shared memory a block asks for, and whether it needs Hopper. If `run` is empty, the kernel cannot
// compute this shape.
struct Launch {
  std::function<void()> run;
  double bytes = 0;
  size_t shared_bytes = 0;
  bool hopper = false;
};

template <typename A>
Launch forward_once(const Tensors& of) {
  const int resident = resident_blocks(forward_one_launch<A>, kRowThreads, 0);
  const int blocks = std::min(of.layer.batch, resident);
  const auto run = [=] {
    forward_one_launch<A><<<blocks, kRowThreads>>>(of.x, of.y, of.w, of.out, of.layer);
  };
  return {run};
}

template <typename A>
Launch backward_once(const Tensors& of, const Gradients& d) {
  const int resident = resident_blocks(backward_one_launch<A>, kRowThreads, 0);
  const int blocks = std::min(of.layer.batch, resident);
  const auto partials = of.problem.output<float>(blocks * of.w.size());
  const auto run = [=] {
    backward_one_launch<A>
        <<<blocks, kRowThreads>>>(of.x, of.y, of.w, d.d_out, d.dx, d.dy, partials, of.layer);
    add_up_weights<A>(d, partials, of.layer);
  };
  return {run, partials.bytes()};
}

// How many threads a block has, if its rows are on chip. It could have as many rows as kThreads and
// the shared memory allow. That says how many rounds the GPU needs for the batch. The block has
// only as many rows as these rounds need. For example, with up to 16 rows in a block 132
// multiprocessors take 1000 rows in one round, and 8 rows in each block are enough. Returns nothing
// if rows are no whole vectors, or if one of them does not fit in a block.
template <typename A, int W, class Memory>
std::optional<RowsOnChip> rows_on_chip(const Layer& layer, size_t shared_bytes) {
  const int per_row = ceil_div(layer.features, 32 * W) * 32;
  RowsOnChip shape{kThreads<A> / per_row * per_row, per_row};
  while (shape.threads > 0 && Memory::bytes(shape) > shared_bytes) shape.threads -= per_row;
  if (shape.threads == 0 || layer.features % kVector != 0) return std::nullopt;
  const int most = multiprocessors() * ceil_div(shape.groups(layer), multiprocessors());
  shape.threads = ceil_div(layer.batch, most) * per_row;
  return shape;
}

// The grid of a kernel whose blocks stay.
int persistent_blocks(AnyKernel kernel, const RowsOnChip& shape, size_t bytes, const Layer& layer) {
  allow_shared_bytes(kernel, static_cast<int>(bytes));
  const int resident = static_cast<int>(bytes) > most_shared_bytes()
                           ? multiprocessors()  // the table leaves this kernel out: needs_shared()
                           : resident_blocks(kernel, shape.threads, bytes);
  return std::min(shape.groups(layer), resident);
}

// Launches of the kernels whose blocks stay, on chip and streamed.
template <typename A>
Launch forward_on_chip_of(const Tensors& of, const Device& device) {
  constexpr int W = kForwardWidth<A>;
  using Memory = OnChip<A, W, 2, A::kGrades>;
  const auto shape = rows_on_chip<A, W, Memory>(of.layer, device.shared_bytes);
  if (!shape) return {};
  const size_t bytes = Memory::bytes(*shape);
  const int blocks = persistent_blocks(forward_on_chip<A, W>, *shape, bytes, of.layer);
  const auto run = [=, shape = *shape] {
    forward_on_chip<A, W>
        <<<blocks, shape.threads, bytes>>>(of.x, of.y, of.w, of.out, of.layer, shape);
  };
  return {run, 0, bytes};
}
template <typename A>
Launch forward_streamed_of(const Tensors& of) {
  constexpr int W = kStreamedWidth<A>;
  using Memory = ForwardMemory<A, W>;
  const auto shape = rows_on_chip<A, W, Memory>(of.layer, kMostSharedBytes);
  if (!shape) return {};
  const size_t bytes = Memory::bytes(*shape);
  const int blocks = persistent_blocks(forward_streamed<A, W>, *shape, bytes, of.layer);
  const auto run = [=, shape = *shape] {
    launch_early(forward_streamed<A, W>, blocks, shape.threads, bytes, of.x.data(), of.y.data(),
                 of.w.data(), of.out.data(), of.layer, shape);
  };
  return {run, 0, bytes, true};
}

template <typename A, class Memory, typename Kernel>
Launch backward_by(Kernel* kernel, const std::optional<RowsOnChip>& found, const Tensors& of,
                   const Gradients& d) {
  if (!found) return {};
  const RowsOnChip shape = *found;
  const size_t bytes = Memory::bytes(shape);
  const int blocks = persistent_blocks(kernel, shape, bytes, of.layer);
  const auto partials = of.problem.output<float>(blocks * shape.rows() * of.w.size());
  const auto run = [=] {
    kernel<<<blocks, shape.threads, bytes>>>(of.x, of.y, of.w, d.d_out, d.dx, d.dy, partials,
                                             of.layer, shape);
    add_up_weights<A>(d, partials, of.layer);
  };
  return {run, partials.bytes(), bytes};
}
template <typename A>
Launch backward_on_chip_of(const Tensors& of, const Gradients& d, const Device& device) {
  constexpr int W = kBackwardWidth<A>;
  using Memory = OnChip<A, W, 3, 2 * A::kGrades>;
  const auto shape = rows_on_chip<A, W, Memory>(of.layer, device.shared_bytes);
  return backward_by<A, Memory>(backward_on_chip<A, W>, shape, of, d);
}
template <typename A>
Launch backward_streamed_of(const Tensors& of, const Gradients& d) {
  constexpr int W = kStreamedWidth<A>;
  using Memory = BackwardMemory<A, W>;
  const auto shape = rows_on_chip<A, W, Memory>(of.layer, kMostSharedBytes);
  Launch launch = backward_by<A, Memory>(backward_streamed<A, W>, shape, of, d);
  launch.hopper = true;
  return launch;
}

// ---- The tables ---------------------------------------------------------------------------------

// How many multiply-adds a multivector takes: in the product one for each term, and one for each
// blade or sum that a weight multiplies. The last function counts those of dx, dy and dw.
template <typename A>
constexpr int all_terms() {
  int terms = 0;
  for (int t = 0; t < A::kTriples; ++t) terms += A::triple(t).terms;
  return terms;
}
template <typename A>
constexpr int product_multiply_adds() {
  int sum = all_terms<A>();
  for (int t = 0; t < A::kTriples; ++t) {
    const auto of = A::triple(t);
    const bool weight_first = A::has_one_blade(of.x) || A::has_one_blade(of.y);
    sum += weight_first ? 1 : std::popcount(of.with_result);
  }
  return sum;
}
template <typename A>
constexpr int gradient_multiply_adds() {
  int sum = 2 * all_terms<A>();
  for (int t = 0; t < A::kTriples; ++t) {
    const auto of = A::triple(t);
    const bool first_in_dx = weight_first_in_dx<A>(t), first_in_dy = weight_first_in_dy<A>(t);
    sum += first_in_dx ? 1 : std::popcount(of.with_x);
    sum += first_in_dy ? 1 : std::popcount(of.with_y);
    sum += !first_in_dx   ? std::popcount(of.with_x)
           : !first_in_dy ? std::popcount(of.with_y)
                          : of.terms + std::popcount(of.with_result);
  }
  return sum;
}

// Operations for a multivector: those of the product; 4 for each gate, and 1 for g, which make 9;
// 4 for each blade of z: the factor g, the square, the sum of squares and the factor 1 / rms.
template <typename A>
double forward_flops() {
  return 2 * product_multiply_adds<A>() + 9 + 4 * A::kBlades;
}
// The product and its gates again; for each blade 1 for z, 4 for both sums of the norm, 3 for dz, 2
// for dg and 1 for dP; the gradients of the product; and 7 for each scalar's part through its gate.
template <typename A>
double backward_flops() {
  return 2 * product_multiply_adds<A>() + 9 + 11 * A::kBlades + 2 * gradient_multiply_adds<A>() +
         14;
}

// Returns whether a row of the layer fits on chip.
template <typename A>
bool add_forward(const Tensors& of, const Device& device) {
  Problem& problem = of.problem;
  const Unfused<A> unfused(of);
  problem.kernel("unfused", Role::baseline, [=] { unfused.forward(); })
      .occupies(of.bytes() + unfused.bytes());
  const auto add_product_and_norm = [&](const char* name, auto product) {
    const auto run = [=, layer = of.layer, z = unfused.z] {
      product(z);
      if (layer.normed) normalize<A><<<layer.batch, 256>>>(z, of.out, layer);
    };
    problem.kernel(name, Role::ours, run)
        .occupies(of.bytes() + (of.layer.normed ? unfused.z.bytes() : 0));
  };
  if constexpr (std::is_same_v<A, Cl<2, 0, 0>>) {
    add_product_and_norm("product by hand", [=, blocks = unfused.blocks()](float* z) {
      product_by_hand<<<blocks, 256>>>(of.x, of.y, of.w, z, of.layer);
    });
  }
  add_product_and_norm("fused product", [=](float* z) {
    fused_product<A><<<strip_blocks(of.layer), kStripFeatures>>>(of.x, of.y, of.w, z, of.layer);
  });
  const auto add = [&](const char* name, const Launch& launch) {
    Kernel& row = problem.kernel(name, Role::ours, launch.run).occupies(of.bytes());
    row.needs_shared(launch.shared_bytes);
    if (launch.hopper) row.hopper_only();
  };
  add("one launch", forward_once<A>(of));
  const Launch on_chip = forward_on_chip_of<A>(of, device);
  if (on_chip.run) add("row on chip", on_chip);
  const Launch streamed = forward_streamed_of<A>(of);
  if (streamed.run) add("rows streamed", streamed);
  return on_chip.run && streamed.run;
}

// In a network other layers work between the forward and the backward pass. So these are two calls,
// each of which reads x and y. (If backward_on_chip has room for a shape and forward_on_chip has
// none, the forward kernel of "both on chip" is that of "one launch".)
template <typename A>
bool add_backward(const Tensors& of, const Gradients& d, const Device& device) {
  Problem& problem = of.problem;
  const double ends = of.bytes() + d.bytes();
  const UnfusedBackward<A> unfused(of, d);
  problem.kernel("unfused", Role::baseline, [=] { unfused.forward_and_backward(); })
      .occupies(ends + unfused.bytes());
  const auto add = [&](const char* name, const Launch& forward, const Launch& backward) {
    const auto run = [=] {
      forward.run();
      backward.run();
    };
    Kernel& row = problem.kernel(name, Role::ours, run).occupies(ends + backward.bytes);
    row.needs_shared(std::max(forward.shared_bytes, backward.shared_bytes));
    if (forward.hopper || backward.hopper) row.hopper_only();
  };
  const Launch once = forward_once<A>(of);
  add("one launch each", once, backward_once<A>(of, d));
  const Launch on_chip = forward_on_chip_of<A>(of, device);
  const Launch backward = backward_on_chip_of<A>(of, d, device);
  if (backward.run) add("both on chip", on_chip.run ? on_chip : once, backward);
  const Launch streamed = forward_streamed_of<A>(of);
  const Launch backward_streamed = backward_streamed_of<A>(of, d);
  if (backward_streamed.run) add("both streamed", streamed, backward_streamed);
  return backward.run && backward_streamed.run;
}

template <int p, int q, int r>
int run_lesson(Lesson& lesson) {
  using A = Cl<p, q, r>;
  CliffordTables tables(lesson, p, q, r, A::kTriples);
  bool all_on_chip = true;
  for (const CliffordReference& size : tables.sizes()) {
    const Tensors of = tables.forward(size, forward_flops<A>());
    all_on_chip &= add_forward<A>(of, lesson.device());
    of.problem.compare("row on chip", "unfused", "Forward in one launch: % times as fast.");
    if (lesson.flag("--turned")) continue;
    const auto [both, d] = tables.backward(size, forward_flops<A>() + backward_flops<A>());
    all_on_chip &= add_backward<A>(both, d, lesson.device());
    both.problem.compare("both on chip", "unfused", "Both in three launches: % times as fast.");
  }
  if (!all_on_chip) {
    lesson.note(
        "Kernels with a row on chip are left out where they cannot take it: they take rows of "
        "whole "
        "vectors (features are a multiple of 4) that fit in a block.");
  }
  tables.note_operations(A::kTriples, product_multiply_adds<A>(), 2 * all_terms<A>(),
                         gradient_multiply_adds<A>());
  return lesson.run();
}

// `scons algebra=2,1,0` defines ALGEBRA as these three numbers. Then --algebra has one more choice.
#define TEXT_OF(...) #__VA_ARGS__
#define TEXT(macro) TEXT_OF(macro)

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "10_clifford_gp",
                 .title = "gated, weighted geometric product and its norm, forward and backward",
                 .n_meaning = "the batch",
                 .n_gpu = 8192,
                 .n_cpu = 25,
                 .options = {{.name = "--features",
                              .meaning = "multivectors per batch element",
                              .value = 1024,
                              .sweep = {.gpu = {128, 1024}, .cpu = {8, 64}},
                              .cpu = 260}},
                 .choices = {{"--algebra",
                              "signature: basis vectors that square to +1, -1, 0 (another one: "
                              "scons algebra=P,Q,R, or all)",
                              {
#ifdef ALGEBRA
                                  TEXT(ALGEBRA),
#endif
                                  "3,0,0",
                                  "2,0,0",
#ifndef FEW_ALGEBRAS
                                  "3,0,1",
                                  "1,3,0",
                                  "4,1,0",
#endif
                              }}},
                 .flags = {{"--no-norm", "without the norm"},
                           {"--turned", "expect turned results of turned inputs (forward)"}},
                 .sweep = {.gpu = {1024, 8192}, .cpu = {8, 64}}});
#ifdef ALGEBRA
  if (lesson.choice("--algebra") == TEXT(ALGEBRA)) return run_lesson<ALGEBRA>(lesson);
#endif
  if (lesson.choice("--algebra") == "2,0,0") return run_lesson<2, 0, 0>(lesson);
#ifndef FEW_ALGEBRAS  // scons algebra=all: these three take four fifths of the time to compile
  if (lesson.choice("--algebra") == "3,0,1") return run_lesson<3, 0, 1>(lesson);
  if (lesson.choice("--algebra") == "1,3,0") return run_lesson<1, 3, 0>(lesson);
  if (lesson.choice("--algebra") == "4,1,0") return run_lesson<4, 1, 0>(lesson);
#endif
  return run_lesson<3, 0, 0>(lesson);
}
