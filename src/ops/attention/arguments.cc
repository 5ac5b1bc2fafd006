#include "ops/attention/arguments.h"

#include <array>
#include <initializer_list>

#include "core/overlap.h"
#include "ops/attention/problem_builder.h"

namespace heddle {
namespace {

// All that a call reads beside its operands.
std::array<Named, 17> read_options(const AttentionOptions& o) {
  return {{{"bias", &o.bias},
           {"mask", &o.mask},
           {"alibi_slopes", &o.alibi_slopes},
           {"sink", &o.sink},
           {"cu_seqlens_q", &o.cu_seqlens_q},
           {"cu_seqlens_k", &o.cu_seqlens_k},
           {"seqused_q", &o.seqused_q},
           {"seqused_k", &o.seqused_k},
           {"page_table", &o.page_table},
           {"cache_batch_idx", &o.cache_batch_idx},
           {"cache_leftpad", &o.cache_leftpad},
           {"q_offset", &o.q_offset},
           {"key_offset", &o.key_offset},
           {"draft_mask", &o.draft_mask},
           {"q_scale", &o.q_scale},
           {"k_scale", &o.k_scale},
           {"v_scale", &o.v_scale}}};
}

void apart(const Check& check, std::initializer_list<Named> outputs, std::initializer_list<Named> inputs,
           const AttentionOptions& options) {
  check_apart(check, std::span(outputs), std::span(inputs));
  check_apart(check, std::span(outputs), read_options(options));
}

}  // namespace

void check_apart(const Check& check, std::span<const Named> outputs, std::span<const Named> inputs) {
  for (auto output = outputs.begin(); output != outputs.end(); ++output) {
    const auto& [name, view] = *output;
    if (!view->given()) continue;
    for (const auto& [read_name, read] : inputs) {
      check.require(!read->given() || !may_share_memory(*view, *read), name, " shares memory with ", read_name,
                    ", which is read while it is written; found ", name, " ", *view, ", ", read_name, " ", *read);
    }
    for (auto other = outputs.begin(); other != output; ++other) {
      check.require(!other->second->given() || !may_share_memory(*other->second, *view), other->first, " and ", name,
                    " share memory: outputs must be apart; found ", other->first, " ", *other->second, ", ", name, " ",
                    *view);
    }
  }
}

AttentionProblem checked_forward_problem(const Check& check, const TensorView& q, const TensorView& k,
                                         const TensorView& v, const TensorView& o, const TensorView& lse,
                                         const AttentionOptions& options, const KeyStorage& storage,
                                         const OutputNames& outputs) {
  AttentionProblem p;
  const ProblemBuilder builder(check, q, k, v, options, storage);
  builder.build(p);
  if (o.given()) {
    p.o = builder.output(p, o, outputs.o);
    check.not_overlapping(o, outputs.o);
  }
  if (lse.given()) {
    p.lse = builder.per_row(p, lse, outputs.lse);
    check.not_overlapping(lse, outputs.lse);
  }
  apart(check, {{outputs.o, &o}, {outputs.lse, &lse}},
        {{"q", &q}, {name_of(storage.names.k), &k}, {name_of(storage.names.v), &v}}, options);
  return p;
}

AttentionBackwardProblem checked_backward_problem(const Check& check, const TensorView& q, const TensorView& k,
                                                  const TensorView& v, const TensorView& o, const TensorView& lse,
                                                  const TensorView& d_o, const TensorView& d_lse,
                                                  const AttentionGradients& gradients,
                                                  const AttentionOptions& options) {
  AttentionBackwardProblem p;
  const ProblemBuilder builder(check, q, k, v, options);
  builder.build(p);
  check.require(k.dtype != DType::f8e4m3, "k is float8_e4m3fn, which has no backward");
  check.require(p.precision != Precision::int8_qk, "precision is int8_qk, which has no backward");
  check.require(!p.draft_mask, "draft_mask has no backward: give the pairs as mask");
  check.require(!p.page_table, "page_table has no backward: gather the keys first");
  check.require(!p.cache_batch_idx, "cache_batch_idx has no backward: gather the keys first");
  check.require(!p.cache_leftpad, "cache_leftpad has no backward: gather the keys first");
  if (o.given()) p.o = builder.output(p, o, "o");
  if (lse.given()) p.lse = builder.per_row(p, lse, "lse");
  if (d_o.given()) p.d_o = builder.output(p, d_o, "d_o");
  if (d_lse.given()) p.d_lse = builder.per_row(p, d_lse, "d_lse");
  p.accumulate = gradients.accumulate;
  p.merged = gradients.merged;
  if (gradients.dq.given()) {
    p.dq = builder.gradient(gradients.dq, "dq", q, "q", p.accumulate);
    check.not_overlapping(gradients.dq, "dq");
  }
  if (gradients.dk.given()) {
    p.dk = builder.gradient(gradients.dk, "dk", k, "k", p.accumulate);
    check.not_overlapping(gradients.dk, "dk");
  }
  if (gradients.dv.given()) {
    p.dv = builder.gradient(gradients.dv, "dv", v, "v", p.accumulate);
    check.not_overlapping(gradients.dv, "dv");
  }
  if (gradients.dbias.given()) {
    const TensorView &dbias = gradients.dbias, &bias = options.bias;
    check.require(bias.given(), "dbias is given but bias is not");
    check.require(dbias.dtype == bias.dtype, "dbias is ", name_of(dbias.dtype), ": it must have bias's dtype, ",
                  name_of(bias.dtype));
    p.dbias = builder.plane(p, dbias, "dbias");
    for (int i = 0; i < 4; ++i) {
      check.require(dbias.shape[i] == bias.shape[i], "dbias is ", dbias, ": it must have the shape of bias, ", bias);
    }
    check.not_overlapping(dbias, "dbias");
    p.bias_batch = bias.shape[0];
    p.bias_heads = bias.shape[1];
    p.bias_rows = bias.shape[2];
    p.bias_columns = bias.shape[3];
  }
  if (gradients.dsink.given()) {
    check.require(options.sink.given(), "dsink is given but sink is not");
    check.tensor(gradients.dsink, "dsink", DType::f32, q.device, 1);
    check.require(gradients.dsink.shape[0] == p.H, "dsink is ", gradients.dsink, ": it must have the shape of sink, [",
                  p.H, "]");
    check.not_overlapping(gradients.dsink, "dsink");
    p.dsink = plane_of(gradients.dsink);
    p.dsink.stride_h = gradients.dsink.stride[0];
  }
  apart(check,
        {{"dq", &gradients.dq},
         {"dk", &gradients.dk},
         {"dv", &gradients.dv},
         {"dbias", &gradients.dbias},
         {"dsink", &gradients.dsink}},
        {{"q", &q}, {"k", &k}, {"v", &v}, {"o", &o}, {"lse", &lse}, {"d_o", &d_o}, {"d_lse", &d_lse}}, options);
  return p;
}

}  // namespace heddle
