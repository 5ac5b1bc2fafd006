// merge_attention and its gradients against the reference in doubles; bits that are promised; what is refused.
#include "heddle/partial.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>

#include "kernels/candidates.h"
#include "kit/host_tensor.h"
#include "ops/partial.h"
#include "reference/partial.h"

namespace heddle::kit {
namespace {

using std::int64_t;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Shape {
  const char* name;
  DType dtype;
  std::size_t partials;
  bool packed, sink, d_lse, strided;
  int64_t B, S, H, Dv;
};

const Shape kShapes[] = {
    {"two", DType::f32, 2, false, false, false, false, 2, 7, 3, 32},
    {"sink", DType::f32, 3, false, true, true, false, 2, 7, 3, 33},
    {"packed", DType::f32, 4, true, true, true, false, 1, 40, 2, 7},
    {"strided", DType::f32, 3, false, true, true, true, 2, 9, 4, 40},
    {"one_dim", DType::f32, 2, false, false, true, false, 1, 5, 2, 1},
    {"widest", DType::f32, 2, false, true, false, false, 1, 3, 2, 256},
    {"many", DType::f32, 20, false, true, true, false, 1, 50, 2, 64},
    {"bf16", DType::bf16, 3, false, true, true, false, 2, 7, 3, 48},
    {"f16", DType::f16, 3, true, false, true, true, 1, 30, 3, 24},
};

// Rows of every kind: all parts with keys, some without, one alone, and none.
class Parts {
 public:
  explicit Parts(const Shape& shape) : s(shape) {
    std::mt19937_64 random(11);
    std::normal_distribution<double> normal;
    for (std::size_t n = 0; n < s.partials; ++n) {
      HostTensor o = rows(s.dtype, false), lse = per_row(false);
      for (int64_t k = 0; k < lse.elements(); ++k) lse.set(k, 3 * normal(random));
      for (int64_t k = 0; k < o.elements(); ++k) o.set(k, normal(random));
      for (int64_t b = 0; b < s.B; ++b) {
        for (int64_t h = 0; h < s.H; ++h) {
          for (int64_t i = 0; i < s.S; ++i) {
            const bool without = (i % 4 == 1 && n % 2 == 0) || (i % 4 == 2 && n != 1) || i % 8 == 3;
            if (!without) continue;
            lse.set((b * s.H + h) * s.S + i, -kInfinity);
            // Not read: it may hold anything.
            for (int64_t d = 0; d < s.Dv; ++d) o.set(((b * s.S + i) * s.H + h) * s.Dv + d, std::nan(""));
          }
        }
      }
      o_.push_back(std::move(o));
      lse_.push_back(std::move(lse));
      partials.push_back({o_.back().view(), lse_.back().view()});
    }
    if (s.sink) {
      sink = HostTensor::input(DType::f32, {s.H});
      for (int64_t h = 0; h < s.H; ++h) sink.set(h, normal(random));
    }
    d_o = rows(DType::f32, false);
    for (int64_t k = 0; k < d_o.elements(); ++k) d_o.set(k, normal(random));
    if (s.d_lse) {
      d_lse = per_row(false);
      for (int64_t k = 0; k < d_lse.elements(); ++k) d_lse.set(k, normal(random));
    }
  }

  HostTensor rows(DType dtype, bool output = true) const {
    return tensor(dtype, s.packed ? std::vector{s.S, s.H, s.Dv} : std::vector{s.B, s.S, s.H, s.Dv}, output);
  }
  HostTensor per_row(bool output = true) const {
    return tensor(DType::f32, s.packed ? std::vector{s.H, s.S} : std::vector{s.B, s.H, s.S}, output);
  }
  MergeProblem problem() const {
    return checked_merge_problem(Check("merge_attention"), partials, sink.view(), {}, {});
  }
  MergeBackwardProblem backward_problem(const std::vector<Partial>& gradients) const {
    return checked_merge_backward_problem(Check("merge_attention_backward"), partials, sink.view(), d_o.view(),
                                          d_lse.view(), gradients, {});
  }

  const Shape s;
  std::vector<Partial> partials;
  HostTensor sink, d_o, d_lse;

 private:
  HostTensor tensor(DType dtype, std::vector<int64_t> shape, bool output) const {
    const Layout layout = s.strided ? Layout::padded_rows : Layout::contiguous;
    return output ? HostTensor::output(dtype, std::move(shape), layout)
                  : HostTensor::input(dtype, std::move(shape), layout);
  }
  std::vector<HostTensor> o_, lse_;
};

// |found - exact| <= steps * 2^-24 * size, and half a unit in the last place of its dtype.
void expect_near(const HostTensor& found, const std::vector<double>& exact, double steps, double size) {
  ASSERT_EQ(found.elements(), std::ssize(exact));
  const DType dtype = found.view().dtype;
  const double half_ulp = dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
  for (int64_t n = 0; n < found.elements(); ++n) {
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

double largest(const HostTensor& x) {
  double out = 0;
  for (double value : x.values()) out = std::isfinite(value) ? std::max(out, std::abs(value)) : out;
  return out;
}

class MergeAttention : public ::testing::TestWithParam<Shape> {};

TEST_P(MergeAttention, MatchesReference) {
  const Parts parts(GetParam());
  const reference::Merged exact = reference::merge_attention(parts.problem());
  double size = 0;
  for (double x : exact.o) size = std::max(size, std::abs(x));
  on_each_target([&] {
    for (const DType dtype : {DType::f32, parts.s.dtype}) {
      const HostTensor o = parts.rows(dtype), lse = parts.per_row();
      merge_attention(parts.partials, o.view(), lse.view(), {.sink = parts.sink.view()});
      // A product, a sum and a rounded exponential for each part, and the division; parts cancel at most to nothing.
      expect_near(o, exact.o, 2 * static_cast<double>(parts.s.partials) + 3, 4 * size);
      expect_near(lse, exact.lse, 1, 1);
      const HostTensor alone = parts.rows(dtype);
      merge_attention(parts.partials, alone.view(), {}, {.sink = parts.sink.view()});
      EXPECT_TRUE(alone.same_bits(o));
    }
  });
}

TEST_P(MergeAttention, GradientsMatchReference) {
  const Parts parts(GetParam());
  on_each_target([&] {
    std::vector<HostTensor> o, lse;
    std::vector<Partial> gradients;
    for (std::size_t n = 0; n < parts.s.partials; ++n) {
      o.push_back(parts.rows(parts.s.dtype));
      lse.push_back(parts.per_row());
      gradients.push_back({o.back().view(), lse.back().view()});
    }
    const reference::MergedBackward exact = reference::merge_attention_backward(parts.backward_problem(gradients));
    HostTensor dsink;
    if (parts.s.sink) dsink = HostTensor::output(DType::f32, {parts.s.H});
    merge_attention_backward(parts.partials, parts.d_o.view(), parts.d_lse.view(), gradients, dsink.view(),
                             {.sink = parts.sink.view()});
    const double d_o = largest(parts.d_o), dims = static_cast<double>(parts.s.Dv);
    for (std::size_t n = 0; n < parts.s.partials; ++n) {
      expect_near(o[n], exact.partials[n].o, 2, d_o);
      // Dot products of Dv terms, each at most the product of the largest; values of o are below 6.
      expect_near(lse[n], exact.partials[n].lse, dims, 6 * d_o * std::sqrt(dims));
    }
    if (parts.s.sink) {
      expect_near(dsink, exact.dsink, dims, 6 * d_o * std::sqrt(dims) * static_cast<double>(parts.s.S * parts.s.B));
    }
    // One gradient alone is what it is beside the others.
    std::vector<Partial> one(parts.s.partials);
    const HostTensor alone = parts.per_row();
    one[1].lse = alone.view();
    merge_attention_backward(parts.partials, parts.d_o.view(), parts.d_lse.view(), one, {},
                             {.sink = parts.sink.view()});
    EXPECT_TRUE(alone.same_bits(lse[1]));
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, MergeAttention, ::testing::ValuesIn(kShapes),
                         [](const auto& info) { return std::string(info.param.name); });

// Of the loss sum(d_o o) + sum(d_lse lse), by differences in double of the reference's own forward.
TEST(MergeAttentionReference, GradientsAreDerivatives) {
  Parts parts(kShapes[1]);
  std::vector<HostTensor> o, lse;
  std::vector<Partial> gradients;
  for (std::size_t n = 0; n < parts.s.partials; ++n) {
    o.push_back(parts.rows(DType::f32));
    lse.push_back(parts.per_row());
    gradients.push_back({o.back().view(), lse.back().view()});
  }
  const reference::MergedBackward found = reference::merge_attention_backward(parts.backward_problem(gradients));
  const auto loss = [&] {
    const reference::Merged merged = reference::merge_attention(parts.problem());
    double sum = 0;
    for (std::size_t n = 0; n < merged.o.size(); ++n) sum += parts.d_o.get(static_cast<int64_t>(n)) * merged.o[n];
    for (std::size_t n = 0; n < merged.lse.size(); ++n) {
      if (merged.lse[n] > -kInfinity) sum += parts.d_lse.get(static_cast<int64_t>(n)) * merged.lse[n];
    }
    return sum;
  };
  const auto derivative = [&](const TensorView& x, int64_t at) {  // contiguous, f32
    auto* const value = static_cast<float*>(x.data) + at;
    const float before = *value;
    *value = before + 0x1p-8f;
    const double high = *value, above = loss();
    *value = before - 0x1p-8f;
    const double low = *value, below = loss();
    *value = before;
    return (above - below) / (high - low);
  };
  int compared = 0;
  for (std::size_t n = 0; n < parts.s.partials; ++n) {
    for (int64_t k = 0; k < parts.partials[n].lse.elements(); k += 5) {
      if (static_cast<float*>(parts.partials[n].lse.data)[k] == -kInfinity) continue;
      EXPECT_NEAR(found.partials[n].lse[k], derivative(parts.partials[n].lse, k), 2e-4);
      ++compared;
    }
    for (int64_t k = 0; k < parts.partials[n].o.elements(); k += 41) {
      if (std::isnan(static_cast<float*>(parts.partials[n].o.data)[k])) continue;
      EXPECT_NEAR(found.partials[n].o[k], derivative(parts.partials[n].o, k), 1e-9);
      ++compared;
    }
  }
  for (int64_t h = 0; h < parts.s.H; ++h) {
    EXPECT_NEAR(found.dsink[h], derivative(parts.sink.view(), h), 2e-4);
  }
  EXPECT_GT(compared, 50);
}

TEST(MergeAttentionBits, OnePartialComesBack) {
  on_each_target([&] {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      Shape shape = kShapes[0];
      shape.dtype = dtype;
      const Parts parts(shape);
      HostTensor o = parts.rows(dtype), lse = parts.per_row(), empty_o = parts.rows(dtype), empty_lse = parts.per_row();
      for (int64_t n = 0; n < o.elements(); ++n) o.set(n, n % 9 == 0 ? -0.0 : std::sin(static_cast<double>(n)));
      for (int64_t n = 0; n < lse.elements(); ++n) lse.set(n, 40 * std::cos(static_cast<double>(n)));
      for (int64_t n = 0; n < lse.elements(); ++n) empty_lse.set(n, -kInfinity);
      const Partial one{o.view(), lse.view()}, empty{empty_o.view(), empty_lse.view()};
      for (const auto& partials : {std::vector{one}, {one, empty}, {empty, one, empty}}) {
        const HostTensor to = parts.rows(dtype), to_lse = parts.per_row();
        merge_attention(partials, to.view(), to_lse.view());
        EXPECT_TRUE(to.same_bits(o)) << partials.size();
        EXPECT_TRUE(to_lse.same_bits(lse)) << partials.size();
      }
    }
  });
}

TEST(MergeAttentionBits, DoNotDependOnThreads) {
  const Parts parts(kShapes[6]);
  std::vector<HostTensor> found;
  for (const int threads : {1, 3}) {
    const std::unique_ptr<Executor> pool = make_thread_pool(threads);
    Runtime runtime;
    runtime.executor = pool.get();
    found.push_back(parts.rows(DType::f32));
    merge_attention(parts.partials, found.back().view(), {}, {.sink = parts.sink.view()}, runtime);
  }
  EXPECT_TRUE(found[0].same_bits(found[1]));
}

TEST(MergeAttentionBits, InPlaceIsTheSame) {
  Parts parts(kShapes[1]);
  const HostTensor o = parts.rows(DType::f32), lse = parts.per_row();
  merge_attention(parts.partials, o.view(), lse.view(), {.sink = parts.sink.view()});
  const auto& [own, own_lse] = parts.partials[2];
  merge_attention(parts.partials, own, own_lse, {.sink = parts.sink.view()});
  for (int64_t n = 0; n < o.elements(); ++n) ASSERT_EQ(static_cast<float*>(own.data)[n], o.get(n));
  for (int64_t n = 0; n < lse.elements(); ++n) ASSERT_EQ(static_cast<float*>(own_lse.data)[n], lse.get(n));
}

// Rows of one head of one number each.
struct Tiny {
  std::vector<std::vector<float>> o, lse;
  std::vector<float> sink, to, to_lse;
  bool with_sink = false;

  void run() {
    std::vector<Partial> partials;
    const auto rows = std::ssize(o[0]);
    for (std::size_t n = 0; n < o.size(); ++n) {
      partials.push_back(
          {TensorView(o[n].data(), DType::f32, {1, rows, 1, 1}), TensorView(lse[n].data(), DType::f32, {1, 1, rows})});
    }
    to.assign(o[0].size(), -7);
    to_lse = to;
    merge_attention(partials, TensorView(to.data(), DType::f32, {1, rows, 1, 1}),
                    TensorView(to_lse.data(), DType::f32, {1, 1, rows}),
                    {.sink = sink.empty() ? TensorView() : TensorView(sink.data(), DType::f32, {1})});
  }
};

TEST(MergeAttention, RowsWithoutKeys) {
  const float none = -std::numeric_limits<float>::infinity(), nan = std::nanf("");
  on_each_target([&] {
    Tiny tiny{{{nan, 5}, {nan, nan}}, {{none, 2}, {none, none}}, {}, {}, {}};
    tiny.run();
    EXPECT_EQ(tiny.to, (std::vector<float>{0, 5}));
    EXPECT_EQ(tiny.to_lse, (std::vector<float>{none, 2}));
    tiny.sink = {0.75f};
    tiny.run();
    EXPECT_EQ(tiny.to[0], 0);
    EXPECT_EQ(tiny.to_lse[0], 0.75f);
    EXPECT_NEAR(tiny.to_lse[1], std::log(std::exp(2.0) + std::exp(0.75)), 1e-6);
    EXPECT_NEAR(tiny.to[1], 5 * std::exp(2.0) / (std::exp(2.0) + std::exp(0.75)), 1e-6);
    tiny.sink = {none};
    tiny.run();
    EXPECT_EQ(tiny.to, (std::vector<float>{0, 5}));
    EXPECT_EQ(tiny.to_lse, (std::vector<float>{none, 2}));
  });
}

TEST(MergeAttention, WhatIsNotANumberStays) {
  const float none = -std::numeric_limits<float>::infinity(), nan = std::nanf(""), large = -none;
  on_each_target([&] {
    //           o NaN    lse NaN  lse NaN beside none  lse inf  far below, o NaN
    Tiny tiny{{{nan, 1, 1, 1, nan}, {2, 2, 2, 2, 2}}, {{1, nan, nan, large, -200}, {1, 1, none, 1, 200}}, {}, {}, {}};
    tiny.run();
    for (std::size_t n = 0; n < tiny.to.size(); ++n) EXPECT_TRUE(std::isnan(tiny.to[n])) << n;
    EXPECT_NEAR(tiny.to_lse[0], 1 + std::log(2.0), 1e-6);
    for (const int n : {1, 2, 3}) EXPECT_TRUE(std::isnan(tiny.to_lse[n])) << n;
    EXPECT_EQ(tiny.to_lse[4], 200);
  });
}

// A bias of the lowest floats in all of a row's keys: nothing overflows on the way.
TEST(MergeAttention, FarLogarithms) {
  const float lowest = std::numeric_limits<float>::lowest();
  Tiny tiny{{{1, 1}, {3, 3}}, {{lowest, -3e38f}, {lowest, 3e38f}}, {}, {}, {}};
  tiny.run();
  EXPECT_EQ(tiny.to, (std::vector<float>{2, 3}));
  EXPECT_EQ(tiny.to_lse, (std::vector<float>{lowest, 3e38f}));
}

// What a row without keys has in d_o is not looked at.
TEST(MergeAttentionBackward, RowsWithoutKeysHaveNone) {
  float o[] = {4, 4}, lse[] = {-std::numeric_limits<float>::infinity(), 1}, d_o[] = {std::nanf(""), 2},
        d_lse[] = {3, 5};
  float to[] = {-7, -7}, to_lse[] = {-7, -7}, sink[] = {1}, dsink[] = {-7};
  const std::vector<Partial> partials{
      {TensorView(o, DType::f32, {1, 2, 1, 1}), TensorView(lse, DType::f32, {1, 1, 2})}};
  const std::vector<Partial> gradients{
      {TensorView(to, DType::f32, {1, 2, 1, 1}), TensorView(to_lse, DType::f32, {1, 1, 2})}};
  merge_attention_backward(partials, TensorView(d_o, DType::f32, {1, 2, 1, 1}),
                           TensorView(d_lse, DType::f32, {1, 1, 2}), gradients, TensorView(dsink, DType::f32, {1}),
                           {.sink = TensorView(sink, DType::f32, {1})});
  // The second row: both weights are 1/2 and o = 2, so d_lse_p = (2 (4 - 2) + 5) / 2, dsink = 3 + (5 - 4) / 2.
  EXPECT_EQ(to[0], 0);
  EXPECT_EQ(to[1], 1);
  EXPECT_EQ(to_lse[0], 0);
  EXPECT_EQ(to_lse[1], 4.5f);
  EXPECT_EQ(dsink[0], 3.5f);
}

}  // namespace
}  // namespace heddle::kit
