#include "reference/partial.h"

#include <cmath>
#include <limits>

#include "core/dtypes.h"

namespace heddle::reference {
namespace {

using std::int64_t;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One row of one head.
struct Row {
  std::vector<double> weight;  // of each partial: exp(lse_p - lse)
  double sink_weight = 0, lse = -kInfinity;

  Row(const MergeProblem& p, int64_t b, int64_t h, int64_t i) : weight(p.partials.size()) {
    const double sink = p.sink_of(h);
    double largest = sink;
    bool undefined = false;
    for (std::size_t n = 0; n < weight.size(); ++n) {
      largest = std::fmax(largest, p.lse_of(n, b, h, i));
      undefined |= std::isnan(p.lse_of(n, b, h, i));
    }
    if (largest == -kInfinity && !undefined) return;
    double sum = std::exp(sink - largest);
    for (std::size_t n = 0; n < weight.size(); ++n) sum += std::exp(p.lse_of(n, b, h, i) - largest);
    lse = largest + std::log(sum);
    for (std::size_t n = 0; n < weight.size(); ++n) weight[n] = std::exp(p.lse_of(n, b, h, i) - lse);
    sink_weight = std::exp(sink - lse);
  }
};

double element(const Operand& x, int64_t b, int64_t i, int64_t h, int64_t d) {
  return load_element(x.at(b, i, h), x.dtype, d * x.stride_d);
}

bool counts(const MergeProblem& p, std::size_t n, int64_t b, int64_t h, int64_t i) {
  return p.lse_of(n, b, h, i) != -kInfinity;
}

template <class Visit>
void each_row(const MergeProblem& p, const Visit& visit) {
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t i = 0; i < p.S; ++i) {
      for (int64_t h = 0; h < p.H; ++h) visit(b, i, h, Row(p, b, h, i));
    }
  }
}

Merged zeros(const MergeProblem& p) {
  return {std::vector<double>(p.B * p.S * p.H * p.Dv), std::vector<double>(p.B * p.S * p.H)};
}

// Where row (b, i) of head h lies in a Merged: its o, and its lse.
std::size_t o_at(const MergeProblem& p, int64_t b, int64_t i, int64_t h) { return ((b * p.S + i) * p.H + h) * p.Dv; }
std::size_t lse_at(const MergeProblem& p, int64_t b, int64_t i, int64_t h) { return (b * p.H + h) * p.S + i; }

// Rounds the values, as Merged has them, into o and lse; either may be absent.
void store(const MergeProblem& p, const Merged& values, const Operand& o, const Plane& lse) {
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t i = 0; i < p.S; ++i) {
      for (int64_t h = 0; h < p.H; ++h) {
        for (int64_t d = 0; o && d < p.Dv; ++d) {
          store_element(o.at(b, i, h), o.dtype, d * o.stride_d, static_cast<float>(values.o[o_at(p, b, i, h) + d]));
        }
        if (lse) lse.as<float>()[lse.offset(b, h, i)] = static_cast<float>(values.lse[lse_at(p, b, i, h)]);
      }
    }
  }
}

void launch(const MergeProblem& p, const Runtime&) { store(p, merge_attention(p), p.o, p.lse); }

void launch_backward(const MergeBackwardProblem& p, const Runtime&) {
  const MergedBackward result = merge_attention_backward(p);
  for (std::size_t n = 0; n < p.gradients.size(); ++n) {
    const auto& [to, to_lse] = p.gradients[n];
    store(p, result.partials[n], to.given() ? operand_of(to) : Operand(),
          to_lse.given() ? MergeProblem::per_row(to_lse) : Plane());
  }
  for (int64_t h = 0; p.dsink && h < p.H; ++h) {
    p.dsink.as<float>()[p.dsink.offset(0, h, 0)] = static_cast<float>(result.dsink[h]);
  }
}

// Like that of attention: never the least.
template <class Problem>
double estimate(const Problem& p, int) {
  return p.bytes() / 1e7;
}
template <class Problem>
std::string describe(const Problem&, int) {
  return "plain loops in double precision, on one thread";
}

}  // namespace

Merged merge_attention(const MergeProblem& p) {
  Merged out = zeros(p);
  each_row(p, [&](int64_t b, int64_t i, int64_t h, const Row& row) {
    out.lse[lse_at(p, b, i, h)] = row.lse;
    for (std::size_t n = 0; n < p.partials.size(); ++n) {
      if (!counts(p, n, b, h, i)) continue;
      for (int64_t d = 0; d < p.Dv; ++d) {
        out.o[o_at(p, b, i, h) + d] += row.weight[n] * element(operand_of(p.partials[n].o), b, i, h, d);
      }
    }
  });
  return out;
}

MergedBackward merge_attention_backward(const MergeBackwardProblem& p) {
  MergedBackward out{std::vector<Merged>(p.partials.size(), zeros(p)), std::vector<double>(p.H)};
  each_row(p, [&](int64_t b, int64_t i, int64_t h, const Row& row) {
    const double d_lse = p.d_lse ? p.d_lse.as<const float>()[p.d_lse.offset(b, h, i)] : 0;
    std::vector<double> dot(p.partials.size());  // d_o . o_p
    double delta = 0;                            // d_o . o
    for (std::size_t n = 0; n < dot.size(); ++n) {
      if (!counts(p, n, b, h, i)) continue;
      for (int64_t d = 0; d < p.Dv; ++d) {
        dot[n] += element(p.d_o, b, i, h, d) * element(operand_of(p.partials[n].o), b, i, h, d);
      }
      delta += row.weight[n] * dot[n];
    }
    for (std::size_t n = 0; n < dot.size(); ++n) {
      if (!counts(p, n, b, h, i)) continue;
      out.partials[n].lse[lse_at(p, b, i, h)] = row.weight[n] * (dot[n] - delta + d_lse);
      for (int64_t d = 0; d < p.Dv; ++d) {
        out.partials[n].o[o_at(p, b, i, h) + d] = row.weight[n] * element(p.d_o, b, i, h, d);
      }
    }
    if (row.lse > -kInfinity) out.dsink[h] += row.sink_weight * (d_lse - delta);
  });
  return out;
}

const MergeKernel kMergeAttention = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = serves_all,
    .estimate = estimate<MergeProblem>,
    .workspace = no_workspace,
    .launch = launch,
    .describe = describe<MergeProblem>,
};

const MergeBackwardKernel kMergeAttentionBackward = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = serves_all,
    .estimate = estimate<MergeBackwardProblem>,
    .workspace = no_workspace,
    .launch = launch_backward,
    .describe = describe<MergeBackwardProblem>,
};

}  // namespace heddle::reference
