#include "tensors.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <random>

#include "heddle/error.h"

namespace heddle::cli {
namespace {

std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float load(const std::byte* at, DType dtype) {
  if (dtype == DType::f32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, at, 2);
  if (dtype == DType::f16) return static_cast<float>(std::bit_cast<_Float16>(bits));
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

void store(std::byte* at, DType dtype, float value) {
  if (dtype == DType::f32) {
    std::memcpy(at, &value, 4);
    return;
  }
  const std::uint16_t bits =
      dtype == DType::f16 ? std::bit_cast<std::uint16_t>(static_cast<_Float16>(value)) : to_bf16(value);
  std::memcpy(at, &bits, 2);
}

bool floating(DType dtype) { return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16; }

}  // namespace

HostTensor::HostTensor(DType dtype, const std::vector<std::int64_t>& shape) {
  if (shape.empty() || shape.size() > kMaxRank) {
    throw Error("a tensor of " + std::to_string(shape.size()) + " dimensions: it must have from 1 to " +
                std::to_string(kMaxRank));
  }
  std::int64_t bytes = static_cast<std::int64_t>(size_of(dtype));
  view_.dtype = dtype;
  view_.rank = static_cast<int>(shape.size());
  for (int i = 0; i < view_.rank; ++i) {
    if (shape[i] < 0 || __builtin_mul_overflow(bytes, shape[i], &bytes)) {
      throw Error("a tensor with extent " + std::to_string(shape[i]) + " in dimension " + std::to_string(i) +
                  ": extents must be at least 0 and the bytes fit 63 bits");
    }
    view_.shape[i] = shape[i];
  }
  view_.stride = contiguous_strides(view_.rank, view_.shape);
  bytes_ = static_cast<std::size_t>(bytes);
  memory_.reset(static_cast<std::byte*>(std::aligned_alloc(64, std::max<std::size_t>((bytes_ + 63) / 64 * 64, 64))));
  if (!memory_) throw std::bad_alloc();
  view_.data = memory_.get();
}

void HostTensor::reverse_strides() {
  std::int64_t step = 1;
  for (int i = 0; i < view_.rank; ++i) {
    view_.stride[i] = step;
    step *= std::max<std::int64_t>(view_.shape[i], 1);
  }
}

TensorView StandIns::tensor(DType dtype, const std::vector<std::int64_t>& shape) {
  TensorView view;
  view.dtype = dtype;
  view.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  place(view);
  return view;
}

void StandIns::place(TensorView& view) {
  if (!view.given()) return;
  view.stride = contiguous_strides(view.rank, view.shape);
  view.device = device_;
  view.data = nullptr;
  view.alignment = 256;  // as libraries allocate
}

TensorView StandIns::indices(const std::vector<std::int32_t>& values, const std::vector<std::int64_t>& shape) {
  if (device_ != Device::cpu) return tensor(DType::i32, shape);
  indices_.emplace_back(DType::i32, shape);
  std::copy(values.begin(), values.end(), static_cast<std::int32_t*>(indices_.back().view().data));
  return indices_.back().view();
}

HostTensor converted(const TensorView& from, DType dtype) {
  if (from.dtype != dtype && !(floating(from.dtype) && floating(dtype))) {
    throw Error(std::string("a tensor of ") + name_of(from.dtype) + " cannot be converted to " + name_of(dtype));
  }
  HostTensor to(dtype, std::vector<std::int64_t>(from.shape.begin(), from.shape.begin() + from.rank));
  const std::size_t from_size = size_of(from.dtype), to_size = size_of(dtype);
  const auto* source = static_cast<const std::byte*>(from.data);
  std::array<std::int64_t, kMaxRank> index{};
  for (std::int64_t n = 0, count = from.elements(); n < count; ++n) {
    std::int64_t offset = 0;
    for (int i = 0; i < from.rank; ++i) offset += index[i] * from.stride[i];
    const std::byte* at = source + offset * static_cast<std::int64_t>(from_size);
    std::byte* out = to.data() + static_cast<std::size_t>(n) * to_size;
    if (from.dtype == dtype) {
      std::memcpy(out, at, to_size);
    } else {
      store(out, dtype, load(at, from.dtype));
    }
    for (int i = from.rank; i-- > 0 && ++index[i] == from.shape[i];) index[i] = 0;
  }
  return to;
}

void fill_normal(const TensorView& view, unsigned seed) {
  // A table of 64 Ki numbers, read from a place that changes with each pass over it: fast, and no two rows agree.
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> table(1 << 16);
  for (float& value : table) value = normal(random);
  auto* out = static_cast<std::byte*>(view.data);
  const std::size_t size = size_of(view.dtype);
  const std::int64_t count = view.elements();
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i + 977 * (i >> 16)) & 0xffff;
    store(out + static_cast<std::size_t>(i) * size, view.dtype, table[at]);
  }
}

DType dtype_named(const std::string& name) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    if (name == name_of(dtype)) return dtype;
  }
  if (name == "f32" || name == "fp32") return DType::f32;
  if (name == "f16" || name == "fp16") return DType::f16;
  if (name == "bf16") return DType::bf16;
  throw Error("dtype is '" + name + "': it must be f32, f16 or bf16");
}

}  // namespace heddle::cli
