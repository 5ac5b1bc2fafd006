// Any bytes: a checkpoint refuses them with heddle::Error, or every matrix that it lists can be loaded into storage of
// exactly its size. The first byte says whether a safetensors file follows or bytes that bend one made here.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "bytes.h"
#include "heddle/checkpoint.h"
#include "heddle/error.h"

namespace {

using namespace heddle;
using fuzz::Bytes;
using namespace heddle::lowbit;

// A file of one layer in the layout that a byte chooses; a zero byte leaves a tensor as it should be.
class BentFile {
 public:
  explicit BentFile(Bytes bytes) : bytes_(bytes) {}

  std::string make() {
    const std::int64_t N = 8 * (1 + bytes_.below(3)), G = 1 + bytes_.below(4), K = 64 * G;
    switch (bytes_.below(8)) {
      case 0:
        tensor("l.blocks", "U8", {2, N, 2 * G, 16}, 1);
        tensor("l.scales", "U8", {2, N, 2 * G}, 1);
        break;
      case 1:
        tensor("l.weight", "U8", {N, K / 2}, 1);
        tensor("l.weight_scale", "F8_E4M3", {N, K / 16}, 1);
        tensor("l.weight_scale_2", "F32", {}, 4);
        break;
      case 2:
        tensor("l.weight_packed", "U8", {N, K / 2}, 1);
        tensor("l.weight_scale", "F8_E4M3", {N, K / 16}, 1);
        tensor("l.weight_global_scale", "F32", {1}, 4);
        break;
      case 3:
        tensor("l.weight_packed", "U8", {N, K / 2}, 1);
        tensor("l.weight_scale", "U8", {N, K / 32}, 1);
        break;
      case 4: {
        tensor("l.weight_packed", "I32", {N, K / 8}, 4);
        tensor("l.weight_scale", "F16", {N, G}, 2);
        std::string shape(16, '\0');
        shape[0] = static_cast<char>(N);
        shape[8] = static_cast<char>(K);
        shape[9] = static_cast<char>(K >> 8);
        write("l.weight_shape", "I64", {2}, shape);
        tensor("l.weight_zero_point", "I32", {N / 8, G}, 4);
        if (bytes_.rarely(2)) groups("l.weight_g_idx", K, G);
        break;
      }
      case 5: {
        const bool nested = bytes_.rarely(2);
        tensor("l.weight", "U8", {N * K / 2, 1}, 1);
        tensor("l.weight.absmax", nested ? "U8" : "F32", {N * G}, nested ? 1 : 4);
        std::string map;
        for (int code = 0; code < 16; ++code) {
          const float magnitudes[] = {0, 0.0625f / 12, 8.0f / 12, 1, 4.0f / 12, 0.5f, 2.0f / 12, 0.25f};
          const float value = code < 8 ? magnitudes[code] : -magnitudes[code - 8];
          map.append(reinterpret_cast<const char*>(&value), 4);
        }
        write("l.weight.quant_map", "F32", {16}, map);
        std::string state = R"({"quant_type":"fp4","blocksize":64,"shape":[)" + std::to_string(N) + "," +
                            std::to_string(K) + R"(],"nested_blocksize":3,"nested_offset":0.5})";
        for (std::int64_t bends = bytes_.rarely(4) ? bytes_.below(4) : 0; bends > 0; --bends) {
          state[static_cast<std::size_t>(bytes_.next()) % state.size()] = static_cast<char>(bytes_.next());
        }
        if (bytes_.rarely(8)) {  // once more, and deep
          const auto depth = static_cast<std::size_t>(1 + bytes_.below(256)) * 120;
          state.insert(state.size() - 1, R"(,"shape":)" + std::string(depth, '[') + std::string(depth, ']'));
        }
        write("l.weight.quant_state.bitsandbytes__fp4", "U8", {static_cast<std::int64_t>(state.size())}, state);
        if (nested) {
          tensor("l.weight.nested_quant_map", "F32", {256}, 4);
          tensor("l.weight.nested_absmax", "F32", {(N * G + 2) / 3}, 4);
        }
        break;
      }
      case 6:
        tensor("l.qweight", "I32", {K / 8, N}, 4);
        tensor("l.qzeros", "I32", {G, N / 8}, 4);
        tensor("l.scales", "F16", {G, N}, 2);
        if (bytes_.rarely(2)) groups("l.g_idx", K, G);
        break;
      default:
        tensor("l.qweight", "I32", {K, N / 8}, 4);
        tensor("l.qzeros", "I32", {G, N / 8}, 4);
        tensor("l.scales", "F16", {G, N}, 2);
        break;
    }
    header_ += "}";
    std::string out;
    for (int i = 0; i < 8; ++i) out += static_cast<char>(header_.size() >> (8 * i) & 0xff);
    return out + header_ + data_;
  }

 private:
  using Shape = std::vector<std::int64_t>;

  void tensor(const char* name, const char* dtype, Shape shape, std::size_t element) {
    if (bytes_.rarely(64)) return;
    if (bytes_.rarely(32)) shape.push_back(1 + bytes_.below(3));
    if (bytes_.rarely(32) && !shape.empty()) {
      shape[static_cast<std::size_t>(bytes_.below(static_cast<std::int64_t>(shape.size())))] += bytes_.below(9) - 4;
    }
    std::size_t size = element;
    for (std::int64_t& extent : shape) {
      if (extent < 0) extent = 0;
      size *= static_cast<std::size_t>(extent);
    }
    static constexpr const char* kOthers[] = {"F32", "I8", "BF16", "I64", "F8_E8M0", "U8", "F16", "I32"};
    if (bytes_.rarely(32)) dtype = kOthers[bytes_.below(8)];
    std::string content(size, '\0');
    const int salt = bytes_.next(), range = bytes_.rarely(8) ? 256 : 48;
    for (std::size_t i = 0; i < size; ++i) content[i] = static_cast<char>((static_cast<int>(i) * 37 + salt) % range);
    write(name, dtype, shape, content);
  }
  void groups(const char* name, std::int64_t K, std::int64_t G) {
    std::string content;
    const std::int64_t step = bytes_.below(4);
    for (std::int64_t k = 0; k < K; ++k) {
      auto group = static_cast<std::int32_t>(step == 0 ? k / (K / G) : k * step % G);
      if (k == 7 && bytes_.rarely(8)) group = static_cast<std::int8_t>(bytes_.next());
      content.append(reinterpret_cast<const char*>(&group), 4);
    }
    write(name, "I32", {K}, content);
  }
  void write(const std::string& name, const std::string& dtype, const Shape& shape, const std::string& content) {
    if (header_.size() > 1) header_ += ',';
    header_ += '"';
    header_ += name;
    header_ += R"(":{"dtype":")";
    header_ += dtype;
    header_ += R"(","shape":[)";
    for (std::size_t i = 0; i < shape.size(); ++i) {
      if (i > 0) header_ += ',';
      header_ += std::to_string(shape[i]);
    }
    header_ += R"(],"data_offsets":[)";
    header_ += std::to_string(data_.size());
    data_ += content;
    header_ += ',';
    header_ += std::to_string(data_.size());
    header_ += "]}";
  }

  Bytes bytes_;
  std::string header_ = "{", data_;
};

void load_all(const std::uint8_t* data, std::size_t size, int gptq_version) {
  const std::vector<std::uint8_t> exact(data, data + size);
  const Checkpoint checkpoint({SafeTensors::parse(exact.data(), exact.size())}, {.gptq_version = gptq_version});
  for (const StoredLayer& layer : checkpoint.layers()) {
    if (!layer.refusal.empty()) continue;
    QuantizedMatrix out = storage(layer.format, layer.rows, layer.columns);
    std::vector<std::unique_ptr<std::uint8_t[]>> blocks;
    for (TensorView* view : {&out.codes, &out.scales, &out.zeros, &out.global_scale}) {
      if (!view->given()) continue;
      blocks.push_back(std::make_unique<std::uint8_t[]>(storage_bytes({.codes = *view})));
      view->data = blocks.back().get();
    }
    if (storage_bytes(out) > 64 * size + 64) std::abort();  // a small file must not ask for much memory
    try {
      checkpoint.load(layer.name, out, {.expert = layer.experts > 0 ? layer.experts - 1 : 0, .reorder_columns = true});
    } catch (const Error&) {  // of scales and zero points
      continue;
    }
    for (std::int64_t i = 0; out.zeros.given() && i < out.zeros.elements(); ++i) {
      if (static_cast<const std::uint8_t*>(out.zeros.data)[i] > 15) std::abort();
    }
    std::vector<float> weights(static_cast<std::size_t>(layer.rows * layer.columns));
    dequantize(out, TensorView(weights.data(), DType::f32, {layer.rows, layer.columns}));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const int version = data[1] % 3;
  try {
    if (data[0] == 'f') {
      load_all(data + 2, size - 2, version);
    } else {
      const std::string file = BentFile(Bytes(data + 2, size - 2)).make();
      load_all(reinterpret_cast<const std::uint8_t*>(file.data()), file.size(), version);
    }
  } catch (const Error&) {
  }
  return 0;
}
