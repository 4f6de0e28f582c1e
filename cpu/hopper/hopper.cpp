// What Hopper's units would do: see hopper_device.h. This file is compiled without ThreadSanitizer,
// and tells it itself who reads and writes what. The copy engine and the tensor cores have
// identities of their own there:
//
//   - The copy engine's writes are ordered after whoever has started them, and before those who
//     wait for their barrier.
//   - What it reads of shared memory, or the tensor cores do, is ordered after threads' writes by
//     shared_fence() alone: a barrier is not enough. That there is a barrier as well shows in the
//     name of the thread that starts the operation, which reads the same memory once.

#include <algorithm>
#include <bit>
#include <bitset>
#include <climits>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "cpu/execution/execution.h"
#include "cpu/execution/small_float.h"
#include "cpu/hopper/units.h"
#include "cpu/watch/hooks.h"
#include "cuda_fp8.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define CUDA_CPU_WIDE __attribute__((target("avx2,fma,f16c")))
#endif

#if defined(CUDA_CPU_TSAN)
extern "C" void __tsan_read_range(void* address, unsigned long size);
extern "C" void __tsan_write_range(void* address, unsigned long size);
#endif

namespace cuda_cpu {

namespace {

void tsan_reads([[maybe_unused]] const void* address, [[maybe_unused]] std::size_t size) {
#if defined(CUDA_CPU_TSAN)
  __tsan_read_range(const_cast<void*>(address), size);
#endif
}

void tsan_writes([[maybe_unused]] void* address, [[maybe_unused]] std::size_t size) {
#if defined(CUDA_CPU_TSAN)
  __tsan_write_range(address, size);
#endif
}

/// The same in the name of the current thread, whose bookkeeping is not watched.
void thread_reads([[maybe_unused]] const void* address, [[maybe_unused]] std::size_t size) {
#if defined(CUDA_CPU_TSAN)
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  tsan_reads(address, size);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
}

void thread_writes([[maybe_unused]] void* address, [[maybe_unused]] std::size_t size) {
#if defined(CUDA_CPU_TSAN)
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  tsan_writes(address, size);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
}

void copy_bytes(void* to, const void* from, std::size_t size) {
#if defined(CUDA_CPU_TSAN) && defined(__x86_64__)
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size) : : "memory");
#else
  std::memcpy(to, from, size);
#endif
}

void fill_bytes(void* to, int value, std::size_t size) {
#if defined(CUDA_CPU_TSAN) && defined(__x86_64__)
  asm volatile("rep stosb" : "+D"(to), "+c"(size) : "a"(value) : "memory");
#else
  std::memset(to, value, size);
#endif
}

// ---- Tensor maps -------------------------------------------------------------------------------

constexpr std::uint32_t kMapMagic = 0x7E4504AB;

/// What is in a CUtensorMap.
struct TensorMap {
  std::uint32_t magic;
  std::uint8_t type, rank, swizzle, element_bytes;
  /// In a driver's map there is a bit that some programs clear, since older drivers set it wrongly.
  std::uint64_t unused;
  char* address;
  std::uint64_t strides[4];
  std::uint32_t extents[5];
  std::uint32_t box[5];

  std::size_t row_bytes() const { return std::size_t{box[0]} * element_bytes; }
  /// Of a box with more than two dimensions: those of all matrices of it, one after another.
  std::size_t rows() const {
    std::size_t all = 1;
    for (int i = 1; i < rank; ++i) all *= box[i];
    return all;
  }
  std::size_t bytes() const { return rows() * row_bytes(); }
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

constexpr std::size_t kMaxRowBytes = 2048;

/// Where a byte is whose address in the window of shared memory would be `address`. "Swizzling
/// modes" of the PTX ISA's "Tensors": of an address, bits 4 to 6 exclusive or bits 7 to 9. With 64
/// bytes two of these bits are changed, with 32 one.
std::size_t swizzled(std::size_t address, std::size_t bytes = 128) {
  return address ^ (address >> 7 & (bytes / 16 - 1)) << 4;
}

/// The bytes of the swizzle that a map names; 16 for none.
std::size_t swizzle_bytes(std::uint8_t swizzle) { return std::size_t{16} << swizzle; }

float round_to_tf32(float value) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7F800000) == 0x7F800000) return value;
  bits = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFFu;
  return std::bit_cast<float>(bits);
}

/// A row of a box as far as it is inside of the tensor: elements `first` to `end` - 1 of the box,
/// of which the first is at `address`.
struct RowInside {
  std::uint32_t first, end;
  char* address;
};

RowInside row_inside(const TensorMap& map, const int* at, std::size_t row) {
  RowInside inside = {0, 0, nullptr};
  std::int64_t offset = 0;
  for (int i = 1; i < map.rank; ++i) {
    const std::int64_t place = at[i] + static_cast<std::int64_t>(row % map.box[i]);
    row /= map.box[i];
    if (place < 0 || place >= map.extents[i]) return inside;
    offset += place * static_cast<std::int64_t>(map.strides[i - 1]);
  }
  const std::int64_t x = at[0], first = std::max<std::int64_t>(0, -x);
  const std::int64_t end = std::min<std::int64_t>(map.box[0], map.extents[0] - x);
  if (first >= end) return inside;
  offset += (x + first) * map.element_bytes;
  inside = {static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(end),
            map.address + offset};
  return inside;
}

// ---- What blocks have to do --------------------------------------------------------------------

struct MBarrier;

/// A copy into shared memory that is under way.
struct Transfer {
  /// Not valid (magic 0): bytes that lie one after another.
  TensorMap map;
  int at[5];
  const char* source;
  /// Combines with what is there, instead of replacing it.
  Reduction reduction;
  /// Instead of a source: what store_push() writes.
  bool by_value;
  float value;
  char* target;
  std::size_t window;
  std::size_t bytes;
  /// The block whose shared memory is the source, if it is.
  Block* from;
  bool of_other_block;
  Site site;
};

/// "mbarrier": what is behind the 8 bytes in shared memory.
struct MBarrier {
  Block* block;
  std::uint64_t* word;
  SharedPlace place;
  Site site;
  const Thread* initialized_by;
  /// A barrier_init_fence() has followed.
  bool visible;
  /// Threads of the block that have met who has initialized it since, directly or not; and whether
  /// the blocks of the cluster have.
  std::bitset<kMaxThreadsPerBlock> known;
  bool known_to_cluster;
  unsigned count, missing;
  long bytes;
  unsigned phase;
  Queue waiting;
  /// The last wait of a thread: its parity, -1 if there was none, and its place.
  int waited_parity = -1;
  Site waited_at;
  std::deque<Transfer> transfers;
  /// Arrivals and bytes of other blocks, for each parity, that no thread of this block has waited
  /// for; and how many of them came from threads that had arrived at the cluster's barrier.
  unsigned unseen[2], unseen_late[2];
  char tsan_started;
  char tsan_over[2];
};

constexpr std::uint64_t kBarrierMagic = 0x6BA2'21E2'0000'0000;
constexpr long kMaxBytes = (1 << 20) - 1;

/// A box, or several, of a thread's bulk group.
struct Store {
  TensorMap map;
  int at[5];
  SharedPlace from;
  char* to;  // of bytes in a row; null if it is a box
  std::size_t bytes;
  Reduction reduction;  // combines with what is there, instead of replacing it; or null
};
using Stores = std::vector<Store>;

/// A thread's stores: groups, oldest first, and what is not committed.
struct BulkGroups {
  std::deque<Stores> groups;
  Stores open;
  bool waiting = false;
  std::size_t newest = 0;
};

struct NamedBarrier {
  unsigned threads;
  unsigned arrived;
  Queue waiting;
  TsanBarrier tsan;
};

/// A sum of a warpgroup that products are being added to: 64 rows.
struct Sum {
  float* registers[128];
  int count;
  bool halves;  ///< of fp16, two in a register
  int columns() const { return numbers() * 2; }
  /// Of a thread.
  int numbers() const { return halves ? 2 * count : count; }
  unsigned threads;
  alignas(64) float values[64 * 256];
};

struct Product {
  Wgmma type;
  std::uint64_t a, b;
  bool from_registers, transposed, tall, add, halves;
  Sum* sum;
  unsigned threads;
  Site site;
  std::uint32_t fragments[128][4];
};

/// What a thread of a warpgroup has started.
struct WgmmaThread {
  struct InFlight {
    Sum* sum;
    std::uint64_t last;  // number of its last product, plus one
  };
  std::uint64_t started;
  std::vector<std::uint64_t> groups;  // where they end
  std::vector<InFlight> sums;
  bool fenced;
  std::uint64_t waited;  // for so many of the first products
};

struct Warpgroup {
  std::deque<std::unique_ptr<Product>> products;
  std::uint64_t first;   // the number of products[0]
  std::uint64_t landed;  // as many
  WgmmaThread threads[128];
  Queue waiting;
  // Registers of a thread, and how many threads of the group have called setmaxnreg.
  unsigned registers;
  unsigned changing;
  unsigned target;
  Queue growing;
  char tsan_done;
  /// What threads have read before they started product n hangs on number n % kGiven.
  static constexpr std::uint64_t kGiven = 64;
  char tsan_given[kGiven];
};

}  // namespace

struct HopperBlock {
  std::vector<std::unique_ptr<MBarrier>> barriers;
  NamedBarrier named[48];  ///< behind the 16 that have names: of tiles of several warps
  Warpgroup warpgroups[kMaxThreadsPerBlock / 128];
  std::vector<std::unique_ptr<BulkGroups>> bulk;
  unsigned spare_registers;
  std::vector<std::unique_ptr<Sum>> sums;
  std::vector<Sum*> free_sums;
  std::vector<std::unique_ptr<Product>> free_products;
  char tsan_fenced;
  char tsan_async;
};

void DeleteHopperBlock::operator()(HopperBlock* block) const { delete block; }

namespace {

enum Engine { kLoads, kStores, kTensorCores };

/// Acts as one of the block's units for ThreadSanitizer, while it exists.
class ActAs {
 public:
  ActAs(Block& block, Engine engine) : caller_(tsan_current()) {
    tsan_become(block.tsan_engine[engine]);
  }
  ~ActAs() { tsan_become(caller_); }
  ActAs(const ActAs&) = delete;
  ActAs& operator=(const ActAs&) = delete;

 private:
  void* const caller_;
};

unsigned launch_registers(const Launch& launch, unsigned threads) {
  const LaunchBounds& bounds = launch.description.bounds;
  const unsigned most = std::max(threads, bounds.threads) * std::max(1u, bounds.blocks);
  return std::min(255u, 65536 / most / 8 * 8);
}

HopperBlock& hopper_of(Block& block) {
  if (!block.hopper) {
    block.hopper.reset(new HopperBlock());
    reset_hopper(block);
  }
  return *block.hopper;
}

HopperBlock& hopper() { return hopper_of(*runner->current().block); }

Warpgroup& warpgroup_of(const Thread& thread) {
  return hopper_of(*thread.block).warpgroups[thread.number / 128];
}

/// A message about what the current thread does at `site`.
Message complaint(const char* operation, const Site& site) {
  Message message = runner->begin_message(*runner->current().block);
  message.add_thread(runner->current());
  message.add(": %s at %s:%d (%s): ", operation, site.file, site.line, site.function);
  return message;
}

#define CUDA_CPU_COMPLAIN(operation, site, ...)   \
  do {                                            \
    Message message = complaint(operation, site); \
    message.add(__VA_ARGS__);                     \
    runner->fail(message);                        \
  } while (false)

SharedPlace place_of(const void* pointer, const char* what, const char* operation,
                     const Site& site) {
  SharedPlace place;
  if (!runner->find_shared(*runner->current().block, pointer, place)) {
    CUDA_CPU_COMPLAIN(operation, site, "%s is not in this block's shared memory", what);
  }
  return place;
}

Block& block_of_rank(int rank, const char* operation, const Site& site) {
  Cluster& cluster = *runner->current().block->cluster;
  if (rank < 0 || rank >= static_cast<int>(cluster.blocks.size())) {
    CUDA_CPU_COMPLAIN(operation, site, "there is no block %d in a cluster of %zu", rank,
                      cluster.blocks.size());
  }
  Block& block = *cluster.blocks[static_cast<std::size_t>(rank)];
  if (block.exited == runner->threads_in_block()) {
    CUDA_CPU_COMPLAIN(operation, site, "block %d of the cluster has ended", rank);
  }
  return block;
}

// ---- Barriers in shared memory -----------------------------------------------------------------

/// The barrier at `place` of `block`. Others than its own block's threads, and the copy engine,
/// need it to be visible.
MBarrier& find_barrier(Block& block, const SharedPlace& place, bool by_others,
                       const char* operation, const Site& site) {
  auto* const word = reinterpret_cast<std::uint64_t*>(runner->shared_at(block, place));
  if (reinterpret_cast<std::uintptr_t>(word) % 8 != 0) {
    CUDA_CPU_COMPLAIN(operation, site, "the barrier is not aligned to 8 bytes");
  }
  thread_reads(word, sizeof *word);
  const std::uint64_t number = *word & 0xFFFF'FFFF;
  HopperBlock& own = hopper_of(block);
  if ((*word & ~std::uint64_t{0xFFFF'FFFF}) != kBarrierMagic || number >= own.barriers.size() ||
      own.barriers[number]->word != word) {
    CUDA_CPU_COMPLAIN(operation, site,
                      "there is no barrier at this place in block %u of the cluster: it has not"
                      " been initialized, or something has overwritten it",
                      block.rank);
  }
  MBarrier& barrier = *own.barriers[number];
  if (by_others && !barrier.visible) {
    CUDA_CPU_COMPLAIN(operation, site,
                      "the barrier of block %u has been initialized at %s:%d, but others cannot see"
                      " it yet: barrier_init_fence() is missing (in PTX fence.mbarrier_init)",
                      block.rank, barrier.site.file, barrier.site.line);
  }
  const Thread& self = runner->current();
  const bool known = &block == self.block ? barrier.known[self.number] : barrier.known_to_cluster;
  if (!known) {
    CUDA_CPU_COMPLAIN(operation, site,
                      "the barrier has been initialized at %s:%d, but nothing says that this thread"
                      " comes after that: a barrier among the threads%s is missing",
                      barrier.site.file, barrier.site.line,
                      &block == self.block ? "" : " of the cluster");
  }
  return barrier;
}

void complete_phase(MBarrier& barrier, const char* operation, const Site& site) {
  if (!barrier.transfers.empty()) {
    CUDA_CPU_COMPLAIN(operation, site,
                      "phase %u of the barrier ends while copies are under way whose bytes it does"
                      " not expect: %zu bytes, started at %s:%d",
                      barrier.phase, barrier.transfers[0].bytes, barrier.transfers[0].site.file,
                      barrier.transfers[0].site.line);
  }
  ++barrier.phase;
  barrier.missing = barrier.count;
  runner->make_all_ready(barrier.waiting);
}

void count_unseen(MBarrier& barrier, const Thread& thread) {
  ++barrier.unseen[barrier.phase & 1];
  if (thread.cluster_arrived) ++barrier.unseen_late[barrier.phase & 1];
}

}  // namespace

void* shared_pointer(std::uint32_t address) {
  const Unwatched bookkeeping;
  Block* block = runner->current().block;
  const std::uint32_t rank = address >> kWindowBits;
  if (rank > block->cluster->blocks.size()) {
    fail("shared memory: there is no block %u in a cluster of %zu", rank - 1,
         block->cluster->blocks.size());
  }
  if (rank > 0) block = block->cluster->blocks[rank - 1];
  SharedPlace place;
  if (!runner->find_window(address & kWindowMask, place)) {
    fail("shared memory: no variable of the block is at the address 0x%x", address & kWindowMask);
  }
  return runner->shared_at(*block, place);
}

void mbarrier_init(std::uint64_t* address, int count, Site site) {
  const Unwatched bookkeeping;
  const char* const operation = "barrier_init()";
  Thread& self = runner->current();
  const SharedPlace place = place_of(address, "the barrier", operation, site);
  if (count < 1 || count >= 1 << 20) {
    CUDA_CPU_COMPLAIN(operation, site, "a barrier cannot count %d arrivals", count);
  }
  if (reinterpret_cast<std::uintptr_t>(address) % 8 != 0) {
    CUDA_CPU_COMPLAIN(operation, site, "the barrier is not aligned to 8 bytes");
  }
  HopperBlock& own = hopper();
  for (const auto& other : own.barriers) {
    if (other->word == address) {
      CUDA_CPU_COMPLAIN(operation, site, "there is a barrier already, from %s:%d", other->site.file,
                        other->site.line);
    }
  }
  auto barrier = std::make_unique<MBarrier>();
  barrier->block = self.block;
  barrier->word = address;
  barrier->place = place;
  barrier->site = site;
  barrier->initialized_by = &self;
  barrier->visible = false;
  barrier->known.set(self.number);
  barrier->known_to_cluster = false;
  barrier->count = barrier->missing = static_cast<unsigned>(count);
  barrier->bytes = 0;
  barrier->phase = 0;
  for (int parity = 0; parity < 2; ++parity) {
    barrier->unseen[parity] = barrier->unseen_late[parity] = 0;
  }
  thread_writes(address, sizeof *address);
  *address = kBarrierMagic | own.barriers.size();
  own.barriers.push_back(std::move(barrier));
}

void mbarrier_init_fence() {
  const Unwatched bookkeeping;
  Thread& self = runner->current();
  for (const auto& barrier : hopper().barriers) {
    if (barrier->initialized_by == &self) barrier->visible = true;
  }
  tsan_release(&self.block->cluster->tsan_initialized);
}

void mbarrier_arrive(std::uint64_t* address, int rank, int bytes, const char* operation,
                     Site site) {
  const Unwatched bookkeeping;
  Thread& self = runner->current();
  const SharedPlace place = place_of(address, "the barrier", operation, site);
  Block& block = rank == kOwnRank ? *self.block : block_of_rank(rank, operation, site);
  const bool remote = &block != self.block;
  MBarrier& barrier = find_barrier(block, place, remote, operation, site);
  if (barrier.missing == 0) {
    CUDA_CPU_COMPLAIN(
        operation, site,
        "one arrival too many: all %u of phase %u have come, and %ld bytes are missing",
        barrier.count, barrier.phase, barrier.bytes);
  }
  if (bytes < 0 || barrier.bytes + bytes > kMaxBytes) {
    CUDA_CPU_COMPLAIN(operation, site, "a phase cannot expect %ld bytes", barrier.bytes + bytes);
  }
  if (remote) count_unseen(barrier, self);
  tsan_release(&barrier.tsan_over[barrier.phase & 1]);
  barrier.bytes += bytes;
  if (--barrier.missing == 0 && barrier.bytes == 0) complete_phase(barrier, operation, site);
}

void mbarrier_wait(std::uint64_t* address, int parity, Site site) {
  const Unwatched bookkeeping;
  const char* const operation = "barrier_wait()";
  Thread& self = runner->current();
  const SharedPlace place = place_of(address, "the barrier", operation, site);
  MBarrier& barrier = find_barrier(*self.block, place, false, operation, site);
  if (parity != 0 && parity != 1) {
    CUDA_CPU_COMPLAIN(operation, site, "the parity is %d", parity);
  }
  barrier.waited_parity = parity;
  barrier.waited_at = site;
  if (static_cast<int>(barrier.phase & 1) == parity) {
    barrier.waiting.push(&self);
    runner->wait(operation, site, &barrier, barrier.phase);
  }
  barrier.unseen[parity] = barrier.unseen_late[parity] = 0;
  tsan_acquire(&barrier.tsan_over[parity]);
}

bool mbarrier_test(std::uint64_t* address, int parity, Site site) {
  Thread& self = runner->current();
  {
    const Unwatched bookkeeping;
    const char* const operation = "mbarrier.test_wait";
    const SharedPlace place = place_of(address, "the barrier", operation, site);
    MBarrier& barrier = find_barrier(*self.block, place, false, operation, site);
    if (static_cast<int>(barrier.phase & 1) == parity && self.seen_at != address) {
      self.seen_at = address;
      runner->spin(operation, site);
      if (static_cast<int>(barrier.phase & 1) == parity) return false;
    }
    self.seen_at = nullptr;
  }
  mbarrier_wait(address, parity, site);
  return true;
}

int mbarrier_parity(std::uint64_t* address, Site site) {
  const Unwatched bookkeeping;
  const char* const operation = "mbarrier.arrive";
  const SharedPlace place = place_of(address, "the barrier", operation, site);
  return static_cast<int>(
      find_barrier(*runner->current().block, place, false, operation, site).phase & 1);
}

void mbarrier_expect(std::uint64_t* address, int rank, int bytes, Site site) {
  const Unwatched bookkeeping;
  const char* const operation = "mbarrier.expect_tx";
  Thread& self = runner->current();
  const SharedPlace place = place_of(address, "the barrier", operation, site);
  Block& block = rank == kOwnRank ? *self.block : block_of_rank(rank, operation, site);
  MBarrier& barrier = find_barrier(block, place, &block != self.block, operation, site);
  if (bytes < 0 || barrier.bytes + bytes > kMaxBytes) {
    CUDA_CPU_COMPLAIN(operation, site, "a phase cannot expect %ld bytes", barrier.bytes + bytes);
  }
  barrier.bytes += bytes;
}

void mbarrier_invalidate(std::uint64_t* address, Site site) {
  const Unwatched bookkeeping;
  const char* const operation = "mbarrier.inval";
  const SharedPlace place = place_of(address, "the barrier", operation, site);
  MBarrier& barrier = find_barrier(*runner->current().block, place, false, operation, site);
  if (!barrier.transfers.empty() || barrier.waiting.head) {
    CUDA_CPU_COMPLAIN(operation, site,
                      "copies are under way to the barrier, or threads wait there");
  }
  barrier.word = nullptr;
  thread_writes(address, sizeof *address);
  *address = ~std::uint64_t{0};
}

// ---- Copies into shared memory -----------------------------------------------------------------

namespace {

/// Puts the copy on its way: its target is poison from now on.
void start_transfer(Block& block, const SharedPlace& to, const SharedPlace& barrier_place,
                    Transfer transfer, const char* operation) {
  Thread& self = runner->current();
  const bool remote = &block != self.block;
  MBarrier& barrier = find_barrier(block, barrier_place, true, operation, transfer.site);
  transfer.target = runner->shared_at(block, to);
  transfer.window = runner->window_address(to);
  transfer.of_other_block = remote;
  if (to.offset + transfer.bytes > runner->shared_size(to.declaration)) {
    CUDA_CPU_COMPLAIN(operation, transfer.site,
                      "%zu bytes are more than what follows in shared memory", transfer.bytes);
  }
  if (remote) count_unseen(barrier, self);
  if (!transfer.reduction) {  // others may reduce into the same
    thread_writes(transfer.target, transfer.bytes);
    fill_bytes(transfer.target, 0xFF, transfer.bytes);
  }
  tsan_release(&barrier.tsan_started);
  barrier.transfers.push_back(transfer);
}

/// Fills the target of a box.
void land_box(const Transfer& transfer) {
  const TensorMap& map = transfer.map;
  const std::size_t row_bytes = map.row_bytes();
  char row[kMaxRowBytes];
  for (std::size_t r = 0; r < map.rows(); ++r) {
    const RowInside inside = row_inside(map, transfer.at, r);
    fill_bytes(row, 0, row_bytes);
    if (inside.first < inside.end) {
      const std::size_t size = std::size_t{inside.end - inside.first} * map.element_bytes;
      tsan_reads(inside.address, size);
      copy_bytes(row + std::size_t{inside.first} * map.element_bytes, inside.address, size);
    }
    if (map.type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32) {
      for (std::size_t i = 0; i < map.box[0]; ++i) {
        float value;
        std::memcpy(&value, row + 4 * i, 4);
        value = round_to_tf32(value);
        std::memcpy(row + 4 * i, &value, 4);
      }
    }
    char* const to = transfer.target + r * row_bytes;
    if (map.swizzle == CU_TENSOR_MAP_SWIZZLE_NONE) {
      copy_bytes(to, row, row_bytes);
    } else {
      const std::size_t window = transfer.window + r * row_bytes;
      for (std::size_t piece = 0; piece < row_bytes; piece += 16) {
        const std::size_t at = swizzled(window + piece, swizzle_bytes(map.swizzle));
        std::memcpy(transfer.target + (at - transfer.window), row + piece, 16);
      }
    }
  }
}

/// The copies of the barrier's phase arrive.
bool land_transfers(MBarrier& barrier) {
  if (barrier.missing > 0 || barrier.bytes == 0 || barrier.transfers.empty()) return false;
  while (barrier.bytes > 0 && !barrier.transfers.empty()) {
    const Transfer& transfer = barrier.transfers.front();
    Block& block = *barrier.block;
    if (transfer.from) {
      // The source is another block's shared memory, written by its threads.
      HopperBlock& from = hopper_of(*transfer.from);
      ActAs stores(*transfer.from, kStores);
      tsan_acquire(&from.tsan_fenced);
      tsan_acquire(&from.tsan_async);
      tsan_reads(transfer.source, transfer.bytes);
      tsan_release(&barrier.tsan_started);
    }
    {
      ActAs loads(block, kLoads);
      tsan_acquire(&barrier.tsan_started);
      if (transfer.map.magic) {
        land_box(transfer);
      } else if (transfer.reduction) {
        const Uncounted as_copies;
        transfer.reduction(transfer.target, transfer.source, transfer.bytes);
      } else {
        if (!transfer.by_value && !transfer.from) tsan_reads(transfer.source, transfer.bytes);
        copy_bytes(
            transfer.target,
            transfer.by_value ? reinterpret_cast<const char*>(&transfer.value) : transfer.source,
            transfer.bytes);
      }
      if (!transfer.reduction) tsan_writes(transfer.target, transfer.bytes);
      tsan_release(&barrier.tsan_over[barrier.phase & 1]);
      tsan_release(&hopper_of(block).tsan_async);
    }
    if (static_cast<long>(transfer.bytes) > barrier.bytes) {
      Message message = runner->begin_message(block);
      message.add(
          "a copy of %zu bytes that started at %s:%d comes to a barrier (of %s:%d) whose phase %u"
          " expects %ld bytes more",
          transfer.bytes, transfer.site.file, transfer.site.line, barrier.site.file,
          barrier.site.line, barrier.phase, barrier.bytes);
      runner->fail_launch(message);
      return false;
    }
    barrier.bytes -= static_cast<long>(transfer.bytes);
    barrier.transfers.pop_front();
  }
  if (barrier.bytes > 0) return false;
  if (!barrier.transfers.empty()) {
    Message message = runner->begin_message(*barrier.block);
    message.add(
        "phase %u of the barrier of %s:%d ends while a copy of %zu bytes, started at %s:%d, is "
        "under"
        " way, which it does not expect",
        barrier.phase, barrier.site.file, barrier.site.line, barrier.transfers[0].bytes,
        barrier.transfers[0].site.file, barrier.transfers[0].site.line);
    runner->fail_launch(message);
    return false;
  }
  complete_phase(barrier, "", barrier.site);
  return true;
}

TensorMap read_map(const CUtensorMap* map, int rank, const char* operation, const Site& site) {
  if (reinterpret_cast<std::uintptr_t>(map) % 64 != 0) {
    CUDA_CPU_COMPLAIN(operation, site, "the tensor map is not aligned to 64 bytes");
  }
  TensorMap result;
  std::memcpy(static_cast<void*>(&result), map, sizeof result);
  if (result.magic != kMapMagic) CUDA_CPU_COMPLAIN(operation, site, "that is no tensor map");
  if (result.rank != rank) {
    CUDA_CPU_COMPLAIN(operation, site, "%d coordinates for a tensor map of %d dimensions", rank,
                      static_cast<int>(result.rank));
  }
  return result;
}

/// Seen on an H200: an illegal instruction, if the first column is not at a multiple of 16 bytes.
void check_column(const TensorMap& map, const int* at, const char* operation, const Site& site) {
  if (static_cast<std::int64_t>(at[0]) * map.element_bytes % 16 != 0) {
    CUDA_CPU_COMPLAIN(operation, site, "the box starts at column %d, no multiple of 16 bytes",
                      at[0]);
  }
}

void check_box(const SharedPlace& place, const char* operation, const Site& site) {
  if (runner->window_address(place) % 128 != 0) {
    CUDA_CPU_COMPLAIN(operation, site,
                      "the box in shared memory is not aligned to 128 bytes: it starts %zu beyond",
                      runner->window_address(place) % 128);
  }
}

/// Returns the bytes of the box that are inside of the tensor.
std::size_t count_box(const TensorMap& map, const int* at) {
  std::size_t all = 0;
  for (std::size_t r = 0; r < map.rows(); ++r) {
    const RowInside inside = row_inside(map, at, r);
    const std::size_t bytes = std::size_t{inside.end - inside.first} * map.element_bytes;
    count_copy_engine(inside.address, bytes);
    all += bytes;
  }
  return all;
}

/// What "cp.async.bulk" asks for.
void check_bulk(const void* to, const void* from, int bytes, const char* operation, Site site) {
  if (bytes < 0 || bytes % 16 != 0 || reinterpret_cast<std::uintptr_t>(from) % 16 != 0 ||
      reinterpret_cast<std::uintptr_t>(to) % 16 != 0) {
    CUDA_CPU_COMPLAIN(operation, site, "%d bytes from %p to %p: not multiples of 16", bytes, from,
                      to);
  }
}

}  // namespace

void tensor_load(void* to, const CUtensorMap* map, int rank, const int* coordinates,
                 std::uint64_t* barrier, std::uint16_t ranks, Site site) {
  const Unwatched bookkeeping;
  const char* const operation = ranks ? "tensor_load_multicast()" : "tensor_load()";
  Block& own = *runner->current().block;
  Transfer transfer = {};
  transfer.map = read_map(map, rank, operation, site);
  for (int i = 0; i < rank; ++i) transfer.at[i] = coordinates[i];
  transfer.bytes = transfer.map.bytes();
  transfer.site = site;
  const SharedPlace place = place_of(to, "the target", operation, site);
  const SharedPlace at = place_of(barrier, "the barrier", operation, site);
  check_box(place, operation, site);
  check_column(transfer.map, coordinates, operation, site);
  const std::size_t asked = count_box(transfer.map, coordinates);
  if (ranks) count_multicast((static_cast<std::size_t>(std::popcount(ranks)) - 1) * asked);
  if (!ranks) return start_transfer(own, place, at, transfer, operation);
  for (int i = 0; i < 16; ++i) {
    if (ranks >> i & 1) {
      start_transfer(block_of_rank(i, operation, site), place, at, transfer, operation);
    }
  }
}

namespace {

void start_bulk(Reduction reduction, void* to, const void* from, int bytes, std::uint64_t* barrier,
                int rank, const char* operation, const Site& site) {
  const bool push = rank != kOwnRank;
  Block& own = *runner->current().block;
  check_bulk(to, from, bytes, operation, site);
  Transfer transfer = {};
  transfer.reduction = reduction;
  transfer.source = static_cast<const char*>(from);
  transfer.bytes = static_cast<std::size_t>(bytes);
  transfer.site = site;
  const SharedPlace place = place_of(to, "the target", operation, site);
  const SharedPlace at = place_of(barrier, "the barrier", operation, site);
  if (push) {
    const SharedPlace source = place_of(from, "the source", operation, site);
    if (source.offset + transfer.bytes > runner->shared_size(source.declaration)) {
      CUDA_CPU_COMPLAIN(operation, site, "%d bytes are more than what follows in shared memory",
                        bytes);
    }
    transfer.from = &own;
    thread_reads(from, transfer.bytes);
  } else {
    count_copy_engine(from, transfer.bytes);
  }
  start_transfer(push ? block_of_rank(rank, operation, site) : own, place, at, transfer, operation);
}

}  // namespace

void bulk_copy(void* to, const void* from, int bytes, std::uint64_t* barrier, int rank, Site site) {
  const Unwatched bookkeeping;
  const char* const operation = rank != kOwnRank ? "bulk_push()" : "bulk_load()";
  start_bulk(nullptr, to, from, bytes, barrier, rank, operation, site);
}

void bulk_reduce(Reduction reduction, void* to, const void* from, int bytes, std::uint64_t* barrier,
                 int rank, Site site) {
  const Unwatched bookkeeping;
  if (rank == kOwnRank) rank = cluster_rank();  // the source is in shared memory all the same
  start_bulk(reduction, to, from, bytes, barrier, rank, "cp.reduce.async.bulk", site);
}

void store_push(float* to, float value, std::uint64_t* barrier, int rank, Site site) {
  const Unwatched bookkeeping;
  const char* const operation = "store_push()";
  Transfer transfer = {};
  transfer.by_value = true;
  transfer.value = value;
  transfer.bytes = sizeof(float);
  transfer.site = site;
  const SharedPlace place = place_of(to, "the target", operation, site);
  const SharedPlace at = place_of(barrier, "the barrier", operation, site);
  start_transfer(block_of_rank(rank, operation, site), place, at, transfer, operation);
}

// ---- Stores ------------------------------------------------------------------------------------

namespace {

BulkGroups& bulk_of(const Thread& thread) {
  HopperBlock& own = hopper_of(*thread.block);
  if (own.bulk.size() <= thread.number) own.bulk.resize(thread.number + 1);
  auto& groups = own.bulk[thread.number];
  if (!groups) groups = std::make_unique<BulkGroups>();
  return *groups;
}

void land_store(Block& block, const Store& store) {
  const TensorMap& map = store.map;
  const std::size_t row_bytes = map.row_bytes();
  const char* const from = runner->shared_at(block, store.from);
  const std::size_t window = runner->window_address(store.from);
  ActAs stores(block, kStores);
  tsan_acquire(&hopper_of(block).tsan_fenced);
  tsan_acquire(&hopper_of(block).tsan_async);
  tsan_reads(from, store.bytes);
  const Uncounted as_copies;
  if (store.to && store.reduction) return store.reduction(store.to, from, store.bytes);
  if (store.to) {
    tsan_writes(store.to, store.bytes);
    return copy_bytes(store.to, from, store.bytes);
  }
  char row[kMaxRowBytes];
  for (std::size_t r = 0; r < map.rows(); ++r) {
    const RowInside inside = row_inside(map, store.at, r);
    if (inside.first >= inside.end) continue;
    if (map.swizzle == CU_TENSOR_MAP_SWIZZLE_NONE) {
      copy_bytes(row, from + r * row_bytes, row_bytes);
    } else {
      for (std::size_t piece = 0; piece < row_bytes; piece += 16) {
        const std::size_t at = swizzled(window + r * row_bytes + piece, swizzle_bytes(map.swizzle));
        std::memcpy(row + piece, from + (at - window), 16);
      }
    }
    const std::size_t size = std::size_t{inside.end - inside.first} * map.element_bytes;
    const char* const first = row + std::size_t{inside.first} * map.element_bytes;
    if (store.reduction) {
      store.reduction(inside.address, first, size);
      continue;
    }
    tsan_writes(inside.address, size);
    copy_bytes(inside.address, first, size);
  }
}

bool land_stores(Block& block, BulkGroups& bulk, Thread& thread) {
  bulk.waiting = false;
  while (bulk.groups.size() > bulk.newest) {
    for (const Store& store : bulk.groups.front()) land_store(block, store);
    bulk.groups.pop_front();
  }
  {
    ActAs stores(block, kStores);
    tsan_release(&bulk);
  }
  runner->make_ready(thread);
  return true;
}

/// Adds a store to the thread's open group, once what it reads is known to be there.
void open_store(const Store& store, const void* from, const char* operation, Site site) {
  if (store.from.offset + store.bytes > runner->shared_size(store.from.declaration)) {
    CUDA_CPU_COMPLAIN(operation, site, "%zu bytes are more than what follows in shared memory",
                      store.bytes);
  }
  thread_reads(from, store.bytes);
  bulk_of(runner->current()).open.push_back(store);
}

}  // namespace

namespace {

/// A store of a box, or a reduction into it.
void start_box(ReductionOf reduction, const CUtensorMap* map, int rank, const int* coordinates,
               const void* from, const char* operation, const Site& site) {
  Store store = {};
  store.map = read_map(map, rank, operation, site);
  store.bytes = store.map.bytes();
  if (reduction) {
    store.reduction = reduction(static_cast<CUtensorMapDataType>(store.map.type));
    if (!store.reduction) {
      CUDA_CPU_COMPLAIN(operation, site, "there is no such reduction of elements of this type");
    }
  }
  for (int i = 0; i < rank; ++i) store.at[i] = coordinates[i];
  store.from = place_of(from, "the source", operation, site);
  check_box(store.from, operation, site);
  check_column(store.map, coordinates, operation, site);
  open_store(store, from, operation, site);
  count_box(store.map, coordinates);
  for (std::size_t r = 0; r < store.map.rows() && !reduction; ++r) {
    const RowInside inside = row_inside(store.map, store.at, r);
    if (inside.first >= inside.end) continue;
    fill_bytes(inside.address, 0xFF,
               std::size_t{inside.end - inside.first} * store.map.element_bytes);
  }
}

/// The same of bytes in a row.
void start_row(Reduction reduction, void* to, const void* from, int bytes, const char* operation,
               const Site& site) {
  check_bulk(to, from, bytes, operation, site);
  Store store = {};
  store.reduction = reduction;
  store.to = static_cast<char*>(to);
  store.bytes = static_cast<std::size_t>(bytes);
  store.from = place_of(from, "the source", operation, site);
  open_store(store, from, operation, site);
  count_copy_engine(to, store.bytes);
  if (!reduction) fill_bytes(store.to, 0xFF, store.bytes);
}

}  // namespace

void tensor_store(const CUtensorMap* map, int rank, const int* coordinates, const void* from,
                  Site site) {
  const Unwatched bookkeeping;
  start_box(nullptr, map, rank, coordinates, from, "tensor_store()", site);
}

void tensor_reduce(ReductionOf reduction, const CUtensorMap* map, int rank, const int* coordinates,
                   const void* from, Site site) {
  const Unwatched bookkeeping;
  start_box(reduction, map, rank, coordinates, from, "cp.reduce.async.bulk.tensor", site);
}

void bulk_store(void* to, const void* from, int bytes, Site site) {
  const Unwatched bookkeeping;
  start_row(nullptr, to, from, bytes, "bulk_store()", site);
}

void bulk_reduce(Reduction reduction, void* to, const void* from, int bytes, Site site) {
  const Unwatched bookkeeping;
  start_row(reduction, to, from, bytes, "cp.reduce.async.bulk", site);
}

void bulk_commit() {
  const Unwatched bookkeeping;
  BulkGroups& bulk = bulk_of(runner->current());
  bulk.groups.push_back(std::move(bulk.open));
  bulk.open.clear();
}

void bulk_wait_read(int newest, Site site) {
  const Unwatched bookkeeping;
  BulkGroups& bulk = bulk_of(runner->current());
  bulk.newest = static_cast<std::size_t>(newest);
  if (bulk.groups.size() > bulk.newest) {
    bulk.waiting = true;
    runner->wait("tensor_store_wait_read()", site, &bulk);
  }
  tsan_acquire(&bulk);
}

void bulk_wait(int newest, Site site) { bulk_wait_read(newest, site); }

void async_proxy_fence() {
  const Unwatched bookkeeping;
  tsan_release(&hopper().tsan_fenced);
}

// ---- Warpgroups and clusters -------------------------------------------------------------------

namespace {

constexpr const char* kTileSync = "sync() of a tile";

void meet_at(int id, int threads, bool waits, Site site, const char* operation) {
  const Unwatched bookkeeping;
  Thread& self = runner->current();
  const int all = static_cast<int>(runner->threads_in_block());
  NamedBarrier& barrier = hopper().named[id];
  if (barrier.arrived == 0) barrier.threads = static_cast<unsigned>(threads);
  if (barrier.threads != static_cast<unsigned>(threads)) {
    CUDA_CPU_COMPLAIN(operation, site, "barrier %d of %d threads, but others wait there for %u", id,
                      threads, barrier.threads);
  }
  count_barrier();
  void* const passed = &barrier.tsan.passed[barrier.tsan.phase];
  tsan_release(&barrier.tsan.arrived);
  if (++barrier.arrived < barrier.threads) {
    if (!waits) return;
    barrier.waiting.push(&self);
    runner->wait(operation, site, &barrier, static_cast<unsigned>(id));
    tsan_acquire(passed);
    return;
  }
  tsan_acquire(&barrier.tsan.arrived);
  tsan_release(passed);
  barrier.tsan.phase ^= 1;
  barrier.arrived = 0;
  std::bitset<kMaxThreadsPerBlock> together;
  together.set(self.number);
  for (const Thread* each = barrier.waiting.head; each; each = each->next) {
    together.set(each->number);
  }
  for (const auto& other : hopper().barriers) {
    if ((other->known & together).any()) other->known |= together;
  }
  for (unsigned first = 0; first < static_cast<unsigned>(all); first += 32) {
    bool whole = true;
    for (unsigned lane = 0; lane < 32; ++lane) whole = whole && together.test(first + lane);
    if (whole) requests_of_warp_end(*self.block, first);
  }
  runner->make_all_ready(barrier.waiting);
}

}  // namespace

namespace {

void meet_by_name(int id, int threads, bool waits, Site site) {
  const char* const operation = "named_barrier()";
  const int all = static_cast<int>(runner->threads_in_block());
  if (id < 0 || id > 15 || threads < 32 || threads % 32 != 0 || threads > all) {
    CUDA_CPU_COMPLAIN(operation, site,
                      "barrier %d of %d threads: there are 16 barriers, for multiples of 32 threads"
                      " up to the block's %d",
                      id, threads, all);
  }
  if (id == 0) {
    block_barrier(0, "named_barrier(0)", site);
    return;
  }
  meet_at(id, threads, waits, site, operation);
}

}  // namespace

void named_barrier(int id, int threads, Site site) { meet_by_name(id, threads, true, site); }
void named_arrive(int id, int threads, Site site) { meet_by_name(id, threads, false, site); }
void tile_barrier(unsigned number, unsigned threads, Site site) {
  const unsigned all = runner->threads_in_block();
  if ((number + 1) * threads > all) {
    CUDA_CPU_COMPLAIN(kTileSync, site, "a tile has %u threads, which the block of %u does not fill",
                      threads, all);
  }
  // Tiles of all sizes are numbered like the nodes of a tree, whose root is one of 1024 threads.
  const unsigned id = 15 + kMaxThreadsPerBlock / threads + number;
  meet_at(static_cast<int>(id), static_cast<int>(threads), true, site, kTileSync);
}
void barrier_of_block(int id, Site site) {
  meet_by_name(id, static_cast<int>(runner->threads_in_block()), true, site);
}

namespace {

/// Warpgroups that wait for registers get them, if there are enough.
void hand_out_registers(HopperBlock& own) {
  for (Warpgroup& group : own.warpgroups) {
    if (!group.growing.head || group.changing < 128) continue;
    const unsigned needed = (group.target - group.registers) * 128;
    if (needed > own.spare_registers) continue;
    own.spare_registers -= needed;
    group.registers = group.target;
    group.changing = 0;
    runner->make_all_ready(group.growing);
  }
}

}  // namespace

void set_registers(int count, bool grow, Site site) {
  const Unwatched bookkeeping;
  const char* const operation = grow ? "registers_grow_to()" : "registers_shrink_to()";
  Thread& self = runner->current();
  HopperBlock& own = hopper();
  Warpgroup& group = warpgroup_of(self);
  const unsigned target = static_cast<unsigned>(count);
  if (count < 24 || count > 256 || count % 8 != 0) {
    CUDA_CPU_COMPLAIN(operation, site, "%d registers: not a multiple of 8 from 24 to 256", count);
  }
  if (grow ? target < group.registers : target > group.registers) {
    CUDA_CPU_COMPLAIN(operation, site,
                      "a thread of the warpgroup has %u registers: it cannot go to %d",
                      group.registers, count);
  }
  if (group.changing > 0 && group.target != target) {
    CUDA_CPU_COMPLAIN(operation, site, "others of the warpgroup have asked for %u registers",
                      group.target);
  }
  const unsigned file =
      launch_registers(runner->launch(), runner->threads_in_block()) * runner->threads_in_block();
  if (target * 128 > file) {
    CUDA_CPU_COMPLAIN(operation, site, "the block has %u registers, not 128 times %d", file, count);
  }
  group.target = target;
  ++group.changing;
  if (!grow) {
    if (group.changing < 128) return;
    own.spare_registers += (group.registers - target) * 128;
    group.registers = target;
    group.changing = 0;
    hand_out_registers(own);
    return;
  }
  group.growing.push(&self);
  hand_out_registers(own);
  runner->wait(operation, site, &group, target);
}

int cluster_rank() { return static_cast<int>(runner->current().block->rank); }
int cluster_size() { return static_cast<int>(runner->current().block->cluster->blocks.size()); }

namespace {

void complete_cluster(Runner& runner, Cluster& cluster) {
  unsigned waited_for = 0;
  for (const Block* block : cluster.blocks) waited_for += runner.threads_in_block() - block->exited;
  if (cluster.arrived == 0 || cluster.arrived < waited_for) return;
  cluster.arrived = 0;
  ++cluster.phase;
  // What was sent before somebody arrived has come.
  for (Block* block : cluster.blocks) {
    if (!block->hopper) continue;
    for (const auto& barrier : block->hopper->barriers) {
      barrier->known.set();
      barrier->known_to_cluster = true;
      for (int parity = 0; parity < 2; ++parity) {
        barrier->unseen[parity] = barrier->unseen_late[parity];
        barrier->unseen_late[parity] = 0;
      }
    }
  }
  runner.make_all_ready(cluster.waiting);
}

}  // namespace

void cluster_arrive(bool release, Site site) {
  const Unwatched bookkeeping;
  Thread& self = runner->current();
  Cluster& cluster = *self.block->cluster;
  if (self.cluster_arrived) {
    CUDA_CPU_COMPLAIN("cluster_arrive()", site, "the thread has arrived before, and not waited");
  }
  self.cluster_arrived = true;
  self.cluster_phase = cluster.phase;
  if (release) tsan_release(&cluster.tsan_passed[cluster.phase & 1]);
  ++cluster.arrived;
  complete_cluster(*runner, cluster);
}

void cluster_wait(Site site) {
  const Unwatched bookkeeping;
  Thread& self = runner->current();
  Cluster& cluster = *self.block->cluster;
  if (!self.cluster_arrived) {
    CUDA_CPU_COMPLAIN("cluster_wait()", site, "the thread has not arrived");
  }
  if (cluster.phase == self.cluster_phase) {
    cluster.waiting.push(&self);
    runner->wait("cluster_wait()", site, &cluster);
  }
  self.cluster_arrived = false;
  tsan_acquire(&cluster.tsan_initialized);
  tsan_acquire(&cluster.tsan_passed[self.cluster_phase & 1]);
}

void thread_left_cluster(Runner& runner, Thread& thread) {
  complete_cluster(runner, *thread.block->cluster);
}

// ---- wgmma -------------------------------------------------------------------------------------

namespace {

/// An operand in shared memory. "Matrix Descriptor Format".
struct Operand {
  std::size_t start, leading, stride;
  const char* data;   // of the declaration that it is in
  std::size_t begin;  // where that is in the window
  std::size_t end;

  explicit Operand(std::uint64_t descriptor)
      : start((descriptor & 0x3FFF) << 4),
        leading((descriptor >> 16 & 0x3FFF) << 4),
        stride((descriptor >> 32 & 0x3FFF) << 4),
        data(nullptr),
        begin(0),
        end(0) {}

  bool locate(Block& block) {
    SharedPlace place;
    if (!runner->find_window(start, place)) return false;
    begin = start - place.offset;
    end = begin + runner->shared_size(place.declaration);
    data = runner->shared_at(block, {place.declaration, 0});
    return true;
  }

  /// The 16-byte piece at an address of the window, before the swizzle.
  const char* piece(std::size_t address) const { return data + (swizzled(address) - begin); }

  /// K-major: rows of 128 bytes in groups of 8. Where piece `piece` of row `row` is.
  std::size_t of_row(std::size_t row, std::size_t piece) const {
    return start + row / 8 * stride + row % 8 * 128 + piece * 16;
  }
  /// MN-major: rows k of 64 columns, in groups of 8; beside them the next 64 columns.
  std::size_t of_column(std::size_t k, std::size_t column) const {
    return start + column / 64 * leading + k / 8 * stride + k % 8 * 128 + column % 64 / 8 * 16;
  }

  /// Calls visit(first byte, bytes) for the memory of `rows` rows (K-major).
  template <class Visit>
  void visit_rows(std::size_t rows, Visit visit) const {
    for (std::size_t row = 0; row < rows; row += 8) {
      const std::size_t first = (start + row / 8 * stride) / 128 * 128;
      visit(first, std::min<std::size_t>(8, rows - row) * 128);
    }
  }
  template <class Visit>
  void visit_columns(std::size_t columns, Visit visit) const {
    for (std::size_t column = 0; column < columns; column += 64) {
      const std::size_t bytes = std::min<std::size_t>(64, columns - column) * 2;
      for (std::size_t k = 0; k < 16; k += 8) {
        visit(start + column / 64 * leading + k / 8 * stride,
              7 * 128 + (bytes < 128 ? 128 : bytes));
      }
    }
  }
};

template <class Format>
void convert_basic(const char* from, float* to) {
  for (int i = 0; i < 8; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, from + 2 * i, 2);
    to[i] = Format::to_float(bits);
  }
}

typedef float Vector __attribute__((vector_size(32), aligned(4), may_alias));

/// c (64 x n) = a (64 x k) b (k x n), plus c if `add`.
inline __attribute__((always_inline)) void multiply_body(const float* a, const float* b, float* c,
                                                         int n, int k, bool add) {
  for (int row = 0; row < 64; row += 4) {
    for (int column = 0; column < n; column += 8) {
      Vector sums[4] = {};
      if (add) {
        for (int i = 0; i < 4; ++i) {
          sums[i] = *reinterpret_cast<const Vector*>(c + (row + i) * n + column);
        }
      }
      for (int j = 0; j < k; ++j) {
        const Vector right = *reinterpret_cast<const Vector*>(b + j * n + column);
        for (int i = 0; i < 4; ++i) sums[i] += a[(row + i) * k + j] * right;
      }
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<Vector*>(c + (row + i) * n + column) = sums[i];
      }
    }
  }
}

void multiply_basic(const float* a, const float* b, float* c, int n, int k, bool add) {
  multiply_body(a, b, c, n, k, add);
}

#if defined(CUDA_CPU_WIDE)
CUDA_CPU_WIDE void multiply_wide(const float* a, const float* b, float* c, int n, int k, bool add) {
  multiply_body(a, b, c, n, k, add);
}
CUDA_CPU_WIDE void convert_half_wide(const char* from, float* to) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  _mm256_storeu_ps(to, _mm256_cvtph_ps(halves));
}
bool wide_units() {
  // What has AVX2 has F16C, of which clang's builtin knows nothing.
  static const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return wide;
}
#endif

/// The lower 13 bits of a TF32 number do not count.
float tf32(std::uint32_t bits) { return std::bit_cast<float>(bits & ~0x1FFFu); }

/// How much of k a product takes: 32 bytes.
int depth(Wgmma type) { return type == Wgmma::tf32 ? 8 : type == Wgmma::e4m3 ? 32 : 16; }

/// A piece of 16 bytes: depth(type) / 2 elements.
void convert(Wgmma type, const char* from, float* to) {
  if (type == Wgmma::bf16) return convert_basic<Bfloat16Format>(from, to);
  if (type == Wgmma::tf32) {
    for (int i = 0; i < 4; ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, from + 4 * i, 4);
      to[i] = tf32(bits);
    }
    return;
  }
  if (type == Wgmma::e4m3) {
    for (int i = 0; i < 16; ++i) to[i] = E4m3Format::to_float(static_cast<std::uint8_t>(from[i]));
    return;
  }
#if defined(CUDA_CPU_WIDE)
  if (wide_units()) return convert_half_wide(from, to);
#endif
  convert_basic<HalfFormat>(from, to);
}

/// a (64 x k): from fragments as mma.sync has them, each warp 16 rows.
void unpack_fragments(const Product& product, float* a) {
  for (int t = 0; t < 128; ++t) {
    const int row = t / 32 * 16 + t % 32 / 4, column = t % 4;
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t bits = product.fragments[t][i];
      if (product.type == Wgmma::tf32) {
        a[(row + i % 2 * 8) * 8 + column + i / 2 * 4] = tf32(bits);
      } else if (product.type == Wgmma::e4m3) {
        float* to = a + (row + i % 2 * 8) * 32 + 4 * column + i / 2 * 16;
        for (int e = 0; e < 4; ++e) {
          to[e] = E4m3Format::to_float(static_cast<std::uint8_t>(bits >> 8 * e));
        }
      } else {
        float* to = a + (row + i % 2 * 8) * 16 + 2 * column + i / 2 * 8;
        for (int e = 0; e < 2; ++e) {
          const auto half = static_cast<std::uint16_t>(bits >> 16 * e);
          to[e] = product.type == Wgmma::fp16 ? HalfFormat::to_float(half)
                                              : Bfloat16Format::to_float(half);
        }
      }
    }
  }
}

/// Multiplies, and adds to the sum.
void land_product(Block& block, const Product& product) {
  alignas(64) static thread_local float a[64 * 32], b[32 * 256];
  const int n = product.sum->columns(), k = depth(product.type);
  count_tensor_flops(2 * 64 * std::int64_t{n} * k);
  ActAs cores(block, kTensorCores);
  const auto read = [](const Operand& operand) {
    return [&operand](std::size_t first, std::size_t bytes) {
      tsan_reads(operand.data + (first - operand.begin), bytes);
    };
  };
  if (product.from_registers) {
    unpack_fragments(product, a);
  } else {
    Operand operand(product.a);
    operand.locate(block);
    alignas(32) float eight[8];
    if (product.transposed) {
      operand.visit_columns(64, read(operand));
      for (int j = 0; j < 16; ++j) {
        for (int row = 0; row < 64; row += 8) {
          convert(product.type, operand.piece(operand.of_column(j, row)), eight);
          for (int i = 0; i < 8; ++i) a[(row + i) * 16 + j] = eight[i];
        }
      }
    } else {
      operand.visit_rows(64, read(operand));
      for (int row = 0; row < 64; ++row) {
        for (int piece = 0; piece < 2; ++piece) {
          convert(product.type, operand.piece(operand.of_row(row, piece)),
                  a + row * k + k / 2 * piece);
        }
      }
    }
  }
  Operand operand(product.b);
  operand.locate(block);
  if (product.tall) {
    operand.visit_rows(n, read(operand));
    alignas(32) float values[16];
    for (int column = 0; column < n; ++column) {
      for (int piece = 0; piece < 2; ++piece) {
        convert(product.type, operand.piece(operand.of_row(column, piece)), values);
        for (int i = 0; i < k / 2; ++i) b[(k / 2 * piece + i) * n + column] = values[i];
      }
    }
  } else {
    operand.visit_columns(n, read(operand));
    for (int j = 0; j < 16; ++j) {
      for (int column = 0; column < n; column += 8) {
        convert(product.type, operand.piece(operand.of_column(j, column)), b + j * n + column);
      }
    }
  }
  bool done = false;
#if defined(CUDA_CPU_WIDE)
  done = wide_units();
  if (done) multiply_wide(a, b, product.sum->values, n, k, product.add);
#endif
  if (!done) multiply_basic(a, b, product.sum->values, n, k, product.add);
  if (!product.sum->halves) return;
  for (int i = 0; i < 64 * n; ++i) {
    float& value = product.sum->values[i];
    value = HalfFormat::to_float(HalfFormat::from_float(value));
  }
}

/// Row and column of a thread's i-th register in the sum.
std::size_t place_in_sum(int thread, int i, int columns) {
  const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
  return static_cast<std::size_t>(row * columns + i / 4 * 8 + thread % 4 * 2 + i % 2);
}

/// The same number in the thread's registers.
float number_in(const Sum& sum, unsigned thread, int i) {
  if (!sum.halves) return sum.registers[thread][i];
  std::uint16_t bits;
  std::memcpy(&bits, reinterpret_cast<const char*>(sum.registers[thread]) + 2 * i, 2);
  return HalfFormat::to_float(bits);
}
void put_number(const Sum& sum, unsigned thread, int i, float value) {
  if (!sum.halves) {
    sum.registers[thread][i] = value;
    return;
  }
  const std::uint16_t bits = HalfFormat::from_float(value);
  std::memcpy(reinterpret_cast<char*>(sum.registers[thread]) + 2 * i, &bits, 2);
}

const char* name_of(Wgmma type) {
  return type == Wgmma::tf32   ? "wgmma_tf32()"
         : type == Wgmma::e4m3 ? "wgmma_fp8()"
         : type == Wgmma::fp16 ? "wgmma<half>()"
                               : "wgmma<__nv_bfloat16>()";
}

/// Checks that the operand is swizzled by 128 bytes and in shared memory, and that the thread that
/// starts the product may read it.
void check_operand(Block& block, std::uint64_t descriptor, bool rows, std::size_t count,
                   const char* operation, const Site& site) {
  Operand operand(descriptor);
  if (descriptor >> 62 != 1 || descriptor >> 49 & 7) {
    CUDA_CPU_COMPLAIN(operation, site, "the descriptor 0x%llx is not one of 128-byte swizzle",
                      static_cast<unsigned long long>(descriptor));
  }
  const bool found = operand.locate(block);
  std::size_t last = operand.start;
  const auto check = [&](std::size_t first, std::size_t bytes) {
    last = std::max(last, first + bytes);
    if (found && last <= operand.end) {
      thread_reads(operand.data + (first - operand.begin), bytes);
    }
  };
  rows ? operand.visit_rows(count, check) : operand.visit_columns(count, check);
  if (!found || last > operand.end) {
    CUDA_CPU_COMPLAIN(operation, site, "the operand is not in shared memory, or only in part");
  }
}

/// Products that all threads of the group have committed, up to the first that somebody waits for.
bool land_products(Block& block, Warpgroup& group) {
  std::uint64_t target = ~std::uint64_t{0};
  for (const Thread* thread = group.waiting.head; thread; thread = thread->next) {
    target = std::min<std::uint64_t>(target, thread->detail);
  }
  for (const WgmmaThread& thread : group.threads) {
    if (thread.groups.empty() || thread.groups.back() < target) return false;
  }
  {
    HopperBlock& own = hopper_of(block);
    ActAs cores(block, kTensorCores);
    tsan_acquire(&own.tsan_fenced);
    tsan_acquire(&own.tsan_async);
  }
  while (group.landed < target) {
    land_product(block, *group.products.front());
    hopper_of(block).free_products.push_back(std::move(group.products.front()));
    group.products.pop_front();
    ++group.first;
    ++group.landed;
  }
  {
    ActAs cores(block, kTensorCores);
    tsan_release(&group.tsan_done);
  }
  Queue rest;
  while (group.waiting.head) {
    Thread* thread = group.waiting.pop();
    if (thread->detail <= group.landed) {
      runner->make_ready(*thread);
    } else {
      rest.push(thread);
    }
  }
  group.waiting = rest;
  return true;
}

}  // namespace

void wgmma(Wgmma type, float* sum, int registers, std::uint64_t a, const std::uint32_t* fragments,
           bool transposed, std::uint64_t b, bool tall, bool add, Site site, bool halves) {
  const Unwatched bookkeeping;
  Thread& self = runner->current();
  Block& block = *self.block;
  HopperBlock& own = hopper();
  Warpgroup& group = warpgroup_of(self);
  const unsigned t = self.number % 128;
  WgmmaThread& thread = group.threads[t];
  const char* const operation = name_of(type);
  if (!thread.fenced) {
    CUDA_CPU_COMPLAIN(operation, site,
                      "wgmma_fence() is missing: nothing orders this after the thread's own use of"
                      " its registers");
  }
  const std::uint64_t number = thread.started++;
  if (number - group.first == group.products.size()) {
    if (own.free_products.empty()) own.free_products.push_back(std::make_unique<Product>());
    auto product = std::move(own.free_products.back());
    own.free_products.pop_back();
    product->type = type;
    product->a = a;
    product->b = b;
    product->from_registers = fragments != nullptr;
    product->transposed = transposed;
    product->tall = tall;
    product->add = add;
    product->halves = halves;
    product->sum = nullptr;
    product->threads = 0;
    product->site = site;
    if (!fragments) check_operand(block, a, !transposed, 64, operation, site);
    check_operand(block, b, tall, static_cast<std::size_t>((halves ? 4 : 2) * registers), operation,
                  site);
    tsan_release(
        &group.tsan_given[number % Warpgroup::kGiven]);  // for what check_operand() looked at
    group.products.push_back(std::move(product));
  }
  Product& product = *group.products[number - group.first];
  if (product.type != type || product.a != a || product.b != b || product.add != add ||
      product.transposed != transposed || product.tall != tall || product.halves != halves ||
      product.from_registers != (fragments != nullptr) ||
      (product.sum && product.sum->count != registers)) {
    CUDA_CPU_COMPLAIN(operation, site,
                      "the threads of a warpgroup do different things: others have started the"
                      " product at %s:%d, with other operands",
                      product.site.file, product.site.line);
  }
  WgmmaThread::InFlight* mine = nullptr;
  for (WgmmaThread::InFlight& other : thread.sums) {
    float* const first = other.sum->registers[t];
    if (first == sum && other.sum->count == registers && other.sum->halves == halves) {
      mine = &other;
    } else if (sum < first + other.sum->count && first < sum + registers) {
      CUDA_CPU_COMPLAIN(operation, site,
                        "a product of another shape is under way into these registers");
    }
  }
  if (mine ? product.sum && product.sum != mine->sum : product.sum && product.sum->registers[t]) {
    CUDA_CPU_COMPLAIN(operation, site, "the threads of a warpgroup add to different sums");
  }
  if (!mine) {
    if (!product.sum) {
      if (own.free_sums.empty()) {
        own.sums.push_back(std::make_unique<Sum>());
        own.free_sums.push_back(own.sums.back().get());
      }
      product.sum = own.free_sums.back();
      own.free_sums.pop_back();
      product.sum->count = registers;
      product.sum->halves = halves;
      product.sum->threads = 0;
      std::fill_n(product.sum->registers, 128, nullptr);
    }
    Sum& to = *product.sum;
    to.registers[t] = sum;
    ++to.threads;
    for (int i = 0; i < to.numbers() && add; ++i) {
      to.values[place_in_sum(static_cast<int>(t), i, to.columns())] = number_in(to, t, i);
    }
    for (int i = 0; i < registers; ++i) fill_bytes(sum + i, 0xFF, sizeof(float));
    thread.sums.push_back({product.sum, 0});
    mine = &thread.sums.back();
  }
  product.sum = mine->sum;
  mine->last = number + 1;
  if (fragments) {
    std::memcpy(product.fragments[t], fragments, sizeof product.fragments[t]);
    // What the fragments were made of has been read, and the product needs those of all threads:
    // who has waited for it, and only who has, may give that memory back for all four warps.
    tsan_release(&group.tsan_given[number % Warpgroup::kGiven]);
  }
  ++product.threads;
}

void wgmma_fence() {
  const Unwatched bookkeeping;
  Thread& self = runner->current();
  warpgroup_of(self).threads[self.number % 128].fenced = true;
}

void wgmma_commit() {
  const Unwatched bookkeeping;
  Thread& self = runner->current();
  WgmmaThread& thread = warpgroup_of(self).threads[self.number % 128];
  thread.groups.push_back(thread.started);
}

void wgmma_wait(int newest, Site site) {
  const Unwatched bookkeeping;
  const char* const operation = "wgmma_wait()";
  Thread& self = runner->current();
  Warpgroup& group = warpgroup_of(self);
  const unsigned t = self.number % 128;
  WgmmaThread& thread = group.threads[t];
  const std::size_t keep = static_cast<std::size_t>(newest);
  if (thread.groups.size() <= keep) return;
  const auto end = thread.groups.end() - static_cast<std::ptrdiff_t>(keep);
  const std::uint64_t target = end[-1];
  if (group.landed < target) {
    group.waiting.push(&self);
    runner->wait(operation, site, &group, static_cast<unsigned>(target));
  }
  tsan_acquire(&group.tsan_done);
  for (; thread.waited < target; ++thread.waited) {
    tsan_acquire(&group.tsan_given[thread.waited % Warpgroup::kGiven]);
  }
  thread.groups.erase(thread.groups.begin(),
                      thread.groups.end() - static_cast<std::ptrdiff_t>(keep));
  for (std::size_t i = 0; i < thread.sums.size();) {
    if (thread.sums[i].last > target) {
      ++i;
      continue;
    }
    Sum& sum = *thread.sums[i].sum;
    if (reinterpret_cast<const char*>(sum.registers[t]) <
        static_cast<const char*>(__builtin_frame_address(0))) {
      CUDA_CPU_COMPLAIN(operation, site,
                        "the registers of a sum are used for something else: the"
                        " wait comes too late");
    }
    for (int j = 0; j < sum.numbers(); ++j) {
      put_number(sum, t, j, sum.values[place_in_sum(static_cast<int>(t), j, sum.columns())]);
    }
    sum.registers[t] = nullptr;
    if (--sum.threads == 0) hopper().free_sums.push_back(&sum);
    thread.sums.erase(thread.sums.begin() + static_cast<std::ptrdiff_t>(i));
    thread.fenced = false;
  }
}

// ---- When nobody can go on; the ends of threads and blocks --------------------------------------

bool land_one(Runner& runner) {
  for (Block* block : runner.resident()) {
    if (!block->hopper) continue;
    for (const auto& barrier : block->hopper->barriers) {
      if (barrier->waiting.head && land_transfers(*barrier)) return true;
      if (runner.launch().failed) return false;
    }
  }
  for (Block* block : runner.resident()) {
    if (!block->hopper) continue;
    for (Warpgroup& group : block->hopper->warpgroups) {
      if (group.waiting.head && land_products(*block, group)) return true;
    }
  }
  for (Block* block : runner.resident()) {
    if (!block->hopper) continue;
    for (std::size_t i = 0; i < block->hopper->bulk.size(); ++i) {
      const auto& bulk = block->hopper->bulk[i];
      if (bulk && bulk->waiting) return land_stores(*block, *bulk, block->threads[i]);
    }
  }
  return false;
}

bool may_end(Thread& thread, Message* message) {
  HopperBlock& own = *thread.block->hopper;
  if (thread.cluster_arrived && thread.cluster_phase == thread.block->cluster->phase) {
    if (message) message->add_thread(thread);
    if (message) message->add(" ends after cluster_arrive() without cluster_wait()");
    return false;
  }
  if (thread.number < own.bulk.size() && own.bulk[thread.number]) {
    const BulkGroups& bulk = *own.bulk[thread.number];
    if (!bulk.open.empty() || !bulk.groups.empty()) {
      if (message) message->add_thread(thread);
      if (message)
        message->add(
            " ends before the boxes that it stores have been read: tensor_store_%s is missing",
            bulk.open.empty() ? "wait_read()" : "commit()");
      return false;
    }
  }
  if (!own.warpgroups[thread.number / 128].threads[thread.number % 128].sums.empty()) {
    if (message) message->add_thread(thread);
    if (message) message->add(" ends before its products: wgmma_wait() is missing");
    return false;
  }
  return true;
}

bool may_end(Block& block, Message* message) {
  std::size_t bytes = 0;
  int barriers = 0;
  const MBarrier* first = nullptr;
  for (const auto& barrier : block.hopper->barriers) {
    if (barrier->transfers.empty()) continue;
    if (!first) first = barrier.get();
    for (const Transfer& transfer : barrier->transfers) bytes += transfer.bytes;
    ++barriers;
  }
  if (first) {
    if (!message) return false;
    const Site& sent_at = first->transfers[0].site;
    message->add(
        "the block ends while %zu bytes are on their way to it, to %d of its barriers; the first "
        "were sent at %s:%d: nobody waits for them. ",
        bytes, barriers, sent_at.file, sent_at.line);
    if (first->waited_parity < 0) {
      message->add("Their barrier is in phase %u, and no barrier_wait() was called for it",
                   first->phase);
    } else {
      message->add(
          "Their barrier is in phase %u, of parity %u, and the last barrier_wait() for it was "
          "told parity %d, at %s:%d",
          first->phase, first->phase & 1, first->waited_parity, first->waited_at.file,
          first->waited_at.line);
    }
    return false;
  }
  for (const auto& barrier : block.hopper->barriers) {
    if (barrier->unseen[0] + barrier->unseen[1] > 0) {
      if (message)
        message->add(
            "the block ends, but none of its threads has waited for all that other blocks send to "
            "its"
            " barrier of %s:%d: it might come later",
            barrier->site.file, barrier->site.line);
      return false;
    }
  }
  for (Block* other : block.cluster->blocks) {
    if (!other->hopper || other == &block) continue;
    for (const auto& barrier : other->hopper->barriers) {
      for (const Transfer& transfer : barrier->transfers) {
        if (transfer.from != &block) continue;
        if (message)
          message->add(
              "the block ends before the %zu bytes that it sends to block %u of its cluster, at "
              "%s:%d,"
              " have been read",
              transfer.bytes, other->rank, transfer.site.file, transfer.site.line);
        return false;
      }
    }
  }
  return true;
}

void threads_met(Block& block, unsigned first, unsigned lanes) {
  for (const auto& barrier : block.hopper->barriers) {
    if (!lanes) {
      barrier->known.set();
      continue;
    }
    if (barrier->known.all()) continue;
    bool any = false;
    for (unsigned lane = 0; lane < 32; ++lane) {
      any = any || (lanes >> lane & 1 && barrier->known[first + lane]);
    }
    for (unsigned lane = 0; any && lane < 32; ++lane) {
      if (lanes >> lane & 1) barrier->known.set(first + lane);
    }
  }
}

void reset_hopper(Block& block) {
  if (!block.hopper) return;
  HopperBlock& own = *block.hopper;
  own.barriers.clear();
  for (NamedBarrier& barrier : own.named) {
    barrier.threads = barrier.arrived = 0;
    barrier.waiting = {};
  }
  const unsigned registers = launch_registers(runner->launch(), runner->threads_in_block());
  for (Warpgroup& group : own.warpgroups) {
    group.products.clear();
    group.first = group.landed = 0;
    for (WgmmaThread& thread : group.threads) {
      thread.started = 0;
      thread.groups.clear();
      thread.sums.clear();
      thread.fenced = false;
      thread.waited = 0;
    }
    group.waiting = group.growing = {};
    group.registers = registers;
    group.changing = group.target = 0;
  }
  own.bulk.clear();
  own.spare_registers = 0;
  own.free_sums.clear();
  for (const auto& sum : own.sums) own.free_sums.push_back(sum.get());
}

void describe_wait(const Thread& thread, Message& message) {
  if (std::strcmp(thread.operation, "barrier_wait()") == 0) {
    const MBarrier& barrier = *static_cast<const MBarrier*>(thread.object);
    message.add(
        " for phase %u of the barrier of %s:%d: %u of %u arrivals and %ld bytes are missing",
        barrier.phase, barrier.site.file, barrier.site.line, barrier.missing, barrier.count,
        barrier.bytes);
    if (!barrier.transfers.empty()) message.add(", %zu copies under way", barrier.transfers.size());
  } else if (std::strcmp(thread.operation, "named_barrier()") == 0) {
    const NamedBarrier& barrier = *static_cast<const NamedBarrier*>(thread.object);
    message.add(" for barrier %u, where %u of %u threads are", thread.detail, barrier.arrived,
                barrier.threads);
  } else if (std::strcmp(thread.operation, kTileSync) == 0) {
    const NamedBarrier& barrier = *static_cast<const NamedBarrier*>(thread.object);
    message.add(", to which %u of %u threads have come", barrier.arrived, barrier.threads);
  } else if (std::strcmp(thread.operation, "wgmma_wait()") == 0) {
    const Warpgroup& group = *static_cast<const Warpgroup*>(thread.object);
    unsigned committed = 0;
    for (const WgmmaThread& other : group.threads) {
      committed += !other.groups.empty() && other.groups.back() >= thread.detail;
    }
    message.add(" for products that %u of the 128 threads of the warpgroup have committed",
                committed);
  } else if (std::strcmp(thread.operation, "registers_grow_to()") == 0) {
    const Warpgroup& group = *static_cast<const Warpgroup*>(thread.object);
    message.add(
        " for %u registers a thread (it has %u, the block %u to spare; %u of 128 threads"
        " ask)",
        group.target, group.registers, thread.block->hopper->spare_registers, group.changing);
  } else if (std::strcmp(thread.operation, "cluster_wait()") == 0) {
    const Cluster& cluster = *static_cast<const Cluster*>(thread.object);
    message.add(" where %u of the cluster's threads are", cluster.arrived);
  }
}

}  // namespace cuda_cpu

// ---- For the host ------------------------------------------------------------------------------

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* extents, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  using namespace cuda_cpu;
  std::size_t element = 4;
  if (type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ||
      type == CU_TENSOR_MAP_DATA_TYPE_UINT16) {
    element = 2;
  } else if (type == CU_TENSOR_MAP_DATA_TYPE_UINT8) {
    element = 1;
  } else if (type != CU_TENSOR_MAP_DATA_TYPE_FLOAT32 && type != CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 &&
             type != CU_TENSOR_MAP_DATA_TYPE_UINT32 && type != CU_TENSOR_MAP_DATA_TYPE_INT32) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // Of the modes only those that hopper.cuh uses.
  if (!map || !strides || rank < 1 || rank > 5 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || swizzle > CU_TENSOR_MAP_SWIZZLE_128B) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!address || reinterpret_cast<std::uintptr_t>(address) % 16 != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  TensorMap result = {};
  result.magic = kMapMagic;
  result.type = static_cast<std::uint8_t>(type);
  result.rank = static_cast<std::uint8_t>(rank);
  result.swizzle = static_cast<std::uint8_t>(swizzle);
  result.element_bytes = static_cast<std::uint8_t>(element);
  result.address = static_cast<char*>(address);
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (extents[i] == 0 || extents[i] > UINT_MAX || box[i] == 0 || box[i] > 256 ||
        element_strides[i] != 1) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    result.extents[i] = static_cast<std::uint32_t>(extents[i]);
    result.box[i] = box[i];
    if (i == 0) continue;
    // Rows may overlap: NVIDIA's own kernels make such maps.
    if (strides[i - 1] % 16 != 0 || strides[i - 1] >= 1ull << 40) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    result.strides[i - 1] = strides[i - 1];
  }
  const std::size_t row = box[0] * element;
  if (row % 16 != 0 ||
      (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && row > swizzle_bytes(result.swizzle))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::memcpy(static_cast<void*>(map), &result, sizeof result);
  return CUDA_SUCCESS;
}
