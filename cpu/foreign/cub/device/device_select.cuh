// cub::DeviceSelect and cub::DevicePartition: see two_calls.h.

#pragma once

#include <cub/device/two_calls.h>

namespace cuda_cpu {

/// Copies those with keep(i, value), in order, and says how many. The others go to the end, in
/// reversed order, if `others`.
template <class In, class Out, class Number, class Size, class Keep>
void select(In in, Out out, Number number, Size count, bool others, Keep keep) {
  std::vector<ValueOf<In>> left;
  std::ptrdiff_t kept = 0;
  for (std::ptrdiff_t i = 0; i < static_cast<std::ptrdiff_t>(count); ++i) {
    const auto value = at(in, i);
    if (keep(i, value)) {
      out[kept++] = value;
    } else if (others) {
      left.push_back(value);
    }
  }
  for (std::size_t i = 0; i < left.size(); ++i) {
    out[static_cast<std::ptrdiff_t>(count) - 1 - static_cast<std::ptrdiff_t>(i)] = left[i];
  }
  *number = kept;
}

template <class In>
auto differs_from_the_one_before(In) {
  return [before = std::vector<ValueOf<In>>()](std::ptrdiff_t i, const auto& value) mutable {
    const bool differs = i == 0 || !(before[0] == value);
    before.assign(1, value);
    return differs;
  };
}

}  // namespace cuda_cpu

namespace cub {

struct DeviceSelect {
  template <class In, class Flags, class Out, class Number, class Size>
  requires std::is_integral_v<Size>
  static cudaError_t Flagged(void* storage, std::size_t& bytes, In in, Flags flags, Out out,
                             Number number, Size count, cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::select(in, out, number, count, false,
                       [&](std::ptrdiff_t i, const auto&) { return bool(cuda_cpu::at(flags, i)); });
    });
  }
  template <class InOut, class Flags, class Number, class Size>
  requires std::is_integral_v<Size>
  static cudaError_t Flagged(void* storage, std::size_t& bytes, InOut data, Flags flags,
                             Number number, Size count, cudaStream_t stream = nullptr) {
    return Flagged(storage, bytes, data, flags, data, number, count, stream);
  }
  template <class In, class Out, class Number, class Size, class Chosen>
  requires std::is_integral_v<Size>
  static cudaError_t If(void* storage, std::size_t& bytes, In in, Out out, Number number,
                        Size count, Chosen chosen, cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::select(in, out, number, count, false,
                       [&](std::ptrdiff_t, const auto& value) { return bool(chosen(value)); });
    });
  }
  template <class InOut, class Number, class Size, class Chosen>
  requires std::is_integral_v<Size>
  static cudaError_t If(void* storage, std::size_t& bytes, InOut data, Number number, Size count,
                        Chosen chosen, cudaStream_t stream = nullptr) {
    return If(storage, bytes, data, data, number, count, chosen, stream);
  }
  template <class In, class Flags, class Out, class Number, class Size, class Chosen>
  static cudaError_t FlaggedIf(void* storage, std::size_t& bytes, In in, Flags flags, Out out,
                               Number number, Size count, Chosen chosen, cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::select(in, out, number, count, false, [&](std::ptrdiff_t i, const auto&) {
        return bool(chosen(cuda_cpu::at(flags, i)));
      });
    });
  }
  template <class In, class Out, class Number, class Size>
  static cudaError_t Unique(void* storage, std::size_t& bytes, In in, Out out, Number number,
                            Size count, cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::select(in, out, number, count, false, cuda_cpu::differs_from_the_one_before(in));
    });
  }
  template <class Keys, class In, class KeysOut, class Out, class Number, class Size>
  static cudaError_t UniqueByKey(void* storage, std::size_t& bytes, Keys keys, In in,
                                 KeysOut keys_out, Out out, Number number, Size count,
                                 cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      const auto all = cuda_cpu::values(keys, count);
      const auto first = [&](std::ptrdiff_t i, const auto&) {
        return i == 0 || !(all[i - 1] == all[i]);
      };
      cuda_cpu::select(in, out, number, count, false, first);
      cuda_cpu::select(keys, keys_out, number, count, false, first);
    });
  }
};

struct DevicePartition {
  template <class In, class Flags, class Out, class Number, class Size>
  static cudaError_t Flagged(void* storage, std::size_t& bytes, In in, Flags flags, Out out,
                             Number number, Size count, cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::select(in, out, number, count, true,
                       [&](std::ptrdiff_t i, const auto&) { return bool(cuda_cpu::at(flags, i)); });
    });
  }
  template <class In, class Out, class Number, class Size, class Chosen>
  static cudaError_t If(void* storage, std::size_t& bytes, In in, Out out, Number number,
                        Size count, Chosen chosen, cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      cuda_cpu::select(in, out, number, count, true,
                       [&](std::ptrdiff_t, const auto& value) { return bool(chosen(value)); });
    });
  }
};

/// Runs of equal values: each value once, and how often.
struct DeviceRunLengthEncode {
  template <class In, class Unique, class Lengths, class Runs, class Size>
  static cudaError_t Encode(void* storage, std::size_t& bytes, In in, Unique unique,
                            Lengths lengths, Runs runs, Size count, cudaStream_t = nullptr) {
    return cuda_cpu::two_calls(storage, bytes, [&] {
      std::ptrdiff_t run = 0;
      for (Size i = 0, end = 0; i < count; i = end, ++run) {
        while (end < count && cuda_cpu::at(in, i) == cuda_cpu::at(in, end)) ++end;
        unique[run] = cuda_cpu::at(in, i);
        lengths[run] = end - i;
      }
      *runs = run;
    });
  }
};

}  // namespace cub
