// Keys and values that are stored in 8 or 4 bits, with their scales, as rows of f32.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/dtypes.h"
#include "cpu/lowbit_decode-inl.h"
#include "cpu/simd-inl.h"
#include "problem/attention.h"
#include "problem/int4_cache.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// Whether keys have to be widened before they are multiplied.
inline bool widened(const AttentionProblem& p) { return p.int4 || p.k.dtype == DType::f8e4m3; }

class KeyWidener {
 public:
  KeyWidener(const AttentionProblem& p, std::int64_t b, const Sequence& s, std::int64_t head)
      : p_(p), s_(s), b_(b), head_(head), format_{p.D, p.Dv}, blocks_(p.int4 ? int4_blocks(s.k_begin + s.sk) : 0) {}

  // Rows [begin, begin + count) of k, or of v, `padded` f32 apart and filled up with zeros.
  void load(bool of_values, std::int64_t begin, std::int64_t count, std::int64_t padded, float* HWY_RESTRICT to) const {
    const std::int64_t width = of_values ? p_.Dv : p_.D;
    for (std::int64_t j = 0; j < count;) {
      const std::int64_t slot = s_.k_begin + begin + j;
      std::int64_t rows = 1;
      if (slot / kInt4Keys < blocks_) {
        const std::int64_t first = slot % kInt4Keys;
        rows = std::min(count - j, kInt4Keys - first);
        const std::byte* block = p_.int4_block(b_, slot / kInt4Keys, head_);
        of_values ? block_values(block, first, rows, padded, to + j * padded)
                  : block_keys(block, first, rows, padded, to + j * padded);
      } else if (p_.int4) {
        const Operand& x = of_values ? p_.v : p_.k;
        LoadRow(x.at(p_.int4_row(b_), slot % kInt4Tail, head_), x.dtype, x.stride_d, width, padded, to + j * padded);
      } else {
        e4m3_row(of_values, begin + j, width, to + j * padded);
      }
      for (std::int64_t n = j; n < j + rows; ++n) std::fill(to + n * padded + width, to + (n + 1) * padded, 0.0f);
      j += rows;
    }
  }

 private:
  void e4m3_row(bool of_values, std::int64_t j, std::int64_t width, float* HWY_RESTRICT to) const {
    const auto [batch, row] = p_.key_slot(b_, s_, j);
    const Operand& x = of_values ? p_.v : p_.k;
    const float scale = (of_values ? p_.v_scale : p_.k_scale).at(batch, row, head_);
    const auto* codes = reinterpret_cast<const std::uint8_t*>(x.at(batch, row, head_));
    if (x.stride_d == 1) {
      E4m3Decoder().template Span<true>(codes, width, scale, 0.0f, to);
    } else {
      for (std::int64_t d = 0; d < width; ++d) to[d] = f8e4m3_to_f32(codes[d * x.stride_d]) * scale;
    }
  }

  // `count` f16 that lie one after the other.
  static void halves(const std::byte* from, std::int64_t count, float* HWY_RESTRICT to) {
    LoadRow(from, DType::f16, 1, count, count, to);
  }

  void block_keys(const std::byte* block, std::int64_t first, std::int64_t rows, std::int64_t padded,
                  float* HWY_RESTRICT to) const {
    float scale[256], zero[256];
    halves(block + format_.k_scales(), p_.D, scale);
    halves(block + format_.k_zeros(), p_.D, zero);
    for (std::int64_t n = 0; n < rows; ++n) {
      const auto* codes = reinterpret_cast<const std::uint8_t*>(block + format_.k_code(first + n, 0));
      float* HWY_RESTRICT out = to + n * padded;
      for (std::int64_t d = 0; d < p_.D; d += 2) {
        const int pair = codes[d / 2];
        out[d] = zero[d] + static_cast<float>(pair & 15) * scale[d];
        out[d + 1] = zero[d + 1] + static_cast<float>(pair >> 4) * scale[d + 1];
      }
    }
  }

  void block_values(const std::byte* block, std::int64_t first, std::int64_t rows, std::int64_t padded,
                    float* HWY_RESTRICT to) const {
    for (std::int64_t from = 0; from < p_.Dv; from += kInt4Channels) {
      float scale[kInt4Keys], zero[kInt4Keys];
      halves(block + format_.v_scales() + format_.v_scale(first, from), rows, scale);
      halves(block + format_.v_zeros() + format_.v_scale(first, from), rows, zero);
      for (std::int64_t n = 0; n < rows; ++n) {
        const std::int64_t key = first + n;
        // A pair of channels lies in 16 bytes; the next pair of the eight 512 bytes further, the next eight 64.
        const auto* codes = reinterpret_cast<const std::uint8_t*>(block + format_.v_code(key, from));
        const int bit = Int4Block::v_bit(key, 0);
        float* HWY_RESTRICT out = to + n * padded + from;
        for (std::int64_t d = 0; d < kInt4Channels; d += 2) {
          const std::uint8_t* pair = codes + d % 8 / 2 * 512 + d / 8 * 64;
          out[d] = zero[n] + static_cast<float>(pair[0] >> bit & 15) * scale[n];
          out[d + 1] = zero[n] + static_cast<float>(pair[8] >> bit & 15) * scale[n];
        }
      }
    }
  }

  const AttentionProblem& p_;
  const Sequence& s_;
  const std::int64_t b_, head_;
  const Int4Block format_;
  const std::int64_t blocks_;
};

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
