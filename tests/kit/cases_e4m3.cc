#include "core/check.h"
#include "kit/case_rows.h"

namespace heddle::kit {

// q, k and v in f8e4m3. Head sizes and lengths about those of tiles; more than four tiles of keys, where sums go from
// the tensor cores' 14 bits to f32; whatever else touches a key tile's way.
void add_e4m3(Rows& rows) {
  const AttentionCase base{.dtype = DType::f8e4m3, .B = 2, .H = 4, .Hkv = 2, .Sq = 150, .Sk = 700, .D = 128, .Dv = 128};
  const auto with = [&](const char* name, auto change) {
    AttentionCase row = base;
    row.name = text("e4m3_", name);
    row.purpose = Purpose::feature;
    change(row);
    rows.push_back(row);
  };
  const auto plain = [](auto&) {};
  with("d128", plain);
  with("s128", [](auto& c) { c.Sq = c.Sk = 128, c.B = 1; });
  with("d64", [](auto& c) { c.D = c.Dv = 64; });
  with("d96", [](auto& c) { c.D = c.Dv = 96; });
  with("d80_dv48", [](auto& c) { c.D = 80, c.Dv = 48, c.Sq = 65, c.Sk = 257; });
  with("d32_dv128", [](auto& c) { c.D = 32, c.Sq = 127, c.Sk = 129; });
  with("d16", [](auto& c) { c.D = c.Dv = 16, c.Sq = 3, c.Sk = 7; });
  with("causal", [](auto& c) { c.Sq = 300, c.Sk = 300, c.causal = Causal::bottom_right, c.D = c.Dv = 64; });
  with("causal_top_left", [](auto& c) { c.Sk = 333, c.causal = Causal::top_left; });
  with("more_rows", [](auto& c) { c.Sq = 500, c.Sk = 200, c.causal = Causal::bottom_right, c.sink = true; });
  with("window", [](auto& c) { c.Sq = 400, c.window_left = 200, c.causal = Causal::bottom_right; });
  with("window_both", [](auto& c) { c.window_left = 70, c.window_right = 3, c.causal = Causal::top_left; });
  with("mqa", [](auto& c) { c.H = 6, c.Hkv = 1, c.Sq = 5, c.causal = Causal::bottom_right; });
  with("one_row", [](auto& c) { c.H = 8, c.Hkv = 1, c.Sq = 1; });
  with("long", [](auto& c) { c.B = 1, c.H = c.Hkv = 1, c.Sq = 64, c.Sk = 4000; });
  with("sink", [](auto& c) { c.sink = true; });
  with("packed", [](auto& c) { c.B = 4, c.packed_q = c.packed_k = true; });
  with("packed_causal", [](auto& c) {
    c.B = 3, c.packed_q = c.packed_k = c.sink = true, c.causal = Causal::bottom_right, c.D = c.Dv = 64;
    c.scaling = Scaling::one;
  });
  with("used_both_causal", [](auto& c) {
    c.B = 3, c.seqused_q = c.seqused_k = c.sink = true, c.causal = Causal::bottom_right, c.scaling = Scaling::heads;
  });
  with("packed_used", [](auto& c) { c.B = 4, c.packed_q = c.packed_k = c.seqused_q = c.seqused_k = true; });
  with("scaled_one", [](auto& c) { c.scaling = Scaling::one; });
  with("scaled_heads", [](auto& c) { c.scaling = Scaling::heads; });
  with("scaled_rows", [](auto& c) { c.scaling = Scaling::rows; });
  with("scaled_rows_d64_causal", [](auto& c) {
    c.Sq = c.Sk = 300, c.causal = Causal::bottom_right, c.D = c.Dv = 64, c.scaling = Scaling::rows, c.sink = true;
  });
  with("scaled_rows_d80_window", [](auto& c) {
    c.window_left = 70, c.window_right = 3, c.D = 80, c.Dv = 48, c.scaling = Scaling::rows, c.poison_keys = true;
  });
  with("scaled_rows_packed",
       [](auto& c) { c.B = 4, c.packed_q = c.packed_k = c.seqused_q = c.seqused_k = true, c.scaling = Scaling::rows; });
  with("scaled_rows_mqa",
       [](auto& c) { c.H = 6, c.Hkv = 1, c.Sq = 5, c.causal = Causal::bottom_right, c.scaling = Scaling::rows; });
  with("scaled_rows_large_logits", [](auto& c) { c.values = Values::large_logits, c.scaling = Scaling::rows; });
  with("scale_negative", [](auto& c) { c.scale = -0.1f, c.scaling = Scaling::heads; });
  with("scale_zero", [](auto& c) { c.scale = 0.0f; });
  with("large_logits", [](auto& c) { c.values = Values::large_logits; });
  // Tiles computed again while others wait: more than four for each of a large GPU's multiprocessors.
  with("large_logits_many_tiles", [](auto& c) {
    c.B = 12, c.H = c.Hkv = 24, c.Sq = 129, c.Sk = 260, c.D = c.Dv = 16, c.values = Values::large_logits;
  });
  with("no_keys", [](auto& c) { c.Sk = 0; });
  with("unattended_keys", [](auto& c) { c.Sq = 33, c.Sk = 300, c.causal = Causal::top_left, c.poison_keys = true; });
  with("unattended_keys_window", [](auto& c) { c.window_left = 7, c.window_right = 3, c.poison_keys = true; });
  with("idle_rows", [](auto& c) { c.Sk = 33, c.causal = Causal::bottom_right, c.poison_rows = c.sink = true; });
  with("heads_first", [](auto& c) { c.layout_q = c.layout_k = c.layout_o = Layout::heads_first; });
}

}  // namespace heddle::kit
