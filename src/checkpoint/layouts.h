// Layers of checkpoints, recognised and checked: which tensors, in which order of bits. Loading follows the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "heddle/checkpoint.h"

namespace heddle::lowbit {

// Value `index` at `data`, which may have any alignment.
template <class Value>
Value value_at(const std::byte* data, std::int64_t index) {
  Value value;
  std::memcpy(&value, data + index * static_cast<std::int64_t>(sizeof value), sizeof value);
  return value;
}

// A tensor of a checkpoint; data may have any alignment.
struct FoundTensor {
  const SafeTensors::Entry* entry = nullptr;
  std::string where;  // for messages: the file and the tensor's name

  const std::byte* bytes() const { return static_cast<const std::byte*>(entry->data); }
};

// Of a tensor's name; entry is null if no file has it.
using FindTensor = std::function<FoundTensor(const std::string& name)>;

enum class CodeOrder : std::uint8_t {
  plain,       // as in storage
  words_int8,  // int32 [N, ceil(K/4)], byte i of a word is column 4w + i, plus 128
  high_first,  // bytes with halves exchanged
  gptq,        // int32 [K/8, N], nibble i of a word is column 8w + i
  awq,         // int32 [K, N/8], nibbles of a word are rows, in awq's order
};

enum class ScaleSource : std::uint8_t { f32, f16, bf16, e4m3, e8m0, nested };

enum class ZeroOrder : std::uint8_t {
  none,
  gptq,                // int32 [G, N/8]
  awq,                 // the same with awq's order of nibbles
  compressed_tensors,  // int32 [ceil(N/8), G]
};

// Absmax of bitsandbytes that was quantised itself: map[code] * absmax[i / block] + offset.
struct NestedAbsmax {
  const std::byte* map = nullptr;     // f32 [256]
  const std::byte* absmax = nullptr;  // f32
  std::int64_t block = 1;
  float offset = 0;
};

// Where everything of a layer lies. Extents are checked against the tensors' sizes.
struct LayerSource {
  StoredLayer layer;
  FoundTensor codes, scales, zeros;
  CodeOrder code_order = CodeOrder::plain;
  ScaleSource scale_source = ScaleSource::f32;
  bool scales_transposed = false;  // [G, N]
  std::int64_t file_groups = 1;    // scales of a row in the file, G
  std::int64_t repeat = 1;         // groups of the storage that share one of the file's
  ZeroOrder zero_order = ZeroOrder::none;
  int zero_added = 0;  // to what is stored
  float global_scale = 1;
  NestedAbsmax nested;
};

// Names of the layers that a checkpoint's tensor belongs to: none or one.
std::string layer_of_tensor(const std::string& tensor, const FindTensor& find);

// Throws Error for what is not there or cannot be loaded. On the way `out` is filled as far as it is known.
void describe_layer(const std::string& name, const FindTensor& find, int gptq_version, LayerSource* out);

// `out` was checked to be storage of the layer. Throws Error before anything is written.
void load_layer(const LayerSource& source, std::int64_t expert, const QuantizedMatrix& out, Executor& executor);

}  // namespace heddle::lowbit
