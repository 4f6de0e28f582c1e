// Fences and relaxed atomic operations, for ThreadSanitizer, which knows no fences. PTX ISA,
// "Memory Consistency Model": an atomic operation of a kernel, and an access to a volatile variable
// in global memory, orders nothing by itself. Two threads are ordered where one has a fence before
// it writes there, and the other one, which has read that, a fence after it; both of a scope that
// includes the other thread. Without ThreadSanitizer a fence is one of the CPU, and the rest does
// nothing.
//
// Each address has an identity that comes after all that has been released there, and one for each
// block whose fences are of that scope. These are taken as right although PTX does not say so:
// - a fence serves all threads of its block, which may meet between it and the write, or the read;
// - what a thread does between a fence and its next atomic write is released, too: the write itself
//   has to be, as who has seen it may set the variable back without an atomic operation;
// - the fence after a read may be of either scope, and after an operation that reads and writes at
//   once none is needed.

#pragma once

#include <atomic>

#include "cpu/execution/sanitizers.h"

namespace cuda_cpu {

enum class Scope { block, device };

#if defined(CUDA_CPU_TSAN)

/// __threadfence() and its kin.
void order_fence(Scope scope);
/// Around an atomic write; `releases`: also without a fence before it.
class OrderedWrite {
 public:
  explicit OrderedWrite(const void* address, bool releases = false, Scope scope = Scope::device);
  ~OrderedWrite();
  OrderedWrite(const OrderedWrite&) = delete;
  OrderedWrite& operator=(const OrderedWrite&) = delete;

 private:
  const void* const address_;
  const bool releases_;
  const Scope scope_;
  bool ordered_ = false;
};
/// After an atomic read; `acquires`: also without a fence after it. Of the host it always does.
void order_read(const void* address, bool acquires);
/// No kernel runs: what was released is forgotten.
void forget_fences();

#else

inline void order_fence(Scope) { std::atomic_thread_fence(std::memory_order_seq_cst); }
struct OrderedWrite {
  explicit OrderedWrite(const void*, bool = false, Scope = Scope::device) {}
  ~OrderedWrite() {}
};
inline void order_read(const void*, bool) {}
inline void forget_fences() {}

#endif

}  // namespace cuda_cpu
