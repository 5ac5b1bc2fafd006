// The candidate "sm80_decode": what it takes, which instantiation, and the launch.
#include <algorithm>

#include "core/check.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm80/attention_decode/tiles.h"
#include "cuda/sm80/attention_decode/variants.h"

namespace heddle::cuda {
namespace {

using namespace sm80::attention_decode;

constexpr std::int64_t kMaxRows = 16, kMaxLength = kOpen / 2, kMaxCells = (std::int64_t{1} << 31) - 1;
constexpr int kLeastCells = 2, kMostAbreast = 16;

bool e4m3(const AttentionProblem& p) { return p.k.dtype == DType::f8e4m3; }

const Variant& variant_for(const AttentionProblem& p) {
  const Cache cache = p.int4 ? Cache::kInt4 : e4m3(p) ? Cache::kE4m3 : Cache::kLikeQ;
  return first_that(variants(p.dtype),
                    [&](const Variant& v) { return v.cache == cache && std::max(p.D, p.Dv) <= v.tiles.head; });
}

// One at least: new keys are written also where no row attends them.
std::int64_t row_tiles(const AttentionProblem& p) {
  return std::max<std::int64_t>((p.Sq * p.G + kRows - 1) / kRows, 1);
}

Refusal supports(const AttentionProblem& p) {
  if (Refusal reason = refuse_before_ampere(); !reason.empty()) return reason;
  if (p.dtype != DType::f16 && p.dtype != DType::bf16) {
    return text("it takes queries in float16 and bfloat16, not ", name_of(p.dtype));
  }
  if (p.Sq > kMaxRows) return text("it is for decoding: at most ", kMaxRows, " query rows a sequence, not ", p.Sq);
  if (p.int4 && (p.D != p.Dv || (p.D != 64 && p.D != 128))) {
    return text("over a cache in 4 bits it takes head sizes of 64 or of 128, of k and v alike, not ", p.D, " and ",
                p.Dv);
  }
  const std::int64_t piece = e4m3(p) ? 16 : 8;
  if (p.D % piece != 0 || p.Dv % piece != 0) {
    return text("head sizes must be multiples of ", piece, ", not ", p.D, " and ", p.Dv);
  }
  if (!has_rows_of_16_bytes(p.k) || !has_rows_of_16_bytes(p.v))
    return "rows of k and v must be contiguous and begin at multiples of 16 bytes";
  if (p.dropout.p != 0) return "it has no dropout";
  if (Refusal reason = refuse_piece_of_few_rows(p); !reason.empty()) return reason;
  if (p.Sk > kMaxLength) return text("sequences must be no longer than ", kMaxLength);
  if (p.k_batches > kMaxCells) return "the cache has too many rows or pages";
  if (p.Hkv * row_tiles(p) * (p.Sk / kCellKeys + 1) > kMaxCells) return "a sequence has too many heads and keys";
  return "";
}

constexpr CostLine<AttentionProblem> kCosts[] = {
    {"sm80_decode", {11.8e-6, 150e12, 3.51e12}, {DType::bf16, DType::bf16, Precision::f32, 64, 32, 8, 1, 8192, 128}},
};

// Keys and values are read once for each tile of query rows; the cache's capacity stands for lengths that only the GPU
// knows.
double estimate(const AttentionProblem& p, int /*workers*/) {
  const Cost& cost = cost_of(kCosts[0]);
  const double elements = static_cast<double>(p.B * p.Hkv * row_tiles(p)) * static_cast<double>(p.Sk * (p.D + p.Dv));
  const double each = p.int4 ? 4.5 / 8 : static_cast<double>(size_of(p.k.dtype));  // bytes
  const double bytes = elements * each, flops = 2 * kRows * elements;
  return cost.fixed + std::max(bytes / cost.bytes, flops / cost.flops);
}

unsigned ctas_for(const Variant& v) {
  const DeviceProperties& device = current_device();
  constexpr int kReserved = 1024;  // of shared memory, for each CTA
  const int fitting = device.multiprocessor_shared_memory / (v.shared_bytes + kReserved);
  return static_cast<unsigned>(device.multiprocessors * std::clamp(fitting, 1, v.tiles.blocks));
}

// The largest divisor of `units` for groups of CTAs, of which whole ones fill the grid well.
int abreast(int units, int ctas) {
  int best = 1;
  for (int n = 2; n <= std::min({units, ctas, kMostAbreast}); ++n) {
    if (units % n == 0) best = n;
  }
  return best;
}

// Where partial results lie.
struct Layout {
  std::int64_t slots, max_chunks, tile_rows;
  std::size_t statistics, o, bytes;  // offsets

  explicit Layout(const AttentionProblem& p) {
    const Variant& v = variant_for(p);
    max_chunks = p.batch_invariant ? std::clamp<std::int64_t>((p.Sk + kChunkKeys - 1) / kChunkKeys, 1, kMaxChunks) : 0;
    slots = p.batch_invariant ? p.B * p.Hkv * row_tiles(p) * max_chunks : std::int64_t{2} * ctas_for(v);
    tile_rows = std::clamp<std::int64_t>(p.Sq * p.G, 1, kRows);
    const auto padded = [](std::int64_t n) { return static_cast<std::size_t>((n + 63) / 64 * 64); };
    statistics = padded(slots * static_cast<std::int64_t>(sizeof(std::uint64_t)));
    o = statistics + padded(slots * kRows * static_cast<std::int64_t>(sizeof(float2)));
    bytes = o + padded(slots * tile_rows * v.tiles.head * static_cast<std::int64_t>(sizeof(float)));
  }
};

std::size_t workspace(const AttentionProblem& p, int /*workers*/) { return p.B == 0 ? 0 : Layout(p).bytes; }

std::string describe(const AttentionProblem& p, int /*workers*/) {
  const Variant& v = variant_for(p);
  const Layout layout(p);
  return text(v.name, ": tiles of ", kRows, " rows, cells of ", kCellKeys, " keys, ", ctas_for(v), " CTAs",
              layout.max_chunks > 0 ? ", keys split by their number alone" : ", keys split evenly");
}

void launch(const AttentionProblem& p, const Runtime& runtime) {
  if (p.B == 0 || (p.Sq == 0 && !p.append)) return;
  const Variant& v = variant_for(p);
  Params params{};
  params.problem = p;
  if (p.k_batches == 0) params.problem.Sk = 0;  // no page, ring or cache row could be read
  params.group = Divisor(static_cast<unsigned>(p.G));
  if (p.page_table && !p.int4) params.page_size = Divisor(static_cast<unsigned>(p.page_size));
  params.last_batch = static_cast<int>(std::max<std::int64_t>(p.k_batches, 1) - 1);
  params.row_tiles = static_cast<int>(row_tiles(p));
  params.units = static_cast<int>(p.Hkv) * params.row_tiles;
  params.abreast = abreast(params.units, static_cast<int>(ctas_for(v)));
  params.uniform = !p.cu_seqlens_q && !p.cu_seqlens_k && !p.seqused_q && !p.seqused_k && !p.cache_leftpad && !p.piece();
  params.least_cells = kLeastCells;
  params.band = RowBand(p);
  params.q_aligned = has_rows_of_16_bytes(p.q);
  params.score_options = p.softcap > 0 || p.alibi || p.bias || p.mask || p.draft_mask;
  const Layout layout(p);
  auto* memory = static_cast<std::byte*>(runtime.workspace.data);
  params.max_chunks = layout.max_chunks;
  params.tile_rows = static_cast<int>(layout.tile_rows);
  params.ready = reinterpret_cast<std::uint64_t*>(memory);
  params.partial_statistics = reinterpret_cast<float2*>(memory + layout.statistics);
  params.partial_o = reinterpret_cast<float*>(memory + layout.o);
  v.launch(params, ctas_for(v), static_cast<cudaStream_t>(runtime.stream));
}

}  // namespace

std::span<const Variant> sm80::attention_decode::variants(DType type) {
  return variants_of<Instance, kTypes, kVariants>(type);
}

const AttentionForwardKernel kSm80AttentionDecode = {
    .name = "sm80_decode",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = kE4m3 | kDraftMask | kAppend | kInt4 | kPiece | kFloat32Out | kSteps,
    .for_decode = true,
    .costs = kCosts,
};

}  // namespace heddle::cuda
