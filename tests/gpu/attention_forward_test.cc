// Every candidate of the GPU over the whole case table.
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <vector>

#include "gpu/device_call.h"

namespace heddle::kit {
namespace {

// Rows of the table that no tuned candidate took on a Hopper GPU. May fall; a row that was served is not given up.
constexpr std::int64_t kUnservedOnHopper = 4;

// Rows with steps that its own forward takes there. May grow.
constexpr std::size_t kSteppedOnHopper = 19;

// Candidates that take every row without steps, and that nobody would want for their speed.
const std::vector<std::string> kComplete = {"baseline_cuda", "naive_cuda"};

std::string refusals(const CaseRunner& runner) {
  std::string out;
  const std::vector<std::string> cpu = CaseRunner(runner.data().spec).candidates(Pass::forward);
  for (const Candidate& candidate : runner.explain(Pass::forward)) {
    const bool of_cpu = candidate.method == "reference" || std::ranges::find(cpu, candidate.name) != cpu.end();
    if (!of_cpu && std::ranges::find(kComplete, candidate.name) == kComplete.end())
      out += (out.empty() ? "" : "; ") + candidate.name + ": " + candidate.reason;
  }
  return out;
}

class GpuForward : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(GpuForward, MatchesReference) {
  CaseRunner runner(GetParam(), 1, Device::cuda);
  SCOPED_TRACE(runner.data().describe());
  const std::vector<std::string> candidates = runner.candidates(Pass::forward);
  if (candidates.empty()) GTEST_SKIP() << "no candidate of the GPU takes it: " << refusals(runner);
  for (const std::string& candidate : candidates) {
    const CaseResult result = runner.check_forward(candidate);
    EXPECT_TRUE(result.passed) << result.message();
  }
  EXPECT_EQ(runner.blind_spots(Pass::forward), "");
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuForward, ::testing::ValuesIn(attention_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Tf32, GpuForward, ::testing::ValuesIn(in_tf32(attention_cases())), case_name);

// Beside q, k and v in f8e4m3 o may be in either 16-bit dtype: the same numbers, rounded otherwise.
TEST(GpuForwardOutputs, OInFloat16BesideE4m3) {
  DeviceCase at(attention_case("feature_e4m3_d128_e4m3"));
  const std::vector<std::string> candidates = at.runner.candidates(Pass::forward);
  EXPECT_FALSE(candidates.empty());
  for (const std::string& candidate : candidates) {
    SCOPED_TRACE(candidate);
    at.call.options.force = candidate;
    at.poison();
    at.call.run();
    const HostTensor bf16 = at.read().o;
    const TensorView& shape = bf16.view();
    HostTensor f16 = HostTensor::output(DType::f16, {shape.shape.begin(), shape.shape.begin() + shape.rank});
    const DeviceTensor there(f16);
    DeviceCall call = at.call;
    call.o = there.view();
    call.run();
    there.read(f16);
    for (std::int64_t n = 0; n < f16.elements(); ++n) {
      ASSERT_NEAR(f16.get(n), bf16.get(n), 0x1p-7 * std::abs(bf16.get(n)) + 0x1p-8) << "element " << n;
    }
  }
}

// Of a decode kernel an o in float32 is what it rounds to 16 bits.
TEST(GpuForwardOutputs, OInFloat32OfDecoding) {
  std::map<std::string, int> compared;
  for (const AttentionCase& spec : attention_cases()) {
    if (spec.purpose != Purpose::decode || spec.dtype == DType::f32) continue;
    DeviceCase at(spec);
    for (const std::string& candidate : at.runner.candidates(Pass::forward)) {
      if (!candidate.ends_with("_decode")) continue;
      SCOPED_TRACE(spec.name + ", " + candidate);
      at.call.options.force = candidate;
      at.poison();
      at.call.run();
      const ForwardOutputs rounded = at.read();
      const TensorView& shape = rounded.o.view();
      HostTensor wide = HostTensor::output(DType::f32, {shape.shape.begin(), shape.shape.begin() + shape.rank});
      const DeviceTensor there(wide);
      DeviceCall call = at.call;
      call.o = there.view();
      call.options.float32_out = true;
      at.poison();
      call.run();
      there.read(wide);
      EXPECT_TRUE(at.read().lse.same_bits(rounded.lse));
      HostTensor o = rounded.o;
      for (std::int64_t n = 0; n < o.elements(); ++n) o.set(n, wide.get(n));
      EXPECT_TRUE(o.same_bits(rounded.o));
      ++compared[candidate];
    }
  }
  EXPECT_GT(compared["sm80_decode"], 50);
  EXPECT_TRUE(current_gpu().major != 9 || compared["sm90_decode"] > 50) << compared["sm90_decode"];
}

// A rank may have none at all.
TEST(GpuForwardOutputs, DecodingWithoutPages) {
  int calls = 0;
  for (const AttentionCase& spec : attention_cases()) {
    if (spec.page_size == 0 || !spec.float32_out || spec.Sq > 16) continue;
    DeviceCase at(spec);
    for (const std::string& candidate : at.runner.candidates(Pass::forward)) {
      SCOPED_TRACE(spec.name + ", " + candidate);
      DeviceCall call = at.call;
      for (TensorView* x : {&call.k, &call.v}) x->data = nullptr, x->shape[0] = 0;
      call.options.force = candidate;
      call.options.page_table.shape[1] = 0;
      call.options.k_scale = call.options.v_scale = {};
      at.poison();
      call.run();
      const ForwardOutputs found = at.read();
      for (const double x : found.o.values()) ASSERT_EQ(x, 0);
      for (const double x : found.lse.values()) ASSERT_EQ(x, -std::numeric_limits<double>::infinity());
      ++calls;
    }
  }
  EXPECT_GT(calls, 0);
}

// Values times their scales may be more than float16 holds where their means are not.
TEST(GpuForwardOutputs, LargeScalesBesideOInFloat16) {
  DeviceCase at(attention_case("feature_e4m3_scaled_one_e4m3"));
  HostTensor scale = at.runner.data().v_scale;
  ASSERT_GT(scale.elements(), 0);
  const std::vector<double> v = at.runner.data().v.values();
  const double largest = std::abs(*std::ranges::max_element(v, {}, [](double x) { return std::abs(x); }));
  for (std::int64_t n = 0; n < scale.elements(); ++n) scale.set(n, 80000 / largest);
  const DeviceTensor v_scale(scale);
  const TensorView& shape = at.host_o.view();
  HostTensor f16 = HostTensor::output(DType::f16, {shape.shape.begin(), shape.shape.begin() + shape.rank});
  for (const std::string& candidate : at.runner.candidates(Pass::forward)) {
    SCOPED_TRACE(candidate);
    DeviceCall call = at.call;
    call.options.force = candidate;
    call.options.v_scale = v_scale.view();
    at.poison();
    call.run();
    const HostTensor bf16 = at.read().o;
    const DeviceTensor there(f16);
    call.o = there.view();
    call.run();
    there.read(f16);
    for (std::int64_t n = 0; n < f16.elements(); ++n) {
      const double x = bf16.get(n);
      if (std::abs(x) > 65000) continue;  // more than float16 holds after all
      ASSERT_NEAR(f16.get(n), x, 0x1p-6 * std::abs(x) + 16) << "element " << n;
    }
  }
}

// What is not served is said, with the sentence that a user would read, and does not grow. Of pieces, and of an o in
// float32 beside 16 bits, it is said here which rows are; of rows and keys that stand for several positions, by whom.
TEST(GpuCoverage, UnservedRowsAreListed) {
  std::map<std::string, std::vector<std::string>> unserved;  // by refusal
  std::int64_t count = 0;
  std::size_t stepped_on_hopper = 0;
  for (const AttentionCase& spec : attention_cases()) {
    const CaseRunner runner(spec, 1, Device::cuda);
    std::vector<std::string> tuned = runner.candidates(Pass::forward);
    const bool few_rows = spec.Sq <= 16;  // what decode kernels take
    if (spec.stepped()) {
      const bool e4m3 = spec.dtype == DType::f8e4m3 || spec.f8_cache;
      stepped_on_hopper += std::erase(tuned, "sm90");
      EXPECT_EQ(std::erase(tuned, "sm80_decode"), few_rows && spec.dtype != DType::f32 ? 1u : 0u) << spec.name;
      std::erase(tuned, "sm90_decode");
      EXPECT_EQ(tuned, e4m3 ? std::vector<std::string>{} : std::vector<std::string>{"sm80"}) << spec.name;
      continue;
    }
    for (const std::string& name : kComplete) {
      EXPECT_EQ(std::erase(tuned, name), 1u) << name << " does not take " << spec.name;
    }
    if (spec.partial()) {
      const bool e4m3 = spec.dtype == DType::f8e4m3 || spec.f8_cache, dropped = spec.piece() && spec.dropout > 0;
      EXPECT_EQ(tuned.empty(), (e4m3 && !few_rows) || dropped) << spec.name;
      continue;
    }
    if (!tuned.empty()) continue;
    const std::string why = refusals(runner);
    EXPECT_FALSE(why.empty()) << spec.name << " is refused without a sentence";
    unserved[why].push_back(spec.name);
    ++count;
  }
  for (const auto& [why, names] : unserved) {
    std::cout << names.size() << " rows: " << why << "\n   ";
    for (const std::string& name : names) std::cout << ' ' << name;
    std::cout << '\n';
  }
  const auto rows = static_cast<std::int64_t>(attention_cases().size());
  std::cout << count << " of " << rows << " rows have no tuned candidate of this GPU\n";
  RecordProperty("unserved_rows", static_cast<int>(count));
  EXPECT_LT(count, rows) << "no row at all is served";
  if (current_gpu().major == 9) {
    EXPECT_LE(count, kUnservedOnHopper) << "rows that were served are refused now";
    EXPECT_GE(stepped_on_hopper, kSteppedOnHopper) << "of those with steps";
  }
}

}  // namespace
}  // namespace heddle::kit
