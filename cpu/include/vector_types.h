// CUDA's short vector types and dim3, with CUDA's sizes and alignments.

#pragma once

/// Sizes of a grid or block; a dimension that is not given is 1.
struct uint3;
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(const uint3& from);
};

// A vector of several elements has a constructor, so that {x, y} is made before it is stored, in
// one piece, as on the GPU: counting.h goes by that.
//
// Defines the types NAME1 to NAME4 of element type T and their make_ functions. Vectors of two and
// four elements are aligned to their size, at most 16 bytes, as loads of them are on the GPU.
#define CUDA_CPU_VECTOR_TYPES(NAME, T)                                                \
  struct NAME##1 {                                                                    \
    T x;                                                                              \
  };                                                                                  \
  struct alignas(2 * sizeof(T)) NAME##2 {                                             \
    T x, y;                                                                           \
    NAME##2() = default;                                                              \
    constexpr NAME##2(T x_, T y_) : x(x_), y(y_) {}                                   \
  };                                                                                  \
  struct NAME##3 {                                                                    \
    T x, y, z;                                                                        \
  };                                                                                  \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) NAME##4 {                   \
    T x, y, z, w;                                                                     \
    NAME##4() = default;                                                              \
    constexpr NAME##4(T x_, T y_, T z_ = 0, T w_ = 0) : x(x_), y(y_), z(z_), w(w_) {} \
  };                                                                                  \
  constexpr NAME##1 make_##NAME##1(T x) { return {x}; }                               \
  constexpr NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                       \
  constexpr NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }               \
  constexpr NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }

CUDA_CPU_VECTOR_TYPES(char, signed char)
CUDA_CPU_VECTOR_TYPES(uchar, unsigned char)
CUDA_CPU_VECTOR_TYPES(short, short)
CUDA_CPU_VECTOR_TYPES(ushort, unsigned short)
CUDA_CPU_VECTOR_TYPES(int, int)
CUDA_CPU_VECTOR_TYPES(uint, unsigned)
CUDA_CPU_VECTOR_TYPES(long, long)
CUDA_CPU_VECTOR_TYPES(ulong, unsigned long)
CUDA_CPU_VECTOR_TYPES(longlong, long long)
CUDA_CPU_VECTOR_TYPES(ulonglong, unsigned long long)
CUDA_CPU_VECTOR_TYPES(float, float)
CUDA_CPU_VECTOR_TYPES(double, double)

#undef CUDA_CPU_VECTOR_TYPES

constexpr dim3::dim3(const uint3& from) : x(from.x), y(from.y), z(from.z) {}
