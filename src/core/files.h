// Files: those that others wrote, of which only regular ones are read, through links too, since a pipe would wait for
// its writer for ever; and those that are written here, whole or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
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
  // Throws RuntimeError where that fails or the file ends before.
  void read_at(std::uint64_t offset, void* to, std::size_t bytes) const;

 private:
  const std::string operation_, path_;
  int fd_ = -1;
  std::size_t size_ = 0;
};

// The file's bytes. Throws RuntimeError as RegularFile does, Error if there are more than `max_bytes`.
std::string read_file(std::string_view operation, const std::string& path, std::size_t max_bytes);

// A file to be written. Whatever fails throws RuntimeError, "[operation] cannot ... PATH: why"; what is not finished is
// removed.
class OutputFile {
 public:
  enum class Existing : std::uint8_t {
    refuse,  // the path must be free
    // What is there stays as it is until finish(): the new file has a name of its own in the same folder till then. A
    // link stays, and what it leads to is replaced. Devices, pipes and files without a name are written as they are.
    replace,
  };
  OutputFile(std::string_view operation, const std::string& path, Existing existing);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  // Has the disk keep room for that many bytes, so that a full one says so before the work.
  void reserve(std::uint64_t bytes);
  void write(const void* from, std::size_t bytes);
  void write_at(std::uint64_t offset, const void* from, std::size_t bytes);
  // Onto the disk, and under its name.
  void finish();

 private:
  [[noreturn]] void fail(const char* what) const;
  void open_new(const std::string& path);
  void open_beside();

  const std::string operation_, path_;
  std::string target_;   // where the file is in the end: path_, or what it leads to
  std::string written_;  // what is removed unless it is finished; "" where nothing was made
  int fd_ = -1;
};

// Whether both lead to one regular file, or to one place where there is no file yet.
bool same_file(const std::string& a, const std::string& b);

}  // namespace heddle
