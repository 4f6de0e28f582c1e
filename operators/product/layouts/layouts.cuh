// Products of factors that lie transposed, of a batch of them, and with a bias, out of the ways to
// compute one product of two row-major matrices: a factor that lies the other way round is copied
// before, the products of a batch follow one another, and a small kernel adds the bias.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "operators/estimate.h"
#include "operators/operands.h"
#include "operators/product/layouts/rows.cuh"
#include "operators/product/shape.h"
#include "operators/product/transpose.cuh"

namespace operators::product {

/// The ways to compute one product, of rows that are dense or aligned.
template <typename T>
using Multiply =
    std::function<std::vector<Way>(const Workspace&, const Memory<T>&, const Memory<T>&,
                                   const Memory<T>&, ProductShape, RowStrides)>;

/// The same of factors of which the one or the other lies transposed, and is not copied; none where
/// the device has no such kernels.
template <typename T>
using MultiplyTurned =
    std::function<std::vector<Way>(const Workspace&, const Memory<T>&, const Memory<T>&,
                                   const Memory<T>&, ProductShape, RowStrides, bool a_is_turned)>;

/// The factors or the results of a batch of products: matrices (rows, cols), as the product sees
/// them. Where they are `transposed`, memory has (cols, rows). Rows in memory are `stride` elements
/// apart, and matrices `between`; of one matrix for all of the batch that is 0.
template <typename T>
struct Matrices {
  Memory<T> data;
  int64_t rows, cols, stride, between;
  bool transposed = false;

  int64_t cols_in_memory() const { return transposed ? rows : cols; }
  bool are_dense() const { return stride == cols_in_memory(); }
  int64_t apart() const { return are_dense() ? 0 : stride; }
};

/// c = a b + bias for each of a batch. dense_rows: `multiply` takes no others.
template <typename T>
class LayoutProduct {
 public:
  LayoutProduct(const Workspace& workspace, Multiply<T> multiply, MultiplyTurned<T> turned,
                const Matrices<T>& a, const Matrices<T>& b, const Matrices<T>& c, int64_t batch,
                bool dense_rows, std::optional<Memory<T>> bias = {})
      : workspace_(workspace),
        multiply_(std::move(multiply)),
        turned_(std::move(turned)),
        a_(a),
        b_(b),
        c_(c),
        batch_(batch),
        dense_rows_(dense_rows),
        bias_(std::move(bias)) {
    // With one right factor for all, left factors below each other are one.
    const bool below = !a_.transposed && a_.between == a_.rows * a_.stride &&
                       c_.between == c_.rows * c_.stride && batch_ * a_.rows <= kMostRows;
    if (batch_ > 1 && b_.between == 0 && below) {
      a_.rows = c_.rows = batch_ * a_.rows;
      batch_ = 1;
    }
  }

  /// What is not copied is often faster; where one way alone is wanted, the other one gets no
  /// memory for its copies.
  std::vector<Way> ways() const {
    const bool may_turn = turned_ && a_.transposed != b_.transposed;
    if (!may_turn) return ways_of(false, workspace_);
    if (!workspace_.all_ways && workspace_.only.empty()) {
      Workspace nowhere = workspace_;
      nowhere.of_any = nowhere.of_zeros = [](size_t bytes) {
        return Memory<char>([]() -> char* { return nullptr; }, bytes);
      };
      const double in_rows = least(ways_of(false, nowhere)), turned = least(ways_of(true, nowhere));
      return ways_of(turned <= in_rows, workspace_);
    }
    std::vector<Way> all = ways_of(true, workspace_);
    for (Way& way : ways_of(false, workspace_)) all.push_back(std::move(way));
    return all;
  }

 private:
  static constexpr int64_t kMostRows = 1 << 30;

  /// A factor's copy; `once` for all of the batch.
  struct Copy {
    std::function<void()> launch;
    double bytes;
    bool once;
  };

  static double least(const std::vector<Way>& ways) {
    double least = INFINITY;
    for (const Way& way : ways) least = std::min(least, way.microseconds);
    return least;
  }

  /// turned: as the factors lie; else what is transposed is copied into rows.
  std::vector<Way> ways_of(bool turned, const Workspace& workspace) const {
    const auto number = std::make_shared<int64_t>(0);  // of the product in the batch
    std::vector<Copy> copies;
    const auto factor = [&](const Matrices<T>& of) {
      return turned ? one_of(of, number) : in_rows(of, number, workspace, copies);
    };
    const Matrices<T> a = factor(a_), b = factor(b_), c = one_of(c_, number);
    const std::string words = more_words(turned);
    Workspace own = workspace;
    if (own.only.size() > words.size() && own.only.ends_with(words)) {
      own.only.resize(own.only.size() - words.size());
    }
    const ProductShape shape{static_cast<int>(c_.rows), static_cast<int>(c_.cols),
                             static_cast<int>(a_.cols)};
    const RowStrides strides{a.apart(), b.apart(), c.apart()};
    std::vector<Way> ways =
        turned ? turned_(own, a.data, b.data, c.data, shape, strides, a_.transposed)
               : multiply_(own, a.data, b.data, c.data, shape, strides);
    if (words.empty()) return ways;
    for (Way& way : ways) {
      way.name += words;
      way.microseconds = microseconds_of(way.microseconds, copies);
      way.launch = [self = *this, number, copies, multiply = std::move(way.launch)] {
        for (*number = 0; *number < self.batch_; ++*number) {
          for (const Copy& copy : copies) {
            if (*number == 0 || !copy.once) copy.launch();
          }
          multiply();
        }
        self.add_bias_to_all();
      };
    }
    return ways;
  }

  /// Of a batch the matrix of this number.
  Matrices<T> one_of(Matrices<T> of, const std::shared_ptr<int64_t>& number) const {
    if (batch_ == 1 || of.between == 0) return of;
    of.data = Memory<T>(
        [data = of.data, between = of.between, number] { return data.data() + *number * between; },
        of.data.size());
    return of;
  }

  /// The same row by row: a copy in the workspace, if it is transposed. Its rows have whole lines of
  /// 128 bytes, unless they have to be dense.
  Matrices<T> in_rows(const Matrices<T>& of, const std::shared_ptr<int64_t>& number,
                      const Workspace& workspace, std::vector<Copy>& copies) const {
    Matrices<T> found = one_of(of, number);
    if (!of.transposed) return found;
    constexpr int64_t kLine = 128 / sizeof(T);
    const int64_t stride = dense_rows_ ? of.cols : primitives::ceil_div(of.cols, kLine) * kLine;
    const Memory<T> copy = workspace.template any<T>(static_cast<size_t>(of.rows * stride));
    copies.push_back({[=, from = found.data, stream = workspace.stream] {
                        launch_transpose<T>({from, of.cols, of.rows, of.stride},
                                            {copy, of.rows, stride, stride}, stream);
                      },
                      2.0 * sizeof(T) * static_cast<double>(of.rows * of.cols), of.between == 0});
    found.data = copy, found.stride = stride, found.transposed = false;
    return found;
  }

  std::string more_words(bool turned) const {
    const std::string how = turned ? " as it lies, transposed" : " transposed before";
    return (a_.transposed ? "; a" + how : "") + (b_.transposed ? "; b" + how : "") +
           (batch_ > 1 ? "; " + std::to_string(batch_) + " in turn" : "") +
           (bias_ ? "; bias added after" : "");
  }

  double microseconds_of(double product, const std::vector<Copy>& copies) const {
    const auto batch = static_cast<double>(batch_);
    double all = batch * product - (batch - 1) * (kFirstLaunch - kNextLaunch);
    for (const Copy& copy : copies) {
      all += (copy.once ? 1 : batch) * (kNextLaunch + copy.bytes / memory_rate());
    }
    if (bias_) {
      all += kNextLaunch +
             2.0 * sizeof(T) * batch * static_cast<double>(c_.rows * c_.cols) / memory_rate();
    }
    return all;
  }

  void add_bias_to_all() const {
    if (!bias_ || bias_->data() == nullptr) return;
    launch_add_bias<T>({c_.data, batch_, c_.rows, c_.cols, c_.stride, c_.between}, bias_->data(),
                       workspace_.stream);
  }

  Workspace workspace_;
  Multiply<T> multiply_;
  MultiplyTurned<T> turned_;
  Matrices<T> a_, b_, c_;
  int64_t batch_;
  bool dense_rows_;
  std::optional<Memory<T>> bias_;
};

}  // namespace operators::product
