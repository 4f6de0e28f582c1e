#include "cpu/watch/counting.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/execution/execution.h"
#include "cpu/execution/sanitizers.h"
#include "cpu/order/fences.h"
#include "cpu/runtime/device_state.h"
#include "cpu/watch/hooks.h"
#include "cpu/watch/ledger.h"

namespace cuda_cpu {

namespace {

enum class Kind : std::uint8_t { load, store, atomic, async_copy };

constexpr unsigned kSectorBytes = 32, kBanks = 32;

/// What one instruction of a warp asks for.
struct Request {
  std::uintptr_t addresses[32];  ///< of the lanes that ask
  unsigned lanes;

  std::uintptr_t address(int lane) const { return addresses[lane]; }
};

/// Device memory from cudaMalloc.
struct Range {
  std::uintptr_t begin, end;
};

/// An instruction: a place in the program, and the memory that it goes to.
struct Place {
  std::uintptr_t code;
  Kind kind;
  bool shared;
  unsigned bytes;                       ///< of a lane
  Range last;                           ///< the device memory in which it was last
  std::int64_t requests, units, least;  ///< units: sectors, or conflicts
};

/// The requests of a warp at one place that not all lanes have made yet. Lanes run one after the
/// other, so the addresses of a lane are side by side: a lane writes them in order, and whoever
/// evaluates reads 32 rows in order.
struct Pending {
  std::array<std::uint32_t, 32> made = {};  ///< by each lane, since the warp met
  std::uint32_t over = 0;                   ///< so many requests are evaluated
  std::uint32_t lanes = 0;                  ///< how many lanes have made the next one
  bool touched = false;
  std::uint32_t room = 0;  ///< of a row, for so many requests
  std::vector<std::uintptr_t> addresses;

  std::size_t row() const { return room + kPad; }
  void make_room() {
    const std::uint32_t more = std::max(4u, 2 * room);
    std::vector<std::uintptr_t> longer(32 * (more + kPad));
    for (std::size_t lane = 0; lane < 32; ++lane) {
      std::copy_n(addresses.begin() + static_cast<std::ptrdiff_t>(lane * row()), made[lane],
                  longer.begin() + static_cast<std::ptrdiff_t>(lane * (more + kPad)));
    }
    addresses = std::move(longer);
    room = more;
  }
  /// Rows of a power of two would all be in the same set of the cache.
  static constexpr std::uint32_t kPad = 64 / sizeof(std::uintptr_t);
};

struct WarpRequests {
  std::vector<Pending> of_place;
  std::vector<std::uint32_t> touched;
};

/// How many sectors the lanes' bytes are in, and how many the same bytes would be in one after the
/// other.
void count_sectors(const Request& request, unsigned bytes, Place& place) {
  std::uintptr_t sectors[64];
  std::uintptr_t highest = 0;  // most requests ascend: what is above all is new
  int count = 0;
  for (unsigned lanes = request.lanes; lanes; lanes &= lanes - 1) {
    const std::uintptr_t address = request.address(__builtin_ctz(lanes));
    const std::uintptr_t last = (address + bytes - 1) / kSectorBytes;
    for (std::uintptr_t sector = address / kSectorBytes; sector <= last; ++sector) {
      bool known = false;
      if (sector <= highest) {
        for (int i = count - 1; i >= 0 && !known; --i) known = sectors[i] == sector;
      }
      if (!known && count < 64) sectors[count++] = sector;
      highest = std::max(highest, sector);
    }
  }
  place.units += count;
  const unsigned asked = static_cast<unsigned>(__builtin_popcount(request.lanes)) * bytes;
  place.least += std::min<std::int64_t>(count, (asked + kSectorBytes - 1) / kSectorBytes);
}

/// Atomic operations on the same address come one after the other: as often as on the one that most
/// lanes have, a sector is asked for.
void count_atomic_sectors(const Request& request, Place& place) {
  std::map<std::uintptr_t, std::map<std::uintptr_t, int>> lanes_of;  // sector, address
  for (unsigned lanes = request.lanes; lanes; lanes &= lanes - 1) {
    const std::uintptr_t address = request.address(__builtin_ctz(lanes));
    ++lanes_of[address / kSectorBytes][address];
  }
  for (const auto& [sector, addresses] : lanes_of) {
    int most = 0;
    for (const auto& [address, lanes] : addresses) most = std::max(most, lanes);
    place.units += most;
  }
}

/// How often a bank has to answer beyond the first time, when it is asked for several words. Lanes
/// of 8 bytes are served in halves of the warp, lanes of 16 bytes in quarters.
void count_conflicts(const Request& request, unsigned bytes, Place& place) {
  const unsigned together = bytes <= 4 ? 32 : bytes <= 8 ? 16 : 8;
  for (unsigned first = 0; first < 32; first += together) {
    std::uintptr_t words[64];
    std::uintptr_t highest = 0;
    int count = 0;
    unsigned lanes = request.lanes >> first & (together == 32 ? ~0u : (1u << together) - 1);
    if (!lanes) continue;
    unsigned in_bank[kBanks] = {}, most = 0;
    for (; lanes; lanes &= lanes - 1) {
      const std::uintptr_t address =
          request.address(static_cast<int>(first) + __builtin_ctz(lanes));
      const std::uintptr_t last = (address + bytes - 1) / 4;
      for (std::uintptr_t word = address / 4; word <= last; ++word) {
        bool known = false;
        if (word <= highest) {
          for (int i = count - 1; i >= 0 && !known; --i) known = words[i] == word;
        }
        highest = std::max(highest, word);
        if (known || count == 64) continue;
        words[count++] = word;
        most = std::max(most, ++in_bank[word % kBanks]);
      }
    }
    place.units += most - 1;
  }
}

/// What one worker thread has counted.
class Counter {
 public:
  Counter() {
    std::lock_guard lock(mutex());
    all().push_back(this);
  }

  void access(std::uintptr_t address, unsigned bytes, Kind kind, std::uintptr_t code);
  void end_of_warp(std::size_t slot, std::size_t warp) {
    if (slot < warps_.size() && warp < warps_[slot].size()) end(warps_[slot][warp]);
  }
  void end_of_block(std::size_t slot) {
    if (slot >= warps_.size()) return;
    for (WarpRequests& warp : warps_[slot]) end(warp);
  }
  void clear() {
    places_.clear();
    table_.assign(kTable, 0);
    warps_.clear();
    last_ = {};
    sums = {};
    barrier_threads = blocks_left_out = 0;
  }
  const std::vector<Place>& places() {
    for (auto& block : warps_) {
      for (WarpRequests& warp : block) end(warp);
    }
    return places_;
  }

  static std::vector<Counter*>& all() {
    static std::vector<Counter*> counters;
    return counters;
  }
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }

  Counts sums;
  std::int64_t barrier_threads = 0;
  std::int64_t blocks_left_out = 0;

 private:
  static constexpr std::size_t kTable = 1 << 14;

  std::uint32_t place_of(std::uintptr_t code, Kind kind, bool shared, unsigned bytes);
  void end(WarpRequests& warp);
  static void evaluate_next(Pending& pending, Place& place);
  static void evaluate(const Request& request, Place& place) {
    if (place.shared) {
      count_conflicts(request, place.bytes, place);
    } else if (place.kind == Kind::atomic) {
      count_atomic_sectors(request, place);
    } else {
      count_sectors(request, place.bytes, place);
    }
    ++place.requests;
  }

  Range last_ = {};  ///< the device memory in which the last access was
  std::vector<Place> places_;
  std::vector<std::uint32_t> table_ = std::vector<std::uint32_t>(kTable);  ///< number + 1
  std::vector<std::vector<WarpRequests>> warps_;                           ///< by the block's slot
};

bool counting = false;
/// Stray accesses are reported: see ledger.h.
bool checking = false;
bool compiled_for_it = false;
std::vector<Range> device_memory;  ///< while counting, in order
std::vector<Range> host_memory;    ///< that kernels may use, in order

thread_local int uncounted = 0;

using Clock = std::chrono::steady_clock;
unsigned tallied = 0;                             ///< which launch of a Tally is counted
Clock::time_point most_until = {};                ///< until when
constinit thread_local unsigned left_out_in = 0;  ///< the calling worker counts no more of this one
constinit thread_local Counter* own_counter = nullptr;

Counter& counter() {
  if (!own_counter) own_counter = new Counter;  // for good: all() knows it
  return *own_counter;
}

bool find_memory(const std::vector<Range>& among, std::uintptr_t address, Range& range) {
  if (address - range.begin < range.end - range.begin) return true;
  const auto next =
      std::upper_bound(among.begin(), among.end(), address,
                       [](std::uintptr_t at, const Range& each) { return at < each.begin; });
  if (next == among.begin() || address >= next[-1].end) return false;
  range = next[-1];
  return true;
}

std::uint32_t Counter::place_of(std::uintptr_t code, Kind kind, bool shared, unsigned bytes) {
  std::size_t at = (code * 0x9E3779B97F4A7C15u >> 32) % kTable;
  for (; table_[at]; at = (at + 1) % kTable) {
    const Place& place = places_[table_[at] - 1];
    if (place.code == code && place.kind == kind && place.shared == shared &&
        place.bytes == bytes) {
      return table_[at] - 1;
    }
  }
  if (places_.size() + 1 == kTable) {
    std::fputs("cuda_cpu: too many places to count\n", stderr);
    std::abort();
  }
  places_.push_back({code, kind, shared, bytes, {}, 0, 0, 0});
  table_[at] = static_cast<std::uint32_t>(places_.size());
  return table_[at] - 1;
}

void Counter::access(std::uintptr_t address, unsigned bytes, Kind kind, std::uintptr_t code) {
  const Thread& thread = runner->current();
  const Block& block = *thread.block;
  // Where it was last, nothing is shared.
  bool shared = false;
  if (address - last_.begin >= last_.end - last_.begin) {
    for (const SharedStorage& storage : block.shared) {
      shared |= address - reinterpret_cast<std::uintptr_t>(storage.data) < storage.size;
    }
  }
  const std::uint32_t number = place_of(code, kind, shared, bytes);
  Place& place = places_[number];
  if (!shared && !find_memory(device_memory, address, place.last)) {
    Range host = {};
    if (checking && !find_memory(host_memory, address + bytes - 1, host))
      ledger_stray(address, bytes, kind != Kind::load, code);
    return;
  }
  if (!shared) last_ = place.last;
  if (checking && !shared && address + bytes > place.last.end) {
    ledger_stray(address, bytes, kind != Kind::load, code);
  }

  if (block.slot >= warps_.size()) warps_.resize(block.slot + 1);
  std::vector<WarpRequests>& warps = warps_[block.slot];
  if (warps.empty()) warps.resize(kMaxThreadsPerBlock / 32);
  WarpRequests& warp = warps[thread.number / 32];
  if (warp.of_place.size() <= number) warp.of_place.resize(number + 1);
  Pending& pending = warp.of_place[number];
  if (!pending.touched) {
    pending.touched = true;
    warp.touched.push_back(number);
  }
  const unsigned lane = thread.number % 32;
  const std::uint32_t nth = pending.made[lane];
  if (nth == pending.room) pending.make_room();
  pending.addresses[lane * pending.row() + nth] = address;
  pending.made[lane] = nth + 1;
  // Lanes run one after the other: when the last one comes, the first request is complete first.
  if (nth == pending.over && ++pending.lanes == 32) evaluate_next(pending, place);
}

/// A lane has made the nth request if it has made more than n.
void Counter::evaluate_next(Pending& pending, Place& place) {
  Request request;
  request.lanes = 0;
  const std::uint32_t nth = pending.over++;
  pending.lanes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (pending.made[lane] > nth) {
      request.lanes |= 1u << lane;
      request.addresses[lane] = pending.addresses[lane * pending.row() + nth];
    }
    pending.lanes += pending.made[lane] > nth + 1;
  }
  evaluate(request, place);
  if (pending.lanes == 0) {
    pending.made.fill(0);
    pending.over = 0;
  }
}

void Counter::end(WarpRequests& warp) {
  for (const std::uint32_t number : warp.touched) {
    Pending& pending = warp.of_place[number];
    while (pending.lanes > 0) evaluate_next(pending, places_[number]);
    pending.touched = false;
  }
  warp.touched.clear();
}

/// Whether the calling worker counts the block that it runs.
inline bool counts_here() { return counting && left_out_in != tallied; }
inline bool watched() { return counts_here() && runner && runner->in_thread() && uncounted == 0; }

/// An access of a kernel.
[[gnu::noinline]] void hook_kernel(const void* address, std::size_t bytes, Kind kind,
                                   const void* code, bool aligned) {
  if (!watched()) return;
  if (runner->on_own_stack(address)) return;
  // The compiler says the same of 16 bytes in a struct that is aligned to 8, which may lie so.
  const std::size_t multiple = std::min<std::size_t>(bytes, 8);
  if (aligned && checking && reinterpret_cast<std::uintptr_t>(address) % multiple != 0) {
    ledger_misaligned(reinterpret_cast<std::uintptr_t>(address), bytes, kind != Kind::load,
                      reinterpret_cast<std::uintptr_t>(code));
  }
  const BoundKernel& kernel = runner->launch().kernel;  // whose arguments are no memory of its own
  if (static_cast<std::size_t>(static_cast<const char*>(address) -
                               static_cast<const char*>(kernel.arguments)) < kernel.size) {
    return;
  }
  counter().access(reinterpret_cast<std::uintptr_t>(address), static_cast<unsigned>(bytes), kind,
                   reinterpret_cast<std::uintptr_t>(code));
}

/// An access of whoever runs, of which the host's are nobody's. There is one before each load and
/// store, and mostly nothing is counted: that is asked first, and nothing is kept for the call.
[[gnu::always_inline]] inline void hook(const void* address, std::size_t bytes, Kind kind,
                                        const void* code, bool aligned = false) {
  if (__builtin_expect(counting, false)) hook_kernel(address, bytes, kind, code, aligned);
}

/// The same of an access that the compiler takes to be aligned.
[[gnu::always_inline]] inline void hook_aligned(const void* address, std::size_t bytes, Kind kind,
                                                const void* code) {
  hook(address, bytes, kind, code, true);
}

/// The three lines that cost most beyond what they must, if they do so visibly: twice the least
/// sectors, or a conflict in two requests, and a twentieth of all that the kernel asks for.
std::vector<Counts::Place> worst_of(const std::vector<Place>& places, const Counts& counts) {
  std::vector<const Place*> bad;
  for (const Place& place : places) {
    if (place.requests == 0 || (place.kind != Kind::load && place.kind != Kind::store)) continue;
    const std::int64_t all_units = place.shared
                                       ? counts.shared_load_requests + counts.shared_store_requests
                                       : counts.global_load_sectors + counts.global_store_sectors;
    const std::int64_t excess = place.shared ? place.units : place.units - place.least;
    const bool often =
        place.shared ? 2 * place.units >= place.requests : place.units >= 2 * place.least;
    if (often && 20 * excess >= all_units) bad.push_back(&place);
  }
  std::vector<std::uintptr_t> addresses;
  for (const Place* place : bad) addresses.push_back(place->code);
  const std::vector<Line> lines = lines_of(addresses);
  if (lines.empty()) return {};

  // Copies of a line, in instances of a template or an unrolled loop, count as one.
  struct Sum {
    std::int64_t requests = 0, units = 0, least = 0;
  };
  std::map<std::tuple<std::string, int, bool, bool>, Sum> sums;
  for (std::size_t i = 0; i < bad.size(); ++i) {
    if (lines[i].file.empty()) continue;
    Sum& sum = sums[{lines[i].file, lines[i].number, bad[i]->shared, bad[i]->kind == Kind::store}];
    sum.requests += bad[i]->requests;
    sum.units += bad[i]->units;
    sum.least += bad[i]->least;
  }
  std::vector<std::pair<std::int64_t, Counts::Place>> found;
  for (const auto& [where, sum] : sums) {
    const auto& [file, line, shared, store] = where;
    const double requests = static_cast<double>(sum.requests);
    found.push_back(
        {sum.units - sum.least,
         {file, line, shared, store, sum.requests, static_cast<double>(sum.units) / requests,
          static_cast<double>(sum.least) / requests}});
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<Counts::Place> worst;
  for (std::size_t i = 0; i < std::min<std::size_t>(3, found.size()); ++i) {
    worst.push_back(found[i].second);
  }
  return worst;
}

}  // namespace

bool can_count() { return compiled_for_it; }

namespace {

/// Counts from zero, with the device memory that there is now, until then.
void begin(Clock::time_point until) {
  ++tallied;
  most_until = until;
  {
    std::lock_guard lock(device().mutex);
    device_memory.clear();
    host_memory.clear();
    for (const auto& [start, allocation] : device().allocations) {
      const auto begin = reinterpret_cast<std::uintptr_t>(start);
      (allocation.type == cudaMemoryTypeHost ? host_memory : device_memory)
          .push_back({begin, begin + allocation.size});
    }
  }
  std::lock_guard lock(Counter::mutex());
  for (Counter* each : Counter::all()) each->clear();
  counting = true;
}

/// Adds what all threads have counted since then.
void collect(Counts& counts, std::vector<Place>& places) {
  std::lock_guard lock(Counter::mutex());
  std::int64_t barrier_threads = 0;
  for (Counter* each : Counter::all()) {
    places.insert(places.end(), each->places().begin(), each->places().end());
    counts.async_copy_bytes += each->sums.async_copy_bytes;
    counts.copy_engine_bytes += each->sums.copy_engine_bytes;
    counts.multicast_saved_bytes += each->sums.multicast_saved_bytes;
    counts.tensor_flops += each->sums.tensor_flops;
    counts.library_bytes += each->sums.library_bytes;
    counts.l2_bytes += each->sums.l2_bytes;
    barrier_threads += each->barrier_threads;
  }
  counts.barriers += barrier_threads / 32;
}

/// Adds what the places ask for.
void add_up(Counts& counts, const std::vector<Place>& places) {
  for (const Place& place : places) {
    const bool load = place.kind != Kind::store;  // a copy by cp.async loads
    if (place.kind == Kind::atomic) {
      if (place.shared) {
        counts.shared_atomic_requests += place.requests;
        continue;
      }
      counts.atomic_requests += place.requests;
      counts.atomic_sectors += place.units;
    } else if (place.shared) {
      (load ? counts.shared_load_requests : counts.shared_store_requests) += place.requests;
      (load ? counts.shared_load_conflicts : counts.shared_store_conflicts) += place.units;
    } else {
      (load ? counts.global_load_requests : counts.global_store_requests) += place.requests;
      (load ? counts.global_load_sectors : counts.global_store_sectors) += place.units;
    }
  }
  counts.l2_bytes += kSectorBytes * (counts.global_load_sectors + counts.global_store_sectors +
                                     counts.atomic_sectors);
  counts.worst = worst_of(places, counts);
}

}  // namespace

void start_counting() {
  finish_kernels();
  begin(Clock::time_point::max());
}

Counts stop_counting() {
  finish_kernels();
  counting = false;
  Counts counts;
  std::vector<Place> places;
  collect(counts, places);
  add_up(counts, places);
  return counts;
}

struct Tally::Places {
  Counts counts;
  std::vector<Place> of;
};

Tally::Tally() : places_(std::make_unique<Places>()) {}
Tally::~Tally() = default;

void Tally::start(double seconds) {
  begin(Clock::now() +
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
}

std::int64_t Tally::stop() {
  counting = false;
  std::int64_t left_out = 0;
  std::vector<Place> places;
  collect(places_->counts, places);
  {
    std::lock_guard lock(Counter::mutex());
    for (const Counter* each : Counter::all()) left_out += each->blocks_left_out;
  }
  for (const Place& place : places) {
    const auto same = std::find_if(places_->of.begin(), places_->of.end(), [&](const Place& each) {
      return each.code == place.code && each.kind == place.kind && each.shared == place.shared &&
             each.bytes == place.bytes;
    });
    if (same == places_->of.end()) {
      places_->of.push_back(place);
    } else {
      same->requests += place.requests;
      same->units += place.units;
      same->least += place.least;
    }
  }
  return left_out;
}

Counts Tally::counts() const {
  Counts counts = places_->counts;
  add_up(counts, places_->of);
  return counts;
}

void check_accesses() { checking = true; }

void count_library(std::int64_t bytes) {
  if (!counting) return;
  counter().sums.library_bytes += bytes;
  counter().sums.l2_bytes += bytes;
}

constinit thread_local std::uint8_t hook_use = 2;
CUDA_CPU_NO_TSAN void choose_hook_use() { hook_use = counts_here() ? 1 : 2; }

void requests_of_warp_end(const Block& block, unsigned first) {
  if (counts_here()) counter().end_of_warp(block.slot, first / 32);
}
void requests_of_block_end(const Block& block, bool ended) {
  if (!counting) return;
  if (!counts_here()) {
    counter().blocks_left_out += ended;
    return;
  }
  counter().end_of_block(block.slot);
  if (!ended) return;
  const bool alone = runner->resident().size() == 1;
  if (alone && most_until != Clock::time_point::max() && Clock::now() > most_until) {
    left_out_in = tallied;
  }
}

void count_async_copy(const void* from, std::size_t bytes, const void* place) {
  if (!watched()) return;
  counter().sums.async_copy_bytes += static_cast<std::int64_t>(bytes);
  if (bytes == 0) return;
  counter().access(reinterpret_cast<std::uintptr_t>(from), static_cast<unsigned>(bytes),
                   Kind::async_copy, reinterpret_cast<std::uintptr_t>(place));
}

void count_atomic(const void* address, std::size_t bytes) {
  if (!watched()) return;
  counter().access(reinterpret_cast<std::uintptr_t>(address), static_cast<unsigned>(bytes),
                   Kind::atomic, reinterpret_cast<std::uintptr_t>(__builtin_return_address(0)));
}

bool is_shared(const void* address) {
  SharedPlace place;
  return runner->find_shared(*runner->current().block, address, place);
}

void count_access(const void* address, std::size_t bytes, bool store) {
  if (!watched()) return;
  counter().access(reinterpret_cast<std::uintptr_t>(address), static_cast<unsigned>(bytes),
                   store ? Kind::store : Kind::load,
                   reinterpret_cast<std::uintptr_t>(__builtin_return_address(0)));
}

void count_copy_engine(const void* address, std::size_t bytes) {
  if (!counts_here() || bytes == 0) return;
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const std::uintptr_t sectors = (at + bytes - 1) / kSectorBytes - at / kSectorBytes + 1;
  counter().sums.copy_engine_bytes += static_cast<std::int64_t>(bytes);
  counter().sums.l2_bytes += static_cast<std::int64_t>(sectors * kSectorBytes);
}

void count_multicast(std::size_t saved_bytes) {
  if (counts_here()) counter().sums.multicast_saved_bytes += static_cast<std::int64_t>(saved_bytes);
}

void count_tensor_flops(std::int64_t flops) {
  if (counts_here()) counter().sums.tensor_flops += flops;
}

void count_barrier() {
  if (counts_here()) ++counter().barrier_threads;
}

Uncounted::Uncounted() { ++uncounted; }
Uncounted::~Uncounted() { --uncounted; }

}  // namespace cuda_cpu

// ---- Loads of volatile variables ----------------------------------------------------------------

namespace cuda_cpu {
namespace {

/// A load of a volatile variable, behind which other threads may go on.
CUDA_CPU_NO_TSAN void volatile_load(const void* address, std::size_t bytes, const void* code) {
  if (!runner || !runner->in_thread() || bytes > 8) return;
  // memcpy() would be an access of its own for ThreadSanitizer.
  const unsigned long long value = bytes == 1   ? *static_cast<const std::uint8_t*>(address)
                                   : bytes == 2 ? *static_cast<const std::uint16_t*>(address)
                                   : bytes == 4 ? *static_cast<const std::uint32_t*>(address)
                                                : *static_cast<const std::uint64_t*>(address);
  if (!looks_for_long(address, value)) return;
  Site site = {"", 0, ""};
  if (!kSanitized) {  // the ordinary build comes first, and knows the line
    static std::mutex* const mutex = new std::mutex;
    static auto* const lines = new std::map<const void*, std::pair<std::string, int>>;
    std::lock_guard lock(*mutex);
    auto& [file, line] = (*lines)[code];
    if (file.empty()) {
      const std::string place = line_of(reinterpret_cast<std::uintptr_t>(code));
      const std::size_t colon = place.rfind(':');
      file = colon == std::string::npos ? "?" : place.substr(0, colon);
      line = colon == std::string::npos ? 0 : std::atoi(place.c_str() + colon + 1);
    }
    site = {file.c_str(), line, "volatile"};
  }
  only_looked(address, value, site);
}

}  // namespace
}  // namespace cuda_cpu

// ---- What the compiler calls --------------------------------------------------------------------

// Under ThreadSanitizer itself its own functions are linked, but for those of volatile variables
// (--param=tsan-distinguish-volatile=1), which it does not have.
#if defined(CUDA_CPU_TSAN)

extern "C" {
void __tsan_func_entry(void* place);
void __tsan_func_exit();
std::uint8_t __tsan_atomic8_fetch_add(volatile std::uint8_t*, std::uint8_t, int order);
std::uint16_t __tsan_atomic16_fetch_add(volatile std::uint16_t*, std::uint16_t, int order);
std::uint32_t __tsan_atomic32_fetch_add(volatile std::uint32_t*, std::uint32_t, int order);
std::uint64_t __tsan_atomic64_fetch_add(volatile std::uint64_t*, std::uint64_t, int order);
std::uint8_t __tsan_atomic8_load(const volatile std::uint8_t*, int order);
std::uint16_t __tsan_atomic16_load(const volatile std::uint16_t*, int order);
std::uint32_t __tsan_atomic32_load(const volatile std::uint32_t*, int order);
std::uint64_t __tsan_atomic64_load(const volatile std::uint64_t*, int order);
}

namespace cuda_cpu {
namespace {

/// Whether a volatile variable is in memory that several blocks may use. PTX takes an access to it
/// for a relaxed one, which is no race. In shared memory, too: but there old programs leave out
/// __syncwarp(), which has to be found.
CUDA_CPU_NO_TSAN bool is_relaxed(const void* address, std::size_t bytes) {
  if (bytes > 8 || reinterpret_cast<std::uintptr_t>(address) % bytes != 0) return false;
  return !runner || !runner->in_thread() || !(runner->on_own_stack(address) || is_shared(address));
}

/// Tells ThreadSanitizer of an atomic access. The write itself is made later, by the program: here
/// the value that is there is written once more.
template <std::size_t kBytes>
CUDA_CPU_NO_TSAN void relaxed_access(void* address, bool write, void* place) {
  __tsan_func_entry(place);
#define CUDA_CPU_RELAXED(BITS)                                                \
  if constexpr (kBytes == BITS / 8) {                                         \
    auto* const memory = static_cast<volatile std::uint##BITS##_t*>(address); \
    if (write) {                                                              \
      __tsan_atomic##BITS##_fetch_add(memory, 0, __ATOMIC_RELAXED);           \
    } else {                                                                  \
      __tsan_atomic##BITS##_load(memory, __ATOMIC_RELAXED);                   \
    }                                                                         \
  }
  CUDA_CPU_RELAXED(8)
  CUDA_CPU_RELAXED(16)
  CUDA_CPU_RELAXED(32)
  CUDA_CPU_RELAXED(64)
#undef CUDA_CPU_RELAXED
  __tsan_func_exit();
}

}  // namespace
}  // namespace cuda_cpu

extern "C" {
#define CUDA_CPU_VOLATILE(SIZE)                                           \
  void __tsan_read##SIZE##_pc(void*, void*);                              \
  void __tsan_write##SIZE##_pc(void*, void*);                             \
  CUDA_CPU_NO_TSAN void __tsan_volatile_read##SIZE(void* address) {       \
    void* const place = __builtin_return_address(0);                      \
    if (cuda_cpu::is_relaxed(address, SIZE)) {                            \
      cuda_cpu::relaxed_access<SIZE>(address, false, place);              \
    } else {                                                              \
      __tsan_read##SIZE##_pc(address, place);                             \
    }                                                                     \
    cuda_cpu::volatile_load(address, SIZE, place);                        \
    cuda_cpu::step(address);                                              \
    cuda_cpu::order_read(address, false);                                 \
  }                                                                       \
  CUDA_CPU_NO_TSAN void __tsan_volatile_write##SIZE(void* address) {      \
    void* const place = __builtin_return_address(0);                      \
    cuda_cpu::step(address);                                              \
    const cuda_cpu::OrderedWrite write(address);                          \
    if (cuda_cpu::is_relaxed(address, SIZE)) {                            \
      cuda_cpu::relaxed_access<SIZE>(address, true, place);               \
    } else {                                                              \
      __tsan_write##SIZE##_pc(address, place);                            \
    }                                                                     \
  }                                                                       \
  CUDA_CPU_NO_TSAN void __tsan_unaligned_volatile_read##SIZE(void* at) {  \
    __tsan_volatile_read##SIZE(at);                                       \
  }                                                                       \
  CUDA_CPU_NO_TSAN void __tsan_unaligned_volatile_write##SIZE(void* at) { \
    __tsan_volatile_write##SIZE(at);                                      \
  }
CUDA_CPU_VOLATILE(1)
CUDA_CPU_VOLATILE(2)
CUDA_CPU_VOLATILE(4)
CUDA_CPU_VOLATILE(8)
CUDA_CPU_VOLATILE(16)
#undef CUDA_CPU_VOLATILE
}

#else

#define CUDA_CPU_PLACE __builtin_return_address(0)

extern "C" {

void __tsan_init() { cuda_cpu::compiled_for_it = true; }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* address, std::size_t size) {
  cuda_cpu::hook(address, size, cuda_cpu::Kind::load, CUDA_CPU_PLACE);
}
void __tsan_write_range(void* address, std::size_t size) {
  cuda_cpu::hook(address, size, cuda_cpu::Kind::store, CUDA_CPU_PLACE);
}

#define CUDA_CPU_ACCESS(SIZE)                                                     \
  void __tsan_read##SIZE(void* address) {                                         \
    cuda_cpu::hook_aligned(address, SIZE, cuda_cpu::Kind::load, CUDA_CPU_PLACE);  \
  }                                                                               \
  void __tsan_write##SIZE(void* address) {                                        \
    cuda_cpu::hook_aligned(address, SIZE, cuda_cpu::Kind::store, CUDA_CPU_PLACE); \
  }                                                                               \
  void __tsan_unaligned_read##SIZE(void* address) {                               \
    cuda_cpu::hook(address, SIZE, cuda_cpu::Kind::load, CUDA_CPU_PLACE);          \
  }                                                                               \
  void __tsan_unaligned_write##SIZE(void* address) {                              \
    cuda_cpu::hook(address, SIZE, cuda_cpu::Kind::store, CUDA_CPU_PLACE);         \
  }                                                                               \
  void __tsan_volatile_read##SIZE(void* address) {                                \
    cuda_cpu::hook_aligned(address, SIZE, cuda_cpu::Kind::load, CUDA_CPU_PLACE);  \
    cuda_cpu::volatile_load(address, SIZE, CUDA_CPU_PLACE);                       \
    cuda_cpu::step(address);                                                      \
  }                                                                               \
  void __tsan_volatile_write##SIZE(void* address) {                               \
    cuda_cpu::hook_aligned(address, SIZE, cuda_cpu::Kind::store, CUDA_CPU_PLACE); \
    cuda_cpu::step(address);                                                      \
  }                                                                               \
  void __tsan_unaligned_volatile_read##SIZE(void* address) {                      \
    cuda_cpu::hook(address, SIZE, cuda_cpu::Kind::load, CUDA_CPU_PLACE);          \
    cuda_cpu::volatile_load(address, SIZE, CUDA_CPU_PLACE);                       \
    cuda_cpu::step(address);                                                      \
  }                                                                               \
  void __tsan_unaligned_volatile_write##SIZE(void* address) {                     \
    cuda_cpu::hook(address, SIZE, cuda_cpu::Kind::store, CUDA_CPU_PLACE);         \
    cuda_cpu::step(address);                                                      \
  }
CUDA_CPU_ACCESS(1)
CUDA_CPU_ACCESS(2)
CUDA_CPU_ACCESS(4)
CUDA_CPU_ACCESS(8)
CUDA_CPU_ACCESS(16)
#undef CUDA_CPU_ACCESS

// Atomic operations, all as strong as can be.
#define CUDA_CPU_ATOMIC_UPDATE(BITS, NAME)                                                      \
  std::uint##BITS##_t __tsan_atomic##BITS##_##NAME(volatile std::uint##BITS##_t* address,       \
                                                   std::uint##BITS##_t value, int) {            \
    cuda_cpu::hook(const_cast<std::uint##BITS##_t*>(address), BITS / 8, cuda_cpu::Kind::atomic, \
                   CUDA_CPU_PLACE);                                                             \
    return __atomic_##NAME(address, value, __ATOMIC_SEQ_CST);                                   \
  }
#define CUDA_CPU_ATOMIC_COMPARE(BITS, NAME)                                                     \
  int __tsan_atomic##BITS##_compare_exchange_##NAME(volatile std::uint##BITS##_t* address,      \
                                                    std::uint##BITS##_t* expected,              \
                                                    std::uint##BITS##_t value, int, int) {      \
    cuda_cpu::hook(const_cast<std::uint##BITS##_t*>(address), BITS / 8, cuda_cpu::Kind::atomic, \
                   CUDA_CPU_PLACE);                                                             \
    return __atomic_compare_exchange_n(address, expected, value, false, __ATOMIC_SEQ_CST,       \
                                       __ATOMIC_SEQ_CST);                                       \
  }
#define CUDA_CPU_ATOMIC(BITS)                                                                   \
  std::uint##BITS##_t __tsan_atomic##BITS##_load(const volatile std::uint##BITS##_t* address,   \
                                                 int) {                                         \
    cuda_cpu::hook(const_cast<const std::uint##BITS##_t*>(address), BITS / 8,                   \
                   cuda_cpu::Kind::load, CUDA_CPU_PLACE);                                       \
    return __atomic_load_n(address, __ATOMIC_SEQ_CST);                                          \
  }                                                                                             \
  void __tsan_atomic##BITS##_store(volatile std::uint##BITS##_t* address,                       \
                                   std::uint##BITS##_t value, int) {                            \
    cuda_cpu::hook(const_cast<std::uint##BITS##_t*>(address), BITS / 8, cuda_cpu::Kind::store,  \
                   CUDA_CPU_PLACE);                                                             \
    __atomic_store_n(address, value, __ATOMIC_SEQ_CST);                                         \
  }                                                                                             \
  std::uint##BITS##_t __tsan_atomic##BITS##_exchange(volatile std::uint##BITS##_t* address,     \
                                                     std::uint##BITS##_t value, int) {          \
    cuda_cpu::hook(const_cast<std::uint##BITS##_t*>(address), BITS / 8, cuda_cpu::Kind::atomic, \
                   CUDA_CPU_PLACE);                                                             \
    return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST);                               \
  }                                                                                             \
  CUDA_CPU_ATOMIC_UPDATE(BITS, fetch_add)                                                       \
  CUDA_CPU_ATOMIC_UPDATE(BITS, fetch_sub)                                                       \
  CUDA_CPU_ATOMIC_UPDATE(BITS, fetch_and)                                                       \
  CUDA_CPU_ATOMIC_UPDATE(BITS, fetch_or)                                                        \
  CUDA_CPU_ATOMIC_UPDATE(BITS, fetch_xor)                                                       \
  CUDA_CPU_ATOMIC_UPDATE(BITS, fetch_nand)                                                      \
  CUDA_CPU_ATOMIC_COMPARE(BITS, strong)                                                         \
  CUDA_CPU_ATOMIC_COMPARE(BITS, weak)                                                           \
  std::uint##BITS##_t __tsan_atomic##BITS##_compare_exchange_val(                               \
      volatile std::uint##BITS##_t* address, std::uint##BITS##_t expected,                      \
      std::uint##BITS##_t value, int, int) {                                                    \
    cuda_cpu::hook(const_cast<std::uint##BITS##_t*>(address), BITS / 8, cuda_cpu::Kind::atomic, \
                   CUDA_CPU_PLACE);                                                             \
    __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_SEQ_CST,             \
                                __ATOMIC_SEQ_CST);                                              \
    return expected;                                                                            \
  }
CUDA_CPU_ATOMIC(8)
CUDA_CPU_ATOMIC(16)
CUDA_CPU_ATOMIC(32)
CUDA_CPU_ATOMIC(64)
#undef CUDA_CPU_ATOMIC
#undef CUDA_CPU_ATOMIC_COMPARE
#undef CUDA_CPU_ATOMIC_UPDATE

void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

}  // extern "C"

#endif
