#include "cpu/order/stream_order.h"

#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "cpu/execution/sanitizers.h"
#include "cpu/runtime/capture.h"
#include "cpu/runtime/device_state.h"

#if defined(CUDA_CPU_TSAN)
extern "C" {
void __tsan_read_range(void* address, unsigned long size);
void __tsan_write_range(void* address, unsigned long size);
void __tsan_func_entry(void* place);
void __tsan_func_exit();
}
#endif

namespace cuda_cpu {
namespace {

using Kind = StreamOrder::Kind;

#if defined(CUDA_CPU_TSAN)
/// Nobody calls it: a place in it is that of a frame. ./try looks for its name.
template <std::size_t kNumber>
CUDA_CPU_NO_TSAN void in_stream() {
  asm volatile("nop\n nop\n nop\n nop\n nop");
}

/// Such a place. A stream whose number is higher by 64 has the same one.
template <std::size_t... kNumbers>
CUDA_CPU_NO_TSAN void* place_of(unsigned long long number, std::index_sequence<kNumbers...>) {
  static constexpr void (*kFunctions[])() = {in_stream<kNumbers>...};
  // A report takes it for where a call returns to, and looks one instruction before.
  return reinterpret_cast<char*>(kFunctions[number % sizeof...(kNumbers)]) + 4;
}
#endif

struct Streams {
  std::mutex mutex;
  std::vector<std::shared_ptr<StreamOrder>> all;
  std::shared_ptr<StreamOrder> legacy[kMostDevices];  ///< which are among all
  std::atomic<unsigned> waits = 0;
};

Streams& streams() {
  static Streams* const streams = new Streams;
  return *streams;
}

unsigned long long next_number() {
  static std::atomic<unsigned long long> last = 0;
  return ++last;
}

/// The calling identity comes after all that the stream has.
CUDA_CPU_NO_TSAN void acquire_all(StreamOrder& order) {
  for (char& end : order.ended) tsan_acquire(&end);
  tsan_acquire(&order.other_work);
}

/// Whether work in one stream begins when the other one's has ended, without an event.
CUDA_CPU_NO_TSAN bool waits_for(const StreamOrder& one, const StreamOrder& other,
                                bool all_devices) {
  if (&one == &other || (one.device != other.device && !all_devices)) return false;
  return one.kind == Kind::legacy ? other.kind != Kind::non_blocking
                                  : one.kind == Kind::blocking && other.kind == Kind::legacy;
}

/// The stream's identity comes after all that its next work comes after. Returns the caller's,
/// which is left to the caller to become again.
CUDA_CPU_NO_TSAN void* enter(StreamOrder& order, bool early, bool all_devices) {
  void* const host = tsan_current();
  if (!kTsan) return host;
  // Looked up in the host's name: the stream's must not be seen to read what the host writes.
  Streams& all = streams();
  std::lock_guard lock(all.mutex);
  std::vector<StreamOrder*> before;
  for (const auto& other : all.all) {
    if (waits_for(order, *other, all_devices)) before.push_back(other.get());
  }
  StreamOrder* const* const first = before.data();
  const std::size_t count = before.size();
  tsan_release(&order.called);
  tsan_become(order.identity);
  tsan_acquire(&order.called);
  if (!early) acquire_all(order);
  for (std::size_t i = 0; i < count; ++i) acquire_all(*first[i]);
  tsan_become(host);
  return host;
}

}  // namespace

StreamOrder::StreamOrder(int device, Kind kind)
    : device(device), kind(kind), number(next_number()) {
#if defined(CUDA_CPU_TSAN)
  identity = __tsan_create_fiber(0);
#endif
}

StreamOrder::~StreamOrder() {
#if defined(CUDA_CPU_TSAN)
  __tsan_destroy_fiber(identity);
#endif
}

std::shared_ptr<StreamOrder> order_of(cudaStream_t stream) {
  Streams& all = streams();
  std::lock_guard lock(all.mutex);
  const auto made = [&](std::shared_ptr<StreamOrder>& order, Kind kind) {
    if (order) return order;
    order = std::make_shared<StreamOrder>(current_device(), kind);
    all.all.push_back(order);
    return order;
  };
  if (!kTsan || !stream || stream == cudaStreamLegacy || device().concurrent) {
    return made(all.legacy[current_device()], Kind::legacy);
  }
  if (stream == cudaStreamPerThread) {
    static thread_local std::shared_ptr<StreamOrder> own[kMostDevices];
    return made(own[current_device()], Kind::blocking);
  }
  return made(stream->order,
              stream->flags & cudaStreamNonBlocking ? Kind::non_blocking : Kind::blocking);
}

CUDA_CPU_NO_TSAN void order_launch(StreamOrder& order, bool early) {
  void* const host = enter(order, early, false);
  tsan_become(order.identity);
  tsan_release(&order.begins);
  tsan_become(host);
}

CUDA_CPU_NO_TSAN void* launch_end(StreamOrder& order, unsigned number) {
  return &order.ended[number % 4];
}

CUDA_CPU_NO_TSAN void frame_begins([[maybe_unused]] const StreamOrder& order) {
#if defined(CUDA_CPU_TSAN)
  __tsan_func_entry(place_of(order.number, std::make_index_sequence<64>()));
#endif
}

CUDA_CPU_NO_TSAN void frame_ends() {
#if defined(CUDA_CPU_TSAN)
  __tsan_func_exit();
#endif
}

CUDA_CPU_NO_TSAN bool always_follows(const StreamOrder& next, const StreamOrder& last) {
  return next.number == last.number || waits_for(next, last, false);
}

void host_waits_for(StreamOrder& order) {
  if (!kTsan) return;
  Streams& all = streams();
  std::lock_guard lock(all.mutex);
  acquire_all(order);
  tsan_acquire(&order.begins);  // and after what an event has ordered before
  if (order.kind != Kind::legacy) return;
  for (const auto& other : all.all) {
    if (other->kind == Kind::blocking && other->device == order.device) acquire_all(*other);
  }
}

void host_waits_for_all() {
  if (!kTsan) return;
  Streams& all = streams();
  std::lock_guard lock(all.mutex);
  for (const auto& order : all.all) acquire_all(*order);
  std::erase_if(all.all, [](const auto& order) { return order.use_count() == 1; });
  ++all.waits;
}

unsigned times_host_waited_for_all() { return streams().waits; }

CUDA_CPU_NO_TSAN void order_event(void* event, StreamOrder& order) {
  void* const host = enter(order, false, false);
  tsan_become(order.identity);
  tsan_release(event);
  tsan_become(host);
}

CUDA_CPU_NO_TSAN void order_after_event(StreamOrder& order, void* event) {
  void* const host = tsan_current();
  tsan_become(order.identity);
  tsan_acquire(event);
  tsan_release(&order.other_work);
  tsan_become(host);
}

CUDA_CPU_NO_TSAN void host_waits_for_event(void* event) { tsan_acquire(event); }

CUDA_CPU_NO_TSAN StreamWork::StreamWork(StreamOrder& order, const void* place, bool all_devices)
    : order_(order), host_(enter(order, false, all_devices)) {
  tsan_become(order.identity);
#if defined(CUDA_CPU_TSAN)
  __tsan_func_entry(const_cast<void*>(place));
#else
  static_cast<void>(place);
#endif
  frame_begins(order);  // behind main() no frame is shown
}

CUDA_CPU_NO_TSAN StreamWork::~StreamWork() {
  frame_ends();
#if defined(CUDA_CPU_TSAN)
  __tsan_func_exit();
#endif
  tsan_release(&order_.other_work);
  tsan_become(host_);
}

CUDA_CPU_NO_TSAN void StreamWork::copy(void* target, const void* source, std::size_t size,
                                       [[maybe_unused]] bool host_reads) {
#if defined(CUDA_CPU_TSAN)
  void* const read = const_cast<void*>(source);
  if (host_reads) {
    tsan_become(host_);
    __tsan_read_range(read, size);
    tsan_become(order_.identity);
  } else {
    __tsan_read_range(read, size);
  }
  __tsan_write_range(target, size);
#endif
  const Unwatched done_above;
  std::memmove(target, source, size);
}

CUDA_CPU_NO_TSAN void StreamWork::fill(void* target, int value, std::size_t size) {
#if defined(CUDA_CPU_TSAN)
  __tsan_write_range(target, size);
#endif
  const Unwatched done_above;
  std::memset(target, value, size);
}

}  // namespace cuda_cpu
