// attention_with_kv_cache on the CPU: against the case table's judge, and against the three operations it stands for.
#include <gtest/gtest.h>

#include "heddle/error.h"
#include "heddle/kv_cache.h"
#include "kernels/cache_step.h"
#include "kernels/candidates.h"

namespace heddle::kit {
namespace {

constexpr std::int64_t kNew = 3;

AttentionOptions options_of(const CacheStep& step) {
  AttentionOptions options = step.data.options();
  options.seqused_k = step.seqlens.view();
  return options;
}

void attend(const CacheStep& step, HostTensor& k, HostTensor& v, HostTensor& o, const Rotary& rotary,
            const AttentionOptions& options) {
  WorkspaceBuffer buffer;
  Runtime runtime;
  runtime.workspace = buffer.get(attention_with_kv_cache_workspace(
      step.data.q.view(), step.k_new.view(), step.v_new.view(), k.view(), v.view(), rotary, options));
  attention_with_kv_cache(step.data.q.view(), step.k_new.view(), step.v_new.view(), k.view(), v.view(), o.view(), {},
                          rotary, options, runtime);
}

class CacheStepTest : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(CacheStepTest, AppendsAndAttends) {
  CacheStep step(GetParam(), kNew);
  HostTensor o = step.data.new_o(), k = step.k_cache, v = step.v_cache;
  attend(step, k, v, o, {}, options_of(step));
  EXPECT_EQ(step.verdict(o, k, v), "");
}

TEST_P(CacheStepTest, RotatesAsTheSeparateOperationsDo) {
  const CacheStep step(GetParam(), kNew);
  const AttentionCase& spec = step.data.spec;
  const std::int64_t half = spec.D / 4;  // half of the head passes through
  HostTensor cos = HostTensor::input(DType::f32, {spec.Sk + 8, half}), sin = cos;
  for (std::int64_t n = 0; n < cos.elements(); ++n) {
    const double angle = static_cast<double>(n / half) * std::pow(0.1, static_cast<double>(n % half) / half);
    cos.set(n, std::cos(angle));
    sin.set(n, std::sin(angle));
  }
  const Rotary rotary{cos.view(), sin.view(), true};
  HostTensor o = step.data.new_o(), k = step.k_cache, v = step.v_cache;
  AttentionOptions options = options_of(step);
  attend(step, k, v, o, rotary, options);

  HostTensor k_apart = step.k_cache, v_apart = step.v_cache, q = step.data.q;
  append_kv_cache(step.k_new.view(), step.v_new.view(), k_apart.view(), v_apart.view(), options.seqused_k,
                  {.rotary = rotary,
                   .page_table = options.page_table,
                   .cache_batch_idx = options.cache_batch_idx,
                   .k_scale = options.k_scale,
                   .v_scale = options.v_scale});
  EXPECT_TRUE(k.same_bits(k_apart));
  EXPECT_TRUE(v.same_bits(v_apart));
  const bool by_row = spec.causal != Causal::none || spec.window_left >= 0;
  for (std::int64_t i = 0; i < (by_row ? 1 : spec.Sq); ++i) {
    TensorView rows = q.view();
    rows.data = static_cast<std::byte*>(rows.data) + i * rows.stride[1] * 2;
    if (!by_row) rows.shape[1] = 1;
    apply_rotary(rows, rows, rotary, {.offsets = options.seqused_k});
  }
  options.seqused_k = {};  // all keys
  WorkspaceBuffer buffer;
  Runtime runtime;
  runtime.workspace = buffer.get(attention_forward_workspace(q.view(), k_apart.view(), v_apart.view(), options));
  HostTensor expected = step.data.new_o();
  attention_forward(q.view(), k_apart.view(), v_apart.view(), expected.view(), {}, options, runtime);
  EXPECT_TRUE(o.same_bits(expected));
}

// No new rows, and so none that have an address: q is rotated all the same.
TEST_P(CacheStepTest, RotatesBesideNothingNew) {
  CacheStep step(GetParam(), kNew);
  const std::int64_t half = step.data.spec.D / 4;
  HostTensor cos = HostTensor::input(DType::f32, {step.data.spec.Sk + 8, half}), sin = cos;
  for (std::int64_t n = 0; n < cos.elements(); ++n) {
    cos.set(n, std::cos(0.1 * static_cast<double>(n)));
    sin.set(n, std::sin(0.1 * static_cast<double>(n)));
  }
  const Rotary rotary{cos.view(), sin.view(), false};
  std::vector<HostTensor> results;
  std::byte somewhere[4];
  for (void* address : {static_cast<void*>(nullptr), static_cast<void*>(somewhere)}) {
    TensorView k_new = step.k_new.view(), v_new = step.v_new.view();
    k_new.shape[1] = v_new.shape[1] = 0;
    k_new.data = v_new.data = address;
    HostTensor k = step.k_cache, v = step.v_cache, o = step.data.new_o();
    WorkspaceBuffer buffer;
    Runtime runtime;
    runtime.workspace = buffer.get(attention_with_kv_cache_workspace(step.data.q.view(), k_new, v_new, k.view(),
                                                                     v.view(), rotary, options_of(step)));
    attention_with_kv_cache(step.data.q.view(), k_new, v_new, k.view(), v.view(), o.view(), {}, rotary,
                            options_of(step), runtime);
    results.push_back(o);
  }
  EXPECT_TRUE(results[0].same_bits(results[1]));
}

INSTANTIATE_TEST_SUITE_P(Steps, CacheStepTest, ::testing::ValuesIn(cache_step_cases()), case_name);

TEST(CacheStepArguments, BadOnesAreRefusedBeforeAnythingIsWritten) {
  const CacheStep step(cache_step_cases()[0], kNew);
  HostTensor o = step.data.new_o(), k = step.k_cache, v = step.v_cache;
  const auto refused = [&](const AttentionOptions& options, const std::string& message) {
    try {
      attend(step, k, v, o, {}, options);
      ADD_FAILURE() << "not refused: " << message;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("[attention_with_kv_cache] " + message), std::string::npos)
          << error.what();
    }
    EXPECT_TRUE(k.same_bits(step.k_cache));
    EXPECT_TRUE(o.same_bits(step.data.new_o()));
  };
  AttentionOptions options = options_of(step);
  options.seqused_k = {};
  refused(options, "seqused_k is missing");
  HostTensor late = step.seqlens;
  late.set(1, static_cast<double>(step.data.spec.Sk - 1));
  options.seqused_k = late.view();
  refused(options, "seqused_k[1] is 149: with 3 rows sequence 1 ends at position 152");
  late.set(1, -1);
  refused(options, "seqused_k[1] is -1: it must be from 0");
  options.seqused_k.shape[0] = 2;
  refused(options, "seqused_k has 2 entries: it must have 3");
  options = options_of(step);
  options.softcap = -1;
  refused(options, "softcap is -1");
  options = options_of(step);
  options.key_step = 16;
  refused(options, "q_step is 1 and key_step is 16: both must be 1, as positions are those of the cache");
}

}  // namespace
}  // namespace heddle::kit
