// Every CUDA, cuBLAS and cuBLASLt call of a lesson goes through one of these macros: a call that
// does not succeed ends the program with one line that names the call, the file and the line.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace common {

/// How a lesson ends; docs/measuring.md documents the same numbers.
enum ExitCode : int {
  kAllVerified = 0,
  kVerificationFailed = 1,
  kBadUsage = 2,      ///< the command line, or a --json target that cannot be written
  kDeviceCannot = 3,  ///< no such device, too little memory, or a failed CUDA call
};

/// Prints `error: ` and the printf-style message as one line on stderr, and exits with `code`.
[[noreturn, gnu::format(printf, 2, 3)]] inline void fail(ExitCode code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("error: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  fflush(nullptr);
  std::_Exit(code);
}

inline void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status != cudaSuccess) {
    fail(kDeviceCannot, "%s:%d: %s: %s (%s)", file, line, call, cudaGetErrorString(status),
         cudaGetErrorName(status));
  }
}

inline void check_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    fail(kDeviceCannot, "%s:%d: %s: %s", file, line, call, cublasGetStatusName(status));
  }
}

#define CUDA_CHECK(call) ::common::check_cuda((call), #call, __FILE__, __LINE__)
#define CUBLAS_CHECK(call) ::common::check_cublas((call), #call, __FILE__, __LINE__)

}  // namespace common
