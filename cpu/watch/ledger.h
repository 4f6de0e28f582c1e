// What a program of a reader's own (./try) has done, written into a file when it ends: each kernel
// with what it asked of memory, launches that were refused although nobody looked, memory that was
// never freed. And mistakes that end in silence otherwise: they are seen before each access.
//
// All of it only where CUDA_CPU_REPORT names the file: lessons have a harness of their own.

#pragma once

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
/// Whether the launch, which is in progress, is counted. And: it need not run, see repeats.h.
bool ledger_counts(const Launch& launch);
void ledger_repeated(const Launch& launch);
/// A launch that could not be made, and why; and: the program has asked for the last error.
void ledger_refused(const char* why);
void ledger_asked();
/// The host has called a kernel like any function; the program ends.
void ledger_called(const char* kernel);
/// An assertion of the host has failed; the program ends.
void ledger_aborts();
/// Whether the host, or a kernel in another stream, could write there while a kernel runs.
bool ledger_others_may_write(const void* address);
/// A kernel has failed. True: it is noted, and need not be printed.
bool ledger_failed(const char* message);
/// A barrier went on without a thread that had ended.
void ledger_left_out(const char* message, const Site& site);
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
/// In a signal's handler: the host has reached for closed memory with the instruction at `code`.
/// Ends the program if it is the device's.
enum class Reach { read, write, either };
void ledger_host(std::uintptr_t address, Reach reach, std::uintptr_t code);

/// Memory of the device is closed to the program's own code for the host, and open while there is
/// one of these: while kernels run, and in calls of the runtime that copy.
class OpenMemory {
 public:
  /// Something is written into the allocation that `written` is in, or, without one, into any.
  explicit OpenMemory(const void* written = nullptr);
  ~OpenMemory();
  OpenMemory(const OpenMemory&) = delete;
  OpenMemory& operator=(const OpenMemory&) = delete;
};
/// New memory of the device, which is closed; and before it is given back.
void ledger_closes(void* memory, std::size_t size);
void ledger_opens(void* memory, std::size_t size);

}  // namespace cuda_cpu
