// Quantisation, its undoing and unpacking choose among candidates as all operations do, and all candidates refuse what
// only the values can say.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "heddle/linear.h"
#include "heddle/lowbit.h"
#include "kernels/elsewhere.h"
#include "kernels/explained.h"
#include "kit/linear_layer.h"
#include "kit/lowbit_weights.h"
#include "kit/messages.h"

namespace heddle::lowbit {
namespace {

using kit::expect_message;
using kit::HostTensor;
using kit::QuantizedMemory;

constexpr std::int64_t kN = 3, kK = 256;

HostTensor weights_of(const Format& format, DType dtype = DType::bf16) {
  return kit::draw_weights(kit::Draw::gaussian, dtype, kN, kK, format.element, 1);
}

TEST(LowbitChoice, ListsWhatThereIs) {
  const Format format = format_named("nvfp4");
  const HostTensor weights = weights_of(format);
  const QuantizedMemory out(format, kN, kK);
  const kit::LinearLayer layer({.N = 32, .K = 64});
  const HostTensor unpacked = HostTensor::output(DType::f32, {32, 64});
  const struct {
    std::vector<Candidate> list;
    const char* names;
  } kOperations[] = {
      {explain_quantize(weights.view(), {}, out.matrix()), "cpu, reference, cuda"},
      {explain_dequantize(out.matrix(), weights.view()), "cpu, reference, cuda"},
      {explain_unpack_weights(layer.packed.weights(), unpacked.view()), "cpu, cuda"},
  };
  for (const auto& [list, names] : kOperations) {
    EXPECT_EQ(names_of(list), names);
    EXPECT_EQ(chosen(list), "cpu");
    for (const Candidate& c : list) {
      EXPECT_EQ(c.supported, c.device == Device::cpu) << c.name;
      EXPECT_EQ(c.supported, c.seconds > 0) << c.name;
      EXPECT_EQ(c.supported, !c.plan.empty()) << c.name;
      EXPECT_EQ(c.workspace, 0) << c.name;
    }
    EXPECT_EQ(candidate_of(list, "cuda").reason, refusal_of_cpu_tensors());
  }
  EXPECT_EQ(candidate_of(kOperations[0].list, "reference").reason, "it runs only when it is asked for");
}

TEST(LowbitChoice, SearchesAreEstimatedLonger) {
  const Format format = format_named("nvfp4");
  const HostTensor weights = weights_of(format);
  const QuantizedMemory out(format, kN, kK);
  const auto seconds = [&](ScaleRule rule) {
    return candidate_of(explain_quantize(weights.view(), {.rule = rule}, out.matrix()), "cpu").seconds;
  };
  EXPECT_LT(seconds(ScaleRule::plain), seconds(ScaleRule::four_six));
  EXPECT_LT(seconds(ScaleRule::four_six), seconds(ScaleRule::mse));
}

TEST(LowbitChoice, TheReferenceAsACandidateGivesTheSameBytes) {
  for (const std::string& name : format_names()) {
    const Format format = format_named(name);
    for (const ScaleRule rule : kit::rules_of(format)) {
      const HostTensor weights = weights_of(format);
      const QuantizedMemory by_cpu(format, kN, kK), by_reference(format, kN, kK);
      quantize(weights.view(), {.rule = rule}, by_cpu.matrix());
      quantize(weights.view(), {.rule = rule, .force = "reference"}, by_reference.matrix());
      EXPECT_EQ(by_reference.difference(by_cpu), "") << name << " " << name_of(rule);
      EXPECT_TRUE(by_reference.guards_intact());
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        const HostTensor one = HostTensor::output(dtype, {kN, kK}), other = HostTensor::output(dtype, {kN, kK});
        dequantize(by_cpu.matrix(), one.view());
        dequantize(by_cpu.matrix(), other.view(), {.force = "reference"});
        for (std::int64_t i = 0; i < kN * kK; ++i) ASSERT_EQ(one.get(i), other.get(i)) << name << " " << i;
      }
    }
  }
}

TEST(LowbitChoice, HeddleKernelIsHeard) {
  const Format format = format_named("nvfp4");
  const HostTensor weights = weights_of(format);
  const QuantizedMemory out(format, kN, kK);
  const kit::LinearLayer layer({.N = 32, .K = 64});
  const HostTensor unpacked = HostTensor::output(DType::f32, {32, 64});
  {
    const Asked asked("reference");
    EXPECT_EQ(chosen(explain_quantize(weights.view(), {}, out.matrix())), "reference");
    EXPECT_EQ(chosen(explain_dequantize(out.matrix(), weights.view())), "reference");
    EXPECT_EQ(chosen(explain_unpack_weights(layer.packed.weights(), unpacked.view())), "cpu");  // has none of that name
    EXPECT_EQ(chosen(explain_quantize(weights.view(), {.force = "cpu"}, out.matrix())), "cpu");
  }
  const Asked asked("cuda");
  const std::string words = "HEDDLE_KERNEL is 'cuda', which cannot serve this call: " + refusal_of_cpu_tensors();
  expect_message([&] { quantize(weights.view(), {}, out.matrix()); }, "[quantize] " + words);
  expect_message([&] { dequantize(out.matrix(), weights.view()); }, "[dequantize] " + words);
  expect_message([&] { unpack_weights(layer.packed.weights(), unpacked.view()); }, "[unpack_weights] " + words);
  EXPECT_TRUE(out.untouched());
}

// The first that is not finite, wherever a larger one is; then the first that the format's scales do not hold.
TEST(LowbitChoice, EachCandidateOnTheCpuFindsBadWeightsBeforeItWrites) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const char* force : {"cpu", "reference"}) {
    const auto refuses = [&](const char* format, std::vector<std::pair<std::int64_t, float>> bad,
                             const std::string& sentence) {
      const Format f = format_named(format);
      HostTensor weights = weights_of(f, DType::f32);
      for (const auto& [at, value] : bad) weights.set(at, value);
      const QuantizedMemory out(f, kN, kK);
      expect_message([&] { quantize(weights.view(), {.force = force}, out.matrix()); }, "[quantize] " + sentence);
      EXPECT_TRUE(out.untouched()) << force << " " << format;
    };
    refuses("nvfp4", {{kK + 5, NAN}}, "weights[1, 5] is nan: weights must be finite");
    refuses("nf4", {{3, 1e30f}, {kK, -kInf}, {2 * kK, NAN}}, "weights[1, 0] is -inf: weights must be finite");
    refuses("int4_g128", {{7, 1e5f}, {2 * kK + 1, -1e6f}},
            "weights[2, 1] is -1e+06: int4_g128 has float16 scales, which serve weights up to 458528");
    refuses("int4_g128", {{7, 1e6f}, {2 * kK + 1, NAN}}, "weights[2, 1] is nan: weights must be finite");
  }
}

}  // namespace
}  // namespace heddle::lowbit
