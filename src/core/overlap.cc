#include "core/overlap.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

namespace heddle {
namespace {

struct Axis {
  std::int64_t stride, extent_a, extent_b;
};

using Axes = std::array<Axis, kMaxRank>;

// Is `delta` a sum of stride * d over the axes from kAxis on, with -extent_b < d < extent_a? Axes are sorted by falling
// stride, and each stride exceeds what the smaller axes reach, so only the digits around delta / stride can be.
template <int kAxis = 0>
bool reaches(const Axes& axes, std::int64_t delta) {
  if constexpr (kAxis == kMaxRank) {
    return delta == 0;
  } else {
    const auto [stride, extent_a, extent_b] = axes[kAxis];
    const std::int64_t digit = delta / stride;
    for (std::int64_t d = digit - 1; d <= digit + 1; ++d) {
      if (d > -extent_b && d < extent_a && reaches<kAxis + 1>(axes, delta - d * stride)) return true;
    }
    return false;
  }
}

struct Range {
  std::intptr_t begin, end;
};

Range byte_range(const TensorView& view) {
  std::int64_t low = 0, high = 0;
  for (int i = 0; i < view.rank; ++i) {
    const std::int64_t reach = view.stride[i] * (view.shape[i] - 1);
    (reach < 0 ? low : high) += reach;
  }
  const auto base = reinterpret_cast<std::intptr_t>(view.data);
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  return {base + low * size, base + (high + 1) * size};
}

}  // namespace

bool may_share_memory(const TensorView& a, const TensorView& b) {
  if (a.elements() == 0 || b.elements() == 0 || a.data == nullptr || b.data == nullptr) return false;
  const Range range_a = byte_range(a), range_b = byte_range(b);
  if (range_a.end <= range_b.begin || range_b.end <= range_a.begin) return false;
  if (a.dtype != b.dtype || a.rank != b.rank) return true;

  Axes axes;
  axes.fill({1, 1, 1});  // an axis that adds nothing
  for (int i = 0; i < a.rank; ++i) {
    if (a.shape[i] == 1 && b.shape[i] == 1) continue;
    if (a.stride[i] != b.stride[i] || a.stride[i] <= 0) return true;
    axes[i] = {a.stride[i], a.shape[i], b.shape[i]};
  }
  for (int i = 1; i < kMaxRank; ++i) {
    for (int j = i; j > 0 && axes[j - 1].stride < axes[j].stride; --j) std::swap(axes[j - 1], axes[j]);
  }
  std::int64_t reach = 0;
  for (int i = kMaxRank - 1; i >= 0; --i) {
    const std::int64_t extent = std::max(axes[i].extent_a, axes[i].extent_b);
    if (extent == 1) continue;
    if (axes[i].stride <= reach) return true;  // the larger view overlaps itself: the digits would not be unique
    reach += axes[i].stride * (extent - 1);
  }
  const auto size = static_cast<std::int64_t>(size_of(a.dtype));
  const std::int64_t bytes = reinterpret_cast<std::intptr_t>(b.data) - reinterpret_cast<std::intptr_t>(a.data);
  if (bytes % size != 0) return true;
  return reaches(axes, bytes / size);
}

}  // namespace heddle
