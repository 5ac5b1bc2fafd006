#include "kit/cases.h"

#include <algorithm>
#include <array>
#include <map>

#include "core/check.h"

namespace heddle::kit {
namespace {

constexpr Extents kFull = {true, true, true, true, true};
constexpr Extents kRowsColumns = {true, false, false, true, true};
constexpr Extents kHeads = {true, false, true, true, true};
constexpr Extents kColumns = {true, false, false, false, true};
constexpr Extents kBatchColumns = {true, true, false, false, true};
constexpr Extents kRows = {true, true, true, true, false};
constexpr Extents kScalar = {true, false, false, false, false};

using Rows = std::vector<AttentionCase>;

void add(Rows& rows, Purpose purpose, std::initializer_list<AttentionCase> more) {
  for (AttentionCase row : more) {
    row.purpose = purpose;
    rows.push_back(row);
  }
}

void add_round(Rows& rows) {
  add(rows, Purpose::round,
      {
          {.name = "s64_d64", .B = 2, .H = 2, .Hkv = 2, .Sq = 64, .Sk = 64, .D = 64, .Dv = 64},
          {.name = "s128_d128", .H = 2, .Hkv = 2, .Sq = 128, .Sk = 128, .D = 128, .Dv = 128},
          {.name = "s128_d32_encoder", .B = 2, .H = 3, .Hkv = 3, .Sq = 128, .Sk = 128, .D = 32, .Dv = 32},
          {.name = "s256_d64_causal",
           .H = 2,
           .Hkv = 1,
           .Sq = 256,
           .Sk = 256,
           .D = 64,
           .Dv = 64,
           .causal = Causal::bottom_right},
          {.name = "s96_d80_gqa4", .B = 2, .H = 4, .Hkv = 1, .Sq = 96, .Sk = 96, .D = 80, .Dv = 80},
          {.name = "s64_d256", .H = 2, .Hkv = 2, .Sq = 64, .Sk = 64, .D = 256, .Dv = 256},
          {.name = "s32_k512", .H = 2, .Hkv = 2, .Sq = 32, .Sk = 512, .D = 64, .Dv = 64},
          {.name = "s512_k32", .H = 2, .Hkv = 2, .Sq = 512, .Sk = 32, .D = 64, .Dv = 64},
      });
}

// Lengths and head sizes one off the usual tiles, each with another partner, causal rule and group.
void add_odd(Rows& rows) {
  constexpr std::array<int, 21> kLengths = {1,  3,  7,  15, 16,  17,  31,  33,  47,  48, 49,
                                            63, 65, 95, 97, 127, 129, 191, 193, 200, 257};
  constexpr std::array<int, 15> kHeadSizes = {64, 1, 33, 8, 96, 3, 31, 128, 5, 40, 129, 32, 80, 192, 256};
  constexpr std::array<std::array<int, 3>, 4> kHeads = {{{2, 2, 1}, {1, 3, 3}, {1, 4, 2}, {2, 1, 1}}};  // B, H, Hkv
  constexpr std::array<Causal, 3> kCausal = {Causal::none, Causal::bottom_right, Causal::top_left};

  for (std::size_t n = 0; n < kLengths.size(); ++n) {
    const auto& [b, h, hkv] = kHeads[n % kHeads.size()];
    AttentionCase row{.purpose = Purpose::odd, .B = b, .H = h, .Hkv = hkv};
    row.Sq = kLengths[n];
    row.Sk = n % 4 == 3 ? row.Sq : kLengths[(5 * n + 3) % kLengths.size()];
    row.D = kHeadSizes[(2 * n) % kHeadSizes.size()];
    row.Dv = n % 3 == 0 ? kHeadSizes[(n + 4) % kHeadSizes.size()] : row.D;
    row.causal = kCausal[n % kCausal.size()];
    row.name = text("q", row.Sq, "_k", row.Sk, "_d", row.D, "_dv", row.Dv);
    rows.push_back(row);
  }
  for (std::size_t n = 0; n < kHeadSizes.size(); ++n) {
    AttentionCase row{.purpose = Purpose::odd, .H = 2, .Hkv = 1, .Sq = 19, .Sk = 37};
    row.D = kHeadSizes[n];
    row.Dv = n % 2 == 0 ? row.D : kHeadSizes[kHeadSizes.size() - 1 - n];
    row.causal = kCausal[(n + 1) % kCausal.size()];
    row.name = text("head_size_", row.D, "_", row.Dv);
    rows.push_back(row);
  }
}

void add_corner(Rows& rows) {
  const AttentionCase small{.B = 2, .H = 2, .Hkv = 1, .Sq = 5, .Sk = 7, .D = 16, .Dv = 16, .sink = false};
  const auto with = [&](const char* name, auto change) {
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
  with("mask_bias_tiles_groups", [&](auto& c) {
    tiles(c, 30, 200, 64), c.H = 4, c.Hkv = 1, c.mask = kFull, c.bias = kHeads, c.causal = Causal::bottom_right;
  });
  with("mask_bias_tiles_used", [&](auto& c) {
    tiles(c, 140, 400, 64), c.B = 3, c.mask = kFull, c.bias = kFull, c.seqused_q = c.seqused_k = true;
  });
  // Not finite values in keys that a mask removes, in more tiles than a GPU computes at once.
  with("unattended_keys_tiles",
       [&](auto& c) { tiles(c, 140, 400, 128), c.B = 2, c.mask = kBatchColumns, c.poison_keys = true; });
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
}

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
  with("scale_negative", [](auto& c) { c.scale = -0.1f, c.scaling = Scaling::heads; });
  with("scale_zero", [](auto& c) { c.scale = 0.0f; });
  with("large_logits", [](auto& c) { c.values = Values::large_logits; });
  with("no_keys", [](auto& c) { c.Sk = 0; });
  with("unattended_keys", [](auto& c) { c.Sq = 33, c.Sk = 300, c.causal = Causal::top_left, c.poison_keys = true; });
  with("unattended_keys_window", [](auto& c) { c.window_left = 7, c.window_right = 3, c.poison_keys = true; });
  with("idle_rows", [](auto& c) { c.Sk = 33, c.causal = Causal::bottom_right, c.poison_rows = c.sink = true; });
  with("heads_first", [](auto& c) { c.layout_q = c.layout_k = c.layout_o = Layout::heads_first; });
}

// Every row in f32; round and corner rows in both 16-bit formats also, the others in one of them in turn.
Rows expand(const Rows& rows) {
  Rows out;
  std::map<Purpose, int> turns;  // of each purpose, so that a new row renames none of another purpose
  for (const AttentionCase& row : rows) {
    std::vector<DType> dtypes = {DType::f32, turns[row.purpose]++ % 2 ? DType::f16 : DType::bf16};
    if (row.purpose == Purpose::round || row.purpose == Purpose::corner) dtypes = {DType::f32, DType::bf16, DType::f16};
    if (row.f8_cache) dtypes.erase(dtypes.begin());  // beside 16-bit q only
    if (row.dtype == DType::f8e4m3) dtypes = {row.dtype};
    for (DType dtype : dtypes) {
      AttentionCase typed = row;
      typed.dtype = dtype;
      typed.name = text(name_of(row.purpose), "_", row.name, "_",
                        dtype == DType::f32    ? "f32"
                        : dtype == DType::bf16 ? "bf16"
                        : dtype == DType::f16  ? "f16"
                                               : "e4m3");
      out.push_back(typed);
    }
  }
  return out;
}

}  // namespace

const char* name_of(Purpose purpose) {
  switch (purpose) {
    case Purpose::round:
      return "round";
    case Purpose::odd:
      return "odd";
    case Purpose::corner:
      return "corner";
    case Purpose::feature:
      return "feature";
    case Purpose::decode:
      return "decode";
  }
  return "unknown";
}

const std::vector<AttentionCase>& attention_cases() {
  static const Rows cases = [] {
    Rows rows;
    add_round(rows);
    add_odd(rows);
    add_corner(rows);
    add_feature(rows);
    add_decode(rows);
    add_e4m3(rows);
    return expand(rows);
  }();
  return cases;
}

std::vector<AttentionCase> in_tf32(const std::vector<AttentionCase>& rows) {
  Rows out;
  for (const AttentionCase& row : rows) {
    if (row.dtype != DType::f32) continue;
    out.push_back(row);
    out.back().precision = Precision::tf32;
    out.back().name += "_tf32";
  }
  return out;
}

const AttentionCase& attention_case(const std::string& name) {
  for (const AttentionCase& row : attention_cases()) {
    if (row.name == name) return row;
  }
  throw Error(text("[attention_case] '", name, "' is not a row of the case table"));
}

}  // namespace heddle::kit
