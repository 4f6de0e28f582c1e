#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/library/matrix_product.h"
#include "cpu/runtime/capture.h"
#include "cpu/runtime/device_state.h"
#include "cublasLt.h"
#include "cublas_v2.h"

struct cublasContext {
  cudaStream_t stream = nullptr;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
};

struct cublasLtContext {};

struct cublasLtMatmulDescOpaque {
  cublasComputeType_t compute;
  cudaDataType scale_type;
  cublasLtPointerMode_t pointer_mode = CUBLASLT_POINTER_MODE_HOST;
  cublasOperation_t transa = CUBLAS_OP_N;
  cublasOperation_t transb = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  /// -1: as D.
  int bias_type = -1;
};

struct cublasLtMatrixLayoutOpaque {
  cudaDataType type;
  cublasLtOrder_t order = CUBLASLT_ORDER_COL;
  std::uint64_t rows;
  std::uint64_t cols;
  std::int64_t ld;
  std::int32_t batch_count = 1;
  std::int64_t batch_offset = 0;
};

struct cublasLtMatmulPreferenceOpaque {
  std::uint32_t search_mode = 0;
  std::uint64_t max_workspace = 0;
};

namespace {

using cuda_cpu::ConstMatrix;
using cuda_cpu::Matrix;
using cuda_cpu::Product;

std::size_t size_of(cudaDataType type) {
  return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2;
}

template <class Pointer>
Pointer advance(Pointer data, cudaDataType type, long long elements) {
  using Byte = std::conditional_t<std::is_same_v<Pointer, void*>, char, const char>;
  return static_cast<Byte*>(data) + elements * static_cast<long long>(size_of(type));
}

bool in_double(cublasComputeType_t compute) {
  return compute == CUBLAS_COMPUTE_64F || compute == CUBLAS_COMPUTE_64F_PEDANTIC;
}

/// The type of alpha and beta.
cudaDataType scale_type(cublasComputeType_t compute) {
  if (in_double(compute)) return CUDA_R_64F;
  const bool half = compute == CUBLAS_COMPUTE_16F || compute == CUBLAS_COMPUTE_16F_PEDANTIC;
  return half ? CUDA_R_16F : CUDA_R_32F;
}

/// Whether cuBLAS multiplies matrices of type `ab` into one of type `c` with this compute type.
bool supported(cublasComputeType_t compute, cudaDataType a, cudaDataType b, cudaDataType c) {
  const cudaDataType scale = scale_type(compute);
  if (a != b) return false;
  if (scale != CUDA_R_32F) return a == scale && c == scale;
  return a == CUDA_R_32F ? c == CUDA_R_32F
                         : (a == CUDA_R_16F || a == CUDA_R_16BF) && (c == a || c == CUDA_R_32F);
}

/// op(X) of a matrix stored by columns.
ConstMatrix by_columns(const void* data, cudaDataType type, long ld, cublasOperation_t op) {
  if (op == CUBLAS_OP_N) return {data, type, 1, ld};
  return {data, type, ld, 1};
}

double gelu(double x) {
  return 0.5 * x * (1.0 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

bool is_operation(cublasOperation_t op) {
  return op == CUBLAS_OP_N || op == CUBLAS_OP_T || op == CUBLAS_OP_C;
}

/// Copies an attribute's value if `size` is that of the attribute.
template <class T>
cublasStatus_t set(T& attribute, const void* value, std::size_t size) {
  if (!value || size != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&attribute, value, sizeof(T));
  return CUBLAS_STATUS_SUCCESS;
}

/// One operand of a cublasLtMatmul().
struct Operand {
  const cublasLtMatrixLayoutOpaque& layout;
  cublasOperation_t op;

  long rows() const { return static_cast<long>(op == CUBLAS_OP_N ? layout.rows : layout.cols); }
  long cols() const { return static_cast<long>(op == CUBLAS_OP_N ? layout.cols : layout.rows); }

  bool valid() const {
    const auto extent = layout.order == CUBLASLT_ORDER_COL ? layout.rows : layout.cols;
    return is_operation(op) && layout.ld >= static_cast<std::int64_t>(extent);
  }

  template <class Pointer>
  cuda_cpu::MatrixView<Pointer> view(Pointer data, int batch) const {
    const bool steps_along_rows = (layout.order == CUBLASLT_ORDER_COL) == (op == CUBLAS_OP_N);
    const long row_stride = steps_along_rows ? 1 : layout.ld;
    const long column_stride = steps_along_rows ? layout.ld : 1;
    return {advance(data, layout.type, batch * layout.batch_offset), layout.type, row_stride,
            column_stride};
  }
};

cublasStatus_t check(const cublasLtMatmulDescOpaque& desc, const Operand& a, const Operand& b,
                     const Operand& c, const Operand& d) {
  if (!a.valid() || !b.valid() || !c.valid() || !d.valid()) return CUBLAS_STATUS_INVALID_VALUE;
  if (a.rows() != d.rows() || b.cols() != d.cols() || a.cols() != b.rows() ||
      c.rows() != d.rows() || c.cols() != d.cols()) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  for (const Operand* operand : {&a, &b, &c}) {
    if (operand->layout.batch_count != d.layout.batch_count) return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (desc.scale_type != scale_type(desc.compute) || c.layout.type != d.layout.type ||
      !supported(desc.compute, a.layout.type, b.layout.type, d.layout.type)) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  switch (desc.epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
    case CUBLASLT_EPILOGUE_RELU:
    case CUBLASLT_EPILOGUE_GELU:
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_RELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU_BIAS:
      return CUBLAS_STATUS_SUCCESS;
  }
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

/// Computes the product, now or when the graph runs that the stream is captured for.
cublasStatus_t multiply(cudaStream_t stream, const Product& product) {
  const auto multiply = [product](cudaStream_t) {
    if (!cuda_cpu::device().broken) cuda_cpu::multiply(product);
    return cuda_cpu::result(cudaSuccess);
  };
  return cuda_cpu::in_order(stream, cudaGraphNodeTypeKernel, multiply) == cudaSuccess
             ? CUBLAS_STATUS_SUCCESS
             : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // namespace

#define CUDA_CPU_STATUS(status) \
  case status:                  \
    return #status;
const char* cublasGetStatusName(cublasStatus_t status) {
  switch (status) {
    CUDA_CPU_STATUS(CUBLAS_STATUS_SUCCESS)
    CUDA_CPU_STATUS(CUBLAS_STATUS_NOT_INITIALIZED)
    CUDA_CPU_STATUS(CUBLAS_STATUS_ALLOC_FAILED)
    CUDA_CPU_STATUS(CUBLAS_STATUS_INVALID_VALUE)
    CUDA_CPU_STATUS(CUBLAS_STATUS_ARCH_MISMATCH)
    CUDA_CPU_STATUS(CUBLAS_STATUS_MAPPING_ERROR)
    CUDA_CPU_STATUS(CUBLAS_STATUS_EXECUTION_FAILED)
    CUDA_CPU_STATUS(CUBLAS_STATUS_INTERNAL_ERROR)
    CUDA_CPU_STATUS(CUBLAS_STATUS_NOT_SUPPORTED)
    CUDA_CPU_STATUS(CUBLAS_STATUS_LICENSE_ERROR)
  }
  return "unknown cuBLAS status";
}
#undef CUDA_CPU_STATUS

const char* cublasGetStatusString(cublasStatus_t status) { return cublasGetStatusName(status); }

cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetVersion(cublasHandle_t, int* version) {
  *version = 130000;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t* stream) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  *stream = handle->stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  handle->math = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  *mode = handle->math;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode(cublasHandle_t handle, cublasPointerMode_t) {
  return handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void*, std::size_t) {
  return handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}

cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
    const void* alpha, const void* A, cudaDataType Atype, int lda, long long strideA, const void* B,
    cudaDataType Btype, int ldb, long long strideB, const void* beta, void* C, cudaDataType Ctype,
    int ldc, long long strideC, int batch, cublasComputeType_t compute, cublasGemmAlgo_t) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (!is_operation(transa) || !is_operation(transb) || m < 0 || n < 0 || k < 0 || batch < 0 ||
      lda < std::max(1, transa == CUBLAS_OP_N ? m : k) ||
      ldb < std::max(1, transb == CUBLAS_OP_N ? k : n) || ldc < std::max(1, m) || !alpha || !beta) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (!supported(compute, Atype, Btype, Ctype)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (cuda_cpu::device().broken) return CUBLAS_STATUS_EXECUTION_FAILED;
  for (int i = 0; i < batch && m > 0 && n > 0; ++i) {
    void* const c = advance(C, Ctype, i * strideC);
    const cublasStatus_t status = multiply(
        handle->stream, {.m = m,
                         .n = n,
                         .k = k,
                         .alpha = cuda_cpu::load_element(alpha, scale_type(compute), 0),
                         .a = by_columns(advance(A, Atype, i * strideA), Atype, lda, transa),
                         .b = by_columns(advance(B, Btype, i * strideB), Btype, ldb, transb),
                         .beta = cuda_cpu::load_element(beta, scale_type(compute), 0),
                         .c = {c, Ctype, 1, ldc},
                         .d = {c, Ctype, 1, ldc},
                         .in_double = in_double(compute),
                         .epilogue = nullptr});
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa,
                            cublasOperation_t transb, int m, int n, int k, const void* alpha,
                            const void* A, cudaDataType Atype, int lda, const void* B,
                            cudaDataType Btype, int ldb, const void* beta, void* C,
                            cudaDataType Ctype, int ldc, cublasComputeType_t compute,
                            cublasGemmAlgo_t algo) {
  return cublasGemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, 0, B,
                                    Btype, ldb, 0, beta, C, Ctype, ldc, 0, 1, compute, algo);
}

cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t transa,
                                         cublasOperation_t transb, int m, int n, int k,
                                         const float* alpha, const float* A, int lda,
                                         long long strideA, const float* B, int ldb,
                                         long long strideB, const float* beta, float* C, int ldc,
                                         long long strideC, int batch) {
  return cublasGemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, A, CUDA_R_32F, lda,
                                    strideA, B, CUDA_R_32F, ldb, strideB, beta, C, CUDA_R_32F, ldc,
                                    strideC, batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t transa,
                           cublasOperation_t transb, int m, int n, int k, const float* alpha,
                           const float* A, int lda, const float* B, int ldb, const float* beta,
                           float* C, int ldc) {
  return cublasGemmEx(handle, transa, transb, m, n, k, alpha, A, CUDA_R_32F, lda, B, CUDA_R_32F,
                      ldb, beta, C, CUDA_R_32F, ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

cublasStatus_t cublasDgemm(cublasHandle_t handle, cublasOperation_t transa,
                           cublasOperation_t transb, int m, int n, int k, const double* alpha,
                           const double* A, int lda, const double* B, int ldb, const double* beta,
                           double* C, int ldc) {
  return cublasGemmEx(handle, transa, transb, m, n, k, alpha, A, CUDA_R_64F, lda, B, CUDA_R_64F,
                      ldb, beta, C, CUDA_R_64F, ldc, CUBLAS_COMPUTE_64F, CUBLAS_GEMM_DEFAULT);
}

cublasStatus_t cublasHgemm(cublasHandle_t handle, cublasOperation_t transa,
                           cublasOperation_t transb, int m, int n, int k, const __half* alpha,
                           const __half* A, int lda, const __half* B, int ldb, const __half* beta,
                           __half* C, int ldc) {
  return cublasGemmEx(handle, transa, transb, m, n, k, alpha, A, CUDA_R_16F, lda, B, CUDA_R_16F,
                      ldb, beta, C, CUDA_R_16F, ldc, CUBLAS_COMPUTE_16F, CUBLAS_GEMM_DEFAULT);
}

// ---- cuBLASLt ----------------------------------------------------------------------------------

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new cublasLtContext;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType_t scale_type) {
  *desc = new cublasLtMatmulDescOpaque{.compute = compute, .scale_type = scale_type};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete desc;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, std::size_t size) {
  if (!desc) return CUBLAS_STATUS_INVALID_VALUE;
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE:
      return set(desc->compute, value, size);
    case CUBLASLT_MATMUL_DESC_SCALE_TYPE:
      return set(desc->scale_type, value, size);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
      return set(desc->pointer_mode, value, size);
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return set(desc->transa, value, size);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return set(desc->transb, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return set(desc->epilogue, value, size);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return set(desc->bias, value, size);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return set(desc->bias_type, value, size);
  }
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          std::uint64_t rows, std::uint64_t cols, std::int64_t ld) {
  *layout = new cublasLtMatrixLayoutOpaque{.type = type, .rows = rows, .cols = cols, .ld = ld};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, std::size_t size) {
  if (!layout) return CUBLAS_STATUS_INVALID_VALUE;
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE:
      return set(layout->type, value, size);
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
      return set(layout->order, value, size);
    case CUBLASLT_MATRIX_LAYOUT_ROWS:
      return set(layout->rows, value, size);
    case CUBLASLT_MATRIX_LAYOUT_COLS:
      return set(layout->cols, value, size);
    case CUBLASLT_MATRIX_LAYOUT_LD:
      return set(layout->ld, value, size);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
      return set(layout->batch_count, value, size);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
      return set(layout->batch_offset, value, size);
  }
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, std::size_t size) {
  if (!preference) return CUBLAS_STATUS_INVALID_VALUE;
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_SEARCH_MODE:
      return set(preference->search_mode, value, size);
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return set(preference->max_workspace, value, size);
  }
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t Adesc,
    cublasLtMatrixLayout_t Bdesc, cublasLtMatrixLayout_t Cdesc, cublasLtMatrixLayout_t Ddesc,
    cublasLtMatmulPreference_t preference, int requested, cublasLtMatmulHeuristicResult_t results[],
    int* found) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (!desc || !Adesc || !Bdesc || !Cdesc || !Ddesc || !preference || requested < 1 || !results ||
      !found) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  *found = 0;
  const cublasStatus_t status = check(*desc, {*Adesc, desc->transa}, {*Bdesc, desc->transb},
                                      {*Cdesc, CUBLAS_OP_N}, {*Ddesc, CUBLAS_OP_N});
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  *found = 1;
  results[0] = {};
  results[0].state = CUBLAS_STATUS_SUCCESS;
  results[0].wavesCount = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* A, cublasLtMatrixLayout_t Adesc, const void* B,
                              cublasLtMatrixLayout_t Bdesc, const void* beta, const void* C,
                              cublasLtMatrixLayout_t Cdesc, void* D, cublasLtMatrixLayout_t Ddesc,
                              const cublasLtMatmulAlgo_t*, void*, std::size_t,
                              cudaStream_t stream) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (!desc || !alpha || !beta || !Adesc || !Bdesc || !Cdesc || !Ddesc) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const Operand a = {*Adesc, desc->transa};
  const Operand b = {*Bdesc, desc->transb};
  const Operand c = {*Cdesc, CUBLAS_OP_N};
  const Operand d = {*Ddesc, CUBLAS_OP_N};
  const cublasStatus_t status = check(*desc, a, b, c, d);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const bool with_bias = desc->epilogue & CUBLASLT_EPILOGUE_BIAS;
  if (with_bias && !desc->bias) return CUBLAS_STATUS_INVALID_VALUE;
  if (cuda_cpu::device().broken) return CUBLAS_STATUS_EXECUTION_FAILED;

  const auto bias_type =
      desc->bias_type < 0 ? Ddesc->type : static_cast<cudaDataType>(desc->bias_type);
  const auto epilogue = [=, kind = desc->epilogue, bias = desc->bias](double value, long row) {
    if (with_bias) value += cuda_cpu::load_element(bias, bias_type, row);
    if (kind & CUBLASLT_EPILOGUE_RELU) value = std::max(value, 0.0);
    if (kind & CUBLASLT_EPILOGUE_GELU) value = gelu(value);
    return value;
  };
  for (int i = 0; i < Ddesc->batch_count && d.rows() > 0 && d.cols() > 0; ++i) {
    Product product = {.m = d.rows(),
                       .n = d.cols(),
                       .k = a.cols(),
                       .alpha = cuda_cpu::load_element(alpha, desc->scale_type, 0),
                       .a = a.view(A, i),
                       .b = b.view(B, i),
                       .beta = cuda_cpu::load_element(beta, desc->scale_type, 0),
                       .c = c.view(C, i),
                       .d = d.view(D, i),
                       .in_double = in_double(desc->compute),
                       .epilogue = nullptr};
    if (desc->epilogue != CUBLASLT_EPILOGUE_DEFAULT) product.epilogue = epilogue;
    // The same biases for the whole batch.
    if (with_bias && i == 0) {
      product.epilogue_bytes = product.m * static_cast<std::int64_t>(size_of(bias_type));
    }
    const cublasStatus_t status = multiply(stream, product);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  return CUBLAS_STATUS_SUCCESS;
}
