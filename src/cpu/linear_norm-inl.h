// Norms of rows in front of a linear layer, in f64: in f32 a large mean would cancel, and a row that is then rounded to
// 8 bits must round alike on every target.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/dtypes.h"
#include "cpu/linear_kernels.h"
#include "cpu/simd-inl.h"
#include "problem/linear.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

using DD = hn::ScalableTag<double>;
using VD = hn::Vec<DD>;
constexpr int kWideLanes = HWY_LANES(double);

HWY_INLINE VD LoadWide(const float* from) { return hn::PromoteTo(DD(), hn::LoadU(hn::Rebind<float, DD>(), from)); }
HWY_INLINE void StoreNarrow(VD x, float* to) {
  const hn::Rebind<float, DD> d;
  hn::StoreU(hn::DemoteTo(d, x), d, to);
}

// Rows are widened to f32 so many elements at a time.
constexpr std::int64_t kNormBlock = 256;

// run(values, k, count) for the blocks of a row of K elements.
template <class Run>
HWY_INLINE void ForEachBlock(const std::byte* row, DType dtype, std::int64_t K, const Run& run) {
  alignas(64) float values[kNormBlock];
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  for (std::int64_t k = 0; k < K; k += kNormBlock) {
    const std::int64_t count = std::min(kNormBlock, K - k);
    LoadRow(row + k * size, dtype, 1, count, count, values);
    run(values, k, count);
  }
}

// The sum over a row of vector(x, k), or scalar(x, k) for the elements that fill no vector.
template <class Vector, class Scalar>
HWY_INLINE double SumOfRow(const std::byte* row, DType dtype, std::int64_t K, const Vector& vector,
                           const Scalar& scalar) {
  const DD d;
  VD sums = hn::Zero(d);
  double rest = 0;
  ForEachBlock(row, dtype, K, [&](const float* values, std::int64_t k, std::int64_t count) HWY_ATTR {
    std::int64_t i = 0;
    for (; i + kWideLanes <= count; i += kWideLanes) sums = hn::Add(sums, vector(LoadWide(values + i), k + i));
    for (; i < count; ++i) rest += scalar(static_cast<double>(values[i]), k + i);
  });
  return hn::GetLane(hn::SumOfLanes(d, sums)) + rest;
}

// x^ = (x - mean) * inverse.
struct RowStatistics {
  double mean, inverse;
};

inline RowStatistics StatisticsOf(const NormParameters& norm, const std::byte* row, DType dtype, std::int64_t K) {
  const auto count = static_cast<double>(K);
  double mean = 0;
  if (norm.kind == Norm::layer_norm) {
    mean = SumOfRow(
               row, dtype, K, [](VD x, std::int64_t) HWY_ATTR { return x; }, [](double x, std::int64_t) { return x; }) /
           count;
  }
  const double squares = SumOfRow(
      row, dtype, K,
      [mean](VD x, std::int64_t) HWY_ATTR {
        const VD centred = hn::Sub(x, hn::Set(DD(), mean));
        return hn::Mul(centred, centred);
      },
      [mean](double x, std::int64_t) { return (x - mean) * (x - mean); });
  return {mean, 1 / std::sqrt(squares / count + norm.eps)};
}

// The norm of a row of x as `to_dtype`.
inline void NormRow(const NormParameters& norm, const std::byte* x, DType dtype, std::int64_t K, std::byte* to,
                    DType to_dtype) {
  const DD d;
  const RowStatistics row = StatisticsOf(norm, x, dtype, K);
  const VD mean = hn::Set(d, row.mean), inverse = hn::Set(d, row.inverse);
  const auto size = static_cast<std::int64_t>(size_of(to_dtype));
  ForEachBlock(x, dtype, K, [&](float* values, std::int64_t k, std::int64_t count) HWY_ATTR {
    std::int64_t i = 0;
    for (; i + kWideLanes <= count; i += kWideLanes) {
      VD y = hn::Mul(hn::Sub(LoadWide(values + i), mean), inverse);
      if (norm.weight != nullptr) y = hn::Mul(y, LoadWide(norm.weight + k + i));
      if (norm.bias != nullptr) y = hn::Add(y, LoadWide(norm.bias + k + i));
      StoreNarrow(y, values + i);
    }
    for (; i < count; ++i) {
      double y = (values[i] - row.mean) * row.inverse;
      if (norm.weight != nullptr) y *= norm.weight[k + i];
      if (norm.bias != nullptr) y += norm.bias[k + i];
      values[i] = static_cast<float>(y);
    }
    StoreRow(values, count, to + k * size, to_dtype, 1);
  });
}

// With h = d * weight and x^ the row without weight and bias: inverse * (h - mean(h) - x^ mean(h x^)), where rms_norm
// has no mean(h).
inline void NormGradient(const NormParameters& norm, const std::byte* x, DType dtype, std::int64_t K,
                         const float* normed, std::byte* to, double statistics[2]) {
  const DD d;
  const RowStatistics row = StatisticsOf(norm, x, dtype, K);
  statistics[0] = row.mean;
  statistics[1] = row.inverse;
  if (to == nullptr) return;
  const auto h = [&](std::int64_t k) HWY_ATTR {
    const VD value = LoadWide(normed + k);
    return norm.weight != nullptr ? hn::Mul(value, LoadWide(norm.weight + k)) : value;
  };
  const auto h_one = [&](std::int64_t k) -> double {
    return norm.weight != nullptr ? static_cast<double>(normed[k]) * norm.weight[k] : normed[k];
  };
  const VD mean = hn::Set(d, row.mean), inverse = hn::Set(d, row.inverse);
  const auto count = static_cast<double>(K);
  double h_mean = 0;
  if (norm.kind == Norm::layer_norm) {
    h_mean = SumOfRow(
                 x, dtype, K, [&](VD, std::int64_t k) HWY_ATTR { return h(k); },
                 [&](double, std::int64_t k) { return h_one(k); }) /
             count;
  }
  const double along =
      SumOfRow(
          x, dtype, K,
          [&](VD value, std::int64_t k) HWY_ATTR { return hn::Mul(h(k), hn::Mul(hn::Sub(value, mean), inverse)); },
          [&](double value, std::int64_t k) { return h_one(k) * ((value - row.mean) * row.inverse); }) /
      count;
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  ForEachBlock(x, dtype, K, [&](float* values, std::int64_t k, std::int64_t elements) HWY_ATTR {
    std::int64_t i = 0;
    for (; i + kWideLanes <= elements; i += kWideLanes) {
      const VD unit = hn::Mul(hn::Sub(LoadWide(values + i), mean), inverse);
      const VD rest = hn::NegMulAdd(unit, hn::Set(d, along), hn::Sub(h(k + i), hn::Set(d, h_mean)));
      StoreNarrow(hn::Mul(rest, inverse), values + i);
    }
    for (; i < elements; ++i) {
      const double unit = (values[i] - row.mean) * row.inverse;
      values[i] = static_cast<float>((h_one(k + i) - h_mean - unit * along) * row.inverse);
    }
    StoreRow(values, elements, to + k * size, dtype, 1);
  });
}

inline void NormParametersGradient(const LinearBackwardProblem& p, const LinearGradientRows& g,
                                   const double* statistics, std::int64_t begin, std::int64_t count,
                                   float* dnorm_weight, float* dnorm_bias) {
  const LinearProblem& f = p.forward;
  alignas(64) float x[kNormBlock];
  const auto size = static_cast<std::int64_t>(size_of(f.dtype));
  for (std::int64_t m = 0; m < g.m_count; ++m) {
    LoadRow(f.x.row(g.m_begin + m) + begin * size, f.dtype, 1, count, count, x);
    const float* d = g.normed + m * f.panels().layout.columns + begin;
    const double mean = statistics[2 * m], inverse = statistics[2 * m + 1];
    for (std::int64_t i = 0; dnorm_weight != nullptr && i < count; ++i) {
      dnorm_weight[begin + i] += d[i] * static_cast<float>((x[i] - mean) * inverse);
    }
    for (std::int64_t i = 0; dnorm_bias != nullptr && i < count; ++i) dnorm_bias[begin + i] += d[i];
  }
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
