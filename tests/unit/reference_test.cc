// The yardstick itself: closed forms, hand-written attention patterns, and gradients against finite differences.
#include "reference/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "core/dtypes.h"
#include "kit/run_case.h"
#include "problem/philox.h"

namespace heddle::kit {
namespace {

// scale 0 and v = unit vectors: o[i, j] is the probability of key j.
AttentionCase probabilities_case(std::int64_t sq, std::int64_t sk) {
  AttentionCase c{.Sq = sq, .Sk = sk, .D = 2, .Dv = sk};
  c.scale = 0.0f;
  return c;
}

reference::Forward probabilities(const AttentionCase& c, const std::function<void(CaseData&)>& change = {}) {
  CaseData data(c);
  for (std::int64_t n = 0; n < data.v.elements(); ++n) data.v.set(n, n / (c.Hkv * c.Dv) % c.Sk == n % c.Dv ? 1 : 0);
  if (change) change(data);
  return reference::attention_forward(data.problem(), default_executor());
}

// One text for each row, '1' where a key is attended.
std::string pattern(const AttentionCase& c) {
  const reference::Forward result = probabilities(c);
  std::string out;
  for (std::int64_t i = 0; i < c.Sq; ++i) {
    if (i > 0) out += " ";
    for (std::int64_t j = 0; j < c.Sk; ++j) out += result.o[i * c.Sk + j] > 0 ? '1' : '0';
  }
  return out;
}

TEST(Reference, CausalPatterns) {
  AttentionCase c = probabilities_case(3, 5);
  EXPECT_EQ(pattern(c), "11111 11111 11111");
  c.causal = Causal::top_left;
  EXPECT_EQ(pattern(c), "10000 11000 11100");
  c.causal = Causal::bottom_right;
  EXPECT_EQ(pattern(c), "11100 11110 11111");
  c = probabilities_case(4, 2);
  c.causal = Causal::top_left;
  EXPECT_EQ(pattern(c), "10 11 11 11");
  c.causal = Causal::bottom_right;
  EXPECT_EQ(pattern(c), "00 00 10 11");
}

TEST(Reference, WindowPatterns) {
  AttentionCase c = probabilities_case(4, 4);
  c.window_left = 1, c.window_right = 0;
  EXPECT_EQ(pattern(c), "1000 1100 0110 0011");
  c.window_left = -1, c.window_right = 1;
  EXPECT_EQ(pattern(c), "1100 1110 1111 1111");
  c.window_left = 0, c.window_right = -1;
  EXPECT_EQ(pattern(c), "1111 0111 0011 0001");
  c.window_left = 1, c.window_right = 2, c.causal = Causal::bottom_right;  // causal wins on the right
  EXPECT_EQ(pattern(c), "1000 1100 0110 0011");
  c = probabilities_case(2, 5);  // without causal the window hangs at the bottom right
  c.window_left = 1, c.window_right = 0;
  EXPECT_EQ(pattern(c), "00110 00011");
  c.causal = Causal::top_left;
  EXPECT_EQ(pattern(c), "10000 11000");
  c = probabilities_case(4, 1);
  c.window_left = c.window_right = 0;
  EXPECT_EQ(pattern(c), "0 0 0 1");
}

TEST(Reference, UniformRowAndItsLse) {
  const reference::Forward result = probabilities(probabilities_case(2, 5));
  for (double p : result.o) EXPECT_DOUBLE_EQ(p, 0.2);
  for (double lse : result.lse) EXPECT_DOUBLE_EQ(lse, std::log(5.0));
}

TEST(Reference, SinkJoinsTheDenominator) {
  AttentionCase c = probabilities_case(1, 3);
  c.sink = true;
  const auto set_sink = [](CaseData& data) { data.sink.set(0, 2.5); };
  const double sum = 3 + std::exp(2.5);
  const reference::Forward result = probabilities(c, set_sink);
  for (double p : result.o) EXPECT_NEAR(p, 1 / sum, 1e-15);
  EXPECT_NEAR(result.lse[0], std::log(sum), 1e-15);

  c.mask = {true};
  c.mask_empty = true;
  const reference::Forward empty = probabilities(c, set_sink);
  for (double p : empty.o) EXPECT_EQ(p, 0);
  EXPECT_DOUBLE_EQ(empty.lse[0], 2.5);
  c.sink = false;
  EXPECT_EQ(probabilities(c).lse[0], -std::numeric_limits<double>::infinity());
}

TEST(Reference, AlibiFallsWithDistance) {
  AttentionCase c = probabilities_case(2, 3);
  c.alibi = Alibi::per_head;
  const auto slope = [](CaseData& data) { data.alibi.set(0, 0.5); };
  // off = 1: row 0 stands at key 1, row 1 at key 2.
  const double e = std::exp(-0.5), row0 = 1 + 2 * e, row1 = 1 + e + e * e;
  const std::vector<double> expected = {e / row0, 1 / row0, e / row0, e * e / row1, e / row1, 1 / row1};
  const reference::Forward result = probabilities(c, slope);
  for (int n = 0; n < 6; ++n) EXPECT_NEAR(result.o[n], expected[n], 1e-15) << n;
  c.causal = Causal::top_left;
  EXPECT_NEAR(probabilities(c, slope).o[3], e / (1 + e), 1e-15);
}

TEST(Reference, OneKeyShowsTheScore) {
  AttentionCase c{.D = 3, .Dv = 2};
  c.scale = 0.25f;
  const auto run = [](const AttentionCase& spec) {
    CaseData data(spec);
    const double q[] = {1, -2, 3}, k[] = {4, 0.5, 2}, v[] = {7, -5};  // q . k = 9
    for (int d = 0; d < 3; ++d) data.q.set(d, q[d]), data.k.set(d, k[d]);
    for (int d = 0; d < 2; ++d) data.v.set(d, v[d]);
    if (data.bias.given()) data.bias.set(0, 0.5);
    return reference::attention_forward(data.problem(), default_executor());
  };
  const reference::Forward plain = run(c);
  EXPECT_DOUBLE_EQ(plain.lse[0], 2.25);
  EXPECT_EQ(plain.o, (std::vector<double>{7, -5}));
  c.softcap = 2;
  EXPECT_NEAR(run(c).lse[0], 2 * std::tanh(1.125), 1e-15);
  c.bias = {true};
  EXPECT_NEAR(run(c).lse[0], 2 * std::tanh(1.125) + 0.5, 1e-15);
}

TEST(Reference, DropoutScalesWhatItKeeps) {
  AttentionCase c = probabilities_case(6, 16);
  c.B = 2, c.H = 3, c.Hkv = 3, c.dropout = 0.25f;
  const Dropout dropout = CaseData(c).options().dropout;
  const reference::Forward result = probabilities(c);
  int dropped = 0;
  for (std::int64_t n = 0; n < static_cast<std::int64_t>(result.o.size()); ++n) {
    const std::int64_t j = n % 16, h = n / 16 % 3, i = n / 48 % 6, b = n / 288;
    const bool kept = dropout_keeps(dropout, static_cast<std::uint32_t>(b * 3 + h), i, j);
    EXPECT_NEAR(result.o[n], kept ? 1 / (16 * 0.75) : 0, 1e-15);
    dropped += !kept;
  }
  EXPECT_GT(dropped, 0);
  EXPECT_DOUBLE_EQ(result.lse[0], std::log(16.0));  // before dropout
}

TEST(Reference, QueryHeadsReadTheirGroup) {
  AttentionCase c{.H = 6, .Hkv = 2, .Sk = 1, .D = 1, .Dv = 1};
  CaseData data(c);
  data.v.set(0, 10), data.v.set(1, 20);
  EXPECT_EQ(reference::attention_forward(data.problem(), default_executor()).o,
            (std::vector<double>{10, 10, 10, 20, 20, 20}));
}

// Paged, left-padded and indexed caches, and packed sequences, give what their sequences give alone.
class GatheredKeys : public ::testing::TestWithParam<const char*> {};

TEST_P(GatheredKeys, EqualSequencesAlone) {
  const CaseData data(attention_case(GetParam()));
  const AttentionProblem p = data.problem();
  const reference::Forward together = reference::attention_forward(p, default_executor());
  const std::int64_t total = p.cu_seqlens_q ? p.cu_seqlens_q[p.B] : 0;
  for (std::int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    AttentionCase alone = data.spec;
    alone.B = 1, alone.Sq = s.sq, alone.Sk = s.sk, alone.page_size = 0;
    alone.packed_q = alone.packed_k = alone.seqused_q = alone.seqused_k = false;
    alone.cache_batch_idx = alone.leftpad = false;
    alone.layout_q = alone.layout_k = Layout::contiguous;
    CaseData one(alone);
    if (alone.alibi != Alibi::none) one.alibi = data.alibi;
    if (alone.sink) one.sink = data.sink;
    const auto copy = [](HostTensor& to, std::int64_t at, const std::byte* from, const Operand& x, std::int64_t width) {
      for (std::int64_t d = 0; d < width; ++d) to.set(at * width + d, load_element(from, x.dtype, d * x.stride_d));
    };
    for (std::int64_t i = 0; i < s.sq; ++i) {
      for (std::int64_t h = 0; h < p.H; ++h) copy(one.q, i * p.H + h, p.q.at(b, s.q_begin + i, h), p.q, p.D);
    }
    for (std::int64_t j = 0; j < s.sk; ++j) {
      for (std::int64_t h = 0; h < p.Hkv; ++h) {
        const std::int64_t first = data.leftpad.given() ? static_cast<std::int64_t>(data.leftpad.get(b)) : 0;
        std::int64_t row = b, slot = first + j;
        if (data.page_table.given()) {
          row = static_cast<std::int64_t>(
              data.page_table.get(b * data.page_table.view().shape[1] + slot / data.spec.page_size));
          slot %= data.spec.page_size;
        } else if (data.cache_batch_idx.given()) {
          row = static_cast<std::int64_t>(data.cache_batch_idx.get(b));
        } else if (data.cu_seqlens_k.given()) {
          slot += static_cast<std::int64_t>(data.cu_seqlens_k.get(b)), row = 0;
        }
        copy(one.k, j * p.Hkv + h, p.k.at(row, slot, h), p.k, p.D);
        copy(one.v, j * p.Hkv + h, p.v.at(row, slot, h), p.v, p.Dv);
      }
    }
    const reference::Forward expected = reference::attention_forward(one.problem(), default_executor());
    for (std::int64_t i = 0; i < s.sq; ++i) {
      for (std::int64_t h = 0; h < p.H; ++h) {
        const std::int64_t row = total > 0 ? s.q_begin + i : b * p.Sq + i;
        for (std::int64_t d = 0; d < p.Dv; ++d) {
          ASSERT_EQ(together.o[(row * p.H + h) * p.Dv + d], expected.o[(i * p.H + h) * p.Dv + d]) << b << " " << i;
        }
        ASSERT_EQ(together.lse[total > 0 ? h * total + row : (b * p.H + h) * p.Sq + i], expected.lse[h * s.sq + i]);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GatheredKeys,
                         ::testing::Values("feature_paged_1_f32", "feature_paged_3_f32", "feature_paged_16_f32",
                                           "feature_paged_64_f32", "feature_paged_packed_q_f32",
                                           "feature_paged_leftpad_f32", "feature_cache_batch_idx_f32",
                                           "feature_leftpad_f32", "feature_cache_all_f32", "feature_packed_f32",
                                           "feature_packed_causal_f32", "feature_packed_used_f32",
                                           "feature_packed_k_only_f32", "feature_used_both_causal_f32"),
                         [](const auto& info) { return std::string(info.param); });

// Unused rows of outputs and gradients are exactly empty.
TEST(Reference, NothingBeyondTheUsedLengths) {
  AttentionCase c{.B = 2, .Sq = 4, .Sk = 5, .D = 2, .Dv = 2};
  c.seqused_q = c.seqused_k = c.sink = true;
  CaseData data(c);
  data.seqused_q.set(0, 2), data.seqused_q.set(1, 0), data.seqused_k.set(0, 3), data.seqused_k.set(1, 5);
  for (HostTensor* x : {&data.q, &data.k, &data.v, &data.d_o}) {
    for (std::int64_t n = 0; n < x->elements(); ++n) {
      const std::int64_t row = n / 2 % x->view().shape[1], b = n / 2 / x->view().shape[1];
      const bool keys = x == &data.k || x == &data.v;
      const bool used = row < (keys ? data.seqused_k : data.seqused_q).get(b);
      x->set(n, used ? 0.25 * static_cast<double>(n % 7) - 0.5 : std::nan(""));
    }
  }
  const reference::Forward forward = reference::attention_forward(data.problem(), default_executor());
  const Gradients gradients = data.new_gradients();
  const reference::Backward backward =
      reference::attention_backward(data.backward_problem(gradients), default_executor());
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t i = 0; i < 4; ++i) {
      const bool used = i < data.seqused_q.get(b);
      EXPECT_EQ(std::isfinite(forward.lse[b * 4 + i]), used);
      for (std::int64_t d = 0; d < 2; ++d) {
        EXPECT_EQ(forward.o[(b * 4 + i) * 2 + d] != 0, used);
        EXPECT_EQ(backward.dq[(b * 4 + i) * 2 + d] != 0, used);
      }
    }
    for (std::int64_t j = 0; j < 5; ++j) {
      const bool used = b == 0 && j < 3;  // sequence 1 has keys but no row
      for (std::int64_t d = 0; d < 2; ++d) EXPECT_EQ(backward.dv[(b * 5 + j) * 2 + d] != 0, used);
    }
  }
}

}  // namespace
}  // namespace heddle::kit
