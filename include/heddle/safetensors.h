// A strict reader of safetensors files. Nothing in the file is trusted: every size, offset and name is checked before
// use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "heddle/tensor.h"

namespace heddle {

// An open file, mapped into memory; views stay valid as long as it lives.
class SafeTensors {
 public:
  struct Entry {
    std::string dtype;  // as the file names it: "F32", "BF16", "I64", ...
    std::vector<std::int64_t> shape;
    const void* data = nullptr;
    std::size_t bytes = 0;
  };

  // Maps the file: no data is copied or read beyond the header. The file must not shrink while it is open: reading what
  // was cut off ends the process (SIGBUS), without an exception. Throws RuntimeError if the file cannot be read, Error
  // if it breaks the format: header longer than 100 MB or than the file, not a JSON object of the format's fields,
  // duplicate names, an unknown dtype, negative or overflowing shapes, offsets that are reversed, overlap, leave holes,
  // do not match the shape or pass the end.
  static SafeTensors open(const std::string& path);
  // The same checks over bytes in memory, which must outlive the result.
  static SafeTensors parse(const void* data, std::size_t bytes);

  const std::map<std::string, Entry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // For messages: the path, or "bytes in memory".
  const std::string& source() const { return source_; }
  bool contains(const std::string& name) const { return entries_.contains(name); }
  // The tensor as a view (rank 1..4; F32, F16, BF16, I32 or BOOL); throws Error with the name if it is not there or
  // cannot be viewed so, which includes data that the file does not align to its dtype.
  TensorView tensor(const std::string& name) const;

 private:
  SafeTensors() = default;
  static SafeTensors read(const void* data, std::size_t bytes, const std::string& source);

  std::shared_ptr<const void> mapping_;
  std::string source_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace heddle
