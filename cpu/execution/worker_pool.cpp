#include "cpu/execution/worker_pool.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "cpu/execution/sanitizers.h"
#include "cpu/runtime/device_state.h"

namespace cuda_cpu {

namespace {

thread_local bool is_worker = false;

/// Races between blocks only show between OS threads, so ThreadSanitizer always gets two of them.
int pool_size() {
  const int cores = std::max(1u, std::thread::hardware_concurrency());
  return kTsan ? 2 : cores;
}

}  // namespace

WorkerPool& WorkerPool::of(int device) {
  struct Started {
    WorkerPool* pool;
    pid_t process;
  };
  static std::mutex mutex;
  static Started all[kMostDevices] = {};
  std::lock_guard lock(mutex);
  Started& own = all[device];
  // After fork() the child has the pool, but none of its threads: a launch would wait for ever.
  if (own.process != getpid()) own = {new WorkerPool, getpid()};
  return *own.pool;
}

WorkerPool::WorkerPool() : size_(pool_size()) {
  for (int worker = 0; worker < size_; ++worker) {
    std::thread([this, worker] { serve(worker); }).detach();
  }
}

void WorkerPool::run(int workers, const std::function<void(int)>& task,
                     const std::function<void()>& idle) {
  if (is_worker) {
    std::fputs("cuda_cpu: a kernel must not launch work itself\n", stderr);
    std::abort();
  }
  std::lock_guard turn(turn_);
  std::unique_lock lock(mutex_);
  task_ = &task;
  workers_ = busy_ = std::min(workers, size_);
  started_ = 0;
  ++round_;
  work_arrived_.notify_all();
  while (busy_ > 0) {
    if (!idle) {
      work_done_.wait(lock);
    } else if (work_done_.wait_for(lock, std::chrono::milliseconds(500)) ==
               std::cv_status::timeout) {
      idle();
    }
  }
}

void WorkerPool::parallel_for(long count, const std::function<void(long)>& body) {
  std::atomic<long> next = 0;
  run(static_cast<int>(std::min<long>(count, size_)), [&](int) {
    for (long i; (i = next++) < count;) body(i);
  });
}

void WorkerPool::serve(int worker) {
  is_worker = true;
  unsigned long served = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    work_arrived_.wait(lock, [&] { return round_ != served; });
    served = round_;
    if (worker >= workers_) continue;
    const int workers = workers_;
    lock.unlock();
    if (kTsan) {
      // A worker that comes when another is done would be ordered after it, by the mutex. So all
      // come first, and see each other without any ordering.
      started_.fetch_add(1, std::memory_order_relaxed);
      while (started_.load(std::memory_order_relaxed) < workers) std::this_thread::yield();
    }
    (*task_)(worker);
    lock.lock();
    if (--busy_ == 0) work_done_.notify_all();
  }
}

}  // namespace cuda_cpu
