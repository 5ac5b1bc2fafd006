// attention_with_kv_cache on the GPU: every candidate, in one launch or in three.
#include <gtest/gtest.h>

#include "gpu/device_call.h"
#include "kernels/cache_step.h"

namespace heddle::kit {
namespace {

class GpuCacheStep : public ::testing::TestWithParam<AttentionCase> {};

// The mirrors of a step, and the call on them.
struct DeviceStep {
  const CacheStep& step;
  std::vector<DeviceTensor> held;
  DeviceTensor k_cache, v_cache, o;
  TensorView q, k_new, v_new;
  AttentionOptions options;

  explicit DeviceStep(const CacheStep& s)
      : step(s), k_cache(s.k_cache), v_cache(s.v_cache), o(s.data.new_o()), options(s.data.options()) {
    q = mirror(s.data.q);
    k_new = mirror(s.k_new);
    v_new = mirror(s.v_new);
    options.seqused_k = mirror(s.seqlens);
    options.page_table = mirror(s.data.page_table);
    options.cache_batch_idx = mirror(s.data.cache_batch_idx);
    options.draft_mask = mirror(s.data.draft_mask);
    options.sink = mirror(s.data.sink);
    options.k_scale = mirror(s.data.k_scale);
    options.v_scale = mirror(s.data.v_scale);
  }

  TensorView mirror(const HostTensor& host) {
    held.emplace_back(host);
    return held.back().view();
  }

  void run(const Rotary& rotary) const {
    const DeviceStream stream;
    const DeviceMemory memory(
        attention_with_kv_cache_workspace(q, k_new, v_new, k_cache.view(), v_cache.view(), rotary, options), 0xFF);
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {memory.data(), memory.bytes()};
    attention_with_kv_cache(q, k_new, v_new, k_cache.view(), v_cache.view(), o.view(), {}, rotary, options, runtime);
    stream.synchronize();
  }
};

std::vector<std::string> candidates_of(const DeviceStep& call) {
  std::vector<std::string> names;
  for (const Candidate& candidate : explain_attention(call.q, call.k_cache.view(), call.v_cache.view(), call.options)) {
    if (candidate.supported) names.push_back(candidate.name);
  }
  return names;
}

TEST_P(GpuCacheStep, EveryCandidateAppendsAndAttends) {
  const CacheStep step(GetParam(), 3);
  const std::vector<std::string> names = candidates_of(DeviceStep(step));
  ASSERT_FALSE(names.empty());
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    DeviceStep call(step);
    call.options.force = name;
    call.run({});
    HostTensor o = step.data.new_o(), k = step.k_cache, v = step.v_cache;
    call.o.read(o);
    call.k_cache.read(k);
    call.v_cache.read(v);
    EXPECT_EQ(step.verdict(o, k, v), "");
  }
}

// Against the CPU: the same rounding of rotated rows, then attention that differs by its own rounding.
TEST_P(GpuCacheStep, EveryCandidateRotates) {
  const CacheStep step(GetParam(), 3);
  const AttentionCase& spec = step.data.spec;
  const std::int64_t half = spec.D / 2;
  HostTensor cos = HostTensor::input(DType::f32, {spec.Sk + 8, half}), sin = cos;
  for (std::int64_t n = 0; n < cos.elements(); ++n) {
    const double angle = static_cast<double>(n / half) * std::pow(0.01, static_cast<double>(n % half) / half);
    cos.set(n, std::cos(angle));
    sin.set(n, std::sin(angle));
  }
  const Rotary on_cpu{cos.view(), sin.view(), false};
  HostTensor expected = step.data.new_o(), k_cpu = step.k_cache, v_cpu = step.v_cache;
  {
    AttentionOptions options = step.data.options();
    options.seqused_k = step.seqlens.view();
    options.force = "reference";
    WorkspaceBuffer buffer;
    Runtime runtime;
    runtime.workspace = buffer.get(attention_with_kv_cache_workspace(
        step.data.q.view(), step.k_new.view(), step.v_new.view(), k_cpu.view(), v_cpu.view(), on_cpu, options));
    attention_with_kv_cache(step.data.q.view(), step.k_new.view(), step.v_new.view(), k_cpu.view(), v_cpu.view(),
                            expected.view(), {}, on_cpu, options, runtime);
  }
  double largest = 0;
  for (const double x : expected.values()) largest = std::max(largest, std::abs(x));
  for (const std::string& name : candidates_of(DeviceStep(step))) {
    SCOPED_TRACE(name);
    DeviceStep call(step);
    call.options.force = name;
    const Rotary rotary{call.mirror(cos), call.mirror(sin), false};
    call.run(rotary);
    HostTensor o = step.data.new_o();
    call.o.read(o);
    EXPECT_EQ(o.damage(), "");
    const std::vector<double> found = o.values(), wanted = expected.values();
    double worst = 0;
    for (std::size_t n = 0; n < found.size(); ++n) {
      const double error = std::abs(found[n] - wanted[n]);
      worst = error <= worst ? worst : error;  // NaN stays
    }
    // Rounding of o, of p, and of q and k, which a fused multiply-add may round the other way: some of 2^-9 each.
    EXPECT_LE(worst, largest / 64);
  }
}

INSTANTIATE_TEST_SUITE_P(Steps, GpuCacheStep, ::testing::ValuesIn(cache_step_cases()), case_name);

}  // namespace
}  // namespace heddle::kit
