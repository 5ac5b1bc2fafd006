// What the candidates of this folder tell their kernels.
#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/sm80/attention_fwd/launch.h"
#include "problem/philox.h"

namespace heddle::cuda::sm80::attention_fwd {
namespace {

// Columns 2 n and 2 n + 1 of every row lie side by side, aligned to both.
bool in_pairs(const Plane& x) {
  return x.alignment >= 2 * size_of(x.dtype) && x.stride_j == 1 && x.stride_b % 2 == 0 && x.stride_h % 2 == 0 &&
         x.stride_i % 2 == 0;
}

}  // namespace

Params params_for(const AttentionProblem& p, const Variant& v) {
  Params params{};
  params.problem = p;
  params.heads = Divisor(static_cast<unsigned>(p.H));
  params.group = Divisor(static_cast<unsigned>(p.G));
  params.units = static_cast<int>(p.B * p.H);
  params.q_tiles = static_cast<int>(q_tiles(p, v));
  // With a band, tiles differ in cost, and those of several heads are dealt out by it; half of the L2 cache for keys.
  const bool band = p.causal != Causal::none || p.window_left >= 0 || p.window_right >= 0;
  const std::int64_t bytes =
      std::max<std::int64_t>(p.Sk * (p.D + p.Dv) * static_cast<std::int64_t>(size_of(p.dtype)), 1);
  const std::int64_t heads = std::clamp<std::int64_t>(current_device().l2_bytes / 2 / bytes, 1, params.units);
  params.section = Divisor(static_cast<unsigned>(std::min<std::int64_t>(band ? heads * p.G : 1, params.units)));
  params.section_tiles = Divisor(params.section.divisor * params.q_tiles);
  params.left = static_cast<int>(p.window_left < 0 ? kOpen : std::min<std::int64_t>(p.window_left, kOpen));
  params.right = static_cast<int>(p.window_right < 0 ? kOpen : std::min<std::int64_t>(p.window_right, kOpen));
  if (p.causal != Causal::none) params.right = std::min(params.right, 0);
  if (p.page_table) params.page_size = Divisor(static_cast<unsigned>(p.page_size));
  params.scale_log2 = p.scale * kLog2e;
  params.bias_pairs = in_pairs(p.bias);
  params.mask_pairs = in_pairs(p.mask);
  params.o_aligned = has_rows_of_16_bytes(p.o);
  params.drop_below = dropout_threshold(p.dropout.p);
  return params;
}

}  // namespace heddle::cuda::sm80::attention_fwd
