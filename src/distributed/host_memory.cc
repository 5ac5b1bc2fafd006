// The host's memory.
#include <cstring>
#include <new>

#include "core/dtypes.h"
#include "distributed/gpu_memory.h"
#include "distributed/memory.h"

namespace heddle::distributed {
namespace {

constexpr std::align_val_t kAlign{64};

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

// Calls use(from, to), where a row of a head begins in each.
template <class Use>
void for_each_row(const TensorView& from, const TensorView& to, std::span<const RowMove> moves, const Use& use) {
  for (std::int64_t b = 0; b < from.shape[0]; ++b) {
    for (const RowMove& move : moves) {
      for (std::int64_t n = 0; n < move.count; ++n) {
        for (std::int64_t head = 0; head < from.shape[2]; ++head) {
          use(at(from, b, move.from + move.from_step * n, head), at(to, b, move.to + move.to_step * n, head));
        }
      }
    }
  }
}

class HostMemory : public Memory {
 public:
  Device device() const override { return Device::cpu; }
  void use_stream(void*) override {}
  void end_of_call() noexcept override {}

  void* replace(void* old, std::size_t bytes) override {
    if (old != nullptr) give_back(old);
    return ::operator new(bytes, kAlign);
  }
  void give_back(void* data) noexcept override { ::operator delete(data, kAlign); }

  void write(void* to, const void* from, std::size_t bytes) override { copy(to, from, bytes); }
  void read(void* to, const void* from, std::size_t bytes) override { copy(to, from, bytes); }
  void copy(void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void fill(std::span<float> x, float value) override { std::ranges::fill(x, value); }
  void add(std::span<float> sum, std::span<const float> x) override {
    for (std::size_t n = 0; n < x.size(); ++n) sum[n] += x[n];
  }
  using Memory::copy_rows;
  void copy_rows(const TensorView& from, const TensorView& to, std::span<const RowMove> moves) override {
    for_each_row(from, to, moves, [&](const std::byte* source, std::byte* target) {
      copy_numbers(source, from.stride[3], from.dtype, target, to.stride[3], to.dtype, from.shape[3]);
    });
  }
  // Both have a head's numbers side by side.
  void add_rows(const TensorView& from, const TensorView& to, std::span<const RowMove> moves) override {
    for_each_row(from, to, moves, [&](const std::byte* source, std::byte* target) {
      const auto* x = reinterpret_cast<const float*>(source);
      auto* sum = reinterpret_cast<float*>(target);
      for (std::int64_t n = 0; n < from.shape[3]; ++n) sum[n] += x[n];
    });
  }
};

}  // namespace

Memory& host_memory() {
  static HostMemory memory;
  return memory;
}

std::unique_ptr<Memory> memory_on(Device device) {
  if (device == Device::cuda) return gpu_memory();
  return std::make_unique<HostMemory>();
}

}  // namespace heddle::distributed
