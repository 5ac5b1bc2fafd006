// The layers of textbook models for the tests, in the arithmetic of T: in double the reference, in float the plain
// computation, whose results are rounded to its dtype and whose sums are in one of the orders of ordered_sums.h. As in
// yardstick.h, forward and lanes are unfused, P = softmax and then P V, the others fused, P V before the division; in
// f32, backward and lanes multiply q with the scale, not scores. Scores, the softmax and norms stay in T.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "core/dtypes.h"
#include "kit/host_tensor.h"
#include "kit/ordered_sums.h"

namespace heddle::kit {

template <class T>
using ModelRows = std::vector<std::vector<T>>;

template <class T>
class PlainLayers {
 public:
  using Row = std::vector<T>;
  using Rows = ModelRows<T>;

  // Double: no dtype rounds, no order counts.
  PlainLayers() = default;
  PlainLayers(DType dtype, Order order) : dtype_(dtype), order_(order) {}

  // [rows, K] times the transpose of weight, [N, K], plus a bias, which may be empty.
  Rows linear(const Rows& x, const std::vector<float>& weight, const std::vector<float>& bias) const {
    Rows y(x.size());
    if (x.empty()) return y;
    const std::size_t K = x[0].size(), N = weight.size() / K;
    Row columns(weight.size());
    for (std::size_t i = 0; i < weight.size(); ++i) columns[i % K * N + i / K] = weight[i];
    for (std::size_t i = 0; i < x.size(); ++i) {
      y[i] = product(x[i], columns, N);
      for (std::size_t n = 0; n < N; ++n) y[i][n] = round(y[i][n] + (bias.empty() ? T{0} : T{bias[n]}));
    }
    return y;
  }

  // Of a LayerNorm, or of an RMSNorm if it is not centred. A bias may be empty.
  Rows norm(Rows x, const std::vector<float>& weight, const std::vector<float>& bias, float eps,
            bool centred = true) const {
    for (Row& row : x) {
      const T count = static_cast<T>(row.size()), mean = centred ? kit::sum(order_, row) / count : T{0};
      Row squares;
      for (const T value : row) squares.push_back((value - mean) * (value - mean));
      const T deviation = std::sqrt(kit::sum(order_, squares) / count + T{eps});
      for (std::size_t j = 0; j < row.size(); ++j) {
        row[j] = round((row[j] - mean) / deviation * T{weight[j]} + (bias.empty() ? T{0} : T{bias[j]}));
      }
    }
    return x;
  }

  Rows sum(Rows a, const Rows& b) const {
    for (std::size_t i = 0; i < a.size(); ++i) {
      for (std::size_t j = 0; j < a[i].size(); ++j) a[i][j] = round(a[i][j] + b[i][j]);
    }
    return a;
  }

  // Columns [at, at + size) of the rows of one head's operand.
  struct Head {
    const Rows& rows;
    std::size_t at, size;
  };
  // One head, into columns [out_at, out_at + v.size) of `out`, which stay what they are where there are no keys.
  void attend(const Head& q, const Head& k, const Head& v, bool causal, Rows& out, std::size_t out_at) const {
    const std::size_t length = k.rows.size();
    if (length == 0) return;
    const bool fused = order_ == Order::backward || order_ == Order::blocks;
    const bool scales_q = dtype_ == DType::f32 && (order_ == Order::backward || order_ == Order::lanes);
    const T scale = 1 / std::sqrt(static_cast<T>(q.size));
    Row keys(k.size * length), values(length * v.size);
    for (std::size_t j = 0; j < length; ++j) {
      for (std::size_t d = 0; d < k.size; ++d) keys[d * length + j] = k.rows[j][k.at + d];
      for (std::size_t d = 0; d < v.size; ++d) values[j * v.size + d] = v.rows[j][v.at + d];
    }
    for (std::size_t i = 0; i < q.rows.size(); ++i) {
      const auto from = q.rows[i].begin() + static_cast<std::ptrdiff_t>(q.at);
      Row query(from, from + static_cast<std::ptrdiff_t>(q.size));
      for (T& x : query) x *= scales_q ? scale : T{1};
      Row p = product(query, keys, length);
      p.resize(causal ? i + 1 : length);
      for (T& x : p) x *= scales_q ? T{1} : scale;
      const T largest = *std::max_element(p.begin(), p.end());
      for (T& x : p) x = std::exp(x - largest);
      const T total = kit::sum(order_, p);
      for (T& x : p) x = round(fused ? x : x / total);
      const Row o = product(p, values, v.size);
      for (std::size_t d = 0; d < v.size; ++d) out[i][out_at + d] = round(fused ? o[d] / total : o[d]);
    }
  }

  // The mean of rows, none of which makes 0; of unit length if asked for. In f32.
  Row mean(const Rows& rows, std::size_t width, bool normalize) const {
    Row out(width), column(rows.size()), squares;
    for (std::size_t j = 0; j < width && !rows.empty(); ++j) {
      for (std::size_t i = 0; i < rows.size(); ++i) column[i] = rows[i][j];
      out[j] = kit::sum(order_, column) / static_cast<T>(rows.size());
      squares.push_back(out[j] * out[j]);
    }
    if (!normalize || rows.empty()) return out;
    const T length = std::sqrt(kit::sum(order_, squares));
    for (T& x : out) x /= length;
    return out;
  }

  T round(T x) const { return std::is_same_v<T, double> ? x : static_cast<T>(rounded(x, dtype_)); }

 private:
  Summation products() const {
    if (dtype_ != DType::f32 && order_ == Order::blocks) return {order_, 24, 16};
    Summation out{order_};
    out.fma = dtype_ == DType::f32;
    return out;
  }
  // x times columns, [x.size() or more, N].
  Row product(const Row& x, const Row& columns, std::size_t N) const {
    Row y(N);
    sum_products(products(), static_cast<std::int64_t>(x.size()), x.data(), 1, columns.data(),
                 static_cast<std::int64_t>(N), static_cast<std::int64_t>(N), y.data());
    return y;
  }

  DType dtype_ = DType::f32;
  Order order_ = Order::forward;
};

}  // namespace heddle::kit
