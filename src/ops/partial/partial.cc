// merge_attention and its gradients: check everything, then write.
#include "ops/partial/partial.h"

#include <cstdio>

#include "core/overlap.h"
#include "core/runtime.h"
#include "ops/attention/problem_builder.h"
#include "ops/partial/choice.h"

namespace heddle {
namespace {

constexpr std::int64_t kMaxHeadSize = 256;

bool same_view(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.shape == b.shape && a.stride == b.stride;
}

// What errors call entry n of a list. Holds it itself: a call that is right allocates nothing.
class Name {
 public:
  Name(const char* const (&around)[2], std::size_t n) {
    std::snprintf(text_, sizeof text_, "%s%zu%s", around[0], n, around[1]);
  }
  operator const char*() const { return text_; }

 private:
  char text_[48];
};
void append(std::string& out, const Name& name) { out += static_cast<const char*>(name); }

constexpr MergeNames kGradientNames{.o = {"gradients[", "].o"}, .lse = {"gradients[", "].lse"}};

class MergeChecks {
 public:
  MergeChecks(const Check& check, std::span<const Partial> partials, const MergeNames& names)
      : check_(check), partials_(partials), names_(names), first_(names.o, 0) {}

  // The partials themselves: sizes, dtypes, where they are.
  void read(MergeProblem& p) const {
    check_.require(!partials_.empty(), "partials are none: there must be at least one");
    const TensorView& o = first();
    check_.require(o.given(), first_, " is missing");
    check_.require(o.rank == 3 || o.rank == 4, first_, " has ", o.rank,
                   " dimensions: it must be [B, Sq, H, Dv], or packed [total_q, H, Dv]");
    check_.require(is_float(o.dtype), first_, " is ", name_of(o.dtype), ": it must be float32, float16 or bfloat16");
    for (std::size_t n = 0; n < partials_.size(); ++n) {
      result(partials_[n].o, Name(names_.o, n), o.dtype);
      per_row(partials_[n].lse, Name(names_.lse, n));
    }
    const bool packed = o.rank == 3;
    p.device = o.device;
    p.B = packed ? 1 : o.shape[0];
    p.S = o.shape[packed ? 0 : 1];
    p.H = heads();
    p.Dv = o.shape[o.rank - 1];
    check_.require(p.Dv >= 1 && p.Dv <= kMaxHeadSize, first_, " has head size ", p.Dv, ": it must be from 1 to ",
                   kMaxHeadSize);
    p.partials = partials_;
  }

  // What a merge writes, [B, Sq, H, Dv]: of partials in f32 any of their dtypes.
  void merged_result(const TensorView& view, const char* name) const {
    if (first().dtype != DType::f32) return wide_result(view, name);
    check_.require(is_float(view.dtype), name, " is ", name_of(view.dtype),
                   ": it must be float32, float16 or bfloat16");
    result(view, name, view.dtype);
  }
  // f32 or of the partials' dtype, [B, Sq, H, Dv].
  void wide_result(const TensorView& view, const char* name) const {
    check_.require(view.dtype == DType::f32 || view.dtype == first().dtype, name, " is ", name_of(view.dtype),
                   ": it must be float32", first().dtype == DType::f32 ? "" : " or have the partials' dtype, ",
                   first().dtype == DType::f32 ? "" : name_of(first().dtype));
    result(view, name, view.dtype);
  }
  void result(const TensorView& view, const char* name, DType dtype) const {
    check_.tensor(view, name, dtype, first().device, first().rank, first_);
    check_.require(view.shape == first().shape, name, " is ", view, ": it must have the shape of ", first_, ", ",
                   first());
  }
  // f32 [B, H, Sq], packed [H, total_q].
  void per_row(const TensorView& view, const char* name) const {
    const TensorView& o = first();
    const bool packed = o.rank == 3;
    check_.tensor(view, name, DType::f32, first().device, o.rank - 1, first_);
    const std::int64_t rows = o.shape[packed ? 0 : 1];
    check_.require(packed ? view.shape[0] == heads() && view.shape[1] == rows
                          : view.shape[0] == o.shape[0] && view.shape[1] == heads() && view.shape[2] == rows,
                   name, " is ", view, ": it must be ", packed ? "[H, total_q]" : "[B, H, Sq]", " of ", first_, ", ",
                   o);
  }
  Plane per_head(const TensorView& view, const char* name) const {
    if (!view.given()) return {};
    check_.tensor(view, name, DType::f32, first().device, 1, first_);
    check_.require(view.shape[0] == heads(), name, " is ", view, ": it must have one logit for each of ", heads(),
                   " heads");
    Plane plane = plane_of(view);
    plane.stride_h = view.stride[0];
    return plane;
  }

  // An output shares no memory with what is read, but, if `itself` allows it, may be that tensor.
  void apart(const TensorView& written, const char* name, const TensorView& read, const char* read_name,
             bool itself = false) const {
    if (!written.given() || !read.given() || !may_share_memory(written, read)) return;
    check_.require(itself && same_view(written, read), name, " shares memory with ", read_name,
                   itself ? " without being it" : "", ", which is read while it is written; found ", name, " ", written,
                   ", ", read_name, " ", read);
  }
  void apart_from_partials(const TensorView& written, const char* name, bool may_be_o, bool may_be_lse) const {
    for (std::size_t n = 0; written.given() && n < partials_.size(); ++n) {
      apart(written, name, partials_[n].o, Name(names_.o, n), may_be_o);
      apart(written, name, partials_[n].lse, Name(names_.lse, n), may_be_lse);
    }
  }

 private:
  static bool is_float(DType dtype) { return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16; }
  const TensorView& first() const { return partials_[0].o; }
  std::int64_t heads() const { return first().shape[first().rank - 2]; }

  const Check& check_;
  const std::span<const Partial> partials_;
  const MergeNames& names_;
  const Name first_;
};

}  // namespace

MergeProblem checked_merge_problem(const Check& check, std::span<const Partial> partials, const TensorView& sink,
                                   const TensorView& o, const TensorView& lse, const MergeNames& names) {
  const MergeChecks checks(check, partials, names);
  const auto& [o_name, lse_name] = names.outputs;
  MergeProblem p;
  checks.read(p);
  p.sink = checks.per_head(sink, "sink");
  if (o.given()) {
    checks.merged_result(o, o_name);
    check.not_overlapping(o, o_name);
    p.o = operand_of(o);
  }
  if (lse.given()) {
    checks.per_row(lse, lse_name);
    check.not_overlapping(lse, lse_name);
    p.lse = MergeProblem::per_row(lse);
  }
  checks.apart_from_partials(o, o_name, true, false);
  checks.apart_from_partials(lse, lse_name, false, true);
  checks.apart(o, o_name, sink, "sink");
  checks.apart(lse, lse_name, sink, "sink");
  check.require(!o.given() || !lse.given() || !may_share_memory(o, lse), o_name, " and ", lse_name,
                " share memory: outputs must be apart; found ", o_name, " ", o, ", ", lse_name, " ", lse);
  return p;
}

MergeBackwardProblem checked_merge_backward_problem(const Check& check, std::span<const Partial> partials,
                                                    const TensorView& sink, const TensorView& d_o,
                                                    const TensorView& d_lse, std::span<const Partial> gradients,
                                                    const TensorView& dsink, const MergeNames& names) {
  const MergeChecks checks(check, partials, names);
  MergeBackwardProblem p;
  checks.read(p);
  p.sink = checks.per_head(sink, "sink");
  check.require(d_o.given(), "d_o is missing");
  checks.wide_result(d_o, "d_o");
  p.d_o = operand_of(d_o);
  if (d_lse.given()) {
    checks.per_row(d_lse, "d_lse");
    p.d_lse = MergeProblem::per_row(d_lse);
  }
  check.require(gradients.size() == partials.size(), "gradients are ", gradients.size(), " and partials are ",
                partials.size(), ": there must be as many");
  check.require(!dsink.given() || sink.given(), "dsink is given but sink is not");
  p.dsink = checks.per_head(dsink, "dsink");
  p.gradients = gradients;

  const auto written = [&](const TensorView& view, const char* name) {
    check.not_overlapping(view, name);
    checks.apart_from_partials(view, name, false, false);
    checks.apart(view, name, sink, "sink");
    checks.apart(view, name, d_o, "d_o");
    checks.apart(view, name, d_lse, "d_lse");
  };
  for (std::size_t n = 0; n < gradients.size(); ++n) {
    const auto& [to, to_lse] = gradients[n];
    const Name name(kGradientNames.o, n), lse_name(kGradientNames.lse, n);
    if (to.given()) {
      checks.result(to, name, partials[n].o.dtype);
      written(to, name);
    }
    if (to_lse.given()) {
      checks.per_row(to_lse, lse_name);
      written(to_lse, lse_name);
    }
  }
  if (dsink.given()) written(dsink, "dsink");
  // Outputs are apart from each other.
  const std::size_t outputs = 2 * gradients.size() + 1;
  const auto view_of = [&](std::size_t n) -> const TensorView& {
    if (n + 1 == outputs) return dsink;
    return n % 2 == 0 ? gradients[n / 2].o : gradients[n / 2].lse;
  };
  const auto name_of_output = [&](std::size_t n) -> std::string {
    return n + 1 == outputs ? "dsink"
                            : static_cast<const char*>(Name(n % 2 == 0 ? kGradientNames.o : kGradientNames.lse, n / 2));
  };
  for (std::size_t n = 0; n < outputs; ++n) {
    for (std::size_t other = 0; other < n; ++other) {
      const bool apart =
          !view_of(n).given() || !view_of(other).given() || !may_share_memory(view_of(n), view_of(other));
      if (!apart) {
        check.require(false, name_of_output(other), " and ", name_of_output(n),
                      " share memory: outputs must be apart; found ", view_of(other), " and ", view_of(n));
      }
    }
  }
  return p;
}

void merge_attention(std::span<const Partial> partials, const TensorView& o, const TensorView& lse,
                     const MergeOptions& options, const Runtime& runtime) {
  merge_attention_with({}, partials, o, lse, options, runtime, [&](std::size_t) { return runtime.workspace; });
}

std::size_t merge_attention_workspace(std::span<const Partial> partials, const TensorView& o, const TensorView& lse,
                                      const MergeOptions& options, const Runtime& runtime) {
  const Check check("merge_attention", Data::to_come);
  const MergeProblem p = checked_merge_problem(check, partials, options.sink, o, lse);
  const int workers = workers_of(runtime);
  return choose(check, p, wish_of<MergeProblem>(check, options.force), workers).workspace(p, workers);
}

void merge_attention_with(const MergeNames& names, std::span<const Partial> partials, const TensorView& o,
                          const TensorView& lse, const MergeOptions& options, const Runtime& runtime,
                          const std::function<Workspace(std::size_t bytes)>& scratch) {
  const Check check("merge_attention");
  const MergeProblem p = checked_merge_problem(check, partials, options.sink, o, lse, names);
  check.require(o.given(), names.outputs.o, " is missing");
  const int workers = workers_of(runtime);
  const MergeKernel& kernel = choose(check, p, wish_of<MergeProblem>(check, options.force), workers);
  const std::size_t needed = kernel.workspace(p, workers);
  Runtime with = runtime;
  with.workspace = needed > 0 ? scratch(needed) : Workspace{};
  run(check, "merge_attention", kernel, p, with, needed);
}

std::vector<Candidate> explain_merge_attention(std::span<const Partial> partials, const TensorView& o,
                                               const TensorView& lse, const MergeOptions& options,
                                               const Runtime& runtime) {
  return explain_merge_attention_as({}, partials, o, lse, options, runtime);
}

std::vector<Candidate> explain_merge_attention_as(const MergeNames& names, std::span<const Partial> partials,
                                                  const TensorView& o, const TensorView& lse,
                                                  const MergeOptions& options, const Runtime& runtime) {
  const Check check("explain_merge_attention", Data::to_come);
  return explained(checked_merge_problem(check, partials, options.sink, o, lse, names),
                   wish_of<MergeProblem>(check, options.force), workers_of(runtime));
}

void merge_attention_backward(std::span<const Partial> partials, const TensorView& d_o, const TensorView& d_lse,
                              std::span<const Partial> gradients, const TensorView& dsink, const MergeOptions& options,
                              const Runtime& runtime) {
  merge_attention_backward_with({}, partials, d_o, d_lse, gradients, dsink, options, runtime,
                                [&](std::size_t) { return runtime.workspace; });
}

std::size_t merge_attention_backward_workspace(std::span<const Partial> partials, const TensorView& d_o,
                                               const TensorView& d_lse, std::span<const Partial> gradients,
                                               const TensorView& dsink, const MergeOptions& options,
                                               const Runtime& runtime) {
  const Check check("merge_attention_backward", Data::to_come);
  const MergeBackwardProblem p =
      checked_merge_backward_problem(check, partials, options.sink, d_o, d_lse, gradients, dsink);
  const int workers = workers_of(runtime);
  return choose(check, p, wish_of<MergeBackwardProblem>(check, options.force), workers).workspace(p, workers);
}

void merge_attention_backward_with(const MergeNames& names, std::span<const Partial> partials, const TensorView& d_o,
                                   const TensorView& d_lse, std::span<const Partial> gradients, const TensorView& dsink,
                                   const MergeOptions& options, const Runtime& runtime,
                                   const std::function<Workspace(std::size_t bytes)>& scratch) {
  const Check check("merge_attention_backward");
  const MergeBackwardProblem p =
      checked_merge_backward_problem(check, partials, options.sink, d_o, d_lse, gradients, dsink, names);
  const int workers = workers_of(runtime);
  const MergeBackwardKernel& kernel = choose(check, p, wish_of<MergeBackwardProblem>(check, options.force), workers);
  const std::size_t needed = kernel.workspace(p, workers);
  Runtime with = runtime;
  with.workspace = needed > 0 ? scratch(needed) : Workspace{};
  run(check, "merge_attention_backward", kernel, p, with, needed);
}

std::vector<Candidate> explain_merge_attention_backward(std::span<const Partial> partials, const TensorView& d_o,
                                                        const TensorView& d_lse, std::span<const Partial> gradients,
                                                        const TensorView& dsink, const MergeOptions& options,
                                                        const Runtime& runtime) {
  const Check check("explain_merge_attention_backward", Data::to_come);
  return explained(checked_merge_backward_problem(check, partials, options.sink, d_o, d_lse, gradients, dsink),
                   wish_of<MergeBackwardProblem>(check, options.force), workers_of(runtime));
}

}  // namespace heddle
