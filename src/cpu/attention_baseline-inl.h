// The unfused method in three steps over the full score matrix: S = Q K^T, P = softmax(S), O = P V. It shares the fused
// kernel's matrix products, packing and exponentials and differs in what it stores: 4 bytes for every pair.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/keys-inl.h"
#include "cpu/plan.h"
#include "cpu/rows-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/scratch.h"
#include "cpu/softmax-inl.h"
#include "cpu/unit-inl.h"
#include "problem/attention.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

template <Unit U>
class BaselineTile {
  using Word = typename U::Word;

 public:
  BaselineTile(const AttentionProblem& p, std::byte* memory)
      : p_(p), dp_(round_up(p.D, U::kPad)), dvp_(round_up(p.Dv, U::kPad)), groups_(tile_rows(p) / kGroup) {
    Scratch scratch(memory);
    line_ = scratch.take<float>(kLineRows<U> * std::max(dp_, dvp_));
    q_ = scratch.take<Word>(groups_ * Words<U>(dp_) * kGroup);
    keys_ = scratch.take<Word>(kKeyBlock * Words<U>(dp_));
    panels_ = scratch.take<Word>(U::PanelWords(dvp_, kKeyBlock));
    tile_ = scratch.take<float>(kKeyBlock * kGroup);
    extra_ = scratch.take<float>(kKeyBlock * kGroup);
    if (U::kRounds) weights_ = scratch.take<Word>(Words<U>(kKeyBlock) * kGroup);
    o_ = scratch.take<float>(groups_ * dvp_ * kGroup);
    bytes_ = scratch.used();
  }
  std::size_t bytes() const { return bytes_; }

  void scores(const BaselineTask& task) {
    const Sequence s = p_.sequence(task.b);
    const Head head{p_, task.b, task.kv_head, s};
    const std::int64_t depth = Words<U>(dp_);
    for_groups(head, task, [&](const GroupRows& g, std::int64_t group) {
      GatherRowsTransposed<U>(p_, p_.q, p_.D, dp_, task.b, s, task.kv_head, g,
                              static_cast<std::int64_t>(g.vectors) * kLanes, q_ + group * depth * kGroup, kGroup,
                              line_);
    });
    for (std::int64_t block = 0; block < s.sk; block += kKeyBlock) {
      const std::int64_t count = std::min(kKeyBlock, s.sk - block);
      PackRows<U>(p_, p_.k, p_.D, dp_, task.b, s, task.kv_head, block, count, round_up(count, U::kPad), keys_);
      for_groups(head, task, [&](const GroupRows& g, std::int64_t group) {
        for (std::int64_t j = 0; j < count; j += U::kTileM) {
          const Broadcasts<Word> k{keys_ + j * depth, depth, 1};
          const Lanes<Word> q{q_ + group * depth * kGroup, kGroup};
          const bool direct = g.count == g.vectors * kLanes && j + U::kTileM <= count;
          float* to = direct ? at(head, task, g, block + j) : tile_;
          const std::int64_t ld = direct ? stride(head) : kGroup;
          if (g.vectors == 1) U::template Product<1, Sum::kStore>(depth, k, q, to, ld);
          if (g.vectors == 2) U::template Product<2, Sum::kStore>(depth, k, q, to, ld);
          if (g.vectors == 3) U::template Product<3, Sum::kStore>(depth, k, q, to, ld);
          if (!direct) put(head, task, g, block + j, std::min<std::int64_t>(U::kTileM, count - j));
        }
      });
    }
  }

  void softmax(const BaselineTask& task) {
    const Sequence s = p_.sequence(task.b);
    const Head head{p_, task.b, task.kv_head, s};
    for_groups(head, task, [&](const GroupRows& g, std::int64_t) { softmax_group(head, task, g); });
  }

  void output(const BaselineTask& task) {
    const Sequence s = p_.sequence(task.b);
    const Head head{p_, task.b, task.kv_head, s};
    std::memset(o_, 0, static_cast<std::size_t>(groups_ * dvp_ * kGroup) * 4);
    for (std::int64_t block = 0; block < s.sk; block += kKeyBlock) {
      const std::int64_t count = std::min(kKeyBlock, s.sk - block), padded = round_up(count, U::kPad);
      const auto pack = [&] {
        return PackPanels<U>(p_, p_.v, p_.Dv, dvp_, task.b, s, task.kv_head, block, count, padded, panels_, line_);
      };
      const bool non_finite = pack();
      for_groups(head, task, [&](const GroupRows& g, std::int64_t group) {
        if (non_finite) DropUnattended<U>(head, g, block, padded, dvp_, panels_);
        add_values(head, task, g, group, block, count, padded);
        if (non_finite) pack();
      });
    }
    for_groups(head, task, [&](const GroupRows& g, std::int64_t group) {
      ScatterRows(p_, p_.o, p_.Dv, dvp_, task.b, s, task.kv_head, g, o_ + group * dvp_ * kGroup, kGroup, line_);
    });
  }

 private:
  template <class F>
  void for_groups(const Head& head, const BaselineTask& task, const F& f) {
    for (std::int64_t begin = task.row_begin, group = 0; begin < task.row_end; begin += kGroup, ++group) {
      PrepareRows(p_, head.b, head.s, head.kv_head, begin, std::min<std::int64_t>(kGroup, task.row_end - begin), rows_);
      f(rows_, group);
    }
  }

  std::int64_t stride(const Head& head) const { return head.s.q_rows * p_.G; }
  float* at(const Head& head, const BaselineTask& task, const GroupRows& g, std::int64_t key) const {
    return task.scores + key * stride(head) + g.begin;
  }
  // Keys [key, key + count) between the score matrix and the tile, valid lanes only.
  void get(const Head& head, const BaselineTask& task, const GroupRows& g, std::int64_t key, std::int64_t count) {
    for (std::int64_t j = 0; j < count; ++j) {
      std::memcpy(tile_ + j * kGroup, at(head, task, g, key + j), static_cast<std::size_t>(g.count) * 4);
      std::memset(tile_ + j * kGroup + g.count, 0, static_cast<std::size_t>(kGroup - g.count) * 4);
    }
  }
  void put(const Head& head, const BaselineTask& task, const GroupRows& g, std::int64_t key, std::int64_t count) {
    for (std::int64_t j = 0; j < count; ++j) {
      std::memcpy(at(head, task, g, key + j), tile_ + j * kGroup, static_cast<std::size_t>(g.count) * 4);
    }
  }

  // Runs f(tile, ld, key, count) over all keys, in place where the group's lanes are whole vectors.
  template <class F>
  void for_blocks(const Head& head, const BaselineTask& task, const GroupRows& g, const F& f) {
    const bool direct = g.count == g.vectors * kLanes;
    for (std::int64_t key = 0; key < head.s.sk; key += kKeyBlock) {
      const std::int64_t count = std::min(kKeyBlock, head.s.sk - key);
      if (!direct) get(head, task, g, key, count);
      f(direct ? at(head, task, g, key) : tile_, direct ? stride(head) : std::int64_t{kGroup}, key, count);
      if (!direct) put(head, task, g, key, count);
    }
  }

  void softmax_group(const Head& head, const BaselineTask& task, const GroupRows& g) {
    const DF d;
    VF max[kTileN], sum[kTileN], factor[kTileN];
    for (int n = 0; n < kTileN; ++n) {
      max[n] = hn::Set(d, -kInfinity);
      sum[n] = hn::Zero(d);
    }
    for_blocks(head, task, g, [&](float* tile, std::int64_t ld, std::int64_t key, std::int64_t count) HWY_ATTR {
      FinishScores(head, g, key, count, tile, ld, extra_, max);
    });
    alignas(64) float top[kGroup], total[kGroup], scale[kGroup];
    for (int n = 0; n < kTileN; ++n) {
      hn::StoreU(max[n], d, top + n * kLanes);
      max[n] = hn::IfThenElse(hn::Eq(max[n], hn::Set(d, -kInfinity)), hn::Zero(d), max[n]);
    }
    const VF power = hn::Set(d, to_log2(p_));
    for_blocks(head, task, g, [&](float* tile, std::int64_t ld, std::int64_t, std::int64_t count) HWY_ATTR {
      VF block[kTileN] = {hn::Zero(d), hn::Zero(d), hn::Zero(d)};
      for (std::int64_t j = 0; j < count; ++j) {
        for (int n = 0; n < g.vectors; ++n) {
          const VF e = Exp2(hn::Mul(hn::Sub(hn::LoadU(d, tile + j * ld + n * kLanes), max[n]), power));
          block[n] = hn::Add(block[n], e);
          hn::StoreU(e, d, tile + j * ld + n * kLanes);
        }
      }
      for (int n = 0; n < g.vectors; ++n) sum[n] = hn::Add(sum[n], block[n]);
    });
    for (int n = 0; n < kTileN; ++n) hn::StoreU(sum[n], d, total + n * kLanes);
    for (std::int64_t lane = 0; lane < kGroup; ++lane) {
      scale[lane] = 0.0f;
      if (lane >= g.count) continue;
      scale[lane] = FinishRow(head, row_at(p_, head.kv_head, g.begin + lane), top[lane], total[lane]);
    }
    for (int n = 0; n < kTileN; ++n) factor[n] = hn::LoadU(d, scale + n * kLanes);
    for_blocks(head, task, g, [&](float* tile, std::int64_t ld, std::int64_t key, std::int64_t count) HWY_ATTR {
      if (p_.dropout.p > 0) DropoutFactors(head, g, key, count, extra_);
      for (std::int64_t j = 0; j < count; ++j) {
        for (int n = 0; n < g.vectors; ++n) {
          float* x = tile + j * ld + n * kLanes;
          VF value = hn::Mul(hn::LoadU(d, x), factor[n]);
          if (p_.dropout.p > 0) value = hn::Mul(value, hn::LoadU(d, extra_ + j * kGroup + n * kLanes));
          hn::StoreU(value, d, x);
        }
      }
    });
  }

  void add_values(const Head& head, const BaselineTask& task, const GroupRows& g, std::int64_t group,
                  std::int64_t block, std::int64_t count, std::int64_t padded) {
    const bool direct = !U::kRounds && g.count == g.vectors * kLanes;
    if (!direct) {
      get(head, task, g, block, count);
      std::memset(tile_ + count * kGroup, 0, static_cast<std::size_t>((padded - count) * kGroup) * 4);
    }
    const float* tile = direct ? at(head, task, g, block) : tile_;
    const Lanes<Word> weights =
        U::PackLanes(tile, direct ? stride(head) : kGroup, {0, Words<U>(padded)}, g.vectors, weights_);
    const std::int64_t depth = DepthWords<U>({0, count}).end;
    for (std::int64_t i = 0; i < dvp_; i += U::kTileM) {
      const Broadcasts<Word> v = U::Panel(panels_, padded, i, 0);
      float* o = o_ + (group * dvp_ + i) * kGroup;
      if (g.vectors == 1) U::template Product<1, Sum::kJoin>(depth, v, weights, o, kGroup);
      if (g.vectors == 2) U::template Product<2, Sum::kJoin>(depth, v, weights, o, kGroup);
      if (g.vectors == 3) U::template Product<3, Sum::kJoin>(depth, v, weights, o, kGroup);
    }
  }

  const AttentionProblem& p_;
  const std::int64_t dp_, dvp_, groups_;
  std::size_t bytes_ = 0;
  GroupRows rows_;
  float* line_ = nullptr;
  Word *q_ = nullptr, *keys_ = nullptr, *panels_ = nullptr, *weights_ = nullptr;
  float *tile_ = nullptr, *extra_ = nullptr, *o_ = nullptr;
};

template <class F>
auto WithBaselineTile(const AttentionProblem& p, std::byte* memory, const F& f) {
  return WithUnit(p.dtype == DType::bf16, [&]<Unit U>() {
    BaselineTile<U> tile(p, memory);
    return f(tile);
  });
}

inline std::size_t BaselineScratch(const AttentionProblem& p) {
  return WithBaselineTile(p, nullptr, [](auto& tile) { return tile.bytes(); });
}
inline void BaselineScores(const AttentionProblem& p, const BaselineTask& task, std::byte* memory) {
  WithBaselineTile(p, memory, [&](auto& tile) { tile.scores(task); });
}
inline void BaselineSoftmax(const AttentionProblem& p, const BaselineTask& task, std::byte* memory) {
  WithBaselineTile(p, memory, [&](auto& tile) { tile.softmax(task); });
}
inline void BaselineOutput(const AttentionProblem& p, const BaselineTask& task, std::byte* memory) {
  WithBaselineTile(p, memory, [&](auto& tile) { tile.output(task); });
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
