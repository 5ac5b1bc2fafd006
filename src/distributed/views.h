// Parts of tensors, and copies between them, on the CPU.
#pragma once

#include <cstdint>

#include "heddle/distributed.h"

namespace heddle::distributed {

// `x` from entry `begin` to `end` of extent `n`.
TensorView part(TensorView x, int n, std::int64_t begin, std::int64_t end);
// Entry `b` of the first extent, which is left out.
TensorView entry(const TensorView& x, std::int64_t b);

// lse [B, H, rows] as [B, rows, H, 1].
TensorView lse_as_rows(const TensorView& lse);

// A rank's, or all, keys and values in one block of memory: k [B, rows, Hkv, D], then v [B, rows, Hkv, Dv].
struct KeyBlock {
  std::int64_t batch, heads, head_size, head_size_v;
  DType dtype;

  std::int64_t elements(std::int64_t rows) const { return batch * rows * heads * (head_size + head_size_v); }
  std::size_t bytes(std::int64_t rows) const { return static_cast<std::size_t>(elements(rows)) * size_of(dtype); }
  TensorView k(void* data, std::int64_t rows) const;
  TensorView v(void* data, std::int64_t rows) const;
};

// Rows from[:, from_begin + from_step n] to to[:, to_begin + to_step n] for all n below `count`, [B, rows, H, D],
// rounded where dtypes differ; from is f32 then.
struct RowsAt {
  const TensorView& x;
  std::int64_t begin = 0, step = 1;
};
void copy_rows(const RowsAt& from, const RowsAt& to, std::int64_t count);
// Adds them, f32, whose heads' numbers lie side by side.
void add_rows(const RowsAt& from, const RowsAt& to, std::int64_t count);

}  // namespace heddle::distributed
