// What becomes of scores: scale, softcap, causality, window, dropout, per-head numbers, bias and masks.
#include <algorithm>
#include <cmath>

#include "ops/attention/problem_builder.h"

namespace heddle {

void ProblemBuilder::scores(AttentionProblem& p) const {
  p.scale = options_.scale.value_or(1.0f / std::sqrt(static_cast<float>(p.D)));
  check_.require(std::isfinite(p.scale), "scale is ", p.scale, ": it must be finite");
  p.softcap = options_.softcap;
  check_.require(std::isfinite(p.softcap) && p.softcap >= 0, "softcap is ", p.softcap,
                 ": it must be finite and at least 0 (0: none)");
  check_.require(options_.window_left >= -1 && options_.window_right >= -1, "window is (", options_.window_left, ", ",
                 options_.window_right, "): each side must be at least 0, or -1 for open");
  p.causal = options_.causal;
  // Wider than any two positions are apart is the same as open, and keeps sums with positions in range.
  p.window_left = std::min(options_.window_left, 2 * kMaxLength);
  p.window_right = std::min(options_.window_right, 2 * kMaxLength);
  const float drop = options_.dropout.p;
  check_.require(drop >= 0 && drop < 1, "dropout.p is ", drop, ": it must be in [0, 1)");
  p.dropout = options_.dropout;
}

void ProblemBuilder::per_head(AttentionProblem& p) const {
  const TensorView& slopes = options_.alibi_slopes;
  if (slopes.given()) {
    check_.require(slopes.rank == 1 || slopes.rank == 2, "alibi_slopes is ", slopes, ": it must be [H] or [B, H]");
    check_.tensor(slopes, "alibi_slopes", DType::f32, q_.device, slopes.rank);
    check_.require(slopes.shape[slopes.rank - 1] == p.H && (slopes.rank == 1 || slopes.shape[0] == p.B),
                   "alibi_slopes is ", slopes, ": it must be [H] = [", p.H, "] or [B, H] = [", p.B, ", ", p.H, "]");
    p.alibi = plane_of(slopes);
    p.alibi.stride_b = slopes.rank == 2 ? slopes.stride[0] : 0;
    p.alibi.stride_h = slopes.stride[slopes.rank - 1];
  }
  const TensorView& sink = options_.sink;
  if (sink.given()) {
    check_.tensor(sink, "sink", DType::f32, q_.device, 1);
    check_.require(sink.shape[0] == p.H, "sink is ", sink, ": it must have one logit for each of ", p.H, " heads");
    p.sink = plane_of(sink);
    p.sink.stride_h = sink.stride[0];
  }
}

void ProblemBuilder::planes(AttentionProblem& p) const {
  if (options_.bias.given()) {
    check_.require((options_.bias.dtype == p.dtype && p.dtype != DType::f8e4m3) || options_.bias.dtype == DType::f32,
                   "bias is ", name_of(options_.bias.dtype), ": it must be float32",
                   p.dtype == DType::f8e4m3 ? "" : " or q's dtype, ", p.dtype == DType::f8e4m3 ? "" : name_of(p.dtype));
    p.bias = plane(p, options_.bias, "bias");
    longer_columns(p, options_.bias);
  }
  if (options_.mask.given()) {
    check_.require(options_.mask.dtype == DType::boolean, "mask is ", name_of(options_.mask.dtype),
                   ": it must be bool (true = attend); pass numbers that are added as bias");
    p.mask = plane(p, options_.mask, "mask");
    check_.require(p.columns < 0 || options_.mask.shape[3] == 1 || options_.mask.shape[3] == p.columns, "mask is ",
                   options_.mask, " and bias has ", p.columns,
                   " columns: both have one for each key of the longer problem");
    longer_columns(p, options_.mask);
  }
}

void ProblemBuilder::draft(AttentionProblem& p) const {
  const TensorView& mask = options_.draft_mask;
  if (!mask.given()) return;
  check_.tensor(mask, "draft_mask", DType::i32, q_.device, 2);
  check_.require(p.Sq <= 32, "draft_mask is given and q has ", p.Sq, " rows a sequence: a draft has at most 32");
  check_.require(mask.shape[0] == p.B && mask.shape[1] == p.Sq, "draft_mask is ", mask, ": it must be [B, Sq] = [", p.B,
                 ", ", p.Sq, "]");
  check_.require(mask.stride[1] == 1 || p.Sq <= 1, "draft_mask's rows must be contiguous");
  p.draft_mask = {static_cast<const std::int32_t*>(mask.data), true};
  p.draft_mask_stride = mask.stride[0];
}

void ProblemBuilder::longer_columns(AttentionProblem& p, const TensorView& view) {
  if (p.piece() && view.shape[3] != 1) p.columns = view.shape[3];
}

// [B|1, H|1, Sq|1, Sk|1]; a piece's columns are the longer problem's, which positions() holds against its keys.
Plane ProblemBuilder::plane(const AttentionProblem& p, const TensorView& view, const char* name) const {
  check_.require(view.rank == 4, name, " has ", view.rank,
                 " dimensions: it must have 4, each 1 or that of [B, H, Sq, Sk]");
  check_.require(view.device == q_.device, name, " is on another device than q");
  check_.addressable(view, name);
  const std::int64_t full[4] = {p.B, p.H, p.Sq, p.Sk};
  Plane plane = plane_of(view);
  std::int64_t* strides[4] = {&plane.stride_b, &plane.stride_h, &plane.stride_i, &plane.stride_j};
  for (int i = 0; i < 4; ++i) {
    const bool longer = i == 3 && p.piece();
    check_.require(longer || view.shape[i] == full[i] || view.shape[i] == 1, name, " is ", view, ": dimension ", i,
                   " must be 1 or ", full[i], " (of [B, H, Sq, Sk] = [", p.B, ", ", p.H, ", ", p.Sq, ", ", p.Sk, "])");
    *strides[i] = view.shape[i] == 1 ? 0 : view.stride[i];
  }
  return plane;
}

}  // namespace heddle
