// The products of product.cu and softmax.cu, as steps of other operators: what computes them is
// many kernels, which the library has once.
#pragma once

#include <cuda_fp16.h>

#include <vector>

#include "operators/operands.h"
#include "operators/product/shape.h"
#include "operators/softmax/logits.cuh"
#include "operators/softmax/softmax.h"

namespace operators::library {

/// The ways to compute c = a b in fp16; see product::HalfProduct.
std::vector<Way> half_product_ways(const Workspace& workspace, const Memory<half>& a,
                                   const Memory<half>& b, const Memory<half>& c,
                                   product::ProductShape shape, product::RowStrides strides);
/// The same in fp32, of dense rows; see product::Fp32Product.
std::vector<Way> fp32_product_ways(const Workspace& workspace, const Memory<float>& a,
                                   const Memory<float>& b, const Memory<float>& c,
                                   product::ProductShape shape);

/// The way that should be the fastest to compute logits = x W, in fp32 or as accurately: on tensor
/// cores, where the device has Hopper's, or on CUDA cores. None if the shape is too large.
std::vector<softmax::LogitsWay> fp32_logits_way(const Workspace& workspace, const Memory<float>& x,
                                                const Memory<float>& W, const Memory<float>& logits,
                                                const softmax::SoftmaxShape& shape,
                                                bool parts_wanted);
/// Its steps as those of a product c = a b of dense rows; none if it is too large.
std::vector<Way> fp32_product_steps(const Workspace& workspace, const Memory<float>& a,
                                    const Memory<float>& b, const Memory<float>& c,
                                    product::ProductShape shape, product::RowStrides strides);

}  // namespace operators::library
