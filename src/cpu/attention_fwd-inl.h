// Forward: one tile of query rows against its keys, block by block, with the online softmax (Milakov and Gimelshein,
// arXiv 1805.02867; Dao et al., arXiv 2205.14135). Rows lie in vector lanes: O^T[d][lane], S^T[key][lane], maxima and
// sums are vectors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/decode-inl.h"
#include "cpu/keys-inl.h"
#include "cpu/plan.h"
#include "cpu/rows-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/scratch.h"
#include "cpu/softmax-inl.h"
#include "cpu/task_walk.h"
#include "cpu/unit-inl.h"
#include "cpu/widened_keys-inl.h"
#include "problem/attention.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// Running result of a group of rows: O^T [Dv padded][kGroup], then maxima and sums [kGroup].
struct Running {
  float *o, *max, *sum;
};

template <Unit U>
class ForwardTile {
  using Word = typename U::Word;

 public:
  ForwardTile(const AttentionProblem& p, std::int64_t rows, std::byte* memory)
      : p_(p),
        dp_(round_up(p.D, U::kPad)),
        dvp_(round_up(p.Dv, U::kPad)),
        groups_(ceil_div(std::min(rows, tile_rows(p)), kGroup)) {
    Scratch scratch(memory);
    line_ = scratch.take<float>(kLineRows<U> * std::max(dp_, dvp_));
    rows_ = scratch.take<GroupRows>(groups_);
    q_ = scratch.take<Word>(groups_ * Words<U>(dp_) * kGroup);
    k_ = scratch.take<Word>(kKeyBlock * Words<U>(dp_));
    v_ = scratch.take<Word>(U::PanelWords(dvp_, kKeyBlock));
    scores_ = scratch.take<float>(kKeyBlock * kGroup);
    if (U::kRounds) weights_ = scratch.take<Word>(Words<U>(kKeyBlock) * kGroup);
    if (p.has_planes() || p.dropout.p > 0) extra_ = scratch.take<float>(kKeyBlock * kGroup);
    running_ = scratch.take<float>(groups_ * running_floats());
    chunk_ = scratch.take<float>(groups_ * running_floats());
    bytes_ = scratch.used();
  }

  std::size_t bytes() const { return bytes_; }
  std::int64_t running_floats() const { return (dvp_ + 2) * kGroup; }
  std::int64_t partial_floats() const {
    return ceil_div(std::min(p_.Sq * p_.G, kSplitRows), kGroup) * running_floats();
  }

  void run(const ForwardTask& task) {
    const Sequence s = p_.sequence(task.b);
    const Head head{p_, task.b, task.kv_head, s};
    load_rows(head, task);
    if (task.partial != nullptr) {
      attend(head, task, {task.key_begin, task.key_end}, task.partial);
      return;
    }
    if (!splits_keys(p_, s)) {
      attend(head, task, {task.key_begin, task.key_end}, running_);
    } else {
      for (std::int64_t begin = 0; begin < s.sk; begin += kKeyChunk) {
        float* to = begin == 0 ? running_ : chunk_;
        attend(head, task, {begin, std::min(begin + kKeyChunk, s.sk)}, to);
        if (begin > 0) merge(chunk_);
      }
    }
    finish(head);
  }

  // task.partial: `count` results of run(), `stride` f32 apart, in the order of their keys.
  void merge_partials(const ForwardTask& task, std::int64_t count, std::int64_t stride) {
    const Sequence s = p_.sequence(task.b);
    const Head head{p_, task.b, task.kv_head, s};
    load_ranges(head, task);
    std::memcpy(running_, task.partial, static_cast<std::size_t>(groups_ * running_floats()) * 4);
    for (std::int64_t chunk = 1; chunk < count; ++chunk) merge(task.partial + chunk * stride);
    finish(head);
  }

 private:
  Running at(float* base, std::int64_t group) const {
    float* o = base + group * running_floats();
    return {o, o + dvp_ * kGroup, o + (dvp_ + 1) * kGroup};
  }

  void load_ranges(const Head& head, const ForwardTask& task) {
    groups_ = ceil_div(task.row_end - task.row_begin, kGroup);
    for (std::int64_t group = 0; group < groups_; ++group) {
      const std::int64_t begin = task.row_begin + group * kGroup;
      PrepareRows(p_, head.b, head.s, head.kv_head, begin, std::min<std::int64_t>(kGroup, task.row_end - begin),
                  rows_[group]);
    }
  }

  void load_rows(const Head& head, const ForwardTask& task) {
    load_ranges(head, task);
    for (std::int64_t group = 0; group < groups_; ++group) {
      const GroupRows& g = rows_[group];
      GatherRowsTransposed<U>(p_, p_.q, p_.D, dp_, head.b, head.s, head.kv_head, g,
                              static_cast<std::int64_t>(g.vectors) * kLanes, q_ + group * Words<U>(dp_) * kGroup,
                              kGroup, line_);
    }
  }

  // All groups against `keys`, from nothing, into `result`. Tiles start at multiples of kKeyBlock whatever a row needs,
  // so that its sums are always grouped alike.
  void attend(const Head& head, const ForwardTask& task, KeyRange keys, float* result) {
    const DF d;
    for (std::int64_t group = 0; group < groups_; ++group) {
      const Running r = at(result, group);
      const int lanes = rows_[group].vectors * kLanes;
      for (int lane = 0; lane < lanes; lane += kLanes) {
        hn::StoreU(hn::Set(d, -kInfinity), d, r.max + lane);
        hn::StoreU(hn::Zero(d), d, r.sum + lane);
      }
      for (std::int64_t i = 0; i < dvp_; ++i) std::memset(r.o + i * kGroup, 0, static_cast<std::size_t>(lanes) * 4);
    }
    const TaskWalk walk(p_, head.s, {task.row_begin, task.row_end}, keys, kKeyBlock, task.tiles);
    for (std::int64_t n = 0; n < walk.count(); ++n) {
      const KeyRange tile = walk.tile(n);
      pack(head, tile);
      const std::int64_t calls = groups_ * (kKeyBlock + dvp_) / U::kTileM;
      Prefetcher prefetcher(p_, head.b, head.s, head.kv_head, walk.next(n), calls);
      for (std::int64_t group = 0; group < groups_; ++group) {
        step(head, rows_[group], group, tile, at(result, group), prefetcher);
      }
    }
  }

  void pack(const Head& head, KeyRange tile) {
    packed_ = round_up(tile.size(), U::kPad);
    tile_ = tile;
    PackRows<U>(p_, p_.k, p_.D, dp_, head.b, head.s, head.kv_head, tile.begin, tile.size(), packed_, k_);
    pack_values(head);
  }

  void pack_values(const Head& head) {
    v_non_finite_ = PackPanels<U>(p_, p_.v, p_.Dv, dvp_, head.b, head.s, head.kv_head, tile_.begin, tile_.size(),
                                  packed_, v_, line_);
  }

  void step(const Head& head, const GroupRows& g, std::int64_t group, KeyRange tile, const Running& r,
            Prefetcher& prefetcher) {
    const TilePart<U> part(g, tile);
    if (part.empty()) return;
    switch (g.vectors) {
      case 1:
        return step_n<1>(head, g, group, part, r, prefetcher);
      case 2:
        return step_n<2>(head, g, group, part, r, prefetcher);
      default:
        return step_n<3>(head, g, group, part, r, prefetcher);
    }
  }

  template <int N>
  void step_n(const Head& head, const GroupRows& g, std::int64_t group, const TilePart<U>& part, const Running& r,
              Prefetcher& prefetcher) {
    const std::int64_t first = part.first, last = part.last, begin = part.tile + first;
    const bool plain = part.unmasked && !has_score_options(p_);
    const DF d;
    const std::int64_t depth = Words<U>(dp_);
    const Lanes<Word> q{q_ + group * depth * kGroup, kGroup};
    float* scores = scores_ + first * kGroup;
    VF top[N];
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) top[n] = hn::Set(d, -kInfinity);
    if (plain) {
      for (std::int64_t j = first; j < last; j += U::kTileM) {
        U::template Product<N, Sum::kStoreMax>(depth, {k_ + j * depth, depth, 1}, q, scores_ + j * kGroup, kGroup,
                                               nullptr, top);
        prefetcher.some();
      }
      const VF scale = hn::Set(d, p_.scale * kLog2e);
      HWY_UNROLL(kTileN)
      for (int n = 0; n < N; ++n) top[n] = hn::Mul(top[n], scale);
    } else {
      for (std::int64_t j = first; j < last; j += U::kTileM) {
        U::template Product<N, Sum::kStore>(depth, {k_ + j * depth, depth, 1}, q, scores_ + j * kGroup, kGroup);
      }
      FinishScores(head, g, begin, last - first, scores, kGroup, extra_, top);
    }
    VF alpha[N];
    UpdateMax<N>(r.max, to_log2(p_), top, alpha);
    Exponentiate<N>(p_, plain, scores, last - first, top, alpha, r.sum);
    ApplyDropout<N>(head, g, begin, last - first, scores, extra_);
    if (v_non_finite_) DropUnattended<U>(head, g, part.tile, packed_, dvp_, v_);
    const auto [from, to] = part.depth();
    const Lanes<Word> weights = U::PackLanes(scores_, kGroup, {from, to}, N, weights_);
    for (std::int64_t i = 0; i < dvp_; i += U::kTileM) {
      U::template Product<N, Sum::kScaleJoin>(to - from, U::Panel(v_, packed_, i, from), weights, r.o + i * kGroup,
                                              kGroup, alpha);
      prefetcher.some();
    }
    if (v_non_finite_) pack_values(head);
  }

  // running_ and a later partial result become one.
  void merge(float* part) {
    const DF d;
    for (std::int64_t group = 0; group < groups_; ++group) {
      const Running a = at(running_, group), b = at(part, group);
      for (int lane = 0; lane < rows_[group].vectors * kLanes; lane += kLanes) {
        VF aw, bw;
        MergeStatistics(to_log2(p_), a.max + lane, a.sum + lane, b.max + lane, b.sum + lane, aw, bw);
        for (std::int64_t i = 0; i < dvp_; ++i) {
          float* o = a.o + i * kGroup + lane;
          hn::StoreU(hn::MulAdd(hn::LoadU(d, o), aw, hn::Mul(hn::LoadU(d, b.o + i * kGroup + lane), bw)), d, o);
        }
      }
    }
  }

  // Sinks, normalisation, o and lse.
  void finish(const Head& head) {
    const DF d;
    for (std::int64_t group = 0; group < groups_; ++group) {
      const GroupRows& g = rows_[group];
      const Running r = at(running_, group);
      for (std::int64_t lane = 0; lane < g.count; ++lane) {
        r.sum[lane] = FinishRow(head, row_at(p_, head.kv_head, g.begin + lane), r.max[lane], r.sum[lane]);
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

  const AttentionProblem& p_;
  const std::int64_t dp_, dvp_;
  std::int64_t groups_;
  std::size_t bytes_ = 0;
  KeyRange tile_;            // that is packed
  std::int64_t packed_ = 0;  // its rows, padded
  bool v_non_finite_ = false;
  float* line_ = nullptr;
  GroupRows* rows_ = nullptr;
  Word *q_ = nullptr, *k_ = nullptr, *v_ = nullptr, *weights_ = nullptr;
  float *scores_ = nullptr, *extra_ = nullptr, *running_ = nullptr, *chunk_ = nullptr;
};

// Calls f(ForwardTile<U>) with the unit of the problem's dtype.
template <class F>
auto WithForwardTile(const AttentionProblem& p, std::int64_t rows, std::byte* memory, const F& f) {
  return WithUnit(p.dtype == DType::bf16 && !widened(p), [&]<Unit U>() {
    ForwardTile<U> tile(p, rows, memory);
    return f(tile);
  });
}

inline std::size_t ForwardScratch(const AttentionProblem& p, std::int64_t rows) {
  const std::size_t tile = WithForwardTile(p, rows, nullptr, [](auto& t) { return t.bytes(); });
  return std::max(tile, FewTile(p, nullptr).bytes());
}
inline void Forward(const AttentionProblem& p, const ForwardTask& task, std::byte* memory) {
  if (few_rows(p, p.sequence(task.b))) return FewTile(p, memory).run(task);
  WithForwardTile(p, task.row_end - task.row_begin, memory, [&](auto& tile) { tile.run(task); });
}
inline std::size_t PartialFloats(const AttentionProblem& p) {
  std::size_t floats = FewTile(p, nullptr).partial_floats();
  if (p.Sq * p.G > kFewRows || p.k.stride_d != 1 || p.v.stride_d != 1) {
    floats = std::max(floats, WithForwardTile(p, kSplitRows, nullptr,
                                              [](auto& t) { return static_cast<std::size_t>(t.partial_floats()); }));
  }
  return floats;
}
inline void Merge(const AttentionProblem& p, const ForwardTask& task, std::int64_t count, std::byte* memory) {
  const auto stride = static_cast<std::int64_t>(PartialFloats(p));
  if (few_rows(p, p.sequence(task.b))) return FewTile(p, memory).merge_partials(task, count, stride);
  WithForwardTile(p, task.row_end - task.row_begin, memory,
                  [&](auto& tile) { tile.merge_partials(task, count, stride); });
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
