// Kernels that are judged alone, against sums in double: gradient features with right factors in
// registers (operators/gradients/held.cuh), the gradients of attention by mma.sync
// (operators/attention/backward_portable.cuh), and copies of rows
// (operators/product/layouts/aligned_rows.cuh). On the CPU backend and on a GPU.
//
//     other_kernels features VERTICES COEFFICIENTS FEATURES SLICES
//     other_kernels attention QUERIES KEYS HEADS KV_HEADS WIDTH CAUSAL
//     other_kernels copies ROWS COLUMNS
//
// prints a line for each result; exits with 1 if one is wrong. CAUSAL is 0 or 1. Behind the results
// are numbers that are NaN, and have to stay so. (Of partial sums only the first number behind them
// is looked at.) hopper_mutants.py plants mistakes into these kernels. Further arguments are
// ignored.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "common/device.h"
#include "operators/attention/backward_portable.cuh"
#include "operators/gradients/held.cuh"
#include "operators/product/layouts/aligned_rows.cuh"
#include "primitives/launch.h"

using namespace common;

namespace {

/// Numbers in device memory. All bytes begin as 0xff, which is NaN in floats, and so do those of
/// 4096 numbers behind the last one: a kernel that writes a little too far changes some of them.
template <typename T>
struct Array {
  static constexpr size_t kBehind = 4096;

  size_t count;
  T* data = nullptr;

  explicit Array(size_t numbers) : count(numbers) {
    CUDA_CHECK(cudaMalloc(&data, bytes()));
    CUDA_CHECK(cudaMemset(data, 0xff, bytes()));
  }
  explicit Array(const std::vector<float>& numbers) : Array(numbers.size()) {
    std::vector<T> host(count);
    for (size_t i = 0; i < count; ++i) host[i] = T(numbers[i]);
    CUDA_CHECK(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Array() { cudaFree(data); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  size_t bytes() const { return (count + kBehind) * sizeof(T); }
  /// All numbers, and those behind them.
  std::vector<float> host() const {
    std::vector<T> found(count + kBehind);
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(found.data(), data, bytes(), cudaMemcpyDeviceToHost));
    return std::vector<float>(found.begin(), found.end());
  }
};

/// Normal numbers times `scale`, as T holds them.
template <typename T>
std::vector<float> numbers(size_t count, unsigned seed, float scale) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> found(count);
  for (float& each : found) each = static_cast<float>(T(scale * normal(random)));
  return found;
}

/// Sums in double, and the sums of the terms' magnitudes.
struct Sums {
  std::vector<double> sum, magnitude;

  explicit Sums(size_t count) : sum(count), magnitude(count) {}
  void add(size_t i, double term) {
    sum[i] += term;
    magnitude[i] += std::fabs(term);
  }
};

/// Whether each number is off by at most roundings * 2^-9 times the sum of its terms' magnitudes,
/// and 1e-4, and nothing behind the numbers has been written. 1e-4: what fp32 sums of some hundred
/// products of normal numbers are off by, where these cancel out.
template <typename T>
bool right(const char* what, const Array<T>& array, const Sums& expected, double roundings) {
  const std::vector<float> found = array.host();
  size_t wrong = 0, written = 0;
  for (size_t i = 0; i < array.count; ++i) {
    const double most = roundings / 512 * expected.magnitude[i] + 1e-4;
    wrong += std::fabs(found[i] - expected.sum[i]) <= most ? 0 : 1;  // a NaN is wrong
  }
  for (size_t i = array.count; i < found.size(); ++i) written += std::isnan(found[i]) ? 0 : 1;
  const bool ok = wrong + written == 0;
  std::printf("%s: %zu of %zu wrong, %zu behind them written%s\n", what, wrong, array.count,
              written, ok ? "" : ": FAILED");
  return ok;
}

template <typename... Arguments>
void allow(void (*kernel)(Arguments...), int64_t bytes) {
  CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)));
}

// ---- Gradient features --------------------------------------------------------------------------

namespace features {

using namespace operators::gradients;

/// Operands of both passes, and what the kernels should make of them.
struct Problem {
  int V, E, W;
  std::vector<float> gr, gi, x, m, d;
  Array<bf16> Gr, Gi, X, M, d_out;
  Sums out, sums;  // (V, W); (3, E, W): dM1, dM2 and D

  Problem(int vertices, int coefficients, int width)
      : V(vertices),
        E(coefficients),
        W(width),
        gr(tangents(1)),
        gi(tangents(2)),
        x(numbers<bf16>(size_t(E) * W, 3, 1)),
        m(numbers<bf16>(size_t(2) * E * W, 4, 0.5f)),
        d(numbers<bf16>(size_t(V) * W, 5, 1)),
        Gr(gr),
        Gi(gi),
        X(x),
        M(m),
        d_out(d),
        out(size_t(V) * W),
        sums(size_t(3) * E * W) {
    const size_t count = size_t(E) * W;
    for (int v = 0; v < V; ++v) {
      for (int w = 0; w < W; ++w) {
        double xr = 0, xi = 0, ar = 0, ai = 0;
        for (int e = 0; e < E; ++e) {
          const double r = gr[size_t(v) * E + e], i = gi[size_t(v) * E + e];
          const size_t at = size_t(e) * W + w;
          xr += r * x[at], xi += i * x[at];
          ar += r * m[at] - i * m[count + at], ai += i * m[at] + r * m[count + at];
        }
        const double tanh = std::tanh(xr * ar + xi * ai);
        out.add(size_t(v) * W + w, tanh);
        const double g = d[size_t(v) * W + w] * (1 - tanh * tanh);
        for (int e = 0; e < E; ++e) {
          const double r = gr[size_t(v) * E + e], i = gi[size_t(v) * E + e];
          const size_t at = size_t(e) * W + w;
          sums.add(at, r * g * xr), sums.add(at, i * g * xi);
          sums.add(count + at, r * g * xi), sums.add(count + at, -i * g * xr);
          sums.add(2 * count + at, r * g * ar), sums.add(2 * count + at, i * g * ai);
        }
      }
    }
  }

  std::vector<float> tangents(unsigned seed) const {
    return numbers<bf16>(size_t(V) * E, seed, 1 / std::sqrt(static_cast<float>(E)));
  }
  GradientsOperands operands() const {
    GradientsOperands in = {};
    in.Gr = Gr.data, in.Gi = Gi.data, in.x = X.data, in.d_out = d_out.data;
    in.V = V, in.E = E, in.W = W;
    return in;
  }
};

// tanh is approximate, by 2^-11, and rounded.
template <class Tiles>
bool forward(const char* name, const Problem& problem, int slices) {
  const dim3 grid(primitives::blocks_for(problem.W, Tiles::BN), slices);
  const auto bytes = static_cast<size_t>(Tiles::shared_bytes(problem.E));
  allow(held_features<Tiles>, Tiles::shared_bytes(problem.E));
  const Array<bf16> out(problem.out.sum.size());
  GradientsOperands in = problem.operands();
  in.out = out.data;
  held_features<Tiles><<<grid, Tiles::kThreads, bytes>>>(in, problem.M.data);
  CUDA_CHECK(cudaGetLastError());
  return right(name, out, problem.out, 2);
}

// P, Q, R and S are rounded, and the slope is approximate. Slices are added up here.
template <class Tiles>
bool backward(const char* name, const Problem& problem, int slices) {
  const dim3 grid(primitives::blocks_for(problem.W, Tiles::BN), slices);
  const auto bytes = static_cast<size_t>(Tiles::shared_bytes(problem.E));
  allow(held_backward<Tiles>, Tiles::shared_bytes(problem.E));
  const size_t count = problem.sums.sum.size();
  const Array<float> partials(slices * count);
  held_backward<Tiles>
      <<<grid, Tiles::kThreads, bytes>>>(problem.operands(), problem.M.data, partials.data);
  CUDA_CHECK(cudaGetLastError());
  const std::vector<float> found = partials.host();
  std::vector<float> sums(count);
  for (size_t i = 0; i < slices * count; ++i) sums[i % count] += found[i];
  const bool kept = std::isnan(found[slices * count]);
  if (!kept) std::printf("%s: written behind the partial sums: FAILED\n", name);
  return right(name, Array<float>(sums), problem.sums, 2) && kept;
}

bool all(int V, int E, int W, int slices) {
  const Problem problem(V, E, W);
  bool ok = forward<HeldForward<3>>("features, forward", problem, slices);
  ok = backward<HeldBackward<3>>("features, backward, three stages", problem, slices) && ok;
  return backward<HeldBackward<4>>("features, backward, four stages", problem, slices) && ok;
}

}  // namespace features

// ---- Gradients of attention ---------------------------------------------------------------------

namespace attention {

using namespace operators::attention;

/// One batch: operands, and what the kernels should make of them. Rows are dense.
template <typename T>
struct Problem {
  AttentionShape shape;
  size_t of_queries, of_keys;  // numbers
  std::vector<float> q, k, v, d;
  Sums dQ, dK, dV;
  std::vector<float> o, l;  // out, and logarithms
  Array<T> Q, K, V, d_out, out;
  Array<float> log_sums;

  explicit Problem(const AttentionShape& of)
      : shape(of),
        of_queries(static_cast<size_t>(of.queries * of.heads * of.width)),
        of_keys(static_cast<size_t>(of.keys * of.kv_heads * of.width)),
        q(numbers<T>(of_queries, 1, 1)),
        k(numbers<T>(of_keys, 2, 1)),
        v(numbers<T>(of_keys, 3, 1)),
        d(numbers<T>(of_queries, 4, 1)),
        dQ(of_queries),
        dK(of_keys),
        dV(of_keys),
        o(of_queries),
        l(static_cast<size_t>(of.heads * of.queries)),
        Q(q),
        K(k),
        V(v),
        d_out(d),
        out((expect(), o)),
        log_sums(l) {}

  float scale() const { return 1 / std::sqrt(static_cast<float>(shape.width)); }

  void expect() {
    const auto width = static_cast<size_t>(shape.width);
    for (int64_t s = 0; s < shape.queries; ++s) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        const auto query = static_cast<size_t>((s * shape.heads + h)) * width;
        const auto key = [&](int64_t t) {
          return static_cast<size_t>(t * shape.kv_heads + h / shape.group()) * width;
        };
        const int64_t seen =
            shape.causal ? std::max<int64_t>(0, s + shape.keys - shape.queries + 1) : shape.keys;
        std::vector<double> p(static_cast<size_t>(seen)), dP(p.size());
        double sum = 0, row_sum = 0;
        for (int64_t t = 0; t < seen; ++t) {
          double logit = 0;
          for (size_t i = 0; i < width; ++i) {
            logit += double{q[query + i]} * k[key(t) + i];
            dP[t] += double{d[query + i]} * v[key(t) + i];
          }
          sum += p[t] = std::exp(logit * scale());
        }
        l[static_cast<size_t>(h * shape.queries + s)] =
            seen == 0 ? -INFINITY : static_cast<float>(std::log(sum));
        for (size_t i = 0; i < width; ++i) {
          double result = 0;
          for (int64_t t = 0; t < seen; ++t) result += p[t] / sum * v[key(t) + i];
          o[query + i] = static_cast<float>(T(static_cast<float>(result)));
          row_sum += double{o[query + i]} * d[query + i];
        }
        for (int64_t t = 0; t < seen; ++t) {
          const double dS = p[t] / sum * (dP[t] - row_sum) * scale();
          for (size_t i = 0; i < width; ++i) {
            dV.add(key(t) + i, p[t] / sum * d[query + i]);
            dK.add(key(t) + i, dS * q[query + i]);
            dQ.add(query + i, dS * k[key(t) + i]);
          }
        }
      }
    }
  }
};

/// The three kernels with one kind of tile.
template <class Tile, bool kInOrder>
struct Kernels {
  using T = typename Tile::T;

  const Problem<T>& of;
  int tiles;  // of queries, in all heads
  Array<T> dQ, dK, dV;
  Array<float> row_sums, sums;
  Array<unsigned> counts;

  explicit Kernels(const Problem<T>& problem)
      : of(problem),
        tiles(static_cast<int>(problem.shape.heads) *
              ceil_div(static_cast<int>(problem.shape.queries), Tile::kQueries)),
        dQ(problem.of_queries),
        dK(problem.of_keys),
        dV(problem.of_keys),
        row_sums(problem.l.size()),
        sums(static_cast<size_t>(tiles) * Tile::kQueries * Tile::kWidth),
        counts(static_cast<size_t>(tiles)) {}

  /// For `keys` keys from number `first` on. dQ is added to what `sums` has, unless it clears them.
  void launch(int first, int keys, bool clears = true) const {
    const AttentionShape& shape = of.shape;
    const Strides queries = Strides::rows_of_heads(shape.queries, shape.heads, shape.width);
    const Strides by_keys = Strides::rows_of_heads(shape.keys, shape.kv_heads, shape.width);
    BackwardOperands<T> in = {};
    in.Q = of.Q.data, in.K = of.K.data + first * by_keys.row;
    in.V = of.V.data + first * by_keys.row, in.out = of.out.data, in.log_sums = of.log_sums.data;
    in.q = in.o = in.d_o = in.dq = queries, in.k = in.v = in.dk = in.dv = by_keys;
    in.queries = static_cast<int>(shape.queries), in.keys = keys;
    in.heads = static_cast<int>(shape.heads), in.group = static_cast<int>(shape.group());
    in.width = static_cast<int>(shape.width), in.causal = shape.causal, in.scale = of.scale();
    in.d_out = of.d_out.data, in.dQ = dQ.data, in.dK = dK.data + first * by_keys.row;
    in.dV = dV.data + first * by_keys.row, in.row_sums = row_sums.data, in.dq_sums = sums.data;
    in.counts = counts.data;
    const int key_tiles = ceil_div(keys, Tile::kKeys);
    in.sequences = in.abreast = static_cast<int>(shape.kv_heads);
    in.plain = in.sequences * key_tiles, in.splits = 1;

    const int rows = static_cast<int>(of.l.size()), zeros = tiles * Tile::kQueries;
    attention_row_sums<T, Tile::kWidth>
        <<<primitives::blocks_for(std::max(rows, zeros), kBlockRows<Tile::kWidth>), kRowThreads>>>(
            in, rows, clears ? zeros : 0, tiles);
    CUDA_CHECK(cudaGetLastError());
    constexpr int kBytes = sizeof(BackwardShared<Tile>);
    allow(attention_backward_portable<Tile, kInOrder>, kBytes);
    const dim3 blocks = kInOrder ? dim3(in.plain) : dim3(key_tiles, in.sequences);
    attention_backward_portable<Tile, kInOrder><<<blocks, Tile::kThreads, kBytes>>>(in);
    CUDA_CHECK(cudaGetLastError());
    attention_finish_dq<Tile><<<tiles, 32 * Tile::kPairs>>>(in);
    CUDA_CHECK(cudaGetLastError());
  }

  /// Whether the sums of dQ have the bits to which the parts of each block add up, one after the
  /// other in the order of the keys. They begin at random
  /// numbers: from 0, exchanging the first two parts would not show.
  bool are_in_order() const {
    const auto keys = static_cast<int>(of.shape.keys);
    std::vector<float> one_by_one = numbers<float>(sums.count, 5, 1);
    CUDA_CHECK(cudaMemcpy(sums.data, one_by_one.data(), sums.count * sizeof(float),
                          cudaMemcpyHostToDevice));
    launch(0, keys, false);
    const std::vector<float> together = sums.host();
    for (int first = 0; first < keys; first += Tile::kKeys) {
      launch(first, std::min(Tile::kKeys, keys - first));
      const std::vector<float> part = sums.host();
      for (size_t i = 0; i < one_by_one.size(); ++i) one_by_one[i] += part[i];
    }
    return std::memcmp(together.data(), one_by_one.data(), sums.count * sizeof(float)) == 0;
  }
};

// P is rounded, and so is dS, which is a product of it; the results are rounded once more. An
// exponent's error is
// some 2^-10 in all.
template <class Tile, bool kInOrder>
bool right(const char* name, const AttentionShape& shape) {
  const Problem<typename Tile::T> problem(shape);
  const Kernels<Tile, kInOrder> kernels(problem);
  std::printf("%s\n", name);
  kernels.launch(0, static_cast<int>(shape.keys));
  bool ok = ::right("  dQ", kernels.dQ, problem.dQ, 4);
  ok = ::right("  dK", kernels.dK, problem.dK, 4) && ok;
  ok = ::right("  dV", kernels.dV, problem.dV, 4) && ok;
  if (kInOrder && !shape.causal) {
    const bool in_order = kernels.are_in_order();
    std::printf("  in the order of the keys%s\n", in_order ? "" : ": FAILED");
    ok = in_order && ok;
  }
  return ok;
}

bool all(const AttentionShape& shape) {
  if (shape.width > 64) {
    return right<BackwardTile<half, 128, 32, 1>, false>("attention, 128 columns", shape);
  }
  using Tile = BackwardTile<__nv_bfloat16, 64, 64, 2>;
  const bool ok = right<Tile, false>("attention, 64 columns", shape);
  return right<Tile, true>("attention, 64 columns, in order", shape) && ok;
}

}  // namespace attention

// ---- Copies of rows -----------------------------------------------------------------------------

namespace copies {

using namespace operators::product;

/// Copies two matrices, and then these copies, by a kernel that starts early.
template <typename T>
bool right(const char* name, int rows, int cols) {
  constexpr int kOfWord = 16 / sizeof(T);
  struct Matrix {
    int rows, cols, stride;
    std::vector<float> numbers;
    Array<T> from, first, second;

    Matrix(int row_count, int col_count, unsigned seed)
        : rows(row_count),
          cols(col_count),
          stride((cols + kOfWord - 1) / kOfWord * kOfWord),
          numbers(::numbers<T>(size_t(rows) * cols, seed, 1)),
          from(numbers),
          first(size_t(rows) * stride),
          second(first.count) {}
    RowCopy<T> once() const { return {from.data, first.data, rows, cols, stride}; }
    RowCopy<T> again() const { return {first.data, second.data, rows, stride, stride}; }
    bool is_right(const char* what) const {
      Sums expected(second.count);
      for (int row = 0; row < rows; ++row) {
        for (int col = 0; col < cols; ++col) {
          expected.sum[size_t(row) * stride + col] = numbers[size_t(row) * cols + col];
        }
      }
      return ::right(what, second, expected, 0);
    }
  };
  const Matrix one(rows, cols, 1), other(cols, rows, 2);
  launch_align_rows<T, 2>({{one.once(), other.once()}}, nullptr);
  launch_align_rows<T, 2>({{one.again(), other.again()}}, nullptr, true);
  const bool ok = one.is_right(name);
  return other.is_right("  the other one of the launch") && ok;
}

bool all(int rows, int cols) {
  const bool ok = right<half>("copies of 16 bits", rows, cols);
  return right<float>("copies of 32 bits", rows, cols) && ok;
}

}  // namespace copies

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i) { return std::atoi(argv[i]); };
  const auto asks = [&](const char* what, int arguments) {
    return argc > 1 + arguments && std::strcmp(argv[1], what) == 0;
  };
  bool ok = false;
  if (asks("features", 4)) {
    ok = features::all(number(2), number(3), number(4), number(5));
  } else if (asks("attention", 6)) {
    ok = attention::all({.queries = number(2),
                         .keys = number(3),
                         .heads = number(4),
                         .kv_heads = number(5),
                         .width = number(6),
                         .causal = number(7) != 0});
  } else if (asks("copies", 2)) {
    ok = copies::all(number(2), number(3));
  } else {
    std::fprintf(stderr, "usage: other_kernels features|attention|copies SIZES\n");
    return 2;
  }
  return ok ? 0 : 1;
}
