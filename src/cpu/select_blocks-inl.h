// The choice of blocks by pooled keys' scores. Positions lie in lanes and the heads of a group come one after the
// other, so that their probabilities add up, and lists are kept in order, without an operation across lanes, whatever
// the group size. Where there are few positions the products have their rows i * G + g in lanes, whose probabilities
// are added up one by one. Only the scores of one tile of pooled keys exist at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cpu/keys-inl.h"
#include "cpu/plan.h"
#include "cpu/rows-inl.h"
#include "cpu/scratch.h"
#include "cpu/softmax-inl.h"
#include "cpu/unit-inl.h"
#include "problem/select_blocks.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// A register tile's worth of positions: what each sees, and may list.
struct SelectLanes {
  std::int64_t count = 0;            // positions, in lanes
  std::int64_t least = 0, most = 0;  // pooled keys that one of them sees
  std::int32_t touched[kGroup];
  std::int32_t forced[3][kGroup];  // blocks that are listed anyway; -1: none
};

template <Unit U>
class SelectTile {
  using Word = typename U::Word;

 public:
  SelectTile(const SelectProblem& p, std::int64_t positions, std::byte* memory)
      : p_(p),
        depth_(Words<U>(round_up(p.D, U::kPad))),
        wide_(p.wide()),
        narrow_(p.narrow()),
        later_((wide_ + narrow_ - 2) / wide_),
        entries_(std::min(p.slots, p.touched(p.Sk))),
        tiles_(ceil_div(positions, kGroup)),
        few_(positions <= kLanes / 2),
        strips_(few_ ? ceil_div(positions * p.G, kGroup) : p.G),
        scratch_(memory) {
    const std::int64_t rows = tiles_ * strips_ * kGroup;
    line_ = scratch_.take<float>(kLineRows<U> * round_up(p.D, U::kPad));
    k_ = scratch_.take<Word>(kKeyBlock * depth_);
    q_ = scratch_.take<Word>(rows * depth_);
    lse_ = scratch_.take<float>(rows);
    if (!p.lse) sum_ = scratch_.take<float>(rows);
    seen_ = scratch_.take<std::int32_t>(rows);
    products_ = scratch_.take<float>(kKeyBlock * kGroup);
    p_cmp_ = scratch_.take<float>(kKeyBlock * kGroup);
    if (!same()) p_slc_ = scratch_.take<float>((kKeyBlock / wide_ + later_) * kGroup);
    begun_ = scratch_.take<float>(tiles_ * later_ * kGroup);
    best_ = scratch_.take<float>(tiles_ * entries_ * kGroup);
    listed_ = scratch_.take<std::int32_t>(tiles_ * entries_ * kGroup);
    lanes_ = scratch_.take<SelectLanes>(tiles_);
    rows_ = scratch_.take<GroupRows>(1);
  }
  std::size_t bytes() const { return scratch_.used(); }

  void run(const SparseTask& task) {
    const Sequence s = p_.sequence(task.b);
    std::int64_t most = 0;
    for (std::int64_t tile = 0; tile < tiles_; ++tile) {
      prepare(task, s, tile);
      most = std::max(most, lanes_[tile].most);
    }
    if (!p_.lse) {
      over_keys(task, s, most, [&]<int N>(std::int64_t tile, KeyRange keys) {
        for (std::int64_t strip = 0; strip < strips_; ++strip) find_lse<N>(tile, strip, keys);
      });
      for (std::int64_t n = 0; n < tiles_ * strips_ * kGroup; ++n) {
        if (sum_[n] != 0) lse_[n] += static_cast<float>(std::log2(static_cast<double>(sum_[n])));
      }
    }
    over_keys(task, s, most, [&]<int N>(std::int64_t tile, KeyRange keys) { score<N>(tile, keys); });
    for (std::int64_t tile = 0; tile < tiles_; ++tile) write(task, s, tile);
  }

 private:
  // Pooled keys are blocks of the lists.
  bool same() const { return wide_ == 1 && narrow_ == 1; }

  void prepare(const SparseTask& task, const Sequence& s, std::int64_t tile) {
    SelectLanes& x = lanes_[tile];
    const std::int64_t begin = task.row_begin + tile * kGroup;
    x.count = std::min<std::int64_t>(kGroup, task.row_end - begin);
    x.least = s.sk, x.most = 0;
    for (std::int64_t lane = 0; lane < x.count; ++lane) {
      const std::int64_t t = p_.position(s, begin + lane), seen = p_.seen(s, t);
      x.least = std::min(x.least, seen);
      x.most = std::max(x.most, seen);
      x.touched[lane] = static_cast<std::int32_t>(p_.touched(seen));
      const SelectProblem::Forced forced = p_.forced_at(t);
      for (std::int64_t n = 0; n < 3; ++n) {
        x.forced[n][lane] = n < forced.count ? static_cast<std::int32_t>(forced.blocks[n]) : -1;
      }
    }
    std::fill_n(x.touched + x.count, kGroup - x.count, 0);
    std::fill_n(best_ + tile * entries_ * kGroup, entries_ * kGroup, -kInfinity);
    std::fill_n(listed_ + tile * entries_ * kGroup, entries_ * kGroup, -1);
    std::fill_n(begun_ + tile * later_ * kGroup, later_ * kGroup, 0.0f);

    for (std::int64_t strip = 0; strip < strips_; ++strip) {
      const std::int64_t at = (tile * strips_ + strip) * kGroup;
      std::int32_t rows[kGroup];  // of those from position `begin` on
      std::int64_t count = 0;
      for (; count < kGroup && position_of(strip, count) < x.count; ++count) {
        rows[count] = static_cast<std::int32_t>(few_ ? strip * kGroup + count : count * p_.G + strip);
        const Row row = row_at(p_, task.kv_head, begin * p_.G + rows[count]);
        seen_[at + count] = static_cast<std::int32_t>(p_.seen(s, p_.position(s, row.i)));
        if (p_.lse) {
          const double lse = p_.lse.template as<const float>()[p_.lse.offset(task.b, row.h, s.q_begin + row.i)];
          lse_[at + count] = static_cast<float>(lse / kLn2);
        }
      }
      std::fill_n(seen_ + at + count, kGroup - count, 0);
      if (p_.lse) {
        std::fill_n(lse_ + at + count, kGroup - count, 0.0f);
      } else {
        std::fill_n(lse_ + at, kGroup, -kInfinity);
        std::fill_n(sum_ + at, kGroup, 0.0f);
      }
      rows_->begin = begin * p_.G;
      rows_->count = count;
      rows_->listed = rows;
      GatherRowsTransposed<U>(p_, p_.q, p_.D, round_up(p_.D, U::kPad), task.b, s, task.kv_head, *rows_, kGroup,
                              q_ + at * depth_, kGroup, line_);
    }
  }
  // The position of a strip's lane, counted from the tile's first.
  std::int64_t position_of(std::int64_t strip, std::int64_t lane) const {
    return few_ ? (strip * kGroup + lane) / p_.G : lane;
  }

  // Calls visit<N>(tile, keys) for each tile of pooled keys and each tile of positions that sees some of it, N vectors
  // wide.
  template <class Visit>
  void over_keys(const SparseTask& task, const Sequence& s, std::int64_t most, const Visit& visit) {
    for (std::int64_t begin = 0; begin < most; begin += kKeyBlock) {
      const std::int64_t count = std::min(kKeyBlock, most - begin);
      PackRows<U>(p_, p_.k, p_.D, round_up(p_.D, U::kPad), task.b, s, task.kv_head, begin, count,
                  round_up(count, U::kPad), k_);
      for (std::int64_t tile = 0; tile < tiles_; ++tile) {
        const KeyRange keys{begin, std::min(begin + kKeyBlock, lanes_[tile].most)};
        if (keys.empty()) continue;
        const std::int64_t used = few_ ? std::min<std::int64_t>(kGroup, lanes_[tile].count * p_.G) : lanes_[tile].count;
        switch (ceil_div(used, kLanes)) {
          case 1:
            visit.template operator()<1>(tile, keys);
            break;
          case 2:
            visit.template operator()<2>(tile, keys);
            break;
          default:
            visit.template operator()<3>(tile, keys);
            break;
        }
      }
    }
  }

  // products[key][lane] of a strip.
  template <int N>
  HWY_INLINE void multiply(std::int64_t tile, std::int64_t strip, KeyRange keys) {
    const Lanes<Word> q{q_ + (tile * strips_ + strip) * kGroup * depth_, kGroup};
    for (std::int64_t j = 0; j < keys.size(); j += U::kTileM) {
      U::template Product<N, Sum::kStore>(depth_, {k_ + j * depth_, depth_, 1}, q, products_ + j * kGroup, kGroup);
    }
  }

  // Running maxima, in lse_, and sums of a strip, logits times log2(e).
  template <int N>
  void find_lse(std::int64_t tile, std::int64_t strip, KeyRange keys) {
    const DF d;
    const DI di;
    multiply<N>(tile, strip, keys);
    const std::int64_t at = (tile * strips_ + strip) * kGroup;
    const VF factor = hn::Set(d, p_.scale * kLog2e), minus_infinity = hn::Set(d, -kInfinity);
    VF top[N], alpha[N];
    for (int n = 0; n < N; ++n) {
      const VI seen = hn::LoadU(di, seen_ + at + n * kLanes);
      top[n] = minus_infinity;
      for (std::int64_t j = 0; j < keys.size(); ++j) {
        float* product = products_ + j * kGroup + n * kLanes;
        const auto inside = hn::Gt(seen, hn::Set(di, static_cast<std::int32_t>(keys.begin + j)));
        const VF x = hn::IfThenElse(hn::RebindMask(d, inside), hn::Mul(hn::LoadU(d, product), factor), minus_infinity);
        hn::StoreU(x, d, product);
        top[n] = hn::Max(top[n], x);
      }
    }
    UpdateMax<N>(lse_ + at, 1.0f, top, alpha);
    const auto power = [](VF x, VF max) HWY_ATTR { return hn::Sub(x, max); };
    ExponentiateAs<N>(power, products_, keys.size(), top, alpha, sum_ + at);
  }

  // products[key][lane] of a strip become exp2(logit - lse), 0 where a key is not seen, and are added to
  // p_cmp[key][position].
  template <int N, bool kMask>
  HWY_INLINE void add_probabilities(std::int64_t tile, std::int64_t strip, KeyRange keys) {
    const DF d;
    const DI di;
    const VF factor = hn::Set(d, p_.scale * kLog2e);
    VF lse[N];
    VI seen[N];
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) {
      lse[n] = hn::LoadU(d, lse_ + (tile * strips_ + strip) * kGroup + n * kLanes);
      seen[n] = hn::LoadU(di, seen_ + (tile * strips_ + strip) * kGroup + n * kLanes);
    }
    for (std::int64_t j = 0; j < keys.size(); ++j) {
      HWY_UNROLL(kTileN)
      for (int n = 0; n < N; ++n) {
        float* product = products_ + j * kGroup + n * kLanes;
        float* to = few_ ? product : p_cmp_ + j * kGroup + n * kLanes;
        VF e = Exp2(hn::MulSub(hn::LoadU(d, product), factor, lse[n]));
        if constexpr (kMask) {
          const auto inside = hn::Gt(seen[n], hn::Set(di, static_cast<std::int32_t>(keys.begin + j)));
          e = hn::IfThenElseZero(hn::RebindMask(d, inside), e);
        }
        hn::StoreU(few_ || strip == 0 ? e : hn::Add(hn::LoadU(d, to), e), d, to);
      }
    }
    if (!few_) return;
    if (strip == 0) std::fill_n(p_cmp_, keys.size() * kGroup, 0.0f);
    std::int32_t position[kGroup];
    std::int64_t count = 0;
    for (; count < kGroup && position_of(strip, count) < lanes_[tile].count; ++count) {
      position[count] = static_cast<std::int32_t>(position_of(strip, count));
    }
    for (std::int64_t j = 0; j < keys.size(); ++j) {
      for (std::int64_t lane = 0; lane < count; ++lane) {
        p_cmp_[j * kGroup + position[lane]] += products_[j * kGroup + lane];
      }
    }
  }

  template <int N>
  void score(std::int64_t tile, KeyRange keys) {
    const bool mask = lanes_[tile].least < keys.end;
    for (std::int64_t strip = 0; strip < strips_; ++strip) {
      multiply<N>(tile, strip, keys);
      if (mask) {
        add_probabilities<N, true>(tile, strip, keys);
      } else {
        add_probabilities<N, false>(tile, strip, keys);
      }
    }
    if (few_) return rank<1>(tile, keys);
    rank<N>(tile, keys);
  }

  // From p_cmp to the lists.
  template <int N>
  void rank(std::int64_t tile, KeyRange keys) {
    if (same()) return offer<N>(tile, p_cmp_, keys.size(), keys.begin);
    // Blocks that the tile's keys touch: those that earlier ones have begun come first, and `later_` are left open.
    const std::int64_t own = kKeyBlock / wide_;
    float* begun = begun_ + tile * later_ * kGroup;
    std::copy_n(begun, later_ * kGroup, p_slc_);
    std::fill_n(p_slc_ + later_ * kGroup, own * kGroup, 0.0f);
    const DF d;
    for (std::int64_t c = 0; c < keys.size(); ++c) {
      for (std::int64_t j = c / wide_; j <= (c + narrow_ - 1) / wide_; ++j) {
        const VF weight = hn::Set(d, static_cast<float>(p_.weight(c - wide_ * j)));
        HWY_UNROLL(kTileN)
        for (int n = 0; n < N; ++n) {
          float* to = p_slc_ + j * kGroup + n * kLanes;
          hn::StoreU(hn::MulAdd(weight, hn::LoadU(d, p_cmp_ + c * kGroup + n * kLanes), hn::LoadU(d, to)), d, to);
        }
      }
    }
    std::copy_n(p_slc_ + own * kGroup, later_ * kGroup, begun);
    const bool last = keys.end == lanes_[tile].most;
    offer<N>(tile, p_slc_, last ? own + later_ : own, keys.begin / wide_);
  }

  // Scores of `count` blocks from `first` on, for all lanes.
  template <int N>
  void offer(std::int64_t tile, const float* scores, std::int64_t count, std::int64_t first) {
    const DF d;
    const DI di;
    if (entries_ == 0) return;
    const SelectLanes& x = lanes_[tile];
    for (int n = 0; n < N; ++n) {
      const VI touched = hn::LoadU(di, x.touched + n * kLanes), f0 = hn::LoadU(di, x.forced[0] + n * kLanes),
               f1 = hn::LoadU(di, x.forced[1] + n * kLanes), f2 = hn::LoadU(di, x.forced[2] + n * kLanes);
      for (std::int64_t j = 0; j < count; ++j) {
        const VI block = hn::Set(di, static_cast<std::int32_t>(first + j));
        const auto forced = hn::Or(hn::Eq(block, f0), hn::Or(hn::Eq(block, f1), hn::Eq(block, f2)));
        const auto open = hn::AndNot(forced, hn::Gt(touched, block));
        const VF score = hn::IfThenElse(hn::RebindMask(d, open), hn::LoadU(d, scores + j * kGroup + n * kLanes),
                                        hn::Set(d, -kInfinity));
        insert(score, block, (tile * entries_) * kGroup + n * kLanes);
      }
    }
  }

  // Where a lane's score is above the last of its list. Blocks come in ascending order, so that one goes behind its
  // equals. at: the lanes' first entries.
  HWY_INLINE void insert(VF score, VI block, std::int64_t at) {
    const DF d;
    const DI di;
    float* best = best_ + at + (entries_ - 1) * kGroup;
    std::int32_t* listed = listed_ + at + (entries_ - 1) * kGroup;
    auto above = hn::Gt(score, hn::LoadU(d, best));
    for (std::int64_t left = entries_ - 1; !hn::AllFalse(d, above); --left) {
      VF moved = hn::IfThenElse(above, score, hn::LoadU(d, best));
      VI moved_block = hn::IfThenElse(hn::RebindMask(di, above), block, hn::LoadU(di, listed));
      if (left == 0) {
        hn::StoreU(moved, d, best);
        hn::StoreU(moved_block, di, listed);
        return;
      }
      // Where it is above the entry before too, that one moves here.
      const VF before = hn::LoadU(d, best - kGroup);
      above = hn::Gt(score, before);
      hn::StoreU(hn::IfThenElse(above, before, moved), d, best);
      hn::StoreU(hn::IfThenElse(hn::RebindMask(di, above), hn::LoadU(di, listed - kGroup), moved_block), di, listed);
      best -= kGroup;
      listed -= kGroup;
    }
  }

  void write(const SparseTask& task, const Sequence& s, std::int64_t tile) {
    const SelectLanes& x = lanes_[tile];
    for (std::int64_t lane = 0; lane < x.count; ++lane) {
      std::int32_t* to = p_.list(task.b, s, task.row_begin + tile * kGroup + lane, task.kv_head);
      const std::int32_t* listed = listed_ + tile * entries_ * kGroup + lane;
      std::int64_t n = 0;
      for (int f = 0; f < 3 && n < p_.slots && x.forced[f][lane] >= 0; ++f) to[n++] = x.forced[f][lane];
      for (std::int64_t k = 0; k < entries_ && n < p_.slots; ++k) to[n++] = listed[k * kGroup];
      std::fill(to + n, to + p_.slots, -1);
    }
  }

  const SelectProblem& p_;
  const std::int64_t depth_;          // words of a row of q or k
  const std::int64_t wide_, narrow_;  // as SelectProblem has them
  const std::int64_t later_;          // blocks behind a tile's own that its keys touch too
  const std::int64_t entries_;        // that a list may have beside forced ones
  const std::int64_t tiles_;          // of positions
  const bool few_;                    // rows lie in lanes, not positions
  const std::int64_t strips_;         // products for a tile of positions: one for each head, or lanes full of rows
  Scratch scratch_;
  float *line_ = nullptr, *lse_ = nullptr, *sum_ = nullptr, *products_ = nullptr, *p_cmp_ = nullptr, *p_slc_ = nullptr,
        *begun_ = nullptr;
  Word *k_ = nullptr, *q_ = nullptr;
  float* best_ = nullptr;  // [tile][entry][lane]: the scores in order, and the blocks that have them
  std::int32_t *listed_ = nullptr, *seen_ = nullptr;
  SelectLanes* lanes_ = nullptr;
  GroupRows* rows_ = nullptr;
};

template <class F>
auto WithSelectTile(const SelectProblem& p, std::int64_t positions, std::byte* memory, const F& f) {
  return WithUnit(p.dtype == DType::bf16, [&]<Unit U>() {
    SelectTile<U> tile(p, positions, memory);
    return f(tile);
  });
}

inline std::size_t SelectScratch(const SelectProblem& p, std::int64_t positions) {
  return WithSelectTile(p, positions, nullptr, [](auto& tile) { return tile.bytes(); });
}
inline void SelectBlocks(const SelectProblem& p, const SparseTask& task, std::byte* memory) {
  WithSelectTile(p, task.row_end - task.row_begin, memory, [&](auto& tile) { tile.run(task); });
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
