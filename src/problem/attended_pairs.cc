#include "problem/attended_pairs.h"

#include <algorithm>

namespace heddle {

double attended_pairs(const Band& band, std::int64_t most_rows) {
  const std::int64_t samples = std::min(band.rows, most_rows);
  double keys = 0;
  for (std::int64_t n = 0; n < samples; ++n) {
    keys += static_cast<double>(band.keys_of((2 * n + 1) * band.rows / (2 * samples)).size());
  }
  return samples == 0 ? 0 : keys * (static_cast<double>(band.rows) / static_cast<double>(samples));
}

double attended_pairs(const AttentionProblem& p) {
  if (p.piece() && p.device == Device::cpu && p.B > 0) {  // offsets say more than lengths, and may be read
    double pairs = 0;
    for (std::int64_t b = 0; b < p.B; ++b) pairs += attended_pairs(p.band(p.sequence(b)), 64);
    return pairs / static_cast<double>(p.B);
  }
  return attended_pairs(p.band({.sq = p.Sq, .sk = p.Sk, .off = p.causal == Causal::top_left ? 0 : p.Sk - p.Sq}), 64);
}

}  // namespace heddle
