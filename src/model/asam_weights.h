// The weights of a layer of adaptive sparse attention as held in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/check.h"
#include "heddle/asam.h"
#include "model/asam_gate.h"
#include "model/asam_patterns.h"
#include "model/asam_state.h"
#include "model/linear.h"
#include "model/transformer_block_weights.h"

namespace heddle {

// Throws Error, naming field, value and rule.
void check_asam_config(const Check& check, const AsamConfig& config);

struct AsamLayer::Weights {
  AsamConfig config;
  HeldNorm norm, ffn_norm;
  FloatLinear qkv, out, up, down;
  std::optional<AsamGateWeights> gate;
  AsamSelectionWeights selection;

  // Reads the tensors whose names begin with `prefix`.
  static std::unique_ptr<const Weights> make(const Check& check, const AsamConfig& config, AsamStateReader& state,
                                             const std::string& prefix = "");
  std::int64_t inner() const { return config.num_heads * config.dim_head; }
  std::size_t bytes() const;
};

}  // namespace heddle
