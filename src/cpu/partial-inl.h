// Partial results joined, a row of a head at a time: head dimensions in lanes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/plan.h"
#include "cpu/simd-inl.h"
#include "problem/partial.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

constexpr std::int64_t kWidestRow = 256;  // head sizes are at most that

// What one row of one head takes from its partial results: exponentials relative to the largest logarithm.
class MergedRow {
 public:
  MergedRow(const MergeProblem& p, std::int64_t b, std::int64_t i, std::int64_t h)
      : p_(p), b_(b), i_(i), h_(h), max_(p.sink_of(h)) {
    bool undefined = std::isnan(max_);
    for (std::size_t n = 0; n < p.partials.size(); ++n) {
      const double lse = p.lse_of(n, b, h, i);
      undefined |= std::isnan(lse);
      max_ = std::max(max_, lse);
    }
    if (undefined) max_ = std::numeric_limits<double>::quiet_NaN();
  }

  // Neither keys nor a sink.
  bool empty() const { return max_ == -std::numeric_limits<double>::infinity(); }
  bool counts(std::size_t n) const { return p_.lse_of(n, b_, h_, i_) != -kInfinity; }
  double exponential(std::size_t n) const { return std::exp(p_.lse_of(n, b_, h_, i_) - max_); }
  double sink_exponential() const { return empty() ? 0 : std::exp(p_.sink_of(h_) - max_); }
  // Their sum, the sink last.
  double total() const {
    double total = 0;
    for (std::size_t n = 0; n < p_.partials.size(); ++n) {
      if (counts(n)) total += exponential(n);
    }
    return total + sink_exponential();
  }
  float lse(double total) const { return empty() ? -kInfinity : static_cast<float>(max_ + std::log(total)); }

  // A row of x [b, i, h, d] as f32, padded with zeros.
  void load(const Operand& x, float* HWY_RESTRICT to) const {
    LoadRow(x.at(b_, i_, h_), x.dtype, x.stride_d, p_.Dv, round_up(p_.Dv, kLanes), to);
  }
  void store(const Operand& x, const float* HWY_RESTRICT from) const {
    StoreRow(from, p_.Dv, x.at(b_, i_, h_), x.dtype, x.stride_d);
  }

 private:
  const MergeProblem& p_;
  const std::int64_t b_, i_, h_;
  double max_;
};

// Rows [begin, end) of all batches' rows, counted b * S + i.
inline void MergePartials(const MergeProblem& p, std::int64_t begin, std::int64_t end) {
  const DF d;
  alignas(64) float sum[kWidestRow], line[kWidestRow];
  const std::int64_t width = round_up(p.Dv, kLanes);
  for (std::int64_t at = begin; at < end; ++at) {
    const std::int64_t b = at / p.S, i = at % p.S;
    for (std::int64_t h = 0; h < p.H; ++h) {
      const MergedRow row(p, b, i, h);
      double total = 0;
      bool first = true;
      for (std::size_t n = 0; n < p.partials.size(); ++n) {
        if (!row.counts(n)) continue;
        const double exponential = row.exponential(n);
        total += exponential;
        row.load(operand_of(p.partials[n].o), line);
        const VF e = hn::Set(d, static_cast<float>(exponential));
        for (std::int64_t k = 0; k < width; k += kLanes) {
          const VF x = hn::LoadU(d, line + k);
          hn::StoreU(first ? hn::Mul(e, x) : hn::MulAdd(e, x, hn::LoadU(d, sum + k)), d, sum + k);
        }
        first = false;
      }
      total += row.sink_exponential();
      const VF share = hn::Set(d, static_cast<float>(1 / total));
      for (std::int64_t k = 0; k < width; k += kLanes) {
        hn::StoreU(first ? hn::Zero(d) : hn::Mul(hn::LoadU(d, sum + k), share), d, sum + k);
      }
      row.store(p.o, sum);
      if (p.lse) p.lse.as<float>()[p.lse.offset(b, h, i)] = row.lse(total);
    }
  }
}

// sum_d x_d y_d of two rows that are padded with zeros.
inline double DotRows(const float* HWY_RESTRICT x, const float* HWY_RESTRICT y, std::int64_t width) {
  const DF d;
  VF sum = hn::Zero(d);
  for (std::int64_t k = 0; k < width; k += kLanes) sum = hn::MulAdd(hn::LoadU(d, x + k), hn::LoadU(d, y + k), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// d_o . o of the merged o. d_o: the row's, padded; total: the row's; line: scratch.
inline double MergedDelta(const MergeBackwardProblem& p, const MergedRow& row, double total,
                          const float* HWY_RESTRICT d_o, float* HWY_RESTRICT line) {
  double delta = 0;
  for (std::size_t n = 0; n < p.partials.size(); ++n) {
    if (!row.counts(n)) continue;
    row.load(operand_of(p.partials[n].o), line);
    delta += row.exponential(n) / total * DotRows(d_o, line, round_up(p.Dv, kLanes));
  }
  return delta;
}

inline double MergedGradient(const MergeBackwardProblem& p, std::int64_t b, std::int64_t h, std::int64_t i) {
  return p.d_lse ? static_cast<double>(p.d_lse.as<const float>()[p.d_lse.offset(b, h, i)]) : 0.0;
}

inline void MergePartialsBackward(const MergeBackwardProblem& p, std::int64_t begin, std::int64_t end) {
  const DF d;
  alignas(64) float d_o[kWidestRow], line[kWidestRow];
  const std::int64_t width = round_up(p.Dv, kLanes);
  for (std::int64_t at = begin; at < end; ++at) {
    const std::int64_t b = at / p.S, i = at % p.S;
    for (std::int64_t h = 0; h < p.H; ++h) {
      const MergedRow row(p, b, i, h);
      row.load(p.d_o, d_o);
      const double total = row.total(), delta = MergedDelta(p, row, total, d_o, line);
      const double d_lse = MergedGradient(p, b, h, i);
      for (std::size_t n = 0; n < p.partials.size(); ++n) {
        const auto& [to, to_lse] = p.gradients[n];
        const bool counts = row.counts(n);
        const double weight = counts ? row.exponential(n) / total : 0;
        if (to_lse.given()) {
          double gradient = 0;
          if (counts) {
            row.load(operand_of(p.partials[n].o), line);
            gradient = weight * (DotRows(d_o, line, width) - delta + d_lse);
          }
          const Plane plane = MergeProblem::per_row(to_lse);
          plane.as<float>()[plane.offset(b, h, i)] = static_cast<float>(gradient);
        }
        if (!to.given()) continue;
        const VF share = hn::Set(d, static_cast<float>(weight));
        for (std::int64_t k = 0; k < width; k += kLanes) {
          hn::StoreU(counts ? hn::Mul(hn::LoadU(d, d_o + k), share) : hn::Zero(d), d, line + k);
        }
        row.store(operand_of(to), line);
      }
    }
  }
}

// dsink of head h, summed over the rows of one batch after the other.
inline void MergeSinkGradient(const MergeBackwardProblem& p, std::int64_t h) {
  alignas(64) float d_o[kWidestRow], line[kWidestRow];
  double sum = 0;
  for (std::int64_t b = 0; b < p.B; ++b) {
    for (std::int64_t i = 0; i < p.S; ++i) {
      const MergedRow row(p, b, i, h);
      if (row.empty()) continue;
      row.load(p.d_o, d_o);
      const double total = row.total();
      sum += row.sink_exponential() / total * (MergedGradient(p, b, h, i) - MergedDelta(p, row, total, d_o, line));
    }
  }
  p.dsink.as<float>()[p.dsink.offset(0, h, 0)] = static_cast<float>(sum);
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
