// softmax(x W) of any shape: which kernels can compute it, and in which ways.
//
//     x (B, D), W (D, C), probs (B, C): fp32, row-major, dense
//
// Lesson 9's kernels have one size of tile, or two, and those on tensor cores take only rows that
// are whole vectors. Here the shape decides what a kernel is, and there are seven kinds of them. On
// any GPU:
//
//   rows, D split   at most 16 columns (few.cuh): a block has a row, and its threads share D
//   few rows        at most 8 rows of more columns (few.cuh): W streams past them
//   tiles           up to 256 columns (tiles.cuh): a block has all columns of 8 to 32 rows. Its
//                   warps share D, and if there are few rows several blocks do
//   online          more columns (tiles.cuh): tiles of up to 128 x 128, and a second kernel
//
// and on Hopper:
//
//   narrow          many rows of few columns (narrow.cuh): W stays in registers, x streams past it
//   cluster         few rows, or few columns (cluster.cuh): the blocks of a cluster share D
//   exchange        any shape (exchange.cuh): the blocks of a row run at the same time, and tell
//                   each other its maximum and sum
//
// docs/softmax.md says which of them a shape has, and why. The caller chooses how they multiply
// (product::Math).
//
// Each kind but the first can leave logits for the softmax of rows.cuh: that is unfused. Fused is
// one launch. Half fused is two, but the second one reads each logit once, since a row's maximum
// and sum are there already. If D is cut into slices there are two launches, too: the softmax adds
// the slices up.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "operators/softmax/few.cuh"
#include "operators/softmax/hopper/cluster.cuh"
#include "operators/softmax/hopper/narrow.cuh"
#include "operators/softmax/hopper/plans.cuh"
#include "operators/softmax/layer.cuh"
#include "operators/softmax/rows.cuh"
#include "operators/softmax/tiles.cuh"

namespace operators::softmax {

/// At most so many ways, of all kinds, are tried.
constexpr size_t kMostWays = 64;

/// In the order of Kernels.
inline constexpr const char* kNames[] = {"rows, D split", "few rows", "tiles",   "online",
                                         "narrow",        "cluster",  "exchange"};

/// The ways to compute probabilities with a kind of kernel, or with all kinds. Either list may be
/// empty.
struct Kind {
  std::string name = {};
  int capability = 0;  ///< the least compute capability, times 10; 90: Hopper, and no other
  std::vector<Way> unfused = {}, fused = {};
};

/// The ways to compute probs = softmax(x W). Sizes are at least 1; there are at most kMostInputs
/// inputs and kMostClasses classes. Only one launch may run at a time.
class SoftmaxProduct {
 public:
  SoftmaxProduct(const Caller& caller, const Memory<float>& x, const Memory<float>& W,
                 const Memory<float>& probs, const SoftmaxShape& shape)
      : layer_{caller, shape, x, W, caller.workspace.any<float>(most_sliced(shape))},
        probs_(probs),
        logits_(caller.search.all ? caller.workspace.any<float>(shape.rows * shape.classes)
                                  : probs),
        parts_(caller.workspace.any<float2>(shape.classes > kLeastForParts
                                                ? shape.rows * (blocks_for(shape.classes, 32) + 1)
                                                : 1)) {}

  /// The ways of all kinds that this device can run, those that should be the fastest first.
  Kind ways(Math math) const { return together(kinds(math)); }

  /// The kinds of kernels for this shape, each with its ways.
  std::vector<Kind> kinds(Math math) const {
    return math == Math::fp32   ? kinds<Math::fp32>()
           : math == Math::tf32 ? kinds<Math::tf32>()
                                : kinds<Math::split>();
  }

  /// The ways of several kinds in one list. A kind without an estimate counts as if it took as long
  /// as the best of the others, so that it is tried.
  Kind together(std::vector<Kind> kinds) const {
    std::erase_if(kinds, [](const Kind& kind) { return !runs(kind.capability); });
    const auto all = [&](auto list) {
      std::stable_sort(kinds.begin(), kinds.end(), [&](const Kind& a, const Kind& b) {
        return least(a.*list) < least(b.*list);
      });
      double first = kinds.empty() ? INFINITY : least(kinds.front().*list);
      if (!std::isfinite(first)) first = layer_.shape.flops() / 50e6;
      std::vector<Way> ways;
      for (const Kind& kind : kinds) {
        const double best = least(kind.*list);
        for (Way way : kind.*list) {
          if (!std::isfinite(best)) way.microseconds = first;
          way.name = kind.name + (way.name.empty() ? "" : ": ") + way.name;
          ways.push_back(way);
        }
      }
      return ways;
    };
    return {.unfused = all(&Kind::unfused), .fused = all(&Kind::fused)};
  }

 private:
  Layer layer_;
  Memory<float> probs_, logits_;  // the logits of the unfused ways
  Memory<float2> parts_;          // of long rows

  static size_t most_sliced(const SoftmaxShape& shape) {
    return static_cast<size_t>(std::min<double>(kMostSlices * shape.logits(), kMostSliced));
  }

  static bool runs(int capability) {
    if (capability == 90) return is_hopper();
    return compute_capability() >= capability;
  }

  static double least(const std::vector<Way>& ways) {
    const Way* const best = common::fastest(ways);
    return best ? best->microseconds : INFINITY;
  }

  template <Math kMath>
  std::vector<Kind> kinds() const {
    std::vector<Kind> all;
    const auto add = [&](const std::vector<Product>& products, int capability) {
      if (!products.empty()) all.push_back(kind_of(products, capability));
    };
    if constexpr (kMath != Math::split) {  // these round nothing, whatever `kMath` is
      if (layer_.C <= kFewColumns) {
        add({make_rows_split(layer_)}, 0);
        all.back().unfused.clear();  // it leaves no logits
      } else if (layer_.B <= kMostFewRows) {
        add(make_few_rows(layer_), 0);
      }
    }
    add({make_product<kMath>(layer_)}, kMath == Math::fp32 ? 0 : 80);
    if constexpr (kMath != Math::fp32) {
      for (const auto& products : hopper_products<kMath>()) add(products, 90);
    }
    return all;
  }

  Kind kind_of(const std::vector<Product>& products, int capability) const {
    const auto number = static_cast<int64_t>(products[0].kind);
    Kind kind = {kNames[number], capability};
    for (const Product& product : products) {
      const Expected& expected = product.expected;
      const auto tile = static_cast<int64_t>(expected.tile);
      // Half fused or not, unfused is the same.
      const WayId unfused = way_id({number, tile});
      const auto same = [&](const Way& way) { return way.id == unfused; };
      if (std::none_of(kind.unfused.begin(), kind.unfused.end(), same)) {
        const auto launch = [product, self = *this] {
          product.launch(self.results(Epilogue::logits));
          softmax<float>(self.logits_, self.probs_, self.layer_.shape, self.parts_, 1,
                         self.layer_.caller.stream);
        };
        kind.unfused.push_back(
            {expected.tiles, expected.unfused_microseconds, launch, product.shared_bytes, unfused});
      }
      if (product.fuses) {
        const auto launch = [product, self = *this] {
          product.launch(self.results(Epilogue::softmax));
        };
        kind.fused.push_back({expected.tiles + expected.how, expected.microseconds, launch,
                              product.shared_bytes, way_id({number, tile, expected.slices})});
      }
    }
    return kind;
  }

  Results results(Epilogue epilogue) const {
    float* out = epilogue == Epilogue::softmax ? probs_ : logits_;
    return {.epilogue = epilogue, .out = out, .parts = parts_};
  }

  // The kinds that Hopper has for a shape: narrow or else cluster, and exchange. But a kind that
  // should take much longer than the other is left out, and exchange or cluster if no cluster of
  // theirs fits on the device. In TF32 exchange needs either rows of W that are aligned to 16
  // bytes, or at least 4 inputs.
  template <Math kMath>
  std::vector<std::vector<Product>> hopper_products() const {
    const Layer& layer = layer_;
    if (!fits_tiles(layer)) return {};
    std::vector<Plan> exchange;
    if (kMath != Math::tf32 || layer.C % 4 == 0) {
      exchange = plan_exchange<kMath, true>(layer);
    } else if (layer.D >= 4) {
      exchange = plan_exchange<kMath, kMath != Math::tf32>(layer);  // TF32: W as it lies
    }
    const Plan cluster = layer.C <= 64 ? choose_cluster<kMath, 64>(layer)  //
                                       : choose_cluster<kMath, 128>(layer);
    const double exchange_time = exchange.empty() ? INFINITY : exchange[0].microseconds();
    std::vector<std::vector<Product>> rows;
    if (const auto narrow = choose_narrow(layer); kMath == Math::tf32 && !narrow.empty()) {
      rows.push_back(narrow);
    } else if (cluster.microseconds() < common::kHopeless * exchange_time) {
      rows.push_back(products_of(layer, {cluster}));
    }
    if (exchange_time < common::kHopeless * cluster.microseconds()) {
      rows.push_back(products_of(layer, exchange));
    }
    return rows;
  }
};

}  // namespace operators::softmax
