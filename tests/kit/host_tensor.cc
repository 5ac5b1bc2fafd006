#include "kit/host_tensor.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "core/check.h"
#include "core/dtypes.h"

namespace heddle::kit {
namespace {

constexpr std::int64_t kGuard = 64;  // elements, wider than any vector register
// Every 16-bit half is a NaN of f16 and bf16, and so is every byte of f8e4m3.
constexpr std::byte poison(DType dtype, std::size_t byte) {
  return byte % 2 == 0 && dtype != DType::f8e4m3 ? std::byte{0xA5} : std::byte{0xFF};
}

// The storage order of the axes, outermost first, and the gap behind each axis's block.
struct Plan {
  std::vector<int> order;
  std::vector<std::int64_t> gap;
  std::int64_t innermost = 1, start = 0;
};

Plan plan_of(Layout layout, int rank) {
  Plan plan;
  plan.order.resize(rank);
  std::iota(plan.order.begin(), plan.order.end(), 0);
  plan.gap.assign(rank, 0);
  if (layout == Layout::heads_first && rank >= 3) std::swap(plan.order[rank - 3], plan.order[rank - 2]);
  if (layout == Layout::padded_rows) {
    plan.start = 1;
    for (int axis = std::max(0, rank - 2); axis < rank; ++axis) plan.gap[axis] = axis == rank - 1 ? 3 : 5;
  }
  if (layout == Layout::strided_dim) plan.innermost = 3;
  return plan;
}

}  // namespace

double rounded(double value, DType dtype) {
  switch (dtype) {
    case DType::f16:
      return f16_to_f32(f32_to_f16(static_cast<float>(value)));
    case DType::bf16:
      return bf16_to_f32(f32_to_bf16(static_cast<float>(value)));
    case DType::f8e4m3:
      return f8e4m3_to_f32(f32_to_f8e4m3(static_cast<float>(value)));
    default:
      return static_cast<float>(value);
  }
}

HostTensor HostTensor::input(DType dtype, std::vector<std::int64_t> shape, Layout layout) {
  return make(dtype, shape, layout, 0);
}

HostTensor HostTensor::output(DType dtype, std::vector<std::int64_t> shape, Layout layout) {
  if (layout == Layout::reversed || layout == Layout::expanded) layout = Layout::contiguous;
  return make(dtype, shape, layout, kGuard);
}

HostTensor HostTensor::make(DType dtype, const std::vector<std::int64_t>& shape, Layout layout, std::int64_t guard) {
  HostTensor out;
  TensorView& view = out.view_;
  view.dtype = dtype;
  view.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());

  const Plan plan = plan_of(layout, view.rank);
  std::int64_t step = plan.innermost;
  for (int n = view.rank - 1; n >= 0; --n) {
    const int axis = plan.order[n];
    const bool shared = layout == Layout::expanded && (axis == view.rank - 2 || (view.rank == 4 && axis == 0));
    view.stride[axis] = shared ? 0 : step;
    if (!shared) step = step * std::max<std::int64_t>(shape[axis], 1) + plan.gap[axis];
  }
  std::int64_t last = 0;  // offset of the last element
  for (int axis = 0; axis < view.rank; ++axis) {
    last += view.stride[axis] * std::max<std::int64_t>(shape[axis] - 1, 0);
  }
  std::int64_t first = guard + plan.start;
  const std::int64_t size = view.elements() == 0 ? 2 * guard : first + last + 1 + guard;
  if (layout == Layout::reversed && view.elements() > 0) {
    for (int axis : {view.rank == 4 ? 1 : 0, view.rank - 1}) {
      first += view.stride[axis] * (shape[axis] - 1);
      view.stride[axis] = -view.stride[axis];
    }
  }

  const auto width = static_cast<std::int64_t>(size_of(dtype));
  out.memory_.resize(size * width);
  for (std::size_t n = 0; n < out.memory_.size(); ++n) out.memory_[n] = poison(dtype, n);
  view.data = view.elements() == 0 ? out.memory_.data() : out.memory_.data() + first * width;
  return out;
}

std::int64_t HostTensor::offset(std::int64_t natural) const {
  std::int64_t at = 0;
  for (int axis = view_.rank - 1; axis >= 0; --axis) {
    at += natural % view_.shape[axis] * view_.stride[axis];
    natural /= view_.shape[axis];
  }
  return at;
}

double HostTensor::get(std::int64_t natural) const {
  const std::int64_t at = offset(natural);
  switch (view_.dtype) {
    case DType::i32:
      return static_cast<const std::int32_t*>(view_.data)[at];
    case DType::boolean:
      return static_cast<const std::uint8_t*>(view_.data)[at];
    default:
      return load_element(view_.data, view_.dtype, at);
  }
}

void HostTensor::set(std::int64_t natural, double value) {
  const std::int64_t at = offset(natural);
  switch (view_.dtype) {
    case DType::i32:
      static_cast<std::int32_t*>(view_.data)[at] = static_cast<std::int32_t>(value);
      return;
    case DType::boolean:
      static_cast<std::uint8_t*>(view_.data)[at] = value != 0;
      return;
    default:
      store_element(view_.data, view_.dtype, at, static_cast<float>(value));
  }
}

std::vector<double> HostTensor::values() const {
  std::vector<double> out(elements());
  for (std::int64_t n = 0; n < elements(); ++n) out[n] = get(n);
  return out;
}

std::string HostTensor::damage() const {
  const auto width = static_cast<std::int64_t>(size_of(view_.dtype));
  std::vector<bool> element(memory_.size());
  for (std::int64_t n = 0; n < elements(); ++n) {
    const std::byte* at = static_cast<const std::byte*>(view_.data) + offset(n) * width;
    for (std::int64_t byte = 0; byte < width; ++byte) element[at - memory_.data() + byte] = true;
  }
  for (std::size_t n = 0; n < memory_.size(); ++n) {
    if (!element[n] && memory_[n] != poison(view_.dtype, n)) {
      const auto distance = static_cast<const std::byte*>(view_.data) - memory_.data();
      return text("memory outside the tensor was written, ", static_cast<std::int64_t>(n) - distance,
                  " bytes from its first element");
    }
  }
  return {};
}

}  // namespace heddle::kit
