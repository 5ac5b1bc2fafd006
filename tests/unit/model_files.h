// A random encoder written to a temporary folder as a Hugging Face model is, for the tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <unistd.h>
#include <nlohmann/json.hpp>

#include "core/dtypes.h"
#include "heddle/transformer.h"

namespace heddle::test {

struct ModelTensor {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};

class ModelFolder {
 public:
  EncoderConfig config;
  nlohmann::json json;
  std::map<std::string, ModelTensor> tensors;

  explicit ModelFolder(const EncoderConfig& config_in, std::uint32_t seed = 1) : config(config_in), random_(seed) {
    path_ = std::filesystem::temp_directory_path() /
            ("heddle_encoder_" + std::to_string(getpid()) + "_" + std::to_string(count_++));
    std::filesystem::create_directory(path_);
    json = {{"model_type", "bert"},
            {"hidden_act", "gelu"},
            {"hidden_size", config.hidden},
            {"num_hidden_layers", config.layers},
            {"num_attention_heads", config.heads},
            {"intermediate_size", config.intermediate},
            {"vocab_size", config.vocabulary},
            {"max_position_embeddings", config.positions},
            {"type_vocab_size", config.token_types},
            {"layer_norm_eps", config.layer_norm_epsilon}};
    const std::int64_t h = config.hidden;
    add("embeddings.word_embeddings.weight", {config.vocabulary, h}, 0, 1);
    add("embeddings.position_embeddings.weight", {config.positions, h}, 0, 0.5f);
    add("embeddings.token_type_embeddings.weight", {config.token_types, h}, 0, 0.5f);
    add_norm("embeddings.LayerNorm");
    for (std::int64_t i = 0; i < config.layers; ++i) {
      const std::string layer = "encoder.layer." + std::to_string(i) + ".";
      for (const char* part : {"query", "key", "value"}) add_linear(layer + "attention.self." + part, h, h);
      add_linear(layer + "attention.output.dense", h, h);
      add_norm(layer + "attention.output.LayerNorm");
      add_linear(layer + "intermediate.dense", config.intermediate, h);
      add_linear(layer + "output.dense", h, config.intermediate);
      add_norm(layer + "output.LayerNorm");
    }
  }
  ~ModelFolder() { std::filesystem::remove_all(path_); }
  ModelFolder(const ModelFolder&) = delete;
  ModelFolder& operator=(const ModelFolder&) = delete;

  std::string path() const { return path_.string(); }

  // Writes both files, the weights as "F32", "F16" or "BF16", under names with `prefix`.
  void write(const std::string& dtype = "F32", const std::string& prefix = "") const {
    nlohmann::json header = {{"__metadata__", {{"format", "pt"}}}};
    std::string data;
    for (const auto& [name, tensor] : tensors) {
      const std::size_t begin = data.size();
      for (const float value : tensor.values) append(data, dtype, value);
      header[prefix + name] = {{"dtype", dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const std::uint64_t length = text.size();
    std::ofstream file(path_ / "model.safetensors", std::ios::binary);
    for (int i = 0; i < 8; ++i) file.put(static_cast<char>(length >> (8 * i)));
    file << text << data;
    std::ofstream(path_ / "config.json") << json.dump();
  }

 private:
  void add(const std::string& name, std::vector<std::int64_t> shape, float mean, float deviation) {
    std::normal_distribution<float> normal(mean, deviation);
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    ModelTensor tensor{std::move(shape), std::vector<float>(static_cast<std::size_t>(count))};
    for (float& value : tensor.values) value = normal(random_);
    tensors[name] = std::move(tensor);
  }
  void add_norm(const std::string& name) {
    add(name + ".weight", {config.hidden}, 1, 0.2f);
    add(name + ".bias", {config.hidden}, 0, 0.2f);
  }
  void add_linear(const std::string& name, std::int64_t out, std::int64_t in) {
    add(name + ".weight", {out, in}, 0, 1.5f / std::sqrt(static_cast<float>(in)));
    add(name + ".bias", {out}, 0, 0.2f);
  }
  static void append(std::string& data, const std::string& dtype, float value) {
    if (dtype == "F32") {
      data.append(reinterpret_cast<const char*>(&value), 4);
    } else {
      const std::uint16_t bits = dtype == "F16" ? f32_to_f16(value) : f32_to_bf16(value);
      data.append(reinterpret_cast<const char*>(&bits), 2);
    }
  }

  static inline int count_ = 0;
  std::mt19937 random_;
  std::filesystem::path path_;
};

}  // namespace heddle::test
