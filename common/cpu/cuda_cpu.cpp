#include "cuda_cpu.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device_state.h"
#include "fiber.h"
#include "worker_pool.h"

constinit thread_local uint3 threadIdx = {};
constinit thread_local uint3 blockIdx = {};
constinit thread_local dim3 blockDim = {0, 0, 0};
constinit thread_local dim3 gridDim = {0, 0, 0};

namespace cuda_cpu {

namespace {

/// A launch in progress, shared by all workers.
struct Launch {
  const LaunchConfig& config;
  const BoundKernel& kernel;
  std::uint64_t blocks;
  int workers;
  std::atomic<std::uint64_t> next_block = 0;
  std::atomic<std::uint64_t> blocks_done = 0;
  std::atomic<bool> failed = false;
};

/// One CUDA thread of the block that a worker runs.
struct Thread {
  /// Where the thread is suspended, while it waits.
  Fiber* fiber;
  /// The next in the queue that the thread waits in.
  Thread* next;
  uint3 index;
  unsigned number;
};

/// First in, first out.
struct Queue {
  Thread* head = nullptr;
  Thread* tail = nullptr;

  CUDA_CPU_NO_TSAN void push(Thread* thread) {
    thread->next = nullptr;
    (head ? tail->next : head) = thread;
    tail = thread;
  }

  CUDA_CPU_NO_TSAN Thread* pop() {
    Thread* first = head;
    head = first->next;
    return first;
  }

  CUDA_CPU_NO_TSAN void take_all(Queue& other) {
    if (!other.head) return;
    (head ? tail->next : head) = other.head;
    tail = other.tail;
    other.head = nullptr;
  }
};

/// What ThreadSanitizer's ordering by a barrier hangs on. Those who wait are ordered after
/// passed[phase], which nobody releases again before all of them have gone on: whoever is quick and
/// arrives at the next barrier leaves no trace there.
struct TsanBarrier {
  char arrived;
  char passed[2];
  int phase;
};

/// The barrier of all threads of a block.
struct BlockBarrier {
  Queue waiting;
  unsigned arrived;
  int predicates;
  int result;
  const char* operation;
  Site site;
  TsanBarrier tsan;
};

/// Lanes of a warp that wait for each other, in operations with the same mask.
struct WarpGroup {
  unsigned mask;
  unsigned arrived;
  Combine* combine;
  const char* operation;
  Site site;
  void* operands[32];
  TsanBarrier tsan;
};

/// At most 32 groups have lanes that wait, because their lanes are disjoint. A group keeps its
/// place for the next operation with its mask.
struct Warp {
  unsigned live;
  int group_count;
  WarpGroup groups[32];
};

/// Storage of one __shared__ declaration.
struct SharedStorage {
  const void* key;
  void* data;
  std::size_t size;
};

CUDA_CPU_NO_TSAN bool same_site(const Site& a, const Site& b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

/// A line of an error report, put together piece by piece.
class Message {
 public:
  const char* text() const { return text_; }

  __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    add_list(format, arguments);
    va_end(arguments);
  }

  void add_list(const char* format, va_list arguments) {
    const int added = std::vsnprintf(text_ + used_, sizeof text_ - used_, format, arguments);
    used_ = std::min(sizeof text_ - 1, used_ + std::max(0, added));
  }

  void add_thread(const Thread& thread) {
    add("thread (%u,%u,%u)", thread.index.x, thread.index.y, thread.index.z);
  }

  void add_wait(const Thread& thread, const char* operation, const Site& site) {
    add_thread(thread);
    add(" waits in %s at %s:%d (%s)", operation, site.file, site.line, site.function);
  }

 private:
  char text_[1024] = "";
  std::size_t used_ = 0;
};

/// Runs blocks on one worker thread, one at a time.
///
/// The threads of a block start in order. A fiber runs one after the other to the end, as plain
/// function calls; only when a thread has to wait does it keep its fiber, and another one goes on.
/// Under ThreadSanitizer each thread has a fiber of its own, as its identity there is the fiber's.
class BlockRunner {
 public:
  explicit BlockRunner(int worker) : worker_(worker) {}

  /// Runs this worker's share of the launch.
  void run(Launch& launch);

  int block_barrier(int predicate, const char* operation, const Site& site);
  void warp_meet(unsigned mask, Combine* combine, void* operand, const char* operation,
                 const Site& site);
  void yield();
  void* static_shared_storage(const void* key, std::size_t size, std::size_t alignment);
  void* dynamic_shared_storage() const { return dynamic_shared_.data; }
  unsigned lane_id() const { return current_->number % 32; }
  unsigned live_lanes() const { return warps_[current_->number / 32].live; }
  AsyncCopies& async_copies() { return async_copies_[current_->number]; }

  /// Ends the launch because of an error in the current thread.
  [[noreturn]] void fail_in_thread(const char* format, va_list arguments);

 private:
  static void fiber_main();

  void run_block(std::uint64_t block);
  void abandon_threads();
  void run_thread();
  void thread_exited();
  WarpGroup& group_for(Warp& warp, unsigned mask);
  void complete(Warp& warp, WarpGroup& group);
  Thread& thread_of(const Warp& warp, unsigned lane);

  Fiber& fiber_for_next_thread();
  Fiber& next_fiber();
  void go_to(Fiber& fiber);
  void wait();

  void allocate(SharedStorage& storage, const void* key, std::size_t size, std::size_t alignment);
  void begin_shared_memory();
  void end_shared_memory();

  [[noreturn]] void fail(const Message& message);
  Message begin_message() const;
  void report(const Message& message);
  void report_deadlock();

  const int worker_;
  Launch* launch_ = nullptr;
  unsigned threads_in_block_ = 0;

  Fiber main_;
  Fiber* running_ = &main_;
  Fiber* fibers_[kMaxThreadsPerBlock];
  unsigned fiber_count_ = 0;
  Fiber* idle_fibers_[kMaxThreadsPerBlock];
  unsigned idle_count_ = 0;

  Thread threads_[kMaxThreadsPerBlock];
  AsyncCopies async_copies_[kMaxThreadsPerBlock];
  Thread* current_ = nullptr;
  unsigned started_ = 0;
  unsigned exited_ = 0;
  const Thread* first_exited_ = nullptr;
  uint3 next_index_ = {};
  Queue ready_;
  BlockBarrier barrier_ = {};
  Warp warps_[kMaxThreadsPerBlock / 32] = {};

  static constexpr int kMaxStaticShared = 64;
  SharedStorage dynamic_shared_ = {};
  SharedStorage static_shared_[kMaxStaticShared];
  int static_shared_count_ = 0;

  char tsan_block_start_ = 0;
  char tsan_block_end_ = 0;
};

constinit thread_local BlockRunner* runner = nullptr;

// ---- Blocks and threads ------------------------------------------------------------------------

void BlockRunner::run(Launch& launch) {
  launch_ = &launch;
  const dim3 block = launch.config.block;
  threads_in_block_ = block.x * block.y * block.z;
  blockDim = block;
  gridDim = launch.config.grid;
  allocate(dynamic_shared_, nullptr, launch.config.shared_bytes, 1);

  std::uint64_t own = static_cast<std::uint64_t>(worker_);
  while (!launch.failed) {
    // Under ThreadSanitizer neighbouring blocks run on different OS threads, for sure.
    const std::uint64_t block =
        kTsan ? std::exchange(own, own + launch.workers) : launch.next_block++;
    if (block >= launch.blocks) break;
    run_block(block);
    launch.blocks_done.fetch_add(1, std::memory_order_relaxed);
  }
  end_shared_memory();
}

CUDA_CPU_NO_TSAN void BlockRunner::run_block(std::uint64_t block) {
  const dim3 grid = gridDim;
  blockIdx.x = static_cast<unsigned>(block % grid.x);
  blockIdx.y = static_cast<unsigned>(block / grid.x % grid.y);
  blockIdx.z = static_cast<unsigned>(block / grid.x / grid.y);

  started_ = exited_ = 0;
  next_index_ = {0, 0, 0};
  ready_ = {};
  barrier_.waiting = {};
  barrier_.arrived = 0;
  barrier_.predicates = 0;
  for (unsigned first = 0; first < threads_in_block_; first += 32) {
    const unsigned lanes = std::min(32u, threads_in_block_ - first);
    warps_[first / 32].live = ~0u >> (32 - lanes);
    warps_[first / 32].group_count = 0;
  }
  begin_shared_memory();

  tsan_release(&tsan_block_start_);
  go_to(next_fiber());
  if (exited_ < threads_in_block_ && !launch_->failed) report_deadlock();
  if (launch_->failed) abandon_threads();
  tsan_acquire(&tsan_block_end_);
}

/// Makes all fibers fit for the next launch, wherever their threads were.
CUDA_CPU_NO_TSAN void BlockRunner::abandon_threads() {
  idle_count_ = 0;
  for (unsigned i = 0; i < fiber_count_; ++i) {
    tsan_become(fibers_[i]->tsan_identity());
    tsan_release(&tsan_block_end_);
    tsan_become(main_.tsan_identity());
    fibers_[i]->restart();
    idle_fibers_[idle_count_++] = fibers_[i];
  }
}

CUDA_CPU_NO_TSAN void BlockRunner::fiber_main() {
  BlockRunner& self = *runner;
  for (;;) {
    self.run_thread();
    const bool call_next = !kTsan && !self.ready_.head && self.started_ < self.threads_in_block_;
    if (call_next) continue;
    if (!kTsan) self.idle_fibers_[self.idle_count_++] = self.running_;
    self.go_to(self.next_fiber());
  }
}

CUDA_CPU_NO_TSAN void BlockRunner::run_thread() {
  Thread& self = threads_[started_];
  self.number = started_++;
  self.index = next_index_;
  if (++next_index_.x == blockDim.x) {
    next_index_.x = 0;
    if (++next_index_.y == blockDim.y) {
      next_index_.y = 0;
      ++next_index_.z;
    }
  }
  current_ = &self;
  threadIdx = self.index;
  tsan_acquire(&tsan_block_start_);
  AsyncCopies& copies = async_copies_[self.number];
  if (!copies.queue.empty() || !copies.batches.empty()) copies = {};

  launch_->kernel.run(launch_->kernel.arguments);

  copies.land(copies.queue.size());
  tsan_release(&tsan_block_end_);
  thread_exited();
}

CUDA_CPU_NO_TSAN void BlockRunner::thread_exited() {
  Thread& self = *current_;
  if (exited_++ == 0) first_exited_ = &self;
  if (barrier_.arrived > 0) {
    Message message = begin_message();
    message.add_wait(*barrier_.waiting.head, barrier_.operation, barrier_.site);
    message.add(", but ");
    message.add_thread(self);
    message.add(" has exited");
    fail(message);
  }
  Warp& warp = warps_[self.number / 32];
  warp.live &= ~(1u << self.number % 32);
  for (int i = 0; i < warp.group_count; ++i) {
    WarpGroup& group = warp.groups[i];
    if (group.arrived && group.arrived == (group.mask & warp.live)) complete(warp, group);
  }
}

CUDA_CPU_NO_TSAN Fiber& BlockRunner::fiber_for_next_thread() {
  if (kTsan ? started_ == fiber_count_ : idle_count_ == 0) {
    // For ThreadSanitizer a fiber is ordered after its creator: that must not be a CUDA thread.
    tsan_become(main_.tsan_identity());
    Fiber* fiber = new Fiber(fiber_main, fiber_count_);
    tsan_become(running_->tsan_identity());
    fibers_[fiber_count_++] = fiber;
    return *fiber;
  }
  return kTsan ? *fibers_[started_] : *idle_fibers_[--idle_count_];
}

/// Whatever can go on: a thread that waits no more, a thread that has not started, or else the
/// worker itself.
CUDA_CPU_NO_TSAN Fiber& BlockRunner::next_fiber() {
  if (ready_.head) {
    Thread* thread = ready_.pop();
    if (ready_.head) __builtin_prefetch(ready_.head->fiber->resume_point());
    return *thread->fiber;
  }
  if (started_ < threads_in_block_) return fiber_for_next_thread();
  return main_;
}

CUDA_CPU_NO_TSAN void BlockRunner::go_to(Fiber& fiber) {
  Fiber& from = *running_;
  running_ = &fiber;
  from.switch_to(fiber);
}

/// Suspends the current thread, which some queue or group must know, and resumes as that thread.
CUDA_CPU_NO_TSAN void BlockRunner::wait() {
  Thread& self = *current_;
  self.fiber = running_;
  go_to(next_fiber());
  current_ = &self;
  threadIdx = self.index;
}

CUDA_CPU_NO_TSAN void BlockRunner::yield() {
  if (started_ == threads_in_block_ && !ready_.head) return;
  Thread& self = *current_;
  if (started_ == threads_in_block_) {
    ready_.push(&self);
    wait();
    return;
  }
  self.fiber = running_;
  ready_.push(&self);
  go_to(fiber_for_next_thread());
  current_ = &self;
  threadIdx = self.index;
}

// ---- Barriers ----------------------------------------------------------------------------------

CUDA_CPU_NO_TSAN int BlockRunner::block_barrier(int predicate, const char* operation,
                                                const Site& site) {
  Thread& self = *current_;
  BlockBarrier& barrier = barrier_;
  if (exited_ > 0) {
    Message message = begin_message();
    message.add_wait(self, operation, site);
    message.add(", but ");
    message.add_thread(*first_exited_);
    message.add(" has exited");
    fail(message);
  }
  if (barrier.arrived == 0) {
    barrier.operation = operation;
    barrier.site = site;
  } else if (!same_site(barrier.site, site)) {
    Message message = begin_message();
    message.add_wait(*barrier.waiting.head, barrier.operation, barrier.site);
    message.add(", but ");
    message.add_wait(self, operation, site);
    fail(message);
  }
  barrier.predicates += predicate != 0;
  void* const passed = &barrier.tsan.passed[barrier.tsan.phase];
  tsan_release(&barrier.tsan.arrived);
  if (++barrier.arrived < threads_in_block_) {
    barrier.waiting.push(&self);
    wait();
    tsan_acquire(passed);
    return barrier.result;
  }
  tsan_acquire(&barrier.tsan.arrived);
  tsan_release(passed);
  barrier.tsan.phase ^= 1;
  barrier.result = barrier.predicates;
  barrier.predicates = 0;
  barrier.arrived = 0;
  ready_.take_all(barrier.waiting);
  return barrier.result;
}

CUDA_CPU_NO_TSAN void BlockRunner::warp_meet(unsigned mask, Combine* combine, void* operand,
                                             const char* operation, const Site& site) {
  Thread& self = *current_;
  Warp& warp = warps_[self.number / 32];
  const unsigned lane = self.number % 32;
  if (!(mask >> lane & 1)) {
    Message message = begin_message();
    message.add_thread(self);
    message.add(" is not in the mask 0x%08x of its own %s at %s:%d (%s)", mask, operation,
                site.file, site.line, site.function);
    fail(message);
  }

  WarpGroup& group = group_for(warp, mask);
  if (!group.arrived) {
    group.combine = combine;
    group.operation = operation;
    group.site = site;
  } else if (group.combine != combine) {
    Message message = begin_message();
    message.add_wait(thread_of(warp, __builtin_ctz(group.arrived)), group.operation, group.site);
    message.add(", but with the same mask ");
    message.add_wait(self, operation, site);
    fail(message);
  }

  group.operands[lane] = operand;
  group.arrived |= 1u << lane;
  void* const passed = &group.tsan.passed[group.tsan.phase];
  tsan_release(&group.tsan.arrived);
  if (group.arrived == (mask & warp.live)) {
    complete(warp, group);
  } else {
    wait();
    tsan_acquire(passed);
  }
}

CUDA_CPU_NO_TSAN WarpGroup& BlockRunner::group_for(Warp& warp, unsigned mask) {
  for (int i = 0; i < warp.group_count; ++i) {
    if (warp.groups[i].mask == mask) return warp.groups[i];
  }
  int place = warp.group_count;
  if (place < 32) {
    ++warp.group_count;
  } else {
    while (warp.groups[--place].arrived) continue;
  }
  warp.groups[place].mask = mask;
  warp.groups[place].arrived = 0;
  return warp.groups[place];
}

/// Runs the operation that all lanes of the group have arrived at, in the name of the current
/// thread, and lets the other lanes go on.
CUDA_CPU_NO_TSAN void BlockRunner::complete(Warp& warp, WarpGroup& group) {
  tsan_acquire(&group.tsan.arrived);
  if (group.combine) group.combine(group.operands, group.arrived);
  tsan_release(&group.tsan.passed[group.tsan.phase]);
  group.tsan.phase ^= 1;
  for (unsigned lanes = group.arrived; lanes; lanes &= lanes - 1) {
    Thread& thread = thread_of(warp, __builtin_ctz(lanes));
    if (&thread != current_) ready_.push(&thread);
  }
  group.arrived = 0;
}

CUDA_CPU_NO_TSAN Thread& BlockRunner::thread_of(const Warp& warp, unsigned lane) {
  return threads_[(&warp - warps_) * 32 + lane];
}

// ---- Shared memory -----------------------------------------------------------------------------

/// Exactly `size` bytes, so that AddressSanitizer sees the first byte beyond. Acts in the name of
/// the worker for ThreadSanitizer: no CUDA thread has written this memory.
CUDA_CPU_NO_TSAN void BlockRunner::allocate(SharedStorage& storage, const void* key,
                                            std::size_t size, std::size_t alignment) {
  void* const caller = tsan_current();
  void* const worker = main_.tsan_identity();
  if (caller != worker) tsan_become(worker);
  storage = {key, nullptr, size};
  if (posix_memalign(&storage.data, std::max<std::size_t>(128, alignment), size) != 0) {
    std::fputs("cuda_cpu: no memory for shared memory\n", stderr);
    std::abort();
  }
  std::memset(storage.data, 0xFF, size);
  tsan_release(storage.data);
  if (caller != worker) tsan_become(caller);
}

CUDA_CPU_NO_TSAN void BlockRunner::begin_shared_memory() {
  std::memset(dynamic_shared_.data, 0xFF, dynamic_shared_.size);
  for (int i = 0; i < static_shared_count_; ++i) {
    std::memset(static_shared_[i].data, 0xFF, static_shared_[i].size);
  }
}

void BlockRunner::end_shared_memory() {
  std::free(dynamic_shared_.data);
  for (int i = 0; i < static_shared_count_; ++i) std::free(static_shared_[i].data);
  static_shared_count_ = 0;
}

CUDA_CPU_NO_TSAN void* BlockRunner::static_shared_storage(const void* key, std::size_t size,
                                                          std::size_t alignment) {
  std::size_t total = size;
  for (int i = 0; i < static_shared_count_; ++i) {
    if (static_shared_[i].key == key) {
      tsan_acquire(static_shared_[i].data);
      return static_shared_[i].data;
    }
    total += static_shared_[i].size;
  }
  if (total > kDefaultSharedBytes) {
    cuda_cpu::fail("%zu bytes of static shared memory exceed the limit of %zu", total,
                   kDefaultSharedBytes);
  }
  if (static_shared_count_ == kMaxStaticShared) {
    cuda_cpu::fail("more than %d __shared__ declarations in a kernel", kMaxStaticShared);
  }
  SharedStorage& storage = static_shared_[static_shared_count_++];
  allocate(storage, key, size, alignment);
  tsan_acquire(storage.data);
  return storage.data;
}

// ---- Errors ------------------------------------------------------------------------------------

Message BlockRunner::begin_message() const {
  const Site& site = launch_->config.site;
  Message message;
  message.add("cuda_cpu: kernel launched at %s:%d, block (%u,%u,%u): ", site.file, site.line,
              blockIdx.x, blockIdx.y, blockIdx.z);
  return message;
}

/// Prints the message unless the launch has already failed elsewhere.
void BlockRunner::report(const Message& message) {
  if (!launch_->failed.exchange(true)) std::fprintf(stderr, "%s\n", message.text());
}

CUDA_CPU_NO_TSAN void BlockRunner::fail(const Message& message) {
  report(message);
  go_to(main_);
  __builtin_unreachable();
}

void BlockRunner::fail_in_thread(const char* format, va_list arguments) {
  Message message = begin_message();
  message.add_thread(*current_);
  message.add(": ");
  message.add_list(format, arguments);
  fail(message);
}

/// All threads that are left wait, but for different things.
CUDA_CPU_NO_TSAN void BlockRunner::report_deadlock() {
  Message message = begin_message();
  message.add("deadlock: ");
  int parties = 0;
  const auto add_party = [&](const Thread& thread, const char* operation, const Site& site) {
    if (++parties > 2) return;
    if (parties == 2) message.add(", but ");
    message.add_wait(thread, operation, site);
  };
  if (barrier_.arrived > 0) {
    add_party(*barrier_.waiting.head, barrier_.operation, barrier_.site);
  }
  for (unsigned first = 0; first < threads_in_block_; first += 32) {
    const Warp& warp = warps_[first / 32];
    for (int i = 0; i < warp.group_count; ++i) {
      const WarpGroup& group = warp.groups[i];
      if (!group.arrived) continue;
      add_party(thread_of(warp, __builtin_ctz(group.arrived)), group.operation, group.site);
    }
  }
  report(message);
}

// ---- Launches ----------------------------------------------------------------------------------

/// Shows how far a launch is, in one line on a terminal that the destructor erases.
class Progress {
 public:
  explicit Progress(const Launch& launch) : launch_(launch), terminal_(isatty(STDERR_FILENO)) {}

  ~Progress() {
    if (shown_) std::fputs("\r\033[K", stderr);
  }

  void update() {
    using namespace std::chrono_literals;
    if (!terminal_ || std::chrono::steady_clock::now() - start_ < 2s) return;
    shown_ = true;
    std::fprintf(stderr, "\r%3d%% of the blocks",
                 static_cast<int>(100 * launch_.blocks_done / launch_.blocks));
    std::fflush(stderr);
  }

 private:
  const Launch& launch_;
  const bool terminal_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  bool shown_ = false;
};

cudaError_t check(const LaunchConfig& config, const void* function) {
  const dim3 grid = config.grid;
  const dim3 block = config.block;
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  if (grid.x == 0 || grid.x > 0x7FFFFFFF || grid.y == 0 || grid.y > 65535 || grid.z == 0 ||
      grid.z > 65535) {
    return cudaErrorInvalidConfiguration;
  }
  if (threads == 0 || block.x > kMaxThreadsPerBlock || block.y > kMaxThreadsPerBlock ||
      block.z > 64 || threads > kMaxThreadsPerBlock) {
    return cudaErrorInvalidConfiguration;
  }
  DeviceState& state = device();
  std::lock_guard lock(state.mutex);
  const auto limit = state.dynamic_shared_limits.find(function);
  const std::size_t allowed =
      limit == state.dynamic_shared_limits.end() ? kDefaultSharedBytes : limit->second;
  return config.shared_bytes > allowed ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace

void execute(const LaunchConfig& config, const BoundKernel& kernel) {
  if (result(check(config, kernel.function)) != cudaSuccess) return;
  WorkerPool& pool = WorkerPool::instance();
  const dim3 grid = config.grid;
  const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  const int workers = static_cast<int>(std::min<std::uint64_t>(blocks, pool.size()));
  Launch launch{config, kernel, blocks, workers};
  Progress progress(launch);
  pool.run(
      workers,
      [&](int worker) {
        if (!runner) runner = new BlockRunner(worker);
        runner->run(launch);
      },
      [&] { progress.update(); });
  if (launch.failed) device().broken = true;
}

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  if (!runner) {
    std::fputs("cuda_cpu: device code called by the host: ", stderr);
    std::vfprintf(stderr, format, arguments);
    std::fputc('\n', stderr);
    std::abort();
  }
  runner->fail_in_thread(format, arguments);
}

int block_barrier(int predicate, const char* operation, Site site) {
  return runner->block_barrier(predicate, operation, site);
}

void warp_meet(unsigned mask, Combine* combine, void* operand, const char* operation, Site site) {
  runner->warp_meet(mask, combine, operand, operation, site);
}

CUDA_CPU_NO_TSAN unsigned lane_id() { return runner->lane_id(); }

CUDA_CPU_NO_TSAN unsigned live_lanes() { return runner->live_lanes(); }

void yield() { runner->yield(); }

CUDA_CPU_NO_TSAN AsyncCopies& async_copies() { return runner->async_copies(); }

void AsyncCopies::land(std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const AsyncCopy& copy = queue[i];
    char* const target = static_cast<char*>(copy.target);
    const std::size_t copied = copy.size - copy.zero_fill;
    std::memcpy(target, copy.source, copied);
    std::memset(target + copied, 0, copy.zero_fill);
  }
  queue.erase(queue.begin(), queue.begin() + static_cast<std::ptrdiff_t>(count));
}

void* static_shared_storage(const void* key, std::size_t size, std::size_t alignment) {
  return runner->static_shared_storage(key, size, alignment);
}

CUDA_CPU_NO_TSAN void* dynamic_shared_storage() { return runner->dynamic_shared_storage(); }

}  // namespace cuda_cpu
