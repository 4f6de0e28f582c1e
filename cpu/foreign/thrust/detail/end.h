// After a header of CCCL: see begin.h.

#pragma pop_macro("__align__")
#pragma pop_macro("CUDART_VERSION")
#pragma pop_macro("__CUDA_ARCH__")
#pragma pop_macro("__NVCC__")
#pragma pop_macro("__CUDACC__")
