#include <array>

#include "core/check.h"
#include "kit/case_rows.h"

namespace heddle::kit {

// Pieces of a longer problem, whose rows and keys stand at offsets of their own, and o in f32.
void add_partial(Rows& rows) {
  const AttentionCase base{.B = 3, .H = 4, .Hkv = 2, .Sq = 50, .Sk = 75, .D = 32, .Dv = 32};
  const auto with = [&](const char* name, auto change) {
    AttentionCase row = base;
    row.name = name;
    row.purpose = Purpose::feature;
    change(row);
    rows.push_back(row);
  };
  const auto piece = [&](const char* name, auto change) {
    with(name, [&](auto& c) {
      c.q_offset = c.key_offset = true;
      change(c);
    });
  };
  piece("piece", [](auto&) {});
  piece("piece_causal", [](auto& c) { c.causal = Causal::top_left, c.d_lse = true; });
  piece("piece_window", [](auto& c) { c.window_left = 11, c.window_right = 6; });
  piece("piece_window_causal", [](auto& c) { c.window_left = 20, c.causal = Causal::top_left, c.sink = true; });
  piece("piece_alibi", [](auto& c) { c.alibi = Alibi::per_head; });
  piece("piece_alibi_causal", [](auto& c) { c.alibi = Alibi::per_batch, c.causal = Causal::top_left; });
  piece("piece_bias", [](auto& c) { c.bias = kFull, c.bias_holes = true; });
  piece("piece_bias_columns", [](auto& c) { c.bias = kColumns, c.bias_f32 = true; });
  piece("piece_bias_rows", [](auto& c) { c.bias = kRows, c.causal = Causal::top_left; });
  piece("piece_mask", [](auto& c) { c.mask = kRowsColumns, c.softcap = 9.0f; });
  piece("piece_mask_bias", [](auto& c) { c.mask = kBatchColumns, c.bias = kRowsColumns; });
  // Tiles of a GPU that hold no row and no key too many, whose columns are read in pairs where they begin at even ones.
  piece("piece_whole_tiles_bias", [](auto& c) { c.Sq = 64, c.Sk = 192, c.bias = kFull; });
  piece("piece_whole_tiles_mask", [](auto& c) { c.Sq = 64, c.Sk = 192, c.mask = kFull; });
  piece("piece_dropout", [](auto& c) { c.dropout = 0.2f; });
  piece("piece_dropout_odd", [](auto& c) { c.dropout = 0.5f, c.Sq = c.Sk = 67, c.causal = Causal::top_left; });
  piece("piece_packed", [](auto& c) {
    c.B = 5, c.packed_q = c.packed_k = true, c.causal = Causal::top_left, c.bias = kFull, c.alibi = Alibi::per_head;
  });
  piece("piece_used", [](auto& c) {
    c.B = 4, c.seqused_q = c.seqused_k = true, c.causal = Causal::top_left, c.mask = kFull, c.dropout = 0.3f;
  });
  piece("piece_all", [](auto& c) {
    c.causal = Causal::top_left, c.window_left = 40, c.softcap = 8.0f, c.alibi = Alibi::per_head, c.bias = kHeads;
    c.mask = kBatchColumns, c.sink = c.d_lse = true, c.dropout = 0.1f, c.float32_out = true;
  });
  piece("piece_few_rows", [](auto& c) {
    c.Sq = 1, c.Sk = 700, c.bias = kColumns, c.dropout = 0.2f, c.window_right = 600, c.window_left = 30;
  });
  piece("piece_paged", [](auto& c) {
    c.page_size = 16, c.Sk = 96, c.seqused_k = true, c.causal = Causal::top_left, c.mask = kColumns;
  });
  with("piece_of_rows", [](auto& c) { c.q_offset = true, c.causal = Causal::top_left, c.mask = kColumns; });
  with("piece_of_keys", [](auto& c) { c.key_offset = true, c.causal = Causal::top_left, c.dropout = 0.2f; });

  const auto float32 = [&](const char* name, auto change) {
    with(name, [&](auto& c) {
      c.float32_out = true;
      change(c);
    });
  };
  // Two of each: the table gives rows bf16 and f16 in turn.
  float32("float32_out", [](auto& c) { c.d_lse = true; });
  float32("float32_out_too", [](auto& c) { c.d_lse = true; });
  float32("float32_out_causal", [](auto& c) { c.causal = Causal::bottom_right, c.D = 40, c.Dv = 72; });
  float32("float32_out_packed", [](auto& c) {
    c.packed_q = c.packed_k = c.sink = true, c.causal = Causal::bottom_right, c.D = c.Dv = 36;
    c.layout_o = Layout::padded_rows;
  });
  float32("float32_out_strided", [](auto& c) { c.layout_q = c.layout_k = c.layout_o = Layout::strided_dim; });
  float32("float32_out_few_rows", [](auto& c) { c.Sq = 2, c.Sk = 700, c.causal = Causal::bottom_right; });
  float32("float32_out_f8_cache", [](auto& c) { c.f8_cache = true, c.scaling = Scaling::heads; });
  float32("float32_out_piece", [](auto& c) {
    c.q_offset = c.key_offset = true, c.causal = Causal::top_left, c.Sq = 150, c.Sk = 300, c.D = c.Dv = 64;
  });
  float32("float32_out_piece_packed", [](auto& c) {
    c.q_offset = c.key_offset = c.packed_q = c.packed_k = true, c.causal = Causal::top_left, c.window_left = 90;
    c.B = 3, c.Sq = 200, c.Sk = 260, c.D = 128, c.Dv = 72;
  });
  float32("float32_out_e4m3", [](auto& c) { c.dtype = DType::f8e4m3, c.scaling = Scaling::one; });

  // Decoding over a part of the keys: of a row by one block of threads or by many, in clusters or not, by warps or
  // warpgroups, and the third sequence without any key.
  const auto decode = [&](const char* name, std::array<std::int64_t, 6> sizes, auto change) {
    float32(text("float32_out_decode_", name).c_str(), [&](auto& c) {
      c.B = sizes[0], c.H = sizes[1], c.Hkv = sizes[2], c.Sq = sizes[3], c.Sk = sizes[4], c.D = c.Dv = sizes[5];
      c.forward_only = true;
      change(c);
    });
  };
  decode("split", {1, 8, 1, 1, 4000, 128}, [](auto&) {});
  decode("short", {80, 8, 8, 1, 50, 64}, [](auto& c) { c.seqused_k = true; });
  decode("uneven", {4, 8, 2, 2, 3000, 128}, [](auto& c) { c.seqused_k = true, c.causal = Causal::bottom_right; });
  decode("pages", {3, 32, 8, 1, 700, 128}, [](auto& c) { c.seqused_k = true, c.page_size = 16; });
  decode("rows", {3, 8, 2, 16, 500, 128}, [](auto& c) { c.seqused_k = true, c.causal = Causal::bottom_right; });
  decode("rows_d256", {2, 16, 1, 16, 200, 256}, [](auto& c) { c.sink = true; });
  decode("softcap", {2, 4, 2, 2, 150, 64}, [](auto& c) { c.softcap = 9.0f; });
  decode("f8_cache", {3, 8, 2, 1, 900, 128},
         [](auto& c) { c.f8_cache = c.seqused_k = true, c.scaling = Scaling::heads; });
  decode("f8_cache_pages", {3, 4, 1, 4, 200, 64},
         [](auto& c) { c.f8_cache = c.seqused_k = true, c.page_size = 48, c.scaling = Scaling::rows; });
  // Keys begin and end within the part; ranks that have a sequence's keys in turn.
  decode("piece", {3, 8, 2, 1, 700, 128},
         [](auto& c) { c.q_offset = c.key_offset = c.seqused_k = true, c.window_left = 15, c.window_right = 500; });
  decode("piece_rows", {3, 8, 2, 16, 900, 128}, [](auto& c) {
    c.q_offset = c.key_offset = c.seqused_k = c.poison_keys = true, c.window_left = 8, c.window_right = 700;
  });
  decode("piece_f8_cache_pages", {3, 8, 2, 3, 640, 128}, [](auto& c) {
    c.q_offset = c.key_offset = c.f8_cache = c.seqused_k = true, c.page_size = 16, c.causal = Causal::top_left;
  });
  decode("steps", {3, 8, 2, 3, 700, 64}, [](auto& c) {
    c.q_offset = c.key_offset = c.seqused_k = true, c.key_step = 3, c.window_left = 12, c.window_right = 900;
  });
  decode("steps_f8_cache_pages", {3, 8, 2, 2, 320, 128}, [](auto& c) {
    c.q_offset = c.key_offset = c.f8_cache = c.seqused_k = true, c.page_size = 16, c.key_step = 2;
    c.causal = Causal::top_left, c.scaling = Scaling::heads;
  });
}

}  // namespace heddle::kit
