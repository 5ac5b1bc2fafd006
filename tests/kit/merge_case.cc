#include "kit/merge_case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <random>

#include "core/check.h"
#include "ops/partial/partial.h"
#include "reference/partial.h"

namespace heddle::kit {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double largest(const std::vector<double>& values) {
  double out = 0;
  for (const double value : values) out = std::isfinite(value) ? std::max(out, std::abs(value)) : out;
  return out;
}

// |found - exact| <= steps * 2^-24 * size, and half a unit in the last place of its dtype.
void judge(CaseResult& result, const std::string& tensor, const HostTensor& found, const std::vector<double>& exact,
           double steps, double size) {
  const TensorView& view = found.view();
  const double half_ulp = view.dtype == DType::f32 ? 0x1p-24 : view.dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
  result.tensors.push_back(
      compare_within(tensor, found.values(), exact, {view.shape.begin(), view.shape.begin() + view.rank},
                     [&](double value) { return steps * 0x1p-24 * size + half_ulp * std::abs(value); }));
  result.passed &= result.tensors.back().passed;
  if (const std::string damage = found.damage(); !damage.empty()) {
    result.damage += text(result.damage.empty() ? "" : "; ", tensor, ": ", damage);
    result.passed = false;
  }
}

// Where the gradients of the parts are written.
struct MergeGradients {
  explicit MergeGradients(const MergeData& data) {
    for (std::size_t n = 0; n < data.s.partials; ++n) {
      o.push_back(data.rows(data.s.dtype));
      lse.push_back(data.per_row());
      views.push_back({o.back().view(), lse.back().view()});
    }
    if (data.s.sink) dsink = HostTensor::output(DType::f32, {data.s.H});
  }
  std::vector<HostTensor> o, lse;
  std::vector<Partial> views;
  HostTensor dsink;
};

}  // namespace

void PrintTo(const MergeCase& c, std::ostream* out) { *out << c.name; }

const std::vector<MergeCase>& merge_cases() {
  static const std::vector<MergeCase> all = {
      {"two", DType::f32, 2, false, false, false, Layout::contiguous, 2, 7, 3, 32},
      {"sink", DType::f32, 3, false, true, true, Layout::contiguous, 2, 7, 3, 33},
      {"packed", DType::f32, 4, true, true, true, Layout::contiguous, 1, 40, 2, 7},
      {"strided", DType::f32, 3, false, true, true, Layout::padded_rows, 2, 9, 4, 40},
      {"heads_first", DType::bf16, 5, false, true, true, Layout::heads_first, 2, 9, 4, 40},
      {"every_third", DType::f16, 3, false, false, true, Layout::strided_dim, 2, 9, 4, 40},
      {"backwards", DType::f32, 2, false, true, true, Layout::reversed, 2, 9, 4, 32},
      {"shared", DType::bf16, 3, false, true, true, Layout::expanded, 2, 9, 4, 64},
      {"one_dim", DType::f32, 2, false, false, true, Layout::contiguous, 1, 5, 2, 1},
      {"widest", DType::f32, 2, false, true, false, Layout::contiguous, 1, 3, 2, 256},
      {"widest_bf16", DType::bf16, 9, true, true, true, Layout::contiguous, 1, 3, 2, 256},
      {"odd_wide", DType::f32, 3, false, true, true, Layout::contiguous, 1, 9, 2, 251},
      {"many", DType::f32, 20, false, true, true, Layout::contiguous, 1, 50, 2, 64},
      {"hundred", DType::f32, 100, false, true, true, Layout::contiguous, 1, 17, 3, 16},
      {"hundred_odd", DType::bf16, 100, false, false, true, Layout::contiguous, 1, 17, 3, 130},
      {"bf16", DType::bf16, 3, false, true, true, Layout::contiguous, 2, 7, 3, 48},
      {"f16", DType::f16, 3, true, false, true, Layout::padded_rows, 1, 30, 3, 24},
  };
  return all;
}

const MergeCase& merge_case(std::string_view name) { return *std::ranges::find(merge_cases(), name, &MergeCase::name); }

MergeData::MergeData(const MergeCase& spec, DType d_o_dtype) : s(spec) {
  std::mt19937_64 random(11);
  std::normal_distribution<double> normal;
  for (std::size_t n = 0; n < s.partials; ++n) {
    HostTensor o = rows(s.dtype, false), lse = per_row(false);
    for (std::int64_t k = 0; k < lse.elements(); ++k) lse.set(k, 3 * normal(random));
    for (std::int64_t k = 0; k < o.elements(); ++k) o.set(k, normal(random));
    for (std::int64_t b = 0; b < s.B; ++b) {
      for (std::int64_t h = 0; h < s.H; ++h) {
        for (std::int64_t i = 0; i < s.S; ++i) {
          const bool without = (i % 4 == 1 && n % 2 == 0) || (i % 4 == 2 && n != 1) || i % 8 == 3;
          if (!without) continue;
          lse.set((b * s.H + h) * s.S + i, -kInfinity);
          // Not read: it may hold anything.
          for (std::int64_t d = 0; d < s.Dv; ++d) o.set(((b * s.S + i) * s.H + h) * s.Dv + d, std::nan(""));
        }
      }
    }
    os.push_back(std::move(o));
    lses.push_back(std::move(lse));
    partials.push_back({os.back().view(), lses.back().view()});
  }
  if (s.sink) {
    sink = HostTensor::input(DType::f32, {s.H});
    for (std::int64_t h = 0; h < s.H; ++h) sink.set(h, normal(random));
  }
  d_o = rows(d_o_dtype, false);
  for (std::int64_t k = 0; k < d_o.elements(); ++k) d_o.set(k, normal(random));
  if (s.d_lse) {
    d_lse = per_row(false);
    for (std::int64_t k = 0; k < d_lse.elements(); ++k) d_lse.set(k, normal(random));
  }
}

HostTensor MergeData::tensor(DType dtype, std::vector<std::int64_t> shape, bool output) const {
  return output ? HostTensor::output(dtype, std::move(shape), s.layout)
                : HostTensor::input(dtype, std::move(shape), s.layout);
}
HostTensor MergeData::rows(DType dtype, bool output) const {
  return tensor(dtype, s.packed ? std::vector{s.S, s.H, s.Dv} : std::vector{s.B, s.S, s.H, s.Dv}, output);
}
HostTensor MergeData::per_row(bool output) const {
  return tensor(DType::f32, s.packed ? std::vector{s.H, s.S} : std::vector{s.B, s.H, s.S}, output);
}
MergeProblem MergeData::problem() const {
  return checked_merge_problem(Check("merge_attention"), partials, sink.view(), {}, {});
}
MergeBackwardProblem MergeData::backward_problem(const std::vector<Partial>& gradients) const {
  return checked_merge_backward_problem(Check("merge_attention_backward"), partials, sink.view(), d_o.view(),
                                        d_lse.view(), gradients, {});
}

std::vector<DType> merged_dtypes(const MergeCase& spec) {
  if (spec.dtype == DType::f32) return {DType::f32, DType::f16, DType::bf16};
  return {DType::f32, spec.dtype};
}

CaseResult check_merge(const MergeData& data, const std::string& candidate, DType o_dtype) {
  CaseResult result{text("merge_", data.s.name), candidate, Pass::forward, true};
  const reference::Merged exact = reference::merge_attention(data.problem());
  const HostTensor o = data.rows(o_dtype), lse = data.per_row();
  const MergeOptions options{.sink = data.sink.view(), .force = candidate};
  result.seconds = seconds_of([&] { merge_attention(data.partials, o.view(), lse.view(), options); });
  // A product, a sum and a rounded exponential for each part, and the division; parts cancel at most to nothing.
  judge(result, "o", o, exact.o, 2 * static_cast<double>(data.s.partials) + 3, 4 * largest(exact.o));
  judge(result, "lse", lse, exact.lse, 1, 1);
  return result;
}

CaseResult check_merge_backward(const MergeData& data, const std::string& candidate) {
  CaseResult result{text("merge_", data.s.name), candidate, Pass::backward, true};
  const MergeGradients out(data);
  const reference::MergedBackward exact = reference::merge_attention_backward(data.backward_problem(out.views));
  const MergeOptions options{.sink = data.sink.view(), .force = candidate};
  result.seconds = seconds_of([&] {
    merge_attention_backward(data.partials, data.d_o.view(), data.d_lse.view(), out.views, out.dsink.view(), options);
  });
  // Dot products of Dv terms, each at most the product of the largest; values of o are below 6.
  const double d_o = largest(data.d_o.values()), dims = static_cast<double>(data.s.Dv);
  const double product = 6 * d_o * std::sqrt(dims);
  for (std::size_t n = 0; n < data.s.partials; ++n) {
    judge(result, text("d_o", n), out.o[n], exact.partials[n].o, 2, d_o);
    judge(result, text("d_lse", n), out.lse[n], exact.partials[n].lse, dims, product);
  }
  if (data.s.sink) {
    judge(result, "dsink", out.dsink, exact.dsink, dims, product * static_cast<double>(data.s.S * data.s.B));
  }
  return result;
}

std::vector<std::string> merge_candidates(const MergeData& data, Pass pass) {
  const MergeOptions options{.sink = data.sink.view()};
  if (pass == Pass::forward) {
    return kernels_of(explain_merge_attention(data.partials, data.rows(data.s.dtype).view(), {}, options));
  }
  const MergeGradients out(data);
  return kernels_of(explain_merge_attention_backward(data.partials, data.d_o.view(), data.d_lse.view(), out.views,
                                                     out.dsink.view(), options));
}

}  // namespace heddle::kit
