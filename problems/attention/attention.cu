#include <numeric>
#include <vector>

#include "primitives/launch.h"
#include "problems/attention/attention.h"
#include "problems/warps.cuh"

namespace problems {

namespace {

/// How many logits in fp64 are in memory at once: 1 GB.
constexpr double kMostLogits = 0x1p27;

double as_double(int64_t count) { return static_cast<double>(count); }

/// A warp owns a row of `keys` logits, that of query first + row, and makes it its softmax. Of a
/// causal query only the first logits count; the last query sees them all.
__global__ void masked_softmax_fp64(double* logits, double* lse, int64_t rows, int64_t keys,
                                    int64_t first, int64_t queries, bool causal) {
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  double* own = logits + row * keys;
  const int64_t last = first + row + keys - queries;  // that a causal query sees
  const int64_t seen = causal ? max(int64_t{0}, min(keys, last + 1)) : keys;
  double largest = -INFINITY, sum = 0;
  for (int64_t t = lane; t < seen; t += 32) largest = fmax(largest, own[t]);
  largest = warp_max(largest);
  const bool any = largest > -INFINITY;
  for (int64_t t = lane; any && t < seen; t += 32) sum += exp(own[t] - largest);
  sum = warp_sum(sum);
  __syncwarp();
  for (int64_t t = lane; t < keys; t += 32) {
    own[t] = any && t < seen ? exp(own[t] - largest) / sum : 0;
  }
  if (lane == 0) lse[row] = any ? largest + log(sum) : -INFINITY;
}

/// squares (rows, width) = sum over t of (p(row, t) V(t, column))^2. One thread an element.
__global__ void squares_of_terms(const double* p, const double* V, int64_t v_stride, int64_t keys,
                                 int width, int count, double* squares) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  const int64_t row = i / width, column = i % width;
  double sum = 0;
  for (int64_t t = 0; t < keys; ++t) {
    const double term = p[row * keys + t] * V[t * v_stride + column];
    sum += term * term;
  }
  squares[i] = sum;
}

__device__ void put(half& to, float value) { to = __float2half_rn(value); }
__device__ void put(__nv_bfloat16& to, float value) { to = __float2bfloat16_rn(value); }

/// One thread a query and head.
template <typename T>
__global__ void make_queries_hard(T* Q, size_t rows, int64_t queries, int64_t heads, int width,
                                  bool infinities) {
  const size_t row = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  T* own = Q + row * width;
  const auto s = static_cast<int64_t>(row / heads % queries), h = static_cast<int64_t>(row % heads);
  const auto kind = (s + h) % 4;
  const bool only_infinite = infinities && (s + h) % 8 == 7 && s / 16 % 2 == 0;
  const bool grows = kind == 3 && s / 16 % 2 == 1 && s / 8 % 2 == s / 32 % 2;
  put(own[0], kind == 0 ? 256 : 0);
  put(own[1], kind == 1 ? 64 : 0);
  put(own[2], 1);
  put(own[3], kind == 1 ? 8 : 0);
  put(own[4], only_infinite ? -INFINITY : 0);
  put(own[5], grows ? 1 : 0);
  for (int i = kSpecialWidth; kind < 3 && i < width; ++i) put(own[i], 0);
}

/// One thread a key and head.
template <typename T>
__global__ void make_keys_hard(T* K, size_t rows, int64_t keys, int64_t kv_heads, int width,
                               float least) {
  const size_t row = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  T* own = K + row * width;
  const auto t = static_cast<int64_t>(row / kv_heads % keys);
  const bool last = t == keys - 1;
  put(own[0], last ? 1024 : t % 2 == 0 ? 512 : -512);
  put(own[1], 128);
  put(own[2], t % 3 == 1 && !last ? least : 0);
  put(own[3], static_cast<float>(t % 8));
  put(own[4], 1);
  put(own[5], t == 0 ? 1024 : 0);
}

__global__ void mark_infinite_kernel(const float* in, float* out, size_t count) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = in[i] == -INFINITY ? -1 : in[i];
}

__global__ void mark_infinite_fp64_kernel(double* values, size_t count) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count && values[i] == -INFINITY) values[i] = -1;
}

template <typename T>
constexpr double roundoff_of = kRoundoffFp16;
template <>
constexpr double roundoff_of<__nv_bfloat16> = kRoundoffBf16;

}  // namespace

Problem& declare_attention(Lesson& lesson, const std::string& name, const AttentionShape& shape,
                           Type type, const Work& work) {
  const auto& [batch, queries, keys, heads, kv_heads, width, causal] = shape;
  if (heads % kv_heads != 0) {
    fail(kBadUsage, "%lld heads of K and V do not divide %lld heads",
         static_cast<long long>(kv_heads), static_cast<long long>(heads));
  }
  if (std::max(queries, keys) > INT32_MAX / 2 ||
      as_double(std::max(queries, keys)) * as_double(heads * width) > 0x1p40) {
    fail(kBadUsage, "%lld queries and %lld keys of %lld heads are too many",
         static_cast<long long>(queries), static_cast<long long>(keys),
         static_cast<long long>(heads));
  }
  return lesson.problem(name,
                        {{"batch", batch},
                         {"heads", heads},
                         {"kv_heads", kv_heads},
                         {"S", queries},
                         {"T", keys},
                         {"d", width}},
                        type == Type::bf16 ? "bf16" : "fp16", work, Rate::fp16);
}

int64_t rows_at_once(const AttentionShape& shape) {
  const auto most = static_cast<int64_t>(kMostLogits) / std::max<int64_t>(shape.keys, 1);
  return std::clamp<int64_t>(most, 1, std::min(shape.queries, kReferenceRows));
}

// All matrices are row-major, and for cuBLAS, which is column-major, each is its transpose.
void attend_fp64(cublasHandle_t blas, const HeadFp64& in, double* logits, double* out, double* lse,
                 const AttentionShape& shape, int64_t first, int64_t rows) {
  const double scale = 1 / std::sqrt(as_double(shape.width)), one = 1, zero = 0;
  const int q_stride = static_cast<int>(shape.heads * shape.width),
            k_stride = static_cast<int>(shape.kv_heads * shape.width),
            keys = static_cast<int>(shape.keys), width = static_cast<int>(shape.width),
            queries = static_cast<int>(rows);
  CUBLAS_CHECK(cublasDgemm(blas, CUBLAS_OP_T, CUBLAS_OP_N, keys, queries, width, &scale, in.K,
                           k_stride, in.Q, q_stride, &zero, logits, keys));
  masked_softmax_fp64<<<primitives::blocks_for(rows, 8), 256>>>(logits, lse, rows, shape.keys,
                                                                first, shape.queries, shape.causal);
  CUDA_CHECK(cudaGetLastError());
  CUBLAS_CHECK(cublasDgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, width, queries, keys, &one, in.V,
                           k_stride, logits, keys, &zero, out, q_stride));
}

AttentionShape attention_shape(const Lesson& lesson) {
  AttentionShape shape;
  shape.queries = lesson.n();
  shape.width = lesson.option("--width");
  if (shape.width < 1 || shape.width > 256) fail(kBadUsage, "--width is from 1 to 256");
  const auto or_else = [&](const char* option, int64_t value) {
    return lesson.option(option) > 0 ? lesson.option(option) : std::max<int64_t>(1, value);
  };
  shape.keys = or_else("--keys", shape.queries);
  shape.heads = or_else("--heads", lesson.on_cpu() ? 2 : 2048 / shape.width);
  shape.kv_heads = or_else("--kv-heads", shape.heads);
  shape.batch = or_else("--batch", lesson.on_cpu() ? 1 : 16384 / shape.queries);
  if (shape.heads % shape.kv_heads != 0) {
    fail(kBadUsage, "--kv-heads has to be a divisor of --heads");
  }
  if (lesson.flag("--hard-rows") && shape.width < kSpecialWidth) {
    fail(kBadUsage, "--hard-rows needs a width of at least %d", static_cast<int>(kSpecialWidth));
  }
  return shape;
}

double attention_tolerance(const AttentionShape& shape, double u) {
  const double logits =
      kLogitStandard * dot_tolerance(shape.width, tensor_core_sum(shape.width), 0);
  const double product =
      dot_tolerance(shape.keys, tensor_core_sum(shape.keys), u, u / std::sqrt(2.0));
  const double units = std::sqrt((16 * 16 + 4 * 4 + 12) / 3.0);
  return std::sqrt(2.0) * logits + product + 4 * units * kRoundoffFp32;
}

double log_sum_exp_tolerance(const AttentionShape& shape) {
  const double logits =
      kLogitStandard * dot_tolerance(shape.width, tensor_core_sum(shape.width), 0);
  const double units = std::sqrt((4 * 16 * 16 + 4 * 4 + as_double(shape.keys) / 3) / 3);
  return logits + 4 * units * kRoundoffFp32;
}

void mark_infinite(const float* in, float* out, size_t count) {
  mark_infinite_kernel<<<primitives::blocks_for(static_cast<int64_t>(count), 256), 256>>>(in, out,
                                                                                          count);
  CUDA_CHECK(cudaGetLastError());
}

void mark_infinite(double* values, size_t count) {
  mark_infinite_fp64_kernel<<<primitives::blocks_for(static_cast<int64_t>(count), 256), 256>>>(
      values, count);
  CUDA_CHECK(cudaGetLastError());
}

double attention_scratch(const AttentionShape& shape) {
  const double rows = as_double(rows_at_once(shape));
  return sizeof(double) *
         (2 * as_double(shape.keys) * as_double(shape.kv_heads * shape.width) +
          rows * as_double(shape.heads * shape.width) + rows * as_double(shape.keys) + 256);
}

template <typename T>
void reference_attention(cublasHandle_t blas, const T* Q, const T* K, const T* V, double* out,
                         double* lse, double* uncancelled, const AttentionShape& shape) {
  const int64_t chunk = rows_at_once(shape), d = shape.width, q_row = shape.heads * d;
  const int64_t kv_elements = shape.keys * shape.kv_heads * d;
  const bool is_few = few(static_cast<double>(shape.query_elements()));
  Scratch<double> Q64(chunk * q_row), K64(kv_elements), V64(kv_elements);
  Scratch<double> logits(chunk * shape.keys), squares(256);
  double sum_of_squares = 0;
  for (int64_t b = 0; b < shape.batch; ++b) {
    to_fp64(K + b * kv_elements, type_of<T>, kv_elements, K64);
    to_fp64(V + b * kv_elements, type_of<T>, kv_elements, V64);
    for (int64_t first = 0; first < shape.queries; first += chunk) {
      const int64_t rows = std::min(chunk, shape.queries - first);
      const int64_t from = (b * shape.queries + first) * q_row;
      to_fp64(Q + from, type_of<T>, rows * q_row, Q64);
      for (int64_t h = 0; h < shape.heads; ++h) {
        const int64_t shared = h / shape.group() * d;
        attend_fp64(blas, {Q64 + h * d, K64 + shared, V64 + shared}, logits, out + from + h * d,
                    lse + (b * shape.heads + h) * shape.queries + first, shape, first, rows);
        if (!is_few) continue;
        const int count = static_cast<int>(rows * d);
        squares_of_terms<<<1, count>>>(logits, V64 + shared, shape.kv_heads * d, shape.keys,
                                       static_cast<int>(d), count, squares);
        CUDA_CHECK(cudaGetLastError());
        std::vector<double> host(count);
        CUDA_CHECK(
            cudaMemcpy(host.data(), squares, count * sizeof(double), cudaMemcpyDeviceToHost));
        sum_of_squares += std::accumulate(host.begin(), host.end(), 0.0);
      }
    }
  }
  *uncancelled = std::sqrt(sum_of_squares / static_cast<double>(shape.query_elements()));
}

template <typename T>
void make_hard(T* Q, T* K, const AttentionShape& shape, bool infinities) {
  const int width = static_cast<int>(shape.width);
  const size_t keys = shape.key_elements() / width;
  make_queries_hard<T><<<primitives::blocks_for(static_cast<int64_t>(shape.rows()), 256), 256>>>(
      Q, shape.rows(), shape.queries, shape.heads, width, infinities);
  make_keys_hard<T><<<primitives::blocks_for(static_cast<int64_t>(keys), 256), 256>>>(
      K, keys, shape.keys, shape.kv_heads, width, infinities ? -INFINITY : kLeastFactor);
  CUDA_CHECK(cudaGetLastError());
}

template <typename T>
AttentionProblem<T>::AttentionProblem(Lesson& lesson, cublasHandle_t blas, const std::string& name,
                                      const AttentionShape& shape, bool hard)
    : shape(shape),
      problem(declare_attention(lesson, name, shape, type_of<T>,
                                {.flops = shape.flops(), .bytes = shape.bytes()})),
      Q(problem.input<T>(shape.query_elements(), kQueryRange)),
      K(problem.input<T>(shape.key_elements(), kQueryRange)),
      V(problem.input<T>(shape.key_elements())),
      out(problem.output<T>(shape.query_elements())),
      lse(problem.output<float>(shape.rows())),
      compared(hard || shape.seen(0) == 0 ? problem.output<float>(shape.rows()) : lse) {
  if (hard && shape.width < kSpecialWidth) {
    fail(kBadUsage, "hard rows need a width of at least %d", static_cast<int>(kSpecialWidth));
  }
  const auto expected = problem.reference(out.size()), expected_lse = problem.reference(lse.size());
  const auto uncancelled = std::make_shared<double>(0), one = std::make_shared<double>(1);
  if (hard) problem.adjust_inputs([shape, Q = Q, K = K] { make_hard<T>(Q, K, shape); });
  problem.reference_from(attention_scratch(shape), [=, Q = Q, K = K, V = V] {
    reference_attention<T>(blas, Q, K, V, expected, expected_lse, uncancelled.get(), shape);
    mark_infinite(expected_lse, expected_lse.size());
  });
  problem.check(out, expected, attention_tolerance(shape, roundoff_of<T>), uncancelled);
  problem.check(compared, expected_lse, log_sum_exp_tolerance(shape), one);
}

template struct AttentionProblem<half>;
template struct AttentionProblem<__nv_bfloat16>;
template void reference_attention(cublasHandle_t, const half*, const half*, const half*, double*,
                                  double*, double*, const AttentionShape&);
template void reference_attention(cublasHandle_t, const __nv_bfloat16*, const __nv_bfloat16*,
                                  const __nv_bfloat16*, double*, double*, double*,
                                  const AttentionShape&);
template void reference_attention(cublasHandle_t, const double*, const double*, const double*,
                                  double*, double*, double*, const AttentionShape&);
template void make_hard(half*, half*, const AttentionShape&, bool);
template void make_hard(__nv_bfloat16*, __nv_bfloat16*, const AttentionShape&, bool);

}  // namespace problems
