// Safetensors files in the layouts of low-bit checkpoints, made from known codes, scales and zero points, by the
// producers' definitions: one value at a time.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace heddle::test {

// Bytes of a safetensors file, tensor by tensor.
class FileBytes {
 public:
  struct Tensor {
    std::string name, dtype;
    std::vector<std::int64_t> shape;
    std::string data;
  };
  std::vector<Tensor> tensors;

  template <class Value>
  FileBytes& add(const std::string& name, const std::string& dtype, std::vector<std::int64_t> shape,
                 const std::vector<Value>& values) {
    std::string data(values.size() * sizeof(Value), '\0');
    std::memcpy(data.data(), values.data(), data.size());
    tensors.push_back({name, dtype, std::move(shape), std::move(data)});
    return *this;
  }
  FileBytes& add_text(const std::string& name, const std::string& content) {
    tensors.push_back({name, "U8", {static_cast<std::int64_t>(content.size())}, content});
    return *this;
  }
  Tensor& at(const std::string& name) {
    for (Tensor& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    throw std::out_of_range(name);
  }
  void drop(const std::string& name) {
    std::erase_if(tensors, [&](const Tensor& tensor) { return tensor.name == name; });
  }

  std::string bytes() const {
    std::string header = "{", data;
    for (const Tensor& tensor : tensors) {
      if (header.size() > 1) header += ',';
      header += '"';
      header += tensor.name;
      header += R"(":{"dtype":")";
      header += tensor.dtype;
      header += R"(","shape":[)";
      for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
        if (i > 0) header += ',';
        header += std::to_string(tensor.shape[i]);
      }
      header += R"(],"data_offsets":[)";
      header += std::to_string(data.size());
      data += tensor.data;
      header += ',';
      header += std::to_string(data.size());
      header += "]}";
    }
    header += "}";
    std::string out;
    for (int i = 0; i < 8; ++i) out += static_cast<char>(header.size() >> (8 * i) & 0xff);
    return out + header + data;
  }
};

// A matrix as numbers: codes [N, K], 0 to 15, and for each of its groups a scale (bits of its dtype) and a zero point.
struct PlainMatrix {
  std::int64_t N, K, group;
  std::vector<std::uint8_t> codes, zeros;
  std::vector<std::uint32_t> scales;

  PlainMatrix(std::int64_t n, std::int64_t k, std::int64_t group_in, std::uint32_t low, std::uint32_t high,
              std::uint32_t seed = 1)
      : N(n), K(k), group(group_in) {
    std::mt19937 random(seed);
    for (std::int64_t i = 0; i < N * K; ++i) codes.push_back(static_cast<std::uint8_t>(random() % 16));
    for (std::int64_t i = 0; i < N * K / group; ++i) {
      scales.push_back(low + random() % (high - low + 1));
      zeros.push_back(static_cast<std::uint8_t>(1 + random() % 15));
    }
  }
  std::int64_t groups() const { return K / group; }
  unsigned code(std::int64_t n, std::int64_t k) const { return codes[static_cast<std::size_t>(n * K + k)]; }
  std::uint32_t scale(std::int64_t n, std::int64_t g) const {
    return scales[static_cast<std::size_t>(n * groups() + g)];
  }
  unsigned zero(std::int64_t n, std::int64_t g) const { return zeros[static_cast<std::size_t>(n * groups() + g)]; }

  // Codes of a row two to a byte, the even column low; or high.
  std::vector<std::uint8_t> bytes(bool high_first = false) const {
    std::vector<std::uint8_t> out;
    for (std::int64_t n = 0; n < N; ++n) {
      for (std::int64_t k = 0; k < K; k += 2) {
        const unsigned first = code(n, k), second = code(n, k + 1);
        out.push_back(static_cast<std::uint8_t>(high_first ? first << 4 | second : second << 4 | first));
      }
    }
    return out;
  }
  template <class Value>
  std::vector<Value> scales_as(bool transposed = false) const {
    std::vector<Value> out;
    for (std::int64_t i = 0; i < N * groups(); ++i) {
      out.push_back(static_cast<Value>(transposed ? scale(i % N, i / N) : scale(i / groups(), i % groups())));
    }
    return out;
  }
};

// value(i, j) for i < rows, j < columns, eight of the second extent to an int32: the one at order[p] in nibble p.
template <class Value>
std::vector<std::uint32_t> packed_words(std::int64_t rows, std::int64_t columns, const Value& value,
                                        std::initializer_list<int> order = {0, 1, 2, 3, 4, 5, 6, 7}) {
  std::vector<std::uint32_t> out;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; j += 8) {
      std::uint32_t word = 0;
      int shift = 0;
      for (const int o : order) {
        if (j + o < columns) word |= static_cast<std::uint32_t>(value(i, j + o)) << shift;
        shift += 4;
      }
      out.push_back(word);
    }
  }
  return out;
}
constexpr std::initializer_list<int> kAwqOrder = {0, 2, 4, 6, 1, 3, 5, 7};

}  // namespace heddle::test
