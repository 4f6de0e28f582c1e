#include <algorithm>
#include <cmath>

#include "common/numerics.h"
#include "primitives/launch.h"
#include "problems/diffusion/diffusion.h"
#include "problems/framework.cuh"
#include "problems/last_term.cuh"

namespace problems {

using namespace primitives;

using bf16 = __nv_bfloat16;

namespace {

// ---- Both passes, plainly, in fp64, with the products by cuBLAS ---------------------------------

// T is bf16, or double where finite differences need inputs that bf16 cannot tell apart.
__device__ double as_double(bf16 value) { return __bfloat162float(value); }
__device__ double as_double(double value) { return value; }

// values (rows, W) = mass[:, None] * values; one thread an element.
__global__ void scale_rows_fp64(double* values, const bf16* mass, size_t count, int64_t W) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) values[i] *= as_double(mass[i / W]);
}

// spectrum (E, W) = exp(-evalues[:, None] * times[None, :]) * spectrum; one thread an element.
template <typename T>
__global__ void damp_fp64(double* spectrum, const bf16* evalues, const T* times, size_t count,
                          int64_t W) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) spectrum[i] *= exp(-as_double(evalues[i / W]) * as_double(times[i % W]));
}

// spectrum (E, W) comes as basis^T dOut, and becomes s = dSpectral + that; one thread a column, for
// which it also computes dTimes. E: all rows, of all meshes.
template <typename T>
__global__ void spectrum_gradient_fp64(double* spectrum, const T* d_spectral, const T* spectral,
                                       const bf16* evalues, double* d_times, int64_t E, int64_t W) {
  const int64_t w = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (w >= W) return;
  double sum = 0;
  for (int64_t e = 0; e < E; ++e) {
    const int64_t i = e * W + w;
    spectrum[i] += as_double(d_spectral[i]);
    sum += as_double(evalues[e]) * spectrum[i] * as_double(spectral[i]);
  }
  d_times[w] = -sum;
}

int64_t reference_rows(const DiffusionShape& shape) { return std::min(shape.V, kReferenceRows); }

// For each mesh spectrum (E, W) = basis^T (mass[:, None] * values), without the mass if it is null.
template <typename T>
void project_fp64(cublasHandle_t blas, const DiffusionShape& shape, const bf16* basis,
                  const bf16* mass, const T* values, double* spectrum) {
  const auto [V, E, W, meshes] = shape;
  const int64_t chunk = reference_rows(shape);
  Scratch<double> basis64(chunk * E), values64(chunk * W);
  for (int64_t mesh = 0; mesh < meshes; ++mesh) {
    for (int64_t v = 0; v < V; v += chunk) {
      const int64_t row = mesh * V + v, rows = std::min(chunk, V - v);
      to_fp64(basis + row * E, Type::bf16, rows * E, basis64);
      to_fp64(values + row * W, type_of<T>, rows * W, values64);
      if (mass) {
        scale_rows_fp64<<<blocks_for(rows * W, kThreads), kThreads>>>(values64, mass + row,
                                                                      rows * W, W);
        CUDA_CHECK(cudaGetLastError());
      }
      product_fp64(blas, 1, basis64, kTransposed, values64, kPlain, v > 0 ? 1 : 0,
                   spectrum + mesh * E * W, E, W, rows);
    }
  }
}

// For each mesh result (V, W) = mass[:, None] * (basis spectrum), without the mass if it is null.
void expand_fp64(cublasHandle_t blas, const DiffusionShape& shape, const bf16* basis,
                 const bf16* mass, const double* spectrum, double* result) {
  const auto [V, E, W, meshes] = shape;
  const int64_t chunk = reference_rows(shape);
  Scratch<double> basis64(chunk * E);
  for (int64_t mesh = 0; mesh < meshes; ++mesh) {
    for (int64_t v = 0; v < V; v += chunk) {
      const int64_t row = mesh * V + v, rows = std::min(chunk, V - v);
      to_fp64(basis + row * E, Type::bf16, rows * E, basis64);
      matmul_fp64(blas, basis64, spectrum + mesh * E * W, result + row * W, rows, W, E);
    }
  }
  if (mass) {
    const int64_t count = shape.vertex_values();
    scale_rows_fp64<<<blocks_for(count, kThreads), kThreads>>>(result, mass, count, W);
    CUDA_CHECK(cudaGetLastError());
  }
}

template <typename T>
void forward_fp64(cublasHandle_t blas, const DiffusionShape& shape, const bf16* basis,
                  const bf16* mass, const bf16* evalues, const T* times, const T* x,
                  double* spectral, double* out) {
  project_fp64<T>(blas, shape, basis, mass, x, spectral);
  const int64_t count = shape.spectrum_values();
  damp_fp64<T><<<blocks_for(count, kThreads), kThreads>>>(spectral, evalues, times, count, shape.W);
  CUDA_CHECK(cudaGetLastError());
  expand_fp64(blas, shape, basis, nullptr, spectral, out);
}

template <typename T>
void backward_fp64(cublasHandle_t blas, const DiffusionShape& shape, const bf16* basis,
                   const bf16* mass, const bf16* evalues, const T* times, const T* spectral,
                   const T* d_out, const T* d_spectral, double* d_times, double* d_x) {
  const int64_t count = shape.spectrum_values();
  Scratch<double> s(count);
  project_fp64<T>(blas, shape, basis, nullptr, d_out, s);
  spectrum_gradient_fp64<T><<<blocks_for(shape.W, 32), 32>>>(
      s, d_spectral, spectral, evalues, d_times, shape.meshes * shape.E, shape.W);
  damp_fp64<T><<<blocks_for(count, kThreads), kThreads>>>(s, evalues, times, count, shape.W);
  CUDA_CHECK(cudaGetLastError());
  expand_fp64(blas, shape, basis, mass, s, d_x);
}

// Bytes that either reference allocates while it runs.
double reference_bytes(const DiffusionShape& shape) {
  return 8.0 *
         (static_cast<double>(reference_rows(shape)) * static_cast<double>(shape.E + shape.W) +
          static_cast<double>(shape.spectrum_values()));
}

// ---- Is the reference's gradient the gradient? --------------------------------------------------

// backward_fp64 was derived by hand from forward_fp64: it is held to finite differences of the loss
//
//     f = sum(dOut * out) + sum(dSpectral * spectral)
//
// see problems/gradient_check.h. The bound's two parts:
//
//   - f is linear in x. In times each term of f' has a factor evalue * d < 2 for each further
//     derivative, so that f''' is to f' as 4 to 1, and 4 times that is left room for.
//   - The elements of out and spectral are off by dot_tolerance(V + E) of themselves,
//     independently.
//
// With fp64's roundoff of 2^-53, h = 2^-16 makes both parts about 10^-9.
constexpr int64_t kDifferenceRows = 256, kDifferenceMeshes = 3;  // enough to run the same code
constexpr double kStep = 0x1p-16;

// As many of the inputs take part, whichever: they are random numbers.
DiffusionShape difference_shape(DiffusionShape shape) {
  shape.V = std::min(shape.V, kDifferenceRows);
  shape.meshes = std::min(shape.meshes, kDifferenceMeshes);
  return shape;
}

// The larger of both gradients' differences to finite differences.
double check_gradients(cublasHandle_t blas, const DiffusionShape& shape, const bf16* basis,
                       const bf16* mass, const bf16* evalues, const bf16* d_out,
                       const bf16* d_spectral) {
  const size_t vertex_values = shape.vertex_values(), spectrum_values = shape.spectrum_values();
  Scratch<double> x64(vertex_values), times64(shape.W), out64(vertex_values);
  Scratch<double> spectral64(spectrum_values);
  Scratch<double> d_out64(vertex_values), d_spectral64(spectrum_values);
  to_fp64(d_out, Type::bf16, vertex_values, d_out64);
  to_fp64(d_spectral, Type::bf16, spectrum_values, d_spectral64);
  const std::vector<double> d_out_host = to_host(d_out64, vertex_values);
  const std::vector<double> d_spectral_host = to_host(d_spectral64, spectrum_values);
  const auto loss = [&](const std::vector<double>& x, const std::vector<double>& times) {
    to_device(x, x64);
    to_device(times, times64);
    forward_fp64<double>(blas, shape, basis, mass, evalues, times64, x64, spectral64, out64);
    Loss result;
    result.add(d_out_host, to_host(out64, vertex_values));
    result.add(d_spectral_host, to_host(spectral64, spectrum_values));
    return result;
  };

  const std::vector<double> x = random_fp64(vertex_values, 1, 0, 1);
  const std::vector<double> times = random_fp64(shape.W, 0.5, 0.5, 2);
  loss(x, times);  // leaves spectral64, which backward needs
  Scratch<double> d_times64(shape.W), d_x64(vertex_values);
  backward_fp64<double>(blas, shape, basis, mass, evalues, times64, spectral64, d_out64,
                        d_spectral64, d_times64, d_x64);

  const DifferenceBound bound = {.h = kStep,
                                 .curvature = 4.0 * 4 / 6,
                                 .roundoff = dot_tolerance(shape.V + shape.E, 0x1p-53, 0x1p-53)};
  const std::vector<double> along_x = random_fp64(vertex_values, 1, 0, 3);
  const std::vector<double> along_times = random_fp64(shape.W, 1, 0, 4);
  return std::max(check_slope("dX", to_host(d_x64, vertex_values), along_x,
                              loss(moved(x, along_x, kStep), times),
                              loss(moved(x, along_x, -kStep), times), bound),
                  check_slope("dTimes", to_host(d_times64, shape.W), along_times,
                              loss(x, moved(times, along_times, kStep)),
                              loss(x, moved(times, along_times, -kStep)), bound));
}

double check_gradients_bytes(const DiffusionShape& few) {
  return 8.0 * (5 * static_cast<double>(few.vertex_values()) +
                2 * static_cast<double>(few.spectrum_values()) + 4 * static_cast<double>(few.W)) +
         reference_bytes(few);
}

// ---- A table ------------------------------------------------------------------------------------

double bytes_of_ends(Pass pass, const DiffusionShape& shape) {
  const double V = static_cast<double>(shape.V), E = static_cast<double>(shape.E);
  const double W = static_cast<double>(shape.W), meshes = static_cast<double>(shape.meshes);
  const double small = pass == Pass::forward ? E * W : 2 * E * W;
  const double times = pass == Pass::forward ? W : 2 * W;
  return sizeof(bf16) * (meshes * (2 * V * W + V * E + V + E + small) + times);
}

Problem& declare(Lesson& lesson, Pass pass, const DiffusionShape& shape) {
  const double values = static_cast<double>(shape.vertex_values());
  // mass * values; and for an element of the spectrum its sign, two products and exp; backward also
  // the addition of dSpectral, and two products and an addition for dTimes.
  const double elementwise =
      values + (pass == Pass::forward ? 4 : 8) * static_cast<double>(shape.spectrum_values());
  const double products = 4 * values * static_cast<double>(shape.E);
  std::vector<Dim> dims = {{"V", shape.V}, {"E", shape.E}, {"W", shape.W}};
  if (shape.meshes > 1) dims.push_back({"meshes", shape.meshes});
  Problem& problem = lesson.problem(
      pass == Pass::forward ? "forward" : "backward", dims, "bf16",
      {.flops = products + elementwise, .bytes = bytes_of_ends(pass, shape)}, Rate::fp16);
  if (shape.vertices() <= 16384) problem.in_graph();
  return problem;
}

// Roundings to bf16 on the way to a result count like one of the result itself, see dot_tolerance.
double rounded(int64_t chain, double u_sum, int roundings) {
  return dot_tolerance(chain, u_sum, sqrt(static_cast<double>(roundings)) * kRoundoffBf16);
}

// ---- unfused ------------------------------------------------------------------------------------

// out (rows, W) = factor[:, None] * in
__global__ void scale_rows(const bf16* factor, const bf16* in, bf16* out, size_t count, int W) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (i >= count) return;
  const float scale = __bfloat162float(factor[i / W]);
  Pack pack = *reinterpret_cast<const Pack*>(in + i);
  for (bf16& value : pack.values) value = __float2bfloat16_rn(scale * __bfloat162float(value));
  *reinterpret_cast<Pack*>(out + i) = pack;
}

// out (E, W) = exp(-evalues[:, None] * times[None, :]). A framework needs a kernel each for the
// outer product, the sign and the exponential; this baseline gets them in one.
__global__ void damping_factors(const bf16* evalues, const bf16* times, bf16* out, size_t count,
                                int W) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (i >= count) return;
  const float evalue = __bfloat162float(evalues[i / W]);
  Pack pack = *reinterpret_cast<const Pack*>(times + i % W);
  for (bf16& value : pack.values) {
    value = __float2bfloat16_rn(damping(evalue, __bfloat162float(value)));
  }
  *reinterpret_cast<Pack*>(out + i) = pack;
}

// dTimes (W) = -(evalues[:, None] * s * spectral).sum(0), again several kernels in a framework. E:
// all rows, of all meshes. A warp owns 8 columns: lane l adds up every fourth row from l / 8 on of
// column l % 8.
__global__ void times_gradient(const bf16* evalues, const bf16* s, const bf16* spectral,
                               bf16* d_times, int E, int W) {
  const int warp = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32, w = 8 * warp + lane % 8;
  if (8 * warp >= W) return;
  float sum = 0;
  for (int e = lane / 8; e < E; e += 4) {
    const size_t at = static_cast<size_t>(e) * W + w;
    sum += __bfloat162float(evalues[e]) * __bfloat162float(s[at]) * __bfloat162float(spectral[at]);
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 8);
  sum += __shfl_xor_sync(0xffffffffu, sum, 16);
  if (lane < 8) d_times[w] = __float2bfloat16_rn(-sum);
}

// c (E, W) = basis^T values; for each mesh
void project(cublasHandle_t blas, const bf16* basis, const bf16* values, bf16* c,
             DiffusionShape shape) {
  library_products(blas, shape.meshes, basis, kTransposed, values, kPlain, c, shape.E, shape.W,
                   shape.V);
}

// c (V, W) = basis spectrum; for each mesh
void expand(cublasHandle_t blas, const bf16* basis, const bf16* spectrum, bf16* c,
            DiffusionShape shape) {
  library_products(blas, shape.meshes, basis, kPlain, spectrum, kPlain, c, shape.V, shape.W,
                   shape.E);
}

void add_unfused_forward(DiffusionProblem& table) {
  const auto [V, E, W, meshes] = table.shape;
  const int64_t values = table.shape.vertex_values(), small = table.shape.spectrum_values();
  const auto weighted = table.problem.output<bf16>(values);
  const auto projected = table.problem.output<bf16>(small);
  const auto factors = table.problem.output<bf16>(small);
  const auto launch = [=, W = static_cast<int>(W), &table] {
    const DiffusionOperands in = table.operands();
    scale_rows<<<blocks_for(values, kPerBlock), kThreads>>>(in.mass, in.values, weighted, values,
                                                            W);
    project(table.blas, in.basis, weighted, projected, table.shape);
    damping_factors<<<blocks_for(small, kPerBlock), kThreads>>>(in.evalues, in.times, factors,
                                                                small, W);
    elementwise<Multiply>
        <<<blocks_for(small, kPerBlock), kThreads>>>(factors, projected, in.spectrum, small);
    expand(table.blas, in.basis, in.spectrum, in.result, table.shape);
  };
  table.problem.kernel("unfused", Role::baseline, launch)
      .needs(80)
      .occupies(table.ends() + weighted.bytes() + projected.bytes() + factors.bytes())
      // mass * x, the product, the factors, spectral; how cuBLAS splits the sum is not known.
      .checks = table.checks(V, 2, 4, 1);
}

void add_unfused_backward(DiffusionProblem& table) {
  const auto [V, E, W, meshes] = table.shape;
  const int64_t values = table.shape.vertex_values(), small = table.shape.spectrum_values();
  const auto projected = table.problem.output<bf16>(small);
  const auto s = table.problem.output<bf16>(small);
  const auto factors = table.problem.output<bf16>(small);
  const auto expanded = table.problem.output<bf16>(values);
  const auto launch = [=, rows = static_cast<int>(meshes * E), W = static_cast<int>(W), &table] {
    const DiffusionOperands in = table.operands();
    project(table.blas, in.basis, in.values, projected, table.shape);
    elementwise<Add>
        <<<blocks_for(small, kPerBlock), kThreads>>>(in.d_spectral, projected, s, small);
    times_gradient<<<blocks_for(4 * W, kThreads), kThreads>>>(in.evalues, s, in.spectral,
                                                              in.d_times, rows, W);
    damping_factors<<<blocks_for(small, kPerBlock), kThreads>>>(in.evalues, in.times, factors,
                                                                small, W);
    elementwise<Multiply>
        <<<blocks_for(small, kPerBlock), kThreads>>>(factors, s, in.spectrum, small);
    expand(table.blas, in.basis, in.spectrum, expanded, table.shape);
    scale_rows<<<blocks_for(values, kPerBlock), kThreads>>>(in.mass, expanded, in.result, values,
                                                            W);
  };
  table.problem.kernel("unfused", Role::baseline, launch)
      .needs(80)
      .occupies(table.ends() + projected.bytes() + s.bytes() + factors.bytes() +
                table.spectrum.bytes() + expanded.bytes())
      // The product, s; the factors, damped; then the product and dX.
      .checks = table.checks(V, 2, 4, 2);
}

}  // namespace

DiffusionProblem::DiffusionProblem(Lesson& lesson, cublasHandle_t blas, Pass pass,
                                   DiffusionShape shape)
    : pass(pass),
      shape(shape),
      blas(blas),
      problem(declare(lesson, pass, shape)),
      values(problem.input<bf16>(shape.vertex_values())),
      // Each element of spectral adds up V terms and has a variance of 0.4, if not damped.
      basis(problem.input<bf16>(shape.vertices() * shape.E,
                                sqrt(3.0 / static_cast<double>(shape.V)))),
      mass(problem.input<bf16>(shape.vertices(), 0.9, 1)),
      evalues(problem.input<bf16>(shape.meshes * shape.E, 1, 1)),
      times(problem.input<bf16>(shape.W, 0.5, 0.5)),
      spectrum(problem.output<bf16>(shape.spectrum_values())),
      result(problem.output<bf16>(shape.vertex_values())),
      expected_result(problem.reference(shape.vertex_values())),
      expected_small(problem.reference(pass == Pass::forward ? shape.spectrum_values() : shape.W)) {
  // The last vertex of each mesh weighs more in the sums over the vertices: its values do, and its
  // mass, which multiplies them, is none of the small ones.
  problem.adjust_inputs([this] {
    const double weight = last_term::weight(static_cast<double>(this->shape.V));
    if (weight == 1) return;
    const size_t V = this->shape.V, W = this->shape.W, meshes = this->shape.meshes;
    last_term::multiply(values.data(), {(V - 1) * W, W, V * W, meshes}, weight);
    last_term::set(mass.data(), {V - 1, 1, V, meshes}, 1.5);
  });
  if (pass == Pass::forward) {
    problem.reference_from(reference_bytes(shape), [this] {
      forward_fp64<bf16>(this->blas, this->shape, basis, mass, evalues, times, values,
                         expected_small, expected_result);
    });
    return;
  }
  d_spectral = problem.input<bf16>(shape.spectrum_values());
  // What forward saved. The formulas hold for any: random numbers of a variance of 1.
  spectral = problem.input<bf16>(shape.spectrum_values(), sqrt(3.0));
  d_times = problem.output<bf16>(shape.W);
  // And the last eigenvector in dTimes.
  problem.adjust_inputs([this] {
    const auto [V, E, W, meshes] = this->shape;
    const last_term::Elements last = {static_cast<size_t>((meshes * E - 1) * W),
                                      static_cast<size_t>(W)};
    last_term::multiply(spectral->data(), last, last_term::weight(static_cast<double>(meshes * E)));
  });
  const DiffusionShape few = difference_shape(shape);
  const double bytes = std::max(reference_bytes(shape), check_gradients_bytes(few));
  problem.reference_from(bytes, [this, few] {
    report_difference(check_gradients(this->blas, few, basis, mass, evalues, values, *d_spectral));
    backward_fp64<bf16>(this->blas, this->shape, basis, mass, evalues, times, *spectral, values,
                        *d_spectral, expected_small, expected_result);
  });
}

DiffusionOperands DiffusionProblem::operands() const {
  const auto pointer = [](const auto& buffer) { return buffer ? buffer->data() : nullptr; };
  return {.values = values,
          .basis = basis,
          .mass = mass,
          .evalues = evalues,
          .times = times,
          .d_spectral = pointer(d_spectral),
          .spectral = pointer(spectral),
          .spectrum = spectrum,
          .result = result,
          .d_times = pointer(d_times),
          .V = shape.V,
          .E = static_cast<int>(shape.E),
          .W = static_cast<int>(shape.W)};
}

double DiffusionProblem::ends() const { return bytes_of_ends(pass, shape); }

std::vector<Check> DiffusionProblem::checks(int64_t chain, int sum_roundings,
                                            int spectrum_roundings, int result_roundings) const {
  // An error of the spectrum is, relatively, one of the product from the spectrum, whose own is
  // added.
  const double in_spectrum = rounded(chain, tensor_core_sum(chain), spectrum_roundings);
  const double in_result =
      hypot(in_spectrum, rounded(shape.E, tensor_core_sum(shape.E), result_roundings));
  const Check result_check = {result.storage(), expected_result.storage(), in_result};
  if (pass == Pass::forward) {
    return {{spectrum.storage(), expected_small.storage(), in_spectrum}, result_check};
  }
  const double in_times = hypot(rounded(chain, tensor_core_sum(chain), sum_roundings),
                                rounded(shape.meshes * shape.E, kRoundoffFp32, 1));
  return {result_check, {d_times->storage(), expected_small.storage(), in_times}};
}

void add_unfused(DiffusionProblem& problem) {
  problem.pass == Pass::forward ? add_unfused_forward(problem) : add_unfused_backward(problem);
}

}  // namespace problems
