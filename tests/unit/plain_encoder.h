// The textbook encoder for the tests: the layers of kit/plain_layers.h over one sequence.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtypes.h"
#include "kit/plain_layers.h"
#include "unit/model_files.h"

namespace heddle::test {

template <class T>
class PlainEncoder {
 public:
  using Rows = kit::ModelRows<T>;

  // `weights`: the dtype that matrices and embeddings are held in.
  PlainEncoder(const ModelFolder& folder, DType weights, const kit::PlainLayers<T>& how)
      : folder_(folder), config_(folder.config), weights_(weights), how_(how) {}

  // The last layer's rows for one sequence.
  Rows operator()(const std::vector<std::int32_t>& ids) const {
    const std::int64_t h = config_.hidden;
    const std::vector<float> word = matrix("embeddings.word_embeddings.weight"),
                             position = matrix("embeddings.position_embeddings.weight"),
                             type = matrix("embeddings.token_type_embeddings.weight");
    Rows x(ids.size(), std::vector<T>(h));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      for (std::int64_t j = 0; j < h; ++j)
        x[i][j] = how_.round(T{word[ids[i] * h + j]} + position[i * h + j] + type[j]);
    }
    x = norm(x, "embeddings.LayerNorm");
    for (std::int64_t i = 0; i < config_.layers; ++i) {
      const std::string layer = "encoder.layer." + std::to_string(i) + ".";
      const std::string self = layer + "attention.self.";
      const Rows context = attention(linear(x, self + "query"), linear(x, self + "key"), linear(x, self + "value"));
      x = norm(how_.sum(x, linear(context, layer + "attention.output.dense")), layer + "attention.output.LayerNorm");
      Rows wide = linear(x, layer + "intermediate.dense");
      for (auto& row : wide) {
        for (T& value : row) value = how_.round(value / 2 * (1 + std::erf(value / std::sqrt(T{2}))));
      }
      x = norm(how_.sum(x, linear(wide, layer + "output.dense")), layer + "output.LayerNorm");
    }
    return x;
  }

 private:
  const std::vector<float>& vector(const std::string& name) const { return folder_.tensors.at(name).values; }
  std::vector<float> matrix(const std::string& name) const {
    std::vector<float> values = vector(name);
    if (weights_ == DType::bf16) {
      for (float& value : values) value = bf16_to_f32(f32_to_bf16(value));
    }
    return values;
  }

  Rows linear(const Rows& x, const std::string& name) const {
    return how_.linear(x, matrix(name + ".weight"), vector(name + ".bias"));
  }
  Rows norm(const Rows& x, const std::string& name) const {
    return how_.norm(x, vector(name + ".weight"), vector(name + ".bias"), config_.layer_norm_epsilon);
  }
  Rows attention(const Rows& q, const Rows& k, const Rows& v) const {
    const auto hidden = static_cast<std::size_t>(config_.hidden),
               size = hidden / static_cast<std::size_t>(config_.heads);
    Rows out(q.size(), std::vector<T>(hidden));
    for (std::size_t at = 0; at < hidden; at += size)
      how_.attend({q, at, size}, {k, at, size}, {v, at, size}, false, out, at);
    return out;
  }

  const ModelFolder& folder_;
  const EncoderConfig& config_;
  DType weights_;
  const kit::PlainLayers<T> how_;
};

}  // namespace heddle::test
