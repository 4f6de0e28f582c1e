// The element types that cuBLAS and cuBLASLt know here.

#pragma once

enum cudaDataType {
  CUDA_R_32F = 0,
  CUDA_R_64F = 1,
  CUDA_R_16F = 2,
  CUDA_R_16BF = 14,
};
typedef cudaDataType cudaDataType_t;
