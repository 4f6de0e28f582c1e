// The products of product.cu and softmax.cu, as steps of other operators: what computes them is
// many kernels, which the library has once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <vector>

#include "operators/caller.h"
#include "operators/product/shape.h"
#include "operators/softmax/logits.cuh"
#include "operators/softmax/softmax.h"

namespace operators::library {

/// The ways to compute c = a b. Of matrices of T it says the type of a function.
template <typename T>
using ProductFunction = std::vector<Way>(const Caller&, const Memory<T>& a, const Memory<T>& b,
                                         const Memory<T>& c, product::ProductShape,
                                         product::RowStrides);

/// In T, half or __nv_bfloat16; see product::HalfProduct.
template <typename T>
std::vector<Way> half_product_ways(const Caller& caller, const Memory<T>& a, const Memory<T>& b,
                                   const Memory<T>& c, product::ProductShape shape,
                                   product::RowStrides strides);
/// The same of fp32, multiplied in TF32, or by three such products (see product::Tf32Product), or
/// in fp32 (see product::Fp32Product).
ProductFunction<float> tf32_product_ways, tf32x3_product_ways, fp32_product_ways;
/// The ways to compute c = a b where one factor lies transposed: a if `of_a`, else b. `type` is one
/// of fk_type; strides are those of rows in memory, and never 0. What does not read the factor as
/// it lies copies it before. T: half, __nv_bfloat16 or float.
template <typename T>
std::vector<Way> turned_product_ways(int type, const Caller& caller, const Memory<T>& a,
                                     const Memory<T>& b, const Memory<T>& c, product::ProductShape,
                                     product::RowStrides, bool of_a);
/// The steps of the way that should be the fastest to compute c = a b; none if it is too large. Of
/// fp32 rows have to be dense.
ProductFunction<float> product_steps;
ProductFunction<half> product_steps;
ProductFunction<__nv_bfloat16> product_steps;

/// The ways to compute logits = x W in fp32. Of fp32 it is the one that should be the fastest, in
/// fp32 or as accurate: on tensor cores, where the device has Hopper's, or on CUDA cores. There,
/// rows may have parts if they are wanted; of other types they have none, nor slices. None if the
/// shape is too large.
template <typename T>
using LogitsFunction = std::vector<softmax::LogitsWay>(const Caller&, const Memory<T>& x,
                                                       const Memory<T>& W,
                                                       const Memory<float>& logits,
                                                       const softmax::SoftmaxShape&,
                                                       bool parts_wanted);
LogitsFunction<float> logits_ways;
LogitsFunction<half> logits_ways;
LogitsFunction<__nv_bfloat16> logits_ways;

}  // namespace operators::library
