// The candidate "sm80" of attention over lists of key blocks: what it takes, and what it costs.
#include <algorithm>
#include <limits>

#include "core/check.h"
#include "cuda/any/moved_bytes.h"
#include "cuda/common/requirements.h"
#include "cuda/kernels.h"
#include "cuda/sm80/sparse_fwd/host.h"

namespace heddle::cuda {
namespace {

using namespace sm80::sparse_fwd;

Refusal supports(const SparseProblem& p) {
  if (Refusal reason = refuse_before_ampere(); !reason.empty()) return reason;
  if (p.dtype != DType::f16 && p.dtype != DType::bf16) {
    return text("it takes float16 and bfloat16, not ", name_of(p.dtype));
  }
  if (p.k.dtype != p.dtype) return text("it does not read ", name_of(p.k.dtype), " beside q of ", name_of(p.dtype));
  if (std::max(p.D, p.Dv) > 128 || p.D % 8 != 0 || p.Dv % 8 != 0) {
    return text("its head sizes are multiples of 8 to 128, not ", p.D, " and ", p.Dv);
  }
  for (const auto& [name, x] : {std::pair{"q", &p.q}, {"k", &p.k}, {"v", &p.v}}) {
    if (*x && !has_rows_of_16_bytes(*x)) return text(name, " must have contiguous rows at multiples of 16 bytes");
  }
  if (p.softcap != 0 || p.alibi || p.bias || p.mask) return "it has no softcap, ALiBi, bias or mask";
  if (p.dropout.p > 0) return "it has no dropout";
  if (p.page_table || p.cache_batch_idx || p.cache_leftpad || p.int4) return "it reads no caches but plain ones";
  if (p.append) return "it does not append keys";
  if (p.lists.offsets != nullptr) return "its lists are of one length, not given by offsets";
  if (p.lists.entries > kMostSlots) return text("lists must have no more than ", kMostSlots, " entries");
  const Plan plan = plan_of(p);
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (plan.rows > kMost / kMostSlots || plan.units * plan.blocks > kMost / 2 || plan.item_limit > kMost ||
      plan.lists_at_once * plan.units * std::max<std::int64_t>(1, p.lists.entries) > kMost / 2) {
    return "it counts pairs of lists and blocks in 31 bits";
  }
  return "";
}

// Each pair reads its rows of q, and writes and reads a partial result.
double estimate(const SparseProblem& p, int /*workers*/) {
  const Plan plan = plan_of(p);
  const double rows = static_cast<double>(plan.lists * plan.units * plan.rows) * static_cast<double>(p.lists.typical);
  return any::seconds_of_moving(rows * (2.0 * static_cast<double>(p.D) + 4.0 * plan.head), 2.5e12);
}

std::string describe(const SparseProblem& p, int /*workers*/) {
  const Plan plan = plan_of(p);
  return text("by blocks of ", p.lists.block_size, " keys: rows that name one in tiles of 16, ", plan.lists_at_once,
              " of ", plan.lists, " lists at a time, partial results of ", plan.rows,
              " rows in float16 joined in the order of slots");
}

}  // namespace

const SparseForwardKernel kSm80SparseForward = {
    .name = "sm80",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = [](const SparseProblem& p, int) { return plan_of(p).bytes; },
    .launch = [](const SparseProblem& p, const Runtime& runtime) { launch(p, runtime.workspace.data, runtime.stream); },
    .describe = describe,
};

}  // namespace heddle::cuda
