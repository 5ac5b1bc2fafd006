// A small causal Transformer over bytes, of random weights, that decodes over a paged cache: RMSNorm in front, grouped
// heads, rotary positions, SwiGLU; float32 but for the weights of its linear layers, which are in a low-bit format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "heddle/heddle.h"

namespace example {

inline constexpr std::int64_t kVocabulary = 256;  // bytes
inline constexpr std::int64_t kPageSize = 16;     // keys
inline constexpr std::int64_t kPrefillRows = 64;  // of a prompt in one call

struct DecoderOptions {
  std::int64_t hidden = 128, layers = 4, heads = 4, kv_heads = 2, intermediate = 256;
  std::int64_t context = 512;   // keys that a sequence may have
  std::int64_t pages = 128;     // of kPageSize keys each, shared by all sequences
  std::int64_t sequences = 16;  // in one call, at most
  std::string format = "int8_row";
  unsigned seed = 0;

  std::int64_t head_size() const { return hidden / heads; }
};

// Memory at multiples of 64 bytes, as packed weights want it.
class AlignedBytes {
 public:
  explicit AlignedBytes(std::int64_t bytes = 0) : lines_(static_cast<std::size_t>((bytes + 63) / 64)) {}
  void* data() { return lines_.data(); }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> lines_;
};

// y = activation(norm(x) W^T) + residual. W is drawn, quantised and packed once.
class LinearLayer {
 public:
  LinearLayer(std::int64_t rows, std::int64_t columns, const DecoderOptions& options, heddle::LinearOptions call,
              std::mt19937& random);
  void forward(const heddle::TensorView& x, const heddle::TensorView& y, const heddle::TensorView& residual,
               heddle::WorkspaceBuffer& buffer) const;

 private:
  AlignedBytes memory_;
  heddle::PackedWeights weights_;
  heddle::LinearOptions call_;
};

// Where a sequence lies in the cache.
struct CachedSequence {
  std::vector<std::int32_t> pages;  // enough for the keys that it will have
  std::int32_t length = 0;          // keys that it has
};

class Decoder {
 public:
  // Allocates all memory that calls need but for workspace. Throws heddle::Error for a shape or a format that the
  // operations do not take.
  explicit Decoder(const DecoderOptions& options);

  const DecoderOptions& options() const { return options_; }

  // Appends the same number of tokens to each sequence; tokens: [sequences, count], count at most kPrefillRows for one
  // sequence and 1 for several. Returns the logits behind the last token of each, [sequences, kVocabulary], valid until
  // the next call. A sequence's logits have the same bits whatever the other sequences are: docs/numerics.md.
  std::span<const float> forward(std::span<const std::uint8_t> tokens, std::span<CachedSequence* const> sequences);

 private:
  struct Layer {
    LinearLayer qkv, out, up, down;
    std::vector<float> keys, values;  // [pages, kPageSize, kv_heads, head_size]
  };
  void attend(Layer& layer, std::int64_t batch, std::int64_t count);

  DecoderOptions options_;
  std::vector<Layer> layers_;
  std::vector<LinearLayer> head_;               // one
  std::vector<float> embedding_;                // [kVocabulary, hidden]
  std::vector<float> cos_, sin_;                // [context, head_size / 2]
  std::vector<std::int32_t> lengths_, table_;   // [sequences], [sequences, pages of a context]
  std::vector<float> x_, qkv_, attended_, up_;  // a row for each token of a call
  std::vector<float> last_, logits_;            // a row for each sequence
  heddle::WorkspaceBuffer buffer_;
};

}  // namespace example
