// Nothing to attend, one key, extreme values, numbers that are not finite where nobody may read them; biases and masks
// over several tiles.
#include <string>

#include "kit/case_rows.h"

namespace heddle::kit {

void add_corner(Rows& rows) {
  const AttentionCase small{.B = 2, .H = 2, .Hkv = 1, .Sq = 5, .Sk = 7, .D = 16, .Dv = 16, .sink = false};
  const auto with = [&](const std::string& name, auto change) {
    AttentionCase row = small;
    row.name = name;
    row.purpose = Purpose::corner;
    change(row);
    rows.push_back(row);
  };
  with("no_rows", [](auto& c) { c.Sq = 0; });
  with("no_keys", [](auto& c) { c.Sk = 0; });
  with("no_keys_sink", [](auto& c) { c.Sk = 0, c.sink = true, c.d_lse = true; });
  with("no_batch", [](auto& c) { c.B = 0; });
  with("no_batch_packed", [](auto& c) { c.B = 0, c.packed_q = c.packed_k = true; });
  with("one_key", [](auto& c) { c.Sk = 1, c.d_lse = true; });
  with("one_key_dropout", [](auto& c) { c.Sk = 1, c.dropout = 0.5f; });
  with("one_row_one_key_one_dim", [](auto& c) { c.B = c.H = c.Sq = c.Sk = c.D = c.Dv = 1; });
  with("mask_removes_all", [](auto& c) { c.mask = kFull, c.mask_empty = true, c.d_lse = true; });
  with("mask_removes_all_sink", [](auto& c) { c.mask = kScalar, c.mask_empty = c.sink = c.d_lse = true; });
  with("mask_holes", [](auto& c) { c.Sq = c.Sk = 70, c.mask = kFull; });
  with("bias_holes", [](auto& c) { c.Sq = c.Sk = 70, c.bias = kFull, c.bias_holes = true; });
  with("bias_holes_keys", [](auto& c) { c.Sk = 66, c.bias = kColumns, c.bias_holes = true; });
  with("bottom_right_more_rows", [](auto& c) { c.Sq = 70, c.Sk = 33, c.causal = Causal::bottom_right; });
  with("bottom_right_more_rows_sink",
       [](auto& c) { c.Sq = 70, c.Sk = 33, c.causal = Causal::bottom_right, c.sink = c.d_lse = true; });
  with("top_left_more_rows", [](auto& c) { c.Sq = 70, c.Sk = 33, c.causal = Causal::top_left; });
  with("top_left_more_keys", [](auto& c) { c.Sq = 33, c.Sk = 70, c.causal = Causal::top_left; });
  with("window_zero", [](auto& c) { c.Sq = c.Sk = 40, c.window_left = c.window_right = 0; });
  with("window_beside_keys", [](auto& c) { c.Sq = 60, c.Sk = 9, c.window_left = 2, c.causal = Causal::top_left; });
  with("window_huge", [](auto& c) { c.window_left = c.window_right = std::int64_t{1} << 40; });
  with("large_logits", [](auto& c) { c.Sq = 33, c.Sk = 70, c.values = Values::large_logits; });
  with("large_logits_softcap",
       [](auto& c) { c.Sq = 33, c.Sk = 70, c.values = Values::large_logits, c.softcap = 30.0f; });
  with("idle_rows", [](auto& c) {
    c.Sq = 170, c.Sk = 33, c.causal = Causal::bottom_right, c.poison_rows = c.sink = c.d_lse = true;
  });
  with("idle_rows_mask", [](auto& c) { c.Sq = c.Sk = 70, c.mask = kRows, c.poison_rows = true; });
  with("unattended_keys",
       [](auto& c) { c.Sq = 33, c.Sk = 170, c.causal = Causal::top_left, c.poison_keys = c.d_lse = true; });
  with("unattended_keys_window", [](auto& c) {
    c.Sq = 60, c.Sk = 300, c.window_left = 7, c.window_right = 3, c.poison_keys = true, c.D = 40, c.Dv = 33;
  });
  with("unattended_keys_mask", [](auto& c) { c.Sq = c.Sk = 70, c.mask = kBatchColumns, c.poison_keys = true; });
  with("unattended_keys_bias",
       [](auto& c) { c.Sq = c.Sk = 70, c.bias = kColumns, c.bias_holes = c.poison_keys = true, c.dropout = 0.2f; });
  with("unattended_keys_few_rows", [](auto& c) {
    c.Sq = 2, c.Sk = 700, c.window_left = 90, c.causal = Causal::bottom_right, c.mask = kBatchColumns;
    c.poison_keys = true;
  });
  // Bias and mask over several tiles of rows and keys, with rows of 16, 8, 4 and 2 bytes' multiple.
  const auto tiles = [](auto& c, std::int64_t sq, std::int64_t sk, std::int64_t d) {
    c.B = 1, c.Hkv = c.H, c.Sq = sq, c.Sk = sk, c.D = c.Dv = d, c.forward_only = true;
  };
  with("bias_tiles", [&](auto& c) { tiles(c, 200, 264, 64), c.B = 2, c.bias = kFull, c.bias_holes = true; });
  with("bias_tiles_words", [&](auto& c) { tiles(c, 70, 270, 64), c.bias = kHeads, c.causal = Causal::bottom_right; });
  with("bias_tiles_odd", [&](auto& c) { tiles(c, 70, 267, 64), c.bias = kFull; });
  with("bias_tiles_f32", [&](auto& c) { tiles(c, 70, 300, 128), c.bias = kFull, c.bias_f32 = c.bias_holes = true; });
  with("bias_tiles_d128", [&](auto& c) { tiles(c, 140, 520, 128), c.bias = kRowsColumns, c.softcap = 20.0f; });
  with("bias_tiles_d256", [&](auto& c) { tiles(c, 140, 264, 256), c.bias = kFull, c.alibi = Alibi::per_head; });
  with("mask_tiles", [&](auto& c) { tiles(c, 140, 400, 64), c.B = 2, c.mask = kFull; });
  with("bias_tiles_causal_d128", [&](auto& c) {
    tiles(c, 140, 520, 128), c.B = 2, c.bias = kFull, c.bias_holes = true, c.causal = Causal::bottom_right;
  });
  with("mask_tiles_d128", [&](auto& c) { tiles(c, 140, 400, 128), c.B = 2, c.mask = kFull; });
  with("mask_tiles_words", [&](auto& c) { tiles(c, 70, 300, 128), c.mask = kFull, c.causal = Causal::top_left; });
  with("mask_tiles_odd", [&](auto& c) { tiles(c, 70, 301, 128), c.mask = kRowsColumns; });
  with("mask_tiles_d256", [&](auto& c) { tiles(c, 70, 272, 256), c.mask = kFull; });
  with("mask_bias_tiles_d128", [&](auto& c) { tiles(c, 140, 400, 128), c.mask = kRowsColumns, c.bias = kFull; });
  with("mask_bias_tiles_d256", [&](auto& c) { tiles(c, 70, 144, 256), c.mask = kFull, c.bias = kFull; });
  with("mask_bias_tiles_keys", [&](auto& c) { tiles(c, 70, 301, 64), c.mask = kBatchColumns, c.bias = kHeads; });
  with("mask_keys_bias_tiles", [&](auto& c) { tiles(c, 140, 304, 128), c.mask = kBatchColumns, c.bias = kFull; });
  with("softcap_tiles", [&](auto& c) { tiles(c, 140, 300, 128), c.softcap = 30.0f; });
  with("softcap_tiles_exceeded",
       [&](auto& c) { tiles(c, 70, 300, 64), c.softcap = 1.0f, c.causal = Causal::top_left; });
  with("softcap_alibi_tiles_d256",
       [&](auto& c) { tiles(c, 70, 300, 256), c.softcap = 3.0f, c.alibi = Alibi::per_head; });
  with("alibi_tiles", [&](auto& c) { tiles(c, 140, 300, 128), c.alibi = Alibi::per_head; });
  // Keys left and right of the rows.
  with("alibi_tiles_keys", [&](auto& c) {
    tiles(c, 400, 700, 64), c.B = 2, c.alibi = Alibi::per_head, c.mask = kBatchColumns;
    c.bias = kColumns, c.bias_f32 = c.bias_holes = true, c.causal = Causal::none;
  });
  with("alibi_tiles_groups", [&](auto& c) {
    tiles(c, 30, 500, 128), c.B = 2, c.H = 4, c.Hkv = 1, c.alibi = Alibi::per_batch, c.mask = kBatchColumns;
    c.poison_keys = true, c.causal = Causal::bottom_right;
  });
  with("mask_bias_tiles_groups", [&](auto& c) {
    tiles(c, 30, 200, 64), c.H = 4, c.Hkv = 1, c.mask = kFull, c.bias = kHeads, c.causal = Causal::bottom_right;
  });
  with("mask_bias_tiles_used", [&](auto& c) {
    tiles(c, 140, 400, 64), c.B = 3, c.mask = kFull, c.bias = kFull, c.seqused_q = c.seqused_k = true;
  });
  // Not finite values in keys that a mask removes, in more tiles than a GPU computes at once.
  with("unattended_keys_tiles",
       [&](auto& c) { tiles(c, 140, 400, 128), c.B = 2, c.mask = kBatchColumns, c.poison_keys = true; });
  with("unattended_keys_tiles_d64",
       [&](auto& c) { tiles(c, 140, 700, 64), c.B = 2, c.mask = kBatchColumns, c.poison_keys = true; });
  for (const std::int64_t d : {64, 128}) {
    with("unattended_keys_tiles_bias_d" + std::to_string(d),
         [&](auto& c) { tiles(c, 140, 600, d), c.mask = kBatchColumns, c.bias = kFull, c.poison_keys = true; });
  }
  with("unattended_keys_tiles_d256", [&](auto& c) {
    tiles(c, 70, 400, 256), c.mask = kColumns, c.bias = kColumns, c.bias_f32 = c.bias_holes = c.poison_keys = true;
  });
  with("unattended_keys_many_tiles",
       [&](auto& c) { tiles(c, 300, 40, 8), c.B = 8, c.H = c.Hkv = 32, c.mask = kBatchColumns, c.poison_keys = true; });
  with("unattended_keys_many_tiles_used", [&](auto& c) {
    tiles(c, 300, 40, 8), c.B = 8, c.H = c.Hkv = 32, c.mask = kBatchColumns, c.poison_keys = c.seqused_k = true;
  });
  with("scale_zero", [](auto& c) { c.scale = 0.0f; });
  with("scale_negative", [](auto& c) { c.scale = -0.3f; });
}

}  // namespace heddle::kit
