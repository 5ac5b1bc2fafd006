#include "cuda/sm90/nsa_step/host.h"

#include <algorithm>
#include <bit>

#include "cuda/assumed_gpu.h"
#include "cuda/common/attention/log2.h"
#include "cuda/common/device.h"
#include "cuda/common/requirements.h"
#include "cuda/sm90/nsa_step/variants.h"

namespace heddle::cuda::sm90::nsa_step {
namespace {

// Of the kernel that takes most memory: a CTA of any has a multiprocessor of its own.
int clusters_at_once(int size) {
  static const Variant& most =
      first_that(variants(DType::bf16), [](const Variant& v) { return v.head == kMostHead && !v.paged; });
  return most.clusters_at_once(size);
}

int score_pitch(const NsaStepProblem& p) {
  return static_cast<int>((p.pooled + kTileKeys - 1) / kTileKeys * kTileKeys);
}

}  // namespace

// The most that lets all units run at once. Where the cut must not depend on the batch it is one that serves batches.
int cluster_of(const NsaStepProblem& p) {
  if (p.batch_invariant) return 2;
  const std::int64_t units = p.B * p.H;
  int size = kMostCluster;
  while (size > 1 &&
         (units * size > current_device().multiprocessors || clusters_held(clusters_at_once, size) < units)) {
    size /= 2;
  }
  return size;
}

std::size_t workspace_bytes(const NsaStepProblem& p) {
  return static_cast<std::size_t>(p.B * p.H * p.G) * static_cast<std::size_t>(score_pitch(p)) * sizeof(float);
}

void launch(const NsaStepProblem& p, const Runtime& runtime) {
  Params params{};
  params.problem = p;
  params.scores = static_cast<float*>(runtime.workspace.data);
  params.score_pitch = score_pitch(p);
  params.cluster = cluster_of(p);
  params.block_log2 = std::countr_zero(static_cast<unsigned>(p.block));
  params.scale_log2 = p.scale * kLog2e;
  if (p.page_table != nullptr) {
    params.by_page = Divisor(static_cast<unsigned>(p.page_size));
    params.by_pooled_page = Divisor(static_cast<unsigned>(p.page_size / p.block));
  }
  params.wide_in = has_rows_of_16_bytes(p.q) && has_rows_of_16_bytes(p.k_new) && has_rows_of_16_bytes(p.v_new);
  params.wide_out = has_rows_of_16_bytes(p.out);
  const Variant& v = first_that(variants(p.dtype), [&](const Variant& v) {
    return std::max(p.D, p.Dv) <= v.head && v.paged == (p.page_table != nullptr);
  });
  v.launch(params, static_cast<unsigned>(p.B * p.H * params.cluster), static_cast<cudaStream_t>(runtime.stream));
}

std::span<const Variant> variants(DType type) { return variants_of<Instance, kTypes, kVariants>(type); }

}  // namespace heddle::cuda::sm90::nsa_step
