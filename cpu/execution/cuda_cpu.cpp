#include "cpu/execution/cuda_cpu.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/execution/execution.h"
#include "cpu/execution/fiber.h"
#include "cpu/execution/worker_pool.h"
#include "cpu/hopper/phase_barrier.h"
#include "cpu/order/fences.h"
#include "cpu/order/stream_order.h"
#include "cpu/runtime/capture.h"
#include "cpu/runtime/device_state.h"
#include "cpu/runtime/environment.h"
#include "cpu/watch/hooks.h"
#include "cpu/watch/ledger.h"
#include "cpu/watch/repeats.h"

constinit thread_local uint3 threadIdx = {};
constinit thread_local uint3 blockIdx = {};
constinit thread_local dim3 blockDim = {0, 0, 0};
constinit thread_local dim3 gridDim = {0, 0, 0};

namespace cuda_cpu {

constinit thread_local Runner* runner = nullptr;

namespace {

/// Not null while a kernel is asked for its attributes.
constinit thread_local KernelDescription* asked = nullptr;

CUDA_CPU_NO_TSAN bool same_site(const Site& a, const Site& b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

/// memset(memory, 0xFF, size) that ThreadSanitizer does not see: it happens between the threads of
/// one block and those of the next.
CUDA_CPU_NO_TSAN void poison(void* memory, std::size_t size) {
#if defined(CUDA_CPU_TSAN) && defined(__x86_64__)
  asm volatile("rep stosb" : "+D"(memory), "+c"(size) : "a"(0xFF) : "memory");
#else
  if (size > 0) std::memset(memory, 0xFF, size);
#endif
}

}  // namespace

// ---- Messages ----------------------------------------------------------------------------------

void Message::add(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  add_list(format, arguments);
  va_end(arguments);
}

void Message::add_list(const char* format, va_list arguments) {
  const int added = std::vsnprintf(text_ + used_, sizeof text_ - used_, format, arguments);
  used_ = std::min(sizeof text_ - 1, used_ + std::max(0, added));
}

void Message::add_thread(const Thread& thread) {
  add("thread (%u,%u,%u)", thread.index.x, thread.index.y, thread.index.z);
}

void Message::add_wait(const Thread& thread, const char* operation, const Site& site) {
  add_thread(thread);
  add(" waits in %s at %s:%d (%s)", operation, site.file, site.line, site.function);
}

namespace {
char current_row[101] = "";
}

void set_row(const char* name) {
  // As a sanitizer would want it: nobody sets a row while a kernel runs.
  std::snprintf(current_row, sizeof current_row, "%s", name);
}
const char* row() { return current_row; }

// ---- Blocks and threads ------------------------------------------------------------------------

Block::Block()
    : threads(new Thread[kMaxThreadsPerBlock]),
      async_copies(new AsyncCopies[kMaxThreadsPerBlock]),
      warps(new Warp[kMaxThreadsPerBlock / 32]()),
      barrier(),
      tsan_start(0),
      tsan_end() {
  tsan_last = nullptr;
  for (void*& engine : tsan_engine) engine = nullptr;
#if defined(CUDA_CPU_TSAN)
  tsan_last = __tsan_create_fiber(0);
  for (void*& engine : tsan_engine) engine = __tsan_create_fiber(0);
#endif
}

Block::~Block() {
#if defined(CUDA_CPU_TSAN)
  __tsan_destroy_fiber(tsan_last);
  for (void* engine : tsan_engine) __tsan_destroy_fiber(engine);
#endif
}

void Runner::run(Launch& launch) {
  launch_ = &launch;
  const dim3 block = launch.config.block;
  threads_in_block_ = block.x * block.y * block.z;
  blockDim = block;
  gridDim = launch.config.grid;
  own_cluster_ = static_cast<std::uint64_t>(worker_);
  declared_.clear();
  static_bytes_ = 0;
  declare(nullptr, launch.config.shared_bytes, 1024);
  Launch::Worker& state = launch.states[static_cast<std::size_t>(worker_)];
  if (kTsan) {
    // New identities, where a thread of this launch is not ordered after one of a launch before.
    const bool follows = !last_order_ || always_follows(launch.order, *last_order_) ||
                         last_waits_ != times_host_waited_for_all();
    if (!follows) forget_blocks();
    if (!follows || launch.config.early) {
      for (Fiber* fiber : fibers_) {
        if (fiber) fiber->stale = true;
      }
    }
    last_order_ = launch.order.shared_from_this();
    last_waits_ = times_host_waited_for_all();
  }

  while (!launch.failed && wait_for_room() && start_cluster()) {
    state.idle.store(false);
    go_to(next_unwatched());
    if (!resident_.empty() && !launch.failed) report_deadlock();
    if (launch.failed) abandon_threads();
  }
  state.idle.store(true);
  current_ = nullptr;
  for (const auto& block : slots_) end_shared_memory(*block);
}

CUDA_CPU_NO_TSAN Block& Runner::take_slot() {
  if (free_slots_.empty()) {
    slots_.push_back(std::make_unique<Block>());
    slots_.back()->slot = static_cast<unsigned>(slots_.size() - 1);
    free_slots_.push_back(slots_.back().get());
  }
  // The first free one, so that few are in use.
  const auto first = std::min_element(free_slots_.begin(), free_slots_.end(),
                                      [](Block* a, Block* b) { return a->slot < b->slot; });
  Block& block = **first;
  free_slots_.erase(first);
  return block;
}

/// Takes the next blocks of the launch; false if there are none.
CUDA_CPU_NO_TSAN bool Runner::start_cluster() {
  // Under ThreadSanitizer neighbouring blocks run on different OS threads, for sure.
  const std::uint64_t number = kTsan
                                   ? std::exchange(own_cluster_, own_cluster_ + launch_->workers)
                                   : launch_->next_cluster.fetch_add(1, std::memory_order_relaxed);
  const unsigned size = launch_->cluster_size;
  if (number * size >= launch_->blocks) {
    launch_->resident.fetch_sub(size);
    return false;
  }
  void* const caller = tsan_current();
  tsan_become(main_.tsan_identity());

  if (free_clusters_.empty()) {
    clusters_.push_back(std::make_unique<Cluster>());
    free_clusters_.push_back(clusters_.back().get());
  }
  Cluster& cluster = *free_clusters_.back();
  free_clusters_.pop_back();
  cluster.blocks.clear();
  cluster.blocks_ended = cluster.arrived = 0;
  cluster.phase = 0;
  cluster.waiting = {};

  const dim3 grid = gridDim;
  for (unsigned rank = 0; rank < size; ++rank) {
    const std::uint64_t at = number * size + rank;
    Block& block = take_slot();
    block.index = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                   static_cast<unsigned>(at / grid.x / grid.y)};
    block.rank = rank;
    block.cluster = &cluster;
    cluster.blocks.push_back(&block);
    block.started = block.exited = 0;
    block.fenced[0] = block.fenced[1] = false;
    block.fresh_fence[0] = block.fresh_fence[1] = false;
    block.next_index = {0, 0, 0};
    block.barrier.waiting = {};
    block.barrier.arrived = 0;
    block.barrier.predicates = 0;
    block.phase_copies.clear();
    for (unsigned first = 0; first < threads_in_block_; first += 32) {
      const unsigned lanes = std::min(32u, threads_in_block_ - first);
      block.warps[first / 32].live = ~0u >> (32 - lanes);
      block.warps[first / 32].group_count = 0;
    }
    reset_hopper(block);
    if (kTsan) {
      // For ThreadSanitizer a block's shared memory is new: nobody has read or written it.
      end_shared_memory(block);
    } else {
      for (SharedStorage& storage : block.shared) poison(storage.data, storage.size);
    }
    storage_of(block, 0);
    resident_.push_back(&block);
    unstarted_.push_back(&block);
    tsan_release(&block.tsan_start);
  }
  tsan_become(caller);
  return true;
}

/// What ThreadSanitizer knows of blocks that have run, and of who acted for them.
void Runner::forget_blocks() {
  const Unwatched bookkeeping;
  free_slots_.clear();
  slots_.clear();
  free_clusters_.clear();
  clusters_.clear();
}

/// Makes all fibers fit for the next launch, wherever their threads were.
CUDA_CPU_NO_TSAN void Runner::abandon_threads() {
  idle_fibers_.clear();
  for (Fiber* fiber : fibers_) {
    if (!fiber) continue;
    tsan_become(fiber->tsan_identity());
    tsan_release(launch_end(launch_->order, launch_->number));
    tsan_become(main_.tsan_identity());
    fiber->stale = true;
    idle_fibers_.push_back(fiber);
  }
  for (Block* block : resident_) {
    reset_hopper(*block);
    free_slots_.push_back(block);
    if (block->rank == 0) free_clusters_.push_back(block->cluster);
  }
  resident_.clear();
  unstarted_.clear();
  first_unstarted_ = 0;
  ready_ = stepping_ = spinning_ = {};
}

CUDA_CPU_NO_TSAN bool Runner::any_unstarted() { return first_unstarted_ < unstarted_.size(); }

CUDA_CPU_NO_TSAN void Runner::fiber_main() {
  Runner& self = *runner;
  for (;;) {
    self.run_thread();
    const bool call_next = !kTsan && !self.ready_.head && self.any_unstarted();
    if (call_next) continue;
    if (!kTsan) self.idle_fibers_.push_back(self.running_);
    self.go_to(self.next_unwatched());
  }
}

CUDA_CPU_NO_TSAN void Runner::run_thread() {
  Block& block = *unstarted_[first_unstarted_];
  Thread& self = block.threads[block.started];
  self.begin(block, block.next_index, block.started++);
  if (block.started == threads_in_block_ && ++first_unstarted_ == unstarted_.size()) {
    unstarted_.clear();
    first_unstarted_ = 0;
  }
  uint3& next = block.next_index;
  if (++next.x == blockDim.x) {
    next.x = 0;
    if (++next.y == blockDim.y) {
      next.y = 0;
      ++next.z;
    }
  }
  current_ = &self;
  threadIdx = self.index;
  blockIdx = block.index;
  tsan_acquire(&block.tsan_start);
  tsan_acquire(&launch_->order.begins);
  AsyncCopies& copies = block.async_copies[self.number];
  copies.clear();
  choose_hook_use();

  frame_begins(launch_->order);
  launch_->kernel.run(launch_->kernel.arguments);
  frame_ends();

  copies.end();
  tsan_release(&block.tsan_end[launch_->number % 4]);
  thread_exited();
}

CUDA_CPU_NO_TSAN void Runner::thread_exited() {
  const Unwatched bookkeeping;
  Thread& self = *current_;
  Block& block = *self.block;
  self.exited = true;
  progressed();
  if (block.exited++ == 0) block.first_exited = &self;
  BlockBarrier& barrier = block.barrier;
  if (barrier.arrived > 0) {
    barrier_without(self, *barrier.waiting.head, barrier.operation, barrier.site);
    if (barrier.arrived + block.exited == threads_in_block_) all_have_come(block);
  }
  Warp& warp = block.warps[self.number / 32];
  warp.live &= ~(1u << self.number % 32);
  for (int i = 0; i < warp.group_count; ++i) {
    WarpGroup& group = warp.groups[i];
    if (group.arrived && group.arrived == (group.mask & warp.live)) complete(block, warp, group);
  }
  if (block.hopper && !may_end(self, nullptr)) {
    Message message = begin_message(block);
    may_end(self, &message);
    fail(message);
  }
  if (launch_->cluster_size > 1) thread_left_cluster(*this, self);
  if (block.exited == threads_in_block_) block_ended(block);
}

CUDA_CPU_NO_TSAN void Runner::block_ended(Block& block) {
  requests_of_block_end(block, true);
  if (block.hopper && !may_end(block, nullptr)) {
    Message message = begin_message(block);
    may_end(block, &message);
    fail(message);
  }
  {
    void* const caller = tsan_current();
    tsan_become(block.tsan_last);
    tsan_acquire(&block.tsan_end[launch_->number % 4]);
    tsan_release(launch_end(launch_->order, launch_->number));
    tsan_become(caller);
  }
  launch_->blocks_done.fetch_add(1, std::memory_order_relaxed);
  Cluster& cluster = *block.cluster;
  if (++cluster.blocks_ended < cluster.blocks.size()) return;
  for (Block* each : cluster.blocks) {
    resident_.erase(std::find(resident_.begin(), resident_.end(), each));
    free_slots_.push_back(each);
  }
  free_clusters_.push_back(&cluster);
  launch_->resident.fetch_sub(launch_->cluster_size, std::memory_order_relaxed);
}

CUDA_CPU_NO_TSAN Fiber& Runner::fiber_for_next_thread() {
  const Block& block = *unstarted_[first_unstarted_];
  const std::size_t own = std::size_t{block.slot} * kMaxThreadsPerBlock + block.started;
  const bool missing = kTsan ? own >= fibers_.size() || !fibers_[own] : idle_fibers_.empty();
  Fiber* fiber = nullptr;
  if (!missing) fiber = kTsan ? fibers_[own] : idle_fibers_.back();
  if (missing || fiber->stale) {
    // For ThreadSanitizer a fiber is ordered after its creator: that must not be a CUDA thread.
    void* const caller = tsan_current();
    tsan_become(main_.tsan_identity());
    if (missing) {
      fiber = new Fiber(fiber_main, fibers_.size());
    } else {
      fiber->restart();
    }
    tsan_become(caller);
  }
  if (!kTsan) {
    (missing ? fibers_.push_back(fiber) : idle_fibers_.pop_back());
  } else if (missing) {
    if (own >= fibers_.size()) fibers_.resize(own + 1);
    fibers_[own] = fiber;
  }
  return *fiber;
}

/// Whatever can go on: a thread that waits no more, a thread that has not started, one for which
/// the copy engine has done something, one that looks whether others have; or else the worker
/// itself.
CUDA_CPU_NO_TSAN Fiber& Runner::next_fiber() {
  for (;;) {
    if (launch_->failed.load(std::memory_order_relaxed)) return main_;
    if (ready_.head) {
      Thread* thread = ready_.pop();
      if (ready_.head) __builtin_prefetch(ready_.head->fiber->resume_point());
      return *thread->fiber;
    }
    if (any_unstarted()) return fiber_for_next_thread();
    if (stepping_.head) {
      ready_.take_all(stepping_);
      continue;
    }
    if (land_one(*this)) {
      idle_rounds_ = 0;
      continue;
    }
    if (!spinning_.head || launch_->failed) return main_;
    if (take_room() && start_cluster()) continue;
    if (!spin_once()) return main_;
  }
}

CUDA_CPU_NO_TSAN Fiber& Runner::next_unwatched() {
  const Unwatched bookkeeping;
  return next_fiber();
}

/// Takes the room of one more cluster on the device, if there is any. Under ThreadSanitizer each
/// worker has a share of it, of as many clusters as it has of the first that fit on the device.
CUDA_CPU_NO_TSAN bool Runner::take_room() {
  const unsigned size = launch_->cluster_size;
  if (kTsan) {
    const auto own = static_cast<unsigned>(worker_);
    const auto workers = static_cast<unsigned>(launch_->workers);
    const unsigned share = (launch_->capacity / size + workers - 1 - own) / workers;
    if (resident_.size() / size >= share) return false;
  }
  if (launch_->resident.fetch_add(size) + size <= launch_->capacity || kTsan) return true;
  launch_->resident.fetch_sub(size);
  return false;
}

/// The same as soon as blocks of other workers have ended; false if the launch ends before.
CUDA_CPU_NO_TSAN bool Runner::wait_for_room() {
  while (!take_room()) {
    if (launch_->failed || launch_->next_cluster * launch_->cluster_size >= launch_->blocks) {
      return false;
    }
    launch_->states[static_cast<std::size_t>(worker_)].idle.store(true);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

/// Something has happened that others may be waiting for.
CUDA_CPU_NO_TSAN void Runner::progressed() {
  Launch::Worker& state = launch_->states[static_cast<std::size_t>(worker_)];
  state.progress.store(++progress_, std::memory_order_relaxed);
  if (state.idle.load(std::memory_order_relaxed)) state.idle.store(false);
}

/// Lets those look again who wait for what others do; false if nobody does anything any more.
CUDA_CPU_NO_TSAN bool Runner::spin_once() {
  constexpr unsigned kRounds = 1000;
  launch_->states[static_cast<std::size_t>(worker_)].idle.store(true);
  std::uint64_t progress = 0;
  bool all_idle = true;
  for (const Launch::Worker& worker : launch_->states) {
    progress += worker.progress.load();
    all_idle = all_idle && worker.idle.load();
  }
  if (progress != seen_progress_ || !all_idle) idle_rounds_ = 0;
  seen_progress_ = progress;
  if (++idle_rounds_ > kRounds) return false;
  if (kTsan) {
    std::this_thread::yield();  // its sleep takes long
  } else if (idle_rounds_ > 16 || !all_idle) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  ready_.take_all(spinning_);
  return true;
}

CUDA_CPU_NO_TSAN void Runner::go_to(Fiber& fiber) {
  if (&fiber == running_) return;
  Fiber& from = *running_;
  running_ = &fiber;
  from.switch_to(fiber);
}

CUDA_CPU_NO_TSAN void Runner::wait(const char* operation, const Site& site, const void* object,
                                   unsigned detail) {
  Thread& self = *current_;
  if (spinning_.tail != &self || !spinning_.head) progressed();
  self.operation = operation;
  self.site = site;
  self.object = object;
  self.detail = detail;
  self.fiber = running_;
  go_to(next_unwatched());
  self.operation = nullptr;
  current_ = &self;
  threadIdx = self.index;
  blockIdx = self.block->index;
}

CUDA_CPU_NO_TSAN void Runner::spin(const char* operation, const Site& site, const void* object) {
  spinning_.push(current_);
  wait(operation, site, object);
}

/// An access to a volatile variable comes: first the other threads come to one of theirs, or to
/// something that they wait for.
CUDA_CPU_NO_TSAN void Runner::step() {
  Thread& self = *current_;
  stepping_.push(&self);
  self.fiber = running_;
  go_to(next_unwatched());
  current_ = &self;
  threadIdx = self.index;
  blockIdx = self.block->index;
}

// ---- Barriers ----------------------------------------------------------------------------------

/// A thread waits at a barrier to which another one does not come, since it has ended: an error for
/// our own kernels. In a reader's own the barrier goes on without that thread, as on GPUs since
/// Volta, and it is noted.
CUDA_CPU_NO_TSAN void Runner::barrier_without(const Thread& ended, const Thread& waits,
                                              const char* operation, const Site& site) {
  const Unwatched bookkeeping;
  Message message = begin_message(*ended.block);
  message.add_wait(waits, operation, site);
  message.add(", but ");
  message.add_thread(ended);
  message.add(" has exited");
  if (!keeps_ledger()) fail(message);
  ledger_left_out(message.text(), site);
}

CUDA_CPU_NO_TSAN int Runner::block_barrier(int predicate, const char* operation, const Site& site) {
  Thread& self = *current_;
  Block& block = *self.block;
  BlockBarrier& barrier = block.barrier;
  if (block.exited > 0) barrier_without(*block.first_exited, self, operation, site);
  if (barrier.arrived == 0) {
    barrier.operation = operation;
    barrier.site = site;
  } else if (!same_site(barrier.site, site)) {
    Message message = begin_message(block);
    message.add_wait(*barrier.waiting.head, barrier.operation, barrier.site);
    message.add(", but ");
    message.add_wait(self, operation, site);
    fail(message);
  }
  barrier.predicates += predicate != 0;
  count_barrier();
  void* const passed = &barrier.tsan.passed[barrier.tsan.phase];
  tsan_release(&barrier.tsan.arrived);
  if (++barrier.arrived + block.exited < threads_in_block_) {
    barrier.waiting.push(&self);
    wait(operation, site);
    tsan_acquire(passed);
    return barrier.result;
  }
  all_have_come(block);
  return barrier.result;
}

/// Lets the threads go on that wait at the block's barrier. The calling thread is the last one that
/// came, or has ended.
CUDA_CPU_NO_TSAN void Runner::all_have_come(Block& block) {
  BlockBarrier& barrier = block.barrier;
  tsan_acquire(&barrier.tsan.arrived);
  tsan_release(&barrier.tsan.passed[barrier.tsan.phase]);
  barrier.tsan.phase ^= 1;
  barrier.result = barrier.predicates;
  barrier.predicates = 0;
  barrier.arrived = 0;
  if (block.hopper) threads_met(block, 0, 0);
  requests_of_block_end(block, false);
  ready_.take_all(barrier.waiting);
}

CUDA_CPU_NO_TSAN void Runner::warp_meet(unsigned mask, Combine* combine, void* operand,
                                        const char* operation, const Site& site) {
  Thread& self = *current_;
  Block& block = *self.block;
  Warp& warp = block.warps[self.number / 32];
  const unsigned lane = self.number % 32;
  if (!(mask >> lane & 1)) {
    Message message = begin_message(block);
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
  } else if (group.combine != combine ||
             (group.operation != operation && std::strcmp(group.operation, operation) != 0)) {
    Message message = begin_message(block);
    message.add_wait(thread_of(block, warp, __builtin_ctz(group.arrived)), group.operation,
                     group.site);
    message.add(", but with the same mask ");
    message.add_wait(self, operation, site);
    fail(message);
  }

  group.operands[lane] = operand;
  group.arrived |= 1u << lane;
  void* const passed = &group.tsan.passed[group.tsan.phase];
  if (!combine) tsan_release(&group.tsan.arrived);
  if (group.arrived == (mask & warp.live)) {
    complete(block, warp, group);
  } else {
    wait(operation, site);
    if (!combine) tsan_acquire(passed);
  }
}

CUDA_CPU_NO_TSAN WarpGroup& Runner::group_for(Warp& warp, unsigned mask) {
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
CUDA_CPU_NO_TSAN void Runner::complete(Block& block, Warp& warp, WarpGroup& group) {
  if (group.combine) {
    // Exchanges registers, and orders nothing in memory.
    const Unwatched registers;
    const Uncounted operands;
    group.combine(group.operands, group.arrived);
  } else {
    tsan_acquire(&group.tsan.arrived);
    tsan_release(&group.tsan.passed[group.tsan.phase]);
    group.tsan.phase ^= 1;
    const auto warp_number = static_cast<unsigned>(&warp - block.warps.get());
    if (block.hopper) threads_met(block, 32 * warp_number, group.arrived);
  }
  if (group.arrived == warp.live) {
    requests_of_warp_end(block, 32 * static_cast<unsigned>(&warp - block.warps.get()));
  }
  for (unsigned lanes = group.arrived; lanes; lanes &= lanes - 1) {
    Thread& thread = thread_of(block, warp, __builtin_ctz(lanes));
    if (&thread != current_) ready_.push(&thread);
  }
  group.arrived = 0;
}

CUDA_CPU_NO_TSAN Thread& Runner::thread_of(Block& block, const Warp& warp, unsigned lane) {
  return block.threads[static_cast<std::size_t>(&warp - block.warps.get()) * 32 + lane];
}

// ---- Shared memory -----------------------------------------------------------------------------

/// A declaration's number. Each has an address in the window of shared memory, the same in all
/// blocks: the dynamic one first.
CUDA_CPU_NO_TSAN std::size_t Runner::declare(const void* key, std::size_t size,
                                             std::size_t alignment) {
  std::size_t window = 0;
  if (!declared_.empty()) window = declared_.back().window + declared_.back().size;
  declared_.push_back({key, size, alignment, (window + 1023) / 1024 * 1024});
  return declared_.size() - 1;
}

/// Exactly `size` bytes, so that AddressSanitizer sees the first byte beyond. Acts in the name of
/// the worker for ThreadSanitizer: no CUDA thread has written this memory.
CUDA_CPU_NO_TSAN SharedStorage& Runner::storage_of(Block& block, std::size_t declaration) {
  if (block.shared.size() <= declaration) block.shared.resize(declaration + 1);
  SharedStorage& storage = block.shared[declaration];
  if (storage.data) return storage;
  void* const caller = tsan_current();
  void* const worker = main_.tsan_identity();
  if (caller != worker) tsan_become(worker);
  const Declaration& of = declared_[declaration];
  void* data = nullptr;
  if (posix_memalign(&data, std::max<std::size_t>(128, of.alignment),
                     of.size + (keeps_ledger() && !kSanitized ? kGap : 0)) != 0) {
    std::fputs("cuda_cpu: no memory for shared memory\n", stderr);
    std::abort();
  }
  poison(data, of.size);
  storage = {static_cast<char*>(data), of.size};
  tsan_release(data);
  if (caller != worker) tsan_become(caller);
  return storage;
}

void Runner::end_shared_memory(Block& block) {
  const Unwatched bookkeeping;
  for (SharedStorage& storage : block.shared) std::free(storage.data);
  block.shared.clear();
}

CUDA_CPU_NO_TSAN void* Runner::dynamic_shared_storage() {
  SharedStorage& storage = storage_of(*current_->block, 0);
  tsan_acquire(storage.data);
  return storage.data;
}

CUDA_CPU_NO_TSAN void* Runner::static_shared_storage(const void* key, std::size_t size,
                                                     std::size_t alignment) {
  const Unwatched bookkeeping;
  std::size_t declaration = 1;
  while (declaration < declared_.size() && declared_[declaration].key != key) ++declaration;
  if (declaration == declared_.size()) {
    static_bytes_ += size;
    if (static_bytes_ > kDefaultSharedBytes) {
      cuda_cpu::fail("%zu bytes of static shared memory exceed the limit of %zu", static_bytes_,
                     kDefaultSharedBytes);
    }
    declare(key, size, alignment);
  }
  SharedStorage& storage = storage_of(*current_->block, declaration);
  tsan_acquire(storage.data);
  return storage.data;
}

CUDA_CPU_NO_TSAN bool Runner::find_shared(const Block& block, const void* pointer,
                                          SharedPlace& place) const {
  const char* const address = static_cast<const char*>(pointer);
  for (std::size_t i = 0; i < block.shared.size(); ++i) {
    const SharedStorage& storage = block.shared[i];
    if (!storage.data || address < storage.data || address >= storage.data + storage.size) continue;
    place = {i, static_cast<std::size_t>(address - storage.data)};
    return true;
  }
  return false;
}

CUDA_CPU_NO_TSAN char* Runner::shared_at(Block& block, const SharedPlace& place) {
  return storage_of(block, place.declaration).data + place.offset;
}

CUDA_CPU_NO_TSAN std::size_t Runner::window_address(const SharedPlace& place) const {
  return declared_[place.declaration].window + place.offset;
}

CUDA_CPU_NO_TSAN bool Runner::find_window(std::size_t address, SharedPlace& place) const {
  for (std::size_t i = 0; i < declared_.size(); ++i) {
    const Declaration& of = declared_[i];
    if (address < of.window || address >= of.window + of.size) continue;
    place = {i, address - of.window};
    return true;
  }
  return false;
}

// ---- Errors ------------------------------------------------------------------------------------

Message Runner::begin_message(const Block& block) const {
  const Site& site = launch_->config.site;
  Message message;
  message.add("cuda_cpu: kernel launched at %s:%d (%s", site.file, site.line,
              launch_->description.name);
  if (*row()) message.add(", row \"%s\"", row());
  message.add("), block (%u,%u,%u): ", block.index.x, block.index.y, block.index.z);
  return message;
}

/// Prints the message unless the launch has already failed elsewhere.
void Runner::report(const Message& message) {
  if (launch_->failed.exchange(true) || ledger_failed(message.text())) return;
  std::fprintf(stderr, "%s\n", message.text());
}

CUDA_CPU_NO_TSAN void Runner::fail(const Message& message) {
  report(message);
  go_to(main_);
  __builtin_unreachable();
}

void Runner::fail_launch(const Message& message) { report(message); }

void Runner::fail_in_thread(const char* format, va_list arguments, cudaError_t error) {
  if (!launch_->failed) launch_->error = error;
  Message message = begin_message(*current_->block);
  message.add_thread(*current_);
  message.add(": ");
  message.add_list(format, arguments);
  fail(message);
}

/// All threads that are left wait. Names one of those that wait in the same place for the same
/// thing, and says how many they are.
CUDA_CPU_NO_TSAN void Runner::report_deadlock() {
  struct Party {
    const Thread* first;
    unsigned count;
  };
  std::vector<Party> parties;
  unsigned blocks = 0;
  for (const Block* block : resident_) {
    bool counted = false;
    for (unsigned i = 0; i < block->started; ++i) {
      const Thread& thread = block->threads[i];
      if (thread.exited || !thread.operation) continue;
      blocks += !counted;
      counted = true;
      const auto same = std::find_if(parties.begin(), parties.end(), [&](const Party& party) {
        return party.first->block == block && party.first->operation == thread.operation &&
               party.first->object == thread.object && party.first->detail == thread.detail &&
               same_site(party.first->site, thread.site);
      });
      if (same == parties.end()) {
        parties.push_back({&thread, 1});
      } else {
        ++same->count;
      }
    }
  }
  if (parties.empty()) return;
  constexpr std::size_t kMost = 12;
  Message message = begin_message(*parties[0].first->block);
  // Threads that look again and again at memory may wait for who cannot go on here.
  const bool for_others = std::any_of(parties.begin(), parties.end(), [](const Party& party) {
    return party.first->seen_at && ledger_others_may_write(party.first->seen_at);
  });
  message.add("%s", spinning_.head && for_others ? "it may be for others: " : "deadlock: ");
  for (std::size_t i = 0; i < std::min(kMost, parties.size()); ++i) {
    const Thread& first = *parties[i].first;
    message.add("%s", i == 0 ? "" : i == 1 ? ", but " : ", and ");
    if (blocks > 1)
      message.add("of block (%u,%u,%u) ", first.block->index.x, first.block->index.y,
                  first.block->index.z);
    message.add_wait(first, first.operation, first.site);
    if (!describe_phase_wait(first, message)) describe_wait(first, message);
    if (first.purpose) message.add(" for %s", first.purpose);
    if (parties[i].count > 1) message.add(", like %u more", parties[i].count - 1);
  }
  if (parties.size() > kMost) message.add(", and more");
  if (spinning_.head && launch_->blocks > launch_->capacity) {
    message.add(
        "; the device holds %u blocks at a time, and the launch has %llu: more with"
        " CUDA_CPU_MULTIPROCESSORS",
        launch_->capacity, static_cast<unsigned long long>(launch_->blocks));
  }
  report(message);
}

namespace {

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

thread_local Message refusal;

/// Notes why a launch cannot be made.
__attribute__((format(printf, 4, 5))) cudaError_t refuse(cudaError_t error,
                                                         const LaunchConfig& config,
                                                         const char* kernel, const char* format,
                                                         ...) {
  const dim3 grid = config.grid, block = config.block;
  refusal.add(
      "%s, launched at %s:%d with %u x %u x %u blocks of %u x %u x %u threads and %zu bytes"
      " of dynamic shared memory: ",
      kernel, config.site.file, config.site.line, grid.x, grid.y, grid.z, block.x, block.y, block.z,
      config.shared_bytes);
  va_list arguments;
  va_start(arguments, format);
  refusal.add_list(format, arguments);
  va_end(arguments);
  return error;
}

/// With the errors that CUDA 13.0 has on an H200.
cudaError_t check(const LaunchConfig& config, const void* function,
                  const KernelDescription& description, unsigned cluster) {
  const dim3 grid = config.grid;
  const dim3 block = config.block;
  const char* const name = description.name;
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  refusal = Message();
  if (grid.x == 0 || grid.x > 0x7FFFFFFF || grid.y == 0 || grid.y > 65535 || grid.z == 0 ||
      grid.z > 65535) {
    return refuse(cudaErrorInvalidValue, config, name,
                  "a grid has at least one block, and at most 2147483647 x 65535 x 65535");
  }
  if (threads == 0 || block.x > kMaxThreadsPerBlock || block.y > kMaxThreadsPerBlock ||
      block.z > 64 || threads > kMaxThreadsPerBlock) {
    return refuse(cudaErrorInvalidValue, config, name,
                  "a block has at least one thread, and at most %u, of which 64 along z",
                  kMaxThreadsPerBlock);
  }
  if (description.bounds.threads > 0 && threads > description.bounds.threads) {
    return refuse(cudaErrorInvalidValue, config, name, "its __launch_bounds__ are %u threads",
                  description.bounds.threads);
  }
  if (grid.x % cluster != 0 || description.cluster.y != 1 || description.cluster.z != 1) {
    return refuse(cudaErrorInvalidClusterSize, config, name,
                  "the blocks along x are not whole clusters of %u", cluster);
  }
  if (cluster > static_cast<unsigned>(multiprocessors())) {
    return refuse(cudaErrorInvalidClusterSize, config, name,
                  "a cluster of %u blocks does not fit on a device of %d multiprocessors", cluster,
                  multiprocessors());
  }
  DeviceState& state = device();
  std::lock_guard lock(state.mutex);
  const auto limit = state.dynamic_shared_limits.find({current_device(), function});
  std::size_t allowed =
      limit == state.dynamic_shared_limits.end() ? kDefaultSharedBytes : limit->second;
  if (!function) {  // what call() launches has no address: what any kernel may have
    for (const auto& [key, bytes] : state.dynamic_shared_limits) allowed = std::max(allowed, bytes);
  }
  if (config.shared_bytes <= allowed) return cudaSuccess;
  return refuse(cudaErrorInvalidValue, config, name,
                "a block of it has at most %zu bytes, and as many as cudaFuncSetAttribute() asked"
                " for, which is up to %zu",
                allowed, max_shared_bytes());
}

}  // namespace

const char* why_launch_failed() { return refusal.text(); }

int multiprocessors() { return environment().multiprocessors; }

int compute_capability() {
  const int played = environment().compute_capability;
  return played ? played : 90;
}

std::size_t max_shared_bytes() {
  const int capability = compute_capability();
  const int kilobytes = capability < 80                        ? 64
                        : capability == 80 || capability == 87 ? 163
                        : capability < 90 || capability == 120 ? 99
                                                               : 227;
  return static_cast<std::size_t>(kilobytes) * 1024;
}

bool describe_kernel(Cluster3 cluster, LaunchBounds bounds, const char* name) {
  if (!asked) {
    if (!runner) {
      std::fflush(stdout);
      ledger_called(name);
      std::fprintf(stderr, "cuda_cpu: %s is a kernel: its launch has <<<grid, block>>>\n", name);
      std::_Exit(3);
    }
    return false;
  }
  *asked = {cluster, bounds, name};
  return true;
}

KernelDescription describe(const BoundKernel& kernel) {
  KernelDescription description = {cluster_dims(), launch_bounds(), "a kernel"};
  asked = &description;
  kernel.run(kernel.arguments);
  asked = nullptr;
  return description;
}

namespace {

/// A launch, with what it needs when the call that asked for it has returned.
struct Waiting {
  int device;
  std::shared_ptr<StreamOrder> order;
  LaunchConfig config;
  KernelDescription description;
  unsigned cluster;
  BoundKernel kernel;
};

/// The threads of a launch read a copy of its arguments, which no launch after this one writes: for
/// ThreadSanitizer that may not be ordered after this one.
BoundKernel with_own_arguments(const BoundKernel& kernel) {
  void* const copy = std::aligned_alloc(64, (kernel.size + 63) / 64 * 64);
  std::memcpy(copy, kernel.arguments, kernel.size);
  return {kernel.function, kernel.run, copy, kernel.size};
}

/// All memory that kernels may write, as it is now, if it is `wanted`: a launch that is made twice
/// finds the second time what it found the first time, also where it adds to something. (While
/// kernels of several devices run at the same time they are not copied: their blocks wait for each
/// other, and do so twice.) ThreadSanitizer does not see it.
class MemoryCopy {
 public:
  explicit MemoryCopy(bool wanted) {
    if (!wanted) return;
    std::lock_guard lock(device().mutex);
    for (const auto& [start, allocation] : device().allocations) {
      if (allocation.type == cudaMemoryTypeHost) continue;
      pieces_.emplace_back(const_cast<char*>(start), std::vector<char>(allocation.size));
      copy(pieces_.back().second.data(), start, allocation.size);
    }
  }

  void restore() const {
    for (const auto& [start, bytes] : pieces_) copy(start, bytes.data(), bytes.size());
  }

 private:
  CUDA_CPU_NO_TSAN static void copy(void* to, const void* from, std::size_t size) {
#if defined(CUDA_CPU_TSAN) && defined(__x86_64__)
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size) : : "memory");
#else
    if (size > 0) std::memcpy(to, from, size);
#endif
  }

  std::vector<std::pair<char*, std::vector<char>>> pieces_;
};

void run(const Waiting& waiting) {
  static std::mutex turns[kMostDevices];  // of threads of the host
  // One launch at a time is counted, so devices take turns, too, while none can wait for another.
  const bool alone = keeps_ledger() && !device().concurrent;
  const std::lock_guard turn(turns[alone ? 0 : waiting.device]);
  const LaunchConfig& config = waiting.config;
  StreamOrder& order = *waiting.order;
  WorkerPool& pool = WorkerPool::of(waiting.device);
  const dim3 grid = config.grid;
  const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  const unsigned cluster = waiting.cluster, capacity = static_cast<unsigned>(multiprocessors());
  const int workers = static_cast<int>(std::min<std::uint64_t>(
      {blocks / cluster, static_cast<std::uint64_t>(pool.size()), capacity / cluster}));
  const OpenMemory open(waiting.kernel.arguments);  // in no allocation
  const int times = config.early && environment().repeat_early_launches ? 2 : 1;
  const MemoryCopy before(times == 2 && !device().concurrent);
  for (int i = 0; i < times && !device().broken; ++i) {
    if (i > 0) before.restore();
    // Not on the stack, where ThreadSanitizer would remember the launch before it.
    std::unique_ptr<Launch> made(new Launch{waiting.device, order, config, waiting.kernel,
                                            waiting.description, blocks, cluster, capacity, workers,
                                            order.launches++});
    Launch& launch = *made;
    order_launch(order, config.early);
    if (!device().concurrent) forget_fences();
    Progress progress(launch);
    ledger_starts(launch);
    if (Repeat repeat(launch); !repeat.done()) {
      const auto start = std::chrono::steady_clock::now();
      pool.run(
          workers,
          [&](int worker) {
            if (!runner) {
              runner = new Runner(worker);
              prepare_crash_stack();
              ledger_worker();
            }
            runner->run(launch);
          },
          [&] { progress.update(); });
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      repeat.ran(launch, taken.count());
    }
    ledger_ends(launch);
    if (launch.failed) device().broken = launch.error.load();
    const Unwatched bookkeeping;
    made.reset();
  }
  const Unwatched bookkeeping;
  std::free(const_cast<void*>(waiting.kernel.arguments));
}

/// What waits for somebody to synchronize, by device.
struct Queues {
  std::mutex mutex;
  std::vector<Waiting> of[kMostDevices];
};
Queues& queues() {
  static Queues* const queues = new Queues;
  return *queues;
}

/// Makes the launch a node of a graph, with a copy of its arguments. Nothing: its stream is not
/// captured.
std::optional<cudaError_t> launch_in_graph(const LaunchConfig& config, const BoundKernel& kernel,
                                           const char* name) {
  if (!any_capture()) return {};
  const BoundKernel own = with_own_arguments(kernel);
  const std::shared_ptr<void> arguments(const_cast<void*>(own.arguments), std::free);
  const auto error =
      captured(config.stream, cudaGraphNodeTypeKernel, [=](cudaStream_t stream) -> cudaError_t {
        LaunchConfig launch = config;
        launch.stream = stream;
        execute(launch, {own.function, own.run, arguments.get(), own.size});
        return *why_launch_failed() ? cudaErrorInvalidValue : result(cudaSuccess);
      });
  if (error == cudaErrorStreamCaptureImplicit) {
    return refuse(*error, config, name,
                  "its stream, the default one, would wait for a stream that is captured");
  }
  if (error.value_or(cudaSuccess) != cudaSuccess) {
    return refuse(*error, config, name, "the capture of its stream has failed before");
  }
  return error;
}

}  // namespace

void execute(const LaunchConfig& config, const BoundKernel& kernel) {
  const KernelDescription description = describe(kernel);
  const unsigned cluster = config.cluster ? config.cluster : description.cluster.x;
  cudaError_t error = check(config, kernel.function, description, cluster);
  std::optional<cudaError_t> in_graph;
  if (error == cudaSuccess) in_graph = launch_in_graph(config, kernel, description.name);
  error = result(in_graph.value_or(error));
  if (error != cudaSuccess) ledger_refused(why_launch_failed());
  if (error != cudaSuccess || in_graph) return;
  const Waiting waiting = {current_device(), order_of(config.stream),   config, description,
                           cluster,          with_own_arguments(kernel)};
  if (device().concurrent) {
    std::lock_guard lock(queues().mutex);
    queues().of[waiting.device].push_back(waiting);
  } else {
    run(waiting);
  }
}

void run_kept_kernels() {
  if (runner && runner->in_thread()) return;  // thrust in a kernel, which cannot wait for itself
  if (device().concurrent) {
    std::vector<Waiting> of[kMostDevices];
    {
      std::lock_guard lock(queues().mutex);
      for (int device = 0; device < kMostDevices; ++device) of[device].swap(queues().of[device]);
    }
    std::vector<std::thread> threads;
    for (const std::vector<Waiting>& launches : of) {
      if (launches.empty()) continue;
      threads.emplace_back([&] {
        for (const Waiting& each : launches) run(each);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

void finish_kernels() {
  if (runner && runner->in_thread()) return;
  run_kept_kernels();
  host_waits_for_all();
}

void wait_for_previous_kernel() {
  const Launch& launch = runner->launch();
  tsan_acquire(launch_end(launch.order, launch.number - 1));
}

unsigned long long nanoseconds() {
  if (runner) runner->progressed();
  return static_cast<unsigned long long>(
      std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
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

void fail_assertion(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  runner->fail_in_thread(format, arguments, cudaErrorAssert);
}

int block_barrier(int predicate, const char* operation, Site site) {
  return runner->block_barrier(predicate, operation, site);
}

void warp_meet(unsigned mask, Combine* combine, void* operand, const char* operation, Site site) {
  runner->warp_meet(mask, combine, operand, operation, site);
}

CUDA_CPU_NO_TSAN unsigned lane_id() { return runner->lane_id(); }

CUDA_CPU_NO_TSAN unsigned live_lanes() { return runner->live_lanes(); }

CUDA_CPU_NO_TSAN bool in_kernel() { return runner && runner->in_thread(); }

CUDA_CPU_NO_TSAN bool is_cooperative() { return runner->launch().config.cooperative; }

CUDA_CPU_NO_TSAN void grid_barrier(Site site) {
  Launch& launch = runner->launch();
  if (!launch.config.cooperative) {
    fail(
        "grid.sync() at %s:%d, but the launch is not cooperative: cudaLaunchCooperativeKernel()"
        " makes one that is",
        site.file, site.line);
  }
  if (launch.blocks > launch.capacity) {
    fail(
        "grid.sync() at %s:%d needs all blocks at the same time, and the device holds %u:"
        " cudaLaunchCooperativeKernel() says so",
        site.file, site.line, launch.capacity);
  }
  block_barrier(0, "grid.sync()", site);
  tsan_release(&launch.grid_arrived);
  if (runner->current().number == 0) {
    const unsigned phase = launch.grid_phase;
    if (++launch.grid_arrived == launch.blocks) {
      launch.grid_arrived = 0;
      ++launch.grid_phase;
      runner->progressed();
    }
    while (launch.grid_phase == phase) runner->spin("grid.sync()", site);
  }
  block_barrier(0, "grid.sync()", site);
  tsan_acquire(&launch.grid_arrived);
}

cudaError_t check_cooperative(dim3 grid) {
  const bool fits =
      std::uint64_t{grid.x} * grid.y * grid.z <= static_cast<std::uint64_t>(multiprocessors());
  return result(fits ? cudaSuccess : cudaErrorCooperativeLaunchTooLarge);
}

CUDA_CPU_NO_TSAN void yield(Site site) { runner->spin("__nanosleep()", site); }

CUDA_CPU_NO_TSAN void waits_for(const char* what) {
  if (runner) runner->current().purpose = what;
}

CUDA_CPU_NO_TSAN void look(const void* address, unsigned long long value, Site site) {
  if (!runner) return;
  Thread& self = runner->current();
  if (self.seen_at == address && self.seen == value) {
    runner->spin("a loop of loads", site);
  } else {
    saw(address, value);
  }
}

CUDA_CPU_NO_TSAN void saw(const void* address, unsigned long long value) {
  if (!runner) return;
  Thread& self = runner->current();
  if (self.seen_at == address && self.seen == value) return;
  self.seen_at = address;
  self.seen = value;
  runner->progressed();
}

namespace {
/// So often a thread finds the same before others go on, and then so often again.
constexpr unsigned kManyLooks = 1000, kMoreLooks = 10;
}  // namespace

CUDA_CPU_NO_TSAN bool looks_for_long(const void* address, unsigned long long value) {
  if (!runner || !runner->in_thread()) return false;
  Thread& self = runner->current();
  if (self.seen_at == address && self.seen == value) return ++self.looks >= kManyLooks;
  if (self.looks >= kManyLooks - kMoreLooks) runner->progressed();
  self.seen_at = address;
  self.seen = value;
  self.looks = 0;
  return false;
}

CUDA_CPU_NO_TSAN void only_looked(const void* address, unsigned long long value, Site site) {
  if (!looks_for_long(address, value)) return;
  runner->current().looks = kManyLooks - kMoreLooks;
  runner->spin("a loop that finds the same value again and again", site);
}

CUDA_CPU_NO_TSAN void step(const void* address) {
  if (!keeps_ledger() || !runner || !runner->in_thread()) return;
  if (!runner->on_own_stack(address)) runner->step();
}

CUDA_CPU_NO_TSAN AsyncCopies& async_copies() { return runner->async_copies(); }

void* static_shared_storage(const void* key, std::size_t size, std::size_t alignment) {
  return runner->static_shared_storage(key, size, alignment);
}

CUDA_CPU_NO_TSAN void* dynamic_shared_storage() { return runner->dynamic_shared_storage(); }

CUDA_CPU_NO_TSAN std::size_t shared_window(const void* pointer) {
  SharedPlace place;
  // A program may convert the pointer to nothing: the place is one where no variable is.
  if (!pointer) return 0xFF0000;
  if (!runner->find_shared(runner->current().block[0], pointer, place)) {
    fail("%p is not in the block's shared memory", pointer);
  }
  return runner->window_address(place);
}

}  // namespace cuda_cpu
