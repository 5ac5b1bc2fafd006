// The candidate "sm80_gemv": what it takes, and the launch.
#include "core/check.h"
#include "cuda/any/linear/host.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/kernels.h"
#include "cuda/sm80/linear_gemv/config.h"
#include "cuda/sm80/linear_gemv/variants.h"

namespace heddle::cuda {
namespace {

using namespace linear;
using namespace sm80::linear_gemv;

std::int64_t ctas_of(const LinearProblem& p, const Variant& v) {
  return (p.fragments().layout.row_blocks * (kBlockRows / kSlabRows) + v.slabs - 1) / v.slabs;
}

// With several slabs a CTA less of x is read, if enough CTAs are left.
const Variant& variant_of(const LinearProblem& p) {
  const Variants& v = variants(p.dtype).front();
  const std::int64_t places = static_cast<std::int64_t>(v.many.resident) * current_device().multiprocessors;
  return ctas_of(p, v.many) >= places ? v.many : v.few;
}

std::size_t shared_bytes(const LinearProblem& p) {
  const Variant& v = variant_of(p);
  return v.fixed_bytes + static_cast<std::size_t>(p.M * x_pitch(p.fragments().layout.column_blocks, v.block_columns));
}

std::string supports(const LinearProblem& p) {
  if (p.order != WeightOrder::fragments16) return text("it takes weights in order fragments16, not ", name_of(p.order));
  if (!lowbit::is_e2m1(p.format)) {
    return text("it takes nvfp4, mxfp4 and e2m1_row, not ", lowbit::name_of(p.format));
  }
  if (p.M > kTokens) return text("it takes at most ", kTokens, " rows of x; found ", p.M);
  if (p.batch_invariant) return "it adds up in another order than the kernels for more rows";
  if (std::string reason = refuse_before_ampere(); !reason.empty()) return reason;
  if (std::string reason = refuse(p); !reason.empty()) return reason;
  const auto room = static_cast<std::size_t>(current_device().shared_memory);
  if (shared_bytes(p) > room) {
    return text("its rows of x must fit into shared memory, beside what is there: ", p.M, " of ", p.K, " take ",
                shared_bytes(p), " of ", room, " bytes");
  }
  return "";
}

constexpr CostLine<LinearProblem> kCosts[] = {
    {"sm80_gemv", {2.0e-6, 0, 4.2e12}, {"nvfp4", WeightOrder::fragments16, DType::bf16, 1, 28672, 8192}},
};

double estimate(const LinearProblem& p, int /*workers*/) {
  if (p.empty()) return 0.0;
  // Every CTA reads all of x: from the L2 cache, at this rate on an H200.
  constexpr double kX = 2.5e12;
  const auto x = static_cast<double>(ctas_of(p, variant_of(p)) * p.M * p.K) * 2;
  const double seconds = static_cast<double>(p.fragments().layout.bytes) / kCosts[0].cost.bytes + x / kX;
  return cost_of(kCosts[0]).fixed + seconds * times_as_long(kCosts[0]);
}

std::size_t workspace(const LinearProblem&, int /*workers*/) { return 0; }

std::string describe(const LinearProblem& p, int /*workers*/) {
  if (p.empty()) return "nothing to launch";
  const Variant& v = variant_of(p);
  return text(ctas_of(p, v), " CTAs of ", v.slabs * kSlabRows, " rows of W, x in shared memory");
}

void launch(const LinearProblem& p, const Runtime& runtime) {
  if (p.empty()) return;
  const Variant& v = variant_of(p);
  Params params{};
  params.x = p.x.data;
  params.x_stride = row_stride(p.x).value_or(0);
  params.k = static_cast<int>(p.K);
  params.k_blocks = static_cast<int>(p.fragments().layout.column_blocks);
  params.row_blocks = static_cast<int>(p.fragments().layout.row_blocks);
  params.weights = p.fragments().data + p.fragments().layout.blocks;
  params.norm = norm_in_front(p);
  params.out = output_of(p);
  v.launch(params, shared_bytes(p), static_cast<cudaStream_t>(runtime.stream));
}

}  // namespace

std::span<const Variants> sm80::linear_gemv::variants(DType type) {
  return variants_of<Instance, kTypes, kVariants>(type);
}

const LinearKernel kSm80Gemv = {.name = "sm80_gemv",
                                .method = "linear",
                                .device = Device::cuda,
                                .automatic = true,
                                .supports = supports,
                                .estimate = estimate,
                                .workspace = workspace,
                                .launch = launch,
                                .describe = describe,
                                .extras = kNormInFront,
                                .costs = kCosts};

}  // namespace heddle::cuda
