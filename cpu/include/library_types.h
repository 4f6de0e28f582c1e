// The element types that cuBLAS and cuBLASLt know here, and which number of a library's version is
// asked for.

#pragma once

enum cudaDataType {
  CUDA_R_32F = 0,
  CUDA_R_64F = 1,
  CUDA_R_16F = 2,
  CUDA_R_16BF = 14,
};
typedef cudaDataType cudaDataType_t;

enum libraryPropertyType { MAJOR_VERSION = 0, MINOR_VERSION = 1, PATCH_LEVEL = 2 };
typedef libraryPropertyType libraryPropertyType_t;
