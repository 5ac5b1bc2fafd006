#include "kit/long_case.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/dtypes.h"

namespace heddle::kit {
namespace {

using std::int64_t;

// Of a case without a backward, what a forward reads alone.
AttentionBackwardProblem problem_of(const CaseData& data, const Gradients& gradients) {
  if (data.spec.has_backward()) return data.backward_problem(gradients);
  AttentionBackwardProblem out;
  static_cast<AttentionProblem&>(out) = data.problem();
  return out;
}

// For a part within a task of another executor.
class Alone : public Executor {
 public:
  int workers() const override { return 1; }
  void parallel_for(int64_t count, const std::function<void(int64_t, int)>& task) override {
    for (int64_t n = 0; n < count; ++n) task(n, 0);
  }
};

void thin_out(Operand& x, int64_t first, int64_t step) {
  x.data = x.at(0, first, 0);
  x.stride_s *= step;
}

// The elements of rows first, first + step, ... of a [length, heads, width] tensor, given all of it.
std::vector<double> rows_from(const std::vector<double>& all, int64_t step, int64_t count, int64_t row) {
  std::vector<double> out;
  for (int64_t n = 0; n < count; ++n) {
    out.insert(out.end(), all.begin() + n * step * row, all.begin() + (n * step + 1) * row);
  }
  return out;
}

int64_t step_of(int64_t length, int64_t samples) { return samples > 1 ? (length - 1) / (samples - 1) : length; }

std::vector<double> row(const Operand& x, int64_t n, int64_t h, int64_t width) {
  std::vector<double> out(width);
  for (int64_t d = 0; d < width; ++d) out[d] = load_element(x.at(0, n, h), x.dtype, d * x.stride_d);
  return out;
}

double dot(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (std::size_t d = 0; d < x.size(); ++d) sum += x[d] * y[d];
  return sum;
}

void judge(CaseResult& result, const char* name, const std::vector<double>& found, const std::vector<double>& exact,
           const PlainTensor& plain, const std::vector<int64_t>& shape, DType dtype, double factor) {
  result.tensors.push_back(compare(name, found, exact, plain, shape, dtype, factor));
  const std::string blind = blind_spots(name, exact, plain, shape, dtype, factor);
  if (!blind.empty()) result.faults.push_back(blind);
  result.passed &= result.tensors.back().passed && blind.empty();
}

}  // namespace

LongCase::LongCase(const AttentionCase& spec, int64_t samples, Device device)
    : runner_(spec, 1, device),
      gradients_(spec.has_backward() ? runner_.data().new_gradients() : Gradients()),
      problem_(problem_of(runner_.data(), gradients_)),
      samples_(samples),
      row_step_(step_of(spec.Sq, samples)),
      key_step_(step_of(spec.Sk, samples)) {
  const AttentionBackwardProblem& p = problem_;
  if (p.B != 1 || p.cu_seqlens_q || p.cu_seqlens_k || p.seqused_q || p.seqused_k || p.bias || p.mask || p.alibi ||
      p.sink || p.softcap > 0 || p.dropout.p > 0 || p.window_left >= 0 || p.window_right >= 0 || p.d_lse) {
    throw Error(text("[kit] ", spec.name, ": a long case has one sequence, and no option but causal"));
  }
}

// Pairs that causality removes, of the part's rows and keys.
void LongCase::remove_pairs(Part& part) const {
  AttentionBackwardProblem& p = part.problem;
  p.mask = {.data = reinterpret_cast<std::byte*>(part.mask.data()),
            .dtype = DType::boolean,
            .given = true,
            .stride_i = p.Sk,
            .stride_j = 1};
  p.causal = Causal::none;
  p.window_left = p.window_right = -1;
}

LongCase::Part LongCase::rows_of(int64_t first, int64_t step, int64_t count) const {
  Part part{problem_, std::vector<unsigned char>(count * problem_.Sk)};
  AttentionBackwardProblem& p = part.problem;
  thin_out(p.q, first, step);
  if (p.d_o) thin_out(p.d_o, first, step);
  p.Sq = p.q_rows = count;
  const Sequence s = problem_.sequence(0);
  for (int64_t n = 0; n < count; ++n) {
    const auto range = problem_.band(s).keys_of(first + n * step);
    std::fill(part.mask.begin() + n * p.Sk + range.begin, part.mask.begin() + n * p.Sk + range.end, 1);
  }
  remove_pairs(part);
  return part;
}

LongCase::Part LongCase::keys_of(int64_t first, int64_t step, int64_t count) const {
  Part part{problem_, std::vector<unsigned char>(problem_.Sq * count)};
  AttentionBackwardProblem& p = part.problem;
  thin_out(p.k, first, step);
  thin_out(p.v, first, step);
  p.Sk = p.k_rows = count;
  const Sequence s = problem_.sequence(0);
  for (int64_t i = 0; i < p.Sq; ++i) {
    const auto range = problem_.band(s).keys_of(i);
    for (int64_t n = 0; n < count; ++n) {
      const int64_t j = first + n * step;
      part.mask[i * count + n] = j >= range.begin && j < range.end;
    }
  }
  remove_pairs(part);
  return part;
}

const reference::Forward& LongCase::whole_forward() {
  if (whole_) return *whole_;
  constexpr int64_t kRows = 64;
  const AttentionBackwardProblem& p = problem_;
  whole_ = std::make_unique<reference::Forward>();
  whole_->o.resize(p.Sq * p.H * p.Dv);
  whole_->lse.resize(p.H * p.Sq);
  default_executor().parallel_for((p.Sq + kRows - 1) / kRows, [&](int64_t task, int) {
    Alone alone;
    const int64_t first = task * kRows, count = std::min(kRows, p.Sq - first);
    const Part part = rows_of(first, 1, count);
    const reference::Forward found = reference::attention_forward(part.problem, alone);
    std::copy(found.o.begin(), found.o.end(), whole_->o.begin() + first * p.H * p.Dv);
    for (int64_t h = 0; h < p.H; ++h) {
      std::copy_n(found.lse.begin() + h * count, count, whole_->lse.begin() + h * p.Sq + first);
    }
  });
  return *whole_;
}

// dk and dv in double, with lse and delta of all rows.
reference::Backward LongCase::key_gradients(const Part& keys) {
  const AttentionBackwardProblem& p = keys.problem;
  const reference::Forward& forward = whole_forward();
  reference::Backward out;
  out.dk.assign(p.Sk * p.Hkv * p.D, 0);
  out.dv.assign(p.Sk * p.Hkv * p.Dv, 0);
  default_executor().parallel_for(p.Sk * p.Hkv, [&](int64_t at, int) {
    const int64_t j = at / p.Hkv, kv_head = at % p.Hkv;
    const std::vector<double> key = row(p.k, j, kv_head, p.D), value = row(p.v, j, kv_head, p.Dv);
    for (int64_t h = kv_head * p.G; h < (kv_head + 1) * p.G; ++h) {
      for (int64_t i = 0; i < p.Sq; ++i) {
        if (keys.mask[i * p.Sk + j] == 0) continue;
        const std::vector<double> q = row(p.q, i, h, p.D), d_o = row(p.d_o, i, h, p.Dv);
        const double* o = &forward.o[(i * p.H + h) * p.Dv];
        const double probability = std::exp(static_cast<double>(p.scale) * dot(q, key) - forward.lse[h * p.Sq + i]);
        const double delta = dot(d_o, std::vector<double>(o, o + p.Dv));
        const double ds = probability * (dot(d_o, value) - delta) * static_cast<double>(p.scale);
        for (int64_t d = 0; d < p.D; ++d) out.dk[at * p.D + d] += ds * q[d];
        for (int64_t d = 0; d < p.Dv; ++d) out.dv[at * p.Dv + d] += probability * d_o[d];
      }
    }
  });
  return out;
}

CaseResult LongCase::check_forward(const std::string& candidate) {
  const ForwardOutputs found = runner_.run_forward(candidate);
  const Part rows = rows_of(0, row_step_, samples_);
  const AttentionProblem& p = rows.problem;
  const reference::Forward exact = reference::attention_forward(p, default_executor());
  const PlainForward plain = plain_forward(p);
  const double factor = allowed_factor(p, exact);
  const std::vector<double> o = rows_from(found.o.values(), row_step_, samples_, p.H * p.Dv), all = found.lse.values();
  std::vector<double> lse;
  for (int64_t h = 0; h < p.H; ++h) {
    for (int64_t n = 0; n < samples_; ++n) lse.push_back(all[h * problem_.Sq + n * row_step_]);
  }
  CaseResult result{runner_.data().spec.name, candidate, Pass::forward, true};
  result.seconds = found.seconds;
  judge(result, "o", o, exact.o, plain.o, {samples_, p.H, p.Dv}, found.o.view().dtype, factor);
  judge(result, "lse", lse, exact.lse, plain.lse, {p.H, samples_}, DType::f32, factor);
  return result;
}

CaseResult LongCase::check_backward(const std::string& candidate) {
  const reference::Forward& forward = whole_forward();
  HostTensor o = runner_.data().new_o(), lse = runner_.data().new_lse();
  for (std::size_t n = 0; n < forward.o.size(); ++n) o.set(static_cast<int64_t>(n), forward.o[n]);
  for (std::size_t n = 0; n < forward.lse.size(); ++n) lse.set(static_cast<int64_t>(n), forward.lse[n]);
  const BackwardOutputs found = runner_.run_backward_after(o, lse, candidate);
  const Part rows = rows_of(0, row_step_, samples_), keys = keys_of(0, key_step_, samples_);
  const AttentionProblem& p = rows.problem;
  const reference::Forward row_forward = reference::attention_forward(p, default_executor());
  const reference::Backward of_rows = reference::attention_backward(rows.problem, default_executor());
  const reference::Backward of_keys = key_gradients(keys);
  const PlainBackward plain_rows = plain_backward(rows.problem, row_forward),
                      plain_keys = plain_backward(keys.problem, forward);
  const double factor = allowed_factor(p, row_forward);
  const Gradients& g = found.gradients;
  const auto sampled = [&](const HostTensor& x, int64_t step, int64_t width) {
    return rows_from(x.values(), step, samples_, width);
  };
  CaseResult result{runner_.data().spec.name, candidate, Pass::backward, true};
  result.seconds = found.seconds;
  const DType dtype = runner_.data().spec.dtype;
  judge(result, "dq", sampled(g.dq, row_step_, p.H * p.D), of_rows.dq, plain_rows.dq, {samples_, p.H, p.D}, dtype,
        factor);
  judge(result, "dk", sampled(g.dk, key_step_, p.Hkv * p.D), of_keys.dk, plain_keys.dk, {samples_, p.Hkv, p.D}, dtype,
        factor);
  judge(result, "dv", sampled(g.dv, key_step_, p.Hkv * p.Dv), of_keys.dv, plain_keys.dv, {samples_, p.Hkv, p.Dv}, dtype,
        factor);
  return result;
}

std::vector<AttentionCase> long_cases(bool small) {
  std::vector<AttentionCase> out;
  const auto add = [&](int64_t length, int64_t size, DType dtype, Causal causal, bool forward_only) {
    const std::string word = dtype == DType::f8e4m3 ? "e4m3"
                             : dtype == DType::f32  ? "f32"
                             : dtype == DType::bf16 ? "bf16"
                                                    : "f16";
    out.push_back({.name = text("long_", length, "_d", size, causal == Causal::none ? "" : "_causal", "_", word),
                   .dtype = dtype,
                   .H = 2,
                   .Hkv = 1,
                   .Sq = length,
                   .Sk = length,
                   .D = size,
                   .Dv = size,
                   .causal = causal,
                   .forward_only = forward_only});
  };
  for (const int64_t length : small ? std::vector<int64_t>{300} : std::vector<int64_t>{1024, 4096, 16384}) {
    for (const int64_t size : {64, 128}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        for (const Causal causal : {Causal::none, Causal::bottom_right}) {
          add(length, size, dtype, causal, false);
        }
      }
    }
  }
  // What a backward is judged by costs all rows: of head sizes between and above those, not in every dtype; e4m3 has
  // none.
  for (const int64_t length : small ? std::vector<int64_t>{300} : std::vector<int64_t>{4096, 16384}) {
    for (const Causal causal : {Causal::none, Causal::bottom_right}) {
      for (const int64_t size : {96, 192}) add(length, size, DType::bf16, causal, false);
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        const bool backward = length == 4096 && dtype != DType::f32;
        add(length, 256, dtype, causal, !backward);
      }
      if (small) continue;  // the CPU has no products of e4m3
      for (const int64_t size : {64, 128}) add(length, size, DType::f8e4m3, causal, true);
    }
  }
  return out;
}

}  // namespace heddle::kit
