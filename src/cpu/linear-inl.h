// One task of a linear layer: the product, then bias, activation and residual, rounded once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/dtypes.h"
#include "cpu/linear_codes-inl.h"
#include "cpu/linear_int8-inl.h"
#include "cpu/linear_kernels.h"
#include "cpu/linear_products-inl.h"
#include "cpu/row_ops-inl.h"
#include "cpu/scratch.h"
#include "cpu/simd-inl.h"
#include "cpu/unit-inl.h"
#include "problem/linear.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

struct LinearMemory {
  float *sums, *block, *bias, *residual, *row;
  std::size_t bytes;

  explicit LinearMemory(std::byte* at) {
    Scratch scratch(at);
    sums = scratch.take<float>(kLinearChunk * kLinearTile);
    block = scratch.take<float>(kBlockColumns * kLinearTile);
    bias = scratch.take<float>(kLinearTile);
    residual = scratch.take<float>(kLinearTile);
    row = scratch.take<float>(2 * kLinearTile);
    bytes = scratch.used();
  }
};

inline std::size_t LinearScratch() { return LinearMemory(nullptr).bytes; }

HWY_INLINE VF Silu(VF x) {
  const DF d;
  const VF power = hn::Mul(x, hn::Set(d, -kLog2e)), limit = hn::Set(d, 127.0f);
  const VF e = hn::IfThenElse(hn::Gt(power, limit), hn::Set(d, kInfinity), Exp2(power));
  return hn::Div(x, hn::Add(e, hn::Set(d, 1.0f)));
}

template <class F>
HWY_INLINE void ForEachVector(float* row, const F& f) {
  for (std::int64_t i = 0; i < kLinearTile; i += kLanes) hn::StoreU(f(hn::LoadU(DF(), row + i)), DF(), row + i);
}

inline void Activate(Activation activation, float* row) {
  const DF d;
  switch (activation) {
    case Activation::relu:  // NaN stays
      return ForEachVector(row, [d](VF x) HWY_ATTR { return hn::IfThenZeroElse(hn::Lt(x, hn::Zero(d)), x); });
    case Activation::gelu_erf:
      return ForEachVector(row, [d](VF x) HWY_ATTR {
        const VF half = hn::Mul(x, hn::Set(d, 0.5f));
        return hn::MulAdd(half, model_rows::error_function(d, hn::Mul(x, hn::Set(d, 0.70710678f))), half);
      });
    case Activation::gelu_tanh:
      return ForEachVector(row, [d](VF x) HWY_ATTR {
        const VF cube = hn::Mul(hn::Mul(x, x), x), half = hn::Mul(x, hn::Set(d, 0.5f));
        const VF inner = hn::Mul(hn::Set(d, 0.79788456f), hn::MulAdd(cube, hn::Set(d, 0.044715f), x));
        return hn::MulAdd(half, Tanh(inner), half);
      });
    case Activation::silu:
      return ForEachVector(row, [](VF x) HWY_ATTR { return Silu(x); });
    default:
      return;
  }
}

// silu(gate) * up of neighbours, to the front of the row; `spare` has room for kLinearTile.
inline void ActivateGated(float* row, float* spare) {
  for (std::int64_t j = 0; j < kLinearTile / 2; ++j) {
    spare[j] = row[2 * j];
    row[j] = row[2 * j + 1];
  }
  const DF d;
  for (std::int64_t j = 0; j < kLinearTile / 2; j += kLanes) {
    hn::StoreU(hn::Mul(Silu(hn::LoadU(d, spare + j)), hn::LoadU(d, row + j)), d, row + j);
  }
}

// activation(sums) of a row of N sums, as `dtype`; swiglu: N / 2 of them.
inline void ActivateRow(Activation activation, const float* sums, std::int64_t N, std::byte* to, DType dtype) {
  alignas(64) float row[2 * kLinearTile];
  const bool gated = activation == Activation::swiglu;
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  for (std::int64_t n = 0; n < N; n += kLinearTile) {
    const std::int64_t count = std::min(kLinearTile, N - n), outputs = gated ? count / 2 : count;
    LoadRow(reinterpret_cast<const std::byte*>(sums + n), DType::f32, 1, count, kLinearTile, row);
    if (gated) {
      ActivateGated(row, row + kLinearTile);
    } else {
      Activate(activation, row);
    }
    StoreRow(row, outputs, to, dtype, 1);
    to += outputs * size;
  }
}

// Of sums in f32 to rows of y.
inline void WriteOutputs(const LinearProblem& p, const LinearTask& task, const LinearMemory& memory, float factor) {
  const DF d;
  const bool gated = p.activation == Activation::swiglu;
  const std::int64_t n = task.tile * kLinearTile, count = std::min(kLinearTile, p.N - n);
  const std::int64_t j = gated ? n / 2 : n, outputs = gated ? count / 2 : count;
  const auto size = static_cast<std::int64_t>(size_of(p.dtype));
  if (p.bias != nullptr) LoadRow(p.bias + n * size, p.dtype, 1, count, kLinearTile, memory.bias);
  for (std::int64_t m = 0; m < task.m_count; ++m) {
    float* row = memory.row;
    const float* sums = memory.sums + m * kLinearTile;
    for (std::int64_t i = 0; i < kLinearTile; i += kLanes) {
      VF sum = hn::Mul(hn::LoadU(d, sums + i), hn::Set(d, factor));
      if (p.bias != nullptr) sum = hn::Add(sum, hn::LoadU(d, memory.bias + i));
      hn::StoreU(sum, d, row + i);
    }
    if (gated) {
      ActivateGated(row, row + kLinearTile);
    } else {
      Activate(p.activation, row);
    }
    if (p.residual.data != nullptr) {
      LoadRow(p.residual.row(task.m_begin + m) + j * size, p.dtype, 1, outputs, kLinearTile, memory.residual);
      for (std::int64_t i = 0; i < outputs; i += kLanes) {
        hn::StoreU(hn::Add(hn::LoadU(d, row + i), hn::LoadU(d, memory.residual + i)), d, row + i);
      }
    }
    StoreRow(row, outputs, p.y.row(task.m_begin + m) + j * size, p.dtype, 1);
  }
}

// The task's sums of products, and what they are still to be multiplied by.
inline float MultiplyTask(const lowbit::Panels& w, const LinearTask& task, const LinearMemory& memory) {
  const std::int64_t first = task.tile * kLinearPanels;
  const int vectors = static_cast<int>(std::min(kLinearPanels, w.layout.panels - first)) * kSlices;
  if (w.layout.columns == 0) {
    std::fill_n(memory.sums, kLinearChunk * kLinearTile, 0.0f);
    return 1.0f;
  }
  if (task.int8.words != nullptr) {
    MultiplyInt8(w, task.int8, task.m_count, first, vectors, memory.sums);
    return 1.0f;
  }
  const float global = w.format.global_scale ? w.global_scale() : 1.0f;
  if constexpr (kHasBf16Unit) {
    if (task.pairs) {  // exact without the global scale
      using Word = Bf16Unit::Word;
      WithFormat(w, 1.0f, [&](const auto& codes, const auto& scales) HWY_ATTR {
        MultiplyTile<Bf16Unit>(codes, scales, w, static_cast<const Word*>(task.x), task.m_count, first, vectors,
                               reinterpret_cast<Word*>(memory.block), memory.sums);
      });
      return global;
    }
  }
  const auto* x = static_cast<const float*>(task.x);
  WithFormat(w, global, [&](const auto& codes, const auto& scales) HWY_ATTR {
    // Rows of x beyond m_count are zeros.
    if (task.m_count == 1) return DotTile<1>(codes, scales, w, x, first, vectors, memory.sums);
    if (task.m_count == 2) return DotTile<2>(codes, scales, w, x, first, vectors, memory.sums);
    if (task.m_count <= 4) return DotTile<4>(codes, scales, w, x, first, vectors, memory.sums);
    if (task.m_count <= kLinearFewRows)
      return DotTile<kLinearFewRows>(codes, scales, w, x, first, vectors, memory.sums);
    MultiplyTile<F32Unit>(codes, scales, w, x, task.m_count, first, vectors, memory.block, memory.sums);
  });
  return 1.0f;
}

inline void LinearForward(const LinearProblem& p, const LinearTask& task, std::byte* scratch) {
  const LinearMemory memory(scratch);
  const float factor = MultiplyTask(p.panels(), task, memory);
  WriteOutputs(p, task, memory, factor);
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
