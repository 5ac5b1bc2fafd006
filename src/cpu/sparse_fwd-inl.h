// Attention over lists of key blocks, forward. Rows of a chunk are gathered block by block: a block of keys is packed
// once for all rows whose lists name it, and these fill the vector lanes whatever the group size is. A row's blocks so
// come in ascending order, each an update of its running maximum, sum and O, which stay in memory row by row; what a
// row's neighbours list changes none of its bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/keys-inl.h"
#include "cpu/listed_rows.h"
#include "cpu/plan.h"
#include "cpu/rows-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/scratch.h"
#include "cpu/softmax-inl.h"
#include "cpu/unit-inl.h"
#include "cpu/widened_keys-inl.h"
#include "problem/sparse.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

template <Unit U>
class SparseForwardTile {
  using Word = typename U::Word;

 public:
  SparseForwardTile(const SparseProblem& p, std::int64_t positions, std::byte* memory)
      : p_(p),
        block_(p.lists.block_size),
        dp_(round_up(p.D, U::kPad)),
        dvp_(round_up(p.Dv, U::kPad)),
        width_(round_up(dvp_, kLanes)),
        scratch_(memory),
        listed_(p, p.lists, positions, scratch_) {
    const std::int64_t rows = positions * p.G;
    line_ = scratch_.take<float>(kLineRows<U> * std::max(dp_, width_));
    q_ = scratch_.take<Word>(Words<U>(dp_) * kGroup);
    k_ = scratch_.take<Word>(block_ * Words<U>(dp_));
    v_ = scratch_.take<Word>(U::PanelWords(dvp_, block_));
    scores_ = scratch_.take<float>(block_ * kGroup);
    if (U::kRounds) weights_ = scratch_.take<Word>(Words<U>(block_) * kGroup);
    new_o_ = scratch_.take<float>(dvp_ * kGroup);
    o_ = scratch_.take<float>(rows * width_);
    max_ = scratch_.take<float>(rows);
    sum_ = scratch_.take<float>(rows);
    rows_ = scratch_.take<GroupRows>(1);
    masks_ = scratch_.take<std::uint32_t>(listed_.mask_words(kGroup, kGroup));
  }
  std::size_t bytes() const { return scratch_.used(); }

  void run(const SparseTask& task) {
    const Sequence s = p_.sequence(task.b);
    const Head head{p_, task.b, task.kv_head, s};
    const std::int64_t rows = (task.row_end - task.row_begin) * p_.G;
    std::fill_n(o_, rows * width_, 0.0f);
    std::fill_n(max_, rows, -kInfinity);
    std::fill_n(sum_, rows, 0.0f);
    listed_.find(s, task);
    for (std::int64_t c = 0; c < listed_.blocks(); ++c) {
      const std::span<const std::int32_t> all = listed_.of(c);
      if (all.empty()) continue;
      pack(head, {c * block_, std::min((c + 1) * block_, s.sk)});
      for (std::size_t n = 0; n < all.size(); n += kGroup) {
        const std::span<const std::int32_t> rows = all.subspan(n, std::min<std::size_t>(kGroup, all.size() - n));
        const bool masked = listed_.load_masks(c, static_cast<std::int64_t>(n), static_cast<std::int64_t>(rows.size()),
                                               task.row_begin * p_.G, kGroup, masks_);
        attend(head, task, rows, masked ? masks_ : nullptr);
      }
    }
    finish(head, task);
  }

 private:
  void pack(const Head& head, KeyRange keys) {
    keys_ = keys;
    packed_ = round_up(keys.size(), U::kPad);
    PackRows<U>(p_, p_.k, p_.D, dp_, head.b, head.s, head.kv_head, keys.begin, keys.size(), packed_, k_);
    pack_values(head);
  }
  void pack_values(const Head& head) {
    v_non_finite_ = PackPanels<U>(p_, p_.v, p_.Dv, dvp_, head.b, head.s, head.kv_head, keys_.begin, keys_.size(),
                                  packed_, v_, line_);
  }

  void attend(const Head& head, const SparseTask& task, std::span<const std::int32_t> rows,
              const std::uint32_t* masks) {
    GroupRows& g = *rows_;
    PrepareRows(p_, head.b, head.s, head.kv_head, task.row_begin * p_.G, static_cast<std::int64_t>(rows.size()), g,
                rows.data(), keys_, masks);
    GatherRowsTransposed<U>(p_, p_.q, p_.D, dp_, head.b, head.s, head.kv_head, g,
                            static_cast<std::int64_t>(g.vectors) * kLanes, q_, kGroup, line_);
    switch (rows_->vectors) {
      case 1:
        return attend_n<1>(head, rows);
      case 2:
        return attend_n<2>(head, rows);
      default:
        return attend_n<3>(head, rows);
    }
  }

  template <int N>
  void attend_n(const Head& head, std::span<const std::int32_t> rows) {
    const DF d;
    const GroupRows& g = *rows_;
    const std::int64_t depth = Words<U>(dp_);
    const Lanes<Word> q{q_, kGroup};
    for (std::int64_t j = 0; j < packed_; j += U::kTileM) {
      U::template Product<N, Sum::kStore>(depth, {k_ + j * depth, depth, 1}, q, scores_ + j * kGroup, kGroup);
    }
    VF top[N], alpha[N];
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) top[n] = hn::Set(d, -kInfinity);
    FinishScores(head, g, keys_.begin, packed_, scores_, kGroup, nullptr, top);
    alignas(64) float max[kGroup] = {}, sum[kGroup] = {}, shrink[kGroup];
    for (std::int64_t lane = 0; lane < N * kLanes; ++lane) {
      const std::int32_t row = rows[std::min<std::size_t>(lane, rows.size() - 1)];
      max[lane] = max_[row];
      sum[lane] = sum_[row];
    }
    UpdateMax<N>(max, to_log2(p_), top, alpha);
    Exponentiate<N>(p_, false, scores_, packed_, top, alpha, sum);
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) hn::StoreU(alpha[n], d, shrink + n * kLanes);
    for (std::size_t lane = 0; lane < rows.size(); ++lane) {
      max_[rows[lane]] = max[lane];
      sum_[rows[lane]] = sum[lane];
    }
    if (v_non_finite_) DropUnattended<U>(head, g, keys_.begin, packed_, dvp_, v_);
    const Interval<std::int64_t> words = DepthWords<U>({0, packed_});
    const Lanes<Word> weights = U::PackLanes(scores_, kGroup, words, N, weights_);
    for (std::int64_t i = 0; i < dvp_; i += U::kTileM) {
      U::template Product<N, Sum::kStore>(words.size(), U::Panel(v_, packed_, i, 0), weights, new_o_ + i * kGroup,
                                          kGroup);
    }
    if (v_non_finite_) pack_values(head);
    add(rows, shrink);
  }

  // o = o * shrink + new_o, rows of the one being columns of the other.
  void add(std::span<const std::int32_t> rows, const float* shrink) {
    const DF d;
    for (std::size_t lane = 0; lane < rows.size(); lane += 4) {
      for (std::int64_t i = 0; i < dvp_; i += 4) Transpose4x4(new_o_ + i * kGroup + lane, kGroup, line_ + i, width_);
      for (std::size_t k = lane; k < std::min(lane + 4, rows.size()); ++k) {
        float* HWY_RESTRICT o = o_ + rows[k] * width_;
        const float* HWY_RESTRICT from = line_ + static_cast<std::int64_t>(k - lane) * width_;
        const VF factor = hn::Set(d, shrink[k]);
        for (std::int64_t i = 0; i < width_; i += kLanes) {
          hn::StoreU(hn::MulAdd(hn::LoadU(d, o + i), factor, hn::LoadU(d, from + i)), d, o + i);
        }
      }
    }
  }

  void finish(const Head& head, const SparseTask& task) {
    const DF d;
    for (std::int64_t n = 0; n < (task.row_end - task.row_begin) * p_.G; ++n) {
      const Row row = row_at(p_, head.kv_head, task.row_begin * p_.G + n);
      float* o = o_ + n * width_;
      const VF factor = hn::Set(d, FinishRow(head, row, max_[n], sum_[n]));
      for (std::int64_t i = 0; i < width_; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, o + i), factor), d, o + i);
      StoreRow(o, p_.Dv, p_.o.at(head.b, head.s.q_begin + row.i, row.h), p_.o.dtype, p_.o.stride_d);
    }
  }

  const SparseProblem& p_;
  const std::int64_t block_, dp_, dvp_;
  const std::int64_t width_;  // of a row of O in memory
  Scratch scratch_;
  ListedRows listed_;
  KeyRange keys_;            // of the block that is packed
  std::int64_t packed_ = 0;  // its rows, padded
  bool v_non_finite_ = false;
  GroupRows* rows_ = nullptr;
  float *line_ = nullptr, *scores_ = nullptr, *new_o_ = nullptr, *o_ = nullptr, *max_ = nullptr, *sum_ = nullptr;
  Word *q_ = nullptr, *k_ = nullptr, *v_ = nullptr, *weights_ = nullptr;
  std::uint32_t* masks_ = nullptr;  // of the group
};

template <class F>
auto WithSparseForwardTile(const SparseProblem& p, std::int64_t positions, std::byte* memory, const F& f) {
  return WithUnit(p.dtype == DType::bf16 && !widened(p), [&]<Unit U>() {
    SparseForwardTile<U> tile(p, positions, memory);
    return f(tile);
  });
}

inline std::size_t SparseScratch(const SparseProblem& p, std::int64_t positions) {
  return WithSparseForwardTile(p, positions, nullptr, [](auto& tile) { return tile.bytes(); });
}
inline void SparseForward(const SparseProblem& p, const SparseTask& task, std::byte* memory) {
  WithSparseForwardTile(p, task.row_end - task.row_begin, memory, [&](auto& tile) { tile.run(task); });
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
