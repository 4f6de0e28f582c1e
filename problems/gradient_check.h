// Is the gradient that a lesson's fp64 reference computes the gradient of its forward pass?
//
// Along a direction d a loss f must change by <gradient, d>, which a central difference tells
// independently of how the gradient was derived:
//
//     (f(h) - f(-h)) / 2h = <gradient, d> + h^2 f''' / 6 + what f's rounding errors leave
//
// Both sides are compared in units of rms(gradient) * |d|, the size that <gradient, d> has for a
// random d.
#pragma once

#include <stddef.h>

#include <cstdint>
#include <vector>

namespace problems {

/// `count` doubles from the device; and to it.
std::vector<double> to_host(const double* from, size_t count);
void to_device(const std::vector<double>& from, double* to);

/// Random numbers as inputs are, uniform in [center - scale, center + scale), but in fp64.
std::vector<double> random_fp64(size_t count, double scale, double center, uint64_t seed);

/// base + h * direction
std::vector<double> moved(std::vector<double> base, const std::vector<double>& direction, double h);

/// A sum of products, added up in long double so that this has no part in its error.
struct Loss {
  long double sum = 0, squares = 0;  ///< of the terms, and of their squares
  void add(const std::vector<double>& left, const std::vector<double>& right);
};

/// The two parts of a difference's bound: h^2 f''' / 6 is at most `curvature` h^2 units, and f is
/// off by at most `roundoff` of the root of the sum of its terms' squares (if the terms' errors are
/// independent), at either end.
struct DifferenceBound {
  double h, curvature, roundoff;
};

/// |central difference - <gradient, direction>| in the units above, where `up` and `down` are the
/// losses at h and -h. A difference beyond the bound ends the program: `name` is not the gradient.
double check_slope(const char* name, const std::vector<double>& gradient,
                   const std::vector<double>& direction, const Loss& up, const Loss& down,
                   const DifferenceBound& bound);

}  // namespace problems
