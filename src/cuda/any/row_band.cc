#include "cuda/any/row_band.h"

#include <algorithm>

#include "core/check.h"

namespace heddle::cuda {

Refusal refuse_piece_of_few_rows(const AttentionProblem& p) {
  if (!p.piece()) return "";
  if (p.alibi || p.bias || p.mask) return "it has no ALiBi, bias and mask beside q_offset and key_offset";
  constexpr std::int64_t kMost = kOpen / 4;
  if (std::max({p.Sq * p.q_step, p.Sk * p.key_step, p.q_step, p.key_step, p.window_left, p.window_right}) > kMost) {
    return text("sequences and windows must be no longer than ", kMost, " positions beside q_offset and key_offset");
  }
  return "";
}

}  // namespace heddle::cuda
