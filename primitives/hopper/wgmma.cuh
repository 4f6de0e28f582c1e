// Products of a whole warpgroup (wgmma), the descriptors of their factors in shared memory, and
// what is done with their sums. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
//
// The 128 threads of a warpgroup multiply a 64 x 16 piece of A by a 16 x N piece of B into a 64 x N
// sum in registers. (That is for elements of 2 bytes. A piece always has 32 bytes of k, so it is 64
// x 8 for 4 bytes, and 64 x 32 for 1 byte.) B is in shared memory; A is there, or in registers.
// sum[i] of thread t is the element
//
//     row 16 (t / 32) + t % 32 / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (t % 4) + i % 2
//
// The four warps do not meet at these instructions: .sync is among the threads of a warp. But a
// product is one operation of the warpgroup, and whoever has waited for it knows that all four
// warps have begun it. So one thread may give back, for all four warps, the tiles that the product
// has read, and the memory from which the left factor in their registers was loaded. It may give
// back nothing else that another warp has read, and nothing of a newer product. How sure that is:
// docs/hopper.md, at its end.
//
// The CPU backend has functions of the same names in cpu/hopper/hopper_device.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "primitives/hopper/barrier.cuh"

namespace primitives {

#if HOPPER_CODE

// What the 64 bits of a descriptor mean, from the lowest on: 14 bits are the address, in pieces of
// 16 bytes. 14 bits, from bit 16 on, are the leading offset, and 14 bits, from bit 32 on, are the
// stride offset, both in such pieces, too. The two highest bits say how the tile is swizzled: 1 is
// by 128 bytes.

/// The descriptor of a tile of A as tensor_load leaves it: 64 columns (k), rows 128 bytes apart.
/// (PTX ISA, "Matrix Descriptor Format": K-major, 128-byte swizzle. The stride offset is the
/// distance of groups of 8 rows; the leading offset of such a tile does not count.) The next 16
/// columns are 32 bytes further on: add 2 to the descriptor.
__device__ inline uint64_t descriptor_a(const void* tile) {
  return (shared_address(tile) & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

/// The descriptor of a tile of row-major B: boxes of `rows` rows (k) by 64 columns, one after the
/// other along the columns. (MN-major, 128-byte swizzle. The leading offset is the distance of
/// boxes, the stride offset that of groups of 8 rows.) The next 16 rows are 2048 bytes further on:
/// add 128.
__device__ inline uint64_t descriptor_b(const void* tile, int rows) {
  return (shared_address(tile) & 0x3ffff) >> 4 | static_cast<uint64_t>(rows * 128 >> 4) << 16 |
         uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

/// The descriptor of what lies `by` pieces of 16 bytes further on in shared memory. Only its lower
/// half changes, which takes half the instructions of an addition of 64 bits.
__device__ inline uint64_t further(uint64_t descriptor, uint32_t by) {
  return descriptor >> 32 << 32 | (static_cast<uint32_t>(descriptor) + by);
}

/// kCount registers of a sum, from kFirst on: 2 kCount of its columns.
template <int kFirst, int kCount, int kAll>
__device__ inline float (&columns_of(float (&sum)[kAll]))[kCount] {
  static_assert(kFirst + kCount <= kAll);
  return reinterpret_cast<float(&)[kCount]>(sum[kFirst]);
}

/// Where piece `piece` (8 elements of 2 bytes) of row `row` lies in a box of tensor_map(), counted
/// in elements.
__device__ inline int swizzled(int row, int piece) { return row * 64 + (piece ^ row % 8) * 8; }

#ifndef CUDA_CPU

/// Has to be called before the first product, and again if other instructions have read or written
/// the sum's registers since the last product.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Makes a group of all products that were started since the last call.
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kNewest committed groups of products are still under way.
template <int kNewest>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory");
}

// The macros below write an instruction's operands out, one for each register of the sum. At the
// first reading skip them.
#define HOPPER_SUM4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define HOPPER_SUM8(i) HOPPER_SUM4(i), HOPPER_SUM4(i + 4)
#define HOPPER_SUM32(i) HOPPER_SUM8(i), HOPPER_SUM8(i + 8), HOPPER_SUM8(i + 16), HOPPER_SUM8(i + 24)
#define HOPPER_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define HOPPER_R16 HOPPER_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define HOPPER_R20 HOPPER_R16 ", %16, %17, %18, %19"
#define HOPPER_R24 HOPPER_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define HOPPER_R28 HOPPER_R24 ", %24, %25, %26, %27"
#define HOPPER_R32 HOPPER_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define HOPPER_R36 HOPPER_R32 ", %32, %33, %34, %35"
#define HOPPER_R40 HOPPER_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define HOPPER_R44 HOPPER_R40 ", %40, %41, %42, %43"
#define HOPPER_R48 HOPPER_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define HOPPER_R52 HOPPER_R48 ", %48, %49, %50, %51"
#define HOPPER_R56 HOPPER_R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define HOPPER_R60 HOPPER_R56 ", %56, %57, %58, %59"
#define HOPPER_R64 HOPPER_R56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define HOPPER_R68 HOPPER_R64 ", %64, %65, %66, %67"
#define HOPPER_R72 HOPPER_R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define HOPPER_R76 HOPPER_R72 ", %72, %73, %74, %75"
#define HOPPER_R80 HOPPER_R72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define HOPPER_R84 HOPPER_R80 ", %80, %81, %82, %83"
#define HOPPER_R88 HOPPER_R80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define HOPPER_R92 HOPPER_R88 ", %88, %89, %90, %91"
#define HOPPER_R96 HOPPER_R88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define HOPPER_R100 HOPPER_R96 ", %96, %97, %98, %99"
#define HOPPER_R104 HOPPER_R96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define HOPPER_R112 HOPPER_R104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define HOPPER_R116 HOPPER_R112 ", %112, %113, %114, %115"
#define HOPPER_R120 HOPPER_R112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define HOPPER_R128 HOPPER_R120 ", %120, %121, %122, %123, %124, %125, %126, %127"
// The instruction for each type. `n` is the number of columns, `k` that of rows of B. `registers`
// are the sum's operands, and `a` to `flags` the operands after them. `flags` are the signs of A
// and B; for elements of 2 bytes also whether A is transposed (only in shared memory), and whether
// B is row-major.
#define HOPPER_WGMMA_TEXT(n, k, type, registers, a, b, add, flags)                              \
  "{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k" k \
  ".f32." type "." type " {" registers "}, " a ", " b ", add, " flags ";\n}"
#define HOPPER_WGMMA_TF32(n, registers, a, b, add, ...)                        \
  asm volatile(HOPPER_WGMMA_TEXT(n, "8", "tf32", registers, a, b, add, "1, 1") \
               : __VA_ARGS__                                                   \
               : HOPPER_REGISTER_A)
#define HOPPER_WGMMA_TF32_SHARED(n, registers, left, right, adds, ...)                 \
  asm volatile(HOPPER_WGMMA_TEXT(n, "8", "tf32", registers, left, right, adds, "1, 1") \
               : __VA_ARGS__                                                           \
               : HOPPER_SHARED_AND_TALL)
#define HOPPER_WGMMA_FP8(n, registers, a, b, add, inputs, ...)                  \
  asm volatile(HOPPER_WGMMA_TEXT(n, "32", "e4m3", registers, a, b, add, "1, 1") \
               : __VA_ARGS__                                                    \
               : inputs)
#define HOPPER_WGMMA(n, registers, a, b, add, flags, inputs, ...)                \
  if constexpr (std::is_same_v<T, half>) {                                       \
    asm volatile(HOPPER_WGMMA_TEXT(n, "16", "f16", registers, a, b, add, flags)  \
                 : __VA_ARGS__                                                   \
                 : inputs);                                                      \
  } else {                                                                       \
    asm volatile(HOPPER_WGMMA_TEXT(n, "16", "bf16", registers, a, b, add, flags) \
                 : __VA_ARGS__                                                   \
                 : inputs);                                                      \
  }
#define HOPPER_SHARED_A \
  "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposed ? 1 : 0), "n"(kTall ? 0 : 1)
#define HOPPER_REGISTER_A \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add))
#define HOPPER_SHARED_AND_TALL "l"(a), "l"(b), "r"(static_cast<int>(add))

/// sum (64, N) = A B, plus the old sum if `add`, with N = 2 kCount. T is half or __nv_bfloat16. A
/// is given as by descriptor_a, B as by descriptor_b. With kTransposed, A is the transpose of a
/// row-major matrix, given as descriptor_b gives one of 64 columns. With kTall, B's columns are
/// contiguous: memory has B's transpose, which is tall where B is wide. It is given as descriptor_a
/// gives an A of N rows.
template <typename T, bool kTransposed = false, bool kTall = false, int kCount>
__device__ inline void wgmma(float (&sum)[kCount], uint64_t a, uint64_t b, bool add) {
  static_assert(sizeof(T) == 2);
  if constexpr (kCount == 16) {
    HOPPER_WGMMA("32", HOPPER_R16, "%16", "%17", "%18", "1, 1, %19, %20", HOPPER_SHARED_A,
                 HOPPER_SUM8(0), HOPPER_SUM8(8))
  } else if constexpr (kCount == 24) {
    HOPPER_WGMMA("48", HOPPER_R24, "%24", "%25", "%26", "1, 1, %27, %28", HOPPER_SHARED_A,
                 HOPPER_SUM8(0), HOPPER_SUM8(8), HOPPER_SUM8(16))
  } else if constexpr (kCount == 28) {
    HOPPER_WGMMA("56", HOPPER_R28, "%28", "%29", "%30", "1, 1, %31, %32", HOPPER_SHARED_A,
                 HOPPER_SUM8(0), HOPPER_SUM8(8), HOPPER_SUM8(16), HOPPER_SUM4(24))
  } else if constexpr (kCount == 32) {
    HOPPER_WGMMA("64", HOPPER_R32, "%32", "%33", "%34", "1, 1, %35, %36", HOPPER_SHARED_A,
                 HOPPER_SUM32(0))
  } else if constexpr (kCount == 36) {
    HOPPER_WGMMA("72", HOPPER_R36, "%36", "%37", "%38", "1, 1, %39, %40", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM4(32))
  } else if constexpr (kCount == 40) {
    HOPPER_WGMMA("80", HOPPER_R40, "%40", "%41", "%42", "1, 1, %43, %44", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM8(32))
  } else if constexpr (kCount == 44) {
    HOPPER_WGMMA("88", HOPPER_R44, "%44", "%45", "%46", "1, 1, %47, %48", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM8(32), HOPPER_SUM4(40))
  } else if constexpr (kCount == 48) {
    HOPPER_WGMMA("96", HOPPER_R48, "%48", "%49", "%50", "1, 1, %51, %52", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM8(32), HOPPER_SUM8(40))
  } else if constexpr (kCount == 52) {
    HOPPER_WGMMA("104", HOPPER_R52, "%52", "%53", "%54", "1, 1, %55, %56", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM8(32), HOPPER_SUM8(40), HOPPER_SUM4(48))
  } else if constexpr (kCount == 56) {
    HOPPER_WGMMA("112", HOPPER_R56, "%56", "%57", "%58", "1, 1, %59, %60", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM8(32), HOPPER_SUM8(40), HOPPER_SUM8(48))
  } else if constexpr (kCount == 60) {
    HOPPER_WGMMA("120", HOPPER_R60, "%60", "%61", "%62", "1, 1, %63, %64", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM8(32), HOPPER_SUM8(40), HOPPER_SUM8(48),
                 HOPPER_SUM4(56))
  } else if constexpr (kCount == 64) {
    HOPPER_WGMMA("128", HOPPER_R64, "%64", "%65", "%66", "1, 1, %67, %68", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32))
  } else if constexpr (kCount == 68) {
    HOPPER_WGMMA("136", HOPPER_R68, "%68", "%69", "%70", "1, 1, %71, %72", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM4(64))
  } else if constexpr (kCount == 72) {
    HOPPER_WGMMA("144", HOPPER_R72, "%72", "%73", "%74", "1, 1, %75, %76", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM8(64))
  } else if constexpr (kCount == 76) {
    HOPPER_WGMMA("152", HOPPER_R76, "%76", "%77", "%78", "1, 1, %79, %80", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM8(64), HOPPER_SUM4(72))
  } else if constexpr (kCount == 80) {
    HOPPER_WGMMA("160", HOPPER_R80, "%80", "%81", "%82", "1, 1, %83, %84", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM8(64), HOPPER_SUM8(72))
  } else if constexpr (kCount == 84) {
    HOPPER_WGMMA("168", HOPPER_R84, "%84", "%85", "%86", "1, 1, %87, %88", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM8(64), HOPPER_SUM8(72),
                 HOPPER_SUM4(80))
  } else if constexpr (kCount == 88) {
    HOPPER_WGMMA("176", HOPPER_R88, "%88", "%89", "%90", "1, 1, %91, %92", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM8(64), HOPPER_SUM8(72),
                 HOPPER_SUM8(80))
  } else if constexpr (kCount == 92) {
    HOPPER_WGMMA("184", HOPPER_R92, "%92", "%93", "%94", "1, 1, %95, %96", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM8(64), HOPPER_SUM8(72),
                 HOPPER_SUM8(80), HOPPER_SUM4(88))
  } else if constexpr (kCount == 96) {
    HOPPER_WGMMA("192", HOPPER_R96, "%96", "%97", "%98", "1, 1, %99, %100", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64))
  } else if constexpr (kCount == 100) {
    HOPPER_WGMMA("200", HOPPER_R100, "%100", "%101", "%102", "1, 1, %103, %104", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64), HOPPER_SUM4(96))
  } else if constexpr (kCount == 104) {
    HOPPER_WGMMA("208", HOPPER_R104, "%104", "%105", "%106", "1, 1, %107, %108", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64), HOPPER_SUM8(96))
  } else if constexpr (kCount == 116) {
    HOPPER_WGMMA("232", HOPPER_R116, "%116", "%117", "%118", "1, 1, %119, %120", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64), HOPPER_SUM8(96),
                 HOPPER_SUM8(104), HOPPER_SUM4(112))
  } else if constexpr (kCount == 120) {
    HOPPER_WGMMA("240", HOPPER_R120, "%120", "%121", "%122", "1, 1, %123, %124", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64), HOPPER_SUM8(96),
                 HOPPER_SUM8(104), HOPPER_SUM8(112))
  } else {
    static_assert(kCount == 128);
    HOPPER_WGMMA("256", HOPPER_R128, "%128", "%129", "%130", "1, 1, %131, %132", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64), HOPPER_SUM32(96))
  }
}

/// The same with A from registers. They must stay untouched until the product is done. Warp w of
/// the warpgroup holds rows 16 w to 16 w + 15, as fragments of mma_m16n8k16 (primitives/mma.cuh).
template <typename T, int kCount>
__device__ inline void wgmma(float (&sum)[kCount], const uint32_t (&a)[4], uint64_t b, bool add) {
  static_assert(sizeof(T) == 2);
  if constexpr (kCount == 16) {
    HOPPER_WGMMA("32", HOPPER_R16, "{%16, %17, %18, %19}", "%20", "%21", "1, 1, 1",
                 HOPPER_REGISTER_A, HOPPER_SUM8(0), HOPPER_SUM8(8))
  } else if constexpr (kCount == 24) {
    HOPPER_WGMMA("48", HOPPER_R24, "{%24, %25, %26, %27}", "%28", "%29", "1, 1, 1",
                 HOPPER_REGISTER_A, HOPPER_SUM8(0), HOPPER_SUM8(8), HOPPER_SUM8(16))
  } else if constexpr (kCount == 48) {
    HOPPER_WGMMA("96", HOPPER_R48, "{%48, %49, %50, %51}", "%52", "%53", "1, 1, 1",
                 HOPPER_REGISTER_A, HOPPER_SUM32(0), HOPPER_SUM8(32), HOPPER_SUM8(40))
  } else if constexpr (kCount == 32) {
    HOPPER_WGMMA("64", HOPPER_R32, "{%32, %33, %34, %35}", "%36", "%37", "1, 1, 1",
                 HOPPER_REGISTER_A, HOPPER_SUM32(0))
  } else if constexpr (kCount == 40) {
    HOPPER_WGMMA("80", HOPPER_R40, "{%40, %41, %42, %43}", "%44", "%45", "1, 1, 1",
                 HOPPER_REGISTER_A, HOPPER_SUM32(0), HOPPER_SUM8(32))
  } else if constexpr (kCount == 56) {
    HOPPER_WGMMA("112", HOPPER_R56, "{%56, %57, %58, %59}", "%60", "%61", "1, 1, 1",
                 HOPPER_REGISTER_A, HOPPER_SUM32(0), HOPPER_SUM8(32), HOPPER_SUM8(40),
                 HOPPER_SUM8(48))
  } else if constexpr (kCount == 64) {
    HOPPER_WGMMA("128", HOPPER_R64, "{%64, %65, %66, %67}", "%68", "%69", "1, 1, 1",
                 HOPPER_REGISTER_A, HOPPER_SUM32(0), HOPPER_SUM32(32))
  } else if constexpr (kCount == 72) {
    HOPPER_WGMMA("144", HOPPER_R72, "{%72, %73, %74, %75}", "%76", "%77", "1, 1, 1",
                 HOPPER_REGISTER_A, HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM8(64))
  } else if constexpr (kCount == 80) {
    HOPPER_WGMMA("160", HOPPER_R80, "{%80, %81, %82, %83}", "%84", "%85", "1, 1, 1",
                 HOPPER_REGISTER_A, HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM8(64),
                 HOPPER_SUM8(72))
  } else if constexpr (kCount == 96) {
    HOPPER_WGMMA("192", HOPPER_R96, "{%96, %97, %98, %99}", "%100", "%101", "1, 1, 1",
                 HOPPER_REGISTER_A, HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64))
  } else {
    static_assert(kCount == 128);
    HOPPER_WGMMA("256", HOPPER_R128, "{%128, %129, %130, %131}", "%132", "%133", "1, 1, 1",
                 HOPPER_REGISTER_A, HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64),
                 HOPPER_SUM32(96))
  }
}

/// sum (64, N) = A B, plus the old sum if `add`, with N = 2 kCount, for 8 of k, in TF32. The lower
/// 13 bits of an element do not count. A is in registers, as fragments of mma_m16n8k8_tf32. B is
/// given as by descriptor_a: in TF32 the instruction only takes a B whose columns are contiguous.
template <int kCount>
__device__ inline void wgmma_tf32(float (&sum)[kCount], const uint32_t (&a)[4], uint64_t b,
                                  bool add) {
  if constexpr (kCount == 8) {
    HOPPER_WGMMA_TF32("16", HOPPER_R8, "{%8, %9, %10, %11}", "%12", "%13", HOPPER_SUM8(0));
  } else if constexpr (kCount == 16) {
    HOPPER_WGMMA_TF32("32", HOPPER_R16, "{%16, %17, %18, %19}", "%20", "%21", HOPPER_SUM8(0),
                      HOPPER_SUM8(8));
  } else if constexpr (kCount == 20) {
    HOPPER_WGMMA_TF32("40", HOPPER_R20, "{%20, %21, %22, %23}", "%24", "%25", HOPPER_SUM8(0),
                      HOPPER_SUM8(8), HOPPER_SUM4(16));
  } else if constexpr (kCount == 32) {
    HOPPER_WGMMA_TF32("64", HOPPER_R32, "{%32, %33, %34, %35}", "%36", "%37", HOPPER_SUM32(0));
  } else if constexpr (kCount == 40) {
    HOPPER_WGMMA_TF32("80", HOPPER_R40, "{%40, %41, %42, %43}", "%44", "%45", HOPPER_SUM32(0),
                      HOPPER_SUM8(32));
  } else if constexpr (kCount == 48) {
    HOPPER_WGMMA_TF32("96", HOPPER_R48, "{%48, %49, %50, %51}", "%52", "%53", HOPPER_SUM32(0),
                      HOPPER_SUM8(32), HOPPER_SUM8(40));
  } else if constexpr (kCount == 64) {
    HOPPER_WGMMA_TF32("128", HOPPER_R64, "{%64, %65, %66, %67}", "%68", "%69", HOPPER_SUM32(0),
                      HOPPER_SUM32(32));
  } else if constexpr (kCount == 80) {
    HOPPER_WGMMA_TF32("160", HOPPER_R80, "{%80, %81, %82, %83}", "%84", "%85", HOPPER_SUM32(0),
                      HOPPER_SUM32(32), HOPPER_SUM8(64), HOPPER_SUM8(72));
  } else if constexpr (kCount == 96) {
    HOPPER_WGMMA_TF32("192", HOPPER_R96, "{%96, %97, %98, %99}", "%100", "%101", HOPPER_SUM32(0),
                      HOPPER_SUM32(32), HOPPER_SUM32(64));
  } else {
    static_assert(kCount == 128);
    HOPPER_WGMMA_TF32("256", HOPPER_R128, "{%128, %129, %130, %131}", "%132", "%133",
                      HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64), HOPPER_SUM32(96));
  }
}

/// The same with A from shared memory. Both factors are given as by descriptor_a.
template <int kCount>
__device__ inline void wgmma_tf32(float (&sum)[kCount], uint64_t a, uint64_t b, bool add) {
  if constexpr (kCount == 64) {
    HOPPER_WGMMA_TF32_SHARED("128", HOPPER_R64, "%64", "%65", "%66", HOPPER_SUM32(0),
                             HOPPER_SUM32(32));
  } else {
    static_assert(kCount == 128);
    HOPPER_WGMMA_TF32_SHARED("256", HOPPER_R128, "%128", "%129", "%130", HOPPER_SUM32(0),
                             HOPPER_SUM32(32), HOPPER_SUM32(64), HOPPER_SUM32(96));
  }
}

/// sum (64, N) = A B, plus the old sum if `add`, with N = 2 kCount, for 32 of k, with elements of
/// type __nv_fp8_e4m3. Both factors are given as by descriptor_a: for 1 byte, too, the instruction
/// only takes a B whose columns are contiguous. Although the sum's registers are fp32, the tensor
/// cores keep only about 14 bits of it.
template <int kCount>
__device__ inline void wgmma_fp8(float (&sum)[kCount], uint64_t a, uint64_t b, bool add) {
  if constexpr (kCount == 32) {
    HOPPER_WGMMA_FP8("64", HOPPER_R32, "%32", "%33", "%34", HOPPER_SHARED_AND_TALL,
                     HOPPER_SUM32(0));
  } else if constexpr (kCount == 64) {
    HOPPER_WGMMA_FP8("128", HOPPER_R64, "%64", "%65", "%66", HOPPER_SHARED_AND_TALL,
                     HOPPER_SUM32(0), HOPPER_SUM32(32));
  } else {
    static_assert(kCount == 128);
    HOPPER_WGMMA_FP8("256", HOPPER_R128, "%128", "%129", "%130", HOPPER_SHARED_AND_TALL,
                     HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64), HOPPER_SUM32(96));
  }
}

/// The same with A from registers. They must stay untouched until the product is done. A register
/// has 4 neighbours along k, the first one in its lowest byte. a[i] of thread t is in
///
///     row 16 (t / 32) + t % 32 / 4 + 8 (i % 2), from k = 4 (t % 4) + 16 (i / 2) on
template <int kCount>
__device__ inline void wgmma_fp8(float (&sum)[kCount], const uint32_t (&a)[4], uint64_t b,
                                 bool add) {
  if constexpr (kCount == 32) {
    HOPPER_WGMMA_FP8("64", HOPPER_R32, "{%32, %33, %34, %35}", "%36", "%37", HOPPER_REGISTER_A,
                     HOPPER_SUM32(0));
  } else if constexpr (kCount == 64) {
    HOPPER_WGMMA_FP8("128", HOPPER_R64, "{%64, %65, %66, %67}", "%68", "%69", HOPPER_REGISTER_A,
                     HOPPER_SUM32(0), HOPPER_SUM32(32));
  } else {
    static_assert(kCount == 128);
    HOPPER_WGMMA_FP8("256", HOPPER_R128, "{%128, %129, %130, %131}", "%132", "%133",
                     HOPPER_REGISTER_A, HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64),
                     HOPPER_SUM32(96));
  }
}

/// Stores kCount (2 or 4) matrices of 8 x 8 elements of 2 bytes to shared memory. It is the reverse
/// of ldmatrix. Thread t passes the address of row t % 8 of matrix t / 8: 16 bytes, aligned. It
/// holds in registers[m] two elements of row t / 4 of matrix m, columns 2 (t % 4) and 2 (t % 4) +
/// 1. With kTransposed it holds two elements of column t / 4, rows 2 (t % 4) and 2 (t % 4) + 1. PTX
/// ISA, "stmatrix".
template <bool kTransposed = false, int kCount>
__device__ inline void store_matrices(void* row, const uint32_t (&registers)[kCount]) {
  if constexpr (kCount == 2) {
    static_assert(kTransposed);
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)),
        "r"(registers[0]), "r"(registers[1])
        : "memory");
  } else if constexpr (kTransposed) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(row)),
                 "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(row)),
                 "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
                 : "memory");
  }
}

#endif  // CUDA_CPU
#endif  // HOPPER_CODE

}  // namespace primitives
