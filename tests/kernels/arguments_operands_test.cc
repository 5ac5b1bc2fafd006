// Bad q, k, v, o, lse and gradients: missing, of other shapes or dtypes, overlapping.
#include "kernels/bad_arguments.h"

namespace heddle {
namespace {

INSTANTIATE_TEST_SUITE_P(
    Shapes, BadArguments,
    ::testing::Values(
        BadArgument{"q_missing", [](Call& c) { c.q = {}; }, "q is missing"},
        BadArgument{"k_missing", [](Call& c) { c.k = {}; }, "k is missing"},
        BadArgument{"o_missing", [](Call& c) { c.o = {}; }, "o is missing"},
        BadArgument{"lse_in_o", [](Call& c) { c.lse.data = c.o.data; },
                    "o and lse share memory: outputs must be apart"},
        BadArgument{"o_in_q",
                    [](Call& c) {
                      c.v = c.floats({2, 7, 2, 8}), c.o = c.q;
                    },
                    "o shares memory with q, which is read while it is written; found o [2, 5, 4, 8], q [2, 5, 4, 8]"},
        BadArgument{"o_in_bias",
                    [](Call& c) {
                      c.options.bias = c.floats({2, 4, 5, 7}), c.options.bias.data = c.o.data;
                    },
                    "o shares memory with bias"},
        BadArgument{"lse_in_sink", [](Call& c) { c.options.sink = c.floats({4}), c.options.sink.data = c.lse.data; },
                    "lse shares memory with sink"},
        BadArgument{"q_null", [](Call& c) { c.q.data = nullptr; }, "q has no data: its pointer is null"},
        BadArgument{"q_rank",
                    [](Call& c) {
                      c.q = c.floats({5, 4, 8});
                    },
                    "q has 3 dimensions: it must be [B, Sq, H, D]; found q [5, 4, 8]"},
        BadArgument{"q_codes", [](Call& c) { c.q.dtype = DType::u8; },
                    "q is uint8: attention takes float32, float16, bfloat16 or float8_e4m3fn"},
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
    Gradients, BadArguments,
    ::testing::Values(
        BadArgument{"d_o_missing", [](Call& c) { c.d_o = {}; }, "d_o is missing", true},
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
        BadArgument{"dv_dtype", [](Call& c) { c.gradients.dv.dtype = DType::bf16; }, "dv is bfloat16", true},
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
        BadArgument{"dsink_alone", [](Call& c) { c.gradients.dsink = c.floats({4}); }, "dsink is given but sink is not",
                    true},
        BadArgument{"dv_in_dk", [](Call& c) { c.gradients.dv.data = c.gradients.dk.data; },
                    "dk and dv share memory: outputs must be apart", true},
        BadArgument{"dq_in_q", [](Call& c) { c.gradients.dq = c.q; }, "dq shares memory with q", true},
        BadArgument{"dv_in_d_o", [](Call& c) { c.d_o.data = c.gradients.dv.data; }, "dv shares memory with d_o", true},
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

}  // namespace
}  // namespace heddle
