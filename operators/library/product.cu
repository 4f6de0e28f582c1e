// The products of operators/product, as the library exports them.

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "operators/library/call.h"
#include "operators/library/products.h"
#include "operators/product/fp32/fp32.cuh"
#include "operators/product/half_product.cuh"
#include "operators/product/layouts/batch.cuh"
#include "operators/product/layouts/hopper.cuh"
#include "operators/product/layouts/layouts.cuh"
#include "operators/product/tf32_product.cuh"

namespace {

using namespace operators::library;
using namespace operators::product;

constexpr int64_t kMostProducts = 1 << 20;  ///< of a batch
constexpr int64_t kMostFp32Depth = 1 << 24;
constexpr int kAsExactDepth = 1024;  ///< beyond it true fp32 errs more than FK_TF32X3 does

/// What a type is in memory, and how it is multiplied.
bool is_fp32(const fk_product& product) { return product.type == FK_FLOAT32; }
bool is_half(const fk_product& product) {
  return product.type == FK_FLOAT16 || product.type == FK_BFLOAT16;
}
size_t element_bytes(const fk_product& product) { return is_half(product) ? 2 : 4; }

int64_t batch_of(const fk_product& product) { return product.batch == 0 ? 1 : product.batch; }

/// One of the three kinds of matrices, (rows, cols) as they lie in memory.
struct Lying {
  const char *name, *stride_name, *batch_stride_name;
  int64_t rows, cols, stride, batch_stride;

  /// How many elements there are from the first one to the last one of all `batch`.
  int64_t extent_of(int64_t batch) const {
    return (batch - 1) * batch_stride + extent(rows, cols, or_dense(stride, cols));
  }
};
Lying a_of(const fk_product& product) {
  const bool t = product.transpose_a == 1;
  return {"a",
          "a_stride",
          "a_batch_stride",
          t ? product.depth : product.rows,
          t ? product.rows : product.depth,
          product.a_stride,
          batch_of(product) > 1 ? product.a_batch_stride : 0};
}
Lying b_of(const fk_product& product) {
  const bool t = product.transpose_b == 1;
  return {"b",
          "b_stride",
          "b_batch_stride",
          t ? product.cols : product.depth,
          t ? product.depth : product.cols,
          product.b_stride,
          batch_of(product) > 1 ? product.b_batch_stride : 0};
}
Lying c_of(const fk_product& product) {
  return {"c",
          "c_stride",
          "c_batch_stride",
          product.rows,
          product.cols,
          product.c_stride,
          batch_of(product) > 1 ? product.c_batch_stride : 0};
}

[[noreturn]] void refuse(fk_status code, const char* field, int64_t value, const char* words) {
  throw Refusal{code, std::string(field) + " is " + std::to_string(value) + "; " + words};
}

void check_matrix(const fk_product& product, const Lying& of) {
  check_stride(of.stride_name, of.stride, of.cols, element_bytes(product));
  const int64_t stride = or_dense(of.stride, of.cols), between = of.batch_stride;
  if (between < 0 || between > int64_t{1} << 40) {
    refuse(FK_BAD_SHAPE, of.batch_stride_name, between, "it has to be from 0 to 2^40");
  }
  const auto unit = static_cast<int64_t>(16 / element_bytes(product));
  if (between % unit != 0 && (stride != of.cols || between % of.cols != 0)) {
    refuse(FK_BAD_ALIGNMENT, of.batch_stride_name, between,
           "it has to be a multiple of 16 bytes, or of rows that are dense");
  }
  if (batch_of(product) * of.rows > kMostElements / stride) {
    throw Refusal{FK_BAD_SHAPE, std::string(of.name) + ": batch * rows * " + of.stride_name +
                                    " is more than 2^60, with rows as memory has them"};
  }
}

/// Refuses a description that no GPU, or not this one, can compute.
void check(const fk_product& product) {
  check_type("product", product.type, {FK_FLOAT16, FK_BFLOAT16, FK_FLOAT32, FK_TF32, FK_TF32X3});
  const bool fp32 = is_fp32(product);
  check_sizes({{"rows", product.rows, 1 << 30},
               {"cols", product.cols, 1 << 26},
               {"depth", product.depth, fp32 ? kMostFp32Depth : 1 << 30}});
  const auto check_flag = [](const char* name, int value) {
    if (value != 0 && value != 1) refuse(FK_BAD_ARGUMENT, name, value, "it has to be 0 or 1");
  };
  check_flag("transpose_a", product.transpose_a);
  check_flag("transpose_b", product.transpose_b);
  if (product.batch < 0 || product.batch > kMostProducts) {
    refuse(FK_BAD_SHAPE, "batch", product.batch, "it has to be from 0 to 2^20");
  }
  const Lying c = c_of(product);
  for (const Lying& each : {a_of(product), b_of(product), c}) check_matrix(product, each);
  const int64_t batch = batch_of(product), stride = or_dense(c.stride, c.cols);
  const bool one_after_another = c.batch_stride >= extent(c.rows, c.cols, stride);
  const bool side_by_side =
      c.batch_stride >= c.cols && (batch - 1) * c.batch_stride + c.cols <= stride;
  if (batch > 1 && !one_after_another && !side_by_side) {
    refuse(FK_BAD_SHAPE, c.batch_stride_name, c.batch_stride, "matrices of c would overlap");
  }
  if (!fp32) check_capability(is_half(product) ? "the product" : "the product in TF32", 80);
}

/// The same of the gradients, in whose products rows and columns are what is added up, and depth is
/// columns.
void check_backward(const fk_product& product) {
  check(product);
  const int64_t most = is_fp32(product) ? kMostFp32Depth : 1 << 30;
  check_sizes({{"rows", product.rows, std::min<int64_t>(most, 1 << 26)},
               {"cols", product.cols, std::min<int64_t>(most, 1 << 26)},
               {"depth", product.depth, std::min<int64_t>(most, 1 << 26)}});
}

/// In FK_TF32X3. Up to some depth true fp32 is as exact in practice, and it is the faster one where
/// there is little to multiply.
std::vector<operators::Way> split_ways(const Caller& caller, const Memory<float>& a,
                                       const Memory<float>& b, const Memory<float>& c,
                                       ProductShape shape, RowStrides strides) {
  std::vector<operators::Way> ways =
      Tf32Product<Math::split>(caller, a, b, c, shape, strides).ways();
  if (shape.depth > kAsExactDepth) return ways;
  for (operators::Way& way : Fp32Product(caller, a, b, c, shape, strides).ways()) {
    ways.push_back(std::move(way));
  }
  return ways;
}

/// What multiplies in the description's type. Of a factor that lies transposed Hopper needs no copy
/// in the types of 2 bytes.
template <typename T>
Multiplies<T> multiplies_of(const fk_product& product) {
  Multiplies<T> found{
      .one =
          [type = product.type](const Caller& caller, const Memory<T>& a, const Memory<T>& b,
                                const Memory<T>& c, ProductShape shape, RowStrides strides) {
            if constexpr (!std::is_same_v<T, float>) {
              return HalfProduct<T>(caller, a, b, c, shape, strides).ways();
            } else if (type == FK_TF32) {
              return Tf32Product<Math::tf32>(caller, a, b, c, shape, strides).ways();
            } else if (type == FK_TF32X3) {
              return split_ways(caller, a, b, c, shape, strides);
            } else {
              return Fp32Product(caller, a, b, c, shape, strides).ways();
            }
          },
      .as_they_lie = {},
      .at_once =
          [type = product.type](const Caller& caller, const Matrices<T>& a, const Matrices<T>& b,
                                const Matrices<T>& c, int64_t batch) {
            if constexpr (!std::is_same_v<T, float>) {
              return half_batch_ways<T>(caller, a, b, c, batch);
            } else if (type == FK_TF32) {
              return fp32_batch_ways<Math::tf32>(caller, a, b, c, batch);
            } else if (type == FK_TF32X3) {
              return fp32_batch_ways<Math::split>(caller, a, b, c, batch);
            } else {
              return fp32_batch_ways<Math::fp32>(caller, a, b, c, batch);
            }
          }};
  if constexpr (!std::is_same_v<T, float>) {
    if (!primitives::is_hopper()) return found;
    found.as_they_lie = [](const Caller& caller, const Memory<T>& a, const Memory<T>& b,
                           const Memory<T>& c, ProductShape shape, RowStrides strides,
                           bool a_is_transposed, const std::optional<Memory<T>>& bias) {
      if (a_is_transposed) {
        return TurnedProduct<T, true>(caller, a, b, c, shape, strides, bias).ways();
      }
      return TurnedProduct<T, false>(caller, a, b, c, shape, strides, bias).ways();
    };
  }
  return found;
}

/// Calls run with half(), __nv_bfloat16() or float(), the type in memory.
template <typename Run>
auto with_type(const fk_product& product, Run run) {
  if (product.type == FK_FLOAT16) return run(half());
  if (product.type == FK_BFLOAT16) return run(__nv_bfloat16());
  return run(0.0F);
}

/// The matrices at a place among the call's operands, as the product sees them: (rows, cols).
template <typename T>
Matrices<T> matrices_at(const Operands& at, int place, const Lying& lying, int64_t batch,
                        bool transposed) {
  const int64_t stride = or_dense(lying.stride, lying.cols);
  Matrices<T> found{at.memory<T>(place, lying.extent_of(batch)),
                    lying.rows,
                    lying.cols,
                    stride,
                    lying.batch_stride,
                    transposed};
  if (transposed) std::swap(found.rows, found.cols);
  return found;
}
/// The same matrices, seen the other way round.
template <typename T>
Matrices<T> transposed(Matrices<T> of) {
  std::swap(of.rows, of.cols);
  of.transposed = !of.transposed;
  return of;
}

/// The product a b = c, or a b + bias = c, of a description that has been checked. The operands are
/// a, b and c; or a, b, bias and c.
Operator forward_of(const fk_product& product, bool has_bias) {
  return [=](const operators::Caller& caller, const Operands& at) {
    return with_type(product, [&]<typename T>(T) {
      const int64_t batch = batch_of(product);
      std::optional<Memory<T>> bias;
      if (has_bias) bias = at.memory<T>(2, product.cols);
      return LayoutProduct<T>(caller, multiplies_of<T>(product),
                              matrices_at<T>(at, 0, a_of(product), batch, product.transpose_a == 1),
                              matrices_at<T>(at, 1, b_of(product), batch, product.transpose_b == 1),
                              matrices_at<T>(at, has_bias ? 3 : 2, c_of(product), batch, false),
                              batch, bias)
          .ways();
    });
  };
}

/// A gradient lies as its matrix does, dense.
Lying gradient_of(Lying of) {
  of.stride = of.cols;
  of.batch_stride = of.rows * of.cols;
  return of;
}

/// Its gradients: two products, and the sums of the rows of d_c. The operands are d_c, a, b, d_a,
/// d_b and d_bias; of the last three those that are not wanted are NULL.
template <typename T>
std::vector<operators::Way> gradients_of(const fk_product& product, const operators::Caller& caller,
                                         const Operands& at) {
  const int64_t batch = batch_of(product);
  const bool ta = product.transpose_a == 1, tb = product.transpose_b == 1;
  const Lying lying_a = a_of(product), lying_b = b_of(product), lying_c = c_of(product);
  const auto d_c = matrices_at<T>(at, 0, lying_c, batch, false);
  const auto a = matrices_at<T>(at, 1, lying_a, batch, ta);
  const auto b = matrices_at<T>(at, 2, lying_b, batch, tb);
  const auto d_a = matrices_at<T>(at, 3, gradient_of(lying_a), batch, false);
  const auto d_b = matrices_at<T>(at, 4, gradient_of(lying_b), batch, false);
  operators::Caller own = caller;
  own.search = {};
  const auto best = [&](const Matrices<T>& left, const Matrices<T>& right,
                        const Matrices<T>& to) -> operators::Way {
    const auto ways =
        LayoutProduct<T>(own, multiplies_of<T>(product), left, right, to, batch).ways();
    const operators::Way* const fastest = common::fastest(ways);
    return fastest ? *fastest : operators::Way();
  };
  const operators::Way of_a = ta ? best(b, transposed(d_c), d_a) : best(d_c, transposed(b), d_a);
  const operators::Way of_b = tb ? best(transposed(d_c), a, d_b) : best(transposed(a), d_c, d_b);
  if (!of_a.launch || !of_b.launch) return {};
  const Memory<float> sums =
      caller.workspace.any<float>(floats_to_sum_rows<T>(batch * product.rows, product.cols));
  const auto launch = [=, stream = caller.stream] {
    if (at.at<T>(3) != nullptr) of_a.launch();
    if (at.at<T>(4) != nullptr) of_b.launch();
    if (T* const d_bias = at.at<T>(5)) {
      launch_sum_rows<T>({d_c.data, batch, d_c.rows, d_c.cols, d_c.stride, d_c.between}, sums,
                         d_bias, stream);
    }
  };
  return {{"d_a: " + of_a.name + ", d_b: " + of_b.name, of_a.microseconds + of_b.microseconds,
           launch, std::max(of_a.shared_bytes, of_b.shared_bytes)}};
}

Operator backward_of(const fk_product& product) {
  return [=](const operators::Caller& caller, const Operands& at) {
    return with_type(product, [&]<typename T>(T) { return gradients_of<T>(product, caller, at); });
  };
}

Argument argument_of(const fk_product& product, const Lying& of, bool written = false) {
  return {of.name, static_cast<size_t>(of.extent_of(batch_of(product))) * element_bytes(product),
          written};
}
Argument bias_of(const fk_product& product, const char* name, bool written = false) {
  Argument bias{name, static_cast<size_t>(product.cols) * element_bytes(product), written};
  bias.optional = true;
  return bias;
}

Task forward_task(const fk_product& product) {
  check(product);
  return {forward_of(product, false),
          {argument_of(product, a_of(product)), argument_of(product, b_of(product)),
           argument_of(product, c_of(product), true)}};
}

Task bias_task(const fk_product& product) {
  check(product);
  return {forward_of(product, true),
          {argument_of(product, a_of(product)), argument_of(product, b_of(product)),
           bias_of(product, "bias"), argument_of(product, c_of(product), true)}};
}

Task backward_task(const fk_product& product) {
  check_backward(product);
  const auto argument = [&](Lying of, const char* name, bool written) {
    of.name = name;
    Argument found = argument_of(product, of, written);
    found.optional = written;
    return found;
  };
  const Lying a = a_of(product), b = b_of(product);
  return {backward_of(product),
          {argument(c_of(product), "d_c", false), argument(a, "a", false), argument(b, "b", false),
           argument(gradient_of(a), "d_a", true), argument(gradient_of(b), "d_b", true),
           bias_of(product, "d_bias", true)}};
}

}  // namespace

template <typename T>
std::vector<operators::Way> operators::library::half_product_ways(
    const Caller& caller, const Memory<T>& a, const Memory<T>& b, const Memory<T>& c,
    ProductShape shape, RowStrides strides) {
  return HalfProduct<T>(caller, a, b, c, shape, strides).ways();
}
template std::vector<operators::Way> operators::library::half_product_ways<half>(
    const Caller&, const Memory<half>&, const Memory<half>&, const Memory<half>&, ProductShape,
    RowStrides);
template std::vector<operators::Way> operators::library::half_product_ways<__nv_bfloat16>(
    const Caller&, const Memory<__nv_bfloat16>&, const Memory<__nv_bfloat16>&,
    const Memory<__nv_bfloat16>&, ProductShape, RowStrides);

template <typename T>
std::vector<operators::Way> operators::library::turned_product_ways(
    int type, const Caller& caller, const Memory<T>& a, const Memory<T>& b, const Memory<T>& c,
    ProductShape shape, RowStrides strides, bool of_a) {
  fk_product product{};
  product.type = type;
  const Matrices<T> left{a, shape.rows, shape.depth, strides.a, 0, of_a},
      right{b, shape.depth, shape.cols, strides.b, 0, !of_a},
      result{c, shape.rows, shape.cols, strides.c, 0};
  return LayoutProduct<T>(caller, multiplies_of<T>(product), left, right, result, 1).ways();
}
template std::vector<operators::Way> operators::library::turned_product_ways<half>(
    int, const Caller&, const Memory<half>&, const Memory<half>&, const Memory<half>&, ProductShape,
    RowStrides, bool);
template std::vector<operators::Way> operators::library::turned_product_ways<__nv_bfloat16>(
    int, const Caller&, const Memory<__nv_bfloat16>&, const Memory<__nv_bfloat16>&,
    const Memory<__nv_bfloat16>&, ProductShape, RowStrides, bool);
template std::vector<operators::Way> operators::library::turned_product_ways<float>(
    int, const Caller&, const Memory<float>&, const Memory<float>&, const Memory<float>&,
    ProductShape, RowStrides, bool);

std::vector<operators::Way> operators::library::tf32_product_ways(
    const Caller& caller, const Memory<float>& a, const Memory<float>& b, const Memory<float>& c,
    ProductShape shape, RowStrides strides) {
  return Tf32Product<Math::tf32>(caller, a, b, c, shape, strides).ways();
}
std::vector<operators::Way> operators::library::tf32x3_product_ways(
    const Caller& caller, const Memory<float>& a, const Memory<float>& b, const Memory<float>& c,
    ProductShape shape, RowStrides strides) {
  return Tf32Product<Math::split>(caller, a, b, c, shape, strides).ways();
}

template <typename T>
static std::vector<operators::Way> half_product_steps(const operators::Caller& caller,
                                                      const operators::Memory<T>& a,
                                                      const operators::Memory<T>& b,
                                                      const operators::Memory<T>& c,
                                                      ProductShape shape, RowStrides strides) {
  const auto ways = HalfProduct<T>(caller, a, b, c, shape, strides).ways();
  const operators::Way* const best = common::fastest(ways);
  return best ? std::vector{*best} : std::vector<operators::Way>();
}

std::vector<operators::Way> operators::library::product_steps(
    const Caller& caller, const Memory<half>& a, const Memory<half>& b, const Memory<half>& c,
    ProductShape shape, RowStrides strides) {
  return half_product_steps<half>(caller, a, b, c, shape, strides);
}

std::vector<operators::Way> operators::library::product_steps(
    const Caller& caller, const Memory<__nv_bfloat16>& a, const Memory<__nv_bfloat16>& b,
    const Memory<__nv_bfloat16>& c, ProductShape shape, RowStrides strides) {
  return half_product_steps<__nv_bfloat16>(caller, a, b, c, shape, strides);
}

std::vector<operators::Way> operators::library::fp32_product_ways(
    const Caller& caller, const Memory<float>& a, const Memory<float>& b, const Memory<float>& c,
    ProductShape shape, RowStrides strides) {
  return Fp32Product(caller, a, b, c, shape, strides).ways();
}

const Function operators::library::product_forward =
    function_of<fk_product, forward_task>("product");
const Function operators::library::product_bias_forward =
    function_of<fk_product, bias_task>("product");
const Function operators::library::product_backward =
    function_of<fk_product, backward_task>("product");

extern "C" int fk_product_workspace(const fk_product* product, size_t* bytes) {
  return query(product_forward, product, bytes);
}

extern "C" int fk_product_forward(const fk_product* product, const void* a, const void* b, void* c,
                                  void* workspace, size_t workspace_bytes,
                                  struct CUstream_st* stream) {
  return call(product_forward, product, {a, b, c}, workspace, workspace_bytes, stream);
}

extern "C" int fk_product_bias_workspace(const fk_product* product, size_t* bytes) {
  return query(product_bias_forward, product, bytes);
}

extern "C" int fk_product_bias_forward(const fk_product* product, const void* a, const void* b,
                                       const void* bias, void* c, void* workspace,
                                       size_t workspace_bytes, struct CUstream_st* stream) {
  return call(product_bias_forward, product, {a, b, bias, c}, workspace, workspace_bytes, stream);
}

extern "C" int fk_product_backward_workspace(const fk_product* product, size_t* bytes) {
  return query(product_backward, product, bytes);
}

extern "C" int fk_product_backward(const fk_product* product, const void* d_c, const void* a,
                                   const void* b, void* d_a, void* d_b, void* d_bias,
                                   void* workspace, size_t workspace_bytes,
                                   struct CUstream_st* stream) {
  return call(product_backward, product, {d_c, a, b, d_a, d_b, d_bias}, workspace, workspace_bytes,
              stream);
}
