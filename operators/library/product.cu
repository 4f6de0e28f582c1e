// The products of operators/product, as the library exports them.

#include <algorithm>

#include "operators/library/call.h"
#include "operators/library/products.h"
#include "operators/product/fp32.cuh"
#include "operators/product/half_product.cuh"
#include "operators/product/tf32_product.cuh"

namespace {

using namespace operators::library;
using namespace operators::product;

/// What a type is in memory, and how it is multiplied.
bool is_fp32(const fk_product& product) { return product.type == FK_FLOAT32; }
bool is_half(const fk_product& product) {
  return product.type == FK_FLOAT16 || product.type == FK_BFLOAT16;
}
size_t element_bytes(const fk_product& product) { return is_half(product) ? 2 : 4; }

/// Refuses a description that no GPU, or not this one, can compute.
void check(const fk_product& product) {
  check_type("product", product.type, {FK_FLOAT16, FK_BFLOAT16, FK_FLOAT32, FK_TF32, FK_TF32X3});
  const bool fp32 = is_fp32(product);
  check_sizes({{"rows", product.rows, 1 << 30},
               {"cols", product.cols, 1 << 26},
               {"depth", product.depth, fp32 ? 1 << 24 : 1 << 30}});
  const struct {
    const char* name;
    int64_t stride, cols;
  } strides[] = {{"a_stride", product.a_stride, product.depth},
                 {"b_stride", product.b_stride, product.cols},
                 {"c_stride", product.c_stride, product.cols}};
  for (const auto& each : strides) {
    check_stride(each.name, each.stride, each.cols, element_bytes(product));
    if (fp32 && each.stride != 0 && each.stride != each.cols) {
      throw Refusal{FK_BAD_SHAPE, std::string(each.name) + " is " + std::to_string(each.stride) +
                                      "; rows of FK_FLOAT32 have to be dense"};
    }
  }
  if (!fp32) check_capability(is_half(product) ? "the product" : "the product in TF32", 80);
}

/// The product a b = c, the call's arguments, of a description that has been checked.
Operator operator_of(const fk_product& product) {
  return [=](const operators::Caller& caller, const Operands& operands) {
    const ProductShape shape{static_cast<int>(product.rows), static_cast<int>(product.cols),
                             static_cast<int>(product.depth)};
    const auto ways = [&]<typename T, class Product>(const auto&... strides) {
      return Product(caller, operands.memory<T>(0, product.rows * product.depth),
                     operands.memory<T>(1, product.depth * product.cols),
                     operands.memory<T>(2, product.rows * product.cols), shape, strides...)
          .ways();
    };
    const auto stride = [](int64_t own, int64_t cols) { return own == cols ? 0 : own; };
    const RowStrides strides{stride(product.a_stride, product.depth),
                             stride(product.b_stride, product.cols),
                             stride(product.c_stride, product.cols)};
    if (is_fp32(product)) return ways.template operator()<float, Fp32Product>();
    if (product.type == FK_TF32) {
      return ways.template operator()<float, Tf32Product<Math::tf32>>(strides);
    }
    if (product.type == FK_TF32X3) {
      return ways.template operator()<float, Tf32Product<Math::split>>(strides);
    }
    if (product.type == FK_FLOAT16) {
      return ways.template operator()<half, HalfProduct<half>>(strides);
    }
    return ways.template operator()<__nv_bfloat16, HalfProduct<__nv_bfloat16>>(strides);
  };
}

/// The operands a, b and c.
Task task_of(const fk_product& product) {
  check(product);
  const auto argument = [&](const char* name, int64_t rows, int64_t cols, int64_t stride,
                            bool written) {
    const int64_t count = extent(rows, cols, or_dense(stride, cols));
    return Argument{name, static_cast<size_t>(count) * element_bytes(product), written};
  };
  return {operator_of(product),
          {argument("a", product.rows, product.depth, product.a_stride, false),
           argument("b", product.depth, product.cols, product.b_stride, false),
           argument("c", product.rows, product.cols, product.c_stride, true)}};
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

std::vector<operators::Way> operators::library::fp32_product_ways(const Caller& caller,
                                                                  const Memory<float>& a,
                                                                  const Memory<float>& b,
                                                                  const Memory<float>& c,
                                                                  ProductShape shape) {
  return Fp32Product(caller, a, b, c, shape).ways();
}

const Function operators::library::product_forward = function_of<fk_product, task_of>("product");

extern "C" int fk_product_workspace(const fk_product* product, size_t* bytes) {
  return query(product_forward, product, bytes);
}

extern "C" int fk_product_forward(const fk_product* product, const void* a, const void* b, void* c,
                                  void* workspace, size_t workspace_bytes,
                                  struct CUstream_st* stream) {
  return call(product_forward, product, {a, b, c}, workspace, workspace_bytes, stream);
}
