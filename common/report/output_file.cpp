#include "common/report/output_file.h"

#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "common/check.h"

namespace common {

namespace {

/// A device node, such as /dev/stdout, is written to as it is: renaming over it would replace it.
bool is_device_node(const std::string& path) {
  struct stat status;
  return stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode);
}

/// With `rehearse` the file is written and removed.
void write_atomically(const std::string& name, const std::string& text, bool rehearse) {
  // A link stays, and what it points to is replaced.
  char resolved[PATH_MAX];
  const std::string path = realpath(name.c_str(), resolved) ? resolved : name;
  const bool direct = is_device_node(path);
  if (direct && rehearse) return;
  const std::string target = direct ? path : path + ".tmp." + std::to_string(getpid());
  FILE* file = fopen(target.c_str(), "w");
  bool written = file && fwrite(text.data(), 1, text.size(), file) == text.size();
  int error = errno;
  if (file && fclose(file) != 0) written = false, error = errno;
  struct stat status;
  if (written && rehearse && stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) {
    written = false, error = EISDIR;
  }
  if (written && !direct && !rehearse && rename(target.c_str(), path.c_str()) != 0) {
    written = false, error = errno;
  }
  if (!direct && (rehearse || !written)) unlink(target.c_str());
  if (!written) fail(kBadUsage, "cannot write --json %s: %s", path.c_str(), strerror(error));
}

}  // namespace

void require_writable(const std::string& path) {
  // 64 KiB is more than a record takes, so that a full disk shows now.
  write_atomically(path, std::string(65536, ' '), true);
}

void write_output(const std::string& path, const std::string& text) {
  write_atomically(path, text, false);
}

}  // namespace common
