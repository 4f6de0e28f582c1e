// The products of product.cu, as steps of other operators: what computes them is many kernels,
// which the library has once.
#pragma once

#include <cuda_fp16.h>

#include <vector>

#include "operators/operands.h"
#include "operators/product/shape.h"

namespace operators::library {

/// The ways to compute c = a b in T, half or __nv_bfloat16; see product::HalfProduct.
template <typename T>
std::vector<Way> half_product_ways(const Workspace& workspace, const Memory<T>& a,
                                   const Memory<T>& b, const Memory<T>& c,
                                   product::ProductShape shape, product::RowStrides strides);
/// The same of fp32, multiplied in TF32, or by three such products; see product::Tf32Product.
std::vector<Way> tf32_product_ways(const Workspace& workspace, const Memory<float>& a,
                                   const Memory<float>& b, const Memory<float>& c,
                                   product::ProductShape shape, product::RowStrides strides);
std::vector<Way> tf32x3_product_ways(const Workspace& workspace, const Memory<float>& a,
                                     const Memory<float>& b, const Memory<float>& c,
                                     product::ProductShape shape, product::RowStrides strides);
/// The same, multiplied in fp32, of dense rows; see product::Fp32Product.
std::vector<Way> fp32_product_ways(const Workspace& workspace, const Memory<float>& a,
                                   const Memory<float>& b, const Memory<float>& c,
                                   product::ProductShape shape);

}  // namespace operators::library
