// Non-owning views of tensors. Heddle never owns or copies a caller's data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace heddle {

// f8e4m3: 4 bits of exponent, 3 of mantissa, no infinity, largest 448 ("E4M3" of Micikevicius et al., arXiv
// 2209.05433). u8 and i8 are codes and small integers of low-bit weights; attention takes neither.
enum class DType : std::uint8_t { f32, f16, bf16, i32, boolean, f8e4m3, u8, i8 };

// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  if (dtype == DType::f32 || dtype == DType::i32) return 4;
  return dtype == DType::f16 || dtype == DType::bf16 ? 2 : 1;
}
// "float32", "float16", "bfloat16", "int32", "bool", "float8_e4m3fn", "uint8", "int8".
const char* name_of(DType dtype);

enum class Device : std::uint8_t { cpu, cuda };

constexpr int kMaxRank = 4;

// A strided view. A default-constructed view is "not given"; a given view has rank >= 1 and may hold 0 elements.
// Strides are counted in elements and may be 0 (broadcast) or negative for tensors that are only read.
// Where an operation is only asked about (its workspace, its candidates), views may have no data yet: data is null, and
// `alignment` says what it will be.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device = Device::cpu;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> stride{};
  int alignment = 16;  // of a view without data: the bytes that its data will be a multiple of, a power of two

  TensorView() = default;
  // Row-major contiguous view. Throws Error if the rank is above kMaxRank or an extent is negative.
  TensorView(const void* data, DType dtype, std::initializer_list<std::int64_t> shape);
  // View with explicit strides (elements), one for each extent.
  TensorView(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
             std::initializer_list<std::int64_t> stride);

  bool given() const { return rank > 0; }
  std::int64_t elements() const;
  bool contiguous() const;
  // "[2, 128, 8, 64]"
  std::string shape_text() const;
};

// Row-major strides of `shape`.
std::array<std::int64_t, kMaxRank> contiguous_strides(int rank, const std::array<std::int64_t, kMaxRank>& shape);

}  // namespace heddle
