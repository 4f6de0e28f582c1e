#include "cpu/watch/repeats.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "cpu/execution/execution.h"
#include "cpu/execution/sanitizers.h"
#include "cpu/execution/worker_pool.h"
#include "cpu/runtime/device_heap.h"
#include "cpu/runtime/device_state.h"
#include "cpu/runtime/environment.h"
#include "cpu/watch/ledger.h"

// The program's own variables that can change lie from the first two to the last two, which are the
// linker's. cpu/two_versions.py defines the first two, so other builds do not have them.
extern "C" {
[[gnu::weak]] extern const char cuda_cpu_data_begins, cuda_cpu_bss_begins;
extern const char _edata, _end;
}

namespace cuda_cpu {
namespace {

constexpr std::size_t kChunk = 1u << 20;
/// As fast the workers hash memory, or copy it, about.
constexpr double kBytesPerSecond = 8e9;
/// So much of what launches have written is remembered at most.
constexpr std::size_t kMostBytes = 256u << 20;
/// Of one kernel with the same arguments: so many launches that found different things.
constexpr std::size_t kMostOfOne = 2;

/// Two different contents have the same hash once in 2^64 times: each step is a permutation of the
/// state, whatever the input, and of the input, whatever the state.
std::uint64_t step(std::uint64_t state, std::uint64_t input) {
  return std::rotl((state ^ input) * 0x9E3779B97F4A7C15u, 29);
}

std::uint64_t hash_chunk(const char* bytes, std::size_t size) {
  std::uint64_t lanes[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  std::size_t at = 0;
  for (; at + sizeof lanes <= size; at += sizeof lanes) {
    std::uint64_t input[8];
    std::memcpy(input, bytes + at, sizeof input);
    for (int i = 0; i < 8; ++i) lanes[i] = step(lanes[i], input[i]);
  }
  std::uint64_t hash = size;
  for (; at < size; ++at) hash = step(hash, static_cast<unsigned char>(bytes[at]));
  for (const std::uint64_t lane : lanes) hash = step(hash, lane);
  return hash;
}

/// body(offset, bytes) for each chunk, on all workers of a device.
template <class Body>
void for_chunks(int device, std::size_t size, const Body& body) {
  const std::size_t chunks = (size + kChunk - 1) / kChunk;
  const auto one = [&](long i) {
    const std::size_t offset = static_cast<std::size_t>(i) * kChunk;
    body(offset, std::min(kChunk, size - offset));
  };
  if (chunks < 4) {
    for (std::size_t i = 0; i < chunks; ++i) one(static_cast<long>(i));
  } else {
    WorkerPool::of(device).parallel_for(static_cast<long>(chunks), one);
  }
}

std::uint64_t hash_memory(int device, const char* memory, std::size_t size) {
  std::vector<std::uint64_t> hashes((size + kChunk - 1) / kChunk);
  for_chunks(device, size, [&](std::size_t offset, std::size_t bytes) {
    hashes[offset / kChunk] = hash_chunk(memory + offset, bytes);
  });
  return hash_chunk(reinterpret_cast<const char*>(hashes.data()), 8 * hashes.size());
}

/// Memory that a kernel may read or write.
struct Piece {
  char* start;
  std::size_t size;
  unsigned long long id;  ///< 0: the host may write it, too, unseen
  bool variables;         ///< of the program, some of which are the host's
  std::uint64_t hash = 0;

  bool same_memory(const Piece& other) const {
    return start == other.start && size == other.size && id == other.id;
  }
};

/// What a launch has written, by piece.
struct Written {
  Piece piece;
  std::vector<char> bytes;
};

/// What a launch has found, and what it did.
struct Done {
  std::vector<Piece> found;
  std::vector<Written> written;

  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const Written& each : written) sum += each.bytes.size();
    return sum;
  }
};

/// Launches of one kernel with the same arguments.
struct Same {
  double seconds = 0;  ///< that the last one took that is remembered
  std::deque<Done> done;
};

/// All launches of one kernel.
struct OfKernel {
  double ran = 0;       ///< seconds that they took, or would have taken
  double looked = 0;    ///< seconds that it took to look whether they are the same
  unsigned unused = 0;  ///< so many were remembered since one was of use

  /// Looking takes a quarter of the time at most, and less if it is in vain.
  bool may_look(double seconds) const {
    return looked + seconds <= ran / static_cast<double>(4u << std::min(unused / 8, 5u));
  }
};

struct Repeats {
  std::mutex mutex;
  std::map<std::string, Same> launches;
  std::map<std::pair<const void*, void (*)(const void*)>, OfKernel> kernels;
  std::map<unsigned long long, std::uint64_t> hashes;  ///< of allocations, by their id
  std::deque<std::string> order;                       ///< of what is remembered, oldest first
  std::size_t bytes = 0;
};

Repeats& repeats() {
  static Repeats* const repeats = new Repeats;
  return *repeats;
}

std::atomic<bool> printed = false;
/// Of all host threads: launches in progress, and how often one has begun or something was copied.
/// While others do something, what a launch does is not known.
std::atomic<int> in_progress = 0;
std::atomic<unsigned> events = 0;

bool looks_for_repeats() {
  return !kSanitized && &cuda_cpu_data_begins && keeps_ledger() &&
         !environment().repeat_early_launches && !device().concurrent;
}

std::vector<Piece> all_pieces() {
  std::vector<Piece> pieces;
  const auto variables = [&](const char* begin, const char* end) {
    pieces.push_back({const_cast<char*>(begin), static_cast<std::size_t>(end - begin), 0, true});
  };
  variables(&cuda_cpu_data_begins, &_edata);
  variables(&cuda_cpu_bss_begins, &_end);
  std::lock_guard lock(device().mutex);
  for (const auto& [start, allocation] : device().allocations) {
    const bool device_only = allocation.type == cudaMemoryTypeDevice && !allocation.variable;
    pieces.push_back(
        {const_cast<char*>(start), allocation.size, device_only ? allocation.id : 0, false});
  }
  return pieces;
}

/// Those whose hash is not known yet.
std::size_t bytes_to_hash(const std::vector<Piece>& pieces) {
  std::size_t bytes = 0;
  for (const Piece& piece : pieces) {
    if (piece.id == 0 || !repeats().hashes.contains(piece.id)) bytes += piece.size;
  }
  return bytes;
}

void hash(int device, std::vector<Piece>& pieces) {
  for (Piece& piece : pieces) {
    const auto known = repeats().hashes.find(piece.id);
    if (piece.id != 0 && known != repeats().hashes.end()) {
      piece.hash = known->second;
      continue;
    }
    piece.hash = hash_memory(device, piece.start, piece.size);
    if (piece.id != 0) repeats().hashes[piece.id] = piece.hash;
  }
}

bool same_state(const std::vector<Piece>& a, const std::vector<Piece>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Piece& a, const Piece& b) {
    return a.same_memory(b) && a.hash == b.hash;
  });
}

OfKernel& kernel_of(const Launch& launch) {
  return repeats().kernels[{launch.kernel.function, launch.kernel.run}];
}

std::string key_of(const Launch& launch) {
  const LaunchConfig& config = launch.config;
  const struct {
    const void* function;
    void (*run)(const void*);
    dim3 grid, block;
    std::size_t shared_bytes;
    std::size_t cluster_and_device;
  } head = {
      launch.kernel.function, launch.kernel.run,   config.grid,
      config.block,           config.shared_bytes, 16ul * launch.cluster_size + launch.device};
  std::string key(reinterpret_cast<const char*>(&head), sizeof head);
  key.append(static_cast<const char*>(launch.kernel.arguments), launch.kernel.size);
  return key;
}

/// Forgets the oldest until so many bytes more have room.
void make_room(std::size_t bytes) {
  Repeats& all = repeats();
  while (!all.order.empty() && all.bytes + bytes > kMostBytes) {
    std::deque<Done>& done = all.launches[all.order.front()].done;
    all.order.pop_front();
    if (done.empty()) continue;
    all.bytes -= done.front().bytes();
    done.pop_front();
  }
}

}  // namespace

struct Repeat::Found {
  std::vector<Piece> pieces;
  unsigned events;
};

Repeat::~Repeat() { --in_progress; }

Repeat::Repeat(const Launch& launch) {
  const bool alone = ++in_progress == 1;
  if (!alone || !looks_for_repeats()) return;
  key_ = key_of(launch);
  Repeats& all = repeats();
  std::lock_guard lock(all.mutex);
  const unsigned before = events;
  OfKernel& kernel = kernel_of(launch);
  const auto same = all.launches.find(key_);
  const bool known = same != all.launches.end() && !same->second.done.empty();
  std::vector<Piece> pieces = all_pieces();
  std::size_t bytes = bytes_to_hash(pieces);
  if (!known) {
    for (const Piece& piece : pieces) bytes += piece.size;
  }
  const double seconds = static_cast<double>(bytes) / kBytesPerSecond;
  if (!kernel.may_look(seconds)) return;
  kernel.looked += seconds;
  hash(launch.device, pieces);
  for (std::size_t i = 0; known && i < same->second.done.size(); ++i) {
    const Done& done = same->second.done[i];
    if (!same_state(done.found, pieces)) continue;
    if (ledger_counts(launch)) return;  // that needs a run
    for (const Written& each : done.written) {
      for_chunks(launch.device, each.bytes.size(), [&](std::size_t offset, std::size_t size) {
        std::memcpy(each.piece.start + offset, each.bytes.data() + offset, size);
      });
      if (each.piece.id != 0) all.hashes[each.piece.id] = each.piece.hash;
    }
    kernel.ran += same->second.seconds;
    kernel.unused = 0;
    done_ = true;
    ledger_repeated(launch);
    return;
  }
  found_.reset(new Found{std::move(pieces), before});
  printed = false;
}

void Repeat::ran(const Launch& launch, double seconds) {
  if (done_ || !looks_for_repeats()) return;
  Repeats& all = repeats();
  std::lock_guard lock(all.mutex);
  all.hashes.clear();
  OfKernel& kernel = kernel_of(launch);
  kernel.ran += seconds;
  if (!found_) return;
  ++kernel.unused;
  if (launch.failed || printed || device_heap_used() || events != found_->events) return;
  std::vector<Piece> pieces = all_pieces();
  hash(launch.device, pieces);
  if (pieces.size() != found_->pieces.size()) return;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (!pieces[i].same_memory(found_->pieces[i])) return;
    if (pieces[i].hash == found_->pieces[i].hash) continue;
    if (pieces[i].variables) return;
    bytes += pieces[i].size;
  }
  if (bytes > kMostBytes / 2) return;
  make_room(bytes);
  Same& same = all.launches[key_];
  same.seconds = seconds;
  if (same.done.size() == kMostOfOne) {
    all.bytes -= same.done.front().bytes();
    same.done.pop_front();
    all.order.erase(std::find(all.order.begin(), all.order.end(), key_));
  }
  Done& done = same.done.emplace_back();
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (piece.hash == found_->pieces[i].hash) continue;
    done.written.push_back({piece, std::vector<char>(piece.start, piece.start + piece.size)});
  }
  done.found = std::move(found_->pieces);
  all.order.push_back(key_);
  all.bytes += bytes;
}

void repeats_written(const void* memory) {
  if (!looks_for_repeats()) return;
  ++events;
  unsigned long long id = 0;
  if (memory) {
    std::lock_guard lock(device().mutex);
    auto& allocations = device().allocations;
    const char* const address = static_cast<const char*>(memory);
    const auto next = allocations.upper_bound(address);
    if (next == allocations.begin()) return;
    const auto& [start, allocation] = *std::prev(next);
    if (address >= start + allocation.size) return;
    id = allocation.id;
  }
  std::lock_guard lock(repeats().mutex);
  if (memory) {
    repeats().hashes.erase(id);
  } else {
    repeats().hashes.clear();
  }
}

}  // namespace cuda_cpu

// ---- What a kernel prints -----------------------------------------------------------------------

// The linker takes these for printf() and its kin where the program calls them (own_program.py): a
// launch that prints is run each time. The compiler makes the others of a printf(). What they call
// is not among those names.

namespace cuda_cpu {
static int print(const char* format, va_list arguments) {
  if (runner) printed = true;
  return std::vprintf(format, arguments);
}
}  // namespace cuda_cpu

extern "C" {

int __wrap_printf(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int written = cuda_cpu::print(format, arguments);
  va_end(arguments);
  return written;
}

int __wrap___printf_chk(int, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int written = cuda_cpu::print(format, arguments);
  va_end(arguments);
  return written;
}

int __wrap_puts(const char* text) {
  if (cuda_cpu::runner) cuda_cpu::printed = true;
  return std::fprintf(stdout, "%s\n", text);
}

int __wrap_putchar(int character) {
  if (cuda_cpu::runner) cuda_cpu::printed = true;
  return std::putc(character, stdout);
}

}  // extern "C"
