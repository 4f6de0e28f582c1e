// A table of lesson 7 whose vertices are split over several GPUs: who has which rows, and how their
// results come together to be verified.
#pragma once

#include <memory>
#include <vector>

#include "common/gpus.cuh"
#include "problems/diffusion/diffusion.h"
#include "problems/diffusion/nccl.cuh"

namespace problems {

using namespace common;
using namespace operators::diffusion;

/// The vertices of a table, split over `gpus` GPUs in tiles of 64. The first one's are where the
/// harness has put the whole mesh; the others get theirs before anything is timed, as in a network,
/// whose layers leave their results where the next layer needs them.
class Mesh {
  using bf16 = __nv_bfloat16;
  using Operands = DiffusionOperands;

 public:
  Mesh(DiffusionProblem& table, int gpus) : table_(table), gpus_(gpus), others_(gpus) {
    table.problem.adjust_inputs([this] { start(); });
  }
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  /// What a row needs before its first launch.
  void at_start(std::function<void()> prepare) { prepare_.push_back(std::move(prepare)); }

  int gpus() const { return gpus_; }
  DiffusionProblem& table() const { return table_; }
  int64_t begin(int gpu) const {
    const int64_t tiles = (table_.shape.V + 63) / 64;
    return std::min(table_.shape.V, 64 * (tiles * gpu / gpus_));
  }
  int64_t rows(int gpu) const { return begin(gpu + 1) - begin(gpu); }
  int64_t most_rows() const { return extreme_rows(true); }
  int64_t least_rows() const { return extreme_rows(false); }

  Operands operands(int gpu) const {
    if (gpu > 0) return others_[gpu];
    Operands first = table_.operands();
    first.V = rows(0);
    return first;
  }

  // Fills the other GPUs' results with NaN, as the harness does the first one's.
  void poison() const {
    const auto [V, E, W, meshes] = table_.shape;
    on_each_gpu(gpus_, [&, E = E, W = W](int gpu) {
      if (gpu == 0) return;
      CUDA_CHECK(cudaMemset(others_[gpu].result, 0xff, rows(gpu) * W * sizeof(bf16)));
      CUDA_CHECK(cudaMemset(others_[gpu].spectrum, 0xff, E * W * sizeof(bf16)));
      CUDA_CHECK(cudaMemset(others_[gpu].d_times, 0xff, W * sizeof(bf16)));
      CUDA_CHECK(cudaDeviceSynchronize());
    });
  }

  // Brings all rows of the result to the first GPU, and compares what every GPU has a copy of. A
  // bit that differs makes the first one's a NaN, which fails verification.
  void collect() const {
    const Operands first = table_.operands();
    const auto [V, E, W, meshes] = table_.shape;
    const bool forward = table_.pass == Pass::forward;
    const size_t count = forward ? E * W : W;
    for (int gpu = 1; gpu < gpus_; ++gpu) {
      CUDA_CHECK(cudaMemcpyPeer(first.result + begin(gpu) * W, 0, others_[gpu].result, gpu,
                                rows(gpu) * W * sizeof(bf16)));
      bf16* const expected = forward ? first.spectrum : first.d_times;
      const bf16* const got = forward ? others_[gpu].spectrum : others_[gpu].d_times;
      if (bits_of(expected, count) == bits_of(got, count)) continue;
      fprintf(stderr, "GPU %d has another spectrum than GPU 0\n", gpu);
      CUDA_CHECK(cudaMemset(expected, 0xff, count * sizeof(bf16)));
    }
  }

 private:
  int64_t extreme_rows(bool most) const {
    int64_t result = rows(0);
    for (int gpu = 1; gpu < gpus_; ++gpu) {
      result = most ? std::max(result, rows(gpu)) : std::min(result, rows(gpu));
    }
    return result;
  }
  // Gives the other GPUs their inputs, and room for their results.
  void start() {
    CUDA_CHECK(cudaDeviceSynchronize());
    const Operands all = table_.operands();
    const auto [V, E, W, meshes] = table_.shape;
    on_each_gpu(gpus_, [&, E = E, W = W](int gpu) {
      if (gpu == 0) return;
      const auto copy = [&](const bf16* from, size_t count) {
        return from ? take(gpu, from, count) : nullptr;
      };
      const int64_t first = begin(gpu), count = rows(gpu);
      others_[gpu] = {.values = copy(all.values + first * W, count * W),
                      .basis = copy(all.basis + first * E, count * E),
                      .mass = copy(all.mass + first, count),
                      .evalues = copy(all.evalues, E),
                      .times = copy(all.times, W),
                      .d_spectral = copy(all.d_spectral, E * W),
                      .spectral = copy(all.spectral, E * W),
                      .spectrum = take(gpu, nullptr, E * W),
                      .result = take(gpu, nullptr, count * W),
                      .d_times = take(gpu, nullptr, W),
                      .V = count,
                      .E = static_cast<int>(E),
                      .W = static_cast<int>(W)};
    });
    for (const auto& prepare : prepare_) prepare();
  }

  static std::vector<uint16_t> bits_of(const bf16* values, size_t count) {
    std::vector<uint16_t> bits(count);
    CUDA_CHECK(cudaMemcpy(bits.data(), values, count * sizeof(bf16), cudaMemcpyDeviceToHost));
    return bits;
  }
  // A copy, or new memory, on the current GPU.
  bf16* take(int gpu, const bf16* from, size_t count) {
    arrays_.push_back(std::make_unique<Scratch<bf16>>(count));
    bf16* const to = *arrays_.back();
    if (from) CUDA_CHECK(cudaMemcpyPeer(to, gpu, from, 0, count * sizeof(bf16)));
    return to;
  }

  DiffusionProblem& table_;
  int gpus_;
  std::vector<Operands> others_;
  std::vector<std::function<void()>> prepare_;
  std::vector<std::unique_ptr<Scratch<bf16>>> arrays_;
};

/// Memory on each GPU, at first with `byte` in every byte.
template <typename T>
class OnEach {
 public:
  OnEach(int gpus, size_t count, int byte = 0) {
    on_each_gpu(gpus, [&](int) {
      arrays_.push_back(std::make_unique<Scratch<T>>(count));
      CUDA_CHECK(cudaMemset(*arrays_.back(), byte, count * sizeof(T)));
      CUDA_CHECK(cudaDeviceSynchronize());
    });
  }
  T* operator[](int gpu) const { return *arrays_[gpu]; }

 private:
  std::vector<std::unique_ptr<Scratch<T>>> arrays_;
};

/// Where GPU `me` sees what GPU `gpu` gets; and what makes room for so many quads, empty at first.
using Inboxes = std::function<float4*(int me, int gpu)>;
using MakeInboxes = std::function<Inboxes(int gpus, size_t quads)>;

/// By peer access: what one GPU has allocated all see in the same place.
inline Inboxes peer_inboxes(int gpus, size_t quads) {
  const auto memory = std::make_shared<OnEach<float4>>(gpus, quads, 0xff);
  return [=](int, int gpu) { return (*memory)[gpu]; };
}

#if HAS_NCCL_WINDOWS
/// By NCCL's device API.
inline MakeInboxes window_inboxes(const std::shared_ptr<Nccl>& nccl) {
  return [nccl](int, size_t quads) {
    const auto window = std::make_shared<NcclWindow<float4>>(nccl, quads, 0xff);
    return [=](int me, int gpu) { return window->at(me, gpu); };
  };
}
#endif  // HAS_NCCL_WINDOWS

/// What a row of several GPUs has that a row of one has not. `check` ends the program if a GPU has
/// reported something.
inline void over_gpus(Mesh& mesh, Kernel& kernel, std::function<void()> check) {
  kernel.hooks.before = [&mesh] { mesh.poison(); };
  kernel.hooks.collect = [&mesh, check] {
    on_each_gpu(mesh.gpus(), [](int) { CUDA_CHECK(cudaDeviceSynchronize()); });
    check();
    mesh.collect();
  };
#ifndef CUDA_CPU
  const auto timer = std::make_shared<GpuTimer>(mesh.gpus());
  kernel.hooks.time = [timer, check, launch = kernel.ways.front().launch](Timing timing) {
    const float ms = timer->time(timing, launch);
    check();
    return ms;
  };
#endif
}

}  // namespace problems
