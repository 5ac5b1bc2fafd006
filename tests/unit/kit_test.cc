// The kit can fail: poison, guards, comparison and bounds notice what they are there to notice.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "heddle/error.h"
#include "kit/linear_table.h"
#include "kit/run_case.h"

namespace heddle::kit {
namespace {

TEST(HostTensor, LayoutsHoldTheSameValues) {
  for (Layout layout :
       {Layout::contiguous, Layout::heads_first, Layout::padded_rows, Layout::strided_dim, Layout::reversed}) {
    for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      HostTensor x = HostTensor::input(dtype, {2, 3, 2, 5}, layout);
      for (std::int64_t n = 0; n < x.elements(); ++n) EXPECT_TRUE(std::isnan(x.get(n)));
      for (std::int64_t n = 0; n < x.elements(); ++n) x.set(n, static_cast<double>(n));
      for (std::int64_t n = 0; n < x.elements(); ++n) EXPECT_EQ(x.get(n), n) << static_cast<int>(layout);
      EXPECT_EQ(x.damage(), "");
    }
  }
  HostTensor shared = HostTensor::input(DType::f32, {2, 3, 2, 5}, Layout::expanded);
  shared.set(0, 7);
  EXPECT_EQ(shared.get(5), 7);              // other head
  EXPECT_EQ(shared.get(30), 7);             // other batch
  EXPECT_TRUE(std::isnan(shared.get(10)));  // other row
}

TEST(HostTensor, DamageOutsideIsSeen) {
  for (Layout layout : {Layout::contiguous, Layout::padded_rows, Layout::strided_dim}) {
    HostTensor out = HostTensor::output(DType::f32, {2, 3, 2, 5}, layout);
    EXPECT_EQ(out.damage(), "");
    auto* first = static_cast<float*>(out.view().data);
    first[-1] = 0;
    EXPECT_NE(out.damage(), "");
  }
  HostTensor padded = HostTensor::output(DType::bf16, {3, 2, 5}, Layout::padded_rows);
  static_cast<std::uint16_t*>(padded.view().data)[5] = 0;  // the gap behind the first row
  EXPECT_NE(padded.damage(), "");
}

TEST(HostTensor, CopiesHaveMemoryOfTheirOwn) {
  HostTensor first = HostTensor::output(DType::f32, {2, 3}, Layout::padded_rows);
  first.set(4, 7);
  HostTensor copy = first;
  EXPECT_TRUE(copy.same_bits(first));
  copy.set(4, 8);
  EXPECT_EQ(first.get(4), 7);
  EXPECT_EQ(copy.get(4), 8);
  first = copy;
  copy.set(4, 9);
  EXPECT_EQ(first.get(4), 8);
  EXPECT_EQ(first.damage(), "");
}

// The plain computation is off by 0.01, in one of four orders.
Comparison compare_values(std::vector<double> out, std::vector<double> reference, DType dtype = DType::f32) {
  PlainTensor plain{{reference, reference, reference, reference}};
  for (double& x : plain.values[2]) x += std::isfinite(x) ? 0.01 : 0;
  return compare("x", out, reference, plain, {static_cast<std::int64_t>(reference.size())}, dtype, kFactor);
}

TEST(Compare, BoundIsAMultipleOfThePlainError) {
  EXPECT_TRUE(compare_values({1, 2.0399}, {1, 2}).passed);
  EXPECT_FALSE(compare_values({1, 2.0401}, {1, 2}).passed);
  const Comparison worst = compare_values({1, 2, 5}, {1, 2, 3});
  EXPECT_EQ(worst.worst, "x[2] is 5, the reference 3");
  EXPECT_DOUBLE_EQ(worst.error, 2);
}

// No less than half an ulp of the largest result, or of the largest of terms that cancel.
TEST(Compare, BoundHasNoOtherFloor) {
  const auto bound = [](double value, DType dtype, double term = 0) {
    PlainTensor plain{{{value}, {value}, {value}, {value}}, term};
    const double values[] = {value};
    return compare("x", values, values, plain, {1}, dtype, kFactor).bound;
  };
  EXPECT_EQ(bound(3, DType::f32), 4 * 0x1p-23);
  EXPECT_EQ(bound(3, DType::f16), 4 * 0x1p-10);
  EXPECT_EQ(bound(3, DType::bf16), 4 * 0x1p-7);
  EXPECT_EQ(bound(0x1p-20, DType::f16), 4 * 0x1p-25);  // subnormal
  EXPECT_EQ(bound(0, DType::f32), 0);
  EXPECT_EQ(bound(0, DType::bf16, 5), 4 * 0x1p-22);
}

TEST(Compare, FewRowsAreAllowedMore) {
  EXPECT_EQ(factor_of(1), 12);
  EXPECT_EQ(factor_of(127), 12);
  EXPECT_EQ(factor_of(128), 4);
}

// e as large as the results, and a factor by which 16 e pass.
TEST(Compare, BlindSpotsAreNamed) {
  const double reference[] = {1, 2, 3};
  const auto blind = [&](double e, double factor) {
    PlainTensor plain{{{1, 2, 3}, {1 + e, 2, 3}, {1, 2, 3}, {1, 2, 3}}};
    return blind_spots("x", reference, plain, {3}, DType::f32, factor);
  };
  EXPECT_EQ(blind(0.125, kFactor), "");
  EXPECT_EQ(blind(0.125, kFactorOfFewRows), "");
  EXPECT_EQ(blind(0.75, kFactor), "x: zeros pass; ");
  EXPECT_EQ(blind(0.125, 16), "x: 16 e in one element pass; x: 16 e in one element pass; ");
  EXPECT_EQ(blind(0.25, 16), "x: 16 e in one element pass; x: 16 e in one element pass; x: zeros pass; ");
}

TEST(Compare, InfinitiesAndNansMustMatch) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  EXPECT_TRUE(compare_values({inf, -inf, nan}, {inf, -inf, nan}).passed);
  EXPECT_FALSE(compare_values({nan, 1}, {0, 1}).passed);
  EXPECT_FALSE(compare_values({nan, 1}, {-inf, 1}).passed);
  EXPECT_FALSE(compare_values({inf, 1}, {-inf, 1}).passed);
  EXPECT_FALSE(compare_values({1e30, 1}, {inf, 1}).passed);
  EXPECT_FALSE(compare_values({0, 1}, {nan, 1}).passed);
  EXPECT_EQ(compare_values({0, nan, 9}, {0, 0, 0}).worst, "x[1] is nan, the reference 0");
}

TEST(Compare, DerivedBoundsAreHeldElementByElement) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const auto within = [](std::vector<double> out, std::vector<double> reference) {
    const auto size = static_cast<std::int64_t>(out.size());
    return compare_within("x", out, reference, {size}, [](double value) { return 0.5 * std::abs(value); });
  };
  EXPECT_TRUE(within({0, 1.5, 100}, {0, 1, 200}).passed);
  const Comparison wrong = within({100, 1.6, 9}, {200, 1, 1});
  EXPECT_FALSE(wrong.passed);
  EXPECT_EQ(wrong.worst, "x[1] is 1.6, the reference 1");
  EXPECT_DOUBLE_EQ(wrong.bound, 0.5);
  // What comes closest to its own bound, not what is off by most.
  const Comparison right = within({1000, 1.4}, {1200, 1});
  EXPECT_TRUE(right.passed);
  EXPECT_EQ(right.worst, "x[1] is 1.4, the reference 1");
  EXPECT_TRUE(within({inf, -inf}, {inf, -inf}).passed);
  EXPECT_FALSE(within({nan}, {1}).passed);
  EXPECT_FALSE(within({1}, {-inf}).passed);
  EXPECT_FALSE(within({inf}, {1}).passed);
  EXPECT_THROW(within({1, 2}, {1}), Error);
}

TEST(CaseTable, NamesAreUniqueAndSizesCovered) {
  std::set<std::string> names;
  std::set<std::int64_t> lengths, head_sizes;
  std::set<Purpose> purposes;
  for (const AttentionCase& row : attention_cases()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    lengths.insert({row.Sq, row.Sk});
    head_sizes.insert({row.D, row.Dv});
    purposes.insert(row.purpose);
  }
  for (int length : {0, 1, 3, 7, 15, 16, 17, 31, 33, 47, 48, 49, 63, 65, 95, 97, 127, 129, 191, 193, 200, 257, 4096}) {
    EXPECT_TRUE(lengths.contains(length)) << length;
  }
  for (int size : {1, 3, 5, 8, 31, 32, 33, 40, 64, 80, 96, 128, 129, 192, 256}) {
    EXPECT_TRUE(head_sizes.contains(size)) << size;
  }
  EXPECT_EQ(purposes.size(), 5u);
  EXPECT_THROW(attention_case("no_such_row"), Error);
}

// Rows that no candidate of the CPU takes, where scores are large: what is not exact leaves least of those. The tests
// of GPUs judge the bounds of all.
TEST(CaseTable, RowsOfReducedPrecisionCanFail) {
  for (const auto& rows : {in_tf32(attention_cases()), in_int8_qk(attention_cases())}) {
    for (const AttentionCase& row : rows) {
      if (row.values == Values::normal) continue;
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        if (pass == Pass::backward && !row.has_backward()) continue;
        EXPECT_EQ(CaseRunner(row).blind_spots(pass), "") << row.name;
      }
    }
  }
}

// What docs/numerics.md allows, where kernels are judged: in most cases of a tensor and dtype four times e, in none
// more than twelve.
class Factors {
 public:
  void add(const std::string& tensor, DType dtype, double factor, const std::string& row) {
    EXPECT_TRUE(factor == kFactor || factor == kFactorOfFewRows) << row << ", " << tensor << ": " << factor;
    factors_[{tensor, heddle::name_of(dtype)}].push_back(factor);
  }
  // tensors: of how many, each dtype's counted.
  void expect_four_of_most(std::size_t tensors) {
    EXPECT_EQ(factors_.size(), tensors);
    for (auto& [of, all] : factors_) {
      std::ranges::sort(all);
      EXPECT_LE(all[all.size() / 2], 4) << of.first << " of " << of.second << ", " << all.size() << " rows";
      EXPECT_LE(all.back(), 12) << of.first << " of " << of.second;
    }
  }

 private:
  std::map<std::pair<std::string, std::string>, std::vector<double>> factors_;
};

// Whether a row attends anything hangs on no element of q, k and v: heads of one element will do.
TEST(CaseTable, MostRowsAreAllowedFourTimesThePlainError) {
  Factors factors;
  for (AttentionCase row : attention_cases()) {
    row.D = row.Dv = 1;
    const CaseData data(row);
    const AttentionProblem p = data.problem();
    const double factor = allowed_factor(p, reference::attention_forward(p, default_executor()));
    const auto add = [&](const char* tensor) { factors.add(tensor, row.dtype, factor, row.name); };
    for (const char* tensor : {"o", "lse"}) add(tensor);
    if (!row.has_backward()) continue;
    for (const char* tensor : {"dq", "dk", "dv"}) add(tensor);
    if (row.bias.given) add("dbias");
    if (row.sink) add("dsink");
  }
  factors.expect_four_of_most(3 * 7 + 2);  // e4m3 has no backward
}

TEST(LinearTable, MostRowsAreAllowedFourTimesThePlainError) {
  Factors factors;
  const auto add = [&](const std::vector<NamedLinearCase>& table, const std::string& tensors) {
    for (const auto& [name, c] : table) {
      for (const char tensor : tensors) {
        if (c.norm == Norm::none && (tensor == 'w' || tensor == 'n')) continue;
        if (c.norm == Norm::rms_norm && tensor == 'n') continue;
        factors.add({tensor}, c.dtype, allowed_factor(c, tensor), name);
      }
    }
  };
  for (const auto* formats : {&kBackwardFormats, &kForwardFormats}) {
    for (const std::string& format : *formats) add(linear_forward_cases(format), "y");
  }
  for (const std::string& format : kBackwardFormats) add(linear_backward_cases(format), "xbwn");
  factors.expect_four_of_most(3 * 5);
}

// A kernel with one small mistake: exact in all else, it must still fail. Each mistake is the reference run on a case
// that differs in one option, judged as the original case.
struct Mistake {
  const char* name;
  const char* row;  // of the case table
  std::function<void(AttentionCase&)> change;
  std::function<void(CaseData&)> spoil = {};
  bool backward = true;
  bool only_f32 = false;  // too small for the bounds of 16-bit rows
};

void PrintTo(const Mistake& mistake, std::ostream* out) { *out << mistake.name; }

class Mistakes : public ::testing::TestWithParam<Mistake> {};

TEST_P(Mistakes, AreNoticed) {
  for (const char* dtype : {"_f32", "_bf16", "_f16", "_e4m3"}) {
    bool there = false;
    for (const AttentionCase& row : attention_cases()) there |= row.name == std::string(GetParam().row) + dtype;
    if (!there || (GetParam().only_f32 && std::string(dtype) != "_f32")) continue;
    const AttentionCase& spec = attention_case(std::string(GetParam().row) + dtype);
    SCOPED_TRACE(spec.name);
    const CaseData right(spec);
    AttentionCase wrong_spec = spec;
    if (GetParam().change) GetParam().change(wrong_spec);
    CaseData wrong(wrong_spec);
    if (GetParam().spoil) GetParam().spoil(wrong);

    const reference::Forward out = reference::attention_forward(wrong.problem(), default_executor());
    const reference::Forward expected = reference::attention_forward(right.problem(), default_executor());
    const double factor = allowed_factor(right.problem(), expected);
    const auto passes = [&](const std::vector<double>& found, const std::vector<double>& reference,
                            const PlainTensor& plain) {
      std::vector<double> rounded_out;
      for (double x : found) rounded_out.push_back(rounded(x, spec.o_dtype()));
      return compare("x", rounded_out, reference, plain, {static_cast<std::int64_t>(found.size())}, spec.o_dtype(),
                     factor)
          .passed;
    };
    EXPECT_FALSE(passes(out.o, expected.o, plain_forward(right.problem()).o));
    if (!GetParam().backward) continue;
    const Gradients right_outputs = right.new_gradients(), wrong_outputs = wrong.new_gradients();
    const AttentionBackwardProblem p = right.backward_problem(right_outputs);
    const reference::Backward gradient = reference::attention_backward(p, default_executor());
    const reference::Backward wrong_gradient =
        reference::attention_backward(wrong.backward_problem(wrong_outputs), default_executor());
    const PlainBackward plain = plain_backward(p, expected);
    EXPECT_FALSE(passes(wrong_gradient.dq, gradient.dq, plain.dq));
    EXPECT_FALSE(passes(wrong_gradient.dk, gradient.dk, plain.dk));
    EXPECT_FALSE(passes(wrong_gradient.dv, gradient.dv, plain.dv));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kit, Mistakes,
    ::testing::Values(
        Mistake{"causal_from_the_other_corner", "corner_bottom_right_more_rows",
                [](auto& c) { c.causal = Causal::top_left; }},
        Mistake{"no_causal", "round_s256_d64_causal", [](auto& c) { c.causal = Causal::none; }},
        Mistake{"window_one_wider", "feature_window_left", [](auto& c) { ++c.window_left; }},
        Mistake{"window_one_narrower", "feature_window_both", [](auto& c) { --c.window_right; }},
        Mistake{"rows_a_position_too_far_apart", "feature_steps_rows_causal", [](auto& c) { ++c.q_step; }},
        Mistake{"keys_a_position_too_close", "feature_steps_both", [](auto& c) { --c.key_step; }},
        Mistake{"keys_a_position_early",
                "feature_steps_keys_far",
                {},
                [](CaseData& d) {
                  for (std::int64_t b = 0; b < d.key_offset.elements(); ++b) d.key_offset.set(b, 14);
                }},
        Mistake{"no_softcap", "feature_softcap", [](auto& c) { c.softcap = 0; }},
        Mistake{"softcap_twice_as_wide", "feature_softcap_d128", [](auto& c) { c.softcap *= 2; }},
        Mistake{"slopes_of_the_next_head",
                "feature_alibi",
                {},
                [](CaseData& d) {
                  const double first = d.alibi.get(0);
                  for (std::int64_t h = 0; h + 1 < d.alibi.elements(); ++h) d.alibi.set(h, d.alibi.get(h + 1));
                  d.alibi.set(d.alibi.elements() - 1, first);
                }},
        Mistake{"no_sink",
                "feature_sink",
                {},
                [](CaseData& d) {
                  for (std::int64_t h = 0; h < d.sink.elements(); ++h) d.sink.set(h, -1e30);
                },
                true},
        Mistake{"another_dropout_mask", "feature_dropout", [](auto& c) { c.dropout = 0.21f; }},
        Mistake{"one_mask_bit",
                "feature_mask_full",
                {},
                [](CaseData& d) {
                  for (std::int64_t j = 0; j < 75; ++j) d.mask.set(j, d.mask.get(j) == 0);
                }},
        Mistake{"one_bias_row",
                "feature_bias_full",
                {},
                [](CaseData& d) {
                  for (std::int64_t j = 0; j < 75; ++j) d.bias.set(j, -d.bias.get(j));
                }},
        Mistake{"last_key_left_out",
                "odd_head_size_33_33",
                {},
                [](CaseData& d) { d.seqused_k = HostTensor::input(DType::i32, {1}), d.seqused_k.set(0, 36); }},
        Mistake{"one_key_more",
                "feature_used_keys",
                {},
                [](CaseData& d) {
                  d.seqused_k.set(0, d.seqused_k.get(0) + 1);
                  for (HostTensor* x : {&d.k, &d.v}) {
                    for (std::int64_t n = 0; n < 64; ++n) x->set((74 * 2) * 32 + n, 0.0);
                  }
                },
                true,
                true},
        Mistake{"scale_off_by_3_percent", "round_s64_d64", [](auto& c) { c.scale = 0.125f * 1.03f; }},
        Mistake{"page_swapped",
                "feature_paged_16",
                {},
                [](CaseData& d) {
                  const double page = d.page_table.get(0);
                  d.page_table.set(0, d.page_table.get(7));
                  d.page_table.set(7, page);
                },
                false},
        Mistake{"no_causal_e4m3", "feature_e4m3_causal", [](auto& c) { c.causal = Causal::none; }, {}, false},
        Mistake{"one_scale_of_k_forgotten",
                "feature_e4m3_scaled_heads",
                {},
                [](CaseData& d) { d.k_scale.set(0, 1.0); },
                false},
        Mistake{"scales_of_q_of_the_next_head",
                "feature_e4m3_scaled_heads",
                {},
                [](CaseData& d) {
                  const double first = d.q_scale.get(0);
                  for (std::int64_t h = 0; h < 3; ++h) d.q_scale.set(h, d.q_scale.get(h + 1));
                  d.q_scale.set(3, first);
                },
                false},
        Mistake{"two_dims_of_v_swapped",
                "feature_e4m3_d64",
                {},
                [](CaseData& d) {
                  for (std::int64_t n = 0; n < d.v.elements(); n += 64) {
                    const double first = d.v.get(n + 1);
                    d.v.set(n + 1, d.v.get(n + 2));
                    d.v.set(n + 2, first);
                  }
                },
                false}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace heddle::kit
