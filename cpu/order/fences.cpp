#include "cpu/order/fences.h"

#if defined(CUDA_CPU_TSAN)

#include <atomic>
#include <map>
#include <thread>
#include <utility>

#include "cpu/execution/execution.h"

// This file is compiled without ThreadSanitizer: it acts for CUDA threads that nothing orders.

namespace cuda_cpu {
namespace {

/// All that was released at an address, to threads of one block or, with null, to all.
struct Released {
  void* identity;
  char arrives = 0;  ///< for an operation that releases by itself
};
using Key = std::pair<const void*, const Block*>;

struct AllReleased {
  std::atomic_flag busy;  // no mutex: it would order the threads
  std::atomic<std::size_t> count = 0;
  std::map<Key, Released> at;
};
AllReleased& all() {
  static AllReleased* const all = new AllReleased;
  return *all;
}

void lock() {
  while (all().busy.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
}
void unlock() { all().busy.clear(std::memory_order_release); }

Key key_of(const void* address, const Block* block, Scope scope) {
  return {address, scope == Scope::block ? block : nullptr};
}

Block* block_of_caller() {
  return runner && runner->in_thread() ? runner->current().block : nullptr;
}

/// A launch that starts early must not see what hung on the same place in the one before.
unsigned turn() { return runner->launch().number % 4; }

/// So many identities at most; what is released at further addresses is one.
constexpr std::size_t kMost = 1000;
constexpr Key kOthers = {nullptr, nullptr};

/// The lock is held. A new identity comes after its creator, which must not be a CUDA thread.
Released& released_at(Key key) {
  if (all().at.size() >= kMost && !all().at.contains(key)) key = kOthers;
  auto [found, is_new] = all().at.try_emplace(key);
  if (is_new) {
    void* const caller = tsan_current();
    if (runner) tsan_become(runner->own_identity());
    found->second.identity = __tsan_create_fiber(0);
    tsan_become(caller);
    ++all().count;
  }
  return found->second;
}

/// What hangs on `object` is released.
void release_by(Released& released, void* object) {
  void* const caller = tsan_current();
  tsan_become(released.identity);
  tsan_acquire(object);
  tsan_become(caller);
}

/// What was released at the address hangs on `object` from now on.
void collect(const Key& key, void* object) {
  auto found = all().at.find(key);
  if (found == all().at.end()) found = all().at.find(kOthers);
  if (found == all().at.end()) return;
  void* const caller = tsan_current();
  tsan_become(found->second.identity);
  tsan_release(object);
  tsan_become(caller);
}

}  // namespace

void order_fence(Scope scope) {
  Block* const block = block_of_caller();
  if (!block) return;
  const auto which = static_cast<int>(scope);
  tsan_acquire(&block->tsan_seen[turn()]);
  tsan_release(&block->tsan_fence[which][turn()]);
  block->fenced[which] = block->fresh_fence[which] = runner->current().fresh_fence[which] = true;
}

OrderedWrite::OrderedWrite(const void* address, bool releases, Scope scope)
    : address_(address), releases_(releases), scope_(scope) {
  const Block* const block = block_of_caller();
  ordered_ = block && (releases || block->fenced[0] || block->fenced[1]);
  if (!ordered_) return;
  // Until it is over: who sees the write must see what it releases.
  lock();
  const Unwatched bookkeeping;
  for (const Scope each : {Scope::block, Scope::device}) {
    const bool own = releases && each == scope;
    if (own || block->fenced[static_cast<int>(each)]) released_at(key_of(address, block, each));
  }
}

OrderedWrite::~OrderedWrite() {
  if (!ordered_) return;
  Thread& thread = runner->current();
  Block& block = *thread.block;
  for (const Scope each : {Scope::block, Scope::device}) {
    const auto which = static_cast<int>(each);
    const bool own = releases_ && each == scope_;
    if (!own && !block.fenced[which]) continue;
    Released* released;
    {
      const Unwatched bookkeeping;
      released = &released_at(key_of(address_, &block, each));
    }
    if (block.fenced[which]) release_by(*released, &block.tsan_fence[which][turn()]);
    if (own || thread.fresh_fence[which] || block.fresh_fence[which]) {
      tsan_release(&released->arrives);
      release_by(*released, &released->arrives);
    }
    thread.fresh_fence[which] = block.fresh_fence[which] = false;
  }
  unlock();
}

void order_read(const void* address, bool acquires) {
  if (all().count.load(std::memory_order_relaxed) == 0) return;
  const Unwatched bookkeeping;
  static thread_local char of_host;
  Block* const block = block_of_caller();
  char* const seen = block ? &block->tsan_seen[turn()] : &of_host;
  lock();
  if (block) collect({address, block}, seen);
  collect({address, nullptr}, seen);
  unlock();
  if (acquires || !block) tsan_acquire(seen);
}

void forget_fences() {
  lock();
  for (auto& [key, released] : all().at) __tsan_destroy_fiber(released.identity);
  all().at.clear();
  all().count = 0;
  unlock();
}

}  // namespace cuda_cpu

#endif
