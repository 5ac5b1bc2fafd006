// append_int4_cache after its arguments were checked (src/ops/kv_cache/int4_cache.cc).
#pragma once

#include "problem/attention.h"
#include "problem/rotary.h"

namespace heddle {

struct Int4AppendProblem {
  Operand k_new, v_new;    // [B, S, Hkv, D], [B, S, Hkv, Dv]
  Operand k_tail, v_tail;  // [rows, kInt4Tail, Hkv, D | Dv]
  std::int64_t B = 0, S = 0, Hkv = 0, D = 0, Dv = 0;
  RotaryTables rotary;
  const std::int32_t* seqlens = nullptr;  // [B]
  Int4Blocks blocks;
  const std::int32_t* page_table = nullptr;  // [B, max_blocks], or null
  std::int64_t page_table_stride = 0, max_blocks = 0;
  std::int64_t rows = 0, capacity = 0;    // of the rings; keys of a sequence
  const std::int32_t* row_idx = nullptr;  // [B], or null: b
  Device device = Device::cpu;

  constexpr std::int64_t row(std::int64_t b) const { return row_idx != nullptr ? row_idx[b] : b; }
  constexpr std::int64_t page(std::int64_t b, std::int64_t n) const {
    return page_table != nullptr ? page_table[b * page_table_stride + n] : n;
  }
  // Block n of sequence b, which is page `page`.
  constexpr std::byte* block(std::int64_t b, std::int64_t page, std::int64_t h) const {
    return blocks.data +
           ((page_table ? 0 : row(b) * blocks.stride_row) + page * blocks.stride_block + h * blocks.stride_h);
  }
  // Read and written of a long sequence, of which each key goes through its ring into a block.
  double bytes() const {
    const double rows = static_cast<double>(B * S * Hkv), each = static_cast<double>(D + Dv);
    return rows * (3 * each * static_cast<double>(size_of(k_new.dtype)) +
                   static_cast<double>(Int4Block{D, Dv}.bytes()) / static_cast<double>(kInt4Keys));
  }
};

using Int4AppendKernel = Kernel<Int4AppendProblem>;

}  // namespace heddle
