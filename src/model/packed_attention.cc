#include "model/packed_attention.h"

#include <algorithm>
#include <bit>

namespace heddle {
namespace {

// A longest sequence that attention is told of at least on a GPU: kernels for decoding, whose workspace does not grow
// with it, are then never chosen for a call whose workspace was asked for with a larger bound. The others' workspace,
// but for the whole score matrix, which does grow, is at most kLeastScratch.
constexpr std::int64_t kLeastLongest = 64;
constexpr std::size_t kLeastScratch = 256;

constexpr std::size_t kRowAlignment = 64;  // of all rows, as workspaces have them

}  // namespace

TensorView PackedAttention::rows(std::int64_t total, const std::byte* data, std::int64_t first, std::int64_t count,
                                 std::int64_t stride) const {
  const std::size_t offset = size_of(dtype) * static_cast<std::size_t>(first * head);
  TensorView view(data != nullptr ? data + offset : nullptr, dtype, {total, count, head}, {stride, head, 1});
  view.alignment = 1 << std::countr_zero(offset | kRowAlignment);
  view.device = device;
  return view;
}

PackedAttention::Operands PackedAttention::operands(std::int64_t total, const std::byte* qkv) const {
  return {rows(total, qkv, 0, heads, columns()), rows(total, qkv, heads, kv_heads, columns()),
          rows(total, qkv, heads + kv_heads, kv_heads, columns())};
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
  const Operands of = operands(total, nullptr);
  return attention_forward_workspace(of.q, of.k, of.v, options(cu_seqlens, longest), runtime);
}

std::size_t PackedAttention::gpu_workspace(std::int64_t total, std::int64_t sequences, std::int64_t longest) const {
  TensorView cu_seqlens(nullptr, DType::i32, {sequences + 1});
  cu_seqlens.device = Device::cuda;
  return std::max(workspace(total, cu_seqlens, longest, {}), kLeastScratch);
}

void PackedAttention::run(std::int64_t total, const TensorView& cu_seqlens, std::int64_t longest, const std::byte* qkv,
                          std::byte* context, const Runtime& runtime) const {
  const Operands of = operands(total, qkv);
  attention_forward(of.q, of.k, of.v, rows(total, context, 0, heads, heads * head), {}, options(cu_seqlens, longest),
                    runtime);
}

}  // namespace heddle
