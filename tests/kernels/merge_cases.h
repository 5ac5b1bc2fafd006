// What comes of partial results to the bit, and how far from the reference in doubles a merge may be: for the tests of
// every device.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "heddle/partial.h"
#include "kit/host_tensor.h"
#include "kit/merge_case.h"

namespace heddle::kit {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// |found - exact| <= steps * 2^-24 * size, and half a unit in the last place of its dtype.
inline void expect_near(const HostTensor& found, const std::vector<double>& exact, double steps, double size) {
  ASSERT_EQ(found.elements(), std::ssize(exact));
  const DType dtype = found.view().dtype;
  const double half_ulp = dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
  for (std::int64_t n = 0; n < found.elements(); ++n) {
    const double error = std::abs(found.get(n) - exact[n]);
    if (exact[n] == -kInfinity) {
      ASSERT_EQ(found.get(n), exact[n]) << "element " << n;
    } else {
      ASSERT_TRUE(error <= steps * 0x1p-24 * size + half_ulp * std::abs(exact[n]))
          << "element " << n << ": " << found.get(n) << ", exact " << exact[n];
    }
  }
  EXPECT_EQ(found.damage(), "");
}

// Whether an o is the one in f32 rounded once.
inline bool is_rounded(const HostTensor& o, const HostTensor& wide) {
  HostTensor rounded = o;
  for (std::int64_t n = 0; n < wide.elements(); ++n) rounded.set(n, wide.get(n));
  return rounded.same_bits(o);
}

inline double largest(const HostTensor& x) {
  double out = 0;
  for (double value : x.values()) out = std::isfinite(value) ? std::max(out, std::abs(value)) : out;
  return out;
}

// merge_attention(partials, o, lse, {.sink}), on any device, of contiguous tensors in host memory.
using MergeCall =
    std::function<void(std::span<const Partial>, const TensorView& o, const TensorView& lse, const TensorView& sink)>;

// Rows of one head of one number each.
struct Tiny {
  std::vector<std::vector<float>> o, lse;
  std::vector<float> sink, to, to_lse;

  void run(const MergeCall& merge) {
    std::vector<Partial> partials;
    const auto rows = std::ssize(o[0]);
    for (std::size_t n = 0; n < o.size(); ++n) {
      partials.push_back(
          {TensorView(o[n].data(), DType::f32, {1, rows, 1, 1}), TensorView(lse[n].data(), DType::f32, {1, 1, rows})});
    }
    to.assign(o[0].size(), -7);
    to_lse = to;
    merge(partials, TensorView(to.data(), DType::f32, {1, rows, 1, 1}),
          TensorView(to_lse.data(), DType::f32, {1, 1, rows}),
          sink.empty() ? TensorView() : TensorView(sink.data(), DType::f32, {1}));
  }
};

inline void expect_rows_without_keys(const MergeCall& merge) {
  const float none = -std::numeric_limits<float>::infinity(), nan = std::nanf("");
  Tiny tiny{{{nan, 5}, {nan, nan}}, {{none, 2}, {none, none}}, {}, {}, {}};
  tiny.run(merge);
  EXPECT_EQ(tiny.to, (std::vector<float>{0, 5}));
  EXPECT_EQ(tiny.to_lse, (std::vector<float>{none, 2}));
  tiny.sink = {0.75f};
  tiny.run(merge);
  EXPECT_EQ(tiny.to[0], 0);
  EXPECT_EQ(tiny.to_lse[0], 0.75f);
  EXPECT_NEAR(tiny.to_lse[1], std::log(std::exp(2.0) + std::exp(0.75)), 1e-6);
  EXPECT_NEAR(tiny.to[1], 5 * std::exp(2.0) / (std::exp(2.0) + std::exp(0.75)), 1e-6);
  tiny.sink = {none};
  tiny.run(merge);
  EXPECT_EQ(tiny.to, (std::vector<float>{0, 5}));
  EXPECT_EQ(tiny.to_lse, (std::vector<float>{none, 2}));
}

inline void expect_nan_stays(const MergeCall& merge) {
  const float none = -std::numeric_limits<float>::infinity(), nan = std::nanf(""), large = -none;
  //           o NaN    lse NaN  lse NaN beside none  lse inf  far below, o NaN
  Tiny tiny{{{nan, 1, 1, 1, nan}, {2, 2, 2, 2, 2}}, {{1, nan, nan, large, -200}, {1, 1, none, 1, 200}}, {}, {}, {}};
  tiny.run(merge);
  for (std::size_t n = 0; n < tiny.to.size(); ++n) EXPECT_TRUE(std::isnan(tiny.to[n])) << n;
  EXPECT_NEAR(tiny.to_lse[0], 1 + std::log(2.0), 1e-6);
  for (const int n : {1, 2, 3}) EXPECT_TRUE(std::isnan(tiny.to_lse[n])) << n;
  EXPECT_EQ(tiny.to_lse[4], 200);
}

// A bias of the lowest floats in all of a row's keys: nothing overflows on the way.
inline void expect_far_logarithms(const MergeCall& merge) {
  const float lowest = std::numeric_limits<float>::lowest();
  Tiny tiny{{{1, 1}, {3, 3}}, {{lowest, -3e38f}, {lowest, 3e38f}}, {}, {}, {}};
  tiny.run(merge);
  EXPECT_EQ(tiny.to, (std::vector<float>{2, 3}));
  EXPECT_EQ(tiny.to_lse, (std::vector<float>{lowest, 3e38f}));
}

// Alone, and beside others that have no keys.
inline void expect_one_comes_back(const MergeCall& merge) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    MergeCase spec = merge_case("two");
    spec.dtype = dtype;
    const MergeData parts(spec);
    HostTensor o = parts.rows(dtype), lse = parts.per_row(), empty_o = parts.rows(dtype), empty_lse = parts.per_row();
    for (std::int64_t n = 0; n < o.elements(); ++n) o.set(n, n % 9 == 0 ? -0.0 : std::sin(static_cast<double>(n)));
    for (std::int64_t n = 0; n < lse.elements(); ++n) lse.set(n, 40 * std::cos(static_cast<double>(n)));
    for (std::int64_t n = 0; n < lse.elements(); ++n) empty_lse.set(n, -kInfinity);
    const Partial one{o.view(), lse.view()}, empty{empty_o.view(), empty_lse.view()};
    for (const auto& partials : {std::vector{one}, {one, empty}, {empty, one, empty}}) {
      const HostTensor to = parts.rows(dtype), to_lse = parts.per_row();
      merge(partials, to.view(), to_lse.view(), {});
      EXPECT_TRUE(to.same_bits(o)) << partials.size();
      EXPECT_TRUE(to_lse.same_bits(lse)) << partials.size();
    }
  }
}

}  // namespace heddle::kit
