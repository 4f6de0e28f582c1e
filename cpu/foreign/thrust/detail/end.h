// After a header of CCCL: see begin.h.

// What comes with CCCL's system for CUDA.
#ifdef THRUST_VERSION
#include <thrust/system/cuda/error.h>
#include <thrust/system_error.h>
#endif

#pragma pop_macro("__align__")
#pragma pop_macro("CUDART_VERSION")
#pragma pop_macro("__CUDA_ARCH__")
#pragma pop_macro("__NVCC__")
#pragma pop_macro("__CUDACC__")
