// Gradients of pieces on a GPU: from the o and lse of the longer problem, in float32 beside 16-bit operands, and added
// to what is there.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "core/check.h"
#include "gpu/device_backward.h"
#include "kernels/within_rule.h"
#include "kit/pieces.h"

namespace heddle::kit {
namespace {

using std::int64_t;

// A case and the candidate that is to serve it.
struct CaseOf {
  std::string candidate;
  AttentionCase spec;

  bool gpu_has_it() const {
    const Gpu gpu = current_gpu();
    return !gpu.name.empty() && (candidate == "sm90" ? gpu.major == 9 : gpu.major >= 8);
  }
  std::string no_gpu() const { return text("no GPU that has ", candidate); }
};

std::string name_of_case(const ::testing::TestParamInfo<CaseOf>& info) {
  return info.param.candidate + "_" + info.param.spec.name;
}

// Those that sm90 takes: in 16 bits, without steps, head sizes in multiples of 8. What is float32 becomes bfloat16.
std::vector<CaseOf> of_both(std::vector<AttentionCase> cases, const std::vector<std::string>& not_sm90) {
  std::vector<CaseOf> out;
  for (const AttentionCase& spec : cases) out.push_back({"sm80", spec});
  for (AttentionCase& spec : cases) {
    if (spec.q_step > 1 || spec.key_step > 1 || std::ranges::find(not_sm90, spec.name) != not_sm90.end()) continue;
    if (spec.dtype == DType::f32) {
      spec.dtype = DType::bf16;
      spec.name = spec.name.substr(0, spec.name.rfind("_f32")) + "_as_bf16";
    }
    spec.D = (spec.D + 7) / 8 * 8;
    spec.Dv = (spec.Dv + 7) / 8 * 8;
    out.push_back({"sm90", spec});
  }
  return out;
}

std::vector<int64_t> shape_of(const TensorView& x) { return {x.shape.begin(), x.shape.begin() + x.rank}; }

// An output in which element n is start * (n % 7 + 1).
HostTensor filled(DType dtype, const std::vector<int64_t>& shape, double start, Layout layout = Layout::contiguous) {
  HostTensor out = HostTensor::output(dtype, shape, layout);
  for (int64_t n = 0; n < out.elements(); ++n) out.set(n, start * static_cast<double>(n % 7 + 1));
  return out;
}

// An output and its mirror, read back by finish().
struct Mirrored {
  HostTensor host;
  DeviceTensor there;

  Mirrored() = default;
  explicit Mirrored(HostTensor x) : host(std::move(x)), there(host) {}
  TensorView view() const { return there.view(); }
  void finish() {
    if (host.given()) there.read(host);
  }
};

AttentionCase of_sizes(int64_t rows, int64_t keys, int64_t size, DType dtype) {
  AttentionCase spec{.B = 2, .H = 4, .Hkv = 2, .Sq = rows, .Sk = keys, .D = size, .Dv = size};
  spec.name = text("pieces_s", rows, "_d", size, "_", name_of(dtype));
  spec.dtype = dtype;
  spec.causal = Causal::top_left;
  return spec;
}

// All that goes with a piece on a GPU. o and d_o in f32: pieces are not rounded before they are merged.
std::vector<CaseOf> cut_cases() {
  std::vector<AttentionCase> cases;
  for (const char* name : {"feature_mqa_f32",
                           "feature_groups_of_3_f16",
                           "feature_lse_gradient_f32",
                           "feature_window_both_bf16",
                           "feature_window_causal_f32",
                           "feature_window_top_left_f16",
                           "feature_softcap_f32",
                           "feature_alibi_f32",
                           "feature_alibi_top_left_bf16",
                           "feature_alibi_per_batch_causal_f16",
                           "feature_bias_full_f16",
                           "feature_bias_heads_f32",
                           "feature_bias_columns_bf16",
                           "feature_mask_full_f16",
                           "feature_mask_bias_f32",
                           "feature_sink_f32",
                           "feature_sink_lse_gradient_window_f32",
                           "feature_packed_f32",
                           "feature_packed_causal_bf16",
                           "feature_packed_q_only_f32",
                           "feature_packed_k_only_f32",
                           "feature_packed_used_f32",
                           "feature_used_both_causal_f32",
                           "corner_idle_rows_f32",
                           "decode_gqa8_d128_bf16",
                           "decode_rows_2_sink_f32",
                           "feature_steps_keys_window_f32",
                           "feature_steps_rows_causal_f32",
                           "feature_steps_both_window_f32",
                           "feature_steps_packed_rows_f32",
                           "feature_steps_used_f32"}) {
    cases.push_back(attention_case(name));
  }
  cases.push_back(of_sizes(150, 230, 64, DType::bf16));
  cases.push_back(of_sizes(150, 230, 128, DType::f16));
  cases.push_back(of_sizes(700, 900, 128, DType::bf16));
  cases.push_back(of_sizes(150, 140, 256, DType::bf16));
  cases.push_back(of_sizes(90, 140, 72, DType::f16));
  cases.push_back(of_sizes(90, 140, 37, DType::bf16));
  for (AttentionCase& spec : cases) spec.float32_out = true;
  return of_both(std::move(cases),
                 {"feature_alibi_f32", "feature_alibi_top_left_bf16", "feature_alibi_per_batch_causal_f16",
                  "feature_bias_full_f16", "feature_bias_heads_f32", "feature_bias_columns_bf16",
                  "feature_mask_full_f16", "feature_mask_bias_f32"});
}

struct Sums {
  std::vector<double> dq, dk, dv, dsink;
};

// As a step of a ring has them: each piece from the longer problem's o and lse, added to float32.
void add_from_merged(const CaseData& whole, const reference::Forward& exact, const std::string& candidate,
                     bool deterministic, Sums& sums) {
  const int64_t rows[] = {0, whole.spec.Sq / 3, whole.spec.Sq};
  std::vector<int64_t> keys = {0, 1, 1, whole.spec.Sk / 2, whole.spec.Sk};
  if (whole.spec.packed_k) keys.erase(keys.begin() + 1);  // the longest of no keys cannot be said
  std::vector<Mirrored> dk, dv;                           // of each part of the keys, over all rows
  std::vector<std::vector<int64_t>> key_of;
  for (std::size_t part = 0; part < 2; ++part) {
    Mirrored dq;
    std::vector<int64_t> row_of;
    for (std::size_t n = 0; n + 1 < keys.size(); ++n) {
      const Piece piece(whole, Cut{rows[part], rows[part + 1], keys[n], keys[n + 1]});
      if (n == 0) {
        dq = Mirrored(filled(DType::f32, shape_of(piece.q.view()), 0));
        row_of = piece.row_of;
      }
      if (part == 0) {
        dk.emplace_back(filled(DType::f32, shape_of(piece.k.view()), 0));
        dv.emplace_back(filled(DType::f32, shape_of(piece.v.view()), 0));
        key_of.push_back(piece.key_of);
      }
      HostTensor o = piece.new_o(), lse = piece.new_lse();
      for (int64_t i = 0; i < o.elements(); ++i) o.set(i, exact.o[piece.whole_o(i)]);
      for (int64_t i = 0; i < lse.elements(); ++i) lse.set(i, exact.lse[piece.whole_lse(i)]);
      Mirrored dsink;
      if (whole.sink.given() && n == 1) dsink = Mirrored(HostTensor::output(DType::f32, {whole.spec.H}));

      std::vector<DeviceTensor> there;
      const auto mirror = [&](const HostTensor& host) {
        there.emplace_back(host);
        return there.back().view();
      };
      BackwardCall call{.forward = {mirror(piece.q), mirror(piece.k), mirror(piece.v), mirror(o), mirror(lse), {}},
                        .d_o = mirror(piece.d_o),
                        .d_lse = mirror(piece.d_lse),
                        .gradients = {.dq = dq.view(),
                                      .dk = dk[n].view(),
                                      .dv = dv[n].view(),
                                      .dbias = {},
                                      .dsink = dsink.view(),
                                      .accumulate = true,
                                      .merged = true}};
      call.forward.options = piece.on_gpu(true, there);
      call.forward.options.force = candidate;
      call.forward.options.deterministic = deterministic;
      call.run();
      dsink.finish();
      for (int64_t h = 0; dsink.host.given() && h < whole.spec.H; ++h) sums.dsink[h] += dsink.host.get(h);
    }
    dq.finish();
    Piece::add(dq.host, row_of, sums.dq);
    EXPECT_EQ(dq.host.damage(), "");
  }
  for (std::size_t n = 0; n < dk.size(); ++n) {
    dk[n].finish();
    dv[n].finish();
    Piece::add(dk[n].host, key_of[n], sums.dk);
    Piece::add(dv[n].host, key_of[n], sums.dv);
    EXPECT_EQ(dk[n].host.damage() + dv[n].host.damage(), "");
  }
}

class GpuBackwardPieces : public ::testing::TestWithParam<CaseOf> {};

TEST_P(GpuBackwardPieces, AddUpToTheCalls) {
  if (!GetParam().gpu_has_it()) GTEST_SKIP() << GetParam().no_gpu();
  const CaseData whole(GetParam().spec);
  SCOPED_TRACE(whole.describe());
  ASSERT_TRUE(can_be_cut(whole));
  const Gradients gradients = whole.new_gradients();
  const AttentionBackwardProblem p = whole.backward_problem(gradients);
  const reference::Forward exact = reference::attention_forward(p, default_executor());
  const reference::Backward exact_gradients = reference::attention_backward(p, default_executor());
  PlainBackward plain = plain_backward(p, exact);
  plain.dq.largest_term *= 4;  // as CaseRunner has it: a term of f32 is known to 22 bits
  plain.dk.largest_term *= 4;
  const double factor = allowed_factor(p, exact);
  for (const bool deterministic : {false, true}) {
    // Where rows or keys stand farther apart than the window is wide, there is no order of sums.
    if (deterministic && p.stepped()) continue;
    SCOPED_TRACE(deterministic ? "deterministic" : "default");
    Sums sums{std::vector<double>(exact_gradients.dq.size()), std::vector<double>(exact_gradients.dk.size()),
              std::vector<double>(exact_gradients.dv.size()), std::vector<double>(exact_gradients.dsink.size())};
    add_from_merged(whole, exact, GetParam().candidate, deterministic, sums);
    const auto expect = [](const char* name, const std::vector<double>& found, const std::vector<double>& right,
                           const PlainTensor& of_plain, double allowed) {
      expect_within_rule(name, found, right, of_plain, {std::ssize(found)}, DType::f32, allowed);
    };
    expect("dq", sums.dq, exact_gradients.dq, plain.dq, factor);
    expect("dk", sums.dk, exact_gradients.dk, plain.dk, factor);
    expect("dv", sums.dv, exact_gradients.dv, plain.dv, factor);
    if (p.dsink) expect("dsink", sums.dsink, exact_gradients.dsink, plain.dsink, kFactor);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuBackwardPieces, ::testing::ValuesIn(cut_cases()), name_of_case);

// Gradients of a call in another dtype, dq in one of its own, in another layout, or, of f32, added to `start`.
struct Written {
  DType dtype;
  double start = 0;
  Layout layout = Layout::contiguous;
  DType of_rows = dtype;

  std::vector<HostTensor> of(BackwardCase& at) const {
    std::vector<Mirrored> out;
    for (const TensorView* x : {&at.call.forward.q, &at.call.forward.k, &at.call.forward.v}) {
      const DType of = out.empty() ? of_rows : dtype;
      out.emplace_back(start != 0 && of == DType::f32 ? filled(of, shape_of(*x), start, layout)
                                                      : HostTensor::output(of, shape_of(*x), layout));
    }
    at.call.gradients.dq = out[0].view();
    at.call.gradients.dk = out[1].view();
    at.call.gradients.dv = out[2].view();
    at.call.gradients.accumulate = start != 0;
    at.call.run();
    std::vector<HostTensor> hosts;
    for (Mirrored& x : out) {
      x.finish();
      EXPECT_EQ(x.host.damage(), "");
      hosts.push_back(std::move(x.host));
    }
    return hosts;
  }
};

class GpuBackwardFloat32 : public ::testing::TestWithParam<CaseOf> {};

// The sums of one call, as they are, rounded, or added once to what is there: to the bit.
TEST_P(GpuBackwardFloat32, SameSums) {
  const auto& [candidate, spec] = GetParam();
  if (!GetParam().gpu_has_it()) GTEST_SKIP() << GetParam().no_gpu();
  BackwardCase at(spec);
  SCOPED_TRACE(at.forward.runner.data().describe());
  at.call.forward.options.force = candidate;
  at.call.forward.options.deterministic = true;
  const DType dtype = spec.dtype;
  constexpr double kStart = 0.3;
  const std::vector<HostTensor> rounded_ones = Written{dtype}.of(at), wide = Written{DType::f32}.of(at);
  for (const Layout layout : {Layout::contiguous, Layout::padded_rows, Layout::strided_dim}) {
    if (candidate == "sm90" && layout != Layout::contiguous) continue;  // it refuses rows that are not in 16 bytes
    const std::vector<HostTensor> again = Written{DType::f32, 0, layout}.of(at);
    const std::vector<HostTensor> added = Written{DType::f32, kStart, layout}.of(at);
    for (std::size_t t = 0; t < 3; ++t) {
      for (int64_t n = 0; n < wide[t].elements(); ++n) {
        const auto start = static_cast<float>(kStart * static_cast<double>(n % 7 + 1));
        const auto sum = static_cast<float>(wide[t].get(n));
        ASSERT_EQ(rounded_ones[t].get(n), rounded(sum, dtype)) << "tensor " << t << ", element " << n;
        ASSERT_EQ(static_cast<float>(again[t].get(n)), sum) << "tensor " << t << ", element " << n;
        ASSERT_EQ(static_cast<float>(added[t].get(n)), start + sum) << "tensor " << t << ", element " << n;
      }
    }
  }
  if (dtype != DType::f32) {  // dq is written beside keys' gradients that are added to
    const std::vector<HostTensor> mixed = Written{.dtype = DType::f32, .start = kStart, .of_rows = dtype}.of(at);
    const std::vector<HostTensor> added = Written{DType::f32, kStart}.of(at);
    EXPECT_TRUE(mixed[0].same_bits(rounded_ones[0]));
    EXPECT_TRUE(mixed[1].same_bits(added[1]) && mixed[2].same_bits(added[2]));
  }
  // dbias and dsink are written whatever is added to.
  at.poison();
  Written{DType::f32, kStart}.of(at);
  const Gradients others = at.read();
  at.poison();
  Written{dtype}.of(at);
  const Gradients alone = at.read();
  EXPECT_TRUE(others.dbias.same_bits(alone.dbias) && others.dsink.same_bits(alone.dsink));
}

std::vector<CaseOf> float32_cases() {
  std::vector<AttentionCase> cases;
  for (const char* name :
       {"round_s128_d128_bf16", "round_s256_d64_causal_f16", "round_s96_d80_gqa4_bf16", "round_s64_d256_f16",
        "round_s512_k32_f32", "feature_all_scores_f16", "feature_all_scores_f32", "feature_packed_all_bf16",
        "feature_bias_heads_f16", "feature_sink_lse_gradient_window_bf16", "feature_used_both_bias_f32",
        "feature_dropout_f16", "corner_idle_rows_f32", "feature_steps_keys_causal_bf16", "feature_steps_groups_f16",
        "feature_piece_causal_f16", "feature_float32_out_causal_bf16"}) {
    for (const AttentionCase& row : attention_cases()) {
      if (row.name == name) cases.push_back(row);
    }
  }
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    cases.push_back(of_sizes(150, 140, 72, dtype));
    cases.push_back(of_sizes(70, 140, 37, dtype));
  }
  // A dropout, and ALiBi beside offsets, sm90 refuses.
  return of_both(std::move(cases), {"feature_dropout_f16", "feature_all_scores_f16", "feature_all_scores_f32",
                                    "feature_packed_all_bf16", "feature_used_both_bias_f32"});
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuBackwardFloat32, ::testing::ValuesIn(float32_cases()), name_of_case);

}  // namespace
}  // namespace heddle::kit
