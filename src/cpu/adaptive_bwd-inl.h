// Attention with a tolerance, backward, of what the forward computed: the tiles of attention_bwd-inl.h, where a block
// that was replaced for a row has one dP, d_o times the mean of its values, and its values share one weight, the mean
// of its probabilities. So four such blocks of a tile cost the products dP and dV as four keys would: dV of the block
// as a whole is summed apart and given to each of its values in the end.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/dtypes.h"
#include "cpu/adaptive_plan.h"
#include "cpu/attention_bwd-inl.h"
#include "cpu/attention_bwd_rows-inl.h"
#include "cpu/attention_bwd_scores-inl.h"
#include "cpu/keys-inl.h"
#include "cpu/plan.h"
#include "cpu/rows-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/scratch.h"
#include "cpu/task_walk.h"
#include "cpu/unit-inl.h"
#include "problem/adaptive.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// Which rows of a group have which blocks of a tile replaced.
struct ReplacedOfGroup {
  bool any[kBlocksOfTile], all[kBlocksOfTile];
  float lanes[kBlocksOfTile][kGroup];  // 1 where the row's block is
};

template <Unit U>
class AdaptiveBackwardTile {
  using Word = typename U::Word;
  // Rows of the products of means: the blocks of a tile, and where operands are rounded what rounding takes off each.
  static constexpr std::int64_t kMeanRows = 2 * kBlocksOfTile;
  static_assert(kMeanRows % U::kTileM == 0);

 public:
  AdaptiveBackwardTile(const AdaptiveBackwardProblem& p, std::byte* memory)
      : p_(p),
        w_(p),
        limit_(round_up(ceil_div(backward_rows(p), kGroup), kSpan)),
        scratch_(memory),
        rows_(p, limit_, scratch_) {
    p_tile_ = scratch_.take<float>(kKeyBlock * kSpanRows);
    ds_tile_ = scratch_.take<float>(kKeyBlock * kSpanRows);
    weights_ = scratch_.take<float>(kMeanRows * kSpanRows);
    mean_dp_ = scratch_.take<float>(kMeanRows * kGroup);
    mean_ = scratch_.take<float>(w_.dvl + kLanes);
    line_ = scratch_.take<float>(w_.dvl + kLanes);
    replaced_ = scratch_.take<ReplacedOfGroup>(kSpan);
    dq_ = scratch_.take<float>(limit_ * kGroup * w_.dp);
    block_dv_ = scratch_.take<float>((ceil_div(p.Sk, kAdaptiveKeys) + kMeanRows) * w_.dvl);
    k_ = scratch_.take<Word>(kKeyBlock * Words<U>(w_.dp));
    v_ = scratch_.take<Word>(kKeyBlock * Words<U>(w_.dvp));
    means_ = scratch_.take<Word>(kMeanRows * Words<U>(w_.dvp));
    k_panels_ = scratch_.take<Word>(U::PanelWords(w_.dp, kKeyBlock));
    if (U::kRounds) {
      p_words_ = scratch_.take<Word>(kKeyBlock * Words<U>(kSpanRows));
      ds_words_ = scratch_.take<Word>(kKeyBlock * Words<U>(kSpanRows));
      ds_lanes_ = scratch_.take<Word>(Words<U>(kKeyBlock) * kGroup);
      weight_words_ = scratch_.take<Word>(kMeanRows * Words<U>(kSpanRows));
    }
  }
  std::size_t bytes() const { return scratch_.used(); }

  void run(const BackwardTask& task) {
    const Sequence s = p_.sequence(task.b);
    const Head head{p_, task.b, task.kv_head, s};
    const std::int64_t blocks = ceil_div(s.sk, kAdaptiveKeys);
    std::memset(task.dk, 0, static_cast<std::size_t>(s.k_rows * w_.dl) * 4);
    std::memset(task.dv, 0, static_cast<std::size_t>(s.k_rows * w_.dvl) * 4);
    std::memset(block_dv_, 0, static_cast<std::size_t>((blocks + kMeanRows) * w_.dvl) * 4);
    const std::int64_t all = s.sq * p_.G, tile = backward_rows(p_);
    for (std::int64_t begin = task.first_tile * tile; begin < all; begin += task.tile_step * tile) {
      const Interval<std::int64_t> rows{begin, std::min(begin + tile, all)};
      const TaskWalk walk(p_, s, rows, {0, s.sk}, kKeyBlock, {});
      rows_.load(head, rows.begin, rows.end);
      std::memset(dq_, 0, static_cast<std::size_t>(rows_.groups() * kGroup * w_.dp) * 4);
      for (std::int64_t n = 0; n < walk.count(); ++n) {
        pack(head, walk.tile(n));
        const std::int64_t calls = rows_.groups() * (kKeyBlock + w_.dp) / U::kTileM;
        Prefetcher prefetcher(p_, head.b, s, head.kv_head, walk.next(n), calls);
        for (std::int64_t group = 0; group < rows_.groups(); group += kSpan) {
          add_gradients(head, group, walk.tile(n), task, prefetcher);
        }
      }
      store_dq(head);
    }
    spread_blocks(s, task.dv);
  }

 private:
  void pack(const Head& head, KeyRange tile) {
    packed_ = round_up(tile.size(), U::kPad);
    PackRows<U>(p_, p_.k, p_.D, w_.dp, head.b, head.s, head.kv_head, tile.begin, tile.size(), packed_, k_);
    PackRows<U>(p_, p_.v, p_.Dv, w_.dvp, head.b, head.s, head.kv_head, tile.begin, tile.size(), packed_, v_);
    k_non_finite_ = PanelsFromRows<U>(k_, w_.dp, packed_, k_panels_);
    for (std::int64_t block = 0; block < kBlocksOfTile; ++block) pack_mean(head, tile, block);
  }

  void pack_mean(const Head& head, KeyRange tile, std::int64_t block) {
    const DF d;
    const std::int64_t begin = tile.begin + block * kAdaptiveKeys;
    const KeyRange keys = KeyRange{begin, begin + kAdaptiveKeys}.common({0, head.s.sk});
    std::memset(mean_, 0, static_cast<std::size_t>(w_.dvl) * 4);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      LoadRow(p_.key_row(p_.v, head.b, head.s, j, head.kv_head), p_.v.dtype, p_.v.stride_d, p_.Dv, w_.dvl, line_);
      for (std::int64_t i = 0; i < w_.dvl; i += kLanes) {
        hn::StoreU(hn::Add(hn::LoadU(d, mean_ + i), hn::LoadU(d, line_ + i)), d, mean_ + i);
      }
    }
    const VF share = hn::Set(d, keys.empty() ? 0.0f : 1.0f / static_cast<float>(keys.size()));
    for (std::int64_t i = 0; i < w_.dvl; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, mean_ + i), share), d, mean_ + i);
    using Element = typename U::Element;
    const Operand as_f32{.dtype = DType::f32, .stride_d = 1};
    const std::int64_t words = Words<U>(w_.dvp);
    auto* high = reinterpret_cast<Element*>(means_ + block * words);
    auto* low = reinterpret_cast<Element*>(means_ + (kBlocksOfTile + block) * words);
    U::PackRow(as_f32, reinterpret_cast<const std::byte*>(mean_), p_.Dv, w_.dvp, high);
    if constexpr (U::kRounds) {
      for (std::int64_t i = 0; i < p_.Dv; ++i) mean_[i] -= bf16_to_f32(high[i]);
      U::PackRow(as_f32, reinterpret_cast<const std::byte*>(mean_), p_.Dv, w_.dvp, low);
    } else {
      std::memset(low, 0, static_cast<std::size_t>(w_.dvp) * sizeof(Element));
    }
  }

  // What of the tile is replaced for the group: of rows that meet all of a block.
  void find_replaced(const Head& head, const GroupRows& g, KeyRange tile, ReplacedOfGroup& out) const {
    for (std::int64_t block = 0; block < kBlocksOfTile; ++block) {
      const std::int64_t begin = tile.begin + block * kAdaptiveKeys;
      const KeyRange keys = KeyRange{begin, begin + kAdaptiveKeys}.common({0, head.s.sk});
      std::int64_t count = 0;
      std::fill_n(out.lanes[block], kGroup, 0.0f);
      for (std::int64_t first = 0; first < g.count && !keys.empty(); first += kAdaptiveRows) {
        const std::int64_t run = (g.begin + first) / kAdaptiveRows;
        const std::uint8_t* bits = p_.replaced.at(p_, head.b, head.s, head.kv_head, run);
        if (!ReplacedBlocks::bit(bits, begin / kAdaptiveKeys)) continue;
        for (std::int64_t lane = first; lane < std::min(first + kAdaptiveRows, g.count); ++lane) {
          if (g.low[lane] > keys.begin || g.high[lane] < keys.end) continue;
          out.lanes[block][lane] = 1.0f;
          ++count;
        }
      }
      out.any[block] = count > 0;
      out.all[block] = count == g.count;
    }
  }

  void add_gradients(const Head& head, std::int64_t group0, KeyRange tile, const BackwardTask& task,
                     Prefetcher& prefetcher) {
    const std::int64_t groups = std::min<std::int64_t>(kSpan, rows_.groups() - group0);
    std::int64_t first = kKeyBlock, last = 0;
    for (std::int64_t k = 0; k < groups; ++k) {
      const TilePart<U> part(rows_.group(group0 + k), tile);
      if (part.empty()) continue;
      first = std::min(first, part.first);
      last = std::max(last, part.last);
    }
    if (first >= last) return;
    std::memset(weights_, 0, static_cast<std::size_t>(kMeanRows * kSpanRows) * 4);
    bool any = false, multiplied[kBlocksOfTile] = {};
    for (std::int64_t k = 0; k < groups; ++k) {
      const TilePart<U> part(rows_.group(group0 + k), tile);
      const std::int64_t column = k * kGroup;
      if (part.empty()) {
        clear(first, last, column);
        continue;
      }
      clear(first, part.first, column);
      clear(part.last, last, column);
      ReplacedOfGroup& replaced = replaced_[k];
      find_replaced(head, rows_.group(group0 + k), tile, replaced);
      compute(head, group0 + k, column, part, replaced, prefetcher);
      for (std::int64_t block = 0; block < kBlocksOfTile; ++block) {
        any |= replaced.any[block];
        multiplied[block] |= !replaced.all[block];
      }
    }
    const std::int64_t depth = groups * kGroup;
    const Interval<std::int64_t> keys{first, last};
    const Lanes<Word> d_o{rows_.do_rows(group0), w_.dvl};
    const Word* p = U::PackTile(p_tile_, kSpanRows, keys, depth, p_words_);
    for (std::int64_t block = first / kAdaptiveKeys; block * kAdaptiveKeys < last;) {
      std::int64_t end = block;
      while (end * kAdaptiveKeys < last && multiplied[end]) ++end;
      const Interval<std::int64_t> some = keys.common({block * kAdaptiveKeys, end * kAdaptiveKeys});
      if (!some.empty()) AddToKeys<U>(some, depth, p, d_o, task.dv + tile.begin * w_.dvl);
      block = end + 1;
    }
    if (any) {
      const Interval<std::int64_t> blocks{0, round_up(kBlocksOfTile, U::kTileM)};
      const Word* weights = U::PackTile(weights_, kSpanRows, blocks, depth, weight_words_);
      AddToKeys<U>(blocks, depth, weights, d_o, block_dv_ + tile.begin / kAdaptiveKeys * w_.dvl);
    }
    const Word* ds = U::PackTile(ds_tile_, kSpanRows, keys, depth, ds_words_);
    AddToKeys<U>(keys, depth, ds, {rows_.q_rows(group0), w_.dl}, task.dk + tile.begin * w_.dl);
    for (std::int64_t k = 0; k < groups; ++k) add_to_queries(head, group0 + k, k * kGroup, tile, prefetcher);
  }

  void clear(std::int64_t from, std::int64_t to, std::int64_t column) {
    for (std::int64_t j = from; j < to; ++j) {
      std::memset(p_tile_ + j * kSpanRows + column, 0, kGroup * 4);
      std::memset(ds_tile_ + j * kSpanRows + column, 0, kGroup * 4);
    }
  }

  // P^T (0 where it is replaced), dS^T, and the weights of means, of one group's rows.
  void compute(const Head& head, std::int64_t group, std::int64_t column, const TilePart<U>& part,
               const ReplacedOfGroup& replaced, Prefetcher& prefetcher) {
    const DF d;
    const GroupRows& g = rows_.group(group);
    const Lanes<Word> q{rows_.q(group), kGroup}, d_o{rows_.d_o(group), kGroup};
    const std::int64_t depth = Words<U>(w_.dp), depth_v = Words<U>(w_.dvp);
    bool any = false;
    for (std::int64_t block = part.first / kAdaptiveKeys; block * kAdaptiveKeys < part.last; ++block) {
      const std::int64_t end = std::min(part.last, (block + 1) * kAdaptiveKeys);
      any |= replaced.any[block];
      for (std::int64_t j = std::max(part.first, block * kAdaptiveKeys); j < end; j += U::kTileM) {
        const std::int64_t at = j * kSpanRows + column;
        U::template Product<kTileN, Sum::kStore>(depth, {k_ + j * depth, depth, 1}, q, p_tile_ + at, kSpanRows);
        prefetcher.some();
        if (replaced.all[block]) continue;
        U::template Product<kTileN, Sum::kStore>(depth_v, {v_ + j * depth_v, depth_v, 1}, d_o, ds_tile_ + at,
                                                 kSpanRows);
      }
    }
    for (std::int64_t j = 0; any && j < kMeanRows; j += U::kTileM) {
      U::template Product<kTileN, Sum::kStore>(depth_v, {means_ + j * depth_v, depth_v, 1}, d_o, mean_dp_ + j * kGroup,
                                               kGroup);
    }
    const bool plain = part.unmasked && !has_score_options(p_);
    if (!plain) {
      VF unused[kTileN] = {hn::Zero(d), hn::Zero(d), hn::Zero(d)};
      FinishScores(head, g, part.tile + part.first, part.last - part.first, p_tile_ + part.first * kSpanRows + column,
                   kSpanRows, nullptr, unused);
    }
    const VF factor = hn::Set(d, plain ? p_.scale * kLog2e : 1.0f);
    for (int n = 0; n < kTileN; ++n) {
      const std::int64_t lane = n * kLanes;
      const VF lse = hn::LoadU(d, rows_.lse(group) + lane), delta = hn::LoadU(d, rows_.delta(group) + lane);
      const auto idle = hn::Eq(lse, hn::Set(d, kInfinity));
      for (std::int64_t block = part.first / kAdaptiveKeys; block * kAdaptiveKeys < part.last; ++block) {
        const std::int64_t begin = std::max(part.first, block * kAdaptiveKeys);
        const std::int64_t end = std::min(part.last, (block + 1) * kAdaptiveKeys);
        const auto is_replaced = hn::Ne(hn::LoadU(d, replaced.lanes[block] + lane), hn::Zero(d));
        const float* mean_dp = mean_dp_ + block * kGroup + lane;
        const VF of_mean = replaced.any[block]
                               ? hn::Add(hn::LoadU(d, mean_dp), hn::LoadU(d, mean_dp + kBlocksOfTile * kGroup))
                               : hn::Zero(d);
        VF mass = hn::Zero(d);
        for (std::int64_t j = begin; j < end; ++j) {
          float* at = p_tile_ + j * kSpanRows + column + lane;
          float* ds_at = ds_tile_ + j * kSpanRows + column + lane;
          // Lanes without a probability (lse = +inf) may hold anything.
          const VF p = hn::IfThenZeroElse(idle, Exp2(hn::MulSub(hn::LoadU(d, at), factor, lse)));
          const VF dp = replaced.all[block] ? of_mean : hn::IfThenElse(is_replaced, of_mean, hn::LoadU(d, ds_at));
          // A pair without probability has no gradient, whatever its value holds.
          const VF ds = hn::IfThenZeroElse(hn::Eq(p, hn::Zero(d)), hn::Mul(p, hn::Sub(dp, delta)));
          mass = hn::Add(mass, hn::IfThenElseZero(is_replaced, p));
          hn::StoreU(hn::IfThenZeroElse(is_replaced, p), d, at);
          hn::StoreU(ds, d, ds_at);
        }
        const std::int64_t keys = std::min(head.s.sk - part.tile, (block + 1) * kAdaptiveKeys) - block * kAdaptiveKeys;
        const VF share = hn::Set(d, 1.0f / static_cast<float>(keys));
        hn::StoreU(hn::Mul(mass, share), d, weights_ + block * kSpanRows + column + lane);
      }
    }
  }

  void add_to_queries(const Head& head, std::int64_t group, std::int64_t column, KeyRange tile,
                      Prefetcher& prefetcher) {
    const GroupRows& g = rows_.group(group);
    const TilePart<U> part(g, tile);
    if (part.empty()) return;
    const auto [from, to] = part.depth();
    const Lanes<Word> ds = U::PackLanes(ds_tile_ + column, kSpanRows, {from, to}, kTileN, ds_lanes_);
    if (k_non_finite_) DropUnattended<U>(head, g, tile.begin, packed_, w_.dp, k_panels_);
    for (std::int64_t i = 0; i < w_.dp; i += U::kTileM) {
      U::template Product<kTileN, Sum::kJoin>(to - from, U::Panel(k_panels_, packed_, i, from), ds,
                                              dq_ + (group * w_.dp + i) * kGroup, kGroup);
      prefetcher.some();
    }
    if (k_non_finite_) PanelsFromRows<U>(k_, w_.dp, packed_, k_panels_);
  }

  void store_dq(const Head& head) {
    if (!p_.dq) return;
    const DF d;
    const VF scale = hn::Set(d, p_.scale);
    for (std::int64_t group = 0; group < rows_.groups(); ++group) {
      float* dq = dq_ + group * w_.dp * kGroup;
      for (std::int64_t i = 0; i < w_.dp * kGroup; i += kLanes)
        hn::StoreU(hn::Mul(hn::LoadU(d, dq + i), scale), d, dq + i);
      rows_.store_dq(head, group, dq);
    }
  }

  // dV of whole blocks, to each of their values.
  void spread_blocks(const Sequence& s, float* dv) const {
    const DF d;
    for (std::int64_t j = 0; j < s.sk; ++j) {
      const float* HWY_RESTRICT from = block_dv_ + j / kAdaptiveKeys * w_.dvl;
      float* HWY_RESTRICT to = dv + j * w_.dvl;
      for (std::int64_t i = 0; i < w_.dvl; i += kLanes) {
        hn::StoreU(hn::Add(hn::LoadU(d, to + i), hn::LoadU(d, from + i)), d, to + i);
      }
    }
  }

  const AdaptiveBackwardProblem& p_;
  const BackwardWidths<U> w_;
  const std::int64_t limit_;
  Scratch scratch_;
  BackwardRows<U> rows_;
  std::int64_t packed_ = 0;  // rows of the packed tile, padded
  bool k_non_finite_ = false;
  float *p_tile_ = nullptr, *ds_tile_ = nullptr;   // [key][kSpanRows]
  float *weights_ = nullptr, *mean_dp_ = nullptr;  // of blocks: [block][kSpanRows], [block][kGroup]
  float *mean_ = nullptr, *line_ = nullptr, *dq_ = nullptr, *block_dv_ = nullptr;
  ReplacedOfGroup* replaced_ = nullptr;
  Word *k_ = nullptr, *v_ = nullptr, *means_ = nullptr, *k_panels_ = nullptr, *p_words_ = nullptr, *ds_words_ = nullptr,
       *ds_lanes_ = nullptr, *weight_words_ = nullptr;
};

template <class F>
auto WithAdaptiveBackwardTile(const AdaptiveBackwardProblem& p, std::byte* memory, const F& f) {
  return WithUnit(p.dtype == DType::bf16, [&]<Unit U>() {
    AdaptiveBackwardTile<U> tile(p, memory);
    return f(tile);
  });
}

inline std::size_t AdaptiveBackwardScratch(const AdaptiveBackwardProblem& p) {
  return WithAdaptiveBackwardTile(p, nullptr, [](auto& tile) { return tile.bytes(); });
}
inline void AdaptiveBackward(const AdaptiveBackwardProblem& p, const BackwardTask& task, std::byte* memory) {
  WithAdaptiveBackwardTile(p, memory, [&](auto& tile) { tile.run(task); });
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
