#include "distributed/views.h"

#include <cstring>

#include "core/dtypes.h"

namespace heddle::distributed {
namespace {

std::byte* at(const TensorView& x, std::int64_t b, std::int64_t row, std::int64_t head) {
  const std::int64_t offset = b * x.stride[0] + row * x.stride[1] + head * x.stride[2];
  return static_cast<std::byte*>(x.data) + offset * static_cast<std::int64_t>(size_of(x.dtype));
}

void copy_numbers(const std::byte* from, std::int64_t from_stride, DType from_dtype, std::byte* to,
                  std::int64_t to_stride, DType to_dtype, std::int64_t count) {
  const std::size_t size = size_of(from_dtype), to_size = size_of(to_dtype);
  if (from_dtype == to_dtype && from_stride == 1 && to_stride == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * size);
    return;
  }
  for (std::int64_t n = 0; n < count; ++n) {
    const std::byte* source = from + n * from_stride * static_cast<std::int64_t>(size);
    std::byte* target = to + n * to_stride * static_cast<std::int64_t>(to_size);
    if (from_dtype == to_dtype) {
      std::memcpy(target, source, size);
      continue;
    }
    float value;
    std::memcpy(&value, source, sizeof value);
    const std::uint16_t narrow = to_dtype == DType::bf16 ? f32_to_bf16(value) : f32_to_f16(value);
    std::memcpy(target, &narrow, sizeof narrow);
  }
}

}  // namespace

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
  return {lse.data,
          lse.dtype,
          {lse.shape[0], lse.shape[2], lse.shape[1], 1},
          {lse.stride[0], lse.stride[2], lse.stride[1], 1}};
}

TensorView KeyBlock::k(void* data, std::int64_t rows) const { return {data, dtype, {batch, rows, heads, head_size}}; }

TensorView KeyBlock::v(void* data, std::int64_t rows) const {
  const std::int64_t behind = batch * rows * heads * head_size * static_cast<std::int64_t>(size_of(dtype));
  return {static_cast<std::byte*>(data) + behind, dtype, {batch, rows, heads, head_size_v}};
}

void copy_rows(const RowsAt& from, const RowsAt& to, std::int64_t count) {
  for (std::int64_t b = 0; b < from.x.shape[0]; ++b) {
    for (std::int64_t n = 0; n < count; ++n) {
      for (std::int64_t head = 0; head < from.x.shape[2]; ++head) {
        copy_numbers(at(from.x, b, from.begin + from.step * n, head), from.x.stride[3], from.x.dtype,
                     at(to.x, b, to.begin + to.step * n, head), to.x.stride[3], to.x.dtype, from.x.shape[3]);
      }
    }
  }
}

void add_rows(const RowsAt& from, const RowsAt& to, std::int64_t count) {
  for (std::int64_t b = 0; b < from.x.shape[0]; ++b) {
    for (std::int64_t n = 0; n < count; ++n) {
      for (std::int64_t head = 0; head < from.x.shape[2]; ++head) {
        const auto* source = reinterpret_cast<const float*>(at(from.x, b, from.begin + from.step * n, head));
        auto* target = reinterpret_cast<float*>(at(to.x, b, to.begin + to.step * n, head));
        for (std::int64_t x = 0; x < from.x.shape[3]; ++x) target[x] += source[x];
      }
    }
  }
}

}  // namespace heddle::distributed
