#include "cuda/sm80/attention_fwd/launch.h"

#include <algorithm>

#include "cuda/common/attention/window.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"

namespace heddle::cuda::sm80::attention_fwd {
Params params_for(const AttentionProblem& p, const Variant& v) {
  Params params = attention::score_params(p);
  params.units = static_cast<int>(p.B * p.H);
  params.q_tiles = static_cast<int>(q_tiles(p, v));
  // With a band, tiles differ in cost, and those of several heads are dealt out by it; half of the L2 cache for keys.
  const bool band = has_band(p);
  const std::int64_t bytes =
      std::max<std::int64_t>(p.Sk * (p.D + p.Dv) * static_cast<std::int64_t>(size_of(p.dtype)), 1);
  const std::int64_t heads = std::clamp<std::int64_t>(current_device().l2_bytes / 2 / bytes, 1, params.units);
  params.section = Divisor(static_cast<unsigned>(std::min<std::int64_t>(band ? heads * p.G : 1, params.units)));
  params.section_tiles = Divisor(params.section.divisor * params.q_tiles);
  if (p.page_table) params.page_size = Divisor(static_cast<unsigned>(p.page_size));
  params.o_aligned = has_rows_of_16_bytes(p.o);
  return params;
}

}  // namespace heddle::cuda::sm80::attention_fwd
