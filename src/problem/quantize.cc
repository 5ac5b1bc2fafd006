#include "problem/quantize.h"

#include <cmath>

#include "core/dtypes.h"
#include "lowbit/formats.h"
#include "lowbit/scale_rules.h"

namespace heddle::lowbit {
namespace {

double bytes_of(const Matrix& m) {
  const auto scale = static_cast<std::int64_t>(size_of(scale_dtype(m.format.scale))) + (m.format.zero_points ? 1 : 0);
  return static_cast<double>(m.N * (m.row_bytes + m.groups * scale));
}

double bytes_of(const Weights& weights, const Matrix& m) {
  return static_cast<double>(m.N * m.K) * static_cast<double>(size_of(weights.dtype));
}

// There is one.
BadValues::Weight first_bad_weight(const QuantizeProblem& p, bool all_finite) {
  const float limit = weight_limit(p.out.format);
  for (std::int64_t n = 0; n < p.out.N; ++n) {
    for (std::int64_t k = 0; k < p.out.K; ++k) {
      const float w = load_element(p.weights.at(n, k), p.weights.dtype, 0);
      if (!(all_finite ? std::abs(w) <= limit : std::isfinite(w))) return {n, k, w};
    }
  }
  return {};
}

}  // namespace

double QuantizeCall::bytes() const { return bytes_of(problem.weights, problem.out) + bytes_of(problem.out); }
double DequantizeProblem::bytes() const { return bytes_of(out, matrix) + bytes_of(matrix); }

std::optional<QuantizeProblem> encodable(const QuantizeCall& call, float largest) {
  QuantizeProblem p = call.problem;
  if (!(largest <= weight_limit(p.out.format))) {
    call.found->weight = first_bad_weight(p, std::isfinite(largest));
    return std::nullopt;
  }
  if (p.out.format.global_scale && p.global_scale == 0.0f) p.global_scale = own_global_scale(p.rule, largest);
  return p;
}

}  // namespace heddle::lowbit
