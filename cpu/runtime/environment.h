// What a user says to the backend: the variables CUDA_CPU_... of the environment (docs/cpu.md).
#pragma once

namespace cuda_cpu {

struct Environment {
  /// CUDA_CPU_DEVICES: how many devices there are, all alike.
  int devices = 4;
  /// CUDA_CPU_PEER_ACCESS: whether they can use one another's memory.
  bool peer_access = true;
  /// CUDA_CPU_MULTIPROCESSORS: how many a device has, each of which holds one block at a time.
  int multiprocessors = 8;
  /// CUDA_CPU_COMPUTE_CAPABILITY, times ten; 0: nobody has asked for one, and 9.0 is played.
  int compute_capability = 0;
  /// CUDA_CPU_REPEAT_EARLY_LAUNCHES: whether every early launch is made twice, the second one early
  /// behind the first, as in a loop.
  bool repeat_early_launches = false;
  /// CUDA_CPU_WATCH_MEMORY: see memory_watch.h.
  bool watch_memory = false;
  /// CUDA_CPU_REPORT: the file that ledger.h writes; and CUDA_CPU_SECONDS, after which it ends the
  /// program. `./try` sets both.
  const char* report = nullptr;
  int seconds = 0;
  /// CUDA_CPU_COUNTED_MILLISECONDS: for so long each kernel is counted for the report at most.
  int counted_milliseconds = 2000;
};

/// As it is when first asked for. A variable that is not one of these, or has a value that means
/// nothing, ends the program with a sentence and exit code 2.
const Environment& environment();

}  // namespace cuda_cpu
