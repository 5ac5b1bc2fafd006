// A safetensors file written tensor by tensor, in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/files.h"

namespace heddle {

class SafeTensorsWriter {
 public:
  struct Tensor {
    std::string name, dtype;
    std::vector<std::int64_t> shape;
    std::size_t bytes = 0;
  };
  // Creates the file, which must not exist, with its header and room for all tensors: those of wider elements first, so
  // that each is aligned to its elements. Throws RuntimeError if that fails, as where the disk has no room. What is not
  // finished is removed.
  SafeTensorsWriter(const std::string& path, std::vector<Tensor> tensors,
                    const std::map<std::string, std::string>& metadata);

  // All bytes of a tensor.
  void write(const std::string& name, const void* data, std::size_t bytes);
  // After every tensor was written: onto the disk.
  void finish();

 private:
  struct Place {
    std::uint64_t offset;
    std::size_t bytes;
    bool written;
  };
  std::string path_;
  OutputFile file_;
  std::map<std::string, Place> places_;
};

// A text or bytes into a new file, onto the disk; RuntimeError.
void write_file(const std::string& path, const std::string& content);
// A regular file, or what a link to one leads to, into a new file; RuntimeError.
void copy_file(const std::string& from, const std::string& to);

}  // namespace heddle
