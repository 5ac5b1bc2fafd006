// The candidate "sm90" for the choice of blocks: what it takes, and what it costs.
#include <algorithm>
#include <limits>

#include "core/check.h"
#include "cuda/common/requirements.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm90/select_blocks/host.h"

namespace heddle::cuda {
namespace {

namespace select = sm90::select_blocks;

// Sequences of so few rows are steps of decoding, whose positions "sm80" gives to several warps each. Not what the
// whole call has, as scores' bits differ between the two, and must not depend on the other sequences.
constexpr std::int64_t kMostRowsOfStep = 8;

Refusal supports(const SelectProblem& p) {
  if (Refusal reason = refuse_other_than_hopper(); !reason.empty()) return reason;
  if (p.dtype != DType::f16 && p.dtype != DType::bf16) {
    return text("it takes float16 and bfloat16, not ", name_of(p.dtype));
  }
  if (p.page_table) return "it takes no page_table";
  if (p.D > select::kMostHead || p.D % 8 != 0) {
    return text("its head sizes are multiples of 8 to ", select::kMostHead, ", not ", p.D);
  }
  if (p.G > select::kMostGroup || (p.G & (p.G - 1)) != 0) {
    return text("it has 1, 2, 4, 8 or ", select::kMostGroup, " query heads to a key/value head, not ", p.G);
  }
  if (!p.lse) return "it needs lse";
  if (p.wide() != 1 || p.narrow() != 1) {
    return text("compression_block and compression_stride must be block_size, ", p.block_size, ", not ",
                p.compression_block, " and ", p.compression_stride);
  }
  if (p.slots > select::kMostSlots) return text("it lists no more than ", select::kMostSlots, " blocks, not ", p.slots);
  if (p.Sq <= kMostRowsOfStep) return text("it takes sequences of more than ", kMostRowsOfStep, " rows, not ", p.Sq);
  if (p.Sk == 0 || p.k_rows == 0) return "there are no pooled keys";
  if (!has_rows_of_16_bytes(p.q)) return "q must have contiguous rows at multiples of 16 bytes";
  if (Refusal reason = refuse_unmappable("k_pooled", p.k); !reason.empty()) return reason;
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (p.k_rows > kMost - select::kTileKeys || select::items_of(p) > kMost / 2) {
    return "rows and pooled keys are counted in 31 bits";
  }
  return "";
}

// Measured on an H200 at 65536 positions, with groups of 16 and of 4 heads.
constexpr CostLine<SelectProblem> kCosts[] = {
    {"sm90_select", {5e-6, 260e12, 0}, {DType::bf16, 1, 64, 4, 65536, 128, 64, 16}},
};

// Of about half of all pairs: products or exponentials, whichever take longer, and what lists cost for each tile of
// pooled keys. What a call has of its own is what "sm80" has, so that the choice between the two does not follow from
// the batch.
double estimate(const SelectProblem& p, int /*workers*/) {
  constexpr double kExponentials = 3e12, kTile = 0.77e-9;
  const CostLine<SelectProblem>& line = kCosts[0];
  const double pairs = static_cast<double>(p.B * p.Sq) * static_cast<double>(p.Sk) / 2;
  const double scores = pairs * static_cast<double>(std::max(p.H, 2 * p.Hkv));
  const double lists = pairs * static_cast<double>(p.Hkv) / select::kTileKeys * kTile;
  return cost_of(line).fixed +
         times_as_long(line) *
             (std::max(scores * 2.0 * static_cast<double>(p.D) / line.cost.flops, scores / kExponentials) + lists);
}

std::string describe(const SelectProblem& p, int /*workers*/) {
  return text("tiles of ", select::cut_of(p).of_cta(), " positions by ", select::kTileKeys,
              " pooled keys, one product");
}

}  // namespace

const SelectKernel kSm90SelectBlocks = {
    .name = "sm90",
    .method = "select",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = no_workspace,
    .launch = [](const SelectProblem& p, const Runtime& runtime) { select::launch(p, runtime.stream); },
    .describe = describe,
    .costs = kCosts,
};

}  // namespace heddle::cuda
