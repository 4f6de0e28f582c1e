// rand() of programs of a reader's own, with the C library's numbers. The C library locks each
// call as soon as there is a second thread, and here there always is one; programs that fill large
// arrays spend half of their time there. So each thread has numbers of its own: those of the seed.
#if defined(CUDA_CPU_STACK)

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace cuda_cpu {
namespace {

std::atomic<unsigned> last_seed = 1;

struct Numbers {
  random_data data;
  char state[128];  // as much as the C library has
  bool started;
};
constinit thread_local Numbers numbers = {};

void start(unsigned seed) {
  numbers = {};
  initstate_r(seed, numbers.state, sizeof numbers.state, &numbers.data);
  numbers.started = true;
}

int next() {
  if (!numbers.started) start(last_seed);
  std::int32_t number = 0;
  random_r(&numbers.data, &number);
  return number;
}

}  // namespace
}  // namespace cuda_cpu

extern "C" {
void srand(unsigned seed) noexcept { cuda_cpu::start(cuda_cpu::last_seed = seed); }
void srandom(unsigned seed) noexcept { srand(seed); }
int rand() noexcept { return cuda_cpu::next(); }
long random() noexcept { return cuda_cpu::next(); }
}

#endif
