// Calls cut into pieces by rows and by keys: the pieces, each with positions of its own, merged, are the call, and so
// are their gradients, by the reference in doubles and by the rule that judges every kernel.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "heddle/partial.h"
#include "kernels/candidates.h"
#include "kernels/within_rule.h"
#include "kit/pieces.h"

namespace heddle::kit {
namespace {

using std::int64_t;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Rows of the table: causal from either corner, windows, ALiBi, bias and mask over any extents, softcap, dropout, heads
// in groups, packed and used lengths, sinks, gradients of lse, rows without keys and keys without rows that hold NaN,
// few rows against many keys, rows and keys that stand for several positions. Sinks in f32: dsink of an o whose P were
// rounded to 16 bits is off by what that o is, and the rule's bound is found from the reference's.
const char* const kCases[] = {
    "feature_mqa_f32",
    "feature_groups_of_3_f16",
    "feature_lse_gradient_f32",
    "feature_window_left_f32",
    "feature_window_both_bf16",
    "feature_window_causal_f32",
    "feature_window_top_left_f16",
    "feature_softcap_f32",
    "feature_alibi_f32",
    "feature_alibi_per_batch_causal_f32",
    "feature_alibi_top_left_bf16",
    "feature_bias_full_f32",
    "feature_bias_rows_columns_f32",
    "feature_bias_heads_f32",
    "feature_bias_columns_f32",
    "feature_bias_rows_f32",
    "feature_bias_scalar_f32",
    "feature_mask_full_f16",
    "feature_mask_columns_f32",
    "feature_mask_bias_f32",
    "feature_sink_f32",
    "feature_sink_lse_gradient_window_f32",
    "feature_dropout_f16",
    "feature_dropout_causal_odd_f32",
    "feature_packed_f32",
    "feature_packed_causal_bf16",
    "feature_packed_q_only_f32",
    "feature_packed_k_only_f32",
    "feature_packed_used_f32",
    "feature_used_both_causal_f32",
    "feature_used_both_bias_f32",
    "feature_packed_encoder_f32",
    "corner_idle_rows_f32",
    "corner_idle_rows_mask_bf16",
    "corner_unattended_keys_window_f32",
    "corner_unattended_keys_bias_f32",
    "decode_gqa8_d128_f32",
    "decode_gqa8_d128_bf16",
    "decode_rows_2_sink_f32",
    "decode_window_f32",
    "decode_bias_mask_f32",
    "decode_packed_f32",
    "feature_steps_keys_window_f32",
    "feature_steps_rows_causal_f32",
    "feature_steps_both_window_f32",
    "feature_steps_packed_rows_f32",
    "feature_steps_used_f32",
    "feature_steps_few_rows_f32",
};

// o in f32, so that pieces are not rounded before they are merged.
AttentionCase unrounded(const std::string& name) {
  AttentionCase spec = attention_case(name);
  spec.float32_out = true;
  return spec;
}

// Of rows: two parts. Of keys: a single key, none at all, and what is left in two parts.
std::vector<int64_t> row_cuts(const AttentionCase& c) { return {0, c.Sq / 3, c.Sq}; }
std::vector<int64_t> key_cuts(const AttentionCase& c) { return {0, 1, 1, c.Sk / 2, c.Sk}; }

std::vector<Piece> pieces_of(const CaseData& whole, std::size_t row_part) {
  const std::vector<int64_t> rows = row_cuts(whole.spec), keys = key_cuts(whole.spec);
  std::vector<Piece> pieces;
  for (std::size_t n = 0; n + 1 < keys.size(); ++n) {
    pieces.emplace_back(whole, Cut{rows[row_part], rows[row_part + 1], keys[n], keys[n + 1]});
  }
  return pieces;
}

std::vector<int64_t> shape_of(const HostTensor& x) {
  return {x.view().shape.begin(), x.view().shape.begin() + x.view().rank};
}

// Results of the pieces of the same rows, and what they are together.
struct MergedRows {
  std::vector<HostTensor> o, lse;
  HostTensor merged_o, merged_lse;

  MergedRows(const CaseData& whole, const std::vector<Piece>& pieces, const std::string& candidate)
      : merged_o(pieces[0].new_o()), merged_lse(pieces[0].new_lse()) {
    for (const Piece& piece : pieces) {
      piece.forward(candidate, o.emplace_back(piece.new_o()), lse.emplace_back(piece.new_lse()));
    }
    merge_attention(partials(), merged_o.view(), merged_lse.view(), {.sink = whole.sink.view()});
  }
  std::vector<Partial> partials() const {
    std::vector<Partial> out;
    for (std::size_t n = 0; n < o.size(); ++n) out.push_back({o[n].view(), lse[n].view()});
    return out;
  }
};

HostTensor zeros_like(const HostTensor& x, DType dtype) {
  HostTensor out = HostTensor::output(dtype, shape_of(x));
  for (int64_t n = 0; n < out.elements(); ++n) out.set(n, 0);
  return out;
}

class AttentionPieces : public ::testing::TestWithParam<const char*> {
 protected:
  AttentionPieces() : whole_(unrounded(GetParam())) {}

  void expect(const char* name, const std::vector<double>& found, const std::vector<double>& exact,
              const PlainTensor& plain, double factor) const {
    expect_within_rule(name, found, exact, plain, {std::ssize(found)}, DType::f32, factor);
  }
  const reference::Forward& exact() {
    if (exact_.lse.empty()) exact_ = reference::attention_forward(whole_.problem(), default_executor());
    return exact_;
  }
  double factor() { return allowed_factor(whole_.problem(), exact()); }

  const CaseData whole_;

 private:
  reference::Forward exact_;
};

TEST_P(AttentionPieces, MergedAreTheCall) {
  SCOPED_TRACE(whole_.describe());
  ASSERT_TRUE(can_be_cut(whole_));
  const PlainForward plain = plain_forward(whole_.problem());
  on_each_quick_target([&] {
    for (const char* candidate : {"cpu", "cpu_baseline", "reference"}) {
      SCOPED_TRACE(candidate);
      std::vector<double> o(exact().o.size()), lse(exact().lse.size());
      for (std::size_t part = 0; part < 2; ++part) {
        const std::vector<Piece> pieces = pieces_of(whole_, part);
        const MergedRows rows(whole_, pieces, candidate);
        for (int64_t n = 0; n < rows.merged_o.elements(); ++n) o[pieces[0].whole_o(n)] = rows.merged_o.get(n);
        for (int64_t n = 0; n < rows.merged_lse.elements(); ++n) {
          const int64_t at = pieces[0].whole_lse(n);
          lse[at] = rows.merged_lse.get(n);
          // A row that is not used is a row without keys to the merge, which knows no lengths: its lse is the sink.
          if (whole_.seqused_q.given() && whole_.sink.given() && exact().lse[at] == -kInfinity) {
            const int64_t head =
                whole_.spec.packed_q ? at / whole_.q.view().shape[0] : at / whole_.spec.Sq % whole_.spec.H;
            EXPECT_EQ(lse[at], whole_.sink.get(head));
            lse[at] = -kInfinity;
          }
        }
        EXPECT_EQ(rows.merged_o.damage() + rows.merged_lse.damage(), "");
      }
      expect("o", o, exact().o, plain.o, factor());
      expect("lse", lse, exact().lse, plain.lse, factor());
    }
  });
}

struct Sums {
  std::vector<double> dq, dk, dv, dbias, dsink;

  explicit Sums(const reference::Backward& x)
      : dq(x.dq.size()), dk(x.dk.size()), dv(x.dv.size()), dbias(x.dbias.size()), dsink(x.dsink.size()) {}
};

// As a step of a ring has them: each piece from the merged o and lse, added to float32.
void add_from_merged(const CaseData& whole, const std::string& candidate, Sums& sums) {
  std::vector<HostTensor> dk, dv;  // of each part of the keys, over all rows
  for (std::size_t part = 0; part < 2; ++part) {
    const std::vector<Piece> pieces = pieces_of(whole, part);
    const MergedRows rows(whole, pieces, candidate);
    const HostTensor dq = zeros_like(pieces[0].q, DType::f32);
    for (std::size_t n = 0; n < pieces.size(); ++n) {
      const Piece& piece = pieces[n];
      if (part == 0) {
        dk.push_back(zeros_like(piece.k, DType::f32));
        dv.push_back(zeros_like(piece.v, DType::f32));
      }
      HostTensor dbias, dsink;
      if (whole.bias.given()) {
        std::vector<int64_t> shape(piece.options.bias.shape.begin(), piece.options.bias.shape.begin() + 4);
        dbias = HostTensor::output(piece.options.bias.dtype, shape);
      }
      if (whole.sink.given() && n == 1) dsink = HostTensor::output(DType::f32, {whole.spec.H});
      piece.backward(candidate, rows.merged_o, rows.merged_lse, piece.d_o.view(), piece.d_lse.view(),
                     {.dq = dq.view(),
                      .dk = dk[n].view(),
                      .dv = dv[n].view(),
                      .dbias = dbias.view(),
                      .dsink = dsink.view(),
                      .accumulate = true,
                      .merged = true});
      if (dbias.given()) piece.add_bias(dbias, sums.dbias);
      if (dsink.given()) {
        for (int64_t h = 0; h < whole.spec.H; ++h) sums.dsink[h] += dsink.get(h);
      }
      EXPECT_EQ(dk[n].damage() + dv[n].damage() + dbias.damage() + dsink.damage(), "");
    }
    Piece::add(dq, pieces[0].row_of, sums.dq);
    EXPECT_EQ(dq.damage(), "");
    if (part == 0) continue;
    for (std::size_t n = 0; n < pieces.size(); ++n) {
      Piece::add(dk[n], pieces[n].key_of, sums.dk);
      Piece::add(dv[n], pieces[n].key_of, sums.dv);
    }
  }
}

// As a chain of derivatives has them: through the merge to each piece's own o and lse.
void add_through_merge(const CaseData& whole, const std::string& candidate, Sums& sums) {
  for (std::size_t part = 0; part < 2; ++part) {
    const std::vector<Piece> pieces = pieces_of(whole, part);
    const MergedRows rows(whole, pieces, candidate);
    std::vector<HostTensor> d_o, d_lse;
    std::vector<Partial> gradients;
    for (const Piece& piece : pieces) {
      gradients.push_back({d_o.emplace_back(piece.new_o()).view(), d_lse.emplace_back(piece.new_lse()).view()});
    }
    HostTensor dsink;
    if (whole.sink.given()) dsink = HostTensor::output(DType::f32, {whole.spec.H});
    merge_attention_backward(rows.partials(), pieces[0].d_o.view(), pieces[0].d_lse.view(), gradients, dsink.view(),
                             {.sink = whole.sink.view()});
    for (int64_t h = 0; dsink.given() && h < whole.spec.H; ++h) sums.dsink[h] += dsink.get(h);
    for (std::size_t n = 0; n < pieces.size(); ++n) {
      const Piece& piece = pieces[n];
      const HostTensor dq = zeros_like(piece.q, DType::f32), dk = zeros_like(piece.k, DType::f32),
                       dv = zeros_like(piece.v, DType::f32);
      HostTensor dbias;
      if (whole.bias.given()) {
        std::vector<int64_t> shape(piece.options.bias.shape.begin(), piece.options.bias.shape.begin() + 4);
        dbias = HostTensor::output(piece.options.bias.dtype, shape);
      }
      piece.backward(candidate, rows.o[n], rows.lse[n], d_o[n].view(), d_lse[n].view(),
                     {.dq = dq.view(), .dk = dk.view(), .dv = dv.view(), .dbias = dbias.view(), .dsink = {}});
      Piece::add(dq, piece.row_of, sums.dq);
      Piece::add(dk, piece.key_of, sums.dk);
      Piece::add(dv, piece.key_of, sums.dv);
      if (dbias.given()) piece.add_bias(dbias, sums.dbias);
    }
  }
}

TEST_P(AttentionPieces, GradientsOfPiecesAreTheCalls) {
  SCOPED_TRACE(whole_.describe());
  const Gradients gradients = whole_.new_gradients();
  const AttentionBackwardProblem p = whole_.backward_problem(gradients);
  const reference::Backward exact_gradients = reference::attention_backward(p, default_executor());
  const PlainBackward plain = plain_backward(p, exact());
  on_each_quick_target([&] {
    for (const char* candidate : {"cpu", "reference"}) {
      for (const auto add : {add_from_merged, add_through_merge}) {
        SCOPED_TRACE(std::string(candidate) + (add == add_from_merged ? ", from merged" : ", through the merge"));
        Sums sums(exact_gradients);
        add(whole_, candidate, sums);
        expect("dq", sums.dq, exact_gradients.dq, plain.dq, factor());
        expect("dk", sums.dk, exact_gradients.dk, plain.dk, factor());
        expect("dv", sums.dv, exact_gradients.dv, plain.dv, factor());
        if (p.dbias) expect("dbias", sums.dbias, exact_gradients.dbias, plain.dbias, factor());
        if (p.dsink) expect("dsink", sums.dsink, exact_gradients.dsink, plain.dsink, kFactor);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionPieces, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param); });

// What is added to is read: the sum is that of float32, each element once.
TEST(AttentionAccumulates, ToTheBit) {
  const CaseRunner runner(attention_case("feature_alibi_per_batch_causal_f16"));
  const CaseData& data = runner.data();
  for (const char* candidate : {"cpu", "reference"}) {
    const ForwardOutputs forward = runner.run_forward(candidate);
    const auto run = [&](bool accumulate, double start) {
      std::vector<HostTensor> out;
      for (const HostTensor* x : {&data.q, &data.k, &data.v}) {
        out.push_back(zeros_like(*x, DType::f32));
        for (int64_t n = 0; n < out.back().elements(); ++n) out.back().set(n, start * static_cast<double>(n % 7 + 1));
      }
      AttentionOptions options = data.options();
      options.force = candidate;
      const AttentionGradients gradients{.dq = out[0].view(),
                                         .dk = out[1].view(),
                                         .dv = out[2].view(),
                                         .dbias = {},
                                         .dsink = {},
                                         .accumulate = accumulate};
      WorkspaceBuffer memory;
      Runtime runtime;
      const std::size_t bytes =
          attention_backward_workspace(data.q.view(), data.k.view(), data.v.view(), gradients, options);
      if (bytes > 0) runtime.workspace = {memory.get(bytes).data, bytes};
      attention_backward(data.q.view(), data.k.view(), data.v.view(), forward.o.view(), forward.lse.view(),
                         data.d_o.view(), data.d_lse.view(), gradients, options, runtime);
      return out;
    };
    const std::vector<HostTensor> alone = run(false, 0), added = run(true, 0.3);
    for (std::size_t t = 0; t < 3; ++t) {
      for (int64_t n = 0; n < alone[t].elements(); ++n) {
        const float start = static_cast<float>(0.3 * static_cast<double>(n % 7 + 1));
        ASSERT_EQ(static_cast<float>(added[t].get(n)), start + static_cast<float>(alone[t].get(n)))
            << candidate << ", tensor " << t << ", element " << n;
      }
    }
  }
}

}  // namespace
}  // namespace heddle::kit
