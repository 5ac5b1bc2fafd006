// The textbook Transformer block for the tests: the layers of plain_layers.h over one sequence.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "heddle/transformer_block.h"
#include "kit/plain_layers.h"

namespace heddle::kit {

// As a block holds them. A bias that is not there is empty, and so is a norm's.
struct BlockValues {
  std::vector<float> qkv, out, up, down, qkv_bias, out_bias, up_bias, down_bias, norm1, norm2, norm1_bias, norm2_bias;
};

template <class T>
class PlainBlock {
 public:
  using Rows = ModelRows<T>;

  PlainBlock(const TransformerBlockOptions& options, const BlockValues& values, const PlainLayers<T>& how)
      : o_(options), v_(values), how_(how) {}

  Rows operator()(Rows x) const {
    if (o_.norm_first) {
      const Rows attended = attention(how_.linear(norm(x, v_.norm1, v_.norm1_bias), v_.qkv, v_.qkv_bias));
      x = how_.sum(x, how_.linear(attended, v_.out, v_.out_bias));
      return how_.sum(x, feed_forward(norm(x, v_.norm2, v_.norm2_bias)));
    }
    const Rows attended = how_.linear(attention(how_.linear(x, v_.qkv, v_.qkv_bias)), v_.out, v_.out_bias);
    x = norm(how_.sum(x, attended), v_.norm1, v_.norm1_bias);
    return norm(how_.sum(x, feed_forward(x)), v_.norm2, v_.norm2_bias);
  }

 private:
  Rows norm(const Rows& x, const std::vector<float>& weight, const std::vector<float>& bias) const {
    return how_.norm(x, weight, bias, o_.eps, o_.norm == Norm::layer_norm);
  }

  Rows feed_forward(const Rows& x) const {
    Rows wide = how_.linear(x, v_.up, v_.up_bias);
    for (auto& row : wide) {
      if (o_.activation == Activation::swiglu) {
        for (std::size_t j = 0; j < row.size() / 2; ++j) {
          row[j] = how_.round(how_.round(silu(row[2 * j])) * row[2 * j + 1]);
        }
        row.resize(row.size() / 2);
      } else {
        for (T& value : row) value = how_.round(activated(value));
      }
    }
    return how_.linear(wide, v_.down, v_.down_bias);
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

  // Rows of queries, keys and values to rows of context.
  Rows attention(const Rows& qkv) const {
    const std::int64_t size = o_.hidden / o_.heads, group = o_.heads / o_.kv_heads;
    Rows out(qkv.size(), std::vector<T>(static_cast<std::size_t>(o_.hidden)));
    for (std::int64_t h = 0; h < o_.heads; ++h) {
      const std::int64_t q = h * size, k = (o_.heads + h / group) * size, v = k + o_.kv_heads * size;
      const auto head = [&](std::int64_t at) {
        return typename PlainLayers<T>::Head{qkv, static_cast<std::size_t>(at), static_cast<std::size_t>(size)};
      };
      how_.attend(head(q), head(k), head(v), o_.causal != Causal::none, out, static_cast<std::size_t>(q));
    }
    return out;
  }

  const TransformerBlockOptions& o_;
  const BlockValues& v_;
  const PlainLayers<T> how_;
};

}  // namespace heddle::kit
