// What a program of a reader's own (./try) has done, written into a file when it ends: each kernel
// with what it asked of memory, launches that were refused although nobody looked, memory that was
// never freed. And mistakes that end in silence otherwise: they are seen before each access.
//
// All of it only where CUDA_CPU_REPORT names the file: lessons have a harness of their own.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cpu/execution/cuda_cpu.h"
#include "cpu/runtime/device_state.h"

namespace cuda_cpu {

struct Launch;

/// Whether there is a file to write into.
bool keeps_ledger();
/// Memory has more than it was asked for behind its end, so that one element too far is nobody's.
inline constexpr std::size_t kGap = 256;

/// A launch starts, and ends.
void ledger_starts(Launch& launch);
void ledger_ends(Launch& launch);
/// A launch that could not be made, and why; and: the program has asked for the last error.
void ledger_refused(const char* why);
void ledger_asked();
/// The host has called a kernel like any function; the program ends.
void ledger_called(const char* kernel);
/// An assertion of the host has failed; the program ends.
void ledger_aborts();
/// A kernel has failed. True: it is noted, and need not be printed.
bool ledger_failed(const char* message);
/// Memory that is given back; false: it is to be freed as usual. Otherwise it is kept for a while,
/// so that a kernel that still uses it is found.
bool ledger_freed(void* memory, std::size_t size);

/// The calling thread, of a kernel, reaches for memory that is neither its own nor its block's nor
/// the device's: ends the launch if nothing else explains it.
void ledger_stray(std::uintptr_t address, std::size_t bytes, bool store, std::uintptr_t code);
/// Its address is no multiple of the size of what is read or written.
void ledger_misaligned(std::uintptr_t address, std::size_t bytes, bool store, std::uintptr_t code);
/// A thread that runs kernels: it is asked where it is when the time is over.
void ledger_worker();
/// In a signal's handler: the line of the program that the calling thread is at, if it is known.
std::string ledger_place();
/// The host reads or writes: ends the program if it is the device's.
void ledger_host(std::uintptr_t address, std::size_t bytes, bool store, std::uintptr_t code);

/// Pages of which the host knows that no memory of the device is in them, each at its number modulo
/// kCount. As soon as there is any, they are written while device().mutex is held.
/// cpu/quick_hooks.py looks here, too, before it lets a program call the hooks of counting.cpp.
struct HostPages {
  static constexpr std::uintptr_t kPage = 4096;
  static constexpr std::size_t kCount = 1 << 16;
  std::atomic<std::uintptr_t> pages[kCount];

  bool has(std::uintptr_t page) const {
    return pages[page % kCount].load(std::memory_order_relaxed) == page;
  }
  void add(std::uintptr_t page) { pages[page % kCount].store(page, std::memory_order_relaxed); }
  /// Of new memory of the device.
  void forget(std::uintptr_t address, std::size_t bytes);
};
extern constinit HostPages host_pages;
static_assert(sizeof(HostPages) == HostPages::kCount * 8);
/// The same, quickly where the page is known: a reference on the host reads much.
[[gnu::always_inline]] inline void ledger_host_access(std::uintptr_t address, std::size_t bytes,
                                                      bool store, std::uintptr_t code) {
  if (!host_pages.has(address / HostPages::kPage)) ledger_host(address, bytes, store, code);
}

}  // namespace cuda_cpu
