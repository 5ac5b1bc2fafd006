#include "kit/yardstick.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/dtypes.h"

namespace heddle::kit {
namespace {

using std::int64_t;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t total_rows(const AttentionProblem& p) { return p.cu_seqlens_q ? p.cu_seqlens_q[p.B] : p.B * p.Sq; }
int64_t total_keys(const AttentionProblem& p) { return p.cu_seqlens_k ? p.cu_seqlens_k[p.B] : p.B * p.Sk; }

// Natural indices of row i and of key j of sequence b.
int64_t row_index(const AttentionProblem& p, const Sequence& s, int64_t b, int64_t i) {
  return p.cu_seqlens_q ? s.q_begin + i : b * p.Sq + i;
}
int64_t key_index(const AttentionProblem& p, const Sequence& s, int64_t b, int64_t j) {
  return p.cu_seqlens_k ? s.k_begin + j : b * p.Sk + j;
}
int64_t lse_index(const AttentionProblem& p, const Sequence& s, int64_t b, int64_t h, int64_t i) {
  return p.cu_seqlens_q ? h * total_rows(p) + s.q_begin + i : (b * p.H + h) * p.Sq + i;
}

DType o_dtype(const AttentionProblem& p) {
  if (p.float32_out) return DType::f32;
  return p.dtype != DType::f8e4m3 ? p.dtype : p.o ? p.o.dtype : DType::bf16;
}

// P (keep included) as it enters P V.
Row weights(const AttentionProblem& p, const Arithmetic& how, const PlainKeys& keys, const PlainSoftmax& softmax) {
  Row out(softmax.p.size());
  for (std::size_t n = 0; n < out.size(); ++n) {
    float x = softmax.p[n];
    if (p.dtype == DType::f8e4m3) {
      x = round_to(p.dtype, 256 * x * softmax.keep[n] * keys.v_share[softmax.begin + n]) / 256;
    } else if (how.fused) {
      x = round_to(p.dtype, x * softmax.keep[n]);
    } else {
      x = round_to(p.dtype, round_to(p.dtype, x) * softmax.keep[n]);
    }
    out[n] = operand(p, how, x);
    if (how.fault == Fault::values_in_tf32) out[n] = rounded_to_tf32(out[n]);
  }
  return out;
}

// A row of O, not yet rounded.
Row output(const AttentionProblem& p, const Arithmetic& how, const PlainKeys& keys, const PlainSoftmax& softmax) {
  const Row weight = weights(p, how, keys, softmax);
  Row out(p.Dv);
  sum_products(sums_of_values(p, how), static_cast<int64_t>(weight.size()), weight.data(), 1, keys.v.row(softmax.begin),
               p.Dv, p.Dv, out.data());
  for (float& x : out) x /= softmax.sum;
  return out;
}

// Sequences, kv heads and rows, the last first where sums go backward.
template <class Visit>
void each(Order order, int64_t count, const Visit& visit) {
  for (int64_t n = 0; n < count; ++n) visit(order == Order::backward ? count - 1 - n : n);
}

std::vector<double> rounded_values(const std::vector<float>& values, DType dtype) {
  std::vector<double> out(values.size());
  for (std::size_t n = 0; n < out.size(); ++n) out[n] = round_to(dtype, values[n]);
  return out;
}

struct ForwardValues {
  std::vector<float> o, lse;
};

ForwardValues forward_values(const AttentionProblem& p, const Arithmetic& how) {
  ForwardValues out{std::vector<float>(total_rows(p) * p.H * p.Dv),
                    std::vector<float>(total_rows(p) * p.H, -kInfinity)};
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t kv_head = 0; kv_head < p.Hkv; ++kv_head) {
      const PlainKeys keys(p, how, b, kv_head);
      const Sequence& s = keys.s;
      for (int64_t h = kv_head * p.G; h < (kv_head + 1) * p.G; ++h) {
        for (int64_t i = 0; i < s.sq; ++i) {
          const PlainSoftmax softmax = plain_softmax(p, how, keys, b, h, i, plain_query(p, how, s, b, h, i));
          out.lse[lse_index(p, s, b, h, i)] = softmax.lse;
          if (softmax.empty()) continue;
          const Row o = output(p, how, keys, softmax);
          float* place = &out.o[(row_index(p, s, b, i) * p.H + h) * p.Dv];
          for (int64_t d = 0; d < p.Dv; ++d) place[d] = round_to(o_dtype(p), o[d]);
        }
      }
    }
  }
  return out;
}

struct BackwardValues {
  std::vector<float> dq, dk, dv;
  ElementSums dbias, dsink;
  float dq_term = 0, dk_term = 0;  // the largest of what cancels: P dP times an element of k, of q
};

// What the rows of one group of heads add to dk and dv: dS and P as they enter products, one row for each (head, row).
struct GroupRows {
  Rows32 ds, p, q, d_o;

  GroupRows(const AttentionProblem& problem, const Sequence& s)
      : ds(problem.G * s.sq, s.sk), p(ds), q(problem.G * s.sq, problem.D), d_o(problem.G * s.sq, problem.Dv) {}
};

float largest_of(const float* row, int64_t width) {
  float largest = 0;
  for (int64_t d = 0; d < width; ++d) largest = std::max(largest, std::abs(row[d]));
  return largest;
}

// Another than that of dP, as another kernel computes it.
Order order_of_delta(Order order) {
  switch (order) {
    case Order::forward:
      return Order::blocks;
    case Order::backward:
      return Order::forward;
    case Order::blocks:
      return Order::lanes;
    default:
      return Order::backward;
  }
}

// Natural index of the first entry of dbias that row i adds to.
int64_t bias_row(const AttentionBackwardProblem& p, int64_t b, int64_t h, int64_t i) {
  return ((b % p.bias_batch * p.bias_heads + h % p.bias_heads) * p.bias_rows + i % p.bias_rows) * p.bias_columns;
}

// forward: what a fused backward is given.
void backward_row(const AttentionBackwardProblem& p, const Arithmetic& how, const PlainKeys& keys,
                  const ForwardValues& forward, int64_t b, int64_t h, int64_t i, GroupRows& group,
                  BackwardValues& out) {
  const Sequence& s = keys.s;
  const int64_t at = (h % p.G) * s.sq + i;
  const Row q = plain_query(p, how, s, b, h, i);
  const PlainSoftmax softmax = plain_softmax(p, how, keys, b, h, i, q);
  if (softmax.empty()) return;
  const std::byte* row = p.d_o.at(b, s.q_begin + i, h);
  Row d_o(p.Dv), exact_d_o(p.Dv);
  for (int64_t d = 0; d < p.Dv; ++d) {
    exact_d_o[d] = load_element(row, p.d_o.dtype, d * p.d_o.stride_d);
    d_o[d] = operand(p, how, round_to(p.dtype, exact_d_o[d]));
  }
  const float d_lse = p.d_lse ? p.d_lse.as<float>()[p.d_lse.offset(b, h, s.q_begin + i)] : 0.0f;
  const float lse = forward.lse[lse_index(p, s, b, h, i)];
  const int64_t width = softmax.end - softmax.begin;

  Row dp(width), probability(width), kept(width);
  Row times_v = d_o;
  if (how.fault == Fault::gradients_in_tf32) {
    for (float& x : times_v) x = rounded_to_tf32(x);
  }
  sum_products(sums_of_values(p, how), p.Dv, times_v.data(), 1, keys.v_columns.values.data() + softmax.begin, s.sk,
               width, dp.data());
  for (int64_t n = 0; n < width; ++n) {
    dp[n] = softmax.keep[n] == 0 ? 0 : dp[n] * softmax.keep[n];
    probability[n] = softmax.from_lse(n, lse);
    kept[n] = operand(p, how, round_to(p.dtype, probability[n] * softmax.keep[n]));
  }
  float delta = 0;
  const float* o = &forward.o[(row_index(p, s, b, i) * p.H + h) * p.Dv];
  for (int64_t d = 0; d < p.Dv; ++d) {
    if (o[d] == 0) exact_d_o[d] = 0;  // a row without keys may hold anything in dO
  }
  sum_products({order_of_delta(how.order)}, p.Dv, o, 1, exact_d_o.data(), 1, 1, &delta);
  out.dsink.add(h, i, softmax.sink * (d_lse - delta));

  std::copy(q.begin(), q.end(), group.q.row(at));
  std::copy(d_o.begin(), d_o.end(), group.d_o.row(at));
  std::copy(kept.begin(), kept.end(), group.p.row(at) + softmax.begin);
  float* ds = group.ds.row(at) + softmax.begin;
  for (int64_t n = 0; n < width; ++n) {
    if (probability[n] == 0) continue;
    const float gradient = probability[n] * (dp[n] - delta + d_lse);
    if (p.dbias) out.dbias.add(bias_row(p, b, h, i) + (s.key_offset + softmax.begin + n) % p.bias_columns, i, gradient);
    ds[n] = operand(p, how, round_to(p.dtype, gradient * softmax.slope[n]));
    const float term = std::abs(probability[n] * dp[n] * softmax.slope[n]);
    out.dq_term = std::max(out.dq_term, term * largest_of(keys.k.row(softmax.begin + n), p.D));
    out.dk_term = std::max(out.dk_term, term * largest_of(q.data(), p.D));
  }
  sum_products(sums_of_values(p, how), width, ds, 1, keys.k.row(softmax.begin), p.D, p.D,
               &out.dq[(row_index(p, s, b, i) * p.H + h) * p.D]);
}

BackwardValues backward_values(const AttentionBackwardProblem& p, const Arithmetic& how, const ForwardValues& forward) {
  const int64_t bias = p.dbias ? p.bias_batch * p.bias_heads * p.bias_rows * p.bias_columns : 0;
  BackwardValues out{std::vector<float>(total_rows(p) * p.H * p.D), std::vector<float>(total_keys(p) * p.Hkv * p.D),
                     std::vector<float>(total_keys(p) * p.Hkv * p.Dv), ElementSums(how.order, bias),
                     ElementSums(how.order, p.H)};
  each(how.order, p.B, [&](int64_t b) {
    each(how.order, p.Hkv, [&](int64_t kv_head) {
      const PlainKeys keys(p, how, b, kv_head);
      const Sequence& s = keys.s;
      GroupRows group(p, s);
      each(how.order, p.G, [&](int64_t g) {
        each(how.order, s.sq,
             [&](int64_t i) { backward_row(p, how, keys, forward, b, kv_head * p.G + g, i, group, out); });
        out.dbias.flush();
        out.dsink.flush();
      });
      const int64_t rows = p.G * s.sq;
      for (int64_t j = 0; j < s.sk && rows > 0; ++j) {
        const int64_t at = key_index(p, s, b, j) * p.Hkv + kv_head;
        const Summation sums = sums_of_values(p, how);
        sum_products(sums, rows, group.ds.values.data() + j, s.sk, group.q.row(0), p.D, p.D, &out.dk[at * p.D]);
        sum_products(sums, rows, group.p.values.data() + j, s.sk, group.d_o.row(0), p.Dv, p.Dv, &out.dv[at * p.Dv]);
      }
    });
  });
  return out;
}

// Half of them as unfused programs compute and half as fused ones do.
Arithmetic arithmetic(Order order, Fault fault) {
  return {order, order == Order::backward || order == Order::blocks, fault};
}

// What a fused backward is given: the reference's o and lse, rounded, as the kernels under test are. In tf32 those of a
// forward that rounds operands alike: P of scores that are rounded otherwise than those in lse would be off by more.
ForwardValues given_forward(const AttentionProblem& p, const Arithmetic& how, const reference::Forward& exact) {
  if (p.dtype == DType::f32 && p.precision == Precision::tf32) return forward_values(p, how);
  ForwardValues out{{}, {exact.lse.begin(), exact.lse.end()}};
  out.o.reserve(exact.o.size());
  for (const double x : exact.o) out.o.push_back(round_to(o_dtype(p), static_cast<float>(x)));
  return out;
}

}  // namespace

double allowed_factor(const AttentionProblem& p, const reference::Forward& exact) {
  if (p.precision == Precision::int8_qk) return kFactorOfCodes;
  return factor_of(std::ranges::count_if(exact.lse, [](double lse) { return lse > -kInfinity; }));
}

PlainForward plain_forward(const AttentionProblem& p, Fault fault, bool rounds_int4_query) {
  PlainForward out;
  for (const Order order : kOrders) {
    Arithmetic how = arithmetic(order, fault);
    how.rounds_int4_query = rounds_int4_query;
    const ForwardValues values = forward_values(p, how);
    out.o.values.emplace_back(values.o.begin(), values.o.end());
    out.lse.values.emplace_back(values.lse.begin(), values.lse.end());
  }
  return out;
}

PlainBackward plain_backward(const AttentionBackwardProblem& p, const reference::Forward& exact, Fault fault) {
  PlainBackward out;
  for (const Order order : kOrders) {
    const Arithmetic how = arithmetic(order, fault);
    const ForwardValues forward = given_forward(p, how, exact);
    BackwardValues values = backward_values(p, how, forward);
    out.dq.values.push_back(rounded_values(values.dq, p.dtype));
    out.dk.values.push_back(rounded_values(values.dk, p.dtype));
    out.dv.values.push_back(rounded_values(values.dv, p.dtype));
    out.dq.largest_term = std::max<double>(out.dq.largest_term, values.dq_term);
    out.dk.largest_term = std::max<double>(out.dk.largest_term, values.dk_term);
    if (p.dbias) out.dbias.values.push_back(rounded_values(values.dbias.finish(), p.bias.dtype));
    if (p.dsink) out.dsink.values.push_back(rounded_values(values.dsink.finish(), DType::f32));
  }
  return out;
}

}  // namespace heddle::kit
