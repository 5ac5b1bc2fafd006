#include "kit/ordered_sums.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace heddle::kit {
namespace {

using std::int64_t;

constexpr int64_t kBlock = 4, kLanes = 16;

// Columns that fit the stack beside each other.
constexpr int64_t kColumns = 64;

struct Terms {
  int64_t count;
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;

  float factor(int64_t n) const { return a[n * a_stride]; }
  const float* row(int64_t n) const { return b + n * b_stride; }
};

void add_row(float factor, const float* row, int64_t columns, float* out) {
  if (factor == 0) return;
  for (int64_t c = 0; c < columns; ++c) out[c] += factor * row[c];
}

void fused_forward(const Terms& t, int64_t columns, float* out) {
  for (int64_t n = 0; n < t.count; ++n) {
    const double factor = t.factor(n);
    if (factor == 0) continue;
    const float* row = t.row(n);
    for (int64_t c = 0; c < columns; ++c) out[c] = static_cast<float>(out[c] + factor * row[c]);
  }
}

void forward(const Terms& t, int64_t columns, float* out) {
  for (int64_t n = 0; n < t.count; ++n) add_row(t.factor(n), t.row(n), columns, out);
}

void backward(const Terms& t, int64_t columns, float* out) {
  for (int64_t n = t.count; n-- > 0;) add_row(t.factor(n), t.row(n), columns, out);
}

void blocks(const Terms& t, int64_t columns, float* out) {
  for (int64_t begin = 0; begin < t.count; begin += kBlock) {
    float part[kColumns] = {};
    for (int64_t n = begin; n < std::min(begin + kBlock, t.count); ++n) add_row(t.factor(n), t.row(n), columns, part);
    for (int64_t c = 0; c < columns; ++c) out[c] += part[c];
  }
}

void lanes(const Terms& t, int64_t columns, float* out) {
  float part[kLanes][kColumns];
  const int64_t used = std::min(kLanes, t.count);
  for (int64_t lane = 0; lane < used; ++lane) {
    std::fill_n(part[lane], columns, 0.0f);
    for (int64_t n = lane; n < t.count; n += kLanes) add_row(t.factor(n), t.row(n), columns, part[lane]);
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half && lane + half < used; ++lane) {
      for (int64_t c = 0; c < columns; ++c) part[lane][c] += part[lane + half][c];
    }
  }
  if (used > 0) std::copy_n(part[0], columns, out);
}

// 2^exponent of the largest power of two that is at most x > 0; a tiny number's is raised.
float power_below(float x) {
  constexpr float kLeast = 0x1p-90f;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x > kLeast ? x : kLeast) & 0x7f800000u);
}

void tensor_core_steps(const Summation& how, const Terms& t, int64_t columns, float* out) {
  const float steps = std::ldexp(1.0f, how.bits), most = 4 * steps;
  for (int64_t begin = 0; begin < t.count; begin += how.group) {
    const int64_t end = std::min<int64_t>(begin + how.group, t.count);
    float step[kColumns], in_steps[kColumns], spoilt[kColumns];
    for (int64_t c = 0; c < columns; ++c) step[c] = std::abs(out[c]), spoilt[c] = 0;
    for (int64_t n = begin; n < end; ++n) {
      const float factor = t.factor(n);
      if (factor == 0) continue;
      const float* row = t.row(n);
      for (int64_t c = 0; c < columns; ++c) {
        const float size = std::abs(factor * row[c]);
        step[c] = size > step[c] ? size : step[c];
        spoilt[c] += size - size;  // NaN where a product is infinite or NaN
      }
    }
    std::int32_t whole[kColumns];
    const auto cut = [&](float x, int64_t c) {
      const float scaled = x * in_steps[c];
      return static_cast<std::int32_t>(scaled > -most ? (scaled < most ? scaled : most) : -most);
    };
    for (int64_t c = 0; c < columns; ++c) {
      in_steps[c] = steps / power_below(step[c]);
      step[c] = power_below(step[c]) / steps;
      whole[c] = cut(out[c], c);
    }
    for (int64_t n = begin; n < end; ++n) {
      const float factor = t.factor(n);
      if (factor == 0) continue;
      const float* row = t.row(n);
      for (int64_t c = 0; c < columns; ++c) whole[c] += cut(factor * row[c], c);
    }
    for (int64_t c = 0; c < columns; ++c) out[c] = static_cast<float>(whole[c]) * step[c] + spoilt[c];
  }
}

void tensor_cores(const Summation& how, const Terms& t, int64_t columns, float* out) {
  for (int64_t begin = 0; begin < t.count; begin += how.flush) {
    float part[kColumns] = {};
    const Terms some{std::min<int64_t>(how.flush, t.count - begin), t.a + begin * t.a_stride, t.a_stride, t.row(begin),
                     t.b_stride};
    tensor_core_steps(how, some, columns, part);
    for (int64_t c = 0; c < columns; ++c) out[c] += part[c];
  }
}

}  // namespace

void sum_products(const Summation& how, int64_t terms, const float* a, int64_t a_stride, const float* b,
                  int64_t b_stride, int64_t columns, float* out) {
  std::fill_n(out, columns, 0.0f);
  for (int64_t c = 0; c < columns; c += kColumns) {
    const Terms t{terms, a, a_stride, b + c, b_stride};
    const int64_t width = std::min(kColumns, columns - c);
    if (how.bits > 0) {
      tensor_cores(how, t, width, out + c);
    } else if (how.order == Order::forward) {
      how.fma ? fused_forward(t, width, out + c) : forward(t, width, out + c);
    } else if (how.order == Order::backward) {
      backward(t, width, out + c);
    } else if (how.order == Order::blocks) {
      blocks(t, width, out + c);
    } else {
      lanes(t, width, out + c);
    }
  }
}

void sum_products(const Summation&, int64_t terms, const double* a, int64_t a_stride, const double* b, int64_t b_stride,
                  int64_t columns, double* out) {
  std::fill_n(out, columns, 0.0);
  for (int64_t n = 0; n < terms; ++n) {
    for (int64_t c = 0; c < columns; ++c) out[c] += a[n * a_stride] * b[n * b_stride + c];
  }
}

double sum(Order, const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

float sum(Order order, const std::vector<float>& values) {
  const std::vector<float> ones(1, 1.0f);
  float out = 0;
  sum_products({order}, static_cast<int64_t>(values.size()), ones.data(), 0, values.data(), 1, 1, &out);
  return out;
}

ElementSums::ElementSums(Order order, int64_t elements)
    : order_(order), sums_(order == Order::lanes ? kLanes : 1, std::vector<float>(elements)) {
  if (order == Order::blocks) total_.assign(elements, 0);
}

void ElementSums::flush() {
  if (order_ != Order::blocks) return;
  for (std::size_t n = 0; n < total_.size(); ++n) {
    total_[n] += sums_[0][n];
    sums_[0][n] = 0;
  }
}

std::vector<float> ElementSums::finish() {
  flush();
  if (order_ == Order::blocks) return total_;
  for (std::size_t half = sums_.size() / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) {
      for (std::size_t n = 0; n < sums_[0].size(); ++n) sums_[lane][n] += sums_[lane + half][n];
    }
  }
  return sums_[0];
}

}  // namespace heddle::kit
