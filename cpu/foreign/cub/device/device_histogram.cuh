// cub::DeviceHistogram, of one row of samples: see two_calls.h.

#pragma once

#include <cub/device/two_calls.h>

namespace cub {

struct DeviceHistogram {
  /// levels - 1 bins of equal width from `lower` to `upper`. What is outside counts nowhere.
  template <class Samples, class Counter, class Level, class Size>
  static cudaError_t HistogramEven(void* storage, std::size_t& bytes, Samples samples,
                                   Counter* counts, int levels, Level lower, Level upper,
                                   Size count, cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes,
                               [&] { even(samples, 1, counts, levels, lower, upper, count); });
  }
  /// Bin i has the samples from edges[i] to below edges[i + 1].
  template <class Samples, class Counter, class Level, class Size>
  static cudaError_t HistogramRange(void* storage, std::size_t& bytes, Samples samples,
                                    Counter* counts, int levels, const Level* edges, Size count,
                                    cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      std::fill_n(counts, levels - 1, Counter{});
      for (std::ptrdiff_t i = 0; i < static_cast<std::ptrdiff_t>(count); ++i) {
        const auto sample = static_cast<Level>(cuda_cpu::at(samples, i));
        const auto bin = std::upper_bound(edges, edges + levels, sample) - edges - 1;
        if (bin >= 0 && bin < levels - 1) ++counts[bin];
      }
    });
  }
  /// Pixels of kChannels samples, of which the first kActive are counted, each for itself.
  template <int kChannels, int kActive, class Samples, class Counts, class Levels, class Edges,
            class Size>
  static cudaError_t MultiHistogramEven(void* storage, std::size_t& bytes, Samples samples,
                                        const Counts& counts, const Levels& levels,
                                        const Edges& lower, const Edges& upper, Size pixels,
                                        cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      for (int k = 0; k < kActive; ++k) {
        even(samples + k, kChannels, counts[k], levels[k], lower[k], upper[k], pixels);
      }
    });
  }

 private:
  template <class Samples, class Counter, class Level, class Size>
  static void even(Samples samples, int stride, Counter* counts, int levels, Level lower,
                   Level upper, Size count) {
    std::fill_n(counts, levels - 1, Counter{});
    for (std::ptrdiff_t i = 0; i < static_cast<std::ptrdiff_t>(count); ++i) {
      const auto sample = static_cast<Level>(cuda_cpu::at(samples, i * stride));
      if (!(lower <= sample && sample < upper)) continue;
      // Whole numbers without a rounding error.
      using Wide = std::conditional_t<std::is_integral_v<Level>, long long, Level>;
      const Wide width = Wide(upper) - Wide(lower), distance = Wide(sample) - Wide(lower);
      const auto bin = static_cast<std::ptrdiff_t>(std::is_integral_v<Level>
                                                       ? distance * (levels - 1) / width
                                                       : distance * (Wide(levels - 1) / width));
      ++counts[std::min<std::ptrdiff_t>(bin, levels - 2)];
    }
  }
};

}  // namespace cub
