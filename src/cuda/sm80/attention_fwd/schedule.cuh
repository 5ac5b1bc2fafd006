// Which CTA computes what.
#pragma once

#include "cuda/sm80/attention_fwd/config.h"
#include "cuda/sm80/attention_fwd/params.h"

namespace heddle::cuda::sm80::attention_fwd {

// Tiles in sections of heads whose keys stay in the L2 cache; in each the last rows first: under a causal mask they
// have most keys, and short tiles at the end let all multiprocessors finish together.
template <class C>
__device__ inline Work describe_work(const Params& p) {
  const int tile = static_cast<int>(blockIdx.x);
  const int size = p.section * p.q_tiles, from_unit = tile / size * p.section, rest = tile % size;
  const int units = min(p.section, p.units - from_unit);
  const int unit = from_unit + rest % units;
  Work w;
  w.b = unit / p.heads;
  w.h = unit % p.heads;
  w.first = (p.q_tiles - 1 - rest / units) * C::kTileQ;
  const Sequence s = p.problem.sequence(w.b);
  const int sk = static_cast<int>(s.sk);
  w.q_rows = static_cast<int>(s.q_rows);
  w.sq = static_cast<int>(s.sq < s.q_rows ? s.sq : s.q_rows);
  w.off = static_cast<int>(s.off);
  w.q_row = static_cast<int>(s.q_begin);
  w.k_slot = static_cast<int>(s.k_begin);
  const auto key0 = [&](const Operand& x) {
    const std::int64_t head = w.h / p.group * x.stride_h;
    if (p.problem.page_table != nullptr) return x.data + 2 * head;
    const std::int64_t b = p.problem.cache_batch_idx != nullptr ? p.problem.cache_batch_idx[w.b] : w.b;
    return x.data + 2 * (head + b * x.stride_b + s.k_begin * x.stride_s);
  };
  w.k = key0(p.problem.k);
  w.v = key0(p.problem.v);
  const int from = w.first + w.off, to = min(w.first + C::kTileQ, w.sq) - 1 + w.off;
  w.begin = max(from - p.left, 0);
  w.end = w.first < w.sq ? min(to + p.right + 1, sk) : 0;
  const bool any = w.begin < w.end;
  w.k_begin = any ? w.begin / C::kTileK : 0;
  w.k_end = any ? (w.end + C::kTileK - 1) / C::kTileK : 0;
  w.whole_begin = (max(to - p.left, 0) + C::kTileK - 1) / C::kTileK;
  w.whole_end = min(max(from + p.right + 1, 0), sk) / C::kTileK;
  // Rows that do not exist have no bias or mask to read.
  if (C::kScoreOptions && w.first + C::kTileQ > w.sq) w.whole_end = 0;
  return w;
}

}  // namespace heddle::cuda::sm80::attention_fwd
