// What the candidates of the kernel share on the host.
#pragma once

#include "cuda/common/attention/window.h"
#include "cuda/sm80/attention_fwd/variants.h"

namespace heddle::cuda::sm80::attention_fwd {

constexpr std::int64_t kMaxLength = kOpen / 2, kMaxTiles = 1 << 30;
// Lengths, and keys of a window, of a piece of a longer problem, whose rows and keys may stand 2^31 apart.
constexpr std::int64_t kMaxPiece = kOpen / 4;

inline std::int64_t q_tiles(const AttentionProblem& p, const Variant& v) { return (p.Sq + v.tile_q - 1) / v.tile_q; }

// What a launch of `v` is told, but for Params::codes.
Params params_for(const AttentionProblem& p, const Variant& v);

}  // namespace heddle::cuda::sm80::attention_fwd
