#include "reference/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/dtypes.h"
#include "core/parallel.h"
#include "problem/int4_rows.h"
#include "problem/philox.h"
#include "reference/rows.h"

namespace heddle::reference {
namespace {

using std::int64_t;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The keys and values that query head h of sequence b reads.
struct Keys {
  std::vector<Row> k, v;  // [sk][D], [sk][Dv]

  Keys(const AttentionProblem& p, int64_t b, const Sequence& s, int64_t h) {
    const int64_t kv_head = h / p.G;
    for (int64_t j = 0; j < s.sk; ++j) {
      if (p.int4) {
        k.push_back(int4_row<double>(p, b, s, j, kv_head, false));
        v.push_back(int4_row<double>(p, b, s, j, kv_head, true));
        continue;
      }
      const auto [batch, row] = p.key_slot(b, s, j);
      k.push_back(load_row(p.k.at(batch, row, kv_head), p.k, p.D, p.k_scale.at(batch, row, kv_head)));
      v.push_back(load_row(p.v.at(batch, row, kv_head), p.v, p.Dv, p.v_scale.at(batch, row, kv_head)));
    }
  }
};

// One row of probabilities. Pairs that a mask removes are not among `keys`; nothing is read from them.
struct Probabilities {
  std::vector<int64_t> keys;  // attended keys j, ascending; the vectors below run along them
  Row p;                      // softmax, before dropout
  Row keep;                   // dropout's factor: 0 or 1 / (1 - p)
  Row scores;                 // what p is the softmax of
  Row score_slope;            // d s / d (q . k): the scale, and the softcap's derivative
  double sink = 0;            // probability of the sink
  double lse = -kInfinity;
};

// Of a call over lists of key blocks, whether the list of row i holds the block of key j, under a mask that lets the
// pair; of any other, true.
bool listed(const AttentionProblem& p, const KeyLists* lists, int64_t b, int64_t h, const Sequence& s, int64_t i,
            int64_t j) {
  if (lists == nullptr) return true;
  const int64_t heads = p.H / lists->units;  // of each list
  const auto blocks = lists->list(p, b, s, i, h / heads);
  const auto first = std::find(blocks.begin(), blocks.end(), j / lists->block_size);
  if (first == blocks.end()) return false;
  return !lists->masked || lists->lets(lists->ids(p, b, s, i, h / heads)[first - blocks.begin()], i, j);
}

bool removed(const AttentionProblem& p, int64_t b, int64_t h, const Sequence& s, int64_t i, int64_t j) {
  if (p.draft_removes(b, s, i, j)) return true;
  if (p.mask && p.mask.as<unsigned char>()[p.mask.offset(b, h, i, s.key_offset + j)] == 0) return true;
  return p.bias && load_element(p.bias.data, p.bias.dtype, p.bias.offset(b, h, i, s.key_offset + j)) == -kInfinity;
}

Probabilities softmax_row(const AttentionProblem& p, int64_t b, int64_t h, const Sequence& s, int64_t i,
                          const Keys& keys, const KeyLists* lists) {
  Probabilities out;
  Row& scores = out.scores;
  const Row q = load_row(p.q.at(b, s.q_begin + i, h), p.q, p.D, p.q_scale.at(b, s.q_begin + i, h));
  const auto range = p.band(s).keys_of(i);
  for (int64_t j = range.begin; j < range.end; ++j) {
    if (!listed(p, lists, b, h, s, i, j) || removed(p, b, h, s, i, j)) continue;
    double score = static_cast<double>(p.scale) * dot(q, keys.k[j]);
    double slope = p.scale;
    if (p.softcap > 0) {
      const double t = std::tanh(score / p.softcap);
      score = p.softcap * t;
      slope *= 1 - t * t;
    }
    if (p.alibi) {
      const double alibi = p.alibi.as<float>()[p.alibi.offset(b, h, 0)];
      score -= alibi * static_cast<double>(std::abs(i + s.off - j));
    }
    if (p.bias) score += load_element(p.bias.data, p.bias.dtype, p.bias.offset(b, h, i, s.key_offset + j));
    const bool kept = p.dropout.p == 0 || dropout_keeps(p.dropout, static_cast<std::uint32_t>(b * p.H + h),
                                                        static_cast<std::uint32_t>(s.q_offset + i),
                                                        static_cast<std::uint32_t>(s.key_offset + j));
    out.keys.push_back(j);
    out.keep.push_back(kept ? 1 / (1 - static_cast<double>(p.dropout.p)) : 0);
    out.score_slope.push_back(slope);
    scores.push_back(score);
  }

  const double sink = p.sink ? p.sink.as<float>()[p.sink.offset(0, h, 0)] : -kInfinity;
  double largest = sink;
  for (double score : scores) largest = std::max(largest, score);
  out.p.assign(scores.size(), 0);
  if (largest == -kInfinity) return out;  // no key and no sink
  double sum = std::exp(sink - largest);
  for (double score : scores) sum += std::exp(score - largest);
  for (std::size_t n = 0; n < scores.size(); ++n) out.p[n] = std::exp(scores[n] - largest) / sum;
  out.sink = std::exp(sink - largest) / sum;
  out.lse = largest + std::log(sum);
  return out;
}

// Replaces a piece's probabilities by those of the longer problem, whose lse the caller has brought.
void take_merged(const AttentionBackwardProblem& p, int64_t b, int64_t h, const Sequence& s, int64_t i,
                 Probabilities& row) {
  row.lse = p.lse.as<float>()[p.lse.offset(b, h, s.q_begin + i)];
  for (std::size_t n = 0; n < row.p.size(); ++n) row.p[n] = std::exp(row.scores[n] - row.lse);
  if (p.sink) row.sink = std::exp(p.sink.as<float>()[p.sink.offset(0, h, 0)] - row.lse);
}

// d_o . o of the longer problem. Where o is 0 a row may have no key at all, and its d_o may hold anything.
double merged_delta(const AttentionBackwardProblem& p, int64_t b, int64_t h, const Sequence& s, int64_t i,
                    const Row& d_o) {
  const Row o = load_row(p.o.at(b, s.q_begin + i, h), p.o, p.Dv);
  double delta = 0;
  for (int64_t d = 0; d < p.Dv; ++d) {
    if (o[d] != 0) delta += d_o[d] * o[d];
  }
  return delta;
}

// Adds to `out` the gradients of query head h of sequence b.
void backward_head(const AttentionBackwardProblem& p, const KeyLists* lists, int64_t b, int64_t h, Backward& out,
                   double& dsink) {
  const Sequence s = p.sequence(b);
  const Keys keys(p, b, s, h);
  const int64_t kv_head = h / p.G;
  for (int64_t i = 0; i < s.sq; ++i) {
    Probabilities row = softmax_row(p, b, h, s, i, keys, lists);
    if (p.merged) take_merged(p, b, h, s, i, row);
    if (row.lse == -kInfinity) continue;
    const Row q = load_row(p.q.at(b, s.q_begin + i, h), p.q, p.D);
    const Row d_o = load_row(p.d_o.at(b, s.q_begin + i, h), p.d_o, p.Dv);
    const double d_lse = p.d_lse ? p.d_lse.as<float>()[p.d_lse.offset(b, h, s.q_begin + i)] : 0;

    // o = sum_j p_j keep_j v_j and lse = ln sum_j exp(s_j), so d s_j = p_j (dp_j - delta + d_lse).
    Row dp(row.keys.size());
    double delta = 0;  // sum_j p_j dp_j = d_o . o
    for (std::size_t n = 0; n < dp.size(); ++n) {
      if (row.keep[n] != 0) dp[n] = row.keep[n] * dot(d_o, keys.v[row.keys[n]]);
      delta += row.p[n] * dp[n];
    }
    if (p.merged) delta = merged_delta(p, b, h, s, i, d_o);
    dsink += row.sink * (d_lse - delta);

    double* dq = &out.dq[(row_index(p, b, s, i) * p.H + h) * p.D];
    for (std::size_t n = 0; n < dp.size(); ++n) {
      const int64_t j = row.keys[n];
      const int64_t key = key_index(p, b, s, j) * p.Hkv + kv_head;
      const double ds = row.p[n] * (dp[n] - delta + d_lse);
      for (int64_t d = 0; d < p.D; ++d) {
        dq[d] += ds * row.score_slope[n] * keys.k[j][d];
        out.dk[key * p.D + d] += ds * row.score_slope[n] * q[d];
      }
      for (int64_t d = 0; d < p.Dv; ++d) out.dv[key * p.Dv + d] += row.p[n] * row.keep[n] * d_o[d];
      if (p.dbias) {
        const int64_t bias_b = p.bias_batch == 1 ? 0 : b, bias_h = p.bias_heads == 1 ? 0 : h;
        const int64_t bias_i = p.bias_rows == 1 ? 0 : i, bias_j = p.bias_columns == 1 ? 0 : s.key_offset + j;
        out.dbias[((bias_b * p.bias_heads + bias_h) * p.bias_rows + bias_i) * p.bias_columns + bias_j] += ds;
      }
    }
  }
}

// Rounds values, [rows of all sequences, heads, width], into x, or adds them, rounded to f32, to what is there.
void store(const std::vector<double>& values, const Operand& x, int64_t batch, int64_t rows, int64_t heads,
           int64_t width, bool add) {
  if (!x) return;
  auto value = values.begin();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t d = 0; d < width; ++d) {
          std::byte* const row = x.at(b, i, h);
          const float before = add ? load_element(row, x.dtype, d * x.stride_d) : 0, own = static_cast<float>(*value++);
          store_element(row, x.dtype, d * x.stride_d, add ? before + own : own);
        }
      }
    }
  }
}

// Packed operands are one batch of `total` rows.
void store_rows(const AttentionProblem& p, const std::vector<double>& values, const Operand& x, int64_t width,
                bool add = false) {
  store(values, x, p.cu_seqlens_q ? 1 : p.B, p.cu_seqlens_q ? total_rows(p) : p.Sq, p.H, width, add);
}
void store_keys(const AttentionProblem& p, const std::vector<double>& values, const Operand& x, int64_t width,
                bool add) {
  store(values, x, p.cu_seqlens_k ? 1 : p.B, p.cu_seqlens_k ? total_keys(p) : p.Sk, p.Hkv, width, add);
}

Refusal supports(const AttentionProblem&) { return {}; }
Refusal supports_backward(const AttentionBackwardProblem&) { return {}; }

double estimate(const AttentionProblem& p, int) {
  const double pairs = static_cast<double>(p.B) * p.H * p.Sq * p.Sk;
  return pairs * 2 * (p.D + p.Dv) / 1e9;
}
double estimate_backward(const AttentionBackwardProblem& p, int workers) { return 2.5 * estimate(p, workers); }

std::size_t workspace(const AttentionProblem&, int) { return 0; }
std::size_t workspace_backward(const AttentionBackwardProblem&, int) { return 0; }
template <class Problem>
std::string describe(const Problem&, int) {
  return "each sum in doubles";
}

template <class Problem>
void launch(const Problem& p, const Runtime& runtime) {
  const Forward result = attention_forward(p, *runtime.executor);
  store_rows(p, result.o, p.o, p.Dv);
  if (!p.lse) return;
  for (int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    for (int64_t h = 0; h < p.H; ++h) {
      for (int64_t i = 0; i < s.q_rows; ++i) {
        p.lse.template as<float>()[p.lse.offset(b, h, s.q_begin + i)] =
            static_cast<float>(result.lse[lse_index(p, b, h, s, i)]);
      }
    }
  }
}

template <class Problem>
void launch_backward(const Problem& p, const Runtime& runtime) {
  const Backward result = attention_backward(p, *runtime.executor);
  store_rows(p, result.dq, p.dq, p.D, p.accumulate);
  store_keys(p, result.dk, p.dk, p.D, p.accumulate);
  store_keys(p, result.dv, p.dv, p.Dv, p.accumulate);
  if (p.dbias) {
    auto value = result.dbias.begin();
    for (int64_t b = 0; b < p.bias_batch; ++b) {
      for (int64_t h = 0; h < p.bias_heads; ++h) {
        for (int64_t i = 0; i < p.bias_rows; ++i) {
          for (int64_t j = 0; j < p.bias_columns; ++j) {
            store_element(p.dbias.data, p.dbias.dtype, p.dbias.offset(b, h, i, j), static_cast<float>(*value++));
          }
        }
      }
    }
  }
  if (p.dsink) {
    for (int64_t h = 0; h < p.H; ++h) {
      p.dsink.template as<float>()[p.dsink.offset(0, h, 0)] = static_cast<float>(result.dsink[h]);
    }
  }
}

Forward forward(const AttentionProblem& p, const KeyLists* lists, Executor& executor) {
  Forward out;
  out.o.assign(total_rows(p) * p.H * p.Dv, 0);
  out.lse.assign(total_rows(p) * p.H, -kInfinity);
  parallel_for(executor, p.B * p.H, [&](int64_t task, int) {
    const int64_t b = task / p.H, h = task % p.H;
    const Sequence s = p.sequence(b);
    const Keys keys(p, b, s, h);
    for (int64_t i = 0; i < s.sq; ++i) {
      const Probabilities row = softmax_row(p, b, h, s, i, keys, lists);
      double* o = &out.o[(row_index(p, b, s, i) * p.H + h) * p.Dv];
      for (std::size_t n = 0; n < row.keys.size(); ++n) {
        if (row.keep[n] == 0) continue;
        for (int64_t d = 0; d < p.Dv; ++d) o[d] += row.p[n] * row.keep[n] * keys.v[row.keys[n]][d];
      }
      out.lse[lse_index(p, b, h, s, i)] = row.lse;
    }
  });
  return out;
}

Backward backward(const AttentionBackwardProblem& p, const KeyLists* lists, Executor& executor) {
  Backward out;
  out.dq.assign(total_rows(p) * p.H * p.D, 0);
  out.dk.assign(total_keys(p) * p.Hkv * p.D, 0);
  out.dv.assign(total_keys(p) * p.Hkv * p.Dv, 0);
  if (p.dbias) out.dbias.assign(p.bias_batch * p.bias_heads * p.bias_rows * p.bias_columns, 0);
  std::vector<double> dsink(p.B * p.H, 0);

  // Query heads of one kv head share dk and dv, so a task takes them all, in order.
  const auto task = [&](int64_t index, int) {
    const int64_t b = index / p.Hkv, kv_head = index % p.Hkv;
    for (int64_t h = kv_head * p.G; h < (kv_head + 1) * p.G; ++h)
      backward_head(p, lists, b, h, out, dsink[b * p.H + h]);
  };
  if (p.dbias) {  // may be shared by all heads and sequences
    for (int64_t index = 0; index < p.B * p.Hkv; ++index) task(index, 0);
  } else {
    parallel_for(executor, p.B * p.Hkv, task);
  }

  if (p.dsink) {
    out.dsink.assign(p.H, 0);
    for (int64_t b = 0; b < p.B; ++b) {
      for (int64_t h = 0; h < p.H; ++h) out.dsink[h] += dsink[b * p.H + h];
    }
  }
  return out;
}

}  // namespace

Forward attention_forward(const AttentionProblem& p, Executor& executor) { return forward(p, nullptr, executor); }
Forward attention_forward(const SparseProblem& p, Executor& executor) { return forward(p, &p.lists, executor); }

Backward attention_backward(const AttentionBackwardProblem& p, Executor& executor) {
  return backward(p, nullptr, executor);
}
Backward attention_backward(const SparseBackwardProblem& p, Executor& executor) {
  return backward(p, &p.lists, executor);
}

const AttentionForwardKernel kAttentionForward = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe<AttentionProblem>,
    .extras = kE4m3 | kDraftMask | kInt4 | kPiece | kFloat32Out | kSteps,
};
const SparseForwardKernel kSparseAttentionForward = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = serves_all,
    .estimate = [](const SparseProblem& p, int workers) { return estimate(p, workers); },
    .workspace = no_workspace,
    .launch = launch,
    .describe = describe<SparseProblem>,
};
const AttentionBackwardKernel kAttentionBackward = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = supports_backward,
    .estimate = estimate_backward,
    .workspace = workspace_backward,
    .launch = launch_backward,
    .describe = describe<AttentionBackwardProblem>,
    .extras = kPiece | kFloat32Out | kFloat32Gradients | kSteps,
};

const SparseBackwardKernel kSparseAttentionBackward = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = serves_all,
    .estimate = [](const SparseBackwardProblem& p, int workers) { return estimate_backward(p, workers); },
    .workspace = no_workspace,
    .launch = launch_backward,
    .describe = describe<SparseBackwardProblem>,
};

}  // namespace heddle::reference
