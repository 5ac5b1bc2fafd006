// Gradients of a linear layer with respect to x: dz = dy * activation'(z), and dz W. The product takes columns of W as
// the broadcast operand and rows of x in lanes, so that W is decoded as the forward decodes it and no sum crosses
// lanes:
//   dn^T[k, m] += W^T[k, n] dz^T[n, m]
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/dtypes.h"
#include "cpu/linear-inl.h"
#include "cpu/linear_codes-inl.h"
#include "cpu/linear_kernels.h"
#include "cpu/linear_products-inl.h"
#include "cpu/row_ops-inl.h"
#include "cpu/scratch.h"
#include "cpu/simd-inl.h"
#include "cpu/unit-inl.h"
#include "problem/linear.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

HWY_INLINE VF Sigmoid(VF x) {
  const DF d;
  const VF power = hn::Mul(x, hn::Set(d, -kLog2e)), limit = hn::Set(d, 127.0f);
  const VF e = hn::IfThenElse(hn::Gt(power, limit), hn::Set(d, kInfinity), Exp2(power));
  return hn::Div(hn::Set(d, 1.0f), hn::Add(e, hn::Set(d, 1.0f)));
}

// z within [-100, 100], beyond which no derivative changes and its formula would overflow. NaN stays.
HWY_INLINE VF WithinSlope(VF z) {
  const DF d;
  return hn::IfThenElse(hn::IsNaN(z), z, hn::Clamp(z, hn::Set(d, -100.0f), hn::Set(d, 100.0f)));
}

HWY_INLINE VF SiluSlope(VF given) {
  const DF d;
  const VF z = WithinSlope(given), one = hn::Set(d, 1.0f), s = Sigmoid(z);
  return hn::Mul(s, hn::MulAdd(z, hn::Sub(one, s), one));
}

HWY_INLINE VF GeluErfSlope(VF given) {
  const DF d;
  const VF z = WithinSlope(given), half = hn::Set(d, 0.5f);
  const VF cumulative = hn::MulAdd(half, model_rows::error_function(d, hn::Mul(z, hn::Set(d, 0.70710678f))), half);
  const VF density = hn::Mul(Exp2(hn::Mul(hn::Mul(z, z), hn::Set(d, -0.5f * kLog2e))), hn::Set(d, 0.39894228f));
  return hn::MulAdd(z, density, cumulative);
}

HWY_INLINE VF GeluTanhSlope(VF given) {
  const DF d;
  const VF z = WithinSlope(given), half = hn::Set(d, 0.5f), one = hn::Set(d, 1.0f), square = hn::Mul(z, z);
  const VF factor = hn::Set(d, 0.79788456f), cubic = hn::Set(d, 0.044715f);
  const VF t = Tanh(hn::Mul(hn::Mul(factor, z), hn::MulAdd(square, cubic, one)));
  const VF inner = hn::Mul(factor, hn::MulAdd(square, hn::Set(d, 3 * 0.044715f), one));
  const VF rest = hn::Mul(hn::Mul(half, z), hn::Mul(hn::NegMulAdd(t, t, one), inner));
  return hn::MulAdd(half, t, hn::Add(half, rest));
}

// d[i] * activation'(z[i]) to d.
inline void ActivationGradient(Activation activation, const float* HWY_RESTRICT z, float* HWY_RESTRICT d) {
  const DF df;
  const auto multiply = [&](const auto& slope) HWY_ATTR {
    for (std::int64_t i = 0; i < kLinearTile; i += kLanes) {
      hn::StoreU(hn::Mul(hn::LoadU(df, d + i), slope(hn::LoadU(df, z + i))), df, d + i);
    }
  };
  switch (activation) {
    case Activation::relu:
      return multiply([df](VF x) HWY_ATTR { return hn::IfThenZeroElse(hn::Le(x, hn::Zero(df)), hn::Set(df, 1.0f)); });
    case Activation::gelu_erf:
      return multiply([](VF x) HWY_ATTR { return GeluErfSlope(x); });
    case Activation::gelu_tanh:
      return multiply([](VF x) HWY_ATTR { return GeluTanhSlope(x); });
    case Activation::silu:
      return multiply([](VF x) HWY_ATTR { return SiluSlope(x); });
    default:
      return;
  }
}

// Of half as many d, for gates and ups side by side; the result, to d, has them so too. spare: 3 kLinearTile.
inline void GatedGradient(const float* HWY_RESTRICT z, float* HWY_RESTRICT d, float* HWY_RESTRICT spare) {
  const DF df;
  constexpr std::int64_t kHalf = kLinearTile / 2;
  float *gate = spare, *up = spare + kLinearTile, *dy = spare + 2 * kLinearTile;  // halves are no whole vectors
  for (std::int64_t j = 0; j < kHalf; ++j) {
    gate[j] = z[2 * j];
    up[j] = z[2 * j + 1];
    dy[j] = d[j];
  }
  for (std::int64_t j = 0; j < kHalf; j += kLanes) {
    const VF g = hn::LoadU(df, gate + j), given = hn::LoadU(df, dy + j);
    hn::StoreU(hn::Mul(given, hn::Mul(hn::LoadU(df, up + j), SiluSlope(g))), df, gate + j);
    hn::StoreU(hn::Mul(given, Silu(g)), df, up + j);
  }
  for (std::int64_t j = 0; j < kHalf; ++j) {
    d[2 * j] = gate[j];
    d[2 * j + 1] = up[j];
  }
}

struct LinearGradientMemory {
  float *rows, *line, *spare;       // sums_gradient, after the forward's memory
  float *block, *columns, *turned;  // rows_gradient
  std::byte* forward;
  std::size_t bytes;

  explicit LinearGradientMemory(std::byte* at) {
    Scratch sums(at), products(at);  // a task is one of the two
    forward = sums.take<std::byte>(static_cast<std::int64_t>(LinearScratch()));
    rows = sums.take<float>(kLinearChunk * kLinearTile);
    line = sums.take<float>(kLinearTile);
    spare = sums.take<float>(3 * kLinearTile);
    block = products.take<float>(kGradientColumns * kLinearTile);
    columns = products.take<float>(kGradientColumns * kLinearChunk);
    turned = products.take<float>(kGradientColumns * kLinearChunk);
    bytes = std::max(sums.used(), products.used());
  }
};

inline std::size_t LinearGradientScratch() { return LinearGradientMemory(nullptr).bytes; }

// dz of one row from its sums z, times `factor`: `count` of kLinearTile, then zeros, to d.
inline void RowGradient(const LinearBackwardProblem& p, const std::byte* dy, const float* sums, float factor,
                        const float* bias, std::int64_t count, const LinearGradientMemory& memory, float* d) {
  const DF df;
  const LinearProblem& f = p.forward;
  const bool gated = f.activation == Activation::swiglu;
  LoadRow(dy, f.dtype, 1, gated ? count / 2 : count, kLinearTile, d);
  if (p.activated()) {
    for (std::int64_t i = 0; i < kLinearTile; i += kLanes) {
      VF z = hn::Mul(hn::LoadU(df, sums + i), hn::Set(df, factor));
      if (f.bias != nullptr) z = hn::Add(z, hn::LoadU(df, bias + i));
      hn::StoreU(z, df, memory.line + i);
    }
    if (gated) {
      GatedGradient(memory.line, d, memory.spare);
    } else {
      ActivationGradient(f.activation, memory.line, d);
    }
  }
  std::fill(d + count, d + kLinearTile, 0.0f);  // what stands for rows that W does not have may be anything
}

// rows[m][kLinearTile] as operand B, words of neighbouring sums, rows of x in lanes. What `rows` held is lost.
template <Unit U>
void StoreSums(float* rows, std::int64_t lanes, typename U::Word* to) {
  // No payload of a NaN of bf16 is lost to the rounding.
  const auto* words =
      U::PackTile(rows, kLinearTile, {0, lanes}, kLinearTile, reinterpret_cast<typename U::Word*>(rows));
  constexpr std::int64_t kWords = Words<U>(kLinearTile);
  for (std::int64_t i = 0; i < kWords; i += 4) {
    for (std::int64_t m = 0; m < lanes; m += 4) {
      Transpose4x4(words + m * kWords + i, kWords, to + i * lanes + m, lanes);
    }
  }
}

inline void SumsGradient(const LinearBackwardProblem& p, const LinearTask& task, const LinearGradientRows& g,
                         std::byte* scratch) {
  const DF df;
  const LinearGradientMemory memory(scratch);
  const LinearMemory sums(memory.forward);
  const LinearProblem& f = p.forward;
  const bool gated = f.activation == Activation::swiglu;
  const auto size = static_cast<std::int64_t>(size_of(f.dtype));
  const std::int64_t n = task.tile * kLinearTile, count = std::min(kLinearTile, f.N - n);
  const float factor = p.activated() ? MultiplyTask(f.panels(), task, sums) : 1.0f;
  if (f.bias != nullptr) LoadRow(f.bias + n * size, f.dtype, 1, count, kLinearTile, sums.bias);
  for (std::int64_t m = 0; m < g.m_count; ++m) {
    const std::byte* dy = p.dy.row(g.m_begin + m) + (gated ? n / 2 : n) * size;
    float* d = memory.rows + m * kLinearTile;
    RowGradient(p, dy, sums.sums + m * kLinearTile, factor, sums.bias, count, memory, d);
    for (std::int64_t i = 0; g.dbias != nullptr && i < kLinearTile; i += kLanes) {
      float* to = g.dbias + n + i;
      hn::StoreU(hn::Add(hn::LoadU(df, to), hn::LoadU(df, d + i)), df, to);
    }
  }
  std::fill_n(memory.rows + g.m_count * kLinearTile, (g.lanes - g.m_count) * kLinearTile, 0.0f);
  WithUnit(g.pairs, [&]<Unit U>() HWY_ATTR {
    StoreSums<U>(memory.rows, g.lanes, static_cast<typename U::Word*>(g.dz) + Words<U>(n) * g.lanes);
  });
}

// A block of W for the product, [k][kLinearTile] elements: neighbouring rows of W are the parts of a word.
template <Unit U, class Codes, class Scales>
HWY_NOINLINE void DecodeRows(const Codes& given_codes, const Scales& given_scales, const lowbit::Panels& w,
                             std::int64_t first, int vectors, std::int64_t begin, std::int64_t depth,
                             typename U::Word* HWY_RESTRICT block) {
  const lowbit::PanelLayout& l = w.layout;
  const Codes codes = given_codes;
  const Scales scales = given_scales;
  for (int n = 0; n < vectors; ++n) {
    const SlicePlace place(w, first, n);
    auto* to = reinterpret_cast<typename U::Element*>(block) + n * kLanes;
    std::int64_t k = begin;
    for (std::int64_t g = begin / l.group; k < begin + depth; ++g) {
      const VF scale = scales.Load(place.panel + l.scales, place.scale_index(g));
      const VF zero = place.template Zero<Codes>(l, g);
      for (const std::int64_t end = std::min(begin + depth, (g + 1) * l.group); k < end; k += lowbit::kPanelStep) {
        auto word = codes.Load(place.step(l, k), place.slice);
        HWY_UNROLL(8)
        for (int j = 0; j < lowbit::kPanelStep; ++j) {
          U::template PackElements<Scales::kExact>(hn::Mul(codes.Value(word, zero), scale), to);
          to += kLinearTile;
        }
      }
    }
  }
}

// columns[k][m] (+)= sum over the block's rows of W of W[n, k] dz[n, m].
template <Unit U, Sum kSum>
void MultiplyColumns(const typename U::Word* block, std::int64_t depth, const typename U::Word* dz, std::int64_t lanes,
                     float* columns) {
  constexpr std::int64_t kWords = Words<U>(kLinearTile);
  const auto run = [&]<int kVectors>(std::int64_t m) {
    for (std::int64_t k = 0; k < depth; k += U::kTileM) {
      U::template Product<kVectors, kSum>(kWords, {block + k * kWords, kWords, 1}, {dz + m, lanes},
                                          columns + k * lanes + m, lanes);
    }
  };
  std::int64_t m = 0;
  for (; m + kTileN * kLanes <= lanes; m += kTileN * kLanes) run.template operator()<kTileN>(m);
  if (lanes - m == 2 * kLanes) run.template operator()<2>(m);
  if (lanes - m == kLanes) run.template operator()<1>(m);
}

template <Unit U, class Codes, class Scales>
void GradientColumns(const Codes& codes, const Scales& scales, const lowbit::Panels& w, const LinearGradientRows& g,
                     std::int64_t begin, std::int64_t depth, typename U::Word* block, float* columns) {
  constexpr std::int64_t kWords = Words<U>(kLinearTile);
  const auto* dz = static_cast<const typename U::Word*>(g.dz);
  for (std::int64_t first = 0; first < w.layout.panels; first += kLinearPanels) {
    const int vectors = static_cast<int>(std::min(kLinearPanels, w.layout.panels - first)) * kSlices;
    if (vectors < kTileVectors) std::memset(block, 0, static_cast<std::size_t>(depth * kWords) * sizeof(*block));
    DecodeRows<U>(codes, scales, w, first, vectors, begin, depth, block);
    const auto* from = dz + first / kLinearPanels * kWords * g.lanes;
    if (first == 0) {
      MultiplyColumns<U, Sum::kStore>(block, depth, from, g.lanes, columns);
    } else {
      MultiplyColumns<U, Sum::kGoOn>(block, depth, from, g.lanes, columns);
    }
  }
}

inline void RowsGradient(const LinearBackwardProblem& p, const LinearGradientRows& g, std::int64_t index,
                         std::byte* scratch) {
  const DF df;
  const LinearGradientMemory memory(scratch);
  const LinearProblem& f = p.forward;
  const lowbit::Panels& w = f.panels();
  const std::int64_t begin = index * kGradientColumns, depth = std::min(kGradientColumns, w.layout.columns - begin);
  const float global = w.format.global_scale ? w.global_scale() : 1.0f;
  float factor = 1.0f;
  if (w.layout.panels == 0) std::fill_n(memory.columns, depth * g.lanes, 0.0f);
  if (g.pairs) factor = global;  // exact without the global scale
  WithUnit(g.pairs, [&]<Unit U>() HWY_ATTR {
    WithFormat(w, g.pairs ? 1.0f : global, [&](const auto& codes, const auto& scales) HWY_ATTR {
      GradientColumns<U>(codes, scales, w, g, begin, depth, reinterpret_cast<typename U::Word*>(memory.block),
                         memory.columns);
    });
  });
  for (std::int64_t k = 0; k < depth; k += 4) {
    for (std::int64_t m = 0; m < g.lanes; m += 4) {
      Transpose4x4(memory.columns + k * g.lanes + m, g.lanes, memory.turned + m * kGradientColumns + k,
                   kGradientColumns);
    }
  }
  const std::int64_t count = std::min(depth, f.K - begin);
  const auto size = static_cast<std::int64_t>(size_of(f.dtype));
  for (std::int64_t m = 0; m < g.m_count; ++m) {
    float* row = memory.turned + m * kGradientColumns;
    for (std::int64_t k = 0; factor != 1.0f && k < kGradientColumns; k += kLanes) {
      hn::StoreU(hn::Mul(hn::LoadU(df, row + k), hn::Set(df, factor)), df, row + k);
    }
    if (g.normed != nullptr) {
      std::memcpy(g.normed + m * w.layout.columns + begin, row, static_cast<std::size_t>(count) * 4);
    } else {
      StoreRow(row, count, p.dx.row(g.m_begin + m) + begin * size, f.dtype, 1);
    }
  }
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
