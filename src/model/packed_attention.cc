#include "model/packed_attention.h"

#include <algorithm>

namespace heddle {
namespace {

// A longest sequence that attention is told of at least on a GPU: kernels for decoding, whose workspace does not grow
// with it, are then never chosen for a call whose workspace was asked for with a larger bound. The others' workspace,
// but for the whole score matrix, which does grow, is at most kLeastScratch.
constexpr std::int64_t kLeastLongest = 64;
constexpr std::size_t kLeastScratch = 256;

// Aligned as the rows are: queries read no data, and it must not be null.
const std::byte* some_address() { return reinterpret_cast<const std::byte*>(std::uintptr_t{4096}); }

}  // namespace

TensorView PackedAttention::rows(std::int64_t total, const std::byte* data, std::int64_t count,
                                 std::int64_t stride) const {
  TensorView view(data, dtype, {total, count, head}, {stride, head, 1});
  view.device = device;
  return view;
}

PackedAttention::Operands PackedAttention::operands(std::int64_t total, const std::byte* qkv) const {
  const std::byte* const k = qkv + size_of(dtype) * static_cast<std::size_t>(heads * head);
  const std::byte* const v = k + size_of(dtype) * static_cast<std::size_t>(kv_heads * head);
  return {rows(total, qkv, heads, columns()), rows(total, k, kv_heads, columns()), rows(total, v, kv_heads, columns())};
}

AttentionOptions PackedAttention::options(const TensorView& cu_seqlens, std::int64_t longest) const {
  AttentionOptions options;
  options.causal = causal;
  options.cu_seqlens_q = options.cu_seqlens_k = cu_seqlens;
  options.max_seqlen_q = options.max_seqlen_k = device == Device::cuda ? std::max(longest, kLeastLongest) : longest;
  options.method = method;
  options.batch_invariant = true;  // a sequence's rows must not depend on its neighbours
  return options;
}

std::size_t PackedAttention::workspace(std::int64_t total, const TensorView& cu_seqlens, std::int64_t longest,
                                       const Runtime& runtime) const {
  const Operands of = operands(total, some_address());
  return attention_forward_workspace(of.q, of.k, of.v, options(cu_seqlens, longest), runtime);
}

std::size_t PackedAttention::gpu_workspace(std::int64_t total, std::int64_t sequences, std::int64_t longest) const {
  TensorView cu_seqlens(some_address(), DType::i32, {sequences + 1});
  cu_seqlens.device = Device::cuda;
  return std::max(workspace(total, cu_seqlens, longest, {}), kLeastScratch);
}

void PackedAttention::run(std::int64_t total, const TensorView& cu_seqlens, std::int64_t longest, const std::byte* qkv,
                          std::byte* context, const Runtime& runtime) const {
  const Operands of = operands(total, qkv);
  attention_forward(of.q, of.k, of.v, rows(total, context, heads, heads * head), {}, options(cu_seqlens, longest),
                    runtime);
}

}  // namespace heddle
