// Few rows, many keys.
#include <array>

#include "kit/case_rows.h"

namespace heddle::kit {

void add_decode(Rows& rows) {
  const AttentionCase base{.causal = Causal::bottom_right};
  const auto with = [&](const char* name, std::array<std::int64_t, 6> sizes, auto change) {
    AttentionCase row = base;
    row.name = name;
    row.purpose = Purpose::decode;
    row.B = sizes[0], row.H = sizes[1], row.Hkv = sizes[2], row.Sq = sizes[3], row.Sk = sizes[4];
    row.D = row.Dv = sizes[5];
    change(row);
    rows.push_back(row);
  };
  const auto plain = [](auto&) {};
  with("1_4096", {1, 2, 2, 1, 4096, 64}, plain);
  with("gqa4", {1, 8, 2, 1, 2048, 64}, plain);
  with("gqa8_d128", {1, 8, 1, 1, 1000, 128}, plain);
  with("rows_4", {1, 4, 1, 4, 777, 64}, plain);
  with("rows_3_batch", {3, 4, 4, 3, 300, 48}, [](auto& c) { c.seqused_k = true; });
  with("rows_2_sink", {2, 4, 2, 2, 513, 33}, [](auto& c) { c.sink = true, c.softcap = 15.0f; });
  with("window", {2, 4, 1, 1, 1500, 40}, [](auto& c) { c.window_left = 600; });
  with("bias_mask", {2, 4, 2, 2, 700, 32}, [](auto& c) { c.bias = kHeads, c.mask = kBatchColumns; });
  with("paged_16", {3, 8, 2, 1, 1024, 64}, [](auto& c) { c.page_size = 16, c.seqused_k = true; });
  with("paged_1", {2, 4, 1, 2, 333, 32}, [](auto& c) { c.page_size = 1, c.seqused_k = true; });
  with("dropout_alibi", {2, 4, 2, 1, 600, 32}, [](auto& c) { c.dropout = 0.25f, c.alibi = Alibi::per_head; });
  with("packed", {4, 4, 1, 3, 400, 64}, [](auto& c) { c.packed_q = c.packed_k = true; });
  with("cache_rows", {3, 4, 1, 1, 600, 64}, [](auto& c) { c.cache_batch_idx = c.seqused_k = true; });
  with("d1", {2, 3, 3, 2, 70, 1}, plain);
  with("d5_rows_7", {1, 1, 1, 7, 130, 5}, plain);
  with("d31_dv129", {1, 2, 1, 3, 65, 31}, [](auto& c) { c.Dv = 129; });
  with("d256_dv1", {1, 2, 2, 1, 97, 256}, [](auto& c) { c.Dv = 1; });
  with("groups_of_5", {2, 5, 1, 1, 200, 96}, plain);
  with("chunk_ends", {1, 2, 2, 1, 1024, 16}, plain);
  with("chunk_and_one", {1, 2, 2, 1, 1025, 16}, plain);
  with("one_key_few_rows", {2, 4, 2, 2, 1, 40}, [](auto& c) { c.causal = Causal::none; });
  with("three_keys", {2, 4, 4, 1, 3, 17}, plain);
  with("top_left", {2, 4, 2, 3, 80, 64}, [](auto& c) { c.causal = Causal::top_left; });
  with("all_removed_sink", {2, 4, 2, 2, 90, 32}, [](auto& c) { c.mask = kRows, c.mask_empty = c.sink = true; });
  with("padded_rows", {2, 4, 2, 2, 150, 33},
       [](auto& c) { c.layout_q = c.layout_k = c.layout_o = Layout::padded_rows; });
  with("heads_first", {2, 4, 2, 2, 150, 64},
       [](auto& c) { c.layout_q = c.layout_k = c.layout_o = Layout::heads_first; });
  with("reversed_k", {2, 4, 2, 1, 99, 24}, [](auto& c) { c.layout_k = Layout::reversed; });
  with("expanded_k", {2, 4, 4, 1, 99, 24}, [](auto& c) { c.layout_k = Layout::expanded; });
  with("paged_3_leftpad", {3, 4, 1, 1, 222, 40}, [](auto& c) { c.page_size = 3, c.leftpad = c.seqused_k = true; });
  with("large_logits", {1, 4, 2, 2, 300, 16}, [](auto& c) { c.values = Values::large_logits; });
  with("draft_7", {2, 4, 2, 7, 230, 64}, [](auto& c) { c.draft_mask = true, c.causal = Causal::none; });
  with("draft_16_window", {3, 4, 1, 16, 300, 128},
       [](auto& c) { c.draft_mask = c.seqused_k = true, c.window_left = 100, c.sink = true; });
  with("draft_5_paged", {3, 8, 2, 5, 400, 64},
       [](auto& c) { c.draft_mask = c.seqused_k = true, c.page_size = 16, c.causal = Causal::none; });
  with("f8_cache", {2, 8, 2, 1, 515, 128}, [](auto& c) { c.f8_cache = true; });
  with("f8_cache_scaled_heads", {3, 4, 1, 2, 333, 64},
       [](auto& c) { c.f8_cache = c.seqused_k = true, c.scaling = Scaling::heads; });
  with("f8_cache_scaled_rows", {2, 4, 2, 3, 270, 128}, [](auto& c) { c.f8_cache = true, c.scaling = Scaling::rows; });
  with("f8_cache_paged", {3, 8, 2, 1, 500, 128},
       [](auto& c) { c.f8_cache = c.seqused_k = true, c.page_size = 16, c.scaling = Scaling::one; });
  with("f8_cache_paged_scaled_rows", {2, 4, 1, 4, 200, 64}, [](auto& c) {
    c.f8_cache = c.seqused_k = true, c.page_size = 48, c.scaling = Scaling::rows, c.softcap = 20.0f;
  });
  with("all_scores", {2, 4, 2, 2, 620, 24}, [](auto& c) {
    c.window_left = 550, c.softcap = 8.0f, c.alibi = Alibi::per_batch, c.bias = kHeads, c.bias_holes = true;
    c.mask = kBatchColumns, c.sink = c.d_lse = true, c.dropout = 0.1f;
  });
  with("uneven_lengths", {4, 8, 2, 2, 5000, 128}, [](auto& c) { c.seqused_k = c.forward_only = true; });
  with("all_scores_but_dropout", {2, 6, 2, 3, 1300, 64}, [](auto& c) {
    c.window_left = 1100, c.softcap = 8.0f, c.alibi = Alibi::per_batch, c.bias = kHeads, c.bias_holes = true;
    c.mask = kBatchColumns, c.sink = true, c.poison_keys = true;
  });
  // Pages of sizes that divide a tile of keys, are divided by one, and share a factor with it; kv heads read together.
  const auto used = [](std::int64_t page) { return [page](auto& c) { c.seqused_k = true, c.page_size = page; }; };
  with("pages_1", {9, 16, 8, 1, 120, 128}, used(1));
  with("pages_2", {9, 16, 8, 2, 90, 64}, used(2));
  with("pages_4", {5, 8, 4, 1, 150, 128}, used(4));
  with("pages_8", {70, 8, 8, 1, 40, 64}, used(8));
  with("pages_16", {3, 32, 8, 1, 700, 128}, used(16));
  with("pages_16_many", {18, 32, 8, 1, 130, 128}, used(16));
  with("pages_48", {5, 16, 4, 2, 500, 128}, used(48));
  with("pages_64_window", {2, 8, 2, 3, 640, 128},
       [](auto& c) { c.seqused_k = true, c.page_size = 64, c.window_left = 77; });
  with("pages_256", {4, 8, 2, 1, 1000, 128}, used(256));
  with("pages_1_f8", {9, 16, 8, 1, 100, 128}, [](auto& c) { c.seqused_k = c.f8_cache = true, c.page_size = 1; });
  with("rows_16_of_16_heads", {2, 16, 1, 16, 300, 128}, plain);
  with("rows_5_of_16_heads", {1, 32, 2, 5, 400, 128}, plain);
  with("rows_4_of_16_heads", {2, 16, 1, 4, 260, 64}, plain);
  with("rows_4_of_8_heads", {2, 64, 8, 4, 200, 128}, [](auto& c) { c.f8_cache = true, c.scaling = Scaling::heads; });
  with("rows_4_d256", {1, 8, 1, 4, 515, 256}, plain);
  with("rows_16_d256", {1, 16, 1, 16, 200, 256}, plain);
  with("rows_16_of_40_heads", {2, 40, 1, 16, 150, 64}, plain);
  with("many_short", {80, 8, 8, 1, 50, 64}, [](auto& c) { c.seqused_k = c.forward_only = true; });
  with("leftpad_window", {4, 8, 2, 3, 300, 128},
       [](auto& c) { c.leftpad = c.seqused_k = true, c.window_left = 50, c.sink = true; });
  with("long", {1, 4, 1, 1, 9000, 128}, [](auto& c) { c.forward_only = true; });
  // More than 16 rows of a kv head: one head or two of a unit, one row tile to two warpgroups, halves of a block.
  with("rows_20", {1, 5, 1, 4, 300, 128}, plain);
  with("rows_32_of_two_heads", {34, 16, 4, 8, 100, 64}, [](auto& c) { c.seqused_k = c.forward_only = true; });
  with("rows_64", {3, 8, 2, 16, 500, 128}, [](auto& c) { c.seqused_k = true; });
  with("rows_64_pages_16", {3, 8, 2, 16, 400, 128}, used(16));
  with("rows_48_pages_48", {3, 12, 2, 8, 300, 96}, used(48));
  with("rows_32_pages_64", {34, 16, 4, 8, 150, 128},
       [](auto& c) { c.seqused_k = c.forward_only = true, c.page_size = 64; });
  with("rows_64_pages_8", {2, 16, 2, 8, 200, 128}, used(8));
  with("rows_150", {1, 30, 2, 10, 180, 80}, plain);
  with("rows_64_dv", {2, 16, 2, 8, 300, 64}, [](auto& c) { c.Dv = 128; });
  with("rows_64_one_key", {2, 16, 2, 8, 1, 128}, [](auto& c) { c.causal = Causal::none; });
  with("rows_64_large_logits", {1, 16, 2, 8, 600, 128}, [](auto& c) { c.values = Values::large_logits; });
  with("rows_32_packed", {4, 16, 4, 8, 300, 64}, [](auto& c) { c.packed_q = c.packed_k = true; });
  with("rows_80_window_leftpad", {3, 20, 2, 8, 410, 128},
       [](auto& c) { c.leftpad = c.seqused_k = c.sink = c.poison_keys = true, c.window_left = 90; });
  with("rows_96_draft_pages", {3, 12, 2, 16, 200, 128},
       [](auto& c) { c.draft_mask = c.seqused_k = true, c.page_size = 32, c.causal = Causal::none; });
  with("rows_64_mask_columns", {2, 16, 2, 8, 500, 128},
       [](auto& c) { c.mask = kColumns, c.poison_keys = true, c.causal = Causal::none; });
  with("rows_100_bias_mask", {2, 20, 2, 10, 290, 128},
       [](auto& c) { c.bias = kHeads, c.mask = kBatchColumns, c.bias_holes = c.poison_keys = c.sink = true; });
  with("rows_100_bias_mask_softcap", {2, 20, 2, 10, 290, 64},
       [](auto& c) { c.bias = kHeads, c.mask = kFull, c.bias_holes = c.poison_keys = true, c.softcap = 9.0f; });
}

}  // namespace heddle::kit
