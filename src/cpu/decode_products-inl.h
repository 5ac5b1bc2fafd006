// Products of few query rows with keys and values that are read where they lie, and their fetching into the cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/dtypes.h"
#include "cpu/plan.h"
#include "cpu/simd-inl.h"
#include "problem/attention.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// Fetches the next block of keys and values, all heads that are walked together, in the order of memory and spread
// evenly over the work on the block before: in bursts, memory and arithmetic would wait for each other.
class Fetcher {
 public:
  // Of `heads` heads from `head` on, over `steps` calls of some().
  Fetcher(const AttentionProblem& p, std::int64_t b, const Sequence& s, std::int64_t head, std::int64_t heads,
          KeyRange keys, std::int64_t steps)
      : p_(p), s_(s), b_(b), head_(head), next_(keys.begin), end_(keys.end), steps_(std::max<std::int64_t>(steps, 1)) {
    const auto bytes = heads * static_cast<std::int64_t>(size_of(p.k.dtype));
    k_bytes_ = p.D * bytes;
    v_bytes_ = p.Dv * bytes;
    lines_ = keys.size() * (ceil_div(k_bytes_, kLine) + ceil_div(v_bytes_, kLine));
  }

  HWY_INLINE void some() {
    for (due_ += lines_; due_ >= steps_; due_ -= steps_) line();
  }
  void all() {
    while (next_ < end_) line();
  }

 private:
  static constexpr std::int64_t kLine = 64;

  HWY_INLINE void line() {
    if (left_ <= 0) {
      if (next_ >= end_) return;
      at_ = p_.key_row(values_ ? p_.v : p_.k, b_, s_, next_, head_);
      left_ = values_ ? v_bytes_ : k_bytes_;
      next_ += values_ ? 1 : 0;
      values_ = !values_;
    }
    __builtin_prefetch(at_, 0, 2);
    at_ += kLine;
    left_ -= kLine;
  }

  const AttentionProblem& p_;
  const Sequence& s_;
  const std::int64_t b_, head_;
  std::int64_t next_, end_, steps_, k_bytes_ = 0, v_bytes_ = 0, lines_ = 0, due_ = 0, left_ = 0;
  bool values_ = false;
  const std::byte* at_ = nullptr;
};

// One vector of f32 from kLanes elements of a row.
template <DType kType>
HWY_INLINE VF LoadWide(const std::byte* row, std::int64_t i) {
  const DF d;
  if constexpr (kType == DType::f32) {
    return hn::LoadU(d, reinterpret_cast<const float*>(row) + i);
  } else if constexpr (kType == DType::bf16) {
    const hn::Rebind<std::uint16_t, DF> d16;
    const auto half = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(row) + i);
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(DU(), half)));
  } else if constexpr (kVectorF16) {
    const hn::Rebind<hwy::float16_t, DF> d16;
    return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(row) + i));
  } else {
    float wide[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) wide[lane] = load_element(row, DType::f16, i + lane);
    return hn::LoadU(d, wide);
  }
}

// Products of key rows with kRows query rows: scores[j][g] for keys [begin, end). key(j): where row j is; q: [kRows]
// [q_row] f32. The last, partial vector of a key row goes through `line`.
template <DType kType, int kRows, class Key>
void FewScores(std::int64_t width, std::int64_t begin, std::int64_t end, const Key& key, Fetcher& fetcher,
               const float* HWY_RESTRICT q, std::int64_t q_row, float* HWY_RESTRICT scores, float* HWY_RESTRICT line) {
  const DF d;
  const std::int64_t whole = width / kLanes * kLanes, rest = width - whole;
  constexpr std::int64_t kBytes = kType == DType::f32 ? 4 : 2;
  for (std::int64_t j = begin; j < end; ++j) {
    fetcher.some();
    const std::byte* k = key(j);
    VF sum[kRows];
    HWY_UNROLL(4)
    for (int g = 0; g < kRows; ++g) sum[g] = hn::Zero(d);
    for (std::int64_t i = 0; i < whole; i += kLanes) {
      const VF x = LoadWide<kType>(k, i);
      HWY_UNROLL(4)
      for (int g = 0; g < kRows; ++g) sum[g] = hn::MulAdd(x, hn::LoadU(d, q + g * q_row + i), sum[g]);
    }
    if (rest > 0) {
      LoadRow(k + whole * kBytes, kType, 1, rest, kLanes, line);
      const VF x = hn::LoadU(d, line);
      HWY_UNROLL(4)
      for (int g = 0; g < kRows; ++g) sum[g] = hn::MulAdd(x, hn::LoadU(d, q + g * q_row + whole), sum[g]);
    }
    HWY_UNROLL(4)
    for (int g = 0; g < kRows; ++g) scores[(j - begin) * kGroup + g] = hn::GetLane(hn::SumOfLanes(d, sum[g]));
  }
}

// o[g][i] = o[g][i] shrink[g] + sum_j weights[j][g] v[j][i] for kRows query rows and kVectors vectors from column i on.
// A key without weight is not read.
template <DType kType, int kRows, int kVectors, class Value>
HWY_INLINE void FewValues(std::int64_t begin, std::int64_t end, const Value& value, const float* HWY_RESTRICT weights,
                          const float* HWY_RESTRICT shrink, std::int64_t i, float* HWY_RESTRICT o, std::int64_t o_row) {
  const DF d;
  VF sum[kRows][kVectors];
  HWY_UNROLL(4)
  for (int g = 0; g < kRows; ++g) {
    HWY_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) sum[g][n] = hn::Zero(d);
  }
  for (std::int64_t j = begin; j < end; ++j) {
    const float* w = weights + (j - begin) * kGroup;
    bool any = false;
    for (int g = 0; g < kRows; ++g) any |= w[g] != 0.0f;
    if (!any) continue;
    const std::byte* v = value(j);
    VF x[kVectors];
    HWY_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) x[n] = LoadWide<kType>(v, i + n * kLanes);
    HWY_UNROLL(4)
    for (int g = 0; g < kRows; ++g) {
      const VF weight = hn::Set(d, w[g]);
      HWY_UNROLL(4)
      for (int n = 0; n < kVectors; ++n) sum[g][n] = hn::MulAdd(weight, x[n], sum[g][n]);
    }
  }
  HWY_UNROLL(4)
  for (int g = 0; g < kRows; ++g) {
    HWY_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) {
      float* to = o + g * o_row + i + n * kLanes;
      hn::StoreU(hn::MulAdd(hn::LoadU(d, to), hn::Set(d, shrink[g]), sum[g][n]), d, to);
    }
  }
}

template <DType kType, int kRows, class Value>
void FewValuesAll(std::int64_t width, std::int64_t begin, std::int64_t end, const Value& value,
                  const float* HWY_RESTRICT weights, const float* HWY_RESTRICT shrink, float* HWY_RESTRICT o,
                  std::int64_t o_row) {
  std::int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    FewValues<kType, kRows, 4>(begin, end, value, weights, shrink, i, o, o_row);
  }
  for (; i + kLanes <= width; i += kLanes) {
    FewValues<kType, kRows, 1>(begin, end, value, weights, shrink, i, o, o_row);
  }
  if (i == width) return;
  for (int g = 0; g < kRows; ++g) {
    for (std::int64_t c = i; c < width; ++c) o[g * o_row + c] *= shrink[g];
  }
  for (std::int64_t j = begin; j < end; ++j) {
    const float* w = weights + (j - begin) * kGroup;
    const std::byte* v = value(j);
    for (int g = 0; g < kRows; ++g) {
      if (w[g] == 0.0f) continue;
      for (std::int64_t c = i; c < width; ++c) o[g * o_row + c] += w[g] * load_element(v, kType, c);
    }
  }
}

// Calls f.template operator()<dtype, rows>(first row) for up to 4 query rows at a time.
template <class F>
void ForFewRows(DType dtype, std::int64_t rows, const F& f) {
  const auto with_rows = [&]<DType kType>() {
    for (std::int64_t g = 0; g < rows; g += 4) {
      switch (std::min<std::int64_t>(rows - g, 4)) {
        case 1:
          f.template operator()<kType, 1>(g);
          break;
        case 2:
          f.template operator()<kType, 2>(g);
          break;
        case 3:
          f.template operator()<kType, 3>(g);
          break;
        default:
          f.template operator()<kType, 4>(g);
      }
    }
  };
  if (dtype == DType::f32) return with_rows.template operator()<DType::f32>();
  if (dtype == DType::bf16) return with_rows.template operator()<DType::bf16>();
  with_rows.template operator()<DType::f16>();
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
