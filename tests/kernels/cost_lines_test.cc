// The lines of costs that the GPU's candidates bring: each has a name of its own, an example that its candidate takes,
// and an estimate that reads it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/backend.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "heddle/explain.h"

namespace heddle {
namespace {

TensorView view(DType dtype, std::initializer_list<std::int64_t> shape) { return {nullptr, dtype, shape}; }

// Of the candidate of that name, for the example of a line, on an H200 that need not be here; its reason if it refuses.
struct Answer {
  double seconds = 0;
  std::string reason = "no such candidate", plan = {};
};
Answer answer_of(const std::vector<Candidate>& list, const char* name) {
  for (const Candidate& candidate : list) {
    if (candidate.name == name) return {candidate.seconds, candidate.supported ? "" : candidate.reason, candidate.plan};
  }
  return {};
}

const GpuModel& h200() { return gpu_model_named("h200"); }

template <class Problem>
Answer answer(const Kernel<Problem>& kernel, const AttentionExample& c) {
  AttentionOptions options;
  options.precision = c.precision;
  const TensorView q = view(c.q, {c.B, c.Sq, c.H, c.D}), k = view(c.kv, {c.B, c.Sk, c.Hkv, c.D});
  const Pass pass = std::is_same_v<Problem, AttentionProblem> ? Pass::forward : Pass::backward;
  return answer_of(pass == Pass::forward ? explain_attention_on(h200(), q, k, k, options)
                                         : explain_attention_backward_on(h200(), q, k, k, {}, options),
                   kernel.name);
}

template <class Problem>
Answer answer(const Kernel<Problem>& kernel, const SparseExample& c) {
  BlockLists lists{.blocks = view(DType::i32, {c.B, c.lists(), c.Hkv, c.entries}), .counts = {}, .offsets = {}};
  lists.block_size = c.block_size;
  lists.query_rows = c.query_rows;
  const TensorView q = view(c.dtype, {c.B, c.S, c.H, c.D}), k = view(c.dtype, {c.B, c.S, c.Hkv, c.D});
  return answer_of(std::is_same_v<Problem, SparseProblem>
                       ? explain_sparse_attention_on(h200(), q, k, k, lists, {})
                       : explain_sparse_attention_backward_on(h200(), q, k, k, lists, {}, {}),
                   kernel.name);
}

Answer answer(const SelectKernel& kernel, const SelectExample& c) {
  SelectOptions options;
  options.block_size = c.block_size;
  const TensorView q = view(c.dtype, {c.B, c.S, c.H, c.D}), k = view(c.dtype, {c.B, c.pooled(), c.Hkv, c.D});
  return answer_of(explain_select_blocks_on(h200(), q, k, view(DType::f32, {c.B, c.H, c.S}),
                                            view(DType::i32, {c.B, c.S, c.Hkv, c.slots}), options),
                   kernel.name);
}

template <class Problem>
Answer answer(const Kernel<Problem>& kernel, const LinearExample& c) {
  LinearOptions options;
  options.int8_x = c.int8_x;
  const TensorView x = view(c.dtype, {c.M, c.K}), y = view(c.dtype, {c.M, c.N});
  PackedWeights weights;
  if (c.order == WeightOrder::dense) {
    TensorView w = view(c.dtype, {c.N, c.K});
    w.device = Device::cuda;
    weights = dense_weights(w);
  } else {
    weights = packed_storage(lowbit::format_named(c.format), c.N, c.K, /*gated=*/false, c.order);
  }
  if constexpr (std::is_same_v<Problem, LinearProblem>) {
    return answer_of(explain_linear_on(h200(), x, weights, options), kernel.name);
  } else {
    LinearGradients gradients;
    gradients.dx = x;
    return answer_of(explain_linear_backward_on(h200(), y, x, weights, gradients, options), kernel.name);
  }
}

TEST(CostLines, HaveNamesAndRates) {
  std::set<std::string_view> names;
  cuda::for_each_kernel([&]<class Problem>(const Kernel<Problem>& kernel) {
    EXPECT_EQ(kernel.costs.empty(), !cuda::kHasExample<Problem>) << kernel.name << ", " << kernel.method;
    std::vector<const Kernel<Problem>*> all;
    cuda::add_kernels(all);
    const bool compared = std::ranges::count(all, true, &Kernel<Problem>::automatic) > 1;
    EXPECT_TRUE(cuda::kHasExample<Problem> || !compared) << kernel.name << ", " << kernel.method;
  });
  cuda::for_each_cost([&](const auto&, const auto& line) {
    EXPECT_TRUE(names.insert(line.name).second) << line.name << " stands twice";
    EXPECT_GT(line.cost.fixed, 0) << line.name;
    EXPECT_GT(line.cost.flops + line.cost.bytes, 1e9) << line.name;
  });
  EXPECT_EQ(names.size(), cuda::measured_costs().size());
}

TEST(CostLines, ExamplesAreTaken) {
  cuda::for_each_cost([&](const auto& kernel, const auto& line) {
    const Answer said = answer(kernel, line.example);
    EXPECT_EQ(said.reason, "") << line.name;
    EXPECT_NE(said.plan, "") << line.name;
  });
}

// A slow variant of a linear layer is not taken, so that the estimate may hold still one way; but not both.
TEST(CostLines, EstimatesReadThem) {
  cuda::for_each_cost([&](const auto& kernel, const auto& line) {
    const double plain = answer(kernel, line.example).seconds;
    const auto at = [&](double factor) {
      Cost cost = line.cost;
      (line.cost.bytes > 0 ? cost.bytes : cost.flops) *= factor;
      const cuda::CostOverride here(line.name, cost);
      return answer(kernel, line.example).seconds;
    };
    EXPECT_DOUBLE_EQ(at(1), plain) << line.name;
    EXPECT_TRUE(at(0.5) > 1.25 * plain || at(4) < 0.8 * plain) << line.name << ": " << plain;
    EXPECT_DOUBLE_EQ(answer(kernel, line.example).seconds, plain) << line.name << ": it is over";
  });
}

}  // namespace
}  // namespace heddle
