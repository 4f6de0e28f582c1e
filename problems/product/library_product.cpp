#include "problems/product/library_product.h"

#include <functional>

#include "common/choose/fastest.h"

namespace problems {

// Row-major c = a b is column-major c^T = b^T a^T (lesson 4): b comes first, and columns of c are
// rows for cuBLASLt, whose bias goes along rows.
LibraryProduct::LibraryProduct(Problem& problem, const Shape& shape, cudaDataType_t type,
                               cublasComputeType_t compute, bool with_bias)
    : workspace_(problem.workspace<float>(kWorkspaceBytes / sizeof(float))), with_bias_(with_bias) {
  const auto [m, n, k] = shape;
  CUBLAS_CHECK(cublasLtCreate(&blas_));
  CUBLAS_CHECK(cublasLtMatmulDescCreate(&matmul_, compute, CUDA_R_32F));
  const cublasLtEpilogue_t epilogue =
      with_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(matmul_, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                              sizeof epilogue));
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&b_, type, n, k, n));
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&a_, type, k, m, k));
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&c_, type, n, m, n));
}

LibraryProduct::~LibraryProduct() {
  cublasLtMatrixLayoutDestroy(a_);
  cublasLtMatrixLayoutDestroy(b_);
  cublasLtMatrixLayoutDestroy(c_);
  cublasLtMatmulDescDestroy(matmul_);
  cublasLtDestroy(blas_);
}

void LibraryProduct::operator()(const void* a, const void* b, void* c, const void* bias) {
  if (with_bias_) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(matmul_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias,
                                                sizeof bias));
  }
  if (fastest_ < 0) {
    std::vector<std::function<void()>> calls;
    for (int i = 0; i < candidates(); ++i) calls.push_back([=, this] { call(i, a, b, c); });
    if (calls.empty()) fail(kDeviceCannot, "cuBLASLt has no algorithm for this shape");
    fastest_ = static_cast<int>(try_all(calls, true, 600).fastest);
  }
  call(fastest_, a, b, c);
}

void LibraryProduct::call(int candidate, const void* a, const void* b, void* c) const {
  const float one = 1, zero = 0;
  CUBLAS_CHECK(cublasLtMatmul(blas_, matmul_, &one, b, b_, a, a_, &zero, c, c_, c, c_,
                              &candidates_[candidate], workspace_.data(), kWorkspaceBytes,
                              cudaStreamPerThread));
}

int LibraryProduct::candidates() {
  if (!candidates_.empty()) return static_cast<int>(candidates_.size());
  constexpr int kMost = 64;
  cublasLtMatmulPreference_t preference;
  CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
  CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference,
                                                    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                    &kWorkspaceBytes, sizeof kWorkspaceBytes));
  std::vector<cublasLtMatmulHeuristicResult_t> results(kMost);
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      blas_, matmul_, b_, a_, c_, c_, preference, kMost, results.data(), &found);
  CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return 0;
  CUBLAS_CHECK(status);
  results.resize(found);
  for (const cublasLtMatmulHeuristicResult_t& result : results) {
    if (result.state == CUBLAS_STATUS_SUCCESS) candidates_.push_back(result.algo);
  }
  return static_cast<int>(candidates_.size());
}

}  // namespace problems
