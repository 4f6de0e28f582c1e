// cub::DeviceReduce: see two_calls.h.

#pragma once

#include <cub/device/two_calls.h>

namespace cub {

struct DeviceReduce {
  template <class In, class Out, class Size, class Op, class T>
  static cudaError_t Reduce(void* storage, std::size_t& bytes, In in, Out out, Size count, Op op,
                            T start, cudaStream_t = nullptr) {
    using Sum = std::decay_t<std::invoke_result_t<Op, T, cuda_cpu::ValueOf<In>>>;
    return cuda_cpu::two_calls(storage, bytes, [&] {
      *out = count > 0 ? Sum(op(start, cuda_cpu::sum_as_tree<Sum>(in, count, op))) : Sum(start);
    });
  }
  template <class In, class Out, class Size, class Op, class Change, class T>
  static cudaError_t TransformReduce(void* storage, std::size_t& bytes, In in, Out out, Size count,
                                     Op op, Change change, T start, cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      std::vector<T> changed;
      for (Size i = 0; i < count; ++i) changed.push_back(change(cuda_cpu::at(in, i)));
      *out = count > 0 ? T(op(start, cuda_cpu::sum_as_tree<T>(
                                         changed.begin(), static_cast<std::ptrdiff_t>(count), op)))
                       : start;
    });
  }
  template <class In, class Out, class Size>
  static cudaError_t Sum(void* storage, std::size_t& bytes, In in, Out out, Size count,
                         cudaStream_t stream = nullptr) {
    using T = cuda_cpu::ValueOr<Out, cuda_cpu::ValueOf<In>>;
    return Reduce(storage, bytes, in, out, count, ::cuda::std::plus<>(), T{}, stream);
  }
  template <class In, class Out, class Size>
  static cudaError_t Min(void* storage, std::size_t& bytes, In in, Out out, Size count,
                         cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      *out =
          cuda_cpu::extreme(in, count, cuda_cpu::kSmaller, cuda_cpu::most<cuda_cpu::ValueOf<In>>());
    });
  }
  template <class In, class Out, class Size>
  static cudaError_t Max(void* storage, std::size_t& bytes, In in, Out out, Size count,
                         cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      *out =
          cuda_cpu::extreme(in, count, cuda_cpu::kLarger, cuda_cpu::least<cuda_cpu::ValueOf<In>>());
    });
  }

  /// The first one, and where it is, as a KeyValuePair.
  template <class In, class Out, class Size>
  static cudaError_t ArgMin(void* storage, std::size_t& bytes, In in, Out out, Size count,
                            cudaStream_t = nullptr) {
    return best(storage, bytes, in, count, cuda_cpu::most<cuda_cpu::ValueOf<In>>(), kLess,
                as_pair(out));
  }
  template <class In, class Out, class Size>
  static cudaError_t ArgMax(void* storage, std::size_t& bytes, In in, Out out, Size count,
                            cudaStream_t = nullptr) {
    return best(storage, bytes, in, count, cuda_cpu::least<cuda_cpu::ValueOf<In>>(), kMore,
                as_pair(out));
  }
  /// The same in two places.
  template <class In, class Out, class Index, class Size>
  requires std::is_integral_v<Size>
  static cudaError_t ArgMin(void* storage, std::size_t& bytes, In in, Out out, Index index,
                            Size count, cudaStream_t = nullptr) {
    return best(storage, bytes, in, count, cuda_cpu::most<cuda_cpu::ValueOf<In>>(), kLess,
                as_two(out, index));
  }
  template <class In, class Out, class Index, class Size>
  requires std::is_integral_v<Size>
  static cudaError_t ArgMax(void* storage, std::size_t& bytes, In in, Out out, Index index,
                            Size count, cudaStream_t = nullptr) {
    return best(storage, bytes, in, count, cuda_cpu::least<cuda_cpu::ValueOf<In>>(), kMore,
                as_two(out, index));
  }

  template <class Keys, class Unique, class In, class Out, class Runs, class Op, class Size>
  static cudaError_t ReduceByKey(void* storage, std::size_t& bytes, Keys keys, Unique unique, In in,
                                 Out out, Runs runs, Op op, Size count, cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      Size run = 0, end = 0;
      for (Size i = 0; i < count; i = end, ++run) {
        while (end < count && cuda_cpu::at(keys, i) == cuda_cpu::at(keys, end)) ++end;
        using Sum = cuda_cpu::ValueOr<Out, cuda_cpu::ValueOf<In>>;
        unique[run] = cuda_cpu::at(keys, i);
        out[run] = cuda_cpu::sum_as_tree<Sum>(in + i, end - i, op);
      }
      *runs = run;
    });
  }

 private:
  static constexpr auto kLess = [](const auto& a, const auto& b) { return a < b; };
  static constexpr auto kMore = [](const auto& a, const auto& b) { return b < a; };
  template <class Out>
  static auto as_pair(Out out) {
    return [=](auto value, auto index) mutable { *out = {static_cast<int>(index), value}; };
  }
  template <class Out, class Index>
  static auto as_two(Out out, Index where) {
    return [=](auto value, auto index) mutable {
      *out = value;
      *where = index;
    };
  }
  template <class In, class Size, class T, class Better, class Write>
  static cudaError_t best(void* storage, std::size_t& bytes, In in, Size count, T none,
                          Better better, Write write) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      Size found = 0;
      for (Size i = 1; i < count; ++i) {
        if (better(cuda_cpu::at(in, i), cuda_cpu::at(in, found))) found = i;
      }
      count > 0 ? write(cuda_cpu::at(in, found), found) : write(none, Size{1});
    });
  }
};

}  // namespace cub
