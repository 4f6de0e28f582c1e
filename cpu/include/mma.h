// Tensor-core products by warps: nvcuda::wmma.
//
// A fragment is a matrix that the 32 lanes of a warp hold together, each its share. Which elements
// a lane holds is not specified, as on the GPU; two fragments of one type agree in it. Every
// function here but fill_fragment() must be called by all 32 lanes, with the same arguments but for
// fragments; it waits for all of them and does not order memory: __syncwarp() or __syncthreads()
// does.
//
// Products are summed in float. Pointers must be aligned to 32 bytes and the distance of rows (or
// columns), `ldm`, must be a multiple of 16 bytes; otherwise the launch fails.

#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/execution/cuda_cpu.h"
#include "cpu/execution/later_than_cpp17.h"
#include "cpu/warps/fragment_product.h"
#include "cpu/watch/hooks.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"

/// Rounds to the 10 bits of fraction that tf32 has.
inline float __float_to_tf32(float value) {
  const std::uint32_t bits = cuda_cpu::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7F800000) == 0x7F800000) return value;
  return cuda_cpu::bit_cast<float>((bits + 0x1000) & ~0x1FFFu);
}

namespace nvcuda::wmma {

using ::__float_to_tf32;

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

namespace precision {
struct tf32 {};
}  // namespace precision

namespace detail {

template <class T>
using Stored = std::conditional_t<std::is_same_v<T, precision::tf32>, float, T>;

template <int M, int N, int K, class T>
inline constexpr bool kInputShape =
    std::is_same_v<T, precision::tf32>
        ? M == 16 && N == 16 && K == 8
        : (std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>)&&K == 16 &&
              ((M == 16 && N == 16) || (M == 32 && N == 8) || (M == 8 && N == 32));

template <class T>
inline constexpr auto kFactor = std::is_same_v<T, precision::tf32> ? cuda_cpu::Factor::tf32
                                : std::is_same_v<T, __half>        ? cuda_cpu::Factor::half
                                                                   : cuda_cpu::Factor::bfloat16;

/// What the lanes of a warp must agree on when they load or store a fragment.
struct Access {
  const void* pointer;
  unsigned ldm;
  const char* operation;

  static void check_agreement(void* const* operands, unsigned lanes) {
    const Access& first = *static_cast<const Access*>(operands[cuda_cpu::countr_zero(lanes)]);
    if (lanes != ~0u) cuda_cpu::fail("%s without all 32 lanes of the warp", first.operation);
    for (int lane = 1; lane < 32; ++lane) {
      const Access& other = *static_cast<const Access*>(operands[lane]);
      if (other.pointer != first.pointer || other.ldm != first.ldm) {
        cuda_cpu::fail("%s with different arguments in lanes 0 and %d", first.operation, lane);
      }
    }
  }
};

template <class T>
void meet_for_access(const T* pointer, unsigned ldm, const char* operation, cuda_cpu::Site site) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % 32 != 0) {
    cuda_cpu::fail("%s at %s:%d: the pointer %p is not aligned to 32 bytes", operation, site.file,
                   site.line, static_cast<const void*>(pointer));
  }
  if (ldm * sizeof(T) % 16 != 0) {
    cuda_cpu::fail("%s at %s:%d: ldm = %u is not a multiple of %zu elements (16 bytes)", operation,
                   site.file, site.line, ldm, 16 / sizeof(T));
  }
  Access access = {pointer, ldm, operation};
  cuda_cpu::warp_meet(~0u, Access::check_agreement, &access, operation, site);
}

/// A rows x cols matrix, of which each lane holds consecutive elements in row-major order.
template <class T, int kRows, int kCols>
struct Share {
  using element_type = T;
  using storage_element_type = Stored<T>;
  static constexpr int num_elements = kRows * kCols / 32;
  Stored<T> x[num_elements];

  /// The offset in memory of this lane's element i.
  static unsigned offset(int i, unsigned ldm, bool by_rows) {
    const unsigned element = cuda_cpu::lane_id() * num_elements + i;
    const unsigned row = element / kCols;
    const unsigned col = element % kCols;
    return by_rows ? row * ldm + col : col * ldm + row;
  }

  /// Reads or writes elements here, but counts as the GPU's instructions. From shared memory a
  /// factor is loaded in 32 pieces of 16 bytes, one a lane; from global memory in quarters, 8 x 8,
  /// of which a lane has a pair. Of a sum, too, a lane has pairs: in the rows l / 4 and l / 4 + 8
  /// of each 8 columns.
  static void count(const Stored<T>* memory, unsigned ldm, bool by_rows, bool sum, bool store) {
    const unsigned lane = cuda_cpu::lane_id();
    if (!sum && sizeof(Stored<T>) == 2 && !cuda_cpu::is_shared(memory)) {
      for (unsigned part = 0; part < 4; ++part) {
        const unsigned row = lane / 4 + part % 2 * 8, col = lane % 4 * 2 + part / 2 * 8;
        cuda_cpu::count_access(memory + row * ldm + col, 4, store);
      }
      return;
    }
    if (!sum) {
      const unsigned lines = by_rows ? kRows : kCols;
      cuda_cpu::count_access(memory + lane % lines * ldm + lane / lines * (16 / sizeof(Stored<T>)),
                             16, store);
      return;
    }
    for (unsigned part = 0; part < num_elements / 2; ++part) {
      const unsigned row = lane / 4 + part % (kRows / 8) * 8;
      const unsigned col = lane % 4 * 2 + part / (kRows / 8) * 8;
      if (by_rows) {
        cuda_cpu::count_access(memory + row * ldm + col, 2 * sizeof(Stored<T>), store);
      } else {
        cuda_cpu::count_access(memory + col * ldm + row, sizeof(Stored<T>), store);
        cuda_cpu::count_access(memory + (col + 1) * ldm + row, sizeof(Stored<T>), store);
      }
    }
  }

  void load(const Stored<T>* memory, unsigned ldm, bool by_rows, bool sum) {
    count(memory, ldm, by_rows, sum, false);
    const cuda_cpu::Uncounted elements;
    const unsigned first = offset(0, ldm, by_rows);
    if (num_elements <= kCols) {
      for (int i = 0; i < num_elements; ++i) x[i] = memory[first + i * (by_rows ? 1 : ldm)];
    } else {
      for (int i = 0; i < num_elements; ++i) x[i] = memory[offset(i, ldm, by_rows)];
    }
  }

  void store(Stored<T>* memory, unsigned ldm, bool by_rows) const {
    count(memory, ldm, by_rows, true, true);
    const cuda_cpu::Uncounted elements;
    for (int i = 0; i < num_elements; ++i) memory[offset(i, ldm, by_rows)] = x[i];
  }
};

}  // namespace detail

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment;

template <int M, int N, int K, class T, class Layout>
struct fragment<matrix_a, M, N, K, T, Layout> : detail::Share<T, M, K> {
  static_assert(detail::kInputShape<M, N, K, T>, "there is no such fragment");
};

template <int M, int N, int K, class T, class Layout>
struct fragment<matrix_b, M, N, K, T, Layout> : detail::Share<T, K, N> {
  static_assert(detail::kInputShape<M, N, K, T>, "there is no such fragment");
};

template <int M, int N, int K, class T>
struct fragment<accumulator, M, N, K, T, void> : detail::Share<T, M, N> {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, __half>,
                "accumulators are float or half");
};

/// Sets all elements of the calling lane's share.
template <class Use, int M, int N, int K, class T, class Layout>
void fill_fragment(fragment<Use, M, N, K, T, Layout>& f,
                   const cuda_cpu::type_identity_t<detail::Stored<T>>& value) {
  for (auto& element : f.x) element = value;
}

/// Loads a factor: element (row, col) from p[row * ldm + col] if it is row_major, from
/// p[row + col * ldm] if it is col_major.
template <class Use, int M, int N, int K, class T, class Layout>
void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& f, const detail::Stored<T>* p,
                      unsigned ldm, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  static_assert(!std::is_same_v<Use, accumulator>, "an accumulator is loaded with a layout_t");
  detail::meet_for_access(p, ldm, "load_matrix_sync()", site);
  f.load(p, ldm, std::is_same_v<Layout, row_major>, false);
}

template <int M, int N, int K, class T>
void load_matrix_sync(fragment<accumulator, M, N, K, T>& f, const T* p, unsigned ldm,
                      layout_t layout, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  detail::meet_for_access(p, ldm, "load_matrix_sync()", site);
  f.load(p, ldm, layout == mem_row_major, true);
}

template <int M, int N, int K, class T>
void store_matrix_sync(T* p, const fragment<accumulator, M, N, K, T>& f, unsigned ldm,
                       layout_t layout, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  detail::meet_for_access(p, ldm, "store_matrix_sync()", site);
  f.store(p, ldm, layout == mem_row_major);
}

/// d = a * b + c. The last lane to arrive computes the product for the warp.
template <int M, int N, int K, class T, class LayoutA, class LayoutB, class TypeD, class TypeC>
void mma_sync(fragment<accumulator, M, N, K, TypeD>& d,
              const fragment<matrix_a, M, N, K, T, LayoutA>& a,
              const fragment<matrix_b, M, N, K, T, LayoutB>& b,
              const fragment<accumulator, M, N, K, TypeC>& c,
              cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::FragmentProduct self = {d.x,
                                    a.x,
                                    b.x,
                                    c.x,
                                    M,
                                    N,
                                    K,
                                    detail::kFactor<T>,
                                    std::is_same_v<TypeD, __half>,
                                    std::is_same_v<TypeC, __half>};
  cuda_cpu::warp_meet(~0u, cuda_cpu::FragmentProduct::combine, &self, "mma_sync()", site);
}

/// Numbers of less than 8 bits have names, which headers mention; no fragment holds them.
namespace experimental {
namespace precision {
struct u4 {};
struct s4 {};
struct b1 {};
}  // namespace precision
enum bmmaBitOp { bmmaBitOpXOR = 1, bmmaBitOpAND };
enum bmmaAccumulateOp { bmmaAccumulateOpPOPC = 1 };
}  // namespace experimental

template <class Sum, class A, class B>
void bmma_sync(Sum&, const A&, const B&, const Sum&, experimental::bmmaBitOp,
               experimental::bmmaAccumulateOp) {
  cuda_cpu::fail("bmma_sync(): the CPU backend does not have fragments of numbers of one bit");
}

}  // namespace nvcuda::wmma
