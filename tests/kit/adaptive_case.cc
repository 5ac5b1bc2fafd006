#include "kit/adaptive_case.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "core/check.h"
#include "kit/yardstick.h"
#include "ops/adaptive/adaptive.h"
#include "reference/attention.h"

namespace heddle::kit {
namespace {

AttentionOptions options_for(const CaseData& data, const std::string& candidate) {
  AttentionOptions options = data.options();
  options.force = candidate;
  return options;
}

// Scratch of exactly the size that a call asks for; what it held before must not matter.
struct Scratch {
  Scratch(std::size_t bytes, Executor* executor) {
    runtime.executor = executor;
    if (bytes == 0) return;
    runtime.workspace = {buffer.get(bytes).data, bytes};
    std::memset(runtime.workspace.data, 0xFF, bytes);
  }
  WorkspaceBuffer buffer;
  Runtime runtime;
};

// The plain computation of exact attention, moved to where the replaced blocks take a result: so its error is what
// arithmetic costs, and nothing of what was replaced.
PlainTensor moved(PlainTensor plain, const std::vector<double>& exact, const std::vector<double>& to) {
  for (std::vector<double>& values : plain.values) {
    for (std::size_t n = 0; n < values.size(); ++n) {
      if (std::isfinite(exact[n])) values[n] += to[n] - exact[n];
    }
  }
  return plain;
}

// A share of a row whose square no float32 holds: a kernel has none, and none of its cost.
constexpr double kBelowFloats = 1e-17;

}  // namespace

AttentionCase adaptive_call(DType dtype, std::int64_t B, std::int64_t H, std::int64_t Hkv, std::int64_t Sq,
                            std::int64_t Sk, std::int64_t D, void (*change)(AttentionCase&)) {
  AttentionCase c{.name = "adaptive", .dtype = dtype, .B = B, .H = H, .Hkv = Hkv, .Sq = Sq, .Sk = Sk, .D = D, .Dv = D};
  if (change != nullptr) change(c);
  return c;
}

const std::vector<AdaptiveCase>& adaptive_cases() {
  using enum DType;
  static const std::vector<AdaptiveCase> all = {
      {"plain", 0.1f, adaptive_call(f32, 2, 4, 2, 70, 290, 32)},
      {"causal", 0.3f, adaptive_call(f32, 1, 4, 2, 300, 300, 64, [](auto& c) { c.causal = Causal::top_left; })},
      {"causal_16_bits", 0.3f,
       adaptive_call(bf16, 1, 4, 2, 300, 300, 64, [](auto& c) { c.causal = Causal::bottom_right; })},
      {"half", 0.5f, adaptive_call(f16, 2, 3, 3, 90, 333, 40, [](auto& c) { c.causal = Causal::bottom_right; })},
      {"everything", 3.0f, adaptive_call(f32, 1, 2, 1, 130, 260, 48)},
      {"everything_16_bits", 3.0f, adaptive_call(bf16, 1, 2, 1, 130, 260, 48)},
      {"group_of_5", 0.1f, adaptive_call(f32, 1, 15, 3, 77, 200, 48, [](auto& c) { c.Dv = 20; })},
      {"one_head_of_keys", 0.1f, adaptive_call(bf16, 1, 13, 1, 33, 420, 128, [](auto& c) { c.Dv = 96; })},
      {"sink", 0.3f, adaptive_call(f32, 2, 4, 2, 140, 190, 32, [](auto& c) { c.sink = true; })},
      {"window", 0.5f,
       adaptive_call(f32, 2, 2, 2, 200, 340, 32, [](auto& c) { c.window_left = 110, c.window_right = 50; })},
      {"causal_window", 0.6f,
       adaptive_call(bf16, 1, 4, 2, 400, 400, 32, [](auto& c) { c.causal = Causal::top_left, c.window_left = 150; })},
      {"softcap", 0.1f, adaptive_call(f32, 2, 4, 2, 60, 200, 32, [](auto& c) { c.softcap = 7.0f; })},
      {"alibi", 0.4f,
       adaptive_call(f32, 2, 4, 2, 160, 200, 32,
                     [](auto& c) { c.alibi = Alibi::per_head, c.causal = Causal::bottom_right; })},
      {"packed", 0.2f,
       adaptive_call(f32, 5, 4, 2, 160, 290, 32,
                     [](auto& c) { c.packed_q = c.packed_k = true, c.causal = Causal::bottom_right; })},
      {"packed_16_bits", 0.2f,
       adaptive_call(bf16, 5, 6, 2, 160, 290, 64, [](auto& c) { c.packed_q = c.packed_k = c.sink = true; })},
      {"used", 0.2f, adaptive_call(f32, 4, 2, 1, 150, 280, 32, [](auto& c) { c.seqused_q = c.seqused_k = true; })},
      {"paged", 0.6f,
       adaptive_call(bf16, 3, 4, 2, 70, 296, 32,
                     [](auto& c) { c.page_size = 16, c.seqused_k = true, c.causal = Causal::bottom_right; })},
      {"cache_rows", 0.4f,
       adaptive_call(f16, 3, 4, 2, 37, 196, 32, [](auto& c) { c.cache_batch_idx = c.seqused_k = c.leftpad = true; })},
      {"few_rows", 0.1f, adaptive_call(f32, 2, 8, 2, 1, 600, 64, [](auto& c) { c.causal = Causal::bottom_right; })},
      {"float32_out", 0.5f, adaptive_call(bf16, 2, 4, 2, 40, 190, 32, [](auto& c) { c.float32_out = true; })},
      {"piece", 0.6f,
       adaptive_call(f32, 3, 4, 2, 150, 175, 32,
                     [](auto& c) { c.q_offset = c.key_offset = true, c.causal = Causal::top_left; })},
      {"anchors", 0.5f,
       adaptive_call(f32, 2, 4, 2, 50, 260, 32, [](auto& c) { c.q_step = 4, c.causal = Causal::top_left; })},
      {"strided", 0.2f,
       adaptive_call(f32, 2, 4, 2, 90, 190, 24,
                     [](auto& c) { c.layout_q = c.layout_k = Layout::heads_first, c.layout_o = Layout::padded_rows; })},
      {"poisoned", 0.6f,
       adaptive_call(f32, 1, 2, 2, 200, 150, 32,
                     [](auto& c) { c.causal = Causal::bottom_right, c.poison_keys = c.poison_rows = true; })},
      {"large_logits", 0.05f,
       adaptive_call(f32, 1, 2, 2, 100, 290, 32, [](auto& c) { c.values = Values::large_logits; })},
      {"lse_too", 0.3f, adaptive_call(f32, 1, 4, 2, 100, 190, 32, [](auto& c) { c.d_lse = c.sink = true; })},
  };  // fmt: skip
  return all;
}

AdaptiveResult::AdaptiveResult(const CaseData& data) : o(data.new_o()), lse(data.new_lse()), bound(data.new_lse()) {
  const AttentionProblem p = data.problem();
  const std::int64_t bytes = (p.Sk + 8 * kAdaptiveKeys - 1) / (8 * kAdaptiveKeys);
  std::vector<std::int64_t> shape{p.Hkv, adaptive_runs(p), bytes};
  if (!data.spec.packed_q) shape.insert(shape.begin(), p.B);
  replaced = HostTensor::output(DType::u8, shape);
}

std::int64_t AdaptiveResult::blocks_replaced() const {
  std::int64_t count = 0;
  const auto* bytes = static_cast<const std::uint8_t*>(replaced.view().data);
  for (std::int64_t n = 0; n < replaced.elements(); ++n) count += std::popcount(bytes[n]);
  return count;
}

bool AdaptiveResult::same_bits(const AdaptiveResult& other) const {
  return o.same_bits(other.o) && lse.same_bits(other.lse) && bound.same_bits(other.bound) &&
         replaced.same_bits(other.replaced);
}

AdaptiveResult run_adaptive(const CaseData& data, float tol, const std::string& candidate, Executor* executor) {
  AdaptiveResult out(data);
  const AttentionOptions options = options_for(data, candidate);
  const TensorView &q = data.q.view(), &k = data.k.view(), &v = data.v.view();
  Runtime query;
  query.executor = executor;
  const Scratch scratch(adaptive_attention_forward_workspace(q, k, v, {.tol = tol}, options, query), executor);
  adaptive_attention_forward(q, k, v, out.views(), {.tol = tol}, options, scratch.runtime);
  return out;
}

Gradients run_adaptive_backward(const CaseData& data, const AdaptiveResult& after, const std::string& candidate,
                                Executor* executor) {
  Gradients out = data.new_gradients();
  const AttentionOptions options = options_for(data, candidate);
  const TensorView &q = data.q.view(), &k = data.k.view(), &v = data.v.view();
  Runtime query;
  query.executor = executor;
  const Scratch scratch(
      adaptive_attention_backward_workspace(q, k, v, after.replaced.view(), out.views(), options, query), executor);
  adaptive_attention_backward(q, k, v, after.replaced.view(), after.o.view(), after.lse.view(), data.d_o.view(),
                              data.d_lse.view(), out.views(), options, scratch.runtime);
  return out;
}

AdaptiveProblem adaptive_problem(const CaseData& data, float tol, const AdaptiveResult& result) {
  return checked_adaptive_problem(Check("adaptive_attention_forward"), data.q.view(), data.k.view(), data.v.view(),
                                  result.views(), {.tol = tol}, data.options());
}

AdaptiveBackwardProblem adaptive_backward_problem(const CaseData& data, const AdaptiveResult& after,
                                                  const Gradients& gradients) {
  return checked_adaptive_backward_problem(Check("adaptive_attention_backward"), data.q.view(), data.k.view(),
                                           data.v.view(), after.replaced.view(), after.o.view(), after.lse.view(),
                                           data.d_o.view(), data.d_lse.view(), gradients.views(), data.options());
}

AdaptiveJudge::AdaptiveJudge(const CaseData& data)
    : data_(data),
      exact_(reference::attention_forward(data.problem(), default_executor())),
      plain_(plain_forward(data.problem())),
      factor_(allowed_factor(data.problem(), exact_)) {}

CaseResult AdaptiveJudge::judge(float tol, const AdaptiveResult& result, const std::string& candidate) const {
  const AdaptiveProblem p = adaptive_problem(data_, tol, result);
  const reference::AdaptiveForward expected = reference::adaptive_forward(p, default_executor());
  const PlainTensor plain_o = moved(plain_.o, exact_.o, expected.o);
  const std::vector<Judged> judged = {{"o", &result.o, &expected.o, &plain_o, factor_},
                                      {"lse", &result.lse, &expected.lse, &plain_.lse, factor_}};
  CaseResult out = judged_by({.case_name = data_.spec.name, .candidate = candidate}, judged);
  if (const std::string blind = blind_spots(judged); !blind.empty()) out.faults.push_back(blind);
  for (const HostTensor* tensor : {&result.bound, &result.replaced}) {
    if (!tensor->damage().empty()) out.faults.push_back(tensor->damage());
  }

  // Rows of o are [row][head], those of bound [head][row] of a batch, or of all if they are packed.
  const double rounding = out.tensors.front().bound * std::sqrt(static_cast<double>(p.Dv));
  for (std::int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    for (std::int64_t h = 0; h < p.H; ++h) {
      const double longest = reference::longest_value(p, b, h / p.G);
      for (std::int64_t i = 0; i < s.q_rows; ++i) {
        const bool packed = data_.spec.packed_q;
        const std::int64_t row = (packed ? s.q_begin + i : b * p.Sq + i) * p.H + h;
        const std::int64_t at = packed ? h * p.q_rows + s.q_begin + i : (b * p.H + h) * p.Sq + i;
        const double bound = result.bound.get(at), found = expected.bound[at];
        double error = 0;
        for (std::int64_t d = 0; d < p.Dv; ++d) {
          const double off = result.o.get(row * p.Dv + d) - exact_.o[row * p.Dv + d];
          error += off * off;
        }
        error = std::sqrt(error);
        const auto fault = [&](const char* what) {
          out.faults.push_back(text("row ", i, " of head ", h, ", sequence ", b, ": ", what, ": error ",
                                    error / longest, ", bound ", bound, ", by the reference ", found, ", tol ",
                                    static_cast<double>(tol)));
        };
        if (!(error <= bound * longest + rounding)) fault("its error is above its bound");
        if (!(bound >= 0 && bound <= tol)) fault("its bound is above tol");
        if (!(bound >= found * (1 - 1e-3) - kBelowFloats)) fault("its bound is too small for what was replaced");
        if (!(bound <= found * 1.02 + 0.05 * tol)) fault("its bound is too large for what was replaced");
        if (i >= s.sq && bound != 0) fault("a row that is not used has a bound");
      }
    }
  }
  out.passed &= out.faults.empty();
  return out;
}

AdaptiveResult exact_for_blocks(const CaseData& data, float tol, AdaptiveResult result) {
  const reference::AdaptiveForward exact =
      reference::adaptive_forward(adaptive_problem(data, tol, result), default_executor());
  for (std::size_t n = 0; n < exact.o.size(); ++n) result.o.set(static_cast<std::int64_t>(n), exact.o[n]);
  for (std::size_t n = 0; n < exact.lse.size(); ++n) result.lse.set(static_cast<std::int64_t>(n), exact.lse[n]);
  return result;
}

CaseResult AdaptiveJudge::judge(const AdaptiveResult& after, const Gradients& g, const std::string& candidate) {
  if (!exact_backward_) {
    const Gradients none = data_.new_gradients();
    const AttentionBackwardProblem p = data_.backward_problem(none);
    exact_backward_ = std::make_unique<reference::Backward>(reference::attention_backward(p, default_executor()));
    plain_backward_ = std::make_unique<PlainBackward>(plain_backward(p, exact_));
  }
  const reference::Backward& exact = *exact_backward_;
  const PlainBackward& plain = *plain_backward_;
  const reference::Backward expected =
      reference::adaptive_backward(adaptive_backward_problem(data_, after, g), default_executor());
  const PlainTensor dq = moved(plain.dq, exact.dq, expected.dq), dk = moved(plain.dk, exact.dk, expected.dk),
                    dv = moved(plain.dv, exact.dv, expected.dv),
                    dsink = moved(plain.dsink, exact.dsink, expected.dsink);
  const std::vector<Judged> judged = {{"dq", &g.dq, &expected.dq, &dq, factor_},
                                      {"dk", &g.dk, &expected.dk, &dk, factor_},
                                      {"dv", &g.dv, &expected.dv, &dv, factor_},
                                      {"dsink", &g.dsink, &expected.dsink, &dsink, kFactor}};
  CaseResult out = judged_by({.case_name = data_.spec.name, .candidate = candidate, .pass = Pass::backward}, judged);
  if (const std::string blind = blind_spots(judged); !blind.empty()) out.faults.push_back(blind);
  out.passed &= out.faults.empty();
  return out;
}

}  // namespace heddle::kit
