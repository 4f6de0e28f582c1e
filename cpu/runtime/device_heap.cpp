#include "cpu/runtime/device_heap.h"

#include <atomic>
#include <cstddef>
#include <iterator>
#include <map>
#include <mutex>

#include "cpu/execution/cuda_cpu.h"

namespace cuda_cpu {

namespace {

struct DeviceHeap {
  std::mutex mutex;
  std::map<std::uintptr_t, std::size_t> sizes;
};

DeviceHeap& heap() {
  static DeviceHeap* const heap = new DeviceHeap;
  return *heap;
}

std::atomic<bool> used = false;
/// What is noted takes memory, too.
thread_local bool noting = false;

}  // namespace

bool device_heap_used() { return used; }

bool in_device_heap(std::uintptr_t address) {
  if (!used) return false;
  std::lock_guard lock(heap().mutex);
  const auto next = heap().sizes.upper_bound(address);
  return next != heap().sizes.begin() && address - std::prev(next)->first < std::prev(next)->second;
}

void* noted(void* memory, std::size_t size) {
  if (!memory || noting || !in_kernel()) return memory;
  noting = true;
  {
    std::lock_guard lock(heap().mutex);
    heap().sizes[reinterpret_cast<std::uintptr_t>(memory)] = size;
  }
  used = true;
  noting = false;
  return memory;
}

void* forgotten(void* memory) {
  if (!memory || noting || !used) return memory;
  noting = true;
  {
    std::lock_guard lock(heap().mutex);
    heap().sizes.erase(reinterpret_cast<std::uintptr_t>(memory));
  }
  noting = false;
  return memory;
}

}  // namespace cuda_cpu
