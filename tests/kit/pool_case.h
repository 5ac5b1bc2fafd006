// Cases of pool_keys, and what makes its results right.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <random>
#include <vector>

#include "heddle/nsa.h"
#include "kit/host_tensor.h"
#include "kit/indices.h"

namespace heddle::kit {

using std::int64_t;

struct PoolCase {
  const char* name;
  DType dtype;
  int64_t B, S, H, D, block, stride;
  std::vector<int64_t> starts = {};  // cu_seqlens
  std::vector<int64_t> used = {};
  Layout layout = Layout::contiguous;
};
inline void PrintTo(const PoolCase& c, std::ostream* out) { *out << c.name; }

inline const std::vector<PoolCase>& pool_cases() {
  using enum DType;
  static const std::vector<PoolCase> all = {
      {"plain", f32, 2, 200, 2, 64, 64, 64},
      {"overlapping", f32, 2, 150, 3, 40, 32, 16},
      {"not_a_divisor", f32, 1, 61, 2, 33, 10, 3},
      {"bf16", bf16, 2, 130, 2, 128, 32, 16},
      {"f16", f16, 1, 130, 2, 31, 16, 16},
      {"one_key", f32, 1, 9, 2, 5, 1, 1},
      {"block_of_all", f32, 2, 48, 1, 8, 48, 5},
      {"shorter_than_a_block", f32, 2, 47, 1, 8, 48, 5},
      {"no_keys", f32, 2, 0, 1, 8, 4, 4},
      {"one_dim", f32, 1, 70, 3, 1, 8, 4},
      {"wide", f32, 1, 70, 2, 515, 16, 8},
      {"widest_head_bf16", bf16, 1, 70, 2, 256, 16, 8},
      {"packed", f32, 6, 300, 2, 24, 32, 16, {0, 0, 31, 63, 63, 200, 300}},
      {"packed_odd", bf16, 5, 100, 1, 17, 7, 3, {0, 6, 13, 14, 50, 100}},
      {"packed_none", f32, 2, 0, 1, 8, 4, 4, {0, 0, 0}},
      {"packed_one", f16, 1, 65, 2, 8, 64, 64, {0, 65}},
      {"used", f32, 4, 90, 2, 16, 16, 8, {}, {0, 15, 40, 90}},
      {"packed_used", f32, 3, 90, 2, 16, 16, 8, {0, 30, 30, 90}, {17, 0, 59}},
      {"heads_first", f32, 2, 90, 4, 24, 16, 8, {}, {}, Layout::heads_first},
      {"padded", bf16, 2, 90, 4, 24, 16, 8, {}, {}, Layout::padded_rows},
      {"every_third", f16, 2, 90, 4, 24, 16, 8, {}, {}, Layout::strided_dim},
      {"backwards", f32, 2, 90, 4, 24, 16, 8, {}, {}, Layout::reversed},
      {"shared", f32, 2, 90, 4, 24, 16, 8, {}, {}, Layout::expanded},
  };
  return all;
}

// A case's tensors, and what it is asked for.
class PoolTest : public ::testing::TestWithParam<PoolCase> {
 protected:
  PoolTest() {
    options.block = s.block;
    options.stride = s.stride;
    if (packed()) starts = indices(s.starts), options.cu_seqlens = starts.view();
    if (!s.used.empty()) used = indices(s.used), options.seqused = used.view();
  }
  bool packed() const { return !s.starts.empty(); }
  int64_t rows() const {
    if (packed()) return s.S / s.stride;
    return s.S < s.block ? 0 : (s.S - s.block) / s.stride + 1;
  }
  HostTensor tensor(int64_t rows, bool output) const {
    const std::vector<int64_t> shape = packed() ? std::vector{rows, s.H, s.D} : std::vector{s.B, rows, s.H, s.D};
    const bool read_only = s.layout == Layout::reversed || s.layout == Layout::expanded;
    if (output) return HostTensor::output(s.dtype, shape, read_only ? Layout::contiguous : s.layout);
    HostTensor out = HostTensor::input(s.dtype, shape, s.layout);
    std::mt19937_64 random(5);
    std::normal_distribution<double> normal;
    for (int64_t n = 0; n < out.elements(); ++n) out.set(n, normal(random));
    return out;
  }
  // |found - exact|: `terms` numbers up to `size` are summed and divided in f32, and the result is rounded.
  void expect_near(const HostTensor& found, const std::vector<double>& exact, int64_t terms,
                   const HostTensor& of) const {
    double size = 0;
    for (const double value : of.values()) size = std::max(size, std::abs(value));
    size *= static_cast<double>(terms) / static_cast<double>(s.block);
    const double half_ulp = s.dtype == DType::f32 ? 0x1p-24 : s.dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
    const std::vector<double> values = found.values();
    ASSERT_EQ(values.size(), exact.size());
    for (std::size_t n = 0; n < exact.size(); ++n) {
      const double bound = static_cast<double>(terms) * 0x1p-24 * size + half_ulp * std::abs(exact[n]) + 0x1p-25;
      ASSERT_TRUE(std::abs(values[n] - exact[n]) <= bound)
          << "element " << n << ": " << values[n] << ", exact " << exact[n];
      ASSERT_TRUE(exact[n] != 0 || values[n] == 0) << "element " << n << ": " << values[n];
    }
    EXPECT_EQ(found.damage(), "");
  }

  const PoolCase s = GetParam();
  HostTensor starts, used;
  PoolOptions options;
};

}  // namespace heddle::kit
