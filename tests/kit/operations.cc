#include "kit/operations.h"

#include "core/check.h"
#include "heddle/adaptive.h"
#include "heddle/linear.h"
#include "kit/adaptive_case.h"
#include "kit/linear_gradients.h"
#include "kit/linear_table.h"
#include "kit/merge_case.h"
#include "kit/sparse_case.h"

namespace heddle::kit {
namespace {

std::string described(const AttentionCase& spec) {
  const std::string line = CaseData(spec).describe(), name = text(spec.name, ": ");
  return line.starts_with(name) ? line.substr(name.size()) : line;
}

std::string described(const MergeCase& s) {
  return text(s.partials, " results of ", name_of(s.dtype), s.packed ? ", packed" : "", ", B ", s.B, ", S ", s.S,
              ", H ", s.H, ", Dv ", s.Dv, s.sink ? ", sink" : "", s.d_lse ? ", d_lse" : "",
              s.layout != Layout::contiguous ? ", strided" : "");
}

std::string described(const SparseCase& spec) {
  return text(described(spec.call), "; lists of ", spec.lists.entries, " blocks of ", spec.lists.block_size, " keys");
}

std::string described(const AdaptiveCase& spec) { return text(described(spec.call), "; tol ", spec.tol); }

std::string described(const NamedLinearCase& row) {
  const LinearCase& c = row.spec;
  std::string rows;
  for (const std::int64_t extent : c.rows) rows += text(extent, ", ");
  return text("x [", rows, c.K, "] ", name_of(c.dtype), ", N ", c.N, ", ", name_of(c.activation),
              c.norm == Norm::none ? "" : text(", ", name_of(c.norm)), c.bias ? ", bias" : "",
              c.residual ? ", residual" : "");
}

class AttentionRow final : public OperationCase {
 public:
  AttentionRow(const AttentionCase& spec, Device device) : runner_(spec, 1, device) {}
  std::vector<std::string> candidates(Pass pass) const override { return runner_.candidates(pass); }
  CaseResult check(Pass pass, const std::string& candidate) override { return runner_.check(pass, candidate); }

 private:
  CaseRunner runner_;
};

class MergeRow final : public OperationCase {
 public:
  MergeRow(const MergeCase& spec, Device) : data_(spec) {}
  std::vector<std::string> candidates(Pass pass) const override { return merge_candidates(data_, pass); }
  CaseResult check(Pass pass, const std::string& candidate) override {
    return pass == Pass::forward ? check_merge(data_, candidate, data_.s.dtype)
                                 : check_merge_backward(data_, candidate);
  }

 private:
  MergeData data_;
};

class SparseRow final : public OperationCase {
 public:
  SparseRow(const SparseCase& spec, Device) : runner_(spec) {}
  std::vector<std::string> candidates(Pass pass) const override { return runner_.candidates(pass); }
  CaseResult check(Pass pass, const std::string& candidate) override { return runner_.check(pass, candidate); }

 private:
  SparseRunner runner_;
};

class AdaptiveRow final : public OperationCase {
 public:
  AdaptiveRow(const AdaptiveCase& spec, Device)
      : name_(text("adaptive_", spec.name)), tol_(spec.tol), data_(spec.call) {}
  std::vector<std::string> candidates(Pass pass) const override {
    const TensorView &q = data_.q.view(), &k = data_.k.view(), &v = data_.v.view();
    return kernels_of(pass == Pass::forward ? explain_adaptive_attention(q, k, v, {.tol = tol_}, data_.options())
                                            : explain_adaptive_attention_backward(q, k, v, {}, {}, data_.options()));
  }
  CaseResult check(Pass pass, const std::string& candidate) override {
    AdaptiveResult forward(data_);
    const double seconds = seconds_of([&] { forward = run_adaptive(data_, tol_, candidate); });
    CaseResult out;
    if (pass == Pass::forward) {
      out = judge_.judge(tol_, forward, candidate);
      out.seconds = seconds;
    } else {
      const AdaptiveResult after = exact_for_blocks(data_, tol_, forward);
      Gradients gradients;
      const double backward = seconds_of([&] { gradients = run_adaptive_backward(data_, after, candidate); });
      out = judge_.judge(after, gradients, candidate);
      out.seconds = backward;
    }
    out.case_name = name_;
    return out;
  }

 private:
  const std::string name_;
  const float tol_;
  const CaseData data_;
  AdaptiveJudge judge_{data_};
};

class LinearRow final : public OperationCase {
 public:
  LinearRow(const NamedLinearCase& spec, Device) : name_(spec.name), layer_(spec.spec) {}
  std::vector<std::string> candidates(Pass) const override {
    return kernels_of(explain_linear(layer_.x.view(), layer_.packed.weights(), layer_.options()));
  }
  CaseResult check(Pass pass, const std::string& candidate) override {
    LinearOptions options = layer_.options();
    options.force = candidate;
    CaseResult result{name_, candidate, pass};
    result.seconds = seconds_of([&] { result.tensors = {layer_.run(options)}; });
    result.passed = result.tensors[0].passed;
    return result;
  }

 private:
  const std::string name_;
  LinearLayer layer_;
};

class LinearBackwardRow final : public OperationCase {
 public:
  LinearBackwardRow(const NamedLinearCase& spec, Device) : name_(spec.name), gradients_(spec.spec) {}
  std::vector<std::string> candidates(Pass) const override {
    const LinearLayer& layer = gradients_.layer;
    LinearGradients to;
    const HostTensor dx = gradients_.output('x');
    to.dx = dx.view();
    return kernels_of(
        explain_linear_backward(gradients_.dy.view(), layer.x.view(), layer.packed.weights(), to, layer.options()));
  }
  CaseResult check(Pass pass, const std::string& candidate) override {
    LinearOptions options = gradients_.layer.options();
    options.force = candidate;
    CaseResult result{name_, candidate, pass, true};
    result.seconds = seconds_of([&] { result.tensors = gradients_.run(options); });
    for (const Comparison& tensor : result.tensors) result.passed &= tensor.passed;
    return result;
  }

 private:
  const std::string name_;
  LinearGradientLayer gradients_;
};

template <class Row, class Spec>
OperationRow row_of(const char* operation, const std::string& name, Purpose purpose, DType dtype, bool backward,
                    const Spec& spec) {
  return {.operation = operation,
          .name = name,
          .purpose = purpose,
          .dtype = dtype,
          .passes = backward ? std::vector{Pass::forward, Pass::backward} : std::vector{Pass::forward},
          .open = [spec](Device device) { return std::make_unique<Row>(spec, device); },
          .describe = [spec] { return described(spec); }};
}

std::vector<OperationRow> attention_rows(Precision precision) {
  std::vector<OperationRow> rows;
  for (const AttentionCase& spec : precision == Precision::tf32      ? in_tf32(attention_cases())
                                   : precision == Precision::int8_qk ? in_int8_qk(attention_cases())
                                                                     : attention_cases()) {
    rows.push_back(row_of<AttentionRow>("attention", spec.name, spec.purpose, spec.dtype, spec.has_backward(), spec));
  }
  return rows;
}

std::vector<OperationRow> merge_rows() {
  std::vector<OperationRow> rows;
  for (const MergeCase& spec : merge_cases()) {
    rows.push_back(
        row_of<MergeRow>("merge_attention", text("merge_", spec.name), Purpose::feature, spec.dtype, true, spec));
  }
  return rows;
}

std::vector<OperationRow> sparse_rows() {
  std::vector<OperationRow> rows;
  for (const SparseCase& spec : sparse_cases()) {
    rows.push_back(row_of<SparseRow>("sparse_attention", text("sparse_", spec.name), Purpose::feature, spec.call.dtype,
                                     spec.has_gradients(), spec));
  }
  return rows;
}

std::vector<OperationRow> adaptive_rows() {
  std::vector<OperationRow> rows;
  for (const AdaptiveCase& spec : adaptive_cases()) {
    rows.push_back(row_of<AdaptiveRow>("adaptive_attention", text("adaptive_", spec.name), Purpose::feature,
                                       spec.call.dtype, spec.has_gradients(), spec));
  }
  return rows;
}

std::vector<OperationRow> linear_rows() {
  std::vector<OperationRow> rows;
  const auto forward = [&](const std::string& format) {
    for (const NamedLinearCase& spec : linear_forward_cases(format)) {
      rows.push_back(row_of<LinearRow>("linear", spec.name, Purpose::feature, spec.spec.dtype, false, spec));
    }
  };
  for (const std::string& format : kBackwardFormats) {
    forward(format);
    for (const NamedLinearCase& spec : linear_backward_cases(format)) {
      rows.push_back(row_of<LinearBackwardRow>("linear", spec.name, Purpose::feature, spec.spec.dtype, false, spec));
      rows.back().passes = {Pass::backward};
    }
  }
  for (const std::string& format : kForwardFormats) forward(format);
  return rows;
}

}  // namespace

const std::vector<std::string>& operation_names() {
  static const std::vector<std::string> names = {"attention", "merge_attention", "sparse_attention",
                                                 "adaptive_attention", "linear"};
  return names;
}

std::vector<OperationRow> operation_rows(const std::string& operation, Precision precision) {
  if (operation == "attention") return attention_rows(precision);
  if (precision != Precision::f32) return {};
  if (operation == "merge_attention") return merge_rows();
  if (operation == "sparse_attention") return sparse_rows();
  if (operation == "adaptive_attention") return adaptive_rows();
  return linear_rows();
}

}  // namespace heddle::kit
