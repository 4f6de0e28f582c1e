// What instructions of inline PTX mean: cpu/ptx.py writes calls of these functions in the place of
// an asm statement. A register of 16, 32 or 64 bits is an unsigned number, whatever its type, and a
// predicate is a bool. What the backend does for CUDA C++ and for primitives/ is called from here.
//
// Loads and stores are not here: ptx.py writes them as plain accesses, so that reports and counts
// name the line of the asm.

#pragma once

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/execution/device_functions.h"
#include "cpu/execution/later_than_cpp17.h"
#include "cpu/execution/small_float.h"
#include "cpu/hopper/units.h"
#include "cpu/library/matrix_product.h"
#include "cpu/warps/matrix_moves.h"
#include "cuda_fp8.h"

namespace cuda_cpu::ptx {

using F16 = SmallFloat<HalfFormat>;
using Bf16 = SmallFloat<Bfloat16Format>;
using F16x2 = SmallFloat2<HalfFormat>;
using Bf16x2 = SmallFloat2<Bfloat16Format>;
__extension__ typedef unsigned __int128 Wide;
__extension__ typedef __int128 SignedWide;

/// The unsigned number of as many bits.
template <std::size_t kBytes>
using Unsigned = std::conditional_t<
    kBytes == 1, std::uint8_t,
    std::conditional_t<kBytes == 2, std::uint16_t,
                       std::conditional_t<kBytes == 4, std::uint32_t,
                                          std::conditional_t<kBytes == 8, std::uint64_t, Wide>>>>;
/// The bytes of a type of 32 bits.
template <class T>
using Quarter = std::conditional_t<std::is_signed_v<T>, std::int8_t, std::uint8_t>;
/// Twice as many bits, with the same sign.
template <class T>
using Twice = std::conditional_t<
    sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, SignedWide, Wide>,
    std::conditional_t<sizeof(T) == 4,
                       std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, std::int32_t, std::uint32_t>>>;

template <class T>
inline constexpr bool kWhole = std::is_integral_v<T> || std::is_same_v<T, Wide>;

/// The bits of `value` as a T: all of them, or the lower ones, or with others in front, which
/// repeat the sign of a number that has one.
template <class T, class From>
T as(From value) {
  if constexpr (std::is_same_v<T, From>) {
    return value;
  } else if constexpr (std::is_array_v<std::remove_reference_t<From>>) {
    return as<T>(&value[0]);
  } else if constexpr (std::is_enum_v<From>) {
    return as<T>(static_cast<std::underlying_type_t<From>>(value));
  } else if constexpr (std::is_null_pointer_v<From>) {
    return T{};
  } else if constexpr (kWhole<T> && kWhole<From>) {
    return static_cast<T>(value);
  } else if constexpr (sizeof(T) == sizeof(From)) {
    return __builtin_bit_cast(T, value);
  } else if constexpr (kWhole<From>) {
    return as<T>(static_cast<Unsigned<sizeof(T)>>(value));
  } else {
    return as<T>(as<Unsigned<sizeof(From)>>(value));
  }
}

/// A vector of registers as memory has it: one access of all its bytes.
template <class T, int kCount>
struct Pack {
  typedef T Type __attribute__((vector_size(kCount * sizeof(T)), may_alias));
};

// ---- Addresses ---------------------------------------------------------------------------------

/// Where an address of a shared window is: of this block's, or, from mapa, of another block's.
template <class T>
auto shared(T address) {
  return shared_pointer(static_cast<std::uint32_t>(address));
}
inline std::uint32_t map_to_rank(std::uint32_t address, std::uint32_t rank) {
  return (address & kWindowMask) | (rank + 1) << kWindowBits;
}
/// The place in this block, and the block's number: how the functions of units.h take it.
template <class T = void>
T* own(std::uint64_t address) {
  return static_cast<T*>(shared_pointer(static_cast<std::uint32_t>(address) & kWindowMask));
}
inline int rank_of(std::uint64_t address) {
  const int rank = static_cast<int>(static_cast<std::uint32_t>(address) >> kWindowBits);
  return rank == 0 ? kOwnRank : rank - 1;
}

// ---- Arithmetic --------------------------------------------------------------------------------

template <class T>
using Modulo = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>,
                                           cuda_cpu::type_identity<T>>::type;

template <class T>
T add(T a, T b) {
  if constexpr (kWhole<T>)
    return static_cast<T>(Modulo<T>(a) + Modulo<T>(b));
  else
    return a + b;
}
template <class T>
T sub(T a, T b) {
  if constexpr (kWhole<T>)
    return static_cast<T>(Modulo<T>(a) - Modulo<T>(b));
  else
    return a - b;
}
/// The lower half of the product, if it is of whole numbers.
template <class T>
T mul(T a, T b) {
  if constexpr (kWhole<T>) {
    return static_cast<T>(static_cast<Modulo<Twice<T>>>(a) * static_cast<Modulo<Twice<T>>>(b));
  } else {
    return a * b;
  }
}
template <class T>
T mul_hi(T a, T b) {
  return static_cast<T>(Twice<T>(a) * b >> 8 * sizeof(T));
}
template <class T>
Twice<T> mul_wide(T a, T b) {
  return Twice<T>(a) * b;
}
template <class T>
T mul24(T a, T b) {
  const auto low = [](T x) { return static_cast<T>(static_cast<T>(Modulo<T>(x) << 8) >> 8); };
  return mul(low(a), low(b));
}
template <class T>
T fma(T a, T b, T c) {
  if constexpr (std::is_same_v<T, F16> || std::is_same_v<T, Bf16>) {
    return T(static_cast<double>(float(a)) * float(b) + float(c));
  } else if constexpr (std::is_same_v<T, F16x2> || std::is_same_v<T, Bf16x2>) {
    return {fma(a.x, b.x, c.x), fma(a.y, b.y, c.y)};
  } else {
    return std::fma(a, b, c);
  }
}
template <class T>
T div(T a, T b) {
  if constexpr (std::is_signed_v<T> && kWhole<T>)
    return b == -1 ? sub(T(0), a) : a / b;
  else
    return a / b;
}
template <class T>
T rem(T a, T b) {
  if constexpr (std::is_signed_v<T>)
    return b == -1 ? 0 : a % b;
  else
    return a % b;
}
template <class T>
T neg(T a) {
  if constexpr (std::is_same_v<T, F16x2> || std::is_same_v<T, Bf16x2>)
    return {-a.x, -a.y};
  else if constexpr (kWhole<T>)
    return sub(T(0), a);
  else
    return -a;
}
template <class T>
T abs(T a) {
  if constexpr (kWhole<T>)
    return a < 0 ? neg(a) : a;
  else if constexpr (sizeof(T) == 2)
    return T::from_bits(a.bits & 0x7FFF);
  else if constexpr (std::is_floating_point_v<T>)
    return std::fabs(a);
  else
    return {abs(a.x), abs(a.y)};
}
template <class T>
T saturate(T a) {
  if constexpr (std::is_same_v<T, F16x2> || std::is_same_v<T, Bf16x2>) {
    return {saturate(a.x), saturate(a.y)};
  } else {
    return a > T(0) ? (a < T(1) ? a : T(1)) : T(0);
  }
}
inline std::int32_t saturated(std::int64_t a) {
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(a, INT32_MIN, INT32_MAX));
}
/// Of a number and NaN the number.
template <class T>
T least(T a, T b) {
  if constexpr (std::is_same_v<T, F16x2> || std::is_same_v<T, Bf16x2>) {
    return {least(a.x, b.x), least(a.y, b.y)};
  } else {
    if (a != a) return b;
    return b < a ? b : a;
  }
}
template <class T>
T most(T a, T b) {
  if constexpr (std::is_same_v<T, F16x2> || std::is_same_v<T, Bf16x2>) {
    return {most(a.x, b.x), most(a.y, b.y)};
  } else {
    if (a != a) return b;
    return a < b ? b : a;
  }
}
/// The same, but NaN if one of them is.
template <class T>
T least_or_nan(T a, T b) {
  return b != b ? b : a != a ? a : least(a, b);
}
template <class T>
T most_or_nan(T a, T b) {
  return b != b ? b : a != a ? a : most(a, b);
}
template <class T>
T sad(T a, T b, T c) {
  return add(c, a < b ? sub(b, a) : sub(a, b));
}

inline thread_local std::uint32_t carry;  ///< the condition code of add.cc and its kin
template <class T>
T add_carry(T a, T b, bool with, bool set) {
  const Wide sum = Wide(Modulo<T>(a)) + Modulo<T>(b) + (with ? carry : 0);
  if (set) carry = static_cast<std::uint32_t>(sum >> 8 * sizeof(T)) & 1;
  return static_cast<T>(sum);
}
template <class T>
T sub_carry(T a, T b, bool with, bool set) {
  const Wide difference = Wide(Modulo<T>(a)) - Modulo<T>(b) - (with ? carry : 0);
  if (set) carry = static_cast<std::uint32_t>(difference >> 8 * sizeof(T)) & 1;
  return static_cast<T>(difference);
}

/// Results, and operands with `ftz`, below the normal numbers are zeros.
template <bool kFlush>
float flushed(float x) {
  return kFlush && std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
template <class T>
T exp2_of(T a) {
  if constexpr (std::is_same_v<T, F16x2> || std::is_same_v<T, Bf16x2>) {
    return {exp2_of(a.x), exp2_of(a.y)};
  } else {
    return T(std::exp2(float(a)));
  }
}
template <class T>
T tanh_of(T a) {
  if constexpr (std::is_same_v<T, F16x2> || std::is_same_v<T, Bf16x2>) {
    return {tanh_of(a.x), tanh_of(a.y)};
  } else {
    return T(std::tanh(float(a)));
  }
}

// ---- Bits --------------------------------------------------------------------------------------

/// A shift by more than there are bits shifts out all of them.
template <class T>
T shl(T a, std::uint32_t by) {
  return by >= 8 * sizeof(T) ? T(0) : static_cast<T>(a << by);
}
template <class T>
T shr(T a, std::uint32_t by) {
  return static_cast<T>(a >> std::min<std::uint32_t>(by, 8 * sizeof(T) - 1) >>
                        (by >= 8 * sizeof(T) ? 1 : 0));
}
inline std::uint32_t shf(bool left, bool clamp, std::uint32_t low, std::uint32_t high,
                         std::uint32_t by) {
  by = clamp ? std::min(by, 32u) : by & 31;
  const std::uint64_t both = static_cast<std::uint64_t>(high) << 32 | low;
  return static_cast<std::uint32_t>(left ? both << by >> 32 : both >> by);
}
inline std::uint32_t lop3(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t table) {
  std::uint32_t result = 0;
  for (unsigned i = 0; i < 8; ++i) {
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}
template <class T>
T bfe(T a, std::uint32_t from, std::uint32_t count) {
  constexpr unsigned kBits = 8 * sizeof(T);
  from &= 255, count &= 255;
  if (count == 0) return 0;
  if (from >= kBits) return std::is_signed_v<T> && a < 0 ? T(-1) : T(0);
  count = std::min(count, kBits - from);
  return static_cast<T>(static_cast<T>(Modulo<T>(a) << (kBits - from - count)) >> (kBits - count));
}
template <class T>
T bfi(T a, T b, std::uint32_t from, std::uint32_t count) {
  from &= 255, count &= 255;
  const T ones = count >= 8 * sizeof(T) ? T(~T(0)) : static_cast<T>((T(1) << count) - 1);
  const T mask = shl(ones, from);
  return static_cast<T>((shl(a, from) & mask) | (b & ~mask));
}
/// The place of the highest bit that is not the sign's.
template <class T>
std::uint32_t bfind(T a, bool as_shift) {
  Modulo<T> bits = static_cast<Modulo<T>>(a);
  if (std::is_signed_v<T> && a < 0) bits = static_cast<Modulo<T>>(~bits);
  if (bits == 0) return ~0u;
  const int zeros = cuda_cpu::countl_zero(bits);
  return static_cast<std::uint32_t>(as_shift ? zeros : int(8 * sizeof(T)) - 1 - zeros);
}
template <class T>
T reversed(T a) {
  if constexpr (sizeof(T) == 4)
    return __brev(a);
  else
    return __brevll(a);
}
/// Four products of bytes, each with a sign or not; a sum, which wraps around.
template <class A, class B>
std::int32_t dp4a(std::uint32_t a, std::uint32_t b, std::uint32_t sum) {
  for (int i = 0; i < 32; i += 8) {
    sum += static_cast<std::uint32_t>(std::int32_t(static_cast<A>(a >> i)) *
                                      std::int32_t(static_cast<B>(b >> i)));
  }
  return static_cast<std::int32_t>(sum);
}

// ---- Conversions -------------------------------------------------------------------------------

enum class Round { nearest, zero, down, up };

inline double to_whole(double x, Round round) {
  return round == Round::nearest ? std::nearbyint(x)
         : round == Round::zero  ? std::trunc(x)
         : round == Round::down  ? std::floor(x)
                                 : std::ceil(x);
}
/// The nearest float on the chosen side.
inline float to_float(double x, Round round) {
  const float near = static_cast<float>(x);
  if (round == Round::nearest || near == x || x != x) return near;
  const bool below = round == Round::down || (round == Round::zero && x > 0);
  if (below ? near > x : near < x) return std::nextafter(near, below ? -INFINITY : INFINITY);
  return near;
}
template <class T, class From>
T convert(From x, Round round, bool saturates) {
  if constexpr (kWhole<From> && kWhole<T>) {
    if (!saturates) return static_cast<T>(x);
    const SignedWide low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
    return static_cast<T>(std::clamp<SignedWide>(x, low, high));
  } else if constexpr (kWhole<T>) {
    return saturating<T>(to_whole(static_cast<double>(x), round));
  } else if constexpr (kWhole<From>) {
    if constexpr (std::is_same_v<T, float>) {
      return sizeof(From) < 8 ? to_float(static_cast<double>(x), round) : static_cast<float>(x);
    } else {
      return T(static_cast<double>(x));
    }
  } else if constexpr (std::is_same_v<T, From>) {
    if constexpr (std::is_floating_point_v<T>)
      return static_cast<T>(to_whole(x, round));
    else
      return T(static_cast<float>(to_whole(float(x), round)));
  } else {
    T result;
    if constexpr (std::is_same_v<T, float> && std::is_same_v<From, double>) {
      result = to_float(x, round);
    } else if constexpr (std::is_same_v<From, double>) {
      result = T(x);
    } else {
      result = T(static_cast<float>(x));
    }
    return saturates ? saturate(result) : result;
  }
}
template <class T>
std::uint32_t packed(float high, float low, bool relu) {
  T pair(low, high);
  if (relu) pair = most(pair, T(0.0f, 0.0f));
  return as<std::uint32_t>(pair);
}
inline std::uint32_t to_tf32(float value, bool away) {
  std::uint32_t bits = cuda_cpu::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7F800000) == 0x7F800000) return bits;
  return (bits + (away ? 0x1000 : 0xFFF + (bits >> 13 & 1))) & ~0x1FFFu;
}

// ---- Memory ------------------------------------------------------------------------------------

/// A load that may be one of a loop which waits: others go on if it finds the same again.
template <class T>
T load_ordered(T* address, std::memory_order order, Site site) {
  using Bits = Unsigned<sizeof(T)>;
  cuda_cpu::atomic_ref<Bits> at(*reinterpret_cast<Bits*>(address));
  look(address, at.load(std::memory_order_relaxed), site);
  const Bits value = at.load(order);
  order_read(address, order == std::memory_order_acquire);
  saw(address, value);
  return as<T>(value);
}
template <class T>
void store_ordered(T* address, T value, std::memory_order order) {
  using Bits = Unsigned<sizeof(T)>;
  const OrderedWrite write(address, order == std::memory_order_release);
  cuda_cpu::atomic_ref<Bits>(*reinterpret_cast<Bits*>(address)).store(as<Bits>(value), order);
}
template <class T>
T atomic_exchange_if(T* address, T compare, T value, Site site) {
  using Bits = Unsigned<sizeof(T)>;
  return as<T>(
      atomicCAS(reinterpret_cast<Bits*>(address), as<Bits>(compare), as<Bits>(value), site));
}
template <class T>
T atomic_most(T* address, T value) {
  return atomic_update(address, [&](T old) { return most(old, value); });
}
template <class T>
T atomic_least(T* address, T value) {
  return atomic_update(address, [&](T old) { return least(old, value); });
}

/// What cp.async asks for: `bytes` of the `size` are copied, and the rest is zeros.
inline AsyncCopy copy(void* to, const void* from, std::size_t size, std::size_t bytes) {
  if ((size != 4 && size != 8 && size != 16) || bytes > size) {
    fail("cp.async of %zu bytes, %zu of them from memory: it copies 4, 8 or 16", size, bytes);
  }
  if (reinterpret_cast<std::uintptr_t>(to) % size != 0 ||
      (bytes > 0 && reinterpret_cast<std::uintptr_t>(from) % size != 0)) {
    fail("cp.async of %zu bytes from %p to %p: not aligned", size, from, to);
  }
  return {to, from, size, size - bytes};
}

/// Of all of the thread's copies, in a group or not.
inline void wait_for_copies() {
  async_copies().commit();
  async_copies().wait(0);
}

// ---- Warps -------------------------------------------------------------------------------------

inline unsigned warp_of_thread() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) / 32;
}
inline unsigned multiprocessor() {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  return block % static_cast<unsigned>(multiprocessors());
}
inline bool elect(unsigned mask, Site site) {
  warp_meet(
      mask, [](void* const*, unsigned) {}, nullptr, "elect.sync", site);
  return lane_id() == static_cast<unsigned>(cuda_cpu::countr_zero(mask));
}

/// shfl.sync: `bounds` has the segment's mask in its upper half, and its last lane in the lower
/// one. `inside` becomes whether the lane to read from is in the segment.
template <int kKind>  // 0 idx, 1 up, 2 down, 3 bfly
std::uint32_t shuffle(std::uint32_t value, std::uint32_t by, std::uint32_t bounds,
                      std::uint32_t mask, bool* inside, Site site) {
  const int lane = static_cast<int>(lane_id()), segment = static_cast<int>(bounds >> 8 & 31);
  const int last = (lane & segment) | (static_cast<int>(bounds & 31) & ~segment);
  const int first = lane & segment, step = static_cast<int>(by & 31);
  const int from = kKind == 0   ? first | (step & ~segment)
                   : kKind == 1 ? lane - step
                   : kKind == 2 ? lane + step
                                : lane ^ step;
  const bool is_inside = kKind == 1 ? from >= last : from <= last;
  if (inside) *inside = is_inside;
  return Shuffle<std::uint32_t>::run(mask, value, 32, "shfl.sync", site,
                                     [&](int own, int, int) { return is_inside ? from : own; });
}

/// A row of ldmatrix or stmatrix. The first 8 lanes give the rows of the first matrix, the next
/// ones those of the second: the addresses of other lanes do not count.
using Row = Pack<std::uint32_t, 4>::Type;
inline bool gives_row(unsigned matrices) { return lane_id() < 8 * matrices; }

template <bool kTransposed, int kCount>
void ldmatrix(std::uint32_t (&matrices)[kCount], Row row, Site site) {
  unsigned all[4];
  Ldmatrix self = {{}, all};
  std::memcpy(self.row, &row, sizeof row);
  Ldmatrix::meet<kTransposed>(self, site);
  std::copy_n(all, kCount, matrices);
}
template <bool kTransposed, int kCount>
Row stmatrix(const std::uint32_t (&registers)[kCount], Site site) {
  Stmatrix<kCount> self = {registers, {}};
  self.template meet<kTransposed>(self, "stmatrix", site);
  Row row;
  std::memcpy(&row, self.row, sizeof row);
  return row;
}
/// movmatrix: each lane's pair of one 8 x 8 matrix becomes its pair of the transposed one.
inline std::uint32_t movmatrix(std::uint32_t pair, Site site) {
  struct Pair {
    std::uint32_t from, to;
  } self = {pair, 0};
  warp_meet(
      ~0u,
      [](void* const* operands, unsigned lanes) {
        if (lanes != ~0u) fail("movmatrix without all 32 lanes of the warp");
        const auto element = [&](int row, int col) -> std::uint32_t {
          const Pair& of = *static_cast<const Pair*>(operands[4 * row + col / 2]);
          return of.from >> 16 * (col % 2) & 0xFFFF;
        };
        for (int lane = 0; lane < 32; ++lane) {
          const int row = lane / 4, col = lane % 4 * 2;
          static_cast<Pair*>(operands[lane])->to = element(col, row) | element(col + 1, row) << 16;
        }
      },
      &self, "movmatrix", site);
  return self.to;
}

struct Tf32 {
  static constexpr int kBits = 32;
  static float element(std::uint32_t bits) { return cuda_cpu::bit_cast<float>(bits & ~0x1FFFu); }
};
template <class Format>
struct Short {
  static constexpr int kBits = 16;
  static float element(std::uint32_t bits) {
    return Format::to_float(static_cast<std::uint16_t>(bits));
  }
};
template <class T>
struct Byte {
  static constexpr int kBits = 8;
  static int element(std::uint32_t bits) { return static_cast<T>(bits); }
};

struct E4m3 {
  static constexpr int kBits = 8;
  static float element(std::uint32_t bits) {
    return E4m3Format::to_float(static_cast<std::uint8_t>(bits));
  }
};

/// A lane's part in mma.sync.m16n8kK. Each register of A and of B has 32 bits of k. PTX ISA,
/// "Matrix Fragments for mma.m16n8k16" and its neighbours: they follow one pattern.
template <class A, class B, class Sum, int kDepth, bool kSaturates>
struct Product {
  static constexpr int kIn = 32 / A::kBits, kB = kDepth / (4 * kIn), kA = 2 * kB;
  static constexpr int kC = std::is_same_v<Sum, F16> ? 2 : 4;
  using Number = decltype(A::element(0));
  const std::uint32_t* a;
  const std::uint32_t* b;
  const std::uint32_t* c;
  std::uint32_t* d;

  static std::uint32_t part(std::uint32_t bits, int i) { return bits >> (A::kBits * i % 32); }

  static void combine(void* const* operands, unsigned lanes) {
    if (lanes != ~0u) fail("mma.sync without all 32 lanes of the warp");
    alignas(64) Number a[16][kDepth], b[kDepth][8], sum[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Product& self = *static_cast<const Product*>(operands[lane]);
      const int g = lane / 4, t = lane % 4;
      for (int e = 0; e < kIn; ++e) {
        for (int i = 0; i < kA; ++i) {
          a[g + i % 2 * 8][i / 2 * 4 * kIn + t * kIn + e] = A::element(part(self.a[i], e));
        }
        for (int i = 0; i < kB; ++i) {
          b[i * 4 * kIn + t * kIn + e][g] = B::element(part(self.b[i], e));
        }
      }
      for (int i = 0; i < 4; ++i) {
        Number& to = sum[g + i / 2 * 8][2 * t + i % 2];
        if constexpr (kC == 2)
          to = HalfFormat::to_float(static_cast<std::uint16_t>(self.c[i / 2] >> i % 2 * 16));
        else
          to = as<Number>(self.c[i]);
      }
    }
    if constexpr (std::is_same_v<Number, float>) {
      multiply_small(a[0], b[0], sum[0], sum[0], 16, 8, kDepth);
    } else {
      for (int row = 0; row < 16; ++row) {
        for (int col = 0; col < 8; ++col) {
          std::int64_t total = sum[row][col];
          for (int k = 0; k < kDepth; ++k) total += a[row][k] * b[k][col];
          sum[row][col] = kSaturates ? saturated(total) : static_cast<int>(total);
        }
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const Product& self = *static_cast<const Product*>(operands[lane]);
      const auto at = [&](int i) { return sum[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2]; };
      for (int i = 0; i < kC; ++i) {
        if constexpr (kC == 2)
          self.d[i] = as<std::uint32_t>(F16x2(F16(float(at(2 * i))), F16(float(at(2 * i + 1)))));
        else
          self.d[i] = as<std::uint32_t>(at(i));
      }
    }
  }
};
template <class A, class B, class Sum, int kDepth, bool kSaturates, int kD, int kA, int kB>
void mma(std::uint32_t (&d)[kD], const std::uint32_t (&a)[kA], const std::uint32_t (&b)[kB],
         const std::uint32_t (&c)[kD], Site site) {
  using This = Product<A, B, Sum, kDepth, kSaturates>;
  static_assert(kA == This::kA && kB == This::kB && kD == This::kC,
                "this mma.sync has another number of registers");
  This self = {a, b, c, d};
  warp_meet(~0u, This::combine, &self, "mma.sync", site);
}

// ---- Hopper ------------------------------------------------------------------------------------

/// Reading and writing are late, so a product needs the registers themselves: it takes them as they
/// lie in memory, one after another.
template <class First, class... Rest>
float* sum_registers(First& first, Rest&... rest) {
  static_assert(sizeof first == 4);
  int i = 0;
  if (!((&rest == &first + ++i) && ...)) {
    fail("wgmma: the registers of the sum have to be one array, in its order");
  }
  return reinterpret_cast<float*>(&first);
}
inline void check_scale(long long a, long long b) {
  if (a != 1 || b != 1) fail("wgmma with a factor of -1: the CPU backend has 1 alone");
}

/// What a store that reduces makes of what is in memory and of what comes.
enum class Reduce { of_and, of_or, of_xor, of_add, of_inc, of_dec, of_min, of_max };
template <Reduce kWhat, class T>
T reduced(T old, T value) {
  if constexpr (kWhat == Reduce::of_add) return add<T>(old, value);
  if constexpr (kWhat == Reduce::of_min) return least<T>(old, value);
  if constexpr (kWhat == Reduce::of_max) return most<T>(old, value);
  if constexpr (std::is_integral_v<T>) {
    if constexpr (kWhat == Reduce::of_and) return old & value;
    if constexpr (kWhat == Reduce::of_or) return old | value;
    if constexpr (kWhat == Reduce::of_xor) return old ^ value;
    if constexpr (kWhat == Reduce::of_inc) return old >= value ? T{0} : static_cast<T>(old + 1);
    if constexpr (kWhat == Reduce::of_dec) {
      return old == 0 || old > value ? value : static_cast<T>(old - 1);
    }
  }
  __builtin_unreachable();
}
/// Reduction of units.h.
template <Reduce kWhat, class T>
void reduce(void* to, const void* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes / sizeof(T); ++i) {
    T value;
    std::memcpy(&value, static_cast<const T*>(from) + i, sizeof value);
    update_memory(static_cast<T*>(to) + i, [&](T old) { return reduced<kWhat, T>(old, value); });
  }
}
/// ReductionOf of units.h. Floating-point numbers are added, and those of 16 bits have a least.
template <Reduce kWhat>
Reduction reduction_of(CUtensorMapDataType type) {
  constexpr bool kFloats = kWhat == Reduce::of_add;
  constexpr bool kSmall = kFloats || kWhat == Reduce::of_min || kWhat == Reduce::of_max;
  if (type == CU_TENSOR_MAP_DATA_TYPE_UINT32) return reduce<kWhat, std::uint32_t>;
  if (type == CU_TENSOR_MAP_DATA_TYPE_INT32) return reduce<kWhat, std::int32_t>;
  if constexpr (kFloats) {
    if (type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32) return reduce<kWhat, float>;
  }
  if constexpr (kSmall) {
    if (type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16) return reduce<kWhat, F16>;
    if (type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) return reduce<kWhat, Bf16>;
  }
  return nullptr;
}

/// An arrival: returns what identifies the phase.
inline std::uint64_t arrive(std::uint64_t* barrier, int rank, int bytes, std::uint32_t count,
                            Site site) {
  const std::uint64_t phase =
      rank == kOwnRank ? static_cast<std::uint64_t>(mbarrier_parity(barrier, site)) : 0;
  for (; count > 1; --count) mbarrier_arrive(barrier, rank, 0, "mbarrier.arrive", site);
  mbarrier_arrive(barrier, rank, bytes, "mbarrier.arrive", site);
  return phase;
}

}  // namespace cuda_cpu::ptx
