// Bad lengths: packed sequences, lengths in use, rows and pages of a cache.
#include "kernels/bad_arguments.h"

namespace heddle {
namespace {

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

}  // namespace
}  // namespace heddle
