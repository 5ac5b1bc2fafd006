// The encoder's weights as held in memory, and their way there from a model folder.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "cpu/row_ops.h"
#include "heddle/transformer.h"
#include "model/encoder_projections.h"
#include "model/layer_formats.h"
#include "model/transformer_linear.h"
#include "model/weight_memory.h"

namespace heddle {

// Kept in f32 whatever the encoder's dtype.
struct LayerNormWeights {
  WeightMemory gamma, beta;  // [hidden]
  float epsilon = 0.0f;

  LayerNormRows rows() const {
    return {reinterpret_cast<const float*>(gamma.data()), reinterpret_cast<const float*>(beta.data()), epsilon,
            static_cast<std::int64_t>(gamma.size() / sizeof(float))};
  }
};

struct EncoderLayer {
  EncoderProjections qkv;              // hidden -> 3 * hidden: queries, keys, values
  TransformerLinear attention_output;  // hidden -> hidden
  LayerNormWeights attention_norm;
  TransformerLinear intermediate;  // hidden -> intermediate
  TransformerLinear output;        // intermediate -> hidden
  LayerNormWeights output_norm;

  bool same_formats(const EncoderLayer& other) const {
    for (int part = 0; part < 3; ++part) {
      if (qkv.format(part) != other.qkv.format(part)) return false;
    }
    return attention_output.format() == other.attention_output.format() &&
           intermediate.format() == other.intermediate.format() && output.format() == other.output.format();
  }
};

struct Encoder::Weights {
  EncoderConfig config;
  EncoderOptions options;
  WeightMemory word, position, token_type;  // [n, hidden] in options.dtype
  LayerNormWeights embedding_norm;
  std::vector<EncoderLayer> layers;
  std::size_t other_bytes = 0;  // of embeddings and norms
  int gpu = -1;                 // that all of them are on; -1: on the CPU

  std::size_t bytes() const;
  static std::unique_ptr<Weights> load(const std::string& folder, const EncoderOptions& options);
};

// Makes the linear layers of a model's file.
class EncoderLayers {
 public:
  EncoderLayers(const std::string& path, const EncoderConfig& config, const EncoderOptions& options);
  ~EncoderLayers();

  // Of layer i, as the options' rules say.
  EncoderProjections projections(std::int64_t i);
  TransformerLinear attention_output(std::int64_t i);
  TransformerLinear intermediate(std::int64_t i);
  TransformerLinear output(std::int64_t i);
  // For the layers made from now on.
  void set_rules(std::vector<lowbit::LayerRule> rules);
  // Throws Error for a rule that no layer has matched.
  void require_all_matched() const;

  // "encoder.layer.3."
  static std::string prefix(std::int64_t i);
  static constexpr const char* kProjections[] = {"attention.self.query", "attention.self.key", "attention.self.value"};
  static constexpr const char* kAttentionOutput = "attention.output.dense";
  static constexpr const char* kIntermediate = "intermediate.dense";
  static constexpr const char* kOutput = "output.dense";

  class File;
  const File& file() const { return *file_; }

 private:
  TransformerLinear make(const std::string& name, std::int64_t out, std::int64_t in, LinearRole role);

  const EncoderConfig& config_;
  DType dtype_;
  Device device_;
  std::unique_ptr<File> file_;
  LayerFormats formats_;
};

}  // namespace heddle
