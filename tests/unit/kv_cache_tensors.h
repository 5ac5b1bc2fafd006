// Strided tensors with guard zones, and rotary embedding in double precision, for the tests of rotary and caches.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/dtypes.h"
#include "heddle/attention.h"
#include "heddle/error.h"
#include "heddle/kv_cache.h"

namespace heddle::kv_cache_tests {

inline constexpr DType kDTypes[] = {DType::f32, DType::f16, DType::bf16};

// A tensor with strides of any order, gaps and a guard zone before and after its elements; every byte that no element
// occupies holds a pattern that guards_intact() looks for.
class Tensor {
 public:
  // order: axes from the slowest to the fastest; pad: elements added to each axis' reach.
  Tensor(DType dtype, std::vector<std::int64_t> shape, std::vector<int> order = {}, std::int64_t pad = 0)
      : dtype_(dtype), shape_(std::move(shape)), stride_(shape_.size()) {
    if (order.empty()) {
      for (std::size_t i = 0; i < shape_.size(); ++i) order.push_back(static_cast<int>(i));
    }
    std::int64_t step = 1;
    for (std::size_t i = order.size(); i-- > 0;) {
      stride_[order[i]] = step;
      step = step * std::max<std::int64_t>(shape_[order[i]], 1) + pad;
    }
    bytes_.assign(static_cast<std::size_t>(2 * kGuard + step) * size_of(dtype), kPattern);
  }

  TensorView view() const {
    TensorView view;
    view.data = const_cast<std::byte*>(bytes_.data()) + kGuard * size_of(dtype_);
    view.dtype = dtype_;
    view.rank = static_cast<int>(shape_.size());
    std::copy(shape_.begin(), shape_.end(), view.shape.begin());
    std::copy(stride_.begin(), stride_.end(), view.stride.begin());
    return view;
  }

  std::int64_t at(std::vector<std::int64_t> index) const {
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < index.size(); ++i) offset += index[i] * stride_[i];
    return offset;
  }
  double get(std::vector<std::int64_t> index) const { return load_element(view().data, dtype_, at(std::move(index))); }
  void set(std::vector<std::int64_t> index, float value) {
    store_element(view().data, dtype_, at(std::move(index)), value);
  }

  void for_each(const std::function<void(const std::vector<std::int64_t>&)>& visit) const {
    std::vector<std::int64_t> index(shape_.size(), 0);
    for (std::int64_t n = view().elements(); n > 0; --n) {
      visit(index);
      for (std::size_t i = index.size(); i-- > 0 && ++index[i] == shape_[i];) index[i] = 0;
    }
  }

  void randomize(unsigned seed) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> value(-2.0f, 2.0f);
    for_each([&](const auto& index) { set(index, value(random)); });
  }

  bool guards_intact() const {
    std::vector<std::byte> bytes = bytes_;
    for_each([&](const auto& index) {
      const std::size_t size = size_of(dtype_);
      std::memset(bytes.data() + (kGuard + static_cast<std::size_t>(at(index))) * size, static_cast<int>(kPattern),
                  size);
    });
    return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == kPattern; });
  }

  const std::vector<std::byte>& bytes() const { return bytes_; }
  DType dtype() const { return dtype_; }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr std::byte kPattern{0xA5};
  DType dtype_;
  std::vector<std::int64_t> shape_, stride_;
  std::vector<std::byte> bytes_;
};

inline TensorView indices(const std::vector<std::int32_t>& values) {
  return TensorView(values.data(), DType::i32, {static_cast<std::int64_t>(values.size())});
}

// cos and sin of the usual angles, as [positions, half].
struct Tables {
  Tensor cos, sin;
  Tables(DType dtype, std::int64_t positions, std::int64_t half, std::vector<int> order = {})
      : cos(dtype, {positions, half}, order, 3), sin(dtype, {positions, half}, {}, 1) {
    for (std::int64_t t = 0; t < positions; ++t) {
      for (std::int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(t + 1) * std::pow(100.0, -static_cast<double>(i) / half);
        cos.set({t, i}, static_cast<float>(std::cos(angle)));
        sin.set({t, i}, static_cast<float>(std::sin(angle)));
      }
    }
  }
  Rotary rotary(bool interleaved) const { return {cos.view(), sin.view(), interleaved}; }
};

// Element d of a rotated row, and the sum of magnitudes behind it; `x(d)` reads the row.
struct Expected {
  double value, magnitude;
};
inline Expected rotated(const std::function<double(std::int64_t)>& x, const Tables& tables, std::int64_t half,
                        bool interleaved, std::int64_t position, std::int64_t d) {
  if (d >= 2 * half) return {x(d), 0.0};
  const std::int64_t i = interleaved ? d / 2 : d % half;
  const bool first = interleaved ? d % 2 == 0 : d < half;
  const double a = x(interleaved ? 2 * i : i), b = x(interleaved ? 2 * i + 1 : i + half);
  const double c = tables.cos.get({position, i}), s = tables.sin.get({position, i});
  return {first ? a * c - b * s : a * s + b * c, std::abs(a) + std::abs(b)};
}

// fp32 arithmetic (two roundings of terms, one of their sum) and one rounding to the dtype.
inline double tolerance(DType dtype, const Expected& expected) {
  if (expected.magnitude == 0.0) return 0.0;
  const double unit = dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
  const double arithmetic = expected.magnitude * 3 * 0x1p-24;
  return arithmetic + (dtype == DType::f32 ? 0.0 : unit * (std::abs(expected.value) + arithmetic) + 0x1p-25);
}

inline void expect_near(const Tensor& out, const std::vector<std::int64_t>& index, const Expected& expected) {
  const double error = std::abs(out.get(index) - expected.value);
  EXPECT_TRUE(error <= tolerance(out.dtype(), expected))
      << "at [" << index[0] << ", " << index[1] << ", " << index[2] << ", " << index[3] << "]: " << out.get(index)
      << " and not " << expected.value;
}

#define EXPECT_SAYS(message, part) EXPECT_PRED_FORMAT2(testing::IsSubstring, part, message)

inline std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace heddle::kv_cache_tests
