#include "kit/under_mask.h"

#include <cstdint>

#include "kit/case_rows.h"

namespace heddle::kit {
namespace {

using std::int64_t;

AttentionCase without_positions(AttentionCase c) {
  c.causal = Causal::none;
  c.window_left = c.window_right = -1;
  c.q_offset = c.key_offset = false;
  c.q_step = c.key_step = 1;
  c.mask = kFull;
  return c;
}

// In positions and nothing else, so that a mistake in a band is none here too.
bool meets(const CaseData& data, int64_t b, int64_t i, int64_t j) {
  const AttentionCase& c = data.spec;
  const auto at = [&](const HostTensor& offset) { return offset.given() ? static_cast<int64_t>(offset.get(b)) : 0; };
  const int64_t row = at(data.q_offset) + c.q_step * i, key = at(data.key_offset) + c.key_step * j;
  if (c.causal == Causal::top_left && key > row) return false;
  return (c.window_left < 0 || key >= row - c.window_left) && (c.window_right < 0 || key <= row + c.window_right);
}

}  // namespace

CaseData under_mask(const CaseData& stepped) {
  CaseData out(without_positions(stepped.spec));
  for (HostTensor CaseData::*tensor :
       {&CaseData::q, &CaseData::k, &CaseData::v, &CaseData::d_o, &CaseData::d_lse, &CaseData::sink,
        &CaseData::cu_seqlens_q, &CaseData::cu_seqlens_k, &CaseData::seqused_q, &CaseData::seqused_k,
        &CaseData::page_table, &CaseData::cache_batch_idx, &CaseData::leftpad, &CaseData::q_scale, &CaseData::k_scale,
        &CaseData::v_scale}) {
    out.*tensor = stepped.*tensor;
  }
  const AttentionCase& c = out.spec;
  int64_t at = 0;
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t h = 0; h < c.H; ++h) {
      for (int64_t i = 0; i < c.Sq; ++i) {
        for (int64_t j = 0; j < c.Sk; ++j) out.mask.set(at++, meets(stepped, b, i, j) ? 1 : 0);
      }
    }
  }
  return out;
}

}  // namespace heddle::kit
