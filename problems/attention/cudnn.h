// Attention by cuDNN, NVIDIA's library, where a program finds it when it starts: the peer to beat.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "problems/attention/attention.h"

namespace problems {

/// softmax(scale Q K^T + mask) V by cuDNN 9, or its gradients, for the layouts of AttentionProblem
/// and AttentionBackwardProblem. No header of cuDNN is needed to build this. What is not there, or
/// refused, is said in words, and the row is left out. Constructing takes a second, since cuDNN
/// compiles some of its kernels.
class CudnnAttention {
 public:
  enum class Pass { forward, backward };
  CudnnAttention(const AttentionShape& shape, Type type, Pass pass);
  CudnnAttention(const CudnnAttention&) = delete;
  CudnnAttention& operator=(const CudnnAttention&) = delete;
  ~CudnnAttention();

  /// Why it cannot be called; empty if it can.
  const std::string& missing() const { return missing_; }
  /// "9.19.0"
  const std::string& version() const { return version_; }

  /// cuDNN's heuristic proposes several kernels, the one first that it takes for the fastest. Of
  /// those that suit the shape these are the first few, at least one.
  int plans() const;
  std::string name_of(int plan) const;
  /// Device memory that any of them needs.
  size_t workspace_bytes() const;

  /// Forward writes out and lse, the logarithms of the sums; backward reads them, and writes dQ, dK
  /// and dV, which are null in forward, as is d_out.
  struct Memory {
    const void *Q, *K, *V, *out, *lse;
    const void *d_out = nullptr, *dQ = nullptr, *dK = nullptr, *dV = nullptr;
    void* workspace = nullptr;
    bool operator==(const Memory&) const = default;
  };
  /// May be captured in a graph. Not to be called by two threads at once.
  void launch(int plan, const Memory& memory, cudaStream_t stream) const;

 private:
  struct Plans;
  std::string missing_, version_;
  std::unique_ptr<Plans> plans_;
};

/// Adds the row "cuDNN", the fastest of its plans, to a table of attention or of its gradients. Or
/// says why there is none; else empty. memory_of() is called when the row is launched, as buffers
/// have no memory before; the workspace is the table's.
template <class Table, class MemoryOf>
std::string add_cudnn(const Table& to, Type type, CudnnAttention::Pass pass, MemoryOf memory_of) {
  const auto cudnn = std::make_shared<CudnnAttention>(to.shape, type, pass);
  if (!cudnn->missing().empty()) return cudnn->missing();
  const auto workspace =
      to.problem.template workspace<char>(std::max<size_t>(cudnn->workspace_bytes(), 1));
  std::vector<Way> ways;
  for (int plan = 0; plan < cudnn->plans(); ++plan) {
    const auto launch = [=] {
      CudnnAttention::Memory memory = memory_of();
      memory.workspace = workspace;
      cudnn->launch(plan, memory, cudaStreamPerThread);
    };
    // Nobody says how long which of them takes: all are tried.
    ways.push_back({cudnn->name_of(plan), to.shape.flops() / 500e6, launch});
  }
  Kernel& row = to.kernel("cuDNN", Role::library, ways);
  if constexpr (requires { to.ends(); }) row.occupies(to.ends() + workspace.bytes());
  return {};
}

template <typename T>
std::string add_cudnn(const AttentionProblem<T>& to) {
  return add_cudnn(to, type_of<T>, CudnnAttention::Pass::forward, [to] {
    return CudnnAttention::Memory{to.Q, to.K, to.V, to.out, to.lse};
  });
}

}  // namespace problems
