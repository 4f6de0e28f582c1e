/* Fused GPU operators, to be called from C, C++ or whatever else calls C. Plain C99.
 *
 * Every function that returns an int returns FK_OK or one of the codes of fk_status; then
 * fk_last_error() has a sentence that says why. What is refused is refused before anything is
 * written.
 *
 * A description starts with its own size, sizeof the struct, and says what is to be computed. The
 * caller brings the workspace: device memory that starts at a multiple of 256 bytes and has at
 * least as many bytes as ..._workspace() says for this description on the current device. What it
 * holds before a call does not matter, and after the call it is undefined. Two calls that may run
 * at the same time need a workspace each.
 *
 * All pointers to operands and workspace are to memory of the current device (cudaMalloc) or
 * managed memory. A ..._forward() puts its work on the given stream and returns at once. It never
 * prints, ends the program, waits for the device, allocates device memory or uses another stream.
 * A stream of NULL is CUDA's legacy default stream.
 */
#ifndef FUSED_KERNELS_H
#define FUSED_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FK_API __attribute__((visibility("default")))
#else
#define FK_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* cudaStream_t is a pointer to it: this header needs none of CUDA's. */
struct CUstream_st;

#define FK_VERSION 1

/* What a function returns. */
enum fk_status {
  FK_OK = 0,
  FK_BAD_ARGUMENT = 1,  /* NULL, a description of another size, an unknown type */
  FK_BAD_SHAPE = 2,     /* a size is less than 1, or too large */
  FK_BAD_ALIGNMENT = 3, /* a pointer is not aligned as the function asks */
  FK_OVERLAP = 4,       /* what is written overlaps what is read, or the workspace something else */
  FK_BAD_WORKSPACE = 5, /* the workspace is too small */
  FK_BAD_DEVICE = 6,    /* the GPU cannot run the operator, or a pointer is not of this GPU */
  FK_CUDA_ERROR = 7     /* a call of CUDA's failed, or there was no host memory */
};

/* The type of an operand's elements. */
enum fk_type { FK_FLOAT16 = 1, FK_BFLOAT16 = 2 };

/* FK_VERSION of the library that is loaded. */
FK_API int fk_version(void);

/* A sentence about the last call of this thread that did not return FK_OK; "" before there is one.
 * It stays until another call of this thread fails. */
FK_API const char* fk_last_error(void);

/* The gated layer. */
typedef struct fk_gating {
  size_t size; /* sizeof(fk_gating) */
  int type;    /* FK_FLOAT16 */
  int64_t rows, inputs, hidden;
} fk_gating;

/* How many bytes of workspace fk_gating_forward() needs on the current device.
 * Written: bytes. Errors: as fk_gating_forward(), without those of operands. */
FK_API int fk_gating_workspace(const fk_gating* gating, size_t* bytes);

/* out = sigmoid(x w1 + b1) * (x w2 + b2), as lessons 5 and 6 have it.
 * Shapes: x (rows, inputs), w1 and w2 (inputs, hidden), b1 and b2 (hidden), out (rows, hidden); all
 * row-major and dense. Each size is at least 1; rows and inputs are at most 2^31 - 1024, hidden is
 * at most 2^21 - 1024. Type: fp16, added up in fp32. Alignment: each pointer to 16 bytes, rows to
 * nothing. Written: out, which must not overlap an operand. Device: compute capability 9.0. */
FK_API int fk_gating_forward(const fk_gating* gating, const void* x, const void* w1, const void* w2,
                             const void* b1, const void* b2, void* out, void* workspace,
                             size_t workspace_bytes, struct CUstream_st* stream);

#ifdef __cplusplus
}
#endif

#endif /* FUSED_KERNELS_H */
