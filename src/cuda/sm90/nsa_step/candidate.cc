// The candidate "sm90" for a step of native sparse attention: what it takes, and what it costs.
#include <algorithm>
#include <limits>
#include <utility>

#include "core/check.h"
#include "cuda/any/moved_bytes.h"
#include "cuda/common/requirements.h"
#include "cuda/kernels.h"
#include "cuda/sm90/nsa_step/host.h"
#include "cuda/sm90/nsa_step/params.h"

namespace heddle::cuda {
namespace {

namespace step = sm90::nsa_step;

Refusal supports(const NsaStepProblem& p) {
  if (Refusal reason = refuse_other_than_hopper(); !reason.empty()) return reason;
  for (const auto& [name, size] : {std::pair{"head size", p.D}, {"v's head size", p.Dv}}) {
    if (size % 8 != 0 || size > step::kMostHead) {
      return text(name, " must be a multiple of 8 to ", step::kMostHead, ", not ", size);
    }
  }
  if (p.G > step::kRows)
    return text("it has no more than ", step::kRows, " query heads to a key/value head, not ", p.G);
  if (p.slots > step::kMostSlots) return text("it lists no more than ", step::kMostSlots, " blocks, not ", p.slots);
  for (const auto& [name, x] : {std::pair{"cache.k", &p.k},
                                {"cache.v", &p.v},
                                {"cache.k_pooled", &p.k_pooled},
                                {"cache.v_pooled", &p.v_pooled}}) {
    const bool empty = p.pooled == 0 && (x == &p.k_pooled || x == &p.v_pooled);
    if (!empty && !has_rows_of_16_bytes(*x)) return text(name, " must have contiguous rows at multiples of 16 bytes");
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (p.capacity > kMost - step::kMostHead || p.B * p.H > kMost / step::kMostCluster) {
    return "keys, sequences and heads are counted in 31 bits";
  }
  return "";
}

// What the steps that all keys wait for take, and keys and values; both of an H200. The former is what a step over one
// sequence takes, less its bytes.
double estimate(const NsaStepProblem& p, int /*workers*/) {
  constexpr double kFixed = 25e-6;
  return kFixed + any::seconds_of_moving(p.bytes());
}

std::string describe(const NsaStepProblem& p, int /*workers*/) {
  const int cluster = step::cluster_of(p);
  return cluster == 1 ? text("a block of threads for a sequence's key/value head")
                      : text("a cluster of ", cluster, " blocks of threads for a sequence's key/value head");
}

}  // namespace

const NsaStepKernel kSm90NsaStep = {
    .name = "sm90",
    .method = "nsa_step",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = [](const NsaStepProblem& p, int) { return step::workspace_bytes(p); },
    .launch = [](const NsaStepProblem& p, const Runtime& runtime) { step::launch(p, runtime); },
    .describe = describe,
};

}  // namespace heddle::cuda
