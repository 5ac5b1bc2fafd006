// Parts of tensors, and rows that go to and fro.
#pragma once

#include <cstdint>
#include <vector>

#include "heddle/distributed.h"
#include "problem/row_moves.h"

namespace heddle::distributed {

// `x` from entry `begin` to `end` of extent `n`.
TensorView part(TensorView x, int n, std::int64_t begin, std::int64_t end);
// Entry `b` of the first extent, which is left out.
TensorView entry(const TensorView& x, std::int64_t b);

// lse [B, H, rows] as [B, rows, H, 1].
TensorView lse_as_rows(const TensorView& lse);

// The way back.
std::vector<RowMove> reversed(std::vector<RowMove> moves);

// A rank's, or all, keys and values in one block of memory: k [B, rows, Hkv, D], then v [B, rows, Hkv, Dv].
struct KeyBlock {
  std::int64_t batch, heads, head_size, head_size_v;
  DType dtype;
  Device device;

  std::int64_t elements(std::int64_t rows) const { return batch * rows * heads * (head_size + head_size_v); }
  std::size_t bytes(std::int64_t rows) const { return static_cast<std::size_t>(elements(rows)) * size_of(dtype); }
  TensorView k(void* data, std::int64_t rows) const;
  TensorView v(void* data, std::int64_t rows) const;
};

}  // namespace heddle::distributed
