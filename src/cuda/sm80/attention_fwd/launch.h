// What the candidates of the kernel share on the host.
#pragma once

#include "cuda/common/attention/window.h"
#include "cuda/sm80/attention_fwd/variants.h"

namespace heddle::cuda::sm80::attention_fwd {

using attention::kMaxLength;
using attention::kMaxPiece;

constexpr std::int64_t kMaxTiles = 1 << 30;

inline std::int64_t q_tiles(const AttentionProblem& p, const Variant& v) { return (p.Sq + v.tile_q - 1) / v.tile_q; }

// What a launch of `v` is told, but for Params::codes.
Params params_for(const AttentionProblem& p, const Variant& v);

}  // namespace heddle::cuda::sm80::attention_fwd
