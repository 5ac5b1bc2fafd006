// Index data on a GPU is checked by nobody before the kernels read it: what names no page, row or length is clamped, in
// every candidate that takes such data, and nothing beside the outputs is written. Under memcheck, nothing beside the
// tensors is read either.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "gpu/device_backward.h"
#include "gpu/kv_cache_mirror.h"
#include "heddle/int4_cache.h"
#include "kit/int4_case.h"

namespace heddle::kit {
namespace {

constexpr double kFar = 2147483647.0;  // int32's largest

// Index data with every third entry out of [low, high], and the same with such entries at the nearer end.
struct Wild {
  HostTensor wild, clamped;
  Wild(const HostTensor& indices, double low, double high) : wild(indices), clamped(indices) {
    for (std::int64_t n = 0; n < indices.elements(); n += 3) {
      const double beyond[] = {high + 1, low - 1, kFar, -kFar - 1};
      wild.set(n, beyond[n / 3 % 4]);
      clamped.set(n, n / 3 % 2 == 0 ? high : low);
    }
  }
};

// What every candidate writes with such indices is what it writes with them clamped, bit for bit.
void expect_clamped(const char* name, TensorView AttentionOptions::*option, const HostTensor CaseData::*indices,
                    double low, const std::function<double(const DeviceCall&)>& high) {
  SCOPED_TRACE(name);
  DeviceCase at(attention_case(name));
  const Wild data(at.runner.data().*indices, low, high(at.call));
  const DeviceTensor wild(data.wild), clamped(data.clamped);
  const std::vector<std::string> candidates = at.runner.candidates(Pass::forward);
  ASSERT_FALSE(candidates.empty());
  for (const std::string& candidate : candidates) {
    SCOPED_TRACE(candidate);
    DeviceCall call = at.call;
    call.options.force = candidate;
    call.options.*option = clamped.view();
    at.poison();
    call.run();
    const ForwardOutputs expected = at.read();
    call.options.*option = wild.view();
    at.poison();
    call.run();
    const ForwardOutputs out = at.read();
    EXPECT_TRUE(same_bits(expected, out));
    EXPECT_EQ(out.o.damage() + out.lse.damage(), "");
  }
}

TEST(GpuIndices, Pages) {
  for (const char* name :
       {"feature_paged_64_f16", "feature_paged_64_f32", "feature_paged_3_f16", "decode_paged_16_bf16",
        "decode_pages_1_f16", "decode_pages_48_f16", "decode_pages_256_f16", "decode_f8_cache_paged_bf16",
        "decode_f8_cache_paged_scaled_rows_f16", "decode_rows_64_pages_16_bf16", "decode_rows_32_pages_64_bf16"}) {
    expect_clamped(name, &AttentionOptions::page_table, &CaseData::page_table, 0,
                   [](const DeviceCall& call) { return static_cast<double>(call.k.shape[0] - 1); });
  }
}

TEST(GpuIndices, RowsOfTheCache) {
  for (const char* name : {"feature_cache_batch_idx_bf16", "feature_cache_batch_idx_f32", "decode_cache_rows_bf16"}) {
    expect_clamped(name, &AttentionOptions::cache_batch_idx, &CaseData::cache_batch_idx, 0,
                   [](const DeviceCall& call) { return static_cast<double>(call.k.shape[0] - 1); });
  }
}

TEST(GpuIndices, Lengths) {
  for (const char* name :
       {"feature_used_both_causal_bf16", "feature_used_both_causal_f32", "feature_e4m3_used_both_causal_e4m3",
        "decode_rows_3_batch_bf16", "decode_uneven_lengths_f16", "decode_rows_64_f16"}) {
    expect_clamped(name, &AttentionOptions::seqused_k, &CaseData::seqused_k, 0,
                   [](const DeviceCall& call) { return static_cast<double>(call.k.shape[1]); });
  }
  expect_clamped("feature_used_both_causal_bf16", &AttentionOptions::seqused_q, &CaseData::seqused_q, 0,
                 [](const DeviceCall& call) { return static_cast<double>(call.q.shape[1]); });
}

TEST(GpuIndices, LeftPadding) {
  for (const char* name : {"feature_leftpad_f16", "decode_leftpad_window_f16", "decode_paged_3_leftpad_bf16"}) {
    SCOPED_TRACE(name);
    DeviceCase at(attention_case(name));
    HostTensor wild = at.runner.data().leftpad;
    for (std::int64_t n = 0; n < wild.elements(); ++n) wild.set(n, n % 2 == 0 ? kFar : -kFar - 1);
    const DeviceTensor there(wild);
    for (const std::string& candidate : at.runner.candidates(Pass::forward)) {
      SCOPED_TRACE(candidate);
      at.call.options.force = candidate;
      at.call.options.cache_leftpad = there.view();
      at.poison();
      at.call.run();
      EXPECT_EQ(at.read().o.damage() + at.read().lse.damage(), "");
    }
  }
}

// Where sequences begin decides which rows are written, so there is nothing to compare with: the call ends, and what
// it writes is within its outputs.
std::vector<HostTensor> wild_offsets(const HostTensor& offsets) {
  const std::int64_t last = offsets.elements() - 1;
  const double total = offsets.get(last);
  std::vector<HostTensor> out(5, offsets);
  for (std::int64_t n = 0; n <= last; ++n) {
    out[0].set(n, n % 2 == 0 ? kFar : -kFar - 1);
    out[1].set(n, total - offsets.get(n));  // backwards
    out[2].set(n, offsets.get(n) + total);
    out[3].set(n, n == 0 ? 0 : total + 1000 * static_cast<double>(n));
    out[4].set(n, n % 2 == 0 ? -5 : total + 5);
  }
  return out;
}

TEST(GpuIndices, PackedSequences) {
  for (const char* name : {"feature_packed_f16", "feature_packed_causal_bf16", "feature_packed_causal_f32",
                           "feature_packed_all_bf16", "feature_packed_used_bf16", "feature_e4m3_packed_causal_e4m3",
                           "feature_e4m3_scaled_rows_packed_e4m3", "decode_packed_f16", "decode_rows_32_packed_bf16"}) {
    SCOPED_TRACE(name);
    DeviceCase at(attention_case(name));
    const std::vector<HostTensor> q_offsets = wild_offsets(at.runner.data().cu_seqlens_q),
                                  k_offsets = wild_offsets(at.runner.data().cu_seqlens_k);
    // Where keys are split the same way for every batch, partial results are as many as the longest sequence has.
    for (const bool invariant : {false, true}) {
      SCOPED_TRACE(invariant);
      at.runner.options().batch_invariant = invariant;
      for (const std::string& candidate : at.runner.candidates(Pass::forward)) {
        SCOPED_TRACE(candidate);
        for (std::size_t n = 0; n < q_offsets.size(); ++n) {
          const DeviceTensor q(q_offsets[n]), k(k_offsets[n]);
          DeviceCall call = at.call;
          call.options.force = candidate;
          call.options.batch_invariant = invariant;
          call.options.cu_seqlens_q = q.view();
          call.options.cu_seqlens_k = k.view();
          at.poison();
          call.run();
          EXPECT_EQ(at.read().o.damage() + at.read().lse.damage(), "") << "offsets " << n;
        }
      }
    }
  }
}

// Offsets that lie beyond the rows stand for the last one: no row before them is left unwritten.
TEST(GpuIndices, PackedSequencesBeyondTheEnd) {
  for (const char* name : {"feature_packed_f16", "feature_packed_causal_bf16", "feature_packed_causal_f32",
                           "feature_e4m3_packed_causal_e4m3", "decode_packed_f16"}) {
    SCOPED_TRACE(name);
    DeviceCase at(attention_case(name));
    const HostTensor& offsets = at.runner.data().cu_seqlens_q;
    const std::int64_t last = offsets.elements() - 1;
    for (std::int64_t first = 1; first <= last; ++first) {
      HostTensor wild = offsets, clamped = offsets;
      for (std::int64_t n = first; n <= last; ++n) {
        wild.set(n, kFar);
        clamped.set(n, offsets.get(last));
      }
      const DeviceTensor there(wild), as(clamped);
      for (const std::string& candidate : at.runner.candidates(Pass::forward)) {
        SCOPED_TRACE(candidate);
        DeviceCall call = at.call;
        call.options.force = candidate;
        call.options.cu_seqlens_q = as.view();
        at.poison();
        call.run();
        const ForwardOutputs expected = at.read();
        call.options.cu_seqlens_q = there.view();
        at.poison();
        call.run();
        EXPECT_TRUE(same_bits(expected, at.read())) << "from offset " << first;
      }
    }
  }
}

// Positions outside 31 bits, and columns that a bias or mask has not: nothing outside of them is read.
TEST(GpuIndices, PositionsOfPieces) {
  int asked = 0;
  for (const AttentionCase& spec : attention_cases()) {
    if (!spec.piece()) continue;
    SCOPED_TRACE(spec.name);
    DeviceCase at(spec);
    for (const std::string& candidate : at.runner.candidates(Pass::forward)) {
      SCOPED_TRACE(candidate);
      for (const double far : {kFar, static_cast<double>(spec.columns()) + 3}) {
        HostTensor rows = at.runner.data().q_offset, keys = at.runner.data().key_offset;
        for (HostTensor* offset : {&rows, &keys}) {
          for (std::int64_t b = 0; offset->given() && b < offset->elements(); ++b) {
            offset->set(b, (b % 2 == 0) == (offset == &rows) ? far : -far - 1);
          }
        }
        const DeviceTensor rows_there(rows), keys_there(keys);
        DeviceCall call = at.call;
        call.options.force = candidate;
        call.options.q_offset = rows_there.view();
        call.options.key_offset = keys_there.view();
        at.poison();
        call.run();
        EXPECT_EQ(at.read().o.damage() + at.read().lse.damage(), "");
        ++asked;
      }
    }
  }
  EXPECT_GT(asked, 0);
}

// Rows that stand far behind all keys attend each of them under causality, and those far before none.
TEST(GpuIndices, PiecesFarApart) {
  AttentionCase spec = attention_case("feature_piece_causal_f32");
  DeviceCase at(spec);
  for (const std::string& candidate : at.runner.candidates(Pass::forward)) {
    SCOPED_TRACE(candidate);
    const auto run = [&](double q_offset, double key_offset, Causal causal) {
      HostTensor rows = at.runner.data().q_offset, keys = at.runner.data().key_offset;
      for (std::int64_t b = 0; b < rows.elements(); ++b) {
        rows.set(b, q_offset);
        keys.set(b, key_offset);
      }
      const DeviceTensor rows_there(rows), keys_there(keys);
      DeviceCall call = at.call;
      call.options.force = candidate;
      call.options.causal = causal;
      call.options.q_offset = rows_there.view();
      call.options.key_offset = keys_there.view();
      at.poison();
      call.run();
      return at.read();
    };
    const ForwardOutputs all = run(0, 0, Causal::none);
    for (const double far : {1.5e9, 2147483000.0}) {
      EXPECT_TRUE(same_bits(run(far, 0, Causal::top_left), all)) << far;
      EXPECT_TRUE(same_bits(run(far, far, Causal::none), all)) << far;
      for (const double x : run(0, far, Causal::top_left).lse.values()) {
        ASSERT_EQ(x, -std::numeric_limits<double>::infinity()) << far;
      }
    }
  }
}

TEST(GpuIndices, Gradients) {
  for (const char* name :
       {"feature_packed_f16", "feature_packed_causal_bf16", "feature_packed_causal_f32", "feature_packed_used_bf16",
        "feature_used_both_causal_bf16", "feature_used_both_causal_f32"}) {
    SCOPED_TRACE(name);
    BackwardCase at(attention_case(name));
    const CaseData& data = at.forward.runner.data();
    const bool packed = data.cu_seqlens_q.given();
    const std::vector<HostTensor> q_offsets = packed ? wild_offsets(data.cu_seqlens_q) : std::vector<HostTensor>(2),
                                  k_offsets = packed ? wild_offsets(data.cu_seqlens_k) : std::vector<HostTensor>(2);
    HostTensor used_q = data.seqused_q, used_k = data.seqused_k;
    for (const bool deterministic : {false, true}) {
      at.call.forward.options.deterministic = deterministic;
      for (const std::string& candidate : candidates(at.call)) {
        SCOPED_TRACE(candidate);
        for (std::size_t n = 0; n < q_offsets.size(); ++n) {
          for (HostTensor* used : {&used_q, &used_k}) {
            for (std::int64_t b = 0; used->given() && b < used->elements(); ++b) {
              used->set(b, (b + static_cast<std::int64_t>(n)) % 2 == 0 ? kFar : -kFar - 1);
            }
          }
          const DeviceTensor q(q_offsets[n]), k(k_offsets[n]), rows(used_q), keys(used_k);
          BackwardCall call = at.call;
          call.forward.options.force = candidate;
          if (packed) {
            call.forward.options.cu_seqlens_q = q.view();
            call.forward.options.cu_seqlens_k = k.view();
          }
          call.forward.options.seqused_q = rows.view();
          call.forward.options.seqused_k = keys.view();
          at.poison();
          call.run();
          const Gradients out = at.read();
          EXPECT_EQ(out.dq.damage() + out.dk.damage() + out.dv.damage(), "") << "indices " << n;
        }
      }
    }
  }
}

TEST(GpuIndices, Int4Cache) {
  for (const std::int64_t size : {64, 128}) {
    Int4Case c(Int4Spec{.name = "wild", .D = size, .Dv = size, .paged = true, .row_idx = true});
    c.fill_cache_on_cpu();
    const Wild pages(c.page_table, 0, static_cast<double>(c.blocks.view().shape[0] - 1));
    const Wild rows(c.row_idx, 0, static_cast<double>(c.k_tail.view().shape[0] - 1));
    HostTensor far = c.lengths;
    for (std::int64_t b = 0; b < far.elements(); ++b) far.set(b, b % 2 == 0 ? kFar : -kFar - 1);
    const DeviceTensor q(c.q), blocks(c.blocks), k_tail(c.k_tail), v_tail(c.v_tail), lengths(c.lengths), far_there(far);
    const DeviceTensor wild_pages(pages.wild), clamped_pages(pages.clamped), wild_rows(rows.wild),
        clamped_rows(rows.clamped);
    const auto run = [&](const DeviceTensor& table, const DeviceTensor& row, const DeviceTensor& used) {
      const Int4Cache cache = {blocks.view(), k_tail.view(), v_tail.view(), table.view(), row.view()};
      AttentionOptions options = c.options();
      options.seqused_k = used.view();
      HostTensor host_o = c.new_o(), host_lse = c.new_lse();
      DeviceTensor o(host_o), lse(host_lse);
      const DeviceStream stream;
      const DeviceMemory memory(attention_over_int4_cache_workspace(q.view(), cache, options), 0xFF);
      Runtime runtime;
      runtime.stream = stream.get();
      runtime.workspace = {memory.data(), memory.bytes()};
      attention_over_int4_cache(q.view(), cache, o.view(), lse.view(), options, runtime);
      stream.synchronize();
      o.read(host_o);
      lse.read(host_lse);
      EXPECT_EQ(host_o.damage() + host_lse.damage(), "");
      return ForwardOutputs{host_o, host_lse};
    };
    EXPECT_TRUE(same_bits(run(wild_pages, wild_rows, lengths), run(clamped_pages, clamped_rows, lengths)));
    run(wild_pages, wild_rows, far_there);
  }
}

// New keys that a call brings go where the index data says, or nowhere: not to the page or row that reads are clamped
// to, which is somebody else's.
class GpuAppendIndices : public ::testing::TestWithParam<DType> {
 protected:
  static constexpr std::int64_t kB = 6, kNew = 3, kHeads = 2, kSize = 128;

  // seqlens, and a page table or rows of the cache; pages of `page` slots.
  void expect_dropped(const std::vector<std::int32_t>& seqlens, const std::vector<std::int32_t>& table,
                      const std::vector<std::int32_t>& rows, std::int64_t pages, std::int64_t page, DType stored) {
    using namespace kv_cache_tests;
    const DType dtype = GetParam();
    Tensor q(dtype, {kB, 1, 4 * kHeads, kSize}), k_new(dtype, {kB, kNew, kHeads, kSize}),
        v_new(dtype, {kB, kNew, kHeads, kSize}), k_cache(stored, {pages, page, kHeads, kSize}),
        v_cache(stored, {pages, page, kHeads, kSize}), o(dtype, {kB, 1, 4 * kHeads, kSize});
    unsigned seed = 1;
    for (Tensor* x : {&q, &k_new, &v_new, &k_cache, &v_cache}) x->randomize(seed++);
    const Mirror q_there(q), k_new_there(k_new), v_new_there(v_new), seqlens_there(kv_cache_tests::indices(seqlens));
    const Mirror table_there(
        table.empty() ? TensorView()
                      : TensorView(table.data(), DType::i32, {kB, static_cast<std::int64_t>(table.size()) / kB})),
        rows_there(rows.empty() ? TensorView() : kv_cache_tests::indices(rows));
    AttentionOptions options;
    options.seqused_k = seqlens_there.view();
    options.page_table = table_there.view();
    options.cache_batch_idx = rows_there.view();
    // append_kv_cache is held to the CPU by tests of its own.
    const Mirror k_expected(k_cache), v_expected(v_cache);
    on_stream([&](const Runtime& runtime) {
      append_kv_cache(k_new_there.view(), v_new_there.view(), k_expected.view(), v_expected.view(),
                      seqlens_there.view(), {.page_table = table_there.view(), .cache_batch_idx = rows_there.view()},
                      runtime);
    });
    EXPECT_NE(k_expected.bytes(), k_cache.bytes());  // some rows are in the cache
    bool any = false;
    for (const Candidate& candidate :
         explain_attention(q_there.view(), k_expected.view(), v_expected.view(), options)) {
      if (!candidate.supported || candidate.method == "reference") continue;
      SCOPED_TRACE(candidate.name);
      any = true;
      options.force = candidate.name;
      const Mirror k_there(k_cache), v_there(v_cache), o_there(o);
      const DeviceMemory memory(
          attention_with_kv_cache_workspace(q_there.view(), k_new_there.view(), v_new_there.view(), k_there.view(),
                                            v_there.view(), {}, options),
          0xFF);
      on_stream([&](Runtime runtime) {
        runtime.workspace = {memory.data(), memory.bytes()};
        attention_with_kv_cache(q_there.view(), k_new_there.view(), v_new_there.view(), k_there.view(), v_there.view(),
                                o_there.view(), {}, {}, options, runtime);
      });
      expect_equal(k_there.bytes(), k_expected.bytes(), stored, 0, "k_cache");
      expect_equal(v_there.bytes(), v_expected.bytes(), stored, 0, "v_cache");
    }
    EXPECT_TRUE(any);
  }
};

constexpr std::int32_t kMost = 2147483647, kLeast = -kMost - 1;

TEST_P(GpuAppendIndices, Pages) {
  // Two pages of 16 slots a sequence; the first sequence's new keys lie on its first page, and so on.
  const std::vector<std::int32_t> seqlens = {3, 20, 14, 7, 18, 29};
  const std::vector<std::int32_t> table = {-1, 0, 1, 12, 2, kMost, kLeast, 3, 4, 5, 6, 13};
  for (const DType stored : {GetParam(), DType::f8e4m3}) expect_dropped(seqlens, table, {}, 12, 16, stored);
}

TEST_P(GpuAppendIndices, Rows) {
  for (const DType stored : {GetParam(), DType::f8e4m3}) {
    expect_dropped({3, 20, 14, 7, 18, 29}, {}, {-1, 7, 3, kMost, kLeast, 0}, 7, 64, stored);
  }
}

TEST_P(GpuAppendIndices, Lengths) {
  for (const DType stored : {GetParam(), DType::f8e4m3}) {
    expect_dropped({-1, 63, 64, kMost, kLeast, 5}, {}, {}, kB, 64, stored);
    expect_dropped({-2, 63, 64, kMost, kLeast, 5}, {}, {5, 4, 3, 2, 1, 0}, kB, 64, stored);
    expect_dropped({-2, 31, 32, kMost, kLeast, 5}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {}, 12, 16, stored);
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, GpuAppendIndices, ::testing::Values(DType::bf16, DType::f16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace heddle::kit
