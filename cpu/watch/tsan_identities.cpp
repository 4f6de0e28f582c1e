// Makes it cheap that a fiber gets an identity from ThreadSanitizer, as GCC 12 has it.
//
// A block of 1024 threads needs as many identities, and each launch that may start early needs
// new ones. For one identity ThreadSanitizer writes to 371 pages that nobody reads: it clears
// 786 KB that mmap() has just returned, of which 512 KB are a stack of calls, and it prepares a
// trace of 256 parts, of which it gives back all but those that the option history_size leaves.
// When the identity is forgotten everything goes back to the system. Each first write to a page
// is a fault, and each page that goes back stops all processors that run the program; on virtual
// machines these took most of the time of a test. Here an identity takes the memory of one that
// was forgotten, and writes to 25 pages if there is none.
//
// The linker puts the functions at the end in the place of ThreadSanitizer's own (--wrap), which
// therefore is linked statically. SConstruct does so for GCC 12 on x86-64; for all others this
// file is empty.

#if defined(CUDA_CPU_TSAN_IDENTITIES)

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

namespace __sanitizer {
class ThreadContextBase;
}  // namespace __sanitizer

namespace __tsan {

void MapThreadTrace(std::uintptr_t address, std::uintptr_t size, const char* name);
/// How many events a thread's trace has.
std::uintptr_t TraceSize();
void* Alloc(std::uintptr_t size);

class ThreadContext {
 public:
  explicit ThreadContext(unsigned tid);

 private:
  char members_[0x108];
};

}  // namespace __tsan

namespace {

using Word = std::uintptr_t;
using Factory = __sanitizer::ThreadContextBase*(unsigned tid);

// Where a thread's trace is, and behind it what describes its parts (tsan_rtl.h, tsan_trace.h).
constexpr Word kTraces = 0x600000000000, kTraceStride = 0x1150000, kEventBytes = 8;
constexpr Word kTrace = 0x1000000, kTraceBytes = 0x133010;
constexpr Word kParts = 0x80010, kPartBytes = 0xb30, kEventsOfPart = 1 << 13;

Factory* original;

Word description_of(unsigned tid) { return kTraces + tid * kTraceStride + kTrace; }

Word& part_of(unsigned tid, Word part) {
  return *reinterpret_cast<Word*>(description_of(tid) + kParts + part * kPartBytes);
}

Word parts() { return __tsan::TraceSize() / kEventsOfPart; }

/// Of a part its first word is not 0: it points to the stack trace that begins behind the second.
Word first_word(unsigned tid, Word part) {
  return reinterpret_cast<Word>(&part_of(tid, part)) + 2 * sizeof(Word);
}

/// Whether ThreadSanitizer itself has laid out the first thread's parts in this way.
bool is_as_expected() {
  for (Word part = 0; part < parts(); ++part) {
    const Word* const words = &part_of(0, part);
    if (words[0] != first_word(0, part)) return false;
    for (Word i = 1; i < kPartBytes / sizeof(Word); ++i) {
      if (words[i] != 0) return false;
    }
  }
  return true;
}

/// How many threads ThreadSanitizer knows, or knew: a clock has no more entries that are not 0.
std::atomic<Word> known;

/// What ThreadSanitizer knows of a thread. Only parts of the trace that are used are prepared.
__sanitizer::ThreadContextBase* create_context(unsigned tid) {
  static bool expected = false;  // the caller holds the registry's lock, and tid counts from 0
  known = tid + 1;
  if (tid == 0 || !expected) {
    __sanitizer::ThreadContextBase* const context = original(tid);
    if (tid == 0) expected = is_as_expected();
    return context;
  }
  __tsan::MapThreadTrace(kTraces + tid * kTraceStride, __tsan::TraceSize() * kEventBytes, "trace");
  __tsan::MapThreadTrace(description_of(tid), kTraceBytes, "trace header");
  for (Word part = 0; part < parts(); ++part) part_of(tid, part) = first_word(tid, part);
  void* const memory = __tsan::Alloc(sizeof(__tsan::ThreadContext));
  return reinterpret_cast<__sanitizer::ThreadContextBase*>(new (memory) __tsan::ThreadContext(tid));
}

// An identity; in it a stack of calls, of which nobody reads what is above its end, and where the
// entries of its two clocks begin (tsan_rtl.h, tsan_clock.h).
constexpr Word kIdentity = 0xbfd00, kCalls = 0xb8, kCallsEnd = 0x800b8;
constexpr Word kClocks[] = {0x80418, 0xa00c0}, kClockBytes = 0x1fc00;

/// Forgotten identities. Each holds the address of the next one in its first word.
char* forgotten;
std::atomic_flag busy;

struct Lock {
  Lock() {
    while (busy.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~Lock() { busy.clear(std::memory_order_release); }
};

/// The identity that this thread makes, whose memory is 0; and the one that it destroys.
constinit thread_local char* made = nullptr;
constinit thread_local void* destroyed = nullptr;

}  // namespace

// What the linker is told to put in the place of functions with these names.
#define IN_PLACE_OF(name, result, ...)          \
  extern "C" result __real_##name(__VA_ARGS__); \
  extern "C" result __wrap_##name(__VA_ARGS__); \
  result __wrap_##name(__VA_ARGS__)

// __sanitizer::ThreadRegistry::ThreadRegistry().
IN_PLACE_OF(_ZN11__sanitizer14ThreadRegistryC1EPFPNS_17ThreadContextBaseEjEjjj, void,
            void* registry, Factory* factory, unsigned most_threads, unsigned quarantine,
            unsigned most_reuses) {
  original = factory;
  // So many identities end before a number is used again. As many threads as a power of two would
  // soon have each the number of their place in an earlier launch: the same thread, for it.
  constexpr unsigned kPrime = 67;
  __real__ZN11__sanitizer14ThreadRegistryC1EPFPNS_17ThreadContextBaseEjEjjj(
      registry, create_context, most_threads, std::max(quarantine, kPrime), most_reuses);
}

// __sanitizer::internal_memset(). What is made is 0 already, and so are its clocks.
IN_PLACE_OF(_ZN11__sanitizer15internal_memsetEPvim, void*, void* memory, int byte, Word size) {
  const bool is_made = made && static_cast<Word>(static_cast<char*>(memory) - made) < kIdentity;
  if (is_made && byte == 0 && (size == kIdentity || size == kClockBytes)) return memory;
  return __real__ZN11__sanitizer15internal_memsetEPvim(memory, byte, size);
}

// __tsan::Alloc().
IN_PLACE_OF(_ZN6__tsan5AllocEm, void*, Word size) {
  if (size != kIdentity) return __real__ZN6__tsan5AllocEm(size);
  {
    const Lock lock;
    made = forgotten;
    if (made) forgotten = *reinterpret_cast<char**>(made);
  }
  if (!made) return made = static_cast<char*>(__real__ZN6__tsan5AllocEm(size));  // from mmap()
  const auto clear = [](Word begin, Word end) {
    __real__ZN11__sanitizer15internal_memsetEPvim(made + begin, 0, end - begin);
  };
  clear(0, kCalls);
  Word end = kCallsEnd;
  for (const Word clock : kClocks) {
    clear(end, clock + known * sizeof(Word));
    end = clock + kClockBytes;
  }
  clear(end, kIdentity);
  return made;
}

// __tsan::FiberDestroy(), which calls the function below it.
IN_PLACE_OF(_ZN6__tsan12FiberDestroyEPNS_11ThreadStateEmS1_, void, void* self, Word caller,
            void* fiber) {
  destroyed = fiber;
  __real__ZN6__tsan12FiberDestroyEPNS_11ThreadStateEmS1_(self, caller, fiber);
}

// __tsan::FreeImpl().
IN_PLACE_OF(_ZN6__tsan8FreeImplEPv, void, void* memory) {
  if (!memory || memory != destroyed) return __real__ZN6__tsan8FreeImplEPv(memory);
  destroyed = nullptr;
  const Lock lock;
  *static_cast<char**>(memory) = forgotten;
  forgotten = static_cast<char*>(memory);
}

// __sanitizer::ReleaseMemoryPagesToOS(). A thread's trace stays, for the next one of its number.
IN_PLACE_OF(_ZN11__sanitizer22ReleaseMemoryPagesToOSEmm, void, Word begin, Word end) {
  const bool is_trace = begin >= kTraces && (begin - kTraces) % kTraceStride == 0;
  if (!is_trace) __real__ZN11__sanitizer22ReleaseMemoryPagesToOSEmm(begin, end);
}

#endif
