// Merges of partial results choose among candidates as all operations do.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

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
    EXPECT_EQ(names_of(list), "cpu, reference");
    EXPECT_EQ(chosen(list), "cpu");
    EXPECT_EQ(candidate_of(list, "cpu").method, "merge");
    EXPECT_EQ(candidate_of(list, "reference").reason, "it runs only when it is asked for");
    for (const Candidate& c : list) {
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
                      "[merge_attention] force is 'sm90': the candidates are cpu, reference");
  EXPECT_EQ(m.merged[0], -7);
}

TEST(PartialChoice, MayBeAskedBeforeThereIsData) {
  const TensorView o(nullptr, DType::bf16, {2, 8, 4, 64}), lse(nullptr, DType::f32, {2, 4, 8});
  const std::vector<Partial> partials(3, Partial{o, lse});
  EXPECT_EQ(chosen(explain_merge_attention(partials, o, lse)), "cpu");
  kit::expect_message([&] { merge_attention(partials, o, lse); },
                      "[merge_attention] partials[0].o has no data: its pointer is null");
}

TEST(PartialChoice, NoGpuMergesYet) {
  const TensorView o(nullptr, DType::bf16, {2, 8, 4, 64}), lse(nullptr, DType::f32, {2, 4, 8});
  const std::vector<Partial> partials(3, Partial{o, lse});
  const TensorView sink(nullptr, DType::f32, {4});
  for (const GpuModel& gpu : gpu_models()) {
    for (const auto& list :
         {explain_merge_attention_on(gpu, partials, o, lse, {.sink = sink}),
          explain_merge_attention_backward_on(gpu, partials, o, lse, partials, sink, {.sink = sink})}) {
      EXPECT_EQ(chosen(list), "");
      for (const Candidate& c : list) {
        EXPECT_EQ(c.reason, "it runs on another device than the tensors are on") << c.name;
      }
    }
  }
  EXPECT_EQ(chosen(explain_merge_attention(partials, o, lse, {.sink = sink})), "cpu");
  kit::expect_message([&] { explain_merge_attention_on(gpu_model_named("h100"), {}, o, lse); },
                      "[explain_merge_attention] partials are none: there must be at least one");
}

}  // namespace
}  // namespace heddle
