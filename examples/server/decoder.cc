#include "decoder.h"

#include <algorithm>
#include <cmath>

namespace example {
namespace {

using heddle::DType, heddle::TensorView;

std::vector<float> drawn(std::int64_t count, float deviation, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

TensorView matrix(const std::vector<float>& values, std::int64_t rows, std::int64_t columns) {
  return {values.data(), DType::f32, {rows, columns}};
}

std::int64_t pages_of(std::int64_t keys) { return (keys + kPageSize - 1) / kPageSize; }

}  // namespace

LinearLayer::LinearLayer(std::int64_t rows, std::int64_t columns, const DecoderOptions& options,
                         heddle::LinearOptions call, std::mt19937& random)
    : call_(std::move(call)) {
  // Twice the usual deviation, so that attention and logits are far from uniform.
  const auto values = drawn(rows * columns, 2.0f / std::sqrt(static_cast<float>(columns)), random);
  auto plain = heddle::lowbit::storage(heddle::lowbit::format_named(options.format), rows, columns);
  std::vector<AlignedBytes> parts;
  for (TensorView* part : {&plain.codes, &plain.scales, &plain.zeros, &plain.global_scale}) {
    if (!part->given()) continue;
    parts.emplace_back(part->elements() * static_cast<std::int64_t>(heddle::size_of(part->dtype)));
    part->data = parts.back().data();
  }
  heddle::lowbit::quantize(matrix(values, rows, columns), {}, plain);
  weights_ = heddle::packed_storage(plain.format, rows, columns, call_.activation == heddle::Activation::swiglu);
  memory_ = AlignedBytes(weights_.data.shape[0]);
  weights_.data.data = memory_.data();
  heddle::pack_weights(plain, weights_);
}

void LinearLayer::forward(const TensorView& x, const TensorView& y, const TensorView& residual,
                          heddle::WorkspaceBuffer& buffer) const {
  heddle::LinearOptions call = call_;
  call.residual = residual;
  heddle::linear_forward(x, weights_, y, call, {}, [&](std::size_t bytes) { return buffer.get(bytes); });
}

Decoder::Decoder(const DecoderOptions& options) : options_(options) {
  const auto& o = options_;
  std::mt19937 random(o.seed);
  heddle::LinearOptions plain, behind_norm, gated;
  behind_norm.norm = gated.norm = heddle::Norm::rms_norm;
  gated.activation = heddle::Activation::swiglu;
  const std::int64_t qkv_columns = (o.heads + 2 * o.kv_heads) * o.head_size();
  const auto cache = static_cast<std::size_t>(o.pages * kPageSize * o.kv_heads * o.head_size());
  for (std::int64_t i = 0; i < o.layers; ++i) {
    layers_.push_back({.qkv = {qkv_columns, o.hidden, o, behind_norm, random},
                       .out = {o.hidden, o.hidden, o, plain, random},
                       .up = {2 * o.intermediate, o.hidden, o, gated, random},
                       .down = {o.hidden, o.intermediate, o, plain, random},
                       .keys = std::vector<float>(cache),
                       .values = std::vector<float>(cache)});
  }
  head_.emplace_back(kVocabulary, o.hidden, o, behind_norm, random);
  embedding_ = drawn(kVocabulary * o.hidden, 1.0f, random);
  for (std::int64_t position = 0; position < o.context; ++position) {
    for (std::int64_t i = 0; i < o.head_size() / 2; ++i) {
      const double pair = -2.0 * static_cast<double>(i) / static_cast<double>(o.head_size());
      const double angle = static_cast<double>(position) * std::pow(10000.0, pair);
      cos_.push_back(static_cast<float>(std::cos(angle)));
      sin_.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  const std::int64_t rows = std::max(o.sequences, kPrefillRows);
  const auto reserve = [](std::vector<float>& values, std::int64_t count) {
    values.resize(static_cast<std::size_t>(count));
  };
  reserve(x_, rows * o.hidden);
  reserve(qkv_, rows * qkv_columns);
  reserve(attended_, rows * o.hidden);
  reserve(up_, rows * o.intermediate);
  reserve(last_, o.sequences * o.hidden);
  reserve(logits_, o.sequences * kVocabulary);
  lengths_.resize(static_cast<std::size_t>(o.sequences));
  table_.resize(static_cast<std::size_t>(o.sequences * pages_of(o.context)));
}

// From the rows of qkv_ to those of attended_: the new keys go to the cache, and queries attend all of their sequence.
void Decoder::attend(Layer& layer, std::int64_t batch, std::int64_t count) {
  const auto& o = options_;
  const std::int64_t head = o.head_size(), row = (o.heads + 2 * o.kv_heads) * head;
  const auto heads = [&](std::int64_t first, std::int64_t number) {
    return TensorView(qkv_.data() + first * head, DType::f32, {batch, count, number, head},
                      {count * row, row, head, 1});
  };
  const TensorView q = heads(0, o.heads), k = heads(o.heads, o.kv_heads), v = heads(o.heads + o.kv_heads, o.kv_heads);
  const TensorView keys(layer.keys.data(), DType::f32, {o.pages, kPageSize, o.kv_heads, head});
  const TensorView values(layer.values.data(), DType::f32, {o.pages, kPageSize, o.kv_heads, head});
  const TensorView out(attended_.data(), DType::f32, {batch, count, o.heads, head});
  const heddle::Rotary rotary{.cos = matrix(cos_, o.context, head / 2), .sin = matrix(sin_, o.context, head / 2)};
  heddle::AttentionOptions options;
  options.causal = heddle::Causal::bottom_right;
  options.seqused_k = TensorView(lengths_.data(), DType::i32, {batch});
  options.page_table = TensorView(table_.data(), DType::i32, {batch, pages_of(o.context)});
  heddle::Runtime runtime;
  runtime.workspace =
      buffer_.get(heddle::attention_with_kv_cache_workspace(q, k, v, keys, values, rotary, options, runtime));
  heddle::attention_with_kv_cache(q, k, v, keys, values, out, {}, rotary, options, runtime);
}

std::span<const float> Decoder::forward(std::span<const std::uint8_t> tokens,
                                        std::span<CachedSequence* const> sequences) {
  const auto& o = options_;
  const auto batch = static_cast<std::int64_t>(sequences.size());
  const std::int64_t rows = static_cast<std::int64_t>(tokens.size()), count = rows / batch;
  for (std::int64_t i = 0; i < rows; ++i) {
    std::copy_n(embedding_.begin() + tokens[i] * o.hidden, o.hidden, x_.begin() + i * o.hidden);
  }
  // Entries behind a sequence's own pages are never used; they are some page's number all the same.
  std::fill(table_.begin(), table_.end(), 0);
  for (std::int64_t b = 0; b < batch; ++b) {
    lengths_[b] = sequences[b]->length;
    std::ranges::copy(sequences[b]->pages, table_.begin() + b * pages_of(o.context));
  }
  const TensorView x = matrix(x_, rows, o.hidden), up = matrix(up_, rows, o.intermediate);
  const TensorView qkv = matrix(qkv_, rows, (o.heads + 2 * o.kv_heads) * o.head_size());
  for (Layer& layer : layers_) {
    layer.qkv.forward(x, qkv, {}, buffer_);
    attend(layer, batch, count);
    layer.out.forward(matrix(attended_, rows, o.hidden), x, x, buffer_);
    layer.up.forward(x, up, {}, buffer_);
    layer.down.forward(up, x, x, buffer_);
  }
  for (std::int64_t b = 0; b < batch; ++b) {
    sequences[b]->length += static_cast<std::int32_t>(count);
    std::copy_n(x_.begin() + ((b + 1) * count - 1) * o.hidden, o.hidden, last_.begin() + b * o.hidden);
  }
  head_.front().forward(matrix(last_, batch, o.hidden), matrix(logits_, batch, kVocabulary), {}, buffer_);
  return {logits_.data(), static_cast<std::size_t>(batch * kVocabulary)};
}

}  // namespace example
