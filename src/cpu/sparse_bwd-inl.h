// Attention over lists of key blocks, backward: as the forward, rows are gathered block by block, and a block of keys
// meets all of a chunk's rows that list it at once. dK and dV of a block so need no inverse beyond the chunk, and dQ is
// added to row by row in memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "cpu/attention_bwd-inl.h"
#include "cpu/listed_rows.h"
#include "cpu/plan.h"
#include "cpu/rows-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/scratch.h"
#include "cpu/unit-inl.h"
#include "problem/sparse.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

template <Unit U>
class SparseBackwardTile {
 public:
  SparseBackwardTile(const SparseBackwardProblem& p, std::int64_t positions, std::byte* memory)
      : p_(p),
        block_(p.lists.block_size),
        dp_(round_up(p.D, U::kPad)),
        width_(round_up(dp_, kLanes)),
        tile_(p, kSpanRows, memory),
        scratch_(memory == nullptr ? nullptr : memory + tile_.bytes()),
        listed_(p, p.lists, positions, scratch_) {
    line_ = scratch_.take<float>(4 * width_);
    dq_ = scratch_.take<float>(positions * p.G * width_);
    masks_ = scratch_.take<std::uint32_t>(listed_.mask_words(kSpanRows, kGroup));
  }
  std::size_t bytes() const { return tile_.bytes() + scratch_.used(); }

  void run(const SparseTask& chunk, float* dk, float* dv) {
    const Sequence s = p_.sequence(chunk.b);
    const Head head{p_, chunk.b, chunk.kv_head, s};
    const std::int64_t begin = chunk.row_begin * p_.G, rows = (chunk.row_end - chunk.row_begin) * p_.G;
    std::fill_n(dq_, rows * width_, 0.0f);
    listed_.find(s, chunk);
    for (std::int64_t c = 0; c < listed_.blocks(); ++c) {
      const std::span<const std::int32_t> all = listed_.of(c);
      if (all.empty()) continue;
      const KeyRange keys{c * block_, std::min((c + 1) * block_, s.sk)};
      tile_.pack_block(head, keys);
      for (std::size_t n = 0; n < all.size(); n += kSpanRows) {
        const std::span<const std::int32_t> listed = all.subspan(n, std::min<std::size_t>(kSpanRows, all.size() - n));
        const bool masked = listed_.load_masks(c, static_cast<std::int64_t>(n),
                                               static_cast<std::int64_t>(listed.size()), begin, kGroup, masks_);
        const MaskedRows of{masked ? masks_ : nullptr, p_.lists.mask_words() * kGroup};
        tile_.add_block(head, begin, listed, of, keys, dk, dv,
                        [&](const GroupRows& g, const float* dq) { add(g, dq); });
      }
    }
    store(head, begin, rows);
  }

 private:
  void add(const GroupRows& g, const float* dq) {
    const DF d;
    for (std::int64_t lane = 0; lane < g.count; lane += 4) {
      for (std::int64_t i = 0; i < dp_; i += 4) Transpose4x4(dq + i * kGroup + lane, kGroup, line_ + i, width_);
      for (std::int64_t k = lane; k < std::min(lane + 4, g.count); ++k) {
        float* HWY_RESTRICT to = dq_ + g.listed[k] * width_;
        const float* HWY_RESTRICT from = line_ + (k - lane) * width_;
        for (std::int64_t i = 0; i < width_; i += kLanes) {
          hn::StoreU(hn::Add(hn::LoadU(d, to + i), hn::LoadU(d, from + i)), d, to + i);
        }
      }
    }
  }

  void store(const Head& head, std::int64_t begin, std::int64_t rows) {
    if (!p_.dq) return;
    const DF d;
    const VF scale = hn::Set(d, p_.scale);
    for (std::int64_t n = 0; n < rows; ++n) {
      float* dq = dq_ + n * width_;
      for (std::int64_t i = 0; i < width_; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, dq + i), scale), d, dq + i);
      const Row row = row_at(p_, head.kv_head, begin + n);
      PutRow(dq, p_.D, p_.dq.at(head.b, head.s.q_begin + row.i, row.h), p_.dq, p_.accumulate);
    }
  }

  const SparseBackwardProblem& p_;
  const std::int64_t block_, dp_;
  const std::int64_t width_;  // of a row of dQ in memory
  BackwardTile<U> tile_;
  Scratch scratch_;
  ListedRows listed_;
  float *line_ = nullptr, *dq_ = nullptr;
  std::uint32_t* masks_ = nullptr;  // of the rows that meet a block together
};

template <class F>
auto WithSparseBackwardTile(const SparseBackwardProblem& p, std::int64_t positions, std::byte* memory, const F& f) {
  return WithUnit(p.dtype == DType::bf16, [&]<Unit U>() {
    SparseBackwardTile<U> tile(p, positions, memory);
    return f(tile);
  });
}

inline std::size_t SparseBackwardScratch(const SparseBackwardProblem& p, std::int64_t positions) {
  return WithSparseBackwardTile(p, positions, nullptr, [](auto& tile) { return tile.bytes(); });
}
inline void SparseBackward(const SparseBackwardProblem& p, const SparseTask& chunk, float* dk, float* dv,
                           std::byte* memory) {
  WithSparseBackwardTile(p, chunk.row_end - chunk.row_begin, memory, [&](auto& tile) { tile.run(chunk, dk, dv); });
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
