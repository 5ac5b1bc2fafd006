// The encoder's weights as held in memory, and their way there from a model folder.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "heddle/transformer.h"
#include "model/linear.h"
#include "model/row_ops.h"

namespace heddle {

// Kept in f32 whatever the encoder's dtype.
struct LayerNormWeights {
  std::vector<float> gamma, beta;  // [hidden]
  float epsilon = 0.0f;

  LayerNormRows rows() const { return {gamma.data(), beta.data(), epsilon, static_cast<std::int64_t>(gamma.size())}; }
};

struct EncoderLayer {
  Linear qkv;               // hidden -> 3 * hidden: queries, keys, values
  Linear attention_output;  // hidden -> hidden, f32 out
  LayerNormWeights attention_norm;
  Linear intermediate;  // hidden -> intermediate, f32 out
  Linear output;        // intermediate -> hidden, f32 out
  LayerNormWeights output_norm;
};

struct Encoder::Weights {
  EncoderConfig config;
  EncoderOptions options;
  std::vector<std::byte> word, position, token_type;  // [n, hidden] in options.dtype
  LayerNormWeights embedding_norm;
  std::vector<EncoderLayer> layers;
  std::size_t bytes = 0;

  static std::unique_ptr<Weights> load(const std::string& folder, const EncoderOptions& options);
};

}  // namespace heddle
