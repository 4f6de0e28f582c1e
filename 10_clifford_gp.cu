// 10. Clifford algebra: the compiler writes the kernel
//
//     x' = x gate(x_0), y' = y gate(y_0)                gate(s) = (1 + erf(s / sqrt 2)) / 2
//     z  = sum over grades a, b, c of  w[a,c,b] <<x'>_a <y'>_b>_c
//     out = per grade c: z_c / sqrt(mean over features of |z_c|^2 + 1e-6)
//
//     x, y, out (2^n blades, batch, features) and w (features, triples): fp32, row-major
//
// The layer of a Clifford neural network. A number is a multivector: in three dimensions a scalar,
// a vector (e1, e2, e3), a bivector (e12, e13, e23) and a trivector (e123), 8 coefficients called
// blades. x_0 is the scalar, <x>_a the part of grade a (of blades with a basis vectors). Two
// multivectors multiply like polynomials in e1, e2, ... which anticommute, e2 e1 = -e1 e2, and
// square to +1, -1 or 0: that is the algebra's signature. Each product of grades has a weight per
// feature, shared by the batch; there are 10 of them in 2-D, 20 in 3-D. |z_c|^2 is the plain sum of
// squares. Backward returns dx, dy and dw from d_out.
//
// What moves: each blade is a plane of batch x features; x and y in, out out, 96 bytes per pair of
// 3-D multivectors. What is computed: 92 multiply-adds for their product and two gates. The
// machine could do several times that while the bytes arrive: memory is the limit, if every byte
// moves once. Run operator by operator it does not: that is the first kernel of the table.
//
//     unfused         a kernel for each operator, as a framework runs it: 26 of them in 3-D
//     fused product   gates and product in one kernel, the norm in another
//     one launch      a block owns a row (all features of a batch element) and reads it twice
//     row on chip     the row stays in registers while its norm is reduced, the weights in shared
//                     memory, and the next row is on its way
//     rows streamed   the copy engine brings several rows ahead, and the weights are in registers;
//                     needs compute capability 9.0
//
// What makes a kernel of 92 multiply-adds fast is that nobody looks anything up: which blade times
// which gives which, with which sign and which weight, is known when the program is compiled. Other
// implementations write these lines by hand or generate them with a symbolic package. Here the
// compiler does, from the signature: Cl<3, 0, 0> below is all that a user writes, and Cl<1, 3, 0>
// (spacetime), Cl<3, 0, 1> (projective) and Cl<4, 1, 0> (conformal) cost nothing more.

#include <bit>
#include <cstdio>
#include <deque>
#include <optional>
#include <utility>

#include "common/async_copy.cuh"
#include "common/clifford.h"
#include "common/early_launch.cuh"
#include "common/hopper.cuh"

// ---- The algebra, at compile time ---------------------------------------------------------------

// A factor of a product, or its result.
enum class Of { x, result, y };

// Basis vectors e1 .. ep square to +1, the next q to -1, the last r to 0. A blade is the set of its
// basis vectors, bit v - 1 for ev: e13 is 0b101. Blades are numbered by grade, within a grade by
// their bits: 1; e1, e2, e3; e12, e13, e23; e123.
template <int p, int q, int r>
struct Cl {
  static constexpr int kVectors = p + q + r, kBlades = 1 << kVectors, kGrades = kVectors + 1;

  // The product of two sets of vectors has those that are in one of them, a ^ b. Its sign: a swap
  // for each vector of b that moves past a later one of a; then what is in both meets itself.
  static constexpr int sign_of_product(unsigned a, unsigned b) {
    int swaps = 0;
    for (unsigned later = a >> 1; later != 0; later >>= 1) swaps += std::popcount(later & b);
    int sign = swaps % 2 == 0 ? 1 : -1;
    for (int v = 0; v < kVectors; ++v) {
      if (a & b & 1u << v) sign *= v < p ? 1 : v < p + q ? -1 : 0;
    }
    return sign;
  }

  // Blade x times blade y is sign times blade result; grades of x, of the result, of y.
  struct Triple {
    int x, result, y;
  };
  struct Tables {
    unsigned vectors[kBlades] = {};     // of a blade
    int grade[kBlades] = {};            // of a blade
    int blade[kBlades] = {};            // with these vectors
    int first[kGrades + 1] = {};        // blade of a grade; after the last: how many there are
    int result[kBlades][kBlades] = {};  // of blade x times blade y; for y of x and result, too
    signed char sign[kBlades][kBlades] = {};          // of blade x times blade y
    Triple triple[kGrades * kGrades * kGrades] = {};  // by x, then result, then y
    int triples = 0;
    int terms[kGrades * kGrades * kGrades] = {};  // of a triple: its products that are not 0
    unsigned with_terms[3][kGrades * kGrades * kGrades] = {};  // which blades of x, result, y
  };
  static constexpr Tables make_tables() {
    Tables t;
    int blades = 0;
    for (int grade = 0; grade < kGrades; ++grade) {
      t.first[grade] = blades;
      for (unsigned vectors = 0; vectors < kBlades; ++vectors) {
        if (std::popcount(vectors) != grade) continue;
        t.vectors[blades] = vectors;
        t.grade[blades] = grade;
        t.blade[vectors] = blades++;
      }
    }
    t.first[kGrades] = blades;
    for (int i = 0; i < kBlades; ++i) {
      for (int j = 0; j < kBlades; ++j) {
        t.result[i][j] = t.blade[t.vectors[i] ^ t.vectors[j]];
        t.sign[i][j] = static_cast<signed char>(sign_of_product(t.vectors[i], t.vectors[j]));
      }
    }
    for (int a = 0; a < kGrades; ++a) {
      for (int c = 0; c < kGrades; ++c) {
        for (int b = 0; b < kGrades; ++b) {
          const int n = t.triples;
          for (int i = t.first[a]; i < t.first[a + 1]; ++i) {
            for (int j = t.first[b]; j < t.first[b + 1]; ++j) {
              const int k = t.result[i][j];
              if (t.grade[k] != c || t.sign[i][j] == 0) continue;
              t.triple[n] = {a, c, b};
              ++t.terms[n];
              t.with_terms[0][n] |= 1u << i;
              t.with_terms[1][n] |= 1u << k;
              t.with_terms[2][n] |= 1u << j;
            }
          }
          t.triples += t.terms[n] > 0;
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
  // The blade that blade i makes k: e_i e_j = +-e_k. As a ^ b does, it serves any two of the three.
  __host__ __device__ static constexpr int third(int i, int k) { return kTables.result[i][k]; }
  // 0 unless blade i times blade j is a term of triple t.
  __host__ __device__ static constexpr int sign(int t, int i, int j) {
    const Triple grades = triple(t);
    return grade(i) == grades.x && grade(j) == grades.y && grade(third(i, j)) == grades.result
               ? kTables.sign[i][j]
               : 0;
  }
  // The same with one blade fixed, as the sums below need it: a product x_i y_j is part of z_k,
  // dx_i and dy_j. For z_k the other two are (i, j), for dx_i they are (k, j), for dy_j (k, i).
  __host__ __device__ static constexpr int sign(Of of, int t, int fixed, int other) {
    return of == Of::result ? sign(t, other, third(fixed, other))
           : of == Of::x    ? sign(t, fixed, third(fixed, other))
                            : sign(t, third(fixed, other), fixed);
  }
  // The blades of z, dx or dy that have terms of triple t, as a set; with vectors that square to 0
  // some have none.
  __host__ __device__ static constexpr unsigned with_terms(Of of, int t) {
    return kTables.with_terms[static_cast<int>(of)][t];
  }
  __host__ __device__ static constexpr bool has_terms(Of of, int t, int blade) {
    return (with_terms(of, t) >> blade & 1) != 0;
  }
  // What the terms of z, dx and dy are products of, in the order of the sums below.
  __host__ __device__ static constexpr Of first_factor(Of of) {
    return of == Of::result ? Of::x : Of::result;
  }
  __host__ __device__ static constexpr Of second_factor(Of of) {
    return of == Of::y ? Of::x : Of::y;
  }
  __host__ __device__ static constexpr int grade(Of of, int t) {
    return of == Of::x ? triple(t).x : of == Of::y ? triple(t).y : triple(t).result;
  }
  __host__ __device__ static constexpr int blades_of(int grade) {
    return first(grade + 1) - first(grade);
  }
  // Whether there are several and they have one term each, all with the same blade of one factor,
  // of a grade that has no other (as scalars have): the weight then multiplies this blade, instead
  // of every term.
  __host__ __device__ static constexpr bool has_common_factor(Of of, int t) {
    const bool several = (with_terms(of, t) & (with_terms(of, t) - 1)) != 0;
    return several && (blades_of(grade(first_factor(of), t)) == 1 ||
                       blades_of(grade(second_factor(of), t)) == 1);
  }
  // dw of triple t is x times the sums of its terms in dx, or y times those in dy, or dz times
  // those in z: which of these sums are there anyway, without the weight?
  __host__ __device__ static constexpr Of weight_gradient_from(int t) {
    return !has_common_factor(Of::x, t) ? Of::x : !has_common_factor(Of::y, t) ? Of::y : Of::result;
  }

  // (e_i e_j) e_k = e_i (e_j e_k) for all j and k?
  static constexpr bool associates(int i) {
    for (int j = 0; j < kBlades; ++j) {
      for (int k = 0; k < kBlades; ++k) {
        const int left = kTables.sign[i][j] * kTables.sign[third(i, j)][k];
        const int right = kTables.sign[i][third(j, k)] * kTables.sign[j][k];
        if (left != right || third(third(i, j), k) != third(i, third(j, k))) return false;
      }
    }
    return true;
  }
  template <int... i>
  static constexpr bool all_associate(std::integer_sequence<int, i...>) {
    return (... && std::bool_constant<associates(i)>::value);
  }
  static constexpr bool is_associative() {
    return all_associate(std::make_integer_sequence<int, kBlades>());
  }

  // Multiply-adds as the functions below do them: one for each product of blades that is not 0, and
  // one for each blade that a weight multiplies.
  static constexpr int multiply_adds(Of of, int t) {
    return kTables.terms[t] + (has_common_factor(of, t) ? 1 : std::popcount(with_terms(of, t)));
  }
  static constexpr int product_multiply_adds() {
    int sum = 0;
    for (int t = 0; t < kTriples; ++t) sum += multiply_adds(Of::result, t);
    return sum;
  }
  static constexpr int gradient_multiply_adds() {
    int sum = 0;
    for (int t = 0; t < kTriples; ++t) {
      const Of from = weight_gradient_from(t);
      sum += multiply_adds(Of::x, t) + multiply_adds(Of::y, t) +
             std::popcount(with_terms(from, t)) + (from == Of::result ? kTables.terms[t] : 0);
    }
    return sum;
  }
  static constexpr int terms() {
    int sum = 0;
    for (int t = 0; t < kTriples; ++t) sum += kTables.terms[t];
    return sum;
  }
};

// What everybody knows, and what must hold for every blade.
static_assert(Cl<3, 0, 0>::sign_of_product(0b001, 0b010) == 1);     // e1 e2 = e12
static_assert(Cl<3, 0, 0>::sign_of_product(0b010, 0b001) == -1);    // e2 e1 = -e12
static_assert(Cl<2, 0, 0>::sign_of_product(0b11, 0b11) == -1);      // e12 e12 = -1
static_assert(Cl<3, 0, 0>::sign_of_product(0b111, 0b111) == -1);    // e123 e123 = -1
static_assert(Cl<3, 0, 1>::sign_of_product(0b1000, 0b1000) == 0);   // the projective direction
static_assert(Cl<1, 3, 0>::sign_of_product(0b0001, 0b0001) == 1);   // time
static_assert(Cl<1, 3, 0>::sign_of_product(0b0010, 0b0010) == -1);  // space
static_assert(Cl<1, 3, 0>::sign_of_product(0b0011, 0b0011) == 1);   // the plane of a boost
static_assert(Cl<2, 0, 0>::kTriples == 10 && Cl<3, 0, 0>::kTriples == 20);
static_assert(Cl<2, 0, 0>::is_associative() && Cl<3, 0, 0>::is_associative());
static_assert(Cl<3, 0, 1>::is_associative() && Cl<1, 3, 0>::is_associative());
static_assert(Cl<4, 1, 0>::is_associative());

// ---- Multivectors in registers ------------------------------------------------------------------

// The same coefficient of W neighbouring features, moved as one access of up to 16 bytes.
template <int W>
struct alignas(W * sizeof(float)) Pack {
  float v[W];
};

// -0 is the neutral element of addition in floating-point (+0 is not: -0 + 0 = 0). The compiler
// knows, and drops it: a sum that starts here starts with its first term.
template <int W>
__device__ __forceinline__ Pack<W> empty_sum() {
  Pack<W> result;
#pragma unroll
  for (int e = 0; e < W; ++e) result.v[e] = -0.0f;
  return result;
}

// A thread's W multivectors. Every index into it is a compile-time constant: it is registers.
template <typename A, int W>
struct Multivectors {
  Pack<W> blade[A::kBlades];
};

// A number as a type: where it is passed, it is still a constant.
template <int n>
struct Constant {
  static constexpr int value = n;
  __device__ constexpr operator int() const { return n; }
};

// body(first), ..., body(end - 1), each with a constant.
template <int first, typename Body, int... i>
__device__ __forceinline__ void unroll_sequence(Body& body, std::integer_sequence<int, i...>) {
  (body(Constant<first + i>()), ...);
}
template <int first, int end, typename Body>
__device__ __forceinline__ void unroll(Body body) {
  unroll_sequence<first>(body, std::make_integer_sequence<int, end - first>());
}

// sum += a b
template <int W>
__device__ __forceinline__ void add_product(Pack<W>& sum, const Pack<W>& a, const Pack<W>& b) {
#pragma unroll
  for (int e = 0; e < W; ++e) sum.v[e] += a.v[e] * b.v[e];
}

template <int W>
__device__ __forceinline__ void add(Pack<W>& sum, const Pack<W>& a) {
#pragma unroll
  for (int e = 0; e < W; ++e) sum.v[e] += a.v[e];
}

// sign a b; nothing, for a sign of 0.
template <int sign>
__device__ __forceinline__ float signed_product(const float& a, const float& b) {
  return sign > 0 ? a * b : sign < 0 ? -(a * b) : -0.0f;
}

// The part that triple t has in blade `fixed` of z, dx or dy, before its weight: the sum of all
// sign a b with a in `first`, b in `second`, where x, y and dz are
//     for z_k: x_i and y_j        for dx_i: dz_k and y_j        for dy_j: dz_k and x_i
// This is where the product is written out: a term for each blade of `first` with the right grade.
template <typename A, Of of, int t, int fixed, int W, int... n>
__device__ __forceinline__ Pack<W> sum_terms(const Multivectors<A, W>& first,
                                             const Multivectors<A, W>& second,
                                             std::integer_sequence<int, n...>) {
  constexpr int start = A::first(A::grade(A::first_factor(of), t));
  Pack<W> sum;
#pragma unroll
  for (int e = 0; e < W; ++e) {
    sum.v[e] = (-0.0f + ... +
                signed_product<A::sign(of, t, fixed, start + n)>(
                    first.blade[start + n].v[e], second.blade[A::third(fixed, start + n)].v[e]));
  }
  return sum;
}
template <typename A, Of of, int t, int fixed, int W>
__device__ __forceinline__ Pack<W> sum_terms(const Multivectors<A, W>& first,
                                             const Multivectors<A, W>& second) {
  constexpr int blades = A::blades_of(A::grade(A::first_factor(of), t));
  return sum_terms<A, of, t, fixed>(first, second, std::make_integer_sequence<int, blades>());
}

// sums += triple t's weight w times these parts, for the blades of its grade of z, dx or dy.
// use_part(blade, Pack) gets each part without its weight, unless w goes into a common factor.
template <typename A, Of of, int t, int W, typename UsePart>
__device__ __forceinline__ void add_triple(Pack<W>* sums, const Pack<W>& w,
                                           const Multivectors<A, W>& first,
                                           const Multivectors<A, W>& second, UsePart use_part) {
  constexpr int start = A::first(A::grade(of, t)), end = A::first(A::grade(of, t) + 1);
  if constexpr (A::has_common_factor(of, t)) {
    constexpr int of_first = A::grade(A::first_factor(of), t);
    constexpr int of_second = A::grade(A::second_factor(of), t);
    constexpr bool is_first = A::blades_of(of_first) == 1;
    constexpr int common = A::first(is_first ? of_first : of_second);
    Pack<W> weighted = empty_sum<W>();
    add_product(weighted, w, (is_first ? first : second).blade[common]);
    unroll<start, end>([&](auto blade) {
      constexpr int other = A::third(blade, common);
      constexpr int sign = A::sign(of, t, blade, is_first ? common : other);
      const Pack<W>& factor = (is_first ? second : first).blade[other];
#pragma unroll
      for (int e = 0; e < W; ++e) {
        sums[blade - start].v[e] += signed_product<sign>(weighted.v[e], factor.v[e]);
      }
    });
  } else {
    unroll<start, end>([&](auto blade) {
      if constexpr (A::has_terms(of, t, blade)) {
        const Pack<W> part = sum_terms<A, of, t, blade>(first, second);
        add_product(sums[blade - start], w, part);
        use_part(blade, part);
      }
    });
  }
}

// The geometric product z of x and y; weight(t) is the Pack of the triple t's weights. Once this is
// unrolled nothing is left but multiply-adds.
template <typename A, int W, typename Weight>
__device__ __forceinline__ Multivectors<A, W> weighted_product(const Multivectors<A, W>& x,
                                                               const Multivectors<A, W>& y,
                                                               const Weight& weight) {
  Multivectors<A, W> z;
  unroll<0, A::kBlades>([&](auto k) { z.blade[k] = empty_sum<W>(); });
  unroll<0, A::kTriples>([&](auto t) {
    Pack<W>* grade = z.blade + A::first(A::triple(t).result);
    add_triple<A, Of::result, t>(grade, weight(t), x, y, [](auto, const Pack<W>&) {});
  });
  return z;
}

// Its gradients, from dz: with z_k = sum of w sign x_i y_j,
//     dx_i = sum of w sign y_j dz_k, dy_j = sum of w sign x_i dz_k, dw = sum of sign x_i y_j dz_k
// This is dx (`of` is Of::x) or dy (Of::y), with each dw for which it makes the sums; the calls for
// both make them all. Grade by grade, so that few results are in registers at a time:
// give(blade, Pack) takes a finished dx_i or dy_j; the sum for triple t starts at take_w(t) and
// goes to give_w(t, Pack).
template <Of of, typename A, int W, typename Weight, typename Give, typename TakeW, typename GiveW>
__device__ __forceinline__ void gradients(const Multivectors<A, W>& x, const Multivectors<A, W>& y,
                                          const Multivectors<A, W>& dz, const Weight& weight,
                                          Give give, TakeW take_w, GiveW give_w) {
  const Multivectors<A, W>&self = of == Of::x ? x : y, &other = of == Of::x ? y : x;
  unroll<0, A::kGrades>([&](auto grade) {
    constexpr int first = A::first(grade), end = A::first(grade + 1);
    Pack<W> sums[end - first];
    unroll<first, end>([&](auto i) { sums[i - first] = empty_sum<W>(); });
    unroll<0, A::kTriples>([&](auto t) {
      if constexpr (A::grade(of, t) == grade) {
        constexpr Of from = A::weight_gradient_from(t);
        constexpr bool gives_w = from == of || (from == Of::result && of == Of::x);
        Pack<W> dw;
        if constexpr (gives_w) dw = take_w(t);
        add_triple<A, of, t>(sums, weight(t), dz, other, [&](auto blade, const Pack<W>& part) {
          if constexpr (from == of) add_product(dw, self.blade[blade], part);
        });
        if constexpr (from == Of::result && gives_w) {
          constexpr int c = A::triple(t).result;
          unroll<A::first(c), A::first(c + 1)>([&](auto k) {
            if constexpr (A::has_terms(Of::result, t, k)) {
              add_product(dw, dz.blade[k], sum_terms<A, Of::result, t, k>(x, y));
            }
          });
        }
        if constexpr (gives_w) give_w(t, dw);
      }
    });
    unroll<first, end>([&](auto i) { give(i, sums[i - first]); });
  });
}

// ---- Gates and norms ----------------------------------------------------------------------------

// What every kernel knows of the layer. Blade k of feature f in row n of a tensor is element
// k plane() + n features + f.
struct Layer {
  int batch, features;
  bool normed;
  float inverse_features = 1.0f / static_cast<float>(features);
  __host__ __device__ size_t plane() const { return static_cast<size_t>(batch) * features; }
};

constexpr float kEpsilon = 1e-6f;

__device__ inline float gate(float s) { return 0.5f + 0.5f * erff(s * 0.70710678f); }
// Its derivative, the normal density. The approximate exponential: two units in the last place
// where the density matters, more only far out where it is almost 0.
__device__ inline float gate_slope(float s) { return 0.39894228f * __expf(-0.5f * s * s); }

// Both gates scale the whole product: z = gate(x_0) gate(y_0) (x y).
template <int W>
struct Gates {
  Pack<W> x, y;

  __device__ __forceinline__ Gates(const Pack<W>& x_0, const Pack<W>& y_0) {
#pragma unroll
    for (int e = 0; e < W; ++e) {
      x.v[e] = gate(x_0.v[e]);
      y.v[e] = gate(y_0.v[e]);
    }
  }
  __device__ __forceinline__ Pack<W> product() const {
    Pack<W> result;
#pragma unroll
    for (int e = 0; e < W; ++e) result.v[e] = x.v[e] * y.v[e];
    return result;
  }
};

// rsqrtf is within two units in the last place.
__device__ inline float inverse_rms(float squares, const Layer& layer) {
  return rsqrtf(squares * layer.inverse_features + kEpsilon);
}

// kCount numbers that a row adds up over its features, moved 16 bytes at a time.
template <int kCount>
struct alignas(16) Sums {
  float value[(kCount + 3) / 4 * 4];
};

template <int kCount>
__device__ __forceinline__ void add_up_lanes(Sums<kCount>& sums, int lanes) {
  for (int other = lanes / 2; other > 0; other /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sums.value[i] += __shfl_xor_sync(0xffffffffu, sums.value[i], other);
    }
  }
}

constexpr int kMaxWarps = 16;  // of a block

// Adds up a row's sums, the same in all of its threads: over the lanes of each warp, then over the
// row's `warps` (a power of two; a block has one row or several). Always in the same order. One
// barrier is enough if calls take turns with two `partials`: who writes one has passed the barrier
// of the other, and so has everybody who read it.
template <int kCount>
__device__ __forceinline__ void add_up_row(Sums<kCount>& sums, Sums<kCount>* partials, int warps) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  add_up_lanes(sums, 32);
  if (lane == 0) partials[warp] = sums;
  __syncthreads();
  sums = partials[warp / warps * warps + lane % warps];
  add_up_lanes(sums, warps);
}

// sums[c] += the squares of z of grade c.
template <typename A, int W>
__device__ __forceinline__ void add_squares(const Multivectors<A, W>& z, Sums<A::kGrades>& sums) {
  unroll<0, A::kBlades>([&](auto k) {
#pragma unroll
    for (int e = 0; e < W; ++e) sums.value[A::grade(k)] += z.blade[k].v[e] * z.blade[k].v[e];
  });
}

// ---- One multivector in memory ------------------------------------------------------------------

template <typename A>
__device__ __forceinline__ Multivectors<A, 1> load(const float* from, size_t plane) {
  Multivectors<A, 1> result;
  unroll<0, A::kBlades>([&](auto k) { result.blade[k].v[0] = from[k * plane]; });
  return result;
}

template <int grade, typename A>
__device__ __forceinline__ void load_grade(Multivectors<A, 1>& to, const float* from,
                                           size_t plane) {
  unroll<A::first(grade), A::first(grade + 1)>([&](auto k) { to.blade[k].v[0] = from[k * plane]; });
}

// A feature's weights, consecutive in memory: up to 16 bytes at a time.
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

template <typename A>
__device__ __forceinline__ Multivectors<A, 1> gated_product(const Multivectors<A, 1>& x,
                                                            const Multivectors<A, 1>& y,
                                                            const Weights<A>& weights) {
  Multivectors<A, 1> z = weighted_product(x, y, weights);
  const float gates = Gates<1>(x.blade[0], y.blade[0]).product().v[0];
  unroll<0, A::kBlades>([&](auto k) { z.blade[k].v[0] *= gates; });
  return z;
}

// ---- Unfused ------------------------------------------------------------------------------------

// As a framework runs it: an operator reads its inputs and writes its result, and backward has an
// operator for each. Generously counted: eager PyTorch would take a kernel for each sign and sum,
// here it is one for a whole grade triple, 20 for the product in 3-D.

// gated = in gate(in_0): one thread a multivector.
template <typename A>
__global__ void apply_gate(const float* in, float* gated, Layer layer) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= layer.plane()) return;
  const Multivectors<A, 1> value = load<A>(in + at, layer.plane());
  const float factor = gate(value.blade[0].v[0]);
  unroll<0, A::kBlades>(
      [&](auto k) { gated[k * layer.plane() + at] = factor * value.blade[k].v[0]; });
}

// z_c = or += w <<x>_a <y>_b>_c for triple t = (a, c, b): one thread a multivector.
template <typename A, int t>
__global__ void multiply_grades(const float* x, const float* y, const float* w, float* z,
                                Layer layer) {
  constexpr auto grades = A::triple(t);
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
  load_grade<grades.x>(left, x + at, plane);
  load_grade<grades.y>(right, y + at, plane);
  unroll<A::first(grades.result), A::first(grades.result + 1)>([&](auto k) {
    const float sum = weight * sum_terms<A, Of::result, t, k>(left, right).v[0];
    z[k * plane + at] = is_first ? sum : z[k * plane + at] + sum;
  });
}

// out = z / rms(z) for the `blades` planes of one grade; a block a row. Keeps the 1 / rms for
// backward.
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
  add_up_row(squares, partials, blockDim.x / 32);
  const float inverse = inverse_rms(squares.value[0], layer);
  if (threadIdx.x == 0) inverses[blockIdx.x] = inverse;
  for (int blade = 0; blade < blades; ++blade) {
    for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
      const size_t i = blade * layer.plane() + row + f;
      out[i] = z[i] * inverse;
    }
  }
}

// dz of one grade: with r = 1 / rms(z), out = r z and dr/dz = -r^3 z / features, so
// dz = r d_out - r^3 z sum(d_out z) / features. A block a row.
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
  add_up_row(products, partials, blockDim.x / 32);
  const float r = inverses[blockIdx.x];
  const float factor = r * r * r * products.value[0] * layer.inverse_features;
  for (int blade = 0; blade < blades; ++blade) {
    for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
      const size_t i = blade * layer.plane() + row + f;
      dz[i] = r * d_out[i] - factor * z[i];
    }
  }
}

// Rows that a thread walks down in kernels where it keeps something per feature.
constexpr int kStrip = 32, kStripFeatures = 128;

// Thread i of block b: feature i of chunk b % chunks, rows of strip b / chunks.
struct StripThread {
  int feature, row, end, strip;
  __device__ explicit StripThread(const Layer& layer) {
    const int chunks = (layer.features + kStripFeatures - 1) / kStripFeatures;
    strip = blockIdx.x / chunks;
    feature = blockIdx.x % chunks * kStripFeatures + threadIdx.x;
    row = strip * kStrip;
    end = feature < layer.features ? min(layer.batch, row + kStrip) : row;
  }
};

// dx_a = or += w <dz_c y_b>, dy_b = or += w <x_a dz_c>, and dw of the strip, for triple t.
template <typename A, int t>
__global__ void multiply_grades_gradient(const float* x, const float* y, const float* w,
                                         const float* dz, float* dx, float* dy, float* partials,
                                         Layer layer) {
  constexpr auto grades = A::triple(t);
  constexpr bool is_first_of_x = t == 0 || A::triple(t == 0 ? 0 : t - 1).x != grades.x;
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
    load_grade<grades.x>(left, x + at, plane);
    load_grade<grades.y>(right, y + at, plane);
    load_grade<grades.result>(d, dz + at, plane);
    unroll<A::first(grades.x), A::first(grades.x + 1)>([&](auto i) {
      const float sum = sum_terms<A, Of::x, t, i>(d, right).v[0];
      dw += left.blade[i].v[0] * sum;
      dx[i * plane + at] = (is_first_of_x ? 0 : dx[i * plane + at]) + weight * sum;
    });
    unroll<A::first(grades.y), A::first(grades.y + 1)>([&](auto j) {
      const float sum = sum_terms<A, Of::y, t, j>(d, left).v[0];
      dy[j * plane + at] = (is_first_of_y ? 0 : dy[j * plane + at]) + weight * sum;
    });
  }
  partials[(static_cast<size_t>(thread.strip) * A::kTriples + t) * layer.features +
           thread.feature] = dw;
}

// From the gradient of in gate(in_0), in place, that of in: one thread a multivector.
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

// dw (features, triples) = the sum of `count` partials (triples, features), in their order: every
// kernel that sums dw over the batch does so in two steps, so that blocks need not wait for each
// other and the result does not depend on who is first. A block owns 32 columns; thread (x, y) adds
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

// ---- Fused product ------------------------------------------------------------------------------

// Gates and product in one kernel: x', y' and the sums of 20 kernels exist in registers only. A
// thread owns a feature and a strip of rows, so that it reads its weights once.
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

// The norm of all grades; a block a row, which it reads twice, the second time from a cache.
template <typename A>
__global__ void normalize(const float* z, float* out, Layer layer) {
  __shared__ Sums<A::kGrades> partials[kMaxWarps];
  const size_t row = static_cast<size_t>(blockIdx.x) * layer.features, plane = layer.plane();
  Sums<A::kGrades> squares = {};
  for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
    add_squares(load<A>(z + row + f, plane), squares);
  }
  add_up_row(squares, partials, blockDim.x / 32);
  for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
    unroll<0, A::kBlades>([&](auto k) {
      const size_t i = k * plane + row + f;
      out[i] = z[i] * inverse_rms(squares.value[A::grade(k)], layer);
    });
  }
}

// ---- One launch ---------------------------------------------------------------------------------

constexpr int kRowThreads = 256;

// z need not be written to be normalized: it can be computed again. A block owns a row, walks over
// its features once for the sums and once for the result; the second time x and y come from the L2
// cache, and memory sees each byte once. Works for rows of any length. But a multivector costs its
// product twice, and its weights, which are reread for every row, come through the L1 cache.
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
      if (walk == 1) add_up_row(sums, partials[turn], blockDim.x / 32);
    }
  }
}

// The sums that dz needs, of a row: per grade of z^2, and of d_out z.
template <typename A>
using GradientSums = Sums<2 * A::kGrades>;

// With P the product before its gates, z = g P: adds to the sums.
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

// From d_out, the gradients of P (returned) and of g: dz = r d_out - r^3 z sum(d_out z) / features
// as in normalize_grade_gradient, dP = g dz, dg = sum of P dz.
template <typename A, int W>
__device__ __forceinline__ Multivectors<A, W> gradient_of_product(const Multivectors<A, W>& P,
                                                                  const Pack<W>& g,
                                                                  const Multivectors<A, W>& d_out,
                                                                  const GradientSums<A>& sums,
                                                                  const Layer& layer, Pack<W>& dg) {
  Multivectors<A, W> dP;
  dg = empty_sum<W>();
  unroll<0, A::kGrades>([&](auto c) {
    float r = 1, factor = 0;
    if (layer.normed) {
      r = inverse_rms(sums.value[c], layer);
      factor = r * r * r * sums.value[A::kGrades + c] * layer.inverse_features;
    }
    unroll<A::first(c), A::first(c + 1)>([&](auto k) {
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

// What dg adds to the scalar part of dx, as g = gate(x_0) gate(y_0); swapped, of dy.
template <int W>
__device__ __forceinline__ Pack<W> through_gate(const Pack<W>& dg, const Pack<W>& x_0,
                                                const Pack<W>& other_gate) {
  Pack<W> result;
#pragma unroll
  for (int e = 0; e < W; ++e) result.v[e] = dg.v[e] * gate_slope(x_0.v[e]) * other_gate.v[e];
  return result;
}

// The same for backward: the first walk for both sums at once, the second for dx, dy and dw, which
// the block adds to its own partial (triples, features): a thread meets nobody else there.
template <typename A>
__global__ void __launch_bounds__(kRowThreads)
    backward_one_launch(const float* x, const float* y, const float* w, const float* d_out,
                        float* dx, float* dy, float* dw_partials, Layer layer) {
  __shared__ GradientSums<A> partials[2][kMaxWarps];
  const size_t plane = layer.plane();
  float* dw = dw_partials + static_cast<size_t>(blockIdx.x) * A::kTriples * layer.features;
  int turn = 0;
  for (int n = blockIdx.x; n < layer.batch; n += gridDim.x, turn ^= 1) {
    const size_t row = static_cast<size_t>(n) * layer.features;
    GradientSums<A> sums = {};
    for (int walk = layer.normed ? 1 : 2; walk <= 2; ++walk) {
      for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
        const Multivectors<A, 1> left = load<A>(x + row + f, plane);
        const Multivectors<A, 1> right = load<A>(y + row + f, plane);
        const Multivectors<A, 1> d = load<A>(d_out + row + f, plane);
        const Weights<A> weights(w + static_cast<size_t>(f) * A::kTriples);
        const Gates<1> gates(left.blade[0], right.blade[0]);
        const Multivectors<A, 1> P = weighted_product(left, right, weights);
        if (walk == 1) {
          add_gradient_sums(P, gates.product(), d, sums);
          continue;
        }
        Pack<1> dg;
        const Multivectors<A, 1> dP = gradient_of_product(P, gates.product(), d, sums, layer, dg);
        const auto take_w = [&](auto t) {
          const float sum = dw[static_cast<size_t>(t) * layer.features + f];
          return Pack<1>{{n == static_cast<int>(blockIdx.x) ? 0 : sum}};
        };
        const auto give_w = [&](auto t, const Pack<1>& sum) {
          dw[static_cast<size_t>(t) * layer.features + f] = sum.v[0];
        };
        const auto give_x = [&](auto i, Pack<1> value) {
          if (i == 0) add(value, through_gate(dg, left.blade[0], gates.y));
          dx[i * plane + row + f] = value.v[0];
        };
        const auto give_y = [&](auto j, Pack<1> value) {
          if (j == 0) add(value, through_gate(dg, right.blade[0], gates.x));
          dy[j * plane + row + f] = value.v[0];
        };
        gradients<Of::x>(left, right, dP, weights, give_x, take_w, give_w);
        gradients<Of::y>(left, right, dP, weights, give_y, take_w, give_w);
      }
      if (walk == 1) add_up_row(sums, partials[turn], blockDim.x / 32);
    }
  }
}

// ---- Row on chip --------------------------------------------------------------------------------

// How a block works in the kernels below: `threads` of them, `per_row` (a power of two, at least a
// warp) for each row that it has at a time; thread i of a row owns features W i to W i + W - 1.
struct RowsOnChip {
  int threads, per_row;
  __host__ __device__ int rows() const { return threads / per_row; }
};

// A block stays, and takes one group of rows after the other. Sized for F = 1024 features on an
// H200, where a multiprocessor is given 33 bytes per nanosecond, so that it has to have about
// 40 KB on the way at any time:
constexpr int kMaxThreads = 512;  // 128 registers each: all that a multiprocessor has

// W features per thread: as many as the registers hold, in accesses of up to 16 bytes. Forward
// needs x, y and z at a time, 3 W blades(); backward about as much, and dw for all triples.
template <typename A>
constexpr int kForwardWidth = A::kBlades <= 8    ? 4
                              : A::kBlades == 16 ? 2
                                                 : 1;
template <typename A>
constexpr int kBackwardWidth = A::kBlades <= 4   ? 4
                               : A::kBlades == 8 ? 2
                                                 : 1;
// Whether the next rows' inputs are fetched into shared memory while these are in work. With 16
// blades they do not fit there beside the weights.
template <typename A>
constexpr bool kPrefetch = A::kBlades <= 8;

// Shared memory: for each pack of features its weights; then, if inputs are prefetched, kPlanes
// packs for each thread, which it fills, reads and refills alone. What a thread reads lies side by
// side, at constant offsets from one address: addresses that depend on a stride would each take a
// register. And from thread to thread it is an odd number of packs, so that neighbouring threads
// meet in no bank.
template <typename A, int W, int kPlanes>
struct OnChipMemory {
  static constexpr int kWeightStride = W * (A::kTriples | 1);
  static constexpr int kInputStride = kPlanes > 0 ? W*(kPlanes | 1) : 0;
  static size_t bytes(RowsOnChip shape) {
    return sizeof(float) * (static_cast<size_t>(shape.per_row) * kWeightStride +
                            static_cast<size_t>(shape.threads) * kInputStride);
  }

  float* all_weights;
  const float* weights;  // of this thread
  float* inputs;         // of this thread
  __device__ OnChipMemory(float* shared, RowsOnChip shape)
      : all_weights(shared),
        weights(shared + threadIdx.x % shape.per_row * kWeightStride),
        inputs(shared + shape.per_row * kWeightStride + threadIdx.x * kInputStride) {}

  // Starts the copies of all weights, a float at a time: they change places.
  __device__ void fetch_weights(const float* w, RowsOnChip shape, int features) const {
    for (int i = threadIdx.x; i < features * A::kTriples; i += shape.threads) {
      const int feature = i / A::kTriples, t = i % A::kTriples;
      copy_async<sizeof(float)>(all_weights + feature / W * kWeightStride + t * W + feature % W,
                                w + i, true);
    }
  }
  template <typename Index>
  __device__ __forceinline__ Pack<W> operator()(Index t) const {
    return *reinterpret_cast<const Pack<W>*>(weights + t * W);
  }
  // Starts the copies of a thread's part of a multivector's planes, as number first, first + 1...
  template <int first>
  __device__ __forceinline__ void fetch(const float* from, size_t plane, bool inside) const {
#pragma unroll
    for (int k = 0; k < A::kBlades; ++k, from += plane) {
      copy_async<sizeof(Pack<W>)>(inputs + (first + k) * W, from, inside);
    }
  }
  template <int first>
  __device__ __forceinline__ Multivectors<A, W> take() const {
    Multivectors<A, W> result;
    unroll<0, A::kBlades>([&](auto k) {
      result.blade[k] = *reinterpret_cast<const Pack<W>*>(inputs + (first + k) * W);
    });
    return result;
  }
};

template <typename A, int W>
__device__ __forceinline__ Multivectors<A, W> load_packs(const float* from, size_t plane,
                                                         bool inside) {
  Multivectors<A, W> result = {};
  if (inside) {
#pragma unroll
    for (int k = 0; k < A::kBlades; ++k, from += plane) {
      result.blade[k] = *reinterpret_cast<const Pack<W>*>(from);
    }
  }
  return result;
}

// Three things are better than above. z stays in registers while its row's squares are added up, so
// that nothing is read or computed twice. The weights are transposed into shared memory once, and
// serve all rows that the block ever has. And as soon as a thread has taken its part of x and y
// into registers it orders the next row's into the same place (cp.async): memory works while the
// block multiplies, reduces and waits at the barrier.
template <typename A, int W, bool kFetchAhead>
__global__ void __launch_bounds__(kMaxThreads, 1)
    forward_on_chip(const float* x, const float* y, const float* w, float* out, Layer layer,
                    RowsOnChip shape) {
  using Memory = OnChipMemory<A, W, kFetchAhead ? 2 * A::kBlades : 0>;
  extern __shared__ __align__(16) float shared[];
  __shared__ Sums<A::kGrades> partials[2][kMaxWarps];
  const Memory memory(shared, shape);
  const size_t plane = layer.plane();
  const int feature = threadIdx.x % shape.per_row * W, row = threadIdx.x / shape.per_row;
  const int step = gridDim.x * shape.rows();
  const auto at = [&](int n) { return static_cast<size_t>(n) * layer.features + feature; };
  const auto inside = [&](int n) { return n < layer.batch && feature < layer.features; };
  const auto fetch = [&](int n) {
    if constexpr (kFetchAhead) {
      memory.template fetch<0>(x + at(n), plane, inside(n));
      memory.template fetch<A::kBlades>(y + at(n), plane, inside(n));
    }
    copy_async_commit();
  };

  int n = blockIdx.x * shape.rows() + row;
  memory.fetch_weights(w, shape, layer.features);
  fetch(n);
  copy_async_wait<0>();
  __syncthreads();
  int turn = 0;
  for (int first = blockIdx.x * shape.rows(); first < layer.batch;
       first += step, n += step, turn ^= 1) {
    Multivectors<A, W> left, right;
    if constexpr (kFetchAhead) {
      copy_async_wait<0>();
      __syncwarp();  // for the compiler: not before the copy has landed,
      left = memory.template take<0>();
      right = memory.template take<A::kBlades>();
      __syncwarp();  // and not after the next one has started
      if (first + step < layer.batch) fetch(n + step);
    } else {
      left = load_packs<A, W>(x + at(n), plane, inside(n));
      right = load_packs<A, W>(y + at(n), plane, inside(n));
    }
    Multivectors<A, W> z = weighted_product(left, right, memory);
    const Pack<W> gates = Gates<W>(left.blade[0], right.blade[0]).product();
    unroll<0, A::kBlades>([&](auto k) {
#pragma unroll
      for (int e = 0; e < W; ++e) z.blade[k].v[e] *= gates.v[e];
    });
    if (layer.normed) {
      Sums<A::kGrades> sums = {};
      if (inside(n)) add_squares(z, sums);  // outside, the weights are what was there
      add_up_row(sums, partials[turn], shape.per_row / 32);
      unroll<0, A::kGrades>([&](auto c) {
        const float r = inverse_rms(sums.value[c], layer);
        unroll<A::first(c), A::first(c + 1)>([&](auto k) {
#pragma unroll
          for (int e = 0; e < W; ++e) z.blade[k].v[e] *= r;
        });
      });
    }
    if (inside(n)) {
      float* to = out + at(n);
#pragma unroll
      for (int k = 0; k < A::kBlades; ++k, to += plane)
        *reinterpret_cast<Pack<W>*>(to) = z.blade[k];
    }
  }
}

// Backward with the same three. One reduction serves both sums of a row. A thread's features are
// the same for all of its rows, so that dw can stay in registers until the end. They are scarce
// now: x and d_out are taken into registers for good, and the next row's are ordered before the
// sums have been added up, so that memory has work all the time. There is no room for y as well: it
// is taken once for the sums and once more for the gradients, and its next row is ordered then.
template <typename A, int W, bool kFetchAhead>
__global__ void __launch_bounds__(kMaxThreads, 1)
    backward_on_chip(const float* x, const float* y, const float* w, const float* d_out, float* dx,
                     float* dy, float* dw_partials, Layer layer, RowsOnChip shape) {
  using Memory = OnChipMemory<A, W, kFetchAhead ? 3 * A::kBlades : 0>;
  extern __shared__ __align__(16) float shared[];
  __shared__ GradientSums<A> partials[2][kMaxWarps];
  const Memory memory(shared, shape);
  const size_t plane = layer.plane();
  const int feature = threadIdx.x % shape.per_row * W, row = threadIdx.x / shape.per_row;
  const int step = gridDim.x * shape.rows();
  const auto at = [&](int n) { return static_cast<size_t>(n) * layer.features + feature; };
  const auto inside = [&](int n) { return n < layer.batch && feature < layer.features; };
  const auto fetch_x_and_d_out = [&](int n) {
    if constexpr (kFetchAhead) {
      memory.template fetch<0>(x + at(n), plane, inside(n));
      memory.template fetch<2 * A::kBlades>(d_out + at(n), plane, inside(n));
    }
  };
  const auto fetch_y = [&](int n) {
    if constexpr (kFetchAhead) {
      memory.template fetch<A::kBlades>(y + at(n), plane, inside(n));
    }
    copy_async_commit();
  };

  int n = blockIdx.x * shape.rows() + row;
  memory.fetch_weights(w, shape, layer.features);
  fetch_x_and_d_out(n);
  fetch_y(n);
  copy_async_wait<0>();
  __syncthreads();
  Pack<W> dw[A::kTriples] = {};
  int turn = 0;
  for (int first = blockIdx.x * shape.rows(); first < layer.batch;
       first += step, n += step, turn ^= 1) {
    Multivectors<A, W> left, right, d;
    if constexpr (kFetchAhead) {
      copy_async_wait<0>();
      __syncwarp();
      left = memory.template take<0>();
      right = memory.template take<A::kBlades>();
    } else {
      left = load_packs<A, W>(x + at(n), plane, inside(n));
      right = load_packs<A, W>(y + at(n), plane, inside(n));
      d = load_packs<A, W>(d_out + at(n), plane, inside(n));
    }
    const Multivectors<A, W> P = weighted_product(left, right, memory);
    const Gates<W> gates(left.blade[0], right.blade[0]);
    if constexpr (kFetchAhead) {
      d = memory.template take<2 * A::kBlades>();
      __syncwarp();
      if (first + step < layer.batch) fetch_x_and_d_out(n + step);
    }
    GradientSums<A> sums = {};
    if (layer.normed) {
      if (inside(n)) add_gradient_sums(P, gates.product(), d, sums);
      add_up_row(sums, partials[turn], shape.per_row / 32);
    }
    Pack<W> dg;
    const Multivectors<A, W> dP = gradient_of_product(P, gates.product(), d, sums, layer, dg);
    if constexpr (kFetchAhead) {
      right = memory.template take<A::kBlades>();
      __syncwarp();
      if (first + step < layer.batch) fetch_y(n + step);
    }
    const Pack<W> dx_through_gate = through_gate(dg, left.blade[0], gates.y);
    const Pack<W> dy_through_gate = through_gate(dg, right.blade[0], gates.x);
    const auto take_w = [&](auto t) { return dw[t]; };
    const auto give_w = [&](auto t, const Pack<W>& sum) { dw[t] = sum; };
    const auto give_x = [&, to = dx + at(n)](auto i, Pack<W> value) mutable {
      if (i == 0) add(value, dx_through_gate);
      if (inside(n)) *reinterpret_cast<Pack<W>*>(to) = value;
      to += plane;
    };
    const auto give_y = [&, to = dy + at(n)](auto j, Pack<W> value) mutable {
      if (j == 0) add(value, dy_through_gate);
      if (inside(n)) *reinterpret_cast<Pack<W>*>(to) = value;
      to += plane;
    };
    gradients<Of::x>(left, right, dP, memory, give_x, take_w, give_w);
    __syncwarp();  // for the compiler: do not keep all weights in registers from above
    gradients<Of::y>(left, right, dP, memory, give_y, take_w, give_w);
  }
  if (feature < layer.features) {
    const size_t partial = static_cast<size_t>(blockIdx.x) * shape.rows() + row;
    unroll<0, A::kTriples>([&](auto t) {
      *reinterpret_cast<Pack<W>*>(dw_partials + (partial * A::kTriples + t) * layer.features +
                                  feature) = dw[t];
    });
  }
}

// ---- Hopper: rows streamed ----------------------------------------------------------------------

// The same idea as above, but no thread fetches anything. One copy of the copy engine brings a
// whole plane of a block's rows, up to 4 KB, so that a warp orders everything that a stage holds
// with one instruction; and several stages are on their way instead of one. What the other kernels
// spent on that, registers and instructions, is free for the weights: a thread has the same
// features in all of its rows, and keeps their weights in registers, too.
//
// A block takes a whole multiprocessor, so that forward can be launched early: the next launch's
// blocks take the places of this one's, one for one. The kernels above have room for several blocks
// on a multiprocessor, and lose by it: the next ones crowd where a place gets free first.
//
// Backward that works for up to 4 blades. In 3-D a feature has 20 weights, 20 sums for dw and three
// multivectors of 8: with them in registers there is room for half of the threads, which are too
// few to hide each other's waiting. (It was tried, with rows shared by a cluster of two blocks, and
// was slower than "row on chip".)

// Bytes of shared memory for stages, beside what is static.
constexpr size_t kStreamBytes = 208 << 10;

// kPlanes planes of a block's rows, W features for each of its kMaxThreads threads.
template <int W, int kPlanes>
struct Streamed {
  static constexpr int kElements = kMaxThreads * W;
  using Stage = float[kPlanes][kElements];
  static constexpr int kStages = kStreamBytes / sizeof(Stage);
  static_assert(kStages >= 2);
};

#if HOPPER_CODE
// W features' weights, in registers.
template <typename A, int W>
struct RegisterWeights {
  Pack<W> packs[A::kTriples];
  __device__ __forceinline__ RegisterWeights(const float* w, int feature) {
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const Weights<A> weights(w + static_cast<size_t>(feature + e) * A::kTriples);
      unroll<0, A::kTriples>([&](auto t) { packs[t].v[e] = weights(t).v[0]; });
    }
  }
  template <typename Index>
  __device__ __forceinline__ Pack<W> operator()(Index) const {
    return packs[Index::value];
  }
};

// A thread's multivectors in a stage.
template <typename A, int W, int kElements>
__device__ __forceinline__ Multivectors<A, W> take(const float (*planes)[kElements], int at) {
  Multivectors<A, W> result;
  unroll<0, A::kBlades>(
      [&](auto k) { result.blade[k] = *reinterpret_cast<const Pack<W>*>(&planes[k][at]); });
  return result;
}
#endif

// Rows per block as in "row on chip": thread i of a row owns features W i to W i + W - 1.
template <typename A, int W>
__global__ void __launch_bounds__(kMaxThreads, 1)
    forward_streamed(const float* x, const float* y, const float* w, float* out, Layer layer,
                     RowsOnChip shape) {
#if HOPPER_CODE
  using Stream = Streamed<W, 2 * A::kBlades>;
  constexpr int kStages = Stream::kStages;
  extern __shared__ __align__(128) float streamed[];
  auto* stages = reinterpret_cast<typename Stream::Stage*>(streamed);
  __shared__ Sums<A::kGrades> partials[2][kMaxWarps];
  __shared__ Barrier full[kStages];
  const size_t plane = layer.plane();
  const int rows = shape.rows(), groups = (layer.batch + rows - 1) / rows;
  const int row = threadIdx.x / shape.per_row, feature = threadIdx.x % shape.per_row * W;
  const int at = row * layer.features + feature;
  const auto fetch = [&](int group, int s) {  // called by the first warp
    const int n = group * rows, lane = threadIdx.x;
    const int bytes = min(rows, layer.batch - n) * layer.features * static_cast<int>(sizeof(float));
    if (lane == 0) barrier_arrive_expect(&full[s], 2 * A::kBlades * bytes);
    __syncwarp();
    if (lane < 2 * A::kBlades) {
      const float* from = lane < A::kBlades ? x + lane * plane : y + (lane - A::kBlades) * plane;
      bulk_load(stages[s][lane], from + static_cast<size_t>(n) * layer.features, bytes, &full[s]);
    }
  };

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) barrier_init(&full[s], 1);
    barrier_init_fence();
  }
  __syncthreads();
  start_next_kernel();
  wait_for_previous_kernel();
  if (threadIdx.x < 32) {
    for (int s = 0; s < kStages; ++s) {
      const int group = blockIdx.x + s * gridDim.x;
      if (group < groups) fetch(group, s);
    }
  }
  // Threads beyond the row's end compute as well, with zeros and somebody's weights.
  const RegisterWeights<A, W> weights(w, feature < layer.features ? feature : 0);
  Ring<kStages> ring;
  int turn = 0;
  for (int group = blockIdx.x; group < groups; group += gridDim.x, ring.advance(), turn ^= 1) {
    const bool inside = group * rows + row < layer.batch && feature < layer.features;
    Multivectors<A, W> z = {};
    Sums<A::kGrades> sums = {};
    barrier_wait(&full[ring.stage], ring.parity);
    if (inside) {
      const auto left = take<A, W>(stages[ring.stage], at);
      const auto right = take<A, W>(stages[ring.stage] + A::kBlades, at);
      z = weighted_product(left, right, weights);
      const Pack<W> gates = Gates<W>(left.blade[0], right.blade[0]).product();
      unroll<0, A::kBlades>([&](auto k) {
#pragma unroll
        for (int e = 0; e < W; ++e) z.blade[k].v[e] *= gates.v[e];
      });
      add_squares(z, sums);
    }
    // After its barrier all threads have taken their part of the stage.
    add_up_row(sums, partials[turn], shape.per_row / 32);
    const int next = group + kStages * gridDim.x;
    if (threadIdx.x < 32 && next < groups) fetch(next, ring.stage);
    if (inside) {
      float* to = out + static_cast<size_t>(group) * rows * layer.features + at;
      unroll<0, A::kGrades>([&](auto c) {
        const float r = layer.normed ? inverse_rms(sums.value[c], layer) : 1;
        unroll<A::first(c), A::first(c + 1)>([&](auto k) {
#pragma unroll
          for (int e = 0; e < W; ++e) z.blade[k].v[e] *= r;
          *reinterpret_cast<Pack<W>*>(to + k * plane) = z.blade[k];
        });
      });
    }
  }
#endif
}

// dx, dy, and for each row of a block partial sums of dw, as backward_on_chip.
template <typename A, int W>
__global__ void __launch_bounds__(kMaxThreads, 1)
    backward_streamed(const float* x, const float* y, const float* w, const float* d_out, float* dx,
                      float* dy, float* dw_partials, Layer layer, RowsOnChip shape) {
#if HOPPER_CODE
  using Stream = Streamed<W, 3 * A::kBlades>;
  constexpr int kStages = Stream::kStages;
  extern __shared__ __align__(128) float streamed[];
  auto* stages = reinterpret_cast<typename Stream::Stage*>(streamed);
  __shared__ GradientSums<A> partials[2][kMaxWarps];
  __shared__ Barrier full[kStages];
  const size_t plane = layer.plane();
  const int rows = shape.rows(), groups = (layer.batch + rows - 1) / rows;
  const int row = threadIdx.x / shape.per_row, feature = threadIdx.x % shape.per_row * W;
  const int at = row * layer.features + feature;
  const auto fetch = [&](int group, int s) {
    const int n = group * rows, lane = threadIdx.x;
    const int bytes = min(rows, layer.batch - n) * layer.features * static_cast<int>(sizeof(float));
    if (lane == 0) barrier_arrive_expect(&full[s], 3 * A::kBlades * bytes);
    __syncwarp();
    if (lane < 3 * A::kBlades) {
      const float* tensor = lane < A::kBlades ? x : lane < 2 * A::kBlades ? y : d_out;
      const float* from =
          tensor + lane % A::kBlades * plane + static_cast<size_t>(n) * layer.features;
      bulk_load(stages[s][lane], from, bytes, &full[s]);
    }
  };

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) barrier_init(&full[s], 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int s = 0; s < kStages; ++s) {
      const int group = blockIdx.x + s * gridDim.x;
      if (group < groups) fetch(group, s);
    }
  }
  const RegisterWeights<A, W> weights(w, feature < layer.features ? feature : 0);

  Pack<W> dw[A::kTriples] = {};
  Ring<kStages> ring;
  int turn = 0;
  for (int group = blockIdx.x; group < groups; group += gridDim.x, ring.advance(), turn ^= 1) {
    const bool inside = group * rows + row < layer.batch && feature < layer.features;
    Multivectors<A, W> left = {}, right = {}, d = {};
    barrier_wait(&full[ring.stage], ring.parity);
    if (inside) {
      left = take<A, W>(stages[ring.stage], at);
      right = take<A, W>(stages[ring.stage] + A::kBlades, at);
      d = take<A, W>(stages[ring.stage] + 2 * A::kBlades, at);
    }
    const Multivectors<A, W> P = weighted_product(left, right, weights);
    const Gates<W> gates(left.blade[0], right.blade[0]);
    GradientSums<A> sums = {};
    add_gradient_sums(P, gates.product(), d, sums);
    add_up_row(sums, partials[turn], shape.per_row / 32);
    const int next = group + kStages * gridDim.x;
    if (threadIdx.x < 32 && next < groups) fetch(next, ring.stage);

    Pack<W> dg;
    const Multivectors<A, W> dP = gradient_of_product(P, gates.product(), d, sums, layer, dg);
    const Pack<W> dx_through_gate = through_gate(dg, left.blade[0], gates.y);
    const Pack<W> dy_through_gate = through_gate(dg, right.blade[0], gates.x);
    const size_t element = (static_cast<size_t>(group) * rows + row) * layer.features + feature;
    const auto take_w = [&](auto t) { return dw[t]; };
    const auto give_w = [&](auto t, const Pack<W>& sum) { dw[t] = sum; };
    const auto give_x = [&, to = dx + element](auto i, Pack<W> value) mutable {
      if (i == 0) add(value, dx_through_gate);
      if (inside) *reinterpret_cast<Pack<W>*>(to) = value;
      to += plane;
    };
    const auto give_y = [&, to = dy + element](auto j, Pack<W> value) mutable {
      if (j == 0) add(value, dy_through_gate);
      if (inside) *reinterpret_cast<Pack<W>*>(to) = value;
      to += plane;
    };
    gradients<Of::x>(left, right, dP, weights, give_x, take_w, give_w);
    gradients<Of::y>(left, right, dP, weights, give_y, take_w, give_w);
  }
  if (feature < layer.features) {
    const size_t partial = static_cast<size_t>(blockIdx.x) * rows + row;
    unroll<0, A::kTriples>([&](auto t) {
      *reinterpret_cast<Pack<W>*>(dw_partials + (partial * A::kTriples + t) * layer.features +
                                  feature) = dw[t];
    });
  }
#endif
}

// -------------------------------------------------------------------------------------------------

// The grid of a kernel whose blocks stay.
template <typename Function>
int resident_blocks(Function* function, int threads, size_t shared_bytes, const Device& device) {
  int per_sm = 0;
  CUDA_CHECK(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, function, threads, shared_bytes));
  return std::max(1, per_sm) * device.sms;
}

// Shape of an on-chip kernel's blocks; none if a row or the weights are too large. Small batches
// get small blocks, so that every multiprocessor has one.
template <typename A, int W, int kPlanes>
std::optional<RowsOnChip> fit_on_chip(const Layer& layer, const Device& device) {
  constexpr size_t kStaticBytes = sizeof(GradientSums<A>[2][kMaxWarps]);
  const int packs = (layer.features + W - 1) / W;
  if (packs > kMaxThreads) return std::nullopt;
  RowsOnChip shape{kMaxThreads, 32};
  while (shape.per_row < packs) shape.per_row *= 2;
  const auto fits = [&] {
    return OnChipMemory<A, W, kPlanes>::bytes(shape) + kStaticBytes <=
           static_cast<size_t>(device.shared_bytes);
  };
  const auto too_few = [&] { return (layer.batch - 1) / shape.rows() + 1 < device.sms; };
  while (shape.threads > std::max(shape.per_row, 128) && (!fits() || too_few())) shape.threads /= 2;
  return fits() ? std::optional(shape) : std::nullopt;
}

// The tensors of one problem.
template <typename A>
struct Tensors {
  Tensors(Problem& problem, const Layer& layer)
      : problem(problem),
        layer(layer),
        elements(A::kBlades * layer.plane()),
        // Of variance 1, as after a norm.
        x(problem.input<float>(elements, sqrt(3.0))),
        y(problem.input<float>(elements, sqrt(3.0))),
        w(problem.input<float>(static_cast<size_t>(layer.features) * A::kTriples)),
        out(problem.output<float>(elements)),
        expected(problem.reference(elements)) {}

  double bytes() const { return x.bytes() + y.bytes() + w.bytes() + out.bytes(); }
  int multivector_blocks() const { return static_cast<int>((layer.plane() + 255) / 256); }
  int strips() const { return (layer.batch + kStrip - 1) / kStrip; }
  int strip_blocks() const {
    return strips() * ((layer.features + kStripFeatures - 1) / kStripFeatures);
  }

  Problem& problem;
  Layer layer;
  size_t elements;
  Buffer<float> x, y, w, out;
  Buffer<double> expected;
};

// What backward adds to them.
template <typename A>
struct Gradients {
  explicit Gradients(const Tensors<A>& of)
      : d_out(of.problem.template input<float>(of.elements)),
        dx(of.problem.template output<float>(of.elements)),
        dy(of.problem.template output<float>(of.elements)),
        dw(of.problem.template output<float>(of.w.size())),
        expected_dx(of.problem.reference(of.elements)),
        expected_dy(of.problem.reference(of.elements)),
        expected_dw(of.problem.reference(of.w.size())) {}

  double bytes() const { return d_out.bytes() + dx.bytes() + dy.bytes() + dw.bytes(); }
  int sum_blocks() const { return static_cast<int>((dw.size() + 31) / 32); }

  Buffer<float> d_out, dx, dy, dw;
  Buffer<double> expected_dx, expected_dy, expected_dw;
};

// x', y' and z, which backward needs again; without a norm z is out.
template <typename A>
struct Unfused {
  explicit Unfused(const Tensors<A>& of)
      : of(of),
        x(of.problem.template output<float>(of.elements)),
        y(of.problem.template output<float>(of.elements)),
        z(of.layer.normed ? of.problem.template output<float>(of.elements) : of.out),
        inverses(of.problem.template output<float>(static_cast<size_t>(of.layer.batch) *
                                                   (of.layer.normed ? A::kGrades : 1))) {}

  double bytes() const {
    return x.bytes() + y.bytes() + (of.layer.normed ? z.bytes() + inverses.bytes() : 0);
  }

  template <int... t>
  void multiply(std::integer_sequence<int, t...>) const {
    const int blocks = of.multivector_blocks();
    ((multiply_grades<A, t><<<blocks, 256>>>(x, y, of.w, z, of.layer)), ...);
  }

  void forward() const {
    const int blocks = of.multivector_blocks();
    const Layer& layer = of.layer;
    apply_gate<A><<<blocks, 256>>>(of.x, x, layer);
    apply_gate<A><<<blocks, 256>>>(of.y, y, layer);
    multiply(std::make_integer_sequence<int, A::kTriples>());
    if (!layer.normed) return;
    for (int c = 0; c < A::kGrades; ++c) {
      const size_t start = A::kTables.first[c] * layer.plane();
      normalize_grade<<<layer.batch, 256>>>(z + start, of.out + start,
                                            inverses + static_cast<size_t>(c) * layer.batch,
                                            A::kTables.first[c + 1] - A::kTables.first[c], layer);
    }
  }

  Tensors<A> of;
  Buffer<float> x, y, z, inverses;
};

// What backward needs besides: dz, and dw of each strip. dx' is written where dx will be.
template <typename A>
struct UnfusedBackward {
  UnfusedBackward(const Tensors<A>& of, const Gradients<A>& gradients)
      : forward(of),
        gradients(gradients),
        dz(of.layer.normed ? of.problem.template output<float>(of.elements) : gradients.d_out),
        partials(of.problem.template output<float>(of.strips() * of.w.size())) {}

  double bytes() const {
    return forward.bytes() + partials.bytes() + (forward.of.layer.normed ? dz.bytes() : 0);
  }

  template <int... t>
  void multiply(std::integer_sequence<int, t...>) const {
    const int blocks = forward.of.strip_blocks();
    ((multiply_grades_gradient<A, t><<<blocks, kStripFeatures>>>(forward.x, forward.y, forward.of.w,
                                                                 dz, gradients.dx, gradients.dy,
                                                                 partials, forward.of.layer)),
     ...);
  }

  void backward() const {
    const Buffer<float>&d_out = gradients.d_out, &dx = gradients.dx, &dy = gradients.dy;
    const Layer& layer = forward.of.layer;
    for (int c = 0; layer.normed && c < A::kGrades; ++c) {
      const size_t start = A::kTables.first[c] * layer.plane();
      normalize_grade_gradient<<<layer.batch, 256>>>(
          forward.z + start, d_out + start, forward.inverses + static_cast<size_t>(c) * layer.batch,
          dz + start, A::kTables.first[c + 1] - A::kTables.first[c], layer);
    }
    multiply(std::make_integer_sequence<int, A::kTriples>());
    const int blocks = forward.of.multivector_blocks();
    apply_gate_gradient<A><<<blocks, 256>>>(forward.of.x, dx, layer);
    apply_gate_gradient<A><<<blocks, 256>>>(forward.of.y, dy, layer);
    sum_partials<<<gradients.sum_blocks(), dim3(32, kSumRows)>>>(
        partials, gradients.dw, forward.of.strips(), A::kTriples, layer.features);
  }

  Unfused<A> forward;
  Gradients<A> gradients;
  Buffer<float> dz, partials;
};

// The launches of a row of the table: memory besides inputs and outputs, and which kernel's
// resources to record. Without `run` the shape is too large for it.
struct Launch {
  std::function<void()> run;
  double bytes = 0;
  std::function<void(Kernel&)> describe;
};

template <typename A>
Launch forward_once(const Tensors<A>& of, const Device& device) {
  const int resident = resident_blocks(forward_one_launch<A>, kRowThreads, 0, device);
  const int blocks = std::min(of.layer.batch, resident);
  const auto run = [=] {
    forward_one_launch<A><<<blocks, kRowThreads>>>(of.x, of.y, of.w, of.out, of.layer);
  };
  return {run, 0, [](Kernel& row) { row.resources(forward_one_launch<A>, kRowThreads); }};
}

template <typename A>
Launch backward_once(const Tensors<A>& of, const Gradients<A>& d, const Device& device) {
  const int resident = resident_blocks(backward_one_launch<A>, kRowThreads, 0, device);
  const int blocks = std::min(of.layer.batch, resident);
  const auto partials = of.problem.template output<float>(blocks * of.w.size());
  const auto run = [=] {
    backward_one_launch<A>
        <<<blocks, kRowThreads>>>(of.x, of.y, of.w, d.d_out, d.dx, d.dy, partials, of.layer);
    sum_partials<<<d.sum_blocks(), dim3(32, kSumRows)>>>(partials, d.dw, blocks, A::kTriples,
                                                         of.layer.features);
  };
  return {run, partials.bytes(),
          [](Kernel& row) { row.resources(backward_one_launch<A>, kRowThreads); }};
}

template <typename A, int W>
Launch forward_on_chip_by(const Tensors<A>& of, const Device& device) {
  constexpr bool kAhead = kPrefetch<A>;
  constexpr int kPlanes = kAhead ? 2 * A::kBlades : 0;
  const std::optional<RowsOnChip> fitting = fit_on_chip<A, W, kPlanes>(of.layer, device);
  if (!fitting) return {};
  const RowsOnChip shape = *fitting;
  const int bytes = static_cast<int>(OnChipMemory<A, W, kPlanes>::bytes(shape));
  const auto kernel = forward_on_chip<A, W, kAhead>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int groups = (of.layer.batch - 1) / shape.rows() + 1;
  const int blocks = std::min(groups, resident_blocks(kernel, shape.threads, bytes, device));
  const auto run = [=] {
    forward_on_chip<A, W, kAhead>
        <<<blocks, shape.threads, bytes>>>(of.x, of.y, of.w, of.out, of.layer, shape);
  };
  return {run, 0, [=](Kernel& row) { row.resources(kernel, shape.threads, bytes); }};
}

template <typename A, int W>
Launch backward_on_chip_by(const Tensors<A>& of, const Gradients<A>& d, const Device& device) {
  constexpr bool kAhead = kPrefetch<A>;
  constexpr int kPlanes = kAhead ? 3 * A::kBlades : 0;
  const std::optional<RowsOnChip> fitting = fit_on_chip<A, W, kPlanes>(of.layer, device);
  if (!fitting) return {};
  const RowsOnChip shape = *fitting;
  const int bytes = static_cast<int>(OnChipMemory<A, W, kPlanes>::bytes(shape));
  const auto kernel = backward_on_chip<A, W, kAhead>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int groups = (of.layer.batch - 1) / shape.rows() + 1;
  const int blocks = std::min(groups, resident_blocks(kernel, shape.threads, bytes, device));
  const int count = blocks * shape.rows();
  const auto partials = of.problem.template output<float>(count * of.w.size());
  const auto run = [=] {
    backward_on_chip<A, W, kAhead><<<blocks, shape.threads, bytes>>>(
        of.x, of.y, of.w, d.d_out, d.dx, d.dy, partials, of.layer, shape);
    sum_partials<<<d.sum_blocks(), dim3(32, kSumRows)>>>(partials, d.dw, count, A::kTriples,
                                                         of.layer.features);
  };
  return {run, partials.bytes(), [=](Kernel& row) { row.resources(kernel, shape.threads, bytes); }};
}

// In the widest accesses that rows of this many features allow.
template <typename A>
Launch forward_on_chip_of(const Tensors<A>& of, const Device& device) {
  return of.layer.features % kForwardWidth<A> == 0
             ? forward_on_chip_by<A, kForwardWidth<A>>(of, device)
             : forward_on_chip_by<A, 1>(of, device);
}
template <typename A>
Launch backward_on_chip_of(const Tensors<A>& of, const Gradients<A>& d, const Device& device) {
  if constexpr (A::kBlades > 16) {  // dw would take half of the registers, x, y and d_out the rest
    return {};
  } else {
    return of.layer.features % kBackwardWidth<A> == 0
               ? backward_on_chip_by<A, kBackwardWidth<A>>(of, d, device)
               : backward_on_chip_by<A, 1>(of, d, device);
  }
}

// Rows streamed: for rows of a multiple of 16 bytes that a block has threads for.
constexpr int kStreamedWidth = 2;

inline bool can_stream(const Layer& layer) {
  return layer.features % 4 == 0 && layer.features <= kMaxThreads * kStreamedWidth;
}

inline RowsOnChip streamed_rows(const Layer& layer) {
  RowsOnChip shape{kMaxThreads, 32};
  while (shape.per_row * kStreamedWidth < layer.features) shape.per_row *= 2;
  return shape;
}

template <typename A>
Launch forward_streamed_of(const Tensors<A>& of, const Device& device) {
  using Stream = Streamed<kStreamedWidth, 2 * A::kBlades>;
  constexpr int kBytes = Stream::kStages * sizeof(typename Stream::Stage);
  const auto kernel = forward_streamed<A, kStreamedWidth>;
  allow_shared_bytes(kernel, kBytes);
  const RowsOnChip shape = streamed_rows(of.layer);
  const int blocks = std::min((of.layer.batch - 1) / shape.rows() + 1, device.sms);
  const auto run = [=] {
    launch_early(forward_streamed<A, kStreamedWidth>, blocks, kMaxThreads, kBytes,  //
                 of.x, of.y, of.w, of.out, of.layer, shape);
  };
  return {run, 0, [=](Kernel& row) { row.resources(kernel, kMaxThreads, kBytes).hopper_only(); }};
}

template <typename A>
Launch backward_streamed_of(const Tensors<A>& of, const Gradients<A>& d, const Device& device) {
  using Stream = Streamed<kStreamedWidth, 3 * A::kBlades>;
  constexpr int kBytes = Stream::kStages * sizeof(typename Stream::Stage);
  const auto kernel = backward_streamed<A, kStreamedWidth>;
  allow_shared_bytes(kernel, kBytes);
  const RowsOnChip shape = streamed_rows(of.layer);
  const int blocks = std::min((of.layer.batch - 1) / shape.rows() + 1, device.sms);
  const int count = blocks * shape.rows();
  const auto partials = of.problem.template output<float>(count * of.w.size());
  const auto run = [=] {
    backward_streamed<A, kStreamedWidth><<<blocks, kMaxThreads, kBytes>>>(
        of.x, of.y, of.w, d.d_out, d.dx, d.dy, partials, of.layer, shape);
    sum_partials<<<d.sum_blocks(), dim3(32, kSumRows)>>>(partials, d.dw, count, A::kTriples,
                                                         of.layer.features);
  };
  return {run, partials.bytes(),
          [=](Kernel& row) { row.resources(kernel, kMaxThreads, kBytes).hopper_only(); }};
}

// ---- The tables ---------------------------------------------------------------------------------

// Per multivector: the product; scale, erf, add and halve for each gate, and their product; scaling
// by it, square and add, and scaling by 1 / rms.
template <typename A>
double forward_flops() {
  return 2 * A::product_multiply_adds() + 9 + 4 * A::kBlades;
}
// The product and its gates again, both sums of the norm, dz, dg and dP, the gradients, two slopes.
template <typename A>
double backward_flops() {
  return 2 * A::product_multiply_adds() + 9 + 11 * A::kBlades + 2 * A::gradient_multiply_adds() +
         14;
}

// Problems of so few multivectors take microseconds, at which the launch is part of the time.
constexpr size_t kSmall = 1 << 18;

template <typename A>
Problem& declare(Lesson& lesson, const char* name, const Layer& layer, double flops, int tensors,
                 int weights) {
  const double multivectors = static_cast<double>(layer.plane());
  const double bytes =
      sizeof(float) * (tensors * A::kBlades * multivectors +
                       weights * static_cast<double>(layer.features) * A::kTriples);
  Problem& problem = lesson.problem(
      name, {{"batch", layer.batch}, {"features", layer.features}, {"blades", A::kBlades}}, "fp32",
      {.flops = flops * multivectors, .bytes = bytes}, Rate::fp32);
  if (layer.plane() <= kSmall) problem.in_graph();
  return problem;
}

// With `turned`, the inputs are turned (rotated, boosted, moved) before any kernel sees them, and
// the result has to be that of the inputs as they were, turned. Returns whether rows fit on chip.
template <typename A>
bool add_forward(Lesson& lesson, const CliffordReference& reference, const CliffordShape& shape,
                 bool turned) {
  const Layer layer{shape.batch, shape.features, shape.normed};
  Problem& problem =
      declare<A>(lesson, turned ? "turned" : "forward", layer, forward_flops<A>(), 3, 1);
  const Tensors<A> of(problem, layer);
  problem.reference_from(reference.scratch_bytes(), [=, &reference] {
    reference.forward(of.x, of.y, of.w, of.expected);
    if (!turned) return;
    reference.turn(of.expected);
    reference.turn(of.x);
    reference.turn(of.y);
  });
  problem.check(of.out, of.expected, turned ? reference.turned_tolerance() : shape.tolerance());

  const Unfused<A> unfused(of);
  problem.kernel("unfused", Role::baseline, [=] { unfused.forward(); })
      .occupies(of.bytes() + unfused.bytes());
  const Buffer<float> z = unfused.z;
  problem
      .kernel("fused product", Role::ours,
              [=] {
                fused_product<A><<<of.strip_blocks(), kStripFeatures>>>(of.x, of.y, of.w, z, layer);
                if (layer.normed) normalize<A><<<layer.batch, 256>>>(z, of.out, layer);
              })
      .resources(fused_product<A>, kStripFeatures)
      .occupies(of.bytes() + (layer.normed ? z.bytes() : 0));
  const auto add = [&](const char* name, const Launch& launch) {
    Kernel& row = problem.kernel(name, Role::ours, launch.run).occupies(of.bytes());
    launch.describe(row);
  };
  add("one launch", forward_once(of, lesson.device()));
  const Launch on_chip = forward_on_chip_of(of, lesson.device());
  if (on_chip.run) add("row on chip", on_chip);
  if constexpr (A::kBlades <= 8) {
    if (can_stream(layer)) {
      add("rows streamed", forward_streamed_of(of, lesson.device()));
    }
  }

  if (!lesson.flag("--sweep"))
    problem.compare("row on chip", "unfused", "Forward in one launch: % times faster.");
  return static_cast<bool>(on_chip.run);
}

// Forward, then backward from d_out, as two calls between which a network has other work to do:
// backward reads x and y again. `report` is called with how well the reference's gradients agree
// with finite differences. Returns whether rows fit on chip.
template <typename A>
bool add_backward(Lesson& lesson, const CliffordReference& reference, const CliffordShape& shape,
                  std::function<void(double)> report) {
  const Layer layer{shape.batch, shape.features, shape.normed};
  Problem& problem = declare<A>(lesson, "forward + backward", layer,
                                forward_flops<A>() + backward_flops<A>(), 3 + 5, 1 + 2);
  const Tensors<A> of(problem, layer);
  const Gradients<A> d(of);
  problem.reference_from(reference.scratch_bytes(), [=, &reference] {
    reference.forward(of.x, of.y, of.w, of.expected);
    reference.backward(of.x, of.y, of.w, d.d_out, d.expected_dx, d.expected_dy, d.expected_dw);
    report(reference.check_gradients(of.x, of.y, of.w, d.d_out, d.expected_dx, d.expected_dy,
                                     d.expected_dw));
  });
  problem.check(of.out, of.expected, shape.tolerance());
  problem.check(d.dx, d.expected_dx, shape.gradient_tolerance());
  problem.check(d.dy, d.expected_dy, shape.gradient_tolerance());
  problem.check(d.dw, d.expected_dw, shape.weight_gradient_tolerance());

  const double ends = of.bytes() + d.bytes();
  const UnfusedBackward<A> unfused(of, d);
  problem
      .kernel("unfused", Role::baseline,
              [=] {
                unfused.forward.forward();
                unfused.backward();
              })
      .occupies(ends + unfused.bytes());
  const auto add = [&](const char* name, const Launch& forward, const Launch& backward) {
    Kernel& row = problem
                      .kernel(name, Role::ours,
                              [=] {
                                forward.run();
                                backward.run();
                              })
                      .occupies(ends + backward.bytes);
    backward.describe(row);
  };
  const Launch once = forward_once(of, lesson.device());
  add("one launch each", once, backward_once(of, d, lesson.device()));
  const Launch on_chip = forward_on_chip_of(of, lesson.device());
  const Launch backward = backward_on_chip_of(of, d, lesson.device());
  if (backward.run) add("both on chip", on_chip.run ? on_chip : once, backward);
  if constexpr (A::kBlades <= 8) {
    const char* name = A::kBlades <= 4 ? "both streamed" : "streamed, on chip";
    if (can_stream(layer)) {
      const Launch streamed = forward_streamed_of(of, lesson.device());
      if constexpr (A::kBlades <= 4) {
        add(name, streamed, backward_streamed_of(of, d, lesson.device()));
      } else if (backward.run) {
        add(name, streamed, backward);
      }
    }
  }

  if (!lesson.flag("--sweep"))
    problem.compare("both on chip", "unfused",
                    "Forward and backward in three launches: % times faster.");
  return static_cast<bool>(backward.run);
}

template <typename... Values>
std::string text(const char* format, Values... values) {
  char line[256];
  snprintf(line, sizeof line, format, values...);
  return line;
}

template <int p, int q, int r>
int run_lesson(Lesson& lesson) {
  using A = Cl<p, q, r>;
  const bool sweep = lesson.flag("--sweep"), turned = lesson.flag("--turned");
  std::vector<std::pair<int, int>> sizes = {
      {static_cast<int>(lesson.n()), static_cast<int>(lesson.option("--features"))}};
  if (sweep) {
    if (lesson.given("N") || lesson.given("--features") || turned) {
      fail(kBadUsage, "--sweep has sizes of its own: no N, no --features, no --turned");
    }
    sizes.clear();
    const int scale = lesson.on_cpu() ? 128 : 1;
    for (const int batch : {1024, 2048, 4096, 8192}) {
      for (const int features : {128, 256, 512, 1024}) {
        sizes.push_back({batch / scale, features / std::min(scale, 16)});
      }
    }
  }

  std::deque<CliffordReference> references;
  double worst = 0;
  size_t unchecked = sizes.size();
  const auto report = [&](double error) {
    worst = std::max(worst, error);
    if (--unchecked > 0) return;
    lesson.note(
        text("The reference's gradients agree with finite differences within %.0e of "
             "their norm.",
             worst));
  };
  bool all_on_chip = true;
  for (const auto& [batch, features] : sizes) {
    const CliffordShape shape{p, q, r, batch, features, !lesson.flag("--no-norm")};
    const CliffordReference& reference = references.emplace_back(shape);
    if (reference.triples() != A::kTriples) {
      fail(kVerificationFailed, "the reference counts %d grade triples, not %d",
           reference.triples(), A::kTriples);
    }
    all_on_chip &= add_forward<A>(lesson, reference, shape, turned);
    if (!turned) all_on_chip &= add_backward<A>(lesson, reference, shape, report);
  }
  if (!all_on_chip) {
    lesson.note("A row that does not fit on the chip with its weights has no 'on chip' kernel.");
  }
  lesson.note(
      text("Cl(%d,%d,%d): %d grade triples; the product takes %d multiply-adds (%d written "
           "out term by term), its gradients %d.",
           p, q, r, A::kTriples, A::product_multiply_adds(), 2 * A::terms(),
           A::gradient_multiply_adds()));
  return lesson.run();
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "10_clifford_gp",
                 .title = "gated, weighted geometric product and its norm, forward and backward",
                 .n_meaning = "the batch",
                 .n_gpu = 8192,
                 .n_cpu = 8,
                 .options = {{"--features", "multivectors per batch element", 1024}},
                 .choices = {{"--algebra",
                              "signature: basis vectors that square to +1, -1, 0",
                              {"3,0,0", "2,0,0", "3,0,1", "1,3,0", "4,1,0"}}},
                 .flags = {{"--no-norm", "without the norm"},
                           {"--sweep", "batch 1024 to 8192 x features 128 to 1024 (CPU: smaller)"},
                           {"--turned", "expect turned results of turned inputs (forward)"}}});
  if (lesson.choice("--algebra") == "2,0,0") return run_lesson<2, 0, 0>(lesson);
  if (lesson.choice("--algebra") == "3,0,1") return run_lesson<3, 0, 1>(lesson);
  if (lesson.choice("--algebra") == "1,3,0") return run_lesson<1, 3, 0>(lesson);
  if (lesson.choice("--algebra") == "4,1,0") return run_lesson<4, 1, 0>(lesson);
  return run_lesson<3, 0, 0>(lesson);
}
