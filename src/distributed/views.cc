#include "distributed/views.h"

#include <utility>

namespace heddle::distributed {

TensorView part(TensorView x, int n, std::int64_t begin, std::int64_t end) {
  const auto extent = static_cast<std::size_t>(n);
  x.data = static_cast<std::byte*>(x.data) + begin * x.stride[extent] * static_cast<std::int64_t>(size_of(x.dtype));
  x.shape[extent] = end - begin;
  return x;
}

TensorView entry(const TensorView& x, std::int64_t b) {
  TensorView out = part(x, 0, b, b + 1);
  out.rank = x.rank - 1;
  for (std::size_t n = 0; n + 1 < static_cast<std::size_t>(kMaxRank); ++n) {
    out.shape[n] = x.shape[n + 1];
    out.stride[n] = x.stride[n + 1];
  }
  out.shape[static_cast<std::size_t>(out.rank)] = out.stride[static_cast<std::size_t>(out.rank)] = 0;
  return out;
}

TensorView lse_as_rows(const TensorView& lse) {
  TensorView out(lse.data, lse.dtype, {lse.shape[0], lse.shape[2], lse.shape[1], 1},
                 {lse.stride[0], lse.stride[2], lse.stride[1], 1});
  out.device = lse.device;
  return out;
}

std::vector<RowMove> reversed(std::vector<RowMove> moves) {
  for (RowMove& move : moves) {
    std::swap(move.from, move.to);
    std::swap(move.from_step, move.to_step);
  }
  return moves;
}

TensorView KeyBlock::k(void* data, std::int64_t rows) const {
  TensorView out(data, dtype, {batch, rows, heads, head_size});
  out.device = device;
  return out;
}

TensorView KeyBlock::v(void* data, std::int64_t rows) const {
  const std::int64_t behind = batch * rows * heads * head_size * static_cast<std::int64_t>(size_of(dtype));
  TensorView out(static_cast<std::byte*>(data) + behind, dtype, {batch, rows, heads, head_size_v});
  out.device = device;
  return out;
}

}  // namespace heddle::distributed
