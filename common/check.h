// Every CUDA, cuBLAS and cuBLASLt call in a lesson, in problems/ and in common/ goes through one of
// these macros (primitives/ and operators/ throw: primitives/check.h). A call that fails ends the
// program with one line that names the call, the file and the line; while a row of a table is
// launched, the row says so instead.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

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

/// While one exists, a call that fails throws a std::runtime_error, and the program goes on.
class CallsThrow {
 public:
  CallsThrow() { ++count(); }
  CallsThrow(const CallsThrow&) = delete;
  CallsThrow& operator=(const CallsThrow&) = delete;
  ~CallsThrow() { --count(); }
  static int& count() {
    static int existing = 0;
    return existing;
  }
};
[[noreturn]] inline void call_failed(const char* call, const char* file, int line,
                                     const std::string& why) {
  const std::string text =
      std::string(file) + ":" + std::to_string(line) + ": " + call + ": " + why;
  if (CallsThrow::count() > 0) throw std::runtime_error(text);
  fail(kDeviceCannot, "%s", text.c_str());
}

/// "out of memory (cudaErrorMemoryAllocation)"
inline std::string text_of(cudaError_t status) {
  return std::string(cudaGetErrorString(status)) + " (" + cudaGetErrorName(status) + ")";
}

inline void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status != cudaSuccess) call_failed(call, file, line, text_of(status));
}

inline void check_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status != CUBLAS_STATUS_SUCCESS) call_failed(call, file, line, cublasGetStatusName(status));
}

#define CUDA_CHECK(call) ::common::check_cuda((call), #call, __FILE__, __LINE__)
#define CUBLAS_CHECK(call) ::common::check_cublas((call), #call, __FILE__, __LINE__)

}  // namespace common
