// Layers of adaptive sparse attention, for inference on the CPU: x + attention(norm(x)), then x + ffn(ffn_norm(x)), in
// which each head attends the tiles of a pattern, or all keys, as its input asks. The C++ twin of heddle.nn.ASAMLayer
// and ASAMEncoder without gradients: the same names of options and weights, and the same results. docs/asam.md has the
// patterns, the gate and what they are made of.
//
// Words: B sequences of T positions, H heads of D elements. Tiles are block_size rows by block_size keys;
// N = ceil(T / block_size).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/runtime.h"
#include "heddle/safetensors.h"
#include "heddle/tensor.h"

namespace heddle {

// The first four are those that pattern logits choose from, in their order; adaptive is that choice.
enum class AsamPattern : std::uint8_t { local, strided, random, clustered, hierarchical, adaptive };
// "local", "strided", ...; Error, listing them, for another.
AsamPattern asam_pattern_named(std::string_view name);
const char* name_of(AsamPattern pattern);

// hard: the pattern or all keys; soft: keys outside the pattern weigh 1 - gate.
enum class AsamGate : std::uint8_t { hard, soft };
// "hard", "soft"; Error, listing them, for another.
AsamGate asam_gate_named(std::string_view name);
const char* name_of(AsamGate gate);

// The fields of heddle.nn.ASAMConfig that inference needs, with its defaults.
struct AsamConfig {
  std::int64_t dim = 512;                            // width of x
  std::int64_t num_heads = 8;                        // H, of queries, keys and values
  std::int64_t dim_head = 64;                        // D, at most 256
  AsamPattern pattern_type = AsamPattern::adaptive;  // adaptive only with use_adaptive_gate
  std::int64_t window_size = 128;                    // of local: keys up to half of it to either side, in whole tiles
  std::int64_t stride = 32;                          // of strided: every stride-th block of keys
  std::int64_t num_clusters = 32;                    // of clustered
  bool use_adaptive_gate = true;                     // whether a gate decides between the pattern and all keys
  std::int64_t gate_hidden_dim = 128;                // width of the gate's layers, at least 2
  bool causal = false;           // a row attends no later position, and its gate, pattern and selection know none
  std::int64_t block_size = 64;  // 16, 32, 64 or 128
  AsamGate gate = AsamGate::hard;
  std::int64_t num_random = 128;                   // of random: keys of a row, in whole blocks
  std::int64_t seed = 42;                          // of random
  std::vector<std::int64_t> scales = {4, 16, 64};  // of hierarchical: 1 to 4 strides in blocks
  std::string compat = {};  // "asam", the public layer's own formulae, is Python's alone and refused; empty: Heddle's
};

// A state dict: tensors by the names that the Python layer's state_dict() has. f32, f16 or bf16 in the CPU's memory,
// any strides.
using AsamState = std::map<std::string, TensorView>;

struct AsamOptions {
  TensorView lengths = {};  // int32 [B]: of each sequence the first so many positions are in use, from 1 to T; else all
};

// What a layer chose, of those that are given; contiguous. All are f32 but `patterns`.
struct AsamInfo {
  TensorView gate_values = {};     // [B, H, T], with a gate
  TensorView confidence = {};      // [B, H], causal [B, H, T], with a gate
  TensorView pattern_logits = {};  // [B, 4], causal [B, T, 4], with a gate: of the first four patterns
  TensorView patterns = {};        // int32 [B, H], causal [B, H, N], where they are chosen: the pattern of each head
  TensorView sparse_ratio = {};  // [1]: the share of pairs that y depends on, of those that causality and lengths leave
};

class AsamLayer {
 public:
  // Weights are copied and packed; nothing of the caller's is kept. Throws Error for a field of the configuration that
  // cannot be, a tensor that is missing, has another shape than the configuration says, is on a GPU or holds what is
  // not finite, and for one that such a layer does not have; RuntimeError where there is no matrix library.
  AsamLayer(const AsamConfig& config, const AsamState& state);
  // Of the tensors whose names begin with `prefix`, "layers.0.", by what follows it.
  AsamLayer(const AsamConfig& config, const SafeTensors& file, const std::string& prefix = "");
  // Of a safetensors file. Throws as SafeTensors::open does, too.
  static AsamLayer load(const AsamConfig& config, const std::string& path, const std::string& prefix = "");
  AsamLayer(AsamLayer&&) noexcept;
  AsamLayer& operator=(AsamLayer&&) noexcept;
  ~AsamLayer();

  const AsamConfig& config() const;
  std::size_t weight_bytes() const;

  // Scratch bytes of forward() for x [batch, length, dim].
  std::size_t workspace(std::int64_t batch, std::int64_t length, const Runtime& runtime = {}) const;
  // x, y: f32 [B, T, dim], B and T from 1 up, rows anywhere, their elements side by side; y may share memory with x.
  // Rows behind a sequence's length are computed like others, over the keys in use. Only what is attended is computed.
  // A sequence's bits do not depend on the other sequences, nor on the number of threads; those of a causal layer's row
  // not on later rows. Throws Error on a bad argument before anything is written.
  void forward(const TensorView& x, const TensorView& y, const AsamOptions& options, const AsamInfo& info,
               const Runtime& runtime) const;

 private:
  friend class AsamEncoder;
  struct Weights;
  class Call;
  explicit AsamLayer(std::unique_ptr<const Weights> weights);
  std::unique_ptr<const Weights> weights_;
};

// Layers one after the other, and a norm.
class AsamEncoder {
 public:
  // As of AsamLayer; the tensors of layer i are named "layers.i.", those of the norm "norm.weight" and "norm.bias".
  AsamEncoder(const AsamConfig& config, std::int64_t num_layers, const AsamState& state);
  AsamEncoder(const AsamConfig& config, std::int64_t num_layers, const SafeTensors& file,
              const std::string& prefix = "");
  static AsamEncoder load(const AsamConfig& config, std::int64_t num_layers, const std::string& path,
                          const std::string& prefix = "");
  AsamEncoder(AsamEncoder&&) noexcept;
  AsamEncoder& operator=(AsamEncoder&&) noexcept;
  ~AsamEncoder();

  std::span<const AsamLayer> layers() const;
  std::size_t weight_bytes() const;

  std::size_t workspace(std::int64_t batch, std::int64_t length, const Runtime& runtime = {}) const;
  // As AsamLayer::forward(). infos: one for each layer, or none.
  void forward(const TensorView& x, const TensorView& y, const AsamOptions& options, std::span<const AsamInfo> infos,
               const Runtime& runtime) const;

 private:
  struct Parts;
  std::unique_ptr<const Parts> parts_;
};

}  // namespace heddle
