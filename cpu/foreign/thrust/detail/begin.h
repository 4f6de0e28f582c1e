// Before a header of CCCL (thrust), and end.h after it. It is taken as what it is for a host
// without nvcc: its kernels, and what chooses among GPUs, are left out.

#pragma push_macro("__CUDACC__")
#pragma push_macro("__NVCC__")
#pragma push_macro("__CUDA_ARCH__")
#pragma push_macro("CUDART_VERSION")
#pragma push_macro("__align__")
#undef __CUDACC__
#undef __NVCC__
#undef __CUDA_ARCH__
#undef CUDART_VERSION
#define CUDART_VERSION 12090  // since 13.0 there are vectors with two alignments
#undef __align__
#define __align__(n) __attribute__((aligned(n)))  // also where a typedef needs it
// The backend's half and its kin are not what these headers know under these names.
// Names without the version, and without the GPUs that there are.
#define CUB_DISABLE_NAMESPACE_MAGIC
#define CUB_IGNORE_NAMESPACE_MAGIC_ERROR
#define CCCL_DISABLE_FP16_SUPPORT
#define CCCL_DISABLE_BF16_SUPPORT
#define CCCL_DISABLE_NVFP8_SUPPORT
#define CCCL_DISABLE_NVFP6_SUPPORT
#define CCCL_DISABLE_NVFP4_SUPPORT
#define CCCL_DISABLE_CTK_COMPATIBILITY_CHECK
