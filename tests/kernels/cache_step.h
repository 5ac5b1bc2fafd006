// One step of decoding made from a case: its last keys are taken out of the cache and given as new ones. The step must
// put them back bit for bit, and its output is the case's.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "kit/compare.h"
#include "kit/run_case.h"
#include "kit/yardstick.h"
#include "reference/attention.h"

namespace heddle::kit {

class CacheStep {
 public:
  // The case has a cache in which all sequences use all Sk keys; f8e4m3 only with one scale for all.
  CacheStep(const AttentionCase& spec, std::int64_t count)
      : data(spec), k_cache(data.k), v_cache(data.v), count_(count) {
    k_new = take(k_cache, data.k_scale, spec.D);
    v_new = take(v_cache, data.v_scale, spec.Dv);
    seqlens = HostTensor::input(DType::i32, {spec.B});
    for (std::int64_t b = 0; b < spec.B; ++b) seqlens.set(b, static_cast<double>(spec.Sk - count));
  }

  CaseData data;
  HostTensor k_cache, v_cache;  // without the new keys: NaN there
  HostTensor k_new, v_new, seqlens;

  // What is wrong with the step's results, or could not be seen to be; empty if nothing.
  std::string verdict(const HostTensor& o, const HostTensor& k_after, const HostTensor& v_after) const {
    std::string out;
    if (!k_after.same_bits(data.k)) out += "k_cache differs; ";
    if (!v_after.same_bits(data.v)) out += "v_cache differs; ";
    if (const std::string damage = o.damage(); !damage.empty()) out += "o: " + damage + "; ";
    const AttentionProblem p = data.problem();
    const TensorView& view = o.view();
    const reference::Forward exact = reference::attention_forward(p, default_executor());
    const PlainForward plain = plain_forward(p);
    const std::vector<std::int64_t> shape(view.shape.begin(), view.shape.begin() + view.rank);
    const double factor = allowed_factor(p, exact);
    const Comparison c = compare("o", o.values(), exact.o, plain.o, shape, view.dtype, factor);
    if (!c.passed) out += c.worst;
    out += blind_spots("o", exact.o, plain.o, shape, view.dtype, factor);
    return out;
  }

 private:
  HostTensor take(HostTensor& cache, const HostTensor& scale, std::int64_t width) const {
    const AttentionProblem p = data.problem();
    const AttentionCase& spec = data.spec;
    HostTensor out = HostTensor::input(spec.dtype, {spec.B, count_, spec.Hkv, width});
    const std::int64_t row = spec.Hkv * width, slots = cache.view().shape[1];
    for (std::int64_t b = 0; b < spec.B; ++b) {
      const Sequence s = p.sequence(b);
      for (std::int64_t n = 0; n < count_ * row; ++n) {
        const auto [batch, slot] = p.key_slot(b, s, spec.Sk - count_ + n / row);
        const std::int64_t at = (batch * slots + slot) * row + n % row;
        out.set(b * count_ * row + n, cache.get(at) * (scale.given() ? scale.get(0) : 1.0));
        cache.set(at, std::nan(""));
      }
    }
    return out;
  }

  std::int64_t count_;
};

// Cases for steps: contiguous, by row, paged, in 8 bits, with drafts.
inline std::vector<AttentionCase> cache_step_cases() {
  const AttentionCase base{.dtype = DType::bf16, .B = 3, .H = 8, .Hkv = 2, .Sq = 4, .Sk = 150, .D = 64, .Dv = 64};
  std::vector<AttentionCase> out;
  const auto with = [&](const char* name, auto change) {
    AttentionCase spec = base;
    spec.name = name;
    change(spec);
    out.push_back(spec);
  };
  with("contiguous", [](auto& c) { c.causal = Causal::bottom_right; });
  with("one_row", [](auto& c) { c.Sq = 1, c.dtype = DType::f16, c.D = c.Dv = 128; });
  with("by_rows", [](auto& c) { c.cache_batch_idx = true, c.B = 1, c.window_left = 60; });
  with("paged_16", [](auto& c) { c.page_size = 16, c.Sk = 160, c.causal = Causal::bottom_right; });
  with("paged_1", [](auto& c) { c.page_size = 1, c.sink = true; });
  with("paged_32_rows_64",
       [](auto& c) { c.H = 32, c.D = c.Dv = 128, c.page_size = 32, c.Sk = 160, c.causal = Causal::bottom_right; });
  with("draft", [](auto& c) { c.draft_mask = true; });
  with("f8_paged", [](auto& c) { c.f8_cache = true, c.page_size = 32, c.Sk = 320, c.scaling = Scaling::one; });
  return out;
}

}  // namespace heddle::kit
