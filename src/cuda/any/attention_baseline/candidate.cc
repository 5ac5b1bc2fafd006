// The candidate "baseline_cuda": what it takes, the score buffer, and the launch.
#include <limits>

#include "core/check.h"
#include "cuda/any/attention_baseline/variants.h"
#include "cuda/any/operand_dtype.h"
#include "cuda/common/requirements.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "problem/philox.h"

namespace heddle::cuda {
namespace {

using namespace any::attention_baseline;

std::int64_t tiles(std::int64_t length, std::int64_t tile) { return (length + tile - 1) / tile; }
std::int64_t pitch(const AttentionProblem& p) { return (p.Sk + 3) / 4 * 4; }

// Bytes of the score buffer; false if 63 bits do not hold them.
bool buffer_bytes(const AttentionProblem& p, std::int64_t& bytes) {
  bytes = sizeof(float);
  for (const std::int64_t extent : {p.B, p.H, p.Sq, pitch(p)}) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return false;
  }
  return true;
}

// Rows can be read in pieces of 16 bytes, as they are.
bool in_pieces(const Operand& x, std::int64_t size) {
  if (x.dtype == DType::f8e4m3) return false;
  const std::int64_t piece = 16 / static_cast<std::int64_t>(size_of(x.dtype));
  return x.alignment >= 16 && x.stride_d == 1 && x.stride_b % piece == 0 && x.stride_s % piece == 0 &&
         x.stride_h % piece == 0 && size % piece == 0;
}

Refusal supports(const AttentionProblem& p) {
  if (Refusal reason = refuse_before_ampere(); !reason.empty()) return reason;
  std::int64_t bytes;
  if (!buffer_bytes(p, bytes)) {
    return text("its score buffer, [B, H, Sq, Sk] = [", p.B, ", ", p.H, ", ", p.Sq, ", ", p.Sk,
                "] in float32, has more bytes than 63 bits can count");
  }
  constexpr std::int64_t kMaxBlocks = std::numeric_limits<std::int32_t>::max();
  const std::int64_t blocks = tiles(p.Sq, kRows) * (tiles(p.Sk, kKeys) + 16);  // of one head, in any kernel
  if (blocks > 0 && p.B * p.H > kMaxBlocks / blocks) return text("its score buffer has more tiles than ", kMaxBlocks);
  return "";
}

constexpr CostLine<AttentionProblem> kCosts[] = {
    {"baseline_cuda", {18.2e-6, 32.8e12, 0}, {DType::bf16, DType::bf16, Precision::f32, 1, 16, 16, 4096, 4096, 128}},
};

double estimate(const AttentionProblem& p, int /*workers*/) {
  const double pairs = static_cast<double>(p.B) * static_cast<double>(p.H * p.Sq) * static_cast<double>(p.Sk);
  const Cost& cost = cost_of(kCosts[0]);
  return cost.fixed + 2.0 * static_cast<double>(p.D + p.Dv) * pairs / cost.flops;
}

std::size_t workspace(const AttentionProblem& p, int /*workers*/) {
  std::int64_t bytes;
  return buffer_bytes(p, bytes) ? static_cast<std::size_t>(bytes) : 0;
}

std::string describe(const AttentionProblem& p, int workers) {
  return text("scores, softmax and output by a kernel each, over a buffer of ", workspace(p, workers), " bytes");
}

void launch(const AttentionProblem& p, const Runtime& runtime) {
  if (p.B == 0 || p.Sq == 0) return;
  Params params{};
  params.problem = p;
  params.scores = static_cast<float*>(runtime.workspace.data);
  params.pitch = pitch(p);
  params.q_tiles = tiles(p.Sq, kRows);
  params.k_tiles = tiles(p.Sk, kKeys);
  params.q_pieces = in_pieces(p.q, p.D);
  params.k_pieces = in_pieces(p.k, p.D);
  params.v_pieces = in_pieces(p.v, p.Dv);
  params.drop_below = dropout_threshold(p.dropout.p);
  variants(any::operand_dtype(p)).front().launch(params, static_cast<cudaStream_t>(runtime.stream));
}

}  // namespace

std::span<const Variant> any::attention_baseline::variants(DType type) {
  return variants_of<Instance, kTypes, kVariants>(type);
}

const AttentionForwardKernel kAttentionForwardBaseline = {
    .name = "baseline_cuda",
    .method = "baseline",
    .device = Device::cuda,
    .automatic = false,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = kE4m3 | kDraftMask | kPiece | kFloat32Out,
    .costs = kCosts,
};

}  // namespace heddle::cuda
