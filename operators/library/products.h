// The products of product.cu, as steps of other operators: what computes them is many kernels,
// which the library has once.
#pragma once

#include <cuda_fp16.h>

#include <vector>

#include "operators/operands.h"
#include "operators/product/shape.h"

namespace operators::library {

/// The ways to compute c = a b in fp16; see product::HalfProduct.
std::vector<Way> half_product_ways(const Workspace& workspace, const Memory<half>& a,
                                   const Memory<half>& b, const Memory<half>& c,
                                   product::ProductShape shape, product::RowStrides strides);
/// The same in fp32, of dense rows; see product::Fp32Product.
std::vector<Way> fp32_product_ways(const Workspace& workspace, const Memory<float>& a,
                                   const Memory<float>& b, const Memory<float>& c,
                                   product::ProductShape shape);

}  // namespace operators::library
