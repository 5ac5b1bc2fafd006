// Rotary embedding and appends to caches choose among candidates as all operations do.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>

#include "heddle/int4_cache.h"
#include "heddle/kv_cache.h"
#include "kernels/elsewhere.h"
#include "kernels/explained.h"
#include "kit/host_tensor.h"
#include "kit/messages.h"

namespace heddle {
namespace {

using kit::expect_message;
using kit::HostTensor;

constexpr std::int64_t kB = 2, kRows = 3, kHeads = 2, kD = 64, kSlots = 8;

struct Call {
  HostTensor k_new = HostTensor::output(DType::bf16, {kB, kRows, kHeads, kD});
  HostTensor v_new = HostTensor::output(DType::bf16, {kB, kRows, kHeads, kD});
  HostTensor k_cache = HostTensor::output(DType::bf16, {kB, kSlots, kHeads, kD});
  HostTensor v_cache = HostTensor::output(DType::bf16, {kB, kSlots, kHeads, kD});
  HostTensor k_tail = HostTensor::output(DType::bf16, {kB, 128, kHeads, kD});
  HostTensor v_tail = HostTensor::output(DType::bf16, {kB, 128, kHeads, kD});
  HostTensor blocks = HostTensor::output(DType::u8, {kB, 1, kHeads, int4_cache_block_bytes(kD, kD)});
  HostTensor angles = HostTensor::output(DType::f32, {kSlots, kD / 2});
  std::array<std::int32_t, kB> lengths{4, 5};
  std::string force = {};

  Rotary rotary() const { return {.cos = angles.view(), .sin = angles.view()}; }
  TensorView seqlens() const { return {lengths.data(), DType::i32, {kB}}; }
  Int4Cache int4() const { return {blocks.view(), k_tail.view(), v_tail.view(), {}, {}}; }

  std::vector<std::vector<Candidate>> explained() const {
    const TensorView k = k_new.view(), v = v_new.view();
    return {explain_apply_rotary(k, k, rotary(), {.force = force}),
            explain_append_kv_cache(k, v, k_cache.view(), v_cache.view(), seqlens(), {.force = force}),
            explain_append_int4_cache(k, v, int4(), seqlens(), {.force = force})};
  }
};

TEST(CacheChoice, ListsWhatThereIs) {
  for (const auto& list : Call().explained()) {
    EXPECT_EQ(names_of(list), "cpu, cuda");
    EXPECT_EQ(chosen(list), "cpu");
    const Candidate cpu = candidate_of(list, "cpu"), gpu = candidate_of(list, "cuda");
    EXPECT_TRUE(cpu.supported);
    EXPECT_EQ(cpu.reason, "");
    EXPECT_GT(cpu.seconds, 0);
    EXPECT_EQ(cpu.workspace, 0);
    EXPECT_NE(cpu.plan, "");
    EXPECT_FALSE(gpu.supported);
    EXPECT_EQ(gpu.reason, refusal_of_cpu_tensors());
    EXPECT_EQ(gpu.method, cpu.method);
  }
}

TEST(CacheChoice, EstimatesFollowBytes) {
  Call small, large;
  large.k_new = large.v_new = HostTensor::output(DType::bf16, {kB, 2 * kRows, kHeads, kD});
  large.lengths = {0, 1};
  const auto few = small.explained(), many = large.explained();
  for (std::size_t i = 0; i < few.size(); ++i) {
    EXPECT_DOUBLE_EQ(candidate_of(many[i], "cpu").seconds, 2 * candidate_of(few[i], "cpu").seconds) << i;
  }
}

TEST(CacheChoice, ForceTakesOneOrItsSentence) {
  const Call c{.force = "cuda"};
  const TensorView k = c.k_new.view(), v = c.v_new.view();
  const std::string words = "force is 'cuda', which cannot serve this call: " + refusal_of_cpu_tensors();
  expect_message([&] { apply_rotary(k, k, c.rotary(), {.force = c.force}); }, "[apply_rotary] " + words);
  expect_message([&] { append_kv_cache(k, v, c.k_cache.view(), c.v_cache.view(), c.seqlens(), {.force = c.force}); },
                 "[append_kv_cache] " + words);
  expect_message([&] { append_int4_cache(k, v, c.int4(), c.seqlens(), {.force = c.force}); },
                 "[append_int4_cache] " + words);
  for (const auto& list : c.explained()) EXPECT_EQ(chosen(list), "");
  expect_message([&] { append_int4_cache(k, v, c.int4(), c.seqlens(), {.force = "sm90"}); },
                 "[append_int4_cache] force is 'sm90': the candidates are cpu, cuda");
}

TEST(CacheChoice, HeddleKernelIsHeardWhereACandidateHasItsName) {
  Call c;
  for (const char* of_others : {"sm90", "reference", "cublaslt", "cpu"}) {
    const Asked asked(of_others);
    for (const auto& list : c.explained()) EXPECT_EQ(chosen(list), "cpu") << of_others;
  }
  const Asked asked("cuda");
  for (const auto& list : c.explained()) EXPECT_EQ(chosen(list), "");
  expect_message([&] { apply_rotary(c.k_new.view(), c.k_new.view(), c.rotary()); },
                 "[apply_rotary] HEDDLE_KERNEL is 'cuda', which cannot serve this call: " + refusal_of_cpu_tensors());
  c.force = "cpu";  // the call's own wish comes first
  for (const auto& list : c.explained()) EXPECT_EQ(chosen(list), "cpu");
}

// Its steps are those operations, and hear of it; the attention has no candidate of that name.
TEST(CacheChoice, HeddleKernelReachesTheStepsOfDecoding) {
  const Call c;
  const HostTensor q = HostTensor::output(DType::bf16, {kB, 1, kHeads, kD}),
                   o = HostTensor::output(DType::bf16, {kB, 1, kHeads, kD});
  AttentionOptions options;
  options.seqused_k = c.seqlens();
  WorkspaceBuffer memory;
  const Runtime runtime{
      .workspace = memory.get(attention_with_kv_cache_workspace(q.view(), c.k_new.view(), c.v_new.view(),
                                                                c.k_cache.view(), c.v_cache.view(), {}, options))};
  const auto call = [&] {
    attention_with_kv_cache(q.view(), c.k_new.view(), c.v_new.view(), c.k_cache.view(), c.v_cache.view(), o.view(), {},
                            {}, options, runtime);
  };
  call();
  const Asked asked("cuda");
  expect_message(call, "[attention_with_kv_cache] HEDDLE_KERNEL is 'cuda', which cannot serve this call: " +
                           refusal_of_cpu_tensors());
}

}  // namespace
}  // namespace heddle
