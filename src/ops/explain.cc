// explain_*_on: the models that have names, and explain_*() asked about one of them.
#include "heddle/explain.h"

#include <initializer_list>
#include <string>

#include "core/check.h"
#include "cuda/assumed_gpu.h"
#include "ops/partial/partial.h"

namespace heddle {
namespace {

constexpr int kKiB = 1024, kMiB = 1024 * kKiB;

// A block has what its multiprocessor has, but for 1 KiB.
constexpr GpuModel kModels[] = {
    {"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 163 * kKiB, 164 * kKiB, 40 * kMiB},
    {"rtx4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 99 * kKiB, 100 * kKiB, 72 * kMiB},
    {"l40s", "NVIDIA L40S", 8, 9, 142, 99 * kKiB, 100 * kKiB, 96 * kMiB},
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 227 * kKiB, 228 * kKiB, 50 * kMiB},
    {"h200", "NVIDIA H200", 9, 0, 132, 227 * kKiB, 228 * kKiB, 60 * kMiB},
};

TensorView there(TensorView view) {
  view.device = Device::cuda;
  return view;
}

void move(std::initializer_list<TensorView*> views) {
  for (TensorView* view : views) view->device = Device::cuda;
}

AttentionOptions there(AttentionOptions o) {
  move({&o.alibi_slopes, &o.bias, &o.mask, &o.sink, &o.draft_mask, &o.cu_seqlens_q, &o.cu_seqlens_k, &o.seqused_q,
        &o.seqused_k, &o.page_table, &o.cache_batch_idx, &o.cache_leftpad, &o.q_offset, &o.key_offset, &o.q_scale,
        &o.k_scale, &o.v_scale});
  return o;
}

AttentionGradients there(AttentionGradients gradients) {
  move({&gradients.dq, &gradients.dk, &gradients.dv, &gradients.dbias, &gradients.dsink});
  return gradients;
}

BlockLists there(BlockLists lists) {
  move({&lists.blocks, &lists.counts, &lists.offsets, &lists.masks, &lists.mask_ids});
  return lists;
}

PoolOptions there(PoolOptions o) {
  move({&o.cu_seqlens, &o.seqused});
  return o;
}

SelectOptions there(SelectOptions o) {
  move({&o.q_offset, &o.cu_seqlens_q, &o.cu_seqlens_k, &o.seqused_k});
  return o;
}

NsaCache there(const NsaCache& c) {
  return {there(c.k), there(c.v), there(c.k_pooled), there(c.v_pooled), there(c.lengths), there(c.page_table)};
}
NsaGates there(const NsaGates& g) { return {there(g.cmp), there(g.slc), there(g.swa)}; }
Int4Cache there(Int4Cache cache) {
  move({&cache.blocks, &cache.k_tail, &cache.v_tail, &cache.page_table, &cache.row_idx});
  return cache;
}

PackedWeights there(PackedWeights weights) {
  weights.device = Device::cuda;
  move({&weights.data, &weights.kept});
  return weights;
}

Rotary there(Rotary rotary) {
  move({&rotary.cos, &rotary.sin});
  return rotary;
}

RotaryOptions there(RotaryOptions o) {
  move({&o.offsets});
  return o;
}

AppendOptions there(AppendOptions o) {
  o.rotary = there(o.rotary);
  move({&o.page_table, &o.cache_batch_idx, &o.k_scale, &o.v_scale});
  return o;
}

Int4AppendOptions there(Int4AppendOptions o) {
  o.rotary = there(o.rotary);
  return o;
}

lowbit::QuantizedMatrix there(lowbit::QuantizedMatrix matrix) {
  move({&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale});
  return matrix;
}

lowbit::QuantizeOptions there(lowbit::QuantizeOptions o) {
  move({&o.importance});
  return o;
}

LinearOptions there(LinearOptions o) {
  move({&o.bias, &o.residual, &o.norm_weight, &o.norm_bias});
  return o;
}

LinearGradients there(LinearGradients gradients) {
  move({&gradients.dx, &gradients.dbias, &gradients.dnorm_weight, &gradients.dnorm_bias});
  return gradients;
}

std::vector<Partial> there(std::span<const Partial> partials) {
  std::vector<Partial> moved(partials.begin(), partials.end());
  for (Partial& partial : moved) move({&partial.o, &partial.lse});
  return moved;
}

MergeOptions there(MergeOptions o) {
  move({&o.sink});
  return o;
}

}  // namespace

std::span<const GpuModel> gpu_models() { return kModels; }

const GpuModel& gpu_model_named(std::string_view name) {
  std::string known;
  for (const GpuModel& model : kModels) {
    if (name == model.name) return model;
    known += (known.empty() ? "" : ", ") + std::string(model.name);
  }
  throw Error(text("[explain] gpu is '", name, "': it must be one of ", known));
}

std::vector<Candidate> explain_attention_on(const GpuModel& gpu, const TensorView& q, const TensorView& k,
                                            const TensorView& v, const AttentionOptions& options,
                                            const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_attention(there(q), there(k), there(v), there(options), runtime);
}

std::vector<Candidate> explain_attention_backward_on(const GpuModel& gpu, const TensorView& q, const TensorView& k,
                                                     const TensorView& v, const AttentionGradients& gradients,
                                                     const AttentionOptions& options, const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_attention_backward(there(q), there(k), there(v), there(gradients), there(options), runtime);
}

std::vector<Candidate> explain_attention_over_int4_cache_on(const GpuModel& gpu, const TensorView& q,
                                                            const Int4Cache& cache, const AttentionOptions& options,
                                                            const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_attention_over_int4_cache(there(q), there(cache), there(options), runtime);
}

std::vector<Candidate> explain_sparse_attention_on(const GpuModel& gpu, const TensorView& q, const TensorView& k,
                                                   const TensorView& v, const BlockLists& lists,
                                                   const AttentionOptions& options, const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_sparse_attention(there(q), there(k), there(v), there(lists), there(options), runtime);
}

std::vector<Candidate> explain_sparse_attention_backward_on(const GpuModel& gpu, const TensorView& q,
                                                            const TensorView& k, const TensorView& v,
                                                            const BlockLists& lists,
                                                            const AttentionGradients& gradients,
                                                            const AttentionOptions& options, const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_sparse_attention_backward(there(q), there(k), there(v), there(lists), there(gradients), there(options),
                                           runtime);
}

std::vector<Candidate> explain_linear_on(const GpuModel& gpu, const TensorView& x, const PackedWeights& weights,
                                         const LinearOptions& options, const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_linear(there(x), there(weights), there(options), runtime);
}

std::vector<Candidate> explain_linear_backward_on(const GpuModel& gpu, const TensorView& dy, const TensorView& x,
                                                  const PackedWeights& weights, const LinearGradients& gradients,
                                                  const LinearOptions& options, const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_linear_backward(there(dy), there(x), there(weights), there(gradients), there(options), runtime);
}

std::vector<Candidate> explain_apply_rotary_on(const GpuModel& gpu, const TensorView& x, const TensorView& out,
                                               const Rotary& rotary, const RotaryOptions& options,
                                               const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_apply_rotary(there(x), there(out), there(rotary), there(options), runtime);
}

std::vector<Candidate> explain_append_kv_cache_on(const GpuModel& gpu, const TensorView& k_new, const TensorView& v_new,
                                                  const TensorView& k_cache, const TensorView& v_cache,
                                                  const TensorView& seqlens, const AppendOptions& options,
                                                  const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_append_kv_cache(there(k_new), there(v_new), there(k_cache), there(v_cache), there(seqlens),
                                 there(options), runtime);
}

std::vector<Candidate> explain_append_int4_cache_on(const GpuModel& gpu, const TensorView& k_new,
                                                    const TensorView& v_new, const Int4Cache& cache,
                                                    const TensorView& seqlens, const Int4AppendOptions& options,
                                                    const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_append_int4_cache(there(k_new), there(v_new), there(cache), there(seqlens), there(options), runtime);
}

std::vector<Candidate> explain_merge_attention_on(const GpuModel& gpu, std::span<const Partial> partials,
                                                  const TensorView& o, const TensorView& lse,
                                                  const MergeOptions& options, const Runtime& runtime) {
  return explain_merge_attention_on_as({}, gpu, partials, o, lse, options, runtime);
}

std::vector<Candidate> explain_merge_attention_on_as(const MergeNames& names, const GpuModel& gpu,
                                                     std::span<const Partial> partials, const TensorView& o,
                                                     const TensorView& lse, const MergeOptions& options,
                                                     const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_merge_attention_as(names, there(partials), there(o), there(lse), there(options), runtime);
}

std::vector<Candidate> explain_merge_attention_backward_on(const GpuModel& gpu, std::span<const Partial> partials,
                                                           const TensorView& d_o, const TensorView& d_lse,
                                                           std::span<const Partial> gradients, const TensorView& dsink,
                                                           const MergeOptions& options, const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_merge_attention_backward(there(partials), there(d_o), there(d_lse), there(gradients), there(dsink),
                                          there(options), runtime);
}

std::vector<Candidate> explain_pool_keys_on(const GpuModel& gpu, const TensorView& x, const TensorView& pooled,
                                            const PoolOptions& options, const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_pool_keys(there(x), there(pooled), there(options), runtime);
}

std::vector<Candidate> explain_pool_keys_backward_on(const GpuModel& gpu, const TensorView& d_pooled,
                                                     const TensorView& dx, const PoolOptions& options,
                                                     const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_pool_keys_backward(there(d_pooled), there(dx), there(options), runtime);
}

std::vector<Candidate> explain_select_blocks_on(const GpuModel& gpu, const TensorView& q, const TensorView& k_pooled,
                                                const TensorView& lse, const TensorView& blocks,
                                                const SelectOptions& options, const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_select_blocks(there(q), there(k_pooled), there(lse), there(blocks), there(options), runtime);
}

std::vector<Candidate> explain_nsa_step_on(const GpuModel& gpu, const TensorView& q, const TensorView& k_new,
                                           const TensorView& v_new, const NsaCache& cache, const NsaGates& gates,
                                           const TensorView& out, const NsaStepOptions& options,
                                           const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_nsa_step(there(q), there(k_new), there(v_new), there(cache), there(gates), there(out), options,
                          runtime);
}

std::vector<Candidate> explain_unpack_weights_on(const GpuModel& gpu, const PackedWeights& weights,
                                                 const TensorView& out, const UnpackOptions& options,
                                                 const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_unpack_weights(there(weights), there(out), options, runtime);
}

std::vector<Candidate> lowbit::explain_quantize_on(const GpuModel& gpu, const TensorView& weights,
                                                   const QuantizeOptions& options, const QuantizedMatrix& out,
                                                   const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_quantize(there(weights), there(options), there(out), runtime);
}

std::vector<Candidate> lowbit::explain_dequantize_on(const GpuModel& gpu, const QuantizedMatrix& matrix,
                                                     const TensorView& out, const DequantizeOptions& options,
                                                     const Runtime& runtime) {
  const cuda::AssumedGpu assumed(gpu);
  return explain_dequantize(there(matrix), there(out), options, runtime);
}

}  // namespace heddle
