// apply_rotary and append_kv_cache after their arguments were checked (src/ops/kv_cache/kv_cache.cc).
#pragma once

#include "problem/attention.h"
#include "problem/rotary.h"

namespace heddle {

struct RotaryProblem {
  Operand x, out;  // [B, S, H, D]
  std::int64_t B = 0, S = 0, H = 0, D = 0;
  RotaryTables rotary;
  const std::int32_t* offsets = nullptr;  // [B], or null: 0
  Device device = Device::cpu;

  // Read and written, without the tables.
  double bytes() const { return 2.0 * static_cast<double>(B * S * H * D) * static_cast<double>(size_of(x.dtype)); }
};

struct AppendProblem {
  Operand k_new, v_new;      // [B, S, Hkv, D], [B, S, Hkv, Dv]
  Operand k_cache, v_cache;  // [pages, page_size, Hkv, D | Dv]; a contiguous cache is one page per row
  std::int64_t B = 0, S = 0, Hkv = 0, D = 0, Dv = 0;
  Scales k_scale, v_scale;  // of an f8e4m3 cache, which holds values / scale: by head at most,
  bool finds_k_scale = false,
       finds_v_scale = false;  // or one for each slot and head, which the append finds and writes
  Device device = Device::cpu;
  RotaryTables rotary;
  const std::int32_t* seqlens = nullptr;     // [B]
  const std::int32_t* page_table = nullptr;  // [B, max_pages], or null: contiguous
  std::int64_t page_table_stride = 0, page_size = 1;
  std::int64_t pages = 0, capacity = 0;           // positions of a sequence lie below `capacity`
  const std::int32_t* cache_batch_idx = nullptr;  // [B], or null: b

  constexpr std::int64_t page(std::int64_t b, std::int64_t position) const {
    if (page_table != nullptr) return page_table[b * page_table_stride + position / page_size];
    return cache_batch_idx != nullptr ? cache_batch_idx[b] : b;
  }
  // Read and written, without tables and scales.
  double bytes() const {
    return static_cast<double>(B * S * Hkv * (D + Dv)) *
           static_cast<double>(size_of(k_new.dtype) + size_of(k_cache.dtype));
  }
};

using RotaryKernel = Kernel<RotaryProblem>;
using AppendKernel = Kernel<AppendProblem>;

}  // namespace heddle
