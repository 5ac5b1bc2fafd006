// Tensors of a state dict, taken by name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <set>
#include <string>
#include <vector>

#include "core/check.h"
#include "heddle/asam.h"
#include "model/linear.h"
#include "model/transformer_block_weights.h"

namespace heddle {

constexpr double kAsamNormEps = 1e-5;        // of torch's LayerNorm
constexpr std::int64_t kAsamHeadSize = 256;  // elements of a head at most
constexpr std::int64_t kAsamChoices = 4;     // patterns that logits choose from

class AsamStateReader {
 public:
  AsamStateReader(const Check& check, const AsamState& state) : check_(check), state_(state) {}

  // Of that shape, all finite, in their natural order.
  std::vector<float> values(const std::string& name, std::initializer_list<std::int64_t> shape);
  // "name.weight" [out, in], and "name.bias" [out] if there is to be one.
  FloatLinear linear(const std::string& name, std::int64_t out, std::int64_t in, bool bias = true);
  HeldNorm norm(const std::string& name, std::int64_t size);
  // A tensor that may be there and is not read.
  void leave(const std::string& name) { known_.insert(name); }
  // Throws for tensors that nobody asked for. of: what the state dict is of.
  void require_no_others(const char* of) const;

 private:
  const Check& check_;
  const AsamState& state_;
  std::set<std::string> known_;
};

// The tensors of a file whose names begin with `prefix`, by what follows it.
AsamState asam_state(const Check& check, const SafeTensors& file, const std::string& prefix);

}  // namespace heddle
