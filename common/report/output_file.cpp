#include "common/report/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "common/check.h"

namespace common {

namespace {

[[noreturn]] void cannot_write(const std::string& path, int error) {
  fail(kBadUsage, "cannot write --json %s: %s", path.c_str(), strerror(error));
}

/// What the file is that a name leads to, over all links: it need not be there.
std::string behind_links(std::filesystem::path path) {
  constexpr int kMost = 40;
  std::error_code error;
  for (int i = 0; i < kMost && std::filesystem::is_symlink(path, error); ++i) {
    path = path.parent_path() / std::filesystem::read_symlink(path, error);
  }
  return path.string();
}

/// Whether to write to it as it is: to rename a file over it would replace a device, or cut off
/// what the program has printed.
bool is_written_directly(const std::string& path) {
  struct stat target;
  if (stat(path.c_str(), &target) != 0 || S_ISDIR(target.st_mode)) return false;
  if (!S_ISREG(target.st_mode)) return true;
  for (const int output : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat own;
    const bool known = fstat(output, &own) == 0;
    if (known && own.st_dev == target.st_dev && own.st_ino == target.st_ino) return true;
  }
  return false;
}

/// The file that is written, and then takes the place of `path`.
class Beside {
 public:
  explicit Beside(const std::string& path)
      : path_(behind_links(path)), name_(path_ + ".tmp." + std::to_string(getpid())) {
    struct stat old;
    const bool exists = stat(path_.c_str(), &old) == 0;
    if (exists && S_ISDIR(old.st_mode)) cannot_write(path, EISDIR);
    file_ = open(name_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (file_ < 0) cannot_write(path, errno);
    if (exists) fchmod(file_, old.st_mode & 07777);
  }
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;

  int file() const { return file_; }
  /// `error`: of what was done with it, or 0.
  int remove(int error) {
    close(file_);
    unlink(name_.c_str());
    return error;
  }
  int take_place() {
    if (close(file_) != 0 || rename(name_.c_str(), path_.c_str()) != 0) {
      const int error = errno;
      unlink(name_.c_str());
      return error;
    }
    return 0;
  }

 private:
  std::string path_, name_;
  int file_ = -1;
};

/// 0, or the error.
int write_all(int file, const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const ssize_t written = write(file, text.data() + at, text.size() - at);
    if (written < 0 && errno != EINTR) return errno;
    at += static_cast<size_t>(std::max<ssize_t>(written, 0));
  }
  return 0;
}

int write_directly(const std::string& path, const std::string& text) {
  const int file = open(path.c_str(), O_WRONLY | O_APPEND);
  if (file < 0) return errno;
  const int error = write_all(file, text);
  return close(file) != 0 && error == 0 ? errno : error;
}

}  // namespace

void require_writable(const std::string& path, size_t bytes) {
  if (path == "-" || is_written_directly(path)) return;
  Beside beside(path);
  const int error = posix_fallocate(beside.file(), 0, static_cast<off_t>(bytes));
  // Not every file system can say that there is room.
  const bool unknown = error == EOPNOTSUPP || error == EINVAL;
  if (beside.remove(error) != 0 && !unknown) cannot_write(path, error);
}

void write_output(const std::string& path, const std::string& text) {
  int error = 0;
  if (path == "-") {
    error = write_all(STDOUT_FILENO, text);
  } else if (is_written_directly(path)) {
    error = write_directly(path, text);
  } else {
    Beside beside(path);
    error = write_all(beside.file(), text);
    error = error ? beside.remove(error) : beside.take_place();
  }
  if (error) cannot_write(path, error);
}

void require_printed() {
  if (fflush(stdout) == 0 && !ferror(stdout)) return;
  fail(kBadUsage, "cannot write what is printed: %s", strerror(errno));
}

}  // namespace common
