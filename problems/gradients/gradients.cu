#include <algorithm>
#include <array>
#include <cmath>

#include "common/numerics.h"
#include "primitives/approximate.cuh"
#include "primitives/launch.h"
#include "problems/framework.cuh"
#include "problems/gradients/gradients.h"
#include "problems/last_term.cuh"

namespace problems {

using namespace primitives;

using bf16 = __nv_bfloat16;
using Shape = GradientsShape;

namespace {

// ---- References ---------------------------------------------------------------------------------

// Forward and backward once more, plainly, as written at the top and not associated, in fp64, with
// the products by cuBLAS. T is bf16, or double where finite differences need inputs that bf16
// cannot tell apart.

// out = tanh(xr * ar + xi * ai); one thread an element.
__global__ void features_fp64(const double* xr, const double* xi, const double* ar,
                              const double* ai, double* out, size_t count) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = tanh(xr[i] * ar[i] + xi[i] * ai[i]);
}

// From xr, xi, ar, ai the products P, Q, R, S; one thread an element. 1 - t^2 = (1 - t) (1 + t) is
// as accurate as 1 - |t| is, to 2^-53: next to nothing of the gradients' size.
__global__ void products_fp64(const double* xr, const double* xi, double* ar, double* ai,
                              const bf16* d_out, double* P, double* Q, size_t count) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const double t = tanh(xr[i] * ar[i] + xi[i] * ai[i]);
  const double g = static_cast<double>(__bfloat162float(d_out[i])) * (1 - t) * (1 + t);
  P[i] = g * xr[i];
  Q[i] = g * xi[i];
  ar[i] *= g;
  ai[i] *= g;
}

// to = from, rounded; one thread an element.
__global__ void round_to_bf16(const double* from, bf16* to, size_t count) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) to[i] = __double2bfloat16(from[i]);
}

template <typename T>
class Reference {
 public:
  Reference(cublasHandle_t blas, const Shape& shape, const bf16* Gr, const bf16* Gi, const T* x,
            const T* Lr, const T* Li)
      : blas_(blas),
        shape_(shape),
        Gr_(Gr),
        Gi_(Gi),
        Gr64_(chunk(shape) * shape.E),
        Gi64_(chunk(shape) * shape.E),
        x_(shape.coefficients()),
        Lr_(shape.weights()),
        Li_(shape.weights()),
        xr_(chunk(shape) * shape.W),
        xi_(chunk(shape) * shape.W),
        ar_(chunk(shape) * shape.W),
        ai_(chunk(shape) * shape.W) {
    to_fp64(x, type_of<T>, shape.coefficients(), x_);
    to_fp64(Lr, type_of<T>, shape.weights(), Lr_);
    to_fp64(Li, type_of<T>, shape.weights(), Li_);
  }

  void forward(double* out) {
    for (int64_t v = 0; v < shape_.V; v += chunk(shape_)) {
      const int64_t count = compute_rows(v) * shape_.W;
      features_fp64<<<blocks_for(count, kThreads), kThreads>>>(xr_, xi_, ar_, ai_,
                                                               out + v * shape_.W, count);
      CUDA_CHECK(cudaGetLastError());
    }
  }

  void backward(const bf16* d_out, double* d_x, double* d_Lr, double* d_Li) {
    const auto [V, E, W] = shape_;
    Scratch<double> P(chunk(shape_) * W), Q(chunk(shape_) * W);
    for (int64_t v = 0; v < V; v += chunk(shape_)) {
      const int64_t rows = compute_rows(v);
      products_fp64<<<blocks_for(rows * W, kThreads), kThreads>>>(xr_, xi_, ar_, ai_, d_out + v * W,
                                                                  P, Q, rows * W);
      CUDA_CHECK(cudaGetLastError());
      const double so_far = v > 0 ? 1 : 0;
      product_fp64(blas_, 1, P, kTransposed, xr_, kPlain, so_far, d_Lr, W, W, rows);
      product_fp64(blas_, 1, Q, kTransposed, xi_, kPlain, 1, d_Lr, W, W, rows);
      product_fp64(blas_, 1, Q, kTransposed, xr_, kPlain, so_far, d_Li, W, W, rows);
      product_fp64(blas_, -1, P, kTransposed, xi_, kPlain, 1, d_Li, W, W, rows);
      product_fp64(blas_, 1, P, kPlain, Lr_, kPlain, 1, ar_, rows, W, W);  // ar is R by now
      product_fp64(blas_, 1, Q, kPlain, Li_, kPlain, 1, ar_, rows, W, W);
      product_fp64(blas_, -1, P, kPlain, Li_, kPlain, 1, ai_, rows, W, W);  // and ai is S
      product_fp64(blas_, 1, Q, kPlain, Lr_, kPlain, 1, ai_, rows, W, W);
      product_fp64(blas_, 1, Gr64_, kTransposed, ar_, kPlain, so_far, d_x, E, W, rows);
      product_fp64(blas_, 1, Gi64_, kTransposed, ai_, kPlain, 1, d_x, E, W, rows);
    }
  }

  // xr, xi, ar, ai and out (V, W each), rounded: what a framework's forward pass saves.
  void save(const std::array<bf16*, 5>& saved) {
    for (int64_t v = 0; v < shape_.V; v += chunk(shape_)) {
      const int64_t count = compute_rows(v) * shape_.W;
      const double* from[] = {xr_, xi_, ar_, ai_};
      for (int i = 0; i < 4; ++i) {
        round_to_bf16<<<blocks_for(count, kThreads), kThreads>>>(from[i], saved[i] + v * shape_.W,
                                                                 count);
      }
      features_fp64<<<blocks_for(count, kThreads), kThreads>>>(xr_, xi_, ar_, ai_, xr_, count);
      round_to_bf16<<<blocks_for(count, kThreads), kThreads>>>(xr_, saved[4] + v * shape_.W, count);
      CUDA_CHECK(cudaGetLastError());
    }
  }

  // Device memory that any of these takes.
  static double bytes(const Shape& shape) {
    return 8.0 *
           (static_cast<double>(chunk(shape)) * static_cast<double>(2 * shape.E + 6 * shape.W) +
            static_cast<double>(shape.coefficients()) + 2 * static_cast<double>(shape.weights()));
  }

 private:
  static int64_t chunk(const Shape& shape) { return std::min(shape.V, kReferenceRows); }

  // xr, xi, ar, ai of the vertices from v on; of as many as it returns.
  int64_t compute_rows(int64_t v) {
    const auto [V, E, W] = shape_;
    const int64_t rows = std::min(chunk(shape_), V - v);
    to_fp64(Gr_ + v * E, Type::bf16, rows * E, Gr64_);
    to_fp64(Gi_ + v * E, Type::bf16, rows * E, Gi64_);
    product_fp64(blas_, 1, Gr64_, kPlain, x_, kPlain, 0, xr_, rows, W, E);
    product_fp64(blas_, 1, Gi64_, kPlain, x_, kPlain, 0, xi_, rows, W, E);
    product_fp64(blas_, 1, xr_, kPlain, Lr_, kTransposed, 0, ar_, rows, W, W);
    product_fp64(blas_, -1, xi_, kPlain, Li_, kTransposed, 1, ar_, rows, W, W);
    product_fp64(blas_, 1, xi_, kPlain, Lr_, kTransposed, 0, ai_, rows, W, W);
    product_fp64(blas_, 1, xr_, kPlain, Li_, kTransposed, 1, ai_, rows, W, W);
    return rows;
  }

  cublasHandle_t blas_;
  Shape shape_;
  const bf16 *Gr_, *Gi_;
  Scratch<double> Gr64_, Gi64_, x_, Lr_, Li_;
  Scratch<double> xr_, xi_, ar_, ai_;  // of a chunk of vertices
};

// ---- Is the reference's gradient the gradient? --------------------------------------------------

// Reference::backward was derived by hand from Reference::forward: along random directions of x, Lr
// and Li it is held to finite differences of the loss f = sum(dOut * out), see
// problems/gradient_check.h. Its unit is here the root of the number of elements, times rms(dOut),
// times that of tanh' u'. The bound's two parts:
//
//   - u is a polynomial in h: u0 + u1 h + u2 h^2 for x (xr and ar are both linear in it), without
//     u2 for the weights. So out''' = tanh''' u1^3 + 6 tanh'' u1 u2, with |tanh'''| <= 2 and
//     |tanh''| < 0.8. d is drawn as the inputs are: then u2 has the size of u, a variance of 1, and
//     u1 one of 2. Sums of products of two numbers, both are spread about as a Laplace distribution
//     is, which makes the rms of u1^3 27, that of u1 u2 at most 3.5 and so that of out''' 71; that
//     of tanh' u1 is near 1, and above 1/2. So f''' is at most 142 units; 4 times that is room for
//     few elements, and h^2 / 6 times all this is less than 100 h^2.
//   - u is off by dot_tolerance(2 (E + W)), and by 4 roundings more, of its rms; out by no more
//     than u, which is 2 times as much of out's rms, see output_tolerance. The errors are
//     independent.
//
// With fp64's roundoff of 2^-53, h = 2^-18 makes both parts about 10^-9.
constexpr int64_t kDifferenceRows = 256;  // of V: enough to run the same code
constexpr double kStep = 0x1p-18;

// How the inputs are drawn: uniform in +- these. xr and xi sum up E terms, ar and ai 2 W: with
// these xr and xi have a variance of 1, ar and ai of 1/2, and u of 1. Of u, one in 300 is then
// beyond +-4, where tanh is 0.9993.
double tangent_scale(const Shape& shape) { return 3 / sqrt(static_cast<double>(shape.E)); }
double weight_scale(const Shape& shape) { return sqrt(0.75 / static_cast<double>(shape.W)); }

// The largest of the three gradients' differences to finite differences. Of shape.V vertices the
// first kDifferenceRows take part.
double check_gradients(cublasHandle_t blas, Shape shape, const bf16* Gr, const bf16* Gi,
                       const bf16* d_out) {
  shape.V = std::min(shape.V, kDifferenceRows);
  const size_t values = shape.vertex_values();
  const std::array<const char*, 3> names = {"dx", "dLr", "dLi"};
  const std::array<int64_t, 3> counts = {shape.coefficients(), shape.weights(), shape.weights()};
  const std::array<double, 3> scales = {1, weight_scale(shape), weight_scale(shape)};
  using Inputs = std::array<std::vector<double>, 3>;

  Scratch<double> out64(values), d_out64(values);
  Scratch<double> x64(counts[0]), Lr64(counts[1]), Li64(counts[2]);
  to_fp64(d_out, Type::bf16, values, d_out64);
  const std::vector<double> d_out_host = to_host(d_out64, values);
  const auto reference_of = [&](const Inputs& inputs) {
    double* const to[] = {x64, Lr64, Li64};
    for (int i = 0; i < 3; ++i) to_device(inputs[i], to[i]);
    return Reference<double>(blas, shape, Gr, Gi, x64, Lr64, Li64);
  };
  const auto loss = [&](const Inputs& inputs) {
    reference_of(inputs).forward(out64);
    Loss result;
    result.add(d_out_host, to_host(out64, values));
    return result;
  };

  Inputs inputs;
  for (int i = 0; i < 3; ++i) inputs[i] = random_fp64(counts[i], scales[i], 0, 1 + i);
  Scratch<double> d_x(counts[0]), d_Lr(counts[1]), d_Li(counts[2]);
  reference_of(inputs).backward(d_out, d_x, d_Lr, d_Li);
  const std::array<std::vector<double>, 3> gradients = {
      to_host(d_x, counts[0]), to_host(d_Lr, counts[1]), to_host(d_Li, counts[2])};

  const DifferenceBound bound = {
      .h = kStep,
      .curvature = 100,
      .roundoff = 2 * dot_tolerance(2 * (shape.E + shape.W), 0x1p-53, sqrt(4) * 0x1p-53)};
  double worst = 0;
  for (int i = 0; i < 3; ++i) {
    const std::vector<double> direction = random_fp64(counts[i], scales[i], 0, 4 + i);
    const auto loss_at = [&](double h) {
      Inputs at = inputs;
      at[i] = moved(inputs[i], direction, h);
      return loss(at);
    };
    worst = std::max(worst, check_slope(names[i], gradients[i], direction, loss_at(kStep),
                                        loss_at(-kStep), bound));
  }
  return worst;
}

double check_gradients_bytes(const Shape& shape) {
  const Shape few{std::min(shape.V, kDifferenceRows), shape.E, shape.W};
  const double inputs =
      static_cast<double>(few.coefficients()) + 2 * static_cast<double>(few.weights());
  return 8.0 * (2 * static_cast<double>(few.vertex_values()) + 2 * inputs) +
         Reference<double>::bytes(few);
}

// ---- A table ------------------------------------------------------------------------------------

double bytes_of_ends(Pass pass, const Shape& shape) {
  const double coefficients = static_cast<double>(shape.coefficients());
  const double weights = static_cast<double>(shape.weights());
  const double gradients = pass == Pass::forward ? 0 : coefficients + 2 * weights;
  return sizeof(bf16) * (2 * static_cast<double>(shape.tangent_values()) + coefficients +
                         2 * weights + static_cast<double>(shape.vertex_values()) + gradients);
}

// Operations of a product of `count` elements in all with the inner dimension `depth`.
double product_flops(int64_t count, int64_t depth) {
  return 2 * static_cast<double>(count) * static_cast<double>(depth);
}

// Associated, see the top of the lesson. Forward: M1 and M2; six products with Gr and Gi; u and
// tanh. Backward: the same again; six more products; u, g and P, Q, R, S; and last, products of
// small matrices.
double flops(Pass pass, const Shape& shape) {
  const double values = static_cast<double>(shape.vertex_values());
  const double six = 6 * product_flops(shape.vertex_values(), shape.E);
  const double small = 2 * product_flops(shape.coefficients(), shape.W);
  return pass == Pass::forward
             ? six + 4 * values + small
             : 2 * six + 15 * values + 2 * small + 2 * product_flops(shape.weights(), shape.E);
}

Problem& declare(Lesson& lesson, Pass pass, const Shape& shape) {
  Problem& problem = lesson.problem(
      pass == Pass::forward ? "forward" : "backward",
      {{"V", shape.V}, {"E", shape.E}, {"W", shape.W}}, "bf16",
      {.flops = flops(pass, shape), .bytes = bytes_of_ends(pass, shape)}, Rate::fp16);
  if (shape.V <= 4096) problem.in_graph();
  return problem;
}

// Of this vertex the first coefficient alone takes part, `factor` times: xr is so many times an
// element of x, exactly, and xi is 0.
void make_steep(const Shape& shape, int64_t vertex, float factor, bf16* Gr, bf16* Gi) {
  std::vector<bf16> row(shape.E, __float2bfloat16_rn(0));
  const size_t at = static_cast<size_t>(vertex * shape.E), bytes = row.size() * sizeof(bf16);
  CUDA_CHECK(cudaMemcpy(Gi + at, row.data(), bytes, cudaMemcpyHostToDevice));
  row[0] = __float2bfloat16_rn(factor);
  CUDA_CHECK(cudaMemcpy(Gr + at, row.data(), bytes, cudaMemcpyHostToDevice));
}

// Forward |u| of the last vertex shall be in the hundreds: to compute tanh there takes care. But u
// shall also be off by only a small part of itself there, so that its sign is certain. Then tanh is
// off by at most max(|u| (1 - tanh(u)^2)) = 0.45 times u's relative error.
constexpr float kForwardFactor = 32;

// Backward, where it is asked for, |u| of the first vertex has an rms of about 10. Where it is from
// kLeastSteep to kMostSteep, 1 - tanh(u)^2 is below 1e-6, and a difference of numbers in fp32 has
// lost most of its digits. There dOut is so large that g is 1/50 of the root of V. As xr is 8 times
// as large as others, the vertex weighs as much as some hundredths of all.
constexpr float kBackwardFactor = 8;
constexpr double kLeastSteep = 8, kMostSteep = 14;
void weigh_steep_vertex(const Shape& shape, const bf16* xr, const bf16* ar, bf16* d_out) {
  const auto W = static_cast<size_t>(shape.W);
  std::vector<bf16> x(W), a(W), weights(W);
  CUDA_CHECK(cudaMemcpy(x.data(), xr, W * sizeof(bf16), cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpy(a.data(), ar, W * sizeof(bf16), cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < W; ++i) {
    const double u = double{__bfloat162float(x[i])} * double{__bfloat162float(a[i])};
    const bool counts = std::abs(u) >= kLeastSteep && std::abs(u) <= kMostSteep;
    const double slope = 1 / (std::cosh(u) * std::cosh(u));
    const double weight = std::sqrt(static_cast<double>(shape.V)) / 50 / slope;
    weights[i] = __float2bfloat16_rn(counts ? static_cast<float>(weight) : 0);
  }
  CUDA_CHECK(cudaMemcpy(d_out, weights.data(), W * sizeof(bf16), cudaMemcpyHostToDevice));
}

// Tolerances. Roundings to bf16 on the way to a result count like one of the result itself, see
// dot_tolerance. No sum but those over V is of more than 2 (E + W) terms, xr's and ar's together.
double features_tolerance(const Shape& shape, int roundings) {
  const int64_t chain = 2 * (shape.E + shape.W);
  return dot_tolerance(chain, tensor_core_sum(chain), sqrt(roundings) * kRoundoffBf16);
}

// Of out, if u takes `roundings`. tanh's slope is at most 1: out is off by no more than u is. u has
// an rms of 1, out, where u is spread as a Laplace distribution, one of 0.57: that is 2 times as
// much of it. tanh itself and the rounding of out come on top of that.
double output_tolerance(const Shape& shape, int roundings) {
  return hypot(2 * features_tolerance(shape, roundings),
               dot_tolerance(1, kRoundoffFp32, hypot(kRoundoffBf16, 0x1p-11)));
}

// Of each gradient. 1 - tanh(u)^2 changes by -2 tanh(u) of itself per unit of u, at most 2: g is
// off by twice what u is, whose rms is 1, and with it P, Q, R and S. Their own roundings, those of
// what they are multiplied by and of all that follows are `roundings`; `chain` is how many vertices
// one fp32 accumulator of the tensor cores adds up, two products a vertex.
//
// Of a steep vertex g is off by 2 |u| times u's relative error, and its part of the gradients is at
// most a half.
double gradient_tolerance(const Shape& shape, int roundings_of_u, int roundings, int64_t chain,
                          bool steep) {
  const int64_t terms = 2 * (chain + shape.E + shape.W);
  const double of_u = steep ? hypot(2, kMostSteep) : 2;
  return hypot(of_u * features_tolerance(shape, roundings_of_u),
               dot_tolerance(terms, tensor_core_sum(terms), sqrt(roundings) * kRoundoffBf16));
}

// ---- unfused ------------------------------------------------------------------------------------

// dOut * (1 - t^2): what a framework computes from the t = tanh(u) that it saved.
struct TanhBackward {
  __device__ float operator()(float d_out, float t) const { return d_out * (1 - t * t); }
};

// out = tanh(in)
__global__ void tanh_of(const bf16* in, bf16* out, size_t count) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (i >= count) return;
  Pack pack = *reinterpret_cast<const Pack*>(in + i);
  for (bf16& value : pack.values)
    value = __float2bfloat16_rn(tanh_approximate(__bfloat162float(value)));
  *reinterpret_cast<Pack*>(out + i) = pack;
}

// Three temporaries, t1 to t3, are used again, as a framework's allocator does.
void add_unfused_forward(GradientsProblem& table) {
  const auto [V, E, W] = table.shape;
  const int64_t count = table.shape.vertex_values();
  const auto temporary = [&] { return table.problem.output<bf16>(count); };
  const auto xr = temporary(), xi = temporary(), ar = temporary(), ai = temporary();
  const auto t1 = temporary(), t2 = temporary(), t3 = temporary();
  const unsigned blocks = blocks_for(count, kPerBlock);
  const auto launch = [=, V = V, E = E, W = W, &table] {
    const auto product = [&](const bf16* left, const bf16* right, Transposed right_is, bf16* to,
                             int64_t depth) {
      library_product(table.blas, left, kPlain, right, right_is, to, V, W, depth);
    };
    product(table.Gr, table.x, kPlain, xr, E);
    product(table.Gi, table.x, kPlain, xi, E);
    product(xr, table.Lr, kTransposed, t1, W);
    product(xi, table.Li, kTransposed, t2, W);
    elementwise<Subtract><<<blocks, kThreads>>>(t1, t2, ar, count);
    product(xi, table.Lr, kTransposed, t1, W);
    product(xr, table.Li, kTransposed, t2, W);
    elementwise<Add><<<blocks, kThreads>>>(t1, t2, ai, count);
    elementwise<Multiply><<<blocks, kThreads>>>(xr, ar, t1, count);
    elementwise<Multiply><<<blocks, kThreads>>>(xi, ai, t2, count);
    elementwise<Add><<<blocks, kThreads>>>(t1, t2, t3, count);
    tanh_of<<<blocks, kThreads>>>(t3, table.vertices, count);
  };
  table.problem.kernel("unfused", Role::baseline, launch)
      .needs(80)
      .occupies(table.ends() + 7 * t1.bytes())
      // xr, as a factor of ar and of u; its products, their sum, the products and the sum in u.
      .checks = table.checks(6);
}

void add_unfused_backward(GradientsProblem& table) {
  const auto [V, E, W] = table.shape;
  const int64_t count = table.shape.vertex_values(), weights = table.shape.weights();
  const int64_t coefficients = table.shape.coefficients();
  const auto temporary = [&](int64_t size) { return table.problem.output<bf16>(size); };
  const auto g = temporary(count), P = temporary(count), Q = temporary(count);
  const auto d_xr = temporary(count), d_xi = temporary(count);
  const auto t1 = temporary(count), t2 = temporary(count);
  const auto w1 = temporary(weights), w2 = temporary(weights);
  const auto c1 = temporary(coefficients), c2 = temporary(coefficients);
  const auto launch = [=, V = V, E = E, W = W, &table] {
    const GradientsOperands in = table.operands();
    const bf16 *xr = table.saved[0], *xi = table.saved[1], *ar = table.saved[2];
    const bf16 *ai = table.saved[3], *out = table.saved[4];
    const unsigned blocks = blocks_for(count, kPerBlock);
    const unsigned weight_blocks = blocks_for(weights, kPerBlock);
    const unsigned coefficient_blocks = blocks_for(coefficients, kPerBlock);
    const auto product = [&](const bf16* left, Transposed left_is, const bf16* right, bf16* to,
                             int64_t rows, int64_t depth) {
      library_product(table.blas, left, left_is, right, kPlain, to, rows, W, depth);
    };
    elementwise<TanhBackward><<<blocks, kThreads>>>(in.d_out, out, g, count);
    elementwise<Multiply><<<blocks, kThreads>>>(g, xr, P, count);
    elementwise<Multiply><<<blocks, kThreads>>>(g, xi, Q, count);
    elementwise<Multiply><<<blocks, kThreads>>>(g, ar, d_xr, count);  // R
    elementwise<Multiply><<<blocks, kThreads>>>(g, ai, d_xi, count);  // S
    product(P, kPlain, in.Lr, t1, V, W);
    elementwise<Add><<<blocks, kThreads>>>(d_xr, t1, t2, count);
    product(Q, kPlain, in.Li, t1, V, W);
    elementwise<Add><<<blocks, kThreads>>>(t2, t1, d_xr, count);
    product(Q, kPlain, in.Lr, t1, V, W);
    elementwise<Add><<<blocks, kThreads>>>(d_xi, t1, t2, count);
    product(P, kPlain, in.Li, t1, V, W);
    elementwise<Subtract><<<blocks, kThreads>>>(t2, t1, d_xi, count);
    product(P, kTransposed, xr, w1, W, V);
    product(Q, kTransposed, xi, w2, W, V);
    elementwise<Add><<<weight_blocks, kThreads>>>(w1, w2, in.d_Lr, weights);
    product(Q, kTransposed, xr, w1, W, V);
    product(P, kTransposed, xi, w2, W, V);
    elementwise<Subtract><<<weight_blocks, kThreads>>>(w1, w2, in.d_Li, weights);
    product(in.Gr, kTransposed, d_xr, c1, E, V);
    product(in.Gi, kTransposed, d_xi, c2, E, V);
    elementwise<Add><<<coefficient_blocks, kThreads>>>(c1, c2, in.d_x, coefficients);
  };
  table.problem.kernel("unfused", Role::baseline, launch)
      .needs(80)
      // Without x: from what the forward pass saved, its products need only the other factor.
      .occupies(table.ends() - sizeof(bf16) * static_cast<double>(coefficients) +
                (5 + 7) * g.bytes() + 2 * w1.bytes() + 2 * c1.bytes())
      // 1 - t^2 is off by 2 |t| times what t was rounded by, up to a unit roundoff, while its own
      // rms is 3/4: that counts as 2. g; the saved xr or ar; P or R; the product with Lr and two
      // additions; the product with Gr^T, and the last addition. How cuBLAS splits the sum over V
      // is not known.
      .checks = table.checks(0, 2 + 1 + 1 + 1 + 3 + 2, V);
}

}  // namespace

GradientsProblem::GradientsProblem(Lesson& lesson, cublasHandle_t blas, Pass pass,
                                   GradientsShape shape, bool steep)
    : pass(pass),
      shape(shape),
      steep(steep && pass == Pass::backward && shape.V > 1),
      blas(blas),
      problem(declare(lesson, pass, shape)),
      Gr(problem.input<bf16>(shape.tangent_values(), tangent_scale(shape))),
      Gi(problem.input<bf16>(shape.tangent_values(), tangent_scale(shape))),
      x(problem.input<bf16>(shape.coefficients())),
      Lr(problem.input<bf16>(shape.weights(), weight_scale(shape))),
      Li(problem.input<bf16>(shape.weights(), weight_scale(shape))),
      vertices(pass == Pass::forward ? problem.output<bf16>(shape.vertex_values())
                                     : problem.input<bf16>(shape.vertex_values())) {
  const auto reference = [this] {
    return Reference<bf16>(this->blas, this->shape, Gr, Gi, x, Lr, Li);
  };
  if (pass == Pass::forward) {
    expected.push_back(problem.reference(shape.vertex_values()));
    problem.adjust_inputs([this] {
      if (this->shape.V > 1) make_steep(this->shape, this->shape.V - 1, kForwardFactor, Gr, Gi);
    });
    problem.reference_from(Reference<bf16>::bytes(shape),
                           [=, this] { reference().forward(expected[0]); });
    return;
  }
  for (const int64_t count : {shape.coefficients(), shape.weights(), shape.weights()}) {
    gradients.push_back(problem.output<bf16>(count));
    expected.push_back(problem.reference(count));
  }
  for (int i = 0; i < 5; ++i) saved.push_back(problem.input<bf16>(shape.vertex_values()));
  problem.adjust_inputs([=, this] {
    // The last vertex weighs more in the sums over the vertices.
    const size_t values = static_cast<size_t>(this->shape.W);
    last_term::multiply(vertices.data(), {(this->shape.V - 1) * values, values},
                        last_term::weight(static_cast<double>(this->shape.V)));
    if (this->steep) make_steep(this->shape, 0, kBackwardFactor, Gr, Gi);
    reference().save({saved[0], saved[1], saved[2], saved[3], saved[4]});
    if (this->steep) weigh_steep_vertex(this->shape, saved[0], saved[2], vertices);
  });
  const double scratch = std::max(Reference<bf16>::bytes(shape), check_gradients_bytes(shape));
  problem.reference_from(scratch, [=, this] {
    // Finite differences are not exact enough where a vertex is steep.
    if (!this->steep) report_difference(check_gradients(this->blas, this->shape, Gr, Gi, vertices));
    reference().backward(vertices, expected[0], expected[1], expected[2]);
  });
}

GradientsOperands GradientsProblem::operands() const {
  const bool forward = pass == Pass::forward;
  const auto gradient = [&](int i) { return forward ? nullptr : gradients[i].data(); };
  return {.Gr = Gr,
          .Gi = Gi,
          .x = x,
          .Lr = Lr,
          .Li = Li,
          .d_out = forward ? nullptr : vertices.data(),
          .out = forward ? vertices.data() : nullptr,
          .d_x = gradient(0),
          .d_Lr = gradient(1),
          .d_Li = gradient(2),
          .V = shape.V,
          .E = static_cast<int>(shape.E),
          .W = static_cast<int>(shape.W)};
}

double GradientsProblem::ends() const { return bytes_of_ends(pass, shape); }

std::vector<Check> GradientsProblem::checks(int roundings_of_u, int roundings,
                                            int64_t chain) const {
  if (pass == Pass::forward) {
    return {{vertices.storage(), expected[0].storage(), output_tolerance(shape, roundings_of_u)}};
  }
  const double tolerance = gradient_tolerance(shape, roundings_of_u, roundings, chain, steep);
  std::vector<Check> checks;
  for (size_t i = 0; i < gradients.size(); ++i) {
    checks.push_back({gradients[i].storage(), expected[i].storage(), tolerance});
  }
  return checks;
}

GradientsTemporaries::GradientsTemporaries(GradientsProblem& table, int matrices, unsigned slices)
    : slices(static_cast<int>(slices)),
      count(table.shape.coefficients()),
      M(table.problem.output<bf16>(matrices * count)),
      dM(table.problem.output<bf16>(2 * count)),
      partials(table.problem.output<float>(slices * 3 * count)),
      D(table.problem.output<float>(count)) {}

void add_unfused(GradientsProblem& problem) {
  if (problem.steep) return;  // it multiplies by 1 - t^2 of a rounded t = tanh(u)
  problem.pass == Pass::forward ? add_unfused_forward(problem) : add_unfused_backward(problem);
}

}  // namespace problems
