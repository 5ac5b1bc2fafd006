// Plain cases by size: those that fill tiles, and those one off.
#include <array>

#include "core/check.h"
#include "kit/case_rows.h"

namespace heddle::kit {

namespace {

void add(Rows& rows, Purpose purpose, std::initializer_list<AttentionCase> more) {
  for (AttentionCase row : more) {
    row.purpose = purpose;
    rows.push_back(row);
  }
}

}  // namespace

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

}  // namespace heddle::kit
