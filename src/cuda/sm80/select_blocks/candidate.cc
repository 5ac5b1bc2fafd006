// The candidate "sm80" for the choice of blocks: what it takes, and what it costs.
#include <algorithm>
#include <limits>
#include <utility>

#include "core/check.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm80/select_blocks/host.h"
#include "cuda/sm80/select_blocks/params.h"

namespace heddle::cuda {
namespace {

namespace select = sm80::select_blocks;

Refusal supports(const SelectProblem& p) {
  if (Refusal reason = refuse_before_ampere(); !reason.empty()) return reason;
  if (p.dtype != DType::f16 && p.dtype != DType::bf16) {
    return text("it takes float16 and bfloat16, not ", name_of(p.dtype));
  }
  if (p.D > 256 || p.D % 8 != 0) return text("its head sizes are multiples of 8 to 256, not ", p.D);
  if (p.G > select::kRows) return text("it has no more than ", select::kRows, " query heads to a key/value head");
  for (const auto& [name, x] : {std::pair{"q", &p.q}, {"k_pooled", &p.k}}) {
    if (*x && !has_rows_of_16_bytes(*x)) return text(name, " must have contiguous rows at multiples of 16 bytes");
  }
  if (p.slots > select::kMostSlots) return text("it lists no more than ", select::kMostSlots, " blocks");
  if (select::kTileKeys % p.wide() != 0 || p.narrow() > select::kTileKeys) {
    return text("block_size must be ", select::kTileKeys,
                " compression strides or a part of that, and "
                "compression_block no more than that, not ",
                p.wide(), " and ", p.narrow());
  }
  const select::Cut cut = select::cut_of(p);
  const auto shared = static_cast<std::int64_t>(cut.bytes);
  if (shared > current_device().shared_memory) {
    return text("it needs ", shared, " bytes of shared memory, and this GPU has ", current_device().shared_memory);
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (p.Sk > kMost / 64 - 64 || p.Sq / cut.positions + 1 > kMost / std::max<std::int64_t>(1, p.B * p.Hkv)) {
    return text("rows and pooled keys are counted in 31 bits");
  }
  return "";
}

constexpr CostLine<SelectProblem> kCosts[] = {
    {"sm80_select", {5e-6, 168e12, 0}, {DType::bf16, 1, 64, 4, 65536, 128, 64, 16}},
};

// Of about half of all pairs: products, and what a position's list costs for each tile of pooled keys. Both measured on
// an H100 at 65536 positions, with groups of 16 and of 4 heads.
double estimate(const SelectProblem& p, int /*workers*/) {
  constexpr double kTile = 0.71e-9;
  const CostLine<SelectProblem>& line = kCosts[0];
  const double pairs = static_cast<double>(p.B * p.Sq) * static_cast<double>(p.Sk) / 2;
  const double products = pairs * static_cast<double>(p.H * p.D) * (p.lse ? 2.0 : 4.0);
  const double lists = pairs * static_cast<double>(p.Hkv) / select::kTileKeys * kTile;
  return cost_of(line).fixed + times_as_long(line) * (products / line.cost.flops + lists);
}

std::string describe(const SelectProblem& p, int /*workers*/) {
  const select::Cut cut = select::cut_of(p);
  return text("tiles of ", cut.positions, " positions by ", select::kTileKeys, " pooled keys, ",
              p.lse ? "one product" : "two products",
              cut.warps > 1 ? text(", ", cut.warps, " warps to a position") : "");
}

}  // namespace

const SelectKernel kSm80SelectBlocks = {
    .name = "sm80",
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
