// Tensor maps, which tell the copy engine (TMA) where a matrix lies. CUDA Driver API, "Tensor Map
// Object Management".
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "primitives/check.h"

namespace primitives {

// ---- Host: tensor maps --------------------------------------------------------------------------

/// How often a byte is copied, which says what the L2 cache should read from memory at a time.
/// `once`: 256 bytes. `often`, by many blocks: 256 bytes where rows are multiples of that, else
/// 128. With other rows, a row of a box often lies in two pieces of 256 bytes, and both would be
/// fetched. For a matrix that is only written it means nothing.
enum class Reads { once, often };

/// Has the driver make a tensor map of `rank` dimensions, the innermost first. strides[i] says how
/// many bytes lie between neighbours in dimension i + 1.
template <typename T>
CUtensorMap encode_tensor_map(const T* tensor, unsigned rank, const cuuint64_t* extents,
                              const cuuint64_t* strides, const cuuint32_t* box,
                              CUtensorMapSwizzle swizzle, bool to_tf32 = false,
                              Reads reads = Reads::once) {
  static_assert(sizeof(T) == 2 || std::is_same_v<T, float> || std::is_same_v<T, __nv_fp8_e4m3>);
  // Through the runtime, so that the program starts where there is no driver to link to.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                           cudaEnableDefault, &result),
          "cudaGetDriverEntryPointByVersion");
    if (result != cudaDriverEntryPointSuccess) throw Error("the driver has no tensor maps");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  // There is no type for FP8. Of a copy it would only say how many bytes an element has.
  const CUtensorMapDataType type = to_tf32                    ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                   : sizeof(T) == 1           ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : std::is_same_v<T, float> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : std::is_same_v<T, __nv_bfloat16>
                                       ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto fetched = reads == Reads::often && strides[0] % 256 != 0
                           ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                           : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  struct {
    const T* tensor;
    cuuint64_t extents[5], strides[4];
    cuuint32_t box[5], rank;
    CUtensorMapDataType type;
    CUtensorMapSwizzle swizzle;
    CUtensorMapL2promotion fetched;
    cuuint32_t zero;
  } question = {tensor, {}, {}, {}, rank, type, swizzle, fetched, 0};
  for (unsigned i = 0; i < 5 && i < rank; ++i) {
    question.extents[i] = extents[i], question.box[i] = box[i];
    if (i + 1 < rank) question.strides[i] = strides[i];
  }
  return answer_to<CUtensorMap>(question, [&] {
    CUtensorMap map;
    const CUresult status =
        encode(&map, type, rank, const_cast<T*>(tensor), extents, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, fetched, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
      throw Error("cuTensorMapEncodeTiled: CUresult " + std::to_string(status) + " (" +
                  std::to_string(rank) + " dimensions, the first of " + std::to_string(extents[0]) +
                  ")");
    }
    return map;
  });
}

/// Describes a row-major matrix (rows, cols) of half, __nv_bfloat16, float or __nv_fp8_e4m3 to the
/// copy engine. The engine moves boxes of `box_rows` (at most 256) rows by 128 bytes to or from
/// shared memory. These are 64 columns with elements of 2 bytes, 32 with 4 bytes and 128 with 1
/// byte. `row_stride` says how many elements a row begins after the one above it; 0 means `cols`.
/// The matrix, its rows and the first column of each box have to be aligned to 16 bytes. What a box
/// reads outside of the matrix becomes zero, and what it writes there is dropped. With `to_tf32`,
/// floats are rounded to TF32 on the way.
///
/// In shared memory each row of a box takes 128 bytes, without gaps, and is swizzled: piece p of
/// row r, 16 bytes, lies at place p ^ (r % 8), as wgmma and swizzled() expect it. Here r counts
/// from a multiple of 1024 bytes on. So a box that begins at another multiple of 128 lies as a
/// later part of a larger box would.
template <typename T>
CUtensorMap tensor_map(const T* matrix, int64_t rows, int64_t cols, unsigned box_rows,
                       bool to_tf32 = false, int64_t row_stride = 0, Reads reads = Reads::once) {
  const cuuint64_t extents[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  if (row_stride == 0) row_stride = cols;
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_stride) * sizeof(T)};
  const cuuint32_t box[2] = {128 / sizeof(T), box_rows};
  return encode_tensor_map(matrix, 2, extents, strides, box, CU_TENSOR_MAP_SWIZZLE_128B, to_tf32,
                           reads);
}

/// The same for a vector of `count` elements. `box` of them are moved at a time, and nothing is
/// swizzled.
template <typename T>
CUtensorMap tensor_map(const T* vector, int64_t count, cuuint32_t box = 64) {
  const cuuint64_t extent = static_cast<cuuint64_t>(count);
  const cuuint64_t strides[1] = {};  // one dimension has none, but the driver wants an address
  return encode_tensor_map(vector, 1, &extent, strides, &box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

/// tensor_map() of `matrices` matrices (rows, cols), one after another.
template <typename T>
CUtensorMap batch_map(const T* batch, int64_t matrices, int64_t rows, int64_t cols,
                      unsigned box_rows, bool to_tf32 = false) {
  const cuuint64_t extents[3] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows),
                                 static_cast<cuuint64_t>(matrices)};
  const cuuint64_t strides[2] = {extents[0] * sizeof(T), extents[0] * extents[1] * sizeof(T)};
  const cuuint32_t box[3] = {128 / sizeof(T), box_rows, 1};
  return encode_tensor_map(batch, 3, extents, strides, box, CU_TENSOR_MAP_SWIZZLE_128B, to_tf32);
}

}  // namespace primitives
