// Files that others wrote. Only regular files are read, through links too: a pipe would wait for its writer for ever.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace heddle {

// An open regular file. Throws RuntimeError, "[operation] ...", if there is none of that path that can be read.
class RegularFile {
 public:
  RegularFile(std::string_view operation, const std::string& path);
  ~RegularFile();
  RegularFile(const RegularFile&) = delete;
  RegularFile& operator=(const RegularFile&) = delete;

  int fd() const { return fd_; }
  std::size_t size() const { return size_; }

 private:
  int fd_ = -1;
  std::size_t size_ = 0;
};

// The file's bytes. Throws RuntimeError as RegularFile does, Error if there are more than `max_bytes`.
std::string read_file(std::string_view operation, const std::string& path, std::size_t max_bytes);

}  // namespace heddle
