#include "reference/lowbit.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "core/dtypes.h"
#include "lowbit/formats.h"
#include "lowbit/scale_rules.h"

namespace heddle::reference {
namespace {

using namespace heddle::lowbit;

float weight(const Weights& weights, std::int64_t n, std::int64_t k) {
  return load_element(weights.at(n, k), weights.dtype, 0);
}

// w / scale, in f32; a scale of 0 stands for a group that is all zero.
float quotient(float w, float scale) { return scale > 0.0f ? w / scale : std::copysign(0.0f, w); }

// The code nearest to x, an unsigned byte.
std::uint8_t code_of(Element element, float x, float zero) {
  switch (element) {
    case Element::e2m1:
      return E2M1::nearest(x).code;
    case Element::e2m1_row:
      return E2M1::nearest_ties_down(x).code;
    case Element::nf4:
      return NF4::nearest(x).code;
    case Element::fp4_bnb:
      return FP4Bnb::nearest(x).code;
    case Element::int4:
      return static_cast<std::uint8_t>(std::clamp(std::nearbyint(x) + zero, 0.0f, 15.0f));
    case Element::int8:
      return static_cast<std::uint8_t>(static_cast<std::int8_t>(std::clamp(std::nearbyint(x), -127.0f, 127.0f)));
    case Element::e4m3:
      return E4M3::nearest(x).bits;
  }
  return 0;
}

Range range_of(const std::vector<float>& group, bool zero_points) {
  Range range;
  for (const float w : group) {
    range.low = std::min(range.low, w);
    range.high = std::max(range.high, zero_points ? w : std::abs(w));
  }
  return range;
}

// Sum over the group of importance * (w - value * scale)^2. The difference is rounded to f32 once, and once more when
// it is multiplied with the importance; products of two f32 are exact in double, so that only the order of the sum is
// left to say: that of the columns.
double squared_error(const std::vector<float>& group, Element element, float scale, float zero,
                     const float* importance) {
  double sum = 0;
  for (std::size_t j = 0; j < group.size(); ++j) {
    const std::uint8_t code = code_of(element, quotient(group[j], scale), zero);
    const double value = value_of(element, code, zero);
    const auto difference = static_cast<float>(group[j] - value * static_cast<double>(scale));
    const float weighed = importance != nullptr ? importance[j] * difference : difference;
    sum += static_cast<double>(weighed) * static_cast<double>(difference);
  }
  return sum;
}

int best(const std::vector<float>& group, Element element, const Candidates& candidates, const float* importance) {
  int chosen = 0;
  double least = 0;
  for (int c = 0; candidates.count > 1 && c < candidates.count; ++c) {
    const double error = squared_error(group, element, candidates.scale[c], candidates.zero[c], importance);
    if (c == 0 || error < least) {
      chosen = c;
      least = error;
    }
  }
  return chosen;
}

void store_scale(const Matrix& matrix, std::int64_t index, std::uint32_t stored) {
  const std::size_t size = size_of(scale_dtype(matrix.format.scale));
  std::memcpy(static_cast<std::byte*>(matrix.scales) + index * static_cast<std::int64_t>(size), &stored, size);
}

bool in_high_half(const Format& format, std::int64_t k) { return (k % 2 == 1) != format.high_nibble_first; }

void store_code(const Matrix& matrix, std::int64_t n, std::int64_t k, std::uint8_t code) {
  std::uint8_t* row = matrix.codes + n * matrix.row_bytes;
  if (bits_of(matrix.format.element) == 8) {
    row[k] = code;
  } else {
    NibblePair pair{row[k / 2]};
    pair = in_high_half(matrix.format, k) ? NibblePair::of(pair.low(), code) : NibblePair::of(code, pair.high());
    row[k / 2] = pair.byte;
  }
}

std::uint8_t load_code(const Matrix& matrix, std::int64_t n, std::int64_t k) {
  const std::uint8_t* row = matrix.codes + n * matrix.row_bytes;
  if (bits_of(matrix.format.element) == 8) return row[k];
  const NibblePair pair{row[k / 2]};
  return in_high_half(matrix.format, k) ? pair.high() : pair.low();
}

}  // namespace

void quantize(const QuantizeProblem& p) {
  const Matrix& out = p.out;
  const Format& format = out.format;
  std::fill_n(out.codes, out.N * out.row_bytes, std::uint8_t{0});
  if (format.global_scale) *out.global_scale = p.global_scale;
  for (std::int64_t n = 0; n < out.N; ++n) {
    for (std::int64_t g = 0; g < out.groups; ++g) {
      const std::int64_t begin = g * out.group, end = std::min(begin + out.group, out.K);
      std::vector<float> group;
      for (std::int64_t k = begin; k < end; ++k) group.push_back(weight(p.weights, n, k));
      Candidates candidates;
      find_candidates(format, p.rule, range_of(group, format.zero_points), p.global_scale, candidates);
      const float* importance = p.importance != nullptr ? p.importance + begin : nullptr;
      const int c = best(group, format.element, candidates, importance);
      store_scale(out, n * out.groups + g, candidates.stored[c]);
      const float scale = candidates.scale[c], zero = candidates.zero[c];
      if (format.zero_points) out.zeros[n * out.groups + g] = static_cast<std::uint8_t>(zero);
      for (std::int64_t k = begin; k < end; ++k) {
        store_code(out, n, k, code_of(format.element, quotient(group[k - begin], scale), zero));
      }
    }
  }
}

float dequantized(const Matrix& matrix, std::int64_t n, std::int64_t k) {
  const Format& format = matrix.format;
  const std::int64_t group = n * matrix.groups + k / matrix.group;
  float scale = load_scale(matrix.scales, format.scale, group);
  if (format.global_scale) scale = scale * *matrix.global_scale;
  const float zero = format.zero_points ? static_cast<float>(matrix.zeros[group]) : kInt4Zero;
  return value_of(format.element, load_code(matrix, n, k), zero) * scale;
}

namespace {

void launch_quantize(const QuantizeCall& call, const Runtime&) {
  const QuantizeProblem& given = call.problem;
  float largest = 0.0f;
  for (std::int64_t n = 0; n < given.out.N; ++n) {
    for (std::int64_t k = 0; k < given.out.K; ++k) {
      const float w = std::abs(weight(given.weights, n, k));
      if (!std::isnan(largest) && !(w <= largest)) largest = w;  // a NaN stays
    }
  }
  if (const std::optional<QuantizeProblem> p = encodable(call, largest)) quantize(*p);
}

void launch_dequantize(const DequantizeProblem& p, const Runtime&) {
  for (std::int64_t n = 0; n < p.matrix.N; ++n) {
    for (std::int64_t k = 0; k < p.matrix.K; ++k) {
      store_element(p.out.at(n, k), p.out.dtype, 0, dequantized(p.matrix, n, k));
    }
  }
}

// Seconds of a weight, about, on the same processor as the estimates of src/cpu/lowbit.cc.
constexpr double kEncode = 50e-9, kSearch = 0.7e-6, kDecode = 20e-9;

double estimate_quantize(const QuantizeCall& call, int /*workers*/) {
  const Matrix& out = call.problem.out;
  return static_cast<double>(out.N * out.K) * (searches(call.problem.rule) ? kSearch : kEncode);
}

double estimate_dequantize(const DequantizeProblem& p, int /*workers*/) {
  return static_cast<double>(p.matrix.N * p.matrix.K) * kDecode;
}

}  // namespace

const QuantizeKernel kQuantize = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = serves_all,
    .estimate = estimate_quantize,
    .workspace = no_workspace,
    .launch = launch_quantize,
    .describe = [](const QuantizeCall&, int) { return std::string("plain loops, a weight at a time, on one thread"); },
};

const DequantizeKernel kDequantize = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = serves_all,
    .estimate = estimate_dequantize,
    .workspace = no_workspace,
    .launch = launch_dequantize,
    .describe = [](const DequantizeProblem&,
                   int) { return std::string("plain loops, a weight at a time, on one thread"); },
};

}  // namespace heddle::reference
