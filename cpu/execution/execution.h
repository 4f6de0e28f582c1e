// Blocks and threads while they run: what the parts of the backend know of them, cuda_cpu.cpp,
// which runs them, and hopper.cpp, which does what their copy engine and tensor cores would do.

#pragma once

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/execution/cuda_cpu.h"
#include "cpu/execution/fiber.h"

namespace cuda_cpu {

struct Block;
struct Cluster;
struct PhaseBarrier;
struct HopperBlock;
struct StreamOrder;
struct DeleteHopperBlock {
  void operator()(HopperBlock* block) const;
};

/// What a launch is like that its kernel says itself: see describe_kernel().
struct KernelDescription {
  Cluster3 cluster;
  LaunchBounds bounds;
  const char* name;
};

/// A launch in progress, shared by all workers.
struct Launch {
  /// One line of cache each: a worker writes its own often, the others read it when they wait.
  struct alignas(64) Worker {
    std::atomic<std::uint64_t> progress = 0;
    /// All of its threads wait, some of them for what other blocks do.
    std::atomic<bool> idle = false;
  };

  int device;
  StreamOrder& order;
  const LaunchConfig& config;
  const BoundKernel& kernel;
  KernelDescription description;
  std::uint64_t blocks;
  unsigned cluster_size;
  /// How many blocks run at the same time at most.
  unsigned capacity;
  int workers;
  unsigned number;
  std::vector<Worker> states = std::vector<Worker>(static_cast<std::size_t>(workers));
  std::atomic<std::uint64_t> next_cluster = 0;
  std::atomic<std::uint64_t> blocks_done = 0;
  std::atomic<unsigned> resident = 0;
  std::atomic<bool> failed = false;
  /// Of all blocks of a grid: how many have come, and how often all have.
  std::atomic<unsigned> grid_arrived = 0, grid_phase = 0;
  /// What every later call of the runtime returns then.
  std::atomic<cudaError_t> error = cudaErrorLaunchFailure;
};

/// One CUDA thread.
struct Thread {
  /// Where the thread is suspended, while it waits.
  Fiber* fiber;
  /// The next in the queue that the thread waits in.
  Thread* next;
  Block* block;
  uint3 index;
  unsigned number;
  bool exited;

  // What the thread waits for, for reports; no operation: nothing.
  const char* operation;
  Site site;
  const void* object;
  unsigned detail;
  const char* purpose;

  // What it saw when it last looked at an atomic variable.
  const void* seen_at;
  std::uint64_t seen;
  unsigned looks;

  // No atomic write has followed its fence of block, or device, scope.
  bool fresh_fence[2];

  // It has arrived at the cluster's barrier, and has not waited since.
  bool cluster_arrived;
  unsigned cluster_phase;

  /// Begins: field by field, as the compiler's zeros take longer than a short thread.
  CUDA_CPU_NO_TSAN void begin(Block& its_block, uint3 its_index, unsigned its_number) {
    fiber = nullptr;
    next = nullptr;
    block = &its_block;
    index = its_index;
    number = its_number;
    exited = false;
    operation = nullptr;
    site = {};
    object = nullptr;
    detail = 0;
    purpose = nullptr;
    seen_at = nullptr;
    seen = 0;
    looks = 0;
    fresh_fence[0] = fresh_fence[1] = false;
    cluster_arrived = false;
    cluster_phase = 0;
  }
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

/// Storage of one __shared__ declaration of one block.
struct SharedStorage {
  char* data = nullptr;
  std::size_t size = 0;
};

/// A copy that a phase of a barrier waits for: see phase_barrier.h.
struct PhaseCopy {
  const PhaseBarrier* barrier;
  AsyncCopy copy;
  void* identity;  ///< ThreadSanitizer's, of the thread that has asked for it
};

/// A block that runs, or the place of one that has run.
struct Block {
  unsigned slot;
  uint3 index;
  unsigned rank;
  Cluster* cluster;
  unsigned started;
  unsigned exited;
  const Thread* first_exited;
  uint3 next_index;
  std::unique_ptr<Thread[]> threads;
  std::unique_ptr<AsyncCopies[]> async_copies;
  std::unique_ptr<Warp[]> warps;
  BlockBarrier barrier;
  /// One for each entry of Runner::declarations().
  std::vector<SharedStorage> shared;
  std::vector<PhaseCopy> phase_copies;
  /// Of a kernel that uses Hopper's instructions.
  std::unique_ptr<HopperBlock, DeleteHopperBlock> hopper;
  char tsan_start;
  /// Of fences, and of what was read, by threads of the block: of block and of device scope. See
  /// fences.h.
  bool fenced[2], fresh_fence[2];
  char tsan_fence[2][4], tsan_seen[4];  ///< by launch, see tsan_end
  char tsan_end[4];                     ///< each thread's end, by launch
  /// Who hands on, for ThreadSanitizer, that all threads of the block have ended.
  void* tsan_last;
  /// Who the copy engine, reading and writing, and the tensor cores are for ThreadSanitizer.
  void* tsan_engine[3];

  Block();
  ~Block();
};

/// Blocks that start together.
struct Cluster {
  std::vector<Block*> blocks;
  unsigned blocks_ended;
  // Their barrier.
  unsigned arrived;
  unsigned phase;
  Queue waiting;
  char tsan_passed[2];
  char tsan_initialized;
};

/// A line of an error report, put together piece by piece.
class Message {
 public:
  const char* text() const { return text_; }

  __attribute__((format(printf, 2, 3))) void add(const char* format, ...);
  void add_list(const char* format, va_list arguments);
  void add_thread(const Thread& thread);
  void add_wait(const Thread& thread, const char* operation, const Site& site);

 private:
  char text_[4096] = "";
  std::size_t used_ = 0;
};

/// What set_row() was told.
const char* row();

/// What a place in a block's shared memory is: which declaration, and how far into it.
struct SharedPlace {
  std::size_t declaration;
  std::size_t offset;
};

/// Runs blocks on one worker thread: those of a cluster at the same time, and more clusters when
/// the threads of all that run wait for what other blocks do.
///
/// The threads of a block start in order. A fiber runs one after the other to the end, as plain
/// function calls; only when a thread has to wait does it keep its fiber, and another one goes on.
/// Under ThreadSanitizer each thread has a fiber of its own, as its identity there is the fiber's.
class Runner {
 public:
  explicit Runner(int worker) : worker_(worker) {}

  /// Runs this worker's share of the launch.
  void run(Launch& launch);

  int block_barrier(int predicate, const char* operation, const Site& site);
  void warp_meet(unsigned mask, Combine* combine, void* operand, const char* operation,
                 const Site& site);
  /// Lets all others go on, also those of other blocks that have not started.
  void step();
  void spin(const char* operation, const Site& site, const void* object = nullptr);
  /// What some of them look for may be there.
  void look_again() { ready_.take_all(spinning_); }
  void* static_shared_storage(const void* key, std::size_t size, std::size_t alignment);
  void* dynamic_shared_storage();
  unsigned lane_id() const { return current_->number % 32; }
  unsigned live_lanes() const { return current_->block->warps[current_->number / 32].live; }
  AsyncCopies& async_copies() { return current_->block->async_copies[current_->number]; }

  Launch& launch() { return *launch_; }
  Thread& current() { return *current_; }
  /// Whether a CUDA thread runs, and not the worker itself.
  bool in_thread() const { return current_ != nullptr; }
  /// ThreadSanitizer's identity of the worker, which comes after what the host has done before the
  /// launch.
  void* own_identity() const { return main_.tsan_identity(); }
  bool on_own_stack(const void* address) const { return running_->has_on_stack(address); }
  unsigned threads_in_block() const { return threads_in_block_; }
  void progressed();

  /// Suspends the current thread, which some queue or group must know, and resumes as that thread.
  void wait(const char* operation, const Site& site, const void* object = nullptr,
            unsigned detail = 0);
  /// The thread goes on when its turn comes.
  void make_ready(Thread& thread) { ready_.push(&thread); }
  void make_all_ready(Queue& queue) { ready_.take_all(queue); }

  /// Where `pointer` is in the block's shared memory; false if it is not there.
  bool find_shared(const Block& block, const void* pointer, SharedPlace& place) const;
  /// The same place in another block of the cluster. Allocates its storage if it has not yet.
  char* shared_at(Block& block, const SharedPlace& place);
  /// Addresses in the window of shared memory, which descriptors have.
  std::size_t window_address(const SharedPlace& place) const;
  bool find_window(std::size_t address, SharedPlace& place) const;
  std::size_t shared_size(std::size_t declaration) const { return declared_[declaration].size; }

  /// What can be done for threads that wait for the copy engine, when no other thread can go on.
  /// Blocks whose threads may wait for it, in the order in which they started.
  const std::vector<Block*>& resident() const { return resident_; }

  /// Begins a message with the launch and the block.
  Message begin_message(const Block& block) const;
  /// Ends the launch because of an error in the current thread.
  [[noreturn]] void fail(const Message& message);
  [[noreturn]] void fail_in_thread(const char* format, va_list arguments,
                                   cudaError_t error = cudaErrorLaunchFailure);
  /// Ends the launch because of an error that is found when no thread runs.
  void fail_launch(const Message& message);

 private:
  struct Declaration {
    const void* key;
    std::size_t size;
    std::size_t alignment;
    std::size_t window;
  };

  static void fiber_main();

  bool start_cluster();
  bool take_room();
  bool wait_for_room();
  Block& take_slot();
  void forget_blocks();
  void abandon_threads();
  void run_thread();
  void thread_exited();
  void block_ended(Block& block);
  WarpGroup& group_for(Warp& warp, unsigned mask);
  void complete(Block& block, Warp& warp, WarpGroup& group);
  Thread& thread_of(Block& block, const Warp& warp, unsigned lane);

  void barrier_without(const Thread& ended, const Thread& waits, const char* operation,
                       const Site& site);
  void all_have_come(Block& block);
  bool any_unstarted();
  Fiber& fiber_for_next_thread();
  Fiber& next_fiber();
  Fiber& next_unwatched();
  bool spin_once();
  void go_to(Fiber& fiber);

  std::size_t declare(const void* key, std::size_t size, std::size_t alignment);
  SharedStorage& storage_of(Block& block, std::size_t declaration);
  void end_shared_memory(Block& block);

  void report(const Message& message);
  void report_deadlock();

  const int worker_;
  Launch* launch_ = nullptr;
  std::shared_ptr<StreamOrder> last_order_;  ///< of the launch before
  unsigned last_waits_ = 0;                  ///< of the host, for all, when that one began
  unsigned threads_in_block_ = 0;
  std::uint64_t own_cluster_ = 0;

  Fiber main_;
  Fiber* running_ = &main_;
  std::vector<Fiber*> fibers_;
  std::vector<Fiber*> idle_fibers_;

  std::vector<std::unique_ptr<Block>> slots_;
  std::vector<Block*> free_slots_;
  std::vector<Block*> resident_;
  std::vector<Block*> unstarted_;
  std::size_t first_unstarted_ = 0;
  std::vector<std::unique_ptr<Cluster>> clusters_;
  std::vector<Cluster*> free_clusters_;

  Thread* current_ = nullptr;
  Queue ready_;
  Queue stepping_;
  Queue spinning_;
  unsigned idle_rounds_ = 0;
  std::uint64_t progress_ = 0;
  std::uint64_t seen_progress_ = 0;

  std::vector<Declaration> declared_;
  std::size_t static_bytes_ = 0;
};

/// The runner of the calling worker thread.
extern constinit thread_local Runner* runner;

// ---- cpu/runtime/crash.cpp ----------------------------------------------------------------------

/// From now on a kernel that reaches outside of all memory, or divides by zero, is reported.
void report_crashes();
/// The calling thread, which runs kernels, has a stack to do that on: a kernel's may be full.
void prepare_crash_stack();

// ---- hopper.cpp ---------------------------------------------------------------------------------

/// When no thread can go on: does one thing that a thread waits for, a copy, say. False if there is
/// none, or after an error.
bool land_one(Runner& runner);

/// Whether a thread or a block may end, with whatever it has left undone. If not, adds why to the
/// message, if there is one.
bool may_end(Thread& thread, Message* message);
bool may_end(Block& block, Message* message);
/// The lanes of a warp whose first thread is `first` have met; no lanes: all threads of the block.
void threads_met(Block& block, unsigned first, unsigned lanes);
/// The threads of a cluster that have exited count at its barrier.
void thread_left_cluster(Runner& runner, Thread& thread);
/// Forgets what a block, or all of them, had to do.
void reset_hopper(Block& block);
/// More about what a thread waits for.
void describe_wait(const Thread& thread, Message& message);

}  // namespace cuda_cpu
