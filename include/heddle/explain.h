// What would run on a GPU that need not be here: the explain_*() functions, asked about one of a known model.
//
// They answer as a machine with such a GPU would, and start nothing. Views are taken to be on that GPU wherever they
// are, laid out as they are, and no data is read, index data neither: packed calls must bring max_seqlen. Seconds rest
// on costs measured on an H200, as they do there, unless HEDDLE_TUNING names a file that was made on this model. How
// many clusters of CTAs a Hopper GPU holds at once differs from chip to chip, and its driver alone knows: the least
// that can be is taken, so that the workspace of sm90_decode, and the seconds of linear layers of few rows, may be
// others there. cuBLASLt is taken to be found. A build without CUDA has no kernels to ask, and its candidates say so.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "heddle/attention.h"
#include "heddle/int4_cache.h"
#include "heddle/kv_cache.h"
#include "heddle/linear.h"
#include "heddle/lowbit.h"
#include "heddle/nsa.h"
#include "heddle/partial.h"
#include "heddle/sparse.h"

namespace heddle {

// A GPU as its driver would describe it.
struct GpuModel {
  std::string_view name;     // "h100"
  std::string_view product;  // "NVIDIA H100 80GB HBM3"
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int shared_memory = 0;                 // bytes that a block may have
  int multiprocessor_shared_memory = 0;  // bytes that the blocks of a multiprocessor share
  int l2_bytes = 0;
};

// Those that have names: a100, rtx4090, l40s, h100, h200. Figures are those that NVIDIA publishes.
std::span<const GpuModel> gpu_models();
// One of them; Error, listing them, for another name.
const GpuModel& gpu_model_named(std::string_view name);

std::vector<Candidate> explain_attention_on(const GpuModel& gpu, const TensorView& q, const TensorView& k,
                                            const TensorView& v, const AttentionOptions& options,
                                            const Runtime& runtime = {});

std::vector<Candidate> explain_attention_backward_on(const GpuModel& gpu, const TensorView& q, const TensorView& k,
                                                     const TensorView& v, const AttentionGradients& gradients,
                                                     const AttentionOptions& options, const Runtime& runtime = {});

std::vector<Candidate> explain_attention_over_int4_cache_on(const GpuModel& gpu, const TensorView& q,
                                                            const Int4Cache& cache, const AttentionOptions& options,
                                                            const Runtime& runtime = {});

std::vector<Candidate> explain_sparse_attention_on(const GpuModel& gpu, const TensorView& q, const TensorView& k,
                                                   const TensorView& v, const BlockLists& lists,
                                                   const AttentionOptions& options, const Runtime& runtime = {});

std::vector<Candidate> explain_sparse_attention_backward_on(
    const GpuModel& gpu, const TensorView& q, const TensorView& k, const TensorView& v, const BlockLists& lists,
    const AttentionGradients& gradients, const AttentionOptions& options, const Runtime& runtime = {});

std::vector<Candidate> explain_linear_on(const GpuModel& gpu, const TensorView& x, const PackedWeights& weights,
                                         const LinearOptions& options = {}, const Runtime& runtime = {});

std::vector<Candidate> explain_linear_backward_on(const GpuModel& gpu, const TensorView& dy, const TensorView& x,
                                                  const PackedWeights& weights, const LinearGradients& gradients,
                                                  const LinearOptions& options = {}, const Runtime& runtime = {});

std::vector<Candidate> explain_apply_rotary_on(const GpuModel& gpu, const TensorView& x, const TensorView& out,
                                               const Rotary& rotary, const RotaryOptions& options = {},
                                               const Runtime& runtime = {});

std::vector<Candidate> explain_append_kv_cache_on(const GpuModel& gpu, const TensorView& k_new, const TensorView& v_new,
                                                  const TensorView& k_cache, const TensorView& v_cache,
                                                  const TensorView& seqlens, const AppendOptions& options = {},
                                                  const Runtime& runtime = {});

std::vector<Candidate> explain_append_int4_cache_on(const GpuModel& gpu, const TensorView& k_new,
                                                    const TensorView& v_new, const Int4Cache& cache,
                                                    const TensorView& seqlens, const Int4AppendOptions& options = {},
                                                    const Runtime& runtime = {});

std::vector<Candidate> explain_merge_attention_on(const GpuModel& gpu, std::span<const Partial> partials,
                                                  const TensorView& o, const TensorView& lse,
                                                  const MergeOptions& options = {}, const Runtime& runtime = {});

std::vector<Candidate> explain_merge_attention_backward_on(const GpuModel& gpu, std::span<const Partial> partials,
                                                           const TensorView& d_o, const TensorView& d_lse,
                                                           std::span<const Partial> gradients, const TensorView& dsink,
                                                           const MergeOptions& options = {},
                                                           const Runtime& runtime = {});

std::vector<Candidate> explain_pool_keys_on(const GpuModel& gpu, const TensorView& x, const TensorView& pooled,
                                            const PoolOptions& options, const Runtime& runtime = {});

std::vector<Candidate> explain_pool_keys_backward_on(const GpuModel& gpu, const TensorView& d_pooled,
                                                     const TensorView& dx, const PoolOptions& options,
                                                     const Runtime& runtime = {});

std::vector<Candidate> explain_select_blocks_on(const GpuModel& gpu, const TensorView& q, const TensorView& k_pooled,
                                                const TensorView& lse, const TensorView& blocks,
                                                const SelectOptions& options, const Runtime& runtime = {});

std::vector<Candidate> explain_nsa_step_on(const GpuModel& gpu, const TensorView& q, const TensorView& k_new,
                                           const TensorView& v_new, const NsaCache& cache, const NsaGates& gates,
                                           const TensorView& out, const NsaStepOptions& options,
                                           const Runtime& runtime = {});

std::vector<Candidate> explain_unpack_weights_on(const GpuModel& gpu, const PackedWeights& weights,
                                                 const TensorView& out, const UnpackOptions& options = {},
                                                 const Runtime& runtime = {});

namespace lowbit {

std::vector<Candidate> explain_quantize_on(const GpuModel& gpu, const TensorView& weights,
                                           const QuantizeOptions& options, const QuantizedMatrix& out,
                                           const Runtime& runtime = {});

std::vector<Candidate> explain_dequantize_on(const GpuModel& gpu, const QuantizedMatrix& matrix, const TensorView& out,
                                             const DequantizeOptions& options = {}, const Runtime& runtime = {});

}  // namespace lowbit
}  // namespace heddle
