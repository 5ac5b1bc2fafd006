// Tensors for calls made from bytes: each lies in a heap block of exactly the bytes that it spans, so that an access
// outside it is caught.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "bytes.h"
#include "heddle/tensor.h"

namespace heddle::fuzz {

class DrawnTensors {
 protected:
  using Shape = std::vector<std::int64_t>;

  DrawnTensors(const std::uint8_t* data, std::size_t size) : bytes_(data, size) {}

  // A view of its own block, in which elements count up from small values.
  TensorView view(Shape shape, DType dtype, bool output = false) {
    if (bytes_.rarely(64)) return {};
    if (bytes_.rarely(32)) dtype = static_cast<DType>(bytes_.below(8));
    if (bytes_.rarely(32) && shape.size() < kMaxRank) shape.insert(shape.begin(), bytes_.below(3));
    if (bytes_.rarely(32) && shape.size() > 1) shape.pop_back();
    if (bytes_.rarely(16)) shape[bytes_.below(shape.size())] = bytes_.below(24);
    TensorView out;
    out.dtype = dtype;
    out.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), out.shape.begin());
    out.stride = contiguous_strides(out.rank, out.shape);
    if (bytes_.rarely(8)) {
      for (int i = 0; i < out.rank; ++i) {
        const std::int64_t bend = bytes_.below(8);
        if (bend == 1) out.stride[i] = 0;
        if (bend == 2) out.stride[i] *= 2;
        if (bend == 3) out.stride[i] = -out.stride[i];
        if (bend == 4) out.stride[i] += bytes_.below(5);
      }
    }
    std::int64_t low = 0, high = 0;
    bool empty = false;
    for (int i = 0; i < out.rank; ++i) {
      const std::int64_t reach = out.stride[i] * (out.shape[i] - 1);
      empty |= out.shape[i] == 0;
      (reach < 0 ? low : high) += reach;
    }
    const std::size_t count = empty ? 0 : static_cast<std::size_t>(high - low + 1);
    if (count > kMaxElements) return {};
    blocks_.push_back(std::make_unique<std::byte[]>(count * size_of(dtype)));
    std::byte* data = blocks_.back().get();
    if (!output) fill(data, count, dtype);
    // Impossible strides and extents, which must be refused before anything is read.
    if (bytes_.rarely(64)) out.stride[bytes_.below(out.rank)] = INT64_MAX - bytes_.below(3);
    if (bytes_.rarely(64)) out.shape[bytes_.below(out.rank)] = bytes_.rarely(2) ? -1 : INT64_MAX;
    out.data = bytes_.rarely(128) ? nullptr : data - low * static_cast<std::int64_t>(size_of(dtype));
    return sound(out, count) ? out : poisoned(out);
  }

  // Whether every element of the view lies in a block of `count` elements.
  static bool sound(const TensorView& v, std::size_t count) {
    __int128 span = 1;
    for (int i = 0; i < v.rank; ++i) {
      if (v.shape[i] < 0) return false;
      if (v.shape[i] == 0) return true;
    }
    for (int i = 0; i < v.rank; ++i) {
      const __int128 stride = v.stride[i] < 0 ? -static_cast<__int128>(v.stride[i]) : v.stride[i];
      span += stride * (v.shape[i] - 1);
    }
    return span <= static_cast<__int128>(count);
  }
  // Views that promise more than their block has are only fair if the checks must refuse them: those with a negative
  // extent, or that span more than any memory.
  static TensorView poisoned(TensorView v) {
    __int128 span = 0;
    for (int i = 0; i < v.rank; ++i) {
      if (v.shape[i] < 0) return v;
      const __int128 stride = v.stride[i] < 0 ? -static_cast<__int128>(v.stride[i]) : v.stride[i];
      if (v.shape[i] > 1) span += stride * (v.shape[i] - 1);
      if (span > (static_cast<__int128>(1) << 58)) return v;
    }
    return {};
  }

  void fill(std::byte* data, std::size_t count, DType dtype) {
    const int salt = bytes_.next();
    for (std::size_t i = 0; i < count; ++i) {
      const int value = static_cast<int>((i * 7 + static_cast<std::size_t>(salt)) % 13) - 6;
      switch (dtype) {
        case DType::f32:
          reinterpret_cast<float*>(data)[i] = static_cast<float>(value) / 4;
          break;
        case DType::i32:
          reinterpret_cast<std::int32_t*>(data)[i] = value;
          break;
        case DType::boolean:
          data[i] = static_cast<std::byte>(value > -4);
          break;
        case DType::f8e4m3:
        case DType::u8:
        case DType::i8:
          data[i] = static_cast<std::byte>(0x38 + value);
          break;
        // Exponents near 1 in both 16-bit formats.
        default:
          reinterpret_cast<std::uint16_t*>(data)[i] = static_cast<std::uint16_t>(0x3c00 + value * 16);
          break;
      }
    }
    if (salt == 255 && dtype == DType::f32 && count > 0) {
      const std::uint32_t special = bytes_.rarely(2) ? 0x7fc00000u : 0x7f800000u;
      std::memcpy(data, &special, 4);
    }
  }

  // Index data: `values`, unless bytes bend one of them, the dtype or the length.
  TensorView indices(std::vector<std::int32_t> values, Shape shape) {
    for (auto& value : values) {
      if (bytes_.rarely(32)) value = static_cast<std::int8_t>(bytes_.next());
      if (bytes_.rarely(128)) value = INT32_MAX;
      if (bytes_.rarely(128)) value = INT32_MIN;
    }
    if (bytes_.rarely(32)) {
      values.resize(values.size() + 1);
      shape = {static_cast<std::int64_t>(values.size())};
    }
    blocks_.push_back(std::make_unique<std::byte[]>(values.size() * 4));
    if (!values.empty()) std::memcpy(blocks_.back().get(), values.data(), values.size() * 4);
    TensorView out;
    out.data = blocks_.back().get();
    out.dtype = bytes_.rarely(64) ? DType::f32 : DType::i32;
    out.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), out.shape.begin());
    out.stride = contiguous_strides(out.rank, out.shape);
    return out;
  }

  // Lists of key blocks. Any number is a block's or none's: the last that there is and the one behind it, positions
  // taken for blocks, the ends of 32 bits. A list may be in any order and name a block twice. List n has entries
  // [at[n], at[n + 1]).
  std::vector<std::int32_t> list_entries(const std::vector<std::int32_t>& at, std::int64_t keys) {
    const std::array<std::int32_t, 8> numbers = {static_cast<std::int32_t>(keys - 1),
                                                 static_cast<std::int32_t>(keys),
                                                 static_cast<std::int32_t>((keys - 1) / 16),
                                                 static_cast<std::int32_t>((keys - 1) / 16 + 1),
                                                 INT32_MAX,
                                                 INT32_MIN,
                                                 INT32_MAX / 16 + 1,
                                                 -1};
    std::vector<std::int32_t> out;
    for (std::size_t n = 0; n + 1 < at.size(); ++n) {
      const std::int64_t way = bytes_.below(4);
      for (std::int32_t i = at[n]; i < at[n + 1]; ++i) {
        out.push_back(bytes_.rarely(8) ? numbers[bytes_.below(8)] : static_cast<std::int32_t>(bytes_.below(5) - 1));
        if (way == 1) out.back() = out[at[n]];
      }
      if (way >= 2) std::sort(out.begin() + at[n], out.end());
      if (way == 3) std::reverse(out.begin() + at[n], out.end());
    }
    return out;
  }

  Bytes bytes_;

 private:
  static constexpr std::size_t kMaxElements = 1 << 18;

  std::vector<std::unique_ptr<std::byte[]>> blocks_;
};

}  // namespace heddle::fuzz
