// Few query rows (decode): bound by reading K and V once, so both are read where they lie, with head dimensions in
// lanes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/decode_products-inl.h"
#include "cpu/plan.h"
#include "cpu/rows-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/scratch.h"
#include "cpu/softmax-inl.h"
#include "cpu/task_walk.h"
#include "cpu/widened_keys-inl.h"
#include "problem/attention.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

constexpr std::int64_t kFewRows = HWY_MIN(8, kLanes);  // query rows of one kv head up to which a key row is not packed
constexpr std::int64_t kManyHeads = 16;                // most heads that one task walks together
constexpr std::int64_t kFewBlock = 32;  // keys between two rescalings: 32 rows of 4 KB, K and V, stay in a core's cache

// Whether a kv head with that many query rows takes this path; a matter of the problem alone.
inline bool few_rows(const AttentionProblem& p, const Sequence& s) {
  return s.sq * p.G <= kFewRows && p.k.stride_d == 1 && p.v.stride_d == 1;
}

inline std::int64_t KeyTile(const AttentionProblem& p, const Sequence& s) {
  return few_rows(p, s) ? kFewBlock : kKeyBlock;
}

// Heads side by side in memory are read together up to kSpanBytes of a key's row.
inline std::int64_t HeadsTogether(const AttentionProblem& p, const Sequence& s) {
  constexpr std::int64_t kSpanBytes = 8192;
  const bool side_by_side = p.k.stride_h == p.D && p.v.stride_h == p.Dv;
  if (!few_rows(p, s) || !side_by_side || p.int4) return 1;
  return std::clamp<std::int64_t>(kSpanBytes / (p.D * static_cast<std::int64_t>(size_of(p.k.dtype))), 1,
                                  std::min(p.Hkv, kManyHeads));
}

// Few query rows of each of task.kv_heads heads against their keys. Heads that lie side by side are walked together,
// block by block, so that memory is read in long pieces.
class FewTile {
 public:
  FewTile(const AttentionProblem& p, std::byte* memory)
      : p_(p), width_(round_up(std::max(p.D, p.Dv), kLanes)), heads_(std::min(p.Hkv, kManyHeads)) {
    Scratch scratch(memory);
    line_ = scratch.take<float>(width_);
    scores_ = scratch.take<float>(kFewBlock * kGroup);
    if (p.has_planes() || p.dropout.p > 0) extra_ = scratch.take<float>(kFewBlock * kGroup);
    rows_ = scratch.take<GroupRows>(heads_);
    if (widened(p)) wide_ = scratch.take<float>(kFewBlock * width_);
    q_ = scratch.take<float>(heads_ * kFewRows * width_);
    running_ = scratch.take<float>(heads_ * static_cast<std::int64_t>(partial_floats()));
    chunk_ = scratch.take<float>(heads_ * static_cast<std::int64_t>(partial_floats()));
    bytes_ = scratch.used();
  }
  std::size_t bytes() const { return bytes_; }
  // o [kFewRows][width], then a vector of maxima and one of sums.
  std::size_t partial_floats() const { return static_cast<std::size_t>(kFewRows * width_ + 2 * kLanes); }

  void run(const ForwardTask& task) {
    const Sequence s = p_.sequence(task.b);
    load(task, s);
    for (std::int64_t begin = task.key_begin; begin == task.key_begin || begin < task.key_end; begin += kKeyChunk) {
      // Sequences of one chunk are not cut, so that a chunk's end never lies past the keys.
      const std::int64_t end = splits_keys(p_, s) ? std::min(begin + kKeyChunk, task.key_end) : task.key_end;
      float* to = begin == task.key_begin && task.partial == nullptr ? running_ : chunk_;
      attend(task, s, {begin, end}, to);
      if (task.partial == nullptr && to == chunk_) {
        for (std::int64_t h = 0; h < task.kv_heads; ++h) merge(h, chunk_ + h * step());
      }
      if (end == task.key_end) break;
    }
    for (std::int64_t h = 0; h < task.kv_heads; ++h) {
      if (task.partial != nullptr) {
        std::memcpy(task.partial + h * task.partial_head_stride, chunk_ + h * step(), partial_floats() * 4);
      } else {
        finish({p_, task.b, task.kv_head + h, s}, h);
      }
    }
  }

  // task.partial: `count` results of run() for one head, `stride` f32 apart, in the order of their keys.
  void merge_partials(const ForwardTask& task, std::int64_t count, std::int64_t stride) {
    const Sequence s = p_.sequence(task.b);
    PrepareRows(p_, task.b, s, task.kv_head, 0, s.sq * p_.G, rows_[0]);
    std::memcpy(running_, task.partial, partial_floats() * 4);
    for (std::int64_t chunk = 1; chunk < count; ++chunk) merge(0, task.partial + chunk * stride);
    finish({p_, task.b, task.kv_head, s}, 0);
  }

 private:
  std::int64_t step() const { return static_cast<std::int64_t>(partial_floats()); }
  static float* max_of(float* part, std::int64_t width) { return part + kFewRows * width; }

  void load(const ForwardTask& task, const Sequence& s) {
    for (std::int64_t h = 0; h < task.kv_heads; ++h) {
      PrepareRows(p_, task.b, s, task.kv_head + h, 0, s.sq * p_.G, rows_[h]);
      for (std::int64_t lane = 0; lane < rows_[h].count; ++lane) {
        const Row row = row_at(p_, task.kv_head + h, lane);
        LoadRow(p_.q.at(task.b, s.q_begin + row.i, row.h), p_.q.dtype, p_.q.stride_d, p_.D, width_,
                q_ + (h * kFewRows + lane) * width_);
      }
    }
  }

  void attend(const ForwardTask& task, const Sequence& s, KeyRange keys, float* result) {
    const DF d;
    for (std::int64_t h = 0; h < task.kv_heads; ++h) {
      float* part = result + h * step();
      std::memset(part, 0, partial_floats() * 4);
      hn::StoreU(hn::Set(d, -kInfinity), d, max_of(part, width_));
    }
    const std::int64_t rows = s.sq * p_.G, passes = ceil_div(rows, 4);
    const TaskWalk walk(p_, s, {0, rows}, keys, kFewBlock, task.tiles);
    const auto fetcher_of = [&](KeyRange tile, std::int64_t steps) {
      return Fetcher(p_, task.b, s, task.kv_head, task.kv_heads, p_.int4 ? KeyRange{} : tile, steps);
    };
    if (walk.count() > 0) fetcher_of(walk.tile(0), 1).all();
    for (std::int64_t n = 0; n < walk.count(); ++n) {
      Fetcher fetcher = fetcher_of(walk.next(n), task.kv_heads * passes * kFewBlock);
      for (std::int64_t h = 0; h < task.kv_heads; ++h) {
        const KeyRange met = walk.tile(n).common(rows_[h].keys);
        attend_block({p_, task.b, task.kv_head + h, s}, h, met.begin, met.end, fetcher, result + h * step());
      }
    }
  }

  void attend_block(const Head& head, std::int64_t h, std::int64_t from, std::int64_t to, Fetcher& fetcher,
                    float* part) {
    if (from >= to) return;
    const DF d;
    const GroupRows& g = rows_[h];
    const float* q = q_ + h * kFewRows * width_;
    for (std::int64_t j = 0; j < to - from; ++j) hn::StoreU(hn::Zero(d), d, scores_ + j * kGroup);
    if (widened(p_)) {
      for (std::int64_t j = from; j < to; ++j) fetcher.some();
      KeyWidener(p_, head.b, head.s, head.kv_head).load(false, from, to - from, width_, wide_);
    }
    for_few_rows(head, p_.k, g.count, from, [&]<DType kType, int kRows>(std::int64_t row, const auto& key) {
      FewScores<kType, kRows>(p_.D, from, to, key, fetcher, q + row * width_, width_, scores_ + row, line_);
    });
    VF top[1] = {hn::Set(d, -kInfinity)}, alpha[1];
    FinishScores(head, g, from, to - from, scores_, kGroup, extra_, top);
    UpdateMax<1>(max_of(part, width_), to_log2(p_), top, alpha);
    Exponentiate<1>(p_, false, scores_, to - from, top, alpha, max_of(part, width_) + kLanes);
    ApplyDropout<1>(head, g, from, to - from, scores_, extra_);
    alignas(64) float shrink[kLanes];
    hn::StoreU(alpha[0], d, shrink);
    if (widened(p_)) KeyWidener(p_, head.b, head.s, head.kv_head).load(true, from, to - from, width_, wide_);
    for_few_rows(head, p_.v, g.count, from, [&]<DType kType, int kRows>(std::int64_t row, const auto& value) {
      FewValuesAll<kType, kRows>(p_.Dv, from, to, value, scores_ + row, shrink + row, part + row * width_, width_);
    });
  }

  // ForFewRows(), with what gives the address of row j of x: where it is stored, or, of rows from `from` on that were
  // widened, where it is now.
  template <class F>
  void for_few_rows(const Head& head, const Operand& x, std::int64_t rows, std::int64_t from, const F& f) const {
    ForFewRows(widened(p_) ? DType::f32 : p_.dtype, rows, [&]<DType kType, int kRows>(std::int64_t row) {
      if (kType == DType::f32 && widened(p_)) {
        f.template operator()<kType, kRows>(
            row, [&](std::int64_t j) { return reinterpret_cast<const std::byte*>(wide_ + (j - from) * width_); });
      } else {
        f.template operator()<kType, kRows>(
            row, [&](std::int64_t j) { return p_.key_row(x, head.b, head.s, j, head.kv_head); });
      }
    });
  }

  void scale_row(float* HWY_RESTRICT o, float factor) {
    const DF d;
    for (std::int64_t i = 0; i < width_; i += kLanes)
      hn::StoreU(hn::Mul(hn::LoadU(d, o + i), hn::Set(d, factor)), d, o + i);
  }

  // Head h's running result and a later partial one become one.
  void merge(std::int64_t h, float* part) {
    const DF d;
    float *a = running_ + h * step(), *a_max = max_of(a, width_), *b_max = max_of(part, width_);
    VF aw, bw;
    MergeStatistics(to_log2(p_), a_max, a_max + kLanes, b_max, b_max + kLanes, aw, bw);
    alignas(64) float a_weight[kLanes], b_weight[kLanes];
    hn::StoreU(aw, d, a_weight);
    hn::StoreU(bw, d, b_weight);
    for (std::int64_t lane = 0; lane < rows_[h].count; ++lane) {
      float* o = a + lane * width_;
      const VF wa = hn::Set(d, a_weight[lane]), wb = hn::Set(d, b_weight[lane]);
      for (std::int64_t i = 0; i < width_; i += kLanes) {
        hn::StoreU(hn::MulAdd(hn::LoadU(d, o + i), wa, hn::Mul(hn::LoadU(d, part + lane * width_ + i), wb)), d, o + i);
      }
    }
  }

  void finish(const Head& head, std::int64_t h) {
    float *part = running_ + h * step(), *max = max_of(part, width_);
    for (std::int64_t lane = 0; lane < rows_[h].count; ++lane) {
      const Row row = row_at(p_, head.kv_head, lane);
      scale_row(part + lane * width_, FinishRow(head, row, max[lane], max[kLanes + lane]));
      StoreRow(part + lane * width_, p_.Dv, p_.o.at(head.b, head.s.q_begin + row.i, row.h), p_.o.dtype, p_.o.stride_d);
    }
  }

  const AttentionProblem& p_;
  const std::int64_t width_, heads_;
  std::size_t bytes_ = 0;
  float *line_ = nullptr, *scores_ = nullptr, *extra_ = nullptr;
  float* wide_ = nullptr;  // a block's keys, then its values, if they have to be widened
  GroupRows* rows_ = nullptr;
  float *q_ = nullptr, *running_ = nullptr, *chunk_ = nullptr;
};

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
