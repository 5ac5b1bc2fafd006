// The choice of a candidate, which is one for all operations, and the one list of the GPU's.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/kernels.h"
#include "kernels/bad_arguments.h"
#include "kernels/explained.h"
#include "kernels/linear_cases.h"
#include "kit/linear_gradients.h"
#include "kit/messages.h"
#include "ops/operations.h"

namespace heddle {
namespace {

TEST(GpuKernels, SayOfThemselvesWhatTheirListSays) {
#define HEDDLE_EXPECT_KERNEL(Problem, symbol, its_name, its_method, its_automatic) \
  {                                                                                \
    const Kernel<Problem>& kernel = cuda::symbol;                                  \
    EXPECT_STREQ(kernel.name, its_name);                                           \
    EXPECT_STREQ(kernel.method, its_method) << its_name;                           \
    EXPECT_EQ(kernel.automatic, its_automatic) << its_name;                        \
    EXPECT_EQ(kernel.device, Device::cuda) << its_name;                            \
  }
  HEDDLE_CUDA_KERNELS(HEDDLE_EXPECT_KERNEL)
#undef HEDDLE_EXPECT_KERNEL
}

// Gates are torch's on the CPU, and a step of decoding in one launch is Hopper's.
template <class Problem>
constexpr bool kOnGpusAlone = std::is_same_v<Problem, GateProblem> || std::is_same_v<Problem, GateBackwardProblem> ||
                              std::is_same_v<Problem, NsaStepProblem>;

TEST(Choice, ANameIsOneCandidatesOfAnOperation) {
  AllOperations::each([]<class Problem>() {
    std::set<std::string> names;
    for (const auto* kernel : Operation<Problem>::candidates()) {
      EXPECT_TRUE(names.insert(kernel->name).second) << kernel->name;
      EXPECT_TRUE(names_a_kernel(kernel->name)) << kernel->name;
    }
    EXPECT_EQ(names.contains("cpu"), !kOnGpusAlone<Problem>);
    EXPECT_GE(names.size(), kOnGpusAlone<Problem> ? 1 : 2);
  });
  EXPECT_FALSE(names_a_kernel("cpu "));
  EXPECT_FALSE(names_a_kernel(""));
}

TEST(Choice, EachCandidateSaysAllThatIsAskedOfIt) {
  AllOperations::each([]<class Problem>() {
    for (const auto* kernel : Operation<Problem>::candidates()) {
      EXPECT_NE(kernel->supports, nullptr) << kernel->name;
      EXPECT_NE(kernel->estimate, nullptr) << kernel->name;
      EXPECT_NE(kernel->workspace, nullptr) << kernel->name;
      EXPECT_NE(kernel->launch, nullptr) << kernel->name;
      EXPECT_NE(kernel->describe, nullptr) << kernel->name;
    }
  });
}

// A bit behind kLastExtra is one that the choice does not hold to its rows (src/ops/attention/choice.cc).
TEST(Choice, KernelsOfAttentionNameNoExtraBeyondTheLast) {
  const unsigned end = 2u * kLastExtra;
  for (const auto* kernel : Operation<AttentionProblem>::candidates()) EXPECT_LT(kernel->extras, end) << kernel->name;
  for (const auto* kernel : Operation<AttentionBackwardProblem>::candidates()) {
    EXPECT_LT(kernel->extras, end) << kernel->name;
  }
}

// What attention, its gradients, a linear layer and its gradients choose.
std::vector<std::string> chosen_here(const std::string& force = "") {
  Call c;
  c.options.force = force;
  const kit::LinearGradientLayer layer(kit::LinearCase{.rows = {3}, .N = 34});
  LinearOptions options;
  options.force = force;
  const kit::HostTensor dx = kit::HostTensor::output(DType::f32, {3, 64});
  const PackedWeights weights = layer.layer.packed.weights();
  LinearGradients gradients;
  gradients.dx = dx.view();
  return {chosen(explain_attention(c.q, c.k, c.v, c.options)),
          chosen(explain_attention_backward(c.q, c.k, c.v, {}, c.options)),
          chosen(explain_linear(layer.layer.x.view(), weights, options)),
          chosen(explain_linear_backward(layer.dy.view(), {}, weights, gradients, options))};
}

TEST(Choice, HeddleKernelIsTakenByEveryOperationThatHasOneOfItsName) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(chosen_here(), Names(4, "cpu"));
  EXPECT_EQ(chosen_here("reference"), Names(4, "reference"));
  {
    const Asked asked("reference");
    EXPECT_EQ(chosen_here(), Names(4, "reference"));
    EXPECT_EQ(chosen_here("cpu"), Names(4, "cpu"));  // the call's own wish comes first
  }
  {
    const Asked asked("cpu_baseline");
    EXPECT_EQ(chosen_here(), (Names{"cpu_baseline", "cpu", "cpu", "cpu"}));
  }
  {
    const Asked asked("");
    EXPECT_EQ(chosen_here(), Names(4, "cpu"));
  }
}

TEST(Choice, HeddleKernelMayNotNameWhatNoOperationHas) {
  const kit::LinearLayer layer(kit::LinearCase{.rows = {3}, .N = 34});
  const Asked asked("sm9O");
  Call c;
  kit::expect_message(
      [&] { c.forward(); },
      "[attention_forward] HEDDLE_KERNEL is 'sm9O', which no operation has; here the candidates are cpu, "
      "cpu_baseline, reference, sm90, sm90_fp8, sm90_decode, sm80, sm80_int8, sm80_decode, "
      "baseline_cuda, naive_cuda");
  kit::expect_message([&] { explain_linear(layer.x.view(), layer.packed.weights()); },
                      "[explain_linear] HEDDLE_KERNEL is 'sm9O', which no operation has; here the candidates are cpu, "
                      "reference, sm80_gemv, sm80_linear, sm90_w4a16, sm90_w4a8, cublaslt, cublaslt_w8a8");
}

}  // namespace
}  // namespace heddle
