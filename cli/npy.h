// NumPy's .npy files (format versions 1 to 3), read strictly: a file that is not exactly what its header says is
// refused.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "heddle/tensor.h"
#include "tensors.h"

namespace heddle::cli {

// The first bytes of an .npy file, understood.
struct NpyHeader {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  bool fortran_order = false;
  std::size_t header_bytes = 0;  // where the data starts
  std::size_t data_bytes = 0;
};

// Parses the header at the start of `bytes` of a file that is `file_bytes` long. Little-endian f4, f2, i4 and b1 of
// rank 1..4 are accepted. Throws Error, naming `name`, for anything else, and if the data is not data_bytes long.
NpyHeader parse_npy_header(const std::string& bytes, std::size_t file_bytes, const std::string& name);

// Reads a file. Throws RuntimeError, "[operation] ...", if it cannot be read or is no regular file, Error if it breaks
// the format or holds a bool that is neither 0 nor 1.
HostTensor read_npy(std::string_view operation, const std::string& path);

// Writes any view of f32, f16, i32 or bool, and bf16 widened to f32. What is there stays until all is written; links
// stay, and devices and pipes are written as they are. Throws RuntimeError.
void write_npy(const std::string& path, const TensorView& view);

}  // namespace heddle::cli
