#include "problems/gradient_check.h"

#include <cmath>

#include "common/numerics.h"

namespace problems {

using namespace common;

namespace {

double norm(const std::vector<double>& vector) {
  double sum = 0;
  for (const double value : vector) sum += value * value;
  return std::sqrt(sum);
}

}  // namespace

std::vector<double> to_host(const double* from, size_t count) {
  std::vector<double> result(count);
  CUDA_CHECK(cudaMemcpy(result.data(), from, count * sizeof(double), cudaMemcpyDeviceToHost));
  return result;
}

void to_device(const std::vector<double>& from, double* to) {
  CUDA_CHECK(cudaMemcpy(to, from.data(), from.size() * sizeof(double), cudaMemcpyHostToDevice));
}

std::vector<double> random_fp64(size_t count, double scale, double center, uint64_t seed) {
  Storage storage;
  storage.count = count, storage.type = Type::fp64, storage.element_bytes = sizeof(double);
  storage.scale = scale, storage.center = center;
  storage.allocate();
  fill_random(storage, seed);
  return to_host(static_cast<const double*>(storage.data), count);
}

std::vector<double> moved(std::vector<double> base, const std::vector<double>& direction,
                          double h) {
  for (size_t i = 0; i < base.size(); ++i) base[i] += h * direction[i];
  return base;
}

void Loss::add(const std::vector<double>& left, const std::vector<double>& right) {
  for (size_t i = 0; i < left.size(); ++i) {
    const long double term = static_cast<long double>(left[i]) * right[i];
    sum += term;
    squares += term * term;
  }
}

double check_slope(const char* name, const std::vector<double>& gradient,
                   const std::vector<double>& direction, const Loss& up, const Loss& down,
                   const DifferenceBound& bound) {
  long double slope = 0;
  for (size_t i = 0; i < gradient.size(); ++i) {
    slope += static_cast<long double>(gradient[i]) * direction[i];
  }
  const double unit =
      norm(gradient) / std::sqrt(static_cast<double>(gradient.size())) * norm(direction);
  const long double difference = (up.sum - down.sum) / (2 * bound.h);
  const double error = static_cast<double>(fabsl(difference - slope)) / unit;
  const double terms = static_cast<double>(sqrtl(up.squares));
  const double most = bound.curvature * bound.h * bound.h + bound.roundoff * terms / bound.h / unit;
  if (!(error <= most)) {  // so that a NaN is beyond it
    fail(kVerificationFailed,
         "the reference's %s and finite differences of the forward pass differ by %.1e of its "
         "size, expected are at most %.1e",
         name, error, most);
  }
  return error;
}

}  // namespace problems
