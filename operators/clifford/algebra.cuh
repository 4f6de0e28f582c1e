// Geometric algebras, worked out by the compiler from their signature: Cl<3, 0, 0> is all that a
// user writes. First come the tables of the algebra, made at compile time; then the weighted
// geometric product of multivectors in registers, and its gradients. When they are unrolled,
// multiplications and multiply-adds are left. Lesson 10 explains all of this, with the table of
// Cl<2, 0, 0> (10_clifford_gp.cu).
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <utility>

namespace operators::clifford {

// ---- The algebra, at compile time ---------------------------------------------------------------

// A factor of a product, or its result.
enum class Of { x, result, y };

// Basis vectors e1 .. ep square to +1, the next q to -1, the last r to 0. A blade is the set of its
// basis vectors, bit v - 1 for ev: e13 is 0b101. Blades are numbered by grade, within a grade by
// their bits: 1; e1, e2, e3; e12, e13, e23; e123.
template <int p, int q, int r>
struct Cl {
  static constexpr int kVectors = p + q + r, kBlades = 1 << kVectors, kGrades = kVectors + 1;

  // The product of two blades has the vectors that are in one of them and not in both: a ^ b. Its
  // sign: each vector of b moves left to its place, and each swap with a later vector of a changes
  // the sign. Then a vector that is in both stands beside itself, and its square is a factor.
  static constexpr int sign_of_product(unsigned a, unsigned b) {
    int swaps = 0;
    for (unsigned later = a >> 1; later != 0; later >>= 1) swaps += std::popcount(later & b);
    int sign = swaps % 2 == 0 ? 1 : -1;
    for (int v = 0; v < kVectors; ++v) {
      if (a & b & 1u << v) sign *= v < p ? 1 : v < p + q ? -1 : 0;
    }
    return sign;
  }

  // The grades of x, of the result and of y.
  struct Triple {
    int x, result, y;
  };
  struct Tables {
    unsigned vectors[kBlades] = {};           // of a blade
    int grade[kBlades] = {};                  // of a blade
    int blade[kBlades] = {};                  // the blade that has these vectors
    int first[kGrades + 1] = {};              // the first blade of a grade; at the end their number
    int result[kBlades][kBlades] = {};        // which blade two blades make
    signed char sign[kBlades][kBlades] = {};  // with which sign
    Triple triple[kGrades * kGrades * kGrades] = {};  // by x, then result, then y
    int triples = 0;
    int terms[kGrades * kGrades * kGrades] = {};               // of a triple: how many
    unsigned with_terms[3][kGrades * kGrades * kGrades] = {};  // [Of]: which blades have terms
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
  // The blade that i and k make, up to a sign. In e_i e_j = +-e_k any two of the three blades make
  // the third one.
  __host__ __device__ static constexpr int third(int i, int k) { return kTables.result[i][k]; }
  // The sign of e_i e_j; 0 unless x_i y_j is a term of triple t.
  __host__ __device__ static constexpr int sign(int t, int i, int j) {
    const Triple grades = triple(t);
    return grade(i) == grades.x && grade(j) == grades.y && grade(third(i, j)) == grades.result
               ? kTables.sign[i][j]
               : 0;
  }
  // The same by two blades of a term, as the sums below need it. `fixed` is the blade of z, dx or
  // dy that is computed. `other` is a blade of the first factor: i for z_k, and k for dx_i and
  // dy_j.
  __host__ __device__ static constexpr int sign(Of of, int t, int fixed, int other) {
    return of == Of::result ? sign(t, other, third(fixed, other))
           : of == Of::x    ? sign(t, fixed, third(fixed, other))
                            : sign(t, third(fixed, other), fixed);
  }
  // Which blades of z, dx or dy have terms of triple t: bit i for blade i. (With vectors that
  // square to 0 some blades of the grade have none.)
  __host__ __device__ static constexpr unsigned with_terms(Of of, int t) {
    return kTables.with_terms[static_cast<int>(of)][t];
  }
  __host__ __device__ static constexpr bool has_terms(Of of, int t, int blade) {
    return (with_terms(of, t) >> blade & 1) != 0;
  }
  // The two factors of the terms: x and y for z, dz and y for dx, dz and x for dy.
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
  // Whether several blades of z, dx or dy have terms of triple t, and all of these terms share a
  // blade, as one factor has only one blade of its grade. Then the weight multiplies this blade
  // once, and not each sum of terms.
  __host__ __device__ static constexpr bool has_common_factor(Of of, int t) {
    const bool several = (with_terms(of, t) & (with_terms(of, t) - 1)) != 0;
    return several && (blades_of(grade(first_factor(of), t)) == 1 ||
                       blades_of(grade(second_factor(of), t)) == 1);
  }
  // dw of triple t is x times the sums of its terms in dx, or y times those in dy, or dz times
  // those in z. Sums of dx or dy are taken if they are computed without the weight anyway. If not,
  // those of z are computed for dw.
  __host__ __device__ static constexpr Of weight_gradient_from(int t) {
    return !has_common_factor(Of::x, t) ? Of::x : !has_common_factor(Of::y, t) ? Of::y : Of::result;
  }

  // Whether (e_i e_j) e_k = e_i (e_j e_k) for all j and k.
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

  // How many multiply-adds the functions below do: one for each term, and one for each blade or sum
  // that a weight multiplies.
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

// The same blade of W features. Where these are neighbours, a thread moves them by one access of up
// to 16 bytes.
template <int W>
struct alignas(W * sizeof(float)) Pack {
  float v[W];
};

// What a sum starts with. In floating point the neutral element of addition is -0, and not +0,
// since -0 + 0 is +0. So the compiler drops it, and the sum starts with its first term.
template <int W>
__device__ __forceinline__ Pack<W> empty_sum() {
  Pack<W> result;
#pragma unroll
  for (int e = 0; e < W; ++e) result.v[e] = -0.0f;
  return result;
}

// A thread's W multivectors, in registers: every index is a constant for the compiler.
template <typename A, int W>
struct Multivectors {
  Pack<W> blade[A::kBlades];
};

// The number n as a type. So a function that gets it may use it where C++ wants a constant.
template <int n>
struct Constant {
  static constexpr int value = n;
  __device__ constexpr operator int() const { return n; }
};

// Calls body(first), ..., body(end - 1), each with a Constant.
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

// sign a b; for a sign of 0 the neutral element, which the compiler drops.
template <int sign>
__device__ __forceinline__ float signed_product(const float& a, const float& b) {
  return sign > 0 ? a * b : sign < 0 ? -(a * b) : -0.0f;
}

// The terms of triple t in blade `fixed` of z, dx or dy, without the weight. Each blade of the
// first factor has one term at most, with the blade of the second factor that makes `fixed` with
// it:
//
//     z_k: sign x_i y_j        dx_i: sign dz_k y_j        dy_j: sign dz_k x_i
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

// Adds these terms times the weight w to `sums`, those of the blades of triple t's grade of z, dx
// or dy. If w does not multiply a common factor, use_terms(blade, Pack) gets the terms of each
// blade without the weight.
template <typename A, Of of, int t, int W, typename UseTerms>
__device__ __forceinline__ void add_triple(Pack<W>* sums, const Pack<W>& w,
                                           const Multivectors<A, W>& first,
                                           const Multivectors<A, W>& second, UseTerms use_terms) {
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
        const Pack<W> terms = sum_terms<A, of, t, blade>(first, second);
        add_product(sums[blade - start], w, terms);
        use_terms(blade, terms);
      }
    });
  }
}

// The weighted geometric product z of x and y. weight(t) is the Pack of triple t's weights.
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

// The gradients of z_k = sum of w sign x_i y_j, from dz:
//
//     dx_i = sum of w sign y_j dz_k,  dy_j = sum of w sign x_i dz_k,  dw = sum of sign x_i y_j dz_k
//
// A call computes dx (`of` is Of::x) or dy (Of::y), and adds to those dw for which it has the sums
// of terms: the calls for dx and dy together add to all. They go grade by grade, so that few
// results are in registers at a time. give(blade, Pack) takes a finished dx_i or dy_j. take_w(t)
// returns what dw of triple t is so far, and give_w(t, Pack) takes the new sum.
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
        add_triple<A, of, t>(sums, weight(t), dz, other, [&](auto blade, const Pack<W>& terms) {
          if constexpr (from == of) add_product(dw, self.blade[blade], terms);
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

}  // namespace operators::clifford
