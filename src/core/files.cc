#include "core/files.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "core/os/os.h"

namespace heddle {
namespace {

bool same_inode(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

// The path that links lead to, also where there is nothing yet. The path itself where they go round in a circle:
// whoever opens it is told.
std::string behind_links(const std::string& path) {
  constexpr int kLinks = 40;  // as many as Linux follows
  std::filesystem::path at = path;
  for (int link = 0; link < kLinks; ++link) {
    std::error_code failure;
    const std::filesystem::path next = std::filesystem::read_symlink(at, failure);
    if (failure) return at.string();
    at = next.is_absolute() ? next : at.parent_path() / next;
  }
  return path;
}

}  // namespace

RegularFile::RegularFile(std::string_view operation, const std::string& path) : operation_(operation), path_(path) {
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

void RegularFile::read_at(std::uint64_t offset, void* to, std::size_t bytes) const {
  auto* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = ::pread(fd_, at, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw RuntimeError(text("[", operation_, "] cannot read ", path_, ": ", std::strerror(errno)));
    if (got == 0) throw RuntimeError(text("[", operation_, "] cannot read ", path_, ": it ends at byte ", offset));
    at += got;
    offset += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
}

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

OutputFile::OutputFile(std::string_view operation, const std::string& path, Existing existing)
    : operation_(operation), path_(path), target_(path) {
  if (existing == Existing::refuse) {
    open_new(path);
    if (fd_ < 0) fail("create");
    return;
  }
  struct stat there {};
  const bool exists = ::stat(path.c_str(), &there) == 0;
  if (!exists && errno != ENOENT) fail("write");
  target_ = behind_links(path);
  struct stat named {};
  // Behind /dev/fd there are pipes, and files whose names are gone: the link's text leads nowhere.
  if (exists && !(S_ISREG(there.st_mode) && ::stat(target_.c_str(), &named) == 0 && same_inode(there, named))) {
    fd_ = ::open(path.c_str(), O_WRONLY | O_TRUNC | O_NOCTTY | O_CLOEXEC);
    if (fd_ < 0) fail("write");
    return;
  }
  open_beside();
  // A file system without permissions may refuse, and has its own.
  if (exists) (void)::fchmod(fd_, there.st_mode & 0777);
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!written_.empty()) ::unlink(written_.c_str());
}

void OutputFile::open_new(const std::string& path) {
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (fd_ >= 0) written_ = path;
}

// Under a name that nobody can have put there before.
void OutputFile::open_beside() {
  const std::filesystem::path folder = std::filesystem::path(target_).parent_path();
  std::random_device random;
  for (int attempt = 0; attempt < 100 && fd_ < 0; ++attempt) {
    char name[32];
    std::snprintf(name, sizeof name, ".heddle-%08x%08x", random(), random());
    open_new((folder / name).string());
    if (fd_ < 0 && errno != EEXIST) break;
  }
  if (fd_ < 0) fail("write");
}

void OutputFile::fail(const char* what) const {
  throw RuntimeError(text("[", operation_, "] cannot ", what, " ", path_, ": ", std::strerror(errno)));
}

void OutputFile::reserve(std::uint64_t bytes) {
  errno = os::reserve(fd_, bytes);
  if (errno != 0) fail("make room for");
}

void OutputFile::write(const void* from, std::size_t bytes) {
  const auto* at = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t done = ::write(fd_, at, bytes);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("write");
    at += done;
    bytes -= static_cast<std::size_t>(done);
  }
}

void OutputFile::write_at(std::uint64_t offset, const void* from, std::size_t bytes) {
  const auto* at = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t done = ::pwrite(fd_, at, bytes, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("write");
    at += done;
    offset += static_cast<std::uint64_t>(done);
    bytes -= static_cast<std::size_t>(done);
  }
}

void OutputFile::finish() {
  if (!written_.empty() && ::fsync(fd_) != 0) fail("write");  // pipes and devices have nothing to keep
  const int fd = std::exchange(fd_, -1);
  if (::close(fd) != 0) fail("write");
  if (!written_.empty() && written_ != target_ && ::rename(written_.c_str(), target_.c_str()) != 0) fail("write");
  written_.clear();
}

bool same_file(const std::string& a, const std::string& b) {
  struct stat at_a {
  }, at_b{};
  const bool exists = ::stat(a.c_str(), &at_a) == 0;
  if (exists != (::stat(b.c_str(), &at_b) == 0)) return false;
  if (exists) return S_ISREG(at_a.st_mode) && same_inode(at_a, at_b);
  std::error_code unknown;
  const auto place_a = std::filesystem::weakly_canonical(behind_links(a), unknown);
  return !unknown && place_a == std::filesystem::weakly_canonical(behind_links(b), unknown) && !unknown;
}

}  // namespace heddle
