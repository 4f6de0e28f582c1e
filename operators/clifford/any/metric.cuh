// Algebras whose signature is known only when a kernel is launched. The blades of an algebra and
// its triples depend on the number n of its basis vectors alone, and so does the sign that comes
// from swapping vectors: the compiler knows them, as those of Cl<n, 0, 0>. What the signature adds
// is a factor, the product of the squares of the vectors that both blades have: 1, -1 or 0. There
// are 2^n such products, which a kernel gets as an argument. A term costs a multiplication more,
// and one kernel serves all signatures of n vectors.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "operators/clifford/algebra.cuh"

namespace operators::clifford {

inline constexpr int kMostVectors = 5;

/// What a signature adds to Cl<n, 0, 0>. A triple whose products are all 0 has no weight: the
/// others are numbered without it.
struct Metric {
  float squares[1 << kMostVectors] = {};  ///< of a set of vectors: their squares' product
  int place[Cl<kMostVectors, 0, 0>::kTriples] = {};  ///< of triple t; -1: it has no weight
  int triples = 0;                                   ///< that have weights
};

template <typename A>
Metric metric_of(int p, int q) {
  Metric metric;
  for (int set = 0; set < A::kBlades; ++set) {
    metric.squares[set] = 1;
    for (int v = 0; v < A::kVectors; ++v) {
      if (set >> v & 1) metric.squares[set] *= v < p ? 1.0f : v < p + q ? -1.0f : 0.0f;
    }
  }
  // The tables themselves: the functions that read them are for constants, on the device too.
  const auto& tables = A::kTables;
  for (int t = 0; t < A::kTriples; ++t) {
    const auto& grades = tables.triple[t];
    bool has_products = false;
    for (int i = tables.first[grades.x]; i < tables.first[grades.x + 1]; ++i) {
      for (int j = tables.first[grades.y]; j < tables.first[grades.y + 1]; ++j) {
        const unsigned both = tables.vectors[i] & tables.vectors[j];
        has_products |=
            tables.grade[tables.result[i][j]] == grades.result && metric.squares[both] != 0;
      }
    }
    metric.place[t] = has_products ? metric.triples++ : -1;
  }
  return metric;
}

// Which vectors the blades of x and y share in the term that has these two blades: as sign(Of, ...)
// takes them.
template <typename A>
__host__ __device__ constexpr unsigned shared_vectors(Of of, int fixed, int other) {
  const unsigned a = A::kTables.vectors[fixed], b = A::kTables.vectors[other];
  // Of z, x has b and y has a ^ b. Of dx, x has a and y has a ^ b; dy is alike.
  return of == Of::result ? b & (a ^ b) : a & (a ^ b);
}

// (a b) is multiplied first: no two terms have this product in common. If it were (squares a) b,
// the compiler would keep all products of squares and a in registers.
template <int sign, unsigned both>
__device__ __forceinline__ float term_by_metric(const float& a, const float& b,
                                                const Metric& metric) {
  if constexpr (sign == 0 || both == 0) {
    return signed_product<sign>(a, b);
  } else {
    return signed_product<sign>(a, b) * metric.squares[both];
  }
}

// What an algebra has whose own tables have the squares: no factor.
struct OwnMetric {};
template <int sign, unsigned both>
__device__ __forceinline__ float term_by_metric(const float& a, const float& b, OwnMetric) {
  return signed_product<sign>(a, b);
}

// As sum_terms(), by a metric.
template <typename A, Of of, int t, int fixed, int W, int... n>
__device__ __forceinline__ Pack<W> sum_terms_by_metric(const Multivectors<A, W>& first,
                                                       const Multivectors<A, W>& second,
                                                       const Metric& metric,
                                                       std::integer_sequence<int, n...>) {
  constexpr int start = A::first(A::grade(A::first_factor(of), t));
  Pack<W> sum;
#pragma unroll
  for (int e = 0; e < W; ++e) {
    sum.v[e] =
        (-0.0f + ... +
         term_by_metric<A::sign(of, t, fixed, start + n), shared_vectors<A>(of, fixed, start + n)>(
             first.blade[start + n].v[e], second.blade[A::third(fixed, start + n)].v[e], metric));
  }
  return sum;
}

// The weighted sums of terms, z, dx or dy, from the two factors that the other arguments of
// sum_terms() have. use_terms(t, blade, Pack) gets each sum without its weight.
template <Of of, typename A, int W, typename Weight, typename UseTerms>
__device__ __forceinline__ Multivectors<A, W> weighted_by_metric(const Multivectors<A, W>& first,
                                                                 const Multivectors<A, W>& second,
                                                                 const Weight& weight,
                                                                 const Metric& metric,
                                                                 UseTerms use_terms) {
  Multivectors<A, W> sums;
  unroll<0, A::kBlades>([&](auto k) { sums.blade[k] = empty_sum<W>(); });
  unroll<0, A::kTriples>([&](auto t) {
    constexpr int grade = A::grade(of, t), blades = A::blades_of(A::grade(A::first_factor(of), t));
    const Pack<W> w = weight(t);
    unroll<A::first(grade), A::first(grade + 1)>([&](auto blade) {
      if constexpr (A::has_terms(of, t, blade)) {
        const Pack<W> terms = sum_terms_by_metric<A, of, t, blade>(
            first, second, metric, std::make_integer_sequence<int, blades>());
        add_product(sums.blade[blade], w, terms);
        use_terms(t, blade, terms);
      }
    });
  });
  return sums;
}

}  // namespace operators::clifford
