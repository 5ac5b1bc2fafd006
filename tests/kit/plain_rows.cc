#include "kit/plain_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kit/quantized_heads.h"
#include "problem/int4_rows.h"
#include "problem/philox.h"

namespace heddle::kit {
namespace {

using std::int64_t;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504088896f, kLn2 = 0.693147180559945f;
constexpr int kTile = 128;  // keys that share the largest scale of v, and whose e4m3 products tensor cores sum

bool tf32(const AttentionProblem& p) { return p.dtype == DType::f32 && p.precision == Precision::tf32; }
bool int8_qk(const AttentionProblem& p) { return p.precision == Precision::int8_qk; }

// To 11 significant bits as sm80 does under Precision::tf32: an error of at most 2/3 of the last place.
float cut_to_tf32(float x) {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x * (1.0f + 0x1p-10f / 3)) & 0xffffe000u);
}

Row load(const std::byte* row, const Operand& x, int64_t width, float scale = 1) {
  Row out(width);
  for (int64_t d = 0; d < width; ++d) out[d] = scale * load_element(row, x.dtype, d * x.stride_d);
  return out;
}

// What scores of keys [begin, end) have added: bias less ALiBi; -inf where a pair is removed.
Row additions(const AttentionProblem& p, const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t begin,
              int64_t end) {
  Row out(end - begin);
  for (int64_t j = begin; j < end; ++j) {
    float& x = out[j - begin];
    if (p.bias) x = load_element(p.bias.data, p.bias.dtype, p.bias.offset(b, h, i, s.key_offset + j));
    if (p.alibi && x > -kInfinity) x -= p.alibi.as<float>()[p.alibi.offset(b, h, 0)] * std::abs(i + s.off - j);
    const bool masked = p.mask && p.mask.as<unsigned char>()[p.mask.offset(b, h, i, s.key_offset + j)] == 0;
    if (masked || p.draft_removes(b, s, i, j)) x = -kInfinity;
  }
  return out;
}

// q . k for keys [begin, end) where q times a key's scale is rounded to f16, as products over 4 bits have it.
void int4_products(const AttentionProblem& p, const Summation& how, const PlainKeys& keys, int64_t b, int64_t kv_head,
                   const Row& query, int64_t begin, int64_t end, float* out) {
  const int64_t blocks = int4_blocks(keys.s.k_begin + keys.s.sk);
  const Int4Block format{p.D, p.Dv};
  for (int64_t j = begin; j < end; ++j) {
    const int64_t slot = keys.s.k_begin + j;
    Row terms(p.D);
    for (int64_t d = 0; d < p.D; ++d) {
      const float k = keys.k.row(j)[d];
      terms[d] = query[d] * k;
      if (slot / kInt4Keys >= blocks) continue;
      const std::byte* block = p.int4_block(b, slot / kInt4Keys, kv_head);
      const auto half = [&](int64_t at) { return load_element(block + at, DType::f16, 0); };
      const float scale = half(format.k_scales() + 2 * d), zero = half(format.k_zeros() + 2 * d);
      const float code = scale != 0 ? std::nearbyint((k - zero) / scale) : 0;
      terms[d] = query[d] * zero + round_to(DType::f16, query[d] * scale) * code;
    }
    const float one = 1;
    sum_products(how, p.D, &one, 0, terms.data(), 1, 1, out + (j - begin));
  }
}

}  // namespace

float rounded_to_tf32(float x) {
  if (!std::isfinite(x)) return x;
  int exponent = 0;
  const float mantissa = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, 11)), exponent - 11);
}

float operand(const AttentionProblem& p, const Arithmetic& how, float x) {
  return !tf32(p) ? x : how.fused ? cut_to_tf32(x) : rounded_to_tf32(x);
}

Row operands(const AttentionProblem& p, const Arithmetic& how, Row row) {
  if (tf32(p)) {
    for (float& x : row) x = operand(p, how, x);
  }
  return row;
}

Summation sums_of_values(const AttentionProblem& p, const Arithmetic& how) {
  if (how.order != Order::blocks) return {how.order};
  if (p.dtype == DType::f8e4m3) return {how.order, 13, 32, kTile};
  if (p.dtype != DType::f32) return {how.order, 24, 16};
  return tf32(p) ? Summation{how.order, 24, 8} : Summation{how.order};
}

Summation sums_of_scores(const AttentionProblem& p, const Arithmetic& how) {
  Summation out = int8_qk(p) ? Summation{how.order} : sums_of_values(p, how);
  out.fma = p.dtype == DType::f32 && !tf32(p);
  return out;
}

Rows32 Rows32::transposed() const {
  Rows32 out(columns, rows());
  for (int64_t n = 0; n < rows(); ++n) {
    for (int64_t c = 0; c < columns; ++c) out.row(c)[n] = row(n)[c];
  }
  return out;
}

PlainKeys::PlainKeys(const AttentionProblem& p, const Arithmetic& how, int64_t b, int64_t kv_head)
    : s(p.sequence(b)), k(s.sk, p.D), v(s.sk, p.Dv), k_columns(0, 0), v_columns(0, 0), v_share(s.sk, 1.0f) {
  const bool shares = p.dtype == DType::f8e4m3 && how.fused && p.v_scale;
  std::vector<Row> keys;
  for (int64_t j = 0; j < s.sk; ++j) {
    Row key, value;
    if (p.int4) {
      key = int4_row<float>(p, b, s, j, kv_head, false);
      value = int4_row<float>(p, b, s, j, kv_head, true);
    } else {
      const auto [slots, row] = p.key_slot(b, s, j);
      key = operands(p, how, load(p.k.at(slots, row, kv_head), p.k, p.D, p.k_scale.at(slots, row, kv_head)));
      v_share[j] = shares ? p.v_scale.at(slots, row, kv_head) : 1;
      const float scale = shares ? 1 : p.v_scale.at(slots, row, kv_head);
      value = operands(p, how, load(p.v.at(slots, row, kv_head), p.v, p.Dv, scale));
    }
    std::copy(value.begin(), value.end(), v.row(j));
    keys.push_back(std::move(key));
  }
  for (int64_t tile = 0; shares && tile < s.sk; tile += kTile) {
    const auto begin = v_share.begin() + tile, end = v_share.begin() + std::min(tile + kTile, s.sk);
    const float largest = *std::max_element(begin, end);
    for (auto share = begin; share != end; ++share) {
      const int64_t j = share - v_share.begin();
      *share /= largest;
      for (int64_t d = 0; d < p.Dv; ++d) v.row(j)[d] *= largest;
    }
  }
  if (int8_qk(p)) {
    QuantizedKeys quantized = quantized_keys(keys, p.D, how.fault != Fault::unsmoothed_keys);
    keys = std::move(quantized.rows);
    mean = std::move(quantized.mean);
  }
  for (int64_t j = 0; j < s.sk; ++j) std::copy(keys[j].begin(), keys[j].end(), k.row(j));
  k_columns = k.transposed();
  v_columns = v.transposed();
}

Row plain_query(const AttentionProblem& p, const Arithmetic& how, const Sequence& s, int64_t b, int64_t h, int64_t i) {
  return operands(p, how, load(p.q.at(b, s.q_begin + i, h), p.q, p.D, p.q_scale.at(b, s.q_begin + i, h)));
}

bool PlainSoftmax::empty() const { return lse == -kInfinity; }
float PlainSoftmax::from_lse(int64_t n, float lse) const {
  if (p[n] == 0) return 0;  // also of pairs that are removed
  return fused ? std::exp2(static_cast<float>(score[n] - static_cast<double>(lse * kLog2e)))
               : std::exp(static_cast<float>(score[n]) - lse);
}

PlainSoftmax plain_softmax(const AttentionProblem& p, const Arithmetic& how, const PlainKeys& keys, int64_t b,
                           int64_t h, int64_t i, const Row& row) {
  const Sequence& s = keys.s;
  const auto range = p.band(s).keys_of(i);
  const int64_t width = range.end - range.begin;
  PlainSoftmax out{.begin = range.begin,
                   .end = range.end,
                   .p = Row(width),
                   .keep = Row(width),
                   .slope = Row(width),
                   .score = std::vector<double>(width, -kInfinity),
                   .fused = how.fused};
  Row query = row;
  float shift = 0;
  if (int8_qk(p)) {
    if (all_finite(query)) {
      sum_products({how.order}, p.D, query.data(), 1, keys.mean.data(), 1, 1, &shift);
      shift *= p.scale;
    }
    query = quantized_query(query);
  }
  Row dot(width), added = additions(p, s, b, h, i, range.begin, range.end);
  // Fused: in units of log 2, so that one instruction raises 2 to them.
  const float unit = how.fused ? kLog2e : 1.0f;
  // Some kernels in f32 scale q, others scores.
  const bool scaled = p.dtype == DType::f32 && !tf32(p) && p.softcap == 0 && how.scales_query();
  for (float& x : query) x *= scaled ? p.scale * unit : 1;
  const float factor = scaled ? 1 : p.scale * unit;
  const Summation sums = sums_of_scores(p, how);
  if (p.int4 && how.rounds_int4_query && how.fused) {
    int4_products(p, sums, keys, b, h / p.G, query, range.begin, range.end, dot.data());
  } else {
    if (how.fault == Fault::scores_in_tf32) {
      for (float& x : query) x = rounded_to_tf32(x);
    }
    sum_products(sums, p.D, query.data(), 1, keys.k_columns.values.data() + range.begin, s.sk, width, dot.data());
  }
  const auto raised = [&](float x) { return how.fused ? std::exp2(x) : std::exp(x); };
  float largest = p.sink ? p.sink.as<float>()[p.sink.offset(0, h, 0)] - shift : -kInfinity;
  largest *= unit;
  const float sink = largest;
  for (int64_t n = 0; n < width; ++n) {
    if (added[n] == -kInfinity) continue;
    out.slope[n] = p.scale;
    if (p.softcap > 0) {
      const float tanh = std::tanh(p.scale * dot[n] / p.softcap);
      out.score[n] = (p.softcap * tanh + added[n]) * unit;
      out.slope[n] = p.scale * (1 - tanh * tanh);
    } else if (how.fused && !p.bias && !p.alibi) {
      out.score[n] = static_cast<double>(dot[n]) * static_cast<double>(factor);
    } else {
      out.score[n] = factor * dot[n] + unit * added[n];
    }
    const int64_t j = range.begin + n;
    const bool kept = p.dropout.p == 0 || dropout_keeps(p.dropout, static_cast<std::uint32_t>(b * p.H + h),
                                                        static_cast<std::uint32_t>(s.q_offset + i),
                                                        static_cast<std::uint32_t>(s.key_offset + j));
    out.keep[n] = kept ? 1 / (1 - p.dropout.p) : 0;
    largest = std::max(largest, static_cast<float>(out.score[n]));
  }
  if (largest == -kInfinity) {
    out.lse = -kInfinity;
    return out;
  }
  for (int64_t n = 0; n < width; ++n) {
    if (added[n] != -kInfinity) out.p[n] = raised(static_cast<float>(out.score[n] - static_cast<double>(largest)));
  }
  const float exp_of_sink = raised(sink - largest), total = sum(how.order, out.p) + exp_of_sink;
  out.lse = (how.fused ? (largest + std::log2(total)) * kLn2 : largest + std::log(total)) + shift;
  out.sink = exp_of_sink / total;
  if (how.fused) {
    out.sum = total;
  } else {
    for (float& x : out.p) x /= total;
  }
  return out;
}

}  // namespace heddle::kit
