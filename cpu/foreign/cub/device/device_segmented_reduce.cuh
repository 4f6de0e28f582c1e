// cub::DeviceSegmentedReduce: see two_calls.h.

#pragma once

#include <cub/device/device_reduce.cuh>

namespace cub {

/// Segment i goes from begin[i] to end[i].
struct DeviceSegmentedReduce {
  template <class In, class Out, class Begin, class End, class Op, class T>
  static cudaError_t Reduce(void* storage, std::size_t& bytes, In in, Out out,
                            std::ptrdiff_t segments, Begin begin, End end, Op op, T start,
                            cudaStream_t = nullptr) {
    using Sum = std::decay_t<std::invoke_result_t<Op, T, cuda_cpu::ValueOf<In>>>;
    return cuda_cpu::two_calls(storage, bytes, [&] {
      for (std::ptrdiff_t i = 0; i < segments; ++i) {
        const std::ptrdiff_t first = begin[i], count = end[i] - first;
        out[i] = count > 0 ? Sum(op(start, cuda_cpu::sum_as_tree<Sum>(in + first, count, op)))
                           : Sum(start);
      }
    });
  }
  template <class In, class Out, class Begin, class End>
  static cudaError_t Sum(void* storage, std::size_t& bytes, In in, Out out, std::ptrdiff_t segments,
                         Begin begin, End end, cudaStream_t stream = nullptr) {
    using T = cuda_cpu::ValueOr<Out, cuda_cpu::ValueOf<In>>;
    return Reduce(storage, bytes, in, out, segments, begin, end, ::cuda::std::plus<>(), T{},
                  stream);
  }
  template <class In, class Out, class Begin, class End>
  static cudaError_t Min(void* storage, std::size_t& bytes, In in, Out out, std::ptrdiff_t segments,
                         Begin begin, End end, cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      for (std::ptrdiff_t i = 0; i < segments; ++i) {
        out[i] = cuda_cpu::extreme(in + begin[i], end[i] - begin[i], cuda_cpu::kSmaller,
                                   cuda_cpu::most<cuda_cpu::ValueOf<In>>());
      }
    });
  }
  template <class In, class Out, class Begin, class End>
  static cudaError_t Max(void* storage, std::size_t& bytes, In in, Out out, std::ptrdiff_t segments,
                         Begin begin, End end, cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      for (std::ptrdiff_t i = 0; i < segments; ++i) {
        out[i] = cuda_cpu::extreme(in + begin[i], end[i] - begin[i], cuda_cpu::kLarger,
                                   cuda_cpu::least<cuda_cpu::ValueOf<In>>());
      }
    });
  }
};

}  // namespace cub
