// What a kernel does that ends a program on a CPU: an access outside of all memory, a division by
// zero, an assertion that does not hold. Each is said in one line, with the kernel, the block and
// the thread.

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cpu/execution/execution.h"
#include "cpu/execution/sanitizers.h"
#include "cpu/watch/ledger.h"

namespace cuda_cpu {
namespace {

/// As in docs/measuring.md.
constexpr int kDeviceCannot = 3;

/// The program's place in build/cpu, or its name: what scons builds for a sanitizer.
const char* target() {
  const char* const built = std::strstr(program_invocation_name, "build/cpu/");
  return built ? built + std::strlen("build/cpu/") : program_invocation_short_name;
}

/// Prints what the thread has done, with what the program has printed before it, and ends the
/// program: memory of its own may be damaged. Only calls what may be called in any state.
void crashed(int signal, siginfo_t* info, [[maybe_unused]] void* context) {
  ::signal(signal, SIG_DFL);
  if (!runner || !runner->in_thread()) {
    if (signal == SIGSEGV && info->si_code == SEGV_ACCERR) {
      const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
#if defined(__x86_64__)
      const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
      const bool store = registers[REG_ERR] & 2;
      ledger_host(address, store ? Reach::write : Reach::read,
                  static_cast<std::uintptr_t>(registers[REG_RIP]));
#else
      ledger_host(address, Reach::either, 0);
#endif
    }
    if (info->si_code <= 0) raise(signal);  // somebody has sent it
    return;                                 // the host's own mistake, which it makes again
  }
  Message message = runner->begin_message(*runner->current().block);
  message.add_thread(runner->current());
  if (signal == SIGFPE) {
    message.add(" divides an integer by zero, or by -1 what has no such quotient");
  } else if (info->si_addr == nullptr || info->si_code == SI_KERNEL) {
    message.add(" reaches outside of all memory");
  } else {
    message.add(" reaches outside of all memory, at address %p", info->si_addr);
  }
  if (keeps_ledger()) {  // a program of a reader's own, whose report says the rest
    const std::string place = ledger_place();
    if (!place.empty()) message.add(", at %s", place.c_str());
    std::fflush(stdout);
    ledger_failed(message.text());
    _exit(kDeviceCannot);
  }
  message.add(": `scons sanitize=address build/cpu-address/%s` builds a program that says the line",
              target());
  if (ftrylockfile(stdout) == 0) std::fflush(stdout);
  message.add("\n");
  if (write(STDERR_FILENO, message.text(), std::strlen(message.text())) < 0) _exit(kDeviceCannot);
  _exit(kDeviceCannot);
}

}  // namespace

void report_crashes() {
  if (kSanitized) return;  // the sanitizer says more
  struct sigaction action = {};
  action.sa_sigaction = crashed;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE}) sigaction(signal, &action, nullptr);
}

void prepare_crash_stack() {
  if (kSanitized) return;
  stack_t stack = {};
  stack.ss_size = 64 << 10;
  stack.ss_sp = std::malloc(stack.ss_size);  // for as long as the thread runs, which is for ever
  if (stack.ss_sp) sigaltstack(&stack, nullptr);
}

}  // namespace cuda_cpu

/// In place of the C library's: what assert() calls. In a kernel it is an error of the launch, as
/// on a GPU.
extern "C" [[noreturn]] void __assert_fail(const char* expression, const char* file, unsigned line,
                                           const char* function) noexcept {
  using namespace cuda_cpu;
  if (runner && runner->in_thread()) {
    fail_assertion("assertion `%s` does not hold at %s:%u (%s)", expression, file, line, function);
  }
  std::fflush(stdout);
  std::fprintf(stderr, "%s: %s:%u: %s: Assertion `%s' failed.\n", program_invocation_short_name,
               file, line, function, expression);
  ledger_aborts();
  std::abort();
}
