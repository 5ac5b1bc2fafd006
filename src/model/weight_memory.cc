#include "model/weight_memory.h"

#include <cstring>
#include <new>

#include "core/dtypes.h"
#include "cpu/row_ops.h"
#include "cuda/model.h"

namespace heddle {
namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

void WeightMemory::Free::operator()(std::byte* data) const {
  device == Device::cuda ? cuda::free_on_gpu(data) : ::operator delete(data, kAlignment);
}

WeightMemory::WeightMemory(std::size_t bytes)
    : data_(static_cast<std::byte*>(::operator new(bytes, kAlignment)), Free{Device::cpu}), size_(bytes) {}

WeightMemory::WeightMemory(const float* values, std::size_t count, DType dtype, Device device)
    : WeightMemory(count * size_of(dtype)) {
  if (dtype == DType::f32) {
    std::memcpy(data(), values, size_);
  } else if (dtype == DType::bf16) {
    narrow(values, static_cast<std::int64_t>(count), reinterpret_cast<std::uint16_t*>(data()));
  } else {
    for (std::size_t i = 0; i < count; ++i) store_element(data(), dtype, static_cast<std::int64_t>(i), values[i]);
  }
  move_to(device);
}

void WeightMemory::move_to(Device device) {
  if (device == Device::cpu || size_ == 0) return;
  data_ = {cuda::copied_to_gpu(data(), size_), Free{Device::cuda}};
}

}  // namespace heddle
