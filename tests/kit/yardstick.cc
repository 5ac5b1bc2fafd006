#include "kit/yardstick.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/dtypes.h"
#include "core/int4_rows.h"
#include "core/philox.h"
#include "kit/host_tensor.h"
#include "kit/quantized_heads.h"

namespace heddle::kit {
namespace {

using std::int64_t;
using Row = std::vector<float>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float round_to(DType dtype, float value) {
  return dtype == DType::f32 ? value : static_cast<float>(rounded(value, dtype));
}

// P as it enters P V.
float round_probability(DType dtype, float value) {
  return dtype == DType::f8e4m3 ? round_to(dtype, 256 * value) / 256 : round_to(dtype, value);
}

Row load(const std::byte* row, const Operand& x, int64_t width, float scale = 1) {
  Row out(width);
  for (int64_t d = 0; d < width; ++d) out[d] = scale * load_element(row, x.dtype, d * x.stride_d);
  return out;
}

bool tf32(const AttentionProblem& p) { return p.dtype == DType::f32 && p.precision == Precision::tf32; }

bool int8_qk(const AttentionProblem& p) { return p.precision == Precision::int8_qk; }

// Where scores are not rounded to the operands' dtype: sums of products of 8 bits.
bool keeps_scores(const AttentionProblem& p) { return p.dtype == DType::f8e4m3 || int8_qk(p); }

// x as a product of the problem takes it: in tf32 to 11 significant bits, to nearest.
float operand(const AttentionProblem& p, float x) {
  if (!tf32(p) || !std::isfinite(x)) return x;
  int exponent = 0;
  const float mantissa = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, 11)), exponent - 11);
}

Row operands(const AttentionProblem& p, Row row) {
  for (float& x : row) x = operand(p, x);
  return row;
}

struct Product {
  float sum = 0, terms = 0;  // sum of x y, of |x y|
};
Product product(const Row& x, const Row& y) {
  Product out;
  for (std::size_t d = 0; d < x.size(); ++d) {
    out.sum += x[d] * y[d];
    out.terms += std::abs(x[d] * y[d]);
  }
  return out;
}

int64_t total_rows(const AttentionProblem& p) { return p.cu_seqlens_q ? p.cu_seqlens_q[p.B] : p.B * p.Sq; }
int64_t total_keys(const AttentionProblem& p) { return p.cu_seqlens_k ? p.cu_seqlens_k[p.B] : p.B * p.Sk; }

// Sums of one tensor; beside them the sums of |terms| and of the squares of what delta's rounding contributes.
struct Sums {
  std::vector<float> value, terms, delta;

  explicit Sums(int64_t size) : value(size), terms(size), delta(size) {}
  PlainTensor finish(DType dtype) const {
    PlainTensor out;
    for (std::size_t n = 0; n < value.size(); ++n) {
      out.values.push_back(round_to(dtype, value[n]));
      out.terms = std::max<double>(out.terms, terms[n]);
      out.delta = std::max<double>(out.delta, std::sqrt(delta[n]));
    }
    return out;
  }
};

// The row softmax(S) of head h, and what the backward needs of it; entries of removed pairs are 0.
struct Softmax {
  Row p, keep, slope;  // rounded probability; dropout factor; d s / d (q . k)
  float lse = -kInfinity, sink = 0;
  float shift_terms = 0;  // sum of |terms| of what every score of the row lacked, by the mean of the keys
  float condition = 1;    // 1 + the largest sum of |terms| of a score: relative error of exp(s) in roundoffs
};

// exp(score - largest) and their sum, with the sink's.
struct Exponentials {
  float largest, sum = 0;
  Row exp;

  Exponentials(const Row& score, float sink) : largest(sink), exp(score.size()) {
    for (float x : score) largest = std::max(largest, x);
    if (largest == -kInfinity) return;
    sum = std::exp(sink - largest);
    for (std::size_t j = 0; j < score.size(); ++j) sum += exp[j] = std::exp(score[j] - largest);
  }
};

struct Head {
  const AttentionProblem& p;
  int64_t b, h;
  Sequence s;
  std::vector<Row> k, v;
  Row mean;  // that k lacks

  Head(const AttentionProblem& problem, int64_t batch, int64_t head, bool smooth_keys)
      : p(problem), b(batch), h(head), s(problem.sequence(batch)) {
    const int64_t kv_head = h / p.G;
    for (int64_t j = 0; j < s.sk; ++j) {
      if (p.int4) {
        k.push_back(int4_row<float>(p, b, s, j, kv_head, false));
        v.push_back(int4_row<float>(p, b, s, j, kv_head, true));
        continue;
      }
      const auto [slots, row] = p.key_slot(b, s, j);
      k.push_back(operands(p, load(p.k.at(slots, row, kv_head), p.k, p.D, p.k_scale.at(slots, row, kv_head))));
      v.push_back(operands(p, load(p.v.at(slots, row, kv_head), p.v, p.Dv, p.v_scale.at(slots, row, kv_head))));
    }
    if (int8_qk(p)) {
      QuantizedKeys quantized = quantized_keys(k, p.D, smooth_keys);
      k = std::move(quantized.rows);
      mean = std::move(quantized.mean);
    }
  }

  Row q(int64_t i) const {
    return operands(p, load(p.q.at(b, s.q_begin + i, h), p.q, p.D, p.q_scale.at(b, s.q_begin + i, h)));
  }

  Softmax softmax(int64_t i) const {
    Softmax out;
    out.p.assign(s.sk, 0);
    out.keep.assign(s.sk, 0);
    out.slope.assign(s.sk, 0);
    Row exact(s.sk, -kInfinity), score(s.sk, -kInfinity);
    Row query = q(i);
    Product shift;
    if (int8_qk(p)) {
      if (all_finite(query)) shift = product(query, mean);
      query = quantized_query(query);
    }
    out.shift_terms = p.scale * shift.terms;
    const auto range = p.key_range(s, i);
    for (int64_t j = range.begin; j < range.end; ++j) {
      if (p.mask && p.mask.as<unsigned char>()[p.mask.offset(b, h, i, j)] == 0) continue;
      if (p.draft_removes(b, s, i, j)) continue;
      const float bias = p.bias ? load_element(p.bias.data, p.bias.dtype, p.bias.offset(b, h, i, j)) : 0.0f;
      if (bias == -kInfinity) continue;
      const Product dot = product(query, k[j]);
      const float alibi = p.alibi ? p.alibi.as<float>()[p.alibi.offset(b, h, 0)] * std::abs(i + s.off - j) : 0.0f;
      exact[j] = p.scale * dot.sum;
      out.slope[j] = p.scale;
      if (p.softcap > 0) {
        const float tanh = std::tanh(exact[j] / p.softcap), saved = round_to(p.dtype, tanh);
        exact[j] = p.softcap * tanh;
        out.slope[j] = p.scale * (1 - saved * saved);
      }
      exact[j] += bias - alibi;
      score[j] = keeps_scores(p) ? exact[j] : round_to(p.dtype, exact[j]);
      out.condition = std::max(out.condition, 1 + std::abs(p.scale) * dot.terms + std::abs(alibi) + std::abs(bias));
      const bool kept = p.dropout.p == 0 || dropout_keeps(p.dropout, static_cast<std::uint32_t>(b * p.H + h),
                                                          static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(j));
      out.keep[j] = kept ? 1 / (1 - p.dropout.p) : 0;
    }
    const float lacked = p.scale * shift.sum;
    const float sink = p.sink ? p.sink.as<float>()[p.sink.offset(0, h, 0)] - lacked : -kInfinity;
    const Exponentials rounded_row(score, sink), exact_row(exact, sink);
    out.lse = exact_row.largest + std::log(exact_row.sum) + lacked;
    if (rounded_row.largest == -kInfinity) return out;
    for (int64_t j = 0; j < s.sk; ++j) out.p[j] = round_probability(p.dtype, rounded_row.exp[j] / rounded_row.sum);
    out.sink = std::exp(sink + lacked - out.lse);
    return out;
  }

  // Natural indices of row i and key j.
  int64_t row(int64_t i) const { return p.cu_seqlens_q ? s.q_begin + i : b * p.Sq + i; }
  int64_t key(int64_t j) const { return p.cu_seqlens_k ? s.k_begin + j : b * p.Sk + j; }
};

template <class Visit>
void each_head(const AttentionProblem& p, const Visit& visit, bool smooth_keys = true) {
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t h = 0; h < p.H; ++h) visit(Head(p, b, h, smooth_keys));
  }
}

float square(float x) { return x * x; }

// Natural index of the first entry of dbias that row i adds to.
int64_t bias_row(const AttentionBackwardProblem& p, int64_t b, int64_t h, int64_t i) {
  return ((b % p.bias_batch * p.bias_heads + h % p.bias_heads) * p.bias_rows + i % p.bias_rows) * p.bias_columns;
}

struct BackwardSums {
  Sums dq, dk, dv, dbias, dsink;
};

void backward_row(const AttentionBackwardProblem& p, const Head& head, int64_t i, BackwardSums& out) {
  const int64_t b = head.b, h = head.h, sk = head.s.sk;
  const Softmax softmax = head.softmax(i);
  if (softmax.lse == -kInfinity) return;
  const Row q = head.q(i), d_o = operands(p, load(p.d_o.at(b, head.s.q_begin + i, h), p.d_o, p.Dv));
  const float d_lse = p.d_lse ? p.d_lse.as<float>()[p.d_lse.offset(b, h, head.s.q_begin + i)] : 0.0f;

  Row dp(sk), dp_terms(sk), o(p.Dv);
  float delta = 0, delta_terms = 0;
  for (int64_t j = 0; j < sk; ++j) {
    if (softmax.keep[j] == 0) continue;
    const Product dot = product(d_o, head.v[j]);
    dp[j] = round_to(p.dtype, softmax.keep[j] * round_to(p.dtype, dot.sum));
    dp_terms[j] = softmax.keep[j] * dot.terms;
    delta += softmax.p[j] * dp[j];
    delta_terms += softmax.p[j] * dp_terms[j];
    for (int64_t d = 0; d < p.Dv; ++d) o[d] += softmax.p[j] * softmax.keep[j] * head.v[j][d];
  }
  float squares = 0;
  for (int64_t d = 0; d < p.Dv; ++d) {
    if (o[d] != 0) squares += square(d_o[d] * o[d]);  // a row without keys may hold anything in dO
  }
  const float delta_error = std::sqrt(squares);  // of delta = dO . O, in roundoffs of O
  Row dq_error(p.D), dbias_error(p.bias_columns);

  out.dsink.value[h] += softmax.sink * (d_lse - delta);
  out.dsink.terms[h] += softmax.condition * softmax.sink * (std::abs(d_lse) + delta_terms);
  out.dsink.delta[h] += square(softmax.sink * delta_error);
  for (int64_t j = 0; j < sk; ++j) {
    const float probability = softmax.p[j];
    if (probability == 0) continue;
    const float ds = round_to(p.dtype, probability * (dp[j] - delta + d_lse));
    const float ds_terms = softmax.condition * probability * (dp_terms[j] + delta_terms + std::abs(d_lse));
    const float scaled = operand(p, round_to(p.dtype, ds * softmax.slope[j]));
    const float scaled_terms = ds_terms * std::abs(p.scale),
                scaled_error = probability * delta_error * softmax.slope[j];
    const int64_t dq = (head.row(i) * p.H + h) * p.D, dk = (head.key(j) * p.Hkv + h / p.G) * p.D;
    for (int64_t d = 0; d < p.D; ++d) {
      out.dq.value[dq + d] += scaled * head.k[j][d];
      out.dq.terms[dq + d] += scaled_terms * std::abs(head.k[j][d]);
      dq_error[d] += scaled_error * head.k[j][d];
      out.dk.value[dk + d] += scaled * q[d];
      out.dk.terms[dk + d] += scaled_terms * std::abs(q[d]);
      out.dk.delta[dk + d] += square(scaled_error * q[d]);
    }
    const float dropped = operand(p, round_to(p.dtype, probability * softmax.keep[j]));
    const int64_t dv = (head.key(j) * p.Hkv + h / p.G) * p.Dv;
    for (int64_t d = 0; d < p.Dv; ++d) {
      out.dv.value[dv + d] += dropped * d_o[d];
      out.dv.terms[dv + d] += softmax.condition * dropped * std::abs(d_o[d]);
    }
    if (p.dbias) {
      const int64_t at = bias_row(p, b, h, i) + j % p.bias_columns;
      out.dbias.value[at] += ds;
      out.dbias.terms[at] += ds_terms;
      dbias_error[j % p.bias_columns] += probability * delta_error;
    }
  }
  for (int64_t d = 0; d < p.D; ++d) out.dq.delta[(head.row(i) * p.H + h) * p.D + d] += square(dq_error[d]);
  if (p.dbias) {
    const int64_t at = bias_row(p, b, h, i);
    for (int64_t j = 0; j < p.bias_columns; ++j) out.dbias.delta[at + j] += square(dbias_error[j]);
  }
}

}  // namespace

PlainForward plain_forward(const AttentionProblem& p, bool smooth_keys) {
  Sums o(total_rows(p) * p.H * p.Dv), lse(total_rows(p) * p.H);
  std::fill(lse.value.begin(), lse.value.end(), -kInfinity);
  each_head(
      p,
      [&](const Head& head) {
        for (int64_t i = 0; i < head.s.sq; ++i) {
          const Softmax softmax = head.softmax(i);
          const int64_t row = (head.row(i) * p.H + head.h) * p.Dv;
          for (int64_t j = 0; j < head.s.sk; ++j) {
            const float dropped = operand(p, round_probability(p.dtype, softmax.p[j] * softmax.keep[j]));
            if (dropped == 0) continue;
            for (int64_t d = 0; d < p.Dv; ++d) {
              o.value[row + d] += dropped * head.v[j][d];
              o.terms[row + d] += softmax.condition * dropped * std::abs(head.v[j][d]);
            }
          }
          const int64_t at =
              p.cu_seqlens_q ? head.h * total_rows(p) + head.s.q_begin + i : (head.b * p.H + head.h) * p.Sq + i;
          lse.value[at] = softmax.lse;
          if (softmax.lse > -kInfinity) lse.terms[at] = softmax.condition + softmax.shift_terms + std::abs(softmax.lse);
        }
      },
      smooth_keys);
  const DType o_dtype = p.dtype != DType::f8e4m3 ? p.dtype : p.o ? p.o.dtype : DType::bf16;
  PlainForward out{o.finish(o_dtype), lse.finish(DType::f32)};
  out.o.tf32 = out.lse.tf32 = tf32(p);
  return out;
}

PlainBackward plain_backward(const AttentionBackwardProblem& p) {
  const int64_t bias = p.dbias ? p.bias_batch * p.bias_heads * p.bias_rows * p.bias_columns : 0;
  BackwardSums sums{Sums(total_rows(p) * p.H * p.D), Sums(total_keys(p) * p.Hkv * p.D),
                    Sums(total_keys(p) * p.Hkv * p.Dv), Sums(bias), Sums(p.H)};
  each_head(p, [&](const Head& head) {
    for (int64_t i = 0; i < head.s.sq; ++i) backward_row(p, head, i, sums);
  });
  PlainBackward out{sums.dq.finish(p.dtype), sums.dk.finish(p.dtype), sums.dv.finish(p.dtype), {}, {}};
  if (p.dbias) out.dbias = sums.dbias.finish(p.bias.dtype);
  if (p.dsink) out.dsink = sums.dsink.finish(DType::f32);
  for (PlainTensor* x : {&out.dq, &out.dk, &out.dv, &out.dbias, &out.dsink}) x->tf32 = tf32(p);
  return out;
}

}  // namespace heddle::kit
