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

#include "heddle/checkpoint.h"
#include "lowbit/formats.h"

namespace heddle::lowbit::test {

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
    if (!values.empty()) std::memcpy(data.data(), values.data(), data.size());
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

// Each layout of layer "l", as its producer defines it.

// Scales as bits: E4M3 and E8M0 that are numbers, positive float16 and float32.
constexpr std::uint32_t kE4M3[2] = {0, 0x7e}, kE8M0[2] = {0, 254}, kF16[2] = {1, 0x7bff}, kF32[2] = {1, 0x7f7fffff};

inline PlainMatrix nvfp4_matrix() { return {9, 96, 16, kE4M3[0], kE4M3[1]}; }
inline PlainMatrix mxfp4_matrix() { return {9, 96, 32, kE8M0[0], kE8M0[1]}; }
inline PlainMatrix int4_matrix(std::int64_t group = 64) { return {72, 256, group, kF16[0], kF16[1]}; }

inline FileBytes gpt_oss(const std::string& blocks, const std::string& scales) {
  const PlainMatrix m = mxfp4_matrix(), second(9, 96, 32, kE8M0[0], kE8M0[1], 2);
  std::vector<std::uint8_t> codes = m.bytes(), exponents = m.scales_as<std::uint8_t>();
  for (const std::uint8_t byte : second.bytes()) codes.push_back(byte);
  for (const auto byte : second.scales_as<std::uint8_t>()) exponents.push_back(byte);
  return FileBytes().add(blocks, "U8", {2, 9, 3, 16}, codes).add(scales, "U8", {2, 9, 3}, exponents);
}
inline FileBytes modelopt() {
  const PlainMatrix m = nvfp4_matrix();
  return FileBytes()
      .add("l.weight", "U8", {9, 48}, m.bytes())
      .add("l.weight_scale", "F8_E4M3", {9, 6}, m.scales_as<std::uint8_t>())
      .add<float>("l.weight_scale_2", "F32", {}, {0.37f})
      .add<float>("l.input_scale", "F32", {}, {3});
}
inline FileBytes compressed_nvfp4() {
  const PlainMatrix m = nvfp4_matrix();
  return FileBytes()
      .add("l.weight_packed", "U8", {9, 48}, m.bytes())
      .add("l.weight_scale", "F8_E4M3", {9, 6}, m.scales_as<std::uint8_t>())
      .add<float>("l.weight_global_scale", "F32", {1}, {7168});
}
inline FileBytes compressed_mxfp4() {
  const PlainMatrix m = mxfp4_matrix();
  return FileBytes()
      .add("l.weight_packed", "U8", {9, 48}, m.bytes())
      .add("l.weight_scale", "U8", {9, 3}, m.scales_as<std::uint8_t>());
}
inline FileBytes compressed_int4(const PlainMatrix& m, bool zero_points) {
  FileBytes file;
  file.add("l.weight_packed", "I32", {m.N, m.K / 8},
           packed_words(m.N, m.K, [&](auto n, auto k) { return m.code(n, k); }));
  file.add("l.weight_scale", "F16", {m.N, m.groups()}, m.scales_as<std::uint16_t>());
  file.add<std::int64_t>("l.weight_shape", "I64", {2}, {m.N, m.K});
  if (zero_points) {
    // Packed along N: words [N/8, G].
    std::vector<std::uint32_t> words;
    for (std::int64_t i = 0; i < (m.N + 7) / 8; ++i) {
      for (std::int64_t g = 0; g < m.groups(); ++g) {
        std::uint32_t word = 0;
        for (int p = 0; p < 8 && 8 * i + p < m.N; ++p) word |= m.zero(8 * i + p, g) << (4 * p);
        words.push_back(word);
      }
    }
    file.add("l.weight_zero_point", "I32", {(m.N + 7) / 8, m.groups()}, words);
  }
  return file;
}
// Codes of 8 bits, byte 7 n + 3 k, and the scales 1, 2, ... of the rows.
inline std::vector<std::uint8_t> byte_codes(std::int64_t rows, std::int64_t columns) {
  std::vector<std::uint8_t> out;
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    out.push_back(static_cast<std::uint8_t>(7 * (i / columns) + 3 * (i % columns)));
  }
  return out;
}
inline std::vector<float> row_scales(std::int64_t rows) {
  std::vector<float> out;
  for (std::int64_t n = 0; n < rows; ++n) out.push_back(static_cast<float>(n + 1));
  return out;
}
inline FileBytes compressed_bytes(const std::string& dtype, std::int64_t rows, std::int64_t columns) {
  return FileBytes()
      .add("l.weight", dtype, {rows, columns}, byte_codes(rows, columns))
      .add("l.weight_scale", "F32", {rows, 1}, row_scales(rows));
}
// Four columns to a word, each plus 128; what fills the last word is nobody's.
inline FileBytes compressed_int8_words(std::int64_t rows, std::int64_t columns) {
  const std::vector<std::uint8_t> codes = byte_codes(rows, columns);
  std::vector<std::uint8_t> bytes;
  const std::int64_t words = (columns + 3) / 4;
  for (std::int64_t n = 0; n < rows; ++n) {
    for (std::int64_t k = 0; k < 4 * words; ++k) {
      bytes.push_back(k < columns ? static_cast<std::uint8_t>(codes[static_cast<std::size_t>(n * columns + k)] + 128)
                                  : std::uint8_t{0x5a});
    }
  }
  FileBytes file;
  file.add("l.weight_packed", "I32", {rows, words}, bytes);
  file.add("l.weight_scale", "F32", {rows, 1}, row_scales(rows));
  return file.add<std::int64_t>("l.weight_shape", "I64", {2}, {rows, columns});
}
inline PlainMatrix bnb_matrix() { return {5, 192, 64, kF32[0], kF32[1]}; }
inline FileBytes bitsandbytes(const std::string& type,
                              const std::string& fields = R"("blocksize": 64, "shape": [5, 192])") {
  const PlainMatrix m = bnb_matrix();
  std::vector<float> map;
  for (unsigned code = 0; code < 16; ++code) {
    const auto bits = static_cast<std::uint8_t>(code);
    map.push_back(type == "nf4" ? NF4{bits}.value() : FP4Bnb{bits}.value());
  }
  return FileBytes()
      .add("l.weight", "U8", {480, 1}, m.bytes(true))
      .add("l.weight.absmax", "F32", {15}, m.scales_as<std::uint32_t>())
      .add("l.weight.quant_map", "F32", {16}, map)
      .add_text("l.weight.quant_state.bitsandbytes__" + type,
                R"({"quant_type": ")" + type + R"(", "dtype": "bfloat16", )" + fields + "}");
}
inline FileBytes bitsandbytes_nested() {
  FileBytes file = bitsandbytes("nf4",
                                R"("blocksize": 64, "shape": [5, 192], "nested_blocksize": 4, "nested_dtype": "float32",
                                   "nested_offset": 0.0625)");
  std::vector<std::uint8_t> codes;
  std::vector<float> map, absmax;
  for (int i = 0; i < 15; ++i) codes.push_back(static_cast<std::uint8_t>(17 * i));
  for (int i = 0; i < 256; ++i) map.push_back(static_cast<float>(i - 128) / 127.3f);
  for (int i = 0; i < 4; ++i) absmax.push_back(0.1f * static_cast<float>(i + 1));
  file.drop("l.weight.absmax");
  return file.add("l.weight.absmax", "U8", {15}, codes)
      .add("l.weight.nested_quant_map", "F32", {256}, map)
      .add("l.weight.nested_absmax", "F32", {4}, absmax);
}
// In version 1 zero points are less 1.
inline FileBytes gptq(const PlainMatrix& m, int version) {
  // [K/8, N]: eight columns of a row to a word, words of a column of the file beside each other.
  std::vector<std::uint32_t> words;
  for (std::int64_t w = 0; w < m.K / 8; ++w) {
    for (std::int64_t n = 0; n < m.N; ++n) {
      std::uint32_t word = 0;
      for (int i = 0; i < 8; ++i) word |= m.code(n, 8 * w + i) << (4 * i);
      words.push_back(word);
    }
  }
  std::vector<std::int32_t> group_of;
  for (std::int64_t k = 0; k < m.K; ++k) group_of.push_back(static_cast<std::int32_t>(k / m.group));
  return FileBytes()
      .add("l.qweight", "I32", {m.K / 8, m.N}, words)
      .add("l.qzeros", "I32", {m.groups(), m.N / 8},
           packed_words(m.groups(), m.N, [&](auto g, auto n) { return m.zero(n, g) - (version == 1 ? 1 : 0); }))
      .add("l.scales", "F16", {m.groups(), m.N}, m.scales_as<std::uint16_t>(true))
      .add("l.g_idx", "I32", {m.K}, group_of);
}
inline FileBytes awq(const PlainMatrix& m) {
  return FileBytes()
      .add("l.qweight", "I32", {m.K, m.N / 8},
           packed_words(
               m.K, m.N, [&](auto k, auto n) { return m.code(n, k); }, kAwqOrder))
      .add("l.qzeros", "I32", {m.groups(), m.N / 8},
           packed_words(
               m.groups(), m.N, [&](auto g, auto n) { return m.zero(n, g); }, kAwqOrder))
      .add("l.scales", "F16", {m.groups(), m.N}, m.scales_as<std::uint16_t>(true));
}

// A checkpoint over bytes of exactly the file's size, so that a sanitizer sees what is read beyond.
struct Opened {
  std::vector<char> bytes;
  Checkpoint checkpoint;

  explicit Opened(const FileBytes& file, int gptq_version = 0)
      : bytes(exact(file.bytes())),
        checkpoint({SafeTensors::parse(bytes.data(), bytes.size())}, {.gptq_version = gptq_version}) {}
  static std::vector<char> exact(const std::string& text) { return {text.begin(), text.end()}; }
};

// Storage with memory of exactly its size.
struct Storage {
  QuantizedMatrix matrix;
  std::vector<std::vector<std::uint8_t>> memory;

  explicit Storage(const StoredLayer& layer) : matrix(storage(layer.format, layer.rows, layer.columns)), memory(4) {
    TensorView* views[] = {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale};
    for (std::size_t i = 0; i < 4; ++i) {
      if (!views[i]->given()) continue;
      memory[i].assign(static_cast<std::size_t>(views[i]->elements()) * size_of(views[i]->dtype), 0xcd);
      views[i]->data = memory[i].data();
    }
  }
  template <class Value>
  Value at(int tensor, std::int64_t index) const {
    Value value;
    std::memcpy(&value, memory[static_cast<std::size_t>(tensor)].data() + index * sizeof value, sizeof value);
    return value;
  }
  unsigned code(std::int64_t n, std::int64_t k) const {
    return memory[0][static_cast<std::size_t>(n * (matrix.columns / 2) + k / 2)] >> (4 * (k % 2)) & 15u;
  }
};

inline Storage loaded(const Checkpoint& checkpoint, const std::string& name, const LoadOptions& options = {}) {
  Storage out(checkpoint.layer(name));
  checkpoint.load(name, out.matrix, options);
  return out;
}

}  // namespace heddle::lowbit::test
