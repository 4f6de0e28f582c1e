// Where in the source a place of the program is.
#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cpu/watch/counting.h"

extern "C" const char __executable_start;  // where the linker has put the program

namespace cuda_cpu {

namespace {

/// binutils' addr2line, which answers until the program ends. It takes a tenth of a second to read
/// of this program what it has to, and then no time.
class Addr2line {
 public:
  Addr2line() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return;
    // This program, by a name that is the same in the other process.
    std::string program = "/proc/" + std::to_string(getpid()) + "/exe";
    std::string words[] = {"addr2line", "-a", "-i", "-e"};
    char* const arguments[] = {words[0].data(), words[1].data(), words[2].data(),
                               words[3].data(), program.data(),  nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    const int error = posix_spawnp(&child_, "addr2line", &actions, nullptr, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    if (error == 0) answers_ = fdopen(ends[0], "r");
    if (!answers_) close(ends[0]);
  }
  Addr2line(const Addr2line&) = delete;
  Addr2line& operator=(const Addr2line&) = delete;
  ~Addr2line() {
    if (answers_) std::fclose(answers_);
    if (answers_ && owner == getpid()) waitpid(child_, nullptr, 0);
  }

  /// All lines that it knows of an address, the innermost function's first; nullopt if it does not
  /// answer.
  std::optional<std::vector<std::string>> ask(std::uintptr_t address) {
    if (!answers_) return std::nullopt;
    // It says each address before its lines. Behind address 0 there is one line, of nothing.
    char question[64];
    const int bytes = std::snprintf(question, sizeof question, "0x%zx\n0x0\n", address);
    if (send(fileno(answers_), question, bytes, MSG_NOSIGNAL) != bytes) return std::nullopt;
    std::vector<std::string> lines;
    if (!next()) return std::nullopt;
    while (const auto line = next()) {
      const bool is_address = line->starts_with("0x");
      if (!is_address) lines.push_back(*line);
      if (is_address) return next() ? std::optional(lines) : std::nullopt;
    }
    return std::nullopt;
  }

  const pid_t owner = getpid();  ///< not the child of a fork(), which has one of its own

 private:
  std::optional<std::string> next() {
    char text[4096];
    if (!std::fgets(text, sizeof text, answers_)) return std::nullopt;
    return text;
  }

  FILE* answers_ = nullptr;
  pid_t child_ = -1;
};

/// The innermost line that is not the backend's, among those of an address.
Line own_line(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) {
    const std::size_t colon = line.rfind(':');
    if (colon == std::string::npos) continue;
    std::string file = line.substr(0, colon);
    while (file.starts_with("./")) file.erase(0, 2);
    // The backend's own files are nobody's; its tests are programs like others.
    if (file.starts_with("cpu/") && !file.starts_with("cpu/tests/")) continue;
    if (file.starts_with("/") || file.starts_with("?")) continue;
    return {file, std::atoi(line.c_str() + colon + 1)};
  }
  return {"", 0};
}

}  // namespace

std::vector<Line> lines_of(const std::vector<std::uintptr_t>& addresses) {
  // What is reported when the program ends may need them: they are never destroyed.
  static auto& mutex = *new std::mutex;
  static auto& known = *new std::map<std::uintptr_t, Line>;
  static auto& addr2line = *new std::unique_ptr<Addr2line>;
  std::lock_guard lock(mutex);
  std::vector<Line> lines;
  for (const std::uintptr_t address : addresses) {
    auto found = known.find(address);
    if (found == known.end()) {
      if (!addr2line || addr2line->owner != getpid()) {
        addr2line = std::make_unique<Addr2line>();
        std::atexit([] { addr2line.reset(); });
      }
      // The call before the address, where it returns to.
      const auto answer =
          addr2line->ask(address - 1 - reinterpret_cast<std::uintptr_t>(&__executable_start));
      if (!answer) return {};
      found = known.emplace(address, own_line(*answer)).first;
    }
    lines.push_back(found->second);
  }
  return lines;
}

std::string line_of(std::uintptr_t code) {
  const std::vector<Line> lines = lines_of({code});
  if (lines.empty() || lines[0].file.empty()) return "";
  return lines[0].file + ":" + std::to_string(lines[0].number);
}

}  // namespace cuda_cpu
