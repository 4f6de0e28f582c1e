// Attention by cuDNN, NVIDIA's library, where a program finds it when it starts: the peer to beat.
#pragma once

#include <memory>
#include <string>

#include "checks/attention/attention.h"

namespace checks {

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

}  // namespace checks
