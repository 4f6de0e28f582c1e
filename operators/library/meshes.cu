// The kernels of operators/meshes, in every type: a file of their own, as the diffusion and the
// gradient features share them.

#include "operators/library/meshes.h"
#include "operators/meshes/features.cuh"

namespace {

using namespace operators::library;
using namespace operators::meshes;
using common::Way;
using operators::Pass;

template <class Kind, Pass kPass>
std::vector<Way> diffusion_of(const operators::Caller& caller, const Operands& at,
                              const MeshesShape& shape) {
  using T = typename Kind::T;
  return diffusion_ways<Kind, kPass == Pass::backward>(caller, shape, [=, ragged = shape.ragged] {
    DiffusionTensors<T> in = {};
    int place = 0;
    const auto next = [&](auto*& to) { to = at.at<T>(place++); };
    next(in.values);
    if (kPass == Pass::backward) next(in.d_spectral);
    next(in.basis), next(in.mass), next(in.evalues), next(in.times);
    if (kPass == Pass::backward) next(in.spectral);
    if (ragged) in.offsets = at.at<int>(place++);
    if (kPass == Pass::forward) next(in.spectrum);
    next(in.result);
    if (kPass == Pass::backward) next(in.d_times);
    return in;
  });
}

template <class Kind, Pass kPass>
std::vector<Way> features_of(const operators::Caller& caller, const Operands& at,
                             const MeshesShape& shape) {
  using T = typename Kind::T;
  return features_ways<Kind, kPass == Pass::backward>(caller, shape, [=, ragged = shape.ragged] {
    FeaturesTensors<T> in = {};
    int place = 0;
    const auto next = [&](auto*& to) { to = at.at<T>(place++); };
    if (kPass == Pass::backward) next(in.d_out);
    next(in.x), next(in.gr), next(in.gi), next(in.lr), next(in.li);
    if (ragged) in.offsets = at.at<int>(place++);
    if (kPass == Pass::forward) next(in.out);
    if (kPass == Pass::backward) next(in.d_x), next(in.d_lr), next(in.d_li);
    return in;
  });
}

/// ways(Kind()) of the type's Kind.
template <typename Ways>
std::vector<Way> of_type(int type, Ways ways) {
  switch (type) {
    case FK_FLOAT16:
      return ways(Kind<half>());
    case FK_BFLOAT16:
      return ways(Kind<__nv_bfloat16>());
    case FK_FLOAT32:
      return ways(Kind<float, Math::fp32>());
    case FK_TF32:
      return ways(Kind<float, Math::tf32>());
    default:
      return ways(Kind<float, Math::split>());
  }
}

MeshesShape shape_of(const MeshSizes& sizes) {
  return {sizes.meshes, sizes.vertices, sizes.eigen, sizes.width, sizes.ragged};
}

}  // namespace

std::vector<Way> operators::library::any_diffusion(Pass pass, const Caller& caller,
                                                   const Operands& at, const MeshSizes& sizes) {
  return of_type(sizes.type, [&]<class Kind>(Kind) {
    const MeshesShape shape = shape_of(sizes);
    return pass == Pass::forward ? diffusion_of<Kind, Pass::forward>(caller, at, shape)
                                 : diffusion_of<Kind, Pass::backward>(caller, at, shape);
  });
}

std::vector<Way> operators::library::any_features(Pass pass, const Caller& caller,
                                                  const Operands& at, const MeshSizes& sizes) {
  return of_type(sizes.type, [&]<class Kind>(Kind) {
    const MeshesShape shape = shape_of(sizes);
    return pass == Pass::forward ? features_of<Kind, Pass::forward>(caller, at, shape)
                                 : features_of<Kind, Pass::backward>(caller, at, shape);
  });
}
