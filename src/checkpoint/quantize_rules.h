// Which layers of a checkpoint become what.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "heddle/checkpoint.h"

namespace heddle::lowbit {

// LayerRule::format, understood.
struct LayerChoice {
  enum class Kind : std::uint8_t { keep, sixteen_bits, quantized };
  Kind kind = Kind::keep;
  Format format;
  ScaleRule rule = ScaleRule::plain;
};
// Throws Error for what is no format, or none that a checkpoint's layout holds.
LayerChoice choice_of(const std::string& format, ScaleRule rule);

class LayerChooser {
 public:
  explicit LayerChooser(const QuantizeCheckpointOptions& options);
  LayerChoice choose(const std::string& layer);
  // Throws Error for a rule that no layer has matched.
  void require_all_matched() const;

 private:
  struct Rule {
    std::string pattern;
    LayerChoice choice;
    bool matched;
  };
  std::vector<Rule> rules_;
  LayerChoice others_;
};

// As the shell: "*" for any characters, dots too, "?" for one, "[a-c5]" for one of those, "[!a-c5]" for any other. A
// "[" that nothing closes stands for itself.
bool matches(const std::string& pattern, const std::string& name);

// The name that layers have in common whose products run as one, "model.layers.0.self_attn.{q,k,v}_proj", or the
// layer's own.
std::string fused_name(const std::string& layer);

}  // namespace heddle::lowbit
