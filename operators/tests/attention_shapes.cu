// operators/attention as a program calls it: all ways to compute it, against sums in double. On the
// CPU backend and on a GPU.
//
//     attention_shapes BATCH QUERIES KEYS HEADS KV_HEADS WIDTH CAUSAL [MOST [GROWTH]]
//
// prints a line for each way that was run, at most MOST of each type; exits with 1 if one is wrong.
// CAUSAL is 0 or 1. With GROWTH the first key's logits are so many times as large as the last
// one's, those between by a part of that: kernels begin with the last keys, so that each tile's
// logits exceed those before it. In how many rows exponentials relative to the last keys' maximum
// would exceed 2^64 is printed, too, and none is an error.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "common/device.h"
#include "operators/attention/layer.cuh"
#include "operators/tests/device_memory.h"

using namespace common;
using namespace tests;
using namespace operators;
using namespace operators::attention;

namespace {

template <typename T>
struct Tensor {
  std::vector<float> host;
  Memory<T> device;

  /// Rows of `row` elements; `times` says by what a row's elements are multiplied.
  Tensor(size_t count, int seed, size_t row, const std::function<float(size_t)>& times)
      : host(count), device(memory_of<T>(count, 0xff)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<T> rounded(count);
    for (size_t i = 0; i < count; ++i) {
      rounded[i] = T(times(i / row) * normal(random));
      host[i] = static_cast<float>(rounded[i]);
    }
    CUDA_CHECK(cudaMemcpy(device, rounded.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
};

/// Runs at most `most` ways, twice each; returns whether all are right, and there is one.
template <typename T>
bool right(const char* name, const AttentionShape& shape, size_t most, float growth,
           double rounding) {
  const size_t queries = static_cast<size_t>(shape.batch * shape.queries * shape.heads);
  const size_t keys = static_cast<size_t>(shape.batch * shape.keys * shape.kv_heads);
  const size_t width = static_cast<size_t>(shape.width);
  const auto once = [](size_t) { return 1.0f; };
  const auto first_more = [&](size_t row) {
    const size_t key = row / static_cast<size_t>(shape.kv_heads) % static_cast<size_t>(shape.keys);
    const float part = 1 - static_cast<float>(key) / static_cast<float>(shape.keys);
    return 1 + (growth - 1) * part;
  };
  const Tensor<T> Q(queries * width, 1, width, once), K(keys * width, 2, width, first_more);
  const Tensor<T> V(keys * width, 3, width, once);
  const Memory<T> out = memory_of<T>(queries * width, 0xff);
  const Memory<float> log_sums = memory_of<float>(queries, 0xff);
  const float scale = 1 / std::sqrt(static_cast<float>(width));

  std::vector<double> expected(queries * width), expected_sums(queries);
  int outgrown = 0;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t s = 0; s < shape.queries; ++s) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        const size_t q = static_cast<size_t>((b * shape.queries + s) * shape.heads + h) * width;
        const int64_t seen =
            shape.causal ? std::max<int64_t>(0, s + shape.keys - shape.queries + 1) : shape.keys;
        std::vector<double> logits(static_cast<size_t>(std::min(seen, shape.keys)));
        const auto row_of = [&](size_t t) {
          return static_cast<size_t>((b * shape.keys + static_cast<int64_t>(t)) * shape.kv_heads +
                                     h / shape.group()) *
                 width;
        };
        double largest = -std::numeric_limits<double>::infinity(), sum = 0;
        for (size_t t = 0; t < logits.size(); ++t) {
          for (size_t i = 0; i < width; ++i) {
            logits[t] += static_cast<double>(Q.host[q + i]) * K.host[row_of(t) + i] * scale;
          }
          largest = std::max(largest, logits[t]);
        }
        // A tile has at most 128 keys, so that the maximum of the first one is not larger than
        // this.
        const size_t begun = logits.size() - std::min<size_t>(logits.size(), 128);
        const double first =
            logits.empty() ? largest : *std::max_element(logits.begin() + begun, logits.end());
        if (largest - first > 64 * std::log(2.0)) ++outgrown;
        for (double logit : logits) sum += std::exp(logit - largest);
        for (size_t t = 0; t < logits.size(); ++t) {
          for (size_t i = 0; i < width; ++i) {
            expected[q + i] += std::exp(logits[t] - largest) / sum * V.host[row_of(t) + i];
          }
        }
        expected_sums[static_cast<size_t>((b * shape.heads + h) * shape.queries + s)] =
            logits.empty() ? largest : largest + std::log(sum);
      }
    }
  }

  const auto make = [&](const operators::Caller& by) {
    return Attention<T>(by, {shape, Q.device, K.device, V.device, out, log_sums}, shape, scale)
        .ways();
  };
  std::vector<Way> ways = make(caller());
  bool all = !ways.empty() && found_by_ids(ways, make);
  ways.resize(std::min(ways.size(), most));
  if (growth > 1) {
    std::printf("%s: of %zu rows %d outgrow 2^64\n", name, queries, outgrown);
    all = all && outgrown > 0;
  }
  std::vector<T> found(expected.size());
  std::vector<float> found_sums(queries);
  for (const Way& way : ways) {
    double error = 0, norm = 0, worst_sum = 0;
    for (int launch = 0; launch < 2; ++launch) {  // a launch leaves what the next one needs
      CUDA_CHECK(cudaMemset(out, 0xff, out.bytes()));
      CUDA_CHECK(cudaMemset(log_sums, 0xff, log_sums.bytes()));
      way.launch();
      CUDA_CHECK(cudaGetLastError());
      CUDA_CHECK(cudaDeviceSynchronize());
      CUDA_CHECK(cudaMemcpy(found.data(), out, out.bytes(), cudaMemcpyDeviceToHost));
      CUDA_CHECK(cudaMemcpy(found_sums.data(), log_sums, log_sums.bytes(), cudaMemcpyDeviceToHost));
      for (size_t i = 0; i < expected.size(); ++i) {
        const double difference = static_cast<float>(found[i]) - expected[i];
        error += difference * difference;
        norm += expected[i] * expected[i];
      }
      for (size_t i = 0; i < queries; ++i) {
        const bool same = found_sums[i] == expected_sums[i];  // of -inf
        const double difference = same ? 0 : std::fabs(found_sums[i] - expected_sums[i]);
        worst_sum = worst_sum >= difference ? worst_sum : difference;  // a NaN stays
      }
    }
    // Written so that a NaN is never right. P and the results are rounded: two independent errors
    // of at most `rounding` each.
    const bool ok = std::sqrt(error) <= 2 * rounding * std::sqrt(norm) && worst_sum <= 1e-4;
    std::printf("%s, %s: %.2e, %.2e%s\n", name, way.name.c_str(), std::sqrt(error / norm),
                worst_sum, ok ? "" : ": FAILED");
    all = all && ok;
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 8) {
    std::fprintf(stderr,
                 "usage: attention_shapes BATCH QUERIES KEYS HEADS KV_HEADS WIDTH CAUSAL [MOST "
                 "[GROWTH]]\n");
    return 2;
  }
  const auto number = [&](int i) { return std::atoll(argv[i]); };
  const AttentionShape shape{number(1), number(2), number(3),     number(4),
                             number(5), number(6), number(7) != 0};
  const size_t most = argc > 8 ? static_cast<size_t>(number(8)) : 1000;
  const float growth = argc > 9 ? static_cast<float>(number(9)) : 1;
  bool ok = right<__nv_bfloat16>("bf16", shape, most, growth, 0x1p-8);
  ok = right<half>("fp16", shape, most, growth, 0x1p-11) && ok;
  return ok ? 0 : 1;
}
