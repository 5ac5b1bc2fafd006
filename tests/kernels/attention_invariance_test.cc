// What a caller may rely on bit for bit: repeats, any number of threads, any workspace contents, the rest of the batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include "kernels/candidates.h"

namespace heddle::kit {
namespace {

const char* const kRows[] = {"round_s128_d128_f32",
                             "round_s128_d32_encoder_bf16",
                             "round_s256_d64_causal_f16",
                             "odd_q129_k257_d33_dv33_bf16",
                             "corner_mask_holes_f32",
                             "corner_large_logits_bf16",
                             "feature_all_scores_f32",
                             "feature_bias_heads_f16",
                             "feature_packed_all_f32",
                             "feature_packed_encoder_f32",
                             "feature_used_both_causal_f32",
                             "feature_paged_64_f16",
                             "feature_dropout_causal_odd_f32",
                             "feature_strided_dim_f32",
                             "decode_1_4096_f32",
                             "decode_gqa8_d128_f32",
                             "decode_rows_3_batch_f32",
                             "decode_paged_16_f32",
                             "decode_window_bf16",
                             "decode_bias_mask_f32"};

bool same_bits(const ForwardOutputs& x, const ForwardOutputs& y) {
  return x.o.same_bits(y.o) && x.lse.same_bits(y.lse);
}

bool same_bits(const BackwardOutputs& x, const BackwardOutputs& y) {
  const Gradients &a = x.gradients, &b = y.gradients;
  return a.dq.same_bits(b.dq) && a.dk.same_bits(b.dk) && a.dv.same_bits(b.dv) && a.dbias.same_bits(b.dbias) &&
         a.dsink.same_bits(b.dsink);
}

class AttentionInvariance : public ::testing::TestWithParam<const char*> {};

// `run(executor, garbage)` must always write the same bits.
template <class Run>
void expect_same_bits_always(const Run& run, const std::string& candidate) {
  const auto one = make_thread_pool(1);
  const auto expected = run(one.get(), 0xFF);
  EXPECT_TRUE(same_bits(expected, run(one.get(), 0xFF))) << candidate << ": a repeat gives other bits";
  EXPECT_TRUE(same_bits(expected, run(one.get(), 0x00))) << candidate << ": bits depend on the workspace's contents";
  for (int threads : {2, 3, 5}) {
    const auto pool = make_thread_pool(threads);
    EXPECT_TRUE(same_bits(expected, run(pool.get(), 0x7F)))
        << candidate << ": other bits with " << threads << " threads";
  }
}

TEST_P(AttentionInvariance, Forward) {
  const CaseRunner runner(attention_case(GetParam()));
  on_each_quick_target([&] {
    for (const std::string& candidate : runner.candidates(Pass::forward)) {
      expect_same_bits_always(
          [&](Executor* executor, int garbage) { return runner.run_forward(candidate, executor, garbage); }, candidate);
    }
  });
}

TEST_P(AttentionInvariance, Backward) {
  CaseRunner runner(attention_case(GetParam()));
  if (!runner.data().spec.has_backward()) GTEST_SKIP() << "this case has no backward";
  on_each_quick_target([&] {
    for (const std::string& candidate : runner.candidates(Pass::backward)) {
      expect_same_bits_always(
          [&](Executor* executor, int garbage) { return runner.run_backward(candidate, executor, garbage); },
          candidate);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionInvariance, ::testing::ValuesIn(kRows),
                         [](const auto& info) { return std::string(info.param); });

// Part `begin` .. `begin + count` of a view's extent.
TensorView part(const TensorView& view, int axis, std::int64_t begin, std::int64_t count) {
  TensorView out = view;
  out.data =
      static_cast<std::byte*>(view.data) + begin * view.stride[axis] * static_cast<std::int64_t>(size_of(view.dtype));
  out.shape[axis] = count;
  return out;
}

TensorView batch_part(const TensorView& view, std::int64_t batch, std::int64_t b) {
  return view.given() && view.shape[0] == batch && batch > 1 ? part(view, 0, b, 1) : view;
}

struct Call {
  TensorView q, k, v, o, lse;
  AttentionOptions options;
};

void run(const Call& call, const std::string& candidate) {
  AttentionOptions options = call.options;
  options.force = candidate;
  options.batch_invariant = true;
  WorkspaceBuffer buffer;
  Runtime runtime;
  runtime.workspace = buffer.get(attention_forward_workspace(call.q, call.k, call.v, options) + 64);
  attention_forward(call.q, call.k, call.v, call.o, call.lse, options, runtime);
}

class BatchInvariance : public ::testing::TestWithParam<const char*> {};

// Each sequence alone gives the bits that it has in the batch.
TEST_P(BatchInvariance, SequencesAlone) {
  const CaseData data(attention_case(GetParam()));
  const CaseRunner runner(data.spec);
  const std::int64_t batch = data.spec.B;
  on_each_quick_target([&] {
    for (const std::string& candidate : runner.candidates(Pass::forward)) {
      HostTensor o = data.new_o(), lse = data.new_lse(), o_alone = data.new_o(), lse_alone = data.new_lse();
      Call together{data.q.view(), data.k.view(), data.v.view(), o.view(), lse.view(), data.options()};
      run(together, candidate);
      for (std::int64_t b = 0; b < batch; ++b) {
        Call alone = together;
        alone.o = o_alone.view(), alone.lse = lse_alone.view();
        AttentionOptions& options = alone.options;
        std::int32_t cu_q[2], cu_k[2];
        if (data.cu_seqlens_q.given()) {
          const auto begin = static_cast<std::int64_t>(data.cu_seqlens_q.get(b));
          const std::int64_t rows = static_cast<std::int64_t>(data.cu_seqlens_q.get(b + 1)) - begin;
          cu_q[0] = 0, cu_q[1] = static_cast<std::int32_t>(rows);
          options.cu_seqlens_q = TensorView(cu_q, DType::i32, {2});
          options.max_seqlen_q = data.spec.Sq;
          alone.q = part(alone.q, 0, begin, rows), alone.o = part(alone.o, 0, begin, rows);
          alone.lse = part(alone.lse, 1, begin, rows);
        } else {
          alone.q = part(alone.q, 0, b, 1), alone.o = part(alone.o, 0, b, 1), alone.lse = part(alone.lse, 0, b, 1);
        }
        for (TensorView* x : {&alone.k, &alone.v}) {
          if (data.cu_seqlens_k.given()) {
            const auto begin = static_cast<std::int64_t>(data.cu_seqlens_k.get(b));
            const std::int64_t keys = static_cast<std::int64_t>(data.cu_seqlens_k.get(b + 1)) - begin;
            cu_k[0] = 0, cu_k[1] = static_cast<std::int32_t>(keys);
            options.cu_seqlens_k = TensorView(cu_k, DType::i32, {2});
            options.max_seqlen_k = data.spec.Sk;
            *x = part(*x, 0, begin, keys);
          } else if (!data.page_table.given() && !data.cache_batch_idx.given()) {
            *x = part(*x, 0, b, 1);
          }
        }
        for (TensorView* x : {&options.bias, &options.mask, &options.seqused_q, &options.seqused_k, &options.page_table,
                              &options.cache_batch_idx, &options.cache_leftpad}) {
          *x = batch_part(*x, batch, b);
        }
        if (options.alibi_slopes.rank == 2) options.alibi_slopes = batch_part(options.alibi_slopes, batch, b);
        run(alone, candidate);
      }
      EXPECT_TRUE(o.same_bits(o_alone)) << candidate << ": o of a sequence alone has other bits";
      EXPECT_TRUE(lse.same_bits(lse_alone)) << candidate << ": lse of a sequence alone has other bits";
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, BatchInvariance,
                         ::testing::Values("round_s64_d64_bf16", "round_s128_d32_encoder_f32", "round_s96_d80_gqa4_f16",
                                           "feature_alibi_per_batch_causal_f32", "feature_bias_full_f16",
                                           "feature_mask_columns_f32", "feature_packed_f32",
                                           "feature_packed_causal_f32", "feature_packed_encoder_f32",
                                           "feature_used_both_causal_f32", "feature_paged_64_f32",
                                           "feature_cache_batch_idx_f32", "feature_leftpad_f32",
                                           "decode_rows_3_batch_f32", "decode_bias_mask_f32", "decode_paged_16_f32",
                                           "decode_packed_f32"),
                         [](const auto& info) { return std::string(info.param); });

// Rows of one sequence do not look at each other either: parts of a prefill give the same bits. Parts of fewer rows may
// be served by the arithmetic of decoding, which reads keys in another order.
TEST(RowInvariance, RowsAlone) {
  for (const char* name :
       {"round_s128_d32_encoder_f32", "round_s128_d128_bf16", "round_s96_d80_gqa4_f32", "odd_q200_k200_d5_dv5_f32"}) {
    SCOPED_TRACE(name);
    AttentionCase spec = attention_case(name);
    spec.causal = Causal::none;  // positions hang on the number of rows otherwise
    const CaseData data(spec);
    const CaseRunner runner(spec);
    on_each_quick_target([&] {
      for (const std::string& candidate : runner.candidates(Pass::forward)) {
        HostTensor o = data.new_o(), lse = data.new_lse(), o_parts = data.new_o(), lse_parts = data.new_lse();
        const Call whole{data.q.view(), data.k.view(), data.v.view(), o.view(), lse.view(), data.options()};
        run(whole, candidate);
        for (std::int64_t begin = 0, count = 33; begin < spec.Sq; begin += count) {
          count = spec.Sq - begin < 2 * count ? spec.Sq - begin : count;
          Call rows = whole;
          rows.q = part(rows.q, 1, begin, count);
          rows.o = part(o_parts.view(), 1, begin, count), rows.lse = part(lse_parts.view(), 2, begin, count);
          run(rows, candidate);
        }
        EXPECT_TRUE(o.same_bits(o_parts)) << candidate << ": rows alone have other bits";
        EXPECT_TRUE(lse.same_bits(lse_parts)) << candidate << ": lse of rows alone has other bits";
      }
    });
  }
}

// Means of two 16-bit numbers are exact in f32: what is stored must be their nearest neighbour, ties to even.
TEST(Rounding, OutputsAreRoundedToNearestEven) {
  for (DType dtype : {DType::f16, DType::bf16}) {
    AttentionCase spec{.B = 1, .H = 2, .Hkv = 2, .Sq = 5, .Sk = 2, .D = 8, .Dv = 37};
    spec.dtype = dtype;
    spec.scale = 0.0f;
    const CaseRunner runner(spec);
    const HostTensor& v = runner.data().v;
    on_each_quick_target([&] {
      for (const std::string& candidate : runner.candidates(Pass::forward)) {
        const ForwardOutputs out = runner.run_forward(candidate);
        for (std::int64_t n = 0; n < out.o.elements(); ++n) {
          const std::int64_t at = n % (2 * 37);  // v is [1, 2, 2, 37]
          const double mean = (v.get(at) + v.get(2 * 37 + at)) / 2;
          ASSERT_EQ(out.o.get(n), rounded(mean, dtype)) << candidate << " " << heddle::name_of(dtype) << " of " << mean;
        }
      }
    });
  }
}

// What is attended is never hidden: a NaN in v reaches its column of all rows of its heads, one in k its rows and lse;
// a result beyond the dtype's range is infinite. Other heads stay finite.
TEST(NonFinite, AttendedValuesShow) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    AttentionCase spec{.H = 4, .Hkv = 2, .Sq = 20, .Sk = 30, .D = 16, .Dv = 19};
    spec.dtype = dtype;
    const std::int64_t key = 7, kv_head = 1, column = 5;
    on_each_quick_target([&] {
      for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
        CaseData in_v(spec), in_k(spec);
        in_v.v.set((key * 2 + kv_head) * 19 + column, bad);
        in_k.k.set((key * 2 + kv_head) * 16 + 3, std::nan(""));
        for (const std::string& candidate : CaseRunner(spec).candidates(Pass::forward)) {
          SCOPED_TRACE(candidate + " " + heddle::name_of(dtype));
          HostTensor o = in_v.new_o(), lse = in_v.new_lse(), o_k = in_k.new_o(), lse_k = in_k.new_lse();
          run({in_v.q.view(), in_v.k.view(), in_v.v.view(), o.view(), lse.view(), in_v.options()}, candidate);
          run({in_k.q.view(), in_k.k.view(), in_k.v.view(), o_k.view(), lse_k.view(), in_k.options()}, candidate);
          for (std::int64_t n = 0; n < o.elements(); ++n) {
            const bool hit = n / 19 % 4 / 2 == kv_head;
            if (hit && n % 19 == column) {
              ASSERT_FALSE(std::isfinite(o.get(n))) << n << " is " << o.get(n) << " for " << bad;
            } else if (!hit) {
              ASSERT_TRUE(std::isfinite(o.get(n))) << n;
            }
            ASSERT_EQ(std::isnan(o_k.get(n)), hit) << n << " is " << o_k.get(n);
          }
          for (std::int64_t n = 0; n < lse.elements(); ++n) {
            ASSERT_TRUE(std::isfinite(lse.get(n)));
            ASSERT_EQ(std::isnan(lse_k.get(n)), n / 20 / 2 == kv_head) << n << " is " << lse_k.get(n);
          }
        }
      }
    });
  }
}

}  // namespace
}  // namespace heddle::kit
