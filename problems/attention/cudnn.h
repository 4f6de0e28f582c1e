// Attention by cuDNN, NVIDIA's library, where a program finds it when it starts: the peer to beat.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "problems/attention/attention.h"

namespace problems {

/// softmax(scale Q K^T + mask) V by cuDNN 9, for the layouts of AttentionProblem. No header of
/// cuDNN is needed to build this. What is not there, or refused, is said in words, and the row is
/// left out. Constructing takes a second, since cuDNN compiles some of its kernels.
class CudnnAttention {
 public:
  /// `with_lse`: the log of each row's sum is written, too.
  CudnnAttention(const AttentionShape& shape, Type type, bool with_lse = true);
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

  struct Memory {
    const void *Q, *K, *V;
    void* out;
    float* lse;  ///< may be null, without lse
    void* workspace;
    bool operator==(const Memory&) const = default;
  };
  /// May be captured in a graph. Not to be called by two threads at once.
  void launch(int plan, const Memory& memory, cudaStream_t stream) const;

 private:
  struct Plans;
  std::string missing_, version_;
  std::unique_ptr<Plans> plans_;
};

/// Adds the row "cuDNN", the fastest of its plans. Or says why there is none; else empty.
template <typename T>
std::string add_cudnn(const AttentionProblem<T>& to) {
  const auto cudnn = std::make_shared<CudnnAttention>(to.shape, type_of<T>);
  if (!cudnn->missing().empty()) return cudnn->missing();
  const auto workspace =
      to.problem.template workspace<char>(std::max<size_t>(cudnn->workspace_bytes(), 1));
  std::vector<Way> ways;
  for (int plan = 0; plan < cudnn->plans(); ++plan) {
    const auto launch = [=] {
      cudnn->launch(plan, {to.Q, to.K, to.V, to.out, to.lse, workspace}, cudaStreamPerThread);
    };
    // Nobody says how long which of them takes: all are tried.
    ways.push_back({cudnn->name_of(plan), to.shape.flops() / 500e6, launch});
  }
  to.kernel("cuDNN", Role::library, ways);
  return {};
}

}  // namespace problems
