// A step of native sparse attention on the GPU, against double; what it leaves of the cache, bit for bit.
#include <gtest/gtest.h>

#include <span>
#include <string>
#include <vector>

#include "core/check.h"
#include "gpu/nsa_step_on_gpu.h"
#include "kernels/within_rule.h"

namespace heddle::kit {
namespace {

using std::int64_t;

bool on_hopper() { return current_gpu().major == 9; }

struct Found {
  HostTensor out, k, v, k_pooled, v_pooled, lengths;
};

// poison: of each byte of the workspace.
Found run(const NsaStepData& data, int poison, const NsaStepOptions& options) {
  const NsaStepOnGpu there(data);
  Found found{data.out(), data.k, data.v, data.k_pooled, data.v_pooled, data.lengths};
  const DeviceTensor out(found.out);
  const DeviceStream stream;
  const DeviceMemory workspace(there.workspace(out, options), poison);
  there.launch(out, options, stream, workspace);
  stream.synchronize();
  out.read(found.out);
  there.k.read(found.k);
  there.v.read(found.v);
  there.k_pooled.read(found.k_pooled);
  there.v_pooled.read(found.v_pooled);
  there.lengths.read(found.lengths);
  return found;
}

class GpuNsaStep : public ::testing::TestWithParam<NsaStepCase> {
 protected:
  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "nsa_step is for Hopper";
  }
};

void expect_right(const NsaStepData& data, const HostTensor& out) {
  const std::vector<double> values = out.values();
  const int64_t heads = data.s.H * data.s.G, size = heads * data.s.Dv;
  for (int64_t b = 0; b < data.B(); ++b) {
    SCOPED_TRACE(text("sequence ", b));
    const auto [exact, plain] = data.expected(b);
    expect_within_rule("out", std::span(values).subspan(b * size, size), exact, plain, {heads, data.s.Dv}, data.s.dtype,
                       factor_of(size));
  }
  EXPECT_EQ(out.damage(), "");
}

TEST_P(GpuNsaStep, IsRightAndLeavesTheCacheThatAppendingLeaves) {
  NsaStepData data(GetParam());
  const Found found = run(data, 0xff, data.options), again = run(data, 0x3f, data.options);
  EXPECT_TRUE(again.out.same_bits(found.out)) << "bits do not repeat";
  data.append();
  EXPECT_TRUE(found.k.same_bits(data.k)) << "k";
  EXPECT_TRUE(found.v.same_bits(data.v)) << "v";
  EXPECT_TRUE(found.k_pooled.same_bits(data.k_pooled)) << "k_pooled";
  EXPECT_TRUE(found.v_pooled.same_bits(data.v_pooled)) << "v_pooled";
  EXPECT_TRUE(found.lengths.same_bits(data.lengths)) << "lengths";
  expect_right(data, found.out);
}

TEST_P(GpuNsaStep, BatchInvariantBitsAreThoseOfASequenceAlone) {
  const NsaStepData data(GetParam());
  NsaStepOptions options = data.options;
  options.batch_invariant = true;
  const Found all = run(data, 0xff, options);
  for (int64_t b = 0; b < std::min<int64_t>(data.B(), 3); ++b) {
    const NsaStepData alone(GetParam(), {b});
    const std::vector<double> one = run(alone, 0xff, options).out.values(), of_all = all.out.values();
    EXPECT_TRUE(std::equal(one.begin(), one.end(), of_all.begin() + b * static_cast<int64_t>(one.size()))) << b;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuNsaStep, ::testing::ValuesIn(nsa_step_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// A step of a sequence over a cache that grows: what one leaves is what the next reads.
TEST(GpuNsaStepCall, StepsInAGraph) {
  if (!on_hopper()) GTEST_SKIP() << "nsa_step is for Hopper";
  NsaStepData data({"", DType::bf16, 2, 4, 128, 128, 300, {120, 60}, 64, 3, 100});
  NsaStepOnGpu there(data);
  HostTensor out = data.out();
  const DeviceTensor to(out);
  const DeviceStream stream;
  const DeviceMemory workspace(there.workspace(to, data.options), 0xff);
  const DeviceGraph graph(stream, [&] { there.launch(to, data.options, stream, workspace); });
  EXPECT_EQ(graph.nodes(), 1u);
  for (int step = 0; step < 12; ++step) {
    graph.replay(stream);
    stream.synchronize();
    to.read(out);
    data.append();
    expect_right(data, out);
    for (int64_t b = 0; b < data.B(); ++b) data.lengths.set(b, static_cast<double>(++data.s.lengths[b]));
    there.lengths.write(data.lengths);
  }
}

}  // namespace
}  // namespace heddle::kit
