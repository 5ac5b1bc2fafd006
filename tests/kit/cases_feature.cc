// Each option, each layout, packed sequences and caches; and options together.
#include "kit/case_rows.h"

namespace heddle::kit {

void add_feature(Rows& rows) {
  const AttentionCase base{.B = 2, .H = 4, .Hkv = 2, .Sq = 50, .Sk = 75, .D = 32, .Dv = 32};
  const auto with = [&](const char* name, auto change) {
    AttentionCase row = base;
    row.name = name;
    row.purpose = Purpose::feature;
    change(row);
    rows.push_back(row);
  };
  with("mqa", [](auto& c) { c.Hkv = 1; });
  with("groups_of_3", [](auto& c) { c.H = 6, c.B = 1; });
  with("lse_gradient", [](auto& c) { c.d_lse = true; });
  with("window_left", [](auto& c) { c.window_left = 10; });
  with("window_both", [](auto& c) { c.window_left = 7, c.window_right = 3; });
  with("window_right_only", [](auto& c) { c.window_right = 5; });
  with("window_causal", [](auto& c) { c.Sq = c.Sk = 140, c.window_left = 20, c.causal = Causal::bottom_right; });
  with("window_top_left", [](auto& c) { c.window_left = 5, c.window_right = 9, c.causal = Causal::top_left; });
  with("softcap", [](auto& c) { c.softcap = 5.0f; });
  with("softcap_d128", [](auto& c) { c.softcap = 20.0f, c.D = c.Dv = 128, c.B = 1; });
  with("alibi", [](auto& c) { c.alibi = Alibi::per_head; });
  with("alibi_per_batch_causal", [](auto& c) { c.alibi = Alibi::per_batch, c.causal = Causal::bottom_right; });
  with("alibi_top_left", [](auto& c) { c.alibi = Alibi::per_head, c.causal = Causal::top_left; });
  with("bias_full", [](auto& c) { c.bias = kFull; });
  with("bias_rows_columns", [](auto& c) { c.bias = kRowsColumns, c.bias_holes = true; });
  with("bias_heads", [](auto& c) { c.bias = kHeads, c.bias_f32 = true; });
  with("bias_columns", [](auto& c) { c.bias = kBatchColumns, c.bias_f32 = true, c.bias_holes = true; });
  with("bias_rows", [](auto& c) { c.bias = kRows; });
  with("bias_scalar", [](auto& c) { c.bias = kScalar; });
  with("mask_full", [](auto& c) { c.mask = kFull; });
  with("mask_columns", [](auto& c) { c.mask = kBatchColumns; });
  with("mask_rows", [](auto& c) { c.mask = kRows; });
  with("mask_bias", [](auto& c) { c.mask = kRowsColumns, c.bias = kFull, c.bias_holes = true; });
  with("sink", [](auto& c) { c.sink = true; });
  with("sink_lse_gradient_window", [](auto& c) { c.sink = c.d_lse = true, c.window_left = 9; });
  with("dropout", [](auto& c) { c.dropout = 0.2f; });
  with("dropout_causal_odd", [](auto& c) { c.dropout = 0.5f, c.Sq = c.Sk = 67, c.causal = Causal::bottom_right; });
  with("all_scores", [](auto& c) {
    c.causal = Causal::bottom_right, c.window_left = 40, c.softcap = 8.0f, c.alibi = Alibi::per_head, c.bias = kHeads;
    c.mask = kBatchColumns, c.sink = c.d_lse = true, c.dropout = 0.1f;
  });

  with("heads_first", [](auto& c) { c.layout_q = c.layout_k = c.layout_o = Layout::heads_first; });
  with("padded_rows", [](auto& c) { c.layout_q = c.layout_k = c.layout_o = Layout::padded_rows, c.D = 31, c.Dv = 33; });
  with("strided_dim", [](auto& c) { c.layout_q = c.layout_k = c.layout_o = Layout::strided_dim; });
  with("reversed_q", [](auto& c) { c.layout_q = Layout::reversed; });
  with("reversed_k", [](auto& c) { c.layout_k = Layout::reversed; });
  with("expanded_k", [](auto& c) { c.layout_k = Layout::expanded; });
  with("strided_k_only", [](auto& c) { c.layout_k = Layout::strided_dim, c.causal = Causal::bottom_right; });

  with("packed", [](auto& c) { c.B = 5, c.Sq = c.Sk = 40, c.packed_q = c.packed_k = true; });
  with("packed_causal",
       [](auto& c) { c.B = 4, c.packed_q = c.packed_k = true, c.causal = Causal::bottom_right, c.d_lse = true; });
  with("packed_encoder", [](auto& c) { c.B = 6, c.H = c.Hkv = 3, c.Sq = c.Sk = 130, c.packed_q = c.packed_k = true; });
  with("packed_q_only", [](auto& c) { c.packed_q = true, c.sink = true; });
  with("packed_k_only", [](auto& c) { c.packed_k = true, c.causal = Causal::top_left; });
  with("packed_all", [](auto& c) {
    c.B = 3, c.packed_q = c.packed_k = true, c.causal = Causal::bottom_right, c.bias = kFull, c.mask = kColumns;
    c.alibi = Alibi::per_batch, c.sink = c.d_lse = true, c.dropout = 0.3f, c.window_left = 30;
    c.layout_q = c.layout_k = c.layout_o = Layout::padded_rows;
  });
  with("packed_heads_first", [](auto& c) {
    c.B = 3, c.packed_q = c.packed_k = true, c.layout_q = c.layout_k = c.layout_o = Layout::heads_first;
  });
  with("packed_used", [](auto& c) { c.B = 4, c.packed_q = c.packed_k = c.seqused_q = c.seqused_k = c.sink = true; });
  with("used_keys", [](auto& c) { c.B = 3, c.seqused_k = true; });
  with("used_both_causal", [](auto& c) {
    c.B = 4, c.seqused_q = c.seqused_k = true, c.causal = Causal::bottom_right, c.sink = c.d_lse = true;
  });
  with("used_both_bias", [](auto& c) { c.B = 3, c.seqused_q = c.seqused_k = true, c.bias = kFull, c.dropout = 0.2f; });

  with("paged_1", [](auto& c) { c.page_size = 1, c.seqused_k = true, c.Sq = 9; });
  with("paged_3", [](auto& c) { c.page_size = 3, c.causal = Causal::bottom_right, c.seqused_k = true; });
  with("paged_16", [](auto& c) { c.page_size = 16, c.Sk = 96, c.layout_k = Layout::heads_first; });
  with("paged_64", [](auto& c) {
    c.page_size = 64, c.Sk = 192, c.seqused_k = c.seqused_q = true, c.causal = Causal::bottom_right, c.B = 3;
  });
  with("paged_packed_q", [](auto& c) { c.page_size = 16, c.packed_q = c.seqused_k = true, c.B = 3, c.Sk = 80; });
  with("paged_leftpad", [](auto& c) { c.page_size = 3, c.leftpad = c.seqused_k = true; });
  with("cache_batch_idx", [](auto& c) { c.B = 3, c.cache_batch_idx = c.seqused_k = true; });
  with("leftpad", [](auto& c) { c.B = 3, c.leftpad = c.seqused_k = true, c.causal = Causal::bottom_right; });
  with("cache_all", [](auto& c) {
    c.B = 3, c.cache_batch_idx = c.leftpad = c.seqused_k = true, c.causal = Causal::bottom_right, c.sink = true;
    c.alibi = Alibi::per_head, c.softcap = 10.0f, c.window_left = 25, c.layout_k = Layout::padded_rows;
  });
}

}  // namespace heddle::kit
