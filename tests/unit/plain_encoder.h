// The textbook encoder for the tests: one operation after the other, in the arithmetic of T, each result stored as
// `round` leaves it. With double and no rounding it is the reference; with float, the plain computation in f32 or bf16.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/dtypes.h"
#include "unit/model_files.h"

namespace heddle::test {

template <class T>
using Rows = std::vector<std::vector<T>>;

template <class T>
class PlainEncoder {
 public:
  // `weights`: the dtype that matrices and embeddings are held in.
  PlainEncoder(const ModelFolder& folder, DType weights, T (*round)(T))
      : folder_(folder), config_(folder.config), weights_(weights), round_(round) {}

  // The last layer's rows for one sequence.
  Rows<T> operator()(const std::vector<std::int32_t>& ids) const {
    const std::int64_t h = config_.hidden;
    const std::vector<float> word = matrix("embeddings.word_embeddings.weight"),
                             position = matrix("embeddings.position_embeddings.weight"),
                             type = matrix("embeddings.token_type_embeddings.weight");
    Rows<T> x(ids.size(), std::vector<T>(h));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      for (std::int64_t j = 0; j < h; ++j) x[i][j] = round_(T{word[ids[i] * h + j]} + position[i * h + j] + type[j]);
    }
    x = norm(x, "embeddings.LayerNorm");
    for (std::int64_t i = 0; i < config_.layers; ++i) {
      const std::string layer = "encoder.layer." + std::to_string(i) + ".";
      const std::string self = layer + "attention.self.";
      const Rows<T> context = attention(linear(x, self + "query"), linear(x, self + "key"), linear(x, self + "value"));
      x = norm(sum(x, linear(context, layer + "attention.output.dense")), layer + "attention.output.LayerNorm");
      Rows<T> wide = linear(x, layer + "intermediate.dense");
      for (auto& row : wide) {
        for (T& value : row) value = round_(value / 2 * (1 + std::erf(value / std::sqrt(T{2}))));
      }
      x = norm(sum(x, linear(wide, layer + "output.dense")), layer + "output.LayerNorm");
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

  Rows<T> linear(const Rows<T>& x, const std::string& name) const {
    const std::vector<float> weight = matrix(name + ".weight"), &bias = vector(name + ".bias");
    Rows<T> y(x.size(), std::vector<T>(bias.size()));
    for (std::size_t i = 0; i < x.size(); ++i) {
      for (std::size_t o = 0; o < bias.size(); ++o) {
        T dot = bias[o];
        for (std::size_t j = 0; j < x[i].size(); ++j) dot += x[i][j] * weight[o * x[i].size() + j];
        y[i][o] = round_(dot);
      }
    }
    return y;
  }

  Rows<T> sum(Rows<T> a, const Rows<T>& b) const {
    for (std::size_t i = 0; i < a.size(); ++i) {
      for (std::size_t j = 0; j < a[i].size(); ++j) a[i][j] = round_(a[i][j] + b[i][j]);
    }
    return a;
  }

  Rows<T> norm(Rows<T> x, const std::string& name) const {
    const std::vector<float>&gamma = vector(name + ".weight"), &beta = vector(name + ".bias");
    for (auto& row : x) {
      const T count = static_cast<T>(row.size());
      T mean = 0, variance = 0;
      for (const T value : row) mean += value;
      mean /= count;
      for (const T value : row) variance += (value - mean) * (value - mean);
      const T deviation = std::sqrt(variance / count + T{config_.layer_norm_epsilon});
      for (std::size_t j = 0; j < row.size(); ++j) row[j] = round_((row[j] - mean) / deviation * gamma[j] + beta[j]);
    }
    return x;
  }

  Rows<T> attention(const Rows<T>& q, const Rows<T>& k, const Rows<T>& v) const {
    const std::int64_t size = config_.hidden / config_.heads;
    Rows<T> out(q.size(), std::vector<T>(config_.hidden));
    for (std::int64_t begin = 0; begin < config_.hidden; begin += size) {
      for (std::size_t i = 0; i < q.size(); ++i) {
        std::vector<T> p(k.size());
        T largest = -std::numeric_limits<T>::infinity(), total = 0;
        for (std::size_t j = 0; j < k.size(); ++j) {
          for (std::int64_t d = begin; d < begin + size; ++d) p[j] += q[i][d] * k[j][d];
          p[j] = round_(p[j] / std::sqrt(static_cast<T>(size)));
          largest = std::max(largest, p[j]);
        }
        for (T& value : p) total += value = std::exp(value - largest);
        for (T& value : p) value = round_(value / total);
        for (std::int64_t d = begin; d < begin + size; ++d) {
          T dot = 0;
          for (std::size_t j = 0; j < k.size(); ++j) dot += p[j] * v[j][d];
          out[i][d] = round_(dot);
        }
      }
    }
    return out;
  }

  const ModelFolder& folder_;
  const EncoderConfig& config_;
  DType weights_;
  T (*round_)(T);
};

}  // namespace heddle::test
