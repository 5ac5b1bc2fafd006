#include "cuda/any/linear/host.h"

#include <atomic>
#include <random>

#include "core/check.h"

namespace heddle::cuda::linear {
namespace {

constexpr std::int64_t kMostSums = std::int64_t{1} << 39, kMostColumns = std::int64_t{1} << 23,
                       kMostRows = std::int64_t{1} << 30;

// The width is known where data is not: in queries, which must not answer for another candidate than the call takes.
std::string refuse_rows(const char* name, const RowsOf& rows, std::int64_t width) {
  if (width % 8 != 0) return text(name, "'s rows must have a multiple of 8 elements; found ", width);
  if (!rows.given) return "";
  const auto stride = row_stride(rows);
  if (!stride) return text(name, "'s rows must lie one stride apart");
  if (rows.alignment < 16 || *stride % 8 != 0 || *stride < 0) {
    return text(name, "'s rows must begin at multiples of 16 bytes; found a stride of ", *stride,
                " elements, and a first byte at a multiple of ", rows.alignment);
  }
  return "";
}

// Never 0, and hard to find in memory by chance.
std::uint64_t next_mark() {
  static std::atomic<std::uint64_t> count{[] {
    std::random_device random;
    return static_cast<std::uint64_t>(random()) << 32 | random();
  }()};
  // An odd number times a counter does not come back for 2^64 calls.
  const std::uint64_t mark = ++count * 0x9e3779b97f4a7c15u;
  return mark != 0 ? mark : next_mark();
}

}  // namespace

std::optional<std::int64_t> row_stride(const RowsOf& rows) {
  std::optional<std::int64_t> stride;
  std::int64_t inside = 1;  // rows of one step of the dimension that is looked at
  for (int i = 2; i >= 0; --i) {
    if (rows.shape[i] == 1) continue;
    if (!stride) {
      stride = rows.stride[i];
    } else if (rows.stride[i] != *stride * inside) {
      return std::nullopt;
    }
    inside *= rows.shape[i];
  }
  return stride.value_or(0);  // there is one row
}

std::string refuse(const LinearProblem& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) {
    return text("x must be float16 or bfloat16; found ", name_of(p.dtype));
  }
  if (p.int8_x) return "it has no products in integers: int8_x is for CPUs, order fragments8 for GPUs";
  if (p.K == 0 || p.K > kMostColumns) return text("K must be 1 to ", kMostColumns, "; found ", p.K);
  if (p.M > kMostRows || p.N > kMostRows) {
    return text("M and N must be at most ", kMostRows, "; found ", p.M, " and ", p.N);
  }
  if (p.M * p.N > kMostSums) return text("y has more than ", kMostSums, " sums");
  if (std::string reason = refuse_rows("x", p.x, p.K); !reason.empty()) return reason;
  if (p.norm.alignment < 16) return "the norm's parameters must be aligned to 16 bytes";
  if (std::string reason = refuse_rows("y", p.y, p.outputs); !reason.empty()) return reason;
  return refuse_rows("residual", p.residual, p.outputs);
}

NormInFront norm_in_front(const LinearProblem& p) {
  return {.kind = p.norm.kind, .weight = p.norm.weight, .bias = p.norm.bias, .eps = static_cast<float>(p.norm.eps)};
}

RowsPass rows_pass(const LinearProblem& p, std::int64_t pitch, std::byte* to, float* scales) {
  return {.dtype = p.dtype,
          .x = p.x.data,
          .stride = row_stride(p.x).value_or(0),
          .rows = static_cast<int>(p.M),
          .columns = static_cast<int>(p.K),
          .pitch = static_cast<int>(pitch),
          .norm = norm_in_front(p),
          .to = to,
          .scales = scales};
}

std::string words_of(const TileShape& tile, const Plan& plan) {
  const std::string shared = plan.cluster > 1 ? text(", each shared by a cluster of ", plan.cluster)
                             : plan.shared_tiles > 0
                                 ? text(", ", plan.shared_tiles, " of them shared through the workspace")
                                 : "";
  return text("tiles of ", tile.tokens, " rows of x and ", tile.row_blocks * 64, " of W, ", plan.tiles, " on ",
              plan.grid, " CTAs", shared);
}

double rows_traffic_seconds(const LinearProblem& p) {
  constexpr double kBytesASecond = 2.5e12;
  return 4.0 * static_cast<double>(p.M) * static_cast<double>(p.K) / kBytesASecond;
}

double rows_seconds(const LinearProblem& p) {
  constexpr double kLaunch = 2.5e-6;
  return kLaunch + rows_traffic_seconds(p);
}

double activation_seconds(const LinearProblem& p) {
  if (p.activation == Activation::none || p.activation == Activation::relu) return 0.0;
  return 7.5e-12 * static_cast<double>(p.M) * static_cast<double>(p.N);
}

Output output_of(const LinearProblem& p) {
  Output out{};
  out.row_scales = reinterpret_cast<const float*>(p.fragments().data);
  out.bias = p.bias;
  out.residual = p.residual.data;
  out.y = p.y.data;
  out.residual_stride = row_stride(p.residual).value_or(0);
  out.y_stride = row_stride(p.y).value_or(0);
  out.m = static_cast<int>(p.M);
  out.n = static_cast<int>(p.outputs);
  out.activation = p.activation;
  return out;
}

Schedule schedule_of(const LinearProblem& p, const Plan& plan, std::byte* workspace) {
  Schedule s{};
  s.units = plan.units;
  s.k_blocks = static_cast<int>(p.fragments().layout.column_blocks);
  s.row_blocks = static_cast<int>(p.fragments().layout.row_blocks);
  s.row_tiles = plan.row_tiles;
  s.tiles = plan.tiles;
  s.shared_tiles = plan.shared_tiles;
  s.cluster = plan.cluster;
  if (plan.partial_bytes > 0) {
    s.partials = reinterpret_cast<float4*>(workspace);
    s.marks = reinterpret_cast<std::uint64_t*>(workspace + plan.partial_bytes);
    s.mark = next_mark();
  }
  return s;
}

std::size_t workspace_of(const Plan& plan) { return plan.partial_bytes + plan.mark_bytes; }

}  // namespace heddle::cuda::linear
