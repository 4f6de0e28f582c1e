// Zeros in a workspace.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace operators::library {

/// Writes `bytes` zeros, rounded up to a multiple of 16, on the stream. `to` is aligned to 16 bytes.
/// The next kernel of the stream may be launched early.
void write_zeros(void* to, size_t bytes, cudaStream_t stream);

}  // namespace operators::library
