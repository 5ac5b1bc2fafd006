// A safetensors file written tensor by tensor, in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace heddle {

class SafeTensorsWriter {
 public:
  struct Tensor {
    std::string name, dtype;
    std::vector<std::int64_t> shape;
    std::size_t bytes = 0;
  };
  // Creates the file, which must not exist, with its header and room for all tensors: those of wider elements first, so
  // that each is aligned to its elements. Throws RuntimeError if that fails, as where the disk has no room.
  SafeTensorsWriter(const std::string& path, std::vector<Tensor> tensors,
                    const std::map<std::string, std::string>& metadata);
  ~SafeTensorsWriter();
  SafeTensorsWriter(const SafeTensorsWriter&) = delete;
  SafeTensorsWriter& operator=(const SafeTensorsWriter&) = delete;

  // All bytes of a tensor.
  void write(const std::string& name, const void* data, std::size_t bytes);
  // After every tensor was written: onto the disk.
  void finish();

 private:
  [[noreturn]] void fail(const char* what) const;
  void write_at(std::uint64_t offset, const void* data, std::size_t bytes);

  struct Place {
    std::uint64_t offset;
    std::size_t bytes;
    bool written;
  };
  std::string path_;
  int fd_ = -1;
  std::map<std::string, Place> places_;
};

// A text or bytes into a new file, onto the disk; RuntimeError.
void write_file(const std::string& path, const std::string& content);
// A regular file, or what a link to one leads to, into a new file; RuntimeError.
void copy_file(const std::string& from, const std::string& to);

}  // namespace heddle
