// cub::DeviceScan: see two_calls.h.

#pragma once

#include <cub/device/two_calls.h>

namespace cub {

struct DeviceScan {
  template <class In, class Out, class Op, class T, class Size>
  static cudaError_t ExclusiveScan(void* storage, std::size_t& bytes, In in, Out out, Op op,
                                   T start, Size count, cudaStream_t = nullptr) {
    return by_key(storage, bytes, Same(), in, out, op, false, true, value(start), count);
  }
  template <class In, class Out, class Op, class Size>
  static cudaError_t InclusiveScan(void* storage, std::size_t& bytes, In in, Out out, Op op,
                                   Size count, cudaStream_t = nullptr) {
    return by_key(storage, bytes, Same(), in, out, op, true, false, value(cuda_cpu::ValueOf<In>{}),
                  count);
  }
  template <class In, class Out, class Op, class T, class Size>
  static cudaError_t InclusiveScanInit(void* storage, std::size_t& bytes, In in, Out out, Op op,
                                       T start, Size count, cudaStream_t = nullptr) {
    return by_key(storage, bytes, Same(), in, out, op, true, true, value(start), count);
  }
  template <class In, class Out, class Size>
  requires std::is_integral_v<Size>
  static cudaError_t ExclusiveSum(void* storage, std::size_t& bytes, In in, Out out, Size count,
                                  cudaStream_t stream = nullptr) {
    return ExclusiveScan(storage, bytes, in, out, ::cuda::std::plus<>(), cuda_cpu::ValueOf<In>{},
                         count, stream);
  }
  template <class In, class Out, class Size>
  requires std::is_integral_v<Size>
  static cudaError_t InclusiveSum(void* storage, std::size_t& bytes, In in, Out out, Size count,
                                  cudaStream_t stream = nullptr) {
    return InclusiveScan(storage, bytes, in, out, ::cuda::std::plus<>(), count, stream);
  }
  // In place.
  template <class InOut, class Size>
  static cudaError_t ExclusiveSum(void* storage, std::size_t& bytes, InOut data, Size count,
                                  cudaStream_t stream = nullptr) {
    return ExclusiveSum(storage, bytes, data, data, count, stream);
  }
  template <class InOut, class Size>
  static cudaError_t InclusiveSum(void* storage, std::size_t& bytes, InOut data, Size count,
                                  cudaStream_t stream = nullptr) {
    return InclusiveSum(storage, bytes, data, data, count, stream);
  }

  // Each run of equal keys for itself.
  template <class Keys, class In, class Out, class Op, class T, class Size,
            class Equal = ::cuda::std::equal_to<>>
  static cudaError_t ExclusiveScanByKey(void* storage, std::size_t& bytes, Keys keys, In in,
                                        Out out, Op op, T start, Size count, Equal equal = {},
                                        cudaStream_t = nullptr) {
    return by_key(storage, bytes, same(keys, equal), in, out, op, false, true, value(start), count);
  }
  template <class Keys, class In, class Out, class Op, class Size,
            class Equal = ::cuda::std::equal_to<>>
  static cudaError_t InclusiveScanByKey(void* storage, std::size_t& bytes, Keys keys, In in,
                                        Out out, Op op, Size count, Equal equal = {},
                                        cudaStream_t = nullptr) {
    return by_key(storage, bytes, same(keys, equal), in, out, op, true, false,
                  value(cuda_cpu::ValueOf<In>{}), count);
  }
  template <class Keys, class In, class Out, class Size, class Equal = ::cuda::std::equal_to<>>
  static cudaError_t ExclusiveSumByKey(void* storage, std::size_t& bytes, Keys keys, In in, Out out,
                                       Size count, Equal equal = {}, cudaStream_t = nullptr) {
    return by_key(storage, bytes, same(keys, equal), in, out, ::cuda::std::plus<>(), false, true,
                  value(cuda_cpu::ValueOf<In>{}), count);
  }
  template <class Keys, class In, class Out, class Size, class Equal = ::cuda::std::equal_to<>>
  static cudaError_t InclusiveSumByKey(void* storage, std::size_t& bytes, Keys keys, In in, Out out,
                                       Size count, Equal equal = {}, cudaStream_t = nullptr) {
    return by_key(storage, bytes, same(keys, equal), in, out, ::cuda::std::plus<>(), true, false,
                  value(cuda_cpu::ValueOf<In>{}), count);
  }

 private:
  struct Same {
    bool operator()(std::ptrdiff_t) const { return true; }
  };
  /// Whether element i has the key of the one before it.
  template <class Keys, class Equal>
  static auto same(Keys keys, Equal equal) {
    return
        [=](std::ptrdiff_t i) { return equal(cuda_cpu::at(keys, i - 1), cuda_cpu::at(keys, i)); };
  }
  template <class T>
  static auto value(const T& start) {
    return [=] { return start; };
  }
  /// A start that an earlier kernel computes.
  template <class T, class Iterator>
  static auto value(const FutureValue<T, Iterator>& start) {
    return [=]() -> T { return start; };
  }

  template <class SameRun, class In, class Out, class Op, class Start, class Size>
  static cudaError_t by_key(void* storage, std::size_t& bytes, SameRun same, In in, Out out, Op op,
                            bool inclusive, bool starts, Start start, Size count) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      using Sum = std::decay_t<std::invoke_result_t<Op, decltype(start()), cuda_cpu::ValueOf<In>>>;
      Sum sum = start();
      for (std::ptrdiff_t i = 0; i < static_cast<std::ptrdiff_t>(count); ++i) {
        const bool first = i == 0 || !same(i);
        const auto element = cuda_cpu::at(in, i);  // which `out` may overwrite
        if (first) sum = start();
        const Sum before = sum;
        sum = first && !starts ? static_cast<Sum>(element) : static_cast<Sum>(op(sum, element));
        out[i] = inclusive ? sum : before;
      }
    });
  }
};

}  // namespace cub
