// The candidate "sm90_tiles" of attention over lists of key blocks: Hopper's dense forward, whose walk goes through the
// tiles of a list. What it takes, and what it costs.
#include <algorithm>

#include "core/check.h"
#include "cuda/common/device.h"
#include "cuda/common/tile_lists/host.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm90/attention_fwd/launch.h"
#include "cuda/sm90/sparse_tiles_fwd/order.h"
#include "cuda/sm90/sparse_tiles_fwd/variants.h"

namespace heddle::cuda {
namespace {

using namespace sm90::sparse_tiles_fwd;
using sm90::attention::kRows;
using sm90::attention::new_counter;
using sm90::attention::Plan;
using sm90::attention::plan_with;
using sm90::attention::refuse_layout;
using tile_lists::RowTiles;

constexpr int kConsumers = 2;  // of every variant
constexpr const char* kOperation = "sparse_attention_forward";

const Variant& variant_for(const SparseProblem& p) {
  return first_that(variants_of<Instance, kTypes, kVariants>(p.dtype), [&](const Variant& v) {
    return std::max(p.D, p.Dv) <= v.tiles.head && p.lists.block_size == v.tiles.keys;
  });
}

// How many heads of a group share a tile of rows: the fewest with which no tile spans several lists; 0: there is no
// such number.
int heads_of_tile(const SparseProblem& p) {
  const std::int64_t most = p.lists.units > p.Hkv ? 1 : std::min<std::int64_t>(p.G, kRows);
  for (std::int64_t heads = 1; heads <= most; ++heads) {
    if (p.G % heads == 0 && p.lists.query_rows % (kConsumers * (kRows / heads)) == 0) return static_cast<int>(heads);
  }
  return 0;
}

Plan plan_of(const SparseProblem& p) { return plan_with(p, kConsumers, heads_of_tile(p), true); }

Refusal supports(const SparseProblem& p) {
  if (Refusal reason = tile_lists::refuse(p); !reason.empty()) return reason;
  if (heads_of_tile(p) == 0) {
    return text("lists must be shared by all rows of its tiles: query_rows must be a multiple of ", kConsumers * kRows,
                ", or of ", kConsumers, " * ", kRows, " / n where n heads of a group share lists; it is ",
                p.lists.query_rows, ", with groups of ", p.lists.units > p.Hkv ? 1 : p.G);
  }
  return refuse_layout(p);
}

// Flops of blocks of 128 keys; predicted, not measured.
constexpr CostLine<SparseProblem> kCosts[] = {
    {"sm90_tiles d64", {12e-6, 480e12, 0}, {DType::bf16, 1, 16, 16, 16384, 64, 128, 128, 32}},
    {"sm90_tiles d128", {12e-6, 620e12, 0}, {DType::bf16, 1, 16, 16, 16384, 128, 128, 128, 32}},
};

double estimate(const SparseProblem& p, int /*workers*/) {
  const Variant& v = variant_for(p);
  const Cost& cost = cost_of(kCosts[v.tiles.head <= 64 ? 0 : 1]);
  const Plan plan = plan_of(p);
  const std::int64_t tiles = p.B * plan.units * plan.q_tiles, at_once = current_device().multiprocessors;
  const double keys = static_cast<double>(p.lists.typical * p.lists.block_size),
               flops = 2.0 * kConsumers * kRows * keys * static_cast<double>(p.D + p.Dv);
  const double rate = cost.flops / static_cast<double>(at_once) * (v.tiles.keys < 128 ? 0.75 : 1);
  return cost.fixed + static_cast<double>((tiles + at_once - 1) / at_once) * flops / rate;
}

// Where everything lies in the workspace. Without memory for it nothing is started.
struct Made {
  sparse::Arrays arrays;
  TileLists lists;
  int* counter;
  int* order;  // of tiles, if sequences have one length

  Made(const SparseProblem& p, const Plan& plan, void* memory, cudaStream_t stream)
      : arrays(memory),
        lists(keys_of_rows(p, RowTiles{.rows = kConsumers * plan.positions, .heads = plan.units}, p.lists.block_size,
                           arrays, kOperation, stream)),
        counter(arrays.take<int>(1)),
        order(p.cu_seqlens_q ? nullptr : arrays.take<int>(p.B * plan.units * plan.q_tiles)) {}
};

std::size_t workspace(const SparseProblem& p, int /*workers*/) {
  return Made(p, plan_of(p), nullptr, nullptr).arrays.bytes();
}

std::string describe(const SparseProblem& p, int /*workers*/) {
  const Variant& v = variant_for(p);
  const Plan plan = plan_of(p);
  return text(v.name, ": tiles of ", kConsumers * kRows, " rows x ", v.tiles.keys, " keys that a list names",
              plan.pack > 1 ? text(", ", plan.pack, " heads in a tile") : "", ", ", p.B * plan.units * plan.q_tiles,
              " tiles on ", current_device().multiprocessors, " multiprocessors, dealt out as they run");
}

void launch(const SparseProblem& p, const Runtime& runtime) {
  if (p.B == 0 || p.q_rows == 0) return;
  const Variant& v = variant_for(p);
  const Plan plan = plan_of(p);
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  const Made made(p, plan, runtime.workspace.data, stream);
  sm90::attention_fwd::Params params = params_for(p, sm90::attention_fwd::Row{.name = v.name, .tiles = v.tiles}, plan);
  params.lists = made.lists;
  params.next_tile = new_counter(made.counter, stream);
  if (made.order != nullptr) {
    launch_order(params, made.order, stream);
    params.order = made.order;
  }
  v.launch(params, std::min(params.tiles, current_device().multiprocessors), stream);
}

}  // namespace

const SparseForwardKernel kSm90TilesForward = {
    .name = "sm90_tiles",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .costs = kCosts,
};

}  // namespace heddle::cuda
