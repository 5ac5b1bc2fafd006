#include "cuda/any/cublaslt/host.h"

#include "core/check.h"
#include "cuda/any/linear/host.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"

namespace heddle::cuda::cublaslt {
namespace {

constexpr std::int64_t kPartBytes = std::int64_t{32} << 20, kFewest = 256;

std::string refuse_stride(const char* name, const RowsOf& rows, std::int64_t width) {
  if (!rows.given) return "";
  const auto stride = linear::row_stride(rows);
  if (!stride) return text(name, "'s rows must lie one stride apart");
  const bool one_row = rows.shape[0] * rows.shape[1] * rows.shape[2] <= 1;
  return one_row || *stride >= width ? "" : text(name, "'s rows overlap or run backwards");
}

// Of 16 bits, on GPUs where nobody measured.
struct Rates {
  double flops = 0, bytes = 0;
};
Rates assumed_rates() {
  const DeviceProperties& device = current_device();
  const double multiprocessors = device.multiprocessors;
  constexpr double kOfH200 = 132;  // multiprocessors
  if (device.major >= 9) return {multiprocessors / kOfH200 * kCosts[0].cost.flops, kCosts[1].cost.bytes};
  if (device.major == 8 && device.minor == 0) return {multiprocessors * 2.3e12, 1.4e12};
  return {multiprocessors * 0.9e12, 0.8e12};
}

}  // namespace

Part part_of(std::int64_t M, std::int64_t N, bool sums, std::int64_t weight_bytes) {
  Part part{M, N};
  if (weight_bytes > 0) {
    // Of few rows of x the product is as long as its reading: then W is taken in larger parts.
    const std::int64_t bytes = M >= 1024 ? kPartBytes : 8 * kPartBytes;
    part.columns = std::min(N, std::max(bytes / weight_bytes / kFewest, std::int64_t{1}) * kFewest);
  }
  if (sums) {
    const std::int64_t fit = kPartBytes / 4 / std::max(M, std::int64_t{1}) / kFewest * kFewest;
    part.columns = std::min(part.columns, std::max(fit, std::int64_t{4096}));
    part.rows = std::min(M, std::max(kPartBytes / 4 / part.columns / kFewest, std::int64_t{1}) * kFewest);
  }
  return part;
}

std::string refuse(const LinearProblem& p) {
  if (std::string reason = refuse_before_ampere(); !reason.empty()) return reason;
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) {
    return text("x must be float16 or bfloat16; found ", name_of(p.dtype));
  }
  if (p.batch_invariant) return "the order of its sums may depend on how many rows there are";
  if (p.K == 0) return "K must be 1 or more";
  if (std::string reason = refuse_stride("x", p.x, p.K); !reason.empty()) return reason;
  if (std::string reason = refuse_stride("y", p.y, p.outputs); !reason.empty()) return reason;
  return refuse_stride("residual", p.residual, p.outputs);
}

std::string refuse_pass(const LinearProblem& p) {
  const std::int64_t stride = linear::row_stride(p.x).value_or(0);
  if (p.K % 8 != 0 || (p.x.given && p.x.alignment < 16) || stride % 8 != 0) {
    return "x's rows must have a multiple of 8 elements and begin at multiples of 16 bytes";
  }
  if (p.norm.alignment < 16) return "the norm's parameters must be aligned to 16 bytes";
  return "";
}

bool has_kept(const LinearProblem& p) { return p.kept && p.kept->dtype == p.dtype; }

double memory_seconds(double bytes) {
  const Cost* const tuned = tuned_cost(kCosts[1].name);
  return bytes / (tuned != nullptr ? tuned->bytes : assumed_rates().bytes);
}

double product_seconds(const LinearProblem& p, double bytes, const NamedCost& line) {
  const double M = static_cast<double>(p.M), N = static_cast<double>(p.N), K = static_cast<double>(p.K);
  const Cost* const tuned = tuned_cost(line.name);
  const double flops = tuned != nullptr ? tuned->flops : assumed_rates().flops * line.cost.flops / kCosts[0].cost.flops;
  return std::max(2 * M * N * K / flops, memory_seconds(bytes * (N * K + M * K) + 2 * M * N));
}

}  // namespace heddle::cuda::cublaslt
