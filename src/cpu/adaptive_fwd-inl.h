// Attention with a tolerance, forward: the tiles of attention_fwd-inl.h, with scores, exponentials and sums as there.
// Then, block by block, the mass of a block times the mean of its values takes the place of its product with V, while
// the error that this can make of any row of the group stays within what the tolerance allows of the row's sum so far.
// That sum only grows, so what was allowed once stays so, and no second pass is needed.
//
// Keys 0 and on come first, and then the last keys and down to the first: a sink and a row's own place, where most of
// its mass is, are there before the others are judged. A group of rows skips tiles that it does not meet, so its order
// is the same whichever rows share its task, and so are its bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/adaptive_plan.h"
#include "cpu/keys-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/scratch.h"
#include "cpu/softmax-inl.h"
#include "cpu/task_walk.h"
#include "cpu/unit-inl.h"
#include "cpu/units/f32-inl.h"
#include "problem/adaptive.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

static_assert(kGroup % kAdaptiveRows == 0);  // so that no run of rows is shared by two groups

// Mass and sum of squared exponentials of the blocks of a tile: [block][kGroup] each.
struct BlockSums {
  float mass[kBlocksOfTile * kGroup], squares[kBlocksOfTile * kGroup];
};

// As ExponentiateAs, of keys [first, last) of a tile, block by block.
template <int N, class Power>
HWY_INLINE void ExponentiateBlocksAs(const Power& power, float* HWY_RESTRICT scores, std::int64_t first,
                                     std::int64_t last, const VF* max, const VF* alpha, float* HWY_RESTRICT sums,
                                     BlockSums& blocks) {
  const DF d;
  VF total[N];
  HWY_UNROLL(kTileN)
  for (int n = 0; n < N; ++n) total[n] = hn::Zero(d);
  for (std::int64_t block = first / kAdaptiveKeys; block * kAdaptiveKeys < last; ++block) {
    VF sum[N], square[N];
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) sum[n] = square[n] = hn::Zero(d);
    const std::int64_t end = std::min(last, (block + 1) * kAdaptiveKeys);
    for (std::int64_t j = std::max(first, block * kAdaptiveKeys); j < end; ++j) {
      HWY_UNROLL(kTileN)
      for (int n = 0; n < N; ++n) {
        float* x = scores + j * kGroup + n * kLanes;
        const VF e = Exp2(power(hn::LoadU(d, x), max[n]));
        sum[n] = hn::Add(sum[n], e);
        square[n] = hn::MulAdd(e, e, square[n]);
        hn::StoreU(e, d, x);
      }
    }
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) {
      hn::StoreU(sum[n], d, blocks.mass + block * kGroup + n * kLanes);
      hn::StoreU(square[n], d, blocks.squares + block * kGroup + n * kLanes);
      total[n] = hn::Add(total[n], sum[n]);
    }
  }
  HWY_UNROLL(kTileN)
  for (int n = 0; n < N; ++n) {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, sums + n * kLanes), alpha[n], total[n]), d, sums + n * kLanes);
  }
}

template <int N>
HWY_INLINE void ExponentiateBlocks(const AttentionProblem& p, bool raw, float* HWY_RESTRICT scores, std::int64_t first,
                                   std::int64_t last, const VF* max, const VF* alpha, float* HWY_RESTRICT sums,
                                   BlockSums& blocks) {
  const DF d;
  if (natural_logits(p)) {
    const VF log2e = hn::Set(d, kLog2e);
    const auto power = [&](VF x, VF top) HWY_ATTR { return hn::Mul(hn::Sub(x, top), log2e); };
    ExponentiateBlocksAs<N>(power, scores, first, last, max, alpha, sums, blocks);
  } else {
    const VF factor = hn::Set(d, raw ? p.scale * kLog2e : 1.0f);
    const auto power = [&](VF x, VF top) HWY_ATTR { return hn::MulSub(x, factor, top); };
    ExponentiateBlocksAs<N>(power, scores, first, last, max, alpha, sums, blocks);
  }
}

// Running result of a group of rows: O^T [Dv padded][kGroup], then maxima, sums, and the error of what was replaced.
struct AdaptiveRunning {
  float *o, *max, *sum, *error;
};

template <Unit U>
class AdaptiveForwardTile {
  using Word = typename U::Word;

 public:
  AdaptiveForwardTile(const AdaptiveProblem& p, std::int64_t rows, std::byte* memory)
      : p_(p),
        dp_(round_up(p.D, U::kPad)),
        dvp_(round_up(p.Dv, U::kPad)),
        groups_(ceil_div(std::min(rows, tile_rows(p)), kGroup)) {
    Scratch scratch(memory);
    line_ = scratch.take<float>(kLineRows<U> * std::max(dp_, dvp_));
    rows_ = scratch.take<GroupRows>(groups_);
    blocks_ = scratch.take<BlockSums>(1);
    sinks_ = scratch.take<float>(groups_ * kGroup);
    q_ = scratch.take<Word>(groups_ * Words<U>(dp_) * kGroup);
    k_ = scratch.take<Word>(kKeyBlock * Words<U>(dp_));
    v_ = scratch.take<Word>(U::PanelWords(dvp_, kKeyBlock));
    scores_ = scratch.take<float>(kKeyBlock * kGroup);
    if (U::kRounds) weights_ = scratch.take<Word>(Words<U>(kKeyBlock) * kGroup);
    running_ = scratch.take<float>(groups_ * running_floats());
    bytes_ = scratch.used();
  }

  std::size_t bytes() const { return bytes_; }

  void run(const AdaptiveTask& task) {
    task_ = &task;
    const Sequence s = p_.sequence(task.b);
    const Head head{p_, task.b, task.kv_head, s};
    load_rows(head);
    const TaskWalk walk(p_, s, {task.row_begin, task.row_end}, {0, s.sk}, kKeyBlock, {});
    const bool from_first = walk.count() > 0 && walk.tile(0).begin == 0;
    for (std::int64_t step = 0; step < walk.count(); ++step) {
      const std::int64_t n = from_first ? (step == 0 ? 0 : walk.count() - step) : walk.count() - 1 - step;
      const std::int64_t next = step == 0 && from_first ? walk.count() - 1 : n - 1;
      const bool last = step + 1 == walk.count();
      pack(head, walk.tile(n));
      const std::int64_t calls = groups_ * (kKeyBlock + dvp_) / U::kTileM;
      Prefetcher prefetcher(p_, head.b, s, head.kv_head, last ? KeyRange{} : walk.tile(next), calls);
      for (std::int64_t group = 0; group < groups_; ++group) step_of(head, group, walk.tile(n), prefetcher);
    }
    finish(head);
  }

 private:
  std::int64_t running_floats() const { return (dvp_ + 3) * kGroup; }
  AdaptiveRunning at(std::int64_t group) const {
    float* o = running_ + group * running_floats();
    return {o, o + dvp_ * kGroup, o + (dvp_ + 1) * kGroup, o + (dvp_ + 2) * kGroup};
  }

  void load_rows(const Head& head) {
    groups_ = ceil_div(task_->row_end - task_->row_begin, kGroup);
    for (std::int64_t group = 0; group < groups_; ++group) {
      GroupRows& g = rows_[group];
      const std::int64_t begin = task_->row_begin + group * kGroup;
      PrepareRows(p_, head.b, head.s, head.kv_head, begin, std::min<std::int64_t>(kGroup, task_->row_end - begin), g);
      GatherRowsTransposed<U>(p_, p_.q, p_.D, dp_, head.b, head.s, head.kv_head, g,
                              static_cast<std::int64_t>(g.vectors) * kLanes, q_ + group * Words<U>(dp_) * kGroup,
                              kGroup, line_);
      const AdaptiveRunning r = at(group);
      std::fill_n(r.max, kGroup, -kInfinity);
      std::fill_n(r.sum, kGroup, 0.0f);
      std::fill_n(r.error, kGroup, 0.0f);
      std::memset(r.o, 0, static_cast<std::size_t>(dvp_ * kGroup) * 4);
      for (std::int64_t lane = 0; lane < kGroup; ++lane) {
        const std::int64_t h = row_of(p_, head.kv_head, g, std::min(lane, g.count - 1)).h;
        sinks_[group * kGroup + lane] =
            p_.sink ? p_.sink.template as<const float>()[h * p_.sink.stride_h] * to_kept(p_) : -kInfinity;
      }
    }
  }

  void pack(const Head& head, KeyRange tile) {
    packed_ = round_up(tile.size(), U::kPad);
    tile_ = tile;
    has_values_ = false;
    PackRows<U>(p_, p_.k, p_.D, dp_, head.b, head.s, head.kv_head, tile.begin, tile.size(), packed_, k_);
  }
  void pack_values(const Head& head) {
    has_values_ = true;
    v_non_finite_ = PackPanels<U>(p_, p_.v, p_.Dv, dvp_, head.b, head.s, head.kv_head, tile_.begin, tile_.size(),
                                  packed_, v_, line_);
  }

  void step_of(const Head& head, std::int64_t group, KeyRange tile, Prefetcher& prefetcher) {
    const TilePart<U> part(rows_[group], tile);
    if (part.empty()) return;
    switch (rows_[group].vectors) {
      case 1:
        return step_n<1>(head, group, part, prefetcher);
      case 2:
        return step_n<2>(head, group, part, prefetcher);
      default:
        return step_n<3>(head, group, part, prefetcher);
    }
  }

  template <int N>
  void step_n(const Head& head, std::int64_t group, const TilePart<U>& part, Prefetcher& prefetcher) {
    const DF d;
    const GroupRows& g = rows_[group];
    const AdaptiveRunning r = at(group);
    const std::int64_t first = part.first, last = part.last;
    const bool plain = part.unmasked && !has_score_options(p_);
    const std::int64_t depth = Words<U>(dp_);
    const Lanes<Word> q{q_ + group * depth * kGroup, kGroup};
    VF top[N], alpha[N];
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) top[n] = hn::Set(d, -kInfinity);
    for (std::int64_t j = first; j < last; j += U::kTileM) {
      const Broadcasts<Word> k{k_ + j * depth, depth, 1};
      if (plain) {
        U::template Product<N, Sum::kStoreMax>(depth, k, q, scores_ + j * kGroup, kGroup, nullptr, top);
      } else {
        U::template Product<N, Sum::kStore>(depth, k, q, scores_ + j * kGroup, kGroup);
      }
      prefetcher.some();
    }
    if (plain) {
      const VF scale = hn::Set(d, p_.scale * kLog2e);
      HWY_UNROLL(kTileN)
      for (int n = 0; n < N; ++n) top[n] = hn::Mul(top[n], scale);
    } else {
      FinishScores(head, g, part.tile + first, last - first, scores_ + first * kGroup, kGroup, nullptr, top);
    }
    UpdateMax<N>(r.max, to_log2(p_), top, alpha);
    ExponentiateBlocks<N>(p_, plain, scores_, first, last, top, alpha, r.sum, *blocks_);
    const unsigned replaced = replace<N>(head, group, part, top, alpha, r);
    if (replaced == 0) {
      multiply<N, Sum::kScaleJoin>(head, g, part, part.keys, r, alpha, prefetcher);
      return;
    }
    add_means<N>(replaced, part, alpha, r.o);
    // What is left, in as few products as there are gaps.
    for (std::int64_t block = first / kAdaptiveKeys; block * kAdaptiveKeys < last;) {
      std::int64_t end = block;
      while (end * kAdaptiveKeys < last && (replaced >> end & 1) == 0) ++end;
      if (end > block) {
        const KeyRange keys{part.tile + block * kAdaptiveKeys, part.tile + end * kAdaptiveKeys};
        multiply<N, Sum::kJoin>(head, g, part, keys.common(part.keys), r, alpha, prefetcher);
      }
      block = end + 1;
    }
  }

  // Decides which blocks of the tile are replaced for the group, as bits, and adds what that costs each row.
  template <int N>
  unsigned replace(const Head& head, std::int64_t group, const TilePart<U>& part, const VF* max, const VF* alpha,
                   const AdaptiveRunning& r) {
    const DF d;
    const GroupRows& g = rows_[group];
    VF error[N], room[N];
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) {
      error[n] = hn::Mul(hn::LoadU(d, r.error + n * kLanes), alpha[n]);
      VF sum = hn::LoadU(d, r.sum + n * kLanes);
      if (p_.sink) {
        // Beyond 2^100 the sum is large enough.
        const VF above =
            hn::Mul(hn::Sub(hn::LoadU(d, sinks_ + group * kGroup + n * kLanes), max[n]), hn::Set(d, to_log2(p_)));
        sum = hn::Add(sum, Exp2(hn::Min(above, hn::Set(d, 100.0f))));
      }
      room[n] = hn::Mul(sum, hn::Set(d, task_->limit));
    }
    unsigned replaced = 0;
    const std::int64_t first = ceil_div(part.keys.begin, kAdaptiveKeys);
    for (std::int64_t block = first; block * kAdaptiveKeys < part.keys.end; ++block) {
      const KeyRange keys{block * kAdaptiveKeys, std::min((block + 1) * kAdaptiveKeys, head.s.sk)};
      const ValueBlock& values = task_->values[block];
      if (!g.unmasked.holds(keys) || !(values.radius < kInfinity)) continue;
      const std::int64_t at = block - part.tile / kAdaptiveKeys;
      VF with[N];
      bool fits = true;
      HWY_UNROLL(kTileN)
      for (int n = 0; n < N; ++n) {
        const VF mass = hn::LoadU(d, blocks_->mass + at * kGroup + n * kLanes);
        const VF squares = hn::LoadU(d, blocks_->squares + at * kGroup + n * kLanes);
        // The difference of two sums that may cancel: each is off by less than 2^-17 of the squares.
        const VF share = hn::Mul(mass, hn::Set(d, 1.0f / static_cast<float>(keys.size())));
        const VF spread =
            hn::MulAdd(squares, hn::Set(d, 0x1p-16f), hn::Max(hn::NegMulAdd(mass, share, squares), hn::Zero(d)));
        const VF own =
            hn::Min(hn::Mul(hn::Sqrt(spread), hn::Set(d, values.width)), hn::Mul(mass, hn::Set(d, values.radius)));
        with[n] = hn::Add(error[n], hn::MulAdd(mass, hn::Set(d, kMeanRounding), own));
        // Lanes without a row have nothing to say; NaN says no.
        const auto idle =
            hn::Not(hn::FirstN(d, static_cast<std::size_t>(std::max<std::int64_t>(g.count - n * kLanes, 0))));
        fits = fits && hn::AllTrue(d, hn::Or(idle, hn::Le(with[n], room[n])));
      }
      if (!fits) continue;
      HWY_UNROLL(kTileN)
      for (int n = 0; n < N; ++n) error[n] = with[n];
      replaced |= 1u << at;
      if (p_.replaced) record(head, g, block);
    }
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) hn::StoreU(error[n], d, r.error + n * kLanes);
    return replaced;
  }

  void record(const Head& head, const GroupRows& g, std::int64_t block) const {
    for (std::int64_t row = g.begin; row < g.begin + g.count; row += kAdaptiveRows) {
      ReplacedBlocks::set(p_.replaced.at(p_, head.b, head.s, head.kv_head, row / kAdaptiveRows), block);
    }
  }

  // o = o * alpha + the means of the replaced blocks times their masses: a product over the blocks of the tile, where
  // those that are not replaced have none.
  template <int N>
  void add_means(unsigned replaced, const TilePart<U>& part, const VF* alpha, float* o) {
    const DF d;
    const std::int64_t depth = ceil_div(part.last, kAdaptiveKeys);
    for (std::int64_t block = 0; block < depth; ++block) {
      if ((replaced >> block & 1) != 0) continue;
      for (int n = 0; n < N; ++n) hn::StoreU(hn::Zero(d), d, blocks_->mass + block * kGroup + n * kLanes);
    }
    const float* const means = task_->means + part.tile / kAdaptiveKeys * mean_width(p_);
    for (std::int64_t i = 0; i < dvp_; i += F32Unit::kTileM) {
      F32Unit::Product<N, Sum::kScaleJoin>(depth, {means + i, 1, mean_width(p_)}, {blocks_->mass, kGroup},
                                           o + i * kGroup, kGroup, alpha);
    }
  }

  // o (= o * alpha) + P V of these keys of the tile.
  template <int N, Sum kSum>
  void multiply(const Head& head, const GroupRows& g, const TilePart<U>& part, KeyRange keys, const AdaptiveRunning& r,
                const VF* alpha, Prefetcher& prefetcher) {
    if (!has_values_) pack_values(head);
    if (v_non_finite_) DropUnattended<U>(head, g, part.tile, packed_, dvp_, v_);
    const auto [from, to] = DepthWords<U>({keys.begin - part.tile, keys.end - part.tile});
    const Lanes<Word> weights = U::PackLanes(scores_, kGroup, {from, to}, N, weights_);
    for (std::int64_t i = 0; i < dvp_; i += U::kTileM) {
      U::template Product<N, kSum>(to - from, U::Panel(v_, packed_, i, from), weights, r.o + i * kGroup, kGroup, alpha);
      prefetcher.some();
    }
    if (v_non_finite_) pack_values(head);
  }

  // Sinks, normalisation, o, lse and bound.
  void finish(const Head& head) {
    const DF d;
    for (std::int64_t group = 0; group < groups_; ++group) {
      const GroupRows& g = rows_[group];
      const AdaptiveRunning r = at(group);
      for (std::int64_t lane = 0; lane < g.count; ++lane) {
        const Row row = row_at(p_, head.kv_head, g.begin + lane);
        const bool finite = std::isfinite(r.sum[lane]);
        r.sum[lane] = FinishRow(head, row, r.max[lane], r.sum[lane]);
        if (!p_.bound) continue;
        const double bound = static_cast<double>(r.error[lane]) * r.sum[lane] * task_->outward;
        float& out = p_.bound.template as<float>()[p_.bound.offset(head.b, row.h, head.s.q_begin + row.i)];
        out = static_cast<float>(bound);
        if (out < bound) out = std::nextafter(out, kInfinity);
        if (!finite) out = std::numeric_limits<float>::quiet_NaN();
      }
      for (std::int64_t i = 0; i < dvp_; ++i) {
        for (int lane = 0; lane < g.vectors * kLanes; lane += kLanes) {
          float* o = r.o + i * kGroup + lane;
          hn::StoreU(hn::Mul(hn::LoadU(d, o), hn::LoadU(d, r.sum + lane)), d, o);
        }
      }
      ScatterRows(p_, p_.o, p_.Dv, dvp_, head.b, head.s, head.kv_head, g, r.o, kGroup, line_);
    }
  }

  const AdaptiveProblem& p_;
  const AdaptiveTask* task_ = nullptr;
  const std::int64_t dp_, dvp_;
  std::int64_t groups_;
  std::size_t bytes_ = 0;
  KeyRange tile_;            // whose keys are packed
  std::int64_t packed_ = 0;  // its rows, padded
  bool has_values_ = false;  // whether its values are, too
  bool v_non_finite_ = false;
  GroupRows* rows_ = nullptr;
  BlockSums* blocks_ = nullptr;
  Word *q_ = nullptr, *k_ = nullptr, *v_ = nullptr, *weights_ = nullptr;
  float *line_ = nullptr, *sinks_ = nullptr, *scores_ = nullptr, *running_ = nullptr;
};

template <class F>
auto WithAdaptiveForwardTile(const AdaptiveProblem& p, std::int64_t rows, std::byte* memory, const F& f) {
  return WithUnit(p.dtype == DType::bf16, [&]<Unit U>() {
    AdaptiveForwardTile<U> tile(p, rows, memory);
    return f(tile);
  });
}

inline std::size_t AdaptiveScratch(const AdaptiveProblem& p, std::int64_t rows) {
  return WithAdaptiveForwardTile(p, rows, nullptr, [](auto& tile) { return tile.bytes(); });
}
inline void AdaptiveForward(const AdaptiveProblem& p, const AdaptiveTask& task, std::byte* memory) {
  WithAdaptiveForwardTile(p, task.row_end - task.row_begin, memory, [&](auto& tile) { tile.run(task); });
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
