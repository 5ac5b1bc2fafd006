#include "reference/adaptive.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/dtypes.h"
#include "core/parallel.h"
#include "reference/rows.h"

namespace heddle::reference {
namespace {

using std::int64_t;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double norm(const Row& x) { return std::sqrt(dot(x, x)); }

// A block of values: its mean, and how far they lie from it.
struct Block {
  KeyRange keys;
  Row mean;
  double radius = 0;  // largest |v_j - mean|
  double width = 0;   // fourth root of the sum of the squares of (v_i - mean) . (v_j - mean) over all i and j
  double longest = 0;
  bool replaceable = true;
};

// The keys and values of one kv head of one sequence.
struct Keys {
  std::vector<Row> k, v;
  std::vector<Block> blocks;
  double longest = 0;  // of the values of blocks that may be replaced

  Keys(const AttentionProblem& p, int64_t b, const Sequence& s, int64_t kv_head) {
    for (int64_t j = 0; j < s.sk; ++j) {
      k.push_back(load_row(p.key_row(p.k, b, s, j, kv_head), p.k, p.D));
      v.push_back(load_row(p.key_row(p.v, b, s, j, kv_head), p.v, p.Dv));
    }
    for (int64_t begin = 0; begin < s.sk; begin += kAdaptiveKeys) {
      blocks.push_back(block({begin, std::min(begin + kAdaptiveKeys, s.sk)}, p.Dv));
      if (blocks.back().replaceable) longest = std::max(longest, blocks.back().longest);
    }
  }

  Block block(KeyRange keys, int64_t width) const {
    Block out{.keys = keys, .mean = Row(width)};
    double largest = 0;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      for (int64_t d = 0; d < width; ++d) {
        out.mean[d] += v[j][d] / static_cast<double>(keys.size());
        largest = std::max(largest, std::abs(v[j][d]));
        if (!std::isfinite(v[j][d])) out.replaceable = false;
      }
      out.longest = std::max(out.longest, norm(v[j]));
    }
    if (largest != 0 && !(largest >= 0x1p-100 && largest <= 0x1p100)) out.replaceable = false;
    std::vector<Row> centred;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      Row row = v[j];
      for (int64_t d = 0; d < width; ++d) row[d] -= out.mean[d];
      out.radius = std::max(out.radius, norm(row));
      centred.push_back(row);
    }
    double squares = 0;
    for (const Row& x : centred) {
      for (const Row& y : centred) squares += dot(x, y) * dot(x, y);
    }
    out.width = std::sqrt(std::sqrt(squares));
    return out;
  }
};

// One row's softmax over the keys that causality and window leave.
struct Probabilities {
  KeyRange keys;
  Row p, slope;  // of key keys.begin + n; slope: d s / d (q . k)
  double sink = 0, lse = -kInfinity;
};

Probabilities softmax_row(const AttentionProblem& p, int64_t b, int64_t h, const Sequence& s, int64_t i,
                          const Keys& keys) {
  Probabilities out;
  out.keys = p.band(s).keys_of(i);
  const Row q = load_row(p.q.at(b, s.q_begin + i, h), p.q, p.D);
  const double sink = p.sink ? p.sink.as<float>()[p.sink.offset(0, h, 0)] : -kInfinity;
  double largest = sink;
  Row scores;
  for (int64_t j = out.keys.begin; j < out.keys.end; ++j) {
    double score = static_cast<double>(p.scale) * dot(q, keys.k[j]), slope = p.scale;
    if (p.softcap > 0) {
      const double t = std::tanh(score / p.softcap);
      score = p.softcap * t;
      slope *= 1 - t * t;
    }
    if (p.alibi) {
      const double alibi = p.alibi.as<float>()[p.alibi.offset(b, h, 0)];
      score -= alibi * static_cast<double>(std::abs(i + s.off - j));
    }
    scores.push_back(score);
    out.slope.push_back(slope);
    largest = std::max(largest, score);
  }
  out.p.assign(scores.size(), 0);
  if (largest == -kInfinity) return out;
  double sum = std::exp(sink - largest);
  for (const double score : scores) sum += std::exp(score - largest);
  for (std::size_t n = 0; n < scores.size(); ++n) out.p[n] = std::exp(scores[n] - largest) / sum;
  out.sink = std::exp(sink - largest) / sum;
  out.lse = largest + std::log(sum);
  return out;
}

double mass_of(const Probabilities& row, const Block& block) {
  double mass = 0;
  for (int64_t j = block.keys.begin; j < block.keys.end; ++j) mass += row.p[j - row.keys.begin];
  return mass;
}

// What replacing the block can make of the row, in units of the longest value.
double cost_of(const Probabilities& row, const Block& block, double longest) {
  if (longest == 0) return 0;
  const double mass = mass_of(row, block);
  double spread = 0;
  for (int64_t j = block.keys.begin; j < block.keys.end; ++j) {
    const double e = row.p[j - row.keys.begin] - mass / static_cast<double>(block.keys.size());
    spread += e * e;
  }
  return std::min(std::sqrt(spread) * block.width, mass * block.radius) / longest;
}

// Whether block n is replaced for row i of head h.
bool is_replaced(const AttentionProblem& p, const ReplacedBlocks& replaced, int64_t b, int64_t h, const Sequence& s,
                 int64_t i, const Probabilities& row, const Keys& keys, std::size_t n) {
  const std::uint8_t* const bits = replaced.at(p, b, s, h / p.G, (i * p.G + h % p.G) / kAdaptiveRows);
  return row.keys.holds(keys.blocks[n].keys) && ReplacedBlocks::bit(bits, static_cast<int64_t>(n));
}

}  // namespace

double longest_value(const AttentionProblem& p, int64_t b, int64_t kv_head) {
  return Keys(p, b, p.sequence(b), kv_head).longest;
}

void decide_blocks(const AdaptiveProblem& p) {
  const int64_t batches = p.cu_seqlens_q ? 1 : p.B;
  std::fill_n(p.replaced.data, batches * p.Hkv * p.replaced.runs * p.replaced.bytes, 0);
  for (int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    for (int64_t kv_head = 0; kv_head < p.Hkv; ++kv_head) {
      const Keys keys(p, b, s, kv_head);
      for (int64_t begin = 0; begin < s.sq * p.G; begin += kAdaptiveRows) {
        std::uint8_t* const bits = p.replaced.at(p, b, s, kv_head, begin / kAdaptiveRows);
        std::vector<Probabilities> rows;
        for (int64_t row = begin; row < std::min(begin + kAdaptiveRows, s.sq * p.G); ++row) {
          rows.push_back(softmax_row(p, b, kv_head * p.G + row % p.G, s, row / p.G, keys));
        }
        Row spent(rows.size());
        for (std::size_t n = 0; n < keys.blocks.size(); ++n) {
          const Block& block = keys.blocks[n];
          const auto fits = [&](std::size_t r) {
            return rows[r].keys.holds(block.keys) && spent[r] + cost_of(rows[r], block, keys.longest) <= p.tol;
          };
          bool all = block.replaceable;
          for (std::size_t r = 0; all && r < rows.size(); ++r) all = fits(r);
          if (!all) continue;
          for (std::size_t r = 0; r < rows.size(); ++r) spent[r] += cost_of(rows[r], block, keys.longest);
          ReplacedBlocks::set(bits, static_cast<int64_t>(n));
        }
      }
    }
  }
}

AdaptiveForward adaptive_forward(const AdaptiveProblem& p, Executor& executor) {
  AdaptiveForward out;
  out.o.assign(total_rows(p) * p.H * p.Dv, 0);
  out.lse.assign(total_rows(p) * p.H, -kInfinity);
  out.bound.assign(total_rows(p) * p.H, 0);
  parallel_for(executor, p.B * p.H, [&](int64_t task, int) {
    const int64_t b = task / p.H, h = task % p.H;
    const Sequence s = p.sequence(b);
    const Keys keys(p, b, s, h / p.G);
    for (int64_t i = 0; i < s.sq; ++i) {
      const Probabilities row = softmax_row(p, b, h, s, i, keys);
      double* o = &out.o[(row_index(p, b, s, i) * p.H + h) * p.Dv];
      double bound = 0;
      for (std::size_t n = 0; n < keys.blocks.size(); ++n) {
        const Block& block = keys.blocks[n];
        if (is_replaced(p, p.replaced, b, h, s, i, row, keys, n)) {
          const double mass = mass_of(row, block);
          for (int64_t d = 0; d < p.Dv; ++d) o[d] += mass * block.mean[d];
          bound += cost_of(row, block, keys.longest);
          continue;
        }
        const KeyRange met = block.keys.common(row.keys);
        for (int64_t j = met.begin; j < met.end; ++j) {
          for (int64_t d = 0; d < p.Dv; ++d) o[d] += row.p[j - row.keys.begin] * keys.v[j][d];
        }
      }
      out.lse[lse_index(p, b, h, s, i)] = row.lse;
      out.bound[lse_index(p, b, h, s, i)] = std::isnan(row.lse) ? row.lse : bound;
    }
  });
  return out;
}

Backward adaptive_backward(const AdaptiveBackwardProblem& p, Executor& executor) {
  Backward out;
  out.dq.assign(total_rows(p) * p.H * p.D, 0);
  out.dk.assign(total_keys(p) * p.Hkv * p.D, 0);
  out.dv.assign(total_keys(p) * p.Hkv * p.Dv, 0);
  std::vector<double> dsink(p.B * p.H, 0);
  const auto head = [&](int64_t b, int64_t h) {
    const Sequence s = p.sequence(b);
    const Keys keys(p, b, s, h / p.G);
    for (int64_t i = 0; i < s.sq; ++i) {
      const Probabilities row = softmax_row(p, b, h, s, i, keys);
      if (row.lse == -kInfinity) continue;
      const Row q = load_row(p.q.at(b, s.q_begin + i, h), p.q, p.D);
      const Row d_o = load_row(p.d_o.at(b, s.q_begin + i, h), p.d_o, p.Dv);
      const double d_lse = p.d_lse ? p.d_lse.as<float>()[p.d_lse.offset(b, h, s.q_begin + i)] : 0;
      // o = sum_j w_j v_j, where w_j is p_j or, in a replaced block, the mean of its p; so dp_j = d_o . v_j or, there,
      // the mean of that over the block.
      Row w = row.p, dp(row.p.size());
      for (std::size_t n = 0; n < dp.size(); ++n) dp[n] = dot(d_o, keys.v[row.keys.begin + n]);
      for (std::size_t n = 0; n < keys.blocks.size(); ++n) {
        if (!is_replaced(p, p.replaced, b, h, s, i, row, keys, n)) continue;
        const Block& block = keys.blocks[n];
        const int64_t first = block.keys.begin - row.keys.begin, count = block.keys.size();
        const double mean_p = mass_of(row, block) / static_cast<double>(count), mean_dp = dot(d_o, block.mean);
        std::fill_n(w.begin() + first, count, mean_p);
        std::fill_n(dp.begin() + first, count, mean_dp);
      }
      double delta = 0;  // sum_j p_j dp_j = d_o . o
      for (std::size_t n = 0; n < dp.size(); ++n) delta += row.p[n] * dp[n];
      dsink[b * p.H + h] += row.sink * (d_lse - delta);
      double* dq = &out.dq[(row_index(p, b, s, i) * p.H + h) * p.D];
      for (std::size_t n = 0; n < dp.size(); ++n) {
        const int64_t j = row.keys.begin + static_cast<int64_t>(n);
        const int64_t key = key_index(p, b, s, j) * p.Hkv + h / p.G;
        const double ds = row.p[n] * (dp[n] - delta + d_lse) * row.slope[n];
        for (int64_t d = 0; d < p.D; ++d) {
          dq[d] += ds * keys.k[j][d];
          out.dk[key * p.D + d] += ds * q[d];
        }
        for (int64_t d = 0; d < p.Dv; ++d) out.dv[key * p.Dv + d] += w[n] * d_o[d];
      }
    }
  };
  // Query heads of one kv head share dk and dv, so a task takes them all, in order.
  parallel_for(executor, p.B * p.Hkv, [&](int64_t index, int) {
    const int64_t b = index / p.Hkv, kv_head = index % p.Hkv;
    for (int64_t h = kv_head * p.G; h < (kv_head + 1) * p.G; ++h) head(b, h);
  });
  if (p.dsink) {
    out.dsink.assign(p.H, 0);
    for (int64_t n = 0; n < p.B * p.H; ++n) out.dsink[n % p.H] += dsink[n];
  }
  return out;
}

namespace {

// Rounds values, [rows of all sequences, heads, width], into x, or adds them, rounded to f32, to what is there.
void store(const std::vector<double>& values, const Operand& x, int64_t batch, int64_t rows, int64_t heads,
           int64_t width, bool add) {
  if (!x) return;
  auto value = values.begin();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        std::byte* const row = x.at(b, i, h);
        for (int64_t d = 0; d < width; ++d) {
          const float before = add ? load_element(row, x.dtype, d * x.stride_d) : 0, own = static_cast<float>(*value++);
          store_element(row, x.dtype, d * x.stride_d, add ? before + own : own);
        }
      }
    }
  }
}
void store_rows(const AttentionProblem& p, const std::vector<double>& values, const Operand& x, int64_t width,
                bool add = false) {
  store(values, x, p.cu_seqlens_q ? 1 : p.B, p.cu_seqlens_q ? total_rows(p) : p.Sq, p.H, width, add);
}
void store_keys(const AttentionProblem& p, const std::vector<double>& values, const Operand& x, int64_t width,
                bool add) {
  store(values, x, p.cu_seqlens_k ? 1 : p.B, p.cu_seqlens_k ? total_keys(p) : p.Sk, p.Hkv, width, add);
}

void store_per_row(const AttentionProblem& p, const std::vector<double>& values, const Plane& to) {
  if (!to) return;
  for (int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    for (int64_t h = 0; h < p.H; ++h) {
      for (int64_t i = 0; i < s.q_rows; ++i) {
        to.as<float>()[to.offset(b, h, s.q_begin + i)] = static_cast<float>(values[lse_index(p, b, h, s, i)]);
      }
    }
  }
}

void launch(const AdaptiveProblem& given, const Runtime& runtime) {
  AdaptiveProblem p = given;
  std::vector<std::uint8_t> own;
  if (!p.replaced) {
    p.replaced = {.given = true,
                  .heads = p.Hkv,
                  .runs = adaptive_runs(p),
                  .bytes = (p.Sk + 8 * kAdaptiveKeys - 1) / (8 * kAdaptiveKeys)};
    own.resize((p.cu_seqlens_q ? 1 : p.B) * p.Hkv * p.replaced.runs * p.replaced.bytes);
    p.replaced.data = own.data();
  }
  decide_blocks(p);
  const AdaptiveForward result = adaptive_forward(p, *runtime.executor);
  store_rows(p, result.o, p.o, p.Dv);
  store_per_row(p, result.lse, p.lse);
  store_per_row(p, result.bound, p.bound);
}

void launch_backward(const AdaptiveBackwardProblem& p, const Runtime& runtime) {
  const Backward result = adaptive_backward(p, *runtime.executor);
  store_rows(p, result.dq, p.dq, p.D, p.accumulate);
  store_keys(p, result.dk, p.dk, p.D, p.accumulate);
  store_keys(p, result.dv, p.dv, p.Dv, p.accumulate);
  for (int64_t h = 0; p.dsink && h < p.H; ++h) {
    p.dsink.as<float>()[p.dsink.offset(0, h, 0)] = static_cast<float>(result.dsink[h]);
  }
}

template <class Problem>
double estimate(const Problem& p, int) {
  return static_cast<double>(p.B * p.H * p.Sq * p.Sk) * 2 * static_cast<double>(p.D + p.Dv) / 1e9;
}
template <class Problem>
std::string describe(const Problem&, int) {
  return "each sum in doubles";
}

}  // namespace

const AdaptiveForwardKernel kAdaptiveAttentionForward = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = serves_all,
    .estimate = estimate,
    .workspace = no_workspace,
    .launch = launch,
    .describe = describe,
};
const AdaptiveBackwardKernel kAdaptiveAttentionBackward = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = serves_all,
    .estimate = estimate,
    .workspace = no_workspace,
    .launch = launch_backward,
    .describe = describe,
};

}  // namespace heddle::reference
