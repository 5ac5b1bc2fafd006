// The encoder's row-wise steps.
#pragma once

#include <hwy/contrib/math/math-inl.h>

#include <cmath>
#include <cstdint>

#include "cpu/row_ops.h"
#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {
namespace model_rows {

using Wide = hn::ScalableTag<float>;
using One = hn::CappedTag<float, 1>;

// Calls step(d, i) over [0, count): whole vectors, then single elements.
template <class Step>
HWY_INLINE void for_lanes(std::int64_t count, const Step& step) {
  const Wide wide;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(wide));
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) step(wide, i);
  for (; i < count; ++i) step(One(), i);
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const std::uint16_t* from) {
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))));
}

template <class D>
HWY_INLINE void store(D d, hn::Vec<D> value, float* to) {
  hn::StoreU(value, d, to);
}

template <class D>
HWY_INLINE void store(D, hn::Vec<D> value, std::uint16_t* to) {
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::BitCast(d32, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fff)));
  // The rounding carry would turn some NaNs into zeros.
  const auto nan = hn::RebindMask(d32, hn::IsNaN(value));
  const auto result = hn::IfThenElse(nan, hn::Or(bits, hn::Set(d32, 0x400000)), rounded);
  hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(result)), d16, to);
}

// erf to 1.5 ulp. Below 1: x + x P(x^2); above: 1 - exp(-g(x)) with the polynomial g(x) = -ln erfc(x), whose error
// erfc(x) damps; from 4 on erf rounds to 1. Both are minimax fits (relative errors 1.2e-9 of erf, 2e-11 of erfc).
template <class D>
HWY_INLINE hn::Vec<D> error_function(D d, hn::Vec<D> x) {
  const auto a = hn::Min(hn::Abs(x), hn::Set(d, 4.0f));
  const auto t = hn::Mul(a, a);
  auto p = hn::Set(d, 7.853858e-05f);
  p = hn::MulAdd(p, t, hn::Set(d, -0.00080101925f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.0051883277f));
  p = hn::MulAdd(p, t, hn::Set(d, -0.026853811f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.112835854f));
  p = hn::MulAdd(p, t, hn::Set(d, -0.37612626f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.12837915f));
  const auto small = hn::MulAdd(a, p, a);

  auto g = hn::Set(d, 2.1686792e-05f);
  g = hn::MulAdd(g, a, hn::Set(d, -0.00044133564f));
  g = hn::MulAdd(g, a, hn::Set(d, 0.0042045577f));
  g = hn::MulAdd(g, a, hn::Set(d, -0.025208244f));
  g = hn::MulAdd(g, a, hn::Set(d, 0.108418554f));
  g = hn::MulAdd(g, a, hn::Set(d, 0.6332199f));
  g = hn::MulAdd(g, a, hn::Set(d, 1.1295785f));
  g = hn::MulAdd(g, a, hn::Set(d, -0.00018803752f));
  const auto large = hn::Sub(hn::Set(d, 1.0f), hn::Exp(d, hn::Neg(g)));
  const auto result = hn::IfThenElse(hn::Lt(a, hn::Set(d, 1.0f)), small, large);
  return hn::IfThenElse(hn::IsNaN(x), x, hn::CopySign(result, x));
}

template <class T>
void gelu_typed(const float* x, std::int64_t count, T* out) {
  for_lanes(count, [&](auto d, std::int64_t i) HWY_ATTR {
    const auto value = hn::LoadU(d, x + i);
    const auto erf = error_function(d, hn::Mul(value, hn::Set(d, 0.70710678f)));
    const auto half = hn::Mul(value, hn::Set(d, 0.5f));
    store(d, hn::MulAdd(half, erf, half), out + i);
  });
}

template <class T>
void layer_norm_typed(float* x, const T* residual, std::int64_t rows, const LayerNormRows& norm, T* out) {
  const Wide wide;
  const One one;
  const std::int64_t n = norm.columns;
  for (std::int64_t row = 0; row < rows; ++row, x += n, out += n) {
    auto sum = hn::Zero(wide);
    auto sum_rest = hn::Zero(one);
    const auto add = [](auto& total, auto value) HWY_ATTR { total = hn::Add(total, value); };
    for_lanes(n, [&](auto d, std::int64_t i) HWY_ATTR {
      auto value = hn::LoadU(d, x + i);
      if (residual != nullptr) {
        value = hn::Add(value, load(d, residual + i));
        hn::StoreU(value, d, x + i);
      }
      if constexpr (hn::MaxLanes(d) == 1) {
        add(sum_rest, value);
      } else {
        add(sum, value);
      }
    });
    const float mean = (hn::GetLane(hn::SumOfLanes(wide, sum)) + hn::GetLane(sum_rest)) / static_cast<float>(n);

    sum = hn::Zero(wide);
    sum_rest = hn::Zero(one);
    for_lanes(n, [&](auto d, std::int64_t i) HWY_ATTR {
      const auto centred = hn::Sub(hn::LoadU(d, x + i), hn::Set(d, mean));
      const auto square = hn::Mul(centred, centred);
      if constexpr (hn::MaxLanes(d) == 1) {
        add(sum_rest, square);
      } else {
        add(sum, square);
      }
    });
    const float variance = (hn::GetLane(hn::SumOfLanes(wide, sum)) + hn::GetLane(sum_rest)) / static_cast<float>(n);
    const float inverse = 1.0f / std::sqrt(variance + norm.epsilon);

    for_lanes(n, [&](auto d, std::int64_t i) HWY_ATTR {
      const auto centred = hn::Sub(hn::LoadU(d, x + i), hn::Set(d, mean));
      const auto scaled = hn::Mul(centred, hn::Set(d, inverse));
      store(d, hn::MulAdd(scaled, hn::LoadU(d, norm.gamma + i), hn::LoadU(d, norm.beta + i)), out + i);
    });
    if (residual != nullptr) residual += n;
  }
}

template <class T>
void add_three_typed(const T* a, const T* b, const T* c, std::int64_t count, float* out) {
  for_lanes(count, [&](auto d, std::int64_t i) HWY_ATTR {
    hn::StoreU(hn::Add(hn::Add(load(d, a + i), load(d, b + i)), load(d, c + i)), d, out + i);
  });
}

template <class T>
void accumulate_typed(const T* x, std::int64_t count, float* sum) {
  for_lanes(count, [&](auto d, std::int64_t i)
                       HWY_ATTR { hn::StoreU(hn::Add(hn::LoadU(d, sum + i), load(d, x + i)), d, sum + i); });
}

inline void gelu_f32(const float* x, std::int64_t count, float* out) { gelu_typed(x, count, out); }
inline void gelu_bf16(const float* x, std::int64_t count, std::uint16_t* out) { gelu_typed(x, count, out); }
inline void layer_norm_f32(float* x, const float* residual, std::int64_t rows, const LayerNormRows& norm, float* out) {
  layer_norm_typed(x, residual, rows, norm, out);
}
inline void layer_norm_bf16(float* x, const std::uint16_t* residual, std::int64_t rows, const LayerNormRows& norm,
                            std::uint16_t* out) {
  layer_norm_typed(x, residual, rows, norm, out);
}
inline void add_three_f32(const float* a, const float* b, const float* c, std::int64_t count, float* out) {
  add_three_typed(a, b, c, count, out);
}
inline void add_three_bf16(const std::uint16_t* a, const std::uint16_t* b, const std::uint16_t* c, std::int64_t count,
                           float* out) {
  add_three_typed(a, b, c, count, out);
}
inline void accumulate_f32(const float* x, std::int64_t count, float* sum) { accumulate_typed(x, count, sum); }
inline void accumulate_bf16(const std::uint16_t* x, std::int64_t count, float* sum) { accumulate_typed(x, count, sum); }

inline void widen_rows(const std::uint16_t* x, std::int64_t count, float* out) {
  for_lanes(count, [&](auto d, std::int64_t i) HWY_ATTR { hn::StoreU(load(d, x + i), d, out + i); });
}
inline void narrow_rows(const float* x, std::int64_t count, std::uint16_t* out) {
  for_lanes(count, [&](auto d, std::int64_t i) HWY_ATTR { store(d, hn::LoadU(d, x + i), out + i); });
}

inline constexpr RowKernels kTable = {
    .gelu_f32 = gelu_f32,
    .gelu_bf16 = gelu_bf16,
    .layer_norm_f32 = layer_norm_f32,
    .layer_norm_bf16 = layer_norm_bf16,
    .add_three_f32 = add_three_f32,
    .add_three_bf16 = add_three_bf16,
    .accumulate_f32 = accumulate_f32,
    .accumulate_bf16 = accumulate_bf16,
    .widen = widen_rows,
    .narrow = narrow_rows,
};

}  // namespace model_rows
inline constexpr const RowKernels& kRowKernels = model_rows::kTable;
}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
