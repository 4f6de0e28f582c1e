// Before a header of CCCL (thrust), and end.h after it. It is taken as what it is for a host
// without nvcc: its kernels, and what chooses among GPUs, are left out.

#pragma push_macro("__CUDACC__")
#pragma push_macro("__NVCC__")
#pragma push_macro("__CUDA_ARCH__")
#pragma push_macro("CUDART_VERSION")
#undef __CUDACC__
#undef __NVCC__
#undef __CUDA_ARCH__
#undef CUDART_VERSION
#define CUDART_VERSION 12090  // since 13.0 there are vectors with two alignments
// The backend's half and its kin are not what these headers know under these names.
#define CCCL_DISABLE_FP16_SUPPORT
#define CCCL_DISABLE_BF16_SUPPORT
#define CCCL_DISABLE_NVFP8_SUPPORT
#define CCCL_DISABLE_NVFP6_SUPPORT
#define CCCL_DISABLE_NVFP4_SUPPORT
#define CCCL_DISABLE_CTK_COMPATIBILITY_CHECK
