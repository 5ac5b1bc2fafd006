#include "core/files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"

namespace heddle {

RegularFile::RegularFile(std::string_view operation, const std::string& path) {
  const auto fail = [&](const char* what) {
    const int error = errno;
    if (fd_ >= 0) ::close(fd_);
    throw RuntimeError(text("[", operation, "] cannot ", what, " ", path, ": ", std::strerror(error)));
  };
  // Without O_NONBLOCK the open itself would wait for a pipe's writer, before anything says that it is a pipe.
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) fail("open");
  struct stat status {};
  if (::fstat(fd_, &status) != 0) fail("read");
  if (!S_ISREG(status.st_mode)) {
    ::close(fd_);
    throw RuntimeError(text("[", operation, "] ", path, " is not a regular file"));
  }
  size_ = static_cast<std::size_t>(status.st_size);
}

RegularFile::~RegularFile() { ::close(fd_); }

std::string read_file(std::string_view operation, const std::string& path, std::size_t max_bytes) {
  const RegularFile file(operation, path);
  const auto require_size = [&](std::size_t bytes) {
    Check(operation).require(bytes <= max_bytes, path, " has ", bytes, " bytes: at most ", max_bytes, " are read");
  };
  require_size(file.size());
  // Until the end, wherever it is: files of /proc have size 0, and a file may grow.
  constexpr std::size_t kStep = 1 << 16;
  std::string content;
  std::size_t filled = 0;
  while (true) {
    content.resize(std::max(filled + kStep, file.size() + 1));
    const ssize_t got = ::read(file.fd(), content.data() + filled, content.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw RuntimeError(text("[", operation, "] cannot read ", path, ": ", std::strerror(errno)));
    if (got == 0) break;
    filled += static_cast<std::size_t>(got);
    require_size(filled);
  }
  content.resize(filled);
  return content;
}

}  // namespace heddle
