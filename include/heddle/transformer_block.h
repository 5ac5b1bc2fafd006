// A Transformer block over packed sequences, on the CPU or on a GPU: attention and a feed-forward network, each with a
// norm and a residual, its four linear layers each in a precision of its own. docs/transformer_block.md has the
// formulas.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "heddle/attention.h"
#include "heddle/checkpoint.h"
#include "heddle/linear.h"
#include "heddle/runtime.h"
#include "heddle/tensor.h"
#include "heddle/transformer.h"

namespace heddle::distributed {
class TensorParallelBlock;
}  // namespace heddle::distributed

namespace heddle {

struct TransformerBlockOptions {
  std::int64_t hidden = 0, heads = 0;  // a head has hidden / heads elements, at most 256
  std::int64_t kv_heads = 0;           // of keys and values, a divisor of heads; 0: heads
  std::int64_t intermediate = 0;       // columns between up and down, after the activation
  Norm norm = Norm::layer_norm;        // or rms_norm
  float eps = 1e-5f;                   // of the norms: finite, >= 0
  bool norm_first = true;              // x + f(norm(x)); else norm(x + f(x))
  Activation activation = Activation::gelu_erf;
  Causal causal = Causal::none;  // a sequence attends itself alone, so that top_left and bottom_right are the same
  // Of activations: f32 or bf16 on the CPU, f16 or bf16 on a GPU; softmax, norms and sums are f32 or f64.
  DType dtype = DType::f32;
  // The precision of the layers "qkv", "out", "up" and "down", as EncoderOptions::layers has it: "float32", "bfloat16"
  // (on a GPU `dtype` alone) or a low-bit format, with or without a rule for its scales. Layers that no pattern matches
  // are in `dtype`.
  std::vector<lowbit::LayerRule> layers = {};
  // Where it runs. cuda: weights are quantised and packed on the CPU and copied, on construction, to the GPU that is
  // current then and must be in forward(). hidden, intermediate and the rows of qkv are multiples of 8 there.
  Device device = Device::cpu;
};

// f32, f16 or bf16, in the CPU's memory, any strides. Biases and the norms' parameters are rounded to the block's
// dtype, weights to what their layer has.
struct TransformerBlockWeights {
  TensorView qkv;   // [(heads + 2 kv_heads) * head, hidden]: queries, keys, values, head after head
  TensorView out;   // [hidden, hidden]
  TensorView up;    // [intermediate, hidden]; with swiglu [2 intermediate, hidden], gate and up rows in turn
  TensorView down;  // [hidden, intermediate]
  TensorView qkv_bias, out_bias, up_bias, down_bias;  // [rows of the layer], or not given
  TensorView norm1, norm2;                            // [hidden]: of attention, of the feed-forward network
  TensorView norm1_bias, norm2_bias;                  // [hidden], or not given; of layer_norm alone
};

class TransformerBlock {
 public:
  // Weights are copied, quantised and packed; nothing of the caller's is kept. Throws Error for a tensor that is
  // missing, has another shape than the options say, is on a GPU or holds what is not finite, for a format that a
  // layer does not fit, and for a pattern that decides over no layer; RuntimeError for a layer in floats on the CPU
  // where there is no matrix library, and where there is no GPU to copy to.
  TransformerBlock(const TransformerBlockOptions& options, const TransformerBlockWeights& weights);
  TransformerBlock(TransformerBlock&&) noexcept;
  TransformerBlock& operator=(TransformerBlock&&) noexcept;
  ~TransformerBlock();

  const TransformerBlockOptions& options() const;
  // qkv, out, up and down, each with the norm in front of it.
  std::vector<EncoderLayerInfo> layers() const;
  std::size_t weight_bytes() const;

  // Scratch bytes of forward() for `total` rows in `sequences` sequences of at most `longest` rows.
  std::size_t workspace(std::int64_t total, std::int64_t sequences, std::int64_t longest,
                        const Runtime& runtime = {}) const;

  // x, y: [total, hidden] of the block's dtype, rows anywhere, their elements side by side; y may be x. cu_seqlens:
  // int32 [sequences + 1], from 0 to total, never decreasing. longest: no sequence has more rows; 0: not given. A row's
  // bits do not depend on the other sequences, nor on the number of threads. Throws Error on a bad argument before
  // anything is written.
  // On a GPU all three tensors are on it, x's and y's rows at multiples of 16 bytes. The host does not read cu_seqlens:
  // `longest` must be given where there are rows, and rows that are in no sequence, or behind so many of theirs, get
  // any values. The call does not wait for Runtime::stream and can be captured in a graph. It repeats to the bit; the
  // number of rows may change a row's bits.
  void forward(const TensorView& x, const TensorView& cu_seqlens, const TensorView& y, const Runtime& runtime,
               std::int64_t longest = 0) const;

 private:
  friend class distributed::TensorParallelBlock;
  struct Weights;
  class CpuCall;
  class GpuCall;
  std::unique_ptr<const Weights> weights_;
};

}  // namespace heddle
