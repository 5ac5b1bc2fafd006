// The textbook Transformer block for the tests: one operation after the other over one sequence, in the arithmetic of
// T, each result stored as `round` leaves it. With double and no rounding it is the reference; with float, the plain
// computation in f32 or bf16.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "heddle/transformer_block.h"

namespace heddle::kit {

// As a block holds them. A bias that is not there is empty, and so is a norm's.
struct BlockValues {
  std::vector<float> qkv, out, up, down, qkv_bias, out_bias, up_bias, down_bias, norm1, norm2, norm1_bias, norm2_bias;
};

template <class T>
class PlainBlock {
 public:
  using Rows = std::vector<std::vector<T>>;

  PlainBlock(const TransformerBlockOptions& options, const BlockValues& values, T (*round)(T))
      : o_(options), v_(values), round_(round) {}

  Rows operator()(Rows x) const {
    if (o_.norm_first) {
      x = sum(x, linear(attention(linear(norm(x, v_.norm1, v_.norm1_bias), v_.qkv, v_.qkv_bias)), v_.out, v_.out_bias));
      return sum(x, feed_forward(norm(x, v_.norm2, v_.norm2_bias)));
    }
    const Rows attended = linear(attention(linear(x, v_.qkv, v_.qkv_bias)), v_.out, v_.out_bias);
    x = norm(sum(x, attended), v_.norm1, v_.norm1_bias);
    return norm(sum(x, feed_forward(x)), v_.norm2, v_.norm2_bias);
  }

 private:
  Rows linear(const Rows& x, const std::vector<float>& weight, const std::vector<float>& bias) const {
    Rows y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t K = x[i].size(), N = weight.size() / K;
      for (std::size_t n = 0; n < N; ++n) {
        T dot = bias.empty() ? T{0} : T{bias[n]};
        for (std::size_t k = 0; k < K; ++k) dot += x[i][k] * T{weight[n * K + k]};
        y[i].push_back(round_(dot));
      }
    }
    return y;
  }

  Rows feed_forward(const Rows& x) const {
    Rows wide = linear(x, v_.up, v_.up_bias);
    for (auto& row : wide) {
      if (o_.activation == Activation::swiglu) {
        for (std::size_t j = 0; j < row.size() / 2; ++j) row[j] = round_(round_(silu(row[2 * j])) * row[2 * j + 1]);
        row.resize(row.size() / 2);
      } else {
        for (T& value : row) value = round_(activated(value));
      }
    }
    return linear(wide, v_.down, v_.down_bias);
  }

  static T silu(T x) { return x / (1 + std::exp(-x)); }
  T activated(T x) const {
    switch (o_.activation) {
      case Activation::relu:
        return x < 0 ? T{0} : x;
      case Activation::gelu_erf:
        return x / 2 * (1 + std::erf(x / std::sqrt(T{2})));
      case Activation::gelu_tanh:
        return x / 2 *
               (1 + std::tanh(std::sqrt(static_cast<T>(2 / M_PI)) * (x + static_cast<T>(0.044715) * x * x * x)));
      default:
        return silu(x);
    }
  }

  Rows sum(Rows a, const Rows& b) const {
    for (std::size_t i = 0; i < a.size(); ++i) {
      for (std::size_t j = 0; j < a[i].size(); ++j) a[i][j] = round_(a[i][j] + b[i][j]);
    }
    return a;
  }

  Rows norm(Rows x, const std::vector<float>& weight, const std::vector<float>& bias) const {
    for (auto& row : x) {
      const T count = static_cast<T>(row.size());
      T mean = 0, squares = 0;
      if (o_.norm == Norm::layer_norm) {
        for (const T value : row) mean += value;
        mean /= count;
      }
      for (const T value : row) squares += (value - mean) * (value - mean);
      const T deviation = std::sqrt(squares / count + T{o_.eps});
      for (std::size_t j = 0; j < row.size(); ++j) {
        row[j] = round_((row[j] - mean) / deviation * T{weight[j]} + (bias.empty() ? T{0} : T{bias[j]}));
      }
    }
    return x;
  }

  // Rows of queries, keys and values to rows of context.
  Rows attention(const Rows& qkv) const {
    const std::int64_t size = o_.hidden / o_.heads, group = o_.heads / o_.kv_heads;
    Rows out(qkv.size(), std::vector<T>(static_cast<std::size_t>(o_.hidden)));
    for (std::int64_t h = 0; h < o_.heads; ++h) {
      const std::int64_t q = h * size, k = (o_.heads + h / group) * size, v = k + o_.kv_heads * size;
      for (std::size_t i = 0; i < qkv.size(); ++i) {
        const std::size_t keys = o_.causal == Causal::none ? qkv.size() : i + 1;
        std::vector<T> p(keys);
        T largest = -std::numeric_limits<T>::infinity(), total = 0;
        for (std::size_t j = 0; j < keys; ++j) {
          for (std::int64_t d = 0; d < size; ++d) p[j] += at(qkv[i], q + d) * at(qkv[j], k + d);
          p[j] = round_(p[j] / std::sqrt(static_cast<T>(size)));
          largest = p[j] > largest ? p[j] : largest;
        }
        for (T& value : p) total += value = std::exp(value - largest);
        for (T& value : p) value = round_(value / total);
        for (std::int64_t d = 0; d < size; ++d) {
          T dot = 0;
          for (std::size_t j = 0; j < keys; ++j) dot += p[j] * at(qkv[j], v + d);
          out[i][static_cast<std::size_t>(q + d)] = round_(dot);
        }
      }
    }
    return out;
  }

  static T at(const std::vector<T>& row, std::int64_t index) { return row[static_cast<std::size_t>(index)]; }

  const TransformerBlockOptions& o_;
  const BlockValues& v_;
  T (*round_)(T);
};

}  // namespace heddle::kit
