// The candidate "sm90_tiles" of the backward of attention over lists of key blocks: Hopper's dense backward, whose walk
// goes through the tiles of rows that name a block. What it takes, and what it costs.
#include <algorithm>
#include <utility>

#include "core/check.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/common/tile_lists/host.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm90/attention_bwd/launch.h"
#include "cuda/sm90/sparse_tiles_bwd/variants.h"

namespace heddle::cuda {
namespace {

using namespace sm90::sparse_tiles_bwd;
using sm90::attention_bwd::refuse_layout;
using sm90::attention_bwd::Variant;
using tile_lists::RowTiles;

constexpr const char* kOperation = "sparse_attention_backward";

std::span<const Variant> variants(DType type) { return variants_of<Instance, kTypes, kVariants>(type); }

bool takes(const SparseBackwardProblem& p, const Variant& v) {
  return std::max(p.D, p.Dv) <= v.tiles.head && p.lists.query_rows % v.tile_q == 0;
}

const Variant& variant_for(const SparseBackwardProblem& p) {
  return first_that(variants(p.dtype), [&](const Variant& v) { return takes(p, v); });
}

SparseProblem forward_of(const SparseBackwardProblem& p) {
  SparseProblem forward;
  static_cast<AttentionProblem&>(forward) = p;
  forward.lists = p.lists;
  return forward;
}

// CTAs that share the heads of a kv head. Where heads have lists of their own, each has one.
int parts_of(const SparseBackwardProblem& p, const Variant& v) {
  return p.lists.units > p.Hkv ? static_cast<int>(p.G) : parts_of_group(p, v);
}

RowTiles tiles_of(const SparseBackwardProblem& p, const Variant& v) {
  return {.rows = v.tile_q, .heads = p.Hkv * parts_of(p, v)};
}

Refusal supports(const SparseBackwardProblem& p) {
  const SparseProblem forward = forward_of(p);
  if (Refusal reason = tile_lists::refuse(forward); !reason.empty()) return reason;
  for (const auto& [name, x] : {std::pair{"dq", &std::as_const(p.dq)}, {"dk", &p.dk}, {"dv", &p.dv}}) {
    if (*x && x->dtype != p.dtype) {
      return text("it does not write ", name, " in ", name_of(x->dtype), " beside q of ", name_of(p.dtype));
    }
  }
  if (p.accumulate) return "it does not add to dq, dk and dv";
  if (p.merged) return "it has no backward of a piece whose o and lse are merged";
  const auto found = variants(p.dtype);
  if (std::ranges::none_of(found, [&](const Variant& v) { return takes(p, v); })) {
    return text("lists must be shared by all rows of its tiles: query_rows must be a multiple of ", found.back().tile_q,
                "; it is ", p.lists.query_rows);
  }
  if (Refusal reason = refuse_layout(p); !reason.empty()) return reason;
  if (!fits(forward, tiles_of(p, variant_for(p)))) return "it numbers entries of lists in 31 bits";
  return "";
}

// Flops of blocks of 128 keys; predicted, not measured.
constexpr CostLine<SparseBackwardProblem> kCosts[] = {
    {"sm90_tiles_bwd d64", {30e-6, 420e12, 0}, {DType::bf16, 1, 16, 16, 16384, 64, 128, 128, 32}},
    {"sm90_tiles_bwd d128", {30e-6, 490e12, 0}, {DType::bf16, 1, 16, 16, 16384, 128, 128, 128, 32}},
};

double estimate(const SparseBackwardProblem& p, int /*workers*/) {
  constexpr double kBytes = 3e12;
  const Variant& v = variant_for(p);
  const double rows = static_cast<double>(p.B * p.H * p.Sq), columns = static_cast<double>(v.columns);
  const double keys = static_cast<double>(p.lists.typical * p.lists.block_size);
  const Cost& cost = cost_of(kCosts[v.tiles.head <= 64 ? 0 : 1]);
  const double rate = cost.flops * (p.lists.block_size < 128 ? 0.6 : 1);
  // Sums of dq are cleared, added to and rounded, and o and d_o read.
  return cost.fixed + rows * (5.0 * static_cast<double>(p.D + p.Dv) * keys / rate + 14.0 * columns / kBytes);
}

// Where everything lies in the workspace. Without memory for it nothing is started.
struct Made {
  sparse::Arrays arrays;
  std::byte* dense;  // of the dense kernel
  TileLists lists;

  Made(const SparseBackwardProblem& p, const Variant& v, void* memory, cudaStream_t stream)
      : arrays(memory),
        dense(arrays.take<std::byte>(dense_bytes(p, v))),
        lists(rows_of_keys(forward_of(p), tiles_of(p, v), p.deterministic, arrays, kOperation, stream)) {}

  static std::int64_t dense_bytes(const SparseBackwardProblem& p, const Variant& v) {
    return static_cast<std::int64_t>(workspace_of(p, v, parts_of(p, v)));
  }
};

std::size_t workspace(const SparseBackwardProblem& p, int /*workers*/) {
  return Made(p, variant_for(p), nullptr, nullptr).arrays.bytes();
}

std::string describe(const SparseBackwardProblem& p, int /*workers*/) {
  const Variant& v = variant_for(p);
  const int parts = parts_of(p, v);
  return text(v.name, ": tiles of ", v.tile_k, " keys", p.lists.block_size < v.tile_k ? ", two blocks," : "", " x ",
              v.tile_q, " rows whose lists name them",
              parts > 1 ? text(", ", parts, " CTAs share the heads of a kv head") : "", ", ",
              p.B * p.Hkv * parts * ((p.Sk + v.tile_k - 1) / v.tile_k), " tiles of keys");
}

void launch(const SparseBackwardProblem& p, const Runtime& runtime) {
  const Variant& v = variant_for(p);
  const Made made(p, v, runtime.workspace.data, static_cast<cudaStream_t>(runtime.stream));
  Runtime dense = runtime;
  dense.workspace = {made.dense, static_cast<std::size_t>(Made::dense_bytes(p, v))};
  launch_call(p, v, parts_of(p, v), made.lists, dense);
}

}  // namespace

const SparseBackwardKernel kSm90TilesBackward = {
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
