#include "cuda/common/pairs.h"

#include <algorithm>

namespace heddle::cuda {

double attended_pairs(const AttentionProblem& p) {
  const Sequence s{.sq = p.Sq, .sk = p.Sk, .off = p.causal == Causal::top_left ? 0 : p.Sk - p.Sq};
  constexpr std::int64_t kSamples = 64;
  const std::int64_t samples = std::min(p.Sq, kSamples);
  double keys = 0;
  for (std::int64_t n = 0; n < samples; ++n) {
    const auto [begin, end] = p.key_range(s, (2 * n + 1) * p.Sq / (2 * samples));
    keys += static_cast<double>(end - begin);
  }
  return samples == 0 ? 0 : keys / static_cast<double>(samples) * static_cast<double>(p.Sq);
}

}  // namespace heddle::cuda
