// A small model in a folder, to be quantised.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include <unistd.h>

#include "heddle/checkpoint.h"
#include "unit/checkpoint_files.h"

namespace heddle::lowbit::test {

inline constexpr std::int64_t kRows = 20, kColumns = 256;
inline constexpr const char* kUp = "model.layers.0.mlp.up_proj";

inline std::vector<float> normal(std::int64_t count, unsigned seed, float deviation = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw(0, deviation);
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& value : out) value = draw(random);
  return out;
}

// A folder that is removed, with a model in it.
class Folder {
 public:
  std::filesystem::path path;

  Folder()
      : path(std::filesystem::temp_directory_path() /
             ("heddle_quantize_" + std::to_string(getpid()) + "_" + std::to_string(count_++))) {
    std::filesystem::create_directory(path);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string at(const std::string& name) const { return (path / name).string(); }
  void write(const std::string& name, const std::string& content) const {
    std::filesystem::create_directories(std::filesystem::path(at(name)).parent_path());
    std::ofstream(at(name), std::ios::binary) << content;
  }
  std::string read(const std::string& name) const {
    std::ifstream in(at(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& entry : std::filesystem::directory_iterator(path)) out.push_back(entry.path().filename().string());
    std::sort(out.begin(), out.end());
    return out;
  }

 private:
  static inline int count_ = 0;
};

inline FileBytes& add(FileBytes& file, const std::string& layer, std::int64_t rows, std::int64_t columns, unsigned seed,
                      float deviation = 1) {
  return file.add(layer + ".weight", "F32", {rows, columns}, normal(rows * columns, seed, deviation));
}

// A layer's matrices, an embedding, a norm and an output layer.
inline FileBytes model() {
  FileBytes file;
  unsigned seed = 1;
  for (const char* part : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                           "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}) {
    add(file, std::string("model.layers.0.") + part, kRows, kColumns, seed, static_cast<float>(seed));
    ++seed;
  }
  add(file, "model.embed_tokens", 50, kColumns, 90);
  add(file, "lm_head", 50, kColumns, 91);
  file.add("model.layers.0.input_layernorm.weight", "F32", {kColumns}, normal(kColumns, 92));
  file.add("model.layers.0.self_attn.q_proj.bias", "F32", {kRows}, normal(kRows, 93));
  return file;
}

inline QuantizeCheckpointOptions with(const std::string& format, std::vector<LayerRule> layers = {}) {
  QuantizeCheckpointOptions options;
  options.format = format;
  options.layers = std::move(layers);
  return options;
}

}  // namespace heddle::lowbit::test
