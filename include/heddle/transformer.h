// A Transformer encoder (BERT family: post-norm, learned positions, GELU) over packed sequences, on the CPU.
// Devlin et al., arXiv 1810.04805; mean pooling as in Reimers and Gurevych, arXiv 1908.10084.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "heddle/attention.h"
#include "heddle/runtime.h"
#include "heddle/tensor.h"

namespace heddle {

struct EncoderConfig {
  std::int64_t hidden = 0, layers = 0, heads = 0, intermediate = 0;
  std::int64_t vocabulary = 0, positions = 0, token_types = 0;
  float layer_norm_epsilon = 1e-12f;
};

struct EncoderOptions {
  DType dtype = DType::f32;  // weights and activations: f32 or bf16; layer norms, softmax and sums are f32
  std::string method;        // of attention: "" (flash), "flash" or "baseline"
};

// Per-stage wall time of the last encode() call, seconds.
struct EncoderTimes {
  double embedding = 0, attention = 0, linear = 0, norm_and_activation = 0, pooling = 0;
};

class Encoder {
 public:
  // Reads config.json and model.safetensors of a Hugging Face BERT-family folder. Throws Error when a tensor is missing
  // or has another shape than the configuration says, or holds NaN or infinity, naming file and tensor; RuntimeError
  // when a file cannot be read.
  static Encoder load(const std::string& folder, const EncoderOptions& options = {});

  Encoder(Encoder&&) noexcept;
  Encoder& operator=(Encoder&&) noexcept;
  ~Encoder();

  const EncoderConfig& config() const;
  // Bytes of the weights as held in memory.
  std::size_t weight_bytes() const;

  // Scratch bytes of encode() for `total` tokens in `sequences` sequences of at most `longest` tokens.
  std::size_t workspace(std::int64_t total, std::int64_t sequences, std::int64_t longest,
                        const Runtime& runtime = {}) const;

  // token_ids int32 [total], cu_seqlens int32 [sequences + 1]; writes f32 embeddings [sequences, hidden]: the mean of
  // the last layer's rows, scaled to unit length if `normalize`. `hidden_states`, if given, is f32 [total, hidden]: the
  // last layer's rows. An empty sequence gives zeros. Throws Error for ids outside the vocabulary, sequences longer
  // than the position table and cu_seqlens that do not run from 0 to total.
  void encode(const TensorView& token_ids, const TensorView& cu_seqlens, const TensorView& embeddings,
              const TensorView& hidden_states, bool normalize, const Runtime& runtime,
              EncoderTimes* times = nullptr) const;

 private:
  struct Weights;
  class Call;
  explicit Encoder(std::unique_ptr<Weights> weights);
  std::unique_ptr<Weights> weights_;
};

}  // namespace heddle
