#include "kit/case_data.h"

#include "core/check.h"
#include "kit/case_maker.h"
#include "ops/attention/arguments.h"

namespace heddle::kit {

CaseData::CaseData(const AttentionCase& c, std::uint64_t seed) : spec(c) { Maker(*this, seed).make(); }

AttentionOptions CaseData::options() const {
  AttentionOptions out;
  out.scale = spec.scale;
  out.causal = spec.causal;
  out.window_left = spec.window_left;
  out.window_right = spec.window_right;
  out.softcap = spec.softcap;
  out.alibi_slopes = alibi.view();
  out.bias = bias.view();
  out.mask = mask.view();
  out.sink = sink.view();
  out.dropout = {spec.dropout, 0x1234567890ABCDEFu, 42};
  out.cu_seqlens_q = cu_seqlens_q.view();
  out.cu_seqlens_k = cu_seqlens_k.view();
  out.seqused_q = seqused_q.view();
  out.seqused_k = seqused_k.view();
  out.page_table = page_table.view();
  out.cache_batch_idx = cache_batch_idx.view();
  out.cache_leftpad = leftpad.view();
  out.q_offset = q_offset.view();
  out.key_offset = key_offset.view();
  out.q_step = spec.q_step;
  out.key_step = spec.key_step;
  out.float32_out = spec.float32_out;
  out.precision = spec.precision;
  out.draft_mask = draft_mask.view();
  out.q_scale = q_scale.view();
  out.k_scale = k_scale.view();
  out.v_scale = v_scale.view();
  return out;
}

HostTensor CaseData::new_o() const {
  const auto& shape = q.view().shape;
  if (spec.packed_q) return HostTensor::output(spec.o_dtype(), {shape[0], spec.H, spec.Dv}, spec.layout_o);
  return HostTensor::output(spec.o_dtype(), {spec.B, spec.Sq, spec.H, spec.Dv}, spec.layout_o);
}

HostTensor CaseData::new_lse() const {
  const Layout layout = spec.layout_o == Layout::padded_rows ? Layout::padded_rows : Layout::contiguous;
  if (spec.packed_q) return HostTensor::output(DType::f32, {spec.H, q.view().shape[0]}, layout);
  return HostTensor::output(DType::f32, {spec.B, spec.H, spec.Sq}, layout);
}

Gradients CaseData::new_gradients() const {
  const auto like = [&](const HostTensor& x, Layout layout) {
    const TensorView& view = x.view();
    if (!view.given()) return HostTensor();
    return HostTensor::output(view.dtype, {view.shape.begin(), view.shape.begin() + view.rank}, layout);
  };
  return {like(q, spec.layout_o), like(k, spec.layout_o), like(v, spec.layout_o), like(bias, spec.layout_o),
          like(sink, Layout::contiguous)};
}

AttentionProblem CaseData::problem() const {
  return checked_forward_problem(Check("attention_forward"), q.view(), k.view(), v.view(), {}, {}, options());
}

AttentionBackwardProblem CaseData::backward_problem(const Gradients& gradients) const {
  return checked_backward_problem(Check("attention_backward"), q.view(), k.view(), v.view(), {}, {}, d_o.view(),
                                  d_lse.view(), gradients.views(), options());
}

std::string CaseData::describe() const {
  const char* causal[] = {"none", "top_left", "bottom_right"};
  std::string out = text(spec.name, ": q ", q.view(), ", k ", k.view(), ", v ", v.view(), ", ",
                         heddle::name_of(spec.dtype), ", causal ", causal[static_cast<int>(spec.causal)]);
  if (spec.window_left >= 0 || spec.window_right >= 0) {
    out += text(", window (", spec.window_left, ", ", spec.window_right, ")");
  }
  if (spec.softcap > 0) out += text(", softcap ", spec.softcap);
  if (spec.dropout > 0) out += text(", dropout ", spec.dropout);
  if (spec.stepped()) out += text(", steps of ", spec.q_step, " and ", spec.key_step);
  const std::pair<const char*, const HostTensor*> tensors[] = {{"alibi", &alibi},
                                                               {"bias", &bias},
                                                               {"mask", &mask},
                                                               {"sink", &sink},
                                                               {"cu_seqlens_q", &cu_seqlens_q},
                                                               {"cu_seqlens_k", &cu_seqlens_k},
                                                               {"seqused_q", &seqused_q},
                                                               {"seqused_k", &seqused_k},
                                                               {"page_table", &page_table},
                                                               {"cache_batch_idx", &cache_batch_idx},
                                                               {"leftpad", &leftpad},
                                                               {"q_offset", &q_offset},
                                                               {"key_offset", &key_offset},
                                                               {"draft_mask", &draft_mask},
                                                               {"q_scale", &q_scale},
                                                               {"k_scale", &k_scale},
                                                               {"v_scale", &v_scale}};
  for (const auto& [name, tensor] : tensors) {
    if (tensor->given()) out += text(", ", name, " ", tensor->view());
  }
  return out;
}

}  // namespace heddle::kit
