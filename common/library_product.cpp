#include "common/library_product.h"

#include <algorithm>
#include <vector>

#include "common/event.h"
#include "common/numerics.h"

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
  if (!chosen_) choose(a, b, c);
  call(fastest_, a, b, c);
}

void LibraryProduct::call(const cublasLtMatmulAlgo_t& algorithm, const void* a, const void* b,
                          void* c) {
  const float one = 1, zero = 0;
  CUBLAS_CHECK(cublasLtMatmul(blas_, matmul_, &one, b, b_, a, a_, &zero, c, c_, c, c_, &algorithm,
                              workspace_.data(), kWorkspaceBytes, cudaStreamPerThread));
}

void LibraryProduct::choose(const void* a, const void* b, void* c) {
  constexpr int kMost = 64;
  cublasLtMatmulPreference_t preference;
  CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
  CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference,
                                                    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                    &kWorkspaceBytes, sizeof kWorkspaceBytes));
  std::vector<cublasLtMatmulHeuristicResult_t> results(kMost);
  int found = 0;
  CUBLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(blas_, matmul_, b_, a_, c_, c_, preference, kMost,
                                              results.data(), &found));
  CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));

  struct Candidate {
    cublasLtMatmulAlgo_t algorithm;
    std::vector<float> ms = {};
    float median() {
      std::sort(ms.begin(), ms.end());
      return ms[ms.size() / 2];
    }
  };
  std::vector<Candidate> candidates;
  for (int i = 0; i < found; ++i) {
    if (results[i].state == CUBLAS_STATUS_SUCCESS) candidates.push_back({results[i].algo});
  }
  if (candidates.empty()) fail(kDeviceCannot, "cuBLASLt has no algorithm for this shape");

  // As the lessons sample their kernels: in turn, each after a call of its own and with a cold L2
  // cache. Who is much slower than the fastest is not asked again.
  const size_t flush_bytes = 2 * static_cast<size_t>(Device::current().l2_bytes) + 1;
  Scratch<char> flushed(flush_bytes);
  Event start, stop;
  constexpr float kHopeless = 1.25, kBudgetMs = 600;
  int rounds = 1;
  for (int round = 0; candidates.size() > 1 && round < rounds; ++round) {
    float round_ms = 0;
    for (Candidate& candidate : candidates) {
      call(candidate.algorithm, a, b, c);
      CUDA_CHECK(cudaMemsetAsync(flushed, round, flush_bytes));
      start.record();
      call(candidate.algorithm, a, b, c);
      stop.record();
      candidate.ms.push_back(stop.since(start));
      round_ms += 2 * candidate.ms.back();
    }
    if (round == 0) {
      rounds = 1 + static_cast<int>(std::clamp(kBudgetMs / round_ms, 4.0f, 30.0f));
      float least = candidates[0].ms[0];
      for (const Candidate& candidate : candidates) least = std::min(least, candidate.ms[0]);
      std::erase_if(candidates, [=](const Candidate& candidate) {
        return candidate.ms[0] > kHopeless * least;
      });
    }
  }
  if (candidates.size() > 1) {
    std::sort(candidates.begin(), candidates.end(),
              [](Candidate& x, Candidate& y) { return x.median() < y.median(); });
  }
  fastest_ = candidates.front().algorithm;
  chosen_ = true;
}
