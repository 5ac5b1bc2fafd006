// Merges of partial results choose among candidates as all operations do.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cuda/backend.h"
#include "heddle/explain.h"
#include "heddle/partial.h"
#include "kernels/explained.h"
#include "kit/messages.h"

namespace heddle {
namespace {

// Two partials of B 1, Sq 2, H 1, Dv 1, whose weights are 1/4 and 3/4 in row 0 and 1/2 each in row 1.
struct Merge {
  float o[2][2] = {{1, 2}, {5, 4}}, lse[2][2] = {{0, 1}, {std::log(3.0f), 1}};
  float merged[2] = {-7, -7}, merged_lse[2] = {-7, -7};
  float d_o[2] = {4, 2}, d_parts[2][2] = {}, d_lses[2][2] = {};

  static TensorView rows(float* x) { return {x, DType::f32, {1, 2, 1, 1}}; }
  static TensorView per_row(float* x) { return {x, DType::f32, {1, 1, 2}}; }
  std::vector<Partial> partials() { return {{rows(o[0]), per_row(lse[0])}, {rows(o[1]), per_row(lse[1])}}; }
  std::vector<Partial> gradients() {
    return {{rows(d_parts[0]), per_row(d_lses[0])}, {rows(d_parts[1]), per_row(d_lses[1])}};
  }
  void run(const MergeOptions& options = {}) {
    merge_attention(partials(), rows(merged), per_row(merged_lse), options);
    merge_attention_backward(partials(), rows(d_o), {}, gradients(), {}, options);
  }
  void expect_results() const {
    EXPECT_FLOAT_EQ(merged[0], 4);
    EXPECT_FLOAT_EQ(merged[1], 3);
    EXPECT_FLOAT_EQ(merged_lse[0], std::log(4.0f));
    EXPECT_FLOAT_EQ(merged_lse[1], 1 + std::log(2.0f));
    EXPECT_FLOAT_EQ(d_parts[0][0], 1);
    EXPECT_FLOAT_EQ(d_parts[1][0], 3);
    EXPECT_FLOAT_EQ(d_parts[0][1], 1);
    EXPECT_FLOAT_EQ(d_parts[1][1], 1);
    EXPECT_FLOAT_EQ(d_lses[0][0], -3);  // 1/4 of d_o (o_p - o)
    EXPECT_FLOAT_EQ(d_lses[1][0], 3);
    EXPECT_FLOAT_EQ(d_lses[0][1], -1);
    EXPECT_FLOAT_EQ(d_lses[1][1], 1);
  }
};

TEST(PartialChoice, ListsWhatThereIs) {
  Merge m;
  for (const auto& list : {explain_merge_attention(m.partials(), Merge::rows(m.merged), Merge::per_row(m.merged_lse)),
                           explain_merge_attention_backward(m.partials(), Merge::rows(m.d_o), {}, m.gradients(), {})}) {
    EXPECT_EQ(names_of(list), "cpu, reference, cuda");
    EXPECT_EQ(chosen(list), "cpu");
    EXPECT_EQ(candidate_of(list, "cpu").method, "merge");
    EXPECT_EQ(candidate_of(list, "reference").reason, "it runs only when it is asked for");
    for (const Candidate& c : list) {
      if (c.device == Device::cuda) continue;
      EXPECT_TRUE(c.supported) << c.name;
      EXPECT_GT(c.seconds, 0) << c.name;
      EXPECT_NE(c.plan, "") << c.name;
    }
  }
}

TEST(PartialChoice, EachGivesTheResults) {
  for (const char* force : {"", "cpu", "reference"}) {
    SCOPED_TRACE(force);
    Merge m;
    m.run({.force = force});
    m.expect_results();
  }
  Merge m;
  const Asked asked("reference");
  EXPECT_EQ(chosen(explain_merge_attention(m.partials(), Merge::rows(m.merged), {})), "reference");
  m.run();
  m.expect_results();
}

TEST(PartialChoice, RefusesOtherNames) {
  Merge m;
  kit::expect_message([&] { m.run({.force = "sm90"}); },
                      "[merge_attention] force is 'sm90': the candidates are cpu, reference, cuda");
  EXPECT_EQ(m.merged[0], -7);
}

TEST(PartialChoice, MayBeAskedBeforeThereIsData) {
  const TensorView o(nullptr, DType::bf16, {2, 8, 4, 64}), lse(nullptr, DType::f32, {2, 4, 8});
  const std::vector<Partial> partials(3, Partial{o, lse});
  EXPECT_EQ(chosen(explain_merge_attention(partials, o, lse)), "cpu");
  kit::expect_message([&] { merge_attention(partials, o, lse); },
                      "[merge_attention] partials[0].o has no data: its pointer is null");
}

TEST(PartialChoice, GpusMerge) {
  const TensorView o(nullptr, DType::bf16, {2, 8, 4, 64}), lse(nullptr, DType::f32, {2, 4, 8});
  const std::vector<Partial> few(3, Partial{o, lse}), many(33, Partial{o, lse});
  const TensorView sink(nullptr, DType::f32, {4});
  for (const GpuModel& gpu : gpu_models()) {
    const auto merge = explain_merge_attention_on(gpu, few, o, lse, {.sink = sink}),
               gradients = explain_merge_attention_backward_on(gpu, few, o, lse, few, sink, {.sink = sink});
    for (const auto& list : {merge, gradients}) {
      EXPECT_EQ(chosen(list), cuda::built() ? "cuda" : "");
      for (const Candidate& c : list) {
        if (c.device == Device::cpu) {
          EXPECT_EQ(c.reason, "it runs on another device than the tensors are on") << c.name;
        }
      }
    }
    if (!cuda::built()) continue;
    const Candidate one = candidate_of(merge, "cuda"), back = candidate_of(gradients, "cuda");
    EXPECT_EQ(one.method, "merge");
    EXPECT_EQ(one.plan, "8 threads for a row of a head, in pieces of 16 bytes");
    EXPECT_GT(one.seconds, 0);
    EXPECT_GT(back.seconds, one.seconds);
    EXPECT_EQ(one.workspace, 0u);
    EXPECT_EQ(back.workspace, 2u * 8 * 4 * sizeof(double));  // a term of dsink for each row
    EXPECT_GT(candidate_of(explain_merge_attention_on(gpu, many, o, lse), "cuda").workspace, 0u);
    const TensorView odd(nullptr, DType::bf16, {2, 8, 4, 33});
    EXPECT_EQ(candidate_of(explain_merge_attention_on(gpu, std::vector<Partial>(2, {odd, lse}), odd, {}), "cuda").plan,
              "32 threads for a row of a head, element by element");
  }
  EXPECT_EQ(chosen(explain_merge_attention(few, o, lse, {.sink = sink})), "cpu");
  kit::expect_message([&] { explain_merge_attention_on(gpu_model_named("h100"), {}, o, lse); },
                      "[explain_merge_attention] partials are none: there must be at least one");
}

TEST(PartialChoice, TheCpuNeedsNoWorkspace) {
  Merge m;
  EXPECT_EQ(merge_attention_workspace(m.partials(), Merge::rows(m.merged), {}), 0u);
  EXPECT_EQ(merge_attention_backward_workspace(m.partials(), Merge::rows(m.d_o), {}, m.gradients(), {}), 0u);
}

}  // namespace
}  // namespace heddle
