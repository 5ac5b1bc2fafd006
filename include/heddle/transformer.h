// A Transformer encoder (BERT family: post-norm, learned positions, GELU) over packed sequences, on
// the CPU or on a GPU.
// Devlin et al., arXiv 1810.04805; mean pooling as in Reimers and Gurevych, arXiv 1908.10084.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "heddle/attention.h"
#include "heddle/checkpoint.h"
#include "heddle/linear.h"
#include "heddle/runtime.h"
#include "heddle/tensor.h"

namespace heddle {

struct EncoderConfig {
  std::int64_t hidden = 0, layers = 0, heads = 0, intermediate = 0;
  std::int64_t vocabulary = 0, positions = 0, token_types = 0;
  float layer_norm_epsilon = 1e-12f;
};

struct EncoderOptions {
  // Weights and activations: f32 or bf16 on the CPU, f16 or bf16 on a GPU; layer norms, softmax and sums are f32.
  DType dtype = DType::f32;
  std::string method;  // of attention: "" (flash), "flash" or "baseline"
  // The precision of linear layers by name, "encoder.layer.0.attention.self.query", of the first pattern that matches:
  // "float32" or "bfloat16", which products are then taken in, or a low-bit format with or without a rule for its
  // scales ("nvfp4", "int4_g64:mse"; plain where none is said), quantised on load. Layers that no pattern names are in
  // `dtype`, or as the file has them where it has them in a low-bit layout; those may be named "float32" or "bfloat16".
  // On a GPU products that are not low-bit are taken in `dtype`, and a rule may name no other floating-point one.
  std::vector<lowbit::LayerRule> layers = {};
  // Where it runs. cuda: weights are quantised and packed on the CPU and copied, on load, to the GPU that is current
  // then and must be in encode().
  Device device = Device::cpu;
};

// A linear layer as an encoder holds it.
struct EncoderLayerInfo {
  std::string name;
  std::string format;  // "float32", "bfloat16", "float16" or a low-bit format's name
  std::int64_t rows = 0, columns = 0;
  std::size_t weight_bytes = 0;  // with the bias, as packed
  PackingError packing_error;    // what packing changed of its weights, as pack_weights() says: on GPUs alone
};

// Per-stage wall time of the last encode() call, seconds. On the CPU only: on a GPU no stage is waited for.
struct EncoderTimes {
  double embedding = 0, attention = 0, linear = 0, norm_and_activation = 0, pooling = 0;
};

class Encoder {
 public:
  // Reads config.json and model.safetensors of a Hugging Face BERT-family folder, whose linear layers may be in a
  // layout of heddle/checkpoint.h. Throws Error when a tensor is missing or has another shape than the configuration
  // says, or holds NaN or infinity, or cannot have the precision that a rule asks for, naming file and tensor;
  // RuntimeError when a file cannot be read, or there is no GPU to load to.
  static Encoder load(const std::string& folder, const EncoderOptions& options = {});

  Encoder(Encoder&&) noexcept;
  Encoder& operator=(Encoder&&) noexcept;
  ~Encoder();

  const EncoderConfig& config() const;
  Device device() const;
  // Bytes of the weights as held in memory: embeddings, norms and linear layers, packed as they are.
  std::size_t weight_bytes() const;
  // The linear layers, in the order in which they run.
  std::vector<EncoderLayerInfo> layers() const;

  // Scratch bytes of encode() for `total` tokens in `sequences` sequences of at most `longest` tokens.
  std::size_t workspace(std::int64_t total, std::int64_t sequences, std::int64_t longest,
                        const Runtime& runtime = {}) const;

  // token_ids int32 [total], cu_seqlens int32 [sequences + 1]; writes f32 embeddings [sequences, hidden]: the mean of
  // the last layer's rows, scaled to unit length if `normalize`. `hidden_states`, if given, is f32 [total, hidden]: the
  // last layer's rows. An empty sequence gives zeros. Throws Error for ids outside the vocabulary, sequences longer
  // than the position table and cu_seqlens that do not run from 0 to total.
  // On a GPU token_ids and cu_seqlens are still in the host's memory, where they are checked and copied from
  // (page-locked memory as the stream gets there); the outputs are on the GPU, and the call does not wait for
  // Runtime::stream.
  void encode(const TensorView& token_ids, const TensorView& cu_seqlens, const TensorView& embeddings,
              const TensorView& hidden_states, bool normalize, const Runtime& runtime,
              EncoderTimes* times = nullptr) const;

 private:
  friend class EncoderTrials;
  struct Weights;
  class Call;
  class CpuCall;
  class GpuCall;
  explicit Encoder(std::unique_ptr<Weights> weights);
  std::unique_ptr<Weights> weights_;
};

// Precisions chosen by what each layer's costs on sample text.
struct PrecisionOptions {
  // Allowed difference of the embeddings, of unit length, from those in f32: sqrt(sum |e - f|^2 / sum |f|^2).
  double error = 0.05;
  // Those to choose from, beside float32; as EncoderOptions::layers takes them.
  std::vector<std::string> formats = {"nvfp4:mse", "int4_g32:mse", "int8_row", "bfloat16"};
};

struct PrecisionChoice {
  struct Trial {
    std::string layers;  // a pattern: the layer, or "encoder.layer.0.attention.self.*", which have one format
    std::string format;
    std::size_t weight_bytes = 0;
    double error = 0;  // of the embeddings with these layers alone in that format
  };
  std::vector<lowbit::LayerRule> layers;  // for EncoderOptions
  std::vector<Trial> trials;
  double error = 0;              // of the embeddings with all of them: measured, at most the one that was allowed
  std::size_t weight_bytes = 0;  // of the whole encoder then
};

// Tries each format on each layer of the model in `folder` over the packed sample, alone, and takes the smallest
// weights whose squared errors add up to no more than is allowed; then measures all together, and takes less where that
// is more. The sample should be like what will be encoded; the error holds on it.
PrecisionChoice choose_precisions(const std::string& folder, const TensorView& token_ids, const TensorView& cu_seqlens,
                                  const PrecisionOptions& options = {}, const Runtime& runtime = {});

}  // namespace heddle
