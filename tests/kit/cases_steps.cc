#include "kit/case_rows.h"

namespace heddle::kit {

// Rows and keys that stand for several positions each: pooled keys, anchors among rows.
void add_steps(Rows& rows) {
  const AttentionCase base{.B = 3, .H = 4, .Hkv = 2, .Sq = 50, .Sk = 75, .D = 32, .Dv = 32};
  const auto with = [&](const char* name, auto change) {
    AttentionCase row = base;
    row.name = name;
    row.purpose = Purpose::feature;
    change(row);
    rows.push_back(row);
  };
  // The first rows meet no key yet.
  with("steps_keys_causal", [](auto& c) {
    c.key_step = 16, c.key_offset = true, c.causal = Causal::top_left, c.Sq = 250, c.Sk = 15;
    c.poison_rows = c.d_lse = true;
  });
  with("steps_keys_far", [](auto& c) {
    c.key_step = 16, c.key_offset = c.q_offset = true, c.causal = Causal::top_left, c.Sq = 200, c.Sk = 150;
  });
  with("steps_keys_window", [](auto& c) { c.key_step = 3, c.window_left = 40, c.window_right = 25; });
  with("steps_rows_causal", [](auto& c) { c.q_step = 4, c.causal = Causal::top_left, c.Sk = 210, c.d_lse = true; });
  with("steps_rows_window", [](auto& c) { c.q_step = 4, c.q_offset = true, c.window_left = 50, c.Sk = 210; });
  // Rows farther apart than the window is wide: between them lie keys that none meets.
  with("steps_rows_gaps", [](auto& c) {
    c.q_step = 32, c.window_left = 6, c.window_right = 2, c.Sq = 30, c.Sk = 900, c.poison_keys = true;
  });
  with("steps_rows_gaps_causal",
       [](auto& c) { c.q_step = 300, c.window_left = 20, c.causal = Causal::top_left, c.Sq = 9, c.Sk = 900; });
  with("steps_both", [](auto& c) {
    c.q_step = 4, c.key_step = 3, c.q_offset = c.key_offset = true, c.causal = Causal::top_left, c.sink = true;
  });
  with("steps_both_window", [](auto& c) {
    c.q_step = 5, c.key_step = 7, c.window_left = 60, c.window_right = 8, c.Sk = 40, c.softcap = 9.0f;
  });
  with("steps_both_apart", [](auto& c) {  // most rows meet one key or none
    c.q_step = 6, c.key_step = 4, c.window_left = 1, c.window_right = 0, c.poison_rows = true;
  });
  with("steps_packed", [](auto& c) {
    c.B = 5, c.packed_q = c.packed_k = true, c.key_step = 8, c.key_offset = true, c.causal = Causal::top_left;
    c.Sq = 160, c.Sk = 20, c.sink = c.d_lse = true;
  });
  with("steps_packed_rows",
       [](auto& c) { c.B = 5, c.packed_q = c.packed_k = true, c.q_step = 2, c.causal = Causal::top_left, c.Sk = 110; });
  with("steps_used", [](auto& c) {
    c.B = 4, c.seqused_q = c.seqused_k = true, c.q_step = 2, c.key_step = 8, c.window_left = 30, c.window_right = 30;
    c.Sk = 20;
  });
  with("steps_groups", [](auto& c) {
    c.H = 15, c.Hkv = 3, c.D = 48, c.Dv = 20, c.key_step = 4, c.key_offset = true, c.causal = Causal::top_left;
    c.Sq = 77, c.layout_q = Layout::padded_rows;
  });
  with("steps_float32_out", [](auto& c) {
    c.float32_out = true, c.key_step = 4, c.key_offset = true, c.causal = Causal::top_left, c.Sq = 130, c.Sk = 30;
  });
  with("steps_few_rows", [](auto& c) {
    c.H = 2, c.Hkv = 1, c.q_step = 1500, c.key_step = 4, c.causal = Causal::top_left, c.Sq = 2, c.Sk = 700;
  });
  with("steps_few_rows_window", [](auto& c) {
    c.q_step = 700, c.window_left = 40, c.q_offset = true, c.Sq = 2, c.Sk = 1200, c.poison_keys = true;
  });
  with("steps_paged", [](auto& c) {
    c.page_size = 16, c.seqused_k = true, c.Sq = 9, c.Sk = 96, c.q_step = 10, c.causal = Causal::top_left;
  });
  with("steps_f8_cache", [](auto& c) {
    c.f8_cache = true, c.scaling = Scaling::heads, c.key_step = 2, c.key_offset = true, c.causal = Causal::top_left;
  });
  // Tiles of Hopper's forward: of rows that meet no key, some and all of a tile's, one tile or several.
  const auto pooled = [&](const char* name, std::int64_t step, auto change) {
    with(name, [&](auto& c) {
      c.B = 1, c.key_step = step, c.key_offset = true, c.causal = Causal::top_left, c.forward_only = true;
      change(c);
    });
  };
  pooled("steps_pooled_d128", 16,
         [](auto& c) { c.H = 2, c.Hkv = 1, c.D = c.Dv = 128, c.Sq = 2300, c.Sk = 150, c.poison_keys = true; });
  pooled("steps_pooled_d64", 32, [](auto& c) { c.H = 16, c.Hkv = 1, c.D = c.Dv = 64, c.Sq = 650, c.Sk = 19; });
  pooled("steps_pooled_d72", 64, [](auto& c) { c.D = c.Dv = 72, c.Sq = 700, c.Sk = 10, c.poison_rows = true; });
  pooled("steps_pooled_packed", 128,
         [](auto& c) { c.B = 5, c.packed_q = c.packed_k = true, c.D = c.Dv = 128, c.Sq = 900, c.Sk = 6; });
  pooled("steps_pooled_whole_tiles", 2, [](auto& c) { c.H = 2, c.D = c.Dv = 64, c.Sq = 700, c.Sk = 350; });
  pooled("steps_pooled_used", 3, [](auto& c) {
    c.B = 3, c.packed_q = c.packed_k = c.seqused_k = c.sink = true, c.D = c.Dv = 128, c.Sq = 500, c.Sk = 160;
  });
  pooled("steps_pooled_window", 3,
         [](auto& c) { c.window_left = 400, c.poison_keys = true, c.H = 2, c.D = c.Dv = 64, c.Sq = 900, c.Sk = 320; });
  pooled("steps_pooled_both", 4, [](auto& c) {
    c.q_step = 3, c.q_offset = true, c.window_left = 500, c.H = 2, c.D = c.Dv = 128, c.Sq = 500, c.Sk = 380;
  });
}

}  // namespace heddle::kit
