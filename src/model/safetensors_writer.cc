#include "model/safetensors_writer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/files.h"
#include "model/in_quotes.h"

namespace heddle {
namespace {

using nlohmann::ordered_json;

std::size_t element_bytes(std::string_view dtype) {
  if (dtype.ends_with("64")) return 8;
  if (dtype.ends_with("32")) return 4;
  return dtype.ends_with("16") ? 2 : 1;
}

// A file that was not there, written from its beginning to its end.
class NewFile {
 public:
  explicit NewFile(const std::string& path)
      : path_(path), fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
    if (fd_ < 0) fail();
  }
  ~NewFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const char* from, std::size_t bytes) {
    while (bytes > 0) {
      const ssize_t done = ::write(fd_, from, bytes);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) fail();
      from += done;
      bytes -= static_cast<std::size_t>(done);
    }
  }
  void finish() {
    if (::fsync(fd_) != 0) fail();
    const int fd = std::exchange(fd_, -1);
    if (::close(fd) != 0) fail();
  }

 private:
  [[noreturn]] void fail() const {
    throw RuntimeError(text("[safetensors] cannot write ", path_, ": ", std::strerror(errno)));
  }

  const std::string& path_;
  int fd_;
};

}  // namespace

SafeTensorsWriter::SafeTensorsWriter(const std::string& path, std::vector<Tensor> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const Tensor& a, const Tensor& b) { return element_bytes(a.dtype) > element_bytes(b.dtype); });
  ordered_json header = ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t end = 0;
  for (const Tensor& tensor : tensors) {
    const bool added = places_.emplace(tensor.name, Place{end, tensor.bytes, false}).second;
    Check("safetensors").require(added, path_, ": tensor ", in_quotes(tensor.name), " would be there twice");
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {end, end + tensor.bytes}}};
    end += tensor.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = text.size();
  for (auto& [name, place] : places_) place.offset += 8 + length;
  std::string begin;
  for (int i = 0; i < 8; ++i) begin += static_cast<char>(length >> (8 * i) & 0xff);

  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("create");
  // Room first: a disk that is full says so before the work.
  errno = ::posix_fallocate(fd_, 0, static_cast<off_t>(8 + length + end));
  if (errno != 0) fail("make room for");
  write_at(0, begin.data(), begin.size());
  write_at(8, text.data(), text.size());
}

SafeTensorsWriter::~SafeTensorsWriter() {
  if (fd_ >= 0) ::close(fd_);
}

void SafeTensorsWriter::fail(const char* what) const {
  throw RuntimeError(text("[safetensors] cannot ", what, " ", path_, ": ", std::strerror(errno)));
}

void SafeTensorsWriter::write_at(std::uint64_t offset, const void* data, std::size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = ::pwrite(fd_, from, bytes, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("write");
    from += done;
    offset += static_cast<std::uint64_t>(done);
    bytes -= static_cast<std::size_t>(done);
  }
}

void SafeTensorsWriter::write(const std::string& name, const void* data, std::size_t bytes) {
  const Check check("safetensors");
  const auto found = places_.find(name);
  check.require(found != places_.end(), path_, ": tensor ", in_quotes(name), " was not announced");
  Place& place = found->second;
  check.require(place.bytes == bytes, path_, ": tensor ", in_quotes(name), " has ", bytes, " bytes: ", place.bytes,
                " were announced");
  write_at(place.offset, data, bytes);
  place.written = true;
}

void SafeTensorsWriter::finish() {
  for (const auto& [name, place] : places_) {
    Check("safetensors").require(place.written, path_, ": tensor ", in_quotes(name), " was not written");
  }
  if (::fsync(fd_) != 0) fail("write");
  const int fd = std::exchange(fd_, -1);
  if (::close(fd) != 0) fail("write");
}

void write_file(const std::string& path, const std::string& content) {
  NewFile file(path);
  file.write(content.data(), content.size());
  file.finish();
}

void copy_file(const std::string& from, const std::string& to) {
  constexpr std::size_t kStep = 1 << 20;
  const RegularFile source("safetensors", from);
  NewFile file(to);
  std::string piece(kStep, '\0');
  while (true) {
    const ssize_t got = ::read(source.fd(), piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw RuntimeError(text("[safetensors] cannot read ", from, ": ", std::strerror(errno)));
    if (got == 0) break;
    file.write(piece.data(), static_cast<std::size_t>(got));
  }
  file.finish();
}

}  // namespace heddle
