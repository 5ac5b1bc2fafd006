// What bad arguments are told, word for word where it matters, and that nothing is written before it is said.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "heddle/attention.h"
#include "heddle/error.h"

namespace heddle {
namespace {

// A call that is right: B 2, Sq 5, Sk 7, H 4, Hkv 2, D 8, Dv 6. Each test spoils one thing in it.
struct Call {
  std::vector<float> data = std::vector<float>(4096, 0.5f), written = std::vector<float>(4096, -7.0f);
  std::vector<std::int32_t> index = std::vector<std::int32_t>(64, 0);
  std::vector<unsigned char> bits = std::vector<unsigned char>(1024, 1);
  WorkspaceBuffer buffer;

  TensorView q{data.data(), DType::f32, {2, 5, 4, 8}}, k{data.data(), DType::f32, {2, 7, 2, 8}},
      v{data.data(), DType::f32, {2, 7, 2, 6}}, o{written.data(), DType::f32, {2, 5, 4, 6}},
      lse{written.data() + 240, DType::f32, {2, 4, 5}};
  TensorView d_o{data.data(), DType::f32, {2, 5, 4, 6}}, d_lse;
  AttentionGradients gradients{TensorView(written.data() + 300, DType::f32, {2, 5, 4, 8}),
                               TensorView(written.data() + 700, DType::f32, {2, 7, 2, 8}),
                               TensorView(written.data() + 1000, DType::f32, {2, 7, 2, 6}),
                               {},
                               {}};
  AttentionOptions options;

  TensorView floats(std::initializer_list<std::int64_t> shape) { return {data.data(), DType::f32, shape}; }
  TensorView indices(std::vector<std::int32_t> values) {
    std::copy(values.begin(), values.end(), index.begin() + used);
    const TensorView view(index.data() + used, DType::i32, {static_cast<std::int64_t>(values.size())});
    used += values.size();
    return view;
  }
  // q [5, 4, 8] and k, v [7, ...] of two sequences.
  void pack() {
    q = floats({5, 4, 8}), k = floats({7, 2, 8}), v = floats({7, 2, 6});
    o = TensorView(written.data(), DType::f32, {5, 4, 6}), lse = TensorView(written.data() + 240, DType::f32, {4, 5});
    options.cu_seqlens_q = indices({0, 2, 5}), options.cu_seqlens_k = indices({0, 3, 7});
  }
  // k and v in 6 pages of 4 keys, two for each sequence.
  void page() {
    k = floats({6, 4, 2, 8}), v = floats({6, 4, 2, 6});
    TensorView table = indices({0, 1, 2, 3});
    options.page_table = TensorView(table.data, DType::i32, {2, 2});
  }

  void forward() {
    Runtime runtime;
    runtime.workspace = buffer.get(1 << 24);
    attention_forward(q, k, v, o, lse, options, runtime);
  }
  void backward() {
    Runtime runtime;
    runtime.workspace = buffer.get(1 << 24);
    attention_backward(q, k, v, TensorView(data.data(), o.dtype, {2, 5, 4, 6}), floats({2, 4, 5}), d_o, d_lse,
                       gradients, options, runtime);
  }
  bool untouched() const {
    return std::all_of(written.begin(), written.end(), [](float x) { return x == -7.0f; });
  }

 private:
  std::size_t used = 0;
};

struct BadArgument {
  const char* name;
  std::function<void(Call&)> spoil;
  const char* message;  // a part of it
  bool backward = false;
};

void PrintTo(const BadArgument& bad, std::ostream* out) { *out << bad.name; }
std::string name_of_test(const ::testing::TestParamInfo<BadArgument>& info) { return info.param.name; }

class BadArguments : public ::testing::TestWithParam<BadArgument> {};

TEST_P(BadArguments, AreRefusedWithTheirRule) {
  Call call;
  GetParam().spoil(call);
  const std::string operation = GetParam().backward ? "[attention_backward] " : "[attention_forward] ";
  try {
    GetParam().backward ? call.backward() : call.forward();
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_EQ(what.rfind(operation, 0), 0u) << what;
    EXPECT_NE(what.find(GetParam().message), std::string::npos) << what;
  }
  EXPECT_TRUE(call.untouched());
}

const float kNan = std::numeric_limits<float>::quiet_NaN();
const float kInfinity = std::numeric_limits<float>::infinity();

INSTANTIATE_TEST_SUITE_P(
    Shapes, BadArguments,
    ::testing::Values(
        BadArgument{"q_missing", [](Call& c) { c.q = {}; }, "q is missing"},
        BadArgument{"k_missing", [](Call& c) { c.k = {}; }, "k is missing"},
        BadArgument{"o_missing", [](Call& c) { c.o = {}; }, "o is missing"},
        BadArgument{"lse_in_o", [](Call& c) { c.lse.data = c.o.data; },
                    "o and lse share memory: outputs must be apart"},
        BadArgument{"q_null", [](Call& c) { c.q.data = nullptr; }, "q has no data: its pointer is null"},
        BadArgument{"q_rank",
                    [](Call& c) {
                      c.q = c.floats({5, 4, 8});
                    },
                    "q has 3 dimensions: it must be [B, Sq, H, D]; found q [5, 4, 8]"},
        BadArgument{"q_integers", [](Call& c) { c.q.dtype = DType::i32; },
                    "q is int32: attention takes float32, float16, bfloat16 or float8_e4m3fn"},
        BadArgument{"k_other_dtype", [](Call& c) { c.k.dtype = DType::bf16; }, "k is bfloat16: it must be float32"},
        BadArgument{"o_other_dtype", [](Call& c) { c.o.dtype = DType::f16; }, "o is float16: it must be float32"},
        BadArgument{"groups",
                    [](Call& c) {
                      c.k = c.floats({2, 7, 3, 8}), c.v = c.floats({2, 7, 3, 6});
                    },
                    "k has 3 heads and q has 4: q's heads must be a multiple of k's; found q [2, 5, 4, 8], k [2, 7, 3, "
                    "8]"},
        BadArgument{"no_kv_heads",
                    [](Call& c) {
                      c.k = c.floats({2, 7, 0, 8}), c.v = c.floats({2, 7, 0, 6});
                    },
                    "k has 0 heads and q has 4"},
        BadArgument{"head_sizes",
                    [](Call& c) {
                      c.k = c.floats({2, 7, 2, 7});
                    },
                    "k has head size 7 and q has 8"},
        BadArgument{"head_size_0",
                    [](Call& c) {
                      c.q = c.floats({2, 5, 4, 0});
                    },
                    "q has head size 0"},
        BadArgument{"head_size_257",
                    [](Call& c) {
                      c.q = c.floats({1, 1, 1, 257}), c.k = c.v = c.floats({1, 1, 1, 257});
                    },
                    "q has head size 257: it must be from 1 to 256"},
        BadArgument{"value_size_300",
                    [](Call& c) {
                      c.v = c.floats({2, 7, 2, 300});
                    },
                    "v has head size 300: it must be from 1 to 256"},
        BadArgument{"v_length",
                    [](Call& c) {
                      c.v = c.floats({2, 6, 2, 6});
                    },
                    "v has extent 6 in dimension 1 and k has 7"},
        BadArgument{"v_heads",
                    [](Call& c) {
                      c.v = c.floats({2, 7, 1, 6});
                    },
                    "v has extent 1 in dimension 2"},
        BadArgument{"batches",
                    [](Call& c) {
                      c.k = c.floats({3, 7, 2, 8}), c.v = c.floats({3, 7, 2, 6});
                    },
                    "k has 3 sequences and q has 2"},
        BadArgument{"o_rows", [](Call& c) { c.o.shape[1] = 4; }, "o is [2, 4, 4, 6]: dimension 1 must be q's, 5"},
        BadArgument{"o_width", [](Call& c) { c.o.shape[3] = 8; }, "its last extent must be 6"},
        BadArgument{"lse_shape", [](Call& c) { c.lse.shape[1] = 3; }, "it must be [B, H, Sq] = [2, 4, 5]"},
        BadArgument{"lse_dtype", [](Call& c) { c.lse.dtype = DType::f16; }, "lse is float16: it must be float32"},
        BadArgument{"o_overlaps",
                    [](Call& c) {
                      c.o.stride = {120, 24, 3, 1};
                    },
                    "o is an output whose elements overlap"},
        BadArgument{"o_expanded", [](Call& c) { c.o.stride[0] = 0; }, "o is an output whose elements overlap"},
        BadArgument{"lse_overlaps", [](Call& c) { c.lse.stride[1] = 4; }, "lse is an output whose elements overlap"},
        BadArgument{"stride_too_large", [](Call& c) { c.q.stride[0] = std::int64_t{1} << 60; },
                    "q spans more than 2^58 elements"},
        BadArgument{"negative_extent", [](Call& c) { c.q.shape[1] = -1; }, "extent -1 in dimension 1"}),
    name_of_test);

INSTANTIATE_TEST_SUITE_P(
    Options, BadArguments,
    ::testing::Values(
        BadArgument{"scale_nan", [](Call& c) { c.options.scale = kNan; }, "scale is nan: it must be finite"},
        BadArgument{"softcap_negative", [](Call& c) { c.options.softcap = -1; }, "softcap is -1"},
        BadArgument{"softcap_infinite", [](Call& c) { c.options.softcap = kInfinity; }, "softcap is inf"},
        BadArgument{"window", [](Call& c) { c.options.window_left = -2; },
                    "window is (-2, -1): each side must be at least 0, or -1 for open"},
        BadArgument{"dropout_1", [](Call& c) { c.options.dropout.p = 1; }, "dropout.p is 1: it must be in [0, 1)"},
        BadArgument{"dropout_negative", [](Call& c) { c.options.dropout.p = -0.1f; }, "dropout.p is -0.1"},
        BadArgument{"dropout_nan", [](Call& c) { c.options.dropout.p = kNan; }, "dropout.p is nan"},
        BadArgument{"alibi_shape", [](Call& c) { c.options.alibi_slopes = c.floats({3}); },
                    "alibi_slopes is [3]: it must be [H] = [4] or [B, H] = [2, 4]"},
        BadArgument{"alibi_batch",
                    [](Call& c) {
                      c.options.alibi_slopes = c.floats({3, 4});
                    },
                    "alibi_slopes is [3, 4]"},
        BadArgument{"alibi_rank",
                    [](Call& c) {
                      c.options.alibi_slopes = c.floats({1, 2, 4});
                    },
                    "alibi_slopes is [1, 2, 4]"},
        BadArgument{"sink_shape", [](Call& c) { c.options.sink = c.floats({2}); },
                    "sink is [2]: it must have one logit for each of 4 heads"},
        BadArgument{"bias_rank",
                    [](Call& c) {
                      c.options.bias = c.floats({5, 7});
                    },
                    "bias has 2 dimensions"},
        BadArgument{"bias_extent",
                    [](Call& c) {
                      c.options.bias = c.floats({1, 2, 5, 7});
                    },
                    "bias is [1, 2, 5, 7]: dimension 1 must be 1 or 4"},
        BadArgument{"bias_dtype",
                    [](Call& c) {
                      c.options.bias = TensorView(c.data.data(), DType::f16, {1, 1, 5, 7});
                    },
                    "bias is float16: it must be float32"},
        BadArgument{"mask_floats",
                    [](Call& c) {
                      c.options.mask = c.floats({1, 1, 5, 7});
                    },
                    "mask is float32: it must be bool (true = attend); pass numbers that are added as bias"},
        BadArgument{"mask_extent",
                    [](Call& c) {
                      c.options.mask = TensorView(c.bits.data(), DType::boolean, {1, 1, 5, 8});
                    },
                    "mask is [1, 1, 5, 8]: dimension 3 must be 1 or 7"},
        BadArgument{"method", [](Call& c) { c.options.method = "fast"; }, "method is 'fast'"},
        BadArgument{"force", [](Call& c) { c.options.force = "sm70"; }, "force is 'sm70': the candidates are "}),
    name_of_test);

INSTANTIATE_TEST_SUITE_P(
    Lengths, BadArguments,
    ::testing::Values(
        BadArgument{"cu_first",
                    [](Call& c) {
                      c.pack(), c.options.cu_seqlens_q = c.indices({1, 2, 5});
                    },
                    "cu_seqlens_q[0] is 1: it must be 0"},
        BadArgument{"cu_decreases",
                    [](Call& c) {
                      c.pack(), c.options.cu_seqlens_q = c.indices({0, 6, 5});
                    },
                    "cu_seqlens_q decreases from 6 to 5 at entry 2: it must never decrease"},
        BadArgument{"cu_end",
                    [](Call& c) {
                      c.pack(), c.options.cu_seqlens_k = c.indices({0, 3, 6});
                    },
                    "cu_seqlens_k ends at 6: it must end at k's first extent, 7"},
        BadArgument{"cu_past_end",
                    [](Call& c) {
                      c.pack(), c.options.cu_seqlens_q = c.indices({0, 2, 9});
                    },
                    "cu_seqlens_q ends at 9"},
        BadArgument{"cu_negative",
                    [](Call& c) {
                      c.pack(), c.options.cu_seqlens_q = c.indices({0, -1, 5});
                    },
                    "cu_seqlens_q decreases from 0 to -1"},
        BadArgument{"cu_counts",
                    [](Call& c) {
                      c.pack(), c.options.cu_seqlens_k = c.indices({0, 3, 5, 7});
                    },
                    "cu_seqlens_k has 4 entries: for 2 sequences of q it must have 3"},
        BadArgument{"cu_dtype", [](Call& c) { c.pack(), c.options.cu_seqlens_q.dtype = DType::f32; },
                    "cu_seqlens_q is float32: it must be int32"},
        BadArgument{"cu_empty", [](Call& c) { c.pack(), c.options.cu_seqlens_q.shape[0] = 0; },
                    "cu_seqlens_q is [0]: it must be int32 [B + 1]"},
        BadArgument{"packed_q_rank",
                    [](Call& c) {
                      c.pack(), c.q = c.floats({1, 5, 4, 8});
                    },
                    "with cu_seqlens_q it must be [total_q, H, D]"},
        BadArgument{"packed_lse",
                    [](Call& c) {
                      c.pack(), c.lse = TensorView(c.written.data(), DType::f32, {2, 4, 5});
                    },
                    "lse has 3 dimensions: it must have 2"},
        BadArgument{"max_seqlen", [](Call& c) { c.pack(), c.options.max_seqlen_q = 2; },
                    "max_seqlen_q is 2: the longest sequence has 3"},
        BadArgument{"max_seqlen_negative", [](Call& c) { c.pack(), c.options.max_seqlen_k = -1; },
                    "max_seqlen_k is -1: it must be at least 0"},
        BadArgument{"seqused_q",
                    [](Call& c) {
                      c.options.seqused_q = c.indices({5, 6});
                    },
                    "seqused_q[1] is 6: it must be from 0 to the sequence's length, 5"},
        BadArgument{"seqused_k",
                    [](Call& c) {
                      c.options.seqused_k = c.indices({8, 7});
                    },
                    "seqused_k[0] is 8: it must be from 0 to the sequence's length, 7"},
        BadArgument{"seqused_negative",
                    [](Call& c) {
                      c.options.seqused_k = c.indices({-1, 7});
                    },
                    "seqused_k[0] is -1"},
        BadArgument{"seqused_packed",
                    [](Call& c) {
                      c.pack(), c.options.seqused_q = c.indices({3, 3});
                    },
                    "seqused_q[0] is 3: it must be from 0 to the sequence's length, 2"},
        BadArgument{"seqused_count",
                    [](Call& c) {
                      c.options.seqused_k = c.indices({1, 2, 3});
                    },
                    "seqused_k has 3 entries: it must have 2"},
        BadArgument{"leftpad",
                    [](Call& c) {
                      c.options.cache_leftpad = c.indices({0, 8});
                    },
                    "cache_leftpad[1] is 8: it must be from 0 to the used length, 7"},
        BadArgument{"leftpad_used",
                    [](Call& c) {
                      c.options.seqused_k = c.indices({3, 3}), c.options.cache_leftpad = c.indices({4, 0});
                    },
                    "cache_leftpad[0] is 4: it must be from 0 to the used length, 3"},
        BadArgument{"leftpad_packed",
                    [](Call& c) {
                      c.pack(), c.options.cache_leftpad = c.indices({0, 0});
                    },
                    "cache_leftpad and cu_seqlens_k exclude each other"},
        BadArgument{"cache_row",
                    [](Call& c) {
                      c.options.cache_batch_idx = c.indices({0, 2});
                    },
                    "cache_batch_idx[1] is 2: it must be from 0 to 1"},
        BadArgument{"cache_row_negative",
                    [](Call& c) {
                      c.options.cache_batch_idx = c.indices({-1, 0});
                    },
                    "cache_batch_idx[0] is -1"},
        BadArgument{"page_past_end", [](Call& c) { c.page(), c.index[3] = 6; },
                    "page_table[1, 1] is 6: it must be from 0 to 5 (k has 6 pages)"},
        BadArgument{"pages_beyond_positions",
                    [](Call& c) {
                      c.page();
                      c.options.page_table = TensorView(c.index.data(), DType::i32, {2, std::int64_t{1} << 40}, {0, 1});
                    },
                    "it must have fewer than 2^31 keys"},
        BadArgument{"page_negative", [](Call& c) { c.page(), c.index[0] = -1; }, "page_table[0, 0] is -1"},
        BadArgument{"page_table_rows", [](Call& c) { c.page(), c.options.page_table.shape[0] = 1; },
                    "page_table is [1, 2]: it must have one row for each of 2 sequences"},
        BadArgument{"page_size_0", [](Call& c) { c.page(), c.k.shape[1] = c.v.shape[1] = 0; },
                    "page_size must be at least 1"},
        BadArgument{"paged_used",
                    [](Call& c) {
                      c.page(), c.options.seqused_k = c.indices({9, 8});
                    },
                    "seqused_k[0] is 9: it must be from 0 to the sequence's length, 8"},
        BadArgument{"paged_and_packed",
                    [](Call& c) {
                      c.pack(), c.options.page_table = TensorView(c.index.data(), DType::i32, {2, 2});
                    },
                    "page_table and cu_seqlens_k exclude each other"},
        BadArgument{"paged_and_rows",
                    [](Call& c) {
                      c.page(), c.options.cache_batch_idx = c.indices({0, 1});
                    },
                    "cache_batch_idx and page_table exclude each other"}),
    name_of_test);

INSTANTIATE_TEST_SUITE_P(
    NarrowAndDrafts, BadArguments,
    ::testing::Values(
        BadArgument{"f8_keys_beside_f32", [](Call& c) { c.k.dtype = c.v.dtype = DType::f8e4m3; },
                    "k is float8_e4m3fn: it must be float32"},
        BadArgument{"f8_keys_alone",
                    [](Call& c) { c.q.dtype = c.o.dtype = c.v.dtype = DType::bf16, c.k.dtype = DType::f8e4m3; },
                    "v is bfloat16 and k is float8_e4m3fn: they must be equal"},
        BadArgument{"f8_output", [](Call& c) { c.q.dtype = c.k.dtype = c.v.dtype = c.o.dtype = DType::f8e4m3; },
                    "o is float8_e4m3fn: beside q of float8_e4m3fn it must be bfloat16 or float16"},
        BadArgument{"scale_of_f32",
                    [](Call& c) {
                      c.options.k_scale = c.floats({1, 1, 1});
                    },
                    "k_scale is given and k is float32: scales belong to float8_e4m3fn"},
        BadArgument{"scale_shape",
                    [](Call& c) {
                      c.q.dtype = c.o.dtype = DType::f16, c.k.dtype = c.v.dtype = DType::f8e4m3;
                      c.options.v_scale = c.floats({2, 3, 2});
                    },
                    "v_scale is [2, 3, 2]: dimension 1 must be 1 or v's, 7"},
        BadArgument{"f8_on_the_cpu",
                    [](Call& c) { c.q.dtype = c.o.dtype = DType::f16, c.k.dtype = c.v.dtype = DType::f8e4m3; },
                    "cpu: it does not read float8_e4m3fn"},
        BadArgument{"draft_shape",
                    [](Call& c) {
                      c.options.draft_mask = TensorView(c.index.data(), DType::i32, {2, 4});
                    },
                    "draft_mask is [2, 4]: it must be [B, Sq] = [2, 5]"},
        BadArgument{"draft_long",
                    [](Call& c) {
                      c.q = c.floats({2, 33, 4, 8}),
                      c.options.draft_mask = TensorView(c.index.data(), DType::i32, {2, 33}, {0, 1});
                    },
                    "q has 33 rows a sequence: a draft has at most 32"},
        BadArgument{"f8_backward",
                    [](Call& c) { c.q.dtype = c.o.dtype = DType::f16, c.k.dtype = c.v.dtype = DType::f8e4m3; },
                    "k is float8_e4m3fn, which has no backward", true},
        BadArgument{"draft_backward",
                    [](Call& c) {
                      c.options.draft_mask = TensorView(c.index.data(), DType::i32, {2, 5});
                    },
                    "draft_mask has no backward: give the pairs as mask", true}),
    name_of_test);

INSTANTIATE_TEST_SUITE_P(
    Gradients, BadArguments,
    ::testing::Values(BadArgument{"d_o_missing", [](Call& c) { c.d_o = {}; }, "d_o is missing", true},
                      BadArgument{"d_o_shape",
                                  [](Call& c) {
                                    c.d_o = c.floats({2, 5, 4, 8});
                                  },
                                  "d_o is [2, 5, 4, 8]", true},
                      BadArgument{"d_lse_shape",
                                  [](Call& c) {
                                    c.d_lse = c.floats({2, 5, 4});
                                  },
                                  "d_lse is [2, 5, 4]: it must be [B, H, Sq] = [2, 4, 5]", true},
                      BadArgument{"dq_shape", [](Call& c) { c.gradients.dq.shape[3] = 6; }, "dq is [2, 5, 4, 6]", true},
                      BadArgument{"dk_shape", [](Call& c) { c.gradients.dk.shape[2] = 4; },
                                  "dk is [2, 7, 4, 8]: it must have the shape of k, [2, 7, 2, 8]", true},
                      BadArgument{"dv_dtype", [](Call& c) { c.gradients.dv.dtype = DType::bf16; }, "dv is bfloat16",
                                  true},
                      BadArgument{"dk_expanded", [](Call& c) { c.gradients.dk.stride[2] = 0; },
                                  "dk is an output whose elements overlap", true},
                      BadArgument{"dbias_alone",
                                  [](Call& c) {
                                    c.gradients.dbias = c.floats({1, 1, 5, 7});
                                  },
                                  "dbias is given but bias is not", true},
                      BadArgument{"dbias_shape",
                                  [](Call& c) {
                                    c.options.bias = c.floats({1, 4, 5, 7}), c.gradients.dbias = c.floats({1, 1, 5, 7});
                                  },
                                  "dbias is [1, 1, 5, 7]: it must have the shape of bias, [1, 4, 5, 7]", true},
                      BadArgument{"dsink_alone", [](Call& c) { c.gradients.dsink = c.floats({4}); },
                                  "dsink is given but sink is not", true},
                      BadArgument{"dv_in_dk", [](Call& c) { c.gradients.dv.data = c.gradients.dk.data; },
                                  "dk and dv share memory: outputs must be apart", true},
                      BadArgument{"paged", [](Call& c) { c.page(); }, "page_table has no backward", true},
                      BadArgument{"cache_rows",
                                  [](Call& c) {
                                    c.options.cache_batch_idx = c.indices({0, 1});
                                  },
                                  "cache_batch_idx has no backward", true},
                      BadArgument{"leftpad",
                                  [](Call& c) {
                                    c.options.cache_leftpad = c.indices({0, 1});
                                  },
                                  "cache_leftpad has no backward", true}),
    name_of_test);

TEST(Arguments, TheUnspoiledCallsRun) {
  for (const auto& change : std::vector<std::function<void(Call&)>>{
           [](Call&) {}, [](Call& c) { c.pack(); }, [](Call& c) { c.page(); }, [](Call& c) { c.lse = {}; }}) {
    Call call;
    change(call);
    call.forward();
    EXPECT_FALSE(call.untouched());
  }
  Call call;
  call.backward();
  EXPECT_FALSE(call.untouched());
}

TEST(Arguments, WorkspaceTooSmallOrMisalignedIsRefused) {
  Call call;
  call.options.force = "cpu_baseline";
  const std::size_t needed = attention_forward_workspace(call.q, call.k, call.v, call.options);
  ASSERT_GT(needed, 0u);
  Runtime runtime;
  runtime.workspace = {call.buffer.get(needed + 64).data, needed - 1};
  EXPECT_THROW(attention_forward(call.q, call.k, call.v, call.o, call.lse, call.options, runtime), Error);
  runtime.workspace = {static_cast<char*>(runtime.workspace.data) + 4, needed};
  EXPECT_THROW(attention_forward(call.q, call.k, call.v, call.o, call.lse, call.options, runtime), Error);
  EXPECT_TRUE(call.untouched());
}

TEST(Arguments, ExplainNamesEveryCandidateAndOneChoice) {
  Call call;
  for (Pass pass : {Pass::forward, Pass::backward}) {
    const std::vector<Candidate> list = explain_attention(call.q, call.k, call.v, call.options, pass);
    EXPECT_EQ(std::count_if(list.begin(), list.end(), [](const Candidate& c) { return c.chosen; }), 1);
    for (const Candidate& candidate : list) {
      EXPECT_NE(candidate.chosen, !candidate.reason.empty()) << candidate.name;
      EXPECT_FALSE(candidate.chosen && candidate.method != "flash") << candidate.name;
    }
    AttentionOptions forced = call.options;
    forced.force = "reference";
    for (const Candidate& candidate : explain_attention(call.q, call.k, call.v, forced, pass)) {
      EXPECT_EQ(candidate.chosen, candidate.name == "reference");
    }
  }
}

}  // namespace
}  // namespace heddle
