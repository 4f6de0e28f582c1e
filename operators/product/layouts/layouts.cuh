// Products of factors that lie transposed, of a batch of them, and with a bias. There are up to
// three ways to go about it, and the one that should be the fastest is taken:
//
//     in turn         A product of two row-major matrices after the other, by whichever kernels
//                     multiply one. A factor that lies transposed is copied into rows before.
//     as they lie     The same by kernels that read one of the factors transposed.
//     at once         All products of the batch in one launch, by kernels for many small products.
//
// The second adds a bias itself, and a small kernel adds it after the others.
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

#include "operators/caller.h"
#include "operators/estimate.h"
#include "operators/operands.h"
#include "operators/product/layouts/rows.cuh"
#include "operators/product/shape.h"
#include "operators/product/transpose.cuh"

namespace operators::product {

/// The factors or the results of a batch of products: matrices (rows, cols), as the product sees
/// them. Where they are `transposed`, memory has (cols, rows). Rows in memory are `stride` elements
/// apart, and matrices `between`; of one matrix for all of the batch that is 0.
template <typename T>
struct Matrices {
  Memory<T> data;
  int64_t rows, cols, stride, between;
  bool transposed = false;

  int64_t rows_in_memory() const { return transposed ? cols : rows; }
  int64_t cols_in_memory() const { return transposed ? rows : cols; }
  bool are_dense() const { return stride == cols_in_memory(); }
  int64_t apart() const { return are_dense() ? 0 : stride; }
};

/// What multiplies in a type. The last two may be empty, and may have no way.
template <typename T>
struct Multiplies {
  /// One product of two row-major matrices, whose rows are dense or aligned.
  std::function<std::vector<Way>(const Caller&, const Memory<T>&, const Memory<T>&,
                                 const Memory<T>&, ProductShape, RowStrides)>
      one;
  /// The same where one factor lies transposed. It adds the bias, too, if there is one.
  std::function<std::vector<Way>(const Caller&, const Memory<T>&, const Memory<T>&,
                                 const Memory<T>&, ProductShape, RowStrides, bool a_is_transposed,
                                 const std::optional<Memory<T>>& bias)>
      as_they_lie;
  /// A batch of products of row-major matrices. In types of 2 bytes factors may lie transposed.
  std::function<std::vector<Way>(const Caller&, const Matrices<T>&, const Matrices<T>&,
                                 const Matrices<T>&, int64_t batch)>
      at_once;
};

/// c = a b + bias for each of a batch.
template <typename T>
class LayoutProduct {
 public:
  LayoutProduct(const Caller& caller, Multiplies<T> multiplies, const Matrices<T>& a,
                const Matrices<T>& b, const Matrices<T>& c, int64_t batch,
                std::optional<Memory<T>> bias = {})
      : caller_(caller),
        multiplies_(std::move(multiplies)),
        a_(a),
        b_(b),
        c_(c),
        batch_(batch),
        bias_(std::move(bias)) {
    // With one right factor for all, left factors below each other are one.
    const bool below = !a_.transposed && a_.between == a_.rows * a_.stride &&
                       c_.between == c_.rows * c_.stride && batch_ * a_.rows <= kMostRows;
    if (batch_ > 1 && b_.between == 0 && below) {
      a_.rows = c_.rows = batch_ * a_.rows;
      batch_ = 1;
    }
  }

  /// Where one way alone is wanted, the others get no memory for their copies.
  std::vector<Way> ways() const {
    std::vector<How> hows = {How::in_turn};
    if (multiplies_.as_they_lie && a_.transposed != b_.transposed) hows.push_back(How::as_they_lie);
    if (multiplies_.at_once && batch_ > 1 && batch_ <= kMostAtOnce) hows.push_back(How::at_once);
    if (hows.size() > 1 && !caller_.search.all) {
      Caller nowhere = caller_;
      nowhere.workspace.of_any = nowhere.workspace.of_zeros = [](size_t bytes) {
        return Memory<char>([]() -> char* { return nullptr; }, bytes);
      };
      const auto takes = [&](How how) {
        const std::vector<Way> ways = ways_of(how, nowhere);
        const Way* const best = common::fastest(ways);
        const std::optional<WayId>& only = caller_.search.only;
        return best && (!only || best->id == *only) ? best->microseconds : INFINITY;
      };
      How best = hows[0];
      double least = INFINITY;
      for (const How how : hows) {
        const double microseconds = takes(how);
        if (microseconds < least) least = microseconds, best = how;
      }
      hows = {best};
    }
    std::vector<Way> all;
    for (const How how : hows) {
      for (Way& way : ways_of(how, caller_)) all.push_back(std::move(way));
    }
    return all;
  }

 private:
  static constexpr int64_t kMostRows = 1 << 30, kMostAtOnce = 65535;
  enum class How { in_turn, as_they_lie, at_once };

  /// A factor's copy; `once` for all of the batch.
  struct Copy {
    std::function<void()> launch;
    double bytes;
    bool once;
  };

  std::vector<Way> ways_of(How how, const Caller& caller) const {
    const auto number = std::make_shared<int64_t>(0);  // of the product in the batch
    std::vector<Copy> copies;
    Caller own = caller;
    // An id says how, too. Plain products keep theirs.
    const bool is_plain = how == How::in_turn && batch_ == 1;
    const WayId kind = is_plain ? 0 : way_id({static_cast<int64_t>(how), batch_});
    if (own.search.only) own.search.only = *own.search.only ^ kind;
    const ProductShape shape{static_cast<int>(c_.rows), static_cast<int>(c_.cols),
                             static_cast<int>(a_.cols)};
    std::vector<Way> ways;
    if (how == How::as_they_lie) {
      const Matrices<T> a = one_of(a_, number), b = one_of(b_, number), c = one_of(c_, number);
      ways = multiplies_.as_they_lie(own, a.data, b.data, c.data, shape,
                                     {a.apart(), b.apart(), c.apart()}, a.transposed, bias_);
    } else if (how == How::at_once) {
      const Matrices<T> a = all_in_rows(a_, caller, copies), b = all_in_rows(b_, caller, copies);
      ways = multiplies_.at_once(own, a, b, c_, batch_);
    } else {
      const Matrices<T> a = in_rows(one_of(a_, number), caller, copies),
                        b = in_rows(one_of(b_, number), caller, copies), c = one_of(c_, number);
      ways = multiplies_.one(own, a.data, b.data, c.data, shape, {a.apart(), b.apart(), c.apart()});
    }
    const std::string words = more_words(how);
    if (words.empty()) return ways;
    const int64_t launches = how == How::at_once ? 1 : batch_;
    const bool adds_bias = bias_ && how != How::as_they_lie;
    for (Way& way : ways) {
      way.name += words;
      way.id ^= kind;
      way.microseconds = microseconds_of(way.microseconds, launches, copies, adds_bias);
      way.launch = [self = *this, launches, adds_bias, number, copies,
                    multiply = std::move(way.launch)] {
        for (*number = 0; *number < launches; ++*number) {
          for (const Copy& copy : copies) {
            if (*number == 0 || !copy.once) copy.launch();
          }
          multiply();
        }
        if (adds_bias) self.add_bias_to_all();
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

  /// A matrix row by row: a copy in the workspace, if it is transposed.
  Matrices<T> in_rows(const Matrices<T>& of, const Caller& caller,
                      std::vector<Copy>& copies) const {
    return of.transposed ? copy_of(of, 1, of.between == 0, caller, copies) : of;
  }
  /// The same for all of a batch. In 2 bytes a matrix stays as it lies, where its rows in memory
  /// are aligned to 16.
  Matrices<T> all_in_rows(const Matrices<T>& of, const Caller& caller,
                          std::vector<Copy>& copies) const {
    if (lies_right(of)) return of;
    return copy_of(of, of.between == 0 ? 1 : batch_, true, caller, copies);
  }
  static bool lies_right(const Matrices<T>& of) {
    return sizeof(T) == 2 ? (of.stride | of.between) % 8 == 0 : !of.transposed;
  }
  /// Rows of a copy have whole lines of 128 bytes.
  Matrices<T> copy_of(const Matrices<T>& of, int64_t count, bool once, const Caller& caller,
                      std::vector<Copy>& copies) const {
    constexpr int64_t kLine = 128 / sizeof(T);
    const int64_t stride = primitives::ceil_div(of.cols, kLine) * kLine;
    const int64_t between = of.rows * stride;
    const Memory<T> copy = caller.workspace.template any<T>(static_cast<size_t>(count * between));
    copies.push_back({[=, from = of, stream = caller.stream] {
                        if (!from.transposed) {
                          return launch_copy_rows<T>(
                              {from.data, count, from.rows, from.cols, from.stride, from.between},
                              {copy, count, from.rows, stride, stride, between}, stream);
                        }
                        launch_transpose<T>({from.data, from.cols, from.rows, from.stride},
                                            {copy, from.rows, stride, stride}, stream,
                                            static_cast<unsigned>(count), from.between, between);
                      },
                      2.0 * sizeof(T) * static_cast<double>(count * of.rows * of.cols), once});
    return {copy, of.rows, of.cols, stride, of.between == 0 ? 0 : between};
  }

  std::string more_words(How how) const {
    const auto words = [how](const Matrices<T>& of, const char* name) -> std::string {
      if (!of.transposed) return "";
      const bool lies = how == How::as_they_lie || (how == How::at_once && lies_right(of));
      return std::string(name) + (lies ? " as it lies, transposed" : " transposed before");
    };
    const std::string count = std::to_string(batch_);
    return words(a_, "; a") + words(b_, "; b") +
           (how == How::at_once ? "; " + count + " at once"
            : batch_ > 1        ? "; " + count + " in turn"
                                : "") +
           (bias_ && how != How::as_they_lie ? "; bias added after" : "");
  }

  double microseconds_of(double product, int64_t launches, const std::vector<Copy>& copies,
                         bool adds_bias) const {
    const auto times = static_cast<double>(launches);
    double all = times * product - (times - 1) * (kFirstLaunch - kNextLaunch);
    for (const Copy& copy : copies) {
      all += (copy.once ? 1 : times) * (kNextLaunch + copy.bytes / memory_rate());
    }
    if (adds_bias) {
      all += kNextLaunch +
             2.0 * sizeof(T) * static_cast<double>(batch_ * c_.rows * c_.cols) / memory_rate();
    }
    return all;
  }

  void add_bias_to_all() const {
    if (bias_->data() == nullptr) return;
    launch_add_bias<T>({c_.data, batch_, c_.rows, c_.cols, c_.stride, c_.between}, bias_->data(),
                       caller_.stream);
  }

  Caller caller_;
  Multiplies<T> multiplies_;
  Matrices<T> a_, b_, c_;
  int64_t batch_;
  std::optional<Memory<T>> bias_;
};

}  // namespace operators::product
