// Decoding over a cache that is spread over ranks: a call over the rank's own keys, one exchange, one merge.
#include <bit>
#include <cmath>
#include <utility>

#include "distributed/agreement.h"
#include "distributed/memory.h"
#include "distributed/views.h"
#include "heddle/partial.h"

namespace heddle::distributed {
namespace {

// What a rank sends, and all get: o [B, Sq, H, Dv], then lse [B, H, Sq].
struct Message {
  std::int64_t batch, rows, heads, head_size_v;

  std::int64_t behind() const { return batch * rows * heads * head_size_v; }
  std::int64_t numbers() const { return behind() + batch * rows * heads; }
  TensorView o(const float* data) const { return {data, DType::f32, {batch, rows, heads, head_size_v}}; }
  TensorView lse(const float* data) const { return {data + behind(), DType::f32, {batch, heads, rows}}; }
};

// What attention does not check of the rank's own call, because the other ranks' parts, or the merge, are about it.
void check_arguments(const TensorView& q, const TensorView& k_cache, const TensorView& v_cache, const TensorView& o,
                     const TensorView& lse, const DecodeOptions& options) {
  const Check check("distributed.decode");
  for (const auto& [name, x] : {std::pair{"q", &q}, {"k_cache", &k_cache}, {"v_cache", &v_cache}, {"o", &o}}) {
    check.tensor(*x, name, x->dtype, Device::cpu, 4);
  }
  check.require(q.dtype == DType::f32 || q.dtype == DType::f16 || q.dtype == DType::bf16, "q is ", name_of(q.dtype),
                ": it must be float32, float16 or bfloat16");
  check.require(o.dtype == DType::f32 || o.dtype == q.dtype, "o is ", name_of(o.dtype),
                ": it must be float32 or have q's dtype, ", name_of(q.dtype));
  const std::int64_t kv_heads = k_cache.shape[2];
  const bool fits = k_cache.shape[3] == q.shape[3] && v_cache.shape[0] == k_cache.shape[0] &&
                    v_cache.shape[1] == k_cache.shape[1] && v_cache.shape[2] == kv_heads && kv_heads > 0 &&
                    q.shape[2] % kv_heads == 0;
  check.require(fits, "q is ", q, ", k_cache ", k_cache, " and v_cache ", v_cache,
                ": they must be [B, Sq, H, D], [..., Hkv, D] and [..., Hkv, Dv] with H a multiple of Hkv");
  check.require(o.shape[0] == q.shape[0] && o.shape[1] == q.shape[1] && o.shape[2] == q.shape[2] &&
                    o.shape[3] == v_cache.shape[3],
                "o is ", o, ": it must be [B, Sq, H, Dv] of q ", q, " and v_cache ", v_cache);
  check.addressable(o, "o");
  check.not_overlapping(o, "o");
  if (lse.given()) {
    check.tensor(lse, "lse", DType::f32, Device::cpu, 3);
    check.require(lse.shape[0] == q.shape[0] && lse.shape[1] == q.shape[2] && lse.shape[2] == q.shape[1], "lse is ",
                  lse, ": it must be [B, H, Sq] of q, ", q);
    check.addressable(lse, "lse");
    check.not_overlapping(lse, "lse");
  }
  if (options.sink.given()) {
    check.tensor(options.sink, "sink", DType::f32, Device::cpu, 1);
    check.require(options.sink.shape[0] == q.shape[2], "sink is ", options.sink, ": it must be [H], ", q.shape[2]);
    check.addressable(options.sink, "sink");
  }
  check.require(!options.page_table.given() || options.seqused_k.given(),
                "page_table is given without seqused_k: how many keys lie in the pages must be said");
  const std::pair<const char*, bool> of_positions[] = {
      {"causal", options.causal != Causal::none},
      {"a window", options.window_left != -1 || options.window_right != -1},
      {"alibi_slopes", options.alibi_slopes.given()}};
  for (const auto& [name, given] : of_positions) {
    check.require(!given || (options.q_offset.given() && options.key_offset.given()), name,
                  " is given without q_offset and key_offset: a part of the keys does not know where in the sequence "
                  "it lies");
  }
}

// Of the rank's own keys. The sink is in the merge.
AttentionOptions options_of_part(const DecodeOptions& given) {
  AttentionOptions options;
  options.scale = given.scale;
  options.causal = given.causal;
  options.window_left = given.window_left;
  options.window_right = given.window_right;
  options.softcap = given.softcap;
  options.alibi_slopes = given.alibi_slopes;
  options.seqused_k = given.seqused_k;
  options.page_table = given.page_table;
  options.cache_batch_idx = given.cache_batch_idx;
  options.q_offset = given.q_offset;
  options.key_offset = given.key_offset;
  options.key_step = given.key_step;
  options.float32_out = true;
  options.k_scale = given.k_scale;
  options.v_scale = given.v_scale;
  options.force = given.force;
  return options;
}

std::vector<Agreement::Word> words_of(const TensorView& q, const TensorView& v_cache, const DecodeOptions& options) {
  const auto bits = [](float x) { return std::bit_cast<std::int32_t>(x); };
  return {
      {"batch", q.shape[0]},
      {"rows", q.shape[1]},
      {"heads", q.shape[2]},
      {"kv_heads", v_cache.shape[2]},
      {"head_size", q.shape[3]},
      {"head_size_v", v_cache.shape[3]},
      {"dtype", static_cast<std::int64_t>(q.dtype)},
      {"causal", static_cast<std::int64_t>(options.causal)},
      {"window_left", options.window_left},
      {"window_right", options.window_right},
      {"scale", bits(options.scale.value_or(1.0f / std::sqrt(static_cast<float>(q.shape[3])))), Agreement::Shown::f32},
      {"softcap", bits(options.softcap), Agreement::Shown::f32},
      {"alibi_slopes", options.alibi_slopes.given()},
      {"sink", options.sink.given()}};
}

}  // namespace

struct RankDecode::State {
  explicit State(Communicator& of) : communicator(of, "distributed.decode"), agreement(communicator) {}

  Named communicator;
  Agreement agreement;
  Floats own, all;
  WorkspaceBuffer workspace;
};

RankDecode::RankDecode(Communicator& communicator) {
  Check("distributed.decode")
      .require(communicator.device() == Device::cpu, "messages by ", communicator.name(),
               " lie on a GPU: decoding over ranks is on the CPU so far");
  state_ = std::make_unique<State>(communicator);
}

RankDecode::~RankDecode() = default;

void RankDecode::forward(const TensorView& q, const TensorView& k_cache, const TensorView& v_cache, const TensorView& o,
                         const TensorView& lse, const DecodeOptions& options, const Runtime& runtime) {
  check_arguments(q, k_cache, v_cache, o, lse, options);
  State& s = *state_;
  const AttentionOptions of_part = options_of_part(options);
  Runtime of_call = runtime;
  // Asked before ranks are compared: attention's own refusals come before anything is sent.
  of_call.workspace = s.workspace.get(attention_forward_workspace(q, k_cache, v_cache, of_part, runtime));
  s.agreement.require(words_of(q, v_cache, options));

  const Message message{q.shape[0], q.shape[1], q.shape[2], v_cache.shape[3]};
  const std::span<float> own = s.own.get(message.numbers());
  attention_forward(q, k_cache, v_cache, message.o(own.data()), message.lse(own.data()), of_part, of_call);

  const int ranks = s.communicator.size();
  const std::span<float> all = s.all.get(ranks * message.numbers());
  std::vector<std::span<std::byte>> parts;
  std::vector<Partial> partials;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::span<float> part = all.subspan(static_cast<std::size_t>(rank) * own.size(), own.size());
    parts.push_back(std::as_writable_bytes(part));
    partials.push_back({message.o(part.data()), message.lse(part.data())});
  }
  s.communicator.all_gather(std::as_bytes(std::span<const float>(own)), parts, "partial results gathered");

  merge_attention(partials, o, lse, {.sink = options.sink}, runtime);
}

}  // namespace heddle::distributed
