// The OS threads that run blocks and the CPU's own library routines.

#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace cuda_cpu {

/// One OS thread per core, started at the first use and asleep between uses. Each device has a
/// pool, so that kernels of several run at the same time.
///
/// The pool is never destroyed: at process exit its threads sleep and simply end with the process,
/// whichever way the process leaves. A process that fork() has made starts a pool of its own.
class WorkerPool {
 public:
  static WorkerPool& of(int device);
  /// That of the first device.
  static WorkerPool& instance() { return of(0); }

  int size() const { return size_; }

  /// Calls task(worker) once on each of the first `workers` threads, at the same time, and returns
  /// when all have returned. Uses from several host threads take turns. While it waits it calls
  /// `idle`, if there is one, about twice a second.
  void run(int workers, const std::function<void(int)>& task,
           const std::function<void()>& idle = nullptr);

  /// Calls body(i) for each i in [0, count), on all threads.
  void parallel_for(long count, const std::function<void(long)>& body);

 private:
  WorkerPool();
  void serve(int worker);

  const int size_;
  std::mutex turn_;
  std::mutex mutex_;
  std::condition_variable work_arrived_;
  std::condition_variable work_done_;
  const std::function<void(int)>* task_ = nullptr;
  unsigned long round_ = 0;
  int workers_ = 0;
  std::atomic<int> started_ = 0;
  int busy_ = 0;
};

}  // namespace cuda_cpu
