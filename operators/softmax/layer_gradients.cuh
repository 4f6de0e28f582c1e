// What softmax(x w) and its cross-entropy have in common on their way back. Each has a kernel that
// makes g, the gradients of logits = x w. Then there are two products:
//
//     d_x = g w^T,  d_w = x^T g
//     x (B, D), w (D, C), g (B, C): T, row-major, dense; rows of g may be padded
//
// The products of operators/product read both factors row by row. So transposed copies are made
// first: of x and w; or, where x and g have fewer elements than w, of x and g, and then the first
// product is d_x^T = w g^T.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "operators/caller.h"
#include "operators/estimate.h"
#include "operators/product/shape.h"
#include "operators/product/transpose.cuh"
#include "operators/softmax/softmax.h"

namespace operators::softmax {

/// How many elements a row of `cols` is from the next in a matrix of our own. The products in 2
/// bytes need rows that begin at multiples of 16 bytes; those of fp32 take any.
template <typename T>
int64_t pitch(int64_t cols) {
  return sizeof(T) == 2 ? (cols + 7) / 8 * 8 : cols;
}

/// The steps of the fastest product c = a b; none if it is too large. A stride is 0 where rows are
/// dense. (These products are many kernels, so that a program has them once.)
template <typename T>
using ProductSteps =
    std::function<std::vector<Way>(const Caller&, const Memory<T>& a, const Memory<T>& b,
                                   const Memory<T>& c, product::ProductShape, product::RowStrides)>;

template <typename T>
struct LayerGradients {
  Memory<T> x, w, d_x, d_w;
  Memory<T> g;  ///< (B, C), rows pitch<T>(C) apart
  Way make_g;   ///< the step that writes it
};

/// The gradients as one way, or none if a product is too large.
template <typename T>
std::vector<Way> layer_gradients(const Caller& caller, const LayerGradients<T>& of,
                                 const SoftmaxShape& shape, const ProductSteps<T>& multiply) {
  const int64_t B = shape.rows, D = shape.inputs, C = shape.classes;
  struct Matrix {
    Memory<T> data;
    int64_t rows, cols, stride;
  };
  const auto given = [](const Memory<T>& data, int64_t rows, int64_t cols) {
    return Matrix{data, rows, cols, cols};
  };
  const auto own = [&](int64_t rows, int64_t cols, int64_t stride) {
    return Matrix{caller.workspace.any<T>(static_cast<size_t>(rows * stride)), rows, cols, stride};
  };
  const auto moves = [](int64_t elements) {
    return microseconds_to_move(2.0 * sizeof(T) * static_cast<double>(elements));
  };
  std::vector<Way> steps = {of.make_g};
  std::string name = "gradients of logits";
  const auto transpose = [&](const Matrix& from, const Matrix& to) {
    steps.push_back({"", moves(from.rows * from.cols),
                     [=, stream = caller.stream] {  // zeros up to the stride
                       product::launch_transpose<T>({from.data, from.rows, from.cols, from.stride},
                                                    {to.data, to.rows, to.stride, to.stride},
                                                    stream);
                     },
                     0});
  };
  const auto product = [&](const Matrix& a, const Matrix& b, const Matrix& c) {
    const auto apart = [](const Matrix& of) { return of.stride == of.cols ? 0 : of.stride; };
    const product::ProductShape sizes = {static_cast<int>(c.rows), static_cast<int>(c.cols),
                                         static_cast<int>(a.cols)};
    const auto found =
        multiply(caller.of_step(), a.data, b.data, c.data, sizes, {apart(a), apart(b), apart(c)});
    if (!found.empty()) name += ", then " + found[0].name;
    steps.insert(steps.end(), found.begin(), found.end());
    return !found.empty();
  };

  const Matrix x = given(of.x, B, D), w = given(of.w, D, C), d_x = given(of.d_x, B, D);
  const Matrix g = {of.g, B, C, pitch<T>(C)}, x_t = own(D, B, pitch<T>(B));
  transpose(x, x_t);
  if (moves(B * C) + moves(B * D) < moves(D * C)) {
    const Matrix g_t = own(C, B, pitch<T>(B)), d_x_t = own(D, B, B);
    transpose(g, g_t);
    if (!product(w, g_t, d_x_t)) return {};
    transpose(d_x_t, d_x);
  } else {
    const Matrix w_t = own(C, D, pitch<T>(D));
    transpose(w, w_t);
    if (!product(g, w_t, d_x)) return {};
  }
  if (!product(x_t, g, given(of.d_w, D, C))) return {};
  return {in_turn({name}, steps)};
}

/// A row of gradients of logits is worth so many threads: a warp of short rows, and of long ones so
/// many that the rows under way at a time fit into a cache.
inline constexpr int kShortRow = 512, kLongRow = 4096;

}  // namespace operators::softmax
