// The cache in 4 bits on the GPU: appends as on the CPU, bit for bit, and attention by the case table's judge.
#include "heddle/int4_cache.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kit/device_mirror.h"
#include "kit/extreme_bias.h"
#include "kit/int4_case.h"

namespace heddle::kit {
namespace {

// A case with all its tensors on the GPU too.
struct DeviceInt4 {
  const Int4Case& host;
  DeviceTensor q, k_new, v_new, k_tail, v_tail, blocks, page_table, row_idx, lengths, leftpad, sink, mask;

  explicit DeviceInt4(const Int4Case& c)
      : host(c),
        q(c.q),
        k_new(c.k_new),
        v_new(c.v_new),
        k_tail(c.k_tail),
        v_tail(c.v_tail),
        blocks(c.blocks),
        page_table(c.page_table),
        row_idx(c.row_idx),
        lengths(c.lengths),
        leftpad(c.leftpad),
        sink(c.sink),
        mask(c.mask) {}

  Int4Cache cache() const { return {blocks.view(), k_tail.view(), v_tail.view(), page_table.view(), row_idx.view()}; }
  AttentionOptions options() const {
    AttentionOptions out = host.options();
    out.seqused_k = lengths.view();
    out.cache_leftpad = leftpad.view();
    out.sink = sink.view();
    out.mask = mask.view();
    return out;
  }
  void append(std::int64_t b, std::int64_t from, std::int64_t count, const Rotary& rotary = {}) const {
    const DeviceTensor row(indices({host.row_of(b)})), before(indices({from}));
    const Int4Case::Step s =
        Int4Case::step(k_new.view(), v_new.view(), cache(), row.view(), before.view(), b, from, count);
    const DeviceStream stream;
    Runtime runtime;
    runtime.stream = stream.get();
    append_int4_cache(s.k_new, s.v_new, s.cache, s.seqlens, {.rotary = rotary}, runtime);
    stream.synchronize();
  }
  // repeats: over other words in the workspace first, then its own.
  void attend(const AttentionOptions& options, HostTensor& o, HostTensor& lse, int repeats = 1) const {
    const DeviceTensor o_there(o), lse_there(lse);
    const DeviceMemory memory(attention_over_int4_cache_workspace(q.view(), cache(), options), 0xFF);
    for (int repeat = 0; repeat < repeats; ++repeat) {
      const DeviceStream stream;
      Runtime runtime;
      runtime.stream = stream.get();
      runtime.workspace = {memory.data(), memory.bytes()};
      attention_over_int4_cache(q.view(), cache(), o_there.view(), lse_there.view(), options, runtime);
      stream.synchronize();
    }
    o_there.read(o);
    lse_there.read(lse);
  }
  void expect_as(const Int4Case& expected) const {
    const std::pair<const DeviceTensor*, const HostTensor*> tensors[] = {
        {&blocks, &expected.blocks}, {&k_tail, &expected.k_tail}, {&v_tail, &expected.v_tail}};
    for (const auto& [there, here] : tensors) {
      HostTensor found = *here;
      there->read(found);
      EXPECT_TRUE(found.same_bits(*here)) << here->view().shape_text();
    }
  }
};

class GpuInt4Cache : public ::testing::TestWithParam<Int4Spec> {};

TEST_P(GpuInt4Cache, AppendsAsTheCpu) {
  const Int4Case c(GetParam());
  const DeviceInt4 there(c);
  c.fill_cache([&](std::int64_t b, std::int64_t from, std::int64_t count) { there.append(b, from, count); });
  c.fill_cache_on_cpu();
  there.expect_as(c);
}

TEST_P(GpuInt4Cache, AttentionMatchesReference) {
  const Int4Case c(GetParam());
  c.fill_cache_on_cpu();
  const DeviceInt4 there(c);
  std::string served;
  for (const Candidate& candidate : explain_attention_over_int4_cache(there.q.view(), there.cache(), there.options())) {
    if (candidate.supported) served += candidate.name;
  }
  ASSERT_EQ(served, "sm80_decode");
  HostTensor o = c.new_o(), lse = c.new_lse();
  there.attend(there.options(), o, lse, 2);
  EXPECT_EQ(c.verdict(o, lse, true), "");
}

TEST(GpuInt4ExtremeBias, GivesWhatDoublesGive) {
  using namespace extreme_bias;
  for (const std::int64_t rows : {1, 2, 4}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const DType bias_dtype : {DType::f32, dtype}) {
        for (const double end : {largest(bias_dtype), 1e9}) {
          SCOPED_TRACE(text(rows, " rows of ", name_of(dtype), ", bias ", name_of(bias_dtype), " to ", end));
          const Int4Call call(rows, dtype, bias_dtype, end);
          const DeviceInt4 there(call.data);
          const DeviceTensor bias(call.bias);
          AttentionOptions options = there.options();
          options.bias = bias.view();
          HostTensor o = call.data.new_o(), lse = call.data.new_lse();
          there.attend(options, o, lse);
          expect_near(o, call.exact_o, 0.015, "o");
          expect_lse(lse, call.exact_lse, "lse", 2e-3);  // keys are rounded to 16 bits
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Caches, GpuInt4Cache, ::testing::ValuesIn(int4_specs(true)),
                         [](const auto& info) { return info.param.name; });

// Positions decide angles, and the CPU may round a rotated element the other way; so the GPU's own operations judge.
TEST(GpuInt4Append, RotatesNewKeys) {
  const Int4Case c(Int4Spec{.name = "rotated", .lengths = {300, 129}});
  for (const bool interleaved : {false, true}) {
    const DeviceInt4 one(c), two(c);
    HostTensor cos = HostTensor::input(DType::f32, {1024, 48}), sin = cos;
    for (std::int64_t n = 0; n < cos.elements(); ++n) cos.set(n, std::cos(0.1 * n)), sin.set(n, std::sin(0.1 * n));
    const DeviceTensor cos_there(cos), sin_there(sin);
    const Rotary rotary{cos_there.view(), sin_there.view(), interleaved};
    const DeviceStream stream;
    Runtime runtime;
    runtime.stream = stream.get();
    apply_rotary(two.k_new.view(), two.k_new.view(), rotary, {}, runtime);
    stream.synchronize();
    c.fill_cache([&](std::int64_t b, std::int64_t from, std::int64_t count) {
      one.append(b, from, count, rotary);
      two.append(b, from, count);
    });
    Int4Case expected = c;
    two.blocks.read(expected.blocks);
    two.k_tail.read(expected.k_tail);
    two.v_tail.read(expected.v_tail);
    one.expect_as(expected);
    EXPECT_FALSE(expected.k_tail.same_bits(c.k_tail));
  }
}

// What is out of range is dropped, and nothing else is written.
TEST(GpuInt4Append, DropsWhatIsOutOfRange) {
  Int4Case c(Int4Spec{.name = "dropped", .lengths = {200, 200}, .paged = true, .row_idx = true});
  c.page_table.set(0, 99);
  c.page_table.set(1, -1);
  const Int4Case before = c;
  const DeviceInt4 there(c);
  const auto append = [&](std::int64_t row, std::int64_t from, std::int64_t count) {
    const DeviceTensor rows(indices({row})), lengths(indices({from}));
    const Int4Case::Step s =
        Int4Case::step(there.k_new.view(), there.v_new.view(), there.cache(), rows.view(), lengths.view(), 0, 0, count);
    const DeviceStream stream;
    Runtime runtime;
    runtime.stream = stream.get();
    append_int4_cache(s.k_new, s.v_new, s.cache, s.seqlens, {}, runtime);
    stream.synchronize();
  };
  append(4, 10, 3);
  append(-1, 10, 3);
  append(0, -5, 3);
  append(0, 893, 3);
  append(0, 2147483647, 3);
  there.expect_as(before);
  append(0, 126, 2);  // block 0 has no page
  HostTensor blocks = before.blocks, k_tail = before.k_tail;
  there.blocks.read(blocks);
  there.k_tail.read(k_tail);
  EXPECT_TRUE(blocks.same_bits(before.blocks));
  EXPECT_FALSE(k_tail.same_bits(before.k_tail));
}

}  // namespace
}  // namespace heddle::kit
