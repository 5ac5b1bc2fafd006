// A layer of adaptive sparse attention from its definition (docs/asam.md), pair by pair, in the arithmetic of T: with
// double it is the reference, with float the plain computation, which sums in one of the orders of ordered_sums.h and
// divides P before or after P V as plain_layers.h does.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "heddle/asam.h"
#include "kit/ordered_sums.h"

namespace heddle::kit {

struct AsamTensor {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};
using AsamTensors = std::map<std::string, AsamTensor>;

// x [B, T, dim].
struct AsamInput {
  std::int64_t batch = 0, length = 0, dim = 0;
  std::vector<float> x;
  std::vector<std::int32_t> lengths;  // or empty
};

struct AsamResult {
  std::vector<double> y, gate_values, confidence, pattern_logits, patterns;
  double sparse_ratio = 0;
};

template <class T>
class PlainAsam {
 public:
  PlainAsam(const AsamConfig& config, const AsamTensors& weights, Order order = Order::forward)
      : c_(config), sums_{.order = order, .fma = true} {
    for (const auto& [name, tensor] : weights) {
      w_[name].assign(tensor.values.begin(), tensor.values.end());
      if (tensor.shape.size() == 2) columns_[name] = transposed(w_[name], static_cast<std::size_t>(tensor.shape[1]));
    }
  }

  AsamResult operator()(const AsamInput& input) const { return of(input, {input.x.begin(), input.x.end()}); }
  // Of other rows than the input's, as another layer leaves them.
  AsamResult of(const AsamInput& input, const std::vector<double>& rows) const {
    AsamResult out;
    double attended = 0, all = 0;
    for (std::int64_t b = 0; b < input.batch; ++b) {
      Rows x(static_cast<std::size_t>(input.length));
      for (std::size_t t = 0; t < x.size(); ++t) {
        const auto from = rows.begin() + (b * input.length + static_cast<std::int64_t>(t)) * input.dim;
        x[t].assign(from, from + input.dim);
      }
      Sequence s(*this, x, input.lengths.empty() ? input.length : input.lengths[static_cast<std::size_t>(b)]);
      for (const Row& row : s.y) out.y.insert(out.y.end(), row.begin(), row.end());
      attended += s.attended;
      all += s.all;
      tell(s, out);
    }
    out.sparse_ratio = attended / all;
    return out;
  }

  // Rows behind a norm of that name.
  std::vector<double> normed(const std::string& name, const std::vector<double>& rows) const {
    std::vector<double> out;
    for (auto from = rows.begin(); from != rows.end(); from += c_.dim) {
      const Row row = norm(name, Row(from, from + c_.dim));
      out.insert(out.end(), row.begin(), row.end());
    }
    return out;
  }

 private:
  using Row = std::vector<T>;
  using Rows = std::vector<Row>;
  struct Scores {
    Row logits, confidence, patterns;
  };

  const Row& values(const std::string& name) const { return w_.at(name); }
  static Row transposed(const Row& rows, std::size_t width) {
    Row out(rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) out[i % width * (rows.size() / width) + i / width] = rows[i];
    return out;
  }
  // x times columns, [x.size(), N].
  Row product(const Row& x, const Row& columns) const {
    Row y(columns.size() / x.size());
    const auto width = static_cast<std::int64_t>(y.size());
    sum_products(sums_, static_cast<std::int64_t>(x.size()), x.data(), 1, columns.data(), width, width, y.data());
    return y;
  }
  T total(const Row& values) const { return sum(sums_.order, values); }

  Row linear(const std::string& name, const Row& x, bool bias = true) const {
    Row y = product(x, columns_.at(name + ".weight"));
    for (std::size_t n = 0; bias && n < y.size(); ++n) y[n] += values(name + ".bias")[n];
    return y;
  }
  Row norm(const std::string& name, Row x) const {
    const Row &weight = values(name + ".weight"), &bias = values(name + ".bias");
    const T count = static_cast<T>(x.size()), mean = total(x) / count;
    Row squares;
    for (const T value : x) squares.push_back((value - mean) * (value - mean));
    const T deviation = std::sqrt(total(squares) / count + static_cast<T>(1e-5));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = (x[i] - mean) / deviation * weight[i] + bias[i];
    return x;
  }
  static Row gelu(Row x) {
    for (T& value : x) value = value / 2 * (1 + std::erf(value / std::sqrt(T{2})));
    return x;
  }
  static Row relu(Row x) {
    for (T& value : x) value = std::max(value, T{0});
    return x;
  }
  static T sigmoid(T x) { return 1 / (1 + std::exp(-x)); }
  T dot(const Row& a, const Row& b) const { return product(a, b)[0]; }
  Row mean_of(const Rows& x, std::int64_t begin, std::int64_t end) const {
    if (begin >= end) return Row(x[0].size());  // of a tile of rows that are not used, which has no keys
    Row mean, column(static_cast<std::size_t>(end - begin));
    for (std::size_t d = 0; d < x[0].size(); ++d) {
      for (std::int64_t t = begin; t < end; ++t) {
        column[static_cast<std::size_t>(t - begin)] = x[static_cast<std::size_t>(t)][d];
      }
      mean.push_back(total(column) / static_cast<T>(end - begin));
    }
    return mean;
  }
  void softmax(Row& x) const {
    const T largest = *std::max_element(x.begin(), x.end());
    for (T& value : x) value = std::exp(value - largest);
    const T all = total(x);
    for (T& value : x) value /= all;
  }

  // Of the rows x[:end], which are averaged over dim, dim / 2, dim / 4 and dim / 8 bins.
  Scores gate(const Rows& x, std::int64_t end) const {
    const std::string name = "adaptive_attn.gate.";
    const Row mean = mean_of(x, 0, end);
    Rows bins;
    for (int i = 0; i < 4; ++i) {
      const std::int64_t size = std::max<std::int64_t>(1, c_.dim >> i);
      for (std::int64_t p = 0; p < size; ++p) {
        bins.push_back(mean_of(x, p * end / size, ((p + 1) * end + size - 1) / size));
      }
    }
    Row weights, pooled;
    for (const Row& bin : bins) weights.push_back(dot(bin, mean));
    softmax(weights);
    for (std::size_t i = 0; i < bins.size(); ++i) pooled.push_back(total(bins[i]) * weights[i]);
    const Row features = gelu(norm(name + "feature_proj.1", linear(name + "feature_proj.0", pooled)));
    const auto network = [&](const std::string& which) {
      return linear(name + which + ".2", relu(linear(name + which + ".0", features)));
    };
    Scores out{network("complexity_estimator"), network("confidence_predictor"), network("pattern_selector")};
    const Row& threshold = values(name + "sparse_threshold");
    const T temperature = std::max(std::abs(values(name + "gate_temp")[0]), static_cast<T>(1e-6));
    for (std::size_t h = 0; h < threshold.size(); ++h) {
      out.confidence[h] = sigmoid(out.confidence[h]);
      out.logits[h] = (threshold[h] - out.logits[h]) * out.confidence[h] / temperature;
    }
    return out;
  }

  // One sequence's way through the layer.
  struct Sequence {
    const PlainAsam& layer;
    const AsamConfig& c;
    const std::int64_t length, used, tiles;
    std::vector<Scores> scores;                            // of each tile of rows
    std::vector<std::vector<int>> patterns;                // [tiles][heads]
    std::vector<std::vector<std::vector<char>>> selected;  // [tiles][heads][tiles]: the pattern's tiles
    std::vector<Rows> q, k, v;                             // [heads][T][D]
    std::vector<Row> keys, values;                         // k as [heads][D * T], v as [heads][T * D]
    Rows y;
    double attended = 0, all = 0;

    Sequence(const PlainAsam& of, const Rows& x, std::int64_t in_use)
        : layer(of),
          c(of.c_),
          length(static_cast<std::int64_t>(x.size())),
          used(in_use),
          tiles((length + c.block_size - 1) / c.block_size) {
      const std::string name = c.use_adaptive_gate ? "adaptive_attn." : "";
      Rows normed;
      for (const Row& row : x) normed.push_back(layer.norm("norm", row));
      project(name, normed);
      choose(normed);
      select();
      for (std::int64_t t = 0; t < length; ++t) {
        const auto at = static_cast<std::size_t>(t);
        Row row = x[at], context;
        for (std::int64_t h = 0; h < c.num_heads; ++h) {
          const Row o = attend(h, t);
          context.insert(context.end(), o.begin(), o.end());
        }
        add(row, layer.linear(name + "to_out.0", context));
        add(row, layer.linear("ffn.3", gelu(layer.linear("ffn.0", layer.norm("ffn_norm", row)))));
        y.push_back(row);
      }
    }

    static void add(Row& to, const Row& row) {
      for (std::size_t i = 0; i < to.size(); ++i) to[i] += row[i];
    }

    void project(const std::string& name, const Rows& normed) {
      const std::int64_t heads = c.num_heads, size = c.dim_head;
      for (std::vector<Rows>* part : {&q, &k, &v}) part->resize(static_cast<std::size_t>(heads));
      for (const Row& row : normed) {
        const Row all_of_it = layer.linear(name + "to_qkv", row, false);
        for (std::int64_t h = 0; h < heads; ++h) {
          int part = 0;
          for (std::vector<Rows>* of : {&q, &k, &v}) {
            const auto from = all_of_it.begin() + (part++ * heads + h) * size;
            (*of)[static_cast<std::size_t>(h)].emplace_back(from, from + size);
          }
        }
      }
      for (std::size_t h = 0; h < k.size(); ++h) {
        Row rows;
        for (const Row& row : k[h]) rows.insert(rows.end(), row.begin(), row.end());
        keys.push_back(transposed(rows, static_cast<std::size_t>(size)));
        values.emplace_back();
        for (const Row& row : v[h]) values.back().insert(values.back().end(), row.begin(), row.end());
      }
    }

    void choose(const Rows& normed) {
      for (std::int64_t n = 0; n < tiles; ++n) {
        patterns.emplace_back(static_cast<std::size_t>(c.num_heads), static_cast<int>(c.pattern_type));
        if (!c.use_adaptive_gate) continue;
        scores.push_back(layer.gate(normed, c.causal ? std::min(n * c.block_size + 1, used) : used));
        if (c.pattern_type != AsamPattern::adaptive) continue;
        const Row& bias = layer.values("selection.head_bias");
        for (std::size_t h = 0; h < patterns.back().size(); ++h) {
          Row logits = scores.back().patterns;
          for (std::size_t i = 0; i < 4; ++i) logits[i] += bias[h * 4 + i];
          patterns.back()[h] = static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin());
        }
      }
    }

    void select() {
      for (std::int64_t n = 0; n < tiles; ++n) {
        std::vector<std::vector<char>>& of_heads = selected.emplace_back();
        for (std::int64_t h = 0; h < c.num_heads; ++h) {
          const auto pattern =
              static_cast<AsamPattern>(patterns[static_cast<std::size_t>(n)][static_cast<std::size_t>(h)]);
          std::vector<char>& of = of_heads.emplace_back();
          for (std::int64_t tile = 0; tile < tiles; ++tile) {
            of.push_back(tile_left(n, tile) && selects(pattern, h, n, tile));
          }
        }
      }
    }

    // Whether row t may meet key j at all.
    bool left(std::int64_t t, std::int64_t j) const { return j < used && (!c.causal || j <= t); }
    // Whether a tile holds such a pair; lists of random tiles are drawn from these.
    bool tile_left(std::int64_t n, std::int64_t tile) const {
      return tile * c.block_size < used && (!c.causal || tile <= n);
    }

    bool selects(AsamPattern pattern, std::int64_t h, std::int64_t n, std::int64_t tile) const {
      const std::int64_t block = c.block_size, apart = std::abs(n - tile);
      switch (pattern) {
        case AsamPattern::local:  // with a pair at most half a window apart
          return apart == 0 || (apart - 1) * block + 1 <= c.window_size / 2;
        case AsamPattern::strided:
          return tile % c.stride == 0 || apart <= 1;
        case AsamPattern::random: {
          std::vector<std::pair<std::uint64_t, std::int64_t>> drawn;
          for (std::int64_t other = 0; other < tiles; ++other) {
            if (tile_left(n, other)) drawn.emplace_back(hash(h, n, other), other);
          }
          std::sort(drawn.begin(), drawn.end());
          drawn.resize(std::min(drawn.size(), static_cast<std::size_t>((c.num_random + block - 1) / block)));
          return std::any_of(drawn.begin(), drawn.end(), [&](const auto& one) { return one.second == tile; });
        }
        case AsamPattern::clustered: {
          const auto at = static_cast<std::size_t>(h);
          const std::int64_t end = c.causal ? n * block + 1 : std::min((n + 1) * block, used);
          return apart == 0 || cluster(h, layer.mean_of(q[at], n * block, end)) ==
                                   cluster(h, layer.mean_of(k[at], tile * block, std::min((tile + 1) * block, used)));
        }
        default: {
          const Row& weights = layer.values("selection.scale_weights");
          Row shares;
          for (std::size_t s = 0; s < c.scales.size(); ++s) {
            shares.push_back(weights[s * static_cast<std::size_t>(c.num_heads) + static_cast<std::size_t>(h)]);
          }
          layer.softmax(shares);
          T share = 0;
          for (std::size_t s = 0; s < c.scales.size(); ++s) {
            if (tile % c.scales[s] == 0 || apart <= c.scales[s] / 4) share += shares[s];
          }
          return share > T{0.5};
        }
      }
    }

    std::uint64_t hash(std::int64_t h, std::int64_t n, std::int64_t tile) const {
      std::uint64_t word = static_cast<std::uint64_t>(c.seed) % 65537;
      word = word * 4096 + static_cast<std::uint64_t>(h);
      word = word * 65537 + static_cast<std::uint64_t>(n);
      word = word * 65537 + static_cast<std::uint64_t>(tile);
      for (const std::uint64_t multiplier : {2146121005ull, 74229387ull}) {
        const std::uint64_t low = word % (1ull << 32);
        word = (low ^ (low / 65536)) * multiplier;
      }
      return word / 256 % (1ull << 32);
    }

    std::ptrdiff_t cluster(std::int64_t h, const Row& mean) const {
      const Row& centroids = layer.values("selection.centroids");
      Row likeness;
      for (std::int64_t n = 0; n < c.num_clusters; ++n) {
        const auto from = centroids.begin() + (h * c.num_clusters + n) * c.dim_head;
        const Row centroid(from, from + c.dim_head);
        likeness.push_back(layer.dot(mean, centroid) / std::sqrt(layer.dot(centroid, centroid)));
      }
      return std::max_element(likeness.begin(), likeness.end()) - likeness.begin();
    }

    // Row t of head h.
    Row attend(std::int64_t h, std::int64_t t) {
      const auto head = static_cast<std::size_t>(h), row = static_cast<std::size_t>(t);
      const auto tile_of_rows = static_cast<std::size_t>(t / c.block_size);
      const T logit = scores.empty() ? T{1} : scores[tile_of_rows].logits[head];
      const bool soft = c.use_adaptive_gate && c.gate == AsamGate::soft;
      const T outside = soft ? sigmoid(-logit) : logit <= 0 ? T{1} : T{0};  // what a key of the rest weighs
      Row weights, p = layer.product(q[head][row], keys[head]);
      for (std::int64_t j = 0; j < length; ++j) {
        const bool in = selected[tile_of_rows][head][static_cast<std::size_t>(j / c.block_size)] != 0;
        weights.push_back(!left(t, j) ? T{0} : in ? T{1} : outside);
        T& score = p[static_cast<std::size_t>(j)];
        score =
            weights.back() > 0 ? score / std::sqrt(static_cast<T>(c.dim_head)) : -std::numeric_limits<T>::infinity();
        if (t < used) {
          all += left(t, j);
          attended += weights.back() > 0;
        }
      }
      const T largest = *std::max_element(p.begin(), p.end());
      if (largest == -std::numeric_limits<T>::infinity()) return Row(static_cast<std::size_t>(c.dim_head));
      for (std::size_t j = 0; j < p.size(); ++j) p[j] = weights[j] * std::exp(p[j] - largest);
      const T sum = layer.total(p);
      const bool fused = layer.sums_.order == Order::backward || layer.sums_.order == Order::blocks;
      for (T& x : p) x /= fused ? T{1} : sum;
      Row o = layer.product(p, values[head]);
      for (T& x : o) x /= fused ? sum : T{1};
      return o;
    }
  };

  void tell(const Sequence& s, AsamResult& out) const {
    if (!c_.use_adaptive_gate) return;
    const std::int64_t rows = c_.causal ? s.length : 1, blocks = c_.causal ? s.tiles : 1;
    const auto at = [&](std::int64_t t) -> const Scores& {
      return s.scores[static_cast<std::size_t>(t / c_.block_size)];
    };
    for (std::size_t h = 0; h < static_cast<std::size_t>(c_.num_heads); ++h) {
      for (std::int64_t t = 0; t < s.length; ++t) out.gate_values.push_back(sigmoid(at(t).logits[h]));
      for (std::int64_t t = 0; t < rows; ++t) out.confidence.push_back(at(t).confidence[h]);
      for (std::int64_t n = 0; n < blocks; ++n) out.patterns.push_back(s.patterns[static_cast<std::size_t>(n)][h]);
    }
    for (std::int64_t t = 0; t < rows; ++t) {
      out.pattern_logits.insert(out.pattern_logits.end(), at(t).patterns.begin(), at(t).patterns.end());
    }
  }

  const AsamConfig& c_;
  const Summation sums_;
  std::map<std::string, Row> w_, columns_;  // columns_: transposed
};

}  // namespace heddle::kit
