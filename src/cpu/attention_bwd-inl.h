// Backward, after Dao et al., arXiv 2205.14135, appendix B.4, with P recomputed from lse. One tile of query rows
// against its keys, block by block: S^T and dP^T with rows in lanes, as in the forward; then
//   dV[key, d] += P^T[key, row] dO[row, d]    dK[key, d] += dS^T[key, row] Q[row, d]    dQ^T[d, row] += K[key, d]
//   dS^T[key, row]
// where P^T and dS^T are the broadcast operand for dV and dK and the lane operand for dQ.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "cpu/attention_bwd_rows-inl.h"
#include "cpu/attention_bwd_scores-inl.h"
#include "cpu/keys-inl.h"
#include "cpu/plan.h"
#include "cpu/rows-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/scratch.h"
#include "cpu/task_walk.h"
#include "cpu/unit-inl.h"
#include "problem/attention.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// sums[key][d] += tile[key][row] rows[row][d], of keys [begin, end) of a tile with kSpanRows columns; whole vectors of
// d.
template <Unit U>
void AddToKeys(Interval<std::int64_t> keys, std::int64_t depth, const typename U::Word* tile,
               Lanes<typename U::Word> rows, float* sums) {
  using Word = typename U::Word;
  const std::int64_t words = Words<U>(depth), tile_row = Words<U>(kSpanRows), width = rows.row;
  // Vectors in equal shares: 4 as 2 + 2, since a tile of one vector would wait for its loads.
  const std::int64_t vectors = width / kLanes, share = ceil_div(vectors, ceil_div(vectors, kTileN));
  for (std::int64_t n = 0; n < vectors; n += share) {
    for (std::int64_t j = keys.begin; j < keys.end; j += U::kTileM) {
      const Broadcasts<Word> a{tile + j * tile_row, tile_row, 1};
      const Lanes<Word> b{rows.at + n * kLanes, width};
      float* c = sums + j * width + n * kLanes;
      switch (std::min(share, vectors - n)) {
        case 1:
          U::template Product<1, Sum::kJoin>(words, a, b, c, width);
          break;
        case 2:
          U::template Product<2, Sum::kJoin>(words, a, b, c, width);
          break;
        default:
          U::template Product<3, Sum::kJoin>(words, a, b, c, width);
      }
    }
  }
}

template <Unit U>
class BackwardTile {
  using Word = typename U::Word;

 public:
  // row_limit: most query rows loaded at a time.
  BackwardTile(const AttentionBackwardProblem& p, std::int64_t row_limit, std::byte* memory)
      : p_(p),
        w_(p),
        limit_(round_up(ceil_div(row_limit, kGroup), kSpan)),
        scratch_(memory),
        rows_(p, limit_, scratch_),
        scores_(p, scratch_) {
    dq_ = scratch_.take<float>(limit_ * kGroup * w_.dp);
    k_ = scratch_.take<Word>(kKeyBlock * Words<U>(w_.dp));
    v_ = scratch_.take<Word>(kKeyBlock * Words<U>(w_.dvp));
    k_panels_ = scratch_.take<Word>(U::PanelWords(w_.dp, kKeyBlock));
    if (natural_logits(p)) max_and_sum_ = scratch_.take<float>(2 * limit_ * kGroup);
    if (U::kRounds) {
      p_words_ = scratch_.take<Word>(kKeyBlock * Words<U>(kSpanRows));
      ds_words_ = scratch_.take<Word>(kKeyBlock * Words<U>(kSpanRows));
      ds_lanes_ = scratch_.take<Word>(Words<U>(kKeyBlock) * kGroup);
    }
  }
  std::size_t bytes() const { return scratch_.used(); }

  void run(const BackwardTask& task) {
    const Sequence s = p_.sequence(task.b);
    const Head head{p_, task.b, task.kv_head, s};
    std::memset(task.dk, 0, static_cast<std::size_t>(s.k_rows * w_.dl) * 4);
    std::memset(task.dv, 0, static_cast<std::size_t>(s.k_rows * w_.dvl) * 4);
    const std::int64_t all = s.sq * p_.G, tile = backward_rows(p_);
    for (std::int64_t begin = task.first_tile * tile; begin < all; begin += task.tile_step * tile) {
      const TaskWalk walk = load(head, {begin, std::min(begin + tile, all)}, task.tiles);
      std::memset(dq_, 0, static_cast<std::size_t>(rows_.groups() * kGroup * w_.dp) * 4);
      for (std::int64_t n = 0; n < walk.count(); ++n) {
        pack(head, walk.tile(n));
        const std::int64_t calls = rows_.groups() * (kKeyBlock + w_.dp) / U::kTileM;
        Prefetcher prefetcher(p_, head.b, head.s, head.kv_head, walk.next(n), calls);
        for (std::int64_t group = 0; group < rows_.groups(); group += kSpan) {
          add_gradients(head, group, walk.tile(n), task, prefetcher);
        }
      }
      store_dq(head);
    }
  }

  // A block of keys against rows begin + listed[0], begin + listed[1], ..., at most as many as the tile has room for:
  // dK and dV are added to these sums, and take(group, dQ^T) gets what the block adds to dQ / scale, [d][kGroup].
  void pack_block(const Head& head, KeyRange keys) { pack(head, keys); }
  template <class Take>
  void add_block(const Head& head, std::int64_t begin, std::span<const std::int32_t> listed, KeyRange keys, float* dk,
                 float* dv, const Take& take) {
    rows_.load(head, begin, listed, keys);
    std::memset(dq_, 0, static_cast<std::size_t>(rows_.groups() * kGroup * w_.dp) * 4);
    const BackwardTask sums{.dk = dk, .dv = dv, .tiles = {}};
    Prefetcher none(p_, head.b, head.s, head.kv_head, {}, 1);
    for (std::int64_t group = 0; group < rows_.groups(); group += kSpan) {
      add_gradients(head, group, keys, sums, none);
    }
    for (std::int64_t group = 0; group < rows_.groups(); ++group) {
      take(rows_.group(group), dq_ + group * w_.dp * kGroup);
    }
  }

  // Gradients of the logits of rows [row_begin, row_end) are added to sums[i - row_begin][j]; p.G must be 1.
  void add_bias_gradient(const Head& head, std::int64_t row_begin, std::int64_t row_end, float* sums,
                         std::int64_t sums_row) {
    const TaskWalk walk = load(head, {row_begin, row_end}, {});
    for (std::int64_t n = 0; n < walk.count(); ++n) {
      const KeyRange tile = walk.tile(n);
      pack(head, tile);
      for (std::int64_t group = 0; group < rows_.groups(); ++group) {
        const GroupRows& g = rows_.group(group);
        const TilePart<U> part(g, tile);
        if (part.empty()) continue;
        Prefetcher none(p_, head.b, head.s, head.kv_head, {}, 1);
        scores_.compute(head, rows_, group, 0, k_, v_, part, false, none);
        for (std::int64_t j = tile.begin + part.first; j < std::min(tile.begin + part.last, head.s.sk); ++j) {
          for (std::int64_t lane = 0; lane < g.count; ++lane) {
            sums[(g.begin - row_begin + lane) * sums_row + j] += scores_.ds()[(j - tile.begin) * kSpanRows + lane];
          }
        }
      }
    }
  }

 private:
  // Rows [begin, end) of the kv head, and the walk over their keys.
  TaskWalk load(const Head& head, Interval<std::int64_t> rows, const TileList& tiles) {
    const TaskWalk walk(p_, head.s, rows, {0, head.s.sk}, kKeyBlock, tiles);
    rows_.load(head, rows.begin, rows.end);
    bool absorbed = false;
    for (std::int64_t group = 0; group < rows_.groups(); ++group) absorbed |= rows_.absorbed(group);
    if (absorbed) find_denominators(head, walk);
    return walk;
  }

  // Where lse holds no denominator, it is found again from the scores.
  void find_denominators(const Head& head, const TaskWalk& walk) {
    const auto max = [&](std::int64_t group) { return max_and_sum_ + 2 * group * kGroup; };
    const auto sum = [&](std::int64_t group) { return max(group) + kGroup; };
    for (std::int64_t group = 0; group < rows_.groups(); ++group) {
      std::fill_n(max(group), kGroup, -kInfinity);
      std::fill_n(sum(group), kGroup, 0.0f);
    }
    for (std::int64_t n = 0; n < walk.count(); ++n) {
      const KeyRange tile = walk.tile(n);
      PackRows<U>(p_, p_.k, p_.D, w_.dp, head.b, head.s, head.kv_head, tile.begin, tile.size(),
                  round_up(tile.size(), U::kPad), k_);
      for (std::int64_t group = 0; group < rows_.groups(); ++group) {
        const TilePart<U> part(rows_.group(group), tile);
        if (!rows_.absorbed(group) || part.empty()) continue;
        scores_.join_statistics(head, rows_, group, k_, part, max(group), sum(group));
      }
    }
    for (std::int64_t group = 0; group < rows_.groups(); ++group) {
      for (std::int64_t lane = 0; lane < rows_.group(group).count; ++lane) {
        if (!rows_.absorbed(group, lane) || max(group)[lane] == -kInfinity) continue;
        float total = sum(group)[lane];
        if (p_.sink) {
          const std::int64_t h = row_at(p_, head.kv_head, rows_.group(group).begin + lane).h;
          total += std::exp(p_.sink.template as<const float>()[h * p_.sink.stride_h] - max(group)[lane]);
        }
        rows_.replace_lse(group, lane, max(group)[lane], total);
      }
    }
  }

  void pack(const Head& head, KeyRange tile) {
    packed_ = round_up(tile.size(), U::kPad);
    PackRows<U>(p_, p_.k, p_.D, w_.dp, head.b, head.s, head.kv_head, tile.begin, tile.size(), packed_, k_);
    PackRows<U>(p_, p_.v, p_.Dv, w_.dvp, head.b, head.s, head.kv_head, tile.begin, tile.size(), packed_, v_);
    k_non_finite_ = PanelsFromRows<U>(k_, w_.dp, packed_, k_panels_);
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
    for (std::int64_t k = 0; k < groups; ++k) {
      const TilePart<U> part(rows_.group(group0 + k), tile);
      const std::int64_t column = k * kGroup;
      if (part.empty()) {
        scores_.clear(first, last, column);
        continue;
      }
      scores_.clear(first, part.first, column);
      scores_.clear(part.last, last, column);
      scores_.compute(head, rows_, group0 + k, column, k_, v_, part, true, prefetcher);
    }
    const std::int64_t depth = groups * kGroup;
    const Interval<std::int64_t> keys{first, last};
    const Word* p = U::PackTile(scores_.p(), kSpanRows, keys, depth, p_words_);
    const Word* ds = U::PackTile(scores_.ds(), kSpanRows, keys, depth, ds_words_);
    AddToKeys<U>(keys, depth, p, {rows_.do_rows(group0), w_.dvl}, task.dv + tile.begin * w_.dvl);
    AddToKeys<U>(keys, depth, ds, {rows_.q_rows(group0), w_.dl}, task.dk + tile.begin * w_.dl);
    for (std::int64_t k = 0; k < groups; ++k) add_to_queries(head, group0 + k, k * kGroup, tile, prefetcher);
  }

  void add_to_queries(const Head& head, std::int64_t group, std::int64_t column, KeyRange tile,
                      Prefetcher& prefetcher) {
    const GroupRows& g = rows_.group(group);
    const TilePart<U> part(g, tile);
    if (part.empty()) return;
    const auto [from, to] = part.depth();
    const Lanes<Word> ds = U::PackLanes(scores_.ds() + column, kSpanRows, {from, to}, kTileN, ds_lanes_);
    if (k_non_finite_) DropUnattended<U>(head, g, tile.begin, packed_, w_.dp, k_panels_);
    for (std::int64_t i = 0; i < w_.dp; i += U::kTileM) {
      U::template Product<kTileN, Sum::kJoin>(to - from, U::Panel(k_panels_, packed_, i, from), ds,
                                              dq_ + (group * w_.dp + i) * kGroup, kGroup);
      prefetcher.some();
    }
    if (k_non_finite_) {
      PanelsFromRows<U>(k_, w_.dp, packed_, k_panels_);
    }
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

  const AttentionBackwardProblem& p_;
  const BackwardWidths<U> w_;
  const std::int64_t limit_;
  Scratch scratch_;
  BackwardRows<U> rows_;
  BackwardScores<U> scores_;
  std::int64_t packed_ = 0;  // rows of the packed block, padded
  bool k_non_finite_ = false;
  Word *k_ = nullptr, *v_ = nullptr, *k_panels_ = nullptr, *p_words_ = nullptr, *ds_words_ = nullptr,
       *ds_lanes_ = nullptr;
  float *dq_ = nullptr, *max_and_sum_ = nullptr;
};

template <class F>
auto WithBackwardTile(const AttentionBackwardProblem& p, std::int64_t row_limit, std::byte* memory, const F& f) {
  return WithUnit(p.dtype == DType::bf16, [&]<Unit U>() {
    BackwardTile<U> tile(p, row_limit, memory);
    return f(tile);
  });
}

inline std::size_t BackwardScratch(const AttentionBackwardProblem& p) {
  return WithBackwardTile(p, backward_rows(p), nullptr, [](auto& tile) { return tile.bytes(); });
}
inline void Backward(const AttentionBackwardProblem& p, const BackwardTask& task, std::byte* memory) {
  WithBackwardTile(p, backward_rows(p), memory, [&](auto& tile) { tile.run(task); });
}

inline void WriteGradient(const AttentionBackwardProblem& p, const Operand& to, std::int64_t width, float factor,
                          std::int64_t b, std::int64_t kv_head, float* sums, std::int64_t count, std::int64_t stride) {
  const DF d;
  const Sequence s = p.sequence(b);
  const std::int64_t padded = GradientWidth(width);
  for (std::int64_t j = 0; j < s.k_rows; ++j) {
    float* row = sums + j * padded;
    for (std::int64_t i = 0; i < padded; i += kLanes) {
      VF sum = hn::LoadU(d, row + i);
      for (std::int64_t n = 1; n < count; ++n) sum = hn::Add(sum, hn::LoadU(d, row + n * stride + i));
      hn::StoreU(hn::Mul(sum, hn::Set(d, factor)), d, row + i);
    }
    // Padding of the last block adds to rows beyond the used keys; what is there is no gradient.
    if (j >= s.sk) std::memset(row, 0, static_cast<std::size_t>(width) * 4);
    PutRow(row, width, to.at(b, s.k_begin + j, kv_head), to, p.accumulate);
  }
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
