// What calls of Transformer blocks check of their tensors, on one process and over ranks.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "heddle/transformer_block.h"
#include "ops/validate.h"

namespace heddle {

// x or y, by its name: [total, hidden] of the block's dtype, on its device, as its kernels need rows. Throws Error.
void check_block_rows(const Check& check, const TransformerBlockOptions& options, const TensorView& view,
                      const char* name);
// y as x, which both were checked. Throws Error.
void check_block_result(const Check& check, const TensorView& x, const TensorView& y);
// int32 [sequences + 1], contiguous, on the block's device. Throws Error.
void check_block_offsets(const Check& check, const TransformerBlockOptions& options, const TensorView& cu_seqlens);

// The rules for what cu_seqlens holds: from 0 to `total`, never decreasing, no sequence longer than `longest`, unless
// that is 0.
Offsets block_offsets(const TensorView& cu_seqlens, std::int64_t total, std::int64_t longest);
// On the CPU: throws Error for the first of them that it breaks.
void require_block_offsets(const Check& check, const Offsets& offsets);

}  // namespace heddle
